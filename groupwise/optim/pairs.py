"""Learning from pairs of answers: DPO and its relatives, in the same cycle as the others.

One update a step, on the mean loss of the step's pairs. Rows of a pair lie next to each other, the
chosen answer first, and share their prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from groupwise import config
from groupwise.common.progress import counted
from groupwise.errors import DataError, ModelError
from groupwise.losses.pairs import PairLoss, Pairs
from groupwise.methods.composition import PairRecipe
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.layers.transformer import Policy
from groupwise.optim.learner import Learner
from groupwise.optim.packs import Ids, Sequences, micro_batches, outputs
from groupwise.optim.step import Named, StepOutcome
from groupwise.records import Completion, Rollout, Task

Answer = tuple[Ids, Tensor | None]  # with its mask_T
SHOWN = 40  # characters of an answer that is quoted
# Of the data, by what a recipe reads.
COLUMNS = {"labels": ("chosen", "rejected"), "answers": ("answer",), "grades": ()}


class PairLearner(Learner):
    """Makes the preferred of two answers likelier than the other, measured from the reference."""

    def __init__(
        self, model: Policy, recipe: PairRecipe, optim: config.Optim, temperature: float
    ) -> None:
        super().__init__(model, optim, temperature)
        self.recipe = recipe

    def learn_pairs(
        self, pairs: Sequences, reference: Policy, learning_rate: float
    ) -> tuple[StepOutcome, dict[str, float]]:
        """One update, and what the pairs looked like before it."""
        losses: list[PairLoss] = []
        outcome = self.update(partial(self._accumulate, pairs, reference, losses), learning_rate)
        return outcome, {} if outcome.skipped else _metrics(losses)

    def _accumulate(
        self, pairs: Sequences, reference: Policy, losses: list[PairLoss]
    ) -> list[Named]:
        losses.clear()
        seen: list[Named] = []
        count = len(pairs.completions) // 2
        every = range(len(pairs.completions))
        cut = micro_batches(pairs, every, self.micro_tokens, together=2)
        for rows in counted("updating", cut, "micro-batches"):
            part = pairs.pack(rows, self.device)
            with torch.no_grad():
                ref_NT = outputs(reference, part, temperature=self.temperature)["logp_NT"]
            with self.dropping(rows[0]):
                logp_NT = outputs(self.model, part, temperature=self.temperature)["logp_NT"]
                seen.append(("logp_NT", logp_NT.detach()))
                # What is not finite skips the update, when all is computed; until then it is 0.
                sums_N = logp_NT.nan_to_num(0.0, 0.0, 0.0).sum(1)
                ref_N = ref_NT.sum(1)
                found: PairLoss = self.recipe.preference(
                    Pairs(sums_N[0::2], sums_N[1::2], ref_N[0::2], ref_N[1::2])
                )
                (found.loss_N.sum() / count).backward()  # type: ignore[no-untyped-call]
            losses.append(found)
        return seen


def _metrics(losses: Sequence[PairLoss]) -> dict[str, float]:
    """Over all pairs, whatever the micro-batches."""
    together = PairLoss(
        **{name: torch.cat([vars(x)[name].detach() for x in losses]) for name in vars(losses[0])}
    )
    total = float(together.loss)
    return together.metrics() | {
        "pairs/count": float(len(together.loss_N)),
        "loss/preference": total,
        "loss/total": total,
    }


def check_columns(recipe: PairRecipe, tasks: Sequence[Task]) -> None:
    """Refuse data without the answers that the recipe learns from, before there is a model."""
    for column in COLUMNS[recipe.reads]:
        for task in tasks:
            _text(task, column)


def solution_notes(recipe: PairRecipe, tasks: Sequence[Task]) -> list[str]:
    """What is learned where the data have a worked solution beside the answer."""
    if recipe.reads != "answers":
        return []
    bare = [t.answer for t in tasks if t.columns.get("solution", t.answer) not in (None, t.answer)]
    if not bare:
        return []
    shown = repr(bare[0]) if len(repr(bare[0])) <= SHOWN else f"{repr(bare[0])[:SHOWN]} ..."
    return [
        f"{recipe.name} learns the bare `answer` ({shown}), not the worked `solution` that "
        f"{len(bare):,} of {len(tasks):,} rows have beside it"
    ]


def check_data(
    recipe: PairRecipe, tasks: Sequence[Task], tokenizer: Tokenizer, longest: int
) -> None:
    """Refuse data without the answers that the recipe learns from, and answers that don't fit."""
    for column in COLUMNS[recipe.reads]:
        for task in tasks:
            tokens = len(task.token_ids) + len(_answer(task, column, tokenizer))
            if tokens > longest:
                raise DataError(
                    f"Row {task.id}: the prompt with its {column!r} has {tokens} tokens, and the "
                    f"model holds {longest}. Drop such rows, or take a model with a longer context."
                )


def labelled_pairs(tasks: Sequence[Task], tokenizer: Tokenizer) -> Sequences:
    """Chosen and rejected answers of the data."""

    def pair(task: Task) -> tuple[Ids, Answer, Answer]:
        chosen, rejected = (_answer(task, name, tokenizer) for name in ("chosen", "rejected"))
        return task.token_ids, (chosen, None), (rejected, None)

    return _rows([pair(task) for task in tasks])


def sampled_pairs(
    recipe: PairRecipe, groups: Sequence[Sequence[Rollout]], tokenizer: Tokenizer
) -> Sequences:
    """Pairs from the policy's own samples, against each other or against the data's answer."""
    made = []
    for group in groups:
        task = group[0].task
        if recipe.reads == "answers":
            right = (_answer(task, "answer", tokenizer), None)
            made.append((task.token_ids, right, _sampled(group[0].completion)))
            continue
        graded = [(r.grade.reward, _sampled(r.completion)) for r in group]
        known = [(reward, answer) for reward, answer in graded if reward is not None]
        if len(known) < 2:
            continue
        choice = recipe.pairing(torch.tensor([reward for reward, _ in known]))
        if choice.keep:
            made.append((task.token_ids, known[choice.chosen][1], known[choice.rejected][1]))
    return _rows(made)


def _sampled(completion: Completion) -> Answer:
    return completion.token_ids, completion.mask_T


def _rows(pairs: Sequence[tuple[Ids, Answer, Answer]]) -> Sequences:
    """Rows whose log-probability is that of the policy's own tokens: others are only read."""
    answers = [answer for _, *both in pairs for answer in both]
    return Sequences(
        [prompt for prompt, _, _ in pairs for _ in range(2)],
        [ids for ids, _ in answers],
        [mask_T for _, mask_T in answers],
    )


def _answer(task: Task, column: str, tokenizer: Tokenizer) -> Ids:
    """An answer of the data as the policy would have written it, end token included."""
    try:
        return (*tokenizer.encode(_text(task, column)), tokenizer.eos_ids[0])
    except ModelError as error:
        raise DataError(f"Row {task.id}, column {column!r}: {error}") from error


def _text(task: Task, column: str) -> str:
    text = task.answer if column == "answer" else task.columns.get(column)
    if not isinstance(text, str) or not text:
        raise DataError(
            f"Row {task.id} has no text in column {column!r}, which this recipe learns from. Add "
            "it, or take a recipe that learns from rewards."
        )
    return text
