"""Divergences to a teacher against plain formulas, exact expectation, and chunk by chunk."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise.errors import RecipeError
from groupwise.groups.phase import batch_phase
from groupwise.losses.distillation import divergence, divergence_slope, with_rest
from groupwise.losses.phase import token_phase
from groupwise.model.layers.divergence import divergences
from groupwise.model.layers.head import NO_RULE, HeadRule, Opposite
from groupwise.recipes import recipe
from groupwise.records import TokenBatch

BETAS = [0.0, 0.25, 0.5, 0.9, 1.0]


def logps(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(2).log_softmax(-1)


def plainly(student: list[float], teacher: list[float], beta: float) -> float:
    """Term by term, with probabilities and logarithms of plain Python."""

    def kl(p: list[float], q: list[float]) -> float:
        return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))

    if beta == 0:
        return kl(teacher, student)
    if beta == 1:
        return kl(student, teacher)
    mixed = [(1 - beta) * s + beta * t for s, t in zip(student, teacher, strict=True)]
    return beta * kl(teacher, mixed) + (1 - beta) * kl(student, mixed)


@pytest.mark.parametrize("beta", BETAS)
def test_the_divergence_is_that_of_the_formula(beta: float) -> None:
    student, teacher = logps(0, 6, 7), logps(1, 6, 7)
    found = divergence(student, teacher, beta)
    for row in range(6):
        expected = plainly(student[row].exp().tolist(), teacher[row].exp().tolist(), beta)
        assert float(found[row]) == pytest.approx(expected, abs=1e-12)
    assert divergence(teacher, teacher, beta).abs().max() < 1e-12


def test_by_hand() -> None:
    half, tilted = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.75, 0.25]).log()
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    reverse = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2)
    assert float(divergence(half, tilted, 0.0)) == pytest.approx(forward)
    assert float(divergence(half, tilted, 1.0)) == pytest.approx(reverse)


@pytest.mark.parametrize("beta", BETAS)
def test_the_slope_is_the_gradient(beta: float) -> None:
    z, teacher = logps(0, 6, 7).mul(1.3).requires_grad_(), logps(1, 6, 7)
    divergence(z.log_softmax(-1), teacher, beta).sum().backward()
    assert z.grad is not None
    slope = divergence_slope(z.detach().log_softmax(-1), teacher, beta)
    torch.testing.assert_close(slope, z.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("beta", [0.01, 0.049, 0.96, 0.999])
def test_close_to_an_end_it_is_refused(beta: float) -> None:
    with pytest.raises(RecipeError, match="next to nothing"):
        recipe("gkd").set("penalty.beta", beta)


# --- top-k --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", BETAS)
def test_all_tokens_as_top_k_are_the_whole_distribution(beta: float, dtype: torch.dtype) -> None:
    z, teacher = logps(0, 9, 7).to(dtype).requires_grad_(), logps(1, 9, 7).to(dtype)
    found = divergence(with_rest(z.log_softmax(-1)), with_rest(teacher), beta)
    expected = divergence(z.log_softmax(-1), teacher, beta)
    tiny = 1e-5 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(found, expected, rtol=tiny, atol=tiny)
    (got,) = torch.autograd.grad(found.sum(), z, retain_graph=True)
    (want,) = torch.autograd.grad(expected.sum(), z)
    torch.testing.assert_close(got, want, rtol=10 * tiny, atol=10 * tiny)


def test_the_rest_is_all_other_tokens_as_one() -> None:
    whole = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64).log()
    torch.testing.assert_close(with_rest(whole[:2]).exp(), torch.tensor([0.5, 0.2, 0.3]).double())
    # Mass outside costs something: two policies that agree on the two tokens' ratio only.
    other = torch.tensor([0.05, 0.02, 0.9, 0.03], dtype=torch.float64).log()
    expected = plainly([0.05, 0.02, 0.93], [0.5, 0.2, 0.3], 0.0)
    found = divergence(with_rest(other[:2]), with_rest(whole[:2]), 0.0)
    assert float(found) == pytest.approx(expected) and expected > 1.0


# --- a sampled token, in expectation --------------------------------------------------------------


@pytest.mark.parametrize("mismatch", [0.0, 0.7])
def test_sampled_tokens_follow_the_reverse_kl_at_their_prefixes(mismatch: float) -> None:
    """Every token of a vocabulary of five as a row, weighed by how often the sampler draws it."""
    z = logps(0, 5).requires_grad_()
    sampler = (z.detach() + mismatch * logps(5, 5)).log_softmax(-1)
    teacher, every = logps(1, 5), torch.arange(5)
    made = recipe("distill")
    total = torch.zeros(5, dtype=torch.float64)
    for token in every.tolist():
        batch = TokenBatch.build(
            mask_NT=torch.ones(1, 1, dtype=torch.bool),
            group_N=[0],
            reward_N=[0.0],
            sampler_logp_NT=sampler[token].view(1, 1),
            teacher_logp_NT=teacher[token].view(1, 1),
        )
        ready = batch_phase(made, batch).batch
        expected = float(teacher[token] - sampler[token])
        assert float(ready.stream("advantage_NT")) == pytest.approx(expected)
        loss = token_phase(made, ready, logp_NT=z.log_softmax(-1)[token].view(1, 1)).loss
        total += sampler[token].exp() * torch.autograd.grad(loss, z, retain_graph=True)[0]
    if mismatch:  # importance weights make it an expectation under the policy, of the sampler's gap
        p = z.log_softmax(-1)
        (want,) = torch.autograd.grad((p.exp() * (sampler - teacher)).sum(), z)
    else:
        (want,) = torch.autograd.grad(divergence(z.log_softmax(-1), teacher, 1.0), z)
    torch.testing.assert_close(total, want, rtol=1e-10, atol=1e-12)


def test_it_adds_to_a_rewards_advantage_and_can_go_beyond_the_teacher() -> None:
    batch = TokenBatch.build(
        mask_NT=torch.tensor([[True, True], [True, False]]),
        group_N=[0, 0],
        reward_N=[1.0, 0.0],
        sampler_logp_NT=torch.tensor([[-1.0, -2.0], [-3.0, -9.0]], dtype=torch.float64),
        teacher_logp_NT=torch.tensor([[-0.5, -4.0], [-3.5, -9.0]], dtype=torch.float64),
    )
    made = recipe("distill").replace(advantage="group_mean(), minus_teacher_kl(coef=0.5, scale=2)")
    found = batch_phase(made, batch).batch.stream("advantage_NT")
    expected = [[0.5 - 0.5 * (-1 + 1), 0.5 - 0.5 * (-2 + 8)], [-0.5 - 0.5 * (-3 + 7), 0.0]]
    torch.testing.assert_close(found, torch.tensor(expected).double())


# --- chunk by chunk -------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else [found]:
            if isinstance(x, Tensor):
                self.numbers = max(self.numbers, x.numel())
        return found


def heads(tokens: int, vocabulary: int, width: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((tokens, width), (vocabulary, width), (tokens, width + 2), (vocabulary, width + 2))
    hidden, weight, theirs, head = (torch.randn(*s, generator=g).double() for s in shapes)
    return hidden.requires_grad_(), weight.requires_grad_(), theirs, head


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_in_chunks_it_is_the_same_with_all_gradients(beta: float, chunk: int, capped: bool) -> None:
    hidden, weight, theirs, head = heads(8, 11)
    bias = torch.linspace(-1, 1, 11).double().requires_grad_() if capped else None
    rule = HeadRule(1.5, 4.0, bias) if capped else NO_RULE
    at = torch.tensor([1, 2, 3, 5, 6])
    other = Opposite(at, theirs[at], head, NO_RULE, beta)
    found = divergences(hidden, weight, [other], 0.7, rule, chunk)
    z = hidden @ weight.t()
    if bias is not None:
        z = 4.0 * torch.tanh(1.5 * (z + bias) / 4.0)
    teacher = (theirs @ head.t() / 0.7).log_softmax(-1)
    expected = divergence((z / 0.7).log_softmax(-1), teacher, beta)
    torch.testing.assert_close(found[at], expected[at])
    assert not found[[0, 4, 7]].any()
    weights = torch.linspace(-1, 2, 5).double()
    leaves = [hidden, weight, *([bias] if bias is not None else [])]
    got = torch.autograd.grad((found[at] * weights).sum(), leaves)
    want = torch.autograd.grad((expected[at] * weights).sum(), leaves)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_tokens_by_vocabulary_are_never_made() -> None:
    hidden, weight, theirs, head = heads(64, 500)
    other = Opposite(torch.arange(64), theirs, head, NO_RULE, 0.5)
    with Largest() as seen:
        divergences(hidden, weight, [other], 1.0, NO_RULE, chunk=4).sum().backward()
    assert seen.numbers == max(500 * 8, 4 * 500)  # a head, or a chunk; all would be 32,000
    with Largest() as seen:
        divergence((hidden @ weight.t()).log_softmax(-1), (theirs @ head.t()).log_softmax(-1), 0.5)
    assert seen.numbers == 32_000  # what the measure would have found


def test_a_padded_head_is_compared_on_the_tokens_that_both_know() -> None:
    hidden, weight, theirs, head = heads(4, 9)
    longer = torch.cat([head, torch.full((3, 8), 5.0).double()])
    every = torch.arange(4)
    for ours, other in ((weight, longer), (torch.cat([weight, weight[:2]]), head)):
        opposite = Opposite(every, theirs, other, NO_RULE, 1.0)
        found = divergences(hidden, ours, [opposite], 1.0, NO_RULE)
        p, q = (hidden @ weight.t()).log_softmax(-1), (theirs @ head.t()).log_softmax(-1)
        torch.testing.assert_close(found, divergence(p, q, 1.0))
