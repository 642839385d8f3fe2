"""groupwise: reinforcement learning of language models on verifiable rewards."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.composition import PairRecipe, Recipe, register
    from groupwise.config import Config
    from groupwise.config import load as load_config
    from groupwise.engine.protocol import Engine
    from groupwise.groups.phase import BatchResult, batch_phase, passes, select, updates
    from groupwise.loop import steps, train
    from groupwise.losses.pairs import Pairs
    from groupwise.losses.phase import TokenResult, token_phase
    from groupwise.recipes import recipe
    from groupwise.records import Memory, Ranks, TokenBatch
    from groupwise.validate.evaluate import evaluate_path
    from groupwise.validate.probe import probe
    from groupwise.watch.measures import Tally, merge

# Where each public name lives. They are imported on first use: torch takes a second to load, and
# `groupwise --help` should not wait for it.
_HOME = {
    "BatchResult": "groups.phase",
    "Config": "config",
    "Engine": "engine.protocol",
    "Memory": "records",
    "PairRecipe": "recipes",
    "Pairs": "losses.pairs",
    "Ranks": "records",
    "Recipe": "recipes",
    "Tally": "watch.measures",
    "TokenBatch": "records",
    "TokenResult": "losses.phase",
    "batch_phase": "groups.phase",
    "evaluate_path": "validate.evaluate",
    "load_config": "config:load",
    "merge": "watch.measures",
    "passes": "groups.phase",
    "probe": "validate.probe",
    "recipe": "recipes",
    "register": "recipes",
    "select": "groups.phase",
    "steps": "loop",
    "token_phase": "losses.phase",
    "train": "loop",
    "updates": "groups.phase",
}

__all__ = [
    "BatchResult",
    "Config",
    "Engine",
    "Memory",
    "PairRecipe",
    "Pairs",
    "Ranks",
    "Recipe",
    "Tally",
    "TokenBatch",
    "TokenResult",
    "batch_phase",
    "evaluate_path",
    "load_config",
    "merge",
    "passes",
    "probe",
    "recipe",
    "register",
    "select",
    "steps",
    "token_phase",
    "train",
    "updates",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'groupwise' has no attribute {name!r}")
    module, _, renamed = _HOME[name].partition(":")
    value = getattr(import_module(f"groupwise.{module}"), renamed or name)
    globals()[name] = value
    return value
