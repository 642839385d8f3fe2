"""Rational expressions compared exactly, at a random point of a finite field.

Two quotients of polynomials that differ have different values at a random point of a field of
2^255 elements, but for one chance in as many; and in it a power of a million digits is a number
like any other. π and e are names there: no polynomial of them is 0. i is a root of -1.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256

from groupwise.graders.mathematics.tokens import Tree
from groupwise.graders.mathematics.values import Undecided, names_in, value

PRIME = 2**255 - 19
ROOT_OF_MINUS_ONE = pow(2, (PRIME - 1) // 4, PRIME)
MAX_FACTORIAL = 20_000
MAX_EXPONENT = 10**6  # bits


def residue(tree: Tree, draw: int = 0) -> int:
    """Return a rational expression's value at a point of the field. Undecided for any other."""
    kind = tree[0]
    if kind == "number":
        return int(tree[1].numerator) * _inverse(tree[1].denominator) % PRIME
    if kind in ("name", "pi", "e"):
        return _random(tree[-1], draw)
    if kind == "i":
        return ROOT_OF_MINUS_ONE
    if kind == "call":
        parts = ", ".join(str(residue(part, draw)) for part in tree[2:])
        return _random(f"{tree[1]}({parts})", draw)
    if kind == "^":
        return _power(residue(tree[1], draw), _exact(tree[2]))
    if kind == "!":
        return _factorial(_exact(tree[1]))
    if kind not in ("+", "-", "*", "/"):
        raise Undecided
    one, *others = (residue(part, draw) for part in tree[1:])
    if not others:
        return -one % PRIME
    (other,) = others
    if kind == "*":
        return one * other % PRIME
    if kind == "/":
        return one * _inverse(other) % PRIME
    return (one + other if kind == "+" else one - other) % PRIME


def _exact(tree: Tree) -> int:
    """Return a whole number: an exponent."""
    if names_in(tree):
        raise Undecided
    number = value(tree, {}, 1)
    if not isinstance(number, Fraction) or number.denominator != 1:
        raise Undecided
    return number.numerator


def _power(base: int, exponent: int) -> int:
    if exponent.bit_length() > MAX_EXPONENT or (base == 0 and exponent <= 0):
        raise Undecided
    return pow(base, exponent, PRIME)


def _factorial(number: int) -> int:
    if not 0 <= number <= MAX_FACTORIAL:
        raise Undecided
    return math.factorial(number) % PRIME


def _inverse(number: int) -> int:
    if number % PRIME == 0:
        raise Undecided
    return pow(number, -1, PRIME)


@lru_cache(maxsize=2**12)
def _random(name: str, draw: int) -> int:
    return int.from_bytes(sha256(f"{draw}/{name}".encode()).digest()) % PRIME
