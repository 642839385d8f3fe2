"""What a text puts in boxes: `\\boxed{...}`."""

from __future__ import annotations

import re

BOX = re.compile(r"\\(?:boxed|fbox)\s{0,8}(?=[{\s\w])")
WRAPPED = re.compile(r"\s*\\(?:boxed|fbox)\s*\{")
DENIED = re.compile(r"(?:\bnot|n['’]t|\brather than|\binstead of)[\s$(*]{0,4}$", re.IGNORECASE)
BEFORE = 20  # characters in front of a box that may deny it
DEEP = 3  # boxes around boxes that are taken off
BETWEEN = 3  # words that may stand between two boxes of one answer


def boxed(text: str) -> str | None:
    """What the last box holds; of boxes with at most a few words between them, what all hold.

    `\\boxed{4}, not \\boxed{5}` holds 4.
    """
    found: list[tuple[int, int, str]] = []
    for match in BOX.finditer(text):
        if found and match.start() < found[-1][1]:
            continue  # a box inside a box
        content = _content(text, match.end())
        if content is None:
            return ""  # cut off inside the box
        found.append((match.start(), match.end() + content[1], _unwrapped(content[0])))
    found = [box for box in found if not DENIED.search(text, max(box[0] - BEFORE, 0), box[0])]
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


def _unwrapped(content: str) -> str:
    """What a box holds that is all that a box holds, some levels deep."""
    for _ in range(DEEP):
        found = WRAPPED.match(content)
        inner = _content(content, found.end() - 1) if found else None
        if found is None or inner is None or content[found.end() - 1 + inner[1] :].strip():
            break
        content = inner[0]
    return content
