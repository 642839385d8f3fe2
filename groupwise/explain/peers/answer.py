"""The answer to another tool's configuration: a recipe, settings, and what stays behind."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from groupwise.config import Config, load
from groupwise.config.names import ELSEWHERE, NOWHERE
from groupwise.errors import RecipeWarning
from groupwise.explain.peers.reading import PeerConfig
from groupwise.methods.method import Method
from groupwise.methods.registry import RECIPES


@dataclass
class Answer:
    """A translation under way: settings of ours, and what stays behind."""

    version: str  # of the tool whose code was read
    settings: dict[str, Any] = field(default_factory=dict)  # ours, in the order of the page
    differs: list[str] = field(default_factory=list)  # said beside what is the same
    missing: dict[str, str] = field(default_factory=dict)  # their name -> why it can't be said
    paper: str = ""  # the recipe of the paper whose name they use

    @property
    def whole(self) -> bool:
        """Tell whether the loss is theirs, with nothing left out."""
        return not self.missing


class Settings:
    """A configuration's values over a tool's defaults, which name all that is read of it."""

    def __init__(self, config: PeerConfig, defaults: Mapping[str, Any]) -> None:
        self.given, self.defaults = config.values, defaults

    def __getitem__(self, name: str) -> Any:
        value = self.given.get(name)
        return self.defaults[name] if value is None else value

    def number(self, name: str) -> float:
        """Return a number, the default where the file has something else there."""
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            value = self.defaults[name]
        return float(value)

    def whole(self, name: str) -> int:
        return int(self.number(name))

    def left(self) -> dict[str, Any]:
        """Return what the file sets and nobody reads."""
        return {name: x for name, x in self.given.items() if name not in self.defaults}


@dataclass(frozen=True)
class Rest:
    """Settings of the file that are no part of the loss."""

    elsewhere: Mapping[str, str]  # their name -> ours, whose value is for the user to say
    nowhere: Mapping[str, str]  # their name -> why there is none
    unknown: tuple[str, ...]


def rest(left: Mapping[str, Any]) -> Rest:
    """Sort what is left of a file by what docs/migrate.md says of it."""
    leaves = {name: name.rpartition(".")[2] for name in left}
    return Rest(
        {name: ELSEWHERE[leaf] for name, leaf in leaves.items() if leaf in ELSEWHERE},
        {name: NOWHERE[leaf] for name, leaf in leaves.items() if leaf in NOWHERE},
        tuple(n for n, leaf in leaves.items() if leaf not in ELSEWHERE and leaf not in NOWHERE),
    )


def configured(answer: Answer) -> Config:
    """Return our configuration: it is checked as a user's own would be."""
    with warnings.catch_warnings():  # a peer's loss may be doubtful; that is told of the recipe
        warnings.simplefilter("ignore", RecipeWarning)
        return load(None, [f"{name}={_text(value)}" for name, value in answer.settings.items()])


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def same_loss(recipe: Method) -> list[str]:
    """Return the recipes that compute the same loss of a batch, whatever they are called."""
    return [name for name, other in RECIPES.items() if _loss(other) == _loss(recipe)]


def _loss(recipe: Method) -> tuple[Any, ...]:
    return (recipe.KINDS, *(recipe.of(kind) for kind in recipe.KINDS if kind != "schedule"))


def number(value: float) -> str:
    """Write a number as short as it reads back."""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
