"""The gradients of a model's weights under each method, on one recorded batch.

Which weights: those that the step began with, where a checkpoint has them, else the newest before.
`gradient` is that of the loss there: ratios are to the recorded log-probabilities, so with the
weights that sampled they are 1. `pushed` takes the weights per token of the recorded update, which
had moved, and only the gradients of the tokens' log-probabilities from the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from groupwise.errors import RunError
from groupwise.groups.phase import passes
from groupwise.losses.phase import token_phase
from groupwise.methods.composition import Recipe
from groupwise.model.layers.equip import equip
from groupwise.model.layers.transformer import Policy
from groupwise.model.policy import load_policy, starting_policy
from groupwise.optim.assemble import sequences_of
from groupwise.optim.packs import Sequences, micro_batches, outputs
from groupwise.optim.roles import apart
from groupwise.optim.routing import PackRoutes, StepRoutes, sampled_routes
from groupwise.prepare import pins
from groupwise.prepare.placing import check_device
from groupwise.prepare.setup import micro_tokens_of
from groupwise.replay.recorded import Record, Recorded
from groupwise.replay.token_weights import MethodBatch, MethodWeights


@dataclass(frozen=True)
class Weights:
    """A model to take gradients of, and its description."""

    model: Policy
    step: int  # finished steps when they were saved
    path: str

    def __str__(self) -> str:
        which = f"the weights after step {self.step}" if self.step else "the starting weights"
        return f"{which} ({self.path})"


def place_before(run: Recorded, step: int) -> tuple[int, Path | None]:
    """Return the newest checkpoint that the step did not change yet; None: the starting model."""
    folders = [
        *run.folder.checkpoints.glob("step_*"),
        *(run.folder.path / "snapshots").glob("step_*"),
    ]
    found = {
        int(name): path
        for path in folders
        if (name := path.name.removeprefix("step_")).isdecimal() and int(name) < step
    }
    return max(found.items()) if found else (0, None)


def load_weights(run: Recorded, step: int) -> Weights:
    """Load the weights that the step began with, or the newest before."""
    number, path = place_before(run, step)
    config = run.config
    check_device(config.model.device)
    if path is not None:
        loaded = load_policy(path, getattr(torch, config.model.dtype), config.model.device)
    else:
        embedded = config.model.path == "tiny"
        start: str | Path = run.folder.path / "cold_start" if embedded else config.model.path
        if embedded and not Path(start).is_dir():
            raise RunError(
                f"{run.folder.path} has neither a checkpoint before step {step} nor its "
                "cold_start/: there are no weights to take gradients of. Leave --gradients out."
            )
        pinned = pins.pinned(config, run.folder.read_manifest())
        loaded = starting_policy(pinned, start if embedded else pinned.model.path)
        path = Path(start)
    equip(loaded.model, exact=config.engine.exact)
    return Weights(loaded.model, number, str(path))


def gradient(run: Recorded, weights: Weights, recipe: Recipe, found: MethodBatch) -> Tensor:
    """Return d loss / d parameters, flat, in float32: summed over passes and micro-batches."""
    model, sequences = weights.model, sequences_of(found.groups)
    device, temperature = model.head_weight.device, run.config.engine.temperature
    trained, routes = _cleared(model), _routes(recipe, sequences, model)
    for one_pass in passes(recipe, found.batch.to(device)):
        for rows in micro_batches(sequences, range(found.batch.rows), _room(run, model)):
            part = sequences.pack(rows, device)
            asked = None if routes is None else PackRoutes(part, model.config, routes).asked
            seen = outputs(model, part, temperature=temperature, routes=asked)
            if one_pass.length_exponent is not None:
                seen["length_exponent"] = one_pass.length_exponent
            micro = one_pass.select(torch.tensor(rows, device=device))
            loss = token_phase(recipe, micro, apart=apart(recipe), **seen).loss
            loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([_flat(parameter) for parameter in trained])


def pushed(run: Recorded, weights: Weights, mine: MethodWeights, record: Record) -> Tensor:
    """Return Σ weight · d log-probability / d parameters, flat, in float32."""
    model, sequences = weights.model, sequences_of(record.groups)
    device, temperature = model.head_weight.device, run.config.engine.temperature
    trained = _cleared(model)
    routes = _routes(mine.batched.recipe, sequences, model)
    for rows in micro_batches(sequences, range(len(mine.weight_NT)), _room(run, model)):
        part = sequences.pack(rows, device)
        asked = None if routes is None else PackRoutes(part, model.config, routes).asked
        seen = outputs(model, part, temperature=temperature, routes=asked)
        weight_NT = mine.weight_NT[rows].to(device, seen["logp_NT"].dtype)
        (weight_NT * seen["logp_NT"]).sum().backward()  # type: ignore[no-untyped-call]
    return torch.cat([_flat(parameter) for parameter in trained])


def _routes(recipe: Recipe, sequences: Sequences, model: Policy) -> StepRoutes | None:
    """Return the experts that the sampler visited, for a method that goes through them.

    Those that the learner scored with are not recorded: they are live ones of these weights.
    """
    if recipe.replays != "sampler":
        return None
    recorded = sampled_routes(sequences, model.config)
    return None if recorded is None else StepRoutes(recorded)


def _cleared(model: Policy) -> list[Tensor]:
    """Return what learns, with its gradient removed."""
    trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = None
    return trained


def _room(run: Recorded, model: Policy) -> int:
    return micro_tokens_of(run.config, model.config)


def _flat(parameter: Tensor) -> Tensor:
    found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return found.float().flatten().cpu()
