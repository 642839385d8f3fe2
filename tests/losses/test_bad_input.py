"""What can't be right is refused with what, why and what to do; what is merely empty gives 0.

Never a silent NaN: whatever the two phases accept comes out finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import POLICY_RECIPES, Sample, learner_outputs, leaves, random_sample
from torch import Tensor

from groupwise import Pairs, TokenBatch, batch_phase, passes, recipe, select, token_phase
from groupwise.errors import BatchError, GroupwiseError, RecipeError
from groupwise.groups.advantages import group_zscore, whiten_tokens
from groupwise.groups.aggregation import seq_mean_token_sum_norm
from groupwise.losses.gates import clip, weight_cap
from groupwise.losses.pairs import best_and_worst, logistic
from groupwise.losses.penalties import kl
from groupwise.losses.schedules import joint
from groupwise.methods.slots import parse
from groupwise.streams import STREAMS as MEANING

NAN, INF = float("nan"), float("inf")
every_recipe = pytest.mark.parametrize("name", POLICY_RECIPES)


def built(**changes: Any) -> TokenBatch:
    """Two rows of two tokens, one group, rewards 1 and 0."""
    plain = {"mask_NT": torch.ones(2, 2).bool(), "group_N": [0, 0], "reward_N": [1.0, 0.0]}
    return TokenBatch.build(**{**plain, **changes})


def zeros() -> Tensor:
    return torch.zeros(2, 2)


def step(name: str, sample: Sample, **extra: Any) -> tuple[float, list[Tensor]]:
    """Loss and gradients in all parameters of the table learner."""
    made, leaf = recipe(name), leaves(sample)
    if name == "lambda_grpo":
        extra["length_exponent"] = leaf.exponent
    done = batch_phase(made, sample.build(**extra)).batch
    outputs = learner_outputs(made, sample, leaf)
    loss = sum(token_phase(made, one, **outputs).loss for one in passes(made, done))
    assert loss.requires_grad
    found = torch.autograd.grad(loss, leaf.all(), allow_unused=True)
    return float(loss.detach()), [g for g in found if g is not None]


def with_streams(sample: Sample, **changes: Tensor) -> Sample:
    return replace(sample, streams={**sample.streams, **changes})


# --- shapes and kinds of streams --------------------------------------------------------------

STREAMS = [name for name in random_sample(0).streams if name not in ("group_N", "reward_N")]


@pytest.mark.parametrize("name", [name for name in STREAMS if name != "mask_NT"])
def test_a_stream_with_a_row_too_few_is_refused_by_name(name: str) -> None:
    sample = random_sample(0)
    with pytest.raises(BatchError, match=rf"{name} must have shape \(12.*got \(11"):
        with_streams(sample, **{name: sample.streams[name][:-1]}).build()


@pytest.mark.parametrize("name", [n for n in STREAMS if n.endswith(("_NT", "_NTK", "_NTLK"))])
def test_a_stream_with_a_token_too_many_is_refused_by_name(name: str) -> None:
    if name == "mask_NT":  # then every other stream is short
        name, match = "mask_NT", r"must have shape \(12, 7\).*got \(12, 6"
    else:
        match = rf"{name} must have shape \(12, 6.*got \(12, 7"
    sample = random_sample(0)
    longer = torch.cat([sample.streams[name], sample.streams[name][:, :1]], 1)
    with pytest.raises(BatchError, match=match):
        with_streams(sample, **{name: longer}).build()


@pytest.mark.parametrize("name", [name for name in STREAMS if name != "mask_NT"])
def test_a_stream_with_an_axis_too_many_is_refused_by_name(name: str) -> None:
    sample = random_sample(0)
    with pytest.raises(BatchError, match=f"{name} must have shape"):
        with_streams(sample, **{name: sample.streams[name][..., None]}).build()


@pytest.mark.parametrize("name", ["old_logp_NT", "truncated_N"])
def test_a_list_in_the_place_of_a_tensor_is_refused_by_name(name: str) -> None:
    with pytest.raises(BatchError, match=rf"{name} must .*list"):
        built(**{name: [[0.0, 0.0], [0.0, 0.0]]})


@pytest.mark.parametrize(
    "mask",
    [torch.ones(2), torch.ones(2, 2, 1), torch.ones(3, 0), [[1, 1], [1, 1]]],
    ids=["1-d", "3-d", "no tokens", "a list"],
)
def test_a_mask_that_is_no_table_of_tokens_is_refused(mask: Any) -> None:
    with pytest.raises(BatchError, match=r"mask_NT must be a tensor \[sequences, tokens\]"):
        built(mask_NT=mask)


@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, NAN])
def test_a_mask_of_anything_but_0_and_1_is_refused(value: float) -> None:
    with pytest.raises(BatchError, match=r"only 0 and 1 .*1 = a token that the policy wrote"):
        built(mask_NT=torch.full((2, 2), value))


def test_a_mask_of_numbers_equals_a_mask_of_bools() -> None:
    numbers = built(mask_NT=torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    bools = built(mask_NT=torch.tensor([[True, True], [True, False]]))
    assert torch.equal(numbers.mask_NT, bools.mask_NT)


@pytest.mark.parametrize(
    ("wrong", "right"), [("old_logprob_NT", "old_logp_NT"), ("segments_NT", "segment_NT")]
)
def test_an_unknown_stream_is_refused_with_the_nearest_name(wrong: str, right: str) -> None:
    with pytest.raises(BatchError, match=f"{wrong}.*Did you mean .*'{right}'"):
        built(**{wrong: zeros()})


@pytest.mark.parametrize("name", ["advantage_NT", "coefficient_NT"])
def test_what_the_batch_phase_makes_can_not_be_passed_in(name: str) -> None:
    with pytest.raises(BatchError) as caught:
        built(**{name: zeros()})
    assert f"Did you mean '{name}'" not in str(caught.value)


def test_whole_numbers_as_log_probabilities_do_not_round_the_advantages() -> None:
    made = recipe("dr_grpo")
    done = batch_phase(made, built(old_logp_NT=torch.zeros(2, 2, dtype=torch.long))).batch
    assert done.advantage_NT.tolist() == [[0.5, 0.5], [-0.5, -0.5]]
    logp_NT = torch.tensor([[-0.1, -0.1], [-0.05, -0.05]])
    expected = -(math.exp(-0.1) - math.exp(-0.05)) / 2 / 3000  # −mean_i Σ_t r·A / L
    assert float(token_phase(made, done, logp_NT=logp_NT).loss) == pytest.approx(expected, 1e-5)


def test_segment_numbers_must_be_whole() -> None:
    made = recipe("sspo")
    with pytest.raises(BatchError, match="segment_NT"):
        done = batch_phase(made, built(segment_NT=torch.full((2, 2), 0.5))).batch
        token_phase(made, done, logp_NT=zeros())


# --- groups and rewards -----------------------------------------------------------------------


def test_fractional_group_ids_are_refused() -> None:
    with pytest.raises(BatchError, match=r"group_N.*whole numbers"):
        built(group_N=torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e300])
def test_group_ids_that_no_whole_number_can_hold_are_refused(value: float) -> None:
    with pytest.raises(BatchError, match="group_N"):
        built(group_N=torch.tensor([value, 0.0]))


def test_group_ids_in_float_that_are_whole_are_taken() -> None:
    assert built(group_N=torch.tensor([3.0, -4.0])).group_N.tolist() == [3, -4]


@pytest.mark.parametrize("groups", [["a", "b"], None], ids=["text", "nothing"])
def test_group_ids_that_are_no_numbers_are_refused_in_words(groups: Any) -> None:
    with pytest.raises(BatchError, match="group_N"):
        built(group_N=groups)


def test_too_few_group_ids_are_refused() -> None:
    with pytest.raises(BatchError, match=r"group_N has shape.*2 rows.*one group id per row"):
        built(group_N=[0])


@pytest.mark.parametrize("rewards", [[1.0], torch.tensor(1.0), [1.0, 0.0, 1.0], [[1.0], [0.0]]])
def test_a_reward_is_not_spread_over_rows(rewards: Any) -> None:
    with pytest.raises(BatchError, match=r"reward_N has shape.*2 rows.*one reward per row"):
        built(reward_N=rewards)


@pytest.mark.parametrize("rewards", [1.0, None, ["1", "0"]], ids=["number", "nothing", "text"])
def test_rewards_that_are_no_list_of_numbers_are_refused_in_words(rewards: Any) -> None:
    with pytest.raises(BatchError, match="reward_N"):
        built(reward_N=rewards)


@pytest.mark.parametrize("value", [INF, -INF])
def test_an_infinite_reward_is_refused_with_its_row(value: float) -> None:
    with pytest.raises(BatchError, match=r"reward_N\[1\] is infinite.*None or NaN"):
        built(reward_N=[0.0, value])


def test_none_and_nan_both_mean_no_grade() -> None:
    for none in (None, NAN):
        batch = batch_phase(recipe("dr_grpo"), built(reward_N=[1.0, none])).batch
        assert batch.advantage_NT.tolist() == [[0.0, 0.0], [0.0, 0.0]]
        assert batch.coefficient_NT[1].tolist() == [0.0, 0.0]
        assert float(batch.coefficient_NT[0].sum()) > 0.0


def test_an_ungraded_greedy_reward_is_refused_with_its_row() -> None:
    with pytest.raises(BatchError, match=r"greedy_reward_N.*\b1\b"):
        built(greedy_reward_N=torch.tensor([0.0, NAN]))


def test_a_group_without_any_grade_is_wanted_again() -> None:
    batch = TokenBatch.build(
        mask_NT=torch.ones(4, 1).bool(), group_N=[7, 7, 8, 8], reward_N=[None, None, 1.0, 0.0]
    )
    assert select(recipe("olmo3"), batch).refill == (7,)


# --- values that are not finite ---------------------------------------------------------------

FLOAT_STREAMS = [
    n for n in STREAMS if "_NT" in n and random_sample(0).streams[n].is_floating_point()
]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", FLOAT_STREAMS)
def test_a_value_that_is_not_finite_is_refused_with_its_row_and_token(
    name: str, bad: float
) -> None:
    sample = random_sample(0)
    x = sample.streams[name].clone()
    mask_NT = sample.streams["mask_NT"]
    row = int(mask_NT.sum(1).ge(3).nonzero()[1])
    x[row, 2] = bad
    with pytest.raises(BatchError, match=f"{name} is not finite.*row {row}, token 2"):
        with_streams(sample, **{name: x}).build()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_the_learners_outputs_are_held_to_the_same(bad: float) -> None:
    made = recipe("entropy_bonus")
    done = batch_phase(made, built()).batch
    spoiled = torch.tensor([[0.0, 0.0], [bad, 0.0]])
    with pytest.raises(BatchError, match=r"logp_NT is not finite.*row 1, token 0"):
        token_phase(made, done, logp_NT=spoiled, entropy_NT=zeros())
    with pytest.raises(BatchError, match=r"entropy_NT is not finite.*row 1, token 0"):
        token_phase(made, done, logp_NT=zeros(), entropy_NT=spoiled)


def test_opposite_infinities_do_not_cancel() -> None:
    with pytest.raises(BatchError, match="row 0, token 0"):
        built(old_logp_NT=torch.tensor([[INF, -INF], [0.0, 0.0]]))


def test_finite_values_whose_sum_overflows_are_taken() -> None:
    huge = torch.tensor([[3e38, 3e38], [3e38, 0.0]])
    assert torch.equal(built(old_value_NT=huge).old_value_NT, huge)


def test_a_sampler_that_cuts_the_distribution_is_named_as_a_cause() -> None:
    with pytest.raises(BatchError, match="top-p"):
        built(sampler_logp_NT=torch.tensor([[0.0, -INF], [0.0, 0.0]]))


def test_an_exponent_that_is_not_finite_is_refused() -> None:
    made, exponent = recipe("lambda_grpo"), torch.tensor(NAN)
    with pytest.raises(BatchError, match="length_exponent"):
        batch_phase(made, built(length_exponent=exponent))


@pytest.mark.parametrize("exponent", [torch.tensor([0.0, 1.0]), "x"])
def test_an_exponent_that_is_no_scalar_is_refused(exponent: Any) -> None:
    with pytest.raises(BatchError, match="length_exponent"):
        batch_phase(recipe("lambda_grpo"), built(length_exponent=exponent))


# --- streams and outputs that are missing -----------------------------------------------------


@every_recipe
def test_every_missing_stream_is_named_with_its_meaning_and_its_reader(name: str) -> None:
    made, sample = recipe(name), random_sample(0)
    for stream in made.streams:
        rest = {key: x for key, x in sample.streams.items() if key != stream}
        with pytest.raises(BatchError) as caught:
            batch_phase(made, replace(sample, streams=rest).build())
        text = str(caught.value)
        readers = [s.name for s in made.slots() if stream in s.definition.needs]
        assert f"{stream} ({MEANING[stream]})" in text
        assert any(reader in text for reader in [*readers, made.ratio.name])


def test_the_message_says_what_the_stream_is_and_what_to_do() -> None:
    with pytest.raises(BatchError) as caught:
        batch_phase(recipe("grpo"), built())
    text = str(caught.value)
    assert "ref_logp_NT (the reference model's log-probabilities)" in text
    assert "penalty kl(coef=0.04" in text
    assert "TokenBatch.build" in text and "recipe.replace(penalty=" in text


@every_recipe
def test_every_missing_output_is_named(name: str) -> None:
    made, sample = recipe(name), random_sample(0)
    done = batch_phase(made, sample.build()).batch
    outputs = learner_outputs(made, sample, leaves(sample))
    for missing in made.outputs:
        rest = {key: x for key, x in outputs.items() if key != missing}
        with pytest.raises(BatchError, match=f"{missing}.*pass it to the token phase"):
            token_phase(made, done, **rest)


def test_a_part_that_is_trained_must_come_with_its_output() -> None:
    made, sample = recipe("lambda_grpo"), random_sample(0)
    done = batch_phase(made, sample.build()).batch
    with pytest.raises(BatchError, match="length_exponent"):
        token_phase(made, done, logp_NT=sample.streams["old_logp_NT"])


def test_an_unknown_output_is_refused_with_the_nearest_name() -> None:
    made = recipe("dr_grpo")
    with pytest.raises(BatchError, match=r"'entropy'.*Did you mean 'entropy_NT'"):
        token_phase(made, batch_phase(made, built()).batch, logp_NT=zeros(), entropy=zeros())


def test_outputs_of_other_rows_are_refused() -> None:
    made = recipe("dr_grpo")
    done = batch_phase(made, built()).batch
    with pytest.raises(BatchError, match=r"logp_NT must have shape \(1, 2\).*got \(2, 2\)"):
        token_phase(made, done.select(torch.tensor([1])), logp_NT=zeros())


def test_the_token_phase_wants_a_batch_from_the_batch_phase() -> None:
    with pytest.raises(BatchError, match="needs a batch from the batch phase: call that first"):
        token_phase(recipe("dr_grpo"), built(), logp_NT=zeros())


def test_a_batch_of_another_recipe_is_refused_in_words() -> None:
    sample = random_sample(0)
    done = batch_phase(recipe("dr_grpo"), sample.build()).batch
    outputs = learner_outputs(recipe("prime"), sample, leaves(sample))
    with pytest.raises(GroupwiseError):
        token_phase(recipe("prime"), done, **outputs)


def test_old_log_probabilities_with_a_graph_do_not_cancel_the_gradient() -> None:
    """Passing the policy's own log-probabilities, not detached, as the old ones."""
    made, logp_NT = recipe("dr_grpo"), torch.full((2, 2), -1.0, requires_grad=True)
    done = batch_phase(made, built(old_logp_NT=logp_NT)).batch
    (gradient,) = torch.autograd.grad(token_phase(made, done, logp_NT=logp_NT).loss, logp_NT)
    # −A/(B·L) with A = ±½, B = 2, L = 3000
    expected = torch.tensor([[-1.0, -1.0], [1.0, 1.0]]) / 12000
    torch.testing.assert_close(gradient, expected)


# --- nothing to learn from --------------------------------------------------------------------


def emptied(what: str) -> Sample:
    sample = random_sample(2, groups=(3, 3))
    mask_NT, reward_N = sample.streams["mask_NT"], sample.streams["reward_N"]
    if what == "no token":
        return with_streams(sample, mask_NT=torch.zeros_like(mask_NT))
    return with_streams(sample, reward_N=torch.full_like(reward_N, NAN))


def test_a_row_where_one_number_is_not_finite_is_named() -> None:
    for name in ("drift_N", "context_tokens_N", "outcome_reward_N"):
        x = random_sample(0).streams[name].clone()
        x[1] = NAN
        with pytest.raises(BatchError, match=f"{name} is not finite: row 1 "):
            with_streams(random_sample(0), **{name: x}).build()


def test_parts_of_a_reward_may_lack_and_may_not_be_infinite() -> None:
    for name in ("reward_part_NK", "reference_reward_NK"):
        x = random_sample(0).streams[name].clone()
        x[1, 0] = NAN
        with_streams(random_sample(0), **{name: x}).build()
        x[1, 0] = INF
        with pytest.raises(BatchError, match=f"{name} is infinite"):
            with_streams(random_sample(0), **{name: x}).build()


# An expert's answers have no grade, and are learned all the same.
LEARNS_UNGRADED = ("chord",)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (name, what)
        for name in POLICY_RECIPES
        for what in ("no token", "no grade")
        if what == "no token" or name not in LEARNS_UNGRADED
    ],
)
def test_a_batch_with_nothing_to_learn_from_has_loss_0_and_gradient_0(name: str, what: str) -> None:
    loss, gradients = step(name, emptied(what))
    assert loss == 0.0
    assert gradients and all(bool((g == 0.0).all()) for g in gradients)


@every_recipe
def test_metrics_of_a_batch_with_nothing_to_learn_from_are_finite(name: str) -> None:
    for what in ("no token", "no grade"):
        metrics = batch_phase(recipe(name), emptied(what).build()).metrics
        assert all(value == value and abs(value) < INF for value in metrics.values()), metrics


GROUP_BASELINES = ("grpo", "rloo", "dr_grpo", "dapo", "maxrl", "gpg", "lite_ppo", "prime", "gspo",
                   "prime_seed", "grpo_process", "dcpo", "grpo@nemo-rl", "grpo@trl")  # fmt: skip


@pytest.mark.parametrize("name", GROUP_BASELINES)
def test_a_group_of_one_has_advantage_0(name: str) -> None:
    sample = random_sample(3, groups=(1, 4, 1))
    done = batch_phase(recipe(name), sample.build()).batch
    assert done.advantage_NT[[0, 5]].abs().max() == 0.0
    kept = recipe(name).replace(filter=()) if recipe(name).filter else recipe(name)
    assert batch_phase(kept, sample.build()).batch.advantage_NT[1:5].abs().max() > 0.0


@pytest.mark.parametrize("name", GROUP_BASELINES)
def test_a_group_left_with_one_grade_has_advantage_0(name: str) -> None:
    sample = random_sample(3, groups=(3, 4))
    reward_N = sample.streams["reward_N"].clone()
    reward_N[:2] = NAN
    done = batch_phase(recipe(name), with_streams(sample, reward_N=reward_N).build()).batch
    assert done.advantage_NT[:3].abs().max() == 0.0


@every_recipe
def test_empty_completions_neither_count_nor_spoil(name: str) -> None:
    sample = random_sample(4, groups=(4, 4))
    mask_NT = sample.streams["mask_NT"].clone()
    mask_NT[[1, 6]] = False
    reward_N = sample.streams["reward_N"].clone()
    reward_N[2] = 1.25  # better than all others of its group
    sample = with_streams(sample, mask_NT=mask_NT, reward_N=reward_N)
    made = recipe(name)
    done = batch_phase(made, sample.build()).batch
    assert done.coefficient_NT[[1, 6]].abs().max() == 0.0
    loss, gradients = step(name, sample)
    assert abs(loss) < INF and all(bool(g.isfinite().all()) for g in gradients)
    assert gradients[0][[1, 6]].abs().max() == 0.0
    assert gradients[0].abs().max() > 0.0


def test_rows_without_a_token_leave_the_denominator() -> None:
    mask_NT = torch.tensor([[1, 1], [1, 0], [0, 0]])
    batch = TokenBatch.build(mask_NT=mask_NT, group_N=[0, 0, 0], reward_N=[1.0, 0.0, 0.0])
    weights = {
        "seq_mean_token_mean()": [[1 / 4, 1 / 4], [1 / 2, 0], [0, 0]],
        "seq_mean_token_sum()": [[1 / 2, 1 / 2], [1 / 2, 0], [0, 0]],
        "token_mean_batch()": [[1 / 3, 1 / 3], [1 / 3, 0], [0, 0]],
    }
    for text, expected in weights.items():
        done = batch_phase(recipe("dr_grpo").replace(aggregation=text), batch).batch
        torch.testing.assert_close(done.coefficient_NT, torch.tensor(expected))


# --- hyper-parameters -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: clip(-0.1, 0.2), r"clip: low=-0.1 is out of range.*>= 0"),
        (lambda: clip(high=INF), "clip: high=inf is out of range"),
        (lambda: clip(NAN), "clip: low=nan is out of range"),
        (lambda: clip(True), "clip: low=True must be a number"),
        (lambda: clip("0.2"), "clip: low='0.2' must be a number"),
        (lambda: clip(None), "clip: low=None must be a number"),
        (lambda: clip(10**400), "clip: low"),
        (lambda: weight_cap(0.0), "weight_cap: cap=0.0 is out of range.*> 0"),
        (lambda: group_zscore(ddof=2), r"ddof=2 is out of range.*\[0, 1\]"),
        (lambda: group_zscore(ddof=1.0), "ddof=1.0 must be a whole number"),
        (lambda: group_zscore(ddof=True), "ddof=True must be a whole number"),
        (lambda: group_zscore(eps=-1e-6), "eps=-1e-06 is out of range.*>= 0"),
        (lambda: whiten_tokens(eps_in_var=-INF), "eps_in_var=-inf is out of range"),
        (lambda: joint(updates=0), "updates=0 is out of range.*>= 1"),
        (lambda: joint(updates=2.5), "updates=2.5 must be a whole number"),
        (lambda: kl(estimator="k4"), "estimator='k4' is unknown.*'k3'"),
        (lambda: kl(coef=-0.1), "coef=-0.1 is out of range"),
        (lambda: seq_mean_token_sum_norm(), "needs the hyper-parameter 'length'.*no default"),
        (lambda: clip(0.2, 0.3, 0.4), "takes 2 hyper-parameters.*low, high.*got 3"),
        (lambda: clip(0.2, low=0.3), "'low' is given twice"),
        (lambda: clip(hihg=0.3), "no hyper-parameter 'hihg'.*Did you mean 'high'"),
        (lambda: joint(epochs=2), "no hyper-parameter 'epochs'.*ignored.*updates"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_hyper_parameter_is_refused(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        make()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("clipp(0.2)", "no gate called 'clipp'.*Did you mean 'clip'"),
        ("clip(0.2", "Can't read .*as a gate.*name\\(parameter=value\\)"),
        ("clip(low=wide)", "'wide' is no number or string"),
        ("clip(low=inf)", "'inf' is no number"),
        ("clip(low=1e999)", "low=inf is out of range"),
        ("clip(low=-0.2)", "low=-0.2 is out of range"),
        ("clip(__import__('os'))", "no width called '__import__'"),
        ("os.system('x')", "Can't read"),
        ("1 + 1", "Can't read"),
        ("clip(), clip()", "exactly one gate, got 2"),
        ("", "exactly one gate, got 0"),
    ],
)
def test_a_bad_text_form_is_refused(text: str, match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        recipe("grpo").replace(gate=text)


def test_text_is_never_evaluated(tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        parse("gate", f"clip(low=open({str(tmp_path / 'made')!r}, 'w').write('x'))")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("grppo", "grpo"), ("dappo", "dapo"), ("grpo@ver", "grpo@verl"), ("GRPO", "grpo")],
)
def test_an_unknown_recipe_is_refused_with_the_nearest_name(wrong: str, right: str) -> None:
    with pytest.raises(RecipeError, match=f"no recipe '{wrong}'.*Did you mean .*'{right}'"):
        recipe(wrong)


def test_an_unknown_slot_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(RecipeError, match=r"no slot 'gates'.*Did you mean 'gate'"):
        recipe("grpo").replace(gates="clip()")
    with pytest.raises(RecipeError, match=r"no slot 'agregation'.*Did you mean 'aggregation'"):
        recipe("grpo", {"agregation": "token_sum()"})


# --- pairs ------------------------------------------------------------------------------------


def test_pairs_of_unequal_number_and_values_that_are_not_finite_are_refused() -> None:
    two, three = torch.zeros(2), torch.zeros(3)
    with pytest.raises(BatchError, match="rejected_logp_N has shape"):
        Pairs(two, three, two, two)
    with pytest.raises(BatchError, match="ref_chosen_logp_N is not finite"):
        Pairs(two, two, torch.tensor([0.0, -INF]), two)
    with pytest.raises(BatchError, match="at least one pair"):
        Pairs(*[torch.zeros(0)] * 4)


def test_a_preference_far_from_the_reference_stays_finite() -> None:
    far = torch.tensor([-2000.0, 0.0], requires_grad=True)
    loss = logistic(5.0)(Pairs(far, -2000.0 - far, torch.zeros(2), torch.zeros(2))).loss
    (gradient,) = torch.autograd.grad(loss, far)
    assert bool(loss.isfinite()) and bool(gradient.isfinite().all())


@pytest.mark.parametrize("scores", [[1.0], [1.0, NAN], [[1.0, 0.0]]])
def test_a_pair_needs_two_finite_scores(scores: Any) -> None:
    with pytest.raises(BatchError, match="finite scores of at least two"):
        best_and_worst()(torch.tensor(scores))


def test_equal_scores_give_no_pair() -> None:
    assert not best_and_worst()(torch.tensor([0.5, 0.5])).keep
    choice = best_and_worst()(torch.tensor([0.5, 0.9, 0.1]))
    assert (choice.chosen, choice.rejected, choice.keep) == (1, 2, True)
