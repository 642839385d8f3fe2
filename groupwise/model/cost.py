"""The cost of a step, part by part: operations, bytes moved and bytes held, from sizes alone.

One model for what a run prints about its speed, for what fits into a device (room.py), and for the
floor that a measurement stands beside. It counts what can't be avoided: matrix products, attention,
the head; weights, keys and values read; nothing for norms, launches and the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from groupwise.model.adapters.targets import Spec, adapter_weights, narrow_numbers
from groupwise.model.config import ModelConfig

HALF, SINGLE = 2, 4  # bytes of a number
# Of the optimizer, for each weight: gradient read twice (its norm first), moments and master read
# and written. A half-precision weight is written beside its master.
OPTIMIZER_BYTES = {HALF: 2 * 4 + 2 * 12 + 2, SINGLE: 2 * 4 + 2 * 12}
OPTIMIZER_FLOPS = 15


@dataclass(frozen=True)
class Cost:
    """Floating-point operations, and bytes read or written."""

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: float) -> Cost:
        return Cost(self.flops * times, self.bytes * times)


Parts = dict[str, Cost]


@dataclass(frozen=True)
class Group:
    """A prompt and its completions, in tokens."""

    prompt: int
    completions: Sequence[int]


def total(parts: Mapping[str, Cost]) -> Cost:
    return sum(parts.values(), Cost())


def add(*many: Mapping[str, Cost]) -> Parts:
    """Part by part."""
    names = dict.fromkeys(name for parts in many for name in parts)
    return {name: sum((parts.get(name, Cost()) for parts in many), Cost()) for name in names}


# --- a model ----------------------------------------------------------------------------------


def layer_weights(shape: ModelConfig) -> int:
    """Count the numbers in the matrices of all layers: what every token is multiplied with."""
    if shape.per_token is not None:
        return shape.per_token
    return _matrices(shape, None if shape.experts is None else shape.experts.chosen)


def held_weights(shape: ModelConfig) -> int:
    """Count the numbers in the matrices of all layers, those of experts that a token passes by too.

    Of borrowed layers only those that a token meets are told apart from the rest.
    """
    if shape.per_token is not None:
        return shape.per_token
    return _matrices(shape, None if shape.experts is None else shape.experts.count)


def read_weights(shape: ModelConfig, tokens: float) -> float:
    """Count what a pass over so many tokens reads of them, experts visited as often as each other.

    An expert that is passed by with a chance of 1 − K/E at each token is read unless all do so.
    """
    if shape.experts is None:
        return layer_weights(shape)
    count, chosen = shape.experts.count, shape.experts.chosen
    return _matrices(shape, count * (1 - (1 - chosen / count) ** tokens))


def _matrices(shape: ModelConfig, experts: float | None) -> Any:
    """Count the numbers of all layers' matrices, with so many experts where there are any."""
    heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    rows: Any = shape.num_layers * heads
    sparse = len(shape.sparse_layers)
    rows += (shape.num_layers - sparse) * 3 * shape.intermediate_size
    if shape.experts is not None and experts is not None:
        rows += sparse * (shape.experts.count + 3 * shape.experts.width * experts)
    return shape.hidden_size * rows


def head_weights(shape: ModelConfig) -> int:
    return shape.vocab_size * shape.hidden_size


def parameters(shape: ModelConfig) -> int:
    """Count all parameters, norms and biases too."""
    if shape.counted is not None:
        return shape.counted
    width, keys = shape.hidden_size, shape.num_kv_heads * shape.head_dim
    queries = shape.num_heads * shape.head_dim
    small = 2 * width
    small += (queries + 2 * keys) * shape.qkv_bias + width * shape.o_bias
    small += (2 * shape.intermediate_size + width) * shape.mlp_bias
    small += (queries + keys if shape.wide_norm else 2 * shape.head_dim) * shape.qk_norm
    tables = head_weights(shape) * (1 if shape.tied else 2)
    return held_weights(shape) + shape.num_layers * small + width + tables


def active_parameters(shape: ModelConfig) -> int:
    """Count the parameters that one token is computed with: of experts those that it visits."""
    return parameters(shape) - held_weights(shape) + layer_weights(shape)


@dataclass(frozen=True)
class Frozen:
    """Training beside weights that stay: what learns, and how the layers' matrices are stored."""

    adapter: int  # numbers that learn
    narrow: int  # of a token, in the middle of all adapters: their ranks together
    quantize: str = "none"


def lora(shape: ModelConfig, spec: Spec, quantize: str = "none") -> Frozen:
    """Return the size of an adapter for a model of this shape."""
    return Frozen(adapter_weights(shape, spec), narrow_numbers(shape, spec), quantize)


def trained(shape: ModelConfig, frozen: Frozen | None) -> int:
    """Count the numbers that have gradients, moments and masters."""
    return parameters(shape) if frozen is None else frozen.adapter


def weight_bytes(shape: ModelConfig, width: int, frozen: Frozen | None) -> int:
    """Count the model's bytes without an adapter. Embedding, norms and head are never quantised."""
    matrices = held_weights(shape)
    rest = parameters(shape) - matrices
    kind = "none" if frozen is None else frozen.quantize
    if kind == "none":
        return (matrices + rest) * width
    if kind == "nf4":  # a scale in float32 for 64 weights of half a byte
        return matrices // 2 + matrices // 64 * SINGLE + rest * width
    queries, keys = (n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads))
    outputs = queries + 2 * keys + 2 * shape.hidden_size + 2 * shape.intermediate_size
    return matrices + shape.num_layers * outputs * SINGLE + rest * width


def dequantised_bytes(shape: ModelConfig, width: int, frozen: Frozen | None) -> int:
    """Count the bytes of the largest quantised matrix while in use; int8 is in float32 first."""
    if frozen is None or frozen.quantize == "none":
        return 0
    queries = shape.num_heads * shape.head_dim
    largest = shape.hidden_size * max(shape.intermediate_size, queries)
    return largest * (width if frozen.quantize == "nf4" else 2 * SINGLE + width)


def kept_numbers(shape: ModelConfig) -> int:
    """Count the keys and values of one token, in all layers."""
    both = shape.head_dim + (shape.value_dim or shape.head_dim)
    return shape.num_layers * shape.num_kv_heads * both


def _attention_flops(shape: ModelConfig, pairs: float) -> float:
    """Count scores and weighted sums of so many (token, token that it sees) pairs."""
    return 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * pairs


def _own_pairs(tokens: int) -> float:
    """Count the pairs of a sequence with itself, causal."""
    return tokens * (tokens + 1) / 2


# --- sampling ---------------------------------------------------------------------------------


def prefill_cost(shape: ModelConfig, groups: Sequence[Group], width: int = HALF) -> Parts:
    """Count every group's prompt once, in one pass."""
    tokens = sum(group.prompt for group in groups)
    pairs = sum(_own_pairs(group.prompt) for group in groups)
    return {
        "layers": Cost(2.0 * layer_weights(shape) * tokens, read_weights(shape, tokens) * width),
        "attention": Cost(_attention_flops(shape, pairs), kept_numbers(shape) * tokens * width),
    }


def rollout_cost(
    shape: ModelConfig, groups: Sequence[Group], slots: int, width: int = HALF
) -> Parts:
    """Count prompts, then as many steps as `slots` sequences at a time need, none of them idle."""
    lengths = [n for group in groups for n in group.completions]
    tokens, steps = sum(lengths), decode_steps(lengths, slots)
    behind = sum(_own_pairs(n) for n in lengths)
    pairs = behind + sum(group.prompt * sum(group.completions) for group in groups)
    prompts = sum(group.prompt * max(group.completions, default=0) for group in groups)
    decode = {
        "layers": Cost(
            2.0 * layer_weights(shape) * tokens,
            read_weights(shape, tokens / max(steps, 1)) * steps * width,
        ),
        "attention": Cost(
            _attention_flops(shape, pairs),
            kept_numbers(shape) * (prompts + behind) * width,
        ),
        "head": Cost(2.0 * head_weights(shape) * tokens, head_weights(shape) * steps * width),
    }
    return add(prefill_cost(shape, groups, width), decode)


def decode_steps(lengths: Sequence[int], slots: int) -> int:
    """Count the steps: the longest takes its own number; others than slots wait their turn."""
    return max(max(lengths, default=0), ceil(sum(lengths) / slots))


# --- learning ---------------------------------------------------------------------------------


def forward_cost(shape: ModelConfig, groups: Sequence[Group]) -> Parts:
    """Count prompts once a group; completions predict all tokens and read all but the last."""
    prompts = sum(group.prompt for group in groups)
    predicted = sum(sum(group.completions) for group in groups)
    read = sum(sum(group.completions) - len(group.completions) for group in groups)
    pairs = sum(
        _own_pairs(group.prompt) + sum((n - 1) * group.prompt + _own_pairs(n - 1) for n in rows)
        for group in groups
        for rows in [group.completions]
    )
    return {
        "layers": Cost(2.0 * layer_weights(shape) * (prompts + read)),
        "attention": Cost(_attention_flops(shape, pairs)),
        "head": Cost(2.0 * head_weights(shape) * predicted),
    }


def update_cost(
    shape: ModelConfig,
    groups: Sequence[Group],
    *,
    passes: int = 1,
    recompute: float = False,
    frozen: bool = False,
) -> Parts:
    """Forward and backward, which costs twice as much; once, where weights are frozen.

    What a backward pass computes once more is a part of its own and no model FLOPs: logits and
    attention scores always, a share of the layers with `recompute`.
    """
    forward = forward_cost(shape, groups)
    again = forward["head"].flops + forward["attention"].flops / 2
    again += recompute * (forward["layers"].flops + forward["attention"].flops)
    times = {name: 2 if frozen and name != "attention" else 3 for name in forward}
    parts = {name: cost * (times[name] * passes) for name, cost in forward.items()}
    return {**parts, "recomputed": Cost(again * passes)}


def needed(parts: Mapping[str, Cost]) -> Parts:
    """Return what the mathematics asks for: without what was computed twice to save memory."""
    return {name: cost for name, cost in parts.items() if name != "recomputed"}


def model_flops(parts: Mapping[str, Cost]) -> float:
    return total(needed(parts)).flops


def optimizer_cost(shape: ModelConfig, width: int = HALF, frozen: Frozen | None = None) -> Cost:
    """Count one step of AdamW, with float32 masters where the weights are in half precision."""
    count = trained(shape, frozen)
    return Cost(OPTIMIZER_FLOPS * count, OPTIMIZER_BYTES[width] * count)


# --- memory -----------------------------------------------------------------------------------

HEAD_CHUNK, HEAD_CHUNK_CPU = 2**27, 2**23  # logits at a time in the head's backward pass
# Interpreter and libraries on a CPU, as measured. On a GPU they do not count.
PROCESS = 310_000_000
BITSANDBYTES = 178_000_000  # importing it, as measured


def activations(
    shape: ModelConfig,
    width: int = HALF,
    *,
    recompute: float = False,
    cpu: bool = False,
    frozen: Frozen | None = None,
) -> int:
    """Count the bytes that one token of a micro-batch takes until its backward pass is through.

    In half precision on a GPU kernels keep of a layer: the residual stream twice, in float32;
    queries, keys and values, rotated; what attention saw and its log-sum; gate and up. Elsewhere
    plain PyTorch also keeps norms before and after their weights, silu(gate), its product with up,
    and what attention saw once more. Norms of queries and keys keep what they were made from, and
    a number for each head. One layer counts twice, for the gradients on their way. With `recompute`
    that layer is all, besides what goes into each: the residual stream and an addend; with a share
    of it, the other layers keep all. A
    mixture's kernels keep what goes into the experts, and whom each token visits; PyTorch each
    visit. Borrowed layers are counted as plain ones, which is rough.

    An adapter keeps what goes into it: on a GPU both norms and silu(gate) · up, and everywhere its
    narrow product.
    """
    cpu = cpu or not shape.native  # no kernels
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    seen, inner = shape.num_heads * shape.head_dim, shape.intermediate_size
    visits = 0  # experts of a token
    if shape.experts is not None:
        visits = shape.experts.chosen
        inner = max(visits * shape.experts.width, inner if shape.experts.dense else 0)
    if width == HALF and not cpu:
        layer = 2 * shape.hidden_size * SINGLE + (heads + seen + 2 * inner) * HALF
    else:
        layer = (6 * shape.hidden_size + heads + 2 * seen + 4 * inner) * width
    layer += shape.num_heads * SINGLE
    if shape.qk_norm:
        normed = shape.num_heads + shape.num_kv_heads
        # The kernels keep the joined projection, values included; PyTorch both sides of a weight.
        kept = heads * HALF if width == HALF and not cpu else 2 * normed * shape.head_dim * width
        layer += kept + normed * SINGLE
    # A token once for each expert that it visits: what goes in, what comes out, and its gradient.
    moved = 3 * visits * shape.hidden_size * width
    if visits and width == HALF and not cpu:
        layer += shape.hidden_size * HALF + visits * (SINGLE + 3 * 2 * SINGLE)
    elif visits:
        layer, moved = layer + moved, 0
    if frozen is not None:
        layer += ceil(frozen.narrow / shape.num_layers) * width
        if width == HALF and not cpu:
            layer += (2 * shape.hidden_size + inner) * HALF
    if recompute:
        entering = recompute * shape.hidden_size * (SINGLE + width)
        return 2 * layer + moved + ceil(shape.num_layers * (entering + (1 - recompute) * layer))
    return layer * (shape.num_layers + 1) + moved


def head_bytes(
    shape: ModelConfig,
    tokens: int,
    width: int = HALF,
    *,
    cpu: bool = False,
    frozen: Frozen | None = None,
) -> int:
    """Count a chunk of logits, its gradient, and a gradient of the head beside the sum."""
    most = HEAD_CHUNK_CPU if cpu else HEAD_CHUNK
    chunk = min(tokens * shape.vocab_size, most) * (SINGLE + (SINGLE if cpu else width))
    return chunk + (head_weights(shape) * SINGLE if frozen is None else 0)


@dataclass(frozen=True)
class LearningModel:
    """A model that learns beside the policy, with an optimizer of its own."""

    shape: ModelConfig | None = None  # None: a copy of the policy, which shares what is frozen
    spec: Spec | None = None  # the adapter that learns; None: as much as of the policy
    scalar: bool = False  # one number a token in place of a head over the vocabulary

    def beside(self, shape: ModelConfig, frozen: Frozen | None) -> Learning:
        """Return what learns, where the policy has this shape and this frozen part."""
        own, part = self.shape or shape, frozen if self.shape is None else None
        if self.spec is not None:
            part = lora(own, self.spec, "none" if part is None else part.quantize)
        shared = self.shape is None and frozen is not None
        return Learning(own, part, self.scalar, shared)


@dataclass(frozen=True)
class Learning:
    """A model as it learns: the policy, or one beside it."""

    shape: ModelConfig
    frozen: Frozen | None
    scalar: bool = False
    shared: bool = False  # its frozen part is the policy's

    @property
    def count(self) -> int:
        """Return how many numbers learn. An untied head that nobody reads does not."""
        found = trained(self.shape, self.frozen)
        if not self.scalar:
            return found
        unread = self.frozen is None and not self.shape.tied
        return found - unread * head_weights(self.shape) + self.shape.hidden_size

    def held(self, width: int) -> int:
        """Count its bytes: weights, masters and moments."""
        if self.frozen is None:
            weights = parameters(self.shape) * width
        else:
            base = 0 if self.shared else weight_bytes(self.shape, width, self.frozen)
            weights = base + self.frozen.adapter * width
        return weights + self.count * ((SINGLE if width == HALF else 0) + 2 * SINGLE)

    def saved(self) -> int:
        """Count its bytes in a checkpoint: weights in float32, and moments."""
        return self.count * 3 * SINGLE

    def forward_flops(self, groups: Sequence[Group]) -> float:
        parts = forward_cost(self.shape, groups)
        return total({k: x for k, x in parts.items() if not (self.scalar and k == "head")}).flops

    def while_updated(
        self, tokens: int, width: int, *, recompute: float, cpu: bool
    ) -> tuple[int, int, int]:
        """Count the bytes of its gradients, of activations, and of its head's logits."""
        each = activations(self.shape, width, recompute=recompute, cpu=cpu, frozen=self.frozen)
        head = head_bytes(self.shape, tokens, width, cpu=cpu, frozen=self.frozen)
        return self.count * SINGLE, tokens * each, 0 if self.scalar else head


@dataclass(frozen=True)
class RoleSize:
    """The cost of what takes part beside the policy; bytes for every weight that is trained."""

    name: str
    held: int = 0  # bytes in memory
    saved: int = 0  # bytes in a checkpoint
    passes: int = 0  # forward passes over the rows of a step, before the update
    updates: int = 0  # passes with a backward one, for every pass of the policy's
    model: LearningModel | None = None  # that it holds, where it learns: beside the bytes above
    models: tuple[ModelConfig, ...] = ()  # that it holds and asks, of sizes of their own, frozen
    smaller: str = ""  # how another, smaller model is asked for, where one can be
    # What a person can do where it is too much, and what it would be then; None: not there.
    instead: Mapping[str, RoleSize | None] = field(default_factory=dict)

    def learning(self, shape: ModelConfig, frozen: Frozen | None) -> Learning:
        """Return the model that is asked, beside a policy: its own, or one like the policy."""
        if self.models:
            return Learning(self.models[0], None)
        if self.model is None:
            return Learning(shape, frozen)
        return self.model.beside(shape, frozen)

    def model_bytes(self, shape: ModelConfig, width: int, frozen: Frozen | None) -> int:
        learns = 0 if self.model is None else self.model.beside(shape, frozen).held(width)
        return learns + sum(parameters(each) * width for each in self.models)


def held(
    shape: ModelConfig,
    width: int = HALF,
    *,
    roles: Sequence[RoleSize] = (),
    frozen: Frozen | None = None,
    ranks: int = 1,
    offload: bool = False,
) -> dict[str, int]:
    """Return the bytes that training holds all the time, by what they are for.

    What is frozen has neither masters nor moments, and roles share it. Of several ranks each has
    its part, beside the whole weights that it samples from; with `offload` the optimizer's numbers
    of the policy lie on the host (float32 shards that learn do not).
    """
    count, several = trained(shape, frozen), ranks > 1
    masters = count * SINGLE // ranks if width == HALF or several else 0
    return {
        "weights": weight_bytes(shape, width, frozen),
        "adapter": 0 if frozen is None else frozen.adapter * width,
        "dequantised": dequantised_bytes(shape, width, frozen),
        "gathered": gathered(shape, width) if several else 0,
        "master weights": 0 if offload and not several else masters,
        "optimizer moments": 0 if offload else 2 * count * SINGLE // ranks,
        **{
            role.name: (count * role.held + role.model_bytes(shape, width, frozen)) // ranks
            for role in roles
        },
    }


def gathered(shape: ModelConfig, width: int) -> int:
    """Count what a rank gathers: a block in use and the next, a block's gradient, and the rest.

    Embedding and head belong to no block: they are gathered for a whole pass, as is their gradient.
    """
    block = held_weights(shape) // shape.num_layers
    tables = head_weights(shape) * (1 if shape.tied else 2)
    return (2 * block + tables) * width + (block + tables) * width


def saved(shape: ModelConfig, roles: Sequence[RoleSize], frozen: Frozen | None = None) -> int:
    """Count what the roles add to a checkpoint."""
    models = [role.model.beside(shape, frozen) for role in roles if role.model is not None]
    each = trained(shape, frozen) * sum(role.saved for role in roles)
    return each + sum(model.saved() for model in models)


def largest_update(
    shape: ModelConfig,
    tokens: int,
    width: int = HALF,
    *,
    recompute: float = False,
    roles: Sequence[RoleSize] = (),
    cpu: bool = False,
    frozen: Frozen | None = None,
) -> tuple[int, int, int]:
    """Count gradients, activations and logits of the policy's update, or of a larger one beside it.

    One model is through with its update before the next begins.
    """
    models = [role.model.beside(shape, frozen) for role in roles if role.model is not None]
    every = [Learning(shape, frozen), *models]
    return max(
        (each.while_updated(tokens, width, recompute=recompute, cpu=cpu) for each in every),
        key=sum,
    )


def cache_bytes(
    shape: ModelConfig, slots: int, max_tokens: int, prompt: int, group: int, width: int = HALF
) -> int:
    """Count keys and values of the sequences in flight, a group's prompt once."""
    tokens = slots * max_tokens + ceil(slots / group) * prompt
    return kept_numbers(shape) * tokens * width


def memory(
    shape: ModelConfig,
    *,
    slots: int,
    max_tokens: int,
    prompt: int,
    group: int,
    micro_tokens: int,
    recompute: float = False,
    roles: Sequence[RoleSize] = (),
    width: int = HALF,
    cpu: bool = False,
    frozen: Frozen | None = None,
    ranks: int = 1,
    offload: bool = False,
) -> dict[str, int]:
    """Count the bytes of training by what they are for, on each rank."""
    gradients, kept, head = largest_update(
        shape, micro_tokens, width, recompute=recompute, roles=roles, cpu=cpu, frozen=frozen
    )
    parts = {
        **held(shape, width, roles=roles, frozen=frozen, ranks=ranks, offload=offload),
        "gradients": gradients // ranks,
        "micro-batch": kept + head,
        "cache": cache_bytes(shape, slots, max_tokens, prompt, group, width),
    }
    return {**parts, "process": PROCESS} if cpu else parts


def loading(shape: ModelConfig, width: int, frozen: Frozen | None) -> int:
    """Count the bytes on a CPU while a base is rounded to fewer bits: its file and itself."""
    if frozen is None or frozen.quantize == "none":
        return 0
    library = BITSANDBYTES if frozen.quantize == "nf4" else 0
    return 2 * parameters(shape) * width + PROCESS + library


def peak(parts: Mapping[str, int]) -> int:
    """Return the peak of `memory`: what is held, and the larger of learning and sampling."""
    learning = parts.get("gradients", 0) + parts.get("micro-batch", 0)
    sampling = parts.get("cache", 0)
    return sum(parts.values()) - min(learning, sampling)
