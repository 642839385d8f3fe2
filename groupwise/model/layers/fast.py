"""The arithmetic of a model on a GPU in bfloat16: Triton kernels around matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from groupwise.errors import ModelError
from groupwise.model.adapters.fused_lora import add_adapters, lay_adapters
from groupwise.model.adapters.quantized import QuantizedLinear, frozen_product
from groupwise.model.kernels.experts import exact_products
from groupwise.model.kernels.head import HeadScore
from groupwise.model.kernels.matmul import matmul
from groupwise.model.kernels.norm import add_norm_backward, add_norm_forward, rms_norm
from groupwise.model.kernels.rotary import rotate, split_rotate
from groupwise.model.kernels.swiglu import swiglu, swiglu_backward, swiglu_forward
from groupwise.model.layers.attention import Attend
from groupwise.model.layers.experts import FeedForward, SparseFeedForward, choose
from groupwise.model.layers.fused_experts import (
    WHOLE,
    GroupedProduct,
    visit_adapted,
    visit_together,
)
from groupwise.model.layers.fused_linear import (
    Product,
    accumulate,
    biases_of,
    concatenated,
    fused_linear,
    fused_product,
    lay_together,
)
from groupwise.model.layers.head import NO_RULE, HeadOutputs, HeadRule, log_probs
from groupwise.model.layers.linear import Linear
from groupwise.model.layers.prefix import PrefixAttention
from groupwise.model.layers.routes import RouteAsk, Visited

if TYPE_CHECKING:
    from groupwise.model.layers.transformer import Attention, Norm, Policy, Transformer


class Fast:
    """The library's products, whose sums depend on the batch's shape in their last bits."""

    name = "fast"
    product: Product | None = None
    routing: Product | None = None  # of routers
    products: GroupedProduct | None = None  # of experts

    def lay_out(self, model: Policy) -> None:
        model.note_moved()
        for layer in cast("Transformer", model).layers:  # others have no kernels
            attention, mlp = layer.self_attn, layer.mlp
            together = [[attention.q_proj, attention.k_proj, attention.v_proj]]
            if isinstance(mlp, FeedForward):  # experts lie together as they are
                together.append([mlp.gate_proj, mlp.up_proj])
            for modules in together:
                if not _quantized(modules):
                    lay_together(modules)
                lay_adapters(modules)

    def add_norm(self, x_TD: Tensor | None, more_TD: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return self._norm_linear(x_TD, more_TD, norm)

    def heads(
        self,
        x_TD: Tensor | None,
        more_TD: Tensor,
        norm: Norm,
        layer: Attention,
        cos_TF: Tensor,
        sin_TF: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        modules = (layer.q_proj, layer.k_proj, layer.v_proj)
        x_TD, joined_TF = self._norm_linear(x_TD, more_TD, norm, *modules)
        width = layer.head_dim
        count, kv_count = (module.outputs // width for module in modules[:2])
        plain = layer.q_norm is None or layer.k_norm is None
        if plain and layer.clip is not None:
            joined_TF = joined_TF.clamp(-layer.clip, layer.clip)
        if layer.q_norm is None or layer.k_norm is None:
            return x_TD, *split_rotate(joined_TF, cos_TF, sin_TF, count, kv_count, width)
        heads = joined_TF.view(len(joined_TF), -1, width)
        query_THW, key_TJW, value_TJW = torch.split(heads, [count, kv_count, kv_count], dim=1)
        query_THW, key_TJW = (
            _heads_norm(query_THW, layer.q_norm),
            _heads_norm(key_TJW, layer.k_norm),
        )
        if layer.clip is not None:
            query_THW, key_TJW, value_TJW = (
                x_THW.clamp(-layer.clip, layer.clip) for x_THW in (query_THW, key_TJW, value_TJW)
            )
        query_THW, key_TJW = (rotate(x_THW, cos_TF, sin_TF) for x_THW in (query_THW, key_TJW))
        return x_TD, query_THW, key_TJW, value_TJW.contiguous()

    def linear(self, module: Linear, x_TD: Tensor) -> Tensor:
        return self._linear([module], x_TD)

    def _linear(self, modules: Sequence[Linear], x_TD: Tensor) -> Tensor:
        """Return what layers and their adapters make of one input, side by side."""
        if _quantized(modules):
            each = [_frozen_or_plain(module, x_TD, self.product) for module in modules]
            out_TF = each[0] if len(each) == 1 else torch.cat(each, dim=1)
        else:
            out_TF = fused_linear(x_TD, modules, self.product)
        return add_adapters(out_TF, x_TD, modules, self.product)

    def feed_forward(
        self, x_TD: Tensor, more_TD: Tensor, norm: Norm, layer: FeedForward
    ) -> tuple[Tensor, Tensor]:
        x_TD, gate_up_TF2 = self._norm_linear(x_TD, more_TD, norm, layer.gate_proj, layer.up_proj)
        down = layer.down_proj
        if down.adapter is not None or _quantized([down]):
            return x_TD, self.linear(down, swiglu(gate_up_TF2))
        out_TD: Tensor = _GatedLinear.apply(  # type: ignore[no-untyped-call]
            gate_up_TF2, self.product or F.linear, down.weight, down.bias
        )
        return x_TD, out_TD

    def mixture(
        self,
        x_TD: Tensor,
        more_TD: Tensor,
        norm: Norm,
        layer: SparseFeedForward,
        asked: RouteAsk,
    ) -> tuple[Tensor, Tensor, Visited | None]:
        x_TD, normed_TD = self._norm_linear(x_TD, more_TD, norm)
        logits_TE = fused_product(normed_TD, layer.gate.weight, self.routing)
        choice = choose(logits_TE, layer, asked)
        experts = layer.experts
        if experts.adapted:
            return x_TD, visit_adapted(normed_TD, choice, experts), choice.visited
        out_TD = visit_together(
            normed_TD,
            choice.expert_TK,
            choice.gate_TK,
            experts.gate_up_proj,
            experts.down_proj,
            self.products,
        )
        return x_TD, out_TD, choice.visited

    def attention(
        self, prompts: Sequence[int], completions: Sequence[Sequence[int]], device: torch.device
    ) -> Attend:
        return PrefixAttention(prompts, completions, device, exact=self.product is not None)

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
    ) -> HeadOutputs:
        if (
            top_k or at_TK is not None or rule is not NO_RULE
        ):  # few recipes ask for these: the plain way serves them
            return log_probs(
                hidden_TD,
                weight_VD,
                token_T,
                temperature=temperature,
                entropy=entropy,
                top_k=top_k,
                at_TK=at_TK,
                rule=rule,
            )
        found = HeadScore.apply(  # type: ignore[no-untyped-call]
            hidden_TD, weight_VD, token_T, 1.0 / temperature, entropy
        )
        return HeadOutputs(*found)

    def _norm_linear(
        self, x_TD: Tensor | None, more_TD: Tensor, norm: Norm, *modules: Linear
    ) -> tuple[Tensor, Tensor]:
        """Return x + more, and its norm or what modules make of that, side by side."""
        biases = biases_of(modules)
        alone = biases is None or _quantized(modules) or any(m.adapter is not None for m in modules)
        together = () if alone else modules
        sum_TD, out_TF = _NormLinear.apply(  # type: ignore[no-untyped-call]
            x_TD,
            more_TD,
            norm.weight,
            norm.eps,
            self.product or F.linear,
            len(together),
            *(module.weight for module in together),
            *((biases or ()) if together else ()),
        )
        return sum_TD, self._linear(modules, out_TF) if alone else out_TF


class Exact(Fast):
    """Products that add up in one order, whatever the batch: a row has the same bits in any."""

    name = "exact"
    product = staticmethod(matmul)
    products = staticmethod(exact_products)

    def lay_out(self, model: Policy) -> None:
        for layer in cast("Transformer", model).layers:
            if isinstance(layer.mlp, SparseFeedForward) and layer.mlp.experts.adapted:
                raise ModelError(
                    "engine.exact=true is not done for adapters on experts. Set adapter.targets to "
                    'those of attention, ["q_proj", "k_proj", "v_proj", "o_proj"], or '
                    "engine.exact=false."
                )
        super().lay_out(model)

    @staticmethod
    def routing(x_TD: Tensor, weight_ED: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply; rows are filled up with experts for the copy engine, and cut again."""
        experts = len(weight_ED)
        filled_ED = F.pad(weight_ED, (0, 0, 0, -experts % WHOLE))
        return matmul(x_TD, filled_ED, bias)[:, :experts].contiguous()


def _heads_norm(x_THW: Tensor, norm: Norm) -> Tensor:
    """Return the norm of each head, or of all together, as wide as its weight is."""
    if len(norm.weight) == x_THW.shape[-1]:
        return rms_norm(x_THW, norm.weight, norm.eps)
    return rms_norm(x_THW.flatten(1), norm.weight, norm.eps).view(x_THW.shape)


def _frozen_or_plain(module: Linear, x_TD: Tensor, product: Product | None) -> Tensor:
    if isinstance(module, QuantizedLinear):
        return frozen_product(x_TD, module, product)
    return fused_linear(x_TD, [module], product)


def _quantized(modules: Sequence[Linear]) -> bool:
    return any(isinstance(module, QuantizedLinear) for module in modules)


class _NormLinear(torch.autograd.Function):
    """The residual stream, x + more, and its norm times weights (or the norm alone).

    The norm is made again in the backward pass, which reads the stream anyway.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor | None,
        more_TD: Tensor,
        norm_D: Tensor,
        eps: float,
        product: Product,
        count: int,
        *parameters: nn.Parameter,
    ) -> tuple[Tensor, Tensor]:
        weights, biases = parameters[:count], parameters[count:]
        sum_TD, normed_TD, rstd_T = add_norm_forward(x_TD, more_TD, norm_D, eps)
        ctx.save_for_backward(sum_TD, rstd_T, norm_D, *weights)
        # Gradients belong to the parameters, of which recomputation hands back copies.
        ctx.weights, ctx.biases, ctx.first = weights, biases, x_TD is None
        ctx.set_materialize_grads(False)
        if not count:
            return sum_TD, normed_TD
        return sum_TD, product(
            normed_TD, concatenated(weights), concatenated(biases) if biases else None
        )

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_sum_TD: Tensor | None, grad_TF: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        sum_TD, rstd_T, norm_D, *weights = ctx.saved_tensors
        count = len(weights)
        need = ctx.needs_input_grad[6:]
        if grad_TF is None:  # only the stream was used
            passed = None if ctx.first else grad_sum_TD
            more = None if grad_sum_TD is None else grad_sum_TD.to(norm_D.dtype)
            return (passed, more, *(None for _ in ctx.needs_input_grad[2:]))
        grad_normed_TD = grad_TF @ concatenated(weights) if count else grad_TF
        grad_x_TD, grad_more_TD, normed_TD, grad_norm_D = add_norm_backward(
            sum_TD, norm_D, rstd_T, grad_normed_TD, grad_sum_TD
        )
        if count:
            accumulate(ctx.weights, need[:count], grad_TF, normed_TD)
        if ctx.biases:
            accumulate(ctx.biases, need[count:], grad_TF, None)
        grad_first = None if ctx.first else grad_x_TD
        return (grad_first, grad_more_TD, grad_norm_D, None, None, None, *(None for _ in need))


class _GatedLinear(torch.autograd.Function):
    """silu(gate) · up, times a weight. What is multiplied is made again in the backward pass.

    It is a quarter of a layer's activations, and costs one more writing in a pass that reads gate
    and up anyway.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate_up_TF2: Tensor,
        product: Product,
        weight_DF: nn.Parameter,
        bias_D: nn.Parameter | None,
    ) -> Tensor:
        ctx.save_for_backward(gate_up_TF2, weight_DF)
        ctx.weight, ctx.bias = weight_DF, bias_D
        return product(swiglu_forward(gate_up_TF2), weight_DF, bias_D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        gate_up_TF2, weight_DF = ctx.saved_tensors
        _, _, need_weight, need_bias = ctx.needs_input_grad
        grad_gate_up_TF2, act_TF = swiglu_backward(gate_up_TF2, grad_TD @ weight_DF)
        accumulate([ctx.weight], [need_weight], grad_TD, act_TF)
        if ctx.bias is not None:
            accumulate([ctx.bias], [need_bias], grad_TD, None)
        return grad_gate_up_TF2, None, None, None
