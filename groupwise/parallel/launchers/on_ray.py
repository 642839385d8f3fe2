"""Ranks and servers on a Ray cluster: Ray says which machine has room, and torchrun does the rest.

Ray places processes and nothing else: ranks talk to each other as they do everywhere. What does not
fit the cluster is refused before anything is placed, because Ray would wait for it without a word.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from groupwise.errors import RunError
from groupwise.parallel.launchers.job import RankJob, Servers, threads

PLACING = 120.0  # seconds for Ray to find room that it says it has
STARTING = 1800.0  # seconds for a server to answer: it may load a large model
ENDING = 60.0  # seconds for processes that were asked to end
LOOK = 0.5  # seconds between two looks at what was started
PORT = "{port}"
UNDER = "what the cluster has free now is {there}"


class Holder:
    """A process of Ray on one machine that starts others there, and ends them with itself."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> tuple[str, int]:
        """Return this machine's address and a port that is free there."""
        import ray.util

        with socket.socket() as free:
            free.bind(("", 0))
            return str(ray.util.get_node_ip_address()), int(free.getsockname()[1])

    def start(self, words: Sequence[str], folder: str, variables: Mapping[str, str]) -> None:
        """Start a command in a group of its own. Its output is this process's, which Ray shows."""
        self._process = subprocess.Popen(
            list(words), cwd=folder, env={**os.environ, **variables}, start_new_session=True
        )

    def status(self) -> int | None:
        """Return the status that it ended with; None while it goes on."""
        return None if self._process is None else self._process.poll()

    def end(self) -> int | None:
        """Ask it to end, wait, and end it."""
        if self._process is None or self._process.poll() is not None:
            return self.status()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(ENDING)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        return self.status()


def run(job: RankJob, address: str = "auto") -> int:
    """Place servers and ranks, wait for the ranks, and end all; return the ranks' status."""
    ray = _ray()
    mine = not ray.is_initialized()
    if mine:
        _join(ray, address)
    try:
        with _room(ray, needs(job)) as places:
            return _run_in(ray, job, places)
    finally:
        if mine:
            ray.shutdown()


def needs(job: RankJob) -> dict[str, list[dict[str, float]]]:
    """Return what is to be placed: a bundle for the ranks of each node, and one for each server."""
    each = {"GPU": float(job.ranks)} if job.gpus else {}
    ranks = [{"CPU": float(job.ranks), **each}] * job.nodes
    servers = job.servers
    if servers is None:
        return {"ranks": ranks}
    own = {"GPU": float(servers.gpus)} if servers.gpus else {}
    return {"ranks": ranks, "servers": [{"CPU": 1.0, **own}] * servers.count}


def text(job: RankJob) -> str:
    """Return in words what would be placed, and the commands."""
    lines = []
    for what, bundles in needs(job).items():
        room = ", ".join(f"{count:g} {kind}" for kind, count in bundles[0].items())
        apart = ", each on a node of its own" if what == "ranks" and job.nodes > 1 else ""
        lines.append(f"{len(bundles)} x {room} for {what}{apart}")
    if job.servers is not None:
        lines.append("servers: " + " ".join(job.servers.words))
    lines.append("ranks: " + " ".join(_node(job, 0, "FIRST", 0)))
    return "\n".join(lines)


def _run_in(ray: Any, job: RankJob, places: Mapping[str, Any]) -> int:
    holders: list[Any] = []

    def hold(what: str, number: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = needs(job)[what][number]
        made = ray.remote(Holder).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0.0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=places[what], placement_group_bundle_index=number
            ),
        )
        holders.append(made.remote())
        return holders[-1]

    try:
        if job.servers is not None:
            beside = [hold("servers", number) for number in range(job.servers.count)]
            job = job.with_addresses(_serve(ray, job, job.servers, beside))
        nodes = [hold("ranks", number) for number in range(job.nodes)]
        host, port = ray.get(nodes[0].address.remote())
        for number, node in enumerate(nodes):
            words = _node(job, number, host, port)
            ray.get(node.start.remote(words, str(job.folder), threads(job)))
        return _wait(ray, nodes)
    finally:
        ending = [holder.end.remote() for holder in holders]
        ray.wait(ending, num_returns=len(ending), timeout=2 * ENDING) if ending else None
        for holder in holders:
            ray.kill(holder)


def _node(job: RankJob, number: int, host: str, port: int) -> list[str]:
    where = ["--master-addr", host, "--master-port", str(port)]
    return job.torchrun("--nnodes", str(job.nodes), "--node-rank", str(number), *where)


def _serve(ray: Any, job: RankJob, servers: Servers, holders: Sequence[Any]) -> list[str]:
    """Start the servers, and return their addresses once each of them answers."""
    urls = []
    for holder in holders:
        host, port = ray.get(holder.address.remote())
        words = [word.replace(PORT, str(port)) for word in servers.words]
        ray.get(holder.start.remote(words, str(job.folder), {}))
        urls.append(f"http://{host}:{port}")
    end = time.monotonic() + STARTING
    for url, holder in zip(urls, holders, strict=True):
        while not _answers(url):
            status = ray.get(holder.status.remote())
            if status is not None:
                raise RunError(
                    f"The server for {url} ended with status {status} before it answered. Its own "
                    f"words stand above; its command is: {' '.join(servers.words)}"
                )
            if time.monotonic() > end:
                raise RunError(f"The server at {url} does not answer after {STARTING:g} s.")
            time.sleep(LOOK)
    return urls


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:  # it has no page there, and says so
        return True
    except OSError:
        return False


def _wait(ray: Any, nodes: Sequence[Any]) -> int:
    """Return the first status that is not 0, or 0 when all nodes are through."""
    while True:
        try:
            found = ray.get([node.status.remote() for node in nodes])
        except ray.exceptions.RayActorError as error:
            raise RunError(
                "A machine of the Ray cluster is gone, and its ranks with it: "
                f"{str(error).splitlines()[0]} The same command goes on from the last checkpoint."
            ) from error
        bad = next((status for status in found if status), None)
        if bad is not None:
            return int(bad)
        if None not in found:
            return 0
        time.sleep(LOOK)


@contextmanager
def _room(
    ray: Any, wanted: Mapping[str, Sequence[Mapping[str, float]]]
) -> Iterator[dict[str, Any]]:
    """Hold room for all of it, or say what is short."""
    from ray.util.placement_group import placement_group, remove_placement_group

    _check_room(ray, wanted)
    places: dict[str, Any] = {}
    try:
        for what, bundles in wanted.items():
            apart = "STRICT_SPREAD" if what == "ranks" and len(bundles) > 1 else "PACK"
            places[what] = placement_group([dict(each) for each in bundles], strategy=apart)
            if not places[what].wait(PLACING):
                raise RunError(
                    f"Ray found no room for {what} ({_words(bundles)}) within {PLACING:g} s; "
                    f"{UNDER.format(there=ray.available_resources())}."
                )
        yield places
    finally:
        for place in places.values():
            remove_placement_group(place)


def _check_room(ray: Any, wanted: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Refuse what the cluster could not hold if it were empty of others."""
    nodes = [each["Resources"] for each in ray.nodes() if each["Alive"]]
    ranks = wanted["ranks"]
    large = [each for each in nodes if all(each.get(k, 0.0) >= x for k, x in ranks[0].items())]
    if len(large) < len(ranks):
        raise RunError(
            f"The Ray cluster has {len(large)} machines with room for {_words(ranks[:1])}, and "
            f"{len(ranks)} are asked for (of {len(nodes)} in all). Ask for fewer with --nodes and "
            "--ranks, or start Ray on more machines."
        )
    bundles = [each for many in wanted.values() for each in many]
    for kind in sorted({kind for each in bundles for kind in each}):
        asked = sum(each.get(kind, 0.0) for each in bundles)
        there = sum(each.get(kind, 0.0) for each in nodes)
        if asked > there:
            raise RunError(
                f"Ranks and servers need {asked:g} {kind}, and the Ray cluster has {there:g} in "
                "all. Ask for fewer, or start Ray on more machines."
            )


def _words(bundles: Sequence[Mapping[str, float]]) -> str:
    return ", ".join(
        " and ".join(f"{count:g} {kind}" for kind, count in each.items()) for each in bundles
    )


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise RunError(
            "Ray is not installed. Install it on every machine of the cluster with `pip install "
            "ray`, or launch without it: --on machine, --on slurm."
        ) from error


def _join(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise RunError(
            f"No Ray cluster answers at {address!r}: {str(error).splitlines()[0]} Start one with "
            "`ray start --head`, and `ray start --address=HEAD:6379` on the other machines."
        ) from error
