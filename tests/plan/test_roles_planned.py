"""Plans of recipes with models that learn beside the policy, by hand for 1.5B parameters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from real_shapes import SEVEN, M, S

from groupwise.config import Config, load
from groupwise.model import cost, room
from groupwise.model.adapters.targets import ALPHA, Spec
from groupwise.model.config import ModelConfig
from groupwise.model.cost import Group, RoleSize
from groupwise.model.devices import KNOWN
from groupwise.optim.roles import role_sizes
from groupwise.plan.estimate import Place, advice, assumptions, changes, count
from groupwise.prepare.setup import demand_of
from groupwise.prepare.sizes import Prompts

N = 1_543_714_304  # of M
HEAD = 1536  # of a critic
# Rank 16 on q, o (1536 + 1536), k, v (1536 + 256), gate, up, down (1536 + 8960) of 28 layers.
LORA = 28 * 16 * (2 * 3072 + 2 * 1792 + 3 * 10496)
GiB = 2**30
H200 = next(device for device in KNOWN if device.name == "H200")
PLACE = Place(H200, cpu=False, memory=140e9)
PROMPTS = Prompts(100, 200, "made")


def asked(**changes: Any) -> Config:
    plain = {"recipe": "ppo", "model.dtype": "bfloat16", "model.device": "cuda"}
    return load(plain | {key.replace("__", "."): value for key, value in changes.items()})


def sizes(config: Config) -> dict[str, RoleSize]:
    return {size.name: size for size in role_sizes(config, 2)}


def held(config: Config, shape: ModelConfig = M, width: int = 2) -> dict[str, int]:
    demand = demand_of(config, shape, training=True)
    return cost.held(shape, width, roles=demand.roles, frozen=demand.frozen)


def folder(path: Path, shape: ModelConfig) -> str:
    """A model's folder with its sizes alone: plans read no weights."""
    path.mkdir()
    names = ("vocab_size", "hidden_size", "intermediate_size", "head_dim")
    raw = {name: getattr(shape, name) for name in names} | {
        "model_type": shape.family, "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": shape.max_positions, "tie_word_embeddings": shape.tied,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(raw))
    return str(path)


# --- bytes ------------------------------------------------------------------------------------


def test_a_full_critic_holds_weights_masters_and_moments() -> None:
    """2 + 4 + 8 bytes a weight in bfloat16; its head of one number has no weights to speak of."""
    assert held(asked())["critic"] == 14 * N + 12 * HEAD
    single = asked(model__dtype="float32")
    assert held(single, width=4)["critic"] == 12 * N + 8 * HEAD


def test_an_untied_head_of_the_vocabulary_is_held_and_does_not_learn() -> None:
    every, unread = cost.parameters(SEVEN), 152064 * 3584
    learns = every - unread + 3584
    assert held(asked(), SEVEN)["critic"] == 2 * every + 12 * learns


def test_an_adapter_critic_beside_a_full_policy_has_a_frozen_base_of_its_own() -> None:
    assert LORA == 18_464_768
    assert held(asked(critic__adapter=16))["critic"] == 2 * N + 2 * LORA + 12 * (LORA + HEAD)


def test_beside_an_adapter_the_base_is_shared() -> None:
    both = asked(adapter__rank=16)
    assert held(both)["critic"] == 2 * LORA + 12 * (LORA + HEAD)
    narrow = asked(adapter__rank=16, critic__adapter=8)
    assert held(narrow)["critic"] == LORA + 12 * (LORA // 2 + HEAD)
    assert held(narrow)["weights"] == 2 * N  # once


def test_a_critic_of_another_folder_has_its_size(tmp_path: Path) -> None:
    small = folder(tmp_path / "small", S)
    assert held(asked(critic__start=small))["critic"] == 14 * cost.parameters(S) + 12 * 576
    own = cost.lora(S, Spec(16, ALPHA)).adapter
    adapted = 2 * cost.parameters(S) + 2 * own + 12 * (own + 576)
    assert held(asked(critic__start=small, critic__adapter=16))["critic"] == adapted
    # As much of it learns as of the policy, on a base of its own: the policy's is another model.
    assert held(asked(critic__start=small, adapter__rank=16))["critic"] == adapted


def test_primes_model_is_a_whole_one_beside_the_reference() -> None:
    found = held(asked(recipe="prime"))
    assert (found["prm"], found["reference"]) == (14 * N, 2 * N)


def test_checkpoints_hold_the_critic_in_float32_and_its_moments() -> None:
    made = count(asked(), PLACE, M, PROMPTS, 200)
    without = count(asked(recipe="reinforce_pp"), PLACE, M, PROMPTS, 200)
    assert made.space.whole - without.space.whole == 12 * (N + HEAD)
    assert made.space.best == without.space.best == 2 * N
    lighter = count(asked(critic__adapter=16), PLACE, M, PROMPTS, 200)
    assert lighter.space.whole - without.space.whole == 12 * (LORA + HEAD)


def test_one_model_learns_at_a_time(tmp_path: Path) -> None:
    """Gradients and activations are those of the larger update, never of both."""
    (reference, critic) = (sizes(asked())[name] for name in ("reference", "critic"))
    options: dict[str, Any] = {"slots": 1, "max_tokens": 320, "prompt": 100, "group": 1}
    alone = cost.memory(M, micro_tokens=8192, **options)
    both = cost.memory(M, micro_tokens=8192, roles=(reference, critic), **options)
    for part in ("gradients", "micro-batch"):
        assert both[part] == alone[part]  # a critic like the policy, without its logits
    large = sizes(asked(critic__start=folder(tmp_path / "large", SEVEN)))["critic"]
    beside = cost.memory(M, micro_tokens=8192, roles=(large,), **options)
    learns = cost.parameters(SEVEN) - 152064 * 3584 + 3584
    assert beside["gradients"] == 4 * learns
    assert beside["micro-batch"] == 8192 * cost.activations(large_shape(large))


def large_shape(role: RoleSize) -> ModelConfig:
    assert role.model is not None and role.model.shape is not None
    return role.model.shape


# --- what would fit ---------------------------------------------------------------------------


def test_a_refusal_names_a_lighter_critic_a_smaller_one_and_none() -> None:
    demand = replace(demand_of(asked(), M, training=True), prompt=100, max_tokens=320)
    why = room.refusal(demand, 40 * GiB)
    assert "critic 20.1 GiB" in why
    for offer in ("critic.adapter=16 (LoRA)", "a recipe without a critic (reinforce_pp)"):
        assert f"{offer};" in why
    (critic,) = (role for role in demand.roles if role.name == "critic")
    for lighter in critic.instead.values():
        roles = [lighter if role is critic else role for role in demand.roles]
        assert replace(demand, roles=tuple(filter(None, roles))).least <= 40 * GiB
    smaller = why.partition("critic.start=PATH of a model of about ")[2].partition(" ")[0]
    assert smaller == "720M"
    left = 40 * GiB - replace(demand, roles=tuple(r for r in demand.roles if r is not critic)).least
    assert float(smaller[:-1]) * 1e6 == pytest.approx(left / 14, rel=1e-3)
    # Where adapters learn there is nothing lighter than the shared base.
    adapted = sizes(asked(adapter__rank=16))["critic"]
    assert list(adapted.instead) == ["a recipe without a critic (reinforce_pp)"]


def test_a_plan_that_does_not_fit_offers_an_adapter_critic() -> None:
    tight = replace(PLACE, memory=48e9)
    made = count(asked(engine__max_tokens=320), tight, M, PROMPTS, 320)
    assert not made.fits and "critic.adapter=16" in changes(made)
    assert any(line.startswith("critic.adapter=16: ") for line in advice(made))
    for other in (asked(adapter__rank=16), asked(critic__adapter=4), asked(recipe="grpo")):
        assert "critic.adapter=16" not in changes(count(other, tight, M, PROMPTS, 320))


# --- seconds ----------------------------------------------------------------------------------


def test_the_critics_passes_are_in_the_seconds() -> None:
    """A forward pass without logits to score, three times that to learn; at 59 % of the peak."""
    config = asked(recipe__schedule__updates=1)
    made = count(config, PLACE, M, PROMPTS, 200).seconds
    without = count(asked(recipe="ppo", recipe__auxiliary="", recipe__advantage="return_to_go()",
                          recipe__schedule__updates=1), PLACE, M, PROMPTS, 200).seconds  # fmt: skip
    assert made is not None and without is not None and H200.flops is not None
    groups = [Group(100, [200] * config.group_size)] * config.prompts_per_step
    parts = cost.forward_cost(M, groups)
    one = (parts["layers"].flops + parts["attention"].flops) / (H200.flops * 0.59)
    assert made["critic update"] == pytest.approx(3 * one, rel=1e-6)
    assert made["score"] - without["score"] == pytest.approx(one, rel=1e-6)
    assert made["update"] == without["update"]
    moved = 34 * (N + HEAD) / (H200.bandwidth * 0.5)  # type: ignore[operator]
    assert made["optimizer"] - without["optimizer"] == pytest.approx(moved, rel=1e-6)
    adapted = count(replace(config, critic=replace(config.critic, adapter=16)), PLACE, M, PROMPTS,
                    200).seconds  # fmt: skip
    assert adapted is not None
    assert adapted["critic update"] == pytest.approx(2 / 3 * made["critic update"], rel=1e-6)


def test_steps_in_which_the_critic_learns_alone_are_said() -> None:
    made = count(asked(recipe="vapo"), PLACE, M, PROMPTS, 200)
    assert any("in the first 50 steps the critic learns alone" in x for x in assumptions(made))
