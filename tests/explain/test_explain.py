"""Explanations: complete, composed of the slots, and unable to drift from the code."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import learner_outputs, leaves, random_sample
from real_shapes import M

from groupwise import TokenBatch, batch_phase, recipe, token_phase
from groupwise.config import load
from groupwise.errors import RecipeError
from groupwise.explain.choose import CHANGES, QUESTIONS, ROWS, choose, complete
from groupwise.explain.explain import (
    algorithm_pages,
    by_kind,
    difference,
    equation,
    explain,
    families,
    notes,
    plain_sentences,
    short,
    slot_functions,
    table,
)
from groupwise.explain.memory import GRADIENT, bytes_a_weight, memory
from groupwise.explain.render import choice_text, explain_text, recipes_text
from groupwise.methods.composition import RECIPE_SLOTS, Recipe
from groupwise.methods.mixtures import ASKED, INSTEAD
from groupwise.methods.slots import REGISTRY, parse
from groupwise.model import cost
from groupwise.optim.roles import role_sizes
from groupwise.recipes import RECIPES
from groupwise.stages.group_checks import routes_not_told

ROOT = Path(__file__).resolve().parents[2]
NAMES = list(notes())  # the package's own: other tests may have registered theirs
PAGES = algorithm_pages()
INDEX = PAGES["algorithms.md"]
POLICY = [name for name in NAMES if isinstance(RECIPES[name], Recipe)]


def lines_of(data: dict[str, Any], slot: str) -> list[str]:
    return [line["equation"] for line in data["equation"] if line["slot"] == slot]


# --- complete ---------------------------------------------------------------------------------


def test_every_recipe_has_notes_and_every_note_a_recipe() -> None:
    assert sorted(set(RECIPES) ^ set(notes())) == []


@pytest.mark.parametrize("name", NAMES)
def test_notes_are_short_and_say_something(name: str) -> None:
    entry = notes()[name]
    assert set(entry) == {"pitfalls", "disagree"}
    assert 1 <= len(entry["pitfalls"]) <= 4 and len(entry["disagree"]) <= 5
    if "@" in name:
        assert entry["disagree"], "a dialect must say what differs from the paper"
    for text in entry["pitfalls"] + entry["disagree"]:
        assert 20 < len(text) <= 260 and text.endswith("."), text


@pytest.mark.parametrize("name", NAMES)
def test_an_explanation_has_a_line_per_slot_and_reads_back(name: str) -> None:
    data, entry = explain(name), RECIPES[name]
    extra = 1 + len(entry.fixed)  # the loss, and what no slot says
    assert len(data["equation"]) == len(entry.slots()) + extra
    assert sorted(f["text"] for f in data["functions"]) == sorted(map(str, entry.slots()))
    shown = " ".join(line["equation"] for line in data["equation"])
    assert not re.search(r"\{[a-z_]+\}", shown), "a parameter is not filled in"
    for key in ("title", "paper", "year", "fixes", "breaks", "reach_for", "models", "pitfalls"):
        assert data[key], f"{name} has no {key}"
    for stream in data["needs"]:
        assert stream["meaning"], stream
    for kind, text in data["slots"].items():
        assert parse(kind, text) == by_kind(entry)[kind]
    if isinstance(entry, Recipe) and not data["doubts"]:
        assert Recipe.from_text(name, data["slots"] | {"source": data["source"]}) == entry


@pytest.mark.parametrize("name", NAMES)
def test_the_short_form_reads_back(name: str) -> None:
    for kind, slots in by_kind(RECIPES[name]).items():
        assert parse(kind, ", ".join(map(short, slots))) == slots


def test_the_short_form_leaves_out_defaults_only() -> None:
    assert short(recipe("grpo").gate) == "clip"
    assert short(recipe("dapo").gate) == "clip(high=0.28)"
    assert short(recipe("cispo").gate) == "weight_cap(cap=5.0)"  # no default: always shown


def test_the_table_has_a_row_per_recipe() -> None:
    rows = {row["name"]: row for row in table()}
    assert set(NAMES) <= set(rows)
    assert rows["dapo"]["short"]["filter"] == "zero_variance, overlong"
    assert rows["prime"]["models"] == ["policy", "reference", "implicit reward model"]


# --- equations --------------------------------------------------------------------------------


def test_equations_by_hand() -> None:
    grpo, dapo = explain("grpo"), explain("dapo")
    assert lines_of(grpo, "loss") == ["L = −Σ u·S + Σ u·penalty"]
    assert lines_of(grpo, "penalty") == ["+ 0.04·k3(ℓ − ℓ^ref)"]
    assert lines_of(grpo, "aggregation") == ["u = 1/(B·n_i), B sequences"]
    assert lines_of(dapo, "loss") == ["L = −Σ u·S"]
    assert lines_of(dapo, "gate") == ["S = min(r·A, clip(r, 1−0.2, 1+0.28)·A)"]
    assert lines_of(explain("icepop"), "loss") == ["L = −Σ u·w·S"]
    assert lines_of(explain("ppo"), "loss") == ["L = −Σ u·S + auxiliary"]
    assert lines_of(explain("dppo"), "ratio") == ["r_t = π(y_t) / π_sampler(y_t)"]
    assert lines_of(explain("spin"), "reference") == ["ℓ^ref = the previous iterate"]


def test_the_equation_follows_the_slots() -> None:
    changed = recipe("grpo", {"gate.high": 0.3, "penalty.coef": 0.5, "correction": "tis_token(3)"})
    lines = {line["slot"]: line["equation"] for line in equation(changed)}
    assert lines["loss"] == "L = −Σ u·w·S + Σ u·penalty"
    assert "1+0.3)" in lines["gate"]
    assert lines["penalty"].startswith("+ 0.5·k3")
    assert lines["correction"] == "w_t = min(ρ_t, 3)"


@pytest.mark.parametrize("name", ["grpo", "icepop", "olmo3", "ppo", "grpo@skyrl", "entropy_bonus"])
def test_the_loss_line_is_what_the_token_phase_computes(name: str) -> None:
    made, sample = recipe(name), random_sample(3)
    done = batch_phase(made, sample.build()).batch
    result = token_phase(made, done, **learner_outputs(made, sample, leaves(sample)))
    loss = lines_of(explain(name), "loss")[0]
    assert ("·w·" in loss) == (result.weight_NT is not None)
    weight = 1.0 if result.weight_NT is None else result.weight_NT
    policy = -(done.coefficient_NT * weight * result.objective_NT).sum()
    rest = {key: term for key, term in result.terms.items() if key != "policy"}
    kinds = {slot.name: slot.kind for slot in (*made.penalty, *made.auxiliary)}
    assert set(rest) == set(kinds)
    assert ("penalty" in loss) == ("penalty" in kinds.values())
    assert ("auxiliary" in loss) == ("auxiliary" in kinds.values())
    assert float(policy + sum(rest.values())) == pytest.approx(
        float(result.loss.detach()), abs=1e-12
    )


# --- differences ------------------------------------------------------------------------------


def test_grpo_and_dapo_differ_where_they_do() -> None:
    found = difference("grpo", "dapo")
    assert set(found["slots"]) == {
        "filter", "shaping", "gate", "aggregation", "penalty", "schedule",
    }  # fmt: skip
    assert found["slots"]["gate"]["parameters"] == {"clip.high": {"a": 0.2, "b": 0.28}}
    assert found["slots"]["penalty"]["b"] == ""
    assert found["settings"]["group_size"] == {"a": 64, "b": 16}
    assert "learning_rate" not in found["settings"]
    assert found["demands"]["models"] == {"a": ["policy", "reference"], "b": ["policy"]}


def test_a_recipe_does_not_differ_from_itself() -> None:
    found = difference("gspo", "gspo")
    assert not found["slots"] and not found["settings"] and not found["demands"]


@pytest.mark.parametrize("name", POLICY)
@pytest.mark.filterwarnings("ignore::groupwise.errors.RecipeWarning")
def test_a_difference_is_complete_and_minimal(name: str) -> None:
    """Applying it to one recipe gives the other, and no slot in it is equal on both sides."""
    found = difference("grpo", name)["slots"]
    changed = recipe("grpo").replace(**{kind: side["b"] for kind, side in found.items()})
    assert changed.slots() == recipe(name).slots()
    assert all(side["a"] != side["b"] for side in found.values())
    for kind in set(RECIPE_SLOTS) - set(found):
        assert recipe("grpo").of(kind) == recipe(name).of(kind)


def test_only_the_functions_that_differ_are_shown() -> None:
    side = difference("grpo", "grpo@areal")["slots"]["advantage"]
    assert side["only_a"] == []
    assert [f["text"] for f in side["only_b"]] == [
        "whiten_tokens(ddof=1, eps_in_var=0.0, eps=1e-05)"
    ]


def test_pairs_and_policies_can_be_compared() -> None:
    found = difference("grpo", "dpo")["slots"]
    assert found["preference"] | {"only_b": []} == {
        "a": "", "b": "logistic(beta=0.1)", "only_a": [], "only_b": [], "parameters": {},
    }  # fmt: skip
    assert found["gate"]["b"] == ""


# --- the page ---------------------------------------------------------------------------------


def test_the_pages_are_current() -> None:
    for name, page in PAGES.items():
        assert page == (ROOT / "docs" / name).read_text("utf-8"), (
            f"{name} is stale: run `make docs`"
        )


def test_a_recipe_is_on_exactly_one_page_and_in_the_table_of_all() -> None:
    sections = [
        heading
        for name, page in PAGES.items()
        if name not in ("algorithms.md", "algorithms/functions.md")
        for heading in re.findall(r"^## (\S+)$", page, re.MULTILINE)
    ]
    assert sorted(sections) == sorted(NAMES)
    rows = re.findall(r"^\| \[(\S+)\]\(algorithms/(\w+)\.md#\S+\) \|", INDEX, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(NAMES)
    for name, family in rows:
        assert f"\n## {name}\n" in PAGES[f"algorithms/{family}.md"]


def test_every_recipe_has_a_plain_sentence_and_every_sentence_a_recipe() -> None:
    assert sorted(plain_sentences()) == sorted(RECIPES)
    for name, said in plain_sentences().items():
        assert 30 < len(said) <= 140 and said.endswith(".") and said[0].isupper(), name
        assert not re.search(r"[=_`Σπσμ√]|\.\s", said), f"{name}: no symbols, one sentence"
    assert explain("dapo")["plain"] == plain_sentences()["dapo"]
    changed = recipe("dapo", {"gate.high": 0.3})
    assert explain(changed)["plain"] == "", "what was said of dapo need not hold for it"


@pytest.mark.parametrize("family", families())
def test_the_head_of_a_family_is_gentle(family: str) -> None:
    """It is prose of three to eight sentences that names a recipe to reach for."""
    head = families()[family]["head"].strip()
    assert 3 <= len(re.findall(r"[.?!](?:\s|$)", head)) <= 8
    assert 60 <= len(head.split()) <= 180
    named = set(re.findall(r"`(\w+(?:@\w+)?)`", head))
    assert named & set(families()[family]["recipes"]) or family == "reward_models"
    assert not re.search(r"[Σπσμ√]|\[[VTH]\]", head), "equations come later"


def test_tables_of_the_pages_keep_their_columns() -> None:
    for page in PAGES.values():
        for table_text in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
            counts = {len(re.findall(r"(?<!\\)\|", line)) for line in table_text.splitlines()}
            assert len(counts) == 1, table_text[:200]


def test_what_all_members_share_stands_above_the_table() -> None:
    page = PAGES["algorithms/own_pairs.md"]
    shared = {kind: RECIPES["spin"].text()[kind] for kind in ("preference", "summing")}
    assert shared == {"preference": "logistic(beta=0.1)", "summing": "whole_answer()"}
    assert "All of them have preference `logistic`, summing `whole_answer`." in page
    assert "| recipe | pairing |" in page


def test_dialects_show_only_what_differs() -> None:
    rows = re.findall(r"^\| \[(\S+@\S+)\]\(#\S+\) \|(.*)\|$", PAGES["algorithms/dialects.md"], re.M)
    cells = {name: [cell.strip() for cell in row.split(" | ")] for name, row in rows if "`" in row}
    slime = difference("grpo", "grpo@slime")["slots"]
    assert list(slime) == ["penalty"] and [x for x in cells.get("grpo@slime", []) if x] == []
    for name, row in cells.items():
        assert len([x for x in row if x]) == len(difference(name.partition("@")[0], name)["slots"])


def test_every_slot_function_is_listed_and_its_signature_reads_back() -> None:
    listed = {(f["kind"], f["signature"].split("(")[0]): f for f in slot_functions()}
    own = {
        (kind, name)
        for kind, known in REGISTRY.items()
        for name, definition in known.items()
        if definition.function.__module__.startswith("groupwise.")
    }
    assert set(listed) == own
    for (kind, name), function in listed.items():
        if name not in ("weight_cap", "seq_mean_token_sum_norm"):  # a parameter without a default
            assert parse(kind, function["signature"]) == (REGISTRY[kind][name](),)
        assert function["equation"] and set(function["admits"]) == set(
            REGISTRY[kind][name].parameters
        )
    assert listed["gate", "weight_cap"]["signature"] == "weight_cap(cap, floor=0.0)"
    assert listed["gate", "clip"]["admits"] == {"low": ">= 0", "high": ">= 0"}
    assert listed["width", "constant"]["used_by"] == ["sspo"]


# --- choosing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "first"),
    [
        ("", "dr_grpo"),
        ("moe=yes length=long", "gspo"),
        ("moe=yes length=long updates=several", "gspo"),
        ("moe=yes", "gspo"),
        ("group=1", "reinforce_pp"),
        ("group=1 updates=several", "reinforce_pp"),
        ("group=1 critic=yes", "ppo"),
        ("group=2-4", "rloo"),
        ("group=2-4 updates=several", "reinforce_pp_baseline cispo"),
        ("steps=yes", "grpo_process"),
        ("steps=yes critic=yes", "ppo"),
        ("steps=yes group=1", "reinforce_pp"),
        ("length=long", "dapo"),
        ("length=long critic=yes", "vapo"),
        ("engine=separate", "olmo3"),
        ("updates=several", "cispo"),
        ("goal=pass@k", "simko maxrl"),
        ("verifiable=no data=pairs", "dpo"),
        ("verifiable=no", "dpo"),
        ("verifiable=no data=answers", "spin"),
        ("verifiable=no data=prompts", "self_rewarding"),
    ],
)
def test_choices_by_hand(answers: str, first: str) -> None:
    found = choose(dict(pair.split("=", 1) for pair in answers.split()))
    assert found[0]["recipe"] in first.split()
    assert all(item["reasons"] for item in found)
    points = [item["points"] for item in found]
    assert points == sorted(points, reverse=True)


def test_what_a_recipe_asks_of_the_model_is_said_with_what_others_take_instead() -> None:
    """By the rule that refuses a run, and no list of its own."""
    asking = {name for name in NAMES if explain(name)["asks"]}
    assert asking == {"rspo", "routing_replay", "routing_replay_r3"}
    for name in asking:
        (said,) = explain(name)["asks"]
        (refused,) = refusals(name)
        for words in (ASKED, INSTEAD):
            assert words in said and words in refused
    assert INSTEAD.split(",")[0] in RECIPES
    assert "asks" in explain_text(explain("rspo"), 100)
    (row,) = [row for row in table() if row["name"] == "rspo"]
    assert "For other models take gspo" in recipes_text([row], 1000)
    assert [item["recipe"] for item in choose({"moe": "yes"})][:2] == ["gspo", "rspo"]


def test_what_a_recipe_holds_in_memory_is_what_a_plan_counts() -> None:
    """Of every recipe, for 1.5B parameters in bfloat16: bytes a weight, a critic's head aside."""
    weights = cost.parameters(M)
    for name in NAMES:
        roles = role_sizes(load(recipe=name), cost.HALF)
        held = sum(cost.held(M, cost.HALF, roles=roles).values())
        gradients, _, _ = cost.largest_update(M, 1, roles=roles)
        told = sum(bytes_a_weight(recipe(name)).values()) + GRADIENT
        assert (held + gradients) / weights == pytest.approx(told, rel=1e-4), name
    assert memory(recipe("ppo")) == (
        "policy 14, reference 2, critic 14, gradients 4, one model's at a time: 34 bytes a weight "
        "in bfloat16, without adapters"
    )
    assert memory(recipe("dapo")).startswith("policy 14, gradients 4: 18 bytes a weight")
    (row,) = [row for row in table() if row["name"] == "prime"]
    assert "policy, reference, implicit reward model (34 bytes" in recipes_text([row], 1000)
    assert "in memory" in choice_text({}, [], choose({"critic": "yes"}), 100)
    said = " ".join(explain_text(explain("ppo"), 99).split())
    assert "gradients 4, one model's at a time" in said


def refusals(name: str) -> list[str]:
    """What a run with it is refused with for want of experts."""
    config = load(recipe=name)
    assert isinstance(config.recipe, Recipe)
    return list(routes_not_told(config, config.recipe))


def test_choices_say_what_would_be_idle() -> None:
    def said(**answers: str) -> str:
        return next("".join(i["idle"]) for i in choose(answers) if i["recipe"] == "olmo3")

    assert "tis_token" not in said(engine="separate") and "clip(" in said(engine="separate")
    assert said(engine="separate", updates="several") == ""
    high = [c["set"] for c in choose({"goal": "pass@k"})[1]["changes"]]
    assert "gate.high" not in high  # no clip acts in one update
    several = choose({"goal": "pass@k", "updates": "several"})
    assert any(c["set"] == "gate.high" for item in several for c in item["changes"])


def test_what_is_done_otherwise_than_published_is_said() -> None:
    spin, judged = (explain_text(explain(name), 1000) for name in ("spin", "self_rewarding"))
    assert "samples of the round before are not mixed in" in spin
    assert "the paper makes all pairs of a round before it learns" in judged
    assert "3 judgements by the policy (0 to 5 points, T = 0.7, top-p 0.9)" in judged
    changed = recipe("spin").replace(preference="logistic(beta=5.0)")
    assert explain(changed)["departs"] == explain("spin")["departs"]
    item, other = choose({"verifiable": "no", "data": "prompts"})
    assert "the paper makes all pairs of a round" in item["departs"][0]
    assert other["recipe"] == "best_of_group_dpo" and not other["departs"]


def test_a_drawback_is_told_where_it_holds() -> None:
    """Which tokens a clip silences was measured per token; a sequence's ratio silences answers."""

    def clip_of(name: str) -> str:
        return next(f["breaks"] for f in explain(name)["functions"] if f["kind"] == "gate")

    assert "rare tokens of worse answers" in clip_of("grpo") and "claims.md" in clip_of("grpo")
    for name in ("gspo", "gspo_token"):
        assert "rare" not in clip_of(name) and "whole answer" in clip_of(name)


def test_dr_grpo_is_accused_of_the_bias_that_texts_accuse_it_of() -> None:
    """Sums grow with length: what is feared is a pull towards long answers, not short ones."""
    (note,) = [text for text in explain("dr_grpo")["disagree"] if "in expectation" in text]
    assert note.startswith("Some see it favouring long answers")


# Answers of one to three tokens, 1 ends one; right and wrong ones of several lengths.
ANSWERS = {(1,): 1.0, (0, 1): 0.0, (0, 0, 1): 1.0, (0, 0, 0): 0.0}


def expected_gradient(name: str, end_T: torch.Tensor) -> torch.Tensor:
    """Of a recipe's loss over all groups of two answers, by their probability."""
    total = torch.zeros_like(end_T)
    made = recipe(name).replace(penalty=())
    for pair in itertools.product(ANSWERS, repeat=2):
        leaf = end_T.clone().requires_grad_()
        both_T2 = torch.stack([(-leaf).sigmoid().log(), leaf.sigmoid().log()], 1)
        rows = [[both_T2[at, word] for at, word in enumerate(answer)] for answer in pair]
        mask_NT = torch.tensor([[t < len(answer) for t in range(3)] for answer in pair])
        zero = torch.zeros((), dtype=torch.float64)
        logp_NT = torch.stack([torch.stack(row + [zero] * (3 - len(row))) for row in rows])
        batch = TokenBatch.build(
            mask_NT=mask_NT, group_N=[0, 0], reward_N=[ANSWERS[answer] for answer in pair],
            old_logp_NT=logp_NT.detach(),
        )  # fmt: skip
        loss = token_phase(made, batch_phase(made, batch).batch, logp_NT=logp_NT).loss
        total += logp_NT.detach().sum().exp() * torch.autograd.grad(loss, leaf)[0]
    return total


@pytest.mark.filterwarnings("ignore::groupwise.errors.RecipeWarning")
def test_dr_grpo_points_along_the_true_gradient_and_grpo_does_not() -> None:
    """Exactly, over all answers: (G−1)/G of it over the constant, whatever the lengths."""
    end_T = torch.tensor([0.3, -0.4, 0.8], dtype=torch.float64)
    leaf = end_T.clone().requires_grad_()
    both_T2 = torch.stack([(-leaf).sigmoid().log(), leaf.sigmoid().log()], 1)
    value = sum(
        reward * torch.stack([both_T2[t, word] for t, word in enumerate(answer)]).sum().exp()
        for answer, reward in ANSWERS.items()
    )
    (true,) = torch.autograd.grad(torch.as_tensor(value), leaf)
    found = expected_gradient("dr_grpo", end_T)
    torch.testing.assert_close(found, -true * (1 / 2) / 3000, rtol=1e-12, atol=0)
    grpo = expected_gradient("grpo", end_T)
    cosine = float((grpo @ -true) / (grpo.norm() * true.norm()))
    assert cosine < 0.999  # the mean per answer bends it


def test_one_sample_per_prompt_offers_both_single_sample_methods() -> None:
    assert [item["recipe"] for item in choose({"group": "1"})] == ["reinforce_pp", "remax"]


WITHOUT_A_GROUP = {"greedy_baseline", "return_to_go", "gae", "gae_length_adaptive"}


def test_no_answers_lead_to_what_they_rule_out() -> None:
    """Over all combinations: something is advised, it fits the answers, and its changes compose."""
    keys = [question for question in QUESTIONS if question.when == "verifiable=yes"]
    composed: set[str] = set()
    for values in itertools.product(*(question.options for question in keys)):
        answers = dict(zip((question.key for question in keys), values, strict=True))
        found = choose(answers)
        assert found, answers
        for item in found:
            entry = recipe(item["recipe"])
            assert answers["critic"] == "yes" or "critic" not in entry.models, (answers, entry.name)
            if answers["group"] == "1":
                assert entry.advantage[0].name in WITHOUT_A_GROUP, (answers, entry.name)
            if answers["updates"] == "several":
                assert entry.ratio.name != "on_policy", (answers, entry.name)
            if (
                repr(item["changes"]) + entry.name not in composed
            ):  # a RecipeWarning would fail here
                composed.add(repr(item["changes"]) + entry.name)
                recipe(entry.name, {change["set"]: change["to"] for change in item["changes"]})


def test_changes_carry_the_answers_into_the_recipe() -> None:
    (gspo, *_) = choose({"moe": "yes", "engine": "separate"})
    assert [(c["set"], c["to"]) for c in gspo["changes"]] == [("correction", "tis_token(cap=2.0)")]
    dppo = next(i for i in choose({"engine": "separate"}) if i["recipe"] == "dppo")
    assert dppo["changes"] == []  # its anchor is the sampler: a weight would count it twice
    (dapo, *_) = choose({"length": "long"})
    assert [(c["set"], c["to"]) for c in dapo["changes"]] == [("schedule.updates", 1)]


def test_the_decision_table_speaks_of_what_exists() -> None:
    options = {question.key: question.options for question in QUESTIONS}
    for row in ROWS:
        assert set(row.recipes.split()) <= set(NAMES), row
    for item in (*ROWS, *CHANGES):
        for condition in item.when.split():
            key, values = condition.split("=", 1)
            assert set(values.split(",")) <= set(options[key]), item


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"mo": "yes"}, "Did you mean 'moe'"),
        ({"moe": "maybe"}, "Choose one of: no, yes"),
        ({"verifiable": "no", "moe": "yes"}, "would be ignored"),
        ({"data": "pairs"}, "asked only where verifiable=no"),
    ],
)
def test_wrong_answers_are_refused(answers: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        complete(answers)
