"""The part `reasoning_gym` of a reward: the scorer that belongs to a row's task."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from groupwise.data.tasks import prompt_text
from groupwise.graders import answers
from groupwise.graders.functions import TIMEOUT
from groupwise.graders.parts import REPEATS, Mark, SampleToGrade
from groupwise.graders.pool import WORK_MEMORY, Outcome, Pool
from groupwise.records import Task

# The package's own convention. The last pair counts; thoughts are cut off before.
TAGS = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


class GymScorer:
    """A grader that scores the text in the last <answer> tags; without tags, all after the
    thoughts.

    A scorer that raises has met a text that it can't read. That is no right answer, and the reason
    is kept. Several evaluate what they are given, so they run in worker processes, and one that
    takes too long is stopped: that is no right answer either, nor is one over which the process
    dies, unless the row's own does the same.
    """

    decides = True
    needs_answers = False

    def __init__(self, ends: Sequence[str], timeout: float = TIMEOUT) -> None:
        self.ends, self.timeout = ends, timeout

    def problem(self, task: Task) -> str:
        metadata = task.columns.get("metadata")
        named = isinstance(metadata, Mapping) and metadata.get("source_dataset")
        return "" if named else "it has no column metadata with source_dataset, the task's name"

    def grade(self, samples: Sequence[SampleToGrade]) -> list[Mark]:
        """Grade all that needs its scorer at once; the rest is clear."""
        clear = [self._clear(sample) for sample in samples]
        asked = [s for s, mark in zip(samples, clear, strict=True) if mark is None]
        told = iter(self._ask(asked))
        return [next(told) if mark is None else mark for mark in clear]

    def _clear(self, sample: SampleToGrade) -> Mark | None:
        if why := self.problem(sample.task):
            return Mark(status="abstained", reason=why)
        answer = self._answer(sample)
        if not answer:
            return Mark(0.0, reason="no answer")  # some scorers take nothing for a "no"
        if answer == prompt_text(sample.task.prompt).strip():
            return Mark(0.0, reason=REPEATS)  # some give a part for names that stand there
        return None

    def _answer(self, sample: SampleToGrade) -> str:
        return extracted(answers.final(sample.text, self.ends))

    def _ask(self, samples: Sequence[SampleToGrade]) -> list[Mark]:
        items = [_item(sample.task, self._answer(sample)) for sample in samples]
        if not items:
            return []
        told = workers().work_out(items, self.timeout)
        lost = [row for row, outcome in enumerate(told) if outcome.status != "ok"]
        trials = [(*items[row][:2], str(items[row][3]["answer"]), items[row][3]) for row in lost]
        by_itself = dict(zip(lost, workers().work_out(trials, self.timeout), strict=True))
        return [
            _mark(item[0], outcome, row in by_itself and by_itself[row].status == "ok")
            for row, (item, outcome) in enumerate(zip(items, told, strict=True))
        ]


def _mark(name: str, outcome: Outcome, is_answers_fault: bool) -> Mark:
    if outcome.status == "ok":
        return Mark(*outcome.value)
    said = f"the scorer of {name}: {outcome.reason}"
    if is_answers_fault:  # what is evaluated may compute, sleep, or end its process
        return Mark(0.0, reason=said)
    return Mark(status="error" if outcome.status == "error" else "timeout", reason=said)


def _item(task: Task, answer: str) -> tuple[Any, ...]:
    metadata = task.columns["metadata"]
    entry = {"question": prompt_text(task.prompt), "answer": task.answer, "metadata": metadata}
    return metadata["source_dataset"], task.columns.get("task_options") or {}, answer, entry


@lru_cache(maxsize=1)
def workers() -> Pool:
    return Pool("groupwise.graders.gym_worker:judge", memory=WORK_MEMORY)


def extracted(text: str) -> str:
    """Return the contents of the last pair of tags, else all of the text."""
    pairs = TAGS.findall(text)
    return (pairs[-1] if pairs else text).strip()
