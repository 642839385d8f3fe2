"""Adapters against PEFT, both ways: its folders here, ours there; log-probabilities and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_zoo import ALPHABET
from model_zoo import all_logits, make, sequences
from safetensors.torch import load_file, save_file

from groupwise.errors import ModelError
from groupwise.model.adapters import peft_files
from groupwise.model.adapters.lora import adapters, attach, merge, tensors_of
from groupwise.model.adapters.targets import Spec
from groupwise.model.formats.checkpoint import load_weights, save
from groupwise.model.formats.tokenizer import character_files
from groupwise.model.layers.linear import layer_sizes
from groupwise.model.policy import Base, frozen_base, load_policy
from groupwise.sync.export import export

peft = pytest.importorskip("peft")
FAMILIES = ["llama3", "qwen2", "qwen3", "llama_biases"]
ROWS = sequences([9, 4])


@pytest.fixture(params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return base_folder(tmp_path / "base", request.param)


def base_folder(folder: Path, family: str) -> Path:
    save(make(family), folder, character_files(ALPHABET))
    return folder


def in_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def peft_made(base: Path, folder: Path, **options: Any) -> Any:
    """An adapter of PEFT's with random values in both matrices, saved."""
    asked = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    torch.manual_seed(5)
    model = peft.get_peft_model(in_transformers(base), peft.LoraConfig(**(asked | options)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def their_logp(model: Any) -> torch.Tensor:
    return torch.cat([model(row[None]).logits[0].log_softmax(-1) for row in ROWS])


@torch.no_grad()
def our_logp(model: Any) -> torch.Tensor:
    return all_logits(model, ROWS).log_softmax(-1)


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_of_peft_says_the_same_here(base: Path, rslora: bool, tmp_path: Path) -> None:
    theirs = peft_made(base, tmp_path / "a", use_rslora=rslora)
    ours = load_policy(tmp_path / "a").model
    assert len(adapters(ours)) == 3 * 7
    plain = our_logp(load_weights(base))
    assert float((our_logp(ours) - plain).abs().max()) > 0.1  # it matters
    torch.testing.assert_close(our_logp(ours), their_logp(theirs), rtol=0, atol=1e-5)


def test_merged_weights_are_those_of_peft(base: Path, tmp_path: Path) -> None:
    theirs = peft_made(base, tmp_path / "a")
    ours = load_policy(tmp_path / "a").model
    merge(ours)
    assert not adapters(ours)
    merged = theirs.merge_and_unload()
    wanted = merged.state_dict()
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-5, msg=name)
    torch.testing.assert_close(our_logp(ours), their_logp(merged), rtol=0, atol=1e-5)


@pytest.mark.parametrize("targets", ["all", ("q_proj", "down_proj"), r".*\.[01]\.mlp\..*"])
def test_ours_says_the_same_in_peft(base: Path, targets: Any, tmp_path: Path) -> None:
    ours = load_weights(base)
    spec = Spec(3, 7.5, targets, rslora=True)
    attach(ours, spec, seed=1)
    with torch.no_grad():
        for adapter in adapters(ours).values():
            adapter.lora_B.normal_(0.0, 0.1)
    files = {peft_files.CONFIG: peft_files.config_bytes(ours, spec, str(base), 0.0)}
    peft_files.save(ours, tmp_path / "ours", files)
    theirs = peft.PeftModel.from_pretrained(in_transformers(base), tmp_path / "ours").eval()
    sits = {n for n, m in theirs.base_model.model.named_modules() if hasattr(m, "lora_A")}
    assert sits == set(adapters(ours))
    torch.testing.assert_close(our_logp(ours), their_logp(theirs), rtol=0, atol=1e-5)
    back = load_policy(tmp_path / "ours").model
    assert torch.equal(our_logp(back), our_logp(ours))


def test_adapters_fold_into_the_base_one_after_the_other(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "qwen2")
    theirs = peft_made(base, tmp_path / "a").merge_and_unload()
    theirs.save_pretrained(tmp_path / "with_a")
    theirs = peft_made(tmp_path / "with_a", tmp_path / "b", r=2, target_modules=["v_proj"])
    both = (str(tmp_path / "a"), str(tmp_path / "b"))
    ours = frozen_base(Base(str(base), both), "cpu").model
    torch.testing.assert_close(our_logp(ours), their_logp(theirs), rtol=0, atol=1e-5)


def test_fresh_matrices_are_drawn_as_peft_draws_them() -> None:
    """A uniform within ±1/√inputs, B zero: another spread would be another learning rate."""
    model = make("llama3")
    before = our_logp(model)
    attach(model, Spec(64, 32.0), seed=3)
    assert torch.equal(our_logp(model), before)  # nothing changes until B moves
    for name, adapter in adapters(model.requires_grad_(False)).items():
        bound = adapter.lora_A.shape[1] ** -0.5
        assert float(adapter.lora_A.abs().max()) <= bound, name
        assert float(adapter.lora_A.std()) == pytest.approx(bound / 3**0.5, rel=0.05)
        assert not adapter.lora_B.any()


# --- bad input ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen2's, with its base beside it."""
    folder = tmp_path_factory.mktemp("stored")
    peft_made(base_folder(folder / "base", "qwen2"), folder / "a")
    return folder / "a"


def changed(stored: Path, folder: Path, **settings: Any) -> Path:
    raw = json.loads((stored / peft_files.CONFIG).read_text())
    folder.mkdir()
    (folder / peft_files.CONFIG).write_text(json.dumps(raw | settings))
    save_file(load_file(stored / peft_files.TENSORS), folder / peft_files.TENSORS)
    return folder


SIZES = layer_sizes(make("qwen2"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, r"not done here: use_dora=True.*merge_and_unload"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern="),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern="),
        ({"layer_replication": [[0, 2]]}, "layer_replication="),
        ({"something_new": {"x": 1}}, "not done here: something_new="),
        ({"bias": "all"}, "trains biases"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'; LORA is what runs here"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base as well"),
        ({"r": 8}, r"lora_A.weight of .* has shape \(4, 80\), .* rank 8 needs \(8, 80\)"),
        ({"r": 0}, "r is 0, and must be a whole number from 1 to"),
        ({"r": None}, "has no r: it is incomplete"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(
    settings: dict[str, Any], said: str, stored: Path, tmp_path: Path
) -> None:
    folder = changed(stored, tmp_path / "changed", **settings)
    with pytest.raises(ModelError, match=said):
        peft_files.read(folder, SIZES)


def test_an_adapter_for_another_base_is_named(stored: Path) -> None:
    with pytest.raises(ModelError) as caught:
        peft_files.read(stored, layer_sizes(make("smollm2")))
    said = str(caught.value)
    assert "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight" in said
    assert "has shape (48, 4)" in said and "needs (72, 4)" in said
    assert f"It was made for {str(stored.parent / 'base')!r}" in said and "model.path" in said
    fewer = {name: sizes for name, sizes in SIZES.items() if ".layers.2." not in name}
    with pytest.raises(ModelError, match=r"is for model\.layers\.2\.\S+: this model has none such"):
        peft_files.read(stored, fewer)


def test_folders_that_are_no_adapter(stored: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no adapter .*nowhere.*adapter_config\.json"):
        peft_files.read(tmp_path / "nowhere", SIZES)
    with pytest.raises(ModelError, match=r"whole model, not an adapter. Set model.path"):
        peft_files.read(stored.parent / "base", SIZES)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        peft_files.read(tmp_path / "empty", SIZES)
    (tmp_path / "empty" / peft_files.CONFIG).write_text("{")
    with pytest.raises(ModelError, match="can't be read"):
        peft_files.read(tmp_path / "empty", SIZES)
    with pytest.raises(ModelError, match=r"is an adapter, not a model. Set model.path to its base"):
        load_weights(stored)


def test_pickled_tensors_and_a_damaged_record_are_told(stored: Path, tmp_path: Path) -> None:
    folder = changed(stored, tmp_path / "old")
    (folder / peft_files.TENSORS).rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"pickled \.bin tensors, which are never read"):
        peft_files.read(folder, SIZES)
    folder = changed(stored, tmp_path / "record")
    (folder / peft_files.BASE).write_text('{"path": 1}')
    with pytest.raises(ModelError, match="does not say what the adapter's base is"):
        load_policy(folder)


def test_any_adapter_of_peft_can_be_exported_merged(stored: Path, tmp_path: Path) -> None:
    found = export(stored, tmp_path / "merged")
    assert found.max < 1e-4 and found.notes == ("the adapter is folded into its base",)
    base = in_transformers(stored.parent / "base")
    theirs = peft.PeftModel.from_pretrained(base, stored).merge_and_unload().state_dict()
    for name, tensor in load_weights(tmp_path / "merged").state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-5, msg=name)


def test_damaged_tensors_are_named(stored: Path, tmp_path: Path) -> None:
    folder = changed(stored, tmp_path / "half")
    file = folder / peft_files.TENSORS
    whole = load_file(file)
    gone = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    save_file({name: x for name, x in whole.items() if name != gone}, file)
    with pytest.raises(ModelError, match=f"lacks {gone}"):
        peft_files.read(folder, SIZES)
    odd = "base_model.model.lm_head.lora_embedding_A"
    save_file(whole | {odd: torch.zeros(2)}, file)
    with pytest.raises(ModelError, match=f"{odd}.*left out in silence"):
        peft_files.read(folder, SIZES)
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(ModelError, match="cut short or damaged"):
        peft_files.read(folder, SIZES)


def test_an_adapter_on_the_head_is_refused(stored: Path, tmp_path: Path) -> None:
    folder = changed(stored, tmp_path / "head")
    pair = {"A": torch.zeros(4, 48), "B": torch.zeros(97, 4)}
    named = {f"base_model.model.lm_head.lora_{k}.weight": x for k, x in pair.items()}
    save_file(load_file(stored / peft_files.TENSORS) | named, folder / peft_files.TENSORS)
    with pytest.raises(ModelError, match="is for lm_head: the head has no adapter here"):
        peft_files.read(folder, SIZES)


def test_a_base_that_is_gone_or_another_is_told(stored: Path, tmp_path: Path) -> None:
    folder = changed(stored, tmp_path / "moved", base_model_name_or_path="some/where/x")
    with pytest.raises(ModelError, match=r"not here: some/where/x. Name its folder with --base"):
        load_policy(folder)
    found = load_policy(folder, base=stored.parent / "base").model
    assert tensors_of(found).keys() == load_file(stored / peft_files.TENSORS).keys()
