"""The asserts of the tests that held, and errors of the program that got lost on their way.

A statement counts once in each test, however often it is run: it holds if it held every time. Else
a program could make itself a better share by returning a long list to a loop of asserts.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from groupwise.graders.sandbox.inside.operations import caller
from groupwise.graders.sandbox.inside.peer import Peer

NAME = "__count__"  # what the rewritten tests know a Count by
# Errors that Python takes for an answer: the end of a loop, a missing attribute, item or operator.
ENDINGS = (StopIteration, StopAsyncIteration, GeneratorExit)
SWALLOWED = (*ENDINGS, AttributeError, LookupError, TypeError)
# Who calls a function in order to see what it raises.
CATCHERS = ("unittest", "pytest", "_pytest", "asyncio", "concurrent", "contextlib", "threading")


class AssertCount:
    """The count of asserts: which held. Changes in place are seen when an assert is over.

    Else `assert f(xs) == sorted(xs)` would hold for a program that empties `xs`. An assert in a
    function that the program was given and calls is not counted: it could call it a thousand times.
    """

    def __init__(self, to_the_end: bool) -> None:
        self.peer: Peer
        self.to_the_end = to_the_end
        self.held: dict[tuple[int, int, int], bool] = {}  # test that runs, source, statement
        self.test = 0  # 0 before the first
        self.runs = 0
        self.failures: list[str] = []
        self.lost: list[BaseException] = []
        self.within: list[tuple[tuple[int, int, int], bool]] = []

    @property
    def passed(self) -> int:
        return sum(held for (test, _, _), held in self.held.items() if test)

    def __call__(self, source: int, number: int) -> AssertCount:
        self.within.append(((self.test, source, number), self.peer.holds_back))
        return self

    def __enter__(self) -> None:
        self.peer.holds_back = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        statement, self.peer.holds_back = self.within.pop()
        if not self.peer.holds_back:
            self.peer.settle()
        if self.peer.answering:
            return False
        self.runs += 1
        why = "" if error is None else said(error)
        why = why or self.loss() or ("the program has ended" if self.peer.gone else "")
        if not why:
            self.held.setdefault(statement, True)
            return False
        if self.held.get(statement, True):
            self.failures.append(why)
        self.held[statement] = False
        self.find(error)
        return self.to_the_end and isinstance(error, Exception) and not self.peer.gone

    def settle(self, value: Any) -> Any:
        """Show the changes after a part of an assert that the next part may look at."""
        self.peer.settle()
        self.peer.holds_back = True
        return value

    def at_once(self) -> None:
        self.peer.holds_back = False

    def raised(self, operation: str, error: BaseException) -> None:
        """Note an error of the program that Python might swallow, unless somebody waits for it."""
        if not isinstance(error, ENDINGS if operation == "await" else SWALLOWED):
            return
        module = caller()
        if module.partition(".")[0] in CATCHERS:
            return
        if module == "tests" or isinstance(error, ENDINGS):
            self.lost.append(error)

    def find(self, error: BaseException | None) -> None:
        """Forget an error that arrived at a statement of the tests, and those that led to it."""
        seen: list[BaseException] = []
        while error is not None and not any(error is other for other in seen):
            seen.append(error)
            error = error.__cause__ or error.__context__
        self.lost = [lost for lost in self.lost if not any(lost is other for other in seen)]

    def caught(self) -> None:
        self.find(sys.exc_info()[1])

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Watch the inside of a `with` of the tests, which may be there to catch an error."""
        try:
            yield
        except BaseException as error:
            self.find(error)
            raise

    def loss(self) -> str:
        """Return what the program raised and nothing in the tests caught."""
        if not self.lost:
            return ""
        error, self.lost = self.lost[0], []
        return f"{said(error)}, raised where Python takes it for an answer"


class Counted(ast.NodeTransformer):
    """A rewriter of tests that reports their asserts, and errors that they catch, to a count."""

    def __init__(self, source: int) -> None:
        self.source, self.number = source, 0

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        count = _call(None, ast.Constant(self.source), ast.Constant(self.number))
        self.number += 1
        node.test = _in_parts(node.test)
        return ast.copy_location(ast.With([ast.withitem(count)], [node]), node)

    def visit_With(self, node: ast.With) -> ast.AST:
        self.generic_visit(node)
        node.body = [ast.With([ast.withitem(_call("watch"))], node.body)]
        return node

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.AST:
        self.generic_visit(node)
        node.body = [ast.With([ast.withitem(_call("watch"))], node.body)]
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(node)
        node.body = [ast.Expr(_call("caught")), *node.body]
        return node


def compiled(source: str, number: int, name: str) -> Any:
    tree = ast.fix_missing_locations(Counted(number).visit(ast.parse(source)))
    return compile(tree, name, "exec")


def _call(method: str | None, *args: ast.expr) -> ast.expr:
    count: ast.expr = ast.Name(NAME, ast.Load())
    return ast.Call(ast.Attribute(count, method, ast.Load()) if method else count, [*args], [])


def _in_parts(test: ast.expr) -> ast.expr:
    """Show the change of xs between the parts of `f(xs) is None and xs == []`.

    Not between the sides of one comparison, unless it is of identities or with literals.
    """
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        test.values = [_call("settle", _in_parts(value)) for value in test.values]
    elif isinstance(test, ast.Compare):
        sides = [test.left, *test.comparators]
        if all(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops):
            both = ast.Tuple([_call("at_once"), test], ast.Load())
            return _call("settle", ast.Subscript(both, ast.Constant(1), ast.Load()))
        shown = [side for side in sides if not _is_literal(side)]
        if len(shown) == 1 and isinstance(shown[0], (ast.Tuple, ast.List)):
            parts = shown[0].elts
            shown[0].elts = [
                part if isinstance(part, ast.Starred) else _call("settle", part) for part in parts
            ]
    return test


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError):
        return False
    return True


def said(error: BaseException) -> str:
    text = str(error) if not isinstance(error, AssertionError) or error.args else "not so"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
