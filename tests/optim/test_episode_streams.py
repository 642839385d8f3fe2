"""What rows say of their turns, their tree and their age: streams by hand."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from graded_rollouts import rollout

from groupwise.groups.trees import subtrees
from groupwise.optim.row_streams import ages, streams_of_rows
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
