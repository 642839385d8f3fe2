"""Labels of steps: on a toy whose chances of success are known, and on a model from the command."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
from processes import exit_code
from runs import run

from groupwise.cli import main
from groupwise.data.judged import stepwise
from groupwise.probing.labelling import LabelledRow
from groupwise.probing.step_labels import (
    any_right,
    first_error,
    hard_labels,
    labels_up_to,
    search,
    share_right,
    soft_labels,
)
from groupwise.records import Task

# Chances of a right answer behind each of six steps: the fourth (from 0: 3) is the first error.
CHANCES = (0.9, 0.5, 0.7, 0.0, 0.0, 0.0)


def verdicts(step: int, count: int, seed: int) -> list[bool]:
    stream = random.Random(f"{step}/{seed}")
    return [stream.random() < CHANCES[step] for _ in range(count)]


def test_shares_and_any_by_hand() -> None:
    assert share_right([True, False, None, True]) == pytest.approx(2 / 3)
    assert any_right([False, None, True]) is True and any_right([False, None]) is False
    assert share_right([None]) is None and any_right([]) is None
    by_step = [[True, True], [True, False], [False]]
    assert soft_labels(by_step) == [1.0, 0.5, 0.0]
    assert hard_labels(by_step) == [True, True, False]
    assert soft_labels([[True], [None]]) is None and hard_labels([[None]]) is None


def test_soft_labels_are_the_chances_and_hard_ones_whether_there_is_one() -> None:
    """N = 8: the mean over 400 answers is within three standard errors of the truth."""
    made = [soft_labels([verdicts(step, 8, seed) for step in range(6)]) for seed in range(400)]
    for step, chance in enumerate(CHANCES):
        mean = sum(labels[step] for labels in made) / 400
        error = (chance * (1 - chance) / (8 * 400)) ** 0.5
        assert abs(mean - chance) <= 3 * error
    hard = [hard_labels([verdicts(step, 8, seed) for step in range(6)]) for seed in range(400)]
    for step, chance in enumerate(CHANCES):
        found, truth = sum(labels[step] for labels in hard) / 400, 1 - (1 - chance) ** 8
        assert abs(found - truth) <= 3 * (truth * (1 - truth) / 400) ** 0.5


@pytest.mark.parametrize("steps", [1, 2, 3, 6, 7, 25])
def test_bisection_finds_every_first_error(steps: int) -> None:
    """In no more questions than halving takes, the answer itself and the prompt aside."""
    for right in range(steps):
        asked: list[int] = []

        def behind(at: int, right: int = right, asked: list[int] = asked) -> bool:
            asked.append(at)
            return at <= right

        assert search(steps, behind) == right
        assert asked[:2] == [steps, 0] and len(asked) <= 2 + (steps - 1).bit_length()
        assert len(set(asked)) == len(asked)
    assert search(steps, lambda at: True) == steps  # a right answer is not searched
    assert search(steps, lambda at: at == steps and None) is None
    assert search(steps, lambda at: False) is None  # not one answer to the prompt is right
    assert search(steps, lambda at: None if 0 < at < steps else at == 0) in (0, None)


def test_bisection_on_the_toy() -> None:
    """Eight answers miss a chance of 0.5 once in 256: nearly every search finds the fourth step."""
    found = [
        search(6, lambda at, seed=seed: at == 0 or any_right(verdicts(at - 1, 8, seed)))
        for seed in range(200)
    ]
    assert found.count(3) >= 195 and set(found) <= {1, 3}


def test_labels_end_with_the_first_wrong_step() -> None:
    assert labels_up_to(2, 4) == [True, True, False]
    assert labels_up_to(0, 1) == [False] and labels_up_to(2, 2) == [True, True]


def test_a_search_can_be_run_beside_others() -> None:
    one, two = first_error(4), first_error(2)
    assert (next(one), next(two)) == (4, 2)
    assert (one.send(False), two.send(False)) == (0, 0)
    assert (one.send(True), two.send(True)) == (2, 1)
    with pytest.raises(StopIteration) as end:
        two.send(False)
    assert end.value.value == 0


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that writes `;;;12`, and is right now and then."""
    folder = tmp_path_factory.mktemp("model") / "run"
    changes = {"data__options": {"digits": 1, "filler": 3}, "engine__max_tokens": 8, "steps": 1}
    run(folder, **changes, tiny__cold_start_steps=200)
    return folder


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def label(model: Path, out: Path, *words: str) -> int:
    return main(["label-steps", str(model), "--out", str(out), "--split", "sentence", *words])


@pytest.mark.parametrize("kind", ["hard", "soft", "first-error"])
def test_the_model_labels_its_own_answers(
    kind: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    assert label(model, out, "--labels", kind, "--prompts", "12", "--samples", "2") == 0
    rows, said = rows_of(out), capsys.readouterr().out
    assert 1 < len(rows) <= 24 and f"wrote {len(rows)} rows" in said
    for row in rows:
        assert set(row) == {"prompt", "completions", "labels"}
        assert len(row["completions"]) == len(row["labels"]) and row["prompt"].endswith("=")
        assert all(step.strip() for step in row["completions"])
        kinds = (float,) if kind == "soft" else (bool,)
        assert all(isinstance(x, kinds) and 0 <= x <= 1 for x in row["labels"])
        if kind == "first-error":  # nothing behind the first wrong step
            assert all(row["labels"][:-1])
    assert {x for row in rows for x in row["labels"]} >= ({0.0, 1.0} if kind == "soft" else {True})
    again = tmp_path / "again.jsonl"
    label(model, again, "--labels", kind, "--prompts", "12", "--samples", "2")
    assert rows_of(again) == rows  # the same seed, the same rows


@pytest.mark.parametrize("separator", ["\n", "\n\n"])
def test_rows_can_be_learned_from_whatever_stands_between_steps(separator: str) -> None:
    """A line that kept its end would hold the separator, or end in a part of it."""
    row = LabelledRow("3+1-4=", ["3+1=4\n", "4-4=0 \n\n", " so 0"], [True, True, False]).as_dict()
    assert row["completions"] == ["3+1=4", "4-4=0", "so 0"]
    found = stepwise(Task(0, row["prompt"], None, row), separator)
    assert found.steps == ("3+1=4", "4-4=0", "so 0") and found.labels == (1.0, 1.0, 0.0)


def test_answers_of_the_data_are_split_and_join_again(model: Path, tmp_path: Path) -> None:
    tasks = [
        {"prompt": f"{a}+4=", "answer": str(a + 4), "worked": f";;{a + 4 + a % 2}"}
        for a in range(8)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in tasks))
    out, settings = (
        tmp_path / "out.jsonl",
        (f"data.train={data}", "data.options={}", "eval.tasks=0"),
    )
    assert label(model, out, *settings, "--answers", "worked", "--labels", "soft") == 0
    by_prompt = {row["prompt"]: row for row in tasks}
    rows = rows_of(out)
    assert len(rows) == 8
    for row in rows:
        task = by_prompt[row["prompt"]]
        assert "".join(row["completions"]) == task["worked"]
        assert row["completions"][:2] == [";", ";"]
        assert row["labels"][-1] == float(task["worked"].endswith(f";{task['answer']}"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--answers", "worked"), "no text in column 'worked', which --answers names"),
        (("--answers", "solution", "--samples", "2"), "--samples 2 would be ignored"),
        (("--branches", "0"), "--branches 0 is too few"),
        (("--prompts", "0"), "--prompts 0 is too few"),
        (("recipe=sft",), "samples none"),
        (("engine.max_tokens=1", "--answers", "solution"), "No answer could be labelled"),
    ],
)
def test_requests_that_label_nothing_are_refused(
    words: tuple[str, ...], said: str, model: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert label(model, tmp_path / "rows.jsonl", *words) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "rows.jsonl").exists()


def test_places_that_cannot_be_written_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.jsonl").write_text("")
    for name, said in (
        ("rows.csv", "written as .jsonl"),
        ("there.jsonl", "exists already"),
        ("no/rows.jsonl", "there is no folder"),
    ):
        assert label(model, tmp_path / name) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("after", [False, True])
def test_killed_while_it_writes_there_are_all_rows_or_none(
    call: str, after: bool, model: Path, tmp_path: Path
) -> None:
    """And the next command leaves nothing else behind, nor touches what is another's."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    for folder in (whole, out):
        folder.mkdir()
    words = ("--prompts", "3", "--branches", "2")
    label(model, whole / "rows.jsonl", *words)
    others = out / ".rows.jsonl.mine.partial"
    others.write_text("of somebody else")

    child = os.fork()
    if child == 0:
        real = getattr(os, call)

        def dying(*args: object) -> None:
            if after:
                real(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(os, call, dying)
        label(model, out / "rows.jsonl", *words)
        os._exit(1)
    assert exit_code(child) == -signal.SIGKILL
    there = (out / "rows.jsonl").exists()
    assert not there or (call == "replace" and after)
    assert label(model, out / "rows.jsonl", *words) == (2 if there else 0)
    assert (out / "rows.jsonl").read_bytes() == (whole / "rows.jsonl").read_bytes()
    assert {path.name for path in out.iterdir()} == {"rows.jsonl", others.name}
