"""The effect of a method on a recorded batch: advantage, weight and clip state of every token.

The weight of a token is d loss / d log-probability: the factor that the gradient of its
log-probability gets. It comes out of the recipe's own two phases by differentiation, at the
log-probabilities of the policy that the recorded update saw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.groups.phase import BatchResult, batch_phase, passes, select
from groupwise.losses.measures import merge
from groupwise.losses.phase import token_phase
from groupwise.optim.assemble import Group, assemble, batch_of, group_numbers
from groupwise.optim.roles import apart, while_waiting
from groupwise.optim.roles.critic import targets
from groupwise.optim.roles.implicit_reward import beta_of, logp_behind
from groupwise.optim.step_values import value_streams
from groupwise.records import Memory, TokenBatch
from groupwise.replay.methods import ReplayMethod
from groupwise.replay.recorded import Record, Recorded, rows_of


@dataclass(frozen=True)
class MethodBatch:
    """The batch that a method would have learned from, after its batch phase."""

    recipe: Any  # the method's, as it runs at this step
    groups: list[Group]
    row_N: Tensor  # its rows, by their place among those of the record
    result: BatchResult
    wanted: int  # groups that its filters send away, and would have drawn others for
    kept_of_dropped: int  # groups that the run sent away, and this method would not

    @property
    def batch(self) -> TokenBatch:
        return self.result.batch


@dataclass(frozen=True)
class MethodWeights:
    """A method on one step; rows and tokens are those of the record, 0 where it does not learn."""

    method: ReplayMethod
    batched: MethodBatch
    advantage_NT: Tensor
    coefficient_NT: Tensor
    ratio_NT: Tensor
    weight_NT: Tensor  # float64
    clipped_NT: Tensor
    learned_NT: Tensor  # bool: tokens in its loss
    target_NT: Tensor | None  # of its critic, where it has one
    metrics: dict[str, float]


def batched(run: Recorded, method: ReplayMethod, record: Record, memory: Memory) -> MethodBatch:
    """Apply filters, then the batch phase, to what was recorded."""
    own = (
        method.recipe.slots() == run.recipe.slots()
    )  # its filters have been at work: these groups are what stayed
    lost = set() if own else _sent_away(run, method, record.groups)
    numbers = _numbers(method, record.groups)
    kept = [g for g, number in zip(record.groups, numbers, strict=True) if number not in lost]
    kept = kept or record.groups  # as the loop does: a step that teaches nothing
    keeps = [any(group is each for each in kept) for group in record.groups]
    row_N = torch.tensor([keep for keep, group in zip(keeps, record.groups, strict=True)
                          for _ in group]).nonzero()[:, 0]  # fmt: skip
    width = max(len(r.completion.token_ids) for r in rows_of(kept))
    streams: dict[str, Any] = {"old_logp_NT": record.old_NT[row_N, :width]}
    streams |= {name: x_NT[row_N, :width] for name, x_NT in of_roles(run, record).items()}
    if "length_exponent" in method.recipe.outputs:
        streams["length_exponent"] = torch.tensor(float(method.recipe.aggregation["exponent"]))
    if "step_value_NT" in method.recipe.streams:
        drop = run.config.overlong == "drop"
        branches = [record.branches.get((g[0].task.id, g[0].draw), []) for g in kept]
        streams |= value_streams(kept, branches, drop_truncated=drop)
    recipe = while_waiting(method.recipe) if record.waited else method.recipe
    batch = assemble(
        recipe,
        kept,
        _sampled(run, method, kept),
        greedy=_baselines(method, record, kept),
        memory=memory,
        **streams,
    )
    result = batch_phase(recipe, batch)
    turned = _sent_away(run, method, record.dropped) if record.dropped else set()
    return MethodBatch(
        recipe,
        kept,
        row_N,
        result,
        wanted=len(record.groups) - len(kept),
        kept_of_dropped=len(record.dropped) - len(turned),
    )


def of_roles(run: Recorded, record: Record) -> dict[str, Tensor]:
    """Return what the run's models beside the policy said, as recorded."""
    wrote, beta = record.streams, beta_of(run.recipe)
    found = {}
    if "ref_logp" in wrote:
        found["ref_logp_NT"] = wrote["ref_logp"]
    if "teacher_logp" in wrote:
        found["teacher_logp_NT"] = wrote["teacher_logp"]
    if "value" in wrote:
        found["old_value_NT"] = wrote["value"]
    if "process_reward" in wrote and "ref_logp" in wrote and beta is not None:
        found["prm_logp_NT"] = logp_behind(wrote["process_reward"], wrote["ref_logp"], beta)
    return found


def _numbers(method: ReplayMethod, groups: list[Group]) -> list[int]:
    """Return the numbers of the groups, as the filters name them."""
    first_row = [sum(map(len, groups[:at])) for at in range(len(groups))]
    every = group_numbers(method.recipe, groups)
    return [every[row] for row in first_row]


def _sent_away(run: Recorded, method: ReplayMethod, groups: list[Group]) -> set[int]:
    """Return the groups that the method's dynamic sampling would not learn from."""
    if not method.recipe.refilling:
        return set()
    return set(select(method.recipe, _sampled(run, method, groups)).refill)


def _sampled(run: Recorded, method: ReplayMethod, groups: list[Group]) -> TokenBatch:
    drop = run.config.overlong == "drop"
    tokenizer: Any = run.tokenizer  # `check` saw to it where it is read
    return batch_of(method.recipe, groups, tokenizer, drop_truncated=drop)


def _baselines(
    method: ReplayMethod, record: Record, groups: list[Group]
) -> list[float | None] | None:
    if "greedy_reward_N" not in method.recipe.streams:
        return None
    return [record.greedy.get((group[0].task.id, group[0].draw)) for group in groups]


def weigh(method: ReplayMethod, record: Record, found: MethodBatch) -> MethodWeights:
    """Differentiate the method's loss in the log-probabilities that the recorded update saw."""
    recipe, row_N = found.recipe, found.row_N
    width = found.batch.mask_NT.shape[1]
    logp_NT = record.policy_NT[row_N, :width].clone().requires_grad_()
    outputs = {"logp_NT": logp_NT}
    if "entropy_NT" in recipe.outputs:
        outputs["entropy_NT"] = record.streams["entropy"][row_N, :width].double()
    if found.batch.length_exponent is not None:
        outputs["length_exponent"] = found.batch.length_exponent
    ratio_NT = torch.ones_like(found.batch.mask_NT, dtype=torch.float64)
    clipped_NT = torch.zeros_like(found.batch.mask_NT)
    loss, tallies = logp_NT.new_zeros(()), []
    for one_pass in passes(recipe, found.batch):
        result = token_phase(recipe, one_pass, apart=apart(recipe), **outputs)
        seen_NT = one_pass.mask_NT if one_pass.pass_NT is None else one_pass.pass_NT
        ratio_NT = torch.where(seen_NT, result.log_ratio_NT.exp(), ratio_NT)
        clipped_NT |= seen_NT & result.clipped_NT
        loss = loss + result.loss
        tallies.append(result.tally)
    (weight_NT,) = torch.autograd.grad(loss, logp_NT, allow_unused=True)
    if weight_NT is None:
        weight_NT = torch.zeros_like(logp_NT)
    batch, target_NT = found.batch, targets(recipe, found.batch)

    def whole(x_NT: Tensor) -> Tensor:
        out_NT = torch.zeros(record.mask_NT.shape, dtype=x_NT.dtype)
        out_NT[row_N, :width] = x_NT
        return out_NT

    return MethodWeights(
        method=method,
        batched=found,
        advantage_NT=whole(batch.stream("advantage_NT")),
        coefficient_NT=whole(batch.stream("coefficient_NT")),
        ratio_NT=whole(ratio_NT * batch.mask_NT),
        weight_NT=whole(weight_NT),
        clipped_NT=whole(clipped_NT & batch.mask_NT),
        learned_NT=whole(batch.learned_NT.bool()),
        target_NT=None if target_NT is None else whole(batch.valid(target_NT)),
        metrics=found.result.metrics | merge(tallies).read(),
    )
