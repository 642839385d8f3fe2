"""GGUF files of float32 tensors, written as llama.cpp's converter writes them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from groupwise.model.formats.gguf import _OUTER, _PARTS
from groupwise.model.layers.transformer import Transformer

ALPHABET = [*"abcdefghijklmnopqrstuvwxyz0123456789", "Ġ", "Ċ", ".", "+", "="]
TOKENS = ["<|end|>", "<|start|>", *ALPHABET, "Ġa", "ab", "Ġab", "12"]
TOKENS += [f"[{i}]" for i in range(97 - len(TOKENS))]


def packed_value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Ii", 5, value) if value < 0 else struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + packed_string(value)
    inner = packed_value(value[0])[:4]
    return (
        struct.pack("<I", 9)
        + inner
        + struct.pack("<Q", len(value))
        + b"".join(packed_value(entry)[4:] for entry in value)
    )


def packed_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def write(path: Path, meta: dict[str, Any], tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """A GGUF file of float32 tensors."""
    head, body = b"", b""
    for key, value in meta.items():
        head += packed_string(key) + packed_value(value)
    for name, tensor in tensors.items():
        shape = tensor.shape[::-1]
        head += packed_string(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", 0, len(body))
        raw = tensor.astype("<f4").tobytes()
        body += raw + bytes(-len(raw) % 32)
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(meta)) + head
    path.write_bytes(start + bytes(-len(start) % 32) + body)


def metadata(model: Transformer, family: str) -> dict[str, Any]:
    config = model.config
    kinds = [3, 3] + [1] * (len(TOKENS) - 2)
    return {
        "general.architecture": family,
        f"{family}.block_count": config.num_layers,
        f"{family}.context_length": config.max_positions,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.feed_forward_length": config.intermediate_size,
        f"{family}.attention.head_count": config.num_heads,
        f"{family}.attention.head_count_kv": config.num_kv_heads,
        f"{family}.attention.key_length": config.head_dim,
        f"{family}.attention.layer_norm_rms_epsilon": config.norm_eps,
        f"{family}.rope.freq_base": config.rope.theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["Ġ a", "a b", "Ġ ab", "1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|start|>{{ m.content }}{% endfor %}",
    }


def gguf_tensors(model: Transformer, family: str) -> dict[str, np.ndarray[Any, Any]]:
    """As llama.cpp's converter writes them: its own names, rows of q and k in pairs."""
    outer = {theirs: ours for ours, theirs in _OUTER.items()}
    parts = {theirs: ours for ours, theirs in _PARTS.items()}
    tensors = {}
    for name, tensor in model.state_dict().items():
        x = tensor.numpy()
        if name in outer:
            tensors[outer[name]] = x
            continue
        _, _, layer, part, kind = (
            name.replace("self_attn.", "self_attn/").replace("mlp.", "mlp/").split(".")
        )
        if family == "llama" and part in ("self_attn/q_proj", "self_attn/k_proj"):
            heads = model.config.num_heads if "q_proj" in part else model.config.num_kv_heads
            x = x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        tensors[f"blk.{layer}.{parts[part.replace('/', '.')]}.{kind}"] = x
    return tensors
