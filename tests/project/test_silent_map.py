"""docs/silent_bugs.md: every number has its tests, and every test that is named exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NUMBERED = re.compile(r"(?:bug_)?(\d+)_")


def mapped() -> dict[int, set[tuple[str, str]]]:
    """Number -> file and name of its tests, as the page has them."""
    found = {}
    for line in (ROOT / "docs" / "silent_bugs.md").read_text("utf-8").splitlines():
        if row := re.match(r"\| (\d+) \| .+ \| (.+) \|$", line):
            assert int(row[1]) not in found, line
            found[int(row[1])] = {
                (file, name)
                for file, names in re.findall(r"`(test_\w+\.py)`: ((?:`\w+`(?:, )?)+)", row[2])
                for name in re.findall(r"`(\w+)`", names)
            }
    return found


def written() -> set[tuple[str, str]]:
    """File and name of every test, without `test_`."""
    return {
        (path.name, node.name.removeprefix("test_"))
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_silent_bug_has_tests_that_exist() -> None:
    page = mapped()
    assert list(page) == list(range(1, 47))
    assert all(page.values())
    assert set.union(*page.values()) <= written()


def test_every_test_with_a_number_is_on_the_page() -> None:
    page = mapped()
    for file, name in written():
        if name.startswith("bug_") or file == "test_silent_bugs.py":
            number = NUMBERED.match(name)
            assert number and (file, name) in page[int(number[1])], (file, name)
