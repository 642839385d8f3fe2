"""Recipes that only a mixture of experts can be trained with: what they ask for, what is nearest.

The one place that says so: runs are refused by it, `explain` tells it.
"""

from __future__ import annotations

from groupwise.methods.method import Method

ASKED = (
    "a mixture of experts that runs natively (Qwen3-MoE, OLMoE, Mixtral, or the embedded model "
    "with tiny.experts=8)"
)
INSTEAD = "gspo, whose ratio per answer does not mind how experts are chosen"


def of_mixtures(recipe: Method) -> list[str]:
    """Say what a recipe asks of the model that it trains; nothing where any will do."""
    if not recipe.routed:
        return []
    return [f"{recipe.name} trains {ASKED}, and nothing else. For other models take {INSTEAD}."]
