"""Formulas of a text, between dollars or LaTeX brackets. Each delimiter is read once: linear."""

from __future__ import annotations

import re

DELIMITER = re.compile(r"\$\$|(?<!\\)\$|\\[\[\]()]|\n")
MONEY = re.compile(r"[\d.,]+[^\\]*[^\W\d_]{3}[^\\]*")  # $5 and the other for $: no formula
PRICE = re.compile(r"\s?[-−–]?[\d.,]+(?![\d.,]*[a-zA-Z{])(?![^\n]*[\\^_])")
DISPLAY = re.compile(
    r"\\begin\{((?:align|equation|gather|multline)\*?)\}([^$]{0,4000}?)\\end\{\1\}", re.DOTALL
)
NEW_LINE = re.compile(r"\\\\(?:\[[^\]]{0,12}\])?")
CLOSING = {"$$": "$$", "$": "$", r"\[": r"\]", r"\(": r"\)"}


def formulas(text: str) -> list[str]:
    """Return what each formula of a text holds."""
    return _scan(text)[0]


def last_formula(text: str) -> str | None:
    found = formulas(text)
    return found[-1] if found else None


def ends_inside(text: str) -> bool:
    """Tell whether a text ends before its last formula does. A dollar and digits are money."""
    return ("$" in text or "\\" in text) and _scan(text)[1]


def _scan(text: str) -> tuple[list[str], bool]:
    found, opened, start = [], "", 0
    for sign in DELIMITER.finditer(text):
        if opened and sign[0] == CLOSING[opened]:
            inside = text[start : sign.start()].strip()
            if opened == "$" and MONEY.fullmatch(inside):
                start = sign.end()
                continue
            found.append(inside)
            opened = ""
        elif opened == "$" and sign[0] == "\n":
            opened = ""
        elif not opened and sign[0] in CLOSING:
            opened, start = sign[0], sign.end()
    money = opened == "$" and PRICE.match(text, start)
    still_open = bool(opened) and bool(text[start:].strip() or opened != "$") and not money
    return [inside for inside in found if inside], still_open


def in_brackets(text: str) -> str:
    """Write displays of several lines (align, gather, ...) as one formula: the last of their lines,
    which says what the others come to. One that holds a box keeps them all."""
    return DISPLAY.sub(_bracketed, text) if r"\begin{" in text else text


def _bracketed(display: re.Match[str]) -> str:
    inside = display[2].replace("&", " ")
    lines = [line.strip(" \n.,") for line in NEW_LINE.split(inside)]
    if "box" not in inside:
        lines = [line for line in lines if line][-1:]
    return rf"\[{' '.join(lines).removeprefix('=')}\]"
