"""Where an answer stands, tried on real solutions: python benchmarks/extraction.py DATA [--rows N]

DATA is a folder with gsm8k/ and math/, solutions with their answers. Each solution is

    cut         somewhere in front of the place that gives the answer, and no record says so
    cut, known  the same, and the record says that the token limit was hit
    replaced    with another number where the answer was
    withdrawn   with a sentence behind the answer that takes it back
    phrased     its answer alone, in a final sentence of another wording

and graded by `math`, and by `number` where the answer is one. Only what is phrased is right.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.graders.mathematics.numbers import gold_number
from groupwise.graders.rubric import Grader
from groupwise.records import Task

WITHDRAWN = (
    "Wait, that is wrong, it's {other}.",
    "No, actually it is {other}.",
    "Hmm, I made a mistake. It should be {other}.",
    "Actually, let me correct that: {other}.",
    "Scratch that, the result is {other}.",
    "Correction: it is {other}.",
    "That is not right.",
    "Wait, this is incorrect. Let me redo it.",
    "On second thought, it must be {other}.",
    "Sorry, I miscalculated, the correct value is {other}.",
)
PHRASED = (
    "The answer is {}.", "The final answer is ${}$.", "Answer: {}", "**Answer:** ${}$",
    "Therefore, the answer is $\\boxed{{{}}}$.", "#### {}", "So the value is ${}$.", "= ${}$",
    "Thus, we get ${}$.", "<answer>{}</answer>", "Hence the result is \\({}\\).",
    "**Final Answer**\n\n$${}$$", "Therefore, the value we want is\n\\[{}.\\]",
    "The correct answer is: {}", "So our answer is $\\boxed{{{}}}$. I hope this helps!",
    "Final Answer: The final answer is ${}$. I hope it is correct.",
    "Thus the desired value is ${}$, as required.", "It follows that $x = {}$.",
    "### Final answer\n${}$", "Consequently it equals **${}$**.",
)  # fmt: skip


class Tried(NamedTuple):
    kind: str
    gold: str
    text: str
    right: bool
    finish: str = "eos"


def solutions(data: Path, name: str, most: int, pick: random.Random) -> list[tuple[str, str]]:
    """Answers, and the solutions that give them."""
    with gzip.open(data / name / "train.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    rows = pick.sample(rows, min(most, len(rows)))
    return [(row["answer"], re.sub("<<.*?>>", "", row["solution"])) for row in rows]


def place(gold: str, solution: str) -> tuple[str, int, int] | None:
    """A solution without the mark behind it, and from where to where it gives its answer."""
    box = solution.find(rf"\boxed{{{gold}}}")
    if box >= 0:
        return solution, box, box + len(rf"\boxed{{{gold}}}")
    text = solution.partition("\n####")[0]
    shown = f"{int(gold):,}" if gold.lstrip("-").isdigit() else gold
    ends = list(re.finditer(rf"(?<![\d.,])(?:{gold}|{shown})(?!\d)", text))
    last = text.rfind("\n") + 1
    return (text, *ends[-1].span()) if ends and ends[-1].start() >= last else None


def tried(gold: str, solution: str, pick: random.Random) -> Iterator[Tried]:
    found = place(gold, solution)
    number = gold_number(gold)
    other = str(number.value + pick.randint(1, 9)) if number else r"\frac{17}{1003}"
    if found is not None:
        text, start, end = found
        cut = text[: pick.randrange(start // 10, max(start, 1))] if start > 20 else ""
        yield Tried("cut", gold, cut, False)
        yield Tried("cut, known", gold, cut, False, "length")
        box = rf"\boxed{{{gold}}}"
        instead = text[:start] + other + text[end:]
        if text.startswith(box, start):  # there may be another solution behind it
            instead = text.replace(box, rf"\boxed{{{other}}}")
        yield Tried("replaced", gold, instead, False)
        back = pick.choice(WITHDRAWN).format(other=other if number else f"${other}$")
        yield Tried("withdrawn", gold, f"{text} {back}", False)
        yield Tried("as it is", gold, text, True)
    said = pick.choice(PHRASED).format(gold)
    lead = (found[0][: found[1]] if found else "").rpartition(". ")[0]
    yield Tried("phrased", gold, f"{lead}.\n{said}" if lead else said, True)


def measure(data: Path, most: int) -> Iterator[dict[str, Any]]:
    """A row for each set, grader and kind, with what was judged wrongly."""
    for name in ("gsm8k", "math"):
        pick = random.Random(0)
        rows = [
            each
            for gold, solution in solutions(data, name, most, pick)
            for each in tried(gold, solution, pick)
        ]
        for grader in ("math", "number"):
            own = [row for row in rows if grader == "math" or gold_number(row.gold)]
            samples = [(Task(0, "", row.gold), row.text, (), row.finish) for row in own]
            grades = Grader({grader: 1.0}).grade(samples)
            for kind in dict.fromkeys(row.kind for row in own):
                marks = [(row, grade) for row, grade in zip(own, grades, strict=True)]
                marks = [(row, grade) for row, grade in marks if row.kind == kind]
                wrong = [(*x, g.reason) for x, g in marks if bool(g.correct) != x.right]
                yield {"set": name, "grader": grader, "kind": kind, "tried": len(marks)} | {
                    "wrong": len(wrong),
                    "share": round(len(wrong) / len(marks), 4),
                    "texts": wrong,
                }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=1000, help="solutions of each set")
    parser.add_argument("--show", action="store_true", help="the texts that were judged wrongly")
    args = parser.parse_args(argv)
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    for row in measure(args.data, args.rows):
        print(json.dumps({key: row[key] for key in row if args.show or key != "texts"}), flush=True)


if __name__ == "__main__":
    main()
