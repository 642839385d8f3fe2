"""An engine whose answers are interrupted: somebody else writes between two turns of the policy.

Log-probabilities are those of the turns as they were sampled, one behind the other. What the others
wrote has none: rubbish stands there, that nothing may read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from runs import quiet, small
from steps import Start

from groupwise.engine.batch import BatchEngine
from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.protocol import Request, Sampling
from groupwise.model.formats.checkpoint import Loaded
from groupwise.prepare.engines import engine_of
from groupwise.records import Completion, Turn
from groupwise.training.opening import open_run

FIRST = 2  # tokens of the policy's first turn, at the most
TOOL, USER = "7+1", "2"  # who interrupts, and who has the last word now and then


class Interrupted(BatchEngine):
    """Two turns of the policy with a tool between them; every third sample ends with a user's."""

    def __init__(self, inner: NativeEngine, rubbish: float) -> None:
        self.inner, self.rubbish, self.capabilities = inner, rubbish, inner.capabilities
        encode = inner.tokenizer.encode
        self.tool, self.user = tuple(encode(TOOL)), tuple(encode(USER))

    @property
    def source(self) -> Any:
        return self.inner.source

    def sync(self, version: int) -> None:
        super().sync(version)
        self.inner.sync(version)

    def answer(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        if all(request.begun for request in requests):  # branches: nobody interrupts them
            return self.inner.generate(requests, sampling)
        most = min(FIRST, max(sampling.max_tokens - 1, 1))
        first = self.inner.generate(requests, replace(sampling, max_tokens=most, min_tokens=0))
        asked = [
            replace(
                request,
                prompt=(*request.prompt, *one.token_ids, *self.tool),
                samples=1,
                prompt_id=request.prompt_id + 1_000_003 * (number + 1),
            )
            for request, group in zip(requests, first, strict=True)
            for number, one in enumerate(group)
        ]
        rest = replace(sampling, max_tokens=max(sampling.max_tokens - most, 1), min_tokens=0)
        second = iter(self.inner.generate(asked, rest))
        return [
            [self.joined(one, next(second)[0], number) for number, one in enumerate(group)]
            for group in first
        ]

    def joined(self, first: Completion, second: Completion, number: int) -> Completion:
        last = self.user if number % 3 == 2 else ()
        pieces = [("assistant", first), ("tool", self.tool), ("assistant", second), ("user", last)]
        ids: list[int] = []
        turns: list[Turn] = []
        for role, piece in pieces:
            own = piece.token_ids if isinstance(piece, Completion) else piece
            turns += [Turn(role, len(ids), len(ids) + len(own))] if own else []
            ids += own
        return replace(
            second,
            token_ids=tuple(ids),
            logp_T=self.around(first.logp_T, second.logp_T, last),
            mask_T=torch.tensor([t.role == "assistant" for t in turns for _ in range(*t[1:])]),
            turns=tuple(turns),
            # Those of its prompt are of all that came before; the last words are not routed.
            routes_TLK=None
            if second.routes_TLK is None
            else F.pad(second.routes_TLK, (0, 0, 0, 0, 0, len(last)), value=-1),
            **{
                name: self.around(getattr(first, name), getattr(second, name), last)
                for name in ("topk_id_TK", "topk_logp_TK")
                if getattr(first, name) is not None
            },
        )

    def around(self, first: torch.Tensor, second: torch.Tensor, last: Sequence[int]) -> Any:
        def junk(tokens: int) -> torch.Tensor:
            odd = self.rubbish if first.is_floating_point() else -123
            return torch.full((tokens, *first.shape[1:]), odd, dtype=first.dtype)

        return torch.cat([first, junk(len(self.tool)), second, junk(len(last))])


def opened(start: Start, folder: Path, *, rubbish: float = math.nan, **changes: Any) -> Any:
    """A run before its first step, whose answers are interrupted."""
    config = small(**start.settings(**changes))

    def engine(loaded: Loaded) -> Interrupted:
        return Interrupted(engine_of(config, loaded), rubbish)

    return open_run(config, folder, quiet(), engine)
