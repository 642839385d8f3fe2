"""How the arithmetic of a model is done: in plain PyTorch, or with kernels for a GPU.

A model holds one of these, and sampler and learner both go through it: what they compute can only
differ by the shapes of their batches.

    Plain   PyTorch alone, on any device, in any precision; rounds where transformers rounds
    Fast    Triton kernels around the library's matrix products, bfloat16 on CUDA
    Exact   the same with products and attention whose sums do not depend on the batch's shape
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.model.adapters.lora import plain_product
from groupwise.model.adapters.quantized import QuantizedLinear, frozen_product
from groupwise.model.layers.attention import Attend, shared_prompts
from groupwise.model.layers.experts import FeedForward, SparseFeedForward, choose, visit
from groupwise.model.layers.head import NO_RULE, HeadOutputs, HeadRule, log_probs
from groupwise.model.layers.linear import Linear
from groupwise.model.layers.products import linear
from groupwise.model.layers.rope import rotate
from groupwise.model.layers.routes import RouteAsk, Visited

if TYPE_CHECKING:
    from groupwise.model.layers.transformer import Attention, Norm, Policy


class Ops(Protocol):
    name: str

    def lay_out(self, model: Policy) -> None:
        """Put the model's weights where its products want them. Do it again after copying one."""
        ...

    def add_norm(self, x_TD: Tensor | None, more_TD: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return x + more, the residual stream (at first there is no x), and its norm."""
        ...

    def heads(
        self,
        x_TD: Tensor | None,
        more_TD: Tensor,
        norm: Norm,
        layer: Attention,
        cos_TF: Tensor,
        sin_TF: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return x + more; of its norm, queries, keys and values. The first two are rotated."""
        ...

    def linear(self, module: Linear, x_TD: Tensor) -> Tensor: ...

    def feed_forward(
        self, x_TD: Tensor, more_TD: Tensor, norm: Norm, layer: FeedForward
    ) -> tuple[Tensor, Tensor]:
        """Return x + more; of its norm, down(silu(gate) · up)."""
        ...

    def mixture(
        self,
        x_TD: Tensor,
        more_TD: Tensor,
        norm: Norm,
        layer: SparseFeedForward,
        asked: RouteAsk,
    ) -> tuple[Tensor, Tensor, Visited | None]:
        """Return x + more; of its norm, what its experts make of it; which they were, if asked."""
        ...

    def attention(
        self, prompts: Sequence[int], completions: Sequence[Sequence[int]], device: torch.device
    ) -> Attend:
        """Attend within a pack of prompts, each with its completions behind it."""
        ...

    def log_probs(
        self,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        token_T: Tensor,
        *,
        temperature: float,
        entropy: bool = False,
        top_k: int = 0,
        at_TK: Tensor | None = None,
        rule: HeadRule = NO_RULE,
    ) -> HeadOutputs: ...


class Plain:
    name = "plain"

    def lay_out(self, model: Policy) -> None:
        """Leave the weights where they are."""

    def add_norm(self, x_TD: Tensor | None, more_TD: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        x_TD = more_TD if x_TD is None else x_TD + more_TD
        return x_TD, rms_norm(x_TD, norm.weight, norm.eps)

    def heads(
        self,
        x_TD: Tensor | None,
        more_TD: Tensor,
        norm: Norm,
        layer: Attention,
        cos_TF: Tensor,
        sin_TF: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x_TD, normed_TD = self.add_norm(x_TD, more_TD, norm)
        query_THW, key_TJW, value_TJW = (
            self.linear(module, normed_TD).view(len(x_TD), -1, layer.head_dim)
            for module in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            query_THW = heads_norm(query_THW, layer.q_norm)
            key_TJW = heads_norm(key_TJW, layer.k_norm)
        if layer.clip is not None:
            query_THW, key_TJW, value_TJW = (
                x_THW.clamp(-layer.clip, layer.clip) for x_THW in (query_THW, key_TJW, value_TJW)
            )
        query_THW, key_TJW = (rotate(x_THW, cos_TF, sin_TF) for x_THW in (query_THW, key_TJW))
        return x_TD, query_THW, key_TJW, value_TJW

    def linear(self, module: Linear, x_TD: Tensor) -> Tensor:
        if isinstance(module, QuantizedLinear):
            out_TD = frozen_product(x_TD, module)
        else:
            out_TD = linear(x_TD, module.weight, module.bias)
        if module.adapter is None:
            return out_TD
        return out_TD + module.adapter(x_TD, plain_product)

    def feed_forward(
        self, x_TD: Tensor, more_TD: Tensor, norm: Norm, layer: FeedForward
    ) -> tuple[Tensor, Tensor]:
        x_TD, normed_TD = self.add_norm(x_TD, more_TD, norm)
        gate_TF = self.linear(layer.gate_proj, normed_TD)
        up_TF = self.linear(layer.up_proj, normed_TD)
        return x_TD, self.linear(layer.down_proj, F.silu(gate_TF) * up_TF)

    def mixture(
        self,
        x_TD: Tensor,
        more_TD: Tensor,
        norm: Norm,
        layer: SparseFeedForward,
        asked: RouteAsk,
    ) -> tuple[Tensor, Tensor, Visited | None]:
        x_TD, normed_TD = self.add_norm(x_TD, more_TD, norm)
        choice = choose(F.linear(normed_TD, layer.gate.weight), layer, asked)
        return x_TD, visit(normed_TD, choice, layer.experts), choice.visited

    attention = staticmethod(shared_prompts)
    log_probs = staticmethod(log_probs)


def heads_norm(x_THW: Tensor, norm: Norm) -> Tensor:
    """Return the norm of each head, or of all together, as wide as its weight is."""
    rows = x_THW.reshape(len(x_THW), -1, len(norm.weight))
    return rms_norm(rows, norm.weight, norm.eps).view(x_THW.shape)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) · weight; the mean in float32, the product in the model's precision."""
    wide_TD = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
    return weight_D * F.rms_norm(wide_TD, wide_TD.shape[-1:], eps=eps).to(x_TD.dtype)
