"""Numbers in a text: what they are worth with all that belongs to them, and which is the answer.

A number that is denied, compared with, an end of a range or a piece of a formula is none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from groupwise.graders.answers import MARKER, marked_answer
from groupwise.graders.numerals import (
    GLUED,
    NUMBER_IN_WORDS,
    PERCENT,
    TAKES_BACK,
    TENS,
    UNIT_LETTERS,
    in_words,
    worth,
)
from groupwise.graders.spelling import UNIT_OF, repeating_decimals

MAX_NUMBER = 400  # characters: longer numbers are noise, and slow to compare
TAIL = 200  # characters, in which the last two numbers mostly are
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
LETTER = re.compile(r"[^\W\d_eE]")
COMPARED = re.compile(r"\s*[<>≤≥≠]")
SENTENCES = re.compile(r"[.!?]\s+\w")
WIDE = re.compile(r"[-−]?\d{1,3}(?: \d{3})+")  # 1 000 000, and nothing else
TIMES_TEN = re.compile(
    r"(?<=\d)\s?(?:\\times|\\cdot|[×·*xX])\s?10\s?(?:\^|\*\*)\s?"
    r"(?:\{([-−+]?\d{1,2})\}|\(([-−+]?\d{1,2})\)|([-−+]?\d{1,2}))(?!\d|\.\d)"
)
# Behind what is only a piece of a number, of a formula or of a comparison: 1.000.000, 5², 0x1F.
PIECE = re.compile(
    r"[⁰¹²³⁴-⁹₀-₉_½¼¾⅓⅔]|\^(?!\s*\{?\\circ)|['’,.]?\d|\.\(\d|\.?\\(?:overline|bar|dot)\b|e[-+]?\d"
    r"|\s?(?:π|√|∞|\\(?:pi|sqrt|times|cdot|pm|le|ge|leq|geq|ne|neq|lt|gt)\b|±|≤|≥|≠|!=|[<>]=?(?!/?[a-z]|>))"
    r"|!+(?=[^\s!\"')*_.]|\s?[-+=*/<>])|\+(?!\s?\d)|\s?[-+*×·÷]\s?[\d(]|\s?[+*×·÷]\s?[a-z]\b|\s?-\s?[a-z](?=\W*$)|\(\d"
    r"|\s?or\s(?:more|less|fewer|higher|lower)\b|\s?(?:is|are|was)(?:n['’]t|\s(?:not|wrong|incorrect))\b",
    re.IGNORECASE,
)
WORD = re.compile(r"(?P<space>\$?[ \t\n-]{0,3})(?P<word>[^\W\d_]+)(?P<digit>\d)?")
NEXT_WORD = re.compile(r"[ \t-]{1,4}([^\W\d_]+)")
DONE = re.compile(r"[\s.,;:!?)*_$}\]]*(?:<|\Z)")  # behind an answer that ends here
# In front of a number that is denied, compared with, under a root, an exponent, behind a comma.
BEFORE = re.compile(
    r"(?P<denied>(?:\bnot|cannot|n['’]t|\bnever|\binstead of|\bexcept)"
    r"(?:\s+be|\s+equal(?:\s+to)?)?[\s$(*]{0,4}"
    r"|(?:≠|!=|\\neq?|(?:[\w)\]}]\s*|[${(]\s*)(?:[<>]=?|[≤≥]|\\(?:geq?|leq?|[gl]t)))[\s$]*"
    r"|(?:√|\\sqrt)(?:\[\d\])?[\s({]*|(?:[\d)\]}]|\b[a-z])(?:\^|\*\*)[({]?|\d[,_'’]"
    r"|(?<!\bno )(?<!\bnot )\b(?:more|less|fewer|greater|larger|smaller|higher|lower|rather|other)"
    r"\s+than\s+[$€£]?|\b(?:above|below|under|over|beyond|exceeds)\s+"
    r"|\b(?:log|ln|lg|sqrt|sin|cos|tan|exp|base|mod|modulo)[\s({]*"
    r"|\b(?:square|cube|root|power|half|twice|double|triple)(?:\s+of)?\s+|[-−]\s*\(\s*|[-−–]{2}|\d\.\(|\\(?:overline|bar|dot)\s*\{"
    rf"|\b(?:{'|'.join(TENS)}|hundred|thousand|million)[\s-]+)$"
    r"|(?P<minus>\b(?:minus|negative)\s+[$€£]?)$|(?P<dash>(?<![\w)\]}])[-−–]\s+[$€£]?)$",
    re.IGNORECASE,
)
DOUBT = frozenset(  # words that it ends on
    {"not", "cannot", "never", "be", "of", "except", "than", "above", "below", "under", "over",
     "beyond", "exceeds", "log", "ln", "lg", "sin", "cos", "tan", "exp", "base", "mod", "modulo",
     "square", "cube", "root", "power", "half", "twice", "double", "triple", "hundred", "thousand",
     "million", "minus", "negative", *TENS}
)  # fmt: skip
TAG_BEFORE = re.compile(r"</?[a-z][^<>]*>\s*$", re.IGNORECASE)
BULLET = re.compile(r"^[ \t]*[-*•–][ \t]", re.MULTILINE)
VERB = re.compile(r"(?:\b(?:is|are|be|to|get|gives?|equals?|at|was)|[=:$({>])\s*$", re.IGNORECASE)
# Between two numbers of one formula or range.
UNIT = r"(?:%|[ \t]?[^\W\d_]{1,12}\.?(?=[ \t]))?"
JOINED = re.compile(
    rf"[ \t]*|{UNIT}[ \t]*(?:[-–—−+*/×·÷^~<>≤≥]|:|\.{{2,3}}|…|\\(?:times|cdot|div|pm|le|ge|leq|geq)"
    r"|\b(?:to|through|thru|until|till|x|plus|minus|times|over|of|out\sof|by|mod|divided\sby"
    r"|multiplied\sby)\b)[ \t$€£({]*(?<!:[ \t])",
    re.IGNORECASE,
)
LISTED = re.compile(
    r"(?:\s?[^\W\d_]+)?\W*\bor\b\W*(?:\w\s?=\s?)?|\W{0,8}\band\b\W{0,8}", re.IGNORECASE
)
BETWEEN = re.compile(r"(?:\s?[^\W\d_]+)?\s+and\s+", re.IGNORECASE)
BETWEEN_BEFORE = re.compile(r"\bbetween\s+[$€£]?$", re.IGNORECASE)
COMPOUND = re.compile(r"\s?([^\W\d_]+)\.?(?:,?\s+and\s+|,?\s+)", re.IGNORECASE)
COMMA = re.compile(r",\s+")
NOT_THE_OTHER = re.compile(
    r"[^\W\d_]{0,12}[,;]?\s*(?:(?:and|but)\s+)?(?:not|rather than)\s+", re.IGNORECASE
)
SEVERAL = re.compile(r",\s|,(?!\d)|;|\bor\b|\band\b", re.IGNORECASE)  # between two answers
SAID_IN_WORDS = re.compile(
    rf"(?:\b(?:is|are|was|equals?|has|have|gets?|makes?|to|of)|[:=])\s+({NUMBER_IN_WORDS.pattern})"
    r"(?:\s[a-z]{2,15})?\W*",
    re.IGNORECASE,
)
ALL_IN_WORDS = re.compile(
    rf"[\s$*\"']*({NUMBER_IN_WORDS.pattern})(?:\s[a-z]{{2,15}})?[\s$*\"'.!]*", re.IGNORECASE
)
TAG = re.compile(r"</?[a-z]{1,12}>")
# Beside a number: signs of a formula or a lone letter. The answer is then not that number.
FORMULA = re.compile(r"[-+*/^=<>±:\\_(){}\[\]]|(?<![^\W\d])[^\W\d](?!\w)")
LATEX = (
    (re.compile(r"\\(?:text|textbf|textit|textrm|mbox|mathrm)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"(?<=\d)\s*(?=\\[dt]?frac)"), " "),  # 1\frac{1}{2} is 1 1/2
    (re.compile(r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}"), r"\1/\2"),
    (re.compile(r"\\[dt]?frac\s*(\d)\s*(\d)"), r"\1/\2"),
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"(?<=\d)\\,(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\\([%$])"), r"\1"),
)
AND_A_HALF = re.compile(r"(?<=\d)\s+and\s+(?:(?:a|one)\s+(half|third|quarter)\b|(?=\d+\s?/\s?\d))")
A_PART = {"half": " 1/2", "third": " 1/3", "quarter": " 1/4", None: " "}
VULGAR = {"½": " 1/2", "⅓": " 1/3", "⅔": " 2/3", "¼": " 1/4", "¾": " 3/4", "\u00a0": " "}
VULGAR_FRACTION = re.compile("[½⅓⅔¼¾\u00a0]")
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
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

    def equals(self, other: Number) -> bool:
        """Exactly. '50%' is 50 for one who writes no sign, and 0.5; '50%' is never '5000%'.

        A currency may be left out. Where both have one, $4 is 400 cents and not 4 cents.
        """
        if self.percent != other.percent:
            rate, plain = (self, other) if self.percent else (other, self)
            return plain.value in (rate.value, rate.value / 100)
        if self.money and other.money and self.money != other.money:
            dollars, cents = sorted((self, other), key=lambda number: number.money)
            return (dollars.money, cents.money) == ("$", "¢") and dollars.value * 100 == cents.value
        return self.value == other.value


def number(text: str, answer: Number) -> float:
    """1 if the number that the text ends on, or marks as its answer, is the right one."""
    found = answer_number(text)
    return float(found is not None and found.equals(answer))


def answer_number(text: str) -> Number | None:
    """The one number behind the last '####', 'Answer:' or in the last \\boxed{}; else the last.

    Candidates are worth nothing: several different numbers where the answer is marked, or two last
    ones joined by 'or', are no answer.
    """
    text = _plain(text)
    marked = marked_answer(text)
    if marked is not None:
        factorial = "!" in marked and f"{{{marked}}}" in text  # in a box; elsewhere it is joy
        return None if factorial else one_number(marked)
    last = _last_two(text)
    said = _said_in_words(text, last[-1].end() if last else 0)
    if said is not None:
        return said
    if not last:
        return _spoken(TAG.sub("", text))
    if len(last) > 1:
        if _denies(text, *last):
            return read(text, last[0])
        if _joined(text, *last):
            return None
    return read(text, last[-1])


def one_number(text: str) -> Number | None:
    """The number of a text that has one, once or several times; None where it is taken back.

    Of a calculation, what stands behind the last '='.
    """
    if WIDE.fullmatch(text.strip()):
        text = text.replace(" ", "")
    text = _plain(text)
    if COMPARED.match(text):
        return None
    found = _results(text, _matches(text))
    if not found:
        return _spoken(text)
    numbers = [read(text, match) for match in found]
    first = numbers[0]
    if first is None or any(each is None or each[:2] != first[:2] for each in numbers):
        return None
    return None if any(_in_formula(text, *pair) for pair in pairwise(found)) else first


def _results(text: str, found: Sequence[re.Match[str]]) -> list[re.Match[str]]:
    """Those that no '=' follows in their part of a list."""
    if "=" not in text:
        return list(found)
    ends = [match.start() for match in SEVERAL.finditer(text)] + [len(text)]
    kept, part = [], 0
    for match in found:
        while ends[part] < match.end():
            part += 1
        if "=" not in text[match.end() : ends[part]]:
            kept.append(match)
    return kept


def gold_number(answer: Any) -> Number | None:
    """The number that an answer column holds, if it holds one and nothing else but words."""
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        return None
    return _gold_number(str(answer))


@lru_cache(maxsize=2**16)  # a group's samples share their answer
def _gold_number(answer: str) -> Number | None:
    return answer_number(answer) if MARKER.search(answer) else bare_number(answer)


def bare_number(text: str) -> Number | None:
    """The number of a text that has one, with words of the same sentence beside it at most."""
    if SENTENCES.search(text):
        return None
    if WIDE.fullmatch(text.strip()):
        text = text.replace(" ", "")
    text = _plain(text)
    found = _matches(text)
    if not found:
        return _spoken(text)
    if len(found) > 1:
        return None
    number = read(text, found[0])
    if number is None or FORMULA.search(text[: number.start] + " " + text[number.end :]):
        return None
    return number


def goes_on(text: str) -> bool:
    """Whether what stands behind a formula may change its value: numbers, million, squared."""
    word = WORD.match(text)
    said = word["word"].casefold() if word else ""
    scales = said in TAKES_BACK or said in PERCENT or worth(said) is not None
    return scales or bool(re.search(r"\d", text)) or bool(PIECE.match(text))


def numbers_in(text: str) -> list[Number]:
    """All of them, as they are written."""
    return [_written(match) for match in _matches(text)]


# --- what a number is worth


def read(text: str, match: re.Match[str]) -> Number | None:
    """A number with what belongs to it: minus, million, percent, cents. None where it is not said,
    but denied, compared with, or a piece of something else.
    """
    found = _written(match)
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
    """What the word behind a number makes of it; None where that is no number."""
    said, glued = word["word"], not word["space"]
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
        said = following[1]
        if said.casefold() in TAKES_BACK:
            return None
        more = worth(said)
        if more is not None:
            found = found._replace(value=found.value * more[0], end=following.end())
            return found
    money = MONEY_WORDS.get(said.casefold())
    return found if money is None else found._replace(money=money, end=word.end())


def is_item(text: str) -> bool:
    """Whether a text is an item of a list: '- 4 apples'."""
    found = NUMBER.search(text) if text.startswith(("- ", "– ")) else None
    if found is None or text[1 : found.start()].strip():
        return False
    said = read(text, found)
    return said is not None and not _is_minus(text, 0, said.end)


def _is_minus(text: str, at: int, end: int) -> bool:
    """Whether a dash with a space behind it is a minus, and no bullet or punctuation.

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


def _written(match: re.Match[str]) -> Number:
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


# --- which one it is


def _plain(text: str) -> str:
    """Fractions and mixed numbers as 1 1/2, without LaTeX's ways to write digits and words."""
    if not text.isascii():
        text = VULGAR_FRACTION.sub(lambda found: VULGAR[found[0]], text)
        text = TEN_TO.sub(lambda found: f"^{found[0].translate(SUPERSCRIPTS)}", text)
    if "\\overline" in text or ".(" in text or "..." in text or "…" in text:
        text = repeating_decimals(text)
    if "\\" in text or "{" in text:  # each of them has one
        for pattern, plain in LATEX:
            text = pattern.sub(plain, text)
    if "10^" in text or "10**" in text:
        text = TIMES_TEN.sub(lambda m: f"e{(m[1] or m[2] or m[3]).replace('−', '-')}", text)
    if " and " in text:
        text = AND_A_HALF.sub(lambda found: A_PART[found[1]], text)
    return text


def _matches(text: str, start: int = 0) -> list[re.Match[str]]:
    """Where the numbers stand; not one divided by 0, nor one of thousands of digits."""
    found = NUMBER.finditer(text, start)
    return [m for m in found if len(m[0]) <= MAX_NUMBER and int(m["bottom"] or 1)]


def _last_two(text: str) -> list[re.Match[str]]:
    """No number reaches over a letter but e: behind one, a search finds what it would have."""
    letter = LETTER.search(text, max(len(text) - TAIL, 0))
    found = _matches(text, letter.end()) if letter else []
    return (found if len(found) > 1 else _matches(text))[-2:]


def _spoken(text: str) -> Number | None:
    """'Twelve', 'twelve apples': all that a text says."""
    found = ALL_IN_WORDS.fullmatch(text)
    value = None if found is None else in_words(found[1])
    return None if value is None else Number(value, False, 0, len(text))


def _said_in_words(text: str, start: int) -> Number | None:
    """'So he has twelve.': what a text says in words, behind its last number in digits."""
    tail = text[max(start, len(text) - TAIL) :]
    last = None
    for last in SAID_IN_WORDS.finditer(tail):  # noqa: B007  the last of them
        pass
    if last is None or last.end() < len(tail):
        return None
    value = in_words(last[1])
    return None if value is None else Number(value, False, len(text), len(text))


def _joined(text: str, one: re.Match[str], other: re.Match[str]) -> bool:
    """Whether two numbers are candidates, a range, a formula or one quantity in two units."""
    between = text[one.end() : other.start()]
    if len(between) > CONTEXT:
        between = " ".join(between.split())
        if len(between) > CONTEXT:
            return False
    if LISTED.fullmatch(between) or _in_formula(text, one, other):
        return True
    if BETWEEN.fullmatch(between) and BETWEEN_BEFORE.search(
        text[max(one.start() - CONTEXT, 0) : one.start()]
    ):
        return True
    if COMMA.fullmatch(between):
        return bool(DONE.match(text, other.end()))
    unit, next_unit = COMPOUND.fullmatch(between), WORD.match(text, other.end())
    if unit is None:
        return False
    if worth(unit[1]) is not None:  # 4 thousand 5 hundred
        return True
    dimensions = {_dimension(unit[1]), _dimension(next_unit["word"] if next_unit else "")}
    return len(dimensions) == 1 and "" not in dimensions  # 2 hours and 30 minutes


def _in_formula(text: str, one: re.Match[str], other: re.Match[str]) -> bool:
    between = text[one.end() : other.start()]
    return len(between) <= CONTEXT and bool(JOINED.fullmatch(between))


def _denies(text: str, one: re.Match[str], other: re.Match[str]) -> bool:
    """4, not 5."""
    between = text[one.end() : other.start()]
    return len(between) <= CONTEXT and bool(NOT_THE_OTHER.fullmatch(between))


def _dimension(word: str) -> str:
    unit = UNIT_OF.get(word.lower()) or UNIT_OF.get(word.lower().removesuffix("s"))
    return "" if unit is None else unit[0]
