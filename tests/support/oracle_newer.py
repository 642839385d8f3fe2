"""Slow reference for methods of 2025 and 2026: loops in plain Python, gradients derived by hand.

Nothing is shared with the package. `solve_newer(case)` returns what it knows of a case's outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Case = dict[str, Any]
Grid = list[list[float]]


def grouped(ids: Sequence[Any]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for row, name in enumerate(ids):
        groups.setdefault(name, []).append(row)
    return list(groups.values())


def mean_std(values: Sequence[float], ddof: int = 1) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    squares = math.fsum((x - mean) ** 2 for x in values)
    return mean, math.sqrt(squares / max(len(values) - ddof, 1))


def own_places(case: Case) -> list[list[int]]:
    return [[t for t, on in enumerate(row) if on] for row in case["inputs"]["mask"]]


def spread(case: Case, values: Sequence[Any]) -> Grid:
    """A value per row, or a function of the token's place, on own tokens."""
    width = len(case["inputs"]["mask"][0])
    out = [[0.0] * width for _ in values]
    for row, places in enumerate(own_places(case)):
        for t in places:
            out[row][t] = values[row](t) if callable(values[row]) else values[row]
    return out


# --- advantages ---------------------------------------------------------------------------------


def opo(case: Case) -> dict[str, Any]:
    rewards, places = case["inputs"]["rewards"], own_places(case)
    found = [0.0] * len(rewards)
    for rows in grouped(case["inputs"]["group_ids"]):
        if len(rows) > 1:
            tokens = sum(len(places[i]) for i in rows)
            base = sum(len(places[i]) * rewards[i] for i in rows) / tokens
            for i in rows:
                found[i] = rewards[i] - base
    return {"advantages": found}


def passk(case: Case) -> dict[str, Any]:
    rewards = case["inputs"]["rewards"]
    found = [0.0] * len(rewards)
    for rows in grouped(case["inputs"]["group_ids"]):
        for i in rows:
            others = [rewards[j] for j in rows if j != i]
            if others:
                found[i] = max(rewards[j] for j in rows) - max(others)
    return {"advantages": found}


def gdpo(case: Case) -> dict[str, Any]:
    parts, weights = case["inputs"]["reward_parts"], case["params"]["weights"]
    eps, total = case["params"]["eps"], [0.0] * len(parts)
    for rows in grouped(case["inputs"]["group_ids"]):
        for k, weight in enumerate(weights):
            mean, std = mean_std([parts[i][k] for i in rows])
            for i in rows:
                total[i] += weight * (parts[i][k] - mean) / (std + eps)
    mean, std = mean_std(total)
    scale = std + case["params"]["whiten_eps"]
    return {"part_sum": total, "advantages": [(x - mean) / scale for x in total]}


def tree(case: Case) -> dict[str, Any]:
    rewards = case["inputs"]["rewards"]
    paths = [path.split("#") for path in case["inputs"]["paths"]]
    found = []
    for i, path in enumerate(paths):
        total = weight = 0.0
        for level in range(len(path) - 1):
            peers = [j for j, p in enumerate(paths) if p[: level + 1] == path[: level + 1]]
            if level and len(peers) < 2:
                continue
            share = len(peers) if case["params"]["weight"] == "size" else 1
            total += share * (rewards[i] - sum(rewards[j] for j in peers) / len(peers))
            weight += share
        found.append(total / weight)
    return {"centered": found}


def otb(case: Case) -> dict[str, Any]:
    inputs, places = case["inputs"], own_places(case)
    rewards, width = inputs["rewards"], len(inputs["mask"][0])
    weight = [
        [1 - 2 * math.exp(inputs["logp_old"][i][t]) + inputs["sum_pi_squared"][i][t] for t in row]
        for i, row in enumerate(places)
    ]
    found = [[0.0] * width for _ in rewards]
    for rows in grouped(inputs["group_ids"]):
        for i in rows:
            for k, t in enumerate(places[i]):
                there = [j for j in rows if len(places[j]) > k]
                reach = {j: sum(weight[j][: k + 1]) for j in there}
                base = sum(rewards[j] * reach[j] for j in there) / (sum(reach.values()) + 1e-8)
                base = 0.0 if len(there) == 1 and case["params"]["zero_tail"] else base
                found[i][t] = rewards[i] - base if len(rows) > 1 else 0.0
    return {"advantages": found}


def returns(case: Case) -> list[list[float]]:
    gamma = case["params"]["gamma"]
    return [
        [sum(gamma ** (m - k) * x for m, x in enumerate(row) if m >= k) for k in range(len(row))]
        for row in case["inputs"]["turn_rewards"]
    ]


def by_turn(case: Case, values: list[list[float]]) -> Grid:
    """Turn values on own tokens: a token is in the first turn that ends at or behind it."""

    def at(row: int) -> Callable[[int], float]:
        ends = case["inputs"]["turn_ends"][row]
        return lambda t: values[row][next(k for k, end in enumerate(ends) if end >= t)]

    return spread(case, [at(row) for row in range(len(values))])


def turn_to_go(case: Case) -> dict[str, Any]:
    paid = returns(case)
    found = [[0.0] * len(row) for row in paid]
    for rows in grouped(case["inputs"]["group_ids"]):
        for i in rows:
            for k in range(len(paid[i])):
                others = [paid[j][k] if k < len(paid[j]) else 0.0 for j in rows if j != i]
                found[i][k] = paid[i][k] - sum(others) / len(others) if others else 0.0
    return {"advantages": by_turn(case, found)}


def rebn(case: Case) -> dict[str, Any]:
    paid = returns(case)
    mean, std = mean_std([x for row in paid for x in row])
    found = [[(x - mean) / (std + case["params"]["eps"]) for x in row] for row in paid]
    return {"advantages": by_turn(case, found)}


def gigpo(case: Case) -> dict[str, Any]:
    inputs, params, paid = case["inputs"], case["params"], returns(case)
    sums = [sum(row) for row in inputs["turn_rewards"]]
    found = [[0.0] * len(row) for row in paid]
    for rows in grouped(inputs["group_ids"]):
        mean, std = mean_std([sums[i] for i in rows])
        for i in rows:
            for k in range(len(paid[i])):
                state = inputs["states"][i][k]
                same = [
                    paid[j][m]
                    for j in rows
                    for m in range(len(paid[j]))
                    if inputs["states"][j][m] == state
                ]
                apart, scale = mean_std(same)
                episode = (sums[i] - mean) / (std + params["eps"])
                step = (paid[i][k] - apart) / (scale + params["eps"])
                found[i][k] = episode + params["step_weight"] * step
    return {"advantages": by_turn(case, found)}


# --- losses -------------------------------------------------------------------------------------


def zscores(case: Case, scaled: bool = True) -> list[float]:
    rewards = case["inputs"]["rewards"]
    found = [0.0] * len(rewards)
    for rows in grouped(case["inputs"]["group_ids"]):
        mean, std = mean_std([rewards[i] for i in rows])
        for i in rows:
            found[i] = (rewards[i] - mean) / (std + 1e-6) if scaled else rewards[i] - mean
    return found


def log_ratios(case: Case) -> list[dict[int, float]]:
    now, old = case["inputs"]["logp"], case["inputs"]["logp_old"]
    return [{t: now[i][t] - old[i][t] for t in row} for i, row in enumerate(own_places(case))]


def clipped_loss(
    case: Case, low: float, high: float, weight: Callable[[int, int], float]
) -> dict[str, Any]:
    """The clipped objective, token mean, each token times a constant weight."""
    advantages, d = zscores(case), log_ratios(case)
    tokens = sum(len(row) for row in d)
    grad = [[0.0] * len(case["inputs"]["mask"][0]) for _ in d]
    loss = 0.0
    for i, row in enumerate(d):
        for t, x in row.items():
            r, A = math.exp(x), advantages[i]
            dead = (A > 0 and r > high) or (A < 0 and r < low)
            held = min(max(r, low), high)
            loss -= weight(i, t) * min(r * A, held * A) / tokens
            grad[i][t] = 0.0 if dead else -weight(i, t) * r * A / tokens
    return {"loss": loss, "grad_logp": grad}


def top_entropy(case: Case) -> dict[str, Any]:
    entropy = case["inputs"]["entropy"]
    every = sorted(entropy[i][t] for i, row in enumerate(own_places(case)) for t in row)
    place = (1 - case["params"]["fraction"]) * (len(every) - 1)
    below = int(place)
    bound = every[below] + (place - below) * (every[min(below + 1, len(every) - 1)] - every[below])
    params = case["params"]
    found = clipped_loss(
        case,
        1 - params["eps_low"],
        1 + params["eps_high"],
        lambda i, t: float(entropy[i][t] >= bound),
    )
    return {**found, "threshold": bound}


def m2po(case: Case) -> dict[str, Any]:
    params, d, A = case["params"], log_ratios(case), zscores(case)
    squares = sorted(x * x for i, row in enumerate(d) for x in row.values() if A[i] * x > 0)
    low, high = 0.0, math.inf
    if squares and sum(squares) / len(squares) > params["budget"]:
        held = [
            s for s in squares
            if sum(min(x, s) for x in squares) < params["budget"] * len(squares)
        ]  # fmt: skip
        tau = math.sqrt(max(max(held, default=0.0) - 1e-12, 0.0))
        low, high = math.exp(-tau), math.exp(tau)
    low, high = min(low, 1 - params["floor_low"]), max(high, 1 + params["floor_high"])
    return {**clipped_loss(case, low, high, lambda i, t: 1.0), "clip_low": low}


def m2_mask(case: Case) -> dict[str, Any]:
    inputs, params = case["inputs"], case["params"]
    gap = {
        (i, t): (inputs["logp_old"][i][t] - inputs["logp_rollout"][i][t]) ** 2
        for i, row in enumerate(own_places(case))
        for t in row
    }
    left = sorted(gap, key=lambda at: gap[at])
    while len(left) > 1 and sum(gap[at] for at in left) / len(left) > params["budget"]:
        left.pop()
    kept = set(left)
    bounds = 1 - params["eps_low"], 1 + params["eps_high"]
    return clipped_loss(case, *bounds, lambda i, t: float((i, t) in kept))


def kl_cov(case: Case) -> dict[str, Any]:
    params, A, d = case["params"], zscores(case), log_ratios(case)
    logp = case["inputs"]["logp"]
    at = [(i, t) for i, row in enumerate(d) for t in row]
    mean_A = math.fsum(A[i] for i, _ in at) / len(at)
    mean_l = math.fsum(logp[i][t] for i, t in at) / len(at)
    order = sorted(at, key=lambda x: -(A[x[0]] - mean_A) * (logp[x[0]][x[1]] - mean_l))
    chosen = set(order[: max(1, int(params["fraction"] * len(at)))])
    loss, grad = 0.0, [[0.0] * len(case["inputs"]["mask"][0]) for _ in d]
    for i, t in at:
        r, extra = math.exp(d[i][t]), params["coef"] * ((i, t) in chosen)
        loss += (-r * A[i] + extra * abs(d[i][t])) / len(at)
        grad[i][t] = (-r * A[i] + extra * math.copysign(1.0, d[i][t])) / len(at)
    return {"loss": loss, "grad_logp": grad}


def real(case: Case) -> dict[str, Any]:
    tau, A, d = case["params"]["tau"], zscores(case, scaled=False), log_ratios(case)
    score = [sum(row.values()) / len(row) for row in d]
    groups = grouped(case["inputs"]["group_ids"])
    loss, slope = 0.0, [0.0] * len(A)
    for rows in groups:
        sides = [[i for i in rows if A[i] > 1e-15], [i for i in rows if A[i] <= 1e-15]]
        if not all(sides):
            continue
        for sign, side in zip((-1, 1), sides, strict=True):
            total = 1 + sum(math.exp(sign * score[i] / tau) for i in side)
            loss += math.log(total) / len(groups)
            for i in side:
                raised = math.exp(sign * score[i] / tau)
                slope[i] = sign * raised / (total * tau * len(groups) * len(d[i]))
    return {"loss": loss, "grad_logp": spread(case, slope)}


def gvpo(case: Case) -> dict[str, Any]:
    beta, A, d = case["params"]["beta"], zscores(case, scaled=False), log_ratios(case)
    total = [sum(row.values()) for row in d]
    groups = grouped(case["inputs"]["group_ids"])
    divisor = max(sum(len(rows) - 1 for rows in groups), 1)
    loss, slope = 0.0, [0.0] * len(A)
    for rows in groups:
        mean = sum(total[i] for i in rows) / len(rows)
        for i in rows if len(rows) > 1 else ():
            e = beta * (total[i] - mean) - A[i]
            loss += 0.5 * e * e / divisor
            slope[i] = beta * e / divisor
    return {"loss": loss, "grad_logp": spread(case, slope)}


SOLVERS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "opo": opo,
    "grpo_passk": passk,
    "gdpo": gdpo,
    "treepo": tree,
    "otb": otb,
    "turn_return_to_go": turn_to_go,
    "rebn": rebn,
    "gigpo": gigpo,
    "top_entropy_mask": top_entropy,
    "m2po": m2po,
    "m2_mask": m2_mask,
    "kl_cov": kl_cov,
    "real": real,
    "gvpo": gvpo,
}


def solve_newer(case: Case) -> dict[str, Any]:
    return SOLVERS[case["method"]](case)
