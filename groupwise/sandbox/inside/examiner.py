"""The process of the tests. The program under test runs in another one and is called from here.

So nothing that the program does to its own process reaches the asserts: they see plain data.
"""

from __future__ import annotations

import ast
import contextlib
import math
import socket
import sys
import types
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from groupwise.sandbox.inside import wire

UNREACHED = "no assert was reached"


class Count:
    """Around every assert: whether it held. Within, arguments changed in place stay as they were.

    Else `assert f(xs) == sorted(xs)` would hold for a program that empties `xs`. An assert in a
    function that the program was given and calls is not counted: it could call it a thousand times.
    """

    def __init__(self, peer: wire.Peer, to_the_end: bool) -> None:
        self.peer, self.to_the_end = peer, to_the_end
        self.passed = 0
        self.failures: list[str] = []

        self.took_changes: list[bool] = []

    def __enter__(self) -> None:
        self.took_changes.append(self.peer.takes_changes)
        self.peer.takes_changes = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.peer.takes_changes = self.took_changes.pop()
        if self.peer.answering:
            return False
        if error is None and not self.peer.gone:
            self.passed += 1
            return False
        self.failures.append(_said(error))
        return self.to_the_end and isinstance(error, Exception) and not self.peer.gone


class Counted(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        context = ast.withitem(context_expr=ast.Name("__count__", ast.Load()))
        return ast.copy_location(ast.With(items=[context], body=[node]), node)


def examine(job: dict[str, Any], link: socket.socket) -> dict[str, Any]:
    """Run the tests of a job: `helpers`, `names` (the program's), `setup`, `tests`.

    Returns how many asserts held, of how many, and what the first that did not hold said.
    """
    peer = wire.Peer(link, may=_may)
    count = Count(peer, job["to_the_end"])
    total, harmless = len(job["tests"]), 0
    try:
        loaded, *why = wire.receive(link)
    except wire.Gone:
        return _report(0, total, "the program ended before it could be tested")
    if loaded != "loaded":
        return _report(0, total, f"the program raised {': '.join(filter(None, map(str, why)))}")
    scope = _scope(job, peer)
    scope["__count__"], scope["__same__"] = count, same
    for number, source in enumerate([job["setup"], *job["tests"]]):
        before, passed = len(count.failures), count.passed
        try:
            tree = ast.fix_missing_locations(Counted().visit(ast.parse(source)))
            exec(compile(tree, "tests.py", "exec"), scope)
        except BaseException as error:  # the tests' own, or the program's
            if len(count.failures) == before:
                count.failures.append(_said(error))
        if number and count.passed == passed and len(count.failures) == before:
            if _asserts(source, called=True):
                count.failures.append(UNREACHED)
            else:
                harmless += 1  # it has none, and did not raise
        if peer.gone:
            found = f"the program {peer.gone} during the tests"
            return _report(0, max(total, 1), found)
        if count.failures and not job["to_the_end"]:
            break
    if not count.passed and not count.failures and any(map(_asserts, job["tests"])):
        count.failures.append(UNREACHED)  # all of them are in functions, and none held there
        harmless = 0
    passed = count.passed + harmless
    reached = max(passed + len(count.failures), total)
    if not count.failures:
        return _report(passed, reached, "")
    # Asserts behind the one that ended a test count as well.
    written = sum(max(_asserts(source), 1) for source in job["tests"])
    return _report(passed, max(reached, written), count.failures[0])


def _asserts(source: str, called: bool = False) -> int:
    """How many are written there; with `called`, of those outside of functions and classes."""
    skipped = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef) if called else ()
    body = [node for node in ast.parse(source).body if not isinstance(node, skipped)]
    return sum(isinstance(node, ast.Assert) for top in body for node in ast.walk(top))


def _report(passed: int, total: int, why: str) -> dict[str, Any]:
    return {"passed": passed, "total": total, "why": why[:500]}


def _scope(job: dict[str, Any], peer: wire.Peer) -> dict[str, Any]:
    """Names of the tests: their own helpers first, then those that the program has to define."""
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    scope = module.__dict__
    exec(compile(job["helpers"], "helpers.py", "exec"), scope)
    program = wire.Remote(peer, 0, "solution")
    for name in job["names"]:
        scope.pop(name, None)
        with contextlib.suppress(AttributeError):  # then it stays undefined: a NameError
            scope[name] = peer.ask("getattr", program, name)
    return scope


def _may(operation: str, target: Any, arguments: Sequence[Any]) -> bool:
    """A program may use what a test gives it, but not look behind it for the tests."""
    if operation in ("getattr", "setattr"):
        name, own = arguments[0], type(target).__module__ == "tests"
        if not own or not isinstance(name, str) or name.startswith("_"):
            return False
        return operation == "getattr" or not callable(getattr(type(target), name, None))
    if operation == "call":
        if isinstance(target, type):  # Python's own `type` would make classes that equal all
            return target.__module__ == "tests"
        return isinstance(target, (types.FunctionType, types.MethodType))
    return operation in ("iter", "next", "len", "bool", "getitem", "setitem", "str", "int", "float")


def same(found: Any, expected: Any) -> bool:
    """Whether a result is the expected one, where JSON had no tuples and rounded floats."""
    if type(expected) is int and type(found) is float:
        return found == expected
    if type(expected) is float and type(found) in (int, float):
        return found == expected or math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-6)
    if isinstance(found, (list, tuple)) and isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        plain = {str(key): value for key, value in found.items()}
        return len(plain) == len(expected) and all(
            str(key) in plain and same(plain[str(key)], value) for key, value in expected.items()
        )
    return type(found) is type(expected) and found == expected


def _said(error: BaseException | None) -> str:
    if error is None:
        return "the program has ended"
    text = str(error) if not isinstance(error, AssertionError) or error.args else "not so"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
