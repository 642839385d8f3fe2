"""The configuration: one typed tree. From TOML, dotted overrides and Python keywords, all alike."""

from __future__ import annotations

from groupwise.config.changes import SettingChange, difference, entries
from groupwise.config.fields import (
    Budget,
    Checkpoint,
    Config,
    Data,
    EngineSettings,
    Eval,
    Guard,
    Model,
    Optim,
    ReferenceSettings,
    Reward,
    Tiny,
    TurnSettings,
    Until,
)
from groupwise.config.reading import load, load_layers, read_toml
from groupwise.config.writing import text

__all__ = [
    "Budget",
    "Checkpoint",
    "Config",
    "Data",
    "EngineSettings",
    "Eval",
    "Guard",
    "Model",
    "Optim",
    "ReferenceSettings",
    "Reward",
    "SettingChange",
    "Tiny",
    "TurnSettings",
    "Until",
    "difference",
    "entries",
    "load",
    "load_layers",
    "read_toml",
    "text",
]
