"""Ratios, gates, corrections and references inside real steps: what each reads and gives."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import Start, advance, full_logp, gather, learn, plain_logp, rollouts, spy, weights

from groupwise.optim.assemble import sequences_of
from groupwise.optim.packs import Sequences
from groupwise.runfiles.rollouts import read
from groupwise.stages.collected import Collected

TOKEN_PHASE = "groupwise.optim.learner.token_phase"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


class Inside:
    """One step of a run: its rollouts, and every micro-batch that the token phase saw."""

    def __init__(
        self,
        start: Start,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        steps: int = 0,
        **changes: Any,
    ) -> None:
        with start.opened(folder, **changes) as self.run:
            advance(self.run, steps)
            self.collected: Collected = gather(self.run)
            self.sequences = sequences_of(self.collected.groups)
            # The policy before its updates, as it scores every answer.
            self.logp_NT = plain_logp(self.run.parts.loaded.model, self.sequences)
            self.calls = spy(monkeypatch, TOKEN_PHASE)
            scored = spy(monkeypatch, "groupwise.optim.packs.outputs")
            updated = spy(monkeypatch, "groupwise.optim.learner.outputs")
            self.taught = learn(self.run, self.collected, rate=3e-3)
        # Rows of every forward pass, without and with gradient.
        self.scored, self.updated = ([args[1].rows for args, _, _ in x] for x in (scored, updated))
        self.batches = [args[1] for args, _, _ in self.calls]
        self.outputs = [
            {k: x.detach() for k, x in found.items() if isinstance(x, torch.Tensor)}
            for _, found, _ in self.calls
        ]
        self.results = [result for _, _, result in self.calls]


# --- ratios -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("name", ["gspo", "sspo", "grpo@verl"])
def test_bug_12_the_first_of_several_updates_has_a_ratio_of_1(
    name: str, scored: bool, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the batch is cut, and the later updates move away from it.

    With a correction the anchor is scored, and the ratio is 1 to the bit: a matrix product's last
    bits may depend on its size, so passes must be cut alike. Without one, it is the sampler.
    """
    changes = {"recipe": name, "recipe__schedule__updates": 2, "optim__micro_tokens": 15}
    changes |= {"prompts_per_step": 8, "engine__temperature": 0.7}
    changes |= {"recipe__correction": "mask_sequence(low=0.5)"} if scored else {}
    inside = Inside(start, tmp_path, monkeypatch, steps=1, **changes)
    assert inside.scored == (inside.updated if scored else [])
    half = [int(batch.group_N.max()) < 4 for batch in inside.batches]
    assert len(half) > 8 and half == sorted(half, reverse=True)  # several micro-batches each
    largest = [float(result.log_ratio_NT.abs().max()) for result in inside.results]
    for first, size in zip(half, largest, strict=True):
        assert (size <= (0.0 if scored else 1e-5)) if first else (size > 1e-4)


@pytest.mark.parametrize("name", ["grpo", "dapo", "dppo", "rloo"])
def test_bug_12_one_update_is_on_policy(
    name: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"recipe": name, "recipe__schedule__updates": 1, "optim__micro_tokens": 1}
    inside = Inside(start, tmp_path, monkeypatch, steps=1, **changes)
    assert len(inside.results) > 4
    for result in inside.results:
        # Against the sampler's numbers a ratio is as exact as two roads through one model are.
        near = 1e-5 if name == "dppo" else 0.0
        assert float(result.log_ratio_NT.abs().max()) <= near


def test_updates_take_whole_groups_while_there_are_enough(start: Start, tmp_path: Path) -> None:
    with start.opened(tmp_path, recipe="gspo", recipe__schedule__updates=2) as run:
        assert run.parts.learner.parts([5, 5, 5, 1, 1, 1, 2, 2]) == [[0, 1, 2], [3, 4, 5, 6, 7]]
        assert run.parts.learner.parts([5, 5, 5, 5]) == [[0, 1], [2, 3]]
        assert run.parts.learner.parts([5]) == [
            [0]
        ]  # dynamic sampling may leave fewer rows than updates


def test_gspo_has_one_ratio_an_answer(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = Inside(start, tmp_path, monkeypatch, recipe="gspo", recipe__gate="clip(0.2, 0.2)")
    assert len(inside.results) == 4 and inside.scored == []
    for batch, outputs, result in zip(inside.batches, inside.outputs, inside.results, strict=True):
        for row, length in enumerate(batch.mask_NT.sum(1).tolist()):
            moved_T = (outputs["logp_NT"] - batch.sampler_logp_NT)[row, :length]
            found_T = result.log_ratio_NT[row, :length]
            assert found_T.tolist() == pytest.approx([float(moved_T.mean())] * length, abs=1e-6)
    assert max(float(result.log_ratio_NT.abs().max()) for result in inside.results) > 1e-3


def test_sspo_has_one_ratio_a_segment(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = Inside(start, tmp_path, monkeypatch, recipe="sspo", recipe__schedule__updates=2)
    batch, outputs, result = inside.batches[1], inside.outputs[1], inside.results[1]
    texts = [rollout.text for rollout in rollouts(inside.collected)[8:]]
    several = 0
    for row, text in enumerate(texts):
        ends = [at + 1 for at, x in enumerate(text.removesuffix("<end>")) if x in ",;"]
        length = int(batch.mask_NT[row].sum())
        cuts = [0, *[end for end in ends if end < length], length]
        means = []
        for a, b in itertools.pairwise(cuts):
            moved_T = (outputs["logp_NT"] - batch.sampler_logp_NT)[row, a:b]
            means.append(float(moved_T.mean()))
            assert result.log_ratio_NT[row, a:b].tolist() == pytest.approx(
                [means[-1]] * (b - a), abs=1e-6
            )
        several += len(set(means)) > 1
    assert several >= 6


def test_the_rollout_file_says_what_the_updates_saw(start: Start, tmp_path: Path) -> None:
    """The policy's view before the first update, and each answer's ratio at its own update."""
    changes = {"recipe__schedule__updates": 2, "recipe__correction": "mask_sequence(low=0.5)"}
    with start.opened(tmp_path, recipe="gspo", **changes) as run:
        policy = copy.deepcopy(run.parts.loaded.model)
        advance(run)
        run.reporter.recorder.flush()
    table = read(tmp_path / "rollouts" / "step_1.parquet").to_pylist()
    rows = Sequences(
        [tuple(row["prompt_token_ids"]) for row in table],
        [tuple(row["token_ids"]) for row in table],
    )
    for number, (row, logp_T) in enumerate(zip(table, plain_logp(policy, rows), strict=True)):
        length = len(row["token_ids"])
        expected = pytest.approx(logp_T[:length].tolist(), abs=1e-5)
        assert row["learner_logp"] == expected and row["sampler_logp"] == expected
        assert len(set(row["ratio"])) == 1 and (row["ratio"][0] == 1.0) == (number < 8)
        assert len(set(row["advantage"])) == 1 and min(row["entropy"]) > 0


# --- gates ------------------------------------------------------------------------------------


def test_lopti_s_second_pass_sees_the_moved_policy_and_the_same_old_one(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = Inside(start, tmp_path, monkeypatch, recipe="lopti")
    low, high = inside.batches
    assert inside.taught.metrics["updates/count"] == 2.0 and len(inside.taught.outcomes) == 2
    assert (low.pass_number, high.pass_number) == (0, 1)
    rare_NT = (inside.logp_NT.exp() < 0.5) & low.mask_NT
    assert torch.equal(low.pass_NT, rare_NT) and torch.equal(high.pass_NT, low.mask_NT & ~rare_NT)
    assert 0 < int(rare_NT.sum()) < int(low.mask_NT.sum())
    assert torch.equal(low.old_logp_NT, high.old_logp_NT)
    first_NT, second_NT = (outputs["logp_NT"] for outputs in inside.outputs)
    torch.testing.assert_close(first_NT, inside.logp_NT, rtol=0, atol=1e-5)
    assert float((second_NT - first_NT).abs().max()) > 1e-3
    # Each pass weighs its own tokens, by the denominator of the whole batch.
    tokens = float(low.mask_NT.sum())
    for batch in (low, high):
        assert batch.coefficient_NT[batch.pass_NT] == pytest.approx(1 / tokens)
        assert (batch.coefficient_NT[~batch.pass_NT] == 0).all()


def test_simko_reads_the_policy_s_own_entropy_and_top_k(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start.opened(tmp_path, recipe="simko") as run:
        collected = gather(run)
        every = [
            full_logp(run.parts.loaded.model, r.task.token_ids, r.completion.token_ids)
            for r in rollouts(collected)
        ]
        calls = spy(monkeypatch, TOKEN_PHASE)
        learn(run, collected)
    ((_, batch), outputs, _) = calls[0]
    for row, (logp_TV, rollout) in enumerate(zip(every, rollouts(collected), strict=True)):
        length, top = len(logp_TV), logp_TV.topk(3)
        assert batch.token_NT[row, :length].tolist() == list(rollout.completion.token_ids)
        assert torch.equal(outputs["topk_id_NTK"][row, :length], top.indices)
        for name, expected in (
            ("topk_logp_NTK", top.values),
            ("entropy_NT", -(logp_TV.exp() * logp_TV).sum(-1)),
        ):
            torch.testing.assert_close(
                outputs[name][row, :length].detach(), expected, rtol=0, atol=1e-5
            )
    assert outputs["topk_logp_NTK"].requires_grad


@pytest.mark.parametrize("engine", ["shared", "noise:1.0"])
def test_dppo_compares_the_sampler_s_top_k_with_the_learner_s_view_of_it(
    engine: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"recipe": "dppo_topk", "recipe__gate__k": 4, "engine__weights": engine}
    with start.opened(tmp_path, recipe__gate__delta=0.05, **changes) as run:
        collected = gather(run)
        every = [
            full_logp(run.parts.loaded.model, r.task.token_ids, r.completion.token_ids)
            for r in rollouts(collected)
        ]
        calls = spy(monkeypatch, TOKEN_PHASE)
        learn(run, collected)
    ((_, batch), outputs, result) = calls[0]
    furthest = 0.0
    for row, (logp_TV, rollout) in enumerate(zip(every, rollouts(collected), strict=True)):
        length, done = len(logp_TV), rollout.completion
        assert torch.equal(batch.sampler_topk_id_NTK[row, :length], done.topk_id_TK)
        assert torch.equal(batch.sampler_topk_logp_NTK[row, :length], done.topk_logp_TK)
        view_TK = logp_TV.gather(1, done.topk_id_TK)
        found_TK = outputs["logp_at_sampler_topk_NTK"][row, :length].detach()
        torch.testing.assert_close(found_TK, view_TK, rtol=0, atol=1e-5)
        mu_TK, pi_TK = done.topk_logp_TK.exp(), view_TK.exp()
        rest_T = (mu_TK.sum(1) - pi_TK.sum(1)).abs()
        tv_T = ((mu_TK - pi_TK).abs().sum(1) + rest_T) / 2
        furthest = max(furthest, float(tv_T.max()))
        # Out of bounds and on the way further out: the token's advantage pushes its ratio on.
        own_T = logp_TV.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0] - done.logp_T
        outward_T = own_T * batch.advantage_NT[row, :length] > 0
        expected_T = outward_T & (tv_T > 0.05)
        assert torch.equal(result.clipped_NT[row, :length], expected_T)
    assert (furthest < 1e-5) if engine == "shared" else (furthest > 0.1)
    assert bool(result.clipped_NT.any()) == (engine != "shared")


# --- corrections ------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["int8", "noise:0.3"])
@pytest.mark.parametrize("name", ["tis", "mis", "grpo@areal"])
def test_corrections_weigh_by_the_learner_over_the_sampler(
    name: str, engine: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = Inside(start, tmp_path, monkeypatch, recipe=name, engine__weights=engine)
    (batch,), (result,) = inside.batches, inside.results
    sampler_NT = torch.zeros_like(inside.logp_NT)
    for row, rollout in enumerate(rollouts(inside.collected)):
        assert rollout.completion.weights == engine
        sampler_NT[row, : len(rollout.completion.logp_T)] = rollout.completion.logp_T
    gap_NT = inside.logp_NT - sampler_NT
    rho_NT = gap_NT.exp()
    if name == "tis":
        expected_NT = rho_NT.clamp(max=2.0)
    elif name == "grpo@areal":
        expected_NT = torch.where(rho_NT <= 5.0, rho_NT, 0.0)
    else:
        product_N1 = gap_NT.sum(1, keepdim=True).exp()
        expected_NT = torch.where(product_N1 <= 2.0, product_N1, 0.0).expand_as(rho_NT)
    mask_NT = batch.mask_NT
    torch.testing.assert_close(
        result.weight_NT[mask_NT], expected_NT[mask_NT], rtol=1e-4, atol=1e-5
    )
    assert float((result.weight_NT[mask_NT] - 1.0).abs().mean()) > 1e-3
    measured = inside.taught.metrics["mismatch/abs_mean"]
    assert measured == pytest.approx(float(gap_NT[mask_NT].abs().mean()), rel=1e-3)


# --- references -------------------------------------------------------------------------------


KL_AFTER = {  # is the KL of steps 1 to 5 exactly 0?
    "frozen": (True, False, False, False, False),
    "ema:0.5": (True, False, False, False, False),
    "reset:2": (True, False, True, False, True),
}


@pytest.mark.parametrize("update", KL_AFTER)
def test_bug_17_kl_is_exactly_0_while_reference_and_policy_are_the_same(
    update: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"recipe": "grpo", "reference__update": update, "optim__micro_tokens": 1}
    calls = spy(monkeypatch, TOKEN_PHASE)
    found = []
    with start.opened(tmp_path, **changes) as run:
        first = weights(run.parts.loaded.model)
        for _ in range(5):
            calls.clear()
            before = weights(run.parts.learner.roles["reference"].model)
            advance(run)
            for (_, micro), outputs, _ in calls:
                gap_NT = (outputs["logp_NT"].detach() - micro.ref_logp_NT)[micro.mask_NT]
                found.append((run.progress.step, float(gap_NT.abs().max())))
            now, policy = (
                weights(run.parts.learner.roles["reference"].model),
                weights(run.parts.loaded.model),
            )
            if update == "frozen":
                assert torch.equal(now, first)
            elif update == "ema:0.5":
                torch.testing.assert_close(now, (before + policy) / 2, rtol=0, atol=1e-7)
            else:
                assert torch.equal(now, policy if run.progress.step % 2 == 0 else before)
    assert len(found) >= 10  # several micro-batches a step
    for step, gap in found:
        assert (gap == 0.0) == KL_AFTER[update][step - 1]
