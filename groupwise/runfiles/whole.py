"""Files and folders that appear whole: written beside their place, synced, renamed.

What is unfinished is locked while its writer lives, under a name of its own: two processes that
write the same never touch each other's, and what a dead one left is known for that.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from groupwise.errors import RunError

PARTIAL = ".partial"  # how a name ends while it is being written


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write to: it takes its place when all is written, durable, or not at all."""
    beside, descriptor = _unfinished(path)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        _remove(beside)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def whole_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Give a folder to fill with files: it takes its place when all is written, or not at all."""
    beside, descriptor = _unfinished(path, folder=True)
    try:
        yield beside
        for file in beside.iterdir():  # on the disk before the name is
            _sync(file)
        os.fsync(descriptor)
        _put(beside, path, replace)
    except BaseException:
        _remove(beside)
        raise
    finally:
        os.close(descriptor)
    sync_folder(path.parent)


def _put(beside: Path, path: Path, replace: bool) -> None:
    """Rename a folder; one that has files is in the way, unless it is to be replaced."""
    if not (replace and path.exists()):
        beside.rename(path)
        return
    old = path.with_name(_half_name(path))
    path.rename(old)
    try:
        beside.rename(path)
    except OSError:
        old.rename(path)
        raise
    _remove(old)


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Hold the name of a file that takes long to make; refuse it to whoever comes second.

    An empty unfinished file says so, locked while this process lives.
    """
    remove_unfinished(path.parent, path.name)
    try:
        mine, descriptor = _unfinished(path)
    except OSError as error:
        raise RunError(f"{path} can't be written: {error}. Choose another name.") from None
    try:
        others = [half for half in _halves(path.parent, path.name) if half != mine]
        if others:
            raise RunError(
                f"Another process is making {path}. Wait for it, or choose another name. Where "
                f"none is at work, remove {others[0]}."
            )
        yield
    finally:
        _remove(mine)
        os.close(descriptor)


def _unfinished(path: Path, *, folder: bool = False) -> tuple[Path, int]:
    """Make an unfinished file, or folder, beside a path, locked for as long as its writer lives."""
    while True:
        half = path.with_name(_half_name(path))
        if folder:
            half.mkdir()
            descriptor = os.open(half, os.O_RDONLY)
        else:
            descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(OSError):  # where a file system has no locks, nobody tidies
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return half, descriptor
        os.close(descriptor)  # tidied away before it was locked


def _half_name(path: Path) -> str:
    return f".{path.name}.{os.urandom(4).hex()}{PARTIAL}"


def _halves(folder: Path, name: str = "") -> Iterator[Path]:
    """List what is unfinished in a folder: of one file, or of all."""
    mine = f".{glob.escape(name)}.{'[0-9a-f]' * 8}" if name else ".*"
    return folder.glob(f"{mine}{PARTIAL}")


def remove_unfinished(folder: Path, name: str = "") -> None:
    """Remove what dead processes left half written; what a living one writes is left alone.

    In a folder that is the user's, give the `name` of the file: other programs may write there.
    """
    for half in _halves(folder, name):
        with contextlib.suppress(OSError):  # locked by its writer, or gone by now
            descriptor = os.open(half, os.O_RDONLY if half.is_dir() else os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(half)
            finally:
                os.close(descriptor)


def _remove(half: Path) -> None:
    if half.is_dir():
        shutil.rmtree(half, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make names that were added to or taken from a folder durable."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
