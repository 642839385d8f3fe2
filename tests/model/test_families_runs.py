"""Whole runs of architectures that go through transformers, and of folders that can't be used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cold_start import configured, run_from
from family_zoo import ALPHABET, family_folder, lender
from runs import left_behind, metrics

from groupwise.commands.plan import here
from groupwise.errors import DataError, ModelError
from groupwise.model.cost import parameters
from groupwise.model.formats.checkpoint import load
from groupwise.model.layers.equip import check_precision
from groupwise.plan.estimate import plan
from groupwise.prepare.setup import stored_shape
from groupwise.sync.export import export


@pytest.mark.parametrize("name", ["gemma2", "qwen2_moe"])
def test_it_trains_saves_resumes_and_exports(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = family_folder(name, tmp_path / "model")
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    reward = tmp_path / "mine.py"
    reward.write_text("def f(completion, **_):\n    return sum(map(ord, completion)) % 97 / 97\n")
    changes: dict[str, Any] = {
        "optim__learning_rate": 1e-3,
        "reward__parts": {f"{reward}:f": 1.0},  # differs from answer to answer
        "eval__tasks": 0,
    }
    run_from(model, whole, steps=2, **changes)
    run_from(model, halves, steps=1, **changes)
    run_from(model, halves, steps=2, **changes)
    steps = metrics(whole)[1:]  # the first line is from before them
    assert any(line["groups/dead_share"] < 1 for line in steps)
    for line in steps:
        assert line["mismatch/abs_mean"] < 1e-5
    once, twice = left_behind(whole), left_behind(halves)
    assert once["metrics"] == twice["metrics"]
    weights = [key for key in once if key.endswith("model.safetensors")]
    assert weights and all(once[key] == twice[key] for key in weights)
    latest = whole / "checkpoints" / "latest"
    trained = load(latest).model.state_dict()
    own, told = AutoModelForCausalLM.from_pretrained(latest, output_loading_info=True)
    assert not any(told.values())
    started = load(model).model.state_dict()
    for key, tensor in own.state_dict().items():
        assert torch.equal(tensor, trained[key])
    assert any(not torch.equal(trained[key], started[key]) for key in started)
    done = export(latest.resolve(), tmp_path / "out", torch.float32)
    assert done.max == 0.0
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_plan_counts_what_transformers_would_hold(tmp_path: Path) -> None:
    model = family_folder("qwen2_moe", tmp_path / "model")
    shape = stored_shape(model)
    assert shape is not None
    own = lender("qwen2_moe", vocab_size=len(ALPHABET) + 1)
    assert parameters(shape) == sum(p.numel() for p in own.parameters())
    experts = own.config.num_experts_per_tok / own.config.num_experts
    layers = own.model.layers.named_parameters()
    active = sum(
        p.numel() * (experts if ".experts." in key else 1) for key, p in layers if p.dim() >= 2
    )
    assert shape.per_token == active
    config = configured(model)
    made = plan(config, here(config))
    assert made.peak > parameters(shape) * 16 and "qwen2_moe runs through" in str(made.as_dict())


def test_a_plan_of_what_can_not_run_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    config = configured(str(tmp_path))
    with pytest.raises(ModelError, match="keeps a state besides keys and values"):
        plan(config, here(config))


# --- folders that can't be used -------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> str:
    return family_folder("gpt2", tmp_path_factory.mktemp("sound") / "model")


def damaged(sound: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "damaged"))


def test_a_truncated_shard_is_named_before_anything_is_loaded(sound: str, tmp_path: Path) -> None:
    model = damaged(sound, tmp_path)
    file = model / "model.safetensors"
    whole = file.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 100, 5, 0):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"model\.safetensors can't be read.* fetch it again"):
            run_from(str(model), tmp_path / "run")
    file.unlink()
    places = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(places))
    (model / "model-1.safetensors").write_bytes(whole)
    with pytest.raises(ModelError, match=r"model-2\.safetensors can't be read: it is missing"):
        run_from(str(model), tmp_path / "run")
    (model / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelError, match=r"index\.json can't be read: it is no JSON"):
        run_from(str(model), tmp_path / "run")


def without_eos(model: Path) -> None:
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("eos_token")
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "generation_config.json").write_text("{}")
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(raw | {"eos_token_id": None}))


def test_a_tokenizer_without_an_end_is_refused_unless_strings_stop_it(
    sound: str, tmp_path: Path
) -> None:
    model = damaged(sound, tmp_path)
    without_eos(model)
    with pytest.raises(ModelError, match=r'no EOS.*"eos_token" to tokenizer_config\.json'):
        run_from(str(model), tmp_path / "run")
    run_from(str(model), tmp_path / "stopped", steps=1, engine__stop=["?"])


def test_messages_without_a_template_or_with_two_are_refused(sound: str, tmp_path: Path) -> None:
    model = damaged(sound, tmp_path)
    data = tmp_path / "chat.jsonl"
    row = {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}
    data.write_text(json.dumps(row) + "\n")
    asked: dict[str, Any] = {"data__train": str(data), "eval__tasks": 0}
    with pytest.raises(DataError, match=r"Row 0: The model has no chat template.*chat_template"):
        run_from(str(model), tmp_path / "run", **asked)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ messages[0].content }}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    with pytest.raises(DataError, match="hold different chat templates"):
        run_from(str(model), tmp_path / "run", **asked)


def test_a_precision_that_the_device_can_not_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: Any, **__: Any) -> None:
        raise RuntimeError("addmm_impl not implemented for 'BFloat16'\nand so on")

    check_precision("cpu", "bfloat16")
    monkeypatch.setattr(torch, "mm", lacking)
    with pytest.raises(ModelError, match=r"cpu can't compute in bfloat16 .*model\.dtype=float32"):
        check_precision("cpu", "bfloat16")
