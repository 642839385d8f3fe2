"""Calls of a Python file's classes, with their arguments, read without running anything."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.errors import RecipeError

ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


@dataclass
class Constructed:
    """An object that a file makes, and what it sets on it."""

    name: str  # of the class
    line: int
    values: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)  # argument -> its expression


class Unknown(Exception):
    """Only a run could tell what this expression is."""


def constructed(text: str, classes: Sequence[str], path: str) -> list[Constructed]:
    """Return the objects of these classes that a file makes, in its order."""
    tree = parsed(text, path)
    names = constants(tree)
    found: dict[ast.Call, Constructed] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) in classes:
            found[node] = arguments(node, names)
    for held, object_ in _held(tree, found).items():
        _set_later(tree, held, object_, names)
    return sorted(found.values(), key=lambda made: made.line)


def parsed(text: str, path: str) -> ast.Module:
    """Return a file's syntax tree."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RecipeError(f"{path} is no Python: {error}.") from error


def called(node: ast.Call) -> str:
    """Return the last word of what is called."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def arguments(call: ast.Call, names: Mapping[str, Any]) -> Constructed:
    made = Constructed(called(call), call.lineno)
    for given in call.keywords:
        _put(made, given.arg, given.value, names)
    if call.args:
        made.unread["its positional arguments"] = ", ".join(map(ast.unparse, call.args))[:200]
    return made


def _put(made: Constructed, name: str | None, node: ast.expr, names: Mapping[str, Any]) -> None:
    """Set one argument, or all of a table behind two stars."""
    try:
        value = value_of(node, names)
    except Unknown:
        made.unread[name or "**"] = ast.unparse(node)[:200]
        return
    if name is not None:
        made.values[name] = value
        made.unread.pop(name, None)
    elif isinstance(value, dict):
        made.values |= value


def constants(tree: ast.Module) -> dict[str, Any]:
    """Return the names that are set once in a file, to something that can be read."""
    set_to: dict[str, list[ast.expr]] = {}
    for name, value, _ in assignments(tree):
        set_to.setdefault(name, []).append(value)
    known: dict[str, Any] = {}
    for name, values in set_to.items():
        if len(values) == 1:
            try:
                known[name] = value_of(values[0], known)
            except Unknown:
                continue
    return known


def assignments(tree: ast.AST) -> Iterator[tuple[str, ast.expr, int]]:
    """Return every name that is set, to what, and in which line; of `a, b = 1, 2` each.

    Where several names come out of one call, each has the whole call.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node.value, node.lineno
                elif isinstance(target, ast.Tuple):
                    yield from _unpacked(target, node.value, node.lineno)


def _unpacked(target: ast.Tuple, value: ast.expr, line: int) -> Iterator[tuple[str, ast.expr, int]]:
    each = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
    for place, name in enumerate(target.elts):
        if isinstance(name, ast.Name):
            part = value.elts[place] if each and isinstance(value, ast.Tuple) else value
            yield name.id, part, line


def _held(tree: ast.Module, found: Mapping[ast.Call, Constructed]) -> dict[str, Constructed]:
    """Return the names that hold one of the objects."""
    return {
        target.id: found[node.value]
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value in found
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _set_later(tree: ast.Module, held: str, made: Constructed, names: Mapping[str, Any]) -> None:
    """Read `held.beta = 0.04` behind the call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and node.lineno > made.line:
            for target in node.targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == held:
                    _put(made, target.attr, node.value, names)


def value_of(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression of constants."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() if node.id in names:
            return names[node.id]
        case ast.UnaryOp(op=ast.USub()):
            return -_number(node.operand, names)
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            try:
                return ARITHMETIC[type(node.op)](
                    _number(node.left, names), _number(node.right, names)
                )
            except ZeroDivisionError as error:
                raise Unknown from error
        case ast.List() | ast.Tuple():
            return [value_of(each, names) for each in node.elts]
        case ast.Dict():
            return _table(node, names)
        case ast.Call() if called(node) == "dict" and not node.args:
            return {
                str(each.arg): value_of(each.value, names) for each in node.keywords if each.arg
            }
    raise Unknown


def _number(node: ast.expr, names: Mapping[str, Any]) -> float:
    value = value_of(node, names)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unknown
    return value


def _table(node: ast.Dict, names: Mapping[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        inner = value_of(value, names)
        if key is not None:
            table[str(value_of(key, names))] = inner
        elif isinstance(inner, dict):
            table |= inner
        else:
            raise Unknown
    return table
