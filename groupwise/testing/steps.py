"""Cases of kind `schedule`: coefficients and sources that change from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupwise.errors import CaseError
from groupwise.losses.controllers import EntropyTarget, mixed_source, warmup_cosine
from groupwise.testing.schema import Case, params_of, whole

Found = dict[str, Any]


def numbers(values: Any, name: str) -> list[float]:
    """Return a list of numbers, one a step."""
    fits = isinstance(values, Sequence) and not isinstance(values, str)
    if not fits or not all(isinstance(x, int | float) for x in values):
        raise CaseError(f"{name} must be a list of numbers, one a step, got {repr(values)[:60]}.")
    return [float(x) for x in values]


def schedule(case: Case) -> Found:
    """Return what a coefficient is, step after step."""
    known = {"adaptive_entropy": _entropy, "chord": _warmup, "gkd_mixing": _mixing}
    if case["method"] not in known:
        raise CaseError(f"kind 'schedule' knows {', '.join(known)}, not {case['method']!r}.")
    return known[case["method"]](case)


def _entropy(case: Case) -> Found:
    """Follow an entropy target; the bonus of a step goes by its own entropy or the one before."""
    params = params_of(case)
    words = {"coef": "coef", "step": "step", "min": "low", "max": "high", "target": "target"}
    held = EntropyTarget(**{own: float(params[key]) for key, own in words.items() if key in params})
    gate = params.get("gate", "previous")
    if gate not in ("previous", "current"):
        raise CaseError(f"gate={gate!r} is unknown: previous or current.")
    before, applied, after = float("inf"), [], []
    for entropy in numbers(case["inputs"]["entropies"], "entropies"):
        applied.append(held.applied(before if gate == "previous" else entropy))
        held = held.after(entropy)
        after.append(held.coef)
        before = entropy
    return {"applied": applied, "coef_after": after}


def _warmup(case: Case) -> Found:
    params = params_of(case)
    for name in ("warmup", "decay", "peak", "valley"):
        if name not in params:
            raise CaseError(f"schedule chord needs the parameter {name}.")
    steps = [whole(step, "steps") for step in numbers(case["inputs"]["steps"], "steps")]
    warmup, decay = (whole(params[name], name) for name in ("warmup", "decay"))
    peak, valley = float(params["peak"]), float(params["valley"])
    return {
        "mu": [
            warmup_cosine(step, warmup=warmup, decay=decay, peak=peak, valley=valley)
            for step in steps
        ]
    }


def _mixing(case: Case) -> Found:
    params = params_of(case)
    share, sequences = float(params.get("lambda", 0.5)), bool(params.get("seq_kd", False))
    chances = numbers(case["inputs"]["u"], "u")
    return {"source": [float(mixed_source(u, share, sequences=sequences)) for u in chances]}
