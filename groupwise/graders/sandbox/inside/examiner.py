"""The process of the tests. The program under test runs in another one and is called from here.

So nothing that the program does to its own process reaches the asserts: they see plain data.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import operator
import socket
import sys
import types
from collections.abc import Sequence
from typing import Any

from groupwise.graders.sandbox.inside import values, wire
from groupwise.graders.sandbox.inside.counting import NAME, AssertCount, compiled, said
from groupwise.graders.sandbox.inside.peer import Peer, RemoteObject

UNREACHED = "no assert was reached"
# Classes of Python whose objects a program may use by their public names when it is given one.
LENT = ("tests", "_io", "io", "random", "types", "unittest.mock", "collections", "functools", "re")
GETTERS = (operator.itemgetter, operator.attrgetter, operator.methodcaller)


def examine(job: dict[str, Any], link: socket.socket) -> dict[str, Any]:
    """Run the tests of a job: `helpers`, `names` (the program's), `classes`, `setup`, `tests`.

    Returns how many asserts held, of how many, and what the first that did not hold said.
    """
    count = AssertCount(job["to_the_end"])
    peer = count.peer = Peer(link, may=_may, raised=count.raised)
    total, harmless = len(job["tests"]), 0
    try:
        loaded, *why = wire.receive(link)
    except wire.Gone:
        return _report(0, total, "the program ended before it could be tested")
    if loaded != "loaded":
        return _report(0, total, f"the program raised {': '.join(filter(None, map(str, why)))}")
    scope = _scope(job, peer, count)
    for number, source in enumerate([job["setup"], *job["tests"]]):
        count.test, before, runs = number, len(count.failures), count.runs
        try:
            exec(compiled(source, number, "tests.py"), scope)
        except BaseException as error:  # the tests' own, or the program's
            count.find(error)
            if len(count.failures) == before:
                count.failures.append(said(error))
        if loss := count.loss():
            count.failures.append(loss)
        if number and count.runs == runs and len(count.failures) == before:
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
    """Count the asserts in the source; with `called`, those outside of functions and classes."""
    skipped = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef) if called else ()
    body = [node for node in ast.parse(source).body if not isinstance(node, skipped)]
    return sum(isinstance(node, ast.Assert) for top in body for node in ast.walk(top))


def _report(passed: int, total: int, why: str) -> dict[str, Any]:
    return {"passed": passed, "total": total, "why": why[:500]}


def _scope(job: dict[str, Any], peer: Peer, count: AssertCount) -> dict[str, Any]:
    """Return the names of the tests: their own helpers, then those the program has to define."""
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    scope = module.__dict__
    scope[NAME], scope["__same__"] = count, same
    exec(compiled(job["helpers"], -1, "helpers.py"), scope)
    for name in job["names"]:
        scope.pop(name, None)
        with contextlib.suppress(AttributeError):  # then it stays undefined: a NameError
            scope[name] = peer.ask("getattr", RemoteObject(0), name)
            if name in job["classes"]:
                peer.named_classes.add(id(scope[name]))
    return scope


def _may(operation: str, target: Any, arguments: Sequence[Any]) -> bool:
    """Return whether a program may do this: use what a test gives it, not look behind it for the
    tests.
    """
    own = type(target).__module__ == "tests"
    if operation in ("getattr", "setattr", "delattr"):
        name = arguments[0]
        if operation == "getattr" and name in ("__name__", "__qualname__", "__doc__"):
            return True  # functools.wraps
        if not isinstance(name, str) or name.startswith("__"):
            return False
        if operation != "getattr":
            return own and not callable(getattr(type(target), name, None))
        return own or (_lends(target) and not name.startswith("_"))
    if operation == "call":
        return _may_call(target)
    return operation not in ("plain", "copy", "deepcopy") or own


def _lends(target: Any) -> bool:
    if isinstance(target, type):
        return target.__module__ == "tests"
    unsafe = (types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
    return type(target).__module__ in LENT and not isinstance(target, unsafe)


def _may_call(target: Any) -> bool:
    if isinstance(target, type):  # Python's own `type` would make classes that equal all
        return target.__module__ == "tests"
    if isinstance(target, functools.partial):
        return _may_call(target.func)
    if isinstance(target, types.BuiltinFunctionType):  # found.append, but nothing of a module
        known = values.of_python(target) or values.pure_name(target)
        return bool(known) or not isinstance(target.__self__, (types.ModuleType, type, type(None)))
    if isinstance(target, (types.FunctionType, types.MethodType, *GETTERS)):
        return True
    return type(target).__module__ in ("tests", "unittest.mock")


def same(found: Any, expected: Any) -> bool:
    """Return whether a result is the expected one, where JSON had no tuples and rounded floats."""
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
