"""Rules for sampling ahead of learning (train.lag) and samplers in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator

from groupwise.config.fields import Config
from groupwise.config.reading import DEFAULTS
from groupwise.engine.backends import capabilities_of
from groupwise.groups.steps import branching_of
from groupwise.methods.composition import Recipe
from groupwise.methods.method import Method

CORRECTED = (
    "Take a recipe that weighs by learner/sampler (tis, icepop, olmo3; or add "
    "recipe.correction='tis_token(cap=2.0)'), or one whose ratio starts at the sampler "
    "(recipe.ratio.anchor=sampler)"
)


def lag_of_what(config: Config, recipe: Method) -> Iterator[str]:
    """Refuse to run ahead of a learner that waits for nothing, and settings that do nothing."""
    train = config.train
    if not train.lag:
        if train.sync != DEFAULTS["train.sync"]:
            yield (
                f"train.sync={train.sync} would be ignored: with train.lag=0 no answer is under "
                "way when new weights come. Set train.lag=1, or leave it out."
            )
        return
    asked = f"train.lag={train.lag}"
    if recipe.source != "policy":
        yield (
            f"{asked} samples ahead of the learner, and recipe {recipe.name} learns from "
            f"{recipe.learns_from} (source {recipe.source}). Set train.lag=0."
        )
    elif not isinstance(recipe, Recipe):
        yield (
            f"{asked} with recipe {recipe.name}: only groups of graded answers can be sampled "
            "ahead so far, no pairs and no judgements. Set train.lag=0."
        )


def samplers_beside(config: Config, recipe: Method) -> Iterator[str]:
    """Refuse samplers in other processes where they can't be, or where nobody asks them."""
    engine = config.engine
    if not engine.servers:
        return
    asked = f"engine.servers={engine.servers}"
    if not recipe.samples:
        yield f"{asked}, and recipe {recipe.name} samples nothing. Set engine.servers=0."
    if ":" in engine.backend:
        yield (
            f"{asked} starts samplers that groupwise knows, and engine.backend={engine.backend} "
            "is one of yours. Leave it out."
        )
    if engine.backend != "native":
        return
    if engine.servers > 1:
        yield f"{asked}: the native engine has one sampler at the most. Set engine.servers=1."
    if engine.weights != "shared":
        yield (
            f"{asked} with engine.weights={engine.weights}: a sampler's process has the learner's "
            "weights. Set engine.weights=shared, or engine.servers=0."
        )


def learning_from_older_weights(config: Config, recipe: Recipe) -> Iterator[str]:
    """Refuse a lag that nothing in the recipe knows of, and what reads the policy as it is."""
    if not config.train.lag or recipe.source != "policy":
        return
    asked = f"train.lag={config.train.lag}"
    anchored = recipe.ratio.get("anchor") == "sampler"
    if not (recipe.corrects_mismatch or anchored):
        yield (
            f"{asked} with recipe {recipe.name}: answers come from weights up to "
            f"{config.train.lag} steps old, and nothing in it corrects for that or measures from "
            f"the sampler. {CORRECTED}, or set train.lag=0."
        )
    if "greedy_reward_N" in recipe.streams:
        yield (
            f"{asked} with recipe {recipe.name}, whose baseline is the greedy answer of the policy "
            "as it is: it can't be written ahead. Take another advantage, or set train.lag=0."
        )
    if branching_of(recipe) is not None:
        yield (
            f"{asked} with recipe {recipe.name}, which samples branches of the answers that it "
            "learns from: they can't be written ahead. Take another advantage, or set train.lag=0."
        )
    yield from _engine_for_lag(config, asked)


def _engine_for_lag(config: Config, asked: str) -> Iterator[str]:
    engine, can = config.engine, capabilities_of(config.engine)
    if engine.weights != "shared":
        yield (
            f"{asked} with engine.weights={engine.weights}: both make the sampler another policy, "
            "and one hides the other. Set engine.weights=shared, or train.lag=0."
        )
    if engine.exact:
        yield (
            f"{asked} with engine.exact=true: answers come from older weights, whose probabilities "
            "are not the learner's. Set engine.exact=false, or train.lag=0."
        )
    if config.train.sync != "drain" and not can.in_flight_updates:
        yield (
            f"train.sync={config.train.sync} gives the sampler new weights in the middle of "
            f"answers, and engine.backend={engine.backend} does not take them. Set "
            "train.sync=drain."
        )


def caches_of_other_weights(config: Config, recipe: Recipe) -> Iterator[str]:
    """Warn where log-probabilities are read as those of a policy, and belong to none."""
    if config.train.lag and config.train.sync == "keep":
        what = "its correction weighs" if recipe.corrects_mismatch else "its ratio measures"
        yield (
            "train.sync=keep: what an answer says after new weights came is written beside caches "
            f"of older ones, so its log-probability is that of no policy; {what} by it as if it "
            "were. lag/impure_share says how much; train.sync=recompute avoids it."
        )


ANY = (lag_of_what, samplers_beside)  # for every kind of run
REFUSED = (learning_from_older_weights,)  # for groups
DOUBTFUL = (caches_of_other_weights,)
