"""Routes that are replayed and compared, against passes that are written out by hand.

The policy is a mixture of five words, and the batch has every answer of two words to its prompt:
what is said of an expectation is a sum over all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hand_mixture import VOCABULARY, answer_logp, routers_by_hand, small_mixture
from probe import composed
from torch import Tensor

from groupwise import TokenBatch, batch_phase, config
from groupwise.errors import EngineError, ModelError
from groupwise.losses.routing import load_metrics, other_experts, route_metrics, visits
from groupwise.model.layers.transformer import Transformer
from groupwise.optim.learner import PolicyLearner
from groupwise.optim.packs import Sequences
from groupwise.optim.routing import RouteRecord, sampled_routes
from groupwise.optim.schedules import LearningRates
from groupwise.optim.step import Named, StepOutcome

PROMPT = (1, 4, 2)
ANSWERS = list(itertools.product(range(VOCABULARY), repeat=2))
REWARD_N = torch.linspace(-1, 1, len(ANSWERS), dtype=torch.float64).sin()
PLAIN = {"advantage": "raw()", "gate": "unclipped()", "aggregation": "seq_mean_token_sum()"}
R2, R3 = "replay_routing('learner')", "replay_routing('sampler')"
Gradients = dict[str, Tensor]


def rows(routes: bool = False, seed: int = 5, missing: int = 0) -> Sequences:
    """Every answer, half of them to the prompt once more; routes by chance, and not the model's."""
    g = torch.Generator().manual_seed(seed)
    found: list[Tensor | None] = []
    prompt = _chance(len(PROMPT), g)
    for answer in ANSWERS:
        found.append(torch.cat([prompt, _chance(len(answer) - 1, g)]))
    for row in range(missing):
        found[row] = None
    return Sequences([PROMPT] * len(ANSWERS), ANSWERS, routes=found if routes else ())


def _chance(tokens: int, g: torch.Generator) -> Tensor:
    """Three of six experts in layers 0 and 2; layer 1 is dense."""
    routes_TLK = torch.rand(tokens, 3, 6, generator=g).topk(3).indices.to(torch.int16)
    routes_TLK[:, 1] = -1
    return routes_TLK


class Watched(PolicyLearner):
    """Keeps the weights before each update, and its gradient; then goes down that, in float64."""

    weights_before: list[Gradients]
    gradients: list[Gradients]

    def update(
        self, accumulate: Callable[[], list[Named]], learning_rate: float, of_roles: Any = None
    ) -> StepOutcome:
        self._clear()
        accumulate()
        named = dict(self.model.named_parameters())
        self.weights_before.append({n: p.detach().clone() for n, p in named.items()})
        self.gradients.append({n: _grad(p) for n, p in named.items()})
        with torch.no_grad():
            for name, parameter in named.items():
                parameter -= learning_rate * self.gradients[-1][name]
        return StepOutcome(0.0, clipped=False, skipped=False, bad=None)


def _grad(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def taught(
    sequences: Sequences,
    reward_N: Tensor = REWARD_N,
    *,
    micro: int = 4096,
    recompute: bool = False,
    updates: int = 1,
    model: Transformer | None = None,
    **slots: str,
) -> tuple[Watched, Any, TokenBatch]:
    """A step on these rows as training makes it, in double precision."""
    recipe = composed(**{**PLAIN, "schedule": f"joint(updates={updates})", **slots})
    optim = config.Optim(learning_rate=0.05, clip_norm=0.0, micro_tokens=micro, recompute=recompute)
    learner = Watched(small_mixture() if model is None else model, recipe, optim, 1.0)
    learner.weights_before, learner.gradients = [], []
    groups = list(range(len(ANSWERS)))
    parts = learner.parts(groups)
    streams, routes = learner.look_back(recipe, sequences, parts)
    batch = TokenBatch.build(
        mask_NT=sequences.mask(),
        group_N=torch.tensor(groups),
        reward_N=reward_N,
        sampler_logp_NT=torch.zeros(len(ANSWERS), 2, dtype=torch.float64),
        **streams,
    )
    done = batch_phase(recipe, batch).batch
    learned = learner.learn(done, sequences, parts, LearningRates(0.05), routes)
    return learner, learned, done


def at(weights: Mapping[str, Tensor]) -> Transformer:
    model = small_mixture()
    model.load_state_dict(dict(weights), strict=False)
    return model


def live_routes(model: Transformer, answer: tuple[int, ...]) -> Tensor:
    """The experts that the textbook's pass visits by itself."""
    return routers_by_hand(model, [*PROMPT, *answer][:-1], None)[2].detach()


def by_hand(
    model: Transformer, old: Transformer, which: list[int], routes: list[Tensor]
) -> Gradients:
    """d/dθ of −(1/N) Σ_rows R Σ_t π/π_old, both through these routes."""
    loss = torch.zeros((), dtype=torch.float64)
    for row in which:
        now = answer_logp(model, PROMPT, ANSWERS[row], routes[row])
        before = answer_logp(old, PROMPT, ANSWERS[row], routes[row]).detach()
        loss = loss - REWARD_N[row] * (now - before).exp().sum() / len(which)
    names, leaves = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, leaves), strict=True))


def assert_same(found: Gradients, wanted: Gradients) -> None:
    """To what float32 streams leave of it: old log-probabilities are kept in float32."""
    assert found.keys() == wanted.keys()
    scale = max(float(x.abs().max()) for x in wanted.values())
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=2e-6 * scale, msg=name)


# --- gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("micro", [1, 9, 4096])  # alone, a few in a pack, all in one
@pytest.mark.parametrize("source", [R2, R3])
def test_replayed_gradients_are_those_of_a_pass_with_fixed_routes(
    source: str, micro: int, recompute: bool
) -> None:
    """Both updates: at the second the policy has moved, and its routes are still the recorded."""
    sequences = rows(routes=source == R3)
    learner, learned, _ = taught(
        sequences, updates=2, correction=source, micro=micro, recompute=recompute
    )
    old = at(learner.weights_before[0])
    recorded = [x for x in sequences.routes if x is not None]
    routes = recorded if source == R3 else [live_routes(old, answer) for answer in ANSWERS]
    halves = [list(range(12)), list(range(12, 25))]
    for half, before, found in zip(halves, learner.weights_before, learner.gradients, strict=True):
        assert_same(found, by_hand(at(before), old, half, routes))
    metrics = learned.metrics()
    assert metrics["router/replayed_share"] == 1.0 and metrics["router/missing_share"] == 0.0


def test_routes_that_are_live_are_others_and_have_another_gradient() -> None:
    """Else the tests above would show nothing."""
    sequences = rows(routes=True)
    replayed, learned, _ = taught(sequences, correction=R3)
    live, plain, _ = taught(sequences)
    assert learned.metrics()["router/changed_share"] > 0.5
    assert "router/replayed_share" not in plain.metrics()
    names = [name for name in live.gradients[0] if "experts" in name]
    assert not any(torch.allclose(live.gradients[0][n], replayed.gradients[0][n]) for n in names)


@pytest.mark.parametrize("source", [R2, R3])
def test_the_expected_gradient_is_that_of_the_policy_whose_routes_are_fixed(source: str) -> None:
    """Σ π(y)·a(y)·∇ log π(y) over every answer = ∇ Σ π(y)·a(y), π with each answer's routes."""
    old, sequences = small_mixture(), rows(routes=source == R3)
    recorded = [x for x in sequences.routes if x is not None]
    routes = recorded if source == R3 else [live_routes(old, answer) for answer in ANSWERS]
    share_N = torch.stack(
        [answer_logp(old, PROMPT, a, r).sum() for a, r in zip(ANSWERS, routes, strict=True)]
    ).exp()
    if source == R2:
        assert float(share_N.detach().sum()) == pytest.approx(
            1.0
        )  # it is every answer, and a policy
    objective = (share_N * REWARD_N).sum() / len(ANSWERS)
    names, leaves = zip(*old.named_parameters(), strict=True)
    wanted = dict(zip(names, torch.autograd.grad(-objective, leaves), strict=True))
    learner, _, _ = taught(sequences, (share_N * REWARD_N).detach(), correction=source)
    assert_same(learner.gradients[0], wanted)


def test_routers_learn_through_the_full_softmax_of_replayed_experts() -> None:
    learner, _, _ = taught(rows(routes=True), correction=R3)
    gates = {n: x for n, x in learner.gradients[0].items() if n.endswith("mlp.gate.weight")}
    assert len(gates) == 2 and all(x.abs().sum() > 0 for x in gates.values())


@pytest.mark.parametrize("micro", [1, 4096])
def test_replaying_ones_own_routes_changes_no_bit(micro: int) -> None:
    """R2 at the first update, whose weights are those that were scored."""
    # No ratio: that would compare with log-probabilities that are kept in float32.
    plain = {"ratio": "on_policy()", "gate": "score()"}
    live, _, _ = taught(rows(), micro=micro, **plain)
    replayed, learned, _ = taught(rows(), micro=micro, correction=R2, **plain)
    assert learned.metrics()["router/replayed_share"] == 1.0
    for name, x in live.gradients[0].items():
        assert torch.equal(x, replayed.gradients[0][name]), name


def test_missing_routes_are_live_and_counted() -> None:
    """Rows 0 to 9 have none; the prompt is recorded with the first row that has."""
    sequences = rows(routes=True, missing=10)
    learner, learned, _ = taught(sequences, correction=R3, micro=30)
    old = small_mixture()
    routes = []
    for recorded in sequences.routes:
        first = next(x for x in sequences.routes if x is not None)[: len(PROMPT)]
        unknown = torch.cat([first, torch.full((1, 3, 3), -1, dtype=torch.int16)])
        routes.append(unknown if recorded is None else recorded)
    assert_same(learner.gradients[0], by_hand(small_mixture(), old, list(range(25)), routes))
    packs = learner.cut(sequences, [list(range(25))])
    read = len(packs) * len(PROMPT) + len(ANSWERS)  # each pack reads the prompt once
    assert learned.metrics()["router/missing_share"] == pytest.approx(10 / read)


def test_a_shared_prompt_takes_the_first_of_several_records_whatever_the_packs() -> None:
    sequences = rows(routes=True)
    odd = [x.clone() for x in sequences.routes if x is not None]
    odd[3][1, 0] = torch.tensor([5, 4, 3])  # one of its 3 tokens, of 24 further records
    other = replace(sequences, routes=odd)
    record = sampled_routes(other, small_mixture().config)
    assert record is not None
    differs = not torch.equal(odd[3][1, 0].sort().values, odd[0][1, 0].sort().values)
    assert record.metrics() == {"router/prompt_disagreement": differs / 72}
    assert differs
    whole, _, _ = taught(sequences, correction=R3)
    for micro in (1, 9, 4096):
        again, _, _ = taught(other, correction=R3, micro=micro)
        assert_same(again.gradients[0], whole.gradients[0])


@pytest.mark.parametrize(
    ("routes", "error", "words"),
    [
        (torch.zeros(3, 3, 3, dtype=torch.int16), EngineError, "tokens without the last, layers"),
        (torch.full((4, 3, 3), 6, dtype=torch.int16), ModelError, "this model has 6 a layer"),
    ],
)
def test_records_of_other_tokens_or_models_are_refused(
    routes: Tensor, error: type[Exception], words: str
) -> None:
    sequences = replace(rows(routes=True), routes=[routes] * len(ANSWERS))
    with pytest.raises(error, match=words):
        taught(sequences, correction=R3)


# --- probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [1, 9, 4096])
def test_router_shift_reads_both_passes_as_they_are(micro: int) -> None:
    """RSPO: Δ over sparse layers and old experts; its weight multiplies the ratio, detached."""
    learner, _, _ = taught(rows(), updates=2, micro=micro, ratio="router_shift(floor=0.1)")
    old, moved = (at(weights) for weights in learner.weights_before)
    loss, drifts = torch.zeros((), dtype=torch.float64), []
    for row in range(12, 25):
        ids = [*PROMPT, *ANSWERS[row]][:-1]
        _, before, visited = routers_by_hand(old, ids, None)
        _, after, _ = routers_by_hand(moved, ids, None)
        gaps = [
            (new.log() - was.log()).abs().gather(1, visited[:, layer])
            for was, new, layer in zip(before, after, old.config.sparse_layers, strict=True)
        ]
        drift = torch.stack(gaps).mean((0, 2))[len(PROMPT) - 1 :].detach()
        drifts.append(drift)
        now = answer_logp(moved, PROMPT, ANSWERS[row], None)
        then = answer_logp(old, PROMPT, ANSWERS[row], None).detach()
        weight = (-drift).exp().clamp(min=0.1)
        loss = loss - REWARD_N[row] * ((now - then).exp() * weight).sum() / 13
    assert float(torch.cat(drifts).min()) > 1e-3  # or there would be nothing to see
    names, leaves = zip(*moved.named_parameters(), strict=True)
    wanted = dict(zip(names, torch.autograd.grad(loss, leaves), strict=True))
    assert_same(learner.gradients[1], wanted)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_the_balance_loss_is_that_of_transformers(name: str) -> None:
    """At the first update, over the tokens that predict; in any micro-batches."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    model = small_mixture(name)
    experts = model.config.experts
    assert experts is not None
    logits: list[list[Tensor]] = [[] for _ in model.config.sparse_layers]
    for answer in ANSWERS:
        _, found, _ = routers_by_hand(model, [*PROMPT, *answer][:-1], None)
        for kept, probability_TE in zip(logits, found, strict=True):
            kept.append(probability_TE[len(PROMPT) - 1 :].log())  # logits, up to a constant
    every = tuple(torch.cat(each) for each in logits)
    loss = mixtral.load_balancing_loss_func(every, experts.count, experts.chosen)
    names, leaves = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(0.3 * loss, leaves, allow_unused=True)
    wanted = {
        n: torch.zeros_like(p) if x is None else x
        for n, p, x in zip(names, leaves, found, strict=True)
    }
    for micro in (1, 9, 4096):
        learner, learned, _ = taught(
            rows(), 0 * REWARD_N, model=small_mixture(name), micro=micro,
            auxiliary="balance(0.3)",
        )  # fmt: skip
        assert learned.metrics()["loss/balance"] == pytest.approx(
            0.3 * float(loss.detach()), rel=1e-6
        )
        assert_same(learner.gradients[0], wanted)


# --- counts -----------------------------------------------------------------------------------


def test_sets_are_compared_and_not_their_order() -> None:
    now = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [-1, -1]], [[0, 1], [2, 2]]])
    before = torch.tensor([[[1, 0], [2, 4]], [[0, 2], [0, 1]], [[-1, -1], [2, 2]]])
    other_TL, known_TL = other_experts(now, before)
    assert other_TL.tolist() == [[False, True], [True, False], [False, False]]
    assert known_TL.tolist() == [[True, True], [True, False], [False, True]]


def test_loads_by_hand() -> None:
    """Of six visits in layer 0 four are expert 0's; layer 1 is even; -1 is nobody's."""
    chosen = torch.tensor([[[0, 1], [0, 1]], [[0, 2], [2, 3]], [[0, 0], [-1, -1]]])
    visits_LE = visits(chosen, 4)
    assert visits_LE.tolist() == [[4, 1, 1, 0], [1, 1, 1, 1]]
    found = load_metrics(visits_LE.double())
    assert found["router/load_max"] == pytest.approx(4 * 4 / 6)
    assert found["router/dead_share"] == 1 / 8
    uneven = -(4 / 6 * torch.tensor(4 / 6).log2() + 2 / 6 * torch.tensor(1 / 6).log2()) / 2
    assert found["router/load_entropy"] == pytest.approx((float(uneven) + 1) / 2)
    assert found["router/load/0/0"] == pytest.approx(16 / 6) and found["router/load/1/3"] == 1.0
    many = load_metrics(torch.ones(8, 128, dtype=torch.float64))
    assert set(many) == {"router/load_max", "router/dead_share", "router/load_entropy"}


def test_what_is_measured_does_not_depend_on_micro_batches() -> None:
    by_size = []
    for micro in (1, 4096):
        _, learned, _ = taught(rows(routes=True), micro=micro)
        by_size.append(route_metrics(learned.routes))
        trace = learned.trace.rerouted_NT
        assert trace is not None
        shares = [by_size[-1][f"router/changed_share/{layer}"] for layer in range(2)]
        assert float(trace.mean()) == pytest.approx(sum(shares) / 2)
    assert by_size[0] == by_size[1] and 0 < by_size[0]["router/changed_share"] < 1


def test_an_empty_record_asks_for_nothing() -> None:
    record = RouteRecord.empty(rows(), small_mixture().config)
    assert (record.expert_XLK == -1).all() and record.metrics() == {}
