"""The comparison of two trees of `notation`: exact in fractions, else to many digits.

Expressions with names in them are compared at fixed points; there, different values prove that
the expressions differ, and equal ones at several points of many digits that they do not. Where
points disagree (branches of powers), nothing is decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from groupwise.graders.mathematics.expressions import UNSAID
from groupwise.graders.mathematics.notation import RELATIONS
from groupwise.graders.mathematics.residues import residue
from groupwise.graders.mathematics.rounding import Rounding, is_decimal
from groupwise.graders.mathematics.statements import (
    as_equation,
    as_tuple,
    curves,
    has_names,
    is_vacuous,
    one_name,
    regions,
    same_name,
    same_side,
    system,
    without_names,
)
from groupwise.graders.mathematics.tokens import Tree
from groupwise.graders.mathematics.values import (
    POINTS,
    Undecided,
    agree,
    close,
    far_points,
    has_sign,
    is_of_whole_numbers,
    mpc,
    names_in,
    points,
    value,
)

COLLECTIONS = frozenset({"list", "set", "tuple", "union", "matrix"})
NUMBER_WORDS = frozenset({"half", "third", "quarter", "none", "infinity", "infinite"})
# What a log's base may be where it is not said: the same one in both answers.
LOG_BASES: tuple[Tree, ...] = (
    ("number", Fraction(1234567, 100_000)), ("number", Fraction(10)), ("e",),
)  # fmt: skip


def same(gold: Tree, answer: Tree, rounding: Rounding | None = None) -> bool | None:
    """Compare; None: not decided here. `answer` may be written in more ways than `gold`."""
    try:
        return _Sameness(rounding or Rounding()).same(gold, answer)
    except (Undecided, RecursionError, OverflowError, ZeroDivisionError, ValueError, KeyError):
        return None


class _Sameness:
    """By the kinds of two trees, from statements and collections down to expressions."""

    def __init__(self, rounding: Rounding) -> None:
        self.rounding = rounding

    def same(self, gold: Tree, answer: Tree) -> bool | None:
        if gold == answer:
            return True
        kinds = (gold[0], answer[0])
        if "either" in kinds:
            readings = [tree[1:] if tree[0] == "either" else (tree,) for tree in (gold, answer)]
            verdicts = [self.same(one, other) for one in readings[0] for other in readings[1]]
            return True if True in verdicts else _all(verdicts)
        if "percent" in kinds:
            return self.percentages(gold, answer)
        if RELATIONS & {*kinds}:
            return self.relations(gold, answer)
        if "named" in kinds or "equation" in kinds:
            return self.equations(gold, answer)
        if "quantity" in kinds:
            return self.quantities(gold, answer)
        if "text" in kinds:
            return _texts(gold, answer)
        if "base" in kinds:
            return _bases(gold, answer)
        if "ratio" in kinds:
            return self.ratios(gold, answer)
        if gold[0] in COLLECTIONS or answer[0] in COLLECTIONS:
            return self.collections(gold, answer)
        return self.expressions(gold, answer)

    def percentages(self, gold: Tree, answer: Tree) -> bool | None:
        """Take 50% for 50 where one leaves the sign out, and for 0.5; never for 5000%."""
        if gold[0] == answer[0]:
            return self.same(gold[1], answer[1])
        of_gold = gold[0] == "percent"
        rate = gold[1] if of_gold else answer[1]
        as_written = self.same(rate, answer) if of_gold else self.same(gold, rate)
        if as_written is not False or rate[0] in COLLECTIONS:
            return as_written
        share: Tree = ("/", rate, ("number", Fraction(100)))
        return self.same(share, answer) if of_gold else self.same(gold, share)

    def quantities(self, gold: Tree, answer: Tree) -> bool | None:
        """Let a unit be left out. Where both have one: 1 m is 100 cm, and not 1 cm."""
        if gold[0] != answer[0]:
            bare = (tree[1] if tree[0] == "quantity" else tree for tree in (gold, answer))
            return self.same(*bare)
        if gold[2] != answer[2]:
            return False
        return self.same(*(("*", tree[1], ("number", tree[3])) for tree in (gold, answer)))

    # --- statements

    def equations(self, gold: Tree, answer: Tree) -> bool | None:
        """Take x = 3 for 3; but x = 3 is not y = 3, and an equation is not its right side."""
        both = {gold[0], answer[0]} <= {"named", "equation"}
        if both and (is_vacuous(gold) or is_vacuous(answer)):
            return False
        if gold[0] == answer[0] == "named":
            if same_name(gold[1], answer[1]):
                return self.same(gold[2], answer[2])
            if not names_in(gold[2]) and not names_in(answer[2]):
                return False
        if both:
            if COLLECTIONS & {tree[2][0] for tree in (gold, answer)}:
                return False
            return curves(as_equation(gold), as_equation(answer))
        if "equation" in (gold[0], answer[0]):
            return self.calculations(gold, answer)
        return self.same(*(tree[2] if tree[0] == "named" else tree for tree in (gold, answer)))

    def calculations(self, gold: Tree, answer: Tree) -> bool | None:
        """Take an identity for its right side: (x + 1)^2 = x^2 + 2x + 1; no other equation."""
        of_gold = gold[0] == "equation"
        worked, other = (gold, answer) if of_gold else (answer, gold)
        if other[0] in COLLECTIONS | {"text", "percent", "quantity"} or not names_in(worked):
            return False
        identity = self.expressions(worked[1], worked[2])
        if not identity:
            return False
        return self.same(worked[2], other) if of_gold else self.same(other, worked[2])

    def relations(self, gold: Tree, answer: Tree) -> bool | None:
        """Take x < 3 for 3 > x, 2x < 6 and (-∞, 3)."""
        names = {one_name(tree) for tree in (gold, answer)} - {None}
        covered = [regions(tree) for tree in (gold, answer)]
        if len(names) == 1 and None not in covered:
            return self.regions(*covered)
        if not {gold[0], answer[0]} <= RELATIONS:
            return None if {gold[0], answer[0]} & {"tuple", "union", "set"} else False
        if gold[0] == answer[0] == "relation":
            return same_side(gold, answer)
        if gold[0] != answer[0]:
            return None
        return self.in_any_order(gold[1:], answer[1:])

    def regions(self, gold: Any, answer: Any) -> bool:
        """Compare intervals one by one: open or closed alike, and with the same ends."""
        if [part[2:] for part in gold] != [part[2:] for part in answer]:
            return False
        return all(
            self.numbers(one, other)
            for part, said in zip(gold, answer, strict=True)
            for one, other in zip(part[:2], said[:2], strict=True)
        )

    def ratios(self, gold: Tree, answer: Tree) -> bool | None:
        """Compare part by part: 2:4 is not 1:2, for a ratio is asked for in lowest terms and may as
        well be the time of a clock."""
        return gold[0] == answer[0] and self.in_order(gold[1:], answer[1:])

    # --- collections

    def collections(self, gold: Tree, answer: Tree) -> bool | None:
        one, other = system(gold), system(answer)
        if one is not None and other is not None:
            in_order = [other[name] for name in one if name in other]
            return one.keys() == other.keys() and self.in_order([*one.values()], in_order)
        if has_names(gold) != has_names(answer):
            if one is not None:
                gold = as_tuple(one, by_alphabet=False)
                if answer[:3] == ("tuple", "[", "]"):  # no interval, where names have values
                    answer = ("tuple", "(", ")", *answer[3:])
            elif other is not None and gold[0] == "tuple":
                answer = as_tuple(other, by_alphabet=True)
            gold, answer = without_names(gold), without_names(answer)
        elif (one is None) != (other is None):
            return False  # x = 1, y = 2 against y = 1, y = 2
        kinds = {gold[0], answer[0]}
        if kinds == {"matrix"}:
            return self.matrices(gold, answer)
        if kinds == {"matrix", "tuple"}:
            return self.vectors(gold, answer)
        if "union" in kinds and kinds <= {"union", "tuple", "set"}:
            covered = [regions(tree) for tree in (gold, answer)]
            return None if None in covered else self.regions(*covered)
        if kinds == {"tuple"}:
            if gold[1:3] != answer[1:3] and len(gold) == len(answer) == 5:
                return False  # an interval's ends count
            return gold[1:3] == answer[1:3] and self.in_order(gold[3:], answer[3:])
        if kinds <= {"set", "list"}:
            return self.in_any_order(gold[1:], answer[1:])
        if kinds == {"tuple", "list"}:  # 3, 4 for (3, 4)
            ordered = [tree[3:] if tree[0] == "tuple" else tree[1:] for tree in (gold, answer)]
            interval = gold[0] == "tuple" and gold[1:3] != ("(", ")")
            return False if interval else self.in_order(*ordered)
        if kinds & {"set", "list"} and not kinds & COLLECTIONS - {"set", "list"}:
            return self.spread(gold, answer)
        return False  # several numbers are not one, and a set has no order

    def vectors(self, gold: Tree, answer: Tree) -> bool | None:
        """Compare (1, 2) with a row or a column of them; [[1, 2], [3, 4]] with a matrix."""
        matrix, other = (gold, answer) if gold[0] == "matrix" else (answer, gold)
        rows, items = matrix[1:], other[3:]
        if all(item[0] == "tuple" and item[1:3] == ("[", "]") for item in items):
            read: Tree = ("matrix", *(item[3:] for item in items))
            return self.matrices(*((gold, read) if matrix is gold else (read, answer)))
        if len(rows) != 1 and any(len(row) != 1 for row in rows):
            return False
        cells = [cell for row in rows for cell in row]
        return self.in_order(*((cells, items) if matrix is gold else (items, cells)))

    def spread(self, gold: Tree, answer: Tree) -> bool | None:
        """Compare a list with one expression, which may stand for two values (±)."""
        found = [
            tree[1:] if tree[0] in COLLECTIONS else _both_signs(tree) if has_sign(tree) else (tree,)
            for tree in (gold, answer)
        ]
        return self.in_any_order(*found)

    def matrices(self, gold: Tree, answer: Tree) -> bool | None:
        if [len(row) for row in gold[1:]] != [len(row) for row in answer[1:]]:
            return False
        rows = zip(gold[1:], answer[1:], strict=True)
        return _all(self.in_order(one, other) for one, other in rows)

    def in_order(self, gold: Sequence[Tree], answer: Sequence[Tree]) -> bool | None:
        if len(gold) != len(answer):
            return False
        return _all(self.same(one, other) for one, other in zip(gold, answer, strict=True))

    def in_any_order(self, gold: Sequence[Tree], answer: Sequence[Tree]) -> bool | None:
        """Compare as sets: what stands there twice counts once."""
        table = [[self.same(one, other) for other in answer] for one in gold]
        rows = [True if True in row else (None if None in row else False) for row in table]
        columns = [
            True if True in column else (None if None in column else False)
            for column in zip(*table, strict=True)
        ]
        if bool(gold) != bool(answer):
            return False
        return _all([*rows, *columns])

    # --- expressions

    def expressions(self, gold: Tree, answer: Tree) -> bool | None:
        names = names_in(gold) | names_in(answer)
        if UNSAID[1] in names:
            bases = [[_with_base(tree, base) for tree in (gold, answer)] for base in LOG_BASES]
            verdicts = [self.expressions(*pair) for pair in bases]
            return True if True in verdicts else _all(verdicts)
        if has_sign(gold) or has_sign(answer):
            return self.signs(gold, answer, sorted(names))
        if not names:
            return self.values(gold, answer)
        try:
            return residue(gold) == residue(answer)
        except Undecided:
            return _at_points(gold, answer, sorted(names))

    def values(self, gold: Tree, answer: Tree) -> bool | None:
        try:
            if agree(gold, answer, {}):
                return _residues_agree(gold, answer)
        except Undecided:  # too large for its digits to be written down
            return residue(gold) == residue(answer)
        written = (is_decimal(gold), is_decimal(answer))
        if not any(written) and self.rounding.decimals is None:
            return False
        return self.rounding.takes(value(gold, {}, 1), value(answer, {}, 1), written)

    def numbers(self, gold: Any, answer: Any) -> bool:
        """Compare the ends of an interval."""
        return close(gold, answer) or self.rounding.takes(gold, answer)

    def signs(self, gold: Tree, answer: Tree, names: Sequence[str]) -> bool | None:
        """Take 1 ± √2 for both values; ± is the same sign all through."""
        if not names:
            return self.in_any_order(_both_signs(gold), _both_signs(answer))
        one, other = _both_signs(gold), _both_signs(answer)
        straight = self.in_order(one, other)
        return straight or _any(straight, self.in_order(one, other[::-1]))


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    """Return False as soon as one is; undecided if one of the others is."""
    found: bool | None = True
    for verdict in verdicts:
        if verdict is False:
            return False
        if verdict is None:
            found = None
    return found


def _any(one: bool | None, other: bool | None) -> bool | None:
    return True if one or other else (None if None in (one, other) else False)


def _texts(gold: Tree, answer: Tree) -> bool | None:
    """Compare words, or letters: a set A is no side a."""
    letters = {("e",): "e", ("i",): "i"}
    words = [
        letters.get(tree) or tree[1]
        for tree in (gold, answer)
        if tree[0] in ("text", "name") or tree in letters
    ]
    if len(words) < 2:
        return None if words[0] in NUMBER_WORDS else False
    return bool(words[0] == words[1])


def _bases(gold: Tree, answer: Tree) -> bool | None:
    """Take 204_5 for 54, and never for 204."""
    for tree in (gold, answer):
        if names_in(tree) or tree[0] in COLLECTIONS or has_sign(tree):
            return False
    return close(
        *(in_ten(tree) if tree[0] == "base" else value(tree, {}, 1) for tree in (gold, answer))
    )


def in_ten(tree: Tree) -> Fraction:
    """Return the value of a number in a base."""
    return Fraction(int(tree[1] or "0", int(tree[2])))


def _both_signs(tree: Tree) -> tuple[Tree, Tree]:
    return _signed(tree, 1), _signed(tree, -1)


def _signed(tree: Tree, sign: int) -> Tree:
    """Write + or - for ±."""
    parts = tuple(_signed(part, sign) if isinstance(part, tuple) else part for part in tree)
    if tree[0] not in ("±", "∓"):
        return parts
    plus = (tree[0] == "±") == (sign > 0)
    if parts[1] == ("number", Fraction(0)):  # ±2
        return parts[2] if plus else ("-", parts[2])
    return ("+" if plus else "-", *parts[1:])


def _with_base(tree: Tree, base: Tree) -> Tree:
    if tree == UNSAID:
        return base
    return tuple(_with_base(part, base) if isinstance(part, tuple) else part for part in tree)


def _residues_agree(gold: Tree, answer: Tree) -> bool:
    """Tell 1 - 1/2008! from 1 - 1/2009!, which are alike for more digits than can be looked at;
    what is not rational is not looked at."""
    try:
        return residue(gold) == residue(answer)
    except Undecided:
        return True


def _are_real(gold: Tree, answer: Tree, point: dict[str, Fraction]) -> bool:
    """Tell whether both have a real value here, where no branch of a root can make them differ."""
    return not any(isinstance(value(tree, point, 1), mpc) for tree in (gold, answer))


def _at_points(gold: Tree, answer: Tree, names: Sequence[str]) -> bool | None:
    """Compare at points where both have a value: some, or many where they are of whole numbers.

    Real values that differ prove that the expressions do; complex ones may be of two branches.
    """
    whole = is_of_whole_numbers(gold) or is_of_whole_numbers(answer)
    verdicts: list[bool] = []
    for point in points(names, whole):
        found = _agree_at(gold, answer, point)
        if found is None:
            continue
        verdicts.append(found)
        if not found and (whole or _are_real(gold, answer, point)):
            return False
        if not whole and len(verdicts) == POINTS:
            break
    if len(verdicts) < POINTS:
        raise Undecided
    if not all(verdicts):
        return None if any(verdicts) else False
    return whole or all(
        _agree_at(gold, answer, point) is not False or not _are_real(gold, answer, point)
        for point in far_points(names, gold, answer)
    )


def _agree_at(gold: Tree, answer: Tree, point: dict[str, Fraction]) -> bool | None:
    try:
        return agree(gold, answer, point)
    except Undecided:
        return None
