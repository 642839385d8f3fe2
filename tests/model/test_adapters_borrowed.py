"""LoRA on layers that transformers computes: parity with PEFT, runs, export, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cold_start import configured, run_from
from family_zoo import family_folder, image_model, lender, own_logp, packed_logp
from runs import left_behind, metrics
from torch import Tensor

from groupwise.commands.plan import here
from groupwise.errors import ModelError
from groupwise.model.adapters.lora import adapters, attach
from groupwise.model.adapters.peft_files import layers_in
from groupwise.model.adapters.targets import Spec, linear_shapes
from groupwise.model.borrowed.policy import Borrowed
from groupwise.model.cost import lora
from groupwise.model.formats.checkpoint import load_weights, stored_shape
from groupwise.model.layers.linear import layer_sizes
from groupwise.model.policy import load_policy
from groupwise.plan.estimate import plan
from groupwise.sync.export import export

peft = pytest.importorskip("peft")


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(17, (length,), generator=generator) for length in (5, 23, 40)]


def adapted(name: str, model: str, rank: int, targets: Any, path: Path) -> Any:
    """transformers' model with a random adapter of PEFT's, which is also saved."""
    theirs = lender(name, vocab_size=17)
    theirs.name_or_path = model
    config = peft.LoraConfig(
        r=rank, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", bias="none"
    )
    made = peft.get_peft_model(theirs, config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in sorted(made.named_parameters()):
            if "lora_" in key:
                parameter.normal_(0.0, 0.1, generator=generator)
    made.save_pretrained(path)
    return made.eval()


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize(
    "name, targets",
    [
        ("gemma3_text", ["q_proj", "down_proj"]),
        ("phi3", ["qkv_proj", "gate_up_proj"]),  # joined in the architecture itself
        ("olmo2", "all-linear"),
        ("gpt_neox", ["query_key_value"]),
        ("gpt2", ["c_attn", "c_proj"]),  # weights lie the other way round
        ("qwen2_moe", ["q_proj", "o_proj"]),
    ],
)
def test_an_adapter_of_peft_s_gives_the_log_probabilities_that_it_gives_there(
    name: str, targets: Any, rank: int, tmp_path: Path
) -> None:
    model = family_folder(name, tmp_path / "model")
    theirs = adapted(name, model, rank, targets, tmp_path / "adapter")
    ours = load_policy(tmp_path / "adapter", base=model).model
    assert isinstance(ours, Borrowed) and adapters(ours)
    for row, found in zip(rows(), packed_logp(ours, rows()), strict=True):
        wanted = own_logp(theirs, row)
        assert torch.allclose(found.double(), wanted, atol=1e-5, rtol=0)
    # And merged: weights, then log-probabilities.
    export(tmp_path / "adapter", tmp_path / "merged", torch.float32, base=model)
    folded = load_policy(tmp_path / "merged").model.state_dict()
    for key, tensor in theirs.merge_and_unload().state_dict().items():
        assert torch.allclose(folded[key], tensor, atol=1e-5, rtol=0), key


def test_a_run_learns_resumes_and_keeps_a_reference_without_a_second_base(tmp_path: Path) -> None:
    model = family_folder("gemma2", tmp_path / "model")
    reward = tmp_path / "mine.py"
    reward.write_text("def f(completion, **_):\n    return sum(map(ord, completion)) % 97 / 97\n")
    changes: dict[str, Any] = {
        "recipe": "grpo",
        "adapter__rank": 2,
        "adapter__targets": ["q_proj", "v_proj"],
        "optim__learning_rate": 1e-2,
        "reward__parts": {f"{reward}:f": 1.0},
        "eval__tasks": 0,
    }
    run_from(model, tmp_path / "whole", steps=2, **changes)
    run_from(model, tmp_path / "halves", steps=1, **changes)
    run_from(model, tmp_path / "halves", steps=2, **changes)
    first, second = metrics(tmp_path / "whole")[1:]
    assert first["kl/ref"] == pytest.approx(0.0, abs=1e-9) and second["kl/ref"] > 0
    assert second["weights/fingerprint"] != first["weights/fingerprint"]
    assert all(line["mismatch/abs_mean"] < 1e-5 for line in (first, second))
    whole, halves = left_behind(tmp_path / "whole"), left_behind(tmp_path / "halves")
    assert whole["metrics"] == halves["metrics"]
    latest = tmp_path / "whole" / "checkpoints" / "latest"
    assert not (latest / "model.safetensors").exists(), "the adapter alone"
    assert (latest / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_all_layers_are_those_that_peft_takes(name: str, tmp_path: Path) -> None:
    model = family_folder(name, tmp_path / "model")
    adapted(name, model, 2, "all-linear", tmp_path / "adapter")
    shape = stored_shape(model)
    assert shape is not None and set(linear_shapes(shape)) == set(layers_in(tmp_path / "adapter"))
    loaded = load_policy(model).model
    assert layer_sizes(loaded) == linear_shapes(shape)
    attach(loaded, Spec(2, 4.0), seed=0)
    assert lora(shape, Spec(2, 4.0)).adapter == sum(
        p.numel() for p in loaded.parameters() if p.requires_grad
    )
    sum(x.sum() for x in packed_logp(loaded, rows())).backward()
    assert all(x.lora_B.grad.any() for x in adapters(loaded).values()), "each takes part"


def test_a_tower_for_images_gets_no_adapter(tmp_path: Path) -> None:
    image_model(tmp_path / "model")
    model = load_weights(tmp_path / "model")
    attach(model, Spec(2, 4.0), seed=0)
    assert adapters(model) and all("language_model" in name for name in adapters(model))


def test_targets_that_it_does_not_have_are_told_with_its_own_names(tmp_path: Path) -> None:
    model = family_folder("phi3", tmp_path / "model")
    with pytest.raises(ModelError, match="gate_up_proj, o_proj, qkv_proj"):
        run_from(model, tmp_path / "run", adapter__rank=2, adapter__targets=["q_proj"])


def test_fewer_bits_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    model = family_folder("phi3", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.quantize=int8 needs groupwise's own layers"):
        run_from(model, tmp_path / "run", adapter__rank=2, model__quantize="int8")


def test_a_plan_counts_its_adapter_roughly(tmp_path: Path) -> None:
    model = family_folder("phi3", tmp_path / "model")
    config = configured(model, adapter__rank=2, adapter__targets=["qkv_proj"])
    assert plan(config, here(config)).peak < plan(configured(model), here(config)).peak
