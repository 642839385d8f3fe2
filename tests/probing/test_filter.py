"""`groupwise filter`: copies, evaluation items, guesses, and pass rates with their uncertainty."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cold_start
import pytest

from groupwise.cli import main
from groupwise.config.fields import Data
from groupwise.data import guessing
from groupwise.data.overlap import ALIKE, Copies, Evaluations, covered_share
from groupwise.data.words import grams, hashed, numbers, words
from groupwise.errors import GroupwiseError
from groupwise.evaluate import examine
from groupwise.evaluate.estimates import PassCount, Rates
from groupwise.evaluate.request import EvalRequest
from groupwise.probing import pass_rates
from groupwise.probing.row_filter import Band, FilterResult, by_band, tally
from groupwise.records import Task

LONG = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in "
    "May. She gave 3 clips to her brother, lost two of them on the way home, and put the rest "
    "into a box. How many clips did Natalia sell altogether in April and May?"
)
MIDDLE = "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in all?"
SHORT = "Find the greatest common divisor of 2863 and 1344."

# --- words ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 2 + 3?", "WHAT  is\n2+3"),
        ("It costs $1,000.", "it costs 1000"),
        (r"Compute $\dfrac{1}{2}\left(x\right)$.", r"compute \frac{1}{2} (x)"),
        ("a well-known café", "A WELL KNOWN CAFÉ!"),
        ("x − 1", "x - 1"),
        ("ﬁve apples…", "five apples"),
        ("x² + 10⁻³", "x^2 + 10^{-3}"),
        ("3½ of 10₂", "3 1/2 of 10_2"),
        (r"\frac12 of $10,\!000$ or 20\,000", r"\frac{1}{2} of 10,000 or 20{,}000"),
        (r"5\text{ cm} \Bigl( \mathrm{d}x \Bigr)", "5 cm (d x)"),
        (r"2 \times 3 \leq 6, A \cup B", "2 × 3 ≤ 6, A ∪ B"),
        ("an ap\u200bple\u00ad", "an apple"),
    ],
)
def test_what_only_looks_different_has_the_same_words(one: str, other: str) -> None:
    assert words(one) == words(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("3 + 4", "3 - 4"),
        ("3.5", "35"),
        ("3*4", "3/4"),
        ("x^2", "x2^"),
        ("5!", "5"),
        ("-5", "5"),
        ("5² + 1", "52 + 1"),
        ("2½", "21/2"),
        ("A ∪ B", "A ∩ B"),
        ("p → q", "p ∧ q"),
        ("∑", "?"),
        ("😀", "😡"),
        (r"\textbook", "book"),
    ],
)
def test_what_changes_a_problem_changes_its_words(one: str, other: str) -> None:
    assert words(one) != words(other)


def test_scripts_without_spaces_are_cut_into_characters() -> None:
    assert words("求12的值") == ["求", "12", "的", "值"]
    assert numbers(words("from 3 to 4.5 m2")) == ["3", "4.5", "2"]


def test_grams_are_equal_for_equal_runs_of_words() -> None:
    one, other = hashed(list("abcde")), hashed(list("xbcdy"))
    assert set(grams(one, 3)) & set(grams(other, 3)) == {grams(hashed(["b", "c", "d"]), 3)[0]}
    assert len(grams(one, 9)) == 1 and grams(one, 9)[0] == grams(one, 5)[0]
    assert set(grams(one, 2)).isdisjoint(grams(hashed(["b", "a"]), 2))


# --- evaluation items -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def items() -> Evaluations:
    found = Evaluations()
    for row, text in enumerate((LONG, MIDDLE, SHORT, "What is 2 + 2?")):
        found.add("test", row, text)
    return found


def edited(text: str, every: int, seed: int = 0) -> str:
    """Every so many words another word stands there; numbers stay."""
    stream, said = random.Random(seed), text.split()
    for at in range(every // 2, len(said), every):
        if not any(c.isdigit() for c in said[at]):
            said[at] = stream.choice(["really", "green", "perhaps", "quickly"])
    return " ".join(said)


@pytest.mark.parametrize(
    ("text", "row"),
    [
        (LONG, 0),
        (LONG.upper().replace(",", "").replace(" ", "  "), 0),
        (f"Here is a riddle for you, think hard. {LONG} Answer with a number.", 0),
        (LONG.replace("Natalia", "Weng").replace("clips", "pins", 1), 0),
        (edited(LONG, 12), 0),
        (edited(LONG, 10), 0),
        (LONG.partition("How many")[0] + "How many clips were sold in those two months?", 0),
        (f"Solve this: {MIDDLE}", 1),
        (MIDDLE.replace("A robe", "Each robe"), 1),
        (f"Please {SHORT.lower()} Show your work.", 2),
        ("what is 2+2", 3),
    ],
)
def test_planted_and_edited_items_are_found(items: Evaluations, text: str, row: int) -> None:
    match, _ = items.find(words(text))
    assert match is not None and match.item.row == row and match.share > 0.5


@pytest.mark.parametrize(
    "text",
    [
        "What is 2 + 3?",
        "So what is 2 + 2 + 5?",  # an item of four words stands in any text
        "Find the greatest common divisor of 28 and 12.",
        "How many clips did Natalia sell altogether in April and May if she sold 5 each day?",
        "A farmer has 48 sheep and 3 dogs. How many animals are there in all on his farm?",
        "",
    ],
)
def test_clean_rows_stay(items: Evaluations, text: str) -> None:
    assert items.find(words(text))[0] is None


def test_the_same_words_with_other_numbers_are_another_problem_and_told_apart(
    items: Evaluations,
) -> None:
    match, variant = items.find(words(LONG.replace("48", "52")))
    assert match is None and variant
    assert (
        items.find(words("Something else entirely, with 48 and 3 in it, of other words."))[1]
        is False
    )


def test_a_phrase_of_the_whole_set_makes_no_copies() -> None:
    rule = "You can use basic arithmetic operations and each number can only be used once in all."
    items = Evaluations()
    for i in range(60):
        items.add(
            "countdown", i, f"Using the numbers {i}, {i + 7} and {2 * i} make {3 * i}. {rule}"
        )
    assert items.find(words(f"Using the numbers 901, 902 and 903 make 904. {rule}"))[0] is None
    match, _ = items.find(words(f"using the numbers 5, 12, and 10 - make 15! {rule}"))
    assert match is not None and match.item.row == 5


def test_coverage_by_hand() -> None:
    item, row = hashed(list("abcdefghij")), hashed(list("xxabcdexxghijxx"))
    assert covered_share(item, row, 4) == 0.9  # abcde and ghij; f is not covered
    assert covered_share(item, row, 5) == 0.5
    assert covered_share(item, row[:3], 4) == 0.0


# --- copies -----------------------------------------------------------------------------------


def near_by_counting(texts: Sequence[str]) -> dict[int, int]:
    """Every pair, shingle by shingle."""
    pieces = [set(grams(hashed(words(text)), 4).tolist()) for text in texts]
    given = [numbers(words(text)) for text in texts]
    found: dict[int, int] = {}
    for later in range(len(texts)):
        for first in range(later):
            if first in found or given[first] != given[later]:
                continue
            common = len(pieces[first] & pieces[later])
            both = common / (len(pieces[first]) + len(pieces[later]) - common)
            if both >= ALIKE:
                found[later] = first
                break
    return found


def test_near_copies_are_those_that_counting_all_pairs_finds() -> None:
    stream = random.Random(3)
    vocabulary = ["".join(stream.choices("abcdefgh", k=5)) for _ in range(400)]
    texts = []
    for _ in range(60):
        said = [stream.choice(vocabulary) for _ in range(40)] + [str(stream.randint(0, 1))]
        texts.append(" ".join(said))
        for changes in (0, 1, 2, 3, 6):
            other = list(said)
            for _ in range(changes):
                other[stream.randrange(40)] = stream.choice(vocabulary)
            texts.append(" ".join(other))
    stream.shuffle(texts)
    copies = Copies()
    earlier = {row: copies.add(row, words(text)) for row, text in enumerate(texts)}
    exact = {row: first for row, first in earlier.items() if first is not None}
    assert exact == {
        row: texts.index(text) for row, text in enumerate(texts) if texts.index(text) < row
    }
    unique = [row for row in range(len(texts)) if row not in exact]
    truth = near_by_counting([texts[row] for row in unique])
    found = copies.near()
    wanted = {unique[later] for later in truth}
    assert len(wanted) > 60
    assert wanted == set(found)


def test_other_numbers_or_another_answer_make_no_copy() -> None:
    copies = Copies()
    text = MIDDLE + " Explain every step of the calculation in a few short and simple sentences."
    for row, (said, answer) in enumerate(
        [(text, "3"), (text.replace("2", "4"), "3"), (text.replace("blue", "red"), "3"),
         (text.replace("blue", "black"), "4")]
    ):  # fmt: skip
        assert copies.add(row, words(said), answer) is None
    assert list(copies.near()) == [2]
    assert copies.add(9, words(text.upper())) == 0


# --- guesses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "answer", "columns", "chance"),
    [
        ("Is 7 a prime?", "Yes", {}, 1 / 2),
        ("Is it so?", r"\text{No}", {}, 1 / 2),
        ("Is it so?", True, {}, 1 / 2),
        ("Which? (A) 1 (B) 2 (C) 3 (D) 4", "(C)", {}, 1 / 4),
        (
            r"Which? $\textbf{(A)}\ 12 \quad \textbf{(B)}\ 13 \quad \textbf{(C)}\ 14$",
            "B",
            {},
            1 / 3,
        ),
        ("Which?\nA. red\nB. green\nC. blue\nD. black", "Green", {}, 1 / 4),
        ("Which colour?", "red", {"choices": ["red", "blue"]}, 1 / 2),
        (
            "Which colour?",
            0,
            {"choices": {"text": ["x", "y", "z"], "label": ["A", "B", "C"]}},
            1 / 3,
        ),
        ("Lines A. and B. meet at (C) 3 m away. How far?", "12", {}, None),
        ("What is 2 + 3?", "5", {}, None),
        ("What is the remainder?", None, {}, None),
        ("Plan A costs 3, plan B costs 4.", "B", {}, None),
    ],
)
def test_what_a_row_tells_a_guesser(
    prompt: str, answer: Any, columns: dict[str, Any], chance: float | None
) -> None:
    found = guessing.by_form(Task(0, prompt, answer, columns))
    assert (found and found.chance) == chance


def test_a_guesser_gets_what_many_rows_answer() -> None:
    found = guessing.by_frequency(21, 101)
    assert found is not None and found.chance == 0.2
    assert guessing.by_frequency(9, 10) is None  # ten rows say little
    assert guessing.plain("1.5") != guessing.plain("15") == guessing.plain(" $15$. ")
    assert guessing.plain(".5") != guessing.plain("5")


# --- pass rates -------------------------------------------------------------------------------


def test_how_sure_a_rate_is_below_a_limit() -> None:
    """Against numerical integration of the same model."""
    counts = [PassCount(8, n) for n in (0, 0, 0, 1, 2, 3, 5, 8, 8)]
    rates = Rates(counts)
    steps = 400
    for count, p in ((PassCount(8, 2), 0.1), (PassCount(8, 3), 0.5), (PassCount(8, 6), 0.9)):
        total = below = 0.0
        for i in range(steps):
            x = (i + 0.5) / steps
            density = sum(
                w * math.exp(
                    (a + count.passed - 1) * math.log(x)
                    + (b + count.samples - count.passed - 1) * math.log1p(-x)
                    - math.lgamma(a + count.passed) - math.lgamma(b + 8 - count.passed)
                    + math.lgamma(a + b + 8)
                )
                for a, b, w in rates._model if w > 1e-6
            )  # fmt: skip
            total += density
            below += density * (x < p)
        assert rates.below(count, p) == pytest.approx(below / total, abs=3e-3)


def test_a_band_keeps_what_is_more_likely_in_it_and_says_how_sure_that_is() -> None:
    """Rows with known rates: as many of those that stay are in the band as the report expects."""
    stream = random.Random(7)
    truth = {row: stream.betavariate(0.4, 0.6) for row in range(4000)}
    counts = {
        row: PassCount(8, sum(stream.random() < p for _ in range(8))) for row, p in truth.items()
    }
    found = FilterResult(Data(train="x.jsonl"), total=4000)
    band = by_band(found, counts, Band(0.1, 0.9, 8, "m", 0.0, 0.0, {}))
    inside = {row for row, p in truth.items() if 0.1 <= p <= 0.9}
    stay = set(truth) - set(found.removed)
    assert len(inside & stay) == pytest.approx(band.inside_kept, rel=0.03)
    # The model's Beta distributions lie on a grid, and what is far out depends on their tails.
    assert len(inside - stay) == pytest.approx(band.inside_removed, rel=0.25)
    reasons = {counts[row].passed: each.reason for row, each in found.removed.items()}
    assert reasons[0] == "too hard" and reasons[8] == "too easy" and not {3, 4, 5} & set(reasons)
    right = sum((row in inside) == (row in stay) for row in truth) / 4000
    for low in range(0, 5):  # no other cut of the counts does better
        for high in range(4, 9):
            other = sum((row in inside) == (low <= counts[row].passed <= high) for row in truth)
            assert right >= other / 4000 - 0.01
    assert tally([PassCount(8, 2), PassCount(8, 2), PassCount(7, 0)]) == {"0 of 7": 1, "2 of 8": 2}


# --- the command ------------------------------------------------------------------------------


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def filtered(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["filter", *argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Spaces, key order and numbers as people write them: all of it must stay."""
    lines = [
        '{"question": "What is 12 times 12, please?",  "answer": "#### 144", "z": 1.50, "a": null}',
        '{"answer":"#### 7","question":"What is 3 + 4, please?"}',
        "",
        '{"question": "WHAT is 12 times 12, please", "answer": "#### 144"}',
        json.dumps({"question": f"Think. {LONG}", "answer": "#### 72"}),
        '{"question": "Is 9 odd? Say yes or no.", "answer": "yes"}',
        '{"question": "Wie alt ist Zoë? \\u00e9", "answer": "#### 7"}',
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_rows_that_stay_are_unchanged_and_in_order(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    test = write_rows(tmp_path / "test.jsonl", [{"question": LONG, "answer": "#### 72"}])
    out = tmp_path / "clean.jsonl"
    argv = (f"gsm8k:{rows}", "--dedup", "--guessable", "--against", f"gsm8k:{test}")
    report = filtered(capsys, *argv, "--out", str(out))
    lines = [line for line in rows.read_text("utf-8").split("\n") if line]
    assert out.read_text("utf-8").split("\n")[:-1] == [lines[0], lines[1], lines[5]]
    assert report["removed"] == {"repeated": 1, "in an evaluation set": 1, "guessable": 1}
    assert (report["rows"], report["kept"], report["evaluation_items"]) == (6, 3, 1)
    gone = [json.loads(x) for x in (tmp_path / "clean.removed.jsonl").read_text().splitlines()]
    assert [(x["row"], x["reason"]) for x in gone] == [
        (2, "repeated"), (3, "in an evaluation set"), (4, "guessable")]  # fmt: skip
    assert gone[0]["other"] == "What is 12 times 12, please?" and gone[0]["copy_of"] == 0
    assert gone[1]["why"].startswith("gsm8k row 0: runs of 13 words")
    assert json.loads((tmp_path / "clean.report.json").read_text()) == report
    assert main(["filter", *argv, "--out", str(tmp_path / "again.jsonl.gz")]) == 0
    said = capsys.readouterr().out
    assert "3 of 6 rows stay (50.0%)" in said and LONG[:40] in said
    packed = gzip.decompress((tmp_path / "again.jsonl.gz").read_bytes())
    assert packed == out.read_bytes()


def test_a_row_that_repeats_often_stays_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its copies go: what is left of its answer is no guess."""
    prompts = ["How far is it from here to the moon?"] * 10 + [f"Say {'x' * i}." for i in range(90)]
    data = [{"prompt": text, "answer": str(max(i, 9))} for i, text in enumerate(prompts)]
    file = write_rows(tmp_path / "often.jsonl", data)
    argv = (str(file), "--dedup", "--guessable", "--out", str(tmp_path / "clean.jsonl"))
    assert filtered(capsys, *argv)["removed"] == {"repeated": 9}


def test_near_copies_of_a_row_that_goes_are_copies_of_each_other() -> None:
    """The first is an evaluation item; the others, both near to it and to each other, are not."""
    first = "w" + " w".join(f"{letter}{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")
    second = " ".join([*first.split()[:-3], "one", "more", "end"])
    third = " ".join([*first.split()[:-3], "one", "more", "way"])
    copies = Copies()
    for row, text in enumerate((first, second, third)):
        assert copies.add(row, words(text)) is None
    assert list(copies.near()) == [1, 2]
    assert {row: copy for row, (copy, _) in copies.near({0}).items()} == {2: 1}


def test_nothing_is_overwritten(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("x.jsonl", "x.removed.jsonl", "x.report.json", "x.rates.jsonl"):
        file = tmp_path / name
        file.write_text("precious")
        assert main(["filter", str(rows), "--dedup", "--out", str(tmp_path / "x.jsonl")]) == 2
        assert f"{name} exists already" in capsys.readouterr().err
        assert file.read_text() == "precious"
        file.unlink()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "Nothing is asked for"),
        (["--ngram", "8"], "--ngram belongs to --against"),
        (["--band", "0,1"], "--band belongs to --model"),
        (["--chance", "0.1"], "--chance belongs to --guessable"),
        (["--dedup", "--out", "x.parquet"], "rows are written as .jsonl"),
        (["--dedup", "--out", "nowhere/x.jsonl"], "there is no folder nowhere"),
        (["--against", "gsm9k"], "There is no suite 'gsm9k'"),
        (["--against", "nowhere.jsonl"], "There is no file nowhere.jsonl"),
        (["--against", "gsm8k", "--ngram", "2"], "--ngram 2"),
        (["--guessable", "--chance", "2"], "--chance 2"),
        (["--guessable", "--chance", "0"], "--chance 0"),
        (["--model", "nowhere"], "no model, run or checkpoint 'nowhere'"),
        (["--model", "{model}", "--band", "0.9,0.1"], "the lower one first"),
        (["--model", "{model}", "--band", "0.5"], "write two shares"),
        (["--model", "{model}", "--samples", "1"], "--samples 1 is too few"),
        (["--model", "{model}", "--temperature", "0"], "At temperature 0"),
        (["other.jsonl", "--dedup"], "one DATA at a time"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(
    rows: Path,
    model: str,
    argv: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(examine, "load_policy", lambda *a: pytest.fail("a model was loaded"))
    given = [each.format(model=model) for each in argv]
    out = [] if "--out" in given else ["--out", str(tmp_path / "y.jsonl")]
    assert main(["filter", str(rows), *given, *out]) == 2
    assert said in capsys.readouterr().err
    assert [x.name for x in tmp_path.iterdir()] == ["train.jsonl"]


def test_a_generator_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["filter", "countdown", "--dedup", "--out", str(tmp_path / "x.jsonl")]) == 2
    assert "is a generator" in capsys.readouterr().err


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    better = {"tiny__cold_start_steps": 150, "tiny__cold_start_accuracy": 0.6}
    return cold_start.make(tmp_path_factory.mktemp("model") / "cold", **better)


def test_pass_rates_are_sampled_kept_and_gone_on_with(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sums = [{"prompt": f"{i}+{j}=", "answer": str(i + j)} for i in range(6) for j in range(6)]
    sums[7] = sums[0]  # repeated, and all the same a row of its own
    file = write_rows(tmp_path / "sums.jsonl", sums)
    argv = [str(file), "--model", model, "--samples", "6", "model.threads=1",
            "engine.max_tokens=4", "engine.slots=30", "--band"]  # fmt: skip
    all_stay = filtered(capsys, *argv, "0,1", "--out", str(tmp_path / "a.jsonl"))
    assert all_stay["removed"] == {}
    rates = (tmp_path / "a.rates.jsonl").read_text().splitlines()
    counts = {x["row"]: x for x in map(json.loads, rates[1:])}
    assert sorted(counts) == list(range(36)) and counts[3]["samples"] == 6
    # Another band from the same counts: the mean parts the rows.
    for name in ("a.jsonl", "a.removed.jsonl", "a.report.json"):
        (tmp_path / name).unlink()
    mean = sum(x["passed"] for x in counts.values()) / (36 * 6)
    argv.append(f"{mean:.3f},1")
    with monkeypatch.context() as patched:
        patched.setattr(examine.SuiteEvaluation, "sample", lambda *a: pytest.fail("sampled again"))
        whole = filtered(capsys, *argv, "--out", str(tmp_path / "a.jsonl"))
    kept = (tmp_path / "a.jsonl").read_text().splitlines()
    gone = {x["row"] for x in map(json.loads, (tmp_path / "a.removed.jsonl").open())}
    assert kept == [json.dumps(row) for i, row in enumerate(sums) if i not in gone]
    assert 0 < len(gone) < 36
    passed = {row: x["passed"] for row, x in counts.items()}
    assert max(passed[row] for row in gone) < min(passed[row] for row in passed if row not in gone)
    assert whole["removed"] == {"too hard": len(gone)}
    tried = Counter(f"{x['passed']} of 6" for x in counts.values())
    assert whole["band"]["histogram"] == dict(sorted(tried.items()))
    # Stopped in the middle, it goes on, and asks nothing twice.
    sample, calls = examine.SuiteEvaluation.sample, []

    def stopped(self: examine.SuiteEvaluation, tasks: Any) -> Any:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(len(tasks))
        return sample(self, tasks)

    monkeypatch.setattr(examine.SuiteEvaluation, "sample", stopped)
    out = ("--out", str(tmp_path / "b.jsonl"))
    assert main(["filter", *argv, *out]) == 130
    assert calls == [5, 5, 5] and not (tmp_path / "b.jsonl").exists()
    calls.clear()
    monkeypatch.setattr(
        examine.SuiteEvaluation, "sample", lambda s, t: calls.append(len(t)) or sample(s, t)
    )
    again = filtered(capsys, *argv, *out)
    assert sum(calls) == 21
    assert again["band"] == whole["band"] and again["removed"] == whole["removed"]
    assert (tmp_path / "b.rates.jsonl").read_text().splitlines() == rates
    for name in ("b.jsonl", "b.removed.jsonl", "b.report.json"):
        (tmp_path / name).unlink()
    assert main(["filter", *argv, "seed=1", *out]) == 2
    assert "other settings" in capsys.readouterr().err


def test_tables_become_lines_and_repeated_columns_do_not_matter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {"problem": [LONG, LONG, MIDDLE], "solution": [r"\boxed{1}"] * 3, "n": [1, 2, 3]}
    )
    for number in (0, 1):
        pq.write_table(table, tmp_path / f"part{number}.parquet")
    report = filtered(
        capsys, f"math:{tmp_path}/part*.parquet", "--dedup", "--out", str(tmp_path / "o.jsonl")
    )
    assert (report["rows"], report["kept"]) == (6, 2)
    kept = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [row["n"] for row in kept] == [1, 3] and kept[0]["problem"] == LONG


def test_half_a_surrogate_pair_is_written_as_it_was_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "rows.json", tmp_path / "clean.jsonl"
    file.write_text('[{"prompt": "Wo ist Zoë?", "answer": "4", "note": "\\ud83d"}]', "utf-8")
    filtered(capsys, str(file), "--dedup", "--out", str(out))
    assert json.loads(out.read_text("utf-8")) == json.loads(file.read_text("utf-8"))[0]


def test_a_chat_is_compared_by_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = [
        {"prompt": [{"role": "user", "content": text}], "answer": "1"} for text in (MIDDLE, "x")
    ]
    file = write_rows(tmp_path / "chat.jsonl", chat)
    test = write_rows(tmp_path / "test.jsonl", [{"prompt": MIDDLE.lower(), "answer": "1"}])
    argv = (str(file), "--against", str(test), "--out", str(tmp_path / "o.jsonl"))
    report = filtered(capsys, *argv)
    [example] = report["examples"]["in an evaluation set"]
    assert example["why"] == "test row 0: the same words (100%)" and report["kept"] == 1


def test_limits_of_a_band_are_checked() -> None:
    with pytest.raises(GroupwiseError, match="two shares"):
        pass_rates.check(EvalRequest(samples=8, temperature=1.0), (0.5, 1.5))


def test_a_row_with_other_numbers_stays_and_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_rows(tmp_path / "own.jsonl", [{"prompt": LONG.replace("48", "52"), "answer": "1"}])
    test = write_rows(tmp_path / "test.jsonl", [{"prompt": LONG, "answer": "1"}])
    out = tmp_path / "clean.jsonl"
    assert main(["filter", str(file), "--against", str(test), "--out", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Rows that are an evaluation item but for its numbers: 1. They stay." in said
    assert out.read_text() == file.read_text()
