"""Gradients against formulas written by hand: ∂L/∂ℓ = −u·w·c·A + β·u·k′, and what has none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from batches import (
    POLICY_RECIPES,
    Sample,
    learner_outputs,
    leaves,
    loss_and_gradients,
    random_sample,
)
from probe import Probe, altered, composed, learner_logp, probe, probe_sample
from torch import Tensor

from groupwise import Recipe, TokenBatch, batch_phase, recipe, token_phase

SAMPLE = random_sample(5, groups=(4, 4, 4), spread=0.8)
MASK_NT: Tensor = SAMPLE.streams["mask_NT"]
ROWS, WIDTH = MASK_NT.shape
LENGTH = MASK_NT.sum(1).tolist()
TOKENS = [(i, t) for i in range(ROWS) for t in range(WIDTH) if MASK_NT[i, t]]
MEAN = {"aggregation": "seq_mean_token_mean()"}
U = [1 / (ROWS * n) for n in LENGTH]


def stream(name: str) -> list[list[float]]:
    return SAMPLE.streams[name].tolist()


LOGP, OLD = learner_logp(SAMPLE).tolist(), stream("old_logp_NT")
SAMPLER, REF = stream("sampler_logp_NT"), stream("ref_logp_NT")


def zeros() -> list[list[float]]:
    return [[0.0] * WIDTH for _ in range(ROWS)]


def equal(got: Tensor, want: Any, tolerance: float = 1e-12) -> None:
    want = torch.as_tensor(want, dtype=torch.float64)
    assert want.abs().max() > 1e-6, "nothing to compare"
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def constant_advantages() -> list[float]:
    """The z-scores that every test here uses, one per row, some of each sign."""
    A_N = probe_sample(composed(**MEAN), SAMPLE).advantage_NT[:, 0].tolist()
    assert min(A_N) < 0 < max(A_N)
    return A_N


A = constant_advantages()


# --- gates per token ---------------------------------------------------------------------------


@dataclass
class Token:
    """What a gate may look at: r to the anchor, A, and three probabilities of the token."""

    r: float
    A: float
    old: float
    mu: float
    pi: float


def ppo(x: Token, low: float, high: float, bound: float = math.inf) -> float:
    dead = (x.A > 0 and x.r > high) or (x.A < 0 and (x.r < low or x.r > bound))
    return 0.0 if dead else x.r


def dynamic(x: Token) -> float:
    low = 0.5 + 0.5 * math.sqrt(max(1 - 4 * 0.16 / x.old, 0))
    high = min(0.5 + 0.5 * math.sqrt(1 + 4 * 0.2 / x.old), 2.0)
    return ppo(x, low, high, 1.9)


def sech2(x: Token) -> float:
    tau = 1.5 if x.A > 0 else 2.5
    return x.r / math.cosh(tau * (x.r - 1) / 2) ** 2


def outward(x: Token) -> bool:
    return (x.A > 0 and x.pi > x.mu) or (x.A < 0 and x.pi < x.mu)


def tv(x: Token) -> float:
    return 0.0 if outward(x) and abs(x.pi - x.mu) > 0.05 else min(x.r, 1.3)


def kl2(x: Token) -> float:
    kl = x.mu * math.log(x.mu / x.pi) + (1 - x.mu) * math.log((1 - x.mu) / (1 - x.pi))
    return 0.0 if outward(x) and kl > 0.01 else min(x.r, 1.3)


GATES: dict[str, Callable[[Token], float]] = {
    "score()": lambda x: 1.0,
    "unclipped()": lambda x: x.r,
    "clip(0.1, 0.3)": lambda x: ppo(x, 0.9, 1.3),
    "dual_clip(0.1, 0.3, 1.4)": lambda x: ppo(x, 0.9, 1.3, 1.4),
    "dynamic_clip(0.16, 0.2, 2.0, 1.9)": dynamic,
    "weight_cap(cap=1.2, floor=0.7)": lambda x: min(max(x.r, 0.7), 1.2),
    "soft(1.5, 2.5)": sech2,
    "tv_mask(0.05, 1.3)": tv,
    "kl_mask(0.01, 1.3)": kl2,
}
CLIPPING = [text for text in GATES if text.split("(")[0] not in ("score", "unclipped", "soft")]


def gated(gate: str) -> Probe:
    anchor = "sampler" if "mask" in gate else "old"
    ratio = "on_policy()" if gate == "score()" else f"token({anchor!r})"
    return probe_sample(composed(gate=gate, ratio=ratio, **MEAN), SAMPLE)


def token_at(gate: str, i: int, t: int) -> Token:
    anchor = SAMPLER if "mask" in gate else OLD
    probabilities = (math.exp(x[i][t]) for x in (OLD, SAMPLER, LOGP))
    return Token(math.exp(LOGP[i][t] - anchor[i][t]), A[i], *probabilities)


@pytest.mark.parametrize("gate", GATES)
def test_gradient_of_a_gate_is_minus_u_c_A(gate: str) -> None:
    want = zeros()
    for i, t in TOKENS:
        want[i][t] = -U[i] * GATES[gate](token_at(gate, i, t)) * A[i]
    equal(gated(gate).grad_NT, want)


@pytest.mark.parametrize("gate", CLIPPING)
def test_gates_act_on_some_tokens_and_leave_others(gate: str) -> None:
    acted = {GATES[gate](x) != x.r for x in (token_at(gate, i, t) for i, t in TOKENS)}
    assert acted == {True, False}


@pytest.mark.parametrize("gate", [g for g in GATES if g.split("(")[0] != "weight_cap"])
def test_clipped_says_where_the_gradient_is_gone_and_on_which_side(gate: str) -> None:
    result = gated(gate).result
    above = below = 0
    for i, t in TOKENS:
        x = token_at(gate, i, t)
        dead = GATES[gate](x) == 0.0
        assert bool(result.clipped_NT[i, t]) == dead
        above, below = above + (dead and x.r > 1), below + (dead and x.r < 1)
    assert not result.clipped_NT[~MASK_NT].any()
    shares = result.tally.read()
    assert shares["clip/high"] == pytest.approx(above / len(TOKENS), abs=1e-15)
    assert shares["clip/low"] == pytest.approx(below / len(TOKENS), abs=1e-15)


def test_an_advantage_of_0_is_never_clipped_and_has_no_gradient() -> None:
    same_N = torch.ones(ROWS, dtype=torch.float64)
    for gate in ("clip(0.0, 0.0)", "dual_clip(0.0, 0.0, 1.001)", "geometric_clip(1e-6)"):
        got = probe_sample(composed(gate=gate, **MEAN), SAMPLE, reward_N=same_N)
        assert not got.result.clipped_NT.any() and not got.grad_NT.any() and got.loss == 0.0


# --- gates per answer and per segment ------------------------------------------------------------


def test_gradient_of_the_geometric_clip() -> None:
    limit, want, dead = 0.25, zeros(), 0
    got = probe_sample(composed(gate=f"geometric_clip({limit})", **MEAN), SAMPLE)
    for i in range(ROWS):
        d = [LOGP[i][t] - OLD[i][t] for t in range(LENGTH[i])]
        live = [x <= limit if A[i] > 0 else x >= -limit for x in d]
        e = [min(x, limit) if A[i] > 0 else max(x, -limit) for x in d]
        weight = math.exp(sum(e) / len(e))
        for t, alive in enumerate(live):
            want[i][t] = -weight * A[i] / (ROWS * len(d)) * alive
            dead += not alive
    assert 0 < dead < len(TOKENS)
    equal(got.grad_NT, want)


def segments(i: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for t in range(LENGTH[i]):
        found.setdefault(int(SAMPLE.streams["segment_NT"][i, t]), []).append(t)
    return found


def test_gradient_of_the_segment_clip() -> None:
    made = composed(gate="segment_clip(constant(0.1, 0.15))", ratio="segment_geomean()", **MEAN)
    want, dead = zeros(), 0
    for i in range(ROWS):
        for places in segments(i).values():
            s = math.exp(sum(LOGP[i][t] - OLD[i][t] for t in places) / len(places))
            c = ppo(Token(s, A[i], 0, 0, 0), 0.9, 1.15)
            dead += c == 0
            for t in places:
                want[i][t] = -c * A[i] / (LENGTH[i] * ROWS)
    assert dead > 0
    equal(probe_sample(made, SAMPLE).grad_NT, want)


def test_gradient_of_gspo_is_the_same_on_every_token_of_a_live_answer() -> None:
    made, want, dead = altered("gspo", gate="clip(0.05, 0.08)"), zeros(), 0
    for i in range(ROWS):
        s = math.exp(sum(LOGP[i][t] - OLD[i][t] for t in range(LENGTH[i])) / LENGTH[i])
        c = ppo(Token(s, A[i], 0, 0, 0), 0.95, 1.08)
        dead += c == 0
        for t in range(LENGTH[i]):
            want[i][t] = -c * A[i] / (LENGTH[i] * ROWS)
    assert 0 < dead < ROWS
    equal(probe_sample(made, SAMPLE).grad_NT, want)


# --- ratios --------------------------------------------------------------------------------------


def jacobian(ratio: str, i: int) -> list[list[float]]:
    """∂r_t/∂ℓ_s of one row."""
    n = LENGTH[i]
    d = [LOGP[i][t] - OLD[i][t] for t in range(n)]
    mean, total = math.exp(sum(d) / n), math.exp(sum(d))
    own = [[1.0 if s == t else 0.0 for s in range(n)] for t in range(n)]
    if ratio == "token()":
        return [[math.exp(d[t]) * own[t][s] for s in range(n)] for t in range(n)]
    if ratio == "sequence_geomean()":
        return [[mean / n] * n for _ in range(n)]
    if ratio == "sequence_product()":
        return [[total] * n for _ in range(n)]
    if ratio == "geomean_token_grad()":
        return [[mean * own[t][s] for s in range(n)] for t in range(n)]
    if ratio == "segment_geomean()":
        found = [[0.0] * n for _ in range(n)]
        for places in segments(i).values():
            s_k = math.exp(sum(d[t] for t in places) / len(places))
            for t in places:
                for s in places:
                    found[t][s] = s_k / len(places)
        return found
    old, new = SAMPLE.streams["old_router_NTLK"][i], SAMPLE.router_NTLK[i]
    drift = [float((new[t].log() - old[t].log()).abs().mean()) for t in range(n)]
    return [
        [max(math.exp(-drift[t]), 0.8) * math.exp(d[t]) * own[t][s] for s in range(n)]
        for t in range(n)
    ]


RATIOS = ("token()", "sequence_geomean()", "sequence_product()", "geomean_token_grad()",
          "segment_geomean()", "router_shift(0.8)")  # fmt: skip


@pytest.mark.parametrize("ratio", RATIOS)
def test_gradient_of_a_ratio_is_its_jacobian(ratio: str) -> None:
    made = composed(gate="unclipped()", ratio=ratio, **MEAN)
    router = {"router_NTLK": SAMPLE.router_NTLK} if "router" in ratio else {}
    got = probe(made, SAMPLE.build(), learner_logp(SAMPLE), **router)
    want = zeros()
    for i in range(ROWS):
        slopes = jacobian(ratio, i)
        for s in range(LENGTH[i]):
            want[i][s] = -U[i] * A[i] * sum(slopes[t][s] for t in range(LENGTH[i]))
    equal(got.grad_NT, want)


def test_a_token_varying_advantage_reaches_other_tokens_only_through_a_shared_ratio() -> None:
    A_NT = torch.randn(MASK_NT.shape, generator=torch.Generator().manual_seed(0)).double()
    for ratio in ("geomean_token_grad()", "sequence_geomean()"):
        made = composed(gate="unclipped()", ratio=ratio, **MEAN)
        done = replace(
            batch_phase(made, SAMPLE.build()).batch, advantage_NT=torch.where(MASK_NT, A_NT, 0.0)
        )
        leaf = learner_logp(SAMPLE).requires_grad_()
        (grad,) = torch.autograd.grad(token_phase(made, done, logp_NT=leaf).loss, leaf)
        want = zeros()
        for i in range(ROWS):
            n = LENGTH[i]
            s = math.exp(sum(LOGP[i][t] - OLD[i][t] for t in range(n)) / n)
            mean = float(A_NT[i, :n].mean())
            for t in range(n):
                own = float(A_NT[i, t]) if ratio == "geomean_token_grad()" else mean
                want[i][t] = -U[i] * s * own
        equal(grad, want)


def test_beyond_log_ratio_20_the_value_is_held_and_the_gradient_is_0() -> None:
    def one(d: float) -> Probe:
        batch = TokenBatch.build(
            mask_NT=torch.ones(2, 1, dtype=torch.bool),
            group_N=[0, 0],
            reward_N=torch.tensor([1.0, -1.0], dtype=torch.float64),
            old_logp_NT=torch.full((2, 1), -50.0, dtype=torch.float64),
        )
        made = composed(advantage="raw()", gate="unclipped()", aggregation="token_sum()")
        return probe(made, batch, torch.full((2, 1), d - 50.0, dtype=torch.float64))

    assert float(one(19.0).grad_NT[0]) == pytest.approx(-math.exp(19.0), rel=1e-12)
    for d in (21.0, -21.0):
        assert not one(d).grad_NT.any()
        want = math.exp(math.copysign(20.0, d))
        assert float(one(d).result.objective_NT[0]) == pytest.approx(want, rel=1e-12)


# --- corrections ---------------------------------------------------------------------------------


def weights(correction: str, i: int) -> list[float]:
    n = LENGTH[i]
    log_rho = [OLD[i][t] - SAMPLER[i][t] for t in range(n)]
    rho, product = [math.exp(x) for x in log_rho], math.exp(sum(log_rho))
    mean = math.exp(sum(log_rho) / n)
    table = {
        "tis_token(1.1)": [min(x, 1.1) for x in rho],
        "tis_sequence(1.1)": [min(product, 1.1)] * n,
        "icepop(0.9, 1.1)": [x if 0.9 <= x <= 1.1 else 0.0 for x in rho],
        "mis_sequence(low=0.8, high=1.1)": [product if 0.8 <= product <= 1.1 else 0.0] * n,
        "mis_geometric(0.95, 1.05)": [x if 0.95 <= mean <= 1.05 else 0.0 for x in rho],
        "mask_sequence(0.8, 1.1)": [1.0 if 0.8 <= product <= 1.1 else 0.0] * n,
    }
    return table[correction]


CORRECTIONS = (
    "tis_token(1.1)",
    "tis_sequence(1.1)",
    "icepop(0.9, 1.1)",
    "mis_sequence(low=0.8, high=1.1)",
    "mis_geometric(0.95, 1.05)",
    "mask_sequence(0.8, 1.1)",
)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_multiplies_the_gradient_and_not_the_kl(correction: str) -> None:
    made = composed(gate="clip(0.1, 0.3)", correction=correction, penalty="kl(0.5, 'k2')", **MEAN)
    want, acted = zeros(), 0
    for i in range(ROWS):
        for t, w in enumerate(weights(correction, i)):
            c = ppo(token_at("clip", i, t), 0.9, 1.3)
            want[i][t] = -U[i] * w * c * A[i] + 0.5 * U[i] * (LOGP[i][t] - REF[i][t])
            acted += w in (0.0, 1.1)
    assert 0 < acted < len(TOKENS)
    equal(probe_sample(made, SAMPLE).grad_NT, want)


def test_two_corrections_multiply() -> None:
    made = composed(correction="tis_token(1.1), mask_sequence(0.8, 1.1)", **MEAN)
    weight_NT = probe_sample(made, SAMPLE).result.weight_NT
    assert weight_NT is not None
    for i in range(ROWS):
        pair = zip(weights("tis_token(1.1)", i), weights("mask_sequence(0.8, 1.1)", i), strict=True)
        want = [a * b for a, b in pair]
        assert weight_NT[i, : LENGTH[i]].tolist() == pytest.approx(want, abs=1e-13)


@pytest.mark.parametrize("correction", ["tis_token(1e9)", "tis_sequence(1e9)"])
def test_a_correction_carries_no_gradient_where_the_policy_is_its_own_anchor(
    correction: str,
) -> None:
    made = composed(correction=correction, **MEAN)
    got = probe_sample(made, SAMPLE, old_logp_NT=None)
    want = zeros()
    for i in range(ROWS):
        rho = [math.exp(LOGP[i][t] - SAMPLER[i][t]) for t in range(LENGTH[i])]
        for t in range(LENGTH[i]):
            want[i][t] = -U[i] * A[i] * (rho[t] if "token" in correction else math.prod(rho))
    equal(got.grad_NT, want)


# --- penalties and auxiliary terms ---------------------------------------------------------------

SLOPES: dict[str, Callable[[float], float]] = {
    "k1": lambda x: 1.0,
    "k2": lambda x: x,
    "k3": lambda x: 1 - math.exp(-x),
    "k3+": lambda x: x,
}


def penalty_gradient(penalty: str, **changes: Any) -> Tensor:
    made = composed(penalty=penalty, **MEAN)
    without = probe_sample(composed(**MEAN), SAMPLE, **changes)
    return probe_sample(made, SAMPLE, **changes).grad_NT - without.grad_NT


@pytest.mark.parametrize("estimator", SLOPES)
def test_gradient_of_every_kl_estimator(estimator: str) -> None:
    want = zeros()
    for i, t in TOKENS:
        want[i][t] = 0.7 * U[i] * SLOPES[estimator](LOGP[i][t] - REF[i][t])
    equal(penalty_gradient(f"kl(0.7, {estimator!r})"), want)


def test_gradient_of_k3_beyond_20_is_that_of_its_linear_part() -> None:
    far = {"ref_logp_NT": learner_logp(SAMPLE) + 25.0}
    want = zeros()
    for i, t in TOKENS:
        want[i][t] = 0.7 * U[i]
    equal(penalty_gradient("kl(0.7, 'k3')", **far), want, 1e-12)


def test_gradient_of_importance_weighted_kl() -> None:
    want = zeros()
    for i, t in TOKENS:
        x, r = LOGP[i][t] - REF[i][t], math.exp(LOGP[i][t] - OLD[i][t])
        want[i][t] = 0.7 * U[i] * r * ((math.exp(-x) + x - 1) + (1 - math.exp(-x)))
    equal(penalty_gradient("kl_importance(0.7)"), want)


def test_gradient_of_drift() -> None:
    want = zeros()
    for i, t in TOKENS:
        want[i][t] = 0.7 * U[i] * 2 * (LOGP[i][t] - SAMPLER[i][t])
    equal(penalty_gradient("drift(0.7)"), want)


def logit_gradient(made: Recipe, sample: Sample = SAMPLE) -> Tensor:
    return loss_and_gradients(made, sample)[1][0]


def test_gradient_of_the_entropy_bonus_in_the_logits() -> None:
    got = logit_gradient(composed(penalty="entropy_bonus(0.3)", **MEAN))
    got = got - logit_gradient(composed(**MEAN))
    want = torch.zeros_like(SAMPLE.logits_NTV)
    for i, t in TOKENS:
        p = SAMPLE.logits_NTV[i, t].softmax(-1)
        entropy = -(p * p.log()).sum()
        want[i, t] = 0.3 * U[i] * p * (p.log() + entropy)
    equal(got, want)


def test_gradient_of_the_value_loss_is_0_where_the_clipped_branch_wins() -> None:
    made, limit = altered("ppo", auxiliary="value_loss(limit=0.1, weight=0.5)"), 0.1
    got = loss_and_gradients(made, SAMPLE)[1][1]
    done = batch_phase(made, SAMPLE.build()).batch
    returns = done.prepared["value_loss"]["return_NT"]
    want, dead = zeros(), 0
    for i, t in TOKENS:
        v, old = float(SAMPLE.value_NT[i, t]), float(SAMPLE.streams["old_value_NT"][i, t])
        R = float(returns[i, t])
        near = min(max(v, old - limit), old + limit)
        wins = (near - R) ** 2 > (v - R) ** 2
        dead += wins
        want[i][t] = 0.0 if wins else 0.5 * (v - R) / len(TOKENS)
    assert 0 < dead < len(TOKENS)
    equal(got, want)


def test_gradient_of_the_outcome_cross_entropy() -> None:
    made, beta = recipe("prime"), 0.05
    got = loss_and_gradients(made, SAMPLE)[1][2]
    want = zeros()
    for i in range(ROWS):
        z = sum(beta * (float(SAMPLE.prm_logp_NT[i, t]) - REF[i][t]) for t in range(LENGTH[i]))
        right = float(SAMPLE.streams["correct_N"][i])
        for t in range(LENGTH[i]):
            want[i][t] = beta * (1 / (1 + math.exp(-z)) - right) / ROWS
    equal(got, want)


def test_gradient_of_the_nll_is_on_right_answers_only() -> None:
    made = composed(auxiliary="positive_nll(0.4)", **MEAN)
    got = probe_sample(made, SAMPLE).grad_NT - probe_sample(composed(**MEAN), SAMPLE).grad_NT
    right = SAMPLE.streams["correct_N"].tolist()
    count = sum(n for n, r in zip(LENGTH, right, strict=True) if r)
    want = zeros()
    for i, t in TOKENS:
        want[i][t] = -0.4 / count * right[i]
    assert 0 < count < len(TOKENS)
    equal(got, want)


def test_gradient_in_lambda_is_that_of_the_whole_pipeline() -> None:
    made = recipe("lambda_grpo")

    def loss(exponent: float) -> float:
        given = {"length_exponent": torch.tensor(exponent, dtype=torch.float64)}
        return probe(made, SAMPLE.build(**given), learner_logp(SAMPLE), **given).loss

    h = 1e-5
    numeric = (loss(0.3 + h) - loss(0.3 - h)) / (2 * h)  # the table learner's λ is 0.3
    assert abs(numeric) > 1e-5
    got = float(loss_and_gradients(made, SAMPLE)[1][3])
    assert got == pytest.approx(numeric, abs=1e-9)


# --- gates on more of the distribution -----------------------------------------------------------


def topk_weight(x: Token, mu: Tensor, pi: Tensor, divergence: str) -> float:
    """min(r, 1.3) unless the step leads out and the buckets (top k and the rest) are too far."""
    mu, pi = (torch.cat([p, 1 - p.sum(0, keepdim=True)]) for p in (mu, pi))
    tv, kl = 0.5 * (mu - pi).abs().sum(), (mu * (mu / pi).log()).sum()
    far = float(tv) > 0.08 if divergence == "tv" else float(kl) > 0.02
    return 0.0 if outward(x) and far else min(x.r, 1.3)


def topk_gradient(text: str) -> Tensor:
    """d loss / d logp, with the learner's log-probabilities at the sampler's top tokens given."""
    made = composed(gate=text, ratio="token('sampler')", **MEAN)
    ids = SAMPLE.streams["sampler_topk_id_NTK"]
    at_top = SAMPLE.logits_NTV.log_softmax(-1).gather(-1, ids)
    built = SAMPLE.build()
    return probe(made, built, learner_logp(SAMPLE), logp_at_sampler_topk_NTK=at_top).grad_NT


def topk_expected(divergence: str, k: int) -> list[list[float]]:
    ids = SAMPLE.streams["sampler_topk_id_NTK"]
    mu = SAMPLE.streams["sampler_topk_logp_NTK"].exp()
    pi = SAMPLE.logits_NTV.softmax(-1).gather(-1, ids)
    want = zeros()
    for i, t in TOKENS:
        x = token_at("mask", i, t)
        want[i][t] = -U[i] * A[i] * topk_weight(x, mu[i, t, :k], pi[i, t, :k], divergence)
    return want


@pytest.mark.parametrize(("divergence", "delta"), [("tv", 0.08), ("kl", 0.02)])
def test_gradient_of_the_topk_mask(divergence: str, delta: float) -> None:
    want = topk_expected(divergence, 3)
    assert 0 < sum(want[i][t] == 0 for i, t in TOKENS) < len(TOKENS)
    equal(topk_gradient(f"topk_mask({delta}, 3, {divergence!r}, 'top', 1.3)"), want)


def test_the_topk_mask_looks_at_its_k_tokens_only() -> None:
    want = topk_expected("tv", 1)
    assert want != topk_expected("tv", 3)
    equal(topk_gradient("topk_mask(0.08, 1, 'tv', 'top', 1.3)"), want)


def test_gradient_of_topk_smoothing_in_the_logits() -> None:
    alpha, k, top1, quantile = 0.4, 2, 1.5, 0.5
    made = composed(gate=f"topk_smoothing({alpha}, {k}, {quantile}, {top1}, 0.2, 0.3)", **MEAN)
    sample = random_sample(1, groups=(20, 20, 20), spread=0.8)
    base = probe_sample(composed(**MEAN), sample)
    A_NT, u_NT = base.advantage_NT, base.u_NT
    d_NT = learner_logp(sample) - sample.streams["old_logp_NT"]
    p_NTV = sample.logits_NTV.softmax(-1)
    H_NT = -(p_NTV * p_NTV.log()).sum(-1)
    want, seen = torch.zeros_like(sample.logits_NTV), {"spread": 0, "harder": 0, "plain": 0}
    for i, t in sample.streams["mask_NT"].nonzero().tolist():
        p, y, n = p_NTV[i, t], int(sample.streams["token_NT"][i, t]), int((u_NT[i] > 0).sum())
        forking = float(H_NT[i, t]) > float(H_NT[i, :n].quantile(quantile))
        top = p.topk(k).indices.tolist()
        direction, a, name = -p.clone(), float(A_NT[i, t]), "plain"
        direction[y] += 1
        if forking and a > 0:
            direction, name = (1 - alpha) * direction, "spread"
            for v in top:
                direction = direction - alpha / k * p
                direction[v] += alpha / k
        elif forking and a < 0 and y == top[0]:
            a, name = top1 * a, "harder"
        seen[name] += 1
        x = Token(math.exp(float(d_NT[i, t])), a, 0, 0, 0)
        want[i, t] = -u_NT[i, t] * ppo(x, 0.8, 1.3) * a * direction
    assert all(seen.values()), seen
    equal(logit_gradient(made, sample), want)


# --- finite differences, and what carries no gradient --------------------------------------------


def _has_stop_gradient(name: str) -> bool:
    made = recipe(name)
    estimators = {slot.get("estimator") for slot in (*made.penalty, *made.auxiliary)}
    gates = (
        "weight_cap",
        "gamma_weight",
        "band_mask",
        "taper",
        "score_ring",
        "tv_mask",
        "kl_mask",
        "topk_mask",
        "topk_smoothing",
        "score_by_probability",
    )
    special = made.gate.name in gates or made.ratio.name == "geomean_token_grad"
    special = special or any(slot.name == "weighted_nll" for slot in made.auxiliary)
    return special or "k3+" in estimators


SMOOTH = [name for name in POLICY_RECIPES if not _has_stop_gradient(name)]
SMALL = random_sample(11, groups=(3, 3), width=4, spread=0.4)


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_agree_with_finite_differences(name: str) -> None:
    made = recipe(name)
    leaf = leaves(SMALL)
    extra = {"length_exponent": leaf.exponent} if "lambda" in name else {}
    done = batch_phase(made, SMALL.build(**extra)).batch

    def loss(logits: Tensor, value: Tensor, prm: Tensor) -> Tensor:
        moved = replace(leaf, logits_NTV=logits, value_NT=value, prm_logp_NT=prm)
        total = token_phase(made, done, **learner_outputs(made, SMALL, moved)).loss
        return total + 0.0 * (logits.sum() + value.sum() + prm.sum())  # some recipes read only one

    inputs = tuple(x.detach().requires_grad_() for x in leaf.all()[:3])
    assert torch.autograd.gradcheck(loss, inputs, eps=1e-6, atol=1e-7, rtol=1e-6, fast_mode=True)


STREAMS = ("old_logp_NT", "sampler_logp_NT", "ref_logp_NT", "prm_logp_NT", "old_value_NT")


@pytest.mark.parametrize("name", POLICY_RECIPES)
def test_advantages_and_coefficients_carry_no_gradient(name: str) -> None:
    live = {key: SAMPLE.streams[key].clone().requires_grad_() for key in STREAMS}
    live["reward_N"] = SAMPLE.streams["reward_N"].clone().requires_grad_()
    done = batch_phase(recipe(name), TokenBatch.build(**{**SAMPLE.streams, **live})).batch
    for x in (done.advantage_NT, done.coefficient_NT, done.coefficient_slope_NT):
        assert x is None or not x.requires_grad
    assert not any(x.requires_grad for part in done.prepared.values() for x in part.values())


@pytest.mark.parametrize("key", ["old_logp_NT", "ref_logp_NT"])
def test_an_anchor_is_detached_even_if_it_was_given_with_its_graph(key: str) -> None:
    leaf = learner_logp(SAMPLE).requires_grad_()
    made = composed(penalty="kl(1.0, 'k2')" if "ref" in key else "", **MEAN)
    other = leaf if "old" in key else leaf - 0.5
    done = batch_phase(made, TokenBatch.build(**{**SAMPLE.streams, key: other})).batch
    (got,) = torch.autograd.grad(token_phase(made, done, logp_NT=leaf).loss, leaf)
    want = probe_sample(made, SAMPLE, **{key: other.detach()}).grad_NT
    equal(got, want)


def test_measures_and_terms_carry_no_gradient() -> None:
    result = probe_sample(recipe("grpo"), SAMPLE).result
    assert result.loss.requires_grad
    assert not any(term.requires_grad for term in result.terms.values())
    assert not result.objective_NT.requires_grad and not result.log_ratio_NT.requires_grad
    assert float(sum(result.terms.values())) == pytest.approx(
        float(result.loss.detach()), abs=1e-14
    )
