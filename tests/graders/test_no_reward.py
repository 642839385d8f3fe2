"""Rewards that say nothing: refused before a run, stopped in one, called sick after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cold_start
import pytest
from cold_start import events, latest
from runs import metrics

from groupwise.common import progress
from groupwise.config import load
from groupwise.errors import GroupwiseError, RewardError
from groupwise.evaluate.evaluate import evaluate_path
from groupwise.graders.functions import TRIES
from groupwise.graders.rubric import Grader, check
from groupwise.prepare.setup import check_data
from groupwise.records import Task
from groupwise.training import loop
from groupwise.watch.diagnose import diagnose
from groupwise.watch.display import summary_lines
from groupwise.watch.health import Health

FUNCTIONS = """
import time
from pathlib import Path
HERE = Path(__file__).parent
CALLS = HERE / "calls"
def forgets(completion, answer): float(completion == answer)
def forgets_batch(completions, answer, **_): [float(c == a) for c, a in zip(completions, answer)]
def quiet(completions, **_): return [None] * len(completions)
def empty(completion): return {"reward": None}
def seldom(completion, level): return 1.0 if level == 30 else None
def sound(completion, answer): return float(completion.removesuffix("<end>") == answer)
def stepwise(completion):
    return {"reward": 1.0, "steps": [(len(completion), 1.0)] if completion else []}
def moody(completion, answer):
    return None if (HERE / "broken").exists() else sound(completion, answer)
def failing(completion, answer):
    if (HERE / "broken").exists(): raise ValueError("the judge is out")
    return sound(completion, answer)
def hangs(completion):
    with CALLS.open("a") as file: file.write("called\\n")
    time.sleep(600)
def some_hang(completion):
    if completion == "hang": time.sleep(600)
    return float(len(completion))
"""
TASKS = [Task(n, f"{n}+1=", str(n + 1), {"level": n}) for n in range(40)]


@pytest.fixture
def part(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return lambda name: f"{tmp_path}/mine.py:{name}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cold_start.make(tmp_path_factory.mktemp("model") / "cold")


# --- before a run -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["forgets", "quiet", "empty"])
def test_a_reward_that_is_none_for_all_is_refused(name: str, part: Callable[[str], str]) -> None:
    with pytest.raises(RewardError) as refused:
        check(Grader({part(name): 1.0}), TASKS)
    for words in ("The reward says nothing", f"mine.py:{name} returned None", "did you forget ret"):
        assert words in str(refused.value)


def test_a_batch_function_that_forgets_is_asked_the_same(part: Callable[[str], str]) -> None:
    with pytest.raises(RewardError, match=r"returned None .* instead of a list: did you forget"):
        check(Grader({part("forgets_batch"): 1.0}), TASKS)


def test_a_part_of_weight_0_does_not_make_up_for_it(part: Callable[[str], str]) -> None:
    parts = {part("forgets"): 1.0, part("sound"): 0.0}
    with pytest.raises(RewardError, match=r"mine.py:sound has weight 0 and only watches"):
        check(Grader(parts), TASKS)


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_one_part_of_several_that_says_nothing_is_told_of(
    weight: float, part: Callable[[str], str]
) -> None:
    notes = check(Grader({part("sound"): 1.0, part("forgets"): weight}), TASKS)
    (note,) = [note for note in notes if "forgets" in note]
    assert note.startswith("warning: ") and "it is idle" in note and "did you forget" in note


def test_a_reward_for_few_rows_is_looked_for_among_more(part: Callable[[str], str]) -> None:
    """Of the first four rows that are tried none is its own."""
    assert not any("idle" in note for note in check(Grader({part("seldom"): 1.0}), TASKS))


def test_a_run_is_refused_before_its_model_is_looked_for(
    part: Callable[[str], str], tmp_path: Path
) -> None:
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(RewardError, match="did you forget return"):
        cold_start.run_from(nowhere, tmp_path / "run", reward__parts={part("forgets"): 1.0})


def test_evaluation_data_that_no_part_grades_is_named(part: Callable[[str], str]) -> None:
    config = load({"reward.parts": {part("forgets"): 1.0}, "eval.tasks": 8})
    with pytest.raises(RewardError, match=r"rows of data.train"):
        check_data(config)
    with pytest.raises(RewardError, match=r"rows of data.eval"):
        check(Grader(config.reward.parts), TASKS, data="data.eval")


# --- steps --------------------------------------------------------------------------------------


def test_a_recipe_for_steps_needs_a_reward_that_gives_them(part: Callable[[str], str]) -> None:
    config = {"recipe": "grpo_process", "eval.tasks": 8, "data.options": {"digits": 1}}
    with pytest.raises(RewardError) as refused:
        check_data(load({**config, "reward.parts": {"number": 1.0, part("sound"): 1.0}}))
    for words in ("a reward for each step", "'steps': [(end, reward), ...]", "prm(path="):
        assert words in str(refused.value)
    check_data(load({**config, "reward.parts": {part("stepwise"): 1.0}}))
    check_data(load({**config, "reward.parts": {"number": 1.0}}), learns=False)  # to evaluate


def test_a_recipe_that_reads_what_is_correct_needs_a_part_that_says_so() -> None:
    with pytest.raises(RewardError, match=r"no part of reward.parts .length. says so"):
        check(Grader({"length": 1.0}), TASKS, streams=["correct_N"])
    check(Grader({"number": 1.0}), TASKS, streams=["correct_N"])


# --- a reward that hangs ------------------------------------------------------------------------


class Eager(progress.Watcher):
    """Shows a phase as soon as it begins."""

    def begin(self, phase: progress.Phase) -> None:
        super().begin(phase)
        self.look()


def test_a_reward_that_hangs_costs_one_limit_and_not_in_silence(
    part: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "FIRST_AFTER", 0.0)
    told: list[str] = []
    grader = Grader({part("hangs"): 1.0}, timeout=0.5)
    with (
        Eager(told.append, live=False) as watcher,
        watcher.watching(),
        pytest.raises(
            RewardError, match=r"for the gold .*took longer than 0.5 s and was stopped\."
        ),
    ):
        check(grader, TASKS)
    assert (tmp_path / "calls").read_text().split() == ["called"]
    assert "mine.py:hangs on the gold answer of row 0, 0:0" in told[0]
    assert "at most 0:0" in told[0] and "more (reward.timeout = 0.5)" in told[0]


def test_good_samples_behind_several_that_hang_are_graded(part: Callable[[str], str]) -> None:
    """Each that hangs takes the process with it; those behind it are asked again."""
    texts = ["hang", "a", "hang", "ab", "hang", "abc", "hang", "abcd"]
    grades = Grader({part("some_hang"): 1.0}, timeout=3.0).grade(
        [(TASKS[0], text, (), "eos") for text in texts]
    )
    assert [g.reward for g in grades] == [None, 1.0, None, 2.0, None, 3.0, None, 4.0]


def test_when_all_hang_the_rest_is_not_waited_for(
    part: Callable[[str], str], tmp_path: Path
) -> None:
    grades = Grader({part("hangs"): 1.0}, timeout=0.5).grade(
        [(TASKS[0], "x", (), "eos") for _ in range(20)]
    )
    assert {g.status for g in grades} == {"timeout"}
    assert [("was not called" in g.reason) for g in grades] == [False] * TRIES + [True] * (
        20 - TRIES
    )
    assert len((tmp_path / "calls").read_text().split()) == TRIES


# --- in a run -----------------------------------------------------------------------------------


@pytest.fixture
def stopped(
    part: Callable[[str], str], model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> dict[str, Any]:
    """A run of which the reward falls silent after the check."""
    name, share = request.param
    changes = {
        "reward__parts": {part(name): 1.0}, "reward__max_failed_share": share, "steps": 6,
        "eval__tasks": 0, "checkpoint__every_steps": 0,
    }  # fmt: skip
    return {"why": breaks_after_the_check(model, tmp_path, changes), "changes": changes}


def breaks_after_the_check(model: str, folder: Path, changes: dict[str, Any]) -> str:
    """Why the run stops."""
    begin, broken = loop.begin, folder / "broken"
    broken.unlink(missing_ok=True)

    def then_it_breaks(run: Any) -> Any:
        broken.touch()
        return begin(run)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(GroupwiseError) as error:
        patch.setattr(loop, "begin", then_it_breaks)
        cold_start.run_from(model, folder / "run", **changes)
    return str(error.value)


@pytest.mark.parametrize("stopped", [("moody", 0.05), ("failing", 1.0)], indirect=True)
def test_a_run_without_any_reward_stops_and_is_sick(
    stopped: dict[str, Any], model: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert "No answer has had a reward for 3 steps in a row" in stopped["why"]
    assert "did you forget return?" in stopped["why"]
    assert latest(run) == "step_2" and len(metrics(run)) == 3
    assert all(line["reward/missing_share"] == 1.0 for line in metrics(run)[1:])
    assert any("none of the 16 answers" in event["text"] for event in events(run, "reward"))
    found = diagnose(run)
    assert "no reward" in [finding.rule.name for finding in found.sick]
    assert found.samples and all(sample["reward"] is None for sample in found.samples)
    # Mended, the same command goes on to the end.
    (tmp_path / "broken").unlink()
    cold_start.run_from(model, run, **stopped["changes"])
    assert metrics(run)[-1]["step"] == 6 and metrics(run)[-1]["reward/missing_share"] == 0.0


@pytest.mark.parametrize("stopped", [("moody", 0.05)], indirect=True)
def test_the_count_survives_the_process(
    stopped: dict[str, Any], model: str, tmp_path: Path
) -> None:
    """Started again while it is still broken, it does not go on for three steps more."""
    why = breaks_after_the_check(model, tmp_path, stopped["changes"])
    assert "for 3 steps in a row" in why and latest(tmp_path / "run") == "step_2"


def test_an_evaluation_without_rewards_has_no_accuracy(
    part: Callable[[str], str], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = cold_start.configured(model, reward__parts={part("moody"): 1.0})
    prepare_tasks = evaluate_path.__globals__["set_up"]

    def then_it_breaks(*args: Any, **options: Any) -> Any:
        setup = prepare_tasks(*args, **options)
        (tmp_path / "broken").touch()
        return setup

    monkeypatch.setitem(evaluate_path.__globals__, "set_up", then_it_breaks)
    found = evaluate_path(model, config)
    assert (found.accuracy, found.reward) == (None, None)
    assert "eval/accuracy" not in found.metrics()
    summary = {"accuracy_before": None, "accuracy_after": found.accuracy, "steps": 1, "seconds": 1}
    assert "held-out accuracy n/a -> n/a" in summary_lines(summary)


# --- afterwards ---------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["reward/missing_share", "reward/ungraded_share"])
def test_older_runs_are_judged_too(metric: str) -> None:
    """Runs from before there was such a rule recorded only the second."""
    found = Health().see_all([{"step": n, metric: 1.0} for n in range(1, 3)])
    assert [finding.rule.name for finding in found] == ["no reward"]
    one = Health().see_all([{"step": n, metric: float(n == 5)} for n in range(1, 9)])
    assert one == []
