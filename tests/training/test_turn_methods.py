"""Methods that credit turns, by name on an environment; and a critic whose rows have holes."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import cold_start
import pytest
from cold_start import rows
from played import Adder, answering

from groupwise.config import load
from groupwise.errors import ConfigError
from groupwise.stages.checks import check_config

PLAYED = {"turns__environment": "played", "turns__max": 4, "engine__max_tokens": 10}
Row = Mapping[str, Any]


class Few(Adder):
    """Names three states, so that they come back; pays every turn."""

    enough = 4

    def state(self) -> str | None:
        return str(min(self.heard, 2))


class Nameless(Few):
    """Names none: a state is what the policy was told."""

    def state(self) -> str | None:
        return None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cold_start.make(tmp_path_factory.mktemp("cold") / "model", **PLAYED)


def groups(folder: Path, step: int = 1) -> list[list[Row]]:
    found: dict[int, list[Row]] = defaultdict(list)
    for row in rows(folder, step):
        if row["advantage"] is not None:
            found[row["group"]].append(row)
    return [found[number] for number in sorted(found)]


def rewards(row: Row) -> list[float]:
    """What each turn was paid; the last has what the whole was worth as well."""
    if len(row["episode"]["turns"]) == 1:
        return [row["reward"]]
    return [step["reward"] for step in row["reward_steps"]]


def by_turn(row: Row, name: str) -> list[list[float]]:
    own = [turn for turn in row["turns"] if turn["role"] == "assistant"]
    return [row[name][turn["start"] : turn["end"]] for turn in own]


def zscore(values: list[float], eps: float) -> list[float]:
    if len(values) < 2:
        return [0.0 for _ in values]
    return [(x - fmean(values)) / (stdev(values) + eps) for x in values]


def state_of(row: Row, turn: int, named: bool) -> Any:
    if named:
        return row["episode"]["turns"][turn]["state"]
    told: list[list[Any]] = [[]]
    for message in json.loads(row["episode"]["messages"]):
        if message["role"] == "assistant":
            told.append([])
        else:
            told[-1].append(message)
    return json.dumps(told[turn])


@pytest.mark.parametrize("world", [Few, Nameless])
def test_gigpo_trains_by_name_on_the_states_of_an_environment(
    world: type[Few], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advantages are A = z(reward) + z(return) among turns that begin in the same state."""
    answering(monkeypatch, world)
    cold_start.run_from(model, tmp_path / "run", steps=1, recipe="gigpo", **PLAYED)
    met = 0
    for group in groups(tmp_path / "run"):
        whole = zscore([row["reward"] for row in group], 1e-6)
        returns: dict[tuple[int, int], float] = {}
        together: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        for number, row in enumerate(group):
            paid, later = rewards(row), 0.0
            for turn in reversed(range(len(paid))):
                later = paid[turn] + 0.95 * later
                returns[number, turn] = later
                together[state_of(row, turn, world is Few)].append((number, turn))
        step = {}
        for places in together.values():
            met += len(places) > 1 and any(turn for _, turn in places)
            step |= dict(
                zip(places, zscore([returns[place] for place in places], 1e-6), strict=True)
            )
        for number, row in enumerate(group):
            for turn, told in enumerate(by_turn(row, "advantage")):
                wanted = whole[number] + step[number, turn]
                assert told == pytest.approx([wanted] * len(told), abs=2e-4)
    assert met > 1  # states behind the first turn that came back


def test_mt_grpo_trains_by_name_on_an_environment(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, Few)
    cold_start.run_from(model, tmp_path / "run", steps=1, recipe="mt_grpo", **PLAYED)
    several = 0
    for group in groups(tmp_path / "run"):
        firsts = [rewards(row)[0] if len(row["turns"]) > 1 else 0.0 for row in group]
        rest = [row["reward"] - first for row, first in zip(group, firsts, strict=True)]
        turn, outcome = zscore(firsts, 1e-4), zscore(rest, 1e-4)
        merged = zscore([row["reward"] for row in group], 1e-4)
        for number, row in enumerate(group):
            first, *others = by_turn(row, "advantage")
            if not others:
                assert first == pytest.approx([merged[number]] * len(first), abs=2e-4)
                continue
            several += 1
            assert first == pytest.approx([outcome[number] + turn[number]] * len(first), abs=2e-4)
            for told in others:
                assert told == pytest.approx([outcome[number]] * len(told), abs=2e-4)
    assert several


@pytest.mark.parametrize("name", ["gigpo", "mt_grpo"])
def test_without_turns_they_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"nothing answers the policy\. Set turns\.environment"):
        check_config(load(recipe=name))
    assert not [
        doubt for doubt in check_config(load(recipe=name, **{"turns.environment": "guess"}))
        if "turns" in str(doubt)
    ]  # fmt: skip


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_a_critic_looks_over_what_others_said(
    lam: float, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GAE over the policy's own tokens alone, computed by itself from the recorded values."""
    answering(monkeypatch, Few)
    asked = {"recipe__advantage": f"gae(gamma=1.0, lam={lam})", "recipe__shaping": ""}
    cold_start.run_from(model, tmp_path / "run", steps=2, recipe="ppo", **asked, **PLAYED)
    holes = 0
    for row in (row for group in groups(tmp_path / "run", 2) for row in group):
        own = [at for at, mine in enumerate(row["mask"]) if mine]
        holes += own[-1] + 1 > len(own)
        value = [row["value"][at] for at in own]
        wanted, later = [0.0] * len(own), 0.0
        for t in reversed(range(len(own))):
            ahead = value[t + 1] if t + 1 < len(own) else 0.0
            paid = row["reward"] if t + 1 == len(own) else 0.0
            later = paid + ahead - value[t] + lam * later
            wanted[t] = later
        assert [row["advantage"][at] for at in own] == pytest.approx(wanted, abs=1e-4)
        others = [row["advantage"][at] for at in range(len(row["mask"])) if not row["mask"][at]]
        assert not any(others)
        assert math.isfinite(sum(value)) and any(value)
    assert holes > 3
