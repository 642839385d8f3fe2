"""From tasks to graded rollouts: the engine writes, the grader judges; for training and evaluation.

Token ids go from the engine to the learner as they are. Text is made from them for the grader and
for readers, and never turned back into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.engine.protocol import Engine, Request, Sampling
from groupwise.graders.rubric import Grader
from groupwise.model.tokenizer import Tokenizer
from groupwise.records import Completion, Grade, Rollout, Task


@dataclass(frozen=True)
class Written:
    """A group before it is graded: one prompt's completions."""

    task: Task
    draw: int
    completions: list[Completion]


def write(
    engine: Engine,
    prompts: Sequence[tuple[Task, int]],
    samples: int,
    sampling: Sampling,
    stream: str = "train",
) -> list[Written]:
    """Completions for (task, draw number) pairs, in order."""
    requests = [
        Request(task.token_ids, samples, prompt_id=task.id, draw=draw, stream=stream)  # type: ignore[arg-type]
        for task, draw in prompts
    ]
    groups = engine.generate(requests, sampling)
    return [Written(task, draw, group) for (task, draw), group in zip(prompts, groups, strict=True)]


def grade(grader: Grader, tokenizer: Tokenizer, written: Sequence[Written]) -> list[list[Rollout]]:
    """Every completion with its text and grade, group by group."""
    every = tokenizer.decode_all([c.token_ids for group in written for c in group.completions])
    following = iter(every)
    texts = [[next(following) for _ in group.completions] for group in written]
    grades = iter(
        grader.grade(
            [
                (group.task, text, c.token_ids, c.finish)
                for group, group_texts in zip(written, texts, strict=True)
                for text, c in zip(group_texts, group.completions, strict=True)
            ]
        )
    )
    return [
        [
            Rollout(group.task, group.draw, number, completion, text, next(grades))
            for number, (completion, text) in enumerate(
                zip(group.completions, group_texts, strict=True)
            )
        ]
        for group, group_texts in zip(written, texts, strict=True)
    ]


def failed(grade: Grade) -> bool:
    return grade.status in ("error", "timeout")
