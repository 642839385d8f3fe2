"""Which arithmetic a model gets: the fastest that its device, its precision and Triton allow."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from groupwise.errors import ModelError, in_short
from groupwise.model.borrowed.policy import Borrowed
from groupwise.model.layers.head import HeadQuery
from groupwise.model.layers.ops import Plain
from groupwise.model.layers.order import fix_order
from groupwise.model.layers.transformer import Policy, Transformer
from groupwise.model.throughput import throughput_line
from groupwise.model.tiles import prepare_products

# Tokens for which kernels take the largest of their tiles. The head needs more than one tile of
# 64; exact products need a tile of 128 for each of an H200's multiprocessors.
MANY, MANY_EXACT = 128, 128 * 132


def equip(model: Policy, *, exact: bool) -> list[str]:
    """Set the model's `ops`; returns what a person should know about the choice."""
    device = model.head_weight.device
    if isinstance(model, Borrowed):
        return _equip_borrowed(model, exact)
    fix_order(exact)
    reason = _obstacle(cast(Transformer, model), exact)
    if reason is None:
        return [_EXACT if exact else _FAST]
    model.ops = Plain()
    if exact:
        fix_order(False)
        raise ModelError(
            f"engine.exact needs kernels that can't be used here: {reason}. Set engine.exact=false."
            + (
                " On a CPU in float32 sampler and learner agree to the bit anyway, for sequences "
                "of up to 128 tokens."
                if device.type == "cpu"
                else ""
            )
        )
    if device.type != "cuda":
        return []
    return [f"no kernels: {reason}. Plain PyTorch runs instead, several times slower."]


def _equip_borrowed(model: Borrowed, exact: bool) -> list[str]:
    family = model.config.family
    if exact:
        raise ModelError(
            f"engine.exact needs groupwise's own layers, and {family} runs through transformers. "
            "Set engine.exact=false."
        )
    fix_order(False)
    return [
        f"{family} runs through transformers, without groupwise's layers: {throughput_line(model)}"
    ]


_FAST = (
    "fast mode: sampler and learner differ in last bits, measured at every step; a rerun repeats "
    "the numbers approximately, not bit for bit (engine.exact=true does)"
)
_EXACT = "exact mode: sampler and learner agree to the last bit, and a rerun repeats bit for bit"


def check_precision(device: str, dtype: str) -> None:
    """Refuse bfloat16 on a GPU that only imitates it, and what a device can't multiply at all."""
    if (
        torch.device(device).type == "cuda"
        and dtype == "bfloat16"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise ModelError(
            f"{torch.cuda.get_device_name(device)} has no bfloat16 arithmetic (it came with "
            "compute capability 8.0). Set model.dtype=float32."
        )
    prepare_products(device, getattr(torch, dtype))
    try:
        small = torch.ones(2, 2, dtype=getattr(torch, dtype), device=device)
        torch.mm(small, small)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        other = "float32" if dtype != "float32" else "bfloat16"
        raise ModelError(
            f"{device} can't compute in {dtype} ({in_short(error)}). Set model.dtype={other}, or "
            "another model.device."
        ) from error


def _obstacle(model: Transformer, exact: bool) -> str | None:
    """Give the model its kernels; why they can't be used, if they can't."""
    device, dtype = model.head_weight.device, model.head_weight.dtype
    if device.type != "cuda":
        return f"they are for a GPU, and model.device is {device.type}"
    if dtype != torch.bfloat16:
        return f"they are for bfloat16, and model.dtype is {str(dtype).removeprefix('torch.')}"
    return _take_kernels(model, exact)


def _take_kernels(model: Transformer, exact: bool) -> str | None:
    try:
        from groupwise.model.layers.fast import Exact, Fast
    except ImportError as error:
        return f"Triton can't be imported ({error})"
    model.ops = Exact() if exact else Fast()
    try:
        model.ops.lay_out(model)
        _rehearse(model, MANY_EXACT if exact else MANY)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{model.head_weight.device} ran out of memory while the model's kernels were tried: "
            "with its weights there is no room left to work in. Free the GPU of other programs, or "
            "take a smaller model."
        ) from error
    except Exception as error:  # what a compiler may raise is not ours to list
        return f"a kernel failed ({in_short(error)})"
    return None


def _rehearse(model: Transformer, many: int) -> None:
    """Run every kernel of the learner once: what fails shall fail before the run.

    A prompt of three tokens and two answers of two, forward and backward; then many tokens.
    Gradients are those of one layer: a model that is only sampled from may have no room for more.
    """
    before = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    model.requires_grad_(False)
    for parameter in model.layers[0].parameters():
        parameter.requires_grad = parameter.is_floating_point()  # quantised weights are integers
    try:
        logp_T = _log_probs(model, [3], [[2, 2]], [0, 1, 2, 3, 4, 3, 4])
        logp_T.sum().backward()  # type: ignore[no-untyped-call]
    finally:
        for parameter, asked, gradient in before:
            parameter.requires_grad, parameter.grad = asked, gradient
    with torch.no_grad():
        _log_probs(model, [8] * (many // 8), [[]] * (many // 8), [*range(8)] * (many // 8))
    if model.head_weight.is_cuda:
        torch.cuda.synchronize(model.head_weight.device)  # an error of a kernel belongs here


def _log_probs(
    model: Transformer, prompts: list[int], behind: list[list[int]], positions: list[int]
) -> Tensor:
    device = model.head_weight.device
    token_T = torch.zeros(len(positions), dtype=torch.long, device=device)
    position_T = torch.tensor(positions, device=device)
    attend = model.ops.attention(prompts, behind, device)
    every_T = torch.arange(len(positions), device=device)
    query = HeadQuery(every_T, token_T, entropy=True)
    return model.predict(token_T, position_T, attend, query).logp_T
