"""Traps of sharded learners, by what they would do here: sums, precision, delivery, leaks."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from typing import Any, cast

import cold_start
import pytest
import team_cases
import torch
from model_zoo import make
from runs import quiet
from teams import Failure, Ranks, ranks
from torch import Tensor

from groupwise import config
from groupwise.common.progress import Watcher
from groupwise.errors import RunError
from groupwise.model.scalar_head import ScalarHead
from groupwise.optim.learner import Learner
from groupwise.optim.packs import Sequences, even, micro_batches, outputs
from groupwise.parallel.sharding import checksum, gathered, own_part, part, stored_dtype
from groupwise.parallel.shards import is_shard
from groupwise.parallel.team import joined
from groupwise.parallel.world import ALONE, World
from groupwise.training import loop, together

ROWS = Sequences([(1, 2, 3), (4, 5)], [(6, 7, 8, 9), (10, 11)])
OPTIM = config.Optim(learning_rate=1e-2, clip_norm=0.0)


@pytest.fixture(scope="module")
def team() -> Iterator[Ranks]:
    with ranks(3) as made:
        yield made


# --- what the ranks do ---------------------------------------------------------------------------


def said(world: World, dtype: torch.dtype, recompute: bool) -> dict[str, Any]:
    """A policy with a score in float32 beside it, whole and sharded: what both say of rows."""
    whole = make("qwen3").to(dtype)
    learner = Learner(whole, OPTIM, 1.0, {}, world)
    learner.model.recompute = recompute
    tables: set[torch.dtype] = set()
    for layer in cast(Any, learner.model).model.layers:  # behind what sharding does to its inputs
        layer.register_forward_pre_hook(
            lambda _, given: tables.update((given[2].dtype, given[3].dtype))
        )
    pack = ROWS.pack([0, 1])
    mine, theirs = (outputs(m, pack, temperature=1.0)["logp_NT"] for m in (learner.model, whole))
    for turn in world.deal([3, 2]):
        world.begin(turn)
        logp_NT = outputs(learner.model, ROWS.pack([turn.number]), temperature=1.0)["logp_NT"]
        (logp_NT.sum() if turn.counts else logp_NT.sum() * 0.0).backward()
    kinds = {"shard": set(), "held": set(), "stored": set(), "gradient": set()}
    for parameter in learner.own.parameters():
        assert parameter.grad is not None
        kinds["shard"].add(is_shard(parameter))
        kinds["held"].add(parameter.dtype)
        kinds["stored"].add(stored_dtype(parameter))
        kinds["gradient"].add(part(parameter.grad).dtype)
    head = ScalarHead(whole)
    torch.nn.init.ones_(head.score.weight)
    attend = whole.ops.attention(pack.prompts, pack.behind, "cpu")
    numbers = [
        h(pack.token_T, pack.position_T, attend, pack.take_A) for h in (head, world.shard(head))
    ]
    slope = gathered(dict(learner.own.named_parameters())["model.norm.weight"].grad)
    return {"said": (mine.detach(), theirs.detach()), "kinds": kinds, "numbers": numbers,
            "slope": slope, "tables": tables}  # fmt: skip


def delivered(world: World, times: int) -> dict[str, Any]:
    """Weights that change and are gathered again and again."""
    whole = make("qwen3_tied")
    learner = Learner(whole, OPTIM, 1.0, {}, world)
    with torch.no_grad():
        for parameter in learner.own.parameters():
            part(parameter).add_(1.0)
    before = learner.undelivered()
    tensors = []
    for _ in range(times):
        learner.deliver()
        gc.collect()
        tensors.append(sum(isinstance(x, Tensor) for x in gc.get_objects()))
    wanted = {name: x.detach() + 1.0 for name, x in make("qwen3_tied").named_parameters()}
    right = all(torch.equal(x, wanted[name]) for name, x in whole.named_parameters())
    return {"before": before, "after": learner.undelivered(), "right": right, "tensors": tensors}


def cut(world: World) -> dict[str, Any]:
    """How passes are dealt, and what a shard is of."""
    rows = [torch.arange(n * 3.0).view(n, 3) for n in (1, 2, 5, 7)]
    model = torch.nn.Module()
    for number, x in enumerate(rows):
        model.register_parameter(f"x{number}", torch.nn.Parameter(x.clone()))
    own = dict(world.shard(model).named_parameters())
    for number, x in enumerate(rows):
        assert torch.equal(part(own[f"x{number}"]), own_part(own[f"x{number}"], x))
    return {"turns": [world.deal(costs) for costs in ([9, 1, 1, 1, 4], [5], [2, 2, 2])]}


def undelivered(world: World, model: str, folder: str) -> Any:
    """A run whose weights never reach the sampler of one rank."""
    deliver = Learner.deliver
    if world.rank == 1:

        def lazy(self: Learner) -> None:
            kept = {n: p.detach().clone() for n, p in self.whole.named_parameters()}
            deliver(self)
            for name, parameter in self.whole.named_parameters():
                parameter.data.copy_(kept[name])

        Learner.deliver = lazy  # type: ignore[method-assign]
    try:
        return loop.train(cold_start.configured(model, steps=2), folder, quiet())
    finally:
        Learner.deliver = deliver  # type: ignore[method-assign]


def not_finite(world: World) -> list[Any]:
    """One rank alone sees a loss that is no number: all skip, and all know whose it was."""
    learner = Learner(make("qwen3"), OPTIM, 1.0, {}, world)
    before = [part(p).clone() for p in learner.own.parameters()]

    def accumulate() -> list[Any]:
        outputs(learner.model, ROWS.pack([0]), temperature=1.0)["logp_NT"].sum().backward()
        bad = float("nan") if world.rank == 1 else 1.0
        return [("the loss", torch.tensor([bad]))]

    outcome = learner.update(accumulate, 1e-2)
    same = all(
        torch.equal(a, part(b)) for a, b in zip(before, learner.own.parameters(), strict=True)
    )
    return [outcome.skipped, outcome.bad, same, learner.optimizer.steps]


# --- what must be so -----------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sharded_model_says_the_same_in_every_precision(
    dtype: torch.dtype, recompute: bool, team: Ranks
) -> None:
    """Traps 4 to 7: all parameters are shards, gradients are sums, rotary tables and the score
    stay float32, activations are no wider than they were."""
    whole = make("qwen3").to(dtype)
    for row in (0, 1):
        logp_NT = outputs(whole, ROWS.pack([row]), temperature=1.0)["logp_NT"]
        logp_NT.sum().backward()  # type: ignore[no-untyped-call]
    expected = whole.model.norm.weight.grad
    assert expected is not None
    for one in team.run(3, said, dtype, recompute):
        assert torch.equal(*one["said"]) and torch.equal(*one["numbers"])
        assert one["kinds"]["shard"] == {True} and one["kinds"]["stored"] == {dtype}
        assert one["tables"] == {torch.float32}
        assert one["kinds"]["held"] == one["kinds"]["gradient"] == {torch.float32}
        limit = 1e-6 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(one["slope"].float(), expected.float(), rtol=limit, atol=limit)


def test_weights_arrive_whole_and_leave_nothing_behind(team: Ranks) -> None:
    """Traps 1, 10 and 13: gathered on every rank, a tied head too; no tensor more, sync after
    sync; what was not gathered is found out."""
    for one in team.run(3, delivered, 6):
        assert one["before"] == "model.embed_tokens.weight" and one["after"] is None
        found = one["tensors"][1:]
        # What a sum between ranks has just let go of may still be there at one look, not at all.
        assert one["right"] and min(found[:2]) == min(found[2:])


def test_weights_that_did_not_arrive_stop_the_run(team: Ranks, model: str, tmp_path: Any) -> None:
    found = team.try_to(2, undelivered, model, str(tmp_path / "run"))
    for each in found:
        assert isinstance(each, Failure)
        assert "the weights that rank 1 samples from are not those that were learned" in each.said


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cold_start.make(tmp_path_factory.mktemp("start") / "model")


def test_passes_are_dealt_by_their_size_and_equally_many(team: Ranks) -> None:
    found = [one["turns"] for one in team.run(2, cut)]
    first, second = ([[turn.number for turn in turns] for turns in each] for each in found)
    assert (first[0], second[0]) == ([0, 3, 1], [1, 2, 4])  # 9 + 1 and company, 1 + 1 + 4
    assert [turn.counts for turn in found[0][0]] == [True, True, False]
    assert (first[1], second[1]) == ([0], [0])
    assert [found[0][1][0].counts, found[1][1][0].counts] == [True, False]
    assert all(turns[-1].last and not any(t.last for t in turns[:-1]) for x in found for turns in x)


def test_an_update_that_is_not_finite_on_one_rank_is_skipped_by_all(team: Ranks) -> None:
    for skipped, bad, same, steps in team.run(2, not_finite):
        assert skipped and same and steps == 0
        assert bad == "the loss has 1 NaN and 0 infinite of 1 values"


def test_a_checksum_sees_one_bit_of_any_parameter() -> None:
    """Wherever its memory begins: projections may lie in one piece, one behind the other."""
    laid = torch.arange(7.0, dtype=torch.bfloat16)
    made = torch.nn.ParameterList([laid[:3], laid[3:], torch.tensor(2.5)])
    before = checksum(made)
    for parameter in made:
        parameter.data.view(-1)[-1] *= 1 + 2**-7
        assert checksum(made) != before
        before = checksum(made)


@pytest.mark.parametrize("groups", [(1,), (2, 1)])
def test_ranks_without_rows_keep_the_others_company(groups: tuple[int, ...], team: Ranks) -> None:
    """One row for three ranks: two have nothing to learn from, and hold parts of the gradient."""
    whole = team_cases.gradient(ALONE, "reinforce", groups)["gradients"]
    for one in team.run(3, team_cases.gradient, "reinforce", groups):
        torch.testing.assert_close(one["gradients"], whole, rtol=1e-12, atol=1e-12)


def test_a_tied_head_has_both_gradients(team: Ranks) -> None:
    whole = team_cases.gradient(ALONE, "grpo", tied=True)["gradients"]
    for one in team.run(2, tied):
        torch.testing.assert_close(one["gradients"], whole, rtol=1e-12, atol=1e-12)


def test_gradients_may_be_added_up_behind_every_pass(team: Ranks) -> None:
    """Where whole sums would take too much memory."""
    whole = team_cases.gradient(ALONE, "grpo")["gradients"]
    for one in team.run(2, without_room):
        torch.testing.assert_close(one["gradients"], whole, rtol=1e-12, atol=1e-12)


def without_room(world: Any) -> Any:
    world.room = 0.0
    return team_cases.gradient(world, "grpo")


def tied(world: World) -> Any:
    return team_cases.gradient(world, "grpo", tied=True)


def test_micro_batches_are_even_and_as_few_as_the_budget_allows() -> None:
    lengths = [9, 1, 1, 1, 4, 4, 2, 2]
    rows = Sequences([(1,)] * 8, [tuple(range(n + 1)) for n in lengths])

    def parts(budget: int) -> list[list[int]]:
        return micro_batches(rows, range(8), budget)

    assert even(parts, 100, 1) == parts(100)
    two = even(parts, 100, 2)
    assert len(two) == 2 and [sum(lengths[r] for r in part) for part in two] == [12, 12]
    assert len(even(parts, 14, 2)) == 2 and len(even(parts, 11, 3)) == 3
    assert even(parts, 1, 3) == [[row] for row in range(8)]


def test_errors_of_one_rank_reach_all_others(team: Ranks) -> None:
    found = team.try_to(3, fails_on, 1)
    assert [each.said for each in found] == ["only here"] * 3
    assert [each.kind for each in found] == ["RunError"] * 3


def fails_on(world: World, rank: int) -> None:
    def work() -> None:
        if world.rank == rank:
            raise RunError("only here")

    world.together(work)


def test_a_port_in_use_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", **where}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RunError, match=f"127.0.0.1:{port}.*another --master-port"):
            joined(deadline=5.0)


def test_who_waits_for_ranks_that_do_not_come_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to half an hour, where one was not started or has another address."""
    where = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node", "MASTER_PORT": "29400"}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    watcher = Watcher(lambda line: None, live=False)
    doing: list[str] = []
    monkeypatch.setattr(together, "joined", lambda: doing.append(watcher.doing()) or ALONE)
    with watcher, watcher.watching():
        assert watcher.doing() == "getting ready"
        assert together.met() is ALONE
        assert watcher.doing() == "going on from waiting for the other ranks at node:29400"
        monkeypatch.setenv("WORLD_SIZE", "1")
        together.met()
    assert doing[0].startswith("waiting for the other ranks at node:29400, 0:00, at most 30:00")
    assert doing[1].startswith("going on from")


def test_one_process_of_torchrun_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes the same path as without it."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert joined() is ALONE
