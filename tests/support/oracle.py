"""Slow reference for the policy-optimization specification, for use in tests only.

``solve(case)`` takes a case in the schema of ``vectors.json`` and returns its outputs. Everything
is a Python loop over rows and tokens and every gradient is derived by hand, so that each line can
be checked against one equation; nothing here is fast and nothing is shared with the package.

Notation: ``u`` aggregation weight (constant within a row), ``w`` detached off-policy weight, ``S``
gated objective, ``A`` advantage, ``k`` KL estimate, ``d`` log-ratio to the anchor policy::

    L = -sum u w S + kl_coef * sum u k + aux
    dL/dlogp = -u coef + kl_coef * u k',    coef = sum_t w_t dS_t/dlogp

Padded positions are never read, because only the positions listed in ``Batch.valid`` are visited.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

Case = dict[str, Any]
Values = Sequence[float]
Grid = Any  # a nested list or an array indexed [row][token]

EXP_LIMIT = 20.0


# --------------------------------------------------------------------------------------------
# Basics
# --------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Which positions count: valid tokens of each row, rows of each prompt, padded width."""

    valid: list[list[int]]
    groups: list[list[int]]
    width: int

    def grid(self) -> np.ndarray:
        """A [B][T] array of zeros."""
        return np.zeros((len(self.valid), self.width))

    def tokens(self) -> Iterable[tuple[int, int]]:
        """All valid (row, token) pairs."""
        return ((i, t) for i, row in enumerate(self.valid) for t in row)


def rows_by_group(group_ids: Sequence[Any] | None, rows: int) -> list[list[int]]:
    """Rows of each prompt in order of first appearance; without ids there is one prompt."""
    groups: dict[Any, list[int]] = {}
    for i in range(rows):
        groups.setdefault(group_ids[i] if group_ids is not None else 0, []).append(i)
    return list(groups.values())


def batch_of(inputs: dict[str, Any]) -> Batch:
    """Read the mask; a truncated row loses its tokens but stays in its group."""
    mask = inputs["mask"]
    truncated = inputs.get("truncated", [0.0] * len(mask))
    valid = [
        [t for t, m in enumerate(row) if m == 1 and not cut]
        for row, cut in zip(mask, truncated, strict=True)
    ]
    return Batch(valid, rows_by_group(inputs.get("group_ids"), len(mask)), len(mask[0]))


def clamped_exp(x: float) -> tuple[float, float]:
    """``exp(clamp(x, -20, 20))`` and its derivative, which is 0 beyond the clamp."""
    value = math.exp(min(max(x, -EXP_LIMIT), EXP_LIMIT))
    return value, value if abs(x) <= EXP_LIMIT else 0.0


def sigmoid(x: float) -> float:
    """Logistic function without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def softplus(x: float) -> float:
    """``log(1 + exp(x))`` without overflow."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def log_softmax(logits: Values) -> np.ndarray:
    """Log-probabilities of one categorical distribution."""
    z = np.array(logits, dtype=float)
    z = z - z.max()
    return z - math.log(sum(math.exp(v) for v in z))


def entropy(logp: np.ndarray) -> float:
    """Entropy of one categorical distribution."""
    return -sum(math.exp(v) * v for v in logp)


def top_indices(values: Values, k: int) -> list[int]:
    """Indices of the k largest values, largest first."""
    return sorted(range(len(values)), key=lambda v: -values[v])[:k]


def quantile(values: Values, q: float) -> float:
    """Quantile with linear interpolation."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def moments(values: Values, ddof: int) -> tuple[float, float]:
    """Mean and standard deviation; equal values have exactly zero spread."""
    if max(values) == min(values):
        return values[0], 0.0
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - ddof))


def ratio_or_zero(numerator: float, denominator: float) -> float:
    """A deviation over its scale, where no deviation is exactly 0 whatever the scale."""
    return numerator / denominator if numerator != 0 else 0.0


def plain(value: Any) -> Any:
    """Turn arrays and numpy scalars into nested lists and floats."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return float(value)


# --------------------------------------------------------------------------------------------
# Advantages
# --------------------------------------------------------------------------------------------


def group_advantage(
    rewards: Values, groups: list[list[int]], scale: str, ddof: int, eps: float
) -> list[float]:
    """``R - mean_group``, divided by 1, by the std of the group or by that of the batch."""
    out = [0.0] * len(rewards)
    batch_std = moments(rewards, ddof)[1]
    for rows in groups:
        mean, group_std = moments([rewards[i] for i in rows], ddof)
        divisor = {"none": 1.0, "group": group_std + eps, "batch": batch_std + eps}[scale]
        for i in rows:
            out[i] = ratio_or_zero(rewards[i] - mean, divisor)
    return out


def leave_one_out(rewards: Values, groups: list[list[int]]) -> list[float]:
    """``R_i`` minus the mean of the other rewards of the group; 0 for a single row."""
    out = [0.0] * len(rewards)
    for rows in groups:
        if max(rewards[i] for i in rows) == min(rewards[i] for i in rows):
            continue
        for i in rows:
            others = [rewards[j] for j in rows if j != i]
            out[i] = rewards[i] - sum(others) / len(others)
    return out


def maxrl_advantage(rewards: Values, groups: list[list[int]], eps: float) -> list[float]:
    """``(R - mean) / mean``; 0 where the mean is 0."""
    out = [0.0] * len(rewards)
    for rows in groups:
        mean = moments([rewards[i] for i in rows], 0)[0]
        for i in rows:
            out[i] = ratio_or_zero(rewards[i] - mean, mean + eps) if mean != 0 else 0.0
    return out


def mixed_rows(rewards: Values, groups: list[list[int]]) -> list[float]:
    """1 for the rows of groups whose rewards are not all equal."""
    keep = [0.0] * len(rewards)
    for rows in groups:
        if max(rewards[i] for i in rows) != min(rewards[i] for i in rows):
            for i in rows:
                keep[i] = 1.0
    return keep


def gpg_scale(rewards: Values, groups: list[list[int]]) -> float:
    """``P / (P - M)`` with M groups of zero variance; 1 if all of them are."""
    keep = mixed_rows(rewards, groups)
    mixed = sum(1 for rows in groups if keep[rows[0]] == 1)
    return len(groups) / mixed if mixed else 1.0


def whiten(values: Grid, batch: Batch, ddof: int, eps_in_var: float) -> np.ndarray:
    """Z-score over all valid tokens of the batch, epsilon inside the root."""
    out = batch.grid()
    flat = [values[i][t] for i, t in batch.tokens()]
    if not flat:
        return out
    mean, std = moments(flat, ddof)
    for i, t in batch.tokens():
        out[i][t] = ratio_or_zero(values[i][t] - mean, math.sqrt(std**2 + eps_in_var))
    return out


def reward_at_end(rewards: Values, batch: Batch) -> np.ndarray:
    """Token rewards that are 0 except the sequence reward at the last valid token."""
    out = batch.grid()
    for i, row in enumerate(batch.valid):
        if row:
            out[i][row[-1]] = rewards[i]
    return out


def discounted_to_go(token_rewards: Grid, batch: Batch, gamma: float) -> np.ndarray:
    """``sum_{s>=t} gamma^(s-t) r_s``."""
    out = batch.grid()
    for i, row in enumerate(batch.valid):
        running = 0.0
        for t in reversed(row):
            running = token_rewards[i][t] + gamma * running
            out[i][t] = running
    return out


def gae(
    token_rewards: Grid, values: Grid, batch: Batch, gamma: float, lam: Values
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns with one lambda per row; the value after the last token is 0."""
    advantages, returns = batch.grid(), batch.grid()
    for i, row in enumerate(batch.valid):
        running, next_value = 0.0, 0.0
        for t in reversed(row):
            delta = token_rewards[i][t] + gamma * next_value - values[i][t]
            running = delta + gamma * lam[i] * running
            next_value = values[i][t]
            advantages[i][t] = running
            returns[i][t] = running + values[i][t]
    return advantages, returns


def length_adaptive_lambda(batch: Batch, alpha: float, bounds: Values) -> list[float]:
    """``clamp(1 - 1/(alpha n), low, high)``."""
    low, high = bounds
    return [
        min(max(1 - 1 / (alpha * len(row)), low), high) if row else float(low)
        for row in batch.valid
    ]


def implicit_process_reward(inputs: dict[str, Any], batch: Batch, beta: float) -> np.ndarray:
    """``beta (logp_prm - logp_ref)``."""
    out = batch.grid()
    for i, t in batch.tokens():
        out[i][t] = beta * (inputs["logp_prm"][i][t] - inputs["logp_ref"][i][t])
    return out


def process_rloo(process: Grid, rewards: Values, batch: Batch, gamma: float) -> np.ndarray:
    """PRIME: leave-one-out of the outcome plus reward-to-go of the centred process reward.

    The process baseline is the mean over the other rows of their per-token average. Rows without
    tokens have no average and are left out of it; with no other row left the process part is 0.
    """
    out = batch.grid()
    outcome = leave_one_out(rewards, batch.groups)
    for rows in batch.groups:
        average = {
            i: sum(process[i][t] for t in batch.valid[i]) / len(batch.valid[i])
            for i in rows
            if batch.valid[i]
        }
        for i in average:
            others = [average[j] for j in average if j != i]
            running = 0.0
            for t in reversed(batch.valid[i]):
                if others:
                    running = process[i][t] - sum(others) / len(others) + gamma * running
                out[i][t] = running + outcome[i]
    return out


def group_process_zscore(
    reward: Grid, is_step: Callable[[int, int], bool], batch: Batch, ddof: int, eps: float
) -> np.ndarray:
    """Sum of the z-scores, over the steps of the group, of the steps that end at or after t."""
    out = batch.grid()
    for rows in batch.groups:
        steps = [(i, t) for i in rows for t in batch.valid[i] if is_step(i, t)]
        if len(rows) == 1 or not steps:
            continue
        mean, std = moments([reward[i][t] for i, t in steps], ddof)
        for i in rows:
            running = 0.0
            for t in reversed(batch.valid[i]):
                if is_step(i, t):
                    running += ratio_or_zero(reward[i][t] - mean, std + eps)
                out[i][t] = running
    return out


def smooth_cumulative(history: Sequence[Values], ddof: int) -> list[list[float]]:
    """DCPO: advantages at each visit of one prompt, from that visit and from all so far."""
    out = []
    for visit in range(1, len(history) + 1):
        seen = history[:visit]
        pooled = [r for rewards in seen for r in rewards]
        mean_all = moments(pooled, 0)[0]
        variance = 0.0
        for rewards in seen:
            mean, std = moments(rewards, ddof)
            variance += len(rewards) / len(pooled) * (std**2 + (mean - mean_all) ** 2)
        mean_new, std_new = moments(history[visit - 1], ddof)
        advantages = []
        for r in history[visit - 1]:
            new = ratio_or_zero(r - mean_new, std_new)
            total = ratio_or_zero(r - mean_all, math.sqrt(variance))
            first = ((visit - 1) * new + total) / visit
            second = (new + (visit - 1) * total) / visit
            advantages.append(first if abs(first) <= abs(second) else second)
        out.append(advantages)
    return out


# --------------------------------------------------------------------------------------------
# KL
# --------------------------------------------------------------------------------------------


def kl_value(estimator: str, x: float) -> float:
    """Per-token estimate from ``x = logp - logp_ref``."""
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x * x / 2
    if estimator in ("k3", "k3+"):
        return clamped_exp(-x)[0] + x - 1
    raise ValueError(f"unknown KL estimator {estimator!r}")


def kl_slope(estimator: str, x: float) -> float:
    """Derivative of the estimate with respect to ``logp``; k3+ borrows that of k2."""
    if estimator == "k1":
        return 1.0
    if estimator in ("k2", "k3+"):
        return x
    if estimator == "k3":
        return 1 - clamped_exp(-x)[1]
    raise ValueError(f"unknown KL estimator {estimator!r}")


class Penalty(NamedTuple):
    """The KL penalty of a case."""

    coef: float
    estimator: str
    placement: str


def penalty_of(params: dict[str, Any], placement: str, loss_estimator: str) -> Penalty:
    """Read the KL options; a penalty in the reward is k1 unless the case says otherwise."""
    placement = params.get("kl_placement", placement)
    estimator = params.get("kl_estimator", "k1" if placement == "reward" else loss_estimator)
    return Penalty(params.get("kl_coef", 0.0), estimator, placement)


def reward_penalty(inputs: dict[str, Any], batch: Batch, penalty: Penalty) -> np.ndarray:
    """Per-token reward penalty, at the old policy and detached; 0 if the KL is in the loss."""
    out = batch.grid()
    if penalty.placement == "reward" and penalty.coef != 0:
        for i, t in batch.tokens():
            x = inputs["logp_old"][i][t] - inputs["logp_ref"][i][t]
            out[i][t] = penalty.coef * kl_value(penalty.estimator, x)
    return out


# --------------------------------------------------------------------------------------------
# Aggregation
# --------------------------------------------------------------------------------------------


def aggregation_weights(agg: str, batch: Batch, norm_len: float | None = None) -> list[float]:
    """Weight ``u`` of each token of a row; rows and groups without tokens do not count."""
    lengths = [len(row) for row in batch.valid]
    total = sum(lengths)
    rows = sum(1 for n in lengths if n)
    group_lengths = {i: sum(lengths[j] for j in g) for g in batch.groups for i in g}
    prompts = sum(1 for g in batch.groups if any(lengths[i] for i in g))
    weights = []
    for i, n in enumerate(lengths):
        if n == 0:
            weights.append(0.0)
        elif agg == "token_mean_batch":
            weights.append(1 / total)
        elif agg == "token_mean_group":
            weights.append(1 / (prompts * group_lengths[i]))
        elif agg == "seq_mean_token_mean":
            weights.append(1 / (rows * n))
        elif agg == "seq_mean_token_sum":
            weights.append(1 / rows)
        elif agg == "seq_mean_token_sum_norm":
            if norm_len is None:
                raise ValueError("seq_mean_token_sum_norm needs norm_len")
            weights.append(1 / (rows * norm_len))
        elif agg == "seq_sum_token_mean":
            weights.append(1 / n)
        else:
            raise ValueError(f"unknown aggregation {agg!r}")
    return weights


def length_weights(
    batch: Batch, lam: float, r: float, ddof: int
) -> tuple[list[float], list[float]]:
    """Lambda-GRPO: ``f = G softmax(h^lam)`` with ``h = 1 + r z``, and ``df/dlam``."""
    weight, slope = [0.0] * len(batch.valid), [0.0] * len(batch.valid)
    for group in batch.groups:
        rows = [i for i in group if batch.valid[i]]
        if not rows:
            continue
        mean, std = moments([len(batch.valid[i]) for i in rows], ddof)
        h = [1 + r * ratio_or_zero(len(batch.valid[i]) - mean, std) for i in rows]
        score = [v**lam for v in h]
        score_slope = [v**lam * math.log(v) for v in h]
        share = [math.exp(v) for v in log_softmax(score)]
        mean_slope = sum(p * q for p, q in zip(share, score_slope, strict=True))
        for k, i in enumerate(rows):
            weight[i] = len(rows) * share[k]
            slope[i] = weight[i] * (score_slope[k] - mean_slope)
    return weight, slope


# --------------------------------------------------------------------------------------------
# Off-policy weight
# --------------------------------------------------------------------------------------------


def offpolicy_weights(
    method: str, params: dict[str, Any], inputs: dict[str, Any], batch: Batch
) -> np.ndarray:
    """Detached weight ``w`` from old training policy over rollout policy."""
    level = params.get("level", "token")
    mode = params.get("mode", "mask" if method in ("icepop", "mis") else "truncate")
    low, high = params.get("C_min", 0.0), params.get("C_max", math.inf)
    out = batch.grid()
    for i, row in enumerate(batch.valid):
        log_rho = {t: inputs["logp_old"][i][t] - inputs["logp_rollout"][i][t] for t in row}
        for t in row:
            rho = clamped_exp(log_rho[t])[0]
            if level == "token":
                weight, tested = rho, rho
            elif level == "sequence_product":
                weight = tested = clamped_exp(sum(log_rho.values()))[0]
            elif level == "geometric_mean_mask_token_weight":
                weight, tested = rho, clamped_exp(sum(log_rho.values()) / len(row))[0]
            else:
                raise ValueError(f"unknown level {level!r}")
            if mode == "truncate":
                out[i][t] = min(weight, params["C"])
            else:
                out[i][t] = weight if low <= tested <= high else 0.0
    return out


# --------------------------------------------------------------------------------------------
# Ratios: value of each token of one row and Jacobian d value_t / d logp_s
# --------------------------------------------------------------------------------------------


class RowRatio(NamedTuple):
    """Ratios of the tokens of one row, their Jacobian, and tokens clipped inside the ratio."""

    value: np.ndarray
    jacobian: np.ndarray
    clipped: np.ndarray


def empty_ratio(width: int) -> RowRatio:
    """All-zero ratios for a row of the given padded width."""
    return RowRatio(np.zeros(width), np.zeros((width, width)), np.zeros(width))


def token_ratio(d: np.ndarray, row: list[int]) -> RowRatio:
    """``exp(d_t)``."""
    out = empty_ratio(len(d))
    for t in row:
        out.value[t], out.jacobian[t][t] = clamped_exp(d[t])
    return out


def segment_ratio(d: np.ndarray, segments: list[list[int]]) -> RowRatio:
    """``exp(mean of d over the segment)``, shared by the tokens of that segment."""
    out = empty_ratio(len(d))
    for segment in segments:
        value, slope = clamped_exp(sum(d[t] for t in segment) / len(segment))
        for t in segment:
            out.value[t] = value
            for s in segment:
                out.jacobian[t][s] = slope / len(segment)
    return out


def sequence_ratio_token_gradient(d: np.ndarray, row: list[int]) -> RowRatio:
    """``sg[s] exp(logp - sg logp)``: the value of the sequence ratio, the gradient of a token."""
    out = empty_ratio(len(d))
    for t in row:
        out.value[t] = clamped_exp(sum(d[s] for s in row) / len(row))[0]
        out.jacobian[t][t] = out.value[t]
    return out


def one_sided_ratio(d: np.ndarray, row: list[int], adv: Values, kappa: float) -> RowRatio:
    """``exp(mean e)`` with ``e = min(d, kappa)`` for A > 0 and ``max(d, -kappa)`` for A < 0."""
    out = empty_ratio(len(d))
    clipped_d = {}
    for t in row:
        dead = (adv[t] > 0 and d[t] > kappa) or (adv[t] < 0 and d[t] < -kappa)
        out.clipped[t] = float(dead)
        clipped_d[t] = math.copysign(kappa, adv[t]) if dead else d[t]
    if row:
        value, slope = clamped_exp(sum(clipped_d.values()) / len(row))
        for t in row:
            out.value[t] = value
            for s in row:
                out.jacobian[t][s] = slope / len(row) if not out.clipped[s] else 0.0
    return out


def router_shift(old: Any, new: Any) -> float:
    """RSPO: ``exp(-mean_layers mean_k |log g_new - log g_old|)`` for one token."""
    per_layer = [
        sum(abs(math.log(n) - math.log(o)) for o, n in zip(lo, ln, strict=True)) / len(lo)
        for lo, ln in zip(old, new, strict=True)
    ]
    return math.exp(-sum(per_layer) / len(per_layer))


# --------------------------------------------------------------------------------------------
# Gates
# --------------------------------------------------------------------------------------------


class Gate(NamedTuple):
    """Objective S, ``dS/dratio``, ``dS/dlogp`` at a fixed ratio, and whether the gate is shut."""

    value: float
    slope: float = 0.0
    direct: float = 0.0
    clipped: bool = False


def clip_gate(r: float, adv: float, low: float, high: float, dual: float = math.inf) -> Gate:
    """``min(rA, clip(r, low, high) A)``, floored at ``dual * A`` for A < 0."""
    value = min(r * adv, min(max(r, low), high) * adv)
    dead = (adv > 0 and r > high) or (adv < 0 and r < low)
    if adv < 0 and r > dual:
        value, dead = max(value, dual * adv), True
    return Gate(value, slope=0.0 if dead else adv, clipped=dead)


def dynamic_bounds(q: float, eps_low: float, eps_high: float, cap: float) -> tuple[float, float]:
    """DCPO: bounds on r that solve ``|(r - 1) r q| <= eps``."""
    low = 0.5 + 0.5 * math.sqrt(max(1 - 4 * eps_low / q, 0.0))
    high = 0.5 + 0.5 * math.sqrt(1 + 4 * eps_high / q)
    return low, min(high, cap)


def soft_gate(r: float, adv: float, tau: float) -> Gate:
    """``(4 / tau) sigmoid(tau (r - 1)) A``."""
    return Gate(4 / tau * sigmoid(tau * (r - 1)) * adv, slope=soft_weight(r, tau) * adv)


def soft_weight(r: float, tau: float) -> float:
    """``4 p (1 - p)`` with ``p = sigmoid(tau (r - 1))``."""
    return 4 * sigmoid(tau * (r - 1)) * sigmoid(-tau * (r - 1))


def score_gate(weight: float, adv: float, logp: float) -> Gate:
    """``sg[weight] A logp``: the gradient passes through the log-probability only."""
    return Gate(weight * adv * logp, direct=weight * adv)


def binary_divergence(form: str, p: float, mu: float) -> float:
    """Divergence between the two-outcome distributions (sampled token, any other)."""
    if form == "tv":
        return abs(p - mu)
    return bucket_kl([mu, 1 - mu], [p, 1 - p])


def bucket_kl(mu: Values, p: Values) -> float:
    """``KL(mu || p)`` over buckets."""
    total = 0.0
    for m, q in zip(mu, p, strict=True):
        if m > 0:
            total += m * math.log(m / q) if q > 0 else math.inf
    return total


def divergence_keep(adv: float, p: float, mu: float, divergence: float, delta: float) -> float:
    """0 where the step leads further out (A and p - mu of one sign) and is already too far."""
    outward = (adv > 0 and p > mu) or (adv < 0 and p < mu)
    return 0.0 if outward and divergence > delta else 1.0


# --------------------------------------------------------------------------------------------
# Policy losses
# --------------------------------------------------------------------------------------------


class Recipe(NamedTuple):
    """The options that compose a method."""

    advantage: str = "group_zscore"
    ratio: str = "token"
    gate: str = "clip"
    agg: str = "token_mean_batch"
    kl_placement: str = "loss"
    kl_in_loss: str = "k3"
    zero_equal_groups: bool = False


SEQ = "seq_mean_token_mean"
SUM = "seq_mean_token_sum"

RECIPES: dict[str, Recipe] = {
    "reinforce": Recipe("none", "none", "score", SUM),
    "rloo": Recipe("leave_one_out", "none", "score", SUM, kl_placement="reward"),
    "remax": Recipe("greedy_baseline", "none", "score", SUM, kl_placement="reward"),
    "gpg": Recipe("gpg", "none", "score", zero_equal_groups=True),
    "ppo": Recipe("gae", kl_placement="reward"),
    "ppo_dual_clip": Recipe(gate="dual"),
    "grpo": Recipe(agg=SEQ),
    "dapo": Recipe(zero_equal_groups=True),
    "dr_grpo": Recipe("group_mean", agg="seq_mean_token_sum_norm"),
    "lite_ppo": Recipe("group_mean_batch_std"),
    "reinforce_pp": Recipe("rtg_global_whiten", kl_placement="reward"),
    "reinforce_pp_baseline": Recipe("group_mean_token_whiten", kl_in_loss="k2"),
    "reinforce_rej": Recipe("none", zero_equal_groups=True),
    "maxrl": Recipe("maxrl"),
    "prime": Recipe("process_rloo"),
    "tis": Recipe(agg=SEQ),
    "icepop": Recipe(agg=SEQ),
    "mis": Recipe(agg=SEQ),
    "olmo3": Recipe("group_mean", zero_equal_groups=True),
    "cispo": Recipe(gate="weight_cap", zero_equal_groups=True),
    "dppo": Recipe(ratio="rollout", gate="divergence_mask"),
    "gspo": Recipe(ratio="sequence", agg=SEQ),
    "gspo_token": Recipe(ratio="sequence_token_gradient", agg=SEQ),
    "gmpo": Recipe(ratio="one_sided", gate="linear", agg=SEQ),
    "rspo": Recipe(ratio="one_sided", gate="linear", agg=SEQ),
    "sspo": Recipe(ratio="segment", agg=SEQ),
    "sapo": Recipe(gate="soft", agg=SEQ),
    "dcpo": Recipe("smooth_cumulative", gate="dynamic", agg="seq_sum_token_mean"),
    "lambda_grpo": Recipe(),
    "advantage_reweighting": Recipe(),
    "lopti": Recipe(),
    "vapo": Recipe("gae_length_adaptive"),
    "simko": Recipe(),
}

CORRECTED = ("tis", "icepop", "mis", "olmo3")


def sequence_advantage(
    advantage: str,
    params: dict[str, Any],
    inputs: dict[str, Any],
    rewards: Values,
    groups: list[list[int]],
) -> list[float]:
    """Advantages with one value per row, from rewards that already hold any KL penalty."""
    ddof, eps = params.get("ddof", 1), params.get("eps", 1e-6)
    if "adv" in params:
        adv = params["adv"]
        scale = adv.get("scale", "group")
        out = group_advantage(rewards, groups, scale, adv.get("ddof", 1), adv.get("eps", 1e-6))
    elif advantage == "none":
        out = list(rewards)
    elif advantage in ("group_mean", "group_mean_token_whiten", "gpg"):
        out = group_advantage(rewards, groups, "none", ddof, eps)
    elif advantage == "group_zscore":
        out = group_advantage(rewards, groups, "group", ddof, eps)
    elif advantage == "group_mean_batch_std":
        out = group_advantage(rewards, groups, "batch", ddof, eps)
    elif advantage == "smooth_cumulative":
        out = group_advantage(rewards, groups, "group", ddof, 0.0)
    elif advantage == "leave_one_out":
        out = leave_one_out(rewards, groups)
    elif advantage == "maxrl":
        out = maxrl_advantage(rewards, groups, params.get("eps", 0.0))
    elif advantage == "greedy_baseline":
        greedy = inputs.get("greedy_rewards", [params.get("greedy_reward", 0.0)] * len(rewards))
        out = [r - g for r, g in zip(rewards, greedy, strict=True)]
    else:
        raise ValueError(f"unknown advantage {advantage!r}")
    if advantage == "gpg":
        scale = params.get("alpha", gpg_scale(inputs["rewards"], groups))
        out = [scale * a / params.get("f_norm", 1.0) for a in out]
    return out


def token_advantage(
    advantage: str, params: dict[str, Any], inputs: dict[str, Any], batch: Batch, penalty: Grid
) -> np.ndarray:
    """Advantages from token rewards, each less its KL penalty."""
    if "token_rewards" in inputs:
        task = inputs["token_rewards"]
    else:
        task = reward_at_end(inputs["rewards"], batch)
    token_rewards = batch.grid()
    for i, t in batch.tokens():
        token_rewards[i][t] = task[i][t] - penalty[i][t]
    gamma = params.get("gamma", 1.0)
    if advantage == "rtg_global_whiten":
        returns = discounted_to_go(token_rewards, batch, gamma)
        return whiten(returns, batch, params.get("ddof", 1), params.get("eps_in_var", 1e-8))
    if advantage == "gae_length_adaptive":
        lam = length_adaptive_lambda(batch, params["alpha"], params.get("clamp", [0, 1]))
        return gae(token_rewards, inputs["values"], batch, gamma, lam)[0]
    lam = [params.get("lam", 0.95)] * len(batch.valid)
    out = gae(token_rewards, inputs["values"], batch, gamma, lam)[0]
    if params.get("whiten", False):
        out = whiten(out, batch, params.get("ddof", 1), params.get("whiten_eps_in_var", 1e-8))
    return out


def broadcast(per_row: Values, batch: Batch) -> np.ndarray:
    """Repeat one value per row over its valid tokens."""
    out = batch.grid()
    for i, t in batch.tokens():
        out[i][t] = per_row[i]
    return out


def shaped_rewards(inputs: dict[str, Any], batch: Batch, penalty: Grid) -> list[float]:
    """Sequence rewards (or summed token rewards) less the KL penalty of their tokens."""
    if "rewards" in inputs:
        rewards = inputs["rewards"]
    else:
        task = inputs["token_rewards"]
        rewards = [sum(task[i][t] for t in row) for i, row in enumerate(batch.valid)]
    return [r - sum(penalty[i][t] for t in batch.valid[i]) for i, r in enumerate(rewards)]


def advantages_of(
    method: str, params: dict[str, Any], inputs: dict[str, Any], batch: Batch, penalty: Penalty
) -> tuple[Any, np.ndarray]:
    """Advantages as reported ([B] or [B][T]) and as used, one per token."""
    recipe = RECIPES[method]
    taken_off = reward_penalty(inputs, batch, penalty)
    reported: Any
    if "advantages" in inputs:
        reported = inputs["advantages"]
        if isinstance(reported[0], Sequence):
            reported = batch.grid()
            for i, t in batch.tokens():
                reported[i][t] = inputs["advantages"][i][t]
    elif "adv" not in params and recipe.advantage in (
        "gae",
        "gae_length_adaptive",
        "rtg_global_whiten",
    ):
        reported = token_advantage(recipe.advantage, params, inputs, batch, taken_off)
    elif "adv" not in params and recipe.advantage == "process_rloo":
        process = implicit_process_reward(inputs, batch, params.get("beta", 0.05))
        rewards = shaped_rewards(inputs, batch, taken_off)
        reported = process_rloo(process, rewards, batch, params.get("gamma", 1.0))
    else:
        rewards = shaped_rewards(inputs, batch, taken_off)
        reported = sequence_advantage(recipe.advantage, params, inputs, rewards, batch.groups)
        if recipe.zero_equal_groups:
            keep = mixed_rows(inputs["rewards"], batch.groups)
            reported = [a if k else 0.0 for a, k in zip(reported, keep, strict=True)]
        if recipe.advantage == "group_mean_token_whiten" and "adv" not in params:
            ddof, eps = params.get("ddof", 1), params.get("eps_in_var", 1e-8)
            reported = whiten(broadcast(reported, batch), batch, ddof, eps)
    used = reported if isinstance(reported, np.ndarray) else broadcast(reported, batch)
    if method in ("advantage_reweighting", "lopti"):
        used = used.copy()
        for i, t in batch.tokens():
            q = math.exp(inputs["logp_old"][i][t])
            if method == "advantage_reweighting":
                used[i][t] *= params["alpha"] * q + (1 - params["alpha"])
            elif not in_pass(q, params):
                used[i][t] = 0.0
        reported = used
    return reported, used


def in_pass(q: float, params: dict[str, Any]) -> bool:
    """Lopti: whether a token of old probability q belongs to this pass."""
    return (q < params.get("eta", 0.5)) == (params["which"] == "low")


def row_ratio(
    method: str,
    params: dict[str, Any],
    inputs: dict[str, Any],
    i: int,
    row: list[int],
    adv: Values,
) -> RowRatio:
    """Ratios of row i against the anchor of the method."""
    kind = RECIPES[method].ratio
    d = np.zeros(len(adv))
    if kind == "none":
        return empty_ratio(len(d))
    anchor = inputs["logp_rollout" if kind == "rollout" else "logp_old"]
    for t in row:
        d[t] = inputs["logp"][i][t] - anchor[i][t]
    if kind in ("token", "rollout"):
        return token_ratio(d, row)
    if kind == "sequence":
        return segment_ratio(d, [row] if row else [])
    if kind == "sequence_token_gradient":
        return sequence_ratio_token_gradient(d, row)
    if kind == "segment":
        ids = inputs["segment_ids"][i]
        names = sorted({ids[t] for t in row})
        return segment_ratio(d, [[t for t in row if ids[t] == name] for name in names])
    if method == "rspo":
        for t in row:
            d[t] += math.log(router_weights(params, inputs, i, t)[1])
    return one_sided_ratio(d, row, adv, params.get("log_clip", 0.4))


def router_weights(
    params: dict[str, Any], inputs: dict[str, Any], i: int, t: int
) -> tuple[float, float]:
    """RSPO: the router shift of a token and the shift floored at ``gamma_min``."""
    shift = router_shift(inputs["router_old_topk"][i][t], inputs["router_new_at_old_topk"][i][t])
    return shift, max(shift, params.get("gamma_min", 0.8))


def token_gate(
    case: Case, r: float, adv: float, i: int, t: int, extra: dict[str, np.ndarray]
) -> Gate:
    """Gate of one token; what the gate computes on the way is written to ``extra``."""
    params, inputs = case["params"], case["inputs"]
    gate = RECIPES[case["method"]].gate
    logp = inputs["logp"][i][t]
    if gate == "score":
        return score_gate(1.0, adv, logp)
    if gate == "linear":
        return Gate(r * adv, slope=adv)
    if gate == "weight_cap":
        return score_gate(max(min(r, params["is_cap"]), params.get("is_floor", 0.0)), adv, logp)
    if gate == "soft":
        tau = params.get("tau_pos", 1.0) if adv > 0 else params.get("tau_neg", 1.05)
        extra["gate_weight"][i][t] = soft_weight(r, tau)
        return soft_gate(r, adv, tau)
    if gate == "divergence_mask":
        form = "kl" if case["axes"].get("clip", "").endswith("kl") else "tv"
        p, mu = math.exp(logp), math.exp(inputs["logp_rollout"][i][t])
        divergence = binary_divergence(form, p, mu)
        keep = divergence_keep(adv, p, mu, divergence, params["delta"])
        extra["keep_mask"][i][t] = keep
        return score_gate(keep * min(r, params["ratio_cap"]), adv, logp)
    if gate == "dynamic":
        q = math.exp(inputs["logp_old"][i][t])
        cap = params.get("ratio_cap", 10.0)
        low, high = dynamic_bounds(q, params["eps_low"], params["eps_high"], cap)
        extra["low"][i][t], extra["high"][i][t] = low, high
        return clip_gate(r, adv, low, high, params.get("dual_clip_c", 10.0))
    dual = params.get("dual_clip_c", 3.0) if gate == "dual" else math.inf
    return clip_gate(r, adv, 1 - params["eps_low"], 1 + params["eps_high"], dual)


GATE_OUTPUTS = {
    "soft": ("gate_weight",),
    "divergence_mask": ("keep_mask",),
    "dynamic": ("low", "high"),
}


def policy_loss(case: Case) -> dict[str, Any]:
    """Loss and gradient of every method that works on log-probabilities of sampled tokens."""
    method, params, inputs = case["method"], case["params"], case["inputs"]
    if method == "simko":
        return simko_loss(case)
    recipe, batch = RECIPES[method], batch_of(inputs)
    penalty = penalty_of(params, recipe.kl_placement, recipe.kl_in_loss)
    reported, adv = advantages_of(method, params, inputs, batch, penalty)

    agg = params.get("agg", recipe.agg)
    u = aggregation_weights(agg, batch, params.get("norm_len"))
    u_slope = [0.0] * len(u)
    out: dict[str, Any] = {"advantages": reported}
    if method == "lambda_grpo":
        factor, slope = length_weights(
            batch, params["lam"], params.get("r", 1 / 9), params.get("ddof_len", 0)
        )
        u_slope = [a * b for a, b in zip(u, slope, strict=True)]
        u = [a * b for a, b in zip(u, factor, strict=True)]
        out["length_weight"] = factor

    w = broadcast([1.0] * len(u), batch)
    if method in CORRECTED:
        w = out["is_weight"] = offpolicy_weights(method, params, inputs, batch)

    ratio, clipped, coef, grad = batch.grid(), batch.grid(), batch.grid(), batch.grid()
    extra = {name: batch.grid() for name in GATE_OUTPUTS.get(recipe.gate, ())}
    row_loss = [0.0] * len(u)
    for i, row in enumerate(batch.valid):
        ratios = row_ratio(method, params, inputs, i, row, adv[i])
        for t in row:
            ratio[i][t] = ratios.value[t]
            gate = token_gate(case, ratios.value[t], adv[i][t], i, t, extra)
            clipped[i][t] = float(gate.clipped or ratios.clipped[t])
            row_loss[i] -= w[i][t] * gate.value
            coef[i][t] += w[i][t] * gate.direct
            for s in row:
                coef[i][s] += w[i][t] * gate.slope * ratios.jacobian[t][s]
        for t in row:
            grad[i][t] = -u[i] * coef[i][t]
            if penalty.placement == "loss" and penalty.coef != 0:
                if method == "lopti" and not in_pass(math.exp(inputs["logp_old"][i][t]), params):
                    continue
                x = inputs["logp"][i][t] - inputs["logp_ref"][i][t]
                row_loss[i] += penalty.coef * kl_value(penalty.estimator, x)
                grad[i][t] += penalty.coef * u[i] * kl_slope(penalty.estimator, x)

    out.update(extra)
    out["coef"] = coef
    out["loss"] = sum(a * b for a, b in zip(u, row_loss, strict=True))
    out["grad_logp"] = grad
    if method == "vapo":
        out["loss"] += add_positive_nll(inputs, batch, params.get("mu", 0.1), grad)
    if method == "lambda_grpo":
        out["grad_lambda"] = sum(a * b for a, b in zip(u_slope, row_loss, strict=True))
    if method == "rloo" and "rewards" in inputs:
        taken_off = reward_penalty(inputs, batch, penalty)
        out["shaped_reward"] = shaped_rewards(inputs, batch, taken_off)
    if method == "rspo":
        out["router_shift"], out["router_weight"] = batch.grid(), batch.grid()
        for i, t in batch.tokens():
            shift, weight = router_weights(params, inputs, i, t)
            out["router_shift"][i][t], out["router_weight"][i][t] = shift, weight
    out.update(ratio_outputs(recipe, batch, ratio, clipped, reported))
    return out


def ratio_outputs(
    recipe: Recipe, batch: Batch, ratio: np.ndarray, clipped: np.ndarray, advantages: Any
) -> dict[str, Any]:
    """Name the ratios and clip flags; those of a sequence are reported once per row."""
    per_row = [ratio[i][row[0]] if row else 0.0 for i, row in enumerate(batch.valid)]
    out: dict[str, Any] = {}
    if recipe.gate in ("clip", "dual", "dynamic", "linear"):
        out["clipped"] = clipped
    if recipe.ratio == "token":
        out["ratio"] = ratio
    elif recipe.ratio == "segment":
        out["segment_ratio"] = ratio
    elif recipe.ratio == "one_sided":
        out["seq_weight"] = per_row
    elif recipe.ratio in ("sequence", "sequence_token_gradient"):
        out["seq_ratio"] = per_row
        if recipe.ratio == "sequence" and not isinstance(advantages, np.ndarray):
            first = [clipped[i][row[0]] if row else 0.0 for i, row in enumerate(batch.valid)]
            out["clipped"] = first
    return out


def add_positive_nll(inputs: dict[str, Any], batch: Batch, mu: float, grad: np.ndarray) -> float:
    """VAPO: ``mu`` times the mean NLL over the tokens of correct rows, added to ``grad`` too."""
    tokens = [(i, t) for i, t in batch.tokens() if inputs["correct"][i]]
    for i, t in tokens:
        grad[i][t] -= mu / len(tokens)
    return -mu * sum(inputs["logp"][i][t] for i, t in tokens) / max(len(tokens), 1)


def simko_loss(case: Case) -> dict[str, Any]:
    """SimKO, whose gradient is with respect to the logits."""
    params, inputs = case["params"], dict(case["inputs"])
    batch, tokens = batch_of(inputs), inputs["tokens"]
    logp_all = {(i, t): log_softmax(inputs["logits"][i][t]) for i, t in batch.tokens()}
    inputs["logp_old"] = batch.grid()
    for i, t in batch.tokens():
        inputs["logp_old"][i][t] = log_softmax(inputs["logits_old"][i][t])[tokens[i][t]]
    recipe = RECIPES["simko"]
    penalty = penalty_of(params, recipe.kl_placement, recipe.kl_in_loss)
    reported, adv = advantages_of("simko", params, inputs, batch, penalty)
    u = aggregation_weights(params.get("agg", recipe.agg), batch, params.get("norm_len"))
    alpha, k = params.get("alpha", 0.01), params.get("K", 3)

    loss, grad = 0.0, np.zeros(np.shape(inputs["logits"]))
    branch, ratio, clipped = batch.grid(), batch.grid(), batch.grid()
    threshold = [0.0] * len(u)
    for i, row in enumerate(batch.valid):
        if row:
            entropies = [entropy(logp_all[i, t]) for t in row]
            threshold[i] = quantile(entropies, params.get("entropy_quantile", 0.8))
        for t in row:
            logp, y, a = logp_all[i, t], tokens[i][t], adv[i][t]
            p = np.exp(logp)
            score = -p  # d logp_y / d logits = onehot(y) - p
            score[y] += 1
            direction = score
            if entropy(logp) > threshold[i]:
                if a > 0:
                    branch[i][t] = 1
                    direction = (1 - alpha) * score
                    for v in top_indices(logp, k):
                        direction = direction - alpha / k * p
                        direction[v] += alpha / k
                elif a < 0 and y == top_indices(logp, 1)[0]:
                    branch[i][t] = 2
                    a = a * params.get("lambda_top1", 1.1)
            ratio[i][t], ratio_slope = clamped_exp(logp[y] - inputs["logp_old"][i][t])
            gate = clip_gate(ratio[i][t], a, 1 - params["eps_low"], 1 + params["eps_high"])
            clipped[i][t] = float(gate.clipped)
            loss -= u[i] * gate.value
            grad[i][t] -= u[i] * gate.slope * ratio_slope * direction
            if penalty.placement == "loss" and penalty.coef != 0:
                x = logp[y] - inputs["logp_ref"][i][t]
                loss += penalty.coef * u[i] * kl_value(penalty.estimator, x)
                grad[i][t] += penalty.coef * u[i] * kl_slope(penalty.estimator, x) * score
    return {
        "advantages": reported,
        "entropy_threshold": threshold,
        "branch": branch,
        "ratio": ratio,
        "clipped": clipped,
        "loss": loss,
        "grad_logits": grad,
    }


# --------------------------------------------------------------------------------------------
# Other kinds
# --------------------------------------------------------------------------------------------


def advantage(case: Case) -> dict[str, Any]:
    """Advantages on their own, with the intermediate values that the vectors list."""
    method, params, inputs = case["method"], case["params"], case["inputs"]
    ddof, eps = params.get("ddof", 1), params.get("eps", 1e-6)
    if method == "dcpo":
        return {"advantages_by_step": smooth_cumulative(inputs["reward_history"], ddof)}
    if method in ("reinforce_pp", "reinforce_pp_baseline", "prime", "prime_seed"):
        return masked_advantage(case)
    if "step_reward_NT" in inputs:
        ends = inputs["step_end_NT"]
        steps = inputs["step_reward_NT"]
        batch = batch_of(inputs)
        value = group_process_zscore(steps, lambda i, t: ends[i][t] == 1, batch, ddof, eps)
        return {"advantages": value}
    rewards, recipe = inputs["rewards"], RECIPES[method]
    groups = rows_by_group(inputs.get("group_ids"), len(rewards))
    value = sequence_advantage(recipe.advantage, params, inputs, rewards, groups)
    if recipe.zero_equal_groups:
        keep = mixed_rows(rewards, groups)
        value = [a if k else 0.0 for a, k in zip(value, keep, strict=True)]
    out: dict[str, Any] = {"advantages": value}
    if method == "gpg":
        out["alpha"] = params.get("alpha", gpg_scale(rewards, groups))
    if method == "rloo":
        size = {i: len(rows) for rows in groups for i in rows}
        out["times_G_minus1_over_G"] = [(size[i] - 1) / size[i] * a for i, a in enumerate(value)]
    return out


def masked_advantage(case: Case) -> dict[str, Any]:
    """Advantages that depend on the token mask."""
    method, params, inputs = case["method"], case["params"], case["inputs"]
    batch, rewards = batch_of(inputs), inputs["rewards"]
    ddof, eps_in_var = params.get("ddof", 1), params.get("eps_in_var", 1e-8)
    if method == "reinforce_pp":
        penalty = penalty_of(params, "reward", "k3")
        token_rewards = reward_at_end(rewards, batch) - reward_penalty(inputs, batch, penalty)
        returns = discounted_to_go(token_rewards, batch, params.get("gamma", 1.0))
        return {
            "token_rewards": token_rewards,
            "returns": returns,
            "advantages": whiten(returns, batch, ddof, eps_in_var),
        }
    if method == "reinforce_pp_baseline":
        centered = group_advantage(rewards, batch.groups, "none", ddof, 0.0)
        whitened = whiten(broadcast(centered, batch), batch, ddof, eps_in_var)
        return {"centered": centered, "advantages": whitened}
    if method == "prime":
        beta = params.get("beta", 0.05)
        process = implicit_process_reward(inputs, batch, beta)
        labels = inputs.get("outcome_labels", rewards)
        loss, grad = prm_loss(process, labels, batch, beta)
        return {
            "process_reward": process,
            "advantages": process_rloo(process, rewards, batch, params.get("gamma", 1.0)),
            "prm_ce_loss": loss,
            "grad_logp_prm": grad,
        }
    ipr, end = batch.grid(), reward_at_end(rewards, batch)
    for i, t in batch.tokens():
        ipr[i][t] = inputs["logp_policy"][i][t] - inputs["logp_ref"][i][t]
    mix = params["mix_gamma"]
    mixed = mix * ipr + (1 - mix) * end
    z_sums = group_process_zscore(mixed, lambda i, t: True, batch, ddof, params.get("eps", 1e-6))
    return {"ipr": ipr, "mixed_reward": mixed, "advantages": z_sums}


def prm_loss(process: Grid, labels: Values, batch: Batch, beta: float) -> tuple[float, np.ndarray]:
    """Cross-entropy of ``sigmoid(sum_t r)`` and its gradient in ``logp_prm``, rows averaged."""
    loss, grad = 0.0, batch.grid()
    rows = [i for i, row in enumerate(batch.valid) if row]
    for i in rows:
        logit = sum(process[i][t] for t in batch.valid[i])
        loss += (softplus(logit) - labels[i] * logit) / len(rows)
        for t in batch.valid[i]:
            grad[i][t] = beta * (sigmoid(logit) - labels[i]) / len(rows)
    return loss, grad


def gae_case(case: Case) -> dict[str, Any]:
    """GAE with a fixed lambda (PPO) or one per row (VAPO)."""
    params, inputs = case["params"], case["inputs"]
    batch, gamma = batch_of(inputs), params.get("gamma", 1.0)
    rewards, values = inputs["token_rewards"], inputs["values"]
    if case["method"] == "vapo":
        lam = length_adaptive_lambda(batch, params["alpha"], params.get("clamp", [0, 1]))
        critic = [params.get("lam_critic", 1.0)] * len(lam)
        return {
            "lam_policy": lam,
            "advantages": gae(rewards, values, batch, gamma, lam)[0],
            "critic_returns": gae(rewards, values, batch, gamma, critic)[1],
        }
    lam = [params.get("lam", 0.95)] * len(batch.valid)
    advantages, returns = gae(rewards, values, batch, gamma, lam)
    ddof, eps_in_var = params.get("ddof", 1), params.get("whiten_eps_in_var", 1e-8)
    return {
        "advantages": advantages,
        "returns": returns,
        "advantages_whitened": whiten(advantages, batch, ddof, eps_in_var),
    }


def value_loss(case: Case) -> dict[str, Any]:
    """``1/2 max((v - R)^2, (clip(v, v_old +- eps) - R)^2)``."""
    params, inputs = case["params"], case["inputs"]
    batch, width = batch_of(inputs), params["cliprange_value"]
    u = aggregation_weights(params.get("agg", "token_mean_batch"), batch, params.get("norm_len"))
    loss, grad, clipped = 0.0, batch.grid(), batch.grid()
    for i, t in batch.tokens():
        new, old, target = (inputs[k][i][t] for k in ("values_new", "values_old", "returns"))
        near = min(max(new, old - width), old + width)
        error, near_error = (new - target) ** 2, (near - target) ** 2
        clipped[i][t] = float(near_error > error)
        loss += u[i] * 0.5 * max(error, near_error)
        grad[i][t] = 0.0 if near_error > error else u[i] * (new - target)
    return {"loss": loss, "grad_values": grad, "clipped": clipped}


def entropy_bonus(case: Case) -> dict[str, Any]:
    """``-coef * mean H`` and its gradient in the logits."""
    params, inputs = case["params"], case["inputs"]
    batch, coef = batch_of(inputs), params["coef"]
    u = aggregation_weights(params.get("agg", "token_mean_batch"), batch, params.get("norm_len"))
    loss, value, grad = 0.0, batch.grid(), np.zeros(np.shape(inputs["logits"]))
    for i, t in batch.tokens():
        logp = log_softmax(inputs["logits"][i][t])
        value[i][t] = entropy(logp)
        loss -= coef * u[i] * value[i][t]
        for v, lp in enumerate(logp):
            grad[i][t][v] = coef * u[i] * math.exp(lp) * (lp + value[i][t])
    return {"entropy": value, "loss": loss, "grad_logits": grad}


def preference_loss(case: Case) -> dict[str, Any]:
    """DPO and SPIN: logistic loss of the reward margin, averaged over pairs."""
    beta, inputs = case["params"]["beta"], case["inputs"]
    names = ("margin", "grad_logp_chosen", "grad_logp_rejected")
    names += ("reward_chosen", "reward_rejected", "chosen_displaced")
    out: dict[str, Any] = {name: [] for name in names}
    loss, pairs = 0.0, len(inputs["logp_chosen"])
    for n in range(pairs):
        chosen, chosen_ref = inputs["logp_chosen"][n], inputs["ref_logp_chosen"][n]
        rejected, rejected_ref = inputs["logp_rejected"][n], inputs["ref_logp_rejected"][n]
        margin = beta * ((chosen - chosen_ref) - (rejected - rejected_ref))
        loss += softplus(-margin) / pairs
        out["margin"].append(margin)
        out["grad_logp_chosen"].append(-beta * sigmoid(-margin) / pairs)
        out["grad_logp_rejected"].append(beta * sigmoid(-margin) / pairs)
        out["reward_chosen"].append(beta * (chosen - chosen_ref))
        out["reward_rejected"].append(beta * (rejected - rejected_ref))
        out["chosen_displaced"].append(float(margin > 0 and chosen < chosen_ref))
    return {**out, "loss": loss}


def reward_shaping(case: Case) -> dict[str, Any]:
    """DAPO's soft penalty on long answers."""
    cap, cache = case["params"]["L_max"], case["params"]["L_cache"]
    penalty = []
    for n in case["inputs"]["lengths"]:
        if n <= cap - cache:
            penalty.append(0.0)
        elif n <= cap:
            penalty.append(((cap - cache) - n) / cache)
        else:
            penalty.append(-1.0)
    return {"penalty": penalty}


def filter_rows(case: Case) -> dict[str, Any]:
    """Rows of groups with mixed rewards, or groups within an accuracy band."""
    params, inputs = case["params"], case["inputs"]
    if "group_accuracy" in inputs:
        low, high = params["low"], params["high"]
        return {"keep": [float(low <= a <= high) for a in inputs["group_accuracy"]]}
    rewards = inputs["rewards"]
    return {"keep": mixed_rows(rewards, rows_by_group(inputs.get("group_ids"), len(rewards)))}


AGGREGATIONS = (
    "token_mean_batch",
    "token_mean_group",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "seq_sum_token_mean",
)


def aggregation(case: Case) -> dict[str, Any]:
    """One token loss under every aggregation."""
    params, inputs = case["params"], case["inputs"]
    batch, out = batch_of(inputs), {}
    for agg in AGGREGATIONS:
        u = aggregation_weights(agg, batch, params["norm_len"])
        out[agg] = sum(u[i] * inputs["token_loss"][i][t] for i, t in batch.tokens())
    return out


def kl_tokens(case: Case) -> dict[str, Any]:
    """Token values and gradients of every KL estimator."""
    inputs = case["inputs"]
    batch, out = batch_of(inputs), {}
    for estimator in ("k1", "k2", "k3", "k3+"):
        value, grad = batch.grid(), batch.grid()
        for i, t in batch.tokens():
            x = inputs["logp"][i][t] - inputs["logp_ref"][i][t]
            value[i][t], grad[i][t] = kl_value(estimator, x), kl_slope(estimator, x)
        out[estimator], out[f"{estimator}_grad_logp"] = value, grad
    return out


def kl_expectation(case: Case) -> dict[str, Any]:
    """Exact expectations of the estimators and of their gradients over one categorical."""
    inputs = case["inputs"]
    logp, ref, old = (log_softmax(inputs[k]) for k in ("logits", "logits_ref", "logits_old"))
    p, p_ref, p_old = np.exp(logp), np.exp(ref), np.exp(old)
    actions = range(len(p))
    x = logp - ref

    def score(a: int) -> np.ndarray:
        return np.array([float(a == v) - p[v] for v in actions])

    def total(weight: Callable[[int], float]) -> np.ndarray:
        return np.sum([weight(a) * score(a) for a in actions], axis=0)

    out: dict[str, Any] = {
        "reverse_kl": sum(p[a] * x[a] for a in actions),
        "forward_kl": -sum(p_ref[a] * x[a] for a in actions),
        "grad_reverse_kl": total(lambda a: p[a] * (x[a] + 1)),
        "grad_forward_kl": total(lambda a: -p_ref[a]),
        "E_grad_k1_in_reward": total(lambda a: p[a] * x[a]),
    }
    for k in ("k1", "k2", "k3"):
        out[f"E_{k}"] = sum(p[a] * kl_value(k, x[a]) for a in actions)
        out[f"E_grad_{k}_in_loss"] = total(lambda a, k=k: p[a] * kl_slope(k, x[a]))
    corrected = np.zeros(len(p))
    for a in actions:
        ratio, ratio_slope = clamped_exp(logp[a] - old[a])
        slope = ratio_slope * kl_value("k3", x[a]) + ratio * kl_slope("k3", x[a])
        corrected += p_old[a] * slope * score(a)
    out["E_grad_k3_in_loss_IS_corrected"] = corrected
    return out


def estimator_expectation(case: Case) -> dict[str, Any]:
    """Expected policy gradient of each baseline on a one-step bandit, over all G-tuples."""
    params, inputs = case["params"], case["inputs"]
    p, reward = np.exp(log_softmax(inputs["logits"])), inputs["reward_per_action"]
    actions, size = range(len(p)), params["G"]
    ddof, eps = params.get("ddof", 1), params.get("eps", 1e-6)
    scores = [np.array([float(a == v) - p[v] for v in actions]) for a in actions]
    true = np.sum([p[a] * reward[a] * scores[a] for a in actions], axis=0)
    zscore = f"E_zscore_ddof{ddof}"
    out: dict[str, Any] = {
        name: np.zeros(len(p)) for name in ("E_raw", "E_group_mean", "E_leave_one_out", zscore)
    }
    group = [list(range(size))]
    for sample in itertools.product(actions, repeat=size):
        probability = math.prod(p[a] for a in sample)
        rewards = [reward[a] for a in sample]
        for name, adv in (
            ("E_raw", rewards),
            ("E_group_mean", group_advantage(rewards, group, "none", ddof, eps)),
            ("E_leave_one_out", leave_one_out(rewards, group)),
            (zscore, group_advantage(rewards, group, "group", ddof, eps)),
        ):
            for a, value in zip(sample, adv, strict=True):
                out[name] += probability * value / size * scores[a]
    norms = math.sqrt(sum(out[zscore] ** 2) * sum(true**2))
    out["cos_zscore_vs_true"] = ratio_or_zero(sum(out[zscore] * true), norms)
    return {**out, "true_gradient": true}


def topk_divergence(case: Case) -> dict[str, Any]:
    """DPPO: divergence over the rollout's top-K tokens plus one bucket for the rest."""
    params, inputs = case["params"], case["inputs"]
    batch = batch_of(inputs)
    given = inputs["advantages"]
    kl, tv, keep = batch.grid(), batch.grid(), batch.grid()
    for i, t in batch.tokens():
        adv = given[i][t] if isinstance(given[i], Sequence) else given[i]
        p = np.exp(log_softmax(inputs["logits"][i][t]))
        mu = np.exp(log_softmax(inputs["logits_rollout"][i][t]))
        top = top_indices(mu, params["K"])
        rest = [v for v in range(len(mu)) if v not in top]
        p_buckets = [*(p[v] for v in top), sum(p[v] for v in rest)]
        mu_buckets = [*(mu[v] for v in top), sum(mu[v] for v in rest)]
        kl[i][t] = bucket_kl(mu_buckets, p_buckets)
        tv[i][t] = sum(abs(a - b) for a, b in zip(p_buckets, mu_buckets, strict=True)) / 2
        y = inputs["tokens"][i][t]
        keep[i][t] = divergence_keep(adv, p[y], mu[y], tv[i][t], params["delta_tv"])
    return {"topk_kl": kl, "topk_tv": tv, "keep_mask": keep}


def routing_replay(case: Case) -> dict[str, Any]:
    """Router gates over a replayed expert set, their Jacobian, and the gates without replay."""
    logits = case["inputs"]["router_logits"]
    experts = range(len(logits))

    def gates(chosen: list[int]) -> np.ndarray:
        out = np.zeros(len(logits))
        for v, lp in zip(chosen, log_softmax([logits[v] for v in chosen]), strict=True):
            out[v] = math.exp(lp)
        return out

    replay = gates([v for v in experts if case["inputs"]["replay_mask"][v] == 1])
    jacobian = [[replay[a] * (float(a == b) - replay[b]) for b in experts] for a in experts]
    own = gates(top_indices(logits, case["params"]["top_k"]))
    return {"gates_replay": replay, "jacobian": jacobian, "gates_without_replay": own}


def dpo_optimum(case: Case) -> dict[str, Any]:
    """Shift of the log-odds at the optimum of the DPO loss: ``logit(p) / beta``."""
    p = case["params"]["preference_probability"]
    shift = [math.log(p / (1 - p)) / beta for beta in case["inputs"]["betas"]]
    return {"optimal_logodds_shift": shift}


def pair_selection(case: Case) -> dict[str, Any]:
    """Best and worst candidate by mean score; a tie between the two drops the pair."""
    means = [sum(scores) / len(scores) for scores in case["inputs"]["judge_scores"]]
    best, worst = means.index(max(means)), means.index(min(means))
    keep = float(means[best] > means[worst])
    return {"mean_scores": means, "chosen": best, "rejected": worst, "keep": keep}


SOLVERS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "advantage": advantage,
    "aggregation": aggregation,
    "analytic": dpo_optimum,
    "aux_loss": entropy_bonus,
    "estimator_expectation": estimator_expectation,
    "filter": filter_rows,
    "gae": gae_case,
    "gate": topk_divergence,
    "kl": kl_tokens,
    "kl_expectation": kl_expectation,
    "pair_selection": pair_selection,
    "policy_loss": policy_loss,
    "preference_loss": preference_loss,
    "reward_shaping": reward_shaping,
    "router": routing_replay,
    "value_loss": value_loss,
}


def solve(case: Case) -> dict[str, Any]:
    """Outputs of a case as floats and nested lists; ``case["expected"]`` is never read."""
    return {name: plain(value) for name, value in SOLVERS[case["kind"]](case).items()}
