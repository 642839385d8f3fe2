"""The seam of inference servers: what engines ask of one, whatever it is called there."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from groupwise.engine.protocol import Sampling
from groupwise.engine.servers.link import Link, PendingCall, ServerFailed
from groupwise.engine.servers.weights import Ids
from groupwise.errors import EngineError

LOOK_SECONDS = 10.0  # for what a server knows by heart
LOOKING = "asking what it can do"
Body = dict[str, Any]


@dataclass(frozen=True)
class Ask:
    """One sample, as a server is asked for it."""

    prompt: Ids
    most: int  # tokens
    least: int
    sampling: Sampling
    seed: int
    salt: str  # of the cache: what one version computed is of no use to the next
    ends: Ids  # tokens that end an answer
    begun: int = 0  # tokens of the answer that the prompt ends in


@dataclass(frozen=True)
class ServerReply:
    """A server's answer: ids, their log-probabilities, why it ended, by which weights."""

    ids: Ids
    logps: Sequence[float]
    finish: str
    version: str | None = None  # of the weights, where a server says so with every answer


@dataclass(frozen=True)
class Facts:
    """Facts that a server tells of itself before anybody relies on it."""

    model: str
    context: int  # tokens that it holds of one sequence; 0: it does not say


class InferenceServer(ABC):
    """One server. Waits have deadlines, and errors say what was waited for."""

    kind: ClassVar[str]
    product: ClassVar[str]  # as people call it
    key_variable: ClassVar[str]
    flags: ClassVar[str]  # what it must be started with

    def __init__(self, url: str, seconds: float) -> None:
        self.link, self.seconds = Link(url, self.key_variable), seconds
        self.facts = Facts("", 0)
        self.paths: dict[str, Any] = {}  # the calls that it lists

    def described(self, call: str) -> Any:
        """Return its own description of its calls; refuse one that lists no such `call`."""
        page = self.link.get("/openapi.json", seconds=LOOK_SECONDS, doing=LOOKING)
        paths = member(page, "paths")
        if not isinstance(paths, dict) or call not in paths:
            raise EngineError(
                f"{self.url} answers, and is no {self.product}: it lists no call {call}. Another "
                f"program may have that port; give the address of a server of {self.product} in "
                "engine.urls."
            )
        self.paths = paths
        return page

    @property
    def url(self) -> str:
        return self.link.url

    @abstractmethod
    def look(self, carrier: str) -> Facts:
        """Return what it says of itself; refuse one that lacks what is needed."""

    @abstractmethod
    def generate(self, ask: Ask, call: PendingCall) -> ServerReply:
        """Return one sample."""

    @abstractmethod
    def score(self, ids: Ids, salt: str) -> Tensor:
        """Return the log-probability of every token but the first, at temperature 1."""

    @abstractmethod
    def pause(self) -> None:
        """Stop writing, and drop what is under way."""

    @abstractmethod
    def resume(self) -> None:
        """Write again."""

    @abstractmethod
    def clear(self) -> None:
        """Forget what was computed of earlier sequences."""

    @abstractmethod
    def take_folder(self, place: Path, version: str) -> None:
        """Take the weights of a folder."""

    @abstractmethod
    def take_adapter(self, place: Path, version: str) -> None:
        """Put an adapter in the place of the one before."""

    @property
    @abstractmethod
    def swaps_adapters(self) -> bool:
        """Tell whether it takes adapters while it runs."""

    @abstractmethod
    def says(self, version: str) -> None:
        """Tell it which version its weights are, where it keeps that."""

    @abstractmethod
    def version(self) -> str | None:
        """Return the version that it says it has; None where it does not say."""

    def logps(self, found: Sequence[Any], what: str) -> list[float]:
        """Read log-probabilities; refuse a server that leaves one out."""
        if any(not isinstance(x, int | float) or isinstance(x, bool) for x in found):
            raise ServerFailed(f"{self.url} gives no log-probability for some tokens of {what}")
        return [float(x) for x in found]

    def scored(self, found: Sequence[Any], ids: Ids) -> Tensor:
        """Read the scores of a sequence: one for every token but the first, all finite."""
        logps = self.logps(found, "the probe")
        if len(logps) != len(ids) - 1 or not all(map(math.isfinite, logps)):
            raise ServerFailed(
                f"{self.url} scores {len(ids) - 1} tokens of the probe with {len(logps)} numbers, "
                f"{sum(map(math.isfinite, logps))} of them finite: its weights hold NaN or "
                "infinity, or it is another protocol"
            )
        return torch.tensor(logps, dtype=torch.float64)


def member(found: Any, *path: str | int) -> Any:
    """Return what lies at a path in JSON; None where something else does."""
    for step in path:
        if isinstance(step, str) and isinstance(found, Mapping):
            found = found.get(step)
        elif isinstance(step, int) and isinstance(found, list) and len(found) > step:
            found = found[step]
        else:
            return None
    return found


def ids_of(found: Any) -> Ids | None:
    """Return token ids; None where a list of something else stands in their place."""
    if isinstance(found, list) and all(type(x) is int for x in found):
        return tuple(found)
    return None
