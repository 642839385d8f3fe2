"""The nouns. Tensor names carry their axes: `_N` sequence (row), `_T` token, `_K` top-k entry.

In the order of the cycle: Task (a prompt), Completion (what the engine wrote), Grade (what the
grader said), Rollout (the three together), TokenBatch (the rollouts as the two phases read them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from groupwise.errors import BatchError, MissingStream
from groupwise.parallel.world import ALONE, World
from groupwise.streams import (
    FLOAT_STREAMS,
    STREAMS,
    check_groups,
    check_mask,
    check_rewards,
    check_stream,
)

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """A prompt and what its answer is checked with."""

    id: int  # the row's number in its source: the same in every run
    prompt: str | tuple[Message, ...]
    answer: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)  # all others, for the reward
    token_ids: tuple[int, ...] = ()  # the prompt as the model reads it; filled up front
    source: str = ""  # which of several sources it is from
    grader: str = ""  # the row's own, for the part `row` of a reward


POLICY = "assistant"  # the role of a turn that the policy wrote


class Turn(NamedTuple):
    """Who wrote a stretch of a completion's tokens, and from where to where."""

    role: str  # POLICY, or who else: "tool", "user", "environment", ...
    start: int  # the first of its tokens
    end: int  # one behind the last


@dataclass(frozen=True)
class Completion:
    """A completion of one prompt, token by token; never re-encoded from text.

    The policy wrote all of it, in one turn, unless `mask_T` and `turns` say otherwise: then tools,
    environments or the data wrote the rest. Every token is read, and has its place and its cost;
    what is learned, counted and measured is the policy's own.
    """

    token_ids: tuple[int, ...]  # the token that ended it included
    # float32: of each token under the distribution that it was drawn from; anything where the
    # policy did not draw it
    logp_T: Tensor
    finish: Literal["eos", "stop", "length"]  # an end token, a stop string, the limit
    version: int  # of the weights: the number of updates before them
    weights: str = "shared"  # the learner's own, or which copy: "int8", "stale:2", "noise:0.1"
    topk_id_TK: Tensor | None = None  # the sampler's likeliest tokens, where asked for
    topk_logp_TK: Tensor | None = None
    mask_T: Tensor | None = None  # bool: the tokens that the policy wrote; None: all of them
    turns: tuple[Turn, ...] = ()  # end to end, of all tokens; filled in where the policy wrote all

    def __post_init__(self) -> None:
        if self.mask_T is not None:
            _check_turns(len(self.token_ids), self.mask_T, self.turns)
        elif {turn.role for turn in self.turns} <= {POLICY} and len(self.turns) <= 1:
            # Also where the tokens of another completion were replaced.
            object.__setattr__(self, "turns", (Turn(POLICY, 0, len(self.token_ids)),))
        else:
            raise BatchError(
                f"A completion without mask_T is one turn by the policy, of {len(self.token_ids)} "
                "tokens here. Say with mask_T which tokens the policy wrote, or leave turns out."
            )

    @property
    def truncated(self) -> bool:
        return self.finish == "length"

    @property
    def own_ids(self) -> tuple[int, ...]:
        """Return the tokens that the policy wrote."""
        if self.mask_T is None:
            return self.token_ids
        own_T = self.mask_T.tolist()
        return tuple(number for number, own in zip(self.token_ids, own_T, strict=True) if own)

    @property
    def own_length(self) -> int:
        """Count the tokens that the policy wrote: what a length means wherever one is judged."""
        return len(self.token_ids) if self.mask_T is None else int(self.mask_T.sum())

    @property
    def last_turn(self) -> Turn:
        """Return the policy's last turn: what it says in the end."""
        return next(turn for turn in reversed(self.turns) if turn.role == POLICY)


def _check_turns(length: int, mask_T: Tensor, turns: tuple[Turn, ...]) -> None:
    """Refuse a mask that does not fit the tokens, and turns that do not fit the mask."""
    if mask_T.dtype != torch.bool or mask_T.shape != (length,):
        raise BatchError(
            f"mask_T must be bool with one value for each of the {length} tokens, got "
            f"{mask_T.dtype} {tuple(mask_T.shape)}."
        )
    if not mask_T.any():
        raise BatchError("A completion without a token of the policy teaches nothing: leave it out")
    starts = [0, *(turn.end for turn in turns)]
    if [turn.start for turn in turns] != starts[:-1] or starts[-1] != length:
        raise BatchError(f"The turns must cover the {length} tokens end to end, got {turns}.")
    for turn in turns:
        if turn.start >= turn.end:
            raise BatchError(f"A turn has at least one token, {turn} has none.")
        if turn.role != POLICY and mask_T[turn.start : turn.end].any():
            raise BatchError(
                f"mask_T says that the policy wrote tokens of {turn}: its turns have the role "
                f"{POLICY!r}."
            )


@dataclass(frozen=True)
class Grade:
    """A reward, its parts, and how it came about. No reward (None) is not a reward of 0."""

    reward: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)  # before weights
    correct: bool | None = None  # for accuracies; None where nothing says so
    status: Literal["ok", "abstained", "error", "timeout"] = "ok"
    reason: str = ""
    steps: tuple[tuple[int, float], ...] = ()  # process rewards: (end in the text, reward)


@dataclass(frozen=True)
class Rollout:
    """One sample: a row of a batch and of the rollout files."""

    task: Task
    draw: int  # how often the prompt had been drawn before
    sample: int  # number within the group
    completion: Completion
    text: str  # the completion's tokens decoded, special tokens included, whoever wrote them
    grade: Grade
    last_text: str | None = None  # the policy's last turn, where others wrote some of the text

    @property
    def said(self) -> str:
        """Return what the policy says in the end: all that is judged as its words."""
        return self.text if self.last_text is None else self.last_text


@dataclass(frozen=True)
class Visit:
    """One earlier batch's rewards of one prompt, as far as later batches need them."""

    size: int
    mean: float
    var: float


@dataclass(frozen=True)
class Memory:
    """Values that batch phases hand on to later batches; part of a checkpoint."""

    visits: Mapping[int, tuple[Visit, ...]] = field(default_factory=dict)
    reward_average: float | None = None


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
    greedy_reward_N: Tensor | None = None
    correct_N: Tensor | None = None
    truncated_N: Tensor | None = None
    segment_NT: Tensor | None = None
    token_NT: Tensor | None = None
    sampler_topk_logp_NTK: Tensor | None = None
    sampler_topk_id_NTK: Tensor | None = None
    old_router_NTLK: Tensor | None = None
    memory: Memory = field(default_factory=Memory)
    world: World = ALONE

    # Filled by the batch phase.
    reward_N: Tensor | None = None  # shaped
    learn_N: Tensor | None = None  # bool: rows in the loss (not overlong, not ungraded)
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
    length_exponent: Tensor | None = None

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
        per_token: list[Any] = [x for name, x in streams.items() if name in FLOAT_STREAMS]
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
            if name in FLOAT_STREAMS
        )
        ones_NT = self.mask_NT.to(torch.float64) if wide else self.ones_NT
        checked: dict[str, Any] = {
            name: check_stream(name, x, self.mask_NT, ones_NT, graph=name == "length_exponent")
            for name, x in streams.items()
        }
        return replace(self, ones_NT=ones_NT, **checked)

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
        return replace(self, prepared=prepared, **moved)

    @property
    def rows(self) -> int:
        return len(self.mask_NT)

    @property
    def dtype(self) -> torch.dtype:
        """Return the batch phase's precision: float64 if a stream came in float64, else float32."""
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
        """Return where each row's last valid token stands (anywhere for a row without one)."""
        if self.place_NT is None and self.mask_NT[:, 0].all():  # every row starts at its left end
            return self.length_N - 1
        number_T = torch.arange(1, self.mask_NT.shape[1] + 1, device=self.mask_NT.device)
        return (self.ones_NT * number_T).argmax(1)

    @cached_property
    def scratch(self) -> dict[Any, Any]:
        """Keep what several slots of one batch phase compute alike."""
        return {}

    @cached_property
    def place_NT(self) -> Tensor | None:
        """Return where valid tokens go when a tool's output between them is left out, if any is.

        Masked tokens go to one column behind the last.
        """
        starts_N = (self.mask_NT[:, 1:] & ~self.mask_NT[:, :-1]).sum(1, dtype=torch.int32)
        if not ((starts_N + self.mask_NT[:, 0]) > 1).any():
            return None
        return torch.where(self.mask_NT, self.mask_NT.cumsum(1) - 1, self.mask_NT.shape[1])

    @cached_property
    def learned_NT(self) -> Tensor:
        """Return the tokens that the loss learns from, as numbers."""
        return self.ones_NT * self.stream("learn_N")[:, None]

    def valid(self, x: Tensor) -> Tensor:
        """Return a finite value per row or token, on the policy's own tokens; 0 elsewhere."""
        return (x if x.dim() == 2 else x[:, None]).to(self.ones_NT.dtype) * self.ones_NT

    def learned(self, x: Tensor) -> Tensor:
        """Return the same on the tokens that the loss learns from."""
        return (x if x.dim() == 2 else x[:, None]).to(self.ones_NT.dtype) * self.learned_NT

    def stream(self, name: str) -> Tensor:
        """Return a stream that a slot needs: its `needs` say so, and the phases check it."""
        x: Tensor | None = getattr(self, name)
        if x is None:
            raise MissingStream(name, STREAMS.get(name, "computed by the batch phase"))
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
        return replace(self, **changes)

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
        for item in fields(cls):
            values = [getattr(batch, item.name) for batch in batches]
            if any(isinstance(x, Tensor) and x.dim() > 0 for x in values):
                if any(x is None for x in values):
                    raise BatchError(f"Some of the batches to join have {item.name}, others not.")
                joined[item.name] = torch.cat([_widen(x, item.name, width) for x in values])
        whole = replace(batches[0], **joined)
        return replace(whole, world=batches[0].world.for_rows(whole.rows))

    def with_outputs(self, **outputs: Tensor) -> TokenBatch:
        """Return the batch with the learner's outputs, cleaned, in at least float32."""
        checked: dict[str, Any] = {
            name: check_stream(
                name, x, self.mask_NT, self.ones_NT, graph=True, look=not self.watched
            )
            for name, x in outputs.items()
        }
        return replace(self, **checked)


def _widen(x: Tensor, name: str, width: int) -> Tensor:
    """Put zeros behind the last token of a stream with a token axis."""
    if not name.rsplit("_", 1)[1].startswith("NT") or x.shape[1] == width:
        return x
    behind = x.new_zeros((len(x), width - x.shape[1], *x.shape[2:]))
    return torch.cat([x, behind], 1)
