"""Preference recipes end to end: micro-batches, held-out rows, rounds of SPIN, and bad input."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import exit_code
from runs import left_behind, metrics
from runs import run as finish_run
from runs import start as begin_run
from steps import Start, advance, gather, learn, weights

from groupwise.engine.protocol import Request
from groupwise.errors import ConfigError, DataError
from groupwise.prepare.engines import judge_of
from groupwise.prepare.setup import sampling_of
from groupwise.runfiles.rollouts import read
from groupwise.stages.pairs import pairs_of
from groupwise.sync.checkpoints import memory_from_json, memory_to_json

LABELS = ["dpo", "hinge", "ipo", "ipo_sum", "cdpo", "robust_dpo", "rpo", "simpo", "orpo"]
ACROSS = ["aot", "aot_unpaired", "bco_pair", "wpo", "ld_dpo"]  # of more than sums of one pair


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


def rows(count: int = 8) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{a}+2=", "chosen": f"{a},2;{a + 2}", "rejected": f"2;{a}"}
        | {"completion": f"{a},2;{a + 2}" if a % 2 else f"2;{a}", "label": a % 2 == 1}
        for a in range(count)
    ]


@pytest.mark.parametrize("name", [*LABELS, *ACROSS, "kto"])
def test_any_micro_batches_give_the_same_update(name: str, start: Start, tmp_path: Path) -> None:
    found = []
    for tokens in (1, 10_000):
        changes = {"recipe": name, "data__train": start.rows("pairs", rows())}
        with start.opened(tmp_path / str(tokens), optim__micro_tokens=tokens, **changes) as run:
            advance(run, 2)
            found.append(weights(run.parts.loaded.model))
            held = list(run.parts.learner.roles)
        assert held == ([] if name in ("simpo", "orpo") else ["reference"])
    assert torch.allclose(*found, atol=2e-5)


def test_a_running_baseline_goes_on_where_it_was(start: Start, tmp_path: Path) -> None:
    """BCO's δ is a mean over all steps: without it the step after a resume would be another."""
    changes = {"recipe": "bco_pair", "data__train": start.rows("pairs", rows())}
    with start.opened(tmp_path / "run", **changes) as run:
        advance(run, 1)
        first = run.progress.memory.pair_reward
        assert first.steps == 1 and first.mean == 0.0  # policy and reference are one at first
        advance(run, 1)
        second = run.progress.memory.pair_reward
        assert second.steps == 2 and second.mean != 0.0
        saved = memory_from_json(json.loads(json.dumps(memory_to_json(run.progress.memory))))
    assert saved == run.progress.memory
    assert memory_from_json({"visits": {}, "reward_average": None}).pair_reward.steps == 0


@pytest.mark.parametrize("name", ["dpo", "simpo", "kto"])
def test_held_out_rows_with_labels_are_told_apart(name: str, start: Start, tmp_path: Path) -> None:
    changes = {"recipe": name, "data__train": start.rows("train", rows(6))}
    changes |= {"data__eval": start.rows("held", rows(10)[6:]), "eval__every": 4, "eval__tasks": 4}
    with start.opened(tmp_path, **changes) as run:
        before = run.stage.evaluate(run.parts)
        advance(run, 4)
        run.reporter.recorder.flush()
        after = run.stage.evaluate(run.parts)
    assert before.tasks == after.tasks == 4
    if name == "simpo":
        assert after.others["eval/margin"] > before.others["eval/margin"]
    else:
        assert before.accuracy == 0.5
    assert after.others["eval/preference_loss"] < before.others["eval/preference_loss"]
    assert metrics(tmp_path)[-1]["eval/preference_loss"] == after.others["eval/preference_loss"]
    if name == "dpo":
        assert after.others["eval/pairs_accuracy"] == after.accuracy > 0.5
        assert after.others["eval/margin"] > 0 == before.others["eval/margin"]
        assert after.others["eval/nll"] > 0


def test_conversations_are_pairs_and_long_rows_are_dropped_and_counted(
    start: Start, tmp_path: Path
) -> None:
    said = [{**row, "chosen": [{"role": "assistant", "content": row["chosen"]}]} for row in rows()]
    long = {"prompt": "1+2=", "chosen": "3", "rejected": "4" * 100}
    same = start.rows("texts", rows())
    found = []
    for name, data in (("texts", same), ("turns", start.rows("turns", [*said, long]))):
        with start.opened(tmp_path / name, recipe="dpo", data__train=data) as run:
            assert [len(task.token_ids) for task in run.parts.tasks] == [4] * 8
            collected = gather(run)
            found.append([r.text for group in collected.groups for r in group])
    assert sorted(found[0]) == sorted(found[1])


@pytest.mark.parametrize(
    ("recipe", "row", "message"),
    [
        ("kto", {"completion": "1;2", "label": "yes"}, "label 'yes'.*true or false"),
        ("kto", {"completion": "1;2"}, "label None"),
        ("kto", {"completion": "1;2", "label": True}, "true in every row.*recipe=sft"),
        ("orpo", {"chosen": "1;2"}, "no text in column 'rejected'"),
        ("dpo", {"chosen": [{"role": "user", "content": "2"}], "rejected": "1"}, "the assistant"),
        ("spin", {"answer": "2"}, "no written solution.*first row 0"),
    ],
)
def test_rows_that_can_t_be_learned_from_are_refused_at_the_start(
    recipe: str, row: dict[str, Any], message: str, start: Start, tmp_path: Path
) -> None:
    changes = {"recipe": recipe, "group_size": 1 if recipe == "spin" else 4}
    changes["data__train"] = start.rows("bad", [{"prompt": "1+1=", **row}])
    with pytest.raises(DataError, match=message), start.opened(tmp_path, **changes):
        pass


def test_a_baseline_needs_another_prompt(start: Start, tmp_path: Path) -> None:
    changes = {"recipe": "kto", "data__train": start.rows("k", rows()), "prompts_per_step": 1}
    with (
        pytest.raises(ConfigError, match="prompts_per_step is 1"),
        start.opened(tmp_path, **changes),
    ):
        pass


SPIN = {"recipe": "spin", "group_size": 1, "reference__update": "reset:2"}


def test_spin_samples_from_the_reference_of_the_round(start: Start, tmp_path: Path) -> None:
    with start.opened(tmp_path, **SPIN, optim__learning_rate=5e-2) as run:
        reference = run.parts.learner.roles["reference"].model
        for _ in range(4):
            before = weights(reference)
            collected = gather(run)
            for group in collected.groups:
                assert group[0].completion.weights == "reference"
            learn(run, collected)
            advance(run)
            step = run.progress.step
            moved = not torch.equal(weights(reference), before)
            assert moved == (step % 2 == 0)
        run.reporter.recorder.flush()
    kept = read(tmp_path / "rollouts" / "step_1.parquet").to_pylist()
    assert kept and all(row["text"] for row in kept)


def test_spin_takes_written_solutions_that_nobody_can_grade(start: Start, tmp_path: Path) -> None:
    solutions = [{"prompt": f"{a}+1=", "completion": f"{a},1;{a + 1}"} for a in range(8)]
    asked = {**SPIN, "data__train": start.rows("written", solutions)}
    with start.opened(tmp_path, **asked, reward__parts={"number": 1.0}) as run:
        assert gather(run).groups


def test_spin_goes_on_to_the_bit(start: Start, tmp_path: Path) -> None:
    with start.opened(tmp_path / "whole", **SPIN) as run:
        advance(run, 5)
        run.keeper.save_and_wait()
        whole = weights(run.parts.loaded.model)
    for _ in range(5):
        with start.opened(tmp_path / "parts", **SPIN) as run:
            advance(run, 1)
            run.keeper.save_and_wait()
            parts = weights(run.parts.loaded.model)
    assert torch.equal(whole, parts)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")
    for step in range(1, 6):
        one, other = (tmp_path / x / f"rollouts/step_{step}.parquet" for x in ("whole", "parts"))
        assert one.read_bytes() == other.read_bytes()


def test_the_rejected_answer_is_a_direct_sample_of_the_reference(
    start: Start, tmp_path: Path
) -> None:
    """Also when the policy has moved on: under the same names, token by token."""
    with start.opened(tmp_path, **SPIN, optim__learning_rate=5e-2) as run:
        advance(run, 3)  # one step into the second round
        parts = run.parts
        reference = parts.learner.roles["reference"].model
        collected = gather(run)
        pairs = pairs_of(run.config.recipe, collected.groups, parts.loaded.tokenizer)
        groups = [group[0] for group in collected.groups]
        requests = [Request(r.task.token_ids, 1, r.task.id, r.draw) for r in groups]
        sampling = sampling_of(run.config)
        direct, own = (
            judge_of(run.config, replace(parts.loaded, model=model)).generate(requests, sampling)
            for model in (reference, parts.loaded.model)
        )
        assert pairs.completions[1::2] == [one.token_ids for (one,) in direct]
        assert pairs.completions[1::2] != [one.token_ids for (one,) in own]


def test_spin_that_was_killed_comes_back_the_same(start: Start, tmp_path: Path) -> None:
    changes = start.settings(**SPIN, steps=8, checkpoint__every_steps=1)
    finish_run(tmp_path / "whole", **changes)
    folder = tmp_path / "killed"
    child = begin_run(folder, **changes)
    while not (folder / "rollouts" / "step_4.parquet").exists():
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    assert exit_code(child) == -signal.SIGKILL
    finish_run(folder, **changes)
    assert left_behind(folder) == left_behind(tmp_path / "whole")
