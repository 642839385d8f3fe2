"""Files that match a pattern, and a hash of their contents.

Links to folders are not followed by `**`: they may lead in circles.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def matching_files(pattern: str) -> list[str]:
    """Return the files that match, sorted by name; a file that several links lead to comes once."""
    before, deep, behind = pattern.partition("**/")
    if not deep:
        found = glob.glob(pattern)
    else:
        folders = [inner for root in glob.glob(before or "./") for inner in _folders(root)]
        found = [
            each
            for folder in folders
            for each in glob.glob(os.path.join(glob.escape(folder), behind.replace("**/", "*/")))
        ]
    by_place = {os.path.realpath(each): each for each in sorted(found, reverse=True)}
    return sorted(os.path.normpath(each) for each in by_place.values() if Path(each).is_file())


def digest(files: Iterable[str]) -> str:
    """Return a hash that changes with any byte of the files; "" without files."""
    sources = [Path(file).expanduser().read_bytes() for file in sorted(set(files))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()[:16] if sources else ""


def _folders(root: str) -> list[str]:
    """Return the folder and all folders in it, except hidden ones."""
    found = []
    for folder, inner, _ in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(".")]
        found.append(folder)
    return found
