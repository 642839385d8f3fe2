"""Random cases of newer methods against an independent solver: plain Python, gradients by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
from nested import assert_close
from oracle_newer import SOLVERS, solve_newer

from groupwise.testing import run_case

TURNS = ("turn_return_to_go", "rebn", "gigpo")
LOSSES = ("top_entropy_mask", "m2po", "m2_mask", "kl_cov", "real", "gvpo")
PARAMS: dict[str, dict[str, Any]] = {
    "gdpo": {"weights": [1.0, 0.5], "eps": 1e-3, "whiten": "rows", "whiten_eps": 1e-4},
    "otb": {"zero_tail": True},
    "turn_return_to_go": {"gamma": 0.9},
    "rebn": {"gamma": 0.9, "eps": 1e-9},
    "gigpo": {"gamma": 0.9, "step_weight": 0.7, "eps": 1e-6},
    "top_entropy_mask": {"fraction": 0.3, "eps_low": 0.2, "eps_high": 0.28},
    "m2po": {"budget": 0.03, "floor_low": 0.05, "floor_high": 0.05},
    "m2_mask": {"budget": 0.05, "eps_low": 0.2, "eps_high": 0.28},
    "kl_cov": {"fraction": 0.3, "coef": 0.5},
    "real": {"tau": 0.5},
    "gvpo": {"beta": 0.2},
}


def drawn(method: str, seed: int) -> dict[str, Any]:
    """A case with junk where the mask is 0."""
    g = random.Random(f"{method} {seed}")
    sizes = [g.randint(2, 4) for _ in range(g.randint(1, 3))]
    rows, width = sum(sizes), g.randint(4, 7)
    ends = [sorted(g.sample(range(width), g.randint(1, 3))) for _ in range(rows)]
    mask = [
        [float(t in row or (t < row[-1] and g.random() < 0.6)) for t in range(width)]
        for row in ends
    ]

    def grid(low: float, high: float) -> list[list[float]]:
        return [[g.uniform(low, high) if on else 77.0 for on in row] for row in mask]

    inputs: dict[str, Any] = {
        "rewards": [round(g.random(), 3) for _ in range(rows)],
        "group_ids": [p for p, size in enumerate(sizes) for _ in range(size)],
        "mask": mask,
    }
    if method == "gdpo":
        inputs["reward_parts"] = [[g.random(), g.random()] for _ in range(rows)]
        del inputs["rewards"]
    elif method == "treepo":
        inputs["paths"] = [f"{p}#{g.randint(0, 1)}#{i}" for i, p in enumerate(inputs["group_ids"])]
        del inputs["group_ids"]
    elif method == "otb":
        inputs |= {"logp_old": grid(-2, -0.1), "sum_pi_squared": grid(0.2, 0.9)}
    elif method in TURNS:
        inputs["turn_ends"] = ends
        inputs["turn_rewards"] = [[round(g.random(), 3) for _ in row] for row in ends]
        inputs["states"] = [[g.randint(0, 2) for _ in row] for row in ends]
        del inputs["rewards"]
        if method == "rebn":
            del inputs["group_ids"]
        if method != "gigpo":
            del inputs["states"]
    elif method in LOSSES:
        inputs |= {"logp": grid(-2, -0.1), "logp_old": grid(-2, -0.1)}
        inputs |= {"entropy": grid(0, 2)} if method == "top_entropy_mask" else {}
        inputs |= {"logp_rollout": grid(-2, -0.1)} if method == "m2_mask" else {}
    params = dict(PARAMS.get(method, {"weight": "size"} if method == "treepo" else {}))
    kind = "policy_loss" if method in LOSSES else "advantage"
    return {"kind": kind, "method": method, "params": params, "inputs": inputs}


@pytest.mark.parametrize("method", SOLVERS)
def test_agrees_with_the_solver(method: str) -> None:
    for seed in range(12):
        case = drawn(method, seed)
        got, want = run_case(case), solve_newer(case)
        for name, value in want.items():
            assert_close(got[name], value, 1e-9, 1e-9, f"seed {seed}: {name}")
