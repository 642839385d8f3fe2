"""The reward of a program: it runs in isolation and passes its tests.

A program that fails, crashes, runs too long or attacks its surroundings is graded 0, with the
reason. An error is only what is not the program's fault: a broken sandbox.
"""

from __future__ import annotations

import decimal
import functools
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.engine.stopping import without_ends
from groupwise.errors import RewardError
from groupwise.graders.parts import Mark, SampleToGrade
from groupwise.graders.program_tests import FunctionTests, InputOutput, Untestable, read_tests
from groupwise.graders.sandbox.isolation import SandboxError
from groupwise.graders.sandbox.limits import Limits
from groupwise.graders.sandbox.pool import SandboxPool
from groupwise.graders.sandbox.worker import Examined, Sandbox
from groupwise.records import Task

FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*$", re.MULTILINE)
PYTHON = ("", "python", "py", "python3", "py3")
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")  # of an object, another one in every run
MAX_CODE = 200_000  # characters


def extract(text: str, ends: Sequence[str] = ()) -> str:
    """Return the last fenced block of Python after the thoughts; all of the text if none is fenced.

    White space in front stays: a completion may go on inside a function. A block that the end of
    the text cuts off counts if there is no other. Thoughts that do not end hold no program.
    """
    text = without_ends(text, ends).rpartition("</think>")[2]
    if "<think>" in text:
        return ""
    closed, last, opened = [], "", None
    for fence in FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[1].startswith(opened[1]) and not fence[2]:
            closed.append((opened[2].lower(), text[opened.end() + 1 : fence.start()]))
            opened = None
    if opened is not None:
        last = text[opened.end() + 1 :]
    ours = [body for tag, body in closed if tag in PYTHON] or [body for _, body in closed]
    return ours[-1] if ours else last or ("" if opened else text)


@dataclass(frozen=True)
class Code:
    """The part `code` of a reward."""

    ends: Sequence[str]
    limits: Limits
    partial: bool
    isolation: str
    python: str
    decides: bool = True
    needs_answers: bool = False

    def problem(self, task: Task) -> str:
        try:
            read_tests(task, "")
        except Untestable as error:
            return str(error)
        return ""

    def grade(self, samples: Sequence[SampleToGrade]) -> list[Mark]:
        pool = shared_pool(self.isolation, self.python, os.getpid())
        return pool.map(self._mark, samples, lambda error: Mark(status="error", reason=str(error)))

    def _mark(self, worker: Sandbox, sample: SampleToGrade) -> Mark:
        code = extract(sample.text, self.ends)
        if not code.strip():
            return Mark(0.0, reason="no program")
        if len(code) > MAX_CODE:
            return Mark(0.0, reason=f"a program of more than {MAX_CODE} characters")
        try:
            test = read_tests(sample.task, code.replace("\0", ""))
        except Untestable as error:
            return Mark(status="abstained", reason=str(error))
        found = examine(worker, test, self.limits, self.partial)
        share = found.passed / found.total if found.total else 0.0
        value = share if self.partial else float(found.total > 0 and found.passed == found.total)
        return Mark(value, reason=_reason(found))


def examine(
    worker: Sandbox, test: FunctionTests | InputOutput, limits: Limits, to_the_end: bool
) -> Examined:
    """Count the tests that a program passes; with `to_the_end` all of them are tried."""
    if isinstance(test, InputOutput):
        return _compare(worker, test, limits, to_the_end)
    job = {
        "helpers": test.helpers,
        "names": list(test.names),
        "classes": list(test.classes),
        "setup": test.setup,
        "tests": list(test.tests),
        "to_the_end": to_the_end,
    }
    return worker.examine(test.program, job, limits)


def _compare(worker: Sandbox, test: InputOutput, limits: Limits, to_the_end: bool) -> Examined:
    """Compare outputs outside: expected ones never enter the sandbox."""
    passed, why, timed_out = 0, "", False
    for number, (given, expected) in enumerate(test.pairs, 1):
        ran = worker.script(test.program, given, limits)
        timed_out = ran.timed_out
        if not ran.why and same_output(ran.output, expected):
            passed += 1
            continue
        why = why or f"test {number}: {ran.why or f'wrong output {ran.output[:80]!r}'}"
        if timed_out or not to_the_end:
            break
    return Examined(passed, len(test.pairs), why, timed_out)


def same_output(found: str, expected: str) -> bool:
    """Return whether two outputs agree word by word; a number with a point to six digits."""
    words, wanted = found.split(), expected.split()
    return len(words) == len(wanted) and all(map(_same_word, words, wanted))


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if ("." not in wanted and "." not in word) or len(word) > 40:
        return False
    try:
        if "." not in wanted:  # 3.0 will do for 3, but nothing near it
            return decimal.Decimal(word) == decimal.Decimal(wanted)
        return math.isclose(float(word), float(wanted), rel_tol=1e-6, abs_tol=1e-6)
    except (ValueError, decimal.InvalidOperation):
        return False


def _reason(found: Examined) -> str:
    if found.passed == found.total:
        return ""
    why = ADDRESS.sub("0x...", found.why)  # equal runs have equal rollouts
    return f"{found.passed} of {found.total} tests: {printable(why)}"


def printable(text: str) -> str:
    """Return a program's words for logs and terminals, without control codes and halves of
    characters.
    """
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text
    )


@functools.lru_cache(maxsize=4)
def shared_pool(isolation: str, python: str, process: int) -> SandboxPool:
    """Return the pool that all parts of a process share; a forked process gets a new one."""
    return SandboxPool(isolation, python)


def code(
    ends: Sequence[str],
    *,
    partial: bool = False,
    seconds: float = Limits.seconds,
    memory: int = Limits.memory,
    processes: int = Limits.processes,
    disk: int = Limits.disk,
    output: int = Limits.output,
    isolation: str = "",
    python: str = "",
) -> Code:
    """Give 1 if the program of a completion passes all its tests; with `partial`, the share it
    passes.

    Refuses to be made where programs can't be isolated.
    """
    limits = Limits(seconds, memory, processes, disk, output)
    try:
        pool = shared_pool(isolation, python, os.getpid())
    except SandboxError as error:
        raise RewardError(f"The reward code can't be used. {error}") from error
    if processes > 1 and pool.wall == "landlock":
        raise RewardError(
            "code: processes > 1 needs a process namespace, and this machine offers Landlock "
            "alone. Install bubblewrap and allow user namespaces, or leave processes at 1."
        )
    return Code(tuple(ends), limits, partial, isolation, python)
