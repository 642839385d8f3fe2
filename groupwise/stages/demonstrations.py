"""Siblings as demonstrations: what the teacher reads of an answer that succeeded (SDPO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from groupwise.config import Config
from groupwise.data.prompts import read_one
from groupwise.groups.siblings import demonstrations
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.optim.assemble import Group
from groupwise.optim.packs import Sequences
from groupwise.prepare.teacher_prompts import teacher_task, with_sibling
from groupwise.records import Rollout

SUCCESS = 1.0  # the reward from which on an answer may be shown


def with_demonstrations(
    config: Config,
    groups: Sequence[Group],
    sequences: Sequences,
    tokenizer: Tokenizer,
    context: int,
) -> tuple[Sequences, Tensor]:
    """Return the rows with what their teacher reads, and which of them have a demonstration.

    It is the first success of the group but the row's own; a row whose demonstration does not fit
    the model's context beside the row has none.
    """
    rows = [row for group in groups for row in group]
    rewards = [float("nan") if r.grade.reward is None else r.grade.reward for r in rows]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    shown = demonstrations(rewards, numbers, threshold=SUCCESS, own=False)
    prompts = dict[int, tuple[int, ...]]()
    tasks, taught = list(sequences.tasks), []
    for row, other in enumerate(shown):
        if other >= 0 and other not in prompts:
            prompts[other] = _prompt(config, rows[other], tokenizer, context)
        ids = prompts.get(other, ())
        fits = bool(ids) and len(ids) + len(rows[row].completion.token_ids) <= context
        if fits:
            tasks[row] = replace(tasks[row], teacher_ids=ids)
        taught.append(fits)
    return replace(sequences, tasks=tasks), torch.tensor(taught)


def _prompt(
    config: Config, sibling: Rollout, tokenizer: Tokenizer, context: int
) -> tuple[int, ...]:
    """Return the prompt with this answer in it as token ids; none where it does not fit."""
    done, data = sibling.completion, config.data
    ids = done.token_ids[:-1] if done.finish == "eos" else done.token_ids
    task = teacher_task(config, with_sibling(sibling.task, tokenizer.decode(ids)))
    return read_one(
        task,
        tokenizer,
        template=config.teacher.template or data.template,
        system=data.system,
        instruction=data.instruction,
        room=context,
    )
