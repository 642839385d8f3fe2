"""Plain Hugging Face folders: the same bits out as in, whole or not at all, nothing in silence."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from model_zoo import CONFIGS, all_logits, make, sequences
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from groupwise.errors import ModelError
from groupwise.model.formats import checkpoint
from groupwise.model.formats.checkpoint import load, load_weights, save
from groupwise.model.layers.transformer import Transformer
from groupwise.runfiles import whole


def companions() -> dict[str, bytes]:
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": b'{"eos_token": "w2", "chat_template": "{{ messages }}"}',
        "generation_config.json": b'{"eos_token_id": [2, 5], "temperature": 0.6}',
        "chat_template.jinja": b"{{ messages[0].content }}",
        "special_tokens_map.json": b'{"eos_token": "w2"}',
    }


def same(a: Transformer, b: Transformer) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_and_loaded_it_is_the_same_to_the_bit(name: str, tmp_path: Path) -> None:
    model, files = make(name), companions()
    save(model, tmp_path / "out", files)
    again = load(tmp_path / "out")
    assert same(model, again.model) and again.model.config == model.config
    for file, content in files.items():
        assert (tmp_path / "out" / file).read_bytes() == content == again.files[file]
    assert again.tokenizer.eos_ids == (2, 5)
    assert not list(tmp_path.glob(".*"))


def test_shards_with_an_index(tmp_path: Path) -> None:
    model = make("qwen3")
    save(model, tmp_path / "out", {}, shard_bytes=50_000)
    index = json.loads((tmp_path / "out" / checkpoint.INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in model.state_dict().values())
    assert all((tmp_path / "out" / s).stat().st_size < 60_000 for s in shards)
    assert same(model, load_weights(tmp_path / "out"))
    (tmp_path / "out" / shards[1]).unlink()
    with pytest.raises(ModelError, match=f"{shards[1]} can't be read"):
        load_weights(tmp_path / "out")


@pytest.mark.parametrize("name", ["smollm2", "qwen2", "qwen3", "mistral", "llama3"])
@pytest.mark.parametrize("shard_bytes", [2**30, 50_000])
def test_transformers_loads_the_folder(name: str, shard_bytes: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, rows = make(name), sequences([9, 4])
    save(model, tmp_path / "out", {}, shard_bytes=shard_bytes)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.float32
    with torch.no_grad():
        expected = torch.cat([theirs(row[None]).logits[0] for row in rows])
        assert (all_logits(model, rows) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_a_folder_of_transformers_is_loaded(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save(make(name), tmp_path / "mine", {})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    assert same(make(name), load_weights(tmp_path / "theirs"))


def test_precision_is_chosen_at_both_ends(tmp_path: Path) -> None:
    model = make("qwen2")
    save(model, tmp_path / "half", {}, dtype=torch.bfloat16)
    raw = json.loads((tmp_path / "half" / "config.json").read_text())
    assert raw["torch_dtype"] == "bfloat16"
    stored = load_weights(tmp_path / "half")
    assert {x.dtype for x in stored.parameters()} == {torch.bfloat16}
    wide = load_weights(tmp_path / "half", dtype=torch.float32)
    assert same(wide, make("qwen2").to(torch.bfloat16).to(torch.float32))
    assert all(x.requires_grad for x in wide.parameters())


def test_the_configuration_that_came_with_the_model_is_carried_over(tmp_path: Path) -> None:
    raw = CONFIGS["qwen2"] | {"pad_token_id": 3, "_name_or_path": "some/where", "dtype": "float16"}
    save(make("qwen2"), tmp_path / "out", {"config.json": json.dumps(raw).encode()})
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["pad_token_id"] == 3 and written["_name_or_path"] == "some/where"
    assert written["torch_dtype"] == "float32" and "dtype" not in written


def test_adapters_are_not_written_among_the_weights(tmp_path: Path) -> None:
    model = make("llama2")
    model.model.layers[0].mlp.up_proj.adapter = torch.nn.Linear(48, 80)  # type: ignore
    save(model, tmp_path / "out", {})
    assert (
        load_file(tmp_path / "out" / checkpoint.SINGLE).keys() == make("llama2").state_dict().keys()
    )


def spoil(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / checkpoint.SINGLE)
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        tensors.pop(key, None)
        if tensor is not None:
            tensors[key] = tensor
    save_file(tensors, folder / checkpoint.SINGLE, metadata={"format": "pt"})


def test_missing_surplus_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    save(make("llama2"), tmp_path / "out", {})
    good = load_file(tmp_path / "out" / checkpoint.SINGLE)
    head, norm = good["lm_head.weight"], good["model.norm.weight"]
    spoil(tmp_path / "out", lm_head__weight=None)
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight"):
        load_weights(tmp_path / "out")
    spoil(tmp_path / "out", lm_head__weight=head, model__extra__weight=norm)
    with pytest.raises(ModelError, match=r"holds 'model\.extra\.weight'"):
        load_weights(tmp_path / "out")
    spoil(tmp_path / "out", model__extra__weight=None, model__norm__weight=norm[:-1].clone())
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(47,\).*\(48,\)"):
        load_weights(tmp_path / "out")
    rope = "model__layers__0__self_attn__rotary_emb__inv_freq"
    spoil(tmp_path / "out", model__norm__weight=norm, **{rope: norm.clone()})
    assert same(make("llama2"), load_weights(tmp_path / "out"))


def test_a_second_copy_of_a_tied_head_must_be_a_copy(tmp_path: Path) -> None:
    model = make("smollm2")
    save(model, tmp_path / "out", {})
    embedding = model.head_weight.detach()
    spoil(tmp_path / "out", lm_head__weight=embedding.clone())
    assert same(model, load_weights(tmp_path / "out"))
    spoil(tmp_path / "out", lm_head__weight=embedding + 1)
    with pytest.raises(ModelError, match="differs from the embedding"):
        load_weights(tmp_path / "out")


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("No space left")])
@pytest.mark.parametrize(
    ("where", "call"), [(checkpoint, "write_tensors"), (whole, "_sync"), (whole, "_put")]
)
def test_a_failed_save_leaves_the_old_folder_untouched(
    error: Exception, where: ModuleType, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make("llama2", seed=1)
    save(old, tmp_path / "out", companions())

    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(where, call, full)
    with pytest.raises(ModelError, match="No space left"):
        save(make("llama2", seed=2), tmp_path / "out", companions(), replace=True)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert same(old, load(tmp_path / "out").model)


def test_an_existing_folder_is_replaced_only_when_asked(tmp_path: Path) -> None:
    save(make("llama2", seed=1), tmp_path / "out", {})
    with pytest.raises(ModelError, match="exists already"):
        save(make("llama2", seed=2), tmp_path / "out", {})
    # What a process killed in the middle leaves behind does not disturb the next one.
    (tmp_path / ".out.0a1b2c3d.partial").mkdir()
    (tmp_path / ".out.0a1b2c3d.partial" / "junk").write_text("x")
    save(make("llama2", seed=2), tmp_path / "out", {}, replace=True)
    assert same(make("llama2", seed=2), load_weights(tmp_path / "out"))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "junk").exists()


def test_loaded_weights_do_not_hang_on_the_file(tmp_path: Path) -> None:
    save(make("llama2"), tmp_path / "out", {})
    model = load_weights(tmp_path / "out")
    file = tmp_path / "out" / checkpoint.SINGLE
    file.write_bytes(bytes(file.stat().st_size))
    assert same(make("llama2"), model)


def test_what_is_no_model_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no id of a model on a hub.*hf download"):
        load("models/HuggingFaceTB/SmolLM2-135M")
    with pytest.raises(ModelError, match=r"config\.json can't be read"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama2"]))
    with pytest.raises(ModelError, match="no safetensors weights"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pickled"):
        load(tmp_path)
    with pytest.raises(ModelError, match=r"config\.json is a file"):
        load(tmp_path / "config.json")
    (tmp_path / checkpoint.SINGLE).write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(ModelError, match="cut short or damaged"):
        load(tmp_path)


def test_weights_are_as_readable_as_the_folder_they_lie_in(tmp_path: Path) -> None:
    save(make("llama2"), tmp_path / "model", {})
    allowed = (tmp_path / "model").stat().st_mode & 0o666
    assert (tmp_path / "model" / "model.safetensors").stat().st_mode & 0o777 == allowed
