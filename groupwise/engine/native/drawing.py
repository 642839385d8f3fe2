"""The plain twin of the head kernel's sampler: the same draw, from logits in memory.

The vocabulary is cut into tiles of BLOCK tokens, a tile into lines of LANES. A token is drawn in
three steps: a tile, one of its lanes, and a line, each by inverting a distribution with a uniform
number of its own, which is a pure function of the row's key and position. Axes besides those of
CONTRIBUTING.md: `_B` row of the batch, `_G` tile, `_H` line, `_L` lane.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.engine.randomness import _fraction, philox

BLOCK, LANES = 256, 16
FLOOR = -1e30  # below every logit; unlike −inf it makes no NaN where a whole tile is barred


def draw_plain(
    logits_BV: Tensor,
    key_B4: Tensor,
    position_B: Tensor,
    *,
    block: int = BLOCK,
    greedy: bool = False,
    end_K: Tensor | None = None,
    may_end_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row, or take the likeliest (the lowest id of equals), with its log p.

    The logits are at the temperature already. Rows that may not end cannot draw the tokens of
    `end_K`, which lose their share of p.
    """
    z_BV = logits_BV.clone()
    if end_K is not None and may_end_B is not None:
        row_B = (may_end_B == 0).nonzero()
        z_BV[row_B, end_K] = FLOOR
    padded_BV = F.pad(z_BV, (0, -z_BV.shape[1] % block), value=FLOOR)
    z_BGHL = padded_BV.view(len(z_BV), -1, block // LANES, LANES)
    peak_BG = z_BGHL.amax((2, 3))
    weight_BGHL = (z_BGHL - peak_BG[:, :, None, None]).exp()
    peak_B1 = peak_BG.amax(1, keepdim=True)
    weight_BG = weight_BGHL.sum((2, 3)).double() * (peak_BG - peak_B1).exp()
    if greedy:
        token_B = z_BV.argmax(-1)
    else:
        row_B = torch.arange(len(z_BV), device=z_BV.device)
        tile_B = _pick(weight_BG, _uniforms(key_B4, torch.zeros_like(position_B), position_B)[0])
        first_B, second_B = _uniforms(key_B4, 1 + tile_B, position_B)
        weight_BHL = weight_BGHL[row_B, tile_B]
        lane_B = _pick(weight_BHL.sum(1), first_B)
        step_B = _pick(weight_BHL[row_B, :, lane_B], second_B)
        token_B = tile_B * block + step_B * LANES + lane_B
    z_B1 = z_BV.gather(1, token_B[:, None])
    logp_B1 = (z_B1 - peak_B1).double() - weight_BG.sum(1, keepdim=True).log()
    return token_B, logp_B1[:, 0].float()


def _uniforms(key_B4: Tensor, call_B: Tensor, position_B: Tensor) -> tuple[Tensor, Tensor]:
    """Make two numbers in [0, 1) of 53 bits from one call of the generator."""
    key_0, key_1, key_2, key_3 = (key_B4.long() & 0xFFFFFFFF).unbind(1)
    a, b, c, d = philox((call_B.long(), position_B.long(), key_2, key_3), (key_0, key_1))
    return _fraction(a, b), _fraction(c, d)


def _pick(weight_BK: Tensor, uniform_B: Tensor) -> Tensor:
    """Pick the first entry with weight whose running sum passes uniform x total, else the last."""
    sum_BK = weight_BK.double().cumsum(-1)
    goal_B1 = uniform_B[:, None] * sum_BK[:, -1:]
    place_K = torch.arange(weight_BK.shape[1], device=weight_BK.device)
    passed_BK = (weight_BK > 0) & (sum_BK > goal_B1)
    first_B = torch.where(passed_BK, place_K, len(place_K)).amin(-1)
    last_B = torch.where(weight_BK > 0, place_K, 0).amax(-1)
    return torch.minimum(first_B, last_B)
