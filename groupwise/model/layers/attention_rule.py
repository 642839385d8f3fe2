"""Rules for attention that is not plain, and attention that follows them.

Plain is softmax(q·k/√W) over all keys up to the token itself. Architectures differ by four things,
which may come together: another scale, a window, a soft cap on scores, a sink. Axes as in
attention.py; `_J` key head, `_G` the query heads that share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.errors import ModelError


@dataclass(frozen=True, eq=False)
class AttentionRule:
    """A layer's own way to see keys."""

    scale: float | None = None  # of scores; None: 1/√W
    window: int | None = None  # how many tokens a token sees, itself included; None: all
    cap: float | None = None  # scores become cap·tanh(score/cap)
    sink_H: Tensor | None = None  # a score that takes part in the softmax and shows nothing

    @property
    def fused(self) -> bool:
        """Tell whether PyTorch's fused attention can do it. A window is a mask."""
        return self.cap is None and self.sink_H is None


PLAIN = AttentionRule()


def check_plain(rule: AttentionRule) -> None:
    """Refuse anything special, for attention that knows nothing else."""
    if rule is not PLAIN:
        raise ModelError(f"Kernels attend in the plain way alone, not with {rule}. Use Plain ops.")


def attention(
    query_NHQW: Tensor,
    key_NJUW: Tensor,
    value_NJUW: Tensor,
    rule: AttentionRule,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Return what the queries see, [N, H, Q, W]; masks as in `scaled_dot_product_attention`."""
    if rule.fused:
        return F.scaled_dot_product_attention(
            query_NHQW,
            key_NJUW,
            value_NJUW,
            attn_mask=mask,
            is_causal=causal,
            scale=rule.scale,
            enable_gqa=query_NHQW.shape[1] != key_NJUW.shape[1],
        )
    return _in_steps(query_NHQW, key_NJUW, value_NJUW, rule, mask, causal)


def _in_steps(
    query_NHQW: Tensor,
    key_NJUW: Tensor,
    value_NJUW: Tensor,
    rule: AttentionRule,
    mask: Tensor | None,
    causal: bool,
) -> Tensor:
    """Attend with the scores in memory, in at least float32: queries x keys for every head."""
    rows, heads, queries, width = query_NHQW.shape
    groups, keys = key_NJUW.shape[1:3]
    wide = torch.promote_types(query_NHQW.dtype, torch.float32)
    query_NJGQW = query_NHQW.to(wide).view(rows, groups, heads // groups, queries, width)
    score_NJGQU = query_NJGQW @ key_NJUW.to(wide)[:, :, None].mT
    score_NJGQU = score_NJGQU * (1 / sqrt(width) if rule.scale is None else rule.scale)
    if rule.cap is not None:
        score_NJGQU = rule.cap * torch.tanh(score_NJGQU / rule.cap)
    score_NHQU = score_NJGQU.flatten(1, 2)
    if causal:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query_NHQW.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        score_NHQU = score_NHQU.masked_fill(~mask, -inf)
    elif mask is not None:
        score_NHQU = score_NHQU + mask
    if rule.sink_H is not None:
        sink_NHQ1 = rule.sink_H.to(wide)[:, None, None].expand(rows, -1, queries, 1)
        score_NHQU = torch.cat((score_NHQU, sink_NHQ1), dim=-1)
    weight_NHQU = score_NHQU.softmax(-1)[..., :keys]
    weight_NJGQU = weight_NHQU.reshape(rows, groups, -1, queries, keys)
    seen_NJGQW = weight_NJGQU @ value_NJUW.to(wide)[:, :, None]
    return seen_NJGQW.flatten(1, 2).to(query_NHQW.dtype)
