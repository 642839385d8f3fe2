"""Units behind a number (km, square metres, m/s^2, miles per hour), and which letters are words.

Letters behind a number are a product of names (3xy) unless they are known, or are words by their
look.
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

Unit = tuple[str, Fraction]  # what it measures, and how many of the first unit of that it is
# dimension -> unit -> how many of the first one it is
UNITS: dict[str, dict[str, Fraction]] = {
    "length": {
        "mm": Fraction(1), "cm": Fraction(10), "dm": Fraction(100), "m": Fraction(1000),
        "km": Fraction(10**6), "inch": Fraction(254, 10), "ft": Fraction(3048, 10),
        "yd": Fraction(9144, 10), "mi": Fraction(1609344),
    },
    "time": {
        "ms": Fraction(1), "s": Fraction(1000), "min": Fraction(60_000), "h": Fraction(3_600_000),
        "day": Fraction(86_400_000),
    },
    "mass": {"mg": Fraction(1), "g": Fraction(1000), "kg": Fraction(10**6)},
    "money": {"cent": Fraction(1), "dollar": Fraction(100)},
    "€": {"euro": Fraction(1)},
}  # fmt: skip
SPELLINGS = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "dm": "decimeter decimetre",
    "m": "meter metre", "km": "kilometer kilometre", "inch": "inche", "ft": "foot feet",
    "yd": "yard", "mi": "mile", "ms": "millisecond", "s": "sec second", "min": "minute",
    "h": "hr hour", "g": "gram",
    "mg": "milligram", "kg": "kilogram", "dollar": "usd", "cent": "", "day": "",
    "euro": "eur",
}  # fmt: skip
UNIT_OF = {
    spelling: (dimension, factor)
    for dimension, units in UNITS.items()
    for unit, factor in units.items()
    for spelling in (unit, *SPELLINGS[unit].split())
}
# Short words that stand behind numbers and are no product of names: 3lb, 5pm, 5th.
SHORT_WORDS = frozenset(
    {"lb", "lbs", "oz", "in", "mph", "kph", "kmh", "ml", "cl", "dl", "gal", "pt", "pts", "qt", "hz",
     "khz", "mhz", "ghz", "kw", "kwh", "mw", "kj", "cal", "kb", "mb", "gb", "tb", "rad", "deg",
     "rpm", "fps", "am", "pm", "st", "nd", "rd", "th", "yr", "yrs", "wk", "wks"}
)  # fmt: skip
SQUARE = r"(?:square|sq\.?|cubic|cu\.?)"
RAISED = r"(?:\s{0,2}(?:\^|\*\*)\s?(?:[123](?!\d)|\{[123]\})|[¹²³]|\s(?:squared|cubed)\b)"
PART = re.compile(
    rf"(?:(?P<square>{SQUARE})\s{{1,2}})?(?P<word>[a-z]+)\.?(?P<raised>{RAISED})?", re.IGNORECASE
)
OVER = re.compile(r"\s{0,2}(?:/|\bper\b)\s{0,2}", re.IGNORECASE)
POWERS = {"2": 2, "²": 2, "sq": 2, "3": 3, "³": 3, "cu": 3}
# A number and a letter: with a space between them a unit, without one perhaps a name.
IN_FULL = {unit: SPELLINGS[unit].split()[-1] for unit in UNIT_OF if len(unit) == 1}
LETTER_UNIT = re.compile(rf"([-−]?[\d.,]+)(\s*)([{''.join(IN_FULL)}])(?![a-zA-Z])")
# 25 cm^2 in a text, as 25 cm²: the 2 is no number there.
RAISED_UNIT = re.compile(
    r"(?<=\d)(\s{1,4}(?:[a-z]{1,12}\s?/\s?)?|(?=[a-z]{2}))([a-z]{1,12})\s{0,2}"
    r"(?:\^|\*\*)\s?(?:([23])(?!\d)|\{([23])\})",
    re.IGNORECASE,
)


def unit_of(word: str) -> Unit | None:
    """Return what a word behind a number is a unit of: km, Kilometers, m."""
    word = word.lower()
    plural = len(word) > 2 and word.endswith("s")  # gs are no grams
    return UNIT_OF.get(word) or (UNIT_OF.get(word[:-1]) if plural else None)


def read_unit(text: str, start: int = 0) -> tuple[Unit, int] | None:
    """Read the unit that stands there and where it ends: km, square metres, m/s^2, miles per hour.

    Of 'km per trip' it is km.
    """
    powers, factor, end = Counter[str](), Fraction(1), start
    over = None
    while part := PART.match(text, end if over is None else over.end()):
        known = unit_of(part["word"])
        if known is None:
            break
        power = _power(part) * (1 if over is None else -1)
        powers[known[0]] += power
        factor *= known[1] ** power
        end = part.end()
        over = OVER.match(text, end)
        if over is None:
            break
    if end == start:
        return None
    return (" ".join(f"{name}^{power}" for name, power in sorted(powers.items())), factor), end


def _power(part: re.Match[str]) -> int:
    said = part["square"] or part["raised"] or ""
    return next((power for sign, power in POWERS.items() if sign in said.lower()), 1)


def letter_in_full(text: str, glued: bool = False) -> str:
    """Write 5 m as 5 metre, which can't be read as a product; 5m too, where that is asked for."""
    found = LETTER_UNIT.match(text)
    if found is None or not (found[2] or glued):
        return text
    unit = read_unit(text, found.start(3))
    if unit is None or text[unit[1] :].strip(" ."):
        return text
    return f"{found[1]} {IN_FULL[found[3]]}{text[found.end() :]}"


def raise_units(text: str) -> str:
    """Write 25 cm^2 as 25 cm²."""

    def raised(found: re.Match[str]) -> str:
        names = [*found[1].strip(" /").split(), found[2]]
        if any(unit_of(name) is None for name in names):
            return found[0]
        return f"{found[1]}{found[2]}{'²' if '2' in (found[3], found[4]) else '³'}"

    return RAISED_UNIT.sub(raised, text)


def are_words(tail: str) -> bool:
    """Tell whether letters behind a number are words, and no product: apples, kg; not xy."""
    words = re.findall(r"[a-zA-Z]+", tail)
    glued = tail[:1].isalpha()
    return any(_is_word(word, glued and place == 0) for place, word in enumerate(words))


def _is_word(word: str, glued: bool) -> bool:
    known = unit_of(word) is not None or word.lower() in SHORT_WORDS
    if known or glued:
        return known
    return len(word) > 3 or (len(word) == 3 and bool(re.search("[aeiouAEIOU]", word)))
