"""The embedded model: a small transformer over characters, made for its tasks on the spot."""

from __future__ import annotations

import string
from collections.abc import Sequence

import torch

from groupwise import config
from groupwise.model.config import ModelConfig
from groupwise.model.formats.checkpoint import Loaded
from groupwise.model.formats.tokenizer import Tokenizer, character_files
from groupwise.model.layers.transformer import Transformer
from groupwise.records import Task

ROLE = 64  # characters around the words of an environment, at the most: who speaks


def make(
    tiny: config.Tiny,
    tasks: Sequence[Task],
    held_out: Sequence[Task],
    longest: int,
    seed: int,
    turns: config.TurnSettings | None = None,
) -> Loaded:
    """Make a model that has learned nothing; its alphabet is that of all tasks.

    With `turns` it is all of ASCII, and the context has room for what environments say.
    """
    texts = [str(task.prompt) for task in [*tasks, *held_out]]
    texts += [str(task.columns["solution"]) for task in tasks]
    room = max(len(str(task.prompt)) for task in [*tasks, *held_out]) + longest
    if turns is not None:
        texts.append(string.printable)
        room = turns.context or room + turns.max * (turns.observation + ROLE)
    return made_of(tiny, texts, room, seed)


def made_of(tiny: config.Tiny, texts: Sequence[str], room: int, seed: int) -> Loaded:
    """Make a model that has learned nothing, for these texts and a context of so many tokens."""
    files = character_files("".join(sorted(set("".join(texts)))))
    tokenizer = Tokenizer.from_files(files)
    shape = ModelConfig.from_hf(hugging_face_config(tiny, len(tokenizer), room))
    model = Transformer(shape).initialise(torch.Generator().manual_seed(seed))
    return Loaded(model, tokenizer, files)


def hugging_face_config(tiny: config.Tiny, vocabulary: int, room: int) -> dict[str, object]:
    """Return the shape as a config.json has it.

    As a mixture, a token's experts together are as wide as the one feed-forward otherwise.
    """
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        **_mixture(tiny),
        "vocab_size": vocabulary,
        "hidden_size": tiny.width,
        "intermediate_size": tiny.width * 3 // (tiny.chosen if tiny.experts else 1),
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.heads,
        "max_position_embeddings": max(room, 16),
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": 0,
        "bos_token_id": None,
    }


def _mixture(tiny: config.Tiny) -> dict[str, object]:
    if not tiny.experts:
        return {}
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": tiny.experts,
        "num_experts_per_tok": tiny.chosen,
        "sliding_window": None,
    }
