"""Shards in a checkpoint: every rank writes its own, by PyTorch's distributed checkpoint.

They go into `resume/`, beside what the first rank writes, and are read back by any number of ranks:
a tensor that was written in two parts is found again in three, or in one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import RunError
from groupwise.model.formats.checkpoint import Part
from groupwise.parallel.sharding import own_part, part, sharded_like
from groupwise.parallel.shards import is_shard
from groupwise.parallel.world import World

Tensors = dict[str, dict[str, Tensor]]
INDEX = ".metadata"  # of a distributed checkpoint


class NotWritten(OSError):
    """A rank could not write its part, and all ranks know."""


class Writers:
    """The threads of all ranks that write one checkpoint: the first rank's says where."""

    def __init__(self, world: Any) -> None:
        self._world = world

    def write(self, folder: Path, shards: Mapping[str, Tensor]) -> None:
        """Write all ranks' shards; the first rank calls it, others are in `follow`."""
        self._tell(str(folder))
        self._save(folder, shards)

    @contextmanager
    def led(self, shared: bool) -> Iterator[None]:
        """Let the other ranks' threads end behind this: all is written, or can't be."""
        try:
            yield
        finally:
            if shared:
                self._tell(None)

    def follow(self, shards: Mapping[str, Tensor]) -> None:
        """Write this rank's shards wherever the first rank says, until it dismisses this one."""
        while (folder := self._tell(None)) is not None:
            try:
                self._save(Path(folder), shards)
            except (
                NotWritten
            ):  # the first rank says it; whatever else it is, this one is on its own
                continue

    def _tell(self, folder: str | None) -> str | None:
        import torch.distributed as dist

        said = [folder]
        dist.broadcast_object_list(said, src=0, group=self._world.writers)
        return said[0]

    def _save(self, folder: Path, shards: Mapping[str, Tensor]) -> None:
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_saver import save

        try:
            with warnings.catch_warnings(action="ignore"):
                save(dict(shards), checkpoint_id=folder, process_group=self._world.writers)
        except CheckpointException as error:
            rank, why = next(iter(error.failures.items()))
            raise NotWritten(f"rank {rank} could not write its part: {why[0]}") from error


def split(tensors: Mapping[str, Mapping[str, Tensor]]) -> tuple[Tensors, dict[str, Tensor]]:
    """Return what one process can write, and shards under the names `kind/name`."""
    whole: Tensors = {kind: {} for kind in tensors}
    shards: dict[str, Tensor] = {}
    for kind, named in tensors.items():
        for name, x in named.items():
            if is_shard(x):
                shards[f"{kind}/{name}"] = x
            else:
                whole[kind][name] = x
    return whole, shards


def shards_part(world: Any, shards: Mapping[str, Tensor], writers: Writers) -> Part:
    """Return the part of a checkpoint that all ranks write: here are this one's tensors."""
    own = {name: part(x.detach()) for name, x in shards.items()}

    def on_host(copies: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: world.on_host(shards[name], x) for name, x in copies.items()}

    def write(folder: Path, copies: Mapping[str, Tensor]) -> None:
        if world.leads:
            writers.write(folder, on_host(copies))
        else:
            writers.follow(on_host(copies))

    return Part(own, write)


def read(folder: Path, found: Tensors, wanted: Tensors, world: World) -> Tensors:
    """Return a checkpoint's tensors as this rank holds them: those of `wanted` that are there.

    `found` are those of its files that every rank reads; shards are added, and cut anew.
    """
    made = {kind: dict(named) for kind, named in found.items()}
    for kind, named in wanted.items():
        for name, like in named.items():
            whole = found.get(kind, {}).get(name)
            if whole is not None and is_shard(like) and whole.shape == like.shape:
                made[kind][name] = sharded_like(like, own_part(like, whole).to(part(like).device))
    if (folder / INDEX).is_file():
        for name, x in _read_shards(folder, wanted, world).items():
            kind, _, inner = name.partition("/")
            made.setdefault(kind, {})[inner] = x
    return made


def _read_shards(folder: Path, wanted: Tensors, world: Any) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(folder)
    stored: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    asked = {f"{kind}/{name}": x for kind, named in wanted.items() for name, x in named.items()}
    made: dict[str, Tensor] = {}
    for name, entry in stored.items():
        like = asked.get(name)
        if like is not None and is_shard(like) and like.shape == entry.size:
            made[name] = world.on_host(like, torch.empty_like(part(like), device="cpu"))
        else:  # whole: the run of one process, or what does not belong here, which is said later
            made[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    try:
        with warnings.catch_warnings(action="ignore"):
            if world.size == 1:
                load(made, storage_reader=reader, no_dist=True)
            else:
                load(made, storage_reader=reader, process_group=world.words)
    except CheckpointException as error:
        raise RunError(f"The shards in {folder} can't be read: {error}") from error
    return made
