"""Rows of a batch as the model reads them: micro-batches by tokens, prompts computed once.

A micro-batch is a pack: the prompt of a group, then its completions behind it. The log-probability
of a completion's first token comes from the prompt's last hidden state, and the last token of a
completion is predicted but never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from groupwise.model.attention import Attend, shared_positions, shared_prompts
from groupwise.model.head import log_probs
from groupwise.model.transformer import PolicyModel

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Sequences:
    """Prompt and completion of every row. Rows of a group lie next to each other."""

    prompts: Sequence[Ids]
    completions: Sequence[Ids]

    @property
    def width(self) -> int:
        return max(len(ids) for ids in self.completions)

    def mask(self) -> Tensor:
        length_N = torch.tensor([len(ids) for ids in self.completions])
        return torch.arange(self.width) < length_N[:, None]

    def tokens(self) -> Tensor:
        """token_NT, padded with 0."""
        token_NT = torch.zeros(len(self.completions), self.width, dtype=torch.long)
        token_NT[self.mask()] = torch.tensor([i for ids in self.completions for i in ids])
        return token_NT


@dataclass(frozen=True)
class Pack:
    """One forward pass: tokens of some rows, and which hidden state predicts which token."""

    rows: list[int]
    token_T: Tensor
    position_T: Tensor
    attend: Attend
    take_A: Tensor  # the hidden state that predicts each completion token, row by row
    target_A: Tensor
    mask_NT: Tensor  # where these tokens stand in the batch

    def spread(self, x_A: Tensor) -> Tensor:
        """Values per predicted token -> [rows, width, ...], 0 elsewhere; differentiable."""
        shape = (*self.mask_NT.shape, *x_A.shape[1:])
        (flat,) = self.mask_NT.flatten().nonzero(as_tuple=True)
        return (
            x_A.new_zeros(self.mask_NT.numel(), *x_A.shape[1:]).index_copy(0, flat, x_A).view(shape)
        )


def micro_batches(
    sequences: Sequences, rows: Sequence[int], budget: int, together: int = 1
) -> list[list[int]]:
    """Rows in order, cut so that a pack has at most `budget` tokens (or what stays `together`).

    Rows that stay together are neighbours with one prompt.
    """
    parts: list[list[int]] = []
    room = 0
    for at in range(0, len(rows), together):
        some = rows[at : at + together]
        prompt = sequences.prompts[some[0]]
        answers = sum(len(sequences.completions[row]) - 1 for row in some)
        shares = bool(parts) and sequences.prompts[parts[-1][-1]] == prompt
        cost = answers if shares else answers + len(prompt)
        if not parts or cost > room:
            parts.append([])
            cost, room = answers + len(prompt), budget
        parts[-1] += some
        room -= cost
    return parts


def pack(
    sequences: Sequences, rows: Sequence[int], width: int, device: torch.device | str = "cpu"
) -> Pack:
    """The forward pass of these rows; neighbours with the same prompt share it."""
    prompts: list[int] = []
    behind: list[list[int]] = []
    token: list[int] = []
    take: list[int] = []
    target: list[int] = []
    for prompt, group in groupby(rows, key=lambda row: sequences.prompts[row]):
        token += prompt
        prompts.append(len(prompt))
        behind.append([])
        last = len(token) - 1
        for row in group:
            answer = sequences.completions[row]
            take += [last, *range(len(token), len(token) + len(answer) - 1)]
            target += answer
            token += answer[:-1]
            if len(answer) > 1:
                behind[-1].append(len(answer) - 1)
    length_N = torch.tensor([len(sequences.completions[row]) for row in rows])
    return Pack(
        rows=list(rows),
        token_T=torch.tensor(token, device=device),
        position_T=shared_positions(prompts, behind, device),
        attend=shared_prompts(prompts, behind, device),
        take_A=torch.tensor(take, device=device),
        target_A=torch.tensor(target, device=device),
        mask_NT=(torch.arange(width) < length_N[:, None]).to(device),
    )


def outputs(
    model: PolicyModel,
    part: Pack,
    *,
    temperature: float,
    top_k: int = 0,
    at_NTK: Tensor | None = None,
) -> dict[str, Tensor]:
    """What the learner says about the rows, as streams: logp_NT, entropy_NT, and what is asked.

    `top_k` adds the policy's own likeliest tokens, `at_NTK` its view of the sampler's.
    """
    hidden_TD = model(part.token_T, part.position_T, part.attend)
    found = log_probs(
        hidden_TD.index_select(0, part.take_A),
        model.head_weight,
        part.target_A,
        temperature=temperature,
        entropy=True,
        top_k=top_k,
        at_TK=None if at_NTK is None else at_NTK[part.mask_NT],
    )
    named: dict[str, Any] = {
        "logp_NT": found.logp_T,
        "entropy_NT": found.entropy_T,
        "topk_logp_NTK": found.topk_logp_TK,
        "topk_id_NTK": found.topk_id_TK,
        "logp_at_sampler_topk_NTK": found.logp_at_TK,
    }
    return {name: part.spread(x) for name, x in named.items() if x is not None}


@torch.no_grad()
def score(
    model: PolicyModel, sequences: Sequences, parts: Sequence[Sequence[int]], temperature: float
) -> Tensor:
    """logp_NT of all rows, without gradient, in the same micro-batches as the update's.

    Equal passes give equal bits: then a ratio that should be 1 is exactly 1.
    """
    width = sequences.width
    device = model.head_weight.device
    logp_NT = torch.zeros(len(sequences.completions), width, device=device)
    for rows in parts:
        part = pack(sequences, rows, width, device)
        logp_NT[torch.tensor(rows, device=device)] = outputs(model, part, temperature=temperature)[
            "logp_NT"
        ]
    return logp_NT
