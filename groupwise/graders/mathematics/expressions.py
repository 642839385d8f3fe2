"""Reads an expression from its tokens into a tree: sums, products, powers, roots, functions.

notation.py reads what is made of expressions: collections, equations, inequalities.
"""

from __future__ import annotations

import re
from fractions import Fraction

from groupwise.graders.mathematics.spelling import (
    BY_OTHER_NAME,
    CIRCULAR_AND_HYPERBOLIC,
    FUNCTIONS,
    OF_SEVERAL,
    WRITTEN_OUT,
    Unsure,
)
from groupwise.graders.mathematics.tokens import Tokens, Tree

MAX_DEPTH = 24  # brackets inside brackets

GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi "
    "rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi "
    "Omega ell aleph"
)
LETTERS = frozenset(re.findall(r"\w+", GREEK))
# Letters that look otherwise are other names: a hat, a bar, an arrow, the real numbers.
DRESSED = frozenset(
    {"mathbb", "mathcal", "mathfrak", "mathscr", "hat", "widehat", "bar", "tilde", "widetilde",
     "vec", "dot", "ddot", "overline", "overrightarrow"}
)  # fmt: skip
# Letters before a bracket: functions in any case, or where they stand before a letter or number.
CALLED = frozenset("fghFGHO") | {"\\phi", "\\varphi", "\\psi"}
MAY_BE_CALLED = frozenset("pqrsuvwyABCDEIJKLMNPQRSTUVWXYZ")
UNSAID = ("name", "log's base")  # 10 or e
BASES: dict[str, Tree] = {"log": UNSAID, "lg": ("number", Fraction(10))}


class Expressions(Tokens):
    """Recursive descent over one text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth, self.in_bars = 0, 0

    def whole_expression(self) -> Tree:
        tree = self.expression()
        if self.next:
            raise Unsure
        return tree

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unsure

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
        return self.next in ("(", "{", "⌊", "⌈") or (
            self.kind == "command" and self.next not in (r"\{", r"\}", r"\emptyset")
        )

    def beside(self, tree: Tree) -> Tree:
        """Join as a product without a sign; a whole number beside a fraction is a sum."""
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
                continue
            exponent = self.exponent()
            if exponent == ("name", "T") and base[0] == "name":
                raise Unsure  # a matrix turned around: products of those have an order
            base = ("^", base, exponent)
        return base

    def exponent(self) -> Tree:
        negative = self.next == "-"
        if negative:
            self.take()
        exponent = self.argument()
        return ("-", exponent) if negative else exponent

    def argument(self) -> Tree:
        """Read `{...}`, or the one sign that TeX takes: \\frac12 is a half."""
        if self.next == "{":
            return self.braces()
        kind, word = self.kind, self.next
        if kind == "number" and len(word) > 1:  # TeX takes a digit; a^12 by hand means twelve
            if not word.isdigit() or self.at == 0 or self.tokens[self.at - 1][1] in ("^", "-"):
                return self.atom()
            self.tokens[self.at : self.at + 1] = [("number", word[0]), ("number", word[1:])]
        return self.atom()

    def braces(self) -> Tree:
        return self.between("{", "}")

    def between(self, opening: str, closing: str) -> Tree:
        self.take(opening)
        inner = self.expression()
        self.take(closing)
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
            return self.between("(", ")")
        if word == "[":
            return self.between("[", "]")
        if word == "{":
            return self.braces()
        if word == "|":
            return self.bars()
        if word == "⌊":
            return ("floor", self.between("⌊", "⌋"))
        if word == "⌈":
            return ("ceil", self.between("⌈", "⌉"))
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

    # --- names and functions

    def name(self, letter: str) -> Tree:
        """Read x, x_1, y', f(x); e and i are numbers."""
        if self.next == "_":
            self.take()
            index = self.argument()
            letter += f"_{index[1] if index[0] in ('number', 'name') else index}"
        while self.next == "'":
            letter += self.take()
        if letter == "e":
            return ("e",)
        if letter == "i":
            return ("i",)
        return self.call(letter) or ("name", letter)

    def call(self, letter: str) -> Tree | None:
        """Read f(x), P(2), u(t, x): no products. x(x + 1) is one."""
        if self.next != "(":
            return None
        start = self.at
        arguments = self.arguments()
        plain = all(one[0] in ("name", "number") for one in arguments)
        first = letter.rstrip("'").partition("_")[0]
        called = first in CALLED or letter.endswith("'") or len(arguments) > 1
        if called or (plain and (first in MAY_BE_CALLED or first.startswith("\\math"))):
            return ("call", letter, *arguments)
        self.at = start
        return None

    def arguments(self) -> list[Tree]:
        """Read what a function is of, separated by commas: (t, x), \\{1, 2\\}."""
        closing = {"(": ")", r"\{": r"\}"}.get(self.take())
        if closing is None:
            raise Unsure
        found = [self.expression()]
        while self.next in (",", ";"):
            self.take()
            found.append(self.expression())
        self.take(closing)
        return found

    def command(self, name: str) -> Tree:
        name = BY_OTHER_NAME.get(name, name)
        if name == "frac":
            top = self.argument()
            return ("/", top, self.argument())
        if name == "binom":
            top = self.argument()
            return ("binom", top, self.argument())
        if name == "sqrt":
            index: Tree = ("number", Fraction(2))
            if self.next == "[":
                index = self.between("[", "]")
            return ("root", self.argument(), index)
        if name == "pi":
            return ("pi",)
        if name in LETTERS:
            return self.name(f"\\{name}")
        if name in DRESSED:
            return self.dressed(name)
        if name in OF_SEVERAL:
            return (name, *self.arguments())
        if name in FUNCTIONS or name in WRITTEN_OUT:
            return self.function(name)
        raise Unsure

    def dressed(self, look: str) -> Tree:
        inner = self.argument()
        letters = _letters(inner)
        if not letters:
            raise Unsure
        return self.name(f"\\{look}{{{letters}}}")

    def function(self, name: str) -> Tree:
        """Read sin x, sin^2 x, log_2 8. A log without a base has one that is not said."""
        base: Tree | None = BASES.get(name)
        raised: Tree | None = None
        while self.next in ("_", "^"):
            if self.take() == "_":
                if base != UNSAID:
                    raise Unsure
                base = self.argument()
            else:
                raised = self.exponent()
        if raised == ("-", ("number", Fraction(1))):
            if name not in CIRCULAR_AND_HYPERBOLIC:
                raise Unsure
            name, raised = f"arc{name}", None
        elif raised is not None and (raised[0] != "number" or raised[1] < 2):
            raise Unsure
        inner = self.of_function()
        tree: Tree = (name, inner) if base is None else ("log", inner, base)
        return tree if raised is None else ("^", tree, raised)

    def of_function(self) -> Tree:
        """Read brackets, or what follows up to a sign or another function: sin 5x cos x."""
        if self.next in ("(", "{", "|", "["):
            return self.atom()
        inner = self.power()
        while (
            self.kind == "letter"
            or self.next in (r"\pi", r"\frac", r"\sqrt")
            or self.next[1:] in LETTERS
        ):
            inner = self.beside(inner)
        if self.next in ("(", "{", "[", "|") or self.kind == "number":
            raise Unsure
        return inner


def _letters(tree: Tree) -> str:
    """Return CD of \\overline{CD}."""
    if tree[0] == "name":
        return str(tree[1])
    if tree[0] in ("e", "i"):
        return str(tree[0])
    if tree[0] == "*":
        parts = [_letters(part) for part in tree[1:]]
        return "".join(parts) if all(parts) else ""
    return ""
