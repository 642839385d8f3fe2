"""The whole model with kernels against plain PyTorch: hidden states, and every gradient.

On a GPU in bfloat16, which is what they are for; in the interpreter, which multiplies bfloat16
wrongly, in float32.
"""

from __future__ import annotations

import copy

import pytest
from model_zoo import make
from whole_model import CUDA, DEVICE, DTYPE, difference, forward_backward

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "name", ["smollm2", "qwen2", "qwen3", "llama_biases", "qwen3_moe", "olmoe", "mixtral"]
)
@pytest.mark.parametrize("kind", ["Fast", "Exact"])
def test_kernels_compute_the_same_model(kind: str, name: str, recompute: bool) -> None:
    if (kind == "Exact" or recompute) and name in ("qwen3", "llama_biases"):
        pytest.skip("one family each is enough")
    from groupwise.model.layers import fast

    plain = make(name, dtype=DTYPE).to(DEVICE)
    model = copy.deepcopy(plain)
    model.ops, model.recompute = getattr(fast, kind)(), recompute
    model.ops.lay_out(model)
    found = forward_backward(model)
    wanted = forward_backward(copy.deepcopy(plain).float())
    assert found.keys() == wanted.keys()
    if not CUDA:
        for key, value in wanted.items():
            scale = value.abs().max().clamp(min=1e-3)
            assert (found[key] - value).abs().max() / scale < 2e-5, key
        return
    rounded = forward_backward(plain)  # what the precision itself costs
    for key, value in wanted.items():
        assert difference(found[key], value) < 2 * difference(rounded[key], value) + 0.03, key
