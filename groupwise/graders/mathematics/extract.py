"""Where a completion says its answer: an `<answer>` tag, a box, a phrase, or its last line.

The ways are data, strongest first. What a completion thinks aloud (`<think>`) is no answer.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from groupwise.graders.answers import final
from groupwise.graders.mathematics.boxes import boxed, last_box
from groupwise.graders.mathematics.endings import taken_back
from groupwise.graders.mathematics.formulas import DELIMITER, formulas

How = Literal["tag", "boxed", "marked", "formula", "whole", "withdrawn", "nothing"]

# "The answer is" in the languages that models are trained in.
WORDS = (
    "answer", "réponse", "reponse", "respuesta", "resposta", "risposta", "antwort", "antwoord",
    "ответ", "відповідь", "cevap", "odpowiedź", "svar", "vastaus", "jawaban", "đáp án", "答案",
    "答え", "答", "정답", "답", "الجواب", "الإجابة", "תשובה", "उत्तर", "คำตอบ",
)  # fmt: skip
ASCII_WORDS = tuple(word for word in WORDS if word.isascii())
IS = r"(?:is|are|est|es|é|è|ist|lautet|är|to)\b|[:：=]|是|为|為|は|은|는|هو|है"
PHRASE = re.compile(
    rf"####|(?:\b|(?<=[^\x00-\x7f]))(?:{'|'.join(WORDS)})[ \t*_]{{0,4}}(?:{IS})[\s:：*=]{{0,8}}",
    re.IGNORECASE,
)
OPEN, CLOSE = "<answer>", "</answer>"
VERB = re.compile(
    r"\b(?:is|are|equals?|est|es|ist|sind|son|sont)\b|(?<![<>!/])=(?!/)|(?<!\d)[:：]|[:：](?!\d)|[为是]",
    re.IGNORECASE,
)
SAYS = re.compile(
    r"\b(?:is|are|equals?|comes? to|gets?|gives?(?: us)?|makes?|est|es|ist|sind|son|sont)\s",
    re.IGNORECASE,
)
SENTENCE = re.compile(r"(?<=[^\s\d.])\.(?=\s|$)|(?<=\d)\.(?=\s|$)|[。！]|\n")
FULL_STOP = re.compile(r"(?<!\.)\.$")
REASON = re.compile(
    r"[\s,;(](?:because|since|as\s+(?:required|desired|claimed|wanted|asked)|weil|denn|parce\s+que"
    r"|porque)\b|因为|,\s*(?:and\s+)?(?:not|rather\s+than|instead\s+of)\s+(?=[-−$€£(]{0,2}\d)",
    re.IGNORECASE,
)
CONCLUDES = re.compile(
    r"=|\b(?:equals?|makes?|gives?|so|thus|therefore|hence|then|no|wait|actually|sorry)\b|[.!?]\s+\S|\n\s*\S",
    re.IGNORECASE,
)
VALUE = re.compile(r"[\d$\\]")
WORD = re.compile(r"(?<!\\)(?<![^\W\d_])[^\W\d_]{2}")  # no command of LaTeX
ASKED = re.compile(r"[^.!?\n]{0,80}\?")  # 'the answer is 4?' gives none
BULLET = re.compile(r"\A[-*•–][ \t]+")  # on a line of its own behind 'the answer is:'
FIRST_VALUE = re.compile(r"\d(?:[\d.,/]*\d)?|\$[^$]{1,200}\$|\\\(.{1,200}?\\\)")
MAX_PHRASES = 20  # that are tried, from the end
MAX_SENTENCE = 400  # characters of a last sentence
MAX_TEXT = 200_000  # characters that are looked at, from the end


class Found(NamedTuple):
    how: How
    text: str


class Marked(NamedTuple):
    """An answer with a mark, and where in the text it ends."""

    how: How
    text: str
    end: int


def find(
    text: str, ends: tuple[str, ...] = (), *, cut: bool = False, marked: bool = False
) -> Found:
    """Find the answer of a completion, as it is written there.

    In one that was cut off at the limit of tokens (`cut`), only what a mark closes counts, or a
    value that stands there without a word. `marked`: only what has a mark counts at all.
    """
    return find_in_text(final(text, ends)[-MAX_TEXT:], cut, marked)


def find_in_text(text: str, cut: bool = False, only_marked: bool = False) -> Found:
    """Find the answer of a text that has neither thoughts nor end tokens."""
    mark = tagged(text) or _in_a_box(text) or marked(text)
    if mark is None:
        # A bare value is said as far as anyone can tell; a sentence may come to another one.
        lost = only_marked or (cut and WORD.search(text) is not None)
        return Found("nothing", "") if lost or not text else Found("whole", text)
    instead = taken_back(text[mark.end :], mark.text.strip())
    if instead is not None:
        return find_in_text(instead, cut, only_marked) if instead else Found("withdrawn", "")
    if cut and mark.how == "marked" and not text[mark.end :].strip(" "):
        return Found("nothing", "")  # perhaps only a piece of it
    return Found(mark.how, mark.text)


def tagged(text: str) -> Marked | None:
    """Find what the last pair of answer tags holds, or the box in it."""
    if CLOSE not in text:
        return None
    before = text.rpartition(CLOSE)[0]
    _, opened, inside = before.rpartition(OPEN)
    if not opened:
        return None
    box = boxed(inside)
    return Marked("tag", inside.strip() if box is None else box, len(before) + len(CLOSE))


def _in_a_box(text: str) -> Marked | None:
    box = last_box(text) if "box" in text else None
    return None if box is None else Marked("boxed", box.content, box.end)


def marked(text: str) -> Marked | None:
    """Find what follows the last 'answer is', to the end of its sentence, or the formula there."""
    folded = text.casefold()
    words = ASCII_WORDS if text.isascii() else WORDS
    if "####" not in folded and not any(word in folded for word in words):
        return None
    for phrase in list(PHRASE.finditer(text))[: -MAX_PHRASES - 1 : -1]:
        found = _behind(text, phrase)
        if found is not None:
            return found
    return None


def _behind(text: str, phrase: re.Match[str]) -> Marked | None:
    """Read what follows a mark: no question, nor words that announce a calculation."""
    rest = text[phrase.end() :].lstrip(" \t*:").lstrip()
    if "\n" in text[phrase.start() : len(text) - len(rest)]:
        rest = BULLET.sub("", rest, count=1)
    start = len(text) - len(rest)
    if phrase[0] != "####" and ASKED.match(rest):
        return None
    formula = _opening_formula(rest)
    if formula is not None:
        return Marked("marked", formula, start + rest.index(formula) + len(formula))
    stop = SENTENCE.search(rest)
    sentence = rest[: stop.start()] if stop else rest
    said = sentence.strip().strip("*_`").strip()
    value = FIRST_VALUE.search(sentence)
    return (
        Marked("marked", said, start + (value.end() if value else len(sentence))) if said else None
    )


def _opening_formula(text: str) -> str | None:
    found = formulas(text) if DELIMITER.match(text) else []
    return found[0] if found else None


def end_of(sentence: str) -> str:
    """Return what a sentence says of its subject: 'the largest $n$ is 34' says 34."""
    return VERB.split(sentence)[-1].strip().strip("*_`").strip()


def without_reason(sentence: str) -> str:
    """Return an answer without what follows its 'because'."""
    before = REASON.split(sentence, maxsplit=1)[0].rstrip(" ,;(")
    return before if VALUE.search(before) else sentence


def without_last_reason(text: str) -> str:
    """Return a text without its last sentence's reason; a calculation there may say more."""
    found = None
    for found in REASON.finditer(text, max(len(text) - MAX_SENTENCE, 0)):  # noqa: B007  the last
        pass
    if found is None or CONCLUDES.search(text, found.end()):
        return text
    start = sentence_start(text, len(text))
    return text[: found.start()] if VALUE.search(text, start, max(found.start(), start)) else text


def sentence_start(text: str, end: int) -> int:
    """Find where the sentence before this place begins; the stop at its end does not count."""
    start = max(end - MAX_SENTENCE, 0)
    for stop in SENTENCE.finditer(text, start, len(text[:end].rstrip(" \t\n.*$)"))):
        start = stop.end()
    return start


def predicate(text: str) -> str:
    """Return what the last sentence of a text says: 'It comes to 10^3.' says 10^3."""
    sentence = SENTENCE.split(FULL_STOP.sub("", text[-MAX_SENTENCE:].rstrip()))[-1]
    return SAYS.split(sentence)[-1].strip()
