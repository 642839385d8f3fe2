"""`groupwise grade`: JSON lines in, a verdict for each out, in order."""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TextIO

from groupwise.commands.shared import start_pytorch

if TYPE_CHECKING:
    from groupwise.graders.rubric import Grader

GOLD = ("gold", "answer", "ground_truth")
TEXT = ("pred", "completion", "response", "solution_str")
PROMPT = ("prompt", "question")
AT_ONCE = 256  # lines that are in work together
THREADS = 8  # that wait for workers


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "grade",
        help="grade JSON lines from standard input",
        usage="groupwise grade --grader NAME [--timeout TIMEOUT] < ROWS.jsonl",
        description="Reads JSON lines from standard input, with gold and pred (or prompt, "
        "completion and what else the grader reads, such as tests); writes a JSON line for each: "
        "score, status, why, seconds.",
        example='echo \'{"gold": "1/2", "pred": "0.5"}\' | groupwise grade --grader math',
    )
    parser.add_argument(
        "--grader", required=True, metavar="NAME", help="such as math, choice, rewards.py:function"
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds for a function of a file; default: 60"
    )
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    from groupwise.errors import ConfigError

    if not args.timeout > 0:
        raise ConfigError(f"--timeout {args.timeout}: a number of seconds above 0.")
    start_pytorch()
    from groupwise.graders.rubric import Grader

    grader = Grader({args.grader: 1.0}, timeout=args.timeout)
    unread = 0
    with ThreadPoolExecutor(THREADS) as threads:
        for lines in _batches(sys.stdin):
            for verdict in threads.map(lambda each: grade_line(grader, *each), lines):
                unread += "line" in verdict
                print(json.dumps(verdict, ensure_ascii=False), flush=False)
            sys.stdout.flush()
    if unread:
        print(f"groupwise: {unread} lines could not be read; each says why", file=sys.stderr)
    return 0


def _batches(stream: TextIO) -> Iterator[list[tuple[int, str]]]:
    """Yield the lines that have come so far, at least one: no answer waits for later lines."""
    waiting: queue.Queue[tuple[int, str] | None] = queue.Queue(maxsize=4 * AT_ONCE)

    def read() -> None:
        for number, line in enumerate(stream, 1):
            if line.strip():
                waiting.put((number, line))
        waiting.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (first := waiting.get()) is not None:
        batch = [first]
        while len(batch) < AT_ONCE:
            try:
                following = waiting.get_nowait()
            except queue.Empty:
                break
            if following is None:
                waiting.put(None)
                break
            batch.append(following)
        yield batch


def grade_line(grader: Grader, number: int, line: str) -> dict[str, Any]:
    """Return a verdict; a line that can't be read gets one too, with its number."""
    from groupwise.graders.parts import SampleToGrade

    start = time.perf_counter()
    try:
        sample = SampleToGrade(*_read(line, number))
    except (ValueError, RecursionError) as error:
        said = f"line {number}: {error}"
        return {"line": number, "score": None, "status": "error", "why": said, "seconds": 0.0}
    (part,) = grader.parts.values()
    (mark,) = part.grade([sample])
    return {
        "score": mark.value,
        "status": "graded" if mark.status == "ok" else mark.status,
        "why": mark.reason,
        "seconds": round(time.perf_counter() - start, 6),
    }


def _read(line: str, number: int) -> tuple[Any, str, tuple[int, ...], str]:
    from groupwise.records import Task

    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__} instead of an object with gold and pred")
    text = _text(next((row[key] for key in TEXT if key in row), None))
    gold = next((row[key] for key in GOLD if key in row), None)
    prompt = next((row[key] for key in PROMPT if key in row), "")
    if isinstance(prompt, list):
        prompt = tuple(prompt)
    elif not isinstance(prompt, str):
        raise ValueError("its prompt is neither text nor a list of messages")
    columns = {key: x for key, x in row.items() if key not in (*TEXT, *PROMPT, "gold")}
    return Task(number, prompt, gold, columns), text, (), str(row.get("finish", "eos"))


def _text(given: Any) -> str:
    """Return a completion as text: of a chat, its last message."""
    if isinstance(given, list) and given and isinstance(given[-1], dict):
        given = given[-1].get("content")
    if not isinstance(given, str):
        raise ValueError(f"it has no pred or completion that is text (one of {', '.join(TEXT)})")
    return given
