"""Every task of reasoning-gym: made by name, the same for a seed, judged by its own scorer."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from runs import metrics, run

from groupwise import load_config
from groupwise.commands import init
from groupwise.config import Data
from groupwise.config.fields import SourceSettings
from groupwise.data import LoadedTasks, gym, load
from groupwise.data.on_disk import packed, unpacked
from groupwise.errors import DataError, RewardError
from groupwise.graders.gym import GymScorer, extracted
from groupwise.graders.gym_worker import judge
from groupwise.graders.rubric import Grader, check
from groupwise.records import Task

pytest.importorskip("reasoning_gym")

SHARED = Path(__file__).resolve().parents[3] / "shared/data/reasoning_gym/test.jsonl.gz"
SLOW = {"knight_swap", "futoshiki", "arc_agi"}  # more than half a second for two
ALL = sorted(set(gym.names()) - {"composite"})
SILENT = {"boxnet", "rush_hour"}  # no answer, not even an example


def loaded(train: Any, size: int = 4, held_out: int = 0, **changes: Any) -> LoadedTasks:
    return load(Data(train=train, size=size, **changes), seed=0, held_out=held_out)


def grades(tasks: Any, *texts: str) -> list[float | None]:
    samples = [(task, text, (), "eos") for task, text in zip(tasks, texts, strict=True)]
    return [grade.reward for grade in Grader({"row": 1.0}).grade(samples)]


def test_there_are_105() -> None:
    assert len(ALL) == 105


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in ALL]
)
def test_a_task(name: str) -> None:
    """Gold is right, nothing and nonsense are not, and a seed gives the same again."""
    tasks, notes = gym.generate(name, 2, 7, {})
    assert tasks and gym.generate(name, 2, 7, {})[0] == tasks
    assert all(unpacked(packed(task)) == task for task in tasks)  # can be streamed
    for task in tasks:
        assert task.grader == "reasoning_gym" and task.columns["task"] == name
        assert (task.answer is None) == (name in SILENT)
        nothing, nonsense = grades([task] * 2, "<answer> </answer>", "<answer>]x(</answer>")
        assert nothing == 0.0 and nonsense is not None
        assert (nonsense < 0.5) == (name != "game_of_life_halting")  # refused, see below
        if task.answer is not None:
            gold = f"<think>it may be <answer>7</answer></think>\n<answer>{task.answer}</answer>"
            assert grades([task], gold) == [1.0]
            row = json.loads(json.dumps(dict(task.columns), default=str))  # as a file has it
            again = Task(0, task.prompt, task.answer, row, grader=task.grader)
            assert grades([again], gold) == [1.0]
    assert bool(notes) == (name in SILENT)
    if notes:
        assert f"reasoning_gym:{name} gives no answers" in notes[0]


def test_tasks_that_give_no_answer_are_the_known_ones() -> None:
    assert set(gym.UNANSWERED) == {
        "boxnet",
        "graph_color",
        "propositional_logic",
        "rubiks_cube",
        "rush_hour",
    }
    for name in gym.UNANSWERED:
        assert gym.make_dataset(name, {"size": 1, "seed": 0})[0]["answer"] is None


def test_a_source_by_name() -> None:
    found = loaded("reasoning_gym:chain_sum", size=20, held_out=5)
    assert len(found.train) == 15 and len(found.eval) == 5  # held out as of any generator
    assert not {t.prompt for t in found.train} & {t.prompt for t in found.eval}
    assert check(Grader({"row": 1.0}), found.train) == []
    options = {"min_terms": 6, "max_terms": 6, "seed": 5}
    (task,) = loaded("reasoning_gym:chain_sum", size=1, held_out=0, options=options).train
    assert task.columns["metadata"]["num_terms"] == 6
    expected = gym.make_dataset("chain_sum", {**options, "size": 1})[0]
    assert (task.prompt, task.answer) == (expected["question"], expected["answer"])
    few = loaded("reasoning_gym:chain_sum", size=400, options={"min_terms": 2, "max_terms": 2,
        "min_digits": 1, "max_digits": 1})  # fmt: skip
    assert len({t.prompt for t in few.train}) == len(few.train) < 400
    assert any("different prompts, 400 were asked for" in note for note in few.notes)


def test_scorers_read_the_options_of_their_tasks() -> None:
    """decimal_arithmetic rounds to as many places as its tasks have: the default has others."""
    options = {"max_num_decimal_places": 6, "min_num_decimal_places": 6}
    tasks, _ = gym.generate("decimal_arithmetic", 5, 0, options)
    assert grades(tasks, *[str(task.answer) for task in tasks]) == [1.0] * 5
    near = [f"{float(task.answer) + 1e-3:.6f}" for task in tasks]  # right to two places only
    assert all(score is not None and score < 1 for score in grades(tasks, *near))


def test_mixtures_of_tasks_by_weight() -> None:
    mixed = {"reasoning_gym:chain_sum": 3.0, "reasoning_gym:leg_counting": 1.0}
    found = loaded(mixed, holdout_share=0.0)
    assert found.weights == {"chain_sum": 3.0, "leg_counting": 1.0}
    assert {t.source for t in found.train} == {"chain_sum", "leg_counting"}
    specs = [
        {"name": "chain_sum", "weight": 3.0, "config": {"min_terms": 5, "max_terms": 5}},
        {"name": "leg_counting"},
    ]
    tasks, _ = gym.generate("composite", 60, 0, {"datasets": specs})
    counts = {name: sum(t.columns["task"] == name for t in tasks) for name in (
        "chain_sum", "leg_counting")}  # fmt: skip
    assert counts["chain_sum"] > 1.5 * counts["leg_counting"] > 0
    sums = [t for t in tasks if t.columns["task"] == "chain_sum"]
    assert all(t.columns["metadata"]["num_terms"] == 5 for t in sums)
    assert set(grades(tasks, *[str(t.answer) for t in tasks])) == {1.0}


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("chain_sun", {}, "no task 'chain_sun'. Did you mean 'chain_sum'"),
        ("chain_sum", {"min_term": 1}, "no option 'min_term'. Did you mean 'min_terms'"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "with the options"),
        ("composite", {}, "needs datasets = "),
        ("composite", {"datasets": [{"nme": "chain_sum"}]}, "needs datasets = "),
        ("composite", {"datasets": [{"name": "chain_sum", "config": {"a": 1}}]}, "no option 'a'"),
    ],
)
def test_what_is_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words.replace("(", r"\(")):
        loaded(f"reasoning_gym:{name}", options=options)


def test_a_scorer_that_takes_anything_is_refused() -> None:
    """game_of_life_halting compares bool(text) with bool("False"), which is True."""
    with pytest.raises(DataError, match="full marks where it is wrong"):
        loaded("reasoning_gym:game_of_life_halting")
    with pytest.raises(DataError, match="gives '0' full marks"):  # it compares first digits
        loaded("reasoning_gym:coin_flip", size=20)
    specs = [{"name": "chain_sum"}, {"name": "game_of_life_halting"}]
    with pytest.raises(DataError, match="full marks where it is wrong"):
        loaded("reasoning_gym:composite", size=20, options={"datasets": specs})
    source = {"reasoning_gym:game_of_life_halting": SourceSettings(grader="exact")}
    tasks = loaded(source).train
    assert grades(tasks, *[t.answer for t in tasks]) == [1.0] * len(tasks)
    assert grades(tasks, *["yes" for _ in tasks]) == [0.0] * len(tasks)


def test_what_takes_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, *range(0, 1000, 12)])  # 12 seconds a task
    monkeypatch.setattr(gym.time, "monotonic", lambda: next(clock))
    with pytest.warns(UserWarning, match="50 tasks take about 10 minutes"):
        gym.generate("chain_sum", 50, 0, {})


def test_names_that_are_nearly_right() -> None:
    with pytest.raises(DataError, match="Write reasoning_gym:TASK"):
        loaded("reasoning_gym")
    with pytest.raises(DataError, match="Did you mean 'reasoning_gym'"):
        loaded("reasoning_gim:chain_sum")


def test_without_the_package_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    gym._library.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    try:
        with pytest.raises(DataError, match=r"pip install .*reasoning-gym"):
            loaded("reasoning_gym:chain_sum")
    finally:
        gym._library.cache_clear()


def test_which_part_of_a_completion_is_the_answer() -> None:
    assert extracted("<answer> 7 </answer>") == "7"
    assert extracted("<answer>6</answer> no: <answer>7</answer>.") == "7"
    assert extracted("<answer>6<answer>7</answer>") == "7"
    assert extracted("7") == "7" and extracted("<answer>7") == "<answer>7"
    assert extracted("<answer>" * 50_000) != ""  # in linear time
    task = gym.generate("chain_sum", 1, 0, {})[0][0]
    inside = f"<think><answer>{task.answer}</answer></think>I don't know"
    assert grades([task] * 2, inside, f"<think>{task.answer}") == [0.0, pytest.approx(0, abs=0.5)]


def test_a_scorer_that_raises_has_met_no_answer() -> None:
    task = gym.generate("prime_factorization", 1, 0, {})[0][0]
    (grade,) = Grader({"row": 1.0}).grade([(task, "seven", (), "eos")])
    assert (grade.reward, grade.status, grade.correct) == (0.0, "ok", False)
    (mark,) = GymScorer(()).grade([_sample(task, "seven")])
    assert "prime_factorization raised ValueError" in mark.reason
    odd = Task(0, "q", "1", {"metadata": {"source_dataset": "none"}})
    (mark,) = GymScorer(()).grade([_sample(odd, "1")])
    assert mark.status == "error" and "no task 'none'" in mark.reason


def _sample(task: Task, text: str) -> Any:
    from groupwise.graders.parts import SampleToGrade

    return SampleToGrade(task, text, (), "eos")


def test_knights_and_knaves() -> None:
    """Its scorer gives a part for names and roles that stand there: an echo is worth nothing."""
    tasks, _ = gym.generate("knights_knaves", 4, 1, {})
    for task in tasks:
        gold, terms = str(task.answer), task.columns["metadata"]["knight_knave_terms"]
        good, bad = terms["knight"].lower(), terms["knave"].lower()
        swapped = gold.replace(good, "?").replace(bad, good).replace("?", bad)
        right = [gold, f"<think>{swapped}</think>{gold.upper()}"]
        wrong = [swapped, f"{gold} {swapped}", str(task.prompt), f" {task.prompt}\n", good]
        wrong += [f"<think>{gold}</think>", f"<think>{gold}"]
        given = grades([task] * 9, *right, *wrong)
        assert given == [1.0, 1.0, *[0.0] * 7]


def test_rows_of_a_file_can_name_it(tmp_path: Path) -> None:
    task = gym.generate("leg_counting", 1, 0, {})[0][0]
    row = {"prompt": task.prompt, "answer": task.answer, "metadata": task.columns["metadata"]}
    (tmp_path / "x.jsonl").write_text(json.dumps({**row, "by": "reasoning_gym"}) + "\n")
    (found,) = loaded(f"{tmp_path}/x.jsonl", grader_key="by").train
    assert grades([found], f"<answer>{task.answer}</answer>") == [1.0]
    with pytest.raises(RewardError, match="no column metadata with source_dataset"):
        check(Grader({"reasoning_gym": 1.0}), [Task(0, "q", "1")])


def made_rows(*names: str) -> list[dict[str, Any]]:
    """As the package makes them."""
    return [
        dict(entry) for name in names for entry in gym.make_dataset(name, {"size": 3, "seed": 5})
    ]


def as_lines(rows: list[dict[str, Any]], file: Path) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_table(rows: list[dict[str, Any]], file: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = [{**row, "metadata": json.dumps(row["metadata"])} for row in rows]
    pq.write_table(pa.Table.from_pylist(flat), file)


@pytest.mark.parametrize(("name", "write"), [("x.jsonl", as_lines), ("x.parquet", as_table)])
def test_rows_that_the_package_made_are_a_named_set(name: str, write: Any, tmp_path: Path) -> None:
    rows = made_rows("chain_sum", "knights_knaves")
    write(rows, tmp_path / name)
    tasks = loaded(f"reasoning_gym:{tmp_path}/{name}").train
    assert [task.prompt for task in tasks] == [row["question"] for row in rows]
    assert [task.columns["task"] for task in tasks] == ["chain_sum"] * 3 + ["knights_knaves"] * 3
    assert grades(tasks, *(f"<answer>{row['answer']}</answer>" for row in rows)) == [1.0] * 6
    assert grades(tasks, *["<answer>]x(</answer>"] * 6) == [pytest.approx(0, abs=0.02)] * 6


def test_rows_whose_scorer_is_easily_fooled_are_left_out_of_a_file(tmp_path: Path) -> None:
    as_lines(made_rows("coin_flip", "chain_sum"), tmp_path / "x.jsonl")
    found = loaded(f"reasoning_gym:{tmp_path}/x.jsonl")
    assert {task.columns["task"] for task in found.train} == {"chain_sum"}
    [said] = [note for note in found.notes if "left out" in note]
    assert said.startswith("3 rows of reasoning_gym:coin_flip") and "'0' full marks" in said
    own = {f"reasoning_gym:{tmp_path}/x.jsonl": SourceSettings(grader="exact")}
    assert len(loaded(own).train) == 6  # another grader judges them


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (None, "does not say in 'source_dataset'"),
        ({"difficulty": 1}, "does not say in 'source_dataset'"),
        ("{", "'metadata' is no JSON"),
        ([1], "'metadata' is no table"),
        ({"source_dataset": "chain_sums"}, "no task 'chain_sums'. Did you mean 'chain_sum'"),
    ],
)
def test_a_row_must_say_which_task_it_is(metadata: Any, said: str, tmp_path: Path) -> None:
    as_lines([{"question": "?", "answer": "1", "metadata": metadata}], tmp_path / "x.jsonl")
    with pytest.raises(DataError, match=re.escape(said)):
        loaded(f"reasoning_gym:{tmp_path}/x.jsonl")


def test_options_that_a_row_was_made_with_reach_its_scorer(tmp_path: Path) -> None:
    rows = [{**row, "task_options": {"min_terms": 2}} for row in made_rows("chain_sum")]
    as_lines(rows, tmp_path / "x.jsonl")
    (first, *_) = loaded(f"reasoning_gym:{tmp_path}/x.jsonl").train
    assert first.columns["task_options"] == {"min_terms": 2}


@pytest.mark.skipif(
    not SHARED.is_file(), reason="no public data sets: reasoning_gym in ../shared/data"
)
def test_a_real_file_of_42_tasks() -> None:
    found = loaded(f"reasoning_gym:{SHARED}")
    assert len({task.columns["task"] for task in found.train}) == 41  # coin_flip is not
    assert len(found.train) > 950
    gold = grades(found.train, *(f"<answer>{task.answer}</answer>" for task in found.train))
    assert gold == [1.0] * len(gold)


def test_a_first_configuration(tmp_path: Path) -> None:
    answers = {"model": "tiny", "data": "reasoning_gym:chain_sum", "device": "cpu"}
    for key in ("turns", "reward"):
        answers[key] = init.default(key, answers)
    assert init.missing(answers) == [] and answers["reward"] == "row"
    (tmp_path / "c.toml").write_text(init.configuration(answers))
    config = load_config(tmp_path / "c.toml")
    assert config.data.train == answers["data"] and config.data.holds_out
    named = {**answers, "data": "gsm8k:none.jsonl"}
    assert init.missing(named) == ["none.jsonl"] and init.default("reward", named) == "row"


def test_the_embedded_model_learns_such_a_task(tmp_path: Path) -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    run(
        tmp_path / "run",
        data__train="reasoning_gym:chain_sum",
        data__options=options,
        data__size=60,
        steps=2,
    )
    last = metrics(tmp_path / "run")[-1]
    assert 0 <= last["reward/part/reasoning_gym"] <= 1 and "eval/accuracy" in last


@pytest.mark.parametrize(
    ("task", "text", "value", "status", "words"),
    [
        ("polynomial_multiplication", "factorial(10**8)", 0.0, "ok", "more than 1 s of the proc"),
        ("binary_matrix", "__import__('os')._exit(3)", 0.0, "ok", "died"),
        ("binary_matrix", "__import__('time').sleep(60)", 0.0, "ok", "longer than 5 s"),
    ],
)
def test_a_scorer_that_hangs_or_dies_takes_nobody_along(
    task: str,
    text: str,
    value: float | None,
    status: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some evaluate the text: that must neither stop nor end a run, and is worth 0."""
    costs = text.startswith("factorial")
    monkeypatch.setattr("groupwise.graders.pool.HANGS", 60 if costs else 5)
    (hard,) = gym.generate(task, 1, 0, {})[0]
    (easy,) = gym.generate("chain_sum", 1, 0, {})[0]
    scorer = GymScorer((), timeout=1.0)
    GymScorer(()).grade([_sample(easy, "1")])  # starting up is not the scorer's time
    start = time.monotonic()
    marks = scorer.grade([_sample(hard, text), _sample(easy, f"<answer>{easy.answer}</answer>")])
    assert costs or time.monotonic() - start < 30.0
    again = scorer.grade([_sample(easy, f"<answer>{easy.answer}</answer>")] * 8)
    assert [mark.value for mark in again] == [1.0] * 8  # a new worker has the package at once
    assert [(mark.value, mark.status) for mark in marks] == [(value, status), (1.0, "ok")]
    assert words in marks[0].reason and task in marks[0].reason


def test_a_score_that_is_no_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym, "score", lambda *_: float("nan"))
    assert judge("chain_sum", {}, "1", {})[:2] == (None, "error")
