"""What a person sees: the plain line, the panel, hints, and what must never reach a terminal."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from typing import Any

import pytest

from groupwise.watch.display import (
    LOSS_NOTE,
    Display,
    clock,
    sparkline,
    visible,
)
from groupwise.watch.vital_signs import useful_share

STEP = {
    "reward/mean": 0.4321,
    "groups/dead_share": 0.125,
    "groups/count": 16.0,
    "groups/all_fail_share": 0.125,
    "length/mean": 4.21,
    "length/truncated_share": 0.0,
    "entropy/mean": 0.8123,
    "mismatch/abs_mean": 1.23e-7,
    "optim/grad_norm": 0.6249,
    "updates/count": 1.0,
    "clip/high": 0.0,
    "clip/low": 0.0,
    "loss/total": 1e-9,
    "time/rollout": 0.31,
    "time/grade": 0.001,
    "time/update": 0.52,
    "time/step": 0.9,
    "time/tokens_per_second": 1234.4,
}


def shown(*steps: dict[str, Any], total: int = 100, start: int = 0) -> list[str]:
    stream = io.StringIO()
    display = Display(stream)
    display.start([], total, start)
    for metrics in steps:
        display.step(metrics)
    return [
        line for line in stream.getvalue().splitlines() if not line.startswith("The loss is near 0")
    ]


def test_the_plain_line_to_the_letter() -> None:
    first, last = shown(STEP, {**STEP, "eval/accuracy": 0.61}, start=10)
    assert last == (
        "step 12/100  training reward 0.432  held-out accuracy 61.0 %  useful groups 88 %  "
        "length 4.2  entropy 0.81  mismatch 1.2e-07  grad 0.625  clip n/a (on-policy)  "
        "1,234 tok/s  rollout 0.3 s  update 0.5 s  ETA 1:19"
    )
    assert "ETA" not in first  # one step is no measure
    assert "loss" not in first + last


def test_a_step_with_a_critic_shows_what_it_knows_and_whether_the_policy_waits() -> None:
    known = {**STEP, "critic/explained_variance": 0.4231}
    of_updates = ("optim/", "clip/", "loss/", "entropy/", "mismatch/")
    alone = {k: x for k, x in known.items() if not k.startswith(of_updates)} | {"updates/count": 0}
    first, second = shown(alone, known)
    assert "explained variance 0.42  policy waits, critic alone" in first
    assert not any(word in first for word in ("grad", "clip", "entropy", "mismatch"))
    assert "explained variance 0.42  grad 0.625" in second and "waits" not in second


def test_what_the_device_did_stands_behind_its_phase_and_the_bottleneck_is_named() -> None:
    slow = {
        **STEP,
        "time/rollout_bandwidth_share": 0.547,
        "time/update_flops_share": 0.481,
        "time/bottleneck": "update, 58 % of the step, compute-bound at 48 % of the device's "
        "operations",
    }
    other = {**slow, "time/bottleneck": "rollout, 51 % of the step"}
    lines = shown(slow, slow, *[other] * 9, slow)
    assert (
        "rollout 0.3 s (55 % bandwidth)  update 0.5 s (48 % FLOPs)  bottleneck update" in lines[1]
    )
    # In words: not for the first step, which warms up, and not on every change.
    words = [(at, line) for at, line in enumerate(lines) if line.startswith("bottleneck:")]
    assert words == [
        (2, f"bottleneck: {slow['time/bottleneck']}"),
        (4, "bottleneck: rollout, 51 % of the step"),
    ]


def test_the_time_left_is_that_of_recent_steps_without_the_first() -> None:
    """Step 1 warms up (100 s); then 2 s and 4 s: 3 s each for the 7 that are left."""
    lines = shown(*({"time/step": seconds} for seconds in (100.0, 2.0, 4.0)), total=10)
    assert lines[1].endswith("ETA 0:16")
    assert lines[2].endswith("ETA 0:21")
    slow_then_fast = [{"time/step": 50.0}] * 30 + [{"time/step": 1.0}] * 20
    assert shown(*slow_then_fast, total=60)[-1].endswith("ETA 0:10")


def test_clip_is_a_number_only_where_something_can_be_clipped() -> None:
    metrics = {"updates/count": 4.0, "clip/high": 0.01, "clip/low": 0.005}
    assert "clip 1.5 %" in shown(metrics)[0]
    one = {"updates/count": 1.0}
    assert "clip 1.5 %" in shown({**metrics, **one})[0]  # a sampler that is behind
    assert "clip n/a (on-policy)" in shown({"clip/high": 0.0, "clip/low": 0.0, **one})[0]


def test_rows_learned_as_they_stand_show_no_reward_and_no_clip() -> None:
    """What stands for a reward is the rows' weight, and one update of the data clips nothing."""
    assert shown({**STEP, "supervised/nll": 1.234, "time/step": None}) == [
        "step 1/100  useful groups 88 %  length 4.2  entropy 0.81  mismatch 1.2e-07  nll 1.234  "
        "grad 0.625  1,234 tok/s  rollout 0.3 s  update 0.5 s"
    ]


def test_preferences_show_their_loss_and_how_well_answers_are_told_apart() -> None:
    pairs = {"loss/preference": 0.6931, "pairs/accuracy": 0.75, "pairs/margin": 0.1234}
    assert shown(pairs) == ["step 1/100  loss 0.693  accuracy 75 %  margin 0.123"]
    alone = {"loss/preference": 0.5, "answers/good_reward": 0.25, "answers/bad_reward": -0.5}
    assert shown(alone) == ["step 1/100  loss 0.500  margin 0.750"]
    assert shown({"scores/accuracy": 0.5, "scores/margin": -0.1}) == [
        "step 1/100  accuracy 50 %  margin -0.100"
    ]


def test_an_old_held_out_accuracy_says_from_when_it_is() -> None:
    lines = shown({"step": 0, "eval/accuracy": 0.5}, {"reward/mean": 0.1}, {"eval/accuracy": 0.75})
    assert lines == [
        "step 0/100  held-out accuracy 50.0 %",
        "step 1/100  training reward 0.100  held-out accuracy 50.0 % (step 0)",
        "step 2/100  held-out accuracy 75.0 %",
    ]


def test_what_went_wrong_is_on_the_line() -> None:
    (line,) = shown({"reward/failed_share": 0.03, "optim/skipped": 1.0, "length/mean": 9.0,
                     "length/truncated_share": 0.34, "reward/mean": None})  # fmt: skip
    assert line == "step 1/100  length 9.0 (34 % cut off)  graders failed 3 %  updates skipped 1"
    (fine,) = shown({"reward/failed_share": 0.0, "optim/skipped": 0.0, "length/mean": 9.0,
                     "length/truncated_share": 0.05})  # fmt: skip
    assert fine == "step 1/100  length 9.0"


def test_groups_that_dynamic_sampling_dropped_were_useless() -> None:
    metrics = {"groups/dead_share": 0.0, "groups/count": 16.0, "refill/drawn_groups": 64.0}
    assert useful_share(metrics) == 0.25
    assert useful_share({"groups/dead_share": 0.25, "groups/count": 4.0}) == 0.75
    assert useful_share({}) is None


def test_what_dynamic_sampling_cost_is_on_the_line() -> None:
    drew = {"refill/rounds": 2.0, "refill/tokens": 1234.0, "cost/wasted/dropped": 0.4}
    assert "refills 2 (1,234 tokens), 40 % of tokens dropped" in shown(drew)[0]
    none = {"refill/rounds": 0.0, "refill/tokens": 0.0, "cost/wasted/dropped": 0.0}
    assert "refills" not in shown(none)[0]


def test_the_loss_is_explained_once_and_not_on_resume() -> None:
    stream = io.StringIO()
    display = Display(stream)
    display.start(["16 prompts x 8"], 3)
    for _ in range(3):
        display.step(STEP)
    assert stream.getvalue().count(LOSS_NOTE.format(measures="held-out accuracy and reward")) == 1
    assert "near 0 whether or not the model learns" in LOSS_NOTE
    assert stream.getvalue().startswith("16 prompts x 8\n")
    resumed = io.StringIO()
    Display(resumed).start([], 3, 2)
    assert resumed.getvalue() == ""


SUMMARY = {
    "steps": 100,
    "seconds": 3725.0,
    "accuracy_before": 0.2,
    "accuracy_after": 0.864,
    "reward_before": None,
    "reward_after": 0.9,
    "samples": [{"prompt": "1+2=", "answer": 3, "before": "\x1b[2Jhi", "after": "3",
                 "correct_before": False, "correct_after": True}],
}  # fmt: skip


def test_the_end_shows_before_and_after() -> None:
    stream = io.StringIO()
    Display(stream).finish(SUMMARY, "my runs/one")
    assert stream.getvalue().splitlines() == [
        "",
        "prompt  1+2=",
        "answer  3",
        "before  \\x1b[2Jhi (wrong)",
        "after   3 (correct)",
        "",
        "held-out accuracy 20.0 % -> 86.4 %",
        "held-out reward n/a -> 0.900",
        "100 steps in 1:02:05",
        "next:",
        "  groupwise view 'my runs/one'           see it, down to every token",
        "  groupwise diagnose 'my runs/one'       what is wrong with it, if anything",
        "  groupwise eval 'my runs/one'           its best checkpoint, with intervals",
        "  groupwise export 'my runs/one' FOLDER  a plain model for other programs",
    ]


def test_the_end_says_nothing_of_a_reward_that_was_never_measured() -> None:
    stream = io.StringIO()
    Display(stream).finish({**SUMMARY, "reward_after": None, "samples": []}, "run")
    assert "held-out accuracy 20.0 % -> 86.4 %\n100 steps" in stream.getvalue()


def test_the_end_of_a_run_without_held_out_tasks_promises_none() -> None:
    """No n/a -> n/a, no note to watch what is not there, no command that would be refused."""
    stream = io.StringIO()
    display = Display(stream)
    display.start([], 3, held_out=False)
    display.finish({"steps": 3, "seconds": 2.0}, "runs/one", held_out=False)
    told = stream.getvalue()
    assert "Watch the training reward." in told
    assert "3 steps in 0:02; no task was held out to judge it by (data.eval)" in told
    assert "held-out" not in told and "n/a" not in told and "groupwise eval" not in told
    assert "groupwise diagnose runs/one" in told


def test_the_training_reward_is_that_of_all_samples() -> None:
    """Groups that dynamic sampling drops are answers of the policy, too; older runs lack them."""
    both = {"reward/mean": 0.716, "reward/sampled_mean": 0.805}
    assert "training reward 0.805" in shown(both)[0]
    assert "training reward 0.716" in shown({"reward/mean": 0.716})[0]


def test_the_panel_on_a_terminal() -> None:
    stream = io.StringIO()
    with Display(stream, live=True) as display:
        display._console.width = 100
        display.start(["header"], 100)
        for reward in (0.0, 0.5, 1.0):
            display.step({**STEP, "reward/mean": reward, "eval/accuracy": 0.61})
        display.warn("odd [bold]text[/] \x1b[2J")
        display.finish(SUMMARY, "runs/one")
    text = stream.getvalue()
    last = text[text.rindex("step 3/100") :]
    for part in ("training reward", "1.000", "61.0 %", "88 %", "4.2", "0.81", "1.2e-07",
                 "n/a (on-policy)", "▁▅█", "1,234 tok/s", "rollout 0.3 s · update 0.5 s",
                 "ETA 1:27"):  # fmt: skip
        assert part in last, part
    assert "warning: odd [bold]text[/] \\x1b[2J" in text and "\x1b[2J" not in text
    assert "loss" not in last
    assert "held-out accuracy 20.0 % -> 86.4 %" in last


@pytest.mark.parametrize("doing", ["sampling 12 of 64 completions", ""])
def test_the_panel_says_what_is_under_way_and_where_to_look(doing: str) -> None:
    stream = io.StringIO()
    with Display(stream, live=True) as display:
        display._console.width = 100
        display.place("runs/my run")
        display.start(["header"], 100)
        display.sample("7+5=", "12\n\x1b[2J", 1.0)
        display.step({**STEP, "step": 1, "time/run": 61.0})
        display._status("grading")
        display._status(doing)
    text = stream.getvalue()  # no terminal: only what is left on the screen
    assert ("now: step 2/100: sampling 12 of 64 completions" in text) == bool(doing)
    assert "grading" not in text and "elapsed 1:01" in text
    assert "sample (reward 1): 7+5= → 12 \\x1b[2J" in text and "\x1b[2J" not in text
    assert "see it: groupwise view 'runs/my run', then http://127.0.0.1:7007" in text


@pytest.mark.parametrize("live", [False, True])
def test_a_reader_who_left_does_not_end_the_run(live: bool) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with Display(Gone(), live=live) as display:
        display.start(["a"], 3)
        display.step(STEP)
        display.warn("b")
        display.finish(SUMMARY, "runs/one")


def test_an_ascii_terminal_shows_question_marks_instead_of_a_traceback() -> None:
    code = "from groupwise.watch.display import Display; d = Display(); d.start(['ℓ'], 1)"
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"?\nThe loss is near 0")


def test_small_things() -> None:
    assert [clock(s) for s in (0, 59.6, 130, 3725)] == ["0:00", "1:00", "2:10", "1:02:05"]
    assert sparkline([0.0, 1.0, 0.5], 10) == "▁█▅"
    assert sparkline([2.0, 2.0], 10) == "▁▁"
    assert sparkline([0, 0, 1, 1], 2) == "▁█"
    assert visible("a\tb\n\x07\x9b\r\u202e\ud800 \u200d é") == (
        "a\tb\n\\x07\\x9b\\r\\u202e? \u200d é"
    )
