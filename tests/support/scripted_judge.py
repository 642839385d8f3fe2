"""An engine that answers as the native one does, and judges by a script.

A judgement's score is that of the last digit of the answer between the boundaries (0 to 5, half of
it), with one judgement in three that is talk and no verdict.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from groupwise.config import EngineSettings
from groupwise.engine.backends import EngineSetup
from groupwise.engine.batch import BatchEngine
from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.protocol import Capabilities, Request, Sampling
from groupwise.records import Completion

RESPONSE = re.compile(r"RESPONSE:\nBEGIN (\w+)\n(.*?)\nEND \1", re.DOTALL)
TALK = "A fine answer, I think. Score: 5"


class Scripted(BatchEngine):
    """Answers of the native engine; judgements of the script."""

    def __init__(self, setup: EngineSetup) -> None:
        self.inner = NativeEngine.made(setup)
        self.capabilities = self.inner.capabilities
        self.asked: list[tuple[Request, Sampling]] = []

    @classmethod
    def capabilities_for(cls, settings: EngineSettings) -> Capabilities:
        return NativeEngine.capabilities_for(settings)

    @property
    def source(self) -> Any:
        return self.inner.source

    def sync(self, version: int) -> None:
        super().sync(version)
        self.inner.sync(version)

    def answer(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        if not requests[0].stream.startswith("judge "):
            return self.inner.generate(requests, sampling)
        self.asked += [(request, sampling) for request in requests]
        return [[self.judged(request, n) for n in range(request.samples)] for request in requests]

    def judged(self, request: Request, number: int) -> Completion:
        tokenizer = self.inner.tokenizer
        found = RESPONSE.search(tokenizer.decode(request.prompt))
        assert found is not None
        ids = tokenizer.encode(self.said_of(found[2], number))
        ids.append(tokenizer.eos_ids[0])
        return Completion(tuple(ids), torch.zeros(len(ids)), "eos", self.inner.source.version)

    def said_of(self, answer: str, number: int) -> str:
        """Return the judgement of that number."""
        return TALK if number % 3 == 2 else verdict(min(points(answer) + number, 5))


class Flattering(Scripted):
    """Thinks the same of everything."""

    def said_of(self, answer: str, number: int) -> str:
        return verdict(5)


def verdict(score: int) -> str:
    return f'Let me see.\n{{"score": {score}}}'


def points(answer: str) -> int:
    digits = [int(x) for x in answer if x.isdigit()]
    return digits[-1] // 2 if digits else 0
