"""Reads mathematical notation, LaTeX or plain, into small trees, and refuses what is not clear.

A tree is a tuple: ("number", Fraction), ("name", "x"), (operation, tree, ...), a collection:
("list" | "set" | "tuple" | "union" | "matrix", ...), or a statement: ("named", name, value),
("equation", left, right), ("relation", "<" | "<=" | "!=", left, right), ("and" | "or", relations).
`None` means that another reader has to be asked: nothing here guesses.
"""

from __future__ import annotations

import re
from functools import lru_cache

from groupwise.graders.mathematics.expressions import Expressions
from groupwise.graders.mathematics.numerals import in_words
from groupwise.graders.mathematics.spelling import (
    FUNCTIONS,
    Unsure,
    clean,
    only_words,
    take_unit,
    with_points,
)
from groupwise.graders.mathematics.tokens import Tree

MAX_LENGTH = 400  # characters; longer answers go to the engine

PROSE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}\s+[a-zA-Z]{2,}")  # no product of names
MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr|]*\})?(.*?)\\end\{\1\}", re.DOTALL)
NO_CHAIN = (r"\le", r"\ge", r"\ne", r"\text", r"\quad", r"\begin", " or ", " and ", r"\lt", r"\gt")
# What may stand before '=' for a value though it is no name of one letter: words, an angle, a
# segment, a vector, the probability of something.
_WORDS = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{[^{}]*\}"
WORDED_NAME = re.compile(
    rf"(?:(?:{_WORDS}|[A-Za-z]{{2,}})(?:[\s_]*{_WORDS}|[\s_]+[A-Za-z]+)*"
    r"|m?\s*\\(?:angle|triangle)\s*\{?\s*[A-Z\d]{1,3}\s*\}?"
    r"|\\(?:overline|overrightarrow|widehat|vec|hat|bar)\s*(?:\{\s*\w{1,3}\s*\}|\w)"
    r"|(?:P|Pr|E|Var|\\Pr|\\mathbb\s*\{[PE]\})\s*(?:\\left)?[(\[][^()\[\]=]{1,60}?(?:\\right)?[)\]])"
    r"\s*=\s*(?P<value>.*)"
)
NO_WORDED_NAME = re.compile(
    rf"\b(?:not|no|never|wrong|incorrect|if|unless|without|except|{'|'.join(sorted(FUNCTIONS))})\b",
    re.IGNORECASE,
)
GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:\.\d{3}){2,},\d")  # 2.500.000,75: no list of decimals
THIN = re.compile(r"\\[,;:! ]")  # spaces
OF_A_COMPUTER = re.compile(r"[-−+]?\d+e[-−+]\d")
TURNED = {">": "<", ">=": "<="}
COMPARES = ("=", "≈", "<", "<=", ">", ">=", "!=")
RELATIONS = frozenset({"relation", "and", "or"})
STATEMENTS = RELATIONS | {"list", "named", "equation"}  # what has no unit of its own


@lru_cache(maxsize=2**16)  # a group's samples share their answer, and often their mistakes
def read(text: str) -> Tree | None:
    """Return the tree of an answer, or None."""
    if len(text) > MAX_LENGTH or not text.strip():
        return None
    try:
        plain, percent, money = clean(text)
        plain, scale, unit = take_unit(plain)
        if word := only_words(plain):
            spoken = in_words(word)
            return ("text", word) if spoken is None else ("number", spoken)
        if PROSE.search(plain):
            return None
        tree = _read(plain)
    except (Unsure, RecursionError):
        return None
    if scale != 1:
        if tree[0] in STATEMENTS - {"named"}:
            return None
        *front, last = tree if tree[0] == "named" else (tree,)
        last = ("*", last, ("number", scale))
        tree = (*front, last) if front else last
    unit = unit or (money and (f"{money[0]}^1", money[1]))
    if unit and tree[0] not in STATEMENTS:
        tree = ("quantity", tree, *unit)
    return ("percent", tree) if percent else tree


@lru_cache(maxsize=2**14)
def last_side(text: str, *, of_a_name: bool = False) -> str | None:
    """Return the last side of a chain of equalities that can't be read as a whole: 10 of
    S = \\sum_{k=1}^4 k = 10, or the value of what is named in words: \\text{total} = 10.
    `of_a_name`: only where it begins with a name. None: it is neither.
    """
    if "=" not in text or len(text) > MAX_LENGTH or read(text) is not None:
        return None
    text = THIN.sub(" ", text).strip().strip("$.").strip()
    worded = worded_value(text)
    if worded is not None and "=" not in worded:
        return worded
    text = text if worded is None else f"x = {worded}"
    sides = [side.strip() for side in _sides(text)]
    if len(sides) < 3 or not all(sides):
        return None
    first = read(sides[0])
    letter = len(sides[0]) == 1 and sides[0].isalpha()  # A alone is a text
    named = first is not None and (is_name(first) or letter)
    return sides[-1] if named or not of_a_name else None


def worded_value(text: str) -> str | None:
    """Return what stands behind a name in words: 10 of \\text{total} = 10, Area = 10."""
    found = WORDED_NAME.match(text)
    denied = found is not None and NO_WORDED_NAME.search(text, 0, found.start("value"))
    return None if found is None or denied else found["value"]


def _sides(text: str) -> list[str]:
    """Split a chain at the signs = outside of braces; nothing if it lists or compares, too."""
    sides, start, depth = [], 0, 0
    for at, sign in enumerate(text):
        depth += (sign in "{([") - (sign in "})]")
        if depth == 0 and (sign in ",;<>≤≥≠\n" or text.startswith(NO_CHAIN, at)):
            return []
        if depth == 0 and sign == "=":
            sides.append(text[start:at])
            start = at + 1
    return [*sides, text[start:]]


def _read(plain: str) -> Tree:
    if any(letters in plain for letters in (r"\begin", r"\text", r"\mbox")):
        return _matrix(plain)
    if OF_A_COMPUTER.fullmatch(plain):  # 5e-1 is a half, or 5 times e less 1
        return ("either", _Reader(plain).answer(), _Reader(plain.replace("e", "E")).answer())
    points = with_points(plain)  # 3,5 in half of the world
    if points is None:
        return _Reader(plain).answer()
    if GROUPS.search(plain):
        return _Reader(points).answer()
    tree, other = _Reader(plain).answer(), _Reader(points).answer()
    twice = tree[0] == "list" and tree[1] == tree[2]  # 5,5: as a list, it would be 5
    return other if twice else ("either", tree, other)


def _matrix(text: str) -> Tree:
    """Alone, or with a name before it: A = ..."""
    before, named, rest = text.partition("=")
    if named and r"\begin" not in before:
        name = _Reader(before).whole_expression()
        if not is_name(name):
            raise Unsure
        return ("named", name, _matrix(rest))
    found = MATRIX.fullmatch(text.strip().strip("()").strip())
    if not found:
        raise Unsure
    rows = [row for row in re.split(r"\\\\", found[2]) if row.strip()]
    cells = [[_Reader(cell).whole_expression() for cell in row.split("&")] for row in rows]
    if len({len(row) for row in cells}) != 1:
        raise Unsure
    return ("matrix", *(tuple(row) for row in cells))


class _Reader(Expressions):
    """Collections and statements, of expressions."""

    def answer(self) -> Tree:
        groups = [self.group()]
        while self.next == ";":
            self.take()
            groups.append(self.group())
        if self.next:
            raise Unsure
        return groups[0] if len(groups) == 1 else _several(groups, False)

    def group(self) -> Tree:
        """Read what commas hold together, and `or`: x = 1, y = 2; x = 2, y = 1."""
        items, either = [self.statement()], False
        while self.next in (",", "∨"):
            either |= self.take() == "∨"
            items.append(self.statement())
        return items[0] if len(items) == 1 else _several(items, either)

    def statement(self) -> Tree:
        """Read one answer: `x = 3`, `x < 3`, `x \\in [0, 1)`, a union of intervals, a term."""
        if self.next == "≈":  # about 3
            self.take()
        sides, signs = [self.ratio()], list[str]()
        while self.next in COMPARES:
            sign = self.take()
            side = self.ratio()
            if sign == "≈":
                if signs or not is_name(sides[0]):
                    continue  # what stands before it is exact
                sign = "="
            signs.append(sign)
            sides.append(side)
        if self.next == "∈" and len(sides) == 1 and is_name(sides[0]):
            self.take()
            sides = [self.collection()]
        if self.next == "∪":
            parts = [sides[-1]]
            while self.next == "∪":
                self.take()
                parts.append(self.collection())
            sides[-1] = ("union", *parts)
        if len(sides) == 1:
            return sides[0]
        return _equal(sides) if set(signs) == {"="} else _compared(sides, signs)

    def ratio(self) -> Tree:
        parts = [self.collection()]
        while self.next == ":":
            self.take()
            parts.append(self.collection())
        return parts[0] if len(parts) == 1 else ("ratio", *parts)

    def collection(self) -> Tree:
        start = self.at
        if self.next in ("(", "["):
            opening = self.take()
            items = self.items()
            if len(items) > 1 and self.next in (")", "]"):
                closing = self.take()
                if self.ends_here():
                    return ("tuple", opening, closing, *items)
            self.at = start
        if self.next in (r"\{", "{"):
            closing = "}" if self.take() == "{" else r"\}"
            items = [] if self.next == closing else self.items()
            if closing == r"\}" or len(items) != 1:
                self.take(closing)
                if self.ends_here():
                    return ("set", *items)
            self.at = start
        if self.next == r"\emptyset":
            self.take()
            return ("set",)
        return self.expression()

    def ends_here(self) -> bool:
        return self.next in ("", ",", ";", "=", "∪", "≈", "∨", ":", ")", "]", "}", r"\}")

    def items(self) -> list[Tree]:
        """Read what stands between brackets, separated by commas."""
        self.deeper()
        found: list[Tree] = []
        while True:
            found.append(self.statement())
            if self.next not in (",", ";"):
                break
            self.take()
        self.depth -= 1
        return found


def _several(items: list[Tree], either: bool) -> Tree:
    """Join answers that follow each other. Inequalities hold together, or one or the other does."""
    if not all(item[0] in RELATIONS for item in items):
        return ("list", *items)
    kind = "or" if either else "and"
    parts = [part for item in items for part in (item[1:] if item[0] == kind else (item,))]
    return (kind, *parts)


def _equal(sides: list[Tree]) -> Tree:
    """Make x = 3 of x = 3 and 3 = x; the answer of 2 + 2 = 4, a calculation; else an equation."""
    if is_name(sides[0]):
        return ("named", sides[0], sides[-1])
    if not any(_mentions(side) for side in sides):
        written_out = len({side[0] for side in sides} - {"number"}) > 0
        says = written_out and len(set(sides)) > 1  # 1 = 1 and π = π say nothing
        return sides[-1] if says else ("equation", sides[0], sides[-1])
    if is_name(sides[-1]):
        return ("named", sides[-1], sides[-2])
    if len(sides) > 2:
        raise Unsure
    return ("equation", *sides)


def _compared(sides: list[Tree], signs: list[str]) -> Tree:
    """Split a < b, a < b <= c into pieces, each turned so that it points to the left."""
    if "=" in signs or not any(_mentions(side) for side in sides):
        raise Unsure
    if any(side[0] in ("tuple", "set", "union", "ratio") for side in sides):
        raise Unsure
    pieces: list[Tree] = []
    for sign, left, right in zip(signs, sides, sides[1:], strict=False):
        turned = (right, left) if sign in TURNED else (left, right)
        pieces.append(("relation", TURNED.get(sign, sign), *turned))
    return pieces[0] if len(pieces) == 1 else ("and", *pieces)


def _mentions(tree: Tree) -> bool:
    return tree[0] in ("name", "call") or any(
        _mentions(part) for part in tree if isinstance(part, tuple)
    )


def is_name(tree: Tree) -> bool:
    """Tell whether it may stand before '=' with the answer behind: x, x_1, f(x), (x, y), |AB|."""
    if tree[0] in ("name", "call"):
        return True
    if tree[0] == "tuple":
        return all(is_name(item) for item in tree[3:])
    if tree[0] in ("abs", "ratio"):
        return all(is_name(part) for part in tree[1:])
    return tree[0] == "*" and is_name(tree[1]) and is_name(tree[2])
