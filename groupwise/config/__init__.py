"""The configuration: one typed tree. From TOML, dotted overrides and Python keywords, all alike."""

from __future__ import annotations

from groupwise.config.changes import Change, difference
from groupwise.config.fields import (
    Budget,
    Checkpoint,
    Config,
    Data,
    Engine,
    Eval,
    Guard,
    Model,
    Optim,
    Reference,
    Reward,
    Tiny,
)
from groupwise.config.reading import load
from groupwise.config.writing import text

__all__ = [
    "Budget",
    "Change",
    "Checkpoint",
    "Config",
    "Data",
    "Engine",
    "Eval",
    "Guard",
    "Model",
    "Optim",
    "Reference",
    "Reward",
    "Tiny",
    "difference",
    "load",
    "text",
]
