"""Values of steps from graded branches: by hand, in odd cases, and on an enumerated policy."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from groupwise.engine.batch import BatchEngine
from groupwise.engine.protocol import Capabilities, Request, Sampling
from groupwise.engine.randomness import key, uniforms
from groupwise.groups.credit import step_difference
from groupwise.optim.assemble import Group
from groupwise.optim.step_values import value_streams
from groupwise.prepare.branches import joined, write_branches
from groupwise.records import Branch, Completion, Grade, Rollout, Task, TokenBatch, Turn

TASK = Task(5, "?", token_ids=(7, 7))


def rollout(sample: int, ids: tuple[int, ...], reward: float | None, **more) -> Rollout:
    finish, branch = more.pop("finish", "eos"), more.pop("branch", None)
    done = Completion(ids, torch.zeros(len(ids)), finish, 0, **more)
    return Rollout(TASK, 0, sample, done, "", Grade(reward), branch=branch)


def branches(sample: int, at: int, *rewards: float | None, finish: str = "eos") -> Group:
    return [
        rollout(sample, (1,) * 6, reward, branch=Branch(at, number), finish=finish)
        for number, reward in enumerate(rewards)
    ]


def streams(group: Group, found: Group, **options) -> tuple[list, list]:
    made = value_streams([group], [found], **options)
    rounded = [[round(x, 6) for x in row] for row in made["step_value_NT"].tolist()]
    return rounded, made["step_end_NT"].int().tolist()


def test_values_and_ends_by_hand() -> None:
    """The first begins at the mean of the others; K = 1 for one, nine tenths for another."""
    group = [rollout(0, (1,) * 5, 1.0), rollout(1, (1, 1), 0.0), rollout(2, (1, 1), 1.0)]
    found = branches(0, 4, 1.0) + branches(0, 2, *[0.9] * 9) + branches(2, 1, 0.0, 1.0)
    assert streams(group, found) == (
        [[0, 0.5, 0, 0.9, 1.0], [0, 1.0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]],
        [[0, 1, 0, 1, 1], [0, 1, 0, 0, 0], [1, 1, 0, 0, 0]],
    )


def test_failed_grades_are_left_out_and_a_place_without_any_is_none() -> None:
    group = [rollout(0, (1,) * 4, 1.0), rollout(1, (1,) * 4, None)]
    found = branches(0, 1, 1.0, None, 0.0) + branches(0, 3, None, None)
    # Nobody else has a reward: the next place's value stands for the root.
    assert streams(group, found)[0][0] == [0.5, 0, 0, 0.5]
    assert streams(group, found)[1][0] == [1, 0, 0, 1]


def test_an_answer_alone_begins_at_branches_from_its_prompt() -> None:
    group = [rollout(4, (1,) * 3, 1.0)]
    found = branches(4, 0, 0.0, 1.0, 0.0, 0.0) + branches(4, 2, 1.0, 0.0)
    assert streams(group, found) == ([[0, 0.25, 0.5]], [[0, 1, 1]])
    assert streams(group, []) == ([[0, 0, 1.0]], [[0, 0, 1]])  # 1 − 1: nothing is learned


def test_cut_off_answers_and_branches_have_no_reward_where_they_are_dropped() -> None:
    cut = rollout(0, (1,) * 4, 1.0, finish="length")
    group = [rollout(1, (1,) * 4, 0.0), cut, rollout(2, (1,) * 4, 0.5)]
    found = branches(1, 2, 0.25) + branches(1, 2, 1.0, finish="length")
    assert streams(group, found)[0][0] == [0, 0.75, 0, 0.625]
    assert streams(group, found, drop_truncated=True)[0][0] == [0, 0.5, 0, 0.25]


def test_holes_are_in_no_step() -> None:
    """A tool wrote the third token: the step before it ends at the second, the next at its end."""
    turns = (Turn("assistant", 0, 2), Turn("tool", 2, 3), Turn("assistant", 3, 5))
    mask_T = torch.tensor([True, True, False, True, True])
    group = [rollout(0, (1,) * 5, 1.0, mask_T=mask_T, turns=turns), rollout(1, (1,), 0.0)]
    found = branches(0, 3, 0.75)
    assert streams(group, found)[0][0] == [0, 0, 0, 0, 0.75]
    assert streams(group, found)[1][0] == [0, 1, 0, 0, 1]


def test_a_whole_answer_has_the_turns_of_both() -> None:
    turns = (Turn("assistant", 0, 2), Turn("tool", 2, 3), Turn("assistant", 3, 5))
    mask_T = torch.tensor([True, True, False, True, True])
    answer = Completion((1, 2, 3, 4, 5), torch.arange(5.0), "eos", 0, mask_T=mask_T, turns=turns)
    more = Completion((8, 9), torch.tensor([-1.0, -2.0]), "length", 3)
    made = joined(answer, 4, more)
    assert made.token_ids == (1, 2, 3, 4, 8, 9) and made.finish == "length" and made.version == 3
    assert made.turns == (*turns[:2], Turn("assistant", 3, 6))  # what it says in the end is whole
    assert made.mask_T.tolist() == [True, True, False, True, True, True]
    plain = joined(Completion((1, 2), torch.zeros(2), "eos", 0), 1, more)
    assert plain.mask_T is None and plain.turns == (Turn("assistant", 0, 3),)


# --- on a policy that is enumerated ---------------------------------------------------------------

LENGTH, SIGNS = 3, 2  # every token is a step; answers are 000 to 111


def chance(prefix: tuple[int, ...]) -> float:
    """The policy: of a 1 next, different behind every prefix."""
    return 0.2 + 0.6 * math.sin(1.0 + sum((n + 1) * x for n, x in enumerate(prefix))) ** 2


def reward_of(ids: tuple[int, ...]) -> float:
    return [0.0, 1.0, 0.3, 0.0, 1.0, 0.0, 0.0, 1.0][int("".join(map(str, ids)), 2)]


def exact_value(prefix: tuple[int, ...]) -> float:
    """By enumeration of all answers that begin so."""
    total = 0.0
    for rest in itertools.product(range(SIGNS), repeat=LENGTH - len(prefix)):
        ids, weight = prefix + rest, 1.0
        for at in range(len(prefix), LENGTH):
            weight *= chance(ids[:at]) if ids[at] else 1 - chance(ids[:at])
        total += weight * reward_of(ids)
    return total


class TableEngine(BatchEngine):
    """Draws from the table, by the numbers that a request names and nothing else."""

    capabilities = Capabilities(own_randomness=False)

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def answer(self, requests, sampling):
        asked = [(each, n) for each in requests for n in range(each.samples)]
        named = [key(self.seed, each.stream, each.prompt_id, each.draw, n) for each, n in asked]
        drawn = iter(uniforms(torch.tensor(named), LENGTH).tolist())
        return [[self._one(each, next(drawn)) for _ in range(each.samples)] for each in requests]

    def _one(self, request: Request, drawn_T: list[float]) -> Completion:
        ids = request.begun_ids
        for at in range(LENGTH - request.begun):
            ids += (int(drawn_T[at] < chance(ids)),)
        own = ids[request.begun :]
        return Completion(own, torch.zeros(len(own)), "eos", 0)


def valued(answers: list[tuple[int, ...]], seed: int, number: int) -> tuple[list[Group], Group]:
    """The answers and their graded branches, as a run has them."""
    group = [rollout(n, ids, reward_of(ids)) for n, ids in enumerate(answers)]
    points = [(group[0], at) for at in range(1, LENGTH)]
    written = write_branches(TableEngine(seed), points, number, Sampling(max_tokens=LENGTH))
    found = [
        rollout(0, done.token_ids, reward_of(done.token_ids), branch=Branch(each.of[1], n))
        for each in written
        for n, done in enumerate(each.completions)
    ]
    return [group], found


@pytest.mark.parametrize(("number", "others"), [(1, 1), (9, 3)])
def test_the_mean_advantage_is_the_exact_one(number: int, others: int) -> None:
    """A(step) = Q − V by enumeration, whatever K; more branches, less spread."""
    ids = (1, 0, 1)
    values = [exact_value(ids[:at]) for at in range(LENGTH)]
    exact = [values[1] - values[0], values[2] - values[1], reward_of(ids) - values[2]]
    seeds, sums, squares = 600, torch.zeros(3).double(), torch.zeros(3).double()
    for seed in range(seeds):
        request = Request(TASK.token_ids, others, TASK.id, seed)
        (drawn,) = TableEngine(seed).generate([request], Sampling(max_tokens=LENGTH))
        groups, found = valued([ids, *(each.token_ids for each in drawn)], seed, number)
        made = value_streams(groups, [found])
        batch = TokenBatch.build(
            mask_NT=torch.ones(others + 1, LENGTH, dtype=torch.bool),
            group_N=[0] * (others + 1),
            reward_N=[r.grade.reward for r in groups[0]],
            **{name: x.double() if x.dtype != torch.bool else x for name, x in made.items()},
        )
        advantage_T = step_difference()(batch.task_reward_N, batch)[0].double()
        sums, squares = sums + advantage_T, squares + advantage_T**2
    mean = sums / seeds
    error = ((squares / seeds - mean**2) / seeds).sqrt()
    assert ((mean - torch.tensor(exact).double()).abs() < 3 * error).all()
    assert (error * math.sqrt(seeds) < 0.75 / math.sqrt(min(number, others))).all()
    assert max(map(abs, exact)) > 0.15  # there is something to find


def test_branches_are_the_same_in_any_company() -> None:
    """They are named by prompt, draw, sample, position and number alone."""
    together = valued([(1, 0, 1), (0, 0, 0)], 3, 5)[1]
    point = [(rollout(0, (1, 0, 1), 1.0), 2)]
    (alone,) = write_branches(TableEngine(3), point, 5, Sampling(max_tokens=LENGTH))
    assert [each.token_ids for each in alone.completions] == [
        r.completion.token_ids for r in together if r.branch.at == 2
    ]
