"""Methods that must coincide, where their papers or their algebra say so."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from batches import POLICY_RECIPES, loss_and_gradients, random_sample
from probe import altered, assert_same, composed, learner_logp, probe, probe_sample
from torch import Tensor

from groupwise import Memory, Pairs, Recipe, TokenBatch, batch_phase, recipe
from groupwise.losses.gates import dynamic_bounds
from groupwise.recipes import RECIPES

SEEDS = range(3)
SAMPLE = random_sample(0, groups=(4, 3, 5), spread=0.6)


def advantages(text: str, **streams: Any) -> Tensor:
    """The advantage chain alone on SAMPLE, as a stream per token."""
    made = composed(advantage=text)
    batch = TokenBatch.build(**{**SAMPLE.streams, **streams})
    return batch_phase(made, batch).batch.stream("advantage_NT")


def coefficients(text: str) -> Tensor:
    made = composed(aggregation=text)
    return batch_phase(made, SAMPLE.build()).batch.stream("coefficient_NT")


def equal(one: Tensor, other: Tensor, tolerance: float = 1e-12) -> None:
    assert one.abs().max() > 1e-6, "nothing to compare"
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance, check_dtype=False)


# --- the identities of the specification ------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_low_and_high_pass_add_up_to_the_joint_loss(seed: int) -> None:
    sample = random_sample(seed, spread=0.6)
    both = probe_sample(recipe("lopti"), sample)
    assert_same(both, probe_sample(altered("lopti", schedule="joint()"), sample))


def _splits_by_token(name: str) -> bool:
    """Whether a token's share of the loss is its own, so that passes can be added up."""
    made = RECIPES[name]
    assert isinstance(made, Recipe)
    sequence = made.ratio.definition.traits.level == "sequence"
    return not sequence and made.gate.name != "geometric_clip"


TWO_PASSES = [name for name in POLICY_RECIPES if _splits_by_token(name)]


@pytest.mark.parametrize("name", [n for n in TWO_PASSES if not recipe(n).auxiliary])
def test_any_recipe_per_token_can_be_split_into_two_passes(name: str) -> None:
    made, split = recipe(name), altered(name, schedule="low_then_high()")
    whole, parts = loss_and_gradients(made, SAMPLE), loss_and_gradients(split, SAMPLE)
    assert abs(whole[0] - parts[0]) <= 1e-12
    equal(whole[1][0], parts[1][0])


@pytest.mark.parametrize("name", [n for n in TWO_PASSES if recipe(n).auxiliary])
def test_auxiliary_terms_are_counted_once_over_two_passes(name: str) -> None:
    made, split = recipe(name), altered(name, schedule="low_then_high()")
    whole, parts = loss_and_gradients(made, SAMPLE), loss_and_gradients(split, SAMPLE)
    assert abs(whole[0] - parts[0]) <= 1e-12


def test_the_slope_in_lambda_is_counted_once_over_two_passes() -> None:
    made = altered("lambda_grpo", penalty="kl()")
    split = made.replace(schedule="low_then_high()")
    whole, parts = loss_and_gradients(made, SAMPLE), loss_and_gradients(split, SAMPLE)
    torch.testing.assert_close(whole[1][3], parts[1][3], rtol=0, atol=1e-12)


def test_gspo_token_is_gspo_for_a_constant_advantage() -> None:
    for gate in ("clip(0.0003, 0.0004)", "clip(0.03, 0.05)"):
        sequence = probe_sample(altered("gspo", gate=gate), SAMPLE)
        token = probe_sample(altered("gspo_token", gate=gate), SAMPLE)
        assert_same(sequence, token)
        assert (sequence.result.clipped_NT != 0).any() and (sequence.result.clipped_NT == 0).any()


def test_lambda_0_is_the_token_mean() -> None:
    plain = probe_sample(composed(), SAMPLE)
    given = {"length_exponent": torch.zeros((), dtype=torch.float64)}
    learned = probe(recipe("lambda_grpo"), SAMPLE.build(**given), learner_logp(SAMPLE), **given)
    assert_same(plain, learned)


def test_leave_one_out_is_group_mean_times_G_over_G_minus_1() -> None:
    size_N = torch.tensor([4.0] * 4 + [3.0] * 3 + [5.0] * 5, dtype=torch.float64)
    factor_N1 = ((size_N - 1) / size_N)[:, None]
    equal(factor_N1 * advantages("leave_one_out()"), advantages("group_mean()"))


def test_k2_in_the_loss_is_k1_in_the_reward_of_the_same_token() -> None:
    sample = SAMPLE
    logp_NT, none_N = learner_logp(sample), torch.zeros(sample.rows, dtype=torch.float64)
    streams = {**sample.streams, "reward_N": none_N, "old_logp_NT": logp_NT}
    batch = TokenBatch.build(**streams)
    shared = {"ratio": "on_policy()", "gate": "score()", "aggregation": "seq_mean_token_sum()"}
    in_loss = composed(advantage="raw()", penalty="kl(0.3, 'k2')", **shared)
    in_reward = composed(
        advantage="return_to_go(gamma=0.0)", shaping="kl_per_token(0.3, 'k1')", **shared
    )
    equal(probe(in_loss, batch, logp_NT).grad_NT, probe(in_reward, batch, logp_NT).grad_NT)


# --- methods -----------------------------------------------------------------------------------


def test_gmpo_is_gspo_when_nothing_clips() -> None:
    gmpo = altered("gmpo", gate="geometric_clip(50.0)")
    gspo = altered("gspo", gate="unclipped()", schedule="joint()")
    assert_same(probe_sample(gspo, SAMPLE), probe_sample(gmpo, SAMPLE))
    clipped = probe_sample(recipe("gmpo"), SAMPLE)
    assert abs(clipped.loss - probe_sample(gmpo, SAMPLE).loss) > 1e-6


def test_dapo_narrowed_is_grpo_without_kl() -> None:
    dapo = altered(
        "dapo", gate="clip(0.2, 0.2)", aggregation="seq_mean_token_mean()", filter="", shaping=""
    )
    assert_same(probe_sample(altered("grpo", penalty=""), SAMPLE), probe_sample(dapo, SAMPLE))


def test_a_filter_changes_nothing_where_every_group_is_mixed() -> None:
    made = altered("dapo", shaping="", filter="zero_variance()")
    assert (advantages("group_zscore()").abs().amax(1) > 0).sum() >= 9
    unfiltered = altered("dapo", shaping="", filter="")
    assert_same(probe_sample(unfiltered, SAMPLE), probe_sample(made, SAMPLE))


def test_maxrl_is_the_mean_score_of_successes_minus_the_mean_score() -> None:
    reward_N = torch.tensor([1.0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 0], dtype=torch.float64)
    made = altered("maxrl", aggregation="seq_mean_token_sum()", ratio="on_policy()", gate="score()")
    got = -probe_sample(made, SAMPLE, reward_N=reward_N).grad_NT
    mask_NT, group_N = SAMPLE.streams["mask_NT"], SAMPLE.streams["group_N"]
    for g in (0, 1, 2):
        rows = group_N == g
        successes, size = int(reward_N[rows].sum()), int(rows.sum())
        for i in rows.nonzero()[:, 0].tolist():
            weight = float(reward_N[i]) / successes - 1 / size
            want_T = mask_NT[i].double() * weight * size / SAMPLE.rows
            equal(got[i], want_T)


def test_cispo_without_a_cap_has_the_gradient_of_plain_importance_sampling() -> None:
    cispo = altered("cispo", filter="", gate="weight_cap(cap=1e6)")
    plain = composed(gate="unclipped()")
    equal(probe_sample(cispo, SAMPLE).grad_NT, probe_sample(plain, SAMPLE).grad_NT)


def test_remax_with_a_greedy_reward_of_0_is_reinforce() -> None:
    none_N = torch.zeros(SAMPLE.rows, dtype=torch.float64)
    remax = probe_sample(recipe("remax"), SAMPLE, greedy_reward_N=none_N)
    assert_same(probe_sample(recipe("reinforce"), SAMPLE), remax)


def test_gpg_without_dead_groups_is_a_centred_policy_gradient() -> None:
    centred = composed(advantage="group_mean()", ratio="on_policy()", gate="score()")
    assert_same(probe_sample(centred, SAMPLE), probe_sample(recipe("gpg"), SAMPLE))


def test_lite_ppo_is_grpo_advantage_when_there_is_one_group() -> None:
    one = {"group_N": torch.zeros(SAMPLE.rows, dtype=torch.long)}
    equal(advantages("group_zscore()", **one), advantages("group_mean_batch_std()", **one))


def test_simko_without_smoothing_and_without_its_factor_is_clip() -> None:
    made = altered("simko", gate="topk_smoothing(alpha=0.0, top1=1.0)")
    smooth, plain = loss_and_gradients(made, SAMPLE), loss_and_gradients(composed(), SAMPLE)
    assert abs(smooth[0] - plain[0]) <= 1e-12
    equal(smooth[1][0], plain[1][0])


def test_rspo_with_unmoved_routers_is_gmpo() -> None:
    old = SAMPLE.streams["old_router_NTLK"]
    rspo = probe(recipe("rspo"), SAMPLE.build(), learner_logp(SAMPLE), router_NTLK=old)
    assert_same(probe_sample(recipe("gmpo"), SAMPLE), rspo)


def test_reinforce_rej_is_signed_reward_where_the_group_is_mixed() -> None:
    reward_N = torch.tensor([1.0] * 4 + [0, 1, 0] + [0] * 5, dtype=torch.float64)
    got = probe_sample(recipe("reinforce_rej"), SAMPLE, reward_N=reward_N).advantage_NT
    want_N = torch.tensor([0.0] * 4 + [-1, 1, -1] + [0] * 5, dtype=torch.float64)
    equal(got, SAMPLE.streams["mask_NT"] * want_N[:, None])


def test_prime_with_a_reward_model_that_knows_nothing_is_leave_one_out() -> None:
    same = {"prm_logp_NT": SAMPLE.streams["ref_logp_NT"]}
    equal(advantages("leave_one_out()", **same), advantages("process_rloo()", **same))


def test_process_supervision_with_one_step_is_outcome_supervision() -> None:
    mask_NT, reward_N = SAMPLE.streams["mask_NT"], SAMPLE.streams["reward_N"]
    last_NT = mask_NT & (mask_NT.cumsum(1) == mask_NT.sum(1, keepdim=True))
    steps = {"step_end_NT": last_NT, "step_reward_NT": reward_N[:, None] * last_NT}
    equal(advantages("group_zscore()"), advantages("group_process_zscore()", **steps))


def test_dpo_of_a_swapped_pair_differs_by_the_margin() -> None:
    x = torch.tensor([[-1.0], [-2.0], [-1.5], [-0.5]], dtype=torch.float64)
    logistic = recipe("dpo").preference
    one, other = logistic(Pairs(*x)), logistic(Pairs(x[1], x[0], x[3], x[2]))
    # h = 0.1·((−1+1.5) − (−2+0.5)) = 0.2, and −log σ(h) + log σ(−h) = −h
    assert float(one.margin_N) == pytest.approx(0.2, abs=1e-15)
    assert float(one.loss - other.loss) == pytest.approx(-0.2, abs=1e-15)
    assert float(one.loss) == pytest.approx(math.log1p(math.exp(-0.2)), abs=1e-15)


# --- advantages ----------------------------------------------------------------------------------


def test_dcpo_first_visit_is_the_z_score_without_epsilon() -> None:
    equal(advantages("group_zscore(eps=0.0)"), advantages("smooth_cumulative()"))


def test_dcpo_remembers_a_prompt_that_was_mixed_once() -> None:
    made = recipe("dcpo")
    ones = torch.ones(3, 1, dtype=torch.bool)
    old_NT = torch.full((3, 1), -1.0, dtype=torch.float64)
    parts = {"mask_NT": ones, "group_N": [7, 7, 7], "old_logp_NT": old_NT}
    first = batch_phase(made, TokenBatch.build(reward_N=[1.0, 0.0, 0.0], **parts))
    now = TokenBatch.build(reward_N=[1.0, 1.0, 1.0], memory=first.memory, **parts)
    # μ = 2/3; s² = ½[1/3 + (1/3)²] + ½[0 + (1/3)²] = 5/18; A_new = 0; both forms are A_tot/2
    want = (1 / 3) / math.sqrt(5 / 18) / 2
    got = batch_phase(made, now).batch.advantage_NT
    torch.testing.assert_close(got, torch.full_like(old_NT, want), rtol=0, atol=1e-12)
    forgotten = TokenBatch.build(reward_N=[1.0, 1.0, 1.0], memory=Memory(), **parts)
    assert not batch_phase(made, forgotten).batch.advantage_NT.any()


def test_gae_with_lambda_and_gamma_1_is_the_return_minus_the_value() -> None:
    equal(
        advantages("return_to_go()") - _masked("old_value_NT"),
        advantages("gae(gamma=1.0, lam=1.0)"),
    )


def test_gae_with_values_of_0_is_the_return_to_go() -> None:
    zero = {"old_value_NT": torch.zeros_like(SAMPLE.streams["old_value_NT"])}
    equal(advantages("return_to_go(0.9)", **zero), advantages("gae(gamma=0.9, lam=1.0)", **zero))


def one_answer(text: str, reward: float, value: list[float]) -> Tensor:
    """An advantage on a single answer of as many tokens as there are values."""
    batch = TokenBatch.build(
        mask_NT=torch.ones(1, len(value), dtype=torch.bool),
        group_N=[0],
        reward_N=torch.tensor([reward], dtype=torch.float64),
        old_value_NT=torch.tensor([value], dtype=torch.float64),
    )
    return batch_phase(composed(advantage=text), batch).batch.stream("advantage_NT")


def test_gae_with_lambda_0_is_the_one_step_error() -> None:
    want = torch.tensor([[0.9 * 0.25 - 0.5, 0.9 * 0.75 - 0.25, 0.25]], dtype=torch.float64)
    equal(one_answer("gae(gamma=0.9, lam=0.0)", 1.0, [0.5, 0.25, 0.75]), want)


def test_vapo_lambda_of_a_long_answer_is_gae_with_that_lambda() -> None:
    value = torch.linspace(-1, 1, 40).tolist()  # α·n = 2: λ = ½
    adaptive = one_answer("gae_length_adaptive(0.05)", 1.0, value)
    equal(adaptive, one_answer("gae(lam=0.5)", 1.0, value))
    short = one_answer("gae_length_adaptive(0.05)", 1.0, value[:20])  # α·n = 1: λ = 0
    equal(short, one_answer("gae(lam=0.0)", 1.0, value[:20]))


def _masked(name: str) -> Tensor:
    return torch.where(SAMPLE.streams["mask_NT"], SAMPLE.streams[name], 0.0)


@pytest.mark.parametrize("ddof", [0, 1])
def test_leave_one_out_zscore_uses_the_others_only(ddof: int) -> None:
    reward_N = torch.randn(12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = advantages(f"leave_one_out_zscore({ddof}, 1e-3)", reward_N=reward_N)[:, 0]
    group_N = SAMPLE.streams["group_N"]
    for i in range(12):
        others = [float(reward_N[j]) for j in range(12) if group_N[j] == group_N[i] and j != i]
        mean = sum(others) / len(others)
        var = sum((x - mean) ** 2 for x in others) / (len(others) - ddof)
        want = (float(reward_N[i]) - mean) / (math.sqrt(var) + 1e-3)
        assert float(got[i]) == pytest.approx(want, abs=1e-10)


def test_leave_one_out_zscore_does_not_scale_where_the_others_agree() -> None:
    streams = {"reward_N": torch.tensor([1.0] + [0.0] * 11, dtype=torch.float64)}
    got = advantages("leave_one_out_zscore()", **streams)[:4, 0]
    # for the others the rest is (1, 0, 0): mean 1/3, std √(1/3)
    want = [1.0] + [-(1 / 3) / (math.sqrt(1 / 3) + 1e-6)] * 3
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("chain", ["group_zscore(eps=0.0)", "group_mean_batch_std(eps=0.0)"])
def test_scaled_advantages_ignore_shift_and_scale_of_the_reward(chain: str) -> None:
    moved = {"reward_N": 7.0 * SAMPLE.streams["reward_N"] - 3.0}
    equal(advantages(chain), advantages(chain, **moved), 1e-11)


def test_whitened_tokens_have_mean_0_and_variance_1() -> None:
    once = advantages("return_to_go(), whiten_tokens(1, 0.0)", reward_N=_random_rewards())
    values = once[SAMPLE.streams["mask_NT"]]
    assert abs(float(values.mean())) < 1e-12
    assert float(values.var()) == pytest.approx(1.0, abs=1e-12)


def _random_rewards() -> Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_cross_prompt_baselines_end_at_the_group_and_at_the_batch() -> None:
    equal(advantages("group_mean()"), advantages("group_and_batch_mean(mix=0.0)"))
    reward_N = SAMPLE.streams["reward_N"]
    batch_mean = SAMPLE.streams["mask_NT"] * (reward_N - reward_N.mean())[:, None]
    equal(batch_mean, advantages("group_and_batch_mean(mix=1.0)"))


def test_kl_to_go_outside_the_baseline_is_kl_per_token_in_the_return() -> None:
    made = composed(advantage="return_to_go()", shaping="kl_per_token(0.2)")
    inside = batch_phase(made, SAMPLE.build()).batch.stream("advantage_NT")
    equal(inside, advantages("raw(), minus_kl_to_go(0.2, 1e6)"))


def test_reweighting_goes_from_nothing_to_the_old_probability() -> None:
    plain = advantages("group_mean()")
    equal(plain, advantages("group_mean(), reweight_by_probability(0.0)"))
    weighted = plain * _masked("old_logp_NT").exp()
    equal(weighted, advantages("group_mean(), reweight_by_probability(1.0)"))


# --- ratios, gates, corrections ----------------------------------------------------------------


ON_POLICY_GATES = (
    "clip(0.2, 0.28)", "dual_clip()", "dynamic_clip()", "unclipped()", "weight_cap(cap=2.0)",
    "soft(1.0, 1.05)", "soft(3.0, 0.5)", "tv_mask()", "kl_mask()",
)  # fmt: skip


@pytest.mark.parametrize("gate", ON_POLICY_GATES)
def test_on_policy_every_gate_has_the_gradient_of_the_score(gate: str) -> None:
    anchor = "sampler" if "mask" in gate else "old"
    made = composed(gate=gate, ratio=f"token(anchor={anchor!r})")
    plain = composed(gate="score()", ratio="on_policy()")
    same = learner_logp(SAMPLE)
    got = probe_sample(made, SAMPLE, old_logp_NT=same, sampler_logp_NT=same)
    equal(probe_sample(plain, SAMPLE).grad_NT, got.grad_NT)
    assert not got.result.clipped_NT.any()


def test_without_old_log_probabilities_the_policy_is_its_own_anchor() -> None:
    own = probe_sample(composed(), SAMPLE, old_logp_NT=None)
    given = probe_sample(composed(), SAMPLE, old_logp_NT=learner_logp(SAMPLE))
    assert_same(given, own, tolerance=0.0)
    assert not own.result.log_ratio_NT.any()


def test_the_soft_gate_at_ratio_1_has_value_2A_over_tau() -> None:
    made = composed(gate="soft(2.0, 0.5)")
    got = probe_sample(made, SAMPLE, old_logp_NT=learner_logp(SAMPLE))
    A_NT = got.advantage_NT
    equal(got.result.objective_NT, 2 * A_NT / torch.where(A_NT > 0, 2.0, 0.5))


def test_dual_clip_with_a_huge_bound_is_clip() -> None:
    plain = probe_sample(composed(gate="clip(0.1, 0.2)"), SAMPLE)
    assert_same(plain, probe_sample(composed(gate="dual_clip(0.1, 0.2, 1e9)"), SAMPLE))
    bounded = probe_sample(composed(gate="dual_clip(0.1, 0.2, 1.3)"), SAMPLE)
    assert abs(bounded.loss - plain.loss) > 1e-6


def test_dynamic_bounds_solve_their_equation() -> None:
    q = torch.tensor([0.9, 0.7, 0.65], dtype=torch.float64)
    low, high = dynamic_bounds(q, 0.16, 0.2, 10.0)
    torch.testing.assert_close((1 - low) * low * q, torch.full_like(q, 0.16), rtol=0, atol=1e-14)
    torch.testing.assert_close((high - 1) * high * q, torch.full_like(q, 0.2), rtol=0, atol=1e-14)


SPLIT = {
    "one segment per token": (torch.arange(6).expand(12, 6), "token()"),
    "one segment per answer": (torch.full((12, 6), 3), "sequence_geomean()"),
}


@pytest.mark.parametrize("name", SPLIT)
def test_segments_lie_between_token_and_sequence(name: str) -> None:
    segment_NT, ratio = SPLIT[name]
    segments = altered("sspo", gate="clip(0.05, 0.05)")
    limit = composed(gate="clip(0.05, 0.05)", ratio=ratio, aggregation="seq_mean_token_mean()")
    assert_same(probe_sample(limit, SAMPLE), probe_sample(segments, SAMPLE, segment_NT=segment_NT))


@pytest.mark.parametrize(
    "ratio", ["sequence_geomean()", "sequence_product()", "geomean_token_grad()"]
)
def test_on_one_token_every_ratio_is_the_token_ratio(ratio: str) -> None:
    sample = random_sample(3, width=1, spread=0.6)
    plain = probe_sample(composed(gate="clip(0.1, 0.1)"), sample)
    made = composed(gate="clip(0.1, 0.1)", ratio=ratio)
    assert_same(plain, probe_sample(made, sample))


CORRECTIONS = ("tis_token()", "tis_sequence()", "icepop()", "mis_sequence()", "mis_geometric()",
               "mask_sequence()", "replay_routing()", "tis_token(), mask_sequence()")  # fmt: skip


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_is_1_when_the_engines_agree(correction: str) -> None:
    agree = {"sampler_logp_NT": SAMPLE.streams["old_logp_NT"]}
    got = probe_sample(composed(correction=correction), SAMPLE, **agree)
    assert got.result.weight_NT is not None and (got.result.weight_NT == 1.0).all()
    assert_same(probe_sample(composed(), SAMPLE), got, tolerance=0.0)


WIDE = {
    "icepop(0.0, 1e9)": "tis_token(1e9)",
    "mis_geometric(0.0, 1e9)": "tis_token(1e9)",
    "mis_sequence(high=1e9)": "tis_sequence(1e9)",
}


@pytest.mark.parametrize("masked", WIDE)
def test_a_mask_that_drops_nothing_is_an_uncapped_weight(masked: str) -> None:
    capped = probe_sample(composed(correction=WIDE[masked]), SAMPLE)
    assert_same(capped, probe_sample(composed(correction=masked), SAMPLE))
    assert abs(capped.loss - probe_sample(composed(), SAMPLE).loss) > 1e-6


def test_the_old_anchor_with_an_uncapped_weight_is_the_sampler_anchor() -> None:
    shared = {"gate": "unclipped()"}
    two = composed(ratio="token('old')", correction="tis_token(1e9)", **shared)
    one = composed(ratio="token('sampler')", **shared)
    assert_same(probe_sample(one, SAMPLE), probe_sample(two, SAMPLE))


# --- aggregation and penalties -----------------------------------------------------------------


def test_aggregations_differ_by_the_factors_they_are_named_for() -> None:
    total, rows = int(SAMPLE.streams["mask_NT"].sum()), SAMPLE.rows
    mean = coefficients("seq_mean_token_mean()")
    equal(rows * mean, coefficients("seq_sum_token_mean()"))
    equal(coefficients("seq_mean_token_sum()") / 7, coefficients("seq_mean_token_sum_norm(7)"))
    equal(total * coefficients("token_mean_batch()"), coefficients("token_sum()"))
    for text in ("token_mean_batch()", "token_mean_group()", "seq_mean_token_mean()"):
        assert float(coefficients(text).sum()) == pytest.approx(1.0, abs=1e-12)


def test_with_one_group_both_token_means_agree() -> None:
    one = {"group_N": torch.zeros(SAMPLE.rows, dtype=torch.long)}
    over_batch = probe_sample(composed(), SAMPLE, **one)
    made = composed(aggregation="token_mean_group()")
    assert_same(over_batch, probe_sample(made, SAMPLE, **one))


def test_answers_of_one_length_make_token_and_sequence_means_agree() -> None:
    full = {"mask_NT": torch.ones_like(SAMPLE.streams["mask_NT"])}
    over_tokens = probe_sample(composed(), SAMPLE, **full)
    made = composed(aggregation="seq_mean_token_mean()")
    assert_same(over_tokens, probe_sample(made, SAMPLE, **full))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3+"])
def test_kl_to_itself_is_0_with_no_gradient_but_k1s(estimator: str) -> None:
    itself = {"ref_logp_NT": learner_logp(SAMPLE)}
    with_kl = probe_sample(composed(penalty=f"kl(0.5, {estimator!r})"), SAMPLE, **itself)
    without = probe_sample(composed(), SAMPLE)
    assert with_kl.loss == without.loss
    slope = 0.5 if estimator == "k1" else 0.0
    equal(without.grad_NT + slope * without.u_NT, with_kl.grad_NT)


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2() -> None:
    k2, k3, plus = (
        probe_sample(composed(penalty=f"kl(0.5, {name!r})"), SAMPLE) for name in ("k2", "k3", "k3+")
    )
    assert plus.loss == pytest.approx(k3.loss, abs=1e-13) and abs(k2.loss - k3.loss) > 1e-6
    equal(k2.grad_NT, plus.grad_NT)


def test_kl_as_a_sequence_mean_is_the_penalty_under_that_aggregation() -> None:
    shared = {"aggregation": "seq_mean_token_mean()"}
    penalty = probe_sample(composed(penalty="kl(0.3, 'k3')", **shared), SAMPLE)
    term = composed(auxiliary="kl_sequence_mean(0.3, 'k3')", **shared)
    assert_same(penalty, probe_sample(term, SAMPLE))


def test_drift_is_twice_k2_to_the_sampler() -> None:
    sampler = {"ref_logp_NT": SAMPLE.streams["sampler_logp_NT"]}
    k2 = probe_sample(composed(penalty="kl(0.2, 'k2')"), SAMPLE, **sampler)
    assert_same(k2, probe_sample(composed(penalty="drift(0.1)"), SAMPLE, **sampler))


def test_importance_weighted_kl_on_policy_has_the_value_of_k3() -> None:
    same = {"old_logp_NT": learner_logp(SAMPLE)}
    plain = probe_sample(composed(penalty="kl(0.3, 'k3')"), SAMPLE, **same)
    weighted = probe_sample(composed(penalty="kl_importance(0.3)"), SAMPLE, **same)
    assert weighted.loss == pytest.approx(plain.loss, abs=1e-13)
    x_NT = learner_logp(SAMPLE) - SAMPLE.streams["ref_logp_NT"]
    score_NT = torch.where(SAMPLE.streams["mask_NT"], (-x_NT).exp() + x_NT - 1, 0.0)
    equal(plain.grad_NT + 0.3 * plain.u_NT * score_NT, weighted.grad_NT)
