"""What other tools compute with a critic, written down plainly, and what our slots give for it.

Each function follows what the tool's code was read to do: loops over tokens in place of tensors.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from groupwise.groups.credit import length_adaptive_lambda
from groupwise.groups.phase import batch_phase
from groupwise.losses.auxiliary import clipped_value_error
from groupwise.losses.phase import role_phase
from groupwise.recipes import recipe
from groupwise.records import TokenBatch

LENGTHS = [5, 3, 6, 1]


def numbers(seed: int, *, low: float = -1.0, high: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x_NT = torch.rand(len(LENGTHS), max(LENGTHS), generator=generator, dtype=torch.float64)
    return low + (high - low) * x_NT


MASK = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
REWARD = [1.0, 0.0, 0.25, 1.0]
OLD, NEW = numbers(1), numbers(1) + numbers(2, low=-0.8, high=0.8)


def batch() -> TokenBatch:
    return TokenBatch.build(mask_NT=MASK, group_N=[0, 0, 1, 1], reward_N=REWARD, old_value_NT=OLD)


def backward_loop(lam: float) -> Tensor:
    """GAE as verl, OpenRLHF, NeMo-RL and TRL all loop over it: the reward on the last token."""
    found = torch.zeros_like(OLD)
    for row, length in enumerate(LENGTHS):
        carried = 0.0
        for t in reversed(range(length)):
            reward = REWARD[row] if t == length - 1 else 0.0
            following = float(OLD[row, t + 1]) if t + 1 < length else 0.0
            carried = reward + following - float(OLD[row, t]) + lam * carried
            found[row, t] = carried
    return found


def made(lam: float, *, whiten: str = "", limit: float = 0.2) -> object:
    links = f"gae(gamma=1.0, lam={lam})" + (f", {whiten}" if whiten else "")
    loss = f"value_loss(limit={limit}, gamma=1.0, lam={lam})"
    return recipe("ppo", {"shaping": "", "advantage": links, "auxiliary": loss})


@pytest.mark.parametrize("lam", [1.0, 0.95, 0.0])
def test_generalised_advantages(lam: float) -> None:
    found_NT = batch_phase(made(lam), batch()).batch.advantage_NT
    torch.testing.assert_close(found_NT, backward_loop(lam))


@pytest.mark.parametrize(("tool", "ddof"), [("verl", 1), ("OpenRLHF", 0)], ids=["verl", "OpenRLHF"])
def test_whitening_by_the_variance_that_a_tool_takes(tool: str, ddof: int) -> None:
    """Both divide by √(variance + 1e-8); verl's variance is that of a sample."""
    every = backward_loop(0.95)[MASK]
    mean = sum(every.tolist()) / len(every)
    squares = sum((x - mean) ** 2 for x in every.tolist())
    scale = math.sqrt(squares / (len(every) - ddof) + 1e-8)
    whiten = f"whiten_tokens(ddof={ddof}, eps_in_var=1e-8)"
    found_NT = batch_phase(made(0.95, whiten=whiten), batch()).batch.advantage_NT
    torch.testing.assert_close(found_NT[MASK], (every - mean) / scale)


@pytest.mark.parametrize(
    ("tool", "limit"), [("verl", 0.5), ("OpenRLHF", 0.5), ("TRL", 0.2), ("NeMo-RL", math.inf)]
)
def test_value_losses(tool: str, limit: float) -> None:
    """Half the mean over tokens of the larger of two squares; NeMo-RL clips nothing."""
    target = backward_loop(0.95) + OLD
    total = 0.0
    for row, length in enumerate(LENGTHS):
        for t in range(length):
            old, new, wanted = (float(x[row, t]) for x in (OLD, NEW, target))
            near = min(max(new, old - limit), old + limit)
            total += max((new - wanted) ** 2, (near - wanted) ** 2)
    expected = 0.5 * total / sum(LENGTHS)
    recipe_ = made(0.95, limit=min(limit, 1e6))
    done = batch_phase(recipe_, batch()).batch
    _, terms = role_phase(recipe_, done, "critic", value_NT=NEW)
    assert float(terms["value_loss"]) == pytest.approx(expected, rel=1e-12)


def test_within_the_range_no_gradient_is_lost_to_rounding() -> None:
    """old + (v − old) is not v in float32: the clipped branch would win by its last bit."""
    generator = torch.Generator().manual_seed(0)
    old_NT = torch.rand(64, 64, generator=generator)
    value_NT = old_NT + 0.1 * torch.rand(64, 64, generator=generator)
    return_NT = torch.rand(64, 64, generator=generator)
    error_NT, clipped_NT = clipped_value_error(value_NT, old_NT, return_NT, 0.2)
    assert not clipped_NT.any()
    assert torch.equal(error_NT, (value_NT - return_NT).square())


def test_lambda_by_length() -> None:
    """VAPO: 1 − 1/(0.05·n), which is 0 up to 20 tokens."""
    found = length_adaptive_lambda(torch.tensor([1, 20, 21, 10_000]), 0.05).tolist()
    assert found == pytest.approx([0.0, 0.0, 1 - 1 / 1.05, 1 - 1 / 500])
