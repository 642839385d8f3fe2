"""How well a policy knows rows of the data: nothing is sampled for it, nothing graded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from groupwise.evaluate.evaluate import Evaluation
from groupwise.optim.learner import Learner
from groupwise.optim.packs import Sequences, outputs
from groupwise.records import LearnedRow, Task


class Known(NamedTuple):
    """Sums over the learned tokens of one row."""

    nll: float  # of −log p
    right: float  # of the tokens that the policy holds for the likeliest
    tokens: int


def judge_rows(
    learner: Learner, tasks: Sequence[Task], sample: Callable[[Sequence[Task]], Evaluation]
) -> Evaluation:
    """Measure held-out tasks: `sample` those that can be graded, and the likelihood of rows."""
    graded = [at for at, task in enumerate(tasks) if task.token_ids]
    rows = [(at, task.row) for at, task in enumerate(tasks) if task.row is not None]
    found = sample([tasks[at] for at in graded])
    by_task = {name: _spread(x, graded, len(tasks)) for name, x in found.by_task.items()}
    others = dict(found.others)
    if rows:
        known = known_rows(learner, [row for _, row in rows])
        tokens = sum(each.tokens for each in known)
        others["eval/nll"] = sum(each.nll for each in known) / tokens
        others["eval/token_accuracy"] = sum(each.right for each in known) / tokens
        places = [at for at, _ in rows]
        nll, right = ([x / k.tokens for x, k in zip(s, known, strict=True)] for s in (
            [k.nll for k in known], [k.right for k in known]))  # fmt: skip
        by_task["eval/nll"] = _spread(nll, places, len(tasks))
        by_task["eval/token_accuracy"] = _spread(right, places, len(tasks))
    return replace(found, tasks=len(tasks), others=others, by_task=by_task)


@torch.no_grad()
def known_rows(learner: Learner, rows: Sequence[LearnedRow]) -> list[Known]:
    """Measure rows under the policy as it is, in passes like those of the updates."""
    sequences = Sequences(
        [row.prompt_ids for row in rows],
        [row.token_ids for row in rows],
        [row.mask_T for row in rows],
    )

    def measured() -> list[Known]:
        found: dict[int, list[Known]] = {}
        cut = learner.cut(sequences, [list(range(len(rows)))])
        for work in learner.work("scoring", sequences, cut):
            part = sequences.pack(work.rows, learner.device)
            said = outputs(learner.model, part, temperature=1.0, top_k=1)
            right_A = part.collect(said["topk_id_NTK"][..., 0]) == part.target_A
            nll_N = -said["logp_NT"].double().sum(1)
            right_N = part.spread(right_A.double()).sum(1)
            length_N = part.mask_NT.sum(1)
            sums = zip(nll_N.tolist(), right_N.tolist(), length_N.tolist(), strict=True)
            if work.turn.counts:
                found[work.turn.number] = [Known(*each) for each in sums]
        return [known for some in learner.world.merge(found) for known in some]

    return learner.within_memory(measured)


def _spread(
    values: Sequence[float | None], places: Sequence[int], tasks: int
) -> list[float | None]:
    """Put values where their tasks stand; None for the others."""
    found: list[float | None] = [None] * tasks
    for place, value in zip(places, values, strict=True):
        found[place] = value
    return found
