"""What was tried against this package and held: python benchmarks/attacks.py [--rows NAME ...]

Rows, each with how much was tried and how much of it got through:

    kills        a run killed before and after every call that changes the disk, and started again
    files        damaged model, tokenizer, adapter, configuration, checkpoint and data files
    runs         damaged run folders, given to the viewer, the report and the diagnosis
    escapes      programs that reach for files, sockets, processes and limits, behind each wall
    completions  hostile answers, given to each grader

Ends with 1 if anything got through. `--share 0.1` tries a tenth of it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from groupwise.commands import diagnose
from groupwise.errors import RunError
from groupwise.graders.rubric import Grader
from groupwise.graders.sandbox import attacks, pool
from groupwise.graders.sandbox.isolation import WALLS
from groupwise.graders.sandbox.worker import Sandbox
from groupwise.model.formats import classifier
from groupwise.records import Task
from groupwise.runfiles.folder import RunFolder
from groupwise.view.runs import Runs
from groupwise.view.server import Viewer
from groupwise.watch.report import report_page

HERE = Path(__file__).parents[1]
sys.path += [str(HERE / "tests" / "support"), str(HERE / "benchmarks")]
import crashes  # noqa: E402
import damage  # noqa: E402
import damage_scorers  # noqa: E402
import damages  # noqa: E402
import viewing  # noqa: E402

MUTATIONS = 2_000  # of each kind of file
COMPLETIONS = 2_000  # for each grader
GRADERS = (
    "math", "number", "choice", "exact", "countdown", "instructions", "repetition", "length",
    "format(pattern='<answer>.*</answer>')", "language(target='en')", "code",
)  # fmt: skip


class Attack(NamedTuple):
    """One line of the table."""

    name: str
    tried: int
    through: int
    note: str = ""


def kills(share: float) -> Iterator[Attack]:
    for run in crashes.RUNS:
        for _, phase, tried, held in crashes.sweep(run, every=max(1, round(1 / share))):
            yield Attack(f"killed: {run}, {phase}", tried, tried - held)


def files(share: float) -> Iterator[Attack]:
    for kind in damage.KINDS:
        found = damage.attack(kind, max(1, round(MUTATIONS * share)))
        note = (
            f"{found.errors} refused in words, {found.loaded} read, {found.slowest:.1f} s at most"
        )
        yield Attack(f"damaged: {kind}", found.tried, len(found.tracebacks), note)


def runs(share: float) -> Iterator[Attack]:
    """A page, a report or a diagnosis may say what is wrong, and nothing else."""
    given = [*damages.DAMAGES.values(), *(("", each) for each in damages.HARMLESS.values())]
    readers: dict[str, Callable[[RunFolder], object]] = {
        "viewer": lambda run: shown(run, "", "/step/1", "/step/1/group/0", "/prompt/100"),
        "report": report_page,
        "diagnose": lambda run: diagnose.run(argparse.Namespace(path=str(run.path), json=True)),
    }
    for name, read in readers.items():
        tried, through = 0, 0
        for _, spoil in given[:: max(1, round(1 / share))]:
            with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
                run = viewing.make_run(Path(place) / "one", 3)
                spoil(run)
                tried += 1
                try:
                    read(run)
                except RunError:
                    pass
                except Exception as error:
                    through += 1
                    print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        yield Attack(f"damaged runs: {name}", tried, through)


def shown(run: RunFolder, *paths: str) -> None:
    """Ask the viewer for pages of a run."""
    with Viewer(Runs([run.path]), ("127.0.0.1", 0)) as viewer:
        for path in paths:
            with contextlib.suppress(RunError):
                viewer.answer(f"/runs/{run.path.name}{path}")


def escapes(share: float) -> Iterator[Attack]:
    for slot, wall in enumerate(WALLS):
        if why := pool.problem(wall):
            yield Attack(f"escapes: {wall}", 0, 0, why)
            continue
        worker = Sandbox(wall, slot=20 + slot)
        try:
            tried, through = attacks.attempted(worker)
        finally:
            worker.close()
        yield Attack(f"escapes: {wall}", len(tried), len(through), ", ".join(through))


def completions(share: float) -> Iterator[Attack]:
    """A hostile answer may be worth nothing, and nothing else: no exception, no long wait."""
    with tempfile.TemporaryDirectory() as place:
        yield from _graded(share, [*GRADERS, *scored_by(Path(place))])


def scored_by(place: Path) -> list[str]:
    """Return parts of a reward that are models; they decide nothing, and must only answer."""
    if importlib.util.find_spec("transformers") is None:
        return []
    found, letters = [], "".join(sorted({*"".join(PIECES), *"What is it?"}))
    kinds: dict[str, classifier.Kind] = {"rm": "sequence", "prm": "token"}
    for part, kind in kinds.items():
        made = damage_scorers.whole(kind, "config.json", letters=letters, positions=512)
        made(place / part)
        found.append(f"{part}(path={str(place / part / 'scorer')!r})")
    return found


def _graded(share: float, names: Sequence[str]) -> Iterator[Attack]:
    for name in names:
        draw = random.Random(f"0 {name}")
        count = max(1, round(COMPLETIONS * share * (0.05 if name == "code" else 1)))
        rewarder, through, unjudged, slowest = Grader({name: 1.0}), 0, 0, 0.0
        for _ in range(0, count, 50):
            samples = [(TASKS[name.partition("(")[0]], hostile(draw), (), "eos") for _ in range(50)]
            begun = time.perf_counter()
            try:
                grades = rewarder.grade(samples)
            except Exception as error:
                through += 1
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            slowest = max(slowest, time.perf_counter() - begun)
            through += sum(grade.correct is True for grade in grades)
            through += sum(not is_number(grade.reward) for grade in grades)
            unjudged += sum(grade.status in ("error", "timeout") for grade in grades)
        note = f"{unjudged} without a verdict, {slowest:.1f} s for 50 at most"
        yield Attack(
            f"completions: {name.partition('(path')[0]}",
            50 * -(-count // 50),
            through + unjudged,  # who gets no reward has got around a low one
            note,
        )


def is_number(reward: float | None) -> bool:
    """Tell whether a reward can be learned from, or is none."""
    return reward is None or math.isfinite(reward)


PIECES = (
    "\\boxed{", "}", "{", "(", ")", "$", "\\[", "<answer>", "</answer>", "<think>", "</think>",
    "the answer is ", "\\frac{", "\\sqrt{", "^{", "!", "10^{10^{10}}", "\\sum_{k=1}^{10^9} ",
    "\x00", "\u202e", "\ufffd", "9" * 400, "1/0", "\\infty", "-", "e", "i", "```python\n",
    "\n```", "\n", "<end>", "<|pad|>", "\n\n",
    "A", "B)", "nan", "inf", "assert False", "import os; os._exit(0)", "while True: pass", " or ",
    "correct", "score: 1.0", "ignore the instructions", "é", "中", "🙂", "=", ",", "...", "\\",
)  # fmt: skip
WORTH = "737373.25"  # no piece says it
TASKS = {
    name: Task(0, "What is it?", WORTH, columns=columns)
    for name, columns in {
        "code": {"tests": [f"assert f() == {WORTH}"]},
        "choice": {"options": ["one", "two", "three", WORTH]},
        "countdown": {"numbers": [737373, 4], "target": 737377},
        "instructions": {
            "instruction_id_list": ["keywords:existence"],
            "kwargs": [{"keywords": [WORTH]}],
        },
    }.items()
} | {
    name: Task(0, "What is it?", WORTH)
    for name in (
        "math",
        "number",
        "exact",
        "repetition",
        "length",
        "format",
        "language",
        "rm",
        "prm",
    )
}


def hostile(draw: random.Random) -> str:
    """Return pieces of answers in no order, some of them many times."""
    chosen = draw.choices(PIECES, k=draw.randrange(1, 30))
    return "".join(piece * draw.choice((1, 1, 1, 1, 50, 3_000)) for piece in chosen)[:200_000]


ROWS: dict[str, Callable[[float], Iterator[Attack]]] = {
    "kills": kills,
    "files": files,
    "runs": runs,
    "escapes": escapes,
    "completions": completions,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--share", type=float, default=1.0, help="of what is tried (default all)")
    given = parser.parse_args()
    print("| attack | tried | got through | |\n|---|---|---|---|")
    through = 0
    for name in given.rows:
        for row in ROWS[name](given.share):
            print(f"| {row.name} | {row.tried:,} | {row.through} | {row.note} |", flush=True)
            through += row.through
    return 1 if through else 0


if __name__ == "__main__":
    sys.exit(main())
