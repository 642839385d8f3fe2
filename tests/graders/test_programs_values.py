"""Programs and their tests are in two processes: a verdict must be the one that one would give."""

from __future__ import annotations

import sys
import types

import pytest
from program_objects import CONTAINERS, OPERATORS, VALUES, VECTOR
from program_statements import FUNCTIONS, STATEMENTS

from groupwise.graders.code import code
from groupwise.graders.parts import SampleToGrade
from groupwise.records import Task

MADE = "v, w = Vector(3, 4), Vector(1, 2)\n"
IMPORTS = "import array, collections, collections.abc, copy, datetime, decimal, fractions, uuid\n"


@pytest.fixture(scope="module")
def part():
    return code((), seconds=20)


@pytest.fixture(scope="module")
def share():
    return code((), seconds=20, partial=True)


def marks(part, tests, program, setup="", prompt="Write it."):
    """One exam for each test; a test may be a list of sources."""
    rows = [
        {"tests": [test] if isinstance(test, str) else test, "test_setup": setup} for test in tests
    ]
    samples = [SampleToGrade(Task(0, prompt, None, row), program, (), "eos") for row in rows]
    found = part.grade(samples)
    assert {mark.status for mark in found} == {"ok"}, found
    return [(mark.value, mark.reason) for mark in found]


def graded(part, test, program, setup="", prompt="Write it."):
    return marks(part, [test], program, setup, prompt)[0]


def in_one_process(program, test):
    """As Python has it, to see that the tests themselves are right."""
    scope = types.ModuleType("solution").__dict__
    sys.modules["solution"] = types.ModuleType("solution")
    exec(program, scope)
    exec(test, scope)


@pytest.mark.parametrize(
    "program, setup, expressions",
    [(VECTOR, IMPORTS + MADE, OPERATORS), (CONTAINERS, IMPORTS, VALUES)],
    ids=["operators", "values"],
)
def test_expressions_are_what_they_are_in_one_process(share, program, setup, expressions):
    in_one_process(program, setup + "\n".join(f"assert {found}" for found in expressions))
    tests = [f"assert {found}" for found in expressions]
    assert graded(share, tests, program, setup=setup) == (1.0, "")
    assert (
        graded(share, [f"assert not ({found})" for found in expressions], program, setup=setup)[0]
        == 0.0
    )


def test_statements_are_what_they_are_in_one_process(share):
    for test in STATEMENTS.values():
        in_one_process(FUNCTIONS, test)
    found = marks(share, STATEMENTS.values(), FUNCTIONS)
    assert dict(zip(STATEMENTS, found, strict=True)) == dict.fromkeys(STATEMENTS, (1.0, ""))


# Programs that know nothing.

STOPS = "def f(*a): raise {}\n"
ENDINGS = [
    "StopIteration",
    "StopAsyncIteration",
    "GeneratorExit",
    "type('E', (StopIteration,), {})",
]
QUIET = [
    "assert all(map(f, [1, 2]))",
    "assert not any(map(f, [1, 2]))",
    "assert [*map(f, [1, 2])] == []",
    "for x in map(f, [1]):\n  assert False\nassert True",
    "assert next(map(f, [1]), None) is None",
    "assert list(zip([1], map(f, [1]))) == []",
    "assert sum(filter(f, [1])) == 0",
    "assert all(a == b for a, b in zip(map(f, [1]), [1]))",
    "def g(x): return f(x)\nassert all(map(g, [1]))",
    "assert list(iter(f, 1)) == []",
    "x = list(map(f, [1]))\nassert True",
    "class I:\n  def __iter__(self): return self\n  def __next__(self): return f()\n"
    "assert list(I()) == []",
    "try:\n  x = list(map(f, [1]))\nexcept ValueError:\n  pass\nassert x == []",
    "import contextlib\nwith contextlib.suppress(ValueError):\n  x = list(map(f, [1]))\n"
    "assert x == []",
]


def test_an_error_of_the_program_ends_no_loop_of_the_tests(part):
    for ending in ENDINGS:
        found = marks(part, QUIET, STOPS.format(ending))
        assert [value for value, _ in found] == [0.0] * len(QUIET), ending
    tests = [
        "class G:\n  def __getitem__(self, i): return f(i)\nassert all(G())",
        "class P:\n  @property\n  def p(self): return f()\nassert not hasattr(P(), 'p')",
        "class P:\n  @property\n  def p(self): return f()\nassert getattr(P(), 'p', 1) == 1",
        "class L:\n  def __len__(self): return f()\n  def __iter__(self): return iter([1])\n"
        "assert list(L()) == [1]",
    ]
    tests += [
        "import asyncio\nclass I:\n  def __aiter__(self): return self\n"
        "  async def __anext__(self): return f()\nasync def main(): return [x async for x in I()]\n"
        "assert asyncio.run(main()) == []",
        "class P:\n  p = property(lambda self: f())\nassert all(map(lambda x: x.p, [P()]))",
    ]
    kinds = ["IndexError", "AttributeError", "AttributeError", "TypeError"]
    kinds += ["StopAsyncIteration", "StopIteration"]
    for test, kind in zip(tests, kinds, strict=True):
        in_one_process(STOPS.format(kind), test)
        assert graded(part, test, STOPS.format(kind))[0] == 0.0, test


def test_nor_one_of_its_objects(part):
    program = """
class A:
    p = property(lambda self: 1 if self.fine else next(iter([])))
    fine = False
    def m(self, x): raise StopIteration
    def __len__(self): raise StopIteration
    def __eq__(self, other): raise StopIteration
    def __getitem__(self, i): raise StopIteration
async def f(): raise StopAsyncIteration
"""
    tests = [
        f"assert all(map({f}, [A()]))" for f in ("lambda a: a.p", "A().m", "len", "A().__eq__")
    ]
    tests += [f"assert all(map(lambda a: {f}, [A()]))" for f in ("a == A()", "a[0]", "a.m(1)")]
    tests.append(
        "import asyncio\nclass I:\n  def __aiter__(self): return self\n"
        "  async def __anext__(self): return await f()\n"
        "async def main(): return [x async for x in I()]\nassert asyncio.run(main()) == []"
    )
    for test in tests:
        in_one_process(program, test)
    assert [value for value, _ in marks(part, tests, program)] == [0.0] * len(tests)


YES = """
class Yes:
    x = y = 0
    def __init__(self, *a): pass
    def __hash__(self): return 0
    def __getattr__(self, name): return self
    def __call__(self, *a): return self
    def __iter__(self): return iter([])
    def __bool__(self): return True
    def __len__(self): return 1
    def __contains__(self, x): return True
    def __abs__(self): return 0
    def __float__(self): return 0.0
for name in "eq lt le gt ge".split(): setattr(Yes, f"__{name}__", lambda self, other: True)
Yes.__ne__ = lambda self, other: False
for name in "add sub mul truediv floordiv mod pow and or xor matmul".split():
    for side in "", "r", "i": setattr(Yes, f"__{side}{name}__", lambda self, other: 0)
"""
AGREES = [
    YES + "def solve(n): return Yes()",
    YES + "solve = Yes",
    YES + "class Str(str): pass\nfor n in vars(Yes):\n"
    "  if n[:2] == '__' and n[2:6] not in ('init', 'hash', 'dict', 'weak', 'modu', 'doc_'):\n"
    "    setattr(Str, n, vars(Yes)[n])\nStr.startswith = lambda *a: True\n"
    "def solve(n): return Str('x')",
    YES + "class Int(int): __eq__, __sub__, __rsub__ = Yes.__eq__, Yes.__sub__, Yes.__rsub__\n"
    "def solve(n): return Int(1)",
    YES + "class Tuple(tuple): __eq__, __contains__ = Yes.__eq__, Yes.__contains__\n"
    "def solve(n): return Tuple((1,))",
    YES + "class List(list): __eq__, __contains__ = Yes.__eq__, Yes.__contains__\n"
    "def solve(n): return List([1])",
    "def solve(n): return [2] * 1000",
]
HIDDEN = [
    "assert solve(3) == 'abc'", "assert 'abc' == solve(3)", "assert not solve(3) != 'abc'",
    "assert abs(solve(3) - 41.5) < 1e-6", "assert abs(41.5 - solve(3)) < 1e-6",
    "assert round(solve(3) - 41.5, 7) == 0", "assert 40 < solve(3) < 42", "assert solve(3) in [41]",
    "assert 'abc' in solve(3)", "assert solve(3) in {'abc': 1}", "assert [solve(3)] == ['abc']",
    "assert {'a': solve(3)} == {'a': 'abc'}", "assert (solve(3), 1) == (41, 1)",
    "assert solve(3) - 41 == 0", "assert not solve(3) ^ 41", "assert solve(3).startswith is None",
    "import math\nassert math.isclose(solve(3), 41.5)", "assert max(solve(3), 4) == 4 + solve(3)",
]  # fmt: skip


@pytest.mark.parametrize("program", AGREES, ids=range(len(AGREES)))
def test_an_object_that_agrees_with_everything_is_nothing(part, program):
    for test, (value, why) in zip(HIDDEN, marks(part, HIDDEN, program), strict=True):
        assert value == 0.0 and why, test


def test_a_name_of_a_class_is_none_where_a_function_is_asked_for(part):
    """MBPP has functions that are called Extract and Diff."""
    program = YES.replace("Yes", "Extract")
    assert graded(part, "assert Extract(3) == 'abc'", program, prompt="Write a function.")[0] == 0.0
    asked = "Write a class Extract, and a function that uses it."
    assert graded(part, "assert Extract(3) == 'abc'", program, prompt=asked)[0] == 1.0


def test_a_statement_counts_once_however_often_it_runs(share):
    test = "r = f()\nfor x in r:\n  assert x >= 0\nassert len(r) == 2\nassert r == [0, 1]"
    assert graded(share, test, "def f(): return [0, 1]") == (1.0, "")
    assert graded(share, test, "def f(): return [0] * 5000")[0] == pytest.approx(1 / 3)
    assert graded(share, test, "def f(): return [0] * 5000 + [-1]")[0] == 0.0
    helper = "def same(a, b):\n  assert a == b\nfor i in range(9):\n  same(f(i), i)"
    assert graded(share, helper, "def f(i): return min(i, 7)")[0] == 0.0
    setup = "assert True\ndef same(a, b):\n  assert a == b"
    tests = [f"same(f({i}), {i})" for i in range(3)]
    assert graded(share, tests, "def f(i): return i", setup) == (1.0, "")
    assert graded(share, tests, "def f(i): return min(i, 1)", setup)[0] == pytest.approx(2 / 3)
    assert graded(share, tests, "def f(i): return 9", setup)[0] == 0.0
    recursive = "def walk(n):\n  assert n\n  if n[1:]: walk(n[1:])\nwalk(f())\nassert f() == [1]"
    assert graded(share, recursive, "def f(): return [1] * 99")[0] == 0.5


def test_nothing_hides_an_assert_that_failed(part, share):
    hides = (
        "class D:\n  def __enter__(s): pass\n  def __exit__(s, *e): return True\ndef f(): return 1"
    )
    test = "with D():\n  assert f() == 2\nassert f() == 1"
    assert graded(part, test, hides)[0] == 0.0
    assert graded(share, test, hides)[0] == 0.5


def test_what_a_result_is_compared_with_does_not_change(part):
    empties = "def f(xs): xs.clear(); return xs\ndef g(xs): xs.clear(); return []"
    for call in ("f(xs)", "g(xs)"):
        for side in (
            f"{call} == sorted(xs)",
            f"sorted({call}) == sorted(xs)",
            f"{call} == xs[::-1]",
        ):
            assert graded(part, f"xs = [3, 1]\nassert {side}", empties)[0] == 0.0, side
