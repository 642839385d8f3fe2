"""Users' files, and the modules beside them that they import as part of their code."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

_HELPERS: dict[str, str] = {}  # what files import from beside them, and their folders
_FOLDERS: set[str] = set()  # of those files


def code_files(file: str | Path) -> list[str]:
    """Return the file, the files beside it that it imports, those that these import, and so on."""
    first = Path(file)
    found: set[Path] = set()
    ahead = [first]
    while ahead:
        path = ahead.pop()
        if path not in found:
            found.add(path)
            ahead += _imported(path, first.parent)
    return sorted(map(str, found))


def make_importable(file: str | Path, shadows: bool = False) -> None:
    """Put the file's folder before those of other files and after installed packages; but first of
    all where this process serves that file alone, as for a script.
    """
    folder = str(Path(file).parent)
    for name, module in list(sys.modules.items()):  # another folder's module of the same name
        if _HELPERS.get(getattr(module, "__file__", None) or "", folder) != folder:
            del sys.modules[name]
    _HELPERS.update({path: folder for path in code_files(file) if path != str(file)})
    _FOLDERS.add(folder)
    ours = [place for place in sys.path if place not in _FOLDERS]
    theirs = [place for place in sys.path if place in _FOLDERS and place != folder]
    sys.path[:] = [folder, *ours, *theirs] if shadows else [*ours, folder, *theirs]


def forget(file: str | Path) -> None:
    """Forget the modules that the file imported, so that they are read again."""
    files = set(code_files(file))
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) in files:
            del sys.modules[name]
    importlib.invalidate_caches()


def _imported(path: Path, root: Path) -> Iterator[Path]:
    """Yield the imports anywhere in the file, in functions too; none if it can't be parsed."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names, base = [alias.name for alias in node.names], root
        elif isinstance(node, ast.ImportFrom):
            inside = node.module or ""
            names = [inside, *(f"{inside}.{alias.name}".strip(".") for alias in node.names)]
            base = path.parents[node.level - 1] if node.level else root
        else:
            continue
        for name in names:
            yield from _files_of(name, base)


def _files_of(name: str, base: Path) -> Iterator[Path]:
    """Yield the files of a module and of the packages that contain it."""
    parts = name.split(".") if name else []
    for depth in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:depth])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                yield path
