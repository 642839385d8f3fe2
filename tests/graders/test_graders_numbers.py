"""`number` and `math`: no different number is accepted, however it is written or wrapped."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from groupwise.graders.mathematics.boxes import boxed
from groupwise.graders.mathematics.grader import Question, compare, decide, verdicts
from groupwise.graders.mathematics.numbers import gold_number, number
from groupwise.graders.mathematics.numerals import in_words

FRAMES = (
    "{}", "The answer is {}", r"\boxed{{{}}}", "#### {}", "So the total comes to {}.",
    "<answer>{}</answer>", "We get ${}$", "First 7 and 13.\n\n**Answer:** {}",
)  # fmt: skip


def accepts(grader: str, gold: str, text: str) -> bool:
    """Without the engine: of an answer that is a number, it is not asked for one."""
    if grader == "number":
        wanted = gold_number(gold)
        return wanted is not None and number(text, wanted) == 1.0
    verdict = decide(text, gold)
    assert not isinstance(verdict, Question), (gold, text)
    return verdict.score == 1.0


both = pytest.mark.parametrize("grader", ["number", "math"])

# What is written, and what {n} is worth in it; None where it is no number at all.
Worth = Callable[[int], Fraction] | None
TIMES: dict[str, Worth] = {
    "{n} million": lambda n: Fraction(n * 10**6),
    "{n} thousand": lambda n: Fraction(n * 1000),
    "{n} hundred thousand": lambda n: Fraction(n * 10**5),
    "{n} billion": lambda n: Fraction(n * 10**9),
    "{n} dozen": lambda n: Fraction(n * 12),
    r"{n} \text{{ million}}": lambda n: Fraction(n * 10**6),
    "{n}k": lambda n: Fraction(n * 1000),
    "{n} Millionen": lambda n: Fraction(n * 10**6),
    "{n}万": lambda n: Fraction(n * 10**4),
    "{n} тысяч": lambda n: Fraction(n * 1000),
    "{n} thirds": lambda n: Fraction(n, 3),
    "{n} tenths": lambda n: Fraction(n, 10),
    "{n}½": lambda n: n + Fraction(1, 2),
    "{n} and a half": lambda n: n + Fraction(1, 2),
    "{n} 3/4": lambda n: n + Fraction(3, 4),
    r"{n}\frac{{3}}{{4}}": lambda n: n + Fraction(3, 4),
    "minus {n}": lambda n: Fraction(-n),
    "negative {n}": lambda n: Fraction(-n),
    "- {n}": lambda n: Fraction(-n),
    "−{n}": lambda n: Fraction(-n),
    "{n} x 10^3": lambda n: Fraction(n * 1000),
    r"{n} \times 10^{{-2}}": lambda n: Fraction(n, 100),
    "{n}·10²": lambda n: Fraction(n * 100),
    "{n}e4": lambda n: Fraction(n * 10**4),
    "{n},000": lambda n: Fraction(n * 1000),
    "{n}'000": lambda n: Fraction(n * 1000),
    "{n}.25": lambda n: n + Fraction(1, 4),
    "0.{n}": lambda n: Fraction(f"0.{n}"),
    r"0.\overline{{{n}}}": lambda n: Fraction(n, 10 ** len(str(n)) - 1),
    "0.({n})": lambda n: Fraction(n, 10 ** len(str(n)) - 1),
    "1/{n}": lambda n: Fraction(1, n),
    r"\frac{{1}}{{{n}}}": lambda n: Fraction(1, n),
}
NOTHING: dict[str, Worth] = dict.fromkeys(
    [
        "{n}x", "{n}i", "{n} n", "{n}O", "1l{n}", "{n}l2", "{n}\\text{{5}}", "{n}_3_4",
        "10 to {n}", "{n} to 99", "10-{n}", "{n}–99", "between 10 and {n}", "from {n} to 99",
        "10 dollars to {n} dollars", "10, {n}", "10 or {n}", "{n} or 99", "10 and {n}",
        "{n} or more",
        "less than {n}", "more than {n}", "x > {n}", "{n} < x", "x ≠ {n}", r"x \ne {n}", "x != {n}",
        "not {n}", "isn't {n}", "{n} is wrong", "{n} isn't right", "half of {n}", "twice {n}",
        "the square root of {n}", "log {n}", "sin {n}", "{n} squared", "{n} cubed", "{n} factorial",
        "{n} mod 7", "12 mod {n}", "3 out of {n}", "10% of {n}", "2 hours and {n} minutes",
        "4 feet {n} inches", "4 dollars and {n} cents", "4 thousand {n}", "{n} + x", "{n}...9",
        "{n}⁻¹", r"\pm {n}", "x + {n}", "≥ {n}", "f({n})", r"{n}\_8", r"1 \pmod {n}", r"{n} \infty",
        r"\frac{{1+\sqrt{{5}}}}{{{n}}}", r"\frac{{{n}}}{{x}}",
        "{n} base 3", "4:{n}", "{n}.5.5", "1,{n},3", "twenty {n}", "{n}{n}.{n}...",
    ]
)  # fmt: skip


@both
@pytest.mark.parametrize("written", [*TIMES, *NOTHING])
def test_no_piece_of_what_is_written_is_accepted_but_its_worth_is(
    written: str, grader: str
) -> None:
    """Gold answers are every run of digits in the text, and what all of it comes to."""
    pick, worth = random.Random(written), {**TIMES, **NOTHING}[written]
    for n in (pick.randrange(11, 98), pick.randrange(100, 999)):
        said = written.format(n=n)
        value = None if worth is None else worth(n)
        pieces = {Fraction(run) for run in re.findall(r"\d+(?:\.\d+)?", said)} | {Fraction(n)}
        for frame in FRAMES:
            text = frame.format(said)
            for piece in pieces - {value}:
                assert not accepts(grader, str(piece), text), (piece, text)
            if value is not None:
                assert accepts(grader, str(value), text), (value, text)


@both
@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("4", r"\boxed{3 \boxed{4}}"), ("3", r"\boxed{3 \boxed{4}}"),
        ("5", r"\boxed{4}, not \boxed{5}"),
        ("5", r"\boxed{4} and \boxed{5}"), ("$4", "4 cents"), ("$4", r"\boxed{4¢}"), ("$4", "€4"),
        ("1010", "1010_2"), ("1010", r"\boxed{1010_{2}}"), ("1010", r"\boxed{1010_{(2)}}"),
        ("1010", "1010 (base 2)"), ("1010", "1010₂"), ("2", "1010 in base 2"), ("1010", "0b1010"),
        ("4", "$4$ million"), ("4", r"$4$\text{ dozen}"), ("0", "4'000"), ("5", "5 + 5"),
        ("5", "#### 5 x 5"), ("5", "#### 5 to 5"), ("5", r"\boxed{5!}"), ("5", "$5!$"),
        ("5", "5,5"), ("0.333", "0.333..."), ("3.14", "It is 3.14..."), ("-5", "--5"),
        ("5", "#### > 5"), ("30", "4:30"), ("20", "20+"),
        ("12", "twelve thousand"), ("3", "He has 3 boxes. The total is twelve."),
    ],
)  # fmt: skip
def test_wrong_accepts(gold: str, text: str, grader: str) -> None:
    assert not accepts(grader, gold, text)


@both
@pytest.mark.parametrize(
    ("gold", "text"),
    [
        ("4000000", "4 million"), ("4000000", "$4 million"), ("4 million", "4,000,000"),
        ("$4", "400 cents"), ("$4", "4 dollars"), ("4 cents", "$0.04"), ("4 cents", "4"),
        ("4", r"\boxed{4}, not \boxed{5}"), ("4", r"\boxed{\boxed{4}}"),
        ("4", "The answer is 4!"), ("4", "It is 4!!"), ("20", "the 20th"), ("4", "at least 4"),
        ("4", "no more than 4"), ("4", "about 4"), ("1234", "1234 (apples)"),
        ("1234", r"\boxed{1234 \text{ (units)}}"), ("1234", "1234 (units)"), ("1234", "1'234"),
        ("0.5", "50 percent"), ("0.5", "50 per cent"), ("12", "twelve"), ("12", "Answer: twelve"),
        ("105", "The total is one hundred and five."), ("24", "twenty-four apples"),
        ("4", "She eats 4 a day"), ("4", "It takes 4 h."), ("4", "4个"),
        ("-4", "We get $-4$"), ("7", "7 km/h"), ("-4", "It is - 4"), ("1/3", "0.333..."),
    ],
)  # fmt: skip
def test_wrong_refusals(gold: str, text: str, grader: str) -> None:
    assert accepts(grader, gold, text)


def test_what_only_a_reader_of_sentences_can_tell() -> None:
    assert accepts("number", "4", "4, not 5") and not accepts("number", "5", "4, not 5")
    assert accepts("number", "4", "4 m")  # for `math`, m is a name


@both
def test_bullets_and_minus(grader: str) -> None:
    """A dash and a space open an item of a list, or a negative number: the lines around it say."""
    bullets = ["- 12\n- 1234", "* 12\n- 1234", "The total:\n- 1234", "- 1234 apples",
               "Answer:\n- 1234", "The answer is:\n\n- 1234"]  # fmt: skip
    minus = ["- 1234", "It is - 1234", "The answer is - 1234", "-1234", r"\boxed{- 1234}"]
    for text in bullets:
        assert accepts(grader, "1234", text) and not accepts(grader, "-1234", text), text
    for text in minus:
        assert accepts(grader, "-1234", text) and not accepts(grader, "1234", text), text


def test_one_value_written_twice_is_one_answer() -> None:
    assert (
        verdicts([(r"It is $\boxed{12x - 34}$, or $\boxed{-34 + 12x}$.", "12x-34")])[0].score == 1
    )
    assert verdicts([(r"$\boxed{1\frac{1}{2}},$ or $\boxed{\frac{3}{2}}$", "3/2")])[0].score == 1
    assert verdicts([(r"$\boxed{1\frac{1}{2}},$ or $\boxed{\frac{5}{2}}$", "3/2")])[0].score == 0


def test_a_number_in_a_base_is_what_it_is_worth() -> None:
    assert compare("1010_2", "10") is True and compare("10", "1010_2") is True
    assert compare("1010_2", "1010₂") is True and compare("22_4", "1010_2") is True
    assert compare("1010_2", "1010") is False and compare("1010_2", "1010_3") is False


def test_the_engine_works_out_what_is_asked_of_it_and_picks_no_number() -> None:
    """math-verify takes 4 from `4 \\text{ million}`, and 9 from `4 5`."""
    (floor,) = verdicts([(r"\boxed{\lfloor 4.5 \rfloor}", "4")])
    assert floor.score == 1.0
    for answer in ("4 5", "0x4", r"4\ldots", r"\approx 4 \neq 5", "4 (since x=4 is best, or 5)"):
        verdict = decide(rf"\boxed{{{answer}}}", "9" if answer == "4 5" else "0")
        assert not isinstance(verdict, Question) and verdict.score == 0.0


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("zero", 0), ("nineteen", 19), ("ninety-nine", 99), ("one hundred", 100),
        ("a million", 10**6),
        ("two thousand three hundred and four", 2304), ("minus seven", -7),
        ("five hundred thousand", 500_000), ("one million two thousand", 1_002_000),
        ("two three", None), ("twenty twelve", None), ("thousand million", None), ("tower", None),
        ("ten of them", None), ("", None),
    ],
)  # fmt: skip
def test_numbers_in_words(words: str, value: int | None) -> None:
    assert in_words(words) == value


def test_boxes() -> None:
    assert boxed(r"\boxed{4}, not \boxed{5}") == "4"
    assert boxed(r"It isn't \boxed{5}") is None
    assert boxed(r"\boxed{\boxed{\boxed{4}}}") == "4"
    assert boxed(r"\boxed{3 \boxed{4}}") == r"3 \boxed{4}"
    deep: Any = boxed(r"\boxed{" * 20_000 + "4" + "}" * 20_000)  # in no time
    assert deep.startswith(r"\boxed")


@pytest.mark.parametrize("frame", FRAMES)
def test_number_compares_units_that_both_have(frame: str) -> None:
    wanted = gold_number("5 km")
    assert wanted is not None
    for said, right in (("5 km", 1.0), ("5", 1.0), ("5000 m", 1.0), ("5 cm", 0.0), ("5 min", 0.0)):
        assert number(frame.format(said), wanted) == right, said


@both
@pytest.mark.parametrize(
    ("gold", "text", "right"),
    [
        ("220", "Réponse: Janeth aura encore 220 $ à payer d'ici 12 mois.", True),
        ("12", "Réponse: Janeth aura encore 220 $ à payer d'ici 12 mois.", False),
        ("350", "The answer is 350 pills left after 2 weeks.", True),
        ("2", "The answer is 350 pills left after 2 weeks.", False),
        ("2", "The answer is in 2 days.", True),
        ("7", "The answer is 7 apples and 3 pears in 2 days.", False),
        ("7", "The answer is 7 for 3 dogs.", False),
        ("3", "The answer is 3 or 4 in 2 days.", False),
    ],
)
def test_a_time_beside_a_marked_number_says_when(
    gold: str, text: str, right: bool, grader: str
) -> None:
    assert accepts(grader, gold, text) is right
