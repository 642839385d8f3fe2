"""Prompts that are too easy or too hard come less often; everything else stays as it was."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from runs import small

from groupwise.config.fields import CurriculumSettings
from groupwise.data.curriculum import Curriculum, measures
from groupwise.data.cursor import Cursor, MixedCursor
from groupwise.errors import ConfigError
from groupwise.records import Task
from groupwise.stages.checks import check_config
from groupwise.stages.describe import describe

QUARTER = CurriculumSettings(easy=0.25, hard=0.5)


def tasks_of(count: int, source: str = "", first: int = 0) -> list[Task]:
    return [Task(first + n, f"{first + n}", source=source) for n in range(count)]


def test_the_running_rate_by_hand() -> None:
    """1, then half of the way to 0, then half of the way to a half."""
    found = Curriculum(CurriculumSettings(newest=0.5))
    for share, rate in ((1.0, 1.0), (0.0, 0.5), (0.5, 0.5), (1.0, 0.75)):
        found.note(7, share)
        assert found.rates == {7: rate}


def test_buckets_have_their_ends() -> None:
    found = Curriculum(CurriculumSettings(above=0.9, below=0.1))
    for prompt, share in enumerate((0.0, 0.1, 0.11, 0.89, 0.9, 1.0)):
        found.note(prompt, share)
    buckets = [found.bucket(prompt) for prompt in range(7)]
    assert buckets == ["hard", "hard", "between", "between", "easy", "easy", None]
    assert measures([found]) == {
        "curriculum/known": 6.0,
        "curriculum/easy_share": 2 / 6,
        "curriculum/hard_share": 2 / 6,
        "curriculum/passed_over": 0.0,
    }
    assert measures([]) == measures([Curriculum(QUARTER)]) == {}


def test_prompts_come_as_often_as_they_are_worth() -> None:
    tasks = tasks_of(30)
    cursor = Cursor(tasks, seed=1, curriculum=QUARTER)
    for task in tasks:
        cursor.note(task, (0.0, 0.5, 1.0)[task.id % 3])
    counts = Counter(draw.task % 3 for draw in cursor.take(17_500))
    # Of a thousand passes over 10 prompts each: a half, all, a quarter; by chance within 4 sigma.
    for bucket, share in enumerate((0.5, 1.0, 0.25)):
        spread = 4 * (10_000 * share * (1 - share)) ** 0.5
        assert abs(counts[bucket] - 10_000 * share) <= spread + 100  # of the last pass
    assert cursor.drawn == 17_500


def test_draw_numbers_are_passes_and_never_repeat() -> None:
    """A sample's key is that of a run without a curriculum: the same prompt, the same number."""
    tasks = tasks_of(5)
    cursor = Cursor(tasks, seed=0, curriculum=QUARTER)
    for task in tasks:
        cursor.note(task, 1.0)
    drawn = cursor.take(50)
    assert len(set(drawn)) == 50
    without = Cursor(tasks, seed=0).take(5 * (cursor.epoch + 1))
    assert [draw for draw in without if draw in set(drawn)] == drawn


def test_what_nothing_is_known_of_is_drawn_as_ever() -> None:
    assert Cursor(tasks_of(9), 3, curriculum=QUARTER).take(20) == Cursor(tasks_of(9), 3).take(20)


def noted(cursor: Cursor | MixedCursor, tasks: list[Task]) -> None:
    for task in tasks:
        cursor.note(task, task.id % 4 / 3)


@pytest.mark.parametrize("weights", [{}, {"a": 3.0, "b": 1.0}])
def test_the_state_goes_on_where_it_was(weights: dict[str, float]) -> None:
    tasks = tasks_of(12, "a") + tasks_of(8, "b", first=12)

    def made(rule: CurriculumSettings | None = QUARTER) -> Cursor | MixedCursor:
        return (
            MixedCursor(tasks, weights, 5, True, rule) if weights else Cursor(tasks, 5, True, rule)
        )

    whole, first, second = made(), made(), made()
    noted(whole, tasks), noted(first, tasks)
    expected = whole.take(60)
    begun = first.take(23)
    second.restore(first.state())
    assert begun + second.take(37) == expected
    assert second.state() == whole.state()
    # A run may take one up, or leave it: the place in the data is the same.
    plain = made(None)
    plain.restore(first.state())
    later = made()
    later.restore(plain.state())
    assert not any(each.rates for each in later.curricula)


def test_a_mixture_keeps_its_shares_of_what_is_drawn() -> None:
    """What is passed over counts for nobody."""
    tasks = tasks_of(10, "a") + tasks_of(10, "b", first=10)
    cursor = MixedCursor(tasks, {"a": 1.0, "b": 1.0}, 0, True, QUARTER)
    for task in tasks[:10]:
        cursor.note(task, 1.0)
    drawn = [tasks[draw.task].source for number in range(10) for draw in cursor.take(7)]
    assert Counter(drawn) == {"a": 35, "b": 35}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipe": "sft", "curriculum.easy": 0.5}, "learns from answers of the data"),
        ({"recipe": "dpo", "curriculum.hard": 0.5}, "learns from pairs of answers"),
        ({"recipe": "self_rewarding", "curriculum.easy": 0.5}, "the policy itself says"),
        ({"recipe": "distill", "curriculum.easy": 0.5}, "distill, which reads no rewards"),
        ({"curriculum.above": 0.8}, "Set curriculum.easy below 1"),
        ({"curriculum.newest": 0.8}, "Set curriculum.easy or curriculum.hard below 1"),
        ({"curriculum.easy": 0.5, "curriculum.above": 0.1}, "Move them apart"),
        ({"curriculum.easy": 0.0}, "curriculum.easy"),
    ],
)
def test_where_it_can_do_nothing_it_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_config(small(**{"recipe": "grpo"} | changes))


def test_a_run_says_which_prompts_come_less_often() -> None:
    lines = describe(small(curriculum__easy=0.25))
    assert (
        "prompts that are too easy (passed in at least 90%) are drawn at 25% of their turns"
        in lines
    )
