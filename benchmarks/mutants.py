"""Does the reward `code` give the verdict that Python gives in one process?

    python benchmarks/mutants.py FOLDER [--every 4] [--isolation ...] [--workers 2]

FOLDER has humaneval/ and mbpp/. Every reference solution is rewritten: in forms that must be right
(renamed, as a method, as a generator, with results of classes of its own ...) and in forms that
are mostly wrong (a constant, off by one, another operator, an error). What a form is worth is what
its tests say when they run behind it in one script; the grader must say the same. Objects that
agree with everything must not pass at all.
"""

from __future__ import annotations

import argparse
import ast
import copy
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from programs import tasks

from groupwise.graders.code import examine, extract
from groupwise.graders.program_tests import FunctionTests, read_tests
from groupwise.graders.sandbox.limits import Limits
from groupwise.graders.sandbox.pool import SandboxPool
from groupwise.graders.sandbox.worker import Sandbox
from groupwise.records import Task

LIMITS = Limits(seconds=5)
DONE = "every assert held"
# What stands behind a program: NAME is its function, which these give another form.
RIGHT = {
    "method": """
        class Holder:
            def __init__(self, f): self._f = f
            def run(self, *a, **k): return self._f(*a, **k)
        NAME = Holder(NAME).run""",
    "object": """
        class Callable:
            def __call__(self, *a, **k): return _inner(*a, **k)
        _inner, NAME = NAME, Callable()""",
    "decorator": """
        import functools
        def _decorated(f):
            @functools.wraps(f)
            def inner(*a, **k): return f(*a, **k)
            return inner
        NAME = _decorated(NAME)""",
    "generator": """
        def _once(f, a, k): yield f(*a, **k)
        _inner = NAME
        def NAME(*a, **k): return next(_once(_inner, a, k))""",
    "recursion": """
        _inner = NAME
        def NAME(*a, _depth=3, **k):
            return NAME(*a, _depth=_depth - 1, **k) if _depth else _inner(*a, **k)""",
    "coroutine": """
        import asyncio
        _inner = NAME
        async def _later(a, k): return _inner(*a, **k)
        def NAME(*a, **k): return asyncio.run(_later(a, k))""",
    "classes of its own": """
        class OwnList(list): pass
        class OwnTuple(tuple): pass
        class OwnDict(dict): pass
        class OwnStr(str): pass
        class OwnInt(int): pass
        class OwnFloat(float): pass
        _kinds = {list: OwnList, tuple: OwnTuple, dict: OwnDict, str: OwnStr, int: OwnInt,
                  float: OwnFloat}
        _inner = NAME
        def NAME(*a, **k):
            found = _inner(*a, **k)
            return _kinds.get(type(found), lambda x: x)(found)""",
    "collections": """
        import collections
        def _named(t): return collections.namedtuple("T", [f"f{i}" for i in range(len(t))])(*t)
        _kinds = {dict: collections.OrderedDict, tuple: _named}
        _inner = NAME
        def NAME(*a, **k):
            found = _inner(*a, **k)
            return _kinds.get(type(found), lambda x: x)(found)""",
    "empties its arguments": """
        import copy
        _inner = NAME
        def NAME(*a, **k):
            found = _inner(*copy.deepcopy(a), **copy.deepcopy(k))
            for x in a:
                if isinstance(x, (list, dict, set)): x.clear()
            return found""",
}
ERRORS = ("StopIteration", "KeyError", "AttributeError", "TypeError", "ValueError", "GeneratorExit")
CONSTANTS = ("None", "0", "1", "True", "''", "[]", "a[0] if a else None", "float('nan')")
AGREES = """
class Yes:
    def __getattr__(self, name): return self
    def __call__(self, *a): return self
    def __iter__(self): return iter([])
    def __hash__(self): return 0
    def __contains__(self, x): return True
    def __abs__(self): return 0
    def __round__(self, n=0): return 0
for _n in "eq lt le gt ge".split(): setattr(Yes, f"__{_n}__", lambda self, other: True)
for _n in "sub rsub add radd mul mod truediv".split():
    setattr(Yes, f"__{_n}__", lambda self, other: 0)
Yes.__ne__ = lambda self, other: False
def NAME(*a, **k): return Yes()"""
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn,
}  # fmt: skip


class Renamed(ast.NodeTransformer):
    """Local variables get other names."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        inner = [n for n in ast.walk(node) if n is not node]
        kinds = (ast.FunctionDef, ast.Lambda, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom)
        if any(isinstance(n, (*kinds, ast.ClassDef)) for n in inner):
            return node
        args = {n.arg for n in inner if isinstance(n, ast.arg)}
        names = {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        for name in [n for n in inner if isinstance(n, ast.Name) and n.id in names - args]:
            name.id = f"_{name.id}_"
        return node


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """Versions with one thing changed: a number, an operator, a statement left out."""
    for number in range(len(list(ast.walk(ast.parse(source))))):
        tree = ast.parse(source)
        same = list(ast.walk(tree))[number]
        if isinstance(same, ast.Constant) and type(same.value) is int:
            same.value += 1
            yield "off by one", ast.unparse(tree)
        elif isinstance(same, (ast.BinOp, ast.BoolOp)) and type(same.op) in OPERATORS:
            same.op = OPERATORS[type(same.op)]()
            yield "another operator", ast.unparse(tree)
        elif isinstance(same, ast.Compare) and type(same.ops[0]) in OPERATORS:
            same.ops[0] = OPERATORS[type(same.ops[0])]()
            yield "another comparison", ast.unparse(tree)
        elif isinstance(same, ast.Return) and same.value is not None:
            same.value = ast.Constant(None)
            yield "returns nothing", ast.unparse(tree)
        elif isinstance(same, (ast.If, ast.For, ast.While)):
            same.body = [ast.Pass()]
            yield "a body left out", ast.unparse(tree)


def forms(source: str, name: str, number: int) -> Iterator[tuple[str, str]]:
    """The program in many forms; of mutants and constants a few, others for every task."""
    yield "renamed", ast.unparse(ast.fix_missing_locations(Renamed().visit(ast.parse(source))))
    for form, text in RIGHT.items():
        yield form, f"{source}\n{textwrap.dedent(text).replace('NAME', name)}"
    for constant in (CONSTANTS[number % len(CONSTANTS)], CONSTANTS[number // 8 % len(CONSTANTS)]):
        yield "constant", f"def {name}(*a, **k): return {constant}"
    yield "error", f"def {name}(*a, **k): raise {ERRORS[number % len(ERRORS)]}"
    found = list(mutants(source))
    yield from found[number % 3 :: max(len(found) // 6, 1)][:6]
    yield "agrees with everything", AGREES.replace("NAME", name)


def in_one_process(worker: Sandbox, test: FunctionTests) -> bool:
    """Whether a script of the program and, behind it, its tests comes to its end."""
    script = f"""
import sys, types
_program = sys.modules["solution"] = types.ModuleType("solution")
exec(compile({test.program!r}, "program.py", "exec"), _program.__dict__)
exec(compile({test.helpers!r}, "helpers.py", "exec"))
for _name in {test.names!r}:
    if hasattr(_program, _name): globals()[_name] = getattr(_program, _name)
"""
    script = "\n".join([script, test.setup, *test.tests, f"print(chr(10) + {DONE!r})"])
    ran = worker.script(script, "", LIMITS)
    return not ran.why and ran.output.endswith(DONE + "\n")


def work(worker: Sandbox, job: tuple[Task, str, str]) -> tuple[str, bool, bool, str]:
    task, form, source = job
    test = read_tests(task, source)
    assert isinstance(test, FunctionTests)
    found = examine(worker, test, LIMITS, False)
    return form, in_one_process(worker, test), found.passed == found.total, found.why


def function_of(task: Task) -> str:
    """The function that the tests call."""
    if name := task.columns.get("entry_point"):
        return str(name)
    test = read_tests(task, extract(task.answer))
    assert isinstance(test, FunctionTests)
    return next(name for name in test.names if f"def {name}" in task.answer)


def jobs(folder: Path, every: int) -> Iterator[tuple[Task, str, str]]:
    for number, task in enumerate(tasks(folder)):
        if number % every:
            continue
        answer = extract(task.answer)
        whole = answer if "def " in answer and ast_of(answer) else f"{task.prompt}{answer}"
        try:
            name = function_of(task)
            made = list(forms(whole, name, number))
        except (SyntaxError, StopIteration):
            continue  # the tests call a method, or the answer is in a form of its own
        for form, source in made:
            yield copy.copy(task), form, source


def ast_of(source: str) -> bool:
    try:
        return bool(ast.parse(source))
    except SyntaxError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--isolation", default="")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    pool = SandboxPool(given.isolation, size=given.workers)
    for name in ("humaneval", "mbpp"):
        todo = list(jobs(given.folder / name, given.every))
        found = pool.map(work, todo, failed=lambda error: ("error", False, False, str(error)))
        counts: Counter[tuple[str, str]] = Counter()
        for (task, form, source), (_, right, accepted, why) in zip(todo, found, strict=True):
            honest = right and form != "agrees with everything"
            kind = "agree" if honest == accepted else "REFUSED" if honest else "ACCEPTED"
            counts[form, "right" if honest else "wrong"] += 1
            counts[form, kind] += 1
            if kind != "agree":
                print(f"--- {kind} {task.columns.get('task_id')} {form}: {why}\n{source[-600:]}")
        print(f"{name}: {len(todo)} programs")
        for form in dict.fromkeys(form for form, _ in counts):
            row = [counts[form, kind] for kind in ("right", "REFUSED", "wrong", "ACCEPTED")]
            print("  {:24} right {:5} refused {:3}   wrong {:5} accepted {:3}".format(form, *row))
    pool.close()


if __name__ == "__main__":
    main()
