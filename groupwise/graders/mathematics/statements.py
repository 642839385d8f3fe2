"""The meaning of equations and inequalities: curves, intervals, values of names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import islice
from typing import Any

from groupwise.graders.mathematics.notation import RELATIONS
from groupwise.graders.mathematics.residues import PRIME, residue
from groupwise.graders.mathematics.tokens import Tree
from groupwise.graders.mathematics.values import (
    AGREE,
    POINTS,
    Undecided,
    close,
    divide,
    far_points,
    has_sign,
    mp,
    mpc,
    mpf,
    names_in,
    points,
    to_float,
    value,
)

Piece = tuple[Any, Any, bool, bool]  # an interval's ends, and whether they belong to it
INDEXED = re.compile(r"([a-zA-Z])(?:_(\d+))?")
LOWEST, HIGHEST = "-∞", "∞"


# --- names with values


def as_equation(tree: Tree) -> Tree:
    return ("equation", *tree[1:])


def is_vacuous(tree: Tree) -> bool:
    """Tell whether it says nothing, as x = x and 1 = 1."""
    return bool(tree[1] == tree[2]) or not names_in(tree)


def same_name(one: Tree, other: Tree) -> bool:
    """Tell whether names mean the same: y = ... may be f(x) = ..., and f = ... too."""
    if one == other:
        return True
    call, name = (one, other) if one[0] == "call" else (other, one)
    if call[0] != "call" or name[0] != "name":
        return False
    return bool(name[1] == call[1]) or (name[1] == "y" and call[2:] == (("name", "x"),))


def system(tree: Tree) -> dict[Tree, Tree] | None:
    """Read the values of several names: x = 1, y = 2."""
    items = tree[3:] if tree[0] == "tuple" else tree[1:]
    if tree[0] not in ("list", "tuple", "set") or any(item[0] != "named" for item in items):
        return None
    found = {item[1]: item[2] for item in items}
    return found if len(found) == len(items) > 1 else None


def as_tuple(values: dict[Tree, Tree], by_alphabet: bool) -> Tree:
    """Return (x, y) for x = 1, y = 2: in their order, or in that of the alphabet."""
    names = [*values]
    letters = [name[0] == "name" and INDEXED.fullmatch(str(name[1])) for name in names]
    if by_alphabet and all(letters):
        names.sort(key=_alphabetic)
    return ("tuple", "(", ")", *(values[name] for name in names))


def _alphabetic(name: Tree) -> tuple[str, int]:
    letter, _, index = str(name[1]).partition("_")
    return letter.casefold(), int(index or 0)


def has_names(tree: Tree) -> bool:
    """Tell whether it says what its values are the values of."""
    return any(isinstance(item, tuple) and item[:1] == ("named",) for item in tree)


def without_names(tree: Tree) -> Tree:
    """Write x = 1, x = 2 as 1, 2."""
    if tree[0] not in ("list", "set"):
        return tree
    return (tree[0], *(item[2] if item[0] == "named" else item for item in tree[1:]))


# --- equations


def curves(gold: Tree, answer: Tree) -> bool | None:
    """Compare curves: the same where one is a multiple of the other, everywhere by one factor."""
    one, other = (_difference(tree) for tree in (gold, answer))
    if has_sign(one) or has_sign(other):
        return None
    if names_in(one) != names_in(other):
        return False
    try:
        (a, b), (c, d) = ([residue(tree, draw) for draw in (0, 1)] for tree in (one, other))
        multiple = c != 0 and (a * d - b * c) % PRIME == 0
    except Undecided:
        factors = _factors(one, other)
        multiple = all(close(factor, factors[0]) for factor in factors)
    return True if multiple else _if_linear(one, other)


def _difference(equation: Tree) -> Tree:
    """Return what is 0 on the curve. |a| = |b| is a^2 = b^2, and |a| = 3 is a^2 = 9."""
    left, right = equation[1:]
    if left[0] == "abs" and (right[0] == "abs" or _is_positive(right)):
        left, right = (
            ("^", side[1] if side[0] == "abs" else side, ("number", Fraction(2)))
            for side in (left, right)
        )
    return ("-", left, right)


def _is_positive(tree: Tree) -> bool:
    return tree[0] == "number" and tree[1] >= 0


def _factors(one: Tree, other: Tree) -> list[Any]:
    """Return the factors between two expressions at some points."""
    names = sorted(names_in(one) | names_in(other))
    near = list(islice(_divided(one, other, points(names)), POINTS))
    if len(near) < POINTS:
        raise Undecided
    return [*near, *_divided(one, other, far_points(names, one, other))]


def _divided(one: Tree, other: Tree, at: Iterable[dict[str, Fraction]]) -> Iterator[Any]:
    for point in at:
        try:
            yield divide(value(one, point, 1), value(other, point, 1))
        except Undecided:
            continue


def _if_linear(one: Tree, other: Tree) -> bool | None:
    """Tell lines apart that are no multiples of each other; of other curves nothing is known."""
    return False if _is_linear(one) and _is_linear(other) else None


def _is_linear(tree: Tree) -> bool:
    """Tell whether no name is multiplied by a name, in a power or in a denominator."""
    if not names_in(tree):
        return True
    if tree[0] == "name":
        return True
    if tree[0] in ("+", "-"):
        return all(_is_linear(part) for part in tree[1:])
    if tree[0] == "*":
        return sum(bool(names_in(part)) for part in tree[1:]) < 2 and all(map(_is_linear, tree[1:]))
    return tree[0] == "/" and not names_in(tree[2]) and _is_linear(tree[1])


# --- inequalities


def same_side(gold: Tree, answer: Tree) -> bool | None:
    """Tell whether two are on one side of a border: one is the other times a positive number."""
    one, other = (("-", tree[2], tree[3]) for tree in (gold, answer))
    if gold[1] != answer[1] or names_in(one) != names_in(other):
        return False
    if has_sign(one) or has_sign(other):
        return None
    factors = _factors(one, other)
    if all(close(factor, factors[0]) for factor in factors):
        return bool(gold[1] == "!=" or factors[0] > 0)
    return _if_linear(one, other)


def one_name(tree: Tree) -> str | None:
    """Return the name that inequalities are about, if it is one."""
    names = names_in(flat(tree)) if tree[0] in RELATIONS else frozenset()
    return next(iter(names)) if len(names) == 1 else None


def flat(tree: Tree) -> Tree:
    """Read f(x) as one name."""
    if tree[0] == "call":
        return ("name", str(tree))
    return tuple(flat(part) if isinstance(part, tuple) else part for part in tree)


def regions(tree: Tree) -> list[Piece] | None:
    """Return what a union of intervals or inequalities of one name cover, in order; None if that
    takes more than a division."""
    try:
        return _joined(_pieces(tree))
    except (Undecided, KeyError):
        return None


def _pieces(tree: Tree) -> list[Piece]:
    if tree[0] in ("union", "or"):
        return [piece for part in tree[1:] for piece in _pieces(part)]
    if tree[0] == "and":
        found: list[Piece] = [(LOWEST, HIGHEST, False, False)]
        for part in tree[1:]:
            found = [_overlap(one, other) for one in found for other in _joined(_pieces(part))]
        return found
    if tree[0] == "relation":
        return _half_lines(tree)
    if tree[0] == "set":
        ends = [value(item, {}, 1) for item in tree[1:]]
        return [(end, end, True, True) for end in ends]
    if tree[0] == "tuple" and len(tree) == 5:
        low, high = (value(item, {}, 1) for item in tree[3:])
        return [(low, high, tree[1] == "[", tree[2] == "]")]
    raise Undecided


def _half_lines(tree: Tree) -> list[Piece]:
    """Find where left - right = a x + b is below 0."""
    difference = flat(("-", tree[2], tree[3]))
    name = one_name(tree)
    if name is None or not _is_linear(difference):
        raise Undecided
    start, one = (value(difference, {name: Fraction(x)}, 1) for x in (0, 1))
    slope = to_float(one) - to_float(start) if not _exact(one, start) else one - start
    if isinstance(slope, mpc) or slope == 0:
        raise Undecided
    border = -divide(start, slope)
    if tree[1] == "!=":
        return [(LOWEST, border, False, False), (border, HIGHEST, False, False)]
    closed = tree[1] == "<="
    if slope > 0:
        return [(LOWEST, border, False, closed)]
    return [(border, HIGHEST, closed, False)]


def _exact(*numbers: Any) -> bool:
    return all(isinstance(number, Fraction) for number in numbers)


def _place(number: Any) -> Any:
    """Place a value on the line so that it compares: rounded to the digits that must agree."""
    if isinstance(number, str):
        return mpf("inf") if number == HIGHEST else mpf("-inf")
    number = to_float(number)
    if isinstance(number, mpc):
        raise Undecided
    return mp.nint(number * mpf(10) ** AGREE)


def _from(piece: Piece) -> tuple[Any, bool]:
    return _place(piece[0]), not piece[2]


def _to(piece: Piece) -> tuple[Any, bool]:
    return _place(piece[1]), piece[3]


def _overlap(one: Piece, other: Piece) -> Piece:
    first = max(one, other, key=_from)
    last = min(one, other, key=_to)
    return (first[0], last[1], first[2], last[3])


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Order pieces, drop empty ones, and join those that overlap or touch."""
    there = [piece for piece in pieces if _place(piece[0]) < _place(piece[1]) or _point(piece)]
    found: list[Piece] = []
    for piece in sorted(there, key=_from):
        if found and _from(piece) <= _to(found[-1]):
            last = max(found[-1], piece, key=_to)
            found[-1] = (found[-1][0], last[1], found[-1][2], last[3])
        else:
            found.append(piece)
    return found


def _point(piece: Piece) -> bool:
    return piece[2] and piece[3] and _place(piece[0]) == _place(piece[1])
