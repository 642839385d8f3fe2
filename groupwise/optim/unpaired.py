"""Learning from single answers that were called good or bad: KTO.

One update a step, on the mean loss of its answers. The baseline is a statistic of the whole step,
found in passes of its own before the update: any micro-batches give the same gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from groupwise import config
from groupwise.losses.unpaired import AnswerLoss, CalledAnswers, baseline_of
from groupwise.methods.composition import UnpairedRecipe
from groupwise.model.layers.transformer import Policy
from groupwise.optim.learner import Learner
from groupwise.optim.packs import Ids, Sequences, outputs
from groupwise.optim.roles.role import Role
from groupwise.optim.schedules import LearningRates
from groupwise.optim.step import Named, StepOutcome
from groupwise.parallel.world import ALONE, World


@dataclass(frozen=True)
class AnswersWithLabels:
    """Answers with their labels, and others behind the same prompts, for the baseline."""

    answers: Sequences
    good_N: Tensor
    others: Sequences | None  # None where no answer of the step belongs to another prompt

    @classmethod
    def of(
        cls, prompts: Sequence[Ids], answers: Sequence[Ids], good: Sequence[bool], context: int
    ) -> AnswersWithLabels:
        """Set the next answer of another prompt behind each prompt, where both fit."""
        found: list[tuple[Ids, Ids]] = []
        count = len(prompts)
        for row, prompt in enumerate(prompts):
            following = ((row + shift) % count for shift in range(1, count))
            other = next((at for at in following if prompts[at] != prompt), None)
            if other is not None and len(prompt) + len(answers[other]) <= context:
                found.append((prompt, answers[other]))
        others = Sequences([p for p, _ in found], [a for _, a in found]) if found else None
        return cls(Sequences(list(prompts), list(answers)), torch.tensor(list(good)), others)


class UnpairedLearner(Learner):
    """Makes good answers likelier and bad ones less likely, measured from the reference."""

    def __init__(
        self,
        model: Policy,
        recipe: UnpairedRecipe,
        optim: config.Optim,
        temperature: float,
        roles: Mapping[str, Role] | None = None,
        world: World = ALONE,
    ) -> None:
        super().__init__(model, optim, temperature, roles, world)
        self.recipe = recipe

    def baseline(self, given: AnswersWithLabels) -> Tensor:
        """Return the estimate of the KL on answers to other prompts; 0 without any."""
        if given.others is None:
            return torch.zeros((), device=self.device)
        every = [list(range(len(given.others.completions)))]
        policy_NT = self.score(self.model, given.others, every)
        reference_NT = self.role_streams(given.others, every)["ref_logp_NT"]
        return baseline_of(policy_NT.sum(1), reference_NT.sum(1))

    def learn_labels(
        self, given: AnswersWithLabels, rates: LearningRates
    ) -> tuple[StepOutcome, dict[str, float]]:
        """Make one update; return it with what the answers looked like before it."""
        assert rates.policy is not None  # nothing learns beside it that it would wait for
        every = list(range(len(given.answers.completions)))
        reference_NT = self.role_streams(given.answers, [every])["ref_logp_NT"]
        baseline = self.baseline(given)
        losses: list[AnswerLoss] = []
        accumulate = partial(self._accumulate, given, reference_NT, baseline, losses)
        outcome = self.update(accumulate, rates.policy, rates.roles)
        if outcome.skipped:
            return outcome, {}
        return outcome, answer_metrics(losses) | {
            "answers/baseline": float(baseline),
            "answers/mismatched": float(len(given.others.completions) if given.others else 0),
        }

    def look_at(self, given: AnswersWithLabels) -> AnswerLoss:
        """Return what the loss says of the answers, without learning."""
        every = [list(range(len(given.answers.completions)))]
        policy_NT = self.score(self.model, given.answers, every)
        reference_NT = self.role_streams(given.answers, every)["ref_logp_NT"]
        good_N = given.good_N.to(self.device)
        asked = (policy_NT.sum(1), reference_NT.sum(1), good_N, self.baseline(given))
        found: AnswerLoss = self.recipe.preference(CalledAnswers(*asked))
        return found

    def _accumulate(
        self,
        given: AnswersWithLabels,
        reference_NT: Tensor,
        baseline: Tensor,
        losses: list[AnswerLoss],
    ) -> list[Named]:
        found_here: dict[int, AnswerLoss] = {}
        seen: list[Named] = []
        count = len(given.answers.completions)
        good_N = given.good_N.to(self.device)
        for work in self.work("updating", given.answers, self._cut(given.answers, range(count))):
            part = given.answers.pack(work.rows, self.device)
            with self.dropping(work.rows[0]):
                logp_NT = outputs(self.model, part, temperature=self.temperature)["logp_NT"]
                seen.append(("logp_NT", logp_NT.detach()))
                # What is not finite skips the update, when all is computed; until then it is 0.
                sums_N = logp_NT.nan_to_num(0.0, 0.0, 0.0).sum(1)
                reference_N = reference_NT[part.row_N].sum(1)
                asked = CalledAnswers(sums_N, reference_N, good_N[part.row_N], baseline)
                found: AnswerLoss = self.recipe.preference(asked)
                work.backward(found.loss_N.sum() / count)
            if work.turn.counts:
                found_here[work.turn.number] = found
        losses[:] = self.world.merge(found_here)
        return seen


def answer_metrics(losses: Sequence[AnswerLoss]) -> dict[str, float]:
    """Return the measures of all answers, whatever the micro-batches."""
    loss_N, reward_N, good_N = (
        torch.cat([getattr(x, name).detach() for x in losses])
        for name in ("loss_N", "reward_N", "good_N")
    )
    total = float(loss_N.mean())
    found = {
        "answers/count": float(len(loss_N)),
        "answers/good_share": float(good_N.double().mean()),
        "loss/preference": total,
        "loss/total": total,
    }
    for name, which_N in (("good", good_N), ("bad", ~good_N)):
        if which_N.any():
            found[f"answers/{name}_reward"] = float(reward_N[which_N].mean())
    return found
