"""The claims of experiments/: their files can be run, and verdicts follow from what is measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import page, run, scaling
from groupwise.compare.arms import Budget, arms_of, check
from groupwise.compare.outcomes import Outcome
from groupwise.watch.catalogue import find

FOLDER = Path(__file__).parents[1] / "experiments"
LETTERS = "abcdefghijklmn"


def names() -> list[str]:
    return sorted(p.stem for p in FOLDER.glob("*.toml") if "claim = " in p.read_text())


def test_every_letter_has_a_claim() -> None:
    assert run.names() == names()
    assert {name[0] for name in names() if name[1] == "_"} == set(LETTERS)


@pytest.mark.parametrize("name", names())
def test_a_claim_can_be_run(name: str) -> None:
    """Arms are arms of compare, measures exist, and every expectation is about arms of its own."""
    claim = run.read(name)
    source = FOLDER / claim.config if claim.config else None
    budget = Budget.parse(claim.budget)
    texts = list(claim.arms.values())
    check(arms_of(texts, budget, source=source, settings=claim.settings))
    assert claim.seeds >= 2 and (claim.expect or claim.scaling)
    for expected in claim.expect:
        assert expected.more in claim.arms
        assert expected.than in claim.arms or isinstance(expected.than, float)
        assert expected.size > 0
        assert expected.measure in run.SCORES or find(expected.measure)
    if claim.scaling:
        assert claim.scaling["arm"] in [arm.folder for arm in arms_of(texts, budget, source=source)]


@pytest.mark.parametrize("name", names())
def test_what_came_out_is_kept_and_nothing_is_open(name: str) -> None:
    claim, found = run.read(name), json.loads((FOLDER / "results" / f"{name}.json").read_text())
    assert (found["seeds"], found["budget"]) == (claim.seeds, claim.budget)
    assert list(found["arms"]) == list(claim.arms)
    expected = [(e.measure, e.more, e.than, e.size) for e in claim.expect]
    stored = [(e["measure"], e["more"], e["than"], e["size"]) for e in found["expectations"]]
    assert stored[: len(expected)] == expected
    for entry in found["expectations"]:
        assert entry["verdict"] in ("as claimed", "the opposite", "not seen")


def test_the_page_is_what_the_results_say() -> None:
    written = (FOLDER.parent / "docs" / "claims.md").read_text()
    assert written == page.whole([run.read(name) for name in names()])
    assert not re.search(r"\*\*(open|not measured)\*\*", written)


def made(seed: int, score: float, length: float) -> Outcome:
    return Outcome(
        seed=seed, measure="accuracy", points=({"score": 0.1},), final=score, area=score,
        scores=(), steps=1, tokens=1, seconds=1.0, length=1.0, ends={"length/mean": length},
        curves={}, origin={}, versions="groupwise 0, PyTorch 0",
    )  # fmt: skip


def judged(lift: float, spread: float, **expected: Any) -> dict[str, Any]:
    """Arms a and b: a is longer by so much, give or take."""
    draw = np.random.default_rng(0)
    expects = (run.Expectation.of({"measure": "length/mean", **expected}),)
    claim = run.Claim("", "", "", "", "", "", 8, "steps=1", {"a": "grpo", "b": "dapo"}, expects)
    drawn = draw.standard_normal((2, 8))
    lengths = 10 + spread * (drawn - drawn.mean(axis=1, keepdims=True)) + [[lift], [0.0]]
    done = [[made(seed, 0.5, length) for seed, length in enumerate(arm)] for arm in lengths]
    (found,) = run.judge(claim, done)
    return dict(found)


def test_verdicts() -> None:
    more: dict[str, Any] = {"more": "a", "than": "b", "effect": 2.0}
    assert judged(3.0, 0.5, **more)["verdict"] == "as claimed"
    assert judged(-3.0, 0.5, **more)["verdict"] == "the opposite"
    assert judged(0.0, 0.5, **more)["verdict"] == "not seen"
    assert judged(0.0, 5.0, **more)["verdict"] == "open"  # 2 would not have been seen either
    alike: dict[str, Any] = {"alike": ["a", "b"], "within": 1.0}
    assert judged(0.0, 0.3, **alike)["verdict"] == "as claimed"
    assert judged(3.0, 0.3, **alike)["verdict"] == "the opposite"
    assert judged(1.0, 0.3, **alike)["verdict"] == "the opposite"  # apart, and by too much perhaps
    assert judged(0.5, 0.3, **alike)["verdict"] == "as claimed"  # apart, and by little for sure
    assert judged(0.0, 5.0, **alike)["verdict"] == "open"


def test_relative_sizes_are_shares_of_the_second_arm() -> None:
    plain = judged(3.0, 0.5, more="a", than="b", effect=0.2)
    share = judged(3.0, 0.5, more="a", than="b", effect=0.2, relative=True)
    ratio = plain["difference"] / share["difference"]
    assert ratio == pytest.approx(10, rel=0.05)
    assert plain["smallest_visible"] / share["smallest_visible"] == pytest.approx(ratio)


def test_expectations_of_a_claim_are_corrected_together() -> None:
    """The same question twice has to hold twice."""
    entry = {"measure": "length/mean", "more": "a", "than": "b", "effect": 1.0}
    one = run.Expectation.of(entry)
    arms = {"a": "grpo", "b": "dapo"}
    done = [
        [made(seed, 0.5, 10 + up + 0.1 * (seed % 3)) for seed in range(8)] for up in (0.05, 0.0)
    ]
    done[0][0] = made(0, 0.5, 10.4)

    def p_of(*expects: Any) -> float:
        claim = run.Claim("", "", "", "", "", "", 8, "steps=1", arms, expects)
        return float(run.judge(claim, done)[0]["p"])

    assert 0 < p_of(one) < 0.5
    assert p_of(one, one) == pytest.approx(2 * p_of(one))


def test_a_grading_that_failed_is_no_wrong_answer() -> None:
    rows = [{"key": "b", "budgets": {"4": [True, False]}}, {"key": "a", "budgets": {"4": [None]}}]
    found = scaling.table({"tasks": rows}, ["4"])
    assert np.isnan(found[0, 0]) and found[1, 0] == 0.5


def test_an_arm_against_a_number() -> None:
    found = judged(3.0, 0.5, more="a", than=11.0, effect=1.0)
    assert found["difference"] == pytest.approx(2.0) and found["verdict"] == "as claimed"
    assert judged(3.0, 0.5, more="a", than=15.0, effect=1.0)["verdict"] == "the opposite"
    share = judged(3.0, 0.5, more="a", than=10.0, effect=0.1, relative=True)
    assert share["difference"] == pytest.approx(0.3)


def test_a_measure_that_no_run_has() -> None:
    found = judged(0.0, 1.0, measure="kl/ref", more="a", than="b", effect=1.0)
    assert found["verdict"] == "not measured"


def test_a_claim_is_run_and_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the file to the page, with test-time scaling."""
    (tmp_path / "z_small.toml").write_text(SMALL)
    (tmp_path / "shared.toml").write_text(SHARED)
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    assert run.names() == ["z_small"]
    claim = run.read("z_small")
    assert run.do(claim, tmp_path / "runs", ["--jobs", "1"]) == 0
    found = json.loads((tmp_path / "results" / "z_small.json").read_text())
    by_length, by_budget = found["expectations"]
    assert by_length["measure"] == "length/mean" and found["seeds"] == 2
    scaled = found["scaling"]
    assert scaled["budgets"] == [1, 3] and len(scaled["before"]) == len(scaled["after"]) == 2
    gains = [b["mean"] - a["mean"] for a, b in zip(scaled["before"], scaled["after"], strict=True)]
    assert by_budget["difference"] == pytest.approx(gains[1] - gains[0])
    written = page.whole([claim])
    assert "| dapo: `dapo group_size=2` |" in written and "| after training |" in written


SMALL = """
claim = "C."
source = "S"
published = "P."
setting = "H."
reading = "R."
seeds = 2
budget = "steps=2"
config = "shared.toml"
settings = ["prompts_per_step=2"]

[arms]
grpo = "grpo"
dapo = "dapo group_size=2"

[[expect]]
measure = "length/mean"
more = "grpo"
than = "dapo"
effect = 0.5
relative = true

[scaling]
arm = "grpo"
budgets = [1, 3]
tasks = 8
samples = 1
force = ""
force_tokens = 2
effect = 0.1
"""
SHARED = """
recipe = "grpo"
prompts_per_step = 4
group_size = 4
[model]
threads = 1
[optim]
learning_rate = 1e-3
weight_decay = 0.1
[tiny]
width = 16
layers = 1
heads = 2
cold_start_steps = 20
[data]
options = { digits = 1 }
size = 100
[engine]
max_tokens = 3
[eval]
tasks = 8
points = 2
"""


def test_a_mean_is_of_what_was_measured() -> None:
    """A run of a seed that the other arm lacks may have no value: it is none, and not 0."""
    known, unknown = made(0, 0.5, 4.0), replace(made(1, 0.5, 0.0), ends={})
    expected = run.Expectation("length/mean", "a", "b", 0.1, alike=False, relative=True)
    assert run.second_mean(expected, {"b": [known, unknown]}) == 4.0


def test_a_small_share_keeps_its_decimal() -> None:
    """The smallest published step is 2.4 %: it must not be told from 2.9 % by guessing."""
    entry = {"measure": "accuracy", "relative": True}
    assert page._amount(0.024, entry) == "2.4 %"
    assert page._amount(-0.0052, entry, sign=True) == "-0.5 %"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('claim = "', "claim = ", "zz.toml can't be read"),
        ("seeds = 8", "seds = 8", "zz.toml is no claim: TypeError.*seds"),
        ('measure = "length/wrong_mean"', "", "zz.toml is no claim: KeyError: 'measure'"),
        ('more = "grpo"', 'more = "gpro"', "expects something of 'gpro', and its arms are grpo"),
    ],
)
def test_a_file_that_is_wrong_is_named_before_anything_runs(
    old: str, new: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (FOLDER / "a_length_bias.toml").read_text()
    assert old in text
    (tmp_path / "zz.toml").write_text(text.replace(old, new, 1))
    monkeypatch.setattr(run, "HERE", tmp_path)
    with pytest.raises(SystemExit, match=said):
        run.read("zz")
