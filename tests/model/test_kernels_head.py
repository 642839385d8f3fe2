"""The head's kernels: log-probabilities, draws and gradients against independent formulas.

Without a GPU they run in Triton's interpreter, which multiplies bfloat16 wrongly: not tested there.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton")

from groupwise.engine.native import drawing
from groupwise.engine.native.drawing import draw_plain
from groupwise.engine.randomness import key
from groupwise.model.kernels import head as kernels
from groupwise.model.kernels.head import HeadScore, grad_logits, sample, score

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("kernels")
DEVICE = "cuda" if CUDA else "cpu"
HALF = torch.bfloat16 if CUDA else torch.float16
DTYPES = [torch.float32, HALF]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def integers(high: int, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, (count,), generator=generator).to(DEVICE)


def keys(rows: int) -> Tensor:
    return torch.tensor([key(7, "train", 3, 0, row) for row in range(rows)]).to(DEVICE)


def exact(logits_BV: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Hidden states and a head whose logits are these to the bit: row i has logits i modulo B."""
    kinds, vocabulary = logits_BV.shape
    head_VD = torch.zeros((vocabulary, 16), dtype=HALF, device=DEVICE)
    head_VD[:, :kinds] = logits_BV.t().to(HALF)
    hidden_TD = torch.eye(16, dtype=HALF, device=DEVICE)[torch.arange(rows) % kinds]
    return hidden_TD, head_VD


def reference(
    hidden_TD: Tensor, head_VD: Tensor, target_T: Tensor, inverse_temperature: float
) -> tuple[Tensor, Tensor]:
    logp_TV = (hidden_TD.double() @ head_VD.double().t() * inverse_temperature).log_softmax(-1)
    logp_T = logp_TV.gather(1, target_T[:, None])[:, 0]
    return logp_T, -(logp_TV.exp() * logp_TV).sum(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "vocabulary", "width", "inverse"),
    [(1, 256, 16, 1.0), (37, 513, 48, 1 / 0.7), (130, 1000, 80, 0.5)],
)
def test_scores_are_those_of_a_float64_softmax(
    tokens: int, vocabulary: int, width: int, inverse: float, dtype: torch.dtype
) -> None:
    hidden_TD = normal(tokens, width, dtype=dtype) / 3
    head_VD = normal(vocabulary, width, seed=1, dtype=dtype)
    target_T = integers(vocabulary, tokens)
    target_T[0] = vocabulary - 1
    expected_T, entropy_T = reference(hidden_TD, head_VD, target_T, inverse)
    logp_T, measured_T, peak_T, total_T = score(hidden_TD, head_VD, target_T, inverse, True)
    assert measured_T is not None
    assert (logp_T - expected_T).abs().max() < 2e-5
    assert (measured_T - entropy_T).abs().max() < 2e-5
    z_TV = hidden_TD.double() @ head_VD.double().t() * inverse
    assert (peak_T - z_TV.amax(-1)).abs().max() < 1e-5
    assert (peak_T + total_T.log() - z_TV.logsumexp(-1)).abs().max() < 2e-5
    plain = score(hidden_TD, head_VD, target_T, inverse)
    assert plain[1] is None and torch.equal(plain[0], logp_T)


def test_tails_and_certain_rows_keep_their_digits() -> None:
    logits_BV = (normal(4, 600) * 40).to(HALF).float()
    logits_BV[1], logits_BV[2] = -200, 100
    logits_BV[1, 571] = 0
    hidden_TD, head_VD = exact(logits_BV, 600)
    target_T = torch.arange(600, device=DEVICE)
    expected_T, entropy_T = reference(hidden_TD, head_VD, target_T, 1.0)
    logp_T, measured_T, _, _ = score(hidden_TD, head_VD, target_T, 1.0, True)
    assert measured_T is not None and measured_T.isfinite().all()
    assert torch.allclose(logp_T.double(), expected_T, rtol=3e-7, atol=1e-6)
    assert torch.allclose(measured_T.double(), entropy_T, rtol=1e-5, atol=1e-6)
    certain_T = torch.full((4,), 571, device=DEVICE)
    logp_T, measured_T, _, _ = score(hidden_TD[:4], head_VD, certain_T, 1.0, True)
    assert measured_T is not None and logp_T[1] == 0 and measured_T[1] == 0


def test_a_target_outside_of_the_vocabulary_is_not_a_number() -> None:
    hidden_TD, head_VD = normal(5, 16), normal(300, 16, seed=1)
    target_T = torch.tensor([299, 300, -1, 511, 10**6], device=DEVICE)
    assert score(hidden_TD, head_VD, target_T)[0].isnan().tolist() == [False] + [True] * 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("rows", [9, 150])
def test_a_sampled_log_probability_is_bitwise_the_scored_one(
    rows: int, greedy: bool, dtype: torch.dtype
) -> None:
    hidden_BD = normal(rows, 96, dtype=dtype) / 3
    head_VD = normal(700, 96, seed=1, dtype=dtype)
    position_B = torch.arange(rows, device=DEVICE)
    token_B, logp_B = sample(hidden_BD, head_VD, keys(rows), position_B, 1.25, greedy)
    # Scored among others, at another place, with and without entropy.
    more_TD = torch.cat((normal(40, 96, seed=5, dtype=dtype), hidden_BD))
    target_T = torch.cat((integers(700, 40), token_B))
    for entropy in (False, True):
        scored_T = score(more_TD, head_VD, target_T, 1.25, entropy)[0]
        assert torch.equal(scored_T[40:], logp_B)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_their_company(dtype: torch.dtype) -> None:
    hidden_BD = normal(140, 64, dtype=dtype)
    head_VD = normal(530, 64, seed=1, dtype=dtype)
    key_B4, position_B = keys(140), torch.arange(140, device=DEVICE)
    token_B, logp_B = sample(hidden_BD, head_VD, key_B4, position_B)
    scores = score(hidden_BD, head_VD, token_B, 1.0, True)
    for part in (slice(3, 8), slice(63, 130), slice(139, 140)):
        own = hidden_BD[part].contiguous()
        some = sample(own, head_VD, key_B4[part].contiguous(), position_B[part])
        assert torch.equal(some[0], token_B[part]) and torch.equal(some[1], logp_B[part])
        again = score(own, head_VD, token_B[part], 1.0, True)
        for mine, whole in zip(again, scores, strict=True):
            assert mine is not None and whole is not None and torch.equal(mine, whole[part])


def test_the_kernel_draws_what_its_twin_draws() -> None:
    assert (kernels.COLUMNS, kernels.LANES) == (drawing.BLOCK, drawing.LANES)
    rows, logits_BV = (
        3000 if CUDA else 1000,
        normal(12, 1100) * torch.linspace(0.1, 4, 12, device=DEVICE)[:, None],
    )
    hidden_BD, head_VD = exact(logits_BV, rows)
    position_B = torch.arange(rows, device=DEVICE) // 100
    key_B4 = keys(100).repeat(rows // 100, 1)
    token_B, logp_B = sample(hidden_BD, head_VD, key_B4, position_B, 0.5)
    logits_TV = hidden_BD.float() @ head_VD.float().t() * 0.5
    expected_B, expected_logp_B = draw_plain(logits_TV, key_B4, position_B)
    same_B = token_B == expected_B
    assert same_B.float().mean() >= 0.999
    assert (logp_B - expected_logp_B)[same_B].abs().max() < 2e-6
    # Keys of 32 bits in int32, and positions in int32: the same words.
    small = key_B4[:100].to(torch.int32), position_B[:100].to(torch.int32)
    assert torch.equal(sample(hidden_BD[:100], head_VD, *small, 0.5)[0], token_B[:100])
    assert torch.equal(draw_plain(logits_TV[:100], *small)[0], expected_B[:100])


def surprise(token_B: Tensor, p_V: Tensor) -> float:
    """How many standard deviations Pearson's statistic lies above its mean; rare tokens pooled."""
    common_V = p_V * len(token_B) >= 5
    count_V = torch.bincount(token_B.cpu(), minlength=len(p_V)).double()
    p_V, common_V = p_V.cpu(), common_V.cpu()
    count = torch.cat((count_V[common_V], count_V[~common_V].sum()[None]))
    expected = torch.cat((p_V[common_V], p_V[~common_V].sum()[None])) * len(token_B)
    kept = expected > 0
    statistic = ((count - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = int(kept.sum()) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


def test_draws_have_the_distribution_of_the_softmax() -> None:
    rows, logits_BV = 12800, (normal(1, 400, seed=4) * 2).to(HALF).float()
    hidden_BD, head_VD = exact(logits_BV, rows)
    p_V = logits_BV[0].double().softmax(-1)
    key_B4, position_B = keys(128).repeat(100, 1), torch.arange(rows, device=DEVICE) // 128
    twin_B, _ = draw_plain(logits_BV.expand(rows, -1), key_B4, position_B)
    few_B = torch.arange(0, rows, 1 if CUDA else 9, device=DEVICE)  # the interpreter is slow
    kernel_B, _ = sample(hidden_BD[few_B], head_VD, key_B4[few_B], position_B[few_B])
    assert (kernel_B == twin_B[few_B]).float().mean() >= 0.999
    for token_B in (kernel_B, twin_B):
        assert abs(surprise(token_B, p_V)) < 4.5
    # It would notice a share that is lost: 2 % of the weight in other places.
    skewed_V = p_V * (1 + 0.1 * (torch.arange(400, device=DEVICE) % 2 * 2 - 1))
    assert surprise(twin_B, skewed_V / skewed_V.sum()) > 4.5


def test_tokens_of_weight_0_are_never_drawn() -> None:
    logits_BV = torch.full((1, 900), -300.0, device=DEVICE)
    alive = [0, 15, 255, 256, 530, 899]
    logits_BV[0, alive] = torch.tensor([0.0, -9.0, 1.0, -20.0, 0.5, -4.0], device=DEVICE)
    hidden_BD, head_VD = exact(logits_BV, 1500)
    position_B = torch.arange(1500, device=DEVICE)
    key_B4 = keys(1).expand(1500, 4).contiguous()
    token_B, _ = sample(hidden_BD, head_VD, key_B4, position_B)
    assert set(token_B.tolist()) <= set(alive) and {0, 255, 530} <= set(token_B.tolist())
    weight_BK = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).repeat(3, 1)
    uniform_B = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert drawing._pick(weight_BK, uniform_B).tolist() == [1, 3, 3]


@pytest.mark.parametrize("greedy", [False, True])
def test_tokens_that_are_barred_lose_their_share(greedy: bool) -> None:
    logits_BV = normal(1, 257) / 2  # the last tile holds nothing but an end token
    logits_BV[0, [5, 256]] = 6.0
    hidden_BD, head_VD = exact(logits_BV, 400)
    end_K = torch.tensor([256, 5], device=DEVICE)
    may_end_B = torch.arange(400, device=DEVICE) % 2 == 0
    position_B = torch.arange(400, device=DEVICE)
    arguments = (hidden_BD, head_VD, keys(400), position_B, 1.0, greedy)
    token_B, logp_B = sample(*arguments, end_K, may_end_B)
    ended_B = (token_B == 5) | (token_B == 256)
    assert not ended_B[~may_end_B].any() and ended_B[may_end_B].float().mean() > 0.6
    z_BV = (hidden_BD.float() @ head_VD.float().t()).double()
    z_BV[1::2, end_K] = -torch.inf
    expected_B = z_BV.log_softmax(-1).gather(1, token_B[:, None])[:, 0]
    assert (logp_B - expected_B).abs().max() < 2e-6
    if greedy:
        assert torch.equal(token_B, z_BV.argmax(-1))
    free_B, _ = sample(*arguments)
    assert torch.equal(free_B[::2], token_B[::2])
    twin_B, twin_logp_B = draw_plain(
        z_BV.clamp(min=-1e9).float(),
        keys(400),
        position_B,
        greedy=greedy,
        end_K=end_K,
        may_end_B=may_end_B,
    )
    assert torch.equal(twin_B, token_B) and (twin_logp_B - logp_B).abs().max() < 2e-6


def test_the_likeliest_of_equals_is_the_lowest_id() -> None:
    logits_BV = normal(3, 800).clamp(max=2)
    logits_BV[0, [300, 301, 799]], logits_BV[1, [3, 600]], logits_BV[2] = 5.0, 5.0, 1.0
    hidden_BD, head_VD = exact(logits_BV, 3)
    zeros_B = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    token_B, _ = sample(hidden_BD, head_VD, keys(3), zeros_B, greedy=True)
    assert token_B.tolist() == [300, 3, 0]
    assert draw_plain(logits_BV, keys(3), zeros_B, greedy=True)[0].tolist() == [300, 3, 0]


@pytest.mark.parametrize("vocabulary", [97, 300, 600, 768, 1100])
@pytest.mark.parametrize("greedy", [False, True])
def test_rows_that_are_not_finite_show_and_draw_a_token_that_exists(
    greedy: bool, vocabulary: int
) -> None:
    """Also where the last tile, or the last power of two of tiles, is not full."""
    hidden_BD, head_VD = normal(6, 16), normal(vocabulary, 16, seed=1)
    hidden_BD[2, 3], hidden_BD[4, 0] = torch.nan, torch.inf
    zeros_B = torch.zeros(6, dtype=torch.int64, device=DEVICE)
    token_B, logp_B = sample(hidden_BD, head_VD, keys(6), zeros_B, 1.0, greedy)
    assert ((token_B >= 0) & (token_B < vocabulary)).all()
    assert logp_B.isfinite().tolist() == [True, True, False, True, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use", ["logp", "entropy", "both"])
def test_gradients_are_those_of_autograd_in_float64(
    use: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "CHUNK_NUMBERS", 20 * 333)  # three chunks of rows
    hidden_TD = (normal(45, 32, dtype=dtype) / 2).requires_grad_()
    head_VD = normal(333, 32, seed=1, dtype=dtype).requires_grad_()
    target_T, weight_T2 = integers(333, 45), normal(45, 2, seed=2).double()
    weight_T2[:, 1] *= use != "logp"
    weight_T2[:, 0] *= use != "entropy"
    wide = [x.detach().double().requires_grad_() for x in (hidden_TD, head_VD)]
    expected = reference(wide[0], wide[1], target_T, 1.6)
    sum((weight_T2[:, i] * expected[i]).sum() for i in (0, 1)).backward()
    outputs = HeadScore.apply(hidden_TD, head_VD, target_T, 1.6, use != "logp")
    used = {"logp": [0], "entropy": [1], "both": [0, 1]}[use]
    sum((weight_T2[:, i].float() * outputs[i]).sum() for i in used).backward()
    limit = 1e-5 if dtype == torch.float32 else 1e-2 if dtype == torch.bfloat16 else 1e-3
    for mine, theirs in zip((hidden_TD, head_VD), wide, strict=True):
        error = (mine.grad.double() - theirs.grad).norm() / theirs.grad.norm()
        assert error < limit


def test_the_heads_gradient_stays_in_float32_if_the_parameter_asks_for_it() -> None:
    hidden_TD, head_VD = normal(20, 32, dtype=HALF), normal(70, 32, seed=1, dtype=HALF)
    target_T = integers(70, 20)
    grads = []
    for wanted in (HALF, torch.float32):
        weight = torch.nn.Parameter(head_VD.clone())
        weight.grad_dtype = wanted
        HeadScore.apply(hidden_TD, weight, target_T, 1.0, False)[0].sum().backward()
        assert weight.grad is not None and weight.grad.dtype == wanted
        grads.append(weight.grad)
    assert torch.equal(grads[1].to(HALF), grads[0])
    assert not torch.equal(grads[1], grads[0].float())


def test_gradients_of_barred_and_impossible_tokens_are_0() -> None:
    logits_CV = normal(3, 5000) * 3
    logits_CV[0, 100:], logits_CV[1, :4999] = -torch.inf, -1e4
    target_C = torch.tensor([7, 4999, 4998], device=DEVICE)
    logp_CV = logits_CV.double().log_softmax(-1)
    entropy_C = -(logp_CV.exp() * logp_CV.clamp(min=-1e30)).sum(-1)
    grad_logp_C, grad_entropy_C = normal(3, seed=1), normal(3, seed=2)
    peak_C = logits_CV.amax(-1)
    total_C = (logits_CV - peak_C[:, None]).exp().sum(-1)
    mine_CV = grad_logits(
        logits_CV,
        target_C,
        peak_C,
        total_C,
        entropy_C.float(),
        grad_logp_C,
        grad_entropy_C,
        1.0,
        torch.float32,
    )
    p_CV = logp_CV.exp()
    hit_CV = torch.nn.functional.one_hot(target_C, 5000)
    slope_CV = p_CV * (logp_CV.clamp(min=-1e30) + entropy_C[:, None])
    expected_CV = grad_logp_C[:, None] * (hit_CV - p_CV) - grad_entropy_C[:, None] * slope_CV
    assert (mine_CV - expected_CV).abs().max() < 1e-6
    assert (mine_CV[0, 100:] == 0).all() and (mine_CV[1, :4999] == 0).all()
