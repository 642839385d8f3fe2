"""The learner's attention on a GPU: completions of a group look at one copy of their prompt.

Attention over the union of two sets of keys is a weighted sum of those over each set: out =
Σ exp(lse_i − lse)·out_i, where lse_i is the log-sum-exp of a set's scores and exp(lse) = Σ
exp(lse_i). So a pack takes two calls of flash attention, without a mask and without a copy of the
prompt for each completion: every segment (a prompt or a completion) with itself, causal, and every
group with its prompt, where what the prompt's own tokens see is thrown away. The backward pass
makes the same two calls with the merged output and lse: their probabilities exp(score − lse) are
then those of the union, and the gradients of both parts add up.

Axes: `_E` ends of segments, `_I` tile, else as in transformer.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from groupwise.errors import ModelError
from groupwise.model.layers.attention_rule import PLAIN, AttentionRule, check_plain
from groupwise.model.layers.order import order

TILE = 64  # tokens of one segment that the exact kernel looks at together


@dataclass(frozen=True)
class Segments:
    """Which queries look at which keys: the i-th span of the one at the i-th of the other."""

    query_E: Tensor  # where each span ends and the next starts, int32, from 0 on
    key_E: Tensor
    longest_query: int
    longest_key: int
    causal: bool


@dataclass(frozen=True)
class PackPlan:
    """The calls' knowledge of a pack; all tensors are views of one, on its device."""

    tokens: int
    itself: Segments
    prompts: Segments | None  # None: nobody stands behind a prompt
    prompt_T: Tensor  # where in the pack the prompts' tokens lie
    behind_T: Tensor  # which tokens stand behind a prompt
    tile_I5: Tensor  # see `tiles`; empty unless exact


class PrefixAttention:
    """An `Attend` for packs of prompts, each with its completions behind it.

    `exact` gives a token the same bits in any pack and in the engine's exact decode.
    """

    def __init__(
        self,
        prompts: Sequence[int],
        completions: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        exact: bool = False,
    ) -> None:
        self.plan = make_plan(prompts, completions, torch.device(device), exact)
        self.exact = exact

    def __call__(
        self,
        layer: int,
        query_THW: Tensor,
        key_TJW: Tensor,
        value_TJW: Tensor,
        rule: AttentionRule = PLAIN,
    ) -> Tensor:
        check_plain(rule)
        if len(query_THW) != self.plan.tokens:
            raise ModelError(
                f"The pack was planned for {self.plan.tokens} tokens and has {len(query_THW)}. "
                f"Plan each pack with its own lengths."
            )
        seen_THW: Tensor = _Prefix.apply(  # type: ignore[no-untyped-call]
            query_THW, key_TJW, value_TJW, self.plan, self.exact
        )
        return seen_THW


class _Prefix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_THW: Tensor, key_TJW: Tensor, value_TJW: Tensor, plan: PackPlan, exact: bool
    ) -> Tensor:
        attend = _exact if exact and query_THW.is_cuda else _in_parts
        seen_THW, lse_HT = attend(query_THW, key_TJW, value_TJW, plan)
        ctx.plan, ctx.exact = plan, exact
        ctx.save_for_backward(query_THW, key_TJW, value_TJW, seen_THW, lse_HT)
        return seen_THW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THW: Tensor) -> tuple[Tensor | None, ...]:
        query_THW, key_TJW, value_TJW, seen_THW, lse_HT = ctx.saved_tensors
        plan: PackPlan = ctx.plan
        grad_THW = grad_THW.contiguous()
        with order(fixed=True) if ctx.exact else nullcontext():
            grads = segment_backward(
                grad_THW, query_THW, key_TJW, value_TJW, seen_THW, lse_HT, plan.itself
            )
            if plan.prompts is not None:
                # A prompt's own tokens have seen it already: at lse = inf their weights are 0.
                behind_HT = lse_HT.masked_fill(~plan.behind_T, inf)
                key_UJW, value_UJW = _of_prompts(plan, key_TJW, value_TJW)
                parts = segment_backward(
                    grad_THW, query_THW, key_UJW, value_UJW, seen_THW, behind_HT, plan.prompts
                )
                grads[0].add_(parts[0])
                for grad, part in zip(grads[1:], parts[1:], strict=True):
                    grad.index_add_(0, plan.prompt_T, part)
        return *grads, None, None


def _exact(
    query_THW: Tensor, key_TJW: Tensor, value_TJW: Tensor, plan: PackPlan
) -> tuple[Tensor, Tensor]:
    from groupwise.model.kernels.attention import pack_attention

    return pack_attention(query_THW, key_TJW, value_TJW, plan.tile_I5)


def _in_parts(
    query_THW: Tensor, key_TJW: Tensor, value_TJW: Tensor, plan: PackPlan
) -> tuple[Tensor, Tensor]:
    own = segment_forward(query_THW, key_TJW, value_TJW, plan.itself)
    if plan.prompts is None:
        return own
    other = segment_forward(query_THW, *_of_prompts(plan, key_TJW, value_TJW), plan.prompts)
    if flash_fits(query_THW) and find_spec("triton") is not None:
        from groupwise.model.kernels.attention import merge as fused

        return fused(*own, *other, plan.behind_T)
    return merge(*own, *other, plan.behind_T)


def _of_prompts(plan: PackPlan, key_TJW: Tensor, value_TJW: Tensor) -> tuple[Tensor, Tensor]:
    return key_TJW.index_select(0, plan.prompt_T), value_TJW.index_select(0, plan.prompt_T)


def merge(
    seen_THW: Tensor, lse_HT: Tensor, other_THW: Tensor, other_HT: Tensor, behind_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge the attentions over two sets of keys into one; the second counts where `behind_T`."""
    other_HT = other_HT.masked_fill(~behind_T, -inf)
    merged_HT = torch.logaddexp(lse_HT, other_HT)
    weight_TH1, other_TH1 = ((x - merged_HT).exp().T[:, :, None] for x in (lse_HT, other_HT))
    merged_THW = seen_THW * weight_TH1 + other_THW * other_TH1
    return merged_THW.to(seen_THW.dtype), merged_HT


def segment_forward(
    query_THW: Tensor, key_TJW: Tensor, value_TJW: Tensor, segments: Segments
) -> tuple[Tensor, Tensor]:
    """Return what the queries see, and the log-sum-exp of their scores, [H, T]."""
    if not flash_fits(query_THW):
        return plain_forward(query_THW, key_TJW, value_TJW, segments)
    seen_THW, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        query_THW,
        key_TJW,
        value_TJW,
        segments.query_E,
        segments.key_E,
        segments.longest_query,
        segments.longest_key,
        0.0,  # dropout
        segments.causal,
        False,
    )
    return seen_THW, lse_HT


def segment_backward(
    grad_THW: Tensor,
    query_THW: Tensor,
    key_TJW: Tensor,
    value_TJW: Tensor,
    seen_THW: Tensor,
    lse_HT: Tensor,
    segments: Segments,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of queries, keys and values; output and lse may be those over more keys."""
    if not flash_fits(query_THW):
        return plain_backward(grad_THW, query_THW, key_TJW, value_TJW, seen_THW, lse_HT, segments)
    no_dropout = torch.empty(2, dtype=torch.uint64, device=query_THW.device)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad_THW,
        query_THW,
        key_TJW,
        value_TJW,
        seen_THW,
        lse_HT,
        segments.query_E,
        segments.key_E,
        segments.longest_query,
        segments.longest_key,
        0.0,  # dropout
        segments.causal,
        no_dropout,
        no_dropout,
    )
    return grads


def flash_fits(query_THW: Tensor) -> bool:
    """Tell whether flash attention takes such queries; the plain version takes the rest."""
    width, half = query_THW.shape[-1], query_THW.dtype in (torch.bfloat16, torch.float16)
    return query_THW.is_cuda and half and width % 8 == 0 and width <= 256


def plain_forward(
    query_THW: Tensor, key_TJW: Tensor, value_TJW: Tensor, segments: Segments
) -> tuple[Tensor, Tensor]:
    """Attend in a loop over the segments, in any precision."""
    seen_THW = torch.empty_like(query_THW)
    lse_TH = query_THW.new_empty(query_THW.shape[:2], dtype=_wide(query_THW.dtype))
    for queries, keys in _spans(segments):
        score_JGQU = _scores(query_THW[queries], key_TJW[keys], segments.causal)
        lse_JGQ = score_JGQU.logsumexp(-1)
        weight_JGQU = (score_JGQU - lse_JGQ[..., None]).exp()
        value_JUW = value_TJW[keys].to(lse_TH.dtype).transpose(0, 1)
        seen_JGQW = weight_JGQU @ value_JUW[:, None]
        seen_THW[queries] = seen_JGQW.flatten(0, 1).transpose(0, 1).to(query_THW.dtype)
        lse_TH[queries] = lse_JGQ.flatten(0, 1).T
    return seen_THW, lse_TH.T.contiguous()


def plain_backward(
    grad_THW: Tensor,
    query_THW: Tensor,
    key_TJW: Tensor,
    value_TJW: Tensor,
    seen_THW: Tensor,
    lse_HT: Tensor,
    segments: Segments,
) -> tuple[Tensor, Tensor, Tensor]:
    """Use P = exp(score − lse), dscore = P·(dP − Σ_w dout·out): the same as flash attention's."""
    grads = torch.zeros_like(query_THW), torch.zeros_like(key_TJW), torch.zeros_like(value_TJW)
    groups, scale = key_TJW.shape[1], 1 / sqrt(query_THW.shape[2])
    for queries, keys in _spans(segments):
        grad_JGQW = _by_key_head(grad_THW[queries], groups)
        query_JGQW = _by_key_head(query_THW[queries], groups)
        seen_JGQW = _by_key_head(seen_THW[queries], groups)
        key_J1UW, value_J1UW = (_by_key_head(x_TJW[keys], groups) for x_TJW in (key_TJW, value_TJW))
        score_JGQU = _scores(query_THW[queries], key_TJW[keys], segments.causal)
        lse_JGQ = lse_HT[:, queries].view(groups, -1, queries.stop - queries.start)
        weight_JGQU = (score_JGQU - lse_JGQ[..., None]).exp()
        pull_JGQU = grad_JGQW @ value_J1UW.mT - (grad_JGQW * seen_JGQW).sum(-1, keepdim=True)
        slope_JGQU = weight_JGQU * pull_JGQU * scale
        parts = (
            (slope_JGQU @ key_J1UW).flatten(0, 1),
            (slope_JGQU.mT @ query_JGQW).sum(1),
            (weight_JGQU.mT @ grad_JGQW).sum(1),
        )
        for grad, span, part in zip(grads, (queries, keys, keys), parts, strict=True):
            grad[span] = part.transpose(0, 1).to(grad.dtype)
    return grads


def make_plan(
    prompts: Sequence[int],
    completions: Sequence[Sequence[int]],
    device: torch.device,
    exact: bool,
) -> PackPlan:
    """Put numbers together on the host and send them in one copy."""
    lengths = [n for p, group in zip(prompts, completions, strict=True) for n in (p, *group)]
    if not lengths or min(lengths) < 1:
        raise ModelError(
            f"Sequence lengths are {lengths!r}; a pack needs at least one sequence and every "
            f"sequence at least one token. Drop the empty ones."
        )
    sizes = [p + sum(group) for p, group in zip(prompts, completions, strict=True)]
    groups = [0, *accumulate(sizes)]
    heads = torch.tensor([groups[:-1], prompts], dtype=torch.int32)
    prompt = torch.cat([torch.arange(at, at + n, dtype=torch.int32) for at, n in heads.T.tolist()])
    table = tiles(prompts, completions) if exact else torch.empty((0, 5), dtype=torch.int32)
    behind = torch.ones(groups[-1], dtype=torch.int32)
    behind[prompt] = 0
    ends, group_ends, prompt_ends, prompt_T, behind_T, tile = _sent(
        device,
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        torch.tensor(groups, dtype=torch.int32),
        torch.tensor([0, *accumulate(prompts)], dtype=torch.int32),
        prompt,
        behind,
        table.flatten(),
    )
    longest = max(lengths)
    shared = Segments(group_ends, prompt_ends, max(sizes), max(prompts), causal=False)
    return PackPlan(
        tokens=groups[-1],
        itself=Segments(ends, ends, longest, longest, causal=True),
        prompts=shared if any(completions) else None,
        prompt_T=prompt_T,
        behind_T=behind_T.bool(),
        tile_I5=tile.view(-1, 5),
    )


def tiles(prompts: Sequence[int], completions: Sequence[Sequence[int]]) -> Tensor:
    """Cut each segment into tiles of up to TILE tokens, for `pack_attention`; on the host.

    Columns: first token, start and length of the segment, start and length of its prompt.
    """
    rows, start = [], 0
    for p, group in zip(prompts, completions, strict=True):
        prompt = start
        for number, n in enumerate((p, *group)):
            before = (prompt, p) if number else (start, 0)
            rows += [(start + at, start, n, *before) for at in range(0, n, TILE)]
            start += n
    return torch.tensor(rows, dtype=torch.int32)


def _sent(device: torch.device, *parts: Tensor) -> list[Tensor]:
    together = torch.cat(parts)
    if device.type == "cuda":
        together = together.pin_memory().to(device, non_blocking=True)
    return list(torch.split(together, [len(part) for part in parts]))


def _spans(segments: Segments) -> Iterator[tuple[slice, slice]]:
    query, key = segments.query_E.tolist(), segments.key_E.tolist()
    for i in range(len(query) - 1):
        yield slice(query[i], query[i + 1]), slice(key[i], key[i + 1])


def _scores(query_QHW: Tensor, key_UJW: Tensor, causal: bool) -> Tensor:
    query_JGQW = _by_key_head(query_QHW, key_UJW.shape[1])
    score_JGQU = query_JGQW @ _by_key_head(key_UJW, key_UJW.shape[1]).mT
    score_JGQU = score_JGQU / sqrt(query_QHW.shape[2])
    if causal:
        future_QU = torch.ones(score_JGQU.shape[-2:], dtype=torch.bool).triu(1)
        score_JGQU = score_JGQU.masked_fill(future_QU.to(score_JGQU.device), -inf)
    return score_JGQU


def _by_key_head(x_THW: Tensor, groups: int) -> Tensor:
    """Return [J, G, T, W] in at least float32: the G query heads that share each key head."""
    tokens, heads, width = x_THW.shape
    x_TJGW = x_THW.to(_wide(x_THW.dtype)).reshape(tokens, groups, heads // groups, width)
    return x_TJGW.permute(1, 2, 0, 3)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
