"""Learning from pairs of answers: DPO and its relatives, in the same cycle as the others.

One update a step, on the mean loss of the step's pairs. Rows of a pair lie next to each other, the
chosen answer first, and share their prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        self, pairs: Sequences, ref_logp_NT: Tensor, rates: LearningRates
    ) -> tuple[StepOutcome, dict[str, float]]:
        """Make one update; return it with what the pairs looked like before it."""
        losses: list[PairLoss] = []
        assert rates.policy is not None  # no role of a pair recipe learns before the policy does
        accumulate = partial(self._accumulate, pairs, ref_logp_NT, losses)
        outcome = self.update(accumulate, rates.policy, rates.roles)
        return outcome, {} if outcome.skipped else _metrics(losses)

    def _accumulate(
        self, pairs: Sequences, ref_logp_NT: Tensor, losses: list[PairLoss]
    ) -> list[Named]:
        losses.clear()
        seen: list[Named] = []
        count = len(pairs.completions) // 2
        every = range(len(pairs.completions))
        for rows in counted("updating", self._cut(pairs, every), "micro-batches"):
            part = pairs.pack(rows, self.device)
            ref_N = ref_logp_NT[part.row_N].sum(1)
            with self.dropping(rows[0]):
                logp_NT = outputs(self.model, part, temperature=self.temperature)["logp_NT"]
                seen.append(("logp_NT", logp_NT.detach()))
                # What is not finite skips the update, when all is computed; until then it is 0.
                sums_N = logp_NT.nan_to_num(0.0, 0.0, 0.0).sum(1)
                found: PairLoss = self.recipe.preference(
                    Pairs(sums_N[0::2], sums_N[1::2], ref_N[0::2], ref_N[1::2])
                )
                (found.loss_N.sum() / count).backward()  # type: ignore[no-untyped-call]
            losses.append(found)
        return seen


def _metrics(losses: Sequence[PairLoss]) -> dict[str, float]:
    """Return the measures of all pairs, whatever the micro-batches."""
    together = PairLoss(
        **{name: torch.cat([vars(x)[name].detach() for x in losses]) for name in vars(losses[0])}
    )
    total = float(together.loss)
    return together.metrics() | {
        "pairs/count": float(len(together.loss_N)),
        "loss/preference": total,
        "loss/total": total,
    }
