"""The claims of experiments/: their files can be run, and verdicts follow from what is measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import claim as files
from experiments import judge, page, records, run, walks
from experiments.claim import Claim, Expectation, read
from groupwise.compare.arms import ArmBudget, arms_of, check
from groupwise.compare.outcomes import RunOutcome
from groupwise.runfiles.catalogue import find

FOLDER = Path(__file__).parents[2] / "experiments"
LETTERS = "abcdefghijklmnpqrstvwx"
VERDICTS = ("as claimed", judge.SMALLER, judge.LARGER, "the opposite", "apart", "not seen", "open")

INTERVAL = re.compile(r"(-?\d+(?:\.\d+)?)(?: %| points)?(?: [a-z]+)? to (-?\d+(?:\.\d+)?)")


def names() -> list[str]:
    return sorted(p.stem for p in FOLDER.glob("*.toml") if "claim = " in p.read_text())


def test_every_letter_has_a_claim() -> None:
    assert files.names() == names()
    assert {name[0] for name in names() if name[1] == "_"} == set(LETTERS)


@pytest.mark.parametrize("name", names())
def test_a_claim_can_be_run(name: str) -> None:
    """Arms are arms of compare, measures exist, and every expectation is about arms of its own."""
    claim = read(name)
    source = FOLDER / claim.config if claim.config else None
    budget = ArmBudget.parse(claim.budget)
    check(arms_of(list(claim.arms.values()), budget, source=source, settings=claim.settings))
    assert claim.seeds >= 2 and claim.expect
    for expected in claim.expect:
        assert expected.more in claim.arms
        assert expected.than in claim.arms or isinstance(expected.than, float)
        assert expected.size > 0
    for measure in claim.measures:
        assert find(measure)


def measured() -> list[str]:
    return [name for name in names() if page.result(name)]


@pytest.mark.parametrize("name", measured())
def test_what_came_out_is_kept(name: str) -> None:
    claim, found = read(name), json.loads((FOLDER / "results" / f"{name}.json").read_text())
    assert (found["seeds"], found["budget"]) == (claim.seeds, claim.budget)
    assert list(found["arms"]) == list(claim.arms)
    kept = (FOLDER / "results" / f"{name}.runs.jsonl").is_file()
    for e, entry in page.entries(claim, found):
        # Of runs that were not kept nothing can be asked that was not asked then.
        waits = () if kept else ("not measured",)
        assert judge.verdict(e, entry, found["arms"]) in (*VERDICTS, *waits)


@pytest.mark.parametrize("name", measured())
def test_a_margin_is_below_its_contrast(name: str) -> None:
    """What should differ must not pass for alike, by what is published nor by what came out."""
    claim, found = read(name), page.result(name)
    assert found is not None
    for e in claim.expect:
        assert not e.alike or e.size < judge.contrast(e, found["arms"])


@pytest.mark.parametrize("name", measured())
def test_figures_are_those_of_the_runs_that_are_kept(name: str) -> None:
    claim, found = read(name), page.result(name)
    runs = records.read(FOLDER / "results", claim)
    if records.path_of(FOLDER / "results", claim).is_file():
        assert found is not None and runs is not None
        anew = json.loads(json.dumps(judge.figures(claim, runs)))
        assert rounded({key: found[key] for key in anew}) == rounded(anew)


def rounded(thing: Any) -> Any:
    """Round floats to 13 digits: the last ones are of the processor that computed them."""
    if isinstance(thing, dict):
        return {key: rounded(value) for key, value in thing.items()}
    if isinstance(thing, list):
        return [rounded(value) for value in thing]
    return float(f"{thing:.12e}") if isinstance(thing, float) else thing


def bounds(name: str) -> list[tuple[float, float]]:
    kept = json.loads((FOLDER / "results" / f"{name}.json").read_text())["expectations"]
    return [(found["low"], found["high"]) for found in kept if "low" in found]


def is_shown(text: str, bound: float) -> bool:
    """Tell whether a figure of a reading is this bound, as a share or in percent."""
    places = len(text.partition(".")[2])
    least = 0.5001 * 10**-places  # what rounding may make of it, either way
    return any(abs(scale * abs(bound) - abs(float(text))) <= least for scale in (1, 100))


@pytest.mark.parametrize("name", names())
def test_intervals_of_a_reading_are_those_of_the_figures(name: str) -> None:
    """Figures that were made anew leave no reading behind; earlier runs are said to be some."""
    reading = read(name).reading
    own = [x for other in names() if other == name or other in reading for x in bounds(other)]
    for sentence in re.split(r"(?<=[.:]) ", reading):
        if re.match(r"(?:A|An earlier) run\b", sentence):
            continue
        for aside in re.findall(r"\(([^()]*)\)", sentence):
            for low, high in INTERVAL.findall(aside):
                pairs = ((low, high), (high, low))  # '0.7 lower to 3.9 higher', either way
                assert any(
                    is_shown(one, x) and is_shown(two, y) for x, y in own for one, two in pairs
                ), (aside, own)


UNSETTLED = re.compile(r"once corrected|before the correction|after correction|separabl[ey]")


def test_a_reading_says_what_its_interval_alone_would_hide() -> None:
    """An interval may leave 0 out and the page's correction not: its sentence says that too."""
    of = {name: found for name in names() if (found := page.result(name))}
    for name, found in zip(of, judge.over_all(list(of.values())), strict=True):
        claim = read(name)
        sentences = re.split(r"(?<=[.:;]) ", claim.reading)
        for e, entry in page.entries(claim, found):
            low, high = entry.get("low", 0.0), entry.get("high", 0.0)
            if low * high <= 0 or judge.verdict(e, entry, found["arms"]) not in (
                "open",
                "not seen",
            ):
                continue
            told = [
                at
                for at, sentence in enumerate(sentences)
                for one, two in INTERVAL.findall(sentence)
                for first, second in ((one, two), (two, one))
                if is_shown(first, low) and is_shown(second, high)
            ]
            for at in told:
                assert UNSETTLED.search(" ".join(sentences[at : at + 2])), (name, sentences[at])


def test_the_page_is_what_the_results_say() -> None:
    written = page.PAGE.read_text()
    assert written == page.whole([read(name) for name in names()])
    for name in set(names()) - set(measured()):
        assert f"| {name} | not run yet |" in written


def test_everything_on_the_page_is_one_family() -> None:
    """Holm by hand over three claims: 0.01 x 4, then 0.02 x 3, 0.03 x 2 is no more, and 0.5."""
    claims: list[dict[str, Any]] = [
        {"expectations": [{"p": 0.02, "p_uncorrected": 0.01}, {"measure": "no test"}]},
        {"expectations": [{"p": 0.03}, {"p": 0.5, "p_uncorrected": 0.5}]},
        {"expectations": [{"p": 0.2, "p_uncorrected": 0.02}]},  # few seeds: its own p is larger
    ]
    over = judge.over_all(claims)
    found = [x["p"] for each in over for x in each["expectations"] if "p" in x]
    assert found == pytest.approx([0.04, 0.06, 0.5, 0.2])
    assert claims[0]["expectations"][0]["p"] == 0.02  # results stay as they are


def test_what_was_chosen_late_is_marked_and_named() -> None:
    e = Expectation.of({"measure": "length/mean", "more": "a", "than": "b", "effect": 2.0})
    for claim in (claim_of(replace(e, looked="the limit")), replace(claim_of(e), looked="a rate")):
        found = {**judge.figures(claim, drawn(2.0, 0.5)), "seconds": 1, "seeds": 8}
        text = page.section(claim, {**found, "budget": "steps=1", "machine": "one"})
        assert "**as claimed** †." in text
        assert "Chosen when results had been seen: " + (claim.looked or "the limit") in text


def test_two_claims_that_ask_the_same_name_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    e = Expectation.of({"measure": "length/mean", "more": "a", "than": "b", "effect": 2.0})
    one = claim_of(replace(e, also=("y: b > a",)))
    other = replace(claim_of(replace(e, more="b", than="a")), name="y")
    about = {"seconds": 3600, "seeds": 8, "budget": "steps=1", "machine": "one"}
    found = {c.name: {**judge.figures(c, drawn(2.0, 0.5)), **about} for c in (one, other)}
    monkeypatch.setattr(page, "result", found.get)
    text = page.whole([one, other])
    assert text.count("The two disagree.") == 2
    assert "(#y) (`length/mean`, b > a): **the opposite**" in text
    assert "(#z) (`length/mean`, a > b): **as claimed**" in text
    assert "all 2 differences" in text and "2 hours of runs" in text
    with pytest.raises(SystemExit, match="no claim expects that"):
        files.asked_elsewhere([one])


def made(seed: int, score: float, length: float, **ends: float) -> RunOutcome:
    return RunOutcome(
        seed=seed, measure="accuracy", points=({"score": 0.1},), final=score, area=score,
        scores=(), steps=1, tokens=1, seconds=1.0, length=1.0, ends={"length/mean": length, **ends},
        curves={}, origin={}, versions="groupwise 0, PyTorch 0",
    )  # fmt: skip


def claim_of(*expect: Expectation, seeds: int = 8) -> Claim:
    arms = {"a": "grpo", "b": "dapo", "c": "gspo"}
    return Claim("z", "", "", "", "", "", seeds, "steps=1", arms, expect)


def drawn(lift: float, spread: float, far: float = 0.0) -> dict[str, list[RunOutcome]]:
    """Arms a, b and c: b is 10 long, a longer by so much, c by `far`, give or take."""
    noise = np.random.default_rng(0).standard_normal((3, 8))
    noise -= noise.mean(axis=1, keepdims=True)
    lengths = 10 + spread * noise + [[lift], [0.0], [far]]
    return {
        name: [made(seed, 0.5, length) for seed, length in enumerate(arm)]
        for name, arm in zip("abc", lengths, strict=True)
    }


def judged(lift: float, spread: float, far: float = 0.0, **expected: Any) -> dict[str, Any]:
    e = Expectation.of({"measure": "length/mean", **expected})
    found = judge.figures(claim_of(e), drawn(lift, spread, far))
    (entry,) = found["expectations"]
    return {**entry, "verdict": judge.verdict(e, entry, found["arms"])}


def test_figures_become_verdicts() -> None:
    """Each word by hand: an interval, a p and an expected size of 2."""
    more = Expectation("length/mean", "a", "b", 2.0, alike=False, relative=False)
    arms = {arm: {"length/mean": {"mean": 1.0, "stderr": 0.1}} for arm in "ab"}

    def said(low: float, high: float, p: float) -> str:
        entry = {"difference": (low + high) / 2, "low": low, "high": high, "p": p}
        return judge.verdict(more, entry, arms)

    assert said(1.0, 3.0, 0.01) == "as claimed"
    assert said(0.5, 1.5, 0.01) == "direction as claimed, size not: smaller"
    assert said(2.5, 3.5, 0.01) == "direction as claimed, size not: larger"
    assert said(-3.0, -1.0, 0.01) == "the opposite"
    assert said(-1.0, 1.5, 0.2) == "not seen"
    assert said(-1.0, 2.5, 0.2) == "open"  # 2 may well be true
    assert judge.verdict(more, {}, arms) == "not measured"
    arms["b"]["length/mean"] = {"mean": 0.0, "stderr": 0.0}
    assert said(1.0, 3.0, 0.01) == "by construction"


def test_what_is_alike_needs_a_contrast() -> None:
    alike: dict[str, Any] = {"alike": ["a", "b"], "within": 1.0, "contrast": "c"}
    assert judged(0.0, 0.3, far=4.0, **alike)["verdict"] == "as claimed"
    assert judged(0.5, 0.3, far=4.0, **alike)["verdict"] == "as claimed"  # by little for sure
    assert judged(1.0, 0.3, far=4.0, **alike)["verdict"] == "apart"  # by too much perhaps
    assert judged(3.0, 0.3, far=4.0, **alike)["verdict"] == "apart"
    assert judged(0.0, 5.0, far=4.0, **alike)["verdict"] == "open"
    assert judged(0.0, 0.3, far=0.9, **alike)["verdict"] == "no contrast"
    assert judged(0.0, 0.3, far=-4.0, **alike)["verdict"] == "as claimed"
    assert judged(0.0, 0.3, **{**alike, "contrast": 2.0})["verdict"] == "as claimed"
    share = {**alike, "within": 0.1, "relative": True}  # of 10, as c is 9 % away
    assert judged(0.0, 0.3, far=0.9, **share)["verdict"] == "no contrast"
    assert judged(0.0, 0.3, far=1.1, **share)["verdict"] == "as claimed"


def test_a_measure_that_an_arm_can_not_have_is_no_test() -> None:
    """It is left out of the correction as well: the other question stands alone."""
    length, clip = (
        Expectation(measure, "a", "b", 0.05, alike=False, relative=False)
        for measure in ("length/mean", "clip/rare")
    )
    runs = {
        arm: [made(s, 0.5, 10 + lift * s, **{"clip/rare": clipped * (s + 1)}) for s in range(8)]
        for arm, lift, clipped in (("a", 0.04, 0.01), ("b", 0.0, 0.0), ("c", 0.0, 0.0))
    }
    alone = judge.figures(claim_of(length), runs)["expectations"]
    found = judge.figures(claim_of(length, clip), runs)
    assert found["expectations"][0] == alone[0]
    assert judge.verdict(clip, found["expectations"][1], found["arms"]) == "by construction"


def test_a_difference_of_two_measures() -> None:
    """What a run gained: its accuracy less that before training, 0.1 in each."""
    gain = Expectation.of({"measure": "accuracy - start", "more": "a", "than": "b", "effect": 0.2})
    runs = {arm: [made(s, x + 0.01 * s, 1.0) for s in range(8)]
            for arm, x in (("a", 0.4), ("b", 0.2), ("c", 0.2))}  # fmt: skip
    runs["b"][0] = made(0, 0.21, 1.0)
    found = judge.figures(claim_of(gain), runs)
    assert found["expectations"][0]["difference"] == pytest.approx(0.2 - 0.01 / 8)
    assert judge.middle(found["arms"], "a", "accuracy - start") == pytest.approx(0.335)
    assert claim_of(gain).measures == []
    worth = Expectation.of({"measure": "eval/x - eval/y", "more": "a", "than": 0.0, "effect": 0.2})
    assert claim_of(worth).measures == ["eval/x", "eval/y"]
    assert judge.value(made(0, 0.5, 1.0, **{"eval/x": 0.7, "eval/y": 0.4}), worth.measure) == (
        pytest.approx(0.3)
    )
    assert judge.value(made(0, 0.5, 1.0, **{"eval/x": 0.7}), worth.measure) is None


def test_runs_that_are_kept_can_be_judged_again(tmp_path: Path) -> None:
    e = Expectation.of({"measure": "length/mean", "more": "a", "than": "b", "effect": 2.0})
    claim, runs = claim_of(e), drawn(3.0, 0.5)
    runs["a"][0] = replace(runs["a"][0], scores=(0.25, None), ends={"length/mean": 9.0, "x": 1.0})
    assert records.read(tmp_path, claim) is None
    records.write(tmp_path, claim, runs)
    again = records.read(tmp_path, claim)
    assert again is not None and judge.figures(claim, again) == judge.figures(claim, runs)
    assert again["a"][0] == replace(runs["a"][0], ends={"length/mean": 9.0})
    more = replace(claim, seeds=9)  # not all of them are there
    assert records.read(tmp_path, more) is None


def test_relative_sizes_are_shares_of_the_second_arm() -> None:
    plain = judged(3.0, 0.5, more="a", than="b", effect=0.2)
    share = judged(3.0, 0.5, more="a", than="b", effect=0.2, relative=True)
    ratio = plain["difference"] / share["difference"]
    assert ratio == pytest.approx(10, rel=0.05)
    assert plain["smallest_visible"] / share["smallest_visible"] == pytest.approx(ratio)


def test_expectations_of_a_claim_are_corrected_together() -> None:
    """The same question twice has to hold twice."""
    entry = {"measure": "length/mean", "more": "a", "than": "b", "effect": 1.0}
    one = Expectation.of(entry)
    runs = {
        arm: [made(seed, 0.5, 10 + up + 0.1 * (seed % 3)) for seed in range(8)]
        for arm, up in (("a", 0.05), ("b", 0.0), ("c", 0.0))
    }
    runs["a"][0] = made(0, 0.5, 10.4)

    def p_of(*expect: Expectation) -> float:
        return float(judge.figures(claim_of(*expect), runs)["expectations"][0]["p"])

    assert 0 < p_of(one) < 0.5
    assert p_of(one, one) == pytest.approx(2 * p_of(one))


def test_an_arm_against_a_number() -> None:
    found = judged(3.0, 0.5, more="a", than=11.0, effect=2.0)
    assert found["difference"] == pytest.approx(2.0) and found["verdict"] == "as claimed"
    assert judged(3.0, 0.5, more="a", than=15.0, effect=1.0)["verdict"] == "the opposite"
    share = judged(3.0, 0.5, more="a", than=10.0, effect=0.1, relative=True)
    assert share["difference"] == pytest.approx(0.3)


def test_a_measure_that_no_run_has() -> None:
    found = judged(0.0, 1.0, measure="kl/ref", more="a", than="b", effect=1.0)
    assert found["verdict"] == "not measured"


def test_a_claim_is_run_written_down_and_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "z_small.toml").write_text(SMALL)
    (tmp_path / "shared.toml").write_text(SHARED)
    monkeypatch.setattr(files, "HERE", tmp_path)
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results")
    assert files.names() == ["z_small"]
    claim = read("z_small")
    run.rejudge(claim)
    assert "its runs were not kept" in capsys.readouterr().out
    assert run.do(claim, tmp_path / "runs", ["--jobs", "1"]) == 0
    result = tmp_path / "results" / "z_small.json"
    found = json.loads(result.read_text())
    by_length, by_gain = found["expectations"]
    assert by_length["measure"] == "length/mean" and found["seeds"] == 2
    grpo = found["arms"]["grpo"]
    assert by_gain["difference"] == pytest.approx(grpo["accuracy"]["mean"] - grpo["start"]["mean"])
    written = page.whole([claim])
    assert "| dapo: `dapo group_size=2` |" in written and "`accuracy - start`, grpo" in written
    result.write_text(json.dumps({**found, "arms": {}, "expectations": []}))
    run.rejudge(claim)  # without a run
    assert json.loads(result.read_text()) == found


def test_an_answer_is_held_to_its_places() -> None:
    right = walks.in_its_places
    assert right("4;9;7<end>", "4bcb=__", "7") == right("7", "4bcb=__", "7") == 1.0
    assert right("4;7", "4bcb=", "7") == right("4;9;8", "4bcb=__", "7") == 0.0
    assert right("7;", "4bcb=__", "7") == right("", "4bcb=__", "7") == 0.0


def test_walks_are_what_their_files_hold() -> None:
    """Every solution is right and in its places, and no walk is in both files."""
    rows = walks.rows()
    for name, own in rows.items():
        assert (walks.FOLDER / f"{name}.jsonl").read_text() == walks.text(own)
        for row in own:
            assert walks.in_its_places(row["solution"], row["prompt"], row["answer"]) == 1.0
    begun = [{row["prompt"].split("=")[0] for row in own} for own in rows.values()]
    assert len(begun[0]) == len(begun[1]) == walks.ROWS and not begun[0] & begun[1]
    assert walks.stops(4, "bb")[1] == walks.stops(walks.stops(4, "b")[0], "b")[0]


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

[[expect]]
measure = "accuracy - start"
more = "grpo"
than = 0.0
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


def test_a_small_share_keeps_its_decimal() -> None:
    """The smallest published step is 2.4 %: it must not be told from 2.9 % by guessing."""
    e = Expectation("accuracy", "a", "b", 0.024, alike=False, relative=True)
    assert page._amount(0.024, e) == "2.4 %"
    assert page._amount(-0.0052, e, sign=True) == "-0.5 %"


def test_differences_of_accuracies_are_points() -> None:
    e = Expectation("eval/source/x/accuracy - start", "a", "b", 0.1, alike=False, relative=False)
    assert page._amount(0.067, e, sign=True) == "+6.7 points"
    assert page._amount(0.067, replace(e, measure="length/mean")) == "0.067"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('claim = "', "claim = ", "zz.toml can't be read"),
        ("seeds = 12", "seds = 12", "zz.toml is no claim: TypeError.*seds"),
        ('measure = "length/wrong_mean"', "", "zz.toml is no claim: KeyError: 'measure'"),
        ('more = "grpo"', 'more = "gpro"', "expects something of 'gpro', and its arms are start"),
    ],
)
def test_a_file_that_is_wrong_is_named_before_anything_runs(
    old: str, new: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (FOLDER / "a_length_bias.toml").read_text()
    assert old in text
    (tmp_path / "zz.toml").write_text(text.replace(old, new, 1))
    monkeypatch.setattr(files, "HERE", tmp_path)
    with pytest.raises(SystemExit, match=said):
        read("zz")


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        # As wide as what the paper says of the arm that holds: half as much again is a third less.
        ("m_kl_estimators", "within = 0.167", "within = 0.34", "expected to by 0.333.*would pass"),
        ("h_rloo_group_size", "within = 0.01", "within = 0.02", "expected to by 0.02.*would pass"),
        ("l_kl_reward_hacking", "within = 0.05", "within = 0.1", "expected to by 0.1.*would pass"),
        ("m_kl_estimators", 'contrast = "k2_loss"', "", "no claim: KeyError: 'contrast'"),
        ("m_kl_estimators", 'contrast = "k2_loss"', 'contrast = "k4"', "something of 'k4'"),
        ("m_kl_estimators", 'contrast = "k2_loss"', 'contrast = "none"', "its own contrast"),
        ("m_kl_estimators", "effect = 0.5", "effect = 0.5\nsize = 1", "has no size"),
    ],
)
def test_a_margin_that_passes_all_is_refused(
    name: str, old: str, new: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (FOLDER / f"{name}.toml").read_text()
    assert old in text
    (tmp_path / "zz.toml").write_text(text.replace(old, new, 1))
    monkeypatch.setattr(files, "HERE", tmp_path)
    with pytest.raises(SystemExit, match=said):
        read("zz")
