"""Notation that may go to the engine: it reads it as we do, to the last sign.

It drops signs that it does not know and picks among the rest, so what it says of other texts is
worth nothing.
"""

from __future__ import annotations

import re

from groupwise.graders.mathematics.spelling import Unsure, clean

MAX_LENGTH = 2_000  # characters
COMMAND = re.compile(r"\\[a-zA-Z]+")
WORDS = (
    "frac dfrac tfrac sqrt sum prod int lim to infty pi cdot times div left right binom dbinom sin "
    "cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp lfloor rfloor lceil rceil "
    "max min det begin end le leq ge geq lt gt ne neq pm cup alpha beta gamma delta theta lambda "
    "mu rho sigma tau phi omega limits lvert rvert"
)
KNOWN = frozenset(f"\\{word}" for word in re.findall(r"\w+", WORDS))
UNKNOWN = re.compile(r"[:'’\"?#%$@~]|\d\s+\d|(?<![\\a-zA-Z{])[a-zA-Z]{4,}|\.\.|\\\\\s*\[")
# What it can do, and we can't: work out, and solve.
WORK = re.compile(
    r"\\(?:lfloor|lceil|sum|prod|int|lim|max|min|det|log|sqrt|frac|d?binom|begin)(?![a-z])|[\^!|]"
)
STANDING = re.compile(r"\\(?:sum|prod|int|lim)(?![a-z])")
COMPARES = re.compile(r"\\(?:l[et]|g[et]|leq|geq|neq?)(?![a-z])|[=<>≤≥≠]")
UNBRACED = re.compile(
    r"\\(frac|binom)\s*(\d|\{[^{}]*\})\s*(\d|\{[^{}]*\})|\\(sqrt)\s*(\d)"
)  # \frac12
ONE_DIGIT = re.compile(r"([_^])\s*(\d)(?=\s+\d)")  # \int_0^1 14x: no number 1 14
BOUND = re.compile(r"_\s*\{[^{}]*\}")  # of \sum_{k=1}: no equation
OF_A_SET = re.compile(r"\A\s*[a-zA-Z]\s*(?:\\in(?![a-z])|∈)")  # x in [0, 1]


def plain_notation(text: str) -> str | None:
    """Return an answer as the engine is shown it; None if it would not read all of it."""
    if len(text) > MAX_LENGTH:
        return None
    try:
        plain, percent, _ = clean(text)
    except Unsure:
        return None
    plain = ONE_DIGIT.sub(r"\1{\2}", UNBRACED.sub(_braced, OF_A_SET.sub("", plain)))
    known = KNOWN.issuperset(COMMAND.findall(plain))
    return None if percent or not known or UNKNOWN.search(plain) else plain


def is_work(gold: str, answer: str, number: bool) -> bool:
    """Tell whether there is something to work out or to solve. A `number` is no inequality."""
    if number and COMPARES.search(BOUND.sub("", answer)):
        return False
    return any(WORK.search(text) or COMPARES.search(text) for text in (gold, answer))


def is_left_to_do(gold: str, answer: str) -> bool:
    """Tell whether an answer leaves a sum, product, integral or limit that the gold has not.

    It would often be the question itself, said again.
    """
    return bool(STANDING.search(answer)) and not STANDING.search(gold)


def _braced(found: re.Match[str]) -> str:
    parts = [part.strip("{}") for part in (found[2], found[3], found[5]) if part]
    return f"\\{found[1] or found[4]}" + "".join(f"{{{part}}}" for part in parts)
