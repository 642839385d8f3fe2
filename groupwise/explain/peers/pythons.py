"""Calls of a Python file's classes, with their arguments, read without running anything."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
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


class _Unknown(Exception):
    """Only a run could tell what this expression is."""


def constructed(text: str, classes: Sequence[str], path: str) -> list[Constructed]:
    """Return the objects of these classes that a file makes, in its order."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RecipeError(f"{path} is no Python: {error}.") from error
    names = _constants(tree)
    found: dict[ast.Call, Constructed] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node) in classes:
            found[node] = _read(node, names)
    for held, object_ in _held(tree, found).items():
        _set_later(tree, held, object_, names)
    return sorted(found.values(), key=lambda made: made.line)


def _called(node: ast.Call) -> str:
    called = node.func
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _read(call: ast.Call, names: Mapping[str, Any]) -> Constructed:
    made = Constructed(_called(call), call.lineno)
    for given in call.keywords:
        _put(made, given.arg, given.value, names)
    if call.args:
        made.unread["its positional arguments"] = ", ".join(map(ast.unparse, call.args))[:200]
    return made


def _put(made: Constructed, name: str | None, node: ast.expr, names: Mapping[str, Any]) -> None:
    """Set one argument, or all of a table behind two stars."""
    try:
        value = _value(node, names)
    except _Unknown:
        made.unread[name or "**"] = ast.unparse(node)[:200]
        return
    if name is not None:
        made.values[name] = value
        made.unread.pop(name, None)
    elif isinstance(value, dict):
        made.values |= value


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return the names that are set once in a file, to something that can be read."""
    set_to: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    set_to.setdefault(target.id, []).append(node.value)
    known: dict[str, Any] = {}
    for name, values in set_to.items():
        if len(values) == 1:
            try:
                known[name] = _value(values[0], known)
            except _Unknown:
                continue
    return known


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


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
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
                raise _Unknown from error
        case ast.List() | ast.Tuple():
            return [_value(each, names) for each in node.elts]
        case ast.Dict():
            return _table(node, names)
        case ast.Call() if _called(node) == "dict" and not node.args:
            return {str(each.arg): _value(each.value, names) for each in node.keywords if each.arg}
    raise _Unknown


def _number(node: ast.expr, names: Mapping[str, Any]) -> float:
    value = _value(node, names)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Unknown
    return value


def _table(node: ast.Dict, names: Mapping[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        inner = _value(value, names)
        if key is not None:
            table[str(_value(key, names))] = inner
        elif isinstance(inner, dict):
            table |= inner
        else:
            raise _Unknown
    return table
