"""Bugs that other trainers have had and that no error message gave away. One test each.

Numbers are worked out by hand; the number that the bug would give stands beside them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from batches import POLICY_RECIPES, learner_outputs, leaves, random_sample
from torch import Tensor

from groupwise import Recipe, TokenBatch, batch_phase, merge, passes, recipe, token_phase
from groupwise.errors import BatchError, RecipeWarning
from groupwise.groups.shaping import kl_per_token, soft_overlong
from groupwise.losses.penalties import kl, kl_importance
from groupwise.losses.ratios import sequence_geomean, sequence_product


def built(lengths: list[int], rewards: list[Any], groups: list[int] | None = None, width: int = 4,
          **streams: Tensor) -> TokenBatch:  # fmt: skip
    """Rows of the given lengths in float64, one group unless told."""
    mask_NT = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
    reward_N = torch.tensor([math.nan if r is None else r for r in rewards], dtype=torch.float64)
    groups = groups or [0] * len(lengths)
    return TokenBatch.build(mask_NT=mask_NT, group_N=groups, reward_N=reward_N, **streams)


def on_policy_gradient(made: Recipe, batch: TokenBatch, parts: list[list[int]]) -> Tensor:
    """dL/dℓ at ratio 1, the losses of the parts added up."""
    logp_NT = torch.full(batch.mask_NT.shape, -1.0, dtype=torch.float64, requires_grad=True)
    done = batch_phase(made, batch).batch
    loss = sum(
        token_phase(made, done.select(torch.tensor(part)), logp_NT=logp_NT[part]).loss
        for part in parts
    )
    return torch.autograd.grad(loss, logp_NT)[0]


def advantages(made: Recipe, batch: TokenBatch) -> list[float]:
    """The advantage on the first token of each row."""
    return batch_phase(made, batch).batch.advantage_NT[:, 0].tolist()


def wide(x: Any) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


def close(found: Any, expected: Any, atol: float = 1e-12) -> None:
    torch.testing.assert_close(wide(found), wide(expected), rtol=0, atol=atol)


# --- loss and advantages ----------------------------------------------------------------------


def test_01_token_mean_has_one_denominator_for_all_micro_batches() -> None:
    """A token mean taken in each micro-batch makes a short answer's tokens heavier."""
    made = recipe("dr_grpo").replace(aggregation="token_mean_batch()")
    expected = [[-0.5 / 4, 0, 0, 0], [0.5 / 4] * 3 + [0]]  # the bug: −0.5/1 and 0.5/3, halved
    close(on_policy_gradient(made, built([1, 3], [1.0, 0.0]), [[0], [1]]), expected)
    close(on_policy_gradient(made, built([1, 3], [1.0, 0.0]), [[0, 1]]), expected)


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]])
def test_02_accumulation_does_not_divide_again(parts: list[list[int]]) -> None:
    """A loss that is already a mean over the batch, divided by the number of accumulation steps."""
    made = recipe("dr_grpo").replace(aggregation="seq_mean_token_mean()")
    gradient = on_policy_gradient(made, built([2, 2, 2, 2], [1.0, 0.0, 0.0, 1.0]), parts)
    close(gradient[:, :2].abs(), torch.full((4, 2), 0.5 / (4 * 2)))  # whatever len(parts)


@pytest.mark.parametrize(
    ("aggregation", "weight"),
    [
        ("token_mean_batch()", 1 / 4),  # the bug: 1/8
        ("seq_mean_token_mean()", 1 / (2 * 2)),  # the bug: 1/(3·2)
        ("seq_mean_token_sum()", 1 / 2),
        ("token_mean_group()", 1 / 4),
    ],
)
def test_03_a_truncated_row_leaves_numerator_and_denominator(
    aggregation: str, weight: float
) -> None:
    """Tokens of truncated answers masked in the sum, yet still counted in its denominator."""
    batch = built([2, 2, 4], [1.0, 0.0, 0.0], truncated_N=torch.tensor([False, False, True]))
    made = recipe("dr_grpo").replace(filter="overlong()", aggregation=aggregation)
    done = batch_phase(made, batch).batch
    close(done.coefficient_NT, [[weight, weight, 0, 0]] * 2 + [[0, 0, 0, 0]])
    close(done.advantage_NT[:, 0], [2 / 3, -1 / 3, -1 / 3])  # its reward stays in the mean


def test_04_the_divisor_of_dr_grpo_is_a_constant() -> None:
    """A sum over tokens divided by the padded width, which changes with the longest neighbour."""
    made = recipe("dr_grpo", {"aggregation.length": 10})
    for width in (4, 400):
        gradient = on_policy_gradient(made, built([2, 2], [1.0, 0.0], width=width), [[0, 1]])
        close(gradient[:, :2], [[-0.5 / 20] * 2, [0.5 / 20] * 2])  # B·L = 2·10


def test_06_advantages_are_normalised_once() -> None:
    """The trainer normalises what the reward function had normalised, or over the batch again."""
    batch = built([1, 1, 1, 1], [1.0, 0.0, 0.0, 0.0])
    found = advantages(recipe("grpo").replace(penalty=()), batch)
    close(found, [0.75 / (0.5 + 1e-6)] + [-0.25 / (0.5 + 1e-6)] * 3)
    close(wide(found).mean(), 0.0)
    close(wide(found).std(), 1.0, atol=1e-5)
    with pytest.warns(RecipeWarning, match="normalise the same rewards twice"):
        recipe("grpo").replace(advantage="group_zscore(), whiten_tokens()")


def test_07_groups_are_what_their_ids_say() -> None:
    """Groups guessed from places in the batch, from the whole batch, or from equal prompts."""
    made = recipe("dr_grpo")
    found = advantages(made, built([1] * 4, [1.0, 5.0, 0.0, 7.0], [3, -8, 3, -8]))
    close(found, [0.5, -1.0, -0.5, 1.0])  # pairs of neighbours: ∓2, ∓3.5; whole batch: −2.25, ...
    order = [2, 3, 0, 1]
    shuffled = advantages(made, built([1] * 4, [0.0, 7.0, 1.0, 5.0], [3, -8, 3, -8]))
    close(shuffled, [found[row] for row in order])


def test_09_std_convention_zero_variance_and_the_bias_of_the_mean() -> None:
    """Population or sample std, 0/0 in uniform groups, and G/(G−1) between the two baselines."""
    batch = built([1] * 4, [1.0, 0.0, 0.0, 0.0])
    plain = recipe("grpo", {"advantage.eps": 0.0}).replace(penalty=())
    close(advantages(plain, batch), [1.5, -0.5, -0.5, -0.5])
    root3 = math.sqrt(3)
    population = plain.set("advantage.ddof", 0)
    close(advantages(population, batch), [root3, -1 / root3, -1 / root3, -1 / root3])
    for value in (0.1, 1 / 3, 1e8 + 0.1):
        assert advantages(plain, built([1] * 7, [value] * 7)) == [0.0] * 7
    mean = advantages(recipe("dr_grpo"), batch)
    close(mean, [0.75, -0.25, -0.25, -0.25])
    loo = advantages(recipe("rloo").replace(shaping=()), batch)
    close(loo, [1.0, -1 / 3, -1 / 3, -1 / 3])
    close(wide(loo) * 3 / 4, mean)


def test_10_a_row_without_a_grade_is_in_no_baseline() -> None:
    """A grader that answers None: taken for 0 it moves the mean, taken for NaN it spreads."""
    batch = built([1] * 4, [1.0, None, 0.0, 0.0])
    done = batch_phase(recipe("dr_grpo", {"aggregation.length": 1}), batch)
    close(done.batch.advantage_NT[:, 0], [2 / 3, 0, -1 / 3, -1 / 3])  # as 0: 0.75, −0.25, ...
    close(done.batch.coefficient_NT[:, 0], [1 / 3, 0, 1 / 3, 1 / 3])
    assert done.metrics["reward/mean"] == pytest.approx(1 / 3)
    assert done.metrics["reward/ungraded_share"] == pytest.approx(1 / 4)
    nobody = batch_phase(recipe("grpo").replace(penalty=()), built([1, 1], [None, None]))
    assert nobody.batch.advantage_NT.abs().max() == 0.0
    assert nobody.metrics["reward/ungraded_share"] == 1.0


def test_11_one_reward_is_not_spread_over_many_rows() -> None:
    """A reward function that returns one number for the batch trains on nothing, silently."""
    with pytest.raises(BatchError, match="a single reward is not spread over the rows"):
        built([1, 1], [1.0])


def test_13_grpo_is_its_papers_equation_and_nothing_else() -> None:
    """A preset with an entropy bonus (or a second clip, or a KL) that nobody asked for."""
    old = torch.tensor([[-1.0, -0.5], [-0.2, -2.0]], dtype=torch.float64)
    ref = torch.tensor([[-1.1, -0.7], [-0.4, -1.5]], dtype=torch.float64)
    new = torch.tensor([[-0.7, -0.6], [-0.5, -0.3]], dtype=torch.float64)
    batch = built([2, 1], [1.0, 0.0], width=2, old_logp_NT=old, ref_logp_NT=ref)
    entropy = torch.tensor([[3.0, 1.0], [2.0, 5.0]], dtype=torch.float64)
    made = recipe("grpo")
    result = token_phase(made, batch_phase(made, batch).batch, logp_NT=new, entropy_NT=entropy)
    a = 0.5 / (math.sqrt(0.5) + 1e-6)

    def k3(x: float) -> float:
        return math.exp(-x) + x - 1

    first = min(math.exp(0.3), 1.2) * a + min(math.exp(-0.1), 1.2) * a
    second = min(-math.exp(-0.3) * a, -0.8 * a)
    penalties = (k3(0.4) + k3(0.1)) / 2 + k3(-0.1)
    close(result.loss, -(first / 2 + second) / 2 + 0.04 * penalties / 2)
    assert set(result.terms) == {"policy", "kl"}
    asking = [
        n for n in POLICY_RECIPES if any(s.name == "entropy_bonus" for s in recipe(n).slots())
    ]
    assert asking == ["entropy_bonus"]


# --- KL and ratios ----------------------------------------------------------------------------


def test_14_which_kl_gradient_each_estimator_gives() -> None:
    """k3 in the loss taken for the gradient of KL(π‖ref); k1 in the loss taken for anything."""
    z = torch.tensor([0.3, -0.8, 1.1, 0.2], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.9, 0.1, -0.4, 0.3], dtype=torch.float64).log_softmax(0)
    logp = z.log_softmax(0)
    pi = logp.detach().exp()
    old = torch.tensor([-0.2, 0.4, 0.6, -1.0], dtype=torch.float64).log_softmax(0)

    def expected_gradient(loss_NT: Tensor, weight: Tensor) -> Tensor:
        """All four tokens, each as often as it is sampled."""
        return torch.autograd.grad((weight * loss_NT[:, 0]).sum(), z, retain_graph=True)[0]

    def batch(**streams: Tensor) -> TokenBatch:
        made = built([1] * 4, [0.0] * 4, width=1, ref_logp_NT=ref[:, None], **streams)
        return made.with_outputs(logp_NT=logp[:, None])

    reverse = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), z, retain_graph=True)[0]
    forward = torch.autograd.grad((ref.exp() * (ref - logp)).sum(), z, retain_graph=True)[0]
    assert (reverse - forward).abs().max() > 0.05  # telling them apart means something
    close(expected_gradient(kl(1.0, "k1")(batch()), pi), torch.zeros(4))
    close(expected_gradient(kl(1.0, "k2")(batch()), pi), reverse)
    close(expected_gradient(kl(1.0, "k3")(batch()), pi), forward)
    close(expected_gradient(kl(1.0, "k3+")(batch()), pi), reverse)
    stale = kl_importance(1.0)(batch(old_logp_NT=old[:, None]))
    close(expected_gradient(stale, old.exp()), reverse)
    in_reward = kl_per_token(1.0)(torch.zeros(4), batch(old_logp_NT=logp.detach()[:, None]))[1]
    close(expected_gradient(-in_reward * logp[:, None], pi), reverse)


def test_15_the_gradient_changes_with_beta() -> None:
    """KL computed without a graph: it shows in the loss and pulls at nothing."""
    old, ref = wide([[-1.0], [-1.0]]), wide([[-1.4], [-1.4]])
    batch = built([1, 1], [1.0, 0.0], width=1, old_logp_NT=old, ref_logp_NT=ref)

    def gradient(beta: float) -> Tensor:
        made = recipe("grpo", {"penalty.coef": beta})
        logp_NT = old.clone().requires_grad_()
        loss = token_phase(made, batch_phase(made, batch).batch, logp_NT=logp_NT).loss
        return torch.autograd.grad(loss, logp_NT)[0]

    slope = (1 - math.exp(-0.4)) / 2  # dk3/dℓ at x = 0.4, over B = 2
    close(gradient(0.7) - gradient(0.2), [[0.5 * slope]] * 2)


@pytest.mark.parametrize("name", POLICY_RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_16_policies_100_nats_apart_give_finite_numbers(name: str, dtype: torch.dtype) -> None:
    """exp of a log-ratio overflows: inf in the loss, or inf·0 = NaN in its gradient."""
    made = recipe(name)
    for shift in ("old_logp_NT", "sampler_logp_NT", "ref_logp_NT", "prm_logp_NT", "policy"):
        sample = random_sample(5, groups=(4, 4), dtype=dtype)
        if shift == "policy":  # the sampled tokens became all but impossible
            index = sample.streams["token_NT"][..., None]
            sample.logits_NTV.scatter_(2, index, torch.full_like(index, -100, dtype=dtype))
        else:
            sample.streams[shift] = sample.streams[shift] - 100.0
        leaf = leaves(sample)
        extra = {"length_exponent": leaf.exponent} if name == "lambda_grpo" else {}
        done = batch_phase(made, sample.build(**extra)).batch
        outputs = learner_outputs(made, sample, leaf)
        results = [token_phase(made, one, **outputs) for one in passes(made, done)]
        loss = sum(result.loss for result in results)
        found = torch.autograd.grad(loss, leaf.all(), allow_unused=True)
        assert bool(loss.isfinite()) and all(
            bool(g.isfinite().all()) for g in found if g is not None
        )
        assert all(math.isfinite(x) for result in results for x in result.tally.read().values())


def test_19_the_ratio_of_a_sequence_is_a_product() -> None:
    """Ratios of tokens added (or averaged) where the sequence's probability multiplies them."""
    old = torch.zeros(1, 3, dtype=torch.float64)
    new = torch.tensor([[2.0, 3.0, 99.0]], dtype=torch.float64).log()
    batch = built([2], [1.0], width=3, old_logp_NT=old).with_outputs(logp_NT=new)
    product = sequence_product()(batch).exp()
    close(product[0, :2], [6.0, 6.0])  # the bug: 5
    close(sequence_geomean()(batch).exp()[0, :2], [math.sqrt(6)] * 2)  # the bug: 2.5
    longer = built([3], [1.0], width=3, old_logp_NT=old).with_outputs(logp_NT=new)
    close(sequence_product()(longer).exp()[0], [594.0] * 3)


# --- tokens that others wrote -----------------------------------------------------------------

# Two answers with a tool's tokens in between: the policy wrote two tokens of the first.
TOOL = torch.tensor([[1, 0, 0, 0, 1, 0], [1, 1, 1, 1, 0, 0]]).bool()


def with_a_tool(junk: float, **streams: list[list[float]]) -> TokenBatch:
    """Rewards 1 and 0 in one group; each stream has junk of its own where the policy wrote not."""
    filled = {
        name: wide(x).where(TOOL, wide(number * junk))
        for number, (name, x) in enumerate(streams.items(), 2)
    }
    reward_N = torch.tensor([1.0, 0.0], dtype=torch.float64)
    return TokenBatch.build(mask_NT=TOOL, group_N=[0, 0], reward_N=reward_N, **filled)


@pytest.mark.parametrize("junk", [0.0, -50.0, math.nan])
def test_35_a_tools_tokens_are_in_no_loss_no_kl_and_no_return(junk: float) -> None:
    """Here by hand; test_invariances.py has the same for every recipe, with gradients."""
    old, ref = [[-1.0] * 6] * 2, [[-1.5, 9.0, 9.0, 9.0, -2.0, 9.0], [-1.0] * 6]
    batch = with_a_tool(junk, old_logp_NT=old, ref_logp_NT=ref)
    made = recipe("grpo", {"advantage": "group_mean()", "penalty": "kl(coef=0.5, estimator='k2')"})
    logp_NT = torch.full((2, 6), -1.0, dtype=torch.float64).where(TOOL, junk).requires_grad_()
    done = token_phase(made, batch_phase(made, batch).batch, logp_NT=logp_NT)
    # Advantages of ±0.5 cancel. What is left is 0.5 · KL: tokens of x²/2 with x = 0.5, 1 | 0.
    close(done.loss.detach(), 0.5 * ((0.125 + 0.5) / 2 + 0) / 2)
    assert torch.autograd.grad(done.loss, logp_NT)[0][~TOOL].abs().max() == 0.0
    shaped = kl_per_token(coef=1.0, estimator="k1")(wide([1.0, 0.0]), batch)[1]
    close(shaped, -torch.tensor([[0.5, 0, 0, 0, 1.0, 0], [0] * 6]))


def test_37_the_length_of_an_answer_is_what_the_policy_wrote() -> None:
    """A tool's long reply must not make an answer overlong, nor its tokens lighter."""
    batch = with_a_tool(0.0)
    assert batch.length_N.tolist() == [2, 4]  # the bug: 5 and 4, or 6 and 6
    coefficient_NT = batch_phase(recipe("grpo", {"penalty": ""}), batch).batch.coefficient_NT
    close(coefficient_NT[0], [1 / 4, 0, 0, 0, 1 / 4, 0])  # half of a row of two; the bug: 1/10
    close(coefficient_NT[1], [1 / 8] * 4 + [0, 0])
    shaped_N, _ = soft_overlong(max_length=4, cache=2)(wide([1.0, 0.0]), batch)
    close(shaped_N, [1.0, -1.0])  # two tokens cost nothing, four are at the limit


# --- measures ---------------------------------------------------------------------------------


def measured(widths: int, junk: float, parts: list[list[int]]) -> dict[str, float]:
    """Ratios 2 | 1 1 1, KL x 0.5 | 0, entropies 4 | 1 2 3; and junk behind them."""
    batch_streams = {
        "old_logp_NT": [[-1.0], [-1.0, -1.0, -1.0]],
        "ref_logp_NT": [[-1.0 + math.log(2) - 0.5], [-1.0, -1.0, -1.0]],
    }
    outputs = {
        "logp_NT": [[-1.0 + math.log(2)], [-1.0, -1.0, -1.0]],
        "entropy_NT": [[4.0], [1.0, 2.0, 3.0]],
    }

    def padded(rows: list[list[float]]) -> Tensor:
        full = [[*row, *[junk] * (widths - len(row))] for row in rows]
        return torch.tensor(full, dtype=torch.float64)

    streams = {name: padded(rows) for name, rows in batch_streams.items()}
    made = recipe("grpo")
    done = batch_phase(made, built([1, 3], [1.0, 0.0], width=widths, **streams)).batch
    tallies = [
        token_phase(
            made,
            done.select(torch.tensor(part)),
            **{name: padded(rows)[part] for name, rows in outputs.items()},
        ).tally
        for part in parts
    ]
    return merge(tallies).read()


EXPECTED = {
    "ratio/mean": (2 + 3) / 4,
    "ratio/max": 2.0,
    "ratio/effective_sample_share": (5 / 4) ** 2 / ((4 + 3) / 4),
    "kl/ref": (math.exp(-0.5) + 0.5 - 1) / 4,
    "kl/ref_k1": 0.5 / 4,
    "entropy/mean": (4 + 6) / 4,
}


def test_44_entropy_and_kl_are_not_taken_over_padding() -> None:
    """A mean over padded positions falls when a longer neighbour joins the batch."""
    for width, junk in ((3, 0.0), (50, 0.0), (50, 7.0), (50, math.nan)):
        found = measured(width, junk, [[0, 1]])
        close([found[name] for name in EXPECTED], list(EXPECTED.values()))


def test_45_measures_of_parts_merge_by_their_sizes() -> None:
    """A mean of the parts' means: here 1.5 for the ratio where 1.25 is right."""
    found = measured(4, 0.0, [[0], [1]])
    close([found[name] for name in EXPECTED], list(EXPECTED.values()))
