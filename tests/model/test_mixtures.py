"""Mixtures of experts: their files, their sizes, adapters on their experts, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_zoo import engine, one, request, same, worst
from model_zoo import MIXTURES, SIZES, all_logits, hidden, make, sequences
from safetensors.torch import load_file, save_file
from torch import Tensor
from whole_model import CUDA, DEVICE, DTYPE, difference, forward_backward

from groupwise.engine.protocol import Sampling
from groupwise.errors import EngineError, ModelError, NotNative
from groupwise.model import cost
from groupwise.model.adapters import peft_files
from groupwise.model.adapters.lora import adapters, attach, fill, merge, tensors_of
from groupwise.model.adapters.targets import Spec, adapter_weights, linear_shapes, matching
from groupwise.model.config import Mixture, ModelConfig
from groupwise.model.formats.checkpoint import load_weights, save
from groupwise.model.layers.linear import layer_sizes
from groupwise.model.layers.routes import RECORDED, Routes
from groupwise.model.layers.transformer import Transformer
from groupwise.model.policy import fold_in

SPEC = Spec(4, 8.0)


def same_weights(a: Transformer, b: Transformer) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


# --- configuration --------------------------------------------------------------------------------


def test_families_by_hand() -> None:
    qwen, olmoe, mixtral = (ModelConfig.from_hf(MIXTURES[name]) for name in MIXTURES)
    assert qwen.experts == Mixture(6, 3, 24, normalised=True, dense=(1,))
    assert olmoe.experts == Mixture(6, 3, 24, normalised=False) and olmoe.wide_norm
    assert mixtral.experts == Mixture(5, 2, 24, normalised=True) and not mixtral.qk_norm
    assert (qwen.sparse_layers, mixtral.sparse_layers) == ((0, 2), (0, 1, 2))
    assert ModelConfig.from_hf(SIZES | {"model_type": "llama"}).sparse_layers == ()
    every_second = MIXTURES["qwen3_moe"] | {"decoder_sparse_step": 2, "mlp_only_layers": []}
    assert ModelConfig.from_hf(every_second).sparse_layers == (1,)
    # As transformers has them where nothing is set.
    assert mixtral.rope.theta == 1e6 and (qwen.norm_eps, olmoe.norm_eps) == (1e-6, 1e-5)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3_moe", {"num_experts": None}, "How many experts .* does not say it"),
        ("qwen3_moe", {"num_local_experts": 7}, r"gives \[6, 7\] for it"),
        ("mixtral", {"num_local_experts": 0}, "How many experts"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "can't visit 7 of 6 experts"),
        ("qwen3_moe", {"num_experts_per_tok": None}, "has no 'num_experts_per_tok'"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "has no 'moe_intermediate_size'"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, "leave none of the 3 layers"),
        ("qwen3_moe", {"mlp_only_layers": "all"}, "mlp_only_layers is 'all', and must be a list"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"clip_qkv": 8.0}, "clip_qkv = 8.0, which qwen3_moe does not have"),
        ("olmoe", {"clip_qkv": -1.0}, "clip_qkv is -1.0, and must be a number above 0"),
        ("mixtral", {"num_local_experts": 40_000}, "from 0 to 32,767"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "an expert that every token visits"),
    ],
)
def test_what_is_wrong_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(MIXTURES[name] | change)


def test_other_mixtures_are_not_native() -> None:
    with pytest.raises(NotNative):
        ModelConfig.from_hf(SIZES | {"model_type": "qwen2_moe", "num_experts": 4})
    with pytest.raises(NotNative, match="num_experts = 4: a mixture of experts"):
        ModelConfig.from_hf(SIZES | {"model_type": "llama", "num_experts": 4})


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXTURES)
def test_files_have_every_expert_under_its_published_name(name: str, tmp_path: Path) -> None:
    model = make(name)
    save(model, tmp_path / "out", {})
    stored = load_file(tmp_path / "out" / "model.safetensors")
    mixtral = name == "mixtral"
    outer = "model.layers.2." + ("block_sparse_moe." if mixtral else "mlp.")
    words = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (stored[f"{outer}experts.4.{word}.weight"] for word in words)
    layer = model.layers[2].mlp.experts
    assert torch.equal(torch.cat((gate, up)), layer.gate_up_proj[4])
    assert torch.equal(down, layer.down_proj[4])
    assert torch.equal(stored[f"{outer}gate.weight"], model.layers[2].mlp.gate.weight)
    assert not any(key.endswith("gate_up_proj") for key in stored)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_in_one_tensor_are_read_as_well(name: str, tmp_path: Path) -> None:
    model = make(name)
    save(model, tmp_path / "out", {})
    state = {key: x.contiguous() for key, x in model.state_dict().items()}
    save_file(state, tmp_path / "out" / "model.safetensors")
    assert same_weights(load_weights(tmp_path / "out"), model)


@pytest.mark.parametrize("name", MIXTURES)
def test_transformers_and_we_read_each_other_s_folders(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, rows = make(name), sequences([9, 4])
    save(model, tmp_path / "mine", {}, shard_bytes=60_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
    with torch.no_grad():
        expected = torch.cat([theirs(row[None]).logits[0] for row in rows])
        assert (all_logits(model, rows) - expected).abs().max() <= 1e-4
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    assert same_weights(load_weights(tmp_path / "theirs"), model)


@pytest.mark.parametrize("name", MIXTURES)
def test_gradients_equal_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model, (row,) = make(name), sequences([24])
    raw = MIXTURES[name] | {"pad_token_id": None}  # else a token learns nothing there
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
    ).eval()
    theirs.load_state_dict(model.state_dict(), strict=False)
    theirs.tie_weights()
    weight_TV = torch.randn(24, 97, generator=torch.Generator().manual_seed(3))
    (theirs(row[None]).logits[0] * weight_TV).sum().backward()
    (all_logits(model, [row]) * weight_TV).sum().backward()
    expected = dict(theirs.named_parameters())
    for key, parameter in model.named_parameters():
        wanted, found = expected[key].grad, parameter.grad
        assert wanted is not None and found is not None
        assert (found - wanted).abs().max() <= 1e-4 * max(1.0, float(wanted.abs().max())), key


def changed(folder: Path, change: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def test_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    save(make("olmoe"), tmp_path / "out", {})
    changed(tmp_path / "out", {"num_experts": 5, "num_experts_per_tok": 3})
    with pytest.raises(ModelError, match=r"experts\.5\..* asks for 5 experts a layer"):
        load_weights(tmp_path / "out")
    changed(tmp_path / "out", {"num_experts": 8})
    with pytest.raises(ModelError, match=r"gate.weight has shape \(6, 48\), .* asks for \(8, 48\)"):
        load_weights(tmp_path / "out")


def test_damaged_experts_are_refused(tmp_path: Path) -> None:
    save(make("olmoe"), tmp_path / "out", {})
    file = tmp_path / "out" / "model.safetensors"
    stored = load_file(file)
    at = "model.layers.1.mlp.experts."
    for change, message in [
        ({f"{at}2.up_proj.weight": torch.zeros(23, 48)}, r"\(23, 48\); by config.json .* \(24, 48"),
        ({f"{at}2.up_proj.weight": torch.zeros(24, 48).half()}, "is torch.float16"),
        ({f"{at}2.side_proj.weight": torch.zeros(24, 48)}, "no matrix of an expert"),
    ]:
        save_file(stored | change, file)
        with pytest.raises(ModelError, match=message):
            load_weights(tmp_path / "out")
    del stored[f"{at}0.down_proj.weight"]
    save_file(stored, file)
    with pytest.raises(ModelError, match=f"lacks experts of {at}down_proj, expert 0"):
        load_weights(tmp_path / "out")


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXTURES)
def test_parameters_are_those_of_the_module(name: str) -> None:
    model = make(name)
    shape, every = model.config, list(model.parameters())
    assert cost.parameters(shape) == sum(p.numel() for p in every)
    experts = shape.experts
    assert experts is not None
    passed_by = (experts.count - experts.chosen) * 3 * experts.width * shape.hidden_size
    left = cost.parameters(shape) - passed_by * len(shape.sparse_layers)
    assert cost.active_parameters(shape) == left


def test_what_a_pass_reads_of_the_experts() -> None:
    shape = ModelConfig.from_hf(MIXTURES["mixtral"])
    assert cost.read_weights(shape, 1) == pytest.approx(cost.layer_weights(shape))
    assert cost.read_weights(shape, 1e6) == pytest.approx(cost.held_weights(shape))
    # Of five experts two: two tokens leave one of them alone with a chance of 0.6 x 0.6.
    matrices = 3 * 24 * 48 * 3
    least = cost.layer_weights(shape) - 2 * matrices
    assert cost.read_weights(shape, 2) == pytest.approx(least + 5 * (1 - 0.36) * matrices)


# --- adapters -------------------------------------------------------------------------------------


def adapted(name: str, targets: Any = "all") -> Transformer:
    """With values in both matrices, as after some updates."""
    model = make(name)
    attach(model, Spec(4, 8.0, targets), seed=2)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for adapter in adapters(model).values():
            adapter.lora_B.normal_(0.0, 0.1, generator=generator)
    return model


@pytest.mark.parametrize("name", MIXTURES)
def test_layers_that_can_have_adapters_are_known_by_shape_alone(name: str) -> None:
    model = make(name)
    assert linear_shapes(model.config) == layer_sizes(model)
    attach(model, SPEC, seed=0)
    learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert adapter_weights(model.config, SPEC) == learning


def test_targets_of_experts() -> None:
    names = list(linear_shapes(ModelConfig.from_hf(MIXTURES["qwen3_moe"])))
    found = matching(("up_proj",), names)
    assert found == [
        "model.layers.0.mlp.experts.each.up_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.2.mlp.experts.each.up_proj",
    ]
    assert len(matching(("q_proj", "v_proj"), names)) == 6


@pytest.mark.parametrize("targets", ["all", ("up_proj",), ("down_proj", "q_proj")])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_merged_it_is_the_same_policy_with_the_same_gradients(name: str, targets: Any) -> None:
    """∂B = s·∂W·Aᵀ and ∂A = s·Bᵀ·∂W, expert by expert."""
    model, rows = adapted(name, targets).double(), sequences([9, 5])
    whole = copy.deepcopy(model)
    # Merged in float32: so are the deltas.
    merge(whole)
    whole.requires_grad_(True)
    torch.testing.assert_close(hidden(model, rows), hidden(whole, rows), rtol=1e-5, atol=1e-5)
    for each in (model, whole):
        hidden(each, rows).square().sum().backward()
    for layer, adapter in adapters(model).items():
        stem, _, word = layer.rpartition(".")
        merged = whole.get_submodule(layer)
        if ".experts.each" in stem:
            parent = whole.get_submodule(stem.removesuffix(".each"))
            rows_of = {"gate_proj": slice(0, 24), "up_proj": slice(24, 48)}.get(word)
            grad = (
                parent.down_proj.grad if rows_of is None else parent.gate_up_proj.grad[:, rows_of]
            )
        else:
            grad = merged.weight.grad
        scale = adapter.scale
        expected_B = scale * grad @ adapter.lora_A.mT
        expected_A = scale * adapter.lora_B.mT @ grad
        torch.testing.assert_close(adapter.lora_B.grad, expected_B, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(adapter.lora_A.grad, expected_A, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("targets", ["all", ("up_proj", "q_proj")])
def test_kernels_compute_the_same_adapters(targets: Any) -> None:
    pytest.importorskip("triton")
    from groupwise.model.layers.fast import Exact, Fast

    plain = adapted("qwen3_moe", targets).to(DEVICE, DTYPE)
    model = copy.deepcopy(plain)
    model.ops = Fast()
    model.ops.lay_out(model)
    wanted = forward_backward_of_adapters(copy.deepcopy(plain).float())
    found, rounded = forward_backward_of_adapters(model), forward_backward_of_adapters(plain)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        allowed = 2 * difference(rounded[key], value) + 0.03 if CUDA else 1e-4
        assert difference(found[key], value) < allowed, key
    with pytest.raises(ModelError, match="adapters on experts"):
        Exact().lay_out(model)


def forward_backward_of_adapters(model: Transformer) -> dict[str, Tensor]:
    learning = {n for n, p in model.named_parameters() if p.requires_grad}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)  # what reads all of them finds some
    found = forward_backward(model)
    return {key: x for key, x in found.items() if key in learning or "." not in key}


def test_every_expert_s_adapter_is_stored_under_its_name(tmp_path: Path) -> None:
    model = adapted("qwen3_moe")
    files = {"adapter_config.json": peft_files.config_bytes(model, SPEC, "base", 0.0)}
    peft_files.save(model, tmp_path / "out", files)
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.2.mlp.experts.5.up_proj.lora_B.weight"
    adapter = adapters(model)["model.layers.2.mlp.experts.each.up_proj"]
    assert torch.equal(stored[name], adapter.lora_B[5]) and stored[name].shape == (24, 4)
    assert not any(".each." in key for key in stored)
    targets = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["target_modules"]
    assert sorted(targets) == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    again = make("qwen3_moe")
    read = peft_files.read(tmp_path / "out", layer_sizes(again))
    attach(again, read.spec, seed=0, names=list(read.tensors))
    fill(again, read.named())
    mine, theirs = tensors_of(model), tensors_of(again)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    folded, merged = make("qwen3_moe"), copy.deepcopy(model)
    fold_in(folded, read)
    merge(merged)
    assert same_weights(folded, merged)


def test_an_adapter_on_some_experts_is_refused(tmp_path: Path) -> None:
    model = adapted("mixtral", ("up_proj",))
    files = {"adapter_config.json": peft_files.config_bytes(model, SPEC, "base", 0.0)}
    peft_files.save(model, tmp_path / "out", files)
    file = tmp_path / "out" / "adapter_model.safetensors"
    stored = load_file(file)
    for part in "AB":
        del stored[f"base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_{part}.weight"]
    save_file(stored, file)
    with pytest.raises(ModelError, match="lacks the matrices of expert 3"):
        peft_files.read(tmp_path / "out", layer_sizes(make("mixtral")))


# --- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXTURES)
def test_recorded_routes_are_those_of_the_learner(name: str) -> None:
    """In a group, in company, starting late: in float32 on a CPU always."""
    model, sampling = make(name), Sampling(max_tokens=20, record_routes=True)
    requests = [request(n, 3, i) for i, n in enumerate((4, 30, 9))]
    groups = engine(model, slots=4, eos=(4, 9, 50)).generate(requests, sampling)
    for asked, group in zip(requests, groups, strict=True):
        for completion in group:
            routes = Routes()
            hidden_of(model, [*asked.prompt, *completion.token_ids[:-1]], routes)
            assert completion.routes_TLK is not None and completion.routes_TLK.dtype == RECORDED
            assert torch.equal(completion.routes_TLK, routes.chosen_TLK)  # type: ignore[arg-type]
    plain = engine(model, slots=4, eos=(4, 9, 50)).generate(requests, Sampling(max_tokens=20))
    for group, other in zip(groups, plain, strict=True):
        assert all(same(a, b) and b.routes_TLK is None for a, b in zip(group, other, strict=True))


def hidden_of(model: Transformer, ids: list[int], routes: Routes) -> None:
    from groupwise.model.layers.attention import packed, packed_positions

    with torch.no_grad():
        model(torch.tensor(ids), packed_positions([len(ids)]), packed([len(ids)]), routes=routes)


def test_an_adapted_mixture_samples_what_it_learns_from() -> None:
    model, asked = adapted("mixtral"), request(6, 3)
    found = one(engine(model, slots=2), asked, Sampling(max_tokens=12))
    assert worst(model, asked, found) <= 1e-5
    alone = one(engine(model, slots=1), asked, Sampling(max_tokens=12))
    assert all(map(same, found, alone))


def test_routes_of_a_dense_model_are_refused() -> None:
    with pytest.raises(EngineError, match="no experts to route to"):
        one(engine("qwen3"), request(5), Sampling(max_tokens=4, record_routes=True))
