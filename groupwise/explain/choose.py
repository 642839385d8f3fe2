"""Recipes recommended by questions and a decision table that is data.

Every row of the table says when it holds, whom it speaks for (or rules out) and why. Points add up;
what is ruled out stays out. A condition is written `key=value`, alternatives by commas, several
conditions by spaces.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import groupwise.recipes  # noqa: F401 - fills RECIPES
from groupwise.errors import RecipeError, RecipeWarning, nearest
from groupwise.explain.idle import Conditions, idle, told, updates_of
from groupwise.explain.memory import memory
from groupwise.methods.method import Method
from groupwise.recipes import RECIPES


@dataclass(frozen=True)
class RecipeQuestion:
    key: str
    text: str
    options: Mapping[str, str]  # the answer and what it means; the first is the default
    when: str = ""

    @property
    def default(self) -> str:
        return next(iter(self.options))


NO_YES = {"no": "", "yes": ""}
QUESTIONS = (
    RecipeQuestion(
        "verifiable",
        "Can answers be graded by a program, or by a reward you trust?",
        {"yes": "", "no": "only preferences or examples"},
    ),
    RecipeQuestion(
        "data",
        "What is there instead?",
        {
            "pairs": "labelled pairs",
            "answers": "good answers, as for fine-tuning",
            "prompts": "prompts only",
        },
        when="verifiable=no",
    ),
    RecipeQuestion(
        "steps", "Is there a trustworthy reward per step?", NO_YES, when="verifiable=yes"
    ),
    RecipeQuestion(
        "critic",
        "Is there memory for a critic?",
        {"no": "", "yes": "14 bytes a weight more in bfloat16; few of them as an adapter"},
        when="verifiable=yes",
    ),
    RecipeQuestion(
        "length",
        "How long are the answers?",
        {"short": "up to about a thousand tokens", "long": "thousands of tokens"},
        when="verifiable=yes",
    ),
    RecipeQuestion("moe", "Is the model a mixture of experts?", NO_YES, when="verifiable=yes"),
    RecipeQuestion(
        "group",
        "How many samples per prompt can you afford?",
        {"8+": "", "2-4": "", "1": ""},
        when="verifiable=yes",
    ),
    RecipeQuestion(
        "updates",
        "How many updates per batch of samples?",
        {"one": "strictly on-policy", "several": "reuse the samples"},
        when="verifiable=yes",
    ),
    RecipeQuestion(
        "engine",
        "Does a separate inference engine sample?",
        {"same": "learner and sampler agree", "separate": "they differ, or lag behind each other"},
        when="verifiable=yes",
    ),
    RecipeQuestion(
        "goal",
        "What should rise?",
        {"pass@1": "one answer is right", "pass@k": "one of k answers is right"},
        when="verifiable=yes",
    ),
)


@dataclass(frozen=True)
class DecisionRow:
    when: str
    recipes: str  # one or several names
    points: int  # 0 rules them out
    why: str


GROUPED = (
    "rloo gpg grpo grpo_process dapo dr_grpo lite_ppo reinforce_pp_baseline maxrl gspo gspo_token "
    "cispo rspo simko dppo olmo3 routing_replay routing_replay_r3 opo "
    "grpo_passk m2po turn_return_to_go"
)
ROWS = (
    # no verifier: preference pairs
    DecisionRow("data=pairs", "dpo", 10, "labelled pairs are all that it needs"),
    DecisionRow(
        "data=pairs", "best_of_group_dpo", 4, "goes on where the pairs end, with a judge of yours"
    ),
    DecisionRow(
        "data=pairs", "reward_model", 6, "a score for any answer: the reward of a run afterwards"
    ),
    DecisionRow("data=answers", "spin", 10, "sets your answers against the model's own"),
    DecisionRow("data=answers", "best_of_group_dpo", 4, "as a next round, with a judge of yours"),
    DecisionRow("data=prompts", "self_rewarding", 10, "the policy itself judges: teach it first"),
    DecisionRow("data=prompts", "best_of_group_dpo", 8, "pairs by a judge of yours"),
    # samples per prompt
    DecisionRow("group=1", "reinforce_pp", 6, "needs no group: the batch is its baseline"),
    DecisionRow("group=1", "remax", 5, "a greedy completion is the baseline of a single sample"),
    DecisionRow("group=1 critic=yes", "ppo", 7, "a critic gives single samples a baseline"),
    DecisionRow("group=1", GROUPED, 0, "has no baseline with one sample per prompt"),
    DecisionRow("group=2-4", "rloo", 5, "leave-one-out is unbiased from two samples on"),
    DecisionRow(
        "group=2-4", "reinforce_pp_baseline", 4, "takes its scale from the batch, not a tiny group"
    ),
    DecisionRow(
        "group=2-4", "dr_grpo", 3, "does not divide by a σ that few samples can't estimate"
    ),
    DecisionRow("group=8+", "dr_grpo", 3, "proportional to the true gradient, on a fixed scale"),
    DecisionRow("group=8+", "lite_ppo", 2, "a plain default: batch std and token mean"),
    DecisionRow("group=8+", "grpo", 1, "the reference point to compare with"),
    DecisionRow(
        "group=8+ updates=one length=long", "opo", 2, "a baseline by length: less variance"
    ),
    # rewards per step, critics
    DecisionRow(
        "steps=yes critic=no",
        "turn_return_to_go",
        8,
        "credits turns without bias, also where the policy decides when to stop",
    ),
    DecisionRow("steps=yes critic=no", "grpo_process", 12, "credits steps without a critic"),
    DecisionRow(
        "steps=yes critic=yes", "ppo", 12, "a critic spreads rewards over steps and tokens"
    ),
    DecisionRow("steps=yes critic=yes", "grpo_process", 10, "credits steps without a critic"),
    DecisionRow(
        "steps=yes moe=yes", "gspo_token", 7, "one ratio per answer, an advantage per step"
    ),
    DecisionRow(
        "steps=yes group=1", "reinforce_pp", 5, "sums token rewards still to come, without a group"
    ),
    DecisionRow(
        "steps=no critic=no length=short group=8+",
        "vineppo",
        1,
        "credits written steps by sampled values: time in place of a critic",
    ),
    DecisionRow("critic=yes steps=no", "ppo", 3, "credit per token from the critic"),
    DecisionRow(
        "critic=yes length=long", "vapo", 8, "λ by length keeps a critic useful on long answers"
    ),
    DecisionRow("critic=no", "ppo vapo", 0, "holds a critic in memory"),
    # long answers, mixtures of experts
    DecisionRow(
        "length=long",
        "dapo",
        5,
        "made for long chains of thought: truncation, dead groups, entropy",
    ),
    DecisionRow("length=long", "gspo", 4, "one ratio per answer: no noisier as answers grow"),
    DecisionRow(
        "moe=yes",
        "gspo",
        6,
        "its ratio outlives changed experts (it acts from the second update on)",
    ),
    DecisionRow("moe=yes", "rspo", 4, "weighs tokens down whose routing moved"),
    DecisionRow(
        "moe=yes engine=same updates=several",
        "routing_replay",
        3,
        "keeps the learner's own routing while a batch is learned",
    ),
    DecisionRow(
        "moe=yes engine=separate updates=one", "routing_replay_r3", 4, "keeps the engine's routing"
    ),
    # samples that are not the learner's own, or no longer
    DecisionRow("updates=several", "cispo", 4, "rare tokens keep their gradient over many updates"),
    DecisionRow("updates=several", "m2po", 2, "its clip goes by how far the batch is off"),
    DecisionRow("updates=several", "gspo dapo", 1, "published with several updates per batch"),
    DecisionRow(
        "updates=several",
        "rloo remax gpg opo flash_reinforce",
        0,
        "has no ratio: only the first update is right",
    ),
    DecisionRow(
        "engine=separate", "olmo3", 5, "carries a correction for the engine's own probabilities"
    ),
    DecisionRow(
        "engine=separate", "dppo", 4, "keeps its trust region around the engine that sampled"
    ),
    # the goal
    DecisionRow("goal=pass@k", "simko", 8, "keeps candidates besides the first alive"),
    DecisionRow("goal=pass@k", "grpo_passk", 4, "trains the maximum of a group: ties must be rare"),
    DecisionRow("goal=pass@k", "maxrl", 7, "weighs hard prompts by 1/p (0/1 rewards)"),
    DecisionRow(
        "goal=pass@k updates=several", "dapo", 2, "its higher upper clip is to keep entropy up"
    ),
)


@dataclass(frozen=True)
class SuggestedSetting:
    """A setting to add to a recommended recipe."""

    when: str
    path: str
    value: Any
    why: str
    fits: Callable[[Any], bool]  # is asked of recipes that weigh tokens


CHANGES = (
    SuggestedSetting(
        "engine=separate",
        "correction",
        "tis_token(cap=2.0)",
        "the engine's probabilities are not the learner's",
        lambda entry: not entry.correction and entry.ratio.get("anchor") != "sampler",
    ),
    SuggestedSetting(
        "updates=several",
        "schedule.updates",
        4,
        "reuses each batch",
        lambda entry: entry.schedule["updates"] == 1,
    ),
    SuggestedSetting(
        "updates=one",
        "schedule.updates",
        1,
        "strictly on-policy, as you answered",
        # A ratio per answer is the point of GSPO, and with one update it is 1: leave that choice.
        lambda entry: entry.schedule["updates"] > 1 and entry.ratio.name == "token",
    ),
    SuggestedSetting(
        "goal=pass@k updates=several",  # with one, every ratio is 1 and no clip acts
        "gate.high",
        0.28,
        "clip-higher leaves room to explore",
        lambda entry: entry.gate.name == "clip" and entry.gate["low"] == entry.gate["high"],
    ),
    SuggestedSetting(
        "steps=yes",
        "advantage",
        "group_process_zscore()",
        "credits steps",
        lambda entry: entry.name == "gspo_token",
    ),
)


def holds(when: str, answers: Mapping[str, str]) -> bool:
    """Return whether all conditions are met; what was not asked meets none."""
    conditions = (condition.split("=", 1) for condition in when.split())
    return all(answers.get(key) in values.split(",") for key, values in conditions)


def next_question(answers: Mapping[str, str]) -> RecipeQuestion | None:
    """Return the first question that applies and has no answer yet."""
    open_ = (q for q in QUESTIONS if q.key not in answers and holds(q.when, answers))
    return next(open_, None)


def check(answers: Mapping[str, str]) -> None:
    """Refuse unknown questions and answers."""
    known = {question.key: question for question in QUESTIONS}
    for key, value in answers.items():
        if key not in known:
            raise RecipeError(f"There is no question {key!r}. {nearest(key, known)}")
        if value not in known[key].options:
            options = ", ".join(known[key].options)
            raise RecipeError(f"{key}={value!r} is no answer. Choose one of: {options}.")


def complete(answers: Mapping[str, str]) -> dict[str, str]:
    """Return the answers, with defaults for what applies and was left open."""
    check(answers)
    full = dict(answers)
    while (question := next_question(full)) is not None:
        full[question.key] = question.default
    for question in QUESTIONS:
        if question.key in full and not holds(question.when, full):
            raise RecipeError(
                f"{question.key}={full[question.key]} would be ignored: it is asked only where "
                f"{question.when}. Leave it out."
            )
    return {question.key: full[question.key] for question in QUESTIONS if question.key in full}


def _changes(name: str, answers: Mapping[str, str]) -> list[dict[str, Any]]:
    entry = RECIPES[name]
    return [
        {"set": change.path, "to": change.value, "why": change.why}
        for change in CHANGES
        if entry.weighs_tokens and holds(change.when, answers) and change.fits(entry)
    ]


def _idle(name: str, answers: Mapping[str, str]) -> list[str]:
    """Return the parts of a recommended recipe that would change no update, under these answers."""
    entry = RECIPES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecipeWarning)
        entry = entry.configure({c["set"]: c["to"] for c in _changes(name, answers)})
    return list(_told(entry, answers.get("engine") == "separate"))


@functools.cache  # the table's recipes are the package's own: they never change
def _told(entry: Method, mismatch: bool) -> tuple[str, ...]:
    moved = updates_of(entry) > 1
    return tuple(told(idle(entry, Conditions(moved=moved, mismatch=mismatch))))


def _ranked(answers: Mapping[str, str]) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Return points and reasons of all that the answers speak for and do not rule out."""
    points: dict[str, int] = {}
    reasons: dict[str, list[str]] = {}
    out: set[str] = set()
    for row in ROWS:
        for name in row.recipes.split() if holds(row.when, answers) else ():
            if not row.points:
                out.add(name)
                continue
            points[name] = points.get(name, 0) + row.points
            reasons.setdefault(name, []).append(row.why)
    return {name: points[name] for name in points if name not in out}, reasons


def choose(answers: Mapping[str, str], most: int = 5) -> list[dict[str, Any]]:
    """Recommend recipes, the best first, with reasons and further settings."""
    full = complete(answers)
    points, reasons = _ranked(full)
    best = sorted(points, key=lambda name: -points[name])[:most]
    return [
        {
            "recipe": name,
            "title": RECIPES[name].about.title,
            "points": points[name],
            "reasons": reasons[name],
            "watch": RECIPES[name].about.breaks,
            "changes": _changes(name, full),
            "memory": memory(RECIPES[name]),
            "departs": list(RECIPES[name].departs),
            "idle": _idle(name, full),
        }
        for name in best
    ]
