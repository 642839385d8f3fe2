"""Lists whose order counts: where the question asks for one.

A list without brackets is compared in any order, for most are solutions, of which no order is
asked. "List them from least to greatest" asks for one, and then another order is another answer.
"""

from __future__ import annotations

import re
from functools import lru_cache

from groupwise.graders.mathematics.notation import read
from groupwise.graders.mathematics.rounding import Rounding
from groupwise.graders.mathematics.sameness import same
from groupwise.graders.mathematics.tokens import Tree

# An instruction to whoever answers: what is given in some order ('the ascending list') is none.
ASKS = re.compile(
    r"\b(?:list|enter|give|write|express|put|state|report|arrange|order|sort|rank)\b"
    r"[^.?!\n]{0,120}?\b(?:(?:in|by)\s+(?:\w+\s+)?"
    r"(?:increasing|decreasing|ascending|descending|numerical|alphabetical)\s+order\b"
    r"|from\s+(?:the\s+)?(?:least|smallest|lowest|greatest|largest|highest|biggest|shortest|longest"
    r"|lightest|heaviest)\s+to\b)",
    re.IGNORECASE,
)


@lru_cache(maxsize=2**12)  # a group's samples share their question
def asks_for_order(question: str) -> bool:
    """Tell whether a question says in which order the parts of an answer are to stand."""
    return ASKS.search(question) is not None


def out_of_order(gold: str, answer: str, rounding: Rounding) -> bool:
    """Tell whether two lists without brackets have the same parts in different places."""
    lists = [_parts(read(text)) for text in (gold, answer)]
    if None in lists or len(lists[0] or ()) != len(lists[1] or ()):
        return False
    pairs = zip(lists[0] or (), lists[1] or (), strict=True)
    return any(same(one, other, rounding) is False for one, other in pairs)


def _parts(tree: Tree | None) -> tuple[Tree, ...] | None:
    """Return the parts of a list in bare commas; 3,5 may be one number as well."""
    if tree is not None and tree[0] == "either":
        tree = next((each for each in tree[1:] if each[0] == "list"), None)
    return tree[1:] if tree is not None and tree[0] == "list" else None
