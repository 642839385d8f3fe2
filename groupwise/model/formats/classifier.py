"""Models that score as plain Hugging Face classifiers: of whole texts, or of each token.

`rm(...)` and `prm(...)` of a reward, transformers and `load_scalar_head` read what is written here.
config.json says in `groupwise_end_token_id` how a text was read when the model learned: prompt and
answer as ids of their own, and behind an answer the token that ends it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from torch import Tensor

from groupwise.errors import ModelError
from groupwise.hub import local_model
from groupwise.model.adapters import peft_files
from groupwise.model.adapters.lora import adapters
from groupwise.model.config import ModelConfig
from groupwise.model.formats.checkpoint import (
    SCORE,
    SHARD_BYTES,
    Contents,
    Loaded,
    Part,
    load,
    names_in,
    new_folder,
    own_tensors,
    tensors_in,
    write_tensors,
)
from groupwise.model.formats.fields import TEXT, TEXTS, check, read_bytes, table, whole
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.layers.transformer import Policy, Transformer
from groupwise.model.policy import load_policy
from groupwise.model.scalar_head import ScalarHead

Kind = Literal["sequence", "token"]
ENDS = {"sequence": "ForSequenceClassification", "token": "ForTokenClassification"}
TASKS = {"sequence": "SEQ_CLS", "token": "TOKEN_CLS"}  # PEFT's words for the same
END = "groupwise_end_token_id"
SEPARATOR = "groupwise_separator"  # of a token classifier: what stands behind each step
WEIGHT, BIAS = f"{SCORE}weight", f"{SCORE}bias"
SAYS = "groupwise_scorer.json"  # beside an adapter: what a whole classifier has in config.json
FIELDS = {
    "architectures": TEXTS,
    "task_type": TEXT,
    SEPARATOR: TEXT,
    END: whole(0, 2**31),
}
NOTHING: Mapping[str, Any] = MappingProxyType({})
PAD = "<|pad|>"
UNUSED = ("pad", "reserved", "unused", "extra")  # in the names of tokens that no text has


@dataclass(frozen=True)
class LoadedScorer:
    """A model that scores, its tokenizer, and the files that go back into its folder."""

    head: ScalarHead
    tokenizer: Tokenizer
    files: dict[str, bytes]


# --- in -----------------------------------------------------------------------------------------


def load_scalar_head(
    path: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> ScalarHead:
    """Load a classifier's layers and score; of a language model its layers, under a score of 0."""
    return with_score(load(path, dtype, device, head=False).model, path)


def load_scorer(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    base: str | Path | None = None,
) -> LoadedScorer:
    """Load a classifier's folder, or the adapter of one with its base."""
    loaded = padded(load_policy(path, dtype, device, base, head=False))
    return LoadedScorer(with_score(loaded.model, path), loaded.tokenizer, loaded.files)


def with_score(trunk: Policy, path: str | Path) -> ScalarHead:
    """Put the score of a folder over layers that were loaded from it; 0 where it has none."""
    head = ScalarHead(trunk)
    found = stored_score(path)
    if found is None:
        return head
    weight, width = found, trunk.config.hidden_size
    if weight.dim() != 2 or weight.shape[0] != 1:
        raise ModelError(
            f"{path} has a score for {weight.shape[0]} labels, and one number is learned here. "
            "Take a classifier with num_labels = 1, or the language model that it was made from."
        )
    if weight.shape[1] != width:
        raise ModelError(
            f"{path} has a score for hidden states of width {weight.shape[1]}, and its layers give "
            f"{width}: they belong to different models. Fetch both again."
        )
    with torch.no_grad():
        head.score.weight.copy_(weight)
    return head


def stored_score(path: str | Path) -> Tensor | None:
    """Read the score of a classifier's folder or adapter; None of a language model."""
    if peft_files.is_adapter(path):
        found = dict(tensors_in(Path(path) / peft_files.TENSORS))
        found = {name.removeprefix(peft_files.ADAPTED): x for name, x in found.items()}
    else:
        folder = local_model(path)
        if folder.suffix == ".gguf":
            return None
        files = [
            file
            for file in sorted(folder.glob("*.safetensors"))
            if any(name.startswith(SCORE) for name in names_in(file))
        ]
        found = {k: x for file in files for k, x in tensors_in(file) if k.startswith(SCORE)}
    if BIAS in found and found[BIAS].any():
        raise ModelError(
            f"{path} adds {found[BIAS].tolist()} to every score ({BIAS}), which is not learned "
            "here. Take a classifier without it, or the language model that it was made from."
        )
    return found.get(WEIGHT)


def is_classifier(path: str | Path) -> bool:
    """Tell whether a folder, or an adapter, is of a model that scores."""
    kinds = (*TASKS.values(), *ENDS.values())
    return any(name.endswith(kinds) for name in _called(path))


def kind_of(path: str | Path) -> Kind:
    """Tell of what the folder of a classifier, or its adapter, is one."""
    token = any(name.endswith((ENDS["token"], TASKS["token"])) for name in _called(path))
    return "token" if token else "sequence"


def separator_of(path: str | Path) -> str | None:
    """Return what stood behind each step when the model of a folder, or an adapter, learned."""
    said: str | None = _fields(path, SAYS).get(SEPARATOR)
    return said


def _called(path: str | Path) -> list[str]:
    """Return the names that a folder gives its kind of model."""
    raw = _fields(path, peft_files.CONFIG)
    return [*(raw.get("architectures") or ()), *filter(None, [raw.get("task_type")])]


def _fields(path: str | Path, of_adapter: str) -> dict[str, Any]:
    """Read a folder's config.json, or that file of an adapter, as far as scorers look at it."""
    file = Path(path) / (of_adapter if peft_files.is_adapter(path) else "config.json")
    if not file.is_file():
        return {}
    raw = table(file, read_bytes(file))
    check(file, raw, FIELDS)
    return raw


# --- out ----------------------------------------------------------------------------------------


def contents(
    head: ScalarHead,
    files: Mapping[str, bytes],
    kind: Kind,
    dtype: torch.dtype | None = None,
    *,
    says: Mapping[str, Any] = NOTHING,
) -> Contents:
    """Return a classifier's folder, or its adapter's where one learns.

    `files` are those of `padded`; what the model `says` of itself goes into config.json.
    """
    score = head.score.weight.detach()
    own = {WEIGHT: score}
    if kind == "token":  # transformers' token classifiers have a bias
        own[BIAS] = score.new_zeros(1)
    trunk = head.trunk
    if adapters(trunk):
        return _adapter_contents(trunk, own, files, kind, dtype, says)
    stored = own_tensors(trunk, dtype)
    precision = dtype or trunk.head_weight.dtype
    tensors = {k: x for k, x in stored.items() if not k.startswith("lm_head.")} | own
    config = _config_bytes(trunk.config, files, kind, precision, says)
    part = Part(tensors, partial(write_tensors, shard_bytes=SHARD_BYTES))
    kept = {name: x for name, x in files.items() if name != "generation_config.json"}
    return Contents({**kept, "config.json": config}, (part,))


def save(
    head: ScalarHead,
    path: str | Path,
    files: Mapping[str, bytes],
    kind: Kind,
    *,
    dtype: torch.dtype | None = None,
    says: Mapping[str, Any] = NOTHING,
) -> None:
    """Write a folder that transformers, `rm` or `prm`, and `load_scalar_head` read."""
    with new_folder(Path(path)) as beside:
        contents(head, files, kind, dtype, says=says).fill(beside)


def _adapter_contents(
    trunk: Policy,
    own: Mapping[str, Tensor],
    files: Mapping[str, bytes],
    kind: Kind,
    dtype: torch.dtype | None,
    says: Mapping[str, Any],
) -> Contents:
    """Return PEFT's folder with the score beside the matrices."""
    made = peft_files.contents(trunk, files, dtype)
    (part,) = made.parts
    tensors = part.tensors | {f"{peft_files.ADAPTED}{name}": x for name, x in own.items()}
    raw = json.loads(made.files[peft_files.CONFIG])
    raw |= {"task_type": TASKS[kind], "modules_to_save": [SCORE.strip(".")]}
    config = {peft_files.CONFIG: json.dumps(raw, indent=2).encode()}
    config[SAYS] = json.dumps(dict(says)).encode()
    return Contents(made.files | config, (Part(tensors, part.write),))


def _config_bytes(
    shape: ModelConfig,
    files: Mapping[str, bytes],
    kind: Kind,
    dtype: torch.dtype,
    says: Mapping[str, Any],
) -> bytes:
    """Return the config.json of a classifier with one label and a token for padding."""
    tokenizer = Tokenizer.from_files(files)
    pad = _pad_of(tokenizer, shape)
    if pad is None or not tokenizer.eos_ids:
        raise ModelError(
            "A classifier needs a token for padding other than the one that ends a text, and an "
            "end token: transformers reads the score at the last token that is no padding. Pass "
            "the files that `padded` returns."
        )
    raw: dict[str, Any] = json.loads(files.get("config.json", b"{}"))
    own = shape.to_hf()
    family = own["architectures"][0].removesuffix("ForCausalLM")
    if not raw or replace(ModelConfig.from_hf(raw), tied=True) != replace(shape, tied=True):
        raw = own
    raw.pop("dtype", None)
    raw |= {
        "architectures": [f"{family}{ENDS[kind]}"],
        "id2label": {"0": "score"},
        "label2id": {"score": 0},
        "pad_token_id": pad,
        "classifier_dropout": 0.0,
        "torch_dtype": str(dtype).removeprefix("torch."),
        END: tokenizer.eos_ids[0],
        **says,
    }
    # Without generation_config.json, this is where the ends of a text are named.
    raw["eos_token_id"] = ends[0] if len(ends := list(tokenizer.eos_ids)) == 1 else ends
    return json.dumps(raw, indent=2).encode()


# --- a token for padding ------------------------------------------------------------------------


def padded(loaded: Loaded) -> Loaded:
    """Return the model with a token for padding that no text has: its own, an unused one, a new.

    With the end token as padding, transformers would look for the score before the end.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    if not tokenizer.eos_ids:
        return loaded  # which is refused where the end of an answer is asked for
    pad, files = _pad_of(tokenizer, model.config), dict(loaded.files)
    if pad is None:
        backend = Backend.from_str(files["tokenizer.json"].decode())
        backend.add_special_tokens([AddedToken(PAD, special=True, normalized=False)])
        files["tokenizer.json"] = backend.to_str(pretty=True).encode()
        pad = len(tokenizer)
    while pad >= model.config.vocab_size:
        assert isinstance(model, Transformer)  # the layers of others never score
        model.add_token()
    _name_pad(files, str(Tokenizer.from_files(files).backend.id_to_token(pad)))
    raw = json.loads(files.get("config.json", b"{}"))
    if raw:
        raw |= {"pad_token_id": pad, "vocab_size": model.config.vocab_size}
        files["config.json"] = json.dumps(raw, indent=2).encode()
    return replace(loaded, tokenizer=Tokenizer.from_files(files), files=files)


def _pad_of(tokenizer: Tokenizer, shape: ModelConfig) -> int | None:
    """Find a token for padding among those that are there; None if all have another use."""
    added = tokenizer.backend.get_added_tokens_decoder()
    written = tokenizer.template or ""
    taken = {*tokenizer.eos_ids, tokenizer.bos_id}
    free = {
        number: token.content
        for number, token in sorted(added.items())
        if token.special and number not in taken and number < shape.vocab_size
    }
    named = tokenizer.backend.token_to_id(tokenizer.names.get("pad_token", ""))
    if named in free:
        return named
    for word in UNUSED:
        for number, name in free.items():
            if word in name.lower() and name not in written:
                return number
    return None


def _name_pad(files: dict[str, bytes], pad: str) -> None:
    """Write into a tokenizer's files that it pads with this token."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if name in files or name == "tokenizer_config.json":
            raw = json.loads(files.get(name, b"{}")) | {"pad_token": pad}
            files[name] = json.dumps(raw, indent=2, ensure_ascii=False).encode()
    if "generation_config.json" in files:
        raw = json.loads(files["generation_config.json"])
        raw.pop("pad_token_id", None)
        files["generation_config.json"] = json.dumps(raw, indent=2).encode()
