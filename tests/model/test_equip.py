"""Which arithmetic a model gets, and what is said where kernels can't be used."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from model_zoo import SIZES, make

from groupwise.errors import ModelError
from groupwise.model.config import ModelConfig
from groupwise.model.layers import equip as module
from groupwise.model.layers.equip import equip
from groupwise.model.layers.order import fix_order, order
from groupwise.model.layers.transformer import Transformer

CUDA = torch.cuda.is_available()
on_cpu = pytest.mark.skipif(CUDA, reason="small float32 models are for the interpreter")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    yield
    fix_order(False)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time for many tokens."""
    monkeypatch.setattr(module, "MANY", 16)
    monkeypatch.setattr(module, "MANY_EXACT", 16)


def switch() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


# --- the choice -------------------------------------------------------------------------------


def test_a_cpu_runs_plain_and_needs_no_words() -> None:
    model = make("smollm2")
    assert equip(model, exact=False) == []
    assert model.ops.name == "plain"


def test_exact_on_a_cpu_is_refused_with_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"for a GPU.*engine\.exact=false.*up to 128 tokens"):
        equip(make("smollm2"), exact=True)
    assert switch() == (False, False)


@on_cpu
@pytest.mark.usefixtures("kernels", "short")
@pytest.mark.parametrize("name", ["smollm2", "qwen2", "qwen3"])
@pytest.mark.parametrize("exact", [False, True])
def test_kernels_that_work_are_taken(name: str, exact: bool) -> None:
    model = make(name)
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert module._take_kernels(model, exact) is None
    assert model.ops.name == ("exact" if exact else "fast")
    for key, parameter in model.named_parameters():
        assert parameter.grad is None, "a rehearsal leaves nothing behind"
        assert torch.equal(parameter, before[key])


@on_cpu
@pytest.mark.usefixtures("kernels", "short")
def test_a_shape_that_kernels_do_not_serve() -> None:
    """Rows of 42 float32 numbers are no whole 16 bytes: the copy engine can't move them."""
    sizes = SIZES | {"hidden_size": 42, "num_attention_heads": 3, "num_key_value_heads": 3}
    model = Transformer(ModelConfig.from_hf(sizes | {"model_type": "llama"}))
    model.initialise(torch.manual_seed(0))
    for exact in (False, True):
        reason = module._take_kernels(model, exact)
        assert reason is not None and "multiples of 4" in reason


@on_cpu
@pytest.mark.usefixtures("kernels", "short")
def test_a_kernel_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from groupwise.model.layers import fast

    def swiglu_forward(*_: object) -> None:
        raise RuntimeError("PTXAS error: Internal Triton PTX codegen error\nand pages of it")

    monkeypatch.setattr(fast, "swiglu_forward", swiglu_forward)
    monkeypatch.setattr(module, "_obstacle", module._take_kernels)
    with pytest.raises(ModelError, match=r"can't be used here: a kernel failed \(RuntimeError: PT"):
        equip(make("smollm2"), exact=True)
    assert switch() == (False, False)
    model = make("smollm2")
    equip(model, exact=False)
    assert model.ops.name == "plain"
    assert module._take_kernels(model, False) == (
        "a kernel failed (RuntimeError: PTXAS error: Internal Triton PTX codegen error)"
    )
    assert all(p.grad is None for p in model.parameters())


@on_cpu
@pytest.mark.usefixtures("kernels", "short")
def test_a_model_that_leaves_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def rehearse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(module, "_rehearse", rehearse)
    with pytest.raises(ModelError, match=r"no room left to work in.* smaller model"):
        module._take_kernels(make("smollm2"), False)


def test_a_machine_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "groupwise.model.layers.fast", None)
    reason = module._take_kernels(make("smollm2"), False)
    assert reason is not None and reason.startswith("Triton can't be imported")


# --- the order of sums ------------------------------------------------------------------------


def test_exact_fixes_the_order_and_fast_lets_it_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_obstacle", lambda model, exact: None)
    (said,) = equip(make("smollm2"), exact=True)
    assert said.startswith("exact mode")
    assert switch() == (True, True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.utils.deterministic.fill_uninitialized_memory
    equip(make("smollm2"), exact=True)  # twice changes nothing
    equip(make("smollm2"), exact=False)
    assert switch() == (False, False)
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_what_somebody_else_switched_on_stays() -> None:
    torch.use_deterministic_algorithms(True)
    fix_order(True)
    assert switch() == (True, False)
    fix_order(False)
    assert switch() == (True, False)


@pytest.mark.parametrize("before", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("fixed", [False, True])
def test_a_block_has_its_own_order(before: tuple[bool, bool], fixed: bool) -> None:
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    with pytest.raises(ZeroDivisionError), order(fixed=fixed):
        assert switch() == (fixed, False)  # strict: flash attention does not heed a warning
        raise ZeroDivisionError
    assert switch() == before


@on_cpu
@pytest.mark.usefixtures("kernels", "short")
def test_a_rehearsal_takes_no_gradients_of_the_size_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that is only sampled from may fill the memory with its weights."""
    model = make("mistral").requires_grad_(False)
    held: list[int] = []
    backward = torch.Tensor.backward

    def measured(loss: torch.Tensor) -> None:
        backward(loss)
        held.append(sum(p.grad.numel() for p in model.parameters() if p.grad is not None))

    monkeypatch.setattr(torch.Tensor, "backward", measured)
    assert module._take_kernels(model, False) is None
    assert held == [sum(p.numel() for p in model.layers[0].parameters())]
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
