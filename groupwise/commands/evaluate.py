"""`groupwise eval`: held-out accuracy of a model; or models side by side on suites."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from groupwise.commands.eval_tables import text
from groupwise.commands.shared import (
    SETTINGS,
    check_one_turn,
    config_of,
    print_json,
    read_config,
    read_placed,
    say,
    split_models,
    warn,
    words_of,
)
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.config import Config
    from groupwise.evaluate.examine import SuiteEvaluation
    from groupwise.evaluate.request import Basis, Candidate, Entry, EvalRequest
    from groupwise.evaluate.results import Result
    from groupwise.records import Rollout

# Options that make no sense without suites: with one of them, the held-out tasks are one.
OF_SUITES = ("data", "tasks", "samples", "temperature", "at", "by", "budgets", "force", "out",
             "force_tokens", "against")  # fmt: skip


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "eval",
        help="accuracy of models, runs or checkpoints: held-out tasks, or suites by name",
        usage="groupwise eval MODEL_OR_RUN_OR_CHECKPOINT [MORE ...] [CONFIG.toml] [KEY=VALUE ...] "
        "[--suite NAMES [--data DIR]] [--tasks N] [--samples N] [--temperature X] [--at K,K] "
        "[--by COLUMNS] [--budgets N,N] [--out DIR] [--against RESULTS] [--json]",
        example="groupwise eval runs/tiny --samples 4",
    )
    parser.add_argument("path", metavar="PATH", help="of a model, a run or a checkpoint")
    parser.add_argument("items", nargs="*", metavar="KEY=VALUE", help=f"more models; {SETTINGS}")
    parser.add_argument(
        "--suite", action="append", default=[], metavar="NAMES",
        help="gsm8k, math, math500, aime24, aime25, mbpp, humaneval, countdown, "
        "reasoning_gym:TASK, NAME:FILE, a file, held_out; with commas",
    )  # fmt: skip
    parser.add_argument("--data", metavar="DIR", help="has NAME/test.* of suites; default: the hub")
    parser.add_argument("--tasks", type=int, metavar="N", help="of each suite; default: all")
    parser.add_argument("--samples", type=int, metavar="N", help="of a task; default: eval.samples")
    parser.add_argument(
        "--temperature", type=float, metavar="X", help="default: eval.temperature; 0 is greedy"
    )
    parser.add_argument("--at", metavar="K,K", help="of pass@k and maj@k; default: powers of two")
    parser.add_argument("--by", metavar="COLUMNS", help="default: level, subject and their like")
    parser.add_argument("--budgets", metavar="N,N", help="tokens after which an answer is forced")
    parser.add_argument("--force", metavar="TEXT", help="what forces it; default: the suite's")
    parser.add_argument("--force-tokens", type=int, metavar="N", help="for it; default: 32")
    parser.add_argument(
        "--out", metavar="DIR", help="results.json and samples; goes on with what is there"
    )
    parser.add_argument("--against", metavar="RESULTS", help="an earlier results.json, or its DIR")
    parser.add_argument("--json", action="store_true", help="data instead of text")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    paths, source, overrides = split_models(args.path, args.items)
    if source is None:
        source = next((own for path in paths if (own := config_of(Path(path)))), None)
    config = read_placed(source, overrides, paths[0])
    asked_for = [name for name in OF_SUITES if getattr(args, name) is not None]
    if len(paths) > 1 or args.suite or asked_for:
        check_one_turn(config, "eval --suite")
        return side_by_side(args, paths, source, config, overrides)
    from groupwise.evaluate.evaluate import evaluate_path

    found = evaluate_path(paths[0], config).as_dict()
    if args.json:
        print_json(found)
        return 0
    for name, value in found.items():
        if isinstance(value, int | float):
            print(f"{name:<16} {value:.4g}")
    return 0


# --- suites -----------------------------------------------------------------------------------


def side_by_side(
    args: argparse.Namespace,
    paths: Sequence[str],
    source: Path | None,
    config: Config,
    overrides: Sequence[str],
) -> int:
    from groupwise.evaluate import results
    from groupwise.evaluate.request import (
        FORCE_TOKENS,
        Basis,
        EvalRequest,
        candidates,
        check,
        entries,
    )
    from groupwise.evaluate.suites import HELD_OUT

    asked = EvalRequest(
        tasks=args.tasks or 0,
        samples=config.eval.samples if args.samples is None else args.samples,
        temperature=config.eval.temperature if args.temperature is None else args.temperature,
        at=_numbers("--at", args.at),
        by=words_of(args.by),
        budgets=_numbers("--budgets", args.budgets),
        force=args.force,
        force_tokens=FORCE_TOKENS if args.force_tokens is None else args.force_tokens,
    )
    given = tuple(item.partition("=")[0].strip() for item in overrides)
    basis = Basis(config, source is not None, given)
    check(asked, config)
    models = candidates(paths)
    names = words_of(",".join(args.suite)) or (HELD_OUT,)
    out = Path(args.out) if args.out else None
    stored = results.read(out) if out and (out / results.NAME).is_file() else []
    if out is not None and out.exists() and not stored and any(out.iterdir()):
        raise ConfigError(f"--out {out} exists and has no {results.NAME}: nothing is overwritten.")
    earlier = results.read(Path(args.against)) if args.against else []
    suites = entries(names, Path(args.data) if args.data else None, basis, asked)
    if earlier:
        keys = {entry.suite.name: list(entry.keys.values()) for entry in suites}
        for note in results.check_against(earlier, keys):
            warn(note)
    for note in other_settings(paths, source, config):
        warn(note)
    found = evaluate_all(models, suites, basis, asked, stored, out, earlier)
    page = results.page(found, earlier)
    if args.json:
        print_json(page)
    else:
        print(text(found, results.compare(found, earlier)))
    if out is not None:
        say(f"wrote {out / results.NAME}")
    return 0


def evaluate_all(
    models: Sequence[Candidate],
    suites: Sequence[Entry],
    basis: Basis,
    asked: EvalRequest,
    stored: Sequence[Result],
    out: Path | None,
    earlier: Sequence[Result],
) -> list[Result]:
    """Evaluate one model after the other on all suites; each result is saved at once."""
    from groupwise.evaluate import results

    found = list(stored)

    def keep(result: Result, groups: Sequence[Sequence[Rollout]]) -> None:
        found.append(result)
        if out is not None:
            write_samples(out, result, groups)
            results.write(out / results.NAME, results.page(found, earlier))

    return [
        result
        for candidate in models
        for result in evaluate_one(candidate, suites, basis, asked, found, keep)
    ]


def evaluate_one(
    candidate: Candidate,
    suites: Sequence[Entry],
    basis: Basis,
    asked: EvalRequest,
    found: Sequence[Result],
    keep: Callable[[Result, Sequence[Sequence[Rollout]]], None],
) -> list[Result]:
    """Evaluate one model on all suites; it is gone from memory when this returns."""
    from groupwise.evaluate import examine

    loaded = examine.load_candidate(candidate, basis.config)
    model = examine.described(candidate, loaded)
    # All of them first: what does not fit this model is told before it has sampled for hours.
    sittings = examine.prepare_suites(suites, loaded, basis, asked)
    before = [_stored(found, model, sitting) for sitting in sittings]
    own: list[Result] = []
    for sitting, done in zip(sittings, before, strict=True):
        title = f"{candidate.name} on {sitting.entry.suite.name}"
        if done is None:
            for note in sitting.notes:
                say(note)
            done, groups = sitting.run(model, f"{title}:")
            keep(done, groups)
        else:
            say(f"{title}: there already, nothing is sampled.")
        own.append(replace(done, model=model))
    return own


def _stored(
    found: Sequence[Result], model: dict[str, Any], sitting: SuiteEvaluation
) -> Result | None:
    """Return the same result from before; raise where another one is in its place."""
    suite = sitting.entry.suite.name
    for result in found:
        if result.same_as(model, sitting.data, sitting.settings) and result.suite["name"] == suite:
            return result
    for result in found:
        if (result.name, result.suite["name"]) == (model["name"], suite):
            from groupwise.evaluate.results import differing

            other = differing(result.settings, sitting.settings)
            what = ", ".join(other) if other else "weights, tasks, prompts, at, by or budgets"
            raise ConfigError(
                f"--out holds {suite} of {model['name']} already, with other {what}. Choose "
                "another folder: nothing is overwritten."
            )
    return None


def write_samples(out: Path, result: Result, groups: Sequence[Sequence[Rollout]]) -> None:
    """Write every answer to a file, to be read."""
    from groupwise.runfiles.files import to_line, write_atomic

    name = quote(f"{result.name}.{result.suite['name']}", safe="")  # no two of them alike
    lines = [
        to_line(
            {
                "id": rollout.task.id,
                "sample": rollout.sample,
                "prompt": rollout.task.prompt,
                "answer": rollout.task.answer
                if isinstance(rollout.task.answer, str | int | float | None)
                else str(rollout.task.answer),
                "completion": rollout.text,
                "correct": rollout.grade.correct,
                "tokens": rollout.completion.own_length,
                "finish": rollout.completion.finish,
                "status": rollout.grade.status,
                "reason": rollout.grade.reason,
            }
        )
        for group in groups
        for rollout in group
    ]
    folder = out / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{name}.jsonl", "".join(f"{line}\n" for line in lines))


def other_settings(paths: Sequence[str], source: Path | None, config: Config) -> list[str]:
    """Return notes on runs whose own configuration differs from the one used for all."""
    notes = []
    for path in paths:
        own = config_of(Path(path))
        if own is None or source is None or own.resolve() == source.resolve():
            continue
        theirs = read_config(own, ())
        differs = [
            f"{section}.{name}"
            for section, name in (("data", "template"), ("data", "system"), ("data", "instruction"))
            if getattr(getattr(theirs, section), name) != getattr(getattr(config, section), name)
        ]
        if differs:
            notes.append(
                f"{path} was trained with another {', '.join(differs)} than {source} says, which "
                "holds for all here."
            )
    return notes


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    try:
        numbers = tuple(int(word) for word in words_of(text))
    except ValueError:
        raise ConfigError(f"{option} {text}: write whole numbers with commas, 1,4,8.") from None
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"{option} {text} has a number twice.")
    return numbers
