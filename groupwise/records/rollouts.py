"""A prompt's way through a run: task, completion, grade, rollout.

Task (a prompt), Completion (what the engine wrote), Grade (what the grader said), Rollout (the
three together).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from groupwise.errors import BatchError

Message = Mapping[str, Any]


POLICY = "assistant"  # the role of a turn that the policy wrote


class Turn(NamedTuple):
    """Who wrote a stretch of a completion's tokens, and from where to where."""

    role: str  # POLICY, or who else: "tool", "user", "environment", ...
    start: int  # the first of its tokens
    end: int  # one behind the last


class VersionRun(NamedTuple):
    """Tokens in a row that the same weights wrote."""

    version: int
    tokens: int
    pure: bool = True  # False: beside caches of older weights, so that no one policy wrote them


class CalledTool(NamedTuple):
    """A call of a tool in a turn."""

    name: str
    arguments: str  # as JSON
    status: str  # "ok", "failed", "timeout" or "refused"


class TurnFacts(NamedTuple):
    """Facts of a turn of the policy that an environment has answered."""

    reward: float | None = None  # that the environment gave it
    finish: str = "eos"  # what ended it, as `Completion.finish` has it
    version: int = 0  # of the weights that wrote it
    state: str | None = None  # the environment's name of the state that it was written in
    calls: tuple[CalledTool, ...] = ()
    seconds: float = 0.0  # that the environment took to answer it, by the clock


@dataclass(frozen=True)
class Episode:
    """How a completion that an environment has answered came to its end, beside its tokens."""

    # "answered" without another call, "done" as the environment says, or a limit: "max_turns",
    # "max_calls", "own_tokens", "context"; or a failure: "timeout", "error"; or "branched": a
    # program asked what does not go on from its conversation
    stop: str
    turns: tuple[TurnFacts, ...]  # of the policy, in order
    reward: float | None = None  # of the environment: of turns and whole; None: it gave none
    messages: tuple[Message, ...] = ()  # what was said behind the prompt, by all
    reason: str = ""  # of a failure, in words
    left_out: bool = False  # for the way in which it ended: it is not graded and not learned

    @property
    def failed(self) -> bool:
        """Return whether the environment failed."""
        return self.stop in ("timeout", "error")

    @property
    def broke_off(self) -> bool:
        """Return whether it has no end of its own, so that nothing was said of the whole."""
        return self.failed or self.stop == "branched"


class LearnedRow(NamedTuple):
    """A row of the data as token ids, and which of them are learned."""

    prompt_ids: tuple[int, ...]  # what stands before the first learned token
    token_ids: tuple[int, ...]  # from that token to the last learned one
    turns: tuple[Turn, ...]  # end to end, of `token_ids`
    learned: tuple[tuple[int, int], ...]  # from where to where, within `token_ids`

    @property
    def tokens(self) -> int:
        """Count all tokens that are read."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def mask_T(self) -> Tensor | None:
        """Return which tokens of `token_ids` are learned, bool; None: all of them."""
        if self.learned == ((0, len(self.token_ids)),):
            return None
        mask_T = torch.zeros(len(self.token_ids), dtype=torch.bool)
        for start, end in self.learned:
            mask_T[start:end] = True
        return mask_T


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
    # What a teacher reads in its place, where that is something else; filled up front.
    teacher_ids: tuple[int, ...] = ()
    row: LearnedRow | None = None  # what of it is learned, where it is: encoded once, up front


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
    # int16, of a mixture of experts, where asked for: which of them each token that was read
    # visited in each layer, the prompt's tokens first: all but the last have been read. -1: not
    # known, or a layer without experts
    routes_TLK: Tensor | None = None
    # Which weights wrote which tokens, end to end, where new ones came on the way; `version` is
    # the first of them. Empty: `version` wrote all
    runs: tuple[VersionRun, ...] = ()
    episode: Episode | None = None  # where an environment answered the policy

    def __post_init__(self) -> None:
        if self.runs:
            _check_runs(len(self.token_ids), self.version, self.runs)
        if self.mask_T is not None:
            _check_turns(len(self.token_ids), self.mask_T, self.turns)
        elif len(self.turns) <= 1 and all(turn.role == POLICY for turn in self.turns):
            # Also where the tokens of another completion were replaced.
            object.__setattr__(self, "turns", (Turn(POLICY, 0, len(self.token_ids)),))
        else:
            raise BatchError(
                f"A completion without mask_T is one turn by the policy, of {len(self.token_ids)} "
                "tokens here. Say with mask_T which tokens the policy wrote, or leave turns out."
            )

    @property
    def versions(self) -> tuple[VersionRun, ...]:
        """Return which weights wrote which of all its tokens."""
        return self.runs or (VersionRun(self.version, len(self.token_ids)),)

    @property
    def truncated(self) -> bool:
        """Tell whether it was cut off at the limit."""
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
    def own_turns(self) -> tuple[Turn, ...]:
        """Return the policy's turns."""
        return tuple(turn for turn in self.turns if turn.role == POLICY)

    @property
    def last_turn(self) -> Turn:
        """Return the policy's last turn: what it says in the end."""
        return next(turn for turn in reversed(self.turns) if turn.role == POLICY)


def _check_runs(length: int, version: int, runs: tuple[VersionRun, ...]) -> None:
    """Refuse versions that do not cover the tokens, each with one at least."""
    if sum(run.tokens for run in runs) != length or min(run.tokens for run in runs) < 1:
        raise BatchError(f"The runs must cover the {length} tokens end to end, got {runs}.")
    if runs[0].version != version:
        raise BatchError(f"The first of {runs} is not of the completion's version, {version}.")


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


class Branch(NamedTuple):
    """Which of the answers that go on from within another one it is."""

    at: int  # how many of the other's tokens it begins with
    number: int  # among those that begin there


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
    branch: Branch | None = None  # of an answer that goes on from within the sample

    @property
    def said(self) -> str:
        """Return what the policy says in the end: all that is judged as its words."""
        return self.text if self.last_text is None else self.last_text
