"""From tasks to graded rollouts: the engine writes, the grader judges; for training and evaluation.

Token ids go from the engine to the learner as they are. Text is made from them for the grader and
for readers, and never turned back into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from groupwise.common.progress import phase
from groupwise.engine.protocol import Engine, Request, Sampling
from groupwise.graders.recorded_verdicts import Key, Ledger
from groupwise.graders.rubric import Grader
from groupwise.model.formats.tokenizer import Tokenizer
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
    with phase("sampling", samples * len(requests), "completions") as told:
        engine.wrote = told
        groups = engine.generate(requests, sampling)
    return [Written(task, draw, group) for (task, draw), group in zip(prompts, groups, strict=True)]


def grade(
    grader: Grader,
    tokenizer: Tokenizer,
    written: Sequence[Written],
    known: Ledger | None = None,
    first: int = 0,
) -> list[list[Rollout]]:
    """Every completion with its text and grade, group by group; samples count from `first`.

    What is `known` is taken out of there instead of being graded again.
    """
    every = tokenizer.decode_all([c.token_ids for group in written for c in group.completions])
    following = iter(every)
    samples = [
        (group, number, completion, next(following))
        for group in written
        for number, completion in enumerate(group.completions, first)
    ]
    grades = [
        known.pop(Key(group.task.id, group.draw, number, text), None) if known else None
        for group, number, _, text in samples
    ]
    asked = [
        (group.task, text, completion.token_ids, completion.finish)
        for (group, _, completion, text), found in zip(samples, grades, strict=True)
        if found is None
    ]
    with phase("grading", len(asked), "answers"):
        told = iter(grader.grade(asked))
    rollouts = iter(
        [
            Rollout(group.task, group.draw, number, completion, text, found or next(told))
            for (group, number, completion, text), found in zip(samples, grades, strict=True)
        ]
    )
    return [[next(rollouts) for _ in group.completions] for group in written]


class Beside:
    """Grades groups while others are still being sampled, where engine and grader allow it.

    What comes out is the same as grading afterwards, and groups are graded in the same order: a
    function that keeps count sees no difference.
    """

    def __init__(
        self,
        engine: Engine,
        grader: Grader,
        tokenizer: Tokenizer,
        prompts: Sequence[tuple[Task, int]],
        known: Ledger | None = None,
    ) -> None:
        self.engine, self.grader, self.tokenizer, self.prompts = engine, grader, tokenizer, prompts
        self.known = known
        self.early: dict[int, tuple[list[Completion], Future[list[list[Rollout]]]]] = {}
        self.waiting: dict[int, list[Completion]] = {}  # for those before them
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="grading")

    def __enter__(self) -> Beside:
        if self.grader.by_group:
            self.engine.done = self._take
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.engine.done = None
        self.thread.shutdown(wait=False, cancel_futures=error is not None)

    def _take(self, number: int, completions: list[Completion]) -> None:
        self.waiting[number] = completions
        while (turn := len(self.early)) in self.waiting:
            written = self.waiting.pop(turn)
            group = Written(*self.prompts[turn], written)
            graded = self.thread.submit(grade, self.grader, self.tokenizer, [group], self.known)
            self.early[turn] = (written, graded)

    def rollouts(self, written: Sequence[Written]) -> list[list[Rollout]]:
        """Every group graded. One that was sampled again since it was handed on is graded again."""
        early = {
            number: graded
            for number, (completions, graded) in self.early.items()
            if all(
                one is other
                for one, other in zip(completions, written[number].completions, strict=True)
            )
        }
        late = [group for number, group in enumerate(written) if number not in early]
        rest = iter(grade(self.grader, self.tokenizer, late, self.known) if late else [])
        with phase("grading", len(written), "groups") as told:
            graded = []
            for number in range(len(written)):
                graded.append(early[number].result()[0] if number in early else next(rest))
                told(len(graded))
        return graded


def failed(grade: Grade) -> bool:
    return grade.status in ("error", "timeout")


def verdict(grade: Grade) -> bool | None:
    """Right or wrong; None where nothing says so, or where a part of the grading failed."""
    return None if failed(grade) else grade.correct
