"""Coefficients that change from step to step: by hand, at their edges, and in a run."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import runs

from groupwise.config import load
from groupwise.errors import ConfigError
from groupwise.losses.controls import (
    entropy_target,
    kl_target,
    rest_of_warmup_cosine,
    warmup_cosine,
)
from groupwise.stages.checks import check_config

SEEN = {"kl": 0.5, "tokens": 400.0, "answers": 20.0}  # 10 nats an answer


@pytest.mark.parametrize(
    ("control", "kl", "factor"),
    [
        (kl_target(target=8.0, horizon=1000.0), 0.45, 1 + 0.125 * 20 / 1000),
        (kl_target(target=8.0, horizon=1000.0), 40.0, 1 + 0.2 * 20 / 1000),  # held at a fifth
        (kl_target(target=8.0, horizon=1000.0), 0.0, 1 - 0.2 * 20 / 1000),
        (kl_target(target=0.4, horizon=1000.0, per="token"), 0.45, 1 + 0.125 * 20 / 1000),
    ],
)
def test_the_coefficient_follows_the_error_of_the_kl(
    control: object, kl: float, factor: float
) -> None:
    held, applied = control(0.2, 7, {**SEEN, "kl": kl})  # type: ignore[operator]
    assert held == applied == pytest.approx(0.2 * factor, rel=1e-12)


def test_at_its_target_it_stays_and_without_a_kl_too() -> None:
    assert kl_target(target=10.0)(0.3, 1, SEEN) == (0.3, 0.3)
    assert kl_target(target=10.0)(0.3, 0, {}) == (0.3, 0.3)


def test_an_entropy_target_applies_nothing_above_it_and_nothing_at_first() -> None:
    control = entropy_target(target=0.2, step_size=0.01, high=0.05)
    assert control(0.02, 0, {}) == (0.02, 0.0)
    assert control(0.02, 1, {"entropy": 0.1}) == (0.03, 0.03)
    assert control(0.05, 1, {"entropy": 0.2}) == (0.05, 0.05)
    assert control(0.02, 1, {"entropy": 0.3}) == (0.01, 0.0)


@pytest.mark.parametrize("step", [0, 1, 2, 5, 9, 40])
def test_two_terms_of_a_mixture_add_up_to_one(step: int) -> None:
    settings = {"warmup": 2, "decay": 8, "peak": 0.9, "valley": 0.1}
    found = [x(**settings)(0.5, step, {})[1] for x in (warmup_cosine, rest_of_warmup_cosine)]
    assert sum(found) == pytest.approx(1.0, abs=1e-15)
    by_hand = {0: 0.0, 1: 0.45, 2: 0.9, 40: 0.1}
    if step in by_hand:
        assert found[0] == pytest.approx(by_hand[step])


def test_a_run_learns_with_what_the_control_says(tmp_path: Path) -> None:
    """The coefficient of every step follows from the KL of the step before, to the last bit."""
    control = "kl_target(target=0.001, horizon=30)"
    runs.run(
        tmp_path, recipe="grpo", steps=5, eval__tasks=0, train__coefs={"penalty.coef": control}
    )
    lines = runs.metrics(tmp_path)[1:]
    assert lines[0]["coef/penalty.coef"] == 0.04
    for before, after in pairwise(lines):
        kl = before["kl/ref_k1"] * before["length/mean"] * before["tokens/learned_share"]
        assert before["coef/kl_over_target"] == pytest.approx(kl / 0.001)
        error = min(max(kl / 0.001 - 1.0, -0.2), 0.2)
        wanted = before["coef/penalty.coef"] * (1 + error * 16 / 30)
        assert after["coef/penalty.coef"] == pytest.approx(wanted, rel=1e-9)
    assert len({line["coef/penalty.coef"] for line in lines}) == 5
    plain = runs.run(tmp_path / "plain", recipe="grpo", steps=5, eval__tasks=0)
    assert plain["steps"] == 5
    again = runs.metrics(tmp_path / "plain")[1:]
    assert again[0]["weights/fingerprint"] == lines[0]["weights/fingerprint"]  # 0.04 in both
    assert again[2]["weights/fingerprint"] != lines[2]["weights/fingerprint"]
    assert all(math.isfinite(line["loss/total"]) for line in lines)


@pytest.mark.parametrize(
    ("recipe", "coefs", "words"),
    [
        ("grpo", {"penalty.cof": "kl_target()"}, "has not one number at 'penalty.cof'"),
        ("grpo", {"penalty.coef": "kl_goal()"}, "no control called 'kl_goal'"),
        ("grpo", {"penalty.coef": "kl_target(target=-1)"}, "target"),
        ("dr_grpo", {"gate.low": "kl_target()"}, "goes by the KL to a reference"),
        ("chord", {"correction.by": "warmup_cosine(peak=0.5)"}, ""),
        ("gpg", {"filter.share": "warmup_cosine(peak=3)"}, "share"),  # at the first step it is 0
        ("dpo", {"preference.beta": "warmup_cosine()"}, "change in recipes that sample groups"),
    ],
)
def test_what_no_control_can_move_is_refused(
    recipe: str, coefs: dict[str, str], words: str
) -> None:
    config = load(recipe=recipe, **{"train.coefs": coefs})
    if not words:
        check_config(config)
        return
    with pytest.raises(ConfigError, match=words):
        check_config(config)
