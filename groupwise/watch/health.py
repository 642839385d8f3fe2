"""Health rules over the metrics of a run, while it goes on or afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.watch.history import Evidence, History
from groupwise.watch.rules import RULES, Rule


@dataclass(frozen=True)
class Finding:
    """A rule that fired: at which step it was sure, and its evidence."""

    rule: Rule
    step: int
    evidence: Evidence

    def __str__(self) -> str:
        rule = self.rule
        return f"{rule.name}: {self.evidence.text}. {sentence(rule.means)} Try: {rule.change}."

    def fields(self) -> dict[str, Any]:
        """Return the fields for events.jsonl and --json."""
        seen, rule = self.evidence, self.rule
        return {
            "rule": rule.name,
            "first_bad_step": seen.first,
            "metric": seen.metric,
            "value": seen.value,
            "limit": seen.limit,
            "sure": rule.sure,
            "grave": rule.grave,
            "try": rule.change,
        }


class Health:
    """The rules of a run, which sees one step after the other; each fires once."""

    def __init__(self, rules: Sequence[Rule] | None = None) -> None:
        self.rules = RULES if rules is None else rules
        self.history = History()
        self.found: dict[str, Finding] = {}

    def see(self, step: int, metrics: Mapping[str, Any]) -> list[Finding]:
        """Return what fires at this step, in the order of the table."""
        self.history.add(step, metrics)
        new = []
        for rule in self.rules:
            if rule.name in self.found or step < rule.since:
                continue
            evidence = rule.test(self.history)
            if evidence is not None:
                self.found[rule.name] = Finding(rule, step, evidence)
                new.append(self.found[rule.name])
        return new

    def see_all(self, lines: Iterable[Mapping[str, Any]]) -> list[Finding]:
        """Return what fired in a whole run, line by line of metrics.jsonl, in order."""
        return [finding for line in lines for finding in self.see(int(line["step"]), line)]


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
