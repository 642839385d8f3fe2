"""What follows from a configuration: the recipe as it runs, and what of it acts."""

from __future__ import annotations

from typing import TypeVar

from groupwise.config.fields import Config
from groupwise.explain.idle import Conditions, Idle, acting, idle, updates_of
from groupwise.methods.composition import Method
from groupwise.methods.slots import Slot
from groupwise.prepare.placing import place

M = TypeVar("M", bound=Method)


def anchored(config: Config, recipe: M) -> M:
    """Return the recipe as it runs under this configuration."""
    return recipe.anchored(config.engine.weights, close=_close(config))


def _close(config: Config) -> bool:
    """Whether a sampler of the learner's own weights gives the learner's probabilities."""
    precise = config.engine.exact or place(config.model).dtype == "float32"
    return precise and not config.adapter.dropout


def conditions(config: Config, recipe: Method) -> Conditions:
    """Which policies of a batch differ under this configuration."""
    engine = config.engine
    narrowed = engine.top_p < 1 or engine.top_k > 0 or engine.min_tokens > 0
    return Conditions(
        moved=updates_of(recipe) > 1,
        mismatch=engine.weights != "shared" or narrowed or not _close(config),
        reference=config.reference.update != "reset:1",
    )


def idle_slots(config: Config) -> list[Idle]:
    """What of the recipe changes no update under this configuration, and what would wake it."""
    recipe = anchored(config, config.recipe)
    return idle(recipe, conditions(config, recipe))


def what_acts(config: Config) -> tuple[Slot, ...]:
    """The recipe's slots without those that are idle under this configuration."""
    recipe = anchored(config, config.recipe)
    return acting(recipe, conditions(config, recipe))
