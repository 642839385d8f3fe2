"""Which number of a text is its answer: the one that it marks, or the last that it says.

Candidates, ends of a range and pieces of a calculation are none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from groupwise.graders.answers import MARKER
from groupwise.graders.mathematics.amounts import (
    CONTEXT,
    DONE,
    NUMBER,
    WORD,
    Number,
    matches,
    plain,
    read,
)
from groupwise.graders.mathematics.endings import holds
from groupwise.graders.mathematics.extract import (
    VALUE,
    find_in_text,
    sentence_start,
    without_last_reason,
    without_reason,
)
from groupwise.graders.mathematics.numerals import NUMBER_IN_WORDS, in_words, worth
from groupwise.graders.mathematics.units import unit_of

TAIL = 200  # characters, in which the last two numbers mostly are
LETTER = re.compile(r"[^\W\d_eE]")
COMPARED = re.compile(r"\s*[<>≤≥≠]")
SENTENCES = re.compile(r"[.!?]\s+\w")
WIDE = re.compile(r"[-−]?\d{1,3}(?: \d{3})+")  # 1 000 000, and nothing else
# Between two numbers of one formula or range.
UNIT = r"(?:%|[ \t]?[^\W\d_]{1,12}\.?(?=[ \t]))?"
JOINED = re.compile(
    rf"[ \t]*|{UNIT}[ \t]*(?:[-–—−+*/×·÷^~<>≤≥]|:|\.{{2,3}}|…|\\(?:times|cdot|div|pm|le|ge|leq|geq)"
    r"|\b(?:to|through|thru|until|till|x|plus|minus|times|over|of|out\sof|by|mod|divided\sby"
    r"|multiplied\sby)\b)[ \t$€£({]*(?<!:[ \t])",
    re.IGNORECASE,
)
LISTED = re.compile(
    r"(?:\s?[^\W\d_]+)?\W*\bor\b\W*(?:(?:maybe|perhaps|possibly|even)\W+)?(?:\w\s?=\s?)?|\W{0,8}\band\b\W{0,8}",
    re.IGNORECASE,
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
# Between the result of a calculation and a number that says of what: '= 90 miles in 30 days'.
_OTHER = (
    r"(?!(?:and|or|so|is|are|was|were|has|have|had|will|would|which|that|then|means|gives?|makes?"
    r"|leaves?|but|plus|minus|times|out)\b)[^\W\d_][\w'’-]*"
)
_FOR = r"(?:in|for|after|on|at|with|over|within|every|during)"
OF_WHAT = re.compile(
    rf"(?:\s{_OTHER}){{1,8}}\s(?:of|{_FOR}|(?:to|from)\s{_OTHER})(?:\s{_OTHER}){{0,8}}\s"
    rf"|\s{_FOR}(?:\s{_OTHER}){{1,8}}\s",
    re.IGNORECASE,
)
# A number in such a phrase says when, or for how long: 'in 12 months', "d'ici 12 mois".
_TIMES = (
    r"(?:second|minute|hour|day|week|month|year)s?|heures?|jours?|semaines?|mois|ans?|années?"
    r"|horas?|días?|semanas?|mes(?:es)?|años?|Stunden?|Tagen?|Wochen?|Monate?n?|Jahre?n?"
)
WHEN_BEFORE = re.compile(
    r"(?:\b(?:in|within|after|over|for|during|every|by|dans|en|pendant|après|pour|durante|dentro\sde"
    r"|después\sde|nach|binnen|während)|d['’]ici) (?:the (?:next|last|first) )?$",
    re.IGNORECASE,
)
WHEN_BEHIND = re.compile(rf" (?:{_TIMES})\b", re.IGNORECASE)
DIRECTLY = re.compile(r"=[\s$*]*")
TAG = re.compile(r"</?[a-z]{1,12}>")
# Beside a number: signs of a formula or a lone letter. The answer is then not that number.
FORMULA = re.compile(r"[-+*/^=<>±:\\_(){}\[\]]|(?<![^\W\d])[^\W\d](?!\w)")


def number(text: str, answer: Number, *, cut: bool = False) -> float:
    """Return 1 if the number that the text ends on, or marks as its answer, is the right one."""
    found = answer_number(text, cut=cut)
    return float(found is not None and found.equals(answer))


def answer_number(text: str, *, cut: bool = False) -> Number | None:
    """Find the one number that a text marks as its answer; without a mark, the last.

    Candidates are worth nothing: several different numbers where the answer is marked, or two last
    ones joined by 'or', are no answer. A text in words that was cut off (`cut`) has to
    mark it.
    """
    found = find_in_text(text, cut)
    if found.how == "whole":
        return last_number(found.text)
    if found.how == "boxed" and "!" in plain(found.text):  # a factorial; elsewhere it is joy
        return None
    said = one_number(without_reason(found.text))
    if said is None and found.how == "marked" and not VALUE.search(found.text):
        return last_number(text)  # 'to find the answer: multiply'
    return said


def last_number(text: str) -> Number | None:
    """Find the number that a text without a mark comes to."""
    whole, kept = text, without_last_reason(text)
    text = plain(kept)
    last = _last_two(text)
    said = _said_in_words(text, last[-1].end() if last else 0)
    if said is not None:
        return said
    if not last:
        return _spoken(TAG.sub("", text))
    if not holds(whole, max(len(kept) - len(text) + last[-1].end(), 0)):
        return None
    result = _result(text, last[-1])
    if result is not None:
        return read(text, result)
    if len(last) > 1:
        if _denies(text, *last):
            return read(text, last[0])
        if _joined(text, *last):
            return None
    return read(text, last[-1])


def one_number(text: str) -> Number | None:
    """Find the number of a text that has one, once or several times; None where it is taken back.

    Of a calculation, what stands behind the last '='.
    """
    if WIDE.fullmatch(text.strip()):
        text = text.replace(" ", "")
    text = plain(text)
    if COMPARED.match(text):
        return None
    found = _results(text, matches(text))
    if not found:
        return _spoken(text)
    found = [match for match in found if not _says_when(text, match)] or found
    if any(_in_formula(text, *pair) for pair in pairwise(found)):
        return None
    first = read(text, found[0])
    for match in found[1:]:
        other = read(text, match) if first is not None else None
        if first is None or other is None or other[:2] != first[:2]:
            return None
    return first


def _results(text: str, found: Sequence[re.Match[str]]) -> list[re.Match[str]]:
    """Keep those that no '=' follows in their part of a list."""
    if "=" not in text:
        return list(found)
    ends = [match.start() for match in SEVERAL.finditer(text)] + [len(text)]
    kept, part, start = [], 0, 0
    equals = text.rfind("=", 0, ends[0])
    for match in found:
        while ends[part] < match.end():
            start, part = ends[part], part + 1
            equals = text.rfind("=", start, ends[part])
        if match.start() > equals:
            kept.append(match)
    return kept


def _says_when(text: str, number: re.Match[str]) -> bool:
    """Tell whether a number is that of a time: 'he has 5 left after 2 weeks'."""
    before = text[max(number.start() - CONTEXT, 0) : number.start()]
    return bool(WHEN_BEHIND.match(text, number.end()) and WHEN_BEFORE.search(before))


def gold_number(answer: Any) -> Number | None:
    """Read the number of an answer column, if it holds one and nothing else but words."""
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        return None
    return _gold_number(str(answer))


@lru_cache(maxsize=2**16)  # a group's samples share their answer
def _gold_number(answer: str) -> Number | None:
    return answer_number(answer) if MARKER.search(answer) else bare_number(answer)


def bare_number(text: str) -> Number | None:
    """Read the number of a text that has one, with words of the same sentence beside it at most."""
    if SENTENCES.search(text):
        return None
    if WIDE.fullmatch(text.strip()):
        text = text.replace(" ", "")
    text = plain(text)
    found = matches(text)
    if not found:
        return _spoken(text)
    if len(found) > 1:
        return None
    number = read(text, found[0])
    if number is None or FORMULA.search(text[: number.start] + " " + text[number.end :]):
        return None
    return number


def _last_two(text: str) -> list[re.Match[str]]:
    """Find the last two: no number reaches over a letter but e, so search behind one."""
    letter = LETTER.search(text, max(len(text) - TAIL, 0))
    found = matches(text, letter.end()) if letter else []
    return (found if len(found) > 1 else matches(text))[-2:]


def _result(text: str, last: re.Match[str]) -> re.Match[str] | None:
    """Find what follows the last '=' of the last sentence, if the last number says of what."""
    equals = text.rfind("=", 0, last.start())
    if equals < 0 or equals < sentence_start(text, last.start()):
        return None
    first = NUMBER.match(text, DIRECTLY.match(text, equals).end())  # type: ignore[union-attr]
    if first is None or not OF_WHAT.fullmatch(text, first.end(), last.start()):
        return None
    return first


def _spoken(text: str) -> Number | None:
    """Read a text that is a number in words and nothing more: 'Twelve', 'twelve apples'."""
    found = ALL_IN_WORDS.fullmatch(text)
    value = None if found is None else in_words(found[1])
    return None if value is None else Number(value, False, 0, len(text))


def _said_in_words(text: str, start: int) -> Number | None:
    """Read what a text says in words behind its last number in digits: 'So he has twelve.'."""
    tail = text[max(start, len(text) - TAIL) :]
    last = None
    for last in SAID_IN_WORDS.finditer(tail):  # noqa: B007  the last of them
        pass
    if last is None or last.end() < len(tail):
        return None
    value = in_words(last[1])
    return None if value is None else Number(value, False, len(text), len(text))


def _joined(text: str, one: re.Match[str], other: re.Match[str]) -> bool:
    """Tell whether two numbers are candidates, a range, a formula or one quantity in two units."""
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
    """Tell whether the second is denied: 4, not 5."""
    between = text[one.end() : other.start()]
    return len(between) <= CONTEXT and bool(NOT_THE_OTHER.fullmatch(between))


def _dimension(word: str) -> str:
    unit = unit_of(word)
    return "" if unit is None else unit[0]
