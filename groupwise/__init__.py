"""groupwise: reinforcement learning of language models on verifiable rewards."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from groupwise.config import Config
    from groupwise.config import load as load_config
    from groupwise.engine.batch import BatchEngine
    from groupwise.engine.protocol import Capabilities, Engine
    from groupwise.evaluate.evaluate import evaluate_path
    from groupwise.groups.phase import BatchResult, batch_phase, passes, select, updates
    from groupwise.losses.measures import Tally, merge
    from groupwise.losses.pairs import Pairs
    from groupwise.losses.phase import TokenResult, token_phase
    from groupwise.methods.composition import PairRecipe, Recipe
    from groupwise.methods.registry import register
    from groupwise.parallel.world import Ranks
    from groupwise.probing.probe import probe
    from groupwise.recipes import recipe
    from groupwise.records import Memory, TokenBatch
    from groupwise.training.loop import steps, train

# Where each public name lives. They are imported on first use: torch takes a second to load, and
# `groupwise --help` should not wait for it.
_HOME = {
    "BatchEngine": "engine.batch",
    "BatchResult": "groups.phase",
    "Capabilities": "engine.protocol",
    "Config": "config",
    "Engine": "engine.protocol",
    "Memory": "records",
    "PairRecipe": "recipes",
    "Pairs": "losses.pairs",
    "Ranks": "parallel.world",
    "Recipe": "recipes",
    "Tally": "losses.measures",
    "TokenBatch": "records",
    "TokenResult": "losses.phase",
    "batch_phase": "groups.phase",
    "evaluate_path": "evaluate.evaluate",
    "load_config": "config:load",
    "merge": "losses.measures",
    "passes": "groups.phase",
    "probe": "probing.probe",
    "recipe": "recipes",
    "register": "recipes",
    "select": "groups.phase",
    "steps": "training.loop",
    "token_phase": "losses.phase",
    "train": "training.loop",
    "updates": "groups.phase",
}

__all__ = [
    "BatchEngine",
    "BatchResult",
    "Capabilities",
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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Modules that users' files import by an older name, and where they are now.
_MOVED = {
    "groupwise.composition": "groupwise.recipes",
    "groupwise.loop": "groupwise.training.loop",
    "groupwise.losses.kl": "groupwise.groups.kl",
    "groupwise.model.attention": "groupwise.model.layers.attention",
    "groupwise.model.head": "groupwise.model.layers.head",
    "groupwise.planning": "groupwise.plan.estimate",
    "groupwise.slots": "groupwise.methods.slots",
    "groupwise.validate": "groupwise.evaluate",
    "groupwise.validate.advice": "groupwise.probing.advice",
    "groupwise.validate.evaluate": "groupwise.evaluate.evaluate",
    "groupwise.validate.probe": "groupwise.probing.probe",
}


class _Moved(MetaPathFinder, Loader):
    """Finds a module under its older name: a second name for the same functions.

    Under those names all recipes and slots were known at once, so they are registered first.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _MOVED:
            return None
        package = any(other.startswith(f"{name}.") for other in _MOVED)
        return ModuleSpec(name, self, is_package=package)

    def exec_module(self, module: ModuleType) -> None:
        import_module("groupwise.recipes")
        now = import_module(_MOVED[module.__name__])
        own = {"__name__", "__spec__", "__loader__", "__path__", "__package__"}
        vars(module).update({k: v for k, v in vars(now).items() if k not in own})


sys.meta_path.insert(0, _Moved())
