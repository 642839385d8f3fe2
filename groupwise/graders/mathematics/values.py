"""The value of a tree of `notation`: a fraction where that is exact, else many digits."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from threading import Lock
from typing import Any

import mpmath  # type: ignore[import-untyped]

from groupwise.graders.mathematics.spelling import CIRCULAR_AND_HYPERBOLIC
from groupwise.graders.mathematics.tokens import Tree

DIGITS = 60  # worked with
AGREE = 45  # of them must be the same
SPARE = 300  # more of each, where two values look alike: 1 + 10^-60 is not 1
MAX_BITS = 20_000  # of an exact power
MAX_POWER = 10**9  # where the digits of a power are enough
MAX_SIZE = 2000  # digits before or behind the point of what is not exact
POINTS, MANY_POINTS = 3, 24  # that must agree
FAR = tuple(map(Fraction, (1, 40, 1600, 10**5, 10**9)))
SCALES = tuple(
    map(Fraction, (1, 1, 1, 8, 8, 64, 64))
)  # where the first points are out of a root's or logarithm's reach
WHOLE = frozenset({"!", "binom", "gcd", "lcm"})  # names in these are whole numbers
BENT = frozenset({"abs", "max", "min", "floor", "ceil", "root"})  # like something else on one side
COUNTING = frozenset("ijklmnpqKLMN")  # and these in a floor or ceiling

mp = mpmath.mp.clone()  # a context of our own: others keep their precision
mp.dps = DIGITS
mpf, mpc = mp.mpf, mp.mpc
_PRECISION = Lock()  # one at a time takes more digits; others who see them take no harm


class Undecided(Exception):
    """It takes more than arithmetic."""


@lru_cache(maxsize=2**14)
def names_in(tree: Tree) -> frozenset[str]:
    if tree[0] == "name":
        return frozenset({tree[1]})
    if tree[0] == "call":
        return frozenset({f"{tree[1]}()"}).union(*(names_in(part) for part in tree[2:]))
    parts = [part for part in tree[1:] if isinstance(part, tuple)]
    return frozenset().union(*(names_in(part) for part in parts))


def has_sign(tree: Tree) -> bool:
    if tree[0] in ("±", "∓"):
        return True
    return any(has_sign(part) for part in tree[1:] if isinstance(part, tuple))


def points(names: Sequence[str], whole: bool = False) -> Iterator[dict[str, Fraction]]:
    """Fixed values for the names, the same in every process: fractions of many digits, of either
    sign, or whole numbers."""
    if whole:
        for number in range(MANY_POINTS):
            yield {name: Fraction(_raw(name, number) % 30 * (number % 4 + 1)) for name in names}
    else:
        for number, scale in enumerate((*SCALES, *(1 / scale for scale in SCALES))):
            yield {name: scale * _coordinate(name, number) for name in names}


def is_of_whole_numbers(tree: Tree) -> bool:
    """Tell whether it is of whole numbers: n!, a floor of n/2, (-1)^n."""
    if tree[0] in WHOLE or (tree[0] in ("floor", "ceil") and names_in(tree) <= COUNTING):
        return True
    if tree[0] == "^" and tree[1][0] == "-" and not names_in(tree[1]) and names_in(tree[2]):
        return True
    return any(is_of_whole_numbers(part) for part in tree[1:] if isinstance(part, tuple))


def far_points(names: Sequence[str], *trees: Tree) -> Iterator[dict[str, Fraction]]:
    """Draw values of all sizes and signs, where one of the trees may be bent: |x - 10| is 10 - x at
    all points up to 10."""
    for number in range(MANY_POINTS if any(map(_is_bent, trees)) else 0):
        yield {name: _anywhere(name, number) for name in names}


@lru_cache(maxsize=2**14)
def _is_bent(tree: Tree) -> bool:
    """Tell whether it may be another expression on one side of some place: |x|, a root of x^2."""
    if tree[0] in BENT or (tree[0] == "^" and not names_in(tree[2]) and not _is_integer(tree[2])):
        return bool(names_in(tree))
    return any(_is_bent(part) for part in tree[1:] if isinstance(part, tuple))


def _is_integer(tree: Tree) -> bool:
    return bool(tree[0] == "number" and tree[1].denominator == 1)


def _anywhere(name: str, number: int) -> Fraction:
    """Draw a size, and a sign at every other point: at the others all are positive."""
    drawn = _raw(name, number)
    sign = -1 if number % 2 and drawn // 8 % 2 else 1
    return sign * FAR[drawn % len(FAR)] * abs(_coordinate(name, number))


def _raw(name: str, number: int) -> int:
    return zlib.crc32(f"{name}/{number}".encode())


def _coordinate(name: str, number: int) -> Fraction:
    other = zlib.crc32(f"{number}/{name}".encode())
    sign = -1 if number % 2 else 1
    return sign * (Fraction(_raw(name, number) % 900_001 + 100_003, other % 400_009 + 200_003))


def agree(one: Tree, other: Tree, point: dict[str, Fraction], sign: int = 1) -> bool:
    """Tell whether two expressions have one value. Fractions agree exactly, others to so many
    digits that no one writes them by hand: behind the point for small numbers, all of those before
    it for large ones."""
    values = [value(tree, point, sign) for tree in (one, other)]
    if not close(*values) or any(isinstance(x, str) for x in values):
        return close(*values)
    if all(isinstance(x, Fraction) for x in values):
        return True
    size = max(abs(to_float(x)) for x in values)
    places = 0 if size == 0 else abs(int(mp.log10(size)))
    if places > MAX_SIZE:
        raise Undecided
    with _PRECISION, mp.workdps(DIGITS + SPARE + 2 * places):
        exact = [to_float(value(tree, point, sign)) for tree in (one, other)]
        return bool(abs(exact[0] - exact[1]) <= mpf(10) ** -(AGREE + SPARE + places))


def close(one: Any, other: Any) -> bool:
    """Compare fractions exactly; others to so many digits that no one writes by hand."""
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
    """Return a Fraction where that is exact, an mpf or mpc of DIGITS digits, or '∞' and '-∞'."""
    kind = tree[0]
    if kind == "number":
        return tree[1]
    if kind == "name":
        return point[tree[1]]
    if kind in CONSTANTS:
        return CONSTANTS[kind]()
    if kind == "call":
        arguments = [value(part, point, sign) for part in tree[2:]]
        return _unknown(f"{tree[1]} {point[f'{tree[1]}()']}", arguments)
    parts = [value(part, point, sign) for part in tree[1:]]
    if any(isinstance(part, str) for part in parts):
        if kind == "-" and len(parts) == 1:
            return "-∞" if parts[0] == "∞" else "∞"
        raise Undecided
    if kind in ("±", "∓"):
        return parts[0] + (sign if kind == "±" else -sign) * parts[1]
    if kind not in OPERATIONS or (point and _is_out_of_reach(tree, parts)):
        raise Undecided
    found = OPERATIONS[kind](*parts)
    return _finite(found)


def _is_out_of_reach(tree: Tree, parts: Sequence[Any]) -> bool:
    """Tell whether a root of names is one of a negative number: they stand for real ones."""
    if tree[0] == "^":
        whole = isinstance(parts[1], Fraction) and parts[1].denominator == 1
        root = not whole and not names_in(tree[2]) and bool(names_in(tree[1]))
    else:
        root = tree[0] == "root" and bool(names_in(tree[1]))
    return root and not isinstance(parts[0], mpc) and parts[0] < 0


def _unknown(name: str, arguments: Sequence[Any]) -> Fraction:
    """Return a value for a function of which nothing is known: any, and always the same for one
    point of the comparison."""
    said = [x if isinstance(x, str) else mp.nstr(to_float(x), 30) for x in arguments]
    return _coordinate(f"{name}({', '.join(said)})", 0)


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
        if base == 0 and exponent <= 0:
            raise Undecided
        if base in (0, 1, -1) or size * abs(exponent.numerator) <= MAX_BITS:
            return base**exponent.numerator
    if abs(to_float(exponent)) > MAX_POWER or base == 0:
        raise Undecided
    if isinstance(exponent, Fraction) and exponent.numerator == 1 and exponent > 0:
        return _root(base, Fraction(exponent.denominator))
    return mp.power(to_float(base), to_float(exponent))


def _root(number: Any, index: Any) -> Any:
    """Return a perfect root as a fraction; leave an odd root of a negative number open."""
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
    if not _is_whole(number) or not 0 <= number <= MAX_POWER:
        raise Undecided
    exact = number <= 1500
    return Fraction(math.factorial(number.numerator)) if exact else mp.factorial(to_float(number))


def _binomial(top: Any, bottom: Any) -> Any:
    if not (_is_whole(top) and _is_whole(bottom)) or min(top, bottom) < 0:
        raise Undecided
    if top > 2000 and bottom > 50:
        return divide(_factorial(top), _multiply(_factorial(bottom), _factorial(top - bottom)))
    return Fraction(math.comb(top.numerator, bottom.numerator))


def _is_whole(number: Any) -> bool:
    return isinstance(number, Fraction) and number.denominator == 1


def _of_whole(function: Callable[..., int]) -> Callable[..., Fraction]:
    def of_numbers(*numbers: Any) -> Fraction:
        if not all(map(_is_whole, numbers)):
            raise Undecided
        return Fraction(function(*(number.numerator for number in numbers)))

    return of_numbers


def _of_real(function: Callable[..., Any]) -> Callable[..., Any]:
    def of_numbers(*numbers: Any) -> Any:
        if any(isinstance(number, mpc) for number in numbers):
            raise Undecided
        return function(*numbers)

    return of_numbers


def _floor(number: Any) -> Fraction:
    return Fraction(int(mp.floor(number)) if not isinstance(number, Fraction) else number // 1)


def _log(number: Any, base: Any) -> Any:
    if number == 0 or base in (0, 1) or (not isinstance(number, mpc) and number < 0):
        raise Undecided  # where it is real
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
    "gcd": _of_whole(math.gcd),
    "lcm": _of_whole(math.lcm),
    "max": _of_real(max),
    "min": _of_real(min),
    "floor": _of_real(_floor),
    "ceil": _of_real(lambda number: -_floor(-number)),
    "exp": _real(mp.exp),
    **{name: _real(getattr(mp, name)) for name in CIRCULAR_AND_HYPERBOLIC},
    **{f"arc{name}": _real(getattr(mp, f"a{name}")) for name in CIRCULAR_AND_HYPERBOLIC},
}
