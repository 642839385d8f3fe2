"""A step's updates, as they are reported: losses, gradients and a trace of every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.losses.measures import Tally, merge, values
from groupwise.losses.phase import TokenResult
from groupwise.losses.routing import RouteCounts, route_metrics
from groupwise.optim.step import StepOutcome
from groupwise.parallel.world import World
from groupwise.records import TokenBatch


class Measured(NamedTuple):
    """The measures of one micro-batch of an update."""

    terms: dict[str, Tensor]  # its part of each term of the loss
    tally: Tally
    routes: RouteCounts | None = None  # of a mixture of experts


@dataclass
class Trace:
    """A trace of a step's updates, token by token: for the rollout files."""

    logp_NT: Tensor  # by the policy that nothing moved yet; NaN where it did not read the token
    entropy_NT: Tensor
    ratio_NT: Tensor
    clipped_NT: Tensor
    rerouted_NT: Tensor | None = None  # of a mixture whose routes are known

    @classmethod
    def empty(cls, like_NT: Tensor, *, reroutes: bool = False) -> Trace:
        zeros = torch.zeros_like(like_NT, dtype=torch.float32)
        nothing = torch.full_like(zeros, float("nan"))
        clipped_NT = torch.zeros_like(like_NT, dtype=torch.bool)
        rerouted_NT = zeros.clone() if reroutes else None
        return cls(nothing, zeros, zeros.clone(), clipped_NT, rerouted_NT)

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
        if self.rerouted_NT is not None and result.rerouted_NT is not None:
            new.append((self.rerouted_NT, result.rerouted_NT))
        if not micro.moved:
            new.append((self.logp_NT, found["logp_NT"]))
        for kept_NT, x_NT in new:
            kept_NT[rows_N] = torch.where(seen_NT, x_NT.detach().to(kept_NT.dtype), kept_NT[rows_N])

    def meet(self, world: World, rows: Sequence[int], mine: Sequence[Tensor]) -> None:
        """Take what other ranks noted of an update's rows; `mine` are those of this rank."""
        if world.size == 1:
            return
        rows_N = torch.tensor(rows, device=self.logp_NT.device)
        here_N1 = torch.isin(rows_N, torch.cat([rows_N[:0], *mine]))[:, None]
        for kept_NT in filter(lambda x: x is not None, vars(self).values()):
            own_NT = kept_NT[rows_N]
            sent_NT = torch.where(here_N1, own_NT, torch.zeros_like(own_NT)).float()
            kept_NT[rows_N] = world.total(sent_NT).to(kept_NT.dtype)


@dataclass
class RoleUpdates:
    """The updates of one step of a model that learns beside the policy."""

    name: str
    outcomes: list[StepOutcome] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)  # of the updates that were taken
    tallies: list[Tally] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        taken = [outcome for outcome in self.outcomes if not outcome.skipped]
        found = {f"{self.name}/skipped": float(len(self.outcomes) - len(taken))}
        if taken:
            found[f"{self.name}/loss"] = sum(values(self.losses)) / len(taken)
            norms = [outcome.grad_norm for outcome in taken]
            found[f"{self.name}/grad_norm"] = sum(norms) / len(taken)
        return found | merge(self.tallies).read()


@dataclass
class Learned:
    """The updates of one step: what to report and what to look at when one was skipped.

    What is measured stays on its device until `metrics` reads it, all at once.
    """

    trace: Trace
    outcomes: list[StepOutcome] = field(default_factory=list)
    terms: list[tuple[str, Tensor]] = field(default_factory=list)
    tallies: list[Tally] = field(default_factory=list)
    routes: list[RouteCounts] = field(default_factory=list)  # of a mixture of experts
    micro_batches: int = 0
    roles: dict[str, RoleUpdates] = field(default_factory=dict)  # that learn in passes of their own

    def add(self, outcome: StepOutcome, results: Sequence[Measured]) -> None:
        """Count an update; what a skipped one measured is no measure of anything."""
        self.outcomes.append(outcome)
        self.micro_batches += len(results)
        for result in results if not outcome.skipped else ():
            self.tallies.append(result.tally)
            self.terms += result.terms.items()
            self.routes += [] if result.routes is None else [result.routes]

    def metrics(self) -> dict[str, float]:
        taken = [outcome for outcome in self.outcomes if not outcome.skipped]
        found = merge(self.tallies).read() | route_metrics(self.routes)
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
        for role in self.roles.values():
            found |= role.metrics()
        return found
