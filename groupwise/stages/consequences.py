"""Consequences of a configuration: the recipe as it runs, and what of it acts."""

from __future__ import annotations

from typing import TypeVar

from groupwise.config.fields import Config
from groupwise.engine.backends import capabilities_of
from groupwise.explain.idle import Conditions, Idle, acting, idle, updates_of
from groupwise.methods.method import Method
from groupwise.methods.slots import Slot
from groupwise.prepare.placing import place

M = TypeVar("M", bound=Method)


def anchored(config: Config, recipe: M) -> M:
    """Return the recipe as it runs under this configuration."""
    return recipe.anchored(sampled_from(config), close=_close(config))


def sampled_from(config: Config) -> str:
    """Return the weights that are sampled from: "shared", the learner's own, or what differs."""
    return f"lag:{config.train.lag}" if config.train.lag else capabilities_of(config.engine).weights


def _close(config: Config) -> bool:
    """Tell whether a sampler of the learner's own weights gives the learner's probabilities."""
    precise = config.engine.exact or place(config.model).dtype == "float32"
    return precise and not config.adapter.dropout


def conditions(config: Config, recipe: Method) -> Conditions:
    """Tell which policies of a batch differ under this configuration."""
    engine = config.engine
    narrowed = engine.top_p < 1 or engine.top_k > 0 or engine.min_tokens > 0
    return Conditions(
        moved=updates_of(recipe) > 1,
        mismatch=sampled_from(config) != "shared" or narrowed or not _close(config),
        reference=config.reference.update != "reset:1",
    )


def idle_slots(config: Config) -> list[Idle]:
    """Find what of the recipe changes no update under this configuration, and what would."""
    recipe = anchored(config, config.recipe)
    return idle(recipe, conditions(config, recipe))


def what_acts(config: Config) -> tuple[Slot, ...]:
    """Return the recipe's slots without those that are idle under this configuration."""
    recipe = anchored(config, config.recipe)
    return acting(recipe, conditions(config, recipe))
