"""A configuration over several GPUs: bytes and seconds by arithmetic, from sizes that are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from real_shapes import SEVEN

from groupwise.cli import main
from groupwise.commands.plan import named_gpu
from groupwise.config import load
from groupwise.model import cost, room
from groupwise.model.config import ModelConfig
from groupwise.parallel.started import ranks_here
from groupwise.plan.spread import Split, way
from groupwise.prepare.setup import demand_of
from groupwise.prepare.sizes import Prompts

H100 = named_gpu("H100")
# Qwen2.5-32B and 72B
THIRTY = replace(SEVEN, hidden_size=5120, intermediate_size=27648, num_layers=64, num_heads=40,
                 num_kv_heads=8)  # fmt: skip
SEVENTY = replace(SEVEN, hidden_size=8192, intermediate_size=29568, num_layers=80, num_heads=64,
                  num_kv_heads=8)  # fmt: skip
PROMPTS = Prompts(200, 300, "as given")


def settings(**changes: Any) -> Any:
    base = {"recipe": "dr_grpo", "model.dtype": "bfloat16", "model.device": "cuda",
            "recipe.aggregation.length": 1024,
            "prompts_per_step": 64, "group_size": 16, "engine.max_tokens": 1024}  # fmt: skip
    return load(base | {key.replace("__", "."): x for key, x in changes.items()})


@pytest.mark.parametrize(
    ("shape", "gpus", "billions", "shards"),
    [(SEVEN, 8, 7.6, 15e9), (THIRTY, 8, 32.8, 66e9), (SEVENTY, 8, 72.7, 145e9),
     (THIRTY, 16, 32.8, 33e9), (SEVENTY, 64, 72.7, 18e9)],
)  # fmt: skip
def test_sixteen_bytes_a_parameter_are_shared_by_the_gpus(
    shape: ModelConfig, gpus: int, billions: float, shards: float
) -> None:
    assert cost.parameters(shape) / 1e9 == pytest.approx(billions, abs=0.06)
    made = way(settings(), H100, shape, PROMPTS, 1024, Split(gpus, 0))
    assert made.learner["shards"] == 16 * cost.parameters(shape) // gpus
    assert made.learner["shards"] == pytest.approx(shards, rel=0.02)
    assert made.sync_bytes == 2 * cost.parameters(shape)
    block = cost.held_weights(shape) // shape.num_layers
    tables = 2 * shape.vocab_size * shape.hidden_size
    assert made.learner["gathered"] == 2 * (3 * block + 2 * tables)


def test_what_does_not_fit_is_said_and_room_can_be_made() -> None:
    one = way(settings(), H100, SEVENTY, PROMPTS, 1024, Split(16, 0))
    assert one.fits is False and not one.slots
    assert one.binds == "no sequence fits beside the weights of the GPUs that sample"
    apart = way(settings(optim__recompute=True), H100, SEVENTY, PROMPTS, 1024, Split(64, 16, 8))
    assert apart.fits and apart.split.servers == 2 and apart.split.learning == 48
    assert apart.sampler["weights"] == 2 * cost.parameters(SEVENTY) // 8
    kept = way(settings(), H100, SEVENTY, PROMPTS, 1024, Split(64, 16, 8))
    assert kept.learner["activations"] > 4 * apart.learner["activations"]
    offloaded = way(settings(optim__offload=True), H100, THIRTY, PROMPTS, 1024, Split(16, 8, 2))
    whole = way(settings(), H100, THIRTY, PROMPTS, 1024, Split(16, 8, 2))
    assert 2 * offloaded.learner["shards"] == whole.learner["shards"]
    assert offloaded.host == 8 * cost.parameters(THIRTY)  # eight ranks of one machine hold it all
    lora = way(settings(adapter__rank=16), H100, THIRTY, PROMPTS, 1024, Split(16, 8, 2))
    assert lora.learner["shards"] < 1e9 and lora.learner["base"] == cost.parameters(THIRTY) * 2 // 8


def test_more_gpus_learn_and_sample_in_less_time() -> None:
    few, many = (way(settings(), H100, SEVEN, PROMPTS, 1024, Split(n, 0)) for n in (4, 8))
    assert few.seconds is not None and many.seconds is not None
    assert few.seconds["update"] == pytest.approx(2 * many.seconds["update"], rel=0.01)
    assert few.seconds["rollout"] > many.seconds["rollout"] > few.seconds["rollout"] / 2
    assert many.overlapped is None
    apart = way(settings(), H100, SEVEN, PROMPTS, 1024, Split(8, 4))
    assert apart.step is not None and apart.overlapped is not None
    assert apart.step / 2 <= apart.overlapped < apart.step
    # On more than one machine weights go over slower links.
    across = way(settings(), H100, SEVEN, PROMPTS, 1024, Split(16, 0))
    assert across.seconds is not None
    assert across.seconds["sync"] == pytest.approx(9 * many.seconds["sync"])


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "seven"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SEVEN.to_hf()))
    return str(folder)


def test_the_command_prints_the_best_way_and_says_that_nothing_was_measured(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", f"model.path={model}", "recipe=dr_grpo", "recipe.aggregation.length=512",
             "engine.max_tokens=512", "--gpu", "H100"]  # fmt: skip
    assert main([*words, "--gpus", "8"]) == 0
    said = capsys.readouterr().out
    assert "7.6B parameters, on 8 x H100" in said and "by arithmetic: nothing of this" in said
    assert "sent to each sampling GPU" in said and "other ways" in said
    assert main([*words, "--gpus", "8", "--sampling", "2", "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    assert {each["split"]["sampling"] for each in ways} == {2}
    assert ways[0]["fits"] and ways == sorted(
        ways, key=lambda x: (not x["fits"], x["step_seconds"])
    )
    assert main([*words, "--gpus", "1"]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert main([*words, "--gpus", "0"]) == 2
    assert main([*words, "--gpus", "2", "--sampling", "2"]) == 2
    assert "some must learn" in capsys.readouterr().err
    assert main(["plan", "model.device=cpu", "--gpus", "2"]) == 2
    assert "name one with --gpu" in capsys.readouterr().err


def test_a_rank_asks_for_its_part_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """7B fits eight GPUs of 80 GB, and not one: what is checked before loading knows of ranks."""
    config = settings()
    alone = demand_of(config, SEVEN, training=True)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert ranks_here() == 8
    one = demand_of(config, SEVEN, training=True)
    count = cost.parameters(SEVEN)
    assert one.parts()["optimizer moments"] == 8 * count // 8
    assert one.parts()["master weights"] == one.parts()["gradients"] == 4 * count // 8
    assert room.refusal(alone, 80e9) and not room.refusal(one, 80e9)
    assert demand_of(config, SEVEN, training=False).ranks == 1  # sampling alone is not shared
    less = demand_of(settings(optim__offload=True), SEVEN, training=True).parts()
    assert less["optimizer moments"] == 0 and less["master weights"] == 4 * count // 8
    monkeypatch.delenv("WORLD_SIZE")
    less = demand_of(settings(optim__offload=True), SEVEN, training=True).parts()
    assert less["optimizer moments"] == less["master weights"] == 0
