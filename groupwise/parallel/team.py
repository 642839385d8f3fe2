"""Ranks that learn together, one batch at a time: each has all rows and does part of the work.

All ranks run the same program on the same batch. What is drawn, graded, decided by a clock or read
from a file is the first rank's (`first`); passes over rows are dealt out, and what they found comes
back to all (`merge`, `total`). So nothing that looks at a whole batch knows of ranks.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import socket
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
from torch import Tensor, nn

from groupwise.errors import ConfigError, GroupwiseError, RunError
from groupwise.parallel.beats import Beats
from groupwise.parallel.sharding import checksum, sharded
from groupwise.parallel.started import ranks_here
from groupwise.parallel.world import ALONE, A, B, M, PassTurn, T, World

DEADLINE = 1800.0  # seconds that ranks wait for each other
# Of a device's memory that sums of whole gradients may take, so that ranks add up once an update;
# a larger model's are added up behind every pass.
HELD = 1 / 8
SHOWN = 4  # things that ranks differ in
# How errors of the libraries begin that carry what ranks say to each other.
BROKEN = (
    "gloo",
    "NCCL",
    "Connection closed by peer",
    "Timed out",
    "Broken pipe",
    "Connection reset",
)


class Team(World):
    """The ranks of torchrun. Words go by gloo, weights and gradients by what the device has."""

    def __init__(self, deadline: float = DEADLINE) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        self._dist = dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.deadline = deadline
        store = dist.distributed_c10d._get_default_store()
        self.beats = Beats(
            store.clone() if hasattr(store, "clone") else store, self.rank, self.size
        )
        limit = timedelta(seconds=deadline)
        self.words = dist.new_group(backend="gloo", timeout=limit)
        # Checkpoints are written by a thread beside training, and agree in a group of their own.
        self.writers = dist.new_group(backend="gloo", timeout=limit)
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        self.room = float(torch.cuda.mem_get_info()[1]) if kind == "cuda" else math.inf
        self._mesh = init_device_mesh(kind, (self.size,))
        self._host_mesh = init_device_mesh("cpu", (self.size,))
        self._sharded: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()
        # Since they were last asked for: seconds for other ranks, and what each had to read.
        self._waited, self._load = 0.0, [0] * self.size
        self._gathered = 0.0  # seconds of bringing whole weights together
        self._named = 0  # blocks of `naming` that are open, one in another
        # Where the head is asked for nothing but log-probabilities they are a view; no one adds
        # to it in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

    @property
    def alive(self) -> bool:
        """Tell whether it gives signs of life, among ranks that are still connected."""
        return self.beats.going and self._dist.is_initialized()

    def close(self) -> None:
        """Give no more signs of life; the process group is whoever's made it."""
        self.beats.end()

    # --- work ---

    def for_rows(self, rows: int) -> World:
        return ALONE  # every rank has them all

    def shard(self, model: M) -> M:
        if model not in self._sharded:
            self.same({"the weights of a model": checksum(model)})
            made = sharded(model, self._mesh)
            for parameter in made.parameters():  # for what lies on the host: sharded_like
                parameter.host_mesh = self._host_mesh  # type: ignore[attr-defined]
            self._sharded[model] = made
        return cast(M, self._sharded[model])

    def deal(self, costs: Sequence[int]) -> list[PassTurn]:
        """Give the dearest passes away first, each to the rank with the least so far."""
        if not costs:
            return []
        load, hands = [0] * self.size, [list[int]() for _ in range(self.size)]
        most = -(-len(costs) // self.size)
        for number in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
            free = [rank for rank in range(self.size) if len(hands[rank]) < most]
            rank = min(free, key=lambda r: (load[r], r))
            hands[rank].append(number)
            load[rank] += costs[number]
        self._load = [before + more for before, more in zip(self._load, load, strict=True)]
        mine = sorted(hands[self.rank])
        cheapest = min(range(len(costs)), key=lambda n: (costs[n], n))
        turns = [PassTurn(number) for number in mine]
        turns += [PassTurn(cheapest, counts=False)] * (most - len(mine))
        return [*turns[:-1], turns[-1]._replace(last=True)]

    def on_host(self, like: Tensor, mine: Tensor) -> Tensor:
        """Return a tensor sharded `like` another, of which this rank's part lies on the host."""
        from torch.distributed.tensor import DTensor

        held: Any = like
        return DTensor.from_local(
            mine, self._host_mesh, held.placements, shape=held.shape, stride=held.stride()
        )

    def begin(self, turn: PassTurn) -> None:
        for model in self._sharded.values():
            holds = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
            whole_sums = holds <= HELD * self.room
            cast(Any, model).set_requires_gradient_sync(turn.last or not whole_sums)

    def merge(self, mine: Mapping[int, T]) -> list[T]:
        # As torch.save writes it: tensors of any device arrive on the host.
        sent = io.BytesIO()
        torch.save(dict(mine), sent)
        every: dict[int, T] = {}
        for found in self._everybodys(sent.getvalue()):
            every |= torch.load(io.BytesIO(found), map_location="cpu", weights_only=False)
        return [every[number] for number in sorted(every)]

    def total(self, x: Tensor) -> Tensor:
        summed = x.detach().clone()
        with self._waiting():
            self._dist.all_reduce(summed)
        return summed

    # --- decisions ---

    def first(self, compute: Callable[[], T]) -> T:
        found = _tried(compute) if self.leads else [None, None]
        with self._waiting():
            self._dist.broadcast_object_list(found, src=0, group=self.words)
        value, error = found
        if error is not None:
            raise error if self.leads else _told(error)
        return cast(T, value)

    def together(self, compute: Callable[[], T]) -> T:
        value, error = _tried(compute)
        for rank, theirs in enumerate(self._everybodys(error)):
            if theirs is not None:
                raise theirs if rank == self.rank else _told(theirs)
        return cast(T, value)

    def any(self, flag: bool) -> bool:
        return any(self._everybodys(flag))

    def led(self, lead: Callable[[Callable[[A], B]], T], work: Callable[[A], B]) -> T:
        if not self.leads:
            while (told := self.first(_only_told))[0]:
                work(told[1])
            return cast(T, told[1])
        working = False

        def with_all(given: A) -> B:
            nonlocal working
            self.first(lambda: (True, given))
            working = True
            found = work(given)
            working = False
            return found

        try:
            made = lead(with_all)
        except Exception as error:
            if working:  # it met all ranks, or they will miss this one
                raise
            failed = error
            return self.first(lambda: _raise(failed))
        return self.first(lambda: (False, made))[1]

    def same(self, facts: Mapping[str, Any]) -> None:
        every = self._everybodys(dict(facts))
        told = []
        for name in dict.fromkeys(name for each in every for name in each):
            found = [repr(each[name]) if name in each else "nothing" for each in every]
            rank = next((rank for rank, theirs in enumerate(found) if theirs != found[0]), 0)
            if rank:
                told.append(f"{name}: rank {rank} has {found[rank]}, rank 0 has {found[0]}")
        if told:
            more = f"; and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
            error = ConfigError(
                f"Ranks differ in {'; '.join(told[:SHOWN])}{more}. All ranks must be started with "
                "the same command, from the same files: put the run, the model and the data on a "
                "disk that all machines see."
            )
            error.told = not self.leads
            raise error

    # --- what people see ---

    def measures(self) -> dict[str, float]:
        waited = self._everybodys(self._waited)
        found = {f"time/rank_wait_{rank}": seconds for rank, seconds in enumerate(waited)}
        if any(self._load):
            found["time/rank_imbalance"] = max(self._load) * self.size / sum(self._load)
        gathered = max(self._everybodys(self._gathered))
        if gathered:
            found["time/rank_gather"] = gathered
        self._waited, self._load, self._gathered = 0.0, [0] * self.size, 0.0
        return found

    @contextmanager
    def gathering(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._gathered += time.perf_counter() - begun

    @contextmanager
    def naming(self, doing: Callable[[], str]) -> Iterator[None]:
        """Say who is gone, and in which phase, when ranks can't go on together."""
        outer, self.beats.doing = self.beats.doing, doing
        self._named += 1
        try:
            yield
        except GroupwiseError as error:
            self.beats.leave_word(str(error))
            raise
        except RuntimeError as error:
            if not _is_broken(error):
                self.beats.leave_word(f"{type(error).__name__}: {error}")
                raise
            raise self._why(error, doing()) from error
        finally:
            self._named, self.beats.doing = self._named - 1, outer
            if not self._named:
                self.beats.end()

    def _why(self, error: RuntimeError, doing: str) -> RunError:
        try:
            silent, words = self.beats.silent(), self.beats.words()
            places = self.beats.places()
        except Exception:  # the store went with the rank that is gone
            silent, words, places = {}, {}, {}
        words.pop(self.rank, None)
        if words:
            rank, text = next(iter(words.items()))
            return self._by_one(f"rank {rank} of {self.size} ended: {text}", words)
        gone = [f"rank {rank} of {self.size} is gone, while {at}" for rank, at in silent.items()]
        what = "; ".join(gone) or (
            f"the ranks did not come together within {self.deadline:g} s, or lost their connection"
            + "".join(f"; rank {rank} was at: {at}" for rank, at in places.items())
        )
        text = (
            f"{what} (rank {self.rank}, while {doing}: {str(error).splitlines()[0]}). The run is "
            "as it was saved last; the same command goes on with it."
        )
        return self._by_one(text, silent)

    def _by_one(self, text: str, gone: Mapping[int, str]) -> RunError:
        """Return an error that the first rank which is left tells people of."""
        error = RunError(text)
        error.told = any(rank not in gone for rank in range(self.rank))
        return error

    def _everybodys(self, x: T) -> list[T]:
        found: list[Any] = [None] * self.size
        with self._waiting():
            self._dist.all_gather_object(found, x, group=self.words)
        return found

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - begun


def meeting_place() -> str:
    """Return where the ranks meet, as they were told."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def joined(deadline: float = DEADLINE) -> World:
    """Return the world that this process was started in: by torchrun, or alone.

    A team is one as long as its signs of life go on: a stage of a pipeline finds the pipeline's.
    """
    global _team
    if ranks_here() == 1:
        return ALONE
    import torch.distributed as dist

    if _team is not None and _team.alive:
        return _team

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        both = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(both, timeout=timedelta(seconds=deadline))
        except (RuntimeError, ValueError) as error:
            raise RunError(
                f"rank {os.environ.get('RANK')} could not meet the others at {meeting_place()} "
                f"({socket.gethostname()}): {str(error).splitlines()[0]}. Another program may have "
                "the port: give torchrun another --master-port, or --standalone on one machine."
            ) from error
    _team = Team(deadline)
    return _team


_team: Team | None = None


def _tried(compute: Callable[[], Any]) -> list[Any]:
    """Return what it computes and None, or None and what it raised, if that can be sent."""
    try:
        return [compute(), None]
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return [None, RunError(f"{type(error).__name__}: {error}")]
        return [None, error]


def _raise(error: Exception) -> Any:
    raise error


def _only_told() -> Any:
    """Stand for what the first rank alone says."""


def _told(error: Exception) -> Exception:
    """Mark an error as one that another rank tells people of."""
    if isinstance(error, GroupwiseError):
        error.told = True
    return error


def _is_broken(error: RuntimeError) -> bool:
    return any(word in str(error) for word in BROKEN) or "Dist" in type(error).__name__
