"""Learning from pairs of answers: DPO and its relatives, in the same cycle as the others.

One update a step, on the mean loss of the step's pairs. Rows of a pair lie next to each other, the
chosen answer first, and share their prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from groupwise import config
from groupwise.losses.pairs import PairLoss, Pairs
from groupwise.methods.composition import PairRecipe
from groupwise.model.layers.transformer import Policy
from groupwise.optim.learner import Learner, Scoring
from groupwise.optim.packs import Pack, Sequences, outputs
from groupwise.optim.roles.role import Role
from groupwise.optim.schedules import LearningRates
from groupwise.optim.step import Named, StepOutcome
from groupwise.parallel.world import ALONE, World
from groupwise.records import Average, Memory


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
        self,
        pairs: Sequences,
        ref_logp_NT: Tensor | None,
        rates: LearningRates,
        memory: Memory,
    ) -> tuple[StepOutcome, dict[str, float], Memory]:
        """Make one update; return it, what the pairs looked like before it, and what to remember.

        A loss that compares all pairs of the update first sees them all, without gradient.
        """
        seen = self._look(pairs) if self.recipe.looks_first else {}
        whole = whole_update(self.recipe, own_places(pairs), seen, ref_logp_NT, memory)
        losses: list[PairLoss] = []
        assert rates.policy is not None  # no role of a pair recipe learns before the policy does
        accumulate = partial(self._accumulate, pairs, ref_logp_NT, losses, whole)
        outcome = self.update(accumulate, rates.policy, rates.roles)
        if outcome.skipped:
            return outcome, {}, memory
        found = pair_metrics(losses, self.recipe) | {"pairs/chosen_nll": whole.nll}
        return outcome, found, remembered(self.recipe, whole, memory)

    def look_at(self, pairs: Sequences, ref_logp_NT: Tensor | None) -> tuple[PairLoss, Tensor]:
        """Return what the loss says of the pairs, and ℓ of the chosen answers; nothing learns.

        A running baseline is that of these pairs alone.
        """
        seen = self._look(pairs)
        whole = whole_update(self.recipe, own_places(pairs), seen, ref_logp_NT, Memory())
        every = range(len(pairs.completions))
        found = loss_of(self.recipe, every, seen["logp_NT"], ref_logp_NT, whole)
        return found, seen["logp_NT"].sum(1)[0::2]

    def _look(self, pairs: Sequences) -> dict[str, Tensor]:
        """Return what the policy says of all tokens, without gradient."""
        weighs = bool(self.recipe.weighing)

        def read(part: Pack) -> dict[str, Tensor]:
            found = outputs(self.model, part, temperature=self.temperature, square_mass=weighs)
            return {name: x for name, x in found.items() if name != "entropy_NT"}

        every = list(range(len(pairs.completions)))
        return Scoring(self, pairs, [every]).streams(read)

    def _accumulate(
        self,
        pairs: Sequences,
        ref_logp_NT: Tensor | None,
        losses: list[PairLoss],
        whole: WholeUpdate,
    ) -> list[Named]:
        found_here: dict[int, tuple[PairLoss, Tensor]] = {}
        seen: list[Named] = []
        count = len(pairs.completions) // 2
        every = range(len(pairs.completions))
        for work in self.work("updating", pairs, self._cut(pairs, every)):
            rows, part = work.rows, pairs.pack(work.rows, self.device)
            ref_NT = None if ref_logp_NT is None else ref_logp_NT[part.row_N]
            with self.dropping(rows[0]):
                logp_NT = outputs(self.model, part, temperature=self.temperature)["logp_NT"]
                seen.append(("logp_NT", logp_NT.detach()))
                # What is not finite skips the update, when all is computed; until then it is 0.
                logp_NT = logp_NT.nan_to_num(0.0, 0.0, 0.0)
                found = loss_of(self.recipe, rows, logp_NT, ref_NT, whole)
                work.backward(found.loss_N.sum() / count)
            if work.turn.counts:
                found_here[work.turn.number] = found, logp_NT.detach()[0::2].sum()
        everybodys = self.world.merge(found_here)
        losses[:] = [loss for loss, _ in everybodys]
        whole.chosen_logp = sum((logp for _, logp in everybodys), torch.zeros(()))
        return seen


@dataclass
class WholeUpdate:
    """The facts of all pairs of an update that each micro-batch needs."""

    place_NT: Tensor  # of every row: its tokens that the policy is asked about, from 1; else 0
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # a number a pair, by the loss
    weight_N: Tensor | None = None  # of every pair
    chosen_logp: Tensor | float = 0.0  # of all chosen answers, added up on the way

    @cached_property
    def length_N(self) -> Tensor:
        """Return the tokens of every row."""
        return self.place_NT.amax(1)

    @property
    def tokens(self) -> int:
        """Count the tokens of the chosen answers."""
        return int(self.length_N[0::2].sum())

    @property
    def mean_length(self) -> float:
        return self.tokens / len(self.length_N[0::2])

    @property
    def nll(self) -> float:
        """Return −ℓ a token of the chosen answers."""
        return -float(self.chosen_logp) / self.tokens


def whole_update(
    recipe: PairRecipe,
    place_NT: Tensor,
    seen: Mapping[str, Tensor],
    ref_NT: Tensor | None,
    memory: Memory,
) -> WholeUpdate:
    """Return what a micro-batch must know of all pairs, of what the policy says of them before it.

    Most losses need no more than lengths, and nothing that was `seen`.
    """
    whole = WholeUpdate(place_NT)
    if not recipe.looks_first:
        return whole
    given = _pairs(recipe, range(len(place_NT)), seen["logp_NT"], ref_NT, whole)
    loss = recipe.preference
    made = loss.definition.traits.prepare(
        replace(given, average=memory.pair_reward), dict(loss.params)
    )
    return replace(whole, columns=made, weight_N=_weights(recipe, seen, whole))


def loss_of(
    recipe: PairRecipe,
    rows: Sequence[int],
    logp_NT: Tensor,
    ref_NT: Tensor | None,
    whole: WholeUpdate,
) -> PairLoss:
    """Return the loss of these rows, weighed, the likelihood of the chosen answers included."""
    given = _pairs(recipe, rows, logp_NT, ref_NT, whole)
    found: PairLoss = recipe.preference(given)
    if whole.weight_N is not None:
        found = replace(found, loss_N=found.loss_N * _of_pairs(rows, whole.weight_N))
    if recipe.likelihood:  # of all tokens, however the preference sums them
        plain = replace(given, chosen_logp_N=logp_NT.sum(1)[0::2])
        for term in recipe.likelihood:
            found = replace(found, loss_N=found.loss_N + term(plain))
    return found


def remembered(recipe: PairRecipe, whole: WholeUpdate, memory: Memory) -> Memory:
    """Return what later steps need of this one."""
    if recipe.preference.definition.traits.remembers != "pair_reward":
        return memory
    steps = memory.pair_reward.steps + 1
    return replace(memory, pair_reward=Average(float(whole.columns["baseline_N"][0]), steps))


def _pairs(
    recipe: PairRecipe,
    rows: Sequence[int],
    logp_NT: Tensor,
    ref_NT: Tensor | None,
    whole: WholeUpdate,
) -> Pairs:
    """Return the pairs that lie in these rows, the chosen answer of each first."""
    index_N = torch.as_tensor(rows)
    place_NT = whole.place_NT[index_N].to(logp_NT.device)
    length_N = place_NT.amax(1)
    shorter_N = torch.minimum(length_N[0::2], length_N[1::2]).repeat_interleave(2)
    sums_N = recipe.summing(logp_NT, place_NT, shorter_N)
    ref_N = None if ref_NT is None else recipe.summing(ref_NT, place_NT, shorter_N)
    length_N = length_N.to(sums_N)
    return Pairs(
        sums_N[0::2],
        sums_N[1::2],
        None if ref_N is None else ref_N[0::2],
        None if ref_N is None else ref_N[1::2],
        length_N[0::2],
        length_N[1::2],
        whole.mean_length,
        {name: _of_pairs(rows, x_N) for name, x_N in whole.columns.items()},
    )


def _of_pairs(rows: Sequence[int], x_N: Tensor) -> Tensor:
    """Return the numbers of the pairs that lie in these rows."""
    return x_N[torch.as_tensor(rows[0::2], device=x_N.device) // 2]


def _weights(recipe: PairRecipe, seen: Mapping[str, Tensor], whole: WholeUpdate) -> Tensor | None:
    """Return the weight of every pair; None where all count the same."""
    if not recipe.weighing:
        return None
    length_N = whole.length_N.to(seen["logp_NT"])
    sure_N = (seen["logp_NT"] - seen["square_mass_NT"]).sum(1) / length_N
    weights = [slot(sure_N[0::2], sure_N[1::2]) for slot in recipe.weighing]
    return torch.stack(weights).prod(0)


def own_places(sequences: Sequences) -> Tensor:
    """Number each row's tokens that the policy is asked about, from 1; 0 elsewhere."""
    mask_NT = sequences.mask().long()
    return mask_NT.cumsum(1) * mask_NT


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
