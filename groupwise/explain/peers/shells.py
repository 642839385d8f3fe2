"""The commands of a shell script, taken apart without running anything.

Variables that the script sets to something plain are put in; what another program would say, or the
environment, is left as it is written and named as unread.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from groupwise.errors import RecipeError

SET = re.compile(r"(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
ARRAY = re.compile(r"([A-Za-z_]\w*)\+?=\((.*?)\)\s*$", re.DOTALL | re.MULTILINE)
WHOLE_ARRAY = re.compile(r"\"?\$\{([A-Za-z_]\w*)\[[@*]\]\}\"?")
VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^{}$]*))?\}|([A-Za-z_]\w*))")
NESTED = 4  # defaults within defaults: ${MODEL:-${HOME}/models}
PAIR = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
SEPARATORS = (";", "&&", "||", "|", "&")
NOTHING = ("null", "none", "~")


@dataclass(frozen=True)
class Command:
    """One command of a script, its variables put in."""

    words: tuple[str, ...]
    line: int
    unread: Mapping[str, str] = field(default_factory=dict)  # settings that only a run could know

    def pairs(self) -> dict[str, Any]:
        """Return its words `name=value`, as Hydra reads them."""
        found = {}
        for word in self.words:
            if (pair := PAIR.fullmatch(word)) and pair[1] not in self.unread:
                found[pair[1]] = scalar(pair[2])
        return found

    def flags(self) -> dict[str, Any]:
        """Return its words `--name value ...`; one without a value is true."""
        found: dict[str, Any] = {}
        name = ""
        for word in self.words:
            if word.startswith("--"):
                name, given, value = word[2:].partition("=")
                if name in self.unread:
                    name = ""
                elif name:
                    found[name] = scalar(value) if given else True
            elif name:
                value = scalar(word)
                before = found[name]
                found[name] = (
                    value
                    if before is True
                    else [*before, value]
                    if isinstance(before, list)
                    else [before, value]
                )
        return found


def scalar(text: str) -> Any:
    """Return a number, a truth, nothing, or a list, where a text is one; else the text."""
    plain = text.strip().strip("'\"")
    if plain.lower() in ("true", "false"):
        return plain.lower() == "true"
    if plain.lower() in NOTHING:
        return None
    try:
        return int(plain)
    except ValueError:
        pass
    try:
        return float(plain)
    except ValueError:
        pass
    if plain[:1] in "[(":
        try:
            return list(ast.literal_eval(plain))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return plain
    return plain


def commands(text: str, path: str) -> list[Command]:
    """Return the commands of a script, in its order."""
    text = text.replace("\r\n", "\n").replace("\\\n", " \f")  # a line that goes on counts on
    arrays = {
        name: re.sub(r"(^|\s)#[^\n]*", " ", body).replace("\n", " ")
        for name, body in ARRAY.findall(text)
    }
    lines = ARRAY.sub(lambda found: "\n" * found[0].count("\n"), text).split("\n")
    known = {"HOME": "~"}
    found, number = [], 1
    for line in lines:
        line = WHOLE_ARRAY.sub(lambda name: arrays.get(name[1], ""), line)
        for words in _commands(line.replace("\f", ""), path, number):
            rest = _assign(words, known)
            if rest:
                found.append(_command(rest, known, number))
        number += 1 + line.count("\f")
    return found


def _commands(line: str, path: str, number: int) -> Iterator[list[str]]:
    """Split a line into commands and those into words, with quotes taken off."""
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split, lexer.commenters = True, ""
        words = list(lexer)
    except ValueError:  # a quote that goes over lines: none of a setting's, as a rule
        words = line.split()
    command: list[str] = []
    for word in words:
        if word.startswith("#"):
            break
        if word in SEPARATORS:
            yield command
            command = []
        else:
            command.append(word)
    if command:
        yield command
    if len(words) > 10_000:
        raise RecipeError(f"{path}, line {number}: a command of {len(words):,} words.")


def _assign(words: list[str], known: dict[str, str]) -> list[str]:
    """Take the variables that stand in front of a command, and return the command."""
    for place, word in enumerate(words):
        if word in ("export", "local", "readonly"):
            continue
        setting = SET.fullmatch(word)
        if setting is None or "." in setting[1]:
            return words[place:]
        value, unknown = _filled(setting[2], known)
        if unknown:
            known.pop(setting[1], None)
        else:
            known[setting[1]] = value
    return []


def _command(words: list[str], known: Mapping[str, str], line: int) -> Command:
    unread, filled, name = {}, [], ""
    for word in words:
        value, unknown = _filled(word, known)
        filled.append(value)
        if word.startswith("--"):
            name = word[2:].partition("=")[0]
        pair = PAIR.fullmatch(word)
        if unknown and (setting := pair[1] if pair else name):
            unread[setting] = word[:200]
    return Command(tuple(filled), line, unread)


def _filled(text: str, known: Mapping[str, str]) -> tuple[str, bool]:
    """Put variables in; tell whether some are not known, or another program would say them."""

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        return known.get(name, found[2] if found[2] is not None else found[0])

    filled = text
    for _ in range(NESTED):
        filled = VARIABLE.sub(value, filled)
    return filled, "$" in filled or "`" in filled
