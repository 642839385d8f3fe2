"""Commands that install what is missing: they must work where they are read."""

from __future__ import annotations

import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from groupwise.common import extras
from groupwise.common.extras import install, packages

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - {"dev"}))
def test_an_extra_is_installed_by_its_packages_names(extra: str) -> None:
    assert packages(extra) == EXTRAS[extra]
    command = shlex.split(install(extra))
    assert command[-len(EXTRAS[extra]) :] == EXTRAS[extra]
    assert "install" in command and not any("groupwise[" in word for word in command)


def test_in_a_checkout_its_own_list_counts_and_not_an_older_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extras, "requires", lambda name: ["plotly==1.0; extra == 'view'"])
    assert packages("view") == EXTRAS["view"]


def test_without_a_checkout_the_installed_record_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "PROJECT", tmp_path / "pyproject.toml")
    record = ["torch>=2", "plotly>=6; extra == 'view'", 'matplotlib; extra == "view"',
              "plotly; extra == 'viewer'"]  # fmt: skip
    monkeypatch.setattr(extras, "requires", lambda name: record)
    assert packages("view") == ["plotly>=6", "matplotlib"]
    # What lies beside an installed package is not its project.
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    assert packages("view") == ["plotly>=6", "matplotlib"]


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
