"""Weights in the sampler: the learner's own after every sync, or exactly the copy that was asked.

Whatever changes in the learner, the recorded log-probabilities are compared with those of a
forward pass of the model that the engine should be sampling from.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from engine_zoo import engine, one, request, same, worst
from model_zoo import all_logits, make
from torch import Tensor, nn

from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.protocol import Request, Sampling
from groupwise.engine.randomness import key, normals
from groupwise.errors import EngineError, ModelError
from groupwise.model.adapters.lora import LoRA
from groupwise.model.layers.fp8 import check_fp8
from groupwise.model.layers.fused_linear import concatenated
from groupwise.model.layers.linear import Linear
from groupwise.model.layers.ops import Plain
from groupwise.model.layers.transformer import Transformer

SAMPLING = Sampling(max_tokens=12)
ASKED = request(9, 6)
FAMILIES = ["smollm2", "llama_biases", "qwen2", "qwen3"]  # tied, biases, both, norms and untied


@torch.no_grad()
def perturb(model: Transformer, seed: int = 0, only: str = "") -> None:
    generator = torch.Generator().manual_seed(1000 + seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if only in name:
            parameter += 0.05 * noise


@torch.no_grad()
def quantised(model: Transformer) -> Transformer:
    """The 8-bit round trip, written down a second time: integers first, then the product."""
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        if parameter.dim() == 2:
            step = parameter.abs().max(1, keepdim=True).values / 127
            levels = torch.round(parameter / step).to(torch.int8)
            parameter.copy_(levels.float() * step)
    return twin


def by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit floats and their scales, written down a second time: 3 bits behind the first."""
    scale = x.abs().max(1, keepdim=True).values / 448
    unit = x / scale
    step = torch.exp2(unit.abs().clamp(min=2**-6).log2().floor() - 3)
    return torch.round(unit / step) * step, scale


class Eighths(Plain):
    """Products of rows in 8-bit floats, inputs and weights alike."""

    def linear(self, module: Linear, x_TD: Tensor) -> Tensor:
        weight = module.weight
        if module.adapter is not None:
            weight = weight + module.adapter.delta()  # type: ignore[operator]
        (x, x_scale), (w, w_scale) = by_row(x_TD), by_row(weight)
        out = x_scale * (x @ w.T) * w_scale.T
        return out if module.bias is None else out + module.bias


def in_eight_bits(model: Transformer) -> Transformer:
    twin = copy.deepcopy(model)
    twin.ops = Eighths()
    return twin


EXPECTED = {"shared": lambda model: model, "int8": quantised, "fp8": in_eight_bits}


def differs(
    model: Transformer,
    sampler: NativeEngine,
    asked: Request = ASKED,
    sampling: Sampling = SAMPLING,
) -> float:
    return worst(model, asked, one(sampler, asked, sampling))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("weights", ["shared", "fp8", "int8", "stale:1"])
def test_bugs_38_to_40_every_parameter_arrives(name: str, weights: str) -> None:
    """One parameter at a time, so that none can hide behind the others."""
    asked, sampling = request(9, 2), Sampling(max_tokens=4)
    model = make(name)
    sampler = engine(model, weights=weights)
    names = [key for key, _ in model.named_parameters()]
    few = [key for key in names if ".layers." not in key or ".layers.1." in key]
    for version, changed in enumerate(few, 1):
        before = copy.deepcopy(model)
        perturb(model, version, only=changed)
        sampler.sync(version)
        expected = before if weights == "stale:1" else EXPECTED[weights](model)
        assert differs(expected, sampler, asked, sampling) <= 1e-5, changed


@pytest.mark.parametrize("weights", EXPECTED)
def test_bug_38_an_adapter_is_delivered(weights: str) -> None:
    """Attached after the engine was made, then trained, then taken off."""
    model = make("llama3")
    sampler = engine(model, weights=weights)
    projection = model.model.layers[1].mlp.up_proj  # type: ignore[union-attr]
    plain = copy.deepcopy(model)
    adapter = LoRA(48, 80, 4, 1.0)
    nn.init.normal_(adapter.lora_A), nn.init.normal_(adapter.lora_B)
    projection.adapter = adapter  # type: ignore[union-attr, assignment]
    sampler.sync(1)
    asked = EXPECTED[weights]
    assert differs(asked(model), sampler) <= 1e-5
    assert differs(asked(plain), sampler) > 1e-3
    with torch.no_grad():
        adapter.lora_B.mul_(-2)
    sampler.sync(2)
    assert differs(asked(model), sampler) <= 1e-5
    projection.adapter = None  # type: ignore[union-attr, assignment]
    sampler.sync(3)
    assert differs(asked(plain), sampler) <= 1e-5


@pytest.mark.parametrize("weights", EXPECTED)
def test_bug_39_no_old_weights_come_back(weights: str) -> None:
    """Rollouts between updates, several updates between rollouts: always the newest."""
    model = make("qwen2")
    sampler = engine(model, weights=weights)
    for version in range(1, 5):
        perturb(model, version)
        sampler.sync(version)
        if version % 2:
            continue
        expected = EXPECTED[weights](model)
        for _ in range(2):
            assert differs(expected, sampler) <= 1e-5
        found = one(sampler, ASKED, SAMPLING)
        assert {c.version for c in found} == {version}
        assert {c.weights for c in found} == {weights}


@pytest.mark.parametrize("weights", ["shared", "fp8", "int8", "stale:1"])
def test_bug_40_a_tied_head_follows_its_embedding(weights: str) -> None:
    model = make("smollm2")
    sampler = engine(model, weights=weights)
    old = copy.deepcopy(model)
    perturb(model, only="embed_tokens")
    sampler.sync(1)
    perturb(model, 1, only="norm.weight")
    sampler.sync(2)  # the stale copy now holds the changed embedding and the old norms
    if weights == "stale:1":
        perturb(old, only="embed_tokens")
        expected = old
    else:
        expected = EXPECTED[weights](model)
    assert differs(expected, sampler) <= 1e-5
    copied = sampler.source.model
    assert copied.head_weight is dict(copied.named_parameters())["model.embed_tokens.weight"]


@pytest.mark.parametrize("weights", ["shared", "fp8", "int8", "stale:1", "noise:0.3"])
def test_bug_41_no_prompt_survives_an_update(weights: str) -> None:
    """The same prompt before and after: a fresh engine on the new weights says the same bits."""
    model = make("llama3")
    sampler = engine(model, weights=weights)
    before = one(sampler, ASKED, SAMPLING)
    for version in (1, 2):
        perturb(model, version, only="layers.0")  # what a cached prompt would hold
        sampler.sync(version)
    if weights == "stale:1":
        fresh = make("llama3")
        perturb(fresh, 1, only="layers.0")
        expected = one(engine(fresh), ASKED, SAMPLING)
    else:
        expected = one(engine(model, weights=weights), ASKED, SAMPLING)
    after = one(sampler, ASKED, SAMPLING)
    assert all(map(same, after, expected))
    assert not any(map(same, after, before))


def test_bug_28_no_widened_head_survives_an_update() -> None:
    """bfloat16 weights: the engine reads a float32 head, which must be made from the new one."""
    for name in ("smollm2", "llama3"):
        model = make(name, dtype=torch.bfloat16)
        sampler = engine(model)
        # Right behind a prompt of whole steps both passes round alike.
        first, asked = Sampling(max_tokens=1), request(16, 6)
        one(sampler, asked, first)
        head = "embed_tokens" if model.config.tied else "lm_head"
        perturb(model, only=head)
        sampler.sync(1)
        assert worst(model, asked, one(sampler, asked, first)) <= 1e-5


def test_shared_weights_are_the_learners_own() -> None:
    model = make("smollm2")
    sampler = engine(model)
    assert sampler.source.model is model
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    one(sampler, ASKED, SAMPLING)
    all_logits(model, [torch.tensor(ASKED.prompt)]).sum().backward()  # and remain trainable
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("weights", ["int8", "stale:1"])
def test_a_copy_changes_only_when_it_is_told_to(weights: str) -> None:
    model = make("smollm2")
    sampler = engine(model, weights=weights)
    before = one(sampler, ASKED, SAMPLING)
    perturb(model)
    assert all(map(same, one(sampler, ASKED, SAMPLING), before))
    assert differs(model, sampler) > 1e-3
    shared = {p.data_ptr() for p in model.parameters()}
    assert not shared & {p.data_ptr() for _, p in sampler.source.model.named_parameters()}


def test_int8_rounds_matrices_and_nothing_else() -> None:
    model = make("qwen2")
    copied = dict(engine(model, weights="int8").source.model.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(copied[name], parameter), name
        else:
            step = parameter.detach().abs().amax(1, keepdim=True) / 127
            error = (copied[name] - parameter).abs()
            assert (error <= 0.5001 * step).all() and error.max() > 0.4 * step.min(), name
            level = copied[name] / step
            assert (level - level.round()).abs().max() < 1e-3
    flat = make("smollm2")
    with torch.no_grad():
        flat.model.embed_tokens.weight[5] = 0  # a row without a scale
    embedding = engine(flat, weights="int8").source.model.head_weight
    assert torch.equal(embedding[5], torch.zeros(72)) and embedding.isfinite().all()


def test_8_bit_floats_lie_where_captured_steps_read_them() -> None:
    """New weights are written over old ones; what is not rounded is the learner's own."""
    model = make("qwen2")
    sampler = engine(model, weights="fp8")
    copied = dict(sampler.source.model.named_parameters())
    places = {name: each.data_ptr() for name, each in copied.items()}
    own = {name: each.data_ptr() for name, each in model.named_parameters()}
    rounded = {name for name in own if name.endswith("proj.weight")}
    assert {name: place for name, place in own.items() if name not in rounded} == {
        name: place for name, place in places.items() if not name.endswith((".bits", ".scale"))
    }
    assert len(rounded) == 7 * 3 == sum(name.endswith(".bits") for name in places)
    perturb(model)
    sampler.sync(1)
    after = dict(sampler.source.model.named_parameters())
    assert {name: each.data_ptr() for name, each in after.items()} == places
    layer = sampler.source.model.layers[0].self_attn  # type: ignore[attr-defined]
    joined = concatenated([layer.q_proj.bits, layer.k_proj.bits, layer.v_proj.bits])
    assert joined.data_ptr() == layer.q_proj.bits.data_ptr() and len(joined) == 48 + 16 + 16
    model.to(torch.float64).to(torch.float32)  # everything lies elsewhere
    perturb(model, 1)
    sampler.sync(2)
    assert differs(in_eight_bits(model), sampler) <= 1e-5


def test_8_bit_floats_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="mixture of experts"):
        engine(make("qwen3_moe"), weights="fp8")

    class OnGpu:
        is_cuda, device = True, "cuda"

    model = make("qwen2")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(type(model), "head_weight", OnGpu())
    for since, words in (((8, 0), "NVIDIA A100 has no products of 8-bit"), ((9, 0), "of 16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, since=since: since)
        model.layers[0].mlp.up_proj.outputs = 81
        with pytest.raises(ModelError, match=words):
            check_fp8(model)


def test_a_stale_copy_is_exactly_so_many_updates_old() -> None:
    model = make("smollm2")
    sampler = engine(model, weights="stale:2")
    past = [copy.deepcopy(model)]
    for version in range(1, 6):
        perturb(model, version)
        sampler.sync(version)
        past.append(copy.deepcopy(model))
        used = max(0, version - 2)
        found = one(sampler, ASKED, SAMPLING)
        assert worst(past[used], ASKED, found) <= 1e-5
        assert worst(past[used + 1], ASKED, found) > 1e-3
        assert {(c.version, c.weights) for c in found} == {(used, "stale:2")}


def test_a_stale_copy_between_two_syncs_is_the_older_one() -> None:
    """Two updates a batch: three updates ago lies between two rollouts."""
    model = make("smollm2")
    sampler = engine(model, weights="stale:3")
    past = {0: copy.deepcopy(model)}
    for version in (2, 4, 6, 8):
        perturb(model, version)
        sampler.sync(version)
        past[version] = copy.deepcopy(model)
    found = one(sampler, ASKED, SAMPLING)
    assert {c.version for c in found} == {4}
    assert worst(past[4], ASKED, found) <= 1e-5


def test_a_stale_copy_can_be_restored() -> None:
    model = make("qwen3")
    sampler = engine(model, weights="stale:2")
    for version in (1, 2, 3):
        perturb(model, version)
        sampler.sync(version)
    state = {name: tensor.clone() for name, tensor in sampler.state().items()}
    resumed_model = copy.deepcopy(model)
    resumed = engine(resumed_model, weights="stale:2", version=3)
    resumed.restore(state)
    for version in (4, 5, 6, 7):
        found, expected = (one(e, ASKED, SAMPLING) for e in (resumed, sampler))
        assert all(map(same, found, expected))
        assert [c.version for c in found] == [c.version for c in expected]
        for learner, either in ((model, sampler), (resumed_model, resumed)):
            perturb(learner, version)
            either.sync(version)
    broken = {name: x for name, x in state.items() if "q_norm" not in name}
    with pytest.raises(EngineError, match="version 1 has no model"):
        engine(model, weights="stale:2", version=3).restore(broken)


@pytest.mark.parametrize("weights", ["shared", "fp8", "int8", "noise:0.1"])
def test_other_weights_need_nothing_saved(weights: str) -> None:
    sampler = engine(weights=weights)
    assert sampler.state() == {}
    sampler.restore({})
    with pytest.raises(EngineError, match="keeps none"):
        sampler.restore({"0/x": torch.zeros(1)})


def noisy_logp(model: Transformer, sample: int, ids: tuple[int, ...], temperature: float) -> Tensor:
    row = torch.tensor([*ASKED.prompt, *ids])
    with torch.no_grad():
        logits_TV = all_logits(model, [row])[len(ASKED.prompt) - 1 : -1]
    words = torch.tensor([key(7, "train", 0, 0, sample, purpose="noise")]).expand(len(ids), 4)
    logits_TV = logits_TV + 0.3 * normals(words, torch.arange(len(ids)), 97)
    logp_TV = (logits_TV / temperature).log_softmax(-1)
    return logp_TV.gather(1, row[len(ASKED.prompt) :, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_noise_is_keyed_and_recorded(temperature: float) -> None:
    model = make("smollm2")
    sampling = Sampling(12, temperature=temperature)
    found = one(engine(model, weights="noise:0.3", slots=3), ASKED, sampling)
    for sample, completion in enumerate(found):
        expected = noisy_logp(model, sample, completion.token_ids, temperature or 1.0)
        torch.testing.assert_close(completion.logp_T, expected, rtol=0, atol=1e-5)
        assert completion.weights == "noise:0.3"
    assert worst(model, ASKED, found, temperature or 1.0) > 0.05
    others = [request(4, 5, 3), ASKED, request(20, 2, 4)]
    together = engine(model, weights="noise:0.3", slots=9).generate(others, sampling)[1]
    assert all(map(same, found, together))
    gap = torch.cat([c.logp_T for c in found]) - torch.cat(
        [
            noisy_logp(model, (i + 1) % 6, c.token_ids, temperature or 1.0)
            for i, c in enumerate(found)
        ]
    )
    assert gap.abs().mean() > 0.05  # each sample has noise of its own


@pytest.mark.parametrize(
    "weights",
    ["", "int4", "stale", "stale:0", "stale:x", "stale:1.5", "noise:", "noise:-1", "noise:inf"],
)
def test_unknown_weights_are_refused_with_the_known_forms(weights: str) -> None:
    with pytest.raises(EngineError, match=r'"fp8", "int8", "stale:K".*"noise:S"'):
        engine(weights=weights)


def test_noise_of_nothing_is_refused_as_well() -> None:
    with pytest.raises(EngineError, match="names no weights"):
        engine(weights=f"noise:{math.nan}")
