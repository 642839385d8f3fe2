"""Advantages of turns: every own token of a turn carries its turn's number.

A turn is a step whose reward stands at its last own token (`step_reward_NT`, `step_end_NT`); what
is behind the last mark is a turn without a reward. `G_k` is what a turn and those behind it earn.
The axis `_K` numbers the turns of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from groupwise.groups.advantages import centred
from groupwise.groups.statistics import group_stats, keyed_stats, suffix_sums
from groupwise.groups.step_table import StepTable, divide
from groupwise.methods.slots import Ddof, Fraction, NonNegative, advantage
from groupwise.records import TokenBatch

TURNS = ("step_reward_NT", "step_end_NT")


@dataclass(frozen=True)
class TurnTable:
    """The turns of each row: which token is in which, and what they earned."""

    steps: StepTable
    there_NK: Tensor  # bool: the row has such a turn
    reward_NK: Tensor  # float64

    def returns(self, gamma: float) -> Tensor:
        """Return G_k = Σ_(l≥k) γ^(l−k) r_l, 0 where there is no turn."""
        found_NK = suffix_sums(self.reward_NK.clone(), gamma)
        return torch.where(self.there_NK, found_NK, 0.0)

    def spread(self, x_NK: Tensor, batch: TokenBatch) -> Tensor:
        """Return a number per turn on the turn's own tokens."""
        return batch.valid(self.steps.spread(x_NK.to(batch.dtype)))


def last_tokens(batch: TokenBatch) -> Tensor:
    """Return the last own token of each turn; a row's last own token ends one, too."""
    end_NT = batch.stream("step_end_NT") & batch.mask_NT
    last_N1, written_N1 = batch.last_N.clamp(min=0)[:, None], (batch.length_N > 0)[:, None]
    return end_NT.scatter(1, last_N1, end_NT.gather(1, last_N1) | written_N1)


def turns_of(batch: TokenBatch) -> TurnTable:
    """Return the turns of a batch; as many columns on every rank."""
    steps = divide(last_tokens(batch))
    most = max(int(batch.world.gather(steps.count_N).max()), 1)
    # A row's last turn has no reward where nothing is marked there.
    marked_NK = steps.at_ends(batch.stream("step_end_NT"), most)
    reward_NK = steps.at_ends(batch.stream("step_reward_NT"), most).double() * marked_NK
    there_NK = torch.arange(most, device=steps.count_N.device) < steps.count_N[:, None]
    return TurnTable(steps, there_NK, reward_NK)


def _turns_of_graded(reward_N: Tensor, batch: TokenBatch) -> tuple[TurnTable, Tensor]:
    """Return the turns, and those of rows with a grade: what enters statistics."""
    turns = turns_of(batch)
    return turns, turns.there_NK & ~reward_N.isnan()[:, None]


@advantage(
    base=True,
    per_token=True,
    outcome=False,
    needs=TURNS,
    equation="A_ik = G_ik − mean_(j≠i) G_jk, G with γ={gamma}; rows that have ended: {ended}",
    fixes="credit per turn without bias: the baseline knows nothing of what the answer does next",
    breaks="few answers get far: late turns have noisy baselines",
)
def turn_return_to_go(
    reward_N: Tensor,
    batch: TokenBatch,
    *,
    gamma: Fraction = 1.0,
    ended: Literal["zero", "left_out"] = "zero",
) -> Tensor:
    """Compare what a turn leads to with the same turn of the group's other answers.

    A row that has ended counts 0 there, or is left out (with none left the baseline is 0); both
    are unbiased. A mean per turn that holds the row itself is not: how many means are subtracted
    depends on whether the row goes on.
    """
    turns, counts_NK = _turns_of_graded(reward_N, batch)
    return_NK, gather = turns.returns(gamma), batch.world.gather
    graded_N1 = ~reward_N.isnan()[:, None]
    enters_NK = graded_N1.expand_as(counts_NK) if ended == "zero" else counts_NK
    own_MK = gather(torch.where(enters_NK, return_NK, torch.nan))
    turn_MK = torch.arange(own_MK.shape[1], device=own_MK.device).expand_as(own_MK)
    group_MK = batch.groups.index_M[:, None].expand_as(turn_MK)
    key_X2 = torch.stack([group_MK.flatten(), turn_MK.flatten()], 1)
    stats = keyed_stats(own_MK.flatten(), key_X2)
    apart_X = stats.centred(own_MK.flatten()) * stats.count_X / (stats.count_X - 1).clamp(min=1)
    apart_NK, count_NK = (
        batch.world.own(x_X.reshape(own_MK.shape)) for x_X in (apart_X, stats.count_X)
    )
    several_N1 = (group_stats(reward_N, batch).count_N > 1)[:, None]
    found_NK = torch.where((count_NK <= 1) & several_N1, return_NK, apart_NK)
    return turns.spread(torch.where(counts_NK, found_NK, 0.0), batch)


@advantage(
    uniform="teaches",
    base=True,
    per_token=True,
    outcome=False,
    needs=TURNS,
    equation="A_k = Σ_(l≥k) {gamma}^(l−k)·r_l",
    fixes="credit per turn, one episode a task",
    breaks="no baseline of its own: whiten it",
)
def turn_return(reward_N: Tensor, batch: TokenBatch, *, gamma: Fraction = 1.0) -> Tensor:
    """Return of each turn (GEM, 2510.01051)."""
    turns, counts_NK = _turns_of_graded(reward_N, batch)
    return turns.spread(torch.where(counts_NK, turns.returns(gamma), 0.0), batch)


@advantage(
    scales=True,
    per_token=True,
    needs=("step_end_NT",),
    equation="A ← (A − mean)/(std + {eps}) over all turns of the batch, ddof={ddof}",
    fixes="one scale; a turn counts once, however long it is",
    breaks="a task's difficulty stays in its advantage",
)
def whiten_turns(
    x_NT: Tensor, batch: TokenBatch, *, ddof: Ddof = 1, eps: NonNegative = 1e-9
) -> Tensor:
    """Take z-scores over turns (ReBN, 2510.01051)."""
    x_NT, gather = batch.valid(x_NT), batch.world.gather
    steps = divide(last_tokens(batch))
    most = max(int(steps.count_N.max()) if batch.rows else 0, 1)
    value_NK = steps.at_ends(x_NT, most).double()
    there_NK = torch.arange(most, device=x_NT.device) < steps.count_N[:, None]
    there_NK = there_NK & batch.stream("learn_N")[:, None]
    count = gather(there_NK.sum(1)).sum()
    if not count:
        return torch.zeros_like(batch.ones_NT)
    # Deviations from one of the values: where all are equal, they are exactly 0.
    known_M = gather(torch.where(there_NK[:, 0], value_NK[:, 0], torch.nan))
    pivot = known_M[~known_M.isnan()][0]
    shift = gather(((value_NK - pivot) * there_NK).sum(1)).sum() / count
    squares = gather(((value_NK - pivot - shift).square() * there_NK).sum(1)).sum()
    scale = (squares / max(int(count) - ddof, 1)).sqrt() + eps
    if scale == 0:
        return torch.zeros_like(batch.ones_NT)
    apart_NT = (x_NT - pivot.to(x_NT.dtype)).sub_(shift.to(x_NT.dtype))
    return batch.valid(apart_NT.div_(scale.to(x_NT.dtype)))


@advantage(
    per_token=True,
    needs=(*TURNS, "state_NT"),
    equation="A_ik ← A_i + {weight}·(G_ik − mean)/scale over the turns of the group that begin in"
    " the same state; G with γ={gamma}, scale by {scale} (ddof={ddof}, ε={eps})",
    fixes="credit per turn without a critic",
    breaks="says nothing of states that the group met once",
)
def plus_state_zscore(
    x: Tensor,
    batch: TokenBatch,
    *,
    gamma: Fraction = 0.95,
    weight: NonNegative = 1.0,
    scale: Literal["group", "none"] = "group",
    ddof: Ddof = 1,
    eps: NonNegative = 1e-6,
) -> Tensor:
    """Compare turns that begin in the same state of the same group (GiGPO, 2505.10978)."""
    gather = batch.world.gather
    turns, counts_NK = _turns_of_graded(batch.stream("reward_N"), batch)
    state_NK = turns.steps.at_ends(batch.stream("state_NT"), turns.reward_NK.shape[1])
    value_NK = torch.where(counts_NK, turns.returns(gamma), torch.nan)
    value_MK, state_MK = gather(value_NK), gather(state_NK)
    group_MK = batch.groups.index_M[:, None].expand_as(state_MK)
    key_X2 = torch.stack([group_MK.flatten(), state_MK.flatten()], 1)
    stats = keyed_stats(value_MK.flatten(), key_X2)
    z_X = stats.centred(value_MK.flatten())
    if scale == "group":
        z_X = z_X / (stats.std_X(ddof) + eps)
    z_NK = batch.world.own(z_X.nan_to_num(0.0).reshape(value_MK.shape))
    own_NT = x if x.dim() == 2 else batch.valid(x.nan_to_num(0.0))
    return own_NT + weight * turns.spread(z_NK, batch)


@advantage(
    scales=True,
    base=True,
    per_token=True,
    needs=("turn_reward_N", "outcome_reward_N", "result_start_N"),
    equation="A_t = z(outcome) + {coef}·z(turn)·1[t before the first tool result]; rows without a"
    " result: z(R); z in the group, ddof={ddof}, ε={eps}",
    fixes="credit for the call of a tool",
    breaks="made for one call",
)
def call_credit(
    reward_N: Tensor,
    batch: TokenBatch,
    *,
    coef: NonNegative = 1.0,
    ddof: Ddof = 1,
    eps: NonNegative = 1e-4,
) -> Tensor:
    """MT-GRPO (2505.11821), as its release computes it."""

    def zscore(x_N: Tensor) -> Tensor:
        stats = group_stats(torch.where(reward_N.isnan(), torch.nan, x_N.double()), batch)
        scale_N = stats.std_N(ddof) + eps
        z_N = centred(x_N.double(), stats) / torch.where(scale_N == 0, 1.0, scale_N)
        return z_N.nan_to_num(0.0)[:, None]

    start_N1 = batch.stream("result_start_N")[:, None]
    calling_NT = batch.mask_NT.cumsum(1) <= start_N1
    split_NT = (
        zscore(batch.stream("outcome_reward_N"))
        + coef * zscore(batch.stream("turn_reward_N")) * calling_NT
    )
    return batch.valid(torch.where(start_N1 >= 0, split_NT, zscore(reward_N)))
