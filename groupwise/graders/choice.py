"""Multiple choice: the letter that a completion settles on. Naming several is naming none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from groupwise.graders.mathematics.extract import find
from groupwise.graders.mathematics.spelling import TEXT

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MOST = 10  # options, where a row does not list them
# A letter on its own, in brackets or not; letters of other scripts may stand beside it.
LETTER = re.compile(r"(?<![A-Za-z\d'’_\\])([A-Z])(?![A-Za-z\d'’_])")
LABEL = re.compile(r"[\s*_\"'`]*(?:\(([A-Z])\)|\[([A-Z])\]|([A-Z])[).:：、](?!\w))")
ARTICLE = re.compile(r"\s+[a-z]")  # 'A dog', 'I think': a word, no option
# What follows is a reason, or what the answer is not.
NOT = re.compile(
    r"\b(?:because|since|not|rather than|instead of|can['’]?t|cannot|isn['’]t|non|pas|nicht|"
    r"kein\w*|niet|не|nie)\b|n['’]t\b|不是|不|而非|じゃない|ではない|아니",
    re.IGNORECASE,
)
SPLIT = re.compile(r"[\n。]|(?<=[^A-Z\s.])\.\s")


class Options(NamedTuple):
    letters: str
    texts: tuple[str, ...] = ()


def options(columns: Any) -> Options:
    """Return the options of a row: its column `choices` or `options`, a list or a dict."""
    given = columns.get("choices", columns.get("options"))
    if isinstance(given, dict) and isinstance(given.get("text"), list):  # as in ARC
        given = given["text"]
    if isinstance(given, dict):
        given = [given[key] for key in sorted(given)]
    if not isinstance(given, (list, tuple)) or not 2 <= len(given) <= len(LETTERS):
        return Options(LETTERS[:MOST])
    return Options(LETTERS[: len(given)], tuple(_plain(str(text)) for text in given))


def gold_letter(answer: Any, known: Options) -> str | None:
    """Read the right letter from 'C', '(C) Cecile', an option's number (from 0), or its text."""
    if isinstance(answer, int) and not isinstance(answer, bool):
        return known.letters[answer] if 0 <= answer < len(known.texts) else None
    if not isinstance(answer, str) or not answer.strip():
        return None
    return chosen(answer, known)


def chosen(
    text: str, known: Options, ends: tuple[str, ...] = (), *, cut: bool = False
) -> str | None:
    """Return the one letter that a completion gives as its answer, or None."""
    found = find(text, ends, cut=cut)
    said = TEXT.sub(r" \1 ", found.text)
    if found.how == "whole":
        lines = [line for line in said.splitlines() if line.strip()]
        said = lines[-1] if lines else ""
    if re.fullmatch(r"[\s(*$\[]*[a-z][\s)*$.\]]*", said):
        said = said.upper()
    by_text = _by_text(said, known)
    if by_text is not None:
        return by_text or None
    if found.how in ("whole", "marked"):
        said = next((part for part in SPLIT.split(said) if LETTER.search(part)), said)
    positive = NOT.split(said)[0]
    named = _named(positive if LETTER.search(positive) else said, known)
    labels = dict.fromkeys(letter for letter in _labels(said) if letter in known.letters)
    if len(named) > 1 and len(labels) == 1 and LABEL.match(said):
        return next(iter(labels))  # (C) Cecile and B: the label, not the text behind it
    return named[0] if len(named) == 1 else None


def _named(text: str, known: Options) -> list[str]:
    found = [
        match[1]
        for match in LETTER.finditer(text)
        if match[1] in known.letters
        and not (match[1] in "AI" and ARTICLE.match(text, match.end()) and not _sure(text, match))
    ]
    return list(dict.fromkeys(found))


def _sure(text: str, match: re.Match[str]) -> bool:
    """Return whether a letter is an option though a word follows: 'is A because', 'A or B'."""
    behind = text[match.end() : match.end() + 9].split()
    return bool(behind) and behind[0] in ("or", "and", "because", "is", "since", "as", "but")


def _labels(text: str) -> list[str]:
    found = re.finditer(r"\(([A-Z])\)|(?<![A-Za-z])([A-Z])[).:](?!\w)", text)
    return [next(group for group in match.groups() if group) for match in found]


def _by_text(said: str, known: Options) -> str | None:
    """Return the option whose text this is; '' if its label is another's."""
    if not known.texts:
        return None
    plain = _plain(LABEL.sub("", said, count=1) if LABEL.match(said) else said)
    hits = [
        letter for letter, text in zip(known.letters, known.texts, strict=True) if text == plain
    ]
    label = LABEL.match(said)
    if label and hits:
        own = next(group for group in label.groups() if group)
        return own if own in hits else ""  # 'B) text of C' says two things
    return hits[0] if len(hits) == 1 else None


def _plain(text: str) -> str:
    return " ".join(text.split()).strip(" .*_\"'`").casefold()


def verdict(
    text: str, gold: str, known: Options, ends: Sequence[str] = (), *, cut: bool = False
) -> tuple[float, str]:
    """Return 1 for the right letter alone."""
    letter = chosen(text, known, tuple(ends), cut=cut)
    if letter is None:
        return 0.0, "no single option is named"
    return float(letter == gold), f"{letter} is {'' if letter == gold else 'not '}{gold}"
