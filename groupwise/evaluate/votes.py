"""Majority votes: which answers of a task are the same, by its own grader.

An answer is found as the grader finds it. Right ones are all the same: they equal the gold answer.
Wrong ones are compared with each other by the grader, one in the place of the gold answer. A sample
without an answer does not vote. Where many answers can be right (programs, countdown), or where a
function of the user's decides, equality of answers is not defined, and there is no vote.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import comb

from groupwise.evaluate.suites import grader_name
from groupwise.graders import answers, choice
from groupwise.graders.mathematics import grader as mathematics
from groupwise.graders.mathematics import numbers
from groupwise.graders.mathematics.extract import end_of, find
from groupwise.graders.mathematics.formulas import last_formula
from groupwise.graders.mathematics.notation import MAX_LENGTH, read
from groupwise.graders.parts import RewardPart, SampleToGrade, built_in
from groupwise.records import Rollout, Task

VOTING = ("number", "math", "choice", "exact")


def answer_of(
    grader: str, text: str, task: Task, ends: Sequence[str], *, cut: bool = False
) -> str | None:
    """Return a completion's answer, in a form that the grader reads; None without one."""
    if grader == "number":
        found = numbers.answer_number(answers.final(text, ends), cut=cut)
        return None if found is None else f"{found.value}{'%' if found.percent else ''}"
    if grader == "choice":
        return choice.chosen(text, choice.options(task.columns), tuple(ends), cut=cut)
    if grader == "math":
        return _expression(text, tuple(ends), cut)
    return answers.final(text, ends) or None


def _expression(text: str, ends: tuple[str, ...], cut: bool) -> str | None:
    how, said = find(text, ends, cut=cut)
    if how not in ("marked", "whole"):
        return said or None
    number = numbers.last_number(said) if how == "whole" else numbers.one_number(said)
    last = None if number is None else str(number.value)
    tries = [said, end_of(said), last_formula(said)]
    if how == "whole":
        alone = len(said) <= MAX_LENGTH and not mathematics.SENTENCE.search(said)
        tries = [said, last_formula(said)] if alone else [last_formula(said)]
    readable = (x for x in tries if x and (tree := read(x)) is not None and tree[0] != "text")
    return next(readable, None) or last or (said if how == "marked" else None) or None


def ballots(
    groups: Sequence[Sequence[Rollout]], decider: str | None, ends: Sequence[str]
) -> list[list[int] | None]:
    """Return for each task the number of each graded sample's answer: 0 is right, −1 abstains.

    None for a task without a notion of equal answers.
    """
    found: list[list[int] | None] = []
    pending: dict[tuple[int, str], str] = {}  # by group and answer: the grader
    given: list[list[str | None]] = []
    for at, group in enumerate(groups):
        task = group[0].task
        grader = grader_name(decider, task)
        own: list[str | None] = []
        for rollout in group:
            cut = rollout.completion.truncated
            votes = grader in VOTING
            answer = answer_of(grader, rollout.said, task, ends, cut=cut) if votes else None
            own.append(answer)
            if answer is not None and not rollout.grade.correct:
                pending[at, answer] = grader
        given.append(own)
        found.append([] if grader in VOTING else None)
    classes = _classes(pending, groups)
    for at, (group, own) in enumerate(zip(groups, given, strict=True)):
        if found[at] is not None:
            found[at] = [
                0 if rollout.grade.correct else -1 if answer is None else classes[at, answer]
                for rollout, answer in zip(group, own, strict=True)
            ]
    return found


def _classes(
    pending: Mapping[tuple[int, str], str], groups: Sequence[Sequence[Rollout]]
) -> dict[tuple[int, str], int]:
    """Number the answers from 1, the same for equal answers of a group.

    In rounds over all groups: the first answer that is left stands for its class, and the grader is
    asked once which of the others equal it.
    """
    parts: dict[str, RewardPart] = {}
    classes: dict[tuple[int, str], int] = {}
    left = dict(pending)
    number = 0
    while left:
        number += 1
        first: dict[int, str] = {}
        for at, answer in left:
            first.setdefault(at, answer)
        for at, answer in first.items():
            classes[at, answer] = number
            del left[at, answer]
        for grader in set(left.values()):
            part = parts.setdefault(grader, built_in(grader, ()))
            asked = [key for key, name in left.items() if name == grader]
            samples = [
                SampleToGrade(
                    _stand_in(groups[at][0].task, first[at]), _said(grader, answer), (), "eos"
                )
                for at, answer in asked
            ]
            for key, mark in zip(asked, part.grade(samples), strict=True):
                if mark.value == 1.0:
                    classes[key] = number
                    del left[key]
    return classes


def _stand_in(task: Task, answer: str) -> Task:
    """Return the task with another gold answer and no question, so that nothing can be repeated."""
    return replace(task, prompt="", answer=answer)


def _said(grader: str, answer: str) -> str:
    return f"\\boxed{{{answer}}}" if grader == "math" else answer


def majority(votes: Iterable[int], k: int) -> float:
    """Return the chance that the answer with the most votes of k samples is right, over all
    k-subsets.

    Votes are numbers of answers, 0 the right one, −1 none. Among answers with equally many votes
    each is as likely to be taken; where nobody votes, nothing is right. Exact: of every number j of
    right votes, the subsets are counted in which no other answer has more than j.
    """
    counts: dict[int, int] = {}
    silent = 0
    for vote in votes:
        if vote < 0:
            silent += 1
        else:
            counts[vote] = counts.get(vote, 0) + 1
    right = counts.pop(0, 0)
    others = list(counts.values())
    total = right + silent + sum(others)
    subsets_of = {n: [comb(n, i) for i in range(k + 1)] for n in {*others, right}}
    won: dict[int, int] = {}  # subsets in which no answer has more votes, by how many have as many
    for j in range(1, min(right, k) + 1):
        # Answers with fewer than j samples can never tie: they are picked freely.
        free = silent + sum(n for n in others if n < j)
        ways = {(0, 0): 1}  # by samples picked and answers that tie
        for n in (n for n in others if n >= j):
            grown: dict[tuple[int, int], int] = {}
            for (picked, ties), number in ways.items():
                for i in range(min(j, k - j - picked) + 1):
                    key = (picked + i, ties + (i == j))
                    grown[key] = grown.get(key, 0) + number * subsets_of[n][i]
            ways = grown
        for (picked, ties), number in ways.items():
            rest = k - j - picked
            if rest <= free:
                found = subsets_of[right][j] * number * comb(free, rest)
                won[ties] = won.get(ties, 0) + found
    # Whole numbers to the end: of a thousand samples they are too large for floats.
    return sum(found / ((1 + ties) * comb(total, k)) for ties, found in won.items())
