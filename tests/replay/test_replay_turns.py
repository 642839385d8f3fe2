"""Runs with environments, repeated: from what was recorded of these, or with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cold_start
import pytest
from played import Adder, answering, says

from groupwise.cli import main
from groupwise.envs.environment import Environment, Observation
from groupwise.envs.recorded_worlds import first_difference, outcome_of
from groupwise.records import Episode, TurnFacts
from groupwise.replay.verify import verify

PLAYED = {"turns__environment": "played", "turns__max": 4, "engine__max_tokens": 10,
          "reward__max_failed_share": 1.0}  # fmt: skip


class Moody(Adder):
    """Has rewards that do not add up exactly, and breaks in every way that there is."""

    enough = 3

    def reset(self, row: Mapping[str, Any]) -> Observation:
        super().reset(row)
        self.words = 0
        if sum(map(ord, str(row["prompt"]))) % 7 == 0:
            raise RuntimeError("no beginning")
        return Observation()

    def step(self, text: str) -> Observation:
        self.words += sum(map(ord, text))
        if self.words % 5 == 1:
            raise RuntimeError("no answer")
        if self.words % 5 == 2:
            return Observation(reward=0.3)
        said = super().step(text)
        return Observation(said.messages, self.words / 7, said.done, said.calls)

    def outcome(self) -> float | None:
        if self.words % 11 == 3:
            raise RuntimeError("no end")
        return self.words / 3 if self.words % 2 else None


class Gone(Environment):
    """Is not to be asked."""

    def reset(self, row: Mapping[str, Any]) -> Observation:
        raise AssertionError

    step = None  # type: ignore[assignment]


class Other(Moody):
    """Answers otherwise where the prompt is among these; all are where there are none."""

    prompts: frozenset[str] = frozenset()

    def reset(self, row: Mapping[str, Any]) -> Observation:
        self.other = not self.prompts or str(row["prompt"]) in self.prompts
        return super().reset(row)

    def step(self, text: str) -> Observation:
        said = super().step(text)
        if not self.other:
            return said
        return Observation(says("?").messages, said.reward, said.done, said.calls)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = cold_start.make(tmp_path_factory.mktemp("cold") / "model", **PLAYED)
    folder = tmp_path_factory.mktemp("played") / "run"
    with pytest.MonkeyPatch.context() as patch:
        answering(patch, Moody)
        cold_start.run_from(model, folder, steps=2, **PLAYED)
    return folder


def test_a_run_repeats_without_its_environment(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for step in (1, 2) for row in cold_start.rows(run, step)]
    assert {row["episode"]["stop"] for row in rows} >= {"done", "answered", "error"}
    answering(monkeypatch, Gone)
    found = verify(run)
    assert found.whole and found.steps == 2, found.text(100)
    assert "taken from the record" in "".join(found.notes)


def test_with_env_it_answers_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, Moody)
    found = verify(run, env=True)
    assert found.whole and not any("record" in note for note in found.notes)
    answering(monkeypatch, Other)
    found = verify(run, env=True)
    assert not found.same and "Held-out episodes are not recorded" in found.notes[-1]
    asked = frozenset(json.loads(row["prompt"]) for row in cold_start.rows(run, 1))
    monkeypatch.setattr(Other, "prompts", asked)
    found = verify(run, env=True)
    assert not found.same
    assert any("answered otherwise than recorded" in note for note in found.notes)


def test_env_is_for_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--recipe", "gspo", "--env"]) == 2
    assert "--env belongs to --verify" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("turns", "whole"),
    [
        ((0.1, 0.2), 0.1 + 0.2 + 0.3),
        ((None, None), 0.7),
        ((1.0, None), 1.0),
        ((0.1, 0.7), sum([0.1, 0.7, -0.801])),
    ],
)
def test_the_reward_of_the_whole_is_found_to_the_bit(turns: Any, whole: float) -> None:
    given = [reward for reward in turns if reward is not None]
    episode = Episode("done", tuple(TurnFacts(reward=x) for x in turns), whole)
    rest = outcome_of(episode)
    assert sum([*given, *([] if rest is None else [rest])]) == whole


def test_only_answers_to_the_same_words_are_compared() -> None:
    def episode(*said: tuple[str, str]) -> Episode:
        return Episode("done", (), messages=tuple({"role": r, "content": c} for r, c in said))

    then = episode(("assistant", "5"), ("user", "higher"))
    assert first_difference(then, then) == ""
    assert first_difference(then, episode(("assistant", "6"), ("user", "lower"))) == ""
    assert first_difference(then, episode(("assistant", "5"), ("user", "lower"))) == (
        "message 1: 'higher' then, 'lower' now"
    )
