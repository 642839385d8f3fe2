"""Routes of tokens through a mixture of experts: what a pass is told of them, and what it tells.

A `Routes` goes with a pass as `attend` does, through `Policy.forward`, `predict` and `hidden`:

    routes = Routes(replay_TLK=recorded, at_TLK=old)
    found = model.predict(token_T, position_T, attend, query, routes)
    routes.chosen_TLK, routes.probability_TLK

Without one, each token goes live to its likeliest experts, and nothing is kept. Axes: `_L` layer of
the model, dense ones included, so that a route is found by its layer's number however often and in
which order layers run; `_K` experts of a token; else as in transformer.py. -1 stands where there is
no expert: in dense layers (`config.sparse_layers` are the others), and where a record is missing.

    replayed   the recorded experts, with weights from the full live softmax, which keeps its
               gradient: losses/routing.py's `replay_gates`
    missing    a token of which one expert in a layer is -1 is routed live in that layer

All tensors are made by the pass itself, never in a layer that may run again: with recomputation
their gradient flows all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.errors import ModelError
from groupwise.model.config import ModelConfig

NOWHERE = -1  # in the place of an expert
RECORDED = torch.int16  # what experts are recorded in


class RouteAsk(NamedTuple):
    """A layer's part of what a pass is told."""

    replay_TK: Tensor | None = None
    at_TK: Tensor | None = None
    told: bool = False  # what was visited is wanted


NOTHING = RouteAsk()


class Visited(NamedTuple):
    """A layer's part of what a pass tells."""

    chosen_TK: Tensor
    probability_TK: Tensor
    live_TK: Tensor  # the likeliest experts, whatever was replayed


@dataclass
class Routes:
    """The routes of a pack's tokens: asked for before a pass, found after it."""

    replay_TLK: Tensor | None = None  # experts to visit, integers; None: all are routed live
    at_TLK: Tensor | None = None  # experts whose probabilities are asked for; None: the visited
    chosen_TLK: Tensor | None = field(default=None, init=False)  # visited; of RECORDED
    live_TLK: Tensor | None = field(default=None, init=False)  # those without a replay
    # Of the full softmax, in float32 at least and with gradient; 0 where there is no expert.
    probability_TLK: Tensor | None = field(default=None, init=False)

    def asked(self, layer: int) -> RouteAsk:
        replay_TK = None if self.replay_TLK is None else self.replay_TLK[:, layer]
        at_TK = None if self.at_TLK is None else self.at_TLK[:, layer]
        return RouteAsk(replay_TK, at_TK, told=True)

    def keep(self, visited: Sequence[Visited | None]) -> None:
        """Keep what the layers told, in their order; None of dense ones."""
        some = next(each for each in visited if each is not None)
        nowhere_TK = torch.full_like(some.chosen_TK, NOWHERE)
        empty = Visited(nowhere_TK, torch.zeros_like(some.probability_TK), nowhere_TK)
        every = [empty if each is None else each for each in visited]
        self.chosen_TLK = torch.stack([each.chosen_TK for each in every], 1).to(RECORDED)
        self.live_TLK = torch.stack([each.live_TK for each in every], 1).to(RECORDED)
        self.probability_TLK = torch.stack([each.probability_TK for each in every], 1)

    def check(self, config: ModelConfig, tokens: int) -> None:
        """Refuse routes that belong to another model or pack."""
        if config.experts is None:
            raise ModelError(
                f"Routes were asked of a model of the family {config.family}, which has no experts "
                "to route to. Leave them out, or take a mixture of experts."
            )
        experts = config.experts
        if self.replay_TLK is not None:
            wanted = (tokens, config.num_layers, experts.chosen)
            _check_shape("The recorded routes", self.replay_TLK, wanted)
        if self.at_TLK is not None:
            wanted = (tokens, config.num_layers, self.at_TLK.shape[-1])
            _check_shape("The experts that are asked about", self.at_TLK, wanted)


def _check_shape(what: str, given: Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(given.shape) != wanted or given.is_floating_point():
        raise ModelError(
            f"{what} are {given.dtype} {tuple(given.shape)}; this pack and model need integers "
            f"{wanted}: tokens, layers (dense ones included), experts of each. They were recorded "
            "under another model or for other tokens."
        )


def check_experts(routes_TLK: Tensor, config: ModelConfig) -> None:
    """Refuse numbers of experts that the model does not have. It waits for the device."""
    experts = config.experts
    assert experts is not None
    if routes_TLK.numel() and not NOWHERE <= routes_TLK.min() <= routes_TLK.max() < experts.count:
        raise ModelError(
            f"Recorded routes hold experts from {int(routes_TLK.min())} to "
            f"{int(routes_TLK.max())}; this model has {experts.count} a layer. They belong to "
            "another model: record them anew."
        )
