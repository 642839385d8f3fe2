"""Coefficients of a recipe that change from step to step (train.coefs): what they are, and next."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import groupwise.losses.controls  # noqa: F401 - their names
from groupwise.config.fields import Config
from groupwise.errors import RecipeError, RecipeWarning
from groupwise.methods.composition import Recipe
from groupwise.methods.method import Method
from groupwise.methods.slots import Slot, parse


class Coefficient(NamedTuple):
    """The state of a control, and the number that the next step learns with."""

    held: float
    applied: float


LATE = 10**9  # behind every schedule's end
Coefficients = dict[str, Coefficient]  # by their place in the recipe


def begun(config: Config) -> Coefficients:
    """Return the coefficients of the first step."""
    found = {}
    for place, text in config.train.coefs.items():
        found[place] = Coefficient(*_control(text)(_own(config.recipe, place), 0, {}))
    return found


def after(
    config: Config, known: Mapping[str, Coefficient], step: int, metrics: Mapping[str, float]
) -> Coefficients:
    """Return the coefficients of the step behind so many finished ones."""
    seen = _seen(metrics)
    start = begun(config)
    return {
        place: Coefficient(*_control(text)(known.get(place, start[place]).held, step, seen))
        for place, text in config.train.coefs.items()
    }


def applied(known: Mapping[str, Coefficient]) -> dict[str, float]:
    """Return the numbers themselves."""
    return {place: each.applied for place, each in known.items()}


def measures(
    config: Config, used: Mapping[str, float], metrics: Mapping[str, float]
) -> dict[str, float]:
    """Measure the coefficients that a step was learned with, and how far a KL is off its target."""
    found = {f"coef/{place}": value for place, value in used.items()}
    seen = _seen(metrics)
    for text in config.train.coefs.values():
        control = _control(text)
        if control.name == "kl_target" and "kl" in seen:
            each = seen["tokens"] / seen["answers"] if control["per"] == "answer" else 1.0
            found["coef/kl_over_target"] = seen["kl"] * each / control["target"]
    return found


def _seen(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return what controls read of a step's metrics; nothing where no update was made."""
    names = {"kl": "kl/ref_k1", "entropy": "entropy/mean"}
    found = {own: metrics[name] for own, name in names.items() if name in metrics}
    if "kl" in found:
        found["tokens"] = metrics["tokens/count"] * metrics["tokens/learned_share"]
        found["answers"] = metrics["tokens/count"] / metrics["length/mean"]
    return found


def coefficients_of_nothing(config: Config, recipe: Method) -> Iterator[str]:
    """Refuse controls that nobody can read, of what the recipe does not have or can't measure."""
    for place, text in config.train.coefs.items():
        lead = f'train.coefs."{place}"={text}'
        if not isinstance(recipe, Recipe) or not recipe.samples:
            yield (
                f"{lead}: coefficients change in recipes that sample groups of answers, and "
                f"{recipe.name} learns from {recipe.learns_from}. Leave it out."
            )
            continue
        try:
            control, own = _control(text), _own(recipe, place)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RecipeWarning)
                for step in (0, control.get("warmup", 0), LATE):
                    recipe.configure({place: control(own, step, {})[1]})
        except RecipeError as error:
            yield f"{lead}: {error}"
            continue
        if "ref_logp_NT" in control.needs and "reference" not in recipe.roles:
            yield (
                f"{lead} goes by the KL to a reference, and recipe {recipe.name} has none. Add "
                "recipe.penalty='kl()', or leave it out."
            )


def _control(text: str) -> Slot:
    found = parse("control", text)
    if len(found) != 1:
        raise RecipeError(f"{text!r} is no control. Write for example kl_target(target=6.0).")
    return found[0]


def _own(recipe: Method, place: str) -> float:
    """Return the recipe's own number at a place such as penalty.coef or penalty.kl.coef.

    Those of terms that train something else than the policy are none of them.
    """
    kind, *names = place.removeprefix("recipe.").split(".")
    slots = list(recipe.of(kind)) if kind in recipe.KINDS else []
    slots = [slot for slot in slots if not slot.definition.traits.learns]
    owners = [x for x in slots if names and names[-1] in x and names[:-1] in ([], [x.name])]
    values = [slot[names[-1]] for slot in owners]
    if len(values) != 1 or not isinstance(values[0], int | float):
        there = ", ".join(map(str, recipe.slots()))
        raise RecipeError(
            f"recipe {recipe.name} has not one number at {place!r}; its slots are {there}. Write "
            "SLOT.PARAMETER or SLOT.NAME.PARAMETER, such as penalty.kl.coef."
        )
    return float(values[0])
