"""config.json in and out, and what is refused because it would change the mathematics."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from model_zoo import CONFIGS, SIZES

from groupwise.errors import ModelError
from groupwise.model.config import ModelConfig, Rope

LLAMA = CONFIGS["llama2"]


@pytest.mark.parametrize("name", CONFIGS)
def test_written_and_read_again_it_is_the_same(name: str) -> None:
    config = ModelConfig.from_hf(CONFIGS[name])
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_writes_what_is_read_here(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    raw = copy.deepcopy(CONFIGS[name])
    theirs = transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
    theirs.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert ModelConfig.from_hf(saved) == ModelConfig.from_hf(CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_what_is_written_here(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = ModelConfig.from_hf(CONFIGS[name])
    raw = config.to_hf()
    theirs = transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
    assert ModelConfig.from_hf(theirs.to_dict()) == config


def test_families_by_hand() -> None:
    qwen2 = ModelConfig.from_hf(SIZES | {"model_type": "qwen2"})
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, False, 8)
    qwen3 = ModelConfig.from_hf(SIZES | {"model_type": "qwen3"})
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    llama = ModelConfig.from_hf(SIZES | {"model_type": "llama", "num_key_value_heads": None})
    assert (llama.num_kv_heads, llama.rope, llama.tied) == (6, Rope(10000.0), False)


def test_both_spellings_of_rope_scaling() -> None:
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}
    new = LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 5e5}}
    assert ModelConfig.from_hf(old).rope == ModelConfig.from_hf(new).rope
    assert ModelConfig.from_hf(old).rope == Rope(5e5, "linear", 2.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma2"}, "'gemma2' is not implemented natively"),
        ({"model_type": None}, "None is not implemented"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.*format of their own"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0: a soft cap"),
        ({"attn_logit_softcapping": 50.0}, "soft cap on attention"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"auto_map": {"AutoModelForCausalLM": "m.M"}}, "model code of its own"),
        ({"hidden_act": "gelu"}, "only silu"),
        ({"rope_interleaved": True}, "interleaved rotary"),
        ({"residual_multiplier": 0.5}, "scaled residuals"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'; known are default"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 4}, "6 query heads can't share 4"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "hidden_size 48 is no multiple"),
        ({"vocab_size": "97"}, "vocab_size is '97'"),
        ({"model_type": "qwen2", "attention_bias": True}, "its biases are fixed"),
        ({"model_type": "mistral", "attention_bias": True}, "it has no biases"),
        ({"model_type": "qwen3", "mlp_bias": True}, "which qwen3 does not have"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"]}, "layer_types"),
    ],
)
def test_what_would_change_the_mathematics_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(LLAMA | change)


def test_a_missing_size_is_named() -> None:
    for name in ("hidden_size", "vocab_size", "max_position_embeddings"):
        raw = {key: value for key, value in LLAMA.items() if key != name}
        with pytest.raises(ModelError, match=f"no '{name}'"):
            ModelConfig.from_hf(raw)


def test_fields_that_change_nothing_are_let_through() -> None:
    harmless = {
        "torch_dtype": "bfloat16",
        "attention_dropout": 0.1,
        "use_cache": True,
        "_name_or_path": "x/y",
        "quantization_config": None,
        "rope_interleaved": False,
        "logit_scale": 1.0,
        "unsloth_version": "2026.1",
    }
    assert ModelConfig.from_hf(LLAMA | harmless) == ModelConfig.from_hf(LLAMA)


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        ({"model_type": "mistral"}, None),  # the default window of 4096 exceeds 256 positions
        ({"model_type": "mistral", "sliding_window": 100}, 100),
        ({"model_type": "qwen2", "sliding_window": 100}, None),  # not in use
        ({"model_type": "qwen2", "sliding_window": 100, "use_sliding_window": True}, None),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 100,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            100,
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 64,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            64,
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 256),
    ],
)
def test_length_limits_where_something_would_begin_to_act(
    change: dict[str, Any], limit: int | None
) -> None:
    config = ModelConfig.from_hf(LLAMA | change)
    assert config.position_limit == limit
    if limit is not None:
        config.check_length(limit)
        with pytest.raises(ModelError, match=f"Use at most {limit} tokens"):
            config.check_length(limit + 1)
