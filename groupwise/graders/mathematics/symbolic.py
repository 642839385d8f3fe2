"""The engine behind `math`, in a worker process: math-verify's reader, and sympy to compare.

It is asked what takes calculus or solving: sums, integrals, limits, curves, inequalities. It says
"same" only of two things of one kind that were read to the last sign; a piece of a text, a rounded
value or a set for a pair is none of its business. Nothing else imports these packages.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from itertools import islice
from typing import Any, Literal

import sympy  # type: ignore[import-untyped]
from latex2sympy2_extended import latex2sympy  # type: ignore[import-untyped]
from sympy.core.relational import Relational  # type: ignore[import-untyped]

from groupwise.graders.mathematics.engine_notation import COMMAND, plain_notation
from groupwise.graders.mathematics.notation import read
from groupwise.graders.mathematics.rounding import Rounding, is_decimal
from groupwise.graders.mathematics.values import POINTS, mpf, points, value

logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)

DIGITS, AGREE = 50, 35
Verdict = Literal["same", "different", "nothing found"]
LETTER = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]")
ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{\w+\}")


def judge(gold: str, answer: str | None, rounding: Rounding) -> Verdict:
    """Tell whether two answers are the same, both read as a whole. With None for an answer, the
    gold answer itself is worked out as another's would be."""
    if answer is None:
        one = read_whole(gold)
        return "same" if one is not None and _worked_out(one, one) else "nothing found"
    letters = _letters(gold) | _letters(answer)
    if len({letter.casefold() for letter in letters}) < len(letters):
        return "nothing found"  # the reader makes small letters of large ones
    try:
        one, other = read_whole(gold), read_whole(answer)
        if one is None or other is None:
            return "nothing found"
        right = _same(one, other) or _rounded(gold, one, answer, other, rounding)
    except MemoryError:
        raise
    except Exception:  # what it can't do, it says in many ways
        return "nothing found"
    return "same" if right else "different"


@lru_cache(maxsize=4096)  # a group's samples share their answer
def read_whole(text: str) -> Any:
    """Return what sympy makes of an answer, if all of it is read and all its names are kept."""
    plain = plain_notation(text)
    if plain is None:
        return None
    found = latex2sympy(plain, is_real=True, convert_degrees=False, normalization_config=None)
    if isinstance(found, (list, tuple, str)) or found in (sympy.nan, sympy.zoo):
        return None
    kept = {letter for name in _names(found) for letter in name.casefold()}
    return found if {letter.casefold() for letter in _letters(plain)} <= kept else None


def _letters(text: str) -> set[str]:
    """Return the names in an answer; e and i are numbers, d belongs to an integral."""
    bare = COMMAND.sub(" ", ENVIRONMENT.sub(" ", text))
    return set(LETTER.findall(bare)) - set("eid")


def _names(found: Any) -> set[str]:
    symbols = {symbol.name for symbol in found.atoms(sympy.Symbol)}
    functions = found.atoms(sympy.core.function.AppliedUndef) if hasattr(found, "atoms") else ()
    return symbols | {function.func.__name__ for function in functions}


def _same(one: Any, other: Any) -> bool:
    """Tell whether they are of one kind, and equal."""
    return one == other or _in_order(one) == _in_order(other) or _worked_out(one, other)


def _worked_out(one: Any, other: Any) -> bool:
    """Equal by what they come to, however they are written."""
    if isinstance(one, sympy.MatrixExpr) or isinstance(other, sympy.MatrixExpr):
        one, other = one.doit(), other.doit()
    if isinstance(one, sympy.MatrixBase) and isinstance(other, sympy.MatrixBase):
        return one.shape == other.shape and all(map(_same, one.flat(), other.flat()))
    if any(isinstance(x, (Relational, sympy.And)) for x in (one, other)):
        return _same_relations(one, other)
    if isinstance(one, sympy.Set) and isinstance(other, sympy.Set):
        return bool(one.symmetric_difference(other).is_empty)
    if isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr):
        return _same_expressions(one, other)
    return False


def _in_order(found: Any) -> Any:
    """Put sums and products into sympy's order; the reader leaves them."""
    if not isinstance(found, sympy.Basic) or not found.args:
        return found
    return found.func(*map(_in_order, found.args))


def _same_relations(one: Any, other: Any) -> bool:
    """Compare equations of one curve, or inequalities of one name that hold alike."""
    if isinstance(one, sympy.Eq) and isinstance(other, sympy.Eq):
        return _same_curves(one, other)
    relations = [x for x in (one, other) if isinstance(x, (Relational, sympy.And))]
    names = set().union(*(x.free_symbols for x in relations))
    if any(x.has(sympy.Eq) for x in relations) or len(names) != 1:
        return False
    sets = [_where(x) for x in (one, other)]
    return all(isinstance(x, sympy.Set) for x in sets) and bool(
        sets[0] == sets[1] or sets[0].symmetric_difference(sets[1]).is_empty
    )


def _where(found: Any) -> Any:
    """Return the numbers of which inequalities hold."""
    if isinstance(found, sympy.And):
        return sympy.Intersection(*(_where(part) for part in found.args))
    return found.as_set() if isinstance(found, Relational) else found


def _same_curves(one: Any, other: Any) -> bool:
    """Compare the numerators of quotients: y = 1/x is xy = 1. (x - 1)^3 = 0 is not x = 1."""
    tops = [sympy.together(x.lhs - x.rhs).as_numer_denom()[0] for x in (one, other)]
    if tops[0].free_symbols != tops[1].free_symbols or 0 in tops:
        return False
    return bool(sympy.cancel(tops[0] / tops[1]).is_number)


def _same_expressions(one: Any, other: Any) -> bool:
    if one.free_symbols != other.free_symbols:
        return bool(sympy.simplify(one.doit() - other.doit()) == 0)
    names = sorted(one.free_symbols, key=str)
    counted = any(x.has(sympy.Sum, sympy.Product) for x in (one, other))
    at = islice(points([name.name for name in names], whole=counted), POINTS)
    verdicts = [
        _same_numbers(*(x.subs({name: point[name.name] for name in names}) for x in (one, other)))
        for point in at
    ]
    if None not in verdicts:
        return all(verdicts)
    return bool(sympy.simplify(one.doit() - other.doit()) == 0)


def _same_numbers(one: Any, other: Any) -> bool | None:
    numbers = [_number(x) for x in (one, other)]
    if None in numbers:
        return None
    size = max(abs(x) for x in numbers)
    return bool(abs(numbers[0] - numbers[1]) <= size * sympy.Float(10, DIGITS) ** -AGREE)


def _number(found: Any) -> Any:
    """Return its digits; work it out first only where that is needed."""
    for worked_out in (False, True) if found.has(sympy.Integral) else (True,):
        number = sympy.N(found.doit() if worked_out else found, DIGITS)
        if isinstance(number, sympy.Number) or (number.is_number and number.is_finite):
            return number
    return None


def _rounded(gold: str, one: Any, answer: str, other: Any, rounding: Rounding) -> bool:
    """Tell whether one is a decimal for what was worked out."""
    for text, found, of_gold in ((gold, other, True), (answer, one, False)):
        tree = read(text)
        worked_out = isinstance(found, sympy.Expr) and not found.free_symbols
        if tree is None or not is_decimal(tree) or not worked_out:
            continue
        number = _number(found)
        if number is None or not number.is_real:
            continue
        pair = (value(tree, {}, 1), mpf(str(number)))
        if rounding.takes(*(pair if of_gold else pair[::-1])):
            return True
    return False


read_whole(r"\sum_{k=1}^{2} x^k")  # its grammar is built at the first use: once, for all workers
