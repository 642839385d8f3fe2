"""The head in chunks against the plain formula: values, gradients, any chunk size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.errors import ModelError
from groupwise.model.layers.head import HeadOutputs, HeadRule, log_probs, logits


def inputs(
    tokens: int = 23, width: int = 16, vocabulary: int = 101, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    # Logits of a few units: one of 25 is only known to 2e-6, and processors sum in other orders.
    hidden = (torch.randn(tokens, width, generator=generator) / 4).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype).requires_grad_()
    token = torch.randint(vocabulary, (tokens,), generator=generator)
    at = torch.randint(vocabulary, (tokens, 4), generator=generator)
    return hidden, weight, token, at


def plain(hidden: Tensor, weight: Tensor, token: Tensor, at: Tensor, temperature: float) -> Any:
    """tokens x vocabulary, as in a textbook."""
    logp = (hidden @ weight.T / temperature).log_softmax(-1)
    top = logp.detach().topk(5, -1).indices
    return HeadOutputs(
        logp_T=logp.gather(1, token[:, None])[:, 0],
        entropy_T=-(logp.exp() * logp).sum(-1),
        topk_logp_TK=logp.gather(1, top),
        topk_id_TK=top,
        logp_at_TK=logp.gather(1, at),
    )


def mixed_loss(out: HeadOutputs) -> Tensor:
    """Every output with weights of its own, so that no gradient can hide."""
    total = torch.zeros((), dtype=out.logp_T.dtype)
    for scale, x in enumerate((out.logp_T, out.entropy_T, out.topk_logp_TK, out.logp_at_TK), 1):
        assert x is not None
        ramp = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)
        total = total + scale * (ramp * x).sum()
    return total


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [1, 4, 23, 64, None])
def test_values_and_gradients_equal_the_plain_formula(
    temperature: float, chunk: int | None
) -> None:
    hidden, weight, token, at = inputs(dtype=torch.float64)
    expected = plain(hidden, weight, token, at, temperature)
    wanted = torch.autograd.grad(mixed_loss(expected), (hidden, weight))
    h32, w32 = (x.detach().float().requires_grad_() for x in (hidden, weight))
    found = log_probs(
        h32, w32, token, temperature=temperature, entropy=True, top_k=5, at_TK=at, chunk=chunk
    )
    assert found.topk_id_TK is not None and torch.equal(found.topk_id_TK, expected.topk_id_TK)
    for name in ("logp_T", "entropy_T", "topk_logp_TK", "logp_at_TK"):
        value = getattr(found, name)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), getattr(expected, name), rtol=1e-6, atol=1e-6)
    got = torch.autograd.grad(mixed_loss(found), (h32, w32))
    for a, b in zip(got, wanted, strict=True):
        assert (a.double() - b).abs().max() <= 1e-6 * b.abs().max()


def test_gradient_by_finite_differences() -> None:
    hidden, weight, token, at = inputs(tokens=5, width=4, vocabulary=9, dtype=torch.float64)

    def function(h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        out = log_probs(h, w, token, temperature=0.8, entropy=True, top_k=3, at_TK=at, chunk=2)
        assert out.entropy_T is not None and out.topk_logp_TK is not None
        assert out.logp_at_TK is not None
        return out.logp_T, out.entropy_T, out.topk_logp_TK, out.logp_at_TK

    assert torch.autograd.gradcheck(function, (hidden, weight))


def test_two_words_by_hand() -> None:
    # Logits 0 and ln 3 at temperature 1: probabilities 1/4 and 3/4.
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [1.0986122886681098]])
    out = log_probs(hidden, weight, torch.tensor([1]), entropy=True, top_k=2)
    assert out.entropy_T is not None and out.topk_id_TK is not None
    assert out.logp_T.item() == pytest.approx(-0.28768207, abs=1e-7)
    assert out.entropy_T.item() == pytest.approx(0.56233514, abs=1e-7)
    assert out.topk_id_TK.tolist() == [[1, 0]]
    # Temperature 1/2 doubles the logits: 1/10 and 9/10.
    cold = log_probs(hidden, weight, torch.tensor([1]), temperature=0.5)
    assert cold.logp_T.item() == pytest.approx(-0.10536052, abs=1e-7)


def test_only_what_is_asked_for_is_returned() -> None:
    hidden, weight, token, _ = inputs()
    out = log_probs(hidden, weight, token)
    assert out.entropy_T is None and out.topk_id_TK is None and out.logp_at_TK is None


def test_huge_logits_stay_finite() -> None:
    hidden, weight, token, _ = inputs()
    out = log_probs(hidden * 1e4, weight, token, entropy=True)
    assert out.entropy_T is not None
    (grad,) = torch.autograd.grad(out.logp_T.sum() + out.entropy_T.sum(), hidden)
    assert out.logp_T.isfinite().all() and out.entropy_T.isfinite().all() and grad.isfinite().all()


def test_bfloat16_weights_are_read_exactly_and_summed_in_float32() -> None:
    hidden, weight, token, _ = inputs(width=256, dtype=torch.bfloat16)
    found = log_probs(hidden, weight, token, chunk=5)
    exact = (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, token[:, None])[:, 0]
    assert found.logp_T.dtype == torch.float32
    torch.testing.assert_close(found.logp_T.double(), exact, rtol=1e-6, atol=3e-5)
    grads = torch.autograd.grad(found.logp_T.sum(), (hidden, weight))
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.bfloat16]


def test_a_frozen_head_gets_no_gradient_and_tied_weights_get_both() -> None:
    hidden, weight, token, _ = inputs(dtype=torch.float64)
    frozen = log_probs(hidden, weight.detach(), token).logp_T.sum()
    frozen.backward()
    assert hidden.grad is not None and weight.grad is None
    tied = torch.nn.functional.embedding(token, weight)
    logp = log_probs(tied, weight, token, chunk=6).logp_T.sum()
    (found,) = torch.autograd.grad(logp, weight)
    tied = torch.nn.functional.embedding(token, weight)
    expected = (tied @ weight.T).log_softmax(-1).gather(1, token[:, None]).sum()
    (wanted,) = torch.autograd.grad(expected, weight)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_sampler_and_learner_read_the_same_logits() -> None:
    hidden, weight, token, _ = inputs()
    with torch.no_grad():
        sampler = logits(hidden, weight, 0.7).log_softmax(-1).gather(1, token[:, None])[:, 0]
        learner = log_probs(hidden, weight, token, temperature=0.7).logp_T
    torch.testing.assert_close(sampler, learner, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"top_k": 102}, "vocabulary has 101"),
        ({"token_T": torch.zeros(3, dtype=torch.long)}, "one token for each row"),
        ({"weight_VD": torch.zeros(101, 5)}, "last axes must be equal"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], message: str) -> None:
    hidden, weight, token, _ = inputs()
    given = {"hidden_TD": hidden, "weight_VD": weight, "token_T": token} | change
    with pytest.raises(ModelError, match=message):
        log_probs(**given)


def test_an_entropy_that_is_only_measured_changes_no_gradient() -> None:
    """Nor costs any: the backward pass is the one without it, to the last bit."""
    hidden, weight, token, _ = inputs()
    gradients = []
    for entropy in (False, True):
        out = log_probs(hidden, weight, token, temperature=0.7, entropy=entropy, chunk=5)
        ramp = torch.linspace(-1, 1, len(token))
        gradients.append(torch.autograd.grad((ramp * out.logp_T).sum(), (hidden, weight)))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_an_entropy_alone_has_its_gradient() -> None:
    hidden, weight, token, at = inputs(dtype=torch.float64)
    expected = plain(hidden, weight, token, at, 0.7).entropy_T
    found = log_probs(hidden, weight, token, temperature=0.7, entropy=True, chunk=5).entropy_T
    assert found is not None
    ramp = torch.linspace(-1, 1, len(token), dtype=torch.float64)
    wanted = torch.autograd.grad((ramp * expected).sum(), (hidden, weight))
    got = torch.autograd.grad((ramp * found).sum(), (hidden, weight))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", ["scale", "cap", "bias", "all"])
def test_what_architectures_do_to_logits(rule: str) -> None:
    """cap·tanh(scale·(h·Wᵀ + b)/cap)/τ, by autograd in float64: values and every gradient."""
    generator = torch.Generator().manual_seed(3)
    hidden_TD, weight_VD = (
        torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in (7, 11)
    )
    bias_V = torch.randn(11, generator=generator, dtype=torch.float64)
    token_T = torch.arange(7)
    scale = 0.7 if rule in ("scale", "all") else 1.0
    cap = 1.5 if rule in ("cap", "all") else None
    with_bias = rule in ("bias", "all")

    def leaves() -> list[Tensor]:
        return [x.clone().requires_grad_() for x in (hidden_TD, weight_VD, bias_V)]

    h, w, b = leaves()
    z = scale * (h @ w.T + (b if with_bias else 0))
    z = (z if cap is None else cap * torch.tanh(z / cap)) / 0.8
    logp = z.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    top = logp.topk(3).values
    expected = [logp.gather(1, token_T[:, None])[:, 0], entropy, top]
    sum((i + 1) * (x**2).sum() for i, x in enumerate(expected)).backward()  # type: ignore[union-attr]
    wanted = [x.grad for x in (h, w, b)]

    h, w, b = leaves()
    asked = HeadRule(scale, cap, b if with_bias else None)
    found = log_probs(h, w, token_T, temperature=0.8, entropy=True, top_k=3, chunk=2, rule=asked)
    got = [found.logp_T, found.entropy_T, found.topk_logp_TK]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
    sum((i + 1) * (x**2).sum() for i, x in enumerate(got)).backward()  # type: ignore[operator, union-attr]
    for one, other in zip((h, w, b), wanted, strict=True):
        torch.testing.assert_close(one.grad, other)
    torch.testing.assert_close(logits(hidden_TD, weight_VD, 0.8, rule=asked), z.detach())
