"""GGUF files: header, metadata and tensors, as a Hugging Face folder would have held them.

The result of `read_gguf` can be trained and saved as a plain folder. Quantised weights become
float32; what the quantisation lost stays lost.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.errors import ModelError
from groupwise.model.config import ROPE_RULES, RULES, ModelConfig, Rope
from groupwise.model.formats.fields import TEXT, check, whole
from groupwise.model.formats.gguf_blocks import TYPES, unpack
from groupwise.model.formats.gguf_tokenizer import tokenizer_files
from groupwise.model.layers.rope import frequencies

# Metadata types of fixed size, by GGUF's number; 8 is a string, 9 an array.
_FIXED = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?",
          10: "<Q", 11: "<q", 12: "<d"}  # fmt: skip
_STRING, _ARRAY = 8, 9
FAMILIES = ("llama", "qwen2", "qwen3")
MOST_AXES = 4  # of a tensor, as in llama.cpp
# Metadata behind the architecture's name, and the fields of config.json whose rules it follows.
_FIELDS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
}

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL = ("bos", "eos", "padding")  # tokens with a number in the metadata
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class TensorInfo:
    shape: tuple[int, ...]  # as torch counts: rows first
    kind: int
    offset: int  # from the start of the file
    size: int


class GGUFFile:
    """A file's metadata, and its tensors on demand."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.data = np.memmap(self.path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{self.path} can't be read as a GGUF file: {error}. Check the path."
            ) from error
        self._at = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, RecursionError) as error:
            raise ModelError(
                f"{self.path} ends or breaks in its header ({error}): it is cut short or damaged. "
                f"Fetch it again."
            ) from error

    def _read_header(self) -> None:
        if bytes(self.data[:4]) != b"GGUF":
            raise ModelError(
                f"{self.path} does not start with 'GGUF': it is no GGUF file. Pass a .gguf file, "
                f"or a Hugging Face folder."
            )
        self._at = 4
        version = self._number("<I")
        if version not in (2, 3):
            raise ModelError(
                f"{self.path} has GGUF version {version}; 2 and 3 (little-endian) are known. "
                f"Convert it again with a current llama.cpp."
            )
        tensors, entries = self._number("<Q"), self._number("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string()
            self.metadata[key] = self._value(self._number("<I"))
        infos = [self._tensor_info() for _ in range(tensors)]
        check(self.path, self.metadata, {"general.alignment": whole(1, 2**20)})
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        self.tensors = {info[0]: self._place(start, *info) for info in infos}

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data.data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        length = self._number("<Q")
        raw = self.data[self._at : self._at + length]
        if len(raw) != length:
            raise struct.error("a string runs over the end")
        self._at += length
        return bytes(raw).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._number("<I"), self._number("<Q")
            if count > len(self.data):
                raise struct.error("an array runs over the end")
            return [self._value(inner) for _ in range(count)]
        if kind not in _FIXED:
            raise struct.error(f"unknown metadata type {kind}")
        return self._number(_FIXED[kind])

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, axes = self._string(), self._number("<I")
        if axes > MOST_AXES:
            raise struct.error(f"tensor {name!r} has {axes:,} axes")
        shape = tuple(self._number("<Q") for _ in range(axes))
        return name, shape[::-1], self._number("<I"), self._number("<Q")

    def _place(
        self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> TensorInfo:
        if kind not in TYPES:
            known = ", ".join(kind_name for kind_name, _, _ in TYPES.values())
            raise ModelError(
                f"Tensor {name!r} of {self.path} has GGUF type number {kind}; known are {known}. "
                f"Quantise the model to one of those (Q8_0 loses least)."
            )
        _, weights, size = TYPES[kind]
        count = math.prod(shape)
        info = TensorInfo(shape, kind, start + offset, count // weights * size)
        if count % weights or info.offset + info.size > len(self.data):
            raise ModelError(
                f"Tensor {name!r} of {self.path} runs over the end of the file: it is cut short. "
                f"Fetch it again."
            )
        return info

    def tensor(self, name: str) -> Tensor:
        info = self.tensors[name]
        raw = np.asarray(self.data[info.offset : info.offset + info.size])
        return torch.from_numpy(unpack(info.kind, raw).reshape(info.shape).copy())


@dataclass(frozen=True)
class GGUFModel:
    config: ModelConfig
    tensors: dict[str, Tensor]  # float32, named as in Hugging Face checkpoints
    files: dict[str, bytes]  # config, tokenizer and generation settings for a folder


def read_gguf(path: str | Path) -> GGUFModel:
    """Read everything that a Hugging Face folder would hold."""
    file = GGUFFile(path)
    raw = hf_config(file)
    config = ModelConfig.from_hf(raw)
    tensors = {}
    for name in file.tensors:
        if name == "rope_freqs.weight":
            continue  # in the configuration already
        # llama.cpp turns neighbouring pairs where the layout here turns (i, i + W/2); its
        # converter reorders the rows of queries and keys for that, in this family only.
        tensor = file.tensor(name)
        if config.family == "llama" and ".attn_q." in name:
            tensor = _to_half_pairs(tensor, config.num_heads)
        elif config.family == "llama" and ".attn_k." in name:
            tensor = _to_half_pairs(tensor, config.num_kv_heads)
        tensors[hf_name(name)] = tensor
    files = {"config.json": json.dumps(raw, indent=2).encode()}
    return GGUFModel(config, tensors, files | tokenizer_files(file.metadata))


def hf_name(name: str) -> str:
    """Turn blk.3.attn_q.weight into model.layers.3.self_attn.q_proj.weight."""
    if name in _OUTER:
        return _OUTER[name]
    part = name.split(".")
    if len(part) == 4 and part[0] == "blk" and part[2] in _PARTS:
        return f"model.layers.{part[1]}.{_PARTS[part[2]]}.{part[3]}"
    raise ModelError(
        f"GGUF tensor {name!r} has no place in the Llama layout: the architecture differs. "
        f"Use a model of the Llama, Mistral, Qwen2 or Qwen3 layout."
    )


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """Return the metadata as the fields of a config.json."""
    meta = file.metadata
    family = meta.get("general.architecture")
    if family not in FAMILIES:
        raise ModelError(
            f"{file.path} holds a model of architecture {family!r}; known are "
            f"{', '.join(FAMILIES)}. Use one of those."
        )

    check(file.path, meta, {f"{family}.{name}": RULES[field] for name, field in _FIELDS.items()})
    check(
        file.path,
        meta,
        {
            f"{family}.rope.freq_base": ROPE_RULES["rope_theta"],
            f"{family}.rope.scaling.type": TEXT,
            f"{family}.rope.scaling.factor": ROPE_RULES["factor"],
            **{f"tokenizer.ggml.{name}_token_id": whole(0, 2**31) for name in _SPECIAL},
        },
    )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or not embedding.shape:
        raise ModelError(
            f"{file.path} lacks the tensor token_embd.weight: it is cut short, or holds no "
            "language model. Fetch it again."
        )

    def field(name: str, default: Any = None) -> Any:
        value = meta.get(f"{family}.{name}", default)
        if value is None:
            raise ModelError(f"{file.path} lacks the metadata {family}.{name}. Convert it again.")
        return value

    heads, width = field("attention.head_count"), field("embedding_length")
    raw = {
        "model_type": family,
        "vocab_size": embedding.shape[0],
        "hidden_size": width,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": field("attention.key_length", width // heads),
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": _shortest(field("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(field("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": family == "llama" and "blk.0.attn_q.bias" in file.tensors,
        "num_experts": meta.get(f"{family}.expert_count"),
        "hidden_act": "silu",
    }
    raw["architectures"] = ModelConfig.from_hf(raw).to_hf()["architectures"]
    raw["rope_scaling"] = _rope_scaling(file, meta, family, raw)
    for name in _SPECIAL:
        if (token := meta.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            raw[f"{name.replace('padding', 'pad')}_token_id"] = token
    return raw


def _rope_scaling(
    file: GGUFFile, meta: Mapping[str, Any], family: str, raw: Mapping[str, Any]
) -> dict[str, Any] | None:
    kind = meta.get(f"{family}.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, raw)
    if kind == "none":
        return None
    return {"rope_type": kind, "factor": meta.get(f"{family}.rope.scaling.factor")}


def _llama3_scaling(file: GGUFFile, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Find the rule behind Llama 3's divisors, which alone GGUF keeps."""
    divisor_F = file.tensor("rope_freqs.weight")
    factor = float(divisor_F.max()) if divisor_F.numel() else 1.0
    rule = Rope(theta=raw["rope_theta"], kind="llama3", factor=factor)
    plain = Rope(theta=raw["rope_theta"])
    here = torch.device("cpu")
    made_F = frequencies(plain, raw["head_dim"], here) / frequencies(rule, raw["head_dim"], here)
    if made_F.shape != divisor_F.shape or not torch.allclose(made_F, divisor_F, rtol=1e-4):
        raise ModelError(
            f"{file.path} scales its rotary embedding by a table that Llama 3's rule does not "
            f"give. Load the model from its Hugging Face folder."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": rule.low_freq_factor,
        "high_freq_factor": rule.high_freq_factor,
        "original_max_position_embeddings": rule.original_positions,
    }


def _to_half_pairs(x: Tensor, heads: int) -> Tensor:
    """Reorder rows 0, 1, 2, 3, ... of each head: the even ones, then the odd ones."""
    if not x.dim() or x.shape[0] % (2 * heads):
        return x  # of another shape than the metadata says, which is refused with both
    return x.view(heads, -1, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def _shortest(x: float) -> float:
    """Write a float32 of the metadata as it was meant: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(x)))
