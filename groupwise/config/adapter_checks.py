"""Checks of an adapter's settings: what they can't do, and effects that may surprise."""

from __future__ import annotations

from collections.abc import Iterator

from groupwise.config.fields import Config
from groupwise.config.reading import ADAPTER_RATE, DEFAULTS
from groupwise.config.values import flat
from groupwise.methods.composition import Recipe
from groupwise.methods.method import Method

EXACT_STEP = 8  # numbers: kernels of exact mode copy whole 16 bytes
LOW_RATE = ADAPTER_RATE / 5


def settings_without_an_adapter(config: Config, recipe: Method) -> Iterator[str]:
    if config.adapter.used:
        return
    values = flat(config)
    names = [f"adapter.{name}" for name in ("alpha", "targets", "dropout", "rslora")]
    for name in names:
        if values[name] != DEFAULTS[name]:
            yield (
                f"{name}={values[name]} is of an adapter, and there is none: adapter.rank=0 trains "
                f"all weights. Set adapter.rank=16, or leave {name} out."
            )
    if config.model.quantize != "none":
        yield (
            f"model.quantize={config.model.quantize} is for weights that are frozen, and without "
            "an adapter all of them are trained. Set adapter.rank=16, or model.quantize=none."
        )


def one_adapter_twice(config: Config, recipe: Method) -> Iterator[str]:
    if config.adapter.path and config.adapter.path in config.model.adapters:
        yield (
            f"{config.adapter.path} is in model.adapters and in adapter.path: it would count "
            "twice. Name it in model.adapters to keep it as it is under a fresh adapter, or in "
            "adapter.path to train it further."
        )


def exact_beside_an_adapter(config: Config, recipe: Method) -> Iterator[str]:
    adapter = config.adapter
    if config.engine.exact and adapter.rank % EXACT_STEP:
        yield (
            f"engine.exact=true needs an adapter.rank that is a multiple of {EXACT_STEP}, and it "
            f"is {adapter.rank}. Take {-(-adapter.rank // EXACT_STEP) * EXACT_STEP}."
        )
    if config.engine.exact and adapter.dropout:
        yield (
            f"engine.exact=true can't hold with adapter.dropout={adapter.dropout:g}: updates read "
            "another policy than the sampler. Set adapter.dropout=0."
        )


def dropout_in_a_sequence_ratio(config: Config, recipe: Recipe) -> Iterator[str]:
    """Warn of dropout's noise, which adds up over an answer and exceeds such a clip range."""
    share, ratio = config.adapter.dropout, recipe.ratio
    compared = recipe.schedule["updates"] > 1 or ratio.get("anchor") == "sampler"
    if share and compared and ratio.definition.traits.level == "sequence":
        yield (
            f"adapter.dropout={share:g} with {ratio}: the ratio of a whole answer would be mostly "
            "what was dropped, as the policy before the update is read without dropout. Set "
            "adapter.dropout=0."
        )


def dropout_is_off_policy(config: Config, recipe: Method) -> Iterator[str]:
    share = config.adapter.dropout
    if not share:
        return
    words = (
        f"adapter.dropout={share:g}: answers are sampled and scored without dropout, and updates "
        "read the policy with it. mismatch/ in the metrics then is mostly dropout, more of it the "
        "more the adapter has learned"
    )
    from_sampler = any(slot.get("anchor") == "sampler" for slot in recipe.of("ratio"))
    if recipe.updates > 1 or from_sampler:
        words += "; the ratio of the first update is not 1, and what is clipped is partly noise"
    yield f"{words}. In reinforcement learning 0 is usual."


def rate_of_full_training(config: Config, recipe: Method) -> Iterator[str]:
    rate = config.optim.learning_rate
    if config.adapter.used and 0 < rate < LOW_RATE:
        yield (
            f"optim.learning_rate={rate:g} is one for all weights: an adapter learns next to "
            f"nothing at it. Leave it out ({ADAPTER_RATE:g} then), or take 1e-5 to 1e-4."
        )


ANY_REFUSED = (settings_without_an_adapter, one_adapter_twice, exact_beside_an_adapter)
ANY_DOUBTFUL = (dropout_is_off_policy, rate_of_full_training)
