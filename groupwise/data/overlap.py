"""Rows that are copies: of evaluation items, or of earlier rows.

Lexical, and with one rule from mathematics: the same words with other numbers are another problem.
So the numbers of an item must all stand in the row, in order.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

import numpy as np

from groupwise.data.words import BASE, Hashes, grams, hashed, numbers, whole, words

NGRAM = 13  # words, as in GPT-3 (2005.14165)
SHINGLE = 4  # words: the pieces that edited copies still share
COVERED = 0.5  # of an item's words in common runs of NGRAM: below, it is a phrase they share
NEAR, NEAR_SHORT, SHORT = 0.6, 0.8, 20  # share of an item's shingles; of items below SHORT words
HOPELESS = 0.3  # of the shingles: with less, no half of the words lies in common runs
LEAST = 6  # words of an item that may be looked for inside a row: fewer stand in any text
COMMON = 20  # items that share a shingle: more, and it is a phrase of the set
TRIED = 8  # candidates by the rare shingles in common
ALIKE = 0.7  # of two rows' shingles together: near-duplicates
BANDS, BAND = 24, 3  # minima of hashes: at 0.7 alike, all but 1 pair of 20,000 meets


@dataclass(frozen=True)
class Item:
    """An evaluation item."""

    suite: str
    row: int
    text: str
    words: tuple[str, ...]
    numbers: tuple[str, ...]
    shingles: frozenset[int]


@dataclass(frozen=True)
class Match:
    item: Item
    how: str
    share: float  # of the item that is in the row


class Evaluations:
    """All evaluation items, with an index to look rows up."""

    def __init__(self, ngram: int = NGRAM) -> None:
        self.ngram = ngram
        self.items: list[Item] = []
        self._same: dict[int, int] = {}
        self._having: dict[int, list[int]] = {}  # by shingle, as long as few have it

    def add(self, suite: str, row: int, text: str) -> None:
        own = words(text)
        if not own or whole(own) in self._same:  # sets that repeat their rows
            return
        shingles = frozenset(grams(hashed(own), SHINGLE).tolist())
        number = len(self.items)
        self.items.append(Item(suite, row, text, tuple(own), tuple(numbers(own)), shingles))
        self._same[whole(own)] = number
        for shingle in shingles:
            having = self._having.setdefault(shingle, [])
            if len(having) <= COMMON:
                having.append(number)

    def find(self, row: Sequence[str]) -> tuple[Match | None, bool]:
        """Return the item that a row copies, if any; else whether it copies one except for its
        numbers.
        """
        if (same := self._same.get(whole(row))) is not None:
            return Match(self.items[same], "the same words", 1.0), False
        if len(row) < LEAST:
            return None, False
        hash_T = hashed(row)
        shingles = set(grams(hash_T, SHINGLE).tolist())
        votes: Counter[int] = Counter()
        for shingle in shingles:
            having = self._having.get(shingle, ())
            if len(having) <= COMMON:
                votes.update(having)
        variant, given = False, numbers(row)
        for number, _ in votes.most_common(TRIED):
            item = self.items[number]
            if not _within(item.numbers, given):
                variant |= len(item.shingles & shingles) >= NEAR * len(item.shingles)
            elif (match := self._compare(item, row, hash_T, shingles)) is not None:
                return match, False
        return None, variant

    def _compare(
        self, item: Item, row: Sequence[str], hash_T: Hashes, shingles: set[int]
    ) -> Match | None:
        share = len(item.shingles & shingles) / len(item.shingles)
        if len(item.words) < self.ngram:
            if len(item.words) >= LEAST and _within_run(item.words, row):
                return Match(item, "all its words in a row", 1.0)
            both = len(item.shingles & shingles) / len(item.shingles | shingles)
            return Match(item, "nearly the same", both) if both >= NEAR_SHORT else None
        if share < HOPELESS:
            return None
        covered = covered_share(hashed(item.words), hash_T, self.ngram)
        if covered >= COVERED:
            return Match(item, f"runs of {self.ngram} words", covered)
        least = NEAR if len(item.words) >= SHORT else NEAR_SHORT
        return Match(item, "nearly the same", share) if share >= least else None


def covered_share(item_T: Hashes, row_T: Hashes, size: int) -> float:
    """Return the share of an item's words in runs of `size` words that the row has, too."""
    if len(row_T) < size:
        return 0.0
    hits = np.isin(grams(item_T, size), grams(row_T, size))
    covered = np.zeros(len(item_T), bool)
    for start in np.flatnonzero(hits):
        covered[start : start + size] = True
    return float(covered.mean())


def _within(few: Sequence[str], many: Sequence[str]) -> bool:
    """Return whether all of the first are in the second, in order."""
    rest = iter(many)
    return all(each in rest for each in few)


def _within_run(few: Sequence[str], many: Sequence[str]) -> bool:
    return f" {' '.join(few)} " in f" {' '.join(many)} "


# --- copies among the rows --------------------------------------------------------------------


class Copies:
    """A search for rows that repeat an earlier one.

    In memory are the hashes of a row's shingles, eight bytes a word.
    """

    def __init__(self) -> None:
        self._first: dict[int, int] = {}
        self._row = array("q")
        self._shingles, self._ends = array("Q"), array("q", [0])
        self._meaning = array("Q")  # what near-duplicates must have in common

    def add(self, row: int, own: Sequence[str], answer: str = "") -> int | None:
        """Return the earlier row with the same words, if there is one."""
        earlier = self._first.setdefault(whole(own), row)
        if earlier != row:
            return earlier
        pieces = np.unique(grams(hashed(own), SHINGLE)) if own else np.zeros(1, np.uint64)
        self._row.append(row)
        self._shingles.frombytes(pieces.tobytes())
        self._ends.append(len(self._shingles))
        self._meaning.append(whole([*numbers(own), "", answer]))
        return None

    def near(
        self, removed: Container[int] = (), alike: float = ALIKE
    ) -> dict[int, tuple[int, float]]:
        """Map a row to the earlier row that it nearly repeats, and how nearly; of those that are
        left.

        With the same numbers and the same answer: "find x" and "find y" are two problems.
        """
        if len(self._row) < 2:
            return {}
        shingle_S = np.frombuffer(self._shingles, np.uint64)
        start_N = np.frombuffer(self._ends, np.int64)[:-1]
        meaning_N = np.frombuffer(self._meaning, np.uint64)
        pairs: dict[int, dict[int, float]] = {}  # later -> earlier -> how alike
        stream = np.random.default_rng(0)
        for _ in range(BANDS):
            meet_N = meaning_N.copy()
            with np.errstate(over="ignore"):
                for factor, shift in stream.integers(1, 2**63, (BAND, 2), np.uint64):
                    mixed_S = _mixed(shingle_S * (factor | np.uint64(1)) + shift)
                    meet_N = meet_N * BASE + np.minimum.reduceat(mixed_S, start_N)
            self._compare(meet_N, pairs)
        found: dict[int, tuple[int, float]] = {}
        gone = {at for at, row in enumerate(self._row) if row in removed}
        for later in sorted(pairs.keys() - gone):  # a row that goes takes no other with it
            for first, share in sorted(pairs[later].items()):
                if share >= alike and first not in gone:
                    found[int(self._row[later])] = (int(self._row[first]), share)
                    gone.add(later)
                    break
        return found

    def _compare(self, meet_N: Hashes, pairs: dict[int, dict[int, float]]) -> None:
        """Compare rows with equal keys, each with the first few of them."""
        order = np.argsort(meet_N, kind="stable")
        same = np.flatnonzero(meet_N[order][1:] == meet_N[order][:-1])
        groups: dict[int, list[int]] = {}
        for at in same.tolist():
            group = groups.setdefault(int(meet_N[order[at]]), [int(order[at])])
            group.append(int(order[at + 1]))
        for group in groups.values():
            for later in group:
                known = pairs.setdefault(later, {})
                for first in group[:TRIED]:
                    if first < later and first not in known:
                        known[first] = self._alike(first, later)

    def _alike(self, one: int, other: int) -> float:
        """Return Jaccard's likeness: shingles of both over those of either."""
        every = np.frombuffer(self._shingles, np.uint64)
        first = every[self._ends[one] : self._ends[one + 1]]
        second = every[self._ends[other] : self._ends[other + 1]]
        both = len(np.intersect1d(first, second, assume_unique=True))
        return both / (len(first) + len(second) - both)


def _mixed(value_S: Hashes) -> Hashes:
    """Mix the bits of hashes: only the high bits of a product depend on all bits."""
    found: Hashes = value_S ^ (value_S >> np.uint64(29))
    return found
