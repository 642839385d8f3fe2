"""Which architectures transformers can lend its layers for, and their sizes, before weights load.

Lent can be whatever keeps its past in keys and values alone and attends through transformers'
interface for attention functions, where borrowed.py puts groupwise's own. What would run wrongly is
refused here, in words, from config.json.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from groupwise.common.extras import install, pip
from groupwise.errors import ModelError, NotNative, in_short
from groupwise.model.config import MOST_LAYERS, ModelConfig
from groupwise.model.formats.fields import REMEDY, TABLE, check, library
from groupwise.model.layers.linear import layers_within, sizes_of

ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}


def read_shape(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json: groupwise's own layers where they fit, else borrowed ones."""
    try:
        return ModelConfig.from_hf(raw)
    except NotNative as reason:
        check("config.json", raw, {"quantization_config": TABLE})
        method = (raw.get("quantization_config") or {}).get("quant_method")
        if method:
            raise ModelError(
                f"config.json says that the weights are quantised ({method}), and such weights "
                "can't be trained. Take the checkpoint in bfloat16, or write one: from_pretrained "
                "and dequantize in transformers, then save_pretrained."
            ) from reason
        return borrowed_shape(raw, reason)


def borrowed_shape(raw: Mapping[str, Any], reason: ModelError | None = None) -> ModelConfig:
    """Read the shape of a model with borrowed layers; `reason`: why it can't have our own."""
    transformers = import_transformers(raw, reason)
    family = raw.get("model_type")
    if family not in transformers.CONFIG_MAPPING:
        told = (
            "and brings model code of its own (auto_map), which is never run"
            if raw.get("auto_map")
            else f"or is newer than it ({pip()} install -U {transformers.__name__})"
        )
        raise ModelError(
            f"model_type {family!r} is unknown to transformers {transformers.__version__} {told}. "
            f"Use a model of a known architecture."
        ) from reason
    check_numbers(raw)
    return _shape(json.dumps(dict(raw), sort_keys=True))


def check_numbers(raw: Mapping[str, Any], outer: str = "") -> None:
    """Refuse whole numbers that no architecture has: transformers would count up to them.

    What a field is called differs between architectures, but not what it is a number of.
    """
    for name, value in raw.items():
        if isinstance(value, dict):
            check_numbers(value, f"{outer}{name}.")
        if type(value) is not int:
            continue
        width = any(word in name for word in ("size", "dim", "width", "embd", "head"))
        modules = any(word in name for word in ("layer", "expert", "block"))
        most = 2**24 if width else MOST_LAYERS if modules else 2**40
        if value > most:
            raise ModelError(
                f"config.json: {outer}{name} is {value:,}, and must be at most {most:,}. {REMEDY}"
            )


def import_transformers(raw: Mapping[str, Any], reason: BaseException | None = None) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"model_type {raw.get('model_type')!r} runs through transformers, which is not "
            f"installed ({error}). Install it: `{install('families')}`. Llama, Mistral, "
            "Qwen2, Qwen3, Qwen3-MoE, OLMoE, Mixtral and SmolLM2 run without it."
        ) from reason or error
    return transformers


def make_config(raw: Mapping[str, Any]) -> Any:
    """Make transformers' own record, with all dropout at 0: the learner never drops anything."""
    from transformers import CONFIG_MAPPING

    with quiet(), library("transformers can't make sense of config.json", REMEDY):
        config = CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))
    for part in (config, text_part(config)):
        for name, value in list(vars(part).items()):
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers; what matters of what it would say is said by errors here."""
    from transformers.utils import logging as said

    logging: Any = said  # it has no types
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def text_part(config: Any) -> Any:
    """Return the language model's part of a configuration that has others beside it."""
    return config.get_text_config(decoder=True)


def model_class(config: Any) -> Any:
    """Return transformers' class for it; raise where its layers can't be borrowed."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    name = config.model_type
    text = text_part(config)
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        what = "has an encoder" if config.is_encoder_decoder else "is no language model"
        raise ModelError(
            f"model_type {name!r} {what}: only decoders that continue a text can be trained here. "
            "Use a causal language model."
        )
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kind = kind[0] if isinstance(kind, list | tuple) else kind
    others = sorted(set(getattr(text, "layer_types", None) or ()) - ATTENDING)
    if kind._is_stateful or others:
        told = f" ({', '.join(others)})" if others else ""
        raise ModelError(
            f"model_type {name!r} keeps a state besides keys and values{told}, as recurrent and "
            "hybrid models do: packed sequences and shared prompts would mix it up. Use a model "
            "whose every layer is attention."
        )
    if not kind._supports_attention_backend:
        raise ModelError(
            f"model_type {name!r} computes attention inside its own layers, not through "
            "transformers' interface for it, so sequences can't be packed. Use another model."
        )
    return kind


@functools.lru_cache(maxsize=8)
def _shape(text: str) -> ModelConfig:
    raw = json.loads(text)
    config = make_config(raw)
    kind = model_class(config)
    try:
        with torch.device("meta"), quiet():
            empty = kind(config)
    except Exception as error:  # what a configuration can break is not ours to list
        raise ModelError(
            f"transformers can't make a {kind.__name__} of this config.json ({in_short(error)}). "
            "It is incomplete, or of another version of the architecture; fetch it again."
        ) from error
    try:
        return _sizes(config, empty)
    except Exception as error:  # as above; Gemma 4 has an error of its own for heads that differ
        raise ModelError(
            f"The layers of model_type {config.model_type!r} have sizes that one cache can't hold, "
            f"or say none ({in_short(error)}). Use another model."
        ) from error


def _sizes(config: Any, empty: Any) -> ModelConfig:
    part = text_part(config)
    heads, width = part.num_attention_heads, part.hidden_size
    experts = _first(part, "num_experts", "num_local_experts", "n_routed_experts") or 1
    chosen = _first(part, "num_experts_per_tok", "num_experts_per_token", "moe_top_k") or experts
    inner = _first(part, "moe_intermediate_size") if experts > 1 else None
    inner = (inner or _first(part, "intermediate_size", "ffn_dim") or 4 * width) * (
        chosen if experts > 1 else 1
    )
    return ModelConfig(
        family=config.model_type,
        vocab_size=empty.get_output_embeddings().weight.shape[0],
        hidden_size=width,
        intermediate_size=inner,
        num_layers=part.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=_first(part, "num_key_value_heads") or heads,
        head_dim=_first(part, "head_dim") or width // heads,
        max_positions=_first(part, "max_position_embeddings") or 2**31,
        tied=bool(empty.all_tied_weights_keys),
        counted=sum(p.numel() for p in empty.parameters()),
        per_token=_per_token(empty, chosen / experts),
        linears=tuple(
            (name, *sizes_of(x)) for name, x in layers_within(empty, empty.get_decoder()).items()
        ),
        exact_positions=_exact_positions(part),
    )


def _per_token(model: Any, share: float) -> int:
    """Count the numbers of matrices in the layers; of experts, those that a token is sent to."""
    tables = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    total = 0.0
    for name, parameter in model.get_decoder().named_parameters():
        if parameter.dim() >= 2 and id(parameter) not in tables:
            routed = ".experts." in name
            total += parameter.numel() * (share if routed else 1.0)
    return round(total)


def _exact_positions(part: Any) -> int | None:
    """Return up to where positions do not depend on the rest of the batch; None: always.

    Dynamic and long rope take other frequencies as soon as one sequence of a batch is longer, and
    chunked attention begins to act.
    """
    limits = []
    given = getattr(part, "rope_parameters", None) or {}
    for rope in (given, *(x for x in given.values() if isinstance(x, dict))):
        original = rope.get("original_max_position_embeddings")
        original = original or getattr(part, "original_max_position_embeddings", None)
        if rope.get("rope_type") in ("dynamic", "longrope"):
            limits.append(original or part.max_position_embeddings)
    if "chunked_attention" in (getattr(part, "layer_types", None) or ()):
        limits.append(part.attention_chunk_size)
    return min(limits, default=None)


def _first(part: Any, *names: str) -> int | None:
    """Return the first of these fields that holds a number above 0."""
    found = [getattr(part, name, None) for name in names]
    return next((x for x in found if isinstance(x, int) and x > 0), None)
