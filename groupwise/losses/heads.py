"""From logits to what the slots read. The trainer's own head gives the same without the logits."""

from __future__ import annotations

import torch
from torch import Tensor


def from_logits(logits_NTV: Tensor, token_NT: Tensor | None, k: int = 1) -> dict[str, Tensor]:
    """Return log-probability of the sampled token, entropy and top-k, in at least float32.

    The top-k set itself carries no gradient; its log-probabilities do.
    """
    wide = logits_NTV if logits_NTV.dtype == torch.float64 else logits_NTV.float()
    logp_NTV = wide.log_softmax(-1)
    ids_NTK = logp_NTV.detach().topk(min(k, logp_NTV.shape[-1]), dim=-1).indices
    outputs = {
        "entropy_NT": -(logp_NTV.exp() * logp_NTV).sum(-1),
        "topk_id_NTK": ids_NTK,
        "topk_logp_NTK": logp_NTV.gather(-1, ids_NTK),
    }
    if token_NT is not None:
        outputs["logp_NT"] = logp_NTV.gather(-1, token_NT[..., None])[..., 0]
    return outputs
