"""`math`: is the answer of a completion the gold one? Cheap and exact first, then the engine.

find (extract) -> read (notation) -> same (sameness); what takes calculus or solving goes to an
algebra system in worker processes (symbolic, pool)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from importlib.util import find_spec
from math import gcd
from typing import Any, Literal, NamedTuple

from groupwise.common.extras import install
from groupwise.errors import RewardError
from groupwise.graders import answers
from groupwise.graders.mathematics import amounts, numbers
from groupwise.graders.mathematics.boxes import boxed, boxes, named
from groupwise.graders.mathematics.endings import asks, holds, only_introduced, turned_away
from groupwise.graders.mathematics.engine_notation import is_left_to_do, is_work, plain_notation
from groupwise.graders.mathematics.extract import (
    VALUE,
    Found,
    end_of,
    find,
    predicate,
    without_last_reason,
    without_reason,
)
from groupwise.graders.mathematics.formulas import in_brackets, last_formula
from groupwise.graders.mathematics.notation import MAX_LENGTH, last_side, read, worded_value
from groupwise.graders.mathematics.ordering import asks_for_order, out_of_order
from groupwise.graders.mathematics.rounding import BY_KIND, Rounding
from groupwise.graders.mathematics.sameness import in_ten, same
from groupwise.graders.mathematics.spelling import CURRENCIES
from groupwise.graders.mathematics.statements import system
from groupwise.graders.mathematics.tokens import Tree, signs
from groupwise.graders.mathematics.units import letter_in_full
from groupwise.graders.mathematics.values import Undecided, has_sign, mpc, names_in, value
from groupwise.graders.pool import WORK_MEMORY, Outcome, Pool

ROUNDING = Rounding()
OR = re.compile(r"(?<=[\w)}\]$])\W*\b(?:or|oder|ou|o(?!['’])|或|или)\b", re.IGNORECASE)
# Behind 'or', another number: 'or 4', 'or maybe x = 4'; none in '9 days or less, so 9 - 6 = 3'.
CANDIDATE = re.compile(
    r"(?!\s*(?:more|less|fewer|higher|lower|so)\b)[^\d.,;=]{0,24}(?:[a-z]\s?=\s?)?[-−$\\({]{0,4}\d",
    re.IGNORECASE,
)
MANY = re.compile(r"\b(?:or|and)\b|[,;]|\\pm|±|\\cup")  # a gold answer of several parts
SENTENCE = re.compile(r"\n|(?:[^\W\d_]+[ ,]+){4}")  # four words in a row are no formula
WORD_BEFORE = re.compile(r"\A\W*(?:text\w*\s*\{\s*)?[^\W\d_]{3,}\.?\s+\d")  # June 20 is no number
FORMULA_AND_WORDS = re.compile(r"\$[^$]+\$\s+[^$\d]+")  # $125$ miles
TURN = re.compile(
    r"<\|\w+\|>.*", re.DOTALL
)  # another's turn, behind an end that is not the model's
MISSING = {"nothing": "no answer found", "withdrawn": "the answer is withdrawn"}
WORDED = re.compile(r"(?<![\\a-zA-Z])[^\W\d_]{2,}[\s,]")  # a sentence, and no bare formula
CUT = "the text is cut off"
INTRODUCED = "a number is only introduced, as one of many"
NO_VALUE = re.compile(
    r"(?:unknown|unclear|undetermined|undefined|impossible|none|nothing|can(?:not|['’]t)"
    r"|does(?:n['’]t|\s+not))\b",
    re.IGNORECASE,
)
UNMARKED = "no answer is marked"
SEVERAL = ("tuple", "set", "list", "either")
ROUNDED = re.compile(
    r"(?P<exact>.*?)(?:≈|\\approx(?![a-z]))(?P<rounded>[^≈=\\\d]{0,3}\d[\d,]*(?:\.(?P<places>\d+))?"
    r"(?:\\?%|[^\d≈=]*))\$?"
)
LAST_DIGIT = re.compile(r"\d(?=\D*\Z)")
UNDONE = re.compile(r"\d\s*[-+*×·÷]\s*\d")  # a sentence that ends on 5 + 5 does not say 10
NAME = re.compile(
    r"\s*\$?(?:[^\W\d_]+(?:_\{?\w{1,3}\}?)?(?:\([^()=]{0,20}\))?|\\[a-z]+|(?:[^\W\d_]+\s){1,4}[^\W\d_]+)"
    r"\s*(?:=|:|≈|\\approx(?![a-z]))\s*(?=[^=:])"
)
SHORT = re.compile(r"(?:\\?[$€£])?[\d.,]+[kKMB]")  # $1.5k
# Space without meaning; between two digits it has one.
SPACE = re.compile(
    r"(?<!\d)(?:\s|\\[,;:! ])+|(?:\s|\\[,;:! ])++(?!\d)|\\left(?![a-z])|\\right(?![a-z])"
)


class Verdict(NamedTuple):
    """`score` is None where nothing was decided, and the answer is not to blame for it."""

    score: float | None
    why: str
    status: Literal["ok", "error", "timeout"] = "ok"


class Question(NamedTuple):
    """A question for the engine, and the verdict that holds if it finds nothing to read."""

    gold: str
    answer: str
    otherwise: Verdict


def check_engine() -> None:
    if find_spec("latex2sympy2_extended") is None:
        raise RewardError(
            "The reward math needs latex2sympy2_extended, which is not installed: "
            f"`{install('math')}`. For answers that are plain numbers, number needs nothing."
        )


@lru_cache(maxsize=1)
def engine() -> Pool:
    """Return the pool of processes that work answers out, one pool for each process."""
    return Pool("groupwise.graders.mathematics.symbolic:judge", memory=WORK_MEMORY)


def verdicts(
    pairs: Sequence[tuple[str, Any]],
    *,
    ends: tuple[str, ...] = (),
    cut: Sequence[bool] = (),
    timeout: float = 5.0,
    decimals: int | None = None,
    digits: int | Literal["by kind"] | None = BY_KIND,
    marked: bool = False,
) -> list[Verdict]:
    """Judge (completion, gold answer) pairs, in order; `cut`: which of them hit the token limit.

    `marked`: only an answer behind a mark counts. `timeout`: seconds of the processor that an
    answer may take to work out. One that takes more, or too much memory, is worth nothing, unless
    its gold answer does so by itself.
    """
    rounding = Rounding(digits, decimals)
    found: list[Verdict | Question] = [
        decide(text, str(gold), ends, rounding, cut=own, marked=marked)
        for (text, gold), own in zip(pairs, cut or [False] * len(pairs), strict=True)
    ]
    open_questions = {row: each for row, each in enumerate(found) if isinstance(each, Question)}
    asked = list(dict.fromkeys(open_questions.values()))
    if asked:
        items = [(q.gold, q.answer, rounding) for q in asked]
        told = dict(zip(asked, engine().work_out(items, timeout), strict=True))
        dear = _costly_golds([q.gold for q, o in told.items() if o.status == "costly"], timeout)
        for row, question in open_questions.items():
            found[row] = _told(question, told[question], question.gold in dear)
    return [verdict for verdict in found if isinstance(verdict, Verdict)]


def _costly_golds(golds: Sequence[str], timeout: float) -> set[str]:
    """Find gold answers that can't be compared, even with themselves, within the limits."""
    trials = [(gold, answer, ROUNDING) for gold in dict.fromkeys(golds) for answer in _trials(gold)]
    told = engine().work_out(trials, timeout)
    return {
        gold for (gold, *_), outcome in zip(trials, told, strict=True) if outcome.status != "ok"
    }


def _trials(gold: str) -> list[str | None]:
    """List the trials of a gold answer alone that arithmetic can't judge: 0, and the gold answer
    itself (None)."""
    tree = read(gold)
    plain = ["0"] if isinstance(decide(r"\boxed{0}", gold), Question) else []
    written_otherwise: Tree = ("+", tree, ("number", Fraction(0)))
    by_arithmetic = tree is not None and same(tree, written_otherwise)
    return [*plain] if by_arithmetic else [*plain, None]


def decide(
    text: str,
    gold: str,
    ends: tuple[str, ...] = (),
    rounding: Rounding = ROUNDING,
    *,
    cut: bool = False,
    marked: bool = False,
) -> Verdict | Question:
    """Give the verdict where arithmetic can, else the question for the engine.

    Of a gold answer that is a chain of equalities, and can't be read, the last side counts, too.
    """
    text, wanted = in_brackets(text), gold_answer(gold)
    found = _decide(text, wanted, ends, rounding, cut=cut, marked=marked)
    side = last_side(wanted)
    if side is None or (isinstance(found, Verdict) and found.score == 1.0):
        return found
    return _decide(text, side, ends, rounding, cut=cut, marked=marked)


def _decide(
    text: str, wanted: str, ends: tuple[str, ...], rounding: Rounding, *, cut: bool, marked: bool
) -> Verdict | Question:
    found = find(text, ends, cut=cut, marked=marked)
    if not found.text:
        return Verdict(
            0.0,
            UNMARKED
            if marked and found.how == "nothing"
            else MISSING.get(found.how, "an empty answer"),
        )
    if found.how == "whole":
        return _decide_whole(found.text, wanted, rounding)
    if _squeezed(found.text) == _squeezed(wanted):
        return Verdict(1.0, f"{found.how}: the gold answer as it is written")
    if found.how == "marked" and found.text.endswith("!") and answers.final(text, ends)[-1:] == "!":
        found = Found(found.how, found.text.rstrip("!"))  # no factorial: joy
    names = _named_boxes(wanted, answers.final(text, ends)) if found.how == "boxed" else None
    verdict = compare(wanted, names or found.text, rounding)
    if not verdict and found.how == "boxed" and not names:
        verdict = _by_parts(wanted, answers.final(text, ends), rounding) or verdict
    words = verdict is False and found.how == "marked" and _is_text(found.text)
    if verdict is not None and not words:
        return _said(verdict, found, wanted)
    if _hedges(found.text, wanted):
        return Verdict(0.0, "several answers are given")
    if found.text.lower().startswith("not "):
        return Verdict(0.0, "an answer is denied")
    if found.how != "marked":
        return _ask(wanted, found.text, Verdict(0.0, "can't be read"))
    whole = None if marked else answers.final(text, ends)
    return _decide_marked(found.text, wanted, whole, rounding)


def _decide_marked(
    said: str, wanted: str, text: str | None, rounding: Rounding
) -> Verdict | Question:
    """Judge the sentence behind a mark, where it is not the answer alone; where its words only
    announce an answer, the whole text counts if there is more."""
    if NO_VALUE.match(said) and _is_number(wanted):
        return Verdict(0.0, "no value is said")
    announces = not VALUE.search(said) and _is_number(wanted)
    if text is not None and announces and not text.rstrip(".*!").endswith(said):
        return _decide_whole(text, wanted, rounding)  # 'to find the answer: multiply'
    said = without_reason(said)
    for inside in (said, end_of(said), last_formula(said)):
        verdict = None if inside is None or _is_text(inside) else compare(wanted, inside, rounding)
        if inside is not None and verdict is not None:
            return _said(verdict, Found("marked", inside), wanted)
    tree, number = read(wanted), numbers.one_number(said)
    verdict = None if tree is None or number is None else same(tree, _tree(number), rounding)
    if verdict is not None:
        return _said(verdict, Found("marked", said), wanted)
    return _ask(wanted, last_formula(said) or said, Verdict(0.0, "no answer can be read"))


def _named_boxes(wanted: str, text: str) -> str | None:
    """Return the boxes of an answer with the names in front of them, where names count: the gold
    answer has names, too, or an order that x and y, or a and b, have by themselves."""
    tree = read(wanted)
    if tree is None or (tree[0] != "tuple" and system(tree) is None):
        return None
    found = named(text)
    in_order = "".join(sorted(found)) in ("xy", "xyz", "ab", "abc", "abcd")
    if not found or not (in_order or system(tree)):
        return None
    return " , ".join(f"{name} = {content}" for name, content in found.items())


def _by_parts(wanted: str, text: str, rounding: Rounding) -> bool | None:
    """Compare all boxes of a text, where there are as many as the gold answer has parts."""
    tree = read(wanted)
    found = boxes(text) if tree is not None and tree[0] in SEVERAL else []
    parts = sum(isinstance(part, tuple) for part in tree or ())
    if tree is None or len(found) < 2 or len(found) != parts:
        return None
    said = ", ".join(box.content for box in found)
    return compare(wanted, f"({said})" if tree[0] == "tuple" else said, rounding)


def _decide_whole(text: str, wanted: str, rounding: Rounding) -> Verdict | Question:
    """Judge a text without a mark: a short answer alone, or its last formula or number."""
    if _squeezed(text) == _squeezed(wanted):
        return Verdict(1.0, "the gold answer as it is written")
    if amounts.is_item(text):
        text = text[1:].lstrip()
    short = len(text) <= MAX_LENGTH and not SENTENCE.search(text)
    if short:
        value = _without_name(text, wanted)
        verdict = compare(wanted, value, rounding)
        if verdict and asks(text, _last_digit(text)):
            return Verdict(0.0, "a question is no answer")
        if verdict and only_introduced(text, len(text)):
            return Verdict(0.0, INTRODUCED)
        if verdict and WORDED.search(text) and not holds(text, len(text)):
            return Verdict(0.0, CUT)
        if verdict and turned_away(text[_last_digit(text) :]):
            return Verdict(0.0, "the sentence turns away from it: 'but'")
        if verdict or (verdict is False and not _is_text(value)):
            return _said(bool(verdict), Found("whole", text), wanted)
    whole, text = text, without_last_reason(text)
    formula = last_formula(text)
    before, _, rest = ("", "", "") if formula is None else text.rpartition(formula)
    behind = TURN.sub("", rest).strip(" .$)]\\\n")
    if formula is not None and not amounts.goes_on(behind):
        verdict = compare(wanted, _without_name(formula, wanted), rounding)
        if verdict and not holds(TURN.sub("", whole), len(before) + len(formula)):
            return Verdict(0.0, "the last formula is no answer: the text goes on, or takes it back")
        if verdict or (verdict is False and not behind):
            return _said(bool(verdict), Found("formula", formula), wanted)
    if _hedges(text, wanted):
        return Verdict(0.0, "several answers are given")
    number, unread = _gold_number(wanted), Verdict(0.0, "no answer found")
    if number is not None:
        last = numbers.last_number(whole)
        if last is not None:
            right = _equals(last, number, rounding)
            said = f"the last number, {last.value}, {'is' if right else 'is not'} {wanted}"
            return Verdict(float(right), said)
        unread = Verdict(0.0, f"no number is said to be {wanted}")
    said = predicate(text)
    done = number is None or not UNDONE.search(said)
    if done and compare(wanted, said, rounding) and holds(whole, _last_digit(text)):
        return _said(True, Found("whole", said), wanted)
    if not short and not holds(whole, len(whole)):
        return Verdict(0.0, INTRODUCED if only_introduced(whole, len(whole)) else CUT)
    asked = text if short and formula is None else (None if behind else formula)
    return unread if asked is None else _ask(wanted, asked, unread)


def _last_digit(text: str) -> int:
    """Find where the last number of a text ends; the end of the text if it has none."""
    found = LAST_DIGIT.search(text, max(len(text) - MAX_LENGTH, 0))
    return found.end() if found else len(text)


def _without_name(text: str, wanted: str) -> str:
    """Leave out what a number is called: 'Total: 42', f(3) = 42, x ≈ 42."""
    named = NAME.match(text)
    if named is None or NAME.match(wanted) or not _is_number(wanted):
        return text
    return text[named.end() :]


def _equals(last: amounts.Number, gold: amounts.Number, rounding: Rounding) -> bool:
    alike = (last.percent, last.unit, last.money) == (gold.percent, gold.unit, gold.money)
    return last.equals(gold) or (alike and rounding.takes(gold.value, last.value))


def _ask(wanted: str, answer: str, otherwise: Verdict) -> Verdict | Question:
    """Ask the engine, where it reads all of both and there is something to work out."""
    read_whole = plain_notation(wanted) is not None and plain_notation(answer) is not None
    if not read_whole or not is_work(wanted, answer, _is_number(wanted)):
        return otherwise
    if is_left_to_do(wanted, answer):
        return Verdict(0.0, "a sum, product, integral or limit is left to be worked out")
    return Question(wanted, answer, otherwise)


def compare(gold: str, answer: str, rounding: Rounding = ROUNDING) -> bool | None:
    """Compare two answers without any text around them; None if arithmetic does not decide."""
    one = read(gold)
    if one is not None and not names_in(one):
        answer = letter_in_full(_without_dollars(answer), glued=one[0] == "quantity")
    other = read(last_side(answer, of_a_name=True) or answer)
    if other is not None and other[0] == "equation" and _is_number(gold):
        other = read(worded_value(answer) or answer)
    unread = other is None or other[0] == "text" or SHORT.fullmatch(answer.strip())
    if one is not None and unread and _is_number(gold):
        other = _with_words(answer) or other
    if one is None or other is None:
        return True if signs(gold) == signs(answer) else None
    verdict = same(one, other, rounding)
    return verdict or _rounds_to(gold, answer, rounding) or verdict


def _rounds_to(gold: str, answer: str, rounding: Rounding) -> bool:
    """Tell whether an answer says the gold one behind '≈', and rightly: \\sqrt{3} ≈ 1.73."""
    approximates = "≈" in answer or "\\approx" in answer
    found = ROUNDED.fullmatch(answer.strip()) if approximates else None
    if found is None or not compare(gold, found["rounded"], rounding):
        return False
    places = Rounding(None, len(found["places"] or ""))
    return bool(compare(found["rounded"], found["exact"], places))


def _without_dollars(text: str) -> str:
    """Write $5$ as 5; $5 is money."""
    text = text.strip()
    around = len(text) > 2 and text.startswith("$") and text.endswith("$")
    return text[1:-1].strip() if around else text


def _with_words(text: str) -> Tree | None:
    """Return the tree of a number among words: 'about 4', '4万元'."""
    found = numbers.bare_number(text)
    return None if found is None else _tree(found)


def _tree(found: amounts.Number) -> Tree:
    tree: Tree = ("number", found.value)
    money = CURRENCIES.get(found.money)
    unit = (f"{money[0]}^1", money[1]) if money else found.unit
    if unit is not None:
        tree = ("quantity", tree, *unit)
    return ("percent", tree) if found.percent else tree


def _is_number(gold: str) -> bool:
    """Tell whether the gold answer is one number, of whatever unit."""
    return _worth(gold) is not None


def _gold_number(gold: str) -> amounts.Number | None:
    """Read the gold answer for one who looks for numbers in a text."""
    found = None if WORD_BEFORE.match(gold) else numbers.gold_number(gold)
    if found is None and isinstance(number := _worth(gold), Fraction):
        return amounts.Number(number, False, 0, 0)
    return found


@lru_cache(maxsize=2**16)  # a group's samples share their answer
def _worth(gold: str) -> Any:
    """Return the gold answer's value without its unit, if it is a number."""
    tree = read(gold)
    while tree is not None and tree[0] in ("percent", "quantity", "named"):
        tree = tree[2] if tree[0] == "named" else tree[1]
    if tree is None or names_in(tree) or has_sign(tree):
        return None
    try:
        found = in_ten(tree) if tree[0] == "base" else value(tree, {}, 1)
    except (Undecided, ArithmeticError, ValueError):
        return None
    return None if isinstance(found, str | mpc) else found  # ∞, i


@lru_cache(maxsize=2**16)  # a group's samples share their answer
def gold_answer(gold: str) -> str:
    """Find the answer in a gold column: all of it, or what a solution boxes or marks with ####."""
    box = boxed(gold)
    if box:
        return letter_in_full(box.strip())
    if "####" in gold:
        gold = gold.rpartition("####")[2]
    if FORMULA_AND_WORDS.fullmatch(gold.strip()):
        gold = gold.replace("$", "")
    return letter_in_full(gold.strip())


def _hedges(text: str, wanted: str) -> bool:
    """Tell whether it ends on '3 or 4' where the gold answer is one thing: worth nothing."""
    last = text.rstrip().rpartition("\n")[2][-MAX_LENGTH:]
    found = list(OR.finditer(last))
    if not found or MANY.search(wanted):
        return False
    return not _is_number(wanted) or any(CANDIDATE.match(last, each.end()) for each in found)


def disordered(
    text: str, gold: str, question: str, ends: tuple[str, ...] = (), rounding: Rounding = ROUNDING
) -> bool:
    """Tell whether the parts of the answer stand in another order than the question asks for."""
    if not asks_for_order(question):
        return False
    found = find(text, ends)
    said = found.text if found.how != "whole" else (last_formula(found.text) or found.text)
    return out_of_order(gold_answer(gold), said, rounding)


def repeats(text: str, gold: str, question: str, ends: tuple[str, ...] = ()) -> bool:
    """Tell whether the answer is what the question asks to work out: right, and no answer.

    `2^3 + 1` for "What is 2^3 + 1?"; a number or a fraction of the question may well be the answer.
    """
    found = find(text, ends)
    said = found.text if found.how != "whole" else (last_formula(found.text) or found.text)
    if answers.echoes(found.text, question):
        return True
    if _squeezed(said) == _squeezed(gold_answer(gold)) or _squeezed(said) not in _squeezed(
        question
    ):
        return False
    tree = read(said)
    return len(said) > answers.ECHO if tree is None else not _is_simple(tree)


def _is_simple(tree: Tree) -> bool:
    """Tell whether nothing is left to work out: a number, a fraction in lowest terms, a word."""
    if tree[0] == "/":
        ends = [part[1] for part in tree[1:] if part[0] == "number"]
        whole = len(ends) == 2 and all(x.denominator == 1 for x in ends)
        return whole and gcd(int(ends[0]), int(ends[1])) == 1 and ends[1] > 1
    if tree[0] == "-":
        return len(tree) == 2 and _is_simple(tree[1])
    if tree[0] in ("percent", "quantity"):
        return _is_simple(tree[1])
    if tree[0] == "named":
        return _is_simple(tree[2])
    if tree[0] in ("tuple", "set", "list", "either", "union"):
        return all(_is_simple(part) for part in tree[1:] if isinstance(part, tuple))
    return tree[0] in ("number", "text", "name", "base", "pi", "e", "i", "infinity")


def _is_text(answer: str) -> bool:
    tree: Tree | None = read(answer)
    return tree is not None and tree[0] == "text"


@lru_cache(maxsize=2**14)
def _squeezed(text: str) -> str:
    return SPACE.sub("", text).strip("$")


def _said(verdict: bool, found: Found, wanted: str) -> Verdict:
    shown = f"{found.how}: {_short(found.text)} is {'' if verdict else 'not '}{_short(wanted)}"
    return Verdict(float(verdict), shown)


def _told(question: Question, outcome: Outcome, gold_is_costly: bool) -> Verdict:
    if outcome.status == "costly":
        if gold_is_costly:
            return Verdict(None, f"of the gold answer alone, {outcome.reason}", "timeout")
        return Verdict(0.0, f"{_short(question.answer)} can't be worked out: {outcome.reason}")
    if outcome.status != "ok":
        return Verdict(None, outcome.reason, outcome.status)
    if outcome.value == "nothing found":
        return question.otherwise
    right = outcome.value == "same"
    shown = f"{_short(question.answer)} is {'' if right else 'not '}{_short(question.gold)}"
    return Verdict(float(right), f"worked out: {shown}")


def _short(text: str, width: int = 40) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[:width]}..."
