"""Kills a run before and after every call that changes the disk, and starts it again.

    python benchmarks/crashes.py [--every N] [--runs NAME ...]

A run goes on from its first step, makes the next ones and ends: of a policy alone, of one whose
critic is taught alone at first, of one with an implicit reward model, of a reward model, and of a
process reward model's adapter. It dies by SIGKILL at each call of
fsync, rename, replace, link, symlink, unlink, mkdir and rmdir in turn: of the start, of the step's
records, of the checkpoint and of the end. Held means: a good checkpoint is there all the time, the
next start makes the run what it would have been, to the bit, with its report and its links, and
nothing half written is left. A table is printed; minutes on one core.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from groupwise.config import Config, load
from groupwise.sync import saver
from groupwise.sync.checkpoints import newest
from groupwise.training import loop
from groupwise.watch.display import Display

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
import scorers

CALLS = ("fsync", "rename", "replace", "link", "symlink", "unlink", "mkdir", "rmdir")
PHASES = ("start", "records", "save", "finish")
SETTINGS: dict[str, Any] = {
    "prompts_per_step": 2,
    "model.device": "cpu",
    "model.dtype": "float32",
    "model.threads": 1,
    "eval.every": 1,
    "eval.tasks": 8,
    "checkpoint.every_steps": 1,
    "checkpoint.keep": 1,
    "steps": 2,
}
POLICY: dict[str, Any] = {
    "group_size": 4,
    "tiny.width": 16,
    "tiny.layers": 1,
    "tiny.heads": 2,
    "tiny.cold_start_steps": 60,
    "tiny.cold_start_batch": 32,
    "data.options": {"digits": 1},
    "engine.max_tokens": 4,
}
RUNS: dict[str, dict[str, Any]] = {
    "policy": POLICY | {"recipe": "dr_grpo", "recipe.aggregation.length": 4},
    "critic": POLICY | {"recipe": "ppo", "recipe.shaping": "", "critic.alone_steps": 2, "steps": 3},
    "prime": POLICY | {"recipe": "prime"},
    "reward_model": {"recipe": "reward_model", "data.holdout_share": 0.4},
    "process_reward_model": {
        "recipe": "process_reward_model",
        "data.holdout_share": 0.4,
        "adapter.rank": 2,
    },
}


class Tried(NamedTuple):
    """How many crash points a phase has, and after how many of them the run was whole."""

    run: str
    phase: str
    tried: int
    held: int


def sweep(run: str, every: int = 1, tell: Callable[[str], None] = print) -> list[Tried]:
    """Kill at every call (or every nth one), before and after it; what did not hold is told."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="groupwise_crashes_") as place:
        base, whole = Path(place) / "base", Path(place) / "whole"
        config = configured(run, Path(place))
        with contextlib.closing(loop.steps(config, base, quiet())) as going:
            next(going), next(going)
        shutil.copytree(base, whole, symlinks=True)
        phases = phases_of(config, whole)
        tried, held = Counter[str](), Counter[str]()
        for number in range(0, len(phases), every):
            for moment in ("before", "after"):
                folder = Path(place) / "killed"
                shutil.copytree(base, folder, symlinks=True)
                why = crash(config, folder, number, moment == "after")
                why = why or what_is_wrong(config, folder, whole)
                shutil.rmtree(folder)
                tried[phases[number]] += 1
                held[phases[number]] += not why
                if why:
                    tell(f"{run}: {phases[number]}, {moment} call {number}: {why}")
    return [Tried(run, phase, tried[phase], held[phase]) for phase in PHASES]


def configured(run: str, place: Path) -> Config:
    """Return the configuration of a run; models that score get a start and rows in this folder."""
    settings = SETTINGS | RUNS[run]
    if settings["recipe"] not in ("reward_model", "process_reward_model"):
        return load(settings)
    dice = random.Random(0)
    rows = [
        {"prompt": f"say {n}: ", "chosen": f"z{dice.random():.3f}", "rejected": "a"}
        if settings["recipe"] == "reward_model"
        else {"prompt": f"say {n}: ", "completions": ["x", "y"], "labels": [True, n % 2 == 0]}
        for n in range(20)
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {
        "model.path": str(scorers.folder_of(place / "start")),
        "data.train": str(place / "rows.jsonl"),
    }
    return load(settings | own)


def quiet() -> Display:
    return Display(io.StringIO(), live=False)


def phases_of(config: Config, folder: Path) -> list[str]:
    """To the end without a kill: the phase of each call, in order."""
    out, into = os.pipe()

    def work() -> None:
        seen: list[str] = []
        with watched(lambda phase, call: (seen.append(phase), call())):
            loop.train(config, folder, quiet())
        os.write(into, json.dumps(seen).encode())

    code = in_child(work)
    os.close(into)
    with open(out, "rb") as pipe:
        found: list[str] = json.load(pipe)
    assert code == 0
    return found


def crash(config: Config, folder: Path, number: int, after: bool) -> str:
    """Go on in a process that dies at a call; what is wrong with how it ended, or ""."""

    def work() -> None:
        count = 0

        def dying(phase: str, call: Callable[[], object]) -> None:
            nonlocal count
            count += 1
            if count - 1 == number:
                if after:
                    call()
                os.kill(os.getpid(), signal.SIGKILL)
            call()

        with watched(dying):
            loop.train(config, folder, quiet())

    code = in_child(work)
    return "" if code in (-signal.SIGKILL, 0) else f"it failed by itself ({code})"


def what_is_wrong(config: Config, folder: Path, whole: Path) -> str:
    """Of a run that was killed, before and after it is started again; "" if nothing is."""
    if newest(folder / "checkpoints") is None:
        return "no checkpoint is left"
    if in_child(lambda: loop.train(config, folder, quiet())) != 0:
        return "it can't be started again"
    if not (folder / "report.html").is_file():
        return "there is no report"
    left = [str(x.relative_to(folder)) for x in folder.rglob(".*") if x.name != ".lock"]
    if left:
        return f"left behind: {', '.join(left)}"
    for name, value in remains(whole).items():
        if remains(folder).get(name) != value:
            return f"{name} is not what it would have been"
    return ""


def remains(folder: Path) -> dict[str, Any]:
    """What a run must be in the end, whatever happened to it on the way."""
    checkpoints, clock = folder / "checkpoints", ("time/", "memory/", "seconds")

    def lines(name: str) -> list[dict[str, Any]]:
        read = map(json.loads, (folder / name).read_text().splitlines())
        return [{k: x for k, x in line.items() if not k.startswith(clock)} for line in read]

    found: dict[str, Any] = {name: lines(name) for name in ("metrics.jsonl", "evaluations.jsonl")}
    found["events.jsonl"] = [(e["step"], e["kind"], e["text"]) for e in lines("events.jsonl")]
    summary = json.loads((folder / "summary.json").read_text())
    found["summary.json"] = {k: x for k, x in summary.items() if not k.startswith(clock)}
    found["checkpoints"] = sorted(path.name for path in checkpoints.iterdir())
    for link in ("latest", "best"):
        place = checkpoints / link
        found[link] = os.readlink(place) if place.is_symlink() else None
    files = [*folder.glob("rollouts/*"), *checkpoints.glob("step_*/**/*.safetensors")]
    return found | {str(path.relative_to(folder)): path.read_bytes() for path in files}


@contextlib.contextmanager
def watched(at: Callable[[str, Callable[[], object]], object]) -> Iterator[None]:
    """Hand every call that changes the disk to `at`, with its phase; in a process of its own."""
    phase = ["start"]

    def during(name: str, real: Callable[..., Any], then: str) -> Callable[..., Any]:
        def entered(*args: Any, **kwargs: Any) -> Any:
            phase[0] = name
            try:
                return real(*args, **kwargs)
            finally:
                phase[0] = then

        return entered

    def asked(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = []
            at(phase[0], lambda: result.append(real(*args, **kwargs)))
            return result[0]

        return call

    for name in CALLS:
        setattr(os, name, asked(getattr(os, name)))
    loop.begin = during("records", loop.begin, "records")
    saver.write = during("save", saver.write, "records")
    loop.finish = during("finish", loop.finish, "finish")
    yield


def in_child(work: Callable[[], object]) -> int:
    """Do something in a process of its own; returns how that ended."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # nothing may get back into the parent's code
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each Nth call only")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[*RUNS])
    given = parser.parse_args()
    print("| run | phase | crash points | held |\n|---|---|---|---|")
    for run in given.runs:
        for each in sweep(run, given.every):
            print(f"| {run} | {each.phase} | {each.tried} | {each.held} |", flush=True)


if __name__ == "__main__":
    main()
