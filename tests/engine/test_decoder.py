"""The GPU's decoder: what a captured step computes, and who is in flight when.

Without a GPU its kernels run in Triton's interpreter, on small models in float32.
"""

from __future__ import annotations

import pytest
import torch
from decoder_twins import decoder_engine, twin, twins  # noqa: F401
from engine_zoo import engine, one, request, same, tokenizer, worst
from model_zoo import make
from real_shapes import SEVEN

from groupwise.engine.native import engine as native
from groupwise.engine.protocol import Sampling
from groupwise.errors import EngineError
from groupwise.model.layers.transformer import Transformer

pytestmark = pytest.mark.usefixtures("kernels")
if torch.cuda.is_available():
    pytest.skip("small float32 models are for the interpreter", allow_module_level=True)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows that only fill up, no splits: each costs the interpreter as much as a real one."""
    from groupwise.engine.native import decoder

    monkeypatch.setattr(decoder, "bucket", lambda rows: rows)
    monkeypatch.setattr(decoder, "PROGRAMS", 1)


def equipped(name: str = "smollm2", exact: bool = False) -> Transformer:
    from groupwise.model.layers.fast import Exact, Fast

    model = make(name)
    model.ops = Exact() if exact else Fast()
    model.ops.lay_out(model)
    return model


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", ["smollm2", "qwen3", "qwen3_moe"])
def test_kernels_and_plain_engine_write_the_same(name: str) -> None:
    sampling = Sampling(max_tokens=3, temperature=0.0)
    requests = [request(5, 1, 0), request(9, 1, 1)]
    plain = engine(name).generate(requests, sampling)
    kernels = engine(equipped(name)).generate(requests, sampling)
    for a, b in zip(plain, kernels, strict=True):
        assert [c.token_ids for c in a] == [c.token_ids for c in b]
        assert torch.allclose(a[0].logp_T, b[0].logp_T, atol=2e-5)


@pytest.mark.usefixtures("few")
def test_kernels_that_read_prompts_once_write_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from groupwise.engine.native import decoder

    monkeypatch.setattr(decoder, "PROMPT_ONCE_ROWS", 1)
    monkeypatch.setattr(decoder, "PROMPT_ONCE_TOKENS", 1)
    monkeypatch.setattr(decoder, "ROWS_A_TILE", 1)
    sampling = Sampling(max_tokens=3, temperature=0.0)
    requests = [request(5, 2, 0), request(9, 1, 1)]
    plain = engine().generate(requests, sampling)
    sampler = engine(equipped())
    kernels = sampler.generate(requests, sampling)
    assert sampler.decoder is not None and sampler.decoder._state().prompt_once
    for a, b in zip(plain, kernels, strict=True):
        assert [c.token_ids for c in a] == [c.token_ids for c in b]
        assert torch.allclose(a[0].logp_T, b[0].logp_T, atol=2e-5)


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("slots, expected", [(3, {True}), (6, {True, False}), (16, {False})])
def test_prompts_are_read_once_while_groups_are_large(
    slots: int, expected: set[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 16 rows have room for 4 tiles. The twin holds every row against its tile."""
    from groupwise.engine.native import decoder

    ways: set[bool] = set()
    advance = decoder.Decoder.advance

    def noted(self: decoder.Decoder, rows: int, steps: int, temperature: float) -> None:
        state = self._state()
        prompts = {int(state.prompt_S[slot]) for slot in state.slot_B[:rows]}
        assert state.prompt_once == (len(prompts) + (rows < 16) <= 4)
        ways.add(state.prompt_once)
        advance(self, rows, steps, temperature)

    sampling, ends = Sampling(max_tokens=20), [3, 50, 60]
    requests = [request(4 + 3 * n, samples, n) for n, samples in enumerate((3, 1, 1, 7, 1, 3))]
    apart = decoder_engine(slots=slots, eos=ends).generate(requests, sampling)
    monkeypatch.setattr(decoder, "PROMPT_ONCE_ROWS", 16)
    monkeypatch.setattr(decoder, "PROMPT_ONCE_TOKENS", 1)
    monkeypatch.setattr(decoder.Decoder, "advance", noted)
    once = decoder_engine(slots=slots, eos=ends).generate(requests, sampling)
    assert ways == expected
    for a, b in zip(apart, once, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.token_ids == y.token_ids and x.finish == y.finish
            assert torch.allclose(x.logp_T, y.logp_T, atol=1e-5)


@pytest.mark.parametrize(
    "rows, tokens, exact, once",
    [
        (128, 512, False, True),
        (128, 511, False, False),  # short prompts: the L2 cache serves every row
        (96, 512, False, False),  # a small batch: splits spread them
        (128, 512, True, False),  # sums in the order of the learner's
    ],
)
def test_long_prompts_of_large_batches_are_read_once(
    rows: int, tokens: int, exact: bool, once: bool
) -> None:
    from groupwise.engine.native.decoder import Decoder

    made = Decoder(equipped(exact=exact), engine().tokenizer, seed=0, slots=128)
    state = made.ready(128, 8)
    made.set_rows(range(1, rows + 1), [(n // 8, tokens) for n in range(rows)])
    assert state.prompt_once == once


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("name", ["smollm2", pytest.param("olmoe", marks=pytest.mark.slow)])
def test_in_exact_mode_a_completion_has_the_same_bits_in_any_company(name: str) -> None:
    sampling = Sampling(max_tokens=3)
    requests = [request(4 + 3 * n, 2, n) for n in range(2)]
    single = engine(equipped(name, exact=True), slots=1).generate(requests, sampling)
    many = engine(equipped(name, exact=True), slots=8).generate(requests, sampling)
    for a, b in zip(single, many, strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_routes_are_recorded_on_the_device(slots: int) -> None:
    """With slots that are used again, and beside rows that only fill up."""
    sampling = Sampling(max_tokens=17, temperature=0.0, record_routes=True)
    requests = [request(5, 2, 0), request(9, 1, 1), request(1, 3, 2)]
    plain = engine("qwen3_moe").generate(requests, sampling)
    fast = engine(twin("qwen3_moe"), slots=slots).generate(requests, sampling)
    for asked, a, b in zip(requests, plain, fast, strict=True):
        for one_way, other in zip(a, b, strict=True):
            assert one_way.routes_TLK is not None and other.routes_TLK is not None
            assert len(other.routes_TLK) == len(asked.prompt) + len(other.token_ids) - 1
            assert torch.equal(one_way.routes_TLK, other.routes_TLK)


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("name", ["smollm2", "qwen2", "mixtral"])
def test_greedy_is_that_of_the_plain_engine(name: str) -> None:
    sampling = Sampling(max_tokens=17, temperature=0.0)
    requests = [request(5, 2, 0), request(9, 1, 1)]
    plain = engine(name).generate(requests, sampling)
    fast = engine(twin(name)).generate(requests, sampling)
    for a, b in zip(plain, fast, strict=True):
        assert [c.token_ids for c in a] == [c.token_ids for c in b]


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_recorded_log_probabilities_are_the_models(temperature: float) -> None:
    ask = request(6, 3)
    sampling = Sampling(max_tokens=20, temperature=temperature)
    group = one(decoder_engine(), ask, sampling)
    assert len({c.token_ids for c in group}) == 3
    assert worst(make("smollm2"), ask, group, temperature) < 1e-5


@pytest.mark.usefixtures("twins")
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_slots_are_used_again(slots: int) -> None:
    """Nine samples through few slots, or all at once."""
    sampling, ends = Sampling(max_tokens=20), [3, 50, 60]
    requests = [request(4 + 3 * n, 3, n) for n in range(3)]
    few = decoder_engine(slots=slots, eos=ends).generate(requests, sampling)
    many = decoder_engine(slots=16, eos=ends).generate(requests, sampling)
    assert {c.finish for group in many for c in group} == {"eos", "length"}
    for a, b in zip(few, many, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.token_ids == y.token_ids and x.finish == y.finish
            assert torch.allclose(x.logp_T, y.logp_T, atol=1e-5)


@pytest.mark.usefixtures("twins")
def test_prompts_that_do_not_fit_into_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from groupwise.engine.native import gpu_scheduler as inflight

    requests, sampling = [request(4 + 5 * n, 2, n) for n in range(5)], Sampling(max_tokens=4)
    whole = decoder_engine(slots=16).generate(requests, sampling)
    monkeypatch.setattr(inflight, "PROMPT_TOKENS", 12)
    parts = decoder_engine(slots=16).generate(requests, sampling)
    tokens = [[c.token_ids for c in group] for group in parts]
    assert tokens == [[c.token_ids for c in group] for group in whole]


@pytest.mark.usefixtures("twins")
def test_one_engine_serves_calls_of_other_sizes() -> None:
    """Buffers grow with a larger call and serve a smaller one."""
    sampler = decoder_engine(slots=16)
    asks = [(request(5, 2), 6), (request(8, 5, 1), 9), (request(4, 1, 2), 3)]
    for ask, tokens in asks:
        found = one(sampler, ask, Sampling(max_tokens=tokens))
        fresh = one(decoder_engine(slots=16), ask, Sampling(max_tokens=tokens))
        assert [c.token_ids for c in found] == [c.token_ids for c in fresh]


@pytest.mark.usefixtures("twins")
def test_it_ends_where_it_should() -> None:
    ask = request(5, 4)
    free = one(decoder_engine(), ask, Sampling(max_tokens=12))
    assert all(c.finish == "length" and len(c.token_ids) == 12 for c in free)
    end = free[0].token_ids[4]
    ended = one(decoder_engine(eos=[end]), ask, Sampling(max_tokens=12))
    first = free[0].token_ids.index(end)
    assert ended[0].finish == "eos"
    assert ended[0].token_ids == free[0].token_ids[: first + 1]
    for whole, cut in zip(free, ended, strict=True):
        assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids
        assert (end in whole.token_ids) == (cut.finish == "eos")


@pytest.mark.usefixtures("twins")
def test_end_tokens_are_barred_before_min_tokens() -> None:
    ask = request(5, 4)
    ends = list(range(40, 70))
    group = one(decoder_engine(eos=ends), ask, Sampling(max_tokens=12, min_tokens=6))
    assert all(not set(c.token_ids[:6]) & set(ends) for c in group)
    assert any(c.finish == "eos" for c in group)


@pytest.mark.usefixtures("twins")
def test_stop_strings() -> None:
    ask = request(5, 3)
    text = decoder_engine().tokenizer.decode
    free = one(decoder_engine(), ask, Sampling(max_tokens=12))
    stop = text(free[1].token_ids[2:4])
    stopped = one(decoder_engine(), ask, Sampling(max_tokens=12, stop=(stop,)))
    assert stopped[1].finish == "stop"
    assert text(stopped[1].token_ids).endswith(stop)
    for whole, cut in zip(free, stopped, strict=True):
        assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids
        assert (stop in text(whole.token_ids)) == (cut.finish == "stop")
        assert len(cut.logp_T) == len(cut.token_ids)
    late = one(decoder_engine(), ask, Sampling(max_tokens=12, min_tokens=6, stop=(stop,)))
    assert late[1].token_ids == free[1].token_ids


@pytest.mark.usefixtures("twins")
def test_weights_that_changed_in_place_are_what_the_next_call_samples_from() -> None:
    model = twin()
    sampler, ask, sampling = engine(model), request(5, 1), Sampling(max_tokens=6, temperature=0.0)
    before = one(sampler, ask, sampling)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.manual_seed(1)) * 0.1)
    sampler.sync(1)
    after = one(sampler, ask, sampling)[0]
    assert after.token_ids != before.token_ids
    assert after.version == 1
    fresh = one(engine(model), ask, sampling)[0]
    assert fresh.token_ids == after.token_ids and torch.equal(fresh.logp_T, after.logp_T)


@pytest.mark.usefixtures("twins")
def test_what_the_captured_step_cannot_draw_takes_the_plain_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("not for the decoder")

    monkeypatch.setattr(native.NativeEngine, "_decode", never)
    for change in ({"top_p": 0.9}, {"top_k": 5}, {"record_top_k": 3}):
        group = one(decoder_engine(), request(5, 2), Sampling(max_tokens=3, **change))
        assert len(group) == 2


@pytest.mark.usefixtures("twins")
def test_weights_that_are_not_finite_are_named() -> None:
    model = twin()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match=r"no finite probabilities for token 0 behind prompt 0"):
        one(engine(model), request(5, 2), Sampling(max_tokens=4))


def test_caches_leave_room_to_compute_the_prompts_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a 7B model, 16,384 tokens of prompts take gate and up of 1.2 GB alone."""
    from groupwise.engine.native import gpu_scheduler as inflight

    made: list[tuple[int, int]] = []

    class Cache:
        def __init__(self, config: object, slots: int, capacity: int, *_: object) -> None:
            made.append((slots, capacity))

    per_token = 28 * 2 * 4 * 128 * 2
    gib, caches = 2**30, per_token * (129 * 4096 + 64 * 512)
    monkeypatch.setattr(inflight, "KeyValueCache", Cache)
    head_VD = torch.zeros(1, dtype=torch.bfloat16)

    def slots(free: int, prompts: list[int]) -> int:
        monkeypatch.setattr(inflight, "free_bytes", lambda device: free)
        return inflight.make_caches(SEVEN, 128, 4096, prompts, head_VD)[0]

    width, inner = 3584, 18944
    pass_of_prompts = 16_384 * (2 * 4 * width + 3 * 2 * width + 2 * 3 * inner)
    assert slots(caches + gib, [512] * 64) == 64
    assert slots(caches + gib + 2 * pass_of_prompts, [512] * 64) == 128
    assert made[-2:] == [(129, 4096), (64, 512)]
    assert slots(caches + gib + gib // 4, [1] * 63 + [512]) == 128  # few tokens: little room
    with pytest.raises(EngineError, match=r"GiB to compute in; 1\.0 GiB are free"):
        slots(gib, [512])


def test_captured_steps_last_while_parameters_learn_and_not_when_they_move() -> None:
    from groupwise.engine.native.decoder import Decoder

    model = equipped()
    decoder = Decoder(model, tokenizer(), seed=0, slots=2)
    first = decoder.ready(2, 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    assert decoder.ready(2, 64) is first
    model.ops.lay_out(model.double().float())
    assert decoder.ready(2, 64) is not first
