"""How an answer is written: looks, units, currency and words taken off, before it is read."""

from __future__ import annotations

import re
from fractions import Fraction

FUNCTIONS = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh",
     "ln", "exp"}
)  # fmt: skip
# Signs that say how something looks, not what it is.
LOOKS = re.compile(
    r"\\(?:left|right|big[lr]?|Big[lr]?|bigg[lr]?|Bigg[lr]?)(?![a-zA-Z])\.?"
    r"|\\(?:displaystyle|textstyle|limits|hfill)(?![a-zA-Z])"
    r"|(?<!\\)\\[!,;:> ]|~|\\quad(?![a-zA-Z])|\\qquad(?![a-zA-Z])"
)
TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|texttt|mbox|mathrm|mathbf|mathit|operatorname)"
    r"\s*\{([^{}]*)\}"
)
ESCAPED = re.compile(r"\\\\(?=[a-zA-Z])")  # escaped once too often
SINGLE = re.compile(r"\[[^\[\](){},;]*\]")  # one thing in brackets
DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|°")
PERCENT = re.compile(r"\\?%|\b(?:percent(?:age)?|pct)\b\.?", re.IGNORECASE)
MONEY = re.compile(r"\\\$|[$€£¥](?=\s?-?[\d.])")
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,|\{,\}|,\s?\\!\s?|\\,\s?)\d{3})+(?![\d,])")
DECIMAL_COMMA = re.compile(r"-?\d+,\d+")
WIDE_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:[  ]\d{3})+(?!\d)")
PAIR = re.compile(r"[(\[{][^()\[\]{}]*\d,\d{3}(?!\d)[^()\[\]{}]*[)\]}]")
AND = re.compile(
    r",?\s*\\(?:text|mbox|textrm)\s*\{[\s,]*(?:and|or)\s*\}|(?<=[\d)}\]])\s*,?\s*\b(?:and|or)\b\s*"
)
# No word can be split in two ways here (++): no text takes more than a look for each character.
WORDS_BEHIND = re.compile(
    r"(?<=[\d)}\]a-z])(?:\s*(?:\\(?:text|textbf|textrm|textnormal|mbox|mathrm)\s*\{(?!\s*\d)[^{}]*\}|"
    r"(?<=[\d}\s])[a-zA-Zµμ]{2,}+\.?|/|\\cdot)"
    r"(?:\s*(?<=[a-zA-Z}.\s])\^\s*\{?[-−]?[123]\}?|[²³])?)++\s*$"
)
NO_UNIT = re.compile(r"\b(?:or|and|not|but|neither|nor)\b")
# dimension -> unit -> how many of the first one it is
UNITS: dict[str, dict[str, Fraction]] = {
    "length": {
        "mm": Fraction(1), "cm": Fraction(10), "dm": Fraction(100), "m": Fraction(1000),
        "km": Fraction(10**6), "inch": Fraction(254, 10), "ft": Fraction(3048, 10),
        "yd": Fraction(9144, 10), "mi": Fraction(1609344),
    },
    "time": {"s": Fraction(1), "min": Fraction(60), "h": Fraction(3600), "day": Fraction(86400)},
    "mass": {"mg": Fraction(1), "g": Fraction(1000), "kg": Fraction(10**6)},
    "money": {"cent": Fraction(1), "dollar": Fraction(100)},
}  # fmt: skip
SPELLINGS = {
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "dm": "decimeter decimetre",
    "m": "meter metre", "km": "kilometer kilometre", "inch": "inche", "ft": "foot feet",
    "yd": "yard", "mi": "mile", "s": "sec second", "min": "minute", "h": "hr hour", "g": "gram",
    "mg": "milligram", "kg": "kilogram", "dollar": "usd", "cent": "", "day": "",
}  # fmt: skip
UNIT_OF = {
    spelling: (dimension, factor)
    for dimension, units in UNITS.items()
    for unit, factor in units.items()
    for spelling in (unit, *SPELLINGS[unit].split())
}


class Unsure(Exception):
    """This notation is not among what is read here."""


def clean(text: str) -> tuple[str, bool]:
    """Without looks, units and currency; and whether it is a percentage."""
    text = text.strip().strip("$").strip()
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and text.endswith(closing):
            text = text[2:-2]
    if r"\begin" not in text:
        text = ESCAPED.sub(r"\\", text)
    if SINGLE.fullmatch(text):
        text = text[1:-1]
    text = AND.sub(" , ", text)
    text = THOUSANDS.sub(lambda found: re.sub(r"\D", "", found[0]), _pairs_apart(text))
    text = LOOKS.sub(" ", text).strip().rstrip(".\\").strip()
    if text.startswith("**") and text.endswith("**") and len(text) > 4:
        text = text[2:-2].strip()
    if WIDE_THOUSANDS.fullmatch(text):
        text = re.sub(r"\s", "", text)
    text = MONEY.sub("", DEGREES.sub("", text))
    without = PERCENT.sub("", text)
    percent, text = without != text, without.strip()
    return text, percent


def _pairs_apart(text: str) -> str:
    """(20,100) is a pair: commas between brackets separate. Where they seem to do both, refuse."""

    def apart(found: re.Match[str]) -> str:
        if re.search(r",0\d\d(?!\d)", found[0]) or re.search(r",\s", found[0]):
            raise Unsure
        return found[0].replace(",", " , ")

    return PAIR.sub(apart, text)


def take_unit(text: str) -> tuple[str, tuple[str, Fraction] | None]:
    """The number without the words behind it, and what they are a unit of, where that is known.

    Words alone are kept: they are the answer.
    """
    found = WORDS_BEHIND.search(text)
    if not found or not found.start():
        return text, None
    before, words = text[: found.start()], TEXT.sub(r" \1 ", found[0])
    if (
        not re.search(r"\d|\\pi|\\sqrt", before)
        or NO_UNIT.search(words)
        or any(f"\\{name}" in before for name in ("text", "mbox", "begin"))
    ):
        return text, None
    shown = re.fullmatch(
        r"\s*(square|sq\.?|cubic|cu\.?)?\s*([a-zA-Z]+?)s?\.?\s*\^?\s*\{?([123²³])?\}?\s*",
        words.lower(),
    )
    if not shown or shown[2] not in UNIT_OF:
        return before, None
    power = {"²": 2, "³": 3}.get(shown[3] or "1") or int(shown[3] or 1)
    power = {"s": 2, "c": 3}.get((shown[1] or " ")[0], power)
    dimension, factor = UNIT_OF[shown[2]]
    return before, (f"{dimension}^{power}", factor**power)


def only_words(text: str) -> str:
    """The words of an answer that has nothing but words: folded, without brackets around them."""
    bare = TEXT.sub(r"\1", text)
    if bare == text and not re.fullmatch(r"\(?[A-Z]\)?|[^\W\d_]{3,}(?:[ '-][^\W\d_]+)*", text):
        return ""
    bare = " ".join(bare.split()).strip(" .").strip()
    single = re.fullmatch(r"\(?([a-zA-Z])\)?", bare)
    if single:
        return single[1]
    if not re.fullmatch(r"[^\W\d_]+(?:[ ,.'-]+[^\W\d_]+)*", bare) or bare.lower() in FUNCTIONS:
        return ""
    return bare.casefold()
