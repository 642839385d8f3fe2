"""Imports follow one list of layers: what stands lower knows nothing of what stands higher.

The tests have the folders of the package, and know nothing of each other.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / "groupwise"
# From the bottom to the top. A folder or module imports from its own layer's left and from below.
LAYERS = (
    "errors streams parallel records",
    "common hub",
    "methods",
    "groups losses",
    "dialects recipes",
    "config",
    "runfiles model",
    "data engine graders envs optim",
    "testing explain",
    "watch sync",
    "prepare",
    "evaluate",
    "stages",
    "training",
    "plan probing compare replay view",
    "pipeline",
    "commands",
    "cli __main__",
)
ORDER = [room for layer in LAYERS for room in layer.split()]


def rooms() -> set[str]:
    return {
        path.stem
        for path in PACKAGE.iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists()) and path.stem != "__init__"
    }


def imports() -> Iterator[tuple[str, str, str]]:
    """Every import of one room by another, with its line; inside functions too."""
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room != "__init__":
            for line, name in _imported(ast.parse(path.read_text("utf-8"))):
                yield room, name, f"{path.relative_to(PACKAGE.parent)}:{line}"


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "groupwise":
            parts = (node.module or "").split(".")[1:]
            for name in [parts[0]] if parts else [alias.name for alias in node.names]:
                yield node.lineno, name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("groupwise."):
                    yield node.lineno, alias.name.split(".")[1]
        yield from _imported(node)


def modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every module that is imported, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name


def test_every_room_has_its_layer() -> None:
    assert sorted(ORDER) == sorted(rooms())


def test_the_page_shows_the_same_layers() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text("utf-8")
    block = page.partition("## Layers")[2].split("```")[1]
    rooms_of = [re.split(r"\s{2,}", line)[0] for line in block.strip().splitlines()]
    assert [room for line in rooms_of for room in line.split(", ")] == ORDER[:-1]  # no __main__


def test_imports_go_down() -> None:
    wrong = [
        f"{line}: {room} imports {name}, which stands above it"
        for room, name, line in imports()
        if name in ORDER and ORDER.index(name) > ORDER.index(room)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_tests_have_the_folders_of_the_package() -> None:
    """Beside them: tests of the project itself, what test files share, numbers from elsewhere."""
    files = [path for path in TESTS.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    known = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    known |= {"project", "support", "golden", "conftest.py"}
    assert {path.relative_to(TESTS).parts[0] for path in files} <= known


def test_test_files_know_nothing_of_each_other() -> None:
    """What two of them use is in tests/support; their names differ, as they are all modules."""
    files = sorted(TESTS.rglob("test_*.py"))
    names = [path.stem for path in files]
    assert len(set(names)) == len(names)
    wrong = [
        f"{path.relative_to(TESTS.parent)}:{line}: imports {module}"
        for path in [*files, *(TESTS / "support").glob("*.py")]
        for line, module in modules(ast.parse(path.read_text("utf-8")))
        if module.split(".")[-1] in names
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("older", "name"),
    [
        ("groupwise.slots", "gate"),
        ("groupwise.slots", "REGISTRY"),
        ("groupwise.composition", "load_plugin"),
        ("groupwise.losses.kl", "bounded_exp"),
        ("groupwise.model.head", "logits"),
        ("groupwise.model.attention", "packed"),
        ("groupwise.planning", "plan"),
        ("groupwise.loop", "Stopped"),
        ("groupwise.validate.probe", "Asked"),
        ("groupwise.validate.advice", "advise"),
    ],
)
def test_names_that_users_import_stay(older: str, name: str) -> None:
    """It is the same thing under both names, not a copy."""
    import groupwise

    found = getattr(importlib.import_module(older), name)
    assert found is getattr(importlib.import_module(groupwise._MOVED[older]), name)


@pytest.mark.parametrize(
    "line",
    [
        "from groupwise.composition import recipe; recipe('dapo')",
        "from groupwise.slots import parse; parse('gate', 'clip()')",
    ],
)
def test_under_an_older_name_all_recipes_and_slots_are_known(line: str) -> None:
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
