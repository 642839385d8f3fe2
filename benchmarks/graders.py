"""Agreement and speed of the graders: python benchmarks/graders.py DATA [--rows NAME ...]

DATA is a folder with grader_pairs/ (verdicts of public graders' test suites, labelled GSM8K
solutions), grader_pairs2/ (more of them) and math/ (MATH); for agreement also a file of pairs of
yours: JSON lines with gold, pred, expected, source ("suite:file"), kind ("equivalence" where pred
is a bare answer), and suspect where the label is doubtful. Rows:

    agreement   with the verdicts, by suite and without doubtful labels: by `math` as it is, by
                `math` with the options that the suite's own rules come to (OWN_RULES), by
                math-verify as it comes (`parse`, `verify`), and where it is recorded by math-verify
                told which notation to look for; the better of its two for each suite, of the pair
                as it is and of LaTeX between dollar signs. `standing` compares with it as it comes
    gsm8k       with the labels of solutions, where label and numbers agree
    numbers     verdicts per second, plain numbers in a sentence, two processes
    latex       milliseconds per verdict, the distinct answers of MATH, beside math-verify; cold
    hostile     how long an answer takes that would take for ever, with a limit in processor seconds
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from groupwise.graders import choice
from groupwise.graders.mathematics import extract, notation, sameness, values
from groupwise.graders.mathematics import grader as mathematics
from groupwise.graders.mathematics.grader import engine, verdicts
from groupwise.graders.mathematics.rounding import Rounding
from groupwise.graders.rubric import Grader
from groupwise.records import Task

Row = dict[str, Any]
HOSTILE = (
    r"\boxed{7^{7^{9}}}",
    r"\boxed{2^{2^{2^{2^{2^{2}}}}}}",
    r"\boxed{(((10^{10})!)!)!}",
    r"\boxed{" + r"\frac{1}{1+" * 60 + "x" + "}" * 60 + "}",
    r"\boxed{" + r"\sqrt{x+" * 40 + "x" + "}" * 40 + "}",
    r"\boxed{\sum_{k=1}^{10^{12}} \frac{1}{k^2}}",
    r"\boxed{(x+1)^{3000} (x-1)^{2999}}",
    r"\boxed{" + "(" * 300 + "1" + ")" * 300 + "}",
    r"$" + r"\left(" * 400 + "1" + r"\right)" * 400 + "$",
    "The answer is " + "1+" * 5000 + "x",
    r"\boxed{" + "a_" * 500 + "}",
    r"\boxed{\int_0^1 x^{x^{x^{x}}} dx = " + "9" * 400 + "}",
    "$" * 5001,
    r"\boxed{x = 1 \text{ or } " * 200,
    " " * 50_000 + "x^" * 2_000,
)


# What the documentation or the code of a suite's grader says that `math` has an option for; other
# suites want what `math` does by default. By the rule, never by a row: `marked` where an answer
# without its mark is refused, `digits=None` where numbers are compared exactly.
EXACT: Row = {"digits": None}
DAPO: Row = {"marked": True, "digits": None}  # the text behind the last "Answer:", sign for sign
OWN_RULES: dict[str, Row] = {
    "THUDM/slime:tests/test_rm_math_dapo.py": DAPO,
    "THUDM/slime:tests/test_rm_math.py": DAPO,  # a box; sympy's difference is 0
    "Ascend/MindSpeed-RL:tests/ut/models/test_math_dapo.py": DAPO,
    "radixark/miles:tests/fast/rollout/rm_hub/test_math_dapo_utils.py": DAPO,
    "NovaSky-AI/SkyRL:skyrl-gym/tests/test_aime.py": DAPO,
    "NovaSky-AI/SkyRL:skyrl-gym/tests/test_gsm8k.py": DAPO,  # behind ####
    "huggingface/trl:tests/test_rewards.py": {"marked": True},  # nothing without an anchor
    "maths/moodle-qtype_stack:": EXACT,  # equal as algebra; tolerances are tests of their own
    "rasbt/reasoning-from-scratch:tests/test_ch03.py": EXACT,  # sympy's difference is 0
    "hendrycks/math:": EXACT,  # text against text
    "github-text-index:10592428089": EXACT,  # prm800k: text, or sympy's difference is 0
    "github-text-index:60098778366": EXACT,  # Minerva: sympy's difference is 0
}


def lines(path: Path) -> list[Row]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return [json.loads(line) for line in file]


def clear() -> None:
    """Cold: what was read and compared before is forgotten."""
    for module in (choice, extract, mathematics, notation, sameness, values):
        for item in vars(module).values():
            if hasattr(item, "cache_clear") and item is not engine:
                item.cache_clear()


# --- agreement


def agreement(data: Path) -> list[Row]:
    paths = [data / "grader_pairs" / "test.jsonl.gz", data / "grader_pairs2" / "pairs.jsonl.gz"]
    paths = [data] if data.is_file() else paths
    counts: dict[str, Counter[str]] = {}
    for row in (row for path in paths if path.is_file() for row in lines(path)):
        if row.get("suspect") or row.get("conflict"):
            continue
        digits = row.get("precision", 6)
        verdicts_of = {
            "groupwise": accepted(row, {}),
            "own_rules": accepted(row, own_rules(row)),
            "as_it_is": as_it_comes(row["pred"], row["gold"], digits),
            "in_dollars": as_it_comes(in_dollars(row), f"${row['gold']}$", digits),
        }
        if "math_verify_0_9_0" in row:
            plain = row["math_verify_0_9_0"]
            verdicts_of |= {
                "told": plain,
                "told_wrapped": row.get("math_verify_0_9_0_wrapped", plain),
            }
        for suite in (row["source"].partition(":")[0], "all"):
            counted = counts.setdefault(suite, Counter())
            counted["pairs"] += 1
            for judge, found in verdicts_of.items():
                counted[judge] += found == row["expected"]
                counted[f"{judge}_wrong_acceptances"] += found and not row["expected"]
                counted[f"{judge}_wrong_refusals"] += row["expected"] and not found
    return [summary(suite, counted) for suite, counted in sorted(counts.items())]


def summary(suite: str, counted: Counter[str]) -> Row:
    plain = max("as_it_is", "in_dollars", key=lambda judge: counted[judge])
    told = max("told", "told_wrapped", key=lambda judge: counted[judge])
    lead = counted["groupwise"] - counted[plain]
    found: Row = {"row": "agreement", "suite": suite, "pairs": counted["pairs"]}
    for name, judge in {
        "groupwise": "groupwise",
        "own_rules": "own_rules",
        "math_verify": plain,
        "math_verify_told": told,
    }.items():
        if judge in counted:
            ends = ("", "_wrong_acceptances", "_wrong_refusals")
            found |= {f"{name}{end}": counted[f"{judge}{end}"] for end in ends}
    return found | {"standing": "above" if lead > 0 else "below" if lead else "level"}


def in_dollars(row: Row) -> str:
    return f"${row['pred']}$" if row["kind"] == "equivalence" else str(row["pred"])


def own_rules(row: Row) -> Row:
    """The options that the rules of a pair's suite come to. What is a bare answer needs no mark."""
    options = next((x for start, x in OWN_RULES.items() if row["source"].startswith(start)), {})
    bare = row["kind"] == "equivalence"
    return {name: x for name, x in options.items() if not (bare and name == "marked")}


def accepted(row: Row, options: Row) -> bool:
    if row["kind"] == "letter-choice":
        known = choice.options({})
        gold = choice.gold_letter(row["gold"], known)
        return gold is not None and choice.verdict(row["pred"], gold, known)[0] == 1.0
    (verdict,) = verdicts([(row["pred"], row["gold"])], decimals=row.get("precision"), **options)
    return verdict.score == 1.0


def gsm8k(data: Path) -> list[Row]:
    rows = lines(data / "grader_pairs" / "gsm8k_solutions.jsonl.gz")
    rows = [row for row in rows if row["label_agrees_numeric"]]
    found = []
    for name in ("math", "number"):
        samples = [(Task(0, "", row["gold"]), row["pred"], (), "eos") for row in rows]
        grades = Grader({name: 1.0}).grade(samples)
        agreed = sum(g.correct == row["expected"] for g, row in zip(grades, rows, strict=True))
        share = agreed / len(rows)
        found.append({"row": "gsm8k", "grader": name, "solutions": len(rows), "share": share})
    return found


# --- speed


def sentences(count: int, seed: int) -> list[Any]:
    pick = random.Random(seed)
    rows = []
    for number in range(count):
        gold = str(pick.randrange(10**6))
        said = gold if number % 2 else str(pick.randrange(10**6))
        text = f"So 3 of them cost 4 each, and the total comes to {said}."
        rows.append((Task(number, "How much?", gold), text, (), "eos"))
    return rows


def grade_sentences(name: str, count: int, seed: int) -> tuple[float, float]:
    """Seconds by the clock, and of the processor: others may be using it."""
    grader, samples = Grader({name: 1.0}), sentences(count, seed)
    start, busy = time.perf_counter(), time.process_time()
    right = sum(bool(grade.correct) for grade in grader.grade(samples))
    busy, seconds = time.process_time() - busy, time.perf_counter() - start
    assert abs(right - count / 2) < 0.02 * count
    return seconds, busy


def numbers(data: Path, count: int = 100_000) -> list[Row]:
    """Two processes, as on two cores; the slower one counts. By the clock, and as if alone."""
    found = []
    with ProcessPoolExecutor(2) as processes:
        list(processes.map(grade_sentences, ["number"] * 2, [100] * 2, range(2)))  # imports
        for name in ("number", "math"):
            counts = [count // 2] * 2
            taken = list(processes.map(grade_sentences, [name] * 2, counts, range(2)))
            rates = [round(count / max(kind)) for kind in zip(*taken, strict=True)]
            found.append(
                {
                    "row": "numbers",
                    "grader": name,
                    "verdicts_per_second": rates[0],
                    "with_both_cores_free": rates[1],
                }
            )
    return found


def rewritten(answer: str) -> str:
    """The same value, written otherwise."""
    answer = answer.replace(r"\dfrac", r"\frac").replace(r"\frac", r"\tfrac")
    answer = answer.replace("+", " + ").replace(r"\left", "").replace(r"\right", "")
    return f" {answer} "


def latex(data: Path, sample: int = 400) -> list[Row]:
    """All distinct answers for us, some of them for math-verify, which takes minutes for all."""
    rows = [row for part in ("train", "test") for row in lines(data / "math" / f"{part}.jsonl.gz")]
    golds = sorted({row["answer"] for row in rows})
    random.Random(0).shuffle(golds)
    kinds: dict[str, Callable[[int], str]] = {
        "as it is": lambda n: golds[n],
        "rewritten": lambda n: rewritten(golds[n]),
        "another's": lambda n: golds[(n + 1) % len(golds)],
    }
    engine().run([("1", "1", Rounding())] * engine().size, 60.0)  # started
    found = []
    for kind, written in kinds.items():
        pairs = [(rf"\boxed{{{written(n)}}}", gold) for n, gold in enumerate(golds)]
        clear()
        start = time.perf_counter()
        ours = verdicts(pairs)
        seconds = (time.perf_counter() - start) / len(pairs)
        start = time.perf_counter()
        theirs = [naive(text, gold) for text, gold in pairs[:sample]]
        naive_seconds = (time.perf_counter() - start) / sample
        agreed = sum(
            (one.score == 1.0) == other for one, other in zip(ours[:sample], theirs, strict=True)
        )
        found.append(
            {
                "row": "latex",
                "answers": kind,
                "distinct": len(golds),
                "ms": round(1e3 * seconds, 4),
                "math_verify_ms": round(1e3 * naive_seconds, 3),
                "times": round(naive_seconds / seconds, 1),
                "same_verdict": f"{agreed}/{sample}",
                "accepted": sum(verdict.score == 1.0 for verdict in ours),
            }
        )
    whole = sum(row["math_verify_ms"] for row in found) / sum(row["ms"] for row in found)
    return [*found, {"row": "latex", "answers": "all three", "times": round(whole, 1)}]


def naive(text: str, gold: str) -> bool:
    from math_verify import parse, verify

    return bool(
        verify(
            parse(f"${gold}$", parsing_timeout=None),
            parse(text, parsing_timeout=None),
            timeout_seconds=None,
        )
    )


def as_it_comes(text: str, gold: str, digits: int = 6) -> bool:
    """Return math-verify's verdict, within its own limits of time, rounded as its suite does."""
    from math_verify import parse, verify

    return bool(verify(parse(gold), parse(text), float_rounding=digits))


def hostile(data: Path, limit: float = 1.0, repeats: int = 3) -> list[Row]:
    engine().run([("1", "1", Rounding())] * engine().size, 60.0)
    seconds, statuses = [], Counter[str]()
    for _ in range(repeats):
        for text in HOSTILE:
            clear()
            start = time.perf_counter()
            (verdict,) = verdicts([(text, r"\frac{1}{2}")], timeout=limit)
            seconds.append(time.perf_counter() - start)
            statuses[verdict.status] += 1
    (alive,) = verdicts([(r"\boxed{\sin(x+x)}", r"\sin(2x)")], timeout=limit)
    seconds.sort()
    p99 = seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
    return [
        {
            "row": "hostile",
            "limit": limit,
            "inputs": len(seconds),
            "p50": round(seconds[len(seconds) // 2], 3),
            "p99": round(p99, 3),
            "late_by": round(p99 - limit, 3),
            **statuses,
            "alive": alive.score == 1.0,
        }
    ]


ROWS: dict[str, Callable[[Path], list[Row]]] = {
    "agreement": agreement,
    "gsm8k": gsm8k,
    "numbers": numbers,
    "latex": latex,
    "hostile": hostile,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    args = parser.parse_args(argv)
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    for name in args.rows:
        load = os.getloadavg()[0]
        for row in ROWS[name](args.data):
            line = json.dumps({**row, "load": round(load, 1)}, ensure_ascii=False)
            print(line, flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
