"""Answers, the user's reward functions, weighted sums, and the check before a run."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_files import read

from groupwise.data.generators import generate
from groupwise.errors import RewardError
from groupwise.graders import functions
from groupwise.graders.answers import countdown, evaluate, final, in_format
from groupwise.graders.mathematics.amounts import matches, written
from groupwise.graders.mathematics.numbers import answer_number, gold_number, number
from groupwise.graders.rubric import Grader, check, too_many_failed
from groupwise.records import Grade, Task

# Public data sets, beside the repository where they are at all.
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
NOT_HERE = pytest.mark.skipif(
    not DATA.is_dir(), reason="no public data sets: gsm8k in ../shared/data"
)

# ---------------------------------------------------------------- numbers


def value(text: str) -> Fraction | None:
    found = answer_number(text)
    return None if found is None else found.value


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("It is 18.", 18),
        ("3 + 4 = 7", 7),
        ("<<48/2=24>>24 clips", 24),
        ("She pays $1,234.50 a year", Fraction("1234.5")),
        ("it is -3", -3),
        ("it is −3", -3),
        ("5-3", None),  # a calculation that is not done, or a range
        ("8-5 = 3", 3),
        ("-$5", -5),
        ("$-5", -5),
        ("- 5 apples", 5),  # a bullet
        ("1/3", Fraction(1, 3)),
        ("1 1/2", Fraction(3, 2)),
        (r"-\frac{1}{2}", Fraction(-1, 2)),
        (r"2\dfrac{1}{2}", Fraction(5, 2)),
        (".5", Fraction(1, 2)),
        ("so...5", 5),
        ("1.5e3", 1500),
        ("12kg", 12),
        ("H2O and x1", None),  # parts of words
        ("1/0", None),
        ("no number", None),
        ("", None),
        ("9" * 5000, None),  # noise, and more digits than int() takes
    ],
)
def test_the_last_number(text: str, wanted: Any) -> None:
    assert value(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("5 first\n#### 7\nwhich is not 8", 7),
        ("Answer: 7 apples\nThere were 9.", 7),
        ("**Answer:** 7", 7),
        ("**Final answer**: 7", 7),
        ("Answer:\n\n7\n8", 7),
        ("Answer: 3 + 4 = 7", 7),
        (r"thus \boxed{7} of 9", 7),
        (r"\boxed{\frac{7}{9}}", Fraction(7, 9)),
        (r"\boxed{1{,}000\%}", 1000),
        ("Answer: 3. No, wait.\nAnswer: 7", 7),  # the last word counts
        (r"\boxed{3} or rather #### 7", 7),
        ("#### ", None),
        (r"\boxed{7", None),  # cut off
        ("5\nAnswer: none", None),  # what is marked is the answer, even if it is nothing
    ],
)
def test_a_marked_number(text: str, wanted: Any) -> None:
    assert value(text) == wanted


@pytest.mark.parametrize(
    "hedge",
    [
        "It is 5 or 7.",
        "5, or 7",
        "7 or 5",
        "$5 or $7",
        "Answer: 5 or 7",
        "Answer: 5, 7",
        "#### 7 / maybe 5",
        r"\boxed{5 \text{ or } 7}",
        r"\boxed{5, 6, 7, 8}",
    ],
)
def test_a_hedge_scores_nothing(hedge: str) -> None:
    for gold in ("5", "7"):
        wanted = gold_number(gold)
        assert wanted is not None and number(hedge, wanted) == 0.0


def test_saying_the_same_twice_is_no_hedge() -> None:
    assert value("Answer: 7 (7.0 in all)") == 7
    assert value("There are 5 or more bags. It is 7") == 7


@pytest.mark.parametrize(
    ("gold", "text", "right"),
    [
        ("50%", "50%", True),
        ("50%", "50", True),
        ("50", "it is 50 %", True),
        ("0.5", "50%", True),
        ("50%", "1/2", True),
        ("50%", "5000%", False),
        ("50%", "0.5%", False),
        ("0.1", "1/10", True),
        ("0.3333", "1/3", False),  # exact, not near
        ("1000000", "1,000,000.00", True),
        (18, "18", True),
        (0.1, "0.1", True),
        ("72", "7 2", False),
        ("72", "172", False),
        ("72", "72.1", False),
        ("72", "-72", False),
        ("72", "720", False),
        ("72", "x72", False),
    ],
)
def test_equal_numbers(gold: Any, text: str, right: bool) -> None:
    wanted = gold_number(gold)
    assert wanted is not None and number(text, wanted) == right


@pytest.mark.parametrize(
    "gold", ["x=5", "3n", "(0, 9)", "5 or 7", "5, 7", r"3\sqrt{13}", "90^\\circ", "12:00", "", True]
)
def test_answers_that_are_no_single_number_are_not_taken_for_one(gold: Any) -> None:
    assert gold_number(gold) is None


@settings(max_examples=300, deadline=None)
@given(
    st.integers(-(10**12), 10**12),
    st.integers(0, 4),
    st.sampled_from(["{}", "It is {}.", "#### {}", "Answer: {}", r"\boxed{{{}}}", "3 so {} kg"]),
    st.booleans(),
    st.integers(-(10**12), 10**12),
)
def test_every_way_to_write_a_number_scores_and_no_other_number_does(
    units: int, places: int, sentence: str, commas: bool, other: int
) -> None:
    scaled = Fraction(units, 10**places)
    digits = f"{abs(units):0{places + 1}d}"
    whole, part = (digits[:-places], digits[-places:]) if places else (digits, "")
    whole = f"{int(whole):,}" if commas else str(int(whole))
    written = ("-" if units < 0 else "") + whole + (f".{part}" if part else "")
    text = sentence.format(written)
    fraction = gold_number(f"{scaled.numerator}/{scaled.denominator}")
    assert fraction is not None and fraction.value == scaled
    assert number(text, fraction) == 1.0
    wrong = gold_number(other)
    assert wrong is not None and number(text, wrong) == float(other == scaled)


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789.,-+/%$eE (){}\\frac=#:Answer\nor", max_size=60))
def test_no_text_breaks_the_checks(text: str) -> None:
    answer_number(text)
    gold_number(text)
    assert all(written(match).end <= len(text) for match in matches(text))
    assert countdown(text, [1, 2], 3) in (0.0, 1.0)
    assert in_format(text, "A...B...") in (0.0, 1.0)


def test_hostile_texts_take_no_time() -> None:
    blank = " " * 50_000
    texts = [
        f"answer{blank}",
        "1" + ",111" * 15_000 + "1",
        "1" * 100_000,
        "1 " * 20_000,
        "\\boxed{" * 15_000,
        f"5{blank}or{blank}7",
        "(" * 50_000,
        "<end>" * 10_000,
        f"Answer: {'1 2 ' * 20_000}= 5",
        f"Answer: {'5 and ' * 20_000}",
        f"Answer: {'5 = 5, ' * 10_000}",
        "- 5\n" * 20_000,
        f"5{' -' * 20_000}x",
        f"5{'!' * 50_000}x",
        "½" * 50_000,
        "0.3" * 20_000 + "...",
        "the total is twenty " * 5_000,
        "\\text{" * 20_000,
        "5 million " * 10_000,
        f"5{blank}and{blank}a half",
        r"\boxed{" * 9_000 + "5" + "}" * 9_000,
    ]
    start = time.process_time()
    for text in texts:
        number(final(text, ["<end>"]), gold_number("5"))  # type: ignore[arg-type]
        gold_number(text)
        countdown(text, [1], 1)
        in_format(text, "<a>...</a>...<b>...</b>")
    assert time.process_time() - start < 5.0  # a second here; hours if one of them were quadratic


# ---------------------------------------------------------------- countdown, format, exact


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("3*7+5", True),
        ("5 + 7 × 3", True),
        ("(3*7)+5 = 26", True),
        ("First 3*5=15, no.\n3*7+5", True),
        ("Answer: 3*7+5.\nIt took a while", True),
        (r"\boxed{7*3+5}", True),
        ("3*7+5=27", False),  # what it claims is not true
        ("26", False),
        ("21+5", False),  # other numbers
        ("3*7+5+0", False),
        ("3*7+5+3-3", False),  # one twice
        ("3*7", False),
        ("7**3", False),
        ("3*7+5 or 3+7", False),
        ("", False),
        ("__import__('os')", False),
        ("-(-3*7)+5", False),  # no signs
        ("(" * 120 + "3*7+5" + ")" * 120, False),
    ],
)
def test_countdown(text: str, right: bool) -> None:
    assert countdown(text, [3, 5, 7], 26) == right


def test_expressions_are_exact_and_bounded() -> None:
    assert evaluate("1/3*3") == (1, [1, 3, 3])
    assert evaluate("8/(3-8/3)") == (24, [8, 3, 8, 3])
    for text in ("1/(2-2)", "9**9**9", "1//2", "007", "1_000", "0x10", "True", "1.5", "1" * 201):
        assert evaluate(text) is None


def test_a_format_is_read_whole() -> None:
    tags = "<think>...</think> <answer>...</answer>"
    assert in_format("<think>a b</think>\n\n<answer>4</answer>", tags) == 1.0
    for text in [
        "<think>a</think><answer>4</answer>!",
        "x<think>a</think> <answer>4</answer>",
        "<think> </think> <answer>4</answer>",  # blank
        "<think>a</think> <answer>4",
        "<think>a <think> b</think> <answer>4</answer>",  # opened twice
        "<answer>4</answer> <think>a</think>",
        "",
    ]:
        assert in_format(text, tags) == 0.0
    assert in_format("<think>a</think> so 4", "<think>...</think>...") == 1.0
    assert in_format("<think>a</think>", "<think>...</think>...") == 0.0
    assert in_format("well: 4", "...: 4") == 1.0 and in_format("**b**", "**...**") == 1.0
    assert in_format("yes", "yes") == 1.0 and in_format("yes!", "yes") == 0.0


def graded(
    parts: dict[str, float], task: Task, text: str, tokens: int = 3, **options: Any
) -> Grade:
    return Grader(parts, **options).grade([(task, text, tuple(range(tokens)), "eos")])[0]


def test_exact_looks_past_end_tokens_and_thoughts() -> None:
    ends = ["<end>", "<|eot|>"]
    for text in [
        "Paris",
        " Paris \n",
        "Paris<end>",
        "Paris <|eot|><end>",
        "<think>Rome</think>Paris",
    ]:
        assert graded({"exact": 1.0}, Task(0, "?", "Paris"), text, ends=ends).reward == 1.0
    for text in ["paris", "Paris<other>", "<end>Paris!", "Paris</think>", ""]:
        assert graded({"exact": 1.0}, Task(0, "?", "Paris"), text, ends=ends).reward == 0.0


def test_length_and_format_as_parts() -> None:
    task = Task(0, "?")
    rewards = [graded({"length(target=8)": 2.0}, task, "x", tokens=n).reward for n in (0, 2, 8, 9)]
    assert rewards == [0.0, 0.5, 2.0, 2.0]
    form = {"format(pattern='<a>...</a>')": 1.0}
    assert graded(form, task, "<a>1</a><end>", ends=["<end>"]).reward == 1.0
    assert graded(form, task, "<a>1</a><end>").reward == 0.0


# ---------------------------------------------------------------- sums


def test_a_weighted_sum_by_hand() -> None:
    parts = {"number": 1.0, "format(pattern='Answer: ...')": 0.25, "length(target=10)": -0.5}
    grade = graded(parts, Task(0, "?", "7"), "Answer: 7", tokens=4)
    assert grade.reward == 1.0 + 0.25 - 0.5 * 0.4
    assert list(grade.parts.values()) == [1.0, 1.0, 0.4]  # before weights
    assert (grade.correct, grade.status, grade.reason) == (True, "ok", "")
    assert graded(parts, Task(0, "?", "7"), "Answer: 8", tokens=4).correct is False


def test_a_part_without_weight_only_watches(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def f(completion): return None\n")
    watched = {f"{tmp_path}/r.py:f": 1.0, "exact": 0.0}
    grade = graded(watched, Task(0, "?", "7"), "7")
    assert (grade.reward, grade.status, grade.correct) == (None, "abstained", True)


FUNCTIONS = """
import asyncio, math
import numpy, torch

def half(completion, answer): return 0.5
def batch(completions, level, prompts, **rest):
    return [lv / 10 + (p == "q" + c) for c, lv, p in zip(completions, level, prompts)]
def quiet(completions, **rest): return [None] * len(completions)
def odd(completion):
    if "?" in completion: return None
    return len(completion)
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("s", None)
    return {"score": float(solution_str == ground_truth), "acc": 1}
begun = []
async def slow(completion, level):
    begun.append(level)
    while len(begun) < 8: await asyncio.sleep(0.001)  # for ever, if they came one after the other
    return level
async def slow_batch(completions): return [len(c) for c in completions]
def everything(completion, prompt, answer, completion_ids, finish, level):
    assert isinstance(completion_ids, list)
    return float((completion, prompt, answer, finish, level) == ("c", "q1", "a1", "length", 1))
def array(completions): return numpy.arange(len(completions), dtype=numpy.float32)
def tensor(completions): return torch.ones(len(completions))
def scalars(completions): return [numpy.float64(1), torch.tensor(2.0), True, 4][: len(completions)]
def steps(completion): return {"reward": 1.0, "steps": [(2, 0.5), (5, -1)]}

def raises(completion): return 1 / (len(completion) - 3)
def raises_batch(completions): raise KeyError("level")
def leaves(completion): raise SystemExit(3)
async def slow_raises(completion):
    await asyncio.sleep(0)
    if completion == "bad": raise ValueError("x" * 999)
    return 1.0
async def cancels(completion): raise asyncio.CancelledError
def chats(completions): return [float(c[0]["content"] == "x") for c in completions]
def one_for_all(completions): return [1.0]
def too_many(completions): return [1.0] * 99
def scalar(completions): return 1.0
def text(completion): return "1.0"
def not_a_number(completion): return math.nan
def infinite(completion): return -math.inf
def a_list(completion): return [1.0]
def nothing_named(completion): return {"value": 1.0}
def wants_more(completion, lvel): return 1.0
def bad_steps(completion): return {"reward": 1.0, "steps": [(2, 0.5), (1, 1)]}
def far_steps(completion): return {"reward": 1.0, "steps": [(5000, 0.5)]}
def nan_steps(completion): return {"reward": 1.0, "steps": [(1, math.nan)]}
def mixed(completions): return [1.0, "x", math.nan, None][: len(completions)]

def shapeless(text, gold): return 1.0
def two_shapes(completion, completions): return 1.0
not_callable = 3
"""


@pytest.fixture(scope="module")
def function(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Functions of one file, whose process has loaded PyTorch once for all tests."""
    folder = tmp_path_factory.mktemp("functions")
    (folder / "rewards.py").write_text(FUNCTIONS)
    process = functions.workers(str(folder))
    yield lambda name: f"{folder}/rewards.py:{name}"
    process.close()


def rows(*texts: str) -> list[tuple[Task, str, tuple[int, ...], str]]:
    return [
        (Task(n, f"q{n}", f"a{n}", {"level": n, "data_source": "s"}), text, (1, 2), "length")
        for n, text in enumerate(texts)
    ]


def rewards(name: str, *texts: str) -> list[float | None]:
    return [grade.reward for grade in Grader({name: 1.0}).grade(rows(*texts))]


def test_three_signatures_by_parameter_names(function: Callable[[str], str]) -> None:
    assert rewards(function("half"), "x", "y") == [0.5, 0.5]
    assert rewards(function("batch"), "0", "x", "2") == [1.0, 0.1, 1.2]
    assert rewards(function("compute_score"), "a0", "x") == [1.0, 0.0]
    assert rewards(function("everything"), "c", "c") == [0.0, 1.0]
    assert rewards(function("odd"), "ab", "?", "abc") == [2.0, None, 3.0]


def test_functions_run_where_the_caller_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the folder that it was in before is gone, in which PyTorch would not load."""
    file = tmp_path / "rewards.py"
    file.write_text(
        "def read(completion): return float(open('bonus.txt').read())\n"
        "def same(completion): return 4.0"
    )
    for bonus in ("1.5", "2.5"):
        folder = tmp_path / bonus
        folder.mkdir()
        (folder / "bonus.txt").write_text(bonus)
        monkeypatch.chdir(folder)
        assert rewards(f"{file}:read", "x") == [float(bonus)]
        assert rewards(f"{file}:same", "x") == [4.0]
        shutil.rmtree(folder)
        assert rewards(f"{file}:same", "x") == [4.0]  # nowhere, for a function that needs no folder
    monkeypatch.chdir(tmp_path)
    file.write_text("import torch\ndef total(completion): return torch.eye(3) @ torch.ones(3)")
    assert rewards(f"{file}:total", "x") == [None]  # no number, but no crash


def test_a_function_that_goes_elsewhere_stays_there(tmp_path: Path) -> None:
    (tmp_path / "bonus.txt").write_text("1.5")
    file = tmp_path / "rewards.py"
    file.write_text(
        f"import os\nos.chdir({str(tmp_path)!r})\n"
        "def read(completion): return float(open('bonus.txt').read())"
    )
    assert rewards(f"{file}:read", "x", "y") == [1.5, 1.5]


def test_a_file_imports_what_lies_beside_it(tmp_path: Path) -> None:
    """When it is loaded and when it is called; never a module of that name of another folder."""
    parts = {}
    for folder, worth in (("a", 1.5), ("b", 2.5)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "beside.py").write_text(f"WORTH = {worth}")
        (tmp_path / folder / "late.py").write_text(f"MORE = {10 * worth}")
        (tmp_path / folder / "rewards.py").write_text(
            "import beside\ncalls = []\ndef now(completion): calls.append(1); return beside.WORTH\n"
            "def late(completion):\n    import late\n    return late.MORE\n"
            "def asked(completion): return len(calls)"
        )
    for name in ("a/rewards.py:now", "b/rewards.py:late", "b/rewards.py:now", "a/rewards.py:asked"):
        parts[f"{tmp_path}/{name}"] = 1.0
    (grade,) = Grader(parts).grade(rows("x"))
    assert list(grade.parts.values()) == [1.5, 25.0, 2.5, 1.0]


def test_what_lies_beside_it_comes_before_what_is_installed(tmp_path: Path) -> None:
    """As for a script: the process is the file's own."""
    (tmp_path / "colorsys.py").write_text("WORTH = 1.5")
    (tmp_path / "rewards.py").write_text(
        "import colorsys\ndef now(completion): return colorsys.WORTH"
    )
    assert rewards(f"{tmp_path}/rewards.py:now", "x") == [1.5]


def test_an_import_from_beside_that_changed_is_read_again(tmp_path: Path) -> None:
    """As the file itself is; and it is part of the code that a run is known by."""
    (tmp_path / "rewards.py").write_text(
        "import worth_of_it\ncalls = []\n"
        "def now(completion): calls.append(1); return worth_of_it.WORTH + len(calls)"
    )
    grader = None
    codes = set()
    for worth in (10, 20):
        (tmp_path / "worth_of_it.py").write_text(f"WORTH = {worth}")
        os.utime(tmp_path / "worth_of_it.py", (worth, worth))  # within a tick of the clock, too
        grader = Grader({f"{tmp_path}/rewards.py:now": 1.0})
        assert [g.reward for g in grader.grade(rows("x", "y"))] == [worth + 1, worth + 2]
        codes.add(grader.code())
        assert [g.reward for g in grader.grade(rows("x"))] == [worth + 3]  # nothing is loaded anew
    assert len(codes) == 2


def test_an_import_from_beside_that_is_mended_is_read_again(tmp_path: Path) -> None:
    file, beside = tmp_path / "rewards.py", tmp_path / "mended_beside.py"
    file.write_text("from mended_beside import WORTH\ndef now(completion): return WORTH")
    beside.write_text("")
    with pytest.raises(RewardError, match="line 1: ImportError: cannot import name 'WORTH'"):
        rewards(f"{file}:now", "x")
    beside.write_text("WORTH = 2.0")
    assert rewards(f"{file}:now", "x") == [2.0]


def test_async_functions_run_together(function: Callable[[str], str]) -> None:
    assert rewards(function("slow"), *"abcdefgh") == [0, 1, 2, 3, 4, 5, 6, 7]
    assert rewards(function("slow_batch"), "a", "bcd") == [1, 3]

    async def notebook() -> list[float | None]:
        return rewards(function("slow_batch"), "a", "bcd")

    assert asyncio.run(notebook()) == [1, 3]  # inside a running event loop


def test_numbers_of_array_libraries(function: Callable[[str], str]) -> None:
    assert rewards(function("array"), "a", "b", "c") == [0.0, 1.0, 2.0]
    assert rewards(function("tensor"), "a", "b") == [1.0, 1.0]
    assert rewards(function("scalars"), "a", "b", "c", "d") == [1.0, 2.0, 1.0, 4.0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "raised ZeroDivisionError: division by zero (rewards.py:"),
        ("raises_batch", "raised KeyError: 'level' (rewards.py:"),
        ("leaves", "raised SystemExit: 3"),
        ("cancels", "raised CancelledError"),
        ("chats", "Completions are strings here, not lists of messages."),
        ("one_for_all", "returned 1 values for 2 completions"),
        ("too_many", "returned 99 values for 2 completions"),
        ("scalar", "returned 1.0 (float) instead of a list"),
        ("text", "returned '1.0' (str), which is no finite number"),
        ("not_a_number", "returned nan (float)"),
        ("infinite", "returned -inf (float)"),
        ("a_list", "returned [1.0] (list)"),
        ("nothing_named", "a dict without 'reward' or 'score'"),
        ("wants_more", "asks for 'lvel', which is no column of the data. Did you mean 'level'?"),
        ("bad_steps", "steps that make no sense: the end 1 is not behind the one before, 2"),
        ("far_steps", "the end 5000 (int) is not within the text of 3 characters"),
        ("nan_steps", "the reward nan (float) is no finite number"),
    ],
)
def test_a_failing_function_leaves_no_reward(
    function: Callable[[str], str], name: str, words: str
) -> None:
    grades = Grader({function(name): 1.0, "length": 1.0}).grade(rows("bad", "bad"))
    for grade in grades:
        assert (grade.reward, grade.status) == (None, "error")
        assert words in grade.reason and grade.parts[function(name)] is None
        assert grade.parts["length"] == 0.02  # what the others said is still there
    with pytest.raises(RewardError, match="can't be used"):
        check(Grader({function(name): 1.0}), [Task(0, "pro", "ans", {"level": 1})])


def test_only_the_samples_that_fail_are_lost(function: Callable[[str], str]) -> None:
    grades = Grader({function("mixed"): 1.0}).grade(rows("a", "b", "c", "d"))
    assert [g.reward for g in grades] == [1.0, None, None, None]
    assert [g.status for g in grades] == ["ok", "error", "error", "abstained"]
    assert rewards(function("slow_raises"), "a", "bad", "c") == [1.0, None, 1.0]
    (failed,) = Grader({function("slow_raises"): 1.0}).grade(rows("bad"))
    assert len(failed.reason) < 400
    line = (
        FUNCTIONS.splitlines().index('    if completion == "bad": raise ValueError("x" * 999)') + 1
    )
    assert failed.reason.endswith(f"(rewards.py:{line})")


def test_process_rewards_become_steps(function: Callable[[str], str]) -> None:
    (grade,) = Grader({function("steps"): 0.5, "length": 1.0}).grade(rows("a b c d"))
    assert grade.steps == ((2, 0.25), (5, -0.5)) and grade.reward == 0.5 + 0.02


def test_what_says_that_an_answer_is_correct(function: Callable[[str], str]) -> None:
    task = Task(0, "?", "7", {"level": 1})

    def correct(*names: str, text: str = "7") -> bool | None:
        return graded(dict.fromkeys(names, 1.0), task, text).correct

    assert correct(function("half"), "number") is True  # a built-in part comes first
    assert correct("exact", "number", text="it is 7") is False  # the first of them
    assert correct(function("half")) is False and correct(function("odd")) is True
    assert correct("length") is None
    assert correct(function("quiet"), "length") is None  # it abstains


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shapeless", "none of the parameters"),
        ("two_shapes", "several of the parameters"),
        ("not_callable", "no function 'not_callable'"),
        ("hlaf", "Did you mean 'half'"),
    ],
)
def test_functions_that_can_not_be_called(
    function: Callable[[str], str], name: str, words: str
) -> None:
    with pytest.raises(RewardError, match=words):
        Grader({function(name): 1.0})


def test_files_that_can_not_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="There is no file"):
        Grader({f"{tmp_path}/none.py:f": 1.0})
    (tmp_path / "bad.py").write_text("x = 1\ny = undefined\n")
    with pytest.raises(RewardError, match=r"bad.py, line 2: NameError"):
        Grader({f"{tmp_path}/bad.py:f": 1.0})
    (tmp_path / "worse.py").write_text("x = 1\n\ndef f(:\n")
    with pytest.raises(RewardError, match=r"worse.py, line 3: SyntaxError"):
        Grader({f"{tmp_path}/worse.py:f": 1.0})


def test_functions_of_one_file_share_its_state(tmp_path: Path) -> None:
    source = "seen = []\ndef f(completion):\n  seen.append(1)\n  return 0\n"
    (tmp_path / "state.py").write_text(source + "def g(completion): return len(seen)\n")
    parts = {f"{tmp_path}/state.py:f": 1.0, f"{tmp_path}/state.py:g": 1.0}
    assert [g.reward for g in Grader(parts).grade(rows("a", "b"))] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, "no part with a weight"),
        ({"number": 0.0}, "no part with a weight"),
        ({"number": float("nan")}, "no number"),
        ({"number": "1"}, "no number"),
        ({"number": True}, "no number"),
        ({"numbr": 1.0}, "Did you mean 'number'"),
        ({"number(": 1.0}, "Can't read"),
        ({"length(5)": 1.0}, "Can't read"),
        ({"number; exact": 1.0}, "Can't read"),
        ({"length(targt=5)": 1.0}, "Did you mean 'target'"),
        ({"length(target=0)": 1.0}, "at least 1"),
        ({"number(x=1)": 1.0}, "It has none"),
        ({"number(ends=[])": 1.0}, "no option 'ends'"),
        ({"format(pattern='...')": 1.0}, "must be text with"),
        ({"format(pattern='a......b')": 1.0}, "must be text with"),
    ],
)
def test_parts_that_are_none(parts: Any, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        Grader(parts)


def test_answers_are_needed_where_they_are_read(function: Callable[[str], str]) -> None:
    names = {"number": True, "exact": True, "countdown": False, "length": False}
    names |= {function("half"): True, function("compute_score"): True, function("batch"): False}
    assert {name: Grader({name: 1.0}).needs_answers for name in names} == names


def test_too_many_failures_stop_the_run() -> None:
    grades = [Grade(1.0)] * 95 + [Grade(None, status="abstained")] * 5
    assert too_many_failed(grades, 0.0) is None
    failed = [Grade(None, status="error", reason="a")] * 2 + [
        Grade(None, status="timeout", reason="b")
    ]
    assert too_many_failed(grades[3:] + failed, 0.03) is None
    found = too_many_failed(grades[3:] + failed, 0.02)
    assert isinstance(found, RewardError)
    assert re.search(r"3 of 100 .*Most often: a\.", str(found))


# ---------------------------------------------------------------- the check before a run


def test_the_check_refuses_tasks_that_can_not_be_graded() -> None:
    tasks = [Task(n, f"q{n}", "7") for n in range(50)]
    assert check(Grader({"number": 1.0}), tasks) == []
    tasks[31] = Task(31, "q31", "several")
    with pytest.raises(
        RewardError, match="1 of 50 tasks: in row 31, the answer 'several' holds no"
    ):
        check(Grader({"number": 1.0}), tasks)
    with pytest.raises(RewardError, match="row 0, it has no columns numbers"):
        check(Grader({"countdown": 1.0}), tasks)
    with pytest.raises(RewardError, match="no text"):
        check(Grader({"exact": 1.0}), [Task(0, "q")])
    with pytest.raises(RewardError, match="no tasks"):
        check(Grader({"exact": 1.0}), [])


def test_the_check_notes_what_a_model_could_exploit(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def kind(completion): return 1.0\n"
        "def harsh(completion, answer): return 0.0\n"
        "def echo(completion, prompt, answer): return float(answer in completion)\n"
        "def sound(completion, answer): return float(completion == answer)\n"
    )
    tasks = [Task(n, f"Is it {n} or 7?", "7") for n in range(9)]

    def notes(name: str) -> list[str]:
        return [n.rpartition(":")[0] or n for n in _notes(name)]

    def _notes(name: str) -> list[str]:
        found = check(Grader({f"{tmp_path}/r.py:{name}": 1.0}), tasks)
        return [note.replace(f"{tmp_path}/r.py:", "") for note in found]

    assert notes("sound") == []
    assert notes("harsh") == ["harsh gives the gold answer 0, no more than nothing."]
    assert notes("echo") == ["echo gives an echo of the prompt 1"]
    assert notes("kind") == [
        "kind gives the gold answer 1, no more than nothing.",
        "kind gives an empty answer 1",
        "kind gives an echo of the prompt 1",
    ]
    # "Is it 0 or 7?" ends on a hedge, "1+2=" on another number: the built-in part is not fooled.
    assert check(Grader({"number": 1.0}), tasks[:7] + tasks[8:]) == []


def test_the_check_gives_token_ids_where_it_can() -> None:
    task = [Task(0, "q", "7")]
    assert check(Grader({"length": 1.0}), task) == []
    noted = check(Grader({"length": 1.0}), task, encode=lambda text: [1] * 5)
    assert "length gives an empty answer 0.05" in noted[0]


@pytest.mark.parametrize(("name", "part"), [("arithmetic", "number"), ("countdown", "countdown")])
def test_generated_tasks_accept_their_own_solutions(name: str, part: str) -> None:
    tasks, grader = generate(name, 500, 0, {}), Grader({part: 1.0})
    assert check(grader, tasks) == []
    gold = grader.grade([(t, t.columns["solution"], (), "eos") for t in tasks])
    assert all(grade.reward == 1.0 and grade.correct for grade in gold)
    other = [(t, tasks[n - 1].columns["solution"], (), "eos") for n, t in enumerate(tasks)]
    assert sum(bool(grade.correct) for grade in grader.grade(other)) < 50


# ---------------------------------------------------------------- real data


@NOT_HERE
def test_gold_answers_of_gsm8k_score() -> None:
    grader = Grader({"number": 1.0})
    for name in ("train", "test"):
        tasks = read(DATA / f"gsm8k/{name}.jsonl.gz", require_answers=True).tasks
        for texts in ([t.answer for t in tasks], [t.columns["solution"] for t in tasks]):
            samples = [(t, text, (), "eos") for t, text in zip(tasks, texts, strict=True)]
            assert all(grade.reward == 1.0 for grade in grader.grade(samples))
        assert check(grader, tasks) == []


@NOT_HERE
def test_labelled_solutions_of_gsm8k_are_judged_as_their_authors_did() -> None:
    with gzip.open(DATA / "grader_pairs/gsm8k_solutions.jsonl.gz", "rt") as file:
        pairs = [json.loads(line) for line in file]
    agreed = [pair for pair in pairs if pair["label_agrees_numeric"]]
    assert len(agreed) > 2_500
    for pair in agreed:
        gold = gold_number(pair["gold"])
        assert gold is not None and number(final(pair["pred"]), gold) == pair["expected"]


@NOT_HERE
def test_gold_answers_of_countdown_score() -> None:
    tasks = read(DATA / "countdown/test.jsonl.gz").tasks
    grades = Grader({"countdown": 1.0}).grade([(t, t.answer, (), "eos") for t in tasks])
    assert tasks and all(grade.reward == 1.0 for grade in grades)


def test_the_last_numbers_are_found_from_the_end_as_from_the_start() -> None:
    """Searched for in the tail alone, where it has two: the same as in all numbers of the text."""
    dice = random.Random(0)
    from groupwise.graders.mathematics import numbers

    pieces = ["12", "3.5", " ", "1 1/2", "e", "E5", "$", "-", "+", "x", "or", ",", "1,000", "%",
              "/", "\n", " is ", "²", "7e3", ".5", "é", "the total of these "]  # fmt: skip
    for _ in range(3000):
        text = "".join(dice.choice(pieces) for _ in range(dice.randrange(120)))
        every = [written(match) for match in matches(text)]
        last = [written(match) for match in numbers._last_two(text)]
        assert last == every[-2:], text


# What a text denies, compares with, or goes on from is not the number that it gives.
TAKEN_BACK = [
    ("1.000.000", "1"), ("1.5.2", "1.5"), ("5²", "5"), ("√4", "4"), (r"\boxed{\sqrt{2}}", "2"),
    (r"\boxed{\sqrt[3]{8}}", "8"), ("0x10", "0"), ("1e400", "1"), ("1e400", "1e401"), ("2^3", "3"),
    ("2**3", "3"),
    ("x ≠ 4", "4"), ("4 != 5", "5"), ("x > 4", "4"), ("x>=4", "4"), (r"\boxed{x \geq 4}", "4"),
    ("It is not 4", "4"), ("It isn't 4.", "4"), ("4 (not 5)", "5"), ("It cannot be 4", "4"),
    ("Answer: not 4", "4"), ("12,34", "34"), ("–4", "4"), (r"\boxed{4\pi}", "4"), ("4π", "4"),
    (r"\boxed{3} or \boxed{4}", "4"), ("x=4 or x=5", "5"), (r"\boxed{x=4, x=5}", "5"),
    (r"\boxed{x=4 \text{ or } x=5}", "5"),
]  # fmt: skip


@pytest.mark.parametrize("part", ["number", "math"])
@pytest.mark.parametrize(("text", "gold"), TAKEN_BACK)
def test_a_number_that_is_taken_back_is_no_answer(part: str, text: str, gold: str) -> None:
    (grade,) = Grader({part: 1.0}).grade([(Task(0, "How many?", gold), text, (), "eos")])
    assert grade.reward in (0.0, None)  # None: such a gold answer is no number


@pytest.mark.parametrize("part", ["number", "math"])
@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("<b>4</b>", "4"), ("It is **4**.", "4"), ("So it's **$4**", "4"),
        ("a * **4**", "4"), ("So x -> 4", "4"), ("–4", "-4"),
        ("It is 4, which is not 5 less: 4", "4"),
        ("Answer: 7, because 3 + 4 = 7", "7"), (r"\boxed{x = 2 + 3 = 5}", "5"),
        ("4.", "4"), ("It is 4...", "4"), ("4!", "4"), ("=> 4", "4"), ("> 4", "4"),
    ],
)  # fmt: skip
def test_a_number_that_stands_is_one(part: str, text: str, gold: str) -> None:
    if (part, text) == ("math", "4!"):
        return  # 24
    (grade,) = Grader({part: 1.0}).grade([(Task(0, "How many?", gold), text, (), "eos")])
    assert grade.reward == 1.0


def test_a_gold_answer_that_is_only_the_start_of_a_number_is_none() -> None:
    assert gold_number("1.000.000") is None and gold_number("5²") is None
    assert gold_number("1,000,000") is not None
