"""docs/migrate.md: every key is mapped as the error messages map it, and every line of it runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from groupwise.config import load
from groupwise.config.names import ELSEWHERE, NOWHERE
from groupwise.config.values import FIELDS
from groupwise.errors import ConfigError
from groupwise.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "migrate.md").read_text("utf-8")
# All fields of GRPOConfig in TRL 1.16.0.
TRL = """
learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout
cast_lm_head_to_fp32 remove_unused_columns num_generations num_generations_eval
max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of
generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs
chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl
vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host
vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
vllm_max_model_length vllm_tensor_parallel_size beta num_iterations epsilon delta epsilon_high
sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
importance_sampling_level reward_weights multi_objective_aggregation scale_rewards loss_type
mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps
top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max
entropy_coef_delta entropy_target max_tool_calling_iterations vllm_importance_sampling_correction
vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
off_policy_mask_threshold use_bias_correction_kl log_completions log_multimodal
num_completions_to_print log_unique_prompts log_completions_hub_repo
use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
vllm_importance_sampling_cap
""".split()  # noqa: SIM905


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """Cells of all tables, without their heads."""
    cells = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|") and not line.startswith("|---")
    ]
    return [row for row in cells if "`" in row[0]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


KEYS = rows(section("TRL, key by key")) + rows(section("verl, key by key"))
NONE = rows(section("What has no counterpart"))


@pytest.mark.parametrize("row", KEYS, ids=lambda row: row[0])
def test_a_key_is_what_the_error_messages_say(row: list[str]) -> None:
    (ours,) = names(row[1])
    for theirs in names(row[0]):
        leaf = theirs.rpartition(".")[2]
        assert ELSEWHERE.get(leaf) == ours or ours.rpartition(".")[2] == leaf, theirs
        if leaf in ELSEWHERE:
            with pytest.raises(ConfigError, match=re.escape(repr(ours))):
                load({f"nowhere.{leaf}": 1})


def test_what_has_no_counterpart_is_said_alike() -> None:
    said = {name: why for keys, why in NONE for name in names(keys)}
    assert said == NOWHERE
    with pytest.raises(ConfigError, match="no counterpart: the head always sums in float32"):
        load(cast_lm_head_to_fp32=True)


def test_no_key_is_forgotten() -> None:
    mapped = [name.rpartition(".")[2] for row in KEYS for name in names(row[0])]
    page = {*mapped, *NOWHERE, *names(section("Other tools"))}
    assert set(ELSEWHERE) <= page
    assert set(TRL) <= page
    assert not ELSEWHERE.keys() & NOWHERE.keys()
    assert not {*ELSEWHERE, *NOWHERE} & FIELDS.keys()  # no advice against a name of ours


@pytest.mark.parametrize("row", KEYS, ids=lambda row: row[0])
def test_what_it_is_called_here_exists(row: list[str]) -> None:
    """A setting, a slot, or a hyper-parameter that some recipe has."""
    (ours,) = names(row[1])
    if ours in FIELDS or ours == "recipe":
        return
    head, kind, *inner = ours.split(".")
    assert head == "recipe"
    slots = [s for r in RECIPES.values() for s in r.slots() if s.kind == kind]
    assert slots and (not inner or any(inner[0] in dict(s.params) for s in slots)), ours


LOSSES = [(table, row) for table in section("The loss").split("\nverl's") for row in rows(table)]


@pytest.mark.parametrize(("table", "row"), LOSSES, ids=[row[0] for _, row in LOSSES])
def test_every_line_about_the_loss_runs(table: str, row: list[str]) -> None:
    base = "grpo@trl" if "`loss_type`" in table else "grpo@verl"
    for setting in (name for name in names(row[1]) + names(row[2]) if "=" in name and "(" in name):
        if not setting.startswith("recipe."):
            continue
        made = load(None, [f"recipe={base}", setting]).recipe
        _, kind, text = re.fullmatch(r"(recipe)\.(\w+)=(.*)", setting).groups()  # type: ignore[union-attr]
        written = made.text()[kind]
        assert written.startswith(text.partition("(")[0]), written
    (ours,) = names(row[1])
    if ours.startswith("recipe="):
        assert ours.removeprefix("recipe=") in RECIPES


@pytest.mark.parametrize("block", re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))
def test_every_example_loads(block: str) -> None:
    load(tomllib.loads(block))


def test_dialects_that_are_named_exist() -> None:
    named = set(re.findall(r"`(?:recipe=)?(grpo@[\w-]+)", PAGE))
    assert named == {name for name in RECIPES if name.startswith("grpo@")}


def test_the_dialect_is_trl_s_loss_by_hand() -> None:
    """The page's example, on two tokens: clip, bias-corrected KL, token mean."""
    import math

    import torch

    from groupwise import TokenBatch, batch_phase, token_phase

    blocks = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    recipe = load(tomllib.loads(blocks[0])).recipe
    old, ref, new = [-1.0, -2.0], [-1.1, -1.7], [-0.7, -2.1]
    batch = TokenBatch.build(
        mask_NT=torch.ones(2, 1, dtype=torch.bool),
        group_N=torch.tensor([0, 0]),
        reward_N=torch.tensor([1.0, 0.0], dtype=torch.float64),
        old_logp_NT=torch.tensor(old, dtype=torch.float64)[:, None],
        sampler_logp_NT=torch.tensor(old, dtype=torch.float64)[:, None],
        ref_logp_NT=torch.tensor(ref, dtype=torch.float64)[:, None],
    )
    logp_NT = torch.tensor(new, dtype=torch.float64)[:, None]
    found = token_phase(recipe, batch_phase(recipe, batch).batch, logp_NT=logp_NT).loss
    std = math.sqrt(0.5)
    wanted = 0.0
    for advantage, o, r, n in zip((0.5, -0.5), old, ref, new, strict=True):
        ratio = math.exp(n - o)
        gain = advantage / (std + 1e-4)
        wanted -= min(ratio * gain, min(max(ratio, 0.8), 1.2) * gain)
        wanted += 0.04 * ratio * (math.exp(r - n) - (r - n) - 1)
    assert float(found) == pytest.approx(wanted / 2, rel=1e-9)
