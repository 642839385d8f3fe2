"""Calls of tools as a policy writes them, read from its words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Asked:
    """A call that can be read."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Misread:
    """What is wrong with a call that can't be read: said to the policy."""

    why: str


CallReader = Callable[[str], list[Asked | Misread]]  # the words of a turn -> its calls, in order
