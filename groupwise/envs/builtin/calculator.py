"""A calculator: exact, bounded, and no `eval`.

Whole numbers and fractions stay exact; a result that is no whole number is shown as a decimal of
twelve digits. Roots and powers of broken exponents are computed as decimals.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Coroutine
from fractions import Fraction
from typing import Any

LONGEST = 1_000  # characters of an expression
MOST_DIGITS = 1_000  # of a number on the way
DEEPEST = 100
PLACES = 12
SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**", ",": "", "$": ""})

Number = Fraction
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
FUNCTIONS: dict[str, Callable[[Number], Number]] = {
    "abs": abs,
    "sqrt": lambda x: _root(x),
    "round": lambda x: Fraction(round(x)),
    "floor": lambda x: Fraction(math.floor(x)),
    "ceil": lambda x: Fraction(math.ceil(x)),
}


def calculator() -> Callable[[str], Coroutine[Any, Any, str]]:
    """Make the tool, which has no options."""

    async def calculator(expression: str) -> str:
        """Compute an arithmetic expression exactly, such as (3 + 4) * 12 / 5.

        Args:
            expression: Numbers, + - * / // % **, brackets, abs, sqrt, round, floor and ceil.
        """
        return shown(value(expression))

    return calculator


def value(expression: str) -> Number:
    """Return the exact value of an expression. Raises ValueError with what is wrong with it."""
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has more than {LONGEST:,} characters")
    text = expression.strip().rstrip("=").translate(SIGNS)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("this is no arithmetic expression") from None
    return _value(tree, 0)


def _value(node: ast.expr, depth: int) -> Number:
    if depth > DEEPEST:
        raise ValueError("the expression is nested too deeply")
    if isinstance(node, ast.Constant):
        return _constant(node)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        inner = _value(node.operand, depth + 1)
        return -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, depth + 1), _value(node.right, depth + 1)
        return _bounded(_combined(node.op, left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        function = FUNCTIONS.get(node.func.id)
        if function is None or len(node.args) != 1 or node.keywords:
            raise ValueError(f"there is no function {node.func.id!r} of that kind")
        return _bounded(function(_value(node.args[0], depth + 1)))
    raise ValueError("only numbers, + - * / // % ** and brackets are computed")


def _constant(node: ast.Constant) -> Number:
    if isinstance(node.value, bool) or not isinstance(node.value, (int, float)):
        raise ValueError("only numbers are computed")
    if isinstance(node.value, float) and not math.isfinite(node.value):
        raise ValueError("a number is too large")
    return _bounded(Fraction(str(node.value)))


def _combined(sign: ast.operator, left: Number, right: Number) -> Number:
    if isinstance(sign, ast.Pow):
        return _power(left, right)
    if type(sign) not in BINARY:
        raise ValueError("only + - * / // % ** are computed")
    if right == 0 and isinstance(sign, (ast.Div, ast.FloorDiv, ast.Mod)):
        raise ValueError("division by zero")
    return Fraction(BINARY[type(sign)](left, right))


def _power(base: Number, exponent: Number) -> Number:
    if exponent.denominator != 1:
        if base < 0:
            raise ValueError("a root of a negative number")
        return Fraction(str(float(base) ** float(exponent)))
    if base == 0 and exponent < 0:
        raise ValueError("division by zero")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * size > MOST_DIGITS * 4:  # bits: before it is computed
        raise ValueError("the power is too large")
    return base ** int(exponent)


def _root(number: Number) -> Number:
    if number < 0:
        raise ValueError("a root of a negative number")
    above, below = math.isqrt(number.numerator), math.isqrt(number.denominator)
    if above**2 == number.numerator and below**2 == number.denominator:
        return Fraction(above, below)
    return Fraction(str(math.sqrt(number)))


def _bounded(number: Number) -> Number:
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > MOST_DIGITS * 4:
        raise ValueError(f"a number has more than about {MOST_DIGITS:,} digits")
    return number


def shown(number: Number) -> str:
    """Return a whole number in full, another as a decimal."""
    if number.denominator == 1:
        return str(number.numerator)
    scaled = round(number * 10**PLACES)
    if scaled == 0:
        return f"{float(number):.6g}"
    whole, rest = divmod(abs(scaled), 10**PLACES)
    return f"{'-' if scaled < 0 else ''}{whole}.{rest:0{PLACES}d}".rstrip("0").rstrip(".")
