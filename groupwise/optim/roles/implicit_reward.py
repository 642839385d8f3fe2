"""The implicit reward model: a language model whose log-odds to its start are rewards a token.

PRIME (2502.01456): r_φ(y_t) = β·(ℓ^φ_t − ℓ^ref_t), where φ learns online from outcomes alone, and
ref is φ as it was at the start: the frozen reference of the run, which starts as the same model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from groupwise.config import Config
from groupwise.groups.credit import implicit_reward
from groupwise.methods.composition import Recipe
from groupwise.methods.method import Method
from groupwise.model.cost import LearningModel, RoleSize
from groupwise.model.layers.transformer import Policy, copy_trained
from groupwise.optim.packs import Pack, outputs
from groupwise.optim.roles.role import Score
from groupwise.optim.roles.trained import TrainedModel
from groupwise.optim.schedules import learning_rate
from groupwise.records import TokenBatch

NEIGHBOURS = 4  # numbers on either side that a division can be off by


class ImplicitRewardModel(TrainedModel):
    """A copy of the starting policy that learns to tell right answers from wrong ones."""

    name = "prm"
    settings: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "reward_model.update",
            "reward_model.learning_rate",
            "reward_model.schedule",
            "reward_model.min_share",
            "reward_model.warmup_steps",
            "reward_model.weight_decay",
            "reward_model.clip_norm",
        ),
        "it has no implicit reward model: take prime",
    )

    def __init__(self, model: Policy, config: Config) -> None:
        own = copy_trained(model)
        own.ops.lay_out(own)
        own.recompute = config.optim.recompute
        self._temperature = config.engine.temperature
        self._before = config.reward_model.update == "before"
        super().__init__(
            own,
            config.optim,
            weight_decay=config.reward_model.weight_decay,
            clip_norm=config.reward_model.clip_norm,
        )

    @classmethod
    def made(cls, model: Policy, recipe: Method, config: Config) -> ImplicitRewardModel:
        return cls(model, config)

    @classmethod
    def size(cls, config: Config, width: int) -> RoleSize:
        again = config.reward_model.update == "before"  # it is asked once more when it has learned
        return RoleSize(
            cls.name,
            passes=2 if again else 1,
            updates=1,
            model=LearningModel(),
            instead={"a recipe without a reward model (rloo, grpo)": None},
        )

    @classmethod
    def refused(cls, config: Config) -> list[str]:
        if config.reference.update == "frozen":
            return []
        return [
            f"reference.update={config.reference.update} would move what the implicit reward model "
            f"of {config.recipe.name} is measured against, and with it every reward. Leave it "
            "frozen."
        ]

    @classmethod
    def notes(cls, config: Config) -> list[str]:
        asked = config.reward_model
        return [
            f"implicit reward model: starts as the policy, learns {asked.update} its rewards are "
            f"used, learning rate {asked.learning_rate:g}"
        ]

    @classmethod
    def description(cls, config: Config) -> str:
        return f"implicit reward model (learns {config.reward_model.update} it is read)"

    @classmethod
    def rate(cls, config: Config, step: int, total_steps: int) -> float:
        asked = config.reward_model
        return learning_rate(
            step,
            base=asked.learning_rate,
            schedule=asked.schedule,
            warmup_steps=asked.warmup_steps,
            total_steps=total_steps,
            min_share=asked.min_share,
        )

    def streams(self, score: Score) -> dict[str, Tensor]:
        return {"prm_logp_NT": score(self.model)}

    def learns_first(self) -> bool:
        return self._before

    def outputs(self, packed: Pack) -> dict[str, Tensor]:
        found = outputs(self.model, packed, temperature=self._temperature)
        return {"prm_logp_NT": found["logp_NT"]}

    def measures(self, recipe: Recipe, batch: TokenBatch) -> dict[str, float]:
        beta = beta_of(recipe)
        return {} if beta is None else reward_measures(batch, beta)

    def columns(self, recipe: Recipe, batch: TokenBatch) -> dict[str, Tensor]:
        beta = beta_of(recipe)
        return {} if beta is None else {"process_reward": implicit_reward(batch, beta)}


def beta_of(recipe: Recipe) -> float | None:
    """Return the β that the model is trained with; None where nothing trains it."""
    (beta,) = {term["beta"] for term in recipe.terms_of(ImplicitRewardModel.name)} or (None,)
    return beta


def logp_behind(process_NT: Tensor, ref_NT: Tensor, beta: float) -> Tensor:
    """Return ℓ^φ of which these process rewards were made, as far as rounding lets them be told.

    Of the numbers next to r/β + ℓ^ref the first that gives the same bits again.
    """
    near_NT = (process_NT.double() / beta + ref_NT.double()).to(ref_NT.dtype)
    found_NT = near_NT
    for toward in (torch.inf, -torch.inf):
        other_NT = near_NT
        for _ in range(NEIGHBOURS):
            other_NT = torch.nextafter(other_NT, torch.full_like(other_NT, toward))
            wrong_NT = beta * (found_NT - ref_NT) != process_NT
            right_NT = beta * (other_NT - ref_NT) == process_NT
            found_NT = torch.where(wrong_NT & right_NT, other_NT, found_NT)
    return found_NT


@torch.no_grad()
def reward_measures(batch: TokenBatch, beta: float) -> dict[str, float]:
    """Measure an implicit reward model on answers that it has not learned from yet.

    An answer's reward is r = Σ_t r_φ(y_t); r above 0 says that it is right.
    """
    off_NT = batch.stream("prm_logp_NT") - batch.stream("ref_logp_NT")
    reward_N = beta * off_NT.sum(1).double()
    gather = batch.world.gather
    kept_M = gather(batch.stream("learn_N") & (batch.length_N > 0))
    reward_M, right_M = gather(reward_N)[kept_M], gather(batch.stream("correct_N"))[kept_M]
    length_M = gather(batch.length_N)[kept_M].double()
    if not len(reward_M):
        return {}
    found = {"prm/accuracy": float(((reward_M > 0) == right_M).double().mean())}
    for name, rows_M in (("right", right_M), ("wrong", ~right_M)):
        if rows_M.any():
            found[f"prm/reward_{name}"] = float(reward_M[rows_M].mean())
    if reward_M.std(correction=0) > 0 and length_M.std(correction=0) > 0:
        both = torch.stack((reward_M, length_M))
        found["prm/length_correlation"] = float(torch.corrcoef(both)[0, 1])
    return found
