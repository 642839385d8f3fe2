"""The update: schedules and AdamW by closed form, float32 masters, clipping, skipping, memory."""

from __future__ import annotations

import math

import pytest
import torch
from model_zoo import all_logits, make, sequences
from torch import Tensor, nn

from groupwise.errors import ConfigError, ModelError, RunError
from groupwise.model.layers.transformer import Transformer
from groupwise.model.memory import is_out_of_memory, peak_bytes
from groupwise.optim.adamw import AdamW
from groupwise.optim.schedules import learning_rate
from groupwise.optim.step import apply, first_bad, gradient_norm

SETTINGS = {
    "learning_rate": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.0,
}


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def rate(step: int, schedule: str, warmup: int = 0, total: int = 10) -> float:
    return learning_rate(step, base=2.0, schedule=schedule, warmup_steps=warmup, total_steps=total)


def fill_gradients(model: Transformer, seed: int) -> None:
    """Of a loss whose rows depend on the seed, summed over two backward passes."""
    for row in sequences([7, 5], vocabulary=model.config.vocab_size, seed=seed):
        logits_TV = all_logits(model, [row])
        logits_TV.log_softmax(-1)[:, 3].sum().backward()  # type: ignore[no-untyped-call]


def bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in tensors.items()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Schedules


def test_warm_up_starts_above_0_and_ends_at_the_base() -> None:
    assert [rate(s, "constant", warmup=4) for s in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rate(0, "cosine", warmup=1) == 2.0 == rate(0, "linear")


def test_decays_by_hand() -> None:
    assert [rate(s, "linear", warmup=2, total=6) for s in range(7)] == [1, 2, 2, 1.5, 1, 0.5, 0]
    assert [rate(s, "cosine", total=4) for s in range(5)] == pytest.approx(
        [2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0], abs=1e-15
    )
    # The last step that is taken still learns; 0 comes just behind it, and stays.
    for schedule in ("linear", "cosine"):
        assert rate(9, schedule) > 0 == rate(10, schedule) == rate(11, schedule)


def test_warm_up_longer_than_the_run_only_warms_up() -> None:
    assert [rate(s, "cosine", warmup=8, total=4) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_a_floor_holds_a_share_of_the_rate() -> None:
    def floored(step: int, schedule: str) -> float:
        return learning_rate(
            step, base=2.0, schedule=schedule, warmup_steps=0, total_steps=4, min_share=0.1
        )

    assert [floored(s, "linear") for s in range(5)] == pytest.approx([2.0, 1.55, 1.1, 0.65, 0.2])
    assert floored(4, "cosine") == pytest.approx(0.2) == floored(9, "cosine")
    assert floored(2, "cosine") == pytest.approx(1.1) and floored(3, "constant") == 2.0


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="'cosine'"):
        rate(0, "cosin")


# AdamW


def test_adamw_by_hand() -> None:
    """Two steps of the paper's equations, in plain numbers."""
    p, start, gradients = parameter(1.0, -2.0), (1.0, -2.0), ((0.5, -3.0), (0.25, 1.0))
    optimizer = AdamW([("p", p)], **SETTINGS)
    m, v, x = [0.0, 0.0], [0.0, 0.0], list(start)
    for t, gradient in enumerate(gradients, 1):
        p.grad = torch.tensor(gradient)
        optimizer.step(0.1)
        for i, g in enumerate(gradient):
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.99 * v[i] + 0.01 * g * g
            x[i] -= 0.1 * (m[i] / (1 - 0.9**t)) / (math.sqrt(v[i] / (1 - 0.99**t)) + 1e-8)
        assert p.tolist() == pytest.approx(x, rel=1e-6)
    assert optimizer.steps == 2


def test_weight_decay_is_decoupled_and_for_matrices_alone() -> None:
    matrix, vector = nn.Parameter(torch.full((2, 2), 3.0)), parameter(3.0, 3.0)
    optimizer = AdamW([("m", matrix), ("v", vector)], **(SETTINGS | {"weight_decay": 0.5}))
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step(0.1)
    # Without a gradient nothing but the decay acts: 3 · (1 − 0.1 · 0.5).
    assert torch.allclose(matrix, torch.full((2, 2), 2.85)) and vector.tolist() == [3.0, 3.0]


def test_the_rate_of_a_step_is_the_one_it_is_given() -> None:
    p = parameter(0.0)
    optimizer = AdamW([("p", p)], **SETTINGS)
    for given, moved in ((0.1, 0.1), (0.0, 0.1), (None, 0.2)):
        p.grad = torch.ones(1)
        optimizer.step(given)
        assert -p.item() == pytest.approx(moved, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_below_the_spacing_of_half_precision_accumulate(dtype: torch.dtype) -> None:
    p = parameter(1.0, dtype=dtype)
    optimizer = AdamW([("p", p)], **SETTINGS)
    for _ in range(100):
        p.grad = torch.ones(1)
        optimizer.step(1e-4)  # below half the spacing under 1: 2⁻⁹, in float16 2⁻¹²
    # 1 − 100 · 1e-4 = 0.99, rounded; without a master the weight would have stayed at 1.
    assert p.item() == torch.tensor(0.99, dtype=dtype).item() != 1.0
    assert optimizer.state()["master/p"].item() == pytest.approx(0.99, rel=1e-5)
    assert optimizer.state()["master/p"].dtype == torch.float32


def test_no_master_for_float32() -> None:
    optimizer = AdamW([("p", parameter(1.0))], **SETTINGS)
    assert set(optimizer.state()) == {"step", "exp_avg/p", "exp_avg_sq/p"}


def test_half_precision_gradients_are_summed_in_float32() -> None:
    """Micro-batches that are small against the sum so far must not round away."""
    p = parameter(1.0, dtype=torch.bfloat16)
    AdamW([("p", p)], **SETTINGS)
    p.sum().backward()  # type: ignore[no-untyped-call]
    for _ in range(256):
        (p * 2**-9).sum().backward()
    assert p.grad is not None and p.grad.dtype == torch.float32
    assert p.grad.item() == 1.5  # in bfloat16, 1 + 2⁻⁹ is 1 again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bug_46_n_and_n_steps_are_2n_to_the_bit(dtype: torch.dtype) -> None:
    settings = SETTINGS | {"weight_decay": 0.01}

    def steps(model: Transformer, optimizer: AdamW, start: int, end: int) -> None:
        for number in range(start, end):
            fill_gradients(model, seed=number)
            apply(model.named_parameters(), optimizer, clip_norm=0.5, learning_rate=1e-3)

    straight = make("qwen2", dtype=dtype)
    whole = AdamW(straight.named_parameters(), **settings)
    steps(straight, whole, 0, 6)

    first = make("qwen2", dtype=dtype)
    optimizer = AdamW(first.named_parameters(), **settings)
    steps(first, optimizer, 0, 3)
    weights, state = bits(first.state_dict()), bits(optimizer.state())
    again = make("qwen2", seed=9, dtype=dtype)
    again.load_state_dict(weights)
    resumed = AdamW(again.named_parameters(), **settings)
    resumed.restore(state)
    assert resumed.steps == 3
    steps(again, resumed, 3, 6)
    assert same_bits(straight.state_dict(), again.state_dict())
    assert same_bits(whole.state(), resumed.state())


def test_a_state_of_something_else_is_refused_by_name() -> None:
    optimizer = AdamW([("p", parameter(1.0, 2.0))], **SETTINGS)
    good = bits(optimizer.state())
    lacking = {name: x for name, x in good.items() if name != "exp_avg_sq/p"}
    for state, message in (
        (lacking, "lacks 'exp_avg_sq/p'"),
        (good | {"master/p": torch.zeros(2)}, "holds 'master/p', which has no place"),
        (good | {"exp_avg/p": torch.zeros(3)}, r"'exp_avg/p' as torch.float32 \(3,\), here .*\(2,"),
        (good | {"exp_avg/p": torch.zeros(2, dtype=torch.float64)}, "torch.float64"),
    ):
        with pytest.raises(RunError, match=message):
            optimizer.restore(state)
    assert same_bits(good, optimizer.state())


def test_masters_of_another_step_are_refused() -> None:
    p = parameter(1.0, 2.0, dtype=torch.bfloat16)
    optimizer = AdamW([("p", p)], **SETTINGS)
    state = bits(optimizer.state()) | {"master/p": torch.tensor([1.0, 2.5])}
    with pytest.raises(RunError, match="p is not its master weight rounded"):
        optimizer.restore(state)


def test_a_parameter_under_two_names_is_refused() -> None:
    p = parameter(1.0)
    with pytest.raises(ModelError, match="two names"):
        AdamW([("embedding", p), ("head", p)], **SETTINGS)


def test_frozen_parameters_are_left_alone_and_missing_gradients_named() -> None:
    p, frozen = parameter(1.0), parameter(5.0).requires_grad_(False)
    optimizer = AdamW([("p", p), ("frozen", frozen)], **SETTINGS)
    with pytest.raises(ModelError, match="p has no gradient"):
        apply([("p", p)], optimizer, clip_norm=0.0, learning_rate=0.1)
    p.grad = torch.ones(1)
    apply([("p", p), ("frozen", frozen)], optimizer, clip_norm=0.0, learning_rate=0.1)
    assert p.item() < 1.0 and frozen.item() == 5.0


# The step


def test_norm_and_clipping_by_hand() -> None:
    a, b = parameter(0.0, 0.0), nn.Parameter(torch.zeros(1, 2))
    named = [("a", a), ("b", b)]
    for clip_norm, clipped, factor in ((0.0, False, 1.0), (13.1, False, 1.0), (6.5, True, 0.5)):
        a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([[4.0, 12.0]])
        optimizer = AdamW(named, **SETTINGS)
        outcome = apply(named, optimizer, clip_norm=clip_norm, learning_rate=0.1)
        assert outcome.grad_norm == pytest.approx(13.0, rel=1e-7)  # √(3² + 4² + 12²)
        assert (outcome.clipped, outcome.skipped, outcome.bad) == (clipped, False, None)
        # The first moment is a tenth of the gradient that was applied: not averaged, not summed.
        assert torch.allclose(optimizer.state()["exp_avg/b"], b.new([[0.4, 1.2]]) * factor)
        assert a.grad is None and b.grad is None


def test_the_norm_of_many_values_is_not_off() -> None:
    """√Σg² over 20 million values: float32 sums stop growing long before."""
    gradient = torch.full((20_000, 1_000), 1e-3)
    assert gradient_norm([gradient]).item() == pytest.approx(1e-3 * math.sqrt(2e7), rel=1e-6)


def test_large_finite_gradients_are_clipped_and_not_taken_for_infinite() -> None:
    p = parameter(0.0, 0.0)
    optimizer = AdamW([("p", p)], **SETTINGS)
    p.grad = torch.tensor([3e30, 4e30])  # their squares overflow float32
    outcome = apply([("p", p)], optimizer, clip_norm=1.0, learning_rate=0.1)
    assert outcome.grad_norm == pytest.approx(5e30) and outcome.clipped and not outcome.skipped
    assert optimizer.state()["exp_avg/p"].tolist() == pytest.approx([0.06, 0.08])


def test_the_same_gradients_give_the_same_bits() -> None:
    found = []
    for _ in range(2):
        model = make("qwen3")
        optimizer = AdamW(model.named_parameters(), **SETTINGS)
        fill_gradients(model, seed=0)
        outcome = apply(model.named_parameters(), optimizer, clip_norm=0.1, learning_rate=1e-2)
        found.append((outcome, bits(model.state_dict())))
    assert found[0][0] == found[1][0] and same_bits(found[0][1], found[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_skipped_and_nothing_moves(dtype: torch.dtype, value: float) -> None:
    model = make("qwen2", dtype=dtype)
    optimizer = AdamW(model.named_parameters(), **SETTINGS)
    fill_gradients(model, seed=0)
    apply(model.named_parameters(), optimizer, clip_norm=1.0, learning_rate=1e-3)
    weights, state = bits(model.state_dict()), bits(optimizer.state())
    fill_gradients(model, seed=1)
    names = list(dict(model.named_parameters()))
    for name in (names[5], names[8]):
        gradient = dict(model.named_parameters())[name].grad
        assert gradient is not None
        gradient.view(-1)[:2] = torch.tensor([value, math.nan])
    outcome = apply(model.named_parameters(), optimizer, clip_norm=1.0, learning_rate=1e-3)
    assert outcome.skipped and not outcome.clipped and not math.isfinite(outcome.grad_norm)
    nan, infinite = (2, 0) if math.isnan(value) else (1, 1)
    assert outcome.bad is not None
    assert outcome.bad.startswith(f"{names[5]} has {nan} NaN and {infinite} infinite of ")
    assert same_bits(weights, model.state_dict()) and same_bits(state, optimizer.state())
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_that_is_not_finite_skips_a_finite_gradient() -> None:
    p = parameter(1.0)
    optimizer = AdamW([("p", p)], **SETTINGS)
    p.grad = torch.ones(1)
    outcome = apply(
        [("p", p)],
        optimizer,
        clip_norm=0.0,
        learning_rate=0.1,
        seen=[("the loss", torch.tensor(math.inf))],
    )
    assert outcome.skipped and outcome.bad == "the loss has 0 NaN and 1 infinite of 1 values"
    assert outcome.grad_norm == 1.0 and p.item() == 1.0 and optimizer.steps == 0
    p.grad = torch.ones(1)
    fine = apply(
        [("p", p)],
        optimizer,
        clip_norm=0.0,
        learning_rate=0.1,
        seen=[("the loss", torch.tensor(2.0))],
    )
    assert not fine.skipped and fine.bad is None and p.item() == pytest.approx(0.9)


def test_the_first_bad_tensor_is_named() -> None:
    fine, bad = torch.ones(3), torch.tensor([[1.0, math.nan], [math.inf, -math.inf]])
    assert first_bad([("a", fine), ("ids", torch.arange(3)), ("mask", fine > 0)]) is None
    found = first_bad([("a", fine), ("logp_NT", bad), ("later", bad)])
    assert found == "logp_NT has 1 NaN and 2 infinite of 4 values"


# Memory


def test_running_out_of_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.int8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not is_out_of_memory(RuntimeError("Triton Error [CUDA]: misaligned address"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))


def test_peak_memory_is_in_bytes() -> None:
    before = peak_bytes("cpu")
    held = torch.ones(before // 4 + 50_000_000)  # more than all before: the peak must move
    after = peak_bytes("cpu")
    assert after - before > 100e6 and after > held.nbytes
