"""The nouns. Tensor names carry their axes: `_N` sequence (row), `_T` token, `_K` top-k entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from groupwise.errors import BatchError, nearest


class World(Protocol):
    """The ranks that share one batch. Rows of all ranks are gathered in rank order."""

    def gather(self, x_N: Tensor) -> Tensor:
        """This rank's rows and everybody else's, the same on every rank."""
        ...

    def own(self, x_M: Tensor) -> Tensor:
        """The part of a gathered tensor that belongs to this rank's rows."""
        ...

    def for_rows(self, rows: int) -> World:
        """The same ranks for another batch, of which this rank holds `rows`. All ranks call it."""
        ...


class OneProcess:
    """The world of a single process: its rows are all the rows."""

    def gather(self, x_N: Tensor) -> Tensor:
        return x_N

    def own(self, x_M: Tensor) -> Tensor:
        return x_M

    def for_rows(self, rows: int) -> OneProcess:
        return self


class Ranks:
    """The world of a `torch.distributed` process group; ranks may hold different row counts."""

    def __init__(self, rows: int, process_group: Any = None) -> None:
        import torch.distributed as dist

        self._dist, self._group = dist, process_group
        sizes: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(sizes, rows, group=process_group)
        self._sizes: list[int] = sizes
        rank = dist.get_rank(process_group)
        self._start, self._rows = sum(self._sizes[:rank]), rows

    def gather(self, x_N: Tensor) -> Tensor:
        if len(x_N) != self._rows:
            raise BatchError(
                f"This world was made for {self._rows} rows on this rank, the batch has "
                f"{len(x_N)}. Drop rows with batch.keep(rows), or build the batch anew with "
                "world=Ranks(rows)."
            )
        longest = max(self._sizes)
        padded = x_N.new_zeros((longest, *x_N.shape[1:]))
        padded[: len(x_N)] = x_N
        parts = [torch.empty_like(padded) for _ in self._sizes]
        self._dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:size] for part, size in zip(parts, self._sizes, strict=True)])

    def own(self, x_M: Tensor) -> Tensor:
        return x_M[self._start : self._start + self._rows]

    def for_rows(self, rows: int) -> Ranks:
        return Ranks(rows, self._group)


@dataclass(frozen=True)
class Visit:
    """One earlier batch's rewards of one prompt, as far as later batches need them."""

    size: int
    mean: float
    var: float


@dataclass(frozen=True)
class Memory:
    """What batch phases hand on to later batches; part of a checkpoint."""

    visits: Mapping[int, tuple[Visit, ...]] = field(default_factory=dict)
    reward_average: float | None = None


@dataclass(frozen=True)
class Groups:
    """Which rows belong together: `index_M` numbers the groups of all ranks' rows from 0."""

    ids_P: Tensor
    index_M: Tensor

    def __len__(self) -> int:
        return len(self.ids_P)


_STREAMS_NT = (
    "old_logp_NT",
    "sampler_logp_NT",
    "ref_logp_NT",
    "prm_logp_NT",
    "old_value_NT",
    "token_reward_NT",
    "step_reward_NT",
    "sampler_topk_logp_NTK",
    "old_router_NTLK",
)
_FLAGS = ("correct_N", "truncated_N", "step_end_NT")
_WHOLE = ("segment_NT", "token_NT", "sampler_topk_id_NTK", "topk_id_NTK")
# What a batch or a forward pass may bring, in words.
STREAMS = {
    "logp_NT": "the policy's log-probabilities of the sampled tokens, with gradient",
    "token_reward_NT": "a reward per token, beside the sequence's",
    "old_logp_NT": "the learner's log-probabilities before the update",
    "sampler_logp_NT": "the sampler's log-probabilities",
    "ref_logp_NT": "the reference model's log-probabilities",
    "prm_logp_NT": "the implicit reward model's log-probabilities",
    "old_value_NT": "the critic's values before the update",
    "step_reward_NT": "rewards at the last token of each step",
    "step_end_NT": "a mark on the last token of each step",
    "greedy_reward_N": "the reward of the prompt's greedy completion",
    "correct_N": "which completions are correct",
    "truncated_N": "which completions hit the length limit",
    "segment_NT": "the number of the sub-sentence that each token belongs to",
    "token_NT": "the sampled token ids",
    "sampler_topk_logp_NTK": "the sampler's log-probabilities of its top-k tokens",
    "sampler_topk_id_NTK": "the ids of the sampler's top-k tokens",
    "old_router_NTLK": "old router probabilities of the old top-k experts, per layer",
    "entropy_NT": "the policy's token entropies",
    "value_NT": "the critic's values, with gradient",
    "topk_logp_NTK": "the policy's log-probabilities of its own top-k tokens, with gradient",
    "topk_id_NTK": "the ids of the policy's top-k tokens",
    "logp_at_sampler_topk_NTK": "the policy's log-probabilities of the sampler's top-k tokens",
    "router_NTLK": "router probabilities of the old top-k experts, per layer",
    "length_exponent": "the learnable exponent λ, a scalar",
}


@dataclass(frozen=True)
class TokenBatch:
    """All that the two phases read, row by row. Make one with `TokenBatch.build`.

    Padded positions of every stream are 0; a row with a NaN reward is ungraded: it is in no
    statistic and its tokens are not learned from.
    """

    mask_NT: Tensor  # bool: the tokens that the policy wrote
    ones_NT: Tensor  # the same as numbers: a finite stream times it is 0 where masked
    group_N: Tensor  # which prompt a row answers; any whole numbers
    task_reward_N: Tensor  # the grader's reward; NaN where there is none

    old_logp_NT: Tensor | None = None
    sampler_logp_NT: Tensor | None = None
    ref_logp_NT: Tensor | None = None
    prm_logp_NT: Tensor | None = None
    old_value_NT: Tensor | None = None
    token_reward_NT: Tensor | None = None
    step_reward_NT: Tensor | None = None
    step_end_NT: Tensor | None = None
    greedy_reward_N: Tensor | None = None
    correct_N: Tensor | None = None
    truncated_N: Tensor | None = None
    segment_NT: Tensor | None = None
    token_NT: Tensor | None = None
    sampler_topk_logp_NTK: Tensor | None = None
    sampler_topk_id_NTK: Tensor | None = None
    old_router_NTLK: Tensor | None = None
    memory: Memory = field(default_factory=Memory)
    world: World = field(default_factory=OneProcess)

    # Filled by the batch phase.
    reward_N: Tensor | None = None  # shaped
    learn_N: Tensor | None = None  # bool: rows in the loss (not overlong, not ungraded)
    advantage_NT: Tensor | None = None
    coefficient_NT: Tensor | None = None
    coefficient_slope_NT: Tensor | None = None  # d coefficient / d λ, learnable aggregation only
    weighed_exponent: float | None = None  # the λ that the coefficient was computed with
    prepared: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    # Filled by the token phase: what the learner's forward pass gave, with gradient.
    logp_NT: Tensor | None = None
    entropy_NT: Tensor | None = None
    value_NT: Tensor | None = None
    topk_logp_NTK: Tensor | None = None
    topk_id_NTK: Tensor | None = None
    logp_at_sampler_topk_NTK: Tensor | None = None
    router_NTLK: Tensor | None = None
    length_exponent: Tensor | None = None

    @classmethod
    def build(
        cls,
        *,
        mask_NT: Tensor,
        group_N: Tensor | Sequence[int],
        reward_N: Tensor | Sequence[float | None],
        memory: Memory | None = None,
        world: World | None = None,
        **streams: Tensor,
    ) -> TokenBatch:
        """Check shapes and values, and put 0 wherever the mask is 0."""
        mask_NT = _check_mask(mask_NT)
        rows = len(mask_NT)
        group_N, given = _check_groups(group_N, rows), reward_N
        reward_N = _check_rewards(reward_N, rows)
        per_token: list[Any] = [x for name, x in streams.items() if name in _STREAMS_NT]
        wide = any(getattr(x, "dtype", None) == torch.float64 for x in per_token or [given])
        ones_NT = mask_NT.to(torch.float64 if wide else torch.float32)
        checked: dict[str, Any] = {
            name: _check_stream(name, x, mask_NT, ones_NT, graph=name == "length_exponent")
            for name, x in streams.items()
        }
        return cls(
            mask_NT=mask_NT,
            ones_NT=ones_NT,
            group_N=group_N.to(mask_NT.device),
            task_reward_N=reward_N.to(mask_NT.device),
            memory=memory or Memory(),
            world=world or OneProcess(),
            **checked,
        )

    @property
    def rows(self) -> int:
        return len(self.mask_NT)

    @property
    def dtype(self) -> torch.dtype:
        """What the batch phase computes in: float64 if a stream came in float64, else float32."""
        return self.ones_NT.dtype

    @property
    def groups(self) -> Groups:
        # Not a cached_property: those hold a lock, and this gathers from ranks that may be threads.
        if "groups" not in self.scratch:
            ids_P, index_M = torch.unique(self.world.gather(self.group_N), return_inverse=True)
            self.scratch["groups"] = Groups(ids_P, index_M)
        found: Groups = self.scratch["groups"]
        return found

    @cached_property
    def length_N(self) -> Tensor:
        return self.mask_NT.sum(1)

    @cached_property
    def last_N(self) -> Tensor:
        """Where each row's last valid token stands (anywhere for a row without one)."""
        number_T = torch.arange(1, self.mask_NT.shape[1] + 1, device=self.mask_NT.device)
        return (self.ones_NT * number_T).argmax(1)

    @cached_property
    def scratch(self) -> dict[Any, Any]:
        """What several slots of one batch phase compute alike."""
        return {}

    @cached_property
    def place_NT(self) -> Tensor | None:
        """Where valid tokens go when a tool's output between them is left out; None if none is.

        Masked tokens go to one column behind the last.
        """
        starts_N = (self.mask_NT[:, 1:] & ~self.mask_NT[:, :-1]).sum(1, dtype=torch.int32)
        if int((starts_N + self.mask_NT[:, 0]).max()) <= 1:
            return None
        return torch.where(self.mask_NT, self.mask_NT.cumsum(1) - 1, self.mask_NT.shape[1])

    @property
    def loss_mask_NT(self) -> Tensor:
        """Bool: the tokens that the loss learns from."""
        return self.mask_NT & self.stream("learn_N", "the loss mask")[:, None]

    def valid(self, x: Tensor) -> Tensor:
        """A finite value per row or token, on the tokens that the policy wrote; 0 elsewhere."""
        return (x if x.dim() == 2 else x[:, None]).to(self.ones_NT.dtype) * self.ones_NT

    def learned(self, x: Tensor) -> Tensor:
        """The same on the tokens that the loss learns from."""
        learn_N = self.stream("learn_N", "the loss mask")
        if x.dim() == 1:
            return self.valid(x * learn_N)
        return self.valid(x if learn_N.all() else x * learn_N[:, None])

    def stream(self, name: str, reader: object) -> Tensor:
        """A stream that `reader` can't do without."""
        x = getattr(self, name)
        if x is None:
            meaning = STREAMS.get(name, "computed by the batch phase")
            raise BatchError(
                f"{reader} reads {name} ({meaning}), which this batch does not have. Pass it, or "
                "use a recipe without it."
            )
        return x

    def select(self, rows: Tensor) -> TokenBatch:
        """A micro-batch: some rows (indices or a bool mask), in that order, with all they carry."""
        changes: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor) and value.dim() > 0:
                changes[item.name] = value[rows]
        changes["prepared"] = {
            name: {key: x[rows] for key, x in parts.items()}
            for name, parts in self.prepared.items()
        }
        return replace(self, **changes)

    def keep(self, rows: Tensor) -> TokenBatch:
        """A batch of its own from some rows, before the batch phase: without what a filter drops.

        All ranks call it.
        """
        kept = self.select(rows)
        return replace(kept, world=self.world.for_rows(kept.rows))

    def with_outputs(self, **outputs: Tensor) -> TokenBatch:
        """The batch with the learner's outputs, cleaned, in at least float32."""
        checked: dict[str, Any] = {
            name: _check_stream(name, x, self.mask_NT, self.ones_NT, graph=True)
            for name, x in outputs.items()
        }
        return replace(self, **checked)


def _check_mask(mask_NT: Tensor) -> Tensor:
    if not isinstance(mask_NT, Tensor) or mask_NT.dim() != 2 or mask_NT.numel() == 0:
        shape = tuple(mask_NT.shape) if isinstance(mask_NT, Tensor) else type(mask_NT).__name__
        raise BatchError(
            f"mask_NT must be a tensor [sequences, tokens] with at least one of each, got {shape}."
        )
    if mask_NT.dtype == torch.bool:
        return mask_NT
    if not ((mask_NT == 0) | (mask_NT == 1)).all():
        raise BatchError("mask_NT must hold only 0 and 1 (1 = a token that the policy wrote).")
    return mask_NT.bool()


def _check_groups(group_N: Tensor | Sequence[int], rows: int) -> Tensor:
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


def _check_rewards(reward_N: Tensor | Sequence[float | None], rows: int) -> Tensor:
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
    return _at_least_float32(reward_N)


def _check_stream(name: str, x: Tensor, mask_NT: Tensor, ones_NT: Tensor, *, graph: bool) -> Tensor:
    """Shape, finite on valid tokens, 0 elsewhere; half precision becomes float32.

    Without `graph` the stream is detached: an anchor with a graph would cancel the gradient that it
    anchors.
    """
    if name not in STREAMS:
        raise BatchError(f"Unknown stream {name!r}. {nearest(name, STREAMS)}")
    if not isinstance(x, Tensor):
        raise BatchError(f"{name} must be a tensor, got {type(x).__name__}: torch.tensor(...).")
    x = x if graph else x.detach()
    if name == "length_exponent":
        if x.dim() != 0 or not x.is_floating_point() or not x.isfinite():
            raise BatchError("length_exponent must be a finite scalar tensor, for example 0.0.")
        return x
    _check_shape(name, x, mask_NT)
    per_row = name.endswith("_N")
    if name in _FLAGS:
        return x.bool() if per_row else x.bool() & mask_NT
    if name in _WHOLE:
        return _whole_numbers(name, x, mask_NT)
    x = _at_least_float32(x)
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


def _whole_numbers(name: str, x: Tensor, mask_NT: Tensor) -> Tensor:
    valid = torch.where(_inner(mask_NT, x), x, x.new_zeros(()))
    if valid.is_floating_point() and not (valid == valid.round()).all():
        raise BatchError(f"{name} holds fractions or NaN on valid tokens: it takes whole numbers.")
    return valid.long()


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
