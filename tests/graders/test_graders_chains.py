"""What a calculation comes to: chains of equalities, identities, displays of several lines."""

from __future__ import annotations

import random

import pytest

from groupwise.graders.mathematics.grader import verdicts


def score(gold: str, text: str) -> float | None:
    (verdict,) = verdicts([(text, gold)])
    return verdict.score


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (r"A = \int_0^1 x\,dx = \frac{1}{2}", r"\boxed{1/2}", r"\boxed{1}"),
        (r"S = \sum_{k=1}^{n} k = \frac{n(n+1)}{2}", "n(n+1)/2", "n(n-1)/2"),
        (r"$\angle ABC = \angle CBA = 70^\circ$", "70", "71"),
        ("a + b = c + d = 5", "5", "a + b = 6"),
        ("a + b = c + d = 5", r"\boxed{a+b=c+d=5}", r"\boxed{a+b=c+d=6}"),
    ],
)
def test_a_gold_chain_says_its_last_side(gold: str, right: str, wrong: str) -> None:
    assert score(gold, right) == 1.0
    assert score(gold, wrong) == 0.0


def test_a_chain_of_a_name_says_its_last_side_in_an_answer() -> None:
    assert score(r"\frac12", r"\boxed{A = \int_0^1 x\,dx = \frac{1}{2}}") == 1.0
    assert score(r"\frac12", r"\boxed{A = \frac{1}{2} = \oint x = 3}") == 0.0
    assert score("5", r"\boxed{a+b = \oint x = 5}") == 0.0  # of no name: nothing says what 5 is


@pytest.mark.parametrize(
    "gold", [r"x = 1, y = \zzz = 2", r"x = \zzz = 2 \text{ or } x = 3", r"a \le \zzz = b = 3"]
)
def test_what_lists_or_compares_is_no_chain(gold: str) -> None:
    assert score(gold, gold.rpartition("=")[2].strip()) == 0.0


def test_an_identity_is_a_calculation_and_no_other_equation_is() -> None:
    draw = random.Random(0)
    for _ in range(40):
        a, b = draw.randint(1, 9), draw.randint(1, 9)
        product, total, last = f"(x+{a})(x-{b})", a - b, -a * b
        gold = f"x^2{total:+d}x{last:+d}"
        assert score(gold, rf"\boxed{{{product} = {gold}}}") == 1.0
        assert score(gold, rf"\boxed{{{product} = {gold}+1}}") == 0.0
        assert score(gold, rf"\boxed{{{gold}+1 = {product}+1}}") == 0.0
        assert score(str(a), rf"\boxed{{x^2 + y^2 = {a}}}") == 0.0


@pytest.mark.parametrize("name", ["align*", "align", "gather*", "equation", "multline*"])
def test_a_display_of_several_lines_says_its_last(name: str) -> None:
    def shown(lines: str) -> str:
        return f"So the expression is:\n\\begin{{{name}}}\n{lines}\n\\end{{{name}}}"

    assert score("x^2+2x+1", shown(r"(x+1)^2 &= x(x+1)+(x+1) \\ &= x^2+2x+1.")) == 1.0
    assert score("x^2+2x+1", shown(r"(x+1)^2 &= x^2+2x+1 \\[2pt] &= x^2+3x+1")) == 0.0
    assert score("x^2+2x+1", shown(r"(x+1)^2 &= x^2+2x+1")) == 1.0
    assert score("25", shown(r"x^2+y^2 &= 25")) == 0.0
    assert score("7", shown(r"a &= \boxed{7} \\ b &= 9")) == 1.0


def test_brackets_of_either_kind_hold_the_values_of_names() -> None:
    draw = random.Random(1)
    for _ in range(40):
        x, y = draw.sample(range(-20, 20), 2)
        gold = f"x = {x}, y = {y}"
        assert score(gold, f"[{x}, {y}]") == score(gold, f"({x}, {y})") == 1.0
        assert score(gold, f"[{y}, {x}]") == score(gold, f"({x}, {y}]") == 0.0
        assert score(f"({x}, {y})", f"[{x}, {y}]") == 0.0  # may be an interval
