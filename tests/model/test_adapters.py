"""LoRA itself: what it computes, in whose company, with which kernels; dropout; quantised bases."""

from __future__ import annotations

import copy
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_zoo import engine, one, request, same, worst
from model_zoo import hidden, make, sequences
from torch import Tensor, nn
from whole_model import CUDA, DEVICE, DTYPE, difference, forward_backward

from groupwise import load_config
from groupwise.engine.protocol import Sampling
from groupwise.errors import ModelError
from groupwise.model.adapters import quantized
from groupwise.model.adapters.lora import adapters, attach, dropping, merge, plain_product
from groupwise.model.adapters.quantized import QuantizedLinear, quantize
from groupwise.model.adapters.targets import Spec, adapter_weights, fits, linear_shapes, matching
from groupwise.model.cost import SINGLE, RoleSize, held, lora, weight_bytes
from groupwise.model.fingerprint import fingerprint
from groupwise.model.layers.linear import Linear, linear_layers
from groupwise.model.layers.ops import Plain
from groupwise.model.layers.transformer import Transformer, copy_trained
from groupwise.model.policy import starting_policy
from groupwise.optim.roles.reference import Reference

# Everywhere but on a GPU machine whose Python can't be added to.
LIBRARY = pytest.mark.skipif(
    CUDA and find_spec("bitsandbytes") is None, reason="no bitsandbytes: pip install bitsandbytes"
)
KINDS = ["int8", pytest.param("nf4", marks=LIBRARY)]


def adapted(
    family: str = "qwen2", rank: int = 4, targets: Any = "all", dropout: float = 0.0
) -> Transformer:
    """With values in both matrices, as after some updates."""
    model = make(family)
    attach(model, Spec(rank, 8.0, targets), seed=2, dropout=dropout)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for adapter in adapters(model).values():
            adapter.lora_B.normal_(0.0, 0.1, generator=generator)
    return model


# --- what it computes -----------------------------------------------------------------------------


def test_the_narrow_product_by_hand() -> None:
    model = make("llama2")
    attach(model, Spec(1, 3.0, ("q_proj",)), seed=0)
    adapter = adapters(model)["model.layers.0.self_attn.q_proj"]
    with torch.no_grad():
        adapter.lora_A.zero_()[0, :2] = torch.tensor([2.0, -1.0])
        adapter.lora_B.zero_()[5, 0] = 10.0
    x = torch.zeros(1, 48)
    x[0, :2] = torch.tensor([1.0, 4.0])
    out = adapter(x, plain_product)
    assert out[0, 5] == 3.0 * 10.0 * (2.0 - 4.0) and out.abs().sum() == 60.0
    assert adapter.delta()[5, :2].tolist() == [60.0, -30.0]


def test_only_the_adapter_learns_and_its_gradients_are_autograd_s() -> None:
    """∂A and ∂B from the gradient of the merged weight: ∂B = s·∂W·Aᵀ, ∂A = s·Bᵀ·∂W."""
    model, rows = adapted("qwen3"), sequences([7])
    whole = copy.deepcopy(model)
    merge(whole)
    whole.requires_grad_(True)
    for each in (model, whole):
        hidden(each.double(), rows).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (".adapter." not in name), name
    for name, adapter in adapters(model).items():
        grad = whole.get_submodule(name).weight.grad
        wanted_B = adapter.scale * grad @ adapter.lora_A.T
        wanted_A = adapter.scale * adapter.lora_B.T @ grad
        # The weights were merged in float32.
        torch.testing.assert_close(adapter.lora_B.grad, wanted_B, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(adapter.lora_A.grad, wanted_A, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 2, 3, 8])
def test_sampler_and_learner_agree_as_closely_as_without(rank: int) -> None:
    asked, sampling = request(9, samples=3), Sampling(max_tokens=12, temperature=0.7)
    plain, model = make("qwen2"), adapted("qwen2", rank)
    gaps = [worst(m, asked, one(engine(m), asked, sampling), 0.7) for m in (plain, model)]
    assert gaps[1] <= max(gaps[0], 2e-6)


@pytest.mark.parametrize("rank", [1, 4])
def test_a_sample_is_the_same_in_any_company(rank: int) -> None:
    model, sampling = adapted("smollm2", rank), Sampling(max_tokens=8)
    alone = one(engine(model, slots=1), request(5, 2), sampling)
    crowd = engine(model, slots=8).generate([request(5, 2), request(11, 5, number=1)], sampling)[0]
    assert all(same(a, b) for a, b in zip(alone, crowd, strict=True))


@pytest.mark.parametrize("rows", [3, 5, 7, 17, 23])
def test_one_column_takes_the_same_road_for_any_number_of_rows(rows: int) -> None:
    """`F.linear` with one output does not: without the second column this fails."""
    generator = torch.Generator().manual_seed(0)
    x_TD, a_RD = (torch.randn(n, 128, generator=generator) for n in (512, 1))
    assert torch.equal(plain_product(x_TD[:rows], a_RD), plain_product(x_TD, a_RD)[:rows])


@pytest.mark.parametrize("quantised", ["", "int8"])
@pytest.mark.parametrize("family", ["smollm2", "qwen2", "qwen3", "llama_biases"])
@pytest.mark.parametrize("kind", ["Fast", "Exact"])
@pytest.mark.usefixtures("kernels")
def test_kernels_compute_the_same_adapter(kind: str, family: str, quantised: str) -> None:
    if (kind == "Exact" or quantised) and family in ("qwen3", "llama_biases"):
        pytest.skip("one family each is enough")
    from groupwise.model.layers import fast

    plain = adapted(family, rank=8).to(DEVICE, DTYPE)
    some = [x for n, x in adapters(plain).items() if n.endswith(("k_proj", "gate_proj"))]
    if family == "qwen2":  # some parts of a joined product without one
        for layer in plain.layers:
            layer.self_attn.k_proj.adapter = layer.mlp.gate_proj.adapter = None
    if quantised:
        quantize(plain, "int8", DEVICE)
    assert some
    model = copy.deepcopy(plain)
    model.ops = getattr(fast, kind)()
    model.ops.lay_out(model)
    found, wanted = _trained(model), _trained(plain)
    assert found.keys() == wanted.keys() and len(found) > 3
    for key, value in wanted.items():
        if CUDA:  # both in bfloat16
            assert difference(found[key], value) < 0.1, key
        else:
            scale = value.abs().max().clamp(min=1e-3)
            assert (found[key] - value).abs().max() / scale < 2e-5, key


def _trained(model: Transformer) -> dict[str, Tensor]:
    """Hidden states, log-probabilities and the gradients that there are."""
    found: dict[str, Tensor] = {}
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    model.named_parameters = lambda: iter(named)  # type: ignore[method-assign, assignment]
    try:
        found = forward_backward(model)
    finally:
        del model.named_parameters
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    return found


@pytest.mark.usefixtures("kernels")
def test_exact_products_of_an_adapter_do_not_depend_on_the_batch() -> None:
    from groupwise.model.layers.fast import Exact

    model = adapted("qwen2", rank=8).requires_grad_(False).to(DEVICE, DTYPE)
    model.ops = Exact()
    layer = model.layers[1].mlp.down_proj
    x_TD = torch.randn(40, 80, generator=torch.Generator().manual_seed(0)).to(DEVICE, DTYPE)
    whole = model.ops.linear(layer, x_TD)
    for rows in (1, 3, 17):
        assert torch.equal(model.ops.linear(layer, x_TD[:rows].contiguous()), whole[:rows])


def test_layers_of_pytorch_take_an_adapter_too() -> None:
    """Models that are not ours: the output of the layer and of its adapter, together."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    x, before = torch.randn(3, 6), copy.deepcopy(model)
    attach(model, Spec(2, 4.0, ("0",)), seed=0)
    assert torch.equal(model(x), before(x)) and list(adapters(model)) == ["0"]
    with torch.no_grad():
        adapters(model)["0"].lora_B.normal_()
    moved = model(x)
    assert not torch.allclose(moved, before(x))
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        "0.adapter.lora_A",
        "0.adapter.lora_B",
    ]
    merge(model)
    torch.testing.assert_close(model(x), moved)


# --- targets --------------------------------------------------------------------------------------


def test_targets_mean_what_they_mean_in_peft() -> None:
    names = list(linear_shapes(make("qwen2").config))
    assert names == list(linear_layers(make("qwen2"))) and len(names) == 21
    assert matching("all", names) == names == matching("all-linear", names)
    assert len(matching(("q_proj", "mlp.up_proj"), names)) == 6
    assert matching(("layers.0.self_attn.q_proj",), names) == ["model.layers.0.self_attn.q_proj"]
    assert matching("q_proj", names) == matching(("q_proj",), names)
    assert len(matching(r".*\.[02]\.self_attn\.(q|v)_proj", names)) == 4
    shape = make("qwen2").config
    assert adapter_weights(shape, Spec(4, 8.0)) == sum(
        p.numel() for n, p in adapted("qwen2").named_parameters() if p.requires_grad
    )


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (("q_prj",), r"'q_prj' matches no layer. Did you mean 'q_proj'.*k_proj, o_proj, q_proj"),
        (("q_proj", "c_attn"), "'c_attn' matches no layer.*down_proj, gate_proj"),
        (("lm_head",), "embedding and head have no adapters here"),
        ("embed_tokens", "embedding and head have no adapters here"),
        ("q_.*", "matches no layer"),
        ("(", "no regular expression"),
        ((), "is empty"),
    ],
)
def test_targets_that_match_nothing_are_told_with_the_names(targets: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        attach(make("llama2"), Spec(2, 2.0, targets), seed=0)


def test_a_rank_that_no_layer_has_is_refused_before_it_takes_memory() -> None:
    sizes = {"a.k_proj": (64, 16), "a.up_proj": (64, 256)}
    fits(Spec(64, 32.0), sizes)  # more than k_proj has, as is usual with few key heads
    for spec, most in ((Spec(65, 32.0), 64), (Spec(17, 32.0, "k_proj"), 16)):
        with pytest.raises(ModelError, match=rf"adapter.rank={spec.rank} is more .*\({most}\)"):
            fits(spec, sizes)


def test_a_run_with_such_a_rank_reads_no_weights(tmp_path: Path) -> None:
    model = make("llama2")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_hf()))
    config = load_config(**{"model.path": str(tmp_path), "adapter.rank": 10**6})
    with pytest.raises(ModelError, match=r"adapter\.rank=1000000 is more than any layer"):
        starting_policy(config, tmp_path)


# --- copies ---------------------------------------------------------------------------------------


def test_a_twin_shares_what_is_frozen_and_nothing_else() -> None:
    model = adapted()
    reference = Reference(model, "frozen")
    pairs = zip(model.named_parameters(), reference.model.named_parameters(), strict=True)
    for (name, mine), (_, theirs) in pairs:
        assert (mine is theirs) == (".adapter." not in name)
        assert not theirs.requires_grad
    assert all(p.requires_grad == (".adapter." in n) for n, p in model.named_parameters())
    with torch.no_grad():
        for adapter in adapters(model).values():
            adapter.lora_B.add_(1.0)
    start = hidden(adapted(), sequences([5]))
    assert torch.equal(hidden(reference.model, sequences([5])), start)
    assert not torch.equal(hidden(model, sequences([5])), start)


def test_an_average_follows_the_adapter_alone() -> None:
    model = adapted()
    reference = Reference(model, "ema:0.5")
    assert set(reference.state()) == {n for n, _ in model.named_parameters() if ".adapter." in n}
    before = {n: x.lora_B.clone() for n, x in adapters(model).items()}
    with torch.no_grad():
        for adapter in adapters(model).values():
            adapter.lora_B.add_(1.0)
    reference.after_step(model, 1)
    for name, adapter in adapters(reference.model).items():
        torch.testing.assert_close(adapter.lora_B, before[name] + 0.5)


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_bug_38_the_fingerprint_sees_the_adapter(part: str) -> None:
    model = adapted()
    before = fingerprint(model.named_parameters())
    with torch.no_grad():
        getattr(adapters(model)["model.layers.2.self_attn.v_proj"], part)[0, 0] += 1e-3
    assert fingerprint(model.named_parameters()) != before


def test_a_stale_copy_keeps_old_adapters_and_no_second_base() -> None:
    model = adapted()
    sampler = engine(model, weights="stale:1")
    before = copy.deepcopy(model)
    with torch.no_grad():
        for adapter in adapters(model).values():
            adapter.lora_B.mul_(-2.0)
    sampler.sync(1)
    asked, sampling = request(6, 2), Sampling(max_tokens=5)
    found = one(sampler, asked, sampling)
    assert worst(before, asked, found) <= 1e-5 < worst(model, asked, found)
    assert all(".adapter." in name for name in sampler.state())
    assert sampler.source.model.head_weight is model.head_weight
    again = engine(model, weights="stale:1", version=1)
    again.restore(sampler.state())
    assert worst(before, asked, one(again, asked, sampling)) <= 1e-5


# --- dropout --------------------------------------------------------------------------------------


def test_bug_22_two_forward_passes_are_identical_and_only_updates_drop() -> None:
    """Whatever mode a module is in: nothing is dropped outside of an update."""
    model, rows = adapted(dropout=0.5), sequences([6])
    model.train()
    first = hidden(model, rows)
    assert torch.equal(hidden(model, rows), first)
    assert torch.equal(first, hidden(adapted(), rows))
    asked = request(6, 2)
    assert worst(model, asked, one(engine(model), asked, Sampling(max_tokens=6))) <= 1e-5
    torch.manual_seed(1)
    outside = torch.rand(1)
    torch.manual_seed(1)
    with dropping(model, 3, 0):
        dropped = hidden(model, rows)
    assert torch.equal(torch.rand(1), outside)  # nobody else's random numbers moved
    assert not torch.allclose(dropped, first)
    assert torch.equal(hidden(model, rows), first)
    for moment, equal in (((3, 0), True), ((3, 1), False), ((4, 0), False)):
        with dropping(model, *moment):
            assert torch.equal(hidden(model, rows), dropped) == equal


def test_dropout_is_unbiased_and_recomputed_alike() -> None:
    model, rows = adapted(dropout=0.25), sequences([6])
    adapter = adapters(model)["model.layers.0.mlp.up_proj"]
    x_TD = torch.ones(1, 48)
    with torch.no_grad(), dropping(model, 0):
        found = torch.stack([adapter(x_TD) for _ in range(3000)]).mean(0)
    torch.testing.assert_close(found, adapter(x_TD).detach(), rtol=0.2, atol=0.05)
    grads = []
    for model.recompute in (False, True):
        model.zero_grad()
        with dropping(model, 1):
            hidden(model, rows).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# --- quantised ------------------------------------------------------------------------------------


def few_bits(kind: Any, family: str = "qwen2") -> tuple[Transformer, Transformer]:
    """A quantised model with an adapter, and a plain one of the same dequantised numbers."""
    model = adapted(family)
    quantize(model, kind, "cpu")
    plain = copy.deepcopy(model)
    loras = {name: copy.deepcopy(x) for name, x in adapters(plain).items()}
    for adapter in adapters(plain).values():
        adapter.lora_B.data.zero_()
    merge(plain)
    for name, adapter in loras.items():
        plain.get_submodule(name).adapter = adapter
    return model, plain


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_base_multiplies_by_the_numbers_that_its_bits_mean(kind: str) -> None:
    model, plain = few_bits(kind)
    kept = make("qwen2").requires_grad_(False)
    rows, error = sequences([8]), 0.0
    for name, layer in linear_layers(model).items():
        assert isinstance(layer, QuantizedLinear)
        whole = kept.get_submodule(name).weight
        assert torch.equal(layer.dequantised(torch.float32), plain.get_submodule(name).weight)
        error = max(error, float((layer.dequantised(torch.float32) - whole).abs().mean()))
    assert 1e-4 < error < {"int8": 0.003, "nf4": 0.03}[kind]
    if kind == "int8":  # whose scales multiply behind the sums: roundings differ, so few of them
        model, plain = model.double(), plain.double()
    outs = [hidden(m, rows) for m in (model, plain)]
    assert kind == "int8" or torch.equal(*outs)
    torch.testing.assert_close(*outs, rtol=1.3e-6, atol=1e-5)
    for out in outs:
        out.square().sum().backward()
    for name, adapter in adapters(model).items():
        twin_grad = plain.get_submodule(name).adapter.lora_A.grad
        torch.testing.assert_close(adapter.lora_A.grad, twin_grad, rtol=1.3e-6, atol=1e-5)
    model.float()
    asked, sampling = request(7, 2), Sampling(max_tokens=6)
    assert worst(model, asked, one(engine(model), asked, sampling)) <= 2e-6


@LIBRARY
@pytest.mark.parametrize("shape", [(48, 48), (16, 48), (5, 7), (64, 128)])
def test_nf4_by_hand(shape: tuple[int, int]) -> None:
    """Each weight is the nearest of 16 numbers times its block's largest; blocks cross rows."""
    levels = quantized.bitsandbytes().get_4bit_type("nf4", device="cpu")
    layer = Linear(shape[1], shape[0], bias=False).requires_grad_(False)
    layer.weight.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(1))
    found = quantized._quantized(layer, "nf4", "cpu").dequantised(torch.float32)
    for block, got in zip(layer.weight.flatten().split(64), found.flatten().split(64), strict=True):
        means = levels * block.abs().max()
        nearest = means[(block[:, None] - means).abs().argmin(1)]
        torch.testing.assert_close(got, nearest, rtol=1e-5, atol=1e-6)


@LIBRARY
def test_a_library_that_gives_back_other_numbers_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = quantized.bitsandbytes()
    whole = library.dequantize_4bit
    monkeypatch.setattr(library, "dequantize_4bit", lambda *given: whole(*given).flip(0))
    with pytest.raises(ModelError, match=r"quantize=nf4 is broken on this machine"):
        quantize(make("llama2"), "nf4", "cpu")


def test_int8_by_hand() -> None:
    model = make("llama2")
    weight = model.layers[0].mlp.up_proj.weight
    row = weight[3].detach().clone()
    quantize(model, "int8", "cpu")
    layer = model.layers[0].mlp.up_proj
    scale = float(row.abs().max()) / 127
    assert layer.bits.dtype == torch.int8 and layer.bits[3].tolist() == [
        round(float(x) / scale) for x in row
    ]
    torch.testing.assert_close(layer.dequantised(torch.float32)[3], layer.bits[3] * scale)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_base_takes_the_bytes_that_a_plan_counts(kind: Any) -> None:
    model = make("qwen3")
    whole = sum(p.nbytes for p in model.parameters())
    shape = model.config
    attach(model, Spec(4, 8.0), seed=0)
    quantize(model, kind, "cpu")
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    counted = weight_bytes(shape, SINGLE, lora(shape, Spec(4, 8.0), kind))
    assert frozen == pytest.approx(counted, rel=0.01)
    assert frozen < (0.5 if kind == "int8" else 0.4) * whole  # the rest is embedding and head
    roles = [RoleSize("reference", held=SINGLE)]
    parts = held(shape, SINGLE, roles=roles, frozen=lora(shape, Spec(4, 8.0), kind))
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert parts["adapter"] == trained == parts["reference"] == parts["optimizer moments"] // 2


@pytest.mark.parametrize("kind", KINDS)
def test_no_whole_weight_is_kept_for_the_backward_pass(kind: Any) -> None:
    """Or nothing would be saved: autograd keeps what it is given."""
    model, rows = few_bits(kind)[0], sequences([4])
    largest = 48 * 80
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        hidden(model, rows)
    assert sizes and max(sizes) < largest


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(ModelError, match=r"nf4 needs bitsandbytes.*pip install.*int8"):
        quantized.bitsandbytes()


def test_a_twin_of_a_quantised_model_shares_its_bits() -> None:
    model = few_bits("int8")[0]
    other = copy_trained(model)
    assert other.layers[0].mlp.up_proj.bits is model.layers[0].mlp.up_proj.bits
    assert isinstance(model.ops, Plain) and torch.equal(
        hidden(other, sequences([4])), hidden(model, sequences([4]))
    )
