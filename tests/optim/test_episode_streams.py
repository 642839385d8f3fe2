"""What rows say of their turns, their tree and their age: streams by hand."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from graded_rollouts import interrupted, rollout

from groupwise.errors import DataError
from groupwise.groups.trees import subtrees
from groupwise.optim.row_streams import ages, check_states, streams_of_rows
from groupwise.records import Episode, Rollout, TurnFacts, VersionRun


def played(row: Rollout, *turns: TurnFacts) -> Rollout:
    return replace(row, completion=replace(row.completion, episode=Episode("done", turns)))


def streams(rows: list[Rollout], *names: str, **weights: float) -> dict[str, Any]:
    width = max(len(row.completion.token_ids) for row in rows)
    mask_NT = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        own_T = row.completion.mask_T
        mask_NT[number, : len(row.completion.token_ids)] = True if own_T is None else own_T
    return streams_of_rows(names, rows, mask_NT, weights)


CALLS = ("turn_reward_N", "outcome_reward_N", "result_start_N")


def test_the_first_call_is_paid_apart_from_the_rest() -> None:
    """The turn's reward as it is in the reward, weighed; a row that no one answered has no call."""
    rows = [
        played(interrupted("abc", "xyz", "de", 3.0), TurnFacts(0.5), TurnFacts(2.0)),
        played(interrupted("a", "x", "de", 1.0), TurnFacts(None), TurnFacts(1.0)),
        played(rollout("abcd", 2.0), TurnFacts(2.0)),
    ]
    found = streams(rows, *CALLS, environment=2.0)
    assert found["result_start_N"].tolist() == [3, 1, -1]
    assert found["turn_reward_N"].tolist() == [1.0, 0.0, 0.0]
    assert found["outcome_reward_N"].tolist() == [2.0, 1.0, 2.0]


def test_equal_states_have_one_number_and_turns_without_a_name_are_alone() -> None:
    rows = [
        played(interrupted("ab", "x", "cd", 1.0), TurnFacts(state="s"), TurnFacts(state="t")),
        played(interrupted("a", "xy", "c", 1.0), TurnFacts(state="t"), TurnFacts()),
        played(interrupted("a", "x", "c", 1.0), TurnFacts(), TurnFacts(state="s")),
    ]
    state_NT = streams(rows, "state_NT")["state_NT"]
    s, t, none, other = (state_NT[r, c].item() for r, c in ((0, 1), (0, 4), (1, 3), (2, 0)))
    assert len({s, t, none, other}) == 4 and 0 not in (s, t, none, other)
    assert state_NT.tolist() == [[0, s, 0, 0, t], [t, 0, 0, none, 0], [other, 0, s, 0, 0]]


def test_an_environment_without_states_is_refused_and_failed_ones_are_not_its_fault() -> None:
    row = interrupted("ab", "x", "cd", 1.0)
    with pytest.raises(DataError, match=r"names no state.*state\(\)"):
        check_states([played(row, TurnFacts(), TurnFacts())])
    check_states([played(row, TurnFacts(), TurnFacts(state="s"))])
    failed = replace(row.completion, episode=Episode("error", (TurnFacts(), TurnFacts())))
    check_states([replace(row, completion=failed)])


def test_peers_are_of_one_role_and_began_in_one_state() -> None:
    def row(role: int, state: str | None) -> Rollout:
        made = played(rollout("ab", 1.0), TurnFacts(state=state))
        return replace(made, task=replace(made.task, columns={"role": role}))

    rows = [row(0, "a"), row(0, "b"), row(1, "a"), row(0, "a"), row(0, None), row(0, None)]
    assert streams(rows, "peer_N")["peer_N"].tolist() == [0, 1, 2, 0, 3, 3]


def test_a_tokens_age_is_counted_in_updates() -> None:
    old = rollout("abc", 1.0)
    runs = (VersionRun(2, 1), VersionRun(5, 2))
    mixed = replace(old, completion=replace(old.completion, version=2, runs=runs))
    new = rollout("ab", 1.0, version=7)
    assert ages([[mixed], [new]], 7).tolist() == [[5.0, 2.0, 2.0], [0.0, 0.0, 0.0]]


# --- trees ----------------------------------------------------------------------------------------


def test_answers_part_where_their_tokens_do() -> None:
    """A root for each group; equal answers are one leaf, and one that ends goes its own way."""
    answers = [(1, 2, 3), (1, 2, 4), (1, 5), (1, 5), (9,), (1,), (7,), (7,)]
    found = subtrees(answers, [0, 0, 0, 0, 0, 0, 1, 1]).tolist()
    shape = [[number >= 0 for number in path] for path in found]
    assert (
        shape
        == [[True] * 3] * 2
        + [[True, True, False]] * 2
        + [[True, False, False]]
        + [[True, True, False]]
        + [[True, False, False]] * 2
    )
    assert len({path[0] for path in found[:6]}) == 1 and found[6][0] == found[7][0] != found[0][0]
    assert found[0] == found[1] and found[2] == found[3] == [found[0][0], found[0][1], -1]


@pytest.mark.parametrize("seed", range(20))
def test_two_answers_share_a_subtree_for_every_place_where_a_third_leaves_them(seed: int) -> None:
    """Against the definition: nodes are beginnings behind which the group's answers part."""
    chance = random.Random(seed)
    answers = [tuple(chance.choices((1, 2), k=chance.randint(1, 5))) for _ in range(6)]
    found = subtrees(answers, [0] * 6).tolist()

    def parts_behind(begin: tuple[int, ...]) -> bool:
        under = [x for x in answers if x[: len(begin)] == begin]
        ways = {x[len(begin) : len(begin) + 1] for x in under}
        return len(ways) > 1

    for (a, one), (b, two) in itertools.combinations(zip(answers, found, strict=True), 2):
        common = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                      min(len(a), len(b)))  # fmt: skip
        nodes = sum(parts_behind(a[:n]) for n in range(common + 1))
        shared = sum(x == y >= 0 for x, y in zip(one, two, strict=True))
        assert shared == max(nodes, 1)
