"""Texts as words, equal for copies that differ in case, punctuation, white space or typography.

What changes a problem stays: numbers, and the signs between them. Scripts without spaces are cut
into characters, and LaTeX loses what only moves things on the page.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

LAYOUT = re.compile(
    r"\\(?:left|right|middle|displaystyle|textstyle|limits|quad|qquad|bigg?[lrm]?"
    r"|(?:text|math)(?:rm|bf|it|sf|normal)?|operatorname|[,;:!])(?![a-z])"
)
FRACTION = re.compile(r"\\[dtc]?frac(?![a-z])(?:\s*(\d)\s*(\d))?")  # \frac12 is a half
NAMES = {  # of signs
    "le": "≤", "leq": "≤", "leqslant": "≤", "ge": "≥", "geq": "≥", "geqslant": "≥", "ne": "≠",
    "neq": "≠", "times": "×", "div": "÷", "pm": "±", "cup": "∪", "cap": "∩", "infty": "∞",
}  # fmt: skip
NAMED = re.compile(rf"\\({'|'.join(NAMES)})(?![a-z])")
THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!|,|\\,)(?=\d{3}(?!\d))")
HYPHEN = re.compile(r"(?<=[^\W\d_])[-‐‑](?=[^\W\d_])")
RAISED = re.compile(r"[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")  # an exponent; without a sign of its own, 5² is 52
LOWERED = re.compile(r"[₀-₉]+")
PARTS = re.compile(r"[¼-¾⅐-⅞↉]")
UNSEEN = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")
UNSPACED = "\u0e00-\u0e7f\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff"
SIGNS = "-+*/^=<>%×÷±|\u2190-\u22ed\u22f2-\u22ff\u27c0-\u27ef\u2980-\u2aff"  # all of mathematics'
WORD = re.compile(rf"\d+(?:\.\d+)?|[{UNSPACED}]|[^\W\d_{UNSPACED}]+|[{SIGNS}]|(?<=[\d)])!")
ALIKE = str.maketrans("−–—⁄∕∗⋅", "---//* ")
BASE = np.uint64(0x9E3779B97F4A7C15)


def words(text: str) -> list[str]:
    text = LOWERED.sub(r" \g<0>", RAISED.sub(r"^\g<0>", PARTS.sub(r" \g<0>", text)))
    text = UNSEEN.sub("", unicodedata.normalize("NFKC", text)).casefold().translate(ALIKE)
    text = THOUSANDS.sub("", text)
    if "\\" in text:
        text = FRACTION.sub(r"\\frac \1 \2", LAYOUT.sub(" ", text))
        text = NAMED.sub(lambda name: f" {NAMES[name[1]]} ", text)
    return WORD.findall(HYPHEN.sub(" ", text)) or text.split()  # nothing but other characters


def numbers(some: Sequence[str]) -> list[str]:
    """Return the numbers among words, in order."""
    return [word for word in some if word[0].isdecimal()]


def hashed(some: Sequence[str]) -> Hashes:
    """Return a 64-bit number for each word, the same in every process."""
    return np.fromiter((_hash(word) for word in some), np.uint64, len(some))


def grams(hash_T: Hashes, size: int) -> Hashes:
    """Return a hash for each run of `size` words; of a shorter text, one for all of it."""
    size = min(size, len(hash_T))
    count = len(hash_T) - size + 1
    found = np.full(count, np.uint64(size))
    with np.errstate(over="ignore"):  # modulo 2^64
        for at in range(size):
            found = found * BASE + hash_T[at : at + count]
    return found


def whole(some: Sequence[str]) -> int:
    """Return one hash for all words in order."""
    return _hash(" ".join(some))


@lru_cache(maxsize=2**18)
def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
