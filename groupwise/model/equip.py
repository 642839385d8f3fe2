"""Which arithmetic a model gets: the fastest that its device, its precision and Triton allow."""

from __future__ import annotations

import torch

from groupwise.errors import ModelError
from groupwise.model.ops import Plain
from groupwise.model.transformer import Transformer


def equip(model: Transformer, *, exact: bool) -> list[str]:
    """Set the model's `ops`; returns what a person should know about the choice."""
    device, dtype = model.head_weight.device, model.head_weight.dtype
    reason = None
    if device.type != "cuda":
        reason = f"they are for a GPU, and model.device is {device.type}"
    elif dtype != torch.bfloat16:
        reason = f"they are for bfloat16, and model.dtype is {str(dtype).removeprefix('torch.')}"
    else:
        reason = _take_kernels(model, exact)
    if reason is None:
        return [_EXACT if exact else _FAST]
    model.ops = Plain()
    if exact:
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


_FAST = (
    "fast mode: sampler and learner differ in last bits, measured at every step; a rerun repeats "
    "the numbers approximately, not bit for bit (engine.exact=true does)"
)
_EXACT = "exact mode: sampler and learner agree to the last bit, and a rerun repeats bit for bit"


def check_precision(device: str, dtype: str) -> None:
    """Refuse bfloat16 on a GPU that only imitates it."""
    if (
        torch.device(device).type == "cuda"
        and dtype == "bfloat16"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise ModelError(
            f"{torch.cuda.get_device_name(device)} has no bfloat16 arithmetic (it came with "
            "compute capability 8.0). Set model.dtype=float32."
        )


def _take_kernels(model: Transformer, exact: bool) -> str | None:
    """Try them on a few tokens, forward and backward; why they can't be used, if they can't."""
    try:
        from groupwise.model.fast import Exact, Fast
    except ImportError as error:
        return f"Triton can't be imported ({error})"
    model.ops = Exact() if exact else Fast()
    model.ops.lay_out(model)
    try:
        _rehearse(model)
    except Exception as error:  # what a compiler may raise is not ours to list
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        return f"a kernel failed ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
    return None


def _rehearse(model: Transformer) -> None:
    """A prompt of three tokens and two answers of two: every kernel of the learner runs once."""
    device = model.head_weight.device
    token_T = torch.zeros(7, dtype=torch.long, device=device)
    position_T = torch.tensor([0, 1, 2, 3, 4, 3, 4], device=device)
    attend = model.ops.attention([3], [[2, 2]], device)
    before = {name: p.grad for name, p in model.named_parameters()}
    hidden_TD = model(token_T, position_T, attend)
    found = model.ops.log_probs(
        hidden_TD, model.head_weight, token_T, temperature=1.0, entropy=True
    )
    found.logp_T.sum().backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        parameter.grad = before[name]
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # an error of a kernel belongs here
