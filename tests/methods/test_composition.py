"""Recipes as data: changed, printed, read back, refused, extended; dialects, memory, filters."""

from __future__ import annotations

import math
import pickle
import re
import textwrap
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import POLICY_RECIPES
from torch import Tensor

from groupwise import Memory, Recipe, TokenBatch, batch_phase, recipe, register, select, token_phase
from groupwise.errors import RecipeError, RecipeWarning
from groupwise.groups.advantages import group_mean
from groupwise.groups.kl import k3
from groupwise.losses.gates import clip, segment_clip
from groupwise.losses.ratios import token
from groupwise.methods.slots import parse
from groupwise.methods.soundness import DOUBTFUL, REFUSED, complaints

DIALECTS = [name for name in POLICY_RECIPES if "@" in name]
every_recipe = pytest.mark.parametrize("name", POLICY_RECIPES)


def built(rewards: list[float], groups: list[int] | None = None, lengths: list[int] | None = None,
          **streams: Any) -> TokenBatch:  # fmt: skip
    """Float64 rows of one token unless told, one group unless told."""
    lengths = lengths or [1] * len(rewards)
    mask_NT = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    reward_N = torch.tensor(rewards, dtype=torch.float64)
    return TokenBatch.build(
        mask_NT=mask_NT, group_N=groups or [0] * len(rewards), reward_N=reward_N, **streams
    )


def first_token(made: Recipe, batch: TokenBatch) -> list[float]:
    """Advantages on the first token of each row."""
    return batch_phase(made, batch).batch.advantage_NT[:, 0].tolist()


def close(found: Any, expected: Any, atol: float = 1e-12) -> None:
    found, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (found, expected))
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def quietly(made: Recipe, **changes: Any) -> Recipe:
    """A changed recipe, doubtful or not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecipeWarning)
        return made.replace(**changes)


# --- changing a recipe ------------------------------------------------------------------------


def test_three_ways_to_write_the_same_change() -> None:
    by_slot = recipe("dapo").replace(gate=clip(0.2, 0.3))
    assert by_slot.gate == clip(low=0.2, high=0.3)
    assert by_slot == recipe("dapo").replace(gate="clip(0.2, high=0.3)")
    assert by_slot == recipe("dapo", {"gate.high": 0.3})
    assert by_slot == recipe("dapo", {"recipe.gate.high": 0.3})
    assert by_slot == recipe("dapo", {"gate": "clip(0.2, 0.3)"})
    assert by_slot == recipe("dapo").set("gate.clip.high", 0.3)
    assert by_slot.gate["high"] == 0.3 and by_slot.gate["low"] == 0.2


def test_the_rest_of_the_recipe_and_the_original_stay() -> None:
    changed, original = recipe("dapo", {"gate.high": 0.3}), recipe("dapo")
    assert original.gate == clip(0.2, 0.28)
    assert replace(changed, name="dapo", gate=original.gate) == original


def test_a_changed_recipe_says_so_in_its_name_once() -> None:
    assert recipe("dapo", {"gate.high": 0.3}).name == "dapo*"
    assert recipe("dapo", {"gate.high": 0.3, "gate.low": 0.1}).set("gate.high", 0.4).name == "dapo*"
    assert recipe("dapo").replace(name="mine", gate=clip(0.2, 0.3)).name == "mine"
    assert recipe("dapo").name == recipe("dapo", {}).name == "dapo"


def test_settings_may_pass_through_nonsense_on_the_way() -> None:
    settings = {"ratio": "on_policy()", "gate": "score()"}
    for order in (list(settings), list(settings)[::-1]):
        made = recipe("dr_grpo", {key: settings[key] for key in order})
        assert (made.ratio.name, made.gate.name) == ("on_policy", "score")


def test_a_change_changes_the_loss() -> None:
    old = torch.zeros(2, 1, dtype=torch.float64)
    batch = built([1.0, 0.0], old_logp_NT=old)

    def loss(made: Recipe) -> float:
        logp_NT = old + math.log(1.25)
        return float(token_phase(made, batch_phase(made, batch).batch, logp_NT=logp_NT).loss)

    made = recipe("dr_grpo", {"aggregation.length": 1, "gate.high": 0.1})
    assert loss(made) == pytest.approx(-(0.5 * 1.1 - 0.5 * 1.25) / 2)
    assert loss(made.set("gate.high", 0.2)) == pytest.approx(-(0.5 * 1.2 - 0.5 * 1.25) / 2)


def test_a_knob_in_two_slots_must_be_named_in_full() -> None:
    with pytest.raises(RecipeError, match=r"value_loss and positive_nll.*auxiliary\.value_loss"):
        recipe("vapo", {"auxiliary.weight": 0.5})
    made = recipe("vapo", {"auxiliary.positive_nll.weight": 0.5})
    assert [slot["weight"] for slot in made.auxiliary] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"gate.hihg": 0.3}, "would ignore it, its gate is clip.*Did you mean 'high'"),
        ({"gate.bound": 3.0}, "would ignore it, its gate is clip"),
        ({"gate.dual_clip.high": 0.3}, "would ignore it, its gate is clip"),
        ({"shaping.coef": 0.1}, "would ignore it, its shaping is empty.*Set recipe.shaping itself"),
        ({"aggregation.length": 10}, "would ignore it, its aggregation is seq_mean_token_mean"),
        ({"learning_rate": 1e-6}, "no slot 'learning_rate'"),
    ],
)
def test_a_knob_that_the_recipe_ignores_is_an_error(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        recipe("grpo", settings)


def test_a_slot_in_the_wrong_place_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"token\(anchor='old'\) is a ratio, not a gate"):
        recipe("grpo").replace(gate=token())
    with pytest.raises(RecipeError, match=r"must be a slot or its text.*Write clip\(\.\.\.\)"):
        recipe("grpo").replace(gate=clip)


def test_preference_recipes_change_by_replace_and_by_dotted_settings() -> None:
    assert recipe("dpo").replace(preference="logistic(beta=0.5)").preference["beta"] == 0.5
    assert recipe("dpo", {"preference.beta": 0.5}).preference["beta"] == 0.5
    with pytest.raises(RecipeError, match="no slot 'gate'"):
        recipe("dpo").replace(gate=clip())
    with pytest.raises(RecipeError, match="exactly one pairing"):
        recipe("dpo").replace(pairing="")


# --- text, equality, copies -------------------------------------------------------------------


@every_recipe
def test_a_recipe_comes_back_from_its_text(name: str) -> None:
    with warnings.catch_warnings():
        if "@" in name:  # a dialect may be doubtful
            warnings.simplefilter("ignore", RecipeWarning)
        assert Recipe.from_text(name, recipe(name).text()) == recipe(name)


def test_slots_left_out_of_a_text_take_plain_defaults() -> None:
    made = Recipe.from_text("plain", {"gate": "clip(0.1, 0.1)"})
    assert made.gate == clip(0.1, 0.1)
    assert [str(slot) for slot in made.advantage] == ["group_zscore(ddof=1, eps=1e-06)"]
    with pytest.raises(RecipeError, match=r"no slot 'gates'.*Did you mean 'gate'"):
        Recipe.from_text("plain", {"gates": "clip()"})


@every_recipe
def test_slots_print_compare_hash_and_pickle(name: str) -> None:
    for slot in recipe(name).slots():
        (read,) = parse(slot.kind, str(slot))
        copied = pickle.loads(pickle.dumps(slot))
        assert read == slot == copied
        assert hash(read) == hash(slot) == hash(copied)
        assert copied.definition.function is slot.definition.function
    assert pickle.loads(pickle.dumps(recipe(name))) == recipe(name)


def test_slots_differ_by_name_and_by_every_parameter() -> None:
    assert len({clip(0.2, 0.2), clip(), clip(0.2, 0.3), clip(0.3, 0.2), token()}) == 4
    assert str(clip(0.2, 0.28)) == "clip(low=0.2, high=0.28)"
    assert str(segment_clip()) == "segment_clip(width=constant(low=0.2, high=0.2))"
    assert clip(1, 0) == clip(1.0, 0.0)  # a whole number is a number


def test_a_slot_can_not_be_changed_in_place() -> None:
    with pytest.raises(AttributeError):
        clip().name = "other"
    assert clip().replace(high=0.3) == clip(0.2, 0.3)


def test_a_bare_name_is_a_call_with_defaults() -> None:
    assert parse("gate", "clip") == parse("gate", "clip()") == (clip(),)
    assert parse("filter", "zero_variance, overlong()") == recipe("dapo").filter
    assert parse("penalty", "") == parse("penalty", "none") == ()


# --- soundness --------------------------------------------------------------------------------

# rule, recipe, change, the reason in the message, the remedy in the message
REFUSED_CASES: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("shaping_beside_branches", "vineppo", {"shaping": "kl_per_token(coef=0.01)"},
     "compares the reward of an answer with those of its branches", "Put it into the reward"),
    ("shaping_beside_branches", "vineppo", {"shaping": "kl_per_sequence(coef=0.01)"},
     "compares the reward of an answer with those of its branches", "Put it into the reward"),
    ("advantage_chain", "grpo", {"advantage": ""}, "chain is empty", "Start it with a baseline"),
    ("advantage_chain", "grpo", {"advantage": "scale(2.0)"}, "only modifies", "a baseline first"),
    ("advantage_chain", "grpo", {"advantage": "group_mean(), leave_one_out()"},
     "throw away what group_mean computed", "Keep one"),
    ("no_slot_twice", "grpo", {"penalty": "kl(0.1), kl(0.2)"}, "kl stands there twice", "Merge"),
    ("no_slot_twice", "dapo", {"filter": "overlong(), overlong()"}, "stands there twice", "Merge"),
    ("mismatch_counted_twice", "dppo", {"correction": "tis_token()"},
     "contains that factor already", "Use anchor='old', or no correction"),
    ("mismatch_counted_twice", "grpo@tinker", {"correction": "mis_geometric()"},
     "contains that factor already", "Use anchor='old', or no correction"),
    ("ratio_fits_gate", "grpo", {"gate": "score()"}, "would be ignored", "Use ratio=on_policy()"),
    ("ratio_fits_gate", "grpo", {"ratio": "on_policy()"}, "would never act", "Use gate=score()"),
    ("ratio_fits_gate", "grpo", {"gate": "segment_clip()"}, "segments", "ratio=segment_geomean()"),
    ("ratio_fits_gate", "grpo", {"gate": "tv_mask()"}, "distance to the sampler",
     "use ratio=token(anchor='sampler')"),
    ("ratio_fits_gate", "gmpo", {"ratio": "sequence_geomean()"}, "means nothing",
     "Use ratio=token()"),
    ("mismatch_counted_twice", "tis", {"correction": "tis_token(), icepop()"},
     "the mismatch would count twice", "Keep one"),
    ("gate_needs_token_ratio", "simko", {"ratio": "sequence_geomean()"}, "decides token by token",
     "Use ratio=token()"),
    ("gate_needs_token_ratio", "dppo", {"ratio": "sequence_geomean(anchor='sampler')"},
     "decides token by token", "Use ratio=token()"),
    ("token_links", "ppo", {"advantage": "gae(), whiten_sequences()"},
     "padding would enter its statistics", "Use whiten_tokens()"),
    ("settings_fit_each_other", "grpo", {"advantage": "group_mean(), scale(0)"},
     "every advantage 0", "Take it out"),
    ("baseline_for_dropped_groups", "dcpo", {"filter": "zero_variance()"},
     "takes out the uniform groups", "Keep one"),
    ("ignored_rewards", "dr_grpo", {"shaping": "kl_per_token()"}, "group_mean does not read",
     "Use kl_per_sequence()"),
    ("ignored_rewards", "grpo_process", {"shaping": "signed()"}, "would be ignored",
     "Shape the step rewards instead"),
    ("baseline_for_dropped_groups", "olmo3", {"advantage": "group_and_batch_mean()"},
     "takes out the uniform groups", "Keep one"),
    ("baseline_for_dropped_groups", "reinforce_rej", {"advantage": "group_and_moving_mean()"},
     "takes out the uniform groups", "Keep one"),
    ("critic_nobody_reads", "grpo", {"auxiliary": "value_loss()"}, "no advantage reads",
     "Use gae(), or drop the loss"),
    ("critic_nobody_reads", "grpo", {"auxiliary": "outcome_bce()"}, "no advantage reads",
     "Use process_rloo()"),
    ("nothing_teaches", "real", {"auxiliary": ""}, "leaves the policy's term out",
     "Add one, such as group_contrast()"),
    ("settings_fit_each_other", "prime", {"filter": "accuracy_band(0.8, 0.8)"}, "keeps nothing",
     "low must be below high"),
    ("settings_fit_each_other", "icepop", {"correction": "icepop(5.0, 0.5)"}, "keeps nothing",
     "low must be below high"),
    ("settings_fit_each_other", "cispo", {"gate": "weight_cap(cap=1.0, floor=2.0)"},
     "floor lies above the cap", "Lower it"),
    ("settings_fit_each_other", "dapo", {"shaping": "soft_overlong(100, 200)"},
     "cache is longer than an answer may be", "below max_length"),
]  # fmt: skip
DOUBTFUL_CASES: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("clip_range_fits_level", "gspo", {"gate": "clip(0.2, 0.2)"}, "never acts",
     "GSPO uses clip(0.0003, 0.0004)"),
    ("clip_range_fits_level", "grpo", {"gate": "clip(0.0003, 0.0004)"},
     "clips nearly every token", "per token 0.2 is usual"),
    ("sequence_ratio_per_token", "gspo", {"aggregation": "token_mean_batch()"},
     "weighs by its length", "Use seq_mean_token_mean()"),
    ("sequence_ratio_per_token", "gmpo", {"aggregation": "token_mean_group()"},
     "weighs by its length", "Use seq_mean_token_mean()"),
    ("sequence_ratio_per_token", "gspo", {"schedule": "low_then_high()"},
     "splits answers by token", ""),
    ("kl_without_effect", "grpo", {"penalty": "kl(estimator='k1')"},
     "zero expected gradient", "Use estimator='k2'"),
    ("knobs_without_effect", "grpo", {"penalty": "kl(coef=0.0)"}, "a reference model in memory",
     "Take it out"),
    ("knobs_without_effect", "ppo", {"auxiliary": "value_loss(weight=0)"}, "does nothing",
     "Take it out"),
    ("knobs_without_effect", "grpo", {"gate": "clip(1.5, 0.2)"}, "never acts", ""),
    ("token_advantage_under_sequence_ratio", "gspo",
     {"advantage": "group_zscore(), reweight_by_probability()"}, "its own advantage",
     "Use ratio=geomean_token_grad()"),
    ("anchors_differ", "dcpo", {"ratio": "token('sampler')"}, "the ratio by the sampler's",
     "Use anchor='old'"),
    ("rewards_outside_a_method", "maxrl", {"shaping": "signed()"}, "near 0 or below",
     "Give it rewards of 0 and 1"),
    ("rewards_outside_a_method", "gpg", {"filter": "zero_variance()"}, "takes them out",
     "Keep one"),
    ("reward_model_read_as_trained", "prime", {"advantage": "process_rloo(beta=0.5)"},
     "trained at one β and read at another", "Set both alike"),
    ("kl_without_effect", "grpo", {"penalty": "kl(), kl_importance()"}, "stands there twice",
     "Keep one"),
    ("kl_without_effect", "grpo", {"penalty": "kl(estimator='k1')"},
     "zero expected gradient", "Use estimator='k2'"),
    ("kl_without_effect", "rloo", {"penalty": "kl()"}, "KL to the reference stands there twice",
     "Keep one of the two"),
    ("stale_policy_gradient", "rloo", {"schedule": "joint(updates=4)"}, "off-policy",
     "Use updates=1, or ratio=token()"),
    ("routes_and_updates", "routing_replay_r3", {"schedule": "joint(updates=4)"},
     "4 updates go through the experts that the sampler visited", "Use schedule.updates=1"),
    ("routes_and_updates", "routing_replay", {"schedule": "joint(updates=1)"},
     "replaying them changes nothing", "Set schedule.updates=4"),
    ("normalised_twice", "lite_ppo", {"advantage": "group_zscore(), whiten_sequences()"},
     "the same rewards twice", "group_mean() is enough"),
    ("frozen_helper", "ppo", {"auxiliary": ""}, "a critic that nothing trains",
     "Add auxiliary value_loss()"),
    ("frozen_helper", "prime", {"auxiliary": ""}, "a reward model that nothing trains",
     "Add outcome_bce()"),
    ("discounts_differ", "ppo", {"auxiliary": "value_loss(gamma=0.9)"},
     "discount differently ([0.9, 1.0])", ""),
]  # fmt: skip


def case_id(case: tuple[str, str, dict[str, Any], str, str]) -> str:
    return f"{case[1]} with {next(iter(case[2].values())) or 'nothing'}"


@pytest.mark.parametrize("case", REFUSED_CASES, ids=case_id)
def test_nonsense_is_refused_with_reason_and_remedy(case: Any) -> None:
    _, name, change, reason, remedy = case
    with pytest.raises(RecipeError) as caught:
        quietly(recipe(name), **change)
    assert "makes no sense" in str(caught.value)
    assert reason in str(caught.value) and remedy in str(caught.value)


@pytest.mark.parametrize("case", DOUBTFUL_CASES, ids=case_id)
def test_the_doubtful_runs_with_a_warning_that_says_what_to_do(case: Any) -> None:
    _, name, change, reason, remedy = case
    with pytest.warns(RecipeWarning, match=re.escape(reason)) as caught:
        recipe(name).replace(**change)
    assert any(remedy in str(one.message) for one in caught)


def test_every_rule_has_its_case() -> None:
    assert {case[0] for case in REFUSED_CASES} == {rule.__name__ for rule in REFUSED}
    assert {case[0] for case in DOUBTFUL_CASES} == {rule.__name__ for rule in DOUBTFUL}


def test_every_complaint_says_what_to_do() -> None:
    remedy = re.compile(
        r"\b([Uu]se|[Kk]eep|[Pp]ut|[Mm]erge|[Ss]tart|[Tt]ake|[Aa]dd|[Ss]hape|[Ss]et|[Gg]ive|"
        r"[Dd]rop|[Rr]aise|[Ll]ower|[Mm]ake|[Cc]hoose|must be|is usual|uses|is enough)\b"
    )
    silent = []
    for _, name, change, _, _ in [*REFUSED_CASES, *DOUBTFUL_CASES]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                recipe(name).replace(**change)
                texts = [str(one.message) for one in caught]
            except RecipeError as error:
                texts = [str(error)]
        assert texts
        silent += [text for text in texts if not remedy.search(text)]
    assert silent == []


@every_recipe
def test_no_recipe_of_the_house_is_doubtful(name: str) -> None:
    refused, doubtful = complaints(recipe(name))
    assert refused == []
    assert doubtful == [] or name in DIALECTS


# --- a user's own file ------------------------------------------------------------------------


def written(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


PLUGIN = """
    from __future__ import annotations

    import torch

    from groupwise import recipe, register
    from groupwise.groups.statistics import group_stats
    from groupwise.methods.slots import NonNegative, Positive, advantage, gate


    @gate(equation="S = min(r, {top})·A")
    def one_sided(log_ratio_NT, advantage_NT, batch, *, top: Positive = 1.5):
        ratio_NT = log_ratio_NT.exp()
        return ratio_NT.clamp(max=top) * advantage_NT, ratio_NT > top


    @advantage(base=True, equation="A = R − max_g R + {bonus}")
    def below_the_best(reward_N, batch, *, bonus: NonNegative = 0.0):
        return reward_N - group_stats(reward_N, batch).high_N + bonus


    register(
        recipe("dr_grpo").replace(
            name="mine",
            advantage=below_the_best(bonus=0.25),
            gate=one_sided(),
            aggregation="token_sum()",
        )
    )
"""


@pytest.mark.usefixtures("registries")
def test_a_users_gate_advantage_and_recipe_run_through_both_phases(tmp_path: Path) -> None:
    path = written(tmp_path, PLUGIN)
    made = recipe(f"{path}:mine", {"gate.top": 2.0})
    old = torch.zeros(2, 1, dtype=torch.float64)
    done = batch_phase(made, built([1.0, 0.0], old_logp_NT=old)).batch
    close(done.advantage_NT, [[0.25], [-0.75]])
    logp_NT = torch.tensor([[3.0], [1.5]], dtype=torch.float64).log().requires_grad_()
    result = token_phase(made, done, logp_NT=logp_NT)
    close(result.loss.detach(), -(2.0 * 0.25 - 1.5 * 0.75))
    close(torch.autograd.grad(result.loss, logp_NT)[0], [[0.0], [1.5 * 0.75]])
    assert result.tally.read()["clip/high"] == 0.5
    assert Recipe.from_text("mine*", made.text()) == made
    assert pickle.loads(pickle.dumps(made.gate)) == made.gate
    assert "2" in made.gate.equation


@pytest.mark.usefixtures("registries")
def test_a_file_may_be_named_again(tmp_path: Path) -> None:
    path = written(tmp_path, PLUGIN)
    assert recipe(f"{path}:mine") is recipe(f"{path}:mine")
    assert recipe("mine") is recipe(f"{path}:mine")


@pytest.mark.usefixtures("registries")
def test_a_slots_taken_name_is_refused(tmp_path: Path) -> None:
    clash = """
        from groupwise.methods.slots import gate

        @gate(equation="S = A")
        def clip(log_ratio_NT, advantage_NT, batch):
            return advantage_NT, advantage_NT > 0
    """
    with pytest.raises(RecipeError, match=r"gate 'clip' is already defined in .*another name"):
        recipe(f"{written(tmp_path, clash)}:mine")
    assert recipe("grpo").gate == parse("gate", "clip(0.2, 0.2)")[0] == clip(0.2, 0.2)


@pytest.mark.usefixtures("registries")
def test_a_recipes_taken_name_is_refused() -> None:
    with pytest.raises(RecipeError, match="'grpo' exists already"):
        register(recipe("dapo").replace(name="grpo"))
    assert register(replace(recipe("grpo"))) == recipe("grpo")  # the same thing again


@pytest.mark.usefixtures("registries")
def test_a_file_that_fails_or_registers_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"There is no file .*none\.py"):
        recipe(f"{tmp_path / 'none.py'}:mine")
    with pytest.raises(RecipeError, match=r"does the file call register"):
        recipe(f"{written(tmp_path, 'x = 1', 'silent.py')}:mine")
    broken = written(tmp_path, "raise RuntimeError('half done')", "broken.py")
    with pytest.raises(RecipeError, match=r"broken\.py, line 1: RuntimeError: half done"):
        recipe(f"{broken}:mine")
    broken.write_text(textwrap.dedent(PLUGIN))
    assert recipe(f"{broken}:mine").name == "mine"  # mended, it loads


# --- dialects ---------------------------------------------------------------------------------

# Two groups, all rows two tokens long: one success of four, two of four.
REWARDS, GROUPS = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0], [5] * 4 + [9] * 4
CENTRED = [0.75, -0.25, -0.25, -0.25, 0.5, 0.5, -0.5, -0.5]
STD = [0.5] * 4 + [math.sqrt(1 / 3)] * 4
DRIFT = (0.5, -0.2)  # log π_old − log π_ref of the first and second token


def small_batch(**streams: Tensor) -> TokenBatch:
    old = torch.full((8, 2), -1.0, dtype=torch.float64)
    return built(
        REWARDS, GROUPS, [2] * 8, old_logp_NT=old, sampler_logp_NT=old.clone(),
        ref_logp_NT=old - torch.tensor(DRIFT, dtype=torch.float64), **streams,
    )  # fmt: skip


def zscore(eps: float) -> list[float]:
    return [c / (s + eps) for c, s in zip(CENTRED, STD, strict=True)]


OTHERS_STD = math.sqrt(1 / 3) + 1e-6  # of {1, 0, 0} or {1, 1, 0}
TOKEN_STD = math.sqrt(2 * sum(z * z for z in zscore(1e-6)) / 15)
ADVANTAGES = {
    "trl": zscore(1e-4),
    "verl": zscore(1e-6),
    "openrlhf": [z - 0.01 * sum(DRIFT) for z in zscore(1e-9)],  # KL behind the z-score
    "open-instruct": CENTRED,
    "prime-rl": CENTRED,
    # z-scored again over 16 tokens, each z standing on two of them
    "areal": [z / (TOKEN_STD + 1e-5) for z in zscore(1e-6)],
    "slime": zscore(1e-6),
    "skyrl": zscore(1e-6),
    # a lone success: the others all agree, so it is not scaled
    "nemo-rl": [1.0, *[-1 / 3 / OTHERS_STD] * 3, *[2 / 3 / OTHERS_STD] * 2,
                *[-2 / 3 / OTHERS_STD] * 2],
    "oat": CENTRED,
    "tinker": CENTRED,
}  # fmt: skip


def test_every_dialect_is_in_the_table() -> None:
    of_grpo = {name for name in DIALECTS if name.startswith("grpo@")}
    assert {f"grpo@{tool}" for tool in ADVANTAGES} == of_grpo
    # Those of methods with a second model have numbers of their own: the peers' critics, PRIME.
    assert set(DIALECTS) - of_grpo == {"ppo@verl", "prime@release"}


@pytest.mark.parametrize("tool", ADVANTAGES)
def test_advantages_of_a_dialect(tool: str) -> None:
    close(first_token(recipe(f"grpo@{tool}"), small_batch()), ADVANTAGES[tool])


def test_openrlhf_takes_kl_per_token_to_go_and_limits_the_zscore() -> None:
    made = recipe("grpo@openrlhf")
    done = batch_phase(made, small_batch()).batch
    close(done.advantage_NT[:, 1], [z - 0.01 * DRIFT[1] for z in zscore(1e-9)])
    zero = torch.zeros(128, 1, dtype=torch.float64)
    lone = built([1.0] + [0.0] * 127, old_logp_NT=zero, ref_logp_NT=zero)
    close(first_token(made, lone)[0], 10.0)  # 127/√128 = 11.2 without the limit


def test_verl_and_the_house_differ_where_a_bad_tokens_ratio_exploded() -> None:
    logp_NT = torch.full((8, 2), -1.0, dtype=torch.float64)
    logp_NT[1, 0] += math.log(4.0)
    for name, held in (("grpo@verl", 3.0), ("grpo", 4.0)):
        made = recipe(name)
        result = token_phase(made, batch_phase(made, small_batch()).batch, logp_NT=logp_NT)
        close(result.objective_NT[1], [held * zscore(1e-6)[1], zscore(1e-6)[1]])


def test_a_dialects_denominators() -> None:
    lengths, rewards = [1, 3], [1.0, 0.0]
    zero = torch.zeros(2, 3, dtype=torch.float64)
    streams = {"old_logp_NT": zero, "sampler_logp_NT": zero, "ref_logp_NT": zero}
    weights = {
        "tinker": (1.0, 1.0),
        "oat": (1 / (2 * 512), 1 / (2 * 512)),
        "slime": (1 / 2, 1 / 6),
        "trl": (1 / 4, 1 / 4),
        "verl": (1 / 4, 1 / 4),
    }
    for tool, (short, long) in weights.items():
        batch = built(rewards, lengths=lengths, **streams)
        done = batch_phase(recipe(f"grpo@{tool}"), batch).batch
        close(done.coefficient_NT, [[short, 0.0, 0.0], [long] * 3])


def test_tinker_sums_without_a_clip() -> None:
    made = recipe("grpo@tinker")
    logp_NT = torch.full((8, 2), -1.0 + math.log(3.0), dtype=torch.float64)
    logp_NT[1:] = -1.0
    result = token_phase(made, batch_phase(made, small_batch()).batch, logp_NT=logp_NT)
    close(result.loss, -(2 * 3.0 * 0.75 + 2 * (sum(CENTRED) - 0.75)))


def test_skyrl_averages_kl_per_sequence_beside_a_token_mean() -> None:
    made = recipe("grpo@skyrl")
    zero = torch.zeros(2, 3, dtype=torch.float64)
    ref = torch.tensor([[-0.5, 0, 0], [-0.1, -0.2, -0.3]], dtype=torch.float64)
    batch = built([1.0, 0.0], lengths=[1, 3], old_logp_NT=zero, ref_logp_NT=ref)
    result = token_phase(made, batch_phase(made, batch).batch, logp_NT=zero)
    values = k3(-ref)
    expected = 0.001 * (float(values[0, 0]) + float(values[1].mean())) / 2
    close(result.terms["kl_sequence_mean"], expected)


def test_prime_rl_and_tinker_anchor_at_the_sampler() -> None:
    streams = {"sampler_logp_NT": torch.full((8, 2), -1.5, dtype=torch.float64)}
    batch = replace(small_batch(), **streams)
    for tool in ("prime-rl", "tinker"):
        made = recipe(f"grpo@{tool}")
        logp_NT = torch.full((8, 2), -1.0, dtype=torch.float64)
        result = token_phase(made, batch_phase(made, batch).batch, logp_NT=logp_NT)
        close(result.log_ratio_NT, torch.full((8, 2), 0.5))


# --- memory and baselines across prompts ------------------------------------------------------


def test_dcpo_remembers_a_prompts_visits() -> None:
    made, memory, found = recipe("dcpo"), Memory(), []
    for rewards in ([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]):
        old = torch.full((4, 1), -1.0, dtype=torch.float64)
        done = batch_phase(made, built(rewards, [42] * 4, old_logp_NT=old, memory=memory))
        assert len(memory.visits.get(42, ())) == len(found)  # the old memory is not touched
        found.append(done.batch.advantage_NT[:, 0].tolist())
        memory = done.memory
    close(found[0], [1.5, -0.5, -0.5, -0.5])
    # Second visit: A_new = ±0.5/√⅓; μ = 3/8, s² = mean[1/4 + 1/64, 1/3 + 1/64]
    new, std = 0.5 / math.sqrt(1 / 3), math.sqrt((1 / 4 + 1 / 3) / 2 + 1 / 64)
    right, wrong = (new + 0.625 / std) / 2, (-new - 0.375 / std) / 2
    close(found[1], [right, right, wrong, wrong])
    # Third: A_new = 0, μ = 1/4, s² = mean[1/4, 1/3 + 1/16, 1/16], A = A_tot/3
    total = -0.25 / math.sqrt((1 / 4 + 1 / 3 + 1 / 16 + 1 / 16) / 3)
    close(found[2], [total / 3] * 4)
    close(found[2], [-0.1715] * 4, atol=5e-5)
    assert [(v.size, v.mean) for v in memory.visits[42]] == [(4, 0.25), (4, 0.5), (4, 0.0)]


def test_dcpo_takes_no_rounding_of_equal_rewards_for_a_spread() -> None:
    for value in (0.1, 1 / 3, 0.7):  # seven of them do not average to themselves
        old = torch.full((7, 1), -1.0, dtype=torch.float64)
        assert first_token(recipe("dcpo"), built([value] * 7, old_logp_NT=old)) == [0.0] * 7


def test_dcpo_keeps_prompts_apart() -> None:
    old = torch.full((4, 1), -1.0, dtype=torch.float64)
    first = batch_phase(recipe("dcpo"), built([1.0, 0.0, 0.0, 0.0], [1] * 4, old_logp_NT=old))
    other = built([0.0] * 4, [2] * 4, old_logp_NT=old, memory=first.memory)
    done = batch_phase(recipe("dcpo"), other)
    assert done.batch.advantage_NT.abs().max() == 0.0
    assert set(done.memory.visits) == {1, 2}


def test_the_moving_average_baseline_starts_with_the_first_batch_and_lags_behind() -> None:
    made = recipe("dr_grpo").replace(advantage="group_and_moving_mean(mix=0.1, decay=0.9)")
    first = batch_phase(made, built([1.0, 0.0, 1.0, 0.0]))
    close(first.batch.advantage_NT[:, 0], [0.5, -0.5, 0.5, -0.5])
    assert first.memory.reward_average == 0.5
    second = batch_phase(made, built([0.0, 0.0, 0.0, 0.0], memory=first.memory))
    close(second.batch.advantage_NT[:, 0], [-0.05] * 4)  # 0 − (0.9·0 + 0.1·0.5)
    assert second.memory.reward_average == pytest.approx(0.45)
    third = batch_phase(made, built([1.0, 1.0], memory=second.memory))
    close(third.batch.advantage_NT[:, 0], [0.1 * (1 - 0.45)] * 2)
    assert third.memory.reward_average == pytest.approx(0.9 * 0.45 + 0.1)


def test_a_cross_prompt_baseline_pushes_all_wrong_groups_down() -> None:
    batch = built([0.0, 0.0, 1.0, 0.0], [0, 0, 1, 1])
    made = recipe("dr_grpo").replace(advantage="group_and_batch_mean(mix=0.1)")
    close(first_token(made, batch), [-0.025, -0.025, 0.525, -0.475])
    only = recipe("dr_grpo").replace(advantage="group_and_batch_mean(mix=0.1, groups='all_wrong')")
    close(first_token(only, batch), [-0.025, -0.025, 0.5, -0.5])
    close(first_token(recipe("dr_grpo"), batch), [0.0, 0.0, 0.5, -0.5])


# --- filters ----------------------------------------------------------------------------------


def chosen(filters: str, batch: TokenBatch) -> tuple[list[bool], list[bool], tuple[int, ...]]:
    found = select(recipe("dr_grpo").replace(filter=filters), batch)
    return found.learn_N.tolist(), found.count_N.tolist(), found.refill


def test_zero_variance_wants_uniform_groups_again_by_their_ids() -> None:
    batch = built([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], [70, 70, -4, -4, 9, 9])
    learn, count, refill = chosen("zero_variance()", batch)
    assert refill == (9, 70)
    assert count == [False, False, True, True, False, False]
    assert learn == [True] * 6
    assert batch_phase(recipe("dr_grpo").replace(filter="zero_variance()"), batch).refill == refill


def test_dropped_groups_of_a_given_batch_stay_in_the_denominator() -> None:
    made = recipe("reinforce").replace(filter="zero_variance()", aggregation="token_mean_batch()")
    done = batch_phase(made, built([1.0, 1.0, 1.0, 0.0], [0, 0, 1, 1])).batch
    close(done.advantage_NT[:, 0], [0.0, 0.0, 1.0, 0.0])
    close(done.coefficient_NT[:, 0], [0.25] * 4)


def test_zero_variance_compares_before_shaping() -> None:
    made = recipe("dapo", {"shaping.max_length": 4, "shaping.cache": 2})
    cut = torch.tensor([False, False])
    old = torch.zeros(2, 4, dtype=torch.float64)
    streams = {"truncated_N": cut, "old_logp_NT": old}
    same_task = batch_phase(made, built([1.0, 1.0], lengths=[1, 4], **streams))
    assert same_task.batch.reward_N.tolist() == [1.0, 0.0]  # length alone tells them apart
    assert same_task.refill == (0,)
    assert same_task.batch.advantage_NT.abs().max() == 0.0
    same_shaped = batch_phase(made, built([0.0, 1.0], lengths=[1, 4], **streams))
    assert same_shaped.batch.reward_N.tolist() == [0.0, 0.0]
    assert same_shaped.refill == ()


def test_a_filter_is_exact_about_equal_rewards() -> None:
    batch = built([0.1, 0.1, 0.1, 0.1 + 1e-16], [0, 0, 1, 1])
    assert chosen("zero_variance()", batch)[2] == (0,)


def test_the_accuracy_band_includes_its_ends() -> None:
    rewards = [1.0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    batch = built(rewards, [g for g in range(4) for _ in range(5)])
    assert chosen("accuracy_band(0.2, 0.8)", batch)[2] == (2, 3)
    assert chosen("accuracy_band(0.3, 0.7)", batch)[2] == (0, 1, 2, 3)


def test_enough_mixed_refills_only_below_its_share() -> None:
    two_of_three = built([1.0, 0.0, 0.0, 1.0, 0.0, 0.0], [0, 0, 1, 1, 2, 2])
    assert chosen("enough_mixed(0.6)", two_of_three)[2] == ()
    assert chosen("enough_mixed(0.7)", two_of_three)[2] == (2,)


def test_reject_zeroes_without_a_refill_and_overlong_masks() -> None:
    batch = built([1.0, 1.0, 1.0, 0.0], [0, 0, 1, 1], truncated_N=torch.tensor([0, 1, 1, 0]).bool())
    assert chosen("reject()", batch) == ([True] * 4, [False, False, True, True], ())
    assert chosen("overlong()", batch) == ([True, False, False, True], [True] * 4, ())
    assert chosen("reject(), overlong()", batch)[:2] == (
        [True, False, False, True],
        [False, False, True, True],
    )


def test_the_dead_group_factor_counts_prompts() -> None:
    batch = built([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0], [0, 0, 1, 1, 2, 2, 3, 3])
    made = recipe("dr_grpo").replace(advantage=(group_mean(), "rescale_for_dead_groups()"))
    close(first_token(made, batch), [2.0, -2.0, 0, 0, 0, 0, 0, 0])  # α = 4/1
    all_dead = built([1.0, 1.0], [0, 0])
    close(first_token(made, all_dead), [0.0, 0.0])


# --- what a recipe needs ----------------------------------------------------------------------


def test_a_recipe_says_which_streams_outputs_models_and_parts_it_needs() -> None:
    ppo = recipe("ppo")
    assert set(ppo.streams) == {"old_logp_NT", "ref_logp_NT", "old_value_NT"}
    assert set(ppo.outputs) == {"logp_NT", "value_NT"}
    assert ppo.models == ("policy", "reference", "critic")
    assert ppo.roles == ("reference", "critic")
    assert "sampler_logp_NT" in recipe("grpo@tinker").streams
    assert recipe("dr_grpo").models == ("policy",)
    assert recipe("prime").models == ("policy", "reference", "implicit reward model")


def test_several_updates_need_the_old_policy() -> None:
    assert "old_logp_NT" not in recipe("dr_grpo").streams
    assert "old_logp_NT" in recipe("dr_grpo", {"schedule.updates": 2}).streams
