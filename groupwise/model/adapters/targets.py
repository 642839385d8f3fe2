"""Which layers an adapter sits on, by name: the same rules for a model and for its sizes alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt

from groupwise.errors import ModelError, nearest
from groupwise.model.config import ModelConfig

ALL = ("all", "all-linear")  # here and in PEFT
HEAD = "lm_head"
ALPHA = 32.0  # unless asked otherwise: with 1/rank in the scale, one learning rate suits all ranks

EACH = ".experts.each."  # in the name of a product that every expert has

Targets = str | tuple[str, ...]


@dataclass(frozen=True)
class Spec:
    """An adapter's numbers, as PEFT's adapter_config.json has them."""

    rank: int
    alpha: float
    targets: Targets = "all"
    rslora: bool = False

    @property
    def scale(self) -> float:
        """Return alpha / rank, or alpha / √rank: the factor of its matrices' product."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)


def linear_shapes(shape: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of every layer that can have an adapter, by its full name."""
    if not shape.native:
        return {name: (inputs, outputs) for name, inputs, outputs in shape.linears}
    width, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = (count * shape.head_dim for count in (shape.num_heads, shape.num_kv_heads))
    attention = {
        "self_attn.q_proj": (width, queries),
        "self_attn.k_proj": (width, keys),
        "self_attn.v_proj": (width, keys),
        "self_attn.o_proj": (queries, width),
    }
    dense = _feed_forward("mlp.", width, inner)
    sparse = {}
    if shape.experts is not None:
        sparse = _feed_forward(f"mlp{EACH}", width, shape.experts.width)
    return {
        f"model.layers.{layer}.{name}": sizes
        for layer in range(shape.num_layers)
        for name, sizes in (attention | (sparse if layer in shape.sparse_layers else dense)).items()
    }


def _feed_forward(at: str, width: int, inner: int) -> dict[str, tuple[int, int]]:
    return {
        f"{at}gate_proj": (width, inner),
        f"{at}up_proj": (width, inner),
        f"{at}down_proj": (inner, width),
    }


def expert_name(layer: str, number: int) -> str:
    """Return the name of one expert's matrix, as published folders have it."""
    return layer.replace(EACH, f".experts.{number}.")


def layer_of(name: str) -> tuple[str, int | None]:
    """Return the layer of a matrix with an adapter, and which of its experts' it is, if any."""
    found = re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)", name)
    if found is None:
        return name, None
    return f"{found[1]}{EACH}{found[3]}", int(found[2])


def matching(targets: Targets, names: Iterable[str]) -> list[str]:
    """Return the names that targets mean; every target must mean at least one.

    As in PEFT: an entry of a list is a name or its end (`q_proj`, `mlp.up_proj`,
    `layers.0.self_attn.q_proj`), a string is a regular expression for whole names, or "all".
    """
    names = list(names)
    if not names:
        raise ModelError(
            "This model has no linear layer that an adapter could sit on. Train all weights: leave "
            "adapter.rank out."
        )
    if isinstance(targets, str) and targets in ALL:
        return names
    if isinstance(targets, str) and not re.fullmatch(r"[\w.]+", targets):
        return _fitting(targets, names)
    wanted = [targets] if isinstance(targets, str) else list(targets)
    if not wanted:
        raise ModelError(f"adapter.targets is empty. {_known(names)}")
    found: set[str] = set()
    for target in wanted:
        own = {name for name in names if name == target or name.endswith(f".{target}")}
        if not own:
            raise ModelError(_nothing(target, names))
        found |= own
    return [name for name in names if name in found]


def fits(spec: Spec, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Check that the layers are there, and that one at least can use all of the rank."""
    most = max(min(sizes[name]) for name in matching(spec.targets, sizes))
    if spec.rank > most:
        raise ModelError(
            f"adapter.rank={spec.rank} is more than any layer of this model has dimensions "
            f"({most}): it would be larger than what it stands beside, and learn no more. Take "
            "8 to 64, or train all weights: leave adapter.rank out."
        )


def adapter_weights(shape: ModelConfig, spec: Spec) -> int:
    """Count the numbers in the two matrices of every layer that it sits on."""
    sizes, every = linear_shapes(shape), shape.experts.count if shape.experts else 1
    return sum(
        spec.rank * sum(sizes[name]) * (every if EACH in name else 1)
        for name in matching(spec.targets, sizes)
    )


def narrow_numbers(shape: ModelConfig, spec: Spec) -> int:
    """Count a token's numbers in the middle of all adapters: of experts those that it visits."""
    visits = shape.experts.chosen if shape.experts else 1
    layers = matching(spec.targets, linear_shapes(shape))
    return sum(spec.rank * (visits if EACH in name else 1) for name in layers)


def shortest(names: Iterable[str], every: Iterable[str]) -> list[str]:
    """Return targets that mean just these names: their last words if those mean no others."""
    names = list(names)
    words = sorted({name.rpartition(".")[2] for name in names})
    return words if matching(tuple(words), every) == names else names


def _fitting(pattern: str, names: list[str]) -> list[str]:
    try:
        found = [name for name in names if re.fullmatch(pattern, name)]
    except re.error as error:
        raise ModelError(
            f"adapter.targets {pattern!r} is no regular expression: {error}. Write a list of "
            'names such as ["q_proj", "v_proj"], or "all".'
        ) from error
    if not found:
        raise ModelError(_nothing(pattern, names))
    return found


def _nothing(target: str, names: list[str]) -> str:
    if target.rpartition(".")[2] in (HEAD, "embed_tokens"):
        return (
            f"adapter.targets names {target!r}: embedding and head have no adapters here, as the "
            "head's log-probabilities are made without its logits ever lying in memory. Leave it "
            'out; "all" means the linear layers in between.'
        )
    words = {name.rpartition(".")[2] for name in names}
    hint = nearest(target, words) if re.fullmatch(r"[\w.]+", target) else ""
    return f"adapter.targets {target!r} matches no layer. {hint} {_known(names)}".replace("  ", " ")


def _known(names: list[str]) -> str:
    words = sorted({name.rpartition(".")[2] for name in names})
    return f'Layers are called {", ".join(words)}, as in {names[0]}; "all" takes them all.'
