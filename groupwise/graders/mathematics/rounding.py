"""When a decimal stands for a number that it is not exactly: 1.414214 for the root of 2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final, Literal, NamedTuple

from groupwise.graders.mathematics.tokens import Tree
from groupwise.graders.mathematics.values import Undecided, mp, mpc, to_float

IN_FULL = 12  # digits: what has no more of them is written in full, or it is another number
AS_PRINTED = (".15g", ".16g", ".17g", "")  # a 64-bit number, but for the first one in full
FLOAT_DIGITS = 16  # of a 64-bit number
FEW = 6  # digits behind its point, of a decimal that can't be exact
BY_KIND: Final = "by kind"


class Rounding(NamedTuple):
    """`digits`: so many digits of a decimal behind its point, rounded or cut off, are enough, where
    the zeros of 0.00123 do not count (None: it must be exact). "by kind": few for a root or π, that
    no decimal is, and all of a 64-bit number for a fraction, which can be written exactly. A gold
    answer was rounded by who wrote it: a few of its digits are enough. `decimals`: numbers count as
    equal if they are so when rounded to that place."""

    digits: int | Literal["by kind"] | None = BY_KIND
    decimals: int | None = None

    def takes(self, gold: Any, answer: Any, written: tuple[bool, bool] = (True, True)) -> bool:
        """Tell whether two different numbers count as one; `written`: which are decimals."""
        if any(isinstance(number, str | mpc) for number in (gold, answer)):
            return False
        try:
            if self.decimals is not None and self._round(gold) == self._round(answer):
                return True
            return (written[0] and self._stands_for(gold, answer, by_policy=False)) or (
                written[1] and self._stands_for(answer, gold, by_policy=True)
            )
        except (Undecided, TypeError):
            return False

    def _round(self, number: Any) -> Any:
        return mp.nint(to_float(number) * 10 ** (self.decimals or 0))

    def _stands_for(self, decimal: Any, number: Any, *, by_policy: bool) -> bool:
        """Tell whether a decimal of enough digits is a longer number rounded or cut off, or what a
        computer prints of it: 1.4142135623730951 for the root of 2, wrong in its last digit."""
        places = _places(decimal)
        if self.digits is None or not places:
            return False
        if to_float(decimal) * to_float(number) <= 0:
            return False
        length = _places(number)
        if length is not None and len(str(abs(number) * 10**length)) <= IN_FULL:
            return False
        figures = abs(decimal) * 10**places
        written = len(str(figures))
        behind = places if abs(decimal) >= 1 else written
        size = abs(to_float(number)) * 10**places
        is_right = mp.floor(size) == figures or mp.nint(size) == figures
        if self.digits != BY_KIND:
            return behind >= self.digits and (is_right or _is_printed(decimal, number, AS_PRINTED))
        in_full = by_policy and isinstance(number, Fraction)
        enough = written >= FLOAT_DIGITS if in_full else behind >= FEW
        return (is_right and enough) or (
            written > IN_FULL and _is_printed(decimal, number, AS_PRINTED[1:])
        )


def _is_printed(decimal: Fraction, number: Any, forms: Sequence[str]) -> bool:
    """Tell whether a computer prints the 64-bit number nearest to a number like this."""
    near = float(to_float(number))
    return math.isfinite(near) and decimal in [Fraction(format(near, form)) for form in forms]


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
