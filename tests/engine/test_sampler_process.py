"""A sampler's process that dies: another one takes its place, and nobody sees it in the bits."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from engine_zoo import engine, request, same, tokenizer
from model_zoo import make

from groupwise.config import EngineSettings
from groupwise.engine.backends import EngineSetup
from groupwise.engine.native import process
from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.native.process import ProcessEngine
from groupwise.engine.native.shared import SharedWeights
from groupwise.engine.protocol import Sampling
from groupwise.errors import EngineError
from groupwise.model.fingerprint import same_weights
from groupwise.model.formats.checkpoint import Loaded
from groupwise.model.layers.fused_linear import concatenated, lay_together
from groupwise.model.layers.transformer import Transformer
from groupwise.model.probe import gap_of

FREE = Sampling(max_tokens=12)
ASKED = [request(5, 3, 0), request(17, 4, 1), request(9, 5, 2)]
MORE = [request(6, 2, 3), request(11, 3, 4)]


@contextmanager
def beside(model: Transformer, told: list[str] | None = None) -> Iterator[ProcessEngine]:
    def tell(kind: str, text: str) -> None:
        [] if told is None else told.append(f"{kind}: {text}")

    settings = EngineSettings(servers=1, slots=8)
    made = NativeEngine.made(EngineSetup(Loaded(model, tokenizer(), {}), settings, 7, tell))
    assert isinstance(made, ProcessEngine)
    try:
        yield made
    finally:
        made.close()


@torch.no_grad()
def learn(model: Transformer) -> None:
    for parameter in model.parameters():
        parameter *= 1.05


def kill(sampler: ProcessEngine, how: signal.Signals = signal.SIGKILL) -> None:
    sampler.sampler.process.send_signal(how)


def answers(sampler: ProcessEngine, then: Callable[[ProcessEngine], None]) -> list[Any]:
    """All that is asked for in two batches; something happens when the first of it is there."""
    tickets = sampler.submit(ASKED, FREE) + sampler.submit(MORE, Sampling(max_tokens=5))
    found = dict(sampler.finished())
    then(sampler)
    while len(found) < len(tickets):
        found |= dict(sampler.finished())
    assert sampler.finished() == []
    return [found[ticket] for ticket in tickets]


def check_same(found: list[Any], model: Transformer, version: int) -> None:
    alone = engine(model)
    wanted = alone.generate(ASKED, FREE) + alone.generate(MORE, Sampling(max_tokens=5))
    for group, other in zip(found, wanted, strict=True):
        assert all(map(same, group, other))
        assert {each.version for each in group} == {version}


def test_answers_of_a_process_that_was_killed_come_all_the_same() -> None:
    """In the middle of answers, and before new weights."""
    model, told = make("smollm2"), list[str]()
    with beside(model, told) as sampler:
        check_same(answers(sampler, kill), model, 0)
        kill(sampler)  # the first time it may have written all that it was asked for
        learn(model)
        sampler.sync(1)
        assert len(told) in (1, 2) and all("exit code -9" in each for each in told)
        assert sampler.measures()["sync/restarts"] == len(told) and sampler.measures() == {}
        check_same(answers(sampler, lambda _: None), model, 1)


def test_a_process_that_was_killed_with_nothing_to_do_is_asked_again() -> None:
    model = make("smollm2")
    with beside(model) as sampler:
        kill(sampler)
        sampler.sampler.process.wait()
        check_same(answers(sampler, lambda _: None), model, 0)
        assert sampler.measures() == {"sync/restarts": 1.0, "sync/resubmitted": float(len(ASKED))}


@pytest.mark.slow
def test_a_process_that_dies_as_new_weights_come_gets_them() -> None:
    """Between the rest and the probe, and between the probe and the new version."""
    model = make("smollm2")
    with beside(model) as sampler:
        write, version = sampler.shared.write, 0
        for order in ("write", "probe"):
            check, version = sampler._check_probe, version + 1
            learn(model)
            with pytest.MonkeyPatch.context() as patch:
                if order == "write":
                    patch.setattr(sampler.shared, "write", lambda: (kill(sampler), write()))
                else:

                    def checked(own: Transformer, check: Any = check) -> None:
                        check(own)
                        patch.undo()
                        kill(sampler)

                    patch.setattr(sampler, "_check_probe", checked)
                sampler.sync(version)
            assert sampler.restarts == version
            check_same(answers(sampler, lambda _: None), model, version)


def test_weights_that_did_not_arrive_are_found_out() -> None:
    model = make("smollm2")
    with beside(model) as sampler:
        sampler.shared.write = lambda *, frozen=False: None  # type: ignore[method-assign]
        learn(model)
        with pytest.raises(EngineError, match=r"does not compute the learner's policy.*by half"):
            sampler.sync(1)
        with beside(model) as other, pytest.raises(EngineError, match=r"mean nan"):
            next(model.parameters()).data.fill_(torch.nan)  # the copy has numbers yet
            other.shared.write = lambda *, frozen=False: None  # type: ignore[method-assign]
            other.sync(1)


def test_a_process_that_always_dies_ends_the_run() -> None:
    model = make("smollm2")
    with beside(model) as sampler:
        start = sampler._start

        def dying(version: int) -> None:
            start(version)
            kill(sampler)

        sampler._start = dying  # type: ignore[method-assign]
        kill(sampler)
        with pytest.raises(EngineError, match=r"ended 5 times without one answer .*-9.*slots"):
            sampler.submit(ASKED, FREE)


@pytest.mark.slow
def test_a_process_that_is_silent_is_ended_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the middle of answers, and while it should rest for new weights."""
    model = make("smollm2")
    with beside(model) as sampler:
        check_same(answers(sampler, lambda _: None), model, 0)
        monkeypatch.setattr(process, "PATIENCE", 10.0)
        check_same(answers(sampler, lambda _: kill(sampler, signal.SIGSTOP)), model, 0)
        kill(sampler, signal.SIGSTOP)
        learn(model)
        sampler.sync(1)
        check_same(answers(sampler, lambda _: None), model, 1)


def test_a_process_that_had_nothing_to_do_is_not_thought_to_be_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make("smollm2")
    with beside(model) as sampler:
        check_same(answers(sampler, lambda _: None), model, 0)
        monkeypatch.setattr(process, "LOOK_EVERY", 0.0)
        sampler.sampler.heard -= 2 * process.PATIENCE
        check_same(answers(sampler, lambda _: None), model, 0)
        assert not sampler.restarts


@pytest.mark.slow
def test_a_process_that_reads_nothing_is_ended_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An order that is larger than the pipe waits for its reader: not for good."""
    model = make("smollm2")
    with beside(model) as sampler:
        check_same(answers(sampler, lambda _: None), model, 0)
        monkeypatch.setattr(process, "PATIENCE", 20.0)
        kill(sampler, signal.SIGSTOP)
        long = Sampling(max_tokens=1, stop=("x" * 2_000_000,))
        (ticket,) = sampler.submit(MORE[:1], long)
        assert dict(sampler.finished()).keys() == {ticket} and sampler.restarts == 1


def test_neighbours_stay_neighbours_in_shared_memory() -> None:
    """Where weights lie together, one product reads several; biases lie between them by name."""
    model = make("qwen2")
    names = ("q_proj", "k_proj", "v_proj")
    for layer in model.layers:
        lay_together([getattr(layer.self_attn, name) for name in names])
    shared = SharedWeights(model)
    seen = cast(Transformer, shared.view())
    for layer in seen.layers:
        for kind in ("weight", "bias"):
            parts = [getattr(getattr(layer.self_attn, name), kind) for name in names]
            assert concatenated(parts).data_ptr() == parts[0].data_ptr()
    learn(model)
    shared.write()
    assert same_weights(model.named_parameters(), seen.named_parameters()) is None
    places = sorted(shared.places, key=lambda each: each.start)
    for one, other in itertools.pairwise(places):
        assert one.start + one.bytes <= other.start


def test_the_gap_of_a_probe() -> None:
    nan, inf = torch.nan, torch.inf
    one = [torch.tensor([-1.0, nan]), torch.tensor([-inf, -2.0])]
    other = [torch.tensor([-1.5, nan]), torch.tensor([-inf, -2.0])]
    assert gap_of(one, other).tolist() == [0.5, 0.0, 0.0, 0.0]
    assert gap_of(one, [other[0], torch.tensor([nan, -2.0])]).isnan().any()
