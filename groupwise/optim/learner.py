"""The learner: the policy, what a recipe trains beside it, and the updates on one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from groupwise import config
from groupwise.common.progress import counted
from groupwise.errors import ConfigError, RunError
from groupwise.groups.phase import passes, updates
from groupwise.losses.measures import Tally, merge, values
from groupwise.losses.phase import TokenResult, token_phase
from groupwise.methods.composition import Recipe
from groupwise.model.adapters.lora import dropping
from groupwise.model.layers.transformer import Policy
from groupwise.model.memory import give_back, is_out_of_memory
from groupwise.optim.adamw import make_optimizer
from groupwise.optim.packs import Sequences, micro_batches, outputs, score
from groupwise.optim.roles.role import Role
from groupwise.optim.step import Named, StepOutcome, apply
from groupwise.parallel.world import ALONE, World
from groupwise.records import TokenBatch

Rows = list[int]
OWN = "policy/"  # before the names of the optimizer's tensors in a checkpoint


@dataclass
class Trace:
    """A trace of a step's updates, token by token: for the rollout files."""

    logp_NT: Tensor  # by the policy that nothing moved yet; NaN where it did not read the token
    entropy_NT: Tensor
    ratio_NT: Tensor
    clipped_NT: Tensor

    @classmethod
    def empty(cls, like_NT: Tensor) -> Trace:
        zeros = torch.zeros_like(like_NT, dtype=torch.float32)
        nothing = torch.full_like(zeros, float("nan"))
        return cls(nothing, zeros, zeros.clone(), torch.zeros_like(like_NT, dtype=torch.bool))

    def note(
        self, rows_N: Tensor, micro: TokenBatch, found: Mapping[str, Tensor], result: TokenResult
    ) -> None:
        """Note the tokens of these rows that this pass is about."""
        seen_NT = micro.mask_NT if micro.pass_NT is None else micro.pass_NT
        new = [
            (self.entropy_NT, found["entropy_NT"]),
            (self.ratio_NT, result.log_ratio_NT.exp()),
            (self.clipped_NT, result.clipped_NT),
        ]
        if not micro.moved:
            new.append((self.logp_NT, found["logp_NT"]))
        for kept_NT, x_NT in new:
            kept_NT[rows_N] = torch.where(seen_NT, x_NT.detach().to(kept_NT.dtype), kept_NT[rows_N])


@dataclass
class Learned:
    """The updates of one step: what to report and what to look at when one was skipped.

    What is measured stays on its device until `metrics` reads it, all at once.
    """

    trace: Trace
    outcomes: list[StepOutcome] = field(default_factory=list)
    terms: list[tuple[str, Tensor]] = field(default_factory=list)
    tallies: list[Tally] = field(default_factory=list)
    micro_batches: int = 0

    def add(self, outcome: StepOutcome, results: Sequence[TokenResult]) -> None:
        """Count an update; what a skipped one measured is no measure of anything."""
        self.outcomes.append(outcome)
        self.micro_batches += len(results)
        for result in results if not outcome.skipped else ():
            self.tallies.append(result.tally)
            self.terms += result.terms.items()

    def metrics(self) -> dict[str, float]:
        taken = [outcome for outcome in self.outcomes if not outcome.skipped]
        found = merge(self.tallies).read()
        totals: dict[str, float] = {}
        for (name, _), value in zip(self.terms, values([x for _, x in self.terms]), strict=True):
            totals[name] = totals.get(name, 0.0) + value
        found["updates/count"] = float(len(self.outcomes))
        found["optim/skipped"] = float(len(self.outcomes) - len(taken))
        found["optim/micro_batches"] = float(self.micro_batches)
        if taken:
            found |= {f"loss/{name}": total / len(taken) for name, total in totals.items()}
            found["loss/total"] = sum(totals.values()) / len(taken)
            found["optim/grad_norm"] = sum(outcome.grad_norm for outcome in taken) / len(taken)
        return found


class Learner:
    """A policy and its optimizer: scores rows, and turns accumulated gradients into updates."""

    sampler_top_k = 0  # how many of the sampler's likeliest tokens the learner wants to see
    together = 1  # rows that a micro-batch never separates

    def __init__(
        self,
        model: Policy,
        optim: config.Optim,
        temperature: float,
        roles: Mapping[str, Role] | None = None,
        world: World = ALONE,
    ) -> None:
        self.model, self.optim, self.temperature = model, optim, temperature
        self.roles = dict(roles or {})  # what takes part beside the policy
        self.world = world  # who shares its batches
        self.micro_tokens = optim.micro_tokens  # halved when memory runs out
        model.recompute = optim.recompute
        self.optimizer = make_optimizer(model.named_parameters(), optim, optim.weight_decay)

    @property
    def device(self) -> torch.device:
        return self.model.head_weight.device

    def score(self, model: Policy, sequences: Sequences, parts: Sequence[Rows]) -> Tensor:
        """Return logp_NT under a model, in the passes that the updates will make."""
        while True:
            cut = [m for part in parts for m in self._cut(sequences, part)]
            try:
                return score(model, sequences, cut, self.temperature)
            except Exception as error:
                self._halve(error)
            give_back()  # now that the error holds on to nothing

    def _cut(self, sequences: Sequences, rows: Sequence[int]) -> list[Rows]:
        return micro_batches(sequences, rows, self.micro_tokens, self.together)

    def role_streams(self, sequences: Sequences, parts: Sequence[Rows]) -> dict[str, Tensor]:
        """Return what the roles say of the rows of a step before the batch phase."""
        found: dict[str, Tensor] = {}
        for role in self.roles.values():
            found |= role.streams(lambda model: self.score(model, sequences, parts))
        return found

    def update(self, accumulate: Callable[[], list[Named]], learning_rate: float) -> StepOutcome:
        """Take one optimizer step on the gradients that `accumulate` sums up.

        It returns what it saw on the way: if one of these tensors is not finite, the update is
        skipped. The device is waited for once, when all is computed. When memory runs out it is
        called again, with smaller micro-batches.
        """
        while True:
            self._clear()
            try:
                seen = accumulate()
                break
            except Exception as error:
                self._halve(error)
            give_back()
        outcome = apply(
            self.model.named_parameters(),
            self.optimizer,
            clip_norm=self.optim.clip_norm,
            learning_rate=learning_rate,
            seen=seen,
        )
        if not outcome.skipped:
            for role in self.roles.values():
                role.update()
        return outcome

    def dropping(self, at: int) -> AbstractContextManager[None]:
        """Switch on an adapter's dropout for the micro-batch behind so many rows: in updates."""
        return dropping(self.model, self.optimizer.steps, at)

    def _clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        for role in self.roles.values():
            role.clear()

    def _halve(self, error: Exception) -> None:
        """Smaller micro-batches after running out of memory; other errors go on."""
        if not is_out_of_memory(error):
            raise error
        if self.micro_tokens <= 1:
            raise RunError(
                "Out of memory with a single sequence in the micro-batch. Set optim.recompute="
                "true, lower engine.max_tokens or data.max_prompt_tokens, or take a smaller model."
            ) from error
        self.micro_tokens //= 2

    def state(self) -> dict[str, Tensor]:
        return {f"{OWN}{name}": x for name, x in self.optimizer.state().items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.optimizer.restore({name.removeprefix(OWN): x for name, x in state.items()})


class PolicyLearner(Learner):
    """Takes a batch from the batch phase and makes its optimizer steps."""

    def __init__(
        self,
        model: Policy,
        recipe: Recipe,
        optim: config.Optim,
        temperature: float,
        roles: Mapping[str, Role] | None = None,
        world: World = ALONE,
    ) -> None:
        super().__init__(model, optim, temperature, roles, world)
        self.recipe = recipe
        self.own_top_k = 0  # how many of its own likeliest tokens the recipe wants to see
        if "sampler_topk_logp_NTK" in recipe.streams:
            self.sampler_top_k = self._top_k()
        if "topk_logp_NTK" in recipe.outputs:
            self.own_top_k = self._top_k()

    def parts(self, groups: Sequence[int]) -> list[Rows]:
        """Return the rows of each update: whole groups while there are enough of them."""
        wanted = min(self.recipe.schedule["updates"], len(groups))
        starts = [row for row, group in enumerate(groups) if row == 0 or group != groups[row - 1]]
        if len(starts) < wanted:
            starts = list(range(len(groups)))
        cuts = [starts[len(starts) * part // wanted] for part in range(wanted)] + [len(groups)]
        return [list(range(a, b)) for a, b in pairwise(cuts)]

    def learn(
        self,
        batch: TokenBatch,
        sequences: Sequences,
        parts: Sequence[Rows],
        learning_rate: float,
    ) -> Learned:
        """Do every pass and update of the recipe's schedule, one optimizer step each."""
        learned = Learned(Trace.empty(batch.mask_NT))
        for rows, part in self._steps(batch, parts):
            moved = any(not outcome.skipped for outcome in learned.outcomes)
            part = replace(part, watched=True, moved=moved and batch.old_logp_NT is None)
            results: list[TokenResult] = []
            accumulate = partial(self._accumulate, part, rows, sequences, learned.trace, results)
            outcome = self.update(accumulate, learning_rate)
            learned.add(outcome, results)
        return learned

    def _steps(self, batch: TokenBatch, parts: Sequence[Rows]) -> Iterator[tuple[Rows, TokenBatch]]:
        index = [torch.tensor(rows, device=self.device) for rows in parts]
        for one_pass in passes(self.recipe, batch):
            split = updates(self.recipe, one_pass, index)
            for number, rows in enumerate(parts):
                moved: dict[str, Any] = {}
                for role in self.roles.values():
                    moved |= role.moved()
                if moved:  # and with it the weights that the batch phase made
                    split = updates(self.recipe, one_pass.with_streams(**moved), index)
                yield rows, split[number]

    def _accumulate(
        self,
        part: TokenBatch,
        rows: Rows,
        sequences: Sequences,
        trace: Trace,
        results: list[TokenResult],
    ) -> list[Named]:
        """Sum one update's gradients over its micro-batches; return what was seen, in order."""
        results.clear()
        seen: list[Named] = []
        at = 0
        for some in counted("updating", self._cut(sequences, rows), "micro-batches"):
            micro = part.select(slice(at, at + len(some)))
            at += len(some)
            packed = sequences.pack(some, self.device)
            with self.dropping(at):
                found = outputs(
                    self.model,
                    packed,
                    temperature=self.temperature,
                    top_k=self.own_top_k,
                    at_NTK=micro.sampler_topk_id_NTK,
                )
                for role in self.roles.values():
                    found |= role.outputs(packed)
                result = token_phase(self.recipe, micro, **found)
                seen += [(name, x.detach()) for name, x in found.items()]
                seen += [(f"loss {name}", term) for name, term in result.terms.items()]
                result.loss.backward()  # type: ignore[no-untyped-call]
            trace.note(packed.row_N, micro, found, result)
            results.append(replace(result, loss=result.loss.detach()))
        return seen

    def _top_k(self) -> int:
        k, vocabulary = int(self.recipe.gate["k"]), len(self.model.head_weight)
        if k > vocabulary:
            raise ConfigError(
                f"{self.recipe.gate} reads the {k} likeliest tokens, and this model's vocabulary "
                f"has {vocabulary}. Set recipe.gate.k={vocabulary} or less."
            )
        return k
