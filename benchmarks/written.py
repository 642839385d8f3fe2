"""Does the reward `code` judge the programs that models write as plain Python does?

    python benchmarks/written.py rows DATA ROWS.jsonl
    python benchmarks/written.py write MODEL OUT.jsonl (--data DATA | --rows ROWS.jsonl)
    python benchmarks/written.py judge OUT.jsonl --data DATA

DATA has humaneval/ and mbpp/. `write` lets a model answer their rows, on a machine that needs no
more of them than ROWS.jsonl. `judge` asks the grader, as a run does, and an interpreter that runs
program and tests as one module, without isolation: do it where nothing can be lost. It lists where
the two differ, and exits with 1 if the grader accepted a wrong program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from programs import tasks

from groupwise.config import load
from groupwise.engine.protocol import Request
from groupwise.graders.code import extract
from groupwise.graders.rubric import Grader
from groupwise.graders.sandbox.isolation import ENVIRONMENT, interpreter
from groupwise.model.layers.equip import equip
from groupwise.model.policy import load_policy
from groupwise.prepare.engines import judge_of
from groupwise.prepare.placing import check_device, place_line, placed
from groupwise.prepare.setup import sampling_of, with_ids
from groupwise.records import Completion, Grade, Task

SETS = ("mbpp", "humaneval")
ASKED = {
    "mbpp": "{prompt}\nAnswer with one block of Python code that holds the whole function.",
    "humaneval": "Complete this Python function. Answer with one block of Python code that holds "
    "the whole function.\n\n```python\n{prompt}```",
}
SECONDS = 20  # for program and tests in plain Python: twice the limit of the grader
# Of memory eight times the grader's, and as much of a file: it is not to take all of the machine.
LIMITS = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30,) * 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 2**20,) * 2)
"""
OVERTIME = "did not end within"  # how the grader says so
REPEATS = 2  # of plain Python, where the two differ: not every program does the same twice

Row = dict[str, Any]


# --- what is asked ----------------------------------------------------------------------------


def by_name(data: Path) -> dict[tuple[str, str], Task]:
    """Return the tasks of both data sets as a run has them, by set and row."""
    return {(n, str(t.columns["task_id"])): t for n in SETS for t in tasks(data / n)}


def asked(data: Path) -> list[Row]:
    """Return what a model is asked, row by row; of MBPP's tests it sees the first alone."""
    found = []
    for (name, row), task in by_name(data).items():
        prompt = str(task.prompt)
        if name == "mbpp":
            tests = task.columns["tests"]
            prompt = prompt.replace("\n".join(tests), tests[0])
        found.append({"set": name, "row": row, "prompt": ASKED[name].replace("{prompt}", prompt)})
    return found


def rows(given: argparse.Namespace) -> int:
    found = asked(given.data)
    given.out.write_text("".join(f"{json.dumps(row)}\n" for row in found))
    print(f"{len(found)} rows in {given.out}")
    return 0


# --- what is written --------------------------------------------------------------------------


def write(given: argparse.Namespace) -> int:
    """Sample all programs in one go; those of a row are on disk as soon as they are written."""
    todo = (lines(given.rows) if given.rows else asked(given.data))[:: given.every]
    settings = {
        "model.path": str(given.model),
        "model.device": given.device,
        "model.dtype": given.dtype,
        "engine.max_tokens": given.max_tokens,
        "data.template": "chat",
    }
    wanted = load(**settings)
    config = placed(wanted)
    check_device(config.model.device)
    print(place_line(config.model, wanted.model), flush=True)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    loaded = load_policy(given.model, dtype, config.model.device)
    notes = equip(loaded.model, exact=False)
    tokenizer = loaded.tokenizer
    questions = [Task(number, row["prompt"]) for number, row in enumerate(todo)]
    prepared = with_ids(config, questions, tokenizer, loaded.model.config)
    for note in [*notes, *prepared.notes]:
        print(note, flush=True)
    ends = [tokenizer.decode([number]) for number in tokenizer.eos_ids]
    requests = [Request(t.token_ids, given.samples, t.id, draw=0) for t in prepared.tasks]
    begun = time.perf_counter()
    with given.out.open("w") as file:

        def keep(number: int, group: list[Completion]) -> None:
            row = todo[requests[number].prompt_id]
            texts = tokenizer.decode_all([each.token_ids for each in group])
            for each, text in zip(group, texts, strict=True):
                own = {"finish": each.finish, "ends": ends, "text": text}
                print(json.dumps({"set": row["set"], "row": row["row"], **own}), file=file)
            file.flush()

        groups = judge_of(config, loaded).generate(requests, sampling_of(config), done=keep)
    seconds = time.perf_counter() - begun
    every = [each for group in groups for each in group]
    written, cut = sum(len(each.token_ids) for each in every), sum(each.truncated for each in every)
    print(
        f"{len(every)} programs for {len(requests)} rows in {seconds:.1f} s, {written} tokens, "
        f"{written / seconds:.0f} tokens/s, {cut} cut off"
    )
    return 0


# --- what it is worth -------------------------------------------------------------------------


class Plain(NamedTuple):
    """What plain Python says of a program."""

    right: bool
    why: str
    timed_out: bool = False


@dataclass(frozen=True)
class Judged:
    """One program: what plain Python says, and what the grader says."""

    name: str  # set and row
    plain: Plain
    grade: Grade
    steady: bool  # plain Python says the same every time

    @property
    def kind(self) -> str:
        """Return where it is counted; "" where the two agree."""
        accepted = self.grade.correct
        if accepted == self.plain.right:
            return ""
        if accepted is None:
            return "not graded"
        if self.plain.timed_out or OVERTIME in self.grade.reason:
            return "out of time in one of the two"
        if not self.steady:
            return "not the same twice in plain Python"
        return "ACCEPTED although wrong" if accepted else "REFUSED although right"


def script(name: str, task: Task, code: str) -> str:
    """Return program and tests as one text, put together as the authors of the data set say."""
    columns = task.columns
    if name == "mbpp":
        imports = "import sys"  # which a test of row 596 uses
        return "\n".join([code, imports, columns["test_setup"] or "", *columns["tests"]])
    entry = columns["entry_point"]
    whole = re.search(rf"^def {entry}\b", code, re.MULTILINE)
    program = f"{task.prompt}\n{code}" if whole else f"{task.prompt}{code}"
    return f"{program}\n{columns['tests']}\ncheck({entry})\n"


def plain_python(source: str) -> Plain:
    """Run a text in a fresh interpreter, that of the grader, in a folder of its own.

    It is right if its last line is reached, which shows by a token that it does not know: one that
    leaves before with status 0 is wrong.
    """
    token = secrets.token_hex(16)
    run = f"{LIMITS}\nimport os, solution\nos.write(1, b'{token}')"
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as errors,
    ):
        Path(folder, "solution.py").write_text(source, "utf-8", "surrogatepass")
        process = subprocess.Popen(
            [interpreter("", False).executable, "-S", "-c", run],  # as there: no packages
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            env=ENVIRONMENT,
            cwd=folder,
            start_new_session=True,
        )
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            return Plain(False, f"{OVERTIME} {SECONDS} s", timed_out=True)
        finally:
            end_all(process)
        out.seek(0)
        errors.seek(0)
        last = errors.read().decode("utf-8", "replace").strip().splitlines()[-1:]
        reached = token.encode() in out.read()
    right = code == 0 and reached
    return Plain(right, "" if right else " ".join([f"exit status {code}", *last]))


def end_all(process: subprocess.Popen[bytes]) -> None:
    """End a program and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def judged(programs: Sequence[Row], data: Path) -> list[Judged]:
    known = by_name(data)
    ends = sorted({end for row in programs for end in row["ends"]})
    own = [known[row["set"], row["row"]] for row in programs]
    grader = Grader({"code": 1.0}, ends)
    grades = grader.grade(
        [(task, row["text"], (), row["finish"]) for task, row in zip(own, programs, strict=True)]
    )

    def one(row: Row, task: Task, grade: Grade) -> Judged:
        source = script(row["set"], task, extract(row["text"], ends).replace("\0", ""))
        first = plain_python(source)
        differ = grade.correct is not first.right and not first.timed_out
        again = [plain_python(source).right for _ in range(REPEATS if differ else 0)]
        return Judged(f"{row['set']} {row['row']}", first, grade, {first.right} >= set(again))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return list(threads.map(one, programs, own, grades))


def judge(given: argparse.Namespace) -> int:
    programs = lines(given.programs)[:: given.every]
    found = judged(programs, given.data)
    kinds = Counter(each.kind for each in found)
    for name in SETS:
        those = [each for each in found if each.name.startswith(name)]
        right = sum(each.plain.right for each in those)
        slow = sum(each.plain.timed_out for each in those)
        late = sum(OVERTIME in each.grade.reason for each in those)
        print(
            f"{name}: {len(those)} programs; by plain Python {right} right, {len(those) - right} "
            f"wrong, {slow} of these out of time (in the grader {late})"
        )
    for each in found:
        if each.kind:
            print(f"--- {each.kind}: {each.name}")
            print(f"    grader: {each.grade.reason or each.grade.correct}")
            print(f"    plain Python: {each.plain.why or 'right'}")
    for kind in ("REFUSED although right", "ACCEPTED although wrong"):
        print(f"{kind}: {kinds.pop(kind, 0)}")
    kinds.pop("", None)
    for kind, count in kinds.items():
        print(f"{kind}: {count}")
    return int(any(each.kind.startswith("ACCEPTED") for each in found))


def lines(file: Path) -> list[Row]:
    found = [json.loads(line) for line in file.read_text().split("\n") if line]
    if not found:
        raise SystemExit(f"{file} is empty.")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    modes = parser.add_subparsers(required=True)
    mode = modes.add_parser("rows", help="write what models are asked into a file")
    mode.add_argument("data", type=Path)
    mode.add_argument("out", type=Path)
    mode.set_defaults(run=rows)
    mode = modes.add_parser("write", help="let a model write programs")
    mode.add_argument("model", type=Path)
    mode.add_argument("out", type=Path)
    source = mode.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path)
    source.add_argument("--rows", type=Path)
    mode.add_argument("--every", type=int, default=1, help="of the rows one in so many")
    mode.add_argument("--samples", type=int, default=1)
    mode.add_argument("--max-tokens", type=int, default=512)
    mode.add_argument("--device", default="auto")
    mode.add_argument("--dtype", default="auto")
    mode.set_defaults(run=write)
    mode = modes.add_parser("judge", help="judge them in both ways")
    mode.add_argument("programs", type=Path)
    mode.add_argument("--data", type=Path, required=True)
    mode.add_argument("--every", type=int, default=1, help="of the programs one in so many")
    mode.set_defaults(run=judge)
    given = parser.parse_args(arguments)
    code: int = given.run(given)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
