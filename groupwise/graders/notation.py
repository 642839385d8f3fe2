"""Reads mathematical notation, LaTeX or plain, into small trees, and refuses what is not clear.

A tree is a tuple: ("number", Fraction), ("name", "x"), (operation, tree, ...), or a collection:
("list" | "set" | "tuple" | "interval" | "union" | "matrix", ...). `None` means that another
reader has to be asked: nothing here guesses.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from groupwise.graders.numerals import in_words
from groupwise.graders.spelling import (
    DECIMAL_COMMA,
    FUNCTIONS,
    Unsure,
    clean,
    only_words,
    take_unit,
)
from groupwise.graders.tokens import Tokens

Tree = tuple[Any, ...]

MAX_LENGTH = 400  # characters; longer answers go to the engine
MAX_DEPTH = 24  # brackets inside brackets

GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi "
    "rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi "
    "Omega ell"
)
LETTERS = frozenset(re.findall(r"\w+", GREEK))
PROSE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}\s+[a-zA-Z]{2,}")  # no product of names
MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr|]*\})?(.*?)\\end\{\1\}", re.DOTALL)


@lru_cache(maxsize=2**16)  # a group's samples share their answer, and often their mistakes
def read(text: str) -> Tree | None:
    """The tree of an answer, or None."""
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
        if any(letters in plain for letters in (r"\begin", r"\text", r"\mbox")):
            return _matrix(plain)
        tree = _Reader(plain).answer()
        if DECIMAL_COMMA.fullmatch(plain):  # in half of the world
            number = ("number", Fraction(plain.replace(",", ".")))
            twice = tree[0] == "list" and tree[1] == tree[2]  # 5,5: as a list, it would be 5
            tree = number if twice else ("either", tree, number)
    except (Unsure, RecursionError):
        return None
    if scale != 1:
        if tree[0] in ("list", "equation"):
            return None
        *front, last = tree if tree[0] == "named" else (tree,)
        last = ("*", last, ("number", scale))
        tree = (*front, last) if front else last
    unit = unit or (money and (f"{money[0]}^1", money[1]))
    if unit and tree[0] not in ("list", "named", "equation"):
        tree = ("quantity", tree, *unit)
    return ("percent", tree) if percent else tree


def _matrix(text: str) -> Tree:
    found = MATRIX.fullmatch(text.strip().strip("()").strip())
    if not found:
        raise Unsure
    rows = [row for row in re.split(r"\\\\", found[2]) if row.strip()]
    cells = [[_Reader(cell).whole_expression() for cell in row.split("&")] for row in rows]
    if len({len(row) for row in cells}) != 1:
        raise Unsure
    return ("matrix", *(tuple(row) for row in cells))


class _Reader(Tokens):
    """Recursive descent over one text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth, self.in_bars = 0, 0

    # --- answers

    def answer(self) -> Tree:
        tree = self.union()
        if self.next in (",", ";"):
            sign, items = self.next, [tree]
            while self.next == sign:
                self.take()
                items.append(self.union())
            tree = ("list", *items)
        if self.next:
            raise Unsure
        return tree

    def whole_expression(self) -> Tree:
        tree = self.expression()
        if self.next:
            raise Unsure
        return tree

    def union(self) -> Tree:
        """One answer: `x = 3`, `x \\in [0, 1)`, a union of intervals, or an expression."""
        sides = [self.ratio()]
        while self.next == "=":
            self.take()
            sides.append(self.ratio())
        if self.next == "≈":  # what stands before it is exact
            self.take()
            self.collection()
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
        if not _mentions(sides[0]):
            return sides[-1]  # 2 + 2 = 4: a calculation, which ends on the answer
        if is_name(sides[0]):
            return ("named", sides[0], sides[-1])
        if len(sides) > 2:
            raise Unsure
        return ("equation", *sides)

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
                if self.next in ("", ",", ";", "=", "∪", "≈"):
                    return ("tuple", opening, closing, *items)
            self.at = start
        if self.next == r"\{":
            self.take()
            items = [] if self.next == r"\}" else self.items()
            self.take(r"\}")
            return ("set", *items)
        if self.next == r"\emptyset":
            self.take()
            return ("set",)
        return self.expression()

    def items(self) -> list[Tree]:
        """What stands between brackets, apart by commas; empty if it is no such thing."""
        self.deeper()
        found: list[Tree] = []
        while True:
            found.append(self.collection())
            if self.next not in (",", ";"):
                break
            self.take()
        self.depth -= 1
        return found

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unsure

    # --- expressions

    def expression(self) -> Tree:
        self.deeper()
        tree = self.term()
        while self.next in ("+", "-", "±", "∓"):
            sign = self.take()
            tree = (sign, tree, self.term())
        self.depth -= 1
        return tree

    def term(self) -> Tree:
        tree = self.signed()
        while True:
            if self.next in ("*", "/"):
                sign = self.take()
                tree = (sign, tree, self.signed())
            elif self.starts_factor():
                if self.kind == "number":  # 2 3, x2
                    raise Unsure
                tree = self.beside(tree)
            else:
                return tree

    def starts_factor(self) -> bool:
        if self.kind in ("number", "letter"):
            return True
        if self.next == "|":
            return not self.in_bars
        return self.next in ("(", "{") or (
            self.kind == "command" and self.next not in (r"\{", r"\}", r"\emptyset")
        )

    def beside(self, tree: Tree) -> Tree:
        """A product without a sign; a whole number beside a fraction of numbers is a sum."""
        fraction = self.next == r"\frac"
        right = self.power()
        whole = tree[1] if tree[0] == "-" and len(tree) == 2 else tree
        mixed = fraction and whole[0] == "number" and whole[1].denominator == 1
        if mixed and right[0] == "/" and right[1][0] == right[2][0] == "number":
            return ("+", whole, right) if whole is tree else ("-", ("+", whole, right))
        return ("*", tree, right)

    def signed(self) -> Tree:
        if self.next in ("-", "+", "±", "∓"):
            sign = self.take()
            inner = self.signed()
            if sign == "+":
                return inner
            return ("-", inner) if sign == "-" else (sign, ("number", Fraction(0)), inner)
        return self.power()

    def power(self) -> Tree:
        base = self.atom()
        while self.next in ("^", "!"):
            if self.take() == "!":
                base = ("!", base)
            else:
                negative = self.next == "-"
                if negative:
                    self.take()
                exponent = self.argument()
                base = ("^", base, ("-", exponent) if negative else exponent)
        return base

    def argument(self) -> Tree:
        """`{...}`, or the one sign that TeX takes: \\frac12 is a half."""
        if self.next == "{":
            return self.braces()
        kind, word = self.kind, self.next
        if kind == "number" and len(word) > 1:  # TeX takes a digit; a^12 by hand means twelve
            if not word.isdigit() or self.at == 0 or self.tokens[self.at - 1][1] in ("^", "-"):
                return self.atom()
            self.tokens[self.at : self.at + 1] = [("number", word[0]), ("number", word[1:])]
        return self.atom()

    def braces(self) -> Tree:
        self.take("{")
        inner = self.expression()
        self.take("}")
        return inner

    def atom(self) -> Tree:
        kind, word = self.kind, self.next
        if kind == "number":
            self.take()
            if self.next == "_":
                return self.in_base(word)
            return ("number", Fraction(word))
        if kind == "letter":
            return self.name(self.take())
        if word == "(":
            self.take()
            inner = self.expression()
            self.take(")")
            return inner
        if word == "[":
            self.take()
            inner = self.expression()
            self.take("]")
            return inner
        if word == "{":
            return self.braces()
        if word == "|":
            return self.bars()
        if word == "∞":
            self.take()
            return ("infinity",)
        if kind == "command":
            return self.command(self.take()[1:])
        raise Unsure

    def bars(self) -> Tree:
        if self.in_bars:
            raise Unsure
        self.take("|")
        self.in_bars += 1
        inner = self.expression()
        self.in_bars -= 1
        self.take("|")
        return ("abs", inner)

    def in_base(self, digits: str) -> Tree:
        self.take("_")
        base = self.argument()
        if base[0] != "number" or not digits.isdigit() or self.next:
            raise Unsure
        if not 2 <= base[1] <= 36 or any(int(digit) >= base[1] for digit in digits):
            raise Unsure
        return ("base", digits.lstrip("0"), base[1])

    def name(self, letter: str) -> Tree:
        if self.next == "_":
            self.take()
            index = self.argument()
            if index[0] not in ("number", "name"):
                raise Unsure
            return ("name", f"{letter}_{index[1]}")
        if letter == "e":
            return ("e",)
        return ("i",) if letter == "i" else ("name", letter)

    def command(self, name: str) -> Tree:
        if name == "frac":
            top = self.argument()
            return ("/", top, self.argument())
        if name == "binom":
            top = self.argument()
            return ("binom", top, self.argument())
        if name == "sqrt":
            if self.next != "[":
                return ("root", self.argument(), ("number", Fraction(2)))
            self.take("[")
            index = self.expression()
            self.take("]")
            return ("root", self.argument(), index)
        if name == "pi":
            return ("pi",)
        if name in LETTERS:
            return self.name(f"\\{name}")
        if name == "log":
            base: Tree | None = None
            if self.next == "_":
                self.take()
                base = self.argument()
            if base is None:
                raise Unsure  # e, 10 or 2
            return ("log", self.bracketed(), base)
        if name in FUNCTIONS:
            return (name, self.bracketed())
        raise Unsure

    def bracketed(self) -> Tree:
        """A function's argument, if it is clear where that ends."""
        if self.next in ("(", "{"):
            return self.atom()
        inner = self.atom()
        if self.starts_factor() or self.next == "^":
            raise Unsure
        return inner


def _mentions(tree: Tree) -> bool:
    return tree[0] == "name" or any(_mentions(part) for part in tree if isinstance(part, tuple))


def is_name(tree: Tree) -> bool:
    """x, x_1, f(x), (x, y), |AB|: what stands before '=' when what follows is the answer."""
    if tree[0] == "name":
        return True
    if tree[0] == "tuple":
        return all(is_name(item) for item in tree[3:])
    if tree[0] in ("abs", "ratio"):
        return all(is_name(part) for part in tree[1:])
    return tree[0] == "*" and is_name(tree[1]) and is_name(tree[2])
