"""Runs of a team for tests, with accidents: what ranks do that `teams.py` started."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from cold_start import configured
from runs import quiet
from safetensors.torch import load_file
from torch import Tensor

from groupwise.optim.learner import Learner
from groupwise.parallel.world import World
from groupwise.sync.shards import Writers
from groupwise.training import loop
from groupwise.watch.clock import Clock

PHASES = ("rollout", "grade", "score", "update", "checkpoint")


def run(world: World, model: str, folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A run of all ranks, or the next part of one."""
    return loop.train(configured(model, **changes), folder, quiet())


def differing(world: World, model: str, folder: str, changes: list[dict[str, Any]]) -> Any:
    """The same, with settings of each rank's own."""
    return run(world, model, folder, changes[world.rank])


def elsewhere(world: World, folder: str, changes: dict[str, Any]) -> Any:
    """The same, with a disk of each rank's own, on which its files lie."""
    before = os.getcwd()
    os.chdir(f"{folder}/disk_{world.rank}")
    try:
        return run(world, "model", f"{folder}/run", changes)
    finally:
        os.chdir(before)


def dying(
    world: World, model: str, folder: str, changes: dict[str, Any], rank: int, phase: str
) -> Any:
    """The same; one rank is killed in a phase of its second step."""
    if world.rank == rank:
        _at(phase, lambda: os.kill(os.getpid(), signal.SIGKILL))
    return run(world, model, folder, changes)


def out_of_memory(world: World, model: str, folder: str, changes: dict[str, Any], rank: int) -> Any:
    """The same; a rank's memory fails in an update."""

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    if world.rank == rank:
        work = Learner.work

        def failing(self: Any, doing: str, *given: Any, **named: Any) -> Any:
            for each in work(self, doing, *given, **named):
                if doing == "updating" and self.world.size > 1:
                    fail()
                yield each

        Learner.work = failing  # type: ignore[method-assign]
    try:
        return run(world, model, folder, changes)
    finally:
        if world.rank == rank:
            Learner.work = work  # type: ignore[method-assign]


def dying_at(
    world: World, model: str, folder: str, changes: dict[str, Any], rank: int, event: int
) -> Any:
    """The same; one rank is killed at so many events behind its start: phases, and writes."""
    left = {"events": event}

    def count() -> None:
        left["events"] -= 1
        if left["events"] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if world.rank == rank:
        for phase in PHASES:
            _at(phase, count, step=0)
    return run(world, model, folder, changes)


def full_disk(world: World, model: str, folder: str, changes: dict[str, Any], rank: int) -> Any:
    """The same; a rank has no room for its part of the second checkpoint."""

    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    write, seen = FileSystemWriter.write_data, {"times": 0}

    def failing(self: Any, *given: Any) -> Any:
        seen["times"] += 1
        if seen["times"] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *given)

    if world.rank == rank:
        FileSystemWriter.write_data = failing  # type: ignore[method-assign]
    try:
        return run(world, model, folder, changes)
    finally:
        FileSystemWriter.write_data = write  # type: ignore[method-assign]


def lost_in_a_save(
    world: World, model: str, folder: str, changes: dict[str, Any], rank: int
) -> Any:
    """The same; what fails on a rank is not what others hear of: its memory, say."""

    def fail() -> None:
        raise MemoryError("no memory for a plan of what to write")

    save = Writers._save
    if world.rank == rank:
        _at("checkpoint", fail)
    try:
        return run(world, model, folder, changes)
    finally:
        Writers._save = save  # type: ignore[method-assign]


def hanging(
    world: World, model: str, folder: str, changes: dict[str, Any], rank: int, phase: str
) -> Any:
    """The same; one rank does not come back from a phase until another has given up."""
    over = Path(folder).with_name("over")

    def hang() -> None:
        while not over.exists():
            time.sleep(0.1)

    if world.rank == rank:
        _at(phase, hang)
    try:
        return run(world, model, folder, changes)
    finally:
        over.touch()


def asked_to_stop(world: World, model: str, folder: str, changes: dict[str, Any], rank: int) -> Any:
    """The same; one rank alone is asked to end, in its first update."""
    before = Clock.__call__
    if world.rank == rank:
        _at("update", lambda: os.kill(os.getpid(), signal.SIGTERM), step=1)
    try:
        return run(world, model, folder, changes)
    except loop.Stopped as stopped:
        return str(stopped)
    finally:
        Clock.__call__ = before  # type: ignore[method-assign]


def _at(phase: str, act: Callable[[], None], step: int = 2) -> None:
    """Do something when this phase comes for the second time; at `step` 0, whenever it does."""
    seen = {"times": 0}

    def noted(name: str) -> None:
        seen["times"] += name == phase
        if name == phase and step in (0, seen["times"]):
            act()

    if phase == "checkpoint":
        save = Writers._save

        def saving(self: Any, *given: Any) -> Any:
            noted("checkpoint")
            return save(self, *given)

        Writers._save = saving  # type: ignore[method-assign]
        return
    timed = Clock.__call__

    @contextmanager
    def timing(self: Clock, name: str) -> Any:
        with timed(self, name):
            noted(name)
            yield

    Clock.__call__ = timing  # type: ignore[method-assign]


def weights(folder: Path) -> dict[str, Tensor]:
    """The policy of the last checkpoint."""
    return load_file((folder / "checkpoints" / "latest").resolve() / "model.safetensors")


def apart(a: Path, b: Path) -> float:
    """How far two runs' weights are from each other, at most."""
    one, other = weights(a), weights(b)
    return max(float((x - other[name]).abs().max()) for name, x in one.items())
