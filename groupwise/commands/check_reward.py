"""`groupwise check-reward`: a reward tried on real rows, before any model is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from groupwise.commands.shared import SETTINGS, print_json, read_config, split_settings

if TYPE_CHECKING:
    from groupwise.config import Config
    from groupwise.graders.attacks import AttemptResult
    from groupwise.records import Task

ROWS = 16


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "check-reward",
        help="try a reward on real rows: gold, wrong answers and attacks",
        usage="groupwise check-reward [CONFIG.toml] [KEY=VALUE ...] [--rows N] [--json]",
        example="groupwise check-reward configs/tiny.toml",
    )
    parser.add_argument("items", nargs="*", metavar="KEY=VALUE", help=SETTINGS)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"rows to try; default: {ROWS}")
    parser.add_argument("--json", action="store_true", help="data instead of text")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Check the reward; return 1 if something passes that should not, or the reverse."""
    from groupwise.errors import ConfigError

    if args.rows < 1:
        raise ConfigError(f"--rows {args.rows}: try at least one row.")
    source, overrides = split_settings(args.items)
    config = read_config(source, overrides)
    from groupwise.graders.attacks import audit

    grader, tasks, notes = _prepared(config, args.rows)
    findings = audit(grader, tasks)
    good = all(finding.good for finding in findings)
    if args.json:
        rows = [{**asdict(finding), "good": finding.good} for finding in findings]
        print_json({"good": good, "rows": len(tasks), "findings": rows, "notes": notes})
    else:
        _print(config, findings, notes, len(tasks))
    return 0 if good else 1


def _prepared(config: Config, rows: int) -> tuple[Any, list[Task], list[str]]:
    """Return the grader, some rows spread over the data, and the notes of the quick check."""
    from groupwise.graders.rubric import check
    from groupwise.prepare.setup import read_data

    grader, found = read_data(config)
    notes = check(grader, found.train)
    return grader, spread(found.train, rows), notes


def spread(tasks: Sequence[Task], rows: int) -> list[Task]:
    """Return so many of the items, spread from the first to the last."""
    last, steps = len(tasks) - 1, max(rows - 1, 1)
    return [tasks[i] for i in dict.fromkeys(round(n * last / steps) for n in range(rows))]


def _print(
    config: Config, findings: Sequence[AttemptResult], notes: Sequence[str], rows: int
) -> None:
    print(f"reward {' + '.join(config.reward.parts)} on {rows} rows of the training data\n")
    print(f"{'':<36}{'should':<8}{'passed':>10}  ")
    for finding in findings:
        should = "pass" if finding.should_pass else "fail"
        passed = f"{finding.passed}/{finding.rows}"
        print(f"{finding.kind:<36}{should:<8}{passed:>10}  {'ok' if finding.good else 'WRONG'}")
        if finding.example:
            shown = finding.example
            print(f"    row {shown['row']}: {shown['text']!r}, gold {shown['gold']!r}")
            said = f"reward {shown['reward']}, {shown['status']}"
            print(f"    {said}{': ' + shown['reason'] if shown['reason'] else ''}")
    for note in notes:
        print(f"note: {note}")
    bad = [finding.kind for finding in findings if not finding.good]
    print()
    if bad:
        print(f"Not ready to train on: {', '.join(bad)}.")
    elif any(finding.should_pass for finding in findings):
        print("Gold answers pass, and nothing else that was tried.")
    else:
        print("Nothing passes of what was tried. These rows have no gold answers to try.")
