"""The probe after every sync: engine and learner score the same tokens, or nobody samples.

It sees whatever goes wrong between two sets of weights: a head that was not updated, half an
update, a cache of the last version, a layer in another precision, another model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.errors import EngineError

# The largest mean |Δ log p|. Measured: vLLM 0.32 on a CPU in float32 6e-6, in bfloat16 0.039; on a
# GPU in bfloat16 0.038 (SmolLM2-135M).
LIMITS = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
QUANTISED = 1.0  # of an engine that rounds weights: the recipe corrects for what is left
GROWTH = 4.0  # times what it was at the first sync, when engine and learner had the same files
SMALLEST = {torch.float32: 1e-4, torch.float16: 0.005, torch.bfloat16: 0.02}
MOVED = 1e-6  # mean |Δ log p| of the learner, from which on an engine that stands still is stale


@dataclass(frozen=True)
class Scores:
    """The log-probabilities of the probe's tokens on both sides, in one row."""

    engine_T: Tensor
    learner_T: Tensor

    @property
    def gap_T(self) -> Tensor:
        return (self.engine_T - self.learner_T).abs()

    @property
    def mean(self) -> float:
        return float(self.gap_T.mean())

    @property
    def max(self) -> float:
        return float(self.gap_T.max())


def limit_of(dtype: torch.dtype, quantised: bool, first: Scores | None) -> float:
    """Return what the mean may be: at the first sync, and later by what it was then."""
    if quantised:
        return QUANTISED
    most = LIMITS.get(dtype, LIMITS[torch.float32])
    return most if first is None else min(max(GROWTH * first.mean, smallest_of(dtype)), most)


def smallest_of(dtype: torch.dtype) -> float:
    """Return what rounding alone may make of the mean, wherever it was at the first sync."""
    return SMALLEST.get(dtype, SMALLEST[torch.float32])


def check_probe(
    url: str,
    found: Scores,
    *,
    first: Scores | None,
    before: Scores | None,
    dtype: torch.dtype,
    quantised: bool,
) -> None:
    """Refuse a server whose weights are not the learner's; `before` is of the last version."""
    limit = limit_of(dtype, quantised, first)
    shown = f"|Δ log p| mean {found.mean:.2g}, max {found.max:.2g} over {len(found.gap_T)} tokens"
    if before is not None and not quantised and _stands_still(found, before):
        raise EngineError(
            f"The weights did not arrive at {url}: the learner's log-probabilities of the probe "
            f"have moved, and the engine's are those of the version before, digit for digit "
            f"({shown}). {LOOK}"
        )
    if found.mean <= limit:
        return
    since = "" if first is None else f" (it was {first.mean:.2g} at the first sync)"
    raise EngineError(
        f"The engine at {url} does not compute the learner's policy: {shown}, and {limit:.2g} is "
        f"the most that the mean may be{since}. {LOOK}"
    )


LOOK = (
    "Nothing is sampled from it. Look at: another model or precision (--dtype) than the run's; a "
    "head that is tied to the embedding and was not updated with it (vLLM on a CPU keeps a packed "
    "copy: serve a folder whose config.json says tie_word_embeddings=false, as servers that are "
    "started by engine.servers do); layers that are quantised (set engine.quantization, with a "
    "recipe that corrects); a cache of prompts that is not cleared; an update that was taken by "
    "half. The last checkpoint is sound; the same command goes on from it once that is mended."
)


def _stands_still(found: Scores, before: Scores) -> bool:
    """Tell whether the learner moved since the last version and the engine not at all."""
    moved = float((found.learner_T - before.learner_T).abs().mean())
    return moved > MOVED and torch.equal(found.engine_T, before.engine_T)
