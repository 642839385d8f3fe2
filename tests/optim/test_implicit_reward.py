"""PRIME's reward model: it learns online, before or after its rewards are used."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from runs import small
from steps import BARE, Start, advance, gather, learn, plain_logp, rollouts, weights
from torch import Tensor

from groupwise.errors import ConfigError
from groupwise.groups.phase import batch_phase
from groupwise.model.layers.attention import packed, packed_positions
from groupwise.model.layers.transformer import Policy
from groupwise.optim.assemble import sequences_of
from groupwise.optim.roles.implicit_reward import ImplicitRewardModel, reward_measures
from groupwise.recipes import recipe
from groupwise.records import TokenBatch
from groupwise.stages.checks import check_config
from groupwise.training.run import Run

BETA = 0.05
PRIME = {
    "recipe": "prime",
    "recipe__filter": "",
    "reward_model__learning_rate": 1e-2,
    "reward_model__clip_norm": 0.0,
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


def model_of(run: Run) -> Policy:
    role = run.parts.learner.roles["prm"]
    assert isinstance(role, ImplicitRewardModel)
    return role.model


def by_hand(phi_NT: Tensor, ref_NT: Tensor, reward_N: Tensor, mask_NT: Tensor) -> Tensor:
    """Equation 5, row by row: groups of four, γ = 1."""
    r_NT = BETA * (phi_NT - ref_NT).double() * mask_NT
    found_NT = torch.zeros_like(r_NT)
    for row in range(len(r_NT)):
        others = [j for j in range(4 * (row // 4), 4 * (row // 4) + 4) if j != row]
        base = sum(float(r_NT[j].sum() / mask_NT[j].sum()) for j in others) / 3
        outcome = float(reward_N[row]) - sum(float(reward_N[j]) for j in others) / 3
        for t in range(int(mask_NT[row].sum())):
            found_NT[row, t] = float((r_NT[row, t:] - base)[mask_NT[row, t:]].sum()) + outcome
    return found_NT


def learned_by_hand(model: Policy, sequences: Any, ref_NT: Tensor, right_N: Tensor) -> Policy:
    """One step of AdamW without momentum on the mean cross-entropy of σ(Σ r) against right."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=1e-2,
        betas=(0.0, 0.999),
        weight_decay=0.0,
    )
    total = torch.zeros(())
    for row, answer in enumerate(sequences.completions):
        ids = torch.tensor([*sequences.prompts[row], *answer])
        hidden_TD = model(ids, packed_positions([len(ids)]), packed([len(ids)]))
        logits_TV = hidden_TD.float() @ model.head_weight.float().T
        every_TV = torch.log_softmax(logits_TV, -1)[len(sequences.prompts[row]) - 1 : -1]
        logp_T = every_TV.gather(1, torch.tensor(answer)[:, None])[:, 0]
        score = BETA * (logp_T - ref_NT[row, : len(answer)]).sum()
        total = total + F.binary_cross_entropy_with_logits(score, right_N[row])
    (total / len(sequences.completions)).backward()
    optimizer.step()
    return model


def test_a_model_that_has_not_learned_gives_no_rewards(start: Start, tmp_path: Path) -> None:
    """φ = ref: r = 0, and the first step of `after` is leave-one-out on outcomes alone."""
    changes = {**PRIME, "reward_model__update": "after"}
    with start.opened(tmp_path, **changes) as run:
        collected = gather(run)
        batch = learn(run, collected).batch
    assert torch.equal(batch.prm_logp_NT, batch.ref_logp_NT)
    reward_GS = torch.tensor([r.grade.reward for r in rollouts(collected)]).view(-1, 4)
    expected_N = (reward_GS - (reward_GS.sum(1, keepdim=True) - reward_GS) / 3).flatten()
    torch.testing.assert_close(batch.advantage_NT[:, 0].double(), expected_N.double())


def test_after_reads_the_model_as_it_was(start: Start, tmp_path: Path) -> None:
    with start.opened(tmp_path, **PRIME, reward_model__update="after") as run:
        advance(run)
        collected = gather(run)
        sequences, held = sequences_of(collected.groups), copy.deepcopy(model_of(run))
        batch = learn(run, collected).batch
        assert not torch.equal(weights(held), weights(model_of(run)))
    expected_NT = plain_logp(held, sequences)
    assert ((expected_NT - batch.ref_logp_NT)[batch.mask_NT].abs() > 1e-4).any()
    torch.testing.assert_close(batch.prm_logp_NT, expected_NT, rtol=0, atol=1e-5)
    reward_N = torch.tensor([r.grade.reward for r in rollouts(collected)])
    expected_NT = by_hand(batch.prm_logp_NT, batch.ref_logp_NT, reward_N, batch.mask_NT)
    torch.testing.assert_close(batch.advantage_NT.double(), expected_NT, rtol=0, atol=1e-5)


def test_before_learns_from_the_batch_that_it_then_judges(start: Start, tmp_path: Path) -> None:
    """The first update, by hand: without a second moment AdamW's step is the gradient's sign."""
    with start.opened(tmp_path, **PRIME, **BARE) as run:
        collected = gather(run)
        sequences, held = sequences_of(collected.groups), copy.deepcopy(model_of(run))
        batch = learn(run, collected).batch
    right_N = torch.tensor([float(bool(r.grade.correct)) for r in rollouts(collected)])
    ref_NT = plain_logp(held, sequences)  # as at the start
    taught = learned_by_hand(held, sequences, ref_NT, right_N)
    expected_NT = plain_logp(taught, sequences)
    off = (batch.prm_logp_NT - expected_NT)[batch.mask_NT].abs()
    assert off.mean() < 0.02 * (expected_NT - ref_NT)[batch.mask_NT].abs().mean()
    reward_N = torch.tensor([r.grade.reward for r in rollouts(collected)])
    expected_NT = by_hand(batch.prm_logp_NT, batch.ref_logp_NT, reward_N, batch.mask_NT)
    torch.testing.assert_close(batch.advantage_NT.double(), expected_NT, rtol=0, atol=1e-5)


def test_before_and_after_differ(start: Start, tmp_path: Path) -> None:
    found = []
    for update in ("before", "after"):
        with start.opened(tmp_path / update, **PRIME, reward_model__update=update) as run:
            advance(run, 2)
            found.append(weights(run.parts.loaded.model))
    assert not torch.equal(*found)


@pytest.mark.parametrize("update", ["before", "after"])
def test_a_run_goes_on_to_the_same_bits(update: str, start: Start, tmp_path: Path) -> None:
    ends = []
    for name, cuts in (("whole", []), ("cut", [1, 2])):
        for until in [*cuts, 3]:
            changes = {**PRIME, "reward_model__update": update, "steps": 3}
            with start.opened(tmp_path / name, **changes) as run:
                advance(run, until - run.progress.step)
                run.keeper.save_and_wait()
                role = run.parts.learner.roles["prm"]
                found = [weights(run.parts.loaded.model), *role.state().values()]
        ends.append([x.clone() for x in found])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_reference_that_moves_is_refused(start: Start) -> None:
    with pytest.raises(ConfigError, match="would move what the implicit reward model of prime"):
        check_config(small(**start.settings(recipe="prime", reference__update="ema:0.9")))


def test_measures_by_hand() -> None:
    batch = TokenBatch.build(
        mask_NT=torch.tensor([[1, 1, 0], [1, 1, 1]]),
        group_N=[0, 0],
        reward_N=[1.0, 0.0],
        ref_logp_NT=torch.zeros(2, 3, dtype=torch.float64),
        prm_logp_NT=torch.tensor([[1.0, 2.0, 9.0], [-1.0, 0.5, 3.0]], dtype=torch.float64),
        correct_N=torch.tensor([True, False]),
    )
    done = batch_phase(recipe("prime", {"filter": ""}), batch).batch
    found = reward_measures(done, 0.1)
    assert found["prm/accuracy"] == 0.5  # 0.3 for the right one, 0.25 for the wrong one
    assert found["prm/reward_right"] == pytest.approx(0.3)
    assert found["prm/reward_wrong"] == pytest.approx(0.25)
    assert found["prm/length_correlation"] == pytest.approx(-1.0)


def test_the_release_by_hand() -> None:
    """K·r/(K−1) − Σ r̄/(K−1), divided by the largest return, both terms five times."""
    made = recipe("prime@release", {"filter": "", "advantage": "process_rloo_release()"})
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    prm = torch.tensor([[1.0, 2.0, 0.0], [-1.0, 0.5, 3.0]], dtype=torch.float64)
    batch = TokenBatch.build(
        mask_NT=mask,
        group_N=[0, 0],
        reward_N=[1.0, 0.0],
        ref_logp_NT=torch.zeros(2, 3, dtype=torch.float64),
        prm_logp_NT=prm,
        correct_N=torch.tensor([True, False]),
    )
    found_NT = batch_phase(made, batch).batch.advantage_NT
    r = prm * 0.05
    largest = 0.05 * 3.5  # of the second answer, from its second token on
    r = r / largest
    means = [float(r[0, :2].mean()), float(r[1].mean())]
    centred = (2.0 * r - sum(means)) * mask
    process = torch.stack([centred[:, t:].sum(1) for t in range(3)], 1)
    outcome = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    torch.testing.assert_close(found_NT, 5.0 * (process + outcome) * mask)
