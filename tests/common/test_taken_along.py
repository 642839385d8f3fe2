"""Functions that no file has at its top level, written into one with all that they use."""

from __future__ import annotations

import linecache
import math
import runpy
import sys
from collections.abc import Callable, Iterator
from math import sqrt
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from groupwise.common.taken_along import place_of
from groupwise.errors import RewardError

SHIFT = 2


def at_the_top(completion: str) -> float:
    return float(len(completion))


def loaded(place: str) -> Any:
    file, _, name = place.rpartition(":")
    return runpy.run_path(file)[name]


@pytest.fixture
def cell() -> Iterator[Callable[[str], dict[str, Any]]]:
    """Runs text as a notebook does: no file, but its lines can be found."""
    main = ModuleType("__main__")
    names: list[str] = []

    def run(text: str) -> dict[str, Any]:
        name = f"<cell {len(names)}>"
        names.append(name)
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), main.__dict__)
        return main.__dict__

    kept = sys.modules["__main__"]
    sys.modules["__main__"] = main
    yield run
    sys.modules["__main__"] = kept
    for name in names:
        del linecache.cache[name]


def test_a_function_of_a_file_stays_there(tmp_path: Path) -> None:
    assert place_of(at_the_top, tmp_path / "reward.py") == f"{__file__}:at_the_top"
    assert not (tmp_path / "reward.py").exists()


def test_a_function_of_a_notebook_takes_along_what_it_uses(
    tmp_path: Path, cell: Callable[[str], dict[str, Any]]
) -> None:
    cell("import re, math as m\nfrom math import sqrt\nLEAST = 3\nunused = object()\n")
    cell("def digits(text):\n    return re.findall(r'[0-9]', text)\n")
    names = cell(
        "def reward(completion: Unknown, least=LEAST):\n"
        "    return sqrt(sum(int(x) for x in digits(completion))) + m.pi + least\n"
    )
    place = place_of(names["reward"], tmp_path / "run" / "reward.py")
    assert place == f"{tmp_path}/run/reward.py:reward"
    assert loaded(place)("1a3") == math.sqrt(4) + math.pi + 3
    assert "unused" not in (tmp_path / "run" / "reward.py").read_text()


def test_the_same_function_is_written_once(
    tmp_path: Path, cell: Callable[[str], dict[str, Any]]
) -> None:
    """A file that is touched would be loaded anew, and a run would say that its reward changed."""
    names = cell("def reward(completion):\n    return 1.0\n")
    file = tmp_path / "reward.py"
    place_of(names["reward"], file)
    first = file.stat().st_mtime_ns
    place_of(names["reward"], file)
    assert file.stat().st_mtime_ns == first
    place_of(cell("def reward(completion):\n    return 2.0\n")["reward"], file)
    assert loaded(f"{file}:reward")("") == 2.0


def test_a_function_within_a_function_takes_along_what_it_was_made_with(tmp_path: Path) -> None:
    def made(power: int) -> Callable[[str], float]:
        def reward(completion: str) -> float:
            return sqrt(len(completion) ** power) + SHIFT

        return reward

    place = place_of(made(4), tmp_path / "reward.py")
    assert loaded(place)("abc") == 11.0


def test_a_function_behind_a_guard_is_written_out(tmp_path: Path) -> None:
    """Who loads the script as a module does not find it there."""
    script = tmp_path / "script.py"
    script.write_text(
        "if __name__ == '__main__':\n    def reward(completion):\n        return 5.0\n"
    )
    found = ModuleType("__main__")
    code = compile(script.read_text(), str(script), "exec")
    kept, sys.modules["__main__"] = sys.modules["__main__"], found
    try:
        exec(code, found.__dict__)
        place = place_of(found.__dict__["reward"], tmp_path / "reward.py")
    finally:
        sys.modules["__main__"] = kept
    assert place == f"{tmp_path}/reward.py:reward" and loaded(place)("") == 5.0


def test_what_cannot_be_written_is_refused_by_name(
    tmp_path: Path, cell: Callable[[str], dict[str, Any]]
) -> None:
    names = cell("client = object()\ndef reward(completion):\n    return client.ask(completion)\n")
    with pytest.raises(RewardError, match=r"reward uses client, a object, .*reward\.parts"):
        place_of(names["reward"], tmp_path / "reward.py")
    with pytest.raises(RewardError, match="no function with a name"):
        place_of(lambda completion: 1.0, tmp_path / "reward.py")
    with pytest.raises(RewardError, match="no function with a name"):
        place_of(Path, tmp_path / "reward.py")
    vague: dict[str, Any] = {"__name__": "__main__"}
    exec("def reward(completion):\n    return 1.0\n", vague)
    with pytest.raises(RewardError, match="text of reward can't be found"):
        place_of(vague["reward"], tmp_path / "reward.py")
    assert not (tmp_path / "reward.py").exists()
