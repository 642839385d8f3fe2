"""What of a recipe can't act under given settings: claims against gradients of other batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import POLICY_RECIPES, Sample, loss_and_gradients, random_sample
from steps import Start, advance, weights
from torch import Tensor

from groupwise import Recipe, TokenBatch, recipe
from groupwise.compare import summary
from groupwise.compare.arms import ArmBudget, arms_of, check
from groupwise.compare.equal_arms import find_equal_arms
from groupwise.compare.findings import findings
from groupwise.compare.plan import ComparisonPlan
from groupwise.config import load
from groupwise.errors import RecipeError
from groupwise.explain.idle import (
    Conditions,
    acting,
    comparing,
    gradients,
    idle,
    neutral,
    passes_of,
    toy_under,
)
from groupwise.losses.gates import unclipped
from groupwise.methods.slots import REGISTRY, Positive, Slot, correction, gate
from groupwise.stages.consequences import conditions, idle_slots
from groupwise.stages.describe import describe

# What the test batches have in common with a run: one update by the sampler's own weights.
ON_POLICY = Conditions()
UPDATES = Conditions(moved=True)


def on_policy(seed: int) -> Sample:
    """A random batch in which old and sampled log-probabilities are the policy's own."""
    sample = random_sample(seed, groups=(4, 4, 4, 4), width=7)
    sample.streams["reward_N"][[2, 6, 10]] = 1.25  # better than all others of their groups
    token_NT = sample.streams["token_NT"]
    logp = sample.logits_NTV.log_softmax(-1)
    own_NT = logp.gather(-1, token_NT[..., None])[..., 0]
    top = logp.topk(20, dim=-1)
    sample.streams |= {
        "old_logp_NT": own_NT,
        "sampler_logp_NT": own_NT,
        "sampler_topk_logp_NTK": top.values,
        "sampler_topk_id_NTK": top.indices,
        "old_router_NTLK": sample.router_NTLK,
    }
    return sample


def update(made: Recipe, sample: Sample) -> Tensor:
    return torch.cat([grad.flatten() for grad in loss_and_gradients(made, sample)[1]])


def same(a: Tensor, b: Tensor) -> bool:
    return float((a - b).norm()) <= 1e-9 * float(a.norm())


def once(name: str) -> Recipe:
    """The recipe with one update a batch."""
    made: Recipe = recipe(name)
    return made.configure({"schedule.updates": 1}) if made.schedule["updates"] > 1 else made


def without_gate(made: Recipe, slot: Slot) -> Recipe:
    """Where a ratio is tried, the gate that may want it has been taken out."""
    return (neutral(made, made.gate) or made) if slot.kind == "ratio" else made


def far_off(spread: float) -> Sample:
    """A batch in which policies differ by so many nats a token; masks may ask for many."""
    sample = random_sample(1, spread=spread)
    sample.streams["reward_N"][[2, 6, 10]] = 1.25  # better than all others of their groups
    return sample


# --- the facts, both ways ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::groupwise.errors.RecipeWarning")
@pytest.mark.parametrize("name", POLICY_RECIPES)
def test_a_slot_is_called_idle_exactly_if_no_update_differs_without_it(name: str) -> None:
    made = once(name)
    called = {found.slot for found in idle(made, ON_POLICY)}
    for slot in comparing(made):
        base = without_gate(made, slot)
        plain = neutral(base, slot)
        if plain is None:  # it is the neutral one itself
            assert slot not in called
            continue
        idle_here, idle_there = (
            all(same(update(base, sample), update(plain, sample)) for sample in samples)
            for samples in (map(on_policy, (1, 2)), map(far_off, (2.0, 8.0)))
        )
        # What never acts, such as routing replay, whose work is the model's, is not called idle.
        assert (slot in called) == (idle_here and not idle_there), slot


@pytest.mark.filterwarnings("ignore::groupwise.errors.RecipeWarning")
@pytest.mark.parametrize("name", POLICY_RECIPES)
def test_what_is_left_when_all_that_is_idle_goes_makes_the_same_update(name: str) -> None:
    made = once(name)
    left = {
        kind: tuple(s for s in acting(made, ON_POLICY) if s.kind == kind) for kind in made.KINDS
    }
    assert same(update(made, on_policy(3)), update(made.replace(**left), on_policy(3)))


@pytest.mark.filterwarnings("ignore::groupwise.errors.RecipeWarning")
@pytest.mark.parametrize("name", sorted(REGISTRY["gate"]))
def test_every_gate_of_the_package_but_the_smoothing_one_is_idle_at_a_ratio_of_one(
    name: str,
) -> None:
    """By hand: ∂S/∂ℓ = A at r = 1 inside any range. SimKO spreads the gradient over candidates, DFT
    weighs a token by its probability, Clip-Cov leaves tokens out by a covariance that is not 0
    there, A*PO has a residual and no ratio, and a silent gate has no gradient at all. A weight of a
    whole answer's ratio on each of its log-probabilities is not that ratio's own gradient, which
    is n_i times as large.
    """
    users: list[Recipe] = [once(x) for x in POLICY_RECIPES if recipe(x).gate.name == name]
    for made in users:
        found = {each.slot.kind for each in idle(made, ON_POLICY)}
        others = ("topk_smoothing", "score", "score_by_probability", "unclipped", "silent",
                  "cov_clip", "squared_residual")  # fmt: skip
        asked = name not in (*others, "gamma_weight", "taper")
        assert ("gate" in found) == asked


@pytest.mark.filterwarnings("ignore::groupwise.errors.RecipeWarning")
def test_a_geometric_mean_is_idle_only_while_it_weighs_tokens_alike() -> None:
    """s_i has the gradient mean_t ∇ℓ_t: a mean of tokens, so a sum over them is that of ratios.

    The product's is n_i times as large, and an advantage per token is averaged over the answer.
    """
    plain = recipe("lite_ppo")
    mean = plain.replace(ratio="sequence_geomean()", gate="unclipped()")
    assert [each.slot.name for each in idle(mean, ON_POLICY)] == ["sequence_geomean"]
    product = plain.replace(ratio="sequence_product()", gate="unclipped()")
    assert idle(product, ON_POLICY) == []
    dense = recipe("reinforce_pp").replace(ratio="sequence_geomean()", gate="unclipped()")
    assert idle(dense, ON_POLICY) == []


# --- what wakes it ----------------------------------------------------------------------------

MOVED, SAMPLER, EITHER = (("moved",),), (("mismatch",),), (("moved",), ("mismatch",))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", {"clip": MOVED}),
        ("gmpo", {"geometric_clip": MOVED}),
        ("sapo", {"soft": MOVED}),
        ("sspo", {"segment_clip": MOVED, "segment_geomean": MOVED}),
        ("dcpo", {"dynamic_clip": MOVED}),
        ("tis", {"clip": MOVED, "tis_token": SAMPLER}),
        ("icepop", {"clip": MOVED, "icepop": SAMPLER}),
        ("mis", {"clip": MOVED, "mis_sequence": SAMPLER}),
        ("mis_geometric", {"clip": MOVED, "mis_geometric": SAMPLER}),
        ("dppo", {"tv_mask": EITHER}),
        ("grpo@prime-rl", {"tv_mask": EITHER, "drift": EITHER}),
        ("gspo", {}),  # four updates of its own
        ("lopti", {}),  # two passes: the second is off-policy
        ("simko", {}),
        ("rloo", {}),  # no ratio, and a KL that acts
        ("reinforce", {}),
    ],
)
def test_what_is_idle_in_a_run_by_default_and_what_wakes_it(
    name: str, expected: dict[str, Any]
) -> None:
    found = idle_slots(load(recipe=name))
    assert {each.slot.name: each.wakes for each in found} == expected


def test_settings_decide_which_policies_differ() -> None:
    def under(**changes: Any) -> Conditions:
        config = load(**({"recipe": "tis"} | changes))
        assert isinstance(config.recipe, Recipe)
        return conditions(config, config.recipe)

    assert under() == ON_POLICY
    assert under(**{"recipe.schedule.updates": 4}).moved and under(recipe="lopti").moved
    for key, value in {
        "engine.weights": "stale:1", "model.dtype": "bfloat16", "engine.top_p": 0.9,
        "engine.top_k": 5, "engine.min_tokens": 2,
    }.items():  # fmt: skip
        assert under(**{key: value}).mismatch, key
    dropping = under(**{"adapter.rank": 2, "adapter.dropout": 0.1})
    assert dropping.mismatch and not dropping.moved
    exact = {"model.dtype": "bfloat16", "model.device": "cuda", "engine.exact": True}
    assert not under(**exact).mismatch
    assert not under(recipe="grpo", **{"reference.update": "reset:1"}).reference


def test_a_reference_that_is_the_policy_holds_nothing_back() -> None:
    config = load(recipe="grpo", **{"reference.update": "reset:1"})
    found = {each.slot.name: each.wakes for each in idle_slots(config)}
    assert found["kl"] == (("moved",), ("reference",))
    assert "kl" not in {each.slot.name for each in idle_slots(load(recipe="grpo"))}


def test_a_run_says_what_is_idle_before_it_starts() -> None:
    told = "\n".join(describe(load(recipe="tis")))
    assert "idle, updates are the same without: gate clip(low=0.2, high=0.2)" in told
    assert "correction tis_token(cap=2.0) (the sampler is the learner); woken by" in told
    assert "recipe.schedule.updates=4" in told and "engine.weights=stale:1" in told
    awake = {"recipe": "tis", "recipe.schedule.updates": 4, "engine.weights": "int8"}
    assert not any("idle" in line for line in describe(load(**awake)))


# --- slots of one's own -----------------------------------------------------------------------


@gate(equation="S = A·tanh({scale}·(r−1))/{scale}")
def tanh_of_the_tests(
    log_ratio_NT: Tensor, advantage_NT: Tensor, batch: TokenBatch, *, scale: Positive = 1.0
) -> tuple[Tensor, Tensor]:
    """Saturates on both sides; its slope at 1 is A."""
    objective_NT = advantage_NT * torch.tanh(scale * log_ratio_NT.expm1()) / scale
    return objective_NT, torch.zeros_like(batch.mask_NT)


@gate(equation="S = r·A·(1 if A > 0 else ½)")
def halved_of_the_tests(
    log_ratio_NT: Tensor, advantage_NT: Tensor, batch: TokenBatch
) -> tuple[Tensor, Tensor]:
    """Acts at any ratio."""
    weight_NT = torch.where(advantage_NT > 0, 1.0, 0.5)
    return log_ratio_NT.exp() * advantage_NT * weight_NT, torch.zeros_like(batch.mask_NT)


@correction(needs=("sampler_logp_NT",), equation="raises")
def broken_of_the_tests(batch: TokenBatch) -> Tensor:
    """Fails on any batch."""
    raise ValueError("not today")


def test_functions_of_ones_own_are_tried_without_a_declaration() -> None:
    found = idle(recipe("lite_ppo").replace(gate=tanh_of_the_tests(scale=2.0)), ON_POLICY)
    assert [(each.slot.name, each.wakes) for each in found] == [("tanh_of_the_tests", MOVED)]
    assert idle(recipe("lite_ppo").replace(gate=halved_of_the_tests()), ON_POLICY) == []
    made = recipe("lite_ppo").replace(correction=broken_of_the_tests())
    assert idle(made, ON_POLICY) == []  # nothing can be said of it


def test_trying_leaves_the_random_numbers_of_the_process_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    idle(recipe("tis"), ON_POLICY)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_recipe_of_the_package_can_be_tried_under_all_conditions() -> None:
    for name in POLICY_RECIPES:
        made = recipe(name)
        assert passes_of(made) == (2 if name == "lopti" else 1)
        for where in (ON_POLICY, Conditions(True, True, True)):
            grads = gradients(made, toy_under(where))
            assert all(grad.isfinite().all() for grad in grads) and grads[0].any(), name


# --- against the trainer ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


def test_idle_recipes_train_to_the_same_weights_and_awake_ones_do_not(
    start: Start, tmp_path: Path
) -> None:
    """One step of the trainer itself; Adam lets rounding grow where a gradient is next to 0."""

    def trained(name: str, updates: int) -> Tensor:
        changes = {"recipe": name, "recipe__schedule__updates": updates}
        with start.opened(tmp_path / f"{name}{updates}", **changes) as run:
            before = weights(run.parts.loaded.model)
            moved = weights(advance(run).parts.loaded.model) - before
            assert float(moved.abs().max()) > 1e-3
            return moved

    base = trained("grpo@slime", 1)  # the same without correction, with a plain clip
    for name in ("gmpo", "sapo", "sspo", "tis", "icepop", "mis", "gspo_token"):
        assert float((trained(name, 1) - base).norm()) < 1e-3 * float(base.norm()), name
    base = trained("grpo@slime", 4)
    for name in ("gmpo", "sapo", "sspo"):
        assert float((trained(name, 4) - base).norm()) > 1e-2 * float(base.norm()), name


# --- comparisons ------------------------------------------------------------------------------


def arms(*texts: str, **options: Any) -> list[Any]:
    return arms_of(list(texts), ArmBudget("steps", 20), **options)


def test_arms_that_must_coincide_are_named_before_anything_is_spent() -> None:
    one = ["recipe.schedule.updates=1"]
    found = check(arms("gmpo", "sapo", "tis", "simko", "grpo", settings=one))
    (said,) = [text for text in found if "must coincide" in text]
    assert said.startswith("gmpo, sapo and tis must coincide")
    assert "gate geometric_clip (gmpo)" in said and "recipe.schedule.updates=4" in said
    assert not [x for x in check(arms("gmpo", "sapo")) if "coincide" in x]  # four updates


def test_the_result_of_a_comparison_says_which_arms_had_to_coincide() -> None:
    made = arms("sapo", "gmpo", "simko", settings=["recipe.schedule.updates=1"])
    plan = ComparisonPlan(tuple(made), (0, 1), ArmBudget("steps", 20))
    found = findings(plan, [[], [], []], {})
    (same_arms,) = found["coincide"]
    assert same_arms["arms"] == ["sapo", "gmpo"]
    assert "sapo and gmpo must coincide" in summary.text(found)


def test_arms_that_differ_in_what_acts_or_in_a_setting_do_not_coincide() -> None:
    def named(*texts: str, **options: Any) -> list[tuple[str, ...]]:
        return [
            each.arms
            for each in find_equal_arms({a.name: a.config for a in arms(*texts, **options)})
        ]

    one = {"settings": ["recipe.schedule.updates=1"]}
    assert named("sapo", "gmpo group_size=4", **one) == []
    assert named("grpo", "grpo") == [("grpo", "grpo (2)")]
    assert named("tis", "icepop", settings=["engine.weights=int8"]) == []
    assert named("tis", "icepop") == [("tis", "icepop")]  # updates alone do not wake corrections
    changed = "advantage=group_mean() {0}aggregation=seq_mean_token_sum_norm(length=4)"
    bare = f"reinforce recipe.{changed.format('recipe.')}"  # without a ratio, at a ratio of 1
    assert named("dr_grpo", bare, **one) == [("dr_grpo", f"reinforce {changed.format('')}")]


def test_functions_of_ones_own_are_not_tried_in_the_process_that_compares(tmp_path: Path) -> None:
    """They may end it; each is tried in the process of its run."""
    file = tmp_path / "deadly.py"
    file.write_text(DEADLY)
    found = check(arms("grpo", f"{file}:deadly", f"{file}:deadly"))
    (said,) = [text for text in found if "coincide" in text]
    assert said.startswith("deadly and deadly (2) must coincide") and "one recipe" in said


DEADLY = """
import os
from groupwise import recipe, register
from groupwise.methods.slots import gate

@gate(equation="S = 0")
def deadly_gate(log_ratio_NT, advantage_NT, batch):
    os._exit(7)

register(recipe("grpo").replace(name="deadly", gate=deadly_gate()))
"""


def test_a_ratio_that_a_gate_insists_on_has_no_counterpart_of_its_own() -> None:
    made = recipe("sspo")
    with pytest.raises(RecipeError):
        made.replace(ratio="token()")
    assert neutral(made, made.ratio) is None
    assert neutral(made.replace(gate=unclipped()), made.ratio) is not None
    assert idle(replace(made, name="x"), UPDATES) == []
