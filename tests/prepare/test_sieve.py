"""Rejection sampling: who stays, why others go, and that the order of files does not matter."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from groupwise.config.fields import Keep
from groupwise.data.selection import REASONS, AnswerPlace, KeptAnswers
from groupwise.prepare.sieve import EarlierAnswer, Sieve, fault, in_one_language, longest_paragraph
from groupwise.records import Completion, Grade, Rollout, Task

ENGLISH = "The sum of the two is 7, and that is what we have to find."
GERMAN = "Die Summe ist sieben, und das ist nicht mehr als die Summe von drei und vier."


def answer(
    text: str = ENGLISH, *, prompt: str = "p", number: int = 0, tokens: int = 3, **changes: Any
) -> EarlierAnswer:
    grade = Grade(
        changes.get("reward", 1.0),
        changes.get("parts", {"number": 1.0}),
        changes.get("correct", True),
        changes.get("status", "ok"),
    )
    done = Completion(tuple(range(tokens)), torch.zeros(tokens), changes.get("finish", "eos"), 0)
    rollout = Rollout(Task(0, prompt), 0, number, done, text, grade)
    return EarlierAnswer(AnswerPlace("runs/a", 1, 0, number, 0, 0), prompt, rollout)


@pytest.mark.parametrize(
    ("reason", "given", "without"),
    [
        ("failed", {"status": "error"}, None),
        ("failed", {"status": "timeout"}, None),
        ("wrong", {"correct": False}, {"correct": False}),
        ("unjudged", {"correct": None}, {"correct": False}),
        ("unended", {"finish": "length"}, {"ended": False}),
        ("unended", {"finish": "stop"}, {"ended": False}),
        ("empty", {"text": " <|im_end|>"}, None),
        ("language", {"text": f"{ENGLISH} {GERMAN}"}, {"language": 0.0}),
        (
            "language",
            {"text": "答案是七因为三加四等于七 so that is what we have"},
            {"language": 0.0},
        ),
        ("paragraph", {"text": "7 " * 1001}, {"paragraph": 0}),
        ("fences", {"text": "```python\n7\n```"}, {"fences": True}),
    ],
)
def test_each_reason_has_its_setting(
    reason: str, given: dict[str, Any], without: dict[str, Any] | None
) -> None:
    found = answer(**given)
    assert fault(found, Keep()) == reason
    if without is not None:
        assert fault(found, Keep(**without)) == ""


def test_what_may_stay() -> None:
    assert fault(answer("7 " * 1000 + "\n" + "7 " * 1000), Keep()) == ""  # two paragraphs
    assert fault(answer("```python\n7\n```", parts={"code(limit=1)": 1.0}), Keep()) == ""
    assert fault(answer(GERMAN), Keep()) == ""
    assert in_one_language("12 + 3 = 15", 0.95)  # no words, none of two languages
    assert fault(answer("三加四等于七<|im_end|>"), Keep()) == ""  # the end token is no English
    assert longest_paragraph("ab\nabc\n") == 3


def crowd() -> list[EarlierAnswer]:
    """Six answers to `a`, two of them equal and one wrong; three to `b`, all right, all equal."""
    texts = ["one 1", "two 2", "three 3", "four 4", "four 4"]
    made = [answer(t, prompt="a", number=n, tokens=9 - n) for n, t in enumerate(texts)]
    made.append(answer("five 5", prompt="a", number=5, correct=False))
    return made + [answer("same", prompt="b", number=n) for n in range(3)]


def sieved(answers: list[EarlierAnswer], seed: int = 0, **keep: Any) -> tuple[list[str], dict]:
    sieve = Sieve(Keep(**{"language": 0.0} | keep), seed)
    for each in answers:
        sieve.look(each)
    kept = sieve.kept()
    dropped = {name: number for name, number in sieve.dropped.items() if number}
    assert len(kept) + sum(dropped.values()) == len(answers)  # nobody goes without a reason
    assert set(dropped) <= set(REASONS)
    return [f"{each.prompt} {each.rollout.text}" for each in kept], dropped


def test_counts_by_hand() -> None:
    kept, dropped = sieved(crowd(), per_prompt=2)
    assert len(kept) == 3 and kept[-1] == "b same"
    assert dropped == {"wrong": 1, "repeated": 3, "per_prompt": 2}
    kept, dropped = sieved(crowd(), per_prompt=0)
    assert len(kept) == 5 and dropped == {"wrong": 1, "repeated": 3}
    kept, dropped = sieved(crowd(), per_prompt=0, solved=0.0)  # `b` was solved by all
    assert len(kept) == 4 and dropped == {"wrong": 1, "repeated": 1, "solved": 3}
    kept, dropped = sieved(crowd(), correct=False, solved=0.0, per_prompt=0)
    assert len(kept) == 5 and dropped == {"repeated": 1, "solved": 3}


def test_the_shortest_and_the_best_go_first() -> None:
    kept, _ = sieved(crowd(), per_prompt=2, order="shortest")
    assert kept[:2] == ["a four 4", "a three 3"]
    rated = [answer(f"{n}", number=n, reward=float(n % 3), correct=None) for n in range(6)]
    kept, dropped = sieved(rated, per_prompt=2, order="reward", correct=False)
    assert sorted(kept) == ["p 2", "p 5"] and dropped == {"per_prompt": 4}


@pytest.mark.parametrize("order", ["random", "shortest", "reward"])
def test_the_order_of_files_does_not_matter(order: str) -> None:
    answers = crowd() + [answer(f"word {n}", prompt="c", number=n) for n in range(20)]
    first = sieved(answers, order=order, per_prompt=3, solved=0.5)
    for seed in range(5):
        shuffled = random.Random(seed).sample(answers, len(answers))
        assert sieved(shuffled, order=order, per_prompt=3, solved=0.5) == first


def test_the_seed_chooses() -> None:
    answers = [answer(f"word {n}", number=n) for n in range(50)]
    assert sieved(answers, seed=1) == sieved(answers, seed=1)
    assert sieved(answers, seed=1) != sieved(answers, seed=2)


def test_an_equal_answer_with_a_higher_reward_comes_back() -> None:
    """It had been pushed out by better ones: its own better twin decides, whenever it comes."""
    rated = [answer(t, number=n, reward=r) for n, (t, r) in enumerate(
        [("a", 0.0), ("b", 1.0), ("a", 2.0), ("c", 0.5)]
    )]  # fmt: skip
    assert sieved(rated, order="reward", per_prompt=1)[0] == ["p a"]
    assert sieved(rated[::-1], order="reward", per_prompt=1) == sieved(
        rated, order="reward", per_prompt=1
    )


def test_thinning_takes_about_the_share() -> None:
    answers = [answer("same", prompt=f"prompt {n}") for n in range(400)]
    kept, dropped = sieved(answers, solved=0.25)
    assert 70 < len(kept) < 130 and dropped == {"solved": 400 - len(kept)}
    more, _ = sieved(answers, solved=0.5)
    assert set(kept) < set(more)  # a larger share keeps what a smaller one kept


def test_a_selection_adds_up() -> None:
    places = tuple(AnswerPlace("runs/a", 1, 0, n, 7, 0) for n in range(4))
    found = KeptAnswers("digest", places, {"wrong": 6}).without([1, 3], "mix")
    assert found.total == 10 and found.facts()["dropped"] == {"wrong": 6, "mix": 2}
    assert [line["sample"] for line in found.lines()] == [0, 2]
    assert "2 of 10 kept" in found.line() and "6 wrong" in found.line()
    other = replace(found, places=found.places[::-1])
    assert other.facts()["digest"] != found.facts()["digest"]
