"""Projections as one product: the same numbers, gradients, updates and files as apart."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from model_zoo import make
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from groupwise.errors import ModelError
from groupwise.model.formats import checkpoint
from groupwise.model.layers.fused_linear import fused_linear, fused_weight, lay_together
from groupwise.model.layers.transformer import Linear, Transformer
from groupwise.optim.adamw import AdamW
from groupwise.optim.step import apply
from groupwise.sync import checkpoints as state

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
INPUTS, OUTPUTS = 24, (40, 8, 16)
CASES = [
    ((40, 8, 16), True),
    ((40, 8, 16), False),
    ((56, 56), False),
    ((33,), True),
    ((33,), False),
]


def projections(
    outputs: tuple[int, ...] = OUTPUTS, bias: bool = True, dtype: torch.dtype = torch.float64
) -> list[Linear]:
    generator = torch.Generator().manual_seed(3)
    modules = [Linear(INPUTS, count, bias) for count in outputs]
    for module in modules:
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).to(DEVICE, dtype)
    return modules


def inputs(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, INPUTS, generator=generator).to(DEVICE, dtype)


def parameters(modules: list[Linear]) -> list[torch.nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters()]


def wave(out_TF: Tensor) -> Tensor:
    """A loss whose gradient differs at every place."""
    return (out_TF * torch.arange(out_TF.numel(), device=DEVICE).view(out_TF.shape).sin()).sum()


def apart(x_TD: Tensor, modules: list[Linear]) -> Tensor:
    return torch.cat([F.linear(x_TD, m.weight, m.bias) for m in modules], dim=1)


def same(found: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def check_against_autograd(modules: list[Linear], twins: list[Linear], steps: int = 3) -> None:
    """Outputs, the input's gradients and the sums of the parameters' over some micro-batches."""
    for step in range(steps):
        x, x_twin = (inputs(5 + step, step).requires_grad_() for _ in range(2))
        found, wanted = fused_linear(x, modules), apart(x_twin, twins)
        wave(found).backward()
        wave(wanted).backward()
        same([found, x.grad], [wanted, x_twin.grad])
        same([p.grad for p in parameters(modules)], [p.grad for p in parameters(twins)])


def test_laying_together_keeps_parameters_and_values() -> None:
    modules = projections()
    before = parameters(modules)
    values = [parameter.clone() for parameter in before]
    assert fused_weight(modules) is None
    lay_together(modules)
    assert all(one is other for one, other in zip(parameters(modules), before, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(before, values, strict=True))
    joined = fused_weight(modules)
    assert joined is not None and joined.shape == (64, INPUTS) and joined.is_contiguous()
    assert torch.equal(joined, torch.cat([module.weight for module in modules]))
    with torch.no_grad():
        modules[1].weight[3, 4] = 7.0
    assert joined[43, 4] == 7.0  # the same memory
    places = [p.data_ptr() for p in before]
    lay_together(modules)
    assert [p.data_ptr() for p in before] == places  # once is enough
    assert fused_weight([modules[0], modules[2]]) is None  # a gap between them
    assert fused_weight([modules[1], modules[0]]) is None  # the wrong order


def test_what_can_not_lie_together_is_refused() -> None:
    wide = Linear(INPUTS + 1, 8, bias=True).double().to(DEVICE)
    plain = Linear(INPUTS, 8, bias=False).double().to(DEVICE)
    for stranger in (wide, plain):
        with pytest.raises(ModelError, match="can't lie together"):
            lay_together([*projections(), stranger])


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("outputs", "bias"), CASES)
def test_values_and_gradients_equal_those_of_separate_products(
    outputs: tuple[int, ...], bias: bool, together: bool
) -> None:
    modules, twins = (projections(outputs, bias) for _ in range(2))
    if together:
        lay_together(modules)
    check_against_autograd(modules, twins)


def test_a_bias_here_and_none_there() -> None:
    modules, twins = ([*projections((8,), True), *projections((16,), False)] for _ in range(2))
    check_against_autograd(modules, twins)


def test_gradients_are_neighbours_and_stay_where_they_are() -> None:
    modules = projections()
    lay_together(modules)
    wave(fused_linear(inputs(5), modules)).backward()
    grads = [module.weight.grad for module in modules]
    assert grads[0] is not None
    start = grads[0].data_ptr()
    sizes = [g.numel() * g.element_size() for g in grads if g is not None]
    places = [start, start + sizes[0], start + sizes[0] + sizes[1]]
    for _ in range(2):
        assert [g.data_ptr() for g in grads if g is not None] == places
        wave(fused_linear(inputs(5), modules)).backward()
        assert all(g is m.weight.grad for g, m in zip(grads, modules, strict=True))


def test_two_passes_before_one_backward() -> None:
    modules, twins = projections(), projections()
    lay_together(modules)
    for product, own in ((fused_linear, modules), (apart, twins)):
        (wave(product(inputs(5), own)) + wave(product(inputs(4, 1), own))).backward()
    same([p.grad for p in parameters(modules)], [p.grad for p in parameters(twins)])


@pytest.mark.parametrize("frozen", [[0], [1, 3], [0, 2, 4], [0, 1, 2, 3, 4, 5]])
def test_frozen_parameters_get_no_gradient(frozen: list[int]) -> None:
    modules, twins = projections(), projections()
    lay_together(modules)
    for own in (modules, twins):
        for index in frozen:
            parameters(own)[index].requires_grad_(False)
    check_against_autograd(modules, twins)
    if len(frozen) == 6:
        assert not fused_linear(inputs(3), modules).requires_grad


def test_a_parameter_frozen_between_micro_batches_keeps_its_gradient() -> None:
    modules, twins = projections(), projections()
    lay_together(modules)
    check_against_autograd(modules, twins, steps=1)
    for own in (modules, twins):
        own[1].weight.requires_grad_(False)
        own[0].bias.requires_grad_(False)
    check_against_autograd(modules, twins)


def test_gradients_that_somebody_else_has_set() -> None:
    modules, twins = projections(), projections()
    lay_together(modules)
    for own in (modules, twins):
        own[1].weight.grad = torch.full_like(own[1].weight, 0.5)
        own[2].bias.grad = torch.full_like(own[2].bias, -2.0)
    given = modules[1].weight.grad
    check_against_autograd(modules, twins)
    assert modules[1].weight.grad is given
    for own in (modules, twins):
        own[0].weight.grad = None  # and one of them cleared
    check_against_autograd(modules, twins)


def test_input_gradient_by_finite_differences() -> None:
    modules = projections()
    lay_together(modules)
    x = inputs(3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: fused_linear(x, modules), (x,))


@pytest.mark.parametrize("together", [True, False])
def test_recomputation_gives_the_same_gradients(together: bool) -> None:
    modules, twins = projections(), projections()
    if together:
        lay_together(modules)
    for step in range(2):
        x, x_twin = (inputs(5, step).requires_grad_() for _ in range(2))
        out = recompute(lambda x: fused_linear(x.tanh(), modules).tanh(), x, use_reentrant=False)
        wave(out).backward()
        wave(apart(x_twin.tanh(), twins).tanh()).backward()
        same([x.grad], [x_twin.grad])
        same([p.grad for p in parameters(modules)], [p.grad for p in parameters(twins)])


def test_a_weight_that_changes_before_the_backward_pass_is_found_out() -> None:
    modules = projections()
    lay_together(modules)
    out = fused_linear(inputs(3).requires_grad_(), modules)
    with torch.no_grad():
        modules[1].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        wave(out).backward()


def test_another_product_serves_the_forward_pass() -> None:
    modules, twins = projections(), projections()
    lay_together(modules)
    seen = []

    def product(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
        seen.append(tuple(weight_FD.shape))
        return 2 * F.linear(x_TD, weight_FD, bias_F)

    out = fused_linear(inputs(3), modules, product)
    wave(out).backward()
    assert seen == [(64, INPUTS)]
    wanted = apart(inputs(3), twins)
    wave(wanted).backward()
    same([out], [2 * wanted])
    same([p.grad for p in parameters(modules)], [p.grad for p in parameters(twins)])


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_half_precision_gradients_have_the_dtype_that_is_asked_for(
    together: bool, wide: bool
) -> None:
    modules = projections(dtype=torch.bfloat16)
    if together:
        lay_together(modules)
    if wide:
        for parameter in parameters(modules):
            parameter.grad_dtype = torch.float32
    exact: list[Tensor] = []
    for step in range(3):
        x = inputs(50, step, torch.bfloat16)
        grad = inputs(50, step + 9, torch.bfloat16).repeat(1, 3)[:, :64].contiguous()
        fused_linear(x, modules).backward(grad)
        columns = grad.double().split(OUTPUTS, dim=1)
        exact += [y for c in columns for y in (c.t() @ x.double(), c.sum(0))]
    for index, parameter in enumerate(parameters(modules)):
        assert parameter.grad is not None
        assert parameter.grad.dtype == (torch.float32 if wide else torch.bfloat16)
        wanted = sum(exact[index::6])
        tolerance = 1e-4 if wide else 0.5  # sums reach 40, where bfloat16 steps by a quarter
        assert (parameter.grad.double() - wanted).abs().max() < tolerance


def laid(model: Transformer) -> Transformer:
    for layer in model.model.layers:
        lay_together([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj])
        lay_together([layer.mlp.gate_proj, layer.mlp.up_proj])
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_those_of_separate_parameters(dtype: torch.dtype) -> None:
    models = laid(make("qwen2", dtype=dtype)), make("qwen2", dtype=dtype)
    optimizers = [
        AdamW(
            model.named_parameters(),
            learning_rate=0.01,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.1,
        )
        for model in models
    ]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            generator = torch.Generator().manual_seed(step)
            for layer in model.model.layers:  # gradients as slices of one, in the laid model
                for group in (layer.self_attn, layer.mlp):
                    own = [p for p in group.parameters() if p.dim() == 2 and p.shape[1] == 48]
                    whole = torch.randn(sum(len(p) for p in own), 48, generator=generator)
                    for p, part in zip(own, whole.split([len(p) for p in own]), strict=True):
                        p.grad = part if model is models[0] else part.clone()
            for p in model.parameters():
                if p.grad is None:
                    p.grad = torch.randn(p.shape, generator=generator)
            outcome = apply(model.named_parameters(), optimizer, clip_norm=1.0, learning_rate=0.01)
            assert outcome.clipped and not outcome.skipped
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(one, other)
    mlp = models[0].model.layers[0].mlp
    assert fused_weight([mlp.gate_proj, mlp.up_proj]) is not None  # still one memory


def test_files_hold_the_same_tensors(tmp_path: Path) -> None:
    model, twin = laid(make("qwen2")), make("qwen2")
    checkpoint.save(model, tmp_path / "plain", {})
    optimizer = AdamW(
        model.named_parameters(),
        learning_rate=0.1,
        beta1=0.9,
        beta2=0.9,
        eps=1e-8,
        weight_decay=0.0,
    )
    tensors = {"optimizer": optimizer.state(), "reference": dict(model.named_parameters())}
    made = state.snapshot(1, weights=state.policy_contents(model, {}), tensors=tensors, values={})
    state.write(tmp_path / "run", made, keep=1)
    found = state.load_latest(tmp_path / "run")
    assert found is not None
    for stored in (
        checkpoint.load_weights(tmp_path / "plain").state_dict(),
        checkpoint.load_weights(tmp_path / "run" / "latest").state_dict(),
        found.tensors["reference"],
    ):
        assert stored.keys() == twin.state_dict().keys()
        assert all(torch.equal(stored[name], x) for name, x in twin.state_dict().items())
    # A file of a joined model is no larger: each slice is written, not the memory behind it.
    checkpoint.save(twin, tmp_path / "twin", {})
    sizes = [(tmp_path / n / checkpoint.SINGLE).stat().st_size for n in ("plain", "twin")]
    assert sizes[0] == sizes[1]


def test_loading_in_place_keeps_them_together() -> None:
    model, other = laid(make("qwen2")), make("qwen2", seed=5)
    model.load_state_dict(other.state_dict())
    mlp = model.model.layers[1].mlp
    joined = fused_weight([mlp.gate_proj, mlp.up_proj])
    twin = other.model.layers[1].mlp
    assert joined is not None
    assert torch.equal(joined, torch.cat([twin.gate_proj.weight, twin.up_proj.weight]))


@pytest.mark.parametrize("how", ["deepcopy", "dtype", "meta"])
def test_copies_lie_apart_and_work_all_the_same(how: str) -> None:
    modules, twins = projections(dtype=torch.float32), projections(dtype=torch.float32)
    lay_together(modules)
    if how == "meta":
        assert fused_weight([module.to("meta") for module in modules]) is None
        return
    copies = [copy.deepcopy(module) for module in modules] if how == "deepcopy" else modules
    copies = [module.double() for module in copies]
    twins = [module.double() for module in twins]
    assert fused_weight(copies) is None
    check_against_autograd(copies, twins)
    lay_together(copies)
    assert fused_weight(copies) is not None
    check_against_autograd(copies, twins)
