"""The reward `code`: rows of every form, and programs that want the reward without the work."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading

import pytest

from groupwise.errors import RewardError
from groupwise.graders import program_tests
from groupwise.graders.code import code, extract, same_output
from groupwise.graders.parts import SampleToGrade, built_in
from groupwise.graders.rubric import Grader, check
from groupwise.records import Task

ASSERTS = {"tests": ["assert double(2) == 4", "assert double('ab') == 'abab'"]}
RIGHT = "def double(x): return x * 2"
FENCED = "Sure!\n```python\n{}\n```\nDone."


@pytest.fixture(scope="module")
def part():
    return code((), seconds=5)


def graded(part, columns, program, prompt="Write it.", answer=None):
    (mark,) = part.grade([SampleToGrade(Task(0, prompt, answer, columns), program, (), "eos")])
    assert mark.status == "ok", mark
    return mark.value, mark.reason


# What a completion holds.


@pytest.mark.parametrize(
    "text, program",
    [
        ("a = 1", "a = 1"),
        ("x\n```python\na = 1\n```\ny\n```py\nb = 2\n```\nz", "b = 2\n"),
        ("```python\na = 1\n```\nIt prints\n```text\n1\n```", "a = 1\n"),
        ("```\na = 1\n```", "a = 1\n"),
        ("```python\na = 1", "a = 1"),
        ("```python\na = 1\n```\nand\n```python\nb = ", "a = 1\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("<think>```python\na = 1\n```</think>```python\nb = 2\n```", "b = 2\n"),
        ("<think>```python\na = 1\n```", ""),
        ("    return 1<eos>", "    return 1"),
        ("", ""),
    ],
)
def test_the_program_in_a_completion(text, program):
    assert extract(text, ("<eos>",)) == program


def test_asserts(part):
    assert graded(part, ASSERTS, FENCED.format(RIGHT)) == (1.0, "")
    assert graded(part, ASSERTS, "def double(x): return x + x") == (1.0, "")
    value, why = graded(part, ASSERTS, "def double(x): return 4")
    assert value == 0.0 and why.startswith("1 of 2 tests")
    assert graded(part, ASSERTS, "I can't.")[0] == 0.0
    assert graded(part, ASSERTS, "")[1] == "no program"
    assert "NameError" in graded(part, ASSERTS, "def dble(x): return x * 2")[1]
    assert "SyntaxError" in graded(part, ASSERTS, "def double(x) return x")[1]
    assert "ZeroDivisionError" in graded(part, ASSERTS, RIGHT + "\n1 / 0")[1]
    assert "ended before" in graded(part, ASSERTS, RIGHT + "\nimport os; os._exit(0)")[1]
    assert "did not end" in graded(code((), seconds=0.5), ASSERTS, "while True: pass")[1]


def test_why_a_program_failed_is_in_its_grade(part):
    """And so in the rollouts; without what is another text in every run."""
    task = Task(0, "Write it.", None, ASSERTS)
    grader = Grader({"code(seconds=5)": 1.0, "length(target=10)": 0.1})
    wrong = "def double(x): raise ValueError(object())"
    good, bad = grader.grade([(task, text, (1, 2), "eos") for text in (RIGHT, wrong)])
    assert (good.status, good.reason, bad.status) == ("ok", "", "ok")
    assert bad.reason.startswith("0 of 2 tests") and "object at 0x...>" in bad.reason


def test_the_share_of_tests_passed():
    half = code((), partial=True, seconds=5)
    assert graded(half, ASSERTS, "def double(x): return 4")[0] == 0.5
    assert graded(half, ASSERTS, RIGHT)[0] == 1.0
    check = {
        "tests": "def check(candidate):\n  for i in range(4):\n    assert candidate(i) == i\n",
        "entry_point": "f",
    }
    assert graded(half, check, "def f(i): return i") == (1.0, "")
    assert graded(half, check, "def f(i): return i if i < 3 else 0")[0] == 0.0  # one statement
    assert graded(half, check, "def f(i): return {}[i]")[0] == 0.0
    pairs = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "4", "9", "16"]}
    assert graded(half, pairs, "print(int(input()) * 2)")[0] == 0.25


def test_a_function_to_be_completed(part):
    prompt = 'def add(a, b):\n    """ Adds. """\n'
    row = {
        "tests": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
        "entry_point": "add",
    }
    for program in (
        "    return a + b\n",
        "    return a + b\n\nprint('and then it went on\n",
        "```python\n    return a + b\n```",
        "```python\ndef add(a, b):\n    return a + b\n```",
        "from __future__ import annotations\ndef add(a: X, b): return a + b",
    ):
        assert graded(part, row, program, prompt) == (1.0, ""), program
    assert graded(part, row, "    return a - b\n", prompt)[0] == 0.0
    assert graded(part, row, "    pass\n", prompt)[0] == 0.0


LEETCODE = """class Solution:
    def twoSum(self, nums: List[int], target: int) -> List[int]:
        seen = {}
        for i, x in enumerate(nums):
            if target - x in seen:
                return (seen[target - x], i)
            seen[x] = i
"""


@pytest.mark.parametrize(
    "row",
    [
        {
            "tests": "def check(candidate):\n"
            "    assert list(candidate(nums=[2, 7], target=9)) == [0, 1]",
            "entry_point": "Solution().twoSum",
        },
        {"tests": [{"fn_name": "twoSum", "input": [[2, 7], 9], "output": [0, 1]}]},
        {
            "tests": [{"input": {"nums": [2, 7], "target": 9}, "output": [0, 1]}],
            "fn_name": "twoSum",
        },
        {"input_output": '{"fn_name": "twoSum", "inputs": [[[2,7],9]], "outputs": [[[0,1]]]}'},
        {
            "public_test_cases": '[{"input": "[2, 7]\\n9", "output": "[0, 1]", '
            '"testtype": "functional"}]',
            "metadata": '{"func_name": "twoSum"}',
        },
    ],
)
def test_methods_of_a_solution(part, row):
    assert graded(part, row, LEETCODE) == (1.0, "")
    assert graded(part, row, LEETCODE.replace("target - x", "target + x"))[0] == 0.0


def test_changes_in_place_are_seen(part):
    row = {"tests": ["xs = [3, 1, 2]\nsort(xs)\nassert xs == [1, 2, 3]"]}
    assert graded(part, row, "def sort(xs): xs.sort()") == (1.0, "")
    assert graded(part, row, "def sort(xs): return sorted(xs)")[0] == 0.0


@pytest.mark.parametrize(
    "row",
    [
        {"inputs": ["3\n1 2 3\n"], "outputs": ["6\n"]},
        {"tests": [{"type": "stdin_stdout", "input": "3\n1 2 3\n", "output": "6"}]},
        {"input_output": '{"inputs": ["3\\n1 2 3"], "outputs": ["6"]}'},
        {"input_output": {"inputs": [["3", "1 2 3"]], "outputs": [["6"]]}},
    ],
)
def test_standard_input_and_output(part, row):
    program = "input()\nprint(sum(map(int, input().split())))"
    assert graded(part, row, program) == (1.0, "")
    value, why = graded(part, row, "print(7)")
    assert value == 0.0 and "wrong output '7" in why
    assert "exit status 3" in graded(part, row, "print(6); raise SystemExit(3)")[1]
    main = "def main():\n    input(); print(6)\nif __name__ == '__main__': main()"
    assert graded(part, row, main)[0] == 1.0


def test_tests_in_the_answer(part):
    answer = '{"inputs": ["2"], "outputs": ["4"]}'
    assert graded(part, {}, "print(int(input()) ** 2)", answer=answer) == (1.0, "")


@pytest.mark.parametrize(
    "found, expected, same",
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1  2 3", "1 2\n3", True),
        ("0.3333333333", "0.333333", True),
        ("0.34", "0.33", False),
        ("1", "2", False),
        ("", "1", False),
        ("1 1", "1", False),
        ("1e3", "1000", False),
        ("yes", "YES", False),
        ("nan", "1.0", False),
        ("3.0", "3", True),
        ("1000000008.0", "1000000007", False),
    ],
)
def test_outputs(found, expected, same):
    assert same_output(found, expected) is same


# Values between the two processes.


@pytest.mark.parametrize(
    "program, test",
    [
        ("def f(n): return n ** 99", f"assert f(7) == {7**99}"),
        ("def f(x): return (x, {x: [None, 1.5, b'a', 2j, {1, 2}]})", "assert f(1)[0] == 1"),
        ("def f(): return {(1, 2): frozenset({3})}", "assert f() == {(1, 2): frozenset({3})}"),
        ("def f(): return [1]", "assert f() != (1,)"),
        ("def f(): return float('nan')", "import math\nassert math.isnan(f())"),
        ("def f(g): return [g(i) for i in range(3)]", "assert f(lambda i: i * i) == [0, 1, 4]"),
        ("def f(kind): return isinstance('a', kind)", "assert f(str) and not f(int)"),
        ("def f(): yield from (1, 2)", "assert list(f()) == [1, 2]"),
        ("class P:\n  def __init__(self, x): self.x = x\ndef f(p): return p.x + 1",
         "p = P(1)\np.x = 5\nassert f(p) == 6 and p.x == 5"),
        ("def f(node): return node.value + node.next.value",
         "class N: pass\na, b = N(), N()\na.value, b.value, a.next = 1, 2, b\nassert f(a) == 3"),
        ("def f(x): raise ValueError('no')",
         "try:\n  f(1)\nexcept ValueError as e:\n  assert str(e) == 'no'\nelse:\n  assert False"),
        ("class Odd(Exception): pass\ndef f(): raise Odd('x')",
         "try:\n  f()\nexcept Exception as e:\n  assert repr(e) == \"Odd('x')\"\n"
         "else:\n  assert False"),
        ("from decimal import Decimal\nfrom datetime import date\n"
         "def f(): return Decimal('1.10'), date(2020, 1, 2)",
         "import decimal, datetime\n"
         "assert f() == (decimal.Decimal('1.1'), datetime.date(2020, 1, 2))"),
        ("from collections import Counter, deque, namedtuple\n"
         "def f(): return Counter('aab'), deque([1]), namedtuple('T', 'a')(1)",
         "from collections import deque\nassert f() == ({'a': 2, 'b': 1}, deque([1]), (1,))"),
        ("def sum(n): return n * 10", "assert sum(4) == 40"),
        ("def f(x): return 'ä\\ud800' + x", "assert f('😀') == 'ä\\ud800😀'"),
        ("class A:\n  def __bool__(self): raise ValueError\na = A()\ndef f(): return a",
         "assert f() is f()"),
        ("LIMIT = 5\ndef f(): return LIMIT", "assert f() == LIMIT == 5"),
        ("class S:\n  def __init__(self): self.a = []\n"
         "  def push(self, x): self.a.append(x)\n  def pop(self): return self.a.pop()",
         "s = S()\ns.push(1)\ns.push(2)\nassert s.pop() == 2\nassert s.pop() == 1"),
    ],
)  # fmt: skip
def test_values_go_over_as_they_are(part, program, test):
    assert graded(part, {"tests": [test]}, program) == (1.0, "")


# Forgeries. None of these programs knows the answer.

SECRET = "kq8-ANSWER-7f3"
TEST = {"tests": [f"assert solve(3) == {SECRET!r}", "assert solve(4) == 41"]}
FORGERIES = {
    "leaves with status 0": "import os\nos._exit(0)",
    "leaves in the call": "import os\ndef solve(n): os._exit(0)",
    "exits": "import sys\nsys.exit(0)",
    "exits at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef solve(n): pass",
    "prints": f"print({SECRET!r})\ndef solve(n): print({SECRET!r}); print('2 passed')",
    "equals everything": """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __getattr__(self, name): return self
    def __call__(self, *a): return self
def solve(n): return Yes()""",
    "a string that equals everything": """
class Yes(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def solve(n): return Yes('x')""",
    "a number that equals everything": """
class Yes(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def solve(n): return Yes(1)""",
    "patches the harness": """
import builtins, sys
class Quiet(Exception): pass
builtins.AssertionError = Quiet
for name, module in list(sys.modules.items()):
    for key in list(vars(module)):
        if key in ('same', 'examine', '_report', '_said'):
            setattr(module, key, lambda *a: {'passed': 2, 'total': 2, 'why': ''})
def solve(n): pass""",
    "writes a verdict into every descriptor": """
import json, os, struct
data = json.dumps({'passed': 2, 'total': 2, 'why': ''}).encode()
for number in range(1, 64):
    try: os.write(number, struct.pack('>I', len(data)) + data)
    except OSError: pass
def solve(n): pass""",
    "answers before it is asked": """
import json, os, struct
def frame(x):
    data = json.dumps(x).encode()
    return struct.pack('>I', len(data)) + data
os.write(5, frame(['loaded']) + frame(['value', '', 1, {}, [], []]) * 50)
def solve(n): pass""",
    "asks instead of answering": """
import json, os, struct
def frame(x):
    data = json.dumps(x).encode()
    return struct.pack('>I', len(data)) + data
def solve(n):
    os.write(5, frame(['ask', 'call', {'tuple': [{'yours': 0}]}, {}, [], []]) * 3)
    os.write(5, frame(['ask', 'getattr', {'tuple': [{'builtin': 'eval'}, '__self__']}, {}, [], []]))
""",
    "sends a value without end": """
import os, struct
def solve(n):
    os.write(5, struct.pack('>I', 2**31)); return 'x' * 10**8""",
    "sends what can't be read": """
import os, struct
def solve(n):
    data = b'[' * 100000
    os.write(5, struct.pack('>I', len(data)) + data)""",
    "looks for the tests": """
import gc, sys
def solve(n):
    frame = sys._getframe()
    seen = []
    while frame:
        seen += list(frame.f_locals.values()) + list(frame.f_globals.values())
        frame = frame.f_back
    for thing in gc.get_objects() + seen:
        try: text = repr(thing)
        except Exception: continue
        if 'ANSWER' + '-7f3' in text:
            at = text.index('ANSWER' + '-7f3')
            return text[at - 4:at + 10]""",
    "reads memory": """
import os
def solve(n):
    for pid in ['self', 1, 2, 3, os.getppid()]:
        try: return open(f'/proc/{pid}/mem', 'rb').read(100)
        except OSError: pass""",
    "defines what the tests use": """
def set(*a): return 0
import builtins
builtins.set = builtins.str = lambda *a: 0
def solve(n): return 0""",
    "has the tests make what equals everything": """
import json, os, struct
def frame(x):
    data = json.dumps(x).encode()
    os.write(5, struct.pack('>I', len(data)) + data)
def read():
    data = b''
    length = struct.unpack('>I', os.read(5, 4))[0]
    while len(data) < length: data += os.read(5, length - len(data))
    return json.loads(data)
frame(['loaded'])
FUNCTION = {'class': 6, 'name': 'function', 'library': '', 'bases': [],
            'operators': ['__call__', '__eq__'], 'hashable': True}
number = 7
while True:
    number += 1
    _, operation, args, *_ = read()
    if operation == 'getattr':
        frame(['value', '', {'mine': 7, 'of': FUNCTION}, {}, [], []])
    elif args['tuple'][0] == {'yours': 7}:
        made = {'dict': ['__eq__', {'mine': number, 'of': FUNCTION}], 'twin': -number}
        frame(['ask', 'call', {'tuple': [{'builtin': 'type'}, 'Yes', {'tuple': []}, made]},
               {}, [], []])
        frame(['ask', 'call', {'tuple': [{'yours': read()[2].get('mine', 7)}]}, {}, [], []])
        frame(['value', '', {'yours': read()[2].get('mine', 7)}, {}, [], []])
    else:
        frame(['value', '', True, {}, [], []])""",
    "answers with what ends a loop": """
import json, os, struct
def frame(x):
    data = json.dumps(x).encode()
    return struct.pack('>I', len(data)) + data
def solve(n):
    os.write(5, frame(['value', '', {}, {}, [], []]))""",
    "raises": "def solve(n): raise AssertionError()",
    "raises what ends loops": "def solve(n): raise StopIteration",
    "raises what nobody catches": "def solve(n): raise KeyboardInterrupt",
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_a_verdict_can_not_be_forged(part, name):
    value, why = graded(part, TEST, FORGERIES[name])
    assert value == 0.0 and why
    assert SECRET not in why
    assert graded(part, ASSERTS, RIGHT) == (1.0, "")


@pytest.mark.parametrize("name", FORGERIES)
def test_nor_a_part_of_it(name):
    share = code((), partial=True, seconds=5)
    assert graded(share, TEST, FORGERIES[name])[0] == 0.0


def test_helpers_of_the_prompt_are_the_tests_own(part):
    """HumanEval 32: the check uses `poly`, which stands in the prompt and can be redefined."""
    prompt = "def poly(xs, x):\n    return xs[0] + xs[1] * x\n\ndef zero(xs):\n    ''' . '''\n"
    row = {
        "tests": "def check(candidate):\n    assert abs(poly([4, 2], candidate([4, 2]))) < 1e-9",
        "entry_point": "zero",
    }
    assert graded(part, row, "    return -xs[0] / xs[1]\n", prompt) == (1.0, "")
    forged = "def poly(xs, x): return 0\ndef zero(xs): return 0"
    assert graded(part, row, forged, prompt)[0] == 0.0


def test_modules_of_python_are_the_tests_own(part):
    row = {"tests": ["assert math.isclose(half(3), 1.5)"]}
    assert graded(part, row, "def half(x): return x / 2") == (1.0, "")
    forged = "class math: isclose = lambda *a: True\ndef half(x): return 0"
    assert graded(part, row, forged)[0] == 0.0


def test_a_prompt_of_one_word_is_no_program(part):
    row = {"tests": "def check(candidate):\n    assert candidate(2) == 4", "entry_point": "double"}
    assert graded(part, row, RIGHT, "Double") == (1.0, "")


def test_what_a_result_is_compared_with_can_not_be_changed(part):
    row = {"tests": ["xs = [3, 1, 2]\nassert order(xs) == sorted(xs)"]}
    assert graded(part, row, "def order(xs): return sorted(xs)")[0] == 1.0
    assert graded(part, row, "def order(xs): xs.clear(); return []")[0] == 0.0


def test_methods_of_the_tests_can_not_be_replaced(part):
    test = (
        "class N:\n  def __init__(self, v): self.v = v\n  def same(self, o): return self.v == o.v\n"
        "assert f(N(1)).same(N(2))"
    )
    assert graded(part, {"tests": [test]}, "def f(n): n.v = 2; return n") == (1.0, "")
    forged = "def f(n): n.same = lambda o: True; return n"
    assert graded(part, {"tests": [test]}, forged)[0] == 0.0


def test_the_share_can_not_be_made_larger():
    share = code((), partial=True, seconds=5)
    given = {"tests": ["def g(x):\n  assert x == 1\n  return x\nassert f(g) == 5"]}
    assert graded(share, given, "def f(g):\n  for i in range(99): g(1)")[0] == 0.0
    lines = [f"r = c({i})\n  assert r == {i}" for i in range(4)]
    steps = {"tests": "def check(c):\n  " + "\n  ".join(lines), "entry_point": "f"}
    assert graded(share, steps, "def f(x): return x") == (1.0, "")
    assert graded(share, steps, "def f(x): return [x][x]")[0] == 0.25


def test_a_number_near_a_whole_one_is_another(part):
    row = {"tests": [{"fn_name": "f", "input": [1], "output": 1_000_000_007}]}
    assert graded(part, row, "def f(x): return 1000000007.0") == (1.0, "")
    assert graded(part, row, "def f(x): return 1000000008.0")[0] == 0.0
    row = {"tests": [{"fn_name": "f", "input": [1], "output": 1.0}]}
    assert graded(part, row, "def f(x): return 1") == (1.0, "")
    assert graded(part, row, "def f(x): return True")[0] == 0.0


def test_a_list_of_one_is_a_list_unless_all_results_are_in_one(part):
    row = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [1, 2]]}
    columns = {"input_output": row}
    assert graded(part, columns, "def f(n): return list(range(1, n + 1))") == (1.0, "")
    assert graded(part, columns, "def f(n): return 1 if n == 1 else [1, 2]")[0] == 0.0


def test_what_a_program_says_is_harmless_in_a_log(part):
    codes = "\\ud800\\x1b[2J\\x9b1m\\u202e"
    _, why = graded(part, ASSERTS, f"raise ValueError('{codes}')")
    assert why.isprintable() and why.encode()
    row = {"inputs": ["1"], "outputs": ["2"]}
    _, why = graded(part, row, f"raise ValueError('{codes[6:]}')")
    assert why.isprintable() and "x1b" in why


def test_tests_too_large_are_an_error_of_their_own(part):
    task = Task(0, "x", None, {"tests": [f"assert f({'x' * 2**25!r})"]})
    right = Task(1, "x", None, ASSERTS)
    large, other = part.grade(
        [SampleToGrade(task, RIGHT, (), "eos"), SampleToGrade(right, RIGHT, (), "eos")]
    )
    assert large.status == "error" and "too large" in large.reason
    assert other.value == 1.0


def test_tests_that_are_not_reached_prove_nothing(part):
    nothing = "def f(x=0): return []"
    for test in ("for x in f():\n  assert x == 1", "if f(1):\n  assert f(1) == 7"):
        value, why = graded(part, {"tests": [test]}, nothing)
        assert value == 0.0 and "no assert was reached" in why
    inner = "def check(c):\n  for x in c():\n    assert x == 1"
    for tests in ([inner, "check(f)"], inner + "\ncheck(f)"):
        assert graded(part, {"tests": tests}, nothing)[0] == 0.0
        assert graded(part, {"tests": tests}, "def f(): return [1]") == (1.0, "")
    pytest_way = "def test_one():\n  assert f(1) == 7\n\ndef test_two():\n  assert f(2) == 8"
    for tests in (pytest_way, [pytest_way]):
        assert graded(part, {"tests": tests}, nothing)[0] == 0.0
        assert graded(part, {"tests": tests}, "def f(x): return x + 6") == (1.0, "")


def test_a_function_of_the_tests_shows_nothing_but_its_values(part):
    row = {"tests": [f"key = {SECRET!r}\nassert f(lambda x: x + 1) == key"]}
    for attempt in (
        "g.__globals__['key']",
        "g.__code__.co_consts",
        "getattr(g, '__globals__')",
        "g.__self__",
        "g.gi_frame",
    ):
        value, why = graded(part, row, f"def f(g): return {attempt}")
        assert value == 0.0 and "not allowed" in why, attempt
    assert graded(part, {"tests": ["assert f(lambda x: x + 1) == 3"]}, "def f(g): return g(2)")[0]


# Rows that can't be tested, and how it is wired.


@pytest.mark.parametrize(
    "columns, why",
    [
        ({}, "none of the columns"),
        ({"tests": []}, "none of the columns"),
        ({"tests": ["assert f(1 =="]}, "no Python"),
        ({"tests": ["f(1)"]}, "assert nothing"),
        ({"tests": "print(f(1))"}, "assert nothing"),
        ({"tests": "def check(f):\n  assert f(1) == 1"}, "nothing calls"),
        ({"tests": ["def check(f):\n  assert f(1) == 1"]}, "nothing calls"),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, "1 inputs and 2 outputs"),
        ({"tests": [1, 2]}, "neither"),
    ],
)
def test_rows_without_tests_are_no_zeros(part, columns, why):
    task = Task(0, "x", None, columns)
    assert why in part.problem(task)
    (mark,) = part.grade([SampleToGrade(task, RIGHT, (), "eos")])
    assert mark.status == "abstained" and mark.value is None and why in mark.reason


def test_it_is_a_part_of_a_reward():
    grader = Grader({"code(partial=True)": 1.0})
    task = Task(0, "x", None, ASSERTS)
    right, half = grader.grade(
        [(task, RIGHT, (), "eos"), (task, "double = lambda x: 4", (), "eos")]
    )
    assert (right.reward, right.correct) == (1.0, True)
    assert (half.reward, half.correct) == (0.5, False)


def test_the_check_before_a_run_finds_nothing_odd():
    """The gold answer passes; an empty one and an echo of the prompt do not."""
    tasks = [Task(i, "Write double. assert double(2) == 4", RIGHT, ASSERTS) for i in range(3)]
    assert check(Grader({"code": 1.0}), tasks) == []
    with pytest.raises(RewardError, match="can't grade 1 of 4 tasks"):
        check(Grader({"code": 1.0}), [*tasks, Task(9, "x", RIGHT)])


@pytest.mark.parametrize(
    "text, why",
    [
        ("code(seconds=0)", "seconds = 0"),
        ("code(memory=1)", "memory = 1"),
        ("code(processes=0)", "processes = 0"),
        ("code(isolation='none')", "There is no isolation 'none'"),
        ("code(python='/no/such/python')", "is no program"),
        ("code(colour=1)", "no option 'colour'"),
    ],
)
def test_options_that_make_no_sense(text, why):
    with pytest.raises(RewardError, match=why):
        built_in(text, ())


def test_order_is_that_of_the_samples(part):
    task = Task(0, "x", None, {"inputs": ["1"], "outputs": ["1"]})
    programs = [f"import time; time.sleep({0.02 * (i % 3)}); print({i % 2})" for i in range(12)]
    marks = part.grade([SampleToGrade(task, program, (), "eos") for program in programs])
    assert [mark.value for mark in marks] == [float(i % 2) for i in range(12)]


def _from_elsewhere(send) -> None:
    send(graded(code((), seconds=5), ASSERTS, RIGHT))


def test_threads_and_forked_and_spawned_processes_can_grade(part):
    found: list[tuple[float, str]] = []
    threads = [threading.Thread(target=_from_elsewhere, args=[found.append]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(1.0, "")] * 3
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=_from_elsewhere, args=[queue.put])
        process.start()
        assert queue.get(timeout=60) == (1.0, "")
        process.join()
    assert graded(part, ASSERTS, RIGHT) == (1.0, "")


def test_a_text_of_a_program_stays_as_it_is(part):
    row = {"tests": [{"fn_name": "f", "input": [1], "output": 4}]}
    assert graded(part, row, "def f(x): return len('a\x0cb\u2028')") == (1.0, "")


def test_leetcode_names_are_there_only_for_a_solution():
    row = {"tests": [{"fn_name": "f", "input": [1], "output": 1}]}
    assert (
        "from typing"
        in program_tests.read_tests(Task(0, "", None, row), "class Solution: pass").program
    )
    assert (
        "from typing"
        not in program_tests.read_tests(Task(0, "", None, row), "def f(x): return x").program
    )


def test_another_system_is_refused_in_words():
    code = (
        "import sys\n"
        "from groupwise.graders.rubric import built_in\n"
        "from groupwise.errors import RewardError\n"
        "sys.platform = 'darwin'\n"
        "try:\n    built_in('code', ())\nexcept RewardError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Linux alone" in done.stdout
