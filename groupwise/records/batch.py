"""The rollouts of a step as the two phases read them: rows of tokens, with all their streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from groupwise.errors import BatchError, MissingStream
from groupwise.parallel.world import ALONE, World
from groupwise.records.masks import as_numbers
from groupwise.streams import (
    STREAMS,
    check_groups,
    check_mask,
    check_rewards,
    check_stream,
    is_number_per_token,
)

X = TypeVar("X")


@dataclass(frozen=True)
class Visit:
    """One earlier batch's rewards of one prompt, as far as later batches need them."""

    size: int
    mean: float
    var: float


@dataclass(frozen=True)
class Average:
    """The mean of one number a step, over so many steps."""

    mean: float = 0.0
    steps: int = 0


@dataclass(frozen=True)
class StoredAnswer:
    """An earlier answer to a prompt, and its log-probabilities then; NaN where others wrote."""

    token_ids: tuple[int, ...]
    logp: tuple[float, ...]


@dataclass(frozen=True)
class Memory:
    """Values that steps hand on to later ones; part of a checkpoint."""

    visits: Mapping[int, tuple[Visit, ...]] = field(default_factory=dict)
    reward_average: float | None = None
    pair_reward: Average = field(default_factory=Average)
    role_average: Mapping[int, float] = field(default_factory=dict)
    # α and β of what each prompt is expected to give
    prompt_beta: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    answers: Mapping[int, StoredAnswer] = field(default_factory=dict)  # the last one by prompt


@dataclass(frozen=True)
class Groups:
    """Which rows belong together: `index_M` numbers the groups of all ranks' rows from 0."""

    ids_P: Tensor
    index_M: Tensor

    def __len__(self) -> int:
        return len(self.ids_P)


@dataclass(frozen=True)
class TokenBatch:
    """All that the two phases read, row by row. Make one with `TokenBatch.build`.

    Padded positions of every stream are 0; a row with a NaN reward is ungraded: it is in no
    statistic and its tokens are not learned from.
    """

    mask_NT: Tensor  # bool: the tokens that the policy wrote
    ones_NT: Tensor  # the same as numbers: a finite stream times it is 0 where masked
    # Which prompt a row answers: any whole numbers. Recipes with memory (dcpo) know prompts by them
    # from batch to batch, so there they must be the prompt's own.
    group_N: Tensor
    task_reward_N: Tensor  # the grader's reward; NaN where there is none

    old_logp_NT: Tensor | None = None
    sampler_logp_NT: Tensor | None = None
    ref_logp_NT: Tensor | None = None
    prm_logp_NT: Tensor | None = None
    old_value_NT: Tensor | None = None
    token_reward_NT: Tensor | None = None
    step_reward_NT: Tensor | None = None
    step_end_NT: Tensor | None = None
    step_value_NT: Tensor | None = None
    greedy_reward_N: Tensor | None = None
    correct_N: Tensor | None = None
    truncated_N: Tensor | None = None
    segment_NT: Tensor | None = None
    token_NT: Tensor | None = None
    sampler_topk_logp_NTK: Tensor | None = None
    sampler_topk_id_NTK: Tensor | None = None
    old_router_NTLK: Tensor | None = None
    expert_load_NTE: Tensor | None = None
    memory: Memory = field(default_factory=Memory)
    world: World = ALONE

    # Filled by the batch phase.
    reward_N: Tensor | None = None  # shaped
    # bool: rows in the loss (not overlong, not ungraded); said before where no reward is read
    learn_N: Tensor | None = None
    advantage_NT: Tensor | None = None
    coefficient_NT: Tensor | None = None
    coefficient_slope_NT: Tensor | None = None  # d coefficient / d λ, learnable aggregation only
    weighed_exponent: float | None = None  # the λ that the coefficient was computed with
    prepared: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    made_by: tuple[Any, ...] | None = None  # the batch-phase slots that filled this
    pass_NT: Tensor | None = None  # the tokens of this pass, where a schedule has several
    pass_number: int = 0
    moved: bool = False  # earlier updates on these rollouts, and no old_logp_NT from before them
    watched: bool = False  # whoever computes the outputs sees himself to it that they are finite

    # Filled by the token phase: what the learner's forward pass gave, with gradient.
    logp_NT: Tensor | None = None
    entropy_NT: Tensor | None = None
    value_NT: Tensor | None = None
    topk_logp_NTK: Tensor | None = None
    topk_id_NTK: Tensor | None = None
    logp_at_sampler_topk_NTK: Tensor | None = None
    router_NTLK: Tensor | None = None
    router_NTE: Tensor | None = None
    length_exponent: Tensor | None = None

    # What roles say of the rows beside all that, by the names that ROLE_FACTS gives it.
    of_roles: Mapping[str, Tensor] = field(default_factory=dict)

    # What slots compute alike (`once`); shared by copies of the same rows and streams.
    scratch: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def build(
        cls,
        *,
        mask_NT: Tensor,
        group_N: Tensor | Sequence[int],
        reward_N: Tensor | Sequence[float | None],
        memory: Memory | None = None,
        world: World = ALONE,
        **streams: Tensor,
    ) -> TokenBatch:
        """Check shapes and values, and put 0 wherever the mask is 0."""
        mask_NT = check_mask(mask_NT)
        rows = len(mask_NT)
        group_N, given = check_groups(group_N, rows), reward_N
        reward_N = check_rewards(reward_N, rows)
        per_token: list[Any] = [x for name, x in streams.items() if is_number_per_token(name)]
        wide = any(getattr(x, "dtype", None) == torch.float64 for x in per_token or [given])
        batch = cls(
            mask_NT=mask_NT,
            ones_NT=mask_NT.to(torch.float64 if wide else torch.float32),
            group_N=group_N.to(mask_NT.device),
            task_reward_N=reward_N.to(mask_NT.device),
            memory=memory or Memory(),
            world=world,
        )
        return batch.with_streams(**streams)

    def with_streams(self, **streams: Tensor) -> TokenBatch:
        """Return the batch with more of what the batch phase reads, checked like the rest."""
        wide = any(
            getattr(x, "dtype", None) == torch.float64
            for name, x in streams.items()
            if is_number_per_token(name)
        )
        ones_NT = self.mask_NT.to(torch.float64) if wide else self.ones_NT
        checked: dict[str, Any] = {
            name: check_stream(name, x, self.mask_NT, ones_NT, graph=name == "length_exponent")
            for name, x in streams.items()
        }
        return replace(self._holding(checked), ones_NT=ones_NT)

    def to(self, device: torch.device | str) -> TokenBatch:
        """Return the batch on this device."""
        moved: dict[str, Any] = {
            item.name: x.to(device)
            for item in fields(self)
            if isinstance(x := getattr(self, item.name), Tensor)
        }
        prepared = {
            name: {key: x.to(device) for key, x in parts.items()}
            for name, parts in self.prepared.items()
        }
        of_roles = {name: x.to(device) for name, x in self.of_roles.items()}
        return replace(self, scratch={}, prepared=prepared, of_roles=of_roles, **moved)

    @property
    def rows(self) -> int:
        """Return the number of answers of this rank."""
        return len(self.mask_NT)

    @property
    def dtype(self) -> torch.dtype:
        """Return the batch phase's precision: float64 if a stream came in float64, else float32."""
        return self.ones_NT.dtype

    @property
    def groups(self) -> Groups:
        """Return which rows of all ranks answer the same prompt, numbered from 0."""

        def numbered() -> Groups:
            ids_P, index_M = torch.unique(self.world.gather(self.group_N), return_inverse=True)
            return Groups(ids_P, index_M)

        return self.once("groups", (self.group_N,), numbered)

    def once(self, name: object, of: Sequence[Tensor], compute: Callable[[], X]) -> X:
        """Compute something of these tensors once, for all copies of the same rows and streams."""
        key = (name, *(id(x) for x in of))
        if key not in self.scratch:
            self.scratch[key] = (of, compute())  # holds them, so that nobody else has their ids
        found: X = self.scratch[key][1]
        return found

    @property
    def length_N(self) -> Tensor:
        """Return how many tokens of each row the policy wrote."""
        # Of numbers: several times faster than counting bools.
        return self.once("length", (self.ones_NT,), lambda: self.ones_NT.sum(1).long())

    @property
    def last_N(self) -> Tensor:
        """Return where each row's last valid token stands (anywhere for a row without one)."""
        return self.once("last", (self.mask_NT,), self._last_N)

    def _last_N(self) -> Tensor:
        if self.place_NT is None and self.mask_NT[:, 0].all():  # every row starts at its left end
            return self.length_N - 1
        number_T = torch.arange(1, self.mask_NT.shape[1] + 1, device=self.mask_NT.device)
        return (self.ones_NT * number_T).argmax(1)

    @property
    def place_NT(self) -> Tensor | None:
        """Return where valid tokens go when a tool's output between them is left out, if any is.

        Masked tokens go to one column behind the last.
        """
        return self.once("place", (self.mask_NT,), self._place_NT)

    def _place_NT(self) -> Tensor | None:
        starts_NT = self.mask_NT[:, 1:] & ~self.mask_NT[:, :-1]
        starts_N = as_numbers(starts_NT, self.dtype).sum(1)
        if not ((starts_N + self.mask_NT[:, 0]) > 1).any():
            return None
        return torch.where(self.mask_NT, self.mask_NT.cumsum(1) - 1, self.mask_NT.shape[1])

    @property
    def learned_NT(self) -> Tensor:
        """Return the tokens that the loss learns from, as numbers."""
        learn_N = self.stream("learn_N")
        return self.once(
            "learned", (self.ones_NT, learn_N), lambda: self.ones_NT * learn_N[:, None]
        )

    def valid(self, x: Tensor) -> Tensor:
        """Return a finite value per row or token, on the policy's own tokens; 0 elsewhere."""
        return (x if x.dim() == 2 else x[:, None]).to(self.ones_NT.dtype) * self.ones_NT

    def learned(self, x: Tensor) -> Tensor:
        """Return the same on the tokens that the loss learns from."""
        return (x if x.dim() == 2 else x[:, None]).to(self.ones_NT.dtype) * self.learned_NT

    def stream(self, name: str, reader: object = None) -> Tensor:
        """Return a stream that a slot needs: its `needs` say so, and the phases check it.

        Slots of users' files say who they are as `reader`; the slot that is called is known now.
        """
        x = self.find(name)
        if x is None:
            raise MissingStream(name, STREAMS.get(name, "computed by the batch phase"))
        return x

    def find(self, name: str) -> Tensor | None:
        """Return a stream, or None where the batch does not have it."""
        x: Tensor | None = self.of_roles[name] if name in self.of_roles else vars(self).get(name)
        return x

    def select(self, rows: Tensor | slice) -> TokenBatch:
        """Return a micro-batch: some rows (indices, bool mask or slice), with all they carry."""
        changes: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor) and value.dim() > 0:
                changes[item.name] = value[rows]
        changes["prepared"] = {
            name: {key: x[rows] for key, x in parts.items()}
            for name, parts in self.prepared.items()
        }
        changes["of_roles"] = {name: x[rows] for name, x in self.of_roles.items()}
        return replace(self, scratch={}, **changes)

    def keep(self, rows: Tensor) -> TokenBatch:
        """Make a batch of its own from some rows, before the batch phase: a filter dropped others.

        All ranks call it.
        """
        kept = self.select(rows)
        return replace(kept, world=self.world.for_rows(kept.rows))

    @classmethod
    def join(cls, batches: Sequence[TokenBatch]) -> TokenBatch:
        """Join several batches before their batch phase, for topping up what a filter dropped.

        All ranks call it. Rows keep their order; shorter ones are padded.
        """
        width = max(batch.mask_NT.shape[1] for batch in batches)
        joined: dict[str, Any] = {}
        names = [item.name for item in fields(cls)]
        for name in dict.fromkeys([*names, *(n for batch in batches for n in batch.of_roles)]):
            values = [x for batch in batches if (x := batch.find(name)) is not None]
            if any(isinstance(x, Tensor) and x.dim() > 0 for x in values):
                if len(values) < len(batches):
                    raise BatchError(f"Some of the batches to join have {name}, others not.")
                joined[name] = torch.cat([_widen(x, name, width) for x in values])
        whole = batches[0]._holding(joined)
        return replace(whole, world=batches[0].world.for_rows(whole.rows))

    def with_outputs(self, **outputs: Tensor) -> TokenBatch:
        """Return the batch with the learner's outputs, cleaned, in at least float32."""
        checked: dict[str, Any] = {
            name: check_stream(
                name, x, self.mask_NT, self.ones_NT, graph=True, look=not self.watched
            )
            for name, x in outputs.items()
        }
        return self._holding(checked)

    def _holding(self, streams: Mapping[str, Tensor]) -> TokenBatch:
        """Return the batch with these streams, each in its field or among those of roles."""
        known = {item.name for item in fields(self)}
        own: dict[str, Any] = {name: x for name, x in streams.items() if name in known}
        others = {name: x for name, x in streams.items() if name not in known}
        return replace(self, scratch={}, of_roles={**self.of_roles, **others}, **own)


def _widen(x: Tensor, name: str, width: int) -> Tensor:
    """Put zeros behind the last token of a stream with a token axis."""
    if not name.rsplit("_", 1)[1].startswith("NT") or x.shape[1] == width:
        return x
    behind = x.new_zeros((len(x), width - x.shape[1], *x.shape[2:]))
    return torch.cat([x, behind], 1)
