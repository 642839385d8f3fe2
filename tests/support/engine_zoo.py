"""Small engines and what their log-probabilities must equal, shared by the tests of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from model_zoo import make, sequences
from torch import Tensor

from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.protocol import Request, Sampling
from groupwise.model.formats.tokenizer import Tokenizer, character_files
from groupwise.model.layers.attention import packed, packed_positions
from groupwise.model.layers.head import log_probs
from groupwise.model.layers.transformer import Transformer
from groupwise.records import Completion

ALPHABET = "".join(map(chr, range(32, 127))) + "é"  # 96 characters and the end: the models' 97


def tokenizer(eos_ids: Sequence[int] = ()) -> Tokenizer:
    backend = Tokenizer.from_files(character_files(ALPHABET)).backend
    return Tokenizer(backend, eos_ids=eos_ids, pad_id=0)


def engine(
    model: Transformer | str = "smollm2", *, slots: int = 8, eos: Sequence[int] = (), **options: Any
) -> NativeEngine:
    model = make(model) if isinstance(model, str) else model
    return NativeEngine(model, tokenizer(eos), slots=slots, **({"seed": 7} | options))


def request(length: int = 5, samples: int = 2, number: int = 0, **options: Any) -> Request:
    (row,) = sequences([length], seed=100 + number)
    return Request(tuple(row.tolist()), samples, **({"prompt_id": number, "draw": 0} | options))


def one(engine: NativeEngine, request: Request, sampling: Sampling) -> list[Completion]:
    (group,) = engine.generate([request], sampling)
    return group


@torch.no_grad()
def learner_logp(
    model: Transformer, request: Request, completion: Completion, temperature: float = 1.0
) -> Tensor:
    """Of the completion's tokens, by one packed forward pass and the learner's head."""
    token_T = torch.tensor([*request.prompt, *completion.token_ids])
    hidden_TD = model(token_T, packed_positions([len(token_T)]), packed([len(token_T)]))
    out = log_probs(hidden_TD[:-1], model.head_weight, token_T[1:], temperature=temperature)
    return out.logp_T[len(request.prompt) - 1 :]


def worst(
    model: Transformer, request: Request, group: Sequence[Completion], temperature: float = 1.0
) -> float:
    """The largest difference between recorded and the learner's log-probabilities."""
    return max(
        float((c.logp_T - learner_logp(model, request, c, temperature)).abs().max()) for c in group
    )


def same(a: Completion, b: Completion) -> bool:
    """To the last bit."""
    return a.token_ids == b.token_ids and a.finish == b.finish and torch.equal(a.logp_T, b.logp_T)
