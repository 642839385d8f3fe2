"""Where a model computes and in which precision: what "auto" comes to on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from groupwise.config.fields import AUTO, Config, Model, Precision
from groupwise.errors import ConfigError, in_short

NVIDIA = Path("/dev"), "nvidia[0-9]*"  # a GPU of theirs, whether or not PyTorch can use it


def placed(config: Config, before: Model | None = None, path: str | Path = "") -> Config:
    """Return the configuration with a device and a precision wherever it says "auto".

    `before` is what a run that goes on was started with: it stays as it was. Where its device is
    not there, the run moves to one that is, in the precision that it has. `path` is the model's,
    where another than the configuration's is loaded.
    """
    model = config.model
    found = place(replace(model, path=str(path or model.path)), before)
    return replace(config, model=replace(found, path=model.path))


def place(model: Model, before: Model | None = None) -> Model:
    """Choose the best device and precision that work for a model."""
    device, dtype = model.device, model.dtype
    if device == AUTO:
        stays = before is not None and _fault(before.device) is None
        device = before.device if before is not None and stays else _best(model)
    if dtype == AUTO:
        dtype = before.dtype if before is not None else _precision(device)
    return replace(model, device=device, dtype=dtype)


def _best(model: Model) -> str:
    """Choose a GPU if there is one; the embedded model is quick, and repeats, on a CPU."""
    return "cpu" if model.path == "tiny" or _idle() is not None else "cuda"


def _precision(device: str) -> Precision:
    """Choose bfloat16 where a GPU computes in it; one that is not here is thought to."""
    if not device.startswith("cuda"):
        return "float32"
    if _fault(device) is not None:
        return "bfloat16"
    with torch.cuda.device(device):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


def _idle() -> str | None:
    """Say why no GPU is used; "" where there is none."""
    if torch.cuda.is_available():
        fault = _fault("cuda")
        return None if fault is None else f"its GPU can't be used: {fault}"
    if torch.backends.mps.is_available():
        return "an Apple GPU is not used: groupwise has been tried on none"
    folder, pattern = NVIDIA
    if any(folder.glob(pattern)):
        return (
            f"PyTorch {torch.__version__} can't use the NVIDIA GPU of this machine; "
            "pytorch.org says how to install one that can"
        )
    return ""


def place_line(model: Model, asked: Model) -> str:
    """Say which model, where and how: "Qwen2.5-0.5B on cuda (NVIDIA H200), bfloat16".

    `asked` is the same before it was placed.
    """
    name = "embedded tiny model" if model.path == "tiny" else Path(model.path).name
    line = f"{name} on {model.device}"
    if model.device.startswith("cuda") and _fault(model.device) is None:
        line += f" ({torch.cuda.get_device_name(model.device)})"
    line += f", {model.dtype}"
    why = passed_over(model, asked)
    return f"{line} ({why})" if why else line


def passed_over(model: Model, asked: Model) -> str:
    """Say why "auto" came to the CPU on a machine with a GPU; "" where there is nothing to say."""
    if asked.device != AUTO or model.device != "cpu" or model.path == "tiny":
        return ""
    idle = _idle()
    return "as the run was started; model.device=cuda takes the GPU" if idle is None else idle


def check_device(name: str) -> None:
    """Refuse a device that this machine or this PyTorch does not have; take it if it has a number.

    Kernels, streams and captured steps go to the current device, whatever their tensors lie on.
    """
    fault = _fault(name)
    if fault is not None:
        raise ConfigError(
            f"model.device={name!r} can't be used here: {fault}. Set model.device=auto, which "
            "takes what is there, or run where PyTorch has that device."
        )
    if torch.device(name).type == "cuda" and torch.device(name).index is not None:
        torch.cuda.set_device(name)


def _fault(name: str) -> str | None:
    """Say why a device can't be used, found out by using it."""
    device = torch.device(name)
    count = torch.cuda.device_count()
    if device.type == "cuda" and count and (device.index or 0) >= count:
        there = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        return f"this machine has {count} GPU{'s' if count > 1 else ''}, {there}"
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return in_short(error).partition(": ")[2].partition(". ")[0].rstrip(".")
    return None
