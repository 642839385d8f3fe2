"""Rows of a batch as the model reads them: micro-batches by tokens, prompts computed once.

A micro-batch is a pack: the prompt of a group, then its completions behind it. The log-probability
of a completion's first token comes from the prompt's last hidden state, and the last token of a
completion is predicted but never read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.common.progress import counted
from groupwise.model.cost import Group
from groupwise.model.layers.head import HeadQuery, Opposite
from groupwise.model.layers.routes import Routes
from groupwise.model.layers.transformer import PolicyModel
from groupwise.model.scalar_head import ScalarHead
from groupwise.parallel.world import ALONE, World
from groupwise.records import Task

Ids = tuple[int, ...]
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Sequences:
    """Prompt and completion of every row. Rows of a group lie next to each other.

    Where others than the policy wrote some of a completion, `masks` has its `mask_T`. Lengths,
    places, packs and costs are of all tokens, for all are read; only the policy's are predicted.

    Packs are made once and kept: a step's passes (scoring, reference, update) read the same ones.
    """

    prompts: Sequence[Ids]
    completions: Sequence[Ids]
    masks: Sequence[Tensor | None] = ()  # of each row, None: all; or none for any row
    tasks: Sequence[Task] = ()  # of each row, for roles that read more of it than its prompt
    routes: Sequence[Tensor | None] = ()  # of each row, as the sampler recorded them

    @property
    def width(self) -> int:
        return int(self.length_N.max())

    @cached_property
    def length_N(self) -> Numbers:
        """Return the tokens of each completion."""
        return _counts(self.completions)

    @cached_property
    def run_N(self) -> Numbers:
        """Return numbers that neighbours with the same prompt share."""
        before = (None, *self.prompts)
        new = [a is not b and a != b for a, b in zip(self.prompts, before, strict=False)]
        return np.cumsum(np.array(new, np.int64)) - 1

    @cached_property
    def prompt_R(self) -> Numbers:
        """Return the tokens of each run's prompt."""
        return _counts(self._run_prompts)

    @cached_property
    def token(self) -> Numbers:
        """Return all token ids end to end: the prompt of every run, then every completion."""
        total = int(self.prompt_R.sum() + self.length_N.sum())
        every = chain(self._run_prompts, self.completions)
        return np.fromiter(chain.from_iterable(every), dtype=np.int64, count=total)

    @property
    def prompt_at_R(self) -> Numbers:
        """Return where each prompt begins in `token`."""
        return np.cumsum(self.prompt_R) - self.prompt_R

    @property
    def at_N(self) -> Numbers:
        """Return where each completion begins in `token`."""
        return np.cumsum(self.length_N) - self.length_N + self.prompt_R.sum()

    @property
    def _run_prompts(self) -> list[Ids]:
        first_R = np.flatnonzero(np.diff(self.run_N, prepend=-1))
        return [self.prompts[row] for row in first_R.tolist()]

    @cached_property
    def _packs(self) -> dict[tuple[tuple[int, ...], str], Pack]:
        return {}

    def pack(self, rows: Sequence[int], device: torch.device | str = "cpu") -> Pack:
        """Return the pack of these rows, made when it is asked for the first time."""
        key = (tuple(rows), str(device))
        if key not in self._packs:
            self._packs[key] = pack(self, rows, self.width, device)
        return self._packs[key]

    def cost(self, rows: Sequence[int]) -> int:
        """Return the tokens of a pack of these rows."""
        runs = np.unique(self.run_N[list(rows)])
        return int(self.length_N[list(rows)].sum() - len(rows) + self.prompt_R[runs].sum())

    def sizes(self) -> list[Group]:
        """Return their tokens, for counting what they cost."""
        cuts = np.flatnonzero(np.diff(self.run_N, prepend=-1)).tolist()
        length, prompts = self.length_N.tolist(), self.prompt_R.tolist()
        spans_R = pairwise([*cuts, len(length)])
        return [Group(p, length[a:b]) for p, (a, b) in zip(prompts, spans_R, strict=True)]

    @cached_property
    def own(self) -> NDArray[np.bool_] | None:
        """Tell which tokens of all completions, end to end, the policy wrote; None: all."""
        if all(mask_T is None for mask_T in self.masks):
            return None
        rows = zip(self.masks, self.completions, strict=True)
        return np.concatenate(
            [np.ones(len(ids), bool) if mask is None else mask.numpy() for mask, ids in rows]
        )

    def layout(self) -> Tensor:
        """Tell where a token stands, whoever wrote it; bool [N, T]."""
        return torch.arange(self.width) < torch.from_numpy(self.length_N)[:, None]

    def mask(self) -> Tensor:
        """Return mask_NT: where a token of the policy stands."""
        mask_NT = self.layout()
        if self.own is not None:
            mask_NT[mask_NT.clone()] = torch.from_numpy(self.own)
        return mask_NT

    def tokens(self) -> Tensor:
        """Return token_NT, padded with 0."""
        token_NT = torch.zeros(len(self.completions), self.width, dtype=torch.long)
        token_NT[self.layout()] = torch.from_numpy(self.token[self.prompt_R.sum() :])
        return token_NT


@dataclass(frozen=True)
class Pack:
    """One forward pass: tokens of some rows, and which hidden state predicts which token."""

    rows: list[int]
    width: int  # of the batch
    prompts: list[int]  # tokens of each prompt, and of what is read of the completions behind it
    behind: list[list[int]]
    read_T: Numbers  # where each of its tokens stands in `Sequences.token`; on the host
    token_T: Tensor
    position_T: Tensor
    take_A: Tensor  # the hidden state that predicts each of the policy's tokens, row by row
    target_A: Tensor
    place_A: Tensor  # where that token stands in [rows, width], flat
    row_N: Tensor  # the rows once more, on the device

    @property
    def mask_NT(self) -> Tensor:
        """Return the policy's tokens of these rows, as the batch has them."""
        flat = torch.zeros(len(self.rows) * self.width, dtype=torch.bool, device=self.row_N.device)
        return flat.index_fill(0, self.place_A, True).view(len(self.rows), self.width)

    def spread(self, x_A: Tensor) -> Tensor:
        """Spread values per predicted token over [rows, width, ...], with 0 elsewhere."""
        shape = (len(self.rows), self.width, *x_A.shape[1:])
        zeros = x_A.new_zeros(len(self.rows) * self.width, *x_A.shape[1:])
        return zeros.index_copy(0, self.place_A, x_A).view(shape)

    def collect(self, x_NT: Tensor) -> Tensor:
        """Collect values per predicted token from [rows, width, ...]: the other way round."""
        return x_NT.flatten(0, 1).index_select(0, self.place_A)


def micro_batches(
    sequences: Sequences, rows: Sequence[int], budget: int, together: int = 1
) -> list[list[int]]:
    """Cut rows in order so that a pack has at most `budget` tokens (or what stays `together`).

    Rows that stay together are neighbours with one prompt.
    """
    length, run = sequences.length_N.tolist(), sequences.run_N.tolist()
    prompt = sequences.prompt_R.tolist()
    parts: list[list[int]] = []
    room = 0
    for at in range(0, len(rows), together):
        some = rows[at : at + together]
        number = run[some[0]]
        answers = sum(length[row] - 1 for row in some)
        shares = bool(parts) and run[parts[-1][-1]] == number
        cost = answers if shares else answers + prompt[number]
        if not parts or cost > room:
            parts.append([])
            cost, room = answers + prompt[number], budget
        parts[-1] += some
        room -= cost
    return parts


def even(cut: Callable[[int], list[list[int]]], budget: int, ranks: int) -> list[list[int]]:
    """Cut with the smallest budget that gives each rank as few micro-batches as `budget` would.

    So they are of nearly equal size, and all ranks have something to do where there are rows.
    """
    parts = cut(budget)
    if ranks == 1:
        return parts
    wanted = -(-len(parts) // ranks) * ranks
    low, high = 0, budget
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= wanted else (middle, high)
    return cut(high)


def pack(
    sequences: Sequences, rows: Sequence[int], width: int, device: torch.device | str = "cpu"
) -> Pack:
    """Prepare the forward pass of these rows; neighbours with the same prompt share it.

    Its segments are prompt, completion, completion, ..., prompt, ...; a completion is read without
    its last token.
    """
    row_N = np.asarray(rows, np.int64)
    run_N, answer_N = sequences.run_N[row_N], sequences.length_N[row_N]
    at_R = np.flatnonzero(np.diff(run_N, prepend=-1))  # rows with a prompt in front of them
    run_R = run_N[at_R]

    def segments(of_prompts: Numbers, of_rows: Numbers) -> Numbers:
        return np.insert(of_rows, at_R, of_prompts)

    size = segments(sequences.prompt_R[run_R], answer_N - 1)
    start = np.cumsum(size) - size
    reads_prompt = segments(np.ones_like(run_R), np.zeros_like(run_N)) == 1
    last_R = start[reads_prompt] + size[reads_prompt] - 1
    take_A = spans(start[~reads_prompt] - 1, answer_N)
    rows_R = np.diff(at_R, append=len(row_N))
    take_A[np.cumsum(answer_N) - answer_N] = np.repeat(last_R, rows_R)  # each row's first token
    target = spans(sequences.at_N[row_N], answer_N)  # in `token`
    place_A = spans(np.arange(len(row_N)) * width, answer_N)
    if sequences.own is not None:
        # What others wrote is read and never predicted: that saves the head's work, and a tool's
        # text that the policy holds for impossible is no reason to skip an update.
        own = sequences.own[target - sequences.prompt_R.sum()]
        take_A, target, place_A = take_A[own], target[own], place_A[own]
    read_T = spans(segments(sequences.prompt_at_R[run_R], sequences.at_N[row_N]), size)
    sent = send(
        [
            sequences.token[read_T],
            spans(segments(np.zeros_like(run_R), sequences.prompt_R[run_N]), size),
            take_A,
            sequences.token[target],
            place_A,
            row_N,
        ],
        device,
    )
    behind = [[n for n in some.tolist() if n] for some in np.split(answer_N - 1, at_R[1:])]
    return Pack(list(rows), width, size[reads_prompt].tolist(), behind, read_T, *sent)


def spans(start: Numbers, length: Numbers) -> Numbers:
    """Return start, start + 1, ... for each of the lengths, end to end."""
    offset = np.cumsum(length) - length
    return np.repeat(start - offset, length) + np.arange(int(length.sum()))


def send(arrays: Sequence[Numbers], device: torch.device | str) -> list[Tensor]:
    """Send to the device in one copy that the host does not wait for."""
    together = torch.from_numpy(np.concatenate(arrays))
    if torch.device(device).type == "cuda":
        together = together.pin_memory().to(device, non_blocking=True)
    else:
        together = together.to(device)
    return list(torch.split(together, [len(x) for x in arrays]))


def _counts(many: Sequence[Ids]) -> Numbers:
    return np.array([len(ids) for ids in many], np.int64)


def outputs(
    model: PolicyModel,
    part: Pack,
    *,
    temperature: float,
    top_k: int = 0,
    at: Mapping[str, Tensor] | None = None,
    against: Sequence[Opposite] = (),
    square_mass: bool = False,
    routes: Routes | None = None,
) -> dict[str, Tensor]:
    """Return the learner's outputs for the rows, as streams: logp_NT, entropy_NT, what is asked.

    `top_k` adds the policy's own likeliest tokens, `at` its view of those of others, by the name
    that it has as a stream, `against` its divergence from other models, and `square_mass` how often
    two of its samples agree. `routes` goes along.
    """
    at = at or {}
    # Made for each pass and not kept: on a CPU its masks are far larger than the tokens.
    attend = model.ops.attention(part.prompts, part.behind, part.token_T.device)
    query = HeadQuery(
        part.take_A,
        part.target_A,
        temperature=temperature,
        entropy=True,
        top_k=top_k,
        square_mass=square_mass,
        at_AK=torch.cat([part.collect(x) for x in at.values()], dim=1) if at else None,
        against=tuple(against),
    )
    found = model.predict(part.token_T, part.position_T, attend, query, routes)
    named: dict[str, Any] = {
        "logp_NT": found.logp_T,
        "entropy_NT": found.entropy_T,
        "topk_logp_NTK": found.topk_logp_TK,
        "topk_id_NTK": found.topk_id_TK,
        "teacher_divergence_NT": found.divergence_T,
        "square_mass_NT": found.square_mass_T,
    }
    if found.logp_at_TK is not None:
        widths = [x.shape[-1] for x in at.values()]
        named |= zip(at, torch.split(found.logp_at_TK, widths, dim=1), strict=True)
    return {name: part.spread(x) for name, x in named.items() if x is not None}


@torch.no_grad()
def read_rows(
    sequences: Sequences,
    parts: Sequence[Sequence[int]],
    device: torch.device,
    read: Callable[[Pack], Mapping[str, Tensor]],
    world: World = ALONE,
) -> dict[str, Tensor]:
    """Return what a model says of all rows, [N, T, ...], in the same micro-batches as the update's.

    Equal passes give equal bits: then a ratio that should be 1 is exactly 1.
    """
    found: dict[str, Tensor] = {}
    turns = world.deal([sequences.cost(rows) for rows in parts])
    for turn in counted("scoring", turns, "micro-batches"):
        part = sequences.pack(parts[turn.number], device)
        for name, x in read(part).items():
            if name not in found:
                dtype = torch.float32 if x.is_floating_point() else x.dtype
                shape = (len(sequences.completions), *x.shape[1:])
                found[name] = torch.zeros(shape, dtype=dtype, device=device)
            if turn.counts:
                found[name][part.row_N] = x.to(found[name].dtype)
    return {name: world.total(x) for name, x in found.items()}


def score(
    model: PolicyModel,
    sequences: Sequences,
    parts: Sequence[Sequence[int]],
    temperature: float,
    world: World = ALONE,
) -> Tensor:
    """Return logp_NT of all rows, without gradient."""

    def log_probs(part: Pack) -> dict[str, Tensor]:
        return {"logp_NT": outputs(model, part, temperature=temperature)["logp_NT"]}

    device = model.head_weight.device
    return read_rows(sequences, parts, device, log_probs, world)["logp_NT"]


def values(model: ScalarHead, part: Pack) -> Tensor:
    """Return value_NT of the rows: of the states before each of the policy's tokens.

    The value of a state is read where the next token is predicted, so the state behind the last
    token has none.
    """
    attend = model.trunk.ops.attention(part.prompts, part.behind, part.token_T.device)
    value_A: Tensor = model(part.token_T, part.position_T, attend, part.take_A)
    return part.spread(value_A)
