"""Exact expectations over every answer of a toy policy: two tokens, three words, word 0 ends.

The policy is a table with gradient: logits of the first word, and of the second after each first.
An expectation is a sum over all answers (or all G-tuples of answers), so a claim like 'unbiased' is
an equation between two gradients, good to 1e-10.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from probe import composed
from torch import Tensor

from groupwise import Recipe, TokenBatch, batch_phase, token_phase
from groupwise.groups.kl import VALUES
from groupwise.methods.slots import parse

WORDS = 3
# (0,) stops at once; every other first word is followed by one of the three.
ANSWERS = [(0,)] + [(a, b) for a in (1, 2) for b in range(WORDS)]
MASK_ST = torch.tensor([[True, len(answer) == 2] for answer in ANSWERS])
REWARD_S = torch.tensor([0.3, 1.0, -0.5, 0.8, 0.1, 2.0, 0.0], dtype=torch.float64)
SUCCESS_S = torch.tensor([0.0, 1, 0, 0, 1, 0, 0], dtype=torch.float64)
UNBIASED = {"ratio": "on_policy()", "gate": "score()", "aggregation": "seq_mean_token_sum()"}


@dataclass
class Policy:
    """Logits of the first word [3] and of the second after each first word [3, 3]."""

    first_V: Tensor
    second_VV: Tensor

    @classmethod
    def draw(cls, seed: int, spread: float = 0.7) -> Policy:
        g = torch.Generator().manual_seed(seed)
        shapes = ((WORDS,), (WORDS, WORDS))
        return cls(*(spread * torch.randn(*s, generator=g, dtype=torch.float64) for s in shapes))

    def live(self) -> Policy:
        return Policy(*(x.detach().clone().requires_grad_() for x in self.leaves))

    @property
    def leaves(self) -> list[Tensor]:
        return [self.first_V, self.second_VV]

    def logp(self) -> Tensor:
        """Log-probability of each word of each answer [7, 2], 0 where there is none."""
        first, second = self.first_V.log_softmax(-1), self.second_VV.log_softmax(-1)
        rows = [
            torch.stack([first[a[0]], second[a] if len(a) == 2 else first.new_zeros(())])
            for a in ANSWERS
        ]
        return torch.stack(rows)

    def probability(self) -> Tensor:
        return self.logp().sum(1).exp()


POLICY, OLD, REF = Policy.draw(0), Policy.draw(1), Policy.draw(2)


def gradient(value: Tensor, policy: Policy) -> Tensor:
    grads = torch.autograd.grad(value, policy.leaves, allow_unused=True, retain_graph=True)
    pairs = zip(grads, policy.leaves, strict=True)
    return torch.cat([(torch.zeros_like(x) if g is None else g).flatten() for g, x in pairs])


def true_gradient(reward_S: Tensor = REWARD_S) -> Tensor:
    """∇ E_π[R]."""
    policy = POLICY.live()
    return gradient((policy.probability() * reward_S).sum(), policy)


def expected(
    made: Recipe,
    *,
    group_size: int = 1,
    reward_S: Tensor = REWARD_S,
    sampled_from: Policy = POLICY,
    **streams_S: Any,
) -> Tensor:
    """−E[∇ loss], exact, over all tuples of answers: every tuple is a group of one large batch.

    Groups do not see each other and every row weighs 1/B, so a tuple's own loss has P times the
    gradient of its rows in the large batch; tuples are weighted by their probability.
    """
    tuples = list(itertools.product(range(len(ANSWERS)), repeat=group_size))
    rows = torch.tensor(tuples).flatten()
    batch = TokenBatch.build(
        mask_NT=MASK_ST[rows],
        group_N=torch.arange(len(tuples)).repeat_interleave(group_size),
        reward_N=reward_S[rows],
        **{name: x[rows] for name, x in streams_S.items()},
    )
    policy = POLICY.live()
    logp_NT = policy.logp()[rows]
    leaf_NT = logp_NT.detach().requires_grad_()
    loss = token_phase(made, batch_phase(made, batch).batch, logp_NT=leaf_NT).loss
    (grad_NT,) = torch.autograd.grad(loss, leaf_NT)
    chance_P = sampled_from.probability().detach()[torch.tensor(tuples)].prod(1)
    weight_N = (len(tuples) * chance_P).repeat_interleave(group_size)
    return -gradient((weight_N[:, None] * grad_NT * logp_NT).sum(), policy)


def equal(got: Tensor, want: Tensor, tolerance: float = 1e-10) -> None:
    assert want.abs().max() > 1e-3, "nothing to compare"
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.cosine_similarity(one, other, dim=0))


def test_the_answers_have_probability_1_and_the_policies_differ() -> None:
    for policy in (POLICY, OLD, REF):
        assert float(policy.probability().sum()) == pytest.approx(1.0, abs=1e-12)
    assert (POLICY.probability() / OLD.probability()).log().abs().max() > 0.3


# --- advantages --------------------------------------------------------------------------------


def test_reinforce_is_the_gradient_of_the_expected_reward() -> None:
    equal(expected(composed(advantage="raw()", **UNBIASED)), true_gradient())


@pytest.mark.parametrize("size", [2, 3])
def test_leave_one_out_is_unbiased(size: int) -> None:
    made = composed(advantage="leave_one_out()", **UNBIASED)
    equal(expected(made, group_size=size), true_gradient())


@pytest.mark.parametrize("size", [2, 3])
def test_the_group_mean_gives_G_minus_1_over_G_of_the_gradient(size: int) -> None:
    made = composed(advantage="group_mean()", **UNBIASED)
    equal(expected(made, group_size=size), (size - 1) / size * true_gradient())


def test_dr_grpo_divides_that_by_its_constant() -> None:
    made = composed(
        advantage="group_mean()", aggregation="seq_mean_token_sum_norm(5)", gate="clip()"
    )  # on-policy: old log-probabilities absent, so the ratio is 1 and the clip never acts
    equal(expected(made, group_size=3), 2 / 3 / 5 * true_gradient())


@pytest.mark.parametrize("chain", ["group_zscore()", "group_zscore(0)", "group_zscore(1, 0.0)"])
def test_a_z_score_points_elsewhere(chain: str) -> None:
    got = expected(composed(advantage=chain, **UNBIASED), group_size=3)
    assert 0.5 < cosine(got, true_gradient()) < 0.999


def test_a_scale_taken_from_the_others_does_not_turn_the_gradient() -> None:
    # A_i = (R_i − mean of the others)/(their std): the factor is independent of sample i.
    p_S, factor = POLICY.probability(), 0.0
    for j, k in itertools.product(range(len(ANSWERS)), repeat=2):
        std = abs(float(REWARD_S[j] - REWARD_S[k])) / 2**0.5
        factor += float(p_S[j] * p_S[k]) * (1 / (std + 0.1) if std else 1.0)
    made = composed(advantage="leave_one_out_zscore(1, 0.1)", **UNBIASED)
    equal(expected(made, group_size=3), factor * true_gradient())


def test_a_group_of_one_teaches_nothing() -> None:
    for chain in ("group_mean()", "leave_one_out()", "group_zscore()", "maxrl()"):
        assert not expected(composed(advantage=chain, **UNBIASED)).any()


def test_a_greedy_baseline_is_unbiased() -> None:
    made = composed(advantage="greedy_baseline()", **UNBIASED)
    greedy_S = torch.full_like(REWARD_S, 0.77)
    equal(expected(made, greedy_reward_N=greedy_S), true_gradient())


@pytest.mark.parametrize("size", [2, 3])
def test_maxrl_climbs_the_truncated_log_likelihood_of_success(size: int) -> None:
    policy = POLICY.live()
    p = (policy.probability() * SUCCESS_S).sum()
    # Groups without a success give 0, which costs the last term: the sum ends at G − 1.
    objective = -sum(((1 - p) ** k / k for k in range(1, size)), torch.zeros(()))
    got = expected(composed(advantage="maxrl()", **UNBIASED), group_size=size, reward_S=SUCCESS_S)
    equal(got, gradient(objective, policy))


def test_the_mean_over_an_answers_tokens_is_biased_by_length() -> None:
    made = composed(advantage="raw()", **{**UNBIASED, "aggregation": "seq_mean_token_mean()"})
    assert cosine(expected(made), true_gradient()) < 0.999


def _values(seed: int) -> Tensor:
    """Any function of the prefix: one number before the first word, one after each first word."""
    value_V = torch.randn(WORDS + 1, generator=torch.Generator().manual_seed(seed)).double()
    rows = [[value_V[-1], value_V[a[0]] if len(a) == 2 else value_V.new_zeros(())] for a in ANSWERS]
    return torch.stack([torch.stack(row) for row in rows])


def _exact_values() -> Tensor:
    """E[R | prefix]."""
    p_S = POLICY.probability()
    start = (p_S * REWARD_S).sum()
    rows = []
    for answer in ANSWERS:
        same_S = torch.tensor([other[0] == answer[0] for other in ANSWERS])
        after = (p_S * REWARD_S)[same_S].sum() / p_S[same_S].sum()
        rows.append(torch.stack([start, after if len(answer) == 2 else start.new_zeros(())]))
    return torch.stack(rows)


def test_gae_with_lambda_1_is_unbiased_whatever_the_critic_says() -> None:
    made = composed(advantage="gae(gamma=1.0, lam=1.0)", **UNBIASED)
    for seed in range(3):
        equal(expected(made, old_value_NT=_values(seed)), true_gradient())


def test_gae_with_a_smaller_lambda_is_unbiased_only_with_an_exact_critic() -> None:
    made = composed(advantage="gae(gamma=1.0, lam=0.3)", **UNBIASED)
    equal(expected(made, old_value_NT=_exact_values()), true_gradient())
    assert (expected(made, old_value_NT=_values(0)) - true_gradient()).abs().max() > 0.01


def test_rewards_per_token_may_be_summed_from_the_token_on() -> None:
    token_ST = torch.where(MASK_ST, torch.arange(14).reshape(7, 2).double() / 10, 0.0)
    # The first word's reward may depend on the first word alone.
    token_ST[:, 0] = torch.tensor([0.4 * answer[0] for answer in ANSWERS])
    made = composed(advantage="return_to_go()", **UNBIASED)
    got = expected(made, token_reward_NT=token_ST)
    equal(got, true_gradient(REWARD_S + token_ST.sum(1)))


# --- KL ----------------------------------------------------------------------------------------


def kl_gradient() -> Tensor:
    """∇ KL(π‖ref) of whole answers."""
    policy = POLICY.live()
    logp_S, ref_S = policy.logp().sum(1), REF.logp().sum(1)
    return gradient((logp_S.exp() * (logp_S - ref_S)).sum(), policy)


def prefix_kl_gradient(sampled_from: Policy, forward: bool = False) -> Tensor:
    """Σ_prefixes P(prefix)·∇KL of the next word, the prefixes' own probabilities held fixed."""
    policy, first = POLICY.live(), sampled_from.first_V.softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for weight, mine, other in [
        (torch.ones(()), policy.first_V, REF.first_V),
        *((first[a], policy.second_VV[a], REF.second_VV[a]) for a in (1, 2)),
    ]:
        p, q = mine.log_softmax(-1), other.log_softmax(-1)
        kl = (q.exp() * (q - p)).sum() if forward else (p.exp() * (p - q)).sum()
        total = total + weight * kl
    return gradient(total, policy)


def kl_in_the_loss(penalty: str, **more: Any) -> Tensor:
    """E[∇ penalty] with no reward, coefficient 1."""
    made = composed(advantage="raw()", penalty=penalty, **UNBIASED)
    streams = {"ref_logp_NT": REF.logp(), **more.pop("streams", {})}
    return -expected(made, reward_S=torch.zeros_like(REWARD_S), **streams, **more)


def kl_in_the_reward(**slots: str) -> Tensor:
    made = composed(**slots, **UNBIASED)
    streams = {"ref_logp_NT": REF.logp(), "old_logp_NT": POLICY.logp()}
    return -expected(made, reward_S=torch.zeros_like(REWARD_S), **streams)


def test_k1_in_the_loss_has_no_expected_gradient() -> None:
    assert kl_in_the_loss("kl(1.0, 'k1')").abs().max() < 1e-12


@pytest.mark.parametrize("estimator", ["k2", "k3+"])
def test_k2_in_the_loss_is_the_gradient_of_the_next_words_kl(estimator: str) -> None:
    got = kl_in_the_loss(f"kl(1.0, {estimator!r})")
    equal(got, prefix_kl_gradient(POLICY))
    # What it leaves out: that today's word changes which prefixes, and what KL, come later.
    assert (got - kl_gradient()).abs().max() > 0.01


def test_k3_in_the_loss_is_the_gradient_of_the_other_kl() -> None:
    got = kl_in_the_loss("kl(1.0, 'k3')")
    equal(got, prefix_kl_gradient(POLICY, forward=True))
    assert (got - prefix_kl_gradient(POLICY)).abs().max() > 0.01


def test_k1_in_the_reward_of_the_answer_is_the_gradient_of_its_kl() -> None:
    got = kl_in_the_reward(shaping="kl_per_sequence(1.0)", advantage="raw()")
    equal(got, kl_gradient())


def test_k1_in_the_reward_per_token_is_the_gradient_of_the_answers_kl() -> None:
    got = kl_in_the_reward(shaping="kl_per_token(1.0)", advantage="return_to_go()")
    equal(got, kl_gradient())
    equal(kl_in_the_reward(advantage="raw(), minus_kl_to_go(1.0, 1e6)"), kl_gradient())


def test_rloo_with_kl_in_its_reward_is_unbiased_for_reward_minus_kl() -> None:
    made = composed(shaping="kl_per_sequence(0.5)", advantage="leave_one_out()", **UNBIASED)
    streams = {"ref_logp_NT": REF.logp(), "old_logp_NT": POLICY.logp()}
    got = expected(made, group_size=2, **streams)
    equal(got, true_gradient() - 0.5 * kl_gradient())


def test_importance_weighted_k3_off_policy_is_the_gradient_of_the_next_words_kl() -> None:
    got = kl_in_the_loss(
        "kl_importance(1.0)", sampled_from=OLD, streams={"old_logp_NT": OLD.logp()}
    )
    equal(got, prefix_kl_gradient(OLD))


def test_plain_k2_off_policy_is_not() -> None:
    got = kl_in_the_loss("kl(1.0, 'k2')", sampled_from=OLD)
    assert (got - prefix_kl_gradient(OLD)).abs().max() > 0.01


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_as_values_and_k2_is_not(estimator: str) -> None:
    x_ST, p_S = POLICY.logp() - REF.logp(), POLICY.probability()
    want = (p_S * x_ST.sum(1)).sum()
    assert float((p_S[:, None] * VALUES[estimator](x_ST)).sum()) == pytest.approx(
        float(want), abs=1e-12
    )
    assert abs(float((p_S[:, None] * VALUES["k2"](x_ST)).sum() - want)) > 0.01


# --- off-policy --------------------------------------------------------------------------------


OFF_POLICY = {"gate": "unclipped()", "aggregation": "seq_mean_token_mean()"}
STALE = {"sampled_from": OLD, "old_logp_NT": OLD.logp()}


@pytest.mark.parametrize(
    "chain,size", [("raw()", 1), ("leave_one_out()", 2), ("leave_one_out()", 3)]
)
def test_the_sequence_product_is_unbiased_off_policy(chain: str, size: int) -> None:
    made = composed(advantage=chain, ratio="sequence_product()", **OFF_POLICY)
    equal(expected(made, group_size=size, **STALE), true_gradient())


@pytest.mark.parametrize("ratio", ["sequence_geomean()", "token()"])
def test_other_ratios_are_biased_off_policy(ratio: str) -> None:
    made = composed(advantage="raw()", ratio=ratio, **OFF_POLICY)
    assert cosine(expected(made, **STALE), true_gradient()) < 0.999


def test_the_token_ratio_forgets_that_prefixes_came_from_another_policy() -> None:
    made = composed(advantage="raw()", gate="unclipped()", aggregation="seq_mean_token_sum()")
    policy = POLICY.live()
    first, after = OLD.first_V.softmax(-1), policy.second_VV.softmax(-1)
    # The second word is learned right after each first word, weighted by the old policy's prefix.
    reached = sum(first[a] * (after[a] * REWARD_S[3 * a - 2 : 3 * a + 1]).sum() for a in (1, 2))
    got, want = expected(made, **STALE), gradient(torch.as_tensor(reached), policy)
    equal(got[WORDS:], want[WORDS:])
    assert (got - true_gradient())[WORDS:].abs().max() > 0.01


CORRECTED = {"advantage": "raw()", **UNBIASED}
# The learner's policy has not moved; only the sampler computes other probabilities.
MISMATCH = {"sampled_from": OLD, "old_logp_NT": POLICY.logp(), "sampler_logp_NT": OLD.logp()}


def test_without_a_correction_a_mismatch_is_a_bias() -> None:
    assert (expected(composed(**CORRECTED), **MISMATCH) - true_gradient()).abs().max() > 0.01


@pytest.mark.parametrize("correction", ["tis_sequence(1e6)", "mis_sequence(high=1e6)"])
def test_an_unbounded_sequence_weight_removes_the_bias(correction: str) -> None:
    equal(expected(composed(correction=correction, **CORRECTED), **MISMATCH), true_gradient())


def _one_rewarded(index: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(index), len(ANSWERS)).double()


def rho_S() -> Tensor:
    return (POLICY.probability() / OLD.probability()).detach()


def test_truncation_shrinks_exactly_the_answers_above_the_cap() -> None:
    cap = 1.2
    made = composed(correction=f"tis_sequence({cap})", **CORRECTED)
    above = [i for i in range(len(ANSWERS)) if rho_S()[i] > cap]
    assert 0 < len(above) < len(ANSWERS)
    for i in range(len(ANSWERS)):
        reward_S = _one_rewarded(i)
        share = min(cap / float(rho_S()[i]), 1.0)
        equal(expected(made, reward_S=reward_S, **MISMATCH), share * true_gradient(reward_S))


def test_masking_drops_them_altogether() -> None:
    made = composed(correction="mis_sequence(high=1.2)", **CORRECTED)
    for i in range(len(ANSWERS)):
        reward_S = _one_rewarded(i)
        got = expected(made, reward_S=reward_S, **MISMATCH)
        if rho_S()[i] > 1.2:
            assert not got.any()
        else:
            equal(got, true_gradient(reward_S))


def test_icepop_on_one_word_keeps_the_band_and_loses_the_tails() -> None:
    # The answer (0,) has one word, so its token weight is its whole weight.
    weight, reward_S = float(rho_S()[0]), _one_rewarded(0)
    inside = composed(correction=f"icepop({0.9 * weight}, {1.1 * weight})", **CORRECTED)
    outside = composed(correction=f"icepop({1.1 * weight}, {1.2 * weight})", **CORRECTED)
    equal(expected(inside, reward_S=reward_S, **MISMATCH), true_gradient(reward_S))
    assert not expected(outside, reward_S=reward_S, **MISMATCH).any()


@pytest.mark.parametrize("correction", ["tis_token(1.1)", "tis_sequence(1.1)", "icepop(0.8, 1.2)"])
def test_bounded_weights_have_a_mean_below_1(correction: str) -> None:
    streams = {"old_logp_NT": POLICY.logp(), "sampler_logp_NT": OLD.logp()}
    batch = TokenBatch.build(
        mask_NT=MASK_ST, group_N=[0] * 7, reward_N=REWARD_S, **streams
    ).with_outputs(logp_NT=POLICY.logp())
    (slot,) = parse("correction", correction)
    first_S = slot(batch)[:, 0]
    assert float((OLD.probability() * first_S).sum()) < 0.99
