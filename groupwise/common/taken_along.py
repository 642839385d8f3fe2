"""A function of a script or a notebook as one of a file, which other processes and later starts
load.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from groupwise.errors import RewardError

REMEDY = "Put it into a file, and name it there: reward.parts = { 'file.py:function' = 1.0 }."


def place_of(function: Callable[..., Any], file: Path) -> str:
    """Return `path:name` of a function: where it was defined or, where no file has it at its top
    level, in `file`, which is written with all that it uses.
    """
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        raise RewardError(f"{function!r} is no function with a name: write `def name(...)`.")
    if (own := _own_file(function)) is not None:
        return f"{own}:{function.__name__}"
    lines = ["from __future__ import annotations", "", *_lines(function, {})]
    text = "\n".join(lines) + "\n"
    if not file.is_file() or file.read_text("utf-8") != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f"{file.name}.partial")
        beside.write_text(text, "utf-8")
        beside.replace(file)
    return f"{file.absolute()}:{function.__name__}"


def _own_file(function: FunctionType) -> Path | None:
    """Return the file that has the function at its top level, and so for whoever imports it."""
    file = Path(function.__code__.co_filename)
    module = sys.modules.get(function.__module__)
    if not file.is_file() or getattr(module, function.__qualname__, None) is not function:
        return None
    top = ast.parse(file.read_bytes()).body
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    defined = any(isinstance(node, kinds) and node.name == function.__name__ for node in top)
    return file.absolute() if defined else None


def _lines(function: FunctionType, made: dict[str, Any]) -> Iterator[str]:
    """Yield what a function uses, each once, then the function itself."""
    made[function.__name__] = function
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except OSError:
        raise RewardError(f"The text of {function.__name__} can't be found. {REMEDY}") from None
    values = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    for name in sorted(_names(ast.parse(source)) & values.keys()):
        value = values[name]
        if name in made:
            if made[name] is not value:
                raise RewardError(f"{name} means two things in {function.__name__}. {REMEDY}")
            continue
        made[name] = value
        yield from _value(name, value, function, made)
    yield from ["", "", *source.rstrip().splitlines()]


def _names(tree: ast.AST) -> set[str]:
    """Return the names that are read, defaults and decorators too; annotations are not run."""
    found = {tree.id} if isinstance(tree, ast.Name) and isinstance(tree.ctx, ast.Load) else set()
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                found |= _names(node)
    return found


def _value(name: str, value: Any, used_by: FunctionType, made: dict[str, Any]) -> Iterator[str]:
    """Yield the line that makes a value, or the function that it is."""
    if isinstance(value, ModuleType):
        yield f"import {value.__name__} as {name}"
    elif (module := _importable(value)) is not None:
        yield f"from {module} import {value.__qualname__} as {name}"
    elif isinstance(value, FunctionType) and value.__name__ == name:
        yield from _lines(value, made)
    elif _is_literal(value):
        yield f"{name} = {value!r}"
    else:
        raise RewardError(
            f"{used_by.__name__} uses {name}, a {type(value).__name__}, which can't be written "
            f"into the run's folder for other processes. {REMEDY}"
        )


def _importable(value: Any) -> str | None:
    """Return the module that a function or class is imported from; the script itself is none."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not module or not name or module == "__main__" or "." in name:
        return None
    return module if getattr(sys.modules.get(module), name, None) is value else None


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError):
        return False
