"""The shape of a decoder, read from a Hugging Face config.json.

Only what the forward pass uses is kept. A field that would change the mathematics in a way that
the forward pass does not know is refused: a model that runs slightly wrong is worse than none.
Dropout rates are ignored on purpose, because the learner never drops anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from groupwise.errors import ModelError, NotNative
from groupwise.model.formats.fields import (
    FLAG,
    TABLE,
    TEXT,
    TEXTS,
    Rules,
    check,
    positive,
    real,
    several,
    whole,
)

RopeKind = Literal["default", "linear", "dynamic", "llama3"]
MIXTURES = ("qwen3_moe", "olmoe", "mixtral")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", *MIXTURES)
INSTEAD = "Use a model of the Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, OLMoE or Mixtral layout."

# Fields that would act on the result, and what they are. Refused unless absent, false or 0.
FOREIGN = {
    "quantization_config": "weights quantised in a format of their own",
    "attn_logit_softcapping": "a soft cap on attention scores",
    "final_logit_softcapping": "a soft cap on logits",
    "n_routed_experts": "a mixture of experts of another kind",
    "shared_expert_intermediate_size": "an expert that every token visits",
    "rope_interleaved": "interleaved rotary embeddings",
    "is_encoder_decoder": "an encoder",
    "add_cross_attention": "cross-attention",
}
COARSE = ("olmoe", "mixtral")  # families whose norms have a larger eps where none is set
# The same, of families that are no mixtures.
COUNTS = ("num_experts", "num_local_experts")
# The same, for factors: refused unless absent or 1.
FACTORS = {
    "logit_scale": "scaled logits",
    "logits_scaling": "scaled logits",
    "residual_multiplier": "scaled residuals",
    "embedding_multiplier": "scaled embeddings",
    "attention_multiplier": "scaled attention scores",
}

# What the fields that are used may hold. The limits are far above every model there is, and low
# enough that nothing is made for minutes, or in gigabytes, before the weights are compared.
MOST_LAYERS, MOST_POSITIONS = 4096, 2**40
MOST_EXPERTS = 2**15 - 1  # the numbers of experts are recorded in 16 bits
_WIDTH = whole(1, 2**24)
RULES: Rules = {
    "model_type": TEXT,
    "vocab_size": _WIDTH,
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "num_hidden_layers": whole(1, MOST_LAYERS),
    "num_attention_heads": whole(1, 2**16),
    "num_key_value_heads": whole(1, 2**16),
    "head_dim": whole(1, 2**16),
    "max_position_embeddings": whole(1, MOST_POSITIONS),
    "rms_norm_eps": real(0, 1),
    "hidden_act": TEXT,
    "tie_word_embeddings": FLAG,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "use_sliding_window": FLAG,
    "max_window_layers": whole(0, 2**31),
    "sliding_window": whole(1, MOST_POSITIONS),
    "layer_types": TEXTS,
    "rope_scaling": TABLE,
    "rope_parameters": TABLE,
    "auto_map": TABLE,
    "quantization_config": TABLE,
    "num_experts": whole(0, MOST_EXPERTS),
    "num_local_experts": whole(0, MOST_EXPERTS),
    "num_experts_per_tok": whole(1, MOST_EXPERTS),
    "moe_intermediate_size": _WIDTH,
    "norm_topk_prob": FLAG,
    "decoder_sparse_step": whole(1, MOST_LAYERS),
    "mlp_only_layers": several(whole(0, MOST_LAYERS), "a list of layers' numbers"),
    "clip_qkv": positive(1e9),
}
ROPE_RULES: Rules = {
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": positive(1e30),
    "factor": positive(1e9),
    "low_freq_factor": positive(1e9),
    "high_freq_factor": positive(1e9),
    "original_max_position_embeddings": whole(1, MOST_POSITIONS),
}


NAMES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "olmoe": "Olmoe",
    "mixtral": "Mixtral",
}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base, and how its frequencies are stretched for longer contexts."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3 alone, as are the next two
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True)
class Mixture:
    """Feed-forward layers of a mixture: every token visits a few of many narrow experts."""

    count: int  # experts of a layer
    chosen: int  # that a token visits
    width: int  # of one of them, between its projections
    normalised: bool = True  # the weights of the chosen ones add up to 1
    dense: tuple[int, ...] = ()  # layers with one feed-forward of `intermediate_size` instead

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.count or self.width < 1:
            raise ModelError(
                f"A token can't visit {self.chosen} of {self.count} experts of width {self.width}: "
                "at least one is chosen, and no more than there are."
            )


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder of the Llama layout."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float = 1e-6
    rope: Rope = Rope()
    tied: bool = False  # the head is the embedding
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    wide_norm: bool = False  # that norm is over all heads together, and not over each
    clip_qkv: float | None = None  # queries, keys and values stay within ± this
    experts: Mixture | None = None  # None: every layer has one feed-forward for all tokens
    sliding_window: int | None = None  # kept only where it is shorter than max_positions
    # Of layers that are borrowed, which say their sizes themselves (families.py):
    counted: int | None = None  # parameters
    per_token: int | None = None  # numbers in the layers' matrices that a token is multiplied with
    value_dim: int | None = None  # a value's width, where it is not a key's
    linears: tuple[tuple[str, int, int], ...] = ()  # name, inputs and outputs, for adapters
    exact_positions: int | None = None  # beyond, positions would depend on the rest of the batch

    @property
    def native(self) -> bool:
        return self.counted is None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                     "num_kv_heads", "head_dim", "max_positions"):  # fmt: skip
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ModelError(f"{name} is {value!r}; it must be a whole number above 0.")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} query heads can't share {self.num_kv_heads} key/value heads: "
                f"the first must be a multiple of the second."
            )
        if self.head_dim % 2 and self.native:
            raise ModelError(f"head_dim is {self.head_dim}; rotary embeddings need an even width.")

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Return the layers that have experts: none of a dense model."""
        dense = range(self.num_layers) if self.experts is None else self.experts.dense
        return tuple(layer for layer in range(self.num_layers) if layer not in dense)

    @property
    def position_limit(self) -> int | None:
        """Return the positions up to which the forward pass is exact; None where it always is.

        A sliding window does nothing to shorter sequences, and dynamic NTK scaling leaves them
        alone. Beyond, both would make a token depend on what else is in the batch or the cache.
        """
        limits = [self.sliding_window] if self.sliding_window is not None else []
        if self.rope.kind == "dynamic":
            limits.append(self.max_positions)
        if self.exact_positions is not None:
            limits.append(self.exact_positions)
        return min(limits, default=None)

    @property
    def context(self) -> int:
        """Return the tokens that it holds, prompt and answer together."""
        return min(self.max_positions, self.position_limit or self.max_positions)

    def check_length(self, length: int) -> None:
        """Refuse a sequence (prompt and completion) that the forward pass would compute wrongly."""
        limit = self.position_limit
        if limit is not None and length > limit:
            why = "dynamic rope scaling" if self.native else "rope scaling or chunked attention"
            why = "sliding window" if self.sliding_window == limit else why
            raise ModelError(
                f"A sequence of {length} tokens is longer than {limit}, where this model's {why} "
                f"would begin to act, which is not implemented. Use at most {limit} tokens."
            )

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read the fields of a config.json; refuse what the forward pass does not do."""
        check("config.json", raw, {"model_type": RULES["model_type"]})
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise NotNative(
                f"model_type {family!r} is not implemented natively (known: "
                f"{', '.join(FAMILIES)}): its layers differ from the Llama layout. {INSTEAD}"
            )
        check("config.json", raw, RULES)
        _refuse_foreign(raw)
        hidden, heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
        layers, positions = _size(raw, "num_hidden_layers"), _size(raw, "max_position_embeddings")
        head_dim = raw.get("head_dim") or (128 if family == "qwen3" else _share(hidden, heads))
        bias = _attention_bias(raw, family)
        return cls(
            family=family,
            vocab_size=_size(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_size(raw, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=_kv_heads(raw, family, heads),
            head_dim=head_dim,
            max_positions=positions,
            norm_eps=float(_set(raw, "rms_norm_eps", 1e-5 if family in COARSE else 1e-6)),
            rope=_rope(raw, 1e6 if family == "mixtral" else 1e4),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            mlp_bias=_mlp_bias(raw, family),
            qk_norm=family in ("qwen3", "qwen3_moe", "olmoe"),
            wide_norm=family == "olmoe",
            clip_qkv=_clip(raw, family),
            experts=_mixture(raw, family, layers) if family in MIXTURES else None,
            sliding_window=_window(raw, family, layers, positions),
        )

    def to_hf(self) -> dict[str, Any]:
        """Write a config.json for transformers and vLLM. Absent fields keep their defaults."""
        raw: dict[str, Any] = {
            "architectures": [f"{NAMES[self.family]}ForCausalLM"],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "rope_theta": self.rope.theta,
            "rope_scaling": _rope_scaling(self.rope),
            "tie_word_embeddings": self.tied,
            "attention_dropout": 0.0,
        }
        if self.family in ("llama", "qwen3", "qwen3_moe", "olmoe"):
            raw["attention_bias"] = self.o_bias
        if self.family == "llama":
            raw["mlp_bias"] = self.mlp_bias
        if self.experts is not None:
            raw |= _experts_to_hf(self.family, self.experts, self.clip_qkv)
        if self.family in ("mistral", "mixtral"):
            raw["sliding_window"] = self.sliding_window
        elif self.family in ("qwen2", "qwen3", "qwen3_moe"):
            raw["use_sliding_window"] = self.sliding_window is not None
            raw["sliding_window"] = self.sliding_window
            raw["max_window_layers"] = 0 if self.sliding_window else self.num_layers
        return raw


def _size(raw: Mapping[str, Any], name: str) -> int:
    if raw.get(name) is None:
        raise ModelError(f"config.json has no {name!r}: the file is incomplete. Fetch it again.")
    size: int = raw[name]
    return size


def _set(raw: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return what a field holds; null is not set, as where it is absent."""
    value = raw.get(name)
    return default if value is None else value


def _share(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ModelError(
            f"hidden_size {hidden} is no multiple of {heads} heads, and config.json names no "
            f"head_dim. Add the model's head_dim to config.json."
        )
    return hidden // heads


def _kv_heads(raw: Mapping[str, Any], family: str, heads: int) -> int:
    given: int | None = raw.get("num_key_value_heads")
    if given is not None:
        return given
    if (
        family in ("qwen2", "qwen3", "mistral", "qwen3_moe", "mixtral")
        and "num_key_value_heads" not in raw
    ):
        raise ModelError(
            f"config.json has no 'num_key_value_heads', and {family} has no safe default for it. "
            f"Add it."
        )
    return heads


def _refuse_foreign(raw: Mapping[str, Any]) -> None:
    foreign = FOREIGN | FACTORS
    if raw["model_type"] not in MIXTURES:
        foreign = foreign | dict.fromkeys(COUNTS, "a mixture of experts")
    for name, what in foreign.items():
        neutral = (None, 1) if name in FACTORS else (None, 0)  # False equals 0
        if raw.get(name) not in neutral:
            raise NotNative(
                f"config.json sets {name} = {raw[name]!r}: {what}, which the forward pass does not "
                f"do. {INSTEAD}"
            )
    if "AutoModelForCausalLM" in (raw.get("auto_map") or {}):
        raise ModelError(
            "config.json brings model code of its own (auto_map), which is never run. " + INSTEAD
        )
    if _set(raw, "hidden_act", "silu") not in ("silu", "swish"):
        raise NotNative(
            f"config.json sets hidden_act = {raw['hidden_act']!r}; only silu is implemented. "
            + INSTEAD
        )


def _attention_bias(raw: Mapping[str, Any], family: str) -> bool:
    bias = bool(raw.get("attention_bias", False))
    if bias and family not in ("llama", "qwen3", "qwen3_moe", "olmoe"):
        raise ModelError(
            f"config.json sets attention_bias, which says nothing certain for {family}: "
            f"{'its biases are fixed' if family == 'qwen2' else 'it has no biases'}. Remove it."
        )
    return bias


def _mlp_bias(raw: Mapping[str, Any], family: str) -> bool:
    bias = bool(raw.get("mlp_bias", False))
    if bias and family != "llama":
        raise ModelError(f"config.json sets mlp_bias, which {family} does not have. Remove it.")
    return bias


def _clip(raw: Mapping[str, Any], family: str) -> float | None:
    clip = raw.get("clip_qkv")
    if clip is not None and family != "olmoe":
        raise NotNative(
            f"config.json sets clip_qkv = {clip!r}, which {family} does not have here. {INSTEAD}"
        )
    return None if clip is None else float(clip)


def _mixture(raw: Mapping[str, Any], family: str, layers: int) -> Mixture:
    counts = {raw[name] for name in COUNTS if raw.get(name)}
    if len(counts) != 1:
        said = f"gives {sorted(counts)} for it" if counts else "does not say it"
        raise ModelError(
            f"How many experts has a layer of this {family}? config.json {said} (num_experts, or "
            "num_local_experts). Correct it, or fetch the file again."
        )
    narrow = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
    # Others than Qwen3's have experts in every layer.
    own = family == "qwen3_moe"
    step = _set(raw, "decoder_sparse_step", 1) if own else 1
    asked = set(_set(raw, "mlp_only_layers", []) if own else [])
    dense = tuple(at for at in range(layers) if at in asked or (at + 1) % step)
    if len(dense) == layers:
        raise ModelError(
            f"mlp_only_layers and decoder_sparse_step of config.json leave none of the {layers} "
            f"layers to its {counts.pop()} experts. Correct them, or use model_type qwen3."
        )
    return Mixture(
        count=counts.pop(),
        chosen=_size(raw, "num_experts_per_tok"),
        width=_size(raw, narrow),
        normalised=family == "mixtral" or bool(raw.get("norm_topk_prob", False)),
        dense=dense,
    )


def _experts_to_hf(family: str, experts: Mixture, clip: float | None) -> dict[str, Any]:
    counts = "num_local_experts" if family == "mixtral" else "num_experts"
    raw: dict[str, Any] = {counts: experts.count, "num_experts_per_tok": experts.chosen}
    if family != "mixtral":
        raw["norm_topk_prob"] = experts.normalised
    if family == "olmoe":
        raw["clip_qkv"] = clip
    if family == "qwen3_moe":
        raw["moe_intermediate_size"] = experts.width
        raw |= {"decoder_sparse_step": 1, "mlp_only_layers": list(experts.dense)}
    return raw


def _window(raw: Mapping[str, Any], family: str, layers: int, positions: int) -> int | None:
    """Return the window if it could ever act. Absent, Mistral's is 4096, as in transformers."""
    asked = raw.get("use_sliding_window") and _set(raw, "max_window_layers", 28) < layers
    if family == "mixtral":
        asked = raw.get("sliding_window") is not None
    window = raw.get("sliding_window", 4096) if family == "mistral" or asked else None
    kinds = raw.get("layer_types") or []
    if set(kinds) - {"full_attention", "sliding_attention"}:
        raise NotNative(f"config.json has layer_types {sorted(set(kinds))}. {INSTEAD}")
    if kinds and family not in ("mistral", "mixtral"):
        window = raw.get("sliding_window", 4096) if "sliding_attention" in kinds else None
    return window if window is not None and window < positions else None


def _rope(raw: Mapping[str, Any], usual: float) -> Rope:
    """Old (rope_theta, rope_scaling) and new (rope_parameters) spelling alike."""
    scaling = (raw.get("rope_scaling") or {}) | (raw.get("rope_parameters") or {})
    theta = scaling.get("rope_theta", raw.get("rope_theta"))
    check("config.json, rotary embedding", scaling | {"rope_theta": theta}, ROPE_RULES)
    partial = scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise NotNative(
            f"config.json sets partial_rotary_factor = {partial!r}; only whole heads are rotated "
            f"here. {INSTEAD}"
        )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    base = float(usual if theta is None else theta)
    if kind == "default":
        return Rope(theta=base)
    if kind not in ("linear", "dynamic", "llama3"):
        raise NotNative(
            f"config.json asks for rope scaling {kind!r}; known are default, linear, dynamic and "
            f"llama3. If the model was trained without it (Qwen2.5 and yarn), remove rope_scaling "
            f"and stay within the original context."
        )
    wanted = ["factor"]
    if kind == "llama3":
        wanted += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    missing = [name for name in wanted if scaling.get(name) is None]
    if missing:
        raise ModelError(f"config.json: rope scaling {kind!r} lacks {', '.join(missing)}. Add it.")
    if kind != "llama3":
        return Rope(theta=base, kind=kind, factor=float(scaling["factor"]))
    if not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        raise ModelError(
            f"config.json: low_freq_factor {scaling['low_freq_factor']} of the rotary embedding is "
            f"not below high_freq_factor {scaling['high_freq_factor']}. Correct them."
        )
    return Rope(
        theta=base,
        kind=kind,
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_positions=int(scaling["original_max_position_embeddings"]),
    )


def _rope_scaling(rope: Rope) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
        scaling["original_max_position_embeddings"] = rope.original_positions
    return scaling
