"""The engines that `engine.backend` can name, and what each of them is made from.

A new one is a file with a subclass of `Engine` and a line in `BACKENDS`; one's own needs no line:
`engine.backend = "file.py:Class"`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import TYPE_CHECKING

from groupwise import config
from groupwise.common.user_files import make_importable
from groupwise.engine.protocol import Capabilities, Engine, Sync
from groupwise.errors import EngineError, EngineWarning, nearest
from groupwise.model.adapters.lora import adapters, merge
from groupwise.model.adapters.peft_files import BASE as ADAPTER_BASE
from groupwise.model.adapters.peft_files import CONFIG as ADAPTER_CONFIG
from groupwise.model.formats.checkpoint import save

if TYPE_CHECKING:
    from groupwise.engine.servers.weights import PolicyWeights
    from groupwise.model.formats.checkpoint import Loaded

# Where the class of each lives. It is imported when it is asked for: others' packages take long.
BACKENDS: dict[str, str] = {
    "native": "groupwise.engine.native.engine:NativeEngine",
    "sglang": "groupwise.engine.servers.engine:SglangEngine",
    "vllm": "groupwise.engine.servers.engine:VllmEngine",
}

_FILES: dict[Path, ModuleType] = {}  # of users, loaded once: one class, whoever asks for it

Tell = Callable[[str, str], None]  # kind and text of what people should know


def warn(kind: str, text: str) -> None:
    """Tell by a warning, where nobody has a better place."""
    warnings.warn(text, EngineWarning, stacklevel=4)


@dataclass(frozen=True)
class EngineSetup:
    """All that an engine is made from."""

    loaded: Loaded  # the policy that learns, its tokenizer, and the files of its folder
    settings: config.EngineSettings  # all of [engine]
    seed: int
    tell: Tell = warn
    on_sync: Sync = "drain"  # what new weights do to answers under way
    weights: PolicyWeights | None = None  # the policy, for engines in other processes

    def publish(self, folder: str | Path) -> None:
        """Write the policy as it is now: a plain folder that other tools read, too.

        An adapter is folded into it, in a copy: the one that learns stays beside its base.
        """
        model, beside = self.loaded.model, (ADAPTER_CONFIG, ADAPTER_BASE)
        if adapters(model):
            model = copy.deepcopy(model)
            merge(model)
        files = {name: x for name, x in self.loaded.files.items() if name not in beside}
        save(model, folder, files, replace=True)


def backend(name: str) -> type[Engine]:
    """Return the class that `engine.backend` names."""
    file, colon, member = name.rpartition(":")
    if colon:
        return _checked(name, _of_file(file, member))
    if name not in BACKENDS:
        raise EngineError(
            f"engine.backend={name!r} names no engine. {nearest(name, BACKENDS)} For one of your "
            'own write "file.py:Class".'
        )
    module, _, member = BACKENDS[name].partition(":")
    return _checked(name, vars(importlib.import_module(module))[member])


def capabilities_of(settings: config.EngineSettings) -> Capabilities:
    """Return what the engine of these settings can do, without making one."""
    return backend(settings.backend).capabilities_for(settings)


def _checked(name: str, found: object) -> type[Engine]:
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise EngineError(
            f"engine.backend={name!r} is no engine: {found!r}. Make it a subclass of "
            "groupwise.BatchEngine, which has one method to write, or of groupwise.Engine."
        )
    if found.__abstractmethods__:
        raise EngineError(
            f"engine.backend={name!r} is no whole engine: {found.__name__} does not define "
            f"{', '.join(sorted(found.__abstractmethods__))}. Write what is missing "
            "(docs/engines.md has an engine to copy)."
        )
    return found


def _of_file(name: str, member: str) -> object:
    file = Path(name).expanduser().resolve()
    if not file.is_file():
        raise EngineError(
            f"There is no file {name!r} to load an engine from. Put it there, or set "
            "engine.backend=native."
        )
    if file not in _FILES:
        _FILES[file] = _loaded(name, file)
    inside = vars(_FILES[file])
    if member not in inside:
        known = [key for key, x in inside.items() if isinstance(x, type) and issubclass(x, Engine)]
        raise EngineError(f"{name} has no class {member!r}. {nearest(member, known)}")
    return inside[member]


def _loaded(name: str, file: Path) -> ModuleType:
    module_name = f"groupwise_engine_{file.stem}_{abs(hash(str(file)))}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise EngineError(f"{name!r} is no Python file. Name one that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    make_importable(file)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_name]  # so that the mended file can be loaded
        if not isinstance(error, (Exception, SystemExit)):
            raise
        lines = [f.lineno for f in extract_tb(error.__traceback__) if f.filename == str(file)]
        line = error.lineno if isinstance(error, SyntaxError) else (lines or [None])[-1]
        place = f", line {line}" if line else ""
        raise EngineError(f"Can't load {name}{place}: {type(error).__name__}: {error}.") from error
    return module
