"""A mixture of experts by the textbook, its routes given: one sequence, no pack, no replay code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from model_zoo import MIXTURES
from torch import Tensor

from groupwise.model.config import ModelConfig
from groupwise.model.layers.rope import rope_tables, rotate
from groupwise.model.layers.transformer import Transformer

VOCABULARY = 5


def small_mixture(name: str = "qwen3_moe", seed: int = 0, std: float = 0.3) -> Transformer:
    """A mixture of a few words, whose tokens go different ways, in float64."""
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 3}
    config = ModelConfig.from_hf(MIXTURES[name] | sizes)
    model = Transformer(config).double()
    return model.initialise(torch.Generator().manual_seed(seed), std)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def routers_by_hand(
    model: Transformer, ids: Sequence[int], routes_TLK: Tensor | None
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Log-probabilities [T, V], the router's probabilities of each sparse layer, and the experts
    that were visited [T, L, K]: those given, or the likeliest where there are none.
    """
    config, p = model.config, dict(model.named_parameters())
    experts = config.experts
    assert experts is not None
    position_T = torch.arange(len(ids))
    x, probabilities, visited = p["model.embed_tokens.weight"][list(ids)], [], []
    cos, sin = rope_tables(config, position_T)
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        h = _norm(x, p[at + "input_layernorm.weight"], config.norm_eps)
        q, k, v = (
            (h @ p[f"{at}self_attn.{part}_proj.weight"].T).view(len(ids), -1, config.head_dim)
            for part in "qkv"
        )
        if config.qk_norm:
            q = _norm(q, p[at + "self_attn.q_norm.weight"], config.norm_eps)
            k = _norm(k, p[at + "self_attn.k_norm.weight"], config.norm_eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        times = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        score = torch.einsum("thw,shw->hts", q, k) / config.head_dim**0.5
        future = position_T[None, :] > position_T[:, None]
        weight = score.masked_fill(future, -torch.inf).softmax(-1)
        seen = torch.einsum("hts,shw->thw", weight, v).flatten(1)
        x = x + seen @ p[at + "self_attn.o_proj.weight"].T
        h = _norm(x, p[at + "post_attention_layernorm.weight"], config.norm_eps)
        if layer not in config.sparse_layers:
            gate, up = (h @ p[f"{at}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ p[at + "mlp.down_proj.weight"].T
            visited.append(torch.full((len(ids), experts.chosen), -1))
            continue
        score_TE = h @ p[at + "mlp.gate.weight"].T
        chosen_TK = score_TE.topk(experts.chosen).indices
        if routes_TLK is not None:
            given_TK = routes_TLK[:, layer].long()
            chosen_TK = torch.where((given_TK < 0).any(1, keepdim=True), chosen_TK, given_TK)
        weight_TK = score_TE.exp().gather(1, chosen_TK)
        whole_T1 = weight_TK.sum(1, keepdim=True)
        if not experts.normalised:
            whole_T1 = score_TE.exp().sum(1, keepdim=True)
        inner = torch.einsum("tkfd,td->tkf", p[at + "mlp.experts.gate_up_proj"][chosen_TK], h)
        gate, up = inner.chunk(2, -1)
        made = torch.einsum(
            "tkdf,tkf->tkd", p[at + "mlp.experts.down_proj"][chosen_TK], F.silu(gate) * up
        )
        x = x + (made * (weight_TK / whole_T1)[..., None]).sum(1)
        probabilities.append(score_TE.softmax(-1))
        visited.append(chosen_TK)
    h = _norm(x, p["model.norm.weight"], config.norm_eps)
    logp_TV = (h @ model.head_weight.T).log_softmax(-1)
    return logp_TV, probabilities, torch.stack(visited, 1)


def answer_logp(
    model: Transformer, prompt: Sequence[int], answer: Sequence[int], routes_TLK: Tensor | None
) -> Tensor:
    """Log-probabilities of the tokens of an answer."""
    logp_TV, _, _ = routers_by_hand(model, [*prompt, *answer][:-1], routes_TLK)
    return logp_TV[len(prompt) - 1 :].gather(1, torch.tensor(answer)[:, None])[:, 0]
