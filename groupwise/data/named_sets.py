"""Well-known data sets by name, from a file: `gsm8k:PATH`.

A set is a function from a row, in the columns of its authors or of a common copy, to a row with
`prompt` and `answer`. What a program is tested with goes along as columns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from groupwise.data.columns import MISSING, VERL_ANSWER, lookup
from groupwise.data.tasks import BadRow, Convert

DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'
AIME_ANSWER = re.compile(r"(\d{1,3})(?:\^\{?\\circ\}?|°)?")  # one copy has an angle in degrees
BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(?P<open>\{)|(?P<bare>[^\s${}]+))")


def gsm8k(row: Mapping[str, Any]) -> dict[str, Any]:
    """Take the number behind `####`, without commas; `solution` is all of the original answer."""
    prompt, answer = _one(row, "prompt", "question"), _text(row, "answer")
    if "####" in answer:
        row = {"solution": answer, **row}
        answer = answer.rpartition("####")[2]
    return {**row, "prompt": prompt, "answer": answer.strip().replace(",", "")}


def math(row: Mapping[str, Any]) -> dict[str, Any]:
    """Take the contents of the solution's last box, unless there is an answer already."""
    prompt = _one(row, "prompt", "problem", "question")
    if row.get("answer") is None:
        answer = boxed(_text(row, "solution"))
        if answer is None:
            raise BadRow("'solution' has no \\boxed{}")
        row = {**row, "answer": answer}
    return {**row, "prompt": prompt}


def aime(row: Mapping[str, Any]) -> dict[str, Any]:
    """Read a problem of any year, and its whole number. Copies spell columns as they like."""
    plain = {key.lower(): value for key, value in row.items()}
    given = lookup(row, VERL_ANSWER)
    answer = plain.get("answer") if given is MISSING else given
    number = AIME_ANSWER.fullmatch(str(answer).strip())
    if number is None:
        raise BadRow(f"the answer {answer!r} is no whole number from 0 to 999")
    prompt = dapo17k(row)["prompt"]
    if not isinstance(prompt, str):
        prompt = _one(plain, "problem", "question")
    own = {key: value for key, value in row.items() if key.lower() != "answer"}
    return {**own, "prompt": prompt, "answer": str(int(number[1]))}


def dapo17k(row: Mapping[str, Any]) -> dict[str, Any]:
    """Take the bare problem: the words around it are the template's matter."""
    prompt, answer = row.get("prompt"), row.get("answer")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], dict):
        prompt = prompt[0].get("content")
    if isinstance(prompt, str):
        prompt = prompt.removeprefix(DAPO_HEAD).removesuffix(DAPO_TAIL)
    if answer is None and (found := lookup(row, VERL_ANSWER)) is not MISSING:
        answer = found
    return {**row, "prompt": prompt, "answer": answer}


def countdown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Read the columns `numbers` and `target`, for the reward `countdown`; no answer needed."""
    given = lookup(row, VERL_ANSWER)
    given = {**given, **row} if isinstance(given, dict) else row
    numbers, target = given.get("numbers", given.get("nums")), given.get("target")
    whole = isinstance(numbers, list) and all(type(x) is int for x in [*numbers, target])
    if not whole:
        raise BadRow("'nums' (a list) and 'target' are no whole numbers")
    prompt = row.get("prompt")
    if not isinstance(prompt, str):
        prompt = (
            f"Using the numbers {numbers}, create an equation that equals {target}. You can use "
            "basic arithmetic operations (+, -, *, /) and each number can only be used once."
        )
    return {**row, "numbers": numbers, "target": target, "prompt": prompt}


def mbpp(row: Mapping[str, Any]) -> dict[str, Any]:
    """Put the tests into the prompt, as in the paper: only they tell the function's name.

    Columns: `tests` (a list of asserts) and `test_setup` (what runs before them).
    """
    tests = row.get("tests", row.get("test_list"))
    if not isinstance(tests, list) or not tests or not all(isinstance(x, str) for x in tests):
        raise BadRow("'tests' is no list of asserts")
    setup = row.get("test_setup", row.get("test_setup_code"))
    if setup is None:
        setup = "\n".join(row.get("test_imports") or [])
    task = _one(row, "prompt", "text")
    shown = "\n".join(tests)
    return {
        **row,
        "tests": tests,
        "test_setup": setup,
        "prompt": f"{task}\nYour code should pass these tests:\n\n{shown}\n",
        "answer": _one(row, "answer", "code"),
    }


def humaneval(row: Mapping[str, Any]) -> dict[str, Any]:
    """Ask to complete a function. Columns: `tests` (it defines `check`) and `entry_point`."""
    entry = _text(row, "entry_point")
    if not re.search(rf"def {re.escape(entry)}\b", _text(row, "prompt")):
        raise BadRow(f"'prompt' does not define {entry!r}, the 'entry_point'")
    tests = _one(row, "tests", "test")
    return {**row, "tests": tests, "answer": _one(row, "answer", "canonical_solution")}


def reasoning_gym(row: Mapping[str, Any]) -> dict[str, Any]:
    """Read a task as that package makes them. Its scorer reads `metadata`, which names the task,
    and `task_options`, which it was made with.
    """
    metadata, options = (_table(row, name) for name in ("metadata", "task_options"))
    if not isinstance(metadata.get("source_dataset"), str):
        raise BadRow("'metadata' does not say in 'source_dataset' which task it is")
    own = {"task": metadata["source_dataset"], "task_options": options, "metadata": metadata}
    return {**row, "prompt": _one(row, "prompt", "question"), **own}


SETS: dict[str, Convert] = {
    "gsm8k": gsm8k,
    "math": math,
    "aime": aime,
    "dapo17k": dapo17k,
    "countdown": countdown,
    "mbpp": mbpp,
    "humaneval": humaneval,
    "reasoning_gym": reasoning_gym,
}
# The grader that fits, for the part `row` of the reward.
GRADERS = {
    "gsm8k": "number",
    "math": "math",
    "aime": "number",
    "dapo17k": "number",  # all of its answers are whole numbers
    "countdown": "countdown",
    "mbpp": "code",
    "humaneval": "code",
    "reasoning_gym": "reasoning_gym",
}


def boxed(solution: str) -> str | None:
    """Return the contents of the last \\boxed{} or \\fbox{}, with inner braces; else None."""
    boxes = list(BOX.finditer(solution))
    if not boxes:
        return None
    if boxes[-1]["bare"]:  # \boxed 5
        return boxes[-1]["bare"]
    start, depth = boxes[-1].end(), 1
    for at in range(start, len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[at], 0)
        if depth == 0:
            return solution[start:at].strip()
    return None


def _table(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Read a column of keys and values, or of their JSON: Parquet columns have one shape."""
    given = row.get(name)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise BadRow(f"{name!r} is no JSON") from None
    if given is not None and not isinstance(given, Mapping):
        raise BadRow(f"{name!r} is no table")
    return given or {}


def _one(row: Mapping[str, Any], *names: str) -> str:
    """Return the text in the first of these columns that exists."""
    return _text(row, next((name for name in names if name in row), names[0]))


def _text(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        raise BadRow(f"no column {name!r}")
    if not isinstance(row[name], str):
        raise BadRow(f"{name!r} is no text")
    return row[name]
