"""When a run does not go on: small runs with one thing broken, each in another place."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cold_start
import pytest
import torch
from cold_start import events, latest, rows
from runs import left_behind, metrics
from safetensors.torch import load_file
from teaching import before_updates
from torch import Tensor

from groupwise.engine.native import copies
from groupwise.engine.native import engine as native
from groupwise.engine.native import scheduler as flight
from groupwise.errors import RunError
from groupwise.model.fingerprint import fingerprint
from groupwise.model.formats.checkpoint import load_weights
from groupwise.optim import learner, packs
from groupwise.optim.roles.reference import Reference
from groupwise.sync import saver
from groupwise.training import guards

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cold_start.make(tmp_path_factory.mktemp("model") / "cold")


@pytest.fixture
def run(model: str) -> Callable[..., dict[str, Any]]:
    def started(folder: Path, **changes: Any) -> dict[str, Any]:
        return cold_start.run_from(model, folder, **changes)

    return started


Run = Callable[..., dict[str, Any]]


def nothing_learned(folder: Path) -> bool:
    return (
        not list((folder / "checkpoints").iterdir())
        and not list((folder / "rollouts").iterdir())
        and not (folder / "metrics.jsonl").exists()
    )


# --- before the first step ----------------------------------------------------------------------


def asked_otherwise(patch: Patch, request: dict[str, Any], sampling: dict[str, Any]) -> None:
    """What reaches the sampler is not what was asked of it."""
    real = native.NativeEngine.generate

    def generate(self: Any, requests: Any, asked: Any, **told: Any) -> Any:
        changed = [replace(r, **{k: f(r) for k, f in request.items()}) for r in requests]
        return real(self, changed, replace(asked, **sampling), **told)

    patch.setattr(native.NativeEngine, "generate", generate)


def other_temperature(patch: Patch) -> None:
    asked_otherwise(patch, {}, {"temperature": 1.5})


def other_prompt(patch: Patch) -> None:
    """One token less of it, as if a template had been applied on one side."""
    asked_otherwise(patch, {"prompt": lambda request: request.prompt[:-1]}, {})


def other_weights(patch: Patch) -> None:
    real = native.NativeEngine.__init__

    def perturbed(self: Any, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        self.source.model = copies.detached(self.source.model)
        for _, parameter in self.source.model.named_parameters():
            parameter.mul_(1.05)

    patch.setattr(native.NativeEngine, "__init__", perturbed)


def other_logits(patch: Patch) -> None:
    """Each token's is its neighbour's."""
    real = flight.logits

    def shifted(*args: Any, **options: Any) -> Tensor:
        found = real(*args, **options)
        return found.copy_(found.roll(1, dims=-1))

    patch.setattr(flight, "logits", shifted)


@pytest.mark.parametrize("sabotage", [other_temperature, other_weights, other_logits, other_prompt])
def test_a_sampler_that_disagrees_is_refused_before_anything_is_learned(
    sabotage: Callable[[Patch], None], run: Run, tmp_path: Path, monkeypatch: Patch
) -> None:
    sabotage(monkeypatch)
    with pytest.raises(RunError) as caught:
        run(tmp_path / "run")
    said = str(caught.value)
    if sabotage is other_weights:  # which the fingerprints tell before the probabilities do
        assert "does not sample from" in said and "model.embed_tokens.weight" in said
    else:
        for part in ("mean ", "p99 ", "max ", "guard.mismatch = 0.001", "Likely causes", "temper"):
            assert part in said
    assert nothing_learned(tmp_path / "run")


def test_the_limit_of_the_gate_is_a_setting(run: Run, tmp_path: Path, monkeypatch: Patch) -> None:
    other_temperature(monkeypatch)
    run(tmp_path / "run", steps=1, guard__mismatch=10.0)
    first = metrics(tmp_path / "run")[0]
    gaps = [first[f"gate/mismatch_{name}"] for name in ("mean", "p99", "max")]
    assert 0.001 < gaps[0] <= gaps[1] <= gaps[2]


def test_a_sound_run_passes_the_gate_by_far(run: Run, tmp_path: Path) -> None:
    run(tmp_path / "run", steps=1, engine__temperature=0.6)
    assert metrics(tmp_path / "run")[0]["gate/mismatch_max"] < 1e-5


def test_kl_is_exactly_0_before_the_first_step(
    run: Run, tmp_path: Path, monkeypatch: Patch
) -> None:
    run(tmp_path / "sound", recipe="grpo", steps=1)
    assert all(row["learner_logp"] == row["ref_logp"] for row in rows(tmp_path / "sound", 1))
    real = Reference.__init__

    def perturbed(self: Reference, *args: Any) -> None:
        real(self, *args)
        with torch.no_grad():
            next(self.model.parameters()).mul_(1.0001)

    monkeypatch.setattr(Reference, "__init__", perturbed)
    with pytest.raises(RunError, match=r"not the starting policy.*KL must be exactly 0"):
        run(tmp_path / "run", recipe="grpo")
    assert nothing_learned(tmp_path / "run")


def test_the_gate_stands_before_a_resumed_run_too(
    run: Run, tmp_path: Path, monkeypatch: Patch
) -> None:
    run(tmp_path / "run", steps=1)
    before = left_behind(tmp_path / "run")
    other_temperature(monkeypatch)
    with pytest.raises(RunError, match="disagree on identical weights"):
        run(tmp_path / "run", steps=2)
    assert left_behind(tmp_path / "run") == before


@pytest.mark.parametrize("kind", ["fp8", "int8", "stale:1", "noise:0.5"])
def test_copies_start_and_are_marked_in_every_row(kind: str, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, recipe="tis", engine__weights=kind, steps=2)
    assert {row["weights"] for step in (1, 2) for row in rows(folder, step)} == {kind}
    # What is recorded is the copy's own: it differs from the learner's, as it is meant to.
    second = rows(folder, 2)
    assert any(row["sampler_logp"] != row["learner_logp"] for row in second)
    assert {row["weight_version"] for row in second} == {0 if kind == "stale:1" else 1}


# --- weights that reach the sampler ---------------------------------------------------------------


def test_fingerprints_change_with_every_update_and_repeat(run: Run, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(tmp_path / name)
    found = [[line.get("weights/fingerprint") for line in metrics(tmp_path / n)] for n in "ab"]
    assert found[0] == found[1]
    assert len({*found[0][1:]}) == 3 and all(len(x) == 64 for x in found[0][1:])
    saved = load_weights(tmp_path / "a" / "checkpoints" / "latest")
    assert fingerprint(saved.named_parameters()) == found[0][-1]


def nothing_arrives(engine: native.NativeEngine, version: int) -> None:
    pass


def only_the_number_arrives(engine: native.NativeEngine, version: int) -> None:
    engine.source.version = version


def a_copy_is_left_behind(engine: native.NativeEngine, version: int) -> None:
    """As of update 1 the sampler is off the learner's parameters, and keeps those that it has."""
    if version == 1:
        engine.source.model = copies.detached(engine.source.model)
    engine.source.sync(version)


def one_tensor_is_left_behind(engine: native.NativeEngine, version: int) -> None:
    name = "model.embed_tokens.weight"  # the tied head
    old = dict(engine.source.model.named_parameters())[name].clone()
    engine.source.sync(version)
    dict(engine.source.model.named_parameters())[name].data.copy_(old)


@pytest.mark.parametrize(
    ("weights", "sync", "step", "why"),
    [
        ("shared", nothing_arrives, 1, "version 0 instead of version 1"),
        ("shared", a_copy_is_left_behind, 2, "model.embed_tokens.weight has other values"),
        ("noise:0.1", a_copy_is_left_behind, 2, "model.embed_tokens.weight has other values"),
        ("int8", only_the_number_arrives, 1, "model.embed_tokens.weight has other values"),
        ("int8", one_tensor_is_left_behind, 1, "model.embed_tokens.weight has other values"),
        ("stale:1", nothing_arrives, 2, "version 0 instead of version 1"),
        ("stale:1", one_tensor_is_left_behind, 2, "fingerprints differ"),
    ],
)
def test_weights_that_do_not_reach_the_sampler_stop_the_run(
    weights: str, sync: Any, step: int, why: str, run: Run, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(native.NativeEngine, "sync", sync)
    with pytest.raises(RunError, match="does not sample from version") as caught:
        # Many prompts, so that the first step learns something whatever the start.
        run(tmp_path / "run", recipe="tis", engine__weights=weights, prompts_per_step=16)
    assert f"After step {step} " in str(caught.value) and why in str(caught.value)
    # What was learned before is there, and nothing after it.
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(step))
    assert step == 1 or latest(tmp_path / "run") == f"step_{step - 1}"


def test_a_run_goes_on_with_the_versions_that_it_delivered(run: Run, tmp_path: Path) -> None:
    """Several updates a step: versions jump, and a resumed stale sampler is checked as well."""
    changes: dict[str, Any] = {
        "recipe": "tis",
        "recipe__schedule__updates": 2,
        "engine__weights": "stale:3",
    }
    run(tmp_path / "run", steps=2, **changes)
    run(tmp_path / "run", steps=4, **changes)
    seen = [{row["weight_version"] for row in rows(tmp_path / "run", step)} for step in range(1, 5)]
    assert seen == [{0}, {0}, {0}, {2}]  # of versions 0, 2, 4, 6: the newest that is 3 old


# --- what is not finite ---------------------------------------------------------------------------


@pytest.fixture
def now(monkeypatch: Patch) -> SimpleNamespace:
    """Which step is being learned."""
    found = SimpleNamespace(step=0)
    before_updates(monkeypatch, lambda step: setattr(found, "step", step + 1))
    return found


def bad_logits(patch: Patch, wrong: Callable[[], bool]) -> None:
    real = learner.outputs

    def outputs(*args: Any, **options: Any) -> dict[str, Tensor]:
        found = real(*args, **options)
        if wrong():
            found["logp_NT"] = found["logp_NT"] * torch.tensor(float("nan"))
        return found

    patch.setattr(learner, "outputs", outputs)


def bad_loss(patch: Patch, wrong: Callable[[], bool]) -> None:
    real = learner.token_phase

    def token_phase(*args: Any, **outputs: Any) -> Any:
        found = real(*args, **outputs)
        terms = {name: x + float("inf") for name, x in found.terms.items()}
        return replace(found, terms=terms) if wrong() else found

    patch.setattr(learner, "token_phase", token_phase)


def bad_gradient(patch: Patch, wrong: Callable[[], bool]) -> None:
    """√0: the loss is what it was, its slope is infinite, times 0."""
    real = learner.token_phase

    def token_phase(recipe: Any, micro: Any, **outputs: Any) -> Any:
        found = real(recipe, micro, **outputs)
        if not wrong():
            return found
        return replace(found, loss=found.loss + (outputs["logp_NT"] * 0).sum().sqrt())

    patch.setattr(learner, "token_phase", token_phase)


BAD = {
    "logp_NT has": bad_logits,
    "loss policy has": bad_loss,
    "model.embed_tokens.weight has": bad_gradient,
}


@pytest.mark.parametrize("named", BAD)
def test_what_is_not_finite_is_skipped_dumped_and_named(
    named: str, run: Run, now: SimpleNamespace, tmp_path: Path, monkeypatch: Patch
) -> None:
    folder = tmp_path / "run"
    BAD[named](monkeypatch, lambda: now.step == 2)
    run(folder, steps=3)
    lines = metrics(folder)
    assert [line["optim/skipped"] for line in lines[1:]] == [0, 1, 0]
    prints = [line["weights/fingerprint"] for line in lines[1:]]
    assert prints[0] == prints[1] != prints[2]  # to the bit
    assert [line["weights/version"] for line in lines[1:]] == [1, 1, 2]
    (event,) = events(folder, "not finite")
    assert event["step"] == 2 and named in event["text"]
    assert "dumps/step_2.safetensors" in event["text"]
    batch = load_file(folder / "dumps" / "step_2.safetensors")
    recorded = rows(folder, 2)
    for name, column in (("task_reward_N", "reward"), ("sampler_logp_NT", "sampler_logp")):
        assert len(batch[name]) == len(recorded)
        first = batch[name][0]
        wanted = recorded[0][column]
        assert first[: len(wanted)].tolist() == wanted if first.dim() else float(first) == wanted
    assert {"mask_NT", "advantage_NT", "coefficient_NT", "group_N"} <= batch.keys()


@pytest.mark.parametrize("recipe", ["grpo", "dapo"])
def test_what_is_not_finite_before_the_loss_is_skipped_too(
    recipe: str, run: Run, now: SimpleNamespace, tmp_path: Path, monkeypatch: Patch
) -> None:
    """In the passes that score the rollouts: by the policy before the update, by the reference."""
    real = packs.outputs

    def outputs(*args: Any, **options: Any) -> dict[str, Tensor]:
        found = real(*args, **options)
        return {k: x * float("nan") for k, x in found.items()} if now.step == 2 else found

    monkeypatch.setattr(packs, "outputs", outputs)
    scored = {"recipe.shaping": "", "recipe.correction": "tis_token()"}
    run(tmp_path / "run", recipe=recipe, **scored if recipe == "dapo" else {})
    lines = metrics(tmp_path / "run")[1:]
    assert [line["optim/skipped"] for line in lines] == [0, 1, 0]
    assert lines[0]["weights/fingerprint"] == lines[1]["weights/fingerprint"]
    (event,) = events(tmp_path / "run", "not finite")
    assert "_logp_NT has" in event["text"] and "rollouts/step_2.parquet" in event["text"]
    assert any(row["used"] for row in rows(tmp_path / "run", 2))


def test_a_batch_that_cannot_be_dumped_stops_the_run_in_words(
    run: Run, now: SimpleNamespace, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The checkpoint of step 1 is still being written at that time, and counts."""
    failed, write = threading.Event(), saver.write

    def full(*_: Any) -> None:
        failed.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def late(*given: Any) -> None:
        failed.wait()
        write(*given)

    bad_loss(monkeypatch, lambda: now.step == 2)
    monkeypatch.setattr(guards, "write_atomic", full)
    monkeypatch.setattr(saver, "write", late)
    with pytest.raises(RunError, match=r"dumps/step_2\.safetensors.*full.*step_1, is intact"):
        run(tmp_path / "run")


def test_the_optimizer_does_not_move_on_a_skipped_update(
    run: Run, now: SimpleNamespace, tmp_path: Path, monkeypatch: Patch
) -> None:
    bad_gradient(monkeypatch, lambda: now.step == 2)
    run(tmp_path / "run", steps=2, checkpoint__keep=3)
    states = [
        load_file(tmp_path / "run" / "checkpoints" / f"step_{n}" / "resume/optimizer.safetensors")
        for n in (1, 2)
    ]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_few_in_a_row_stop_the_run_which_can_go_on(
    run: Run, now: SimpleNamespace, tmp_path: Path, monkeypatch: Patch
) -> None:
    run(tmp_path / "whole", steps=4)
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        bad_gradient(patch, lambda: now.step >= 3)
        with pytest.raises(RunError, match=r"2 updates in a row were not finite.*embed_tokens"):
            run(folder, steps=4, guard__max_skipped=2, checkpoint__every_steps=2)
    assert latest(folder) == "step_2"
    assert [line["step"] for line in metrics(folder)] == [0, 1, 2, 3, 4]
    run(folder, steps=4)  # the cause is gone
    assert left_behind(folder) == left_behind(tmp_path / "whole")


def test_a_finite_update_in_between_starts_the_count_again(
    run: Run, now: SimpleNamespace, tmp_path: Path, monkeypatch: Patch
) -> None:
    bad_loss(monkeypatch, lambda: now.step in (1, 3))
    run(tmp_path / "run", steps=3, guard__max_skipped=2)
    assert [line["optim/skipped"] for line in metrics(tmp_path / "run")[1:]] == [1, 0, 1]


# --- out of memory --------------------------------------------------------------------------------

ERRORS = {
    "type": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "words": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: 2 GiB"),
}


@pytest.fixture
def room(monkeypatch: Patch) -> Iterator[SimpleNamespace]:
    """Memory for so many tokens in one pass."""
    found = SimpleNamespace(tokens=10**9, error=ERRORS["type"])

    def limited(real: Callable[..., Any]) -> Callable[..., Any]:
        def outputs(model: Any, part: packs.Pack, **options: Any) -> Any:
            if len(part.token_T) > found.tokens:
                raise found.error()
            return real(model, part, **options)

        return outputs

    for module in (packs, learner):
        monkeypatch.setattr(module, "outputs", limited(module.outputs))
    yield found


def small_batches(folder: Path) -> list[Any]:
    return [line.get("optim/micro_batches") for line in metrics(folder)]


@pytest.mark.parametrize("kind", ERRORS)
def test_out_of_memory_halves_the_micro_batch_and_keeps_the_update(
    kind: str, run: Run, room: SimpleNamespace, tmp_path: Path
) -> None:
    run(tmp_path / "small", recipe="grpo", optim__micro_tokens=24)
    room.tokens, room.error = 24, ERRORS[kind]
    run(tmp_path / "halved", recipe="grpo", optim__micro_tokens=96)
    assert small_batches(tmp_path / "halved") == small_batches(tmp_path / "small")
    small, halved = left_behind(tmp_path / "small"), left_behind(tmp_path / "halved")
    (event,) = halved.pop("events")
    small.pop("events")
    assert "24 tokens instead of 96" in event["text"] and event["kind"] == "memory"
    assert halved.pop("values")["micro_tokens"] == 24
    small.pop("values")
    assert halved == small


def test_out_of_memory_in_the_middle_is_told_and_lasts(
    run: Run, room: SimpleNamespace, now: SimpleNamespace, tmp_path: Path, monkeypatch: Patch
) -> None:
    folder = tmp_path / "run"

    def less_from_step_2(step: int) -> None:
        room.tokens = 24 if step == 1 else 10**9

    before_updates(monkeypatch, less_from_step_2)
    run(folder, steps=2, optim__micro_tokens=96)
    (event,) = events(folder, "memory")
    assert event["step"] == 2 and "the batch and the update stay the same" in event["text"]
    run(folder, steps=3, optim__micro_tokens=96)
    run(tmp_path / "small", steps=3, optim__micro_tokens=24)
    assert small_batches(folder)[2:] == small_batches(tmp_path / "small")[2:]
    assert small_batches(folder)[1] < small_batches(tmp_path / "small")[1]
    # The update is the same but for the order of float32 sums.
    whole, parts = (
        load_weights(x / "checkpoints" / "latest") for x in (folder, tmp_path / "small")
    )
    for (_, a), (_, b) in zip(whole.named_parameters(), parts.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_a_size_set_anew_on_resume_is_what_runs(
    run: Run, room: SimpleNamespace, tmp_path: Path
) -> None:
    room.tokens = 24
    run(tmp_path / "run", steps=1, optim__micro_tokens=96)
    room.tokens = 10**9
    run(tmp_path / "run", steps=2, optim__micro_tokens=4096)
    assert small_batches(tmp_path / "run")[2] == 1
    run(tmp_path / "run", steps=3, optim__micro_tokens=6)
    assert small_batches(tmp_path / "run")[3] > 4


def test_one_sequence_that_does_not_fit_ends_with_advice(
    run: Run, room: SimpleNamespace, tmp_path: Path
) -> None:
    room.tokens = 2
    with pytest.raises(RunError, match=r"single sequence.*optim\.recompute=true.*max_tokens"):
        run(tmp_path / "run")


def test_other_errors_are_not_taken_for_little_memory(
    run: Run, room: SimpleNamespace, tmp_path: Path
) -> None:
    room.tokens, room.error = 24, lambda: RuntimeError("shapes do not fit")
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        run(tmp_path / "run")
