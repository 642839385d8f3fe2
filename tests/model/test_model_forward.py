"""One forward pass: equal to transformers, to a formula written by hand, and to itself."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Mapping

import pytest
import torch
from model_zoo import CONFIGS, all_logits, hidden, make, sequences
from torch import Tensor

from groupwise.errors import ModelError
from groupwise.model.adapters.lora import LoRA
from groupwise.model.config import ModelConfig, Rope
from groupwise.model.layers.attention import (
    packed,
    packed_positions,
    shared_positions,
    shared_prompts,
)
from groupwise.model.layers.cache import CachedAttention, KeyValueCache
from groupwise.model.layers.head import logits
from groupwise.model.layers.rope import frequencies
from groupwise.model.layers.transformer import Transformer

LENGTHS = [5, 1, 40, 17, 39, 3, 64]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model, rows = make(name), sequences(LENGTHS)
    raw = copy.deepcopy(CONFIGS[name])  # transformers writes into what it is given
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
    ).eval()
    missing, surplus = theirs.load_state_dict(model.state_dict(), strict=False)
    assert not surplus and set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()
    with torch.no_grad():
        expected = torch.cat([theirs(row[None]).logits[0] for row in rows])
        found = all_logits(model, rows)
    assert expected.abs().max() > 1  # else the tolerance would prove nothing
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["llama2", "qwen2", "qwen3", "llama_biases"])
def test_bfloat16_rounds_where_transformers_rounds(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model, rows = make(name, dtype=torch.bfloat16), sequences([7, 20])
    raw = copy.deepcopy(CONFIGS[name])
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(raw.pop("model_type"), **raw), dtype=torch.bfloat16
    ).eval()
    theirs.load_state_dict(model.state_dict(), strict=False)
    theirs.tie_weights()
    with torch.no_grad():
        expected = torch.cat([theirs.model(row[None]).last_hidden_state[0] for row in rows])
        found = hidden(model, rows)
        exact = hidden(make(name), rows)
    wrong, unavoidable = (found - expected).float(), (expected - exact).float()
    assert wrong.abs().mean() < 0.2 * unavoidable.abs().mean()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_a_formula_written_by_hand(name: str) -> None:
    model, rows = make(name, dtype=torch.float64), sequences([6, 11])
    state = {key: value.detach() for key, value in model.state_dict().items()}
    expected = torch.cat([by_hand(model.config, state, row) for row in rows])
    # Frequencies are float32 by design, so angles agree to that precision only.
    torch.testing.assert_close(all_logits(model, rows).detach(), expected, rtol=0, atol=2e-5)


def by_hand(config: ModelConfig, state: Mapping[str, Tensor], token_T: Tensor) -> Tensor:
    """One sequence, token by token and head by head; rotary pairs as complex numbers."""

    def apply(name: str, x: Tensor) -> Tensor:
        out = state[f"{name}.weight"] @ x
        return out + state[f"{name}.bias"] if f"{name}.bias" in state else out

    def norm(name: str, x: Tensor) -> Tensor:
        return state[f"{name}.weight"] * x / (x.square().mean() + config.norm_eps).sqrt()

    def turn(x: Tensor, position: int) -> Tensor:
        half = config.head_dim // 2
        pair = torch.complex(x[:half], x[half:])
        angle = position * frequencies(config.rope, config.head_dim, torch.device("cpu")).double()
        pair = pair * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((pair.real, pair.imag))

    stream = [state["model.embed_tokens.weight"][token] for token in token_T]
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        keys: list[list[Tensor]] = []
        values: list[list[Tensor]] = []
        for t, x in enumerate(stream):
            x1 = norm(at + "input_layernorm", x)
            q1, k1, v1 = (apply(f"{at}self_attn.{part}_proj", x1) for part in "qkv")
            if config.wide_norm:
                q1, k1 = norm(at + "self_attn.q_norm", q1), norm(at + "self_attn.k_norm", k1)
            if config.clip_qkv is not None:
                q1, k1, v1 = (y.clamp(-config.clip_qkv, config.clip_qkv) for y in (q1, k1, v1))
            q, k, v = (y.split(config.head_dim) for y in (q1, k1, v1))
            if config.qk_norm and not config.wide_norm:
                q = [norm(at + "self_attn.q_norm", head) for head in q]
                k = [norm(at + "self_attn.k_norm", head) for head in k]
            keys.append([turn(head, t) for head in k])
            values.append(list(v))
            seen = []
            for number, head in enumerate(q):
                shared = number // (config.num_heads // config.num_kv_heads)
                score = torch.stack([turn(head, t) @ past[shared] for past in keys])
                weight = (score / math.sqrt(config.head_dim)).softmax(0)
                seen.append(weight @ torch.stack([past[shared] for past in values]))
            x = x + apply(at + "self_attn.o_proj", torch.cat(seen))
            x2 = norm(at + "post_attention_layernorm", x)
            if layer in config.sparse_layers:
                stream[t] = x + experts_by_hand(config, state, at + "mlp.", x2)
                continue
            gate = apply(at + "mlp.gate_proj", x2)
            inner = gate * torch.sigmoid(gate) * apply(at + "mlp.up_proj", x2)
            stream[t] = x + apply(at + "mlp.down_proj", inner)
    head = state["model.embed_tokens.weight" if config.tied else "lm_head.weight"]
    return torch.stack([head @ norm("model.norm", x) for x in stream])


def experts_by_hand(config: ModelConfig, state: Mapping[str, Tensor], at: str, x: Tensor) -> Tensor:
    """One token's visits, one after the other; scores by exponentials."""
    experts = config.experts
    assert experts is not None
    weight = [math.exp(row @ x) for row in state[at + "gate.weight"]]
    largest = sorted(range(experts.count), key=lambda e: -weight[e])[: experts.chosen]
    whole = sum(weight[e] for e in largest) if experts.normalised else sum(weight)
    total = torch.zeros_like(x)
    for e in largest:
        gate, up = (state[at + "experts.gate_up_proj"][e] @ x).split(experts.width)
        made = state[at + "experts.down_proj"][e] @ (gate * torch.sigmoid(gate) * up)
        total += weight[e] / whole * made
    return total


def test_frequencies_stay_where_they_are_whatever_other_models_come() -> None:
    """A captured decoding step reads them by their address."""
    device, first = torch.device("cpu"), Rope(theta=123.0)
    place = weakref.ref(frequencies(first, 8, device))
    for theta in range(1000, 1100):
        frequencies(Rope(theta=theta), 8, device)
    assert place() is not None and frequencies(first, 8, device) is place()


def test_llama3_frequencies_by_hand() -> None:
    config = ModelConfig.from_hf(CONFIGS["llama3"] | {"head_dim": 8, "rope_theta": 10000.0})
    found = frequencies(config.rope, 8, torch.device("cpu")).tolist()
    # 1, .1, .01, .001 turn once in 6.28, 62.8, 628 and 6283 tokens. With 32 original positions
    # the first is fast (wavelength < 32/4), the others slow (> 32): divided by 8.
    assert found == pytest.approx([1.0, 0.1 / 8, 0.01 / 8, 0.001 / 8], rel=1e-6)
    wide = ModelConfig.from_hf(
        CONFIGS["llama3"]
        | {"head_dim": 8, "rope_theta": 10000.0}
        | {"rope_scaling": dict(CONFIGS["llama3"]["rope_scaling"], low_freq_factor=0.25)}
    )
    # Now 62.8 lies between 8 and 128: turns = 32/62.8 = 0.5093, ramp = (0.5093 - 0.25)/3.75.
    ramp = (32 * 0.1 / (2 * math.pi) - 0.25) / 3.75
    expected = (1 - ramp) * 0.1 / 8 + ramp * 0.1
    assert frequencies(wide.rope, 8, torch.device("cpu"))[1].item() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["llama2", "smollm2", "qwen3"])
def test_packed_equals_separate(name: str) -> None:
    model, rows = make(name), sequences(LENGTHS)
    together = all_logits(model, rows)
    apart = torch.cat([all_logits(model, [row]) for row in rows])
    torch.testing.assert_close(together, apart, rtol=0, atol=2e-5)
    upside_down = all_logits(model, rows[::-1]).split(LENGTHS[::-1])[::-1]
    torch.testing.assert_close(torch.cat(upside_down), apart, rtol=0, atol=2e-5)


def test_nothing_leaks_between_sequences_or_from_the_future() -> None:
    model, rows = make("smollm2"), sequences(LENGTHS)
    token_T, starts = torch.cat(rows), [0, 5, 6, 46, 63, 102, 105]
    x_TD = model.model.embed_tokens(token_T).detach().requires_grad_()
    model.model.embed_tokens.forward = lambda _: x_TD  # type: ignore[method-assign, assignment]
    out_TD = model(token_T, packed_positions(LENGTHS), packed(LENGTHS))
    for start, length in zip(starts, LENGTHS, strict=True):
        t = start + length // 2
        (grad_TD,) = torch.autograd.grad(out_TD[t].sum(), x_TD, retain_graph=True)
        touched = grad_TD.abs().sum(1).nonzero().flatten().tolist()
        assert touched == list(range(start, t + 1))


def test_completions_of_a_group_share_one_prompt() -> None:
    model = make("qwen3")
    # Prompts of unequal length in one block: 9 with 12, and 30 with 35.
    prompts, completions = [9, 30, 12, 35], [[4, 7, 1], [20, 3], [5, 18], [3, 50, 18, 18]]
    whole = sequences([sum(prompts) + sum(map(sum, completions))])[0]
    lengths = [n for p, g in zip(prompts, completions, strict=True) for n in (p, *g)]
    positions, attend = shared_positions(prompts, completions), shared_prompts(prompts, completions)
    pieces = iter(whole.split(lengths))
    found = iter(model(whole, positions, attend).split(lengths))
    for group in completions:
        prompt, of_prompt = next(pieces), next(found)
        torch.testing.assert_close(of_prompt, hidden(model, [prompt]), rtol=0, atol=2e-5)
        for _ in group:
            completion, of_completion = next(pieces), next(found)
            alone = hidden(model, [torch.cat((prompt, completion))])[len(prompt) :]
            torch.testing.assert_close(of_completion, alone, rtol=0, atol=2e-5)


def test_gradient_through_a_shared_prompt_is_that_of_separate_sequences() -> None:
    model = make("llama3", dtype=torch.float64)
    prompt, first, second = sequences([12, 5, 8])
    apart = hidden(model, [torch.cat((prompt, first)), torch.cat((prompt, second))])
    weight = torch.randn(13, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    rows = [*range(12, 17), *range(17 + 12, 17 + 20)]
    (apart[rows] * weight).sum().backward()
    expected = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    together = model(
        torch.cat((prompt, first, second)),
        shared_positions([12], [[5, 8]]),
        shared_prompts([12], [[5, 8]]),
    )
    (together[12:] * weight).sum().backward()
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["llama2", "smollm2", "qwen3"])
def test_token_by_token_from_the_cache_equals_one_pass(name: str) -> None:
    model, rows = make(name), sequences([12, 5, 9])
    expected = [all_logits(model, [row]) for row in rows]
    cache = KeyValueCache(model.config, slots=5, capacity=16)
    slots = [3, 0, 4]
    held, found = [0, 0, 0], [[], [], []]  # type: ignore[var-annotated]

    def feed(which: list[int], lengths: list[int]) -> None:
        attend = CachedAttention(
            cache, [slots[i] for i in which], [held[i] for i in which], lengths
        )
        token_T = torch.cat(
            [rows[i][held[i] : held[i] + n] for i, n in zip(which, lengths, strict=True)]
        )
        with torch.no_grad():
            out = logits(model(token_T, attend.position_T, attend), model.head_weight)
        for i, n, part in zip(which, lengths, out.split(lengths), strict=True):
            found[i].append(part)
            held[i] += n

    feed([0, 1, 2], [4, 2, 1])  # prompts, fresh slots
    feed([0, 2], [3, 2])  # several tokens on top of what is held
    feed([1], [1])
    for _ in range(2):
        feed([0, 1, 2], [1, 1, 1])  # decoding, slots out of order
    feed([2, 0], [1, 1])
    for parts, whole in zip(found, expected, strict=True):
        got = torch.cat(parts)
        torch.testing.assert_close(got, whole[: len(got)], rtol=0, atol=2e-5)


def test_a_prompt_is_copied_to_its_group() -> None:
    model, (prompt, tail) = make("smollm2"), sequences([10, 3])
    cache = KeyValueCache(model.config, slots=4, capacity=16)
    with torch.no_grad():
        attend = CachedAttention(cache, [1], [0], [10])
        model(prompt, attend.position_T, attend)
        cache.copy(1, [2, 3], 10)
        step = CachedAttention(cache, [1, 2, 3], [10, 10, 10], [1, 1, 1])
        found = model(tail, step.position_T, step)
        expected = torch.stack([hidden(model, [torch.cat((prompt, t[None]))])[-1] for t in tail])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_stale_numbers_in_a_reused_slot_are_not_seen() -> None:
    model, (row,) = make("smollm2"), sequences([6])
    cache = KeyValueCache(model.config, slots=2, capacity=8)
    cache.key_LSJUW.fill_(1e4)
    cache.value_LSJUW.fill_(1e4)
    with torch.no_grad():
        for t in range(6):
            attend = CachedAttention(cache, [1], [t], [1])
            found = model(row[t : t + 1], attend.position_T, attend)
        expected = hidden(model, [row])[-1:]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


def test_recomputing_layers_changes_no_gradient() -> None:
    model, rows = make("qwen2"), sequences([7, 3])
    gradients = []
    for recompute in (False, True):
        model.zero_grad()
        model.recompute = recompute
        all_logits(model, rows).logsumexp(-1).sum().backward()
        gradients.append([x.grad.clone() for x in model.parameters() if x.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert len(gradients[0]) == len(list(model.parameters()))


def test_an_adapter_adds_its_output_to_any_linear() -> None:
    model, rows = make("llama2"), sequences([4])
    plain = all_logits(model, rows)
    projection = model.model.layers[1].mlp.up_proj  # type: ignore[union-attr]
    delta = LoRA(48, 80, 4, 0.5)
    torch.nn.init.normal_(delta.lora_A), torch.nn.init.normal_(delta.lora_B)
    projection.adapter = delta  # type: ignore[union-attr, assignment]
    adapted = all_logits(model, rows)
    projection.adapter = None  # type: ignore[union-attr, assignment]
    with torch.no_grad():
        projection.weight += 0.5 * delta.lora_B @ delta.lora_A  # type: ignore[union-attr, operator]
    torch.testing.assert_close(all_logits(model, rows), adapted, rtol=0, atol=1e-5)
    assert not torch.allclose(plain, adapted, atol=1e-3)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    config = ModelConfig.from_hf(CONFIGS["qwen2"])
    a, b = (Transformer(config).initialise(torch.Generator().manual_seed(seed)) for seed in (5, 5))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert (a.model.norm.weight == 1).all()
    assert float(a.model.embed_tokens.weight.detach().std()) == pytest.approx(0.02, rel=0.05)


def test_positions_where_a_window_would_act_are_refused() -> None:
    raw = CONFIGS["mistral"] | {"sliding_window": 8}
    model = Transformer(ModelConfig.from_hf(raw)).initialise(torch.Generator().manual_seed(0))
    hidden(model, sequences([8]))
    with pytest.raises(ModelError, match=r"9 tokens is longer than 8.*sliding window"):
        hidden(model, sequences([9]))


def test_bad_packs_are_refused() -> None:
    model = make("llama2")
    with pytest.raises(ModelError, match="flat and of one length"):
        model(torch.zeros(2, 3, dtype=torch.long), packed_positions([6]), packed([6]))
    with pytest.raises(ModelError, match="at least one token"):
        packed([3, 0])
    cache = KeyValueCache(model.config, slots=2, capacity=4)
    with pytest.raises(ModelError, match="distinct slots of a cache that has 2"):
        CachedAttention(cache, [0, 0], [0, 0], [1, 1])
    with pytest.raises(ModelError, match="capacity is 4"):
        CachedAttention(cache, [0], [3], [2])
