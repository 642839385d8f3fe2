"""Errors of a disk, turned into advice for a person."""

from __future__ import annotations

import errno
from pathlib import Path

from groupwise.errors import DiskError, RunError


def disk_error(what: str, folder: Path, error: OSError) -> RunError:
    """Return the error to show where a file of a run folder can't be written."""
    place = f"{what} of the run folder {folder}"
    if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
        return RunError(
            f"Can't write {place}: a file is in the way of a folder, or a folder in the way of "
            f"a file ({error}). Move it away, or choose another run folder with --run."
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return RunError(
            f"Can't write {place}: it is read-only for this user ({error}). Change its "
            "permissions, or choose another run folder with --run."
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskError(f"Can't write {place}: the disk or the quota is full. Free some space.")
    return DiskError(f"Can't write {place}: the disk reports an error ({error}). Check the disk.")
