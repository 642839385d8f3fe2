"""Group sizes by pass rates: the best way to spend the answers, and the same samples as ever."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from runs import metrics, run, small

from groupwise.data.group_sizes import group_sizes
from groupwise.errors import ConfigError
from groupwise.runfiles import rollouts
from groupwise.stages.checks import check_config
from groupwise.stages.describe import describe


def worth(n: int, p: float) -> float:
    """2509.25849: the chance of a gradient that is not 0, times p(1 − p)²."""
    return (1 - p**n - (1 - p) ** n) * p * (1 - p) ** 2


@pytest.mark.parametrize(
    "rates", [(0.5, 0.1, 0.9), (0.05, 0.3, 0.3), (0.99, 0.01, 0.5), (0.2, 0.0, 1.0)]
)
@pytest.mark.parametrize("most", [6, 9])
def test_no_other_way_to_spend_them_is_better(rates: tuple[float, ...], most: int) -> None:
    """Against all ways there are, 15 answers to three prompts."""
    every = [
        n for n in product(range(2, most + 1), repeat=3) if sum(n) == 15
    ]  # all of them that spend 15
    best = max(sum(worth(n, p) for n, p in zip(each, rates, strict=True)) for each in every)
    found = group_sizes(rates, 5, least=2, most=most)
    assert tuple(found) in every
    total = sum(worth(n, p) for n, p in zip(found, rates, strict=True))
    assert total == pytest.approx(best, rel=1e-12)


def test_sizes_by_hand() -> None:
    assert group_sizes([None, None], 8) == [8, 8]  # nothing is known
    assert group_sizes([None, 1.0, 0.0], 8) == [8, 2, 14]  # to the one that was never passed
    assert group_sizes([1.0, 1.0], 8) == [8, 8]  # nothing is worth anything: as without
    assert group_sizes([0.0, 0.0, 1.0], 4) == [5, 5, 2]
    assert group_sizes([0.0, 1.0], 4, most=5) == [5, 3]
    assert group_sizes([0.5, 0.5], 3) == [3, 3]
    assert group_sizes([0.5, None, 0.5], 4, most=4) == [4, 4, 4]
    assert group_sizes([], 4) == []


def test_hard_prompts_get_more_than_easy_ones() -> None:
    easy, middle, hard = group_sizes([0.95, 0.5, 0.05], 8)
    assert easy == 2 < middle < hard and easy + middle + hard == 24


def rows(folder: Path) -> dict[tuple[int, int, int], Any]:
    """The first step's samples by their keys: prompt, draw and number."""
    found = rollouts.read(folder / "rollouts" / "step_1.parquet").to_pylist()
    return {(r["prompt_id"], r["draw"], r["sample"]): r["token_ids"] for r in found}


def test_a_sample_is_the_same_in_a_group_of_another_size(tmp_path: Path) -> None:
    """Groups of 4 and of 7 share their first four samples: a key knows nothing of the group."""
    few, many = tmp_path / "few", tmp_path / "many"
    run(few, steps=1, eval__tasks=0)
    run(many, steps=1, eval__tasks=0, group_size=7)
    assert len(rows(few)) == 16 and rows(few).items() <= rows(many).items()


def test_a_run_spends_the_same_number_of_answers(tmp_path: Path) -> None:
    run(tmp_path, steps=5, data__size=16, curriculum__group_sizes="knapsack", group_size=6)
    lines = metrics(tmp_path)[1:]
    answers = [
        rollouts.read(tmp_path / "rollouts" / f"step_{step}.parquet").num_rows
        for step in range(1, 6)
    ]
    assert answers == [24] * 5
    assert "curriculum/largest_group" not in lines[0]  # the first prompts are not known
    assert any(line.get("curriculum/largest_group", 0) > 6 for line in lines)
    assert all(line.get("curriculum/smallest_group", 2) >= 2 for line in lines)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"curriculum.most": 9}, "Set curriculum.group_sizes=knapsack"),
        ({"curriculum.group_sizes": "knapsack", "curriculum.least": 5}, "Move them"),
        ({"curriculum.group_sizes": "knapsack", "curriculum.most": 3}, "Move them"),
        ({"curriculum.group_sizes": "knapsack", "group_size": 1}, "Move them"),
        ({"curriculum.group_sizes": "knapsack", "recipe": "tis", "train.lag": 1}, "train.lag=0"),
        ({"curriculum.group_sizes": "knapsack", "turns.environment": "guess"}, "one turn"),
        ({"curriculum.group_sizes": "knapsack", "recipe": "spin"}, "would be ignored by spin"),
    ],
)
def test_where_sizes_can_follow_nothing_it_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_config(small(**{"recipe": "grpo"} | changes))


def test_a_run_says_how_many_answers_a_prompt_gets() -> None:
    lines = describe(small(curriculum__group_sizes="knapsack"))
    assert "2 to 128 answers a prompt by its pass rate, 4 on average" in lines
