"""AdamW by name: PyTorch's fused kernel, float32 master weights, a state that a file can hold.

A bfloat16 parameter has 8 bits of precision: an update below 1/256 of a weight would round away,
step after step, and so would a micro-batch's gradient that is small against the sum so far. Such
parameters get a float32 master copy that takes the updates, and a float32 gradient. float32
parameters need neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from groupwise import config
from groupwise.errors import ModelError, RunError
from groupwise.parallel.sharding import part, sharded_like, stored_dtype
from groupwise.parallel.world import ALONE, World

HALF = (torch.bfloat16, torch.float16)
FEW_STEPS = 5  # before them moments are of too few gradients to tell signal from noise


def make_optimizer(
    named: Iterable[tuple[str, nn.Parameter]], optim: config.Optim, weight_decay: float
) -> AdamW:
    """Return the optimizer that a configuration asks for."""
    return AdamW(
        named,
        learning_rate=optim.learning_rate,
        beta1=optim.beta1,
        beta2=optim.beta2,
        eps=optim.eps,
        weight_decay=weight_decay,
        offload=optim.offload,
    )


class AdamW:
    """Decoupled weight decay on matrices, embeddings included; norms and biases are left alone.

    Parameters without `requires_grad` are skipped. With `offload` moments and masters lie on the
    host, and are with the parameter for as long as it is updated.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        learning_rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        offload: bool = False,
    ) -> None:
        self.steps = 0  # done so far
        self._offload = offload
        self._learning_rate, self._weight_decay = learning_rate, weight_decay
        self._beta1, self._beta2, self._eps = beta1, beta2, eps
        self._parameters = {name: p for name, p in named_parameters if p.requires_grad}
        if len({id(p) for p in self._parameters.values()}) < len(self._parameters):
            raise ModelError(
                "A parameter has two names and would be updated twice. Pass "
                "model.named_parameters(), which lists every parameter once."
            )
        self._halves = sorted(n for n, p in self._parameters.items() if p.dtype in HALF)
        for name in self._halves:
            self._parameters[name].grad_dtype = torch.float32
        # What the kernel updates: the parameter itself (of a sharded one this rank's part, which is
        # float32), or its float32 master.
        self._weights = {
            name: p.detach().float() if p.dtype in HALF else part(p.detach())
            for name, p in self._parameters.items()
        }
        self._masters = [n for n, p in self._parameters.items() if stored_dtype(p) in HALF]
        where = "cpu" if offload else None
        if offload:
            for name in self._halves:
                self._weights[name] = self._weights[name].to(where)
        self._exp_avg, self._exp_avg_sq = (
            {name: torch.zeros_like(w, device=where) for name, w in self._weights.items()}
            for _ in range(2)
        )

    @torch.no_grad()
    def step(self, learning_rate: float | None = None) -> None:
        """Make one update with the gradients as they are; at the constructor's rate by default."""
        rate = self._learning_rate if learning_rate is None else learning_rate
        matrices = [name for name, p in self._parameters.items() if p.dim() >= 2]
        others = [name for name, p in self._parameters.items() if p.dim() < 2]
        gradients = {name: gradient_of(name, p) for name, p in self._parameters.items()}
        for names, decay in ((matrices, self._weight_decay), (others, 0.0)):
            # Of what lies on the host no more than one parameter's numbers are on the device.
            for few in [[name] for name in names] if self._offload else [names] if names else []:
                self._update(few, gradients, rate, decay)
        self.steps += 1
        for name in self._halves:
            self._parameters[name].copy_(self._weights[name])

    def _update(
        self, names: list[str], gradients: Mapping[str, Tensor], rate: float, decay: float
    ) -> None:
        weights, first, second = (
            [self._near(held[name], gradients[name]) for name in names]
            for held in (self._weights, self._exp_avg, self._exp_avg_sq)
        )
        # The kernel wants, and counts up, a number for each tensor; all have done the same steps.
        done = torch.full((len(names),), float(self.steps), device=weights[0].device)
        adamw(
            weights,
            [gradients[name] for name in names],
            first,
            second,
            [],
            list(done.unbind()),
            fused=True,
            amsgrad=False,
            beta1=self._beta1,
            beta2=self._beta2,
            lr=rate,
            weight_decay=decay,
            eps=self._eps,
            maximize=False,
        )
        for held, near in ((self._weights, weights), (self._exp_avg, first),
                           (self._exp_avg_sq, second)):  # fmt: skip
            for name, x in zip(names, near, strict=True):
                if x is not held[name]:
                    held[name].copy_(x)

    def _near(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Return a tensor where the gradient is: a copy, if it lies on the host."""
        return x.to(gradient.device, copy=True) if self._offload else x

    @torch.no_grad()
    def signal_to_noise(self, world: World = ALONE) -> float | None:
        """Return ‖mean gradient‖² over its variance, in the last 1/(1−β1) updates or so.

        From the moments that are there anyway: E m² holds c of the variance as well, where c is the
        sum of the squared weights of the average, and E v is both. Below 0 where updates cancel
        more than chance has it. None in the first updates.
        """
        if self.steps < FEW_STEPS:
            return None
        decay1, decay2 = self._beta1**self.steps, self._beta2**self.steps
        # Second moments are nowhere below 0: the sum of their sizes is their sum.
        norms = torch._foreach_norm(list(self._exp_avg.values()))
        sums = torch._foreach_norm(list(self._exp_avg_sq.values()), 1)
        both = [torch.stack(norms).double().square().sum(), torch.stack(sums).double().sum()]
        first, second = world.total(torch.stack(both)).tolist()
        mean_square, square = first / (1 - decay1) ** 2, second / (1 - decay2)
        c = (1 - self._beta1) / (1 + self._beta1) * (1 + decay1) / (1 - decay1)
        signal = (mean_square - c * square) / (1 - c)
        return signal / (square - signal) if square > signal else None

    def state(self) -> dict[str, Tensor]:
        """Return all that the next step depends on besides the parameters: tensors, no copies."""
        masters = {name: self._weights[name] for name in sorted(self._masters)}
        kinds = {"exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq, "master": masters}
        return {
            "step": torch.tensor(self.steps),
            **{
                f"{kind}/{name}": sharded_like(self._parameters[name], x)
                for kind, held in kinds.items()
                for name, x in held.items()
            },
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state()`. The parameters must be those of the same moment."""
        own = self.state()
        check_layout("The optimizer's state", state, own)
        for name in self._masters:
            parameter, dtype = part(self._parameters[name]), stored_dtype(self._parameters[name])
            if not torch.equal(part(state[f"master/{name}"]).to(dtype), parameter.to(dtype)):
                raise RunError(
                    f"{name} is not its master weight rounded to {dtype}: weights and "
                    f"optimizer state are of different steps. Load both from one checkpoint, the "
                    f"weights first."
                )
        for name, tensor in own.items():
            part(tensor).copy_(part(state[name]))
        self.steps = int(state["step"])


def gradient_of(name: str, parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise ModelError(
            f"{name} has no gradient: no backward pass reached it, so it would not be trained. "
            f"Run one first, or freeze it with requires_grad_(False)."
        )
    return part(parameter.grad)


def check_layout(what: str, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Refuse a saved state that belongs to another model or configuration."""
    hint = "It belongs to another model or configuration; use the checkpoint of this run."
    for name in own:
        if name not in given:
            raise RunError(f"{what} lacks {name!r}. {hint}")
    for name, found in given.items():
        if name not in own:
            raise RunError(f"{what} holds {name!r}, which has no place here. {hint}")
        if found.shape != own[name].shape or found.dtype != own[name].dtype:
            raise RunError(
                f"{what} has {name!r} as {found.dtype} {tuple(found.shape)}, here it is "
                f"{own[name].dtype} {tuple(own[name].shape)}. {hint}"
            )
