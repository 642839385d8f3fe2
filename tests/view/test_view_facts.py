"""A run in a few facts: its verdict, how far it is, healthy ranges, events told as one."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from viewing import add_steps, get, make_run, viewing

from groupwise.runfiles.folder import Event, RunFolder
from groupwise.view.curves import constant, healthy_range, told
from groupwise.view.facts import (
    device_of,
    model_of,
    progress_of,
    recipe_of,
    row_of,
    spark,
    tiles_of,
    verdict_of,
)
from groupwise.view.runs import ViewedRun
from groupwise.watch.chart import Point


def calm(path: Path, steps: int = 3, config: str = "steps = 10\n") -> RunFolder:
    """A run without an event."""
    run = make_run(path, steps, config)
    run.events.unlink(missing_ok=True)
    return run


def judged(run: RunFolder) -> tuple[str, str]:
    viewed = ViewedRun(run.path, "one")
    about = viewed.about()
    found = verdict_of(viewed, about, progress_of(viewed, about))
    return found.level, found.words


def test_a_verdict_is_one_sentence_of_one_colour(tmp_path: Path) -> None:
    run = calm(tmp_path / "one")
    assert judged(run) == ("good", "Healthy: no rule has fired in 3 steps.")
    run.add_events([Event(2, "health", "odd: x 3, above 2. Means that. Try: y.",
                          {"rule": "odd", "grave": False})])  # fmt: skip
    assert judged(run) == ("warn", "To be looked at since step 2: odd: x 3, above 2.")
    run.add_events([Event(3, "health", "bad: 0.5. Means that.", {"rule": "bad", "grave": True})])
    assert judged(run) == ("bad", "Sick since step 3: bad: 0.5.")
    other = calm(tmp_path / "other")
    other.add_events([Event(3, "not finite", "an update was skipped")])
    assert judged(other) == ("warn", "In step 3: an update was skipped")
    (calm(tmp_path / "broken").summary).write_text("{")
    assert judged(RunFolder(tmp_path / "broken"))[0] == "warn"
    empty = RunFolder(tmp_path / "empty")
    empty.check_writable()
    assert judged(empty) == ("none", "Nothing measured yet.")


def test_a_run_that_went_quiet_is_no_longer_going_on(tmp_path: Path) -> None:
    run = calm(tmp_path / "one")
    viewed = ViewedRun(run.path, "one")
    progress = progress_of(viewed, viewed.about())
    assert progress.live and (progress.share, progress.finished) == (0.3, False)
    old = time.time() - 3600
    os.utime(run.metrics, (old, old))
    assert judged(run) == ("warn", "It stopped at step 3 of 10; the same command goes on.")
    assert viewed.about().state == "Step 3 of 10, written 1 h ago."
    run.summary.write_text('{"steps": 3, "seconds": 12.5}')
    progress = progress_of(viewed, viewed.about())
    assert (progress.finished, progress.share, progress.seconds) == (True, 1.0, 12.5)
    assert row_of(viewed, viewed.about())["kind"] == "finished"


def test_the_time_left_is_that_of_the_last_steps(tmp_path: Path) -> None:
    run = calm(tmp_path / "one", 1)
    for step in range(2, 5):
        run.add_metrics(json.dumps({"step": step, "time/step": 2.0 * step, "time/run": 60.0}))
    viewed = ViewedRun(run.path, "one")
    progress = progress_of(viewed, viewed.about())
    assert progress.left == pytest.approx((10 - 4) * (4 + 6 + 8) / 3)
    assert progress.seconds == 60.0


def tiles(path: Path, lines: list[dict[str, float]], config: str) -> dict[str, tuple[str, str]]:
    run = RunFolder(path)
    run.check_writable()
    run.write_config(config)
    for line in lines:
        run.add_metrics(json.dumps(line))
    viewed = ViewedRun(path, "one")
    about = viewed.about()
    return {
        x.title: (x.value, x.words) for x in tiles_of(viewed, about, progress_of(viewed, about))
    }


def test_tiles_say_where_it_is_and_where_it_began(tmp_path: Path) -> None:
    config = 'steps = 10\nrecipe = "dapo*"\n[model]\npath = "tiny"\ndevice = "cpu"\n'
    lines = [{"step": n, "time/step": 30.0, "time/run": 30.0 * n, "cost/tokens": 1000 * n,
              "reward/mean": n / 10, "groups/dead_share": 0.25} for n in (1, 2)]  # fmt: skip
    assert tiles(tmp_path / "one", [{"step": 0, "eval/accuracy": 0.5}, *lines], config) == {
        "Held-out accuracy": ("50 %", ""),
        "Training reward": ("0.2", "0.1 at step 1"),
        "Useful groups": ("75 %", "75 % at step 1"),
        "Time": ("1 min", "30 s a step"),
        "Time left": ("4 min", ""),
        "Tokens sampled": ("2,000", ""),
        "Recipe": ("dapo", "with changes"),
        "Model": ("tiny", "on cpu"),
    }
    # What learns from rows has no reward: its likelihood stands in that place.
    rows = [{"step": n, "eval/accuracy": 0.5, "eval/nll": 2.0 - n} for n in (0, 1)]
    names = [*tiles(tmp_path / "rows", rows, config)]
    assert names[:3] == ["Held-out accuracy", "Held-out −log p a token", "Training reward"]
    pairs = [{"step": n, "pairs/accuracy": 0.5, "eval/nll": 1.0} for n in (0, 1)]
    names = [*tiles(tmp_path / "pairs", pairs, config)]
    assert names[1:3] == ["Pairs ranked as preferred", "Held-out −log p a token"]
    # Without groups there are none to be useful, and nothing stands there twice.
    alone = [{"step": 1, "eval/accuracy": 0.5, "reward/mean": 0.5}]
    names = [*tiles(tmp_path / "alone", alone, config)]
    assert names[:3] == ["Held-out accuracy", "Training reward", "Useful groups"]


def test_what_a_run_is(tmp_path: Path) -> None:
    assert recipe_of({"recipe": {"name": "dapo*"}}) == recipe_of({"recipe": "dapo*"}) == "dapo*"
    assert recipe_of({}) == model_of({}) == model_of({"model": 3}) == "–"
    assert model_of({"model": {"path": "/a/SmolLM2-135M/"}}) == "SmolLM2-135M"
    assert model_of({"model": {"path": "r1/1_cold/checkpoints/latest"}}) == "1_cold/latest"
    run = calm(tmp_path / "one", config='steps = 10\n[model]\ndevice = "cuda"\n')
    about = ViewedRun(run.path, "one").about()
    assert device_of(about) == "cuda"
    assert device_of(replace(about, manifest={"hardware": {"gpus": ["H200"]}})) == "H200"


def test_small_files_are_read_again_when_they_change(tmp_path: Path) -> None:
    run = calm(tmp_path / "one")
    viewed = ViewedRun(run.path, "one")
    assert viewed.about().settings["steps"] == 10
    run.write_config("steps = 99\n")
    assert viewed.about().settings["steps"] == 99
    run.config.unlink()
    assert viewed.about().config is None


def test_ranges_are_those_that_the_catalogue_names_plainly() -> None:
    assert healthy_range("below 0.5; rises as the data is mastered") == (None, 0.5)
    assert healthy_range("above 50 %") == (0.5, None)
    assert healthy_range("below 1e-3 (float32: below 1e-5)") == (None, 0.001)
    for words in ("below 3 x prompts_per_step", "below engine.max_tokens", "rises",
                  "above 0.4 on a GPU", "below 10 x its mean"):  # fmt: skip
        assert healthy_range(words) is None, words


def test_events_that_differ_by_numbers_are_told_as_one() -> None:
    events = [{"step": n, "kind": "refill", "text": f"drew {n} more"} for n in range(50, 112)]
    events += [{"step": 60, "kind": "refill", "text": "gave up"}]
    events += [{"step": n, "kind": "health", "text": f"sick {n}"} for n in (70, 71, 72)]
    found = [(x["step"], x["times"], x["text"]) for x in told(events)]
    assert found == [
        (111, "62 times, steps 50 to 111; the last: ", "drew 111 more"),
        (72, "", "sick 72"),
        (71, "", "sick 71"),
        (70, "", "sick 70"),
        (60, "", "gave up"),
    ]


def test_a_metric_is_constant_when_it_never_changed(tmp_path: Path) -> None:
    viewed = ViewedRun(make_run(tmp_path / "one", 5).path, "one")
    viewed.refresh()
    assert constant(viewed, "length/mean") and not constant(viewed, "reward/mean")
    assert not constant(viewed, "eval/accuracy")  # once so far: who knows


def test_a_small_curve_goes_from_low_to_high() -> None:
    points = [Point(step, step / 10) for step in (0, 5, 10)]
    assert spark(points) == "1.0,18.0 40.0,10.0 79.0,2.0"
    assert spark(points[:1]) == ""


def test_the_list_of_runs_as_data(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", 5)
    with viewing(tmp_path) as port:
        found = json.loads(get(port, "/runs.json")[1])
        (row,) = found["runs"]
        assert (row["name"], row["level"], row["kind"]) == ("one", "bad", "going")
        assert (row["reward"], row["share"]) == ("0.05 → 0.25", 0.5)
        add_steps(run, 6, 6)
        then = json.loads(get(port, f"/runs.json?known={found['version']}")[1])
        assert then["runs"][0]["reward_now"] == 0.3
