"""Held-out rows with labels: what they say beside, or in place of, sampled answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from groupwise.evaluate.evaluate import Evaluation
from groupwise.records import Task
from groupwise.stages.parts import Parts
from groupwise.stages.score_measures import mean

Values = list[float | None]


def judged(
    sample: Callable[[Parts[Any]], Evaluation],
    parts: Parts[Any],
    labelled: Sequence[Task],
    right: Sequence[float | None],
    others: Mapping[str, float],
) -> Evaluation:
    """Return the evaluation of held-out rows: sampled where an answer can be graded.

    `right` says of each labelled row whether the policy agrees with it. That is the accuracy where
    nothing can be verified; else it stands beside it, among the `others`.
    """
    gradable = [task for task in parts.held_out if _gradable(parts, task)]
    accuracy, stderr = mean(right), None
    known = [x for x in right if x is not None]
    if accuracy is not None and len(known) > 1:
        spread = math.fsum((x - accuracy) ** 2 for x in known) / (len(known) - 1)
        stderr = math.sqrt(spread / len(known))
    if gradable or not labelled:
        found = sample(replace(parts, held_out=gradable))
        found = replace(found, others={**found.others, **others})
        verified = any(task.answer is not None for task in gradable)
        if not labelled or (verified and found.accuracy is not None):
            return found
        by_task = {**found.by_task, "eval/accuracy": list(right)} if known else found.by_task
        return replace(
            found, accuracy=accuracy, stderr=stderr, scores=tuple(right), by_task=by_task
        )
    return Evaluation(
        accuracy=accuracy,
        stderr=stderr,
        reward=None,
        length=None,
        truncated_share=None,
        failed_share=None,
        tasks=len(labelled),
        samples=1,
        examples=(),  # the answers are the data's, before and after
        scores=tuple(right),
        by_task={"eval/accuracy": list(right)} if known else {},
        others=dict(others),
    )


def _gradable(parts: Parts[Any], task: Task) -> bool:
    """Tell whether samples of a row can be graded: by its answer, or by parts that need none."""
    return task.answer is not None or not parts.grader.needs_answer(task.grader)
