"""Pages of answers: a step's own numbers, groups in order, and words in all of its samples."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from viewing import get, make_run, sample, viewing

from groupwise.runfiles import rollouts
from groupwise.runfiles.partial import PartialReader
from groupwise.view import chat
from groupwise.view.render import marked
from groupwise.view.runs import ViewedRun
from groupwise.view.search import TextSearch
from groupwise.view.steps import histogram


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with viewing(make_run(tmp_path_factory.mktemp("runs") / "one").path) as number:
        yield number


def groups(page: str) -> list[int]:
    return [int(n) for n in re.findall(r'/step/2/group/(\d+)"', page)]


def test_a_header_sorts_and_turns_around(port: int) -> None:
    # Means by hand: group 3 is 2, 2 is 1, 0 is a half, 1 and 4 are 0.
    page = get(port, "/runs/one/step/2?sort=mean")[1]
    assert groups(page) == [3, 2, 0, 1, 4]
    assert 'aria-sort="descending"' in page and "up=1" in page
    page = get(port, "/runs/one/step/2?sort=mean&up=1")[1]
    assert groups(page) == [1, 4, 0, 2, 3] and 'aria-sort="ascending"' in page


def test_a_step_has_its_own_numbers_and_rewards(port: int) -> None:
    page = get(port, "/runs/one/step/2")[1]
    assert "<dt>Training reward</dt><dd>0.1</dd>" in page  # step 2 of n / 20
    assert re.findall(r"<title>(.*?): (\d+)</title>", page) == [
        ("0", "10"), ("1", "7"), ("2", "1"), ("3", "1")]  # fmt: skip


def test_bars_of_many_values_hold_all_of_them() -> None:
    bars = histogram([n / 100 for n in range(100)])
    assert len(bars) == 16 and sum(count for _, _, count in bars) == 100
    assert (bars[0][0], bars[-1][1]) == (0.0, 0.99)
    assert histogram([]) == []


def test_prompts_are_told_by_what_is_their_own() -> None:
    talks = [f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{x}<|im_end|>\n"
             for x in ("one", "two")]  # fmt: skip
    assert chat.own_words(talks) == ["one", "two"]
    long = "Answer the following question with a number alone. "
    assert chat.own_words([f"{long}7+5=", f"{long}7+6="]) == ["7+5=", "7+6="]
    assert chat.own_words(["7+5=", "7+6="]) == ["7+5=", "7+6="]
    assert chat.own_words(["same " * 20, "same " * 20]) == ["same " * 20] * 2
    assert chat.own_words([]) == []


def test_samples_stand_by_advantage_and_groups_have_neighbours(port: int) -> None:
    page = get(port, "/runs/one/step/2/group/3")[1]
    order = [int(n) for n in re.findall(r'/sample/(\d+)">sample', page)]
    assert order == [1, 2, 3, 0]  # the one that is wrong is the last
    assert 'group/2" rel="prev"' in page and 'group/4" rel="next"' in page
    assert 'rel="prev"' not in get(port, "/runs/one/step/2/group/0")[1]
    page = get(port, "/runs/one/step/2/group/3?sort=number")[1]
    assert [int(n) for n in re.findall(r'/sample/(\d+)">sample', page)] == [0, 1, 2, 3]
    assert page.count("<meter") == 8  # two parts of four samples


def test_words_are_found_in_all_steps_and_the_search_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", 4)
    (run.rollout(3)).write_bytes(b"PAR1 damaged")
    viewed, seen = ViewedRun(run.path, "one"), PartialReader()
    found = TextSearch(viewed).look("AT STEP", None, seen)
    assert [row["step"] for row in found.rows] == [4] * 4 + [2] * 4 + [1] * 4
    assert (found.steps, found.before) == (4, None) and "step_3" in seen.damage[0]
    # Without patience one step at a time, each from where the one before stopped.
    first = TextSearch(viewed, patience=0).look("at step", None, PartialReader())
    assert ([row["step"] for row in first.rows], first.before) == ([4] * 4, 4)
    then = TextSearch(viewed, patience=0).look("at step", 3, PartialReader())
    assert [row["step"] for row in then.rows] == [2] * 4
    assert TextSearch(viewed).look(".*", None, PartialReader()).rows == []


def test_words_that_were_found_are_shown_and_marked(tmp_path: Path) -> None:
    """However far behind the beginning they are, and in what the grader says."""
    run = make_run(tmp_path / "one", 1)
    long = "x" * 3000 + " <b>Needle</b> " + "y" * 3000
    rollouts.write(run.rollout(1), [sample(0, 0, long), sample(0, 1, "4", answer="needles")], 1)
    with viewing(run.path) as port:
        page = get(port, "/runs/one/search?q=needle")[1]
    assert page.count("<mark>") == 2 and "… xxx" in page
    assert "&lt;b&gt;<mark>Needle</mark>&lt;/b&gt; yyy" in page
    assert "right answer: <mark>needle</mark>s" in page
    assert marked("a.b A.B", ".b", 5) == "a<mark>.b</mark> A"


def test_experts_of_each_token(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", 1)
    # A prompt of one token and three of the answer: three were read, in two layers.
    routes = np.arange(12).reshape(3, 2, 2)
    rollouts.write(run.rollout(1), [sample(0, 0, "42", routes=routes)], 1)
    with viewing(run.path) as port:
        data = json.loads(get(port, "/runs/one/step/1/group/0/sample/0/tokens")[1])
    assert data["routes"] == routes.tolist()


def test_a_critic_is_drawn_where_there_is_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", 1)
    values = np.array([0.1, 0.2], np.float32)
    rows = [sample(0, 0, "4", value=values, return_=values), sample(0, 1, "4")]
    rollouts.write(run.rollout(1), rows, 1)
    with viewing(run.path) as port:
        first, second = (get(port, f"/runs/one/step/1/group/0/sample/{n}")[1] for n in (0, 1))
    assert "The critic along the answer" in first and "The critic" not in second
