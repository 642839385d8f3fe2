"""Random cases against an independent solver: Python loops and gradients derived by hand."""

from __future__ import annotations

import copy
import warnings
import zlib
from typing import Any, Literal

import numpy as np
import pytest
from casegen import PAIRS, Pair, random_case
from nested import assert_close
from oracle import solve

from groupwise.testing import run_case

TOLERANCE = 1e-9
FAST, SLOW = range(8), range(8, 150)
Junk = Literal["large", "nan"]
all_pairs = pytest.mark.parametrize("pair", PAIRS, ids="-".join)
both_kinds_of_junk = pytest.mark.parametrize("junk", ["large", "nan"])


def draw(pair: Pair, seed: int, junk: Junk) -> dict[str, Any]:
    """A case that depends on the pair and the seed alone, not on the order of the tests."""
    return random_case(
        np.random.default_rng([zlib.crc32("-".join(pair).encode()), seed]), pair, junk
    )


def assert_agree(case: dict[str, Any], seed: int) -> None:
    """Every output of the solver, with |Δ| ≤ 1e-9·(1+|x|), from the same nested lists."""
    want = solve(copy.deepcopy(case))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = run_case(case)
    assert want, "the solver gave nothing"
    for name, value in want.items():
        assert name in got, f"seed {seed}: no output {name}"
        assert_close(got[name], value, TOLERANCE, TOLERANCE, f"seed {seed}: {name}")


@all_pairs
@both_kinds_of_junk
def test_agrees_with_the_solver(pair: Pair, junk: Junk) -> None:
    for seed in FAST:
        assert_agree(draw(pair, seed, junk), seed)


@pytest.mark.slow
@all_pairs
@both_kinds_of_junk
def test_agrees_with_the_solver_on_many(pair: Pair, junk: Junk) -> None:
    for seed in SLOW:
        assert_agree(draw(pair, seed, junk), seed)


@pytest.mark.parametrize("seed", range(5))
def test_visits_of_different_sizes_stay_ragged(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [3, 1, 4, 2]
    history = [rng.integers(0, 2, n).astype(float).tolist() for n in sizes]
    case = {"kind": "advantage", "method": "dcpo", "inputs": {"reward_history": history}}
    case = {**case, "params": {"ddof": 1}}
    got = run_case(case)["advantages_by_step"]
    assert [len(visit) for visit in got] == sizes
    assert_close(got, solve(case)["advantages_by_step"], TOLERANCE, TOLERANCE)


@pytest.mark.parametrize("seed", range(5))
def test_rows_in_any_order_give_the_same_numbers(seed: int) -> None:
    case = draw(("policy_loss", "grpo"), seed, "nan")
    inputs, rows = case["inputs"], len(case["inputs"]["mask"])
    order = np.random.default_rng(seed).permutation(rows).tolist()
    shuffled = {name: [grid[i] for i in order] for name, grid in inputs.items()}
    before, after = run_case(case), run_case({**case, "inputs": shuffled})
    assert_close(after["loss"], before["loss"], 1e-12, 1e-12)
    gradient = [before["grad_logp"][i] for i in order]
    assert_close(after["grad_logp"], gradient, 1e-12, 1e-12)
