"""Where the log-probabilities before the update come from, and what that may not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import small
from steps import Start, advance, gather, learn, spy, weights
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise import TokenBatch, batch_phase, recipe, token_phase
from groupwise.methods.composition import Recipe
from groupwise.model.layers import ops
from groupwise.optim.assemble import sequences_of
from groupwise.runfiles.rollouts import read
from groupwise.stages.consequences import anchored
from groupwise.stages.describe import describe

SEVERAL = {"schedule.updates": 2}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


def reads_old(made: Recipe) -> bool:
    return "old_logp_NT" in made.streams


def test_one_update_scores_only_for_what_looks_back() -> None:
    """A gate, a penalty or a correction reads the policy of the same pass, detached."""
    assert not reads_old(recipe("grpo", {"gate": "dynamic_clip()"}))
    assert not reads_old(recipe("grpo", {"penalty": "kl_importance()"}))
    assert not reads_old(recipe("tis"))
    assert reads_old(recipe("grpo", {"shaping": "kl_per_sequence()", "penalty": ""}))
    assert reads_old(recipe("dr_grpo", {"advantage": "group_mean(), reweight_by_probability()"}))
    assert reads_old(recipe("dr_grpo", {"schedule": "low_then_high()"}))


def test_several_updates_score_for_corrections_and_other_readers() -> None:
    def scores(changes: dict[str, Any], weights: str = "shared") -> bool:
        made = recipe("dr_grpo", {**SEVERAL, **changes}).anchored(weights)
        anchor = made.ratio["anchor"]
        assert (anchor == "sampler") == (not reads_old(made)), anchor
        return reads_old(made)

    assert not scores({})
    assert scores({"correction": "tis_token()"})
    assert scores({"correction": "mask_sequence()"})
    assert scores({"gate": "dynamic_clip()"})
    assert scores({"penalty": "kl_importance()"})
    assert scores({"schedule": "low_then_high(updates=2)"})
    # A copy that is sampled to study a mismatch must not be corrected by the way.
    assert scores({}, "int8") and scores({}, "stale:2")


def test_a_mask_beside_the_sampler_s_anchor_compares_with_the_policy_before_the_updates() -> None:
    made = recipe("dr_grpo", {**SEVERAL, "ratio.anchor": "sampler"})
    assert not reads_old(made)
    assert reads_old(made.replace(correction="mask_sequence()"))


def test_the_anchor_is_all_that_changes_and_it_is_told() -> None:
    made = recipe("gspo", SEVERAL)
    other = made.anchored("shared")
    assert other.text() == {**made.text(), "ratio": "sequence_geomean(anchor='sampler')"}
    assert (other.name, other.about) == (made.name, made.about)
    assert recipe("gspo", {"schedule.updates": 1}).anchored("shared").ratio["anchor"] == "old"
    told = [line for line in describe(small(recipe="gspo")) if "anchor of the ratio" in line]
    assert len(told) == 1 and "sampler" in told[0]
    for changes in ({"recipe__schedule__updates": 1}, {"engine__weights": "int8"}):
        lines = describe(small(recipe="gspo", **changes))
        assert not any("anchor of the ratio" in line for line in lines)


def test_what_bfloat16_differs_by_is_no_step_away_from_the_policy() -> None:
    """At 4e-3 nats a token, a mean over an answer leaves GSPO's range before anything moved."""
    half = {"model__dtype": "bfloat16", "model__device": "cuda"}
    for name, changes, anchor in (
        ("gspo", half, "old"),
        ("gspo", {**half, "engine__exact": True}, "sampler"),
        ("gspo", {}, "sampler"),
        ("dapo", half, "sampler"),  # a token's own ratio, and 20 % of room
    ):
        config = small(recipe=name, **changes)
        made = anchored(config, config.recipe)
        assert made.ratio["anchor"] == anchor
        told = any("anchor of the ratio" in line for line in describe(config))
        assert told == (anchor == "sampler")
        if anchor == "old":
            assert reads_old(made)
    made = recipe("gspo")
    torch.manual_seed(0)
    logp_NT = -torch.rand(128, 250)
    streams = {"sampler_logp_NT": logp_NT + 5e-3 * torch.randn(128, 250), "old_logp_NT": logp_NT}
    batch = TokenBatch.build(
        mask_NT=torch.ones(128, 250, dtype=torch.bool),
        group_N=[row // 8 for row in range(128)],
        reward_N=[float(row % 3 == 0) for row in range(128)],
        **streams,
    )
    shares = []
    for way in (made.anchored("shared"), made.anchored("shared", close=False)):
        found = token_phase(way, batch_phase(way, batch).batch, logp_NT=logp_NT)
        shares.append(float(found.clipped_NT.double().mean()))
    assert shares[0] > 0.1 and shares[1] == 0


# With these, one update reads the old policy in its token phase alone.
TOKEN_PHASE = {
    "gate": {"recipe": "dr_grpo", "recipe__gate": "dynamic_clip()"},
    "penalty": {"recipe": "grpo", "recipe__penalty": "kl_importance()"},
    "correction": {"recipe": "tis", "engine__weights": "noise:0.3"},
    "sequence ratio": {"recipe": "gspo", "recipe__schedule__updates": 1},
}


@pytest.mark.parametrize("reader", TOKEN_PHASE)
def test_one_update_moves_the_weights_as_with_a_scoring_pass(
    reader: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, in several micro-batches, with a ratio of exactly 1."""
    found = []
    for scored in (False, True):
        with start.opened(
            tmp_path / str(scored), optim__micro_tokens=15, **TOKEN_PHASE[reader]
        ) as run:
            collected = gather(run)
            passes = spy(monkeypatch, "groupwise.optim.learner.score")
            if scored:
                sequences = sequences_of(collected.groups)
                old_NT = run.parts.learner.score(
                    run.parts.loaded.model, sequences, [list(range(len(sequences.prompts)))]
                )
                asked = run.parts.learner.role_streams

                def given(*rows: Any, old_NT: Any = old_NT, asked: Any = asked) -> Any:
                    return {"old_logp_NT": old_NT, **asked(*rows)}

                monkeypatch.setattr(run.parts.learner, "role_streams", given)
            taught = learn(run, collected)
            models = [args[0] for args, _, _ in passes]
            assert (run.parts.loaded.model in models) == scored
            assert (taught.batch.old_logp_NT is not None) == scored
            assert taught.metrics["ratio/max"] == taught.metrics["ratio/mean"] == 1.0
            found.append((weights(run.parts.loaded.model), taught.metrics, taught.streams))
    (w0, m0, s0), (w1, m1, s1) = found
    assert torch.equal(w0, w1) and m0 == m1
    assert s0.keys() == s1.keys()
    for name, x in s0.items():
        other = s1[name]
        assert (x is None) == (other is None)
        if x is not None:
            mask_NT = taught.batch.mask_NT
            assert torch.equal(x[mask_NT], other[mask_NT]), name


def test_the_mismatch_is_that_of_equal_weights_though_later_updates_have_moved(
    start: Start, tmp_path: Path
) -> None:
    """Anchored on the sampler, only the first update can compare; so can the file's rows."""
    changes = {"recipe": "gspo", "recipe__schedule__updates": 2, "optim__learning_rate": 3e-2}
    with start.opened(tmp_path, **changes) as run:
        advance(run)
        run.reporter.recorder.flush()
        metrics = learn(run, gather(run)).metrics
    assert metrics["updates/count"] == 2 and metrics["ratio/max"] > 1.001
    assert metrics["mismatch/abs_max"] < 1e-5
    rows = read(tmp_path / "rollouts" / "step_1.parquet").to_pylist()
    first, second = rows[:8], rows[8:]
    assert all(row["learner_logp"] is None for row in second)
    for row in first:
        assert row["learner_logp"] == pytest.approx(row["sampler_logp"], abs=1e-5)
    assert all(len(row["entropy"]) == len(row["token_ids"]) for row in rows)


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device: reading a value, or a shape made of values."""

    count, on = 0, True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = func._schema.name in ("aten::_local_scalar_dense", "aten::nonzero")
        self.count += reads and self.on
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "tis", "dppo", "cispo"])
def test_no_micro_batch_waits_for_the_device(
    name: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look an update, when its gradients are there."""
    waits, real = Waits(), ops.Plain.attention

    def on_the_host(*args: Any) -> Any:  # what is read there never was on a device
        waits.on = False
        made = real(*args)
        waits.on = True
        return made

    monkeypatch.setattr(ops.Plain, "attention", staticmethod(on_the_host))
    counts = []
    for micro_tokens in (15, 10_000):
        changes = {"recipe__schedule__updates": 1, "optim__micro_tokens": micro_tokens}
        with start.opened(tmp_path / str(micro_tokens), recipe=name, **changes) as run:
            collected = gather(run)
            waits.count = 0
            with waits:
                metrics = learn(run, collected).metrics
            counts.append((metrics["optim/micro_batches"], waits.count))
    (many, waited), (few, waited_less) = counts
    assert many >= 8 and few == 1
    assert waited == waited_less > 0
