"""A sampler that runs out of memory or loses a kernel goes on, says so, and loses nothing."""

from __future__ import annotations

import io
import json
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_twins import Twins, decoder_engine, twin, twins  # noqa: F401
from engine_zoo import engine, one, request, same
from runs import small

from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.native.scheduler import Scheduler
from groupwise.engine.protocol import Sampling
from groupwise.errors import EngineError, EngineWarning
from groupwise.training.loop import train
from groupwise.watch.display import Display

pytestmark = pytest.mark.usefixtures("kernels", "twins")
if torch.cuda.is_available():
    pytest.skip("small float32 models are for the interpreter", allow_module_level=True)
SAMPLING = Sampling(max_tokens=6, temperature=0.0)
REQUESTS = [request(4 + 3 * n, 3, n) for n in range(2)]


class ExactTwins(Twins):
    name = "exact"


class Memory:
    """Stands for what a try has in memory."""


def tokens(groups: list[list[Any]]) -> list[list[tuple[int, ...]]]:
    return [[c.token_ids for c in group] for group in groups]


def told(sampler: NativeEngine) -> list[tuple[str, str]]:
    """What it tells from now on."""
    said: list[tuple[str, str]] = []
    sampler.tell = lambda kind, text: said.append((kind, text))
    return said


def room_for(
    slots: int, monkeypatch: pytest.MonkeyPatch, error: Any = torch.OutOfMemoryError
) -> list[int]:
    """Both kinds of flight run out of memory above so many slots; how many each one had."""
    from groupwise.engine.native.gpu_scheduler import GpuScheduler

    tried: list[int] = []
    alive: list[weakref.ref[Any]] = []

    def limited(kind: type, name: str) -> None:
        fly = kind.run

        def run(self: Any) -> Any:
            assert all(ref() is None for ref in alive), "memory of a try that failed is still held"
            tried.append(getattr(self, name))
            if tried[-1] > slots:
                held = Memory()
                alive.append(weakref.ref(held))
                raise error("CUDA out of memory. Tried to allocate 2.00 GiB")
            return fly(self)

        monkeypatch.setattr(kind, "run", run)

    limited(GpuScheduler, "slots")
    limited(Scheduler, "places")
    return tried


# --- kernels ----------------------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A kernel of the decoder does not compile; how often it was tried."""
    from groupwise.engine.native import decoder

    tried: list[int] = []

    def record(*_: object) -> None:
        tried.append(1)
        raise RuntimeError("PassManager::run failed\nthen pages of assembler")

    monkeypatch.setattr(decoder, "record", record)
    return tried


def test_without_a_kernel_the_plain_engine_samples(broken: list[int]) -> None:
    sampler = decoder_engine()
    with pytest.warns(EngineWarning, match=r"\(RuntimeError: PassManager::run failed\)\. Plain"):
        found = sampler.generate(REQUESTS, SAMPLING)
    assert tokens(found) == tokens(engine().generate(REQUESTS, SAMPLING))
    assert sampler.decoder is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said, and is not tried again
        sampler.generate(REQUESTS, SAMPLING)
    assert len(broken) == 1


def test_exact_mode_does_not_go_on_without_its_kernels(broken: list[int]) -> None:
    model = twin()
    model.ops = ExactTwins()
    with pytest.raises(EngineError, match=r"PassManager::run failed\).*engine\.exact=false") as why:
        engine(model).generate(REQUESTS, SAMPLING)
    assert isinstance(why.value.__cause__, RuntimeError)


def test_exact_mode_says_what_is_not_exact() -> None:
    model = twin()
    model.ops = ExactTwins()
    sampler = engine(model)
    said = told(sampler)
    for _ in range(2):
        sampler.generate(REQUESTS, Sampling(max_tokens=2, record_top_k=3))
    ((kind, text),) = said
    assert kind == "engine" and text.startswith("not exact: top-p, top-k and recording")


def test_what_is_no_kernels_fault_is_not_hidden() -> None:
    """An error of the weights, and one of the plain engine."""
    model = twin()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="no finite probabilities"):
        engine(model).generate(REQUESTS, SAMPLING)
    sampler = engine()
    sampler.tokenizer = None
    with pytest.raises(AttributeError):
        sampler.generate(REQUESTS, SAMPLING)


# --- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("captured", [True, False])
def test_out_of_memory_halves_the_slots(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make = decoder_engine if captured else engine
    wanted = make(slots=0).generate(REQUESTS, SAMPLING)
    tried = room_for(2, monkeypatch)
    sampler = make(slots=0)
    said = told(sampler)
    found = sampler.generate(REQUESTS, SAMPLING)
    assert tokens(found) == tokens(wanted)
    assert tried == [6, 3, 1]
    assert said[0] == (
        "memory",
        "out of memory while sampling: 3 in flight at a time instead of 6 from here on.",
    )
    assert len(said) == 2
    sampler.generate(REQUESTS, SAMPLING)
    assert tried == [6, 3, 1, 1]


def test_on_a_cpu_the_completions_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Sampling(max_tokens=6)
    wanted = engine(slots=0).generate(REQUESTS, drawn)
    room_for(3, monkeypatch, error=MemoryError)
    with pytest.warns(EngineWarning, match="3 in flight at a time instead of 6"):
        found = engine(slots=0).generate(REQUESTS, drawn)
    for a, b in zip(wanted, found, strict=True):
        assert all(same(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("captured", [True, False])
def test_one_sequence_that_is_too_much(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    room_for(0, monkeypatch)
    sampler = (decoder_engine if captured else engine)(slots=1)
    with pytest.raises(EngineError, match=r"single sequence.* 4 prompt tokens and up to 6 more"):
        one(sampler, REQUESTS[0], SAMPLING)


def test_memory_that_ran_out_while_a_step_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the capture has its own complaint, which is what arrives."""

    class Broken(RuntimeError):
        def __init__(self, text: str) -> None:
            super().__init__("CUDA error: operation failed due to a previous error during capture")
            self.__context__ = torch.OutOfMemoryError(text)

    tried = room_for(3, monkeypatch, error=Broken)
    sampler = decoder_engine()
    said = told(sampler)
    sampler.generate(REQUESTS, SAMPLING)
    assert tried == [6, 3] and [kind for kind, _ in said] == ["memory"]


def test_caches_that_do_not_fit_take_fewer_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder's own look at what is free; and an allocation that fails in spite of it."""
    from groupwise.engine.native import gpu_scheduler as inflight

    wanted = decoder_engine().generate(REQUESTS, SAMPLING)
    make, failed = inflight.KeyValueCache, []

    def once(*given: Any) -> Any:
        if not failed:
            failed.append(given)
            raise torch.OutOfMemoryError("what is free lies in pieces")
        return make(*given)

    monkeypatch.setattr(inflight, "KeyValueCache", once)
    tried = room_for(16, monkeypatch)
    assert tokens(decoder_engine().generate(REQUESTS, SAMPLING)) == tokens(wanted)
    assert tried == [3]
    monkeypatch.setattr(inflight, "free_bytes", lambda device: 0)
    with pytest.raises(EngineError, match=r"One sequence of 7 prompt tokens and 6 more"):
        decoder_engine().generate(REQUESTS, SAMPLING)


def test_a_run_shows_it_and_writes_it_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room_for(4, monkeypatch)
    screen = io.StringIO()
    train(small(steps=1, tiny__cold_start_steps=5), tmp_path / "run", Display(screen, live=False))
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    text = "out of memory while sampling: 4 in flight at a time instead of 8 from here on."
    assert ("memory", text) in [(event["kind"], event["text"]) for event in events]
    assert "warning: out of memory while sampling: 8 in flight" in screen.getvalue()
