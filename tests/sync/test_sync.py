"""Fingerprints, references, and checkpoints that survive whatever is done to them."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from model_zoo import CONFIGS, all_logits, make, sequences
from safetensors import SafetensorError
from torch import Tensor

from groupwise.errors import ConfigError, ModelError, RunError
from groupwise.model import fingerprint as prints
from groupwise.model.fingerprint import fingerprint, same_weights
from groupwise.model.formats.checkpoint import load_weights, save
from groupwise.model.formats.tokenizer import character_files
from groupwise.model.layers.transformer import Transformer
from groupwise.optim.adamw import AdamW
from groupwise.optim.roles.reference import Reference, parse_update
from groupwise.optim.step import apply
from groupwise.records import Memory, Visit
from groupwise.sync import checkpoints as states
from groupwise.sync.checkpoints import (
    load_latest,
    memory_from_json,
    memory_to_json,
    policy_contents,
    snapshot,
    weights_alone,
)
from groupwise.sync.export import checkpoint_in, export


def bits(model: Transformer) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def move(model: Transformer, amount: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(amount)


# Fingerprints

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Around the lengths where a word, a row or a block ends.
LENGTHS = (1, 2, 3, 7, 2 * prints.ROW, 2 * prints.ROW + 1, 5 * prints.ROW + 3)


def of(tensor: Tensor) -> str:
    return fingerprint([("w", tensor)])


def weights(length: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=150, deadline=None)
@given(length=st.sampled_from(LENGTHS), dtype=st.sampled_from(DTYPES), where=st.floats(0, 0.999999))
def test_every_bit_counts(length: int, dtype: torch.dtype, where: float) -> None:
    tensor = weights(length, dtype)
    before, raw = of(tensor), tensor.view(torch.uint8)
    bit = int(where * len(raw) * 8)
    raw[bit // 8] ^= 1 << (bit % 8)
    assert of(tensor) != before
    raw[bit // 8] ^= 1 << (bit % 8)
    assert of(tensor) == before


@settings(max_examples=150, deadline=None)
@given(
    length=st.sampled_from(LENGTHS[1:]),
    dtype=st.sampled_from(DTYPES),
    ends=st.tuples(st.floats(0, 0.999999), st.floats(0, 0.999999)),
    negated=st.booleans(),
)
def test_every_swap_counts(
    length: int, dtype: torch.dtype, ends: tuple[float, float], negated: bool
) -> None:
    tensor = weights(length, dtype)
    i, j = (int(end * length) for end in ends)
    assume(i != j)
    if negated:  # differ in the sign alone: the top bit of a word
        tensor[j] = -tensor[i]
    assume(tensor[i] != tensor[j])
    before = of(tensor)
    tensor[[i, j]] = tensor[[j, i]]
    assert of(tensor) != before


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(2, 40),
    width=st.sampled_from((1, 6, 64, 2 * prints.ROW)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_permuted_rows_columns_and_transposes_count(
    rows: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    tensor = weights(rows * width, dtype, seed).view(rows, width)
    order = np.random.default_rng(seed).permutation(rows)
    assume(not torch.equal(tensor, tensor[order]))
    assert of(tensor) != of(tensor[order])
    assert of(tensor) != of(tensor.flip(0))
    if width > 1:
        assert of(tensor) != of(tensor.flip(1))
        assert of(tensor) != of(tensor.t().contiguous())
        assert of(tensor) != of(tensor.t().contiguous().view(rows, width))
        # What lies transposed in memory is the same matrix.
        assert of(tensor) == of(tensor.t().contiguous().t())


@pytest.mark.parametrize("dtype", DTYPES)
def test_patterns_of_signs_count(dtype: torch.dtype) -> None:
    """Sums modulo 2⁶⁴ forget pairs of top bits: negated columns, rows, and pairs must be seen."""
    tensor = weights(16 * 2048, dtype).view(16, 2048)
    found = {of(tensor)}
    for step in (1, 2, 4):
        for start in range(step):
            for rows in (slice(None), slice(3, 5)):
                changed = tensor.clone()
                changed[rows, start::step] *= -1
                found.add(of(changed))
    assert len(found) == 1 + 2 * (1 + 2 + 4)


def test_weights_of_the_sums_are_as_the_proof_needs_them() -> None:
    """Odd; and (wᵢ − wⱼ)·d is 0 modulo 2⁶⁴ for no d below 2³²: lower halves differ."""
    assert (prints.WEIGHTS % 2 == 1).all()
    assert len(np.unique(prints.WEIGHTS & 0xFFFFFFFF)) == prints.ROW


def test_sums_by_hand() -> None:
    words = torch.zeros(3, prints.ROW, dtype=torch.int64)
    words[0, 0], words[1, 1], words[2, 2] = 5, 3 << 32, -1
    w = [int(x) for x in prints.WEIGHTS]

    def wrapped(x: int) -> int:
        return (x + 2**63) % 2**64 - 2**63

    want = [[5 * w[0], 0], [(3 << 32) * w[1], 3 * w[1]], [-w[2], -w[2]]]
    assert prints._sums(words).tolist() == [[wrapped(x) for x in row] for row in want]


def test_names_shapes_and_dtypes_count_and_order_does_not() -> None:
    a, b = weights(6, torch.float32), weights(6, torch.float32, seed=1)
    named = [("a", a), ("b", b)]
    assert fingerprint(named) == fingerprint(reversed(named))
    assert fingerprint(named) != fingerprint([("a", b), ("b", a)])
    assert fingerprint(named) != fingerprint([("a", a), ("c", b)])
    assert of(a) != of(a.view(2, 3)) != of(a.view(3, 2))
    zeros = torch.zeros(8, dtype=torch.bfloat16)
    assert of(zeros) != of(zeros.half()) and of(zeros) != of(torch.zeros(9, dtype=torch.bfloat16))
    assert of(torch.zeros(0)) != of(torch.zeros(1))
    # The place in memory does not count.
    assert of(torch.cat([a.new_zeros(1), a])[1:]) == of(a)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: make check-gpu where there is one"
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_on_every_device(dtype: torch.dtype) -> None:
    tensor = weights(9_000_001, dtype)
    assert of(tensor) == of(tensor.cuda())


def test_the_fingerprint_of_a_model_is_what_it_was() -> None:
    """Manifests hold fingerprints: a release must not change them unawares."""
    counted = torch.arange(5000, dtype=torch.float32)
    assert of(counted) == "900f22360f4abf54137b7f9fb62bfe4df8f093ddeb1cd5b16265abccca057e2c"


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "smollm2"])
def test_bugs_38_to_40_a_parameter_that_was_not_delivered_is_named(name: str) -> None:
    """Every parameter counts, biases and the head included; a tied head is there once."""
    learner = make(name)
    for key, parameter in learner.named_parameters():
        sampler = make(name)
        assert fingerprint(learner.named_parameters()) == fingerprint(sampler.named_parameters())
        assert same_weights(learner.named_parameters(), sampler.named_parameters()) is None
        with torch.no_grad():
            parameter.view(-1)[-1] += 1e-6
        assert fingerprint(learner.named_parameters()) != fingerprint(sampler.named_parameters())
        found = same_weights(learner.named_parameters(), sampler.named_parameters())
        assert found == f"{key} has other values"
        learner.load_state_dict(sampler.state_dict())
    assert ("lm_head.weight" in dict(learner.named_parameters())) != learner.config.tied


def test_same_weights_says_what_differs() -> None:
    x = torch.tensor([0.0, math.nan])
    assert same_weights([("w", x)], [("w", x.clone())]) is None
    assert same_weights([("w", x)], [("w", -x)]) == "w has other values"  # 0 is not −0
    assert same_weights([("w", x)], []) == "w is on one side alone"
    assert same_weights([("w", x)], [("w", x.half())]) == (
        "w is torch.float32 (2,) against torch.float16 (2,)"
    )


# References


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("update", ["frozen", "ema:0.9", "reset:2"])
def test_bug_17_reference_and_policy_agree_to_the_bit_at_step_0(
    update: str, dtype: torch.dtype
) -> None:
    policy = make("qwen2", dtype=dtype)
    reference = Reference(policy, update)
    named = policy.named_parameters()
    assert same_weights(named, reference.model.named_parameters()) is None
    rows = sequences([9, 4])
    assert torch.equal(all_logits(policy, rows), all_logits(reference.model, rows))
    assert not any(p.requires_grad for p in reference.model.parameters())
    before = bits(reference.model)
    move(policy, 0.5)
    assert same(before, bits(reference.model))  # a copy, not the policy itself


def test_a_frozen_reference_stays() -> None:
    policy = make("qwen2")
    reference = Reference(policy, "frozen")
    before = bits(policy)
    for step in range(1, 4):
        move(policy, 0.1)
        reference.after_step(policy, step)
    assert same(before, bits(reference.model)) and reference.state() == {}


def test_a_reset_reference_becomes_the_policy_every_so_often() -> None:
    policy = make("qwen2")
    reference = Reference(policy, "reset:3")
    seen = [bits(policy)]
    for step in range(1, 8):
        move(policy, 0.1)
        reference.after_step(policy, step)
        seen.append(bits(policy))
        assert same(bits(reference.model), seen[step // 3 * 3])


def test_an_average_by_hand() -> None:
    policy = make("qwen2")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(1.0)
    reference = Reference(policy, "ema:0.75")
    want = 1.0
    for step in range(1, 5):
        move(policy, 1.0)
        reference.after_step(policy, step)
        want = 0.75 * want + 0.25 * (1.0 + step)
        for parameter in reference.model.parameters():
            assert torch.equal(parameter, torch.full_like(parameter, want))


def test_an_average_of_bfloat16_moves_by_less_than_its_spacing() -> None:
    policy = make("qwen2", dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(1.0)
    reference = Reference(policy, "ema:0.999")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(1.5)
    for step in range(1, 1 + 20):
        reference.after_step(policy, step)
    # 1.5 − 0.5 · 0.999²⁰ = 1.0099, of which bfloat16 keeps 1.0078; a step alone is 0.0005.
    assert all(p.dtype == torch.bfloat16 for p in reference.model.parameters())
    assert all((p == 1.0078125).all() for p in reference.model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("update", ["ema:0.9", "reset:2"])
def test_bug_46_a_restored_reference_goes_on_to_the_same_bits(
    update: str, dtype: torch.dtype
) -> None:
    def run(policy: Transformer, reference: Reference, start: int, end: int) -> None:
        for step in range(start, end):
            move(policy, 0.01 * step)
            reference.after_step(policy, step)

    policy = make("qwen2", dtype=dtype)
    straight = Reference(policy, update)
    run(policy, straight, 1, 8)

    first = make("qwen2", dtype=dtype)
    stopped = Reference(first, update)
    run(first, stopped, 1, 4)
    state = {name: x.clone() for name, x in stopped.state().items()}
    again = Reference(make("qwen2", dtype=dtype), update)  # from the starting policy, as on resume
    again.restore(state)
    assert same(bits(again.model), bits(stopped.model))
    run(first, again, 4, 8)
    assert same(bits(straight.model), bits(again.model))


def test_a_reference_of_another_kind_is_refused() -> None:
    policy = make("qwen2")
    moved = Reference(policy, "ema:0.9").state()
    with pytest.raises(RunError, match='is now "frozen"'):
        Reference(policy, "frozen").restore(moved)
    with pytest.raises(RunError, match=r"lacks 'model\.embed_tokens\.weight'"):
        Reference(policy, "reset:5").restore({})
    with pytest.raises(RunError, match="reference's state has"):
        Reference(make("qwen2", dtype=torch.bfloat16), "reset:5").restore(moved)


def test_forms_of_reference_updates() -> None:
    assert parse_update("frozen") == ("frozen", 0.0, 1)
    assert parse_update("ema:0.75") == ("ema", 0.25, 1)
    assert parse_update("reset:100") == ("reset", 1.0, 100)
    assert parse_update("mix:0.6:512") == ("mix", 0.6, 512)
    for bad in ("", "ema", "ema:", "ema:1", "ema:0", "ema:x", "ema:nan", "reset:0", "reset:1.5",
                "reset", "frozen:1", "never", "mix:0.6", "mix:1:4", "mix:0.5:0",
                "mix:0:4"):  # fmt: skip
        with pytest.raises(ConfigError, match=r"reference\.update is"):
            parse_update(bad)


# Checkpoints

SETTINGS = {
    "learning_rate": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.0,
}


def at_step(step: int) -> Transformer:
    return make("qwen2", seed=step)


def parts(step: int) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return {
        "optimizer": {
            "step": torch.tensor(step),
            "exp_avg/model.norm.weight": torch.randn(3000, generator=generator),
        },
        "reference": {},
    }


def write(parent: Path, step: int, keep: int = 2, best: bool = False, **values: Any) -> Path:
    made = snapshot(
        step,
        weights=policy_contents(at_step(step), {"generation_config.json": b"{}"}),
        tensors=parts(step),
        values={"step": step, "third": 1 / 3, **values},
        best=best,
    )
    return states.write(parent, made, keep)


def write_best(parent: Path, step: int, keep: int = 2) -> Path:
    """Weights alone, as the best so far."""
    made = weights_alone(step, policy_contents(at_step(step), {"generation_config.json": b"{}"}))
    return states.write(parent, made, keep)


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def check_restored(parent: Path, step: int) -> list[str]:
    """The checkpoint of this step comes back, every bit of it; returns what was passed over."""
    found = load_latest(parent)
    assert found is not None and found.step == step == found.values["step"]
    assert found.path == parent / f"step_{step}" and found.values["third"] == 1 / 3
    assert found.tensors.keys() == {"optimizer", "reference"}
    for part, tensors in parts(step).items():
        assert same(found.tensors[part], tensors)
    assert same(bits(load_weights(found.path)), bits(at_step(step)))
    return found.fell_back


def test_written_and_restored_to_the_bit(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "checkpoints") is None
    parent = tmp_path / "run" / "checkpoints"
    with pytest.raises(RunError, match="could not be written"):  # a run folder is not made here
        write(parent, 7)
    parent.parent.mkdir()
    assert write(parent, 7) == parent / "step_7"
    assert check_restored(parent, 7) == []
    assert names(parent) == ["latest", "step_7"]
    assert os.readlink(parent / "latest") == "step_7"
    assert names(parent / "step_7" / "resume") == [
        "optimizer.safetensors", "reference.safetensors", "state.json", "values.json"
    ]  # fmt: skip


def test_an_older_checkpoint_has_its_length_exponent_where_roles_look_for_it(
    tmp_path: Path,
) -> None:
    """It was kept with the optimizer before there were roles."""
    model = make("qwen2")
    optimizer = AdamW(model.named_parameters(), **SETTINGS).state()
    exponent = {"exponent": torch.tensor(0.25), "exponent_optimizer/step": torch.tensor(3)}
    tensors = {"optimizer": {f"policy/{k}": x for k, x in optimizer.items()} | exponent}
    made = snapshot(3, weights=policy_contents(model, {}), tensors=tensors, values={})
    states.write(tmp_path, made, keep=1)
    found = load_latest(tmp_path)
    assert found is not None
    assert same(found.tensors["length_exponent"], exponent)
    assert found.tensors["optimizer"].keys() == {f"policy/{k}" for k in optimizer}


def test_a_checkpoint_is_a_plain_hugging_face_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write(tmp_path, 3)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = sequences([11])
    with torch.no_grad():
        theirs = model(rows[0][None]).logits[0]
    assert torch.allclose(theirs, all_logits(at_step(3), rows), atol=1e-4)


def test_bug_46_training_from_a_checkpoint_on_disk_is_2n_to_the_bit(tmp_path: Path) -> None:
    def train(model: Transformer, optimizer: AdamW, start: int, end: int) -> None:
        for number in range(start, end):
            logits_TV = all_logits(model, sequences([6], seed=number))
            logits_TV.float().log_softmax(-1)[:, 3].sum().backward()  # type: ignore[no-untyped-call]
            apply(model.named_parameters(), optimizer, clip_norm=1.0, learning_rate=1e-3)

    straight = make("qwen2", dtype=torch.bfloat16)
    whole = AdamW(straight.named_parameters(), **SETTINGS)
    train(straight, whole, 0, 3)
    tensors = {"optimizer": whole.state()}
    made = snapshot(3, weights=policy_contents(straight, {}), tensors=tensors, values={})
    states.write(tmp_path, made, keep=1)
    train(straight, whole, 3, 6)

    found = load_latest(tmp_path)
    assert found is not None
    again = load_weights(found.path)
    optimizer = AdamW(again.named_parameters(), **SETTINGS)
    optimizer.restore(found.tensors["optimizer"])
    train(again, optimizer, 3, 6)
    assert same(bits(straight), bits(again))
    assert same(whole.state(), optimizer.state())


def test_old_checkpoints_go_and_linked_ones_stay(tmp_path: Path) -> None:
    write(tmp_path, 1, best=True)
    for step in range(2, 6):
        write(tmp_path, step)
    assert names(tmp_path) == ["best", "latest", "step_1", "step_4", "step_5"]
    assert (os.readlink(tmp_path / "best"), os.readlink(tmp_path / "latest")) == (
        "step_1",
        "step_5",
    )
    write(tmp_path, 6, best=True)  # the former best goes
    write(tmp_path, 10)  # 10 is later than 6, whatever the alphabet says
    assert names(tmp_path) == ["best", "latest", "step_10", "step_6"]
    write(tmp_path, 11, keep=1)
    assert names(tmp_path) == ["best", "latest", "step_11", "step_6"]
    write(tmp_path, 12, keep=1, best=True)
    assert names(tmp_path) == ["best", "latest", "step_12"]
    check_restored(tmp_path, 12)


def test_the_best_is_weights_alone_and_nobody_goes_on_from_it(tmp_path: Path) -> None:
    write(tmp_path, 1)
    folder = write_best(tmp_path, 2)
    assert names(folder / "resume") == ["state.json"]
    assert same(bits(load_weights(folder)), bits(at_step(2)))
    assert (os.readlink(tmp_path / "best"), os.readlink(tmp_path / "latest")) == (
        "step_2",
        "step_1",
    )
    check_restored(tmp_path, 1)


def test_a_run_that_goes_on_has_the_best_of_that_moment_again(tmp_path: Path) -> None:
    """Steps 5 and 6 are done again: their best is not the best of the run that stands at 4."""
    write_best(tmp_path, 3)
    write(tmp_path, 4)
    write_best(tmp_path, 5)
    write_best(tmp_path, 6)
    assert names(tmp_path) == ["best", "latest", "step_3", "step_4", "step_6"]
    assert states.best(tmp_path) == tmp_path / "step_6"
    check_restored(tmp_path, 4)
    assert os.readlink(tmp_path / "best") == "step_3"
    write(tmp_path, 5)
    assert names(tmp_path) == ["best", "latest", "step_3", "step_4", "step_5"]
    write(tmp_path, 6, best=True)  # whole, and the best: the former best goes
    assert names(tmp_path) == ["best", "latest", "step_5", "step_6"]


def test_links_that_a_kill_left_behind_are_set_right(tmp_path: Path) -> None:
    write(tmp_path, 1, best=True)
    write(tmp_path, 2, best=True)
    for link in ("latest", "best"):
        (tmp_path / link).unlink()
        (tmp_path / link).symlink_to("step_1")
    assert checkpoint_in(tmp_path.parent / tmp_path.name) == tmp_path  # no run: as it was given
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(tmp_path)
    assert checkpoint_in(run).name == "step_2" == checkpoint_in(run, "latest").name
    load_latest(tmp_path)
    assert os.readlink(tmp_path / "latest") == "step_2" == os.readlink(tmp_path / "best")


def test_checkpoints_of_older_versions_say_nothing_of_themselves(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        file = write(tmp_path, step, keep=3, best=step == 2) / "resume" / "state.json"
        raw = json.loads(file.read_text())
        del raw["best"], raw["resumes"]
        file.write_text(json.dumps(raw))
    found = (states.newest(tmp_path), states.best(tmp_path))
    assert found == (tmp_path / "step_3", tmp_path / "step_2")
    assert check_restored(tmp_path, 3) == []


def test_what_is_not_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step_notes").mkdir()
    (tmp_path / "step_3").write_text("a file")
    (tmp_path / ".hidden").mkdir()
    for step in (4, 5):
        write(tmp_path, step, keep=1)
    assert names(tmp_path) == [".hidden", "latest", "step_3", "step_5", "step_notes"]
    check_restored(tmp_path, 5)


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2, note="first")
    write(tmp_path, 2, note="second", best=True)
    assert check_restored(tmp_path, 2) == []
    assert load_latest(tmp_path).values["note"] == "second"  # type: ignore[union-attr]
    assert names(tmp_path) == ["best", "latest", "step_1", "step_2"]


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    file.write_bytes(raw)


FILES = ("model.safetensors", "config.json", "generation_config.json",
         "resume/optimizer.safetensors", "resume/values.json", "resume/state.json")  # fmt: skip


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", [cut, empty, flip, Path.unlink])
def test_a_damaged_file_falls_back_and_says_so(
    file: str, harm: Callable[[Path], None], tmp_path: Path
) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    harm(tmp_path / "step_2" / file)
    (said,) = check_restored(tmp_path, 1)
    # A flipped digit in state.json accuses another file.
    assert said.startswith("step_2 can't be used: ")
    assert Path(file).name in said or (file, harm) == ("resume/state.json", flip)
    # The run goes on; the damaged one is replaced when its step comes round again, or goes.
    write(tmp_path, 2)
    assert check_restored(tmp_path, 2) == []


def test_bit_by_bit_no_flip_in_the_small_files_goes_unseen(tmp_path: Path) -> None:
    """Each byte of state.json and values.json: the values restored are right, or not restored."""
    write(tmp_path, 1)
    want = load_latest(tmp_path)
    assert want is not None
    for name in ("state.json", "values.json"):
        file = tmp_path / "step_1" / "resume" / name
        good = file.read_bytes()
        for at in range(0, len(good), 3):
            file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            try:
                found = load_latest(tmp_path)
            except RunError:
                continue
            assert found is not None and found.values == want.values
            assert found.tensors.keys() == want.tensors.keys()
        file.write_bytes(good)


def test_damaged_later_checkpoints_do_not_push_out_good_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, keep=3)
    for step in (2, 3):
        cut(tmp_path / f"step_{step}" / "model.safetensors")
    assert len(check_restored(tmp_path, 1)) == 2
    shutil.rmtree(tmp_path / "step_2")
    write(tmp_path, 2)
    assert names(tmp_path) == ["latest", "step_1", "step_2"]


def test_if_none_is_good_it_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step)
        cut(tmp_path / f"step_{step}" / "resume" / "optimizer.safetensors")
    with pytest.raises(RunError, match=r"step_2 can't be used: .*; step_1 can't be used: .*backup"):
        load_latest(tmp_path)


def test_a_checkpoint_of_another_version_is_not_guessed_at(tmp_path: Path) -> None:
    file = write(tmp_path, 1) / "resume" / "state.json"
    state = json.loads(file.read_bytes())
    file.write_text(json.dumps(state | {"version": 99}))
    with pytest.raises(RunError, match="it says version 99"):
        load_latest(tmp_path)


def test_values_come_back_exactly_or_are_refused(tmp_path: Path) -> None:
    values = {"x": [0.1, 1e-320, -0.0, 2**80, None, True, "ü"], "nested": {"y": 1 / 3}}
    write(tmp_path, 1, **values)
    found = load_latest(tmp_path)
    assert found is not None and repr({k: found.values[k] for k in values}) == repr(values)
    with pytest.raises(RunError, match=r"values\.draws\[\] has the key 17"):
        write(tmp_path, 2, draws=[{17: 1}])
    assert names(tmp_path) == ["latest", "step_1"]


def test_memory_to_json_and_back_is_exact() -> None:
    memory = Memory(
        visits={3: (Visit(8, 1 / 3, 0.1 + 0.2), Visit(4, 5e-324, 0.0)), 12: (Visit(1, 1.0, 0.0),)},
        reward_average=2 / 7,
    )
    for one in (memory, Memory()):
        assert memory_from_json(json.loads(json.dumps(memory_to_json(one)))) == one


# Interruptions


class Killed(BaseException):
    """Stands for a kill: no handler of the code under test may catch it."""


def test_a_kill_between_any_two_operations_leaves_a_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that changes the disk, one after the other, is the last one of the process."""
    calls = [(os, "fsync"), (os, "rename"), (os, "replace"), (os, "symlink"), (os, "mkdir"),
             (os, "unlink"), (os, "rmdir"), (states, "save_file")]  # fmt: skip

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # slow; only power cuts ask for it

    def run(parent: Path, last: int) -> bool:
        """Save step 3 over 1 and 2: weights, all, all again; False if killed by call `last`."""
        count = 0
        with monkeypatch.context() as patch:
            for where, name in calls:
                original = getattr(where, name)

                def counted(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                    nonlocal count
                    count += 1
                    if count == last:
                        raise Killed
                    return _original(*args, **kwargs)

                patch.setattr(where, name, counted)
            try:
                write_best(parent, 3)
                write(parent, 3, best=True)
                write(parent, 3)
            except Killed:
                return False
        return True

    original = tmp_path / "original"
    for step in (1, 2):
        write(original, step)
    last, survived = 0, False
    while not survived:
        last += 1
        parent = tmp_path / f"at_{last}"
        shutil.copytree(original, parent, symlinks=True)
        survived = run(parent, last)
        shown = states.newest(parent)  # what export and eval take, links or not
        assert shown is not None
        step = int(shown.name.removeprefix(".").removesuffix(".aside").removeprefix("step_"))
        found = load_latest(parent)
        assert found is not None and found.step in (2, 3) and found.fell_back == []
        check_restored(parent, found.step)
        assert (parent / "latest").resolve() == found.path.resolve() == states.newest(parent)
        assert found.step == step
        if (parent / "best").exists():
            assert states._last(parent, "best", found.step) == (parent / "best").resolve()
        assert all(name[0] != "." for name in names(parent))
        write(parent, 4)
        check_restored(parent, 4)
        shutil.rmtree(parent)
    assert last > 40


KILLED_AT_RANDOM = """
import os, random, signal, sys, time
from pathlib import Path
import torch  # imported once; children are forked before it has started a thread
from test_sync import check_restored, load_latest, write

parent = Path(sys.argv[1])
choose, patience, before = random.Random(0), 1.0, None
for round in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            found = load_latest(parent)
            step = found.step if found else 0
            assert not found or check_restored(parent, step) == []
            while True:
                step += 1
                write(parent, step, best=step % 3 == 0)
        finally:
            os._exit(code)
    time.sleep(choose.uniform(0.1, 0.5) * patience)
    if os.waitpid(child, os.WNOHANG) != (0, 0):
        sys.exit("a child failed")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    saved = (parent / "latest").resolve()
    patience = patience * 1.5 if saved == before else 1.0  # a busy machine needs longer
    before = saved
"""


def test_bug_46_kill_9_at_random_moments_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    parent = tmp_path / "checkpoints"
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT_RANDOM, str(parent), "14"],
        cwd=Path(__file__).parent,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = load_latest(parent)
    assert found is not None and found.step >= 3 and found.fell_back == []
    check_restored(parent, found.step)
    assert all(name[0] != "." for name in names(parent))


FULL = (OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left"))


@pytest.mark.parametrize("error", FULL)
@pytest.mark.parametrize("where", ["save_file", "_flush", "_seal", "_swap_in", "_point"])
def test_a_full_disk_leaves_the_last_checkpoint_whole(
    where: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)

    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(states, where, full)
    with pytest.raises(RunError, match=r"step 2 could not be written .*No space left.*untouched"):
        write(tmp_path, 2)
    monkeypatch.undo()
    assert [name for name in names(tmp_path) if name[0] == "."] == []
    assert check_restored(tmp_path, 2 if where == "_point" else 1) == []
    write(tmp_path, 2)
    assert check_restored(tmp_path, 2) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("kib", range(300, 540, 48))
def test_a_disk_that_is_really_full(kib: int, tmp_path: Path) -> None:
    """A file system with room for one checkpoint and a part of the next."""
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = libc.mount(b"tmpfs", bytes(tmp_path), b"tmpfs", 0, f"size={kib}k".encode())
    if mounted != 0:
        pytest.skip("mounting is not allowed here")
    try:
        parent = tmp_path / "checkpoints"
        write(parent, 1)
        with pytest.raises(RunError, match="step 2 could not be written"):
            write(parent, 2)
        assert names(parent) == ["latest", "step_1"]
        assert check_restored(parent, 1) == []
    finally:
        libc.umount2(bytes(tmp_path), 2)


def test_an_export_beside_damaged_rollouts_says_which_file(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step_1"
    files = character_files("ab") | {"config.json": json.dumps(CONFIGS["qwen2"]).encode()}
    save(make("qwen2"), folder, files)
    (tmp_path / "run" / "rollouts").mkdir()
    (tmp_path / "run" / "rollouts" / "step_1.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(RunError, match=r"step_1\.parquet is not a Parquet file"):
        export(folder, tmp_path / "out")
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        export(folder, tmp_path / "out")
