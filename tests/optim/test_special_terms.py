"""What some recipes need beyond log-probabilities: it is there, has the right value, and counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import (
    BARE,
    Start,
    advance,
    difference,
    full_logp,
    gather,
    gradient,
    learn,
    rollouts,
    spy,
    weights,
)
from torch import Tensor

from groupwise.groups.phase import updates
from groupwise.losses.phase import token_phase
from groupwise.records import Grade, Memory, Visit

TOKEN_PHASE = "groupwise.optim.learner.token_phase"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


# A recipe, what takes its special term away, and the step at which it first counts: a KL to the
# starting policy has no gradient before the policy has moved.
NOISY = {"engine__weights": "noise:1.0"}
CUT = {"recipe": "dr_grpo", "engine__max_tokens": 6}
TERMS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "greedy baseline": ({"recipe": "remax"}, {"recipe__advantage": "raw()"}, 1),
    "dead groups": (
        {"recipe": "gpg", "recipe__filter": "", "reward": "odd_for_some"},
        {"recipe__advantage": "group_mean()"},
        1,
    ),
    "KL in the loss": ({"recipe": "grpo"}, {"recipe__penalty": ""}, 2),
    "KL in the answer's reward": ({"recipe": "rloo"}, {"recipe__shaping": ""}, 2),
    "KL in the token's reward": (
        {"recipe": "reinforce_pp", "group_size": 1, "prompts_per_step": 16},
        {"recipe__shaping": ""},
        2,
    ),
    "KL behind the baseline": (
        {"recipe": "grpo@openrlhf"},
        {"recipe__advantage": "group_zscore(eps=1e-9), limit()"},
        2,
    ),
    "KL per sequence": (
        {"recipe": "grpo@skyrl", "recipe__schedule__updates": 1},
        {"recipe__auxiliary": ""},
        2,
    ),
    "process rewards": (
        {"recipe": "grpo_process", "reward": "stepwise"},
        {"recipe__advantage": "group_zscore()"},
        1,
    ),
    "rare tokens": (
        {"recipe": "advantage_reweighting"},
        {"recipe__advantage": "group_zscore()"},
        1,
    ),
    "two passes": ({"recipe": "lopti"}, {"recipe__schedule": "joint()"}, 1),
    "top-k smoothing": ({"recipe": "simko"}, {"recipe__gate__alpha": 0.0}, 1),
    "top-1 push": (
        {"recipe": "simko", "recipe__gate__quantile": 0.5},
        {"recipe__gate__top1": 1.0},
        1,
    ),
    "entropy bonus": ({"recipe": "entropy_bonus"}, {"recipe__penalty": ""}, 1),
    "learned exponent": (
        {"recipe": "lambda_grpo", "optim__exponent_rate": 0.5},
        {"optim__exponent_rate": 0.0},
        2,
    ),
    "top-k mask": (
        {"recipe": "dppo_topk", "recipe__gate__k": 4, "recipe__gate__delta": 0.0, **NOISY},
        {"recipe__gate__delta": 1.0},
        1,
    ),
    "drift penalty": ({"recipe": "grpo@prime-rl", **NOISY}, {"recipe__penalty": ""}, 1),
    "tis, int8": ({"recipe": "tis", "engine__weights": "int8"}, {"recipe__correction": ""}, 1),
    "tis, noise": ({"recipe": "tis", **NOISY}, {"recipe__correction": ""}, 1),
    "tis_sequence": ({"recipe": "tis_sequence", **NOISY}, {"recipe__correction": ""}, 1),
    "icepop": ({"recipe": "icepop", **NOISY}, {"recipe__correction": ""}, 1),
    "mis": ({"recipe": "mis", **NOISY}, {"recipe__correction": ""}, 1),
    "mis_geometric": ({"recipe": "mis_geometric", **NOISY}, {"recipe__correction": ""}, 1),
    "sequence ratio": (
        {"recipe": "gspo", "recipe__gate": "clip(0.2, 0.2)", "recipe__schedule__updates": 2},
        {"recipe__ratio": "token()"},
        1,
    ),
    "segment ratio": (
        {"recipe": "sspo", "recipe__schedule__updates": 2},
        {"recipe__ratio": "token()", "recipe__gate": "clip()"},
        1,
    ),
    "overlong=mask": (CUT | {"overlong": "mask"}, {"overlong": "recipe"}, 1),
    "overlong=drop": (CUT | {"overlong": "drop"}, {"overlong": "recipe"}, 1),
    "overlong=penalise": (CUT | {"overlong": "penalise"}, {"overlong": "recipe"}, 1),
}


@pytest.mark.parametrize("term", TERMS)
def test_a_special_term_changes_the_update_it_should(
    term: str, start: Start, tmp_path: Path
) -> None:
    """Same seed, all else equal: the same weights before its step, others after it."""
    with_term, without, step = TERMS[term]
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    many = {"prompts_per_step": 8}  # so that some groups are mixed whatever the start
    for number, changes in enumerate((many | with_term, many | with_term | without)):
        with start.opened(tmp_path / str(number), **changes, **BARE) as run:
            before = weights(advance(run, step - 1).parts.loaded.model)
            advance(run)
            found.append((before, weights(run.parts.loaded.model), gradient(run)))
    (before, after, slope), (other_before, other_after, other_slope) = found
    assert torch.equal(before, other_before)
    assert not torch.equal(after, other_after)
    assert difference(slope, other_slope) > 1e-4


# --- advantages -------------------------------------------------------------------------------


def test_remax_subtracts_the_reward_of_the_greedy_completion(start: Start, tmp_path: Path) -> None:
    with start.opened(tmp_path, recipe="remax", prompts_per_step=12) as run:
        collected, model, tokenizer = (
            gather(run),
            run.parts.loaded.model,
            run.parts.loaded.tokenizer,
        )
        expected = []
        for group in collected.groups:
            prompt, answer = group[0].task.token_ids, []
            while len(answer) < 8 and not set(answer) & set(tokenizer.eos_ids):
                answer.append(int(full_logp(model, prompt, [*answer, 0])[-1].argmax()))
            digits = [x for x in tokenizer.decode(answer) if x.isdigit()]
            expected += [float(digits[-1] in "13579")] * len(group)
        batch = learn(run, collected).batch
    assert batch.greedy_reward_N.tolist() == expected and len(set(expected)) == 2
    rewards = [r.grade.reward for r in rollouts(collected)]
    assert batch.advantage_NT[:, 0].tolist() == [
        reward - base for reward, base in zip(rewards, expected, strict=True)
    ]


def test_remax_without_a_greedy_reward_has_no_baseline(start: Start, tmp_path: Path) -> None:
    """The group counts as ungraded, not as one with a baseline of 0."""
    with start.opened(tmp_path, recipe="remax") as run:
        collected = gather(run)
        for group, reward in zip(collected.greedy, [None, 1.0, 0.0, 1.0], strict=True):
            group[0] = replace(group[0], grade=Grade(reward))
        batch = learn(run, collected).batch
    assert batch.learn_N.tolist() == [False] * 4 + [True] * 12
    assert (batch.coefficient_NT[:4] == 0).all()


def test_reinforce_pp_learns_from_single_answers_with_kl_in_the_reward(
    start: Start, tmp_path: Path
) -> None:
    changes = {"recipe": "reinforce_pp", "group_size": 1, "prompts_per_step": 12}
    with start.opened(tmp_path, **changes) as run:
        advance(run, 2)
        collected = gather(run)
        batch = learn(run, collected).batch
    kl_NT = batch.old_logp_NT - batch.ref_logp_NT
    assert (kl_NT[batch.mask_NT].abs() > 1e-4).all()
    returns = []
    for row, rollout in enumerate(rollouts(collected)):
        last = len(rollout.completion.token_ids) - 1
        for t in range(last + 1):
            returns.append(rollout.grade.reward - 0.01 * float(kl_NT[row, t : last + 1].sum()))
    to_go = torch.tensor(returns, dtype=torch.float64)
    expected = (to_go - to_go.mean()) / (to_go.var() + 1e-8).sqrt()
    torch.testing.assert_close(
        batch.advantage_NT[batch.mask_NT].double(), expected, rtol=0, atol=1e-5
    )


def test_rloo_subtracts_the_kl_before_the_baseline(start: Start, tmp_path: Path) -> None:
    with start.opened(tmp_path, recipe="rloo") as run:
        advance(run, 2)
        collected = gather(run)
        batch = learn(run, collected).batch
    assert float((batch.old_logp_NT - batch.ref_logp_NT).abs().sum()) > 0.1
    reward_N = torch.tensor([r.grade.reward for r in rollouts(collected)])
    shaped_GS = (reward_N - 0.03 * (batch.old_logp_NT - batch.ref_logp_NT).sum(1)).view(4, 4)
    others_GS = (shaped_GS.sum(1, keepdim=True) - shaped_GS) / 3
    torch.testing.assert_close(
        batch.advantage_NT[:, 0], (shaped_GS - others_GS).flatten(), rtol=0, atol=1e-5
    )


def test_process_rewards_stand_on_the_tokens_that_complete_their_steps(
    start: Start, tmp_path: Path
) -> None:
    with start.opened(tmp_path, recipe="grpo_process", reward="stepwise") as run:
        collected = gather(run)
        batch = learn(run, collected).batch
    for number, group in enumerate(collected.groups):
        # One token a character here: a digit at place t is the step that ends with token t.
        # An answer without digits has no steps: its reward, 0, is that of its last token.
        steps = []
        for row, rollout in enumerate(group):
            digits = [t for t, x in enumerate(rollout.text) if x.isdigit()]
            steps += [(row, t, float(rollout.text[t] in "13579")) for t in digits]
            steps += [] if digits else [(row, len(rollout.completion.token_ids) - 1, 0.0)]
        values = torch.tensor([value for *_, value in steps], dtype=torch.float64)
        z = (values - values.mean()) / (values.std() + 1e-6)
        for row, rollout in enumerate(group):
            for t in range(len(rollout.completion.token_ids)):
                later = [
                    s
                    for (r, at, _), s in zip(steps, z.tolist(), strict=True)
                    if r == row and at >= t
                ]
                found = float(batch.advantage_NT[4 * number + row, t])
                assert found == pytest.approx(sum(later), abs=1e-5)


def test_a_prompt_twice_in_a_batch_is_two_groups_of_independent_samples(
    start: Start, tmp_path: Path
) -> None:
    changes = {"data__train": start.tasks("two", [(3, 4), (5, 6)]), "prompts_per_step": 4}
    with start.opened(tmp_path, recipe="dr_grpo", **changes) as run:
        collected = gather(run)
        batch = learn(run, collected).batch
    drawn = [(group[0].task.id, group[0].draw) for group in collected.groups]
    assert sorted(drawn) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert batch.group_N.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    for task in (0, 1):
        twice = [group for group in collected.groups if group[0].task.id == task]
        texts = [[rollout.text for rollout in group] for group in twice]
        assert texts[0] != texts[1]
    reward_GS = torch.tensor([[r.grade.reward for r in group] for group in collected.groups])
    expected = reward_GS - reward_GS.mean(1, keepdim=True)
    torch.testing.assert_close(batch.advantage_NT[:, 0], expected.flatten(), rtol=0, atol=1e-6)


# --- state that outlives a step ---------------------------------------------------------------


def few(start: Start) -> dict[str, Any]:
    """Four prompts, all of them in every step."""
    return {"data__train": start.tasks("few", [(1, 2), (3, 4), (5, 6), (7, 7)])}


def test_dcpo_remembers_prompts_across_visits_and_restarts(start: Start, tmp_path: Path) -> None:
    changes = few(start) | {"recipe": "dcpo"}
    with start.opened(tmp_path, **changes) as run:
        collected = gather(run)
        first = {g[0].task.id: torch.tensor([r.grade.reward for r in g]) for g in collected.groups}
        run.progress.memory = learn(run, collected).memory
        assert run.progress.memory.visits == {
            task: (Visit(4, float(x.mean()), pytest.approx(float(x.var()))),)
            for task, x in first.items()
        }
        run.keeper.save()
    with start.opened(tmp_path, **changes) as run:
        collected = gather(run)
        taught = learn(run, collected)
    for number, group in enumerate(collected.groups):
        before = first[group[0].task.id].double()
        now = torch.tensor([r.grade.reward for r in group], dtype=torch.float64)
        mean = torch.cat([before, now]).mean()
        spread = sum(x.var() + (x.mean() - mean) ** 2 for x in (before, now)) / 2
        new = (now - now.mean()) / now.std() if now.var() else now * 0
        total = (now - mean) / spread.sqrt() if spread else now * 0
        # At the second visit both ways of smoothing are the mean of the two.
        found = taught.batch.advantage_NT[4 * number : 4 * number + 4, 0]
        torch.testing.assert_close(found.double(), (new + total) / 2, rtol=0, atol=1e-6)
        assert len(taught.memory.visits[group[0].task.id]) == 2


def test_dcpo_s_memory_changes_the_update(start: Start, tmp_path: Path) -> None:
    slopes = []
    for forget in (False, True):
        with start.opened(tmp_path / str(forget), recipe="dcpo", **few(start), **BARE) as run:
            advance(run)
            run.progress.memory = Memory() if forget else run.progress.memory
            slopes.append(gradient(advance(run)))
    assert difference(*slopes) > 1e-2


def test_dcpo_takes_a_prompt_that_is_twice_in_a_batch_as_one_visit(
    start: Start, tmp_path: Path
) -> None:
    one = {"data__train": start.tasks("one", [(3, 4)]), "prompts_per_step": 2}
    with start.opened(tmp_path, recipe="dcpo", **one) as run:
        collected = gather(run)
        reward_N = torch.tensor([r.grade.reward for r in rollouts(collected)])
        (visit,) = learn(run, collected).memory.visits[0]
    assert visit == Visit(8, float(reward_N.mean()), pytest.approx(float(reward_N.var())))


def test_lambda_moves_against_its_gradient_and_is_saved(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = spy(monkeypatch, TOKEN_PHASE)
    changes = {"recipe": "lambda_grpo", "optim__exponent_rate": 0.25}
    with start.opened(tmp_path, **changes) as run:
        collected = gather(run)
        batch = learn(run, collected).batch
        ((recipe, _), outputs, _), rows = calls[0], [torch.arange(16)]

        def loss(exponent: float) -> float:
            moved = torch.tensor(exponent)
            (part,) = updates(recipe, replace(batch, length_exponent=moved), rows)
            found = token_phase(recipe, part, **(outputs | {"length_exponent": moved}))
            return float(found.loss.detach())

        slope = (loss(0.1) - loss(-0.1)) / 0.2
        assert abs(slope) > 1e-4
        # Adam's first step has the size of its rate, whatever the gradient's.
        state = run.parts.learner.roles["length_exponent"].state()
        assert float(state["exponent"]) == pytest.approx(-0.25 * (1 if slope > 0 else -1), 1e-3)
        average = state["exponent_optimizer/exp_avg/length_exponent"]
        assert float(average) / 0.1 == pytest.approx(slope, rel=0.02)
        run.keeper.save()
        kept = {name: x.clone() for name, x in state.items()}
    with start.opened(tmp_path, **changes) as run:
        found = run.parts.learner.roles["length_exponent"].state()
        assert found.keys() == kept.keys()
        assert all(torch.equal(found[name], kept[name]) for name in kept)


def test_every_update_weighs_lengths_by_the_lambda_of_its_moment(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = spy(monkeypatch, TOKEN_PHASE)
    changes = {"recipe__schedule__updates": 2, "optim__exponent_rate": 0.25, "prompts_per_step": 8}
    with start.opened(tmp_path, recipe="lambda_grpo", **changes) as run:
        learn(run, gather(run))
    weighed = [args[1].weighed_exponent for args, _, _ in calls]
    assert weighed[0] == 0.0 and abs(weighed[1]) == pytest.approx(0.25, rel=1e-3)
