"""Log-probabilities, entropy and top-k from hidden states, without tokens x vocabulary in memory.

Logits are made in float32 (float64 for float64 inputs), a chunk of tokens at a time, and made
again in the backward pass. Sampler and learner both go through `logits`, so they read the same
head.

Memory beyond inputs and outputs: two chunks of `chunk x V` numbers, a float32 gradient of the
head, and for half-precision weights on a CPU one float32 copy of the head. Measured by the rise of
the process's peak, forward and backward with entropy, 2,048 tokens, vocabulary 49,152, width 576,
float32: 183 MiB here (of which 108 MiB are the head's gradient), 1,927 MiB for log_softmax of all
logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from groupwise.errors import ModelError
from groupwise.model.layers.products import is_wide, times, times_into

# Logits in memory at a time: 32 MiB of float32 stay near a CPU's caches, 512 MiB fill a GPU.
CHUNK_NUMBERS, CHUNK_NUMBERS_CUDA = 2**23, 2**27
CACHED_COLUMNS = 2048


@dataclass(frozen=True, eq=False)
class HeadRule:
    """A rule of some models for z = hidden · weightᵀ: cap · tanh(scale · (z + bias) / cap)."""

    scale: float = 1.0
    cap: float | None = None
    bias_V: Tensor | None = None


NO_RULE = HeadRule()


@dataclass(frozen=True, eq=False)
class HeadQuery:
    """A question to the head: of which hidden states, about which tokens, and what else."""

    take_A: Tensor  # rows of the pack; a row may be asked several times
    token_A: Tensor
    temperature: float = 1.0
    entropy: bool = False
    top_k: int = 0  # the policy's own likeliest tokens
    square_mass: bool = False  # log Σp², without gradient
    at_AK: Tensor | None = None  # given ids
    against: tuple[Opposite, ...] = ()  # other models' distributions, to differ from


@dataclass(frozen=True, eq=False)
class Opposite:
    """Another model's head and hidden states, for some of the tokens that are asked about."""

    at_B: Tensor  # which of them
    hidden_BD: Tensor
    weight_VD: Tensor
    rule: HeadRule
    beta: float  # of the divergence: see losses/distillation.py


class HeadOutputs(NamedTuple):
    """The head's outputs for each token, at the temperature asked for. All but ids carry grad.

    A tuple, because hooks around a forward pass look for tensors in those, and in no records.
    """

    logp_T: Tensor
    entropy_T: Tensor | None = None
    topk_logp_TK: Tensor | None = None
    topk_id_TK: Tensor | None = None
    logp_at_TK: Tensor | None = None
    divergence_T: Tensor | None = None
    square_mass_T: Tensor | None = None  # in logarithms


def log_probs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    token_T: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    top_k: int = 0,
    at_TK: Tensor | None = None,
    chunk: int | None = None,
    rule: HeadRule = NO_RULE,
) -> HeadOutputs:
    """Return log p(token | hidden), p = softmax(hidden · weightᵀ / temperature), and what is asked.

    `rule` acts on the product. `top_k` adds the policy's own most likely tokens, `at_TK` the
    log-probabilities of given ids.
    """
    _check(hidden_TD, weight_VD, token_T, temperature, top_k)
    ids_TI = token_T[:, None] if at_TK is None else torch.cat((token_T[:, None], at_TK), dim=1)
    room = CHUNK_NUMBERS_CUDA if weight_VD.is_cuda else CHUNK_NUMBERS
    rows = chunk or max(1, room // weight_VD.shape[0])
    logp_TI, entropy_T, topk_id_TK = _Head.apply(  # type: ignore[no-untyped-call]
        hidden_TD, weight_VD, rule.bias_V, ids_TI, temperature, entropy, top_k, rows, rule
    )
    given = ids_TI.shape[1]
    return HeadOutputs(
        logp_T=logp_TI[:, 0],
        entropy_T=entropy_T if entropy else None,
        topk_logp_TK=logp_TI[:, given:] if top_k else None,
        topk_id_TK=topk_id_TK if top_k else None,
        logp_at_TK=None if at_TK is None else logp_TI[:, 1:given],
    )


@torch.no_grad()
def log_square_mass(
    hidden_TD: Tensor, weight_VD: Tensor, temperature: float, rule: HeadRule = NO_RULE
) -> Tensor:
    """Return log Σ_v p_v² of each token: the log of how often two samples of it agree."""
    weight = widened(weight_VD)
    room = CHUNK_NUMBERS_CUDA if weight_VD.is_cuda else CHUNK_NUMBERS
    rows = max(1, room // len(weight_VD))
    parts = []
    for part in chunks(len(hidden_TD), rows):
        z_CV = logits(hidden_TD[part], weight, temperature, rule=rule)
        parts.append((2 * z_CV).logsumexp(-1) - 2 * z_CV.logsumexp(-1))
    return torch.cat(parts)


def logits(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    temperature: float = 1.0,
    out: Tensor | None = None,
    rule: HeadRule = NO_RULE,
) -> Tensor:
    """Return hidden · weightᵀ / temperature, summed in float32 whatever the model's precision."""
    head_VD = widened(weight_VD)
    if out is None or head_VD.is_cuda:
        logits_TV = product(hidden_TD, head_VD.t(), out)
    else:  # a CPU is a sixth faster where a part of the head stays in its cache; same bits
        logits_TV, hidden_TD = out, hidden_TD.to(head_VD.dtype)
        for part in chunks(len(head_VD), CACHED_COLUMNS):
            product(hidden_TD, head_VD[part].t(), out[:, part])
    if rule is not NO_RULE:
        _follow(rule, logits_TV)
    return logits_TV if temperature == 1.0 else logits_TV.div_(temperature)


def _follow(rule: HeadRule, logits_TV: Tensor) -> None:
    """Apply the rule in place."""
    if rule.bias_V is not None:
        logits_TV.add_(rule.bias_V.detach())
    if rule.cap is not None:
        logits_TV.mul_(rule.scale / rule.cap).tanh_().mul_(rule.cap)
    elif rule.scale != 1.0:
        logits_TV.mul_(rule.scale)


class _Head(torch.autograd.Function):
    """z = logits/τ: log p_i = z_i − lse(z), H = −Σ p log p.

    ∂ log p_i/∂z_j = [i = j] − p_j,   ∂H/∂z_j = −p_j (log p_j + H). Before a rule, with the product
    x and z = cap·tanh(scale·x/cap)/τ: ∂z/∂x = (1 − (τz/cap)²)·scale/τ.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        ids_TI: Tensor,
        temperature: float,
        entropy: bool,
        top_k: int,
        rows: int,
        rule: HeadRule,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weight = widened(weight_VD)
        buffers = _buffers(hidden_TD, weight_VD, rows, 2)
        parts = []
        for part in chunks(len(hidden_TD), rows):
            z_CV, work_CV = (b[: part.stop - part.start] for b in buffers)
            logits(hidden_TD[part], weight, temperature, out=z_CV, rule=rule)
            parts.append(_read(z_CV, work_CV, ids_TI[part], entropy, top_k))
        logp_TI, entropy_T, peak_T, total_T, topk_id_TK = (
            torch.cat(x) for x in zip(*parts, strict=True)
        )
        all_ids_TI = torch.cat((ids_TI, topk_id_TK), dim=1) if top_k else ids_TI
        ctx.save_for_backward(hidden_TD, weight_VD, all_ids_TI, peak_T, total_T, entropy_T)
        ctx.temperature, ctx.rows, ctx.rule = temperature, rows, rule
        ctx.mark_non_differentiable(topk_id_TK)
        ctx.set_materialize_grads(False)  # an entropy that is only measured costs nothing backward
        return logp_TI, entropy_T, topk_id_TK

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logp_TI: Tensor | None, grad_entropy_T: Tensor | None, _ids: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, ids_TI, peak_T, total_T, entropy_T = ctx.saved_tensors
        if grad_logp_TI is None:
            grad_logp_TI = torch.zeros_like(ids_TI, dtype=peak_T.dtype)
        weight = widened(weight_VD)
        rule: HeadRule = ctx.rule
        sums = HeadGradients(
            hidden_TD, weight_VD, ctx.temperature, rule, ctx.needs_input_grad[:3], peak_T.dtype
        )
        # p = e/total with e = exp(z − peak). The small numbers are put together first: a
        # rounded log-sum-exp would shift all of a row's probabilities alike.
        slope_T1 = (grad_logp_TI.sum(1) / total_T)[:, None]
        bend_T1 = None if grad_entropy_T is None else (grad_entropy_T / total_T)[:, None]
        level_T1 = (entropy_T - total_T.log())[:, None]
        buffers = _buffers(hidden_TD, weight_VD, ctx.rows, 2)
        for part in chunks(len(hidden_TD), ctx.rows):
            z_CV, e_CV = (b[: part.stop - part.start] for b in buffers)
            logits(hidden_TD[part], weight, ctx.temperature, out=z_CV, rule=rule)
            steep_CV = steepness(rule, z_CV, ctx.temperature)
            z_CV.sub_(peak_T[part, None])
            torch.exp(z_CV, out=e_CV)
            if bend_T1 is not None:
                z_CV.add_(level_T1[part]).mul_(bend_T1[part]).add_(slope_T1[part])
                grad_z_CV = e_CV.mul_(z_CV).neg_()
            else:
                grad_z_CV = e_CV.mul_(-slope_T1[part])
            grad_z_CV.scatter_add_(1, ids_TI[part], grad_logp_TI[part])
            sums.add(part, grad_z_CV, steep_CV)
        return *sums.found(), None, None, None, None, None, None


def steepness(rule: HeadRule, z_CV: Tensor, temperature: float) -> Tensor | None:
    """Return how much a capped logit still moves with its product; None where nothing is capped."""
    if rule.cap is None:
        return None
    return z_CV.mul(temperature / rule.cap).square_().neg_().add_(1)


class HeadGradients:
    """Sums gradients of logits over chunks of tokens, as gradients of what the logits came from."""

    def __init__(
        self,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        temperature: float,
        rule: HeadRule,
        needs: tuple[bool, bool, bool],
        dtype: torch.dtype,
    ) -> None:
        self.hidden_TD, self.weight_VD, self.weight = hidden_TD, weight_VD, widened(weight_VD)
        self.temperature, self.rule = temperature, rule
        of_hidden, of_weight, of_bias = needs
        self.grad_hidden_TD = torch.empty_like(hidden_TD) if of_hidden else None
        self.grad_weight_VD = torch.zeros_like(weight_VD, dtype=dtype) if of_weight else None
        self.grad_bias_V = weight_VD.new_zeros(len(weight_VD), dtype=dtype) if of_bias else None

    def add(self, part: slice, grad_z_CV: Tensor, steep_CV: Tensor | None) -> None:
        """Add a chunk's gradient of z; spoils it."""
        grad_z_CV.div_(self.temperature)
        if self.rule.scale != 1.0:
            grad_z_CV.mul_(self.rule.scale)
        if steep_CV is not None:
            grad_z_CV.mul_(steep_CV)
        if self.grad_bias_V is not None:
            self.grad_bias_V.add_(grad_z_CV.sum(0))
        grad_CV = grad_z_CV.to(self.weight.dtype)
        if self.grad_hidden_TD is not None:
            self.grad_hidden_TD[part] = product(grad_CV, self.weight).to(self.hidden_TD.dtype)
        if self.grad_weight_VD is not None:
            add_product(self.grad_weight_VD, grad_CV.t(), self.hidden_TD[part])

    def found(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden states, weight and bias, in their precisions."""
        weight, bias = self.grad_weight_VD, self.grad_bias_V
        return (
            self.grad_hidden_TD,
            None if weight is None else weight.to(self.weight_VD.dtype),
            None if bias is None else bias.to(self.rule.bias_V.dtype),  # type: ignore[union-attr]
        )


def _read(
    z_CV: Tensor, work_CV: Tensor, ids_CI: Tensor, entropy: bool, top_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return log p at the ids, entropy, peak and sum of exp, top-k ids. Spoils z and work.

    By hand, because torch.logsumexp on a CPU takes as long as the matrix product itself.
    """
    topk_id_CK = z_CV.topk(top_k, dim=-1).indices if top_k else ids_CI[:, :0]
    peak_C1 = z_CV.amax(-1, keepdim=True)
    z_CV.sub_(peak_C1)
    total_C1 = torch.exp(z_CV, out=work_CV).sum(-1, keepdim=True)
    log_total_C1 = total_C1.log()
    logp_CI = z_CV.gather(1, torch.cat((ids_CI, topk_id_CK), dim=1)) - log_total_C1
    entropy_C = log_total_C1[:, 0]
    if entropy:
        entropy_C = entropy_C - work_CV.mul_(z_CV).sum(-1) / total_C1[:, 0]
    return logp_CI, entropy_C, peak_C1[:, 0], total_C1[:, 0], topk_id_CK


def widened(weight_VD: Tensor) -> Tensor:
    """Return the head as the products want it. CUDA sums products of bfloat16 in float32 by itself.

    Not so float16: gradients of unlikely tokens would fall below its smallest number.
    """
    if weight_VD.dtype == torch.float64 or (
        weight_VD.is_cuda and weight_VD.dtype == torch.bfloat16
    ):
        return weight_VD
    return weight_VD.float()


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a @ b in float32, or float64. Products of two bfloat16 numbers fit float32 exactly."""
    a = a.to(b.dtype)
    if is_wide(b):
        return times(a, b.t()) if out is None else times_into(out, a, b.t())
    if b.dtype in (torch.float32, torch.float64):
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    # Only CUDA gets here: elsewhere `widened` has widened the head.
    wide = torch.mm(a, b, out_dtype=torch.float32)
    return wide if out is None else out.copy_(wide)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype and is_wide(total):
        for part in chunks(len(total), CACHED_COLUMNS):
            total[part].add_(times(a[part], b.t().to(a.dtype)))
    elif a.dtype == total.dtype:
        total.addmm_(a, b.to(a.dtype))
    else:
        total.add_(product(a, b.to(a.dtype)))


def _buffers(hidden_TD: Tensor, weight_VD: Tensor, rows: int, count: int) -> list[Tensor]:
    """Made once and used for every chunk: fresh pages cost a CPU as much as the arithmetic."""
    dtype = torch.float64 if weight_VD.dtype == torch.float64 else torch.float32
    shape = (min(rows, len(hidden_TD)), weight_VD.shape[0])
    return [torch.empty(shape, dtype=dtype, device=hidden_TD.device) for _ in range(count)]


def chunks(tokens: int, rows: int) -> list[slice]:
    return [slice(at, min(at + rows, tokens)) for at in range(0, tokens, rows)]


def _check(
    hidden_TD: Tensor, weight_VD: Tensor, token_T: Tensor, temperature: float, top_k: int
) -> None:
    if hidden_TD.dim() != 2 or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ModelError(
            f"Hidden states {tuple(hidden_TD.shape)} do not meet a head {tuple(weight_VD.shape)}: "
            f"the last axes must be equal."
        )
    if token_T.shape != hidden_TD.shape[:1] or len(token_T) == 0:
        raise ModelError(
            f"{tuple(token_T.shape)} tokens for {tuple(hidden_TD.shape)} hidden states: one token "
            f"for each row, and at least one."
        )
    if not 0 < temperature < float("inf"):
        raise ModelError(
            f"temperature is {temperature!r}; log-probabilities need one above 0. Greedy choices "
            f"are scored at the temperature that training uses."
        )
    if not 0 <= top_k <= weight_VD.shape[0]:
        raise ModelError(f"top_k is {top_k}; the vocabulary has {weight_VD.shape[0]} tokens.")
