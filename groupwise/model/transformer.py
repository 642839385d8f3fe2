"""The policy's one forward pass: packed tokens in, hidden states out, for sampler and learner.

Sequences lie one behind the other without padding; who may look at whom is the business of the
attention function that the caller passes in (see attention.py). Parameters live in modules named
as in Hugging Face checkpoints, so `state_dict()` is the checkpoint. Axes besides those of
CONTRIBUTING.md: `_T` token of the pack, `_D` model width, `_H` query head, `_J` key/value head,
`_W` head width, `_F` feed-forward width or frequency.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from groupwise.errors import ModelError
from groupwise.model.attention import Attend
from groupwise.model.config import ModelConfig
from groupwise.model.rope import rope_tables, rotate


class PolicyModel(Protocol):
    """All that sampler and learner ask of an architecture."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def head_weight(self) -> Tensor:
        """[V, D]: logits are hidden states times its transpose."""
        ...

    def __call__(self, token_T: Tensor, position_T: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, D] after the last norm."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


class Linear(nn.Module):
    """A weight, perhaps a bias, perhaps an adapter whose output is added."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.adapter: nn.Module | None = None

    def forward(self, x_TD: Tensor) -> Tensor:
        return linear(self, x_TD)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight, self.eps)


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
        self.q_norm = Norm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = Norm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(
        self, x_TD: Tensor, cos_T1W: Tensor, sin_T1W: Tensor, attend: Attend, layer: int
    ) -> Tensor:
        heads = (len(x_TD), -1, self.head_dim)
        query_THW = self.q_proj(x_TD).view(heads)
        key_TJW = self.k_proj(x_TD).view(heads)
        value_TJW = self.v_proj(x_TD).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            query_THW, key_TJW = self.q_norm(query_THW), self.k_norm(key_TJW)
        query_THW = rotate(query_THW, cos_T1W, sin_T1W)
        key_TJW = rotate(key_TJW, cos_T1W, sin_T1W)
        seen_THW = attend(layer, query_THW, key_TJW, value_TJW)
        out_TD: Tensor = self.o_proj(seen_THW.flatten(1))
        return out_TD


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(width, inner, bias)
        self.up_proj = Linear(width, inner, bias)
        self.down_proj = Linear(inner, width, bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))
        return out_TD


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self, x_TD: Tensor, cos_T1W: Tensor, sin_T1W: Tensor, attend: Attend, layer: int
    ) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cos_T1W, sin_T1W, attend, layer)
        x_TD = x_TD + self.mlp(self.post_attention_layernorm(x_TD))
        return x_TD


class Decoder(nn.Module):
    """What Hugging Face calls `model`: everything below the head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.norm_eps)


class Transformer(nn.Module):
    """A decoder of the Llama layout. Its parameters start empty: load or `initialise` them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._config = config
        self.recompute = False  # in the backward pass, instead of keeping each layer's activations
        self.model = Decoder(config)
        if not config.tied:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def head_weight(self) -> Tensor:
        head = self.model.embed_tokens if self._config.tied else self.lm_head
        return head.weight

    def forward(self, token_T: Tensor, position_T: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the last norm, one row a token."""
        check_pack(self._config, token_T, position_T)
        x_TD = self.model.embed_tokens(token_T)
        cos_T1W, sin_T1W = rope_tables(self._config, position_T, x_TD.dtype)
        for index, layer in enumerate(self.model.layers):
            if self.recompute and torch.is_grad_enabled():
                x_TD = checkpoint(layer, x_TD, cos_T1W, sin_T1W, attend, index, use_reentrant=False)
            else:
                x_TD = layer(x_TD, cos_T1W, sin_T1W, attend, index)
        out_TD: Tensor = self.model.norm(x_TD)
        return out_TD

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


def linear(module: Linear, x_TD: Tensor) -> Tensor:
    """Every matrix product below the head goes through here."""
    out_TD = F.linear(x_TD, module.weight, module.bias)
    return out_TD if module.adapter is None else out_TD + module.adapter(x_TD)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight; the mean in float32, the product in the model's precision."""
    wide_TD = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
    return weight_D * F.rms_norm(wide_TD, wide_TD.shape[-1:], eps=eps).to(x_TD.dtype)


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
