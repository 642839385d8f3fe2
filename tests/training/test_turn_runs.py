"""Whole runs whose policy is answered by an environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cold_start
import pyarrow.parquet as pq
import pytest
import runs
import torch
from cold_start import rows
from inline_worlds import InlineWorlds
from played import Adder, Quiet, Shuffled, answering

from groupwise.commands.probe import text
from groupwise.config import load
from groupwise.envs.environment import Observation
from groupwise.errors import ConfigError, WorldError
from groupwise.evaluate.evaluate import evaluate_path
from groupwise.prepare.recorded import groups_of
from groupwise.probing.advice import advise
from groupwise.probing.probe import ProbeRequest, probe
from groupwise.replay.bits import compare_rollouts
from groupwise.replay.recorded import read_step
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.rollouts import read
from groupwise.stages.checks import check_config
from groupwise.training.loop import train

PLAYED = {"turns__environment": "played", "turns__max": 4, "engine__max_tokens": 10}


class Soon(Adder):
    """Has heard enough after a few characters."""

    enough = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cold_start.make(tmp_path_factory.mktemp("cold") / "model", **PLAYED)


@pytest.fixture
def adder(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, Soon)


def metrics(folder: Path, step: int) -> dict[str, Any]:
    return next(line for line in runs.metrics(folder) if line["step"] == step)


@pytest.fixture(scope="module")
def played(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps with an environment that rewards every turn."""
    folder = tmp_path_factory.mktemp("played") / "run"
    with pytest.MonkeyPatch.context() as patch:
        answering(patch, Soon)
        cold_start.run_from(model, folder, steps=2, **PLAYED)
    return folder


# --- one turn -------------------------------------------------------------------------------------


def test_an_environment_that_says_nothing_changes_no_bit(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts, weights and evaluations are those of a run without one."""
    answering(monkeypatch, Quiet)
    one = {**PLAYED, "reward__parts": {"row": 1.0}, "steps": 2}
    without = {name: x for name, x in one.items() if not name.startswith("turns")}
    cold_start.run_from(model, tmp_path / "with", **one)
    cold_start.run_from(model, tmp_path / "without", **without)
    for step in (1, 2):
        found, plain = (
            pq.read_table(tmp_path / name / "rollouts" / f"step_{step}.parquet")
            for name in ("with", "without")
        )
        assert found.column("episode").null_count == 0
        gone = ["episode", "turn_seconds"]
        assert found.drop_columns(gone).equals(plain.drop_columns(gone))
        ours = metrics(tmp_path / "with", step)
        assert any(name.startswith("turns/") for name in ours)
        theirs = metrics(tmp_path / "without", step)
        assert {k: v for k, v in ours.items() if not k.startswith("turns/")} == theirs


# --- rewards --------------------------------------------------------------------------------------


def test_an_episode_is_worth_its_turns_and_its_end(played: Path) -> None:
    """The environment's reward is the run's, unless another is asked for; steps add up to it."""
    found = rows(played, 1)
    assert {row["episode"]["stop"] for row in found} >= {"done", "own_tokens"}
    for row in found:
        own = [turn for turn in row["turns"] if turn["role"] == "assistant"]
        facts = row["episode"]["turns"]
        assert len(own) == len(facts) and row["mask"] == [
            turn["role"] == "assistant"
            for turn in row["turns"]
            for _ in range(turn["start"], turn["end"])
        ]
        given = [turn["reward"] or 0.0 for turn in facts]
        assert row["reward"] == pytest.approx(sum(given) + 0.25) == row["episode"]["reward"]
        assert row["reward_parts"] == [("environment", row["reward"])]
        if len(own) == 1:
            assert row["reward_steps"] == []
            continue
        steps = row["reward_steps"]
        assert [step["reward"] for step in steps[:-1]] == pytest.approx(given[:-1])
        assert steps[-1]["reward"] == pytest.approx(given[-1] + 0.25)
        words = [message["content"] for message in json.loads(row["episode"]["messages"])]
        assert steps[0]["end"] == len(words[0]) + len("<end>")  # of the text, to a turn's end
        assert steps[-1]["end"] == len(row["text"])


GRADERS = """
def last(completion, finish, messages):
    "Sees the last words alone, and may ask for all of them."
    own = [message["content"] for message in messages if message["role"] == "assistant"]
    assert own[-1] == completion.removesuffix("<end>"), completion
    return len(messages) / 10
"""


def test_graders_read_the_last_words_and_the_environment_is_weighed(
    model: str, tmp_path: Path, adder: None
) -> None:
    (tmp_path / "mine.py").write_text(GRADERS)
    parts = {"environment": 2.0, f"{tmp_path}/mine.py:last": 1.0}
    cold_start.run_from(model, tmp_path / "run", steps=1, reward__parts=parts, **PLAYED)
    seen = set()
    for row in rows(tmp_path / "run", 1):
        messages = json.loads(row["episode"]["messages"])
        told = 2 * row["episode"]["reward"] + len([*messages]) / 10
        assert row["reward"] == pytest.approx(told) and row["grader_status"] == "ok"
        seen.add(len(messages))
        if row["reward_steps"]:
            first = row["reward_steps"][0]["reward"]
            assert first == pytest.approx(2 * row["episode"]["turns"][0]["reward"])
            assert sum(x["reward"] for x in row["reward_steps"]) == pytest.approx(row["reward"])
    assert len(seen) > 1


class Failing(Soon):
    """Fails in some rows, as soon as it is spoken to."""

    def reset(self, row: Mapping[str, Any]) -> Observation:
        self.broken = int(str(row["answer"])) % 3 == 0
        return super().reset(row)

    def step(self, text: str) -> Observation:
        if self.broken:
            raise OSError("the world is gone")
        return super().step(text)


def test_who_fails_has_no_reward_and_is_not_learned(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, Failing)
    kept = {**PLAYED, "reward__max_failed_share": 1.0, "steps": 1}
    cold_start.run_from(model, tmp_path / "run", **kept)
    broken = [r for r in rows(tmp_path / "run", 1) if r["episode"]["stop"] == "error"]
    assert broken
    for row in broken:
        assert row["reward"] is None and row["grader_status"] == "error" and row["correct"] is None
        assert "OSError: the world is gone" in row["grader_reason"]
        assert not any(row["coefficient"])
    told = metrics(tmp_path / "run", 1)
    share = len(broken) / 16
    assert told["turns/failed_share"] == told["turns/stop/error"] == share
    assert told["reward/failed_share"] == told["reward/missing_share"] == share
    graded = {**kept, "turns__left_out": [], "turns__truncated": ["error"]}
    cold_start.run_from(model, tmp_path / "graded", **graded)
    for row in rows(tmp_path / "graded", 1):
        cut = row["episode"]["stop"] == "error"
        assert row["reward"] is not None or row["episode"]["reward"] is None
        assert (row["finish"] == "length") == cut


# --- what it leaves behind ------------------------------------------------------------------------


def test_metrics_of_turns(played: Path) -> None:
    told, found = metrics(played, 1), rows(played, 1)
    turns = [len(row["episode"]["turns"]) for row in found]
    assert told["turns/mean"] == sum(turns) / len(found)
    calls = [call for row in found for turn in row["episode"]["turns"] for call in turn["calls"]]
    assert told["turns/calls"] == len(calls) / len(found)
    failed = sum(call["status"] == "failed" for call in calls) / len(calls)
    assert told["turns/failed_call_share"] == failed
    foreign = sum(not own for row in found for own in row["mask"])
    assert told["turns/foreign_tokens"] == foreign / len(found)
    assert told["length/sampled_mean"] == sum(sum(row["mask"]) for row in found) / len(found)
    stops = {k.rpartition("/")[2]: v for k, v in told.items() if k.startswith("turns/stop/")}
    assert sum(stops.values()) == pytest.approx(1.0)
    rewards = [row["reward"] for row, n in zip(found, turns, strict=True) if n == 2]
    assert told["turns/reward/2"] == pytest.approx(sum(rewards) / len(rewards))
    cut = sum(row["finish"] == "length" for row in found) / len(found)
    assert told["length/truncated_share"] == cut > 0


def test_rollouts_come_back_as_they_were_and_are_replayed_without_the_environment(
    played: Path,
) -> None:
    table = read(played / "rollouts" / "step_1.parquet")
    back = [r for group in groups_of(table) for r in group]
    assert all(r.completion.episode is not None for r in back)
    config = load(played / "config.toml")
    record = read_step(RunFolder(played), 1, config.recipe)
    own = [r.completion.mask_T for group in record.groups for r in group]
    for row, mask_T in enumerate(own):
        width = len(record.mask_NT[row]) if mask_T is None else len(mask_T)
        assert mask_T is None or torch.equal(record.mask_NT[row][:width], mask_T)


# --- the same again -------------------------------------------------------------------------------


def test_slow_tools_leave_the_same_run(
    played: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Shuffled):
        def __init__(self, make: Any) -> None:
            super().__init__(make, seed=5, hold=0.7)

    answering(monkeypatch, Soon, Late)
    cold_start.run_from(model, tmp_path / "run", steps=2, **PLAYED)
    same_as(played, tmp_path / "run")


def same_as(first: Path, second: Path) -> None:
    for step in (1, 2):
        paths = [folder / "rollouts" / f"step_{step}.parquet" for folder in (first, second)]
        assert compare_rollouts(step, *paths) is None
    one, other = (runs.left_behind(folder) for folder in (first, second))
    for found in (one, other):
        for name in [name for name in found if name.startswith("rollouts/")]:
            found.pop(name)  # with seconds in them
    assert one == other


class Deadly(Soon):
    """Ends the process within an episode of the second step."""

    left = 0

    def step(self, text: str) -> Observation:
        type(self).left -= 1
        if not type(self).left:
            os._exit(9)
        return super().step(text)


def test_a_run_killed_within_an_episode_goes_on_to_the_same_bits(
    played: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step has some 35 turns, and the evaluation before it 20 more."""
    folder = tmp_path / "run"
    child = os.fork()
    if child == 0:
        answering(monkeypatch, Deadly)
        Deadly.left = 70
        cold_start.run_from(model, folder, steps=2, **PLAYED)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert RunFolder(folder).durable_step() == 1
    answering(monkeypatch, Soon)
    cold_start.run_from(model, folder, steps=2, **PLAYED)
    same_as(played, folder)


# --- who else samples -----------------------------------------------------------------------------


def test_evaluation_and_probe_play_too(
    played: Path, model: str, tmp_path: Path, adder: None
) -> None:
    config = load(played / "config.toml")
    found = evaluate_path(played, config)
    summary = json.loads((played / "summary.json").read_text())
    assert found.reward == summary["reward_after"]
    assert "[" in found.examples[0]["completion"]
    seen = probe(config, ProbeRequest(prompts=2, samples=2))
    played_rows = [r for each in seen.rollouts for group in each.groups for r in group]
    assert len(played_rows) == 4 and all(r.completion.episode for r in played_rows)
    (figures,) = seen.findings
    ended = [r.completion.episode.stop for r in played_rows if r.completion.episode]
    assert figures.stops == {stop: ended.count(stop) / 4 for stop in figures.stops}
    assert sum(figures.stops.values()) == 1 and figures.turns == sum(
        len(r.completion.own_turns) for r in played_rows
    ) / 4  # fmt: skip
    told = text(seen, advise(seen), 100)
    assert f"episodes of {figures.turns:.1f} turns" in told
    assert "of the groups would teach something" in told and f"{ended[0]} " in told


def test_a_baseline_of_greedy_answers_is_played(model: str, tmp_path: Path, adder: None) -> None:
    cold_start.run_from(model, tmp_path / "run", steps=1, recipe="remax", group_size=1, **PLAYED)
    greedy = [row for row in rows(tmp_path / "run", 1) if row["sample"] == -1]
    assert greedy and all(row["episode"] is not None for row in greedy)


def test_environments_are_closed_with_the_run(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []

    class Watched(InlineWorlds):
        def close(self) -> None:
            closed.append(len(self.there))
            super().close()

    answering(monkeypatch, Soon, Watched)
    cold_start.run_from(model, tmp_path / "run", steps=1, **PLAYED)
    assert closed == [0]


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes, words", [
    ({"turns.max": 3}, "turns.max=3 would be ignored by dr_grpo: nothing answers the policy"),
    ({"turns.timeout": 3.0}, "turns.timeout=3.0 would be ignored"),
    ({"reward.parts": {"environment": 1.0}}, "reward.parts names environment, and nothing"),
    ({"turns.environment": "guess", "recipe": "dpo"}, "turns.environment=guess with recipe dpo"),
    ({"turns.tools": ["calculator"], "recipe": "sft"}, "leads no conversation"),
    ({"turns.environment": "guess", "recipe": "vineppo"}, "goes on from within answers"),
    ({"turns.environment": "guess", "recipe": "dr_grpo", "engine.min_tokens": 2},
     "engine.min_tokens=2 is for an answer of one turn"),
    ({"turns.environment": "guess", "turns.turn_tokens": 100}, "more than engine.max_tokens"),
    ({"turns.environment": "guess", "recipe": "tis", "train.lag": 1}, "answered in one turn"),
    ({"turns.tools": ["calculator"], "engine.servers": 1}, "engine.servers=1: prompts that are"),
    ({"turns.environment": "guess", "turns.left_out": ["context"]}, "both name context"),
    ({"turns.environment": "guess", "turns.timeout": 700.0}, "more than turns.episode_timeout"),
    ({"turns.environment": "guess", "turns.template": "{role}"}, "no text with {role} and {text}"),
    ({"turns.tools": ["calculator"], "turns.max": 1}, "would never read what a tool answers"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(load({"recipe": "dr_grpo", **changes}))
    assert words in str(caught.value)


def test_the_reward_of_an_environment_is_the_default_with_one() -> None:
    assert load({"turns.environment": "guess"}).reward.parts == {"environment": 1.0}
    assert load({"turns.tools": ["calculator"]}).reward.parts == {"row": 1.0}
    asked = {"turns.environment": "guess", "reward.parts": {"math": 1.0}}
    assert load(asked).reward.parts == {"math": 1.0}


def test_an_unknown_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"turns\.left_out='tired' is unknown"):
        load({"turns.environment": "guess", "turns.left_out": ["tired"]})


@pytest.mark.parametrize("named", ["nowhere.py:Env", "guesss"])
def test_an_environment_is_tried_before_a_model_is_loaded(named: str, tmp_path: Path) -> None:
    config = load(**{"turns.environment": named, "data.train": "guess", "model.path": "nowhere"})
    with pytest.raises(WorldError, match=named.partition(":")[0]):
        train(config, tmp_path / "run")
