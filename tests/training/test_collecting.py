"""Which answers a step learns from: dynamic sampling, answers that were cut off, failed rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import BARE, Start, advance, difference, gather, gradient, learn, rollouts, weights

from groupwise.config import load
from groupwise.data.cursor import Cursor
from groupwise.runfiles import rollouts as files
from groupwise.stages.collected import Collected, tokens_of
from groupwise.stages.groups import BARREN_DRAWS, RefillCost
from groupwise.training.run import Run

# A sum of two digits does not fit: some of the answers are cut off.
CUT: dict[str, Any] = {"engine__max_tokens": 6, "prompts_per_step": 12, **BARE}
CUT["optim__learning_rate"] = 3e-4


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


def events(run: Run) -> list[dict[str, Any]]:
    run.reporter.recorder.flush()
    return [json.loads(line) for line in run.reporter.folder.events.read_text().splitlines()]


def mixed(group: Any) -> bool:
    return len({rollout.grade.reward for rollout in group}) > 1


# --- dynamic sampling -------------------------------------------------------------------------


def test_groups_that_teach_nothing_are_drawn_again_from_fresh_prompts(
    start: Start, tmp_path: Path
) -> None:
    changes = {"recipe": "dapo", "reward": "odd_for_some", "refills": 10}
    with start.opened(tmp_path, **changes) as run:
        collected = gather(run)
        assert len(collected.groups) == 4 and all(map(mixed, collected.groups))
        assert collected.dropped and not any(map(mixed, collected.dropped))
        every = collected.groups + collected.dropped
        drawn = [(group[0].task.id, group[0].draw) for group in every]
        assert len(set(drawn)) == len(drawn) == run.progress.cursor.position
        assert collected.metrics()["refill/drawn_groups"] == len(drawn)
        assert events(run) == []


@pytest.mark.parametrize(("few", "warned"), [(0.0, False), (1.0, True)])
def test_a_batch_that_is_a_little_smaller_is_written_down_and_no_warning(
    few: float, warned: bool, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groupwise.stages.groups.FEW", few)
    changes = {"recipe": "dapo", "reward": "odd_for_some", "refills": 1, "prompts_per_step": 8}
    with start.opened(tmp_path, **changes) as run:
        told: list[str] = []
        monkeypatch.setattr(run.reporter.display, "warn", told.append)
        advance(run)
        assert len(events(run)) == 1
    assert any("useful groups of 8" in text for text in told) == warned


def test_after_the_last_refill_the_batch_is_smaller_and_says_so(
    start: Start, tmp_path: Path
) -> None:
    changes = {"recipe": "dapo", "reward": "odd_for_some", "refills": 1, "prompts_per_step": 8}
    with start.opened(tmp_path, **changes) as run:
        before = weights(run.parts.loaded.model)
        advance(run)
        (event,) = events(run)
        assert not torch.equal(weights(run.parts.loaded.model), before)
    table = files.read(tmp_path / "rollouts" / "step_1.parquet").to_pylist()
    groups = {row["group"] for row in table if row["used"]}
    assert 0 < len(groups) < 8
    assert event["kind"] == "refill" and f"{len(groups)} useful groups of 8" in event["text"]
    for number in {row["group"] for row in table}:
        rewards = {row["reward"] for row in table if row["group"] == number}
        assert (len(rewards) > 1) == (number in groups)  # what was dropped is on file as well


@pytest.mark.parametrize("name", ["dapo", "cispo", "olmo3", "gpg"])
def test_a_batch_of_dead_groups_is_a_step_without_an_update_not_a_dead_run(
    name: str, start: Start, tmp_path: Path
) -> None:
    with start.opened(tmp_path, recipe=name, reward="nothing", refills=2) as run:
        before = weights(run.parts.loaded.model)
        advance(run, 2)
        assert run.progress.step == 2 and torch.equal(weights(run.parts.loaded.model), before)
        told = events(run)
        assert [event["step"] for event in told] == [1, 2]
        assert "which teach nothing" in told[0]["text"]
        assert run.progress.cursor.position == 2 * 3 * 4  # two steps of a draw and two refills each


def test_until_full_goes_on_until_the_batch_is_full(start: Start, tmp_path: Path) -> None:
    changes = {"recipe": "dapo", "reward": "odd_for_some", "prompts_per_step": 8}
    with start.opened(tmp_path / "three", refills=1, **changes) as run:
        short = gather(run)
    with start.opened(tmp_path / "full", refills="until full", **changes) as run:
        found = gather(run)
        assert events(run) == []
        fresh = tokens_of(found.groups + found.dropped) - found.refill_tokens
    assert len(short.groups) < len(found.groups) == 8 and all(map(mixed, found.groups))
    assert found.rounds > 1
    first, other = (each.dropped[0][0] for each in (short, found))
    assert (first.task.id, first.text) == (other.task.id, other.text)  # it begins as the other does
    # What refills took is all that was sampled after the first eight groups.
    drawn = sorted(found.groups + found.dropped, key=lambda group: order(run, group))
    assert fresh == tokens_of(drawn[:8]) > 0
    assert found.metrics()["refill/tokens"] == tokens_of(drawn[8:])


def order(run: Run, group: Any) -> int:
    """When a group's prompt was drawn; none is drawn twice here."""
    shuffled = Cursor(run.parts.tasks, run.config.seed).take(len(run.parts.tasks))
    return [run.parts.tasks[drawn.task].id for drawn in shuffled].index(group[0].task.id)


def test_until_full_ends_where_no_group_can_be_useful(start: Start, tmp_path: Path) -> None:
    """Four whole batches without a useful group: the run goes on, and says what it found."""
    changes = {"recipe": "dapo", "reward": "nothing", "refills": "until full"}
    with start.opened(tmp_path, **changes) as run:
        before = weights(run.parts.loaded.model)
        advance(run, 2)
        told = events(run)
        assert torch.equal(weights(run.parts.loaded.model), before)
        assert run.progress.cursor.position == 2 * BARREN_DRAWS * 4
    assert [event["step"] for event in told] == [1, 2]
    assert "none of the last 16 groups was useful" in told[0]["text"]
    assert "16 draws" in told[0]["text"] and "which teach nothing" in told[0]["text"]


def test_refills_end_at_their_tokens(start: Start, tmp_path: Path) -> None:
    changes = {"recipe": "dapo", "reward": "odd_for_some", "prompts_per_step": 8}
    for name, refills in {"full": "until full", "rounds": 10}.items():
        with start.opened(tmp_path / name, refills=refills, refill_tokens=1, **changes) as run:
            found = gather(run)
            (event,) = events(run)
        assert found.rounds == 1 and found.refill_tokens >= 1  # the round that reaches it is done
        assert "tokens (refill_tokens)" in event["text"]


def test_without_a_limit_of_ones_own_refills_end_at_ten_first_draws() -> None:
    full = load(recipe="dapo", refills="until full")
    assert RefillCost(first=100, tokens=999).why_stop(full) == ""
    assert "1,000 tokens (ten times the first draw)" in RefillCost(100, tokens=1000).why_stop(full)
    three = load(recipe="dapo")
    assert RefillCost(100, rounds=2, tokens=10**6, barren=10**6).why_stop(three) == ""
    assert "refills=3 rounds" in RefillCost(100, rounds=3).why_stop(three)


def test_rewards_that_are_all_missing_teach_nothing_and_one_such_step_stops_nothing(
    start: Start, tmp_path: Path
) -> None:
    """A grader may abstain; that is no failure, and no reward of 0 either."""
    with start.opened(tmp_path, recipe="grpo", reward="abstains") as run:
        before = weights(run.parts.loaded.model)
        taught = learn(run, gather(run))
        batch = taught.batch
        assert torch.equal(weights(run.parts.loaded.model), before)
    # There is no mean reward, and no group is useful or useless.
    assert not {"reward/mean", "groups/dead_share"} & taught.metrics.keys()
    assert taught.metrics["reward/ungraded_share"] == 1.0
    (event,) = [e for e in run.reporter.folder.read_events() if e["kind"] == "nothing learned"]
    assert "grader_reason" in event["text"]
    assert batch.task_reward_N.isnan().all() and not batch.learn_N.any()


# --- answers that were cut off ----------------------------------------------------------------


def cut(collected: Collected) -> torch.Tensor:
    found = torch.tensor([rollout.completion.truncated for rollout in rollouts(collected)])
    assert 0 < int(found.sum()) < len(found)
    return found


def test_overlong_drop_is_as_if_the_row_were_absent(start: Start, tmp_path: Path) -> None:
    slopes = []
    for absent in (False, True):
        with start.opened(tmp_path / str(absent), recipe="grpo", overlong="drop", **CUT) as run:
            collected = gather(advance(run))  # the reference is another model by now
            cut(collected)
            if absent:
                short = [[r for r in g if not r.completion.truncated] for g in collected.groups]
                collected = Collected([group for group in short if group])
            learn(run, collected)
            slopes.append(gradient(run))
    # Sums of the same numbers in packs of other sizes: float32 rounding.
    assert float(slopes[0].norm()) > 1e-3 and difference(*slopes) < 1e-5


def test_overlong_mask_takes_the_tokens_out_and_leaves_the_reward_in(
    start: Start, tmp_path: Path
) -> None:
    with start.opened(tmp_path, recipe="dr_grpo", overlong="mask", **CUT) as run:
        collected = gather(run)
        batch = learn(run, collected).batch
    cut_N = cut(collected)
    reward_GS = torch.tensor([[r.grade.reward for r in group] for group in collected.groups])
    expected = (reward_GS - reward_GS.mean(1, keepdim=True)).flatten()
    torch.testing.assert_close(batch.advantage_NT[:, 0], expected, rtol=0, atol=1e-6)
    assert torch.equal(batch.learn_N, ~cut_N) and (batch.coefficient_NT[cut_N] == 0).all()
    rows = int((~cut_N).sum())  # the mean is over the rows that are left
    kept_NT = batch.mask_NT & ~cut_N[:, None]
    torch.testing.assert_close(
        batch.coefficient_NT[kept_NT], torch.full((int(kept_NT.sum()),), 1 / (rows * 3000))
    )


def test_overlong_penalise_takes_from_the_reward(start: Start, tmp_path: Path) -> None:
    with start.opened(tmp_path, recipe="dr_grpo", overlong="penalise", **CUT) as run:
        collected = gather(run)
        batch = learn(run, collected).batch
    cut(collected)
    length_N = torch.tensor([len(r.completion.token_ids) for r in rollouts(collected)])
    # A limit of 6 has a ramp of 6 // 4 = 1 token: nothing up to 5, all of it at 6.
    graded_N = torch.tensor([r.grade.reward for r in rollouts(collected)])
    assert torch.equal(batch.task_reward_N.float(), graded_N)
    assert torch.equal(batch.reward_N.float(), graded_N - (length_N == 6).float())
    assert batch.learn_N.all()


def test_a_group_that_only_a_dropped_answer_sets_apart_is_drawn_again(
    start: Start, tmp_path: Path
) -> None:
    """The reward is for being cut off: without such answers, no group has two rewards."""
    changes = CUT | {"recipe": "olmo3", "reward": "cut_off", "refills": 2}
    with start.opened(tmp_path / "kept", **changes) as run:
        assert any(map(mixed, gather(run).groups))
    with start.opened(tmp_path / "dropped", overlong="drop", **changes) as run:
        collected = gather(run)
        assert collected.rounds == 2 and len(collected.groups + collected.dropped) == 36


def test_a_group_of_one_is_not_called_useless(start: Start, tmp_path: Path) -> None:
    changes = {"recipe": "remax", "group_size": 1, "prompts_per_step": 12}
    with start.opened(tmp_path, **changes) as run:
        found = learn(run, gather(run)).metrics
    assert "groups/dead_share" not in found and found["groups/count"] == 12
