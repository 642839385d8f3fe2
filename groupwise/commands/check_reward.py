"""`groupwise check-reward`: a reward tried on real rows, before any model is loaded.

That of an environment is tried by playing: who knows the answer, and who guesses.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from groupwise.commands.shared import SETTINGS, aligned, print_json, read_config, split_settings

if TYPE_CHECKING:
    from groupwise.config import Config
    from groupwise.envs.trial import TrialReport
    from groupwise.graders.attacks import AttemptResult
    from groupwise.records import Task

ROWS = 16


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "check-reward",
        help="try a reward on real rows: gold, wrong answers and attacks; an environment, by play",
        usage="groupwise check-reward [CONFIG.toml] [KEY=VALUE ...] [--rows N] [--json] "
        "[--oracle FILE.py:NAME] [--guesser FILE.py:NAME]",
        example="groupwise check-reward data.train=countdown",
    )
    parser.add_argument("items", nargs="*", metavar="KEY=VALUE", help=SETTINGS)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"rows to try; default: {ROWS}")
    for name, who in (("oracle", "knows the answer and must win"), ("guesser", "must not")):
        parser.add_argument(
            f"--{name}", metavar="FILE.py:NAME",
            help=f"a function of the row, what was heard and a random stream: who {who}. Default: "
            "the player of a built-in environment, or one who says rows' answers",
        )  # fmt: skip
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
    from groupwise.graders.environment import NAME as ENVIRONMENT

    grader, tasks, notes = _prepared(config, args.rows)
    if config.turns.environment and config.reward.parts.get(ENVIRONMENT):
        return try_by_playing(args, config, tasks)
    if args.oracle or args.guesser:
        raise ConfigError(
            "--oracle and --guesser play in an environment, and none gives a reward here: set "
            f"turns.environment, and the part {ENVIRONMENT} of the reward. Or leave them out."
        )
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


# --- environments -----------------------------------------------------------------------------

CALLS = "hermes"  # how players write calls of tools: no model is there to say


def try_by_playing(args: argparse.Namespace, config: Config, tasks: Sequence[Task]) -> int:
    """Play the rows; return 1 if who knows does not win, who guesses does, or episodes meet."""
    from dataclasses import replace

    from groupwise.envs.trial import named_player, shared_state, try_environment
    from groupwise.prepare.episodes import row_of
    from groupwise.prepare.episodes_setup import world_setup

    oracle, guesser = (named_player(x) if x else None for x in (args.oracle, args.guesser))
    setup = replace(world_setup(config), reader=CALLS)
    rows = [row_of(task) for task in tasks]
    found = try_environment(setup, rows, oracle, guesser, config.turns.max)
    shared = shared_state(setup, rows[0], found.said) if found.said and not found.faults else ""
    problems = [*found.problems, *([shared] if shared else [])]
    if args.json:
        shown = {key: value for key, value in asdict(found).items() if key != "said"}
        print_json({"good": not problems, "rows": len(rows), **shown, "problems": problems})
    else:
        _print_trial(config, found, problems, len(rows), guided=bool(oracle))
    return 1 if problems else 0


def _print_trial(
    config: Config, found: TrialReport, problems: Sequence[str], rows: int, guided: bool
) -> None:
    name, most = config.turns.environment, config.turns.max
    print(f"environment {name} on {rows} rows of the training data, {most} turns at most\n")
    players = (("who knows the answer", found.oracle), ("who guesses at random", found.guesser))
    known = [(who, f"{reward:.2f}") for who, reward in players if reward is not None]
    print("\n".join(aligned([("", "mean reward"), *known])))
    others = [part for part in config.reward.parts if part != "environment"]
    if others:
        print(f"note: played for the environment's reward; {', '.join(others)} was not asked")
    print()
    for problem in problems:
        print(problem)
    if problems and not guided and found.oracle is not None:
        print("Name one who plays better with --oracle FILE.py:NAME, if there is one.")
    if found.oracle is None and not problems:
        print("Nobody knew what to play. Name who does with --oracle FILE.py:NAME.")
    elif not problems:
        print("Who knows the answer wins, and who guesses does not.")
