"""What fits into a device: nothing more does, and what is refused comes with what would fit."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from real_shapes import SEVEN, M, S
from runs import left_behind, quiet, small

from groupwise import config as configuration
from groupwise.cli import main
from groupwise.config import load
from groupwise.errors import ConfigError, ModelError
from groupwise.evaluate.evaluate import evaluate_path
from groupwise.model import room
from groupwise.model.config import ModelConfig
from groupwise.model.cost import HALF, active_parameters, cache_bytes, memory, parameters, peak
from groupwise.model.formats.checkpoint import save
from groupwise.model.layers.equip import equip
from groupwise.model.layers.transformer import Transformer
from groupwise.model.room import Demand
from groupwise.optim.roles.reference import Reference
from groupwise.prepare import setup
from groupwise.training.loop import train
from groupwise.training.opening import open_run
from groupwise.watch.display import Display

GiB = 2**30
ON_CPU = {"model.device": "cpu", "model.dtype": "float32"}


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_fits_fits_and_no_more_does(recompute: bool, width: int) -> None:
    demand = Demand(M, 320, 100, recompute=recompute, width=width)
    options = {"slots": 1, "max_tokens": 320, "prompt": 100, "group": 1}
    options |= {"recompute": recompute, "width": width}
    for available in (31 * GiB, 45 * GiB):
        tokens = room.fitting_tokens(demand, available)
        assert peak(memory(M, micro_tokens=tokens, **options)) <= available
        assert peak(memory(M, micro_tokens=tokens + 1, **options)) > available
        assert room.refusal(demand, available) == ""
    assert room.fitting_tokens(demand, 10 * GiB) == 0


def test_automatic_micro_batches() -> None:
    """Up to where a GPU is busy, else a power of two that leaves some room."""
    small, large = Demand(S, 256), Demand(M, 320)
    assert room.automatic_tokens(small, 139 * GiB) == 32_768
    assert room.automatic_tokens(large, 139 * GiB) == 8_192
    assert room.automatic_tokens(large, 79 * GiB) == 8_192
    assert room.automatic_tokens(large, 10 * GiB) == 1  # it would not have come so far
    for demand in (small, large, replace(large, recompute=True)):
        for available in (4 * GiB, 8 * GiB, 33 * GiB, 36 * GiB):
            tokens, fitting = (
                count(demand, available) for count in (room.automatic_tokens, room.fitting_tokens)
            )
            assert tokens.bit_count() == 1 and tokens <= max(fitting, 1)
    assert room.automatic_tokens(large, 36 * GiB) < room.automatic_tokens(
        replace(large, recompute=True), 36 * GiB
    )


def test_a_mixture_of_which_a_token_meets_little_takes_large_micro_batches() -> None:
    experts = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 256}
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    limit = {"max_position_embeddings": 4096}
    shape = ModelConfig.from_hf(
        {"model_type": "qwen3_moe", "vocab_size": 65536, **sizes, **heads, **limit, **experts}
    )
    assert active_parameters(shape) < 5e8 < parameters(shape)
    assert room.automatic_tokens(Demand(shape, 256), 139 * GiB) == 32_768


def test_training_that_does_not_fit_is_told_with_what_would() -> None:
    reference = Reference.size(load(recipe="grpo"), HALF)
    demand = Demand(SEVEN, 512, 100, roles=(reference,))
    why = room.refusal(demand, 80 * GiB)
    least = demand.least / GiB
    assert f"Training a model of 7.6B parameters takes at least {least:.1f} GiB (" in why
    for part in ("weights 14.2", "master weights 28.4", "optimizer moments 56.7", "reference 14.2"):
        assert f"{part} GiB" in why
    assert "gradients 28.4 GiB, a micro-batch of 612 tokens" in why
    assert "a cache for 612 tokens 33.5 MiB" in why and "80.0 GiB are free" in why
    # Only what helps is offered: to train all of them, the weights are too many.
    assert why.endswith(
        "What would fit: optim.offload=true; adapter.rank=16 (LoRA); a dense model of about 4.2B "
        "parameters or fewer."
    )
    assert (
        "What would fit: a recipe without a reference; optim.offload=true; adapter.rank=16 (LoRA); "
        "a dense" in room.refusal(demand, 134 * GiB)
    )


def test_a_reference_that_is_an_average_holds_four_bytes_more_a_weight() -> None:
    """`Reference` keeps the average of half-precision weights in float32 beside them."""

    def demand(update: str, width: int = HALF) -> Demand:
        role = Reference.size(load(recipe="grpo", **{"reference.update": update}), width)
        return Demand(M, 320, roles=(role,), width=width)

    frozen, average = demand("frozen"), demand("ema:0.99")
    assert average.least - frozen.least == 4 * parameters(M)
    assert demand("ema:0.99", 4).least == demand("frozen", 4).least
    assert "What would fit: reference.update=frozen; a recipe without" in room.refusal(
        average, frozen.least
    )
    named = {"recipe": "grpo", "reference.update": "ema:0.99", "model.dtype": "bfloat16"}
    assert setup.demand_of(load(**named), M, training=True).roles == average.roles
    made = Transformer(TINY).initialise(torch.Generator().manual_seed(0)).to(torch.bfloat16)
    kept = Reference(made, "ema:0.9").state()
    assert sum(x.nbytes for x in kept.values()) == 4 * parameters(TINY)


def test_what_is_offered_instead_fits() -> None:
    demand = Demand(M, 30_000, 100)
    why = room.refusal(demand, 48 * GiB)
    assert "optim.recompute=true;" in why and "bfloat16" not in why and "reference" not in why
    assert replace(demand, recompute=True).least <= 48 * GiB
    offered = int(why.partition("engine.max_tokens=")[2].split()[0])
    assert replace(demand, max_tokens=offered).least <= 48 * GiB
    assert replace(demand, max_tokens=offered + 1).least > 48 * GiB


def test_sampling_needs_weights_and_a_cache() -> None:
    demand = Demand(SEVEN, 20_000, 100, training=False, width=4)
    assert demand.least == 4 * parameters(SEVEN) + cache_bytes(SEVEN, 1, 20_000, 100, 1, 4)
    assert room.refusal(demand, demand.least) == ""
    why = room.refusal(demand, 24 * GiB)
    assert why.startswith("Sampling from a model of 7.6B parameters takes at least 30.5 GiB (")
    assert "(weights 28.4 GiB, a cache for 20,100 tokens 2.1 GiB), and 24.0 GiB are free" in why
    assert "model.dtype=bfloat16" in why and "recompute" not in why


# --- in a run -----------------------------------------------------------------------------------

TINY = ModelConfig(
    family="llama", vocab_size=300, hidden_size=32, intermediate_size=64, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=8, max_positions=64, tied=True,
)  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine whose GPU has as much memory as a test says; nothing can run on it."""
    found = SimpleNamespace(bytes=10**12, loaded=False)

    def loaded(*args: Any, **options: Any) -> None:
        found.loaded = True
        raise ModelError("loaded")

    monkeypatch.setattr(setup, "device_bytes", lambda device: found.bytes)
    monkeypatch.setattr(setup, "check_device", lambda name: None)
    monkeypatch.setattr(setup, "check_precision", lambda device, dtype: None)
    monkeypatch.setattr("groupwise.model.policy.load", loaded)
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    made = Transformer(TINY).initialise(torch.Generator().manual_seed(0))
    save(made, tmp_path / "model", {})
    return tmp_path / "model"


def asked(model: Path, **changes: Any) -> configuration.Config:
    named = {"model__path": str(model), "model__device": "cuda", "model__dtype": "bfloat16"}
    return small(**(named | changes))


def test_a_model_is_refused_before_its_weights_are_read(
    gpu: SimpleNamespace, model: Path, tmp_path: Path
) -> None:
    config = asked(model)
    least = setup.demand_of(config, TINY, training=True).least
    gpu.bytes = least - 1
    with pytest.raises(ModelError, match=r"Training a model of 0M.*What would fit: .*parameters"):
        train(config, tmp_path / "run", quiet())
    assert not gpu.loaded
    gpu.bytes = least
    with pytest.raises(ModelError, match="loaded"):
        train(config, tmp_path / "run", quiet())


def test_the_command_line_says_so(
    gpu: SimpleNamespace, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.bytes = 1000
    where = [f"model.path={model}", "model.device=cuda", "model.dtype=bfloat16"]
    assert main(["train", *where, "--run", str(tmp_path / "run")]) == 2
    assert "What would fit" in capsys.readouterr().err
    assert main(["eval", str(model), *where]) == 2
    assert "error: Sampling from" in capsys.readouterr().err and not gpu.loaded


def test_evaluating_asks_for_less_than_training(gpu: SimpleNamespace, model: Path) -> None:
    config = asked(model)
    gpu.bytes = parameters(TINY) * 2 + cache_bytes(TINY, 1, 4, 1, 1, 2)
    assert gpu.bytes < setup.demand_of(config, TINY, training=True).least / 4
    with pytest.raises(ModelError, match="loaded"):
        evaluate_path(model, config)
    gpu.bytes -= 1
    with pytest.raises(ModelError, match="Sampling from a model"):
        evaluate_path(model, config)


def test_what_can_not_be_read_is_left_to_loading(gpu: SimpleNamespace, tmp_path: Path) -> None:
    gpu.bytes = 0
    with pytest.raises(ModelError, match="loaded"):
        train(asked(tmp_path / "nowhere"), tmp_path / "run", quiet())


def test_sizes_of_a_gguf_file_without_its_weights(
    gpu: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", torch.zeros(300, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(
        "groupwise.model.formats.gguf.GGUFFile.tensor", None
    )  # no weight is looked at
    found = setup.stored_shape(file)
    assert found == TINY
    assert setup.stored_shape(tmp_path / "none.gguf") is None


def test_a_cpu_refuses_only_an_answer_that_no_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, config = TINY, load(**ON_CPU, **{"engine.max_tokens": 1000})
    needed = 2 * 2 * 2 * 8 * 4 * 1001  # layers, keys and values, heads, width, bytes, tokens
    monkeypatch.setattr(setup, "device_bytes", lambda device: needed)
    setup.check_answer(config, shape)  # although training takes more
    monkeypatch.setattr(setup, "device_bytes", lambda device: needed - 1)
    with pytest.raises(
        ConfigError, match=r"max_tokens=1000: keys and values.*has 250.2 KiB in all"
    ):
        setup.check_answer(config, shape)
    monkeypatch.setattr(setup, "device_bytes", lambda device: 100)
    with pytest.raises(ConfigError, match="keys and values"):
        train(small(), tmp_path / "run", quiet())


# --- micro-batches ------------------------------------------------------------------------------


def test_automatic_micro_batches_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert setup.micro_tokens_of(load(**ON_CPU), M) == 1024
    assert setup.micro_tokens_of(load(**{"optim.micro_tokens": 7}), M) == 7
    monkeypatch.setattr(setup, "device_bytes", lambda device: 33 * GiB)
    on_gpu = {"model.device": "cuda:1", "model.dtype": "bfloat16", "recipe": "dr_grpo"}
    plain = setup.micro_tokens_of(load(**on_gpu), M)
    held = setup.micro_tokens_of(load(**{**on_gpu, "recipe": "grpo"}), M)
    saved = setup.micro_tokens_of(load(**on_gpu, **{"optim.recompute": True}), M)
    assert 1 < held < plain < saved == 8192
    assert setup.micro_tokens_of(load(**on_gpu, **{"optim.micro_tokens": 7}), M) == 7


def test_the_resolved_configuration_keeps_what_was_asked(tmp_path: Path) -> None:
    told = io.StringIO()
    train(small(steps=1), tmp_path / "run", Display(told, live=False))
    assert "micro-batches of 1,024 tokens (automatic)" in told.getvalue()
    assert "micro_tokens = 0  #" in (tmp_path / "run" / "config.toml").read_text()
    values = left_behind(tmp_path / "run")["values"]
    assert values["micro_tokens"] == values["micro_tokens_asked"] == 1024


def test_resuming_an_automatic_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that ran out of memory stays smaller; another device has a size of its own."""
    with open_run(small(), tmp_path / "run", quiet()) as opened:
        opened.parts.learner._halve(MemoryError())
        opened.keeper.save()
    with open_run(small(), tmp_path / "run", quiet()) as opened:
        assert opened.parts.learner.micro_tokens == 512
        opened.keeper.save()
    monkeypatch.setattr(room, "CPU_TOKENS", 2048)
    with open_run(small(), tmp_path / "run", quiet()) as opened:
        assert opened.parts.learner.micro_tokens == 2048


# --- which arithmetic ---------------------------------------------------------------------------


def test_float32_on_a_gpu_is_told_that_plain_pytorch_runs() -> None:
    there = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    model = SimpleNamespace(head_weight=there)
    (told,) = equip(model, exact=False)  # type: ignore[arg-type]
    assert "no kernels: they are for bfloat16, and model.dtype is float32" in told
    assert "Plain PyTorch runs instead" in told and model.ops.name == "plain"
    with pytest.raises(ModelError, match=r"engine.exact needs kernels.*engine\.exact=false"):
        equip(model, exact=True)  # type: ignore[arg-type]


def test_exact_mode_on_a_cpu_ends_before_a_model_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "engine.exact=true", "--run", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("groupwise: error: engine.exact=true is for a GPU in bfloat16")
    assert not (tmp_path / "run").exists()
    train(small(steps=1), tmp_path / "run", quiet())
    assert main(["eval", str(tmp_path / "run"), "engine.exact=true"]) == 2
    assert "engine.exact needs kernels that can't be used here" in capsys.readouterr().err


def test_a_device_with_a_number_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton starts its kernels on the current device, not on that of their tensors."""
    taken: list[str] = []
    monkeypatch.setattr(torch, "zeros", lambda *_, device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for name in ("cpu", "cuda", "cuda:1"):
        setup.check_device(name)
    assert taken == ["cuda:1"]
