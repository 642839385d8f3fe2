"""On a GPU, in bfloat16: captured sampling against the learner, and runs that repeat to the bit.

Small random models of every family, with heads as wide as real ones.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from engine_zoo import same
from torch import Tensor

from groupwise import batch_phase, config, recipe
from groupwise.engine.backends import EngineSetup
from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.native.process import ProcessEngine
from groupwise.engine.native.shared import SharedWeights
from groupwise.engine.protocol import Request, Sampling
from groupwise.errors import EngineError
from groupwise.model.adapters.lora import adapters, attach
from groupwise.model.adapters.quantized import quantize
from groupwise.model.adapters.targets import Spec
from groupwise.model.config import ModelConfig
from groupwise.model.formats.checkpoint import Loaded
from groupwise.model.formats.tokenizer import Tokenizer, character_files
from groupwise.model.layers.equip import equip
from groupwise.model.layers.fp8 import SINCE, fp8_copy
from groupwise.model.layers.fused_linear import concatenated
from groupwise.model.layers.transformer import Transformer
from groupwise.model.scalar_head import ScalarHead
from groupwise.optim.adamw import AdamW
from groupwise.optim.assemble import assemble, batch_of, sequences_of
from groupwise.optim.learner import PolicyLearner
from groupwise.optim.packs import Sequences, micro_batches, score, values
from groupwise.optim.schedules import LearningRates
from groupwise.optim.step import apply
from groupwise.records import Completion, Grade, Rollout, Task

if not torch.cuda.is_available():
    pytest.skip("no GPU: make check-gpu where there is one", allow_module_level=True)
pytest.importorskip("triton")

DEVICE, DTYPE = "cuda", torch.bfloat16
VOCABULARY = 1000
ENDS = range(12)  # about a completion in three ends before LONGEST
LONGEST = 150
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},  # biases
    "qwen3": {"model_type": "qwen3", "head_dim": 64},  # norms of queries and keys, own head
}
LENGTHS = (3, 40, 64, 65, 130, 200)  # of prompts: below, at and above blocks of 64 and 128 keys
every_family = pytest.mark.parametrize("name", FAMILIES)


def make(name: str = "llama", dtype: torch.dtype = DTYPE, device: str = DEVICE) -> Transformer:
    """Weights that bfloat16 holds, the same in every precision."""
    model = Transformer(ModelConfig.from_hf(SIZES | FAMILIES[name]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            wide = 0.12 if key.endswith(("embed_tokens.weight", "lm_head.weight")) else 0.06
            around = 1.0 if key.endswith("norm.weight") else 0.0
            parameter.normal_(around, wide, generator=generator)
    return model.to(torch.bfloat16).to(device, dtype)


def equipped(name: str = "llama", *, exact: bool) -> Transformer:
    model = make(name)
    equip(model, exact=exact)
    assert model.ops.name == ("exact" if exact else "fast"), "no kernels"
    return model


@functools.cache
def alphabet() -> Any:
    letters = "".join(chr(0x4E00 + number) for number in range(VOCABULARY - 1))
    return Tokenizer.from_files(character_files(letters)).backend


def engine(model: Transformer, slots: int = 0, ends: Sequence[int] = ENDS) -> NativeEngine:
    return NativeEngine(model, Tokenizer(alphabet(), eos_ids=ends, pad_id=0), seed=7, slots=slots)


def request(length: int, samples: int, number: int) -> Request:
    generator = torch.Generator().manual_seed(100 + number)
    prompt = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
    return Request(tuple(prompt), samples, prompt_id=number, draw=0)


REQUESTS = [request(length, 8, number) for number, length in enumerate(LENGTHS)]


def together(groups: Sequence[Sequence[Completion]]) -> Tensor:
    return torch.cat([completion.logp_T for group in groups for completion in group])


def tokens(groups: Sequence[Sequence[Completion]]) -> list[tuple[int, ...]]:
    return [completion.token_ids for group in groups for completion in group]


def learners(
    model: Transformer,
    requests: Sequence[Request],
    groups: Sequence[Sequence[Completion]],
    temperature: float = 1.0,
    budget: int = 700,
) -> Tensor:
    """The learner's log-probabilities of all tokens, in packs of so many."""
    rows = [(r.prompt, c.token_ids) for r, g in zip(requests, groups, strict=True) for c in g]
    sequences = Sequences([prompt for prompt, _ in rows], [answer for _, answer in rows])
    parts = micro_batches(sequences, range(len(rows)), budget)
    return score(model, sequences, parts, temperature).cpu()[sequences.mask()]


def all_the_same(a: Sequence[Sequence[Completion]], b: Sequence[Sequence[Completion]]) -> bool:
    return all(same(x, y) for m, n in zip(a, b, strict=True) for x, y in zip(m, n, strict=True))


# --- sampler and learner ----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@every_family
def test_fast_mode_records_nearly_what_the_learner_says(name: str, temperature: float) -> None:
    model = equipped(name, exact=False)
    sampling = Sampling(max_tokens=LONGEST, temperature=temperature)
    groups = engine(model).generate(REQUESTS, sampling)
    gap = (together(groups) - learners(model, REQUESTS, groups, temperature)).abs()
    assert gap.mean() < 0.02
    # And that is the model's: in float32, in plain PyTorch, on the CPU.
    plain = make(name, torch.float32, "cpu")
    assert (together(groups) - learners(plain, REQUESTS, groups, temperature)).abs().mean() < 0.05


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@every_family
def test_exact_mode_records_what_the_learner_says(name: str, temperature: float) -> None:
    model = equipped(name, exact=True)
    sampling = Sampling(max_tokens=LONGEST, temperature=temperature)
    groups = engine(model).generate(REQUESTS, sampling)
    lengths = {len(completion.token_ids) for group in groups for completion in group}
    assert min(lengths) < 64 and max(lengths) > 128 and len(lengths) > 3
    for budget in (700, 100_000):  # products of other tiles
        wanted = learners(model, REQUESTS, groups, temperature, budget)
        assert torch.equal(together(groups), wanted)


@every_family
def test_long_prompts_read_once_by_their_group(name: str) -> None:
    """128 rows in groups of 16, more tokens than the threshold: a kernel of its own reads them."""
    model = equipped(name, exact=False)
    requests = [request(520 + 7 * number, 16, number) for number in range(8)]
    sampler = engine(model, ends=())
    groups = sampler.generate(requests, Sampling(max_tokens=20))
    assert sampler.decoder is not None and sampler.decoder._state().prompt_once
    gap = (together(groups) - learners(model, requests, groups, budget=8000)).abs()
    assert gap.mean() < 0.02


def test_weights_of_nan_leave_the_device_usable() -> None:
    """A token that the vocabulary does not have would end the process in the embedding."""
    model, sampling = equipped(exact=False), Sampling(max_tokens=12)
    sampler = engine(model)
    before = sampler.generate(REQUESTS, sampling)
    kept = model.model.norm.weight.detach().clone()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="no finite probabilities"):
        sampler.generate(REQUESTS, sampling)
    torch.cuda.synchronize()
    with torch.no_grad():
        model.model.norm.weight.copy_(kept)
    assert tokens(sampler.generate(REQUESTS, sampling)) == tokens(before)


def test_in_exact_mode_company_changes_no_bit() -> None:
    sampling = Sampling(max_tokens=LONGEST)
    model = equipped(exact=True)
    wanted = engine(model).generate(REQUESTS, sampling)
    for slots in (1, 3):
        assert all_the_same(engine(model, slots).generate(REQUESTS, sampling), wanted)
    busy = engine(model)
    busy.generate([request(90, 70, 50)], Sampling(max_tokens=20))
    assert all_the_same(busy.generate(REQUESTS, sampling), wanted)
    others = [*(request(30, 5, 60 + n) for n in range(20)), *REQUESTS]
    assert all_the_same(busy.generate(others, sampling)[20:], wanted)


@pytest.mark.parametrize("exact", [False, True])
def test_captured_steps_see_new_weights(exact: bool) -> None:
    model = equipped(exact=exact)
    sampler, sampling = engine(model, ends=()), Sampling(max_tokens=40, temperature=0.0)
    before = sampler.generate(REQUESTS, sampling)
    optimizer = AdamW(
        model.named_parameters(),
        learning_rate=0.02,
        beta1=0.9,
        beta2=0.99,
        eps=1e-8,
        weight_decay=0.0,
    )
    for number, parameter in enumerate(model.parameters()):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        parameter.grad = noise.to(DEVICE)
    apply(model.named_parameters(), optimizer, clip_norm=0.0, learning_rate=0.02)
    sampler.sync(1)
    after = sampler.generate(REQUESTS, sampling)
    assert tokens(after) != tokens(before)
    fresh = engine(model, ends=())
    fresh.sync(1)
    found = fresh.generate(REQUESTS, sampling)
    assert tokens(found) == tokens(after)
    assert not exact or all_the_same(found, after)


@pytest.mark.parametrize("bits", ["none", "int8", "nf4"])
@pytest.mark.parametrize("exact", [False, True])
def test_captured_steps_see_an_adapter_that_learned(exact: bool, bits: Any) -> None:
    if bits == "nf4":
        pytest.importorskip("bitsandbytes")
    model = make("qwen2")
    attach(model, Spec(16, 32.0), seed=1)
    if bits != "none":
        quantize(model, bits, DEVICE)
    equip(model, exact=exact)
    assert model.ops.name == ("exact" if exact else "fast"), "no kernels"
    sampler, sampling = engine(model, ends=()), Sampling(max_tokens=40)
    before = sampler.generate(REQUESTS, sampling)
    with torch.no_grad():
        for adapter in adapters(model).values():
            adapter.lora_B.normal_(0.0, 0.05)
    sampler.sync(1)
    after = sampler.generate(REQUESTS, sampling)
    assert tokens(after) != tokens(before)
    gap = (together(after) - learners(model, REQUESTS, after)).abs()
    assert gap.max() == 0 if exact else gap.mean() < 0.02


# --- what does not fit ------------------------------------------------------------------------


def test_a_cache_that_does_not_fit_takes_fewer_slots() -> None:
    """256 slots need 200 MiB; PyTorch may have no more than 160 above what it has."""
    model, sampling = equipped(exact=True), Sampling(max_tokens=800)
    some, many = request(100, 8, 0), request(100, 248, 1)
    wanted = engine(model).generate([some], sampling)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    allowed = torch.cuda.memory_reserved() + 160 * 2**20
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    try:
        sampler = engine(model)
        sampler.tell = lambda *_: None
        found = sampler.generate([some, many], sampling)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert sampler.places < 256
    assert all_the_same(found[:1], wanted)


def test_memory_that_runs_out_in_mid_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """After steps were captured: the call starts again with fewer slots, to the same bits."""
    from groupwise.engine.native.decoder import Decoder

    model, sampling = equipped(exact=True), Sampling(max_tokens=LONGEST)
    wanted = engine(model).generate(REQUESTS, sampling)
    advance, calls = Decoder.advance, []

    def fails_once(self: Decoder, *given: Any, **named: Any) -> None:
        advance(self, *given, **named)
        calls.append(given)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Decoder, "advance", fails_once)
    sampler = engine(model)
    said: list[str] = []
    sampler.tell = lambda kind, text: said.append(text)
    found = sampler.generate(REQUESTS, sampling)
    assert said == [
        "out of memory while sampling: 24 in flight at a time instead of 48 from here on."
    ]
    assert sampler.slots == 24
    assert all_the_same(found, wanted)


def test_float32_runs_plain() -> None:
    model = make(dtype=torch.float32)
    (note,) = equip(model, exact=False)
    assert note.startswith("no kernels: they are for bfloat16, and model.dtype is float32")
    groups = engine(model).generate(REQUESTS, Sampling(max_tokens=30))
    gap = (together(groups) - learners(model, REQUESTS, groups)).abs()
    assert gap.max() < 1e-3


# --- the update -------------------------------------------------------------------------------


def gradient(
    model: Transformer, name: str, groups: Sequence[list[Rollout]], reference: Tensor
) -> Tensor:
    """Of one update of a recipe. With these settings the first moment is the gradient itself."""
    made = recipe(name, {"schedule.updates": 1})
    optim = config.Optim(learning_rate=0.0, beta1=0.0, clip_norm=0.0, micro_tokens=600)
    learner = PolicyLearner(model, made, optim, temperature=1.0)
    streams = {"ref_logp_NT": reference} if "ref_logp_NT" in made.streams else {}
    tokenizer = Tokenizer(alphabet(), eos_ids=ENDS, pad_id=0)
    said = batch_of(made, groups, tokenizer)
    batch = assemble(made, groups, said, device=learner.device, **streams)
    rows = list(range(len(batch.mask_NT)))
    learner.learn(batch_phase(made, batch).batch, sequences_of(groups), [rows], LearningRates(0.0))
    state = learner.optimizer.state()
    return torch.cat([x.double().flatten() for k, x in state.items() if k.startswith("exp_avg/")])


@functools.cache
def rollouts(samples: int = 4) -> list[list[Rollout]]:
    """What the model answers in float32; every second answer of a group is right."""
    model = make(dtype=torch.float32, device="cpu")
    requests = [request(length, samples, n) for n, length in enumerate((5, 70, 33, 12))]
    written = engine(model, slots=64).generate(requests, Sampling(max_tokens=24, record_top_k=20))
    return [
        [
            Rollout(
                Task(asked.prompt_id, "", token_ids=asked.prompt),
                0,
                number,
                completion,
                "",
                Grade(float(number % 2), correct=bool(number % 2)),
            )
            for number, completion in enumerate(group)
        ]
        for asked, group in zip(requests, written, strict=True)
    ]


def drifted(groups: Sequence[list[Rollout]]) -> Tensor:
    """ref_logp_NT of a model that is not the policy, so that its KL has a gradient."""
    other = make(dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    sequences = sequences_of(groups)
    return score(other, sequences, [list(range(len(sequences.completions)))], 1.0)


@pytest.mark.parametrize("name", ["grpo", "gspo", "dppo_topk"])
def test_gradients_are_those_of_the_cpu_in_float32(name: str) -> None:
    groups = rollouts()
    reference = drifted(groups)
    wanted = gradient(make(dtype=torch.float32, device="cpu"), name, groups, reference)
    found = gradient(equipped(exact=False), name, groups, reference.to(DEVICE)).cpu()
    assert wanted.norm() > 0
    assert torch.cosine_similarity(wanted, found, dim=0) > 0.99
    assert float(found.norm() / wanted.norm()) == pytest.approx(1.0, abs=0.05)


def test_in_exact_mode_an_update_repeats_to_the_bit() -> None:
    """Sixteen completions pull at one prompt's last state, and many tokens at one embedding."""
    model = equipped(exact=True)
    groups = rollouts(samples=16)
    reference = drifted(groups).to(DEVICE)
    first, *others = (gradient(model, "grpo", groups, reference) for _ in range(4))
    assert all(torch.equal(first, other) for other in others)


def test_a_critics_values_and_gradients_are_those_of_the_cpu_in_float32() -> None:
    groups = rollouts()
    sequences = sequences_of(groups)
    found = []
    for trunk in (make(dtype=torch.float32, device="cpu"), equipped(exact=False)):
        head = ScalarHead(trunk)
        with torch.no_grad():
            head.score.weight.copy_(torch.linspace(-1, 1, head.score.in_features)[None])
        pack = sequences.pack(list(range(len(sequences.completions))), head.device)
        value_NT = values(head, pack)
        assert value_NT.dtype == torch.float32
        value_NT.square().sum().backward()
        parts = [p.grad.double().cpu().flatten() for _, p in head.learning_parameters()]
        found.append((value_NT.detach().cpu(), torch.cat(parts)))
    (wanted_NT, wanted), (value_NT, moved) = found
    scale = wanted_NT[sequences.mask()].abs().mean()
    assert (wanted_NT - value_NT)[sequences.mask()].abs().mean() < 0.03 * scale
    assert torch.cosine_similarity(wanted, moved, dim=0) > 0.99


# --- runs -------------------------------------------------------------------------------------


BESIDE: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"critic__alone_steps": 1},
    "prime": {"recipe__filter": ""},
}


@pytest.mark.parametrize("name", BESIDE)
def test_in_exact_mode_runs_repeat_and_resume_to_the_bit(name: str, tmp_path: Path) -> None:
    """With a reference, a critic or a reward model, two updates a batch, in micro-batches."""
    from runs import left_behind, run

    changes: dict[str, Any] = {
        **BESIDE[name],
        "recipe": name,
        "recipe__schedule__updates": 2,
        "model__device": DEVICE,
        "model__dtype": "bfloat16",
        "engine__exact": True,
        "optim__micro_tokens": 64,
    }
    run(tmp_path / "whole", steps=4, **changes)
    run(tmp_path / "again", steps=4, **changes)
    run(tmp_path / "halves", steps=2, **changes)
    run(tmp_path / "halves", steps=4, **changes)
    whole = left_behind(tmp_path / "whole")
    assert whole["metrics"][0]["gate/mismatch_max"] == 0
    # A first step that is the critic's alone leaves the weights as they were.
    assert len({line["weights/fingerprint"] for line in whole["metrics"][1:]}) == 4
    assert left_behind(tmp_path / "again") == whole
    assert left_behind(tmp_path / "halves") == whole


# --- 8-bit floats -----------------------------------------------------------------------------


def copied(model: Transformer) -> NativeEngine:
    tokenizer = Tokenizer(alphabet(), eos_ids=ENDS, pad_id=0)
    return NativeEngine(model, tokenizer, seed=7, slots=0, weights="fp8")


@every_family
def test_captured_steps_of_an_fp8_copy_say_what_its_forward_pass_says(name: str) -> None:
    """And go on saying it when new weights were written over the old ones."""
    if torch.cuda.get_device_capability() < SINCE:
        pytest.skip("no products of 8-bit floats")
    model = equipped(name, exact=False)
    sampler = copied(model)
    sampling = Sampling(max_tokens=LONGEST, min_tokens=0)
    for version in (0, 1):
        groups = sampler.generate(REQUESTS, sampling)
        assert sampler.decoder is not None and sampler.decoder.graphs, "not captured"
        own = learners(sampler.source.model, REQUESTS, groups)  # type: ignore[arg-type]
        theirs = learners(model, REQUESTS, groups)
        near, far = ((x - together(groups)).abs().mean() for x in (own, theirs))
        # A last bit of an input may take it to the next of its few numbers.
        assert near < 0.9 * far and 0.005 < far < 0.5, (float(near), float(far))
        assert {done.weights for group in groups for done in group} == {"fp8"}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        sampler.sync(version + 1)


def test_an_fp8_copy_takes_half_the_memory() -> None:
    model = equipped("llama", exact=False)
    made = fp8_copy(model)
    sizes = [
        sum(p.nbytes for key, p in x.named_parameters() if ".layers." in key and p.dim() > 1)
        for x in (model, made)
    ]
    assert sizes[1] * 2 == sizes[0]


# --- a process beside ---------------------------------------------------------------------------


def check_beside(model: Transformer) -> None:
    """Answers, new weights by CUDA IPC, answers again, a process that is killed."""
    tokenizer = Tokenizer(alphabet(), eos_ids=ENDS, pad_id=0)
    settings = config.EngineSettings(servers=1)
    told: list[str] = []
    setup = EngineSetup(
        Loaded(model, tokenizer, {}), settings, 7, lambda _, text: told.append(text)
    )
    beside = NativeEngine.made(setup)
    assert isinstance(beside, ProcessEngine)
    try:
        for version in range(4):
            if version == 3:
                beside.sampler.process.kill()
            groups = beside.generate(REQUESTS, Sampling(max_tokens=LONGEST))
            gap = (learners(model, REQUESTS, groups) - together(groups)).abs().mean()
            assert float(gap) < 0.02 and {x.version for x in groups[0]} == {version}
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.mul_(1.1)
            beside.sync(version + 1)
            assert beside.gap[0] < 1e-3
        assert beside.restarts == 1 and "exit code -9" in told[0]
    finally:
        beside.close()


def test_a_process_on_the_same_gpu_reads_new_weights_where_they_lie() -> None:
    model = equipped("qwen2", exact=False)
    shared = SharedWeights(model)
    attention = cast(Transformer, shared.view()).layers[0].self_attn
    first = attention.q_proj.weight
    assert concatenated([first, attention.k_proj.weight]).data_ptr() == first.data_ptr()
    check_beside(model)


def test_a_process_on_the_same_gpu_reads_frozen_weights_of_the_learner() -> None:
    model = make("qwen3")
    attach(model, Spec(4, 8.0), seed=1)
    equip(model, exact=False)
    before = torch.cuda.memory_allocated()
    shared = SharedWeights(model)
    assert torch.cuda.memory_allocated() - before < 2**21  # the adapter alone
    del shared
    check_beside(model)
