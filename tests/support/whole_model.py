"""A whole model, forward and backward: on a GPU in bfloat16, in the interpreter in float32."""

from __future__ import annotations

import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32
PROMPTS, BEHIND = [5, 3], [[4, 1], []]
TOKENS = sum(PROMPTS) + sum(map(sum, BEHIND))
POSITIONS = [*range(5), *range(5, 9), 5, *range(3)]


def forward_backward(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return hidden states, log-probabilities, entropies and the gradient of every parameter."""
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


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())
