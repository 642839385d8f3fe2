"""The cost model: counted by hand for two real models, and against another way of counting."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from real_shapes import SEVEN, M, S

from groupwise.model import cost
from groupwise.model.config import ModelConfig
from groupwise.model.cost import Cost, Group
from groupwise.model.devices import Device, device_named, floor_seconds
from groupwise.model.layers.ops import Ops, Plain
from groupwise.model.layers.transformer import Transformer
from groupwise.watch.speed import speed

H200 = device_named("NVIDIA H200")


def test_parameters_are_those_that_the_models_are_known_for() -> None:
    assert cost.parameters(S) == 134_515_008
    assert cost.parameters(M) == 1_543_714_304
    assert cost.parameters(SEVEN) == 7_615_616_512


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_parameters_are_those_of_the_module(family: str, tied: bool) -> None:
    shape = ModelConfig(
        family=family, vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=8, max_positions=64, tied=tied,
        qkv_bias=family == "qwen2", qk_norm=family == "qwen3",
    )  # fmt: skip
    made = sum(p.numel() for p in Transformer(shape).parameters())
    assert cost.parameters(shape) == made


def test_a_decoding_step_by_hand() -> None:
    """1,024 rows in groups of 16 behind 75 tokens, 128 of their own each: what one more costs."""
    less, more = (cost.rollout_cost(S, [Group(75, [n] * 16)] * 64, 1024) for n in (128, 129))
    parts = {name: more[name] + less[name] * -1 for name in more}
    # A layer: 576 x (2 x 9 + 2 x 3) x 64 for the heads, 3 x 576 x 1536 for the rest.
    assert parts["layers"] == Cost(2 * 1024 * 30 * (884_736 + 2_654_208), 2 * 106_168_320)
    # 30 layers x 2 x 3 heads x 64 numbers a token; 128 each, 64 prompts, 1 each written.
    assert parts["attention"].bytes == 11_520 * 2 * (1024 * 128 + 64 * 75 + 1024)
    assert parts["attention"].flops == 4 * 30 * 576 * 1024 * (75 + 128 + 1)
    assert parts["head"] == Cost(2 * 1024 * 49152 * 576, 2 * 49152 * 576)
    # 0.28 ms of operations, then 0.73 ms and 0.07 ms: of memory, and of operations again.
    assert floor_seconds(parts, H200) == pytest.approx(1.082e-3, rel=1e-3)


def step(shape: ModelConfig, rows: int, prompt: int, own: int, group: int) -> cost.Parts:
    """A token for each row. Weights are read once, a prompt's keys and values once a group."""
    heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    layers = shape.num_layers * shape.hidden_size * (heads + 3 * shape.intermediate_size)
    head = shape.vocab_size * shape.hidden_size
    seen = shape.num_layers * shape.num_heads * rows * (prompt + own + 1)
    touched = rows * own + rows // group * prompt + rows  # the last ones are written
    kept = shape.num_layers * shape.num_kv_heads * 2 * shape.head_dim
    return {
        "layers": Cost(2 * layers * rows, 2 * layers),
        "attention": Cost(4 * shape.head_dim * seen, 2 * kept * touched),
        "head": Cost(2 * head * rows, 2 * head),
    }


@pytest.mark.parametrize("shape", [S, M])
def test_a_rollout_is_the_sum_of_its_steps(shape: ModelConfig) -> None:
    """Groups whose completions end together: every step by itself, and the prompts before."""
    groups = [Group(75, [200] * 16)] * 4
    whole = cost.rollout_cost(shape, groups, slots=64)
    steps = [step(shape, 64, 75, own, 16) for own in range(200)]
    total = cost.add(cost.prefill_cost(shape, groups), *steps)
    for name, part in total.items():
        assert whole[name].bytes == pytest.approx(part.bytes, rel=1e-12), name
        assert whole[name].flops == pytest.approx(part.flops, rel=1e-12), name


def test_half_the_slots_read_the_weights_twice_as_often() -> None:
    lengths = [10, 20, 30, 40]
    assert cost.decode_steps(lengths, 4) == 40  # the longest
    assert cost.decode_steps(lengths, 2) == 50  # 100 tokens, two at a time
    one, two = (cost.rollout_cost(S, [Group(5, lengths)], slots) for slots in (4, 2))
    assert two["head"].bytes == one["head"].bytes * 50 / 40
    assert two["head"].flops == one["head"].flops and two["attention"] == one["attention"]


def test_an_update_by_hand() -> None:
    """64 x 8 answers of 230 tokens behind 100 tokens: the prompt once, the last token unread."""
    groups = [Group(100, [230] * 8)] * 64
    parts = cost.update_cost(M, groups)
    layer = 1536 * 2 * (12 + 2) * 128 + 3 * 1536 * 8960
    assert layer == 46_792_704
    assert parts["layers"].flops == 6 * 28 * layer * 64 * (100 + 8 * 229)
    assert parts["head"].flops == 6 * 151936 * 1536 * 64 * 8 * 230
    pairs = 64 * (100 * 101 // 2 + 8 * (229 * 100 + 229 * 230 // 2))
    assert parts["attention"].flops == 3 * 4 * 28 * 12 * 128 * pairs
    assert cost.model_flops(parts) == pytest.approx(1.150e15, rel=1e-3)
    assert cost.model_flops(parts) / 790e12 == pytest.approx(1.456, abs=2e-3)  # seconds
    # The head's logits and half of attention are computed again in the backward pass.
    forward = cost.forward_cost(M, groups)
    again = forward["head"].flops + forward["attention"].flops / 2
    assert parts["recomputed"].flops == again
    more = cost.update_cost(M, groups, recompute=True)
    assert cost.model_flops(more) == cost.model_flops(parts)
    layers = forward["layers"].flops + forward["attention"].flops
    assert more["recomputed"].flops == again + layers
    assert cost.model_flops(cost.update_cost(M, groups, passes=2)) == 2 * cost.model_flops(parts)


def test_operations_of_a_forward_pass_are_those_that_pytorch_counts() -> None:
    shape = ModelConfig(
        family="llama", vocab_size=48, hidden_size=16, intermediate_size=32, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=8, max_positions=64, tied=True,
    )  # fmt: skip
    from torch.utils.flop_counter import FlopCounterMode

    from groupwise.model.layers.attention import packed, packed_positions

    model = Transformer(shape).initialise(torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        hidden = model(torch.arange(12) % 48, packed_positions([12]), packed([12]))
        hidden[3:] @ model.head_weight.T
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items() if "attention" not in str(op))
    parts = cost.forward_cost(shape, [Group(4, [9])])
    assert products == parts["layers"].flops + parts["head"].flops


def test_memory_by_hand() -> None:
    assert cost.kept_numbers(S) * 2 == 23_040 and cost.kept_numbers(M) * 2 == 28_672
    # S, a layer: 2 x 576 of four bytes, 15 x 64 + 576 + 2 x 1536 of two, 9 log-sums of four.
    assert cost.activations(S) == 31 * (4608 + 2 * 4608 + 36)
    layer = 8 * 1536 + 2 * (16 * 128 + 1536 + 2 * 8960) + 48
    assert cost.activations(M) == 29 * layer
    assert cost.activations(M, recompute=True) == 2 * layer + 28 * 1536 * 6
    held = cost.held(M)
    assert sum(held.values()) == 14 * 1_543_714_304  # 2 + 4 + 8 bytes
    assert (
        sum(cost.held(M, 4, roles=[cost.RoleSize("reference", held=4)]).values())
        == (4 + 8 + 4) * 1_543_714_304
    )
    parts = cost.memory(
        M, slots=512, max_tokens=320, prompt=100, group=8, micro_tokens=8192, recompute=False
    )
    assert parts["cache"] == 28_672 * (512 * 320 + 64 * 100)
    assert parts["gradients"] == 4 * 1_543_714_304
    head = 2**27 * 6 + 4 * 151936 * 1536  # 512 MiB of logits, half as much of their gradient
    assert parts["micro-batch"] == 8192 * cost.activations(M) + head
    # Sampling and learning take turns.
    learning = parts["gradients"] + parts["micro-batch"]
    assert cost.peak(parts) == sum(held.values()) + learning
    assert cost.peak({**parts, "cache": learning + 5}) == sum(held.values()) + learning + 5
    assert cost.head_bytes(M, 10, 4) == 10 * 151936 * 8 + 4 * 151936 * 1536  # less than a chunk
    assert cost.optimizer_cost(M).bytes == 34 * 1_543_714_304


def kept_by_layers(shape: ModelConfig, ops: Ops, dtype: torch.dtype, device: str) -> float:
    """Bytes a token that a forward pass leaves for its backward pass, weights aside."""
    model = Transformer(shape)
    model = model.initialise(torch.Generator().manual_seed(0)).to(device, dtype)
    model.ops = ops
    model.ops.lay_out(model)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, torch.Tensor] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in own:
            seen[x.untyped_storage().data_ptr()] = x
        return x

    attend = model.ops.attention([64], [[]], torch.device(device))
    token_T = torch.arange(64, device=device)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        model(token_T % 48, token_T, attend)
    return sum(x.untyped_storage().nbytes() for x in seen.values()) / 64


TINY = ModelConfig(
    family="llama", vocab_size=48, hidden_size=64, intermediate_size=160, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=16, max_positions=64, tied=True,
)  # fmt: skip


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("kind", ["plain", "kernels"])
def test_what_a_layer_keeps_is_what_autograd_is_given(kind: str, qk_norm: bool) -> None:
    from groupwise.model.layers.fast import Fast

    gpu = torch.cuda.is_available()
    half, device = (torch.bfloat16, "cuda") if gpu else (torch.float16, "cpu")
    ops, dtype = (Plain(), torch.float32) if kind == "plain" else (Fast(), half)
    device = "cpu" if kind == "plain" else device
    shape = replace(TINY, qk_norm=qk_norm)
    one, two = (
        kept_by_layers(replace(shape, num_layers=layers), ops, dtype, device) for layers in (1, 2)
    )
    counted = cost.activations(shape, dtype.itemsize) / 3  # two layers, one of them twice
    # Beside it there are the two numbers that each row was divided by.
    assert counted < two - one < 1.01 * counted


def test_devices_by_the_names_of_their_drivers() -> None:
    assert (H200.flops, H200.bandwidth) == (790e12, 4.3e12)
    assert device_named("NVIDIA H100 80GB HBM3").bandwidth == 3.0e12
    assert device_named("NVIDIA H100 PCIe").bandwidth == 1.8e12
    assert device_named("NVIDIA A100-SXM4-40GB").memory == 40e9
    assert device_named("NVIDIA A100-SXM4-80GB", 85e9).memory == 85e9
    assert device_named("NVIDIA A100-PCIE-40GB").bandwidth == 1.4e12
    for name in (
        "Some GPU",
        "NVIDIA RTX A1000",
        "NVIDIA GH200 480GB",
        "NVIDIA H20",
        "NVIDIA L40",
        "T400",
    ):
        other = device_named(name, 8e9)
        assert (other.flops, other.memory) == (None, 8e9)
    assert device_named("NVIDIA H100 80GB HBM3 MIG 1g.10gb").flops is None
    assert floor_seconds({"x": Cost(1, 1)}, other) is None
    bound = {"a": Cost(790e12, 0), "b": Cost(1, 8.6e12)}  # 1 s of operations, 2 s of memory
    assert floor_seconds(bound, H200) == pytest.approx(3.0)


def test_counting_needs_no_torch() -> None:
    line = "import sys, groupwise.model.cost; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", line], cwd=Path(__file__).parents[2])
    assert done.returncode == 0


# --- how fast a step was ----------------------------------------------------------------------

TOY = Device("toy", flops=100.0, bandwidth=10.0)
WORK = {
    "rollout": {"layers": Cost(20.0, 8.0), "head": Cost(20.0, 2.0)},
    "update": {"layers": Cost(90.0), "recomputed": Cost(1e9)},
}


def test_the_bottleneck_and_the_shares_by_hand() -> None:
    seconds = {"rollout": 2.0, "grade": 0.5, "update": 1.5, "step": 5.0}
    found = speed(seconds, WORK, TOY)
    assert found["time/share/rollout"] == 0.4 and found["time/share/grade"] == 0.1
    assert found["time/rollout_bytes_per_second"] == 5.0
    assert found["time/rollout_bandwidth_share"] == 0.5
    assert found["time/update_flops_share"] == pytest.approx(0.6)  # nothing computed twice
    assert found["time/bottleneck"] == (
        "rollout, 40 % of the step, memory-bound at 50 % of the device's bandwidth"
    )
    slower = speed({**seconds, "update": 2.5}, WORK, TOY)
    assert slower["time/bottleneck"] == (
        "update, 50 % of the step, compute-bound at 36 % of the device's operations"
    )
    idle = speed({**seconds, "update": 20.0, "step": 40.0}, WORK, TOY)
    assert idle["time/bottleneck"] == (
        "update, 50 % of the step, waiting: 4 % of the device's operations, 0 % of its bandwidth"
    )
    graded = speed({**seconds, "grade": 3.0, "eval": 9.0}, WORK, TOY)
    assert graded["time/bottleneck"] == "grade, 60 % of the step"  # eval is not of every step


def test_without_known_peaks_there_is_nothing_to_compare_with() -> None:
    seconds = {"rollout": 2.0, "update": 1.5, "step": 5.0}
    found = speed(seconds, WORK, Device("cpu", None, None))
    assert found == {
        "time/share/rollout": 0.4,
        "time/share/update": 0.3,
        "time/rollout_bytes_per_second": 5.0,
        "time/bottleneck": "rollout, 40 % of the step",
    }
