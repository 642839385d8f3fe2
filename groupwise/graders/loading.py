"""The worker's side of a user's reward: a process that loads its file and calls it."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from groupwise.common.forked import one_process
from groupwise.common.user_files import code_files, forget, make_importable
from groupwise.errors import RewardError, nearest
from groupwise.graders import calling
from groupwise.graders.calling import Returned, Signature
from groupwise.graders.environments import MAKER, Rubric, rubric_of

NOT_LOADED = "not loaded"
Reward = Callable[..., Any] | Rubric
Stamps = dict[str, int]  # when the files that code came from were last written
_LOADED: dict[tuple[str, str], tuple[Stamps, Reward]] = {}
_MODULES: dict[str, tuple[Stamps, ModuleType]] = {}
_folder = ""  # that the caller was in, the last time


def serve(task: str, folder: str, file: str, name: str, calls: Any = (), limit: float = 0.0) -> Any:
    """Load a reward of a file, `describe` it or `call` it, in the folder of the caller."""
    global _folder
    try:
        if folder not in (
            "",
            _folder,
        ):  # not each time: reward code may have gone elsewhere by itself
            os.chdir(folder)
            _folder = folder
        if task == "load":
            load(file, name)
            return None
        stamps, reward = _LOADED.get((file, name), ({}, None))
        if reward is None or stamps != _stamps(stamps):
            return NOT_LOADED
        return signature(reward) if task == "describe" else call(reward, calls, limit)
    except RewardError as error:
        return error


def signature(reward: Reward) -> Signature:
    return reward.signature() if isinstance(reward, Rubric) else calling.signature(reward)


def call(reward: Reward, calls: Sequence[Mapping[str, Any]], limit: float) -> list[Returned]:
    if isinstance(reward, Rubric):
        return reward.call(calls, limit)
    return calling.call(reward, calls, limit)


def load(file: str, name: str) -> None:
    """Load the functions of a file, which share its module. It is loaded anew when it, or what it
    imported from beside it, has changed.
    """
    stamps, module = _MODULES.get(file, ({}, None))
    if module is None or stamps != _stamps(stamps):
        forget(file)
        module = _module(file)
        stamps = _stamps(code_files(file))
        _MODULES[file] = (stamps, module)
    _LOADED[file, name] = (stamps, pick(module, file, name))


def _stamps(files: Iterable[str]) -> Stamps:
    return {file: os.stat(file).st_mtime_ns if os.path.exists(file) else 0 for file in files}


def _module(file: str) -> ModuleType:
    path = Path(file)
    name = f"groupwise_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RewardError(f"{file!r} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    make_importable(path, shadows=True)
    try:
        with one_process():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the boundary to the user's code
        raise _not_loaded(file, error) from None
    return module


def _not_loaded(file: str, error: BaseException) -> RewardError:
    lines = [f.lineno for f in extract_tb(error.__traceback__) if f.filename == file]
    line = error.lineno if isinstance(error, SyntaxError) else (lines or [None])[-1]
    place = f", line {line}" if line else ""
    return RewardError(f"Can't load {file}{place}: {type(error).__name__}: {error}.")


def pick(module: ModuleType, file: str, name: str) -> Reward:
    found = getattr(module, name, None)
    if name == MAKER and inspect.isroutine(found):
        try:
            with one_process():
                found = found()
        except (Exception, SystemExit) as error:  # the boundary to the user's code
            raise _not_loaded(file, error) from None
    rubric = None if found is None else rubric_of(found)
    if rubric is not None:
        return rubric
    if not callable(found):
        known = [key for key, x in vars(module).items() if inspect.isroutine(x)]
        tail = nearest(name, known) if known else "It defines none."
        raise RewardError(f"{file} has no function {name!r}. {tail}")
    return found
