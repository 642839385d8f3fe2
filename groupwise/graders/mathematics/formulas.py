"""Formulas of a text, between dollars or LaTeX brackets. Each delimiter is read once: linear."""

from __future__ import annotations

import re

DELIMITER = re.compile(r"\$\$|(?<!\\)\$|\\[\[\]()]|\n")
MONEY = re.compile(r"[\d.,]+[^\\]*[^\W\d_]{3}[^\\]*")  # $5 and the other for $: no formula
PRICE = re.compile(r"\s?[-−–]?[\d.,]+(?![\d.,]*[a-zA-Z{])(?![^\n]*[\\^_])")
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
