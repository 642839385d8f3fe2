"""Whole steps of a recipe with branches: what is sampled, written, counted, replayed and shown."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from runs import metrics, run
from steps import Start, advance, gather, learn, rollouts

from groupwise.config import load
from groupwise.graders.recorded_verdicts import recorded
from groupwise.model.devices import KNOWN
from groupwise.optim.step_values import value_streams
from groupwise.plan.estimate import Place, assumptions, plan
from groupwise.records import Grade
from groupwise.replay.methods import methods_of
from groupwise.replay.recorded import open_recorded
from groupwise.replay.replay import Replay
from groupwise.runfiles import rollouts as files
from groupwise.runfiles.folder import RunFolder
from groupwise.training.guards import check_rewards
from groupwise.view.answers import group_page, sample_page, step_page
from groupwise.view.runs import ViewedRun

SPLIT = "recipe__advantage__step_difference__split"
BRANCHES = "recipe__advantage__step_difference__branches"
VINE = {"recipe": "vineppo", SPLIT: "sentence", BRANCHES: 3}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def made(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with a checkpoint."""
    folder = tmp_path_factory.mktemp("made") / "run"
    with start.opened(folder, **VINE) as opened:
        advance(opened, 2)
        opened.keeper.save_and_wait()
    return folder


def ends(text: str) -> list[int]:
    """Where the steps of a text of one character a token end, but for the last: `3,4;7`."""
    return [at + 1 for at, sign in enumerate(text) if sign in ",;" and at + 1 < len(text)]


def test_branches_begin_at_the_steps_and_are_graded_as_whole_answers(
    start: Start, tmp_path: Path
) -> None:
    with start.opened(tmp_path, **VINE) as opened:
        collected = gather(opened)
        tokenizer = opened.parts.loaded.tokenizer
        assert len(collected.branches) == len(collected.groups)
        seen = 0
        for group, branches in zip(collected.groups, collected.branches, strict=True):
            by_sample = {r.sample: r for r in group}
            assert len(branches) == 3 * len({(r.sample, r.branch.at) for r in branches})
            for branch in branches:
                answer, at = by_sample[branch.sample], branch.branch.at
                ids = branch.completion.token_ids
                assert ids[:at] == answer.completion.token_ids[:at]
                assert branch.completion.mask_T.tolist() == [n >= at for n in range(len(ids))]
                assert len(ids) <= 8 and (len(ids) == 8) >= branch.completion.truncated
                digits = [x for x in tokenizer.decode(ids) if x.isdigit()]
                assert branch.grade.reward == float(bool(digits) and digits[-1] in "13579")
                assert answer.text[at - 1] in ",;"
                seen += 1
        assert seen > 20
        measured = collected.metrics()
        tokens = sum(r.completion.own_length for g in collected.branches for r in g)
        assert measured["vineppo/branches"] == seen
        assert measured["vineppo/branch_tokens"] == tokens > seen
        assert measured["vineppo/valued_steps"] == seen / 3 / len(rollouts(collected))
        own = sum(r.completion.own_length for r in rollouts(collected))
        assert collected.tokens == own + tokens
        sizes = collected.sizes()
        assert sum(sum(size.completions) for size in sizes) == own + tokens


def test_what_is_learned_are_differences_of_values(start: Start, tmp_path: Path) -> None:
    """The advantages of a step without whitening, answer by answer."""
    with start.opened(tmp_path, **VINE, **{"recipe__advantage": "step_difference(branches=3, split='sentence')"}) as opened:  # noqa: E501  # fmt: skip
        collected = gather(opened)
        done = learn(opened, collected)
        row = 0
        for group, branches in zip(collected.groups, collected.branches, strict=True):
            for answer in group:
                found: dict[int, list[float]] = {}
                for branch in (x for x in branches if x.sample == answer.sample):
                    found.setdefault(branch.branch.at, []).append(branch.grade.reward)
                others = [x.grade.reward for x in group if x is not answer]
                places = [0, *sorted(found)]
                value = [sum(others) / len(others), *(sum(found[at]) / 3 for at in places[1:])]
                after = [*value[1:], answer.grade.reward]
                length = len(answer.completion.token_ids)
                for n, at in enumerate(places):
                    stop = places[n + 1] if n + 1 < len(places) else length
                    part_T = done.batch.advantage_NT[row, at:stop]
                    assert part_T.tolist() == pytest.approx([after[n] - value[n]] * len(part_T))
                row += 1


def test_two_runs_are_the_same_and_slots_change_no_branch(start: Start, tmp_path: Path) -> None:
    found = []
    for name, slots in (("a", 16), ("b", 3)):
        with start.opened(tmp_path / name, **VINE, engine__slots=slots) as opened:
            drawn = gather(opened).branches
            found.append([(r.completion.token_ids, r.branch) for g in drawn for r in g])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changes", "valued"),
    [
        ({SPLIT: "line"}, 0.0),  # sums have no line break: one step an answer
        ({BRANCHES: 1}, None),
        ({"group_size": 1, "prompts_per_step": 8}, None),
        ({"engine__max_tokens": 2}, None),  # cut off in the middle
        ({"overlong": "drop", "engine__max_tokens": 4}, None),
    ],
)
def test_odd_settings_make_a_step(
    start: Start, tmp_path: Path, changes: dict[str, Any], valued: float | None
) -> None:
    with start.opened(tmp_path, **{**VINE, **changes}) as opened:
        advance(opened)
        opened.reporter.recorder.flush()
        line = metrics(tmp_path)[-1]
    assert line["updates/count"] == 1 and math.isfinite(line["loss/total"])
    if valued is not None:
        assert line["vineppo/valued_steps"] == valued and line["vineppo/branches"] == 0
    else:
        assert line["vineppo/branches"] > 0
    if changes.get("group_size") == 1:
        table = files.read(RunFolder(tmp_path).rollout(1)).to_pylist()
        assert {row["branch"]["at"] for row in table if row["branch"]} >= {0}


def test_rows_of_branches_and_the_verdicts_that_are_taken_from_them(made: Path) -> None:
    path = RunFolder(made).rollout(2)
    rows = files.read(path).to_pylist()
    answers = [row for row in rows if row["branch"] is None]
    branches = [row for row in rows if row["branch"] is not None]
    assert rows == answers + branches and len(branches) > len(answers) / 2
    of_answer = {(row["group"], row["sample"]): row for row in answers}
    for row in branches:
        answer, at = of_answer[row["group"], row["sample"]], row["branch"]["at"]
        assert row["prompt_id"] == answer["prompt_id"] and row["draw"] == answer["draw"]
        assert row["text"][:at] == answer["text"][:at] and row["mask"][:at] == [False] * at
        assert row["sampler_logp"][:at] == [0.0] * at and row["advantage"] is None
        assert row["used"] is False and all(x < 0 for x in row["sampler_logp"][at:])
    ledger = recorded([path])
    assert len(ledger) == len(rows)  # none stands for two
    assert sum(key.branch is not None for key in ledger) == len(branches)
    table, _ = files.read_answers(path, ("group", "sample"))
    assert table.num_rows == len(answers)


def test_recorded_verdicts_of_branches_are_not_asked_for_again(
    start: Start, tmp_path: Path
) -> None:
    with start.opened(tmp_path / "a", **VINE) as opened:
        advance(opened)
    ledger = recorded([RunFolder(tmp_path / "a").rollout(1)])
    marked = {key: replace(grade, reward=0.125) for key, grade in ledger.items()}
    with start.opened(tmp_path / "b", **VINE) as opened:
        opened.parts.known.update(marked)
        again = gather(opened)
        assert not opened.parts.known  # each was taken once
    given = {r.grade.reward for g in (*again.groups, *again.branches) for r in g}
    assert given == {0.125}


def test_files_of_the_version_before_have_no_branches(made: Path, tmp_path: Path) -> None:
    table = pq.read_table(RunFolder(made).rollout(1))
    older = table.filter(pa.compute.is_null(table.column("branch"))).drop_columns(["branch"])
    older = older.replace_schema_metadata({files.VERSION_KEY: b"2"})
    path = tmp_path / "step_1.parquet"
    files.store(path, older)
    assert files.read(path).column("branch").null_count == older.num_rows
    assert files.read_answers(path, ("sample",))[0].num_rows == older.num_rows
    assert all(key.branch is None for key in recorded([path]))


def test_replay_finds_the_advantages_from_the_files(
    made: Path, start: Start, tmp_path: Path
) -> None:
    found = open_recorded(made)
    replay = Replay(found, methods_of(found, ["rloo recipe.shaping="]), [1, 2])
    replay.check()
    for seen in replay:
        own = seen.methods[0]
        assert torch.equal(own.advantage_NT, seen.record.streams["advantage"])
        assert seen.record.branches and not seen.record.dropped
    with start.opened(tmp_path, recipe="rloo") as opened:
        advance(opened)
        opened.keeper.save_and_wait()
    other = open_recorded(tmp_path)
    refused = Replay(other, methods_of(other, ["vineppo recipe.penalty="]), [1])
    with pytest.raises(Exception, match="Only a run of vineppo samples branches"):
        refused.check()


def test_pages_show_answers_with_the_values_of_their_steps(made: Path) -> None:
    run = ViewedRun(made, "run")
    rows = files.read(RunFolder(made).rollout(2)).to_pylist()
    answers = [row for row in rows if row["branch"] is None]
    assert f"{len(answers)} samples" in step_page(run, 2, {})
    first = next(row for row in rows if row["branch"] is not None)
    group, sample = first["group"], first["sample"]
    assert group_page(run, 2, group).count("<article") == 4
    page = sample_page(run, 2, group, sample)
    assert "Values of steps" in page and page.count("<tr>") > 2
    assert "Values of steps" not in sample_page(run, 2, *_without_branches(rows))


def _without_branches(rows: list[dict[str, Any]]) -> tuple[int, int]:
    valued = {(row["group"], row["sample"]) for row in rows if row["branch"] is not None}
    every = [(row["group"], row["sample"]) for row in rows]
    return next(each for each in every if each not in valued)


def test_a_failed_branch_counts_among_failed_rewards(start: Start, tmp_path: Path) -> None:
    with start.opened(tmp_path, **VINE) as opened:
        collected = gather(opened)
        failed = Grade(None, status="error", reason="the judge is gone")
        collected.branches = [[replace(r, grade=failed) for r in g] for g in collected.branches]
        found = check_rewards(opened.config, opened.progress, collected, opened.reporter)
        assert found is not None and "the judge is gone" in str(found)
        made = value_streams(collected.groups, collected.branches)
        assert (made["step_end_NT"].sum(1) == 1).all()  # every answer is one step again


def test_a_run_in_one_piece_learns(tmp_path: Path) -> None:
    summary = run(tmp_path, **VINE, data__options={"digits": 1, "filler": 3}, engine__max_tokens=6)
    assert summary["steps"] == 3
    assert all(line["vineppo/branches"] > 0 for line in metrics(tmp_path)[1:])
    total = sum(line["vineppo/branch_tokens"] for line in metrics(tmp_path)[1:])
    assert metrics(tmp_path)[-1]["cost/tokens"] > total > 0


def test_the_plan_counts_branches() -> None:
    shape = {"model.path": "tiny", "model.device": "cpu", "model.dtype": "float32",
             "engine.max_tokens": 200}  # fmt: skip
    place = Place(replace(KNOWN[0], flops=1e11, bandwidth=1e10), cpu=True, memory=None)
    vine, plain = (
        plan(load({**shape, "recipe": name, "data.train": "arithmetic"}), place)
        for name in ("vineppo", "grpo")
    )
    assert set(vine.seconds) - set(plain.seconds) == {"branches"}
    assert vine.seconds["branches"] > vine.seconds["rollout"] == plain.seconds["rollout"]
    assert any("9 branches from each" in line for line in assumptions(vine))
