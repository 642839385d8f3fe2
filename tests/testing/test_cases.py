"""run_case: nothing is ignored in silence, and what is missing is named."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from nested import assert_close
from oracle import solve

from groupwise.errors import CaseError
from groupwise.testing import run_case
from groupwise.testing.schema import GENERIC, KNOWN

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "vectors.json").read_text()
)["cases"]
by_id = pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])


def vector(name: str) -> dict[str, Any]:
    case = copy.deepcopy(next(c for c in CASES if c["id"] == name))
    del case["expected"]
    return case


def first_of(kind: str, method: str) -> dict[str, Any]:
    wanted = (kind, method)
    return vector(next(c["id"] for c in CASES if (c["kind"], c["method"]) == wanted))


def changed(case: dict[str, Any], inputs: dict[str, Any] | None = None, **params: Any) -> Any:
    """The case with other inputs and hyper-parameters; None takes one out."""
    case = copy.deepcopy(case)
    for part, changes in (("inputs", inputs or {}), ("params", params)):
        case[part].update(changes)
        case[part] = {key: value for key, value in case[part].items() if value is not None}
    return case


def assert_as_solver(case: dict[str, Any]) -> None:
    got = run_case(case)
    for name, want in solve(copy.deepcopy(case)).items():
        assert_close(got[name], want, 1e-9, 1e-9, name)


# --- hyper-parameters -------------------------------------------------------------------------


def test_every_name_of_the_vectors_is_known() -> None:
    assert {name for case in CASES for name in case["params"]} <= KNOWN


@by_id
def test_a_misspelt_parameter_is_refused_with_the_nearest_name(case: dict[str, Any]) -> None:
    for name in case["params"]:
        typo = f"{name}_" if len(name) < 4 else name[:-1]
        params = {**case["params"], typo: case["params"][name]}
        with pytest.raises(CaseError, match=f"Unknown parameter '{typo}'"):
            run_case({**case, "params": params})


def test_the_nearest_name_is_offered() -> None:
    with pytest.raises(CaseError, match="Did you mean 'eps_low'"):
        run_case(changed(vector("grpo_full"), eps_lo=0.1))


@by_id
def test_generic_names_may_stand_anywhere(case: dict[str, Any]) -> None:
    for name, value in {"ddof": 1, "eps": 1e-6, "eps_low": 0.2, "eps_high": 0.2}.items():
        assert name in GENERIC
        run_case(changed(case, **{name: case["params"].get(name, value)}))


@pytest.mark.parametrize(
    ("kind", "method", "params"),
    [
        ("policy_loss", "grpo", {"is_cap": 2.0}),
        ("policy_loss", "grpo", {"lam": 0.9}),
        ("policy_loss", "dppo", {"C": 2.0}),
        ("policy_loss", "cispo", {"which": "low"}),
        ("advantage", "grpo", {"gamma": 0.9}),
        ("advantage", "reinforce_pp", {"dual_clip_c": 3.0}),
        ("gae", "ppo", {"lam_critic": 1.0}),
        ("gae", "vapo", {"lam": 0.9}),
        ("filter", "dapo", {"low": 0.1}),
        ("kl", "kl", {"beta": 0.1}),
        ("preference_loss", "dpo", {"alpha": 0.1}),
    ],
)
def test_a_known_name_without_use_is_refused(
    kind: str, method: str, params: dict[str, Any]
) -> None:
    with pytest.raises(CaseError, match=f"{kind} {method} has no use for"):
        run_case(changed(first_of(kind, method), **params))


@pytest.mark.parametrize(
    ("kind", "method", "params"),
    [
        ("policy_loss", "lambda_grpo", {"ddof_len": 1}),
        ("policy_loss", "lambda_grpo", {"agg": "seq_mean_token_mean"}),
        ("policy_loss", "vapo", {"clamp": [0, 0.9]}),
        ("gae", "vapo", {"clamp": [-1, 1]}),
        ("policy_loss", "tis", {"C_min": 0.5}),
        ("policy_loss", "icepop", {"C": 2.0}),
        ("policy_loss", "tis", {"level": "word"}),
        ("policy_loss", "grpo", {"adv": {"scal": "group"}}),
        ("policy_loss", "grpo", {"adv": {"scale": "row"}}),
        ("policy_loss", "grpo", {"adv": "group"}),
        ("policy_loss", "grpo", {"agg": "token_mean"}),
        ("policy_loss", "grpo", {"kl_estimator": "k4"}),
        ("policy_loss", "grpo", {"kl_placement": "value"}),
        ("policy_loss", "grpo", {"eps_low": -0.1}),
        ("advantage", "gpg", {"f_norm": "variance"}),
        ("advantage", "gpg", {"f_norm": 0.0}),
        ("gate", "dppo", {"delta_kl": 0.1}),
        ("gate", "dppo", {"K": 1000}),
        ("reward_shaping", "dapo", {"L_cache": 0}),
        ("reward_shaping", "dapo", {"L_cache": -5}),
        ("reward_shaping", "dapo", {"L_cache": 30000}),
        ("analytic", "dpo", {"preference_probability": 1.0}),
        ("router", "routing_replay", {"top_k": 100}),
        ("estimator_expectation", "estimators", {"G": 10**9}),
        ("estimator_expectation", "estimators", {"ddof": 2}),
    ],
)
def test_a_value_that_can_not_act_is_refused(
    kind: str, method: str, params: dict[str, Any]
) -> None:
    with pytest.raises(CaseError):
        run_case(changed(first_of(kind, method), **params))


@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("tis_token", "mode"),
        ("tis_token", "level"),
        ("tis_seq", "mode"),
        ("icepop", "mode"),
        ("icepop", "level"),
        ("mis_seq", "mode"),
        ("mis_seq", "level"),
        ("mis_seq_geo", "mode"),
    ],
)
def test_level_and_mode_have_natural_defaults(name: str, dropped: str) -> None:
    whole = next(
        c["id"] for c in CASES if c["axes"].get("offpolicy") == name and "level" in c["params"]
    )
    assert run_case(changed(vector(whole), **{dropped: None})) == run_case(vector(whole))


def test_mode_alone_turns_a_cap_into_a_mask() -> None:
    case = first_of("policy_loss", "mis")
    assert case["params"]["level"] == "sequence_product"
    capped = run_case(changed(case, level=None, mode="truncate", C=2.0, C_max=None))
    assert max(w for row in capped["is_weight"] for w in row) == 2.0


def test_dppo_takes_twenty_or_the_whole_vocabulary() -> None:
    case = vector("dppo_topk")
    vocabulary = len(case["inputs"]["logits"][0][0])
    assert vocabulary < 20
    assert run_case(changed(case, K=None)) == run_case(changed(case, K=vocabulary))


def test_aggregation_without_a_length_takes_that_of_dr_grpo() -> None:
    case = first_of("aggregation", "aggregation")
    assert run_case(changed(case, norm_len=None)) == run_case(changed(case, norm_len=3000))


def test_f_norm_may_be_the_groups_standard_deviation() -> None:
    case = first_of("advantage", "gpg")
    got = run_case(changed(case, f_norm="std", alpha=2.0))["advantages"]
    zscore = {**case, "method": "grpo", "params": {"ddof": 1, "eps": 0.0}}
    assert_close(got, [2.0 * a for a in run_case(zscore)["advantages"]], 1e-12, 1e-12)
    own = run_case(changed(case, f_norm="std"))
    assert_close(own["advantages"], [own["alpha"] * a / 2.0 for a in got], 1e-12, 1e-12)


# --- KL, adv and steps ------------------------------------------------------------------------

LOGP = {
    "mask": [[1, 1], [1, 1], [1, 0], [1, 1]],
    "logp": [[-0.5, -1.0], [-0.2, -0.7], [-0.9, 9.0], [-0.4, -0.6]],
    "logp_old": [[-0.6, -0.9], [-0.3, -0.7], [-0.8, 9.0], [-0.5, -0.5]],
    "logp_ref": [[-0.4, -1.2], [-0.6, -0.3], [-1.1, 9.0], [-0.2, -0.9]],
    "rewards": [1.0, 0.0, 0.5, 0.5],
    "group_ids": [0, 0, 1, 1],
}
KL = {"kl_coef": 0.2, "kl_estimator": "k2", "kl_placement": "reward"}


def small(kind: str, method: str, params: dict[str, Any], **inputs: Any) -> dict[str, Any]:
    made = {"kind": kind, "method": method, "axes": {}, "params": params, "inputs": dict(LOGP)}
    return changed(made, inputs)


@pytest.mark.parametrize("method", ["grpo", "rloo", "dapo", "reinforce_pp", "dr_grpo", "maxrl"])
@pytest.mark.parametrize(
    "params",
    [{}, KL, {"kl_coef": 0.3}, {**KL, "adv": {"scale": "batch", "ddof": 0}}, {**KL, "agg": None}],
)
def test_advantages_are_those_of_the_loss(method: str, params: dict[str, Any]) -> None:
    given = {key: value for key, value in params.items() if value is not None}
    alone = run_case(small("advantage", method, given))["advantages"]
    assert alone == run_case(small("policy_loss", method, given))["advantages"]


def test_kl_in_the_reward_acts_on_advantages() -> None:
    base = run_case(small("advantage", "grpo", {}))["advantages"]
    assert run_case(small("advantage", "grpo", KL))["advantages"] != base
    own = run_case(small("advantage", "rloo", {}))["advantages"]
    assert own != run_case(small("advantage", "rloo", {}, logp_ref=None))["advantages"]
    named = run_case(small("advantage", "rloo", {"kl_coef": 0.03}))["advantages"]
    assert own == named


def test_kl_without_a_reference_is_refused() -> None:
    with pytest.raises(CaseError, match="logp_ref"):
        run_case(small("policy_loss", "grpo", {"kl_coef": 0.1}, logp_ref=None))
    with pytest.raises(CaseError, match="logp_old"):
        run_case(small("advantage", "grpo", KL, logp_old=None))
    run_case(small("policy_loss", "grpo", {"kl_coef": 0.0}, logp_ref=None))


STEPS = {
    "step_reward_NT": [[0.2, 1.0], [0.0, 0.5], [0.1, 0.0], [0.4, 0.3]],
    "step_end_NT": [[1, 1], [0, 1], [1, 0], [1, 1]],
}


@pytest.mark.parametrize("kind", ["advantage", "policy_loss"])
def test_adv_is_about_the_outcome_not_the_steps(kind: str) -> None:
    params = {"adv": {"scale": "none"}}
    got = run_case(small(kind, "grpo", params, **STEPS))["advantages"]
    assert got == run_case(small(kind, "grpo", params))["advantages"]
    with pytest.raises(CaseError, match=r"outcome.*'rewards'"):
        run_case(small(kind, "grpo", params, **STEPS, rewards=None))


@pytest.mark.parametrize("method", ["grpo", "dapo"])
def test_steps_need_no_outcome(method: str) -> None:
    alone = run_case(small("advantage", method, {}, **STEPS, rewards=None))["advantages"]
    assert any(a != 0 for row in alone for a in row)
    assert_as_solver(small("advantage", "grpo", {}, **STEPS, rewards=None))


def test_the_accuracy_band_works_on_rows_too() -> None:
    inputs = {"rewards": [1, 1, 1, 0, 0, 0], "group_ids": [0, 0, 1, 1, 2, 2]}
    case = {"kind": "filter", "method": "prime", "inputs": inputs}
    assert run_case(case)["keep"] == [0, 0, 1, 1, 0, 0]
    assert run_case({**case, "params": {"low": 0.6, "high": 1.0}})["keep"] == [1, 1, 0, 0, 0, 0]


# --- inputs -----------------------------------------------------------------------------------

JUNK_INPUTS = (None, "x", [], 3, [[]], [None], {}, [1.0], [[1.0]], [[[1.0]]], -1)
JUNK_PARAMS = (None, "x", [], -1, 0, math.nan, math.inf, 1e30, {}, 1.5, True)


def _runs_or_says(case: dict[str, Any]) -> None:
    try:
        run_case(case)
    except CaseError as error:
        assert len(str(error)) > 20


@by_id
def test_bad_values_are_answered_in_words(case: dict[str, Any]) -> None:
    """Any other exception than CaseError fails."""
    case = {key: value for key, value in case.items() if key != "expected"}
    for part, junk in (("inputs", JUNK_INPUTS), ("params", JUNK_PARAMS)):
        for name in case[part]:
            without = {key: value for key, value in case[part].items() if key != name}
            _runs_or_says({**case, part: without})
            for value in junk:
                _runs_or_says({**case, part: {**case[part], name: value}})


@pytest.mark.parametrize(
    ("kind", "method", "name"),
    [
        ("advantage", "grpo", "rewards"),
        ("policy_loss", "grpo", "rewards"),
        ("policy_loss", "grpo", "logp"),
        ("policy_loss", "simko", "tokens"),
        ("policy_loss", "simko", "logits"),
        ("policy_loss", "tis", "logp_rollout"),
        ("policy_loss", "dppo", "logp_rollout"),
        ("policy_loss", "sspo", "segment_ids"),
        ("policy_loss", "rspo", "router_old_topk"),
        ("policy_loss", "rspo", "router_new_at_old_topk"),
        ("policy_loss", "vapo", "correct"),
        ("policy_loss", "prime", "logp_prm"),
        ("advantage", "prime", "logp_ref"),
        ("advantage", "remax", "greedy_rewards"),
        ("gae", "ppo", "values"),
        ("value_loss", "ppo", "returns"),
        ("kl", "kl", "logp_ref"),
        ("gate", "dppo", "advantages"),
        ("preference_loss", "dpo", "ref_logp_chosen"),
        ("pair_selection", "self_rewarding", "judge_scores"),
        ("analytic", "dpo", "betas"),
        ("reward_shaping", "dapo", "lengths"),
    ],
)
def test_a_missing_input_is_named_with_an_example(kind: str, method: str, name: str) -> None:
    with pytest.raises(CaseError, match=f"needs the input '{name}'"):
        run_case(changed(first_of(kind, method), {name: None}))


def test_the_preference_probability_is_named() -> None:
    with pytest.raises(CaseError, match=r"preference_probability: 0\.9"):
        run_case(changed(first_of("analytic", "dpo"), preference_probability=None))


@pytest.mark.parametrize("kind", ["preference_loss", "pair_selection", "analytic"])
def test_policy_methods_are_not_preference_methods(kind: str) -> None:
    case = next(c for c in CASES if c["kind"] == kind)
    with pytest.raises(CaseError, match="'grpo' is a policy method"):
        run_case({**case, "method": "grpo"})


@pytest.mark.parametrize("kind", ["policy_loss", "advantage"])
def test_preference_methods_are_not_policy_methods(kind: str) -> None:
    case = first_of(kind, "grpo")
    with pytest.raises(CaseError, match="'dpo' is a preference method"):
        run_case({**case, "method": "dpo"})


@pytest.mark.parametrize("kind", ["advantage", "policy_loss"])
@pytest.mark.parametrize("method", ["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"])
def test_a_reward_of_none_is_no_grade(kind: str, method: str) -> None:
    outputs = run_case(small(kind, method, {}, rewards=[1.0, None, 0.5, 0.0]))
    same = run_case(small(kind, method, {}, rewards=[1.0, math.nan, 0.5, 0.0]))
    assert outputs == same
    row = outputs["advantages"][1]
    assert row == 0 or row == [0, 0]
    assert "nan" not in json.dumps(outputs).lower()


def test_a_visit_may_have_a_row_without_a_grade() -> None:
    history = [[1.0, None, 0.0], [0.0, 0.0, 1.0]]
    case = {"kind": "advantage", "method": "dcpo", "inputs": {"reward_history": history}}
    got = run_case(case)["advantages_by_step"]
    assert got[0][1] == 0.0
    case["inputs"] = {"reward_history": [[1.0, 0.0], history[1]]}
    assert run_case(case)["advantages_by_step"][1] == got[1]


def test_coef_is_about_log_probabilities() -> None:
    assert "coef" not in run_case(first_of("policy_loss", "simko"))
    assert "coef" in run_case(first_of("policy_loss", "grpo"))


@pytest.mark.parametrize("case", [None, [], {"kind": "kl"}, {"kind": [], "method": 1, "inputs": 2}])
def test_what_is_no_case_is_refused(case: Any) -> None:
    with pytest.raises(CaseError):
        run_case(case)
