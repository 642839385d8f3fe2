"""Routes of a mixture of experts: recorded, and replayed with the gradients of fixed routes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from model_zoo import MIXTURES, make, sequences
from torch import Tensor

from groupwise.errors import ModelError
from groupwise.losses.routing import replay_gates
from groupwise.model.layers import experts
from groupwise.model.layers.attention import (
    packed,
    packed_positions,
    shared_positions,
    shared_prompts,
)
from groupwise.model.layers.experts import ExpertChoice, SparseFeedForward
from groupwise.model.layers.routes import RECORDED, RouteAsk, Routes, Visited, check_experts
from groupwise.model.layers.transformer import Transformer

LENGTHS = [7, 3, 12]
Gradients = dict[str, Tensor]


def run(model: Transformer, rows: Sequence[Tensor], routes: Routes | None = None) -> Tensor:
    lengths = [len(row) for row in rows]
    token_T = torch.cat(list(rows))
    hidden_TD: Tensor = model(token_T, packed_positions(lengths), packed(lengths), routes=routes)
    return hidden_TD


def recorded(model: Transformer, rows: Sequence[Tensor]) -> Tensor:
    routes = Routes()
    run(model, rows, routes)
    assert routes.chosen_TLK is not None
    return routes.chosen_TLK


def foreign(model: Transformer, tokens: int, seed: int = 4) -> Tensor:
    """Routes that nobody would choose: other experts in every layer, in any order."""
    config = model.config
    assert config.experts is not None
    generator = torch.Generator().manual_seed(seed)
    random = torch.rand(tokens, config.num_layers, config.experts.count, generator=generator)
    chosen_TLK = random.argsort(-1)[..., : config.experts.chosen].to(RECORDED)
    dense = [layer for layer in range(config.num_layers) if layer not in config.sparse_layers]
    chosen_TLK[:, dense] = -1
    return chosen_TLK


def gradients(model: Transformer, hidden_TD: Tensor, weight_TD: Tensor) -> Gradients:
    model.zero_grad()
    (hidden_TD * weight_TD).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def by_hand(model: Transformer, rows: Sequence[Tensor], chosen_TLK: Tensor) -> Tensor:
    """A pass whose layers take their experts from a table: every expert on every token, weighed."""
    places = {id(layer.mlp): at for at, layer in enumerate(model.layers)}

    class ByHand(type(model.ops)):  # type: ignore[misc]
        def mixture(self, x_TD, more_TD, norm, layer, asked):  # type: ignore[no-untyped-def]
            x_TD, normed_TD = self.add_norm(x_TD, more_TD, norm)
            logits_TE = normed_TD @ layer.gate.weight.T
            fixed_TE = torch.zeros_like(logits_TE, dtype=torch.bool)
            fixed_TE = fixed_TE.scatter(1, chosen_TLK[:, places[id(layer)]].long(), True)
            gate_TE = replay_gates(logits_TE, fixed_TE)
            if not layer.normalised:
                gate_TE = torch.where(fixed_TE, logits_TE.softmax(-1), 0.0)
            joined_ETF = torch.einsum("td,efd->etf", normed_TD, layer.experts.gate_up_proj)
            gated_ETF, up_ETF = joined_ETF.chunk(2, -1)
            act_ETF = gated_ETF * gated_ETF.sigmoid() * up_ETF
            made_ETD = torch.einsum("etf,edf->etd", act_ETF, layer.experts.down_proj)
            return x_TD, torch.einsum("te,etd->td", gate_TE, made_ETD), None

    ops, model.ops = model.ops, ByHand()
    try:
        return run(model, rows)
    finally:
        model.ops = ops


@pytest.mark.parametrize("name", MIXTURES)
def test_replay_of_identical_weights_is_the_identity_to_the_bit(name: str) -> None:
    model, rows = make(name), sequences(LENGTHS)
    routes = Routes(replay_TLK=recorded(model, rows))
    live = run(model, rows)
    weight_TD = torch.randn_like(live)
    expected = gradients(model, live, weight_TD)
    again = run(model, rows, routes)
    found = gradients(model, again, weight_TD)
    assert torch.equal(live, again) and torch.equal(routes.chosen_TLK, routes.replay_TLK)  # type: ignore[arg-type]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_gradients_of_replay_are_those_of_a_pass_with_fixed_routes(
    name: str, recompute: bool
) -> None:
    model, rows = make(name, dtype=torch.float64), sequences(LENGTHS)
    chosen_TLK = foreign(model, sum(LENGTHS))
    fixed = by_hand(model, rows, chosen_TLK)
    weight_TD = torch.randn_like(fixed)
    expected = gradients(model, fixed, weight_TD)
    model.recompute = recompute
    found_TD = run(model, rows, Routes(replay_TLK=chosen_TLK))
    found = gradients(model, found_TD, weight_TD)
    torch.testing.assert_close(found_TD, fixed, rtol=1e-10, atol=1e-10)
    # One that nobody visits has a gradient of 0 in one pass and none in the other.
    assert any(key.endswith("gate.weight") for key in found)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-8, atol=1e-10, msg=key)
    live = run(model, rows)
    assert (live - found_TD).abs().max() > 1e-3  # else it would have proved nothing


@pytest.mark.parametrize("name", MIXTURES)
def test_gradients_of_a_pack_are_the_sum_of_those_alone(name: str) -> None:
    model, rows = make(name, dtype=torch.float64), sequences(LENGTHS)
    chosen_TLK = foreign(model, sum(LENGTHS))
    together = run(model, rows, Routes(replay_TLK=chosen_TLK))
    weight_TD = torch.randn_like(together)
    expected = gradients(model, together, weight_TD)
    parts = zip(rows, chosen_TLK.split(LENGTHS), weight_TD.split(LENGTHS), strict=True)
    total = {key: torch.zeros_like(value) for key, value in expected.items()}
    for row, route_TLK, own_TD in parts:
        for key, value in gradients(
            model, run(model, [row], Routes(replay_TLK=route_TLK)), own_TD
        ).items():
            total[key] += value
    for key, value in expected.items():
        torch.testing.assert_close(total[key], value, rtol=1e-8, atol=1e-10, msg=key)


@pytest.mark.parametrize("recompute", [False, True])
def test_probabilities_are_those_of_the_full_softmax_with_their_gradient(recompute: bool) -> None:
    """Of the experts asked about, by layer; the gradient by finite differences in the router."""
    model, rows = make("qwen3_moe", dtype=torch.float64), sequences([9])
    model.recompute = recompute
    at_TLK = foreign(model, 9)
    routes = Routes(at_TLK=at_TLK)
    run(model, rows, routes)
    found_TLK = routes.probability_TLK
    assert found_TLK is not None and not found_TLK[:, 1].any()  # the dense layer
    every = torch.arange(6).expand(9, 3, 6)
    whole = Routes(at_TLK=every)
    run(model, rows, whole)
    assert whole.probability_TLK is not None
    sums_TL = whole.probability_TLK.sum(-1)
    torch.testing.assert_close(sums_TL[:, [0, 2]], torch.ones(9, 2, dtype=torch.float64))
    taken_TLK = whole.probability_TLK.gather(-1, at_TLK.clamp(min=0).long())
    torch.testing.assert_close(found_TLK[:, [0, 2]], taken_TLK[:, [0, 2]])
    found_TLK[:, 2].log().sum().backward()
    gate = model.layers[2].mlp.gate.weight
    assert gate.grad is not None
    found = float(gate.grad[1, 5])
    values = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            gate[1, 5] += step
            moved = Routes(at_TLK=at_TLK)
            run(model, rows, moved)
            gate[1, 5] -= step
        assert moved.probability_TLK is not None
        values.append(float(moved.probability_TLK[:, 2].log().sum()))
    assert found == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)


def test_a_route_with_a_gap_is_routed_live() -> None:
    model, rows = make("mixtral"), sequences([8])
    live_TLK, replay_TLK = recorded(model, rows), foreign(make("mixtral"), 8)
    replay_TLK[2:, :] = live_TLK[2:]
    replay_TLK[3, 1, 1] = -1  # half a route is none
    replay_TLK[:2] = -1
    routes = Routes(replay_TLK=replay_TLK)
    assert torch.equal(run(model, rows, routes), run(model, rows))
    assert torch.equal(routes.chosen_TLK, live_TLK)  # type: ignore[arg-type]


def test_layers_without_experts_are_marked() -> None:
    model = make("qwen3_moe")
    chosen_TLK = recorded(model, sequences([5]))
    assert model.config.sparse_layers == (0, 2) and chosen_TLK.dtype == RECORDED
    assert (chosen_TLK[:, 1] == -1).all() and (chosen_TLK[:, [0, 2]] >= 0).all()


def test_completions_behind_a_shared_prompt_are_routed_as_alone() -> None:
    model, rows = make("olmoe"), sequences([10, 4, 6])
    routes = Routes()
    given = [10], [[4, 6]]
    model(torch.cat(rows), shared_positions(*given), shared_prompts(*given), routes=routes)
    alone = [recorded(model, [torch.cat((rows[0], tail))])[10:] for tail in rows[1:]]
    assert torch.equal(routes.chosen_TLK[10:], torch.cat(alone))  # type: ignore[index]


def test_layers_that_run_again_are_found_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the backward pass the last layer runs first: each takes its own routes all the same."""
    model, rows = make("mixtral"), sequences([6])
    replay_TLK = foreign(model, 6)
    seen: list[Tensor] = []
    plain = experts.choose

    def noted(logits_TE: Tensor, layer: SparseFeedForward, asked: RouteAsk) -> ExpertChoice:
        choice = plain(logits_TE, layer, asked)
        seen.append(choice.expert_TK)
        return choice

    monkeypatch.setattr("groupwise.model.layers.ops.choose", noted)
    model.recompute = True
    routes = Routes(replay_TLK=replay_TLK)
    run(model, rows, routes).sum().backward()
    order = [0, 1, 2, 2, 1, 0]
    assert len(seen) == len(order)
    for found_TK, layer in zip(seen, order, strict=True):
        assert torch.equal(found_TK, replay_TLK[:, layer].long())
    assert torch.equal(routes.chosen_TLK, replay_TLK)  # type: ignore[arg-type]


def test_routes_of_another_model_are_refused() -> None:
    model, rows = make("mixtral"), sequences([6])
    with pytest.raises(ModelError, match=r"\(6, 3, 2\): tokens, layers"):
        run(model, rows, Routes(replay_TLK=torch.zeros(6, 3, 3, dtype=torch.int16)))
    with pytest.raises(ModelError, match="experts that are asked about"):
        run(model, rows, Routes(at_TLK=torch.zeros(5, 3, 2, dtype=torch.int16)))
    with pytest.raises(ModelError, match="no experts to route to"):
        run(make("qwen3"), rows, Routes())
    with pytest.raises(ModelError, match="experts from 0 to 7; this model has 5 a layer"):
        check_experts(torch.tensor([[[0, 7]]], dtype=torch.int16), model.config)
    check_experts(torch.tensor([[[-1, 4]]], dtype=torch.int16), model.config)


def test_what_is_kept_is_in_the_order_of_layers() -> None:
    chosen_TK = torch.tensor([[1, 0]])
    made = Visited(chosen_TK, torch.tensor([[0.5, 0.25]]), chosen_TK)
    routes = Routes()
    routes.keep([None, made])
    assert routes.chosen_TLK.tolist() == [[[-1, -1], [1, 0]]]  # type: ignore[union-attr]
    assert routes.probability_TLK.tolist() == [[[0, 0], [0.5, 0.25]]]  # type: ignore[union-attr]
