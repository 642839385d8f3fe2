"""Weights on their way to samplers: what a checkpoint holds, in order, whoever holds it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import family_zoo
import pytest
import torch
from model_zoo import CONFIGS, make
from published import moved, of_ranks
from teams import Ranks, ranks

from groupwise.model.adapters.lora import merge
from groupwise.model.adapters.quantized import quantize
from groupwise.model.formats.checkpoint import load_weights, own_tensors, save, stored_tensors
from groupwise.sync.publish import by_layer, named_tensors


@pytest.fixture(scope="module")
def team() -> Iterator[Ranks]:
    with ranks(2) as made:
        yield made


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_what_a_checkpoint_holds(name: str) -> None:
    model = make(name)
    wanted, found = own_tensors(model, None), dict(named_tensors(model))
    assert list(found) == list(wanted)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("name", ["smollm2", "qwen3_moe", "mixtral"])
def test_an_adapter_is_folded_in_as_export_folds_it(name: str) -> None:
    plain, model = dict(named_tensors(make(name))), moved(name, adapted=True)
    found, bare = dict(named_tensors(model)), dict(named_tensors(model, fold=False))
    folded = copy.deepcopy(model)
    merge(folded)
    wanted = own_tensors(folded, None)
    assert found.keys() == wanted.keys() == bare.keys()
    for key in wanted:
        assert torch.equal(found[key], wanted[key]) and torch.equal(bare[key], plain[key])
    assert any(not torch.equal(found[key], plain[key]) for key in plain)


def test_bits_of_a_quantised_base_come_as_the_numbers_that_they_stand_for() -> None:
    model = make("smollm2")
    quantize(model, "int8", "cpu")
    folded = copy.deepcopy(model)
    merge(folded)
    wanted, found = own_tensors(folded, None), dict(named_tensors(model))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_a_tied_head_comes_where_it_is_asked_for() -> None:
    model = make("smollm2")
    assert model.config.tied and "lm_head.weight" not in dict(named_tensors(model))
    found = dict(named_tensors(model, head=True, dtype=torch.bfloat16))
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert {x.dtype for x in found.values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "deepseek_v3"])  # the last with joined experts
def test_other_architectures_have_the_names_of_their_files(name: str, tmp_path: Path) -> None:
    folder = Path(family_zoo.folder(name))
    model = load_weights(folder)
    save(model, tmp_path / "saved", {"config.json": (folder / "config.json").read_bytes()})
    wanted, found = dict(stored_tensors(tmp_path / "saved")), dict(named_tensors(model))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_names_come_a_layer_at_a_time() -> None:
    names = ["embed", "layers.0.a", "layers.0.b", "layers.1.a", "layers.10.a", "norm", "head"]
    assert list(by_layer(names)) == [
        ["embed"], ["layers.0.a", "layers.0.b"], ["layers.1.a"], ["layers.10.a"], ["norm"], ["head"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "adapted"), [(torch.bfloat16, False), (torch.float32, True)]
)  # half precision has masters in float32
def test_ranks_that_hold_parts_yield_the_whole_model(
    team: Ranks, dtype: torch.dtype, adapted: bool
) -> None:
    wanted = list(named_tensors(moved("smollm2", dtype, adapted=adapted)))
    for found in team.run(2, of_ranks, "smollm2", dtype, adapted):
        assert [key for key, _ in found] == [key for key, _ in wanted]
        for (_, own), (_, whole) in zip(found, wanted, strict=True):
            assert own.dtype == whole.dtype
            torch.testing.assert_close(own, whole, rtol=1e-6, atol=1e-6)
