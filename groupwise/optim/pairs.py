"""Learning from pairs of answers: DPO and its relatives, in the same cycle as the others.

One update a step, on the mean loss of the step's pairs. Rows of a pair lie next to each other, the
chosen answer first, and share their prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from groupwise import config
from groupwise.common.progress import counted
from groupwise.losses.pairs import PairLoss, Pairs
from groupwise.methods.composition import PairRecipe
from groupwise.model.layers.transformer import Policy
from groupwise.optim.learner import Learner
from groupwise.optim.packs import Sequences, outputs
from groupwise.optim.roles.role import Role
from groupwise.optim.schedules import LearningRates
from groupwise.optim.step import Named, StepOutcome
from groupwise.parallel.world import ALONE, World


class PairLearner(Learner):
    """Makes the preferred of two answers likelier than the other, measured from the reference."""

    together = 2

    def __init__(
        self,
        model: Policy,
        recipe: PairRecipe,
        optim: config.Optim,
        temperature: float,
        roles: Mapping[str, Role] | None = None,
        world: World = ALONE,
    ) -> None:
        super().__init__(model, optim, temperature, roles, world)
        self.recipe = recipe

    def learn_pairs(
        self, pairs: Sequences, ref_logp_NT: Tensor | None, rates: LearningRates
    ) -> tuple[StepOutcome, dict[str, float]]:
        """Make one update; return it with what the pairs looked like before it."""
        losses: list[PairLoss] = []
        chosen = ChosenAnswers.of(pairs)
        assert rates.policy is not None  # no role of a pair recipe learns before the policy does
        accumulate = partial(self._accumulate, pairs, ref_logp_NT, losses, chosen)
        outcome = self.update(accumulate, rates.policy, rates.roles)
        if outcome.skipped:
            return outcome, {}
        return outcome, pair_metrics(losses, self.recipe) | {"pairs/chosen_nll": chosen.nll}

    def look_at(self, pairs: Sequences, ref_logp_NT: Tensor | None) -> tuple[PairLoss, Tensor]:
        """Return what the loss says of the pairs, and ℓ of the chosen answers; nothing learns."""
        every = list(range(len(pairs.completions)))
        policy_NT = self.score(self.model, pairs, [every])
        found = self._loss(every, policy_NT, ref_logp_NT, ChosenAnswers.of(pairs))
        return found, policy_NT.sum(1)[0::2]

    def _loss(
        self,
        rows: Sequence[int],
        logp_NT: Tensor,
        ref_NT: Tensor | None,
        chosen: ChosenAnswers,
    ) -> PairLoss:
        """Return the loss of these rows, the likelihood of the chosen answers included."""
        sums_N = logp_NT.sum(1)
        ref_N = None if ref_NT is None else ref_NT.sum(1)
        length_N = chosen.length_N[torch.as_tensor(rows)].to(sums_N)
        given = Pairs(
            sums_N[0::2],
            sums_N[1::2],
            None if ref_N is None else ref_N[0::2],
            None if ref_N is None else ref_N[1::2],
            length_N[0::2],
            length_N[1::2],
            chosen.mean_length,
        )
        found: PairLoss = self.recipe.preference(given)
        for term in self.recipe.likelihood:
            found = replace(found, loss_N=found.loss_N + term(given))
        return found

    def _accumulate(
        self,
        pairs: Sequences,
        ref_logp_NT: Tensor | None,
        losses: list[PairLoss],
        chosen: ChosenAnswers,
    ) -> list[Named]:
        losses.clear()
        chosen.logp = 0.0
        seen: list[Named] = []
        count = len(pairs.completions) // 2
        every = range(len(pairs.completions))
        for rows in counted("updating", self._cut(pairs, every), "micro-batches"):
            part = pairs.pack(rows, self.device)
            ref_NT = None if ref_logp_NT is None else ref_logp_NT[part.row_N]
            with self.dropping(rows[0]):
                logp_NT = outputs(self.model, part, temperature=self.temperature)["logp_NT"]
                seen.append(("logp_NT", logp_NT.detach()))
                # What is not finite skips the update, when all is computed; until then it is 0.
                logp_NT = logp_NT.nan_to_num(0.0, 0.0, 0.0)
                found = self._loss(rows, logp_NT, ref_NT, chosen)
                (found.loss_N.sum() / count).backward()  # type: ignore[no-untyped-call]
            losses.append(found)
            chosen.logp = chosen.logp + logp_NT.detach()[0::2].sum()
        return seen


@dataclass
class ChosenAnswers:
    """The chosen answers of an update: how many tokens they have, and how likely they were."""

    length_N: Tensor  # of every row, found once: the rejected answers' stand between
    logp: Tensor | float = 0.0

    @classmethod
    def of(cls, pairs: Sequences) -> ChosenAnswers:
        return cls(own_lengths(pairs))

    @property
    def tokens(self) -> int:
        return int(self.length_N[0::2].sum())

    @property
    def mean_length(self) -> float:
        return self.tokens / len(self.length_N[0::2])

    @property
    def nll(self) -> float:
        """Return −ℓ a token."""
        return -float(self.logp) / self.tokens


def own_lengths(sequences: Sequences) -> Tensor:
    """Return the tokens of each row that the policy is asked about."""
    return sequences.mask().sum(1)


def pair_metrics(losses: Sequence[PairLoss], recipe: PairRecipe) -> dict[str, float]:
    """Return the measures of all pairs, whatever the micro-batches."""
    together = PairLoss(
        **{name: torch.cat([vars(x)[name].detach() for x in losses]) for name in vars(losses[0])}
    )
    total = float(together.loss)
    found = together.metrics()
    if not recipe.refers:  # nothing to have moved away from
        del found["pairs/displaced_share"]
    return found | {
        "pairs/count": float(len(together.loss_N)),
        "loss/preference": total,
        "loss/total": total,
    }
