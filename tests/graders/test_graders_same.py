"""`math`: what is equal, rule by rule and in both directions; and no wrong pair is accepted."""
# ruff: noqa: E501

from __future__ import annotations

from fractions import Fraction
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.errors import RewardError
from groupwise.graders.mathematics.grader import Question, compare, decide, verdicts
from groupwise.graders.mathematics.rounding import Rounding
from groupwise.graders.parts import math
from groupwise.graders.rubric import Grader
from groupwise.records import Task

PHRASES = ("{}", "\\boxed{{{}}}", "${}$", "The answer is ${}$.")


def accepts(gold: str, answer: str, **options: Any) -> bool:
    (verdict,) = verdicts([(rf"\boxed{{{answer}}}", gold)], timeout=30, **options)
    return verdict.score == 1.0


# ---------------------------------------------------------------- decimals for longer numbers

SIX = Rounding(digits=6)
endless = st.builds(
    Fraction, st.integers(1, 10**6), st.sampled_from([3, 7, 11, 13, 17, 19, 21, 27, 37, 99])
).filter(lambda value: value.denominator > 1)


def cut(value: Fraction, places: int, up: bool) -> str:
    figures = int(value * 10**places + Fraction(int(up), 2))
    return f"{figures // 10**places}.{figures % 10**places:0{places}d}"


@settings(max_examples=200, deadline=None)
@given(endless, st.integers(8, 14), st.booleans(), st.sampled_from([1, -1]))
def test_property_enough_right_digits_stand_for_a_fraction(
    value: Fraction, places: int, up: bool, sign: int
) -> None:
    front, said = "-" if sign < 0 else "", cut(value, places, up)
    gold = rf"{front}\frac{{{value.numerator}}}{{{value.denominator}}}"
    zeros = len(said.rstrip("0")) < len(said) - 1  # fewer digits than it seems
    assert compare(gold, front + said, SIX) is True or zeros
    assert compare(front + said, gold) is True or zeros  # of the gold answer, six are enough
    for strict in (Rounding(), Rounding(digits=None)):
        long = strict.digits is not None and len(said.replace(".", "").lstrip("0")) > 12
        assert compare(gold, front + said, strict) is False or long
    wrong = f"{said[:-1]}{(int(said[-1]) + 4) % 9 + 1}"
    printed = [format(float(value), digits) for digits in (".15g", ".16g", ".17g")]
    for other in (wrong, cut(value, 3, up), said.replace(".", "1.", 1)):
        by_computer = other in printed  # of 1592/3, 530.66666666666663: wrong in its last digit
        assert compare(gold, front + other, SIX) is by_computer, other
    assert compare(gold, ("" if front else "-") + said, SIX) is False


@settings(max_examples=200, deadline=None)
@given(endless, st.integers(18, 24), st.booleans(), st.sampled_from([1, -1]))
def test_property_a_fraction_takes_all_digits_of_a_computer_s_number(
    value: Fraction, places: int, up: bool, sign: int
) -> None:
    front, gold = "-" if sign < 0 else "", f"{sign * value.numerator}/{value.denominator}"
    zeros = value < Fraction(1, 100) or cut(value, places, up)[-2:] == "00"
    assert compare(gold, front + cut(value, places, up)) is True or zeros
    for printed in (repr(float(value)), format(float(value), ".17g"), format(float(value), ".16g")):
        assert compare(gold, front + printed) is True or "e" in printed
        assert compare(gold, front + printed, Rounding(digits=None)) is False
    said = cut(value, places, up)
    wrong = said[:13] + str((int(said[13]) + 5) % 10) + said[14:]
    assert compare(gold, front + wrong) is False


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("1", "0.99999999", False), ("2", "2.0000001", False), ("123456", "123456.4", False),
        ("12345.67", "12345.7", False), (r"\frac{x}{3}", "0.33333333x", False),
        (r"\left(0, \frac13\right)", "(0, 0.3333333)", True), (r"[\sqrt2, 3)", "[1.414214, 3)", True),
        (r"[\sqrt2, 3)", "[1.414215, 3)", False), (r"(-\infty, \frac13]", "x \\le 0.333333", True),
        (r"(-\infty, 0) \cup (\frac23, 1)", r"(-\infty, 0) \cup (0.666667, 1)", True),
        ("4.123105625617661", r"\sqrt{17}", True), (r"\frac13", "33.333333\\%", True),
        (r"\begin{pmatrix} \frac13 \\ 1 \end{pmatrix}", r"\begin{pmatrix} 0.333333 \\ 1 \end{pmatrix}", True),
    ],
)  # fmt: skip
def test_decimals_wherever_they_stand(gold: str, answer: str, right: bool) -> None:
    assert compare(gold, answer, SIX) is right


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        (r"\left(0, \frac19\right)", "(0, 0.1111111)", False), (r"[\sqrt3, 3)", "[1.732051, 3)", True),
        (r"\left(0, \frac19\right)", "(0, 0.1111111111111111)", True),
        (r"(-\infty, \frac23]", "x \\le 0.666667", False), (r"\frac23", "66.666667\\%", False),
        (r"(-\infty, \frac23]", "x \\le 0.6666666666666666", True), ("4.123106", r"\sqrt{17}", True),
        (r"\{\frac19, \pi\}", r"\{0.111111, 3.141593\}", False), ("0.111111", r"\frac19", True),
        (r"\{\frac19, \pi\}", r"\{0.1111111111111111, 3.141593\}", True), ("(0.111111, 2)", "(1/9, 2)", True),
        ("2000/3", "666.6666666666666", True), ("2000/3", "666.6666666667", False),
    ],
)  # fmt: skip
def test_what_can_be_written_exactly_takes_all_digits(gold: str, answer: str, right: bool) -> None:
    assert compare(gold, answer) is right


def test_digits_and_decimals_are_options() -> None:
    assert compare(r"\frac13", "0.333", Rounding(digits=3)) is True
    assert compare(r"(\frac13, \sqrt2)", "(0.333, 1.414)", Rounding(decimals=3)) is True
    assert compare(r"(\frac13, \sqrt2)", "(0.333, 1.415)", Rounding(decimals=3)) is False
    for wrong in (1, 2.5, True, "6", "few"):
        with pytest.raises(RewardError, match="digits"):
            math((), digits=wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------- names, systems, inequalities

whole = st.integers(-20, 20)


@settings(max_examples=100, deadline=None)
@given(st.lists(whole, min_size=2, max_size=4, unique=True), st.randoms(use_true_random=False))
def test_property_values_of_names(values: list[int], pick: Any) -> None:
    names = "abxy"[-len(values) :]
    said = [f"{name} = {value}" for name, value in zip(names, values, strict=True)]
    gold = f"({', '.join(map(str, values))})"
    for order in permutations(said):
        assert compare(gold, ", ".join(order)) is True
        assert compare(", ".join(said), ", ".join(order)) is True
    turned = [f"{name} = {value}" for name, value in zip(names, values[::-1], strict=True)]
    if values != values[::-1]:
        assert compare(gold, ", ".join(turned)) is False
        assert compare(", ".join(said), ", ".join(turned)) is False
    others = [f"{name} = {value}" for name, value in zip("pqrs", values, strict=False)]
    assert compare(", ".join(said), ", ".join(others)) is False
    one = [f"x = {value}" for value in values]
    pick.shuffle(one)
    for braces in ("{%s}", "\\{%s\\}"):
        bare = braces % ", ".join(map(str, values))
        assert compare(bare, " or ".join(one)) is True
        assert compare(bare, " or ".join(one[1:])) is False


@settings(max_examples=200, deadline=None)
@given(whole, st.integers(1, 9), whole, st.sampled_from(["<", ">", "\\le", "\\ge", "\\ne"]))
def test_property_an_inequality_in_any_form(
    border: int, factor: int, shift: int, sign: str
) -> None:
    turned = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\ne": "\\ne"}[sign]
    gold = f"x {sign} {border}"
    move = f"+ {shift}" if shift >= 0 else f"- {-shift}"
    same = (
        f"{border} {turned} x",
        f"{factor} x {move} {sign} {factor * border + shift}",
        f"-x {turned} {-border}",
        f"x - {border} {sign} 0" if border >= 0 else f"x + {-border} {sign} 0",
    )
    for said in same:
        assert compare(gold, said) is True, said
    for other in ("<", ">", "\\le", "\\ge", "\\ne"):
        if other != sign:
            assert compare(gold, f"x {other} {border}") is False
    for said in (f"y {sign} {border}", f"x {sign} {border + 1}", f"x {turned} {border + 1}"):
        assert compare(gold, said) is False, said
    for said in (f"{border}", f"x = {border}"):
        assert compare(gold, said) is False and compare(said, gold) is False, said


@settings(max_examples=100, deadline=None)
@given(whole, st.integers(1, 9), st.booleans(), st.booleans())
def test_property_intervals_and_inequalities(low: int, width: int, left: bool, right: bool) -> None:
    high = low + width
    signs = ("\\le" if left else "<", "\\le" if right else "<")
    interval = f"{'[' if left else '('}{low}, {high}{']' if right else ')'}"
    chain = f"{low} {signs[0]} x {signs[1]} {high}"
    apart = f"x {signs[1]} {high} and x {signs[0].replace('<', '>').replace('le', 'ge')} {low}"
    for said in (chain, apart, interval, f"x \\in {interval}"):
        assert compare(interval, said) is True and compare(chain, said) is True, said
    other = f"{'(' if left else '['}{low}, {high}{']' if right else ')'}"
    for said in (other, f"{low} {signs[0]} x {signs[1]} {high + 1}", f"{low}, {high}"):
        assert not compare(chain, said), said


@settings(max_examples=100, deadline=None)
@given(st.lists(whole, min_size=3, max_size=3), st.integers(2, 9))
def test_property_an_equation_in_any_form(numbers: list[int], factor: int) -> None:
    a, b, c = (number or 1 for number in numbers)
    gold = f"{a}x + ({b})y = {c}"
    for said in (
        f"0 = {a}x + ({b})y - ({c})", f"{factor * a}x + ({factor * b})y = {factor * c}",
        f"y = ({c} - ({a})x)/({b})", f"({c} - ({b})y)/({a}) = x",
    ):  # fmt: skip
        assert compare(gold, said) is True, said
    for said in (
        f"{a}x + ({b})y = {c + 1}",
        f"{a}x + ({-b})y = {c}",
        f"{a}x + ({b})z = {c}",
        "1 = 1",
    ):
        assert compare(gold, said) is False, said
    assert compare(gold, f"{c}") is False


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 9999), st.integers(1, 999))
def test_property_a_decimal_comma(front: int, behind: int) -> None:
    comma, point = f"{front},{behind}5", f"{front}.{behind}5"
    if behind < 10 or behind > 99:  # three digits behind a comma are thousands
        assert compare(point, comma) is True and compare(comma, point) is True
        assert compare(point, f"x = {comma}") is True
        assert compare(point, f"{front},{behind}6") is False
        assert compare(f"({point}, 1.5)", f"({comma}; 1,5)") is True
        assert compare(f"({point}, 1.5)", f"({comma}; 1,6)") is False


@pytest.mark.parametrize(
    "ways",
    [
        ("11", r"x \approx 11", r"\approx 11", "11 = x"),
        ("f(x) = x^2", "y = x^2", "f(x) = x x"), (r"\log 100", "2", r"\log_{10} 100"),
        (r"\sin 5x \cos x", r"\cos(x)\sin(5x)"), (r"\cos^2 a", r"1 - \sin^2 a"),
        (r"\sqrt{x^2}", "|x|", "abs(x)"), (r"x\sqrt{x}", r"\sqrt{x^3}"), ("(x-a)^{6000}", "(a-x)^{6000}"),
        (r"\lfloor \frac{n+1}{2} \rfloor", r"\lceil \frac n2 \rceil"), ("(n+1)!", "(n+1) n!"),
        (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"), (r"\frac{-b \pm \sqrt{d}}{2a}", r"\frac{b \mp \sqrt{d}}{-2a}"),
        ("2004!", "2004 \\cdot 2003!"), ("x < 1 or x > 3", r"(-\infty, 1) \cup (3, \infty)", "3 < x or 1 > x"),
        (r"\mathbb{R}^n", r"\mathbb R^{n}"), (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(1, 2)"),
        ("1, 2", "(1, 2)", "[1, 2]"), ("0.105", "0,105"), ("x=1,y=2;x=2,y=1", "(1,2),(2,1)"), ("1/2", "1⁄2"),
        (r"\text{13}", "13"), ("1234.5", "1.234,5"), (r"G \oplus G", r"G\oplus G"),
    ],
    ids=lambda ways: ways[0],
)  # fmt: skip
def test_ways_to_say_the_same(ways: tuple[str, ...]) -> None:
    for way in ways[1:]:
        assert compare(ways[0], way) is True, way


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\sum_{k=1}^{n} k", "n(n+1)/2"), ("x^2 \\ge 4", "x^4 \\ge 16"), ("y = 1/x", "xy = 1"),
        (r"|x| < 1", "(-1, 1)"), (r"\int_0^1 x^2 dx", r"\frac13"), (r"\prod_{k=1}^{n} k", "n!"),
        (r"\int_0^1 e^{-x^2} dx", "0.746824"), (r"\int_0^1 14x \, dx", "7"), (r"\sum_{k=1}^7 2", "14"),
        (r"\int_0^1 14x \, dx", r"\sum_{k=1}^{7} 1"), (r"\lim_{x \to 0} \frac{\sin x}{x}", "1"),
    ],
)  # fmt: skip
def test_what_is_worked_out(gold: str, answer: str) -> None:
    assert isinstance(decide(rf"\boxed{{{answer}}}", gold), Question)
    assert accepts(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("7", r"\int_0^1 14x \, dx"), ("7", r"\sum_{k=1}^{7} 1"), ("24", r"\prod_{k=1}^4 k"),
        ("1", r"\lim_{x \to 0} \frac{\sin x}{x}"), ("n(n+1)/2", r"\sum_{k=1}^{n} k"),
    ],
)  # fmt: skip
def test_what_is_left_to_be_worked_out_is_no_answer(gold: str, answer: str) -> None:
    """The model would only have to say the question again."""
    assert not accepts(gold, answer)


# ---------------------------------------------------------------- no wrong pair

WRONG = {
    r"\frac{1}{2004!}": (r"\frac{1}{2006!}", r"\frac{1}{2005!}", "0"), "2004!": ("2005!", "2004"),
    "10000!": ("10001!", "10000! + 1"), "7^{7^9}": ("7^{7^9} + 1", "7^{7^8}", "7^{9^7}"),
    r"10^{100}\sqrt{2}": (r"10^{100}\sqrt{2} + 1", r"10^{99}\sqrt{2}"),
    r"10^{-60}\sqrt2": (r"10^{-60}\sqrt3", "0"), "n!": ("(n+1)!", "(n-1)!", "n"),
    r"\binom{n}{k}": (r"\binom{n}{k+1}", r"\binom{n+1}{k}"),
    "f(x) = x^2": ("g(x) = x^2", "f(x) = x^3", "f(y) = x^2", "f(x) = f(x)"), "f(2) = 4": ("f(1) = 2", "f(2) = 5"),
    "f'(0)": ("f(0)", "f''(0)"), "y' = x": ("y'' = x", "y = x"), "x = 1": ("1 = 1", "y = 1", "x = 2", "1 = 2"),
    "x": ("X", "y", "x_1"), "x^2 = y^2": ("x = y",), "y = 2x": ("x = 2y", "y = -2x", "z = 2x"),
    "x^2 + y^2 = 1": ("x^2 + y^2 = 2", "x^2 - y^2 = 1", "1"), "x^2 \\ge 4": ("x^2 \\ge 9", "x^3 \\ge 8", "x \\ge 2"),
    "a > b > c": ("a > c > b", "a < b < c"), "f(2) < f(1)": ("f(1) < f(2)", "f(2) < f(4)"),
    "X^T X": ("X X^T", "X^2"), r"A^\top": ("A",), r"G \oplus G": (r"G \otimes G",),
    r"\mathbb{Z}/2\mathbb{Z}": (r"\mathbb{Z}/3\mathbb{Z}", r"\mathbb{Z}_2"), r"\mathbb R": (r"\mathbb Q", "R"),
    r"2^{\aleph_0}": (r"2^{\aleph_1}",), r"p \equiv 1 \pmod{4}": (r"p \equiv 1 \pmod{8}", r"p \equiv 3 \pmod{4}"),
    r"\gcd(n, p-1)": (r"\gcd(n, p)", "1"), r"\max(n, 0)": (r"\min(n, 0)", "n"), r"\lfloor x \rfloor": (r"\lceil x \rceil", "x"),
    r"\log x": (r"\log_2 x", r"\log y", r"\log 2x"), r"\sin^{-1} t": (r"\frac{1}{\sin t}",), r"\sin^2 t": (r"\sin t^2",),
    "(a^b)^c": ("a^{b^c}",), r"\sqrt{x^2}": ("x",), r"1:2:3:\ldots": (r"1:4:9:\ldots",),
    r"\text{June 20}": (r"\text{July 20}", r"\text{June 21}", "20"), "x = 2, y = 1": ("x = 1, y = 2", "a = 2, b = 1"),
    "[1, 2]": ("(1, 2)", "1, 2", r"\{1, 2\}"), r"\{1, 2\}": ("{1, 3}", "{1, 2, 3}", "(1, 2)"),
    r"\frac{dy}{dx} = x": (r"\frac{dx}{dy} = x",), r"\sum_{k=1}^{n} k": (r"\sum_{k=1}^{n} k^2", r"\sum_{k=0}^{n-1} k"),
    r"\int_0^1 x dx": (r"\int_0^1 x^2 dx", r"\int_0^2 x dx"), r"\hat{\theta}": (r"\theta", r"\hat{\phi}"),
    r"\{ z \in \mathbb{C} \mid |z| \leq 1 \}": (r"\{ z \in \mathbb{R} \mid |z| \leq 1 \}",),
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}": (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", "(2, 1)"),
}  # fmt: skip


@pytest.mark.parametrize("gold", WRONG)
def test_wrong_pairs(gold: str) -> None:
    pairs = [(phrase.format(said), gold) for phrase in PHRASES for said in WRONG[gold]]
    for (text, _), verdict in zip(pairs, verdicts(pairs, timeout=30), strict=True):
        assert verdict.score == 0.0, (gold, text, verdict)


SIGNS = {"+": "-", "-": "+", "<": ">", "x": "y", "a": "b", "(": "[", "f": "g", "sin": "cos"}
FORMULAS = (
    r"\frac{3x+7}{x^2-5}", r"f(x) = 2x^3 - 4", r"(-\infty, 5] \cup (7, 9)", r"x^2 + 3a - 5 < 12",
    r"\sqrt{13} + 2\pi", r"\{2, 3, 17\}", r"(4, \frac{5}{6})", r"\sin 3x - \cos 8", "x = 17, y = 23",
    r"e^{3x} - \ln 5", r"\binom{17}{4} 3^5", r"\frac{a^2 - 9}{a + 4} = 6", r"12\sqrt[3]{5}",
)  # fmt: skip


@pytest.mark.parametrize("gold", FORMULAS)
def test_a_formula_with_one_sign_changed_is_another(gold: str) -> None:
    """Every digit and sign of it, one at a time."""
    changed = set()
    for at, letter in enumerate(gold):
        if letter.isdigit():
            changed.add(f"{gold[:at]}{(int(letter) + 1) % 10 or 2}{gold[at + 1 :]}")
    for sign, other in SIGNS.items():
        start = gold.find(sign)
        while start >= 0:
            if sign not in "xaf" or not (gold[start - 1 : start + 2].strip(sign)).isalpha():
                changed.add(gold[:start] + other + gold[start + len(sign) :])
            start = gold.find(sign, start + 1)
    assert compare(gold, gold + " ") is True and len(changed) > 1
    pairs = [(rf"\boxed{{{said}}}", gold) for said in sorted(changed)]
    for (text, _), verdict in zip(pairs, verdicts(pairs, timeout=30), strict=True):
        assert verdict.score == 0.0, (gold, text, verdict)


# ---------------------------------------------------------------- printed by a computer


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        (r"\sqrt{2}", "1.4142135623730951", True), (r"\frac{2}{3}", "0.6666666666666666", True),
        ("1/3", "0.3333333333333334", False), ("0.3", "0.30000000000000004", False),
        (r"\sqrt{2}", "1.4142135623731951", False), (r"\sqrt{2}", "1.41421357", False),
    ],
)  # fmt: skip
def test_what_a_computer_prints_of_a_number_is_that_number(
    gold: str, answer: str, right: bool
) -> None:
    assert accepts(gold, answer) is right
    assert accepts(gold, answer, digits=None) is False


def test_a_number_too_large_for_a_computer_s_is_another_number() -> None:
    (verdict,) = verdicts([("It comes to 0.3333333.", f"{10**400}/3")])
    assert verdict.score == 0.0


# ---------------------------------------------------------------- absolute values, typed signs


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("(x-y)(x+y) = 0", "|x| = |y|", True), ("x^2 = y^2", "abs(x) = abs(y)", True),
        ("|x| = |y|", "x^2 = y^2", True), ("x^2 = 9", "|x| = 3", True),
        ("x^2 = 9", "|x| = -3", False), ("x = y", "|x| = |y|", False), ("x^2 = 9", "|x| = 9", False),
        ("x^2 = y^2", "x = y", False), ("y = |x|", "y^2 = x^2", False),
    ],
)  # fmt: skip
def test_equal_absolute_values_are_equal_squares(gold: str, answer: str, right: bool) -> None:
    assert accepts(gold, answer) is right


@pytest.mark.parametrize(
    ("gold", "typed", "other"),
    [
        (r"\theta", "θ", "φ"), (r"2\alpha + \beta", "2α + β", "2α + γ"), ("x_1", "x₁", "x₂"),
        ("6a", "2a ⋅ 3", "2a ⋅ 4"), (r"\sqrt[3]{9}", "∛9", "√9"), ("(1, 2)", "（1，2）", "（2，1）"),
        (r"\mathbb{R}", "ℝ", "ℤ"), (r"x \leq 3", "x ≦ 3", "x ≧ 3"), (r"x \leq 3", r"x \leqq 3", "x < 3"),
        (r"\frac{1}{2}", "frac{1}{2}", "frac{1}{3}"), (r"(1,2) \cup (3,4)", "(1,2) U (3,4)", "(1,2) U (3,5)"),
    ],
)  # fmt: skip
def test_signs_that_are_typed_are_those_of_latex(gold: str, typed: str, other: str) -> None:
    assert accepts(gold, typed) and accepts(typed, gold)
    assert not accepts(gold, other)


# ---------------------------------------------------------------- marked answers alone


@pytest.mark.parametrize(
    ("text", "as_it_is", "marked"),
    [
        (r"\boxed{42}", 1.0, 1.0), ("Answer: 42", 1.0, 1.0), ("#### 42", 1.0, 1.0),
        ("<answer>42</answer>", 1.0, 1.0), ("So the answer is 42 apples.", 1.0, 1.0),
        ("42", 1.0, 0.0), ("just the number 42", 1.0, 0.0), ("just a number 42", 0.0, 0.0), ("It comes to $42$.", 1.0, 0.0),
        ("To find the answer: multiply. 6 * 7 = 42.", 1.0, 0.0),
        (r"\boxed{4}. Wait, that is wrong, it is 42.", 1.0, 0.0),
        (r"\boxed{4}. Wait, that is wrong: \boxed{42}.", 1.0, 1.0),
        (r"42, so \boxed{41}", 0.0, 0.0),
    ],
)  # fmt: skip
def test_marked_takes_only_what_has_a_mark(text: str, as_it_is: float, marked: float) -> None:
    for strict, score in ((False, as_it_is), (True, marked)):
        (verdict,) = verdicts([(text, "42")], marked=strict)
        assert verdict.score == score
    part = Grader({"math(marked=True)": 1.0})
    (grade,) = part.grade([(Task(0, "How many?", "42"), text, (), "eos")])
    assert grade.reward == marked


def test_marked_is_true_or_false() -> None:
    with pytest.raises(RewardError, match="marked = 1 must be True or False"):
        math((), marked=1)  # type: ignore[arg-type]
