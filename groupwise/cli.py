"""The command line: read arguments, call, print. All that is said comes from other modules."""

from __future__ import annotations

import argparse
import atexit
import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from groupwise import __version__
from groupwise.commands import (
    check_reward,
    collect,
    compare,
    completion,
    diagnose,
    docs,
    doctor,
    evaluate,
    explain,
    export,
    filter,
    grade,
    here,
    init,
    label_pairs,
    label_steps,
    launch,
    migrate,
    mirror,
    plan,
    probe,
    recipes,
    replay,
    report,
    serve,
    settings,
    train,
    view,
)
from groupwise.commands.overview import Overview
from groupwise.commands.shared import progress
from groupwise.errors import ConfigError, GroupwiseError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # a device takes no more

# All commands, by what they are for, in the order in which they are used.
GROUPS = {
    "Train a model, from first to last": (
        init, check_reward, probe, plan, train, view, diagnose, report, evaluate, export, serve,
    ),
    "Methods": (recipes, explain, compare, replay),
    "Rows to train on": (filter, grade, collect, label_pairs, label_steps),
    "Several machines, other tools": (launch, migrate, mirror),
    "groupwise itself": (doctor, settings, completion, docs),
}  # fmt: skip


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
    whole = Overview(GROUPS)
    whole.check_command(sys.argv[1:] if argv is None else argv)
    args, more = whole.parse_known_args(argv)
    if more and (not hasattr(args, "items") or any(each.startswith("-") for each in more)):
        whole.error(f"unrecognized arguments: {' '.join(more)}")
    if more:  # settings that stand behind an option
        args.items += more
    try:
        _take_run(args)
        if args.version:
            print(f"groupwise {__version__}")
            return 0
        if args.command is None:
            return here.run()
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


if __name__ == "__main__":
    sys.exit(main())
