"""Where a completion says its answer: an `<answer>` tag, a box, a phrase, or its last line.

The ways are data, strongest first. What a completion thinks aloud (`<think>`) is no answer.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from groupwise.graders.answers import final
from groupwise.graders.boxes import boxed

How = Literal["tag", "boxed", "marked", "formula", "whole", "nothing"]

# "The answer is" in the languages that models are trained in.
WORDS = (
    "answer", "réponse", "reponse", "respuesta", "resposta", "risposta", "antwort", "antwoord",
    "ответ", "відповідь", "cevap", "odpowiedź", "svar", "vastaus", "jawaban", "đáp án", "答案",
    "答え", "答", "정답", "답", "الجواب", "الإجابة", "תשובה", "उत्तर", "คำตอบ",
)  # fmt: skip
IS = r"(?:is|are|est|es|é|è|ist|lautet|är|to)\b|[:：=]|是|为|為|は|은|는|هو|है"
PHRASE = re.compile(
    rf"####|(?:\b|(?<=[^\x00-\x7f]))(?:{'|'.join(WORDS)})[ \t*_]{{0,4}}(?:{IS})[\s:：*=]{{0,8}}",
    re.IGNORECASE,
)
OPEN, CLOSE = "<answer>", "</answer>"
DELIMITER = re.compile(r"\$\$|(?<!\\)\$|\\[\[\]()]|\n")
MONEY = re.compile(r"[\d.,]+[^\\]*[^\W\d_]{3}[^\\]*")  # $5 and the other for $: no formula
CLOSING = {"$$": "$$", "$": "$", r"\[": r"\]", r"\(": r"\)"}
VERB = re.compile(
    r"\b(?:is|are|equals?|est|es|ist|sind|son|sont)\b|(?<![<>!])=|(?<!\d)[:：]|[:：](?!\d)|[为是]",
    re.IGNORECASE,
)
SAYS = re.compile(r"\b(?:is|are|equals?|comes? to|gets?|gives?(?: us)?|makes?)\s", re.IGNORECASE)
SENTENCE = re.compile(r"(?<=[^\s\d.])\.(?=\s|$)|(?<=\d)\.(?=\s|$)|[。！]|\n")
FULL_STOP = re.compile(r"(?<!\.)\.$")
BULLET = re.compile(r"\A[-*•–][ \t]+")  # on a line of its own behind 'the answer is:'
MAX_SENTENCE = 400  # characters of a last sentence
MAX_TEXT = 200_000  # characters that are looked at, from the end


class Found(NamedTuple):
    how: How
    text: str


def find(text: str, ends: tuple[str, ...] = ()) -> Found:
    """The answer of a completion, as it is written there."""
    text = final(text, ends)[-MAX_TEXT:]
    if not text:
        return Found("nothing", "")
    tag = tagged(text)
    if tag is not None:
        inner = boxed(tag)
        return Found("tag", tag if inner is None else inner)
    box = boxed(text)
    if box is not None:
        return Found("boxed", box)
    phrase = marked(text)
    if phrase is not None:
        return Found("marked", phrase)
    return Found("whole", text)


def tagged(text: str) -> str | None:
    """What the last pair of answer tags holds."""
    before, closed, _ = text.rpartition(CLOSE)
    _, opened, inside = before.rpartition(OPEN)
    return inside.strip() if closed and opened else None


def marked(text: str) -> str | None:
    """What follows the last 'answer is', to the end of its sentence; of a formula there, that."""
    folded = text.casefold()
    if "####" not in folded and not any(word in folded for word in WORDS):
        return None
    last = None
    for last in PHRASE.finditer(text):  # noqa: B007  the last of them
        pass
    if last is None:
        return None
    rest = text[last.end() :].lstrip(" \t*:").lstrip()
    if "\n" in text[last.start() : len(text) - len(rest)]:
        rest = BULLET.sub("", rest, count=1)
    if DELIMITER.match(rest):
        first = next(iter(formulas(rest)), None)
        if first is not None:
            return first
    end = SENTENCE.search(rest)
    sentence = rest[: end.start()] if end else rest
    return sentence.strip().strip("*_`").strip() or None


def end_of(sentence: str) -> str:
    """What a sentence says of its subject: 'the largest $n$ is 34' says 34."""
    return VERB.split(sentence)[-1].strip().strip("*_`").strip()


def predicate(text: str) -> str:
    """What the last sentence of a text says: 'It comes to 10^3.' says 10^3."""
    sentence = SENTENCE.split(FULL_STOP.sub("", text[-MAX_SENTENCE:].rstrip()))[-1]
    return SAYS.split(sentence)[-1].strip()


def last_formula(text: str) -> str | None:
    """What the last formula of a text holds."""
    found = formulas(text)
    return found[-1] if found else None


def formulas(text: str) -> list[str]:
    """What stands between dollars or LaTeX brackets. One look at each delimiter: linear."""
    found, opened, start = [], "", 0
    for sign in DELIMITER.finditer(text):
        if opened and sign[0] == CLOSING[opened]:
            inside = text[start : sign.start()].strip()
            if opened == "$" and MONEY.fullmatch(inside):
                start = sign.end()
                continue
            found.append(inside)
            opened = ""
        elif opened == "$" and sign[0] == "\n":
            opened = ""
        elif not opened and sign[0] in CLOSING:
            opened, start = sign[0], sign.end()
    return [inside for inside in found if inside]
