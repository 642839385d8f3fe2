"""Processes that are the ranks of a team, for tests: started once, and given work many times.

They come from a process that has imported everything before, so a rank costs little. Work is a
function of a module, called with the world and what is passed on; it returns what can be saved.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import multiprocessing
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

LIMIT = 120.0  # seconds that ranks wait for each other: never reached, unless something hangs
PRELOADED = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "groupwise.training.loop",
]


class Ranks:
    """Up to `most` ranks. A rank that is killed is gone for good.

    Those that are not `lasting` end when their work fails, as processes of their own do.
    """

    def __init__(self, most: int, lasting: bool = True) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        # Where ranks meet, as long as one of them may hold on to it.
        self.folder, self.meetings = tempfile.mkdtemp(prefix="ranks_"), itertools.count()
        self.ends: list[Any] = []
        self.processes = []
        for rank in range(most):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, lasting), daemon=True)
            process.start()
            theirs.close()
            self.ends.append(mine)
            self.processes.append(process)

    def run(
        self, size: int, work: Callable[..., Any], *given: Any, limit: float = LIMIT
    ) -> list[Any]:
        """What each rank of a team of this size returns; a failure of one is raised here."""
        found = self.try_to(size, work, *given, limit=limit)
        failed = [each for each in found if isinstance(each, Failure)]
        dead = [rank for rank, each in enumerate(found) if each is None]
        assert not dead, f"ranks {dead} died: {[each.exitcode for each in self.processes]}"
        if failed:  # those that lost the others come last
            raise AssertionError(min(failed, key=lambda each: "gloo" in each.said).text)
        return found

    def try_to(
        self, size: int, work: Callable[..., Any], *given: Any, limit: float = LIMIT
    ) -> list[Any]:
        """The same, failures in their places; None of a rank that died."""
        meeting = f"{self.folder}/{next(self.meetings)}"
        for end in self.ends[:size]:
            end.send((size, meeting, work, given, limit))
        return [_heard(end) for end in self.ends[:size]]

    def close(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.send(None)
        for process in self.processes:
            process.join(20)
        shutil.rmtree(self.folder, ignore_errors=True)


class Failure:
    """How a rank's work failed."""

    def __init__(self, error: Exception) -> None:
        self.kind, self.said = type(error).__name__, str(error)
        self.told = getattr(error, "told", False)  # by another rank, to the same people
        self.text = "".join(traceback.format_exception(error))


@contextlib.contextmanager
def ranks(most: int, lasting: bool = True) -> Iterator[Ranks]:
    made = Ranks(most, lasting)
    try:
        yield made
    finally:
        made.close()


def _heard(end: Any) -> Any:
    try:
        return torch.load(io.BytesIO(end.recv_bytes()), weights_only=False)
    except EOFError:
        return None


def _serve(rank: int, end: Any, lasting: bool) -> None:
    import torch.distributed as dist

    from groupwise.parallel.team import Team

    torch.set_num_threads(1)
    while (asked := end.recv()) is not None:
        size, meeting, work, given, limit = asked
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(size)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(meeting, size),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=limit),
            )
            world = Team(limit)
            found = work(world, *given)
            world.close()
        except Exception as error:
            found = Failure(error)
        sent = io.BytesIO()
        torch.save(found, sent)
        end.send_bytes(sent.getvalue())
        if isinstance(found, Failure) and not lasting:
            os._exit(1)
        if dist.is_initialized():
            dist.destroy_process_group()
