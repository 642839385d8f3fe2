"""The policy as the judge of its own answers: asked, read, averaged (2401.10020).

A judgement is sampled under a randomness of its own, named by seed, prompt, draw, sample and number
alone, and nothing is learned from its tokens. What can't be read is no judgement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from groupwise.common.progress import phase
from groupwise.data.tasks import prompt_text
from groupwise.engine.protocol import Engine, Request, Sampling, Stream, judge_stream
from groupwise.errors import ConfigError, ModelError
from groupwise.graders.answers import final
from groupwise.graders.judge import ASK_POINTS, POINTS, question, read_score
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.records import Completion, Grade, Rollout

PART = "self_judge"  # its name among the parts of a reward


class SelfJudgement(NamedTuple):
    """One of the things that the policy said of an answer."""

    score: int | None  # None: no score could be read
    text: str
    tokens: int


@dataclass(frozen=True)
class JudgedAnswer:
    """The judgements of an answer; none where the question does not fit the model."""

    prompt_tokens: int
    said: tuple[SelfJudgement, ...]

    @property
    def scores(self) -> list[int]:
        """Return the scores that could be read."""
        return [each.score for each in self.said if each.score is not None]

    @property
    def mean(self) -> float | None:
        """Return the mean score, None without any."""
        return fmean(self.scores) if self.scores else None


@dataclass(frozen=True)
class SelfJudge:
    """How the policy is asked, and how often."""

    tokenizer: Tokenizer
    rubric: str
    judgements: int
    sampling: Sampling
    context: int  # tokens that the model holds
    ends: tuple[str, ...] = ()  # texts that end an answer

    def prompt(self, request: str, response: str) -> tuple[int, ...]:
        """Return the question about an answer, in the model's chat template where it has one."""
        content = judge_prompt(self.rubric, request, response)
        if self.tokenizer.template is None:
            return tuple(self.tokenizer.prompt(f"{content}\n\n"))
        return tuple(self.tokenizer.prompt([{"role": "user", "content": content}]))

    def check(self) -> None:
        """Refuse a model that can't be asked: by its vocabulary, its template or its context."""
        try:
            tokens = len(self.prompt("", ""))
        except ModelError as error:
            raise ConfigError(
                f"The policy can't be asked to judge its answers: {error} Take another model, "
                "other words (reward.rubric), or recipe=best_of_group_dpo, where reward.parts "
                "grades."
            ) from error
        most = self.sampling.max_tokens
        if tokens + most >= self.context:
            raise ConfigError(
                f"The question that the policy judges its answers by has {tokens:,} tokens without "
                f"an answer, a judgement up to {most:,} (recipe.pairing.max_tokens), and the model "
                f"holds {self.context:,}. Lower recipe.pairing.max_tokens, shorten reward.rubric, "
                "or take a model with a longer context."
            )

    def read(self, completion: Completion) -> SelfJudgement:
        """Return what a completion says; cut off, its last line may be a verdict it only quotes."""
        whole = completion.finish == "eos"
        text = self.tokenizer.decode(completion.token_ids[:-1] if whole else completion.token_ids)
        return SelfJudgement(read_score(text) if whole else None, text, len(completion.token_ids))

    def ask(self, engine: Engine, answers: Sequence[Rollout], of: Stream) -> list[JudgedAnswer]:
        """Return the judgements of each answer, which is of that stream."""
        prompts = [
            self.prompt(prompt_text(answer.task.prompt), final(answer.said, self.ends))
            for answer in answers
        ]
        room = self.context - self.sampling.max_tokens
        requests = {
            number: Request(
                prompt,
                self.judgements,
                prompt_id=answer.task.id,
                draw=answer.draw,
                stream=judge_stream(of, answer.sample),
            )
            for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            if len(prompt) <= room
        }
        with phase("judging", self.judgements * len(requests), "judgements") as told:
            asked = list(requests.values())
            groups = engine.generate(asked, self.sampling, wrote=told) if asked else []
        written = dict(zip(requests, groups, strict=True))
        return [
            JudgedAnswer(len(prompt), tuple(self.read(each) for each in written.get(number, ())))
            for number, prompt in enumerate(prompts)
        ]


def judge_prompt(rubric: str, request: str, response: str) -> str:
    """Return the text that asks for a judgement, as rows that teach judging have it, too."""
    parts = [("REQUEST", request), ("RESPONSE", response)]
    return "\n\n".join(question(rubric or POINTS, parts, ASK_POINTS))


def read_rubric(path: str) -> str:
    """Return what points are given for, "" for the rubric of the house."""
    if not path:
        return ""
    try:
        text = Path(path).expanduser().read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reward.rubric = {path!r} can't be read: {error}.") from error
    if not text:
        raise ConfigError(f"reward.rubric = {path!r} is empty. Write what points are given for.")
    return text


def with_judgements(rollout: Rollout, judged: JudgedAnswer) -> Rollout:
    """Return the answer with the mean judgement as its reward; without any it has none."""
    return replace(rollout, grade=judged_grade(rollout.grade, judged))


def judged_grade(grade: Grade, judged: JudgedAnswer) -> Grade:
    """Return the grade that judgements make; what verified the answer stays beside them."""
    parts = {**grade.parts, PART: judged.mean}
    if judged.mean is not None:
        scores = ", ".join("–" if x.score is None else str(x.score) for x in judged.said)
        texts = "\n\n".join(f"[{n}] {x.text}" for n, x in enumerate(judged.said, 1))
        return Grade(judged.mean, parts, grade.correct, reason=f"judged {scores}\n\n{texts}")
    if judged.said:
        count, text = len(judged.said), judged.said[0].text
        why = f"no score in {count} judgements, the first: {text!r:.200}"
    else:
        why = f"the question about it has {judged.prompt_tokens} tokens, which the model can't hold"
    return Grade(None, parts, grade.correct, "abstained", f"{PART}: {why}")
