"""Boxes of a text: `\\boxed{...}`."""

from __future__ import annotations

import re
from typing import NamedTuple

BOX = re.compile(r"\\(?:boxed|fbox)\s{0,8}(?=[{\s\w])")
WRAPPED = re.compile(r"\s*\\(?:boxed|fbox)\s*\{")
# TeX would box one digit; a number is meant.
WITHOUT_BRACES = re.compile(r"\s*([-−]?\d(?:[\d.,/]*\d)?|\w)")
DENIED = re.compile(r"(?:\bnot|n['’]t|\brather than|\binstead of)[\s$(*]{0,4}$", re.IGNORECASE)
NAME_BEFORE = re.compile(r"(?<![a-zA-Z\\])([a-zA-Z](?:_\{?\w{1,3}\}?)?)\s*=\s*\$?\s*$")
BEFORE = 20  # characters in front of a box that may deny or name it
DEEP = 3  # boxes around boxes that are taken off
BETWEEN = 80  # characters that may stand between two boxes of one answer
WORDS = 3  # and words
SPACED = re.compile(r"\\(?:text|quad|qquad|mbox|textrm|mathrm)(?![a-z])")
# Between a step and what comes of it, as the end of a sentence and an empty line are.
LEADS = re.compile(
    r"\b(?:then|so|thus|hence|therefore|but|finally|which|answer|gives?|becomes?|means?|simplif\w+)\b"
    r"|\b(?:not|wrong|incorrect)\b|n['’]t\b|\\(?:implies|iff|approx|[Rr]ightarrow|to)(?![a-z])|[→⇒]"
    r"|\A(?:\\(?:cdot|times|div)(?![a-z])|[^a-z,;=≈])*[=≈]|[.:!?]\s|\n\s*\n",
    re.IGNORECASE,
)


class Box(NamedTuple):
    start: int
    end: int
    content: str


def boxed(text: str) -> str | None:
    """Return what the last box holds, or all boxes of one answer."""
    found = last_box(text)
    return None if found is None else found.content


def last_box(text: str) -> Box | None:
    """Find the last box; of boxes that are the parts of one answer, join what all hold.

    Parts are listed (`x = \\boxed{1}` and `y = \\boxed{2}`). Where one box leads to the next ('so',
    'then', '=', the end of a sentence), the last is the answer. `\\boxed{4}, not \\boxed{5}` is 4.
    """
    together = _last_boxes(text)
    if not together:
        return None
    contents = dict.fromkeys(box.content.strip() for box in together)
    return Box(together[0].start, together[-1].end, " , ".join(contents))


def named(text: str) -> dict[str, str]:
    """Return the boxes of the last answer by the names in front of them; nothing where one has no
    name of its own."""
    together = _last_boxes(text)
    found = {
        name[1]: box.content
        for box in together
        if (name := NAME_BEFORE.search(text, max(box.start - BEFORE, 0), box.start))
    }
    return found if len(found) == len(together) else {}


def _last_boxes(text: str) -> list[Box]:
    """Find the last box, and those that are listed with it."""
    found = boxes(text)
    together = found[-1:]
    for earlier in reversed(found[:-1]):
        if not _are_listed(text[earlier.end : together[0].start]):
            break
        together.insert(0, earlier)
    return together


def boxes(text: str) -> list[Box]:
    """Find all boxes that are not denied; an empty one where the text is cut off inside a box."""
    found: list[Box] = []
    for match in BOX.finditer(text):
        if found and match.start() < found[-1].end:
            continue  # a box inside a box
        content = _content(text, match.end())
        if content is None:
            return [Box(match.start(), len(text), "")]
        found.append(Box(match.start(), match.end() + content[1], _unwrapped(content[0])))
    return [box for box in found if not DENIED.search(text, max(box[0] - BEFORE, 0), box[0])]


def _content(text: str, start: int) -> tuple[str, int] | None:
    """Between the braces that open here, and how far they reach; None if they never close."""
    if not text.startswith("{", start):
        one = WITHOUT_BRACES.match(text[start : start + 64])
        return None if one is None else (one[1], one.end())
    depth = 0
    for sign in re.compile(r"(?<!\\)[{}]").finditer(text, start):
        depth += 1 if sign[0] == "{" else -1
        if depth == 0:
            return text[start + 1 : sign.start()], sign.end() - start
    return None


def _are_listed(between: str) -> bool:
    if len(between) > BETWEEN or LEADS.search(between):
        return False
    return len(re.findall(r"[^\W\d_]+", SPACED.sub(" ", between))) <= WORDS


def _unwrapped(content: str) -> str:
    """Take away boxes around a whole box, some levels deep."""
    for _ in range(DEEP):
        found = WRAPPED.match(content)
        inner = _content(content, found.end() - 1) if found else None
        if found is None or inner is None or content[found.end() - 1 + inner[1] :].strip():
            break
        content = inner[0]
    return content
