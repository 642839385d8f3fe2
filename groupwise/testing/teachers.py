"""Cases of kind `distillation_loss`: divergences from a teacher, on the logits of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from groupwise.errors import CaseError
from groupwise.groups.token_baselines import teacher_return
from groupwise.losses.distillation import divergence, with_rest
from groupwise.records import TokenBatch
from groupwise.testing.schema import Case, grid, params_of, plain, tensor, whole

Found = dict[str, Any]


def distillation(case: Case) -> Found:
    """Compute a token mean of a divergence, or MiniLLM's two terms."""
    known = {"gjsd": _gjsd, "topk_kl": _topk, "minillm": _minillm}
    if case["method"] not in known:
        raise CaseError(
            f"kind 'distillation_loss' knows {', '.join(known)}, not {case['method']!r}."
        )
    mask_NT = tensor(case["inputs"]["mask"], "mask") != 0
    leaf = grid(case["inputs"], "student_logits", mask_NT, 3).requires_grad_()
    teacher = grid(case["inputs"], "teacher_logits", mask_NT, 3)
    heat = float(params_of(case).get("temperature", 1.0))
    if heat <= 0:
        raise CaseError(f"temperature={heat!r} must be above 0.")
    both = [(x / heat).log_softmax(-1) for x in (leaf, teacher)]
    loss, found = known[case["method"]](case, mask_NT, *both)
    (grad,) = torch.autograd.grad(loss, leaf)
    return {"loss": plain(loss), "grad_logits": plain(grad, mask_NT), **found}


def _mean(value_NT: Tensor, mask_NT: Tensor) -> tuple[Tensor, Found]:
    masked_NT = torch.where(mask_NT, value_NT, 0.0)
    loss = masked_NT.sum() / mask_NT.sum().clamp(min=1)
    return loss, {"divergence": plain(value_NT, mask_NT)}


def _gjsd(case: Case, mask_NT: Tensor, policy: Tensor, teacher: Tensor) -> tuple[Tensor, Found]:
    beta = float(params_of(case).get("beta", 0.5))
    if not 0.0 <= beta <= 1.0:
        raise CaseError(f"beta={beta!r} must lie in [0, 1].")
    return _mean(divergence(policy, teacher, beta), mask_NT)


def _topk(case: Case, mask_NT: Tensor, policy: Tensor, teacher: Tensor) -> tuple[Tensor, Found]:
    """Take k tokens of teacher or student, and treat all others by the word `tail`."""
    params = params_of(case)
    words = {
        "direction": ("forward", "reverse"),
        "tail": ("rest", "renormalise", "none"),
        "support": ("teacher", "student"),
    }
    for name, options in words.items():
        if params.get(name, options[0]) not in options:
            raise CaseError(f"{name}={params[name]!r} is unknown: {', '.join(options)}.")
    k = whole(params.get("k", policy.shape[-1]), "k")
    if not 1 <= k <= policy.shape[-1]:
        raise CaseError(f"k={k} must lie in 1..{policy.shape[-1]}, the vocabulary.")
    support = teacher if params.get("support", "teacher") == "teacher" else policy
    at = support.detach().topk(k, dim=-1).indices
    both = [x.gather(-1, at) for x in (policy, teacher)]
    tail = params.get("tail", "rest")
    if tail == "rest" and k < policy.shape[-1]:
        both = [with_rest(x) for x in both]
    elif tail == "renormalise":
        both = [x.log_softmax(-1) for x in both]
    beta = 0.0 if params.get("direction", "forward") == "forward" else 1.0
    return _mean(divergence(both[0], both[1], beta), mask_NT)


def _minillm(case: Case, mask_NT: Tensor, policy: Tensor, teacher: Tensor) -> tuple[Tensor, Found]:
    params = params_of(case)
    token_NT = torch.where(mask_NT, tensor(case["inputs"]["tokens"], "tokens"), 0.0).long()
    if ((token_NT < 0) | (token_NT >= policy.shape[-1])).any():
        raise CaseError(
            f"tokens must lie in 0..{policy.shape[-1] - 1}, as the logits have so many."
        )
    logp_NT, theirs_NT = (x.gather(-1, token_NT[..., None])[..., 0] for x in (policy, teacher))
    batch = TokenBatch.build(
        mask_NT=mask_NT,
        group_N=[0] * len(mask_NT),
        reward_N=[0.0] * len(mask_NT),
        now_logp_NT=logp_NT,
        teacher_logp_NT=theirs_NT,
    )
    length = "mean" if params.get("length_normalise", True) else "sum"
    current = "counted" if params.get("include_current", True) else "left_out"
    x_NT = teacher_return(batch, float(params.get("gamma", 1.0)), length, current)
    single, _ = _mean(divergence(policy, teacher, 1.0), mask_NT)
    score = (x_NT * torch.where(mask_NT, logp_NT, 0.0)).sum() / mask_NT.sum().clamp(min=1)
    loss = single - score if params.get("single_step", True) else -score
    return loss, {"advantages": plain(x_NT, mask_NT), "single_step": plain(single)}
