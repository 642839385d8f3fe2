"""Feed-forward layers: one for all tokens, or a router and the experts that it chooses from.

    p = softmax(x · Wᵀ) in float32 over all E experts;  I = the K largest;  g_e = p_e, e in I,
    divided by their sum where the model does so;  y = Σ_I g_e · down_e(silu(gate_e x) · up_e x)

Parameters are called as in transformers: `gate.weight`, `experts.gate_up_proj`,
`experts.down_proj`. Axes besides those of transformer.py: `_E` expert, `_K` experts of a token,
`_S` visit of a token to an expert, in the order of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.model.config import ModelConfig
from groupwise.model.layers.linear import ExpertLinear, Linear
from groupwise.model.layers.routes import RouteAsk, Visited

if TYPE_CHECKING:
    from groupwise.model.adapters.lora import ExpertLoRA

# On a CPU an expert's rows are a multiple of this: then a row's bits do not depend on how many
# other tokens visit the same expert (engine/native/scheduler.py says why).
ROW_STEP = 16


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(width, inner, bias)
        self.up_proj = Linear(width, inner, bias)
        self.down_proj = Linear(inner, width, bias)


class Router(nn.Module):
    def __init__(self, config: ModelConfig, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size))


class EachExpert(nn.Module):
    """The products of every expert under the names that published folders have for each of them."""

    def __init__(self, experts: nn.Module, count: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = ExpertLinear(experts, "gate_proj", count, hidden, width)
        self.up_proj = ExpertLinear(experts, "up_proj", count, hidden, width)
        self.down_proj = ExpertLinear(experts, "down_proj", count, width, hidden)


class Experts(nn.Module):
    """All experts of a layer, gates before ups: [E, 2F, D] and [E, D, F]."""

    def __init__(self, count: int, width: int, hidden: int) -> None:
        super().__init__()
        self.width = width
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, width))
        self.each = EachExpert(self, count, width, hidden)

    def matrices(self, part: str) -> Tensor:
        """Return all experts' matrices of a kind, where they lie."""
        if part == "down_proj":
            return self.down_proj
        rows = slice(0, self.width) if part == "gate_proj" else slice(self.width, None)
        return self.gate_up_proj[:, rows]

    @property
    def adapted(self) -> bool:
        return any(module.adapter is not None for module in self.each.children())


class SparseFeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None
        self.chosen, self.normalised = config.experts.chosen, config.experts.normalised
        self.gate = Router(config, config.experts.count)
        self.experts = Experts(config.experts.count, config.experts.width, config.hidden_size)


class ExpertChoice(NamedTuple):
    """The experts of each token, and how much each of them counts."""

    expert_TK: Tensor  # int64
    gate_TK: Tensor  # float32 at least
    visited: Visited | None  # what was asked for


def choose(logits_TE: Tensor, layer: SparseFeedForward, asked: RouteAsk) -> ExpertChoice:
    """Choose the experts, or take the recorded ones; of equal ones the first counts as larger."""
    wide = torch.promote_types(logits_TE.dtype, torch.float32)
    probability_TE = logits_TE.to(wide).softmax(-1)
    expert_TK = live_TK = _largest(probability_TE.detach(), layer.chosen)
    if asked.replay_TK is not None:
        replay_TK = asked.replay_TK.to(expert_TK)
        there_T1 = (replay_TK >= 0).all(-1, keepdim=True)
        expert_TK = torch.where(there_T1, replay_TK, expert_TK)
    gate_TK = probability_TE.gather(1, expert_TK)
    visited = None
    if asked.told:
        at_TK = expert_TK if asked.at_TK is None else asked.at_TK.to(expert_TK)
        at = gate_TK if asked.at_TK is None else probability_TE.gather(1, at_TK.clamp(min=0))
        visited = Visited(expert_TK, at.masked_fill(at_TK < 0, 0.0), live_TK)
    if layer.normalised:
        gate_TK = gate_TK / gate_TK.sum(-1, keepdim=True)
    return ExpertChoice(expert_TK, gate_TK, visited)


def _largest(probability_TE: Tensor, count: int) -> Tensor:
    """Return the numbers of the largest, largest first. `topk` leaves open which of equal ones."""
    return probability_TE.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def visit(x_TD: Tensor, choice: ExpertChoice, experts: Experts) -> Tensor:
    """Return Σ_k gate · expert(x) of every token: one expert after the other, in plain PyTorch."""
    tokens, chosen = choice.expert_TK.shape
    count = len(experts.gate_up_proj)
    order_S = choice.expert_TK.flatten().sort(stable=True).indices
    sizes = torch.bincount(choice.expert_TK.flatten(), minlength=count).tolist()
    gate_up, down = experts.gate_up_proj.unbind(), experts.down_proj.unbind()
    more = {name: beside(module) for name, module in experts.each.named_children()}
    parts = []
    for expert, order_R in enumerate(torch.split(order_S, sizes)):
        if not len(order_R):
            continue
        filling = -len(order_R) % ROW_STEP
        # An embedding's gradient adds up in one order; a token may be in several rows.
        token_R = F.pad(order_R // chosen, (0, filling))
        x_RD = F.embedding(token_R, x_TD)
        gate_RF, up_RF = F.linear(x_RD, gate_up[expert]).chunk(2, -1)
        gate_RF = more["gate_proj"](expert, x_RD, gate_RF)
        act_RF = F.silu(gate_RF) * more["up_proj"](expert, x_RD, up_RF)
        made_RD = more["down_proj"](expert, act_RF, F.linear(act_RF, down[expert]))
        parts.append(made_RD[: len(order_R)])
    back_S = torch.empty_like(order_S)
    back_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    made_TKD = torch.cat(parts).index_select(0, back_S).view(tokens, chosen, -1)
    return combined(made_TKD, choice.gate_TK)


def beside(module: nn.Module) -> Callable[[int, Tensor, Tensor], Tensor]:
    """Return what adds an expert's adapter, of its input, to its output; nothing where none is."""
    adapter = cast(ExpertLinear, module).adapter
    if adapter is None:
        return lambda expert, x_RD, out_RF: out_RF
    made = cast("ExpertLoRA", adapter).apart()
    return lambda expert, x_RD, out_RF: out_RF + made(expert, x_RD)


def combined(made_TKD: Tensor, gate_TK: Tensor) -> Tensor:
    """Return Σ_k gate · made, added up one after the other."""
    weighted = made_TKD * gate_TK.to(made_TKD.dtype)[..., None]
    total_TD = weighted[:, 0]
    for k in range(1, weighted.shape[1]):
        total_TD = total_TD + weighted[:, k]
    return total_TD
