"""Whether two trees of `notation` mean the same: exactly in fractions, else to many digits.

Expressions with names in them are compared at fixed points; there, different values prove that
the expressions differ, and equal ones at several points of many digits that they do not. Where
points disagree (branches of roots), nothing is decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from groupwise.graders.notation import Tree
from groupwise.graders.values import (
    AGREE,
    Undecided,
    close,
    divide,
    has_sign,
    mp,
    mpc,
    mpf,
    names_in,
    points,
    to_float,
    value,
)

COLLECTIONS = frozenset({"list", "set", "tuple", "union", "matrix"})
NUMBER_WORDS = frozenset({"half", "third", "quarter", "none", "infinity", "infinite"})


def same(gold: Tree, answer: Tree) -> bool | None:
    """None: not decided here. `answer` may be written in more ways than `gold`."""
    try:
        return _same(gold, answer)
    except (Undecided, RecursionError, OverflowError, ZeroDivisionError, ValueError, KeyError):
        return None


def _same(gold: Tree, answer: Tree) -> bool | None:
    if gold == answer:
        return True
    if "either" in (gold[0], answer[0]):
        readings = [tree[1:] if tree[0] == "either" else (tree,) for tree in (gold, answer)]
        verdicts = [_same(one, other) for one in readings[0] for other in readings[1]]
        return True if True in verdicts else _all(verdicts)
    if "percent" in (gold[0], answer[0]):
        return _percentages(gold, answer)
    if "named" in (gold[0], answer[0]):
        return _named(gold, answer)
    if "quantity" in (gold[0], answer[0]):
        return _quantities(gold, answer)
    if "text" in (gold[0], answer[0]):
        return _texts(gold, answer)
    if "base" in (gold[0], answer[0]):
        return _bases(gold, answer)
    if "equation" in (gold[0], answer[0]):
        return _equations(gold, answer) if gold[0] == answer[0] else False
    if "ratio" in (gold[0], answer[0]):
        return _ratios(gold, answer)
    if gold[0] in COLLECTIONS or answer[0] in COLLECTIONS:
        return _collections(gold, answer)
    return _expressions(gold, answer)


def _percentages(gold: Tree, answer: Tree) -> bool | None:
    """50% is 50 for one who leaves the sign out, and it is 0.5; it is never 5000%."""
    if gold[0] == answer[0]:
        return _same(gold[1], answer[1])
    rate, plain = (gold, answer) if gold[0] == "percent" else (answer, gold)
    as_written = _same(rate[1], plain)
    if as_written is not False or rate[1][0] in COLLECTIONS:
        return as_written
    return _same(("/", rate[1], ("number", Fraction(100))), plain)


def _quantities(gold: Tree, answer: Tree) -> bool | None:
    """A unit may be left out. Where both have one: 1 m is 100 cm, and not 1 cm."""
    if gold[0] != answer[0]:
        return _same(*(tree[1] if tree[0] == "quantity" else tree for tree in (gold, answer)))
    if gold[2] != answer[2]:
        return False
    return _same(*(("*", tree[1], ("number", tree[3])) for tree in (gold, answer)))


def _named(gold: Tree, answer: Tree) -> bool | None:
    """x = 3 is 3; but x = 3 is not y = 3."""
    if gold[0] == answer[0] and gold[1] != answer[1]:
        return None
    return _same(*(tree[2] if tree[0] == "named" else tree for tree in (gold, answer)))


def _texts(gold: Tree, answer: Tree) -> bool | None:
    letters = {("e",): "e", ("i",): "i"}
    words = [
        letters.get(tree) or tree[1]
        for tree in (gold, answer)
        if tree[0] in ("text", "name") or tree in letters
    ]
    if len(words) < 2:
        return None if words[0] in NUMBER_WORDS else False
    if words[0] == words[1]:
        return True
    return None if words[0].casefold() == words[1].casefold() else False  # a set A, a side a


def _ratios(gold: Tree, answer: Tree) -> bool | None:
    """2:4 is 1:2, and 1/2, for a ratio; and not for a clock."""
    if gold[0] == answer[0]:
        return True if _in_order(gold[1:], answer[1:]) else None
    ratio, other = (gold, answer) if gold[0] == "ratio" else (answer, gold)
    if len(ratio) != 3 or other[0] in COLLECTIONS:
        return False
    return None if _same(("/", *ratio[1:]), other) is not False else False


def _bases(gold: Tree, answer: Tree) -> bool | None:
    """204_5 is 54, and never 204."""
    for tree in (gold, answer):
        if names_in(tree) or tree[0] in COLLECTIONS or has_sign(tree):
            return False
    return close(
        *(in_ten(tree) if tree[0] == "base" else value(tree, {}, 1) for tree in (gold, answer))
    )


def in_ten(tree: Tree) -> Fraction:
    """What a number in a base is worth."""
    return Fraction(int(tree[1] or "0", int(tree[2])))


def _collections(gold: Tree, answer: Tree) -> bool | None:
    kinds = {gold[0], answer[0]}
    if kinds == {"matrix"}:
        return _matrices(gold, answer)
    if "union" in kinds and kinds <= {"union", "tuple", "set"}:
        return _intervals(gold) == _intervals(answer)
    if kinds == {"tuple"}:
        if gold[1:3] != answer[1:3] and len(gold) == len(answer) == 5:
            return False  # an interval's ends count
        return gold[1:3] == answer[1:3] and _in_order(gold[3:], answer[3:])
    if kinds <= {"set", "list"}:
        return _in_any_order(gold[1:], answer[1:])
    if kinds == {"tuple", "list"}:  # 3, 4 and (3, 4)
        ordered = [tree[3:] if tree[0] == "tuple" else tree[1:] for tree in (gold, answer)]
        return False if _in_order(*ordered) is False else None
    if kinds & {"set", "list"} and not kinds & COLLECTIONS - {"set", "list"}:
        return _spread(gold, answer)
    if kinds & {"set", "list"}:
        return None
    return False  # several numbers are not one


def _intervals(tree: Tree) -> list[tuple[Any, ...]]:
    """What a union covers, in order, with what overlaps or touches joined."""
    found = []
    for part in tree[1:] if tree[0] == "union" else (tree,):
        if part[0] == "set":
            ends = [value(item, {}, 1) for item in part[1:]]
            found += [(_place(end), 0, _place(end), 1) for end in ends]
        elif part[0] == "tuple" and len(part) == 5:
            low, high = (_place(value(item, {}, 1)) for item in part[3:])
            found.append((low, int(part[1] == "("), high, int(part[2] == "]")))
        else:
            raise Undecided
    joined: list[tuple[Any, ...]] = []
    for low, after, high, closed in sorted(found):
        if joined and (low, after) <= joined[-1][2:]:
            joined[-1] = (*joined[-1][:2], *max(joined[-1][2:], (high, closed)))
        else:
            joined.append((low, after, high, closed))
    return joined


def _place(number: Any) -> Any:
    """On the line, in a form that compares: rounded to the digits that must agree."""
    if isinstance(number, str):
        return mpf("inf") if number == "∞" else mpf("-inf")
    number = to_float(number)
    if isinstance(number, mpc):
        raise Undecided
    return mp.nint(number * mpf(10) ** AGREE)


def _spread(gold: Tree, answer: Tree) -> bool | None:
    """A list against one expression, which may stand for two values (±)."""
    found = [
        tree[1:]
        if tree[0] in COLLECTIONS
        else tuple(_number_tree(value) for value in _both_signs(tree))
        if has_sign(tree)
        else (tree,)
        for tree in (gold, answer)
    ]
    return _in_any_order(*found)


def _both_signs(tree: Tree) -> list[Any]:
    return [value(tree, {}, sign) for sign in (1, -1)]


def _number_tree(number: Any) -> Tree:
    return ("number", number) if isinstance(number, Fraction) else ("float", number)


def _matrices(gold: Tree, answer: Tree) -> bool | None:
    if len(gold) != len(answer) or any(
        len(a) != len(b) for a, b in zip(gold[1:], answer[1:], strict=True)
    ):
        return False
    return _all(_in_order(one, other) for one, other in zip(gold[1:], answer[1:], strict=True))


def _in_order(gold: Sequence[Tree], answer: Sequence[Tree]) -> bool | None:
    if len(gold) != len(answer):
        return False
    return _all(_same(one, other) for one, other in zip(gold, answer, strict=True))


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    """False as soon as one is; undecided if one of the others is."""
    found: bool | None = True
    for verdict in verdicts:
        if verdict is False:
            return False
        if verdict is None:
            found = None
    return found


def _in_any_order(gold: Sequence[Tree], answer: Sequence[Tree]) -> bool | None:
    """As sets: what stands there twice counts once."""
    table = [[_same(one, other) for other in answer] for one in gold]
    rows = [True if True in row else (None if None in row else False) for row in table]
    columns = [
        True if True in column else (None if None in column else False)
        for column in zip(*table, strict=True)
    ]
    if bool(gold) != bool(answer):
        return False
    return _all([*rows, *columns])


# --- expressions


def _expressions(gold: Tree, answer: Tree) -> bool | None:
    names = names_in(gold) | names_in(answer)
    signs = [has_sign(gold), has_sign(answer)]
    if any(signs):
        if names:
            return None
        pairs = [[_number_tree(x) for x in _both_signs(tree)] for tree in (gold, answer)]
        return _in_any_order(*pairs)
    if not names:
        return close(value(gold, {}, 1), value(answer, {}, 1))
    verdicts = {
        close(value(gold, point, 1), value(answer, point, 1)) for point in points(sorted(names))
    }
    return verdicts.pop() if len(verdicts) == 1 else None


def _equations(gold: Tree, answer: Tree) -> bool | None:
    """The same curve where one is a multiple of the other, everywhere by the same factor."""
    one, other = (("-", tree[1], tree[2]) for tree in (gold, answer))
    names = names_in(one) | names_in(other)
    if not names or names_in(one) != names_in(other) or has_sign(one) or has_sign(other):
        return None
    ratios = [
        divide(value(one, point, 1), value(other, point, 1)) for point in points(sorted(names))
    ]
    if all(close(ratio, ratios[0]) for ratio in ratios):
        return True
    linear = all(_is_linear(tree) for tree in (one, other))
    return False if linear else None


def _is_linear(tree: Tree) -> bool:
    """No name times a name, in a power or a denominator."""
    if not names_in(tree):
        return True
    if tree[0] == "name":
        return True
    if tree[0] in ("+", "-"):
        return all(_is_linear(part) for part in tree[1:])
    if tree[0] == "*":
        return sum(bool(names_in(part)) for part in tree[1:]) < 2 and all(map(_is_linear, tree[1:]))
    return tree[0] == "/" and not names_in(tree[2]) and _is_linear(tree[1])
