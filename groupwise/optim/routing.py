"""The experts that a step's tokens visited, as a record that later passes are given.

Axes: `_X` token of a step, prompts and completions end to end as in `Sequences.token`; `_L` layer
of the model, dense ones included; `_K` experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from groupwise.errors import EngineError
from groupwise.losses.routing import RouteCounts, other_experts, visits
from groupwise.model.config import Mixture, ModelConfig
from groupwise.model.layers.routes import NOWHERE, RECORDED, Routes, check_experts
from groupwise.model.layers.transformer import PolicyModel
from groupwise.optim.packs import Pack, Sequences, outputs, read_rows
from groupwise.parallel.world import ALONE, World


@dataclass
class RouteRecord:
    """The experts of every token of a step, on the host; -1 where they are not known.

    A prompt that several rows share has one place: what is recorded first stays, whatever the
    micro-batches, and tokens of which a later record says otherwise are counted.
    """

    expert_XLK: Tensor
    compared: int = 0  # tokens of prompts that were recorded once more
    disagreeing: int = 0  # of these

    @classmethod
    def empty(cls, sequences: Sequences, config: ModelConfig) -> RouteRecord:
        shape = (len(sequences.token), config.num_layers, mixture_of(config).chosen)
        return cls(torch.full(shape, NOWHERE, dtype=RECORDED))

    def of(self, part: Pack) -> Tensor:
        """Return the experts of a pack's tokens, on its device."""
        return self.expert_XLK[torch.from_numpy(part.read_T)].to(part.token_T.device)

    def note(self, place_T: Tensor, expert_TLK: Tensor) -> None:
        """Note what tokens visited, by their places; what is known already stays."""
        known_TLK, new_TLK = self.expert_XLK[place_T], expert_TLK.to("cpu", RECORDED)
        if (known_TLK < 0).all():
            self.expert_XLK[place_T] = new_TLK
            return
        other_TL, both_TL = other_experts(new_TLK, known_TLK)
        self.compared += int(both_TL.any(1).sum())
        self.disagreeing += int(other_TL.any(1).sum())
        self.expert_XLK[place_T] = torch.where(known_TLK >= 0, known_TLK, new_TLK)

    def note_all(self, mine: Mapping[int, tuple[Tensor, Tensor]], world: World) -> None:
        """Note what the passes of all ranks recorded, by their numbers. All ranks call it."""
        for place_T, expert_TLK in world.merge(mine):
            self.note(place_T, expert_TLK)

    def metrics(self) -> dict[str, float]:
        if not self.compared:
            return {}
        return {"router/prompt_disagreement": self.disagreeing / self.compared}


def mixture_of(config: ModelConfig) -> Mixture:
    assert config.experts is not None, "a dense model has no routes: its runs are refused before"
    return config.experts


def sampled_routes(sequences: Sequences, config: ModelConfig) -> RouteRecord | None:
    """Return the routes that the sampler recorded; None where no row has any."""
    if config.experts is None or all(routes is None for routes in sequences.routes):
        return None
    found = RouteRecord.empty(sequences, config)
    prompt_at_R, prompt_R, run_N = sequences.prompt_at_R, sequences.prompt_R, sequences.run_N
    at_N, length_N = sequences.at_N, sequences.length_N
    for row, routes_TLK in enumerate(sequences.routes):
        if routes_TLK is None:
            continue
        prompt, answer = int(prompt_R[run_N[row]]), int(length_N[row]) - 1
        wanted = (prompt + answer, *found.expert_XLK.shape[1:])
        if tuple(routes_TLK.shape) != wanted:
            raise EngineError(
                f"The sampler recorded routes {tuple(routes_TLK.shape)} for row {row}, whose "
                f"{prompt} prompt tokens and {answer + 1} others take {wanted}: tokens without the "
                "last, layers, experts of each. Hand in routes_TLK of that shape, or None."
            )
        check_experts(routes_TLK, config)
        begin, behind = int(prompt_at_R[run_N[row]]), int(at_N[row])
        found.note(begin + torch.arange(prompt), routes_TLK[:prompt])
        found.expert_XLK[behind : behind + answer] = routes_TLK[prompt:]
    return found


@dataclass(frozen=True)
class StepRoutes:
    """Records that the updates of a step are given, or are compared with."""

    replay: RouteRecord | None = None  # experts to visit; None: live ones
    at: RouteRecord | None = None  # experts whose probabilities the ratio compares
    before: RouteRecord | None = None  # experts when the tokens were sampled
    everywhere: bool = False  # the probabilities of all experts are read

    def metrics(self) -> dict[str, float]:
        return {} if self.before is None else self.before.metrics()


@dataclass(frozen=True)
class PackRoutes:
    """One pass over a pack: what it is told and asked, and what that comes to."""

    part: Pack
    config: ModelConfig
    step: StepRoutes

    @cached_property
    def asked(self) -> Routes:
        """Return what goes with the pass."""
        part, step = self.part, self.step
        at_TLK = None if step.at is None else step.at.of(part)
        if step.everywhere:
            every_E = torch.arange(mixture_of(self.config).count, device=part.token_T.device)
            at_TLK = every_E.expand(len(part.token_T), self.config.num_layers, -1)
        return Routes(None if step.replay is None else step.replay.of(part), at_TLK)

    @cached_property
    def layer_L(self) -> Tensor:
        """Return the layers that have experts."""
        return torch.tensor(self.config.sparse_layers, device=self.part.token_T.device)

    def predicting(self, x_TLK: Tensor | None) -> Tensor:
        """Return what is said of the tokens whose hidden states predict the policy's, [A, L, K], in
        layers with experts.
        """
        assert x_TLK is not None, "the pass comes first"
        return x_TLK.index_select(1, self.layer_L).index_select(0, self.part.take_A)

    def streams(self) -> dict[str, Tensor]:
        """Return the streams that a recipe may read, after the pass, with gradient."""
        probability_ALK, found = self.predicting(self.asked.probability_TLK), dict[str, Tensor]()
        if self.step.everywhere:
            found["router_NTE"] = self.part.spread(probability_ALK.mean(1))
        if self.step.at is not None:
            old_ALK = self.predicting(self.step.at.of(self.part))
            if self.step.everywhere:
                probability_ALK = probability_ALK.gather(2, old_ALK.long())
            found["router_NTLK"] = self.part.spread(probability_ALK)
        return found

    @torch.no_grad()
    def counts(self) -> tuple[RouteCounts, Tensor | None]:
        """Count after the pass; and return the share of each token's layers whose experts changed
        since it was sampled, where that is known.
        """
        live_ALK, step = self.predicting(self.asked.live_TLK), self.step
        visits_LE = visits(live_ALK, mixture_of(self.config).count)
        zero_L, zero = torch.zeros_like(visits_LE[:, 0]), torch.zeros_like(visits_LE[0, 0])
        asked, replayed, changed_L, compared_L, rerouted_NT = zero, zero, zero_L, zero_L, None
        if self.asked.replay_TLK is not None:
            known_TL = (self.asked.replay_TLK.index_select(1, self.layer_L) >= 0).all(-1)
            asked, replayed = zero + known_TL.numel(), known_TL.sum()
        if step.before is not None:
            other_AL, known_AL = other_experts(live_ALK, self.predicting(step.before.of(self.part)))
            changed_L, compared_L = other_AL.sum(0), known_AL.sum(0)
            share_A = other_AL.sum(1) / known_AL.sum(1).clamp(min=1)
            rerouted_NT = self.part.spread(share_A)
        return RouteCounts(visits_LE, changed_L, compared_L, asked, replayed), rerouted_NT


@torch.no_grad()
def score_with_routes(
    model: PolicyModel,
    sequences: Sequences,
    parts: Sequence[Sequence[int]],
    temperature: float,
    replay: RouteRecord | None,
    world: World = ALONE,
) -> tuple[dict[str, Tensor], RouteRecord]:
    """Return what a mixture says of all rows before the updates, and which experts they visit."""
    config, record = model.config, RouteRecord.empty(sequences, model.config)
    visited: dict[int, tuple[Tensor, Tensor]] = {}  # by the first row of each pass

    def read(part: Pack) -> dict[str, Tensor]:
        routes = PackRoutes(part, config, StepRoutes(replay))
        said = outputs(model, part, temperature=temperature, routes=routes.asked)
        assert routes.asked.chosen_TLK is not None
        chosen_TLK = routes.asked.chosen_TLK.to("cpu", RECORDED)
        visited[int(part.row_N[0])] = torch.from_numpy(part.read_T), chosen_TLK
        chosen_ALK = routes.predicting(routes.asked.chosen_TLK)
        probability_ALK = routes.predicting(routes.asked.probability_TLK)
        return {
            "old_logp_NT": said["logp_NT"],
            "old_router_NTLK": part.spread(probability_ALK),
            "expert_load_NTE": part.spread(loads(chosen_ALK, mixture_of(config).count)),
        }

    said = read_rows(sequences, parts, model.head_weight.device, read, world)
    record.note_all(visited, world)
    return said, record


def loads(chosen_ALK: Tensor, experts: int) -> Tensor:
    """Return how often a token visits each expert, in the mean over layers: [A, E]."""
    counts_AE = torch.zeros(len(chosen_ALK), experts, device=chosen_ALK.device)
    flat_AS = chosen_ALK.flatten(1).long()
    return (
        counts_AE.scatter_add(1, flat_AS, torch.ones_like(flat_AS, dtype=torch.float32))
        / (chosen_ALK.shape[1])
    )
