"""docs/commands.md and docs/api.md: no command, argument or public name without a word."""

from __future__ import annotations

import argparse
import re
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

import groupwise
from groupwise.cli import GROUPS
from groupwise.commands import api_page as api
from groupwise.commands.commands_page import (
    PURPOSES,
    arguments,
    commands_page,
    parsers_of,
    usage,
)
from groupwise.commands.overview import Overview

ROOT = Path(__file__).resolve().parents[2]
WHOLE = Overview(GROUPS)
COMMANDS = parsers_of(WHOLE)
PAGE = commands_page(WHOLE)
SHOWN = [
    (module, name) for part in api.PARTS for module, names in part.names.items() for name in names
]


# --- commands ---------------------------------------------------------------------------------


def test_the_pages_are_current() -> None:
    assert (ROOT / "docs" / "commands.md").read_text("utf-8") == PAGE, "run `make docs`"
    assert api.api_page() == (ROOT / "docs" / "api.md").read_text("utf-8"), "run `make docs`"


def test_every_command_has_a_purpose_and_every_purpose_a_command() -> None:
    assert sorted(PURPOSES) == sorted(COMMANDS)
    assert re.findall(r"^### (\S+)$", PAGE, re.MULTILINE) == list(COMMANDS)
    for name, said in PURPOSES.items():
        assert len(said.split()) >= 8 and said[0].isupper(), name


def test_a_command_without_a_purpose_has_no_page() -> None:
    class Odd(NamedTuple):
        __name__ = "odd"

        def add_parser(self, commands: object) -> None:
            commands.add_parser("odd", help="something", example="groupwise odd")  # type: ignore[attr-defined]

    with pytest.raises(KeyError, match="odd"):
        commands_page(Overview({"Odd": [Odd()]}))  # type: ignore[list-item]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_is_explained(name: str) -> None:
    part = PAGE.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    for action in arguments(COMMANDS[name]):
        assert action.help, f"groupwise {name}: {action.option_strings or action.dest} says nothing"
        assert (action.option_strings or [action.metavar or action.dest.upper()])[-1] in part or (
            action.choices
        )
    assert f"```\ngroupwise {name} " in part or f"```\ngroupwise {name}\n" in part
    assert "\nFor example:\n\n```\n" in part


def test_how_a_command_is_written() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", metavar="RUN")
    parser.add_argument("more", nargs="*", metavar="NAME")
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--kind", choices=("a", "b"))
    parser.add_argument("--port", type=int)
    parser.add_argument("--json", action="store_true")
    assert usage("do", parser) == (
        "groupwise do RUN [NAME ...] --out DIR [--kind a|b] [--port PORT] [--json]"
    )


# --- Python -----------------------------------------------------------------------------------


def test_every_public_name_is_on_the_page_once() -> None:
    ours = [name for module, name in SHOWN if module == "groupwise"]
    assert sorted(ours) == sorted(groupwise.__all__)
    assert len(set(SHOWN)) == len(SHOWN)


def test_every_name_that_is_taught_is_on_the_page() -> None:
    """What pages and examples import from the package is part of it."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    taught = {
        (module, name)
        for path in [*pages, *(ROOT / "examples").glob("*.py")]
        if path.name not in ("log.md", "api.md")
        for module, names in re.findall(
            r"^\s*from (groupwise[\w.]*) import ([^\n#(]+)$", path.read_text("utf-8"), re.MULTILINE
        )
        for name in re.findall(r"\w+", names)
    }
    assert len(taught) > 30 and taught - set(SHOWN) == set()


@pytest.mark.parametrize(("module", "name"), SHOWN)
def test_every_name_is_explained(module: str, name: str) -> None:
    value = getattr(import_module(module), name)
    assert len(api.described(name, value).split()) >= 5, f"{module}.{name} has no docstring"
    text = api.section(module, name)
    table = text.partition("| method |")[2]
    assert not re.findall(r"^\| `[^|]+` \|\s+\|$", table, re.MULTILINE), "a method without a word"
    assert " at 0x" not in text, "an address differs from process to process"


def test_what_says_nothing_is_seen() -> None:
    class Mute:
        def work(self) -> None: ...

    assert api.described("Mute", Mute) == ""
    assert list(api._methods("Mute", Mute)) == ["| `work()` |  |"]


def test_signatures_are_written_as_in_the_code() -> None:
    def short(a: int, *more: str, b: float | None = None, **rest: object) -> str: ...

    assert api.signature(short) == (
        "(a: int, *more: str, b: float | None = None, **rest: object) -> str"
    )

    def by_name(path: str, *, exact: bool = False) -> None: ...

    assert api.signature(by_name) == "(path: str, *, exact: bool = False) -> None"
    assert api.arguments(by_name, lambda each: each.name) == ["path", "*", "exact"]


def test_fields_have_their_comments() -> None:
    rows = list(api._fields("Turn", import_module("groupwise.records").Turn))
    assert rows[1] == "| `start` |  | the first of its tokens |"
    batch = "\n".join(api._fields("TokenBatch", groupwise.TokenBatch))
    assert "| `ref_logp_NT` | `None` | the reference model's log-probabilities |" in batch
