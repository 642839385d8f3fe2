"""Arms that can't differ, because everything in which they differ is idle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from groupwise.config import Config
from groupwise.config.values import flat
from groupwise.explain.idle import WAKES
from groupwise.stages.consequences import idle_slots, what_acts

NO_RESULT = ("checkpoint.", "watch.")  # settings that change none


@dataclass(frozen=True)
class EqualArms:
    """Arms that make the same updates, up to rounding, and the reason."""

    arms: tuple[str, ...]
    text: str


def find_equal_arms(arms: Mapping[str, Config]) -> list[EqualArms]:
    """Return the arms, by name, that differ in nothing that acts under their settings.

    Functions of the user's are tried in their run's own process alone, which they may end: here
    they count as acting, and the run's log says whether they do.
    """
    alike: dict[str, list[str]] = {}
    for name, config in arms.items():
        settings = {k: v for k, v in flat(config).items() if not k.startswith(NO_RESULT)}
        slots = config.recipe.slots() if _of_a_user(config) else what_acts(config)
        alike.setdefault(f"{slots} {settings}", []).append(name)
    groups = [{name: arms[name] for name in names} for names in alike.values() if len(names) > 1]
    return [EqualArms(tuple(group), _text(group)) for group in groups]


def _of_a_user(config: Config) -> bool:
    return any(slot.files for slot in config.recipe.slots())


def _text(arms: Mapping[str, Config]) -> str:
    *first, last = arms
    return (
        f"{', '.join(first)} and {last} must coincide: every update is the same up to rounding, "
        f"and a difference between them is chance. {_why(list(arms.items()))}"
    )


def _why(arms: Sequence[tuple[str, Config]]) -> str:
    slots = [set(config.recipe.slots()) for _, config in arms]
    common = set.intersection(*slots)
    if all(own == common for own in slots):
        return "They are one recipe."
    idle = [(name, each) for name, config in arms for each in idle_slots(config)]
    own = [(name, each) for name, each in idle if each.slot not in common]
    listed = ", ".join(f"{each.slot.kind} {each.slot.name} ({name})" for name, each in own)
    names = dict.fromkeys(n for _, each in own for wakes in each.wakes for n in wakes)
    by = ", or ".join(WAKES[name] for name in names)
    return f"What they differ in is idle: {listed}. Woken by {by}."
