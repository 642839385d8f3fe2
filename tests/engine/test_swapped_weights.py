"""New weights in the middle of answers: every token against the weights that wrote it."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import chain

import pytest
import torch
from engine_zoo import engine, learner_logp, request, same, tokenizer
from model_zoo import make

from groupwise.config import EngineSettings
from groupwise.engine.answers import cut
from groupwise.engine.backends import EngineSetup
from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.native.process import ProcessEngine
from groupwise.engine.protocol import Engine, Sampling, Sync
from groupwise.errors import BatchError, EngineError
from groupwise.model.formats.checkpoint import Loaded
from groupwise.model.layers.transformer import Transformer
from groupwise.records import Completion, VersionRun

FREE = Sampling(max_tokens=12)
ASKED = [request(5, 3, 0), request(17, 4, 1), request(9, 5, 2)]


@torch.no_grad()
def perturb(model: Transformer) -> Transformer:
    """Change every weight in place; returns what it was before."""
    before = copy.deepcopy(model)
    for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        parameter += 0.05 * noise
    return before


def swapped(
    sync: Sync, *steps: int, model: str = "smollm2", slots: int = 8
) -> tuple[dict[int, Transformer], list[list[Completion]]]:
    """Answers with new weights behind so many tokens; the weights of each version."""
    sampler = engine(model, slots=slots, on_sync=sync)
    learner = sampler.source.model
    versions, tickets = {}, sampler.submit(ASKED, FREE)
    found = {}
    for version, after in enumerate(steps):
        left = iter(range(after - 1))
        found |= dict(sampler.finished(pause=lambda left=left: next(left, None) is None))
        versions[version] = perturb(learner)
        sampler.sync(version + 1)
    versions[len(steps)] = learner
    while len(found) < len(tickets):
        found |= dict(sampler.finished())
    return versions, [found[ticket] for ticket in tickets]


@pytest.mark.parametrize("model", ["smollm2", "qwen3"])
@pytest.mark.parametrize("slots", [5, 12])  # some wait, with their prompts computed or not
def test_recomputed_tokens_have_the_probability_of_their_own_weights(
    model: str, slots: int
) -> None:
    versions, groups = swapped("recompute", 3, 2, 4, model=model, slots=slots)
    runs = set()
    for asked, group in zip(ASKED, groups, strict=True):
        for done in group:
            at = 0
            for run in done.versions:
                logp_T = learner_logp(versions[run.version], asked, done)
                gap_T = (logp_T - done.logp_T).abs()[at : at + run.tokens]
                assert float(gap_T.max()) <= 1e-5
                at += run.tokens
            assert run.pure and at == len(done.token_ids) == 12
            runs.add(tuple(run.version for run in done.versions))
    assert (0, 1, 2, 3) in runs
    if slots == 5:
        assert any(len(each) < 4 for each in runs)  # those that began later


def test_what_came_before_new_weights_is_as_without_them() -> None:
    _, alone = swapped("recompute")
    _, groups = swapped("recompute", 3, slots=12)
    for before, after in zip(chain(*alone), chain(*groups), strict=True):
        assert before.runs == () and before.versions == (VersionRun(0, 12),)
        assert after.runs == (VersionRun(0, 3), VersionRun(1, 9))
        assert after.version == 0 and after.token_ids[:3] == before.token_ids[:3]
        assert torch.equal(after.logp_T[:3], before.logp_T[:3])
        assert after.token_ids != before.token_ids


def test_kept_caches_are_of_no_policy_and_say_so() -> None:
    versions, groups = swapped("keep", 4, slots=5)
    mixed = 0
    for asked, group in zip(ASKED, groups, strict=True):
        for done in group:
            last = done.versions[-1]
            gap_T = (learner_logp(versions[last.version], asked, done) - done.logp_T).abs()
            own_T = gap_T[-last.tokens :]
            if len(done.versions) == 1:  # begun after the swap, its prompt computed anew
                assert last.pure and last.version == 1 and float(own_T.max()) <= 1e-5
                continue
            mixed += 1
            assert done.versions == (VersionRun(0, 4), VersionRun(1, 8, pure=False))
            before_T = learner_logp(versions[0], asked, done) - done.logp_T
            assert float(before_T[:4].abs().max()) <= 1e-5
            assert float(own_T.max()) > 1e-3
    assert mixed == 5


@pytest.mark.parametrize("sync", ["recompute", "keep"])
def test_the_same_weights_again_are_no_new_weights(sync: Sync) -> None:
    sampler = engine(slots=5, on_sync=sync)
    tickets = sampler.submit(ASKED, FREE)
    left = iter(range(3))
    sampler.finished(pause=lambda: next(left, None) is None)
    sampler.sync(0)  # as behind an update that was skipped
    found = dict(x for _ in tickets for x in sampler.finished())
    for group, before in zip(map(found.get, tickets), swapped("drain")[1], strict=True):
        assert all(map(same, group or [], before))


@pytest.mark.parametrize("sync", ["drain", "recompute"])
def test_requests_join_others_under_way_and_are_the_same(sync: Sync) -> None:
    alone = [engine(slots=5).generate([asked], FREE)[0] for asked in ASKED]
    sampler = engine(slots=5, on_sync=sync)
    first = sampler.submit(ASKED[1:2], FREE)
    left = iter(range(2))
    found = dict(sampler.finished(pause=lambda: next(left, None) is None))
    rest = sampler.submit([ASKED[0], ASKED[2]], FREE)
    assert len(sampler.batches) == 1
    while len(found) < 3:
        found |= dict(sampler.finished())
    assert not sampler.finished()
    for ticket, group in zip([rest[0], first[0], rest[1]], alone, strict=True):
        assert all(map(same, found[ticket], group))


def test_caches_grow_for_longer_requests_that_join() -> None:
    sampler = engine(slots=5, on_sync="recompute")
    sampler.submit(ASKED[:1], FREE)
    sampler.finished(pause=lambda: True)
    long = request(200, 1, 9)
    (ticket,) = sampler.submit([long], FREE)
    assert len(sampler.batches) == 1
    found = dict(sampler.finished() + sampler.finished())
    assert same(found[ticket][0], engine(slots=5).generate([long], FREE)[0][0])


def test_runs_cover_the_tokens() -> None:
    done = Completion((1, 2, 3), torch.zeros(3), "eos", 4)
    mixed = replace(done, runs=(VersionRun(4, 1), VersionRun(6, 2)))
    assert mixed.versions == mixed.runs and done.versions == (VersionRun(4, 3),)
    assert cut(mixed, 2).runs == (VersionRun(4, 1), VersionRun(6, 1))
    assert cut(mixed, 1).runs == (VersionRun(4, 1),)
    for runs in [(VersionRun(4, 2),), (VersionRun(4, 3), VersionRun(5, 0)), (VersionRun(5, 3),)]:
        with pytest.raises(BatchError, match=r"version|cover"):
            replace(done, runs=runs)


# --- in a process of its own ------------------------------------------------------------------


def beside(model: Transformer, sync: Sync = "drain") -> ProcessEngine:
    settings = EngineSettings(servers=1, slots=8)
    setup = EngineSetup(Loaded(model, tokenizer(), {}), settings, 7, on_sync=sync)
    made: Engine = NativeEngine.made(setup)
    assert isinstance(made, ProcessEngine)
    return made


def test_a_process_samples_what_the_learner_would() -> None:
    """Before new weights and after them, and what was cancelled never comes."""
    model = make("smollm2")
    sampler = beside(model)
    try:
        for version in (0, 1):
            alone = engine(model).generate(ASKED, FREE)
            dropped = sampler.submit([request(5, 2, 77)], FREE)
            sampler.cancel(dropped)
            for group, other in zip(sampler.generate(ASKED, FREE), alone, strict=True):
                assert all(map(same, group, other))
                assert {each.version for each in group} == {version}
            assert sampler.finished() == []
            perturb(model)
            # Nothing moves before it is delivered.
            assert not torch.equal(sampler.source.model.head_weight, model.head_weight)
            sampler.sync(version + 1)
            assert torch.equal(sampler.source.model.head_weight, model.head_weight)
        assert sampler.source.version == 2 and sampler.idle_seconds > 0
        with pytest.raises(EngineError, match="is empty"):
            sampler.submit([replace(ASKED[0], prompt=())], FREE)
    finally:
        sampler.close()
    assert sampler.sampler.process.returncode is not None


def test_what_fails_in_the_process_is_told_here() -> None:
    model = make("smollm2")
    sampler = beside(model, "recompute")
    try:
        model.head_weight.data.fill_(torch.nan)
        sampler.sync(1)
        sampler.submit(ASKED, FREE)
        with pytest.raises(EngineError, match=r"no finite probabilities .* of version 1"):
            sampler.finished()
    finally:
        sampler.close()
