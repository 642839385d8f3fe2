"""Controls: `control(held, step, seen) -> (held, applied)`, a coefficient from step to step. Pure.

`held` is a control's whole state, and begins as the recipe's own coefficient; `applied` is what the
next step learns with. It is asked before the first step (0), with nothing seen, and behind every
step with the number of finished ones. `seen` has of the step that is over: `kl`, the mean ℓ − ℓ^ref
of a token; `tokens` and `answers`, their numbers; `entropy`, the mean of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from groupwise.losses import controllers
from groupwise.losses.controllers import EntropyTarget
from groupwise.methods.slots import Count, Fraction, NonNegative, Positive, Whole, control

Seen = Mapping[str, float]
NARROW = 0.2  # the error of a step counts so much at the most


@control(
    needs=("ref_logp_NT",),
    equation="β ← β·(1 + clip(KL/{target} − 1, −0.2, 0.2)·n/{horizon}), KL of one {per}, n answers",
    fixes="a KL that no coefficient holds from the first step to the last",
    breaks="the loss follows what training does; a target and a horizon instead of one number",
)
def kl_target(
    held: float,
    step: int,
    seen: Seen,
    *,
    target: Positive = 6.0,
    horizon: Positive = 10_000.0,
    per: Literal["answer", "token"] = "answer",
) -> tuple[float, float]:
    """Hold the KL to the reference at a target (Ziegler et al. 2019, 1909.08593).

    The KL of an answer is the sum over its tokens, as published; verl's and OpenRLHF's is the mean
    of a token, with targets to match.
    """
    if "kl" not in seen:
        return held, held
    kl = seen["kl"] * (seen["tokens"] / seen["answers"] if per == "answer" else 1.0)
    error = min(max(kl / target - 1.0, -NARROW), NARROW)
    held = held * (1.0 + error * seen["answers"] / horizon)
    return held, held


@control(
    equation="c ← c + {step_size} where the entropy is at most {target}, else c − {step_size}, in"
    " [{low}, {high}]; 0 is applied above the target",
    fixes="entropy that falls below a target",
    breaks="the target is a model's own; the first step has no bonus",
)
def entropy_target(
    held: float,
    step: int,
    seen: Seen,
    *,
    target: Positive = 0.2,
    step_size: Positive = 0.005,
    low: NonNegative = 0.0,
    high: Positive = 1.0,
) -> tuple[float, float]:
    """Raise an entropy bonus while entropy is low (2505.22312, by the step before, as TRL)."""
    if "entropy" not in seen:
        return held, (0.0 if step == 0 else held)
    now = EntropyTarget(held, step_size, low, high, target).after(seen["entropy"])
    return now.coef, now.applied(seen["entropy"])


@control(
    equation="c climbs to {peak} in {warmup} steps, and falls along a cosine to {valley} in"
    " {decay}",
    fixes="a term that should matter most at the start",
    breaks="four numbers to choose",
)
def warmup_cosine(
    held: float,
    step: int,
    seen: Seen,
    *,
    warmup: Whole = 0,
    decay: Count = 100,
    peak: NonNegative = 0.9,
    valley: NonNegative = 0.05,
) -> tuple[float, float]:
    """Go by the number of the step alone (CHORD's μ, 2508.11408)."""
    return held, controllers.warmup_cosine(
        step, warmup=warmup, decay=decay, peak=peak, valley=valley
    )


@control(
    equation="1 − c of warmup_cosine",
    fixes="the other term of a mixture, whose weights add up to 1",
    breaks="as warmup_cosine",
)
def rest_of_warmup_cosine(
    held: float,
    step: int,
    seen: Seen,
    *,
    warmup: Whole = 0,
    decay: Count = 100,
    peak: Fraction = 0.9,
    valley: Fraction = 0.05,
) -> tuple[float, float]:
    """Weigh by what warmup_cosine leaves (CHORD's 1 − μ)."""
    given = controllers.warmup_cosine(step, warmup=warmup, decay=decay, peak=peak, valley=valley)
    return held, 1.0 - given
