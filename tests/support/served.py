"""Engines whose servers are stand-ins, for tests: a tiny policy, its folder, requests."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engine_zoo import ALPHABET
from fake_engine_server import FakeServer
from model_zoo import make, sequences

from groupwise.config import EngineSettings
from groupwise.engine.backends import EngineSetup, backend
from groupwise.engine.protocol import Request, Sampling
from groupwise.engine.servers.engine import ServerEngine
from groupwise.model.adapters import peft_files
from groupwise.model.adapters.lora import attach
from groupwise.model.adapters.targets import Spec
from groupwise.model.formats.checkpoint import Loaded, save
from groupwise.model.formats.tokenizer import Tokenizer, character_files
from groupwise.records import Completion
from groupwise.sync.publish import Publisher

SAMPLING = Sampling(max_tokens=6)


@functools.cache
def folder(name: str = "smollm2") -> Path:
    """The folder of a random model, written once."""
    place = Path(tempfile.mkdtemp(prefix="served_")) / name
    save(make(name), place, character_files(ALPHABET))
    return place


def loaded(name: str = "smollm2", *, adapted: bool = False) -> Loaded:
    """The same model, to be learned."""
    model, files = make(name), character_files(ALPHABET)
    if adapted:
        spec = Spec(rank=2, alpha=4.0, targets="all", rslora=False)
        attach(model, spec, seed=1)
        files[peft_files.CONFIG] = peft_files.config_bytes(model, spec, "base", 0.0)
    return Loaded(model, Tokenizer.from_files(character_files(ALPHABET)), files)


def engine(
    policy: Loaded, behind: Sequence[FakeServer], said: list[str] | None = None, **changes: Any
) -> ServerEngine:
    kind = behind[0].kind
    settings = EngineSettings(
        **({"backend": kind, "urls": tuple(x.url for x in behind), "timeout": 20.0} | changes)
    )
    told = said if said is not None else []
    setup = EngineSetup(
        policy, settings, 7, lambda kind, text: told.append(text), weights=Publisher(policy)
    )
    made = backend(kind).made(setup)
    assert isinstance(made, ServerEngine)
    return made


def requests(count: int = 4, samples: int = 2) -> list[Request]:
    rows = sequences([4 + n % 3 for n in range(count)], seed=5)
    return [Request(tuple(row.tolist()), samples, prompt_id=n, draw=0)
            for n, row in enumerate(rows)]  # fmt: skip


@torch.no_grad()
def learn(policy: Loaded, amount: float = 0.05) -> None:
    """Move all that learns, as an update does."""
    generator = torch.Generator().manual_seed(int(amount * 1e6))
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * amount)


def ids(groups: Sequence[Sequence[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[each.token_ids for each in group] for group in groups]
