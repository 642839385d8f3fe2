"""A Ray cluster of two nodes on this machine, with jobs that are launched on it, for tests.

    python ray_cluster.py FOLDER

Run by a Python that has `ray`, which need not be the one that runs the tests. Prints one JSON
object: what became of each job.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from groupwise.errors import RunError
from groupwise.parallel.launchers import on_ray
from groupwise.parallel.launchers.job import RankJob, Servers

ROOT = Path(__file__).resolve().parents[2]
# What a rank says of where it is, and whether it reaches the servers that it was told of.
RANK = """
import json, os, sys, urllib.request
found = [urllib.request.urlopen(url, timeout=20).status for url in json.loads(sys.argv[1])]
said = {"size": os.environ["WORLD_SIZE"], "found": found, "urls": sys.argv[1]}
open(os.path.join(sys.argv[2], "rank" + os.environ["RANK"]), "w").write(json.dumps(said))
"""
FAILING = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(600)
"""


def tried(job: RankJob) -> Any:
    try:
        return on_ray.run(job)
    except RunError as error:
        return str(error)


def comes(so: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether it becomes so, before long."""
    end = time.monotonic() + seconds
    while not so() and time.monotonic() < end:
        time.sleep(0.1)
    return so()


def processes_of(folder: Path) -> list[str]:
    """Ranks and servers that still run: their commands name the folder."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = each.read_bytes().decode(errors="replace").split("\0")
            if any(word.startswith(f"{folder}/") for word in words):
                found.append(" ".join(words))
    return found


def jobs(folder: Path, python: str) -> dict[str, RankJob]:
    (folder / "rank.py").write_text(RANK)
    (folder / "failing.py").write_text(FAILING)
    model = ["model.device=cpu", "steps=2", "tiny.cold_start_steps=20", "eval.tasks=8"]
    config = str(ROOT / "configs" / "tiny.toml")
    base = RankJob("t", (), ranks=1, nodes=2, gpus=False, folder=folder, python=python)
    server = (python, "-m", "http.server", "{port}", "--directory", str(folder))
    train = ("-m", "groupwise", "train", config, *model, f"run={folder / 'run'}")
    return {
        "train": replace(base, words=train),
        "served": replace(base, words=(str(folder / "rank.py"), "{urls}", str(folder)),
                          servers=Servers(2, server)),
        "failing": replace(base, words=(str(folder / "failing.py"),)),
        "mute": replace(base, words=(str(folder / "rank.py"), "{urls}", str(folder)),
                        servers=Servers(1, (python, "-c", "raise SystemExit(4)", "{port}"))),
        "many nodes": replace(base, nodes=3),
        "many cores": replace(base, ranks=3),
        "many servers": replace(base, servers=Servers(7, server)),
        "gpus": replace(base, gpus=True),
    }  # fmt: skip


def main(folder: Path) -> None:
    import ray
    from ray.cluster_utils import Cluster

    os.environ["OMP_NUM_THREADS"] = "1"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=True)
    try:
        found = {name: tried(job) for name, job in jobs(folder, sys.executable).items()}
        found["freed"] = comes(lambda: ray.available_resources().get("CPU") == 4.0)
        found["ended"] = comes(lambda: not processes_of(folder))
    finally:
        ray.shutdown()
        cluster.shutdown()
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
