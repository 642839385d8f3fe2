"""Pairs of a model's own answers, chosen by a judge: rows for preference recipes.

Prompts are done a few at a time, and what is known of each is written down at once: the same
command goes on where it was stopped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from groupwise import config as configuration
from groupwise.common.progress import phase
from groupwise.config import Config
from groupwise.engine.protocol import Engine, Sampling
from groupwise.errors import ConfigError
from groupwise.model.formats.checkpoint import Loaded
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.prepare.engines import MakeEngine, judge_of
from groupwise.prepare.placing import placed
from groupwise.prepare.rollouts import SampledGroup, grade, sample_groups
from groupwise.prepare.setup import Setup, sampling_of, set_up
from groupwise.probing.probe import ProbeRequest, check, first_prompts, policy_for
from groupwise.records import Completion, Rollout, Task
from groupwise.runfiles.files import append_lines, write_atomic

AT_A_TIME = 8  # prompts between two lines of what is known
STREAM = "pairs"  # of random numbers

SAME = "both answers are the same text"
CUT = "an answer was cut off at engine.max_tokens"
TIE = "the judge calls them equal"
FAILED = "the judge gave no verdict"


@dataclass(frozen=True)
class PairRequest:
    """How many prompts, and whether the judge sees both answers at once."""

    prompts: int = 32
    compare: bool = False  # else each answer is scored alone, and the higher score is chosen


@dataclass
class LabelledPairs:
    """The rows, and what was left out and why."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def take(self, line: Mapping[str, Any]) -> None:
        if line["why"]:
            self.left_out[line["why"]] += 1
        else:
            self.rows.append(line["row"])


@dataclass
class PreparedPairs:
    """Pairs in the making: all that they are made with, loaded and checked. `run` samples."""

    asked: PairRequest
    setup: Setup
    engine: Engine
    tasks: list[Task]
    sampling: Sampling
    facts: dict[str, Any]  # about model and judge, for every row

    def run(self, out: Path) -> LabelledPairs:
        """Sample, judge, and write `out` when all is known; what is known so far stands beside."""
        beside = out.with_name(out.name + ".part")
        made, done = LabelledPairs(), set[int]()
        for line in self._known(beside):
            made.take(line)
            done.add(line["id"])
        left = [task for task in self.tasks if task.id not in done]
        with phase("labelling pairs", len(self.tasks), "prompts") as told:
            for at in range(0, len(left), AT_A_TIME):
                told(len(self.tasks) - len(left) + at)
                lines = self._judged(left[at : at + AT_A_TIME])
                append_lines(beside, [json.dumps(x, ensure_ascii=False) for x in lines])
                for line in lines:
                    made.take(line)
        if made.rows:
            rows = (json.dumps(row, ensure_ascii=False, default=str) for row in made.rows)
            write_atomic(out, "".join(f"{row}\n" for row in rows))
        beside.unlink(missing_ok=True)
        return made

    def _known(self, beside: Path) -> Iterator[dict[str, Any]]:
        """Yield what an earlier start of the same request found out."""
        if not beside.exists():
            append_lines(beside, [json.dumps(self.facts)])
            return
        whole = [line for line in beside.read_text().splitlines(keepends=True) if line[-1] == "\n"]
        first, *others = [json.loads(line) for line in whole] or [None]
        if first != self.facts:
            raise ConfigError(
                f"{beside} is what another request left: other model, judge, data or settings. "
                "Repeat that one to go on with it, or remove the file to begin anew."
            )
        yield from others

    def _judged(self, tasks: Sequence[Task]) -> list[dict[str, Any]]:
        """Return a line for each prompt: its row, or why it has none."""
        named = [(task, 0) for task in tasks]
        written = sample_groups(self.engine, named, 2, self.sampling, stream=STREAM)
        tokenizer = self.setup.loaded.tokenizer
        graded = grade(self.setup.grader, tokenizer, self._as_asked(written))
        lines = []
        for group, verdicts in zip(written, graded, strict=True):
            texts = [_said(completion, tokenizer) for completion in group.completions]
            cut = any(completion.truncated for completion in group.completions)
            scores = _scores(verdicts)
            why = CUT if cut else SAME if texts[0] == texts[1] else why_not(scores)
            row = {} if why else self._row(group.task, texts, scores)
            lines.append({"id": group.task.id, "why": why, "row": row})
        return lines

    def _as_asked(self, written: Sequence[SampledGroup]) -> list[SampledGroup]:
        """Return what the judge is asked about: both answers, or one with the other beside it."""
        if not self.asked.compare:
            return list(written)
        tokenizer = self.setup.loaded.tokenizer
        return [
            SampledGroup(
                replace(group.task, answer=_said(group.completions[1], tokenizer)),
                group.draw,
                group.completions[:1],
            )
            for group in written
        ]

    def _row(
        self, task: Task, texts: Sequence[str], scores: Sequence[float | None]
    ) -> dict[str, Any]:
        first, second = scores
        assert first is not None and second is not None
        chosen, rejected = texts if first > second else reversed(texts)
        about = {**self.facts, "id": task.id, "scores": sorted([first, second], reverse=True)}
        return {"prompt": task.prompt, "chosen": chosen, "rejected": rejected, "labelled": about}


def why_not(scores: Sequence[float | None]) -> str:
    """Return why two scores make no pair; "" where they do."""
    if any(score is None for score in scores):
        return FAILED
    return TIE if scores[0] == scores[1] else ""


def _scores(verdicts: Sequence[Rollout]) -> list[float | None]:
    """Return a score for each answer; of one verdict about two, the second's is the rest to 1."""
    scores = [verdict.grade.reward for verdict in verdicts]
    if len(scores) == 1:
        (first,) = scores
        return [first, None if first is None else 1.0 - first]
    return scores


def _said(completion: Completion, tokenizer: Tokenizer) -> str:
    ids = list(completion.token_ids)
    while ids and ids[-1] in tokenizer.eos_ids:
        ids.pop()
    return tokenizer.decode(ids)


def prepare_pairs(
    config: Config,
    asked: PairRequest,
    *,
    checkpoint: Path | None = None,
    engine: MakeEngine | None = None,
) -> PreparedPairs:
    """Prepare everything that can fail, before anything is sampled."""
    # What a run of the model learned from is no matter here.
    config = replace(placed(config), recipe=configuration.load().recipe)
    check(config, (config.data.template,), (config.engine.temperature,), ProbeRequest())
    if asked.prompts < 1:
        raise ConfigError(f"--prompts {asked.prompts} is too few. Take 1 or more.")
    if config.engine.temperature == 0:
        raise ConfigError(
            "engine.temperature=0 gives the same answer twice: there is no pair. Take 0.7 or 1."
        )

    def model_for(tasks: Sequence[Task], held_out: Sequence[Task]) -> Loaded:
        return policy_for(config, checkpoint, tasks, held_out)

    setup = set_up(config, model_for, learns=False, answered=not asked.compare)
    facts = {
        "model": str(checkpoint or config.model.path),
        "judge": list(config.reward.parts),
        "compare": asked.compare,
        "seed": config.seed,
        "temperature": config.engine.temperature,
        "max_tokens": config.engine.max_tokens,
        "data": list(config.data.sources),
    }
    return PreparedPairs(
        asked=asked,
        setup=setup,
        engine=judge_of(config, setup.loaded, engine),
        tasks=first_prompts(config, setup, asked.prompts),
        sampling=sampling_of(config),
        facts=facts,
    )
