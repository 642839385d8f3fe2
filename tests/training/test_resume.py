"""A run that was killed and started again can't be told from one that never stopped."""

from __future__ import annotations

import io
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import cold_start
import pytest
from processes import exit_code
from runs import left_behind, metrics, run, small, start

from groupwise.errors import RunError
from groupwise.training import cold_start as course
from groupwise.training.loop import train
from groupwise.watch.display import Display

# Several updates a batch, dynamic sampling, a moving reference, a memory of prompts.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several updates and dynamic sampling": {
        "recipe": "dapo",
        "recipe__shaping": "",
        "recipe__schedule__updates": 2,
        "refills": 2,
    },
    "dynamic sampling until full": {
        "recipe": "olmo3",
        "refills": "until full",
        "refill_tokens": 60,
    },
    "a moving reference": {"recipe": "grpo", "reference__update": "ema:0.9"},
    "a memory of prompts": {"recipe": "dcpo", "data__size": 12, "eval__tasks": 4},
    "a curriculum": {"data__size": 16, "curriculum__easy": 0.25, "curriculum__hard": 0.25},
    "group sizes by pass rate": {"data__size": 16, "curriculum__group_sizes": "knapsack"},
    "earlier answers by prompt": {"recipe": "spo", "data__size": 12, "eval__tasks": 4},
    "a teacher that reads siblings": {
        "recipe": "sdpo",
        "teacher__path": "policy",
        "teacher__update": "ema:0.95",
        "teacher__prompt": "{sibling}{prompt}",
    },
    "an expert's answers": {
        "recipe": "chord",
        "train__coefs": {
            "auxiliary.coef": "warmup_cosine(warmup=1, decay=3, peak=0.8)",
            "correction.by": "rest_of_warmup_cosine(warmup=1, decay=3, peak=0.8)",
        },
    },
    "a KL that is held": {
        "recipe": "grpo",
        "train__coefs": {"penalty.coef": "kl_target(target=0.001, horizon=20)"},
    },
    "a learned exponent": {"recipe": "lambda_grpo"},
    "branches of answers": {
        "recipe": "vineppo",
        "recipe__advantage__step_difference__split": "sentence",
        "recipe__advantage__step_difference__branches": 2,
        "data__options": {"digits": 1, "filler": 3},
        "engine__max_tokens": 6,
    },
    "a critic that learns alone at first": {
        "recipe": "ppo",
        "recipe__schedule__updates": 2,
        "critic__alone_steps": 4,
    },
    "a reward model that learns first": {"recipe": "prime", "recipe__filter": ""},
    "a stale sampler": {"recipe": "tis", "engine__weights": "stale:2"},
    "routes of the sampler": {"recipe": "routing_replay_r3", "tiny__experts": 4},
    "routes of the learner": {
        "recipe": "rspo",
        "recipe__correction": "replay_routing()",
        "tiny__experts": 4,
    },
}


def test_the_embedded_model_is_made_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs of these tests share one cold start, which stands for those that are computed."""
    cold_start.make(tmp_path / "shared")
    monkeypatch.setattr(course, "teach", course.teach.__wrapped__)  # type: ignore[attr-defined]
    shared, *made = (
        (Path(folder) / "model.safetensors").read_bytes()
        for folder in (
            tmp_path / "shared",
            cold_start.make(tmp_path / "one"),
            cold_start.make(tmp_path / "two"),
        )
    )
    assert made == [shared, shared]
    assert (
        cold_start.make(tmp_path / "other", seed=1)
        and shared != (tmp_path / "other" / "model.safetensors").read_bytes()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_bug_46_n_and_n_more_steps_equal_2n(kind: str, tmp_path: Path) -> None:
    run(tmp_path / "whole", steps=6, **KINDS[kind])
    run(tmp_path / "halves", steps=3, **KINDS[kind])
    run(tmp_path / "halves", steps=6, **KINDS[kind])
    whole, halves = left_behind(tmp_path / "whole"), left_behind(tmp_path / "halves")
    # The first half ended with an evaluation of its own; the other lines are the same.
    ended = {name: x for name, x in halves["metrics"][3].items() if name.startswith("eval/")}
    assert whole["metrics"][3] == {k: x for k, x in halves["metrics"][3].items() if k not in ended}
    halves["metrics"][3] = whole["metrics"][3]
    for name in ("best",):  # which that evaluation may have been
        whole["values"].pop(name), halves["values"].pop(name)
    assert halves == whole


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "several updates and dynamic sampling",
        "a critic that learns alone at first",
        "a reward model that learns first",
        "routes of the sampler",
        "a curriculum",
    ],
)
def test_killed_at_random_moments_it_comes_back_the_same(kind: str, tmp_path: Path) -> None:
    changes = KINDS[kind] | {"steps": 8}
    begun = time.monotonic()
    assert exit_code(start(tmp_path / "whole", **changes)) == 0
    seconds = time.monotonic() - begun
    dice = random.Random(kind)
    folder, kills, fruitless, saved = tmp_path / "killed", 0, 0, ""
    while True:
        child = start(folder, **changes)
        # A busy machine may need longer than the first run did to get anywhere at all.
        time.sleep(seconds * dice.uniform(0.05, 0.3) * 1.3**fruitless)
        os.kill(child, signal.SIGKILL)
        code = exit_code(child)
        if code == 0:
            break
        assert code == -signal.SIGKILL, "it failed by itself"
        kills += 1
        before, saved = saved, (folder / "checkpoints" / "latest").resolve().name
        fruitless = fruitless + 1 if saved == before else 0
        assert kills < 100, "it makes no progress"
    assert kills > 0
    assert left_behind(folder) == left_behind(tmp_path / "whole")


def test_sigterm_saves_and_exits(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    child = start(folder, steps=500, checkpoint__every_steps=0, eval__every=0)
    while not (folder / "metrics.jsonl").exists() or len(metrics(folder)) < 3:
        time.sleep(0.02)
    os.kill(child, signal.SIGTERM)
    assert exit_code(child) == 1  # `Stopped`, which the command line turns into its own code
    saved = (folder / "checkpoints" / "latest").resolve().name
    assert saved == f"step_{len(metrics(folder)) - 1}"


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    run(tmp_path / "whole", steps=4)
    folder = tmp_path / "damaged"
    run(folder, steps=3)
    weights = folder / "checkpoints" / "step_3" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    run(folder, steps=4)
    whole, again = left_behind(tmp_path / "whole"), left_behind(folder)
    assert again["model.safetensors"] == whole["model.safetensors"]
    assert [line["weights/fingerprint"] for line in again["metrics"][1:]] == [
        line["weights/fingerprint"] for line in whole["metrics"][1:]
    ]


def test_a_finished_run_says_so_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(folder)
    before = {f: (f.stat().st_mtime_ns, f.read_bytes()) for f in folder.rglob("*") if f.is_file()}
    assert run(folder) == first
    after = {f: (f.stat().st_mtime_ns, f.read_bytes()) for f in folder.rglob("*") if f.is_file()}
    assert after == before


def test_changes_that_come_behind_the_last_step_are_not_taken(tmp_path: Path) -> None:
    """config.toml says what ran: nothing did with these."""
    folder, said = tmp_path / "run", io.StringIO()
    first = run(folder, steps=2)
    before = {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    changed = small(steps=1, engine__temperature=0.9)
    assert train(changed, folder, Display(said, live=False)) == first
    assert {f: f.read_bytes() for f in folder.rglob("*") if f.is_file()} == before
    told = " ".join(said.getvalue().split())
    assert "is finished after 2 steps; steps=N goes further" in told
    assert "no step is left to do: steps: 2 -> 1" in told
    assert "no step is left to do: engine.temperature: 1.0 -> 0.9" in told
    with pytest.raises(RunError, match="seed: 0 -> 9"):
        run(folder, steps=2, seed=9)
    assert run(folder, steps=3, engine__temperature=0.9)["steps"] == 3


def test_a_run_that_failed_before_it_learned_does_not_bind_its_folder(tmp_path: Path) -> None:
    """Say at the comparison of sampler and learner: mend the configuration, run it again."""
    with pytest.raises(RunError, match="disagree"):
        run(tmp_path / "run", seed=1, tiny__width=16, guard__mismatch=0.0)
    run(tmp_path / "run", steps=2)
    run(tmp_path / "fresh", steps=2)
    assert left_behind(tmp_path / "run") == left_behind(tmp_path / "fresh")


def test_without_a_checkpoint_the_records_are_made_again_and_that_is_said(tmp_path: Path) -> None:
    run(tmp_path / "run", steps=2)
    before = left_behind(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "summary.json").unlink()
    said = io.StringIO()
    train(small(steps=2), tmp_path / "run", Display(said, live=False))
    assert "no checkpoint yet: 3 recorded steps are done again" in said.getvalue()
    assert left_behind(tmp_path / "run") == before


def test_without_held_out_tasks_none_are_spoken_of_also_on_resume(tmp_path: Path) -> None:
    """Neither 'n/a -> n/a' nor a command that would be refused, whichever start ends the run."""
    for steps in (2, 3):
        stream = io.StringIO()
        train(small(steps=steps, eval__tasks=0), tmp_path / "run", display=Display(stream))
        told = stream.getvalue()
        assert f"{steps} steps in " in told and "no task was held out" in told
        assert "held-out accuracy" not in told and "groupwise eval" not in told
        assert "groupwise diagnose" in told


def test_what_a_checkpoint_replaces_goes_though_the_run_was_killed_before(tmp_path: Path) -> None:
    """Killed behind the last checkpoint: no later one will tidy up."""
    run(tmp_path, steps=3, eval__every=0, checkpoint__keep=3)
    there = {"latest", "step_1", "step_2", "step_3"}
    assert there <= {path.name for path in (tmp_path / "checkpoints").iterdir()}
    (tmp_path / "summary.json").unlink()
    run(tmp_path, steps=3, eval__every=0, checkpoint__keep=1)
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    best = (tmp_path / "checkpoints" / "best").resolve().name
    assert left - {"best", "latest", best} == {"step_3"} - {best}
