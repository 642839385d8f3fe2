"""Built-in checks of an answer: pure, exact, and linear in the length of the text.

They read the part of a completion that `final` leaves: without end tokens and thoughts.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from groupwise.engine.stopping import without_ends
from groupwise.graders.mathematics.boxes import boxed

MAX_EXPRESSION = 200
ECHO = 30  # characters that an answer may have in common with its question
GAP = "..."  # any text, in a format
THINK_ANSWER = f"<think>{GAP}</think><answer>{GAP}</answer>"

# Repetitions that could overlap or start anew at every character are bounded: no quadratic time.
MARKER = re.compile(r"####|\banswer[\s*]{0,8}:|\\boxed\s{0,8}\{", re.IGNORECASE)
MARKER_WORDS = ("####", "answer", "boxed")  # without any of them there is no marker
BULLET = re.compile(r"\s*[-*•–]\s+")  # on a line of its own behind a marker
BETWEEN_TAGS = re.compile("> <")
END_OF_TURN = re.compile(r"(?:<\|\w{1,40}\|>\s{0,8}){1,8}\Z")
TAGS = re.compile(r"</?[^<>/\s]{1,40}>")
SIGNS = str.maketrans("×·÷−", "**/-")
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def final(text: str, ends: Sequence[str] = ()) -> str:
    """Return the final text of a completion: after its thoughts, without end tokens.

    What is written like an end token (`<|im_end|>`) is one, for texts of models that are not known.
    Thoughts that do not end say nothing, but for an answer between tags.
    """
    said = without_ends(text, ends).rpartition("</think>")[2].strip()
    if said.endswith("|>"):
        said = END_OF_TURN.sub("", said).strip()
    if "<think>" not in said:
        return said
    before, _, thoughts = said.partition("<think>")
    _, tag, inside = thoughts.rpartition("<answer>")
    return (before + tag + inside if "</answer>" in inside else before).strip()


def echoes(text: str, question: str) -> bool:
    """Return whether a completion is the question, or a piece of it longer than its answers."""
    said = text.strip()
    return said == question.strip() or (len(said) > ECHO and said in question)


def exact(text: str, answer: str | int | float) -> float:
    """Return 1 if the text is the answer, character by character."""
    return float(text.strip() == str(answer).strip())


def marked_answer(text: str) -> str | None:
    """Return the text after the last marker, on its line or the next; None without a marker."""
    folded = text.casefold()
    if not any(word in folded for word in MARKER_WORDS):
        return None
    last = None
    for last in MARKER.finditer(text):  # noqa: B007  the last of them
        pass
    if last is None:
        return None
    if last[0].endswith("{"):
        return boxed(text) or ""
    rest = text[last.end() :]
    line = next((line for line in rest.splitlines() if line.strip(" *")), "")
    said = line.lstrip(" *")
    return said if rest.startswith(line) else BULLET.sub("", said)


def countdown(text: str, numbers: Sequence[int], target: int) -> float:
    """Return 1 if the text's expression uses each number exactly once and gives the target.

    It stands behind the last marker, else on the last line; what follows '=' must be true as well.
    """
    marked = marked_answer(text)
    lines = text.strip().splitlines()
    written = marked if marked is not None else (lines[-1] if lines else "")
    expression, *claims = written.strip().rstrip(".").split("=")
    found = evaluate(expression)
    if found is None or found[0] != target or sorted(found[1]) != sorted(numbers):
        return 0.0
    results = [evaluate(claim) for claim in claims]
    return float(all(result is not None and result[0] == target for result in results))


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """Return value and numbers of an expression of whole numbers with + - * / and brackets, or
    None.
    """
    expression = expression.translate(SIGNS).strip()
    if len(expression) > MAX_EXPRESSION or not re.fullmatch(r"[\d+\-*/() ]+", expression):
        return None
    used: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            used.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("no such operation")  # powers among them, which could be huge

    try:
        return value(ast.parse(expression, mode="eval").body), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def in_format(text: str, pattern: str) -> float:
    """Return 1 if the whole text is the pattern, in which '...' stands for any text that is not
    blank.

    No part of the pattern may come up again inside such a text, so that a tag opens and closes
    once. Runs of white space count as one space. Linear, unlike a regular expression.
    """
    literals = [literal.strip() for literal in _one_space(pattern).split(GAP)]
    first, *others = literals
    rest = _one_space(text)
    if not rest.startswith(first):
        return 0.0
    rest = rest[len(first) :]
    for literal in others:
        gap, found, rest = rest.partition(literal) if literal else (rest, GAP, "")
        if not found or not gap.strip() or any(other and other in gap for other in literals):
            return 0.0
    return float(not rest)


def format_share(text: str, pattern: str) -> float:
    """Return the share of a pattern's fixed parts that are there once, in order."""
    said, at, good = _one_space(text), 0, 0
    tags = TAGS.findall(_one_space(pattern)) or _one_space(pattern).split(GAP)
    wanted = [tag.strip() for tag in tags if tag.strip()]
    for tag in wanted:
        place = said.find(tag, at)
        if place >= 0 and said.count(tag) == 1:
            good, at = good + 1, place + len(tag)
    return good / len(wanted)


def _one_space(text: str) -> str:
    """Reduce runs of space to one; space between two tags is no text."""
    return BETWEEN_TAGS.sub("><", " ".join(text.split()))
