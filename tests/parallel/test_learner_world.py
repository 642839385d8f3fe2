"""A learner in a world of two processes: groups on both, and one batch phase over all of them.

Beside it a policy that is sharded over the two: what works with shards, and what refuses them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from engine_zoo import tokenizer
from model_zoo import make
from torch import Tensor

from groupwise import batch_phase, config, recipe
from groupwise.engine.native.engine import NativeEngine
from groupwise.errors import ModelError
from groupwise.model.layers.fused_linear import lay_together
from groupwise.model.layers.transformer import Transformer
from groupwise.optim.assemble import Group, assemble, batch_of, group_numbers, sequences_of
from groupwise.optim.learner import PolicyLearner
from groupwise.optim.packs import outputs
from groupwise.optim.roles.length_exponent import LengthExponent
from groupwise.optim.roles.reference import Reference
from groupwise.optim.schedules import LearningRates
from groupwise.parallel.world import ALONE, Ranks, World
from groupwise.records import Completion, Grade, Rollout, Task

# Groups by themselves, a batch's statistics, filters that drop, prompts known by their own number,
# answers weighed by the batch's longest, an exponent that learns.
RECIPES = ("grpo", "dapo", "reinforce_pp", "dcpo", "lambda_grpo", "gspo")
PROMPTS = ((3, 5, 2, 4), (6, 1, 2), (2, 2), (7, 3, 4))  # lengths of the answers of each
MINE = ((0, 2, 3), (1,))  # groups of each rank: their longest answers differ
REWARDS = (1.0, 0.0, 0.25, 1.0)
OPTIM = config.Optim(learning_rate=0.0, beta1=0.0, clip_norm=0.0, micro_tokens=20)


def rollouts(numbers: tuple[int, ...]) -> list[Group]:
    generator = torch.Generator().manual_seed(3)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(97, (length,), generator=generator).tolist())

    made = []
    for number, lengths in enumerate(PROMPTS):
        task, group = Task(40 + number, "", token_ids=ids(4)), []
        for sample, length in enumerate(lengths):
            logp_T = -torch.rand(length, generator=generator) - 0.5
            completion = Completion(ids(length), logp_T, "eos", 0)
            # The third group is right throughout: a filter of equal rewards drops it.
            reward = 1.0 if number == 2 else REWARDS[(sample + number) % 4]
            grade = Grade(reward, correct=reward > 0.5)
            group.append(Rollout(task, 0, sample, completion, "", grade))
        made.append(group)
    return [made[number] for number in numbers]


def step(name: str, groups: list[Group], world: World) -> dict[str, Any]:
    """What a step makes of these groups: the streams of the batch phase, row by row, a gradient."""
    made = recipe(name, {"schedule.updates": 1})
    model = make("qwen3")
    learns = {"length_exponent": LengthExponent(torch.tensor(0.0), OPTIM)}
    roles = {role: learns[role] for role in made.roles if role in learns}
    learner = PolicyLearner(model, made, OPTIM, temperature=1.0, roles=roles, world=world)
    sequences = sequences_of(groups)
    parts = learner.parts(group_numbers(made, groups))
    streams = learner.role_streams(sequences, parts)
    for stream, seed in (("old_logp_NT", 0), ("ref_logp_NT", 1)):
        if stream in made.streams:
            other = make("qwen3", seed=seed)
            streams[stream] = learner.score(other, sequences, parts)
    batch = assemble(
        made,
        groups,
        batch_of(made, groups, tokenizer()),
        device=learner.device,
        world=learner.world,
        **streams,
    )
    done = batch_phase(made, batch)
    learner.learn(done.batch, sequences, parts, LearningRates(0.0, dict.fromkeys(roles, 0.0)))
    assert done.batch.advantage_NT is not None and done.batch.coefficient_NT is not None
    moments = [x for k, x in learner.optimizer.state().items() if k.startswith("exp_avg/")]
    mask_NT = done.batch.mask_NT
    return {
        "advantage": [a[m] for a, m in zip(done.batch.advantage_NT, mask_NT, strict=True)],
        "coefficient": [u[m] for u, m in zip(done.batch.coefficient_NT, mask_NT, strict=True)],
        "metrics": done.metrics,
        "refill": len(done.refill),
        "visits": dict(done.memory.visits),
        "gradient": torch.cat([x.flatten() for x in moments]),
    }


def sharded() -> dict[str, Any]:
    """A policy whose parameters lie on both ranks: what it says, learns and refuses."""
    from torch.distributed.fsdp import fully_shard

    found: dict[str, Any] = {}
    pack = sequences_of(rollouts((0, 1))).pack([0, 1, 2, 4], "cpu")
    for kind in ("whole", "sharded"):
        model = make("qwen3")
        if kind == "sharded":
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
        logp_NT = outputs(model, pack, temperature=0.7)["logp_NT"]
        logp_NT.sum().backward()  # type: ignore[no-untyped-call]
        slope = model.head_weight.grad
        assert slope is not None
        found[kind] = (logp_NT.detach(), slope.full_tensor() if kind == "sharded" else slope)
        attention = model.layers[0].self_attn
        tries: dict[str, Callable[[], Any]] = {
            "projections": lambda a=attention: lay_together([a.q_proj, a.k_proj]),
            "engine": lambda m=model: NativeEngine(m, tokenizer(), seed=0, slots=1),
            "reference": lambda m=model: Reference(m, "frozen"),
        }
        found[f"{kind} refuses"] = {name: _refusal(work) for name, work in tries.items()}
    return found


def _refusal(work: Callable[[], Any]) -> str:
    try:
        work()
    except ModelError as error:
        return str(error)
    return ""


def one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(folder) / "meeting"), 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=120),
    )
    world = Ranks()
    found = {name: step(name, rollouts(MINE[rank]), world) for name in RECIPES}
    torch.save(found | {"sharded": sharded()}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(one_rank, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


@functools.cache
def alone(name: str) -> dict[str, Any]:
    """One process with the groups of all, in the order of the ranks."""
    return step(name, rollouts((*MINE[0], *MINE[1])), ALONE)


def same(found: Any, expected: Any, limit: float) -> None:
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("name", RECIPES)
def test_two_processes_weigh_every_token_as_one_does(
    name: str, ranks: list[dict[str, Any]]
) -> None:
    whole = alone(name)
    assert max(float(a.abs().max()) for a in whole["advantage"]) > 0.1
    for stream in ("advantage", "coefficient"):
        same([row for one in ranks for row in one[name][stream]], whole[stream], 1e-5)
    for one in ranks:
        same(one[name]["metrics"], whole["metrics"], 1e-5)
        assert one[name]["refill"] == whole["refill"]
        assert one[name]["visits"].keys() == whole["visits"].keys()


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_of_two_learners_add_up_to_that_of_one(
    name: str, ranks: list[dict[str, Any]]
) -> None:
    expected: Tensor = alone(name)["gradient"]
    assert float(expected.norm()) > 1e-4
    found = sum(one[name]["gradient"] for one in ranks)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_groups_of_two_ranks_have_numbers_of_their_own(ranks: list[dict[str, Any]]) -> None:
    """Counted by each rank from 0, the first groups of both would be one."""
    assert [one["grpo"]["metrics"]["groups/count"] for one in ranks] == [4.0, 4.0]


def test_a_sharded_policy_says_and_learns_what_a_whole_one_does(
    ranks: list[dict[str, Any]],
) -> None:
    """Its head is gathered, because `forward` reads it."""
    for one in ranks:
        (logp_NT, slope), (whole_NT, expected) = one["sharded"]["sharded"], one["sharded"]["whole"]
        same(logp_NT, whole_NT, 1e-5)
        same(slope, expected, 1e-4)
        assert slope.shape == (97, 48) and float(slope.abs().max()) > 0.1


@pytest.mark.parametrize(
    ("work", "words"),
    [
        ("projections", "Laying projections together in memory needs whole parameters"),
        ("engine", "The native engine needs whole parameters"),
        ("reference", "A copy of the policy needs whole parameters"),
    ],
)
def test_what_needs_whole_parameters_refuses_shards(
    work: str, words: str, ranks: list[dict[str, Any]]
) -> None:
    for one in ranks:
        assert one["sharded"]["whole refuses"][work] == ""
        text = one["sharded"]["sharded refuses"][work]
        assert words in text and "this process holds" in text and "sharded" in text


def test_a_policy_says_when_its_parameters_lie_elsewhere() -> None:
    """Moved, replaced or laid out anew; not when they learn or are filled."""
    model = make("smollm2")
    seen = [model.placement]

    def moved(work: Callable[[Transformer], Any]) -> bool:
        work(model)
        seen.append(model.placement)
        return seen[-1] != seen[-2]

    assert moved(lambda m: m.to(torch.float64)) and moved(lambda m: m.float())
    state = {name: x.clone() for name, x in model.state_dict().items()}
    assert not moved(lambda m: m.load_state_dict(state))
    assert not moved(lambda m: [p.grad_dtype for p in m.parameters()])
    with torch.no_grad():
        assert not moved(lambda m: [p.mul_(0.5) for p in m.parameters()])
    assert moved(lambda m: m.load_state_dict(state, assign=True))
