"""Tags and a note on a run: notes.json in its folder, the one file that the viewer writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from groupwise.errors import RunError
from groupwise.runfiles import schemas
from groupwise.runfiles.files import read_object, to_page, write_atomic
from groupwise.runfiles.folder import RunFolder

FILE = "notes.json"
MOST_TAGS, LONGEST_TAG, LONGEST_NOTE = 20, 40, 4000
fits = schemas.table({"tags": schemas.each(schemas.text), "note": schemas.text})


@dataclass(frozen=True)
class Notes:
    """Words of people about a run."""

    tags: tuple[str, ...] = ()
    note: str = ""


def read_notes(folder: RunFolder) -> Notes:
    """Read what is written; nothing where there is no such file."""
    found = read_object(folder.path / FILE, fits)
    return Notes(tuple(found.get("tags", ())), found.get("note", ""))


def write_notes(folder: RunFolder, asked: Mapping[str, Any]) -> Notes:
    """Write tags and note in place of those before; refuse what is none or too long."""
    wrong = fits(asked)
    if wrong:
        raise RunError(f"Tags and note can't be written: {wrong}.")
    tags = tuple(dict.fromkeys(" ".join(tag.split()) for tag in asked.get("tags", ())))
    made = Notes(tuple(tag for tag in tags if tag), asked.get("note", "").strip())
    longest = max(map(len, made.tags), default=0)
    if len(made.tags) > MOST_TAGS or longest > LONGEST_TAG or len(made.note) > LONGEST_NOTE:
        raise RunError(
            f"A run has at most {MOST_TAGS} tags of {LONGEST_TAG} characters and a note of "
            f"{LONGEST_NOTE}: shorten them."
        )
    with folder.writing(FILE):
        write_atomic(folder.path / FILE, to_page({"tags": made.tags, "note": made.note}))
    return made
