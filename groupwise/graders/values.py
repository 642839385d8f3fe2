"""What a tree of `notation` is worth: a fraction where that is exact, else many digits."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath  # type: ignore[import-untyped]

from groupwise.graders.notation import Tree

DIGITS = 60  # worked with
AGREE = 45  # of them must be the same
MAX_BITS = 20_000  # of an exact power
POINTS = 3

mp = mpmath.mp.clone()  # a context of our own: others keep their precision
mp.dps = DIGITS
mpf, mpc = mp.mpf, mp.mpc


class Undecided(Exception):
    """It takes more than arithmetic."""


@lru_cache(maxsize=2**14)
def names_in(tree: Tree) -> frozenset[str]:
    if tree[0] == "name":
        return frozenset({tree[1]})
    parts = [part for part in tree[1:] if isinstance(part, tuple)]
    return frozenset().union(*(names_in(part) for part in parts))


def has_sign(tree: Tree) -> bool:
    if tree[0] in ("±", "∓"):
        return True
    return any(has_sign(part) for part in tree[1:] if isinstance(part, tuple))


def points(names: Sequence[str]) -> list[dict[str, Fraction]]:
    """Fixed fractions of many digits, of either sign: the same in every process."""
    return [{name: _coordinate(name, number) for name in names} for number in range(POINTS)]


def _coordinate(name: str, number: int) -> Fraction:
    raw = zlib.crc32(f"{name}/{number}".encode())
    other = zlib.crc32(f"{number}/{name}".encode())
    sign = -1 if number % 2 else 1
    return sign * (Fraction(raw % 900_001 + 100_003, other % 400_009 + 200_003))


def close(one: Any, other: Any) -> bool:
    """Fractions exactly; others to so many digits that no one writes by hand."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    if isinstance(one, str) or isinstance(other, str):  # infinite
        return bool(isinstance(one, str) and isinstance(other, str) and one == other)
    one, other = to_float(one), to_float(other)
    scale = max(abs(one), abs(other), mpf(1))
    return bool(abs(one - other) <= scale * mpf(10) ** -AGREE)


def to_float(number: Any) -> Any:
    if isinstance(number, Fraction):
        if max(number.numerator.bit_length(), number.denominator.bit_length()) > MAX_BITS:
            raise Undecided
        return mpf(number.numerator) / mpf(number.denominator)
    return number


def value(tree: Tree, point: dict[str, Fraction], sign: int) -> Any:
    """A Fraction where that is exact, an mpf or mpc of DIGITS digits, or '∞' and '-∞'."""
    kind = tree[0]
    if kind in ("number", "float"):
        return tree[1]
    if kind == "name":
        return point[tree[1]]
    if kind in CONSTANTS:
        return CONSTANTS[kind]()
    parts = [value(part, point, sign) for part in tree[1:]]
    if any(isinstance(part, str) for part in parts):
        if kind == "-" and len(parts) == 1:
            return "-∞" if parts[0] == "∞" else "∞"
        raise Undecided
    if kind in ("±", "∓"):
        return parts[0] + (sign if kind == "±" else -sign) * parts[1]
    if kind not in OPERATIONS:
        raise Undecided
    found = OPERATIONS[kind](*parts)
    return _finite(found)


def _finite(number: Any) -> Any:
    if isinstance(number, Fraction):
        if number.numerator.bit_length() > MAX_BITS or number.denominator.bit_length() > MAX_BITS:
            raise Undecided
        return number
    if not mp.isfinite(number):
        raise Undecided
    return number.real if isinstance(number, mpc) and number.imag == 0 else number


def _add(one: Any, other: Any) -> Any:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one + other
    return to_float(one) + to_float(other)


def _subtract(one: Any, other: Any = None) -> Any:
    return -one if other is None else _add(one, -other)


def _multiply(one: Any, other: Any) -> Any:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one * other
    return to_float(one) * to_float(other)


def divide(one: Any, other: Any) -> Any:
    if other == 0:
        raise Undecided
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one / other
    return to_float(one) / to_float(other)


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if size * abs(exponent.numerator) > MAX_BITS or (base == 0 and exponent <= 0):
            raise Undecided
        return base**exponent.numerator
    if abs(to_float(exponent)) > 10_000 or base == 0:
        raise Undecided
    if isinstance(exponent, Fraction) and exponent.numerator == 1 and exponent > 0:
        return _root(base, Fraction(exponent.denominator))
    return mp.power(to_float(base), to_float(exponent))


def _root(number: Any, index: Any) -> Any:
    """A perfect root of a fraction is one; an odd root of a negative number is left open."""
    if not isinstance(index, Fraction) or index.denominator != 1 or not 2 <= index <= 64:
        raise Undecided
    if isinstance(number, Fraction) and number >= 0:
        top, bottom = (
            _whole_root(part, index.numerator) for part in (number.numerator, number.denominator)
        )
        if top is not None and bottom is not None:
            return Fraction(top, bottom)
    found = to_float(number)
    if index.numerator != 2 and (isinstance(found, mpc) or found < 0):
        raise Undecided
    return mp.sqrt(found) if index == 2 else mp.root(found, index.numerator)


def _whole_root(number: int, index: int) -> int | None:
    if number.bit_length() > 900:
        raise Undecided
    found = math.isqrt(number) if index == 2 else round(number ** (1 / index))
    return found if found**index == number else None


def _factorial(number: Any) -> Any:
    if not isinstance(number, Fraction) or number.denominator != 1 or not 0 <= number <= 500:
        raise Undecided
    return Fraction(math.factorial(number.numerator))


def _binomial(top: Any, bottom: Any) -> Any:
    whole = all(isinstance(x, Fraction) and x.denominator == 1 for x in (top, bottom))
    if not whole or not 0 <= bottom <= top <= 2000:
        raise Undecided
    return Fraction(math.comb(top.numerator, bottom.numerator))


def _log(number: Any, base: Any) -> Any:
    if number == 0 or base in (0, 1):
        raise Undecided
    return mp.log(to_float(number)) / mp.log(to_float(base))


def _real(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def of_number(number: Any) -> Any:
        found = to_float(number)
        if abs(found) > 1e6:
            raise Undecided
        return function(found)

    return of_number


CONSTANTS: dict[str, Callable[[], Any]] = {
    "pi": lambda: +mp.pi,
    "e": lambda: +mp.e,
    "i": lambda: mpc(0, 1),
    "infinity": lambda: "∞",
}
OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": _add,
    "-": _subtract,
    "*": _multiply,
    "/": divide,
    "^": _power,
    "root": _root,
    "!": _factorial,
    "binom": _binomial,
    "abs": abs,
    "log": _log,
    "ln": lambda number: _log(number, mp.e),
    **{
        name: _real(getattr(mp, name))
        for name in ("sin", "cos", "tan", "cot", "sec", "csc", "exp", "sinh", "cosh", "tanh")
    },
    "arcsin": _real(mp.asin),
    "arccos": _real(mp.acos),
    "arctan": _real(mp.atan),
}
