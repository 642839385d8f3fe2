"""Devices, and the least time that the parts of a step take on one of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from groupwise.model.cost import Cost


@dataclass(frozen=True)
class Device:
    """A device's speed as measured: a large matrix product and a large copy."""

    name: str
    flops: float | None  # a second, in bfloat16 with float32 sums; None: not known
    bandwidth: float | None  # bytes a second
    memory: float | None = None  # bytes
    bfloat16: bool = True  # arithmetic in it


# H200 measured: 80 % of the operations and 90 % of the bandwidth that its data sheet has. The
# others by the same shares of theirs. First match wins. T4 and V100 have no bfloat16.
KNOWN = (
    Device("B200", 1800e12, 7.2e12, 180e9),
    Device("H200", 790e12, 4.3e12, 141e9),
    Device("H100 PCIe", 605e12, 1.8e12, 80e9),
    Device("H100", 790e12, 3.0e12, 80e9),
    Device("A100-SXM4-40GB", 250e12, 1.4e12, 40e9),
    Device("A100-PCIE-40GB", 250e12, 1.4e12, 40e9),
    Device("A100", 250e12, 1.8e12, 80e9),
    Device("L40S", 290e12, 0.78e12, 48e9),
    Device("L4", 97e12, 0.27e12, 24e9),
    Device("A6000", 124e12, 0.69e12, 48e9),
    Device("4090", 132e12, 0.9e12, 24e9),
    Device("3090", 57e12, 0.84e12, 24e9),
    Device("V100", None, 0.81e12, 32e9, bfloat16=False),
    Device("T4", None, 0.29e12, 16e9, bfloat16=False),
)


def device_named(name: str, memory: float | None = None) -> Device:
    """Find a device by its driver's name, such as 'NVIDIA H200'. Others: peaks not known.

    Whole words: an RTX A1000 is no A100, and of a GPU that is shared out nobody knows the share.
    """
    for known in KNOWN:
        if re.search(rf"\b{known.name}\b", name) and "MIG" not in name:
            return replace(known, name=name, memory=memory or known.memory)
    return Device(name, None, None, memory)


def floor_seconds(parts: Mapping[str, Cost], device: Device) -> float | None:
    """Return the least time for parts in turn, each bound by operations or by memory."""
    if device.flops is None or device.bandwidth is None:
        return None
    flops, bandwidth = device.flops, device.bandwidth
    return sum(max(cost.flops / flops, cost.bytes / bandwidth) for cost in parts.values())
