"""Recipes by name: the package's, and those that files of users register."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from traceback import walk_tb
from typing import Any

from groupwise.common.user_files import make_importable
from groupwise.errors import GroupwiseError, RecipeError, nearest
from groupwise.methods.method import Method
from groupwise.methods.slots import REGISTRY

RECIPES: dict[str, Method] = {}
ADDED: dict[Path, Set[str]] = {}  # names of recipes by the user's file that registered them


def register(entry: Method) -> Method:
    """Make a recipe known by its name. A name is taken once."""
    if not isinstance(entry, Method):
        raise RecipeError(
            f"register takes a recipe, got {entry!r}. Write "
            'register(recipe("dapo").replace(name="mine", ...)).'
        )
    known = RECIPES.get(entry.name)
    if known is not None and known != entry:
        raise RecipeError(f"A recipe called {entry.name!r} exists already. Name yours otherwise.")
    RECIPES[entry.name] = entry
    return entry


def recipe(name: str, settings: Mapping[str, Any] | None = None) -> Any:
    """Find a recipe by name, or by `file.py:name` in a file of your own, with dotted settings.

    Returns a `Recipe` (or a `PairRecipe` for preference methods). `groupwise.recipes` fills what
    is known here: ask for it there.
    """
    if not isinstance(name, str):
        raise RecipeError(
            f"A recipe is asked for by its name, got {name!r}. Write recipe('dapo') or "
            "recipe('file.py:name')."
        )
    path, colon, wanted = name.rpartition(":")
    if colon:
        load_plugin(path)
    if wanted not in RECIPES and colon:
        own = [f"{path}:{known}" for known in ADDED.get(_place(path), ())]
        others = nearest(name, own) if own else "None at all: does the file call register(...)?"
        raise RecipeError(f"There is no recipe {wanted!r} in {path}. {others}")
    if wanted not in RECIPES:
        raise RecipeError(f"There is no recipe {wanted!r}. {nearest(wanted, RECIPES)}")
    return RECIPES[wanted] if settings is None else RECIPES[wanted].configure(settings)


def load_plugin(path: str) -> None:
    """Import a user's file, whose decorators and `register` calls add slots and recipes."""
    file = _place(path)
    if not file.is_file():
        raise RecipeError(
            f"There is no file {path!r} to load a recipe from. Put it there, or name another "
            "recipe: recipe=grpo (what a run learned is evaluated the same with any)."
        )
    module_name = f"groupwise_plugin_{file.stem}_{abs(hash(str(file)))}"
    if module_name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{path!r} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    before = set(RECIPES)
    sys.modules[module_name] = module
    make_importable(file)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        _forget(module_name, RECIPES.keys() - before)  # so that the mended file can be loaded
        if isinstance(error, (Exception, SystemExit)):
            raise RecipeError(_blame(path, file, error)) from error
        raise
    ADDED[file] = RECIPES.keys() - before


def _place(path: str) -> Path:
    return Path(path).expanduser().resolve()


def _forget(module_name: str, recipes: Iterable[str]) -> None:
    """Take back what a file added before it failed."""
    del sys.modules[module_name]
    for name in recipes:
        del RECIPES[name]
    for known in REGISTRY.values():
        for name, definition in list(known.items()):
            if definition.function.__module__ == module_name:
                del known[name]


def _blame(path: str, file: Path, error: BaseException) -> str:
    """Say which line of a user's file failed, and why."""
    if isinstance(error, SyntaxError) and error.filename:
        place = path if error.filename == str(file) else error.filename
        return f"Can't load {place}, line {error.lineno}: {type(error).__name__}: {error.msg}."
    lines = [
        n for frame, n in walk_tb(error.__traceback__) if frame.f_code.co_filename == str(file)
    ]
    why = str(error) if isinstance(error, GroupwiseError) else f"{type(error).__name__}: {error}."
    return f"Can't load {path}{f', line {lines[-1]}' if lines else ''}: {why}"
