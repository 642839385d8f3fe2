"""Learning to score: one number at some tokens of a row, compared with others or with labels.

One update a step. Rows that are compared are never separated by a micro-batch, and every loss is a
share of the whole step's: any cut gives the same gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from groupwise import config
from groupwise.losses.scores import LabelledSteps, ScoredPairs
from groupwise.methods.slots import Slot
from groupwise.model.layers.transformer import Policy
from groupwise.model.memory import give_back
from groupwise.model.scalar_head import ScalarHead
from groupwise.optim.learner import Learner, Rows
from groupwise.optim.packs import Ids, Pack, Sequences, even
from groupwise.optim.step import Named, StepOutcome
from groupwise.parallel.world import ALONE, World


@dataclass(frozen=True)
class RowsAsked:
    """Rows whose numbers are asked for at some of their tokens; `units` stay together."""

    sequences: Sequences
    units: list[Rows]
    places: list[int]  # how many numbers each row has

    @classmethod
    def of(
        cls, prompts: Sequence[Ids], answers: Sequence[Ids], places: Sequence[Sequence[int]],
        units: list[Rows],
    ) -> RowsAsked:  # fmt: skip
        """Ask for the numbers at these tokens of the answers.

        A pack reads a row without its last token, and gives the hidden state before each token that
        a mask marks: so a row gets one more token, and the marks stand one further.
        """
        masks = []
        for ids, own in zip(answers, places, strict=True):
            mask_T = torch.zeros(len(ids) + 1, dtype=torch.bool)
            mask_T[[place + 1 for place in own]] = True
            masks.append(mask_T)
        longer = [(*ids, ids[-1]) for ids in answers]
        return cls(Sequences(prompts, longer, masks), units, [len(own) for own in places])

    def cut(self, budget: int) -> list[Rows]:
        """Cut the rows into micro-batches of whole units, of `budget` tokens where they fit."""
        parts: list[Rows] = []
        room = 0
        lengths, prompts = self.sequences.length_N.tolist(), self.sequences.prompts
        for unit in self.units:
            cost = len(prompts[unit[0]]) + sum(lengths[row] - 1 for row in unit)
            if not parts or cost > room:
                parts.append([])
                room = budget
            parts[-1] += unit
            room -= cost
        return parts


class ScoreLoss(Protocol):
    """A loss over the numbers of some rows: their share of the whole step's."""

    def __call__(self, rows: Rows, score_A: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class PairComparisons:
    """Pairs of rows, each row with one number; a weight says how much a pair counts of all."""

    preference: Slot
    better: list[int]
    worse: list[int]
    margin: list[float]
    weight: list[float]

    def pairs(self, score_N: Tensor, chosen: Sequence[int] | None = None) -> ScoredPairs:
        """Return all pairs, or the `chosen` ones, with scores by the number of their rows."""
        which = range(len(self.better)) if chosen is None else chosen
        margin_N = [self.margin[pair] for pair in which]
        return ScoredPairs(
            score_N[[self.better[pair] for pair in which]],
            score_N[[self.worse[pair] for pair in which]],
            torch.tensor(margin_N, dtype=score_N.dtype, device=score_N.device),
        )

    def __call__(self, rows: Rows, score_A: Tensor) -> Tensor:
        here = set(rows)
        own = [pair for pair, row in enumerate(self.better) if row in here]
        score_N = score_A.new_zeros(max(rows) + 1).index_copy(
            0, torch.tensor(rows, device=score_A.device), score_A
        )
        loss_N: Tensor = self.preference(self.pairs(score_N, own))
        weight_N = torch.tensor([self.weight[pair] for pair in own], device=loss_N.device)
        return (loss_N * weight_N.to(loss_N.dtype)).sum()


@dataclass(frozen=True)
class StepLabels:
    """Labels of the steps of each row; None where a step has none."""

    labelling: Slot
    labels: list[tuple[float | None, ...]]

    @property
    def count(self) -> int:
        return sum(label is not None for row in self.labels for label in row)

    def __call__(self, rows: Rows, score_A: Tensor) -> Tensor:
        label_A = [label for row in rows for label in self.labels[row]]
        known = [at for at, label in enumerate(label_A) if label is not None]
        label_N = torch.tensor(
            [label_A[at] for at in known], dtype=score_A.dtype, device=score_A.device
        )
        loss_N: Tensor = self.labelling(LabelledSteps(score_A[known], label_N))
        return loss_N.sum() / max(self.count, 1)


class ScoreLearner(Learner):
    """Teaches a model with one number a token, where some tokens are asked."""

    def __init__(self, head: ScalarHead, optim: config.Optim, world: World = ALONE) -> None:
        self.whole_head = head
        super().__init__(head.trunk, optim, temperature=1.0, world=world)

    def held(self, model: Policy) -> Policy:
        self.whole = self.whole_head
        self.own = self.head = self.world.shard(self.whole_head)
        return self.head.trunk

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.head.learning_parameters()

    def learn(
        self, asked: RowsAsked, loss: ScoreLoss, learning_rate: float
    ) -> tuple[StepOutcome, Tensor, float]:
        """Make one update; return it, the numbers before it in the order of rows, and the loss."""
        found: dict[int, Tensor] = {}
        shares: list[Tensor] = []
        accumulate = partial(self._accumulate, asked, loss, found, shares)
        outcome = self.update(accumulate, learning_rate)
        total = float(torch.stack(shares).sum()) if shares else 0.0
        return outcome, _in_order(asked, found), total

    @torch.no_grad()
    def ask(self, asked: RowsAsked) -> Tensor:
        """Return the numbers of all rows, in their order, without learning."""
        while True:
            found: dict[int, Tensor] = {}
            try:
                cut = self._units(asked)
                for work in self.work("scoring", asked.sequences, cut):
                    part = asked.sequences.pack(work.rows, self.device)
                    found |= _by_row(asked, work.rows, self._scores(part))
                return _in_order(asked, self._everybodys(found))
            except Exception as error:
                self._halve(error)
            give_back()  # now that the error holds on to nothing

    def _accumulate(
        self, asked: RowsAsked, loss: ScoreLoss, found: dict[int, Tensor], shares: list[Tensor]
    ) -> list[Named]:
        found.clear()
        mine: dict[int, Tensor] = {}
        seen: list[Named] = []
        for work in self.work("updating", asked.sequences, self._units(asked)):
            rows, part = work.rows, asked.sequences.pack(work.rows, self.device)
            with self.dropping(rows[0]):
                score_A = self._scores(part)
                seen.append(("score_A", score_A.detach()))
                # What is not finite skips the update, when all is computed; until then it is 0.
                share = loss(rows, score_A.nan_to_num(0.0, 0.0, 0.0))
                work.backward(share)
            if work.turn.counts:
                found |= _by_row(asked, rows, score_A.detach())
                mine[work.turn.number] = share.detach()
        found |= self._everybodys(found)
        shares[:] = self.world.merge(mine)
        return seen

    def _units(self, asked: RowsAsked) -> list[Rows]:
        return even(asked.cut, self.micro_tokens, self.world.size)

    def _everybodys(self, found: dict[int, Tensor]) -> dict[int, Tensor]:
        """Return the numbers of all rows, whoever asked for them."""
        return dict(self.world.merge({row: (row, x) for row, x in found.items()}))

    def _scores(self, part: Pack) -> Tensor:
        attend = self.model.ops.attention(part.prompts, part.behind, part.token_T.device)
        score_A: Tensor = self.head(part.token_T, part.position_T, attend, part.take_A)
        return score_A


def _by_row(asked: RowsAsked, rows: Rows, score_A: Tensor) -> dict[int, Tensor]:
    own = torch.split(score_A, [asked.places[row] for row in rows])
    return dict(zip(rows, own, strict=True))


def _in_order(asked: RowsAsked, found: dict[int, Tensor]) -> Tensor:
    return torch.cat([found[row] for row in range(len(asked.places))])
