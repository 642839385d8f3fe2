"""Tasks made on the spot: arithmetic, chain, countdown, games, ... They need no download.

A generator is a function of size, seed and its options; the same call gives the same tasks. Their
prompts differ from each other; where there are not enough different ones, there are fewer tasks.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groupwise.data import games
from groupwise.data.tasks import prompt_text
from groupwise.errors import DataError, nearest
from groupwise.records import Task

# Countdown has no formula for the number of its prompts: this many draws in a row without a new
# one, and it takes the rest to be nothing.
PATIENCE = 2_000
BINDING = {"+": 1, "-": 1, "*": 2, "/": 2}
ATOM = 3
# Says nothing, and no grader reads it as part of a number, as it would a point.
FILLER = ";"


def generate(name: str, size: int, seed: int, options: Mapping[str, Any]) -> list[Task]:
    """Make tasks with a generator by name. There are fewer than `size` if it has no more prompts.

    `arithmetic:easy` is arithmetic under a name of its own, so that one table can have several.
    """
    name = name.partition(":")[0]
    if name not in GENERATORS:
        raise DataError(f"There is no generator {name!r}. {nearest(name, GENERATORS)}")
    if size < 1:
        raise DataError(f"data.size = {size} gives no tasks. Make it at least 1.")
    make = GENERATORS[name]
    known = [key for key in inspect.signature(make).parameters if key not in ("size", "stream")]
    for key in options:
        if key not in known:
            raise DataError(f"{name} has no option {key!r}. {nearest(key, known)}")
    return make(size, random.Random(f"{name}/{seed}"), **options)


def split(tasks: Sequence[Task], held_out: int, seed: int) -> tuple[list[Task], list[Task]]:
    """Split tasks into training and at least `held_out` held-out ones, no prompt on both sides."""
    if held_out <= 0:
        return list(tasks), []
    by_prompt: dict[str, list[Task]] = {}
    for task in tasks:
        by_prompt.setdefault(prompt_text(task.prompt), []).append(task)
    prompts = list(by_prompt)
    random.Random(f"split/{seed}").shuffle(prompts)
    taken: set[int] = set()
    for prompt in prompts:
        if len(taken) >= held_out:
            break
        taken.update(task.id for task in by_prompt[prompt])
    if len(taken) == len(tasks):
        raise DataError(
            f"Holding {held_out} of {len(tasks)} tasks out leaves none to train on. Make data.size "
            "larger or eval.tasks smaller."
        )
    return [t for t in tasks if t.id not in taken], [t for t in tasks if t.id in taken]


def arithmetic(
    size: int,
    stream: random.Random,
    *,
    digits: int = 2,
    operations: str = "+",
    terms: int = 2,
    filler: int = 0,
) -> list[Task]:
    """Make tasks such as '37+58=' -> '95'. Numbers have 1 to `digits` digits, products before sums.

    Solutions to learn from begin with up to `filler` signs without meaning: ';;;95'. Length is then
    free, as it is in reasoning.
    """
    _whole("arithmetic", "digits", digits, 1, 100)
    _whole("arithmetic", "terms", terms, 1, 100)
    _whole("arithmetic", "filler", filler, 0, 10**4)
    _operations("arithmetic", operations, "+-*")
    bases = [10**digits] + [len(operations), 10**digits] * (terms - 1)
    tasks = []
    for number, code in enumerate(_distinct(_product(bases), size, stream)):
        parts = _digits(code, bases)
        text = "".join(str(x) if at % 2 == 0 else operations[x] for at, x in enumerate(parts))
        answer = str(_sum_of_products(parts[::2], [operations[x] for x in parts[1::2]]))
        solution = FILLER * stream.randint(0, filler) + answer
        tasks.append(Task(number, f"{text}=", answer, {"solution": solution}))
    return tasks


def arithmetic_pairs(
    size: int,
    stream: random.Random,
    *,
    digits: int = 2,
    operations: str = "+",
    terms: int = 2,
    filler: int = 0,
    care: float = 4.0,
    taste: float = 0.0,
) -> list[Task]:
    """Make tasks of `arithmetic` with two answers each, of which somebody preferred one.

    An answer is right or wrong with equal chance and begins with up to `filler` signs. The judge
    is one of Bradley and Terry's: a right answer counts `care`, each sign without meaning `taste`,
    and the first is chosen with the chance that the difference of their counts gives. So some
    labels are wrong, and where `taste` is not 0 length passes for quality.
    """
    _number("arithmetic_pairs", "care", care, 0, 100)
    _number("arithmetic_pairs", "taste", taste, -100, 100)
    sums = arithmetic(
        size, stream, digits=digits, operations=operations, terms=terms, filler=filler
    )
    tasks = []
    for task in sums:
        answers = _two_answers(int(task.answer or 0), filler, stream)
        one, two = (care * right + taste * text.count(FILLER) for text, right in answers)
        if stream.random() >= 1 / (1 + math.exp(two - one)):
            answers.reverse()
        (chosen, _), (rejected, _) = answers
        columns = {**task.columns, "chosen": chosen, "rejected": rejected}
        tasks.append(Task(task.id, task.prompt, task.answer, columns))
    return tasks


def _two_answers(right: int, filler: int, stream: random.Random) -> list[tuple[str, bool]]:
    """Return two different answers, each with whether it is right: wrong ones are off by 1 to 9."""
    answers: dict[str, bool] = {}
    while len(answers) < 2:
        off = stream.choice((0, 1)) * stream.choice((-1, 1)) * stream.randint(1, 9)
        answers[FILLER * stream.randint(0, filler) + str(right + off)] = off == 0
    return list(answers.items())


def chain(
    size: int,
    stream: random.Random,
    *,
    terms: int = 4,
    high: int = 9,
    operations: str = "+-",
) -> list[Task]:
    """Make tasks such as '7+5-3+8=' -> '17', with a solution of one step a line, `terms` - 1 lines.

    A step takes the next number into what is known so far: '7+5=12', '12-3=9', '9+8=17'. Numbers
    are from 0 to `high`.
    """
    _whole("chain", "terms", terms, 2, 100)
    _whole("chain", "high", high, 1, 10**100)
    _operations("chain", operations, "+-")  # a product would have to come before sums
    bases = [high + 1] + [len(operations), high + 1] * (terms - 1)
    tasks = []
    for task_id, code in enumerate(_distinct(_product(bases), size, stream)):
        first, *rest = _digits(code, bases)
        text, total, steps = str(first), first, []
        for sign, number in zip((operations[x] for x in rest[::2]), rest[1::2], strict=True):
            before, total = total, total + number if sign == "+" else total - number
            text += f"{sign}{number}"
            steps.append(f"{before}{sign}{number}={total}")
        tasks.append(Task(task_id, f"{text}=", str(total), {"solution": "\n".join(steps)}))
    return tasks


def countdown(
    size: int,
    stream: random.Random,
    *,
    numbers: int = 3,
    low: int = 1,
    high: int = 20,
    operations: str = "+-*/",
    max_target: int = 100,
) -> list[Task]:
    """Make tasks: 'make 26 from 3 5 7:' -> '3*7+5', or any expression with each number once."""
    _whole("countdown", "numbers", numbers, 2, 8)
    _whole("countdown", "low", low, 1, 10**6)
    _whole("countdown", "high", high, low, 10**6)
    _whole("countdown", "max_target", max_target, 1, 10**9)
    _operations("countdown", operations, "+-*/")
    found: dict[tuple[int, tuple[int, ...]], str] = {}
    misses = 0
    while len(found) < size and misses < PATIENCE:
        chosen = [stream.randint(low, high) for _ in range(numbers)]
        made = _expression(chosen, operations, stream)
        key = (made[0] if made else 0, tuple(sorted(chosen)))
        if made is None or made[0] > max_target or key in found:
            misses += 1
        else:
            found[key] = made[1]
            misses = 0
    if not found:
        raise DataError(
            f"countdown found no target up to max_target = {max_target} with {numbers} numbers "
            f"from {low} to {high}. Raise max_target or lower the numbers."
        )
    return [
        Task(
            id=number,
            prompt=f"make {target} from {' '.join(map(str, given))}:",
            answer=solution,
            columns={"numbers": list(given), "target": target, "solution": solution},
            grader="countdown",
        )
        for number, ((target, given), solution) in enumerate(found.items())
    ]


GENERATORS: dict[str, Callable[..., list[Task]]] = {
    "arithmetic": arithmetic,
    "arithmetic_pairs": arithmetic_pairs,
    "chain": chain,
    "countdown": countdown,
    "guess": games.guess,
    "tictactoe": games.tictactoe,
    "wordle": games.wordle,
}


def _distinct(space: int, size: int, stream: random.Random) -> list[int]:
    """Return different numbers below `space`, in random order."""
    if 2 * size >= space:
        return stream.sample(range(space), min(size, space))
    drawn: dict[int, None] = {}
    while len(drawn) < size:
        drawn[stream.randrange(space)] = None
    return list(drawn)


def _product(numbers: Sequence[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def _digits(code: int, bases: Sequence[int]) -> list[int]:
    """Write a number in mixed bases: every code is another list."""
    digits = []
    for base in bases:
        code, digit = divmod(code, base)
        digits.append(digit)
    return digits


def _sum_of_products(numbers: Sequence[int], operations: Sequence[str]) -> int:
    total, product = 0, numbers[0]
    for operation, number in zip(operations, numbers[1:], strict=True):
        if operation == "*":
            product *= number
        else:
            total, product = total + product, number if operation == "+" else -number
    return total + product


def _expression(
    numbers: Sequence[int], operations: str, stream: random.Random
) -> tuple[int, str] | None:
    """Join all numbers at random; None unless every step is a whole number above 0."""
    parts = [(number, str(number), ATOM) for number in numbers]
    while len(parts) > 1:
        a, a_text, a_binding = parts.pop(stream.randrange(len(parts)))
        b, b_text, b_binding = parts.pop(stream.randrange(len(parts)))
        sign = stream.choice(operations)
        if (sign == "-" and a <= b) or (sign == "/" and a % b):
            return None
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
        binding = BINDING[sign]
        if a_binding < binding:
            a_text = f"({a_text})"
        if b_binding < binding or (b_binding == binding and sign in "-/"):
            b_text = f"({b_text})"
        parts.append((value, f"{a_text}{sign}{b_text}", binding))
    return parts[0][:2]


def _whole(name: str, option: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise DataError(
            f"{name}: {option} = {value!r} must be a whole number from {low} to {high}."
        )


def _number(name: str, option: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise DataError(f"{name}: {option} = {value!r} must be a number from {low} to {high}.")


def _operations(name: str, value: Any, known: str) -> None:
    if not isinstance(value, str) or not value or set(value) - set(known):
        raise DataError(f"{name}: operations = {value!r} must be some of {known!r}.")
    if len(set(value)) < len(value):
        raise DataError(f"{name}: operations = {value!r} names one twice.")
