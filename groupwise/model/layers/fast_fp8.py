"""The arithmetic of a copy in 8-bit floats on a GPU: inputs are rounded where they are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from groupwise.model.kernels.fp8 import round_rows, swiglu_rounded
from groupwise.model.kernels.norm import add_norm_rounded
from groupwise.model.layers.experts import FeedForward
from groupwise.model.layers.fast import Fast
from groupwise.model.layers.fp8 import Rounded, scaled_product
from groupwise.model.layers.linear import Linear

if TYPE_CHECKING:
    from groupwise.model.layers.transformer import Norm, Policy


class FastFp8(Fast):
    """Sampling alone: no gradient passes."""

    def lay_out(self, model: Policy) -> None:
        """Leave the bits where they are: they lie together from the beginning."""

    def linear(self, module: Linear, x_TD: Tensor) -> Tensor:
        return scaled_product(round_rows(x_TD), [module], x_TD.dtype)

    def feed_forward(
        self, x_TD: Tensor, more_TD: Tensor, norm: Norm, layer: FeedForward
    ) -> tuple[Tensor, Tensor]:
        x_TD, gate_up_TF2 = self._norm_linear(x_TD, more_TD, norm, layer.gate_proj, layer.up_proj)
        return x_TD, scaled_product(
            swiglu_rounded(gate_up_TF2), [layer.down_proj], gate_up_TF2.dtype
        )

    def _norm_linear(
        self, x_TD: Tensor | None, more_TD: Tensor, norm: Norm, *modules: Linear
    ) -> tuple[Tensor, Tensor]:
        if not modules:
            return super()._norm_linear(x_TD, more_TD, norm)
        sum_TD, bits_TD, scale_T = add_norm_rounded(x_TD, more_TD, norm.weight, norm.eps)
        return sum_TD, scaled_product(Rounded(bits_TD, scale_T), modules, norm.weight.dtype)
