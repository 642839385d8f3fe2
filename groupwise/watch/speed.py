"""The speed of a step, against what its device can do, and what held it up.

Measured seconds over counted work (`groupwise.model.cost`). Where the device's peaks are not
known, as on a CPU, there are shares of the step and nothing to compare with.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from groupwise.model.cost import Cost, Parts, model_flops, total
from groupwise.model.devices import Device, device_named
from groupwise.watch.clock import Clock

CYCLE = ("rollout", "grade", "score", "update", "other")  # of every step; the rest is now and then
BUSY = 0.25  # of a peak: below, neither operations nor memory hold a phase up


def step_speed(
    device: torch.device, work: Mapping[str, Parts], clock: Clock, step: float
) -> dict[str, float | str]:
    """Measure a step that took so many seconds, and did this work by phase."""
    other = max(step - sum(clock.phases.values()), 0.0)
    seconds = {**clock.phases, "other": other, "step": step}
    return speed(seconds, work, device_of(device))


def device_of(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device(device.type, None, None)
    memory = torch.cuda.get_device_properties(device).total_memory
    return device_named(torch.cuda.get_device_name(device), memory)


def speed(
    seconds: Mapping[str, float], work: Mapping[str, Parts], device: Device
) -> dict[str, float | str]:
    """Return the speed: `seconds` by phase and for the whole `step`, `work` as counted."""
    step = seconds["step"]
    found: dict[str, float | str] = {
        f"time/share/{name}": spent / step for name, spent in seconds.items() if name != "step"
    }
    counted = {name: parts for name, parts in work.items() if parts and seconds.get(name)}
    used: dict[str, Cost] = {}
    for name, parts in counted.items():
        share = peaks(parts, seconds[name], device)
        if share is not None:
            used[name] = share
    if "rollout" in counted:
        moved = total(counted["rollout"]).bytes
        found["time/rollout_bytes_per_second"] = moved / seconds["rollout"]
    if "rollout" in used:
        found["time/rollout_bandwidth_share"] = used["rollout"].bytes
    if "update" in used:
        found["time/update_flops_share"] = used["update"].flops
    spent = {name: seconds[name] for name in CYCLE if seconds.get(name)}
    if spent:
        name = max(spent, key=lambda phase: spent[phase])
        text = f"{name}, {_percent(spent[name] / step)} of the step"
        found["time/bottleneck"] = text + _reason(used.get(name))
    return found


def peaks(parts: Parts, seconds: float, device: Device) -> Cost | None:
    """Return shares of the device's operations and bandwidth; None where they are not known."""
    if device.flops is None or device.bandwidth is None:
        return None
    moved = total(parts).bytes
    return Cost(model_flops(parts) / seconds / device.flops, moved / seconds / device.bandwidth)


def _reason(used: Cost | None) -> str:
    if used is None:
        return ""
    operations = f"{_percent(used.flops)} of the device's operations"
    bandwidth = f"{_percent(used.bytes)} of its bandwidth"
    if max(used.flops, used.bytes) < BUSY:
        return f", waiting: {operations}, {bandwidth}"
    if used.bytes > used.flops:
        return f", memory-bound at {_percent(used.bytes)} of the device's bandwidth"
    return f", compute-bound at {operations}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
