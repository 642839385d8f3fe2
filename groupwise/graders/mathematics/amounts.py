"""The value of one number in a text, with all that belongs to it.

A number that is denied, compared with or a piece of a formula is none.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from groupwise.graders.mathematics.numerals import (
    GLUED,
    PERCENT,
    TAKES_BACK,
    TENS,
    UNIT_LETTERS,
    worth,
)
from groupwise.graders.mathematics.spelling import repeating_decimals
from groupwise.graders.mathematics.units import Unit, are_words, raise_units, read_unit

MAX_NUMBER = 400  # characters: longer numbers are noise, and slow to compare
CONTEXT = 32  # characters in front of a number that may take it back
UNSPACED = "\u0e00-\u0e7f\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff"  # scripts without spaces


# Repetitions that could overlap or start anew at every character are bounded: no quadratic time.
NUMBER = re.compile(
    r"(?=[-−–+$€£.\d])"  # most characters begin no number: seen at once
    r"(?:(?<![-−–\w)\]}])(?P<sign>[-−–+]))?(?:(?P<money>[$€£])\s?(?P<late_sign>[-−–])?)?"  # not 5-3
    rf"(?<![^\W{UNSPACED}])(?<!\d\.)"  # not inside a word or another number
    r"(?:(?P<whole>\d+)\s(?=\d+\s?/\s?\d))?"  # 1 1/2
    r"(?P<top>(?:\d{1,3}(?:(?:,\d{3}){1,20}|(?:['’]\d{3}){1,20})(?!\d)|\d+)(?:\.\d+)?|(?<!\.)\.\d+)"
    r"(?:\s?/\s?(?P<bottom>\d+)(?![\d,.]\d))?"
    r"(?:[eE](?P<exponent>[-+]?\d{1,2})(?!\w))?"
    r"(?:\s?(?P<percent>%))?"
)
TIMES_TEN = re.compile(
    r"(?<=\d)\s?(?:\\times|\\cdot|[×·*xX])\s?10\s?(?:\^|\*\*)\s?"
    r"(?:\{([-−+]?\d{1,2})\}|\(([-−+]?\d{1,2})\)|([-−+]?\d{1,2}))(?!\d|\.\d)"
)
# Behind what is only a piece of a number, of a formula or of a comparison: 1.000.000, 5², 0x1F.
PIECE = re.compile(
    r"[⁰¹²³⁴-⁹⁻⁺₀-₉_½¼¾⅓⅔]|\\_|\^(?!\s*\{?\\circ)|['’,.]?\d|\.\(\d|\.?\\(?:overline|bar|dot)\b"
    r"|e[-+]?\d"
    r"|\s?(?:π|√|∞|(?:pi|sqrt|cbrt)(?![a-z])|\\(?:pi|sqrt|infty|times|cdot|pm|le|ge|leq|geq|ne|neq|lt|gt)\b|±|≤|≥|≠|!=)"
    r"|\s?[<>]=?(?!/?[a-z]|>)"
    r"|!+(?=[^\s!\"')*_.]|\s?[-+=*/<>])|\+(?!\s?\d)|\s?[-+*×·÷]\s?[\d(]"
    r"|\s?[+*×·÷]\s?[a-z]\b|\s?-\s?[a-z](?=\W*$)|\(\d"
    r"|\s?or\s(?:more|less|fewer|higher|lower)\b"
    r"|\s?(?:is|are|was)(?:n['’]t|\s(?:not|wrong|incorrect|impossible))\b",
    re.IGNORECASE,
)
WORD = re.compile(r"(?P<space>\$?[ \t\n-]{0,3})(?P<word>[^\W\d_]+)(?P<digit>\d)?")
NEXT_WORD = re.compile(r"[ \t-]{1,4}(?P<word>[^\W\d_]+)")
DONE = re.compile(r"[\s.,;:!?)*_$}\]]*(?:<|\Z)")  # behind an answer that ends here
# In front of a number that is denied, compared with, under a root, an exponent, behind a comma.
BEFORE = re.compile(
    r"(?P<denied>(?:\bnot|cannot|n['’]t|\bnever|\binstead of|\bexcept)"
    r"(?:\s+(?:be|have|equal(?:\s+to)?))?[\s$(*]{0,4}"
    r"|\b(?:step|question|problem|exercise)\s+"
    r"|(?:≠|!=|\\neq?|(?:[\w)\]}]\s*|[${(]\s*)(?:[<>]=?|[≤≥]|\\(?:geq?|leq?|[gl]t)))[\s$]*"
    r"|(?:[≤≥±∓]|\\(?:geq?|leq?|pm|mp))[\s$]*|(?<!\w)[a-z]\("
    r"|(?:(?<!\w)[a-z]|(?<![a-z])pi|π|\\[a-z]+|[)}])\s*[-+*/×·÷]\s*"
    r"|(?:√|\\sqrt)(?:\[\d\])?[\s({]*|(?:[\d)\]}]|\b[a-z])(?:\^|\*\*)[({]?|\d[,_'’]"
    r"|(?<!\bno )(?<!\bnot )\b(?:more|less|fewer|greater|larger|smaller|higher|lower|rather|other)"
    r"\s+than\s+[$€£]?|\b(?:above|below|under|over|beyond|exceeds)\s+"
    r"|(?<![a-z])(?:log|ln|lg|sqrt|cbrt|sin|cos|tan|exp|base|[pb]?mod|modulo)[\s({]*"
    r"|\b(?:square|cube|root|power|half|twice|double|triple)(?:\s+of)?\s+"
    r"|[-−]\s*\(\s*|[-−–]{2}|\d\.\(|\\(?:overline|bar|dot|[cdt]?frac|binom)\s*\{|\}\s*\{"
    rf"|\b(?:{'|'.join(TENS)}|hundred|thousand|million)[\s-]+)$"
    r"|(?P<minus>\b(?:minus|negative)\s+[$€£]?)$|(?P<dash>(?<![\w)\]}])[-−–]\s+[$€£]?)$",
    re.IGNORECASE,
)
DOUBT = frozenset(  # words that it ends on
    {"not", "cannot", "never", "be", "have", "of", "except", "than", "above", "below", "under",
     "step", "question", "problem", "exercise", "over", "beyond", "exceeds", "log", "ln", "lg",
     "sqrt", "cbrt", "sin", "cos", "tan", "exp", "base", "mod", "modulo", "square", "cube", "root",
     "power", "half", "twice", "double", "triple", "hundred", "thousand", "million", "minus",
     "negative", *TENS}
)  # fmt: skip
TAG_BEFORE = re.compile(r"</?[a-z][^<>]*>\s*$", re.IGNORECASE)
BULLET = re.compile(r"^[ \t]*[-*•–][ \t]", re.MULTILINE)
VERB = re.compile(r"(?:\b(?:is|are|be|to|get|gives?|equals?|at|was)|[=:$({>])\s*$", re.IGNORECASE)
LATEX = (
    (re.compile(r"\\(?:text|textbf|textit|textrm|mbox|mathrm)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"(?<=\d)\s*(?=\\[dt]?frac)"), " "),  # 1\frac{1}{2} is 1 1/2
    (re.compile(r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}"), r"\1/\2"),
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)"), r"\1/\2"),
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"(?<=\d)\\,(?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<=\d)\\[,;: ](?=\s*[a-zA-Z])"), " "),  # 5\,m
    (re.compile(r"\\([%$])"), r"\1"),
)
AND_A_HALF = re.compile(r"(?<=\d)\s+and\s+(?:(?:a|one)\s+(half|third|quarter)\b|(?=\d+\s?/\s?\d))")
A_PART = {"half": " 1/2", "third": " 1/3", "quarter": " 1/4", None: " "}
VULGAR = {"½": " 1/2", "⅓": " 1/3", "⅔": " 2/3", "¼": " 1/4", "¾": " 3/4", "\u00a0": " "}
VULGAR_FRACTION = re.compile("[½⅓⅔¼¾\u00a0]")
SUPERSCRIPT_DIGITS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
SUPERSCRIPTS = str.maketrans(f"{SUPERSCRIPT_DIGITS}⁻", "0123456789-")
TEN_TO = re.compile("(?<=10)[⁻⁰¹²³⁴-⁹]{1,3}")
MONEY_WORDS = {"dollar": "$", "dollars": "$", "usd": "$", "cent": "¢", "cents": "¢"} | {
    "euro": "€", "euros": "€",
}  # fmt: skip


class Number(NamedTuple):
    value: Fraction
    percent: bool
    start: int
    end: int
    money: str = ""  # its currency, where that is said
    unit: Unit | None = None  # of the word behind it

    def equals(self, other: Number) -> bool:
        """Compare exactly. '50%' is 50 for one who writes no sign, and 0.5; '50%' is never '5000%'.

        A currency or unit may be left out. Where both have one, $4 is 400 cents and not 4 cents,
        4 m are 400 cm and not 4 cm.
        """
        if self.percent != other.percent:
            rate, bare = (self, other) if self.percent else (other, self)
            return bare.value in (rate.value, rate.value / 100)
        if self.money and other.money and self.money != other.money:
            dollars, cents = sorted((self, other), key=lambda number: number.money)
            return (dollars.money, cents.money) == ("$", "¢") and dollars.value * 100 == cents.value
        if self.unit and other.unit:
            (one, factor), (two, other_factor) = self.unit, other.unit
            return one == two and self.value * factor == other.value * other_factor
        return self.value == other.value


def goes_on(text: str) -> bool:
    """Tell whether what follows a formula may change its value: numbers, million, squared."""
    word = WORD.match(text)
    said = word["word"].casefold() if word else ""
    scales = said in TAKES_BACK or said in PERCENT or worth(said) is not None
    return scales or bool(re.search(r"\d", text)) or bool(PIECE.match(text))


def read(text: str, match: re.Match[str]) -> Number | None:
    """Read a number with what belongs to it: minus, million, percent, cents. None where it is not
    said, but denied, compared with, or a piece of something else."""
    found = written(match)
    end = match.end()
    if end < len(text):
        if PIECE.match(text, end) or ("." in match["top"] and text.startswith(("..", "…"), end)):
            return None
        if text.startswith("¢", end):
            found = found._replace(money="¢", end=end + 1)
        elif text.startswith("$", end) and found.money == "$":
            found = found._replace(money="")  # $4$ is a formula
        word = WORD.match(text, end)
        spoken = found if word is None else _with_word(text, found, word)
        if spoken is None:
            return None
        found = spoken
    context = text[max(match.start() - CONTEXT, 0) : match.start()]
    words = context.rstrip("$€£ ").rsplit(None, 1)
    if words and words[-1].isalpha() and words[-1].lower() not in DOUBT and "qual" not in context:
        return found  # mostly: seen at once
    before = BEFORE.search(context)
    if before is None:
        return found
    if before["denied"]:
        return found if TAG_BEFORE.search(before.string) else None
    if before["minus"] or _is_minus(text, match.start() - len(before["dash"]), found.end):
        return found._replace(value=-found.value, start=match.start() - len(before[0]))
    return found


def _with_word(text: str, found: Number, word: re.Match[str]) -> Number | None:
    """Apply the word behind a number to it; None where that is no number."""
    said, glued = word["word"].rstrip(SUPERSCRIPT_DIGITS), not word["space"]
    letter = len(said) == 1 and not re.match(f"[{UNSPACED}]", said)
    if word["digit"] and glued:
        return None  # 1l2
    if glued and said in GLUED:
        return found._replace(value=found.value * GLUED[said], end=word.end())
    if letter and said not in UNIT_LETTERS:
        alone = glued or DONE.match(text, word.end())
        return None if alone else found  # 4x, and 4 a day
    if said.casefold() in TAKES_BACK:
        return None
    if said.casefold() in PERCENT:
        return found._replace(percent=True, end=word.end())
    if said.casefold() == "per" and text.startswith(" cent", word.end()):
        return found._replace(percent=True, end=word.end() + 5)
    scale = worth(said)
    if scale is not None:
        end = word.start("word") + scale[1]
        found = found._replace(value=found.value * scale[0], end=end)
        following = NEXT_WORD.match(text, end)
        if following is None:
            return found
        word = following
        said = following["word"]
        if said.casefold() in TAKES_BACK:
            return None
        more = worth(said)
        if more is not None:
            found = found._replace(value=found.value * more[0], end=following.end())
            return found
    money = MONEY_WORDS.get(said.casefold())
    if money is not None:
        return found._replace(money=money, end=word.end())
    unit = read_unit(text, word.start("word"))
    if unit is None:
        product = glued and said.isascii() and len(said) < 4 and not are_words(said)
        return None if product else found  # 3xy
    return found._replace(unit=unit[0], end=found.end if letter and glued else unit[1])


def is_item(text: str) -> bool:
    """Tell whether a text is an item of a list: '- 4 apples'."""
    found = NUMBER.search(text) if text.startswith(("- ", "– ")) else None
    if found is None or text[1 : found.start()].strip():
        return False
    said = read(text, found)
    return said is not None and not _is_minus(text, 0, said.end)


def _is_minus(text: str, at: int, end: int) -> bool:
    """Tell whether a dash with a space behind it is a minus, and no bullet or punctuation.

    At the start of a line it is a bullet where other lines begin so, the line before ends with a
    colon, or words follow; elsewhere it is a minus behind 'is', '=' and the like.
    """
    if text[at] == "−":
        return True
    above, _, line = text[:at].rpartition("\n")
    if line.strip():
        return bool(VERB.search(line[-CONTEXT:]))
    if above.rstrip().endswith(":") or len(BULLET.findall(text)) > 1:
        return False
    return not re.match(r"[^\S\n]*[^\W\d_]{2}", text[end : end + 8])


def written(match: re.Match[str]) -> Number:
    """Read a number by itself."""
    sign, money, late_sign, whole, top, bottom, exponent, percent = match.groups()
    value = Fraction(int(top) if top.isdecimal() else re.sub("[,'’]", "", top))
    if bottom:
        value /= int(bottom)
    if whole:
        value += int(whole)
    if exponent:
        value *= Fraction(10) ** int(exponent)
    negative = (sign or late_sign or "+") != "+"
    return Number(-value if negative else value, percent is not None, *match.span(), money or "")


def plain(text: str) -> str:
    """Write fractions and mixed numbers as 1 1/2, without LaTeX's ways to write digits."""
    if not text.isascii():
        text = VULGAR_FRACTION.sub(lambda found: VULGAR[found[0]], text)
        text = TEN_TO.sub(lambda found: f"^{found[0].translate(SUPERSCRIPTS)}", text)
    if "\\overline" in text or ".(" in text or "..." in text or "…" in text:
        text = repeating_decimals(text)
    if "\\" in text or "{" in text:  # each of them has one
        for pattern, instead in LATEX:
            text = pattern.sub(instead, text)
    if "10^" in text or "10**" in text:
        text = TIMES_TEN.sub(lambda m: f"e{(m[1] or m[2] or m[3]).replace('−', '-')}", text)
    if "^" in text or "**" in text:
        text = raise_units(text)
    if " and " in text:
        text = AND_A_HALF.sub(lambda found: A_PART[found[1]], text)
    return text


def matches(text: str, start: int = 0) -> list[re.Match[str]]:
    """Find the numbers of a text; not one divided by 0, nor one of thousands of digits."""
    found = NUMBER.finditer(text, start)
    return [m for m in found if len(m[0]) <= MAX_NUMBER and int(m["bottom"] or 1)]
