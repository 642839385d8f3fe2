"""Rollouts -> the batch that the two phases read: every stream that a recipe asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from groupwise.groups.segments import split_at_punctuation
from groupwise.methods.composition import Recipe
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.optim.packs import Sequences
from groupwise.optim.row_streams import streams_of_rows
from groupwise.parallel.world import ALONE, World
from groupwise.records import Memory, Rollout, TokenBatch

Group = list[Rollout]


def sequences_of(groups: Sequence[Group]) -> Sequences:
    rows = [rollout for group in groups for rollout in group]
    return Sequences(
        [r.task.token_ids for r in rows],
        [r.completion.token_ids for r in rows],
        [r.completion.mask_T for r in rows],
        [r.task for r in rows],
        [r.completion.routes_TLK for r in rows],
    )


def group_numbers(recipe: Recipe, groups: Sequence[Group], first: int = 0) -> list[int]:
    """Number the rows' groups, from `first` on. A prompt that is in the batch twice has two groups.

    But a recipe that remembers prompts must know them again: there it is the prompt's own number,
    and the two are one group.
    """
    known = [link.definition.traits.remembers for link in recipe.advantage]
    remembers = "visits" in known or "prompt_beta" in known
    return [
        group[0].task.id if remembers else number
        for number, group in enumerate(groups, first)
        for _ in group
    ]


def batch_of(
    recipe: Recipe,
    groups: Sequence[Group],
    tokenizer: Tokenizer,
    *,
    drop_truncated: bool = False,
    weights: Mapping[str, float] | None = None,
) -> TokenBatch:
    """Return what the rollouts themselves say, as a batch that filters can look at.

    `weights` are those of the parts of the reward, for a recipe that weighs them itself.
    """
    rows = [rollout for group in groups for rollout in group]
    sequences = sequences_of(groups)
    mask_NT, layout_NT = sequences.mask(), sequences.layout()
    made: dict[str, Any] = {
        "truncated_N": torch.tensor([r.completion.truncated for r in rows]),
        "correct_N": torch.tensor([bool(r.grade.correct) for r in rows]),
    }
    if recipe.samples:  # answers of the data have no probability of the sampler's
        made["sampler_logp_NT"] = _padded([r.completion.logp_T for r in rows], layout_NT)
    wanted = recipe.streams
    if "token_NT" in wanted:
        made["token_NT"] = sequences.tokens()
    if "segment_NT" in wanted:
        texts = [[tokenizer.decode([i]) for i in ids] for ids in sequences.completions]
        made["segment_NT"] = split_at_punctuation(texts, sequences.width, mask_NT)
    if "step_reward_NT" in wanted:
        made |= _steps(rows, tokenizer, mask_NT)
    made |= streams_of_rows(wanted, rows, mask_NT, weights or {})
    if "sampler_topk_logp_NTK" in wanted:
        for name in ("topk_logp_TK", "topk_id_TK"):
            made[f"sampler_{name}".replace("_TK", "_NTK")] = _padded(
                [getattr(r.completion, name) for r in rows], layout_NT
            )
    gone = [drop_truncated and r.completion.truncated for r in rows]
    batch = TokenBatch.build(
        mask_NT=mask_NT,
        group_N=group_numbers(recipe, groups),
        reward_N=[None if out else r.grade.reward for r, out in zip(rows, gone, strict=True)],
        **made,
    )
    if recipe.reads_rewards or not recipe.samples:
        return batch
    return replace(batch, learn_N=~torch.tensor(gone))  # an answer without a grade teaches, too


def assemble(
    recipe: Recipe,
    groups: Sequence[Group],
    batch: TokenBatch,
    *,
    greedy: Sequence[float | None] | None = None,
    memory: Memory | None = None,
    device: torch.device | str = "cpu",
    world: World = ALONE,
    **streams: Tensor,
) -> TokenBatch:
    """Return the batch before its batch phase: what `batch_of` made, and what is known later.

    `streams` are what models say: old, reference, λ. `greedy` is the reward of each group's greedy
    completion; where that has none, the group has no baseline and counts as ungraded. In a `world`
    of several ranks each has groups of its own, and all call this.
    """
    first = world.for_rows(len(groups)).start
    reward_N = batch.task_reward_N
    if greedy is not None:
        baseline = [reward for reward, group in zip(greedy, groups, strict=True) for _ in group]
        known_N = torch.tensor([reward is not None for reward in baseline])
        reward_N = torch.where(known_N, reward_N, float("nan"))
        streams["greedy_reward_N"] = torch.tensor([reward or 0.0 for reward in baseline])
    whole = replace(
        batch,
        group_N=torch.tensor(group_numbers(recipe, groups, first), dtype=torch.long),
        task_reward_N=reward_N,
        memory=memory or Memory(),
        world=world.for_rows(batch.rows),
    )
    return whole.to(device).with_streams(**{name: x.to(device) for name, x in streams.items()})


def _padded(values: Sequence[Any], layout_NT: Tensor) -> Tensor:
    """Put one row's tokens each, [T] or [T, K], where they stand.

    What it says of tokens that the policy did not write is cleared when the batch is built.
    """
    together = torch.cat(list(values))
    out = together.new_zeros(*layout_NT.shape, *together.shape[1:])
    out[layout_NT] = together
    return out


def _steps(rows: Sequence[Rollout], tokenizer: Tokenizer, mask_NT: Tensor) -> dict[str, Tensor]:
    """Process rewards at the token that completes each step; without steps, all is one step.

    A step that ends in what others wrote is the policy's last token before it (its first, where
    there is none): a reward at a token that is not learned from would be lost.
    """
    reward_NT = torch.zeros(mask_NT.shape)
    end_NT = torch.zeros_like(mask_NT)
    for row, rollout in enumerate(rows):
        ids = rollout.completion.token_ids
        reward = rollout.grade.reward
        steps = rollout.grade.steps or ((len(rollout.text), 0.0 if reward is None else reward),)
        # Most steps of an episode are turns. Reading every beginning of a long one takes its time.
        places = {len(tokenizer.decode(ids[: x.end])): x.end - 1 for x in rollout.completion.turns}
        ends: list[int] = []
        if any(end not in places for end, _ in steps):
            ends = [len(tokenizer.decode(ids[: t + 1])) for t in range(len(ids))]
        own_T = mask_NT[row].nonzero()[:, 0]
        for end, value in steps:
            first = (t for t, reached in enumerate(ends) if reached >= end)
            at = places[end] if end in places else next(first, len(ids) - 1)
            at = int(own_T[(own_T <= at).sum().clamp(min=1) - 1])
            reward_NT[row, at] += value
            end_NT[row, at] = True
    return {"step_reward_NT": reward_NT, "step_end_NT": end_NT}
