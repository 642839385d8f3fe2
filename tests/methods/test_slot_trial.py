"""Slots of one's own, tried on a toy batch: each fault is named before a model is looked for."""

from __future__ import annotations

import warnings
from pathlib import Path

import cold_start
import pytest
from batches import POLICY_RECIPES

from groupwise import recipe
from groupwise.cli import main
from groupwise.errors import RecipeError, RecipeWarning
from groupwise.methods.composition import Recipe
from groupwise.recipes import load_plugin
from groupwise.testing import trial
from groupwise.testing.trial import try_groups, try_pairs, try_slots

SLOTS = """
import torch
from groupwise.losses.pairs import Choice, PairLoss
from groupwise.slots import advantage, aggregation, auxiliary, correction, filter_, gate, pairing
from groupwise.slots import Count, labelling, penalty, preference, ratio, schedule, shaping

def nothing(batch): return torch.zeros_like(batch.mask_NT)
def prepared(batch, params): return {"coefficient_NT": batch.ones_NT / batch.mask_NT.sum()}

@gate(equation="x")
def trial_plain(log_ratio_NT, advantage_NT, batch):
    return log_ratio_NT.exp() * advantage_NT, nothing(batch)
@gate(equation="x")
def trial_detached(log_ratio_NT, advantage_NT, batch):
    return log_ratio_NT.detach().exp() * advantage_NT, nothing(batch)
@gate(equation="x")
def trial_nan(log_ratio_NT, advantage_NT, batch):
    return log_ratio_NT.sqrt() * advantage_NT, nothing(batch)
@gate(equation="x")
def trial_wrong_shape(log_ratio_NT, advantage_NT, batch):
    return (log_ratio_NT * advantage_NT).sum(1), nothing(batch)
@gate(equation="x")
def trial_one(log_ratio_NT, advantage_NT, batch): return log_ratio_NT * advantage_NT
@gate(equation="x")
def trial_forgets(log_ratio_NT, advantage_NT, batch): log_ratio_NT * advantage_NT
@gate(equation="x")
def trial_raises(log_ratio_NT, advantage_NT, batch):
    return batch.no_such_stream, nothing(batch)
@gate(equation="x")
def trial_by_batch(log_ratio_NT, advantage_NT, batch):
    return log_ratio_NT.exp() * advantage_NT / log_ratio_NT.exp().mean(), nothing(batch)
@gate(equation="x")
def trial_zero(log_ratio_NT, advantage_NT, batch):
    return 0 * log_ratio_NT.exp() * advantage_NT, nothing(batch)
@gate(equation="x")
def trial_steep(log_ratio_NT, advantage_NT, batch):
    return (log_ratio_NT * 0).sqrt() + log_ratio_NT.exp() * advantage_NT, nothing(batch)
@advantage(equation="x", base=True)
def trial_mean(reward_N, batch): return reward_N - reward_N.mean()
@advantage(equation="x", base=True)
def trial_no_advantage(reward_N, batch): reward_N - reward_N.mean()
@advantage(equation="x", base=True)
def trial_infinite(reward_N, batch): return reward_N / 0
@advantage(equation="x", base=True, needs=("tokn_NT",))
def trial_misspelt(reward_N, batch): return reward_N - reward_N.mean()
@penalty(equation="x")
def trial_still(batch): return batch.logp_NT.detach()
@correction(equation="x")
def trial_short(batch): return batch.logp_NT[:, :1]
@ratio(equation="x", level="token")
def trial_frozen(batch): return (batch.logp_NT - batch.logp_NT).detach()
@filter_(equation="x", action="mask")
def trial_numbers(batch): return batch.task_reward_N
@shaping(equation="x")
def trial_alone(reward_N, batch): return reward_N
@aggregation(equation="x")
def trial_flat(batch): return batch.length_N
@schedule(equation="x")
def trial_tensor(batch, *, updates: Count = 1): return batch.mask_NT
@auxiliary(equation="x", prepare=prepared)
def trial_vector(batch, prepared): return batch.logp_NT.sum(1)
@auxiliary(equation="x", prepare=lambda batch, params: 1 / 0)
def trial_unprepared(batch, prepared): return batch.logp_NT.sum()
@preference(equation="x")
def trial_apart(pairs):
    x_N = pairs.chosen_logp_N.detach()
    return PairLoss(x_N, x_N, x_N, x_N, x_N > 0)
@pairing(equation="x", reads="grades")
def trial_outside(scores_C): return Choice(0, 9, True)
@preference(equation="x", scores=True)
def trial_still(pairs): return pairs.chosen_N.detach()
@pairing(equation="x", reads="ranks")
def trial_alone(scores_C): return Choice(0, 1, True)
@labelling(equation="x")
def trial_sum(steps): return steps.score_N.sum()
"""


@pytest.fixture(scope="module", autouse=True)
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slots") / "trial_slots.py"
    path.write_text(SLOTS)
    load_plugin(str(path))
    return path


def with_slot(kind: str, name: str) -> Recipe:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecipeWarning)
        made: Recipe = recipe("dr_grpo", {kind: f"{name}()"})
    return made


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("gate", "trial_detached", "returned a tensor without a gradient"),
        ("gate", "trial_nan", "returned nan in"),
        ("gate", "trial_wrong_shape", "returned a tensor (12,) where its signature promises"),
        ("gate", "trial_one", "instead of (objective_NT, clipped_NT)"),
        ("gate", "trial_forgets", "returned None (did you forget return?)"),
        ("gate", "trial_raises", "no attribute 'no_such_stream'"),
        ("gate", "trial_by_batch", "when the batch is split into micro-batches"),
        ("gate", "trial_zero", "the gradient of its loss is 0"),
        ("gate", "trial_steep", "its loss is finite and its gradient is not"),
        ("advantage", "trial_no_advantage", "returned None (did you forget return?)"),
        ("advantage", "trial_infinite", "returned inf in"),
        ("advantage", "trial_misspelt", "Did you mean 'token_NT'"),
        ("penalty", "trial_still", "returned a tensor without a gradient"),
        ("correction", "trial_short", "returned a tensor (12, 1)"),
        ("ratio", "trial_frozen", "returned a tensor without a gradient"),
        ("filter", "trial_numbers", "where True or False is promised"),
        ("shaping", "trial_alone", "instead of (reward_N, rewards per token or None)"),
        ("aggregation", "trial_flat", "returned a tensor (12,)"),
        ("schedule", "trial_tensor", "instead of a list of masks"),
        ("auxiliary", "trial_vector", "promises a tensor () (one number)"),
        ("auxiliary", "trial_unprepared", "raises ZeroDivisionError"),
    ],
)
def test_a_faulty_slot_is_named_with_its_file(kind: str, name: str, words: str) -> None:
    with pytest.raises(RecipeError) as refused:
        try_groups(with_slot(kind, name))
    said = str(refused.value)
    assert words in said and f"{kind} {name}" in said
    assert "trial_slots.py:" in said


def test_faulty_slots_of_pairs_are_named() -> None:
    for kind, name, words in [
        ("preference", "trial_apart", "without a gradient"),
        ("pairing", "trial_outside", "instead of a Choice of two of the candidates"),
    ]:
        with pytest.raises(RecipeError, match=f"{kind} {name} .trial_slots.py:") as refused:
            try_pairs(recipe("self_rewarding", {kind: f"{name}()"}))
        assert words in str(refused.value)


def test_faulty_slots_of_models_that_score_are_named() -> None:
    for name, kind, slot, words in [
        ("reward_model", "preference", "trial_still", "without a gradient"),
        ("reward_model", "pairing", "trial_alone", "instead of Choices of two"),
        ("process_reward_model", "labelling", "trial_sum", "returned a tensor ()"),
    ]:
        with pytest.raises(RecipeError, match=f"{kind} {slot} .trial_slots.py:") as refused:
            try_slots(recipe(name, {kind: f"{slot}()"}))
        assert words in str(refused.value)
        assert try_slots(recipe(name)) == []


def test_any_recipe_can_be_tried_by_the_one_name_that_the_page_teaches() -> None:
    for made in (with_slot("gate", "trial_nan"), recipe("dpo", {"preference": "trial_apart()"})):
        with pytest.raises(RecipeError, match=r"trial_slots\.py:"):
            try_slots(made)
    assert try_slots(recipe("grpo")) == try_slots(recipe("dpo")) == []


def test_a_sound_slot_passes_and_the_packages_own_are_not_tried() -> None:
    assert try_groups(with_slot("gate", "trial_plain")) == []
    assert try_groups(recipe("grpo")) == [] and try_pairs(recipe("dpo")) == []


def test_one_answer_without_a_reward_must_not_cost_the_batch() -> None:
    (doubt,) = try_groups(with_slot("advantage", "trial_mean"))
    assert "advantage trial_mean" in doubt and "would cost the whole batch" in doubt


@pytest.mark.parametrize("name", POLICY_RECIPES)
def test_every_recipe_of_the_package_would_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of a user's slots holds for the package's: no sound slot is refused."""
    monkeypatch.setattr(trial, "_of_package", lambda slot: False)
    assert try_groups(recipe(name)) == []


def test_a_run_is_refused_before_its_model_is_looked_for(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        f"from groupwise import recipe\nfrom groupwise.recipes import load_plugin, register\n"
        f"load_plugin({str(file)!r})\n"
        'register(recipe("dr_grpo").replace(name="trial_run", gate="trial_detached()"))\n'
    )
    own = f"{tmp_path}/mine.py:trial_run"
    with pytest.raises(RecipeError, match="gate trial_detached"):
        cold_start.run_from(str(tmp_path / "nowhere"), tmp_path / "run", recipe=own)
    assert main(["train", f"recipe={own}", "--dry-run"]) == 2
    assert "gate trial_detached" in capsys.readouterr().err
