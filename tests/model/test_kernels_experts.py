"""Kernels around experts: right, empty experts included, and in exact mode the same in any company.

Without a GPU they run in Triton's interpreter, which multiplies bfloat16 wrongly: not tested there.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton")

from model_zoo import make
from whole_model import CUDA, DEVICE, DTYPE, difference

from groupwise.model.kernels.experts import exact_products, tiles_of_experts
from groupwise.model.layers.experts import Experts, RouteAsk, choose, visit
from groupwise.model.layers.fused_experts import grouped, in_order, visit_together

pytestmark = pytest.mark.usefixtures("kernels")
COUNT, CHOSEN, WIDTH, HIDDEN = 9, 3, 24, 40


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, DTYPE)


def routes(tokens: int, seed: int = 0) -> Tensor:
    """Experts of each token, of which one is visited by nobody and the last two by all."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(1, COUNT - 2, (tokens, 1), generator=generator)
    rest = torch.tensor([COUNT - 2, COUNT - 1]).expand(tokens, 2)
    return torch.cat((first, rest), 1).to(DEVICE)


def experts() -> Experts:
    layer = Experts(COUNT, WIDTH, HIDDEN).to(DEVICE, DTYPE)
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data = normal(*parameter.shape, seed=seed) * 0.2
    return layer


def test_visits_in_order_by_hand() -> None:
    visits = in_order(torch.tensor([[2, 0], [0, 3]]), 4)
    # Expert 0: tokens 0 and 1; expert 2: token 0; expert 3: token 1.
    assert visits.token_S.tolist() == [0, 1, 0, 1]
    assert visits.back_TK.tolist() == [[2, 0], [1, 3]]
    assert visits.end_E.tolist() == [2, 2, 3, 4] and visits.end_E.dtype == torch.int32


@pytest.mark.parametrize("tokens", [1, 30])
@pytest.mark.parametrize("product", [None, exact_products])
def test_grouped_products_are_those_of_one_expert_after_the_other(
    product: object, tokens: int
) -> None:
    layer, x_TD, weight_TD = experts(), normal(tokens, HIDDEN, seed=5), normal(tokens, HIDDEN)
    gate_TK = torch.rand(tokens, CHOSEN, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def gradients(kind: str) -> list[Tensor]:
        wide = kind == "wide"
        made = Experts(COUNT, WIDTH, HIDDEN).to(DEVICE, torch.float32 if wide else DTYPE)
        made.load_state_dict(layer.state_dict())
        x, gate = x_TD.detach().clone().requires_grad_(), gate_TK.clone().requires_grad_()
        choice = choice_of(routes(tokens), gate)
        if kind == "together":
            given = (x, choice.expert_TK, gate, made.gate_up_proj, made.down_proj, product)
            out = visit_together(*given)  # type: ignore[arg-type]
        else:
            out = visit(x.float() if wide else x, choice, made)
        (out.float() * weight_TD.float()).sum().backward()
        found = [out, x.grad, gate.grad, made.gate_up_proj.grad, made.down_proj.grad]
        return [each.detach().double() for each in found if each is not None]

    together, wanted = gradients("together"), gradients("wide")
    assert len(together) == len(wanted) == 5
    rounded = gradients("plain")
    for at, (found, value) in enumerate(zip(together, wanted, strict=True)):
        allowed = 2 * difference(rounded[at], value) + 0.01 if CUDA else 1e-5
        assert difference(found, value) < allowed, at
    for gradient in together[3:]:
        assert not gradient[0].any()  # nobody has visited the first expert


def choice_of(expert_TK: Tensor, gate_TK: Tensor):  # type: ignore[no-untyped-def]
    from groupwise.model.layers.experts import ExpertChoice

    return ExpertChoice(expert_TK, gate_TK, None)


def test_gradients_add_up_over_micro_batches() -> None:
    layer = experts()
    gate_TK = torch.ones(8, CHOSEN, device=DEVICE)
    x_TD, expert_TK = normal(8, HIDDEN), routes(8)
    for part in (slice(0, 8), slice(0, 3), slice(3, 8)):
        given = (expert_TK[part], gate_TK[part], layer.gate_up_proj, layer.down_proj)
        visit_together(x_TD[part], *given).sum().backward()
        if part == slice(0, 8):
            whole = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
            layer.zero_grad()
    for parameter, expected in zip(layer.parameters(), whole, strict=True):
        assert parameter.grad is not None
        assert difference(parameter.grad, expected) < (0.01 if CUDA else 1e-6)


def test_an_exact_row_has_the_same_bits_in_every_company() -> None:
    weight_EFD = normal(COUNT, 72, HIDDEN, seed=2)
    x_TD, expert_TK = normal(150, HIDDEN), routes(150)

    def made(part: slice) -> Tensor:
        visits = in_order(expert_TK[part], COUNT)
        rows_SD = x_TD[part].index_select(0, visits.token_S)
        return exact_products(rows_SD, weight_EFD, visits.end_E)[visits.back_TK]

    whole = made(slice(0, 150))
    for part in (slice(0, 1), slice(70, 77), slice(20, 120)):
        assert torch.equal(made(part), whole[part])
    visits = in_order(expert_TK, COUNT)
    rows_SD = x_TD.index_select(0, visits.token_S)
    assert difference(whole, grouped(rows_SD, weight_EFD, visits.end_E)[visits.back_TK]) < 1e-2


def test_tiles_of_experts_by_hand() -> None:
    # Three rows, none, five: in tiles of four rows one, none and two.
    found = tiles_of_experts(torch.tensor([3, 3, 8], dtype=torch.int32), 8, 4).tolist()
    assert found[:3] == [[0, 0, 3], [2, 3, 8], [2, 7, 8]]
    assert all(row >= end for _, row, end in found[3:]) and len(found) == 5


def test_equal_experts_are_chosen_by_their_number() -> None:
    layer = make("qwen3_moe").model.layers[0].mlp
    logits_TE = torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0, 0.5], [0.0] * 6], device=DEVICE)
    assert choose(logits_TE, layer, RouteAsk()).expert_TK.tolist() == [[1, 2, 3], [0, 1, 2]]
