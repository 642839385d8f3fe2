"""`groupwise replay`: what other methods would make of a run's rollouts; whether a run repeats.

Exit status with --verify: 0 it repeats, 1 it does not or not all of it could be repeated, 2 it
can't be tried.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.commands.pipeline import stages_in
from groupwise.commands.shared import print_json, start_pytorch, terminal_width
from groupwise.errors import ConfigError, RunError
from groupwise.runfiles.stages import is_pipeline

if TYPE_CHECKING:
    from groupwise.replay.recorded import Recorded

RARE_SHOWN = 12


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="what another method would do with a run's rollouts; whether a run repeats",
        description="With --verify, exit status 0: it repeats to the bit, 1: it does not, or some "
        "of it could not be repeated.",
        example="groupwise replay runs/tiny --recipe gspo --recipe cispo",
    )
    parser.add_argument("path", metavar="RUN", help="a run folder")
    parser.add_argument(
        "--recipe",
        action="append",
        default=[],
        metavar="NAME",
        help="a method to replay with: gspo, 'dapo recipe.gate.high=0.3', mine.py:method; "
        "repeatable",
    )
    parser.add_argument("--step", metavar="N|N..M", help="default: all that were kept")
    parser.add_argument(
        "--gradients",
        action="store_true",
        help="also of the model's weights, by the newest checkpoint before each step",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="page, picture, data, and a folder a method for the viewer"
    )
    parser.add_argument(
        "--verify", action="store_true", help="run it again from its manifest, and compare bits"
    )
    parser.add_argument(
        "--env", action="store_true",
        help="with --verify: let environments answer again; else recorded answers stand in",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, metavar="N", help="with --verify: the first N alone")
    parser.add_argument("--json", action="store_true", help="data instead of text")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    if is_pipeline(args.path):
        runs = ", ".join(str(run) for run in stages_in(Path(args.path)))
        raise ConfigError(
            f"{args.path} is a pipeline, and a stage is what can be replayed. Give one of its "
            f"runs: {runs or 'none has begun yet'}."
        )
    if args.verify:
        return _verify(args)
    if args.env:
        raise ConfigError(
            "--env belongs to --verify. Methods are replayed on what was recorded: no environment "
            "is asked."
        )
    if args.steps is not None:
        raise ConfigError("--steps belongs to --verify. To replay some steps write --step 1..5.")
    if not args.recipe:
        raise ConfigError(
            "Which method? Write --recipe gspo (`groupwise recipes` lists them), or --verify to "
            "run it again."
        )
    start_pytorch()
    from groupwise.replay.files import Output
    from groupwise.replay.methods import methods_of
    from groupwise.replay.recorded import open_recorded
    from groupwise.replay.replay import Replay
    from groupwise.replay.stretches import made_alike

    recorded = open_recorded(args.path)
    recorded, steps, note = made_alike(recorded, steps_of(args.step, recorded), bool(args.step))
    replay = Replay(recorded, methods_of(recorded, args.recipe), steps, args.gradients)
    replay.check()
    replay.notes += [note] if note else []
    if args.step and len(steps) <= _ends(args.step)[1] - _ends(args.step)[0]:
        replay.notes.append(f"Of steps {args.step}, {_ranges(steps)} have rollouts in the folder.")
    output = Output(args.out, replay) if args.out else None
    for seen in replay:
        if output is not None:
            output.add(seen)
    found = replay.result()
    files = output.finish(found) if output is not None else []
    if args.json:
        print_json(found)
        return 0
    print(text(found, terminal_width()))
    if output is not None:
        from groupwise.replay.files import listed

        print(f"\nwrote {listed(files)} to {args.out}; groupwise view {args.out} shows the samples")
    return 0


def steps_of(asked: str | None, recorded: Recorded) -> list[int]:
    """Return the steps that `N` or `N..M` names and that are there."""
    there = recorded.steps
    if asked is None:
        return there
    low, high = _ends(asked)
    found = [step for step in there if low <= step <= high]
    if not found:
        raise RunError(
            f"{recorded.folder.path} has no rollouts of step {asked}: its kept and finished steps "
            f"are {_ranges(there)}."
        )
    return found


def _ends(asked: str) -> tuple[int, int]:
    first, dots, last = asked.partition("..")
    if not first.strip().isdecimal() or (dots and not last.strip().isdecimal()):
        raise ConfigError(f"--step {asked!r} names no steps. Write --step 12, or --step 10..20.")
    return int(first), int(last) if dots else int(first)


def _ranges(steps: list[int]) -> str:
    """Write numbers as ranges: 1..4, 8, 10..12."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(f"{part[0]}..{part[-1]}" if len(part) > 1 else f"{part[0]}" for part in parts)


def text(found: dict[str, Any], width: int) -> str:
    """Return the result for people: the table of methods, rare tokens, and what can't be known."""
    from groupwise.explain.render import bullets, wrapped
    from groupwise.replay import tables
    from groupwise.replay.methods import RUN

    lines = wrapped(f"{found['run']}, {tables.scope(found)}", width, indent=0)
    lines += ["", *tables.lines(tables.methods(found)), ""]
    true = "parameter_cosine" in found["methods"][0]
    more = "; ∇θ: the same of the model's weights." if true else "."
    lines += wrapped(tables.LEGEND + more, width, indent=0)
    others = [pair for pair in found["pairs"] if pair["a"] != RUN]
    if others:
        lines += ["", *tables.lines(tables.pairs({**found, "pairs": others}))]
    if found["rare_tokens"]:
        lines += ["", "Rare tokens and their weights (negative: made likelier), first those that "
                  "some clip and others learn from"]  # fmt: skip
        lines += tables.lines(tables.rare(found, RARE_SHOWN))
    lines += bullets("To bear in mind", found["notes"], width)
    return "\n".join(lines)


def _verify(args: argparse.Namespace) -> int:
    for name, given in (("--recipe", args.recipe), ("--step", args.step), ("--out", args.out),
                        ("--gradients", args.gradients)):  # fmt: skip
        if given:
            raise ConfigError(f"{name} and --verify are two questions: ask them one by one.")
    start_pytorch()
    from groupwise.replay.verify import verify

    def tell(text: str) -> None:
        if sys.stderr.isatty():
            print(text, file=sys.stderr)

    found = verify(args.path, args.steps, tell, args.env)
    if args.json:
        print_json(found.as_dict())
    else:
        print(found.text(terminal_width()))
    return 0 if found.whole else 1
