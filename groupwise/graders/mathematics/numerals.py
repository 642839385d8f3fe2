"""Words that belong to a number: million, dozen, thirds, percent; and numbers written in words."""

from __future__ import annotations

import re
from fractions import Fraction

_SCALES = {
    10: "tens",
    12: "dozen dozens dutzend douzaine douzaines docena docenas",
    100: "hundred hundreds hundert 百 백",
    10**3: "thousand thousands tausend mille mila тысяча тысячи тысяч 千 천",
    10**4: "万 萬 만",
    10**5: "lakh lakhs",
    10**6: "million millions mio mn millionen millón millones milhão milhões milione milioni "
    "миллион миллиона миллионов",
    10**7: "crore crores",
    10**8: "亿 億 억",
    10**9: "billion billions bn milliard milliards milliarde milliarden miliardo miliardi "
    "миллиард миллиарда миллиардов",
    10**12: "trillion trillions",
}
_PARTS = "halves thirds fourths fifths sixths sevenths eighths ninths tenths"  # quarters are coins
# What one of what the word counts is worth.
WORTH: dict[str, Fraction] = {
    **{word: Fraction(size) for size, words in _SCALES.items() for word in words.split()},
    **{word: Fraction(1, size) for size, word in enumerate(_PARTS.split(), 2)},
    "hundredths": Fraction(1, 100),
    "thousandths": Fraction(1, 1000),
}
GLUED = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}  # 4k; but 4 K is cold
PERCENT = frozenset({"percent", "percentage", "pct", "prozent"})
# Behind a number: it is only a piece of what is meant, or means one of several things.
TAKES_BACK = frozenset(
    {"squared", "cubed", "factorial", "base", "mod", "modulo", "mil", "negative", "minus", "plus",
     "ish"}
)  # fmt: skip
UNIT_LETTERS = frozenset("mgshlLtW")  # 5 m, 12 g; other letters are names: 4x

SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_UNITS = {word: number for number, word in enumerate(SMALL)} | {
    word: 10 * number for number, word in enumerate(TENS, 2)
}
_GROUPS = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
IN_WORDS = rf"(?:{'|'.join([*_UNITS, 'hundred', *_GROUPS])})"
NUMBER_IN_WORDS = re.compile(
    rf"(?:(?:a|minus|negative)\s)?{IN_WORDS}(?:[\s-]+(?:and\s)?{IN_WORDS}){{0,20}}", re.IGNORECASE
)


def in_words(text: str) -> Fraction | None:
    """Read 'one hundred and five' as 105; None for what is no number in words."""
    if not NUMBER_IN_WORDS.fullmatch(text):
        return None
    words = [word for word in re.split(r"[\s-]+", text.lower()) if word not in ("and", "a")]
    negative = words[0] in ("minus", "negative")
    total, part, last = 0, 0, ""
    for word in words[negative:]:
        if word in _GROUPS:
            if last in _GROUPS or (total and total % (1000 * _GROUPS[word])):
                return None  # two thousand million thousand
            total, part = total + (part or 1) * _GROUPS[word], 0
        elif word == "hundred":
            if part > 9 or last in _GROUPS:
                return None
            part = 100 * (part or 1)
        else:
            value = _UNITS[word]
            room = last in TENS and 0 < value < 10
            if not (not last or room or last == "hundred" or last in _GROUPS):
                return None  # two three
            part += value
        last = word
    return Fraction(-(total + part) if negative else total + part)


def worth(word: str) -> tuple[Fraction, int] | None:
    """Return what a word behind a number multiplies it by, and how many of its letters say so."""
    found = WORTH.get(word) or WORTH.get(word.casefold())
    if found is not None:
        return found, len(word)
    found, at = Fraction(1), 0
    while at < len(word) and word[at] > "\u2e80" and word[at] in WORTH:  # 3百万元
        found, at = found * WORTH[word[at]], at + 1
    return (found, at) if at else None
