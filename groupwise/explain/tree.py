"""The package as a tree: every folder and file with the first sentence of its docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

BEGIN, END = "<!-- The tree, written by `make docs`. -->", "<!-- The end of the tree. -->"
PACKAGE = Path(__file__).parents[1]
# In the order of the data, then what the cycle runs in and on, then what looks at it.
ROOMS = (
    ("The cycle, in order", "data engine envs graders groups losses optim sync"),
    (
        "What the cycle runs in and on",
        "records methods model prepare stages training pipeline parallel config common",
    ),
    (
        "To see and to judge",
        "runfiles watch view explain evaluate plan probing compare replay commands testing",
    ),
)

QUOTES = '"""'


def with_tree(page: str) -> str:
    """Return a page with the tree as it is now between its two marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{''.join(_sections())}{END}{tail}"


def _sections() -> Iterator[str]:
    for title, rooms in ROOMS:
        folders = "".join(_folder(PACKAGE / room) for room in rooms.split())
        yield f"### {title}\n\n{folders}"
    files = "".join(f"- {_line(path)}\n" for path in _files(PACKAGE))
    yield f"### Beside the folders\n\n{files}\n"


def _folder(folder: Path) -> str:
    files = "".join(f"- {_line(path)}\n" for path in _files(folder))
    inner = sorted(x.parent for x in folder.glob("*/__init__.py"))
    name = f"{folder.relative_to(PACKAGE)}/"
    return f"**`{name}`** {said(folder / '__init__.py')}\n\n{files}\n" + "".join(
        map(_folder, inner)
    )


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("[!_]*.py"))


def _line(path: Path) -> str:
    return f"`{path.name}`: {said(path)}"


def said(path: Path) -> str:
    """Return the first sentence of a file's docstring."""
    text = path.read_text("utf-8")
    if text.startswith(QUOTES):  # the rest needs no reading
        text = text[: text.index(QUOTES, len(QUOTES)) + len(QUOTES)]
    found = ast.get_docstring(ast.parse(text)) or ""
    paragraph = " ".join(found.partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s", paragraph, maxsplit=1)[0]
