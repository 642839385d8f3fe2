"""From tasks to graded rollouts: the engine writes, the grader judges; for training and evaluation.

Token ids go from the engine to the learner as they are. Text is made from them for the grader and
for readers, and never turned back into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING

from groupwise.common.progress import phase
from groupwise.engine.protocol import Done, Engine, Request, Sampling
from groupwise.graders.environment import NAME as ENVIRONMENT
from groupwise.graders.parts import SampleToGrade
from groupwise.graders.recorded_verdicts import Key, Ledger
from groupwise.graders.rubric import Grader
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.records import Branch, Completion, Episode, Grade, Rollout, Task

if TYPE_CHECKING:
    from groupwise.prepare.episodes import Turns


@dataclass(frozen=True)
class SampledGroup:
    """A group before it is graded: one prompt's completions."""

    task: Task
    draw: int
    completions: list[Completion]
    of: tuple[int, int] | None = None  # the sample and its position that they all go on from

    def named(self, number: int) -> tuple[int, Branch | None]:
        """Return the number of a sample in its group, and which of its branches it is."""
        return (number, None) if self.of is None else (self.of[0], Branch(self.of[1], number))


def sample_groups(
    engine: Engine,
    prompts: Sequence[tuple[Task, int]],
    samples: int | Sequence[int],
    sampling: Sampling,
    stream: str = "train",
    done: Done | None = None,
    turns: Turns | None = None,
) -> list[SampledGroup]:
    """Sample completions for (task, draw number) pairs, in order; tell `done` of each.

    `samples` is one number, or one for each. With `turns` they are episodes: environments answer
    the policy, and all prompts have equally many.
    """
    if turns is not None:
        assert isinstance(samples, int)
        return turns.sample(engine, prompts, samples, sampling, stream, done)
    counts = [samples] * len(prompts) if isinstance(samples, int) else samples
    requests = [
        Request(task.token_ids, count, prompt_id=task.id, draw=draw, stream=stream)
        for (task, draw), count in zip(prompts, counts, strict=True)
    ]
    with phase("sampling", sum(counts), "completions") as told:
        groups = engine.generate(requests, sampling, done=done, wrote=told)
    return [
        SampledGroup(task, draw, group) for (task, draw), group in zip(prompts, groups, strict=True)
    ]


def grade(
    grader: Grader,
    tokenizer: Tokenizer,
    written: Sequence[SampledGroup],
    known: Ledger | None = None,
    first: int = 0,
) -> list[list[Rollout]]:
    """Return every completion with its text and grade, group by group; samples count from `first`.

    What is `known` is taken out of there instead of being graded again.
    """
    every = tokenizer.decode_all([c.token_ids for group in written for c in group.completions])
    following = iter(every)
    samples = [
        (group, group.named(number), completion, next(following))
        for group in written
        for number, completion in enumerate(group.completions, first)
    ]
    grades = [
        (known or {}).pop(Key(group.task.id, group.draw, number, text, branch), None)
        or _ungraded(completion)
        for group, (number, branch), completion, text in samples
    ]
    last = [_last_text(completion, tokenizer) for _, _, completion, _ in samples]
    asked = [
        _to_grade(group.task, text if own is None else own, completion)
        for (group, _, completion, text), own, found in zip(samples, last, grades, strict=True)
        if found is None
    ]
    with phase("grading", len(asked), "answers"):
        told = iter(grader.grade(asked))
    rollouts: list[Rollout] = []
    for (group, named, completion, text), own, found in zip(samples, last, grades, strict=True):
        given, (number, branch) = found, named
        if given is None:
            given = _placed(next(told), completion, tokenizer)
            if completion.episode is not None:
                weight = grader.weights.get(ENVIRONMENT, 0.0)
                given = with_turn_rewards(given, completion, completion.episode, tokenizer, weight)
        rollouts.append(
            Rollout(group.task, group.draw, number, completion, text, given, own, branch)
        )
    made = iter(rollouts)
    return [[next(made) for _ in group.completions] for group in written]


def _to_grade(
    task: Task, text: str, done: Completion
) -> SampleToGrade | tuple[Task, str, Sequence[int], str]:
    asked = (task, text, done.own_ids, done.finish)
    return asked if done.episode is None else SampleToGrade(*asked, done.episode)


def _ungraded(completion: Completion) -> Grade | None:
    """Return the grade of an episode that nobody learns from, for the way in which it ended."""
    episode = completion.episode
    if episode is None or not episode.left_out:
        return None
    why = f"the episode ended by {episode.stop}" + (f": {episode.reason}" if episode.reason else "")
    if episode.stop == "timeout":
        return Grade(None, status="timeout", reason=why)
    return Grade(None, status="error" if episode.failed else "abstained", reason=why)


def with_turn_rewards(
    given: Grade, completion: Completion, episode: Episode, tokenizer: Tokenizer, weight: float
) -> Grade:
    """Return the grade with a reward for each turn of an episode: they add up to that of the whole.

    The last turn has what the environment said of it and of the whole, and all other parts of the
    reward but those that give steps of their own.
    """
    if len(episode.turns) < 2 or given.reward is None:
        return given
    ends = [
        len(tokenizer.decode(completion.token_ids[: turn.end])) for turn in completion.own_turns
    ]
    rewards = [weight * (each.reward or 0.0) for each in episode.turns[:-1]]
    own = sum(reward for _, reward in given.steps)
    rewards.append(given.reward - own - sum(rewards))
    steps = (*given.steps, *zip(ends, rewards, strict=True))
    return replace(given, steps=tuple(sorted(steps)))


def _last_text(completion: Completion, tokenizer: Tokenizer) -> str | None:
    """Return what the policy says in the end; None where the completion is nothing else."""
    if completion.mask_T is None:
        return None
    turn = completion.last_turn
    return tokenizer.decode(completion.token_ids[turn.start : turn.end])


def _placed(given: Grade, completion: Completion, tokenizer: Tokenizer) -> Grade:
    """Move the steps in the grade of a last turn to where they stand in the whole text."""
    if completion.mask_T is None or not given.steps:
        return given
    before = len(tokenizer.decode(completion.token_ids[: completion.last_turn.start]))
    return replace(given, steps=tuple((before + end, reward) for end, reward in given.steps))


class ConcurrentGrading:
    """Grades groups while others are still being sampled, where engine and grader allow it.

    `sample_groups` tells `take` of every group. What comes out is the same as grading afterwards,
    and groups are graded in the same order: a function that keeps count sees no difference.
    """

    def __init__(
        self,
        grader: Grader,
        tokenizer: Tokenizer,
        prompts: Sequence[tuple[Task, int]],
        known: Ledger | None = None,
    ) -> None:
        self.grader, self.tokenizer, self.prompts = grader, tokenizer, prompts
        self.known = known
        self.early: dict[int, tuple[list[Completion], Future[list[list[Rollout]]]]] = {}
        self.waiting: dict[int, list[Completion]] = {}  # for those before them
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="grading")

    def __enter__(self) -> ConcurrentGrading:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.thread.shutdown(wait=False, cancel_futures=error is not None)

    def take(self, number: int, completions: list[Completion]) -> None:
        """Grade this group, once those before it are."""
        if not self.grader.by_group:
            return
        self.waiting[number] = completions
        while (turn := len(self.early)) in self.waiting:
            written = self.waiting.pop(turn)
            group = SampledGroup(*self.prompts[turn], written)
            graded = self.thread.submit(grade, self.grader, self.tokenizer, [group], self.known)
            self.early[turn] = (written, graded)

    def rollouts(self, written: Sequence[SampledGroup]) -> list[list[Rollout]]:
        """Return every group graded; grade again what was sampled again since it was handed on."""
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
            for number, group in enumerate(written):
                found = early[number].result()[0] if number in early else next(rest)
                if found and found[0].task is not group.task:  # known by its whole prompt now
                    found = [replace(rollout, task=group.task) for rollout in found]
                graded.append(found)
                told(len(graded))
        return graded


def failed(grade: Grade) -> bool:
    return grade.status in ("error", "timeout")


def verdict(grade: Grade) -> bool | None:
    """Right or wrong; None where nothing says so, or where a part of the grading failed."""
    return None if failed(grade) else grade.correct
