"""Where runs are done: a place for each core or GPU, and how many threads a run has there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from groupwise.compare.plan import Plan
from groupwise.config import Config
from groupwise.model.cost import peak

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
VISIBLE = "CUDA_VISIBLE_DEVICES"
MEMORY = 0.8  # of the machine's, that runs may take together


def places_for(plan: Plan, jobs: int | None) -> list[Mapping[str, str]]:
    """What the environment of each process says; `jobs` at a time, or as many as there is room."""
    if any(arm.config.model.device.startswith("cuda") for arm in plan.arms):
        gpus = visible_gpus()
        count = jobs or len(gpus)
        return [{VISIBLE: gpus[at % len(gpus)], **_threads(count)} for at in range(count)]
    count = jobs or min([cores(), *(room_for(arm.config) for arm in plan.arms)])
    return [_threads(count)] * count


def _threads(processes: int) -> dict[str, str]:
    """Each its share of the cores: together they would have a thread for each on each."""
    return dict.fromkeys(THREADS, str(max(1, cores() // processes)))


def room_for(config: Config) -> int:
    """How many runs a machine's memory holds at a time; at least one is tried."""
    if config.model.path == "tiny":
        return cores()
    from groupwise.model.formats.checkpoint import stored_shape
    from groupwise.model.memory import device_bytes
    from groupwise.prepare.setup import demand_of, micro_tokens_of

    shape = stored_shape(config.model.path)
    if shape is None:
        return cores()
    parts = demand_of(config, shape, training=True).parts(micro_tokens_of(config, shape))
    return max(1, int(MEMORY * device_bytes("cpu") // peak(parts)))


def threads_for(before: Plan | None, places: Sequence[Mapping[str, str]]) -> int:
    """Of each run, where its configuration leaves them open; as at first where it goes on."""
    if before is not None:
        known = [arm.config.model.threads for arm in before.arms if arm.config.model.threads]
        if known:
            return known[0]
    return int(places[0].get(THREADS[0], 1))


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """By the names that the variable takes."""
    named = os.environ.get(VISIBLE)
    if named:
        return [name for name in named.split(",") if name]
    import torch

    return [str(number) for number in range(max(1, torch.cuda.device_count()))]
