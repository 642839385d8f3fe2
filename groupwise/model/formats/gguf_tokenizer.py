"""A byte-level BPE tokenizer from a GGUF file's metadata, as the files of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from groupwise.errors import ModelError, nearest
from groupwise.model.formats.fields import FLAG, TEXT, TEXTS, Rules, check, library, several, whole

DAMAGED = "It is damaged or half converted: fetch or convert it again."
_NUMBER = whole(0, 2**31)
RULES: Rules = {
    "tokenizer.ggml.model": TEXT,
    "tokenizer.ggml.pre": TEXT,
    "tokenizer.ggml.tokens": TEXTS,
    "tokenizer.ggml.token_type": several(_NUMBER, "a list of whole numbers"),
    "tokenizer.ggml.merges": TEXTS,
    "tokenizer.ggml.add_bos_token": FLAG,
    "tokenizer.chat_template": TEXT,
    **{
        f"tokenizer.ggml.{name}_token_id": _NUMBER
        for name in ("bos", "eos", "eot", "padding", "unknown")
    },
}

_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types that are cut out of the text before BPE

# How a word is told from the next; %s is how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_files(meta: Mapping[str, Any]) -> dict[str, bytes]:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    check("The tokenizer in the GGUF file", meta, RULES)
    with library("The tokenizer can't be rebuilt from the GGUF file", DAMAGED):
        backend = build(meta)
    tokens = meta["tokenizer.ggml.tokens"]
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    generation: dict[str, Any] = {}
    for name, field in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        number = meta.get(f"tokenizer.ggml.{field}_token_id")
        if number is not None:
            _check_number(field, number, tokens)
            settings[f"{name}_token"] = tokens[number]
            if name != "unk":
                generation[f"{name}_token_id"] = number
    # End of turn and end of text may be two tokens; generation stops at either.
    ends = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    if None not in ends and len(set(ends)) > 1:
        generation["eos_token_id"] = ends
    if "tokenizer.chat_template" in meta:
        settings["chat_template"] = meta["tokenizer.chat_template"]
    return {
        "tokenizer.json": backend.to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False).encode(),
        "generation_config.json": json.dumps(generation, indent=2).encode(),
    }


def build(meta: Mapping[str, Any]) -> Backend:
    if meta.get("tokenizer.ggml.model") != "gpt2":
        raise ModelError(
            f"The file's tokenizer is of kind {meta.get('tokenizer.ggml.model')!r}; only "
            f"byte-level BPE ('gpt2') can be rebuilt from GGUF. Load the model from its Hugging "
            f"Face folder."
        )
    for name in ("tokens", "token_type", "merges"):
        if f"tokenizer.ggml.{name}" not in meta:
            raise ModelError(f"The file lacks the metadata tokenizer.ggml.{name}. {DAMAGED}")
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    if len(kinds) != len(tokens):
        raise ModelError(
            f"The file has {len(tokens)} tokens and {len(kinds)} kinds of them "
            f"(tokenizer.ggml.token_type). {DAMAGED}"
        )
    merges = [tuple(line.split(" ", 1)) for line in meta["tokenizer.ggml.merges"]]
    rule = meta.get("tokenizer.ggml.pre", "gpt-2")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as it is, without looking at the merges.
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule == "llama-bpe")
    backend = Backend(model)
    backend.pre_tokenizer = _pre_tokenizer(rule)
    backend.decoder = decoders.ByteLevel()
    if rule == "qwen2":
        backend.normalizer = normalizers.NFC()
    if meta.get("tokenizer.ggml.add_bos_token"):
        number = meta.get("tokenizer.ggml.bos_token_id")
        if number is None:
            raise ModelError(
                "The file asks for a first token (tokenizer.ggml.add_bos_token) and has no "
                f"tokenizer.ggml.bos_token_id. {DAMAGED}"
            )
        _check_number("bos", number, tokens)
        first = tokens[number]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, number)]
        )
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == _CONTROL:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=False, normalized=False)])
    return backend


def _check_number(field: str, number: int, tokens: Sequence[str]) -> None:
    if number >= len(tokens):
        raise ModelError(
            f"tokenizer.ggml.{field}_token_id is {number}, and there are {len(tokens)} tokens. "
            f"{DAMAGED}"
        )


def _pre_tokenizer(rule: str) -> pre_tokenizers.PreTokenizer:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = {"qwen2": _WORDS % "", "llama-bpe": _WORDS % "{1,3}"}
    if rule in ("gpt-2", "default"):
        return whole
    if rule == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    if rule in words:
        split = pre_tokenizers.Split(Regex(words[rule]), behavior="isolated")
        return pre_tokenizers.Sequence([split, bytes_only])
    raise ModelError(
        f"The file splits words by the rule {rule!r}, which is not known here. "
        f"{nearest(rule, ['gpt-2', 'smollm', *words])} Load the model from its Hugging Face folder."
    )
