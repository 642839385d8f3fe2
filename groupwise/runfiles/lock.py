"""The lock of a run folder, held by its descriptor: one writer in one place.

A folder that is moved or deleted under its writer stays the one that is held. Its old name may then
be gone, or belong to another folder: whoever writes by name asks first (`Lock.check`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import threading
import time
from pathlib import Path

from groupwise.errors import RunError
from groupwise.runfiles.files import to_line

NAME = ".lock"


class Lock:
    """A folder that this process alone writes to; `release` it, or die."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._file = self._open()
        except OSError:
            os.close(self._folder)
            raise
        self._checking = threading.Lock()  # threads of the run check beside each other

    def take(self) -> None:
        """Take it, or say who has it. A process that dies lets go, however it dies."""
        try:
            _take(self._file)
        except BlockingIOError:
            raise RunError(
                f"{holder(self.path / NAME)} is writing to {self.path}. Two writers would mix "
                "their files. Wait for it, stop it, or choose another folder with --run."
            ) from None
        _held.update((self._folder, self._file))
        self.check()
        sign(self._file)

    def check(self) -> None:
        """Stop where the folder is no longer at its path, or where another process took it over.

        A lock file that was deleted is made again, if nobody was quicker.
        """
        with self._checking:
            if not _is(self._folder, self.path):
                raise RunError(self._gone())
            if not _is(self._file, self.path / NAME):
                self._take_again()

    def release(self) -> None:
        for descriptor in (self._folder, self._file):
            _held.discard(descriptor)
            os.close(descriptor)

    def _open(self, flags: int = 0) -> int:
        return os.open(NAME, os.O_RDWR | os.O_CREAT | flags, 0o644, dir_fd=self._folder)

    def _take_again(self) -> None:
        try:
            fresh = self._open(os.O_EXCL)
            _held.discard(self._file)
            os.close(self._file)
            self._file = fresh
            _held.add(fresh)
            _take(fresh)
        except (FileExistsError, BlockingIOError):
            raise RunError(
                f"{self.path / NAME} was deleted while this run held it, and another one was made: "
                f"{holder(self.path / NAME)} writes to {self.path} now, or did. Two writers would "
                "mix their files, so this one has stopped. Once nobody writes there, the same "
                "command goes on from the last checkpoint."
            ) from None
        sign(fresh)

    def _gone(self) -> str:
        now, kept = self._now(), "nothing was written to the old place"
        if now is None:
            return (
                f"The run folder {self.path} was deleted while the run wrote to it, or is where "
                f"this process can't see it. The run has stopped, and {kept}. If you still have "
                "it, the same command with --run and its place goes on from its last checkpoint."
            )
        return (
            f"The run folder {self.path} was moved to {now} while the run wrote to it. The run has "
            f"stopped, and {kept}. It goes on from its last checkpoint with the same command and "
            f"--run {now}"
        )

    def _now(self) -> Path | None:
        """Return where the folder is by now, as far as the system tells."""
        with contextlib.suppress(OSError):
            now = Path(os.readlink(f"/proc/self/fd/{self._folder}"))
            return now if _is(self._folder, now) else None
        return None


def _is(descriptor: int, path: Path) -> bool:
    """Return whether the open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def writer(path: Path) -> str | None:
    """Return who writes to a folder now, in words; None if nobody does."""
    try:
        descriptor = os.open(path / NAME, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return holder(path / NAME)
    finally:
        os.close(descriptor)
    return None


# A forked child (a grader's worker) inherits the descriptors, and would hold the lock after its
# parent's death. It closes its copies, which leaves the parent's lock as it is.
_held: set[int] = set()


def _let_go_in_child() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def _take(descriptor: int, tries: int = 50, pause: float = 0.02) -> None:
    """Take the lock, trying for a second: whoever asks for the writer holds it for a moment."""
    for _ in range(tries - 1):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(pause)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def sign(descriptor: int) -> None:
    """Write into a lock that this process holds it."""
    me = {"pid": os.getpid(), "host": platform.node()}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, to_line(me).encode(), 0)


def holder(path: Path) -> str:
    """Return who signed a lock, in words."""
    try:
        signed = json.loads(path.read_bytes())
        elsewhere = signed["host"] != platform.node()
        return f"Process {signed['pid']}" + (f" on {signed['host']}" if elsewhere else "")
    except (OSError, ValueError, KeyError, TypeError):  # it has the lock, and has not signed yet
        return "Another process"
