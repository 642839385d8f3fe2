"""The part `reasoning_gym` of a reward: the scorer that belongs to a row's task."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from groupwise.data import gym
from groupwise.data.tasks import prompt_text
from groupwise.errors import DataError
from groupwise.graders import answers
from groupwise.graders.parts import Mark, Sample
from groupwise.records import Task

# The package's own convention. The last pair counts; thoughts are cut off before.
TAGS = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


class GymScorer:
    """The answer is what stands in the last <answer> tags; without tags, all behind the thoughts.

    A scorer that raises has met a text that it can't read. That is no right answer, and the reason
    is kept.
    """

    decides = True
    needs_answers = False

    def __init__(self, ends: Sequence[str]) -> None:
        self.ends = ends

    def problem(self, task: Task) -> str:
        metadata = task.columns.get("metadata")
        named = isinstance(metadata, Mapping) and metadata.get("source_dataset")
        return "" if named else "it has no column metadata with source_dataset, the task's name"

    def grade(self, samples: Sequence[Sample]) -> list[Mark]:
        return [self._mark(sample) for sample in samples]

    def _mark(self, sample: Sample) -> Mark:
        task, why = sample.task, self.problem(sample.task)
        if why:
            return Mark(status="abstained", reason=why)
        answer = extracted(answers.final(sample.text, self.ends))
        if not answer:
            return Mark(0.0, reason="no answer")  # some scorers take nothing for a "no"
        metadata = task.columns["metadata"]
        entry = {"question": prompt_text(task.prompt), "answer": task.answer, "metadata": metadata}
        name, options = metadata["source_dataset"], task.columns.get("task_options") or {}
        try:
            return Mark(gym.score(name, options, answer, entry))
        except DataError as error:  # no such task, or no package
            return Mark(status="error", reason=str(error))
        except Exception as error:  # the boundary to the package
            return Mark(0.0, reason=f"the scorer of {name} raised {type(error).__name__}: {error}")


def extracted(text: str) -> str:
    """What is in the last pair of tags, else all of the text."""
    pairs = TAGS.findall(text)
    return (pairs[-1] if pairs else text).strip()
