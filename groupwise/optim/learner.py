"""The learner: the policy, what a recipe trains beside it, and the updates on one batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from groupwise import config
from groupwise.common.progress import counted
from groupwise.errors import ConfigError, RecipeWarning, RunError
from groupwise.groups.phase import passes, updates
from groupwise.losses.measures import Tally
from groupwise.losses.phase import role_phase, token_phase
from groupwise.methods.composition import Recipe
from groupwise.model.adapters.lora import dropping
from groupwise.model.layers.transformer import Policy
from groupwise.model.memory import give_back, is_out_of_memory
from groupwise.optim.adamw import make_optimizer
from groupwise.optim.learned import Learned, Measured, RoleUpdates, Trace
from groupwise.optim.packs import (
    Pack,
    Sequences,
    even,
    micro_batches,
    outputs,
    read_rows,
    score,
)
from groupwise.optim.roles.role import Role
from groupwise.optim.routing import (
    PackRoutes,
    RouteRecord,
    StepRoutes,
    sampled_routes,
    score_with_routes,
)
from groupwise.optim.schedules import LearningRates
from groupwise.optim.step import Named, StepOutcome, apply
from groupwise.parallel.sharding import differing, fill, gather_into
from groupwise.parallel.world import ALONE, PassTurn, World
from groupwise.records import TokenBatch

Rows = list[int]
T = TypeVar("T")
ZERO = torch.zeros(())
OWN = "policy/"  # before the names of the optimizer's tensors in a checkpoint


@dataclass(frozen=True)
class Scoring:
    """Reads the rows of a step for roles, without gradient, in the passes of the updates."""

    learner: Learner
    sequences: Sequences
    parts: Sequence[Rows]

    def __call__(self, model: Policy) -> Tensor:
        return self.learner.score(model, self.sequences, self.parts)

    def values(self, read: Callable[[Pack], Tensor]) -> Tensor:
        return self.streams(lambda packed: {"value_NT": read(packed)})["value_NT"]

    def streams(self, read: Callable[[Pack], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        learner, sequences = self.learner, self.sequences
        return learner.within_memory(
            lambda: read_rows(
                sequences,
                learner.cut(sequences, self.parts),
                learner.device,
                read,
                learner.world,
            )
        )


@dataclass(frozen=True)
class Work:
    """A pass of an update: some of its rows, from `at` on among them, as a turn of this rank."""

    rows: Rows
    at: int
    turn: PassTurn

    def of(self, part: TokenBatch) -> TokenBatch:
        """Return these rows of the update's batch."""
        return part.select(slice(self.at, self.at + len(self.rows)))

    def backward(self, loss: Tensor) -> None:
        """Add the gradient, of exactly 0 where the pass only keeps others company."""
        (loss if self.turn.counts else loss * 0.0).backward()  # type: ignore[no-untyped-call]


class Learner:
    """A policy and its optimizer: scores rows, and turns accumulated gradients into updates."""

    sampler_top_k = 0  # how many of the sampler's likeliest tokens the learner wants to see
    replays_sampler = False  # whether it goes through the experts that the sampler visited
    together = 1  # rows that a micro-batch never separates

    def __init__(
        self,
        model: Policy,
        optim: config.Optim,
        temperature: float,
        roles: Mapping[str, Role] | None = None,
        world: World = ALONE,
    ) -> None:
        self.optim, self.temperature = optim, temperature
        self.roles = dict(roles or {})  # what takes part beside the policy
        self.world = world  # who shares its batches
        self.micro_tokens = optim.micro_tokens  # halved when memory runs out
        self.model = self.held(model)
        self.model.recompute = optim.recompute
        for role in self.roles.values():
            role.spread(world)
        self.optimizer = make_optimizer(self.parameters(), optim, optim.weight_decay)

    def held(self, model: Policy) -> Policy:
        """Return what of the model this rank's updates change: all of it, or its shards."""
        self.whole: nn.Module = model  # what samplers and checkpoints read
        self.own: nn.Module = self.world.shard(model)
        return self.world.shard(model)

    def weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all that the run's model is made of, by name."""
        return self.whole.named_parameters()

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what updates may change, by name; what is frozen is passed over later."""
        return self.own.named_parameters()

    def deliver(self) -> None:
        """Bring what was learned to the whole model, where it is not learned there."""
        if self.own is not self.whole:
            with self.world.gathering():
                gather_into(self.whole, self.own)

    def take(self) -> None:
        """Go on from the whole model's weights."""
        if self.own is not self.whole:
            fill(self.own, self.whole)

    def undelivered(self) -> str | None:
        """Return a parameter of the whole model that is not what this rank has learned."""
        return None if self.own is self.whole else differing(self.whole, self.own)

    @property
    def device(self) -> torch.device:
        return self.model.head_weight.device

    def score(self, model: Policy, sequences: Sequences, parts: Sequence[Rows]) -> Tensor:
        """Return logp_NT under a model, in the passes that the updates will make."""
        return self.within_memory(
            lambda: score(
                model, sequences, self.cut(sequences, parts), self.temperature, self.world
            )
        )

    def cut(self, sequences: Sequences, parts: Sequence[Rows]) -> list[Rows]:
        """Return the micro-batches of the parts, one after the other."""
        return [micro for part in parts for micro in self._cut(sequences, part)]

    def _cut(self, sequences: Sequences, rows: Sequence[int]) -> list[Rows]:
        def cut(budget: int) -> list[Rows]:
            return micro_batches(sequences, rows, budget, self.together)

        return even(cut, self.micro_tokens, self.world.size)

    def work(
        self, doing: str, sequences: Sequences, cut: Sequence[Rows], things: str = "micro-batches"
    ) -> Iterator[Work]:
        """Yield the passes of an update that are this rank's."""
        starts = list(accumulate(map(len, cut), initial=0))
        turns = self.world.deal([sequences.cost(rows) for rows in cut])
        for turn in counted(doing, turns, things):
            self.world.begin(turn)
            yield Work(cut[turn.number], starts[turn.number], turn)

    def role_streams(
        self, sequences: Sequences, parts: Sequence[Rows], names: Iterable[str] | None = None
    ) -> dict[str, Tensor]:
        """Return what the roles, or those named, say of the rows of a step."""
        found: dict[str, Tensor] = {}
        for name in self.roles if names is None else names:
            found |= self.roles[name].streams(Scoring(self, sequences, parts))
        return found

    def within_memory(self, compute: Callable[[], T]) -> T:
        """Compute something in micro-batches; where memory runs out, again in smaller ones."""
        while True:
            try:
                return compute()
            except Exception as error:
                self._halve(error)
            give_back()  # now that the error holds on to nothing

    def update(
        self,
        accumulate: Callable[[], list[Named]],
        learning_rate: float,
        of_roles: Mapping[str, float] | None = None,
    ) -> StepOutcome:
        """Take one optimizer step on the gradients that `accumulate` sums up.

        It returns what it saw on the way: if one of these tensors is not finite, the update is
        skipped. The device is waited for once, when all is computed. When memory runs out it is
        called again, with smaller micro-batches. Roles that learn with the policy follow, at rates
        of their own.
        """

        def begun() -> list[Named]:
            self._clear()
            return accumulate()

        outcome = apply(
            self.parameters(),
            self.optimizer,
            clip_norm=self.optim.clip_norm,
            learning_rate=learning_rate,
            seen=self.within_memory(begun),
            world=self.world,
        )
        if not outcome.skipped:
            for name, rate in (of_roles or {}).items():
                if not self.roles[name].apart:
                    self.roles[name].update(rate, [])
        return outcome

    def dropping(self, at: int) -> AbstractContextManager[None]:
        """Switch on an adapter's dropout for the micro-batch behind so many rows: in updates."""
        return dropping(self.model, self.optimizer.steps, at)

    def _clear(self) -> None:
        for _, parameter in self.parameters():
            parameter.grad = None
        for role in self.roles.values():
            role.clear()

    def _halve(self, error: Exception) -> None:
        """Smaller micro-batches after running out of memory; other errors go on."""
        if not is_out_of_memory(error):
            raise error
        if self.world.size > 1:  # the others are in the midst of a pass that this one has left
            raise RunError(
                f"Out of memory on rank {self.world.rank} of {self.world.size}, with micro-batches "
                f"of {self.micro_tokens} tokens. Set optim.micro_tokens={self.micro_tokens // 2}, "
                "and the same command goes on from the last checkpoint."
            ) from error
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
        self.apart = [name for name, role in self.roles.items() if role.apart]
        self.own_top_k = 0  # how many of its own likeliest tokens the recipe wants to see
        if "sampler_topk_logp_NTK" in recipe.streams:
            self.sampler_top_k = self._top_k()
        if "topk_logp_NTK" in recipe.outputs:
            self.own_top_k = self._top_k()
        self.replays_sampler = recipe.replays == "sampler"

    def parts(self, groups: Sequence[int]) -> list[Rows]:
        """Return the rows of each update: whole groups while there are enough of them."""
        wanted = min(self.recipe.schedule["updates"], len(groups))
        starts = [row for row, group in enumerate(groups) if row == 0 or group != groups[row - 1]]
        if len(starts) < wanted:
            starts = list(range(len(groups)))
        cuts = [starts[len(starts) * part // wanted] for part in range(wanted)] + [len(groups)]
        return [list(range(a, b)) for a, b in pairwise(cuts)]

    def recipe_at(self, rates: LearningRates) -> Recipe:
        """Return the recipe as it runs at these rates: with targets of its own while one waits,
        and with the step's coefficients.
        """
        with warnings.catch_warnings():  # doubts were told when the run began
            warnings.simplefilter("ignore", RecipeWarning)
            recipe = self.recipe.configure(rates.coefs)
        for role in self.roles.values() if rates.policy is None else ():
            recipe = role.alone(recipe)
        return recipe

    def measures(self, batch: TokenBatch, rates: LearningRates) -> dict[str, float]:
        """Measure what the roles said of a batch, before they learn from it."""
        found: dict[str, float] = {}
        for role in self.roles.values():
            found |= role.measures(self.recipe_at(rates), batch)
        return found

    def columns(self, batch: TokenBatch, rates: LearningRates) -> dict[str, Tensor]:
        """Return what the roles said of each token, by the fields of the rollout file's rows."""
        found: dict[str, Tensor] = {}
        for role in self.roles.values():
            found |= role.columns(self.recipe_at(rates), batch)
        return found

    def look_back(
        self, recipe: Recipe, sequences: Sequences, parts: Sequence[Rows]
    ) -> tuple[dict[str, Tensor], StepRoutes | None]:
        """Return what the recipe reads of the policy before the updates, and the routes that those
        are given; the latter of mixtures of experts alone.
        """
        config = self.model.config
        if config.experts is None:
            if not recipe.looks_back:
                return {}, None
            return self.look(recipe, sequences, parts), None
        sampled = sampled_routes(sequences, config)
        if recipe.replays != "sampler":
            replay = None
        else:
            replay = RouteRecord.empty(sequences, config) if sampled is None else sampled
        if not recipe.looks_back:
            return {}, StepRoutes(replay, before=sampled)
        found, record = self.within_memory(
            lambda: score_with_routes(
                self.model,
                sequences,
                self.cut(sequences, parts),
                self.temperature,
                replay,
                self.world,
            )
        )
        found = {name: x for name, x in found.items() if name in recipe.streams}
        if recipe.looks_now or "old_square_mass_NT" in recipe.streams:
            found |= self.look(recipe, sequences, parts)
        return found, StepRoutes(
            record if recipe.replays == "learner" else replay,
            at=record if "router_NTLK" in recipe.outputs else None,
            before=record if sampled is None else sampled,
            everywhere="router_NTE" in recipe.outputs,
        )

    def look(
        self, recipe: Recipe, sequences: Sequences, parts: Sequence[Rows], *, later: bool = False
    ) -> dict[str, Tensor]:
        """Return what the recipe reads of the policy as it is, before the updates or a later one.

        A later look is at the rows of one update, for its statistics: what was before the first
        stays what it was, and other rows are 0.
        """
        named = {"now_logp_NT": "logp_NT", "now_entropy_NT": "entropy_NT"}
        if not later:
            named |= {"old_logp_NT": "logp_NT", "old_square_mass_NT": "square_mass_NT"}
        wanted = {name: own for name, own in named.items() if name in recipe.streams}
        if set(wanted.values()) <= {"logp_NT"}:  # the same pass, without what nobody reads
            logp_NT = self.score(self.model, sequences, parts)
            return dict.fromkeys(wanted, logp_NT)
        mass = "square_mass_NT" in wanted.values()

        def read(part: Pack) -> dict[str, Tensor]:
            return outputs(self.model, part, temperature=self.temperature, square_mass=mass)

        found = Scoring(self, sequences, parts).streams(read)
        if mass:
            found["square_mass_NT"] = found["square_mass_NT"].exp()
        return {name: found[own] for name, own in wanted.items()}

    def learn_first(
        self, batch: TokenBatch, sequences: Sequences, parts: Sequence[Rows], rates: LearningRates
    ) -> list[RoleUpdates]:
        """Teach the roles whose word on a batch counts only once they have learned from it."""
        first = [role for role in self.roles.values() if role.apart and role.learns_first()]
        return [self._teach(role, batch, sequences, parts, rates) for role in first]

    def learn(
        self,
        batch: TokenBatch,
        sequences: Sequences,
        parts: Sequence[Rows],
        rates: LearningRates,
        routes: StepRoutes | None = None,
    ) -> Learned:
        """Do every pass and update of the recipe's schedule, one optimizer step each.

        Models that learn beside the policy go first in each update, and are through with it before
        the policy begins. A policy that waits has no updates.
        """
        beside = [r for r in self.roles.values() if r.apart and not r.learns_first()]
        reroutes = routes is not None and routes.before is not None
        learned = Learned(Trace.empty(batch.mask_NT, reroutes=reroutes))
        learned.roles = {role.name: RoleUpdates(role.name) for role in beside}
        recipe = self.recipe_at(rates)
        for rows, part in self._steps(recipe, batch, parts, sequences):
            for role in beside:
                rate = rates.roles[role.name]
                self._update_role(role, part, rows, sequences, rate, learned.roles[role.name])
            if rates.policy is None:
                continue
            moved = any(not outcome.skipped for outcome in learned.outcomes)
            part = replace(part, watched=True, moved=moved and batch.old_logp_NT is None)
            results: list[Measured] = []
            accumulate = partial(
                self._accumulate, recipe, part, rows, sequences, routes, learned.trace, results
            )
            outcome = self.update(accumulate, rates.policy, rates.roles)
            learned.add(outcome, results)
        return learned

    def _teach(
        self,
        role: Role,
        batch: TokenBatch,
        sequences: Sequences,
        parts: Sequence[Rows],
        rates: LearningRates,
    ) -> RoleUpdates:
        """Make a role's updates on a batch, all rows once."""
        found = RoleUpdates(role.name)
        index = [torch.tensor(rows, device=self.device) for rows in parts]
        for rows, part in zip(parts, updates(self.recipe, batch, index), strict=True):
            self._update_role(role, part, rows, sequences, rates.roles[role.name], found)
        return found

    def _update_role(
        self,
        role: Role,
        part: TokenBatch,
        rows: Rows,
        sequences: Sequences,
        rate: float,
        into: RoleUpdates,
    ) -> None:
        """Make one update of a model that learns in passes of its own."""
        part = replace(part, watched=True)

        def accumulate() -> tuple[list[Named], Tensor, list[Tally]]:
            role.clear()
            seen, measured = list[Named](), dict[int, tuple[Tensor, Tally]]()
            cut = self._cut(sequences, rows)
            for work in self.work("updating the " + role.name, sequences, cut, "passes"):
                found = role.outputs(sequences.pack(work.rows, self.device))
                micro, terms = role_phase(self.recipe, work.of(part), role.name, **found)
                loss = torch.stack(list(terms.values())).sum()
                work.backward(loss)
                if work.turn.counts:
                    seen += [(name, x.detach()) for name, x in found.items()]
                    tally = role.tally(self.recipe, micro)
                    measured[work.turn.number] = loss.detach(), tally
            every = self.world.merge(measured)
            return seen, sum((loss for loss, _ in every), ZERO), [tally for _, tally in every]

        seen, total, tallies = self.within_memory(accumulate)
        outcome = role.update(rate, [*seen, (f"loss of the {role.name}", total)])
        assert outcome is not None
        into.outcomes.append(outcome)
        if not outcome.skipped:
            into.losses.append(total)
            into.tallies += tallies

    def _steps(
        self, recipe: Recipe, batch: TokenBatch, parts: Sequence[Rows], sequences: Sequences
    ) -> Iterator[tuple[Rows, TokenBatch]]:
        index = [torch.tensor(rows, device=self.device) for rows in parts]
        first = True
        for one_pass in passes(recipe, batch):
            split = updates(recipe, one_pass, index)
            for number, rows in enumerate(parts):
                moved: dict[str, Any] = {}
                if recipe.looks_now and not first:
                    moved |= self.look(recipe, sequences, [rows], later=True)
                first = False
                for role in self.roles.values():
                    moved |= role.moved()
                if moved:  # and with it the weights that the batch phase made
                    split = updates(recipe, one_pass.with_streams(**moved), index)
                yield rows, split[number]

    def _accumulate(
        self,
        recipe: Recipe,
        part: TokenBatch,
        rows: Rows,
        sequences: Sequences,
        routes: StepRoutes | None,
        trace: Trace,
        results: list[Measured],
    ) -> list[Named]:
        """Sum one update's gradients over its micro-batches; return what was seen, in order."""
        seen: list[Named] = []
        measured: dict[int, Measured] = {}
        learned: list[Tensor] = []
        for work in self.work("updating", sequences, self._cut(sequences, rows)):
            micro, packed = work.of(part), sequences.pack(work.rows, self.device)
            routed = None if routes is None else PackRoutes(packed, self.model.config, routes)
            with self.dropping(work.at + len(work.rows)):
                found = outputs(
                    self.model,
                    packed,
                    temperature=self.temperature,
                    top_k=self.own_top_k,
                    at={name: ids for name, ids in _asked_ids(micro).items() if ids is not None},
                    against=[x for role in self.roles.values() for x in role.opposites(packed)],
                    routes=None if routed is None else routed.asked,
                )
                found |= {} if routed is None else routed.streams()
                for role in self.roles.values():
                    found |= {} if role.apart else role.outputs(packed)
                result = token_phase(recipe, micro, apart=self.apart, **found)
                work.backward(result.loss)
            if work.turn.counts:
                seen += [(name, x.detach()) for name, x in found.items()]
                seen += [(f"loss {name}", term) for name, term in result.terms.items()]
                counts = None
                if routed is not None:
                    counts, rerouted_NT = routed.counts()
                    result = replace(result, rerouted_NT=rerouted_NT)
                trace.note(packed.row_N, micro, found, result)
                learned.append(packed.row_N)
                measured[work.turn.number] = Measured(result.terms, result.tally, counts)
        trace.meet(self.world, rows, learned)
        results[:] = self.world.merge(measured)
        return seen

    def _top_k(self) -> int:
        k, vocabulary = int(self.recipe.gate["k"]), len(self.model.head_weight)
        if k > vocabulary:
            raise ConfigError(
                f"{self.recipe.gate} reads the {k} likeliest tokens, and this model's vocabulary "
                f"has {vocabulary}. Set recipe.gate.k={vocabulary} or less."
            )
        return k


def _asked_ids(batch: TokenBatch) -> dict[str, Tensor | None]:
    """Return likeliest tokens of others of which the policy's view is asked, by its name."""
    return {
        "logp_at_sampler_topk_NTK": batch.sampler_topk_id_NTK,
        "logp_at_teacher_topk_NTK": batch.find("teacher_topk_id_NTK"),
    }
