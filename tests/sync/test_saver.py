"""Checkpoints written beside training: of one moment, one at a time, failures said."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import make
from torch import Tensor

from groupwise.errors import RunError
from groupwise.model.formats.checkpoint import load_weights
from groupwise.model.layers.transformer import Transformer
from groupwise.sync import checkpoints as states
from groupwise.sync import saver as savers
from groupwise.sync.checkpoints import (
    Snapshot,
    load_latest,
    policy_contents,
    snapshot,
    weights_alone,
)
from groupwise.sync.saver import Saver


def nothing() -> None:
    """Waits for nothing."""


def taken(model: Transformer, step: int, **tensors: Tensor) -> Snapshot:
    return snapshot(
        step,
        weights=policy_contents(model, {}),
        tensors={"optimizer": tensors},
        values={"at": step},
    )


@pytest.fixture
def model() -> Transformer:
    return make("qwen2", seed=1)


def test_what_is_written_is_the_moment_it_was_taken(tmp_path: Path, model: Transformer) -> None:
    moments, go = torch.ones(8), threading.Event()
    before = {name: x.detach().clone() for name, x in model.state_dict().items()}
    with Saver(tmp_path, keep=1) as saver:
        saver.save(taken(model, 1, moments=moments), before=lambda: [go.wait(), None][1])
        with torch.no_grad():  # training goes on, and nothing is written yet
            for parameter in model.parameters():
                parameter.add_(1.0)
            moments.add_(1.0)
        assert load_latest(tmp_path) is None
        go.set()
    found = load_latest(tmp_path)
    assert found is not None and found.values == {"at": 1}
    assert torch.equal(found.tensors["optimizer"]["moments"], torch.ones(8))
    stored = load_weights(found.path).state_dict()
    assert all(torch.equal(stored[name], x) for name, x in before.items())


def test_never_two_at_once(
    tmp_path: Path, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, most, real = 0, 0, savers.write

    def counted(*args: Any) -> Path:
        nonlocal writing, most
        writing += 1
        most = max(most, writing)
        made = real(*args)
        writing -= 1
        return made

    monkeypatch.setattr(savers, "write", counted)
    done: list[int] = []
    with Saver(tmp_path, keep=2) as saver:
        for step in (1, 2, 3):
            saver.save(taken(model, step), nothing, lambda step=step: done.append(step))
        saver.save(weights_alone(4, policy_contents(model, {})), nothing)
    assert (most, done) == (1, [1, 2, 3])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best", "latest", "step_2", "step_3", "step_4"
    ]  # fmt: skip


def test_what_goes_wrong_is_raised_by_the_next_call(tmp_path: Path, model: Transformer) -> None:
    def broken() -> None:
        raise RunError("the records could not be written")

    with Saver(tmp_path, keep=1) as saver:
        saver.save(taken(model, 1), nothing)
        saver.save(taken(model, 2), broken)
        with pytest.raises(RunError, match="records could not"):
            saver.wait()
        saver.check()  # once
    found = load_latest(tmp_path)
    assert found is not None and found.step == 1  # nothing counts without its records
    with pytest.raises(RunError, match="records could not"), Saver(tmp_path, keep=1) as saver:
        saver.save(taken(model, 3), broken)
    # The error under way is the one to show.
    with pytest.raises(KeyError), Saver(tmp_path, keep=1) as saver:
        saver.save(taken(model, 3), broken)
        raise KeyError


def test_a_disk_without_room_is_known_before_the_write(
    tmp_path: Path, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("groupwise.sync.checkpoints.shutil.disk_usage", lambda path: usage)
    with Saver(tmp_path, keep=1) as saver:
        saver.save(taken(model, 1), nothing)
        with pytest.raises(RunError, match=r"step 1 could not be written.* and 1000 bytes are"):
            saver.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["_seal", "_swap_in", "_point"])
def test_what_is_deleted_under_the_writer_is_written_once_more(
    where: str, tmp_path: Path, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rm -rf checkpoints` at the wrong moment must not end a run that holds all in memory."""
    parent, real, asked = tmp_path / "checkpoints", getattr(states, where), list[bool]()
    parent.mkdir()

    def deleted(*args: Any) -> Any:
        if len(asked) == 1:
            shutil.rmtree(parent, ignore_errors=True)
        return real(*args)

    monkeypatch.setattr(states, where, deleted)
    with Saver(parent, keep=1) as saver:
        saver.save(taken(model, 1), lambda: asked.append(parent.is_dir()))
    found = load_latest(parent)
    assert found is not None and found.step == 1 and found.fell_back == []
    assert len(asked) == 2 and asked[0]


def test_a_second_interrupt_is_told_what_it_waits_for_and_a_third_leaves(
    tmp_path: Path, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, stuck, go = list[str](), threading.Event(), threading.Event()
    real = states._write_resume

    def slow(*args: Any) -> None:
        stuck.set()
        go.wait()
        real(*args)

    with Saver(tmp_path, keep=1) as saver:
        saver.save(taken(model, 1), nothing)
    monkeypatch.setattr(states, "_write_resume", slow)
    with pytest.raises(KeyboardInterrupt), Saver(tmp_path, keep=1, tell=said.append) as saver:
        saver.save(taken(model, 2), nothing)
        stuck.wait()
        thread, waited = saver._thread, saver.wait
        assert thread is not None

        def third() -> None:
            saver.wait = waited  # type: ignore[method-assign]
            raise KeyboardInterrupt

        saver.wait = third  # type: ignore[method-assign]
        raise KeyboardInterrupt
    (told,) = said
    assert told.startswith("waiting for the checkpoint of step 2 (") and "s ago" in told
    assert "Ctrl-C once more leaves at once" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_1"]
    go.set()
    thread.join()  # nothing of it appears later
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_1"]


def test_without_memory_for_a_copy_training_waits(
    tmp_path: Path, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(savers, "free_memory", lambda: 0)
    with Saver(tmp_path, keep=1) as saver:
        saver.save(taken(model, 1), nothing)
        assert load_latest(tmp_path) is not None  # there when the call returns
        assert saver.take_stalled() > 0 and saver.take_stalled() == 0


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: make check-gpu where there is one"
)
def test_on_a_gpu_the_copy_comes_before_the_next_change(tmp_path: Path) -> None:
    """Large enough that a change would overtake a copy which nothing holds it back for."""
    big = torch.zeros(2**28, device="cuda")
    model = make("qwen2").cuda()
    rest = {"steps": torch.tensor(3), "small": torch.ones(5, device="cuda")}
    with Saver(tmp_path, keep=1) as saver:
        saver.reserve(taken(model, 0, moments=big, **rest))
        for step in (1, 2):
            saver.save(taken(model, step, moments=big, **rest), nothing)
            saver.hold_changes()
            big.add_(1.0)
            saver.wait()
            found = load_latest(tmp_path)
            assert found is not None and found.step == step
            stored = found.tensors["optimizer"]
            assert (stored["moments"] == step - 1).all() and int(stored["steps"]) == 3
            assert torch.equal(stored["small"], torch.ones(5))
            # Into a part of the same memory.
            saver.save(weights_alone(step, policy_contents(model, {})), nothing)
