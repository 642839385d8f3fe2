"""Rejection sampling: the answers of earlier runs that are worth learning from.

What is chosen depends on the answers and the seed, never on the order in which they come.
"""

from __future__ import annotations

import hashlib
import re
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from groupwise.config.fields import Keep
from groupwise.data.selection import AnswerPlace
from groupwise.graders.form import CODE, SCRIPTS, WORD, WORDS, language_share
from groupwise.prepare.rollouts import failed
from groupwise.records import Rollout

SENTENCE = re.compile(r"[.!?;:\n]+")
SEVERAL = 3  # frequent words by which another language must be ahead in a sentence
FENCE = "```"
MARKS = re.compile(r"<[|｜][^|｜<>]{1,40}[|｜]>")  # special tokens, which are no words
PROGRAM = "code"  # the part of a reward that runs a program


@dataclass(frozen=True)
class EarlierAnswer:
    """An answer of an earlier run."""

    place: AnswerPlace
    prompt: str  # as the data have it, as JSON
    rollout: Rollout

    @property
    def text(self) -> str:
        return MARKS.sub("", self.rollout.text)


def fault(answer: EarlierAnswer, keep: Keep) -> str:
    """Return the first reason against an answer by itself; "" where there is none."""
    grade, done, text = answer.rollout.grade, answer.rollout.completion, answer.text
    reasons: dict[str, Callable[[], Any]] = {
        "failed": lambda: failed(grade),
        "wrong": lambda: keep.correct and grade.correct is False,
        "unjudged": lambda: keep.correct and grade.correct is None,
        "unended": lambda: keep.ended and done.finish != "eos",
        "empty": lambda: not text.strip(),
        "language": lambda: not in_one_language(text, keep.language),
        "paragraph": lambda: keep.paragraph and longest_paragraph(text) > keep.paragraph,
        "fences": lambda: not keep.fences and FENCE in text and not asks_for_program(grade.parts),
    }
    return next((name for name, holds in reasons.items() if holds()), "")


def in_one_language(text: str, least: float) -> bool:
    """Tell whether so much of the words is in one language; a text without words mixes none."""
    return not least or one_language_share(text) >= least


def one_language_share(text: str) -> float:
    """Return the share of the words that are in the language that most of them are in.

    Other scripts are told by their letters. Languages of the Latin script share many short words
    ("do", "no", "as", "die"), so a sentence counts as another's only where that language has
    several different frequent words more in it than the text's own.
    """
    plain = CODE.sub(" ", text)
    if not WORD.search(plain):
        return 1.0
    others = max(language_share(text, target) for target in SCRIPTS)
    if others >= 0.5:
        return others
    sentences = [words for each in SENTENCE.split(plain) if (words := WORD.findall(each.lower()))]
    main = max(WORDS, key=lambda name: sum(w in WORDS[name] for each in sentences for w in each))
    foreign = sum(len(each) for each in sentences if _of_another(set(each), main))
    return max(1 - others - foreign / sum(map(len, sentences)), 0.0)


def _of_another(words: set[str], main: str) -> bool:
    own = len(words & WORDS[main])
    return any(len(words & each) >= own + SEVERAL for each in WORDS.values())


def longest_paragraph(text: str) -> int:
    return max(map(len, text.splitlines()), default=0)


def asks_for_program(parts: Mapping[str, Any]) -> bool:
    return any(name.partition("(")[0] == PROGRAM for name in parts)


@dataclass
class _Prompt:
    """The answers to one prompt so far."""

    graded: int = 0
    right: int = 0
    passed: int = 0  # without a fault of their own
    ranks: dict[bytes, Any] = field(default_factory=dict)  # by text: the rank of its best answer
    best: list[tuple[Any, AnswerPlace, EarlierAnswer]] = field(default_factory=list)

    @property
    def solved(self) -> bool:
        return 0 < self.graded == self.right


class Sieve:
    """Takes answers one by one, and keeps those that may be chosen in the end."""

    def __init__(self, keep: Keep, seed: int) -> None:
        self.keep, self.seed = keep, seed
        self.prompts: dict[str, _Prompt] = {}
        self.dropped: Counter[str] = Counter()

    def look(self, answer: EarlierAnswer) -> None:
        own, grade = self.prompts.setdefault(answer.prompt, _Prompt()), answer.rollout.grade
        if not failed(grade) and grade.correct is not None:
            own.graded, own.right = own.graded + 1, own.right + grade.correct
        reason = fault(answer, self.keep)
        if reason:
            self.dropped[reason] += 1
            return
        own.passed += 1
        text = hashlib.sha256(answer.rollout.text.encode()).digest()[:16]
        # Of equal ones that comes first whose place does, in whatever order files are read.
        rank = (self._rank(answer), answer.place)
        if text in own.ranks and own.ranks[text] <= rank:
            return
        own.ranks[text] = rank
        own.best = [each for each in own.best if each[2].rollout.text != answer.rollout.text]
        insort(own.best, (*rank, answer), key=lambda each: each[:2])
        if self.keep.per_prompt:
            del own.best[self.keep.per_prompt :]

    def _rank(self, answer: EarlierAnswer) -> tuple[float, float]:
        chance = share(self.seed, "answer", answer.prompt, answer.rollout.text)
        reward = answer.rollout.grade.reward
        first = {
            "random": 0.0,
            "shortest": float(answer.rollout.completion.own_length),
            "reward": float("inf") if reward is None else -reward,
        }
        return first[self.keep.order], chance

    def kept(self) -> list[EarlierAnswer]:
        """Return what is learned from, in an order that depends on nothing but the answers."""
        return list(self._chosen())

    def _chosen(self) -> Iterator[EarlierAnswer]:
        for prompt, own in sorted(self.prompts.items()):
            if own.solved and share(self.seed, "prompt", prompt) >= self.keep.solved:
                self.dropped["solved"] += own.passed
                continue
            self.dropped["repeated"] += own.passed - len(own.ranks)
            self.dropped["per_prompt"] += len(own.ranks) - len(own.best)
            yield from (answer for *_, answer in own.best)


def share(seed: int, *words: str) -> float:
    """Return a number from 0 to 1 that is a function of the seed and the words."""
    told = hashlib.sha256("\0".join([str(seed), *words]).encode()).digest()
    return int.from_bytes(told[:7], "big") / 2.0**56
