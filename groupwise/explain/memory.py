"""The models that a recipe holds in memory, and the bytes that each takes for every weight."""

from __future__ import annotations

from groupwise.methods.method import Method
from groupwise.model.cost import HALF, SINGLE
from groupwise.streams import ROLE_FACTS

LEARNING = HALF + 3 * SINGLE  # the weight, its master copy, two moments
FROZEN = HALF
GRADIENT = SINGLE


def bytes_a_weight(entry: Method) -> dict[str, int]:
    """Return the bytes by model, in bfloat16 and without adapters."""
    first, *_ = entry.models
    facts = [ROLE_FACTS[name] for name in entry.roles]
    beside = {x.title: LEARNING if x.learns else FROZEN for x in facts if x.model}
    return {first: LEARNING, **beside}


def memory(entry: Method) -> str:
    """Say what a recipe holds in memory, as far as that goes by the size of the model."""
    each = bytes_a_weight(entry)
    models = ", ".join(f"{name} {number}" for name, number in each.items())
    turns = ", one model's at a time" if list(each.values()).count(LEARNING) > 1 else ""
    total = sum(each.values()) + GRADIENT
    return (
        f"{models}, gradients {GRADIENT}{turns}: {total} bytes a weight in bfloat16, without "
        "adapters"
    )
