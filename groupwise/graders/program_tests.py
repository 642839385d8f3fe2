"""The tests of a program, read from a row, in the forms that data sets have.

    tests / test_list       a list of asserts (MBPP), with test_setup or test_imports before them
    tests / test            defines check(candidate), and entry_point (HumanEval, LeetCode)
    tests, public_test_cases, input_output, or inputs and outputs
                            input/output pairs: standard input and output, or arguments and result
                            where a function is named (fn_name, func_name, entry_point)

They may stand in columns of their own or in the answer, as objects or as JSON in a string.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.data.tasks import prompt_text
from groupwise.records import Task

COLUMNS = ("tests", "test_list", "test", "input_output", "public_test_cases")
NUMBERS = "nan, inf = float('nan'), float('inf')\n"  # JSON has them, Python's literals do not
LEETCODE = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
inf = math.inf
"""


class Untestable(ValueError):
    """A row without tests that can be run."""


@dataclass(frozen=True)
class FunctionTests:
    """Tests that call the program's functions. `helpers` are the tests' own."""

    program: str
    names: tuple[str, ...]  # what the program has to define
    tests: tuple[str, ...]
    helpers: str = ""
    setup: str = ""
    classes: tuple[str, ...] = ()  # those of the names that row and tests speak of as classes


@dataclass(frozen=True)
class InputOutput:
    """Standard input and the expected output."""

    program: str
    pairs: tuple[tuple[str, str], ...]

    @property
    def tests(self) -> tuple[tuple[str, str], ...]:
        return self.pairs


def read_tests(task: Task, code: str) -> FunctionTests | InputOutput:
    """Return the program to run, and its tests. Raises Untestable if the row has nothing to run."""
    given = _given(task)
    entry = str(_column(task, "entry_point", "fn_name", "func_name") or "")
    if isinstance(given, str):
        return _checked(task, given, entry, code)
    if isinstance(given, list) and all(isinstance(item, str) for item in given):
        return _asserts(task, given, code)
    if isinstance(given, Mapping):
        return _paired(given, str(given.get("fn_name") or entry), code)
    raise Untestable("its tests are neither asserts nor input/output pairs")


def _given(task: Task) -> Any:
    """Return the tests as they are in the row: text, a list of texts, or inputs and outputs."""
    columns = task.columns
    found = next((columns[name] for name in COLUMNS if columns.get(name)), None)
    if found is None and columns.get("inputs") and columns.get("outputs"):
        found = {"inputs": columns["inputs"], "outputs": columns["outputs"]}
    if found is None:
        found = _loaded(task.answer)
        if not isinstance(found, (list, Mapping)):
            raise Untestable(f"it has none of the columns {', '.join(COLUMNS)}")
    found = _loaded(found)
    if isinstance(found, list) and found and all(isinstance(item, Mapping) for item in found):
        named = {str(item["fn_name"]) for item in found if item.get("fn_name")}
        kinds = {item.get("testtype", item.get("type", "")) for item in found}
        return {
            "inputs": [item.get("input", "") for item in found],
            "outputs": [item.get("output", "") for item in found],
            "fn_name": named.pop() if len(named) == 1 else None,
            "lines": "functional" in kinds,
        }
    if not found:
        raise Untestable("its tests are empty")
    return found


def _loaded(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _asserts(task: Task, tests: Sequence[str], code: str) -> FunctionTests:
    setup = _column(task, "test_setup", "test_setup_code", "setup_code")
    if setup is None:
        setup = "\n".join(_column(task, "test_imports") or [])
    names, modules = _free(f"{setup}\n" + "\n".join(tests))
    called = tuple(map(_called, tests))
    _check_calls("\n".join(called))
    classes = _classes(names, prompt_text(task.prompt), "\n".join(tests))
    return FunctionTests(code, names, called, helpers=modules, setup=str(setup), classes=classes)


def _checked(task: Task, tests: str, entry: str, code: str) -> FunctionTests:
    prompt = prompt_text(task.prompt)
    start = prompt if _is_code(prompt) else ""
    defines = entry and _defines(code, entry.partition("(")[0].partition(".")[0])
    if start and not defines and not _defines(code, "Solution"):
        # The completion goes on in the middle of the function that the prompt begins.
        program = start + code
        if not _parses(program):
            program = start + _indented(code)
    else:
        program = f"{start}\n{code}"
    call = _call(entry, program)
    run = f"{tests}\n\ncheck({call})" if "def check(" in tests and entry else tests
    given = _names_defined(start) - {call.partition("(")[0]}
    names, modules = _free(run)
    names = tuple(name for name in names if name not in given)
    run = _called(run)
    _check_calls(run)
    classes = _classes(names, prompt, tests)
    whole = _hoisted(_with_imports(program))
    return FunctionTests(whole, names, (run,), helpers=modules + start, classes=classes)


def _called(test: str) -> str:
    """Add calls of functions named test..., which pytest would find."""
    found = [node for node in _body(test) if isinstance(node, ast.FunctionDef)]
    calls = [f"{f.name}()" for f in found if f.name.startswith("test") and not f.args.args]
    return "\n".join([test, *calls])


def _check_calls(tests: str) -> None:
    """Refuse tests whose asserts are in functions that nothing calls: every program would pass."""
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    rest = [node for node in _body(tests) if not isinstance(node, defined)]
    acts = (ast.Assert, ast.Raise, ast.Call)
    if not any(isinstance(node, acts) for top in rest for node in ast.walk(top)):
        raise Untestable("its tests are in functions that nothing calls: name entry_point")


def _body(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError) as error:
        raise Untestable(f"its tests are no Python: {error}") from None


def _paired(given: Mapping[str, Any], entry: str, code: str) -> FunctionTests | InputOutput:
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise Untestable("its inputs and outputs are no lists")
    if len(inputs) != len(outputs):
        raise Untestable(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
    if not entry:
        return InputOutput(code, tuple(map(_texts, inputs, outputs)))
    call = _call(entry, code)
    # APPS puts every result into a list of its own; elsewhere a list of one is what it is.
    boxed = not given.get("lines") and all(isinstance(o, list) and len(o) == 1 for o in outputs)
    tests = []
    for arguments, expected in zip(inputs, outputs, strict=True):
        if given.get("lines"):  # one JSON value in each line
            arguments = [_value(line) for line in str(arguments).splitlines() if line.strip()]
            expected = _value(str(expected))
        if isinstance(arguments, str):
            arguments = _value(arguments)
        written = f"**{arguments!r}" if isinstance(arguments, dict) else f"*{_listed(arguments)!r}"
        also = f" or __same__(found, {expected[0]!r})" if boxed else ""
        tests.append(f"found = {call}({written})\nassert __same__(found, {expected!r}){also}")
    return FunctionTests(
        _hoisted(_with_imports(code)), (call.partition("(")[0],), tuple(tests), helpers=NUMBERS
    )


def _call(entry: str, program: str) -> str:
    """Write the call of a function by its name, or of a method of a new Solution."""
    plain = re.fullmatch(r"\w+", entry) and not _defines(program, entry)
    return f"Solution().{entry}" if plain and _defines(program, "Solution") else entry


def _column(task: Task, *names: str) -> Any:
    places = [task.columns, task.columns.get("metadata"), task.columns.get("extra_info")]
    for place in map(_loaded, places):
        for name in names:
            if isinstance(place, Mapping) and place.get(name) is not None:
                return place[name]
    return None


def _texts(given: Any, expected: Any) -> tuple[str, str]:
    one, other = (
        "\n".join(map(str, side)) if isinstance(side, list) else str(side)
        for side in (given, expected)
    )
    return one, other


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _listed(arguments: Any) -> list[Any]:
    return arguments if isinstance(arguments, list) else [arguments]


def _free(source: str) -> tuple[tuple[str, ...], str]:
    """Return names that tests use and do not define, which are the program's; and missing imports.

    `math.isclose` is Python's, whatever the program calls math. Where no other name is left, the
    program is to define one that Python has too: `assert sum(3) == 6`.
    """
    tree = ast.Module(_body(source), [])
    if not any(isinstance(node, (ast.Assert, ast.Raise)) for node in ast.walk(tree)):
        raise Untestable("its tests assert nothing")
    used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    found = [name for name in dict.fromkeys(used) if name not in _names_in(tree)]
    bases = {
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    modules = [name for name in found if name in bases and name in sys.stdlib_module_names]
    rest = [name for name in found if name not in modules]
    own = [name for name in rest if not hasattr(builtins, name)]
    return tuple(own or rest), "".join(f"import {name}\n" for name in modules)


def _classes(names: Sequence[str], prompt: str, tests: str) -> tuple[str, ...]:
    """Return names that the texts call classes, or spell so and call no function."""
    functions = re.search(r"\bfunction\b", prompt) and not re.search(r"\bclass\b", prompt)
    spelled = [name for name in names if re.fullmatch(r"[A-Z][A-Za-z0-9]*", name)]
    called = [
        name for name in names if re.search(rf"\bclass\s+[`'\"]?{name}\b", f"{prompt}\n{tests}")
    ]
    return tuple(dict.fromkeys([*called, *([] if functions else spelled)]))


def _names_in(tree: ast.AST) -> set[str]:
    """Return every name that is given a value somewhere within."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
    return found


def _names_defined(source: str) -> set[str]:
    return _names_in(ast.parse(source)) if source else set()


def _is_code(prompt: str) -> bool:
    """Return whether a prompt is the beginning of a program; 'Sort' would be Python, too."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    return _parses(prompt) and any(isinstance(node, kinds) for node in ast.parse(prompt).body)


def _parses(source: str) -> bool:
    try:
        return bool(ast.parse(source).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _defines(code: str, name: str) -> bool:
    """Return whether a program defines a name, even if it has a mistake elsewhere."""
    pattern = rf"^(?:async\s+def|def|class)\s+{re.escape(name)}\b|^{re.escape(name)}\s*="
    return bool(re.search(pattern, code, re.MULTILINE))


def _indented(code: str) -> str:
    """Return the body of a function, up to where something else begins."""
    kept: list[str] = []
    for line in code.split("\n"):
        if kept and line.strip() and not line[0].isspace():
            break
        kept.append(line)
    return "\n".join(kept) + "\n"


def _with_imports(code: str) -> str:
    """Add the imports that LeetCode's own judge makes for a class Solution."""
    return LEETCODE + code if _defines(code, "Solution") else code


def _hoisted(code: str) -> str:
    """Move `from __future__` to the front, where it has to be."""
    lines = code.split("\n")  # not at every character that ends a line elsewhere
    first = [line for line in lines if line.startswith("from __future__ import")]
    rest = [line for line in lines if not line.startswith("from __future__ import")]
    return "\n".join([*first, *rest]) + "\n"
