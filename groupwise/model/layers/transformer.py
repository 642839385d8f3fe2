"""The policy's one forward pass: packed tokens in, hidden states out, for sampler and learner.

Sequences lie one behind the other without padding; who may look at whom is the business of the
attention function that the caller passes in (see attention.py). Parameters live in modules named
as in Hugging Face checkpoints, so `state_dict()` is the checkpoint. Axes besides those of
CONTRIBUTING.md: `_T` token of the pack, `_D` model width, `_H` query head, `_J` key/value head,
`_W` head width, `_F` feed-forward width or frequency.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol, Self, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from groupwise.errors import ModelError
from groupwise.model.config import ModelConfig
from groupwise.model.layers.attention import Attend
from groupwise.model.layers.divergence import divergences
from groupwise.model.layers.experts import FeedForward, SparseFeedForward
from groupwise.model.layers.head import (
    NO_RULE,
    HeadOutputs,
    HeadQuery,
    HeadRule,
    log_square_mass,
)
from groupwise.model.layers.linear import Linear
from groupwise.model.layers.ops import Ops, Plain
from groupwise.model.layers.rope import rope_tables
from groupwise.model.layers.routes import NOTHING, RouteAsk, Routes, Visited
from groupwise.parallel.shards import refuse_shards


class PolicyModel(Protocol):
    """All that sampler and learner ask of an architecture."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def ops(self) -> Ops:
        """Return how its arithmetic is done; also for the head and for attention within packs."""
        ...

    @property
    def head_weight(self) -> Tensor:
        """Return [V, D]: logits are hidden states times its transpose."""
        ...

    @property
    def head_rule(self) -> HeadRule:
        """Return what is done to logits; nothing in most architectures."""
        ...

    def __call__(
        self,
        token_T: Tensor,
        position_T: Tensor,
        attend: Attend,
        *,
        routes: Routes | None = None,
    ) -> Tensor:
        """Hidden states [T, D] after the last norm; of a mixture, routes if they are asked for."""
        ...

    def predict(
        self,
        token_T: Tensor,
        position_T: Tensor,
        attend: Attend,
        query: HeadQuery,
        routes: Routes | None = None,
    ) -> HeadOutputs:
        """Return what the head says of the hidden states that are asked for."""
        ...

    @property
    def placement(self) -> int:
        """Return a number that changes if parameters are moved or replaced, not if they learn."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


Model = TypeVar("Model", bound=PolicyModel)


class Policy(nn.Module):
    """A model that can be trained: the layers of this module, or borrowed ones (borrowed.py)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._config = config
        # Share of the layers that are computed again in the backward pass, instead of keeping what
        # they have computed.
        self.recompute: float = False
        self.ops: Ops = Plain()
        self._placement = 0

    @property
    def placement(self) -> int:
        """Return a number that changes if parameters are moved or replaced, not if they learn.

        Who keeps addresses of parameters, as captured steps do, compares it.
        """
        return self._placement

    def note_moved(self) -> None:
        """Note that parameters lie elsewhere now, or are others."""
        self._placement += 1

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self.note_moved()  # .to(device), .bfloat16() and their like all come through here
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        if assign:
            self.note_moved()
        return super().load_state_dict(state_dict, strict, assign)

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def body(self) -> nn.Module:
        """Return what a text passes through below the head."""
        raise NotImplementedError

    @property
    def head_weight(self) -> Tensor:
        raise NotImplementedError

    @property
    def head_rule(self) -> HeadRule:
        return NO_RULE

    def hidden(
        self, token_T: Tensor, position_T: Tensor, attend: Attend, routes: Routes | None = None
    ) -> Tensor:
        """Return hidden states after the last norm, one row a token."""
        raise NotImplementedError

    def forward(
        self,
        token_T: Tensor,
        position_T: Tensor,
        attend: Attend,
        query: HeadQuery | None = None,
        routes: Routes | None = None,
    ) -> Tensor | HeadOutputs:
        """Return hidden states, or what the head says of those that are asked for.

        All parameters are read in here, the head's too: hooks that gather a sharded model's
        weights act around this call, and outside it a weight is a shard.
        """
        hidden_TD = self.hidden(token_T, position_T, attend, routes)
        if query is None:
            return hidden_TD
        # A group's answers all read their prompt's last row. A GPU would add up the gradient of
        # `index_select` there in the order of chance; that of an embedding it sorts first.
        asked_AD = F.embedding(query.take_A, hidden_TD)
        found = self.ops.log_probs(
            asked_AD,
            self.head_weight,
            query.token_A,
            temperature=query.temperature,
            entropy=query.entropy,
            top_k=query.top_k,
            at_TK=query.at_AK,
            rule=self.head_rule,
        )
        if query.square_mass:
            mass_A = log_square_mass(asked_AD, self.head_weight, query.temperature, self.head_rule)
            found = found._replace(square_mass_T=mass_A)
        if not query.against:
            return found
        apart_A = divergences(
            asked_AD, self.head_weight, query.against, query.temperature, self.head_rule
        )
        return found._replace(divergence_T=apart_A)

    def predict(
        self,
        token_T: Tensor,
        position_T: Tensor,
        attend: Attend,
        query: HeadQuery,
        routes: Routes | None = None,
    ) -> HeadOutputs:
        """Return what the head says of the hidden states that are asked for."""
        found: HeadOutputs = self(token_T, position_T, attend, query, routes)
        return found


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))

    def forward(self, token_T: Tensor) -> Tensor:
        return F.embedding(token_T, self.weight)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = Linear(config.hidden_size, queries, config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, keys, config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, keys, config.qkv_bias)
        self.o_proj = Linear(queries, config.hidden_size, config.o_bias)
        widths = (queries, keys) if config.wide_norm else (config.head_dim, config.head_dim)
        norms = [Norm(width, config.norm_eps) if config.qk_norm else None for width in widths]
        self.q_norm, self.k_norm = norms
        self.clip = config.clip_qkv


class Layer(nn.Module):
    """Takes the residual stream and what the layer before adds to it; hands on the same two."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.norm_eps)
        sparse = number in config.sparse_layers
        self.mlp = SparseFeedForward(config) if sparse else FeedForward(config)

    def forward(
        self,
        x_TD: Tensor | None,
        more_TD: Tensor,
        cos_TF: Tensor,
        sin_TF: Tensor,
        attend: Attend,
        layer: int,
        ops: Ops,
        asked: RouteAsk = NOTHING,
    ) -> tuple[Tensor, Tensor, Visited | None]:
        attention = self.self_attn
        x_TD, query_THW, key_TJW, value_TJW = ops.heads(
            x_TD, more_TD, self.input_layernorm, attention, cos_TF, sin_TF
        )
        seen_THW = attend(layer, query_THW, key_TJW, value_TJW)
        seen_TD = ops.linear(attention.o_proj, seen_THW.flatten(1))
        given = (x_TD, seen_TD, self.post_attention_layernorm)
        if isinstance(self.mlp, SparseFeedForward):
            return ops.mixture(*given, self.mlp, asked)
        return *ops.feed_forward(*given, self.mlp), None


class TransformerBody(nn.Module):
    """Everything below the head: Hugging Face calls it `model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, at) for at in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.norm_eps)


class Transformer(Policy):
    """A decoder of the Llama layout. Its parameters start empty: load or `initialise` them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.model = TransformerBody(config)
        if not config.tied:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def body(self) -> TransformerBody:
        return self.model

    @property
    def layers(self) -> list[Layer]:
        return cast(list[Layer], list(self.model.layers))

    @property
    def head_weight(self) -> Tensor:
        head = self.model.embed_tokens if self._config.tied else self.lm_head
        return head.weight

    def hidden(
        self, token_T: Tensor, position_T: Tensor, attend: Attend, routes: Routes | None = None
    ) -> Tensor:
        check_pack(self._config, token_T, position_T)
        if routes is not None:
            routes.check(self._config, len(token_T))
        visited: list[Visited | None] = []
        x_TD, more_TD = None, self.model.embed_tokens(token_T)
        cos_TF, sin_TF = rope_tables(self._config, position_T)
        for index, layer in enumerate(self.layers):
            asked = NOTHING if routes is None else routes.asked(index)
            given = (x_TD, more_TD, cos_TF, sin_TF, attend, index, self.ops, asked)
            if torch.is_grad_enabled() and computed_again(index, self.recompute):
                x_TD, more_TD, told = checkpoint(layer, *given, use_reentrant=False)
            else:
                x_TD, more_TD, told = layer(*given)
            visited.append(told)
        if routes is not None:
            routes.keep(visited)
        return self.ops.add_norm(x_TD, more_TD, self.model.norm)[1]

    @torch.no_grad()
    def add_token(self) -> None:
        """Give the vocabulary a token more, whose embedding is 0."""
        old = self.model.embed_tokens.weight
        grown = torch.cat([old.detach(), old.new_zeros(1, old.shape[1])])
        self.model.embed_tokens.weight = nn.Parameter(grown, requires_grad=old.requires_grad)
        self._config = replace(self._config, vocab_size=self._config.vocab_size + 1)
        self.note_moved()

    @torch.no_grad()
    def initialise(self, generator: torch.Generator, std: float = 0.02) -> Transformer:
        """Fresh weights: normal, norms 1, biases 0. The order of draws is that of the names."""
        for name, parameter in sorted(self.named_parameters()):
            if name.endswith("bias"):
                parameter.zero_()
            elif name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, std, generator=generator)
        return self


def computed_again(index: int, share: float) -> bool:
    """Tell whether a layer is among the share that keeps nothing: they are spread evenly."""
    little = 1e-9  # a tenth of ten layers is one, whatever the last bit says
    return math.floor((index + 1) * share + little) > math.floor(index * share + little)


def copy_trained(model: Model) -> Model:
    """Copy the model, sharing what is frozen: no update ever makes the two differ there."""
    refuse_shards(model.named_parameters(), "A copy of the policy")
    frozen = {id(p): p for _, p in model.named_parameters() if not p.requires_grad}
    return copy.deepcopy(model, dict[int, Any](frozen))


def check_pack(config: ModelConfig, token_T: Tensor, position_T: Tensor) -> None:
    if token_T.dim() != 1 or token_T.shape != position_T.shape:
        raise ModelError(
            f"Packed tokens and positions have shapes {tuple(token_T.shape)} and "
            f"{tuple(position_T.shape)}; both must be flat and of one length. Pack the sequences "
            f"one behind the other."
        )
    # Reading the largest position waits for the device: only where a longer one would be wrong.
    if config.position_limit is not None and len(position_T):
        capturing = position_T.is_cuda and torch.cuda.is_current_stream_capturing()
        if not capturing:
            config.check_length(int(position_T.max()) + 1)
