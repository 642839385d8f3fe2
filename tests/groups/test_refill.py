"""What a trainer does around the phases: drop, top up, passes and steps, a rank left empty."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batches import learner_outputs, leaves, random_sample
from torch import Tensor

from groupwise import TokenBatch, batch_phase, merge, passes, recipe, select, token_phase, updates
from groupwise.errors import BatchError, RecipeError
from groupwise.methods.slots import gate, penalty


def small(rewards: list[float | None], groups: list[int], **streams: Tensor) -> TokenBatch:
    mask_NT = torch.ones(len(groups), 2, dtype=torch.bool)
    return TokenBatch.build(mask_NT=mask_NT, group_N=groups, reward_N=rewards, **streams)


def test_dropped_groups_are_named_left_out_and_topped_up() -> None:
    made = recipe("olmo3").replace(correction=())
    first = small([1, 1, 1, 0], [7, 7, 8, 8])
    found = select(made, first)
    assert found.refill == (7,)
    kept = first.keep(found.count_N)
    assert kept.group_N.tolist() == [8, 8]
    wide = TokenBatch.build(
        mask_NT=torch.tensor([[1, 1, 1], [1, 0, 0]]), group_N=[9, 9], reward_N=[0.0, 1.0]
    )
    whole = TokenBatch.join([kept, wide])
    assert whole.mask_NT.tolist() == [
        [True, True, False], [True, True, False], [True, True, True], [True, False, False],
    ]  # fmt: skip
    result = batch_phase(made, whole)
    assert result.refill == () and result.metrics["groups/count"] == 2
    assert result.batch.advantage_NT is not None and result.batch.coefficient_NT is not None
    assert result.batch.advantage_NT[:, 0].tolist() == [0.5, -0.5, -0.5, 0.5]
    assert float(result.batch.coefficient_NT.max()) == pytest.approx(1 / 8)


def test_batches_with_different_streams_can_not_be_joined() -> None:
    with pytest.raises(BatchError, match="have old_logp_NT, others not"):
        TokenBatch.join([small([1], [0]), small([1], [0], old_logp_NT=torch.zeros(1, 2))])


@pytest.mark.parametrize("name", ["lopti", "vapo", "prime", "lambda_grpo"])
def test_passes_split_into_updates_equal_updates_split_into_passes(name: str) -> None:
    sample, leaf = random_sample(3), leaves(random_sample(3))
    made = recipe(name).replace(schedule="low_then_high(updates=2)", filter=())
    learned = {"length_exponent": leaf.exponent} if name == "lambda_grpo" else {}
    done = batch_phase(made, sample.build(**learned)).batch
    parts = [torch.arange(0, 5), torch.arange(5, 12)]

    def terms(step: TokenBatch, rows: Tensor) -> dict[str, float]:
        outputs = learner_outputs(made, sample, leaf, rows)
        return {k: float(v) for k, v in token_phase(made, step, **outputs).terms.items()}

    one = [
        [terms(step, rows) for step, rows in zip(updates(made, p, parts), parts, strict=True)]
        for p in passes(made, done)
    ]
    other = [
        [terms(p, rows) for p in passes(made, step)]
        for step, rows in zip(updates(made, done, parts), parts, strict=True)
    ]
    for i in range(2):
        for j in range(2):
            assert one[i][j] == pytest.approx(other[j][i], abs=1e-14)
    assert one[0][0] != pytest.approx(one[1][0], abs=1e-9), "the passes must differ"


def test_several_updates_without_old_log_probabilities_are_refused() -> None:
    made = recipe("dr_grpo")
    done = batch_phase(made, small([1, 0], [0, 0])).batch
    with pytest.raises(BatchError, match=r"2 updates on one batch need old_logp_NT"):
        updates(made, done, [torch.tensor([0]), torch.tensor([1])])
    assert len(updates(made, done, [torch.arange(2)])) == 1


@pytest.mark.parametrize("parts", [[[0, 1]], [[0, 1, 2], [2]], []])
def test_parts_that_miss_or_repeat_a_row_are_refused(parts: list[list[int]]) -> None:
    made = recipe("lite_ppo")
    done = batch_phase(made, small([1, 0, 1], [0, 0, 0], old_logp_NT=torch.zeros(3, 2))).batch
    with pytest.raises(BatchError, match="every row exactly once"):
        updates(made, done, [torch.tensor(rows) for rows in parts])


def test_an_empty_batch_is_refused_in_words() -> None:
    nothing = small([1, 1], [0, 0]).keep(torch.tensor([False, False]))
    with pytest.raises(BatchError, match="no rows on any rank"):
        batch_phase(recipe("lite_ppo"), nothing)


class OtherRank:
    """The world of a rank without rows, beside one that holds these."""

    def __init__(self, other: TokenBatch) -> None:
        self.other = other

    def gather(self, x_N: Tensor) -> Tensor:
        assert len(x_N) == 0
        return x_N.new_ones((self.other.rows, *x_N.shape[1:]))

    def own(self, x_M: Tensor) -> Tensor:
        return x_M[:0]

    def for_rows(self, rows: int) -> OtherRank:
        return self


@pytest.mark.parametrize("name", ["grpo", "olmo3", "ppo", "reinforce_pp", "sspo", "dcpo", "simko"])
def test_a_rank_left_without_rows_goes_through_both_phases(name: str) -> None:
    made, sample = recipe(name), random_sample(1)
    empty = sample.take([])
    batch = replace(empty.build(), world=OtherRank(sample.build()))
    result = batch_phase(made, batch)
    assert all(value == value for value in result.metrics.values())
    leaf = leaves(empty)
    out = token_phase(made, result.batch, **learner_outputs(made, empty, leaf))
    out.loss.backward()
    assert float(out.loss.detach()) == 0.0
    assert "ratio/max" in merge([out.tally]).read()


def test_phases_of_different_recipes_do_not_mix() -> None:
    done = batch_phase(recipe("lite_ppo"), small([1, 0], [0, 0])).batch
    with pytest.raises(BatchError, match="batch phase of another recipe"):
        token_phase(recipe("dr_grpo"), done, logp_NT=torch.zeros(2, 2))


@pytest.mark.parametrize("value", [0.5, float("nan"), 2.0])
def test_flags_are_0_or_1(value: float) -> None:
    with pytest.raises(BatchError, match=r"correct_N .* only 0 and 1"):
        small([1, 0], [0, 0], correct_N=torch.tensor([1.0, value]))


def test_a_reward_that_would_overflow_is_refused() -> None:
    with pytest.raises(BatchError, match=r"beyond ±1e\+15 would overflow"):
        small([1e300, 0], [0, 0])


def test_a_slot_that_breaks_its_signature_is_named() -> None:
    @gate(equation="S = A")
    def forgets_the_clip_state(log_ratio_NT: Tensor, advantage_NT: Tensor, batch: TokenBatch):  # type: ignore[no-untyped-def]
        return advantage_NT

    @penalty(equation="+ 1")
    def sums_too_early(batch: TokenBatch) -> Tensor:
        return batch.ones_NT.sum()

    for changed, text in (
        ({"gate": forgets_the_clip_state()}, r"must return \(objective_NT, clipped_NT\)"),
        ({"penalty": sums_too_early()}, r"sums_too_early returned \(\).* \(2, 2\)"),
    ):
        made = recipe("lite_ppo").replace(**changed)
        done = batch_phase(made, small([1, 0], [0, 0])).batch
        with pytest.raises(RecipeError, match=text):
            token_phase(made, done, logp_NT=torch.zeros(2, 2, requires_grad=True))
