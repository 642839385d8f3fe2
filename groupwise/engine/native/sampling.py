"""One token a row from logits and one uniform number a row, by inverting the distribution.

On a CPU, cumulative sums and log-sum-exp over the vocabulary take as long as the head itself, so
sums are taken of blocks of tokens first, and only the block that is hit is looked into. Axis `_B`:
block, or token within one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.engine.protocol import Sampling

BLOCK = 64
FIRST_CANDIDATES = 256  # likeliest tokens in which top-p looks for its share first


@dataclass(frozen=True)
class DrawnTokens:
    """One token a row, with its log-probability."""

    token_N: Tensor
    logp_N: Tensor  # float32, of the distribution that the token was drawn from
    topk_id_NK: Tensor | None = None
    topk_logp_NK: Tensor | None = None


def padded_width(vocabulary: int) -> int:
    """Return the columns of a buffer of logits: whole blocks, −inf past the vocabulary."""
    return -(-vocabulary // BLOCK) * BLOCK


def choose(
    logits_NV: Tensor,
    work_NV: Tensor,
    uniform_N: Tensor,
    sampling: Sampling,
    banned: tuple[Tensor, Tensor] | None = None,
) -> DrawnTokens:
    """Draw, or take the likeliest. The logits are at the temperature already; both get spoilt.

    `banned` are rows, and token ids that they can't draw.
    """
    topk_id_NK, topk_logp_NK = _likeliest(logits_NV, work_NV, sampling.record_top_k)
    if banned is not None:
        row_N, id_K = banned
        logits_NV[row_N[:, None], id_K] = -torch.inf
    z_NV = logits_NV.sub_(logits_NV.amax(-1, keepdim=True))
    weight_NV = torch.exp(z_NV, out=work_NV)
    if sampling.temperature == 0:
        token_N = z_NV.argmax(-1)
        total_N = _cumulative(weight_NV)[:, -1]
    else:
        keep_likeliest(weight_NV, sampling.top_k, sampling.top_p)
        token_N, total_N = draw(weight_NV, uniform_N)
    logp_N = z_NV.gather(1, token_N[:, None])[:, 0].double() - total_N.log()
    return DrawnTokens(token_N, logp_N.float(), topk_id_NK, topk_logp_NK)


def draw(weight_NV: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    """Draw the token where the cumulative weight passes uniform x total; return the total too.

    Searching for the first sum above the target never stops at a weight of 0, and the last
    token with a weight bounds what rounding could do when the uniform number is close to 1.
    """
    cumulative_NB = _cumulative(weight_NV)
    total_N1 = cumulative_NB[:, -1:]
    target_N1 = uniform_N[:, None] * total_N1
    block_N1 = _passed(cumulative_NB, target_N1)
    above_N1 = cumulative_NB.gather(1, block_N1)
    below_N1 = torch.where(block_N1 > 0, cumulative_NB.gather(1, (block_N1 - 1).clamp(min=0)), 0)
    share_N1 = (target_N1 - below_N1) / (above_N1 - below_N1)
    inside_NB = block_N1 * BLOCK + torch.arange(BLOCK, device=weight_NV.device)
    within_NB = weight_NV.gather(1, inside_NB).double().cumsum(-1)
    place_N1 = _passed(within_NB, share_N1 * within_NB[:, -1:])
    return (block_N1 * BLOCK + place_N1)[:, 0], total_N1[:, 0]


def keep_likeliest(weight_NV: Tensor, top_k: int, top_p: float) -> None:
    """Zero the weights outside the k likeliest, then outside the fewest that make a share of p.

    Tokens as likely as the last one kept are kept, too: which they are depends on nothing else.
    """
    if 0 < top_k < weight_NV.shape[1]:
        least_N1 = weight_NV.topk(top_k, dim=-1).values[:, -1:]
        weight_NV.mul_(weight_NV >= least_N1)
    if top_p < 1:
        weight_NV.mul_(weight_NV >= _least_of_share(weight_NV, top_p))


def _least_of_share(weight_NV: Tensor, share: float) -> Tensor:
    goal_N1 = share * _cumulative(weight_NV)[:, -1:]
    width = min(FIRST_CANDIDATES, weight_NV.shape[1])
    while True:
        value_NK = weight_NV.topk(width, dim=-1).values
        reached_NK = value_NK.double().cumsum(-1)
        if width == weight_NV.shape[1] or bool((reached_NK[:, -1:] >= goal_N1).all()):
            break
        width = min(width * 8, weight_NV.shape[1])
    needed_N1 = 1 + (reached_NK[:, :-1] < goal_N1).sum(-1, keepdim=True)
    return value_NK.gather(1, needed_N1 - 1)


def _cumulative(weight_NV: Tensor) -> Tensor:
    """Running sums of whole blocks.

    A block is folded by hand: the order in which `sum` adds depends on how many rows there are.
    """
    fold_NBK = weight_NV.view(len(weight_NV), -1, BLOCK)
    while (width := fold_NBK.shape[-1]) > 1:
        fold_NBK = fold_NBK[..., : width // 2] + fold_NBK[..., width // 2 :]
    return fold_NBK[..., 0].double().cumsum(-1)


def _passed(cumulative_NB: Tensor, target_N1: Tensor) -> Tensor:
    """Find the first entry above the target, at most the last that adds something."""
    last_N1 = (cumulative_NB < cumulative_NB[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative_NB, target_N1, right=True), last_N1)


def _likeliest(
    logits_NV: Tensor, work_NV: Tensor, count: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the likeliest tokens of the whole distribution and their log-probabilities."""
    if count == 0:
        return None, None
    value_NK, id_NK = logits_NV.topk(count, dim=-1)
    peak_N1 = value_NK[:, :1]
    weight_NV = torch.exp(torch.sub(logits_NV, peak_N1, out=work_NV), out=work_NV)
    log_total_N1 = _cumulative(weight_NV)[:, -1:].log()
    return id_NK, ((value_NK - peak_N1).double() - log_total_N1).float()
