"""The places where runs are done: a core or GPU each, with its number of threads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from groupwise.compare.plan import ComparisonPlan
from groupwise.config import Config
from groupwise.model.cost import peak

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
VISIBLE = "CUDA_VISIBLE_DEVICES"
MEMORY = 0.8  # of the machine's, that runs may take together


def places_for(plan: ComparisonPlan, jobs: int | None) -> list[Mapping[str, str]]:
    """Return the environment of each process; `jobs` at a time, or as many as there is room for."""
    if any(arm.config.model.device.startswith("cuda") for arm in plan.arms):
        gpus = visible_gpus()
        count = jobs or len(gpus)
        return [{VISIBLE: gpus[at % len(gpus)], **_threads(count)} for at in range(count)]
    count = jobs or min([cores(), *(room_for(arm.config) for arm in plan.arms)])
    return [_threads(count)] * count


def _threads(processes: int) -> dict[str, str]:
    """Return each run's share of the cores, so that together they use no more than there are."""
    return dict.fromkeys(THREADS, str(max(1, cores() // processes)))


def room_for(config: Config) -> int:
    """Return how many runs fit in a machine's memory at a time; at least one is tried."""
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


def threads_for(before: ComparisonPlan | None, places: Sequence[Mapping[str, str]]) -> int:
    """Return the threads of each run, where its configuration leaves them open; a resumed run keeps
    its number.
    """
    if before is not None:
        known = [arm.config.model.threads for arm in before.arms if arm.config.model.threads]
        if known:
            return known[0]
    return int(places[0].get(THREADS[0], 1))


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """List the GPUs by the names that the environment variable takes."""
    named = os.environ.get(VISIBLE)
    if named:
        return [name for name in named.split(",") if name]
    import torch

    return [str(number) for number in range(max(1, torch.cuda.device_count()))]
