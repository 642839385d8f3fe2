"""The whole model with kernels against plain PyTorch: hidden states, and every gradient.

On a GPU in bfloat16, which is what they are for; in the interpreter, which multiplies bfloat16
wrongly, in float32.
"""

from __future__ import annotations

import copy

import pytest
import torch
from model_zoo import make

pytestmark = pytest.mark.usefixtures("kernels")
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32
PROMPTS, BEHIND = [5, 3], [[4, 1], []]
TOKENS = sum(PROMPTS) + sum(map(sum, BEHIND))
POSITIONS = [*range(5), *range(5, 9), 5, *range(3)]


def run(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    token_T = torch.randint(0, 97, (TOKENS,), generator=generator).to(DEVICE)
    attend = model.ops.attention(PROMPTS, BEHIND, DEVICE)
    hidden_TD = model(token_T, torch.tensor(POSITIONS, device=DEVICE), attend)
    found = model.ops.log_probs(
        hidden_TD, model.head_weight, token_T.roll(-1), temperature=0.8, entropy=True
    )
    (found.logp_T.sum() + 0.3 * found.entropy_T.sum()).backward()
    named = {"hidden": hidden_TD, "logp": found.logp_T, "entropy": found.entropy_T}
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {name: x.detach().double() for name, x in (named | grads).items()}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["smollm2", "qwen2", "qwen3", "llama_biases"])
@pytest.mark.parametrize("kind", ["Fast", "Exact"])
def test_kernels_compute_the_same_model(kind: str, name: str, recompute: bool) -> None:
    if (kind == "Exact" or recompute) and name in ("qwen3", "llama_biases"):
        pytest.skip("one family each is enough")
    from groupwise.model.layers import fast

    plain = make(name, dtype=DTYPE).to(DEVICE)
    model = copy.deepcopy(plain)
    model.ops, model.recompute = getattr(fast, kind)(), recompute
    model.ops.lay_out(model)
    found = run(model)
    wanted = run(copy.deepcopy(plain).float())
    assert found.keys() == wanted.keys()
    if not CUDA:
        for key, value in wanted.items():
            scale = value.abs().max().clamp(min=1e-3)
            assert (found[key] - value).abs().max() / scale < 2e-5, key
        return
    rounded = run(plain)  # what the precision itself costs
    for key, value in wanted.items():
        assert difference(found[key], value) < 2 * difference(rounded[key], value) + 0.03, key


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
