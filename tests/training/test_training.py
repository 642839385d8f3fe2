"""Every recipe trains by name; what must not change an update does not; what is rewarded rises."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from played import Adder, Words, answering
from runs import metrics, small
from steps import (
    BARE,
    Start,
    advance,
    difference,
    gather,
    gradient,
    learn,
    plain_logp,
    rollouts,
    weights,
)
from torch import Tensor

from groupwise.errors import ConfigError, DataError
from groupwise.methods.composition import PairRecipe, UnpairedRecipe
from groupwise.model.fingerprint import fingerprint
from groupwise.model.layers.head import NO_RULE, HeadOutputs, HeadRule
from groupwise.model.layers.ops import Plain
from groupwise.optim.assemble import sequences_of
from groupwise.optim.learner import PolicyLearner
from groupwise.optim.schedules import LearningRates
from groupwise.recipes import RECIPES, recipe
from groupwise.stages.pairs import pairs_of

PAIRS = [name for name, entry in RECIPES.items() if isinstance(entry, PairRecipe)]
SCORING = [name for name, entry in RECIPES.items() if entry.scores]  # test_reward_models.py
UNPAIRED = [name for name, entry in RECIPES.items() if isinstance(entry, UnpairedRecipe)]
TRAINED = [name for name in RECIPES if name not in {*PAIRS, *UNPAIRED, *SCORING}]
TOLD = {"teacher__path": "policy", "teacher__prompt": "{answer}{prompt}"}
PLAYED = {"turns__environment": "played", "turns__max": 4, "engine__max_tokens": 10,
          "reward__parts": {"environment": 1.0}}  # fmt: skip
MIXTURES = [name for name, entry in RECIPES.items() if entry.routed]
GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}
# What a model of 18 characters and answers of 8 make necessary.
NEEDED: dict[str, dict[str, Any]] = {
    "dft": {"group_size": 8},  # the default: nothing is sampled
    "distill": TOLD,
    "distill_topk": {**TOLD, "recipe__penalty__k": 4},
    "dppo_topk": {"recipe__gate__k": 4},
    "gigpo": PLAYED,
    "gkd": TOLD,
    "flowrl": {"critic__alone_steps": 0},  # or the policy would wait for both steps
    "grpo_process": {"reward": "stepwise"},
    "hierarchical_grpo": PLAYED,
    "minillm": TOLD,
    "mt_grpo": PLAYED,
    "opd": TOLD,
    "rebn": {"reward": "stepwise"},
    "turn_return_to_go": {"reward": "stepwise"},
    "sdpo": {
        "teacher__path": "policy",
        "teacher__update": "ema:0.95",
        "teacher__prompt": "{sibling};{prompt}",
        "group_size": 8,
    },
    "spo": {"group_size": 1, "prompts_per_step": 16},
    "reinforce_pp": {"group_size": 1, "prompts_per_step": 16},
    "remax": {"group_size": 1, "prompts_per_step": 16},
    "sft": {"group_size": 8},  # the default: nothing is sampled
    "spin": {"group_size": 1},
    **{name: {"model__path": "tiny", "tiny__experts": 4} for name in MIXTURES},
    "vapo": {"critic__alone_steps": 0},  # or the policy would wait for both steps
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


def labelled(start: Start) -> dict[str, Any]:
    """Four pairs, all of them in every step; and each chosen answer once more, with a label."""
    rows = [
        {"prompt": f"{a}+2=", "chosen": f"{a},2;{a + 2}", "rejected": f"2;{a}"}
        | {"completion": f"{a},2;{a + 2}", "label": a % 2 == 0}
        for a in range(4)
    ]
    return {"data__train": start.rows("labelled", rows)}


def from_data(name: str, start: Start) -> dict[str, Any]:
    """What a recipe reads of the data, or of a part of the reward."""
    if name == "a2po":
        rows = [{"prompt": f"{a}+2=", "answer": str(a + 2), "reference_rewards": [1, 0, 0, a % 2]}
                for a in range(10)]  # fmt: skip
        return {"data__train": start.rows("valued", rows)}
    if name == "fapo":
        file = start.folder / "rewards.py"
        return {"reward__parts": {f"{file}:odd": 1.0, f"{file}:flawed": 0.0}}
    return {}


def digits(words: Words, messages: Any) -> tuple[int, ...]:
    """What the environment says, without the brackets that the vocabulary here does not have."""
    return tuple(words.tokenizer.encode("".join(each["content"] for each in messages)))


def test_a_column_that_a_recipe_reads_is_asked_for_before_a_run(
    start: Start, tmp_path: Path
) -> None:
    with (
        pytest.raises(DataError, match=r"reference_rewards.*groupwise collect"),
        start.opened(tmp_path, recipe="a2po"),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="no part of the reward says so"),
        start.opened(tmp_path, recipe="fapo"),
    ):
        pass


def test_no_recipe_is_forgotten() -> None:
    sampled = [name for name in PAIRS if recipe(name).samples]
    assert sampled == ["spin", "online_dpo", "best_of_group_dpo", "self_rewarding"]
    assert len(PAIRS) == 29 and UNPAIRED == ["kto"]
    assert SCORING == ["reward_model", "process_reward_model"]
    every = [*TRAINED, *PAIRS, *UNPAIRED, *SCORING]
    assert len(every) == len(RECIPES) and len(TRAINED) > 40


# One that judges itself needs a model that can write: tests/stages/test_self_rewarding.py.
@pytest.mark.parametrize(
    "name", [*TRAINED, *(x for x in PAIRS if not recipe(x).judging), *UNPAIRED]
)
def test_every_recipe_trains_by_name(
    name: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, Adder)  # runs with turns.environment alone
    monkeypatch.setattr(Words, "bridge", digits)
    changes = dict(NEEDED.get(name, {})) | from_data(name, start)
    if name in {*PAIRS, *UNPAIRED} and not recipe(name).samples:
        changes |= labelled(start)
    with start.opened(tmp_path, recipe=name, **changes) as run:
        seen = [fingerprint(run.parts.loaded.model.named_parameters())]
        advance(run, 2)
        run.reporter.recorder.flush()
        updates = run.progress.version
        assert weights(run.parts.loaded.model).isfinite().all()
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        numbers = {key: x for key, x in line.items() if key != "weights/fingerprint"}
        assert all(math.isfinite(x) for x in numbers.values()), numbers
        assert line["optim/skipped"] == 0
        seen.append(line["weights/fingerprint"])
    assert len(set(seen)) == 3  # every step moved the weights
    assert sum(line["updates/count"] for line in lines) == updates == lines[-1]["weights/version"]


@pytest.mark.parametrize("name", MIXTURES)
def test_a_recipe_for_mixtures_is_refused_before_a_dense_model_is_loaded(
    name: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is borrowed too: its layers do not tell which experts a token visits."""
    monkeypatch.setattr("groupwise.model.policy.load", lambda *_, **__: pytest.fail("loaded"))
    borrowed = tmp_path / "gpt_oss"
    borrowed.mkdir()
    (borrowed / "config.json").write_text(json.dumps(GPT_OSS))
    said = {
        str(start.model): r"\(llama\) is a dense model",
        str(borrowed): "runs with the layers of transformers, which do not tell",
    }
    for path, why in said.items():
        changes = {"recipe": name, "model__path": path}
        message = f"{name} reads which experts a token visits, and .*{why}.*take gspo"
        with pytest.raises(ConfigError, match=message), start.opened(tmp_path / "run", **changes):
            pass
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("setting", ["engine__record_routes", "model__freeze_router"])
def test_settings_of_mixtures_are_refused_for_dense_models(
    setting: str, start: Start, tmp_path: Path
) -> None:
    message = f"{setting.replace('__', '.')}=true .* dense model.*leave it out"
    with pytest.raises(ConfigError, match=message), start.opened(tmp_path, **{setting: True}):
        pass


def test_more_likely_tokens_than_the_model_has_are_refused(start: Start, tmp_path: Path) -> None:
    message = r"vocabulary has 15\. Set recipe\.gate\.k=15 or less"
    with pytest.raises(ConfigError, match=message), start.opened(tmp_path, recipe="dppo_topk"):
        pass


# --- pairs ------------------------------------------------------------------------------------


def test_dpo_moves_from_ln_2_towards_the_labels(start: Start, tmp_path: Path) -> None:
    """And the margin it reports is the one that plain forward passes give."""
    changes = labelled(start) | {"optim__learning_rate": 1e-3}
    with start.opened(tmp_path, recipe="dpo", **changes) as run:
        first = learn(run, gather(run), rate=0.0).metrics
        assert first["loss/total"] == pytest.approx(math.log(2), abs=1e-7)
        assert first["pairs/margin"] == 0.0  # exactly: policy and reference are the same
        advance(run, 8)
        collected = gather(run)
        pairs = pairs_of(run.config.recipe, collected.groups, run.parts.loaded.tokenizer)
        reference = run.parts.learner.roles["reference"].model
        policy_N, reference_N = (
            plain_logp(model, pairs).sum(1) for model in (run.parts.loaded.model, reference)
        )
        found = learn(run, collected).metrics
    drift_N = policy_N - reference_N
    margin_N = 0.1 * (drift_N[0::2] - drift_N[1::2])
    assert found["pairs/margin"] == pytest.approx(float(margin_N.mean()), abs=1e-5)
    assert found["loss/total"] == pytest.approx(float((1 + (-margin_N).exp()).log().mean()), 1e-5)
    assert found["pairs/accuracy"] == 1.0 and found["pairs/margin"] > 0.05


def test_spin_prefers_the_data_and_best_of_group_the_grades(start: Start, tmp_path: Path) -> None:
    with start.opened(tmp_path / "spin", recipe="spin", **NEEDED["spin"]) as run:
        collected, tokenizer = gather(run), run.parts.loaded.tokenizer
        pairs = pairs_of(run.config.recipe, collected.groups, tokenizer)
        for row, group in enumerate(collected.groups):
            gold = group[0].task.columns["solution"]
            assert tokenizer.decode(pairs.completions[2 * row]) == f"{gold}<end>"
            assert pairs.completions[2 * row + 1] == group[0].completion.token_ids
    with start.opened(tmp_path / "own", recipe="best_of_group_dpo") as run:
        collected = gather(run)
        pairs = pairs_of(run.config.recipe, collected.groups, run.parts.loaded.tokenizer)
        graded = [{r.completion.token_ids: r.grade.reward for r in g} for g in collected.groups]
        useful = [grades for grades in graded if len(set(grades.values())) > 1]
        assert 0 < len(useful) == len(pairs.completions) // 2
        for row, grades in enumerate(useful):
            assert [grades[ids] for ids in pairs.completions[2 * row : 2 * row + 2]] == [1.0, 0.0]


def test_a_step_without_a_pair_makes_no_update(start: Start, tmp_path: Path) -> None:
    with start.opened(tmp_path, recipe="best_of_group_dpo", reward="nothing") as run:
        before = weights(run.parts.loaded.model)
        advance(run)
        run.reporter.recorder.flush()
        assert torch.equal(weights(run.parts.loaded.model), before) and run.progress.version == 0
        assert "no update" in run.reporter.folder.events.read_text()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "3"}, "Row 1 has no text in column 'rejected'"),
        ({"chosen": ["3"], "rejected": "4"}, "Row 1 has no text in column 'chosen'"),
        ({"chosen": "3", "rejected": "four"}, "Row 1, column 'rejected': .* can't encode 'four'"),
    ],
)
def test_labels_that_can_t_be_learned_from_are_refused_at_the_start(
    row: dict[str, Any], message: str, start: Start, tmp_path: Path
) -> None:
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}, {"prompt": "1+2=", **row}]
    changes = {"recipe": "dpo", "data__train": start.rows("odd", rows)}
    with pytest.raises(DataError, match=message), start.opened(tmp_path, **changes):
        pass


def test_spin_refuses_rows_without_a_solution_at_the_start(start: Start, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "solution": "1;2"}, {"prompt": "1+2=", "answer": "3"}]
    changes = {"recipe": "spin", "group_size": 1, "data__train": start.rows("odd", rows)}
    changes["reward__parts"] = {"length(target=3)": 1.0}
    with (
        pytest.raises(DataError, match=r"no written .* first row 1"),
        start.opened(tmp_path, **changes),
    ):
        pass


# --- what must not change an update -----------------------------------------------------------


MICRO = (1, 16, 64, 4096)


@pytest.mark.parametrize("name", ["grpo", "grpo@verl", "lambda_grpo", "lopti", "dpo"])
def test_micro_batches_and_recomputation_do_not_change_the_update(
    name: str, start: Start, tmp_path: Path
) -> None:
    """The gradient to 3e-6 and the weights to 1e-7: float32 sums in another order, and no more.

    float64 below shows that it is rounding.
    """
    changes = {"optim__learning_rate": 1e-3, "prompts_per_step": 8}
    if name == "grpo@verl":
        changes["recipe__schedule__updates"] = 2
    if name == "dpo":
        changes = labelled(start)
    found: dict[Any, tuple[Tensor, Tensor]] = {}
    with start.opened(tmp_path, recipe=name, **changes, **BARE) as run:
        collected = gather(advance(run))  # the reference is another model by now
        roles = run.parts.learner.roles
        held = {role: roles[role].state() for role in roles}
        policy, state, beside = (
            copy.deepcopy(x) for x in (run.parts.loaded.model, run.parts.learner.state(), held)
        )
        for kind in (*MICRO, "recompute"):
            run.parts.loaded.model.load_state_dict(policy.state_dict())
            run.parts.learner.restore(state)
            for role in roles:
                roles[role].restore(beside[role])
            run.parts.learner.micro_tokens = 4096 if kind == "recompute" else int(kind)
            run.parts.loaded.model.recompute = kind == "recompute"
            learn(run, collected, rate=1e-4)
            found[kind] = gradient(run), weights(run.parts.loaded.model)
    assert float(found[4096][0].norm()) > 1e-3
    for kind in (*MICRO[:-1], "recompute"):
        assert difference(found[kind][0], found[4096][0]) < 3e-6
        assert difference(found[kind][1], found[4096][1]) < 1e-7


@pytest.mark.parametrize("name", ["grpo", "gspo", "simko"])
def test_in_float64_micro_batches_agree_to_its_last_digits(
    name: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(  # the trainer's own is for float32 gradients
        "groupwise.optim.step.gradient_norm",
        lambda all_: torch.cat([x.flatten() for x in all_]).norm(),
    )
    with start.opened(tmp_path, recipe=name, **BARE) as run:
        collected = gather(run)
        sequences = sequences_of(collected.groups)
        twin = copy.deepcopy(run.parts.loaded.model)
        batch = learn(run, collected).batch
        parts = run.parts.learner.parts(batch.group_N.tolist())
        found = []
        for micro_tokens in MICRO:
            model = copy.deepcopy(twin).double()
            learner = PolicyLearner(model, run.parts.learner.recipe, run.config.optim, 1.0)
            learner.micro_tokens = micro_tokens
            learned = learner.learn(batch, sequences, parts, LearningRates(1e-3))
            found.append((weights(model), learned.metrics()))
    assert found[0][1].pop("optim/micro_batches") == 16 and not torch.equal(
        found[0][0], weights(twin)
    )
    for moved, seen in found[1:]:
        assert difference(moved, found[0][0]) < 1e-12
        for key in found[0][1]:  # means over micro-batches are no means of means
            assert seen[key] == pytest.approx(found[0][1][key], rel=1e-6, abs=1e-9), key


def test_bug_8_seeds_give_other_completions_and_the_same_seed_the_same(
    start: Start, tmp_path: Path
) -> None:
    texts = {}
    for folder, seed in (("a", 1), ("b", 2), ("again", 1)):
        changes = {"recipe": "grpo", "seed": seed, "data__shuffle": False}
        with start.opened(tmp_path / folder, **changes) as run:
            groups = gather(run).groups + gather(run).groups
        texts[folder] = [[rollout.text for rollout in group] for group in groups]
        assert [group[0].task.id for group in groups] == list(range(8))
    assert texts["a"] == texts["again"]
    for a, b in zip(texts["a"], texts["b"], strict=True):
        assert a != b and len(set(a)) > 1


def plain_head(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    token_T: Tensor,
    *,
    temperature: float,
    entropy: bool,
    top_k: int,
    at_TK: Tensor | None,
    rule: HeadRule,
) -> HeadOutputs:
    """The textbook: all logits at once, and autograd."""
    assert rule is NO_RULE
    logp_TV = (hidden_TD @ weight_VD.t() / temperature).log_softmax(-1)
    top = logp_TV.topk(top_k) if top_k else None
    return HeadOutputs(
        logp_T=logp_TV.gather(1, token_T[:, None])[:, 0],
        entropy_T=-(logp_TV.exp() * logp_TV).sum(-1),
        topk_logp_TK=None if top is None else top.values,
        topk_id_TK=None if top is None else top.indices,
        logp_at_TK=None if at_TK is None else logp_TV.gather(1, at_TK),
    )


@pytest.mark.parametrize("name", ["grpo", "grpo@skyrl", "simko", "entropy_bonus", "dppo_topk"])
def test_bug_5_the_chunked_head_gives_the_gradient_of_the_plain_one(
    name: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a whole update, with KL on and a loss that is not 0."""
    changes = {"recipe": name, "engine__temperature": 0.7, **NEEDED.get(name, {}), **BARE}
    changes |= {"recipe__schedule__updates": 1}
    slopes = []
    for head in ("chunked", "plain"):
        with start.opened(tmp_path / head, **changes) as run:
            advance(run)
            collected = gather(run)
            with monkeypatch.context() as patch:
                if head == "plain":
                    patch.setattr(Plain, "log_probs", staticmethod(plain_head))
                else:
                    patch.setattr("groupwise.model.layers.head.CHUNK_NUMBERS", 7 * 15)  # 7 tokens
                found = learn(run, collected).metrics
            slopes.append(gradient(run))
        assert abs(found["loss/total"]) > 1e-6
        assert name not in ("grpo", "grpo@skyrl") or found["kl/ref"] > 1e-3
    assert float(slopes[0].norm()) > 1e-3 and difference(*slopes) < 1e-5


# --- learning ---------------------------------------------------------------------------------


def test_what_is_rewarded_rises(start: Start, tmp_path: Path) -> None:
    changes = {"recipe": "grpo", "prompts_per_step": 8, "group_size": 8, "engine__slots": 64}
    with start.opened(tmp_path, **changes) as run:
        before = sum(r.grade.reward for r in rollouts(gather(run))) / 64
        advance(run, 20)
        after = sum(r.grade.reward for r in rollouts(gather(run))) / 64
    assert after > 0.8 and after > before + 0.15


def test_a_length_reward_makes_length_rise(start: Start, tmp_path: Path) -> None:
    changes = {"recipe": "dr_grpo", "recipe__aggregation__length": 12, "engine__max_tokens": 12}
    changes |= {"prompts_per_step": 8, "group_size": 8, "engine__slots": 64}
    with start.opened(tmp_path, reward="length(target=12)", **changes) as run:
        advance(run, 25)
        run.reporter.recorder.flush()
    lengths = [line["length/mean"] for line in metrics(tmp_path)]
    assert lengths[0] < 8 and min(lengths[-3:]) > 11


def test_a_learning_rate_of_0_changes_nothing(start: Start, tmp_path: Path) -> None:
    with start.opened(tmp_path, recipe="grpo", optim__learning_rate=0.0) as run:
        before = weights(run.parts.loaded.model)
        assert torch.equal(weights(advance(run, 2).parts.loaded.model), before)


def test_the_recipe_of_the_paper_is_what_is_trained() -> None:
    """A name alone gives the registered recipe, untouched by the configuration's own settings."""
    for name in TRAINED:
        assert small(recipe=name).recipe is recipe(name)
