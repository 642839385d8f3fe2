"""One update by two ranks on two cores against one process on one core.

    python benchmarks/ranks.py [--repeats 3] [--layers 30] [--tokens 256]

A model of SmolLM2-135M's shape with random weights, float32: 8 prompts of 32 tokens, each with one
answer of --tokens tokens (2,048 in all), one forward and backward pass and one optimizer step of
`grpo`. One thread a process. The two take turns, so that whatever else the machine does meets both;
the best of each counts. `busy` is processor time of the busiest process: on a machine with other
work it says more than the clock, and knows nothing of time spent waiting for the other rank.
"""

from __future__ import annotations

import argparse
import time
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from groupwise import TokenBatch, batch_phase, config, recipe
from groupwise.model.config import ModelConfig
from groupwise.model.layers.transformer import Transformer
from groupwise.optim.learner import PolicyLearner
from groupwise.optim.packs import Sequences
from groupwise.optim.schedules import LearningRates
from groupwise.parallel.team import Team
from groupwise.parallel.world import ALONE, World

PROMPTS, PROMPT = 8, 32
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 1e5,
    "tie_word_embeddings": True,
}


def measure(world: World, layers: int, tokens: int, repeats: int) -> list[tuple[float, float]]:
    """Return seconds and processor seconds of each update, behind one that is not counted."""
    shape = ModelConfig.from_hf(SHAPE | {"num_hidden_layers": layers})
    model = Transformer(shape).initialise(torch.Generator().manual_seed(0))
    made = recipe("reinforce")
    optim = config.Optim(learning_rate=1e-6, micro_tokens=1024)
    learner = PolicyLearner(model, made, optim, 1.0, {}, world)
    drawn = torch.Generator().manual_seed(1)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(49152, (count,), generator=drawn).tolist())

    rows = Sequences([ids(PROMPT) for _ in range(PROMPTS)], [ids(tokens) for _ in range(PROMPTS)])
    mask_NT = rows.mask()
    reward_N = torch.arange(PROMPTS) % 2 * 1.0
    batch = TokenBatch.build(
        mask_NT=mask_NT,
        group_N=torch.arange(PROMPTS) // 2,
        reward_N=reward_N,
        sampler_logp_NT=torch.full(mask_NT.shape, -10.0),
        world=world.for_rows(PROMPTS),
    )
    batch = batch_phase(made, batch).batch
    parts, found = [list(range(PROMPTS))], []
    for _ in range(repeats + 1):
        begun, busy = time.perf_counter(), time.process_time()
        learner.learn(batch, rows, parts, LearningRates(1e-6, {}))
        found.append((time.perf_counter() - begun, time.process_time() - busy))
    return found[1:]


def one_rank(rank: int, size: int, folder: str, given: tuple[int, int, int]) -> None:
    torch.set_num_threads(1)
    world = ALONE
    if size > 1:
        store = dist.FileStore(f"{folder}/meeting{size}", size)
        limit = timedelta(seconds=600)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        world = Team()
    torch.save(measure(world, *given), f"{folder}/{size}_{rank}.pt")
    world.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    best: dict[int, tuple[float, float]] = {}
    with TemporaryDirectory() as folder:
        for size in (1, 2):
            given = (args.layers, args.tokens, args.repeats)
            mp.spawn(one_rank, args=(size, folder, given), nprocs=size)
            ranks = [torch.load(Path(folder) / f"{size}_{rank}.pt") for rank in range(size)]
            seconds = min(max(one[0] for one in each) for each in zip(*ranks, strict=True))
            busy = min(max(one[1] for one in each) for each in zip(*ranks, strict=True))
            best[size] = seconds, busy
            print(f"{size} rank{'s' * (size > 1)}: {seconds:.2f} s an update, busy {busy:.2f} s")
    clock, busy = (best[1][which] / best[2][which] for which in (0, 1))
    print(f"two ranks against one: {clock:.2f}x by the clock, {busy:.2f}x by processor time")


if __name__ == "__main__":
    main()
