"""Small random models of every family, shared by the tests of groupwise.model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from groupwise.model.config import ModelConfig
from groupwise.model.layers.attention import packed, packed_positions
from groupwise.model.layers.head import logits
from groupwise.model.layers.transformer import Transformer

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3}

# Mixtures of experts: with a dense layer in between, norms over all heads, limits, other names.
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": SIZES
    | EXPERTS
    | {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "olmoe": SIZES
    | EXPERTS
    | {"model_type": "olmoe", "intermediate_size": 24, "clip_qkv": 2.0, "norm_topk_prob": False},
    "mixtral": SIZES
    | {
        "model_type": "mixtral",
        "intermediate_size": 24,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
        "sliding_window": None,
    },
}

# config.json of each family and of each switch that changes the mathematics
CONFIGS: dict[str, dict[str, Any]] = {
    "llama2": SIZES | {"model_type": "llama", "num_key_value_heads": 6},
    "llama3": SIZES | {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "llama_linear": SIZES
    | {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_dynamic": SIZES
    | {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "llama_biases": SIZES | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "smollm2": SIZES
    | {
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 72,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
    },
    "mistral": SIZES | {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
    "qwen2": SIZES | {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen3": SIZES | {"model_type": "qwen3", "head_dim": 16, "rope_theta": 1e6},
    "qwen3_tied": SIZES | {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    **MIXTURES,
}


def make(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Transformer:
    """A model whose every parameter, norms and biases included, is random and matters."""
    model = Transformer(ModelConfig.from_hf(CONFIGS[name]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            around = 1.0 if key.endswith("norm.weight") else 0.0
            parameter.normal_(around, 0.2, generator=generator)
    return model.to(dtype)


def sequences(lengths: list[int], vocabulary: int = 97, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (n,), generator=generator) for n in lengths]


def hidden(model: Transformer, rows: list[Tensor]) -> Tensor:
    """Hidden states of the rows packed into one forward pass."""
    lengths, device = [len(row) for row in rows], rows[0].device
    position_T, attend = packed_positions(lengths, device), packed(lengths, device)
    out: Tensor = model(torch.cat(rows), position_T, attend)
    return out


def all_logits(model: Transformer, rows: list[Tensor]) -> Tensor:
    return logits(hidden(model, rows), model.head_weight)
