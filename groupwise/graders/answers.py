"""Built-in checks of an answer: pure, exact, and linear in the length of the text.

They read the part of a completion that `final` leaves: without end tokens and thoughts.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

MAX_NUMBER = 400  # characters: longer numbers are noise, and slow to compare
MAX_EXPRESSION = 200
ECHO = 30  # characters that an answer may have in common with its question
GAP = "..."  # any text, in a format
THINK_ANSWER = f"<think>{GAP}</think><answer>{GAP}</answer>"

# Repetitions that could overlap or start anew at every character are bounded: no quadratic time.
MARKER = re.compile(r"####|\banswer[\s*]{0,8}:|\\boxed\s{0,8}\{", re.IGNORECASE)
MARKER_WORDS = ("####", "answer", "boxed")  # without any of them there is no marker
UNSPACED = "\u0e00-\u0e7f\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff"  # scripts without spaces
NUMBER = re.compile(
    r"(?=[-−–+$€£.\d])"  # most characters begin no number: seen at once
    r"(?:(?<![\w)\]}])(?P<sign>[-−–+]))?(?:[$€£]\s?(?P<late_sign>[-−–])?)?"  # 5-3 has no sign
    rf"(?<![^\W{UNSPACED}])(?<!\d\.)"  # not inside a word or another number
    r"(?:(?P<whole>\d+)\s(?=\d+\s?/\s?\d))?"  # 1 1/2
    r"(?P<top>(?:\d{1,3}(?:,\d{3}){1,20}(?!\d)|\d+)(?:\.\d+)?|(?<!\.)\.\d+)"
    r"(?:\s?/\s?(?P<bottom>\d+)(?![\d,.]\d))?"
    r"(?:[eE](?P<exponent>[-+]?\d{1,2})(?!\w))?"
    r"\s?(?P<percent>%)?"
)
LETTER = re.compile(r"[^\W\d_eE]")
TAIL = 200  # characters, in which the last two numbers mostly are
OR = re.compile(r"\W*\bor\b\W*(?:\w\s?=\s?)?", re.IGNORECASE)
BOX_OR = re.compile(r"\}[\s$.,]{0,8}\bor\b[\s$]{0,8}\\boxed", re.IGNORECASE)
# In front of a number that is denied, compared with, under a root, an exponent, behind a comma.
DENIED = re.compile(
    r"(?:\bnot|cannot|n['’]t)(?:\s+be|\s+equal(?:\s+to)?)?[\s$(*]{0,4}(?:\\boxed\{)?$"
    r"|(?:≠|!=|\\neq?)\s*$|[\w)\]}]\s*(?:[<>]=?|[≤≥]|\\(?:geq?|leq?|[gl]t))\s*$"
    r"|(?:√|\\sqrt)(?:\[\d\])?[\s({]*$|(?:[\d)\]}]|\b[a-z])(?:\^|\*\*)[({]?$|\d,$",
    re.IGNORECASE,
)
SUSPECT = frozenset("telqo<>=≤≥≠√^*{,])}")  # what that ends on
TAG_BEFORE = re.compile(r"</?[a-z][^<>]*>\s*$", re.IGNORECASE)
# Behind what is only the beginning of a number: 1.000.000, 5², 1e400, 0x1F.
GOES_ON = re.compile(r"[⁰¹²³⁴-⁹]|\.\d|e[-+]?\d|x[\da-f]|\s?(?:π|√|\\pi\b|\\sqrt)", re.IGNORECASE)
SEVERAL = re.compile(r",\s|,(?!\d)|;|\bor\b|\band\b", re.IGNORECASE)  # between two answers
CONTEXT = 24  # characters in front of a number that may take it back
# Beside a number: signs of a formula or a lone letter. The answer is then not that number.
FORMULA = re.compile(r"[-+*/^=<>±:\\_(){}\[\]]|(?<![^\W\d])[^\W\d](?!\w)")
LATEX = (
    (re.compile(r"(?<=\d)\s*(?=\\[dt]?frac)"), " "),  # 1\frac{1}{2} is 1 1/2
    (re.compile(r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}"), r"\1/\2"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\([%$])"), r"\1"),
)
BETWEEN_TAGS = re.compile("> <")
TAGS = re.compile(r"</?[^<>/\s]{1,40}>")
SIGNS = str.maketrans("×·÷−", "**/-")
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Number(NamedTuple):
    value: Fraction
    percent: bool
    start: int
    end: int

    def equals(self, other: Number) -> bool:
        """Exactly. '50%' is 50 for one who writes no sign, and 0.5; '50%' is never '5000%'."""
        if self.percent == other.percent:
            return self.value == other.value
        rate, plain = (self, other) if self.percent else (other, self)
        return plain.value in (rate.value, rate.value / 100)


def without_ends(text: str, ends: Sequence[str]) -> str:
    """The text without end tokens and white space behind it."""
    text = text.rstrip()
    while end := next((end for end in ends if end and text.endswith(end)), ""):
        text = text.removesuffix(end).rstrip()
    return text


def final(text: str, ends: Sequence[str] = ()) -> str:
    """What a completion says in the end: behind its thoughts, without end tokens.

    Thoughts that do not end say nothing, but for an answer between tags.
    """
    said = without_ends(text, ends).rpartition("</think>")[2].strip()
    if "<think>" not in said:
        return said
    before, _, thoughts = said.partition("<think>")
    _, tag, inside = thoughts.rpartition("<answer>")
    return (before + tag + inside if "</answer>" in inside else before).strip()


def echoes(text: str, question: str) -> bool:
    """Whether a completion is the question, or a piece of it longer than any answer in it."""
    said = text.strip()
    return said == question.strip() or (len(said) > ECHO and said in question)


def exact(text: str, answer: str | int | float) -> float:
    """1 if the text is the answer, character by character."""
    return float(text.strip() == str(answer).strip())


def number(text: str, answer: Number) -> float:
    """1 if the number that the text ends on, or marks as its answer, is the right one."""
    found = answer_number(text)
    return float(found is not None and found.equals(answer))


def answer_number(text: str) -> Number | None:
    """The one number behind the last '####', 'Answer:' or in the last \\boxed{}; else the last.

    Candidates are worth nothing: several different numbers where the answer is marked, or two last
    ones joined by 'or', are no answer.
    """
    text = _without_latex(text)
    marked = marked_answer(text)
    if marked is not None:
        if BOX_OR.search(text):
            return None
        results = [part.rpartition("=")[2] for part in SEVERAL.split(marked)]
        return one_number(" , ".join(results))
    last = _last_two(text)
    if len(last) > 1 and OR.fullmatch(text, last[0].end(), last[1].start()):
        return None
    return _number(last[-1]) if last and _stands(text, last[-1]) else None


def one_number(text: str) -> Number | None:
    """The number of a text that has one, once or several times; None where it is taken back."""
    found = _number_matches(text)
    numbers = [_number(match) for match in found]
    same = numbers and all(number[:2] == numbers[0][:2] for number in numbers)
    return numbers[0] if same and all(_stands(text, match) for match in found) else None


def _stands(text: str, match: re.Match[str]) -> bool:
    """Whether a number is said, and not denied, compared with, or a piece of something else."""
    if GOES_ON.match(text, match.end()):
        return False
    before = text[max(match.start() - CONTEXT, 0) : match.start()]
    if before.rstrip(" \n$(")[-1:] not in SUSPECT:  # mostly: seen at once
        return True
    return not DENIED.search(before) or bool(TAG_BEFORE.search(before))


def gold_number(answer: Any) -> Number | None:
    """The number that an answer column holds, if it holds one and nothing else but words."""
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        return None
    return _gold_number(str(answer))


@lru_cache(maxsize=2**16)  # a group's samples share their answer
def _gold_number(answer: str) -> Number | None:
    if MARKER.search(answer):
        return answer_number(answer)
    answer = _without_latex(answer)
    found = _number_matches(answer)
    if len(found) != 1 or not _stands(answer, found[0]):
        return None
    rest = answer[: found[0].start()] + answer[found[0].end() :]
    return None if FORMULA.search(rest) else _number(found[0])


def _without_latex(text: str) -> str:
    if "\\" not in text and "{" not in text:  # each of them has one
        return text
    for pattern, plain in LATEX:
        text = pattern.sub(plain, text)
    return text


def marked_answer(text: str) -> str | None:
    """What stands behind the last marker, on its line or the next; None without a marker."""
    folded = text.casefold()
    if not any(word in folded for word in MARKER_WORDS):
        return None
    marks = list(MARKER.finditer(text))
    if not marks:
        return None
    last, rest = marks[-1], text[marks[-1].end() :]
    if not last[0].endswith("{"):
        return next((line for line in rest.splitlines() if line.strip(" *")), "")
    depth = 1
    for at, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:at]
    return ""  # cut off inside the box


def numbers_in(text: str) -> list[Number]:
    return [_number(match) for match in _number_matches(text)]


def _number_matches(text: str, start: int = 0) -> list[re.Match[str]]:
    """Where the numbers stand; not one divided by 0, nor one of thousands of digits."""
    found = NUMBER.finditer(text, start)
    return [m for m in found if len(m[0]) <= MAX_NUMBER and int(m["bottom"] or 1)]


def _last_two(text: str) -> list[re.Match[str]]:
    """No number reaches over a letter but e: behind one, a search finds what it would have."""
    letter = LETTER.search(text, max(len(text) - TAIL, 0))
    found = _number_matches(text, letter.end()) if letter else []
    return (found if len(found) > 1 else _number_matches(text))[-2:]


def _number(match: re.Match[str]) -> Number:
    sign, late_sign, whole, top, bottom, exponent, percent = match.groups()
    value = Fraction(int(top) if top.isdecimal() else top.replace(",", ""))
    if bottom:
        value /= int(bottom)
    if whole:
        value += int(whole)
    if exponent:
        value *= Fraction(10) ** int(exponent)
    negative = (sign or late_sign or "+") != "+"
    return Number(-value if negative else value, percent is not None, *match.span())


def countdown(text: str, numbers: Sequence[int], target: int) -> float:
    """1 if the text's expression uses each number exactly once and gives the target.

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
    """Value and numbers of an expression of whole numbers with + - * / and brackets, or None."""
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
    """1 if the whole text is the pattern, in which '...' stands for any text that is not blank.

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
    """The share of a pattern's fixed parts that stand there once, each behind the one before."""
    said, at, good = _one_space(text), 0, 0
    tags = TAGS.findall(_one_space(pattern)) or _one_space(pattern).split(GAP)
    wanted = [tag.strip() for tag in tags if tag.strip()]
    for tag in wanted:
        place = said.find(tag, at)
        if place >= 0 and said.count(tag) == 1:
            good, at = good + 1, place + len(tag)
    return good / len(wanted)


def _one_space(text: str) -> str:
    """Space between two tags is no text."""
    return BETWEEN_TAGS.sub("><", " ".join(text.split()))
