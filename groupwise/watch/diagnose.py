"""A diagnosis of a run: the rules over its metrics, and the samples to read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from groupwise.errors import RunError
from groupwise.runfiles import schemas
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.partial import PartialReader
from groupwise.runfiles.rollouts import read_answers
from groupwise.runfiles.starts import changes_on_the_way
from groupwise.watch.chart import Point
from groupwise.watch.health import Finding, Health
from groupwise.watch.history import Evidence
from groupwise.watch.other_tools import names_in_tool, read_log
from groupwise.watch.rules import RULES, Rule
from groupwise.watch.vital_signs import waits

SAMPLES = 3  # shown of the worst
GUARDS = ("reward", "not finite", "nothing learned", "pairs")  # events of what went wrong


@dataclass(frozen=True)
class Diagnosis:
    """All findings of a run."""

    path: Path
    tool: str  # that wrote it: groupwise, trl, verl
    steps: int  # the last one
    findings: list[Finding]  # in the order in which they were sure
    health: Health
    samples: list[dict[str, Any]]  # the worst ones of the first bad step
    sample_step: int | None
    events: list[dict[str, Any]]  # of guards
    changed: list[str]  # settings and code, on the way
    unseen: list[str]  # rules that had nothing to look at
    damage: list[str]  # files beside the metrics that can't be read
    alone: int = 0  # steps in which a critic learned and the policy waited

    @property
    def sick(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.rule.grave]

    @property
    def first(self) -> Finding | None:
        """Return what to look at first: later findings may follow from it."""
        return next(iter(self.sick or self.findings), None)

    def points(self, finding: Finding) -> Sequence[Point]:
        return self.health.history.all(finding.evidence.metric)

    def as_dict(self) -> dict[str, Any]:
        return {
            "run": str(self.path),
            "tool": self.tool,
            "steps": self.steps,
            "critic_alone": self.alone,
            "healthy": not self.sick,
            "findings": [
                {
                    **finding.fields(),
                    "step": finding.step,
                    "evidence": finding.evidence.text,
                    "means": finding.rule.means,
                    "in_their_words": names_in_tool(finding.rule.change, self.tool),
                    "threshold": finding.rule.threshold,
                    "source": finding.rule.source,
                }
                for finding in self.findings
            ],
            "sample_step": self.sample_step,
            "samples": self.samples,
            "events": self.events,
            "changed": self.changed,
            "not_judged": self.unseen,
            "damage": self.damage,
        }


def diagnose(path: str | Path, rules: Sequence[Rule] | None = None) -> Diagnosis:
    """Diagnose a run folder, live or finished, or a log of TRL or verl."""
    folder = RunFolder(path)
    tool, lines = (
        ("groupwise", folder.read_metrics()) if _is_ours(folder) else read_log(folder.path)
    )
    seen, ours = PartialReader(), tool == "groupwise"
    events = seen.lines(folder.events, schemas.events) if ours else []
    health = Health(rules)
    findings = health.see_all(lines)
    last = int(lines[-1]["step"]) if lines else 0
    findings += _after_the_end(events, last, {finding.rule.name for finding in findings})
    if last == 0 and not findings:  # step 0 is only how good the starting policy is
        raise RunError(f"{folder.path} has no steps yet: there is nothing to judge.")
    known = {name for line in lines for name in line}
    about = [rule for rule in health.rules if rule.concerns(known)]
    unseen = [rule.name for rule in about if not rule.can_judge(known)]
    shown = next(iter([f for f in findings if f.rule.grave] or findings), None)
    step, samples = (seen.get(worst_samples, folder, shown) if shown else None) or (None, [])
    guards = [e for e in events if e.get("kind") in GUARDS and e.keys() >= {"step", "text"}]
    changed = (seen.get(changes_on_the_way, folder) if ours else None) or []
    return Diagnosis(folder.path, tool, last, findings, health, samples, step, guards, changed,
                     unseen, seen.damage, sum(map(waits, lines)))  # fmt: skip


def _is_ours(folder: RunFolder) -> bool:
    """Return whether it is a run folder, be its files damaged or not."""
    there = os.path.lexists
    return there(folder.metrics) or (there(folder.config) and there(folder.events))


def _after_the_end(
    events: Sequence[Mapping[str, Any]], last: int, known: set[str]
) -> list[Finding]:
    """Return findings in a step that a guard stopped: it has events and no metrics."""
    rules = {rule.name: rule for rule in RULES}
    needed = ("step", "text", "metric", "value", "limit", "first_bad_step")  # of this version
    found = []
    for event in events:
        rule = rules.get(str(event.get("rule")))
        if event.get("kind") != "health" or rule is None or not event.keys() >= {*needed}:
            continue
        if event["step"] > last and rule.name not in known:
            text = str(event["text"]).removeprefix(f"{rule.name}: ").partition(". ")[0]
            seen = Evidence(event["metric"], event["value"], event["limit"],
                            event["first_bad_step"], text)  # fmt: skip
            found.append(Finding(rule, event["step"], seen))
    return found


# --- the samples to read ----------------------------------------------------------------------

Row = Mapping[str, Any]
COLUMNS = ("prompt_id", "group", "sample", "prompt_text", "text", "answer", "reward", "correct",
           "finish", "grader_status", "grader_reason", "sampler_logp", "learner_logp", "entropy",
           "clipped", "value", "return", "token_ids", "mask")  # fmt: skip


def _gap(row: Row) -> float:
    learner, sampler = row["learner_logp"], row["sampler_logp"]
    if not learner or not sampler:
        return 0.0
    return float(np.nanmax(np.abs(np.array(learner) - np.array(sampler)), initial=0.0))


def _mean(row: Row, name: str) -> float:
    """Average over the policy's own tokens: the file has 0 at others."""
    return float(np.sum(row[name])) / max(_length(row), 1) if row[name] else 0.0


def _value_error(row: Row) -> float:
    value, target = row["value"], row["return"]
    if not value or not target:
        return 0.0
    return float(np.abs(np.array(value) - np.array(target)).mean())


def _length(row: Row) -> int:
    """Count the policy's own tokens; all of them in a file that does not tell."""
    return sum(row["mask"]) if row["mask"] is not None else len(row["token_ids"] or ())


# How bad a sample is, by what a rule looks at first: the family of its metric.
WORST: dict[str, Callable[[Row], Any]] = {
    "reward/failed_share": lambda row: row["grader_status"] != "ok",
    "reward/missing_share": lambda row: row["reward"] is None,
    "reward/ungraded_share": lambda row: row["reward"] is None,
    "mismatch": _gap,
    "clip": lambda row: _mean(row, "clipped"),
    "critic": _value_error,
    "entropy": lambda row: -_mean(row, "entropy"),
    "length": lambda row: (
        row["finish"] == "length",
        not row["correct"],
        _length(row),
    ),
    "eval": lambda row: (not row["correct"], row["reward"] or 0.0),  # paid and wrong
    "correct": lambda row: (not row["correct"], row["reward"] or 0.0),
    "": lambda row: (-(row["reward"] or 0.0), _length(row)),
}


def worst_samples(folder: RunFolder, finding: Finding) -> tuple[int | None, list[dict[str, Any]]]:
    """Return samples of the first bad step whose rollouts are there, or the last before it."""
    steps, first = folder.rollout_steps(), finding.evidence.first
    step = next((s for s in steps if s >= first), steps[-1] if steps else None)
    if step is None:
        return None, []
    metric = finding.evidence.metric
    badness = WORST.get(metric) or WORST.get(metric.partition("/")[0]) or WORST[""]
    rows = sorted(
        read_answers(folder.rollout(step), COLUMNS)[0].to_pylist(), key=badness, reverse=True
    )
    shown = ("prompt_id", "sample", "prompt_text", "text", "answer", "reward", "correct", "finish",
             "grader_status", "grader_reason")  # fmt: skip
    distinct = {(row["prompt_id"], row["text"]): row for row in reversed(rows)}  # the worst stays
    worst = [row for row in rows if distinct[row["prompt_id"], row["text"]] is row]
    return step, [{name: row[name] for name in shown} for row in worst[:SAMPLES]]
