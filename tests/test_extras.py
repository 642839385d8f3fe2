"""Commands that install what is missing: they must work where they are read."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from groupwise import extras
from groupwise.extras import install, packages

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def names(wanted: list[str]) -> set[str]:
    return {re.split(r"[\[<>=]", each)[0].lower().replace("_", "-") for each in wanted}


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - {"dev"}))
def test_an_extra_is_installed_by_its_packages_names(extra: str) -> None:
    own = {each for each in EXTRAS[extra] if not each.startswith("groupwise[")}
    assert names(packages(extra)) >= names(list(own))
    command = shlex.split(install(extra))
    assert "install" in command and not any("groupwise" in word for word in command)


def test_a_checkout_that_is_not_installed_is_installed_with_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", absent)
    assert shlex.split(install("view"))[-3:] == ["install", "-e", f"{ROOT}[view]"]


@pytest.mark.parametrize(("beside", "words"), [(True, "pip"), (False, "-m pip")])
def test_pip_is_that_of_the_python_that_lacks_it(
    beside: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(sys.executable).parent if beside else tmp_path
    monkeypatch.setattr(extras.shutil, "which", lambda name: str(folder / name))
    command = install("view")
    assert command.startswith("pip install" if beside else f"{sys.executable} -m pip install")
    assert words in command


def test_no_message_names_a_package_that_no_index_has() -> None:
    files = [*(ROOT / "groupwise").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    told = [str(file) for file in files if "groupwise[" in file.read_text("utf-8")]
    assert told == []
