"""The command line: read arguments, call, print. All that is said comes from other modules."""

from __future__ import annotations

import argparse
import atexit
import errno
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.commands import (
    check_reward,
    collect,
    compare,
    diagnose,
    doctor,
    evaluate,
    export,
    filter,
    grade,
    init,
    label_pairs,
    label_steps,
    launch,
    mirror,
    pipeline,
    plan,
    probe,
    replay,
    serve,
    view,
)
from groupwise.commands.shared import (
    SETTINGS,
    print_json,
    progress,
    read_config,
    split_settings,
    terminal_width,
    warn,
)
from groupwise.common.extras import install
from groupwise.common.progress import phase
from groupwise.errors import ConfigError, GroupwiseError, RecipeError, RecipeWarning
from groupwise.runfiles.stages import is_pipeline

if TYPE_CHECKING:
    from groupwise.config import Config

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # a device takes no more
PAGES = "docs/algorithms.md, metrics.md, rules.md and settings.md"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="groupwise", description="Policy optimisation of the GRPO family, method by method."
    )
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    recipes = commands.add_parser("recipes", help="list all methods, or find the one you need")
    recipes.add_argument("--choose", action="store_true", help="answer questions, get advice")
    recipes.add_argument(
        "--answer",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="answer a question of --choose beforehand; repeatable",
    )
    recipes.add_argument("--json", action="store_true", help="data instead of text")
    recipes.set_defaults(run_command=_recipes)

    explain = commands.add_parser("explain", help="one method, or what differs between two")
    explain.add_argument("names", nargs="*", metavar="NAME", help="a recipe, or file.py:recipe")
    explain.add_argument(
        "--from",
        dest="file",
        type=Path,
        metavar="FILE",
        help="a configuration of TRL, verl, OpenRLHF or prime-rl: what computes the same here",
    )
    explain.add_argument("--json", action="store_true", help="data instead of text")
    explain.set_defaults(run_command=_explain)

    for command in (
        check_reward, collect, compare, diagnose, doctor, evaluate, export, filter, grade, init,
        label_pairs,
        label_steps, launch, mirror, plan, probe, replay, serve, view,
    ):  # fmt: skip
        command.add_parser(commands)
    train = commands.add_parser(
        "train",
        help="train into a run folder, or go on with it",
        usage="groupwise train [CONFIG.toml] [KEY=VALUE ...] [--run DIR] [--from STAGE] "
        "[--dry-run]",
    )
    train.add_argument("items", nargs="*", metavar="KEY=VALUE", help=SETTINGS)
    train.add_argument(
        "--run",
        metavar="DIR",
        help="default: runs/<name of the configuration>; also run=DIR, for torchrun",
    )
    train.add_argument(
        "--from", dest="again", metavar="STAGE", help="of a pipeline: do this and later ones anew"
    )
    train.add_argument("--dry-run", action="store_true", help="print what would run, and stop")
    train.set_defaults(run_command=_train)

    report = commands.add_parser("report", help="write report.html and PNG plots of a run")
    report.add_argument("folder", metavar="RUN")
    report.set_defaults(run_command=_report)

    docs = commands.add_parser("docs", help=f"write {PAGES} from the code")
    docs.add_argument("--check", action="store_true", help="only say whether they are current")
    docs.add_argument("--folder", default="docs", help="default: docs")
    docs.set_defaults(run_command=_docs)
    return parser


def command() -> int:
    """Run the command of this process, and end the process when all is written.

    Behind it Python would take PyTorch's modules apart: seconds on a busy machine, without a word.
    """
    ended: list[int] = []
    atexit.register(_leave, ended)  # before all that the command registers, so it runs behind them
    ended.append(main())
    signal.signal(signal.SIGINT, lambda *_: os._exit(ended[0]))  # all is written and flushed
    return ended[0]


def _leave(ended: list[int]) -> None:
    """End the process with the command's status; one that raised is left to Python."""
    if ended:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(ended[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    0 is success, 1 a failed check, 2 a wrong request or an error, 130 stopped on request (and
    saved).
    """
    status = 0
    if sys.stdout is None:  # closed: `groupwise recipes >&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, it is open to the end
    if isinstance(sys.stdout, io.TextIOWrapper):  # an ASCII terminal shows ? for Σ, no traceback
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            status = _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `groupwise recipes | head`: nobody reads on, nothing is wrong
        _drop_output()
        return status  # a verdict that nobody read is still one
    except OSError as error:  # `groupwise recipes > file` on a full disk
        if error.errno not in FULL:
            raise
        _drop_output()
        print(
            f"groupwise: error: {error}: the output, or a file that was being written, is not "
            "complete. Make room, or write elsewhere.",
            file=sys.stderr,
        )
        return 2
    return status


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args, more = parser.parse_known_args(argv)
    if more and (not hasattr(args, "items") or any(each.startswith("-") for each in more)):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more:  # settings that stand behind an option
        args.items += more
    try:
        _take_run(args)
        if args.version:
            return _version()
        if args.command is None:
            parser.print_help()
            return 2
        with progress():
            status: int = args.run_command(args)
        return status
    except GroupwiseError as error:
        if not error.told:
            print(f"groupwise: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _take_run(args: argparse.Namespace) -> None:
    """Take `run=DIR` among the settings for --run DIR, which torchrun takes for its own."""
    if not hasattr(args, "run") or not hasattr(args, "items"):
        return
    given = [item for item in args.items if item.startswith("run=")]
    args.items = [item for item in args.items if item not in given]
    named = [item.removeprefix("run=") for item in given] + [args.run] * (args.run is not None)
    if len(set(named)) > 1:
        raise ConfigError(f"The run folder is given as {' and as '.join(named)}. Name one.")
    args.run = named[0] if named else None


def _drop_output() -> None:
    """Throw away what is left of the output, which would fail once more when the process ends.
    Output that can be written is left alone: a full disk may be another, and a caller from Python
    still has something to say.
    """
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _version() -> int:
    from importlib.metadata import version

    print(f"groupwise {version('groupwise')}")
    return 0


# --- recipes ----------------------------------------------------------------------------------


def _recipes(args: argparse.Namespace) -> int:
    if args.choose:
        return _choose(args)
    if args.answer:
        raise RecipeError("--answer belongs to --choose: groupwise recipes --choose --answer ...")
    from groupwise.explain.explain import table
    from groupwise.explain.render import recipes_text

    rows = table()
    if args.json:
        print_json(rows)
    else:
        print(recipes_text(rows, terminal_width()))
    return 0


def _given(pairs: Sequence[str]) -> dict[str, str]:
    answers: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise RecipeError(f"--answer {pair!r} has no value. Write KEY=VALUE, e.g. moe=yes.")
        if key in answers:
            raise RecipeError(f"--answer {key} is given twice.")
        answers[key] = value
    return answers


def _choose(args: argparse.Namespace) -> int:
    from groupwise.explain import choose
    from groupwise.explain.render import choice_text

    answers = _given(args.answer)
    choose.check(answers)
    if sys.stdin.isatty():
        answers = _ask(answers)
    full = choose.complete(answers)
    assumed = [key for key in full if key not in answers]
    if assumed:
        taken = ", ".join(f"{key}={full[key]}" for key in assumed)
        print(f"Not answered, so the defaults hold: {taken}.", file=sys.stderr)
    found = choose.choose(full)
    if args.json:
        print_json({"answers": full, "assumed": assumed, "recommendations": found})
    else:
        print(choice_text(full, assumed, found, terminal_width()))
    return 0


def _ask(answers: dict[str, str]) -> dict[str, str]:
    """Ask what is open, on stderr, so that stdout stays the answer alone. Enter is the default."""
    from groupwise.explain.choose import next_question

    while (question := next_question(answers)) is not None:
        print(question.text, file=sys.stderr)
        for option, meaning in question.options.items():
            mark = " [Enter]" if option == question.default else ""
            print(f"  {option}{': ' + meaning if meaning else ''}{mark}", file=sys.stderr)
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:  # end of input: the rest by default
            return answers
        word = line.strip().lower() or question.default
        matching = [option for option in question.options if option.startswith(word)]
        if word in question.options or len(matching) == 1:
            answers = {**answers, question.key: word if word in question.options else matching[0]}
        else:
            print(f"Please answer one of: {', '.join(question.options)}.", file=sys.stderr)
    return answers


# --- explain ----------------------------------------------------------------------------------


def _explain(args: argparse.Namespace) -> int:
    if args.file is not None:
        return _explain_file(args)
    if not 1 <= len(args.names) <= 2:
        raise RecipeError(
            f"explain takes one recipe or two, got {len(args.names)}; or --from FILE, a "
            "configuration of another tool."
        )
    from groupwise.explain.explain import difference, explain
    from groupwise.explain.render import difference_text, explain_text

    one = len(args.names) == 1
    with warnings.catch_warnings():  # doubts are part of the explanation
        warnings.simplefilter("ignore", RecipeWarning)
        data = explain(args.names[0]) if one else difference(*args.names)
    if args.json:
        print_json(data)
    else:
        print((explain_text if one else difference_text)(data, terminal_width()))
    return 0


def _explain_file(args: argparse.Namespace) -> int:
    if args.names:
        raise RecipeError(f"explain takes a recipe or --from FILE, not both: {args.names[0]!r}.")
    from groupwise.explain.peers.translate import translated, translation_text

    answers = translated(args.file)
    if args.json:
        print_json(answers)
    else:
        print("\n\n".join(translation_text(answer, terminal_width()) for answer in answers))
    return 0


# --- train, report ----------------------------------------------------------------------------


def _train(args: argparse.Namespace) -> int:
    source, overrides = split_settings(args.items)
    if pipeline.has_stages(source):
        assert source is not None
        return pipeline.train(source, overrides, args)
    if args.again is not None:
        raise ConfigError(f"--from {args.again} is for a file with [[stage]] tables.")
    config = read_config(source, overrides)
    run = Path(args.run) if args.run else Path("runs") / (source.stem if source else "default")
    if args.dry_run:
        return _dry_run(config, run)
    with phase("starting PyTorch"):
        from groupwise.training import loop
        from groupwise.training.signals import Stopped
    try:
        loop.train(config, run)
    except Stopped as stopped:
        if os.environ.get("RANK", "0") == "0":
            print(stopped, file=sys.stderr)
        return 130
    return 0


def _dry_run(asked: Config, run: Path) -> int:
    """Print the resolved configuration, in TOML that can be run; its consequences as comments."""
    from groupwise.config import text
    from groupwise.prepare.placing import place_line
    from groupwise.stages import stage_of
    from groupwise.stages.checks import check_config
    from groupwise.stages.describe import describe
    from groupwise.training.continuing import placed_for

    config = placed_for(asked, run)
    for warning in [*check_config(config), *stage_of(config).try_slots()]:
        warn(warning)
    lines = [place_line(config.model, asked.model), *describe(config)]
    print("\n".join(f"# {line}" for line in lines), end="\n\n")
    print(text(config), end="")
    return 0


def _report(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    if not folder.is_dir():
        raise ConfigError(f"There is no run folder {args.folder!r}.")
    if is_pipeline(folder):
        return pipeline.report(folder)
    from groupwise.watch.plots import can_plot, write_plots
    from groupwise.watch.report import write_report

    with phase("writing the report"):
        page = write_report(folder)
    print(f"wrote {page}")
    if can_plot():
        with phase("drawing plots"):
            plots = write_plots(folder)
        if plots:
            print(f"wrote {len(plots)} plots to {folder / 'plots'}")
    else:
        print(f"No PNG plots: they need matplotlib, `{install('view')}`", file=sys.stderr)
    return 0


# --- docs -------------------------------------------------------------------------------------


def _docs(args: argparse.Namespace) -> int:
    from groupwise.config.page import settings_page
    from groupwise.explain.explain import markdown, undocumented
    from groupwise.explain.tree import with_tree
    from groupwise.runfiles.catalogue import metrics_page
    from groupwise.watch.rules import rules_page

    missing = undocumented()
    if missing:
        raise RecipeError(
            f"No notes for {', '.join(missing)}: add their pitfalls to "
            "groupwise/explain/notes.toml."
        )
    folder, current = Path(args.folder), True
    if not args.check and not folder.is_dir():
        raise RecipeError(f"There is no folder {args.folder!r}: run this at the root.")
    architecture = folder / "architecture.md"
    pages = {
        "algorithms.md": markdown(),
        "architecture.md": with_tree(
            architecture.read_text("utf-8") if architecture.is_file() else ""
        ),
        "metrics.md": metrics_page(),
        "rules.md": rules_page(),
        "settings.md": settings_page(),
    }
    for name, page in pages.items():
        path = folder / name
        if not args.check:
            path.write_text(page, "utf-8")
            print(f"wrote {path}")
        elif not path.is_file() or path.read_text("utf-8") != page:
            print(f"{path} is not what the code says: run `make docs`.", file=sys.stderr)
            current = False
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())
