"""groupwise: every policy-optimisation method of the GRPO family as a recipe of explicit slots."""

from groupwise.composition import PairRecipe, Recipe, recipe, register
from groupwise.groups.phase import BatchResult, batch_phase, passes, select, updates
from groupwise.losses.pairs import Pairs
from groupwise.losses.phase import TokenResult, token_phase
from groupwise.records import Memory, Ranks, TokenBatch
from groupwise.watch.measures import Tally, merge

__all__ = [
    "BatchResult",
    "Memory",
    "PairRecipe",
    "Pairs",
    "Ranks",
    "Recipe",
    "Tally",
    "TokenBatch",
    "TokenResult",
    "batch_phase",
    "merge",
    "passes",
    "recipe",
    "register",
    "select",
    "token_phase",
    "updates",
]
