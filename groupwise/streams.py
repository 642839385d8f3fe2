"""Streams of a batch or a forward pass: names, meanings, and the checks at the door."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.errors import BatchError, nearest

LARGEST_REWARD = 1e15

_FLAGS = ("correct_N", "truncated_N", "step_end_NT", "flawed_N", "expert_N", "taught_N")
_WHOLE = ("segment_NT", "token_NT", "sampler_topk_id_NTK", "topk_id_NTK", "teacher_topk_id_NTK",
          "state_NT", "role_N", "peer_N", "result_start_N", "branch_NL")  # fmt: skip
# Streams of rows, one or several numbers each, in which NaN is "none".
_MAY_LACK = ("reward_part_NK", "reference_reward_NK")
# What a batch or a forward pass may bring, in words; what roles bring is in ROLE_FACTS.
_STREAMS = {
    "logp_NT": "the policy's log-probabilities of the sampled tokens, with gradient",
    "token_reward_NT": "a reward per token, beside the sequence's",
    "old_logp_NT": "the learner's log-probabilities before the update",
    "sampler_logp_NT": "the sampler's log-probabilities",
    "step_reward_NT": "rewards at the last token of each step",
    "step_end_NT": "a mark on the last token of each step",
    "step_value_NT": "the value of the state that a step begins in, at the step's last token",
    "greedy_reward_N": "the reward of the prompt's greedy completion",
    "correct_N": "which completions are correct",
    "truncated_N": "which completions hit the length limit",
    "segment_NT": "the number of the sub-sentence that each token belongs to",
    "token_NT": "the sampled token ids",
    "sampler_topk_logp_NTK": "the sampler's log-probabilities of its top-k tokens",
    "sampler_topk_id_NTK": "the ids of the sampler's top-k tokens",
    "old_router_NTLK": "old router probabilities of the old top-k experts, per layer",
    "expert_load_NTE": "how often a token visits each expert before the updates, mean of layers",
    "entropy_NT": "the policy's token entropies",
    "topk_logp_NTK": "the policy's log-probabilities of its own top-k tokens, with gradient",
    "topk_id_NTK": "the ids of the policy's top-k tokens",
    "logp_at_sampler_topk_NTK": "the policy's log-probabilities of the sampler's top-k tokens",
    "logp_at_teacher_topk_NTK": "the policy's log-probabilities of the teacher's top-k tokens",
    "router_NTLK": "router probabilities of the old top-k experts, per layer",
    "router_NTE": "router probabilities of all experts, mean over layers, with gradient",
    "now_logp_NT": "the policy's log-probabilities as an update begins",
    "now_entropy_NT": "the policy's token entropies as an update begins",
    "old_square_mass_NT": "the sum of squared probabilities of each token, before the update",
    "age_NT": "updates of the policy since a token was sampled",
    "lesson_NT": "how much each token counts as one to be imitated",
    "reward_part_NK": "the parts of the reward, before weights; NaN for none",
    "part_weight_NK": "the weight of each part of the reward",
    "reference_reward_NK": "rewards of the reference's answers to the prompt; NaN for none",
    "flawed_N": "which completions are right for wrong reasons",
    "expert_N": "which completions are an expert's",
    "taught_N": "which completions a teacher could look at with an answer of the group before it",
    "role_N": "the number of the role that wrote the completion",
    "peer_N": "the number of the comparison, within its group, that a completion takes part in",
    "drift_N": "mean change of |log-probability| of the prompt's previous answer since then",
    "context_tokens_N": "tokens of a row that the policy read and did not write",
    "turns_N": "the turns of the policy in a row",
    "turn_reward_N": "the reward of the turn before the first tool result",
    "outcome_reward_N": "the reward of the outcome alone",
    "result_start_N": "own tokens before the first tool result; -1 where there is none",
    "branch_NL": "numbers of the subtrees that an answer is in, from the root on; -1 for none",
    "state_NT": "the number of the state that a turn begins in, on the turn's last token",
}


@dataclass(frozen=True)
class RoleFacts:
    """Something that takes part in learning beside the policy, as recipes and pages name it."""

    title: str
    streams: Mapping[str, str]  # that it alone fills, in words: a recipe that reads one needs it
    start: str  # what it starts from
    note: str
    learns: bool = True  # whether it has parameters that updates change
    model: bool = True  # whether it is a whole model, or a few numbers


ROLE_FACTS = {
    "reference": RoleFacts(
        "reference",
        {"ref_logp_NT": "the reference model's log-probabilities"},
        start="the starting policy",
        note="what KL terms and preference losses hold on to",
        learns=False,
    ),
    "critic": RoleFacts(
        "critic",
        {
            "old_value_NT": "the critic's values before the update",
            "value_NT": "the critic's values, with gradient",
        },
        start="a copy of the policy with a scalar head of 0 (or from critic.start)",
        note="before the update its values are old_value_NT",
    ),
    "prm": RoleFacts(
        "implicit reward model",
        {"prm_logp_NT": "the implicit reward model's log-probabilities"},
        start="the SFT model, which is also the reference",
        note="trained on outcomes, read as token rewards β·(ℓ^φ − ℓ^ref)",
    ),
    "teacher": RoleFacts(
        "teacher",
        {
            "teacher_logp_NT": "the teacher's log-probabilities of the sampled tokens",
            "teacher_topk_logp_NTK": "the teacher's log-probabilities of its top-k tokens",
            "teacher_topk_id_NTK": "the ids of the teacher's top-k tokens",
            "teacher_divergence_NT": "the policy's divergence to the teacher, with gradient",
        },
        start="teacher.path, a model with the policy's tokenizer",
        note="what the policy is to become like, token by token",
        learns=False,
    ),
    "length_exponent": RoleFacts(
        "length exponent λ",
        {"length_exponent": "the learnable exponent λ, a scalar"},
        start="0, a scalar",
        note="its gradient comes through the aggregation weights",
        model=False,
    ),
}

STREAMS = _STREAMS | {n: text for facts in ROLE_FACTS.values() for n, text in facts.streams.items()}


def is_number_per_token(name: str) -> bool:
    """Tell whether a stream decides what precision the batch phase computes in."""
    return "_NT" in name and name not in (*_FLAGS, *_WHOLE)


def check_mask(mask_NT: Tensor) -> Tensor:
    # No rows are fine here: a rank may be left without any. An empty batch is refused later.
    if not isinstance(mask_NT, Tensor) or mask_NT.dim() != 2 or mask_NT.shape[1] == 0:
        shape = tuple(mask_NT.shape) if isinstance(mask_NT, Tensor) else type(mask_NT).__name__
        raise BatchError(
            f"mask_NT must be a tensor [sequences, tokens] with at least one token, got {shape}."
        )
    if mask_NT.dtype == torch.bool:
        return mask_NT
    if not ((mask_NT == 0) | (mask_NT == 1)).all():
        raise BatchError("mask_NT must hold only 0 and 1 (1 = a token that the policy wrote).")
    return mask_NT.bool()


def check_groups(group_N: Tensor | Sequence[int], rows: int) -> Tensor:
    try:
        group_N = torch.as_tensor(group_N)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise BatchError(
            "group_N must be whole numbers, one per row. Number your prompts, for example with "
            "{prompt: i for i, prompt in enumerate(prompts)}."
        ) from None
    if group_N.shape != (rows,):
        raise BatchError(
            f"group_N has shape {tuple(group_N.shape)}, but the mask has {rows} rows: give one "
            "group id per row."
        )
    if group_N.is_floating_point():
        exact = (group_N == group_N.round()) & (group_N.abs() < 2.0**53)
        if not exact.all():
            raise BatchError(
                "group_N holds fractions, NaN or numbers too large: group ids are whole numbers."
            )
    return group_N.long()


def check_rewards(reward_N: Tensor | Sequence[float | None], rows: int) -> Tensor:
    if not isinstance(reward_N, Tensor):
        try:
            numbers = [float("nan") if r is None else r for r in reward_N]
            reward_N = torch.tensor(numbers, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise BatchError(
                "reward_N must be numbers, one per row (None for 'no grade'), got "
                f"{repr(reward_N)[:80]}."
            ) from None
    if reward_N.shape != (rows,):
        raise BatchError(
            f"reward_N has shape {tuple(reward_N.shape)}, but the mask has {rows} rows: give one "
            "reward per row (a single reward is not spread over the rows)."
        )
    if reward_N.isinf().any():
        row = int(reward_N.isinf().nonzero()[0])
        raise BatchError(
            f"reward_N[{row}] is infinite. Rewards are finite; use None or NaN for 'no grade'."
        )
    if (reward_N.abs() > LARGEST_REWARD).any():
        raise BatchError(
            f"A reward beyond ±{LARGEST_REWARD:g} would overflow in the statistics. Scale rewards."
        )
    return _at_least_float32(reward_N)


def check_stream(
    name: str, x: Tensor, mask_NT: Tensor, ones_NT: Tensor, *, graph: bool, look: bool = True
) -> Tensor:
    """Shape, finite on valid tokens, 0 elsewhere; half precision becomes float32.

    Without `graph` the stream is detached: an anchor with a graph would cancel the gradient that it
    anchors. Without `look` its values are not read, which would wait for the device: the caller
    reads them later.
    """
    if name not in STREAMS:
        raise BatchError(f"Unknown stream {name!r}. {nearest(name, STREAMS)}")
    if not isinstance(x, Tensor):
        raise BatchError(f"{name} must be a tensor, got {type(x).__name__}: torch.tensor(...).")
    x = x if graph else x.detach()
    if name == "length_exponent":
        if x.dim() != 0 or not x.is_floating_point() or (look and not x.isfinite()):
            raise BatchError("length_exponent must be a finite scalar tensor, for example 0.0.")
        return x
    _check_shape(name, x, mask_NT)
    per_row = "_NT" not in name
    if name in _FLAGS:
        return _flags(name, x if per_row else torch.where(mask_NT, x, torch.zeros_like(x)))
    if name in _WHOLE:
        return _whole_numbers(name, x, mask_NT)
    x = _at_least_float32(x)
    if name in _MAY_LACK:
        return _without_infinities(name, x)
    if not look:
        return x if per_row else torch.where(_inner(mask_NT, x), x, x.new_zeros(()))
    if x.detach().sum().isfinite():  # all finite, padding too: a product is the fastest mask
        return x if per_row else x * _inner(ones_NT, x).to(x.dtype)
    if not per_row:
        x = torch.where(_inner(mask_NT, x), x, x.new_zeros(()))
    _raise_at_first_bad(name, x)
    return x


def _check_shape(name: str, x: Tensor, mask_NT: Tensor) -> None:
    axes = name.rsplit("_", 1)[1]
    rows, width = mask_NT.shape
    known = {"N": rows, "T": width}
    want = [known.get(axis) for axis in axes]
    fits = x.dim() == len(want) and all(
        w is None or w == size for w, size in zip(want, x.shape, strict=True)
    )
    if not fits:
        shape = ", ".join(axis if w is None else str(w) for axis, w in zip(axes, want, strict=True))
        raise BatchError(
            f"{name} must have shape ({shape}) to fit the mask, got {tuple(x.shape)}. It holds "
            f"{STREAMS[name]}."
        )


def _flags(name: str, x: Tensor) -> Tensor:
    if x.dtype != torch.bool and not ((x == 0) | (x == 1)).all():
        raise BatchError(f"{name} ({STREAMS[name]}) must hold only 0 and 1, or True and False.")
    return x.bool()


def _without_infinities(name: str, x: Tensor) -> Tensor:
    if x.isinf().any():
        raise BatchError(f"{name} is infinite somewhere. It holds {STREAMS[name]}.")
    return x


def _whole_numbers(name: str, x: Tensor, mask_NT: Tensor) -> Tensor:
    per_row = "_NT" not in name
    valid = x if per_row else torch.where(_inner(mask_NT, x), x, x.new_zeros(()))
    if valid.is_floating_point() and not (valid == valid.round()).all():
        raise BatchError(f"{name} holds fractions or NaN on valid tokens: it takes whole numbers.")
    whole = valid.long()
    if name == "segment_NT" and ((whole < 0) | (whole >= whole.shape[1])).any():
        return _renumber(whole)
    return whole


def _renumber(segment_NT: Tensor) -> Tensor:
    """Renumber whole numbers as 0, 1, ... within each row, equal where they were equal."""
    order_NT = segment_NT.argsort(1)
    ranked_NT = segment_NT.gather(1, order_NT)
    step_NT = torch.zeros_like(ranked_NT)
    step_NT[:, 1:] = (ranked_NT[:, 1:] != ranked_NT[:, :-1]).long()
    return torch.zeros_like(segment_NT).scatter(1, order_NT, step_NT.cumsum(1))


def _raise_at_first_bad(name: str, x: Tensor) -> None:
    bad = (~x.isfinite()).nonzero()
    if not len(bad):
        return
    first = bad[0].tolist()
    where = f"row {first[0]}" + (f", token {first[1]}" if len(first) > 1 else "")
    advice = "Find out where it comes from, and leave such rows out."
    if "logp" in name:
        advice = (
            "A sampled token has positive probability, so its log-probability is finite: look for "
            "a sampler that cuts the distribution (top-p, top-k, min-p) on one side only, an "
            "overflow, or a wrong mask."
        )
    raise BatchError(f"{name} is not finite: {where} holds {float(x[tuple(bad[0])])}. {advice}")


def _inner(mask_NT: Tensor, x: Tensor) -> Tensor:
    return mask_NT.reshape(*mask_NT.shape, *[1] * (x.dim() - 2))


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
