"""The head without logits in memory: one kernel samples and scores, to the same bits.

A program makes one tile of logits, rows x COLUMNS tokens, and leaves of it a peak, a sum of
exp(z − peak) and little more; a second kernel puts a row's tiles together. A sampler's tile also
draws a candidate: its tokens lie in lines of LANES, and first a lane is drawn, then a line, each by
inverting a distribution; the second kernel then draws the tile. Log-probabilities come out of the
same operations in both, so a token's is bitwise equal where the hidden states are.

Fusing of multiplications and additions is switched off: whether it happens would depend on what
else a kernel does. Axes besides those of CONTRIBUTING.md: `_B` row of a batch or column of a tile,
`_R` row of a tile, `_G` tile of the vocabulary, `_H` line, `_L` lane.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from groupwise.model.kernels.matmul import (
    GROUP,
    Tile,
    check_operands,
    fitting,
    product_tile,
    tile_place,
)
from groupwise.model.layers.head import widened

COLUMNS, LANES = 256, 16  # of a tile; part of what decides which token a random number means
# Below every logit. Unlike −inf it makes no NaN where a whole tile is barred.
FLOOR = tl.constexpr(-1e30)
HALF_TILES = (Tile(64, COLUMNS, 64, 4, 4), Tile(128, COLUMNS, 64, 8, 4))
SINGLE_TILE = Tile(16, COLUMNS, 16, 4, 2)
JOINED = 4096  # tiles that a program of the second kernel puts together, of several rows
CHUNK_NUMBERS = 2**27  # logits in memory at a time in the backward pass: 512 MiB
GRADIENT_BLOCK = 4096


def score(
    hidden_TD: Tensor,
    head_VD: Tensor,
    target_T: Tensor,
    inverse_temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return log p(target | hidden) and perhaps the entropy; each row's peak logit and sum of exp.

    p = softmax(hidden · headᵀ · inverse_temperature). A target outside of the vocabulary gets NaN.
    """
    tokens, device, target_T = len(hidden_TD), hidden_TD.device, target_T.contiguous()
    drop_T = torch.full((tokens,), torch.nan, device=device)
    part_GT = _tiles(
        hidden_TD, head_VD, inverse_temperature, drop_T, entropy=entropy, target_T=target_T
    )
    logp_T, peak_T, total_T = torch.empty((3, tokens), device=device).unbind()
    entropy_T = torch.empty_like(logp_T) if entropy else None
    options = _join_options(head_VD, greedy=False)
    _join[(triton.cdiv(tokens, options["ROWS"]),)](
        *part_GT, drop_T, target_T, None, None, None,
        logp_T, entropy_T, peak_T, total_T, None, tokens, **options,
    )  # fmt: skip
    return logp_T, entropy_T, peak_T, total_T


def sample(
    hidden_BD: Tensor,
    head_VD: Tensor,
    key_B4: Tensor,
    position_B: Tensor,
    inverse_temperature: float = 1.0,
    greedy: bool = False,
    end_K: Tensor | None = None,
    may_end_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row, or take the likeliest (the lowest id of equals), with its log p.

    Rows that may not end cannot draw the tokens of `end_K`, which lose their share of p.
    """
    rows, device = len(hidden_BD), hidden_BD.device
    key_B4, position_B = key_B4.contiguous(), position_B.contiguous()
    shape = (triton.cdiv(len(head_VD), COLUMNS), rows)
    drop_GB = torch.empty(shape, device=device)
    token_GB = torch.empty(shape, dtype=torch.int32, device=device)
    part_GB = _tiles(
        hidden_BD,
        head_VD,
        inverse_temperature,
        drop_GB,
        greedy=greedy,
        key_B4=key_B4,
        position_B=position_B,
        end_K=None if may_end_B is None else end_K,
        may_end_B=None if may_end_B is None else may_end_B.contiguous(),
        token_GB=token_GB,
    )
    token_B = torch.empty((rows,), dtype=torch.int64, device=device)
    logp_B = torch.empty((rows,), device=device)
    options = _join_options(head_VD, greedy=greedy)
    _join[(triton.cdiv(rows, options["ROWS"]),)](
        *part_GB, drop_GB, None, token_GB, key_B4, position_B,
        logp_B, None, None, None, token_B, rows, **options,
    )  # fmt: skip
    return token_B, logp_B


def grad_logits(
    logits_CV: Tensor,
    target_C: Tensor,
    peak_C: Tensor,
    total_C: Tensor,
    entropy_C: Tensor | None,
    grad_logp_C: Tensor,
    grad_entropy_C: Tensor | None,
    inverse_temperature: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return the loss's gradient by the logits, which are float32 and before the temperature.

    ∂ log p_i/∂z_j = [i = j] − p_j,   ∂H/∂z_j = −p_j (log p_j + H).
    """
    rows, vocabulary = logits_CV.shape
    out_CV = torch.empty((rows, vocabulary), dtype=out_dtype, device=logits_CV.device)
    _grad_logits[(rows, triton.cdiv(vocabulary, GRADIENT_BLOCK))](
        logits_CV, target_C, peak_C, total_C, entropy_C, grad_logp_C, grad_entropy_C,
        inverse_temperature, out_CV, V=vocabulary, BLOCK=GRADIENT_BLOCK, num_warps=8,
    )  # fmt: skip
    return out_CV


class HeadScore(torch.autograd.Function):
    """`score` with gradients: (logp_T, entropy_T or None). Logits are made again a chunk at a time.

    An entropy that is only measured costs nothing backward. The head's gradient is summed and given
    back in float32; autograd rounds it if the parameter's `grad_dtype` asks for less.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        head_VD: Tensor,
        target_T: Tensor,
        inverse_temperature: float = 1.0,
        entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        logp_T, entropy_T, peak_T, total_T = score(
            hidden_TD, head_VD, target_T, inverse_temperature, entropy
        )
        ctx.save_for_backward(hidden_TD, head_VD, target_T, peak_T, total_T, entropy_T)
        ctx.inverse_temperature = inverse_temperature
        ctx.set_materialize_grads(False)
        return logp_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logp_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_TD, head_VD, target_T, peak_T, total_T, entropy_T = ctx.saved_tensors
        need_hidden, need_head = ctx.needs_input_grad[:2]
        if grad_logp_T is None:
            grad_logp_T = torch.zeros_like(peak_T)
        wide_VD = widened(head_VD)
        grad_hidden_TD = torch.empty_like(hidden_TD) if need_hidden else None
        grad_head_VD = torch.zeros_like(head_VD, dtype=torch.float32) if need_head else None
        rows = max(1, CHUNK_NUMBERS // len(head_VD))
        for at in range(0, len(hidden_TD), rows):
            part = slice(at, at + rows)
            hidden_CD = hidden_TD[part].to(wide_VD.dtype)
            grad_CV = grad_logits(
                _wide_product(hidden_CD, wide_VD.t()),
                target_T[part].contiguous(),
                peak_T[part],
                total_T[part],
                None if entropy_T is None else entropy_T[part],
                grad_logp_T[part].contiguous(),
                None if grad_entropy_T is None else grad_entropy_T[part].contiguous(),
                ctx.inverse_temperature,
                wide_VD.dtype,
            )
            if grad_hidden_TD is not None:
                grad_hidden_TD[part] = _wide_product(grad_CV, wide_VD)
            if grad_head_VD is not None:
                _add_product(grad_head_VD, grad_CV.t(), hidden_CD)
        return grad_hidden_TD, grad_head_VD, None, None, None


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply in float32: cuBLAS adds parts of long sums in the precision of the result."""
    return a @ b if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def _tiles(
    hidden_TD: Tensor,
    head_VD: Tensor,
    inverse_temperature: float,
    drop: Tensor,
    *,
    entropy: bool = False,
    greedy: bool = False,
    target_T: Tensor | None = None,
    key_B4: Tensor | None = None,
    position_B: Tensor | None = None,
    end_K: Tensor | None = None,
    may_end_B: Tensor | None = None,
    token_GB: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch the first kernel: every tile's peak, sum of exp, and moment if entropy is asked."""
    check_operands(hidden_TD, head_VD)
    (tokens, width), vocabulary = hidden_TD.shape, len(head_VD)
    tile = _choose_tile(tokens, hidden_TD.dtype)
    depth = fitting(tile.depth, width)
    shape = (triton.cdiv(vocabulary, COLUMNS), tokens)
    peak_GT, total_GT = torch.empty((2, *shape), device=hidden_TD.device).unbind()
    moment_GT = torch.empty_like(peak_GT) if entropy else None
    _tile[(triton.cdiv(tokens, tile.rows) * shape[0],)](
        TensorDescriptor.from_tensor(hidden_TD, [tile.rows, depth]),
        TensorDescriptor.from_tensor(head_VD, [COLUMNS, depth]),
        inverse_temperature, target_T, key_B4, position_B, end_K, may_end_B,
        peak_GT, total_GT, moment_GT, drop, token_GB, tokens,
        V=vocabulary, D=width, ENDS=0 if end_K is None else len(end_K), GREEDY=greedy,
        ROWS=tile.rows, COLUMNS=COLUMNS, LANES=LANES, DEPTH=depth, GROUP=GROUP,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return peak_GT, total_GT, moment_GT


def _choose_tile(tokens: int, dtype: torch.dtype) -> Tile:
    """Choose the tile: few rows get a smaller one of the same instruction and the same bits."""
    if dtype == torch.float32:
        return SINGLE_TILE
    return HALF_TILES[tokens > HALF_TILES[0].rows]


def _join_options(head_VD: Tensor, *, greedy: bool) -> dict[str, Any]:
    tiles = triton.cdiv(len(head_VD), COLUMNS)
    width = triton.next_power_of_2(tiles)
    return {
        "TILES": tiles,
        "WIDTH": width,
        "COLUMNS": COLUMNS,
        "ROWS": max(1, min(64, JOINED // width)),
        "GREEDY": greedy,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }


@triton.jit(do_not_specialize=["T"])
def _tile(
    hidden, head, inverse_temperature, target_T, key_T4, position_T, end_K, may_end_T,
    peak_GT, total_GT, moment_GT, drop, token_GT, T,
    V: tl.constexpr, D: tl.constexpr, ENDS: tl.constexpr, GREEDY: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    row_tile, tile = tile_place(tl.cdiv(T, ROWS), tl.cdiv(V, COLUMNS), GROUP)
    z_RB = product_tile(hidden, head, row_tile * ROWS, tile * COLUMNS, D, ROWS, COLUMNS, DEPTH)
    z_RB *= inverse_temperature
    row_R = row_tile * ROWS + tl.arange(0, ROWS)
    column_B = tile * COLUMNS + tl.arange(0, COLUMNS)
    here_R, out_R = row_R < T, tile * T + row_R
    if V % COLUMNS != 0:
        z_RB = tl.where((column_B < V)[None, :], z_RB, FLOOR)
    if ENDS > 0:
        barred_B = column_B < 0
        for place in tl.static_range(ENDS):
            barred_B |= column_B == tl.load(end_K + place)
        barred_R = tl.load(may_end_T + row_R, mask=here_R, other=1) == 0
        z_RB = tl.where(barred_R[:, None] & barred_B[None, :], FLOOR, z_RB)
    peak_R = tl.max(z_RB, axis=1)
    shifted_RB = z_RB - peak_R[:, None]
    e_RB = tl.exp(shifted_RB)
    e_RL = tl.sum(tl.reshape(e_RB, (ROWS, COLUMNS // LANES, LANES)), axis=1)
    tl.store(peak_GT + out_R, peak_R, mask=here_R)
    tl.store(total_GT + out_R, tl.sum(e_RL, axis=1), mask=here_R)
    if moment_GT is not None:
        tl.store(moment_GT + out_R, tl.sum(e_RB * shifted_RB, axis=1), mask=here_R)
    if token_GT is None:
        target_R = tl.load(target_T + row_R, mask=here_R, other=-1)
        end = tl.minimum(tile * COLUMNS + COLUMNS, V)
        hit_R = (target_R >= tile * COLUMNS) & (target_R < end)
        if tl.max(hit_R.to(tl.int32), axis=0) > 0:
            hit_RB = column_B[None, :] == target_R[:, None]
            tl.store(drop + row_R, tl.sum(tl.where(hit_RB, shifted_RB, 0.0), axis=1), mask=hit_R)
    elif GREEDY:
        peak_RB = tl.where(shifted_RB == 0, column_B[None, :], V - 1)
        tl.store(token_GT + out_R, tl.min(peak_RB, axis=1), mask=here_R)
        tl.store(drop + out_R, tl.zeros_like(peak_R), mask=here_R)
    else:
        a, b, c, d = _words(key_T4, position_T, row_R, here_R, tile + 1)
        lane_R = _pick(e_RL, _fraction(a, b), LANES)
        # The lane's exp are made again, as the same numbers: the tile's would need registers.
        shifted_RHL = tl.reshape(shifted_RB, (ROWS, COLUMNS // LANES, LANES))
        lane_RHL = lane_R[:, None, None] == tl.arange(0, LANES)[None, None, :]
        shifted_RH = tl.sum(tl.where(lane_RHL, shifted_RHL, 0.0), axis=2)
        step_R = _pick(tl.exp(shifted_RH), _fraction(c, d), COLUMNS // LANES)
        step_RH = step_R[:, None] == tl.arange(0, COLUMNS // LANES)[None, :]
        # Of NaN, columns behind the vocabulary are the largest: no token may come out of them.
        token_R = tl.minimum(tile * COLUMNS + step_R * LANES + lane_R, V - 1)
        tl.store(token_GT + out_R, token_R, mask=here_R)
        tl.store(drop + out_R, tl.sum(tl.where(step_RH, shifted_RH, 0.0), axis=1), mask=here_R)


@triton.jit(do_not_specialize=["T"])
def _join(
    peak_GT, total_GT, moment_GT, drop, target_T, token_GT, key_T4, position_T,
    logp_T, entropy_T, peak_T, total_T, token_T, T,
    TILES: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    GREEDY: tl.constexpr,
):  # fmt: skip
    """Join a row's tiles, in float64: its order of adding leaves no trace in float32."""
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile_G = tl.arange(0, WIDTH)
    here_R = row_R < T
    here_RG = here_R[:, None] & (tile_G < TILES)[None, :]
    at_RG = tile_G[None, :] * T + row_R[:, None]
    peak_RG = tl.load(peak_GT + at_RG, mask=here_RG, other=FLOOR)
    part_RG = tl.load(total_GT + at_RG, mask=here_RG, other=1.0).to(tl.float64)
    peak_R = tl.max(peak_RG, axis=1)
    below_RG = peak_RG - peak_R[:, None]
    scale_RG = tl.exp(below_RG).to(tl.float64)
    part_scaled_RG = part_RG * scale_RG
    total_R = tl.sum(part_scaled_RG, axis=1)
    log_total_R = tl.log(total_R)
    if token_T is None:
        tile_R = tl.load(target_T + row_R, mask=here_R, other=0) // COLUMNS
        tile_R = tl.minimum(tl.maximum(tile_R, 0), TILES - 1)
        drop_R = tl.load(drop + row_R, mask=here_R, other=0.0)
        tl.store(peak_T + row_R, peak_R, mask=here_R)
        tl.store(total_T + row_R, total_R.to(tl.float32), mask=here_R)
    else:
        if GREEDY:
            tile_R = tl.min(tl.where(below_RG == 0, tile_G[None, :], TILES - 1), axis=1)
        else:
            a, b, _c, _d = _words(key_T4, position_T, row_R, here_R, 0)
            # Beside NaN, what stands behind the last tile has the highest peak.
            tile_R = _pick(tl.where(here_RG, part_scaled_RG, 0.0), _fraction(a, b), WIDTH)
        token_R = tl.load(token_GT + tile_R * T + row_R, mask=here_R, other=0)
        tl.store(token_T + row_R, token_R.to(tl.int64), mask=here_R)
        drop_R = tl.load(drop + tile_R * T + row_R, mask=here_R, other=0.0)
    tile_peak_R = tl.load(peak_GT + tile_R * T + row_R, mask=here_R, other=0.0)
    below_R = drop_R.to(tl.float64) + (tile_peak_R - peak_R).to(tl.float64)
    tl.store(logp_T + row_R, (below_R - log_total_R).to(tl.float32), mask=here_R)
    if moment_GT is not None:
        moment_RG = tl.load(moment_GT + at_RG, mask=here_RG, other=0.0).to(tl.float64)
        moment_RG = (moment_RG + part_RG * below_RG.to(tl.float64)) * scale_RG
        entropy_R = log_total_R - tl.sum(moment_RG, axis=1) / total_R
        tl.store(entropy_T + row_R, entropy_R.to(tl.float32), mask=here_R)


@triton.jit
def _words(key_T4, position_T, row_R, here_R, call):
    """Return the generator's four words for this row, position and call (engine/randomness.py)."""
    key_R = key_T4 + row_R * 4
    left_R = tl.load(key_R, mask=here_R, other=0).to(tl.uint32)
    right_R = tl.load(key_R + 1, mask=here_R, other=0).to(tl.uint32)
    third_R = tl.load(key_R + 2, mask=here_R, other=0).to(tl.uint32)
    fourth_R = tl.load(key_R + 3, mask=here_R, other=0).to(tl.uint32)
    position_R = tl.load(position_T + row_R, mask=here_R, other=0).to(tl.uint32)
    call_R = tl.zeros_like(position_R) + call
    seed_R = (right_R.to(tl.uint64) << 32) | left_R.to(tl.uint64)
    return tl.philox(seed_R, call_R.to(tl.uint32), position_R, third_R, fourth_R)


@triton.jit
def _fraction(high, low):
    """Make a number in [0, 1) of 53 bits."""
    high, low = (high >> 5).to(tl.float64), (low >> 6).to(tl.float64)
    return (high * 67108864.0 + low) * 1.1102230246251565e-16


@triton.jit
def _pick(weight_RK, uniform_R, WIDTH: tl.constexpr):
    """Pick the first entry with weight whose running sum passes uniform x total, else the last.

    Entries of weight 0 are asked for by name: a parallel running sum may rise there by rounding.
    """
    weight_RK = weight_RK.to(tl.float64)
    sum_RK = tl.cumsum(weight_RK, axis=1)
    goal_R = uniform_R * tl.max(sum_RK, axis=1)
    place_K = tl.arange(0, WIDTH)[None, :]
    first_R = tl.min(tl.where((weight_RK > 0) & (sum_RK > goal_R[:, None]), place_K, WIDTH), axis=1)
    last_R = tl.max(tl.where(weight_RK > 0, place_K, 0), axis=1)
    return tl.minimum(first_R, last_R)


@triton.jit
def _grad_logits(
    logits_CV, target_C, peak_C, total_C, entropy_C, grad_logp_C, grad_entropy_C,
    inverse_temperature, out_CV, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column_B = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here_B = column_B < V
    peak, total = tl.load(peak_C + row), tl.load(total_C + row)
    grad_logp = tl.load(grad_logp_C + row)
    z_B = tl.load(logits_CV + row * V + column_B, mask=here_B, other=-float("inf"))
    z_B = z_B * inverse_temperature - peak
    e_B = tl.exp(z_B)
    slope_B = tl.zeros_like(z_B) + grad_logp / total
    if grad_entropy_C is not None:
        level = tl.load(entropy_C + row) - tl.log(total)
        bend = tl.load(grad_entropy_C + row) / total
        slope_B += tl.where(e_B > 0, (z_B + level) * bend, 0.0)
    hit_B = column_B == tl.load(target_C + row)
    grad_B = (tl.where(hit_B, grad_logp, 0.0) - e_B * slope_B) * inverse_temperature
    tl.store(out_CV + row * V + column_B, grad_B.to(out_CV.dtype.element_ty), mask=here_B)
