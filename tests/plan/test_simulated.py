"""The simulator against cases that are solved by hand, and against what a run recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import run as train_small

from groupwise.cli import main
from groupwise.errors import RunError
from groupwise.plan.simulate import LABEL, DeviceRates, SimulatedWay, rates_of, recorded, simulate

TICK = DeviceRates(tick=1.0, token=0.0, learn=0.0, fixed=3.0)
APART = SimulatedWay("apart", sampling=1, learning=1, apart=True)


def even(steps: int, answers: int, length: int) -> list[list[list[int]]]:
    return [[[length] * answers] for _ in range(steps)]


@pytest.mark.parametrize(("slots", "waves", "beside"), [(8, 1, 8), (100, 1, 8), (4, 2, 4)])
def test_in_turns_phases_add_up(slots: int, waves: int, beside: int) -> None:
    rates = DeviceRates(tick=0.5, token=0.25, learn=0.01, fixed=2.0, sync=0.125)
    rollout, learn = waves * 10 * (0.5 + 0.25 * beside), 2.0 + 0.01 * 80
    found = simulate(even(5, 8, 10), slots, rates, SimulatedWay("turns"))
    assert found.step == pytest.approx(rollout + learn + 0.125)
    assert found.sampler_idle == pytest.approx(1 - rollout / found.step)
    assert found.learner_idle == pytest.approx(1 - learn / found.step)
    assert found.lag_most == 0


@pytest.mark.parametrize("fixed", [3.0, 10.0, 31.0])
def test_a_lag_of_one_step_hides_the_shorter_phase(fixed: float) -> None:
    """The first rollout and the last update stand alone; all between overlap."""
    rollout, steps = 10.0, 7
    for sync in ("drain", "recompute", "keep"):
        setting = replace(APART, lag=1, sync=sync)  # type: ignore[arg-type]
        found = simulate(even(steps, 4, 10), 4, replace(TICK, fixed=fixed), setting)
        whole = rollout + (steps - 1) * max(rollout, fixed) + fixed
        assert found.step * steps == pytest.approx(whole)
        assert found.lag_most == 1 and found.lag_mean == pytest.approx((steps - 1) / steps)
    assert simulate(even(steps, 4, 10), 4, replace(TICK, fixed=fixed), APART).step == 10 + fixed


def test_more_devices_share_what_can_be_shared() -> None:
    rates = DeviceRates(tick=1.0, token=0.5, learn=0.25, fixed=0.0)
    two = SimulatedWay("two", sampling=2, learning=2)
    found = simulate(even(3, 8, 10), 8, rates, two)  # each holds 4, and starts every tick itself
    assert found.step == pytest.approx(10 * (1 + 0.5 * 4) + 0.25 * 80 / 2)


def test_a_long_answer_is_cut_by_new_weights_or_waited_for() -> None:
    """Two places; three steps of a short and a long answer; worked out on paper."""
    steps = [[[2, 10]]] * 3
    keep = simulate(steps, 2, TICK, replace(APART, lag=1, sync="keep"))
    assert keep.step * 3 == pytest.approx(27.0) and keep.lag_mean == pytest.approx(4 / 6)
    drain = simulate(steps, 2, TICK, replace(APART, lag=1))
    assert drain.step * 3 == pytest.approx(27.0)
    # Nine tokens are read again at 13, and three at 17.9: 0.9 and 0.3 later.
    again = simulate(steps, 2, replace(TICK, prefill=0.1), replace(APART, lag=1, sync="recompute"))
    assert again.step * 3 == pytest.approx(28.2)
    free = simulate(steps, 2, TICK, replace(APART, lag=1, sync="recompute"))
    assert free.step == keep.step


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_no_answer_is_older_than_the_lag(lag: int) -> None:
    lengths = [[[(7 * n + 3 * s) % 11 + 1 for n in range(6)]] for s in range(12)]
    for sync in ("drain", "recompute", "keep"):
        setting = replace(APART, lag=lag, sync=sync)  # type: ignore[arg-type]
        found = simulate(lengths, 4, replace(TICK, token=0.1), setting)
        assert found.lag_most <= lag
        assert 0 <= found.lag_mean <= lag


def test_rates_are_those_that_made_the_times() -> None:
    steps = [[[n, 2 * n], [3 * n] * k] for n, k in ((1, 2), (4, 1), (6, 3), (2, 5))]
    tokens = [sum(map(sum, batch)) for batch in steps]
    ticks = [3 * n for n in (1, 4, 6, 2)]
    lines = [{"time/rollout": 0.5 * t + 0.01 * n, "time/update": 0.2 * n, "time/score": 0.1 * n,
              "time/eval": 9.0, "time/step": 0.5 * t + 0.01 * n + 0.3 * n + 0.75 + 9.0}
             for t, n in zip(ticks, tokens, strict=True)]  # fmt: skip
    found = rates_of(steps, lines, slots=100)
    assert found.tick == pytest.approx(0.5) and found.token == pytest.approx(0.01)
    assert found.learn == pytest.approx(0.3) and found.fixed == pytest.approx(0.75)
    for line in lines:  # longer batches that took less: no rate is below 0
        line["time/rollout"] = 1.0 / line["time/rollout"]
    odd = rates_of(steps, lines, slots=100)
    assert odd.tick >= 0 and odd.token >= 0 and odd.tick + odd.token > 0


def test_a_run_is_replayed_and_always_called_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train_small(folder, steps=5)
    # Times of a machine that is not busy, so that what comes out is known.
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        own: dict[str, Any] = {"rollout": 2.0, "update": 1.0, "score": 0.0, "eval": 0.0}
        line |= {f"time/{name}": x for name, x in own.items()} | {"time/step": 3.5}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines[1:]))
    found = recorded(folder)
    assert len(found.steps) == 4 and found.slots == 16 and found.seconds == 3.5
    assert all(len(batch) == 4 and len(batch[0]) == 4 for batch in found.steps)
    assert found.ranks == 1 and "ranks" not in found.words
    capsys.readouterr()
    assert main(["plan", "--simulate", str(folder)]) == 0
    said = capsys.readouterr().out
    assert LABEL in said and "simulated" in said.splitlines()[2]
    assert main(["plan", "--simulate", str(folder), "--json", "--lag", "2"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["label"] == LABEL and all(each["simulated"] for each in data["results"])
    assert data["results"][0]["step"] == pytest.approx(3.5, rel=0.15)
    assert main(["plan", "--simulate", str(tmp_path)]) == 2
    assert "no run folder" in capsys.readouterr().err
    assert main(["plan", "--simulate", str(folder), "--lag", "-1"]) == 2


def test_ranks_of_a_run_count_as_one_device(tmp_path: Path) -> None:
    """Its rates are those of all of them together."""
    folder = tmp_path / "run"
    train_small(folder, steps=5)
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"time/rank_wait_0": 0.1, "time/rank_wait_1": 0.2}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    found = recorded(folder)
    assert found.ranks == found.as_dict()["ranks"] == 2
    assert found.words.endswith("by 2 ranks, which count as one device")


def test_a_run_with_a_torn_line_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "time/rollout": 1.0}\n{"step": 2, "ti\n{}\n'
    )
    with pytest.raises(RunError, match=r"metrics\.jsonl"):
        recorded(tmp_path)
