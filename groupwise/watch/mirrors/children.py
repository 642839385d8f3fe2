"""The mirrors of a live run: processes that follow its folder, and have some time to finish."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from types import TracebackType

from groupwise.errors import GroupwiseError
from groupwise.runfiles.folder import RunFolder
from groupwise.watch.display import Display
from groupwise.watch.mirrors import FOLDER, check
from groupwise.watch.mirrors.tail import up_to_date

LAST_WORDS = 30.0  # seconds that all mirrors together have once the run has ended
PACKAGE = Path(__file__).parents[3]


class Mirrors:
    """The mirrors of a run: made before its lock is taken, `start`ed within, left after its
    release.

    A mirror ends by itself when nobody writes the run any more, however the run ended.
    """

    def __init__(self, run: Path, names: Sequence[str], display: Display) -> None:
        check(names)
        self._run, self._names, self._display = run, dict.fromkeys(names), display
        self._going: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for name in self._names:
            try:
                self._going[name] = _child(self._run, name)
            except OSError as error:
                self._tell(name, f"could not be started ({error})")

    def look(self) -> None:
        """Report once the mirrors that gave up. None has a reason to end before the run does."""
        for name, child in list(self._going.items()):
            if child.poll() is not None:
                del self._going[name]
                self._tell(name, f"has stopped: {self._last_line(name)}")

    def _tell(self, name: str, what: str) -> None:
        command = f"groupwise mirror {quote(str(self._run))} --to {name}"
        self._display.warn(
            f"the mirror to {name} {what}. The run does not need it; `{command}` sends what is "
            "missing."
        )

    def _last_line(self, name: str) -> str:
        with contextlib.suppress(OSError):
            said = _log(self._run, name).read_text("utf-8", "replace").split("\n")
            return next((line for line in reversed(said) if line.strip()), "it said nothing")
        return "it said nothing"

    def __enter__(self) -> Mirrors:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        deadline = time.monotonic() + LAST_WORDS
        if self._going:
            names = ", ".join(self._going)
            self._display.note(f"{names}: the rest of the run, at most {LAST_WORDS:.0f} s")
        try:
            for child in self._going.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, deadline - time.monotonic()))
        finally:  # also when a person does not want to wait
            for name, child in self._going.items():
                if child.poll() is None:
                    _end(child)
                    self._tell(name, "was ended before it was done")
                elif child.returncode != 0 or not _told_all(self._run, name):
                    self._tell(name, f"has stopped: {self._last_line(name)}")
            self._going = {}


def _told_all(run: Path, name: str) -> bool:
    """Return whether a tracker has all steps; False where files can't be read, as the run ended
    well.
    """
    try:
        return up_to_date(RunFolder(run), name)
    except (OSError, GroupwiseError):
        return False


def _log(run: Path, name: str) -> Path:
    return run / FOLDER / f"{name}.log"


def _child(run: Path, name: str) -> subprocess.Popen[bytes]:
    """Start a mirror like the command, away from the terminal: Ctrl-C is for the run."""
    paths = [str(PACKAGE), os.environ.get("PYTHONPATH", "")]
    log = _log(run, name)
    log.parent.mkdir(exist_ok=True)
    with open(log, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "groupwise.cli", "mirror", str(run), "--to", name],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a mirror and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
