"""Random weights of known shapes: how the cost of sampling and learning grows."""

from __future__ import annotations

import argparse
import gc
import random
import string
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from afterwards import update_floor

from groupwise.config import Config, load
from groupwise.errors import GroupwiseError, ModelError
from groupwise.groups.phase import batch_phase
from groupwise.methods.composition import Recipe
from groupwise.model.config import ModelConfig
from groupwise.model.cost import Group, update_cost
from groupwise.model.formats.checkpoint import Loaded
from groupwise.model.formats.tokenizer import Tokenizer, character_files
from groupwise.model.layers.transformer import Transformer
from groupwise.model.memory import device_bytes, is_out_of_memory, peak_bytes
from groupwise.model.room import refusal
from groupwise.optim.assemble import assemble, batch_of, group_numbers, sequences_of
from groupwise.optim.learner import PolicyLearner
from groupwise.optim.schedules import LearningRates
from groupwise.prepare.setup import demand_of, micro_tokens_of
from groupwise.records import Completion, Grade, Rollout, Task
from groupwise.watch.speed import device_of, peaks


def _qwen2(width: int, inner: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 28,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    } | more


def _mixture(width: int, layers: int, experts: int, chosen: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 65536,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "moe_intermediate_size": width // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": True,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    } | more


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _qwen2(64, 128, 4, 2, vocab_size=512, num_hidden_layers=2),  # to try a row on a CPU
    "135M": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "1.5B": _qwen2(1536, 8960, 12, 2),
    "moe": _mixture(1024, 16, 64, 8),  # 1.0B parameters, 0.28B of them for a token
    "moe_tiny": _mixture(64, 2, 8, 2, vocab_size=512, num_attention_heads=4, head_dim=16),
    "7B": _qwen2(3584, 18944, 28, 4, vocab_size=152064, tie_word_embeddings=False),
}
FILES = character_files(string.ascii_lowercase)  # of a tokenizer: nobody reads the text


def policy(name: str, dtype: torch.dtype, device: str, seed: int) -> Loaded:
    """Weights made and drawn on the device: a host takes long over billions."""
    generator = torch.Generator(device).manual_seed(seed)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Transformer(ModelConfig.from_hf(SHAPES[name])).initialise(generator)
    finally:
        torch.set_default_dtype(usual)
    return Loaded(model, Tokenizer.from_files(FILES), FILES)


def prompts(count: int, length: int, seed: int) -> list[dict[str, str]]:
    """Lines of a data file: so many letters each, one token a letter."""
    rng = random.Random(seed)
    return [{"prompt": "".join(rng.choices("abcdefgh", k=length))} for _ in range(count)]


def case(
    given: argparse.Namespace, overrides: list[str], data: str, group: int, tokens: int
) -> Config:
    """One cell of the table."""
    return load(
        None,
        overrides,
        seed=given.seed,
        prompts_per_step=given.prompts,
        group_size=group,
        recipe={"name": "dr_grpo", "aggregation.length": tokens},
        **{
            "model.dtype": given.dtype,
            "model.device": given.device,
            "data.train": data,
            "reward.parts": {"length": 1.0},
            "engine.max_tokens": tokens,
            "eval.tasks": 0,
        },
    )


class Budget:
    """The seconds of a call: a case that would end behind them is left out, and says so."""

    def __init__(self, seconds: float, device: str) -> None:
        self.begun, self.seconds, self.device = time.perf_counter(), seconds, device
        self.rate: dict[str, float] = {}  # seconds a token, of the last case of each phase

    def row(self, phase: str, tokens: int, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was measured, or why nothing was: no time, or no room."""
        spent, expected = time.perf_counter() - self.begun, self.rate.get(phase, 0.0) * tokens
        if spent + expected > self.seconds:
            return {"left_out": f"{expected:.0f} s more after {spent:.0f} of {self.seconds:.0f} s"}
        print(f"{spent:.0f} s: {phase} of {tokens:,} tokens", file=sys.stderr, flush=True)
        give_back(self.device)
        try:
            found = measure()
        except Exception as error:
            if not (isinstance(error, GroupwiseError) or is_out_of_memory(error)):
                raise
            return {"left_out": str(error).partition("\n")[0]}
        self.rate[phase] = (time.perf_counter() - self.begun - spent) / tokens
        return found


def give_back(device: str) -> None:
    """Memory of the case before, captured steps included; the next one's peak is its own."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def learn(
    config: Config, loaded: Loaded, tasks: list[Task], repeats: int, now: Callable[[], float]
) -> dict[str, Any]:
    """One update on as many completions, made up, again and again at a rate of 0."""
    shape, device = loaded.model.config, loaded.model.head_weight.device
    if device.type == "cuda":
        why = refusal(demand_of(config, shape, training=True), device_bytes(device))
        if why:
            raise ModelError(why)
    recipe = config.recipe
    assert isinstance(recipe, Recipe), "one that learns from rewards"
    optim = replace(config.optim, micro_tokens=micro_tokens_of(config, shape))
    learner = PolicyLearner(loaded.model, recipe, optim, config.engine.temperature)
    groups = made_up(config, loaded, tasks)
    sequences = sequences_of(groups)
    parts = learner.parts(group_numbers(recipe, groups))
    seconds = []
    try:
        for _ in range(repeats + 1):
            said = batch_of(recipe, groups, loaded.tokenizer)
            batch = assemble(recipe, groups, said, device=device)
            ready = batch_phase(recipe, batch).batch
            begun = now()  # what time/update has in a run
            learner.learn(ready, sequences, parts, LearningRates(0.0))
            seconds.append(now() - begun)
    finally:  # the weights outlive the learner
        for parameter in loaded.model.parameters():
            parameter.grad = None
    length = [config.engine.max_tokens] * config.group_size
    size = [Group(len(task.token_ids), length) for task in tasks]
    width, best = loaded.model.head_weight.element_size(), min(seconds[1:])
    there = device_of(device)
    used = peaks(update_cost(shape, size), best, there)
    return {
        "first_seconds": seconds[0],
        "seconds": seconds[1:],
        "tokens_per_second": sum(map(len, sequences.completions)) / best,
        "roofline_seconds": update_floor(shape, size, 1, width, there),
        "model_flop_utilisation": used and used.flops,
        "micro_tokens": learner.micro_tokens,
        "peak_bytes": peak_bytes(device),
    }


def made_up(config: Config, loaded: Loaded, tasks: list[Task]) -> list[list[Rollout]]:
    """Groups of random tokens, every other answer right."""
    length, samples = config.engine.max_tokens, config.group_size
    generator = torch.Generator().manual_seed(config.seed)
    size = (len(tasks), samples, length)
    token_PNT = torch.randint(1, loaded.model.config.vocab_size, size, generator=generator)

    def one(task: Task, number: int, ids: list[int]) -> Rollout:
        written = Completion(tuple(ids), torch.zeros(length), "length", 0)
        return Rollout(task, 0, number, written, "", Grade(float(number % 2)))

    return [
        [one(task, number, ids) for number, ids in enumerate(group)]
        for task, group in zip(tasks, token_PNT.tolist(), strict=True)
    ]
