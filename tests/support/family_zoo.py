"""Small random models of architectures that run through transformers, and its own answers."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.model.borrowed.policy import Borrowed
from groupwise.model.formats.tokenizer import character_files
from groupwise.model.layers.attention import packed, packed_positions
from groupwise.model.layers.head import log_probs

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
ALPHABET = "0123456789+-*=? "  # of models that runs start from
WINDOW = 8  # tokens: shorter than the sequences of the tests
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# What is special about each: see test_families.py.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": SIZES
    | {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": SIZES | {"head_dim": 16, "sliding_window": WINDOW, "num_hidden_layers": 7},
    "phi": SIZES,
    "phi3": SIZES | {"sliding_window": WINDOW},
    "olmo2": SIZES,
    "olmo3": SIZES | {"sliding_window": WINDOW, "num_hidden_layers": 5},
    "gpt2": {
        "vocab_size": 97,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 128,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "gpt_neox": SIZES,
    "opt": {
        "vocab_size": 97,
        "hidden_size": 48,
        "ffn_dim": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "word_embed_proj_dim": 48,
    },
    "starcoder2": SIZES | {"sliding_window": WINDOW},
    "qwen2_moe": SIZES | EXPERTS | {"shared_expert_intermediate_size": 32},
    "granitemoe": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": SIZES
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "num_hidden_layers": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "cohere": SIZES | {"logit_scale": 0.25},
    "cohere2": SIZES | {"logit_scale": 0.25, "sliding_window": WINDOW, "num_hidden_layers": 5},
    "granite": SIZES
    | {
        "logits_scaling": 4.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.3,
        "embedding_multiplier": 3.0,
    },
    "deepseek_v3": SIZES
    | ROUTED
    | {
        "num_key_value_heads": 4,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
    },
}


def config_json(name: str) -> dict[str, Any]:
    from transformers import AutoConfig

    raw: dict[str, Any] = AutoConfig.for_model(name, **FAMILIES[name]).to_dict()
    return raw


def lender(name: str, seed: int = 0, **changes: Any) -> Any:
    """transformers' own model, its attention eager; every parameter is random and matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **(FAMILIES[name] | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            around = 1.0 if key.endswith(("norm.weight", "layernorm.weight")) else 0.0
            if around and name.startswith("gemma"):
                around = 0.0  # theirs add 1 by themselves
            parameter.normal_(around, 0.2, generator=generator)
    return model


@functools.cache
def folder(name: str) -> Path:
    """A checkpoint as transformers writes it. Made once; nobody may change it."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = Path(tempfile.mkdtemp(prefix=f"groupwise_{name}_"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    lender(name).save_pretrained(path)
    return path


def family_folder(name: str, path: Path, **changes: Any) -> str:
    """Write a model that reads and writes arithmetic, with its tokenizer; return its place."""
    files = character_files(ALPHABET)
    model = lender(name, vocab_size=len(ALPHABET) + 1, **changes)
    model.save_pretrained(path)
    for file, content in files.items():
        (path / file).write_bytes(content)
    return str(path)


def image_model(path: Path) -> Any:
    """A Gemma 3 as they are from 4B on, with a tower for images, saved; transformers' own."""
    from transformers import AutoModelForCausalLM, Gemma3Config

    tower = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
             "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    config = Gemma3Config(
        text_config=FAMILIES["gemma3_text"], vision_config=tower, mm_tokens_per_image=1,
        image_token_index=90, boi_token_index=91, eoi_token_index=92,
    )  # fmt: skip
    own = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    own.save_pretrained(path)
    return own


@torch.no_grad()
def own_logp(model: Any, row_T: Tensor) -> Tensor:
    """log p of every token but the first, by a plain forward pass of this sequence alone."""
    logits_TV = model(input_ids=row_T[None], use_cache=False).logits[0].double()
    return logits_TV.log_softmax(-1)[:-1].gather(1, row_T[1:, None])[:, 0]


def packed_logp(model: Borrowed, rows: list[Tensor]) -> list[Tensor]:
    """Of every token but the first of each row, from one pack."""
    lengths = [len(row) for row in rows]
    hidden_TD = model(torch.cat(rows), packed_positions(lengths), packed(lengths))
    return [
        log_probs(part[:-1], model.head_weight, row[1:], rule=model.head_rule).logp_T
        for part, row in zip(hidden_TD.split(lengths), rows, strict=True)
    ]
