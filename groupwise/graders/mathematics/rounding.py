"""When a decimal stands for a number that it is not exactly: 0.333333 for 1/3."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, NamedTuple

from groupwise.graders.mathematics.tokens import Tree
from groupwise.graders.mathematics.values import Undecided, mp, mpc, to_float

IN_FULL = 12  # digits: what has no more of them is written in full, or it is another number
OF_A_FLOAT = (".15g", ".16g", ".17g", "")  # how a computer prints a 64-bit number, in full


class Rounding(NamedTuple):
    """`digits`: so many digits of a decimal behind its point, rounded or cut off, are enough, where
    the zeros of 0.00123 do not count (None: it must be exact). `decimals`: numbers count as equal
    if they are so when rounded to that place."""

    digits: int | None = 6
    decimals: int | None = None

    def takes(self, one: Any, other: Any, written: tuple[bool, bool] = (True, True)) -> bool:
        """Tell whether two different numbers count as one; `written`: which are decimals."""
        if any(isinstance(number, str | mpc) for number in (one, other)):
            return False
        try:
            if self.decimals is not None and self._round(one) == self._round(other):
                return True
            return (written[0] and self.stands_for(one, other)) or (
                written[1] and self.stands_for(other, one)
            )
        except (Undecided, TypeError):
            return False

    def _round(self, number: Any) -> Any:
        return mp.nint(to_float(number) * 10 ** (self.decimals or 0))

    def stands_for(self, decimal: Any, number: Any) -> bool:
        """Tell whether a decimal of enough digits is a longer number rounded or cut off, or what a
        computer prints of it: 1.4142135623730951 for the root of 2, wrong in its last digit."""
        places = _places(decimal)
        if self.digits is None or not places:
            return False
        figures = abs(decimal) * 10**places
        behind = places if abs(decimal) >= 1 else len(str(figures))
        if behind < self.digits or to_float(decimal) * to_float(number) <= 0:
            return False
        length = _places(number)
        if length is not None and len(str(abs(number) * 10**length)) <= IN_FULL:
            return False
        size = abs(to_float(number)) * 10**places
        if mp.floor(size) == figures or mp.nint(size) == figures:
            return True
        near = float(to_float(number))
        printed = [format(near, digits) for digits in OF_A_FLOAT] if math.isfinite(near) else []
        return decimal in map(Fraction, printed)


def is_decimal(tree: Tree) -> bool:
    """Tell whether it is a number written out, with its sign, or a percentage."""
    if tree[0] == "/":
        return tree[2] == ("number", Fraction(100)) and is_decimal(tree[1])
    if tree[0] == "-":
        return len(tree) == 2 and is_decimal(tree[1])
    return bool(tree[0] == "number")


def _places(number: Any) -> int | None:
    """Count the decimals of a number; None if they do not end."""
    if not isinstance(number, Fraction):
        return None
    rest, counts = number.denominator, []
    for prime in (2, 5):
        count = 0
        while rest % prime == 0:
            rest, count = rest // prime, count + 1
        counts.append(count)
    return max(counts) if rest == 1 else None
