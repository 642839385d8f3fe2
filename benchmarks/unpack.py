"""Models that came in pieces, as plain Hugging Face folders in bfloat16.

    python benchmarks/unpack.py PIECES OUT smollm2 qwen

PIECES holds, for each NAME, NAME.json (name, GGUF type, offset and size of every tensor),
NAME.part.00, NAME.part.01, ... (their bytes, one behind the other) and NAME_tok/ (the tokenizer).
OUT/NAME is what groupwise, transformers and vLLM read. Needs nothing that groupwise does not.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.model.config import ModelConfig
from groupwise.model.formats.checkpoint import assemble, read_companions, save
from groupwise.model.formats.gguf import hf_name
from groupwise.model.formats.gguf_blocks import TYPES, unpack
from groupwise.model.layers.transformer import Transformer

DTYPE = torch.bfloat16
CHUNK = 2**23  # weights that one thread unpacks at a time

# What the pieces do not say: the config.json and generation_config.json of the originals.
CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    },
    "qwen": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
}
GENERATION: dict[str, dict[str, Any]] = {
    "smollm2": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
    "qwen": {
        "bos_token_id": 151643,
        "eos_token_id": [151645, 151643],
        "pad_token_id": 151643,
    },
}


def unpack_model(name: str, pieces: Path, out: Path) -> Path:
    """The folder of one model."""
    raw = CONFIGS[name]
    model = assemble(ModelConfig.from_hf(raw), tensors(name, pieces))
    files = read_companions(pieces / f"{name}_tok") | {
        "config.json": json.dumps(raw, indent=2).encode(),
        "generation_config.json": json.dumps(GENERATION[name], indent=2).encode(),
    }
    save(model, out / name, files, replace=True)
    return out / name


def tensors(name: str, pieces: Path) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the checkpoint, in bfloat16 and with its Hugging Face name."""
    config = ModelConfig.from_hf(CONFIGS[name])
    with torch.device("meta"):
        shapes = {key: x.shape for key, x in Transformer(config).state_dict().items()}
    data = joined(name, pieces)
    heads = {}
    if config.family == "llama":  # whose rows GGUF reorders for its own rotary embedding
        heads = {".attn_q.": config.num_heads, ".attn_k.": config.num_kv_heads}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for entry in json.loads((pieces / f"{name}.json").read_text()):
            stored = str(entry["name"])
            # Tied weights that are stored twice come as the head, which is the finer copy.
            tied_head = stored == "output.weight" and config.tied
            key = hf_name("token_embd.weight" if tied_head else stored)
            weight = dequantised(data, entry, pool).view(shapes[key])
            for part, count in heads.items():
                if part in stored:
                    weight = to_half_pairs(weight, count)
            yield key, weight


def joined(name: str, pieces: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of all pieces."""
    parts = sorted(pieces.glob(f"{name}.part.*"))
    missing = [i for i, part in enumerate(parts) if part.name != f"{name}.part.{i:02d}"]
    found = sum(part.stat().st_size for part in parts)
    wanted = max(
        entry["offset"] + entry["size"]
        for entry in json.loads((pieces / f"{name}.json").read_text())
    )
    if missing or found != wanted:
        raise SystemExit(
            f"The {len(parts)} pieces {pieces}/{name}.part.* have {found:,} bytes of {wanted:,}. "
            "Bring the missing ones."
        )
    whole = np.empty(wanted, dtype=np.uint8)
    at = 0
    for part in parts:
        piece = np.fromfile(part, dtype=np.uint8)
        whole[at : at + len(piece)] = piece
        at += len(piece)
    return whole


def dequantised(
    data: np.ndarray[Any, np.dtype[np.uint8]], entry: Mapping[str, Any], pool: ThreadPoolExecutor
) -> Tensor:
    """One tensor, flat. NumPy lets other threads run while it works on a run of blocks."""
    kind, start, size = (int(entry[key]) for key in ("type", "offset", "size"))
    _, weights, block = TYPES[kind]
    step = CHUNK // weights * block
    cuts = [*range(start, start + size, step), start + size]

    def one(cut: tuple[int, int]) -> Tensor:
        return torch.from_numpy(unpack(kind, data[slice(*cut)])).to(DTYPE)

    return torch.cat(list(pool.map(one, pairwise(cuts))))


def to_half_pairs(x: Tensor, heads: int) -> Tensor:
    """Rows of each head from neighbouring pairs to (i, i + W/2), which Hugging Face rotates."""
    return x.view(heads, -1, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("pieces", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="+", choices=list(CONFIGS))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.names:
        begun = time.perf_counter()
        folder = unpack_model(name, given.pieces, given.out)
        print(f"{folder} in {time.perf_counter() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
