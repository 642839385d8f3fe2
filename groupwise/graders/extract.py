"""Where a completion says its answer: an `<answer>` tag, a box, a phrase, or its last line.

The ways are data, strongest first. What a completion thinks aloud (`<think>`) is no answer.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from groupwise.graders.answers import final

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
BOX = re.compile(r"\\(?:boxed|fbox)\s{0,8}(?=[{\s\w])")
OPEN, CLOSE = "<answer>", "</answer>"
DELIMITER = re.compile(r"\$\$|(?<!\\)\$|\\[\[\]()]|\n")
MONEY = re.compile(r"[\d.,]+[^\\]*[^\W\d_]{3}[^\\]*")  # $5 and the other for $: no formula
CLOSING = {"$$": "$$", "$": "$", r"\[": r"\]", r"\(": r"\)"}
VERB = re.compile(r"\b(?:is|are|equals?|est|es|ist|sind|son|sont)\b|[=:：为是]", re.IGNORECASE)
SENTENCE = re.compile(r"(?<=[^\s\d.])\.(?=\s|$)|(?<=\d)\.(?=\s|$)|[。！]|\n")
BETWEEN = 3  # words that may stand between two boxes of one answer
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


def boxed(text: str) -> str | None:
    """What the last box holds; of boxes with at most a few words between them, what all hold."""
    found: list[tuple[int, int, str]] = []
    for match in BOX.finditer(text):
        if found and match.start() < found[-1][1]:
            continue  # a box inside a box
        content = _content(text, match.end())
        if content is None:
            return ""  # cut off inside the box
        found.append((match.start(), match.end() + content[1], content[0]))
    if not found:
        return None
    together = [found[-1]]
    for earlier in reversed(found[:-1]):
        if not _near(text[earlier[1] : together[0][0]]):
            break
        together.insert(0, earlier)
    contents = dict.fromkeys(content.strip() for _, _, content in together)
    return " , ".join(contents)


def _content(text: str, start: int) -> tuple[str, int] | None:
    """Between the braces that open here, and how far they reach; None if they never close."""
    if not text.startswith("{", start):
        one = re.match(r"\s*(\w)", text[start : start + 16])
        return None if one is None else (one[1], one.end())
    depth = 0
    for sign in re.compile(r"(?<!\\)[{}]").finditer(text, start):
        depth += 1 if sign[0] == "{" else -1
        if depth == 0:
            return text[start + 1 : sign.start()], sign.end() - start
    return None


def _near(between: str) -> bool:
    if len(between) > 80 or "\n\n" in between:
        return False
    words = re.findall(r"[^\W\d_]+", re.sub(r"\\(?:text|quad|qquad|mbox|textrm)", " ", between))
    return len(words) <= BETWEEN and not re.search(r"[.:!?]\s", between)


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
