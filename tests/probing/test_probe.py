"""`groupwise probe`: estimators against enumeration, a policy that is known, the command."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import SMALL, run, small

from groupwise.cli import main
from groupwise.config import load, text
from groupwise.engine.batch import BatchEngine
from groupwise.engine.protocol import Request, Sampling
from groupwise.errors import ConfigError, DataError
from groupwise.evaluate.estimates import MODEL, SUBSETS, PassCount, Rates, all_alike, wilson
from groupwise.model.formats.checkpoint import Loaded
from groupwise.probing import advice, findings, probe
from groupwise.probing.probe import PreparedProbe, ProbeRequest, prepare_probe
from groupwise.records import Completion

# --- estimators -------------------------------------------------------------------------------


@pytest.mark.parametrize(("samples", "group"), [(2, 2), (5, 3), (8, 4), (6, 6)])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.93, 1.0])
def test_useful_share_and_pass_at_k_have_no_bias(samples: int, group: int, p: float) -> None:
    """Their means over all outcomes of the samples are 1 - p^G - (1-p)^G and 1 - (1-p)^G."""
    useful = passes = 0.0
    for outcome in product([0, 1], repeat=samples):
        passed = sum(outcome)
        chance = p**passed * (1 - p) ** (samples - passed)
        rates = Rates([PassCount(samples, passed)])
        useful += chance * rates.useful(group).value
        passes += chance * rates.pass_at(group).value
    assert useful == pytest.approx(1 - p**group - (1 - p) ** group, abs=1e-12)
    assert passes == pytest.approx(1 - (1 - p) ** group, abs=1e-12)


def test_plugging_in_the_share_would_be_biased() -> None:
    """What the estimators are there for: 1 of 8 says 0.125, and (7/8)^8 is far from 0."""
    plugged = 1 - (7 / 8) ** 8
    assert plugged == pytest.approx(0.656, abs=1e-3)
    assert Rates([PassCount(8, 1)]).pass_at(8).value == 1.0


@pytest.mark.parametrize("values", ["aabbb", "abcde", "aaaaa", "aabbc"])
@pytest.mark.parametrize("group", [2, 3, 5])
def test_groups_without_a_difference_by_enumeration(values: str, group: int) -> None:
    every = list(combinations(values, group))
    assert all_alike(values, group) == pytest.approx(
        sum(len(set(some)) == 1 for some in every) / len(every)
    )


@pytest.mark.parametrize(("a", "b"), [(0.3, 3.0), (2.0, 2.0)])
def test_larger_groups_than_were_sampled_go_by_a_model_that_says_so(a: float, b: float) -> None:
    """Against the truth, where p is Beta distributed indeed."""
    stream = random.Random(5)
    counts = []
    for _ in range(400):
        p = stream.betavariate(a, b)
        counts.append(PassCount(8, sum(stream.random() < p for _ in range(8))))
    rates = Rates(counts)

    def moment(a: float, b: float, k: int) -> float:
        return math.prod((a + i) / (a + b + i) for i in range(k))

    for group in (16, 64):
        truth = 1 - moment(a, b, group) - moment(b, a, group)
        found = rates.useful(group)
        assert found.how == MODEL and found.low < truth < found.high
        assert found.value == pytest.approx(truth, abs=0.06)
    assert rates.useful(8).how == SUBSETS


def test_what_never_passed_may_still_pass_now_and_then() -> None:
    """16 prompts without a pass: no estimate of exactly nothing that is sure of itself."""
    rates = Rates([PassCount(8, 0)] * 16)
    assert rates.useful(8).value == 0 and 0.1 < rates.useful(8).high < 0.25
    far = rates.useful(64)
    assert 0 < far.value < 0.15 and far.low < 0.02 and 0.05 < far.high < 0.5


def test_intervals_hold_what_they_should() -> None:
    """Of 400 probes of 24 prompts about 95 % hold the true share."""
    stream, held, truth = random.Random(1), 0, 0.0
    rates_of = [0.0, 0.05, 0.3, 0.7]
    truth = sum(1 - p**4 - (1 - p) ** 4 for p in rates_of) / 4
    for _ in range(400):
        drawn = [stream.choice(rates_of) for _ in range(24)]
        counts = [PassCount(8, sum(stream.random() < p for _ in range(8))) for p in drawn]
        found = Rates(counts).useful(4)
        held += found.low <= truth <= found.high
    assert held >= 0.92 * 400


def test_wilson_by_hand() -> None:
    """As in the literature: 1 of 10 is 1.8 % to 40.4 %; 0 of 10 is 0 to 27.8 %."""
    assert wilson(0.1, 10) == pytest.approx((0.0179, 0.4042), abs=1e-3)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-3)


def test_a_prompt_that_lacks_samples_is_left_out_and_none_without_any_counts() -> None:
    rates = Rates([PassCount(8, 4)] * 3 + [PassCount(2, 0), PassCount(0, 0)])
    assert len(rates.counts) == 4
    assert rates.useful(8).how == SUBSETS and rates.useful(8).value == 1


def test_histogram_and_quantiles_by_hand() -> None:
    counts = [PassCount(8, n) for n in range(9)]
    assert list(findings.histogram(counts).values()) == [1, 2, 2, 2, 1, 1]
    lengths = list(range(1, 101))
    assert findings.quantiles(lengths) == {"median": 50, "p90": 90, "p99": 99, "longest": 100}
    assert findings.quantiles([7]) == dict.fromkeys(("median", "p90", "p99", "longest"), 7)


# --- a policy that is known -------------------------------------------------------------------


class Known(BatchEngine):
    """Right with a probability by prompt; `wrong` gives no number."""

    def __init__(self, loaded: Loaded, rate: float | dict[int, float], answers: dict[int, str]):
        self.tokenizer, self.rate, self.answers = loaded.tokenizer, rate, answers
        self.temperatures: list[float] = []

    def answer(self, requests: Any, sampling: Sampling) -> list[list[Completion]]:
        self.temperatures.append(sampling.temperature)
        return [[self.write(r, n, sampling) for n in range(r.samples)] for r in requests]

    def write(self, request: Request, number: int, sampling: Sampling) -> Completion:
        name = f"{request.stream} {request.prompt_id} {request.draw} {number}"
        rate = self.rate if isinstance(self.rate, float) else self.rate[request.prompt_id]
        right = random.Random(name).random() < rate
        ids = self.tokenizer.encode(self.answers[request.prompt_id] if right else "+")
        return Completion((*ids, self.tokenizer.eos_ids[0]), torch.zeros(len(ids) + 1), "eos", 0)


def known(rates: float | tuple[float, ...], asked: ProbeRequest, **changes: Any) -> PreparedProbe:
    """Prompts with these rates, turn by turn, instead of the model's own."""
    config = small(tiny__cold_start_steps=0, **changes)
    prepared = prepare_probe(config, asked)
    tasks = prepared.rollouts[0].tasks
    answers = {task.id: str(task.answer) for task in tasks}
    by_task = {
        task.id: rates if isinstance(rates, float) else rates[i % len(rates)]
        for i, task in enumerate(tasks)
    }
    prepared.engine = Known(prepared.setup.loaded, by_task, answers)
    return prepared


def test_a_known_policy_is_found_as_it_is() -> None:
    prepared = known((0.0, 0.2, 0.6, 1.0), ProbeRequest(prompts=40, samples=32), group_size=4)
    made = prepared.run()
    (found,) = made.findings
    truth = sum(1 - p**4 - (1 - p) ** 4 for p in (0.2, 0.6)) / 4
    assert found.useful.value == pytest.approx(truth, abs=0.05)
    assert found.passing.value == pytest.approx(0.45, abs=0.04)
    assert found.pass_at.value == pytest.approx((0 + 1 - 0.8**8 + 1 - 0.4**8 + 1) / 4, abs=0.04)
    assert (found.never, found.always) == (10, 10)
    assert found.spread.value == pytest.approx(found.useful.value)  # rewards are 0 and 1
    assert found.binary and found.failed == 0 and found.format_share is None
    assert found.truncated_share == 0 and found.lengths["longest"] <= 4
    again = known((0.0, 0.2, 0.6, 1.0), ProbeRequest(prompts=40, samples=32), group_size=4).run()
    assert again.as_dict() == made.as_dict()


@pytest.mark.parametrize(
    ("rates", "words", "change"),
    [
        (0.0, "16 of 16 prompts never pass in 8 samples: the data is too hard or the reward is "
         "broken", "easier prompts"),
        (1.0, "16 of 16 prompts always pass", "harder prompts"),
        ((0.03, 0.05), "", "group_size="),
        (0.5, "ready to train", ""),
    ],
)  # fmt: skip
def test_verdicts(rates: Any, words: str, change: str) -> None:
    samples = 64 if rates == (0.03, 0.05) else 8
    made = known(rates, ProbeRequest(prompts=16, samples=samples)).run()
    found = advice.advise(made)
    assert words in "\n".join(verdict.text for verdict in found.verdicts)
    assert found.first.startswith(change) and bool(found.first) == bool(change)


def test_the_suggested_group_is_the_smallest_that_is_useful_enough() -> None:
    """p = 0.1: 1 - 0.9^G - 0.1^G is 57 % for 8 and 81 % for 16."""
    made = known(0.1, ProbeRequest(prompts=100, samples=64)).run()
    found = advice.group_size(made.findings[0], 4)
    assert found.setting == "group_size=16"
    for size, truth in ((8, 0.5695), (16, 0.8147)):
        share = made.findings[0].useful_by_group[size]
        assert (
            share.value == pytest.approx(truth, abs=0.03) and f"{share.value:.0%}" in found.reason
        )
    hopeless = known((0.0, 0.0, 0.0, 0.5), ProbeRequest(prompts=40, samples=64)).run()
    found = advice.group_size(hopeless.findings[0], 4)
    assert found.setting == "group_size=4" and "no size up to 64" in found.reason  # 22 %, 25 %
    # p = 0.01: 15 % of groups of 16, 28 % of 32, 47 % of 64. Fewer samples would be no remedy.
    hard = known(0.01, ProbeRequest(prompts=200, samples=64)).run()
    assert advice.group_size(hard.findings[0], 8).setting == "group_size=64"


def test_a_limit_of_tokens_that_cuts_off_or_is_never_reached() -> None:
    made = known(0.5, ProbeRequest(prompts=4)).run()
    (found,) = made.findings
    cut = replace(made, most_tokens=100), replace(found, truncated_share=0.4)
    assert advice.max_tokens(*cut).setting == "engine.max_tokens=8"
    full = replace(made, most_tokens=4), replace(found, truncated_share=0.4)
    assert "shorter answers" in advice.max_tokens(*full).reason
    config = load(SMALL | {"engine.max_tokens": 64, "recipe.aggregation.length": 64})
    never = replace(made, config=config), replace(found, lengths=found.lengths | {"p99": 3})
    assert advice.max_tokens(*never).setting == "engine.max_tokens=16"
    first = advice.advise(replace(made, findings=[cut[1]], most_tokens=100)).first
    assert first == "engine.max_tokens=8"


def test_rewards_with_more_values_than_two(tmp_path: Path) -> None:
    """What passes is said, and whether rewards differ is counted from the samples themselves."""
    (tmp_path / "r.py").write_text(
        "def part(completion, answer):\n    return 1.0 if answer in completion else 0.25\n"
        "def bonus(completion):\n    return float(len(completion) % 2)\n"
    )
    parts = {f"{tmp_path}/r.py:part": 1.0, f"{tmp_path}/r.py:bonus": 0.5}
    made = known(0.5, ProbeRequest(prompts=8), reward__parts=parts).run()
    assert "r.py:part gives 1" in made.passing.words
    found = made.findings[0]
    rewards = [[r.grade.reward for r in group] for group in made.rollouts[0].groups]
    direct = [1 - all_alike(values, 4) for values in rewards]
    assert not found.binary and found.spread.value == pytest.approx(sum(direct) / 8)
    assert found.signal == found.spread
    full = known(0.5, ProbeRequest(prompts=8, threshold=0.2), reward__parts=parts).run()
    assert full.findings[0].passing.value == 1.0 and "0.2 or more" in full.passing.words


def test_the_full_mark_is_what_all_parts_give_together() -> None:
    parts = {"length(target=2)": 1.0, "format(pattern='+')": 0.5}
    made = known(0.5, ProbeRequest(prompts=8), reward__parts=parts).run()
    assert "a reward of 1.5" in made.passing.words
    found = made.findings[0]
    wrong = sum(r.text.startswith("+") for g in made.rollouts[0].groups for r in g) / 64
    assert found.format_share == wrong == found.passing.value


def test_rewards_that_fail_are_no_zeros(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def fails(completion, answer):\n"
        "    if completion.startswith('+'):\n        raise ValueError('no plus')\n    return 1.0\n"
    )
    parts = {f"{tmp_path}/r.py:fails": 1.0}
    made = known(0.5, ProbeRequest(prompts=8, samples=16), reward__parts=parts).run()
    (found,) = made.findings
    wrong = sum(r.text.startswith("+") for g in made.rollouts[0].groups for r in g)
    assert found.failed == wrong > 0 and found.passing.value == 1.0
    first, *_ = advice.advise(made).verdicts
    assert f"{wrong} of 128 rewards failed" in first.text and "no plus" in first.text
    assert "mend the reward" in advice.advise(made).first


def test_settings_are_compared_beyond_chance() -> None:
    prepared = known(0.5, ProbeRequest(prompts=24, temperatures=(0.1, 1.0)))

    class Warm(Known):
        def answer(self, requests: Any, sampling: Sampling) -> list[list[Completion]]:
            self.rate = 0.5 if sampling.temperature == 1.0 else 0.0
            return super().answer(requests, sampling)

    old = prepared.engine
    assert isinstance(old, Known)
    prepared.engine = Warm(prepared.setup.loaded, 0.0, old.answers)
    made = prepared.run()
    assert made.findings[0].never == 24
    assert advice.advise(made).first == "data.template=auto engine.temperature=1"


def test_stopped_early_it_reports_on_what_there_is() -> None:
    prepared = known(0.5, ProbeRequest(prompts=8, temperatures=(0.5, 1.0)))
    calls: Iterator[int] = iter(range(100))
    real = prepared.engine.generate

    def interrupted(*given: Any, **told: Any) -> Any:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return real(*given, **told)

    prepared.engine.generate = interrupted  # type: ignore[method-assign]
    made = prepared.run()  # two prompts a call, by turns
    assert made.interrupted and [found.prompts for found in made.findings] == [6, 4]
    at_once = known(0.5, ProbeRequest(prompts=8))
    at_once.engine.generate = lambda *_, **told: next(iter(()), None) or _stop()  # type: ignore
    with pytest.raises(KeyboardInterrupt):
        at_once.run()


def _stop() -> Any:
    raise KeyboardInterrupt


# --- bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (ProbeRequest(temperatures=(0.0,)), "would be the same"),
        (ProbeRequest(temperatures=(1.0, 1.0)), "given twice"),
        (ProbeRequest(prompts=0), "too few"),
        (ProbeRequest(samples=1), "too few"),
    ],
)
def test_what_would_tell_nothing_is_refused(asked: ProbeRequest, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare_probe(small(), asked)


def test_a_template_that_is_not_there_is_refused_before_a_model_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "starting_model", lambda *_: pytest.fail("too late"))
    with pytest.raises(DataError, match="r1_zero"):
        prepare_probe(small(), ProbeRequest(templates=("auto", "r1zero")))


def test_recipes_that_sample_nothing(tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    config = load(recipe="dpo", **{"data.train": str(data), "model.path": "nowhere"})
    with pytest.raises(ConfigError, match="nothing to probe"):
        prepare_probe(config)


# --- the command, with a real model -----------------------------------------------------------


def called(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(("probe", *argv))
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(text(load(SMALL)))
    return str(path)


def test_the_command_in_words(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (config_file, "--prompts", "6", "--temperature", "1", "--temperature", "0.5")
    status, out, err = called(capsys, *argv)
    assert status == 0
    assert "6 prompts x 8 samples x 2 settings, up to 4 tokens each: about" in err
    for words in ("A sample passes if its row's grader gives 1",
                  "pass@8", "useful of 4", "auto at 0.5",
                  "prompts by pass rate", "useful groups by size", "~", "suggested",
                  "group_size=", "engine.max_tokens=", "of 4 groups in a step"):  # fmt: skip
        assert words in out, words


def test_the_command_as_data_twice_the_same(
    config_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = (config_file, "--prompts", "5", "--samples", "4", "--json")
    out = tmp_path / "out"
    status, first, _ = called(capsys, *argv, "--out", str(out))
    found = json.loads(first)
    assert status == 0 and found["samples_per_prompt"] == 4
    (setting,) = found["settings"]
    assert setting["prompts"] == 5 and setting["sampled"] == 20
    assert setting["pass_at"]["how"] == MODEL  # 8 of 4 samples
    assert setting["useful"]["how"] == SUBSETS
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 20
    assert sum(row["passed"] for row in rows) / 20 == pytest.approx(setting["passing"]["value"])
    assert json.loads((out / "probe.json").read_text()) == found
    _, again, _ = called(capsys, *argv)
    a, b = ({**json.loads(x), "seconds": 0} for x in (first, again))
    assert a == b
    _, other, _ = called(capsys, config_file, "seed=1", *argv[1:])
    assert json.loads(other)["settings"] != found["settings"]
    status, _, err = called(capsys, *argv, "--out", str(out))
    assert status == 2 and "overwritten" in err


def test_a_run_is_probed_as_it_is_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "run", steps=1)
    status, out, _ = called(capsys, str(tmp_path / "run"), "--prompts", "3", "--json")
    found = json.loads(out)
    assert status == 0 and found["checkpoint"].endswith("step_1")


def test_ctrl_c_ends_the_command_with_a_report(
    config_file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    grade, graded = probe.grade, list[int]()

    def once(*args: Any) -> Any:
        if graded:
            raise KeyboardInterrupt
        graded.append(1)
        return grade(*args)

    monkeypatch.setattr(probe, "grade", once)
    monkeypatch.setattr(probe, "SLOTS", 16)
    status, out, _ = called(capsys, config_file, "--prompts", "20")
    assert status == 130 and "Stopped early" in out and "pass@8" in out


def test_bad_flags(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, words in (
        (("--temperature", "0"), "would be the same"),
        (("--samples", "1"), "too few"),
        (("--template", "nope"), "none of"),
        (("data.train=missing.jsonl",), "missing.jsonl"),
    ):
        status, _, err = called(capsys, config_file, *argv)
        assert status == 2 and words in err, argv
