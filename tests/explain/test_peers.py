"""Configurations of other tools: what is read of them, and that the recipe computes their loss."""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise import TokenBatch, batch_phase, token_phase
from groupwise.cli import main
from groupwise.config import load
from groupwise.errors import RecipeError
from groupwise.explain.peers.reading import read
from groupwise.explain.peers.translate import translated, translation_text

LENGTHS = (3, 1, 4, 2)
REWARDS = (1.0, 0.0, 0.25, 0.0)
BATCHES = "data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=4"


def one(tmp_path: Path, name: str, text: str) -> dict[str, Any]:
    path = tmp_path / name
    path.write_text(text, "utf-8")
    (answer,) = translated(path)
    return answer


def trl(tmp_path: Path, arguments: str) -> dict[str, Any]:
    return one(tmp_path, "train.py", f"from trl import GRPOConfig\nx = GRPOConfig({arguments})\n")


def verl(tmp_path: Path, arguments: str) -> dict[str, Any]:
    return one(tmp_path, "run.sh", f"python3 -m verl.trainer.main_ppo {arguments} $@\n")


# --- the loss is theirs, by a second implementation -------------------------------------------


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of two groups of two rows: new, old, reference, sampler; and the mask."""
    torch.manual_seed(3)
    shape = (len(LENGTHS), max(LENGTHS))
    old = -torch.rand(shape, dtype=torch.float64) - 0.2
    new, ref, sampler = (old + 0.5 * torch.randn(shape, dtype=torch.float64) for _ in range(3))
    mask = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    return new, old, ref, sampler, mask


def ours(answer: dict[str, Any]) -> float:
    recipe = load(None, [f"{k}={v}" for k, v in answer["settings"].items()]).recipe
    new, old, ref, sampler, mask = drawn()
    batch = TokenBatch.build(
        mask_NT=mask,
        group_N=torch.tensor([0, 0, 1, 1]),
        reward_N=torch.tensor(REWARDS, dtype=torch.float64),
        old_logp_NT=old,
        sampler_logp_NT=sampler,
        ref_logp_NT=ref,
    )
    prepared = batch_phase(recipe, batch).batch
    return float(token_phase(recipe, prepared, logp_NT=new).loss)


def advantages(scale: str, eps: float) -> list[float]:
    out = []
    spread = float(torch.tensor(REWARDS, dtype=torch.float64).std())
    for first in (0, 2):
        pair = REWARDS[first : first + 2]
        mean = sum(pair) / 2
        std = math.sqrt(sum((x - mean) ** 2 for x in pair))  # of two, n - 1 is 1
        scales = {"group": std + eps, "batch": spread + eps, "none": 1.0}
        out += [(x - mean) / scales[scale] for x in pair]
    return out


def rows() -> list[tuple[int, list[tuple[float, float, float, float]]]]:
    new, old, ref, sampler, _ = drawn()
    return [
        (i, [tuple(float(x[i, t]) for x in (new, old, ref, sampler)) for t in range(n)])  # type: ignore[misc]
        for i, n in enumerate(LENGTHS)
    ]


def trl_loss(
    kind: str, scale: str, level: str, beta: float, delta: float | None, mode: str, unbiased: bool
) -> float:
    """TRL's loss by the formulas of its documentation, in plain Python, row by row."""
    gain, low, high = advantages(scale, 1e-4), 0.2, 0.28
    total, tokens = 0.0, sum(LENGTHS)
    for i, row in rows():
        shift = sum(n - o for n, o, _, _ in row) / len(row)
        gap = [o - s for _, o, _, s in row]
        product = math.exp(sum(gap))
        inner = 0.0
        for t, (n, o, r, _) in enumerate(row):
            ratio = math.exp(shift if level == "sequence" else n - o)
            if kind == "sapo":
                tau = 1.0 if gain[i] > 0 else 1.05
                loss = -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * gain[i]
            else:
                free = min(ratio, delta) if delta else ratio
                loss = -min(free * gain[i], min(max(ratio, 1 - low), 1 + high) * gain[i])
            loss *= {
                "": 1.0,
                "token_truncate": min(math.exp(gap[t]), 3.0),
                "token_mask": math.exp(gap[t]) * (math.exp(gap[t]) <= 3.0),
                "sequence_truncate": min(product, 3.0),
                "sequence_mask": product * (product <= 3.0),
            }[mode]
            if beta:
                k3 = math.exp(r - n) - (r - n) - 1
                loss += beta * k3 * (ratio if unbiased else 1.0)
            inner += loss
        rows_ = len(LENGTHS)
        total += {
            "grpo": inner / len(row) / rows_,
            "sapo": inner / len(row) / rows_,
            "bnpo": inner / tokens,
            "dapo": inner / tokens,
            "dr_grpo": inner / (rows_ * 512),
            "luspo": inner / rows_,
        }[kind]
    return total


@pytest.mark.parametrize("kind", ["dapo", "grpo", "bnpo", "dr_grpo", "sapo", "luspo"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_trl_s_losses(tmp_path: Path, kind: str, scale: str) -> None:
    answer = trl(tmp_path, f"loss_type='{kind}', scale_rewards='{scale}', epsilon_high=0.28")
    assert answer["exact"]
    wanted = trl_loss(kind, scale, "token", 0.0, None, "", True)
    assert ours(answer) == pytest.approx(wanted, rel=1e-9)


def test_cispo_s_caps_are_absolute_in_one_and_above_one_in_the_other(tmp_path: Path) -> None:
    answer = trl(tmp_path, "loss_type='cispo', epsilon_high=5.0")
    assert answer["settings"]["recipe.gate"] == "weight_cap(cap=5)"
    answer = verl(
        tmp_path,
        "actor_rollout_ref.actor.policy_loss.loss_mode=cispo "
        "actor_rollout_ref.actor.clip_ratio_high=5.0",
    )
    assert answer["settings"]["recipe.gate"] == "weight_cap(cap=6, floor=0.8)"
    answer = verl(
        tmp_path,
        "actor_rollout_ref.actor.policy_loss.loss_mode=cispo "
        "actor_rollout_ref.actor.clip_ratio_low=10 actor_rollout_ref.actor.clip_ratio_high=0.2",
    )
    assert answer["settings"]["recipe.gate"] == "weight_cap(cap=1.2, floor=0)", "ratios are above 0"


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate",
                                  "sequence_mask"])  # fmt: skip
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_trl_s_corrections_and_levels(tmp_path: Path, mode: str, level: str) -> None:
    answer = trl(
        tmp_path,
        f"loss_type='grpo', use_vllm=True, vllm_importance_sampling_mode='{mode}', "
        f"importance_sampling_level='{level}', epsilon_high=0.28",
    )
    wanted = trl_loss("grpo", "group", level, 0.0, None, mode, True)
    assert ours(answer) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("unbiased", [True, False])
def test_trl_s_kl_and_two_sided_clip(tmp_path: Path, unbiased: bool) -> None:
    answer = trl(
        tmp_path, f"beta=0.04, delta=1.4, epsilon_high=0.28, use_bias_correction_kl={unbiased}"
    )
    wanted = trl_loss("dapo", "group", "token", 0.04, 1.4, "", unbiased)
    assert ours(answer) == pytest.approx(wanted, rel=1e-9)


def verl_loss(aggregation: str, low: float, high: float, kl: float, capped: bool) -> float:
    gain = advantages("group", 1e-6)
    total, tokens, count = 0.0, sum(LENGTHS), len(LENGTHS)
    for i, row in rows():
        inner = 0.0
        for n, o, r, s in row:
            ratio = math.exp(n - o)
            loss = max(-gain[i] * ratio, -gain[i] * min(max(ratio, 1 - low), 1 + high))
            if gain[i] < 0:
                loss = min(loss, -gain[i] * 3.0)
            if capped:
                loss *= min(math.exp(o - s), 2.0)
            inner += loss + kl * (math.exp(r - n) - (r - n) - 1)
        total += {
            "token-mean": inner / tokens,
            "seq-mean-token-sum": inner / count,
            "seq-mean-token-mean": inner / len(row) / count,
            "seq-mean-token-sum-norm": inner / count / 64,
        }[aggregation]
    return total


@pytest.mark.parametrize(
    ("aggregation", "capped"),
    list(
        itertools.product(
            ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"],
            [True, False],
        )
    ),
)
def test_verl_s_loss(tmp_path: Path, aggregation: str, capped: bool) -> None:
    arguments = (
        f"algorithm.adv_estimator=grpo actor_rollout_ref.actor.loss_agg_mode={aggregation} "
        "actor_rollout_ref.actor.loss_scale_factor=64 actor_rollout_ref.rollout.n=2 "
        "actor_rollout_ref.actor.clip_ratio_low=0.1 actor_rollout_ref.actor.clip_ratio_high=0.3 "
        "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 "
    ) + ("algorithm.rollout_correction.rollout_is=token" if capped else "")
    answer = verl(tmp_path, arguments)
    assert answer["exact"]
    assert ours(answer) == pytest.approx(verl_loss(aggregation, 0.1, 0.3, 0.01, capped), rel=1e-9)


def test_prime_rl_s_loss_is_the_recipe_of_its_name(tmp_path: Path) -> None:
    answer = one(tmp_path, "rl.toml", "[orchestrator]\nbatch_size = 128\ngroup_size = 8\n")
    assert answer["same_as"] == ["prime_rl"]
    assert answer["settings"]["prompts_per_step"] == 16
    text = "[orchestrator]\nbatch_size = 8\n[trainer.loss]\ntype = 'ipo'\nkl_tau = 0.0\n"
    answer = one(tmp_path, "rl.toml", text)
    assert answer["settings"]["recipe.gate"] == "tv_symmetric(delta=0.1)"
    assert answer["settings"]["recipe.penalty"] == ""


def test_openrlhf_in_its_newer_and_its_older_words(tmp_path: Path) -> None:
    new = one(
        tmp_path,
        "a.sh",
        "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray \\\n"
        "   --algo.advantage.estimator group_norm --algo.kl.init_coef 1e-3 \\\n"
        "   --algo.kl.use_loss --algo.kl.estimator k3 --actor.eps_clip_low_high 0.2 0.27 \\\n"
        "   --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 1024\n",
    )
    old = one(
        tmp_path,
        "b.sh",
        "deepspeed --module openrlhf.cli.train_ppo_ray --advantage_estimator group_norm "
        "--init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 --eps_clip_low_high 0.2 0.27 "
        "--rollout_batch_size 128 --n_samples_per_prompt 8 --train_batch_size 1024\n",
    )
    assert new["settings"] == old["settings"]
    assert new["settings"]["recipe.gate"] == "clip(low=0.2, high=0.27)"
    assert new["settings"]["recipe.penalty"] == "kl(coef=0.001, estimator='k3')"
    assert new["settings"]["recipe.schedule"] == "joint(updates=1)"


# --- what is read of a file -------------------------------------------------------------------


def test_python_is_parsed_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    answer = one(
        tmp_path,
        "train.py",
        f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n"
        "from trl import GRPOConfig\n"
        "G = 4 * 2\n"
        "more = dict(beta=0.04, loss_type='grpo')\n"
        "args = GRPOConfig(num_generations=G, learning_rate=guess(), epsilon=-(-0.3), **more)\n"
        "args.beta = 0.01\n",
    )
    assert not mark.exists()
    settings = answer["settings"]
    assert settings["group_size"] == 8
    assert settings["recipe.gate"] == "clip(low=0.3, high=0.3)"
    assert settings["recipe.penalty"] == "kl_importance(coef=0.01)"
    assert answer["unread"] == {"learning_rate": "guess()"}
    assert not answer["exact"]


def test_a_shell_script_with_variables_arrays_and_comments(tmp_path: Path) -> None:
    answer = one(
        tmp_path,
        "run.sh",
        "set -x\nexport N=5\nKL=${KL:-0.002}\nlength=$((1024 * 8))\n"
        "DATA=(\n  data.train_batch_size=64  # prompts\n)\n"
        'python3 -m verl.trainer.main_ppo "${DATA[@]}" algorithm.adv_estimator=grpo \\\n'
        "  actor_rollout_ref.rollout.n=$N actor_rollout_ref.actor.use_kl_loss=True \\\n"
        "  actor_rollout_ref.actor.kl_loss_coef=${KL} data.max_response_length=$length \\\n"
        "  actor_rollout_ref.actor.ppo_mini_batch_size=16 +trainer.total_training_steps=30 $@\n",
    )
    settings = answer["settings"]
    assert settings["prompts_per_step"] == 64
    assert settings["group_size"] == 5
    assert settings["recipe.penalty"] == "kl(coef=0.002, estimator='k3')"
    assert settings["recipe.schedule"] == "joint(updates=4)"
    assert settings["steps"] == 30
    assert list(answer["unread"]) == ["data.max_response_length"]


def test_defaults_of_variables_within_each_other(tmp_path: Path) -> None:
    answer = one(
        tmp_path,
        "run.sh",
        'BASE=64\nROWS=${ROWS:-"${BASE}"}\n'
        "python3 -m verl.trainer.main_ppo data.train_batch_size=${GIVEN:-${ROWS}}\n",
    )
    assert answer["settings"]["prompts_per_step"] == 64 and not answer["unread"]


def test_yaml_of_both_kinds(tmp_path: Path) -> None:
    nested = "algorithm: {adv_estimator: rloo}\nactor_rollout_ref:\n  rollout: {n: 4}\n"
    answer = one(tmp_path, "ppo.yaml", nested)
    assert answer["settings"]["recipe.advantage"] == "leave_one_out()"
    answer = one(tmp_path, "trl.yaml", "num_generations: 4\nlearning_rate: 2e-6\nbeta: 0.1\n")
    assert answer["settings"]["optim.learning_rate"] == "2e-06"


def test_prime_rl_s_command_reads_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text("[orchestrator]\nbatch_size = 64\ngroup_size = 8\n")
    answer = one(tmp_path, "go.sh", "uv run rl @ rl.toml --trainer.loss.kl-tau 0.01\n")
    assert answer["settings"]["prompts_per_step"] == 8
    assert answer["settings"]["recipe.penalty"] == "drift(coef=0.01)"


def test_what_has_no_form_here_is_named(tmp_path: Path) -> None:
    answer = trl(tmp_path, "num_iterations=4, top_p=0.9, use_adaptive_entropy=True, bf16=True")
    assert {"num_iterations", "top_p, top_k", "use_adaptive_entropy"} <= answer["missing"].keys()
    assert answer["elsewhere"]["bf16"] == "model.dtype"
    assert not answer["exact"]


def test_the_text_is_a_configuration_that_loads(tmp_path: Path) -> None:
    answer = trl(tmp_path, "beta=0.04, max_steps=100, gradient_accumulation_steps=2")
    text = translation_text(answer, 90)
    block = "\n".join(itertools.takewhile(str.strip, text.splitlines()))
    config = load(tomllib.loads(block))
    assert config.steps == 100
    assert str(config.recipe.penalty[0]) == "kl_importance(coef=0.04)"
    assert "Its loss differs from dapo (2503.14476):" in text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {BATCHES}\n")
    assert main(["explain", "--from", str(path)]) == 0
    assert 'recipe.name = "grpo@verl"' in capsys.readouterr().out
    assert main(["explain", "--from", str(path), "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["settings"]["recipe.schedule"] == "joint(updates=2)"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.py", "x = 1\n", "no configuration that is known"),
        ("a.py", "def (\n", "is no Python"),
        ("a.py", "(" * 5000, "is no Python"),
        ("a.yaml", "a: [1\n", "is no YAML"),
        ("a.toml", "a = \n", "is no TOML"),
        ("a.toml", "lr = 1\n", "no configuration that is known"),
        ("a.sh", "echo 'hello\n", "no configuration that is known"),
        ("a.sh", "uv run rl @ gone.toml\n", "neither beside it nor here"),
    ],
)
def test_what_can_t_be_read_is_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError, match=said):
        read(tmp_path / name)
    with pytest.raises(RecipeError, match="can't be read"):
        read(tmp_path / "nowhere.py")


@pytest.mark.parametrize(
    ("arguments", "slot", "written"),
    [
        ("top_entropy_quantile=0.2", "correction", "top_entropy(fraction=0.2)"),
        ("off_policy_mask_threshold=0.01", "correction",
         "negative_sequence_mask(delta=0.01, anchor='old')"),
        ("multi_objective_aggregation='normalize_then_sum'", "advantage",
         "group_zscore_per_part(ddof=1, eps=0.0001), whiten_sequences(ddof=1, eps=0.0001)"),
        ("loss_type='vespo', vespo_k_pos=1.5", "gate",
         "gamma_weight(k_pos=1.5, lambda_pos=3, k_neg=3, lambda_neg=2)"),
    ],
)  # fmt: skip
def test_trl_s_further_parts(tmp_path: Path, arguments: str, slot: str, written: str) -> None:
    answer = trl(tmp_path, arguments)
    assert answer["exact"]
    assert answer["settings"][f"recipe.{slot}"] == written


@pytest.mark.parametrize(
    ("estimator", "paper"),
    [("gdpo", "gdpo"), ("opo", "opo"), ("grpo_passk", "grpo_passk"), ("rloo", "rloo"),
     ("tir_optimal_token_baseline", "otb"), ("gae", "ppo"), ("remax", "remax"),
     ("reinforce_plus_plus", "reinforce_pp")],
)  # fmt: skip
def test_verl_s_estimators(tmp_path: Path, estimator: str, paper: str) -> None:
    given = f"algorithm.adv_estimator={estimator} actor_rollout_ref.rollout.n=4"
    answer = verl(tmp_path, given)
    assert answer["exact"] and answer["paper"]["recipe"] == paper


@pytest.mark.parametrize("mode", ["clip_cov", "kl_cov", "gspo", "sapo", "geo_mean"])
def test_verl_s_policy_losses(tmp_path: Path, mode: str) -> None:
    given = (
        f"algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 "
        f"actor_rollout_ref.actor.policy_loss.loss_mode={mode}"
    )
    answer = verl(tmp_path, given)
    assert answer["exact"]
    if mode == "kl_cov":
        assert answer["settings"]["recipe.penalty"] == "cov_drift(coef=0.1, fraction=0.0002)"


@pytest.mark.parametrize("bypass", [True, False])
def test_verl_s_dppo_is_the_paper_s_in_bypass_mode_alone(tmp_path: Path, bypass: bool) -> None:
    given = (
        "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 "
        "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv "
        f"algorithm.rollout_correction.bypass_mode={bypass}"
    )
    answer = verl(tmp_path, given)
    assert answer["exact"] is bypass
    assert answer["settings"]["recipe.ratio"] == "token(anchor='sampler')"


def test_shapings_of_others(tmp_path: Path) -> None:
    command = "python -m openrlhf.cli.train_ppo_ray --algo.advantage.estimator dr_grpo"
    answer = one(tmp_path, "a.sh", f"{command} --reward.stop_properly_penalty_coef 0.5\n")
    assert answer["settings"]["recipe.shaping"] == "stop_properly(coef=0.5)"
    answer = one(tmp_path, "a.sh", f"{command} --reward.stop_properly_penalty_coef -0.5\n")
    assert answer["settings"]["recipe.shaping"] == "cut_off_reward(reward=-0.5)"
    text = "[orchestrator]\nbatch_size = 8\n[orchestrator.algo.length_penalty]\ntype = 'linear'\n"
    answer = one(tmp_path, "rl.toml", text)
    wanted = "linear_length_penalty(output=0.25, context=0.1, turns=0.1)"
    assert answer["settings"]["recipe.shaping"] == wanted and answer["exact"]
