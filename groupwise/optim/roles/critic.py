"""The critic: a model that says, before every token, how well the answer will end."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from groupwise.config import Config
from groupwise.errors import ConfigError, ModelError
from groupwise.losses.auxiliary import clipped_value_error
from groupwise.losses.measures import Tally
from groupwise.methods.composition import Recipe
from groupwise.methods.method import Method
from groupwise.model.adapters.lora import attach
from groupwise.model.adapters.targets import ALPHA, Spec
from groupwise.model.config import ModelConfig
from groupwise.model.cost import LearningModel, RoleSize
from groupwise.model.formats.checkpoint import stored_shape
from groupwise.model.formats.classifier import load_scalar_head
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.layers.equip import equip
from groupwise.model.layers.transformer import Policy, copy_trained
from groupwise.model.policy import spec_of
from groupwise.model.room import USUAL
from groupwise.model.scalar_head import ScalarHead
from groupwise.optim.packs import Pack, values
from groupwise.optim.roles.other_model import check_length, other_tokens
from groupwise.optim.roles.role import Score
from groupwise.optim.roles.trained import TrainedModel
from groupwise.optim.schedules import learning_rate
from groupwise.records import Task, TokenBatch

POLICY = "policy"  # critic.start: a copy of it
TIMES_POLICY = 10.0  # the critic's learning rate by default
TENTHS = 10
TARGET = "return_NT"  # of a value loss, among what it prepares
NO_VARIANCE = 1e-10  # of targets, against their squares: below it they are equal but for rounding


class Critic(TrainedModel):
    """A transformer with one number a token: V of the state before it (see ScalarHead).

    It starts as the policy with a head of 0, so that before its first update every value is 0 and
    an advantage is what the answer really got.
    """

    name = "critic"
    settings: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "critic.start",
            "critic.adapter",
            "critic.learning_rate",
            "critic.schedule",
            "critic.min_share",
            "critic.warmup_steps",
            "critic.weight_decay",
            "critic.clip_norm",
            "critic.alone_steps",
            "critic.alone_patience",
            "critic.truth_prompts",
        ),
        "it has no critic: take ppo",
    )

    def __init__(self, model: ScalarHead, config: Config) -> None:
        model.trunk.recompute = config.optim.recompute
        super().__init__(
            model,
            config.optim,
            weight_decay=config.critic.weight_decay,
            clip_norm=config.critic.clip_norm,
        )

    @classmethod
    def made(cls, model: Policy, recipe: Method, config: Config) -> Critic:
        if config.critic.start != POLICY:
            return cls(_from_folder(model, config), config)
        return cls(ScalarHead(_trunk(model, config)), config)

    @classmethod
    def refused(cls, config: Config) -> list[str]:
        if config.critic.alone_patience and not cls.alone_steps(config):
            return [
                "critic.alone_patience ends critic.alone_steps early, and there are none. Set "
                "critic.alone_steps to the most that it may take, or leave critic.alone_patience 0."
            ]
        return [] if config.critic.start == POLICY else _other_tokenizer(config)

    @classmethod
    def check_tokens(cls, config: Config, tasks: Sequence[Task], tokenizer: Tokenizer) -> None:
        if config.critic.start == POLICY:
            return
        if wrong := _other_tokenizer(config, tokenizer):
            raise ConfigError(wrong[0])
        check_length(config, "critic.start:", config.critic.start, tasks)

    @classmethod
    def size(cls, config: Config, width: int) -> RoleSize:
        asked, start = config.critic, config.critic.start
        other = None if start == POLICY else _shape_of(start)
        spec = Spec(asked.adapter, ALPHA) if asked.adapter else None
        if spec is None and other is not None and config.adapter.used:
            spec = spec_of(config)  # of other weights than the policy's, and as much as of those
        made = RoleSize(
            cls.name,
            passes=1,
            updates=1,
            model=LearningModel(other, spec, scalar=True),
            smaller="critic.start=PATH of a model",
        )
        lighter = replace(made, model=LearningModel(other, USUAL, scalar=True))
        instead: dict[str, RoleSize | None] = {"a recipe without a critic (reinforce_pp)": None}
        if spec is None and not config.adapter.used:
            instead = {f"critic.adapter={USUAL.rank} (LoRA)": lighter, **instead}
        return replace(made, instead=instead)

    @classmethod
    def notes(cls, config: Config) -> list[str]:
        alone = cls.alone_steps(config)
        lines = [f"{cls.description(config)}: learning rate {base_rate(config):g}"]
        if alone >= config.steps:
            lines.append(
                f"warning: the critic learns alone for {alone} steps, and the run has "
                f"{config.steps}: the policy never learns. Set critic.alone_steps or raise steps."
            )
        elif alone:
            most = "at most the first" if config.critic.alone_patience else "the first"
            lines.append(f"{most} {alone} steps teach the critic alone; the policy waits")
        return lines

    @classmethod
    def description(cls, config: Config) -> str:
        asked = config.critic
        start = "the policy's start" if asked.start == POLICY else asked.start
        how = f", LoRA of rank {asked.adapter}" if asked.adapter else ""
        return f"critic ({start}{how})"

    @classmethod
    def alone_steps(cls, config: Config) -> int:
        asked = config.critic.alone_steps
        if asked == "recipe":
            return int(config.recipe.about.setting.get("value_only_steps", 0))
        return asked

    @classmethod
    def rate(cls, config: Config, step: int, total_steps: int) -> float:
        asked = config.critic
        return learning_rate(
            step,
            base=base_rate(config),
            schedule=asked.schedule,
            warmup_steps=asked.warmup_steps,
            total_steps=total_steps,
            min_share=asked.min_share,
        )

    def learning(self) -> Iterable[tuple[str, nn.Parameter]]:
        found: Iterable[tuple[str, nn.Parameter]] = self.model.learning_parameters()
        return found

    def streams(self, score: Score) -> dict[str, Tensor]:
        return {"old_value_NT": score.values(self._values)}

    def outputs(self, packed: Pack) -> dict[str, Tensor]:
        return {"value_NT": self._values(packed)}

    def _values(self, packed: Pack) -> Tensor:
        return values(self.model, packed)

    def measures(self, recipe: Recipe, batch: TokenBatch) -> dict[str, float]:
        target_NT = targets(recipe, batch)
        return {} if target_NT is None else value_measures(batch, target_NT)

    def columns(self, recipe: Recipe, batch: TokenBatch) -> dict[str, Tensor]:
        found = {"value": batch.stream("old_value_NT")}
        target_NT = targets(recipe, batch)
        return found if target_NT is None else found | {"return_": batch.valid(target_NT)}

    @classmethod
    def alone(cls, recipe: Recipe) -> Recipe:
        return monte_carlo(recipe)

    def tally(self, recipe: Recipe, batch: TokenBatch) -> Tally:
        totals: dict[str, Any] = {}
        for term in recipe.terms_of(self.name):
            if "limit" in dict(term.params):
                value_NT, old_NT = batch.stream("value_NT"), batch.stream("old_value_NT")
                target_NT = batch.prepared[term.name][TARGET]
                _, clipped_NT = clipped_value_error(value_NT, old_NT, target_NT, term["limit"])
                learned_NT = batch.learned(clipped_NT)
                totals["critic/clip_share"] = (learned_NT.sum(), batch.learned_NT.sum())
        return Tally(totals, {})


def targets(recipe: Recipe, batch: TokenBatch) -> Tensor | None:
    """Return what the critic is to say of each token; None where nothing teaches it."""
    for term in recipe.terms_of(Critic.name):
        if TARGET in batch.prepared[term.name]:
            return batch.prepared[term.name][TARGET]
    return None


@functools.cache
def _shape_of(start: str) -> ModelConfig | None:
    """Read the sizes of a critic's folder; None where they can't be read, which loading tells."""
    return stored_shape(start)


def base_rate(config: Config) -> float:
    """Return the critic's learning rate when it is at its full value."""
    return config.critic.learning_rate or TIMES_POLICY * config.optim.learning_rate


def _other_tokenizer(config: Config, own: Tokenizer | None = None) -> list[str]:
    """Say that the critic's start reads other tokens than the policy writes, where it does."""
    other = other_tokens(config, config.critic.start, own)
    if not other:
        return []
    return [
        f"critic.start={config.critic.start} has another tokenizer than {config.model.path}: "
        f"{other}. A critic reads the policy's tokens. Take a model of the same family, or "
        "critic.start=policy."
    ]


def _from_folder(model: Policy, config: Config) -> ScalarHead:
    """Load a critic's start: a classifier with its score, or layers under a score of 0."""
    start, like = config.critic.start, model.head_weight
    head = load_scalar_head(start, like.dtype, like.device)
    if head.trunk.config.vocab_size < model.config.vocab_size:
        raise ModelError(
            f"critic.start={start} knows {head.trunk.config.vocab_size} tokens, and the policy "
            f"writes {model.config.vocab_size}. Take a model with the policy's tokenizer, or "
            "critic.start=policy."
        )
    if config.critic.adapter:
        attach(head.trunk, Spec(config.critic.adapter, ALPHA), seed=config.seed)
    elif config.adapter.used:  # as the policy learns
        attach(head.trunk, spec_of(config), seed=config.seed)
    equip(head.trunk, exact=config.engine.exact)
    return head


def _trunk(model: Policy, config: Config) -> Policy:
    """Return the layers that a critic begins with: the policy's, on memory of their own.

    What is frozen in the policy is shared. An adapter beside a policy that learns as a whole sits
    on a frozen copy: the policy's own weights will move away from under it.
    """
    trunk = copy_trained(model)
    if config.critic.adapter:
        attach(trunk, Spec(config.critic.adapter, ALPHA), seed=config.seed)
    trunk.ops.lay_out(trunk)
    return trunk


def monte_carlo(recipe: Recipe) -> Recipe:
    """Return the recipe with what really came as the critic's target, as pre-training has it."""
    terms = tuple(
        term.replace(lam=1.0)
        if term in recipe.terms_of("critic") and "lam" in dict(term.params)
        else term
        for term in recipe.auxiliary
    )
    if terms == recipe.auxiliary:
        return recipe
    return recipe.replace(auxiliary=terms, name=recipe.name, about=recipe.about)


@torch.no_grad()
def value_measures(batch: TokenBatch, target_NT: Tensor) -> dict[str, float]:
    """Measure a critic before an update: what it knows of its targets R̂, and where it is off.

    Bias is the mean of V − R̂ by tenth of the answer: one number would hide a start that is too high
    and an end that is too low.
    """
    learned_NT, value_NT = batch.learned_NT.bool(), batch.stream("old_value_NT").double()
    number_NT = batch.mask_NT.cumsum(1) - 1  # of the policy's own tokens
    tenth_NT = number_NT * TENTHS // batch.length_N.clamp(min=1)[:, None]
    places = {
        "": learned_NT,
        "_first": learned_NT & (number_NT == 0),
        "_last": learned_NT & (number_NT == batch.length_N[:, None] - 1),
    }
    found: dict[str, float] = {}
    for place, kept_NT in places.items():
        share = explained_variance(batch, value_NT, target_NT, kept_NT)
        if share is not None:
            found[f"critic/explained_variance{place}"] = share
    for tenth in range(TENTHS):
        kept_NT = learned_NT & (tenth_NT == tenth)
        count, off = _sums(batch, kept_NT, (value_NT - target_NT,))
        if count:
            found[f"critic/bias_{tenth + 1}"] = off / count
    count, total, returns = _sums(batch, learned_NT, (value_NT, target_NT.double()))
    if not count:
        return found
    gather = batch.world.gather
    low_N = torch.where(learned_NT, value_NT, torch.inf).amin(1)
    high_N = torch.where(learned_NT, value_NT, -torch.inf).amax(1)
    reward_M = gather(_total_rewards(batch))[gather(learned_NT.any(1))]
    return found | {
        "critic/value_mean": total / count,
        "critic/value_min": float(gather(low_N).min()),
        "critic/value_max": float(gather(high_N).max()),
        "critic/return_mean": returns / count,
        "critic/reward_min": float(reward_M.min()),
        "critic/reward_max": float(reward_M.max()),
    }


def _total_rewards(batch: TokenBatch) -> Tensor:
    """Return what each answer got in all, shaped: the values that a critic could have to say."""
    total_N = batch.stream("reward_N").double()
    return total_N if batch.token_reward_NT is None else total_N + batch.token_reward_NT.sum(1)


def explained_variance(
    batch: TokenBatch, value_NT: Tensor, target_NT: Tensor, kept_NT: Tensor
) -> float | None:
    """Return 1 − Var(R̂ − V)/Var(R̂) over some tokens of all ranks; None where R̂ does not vary."""
    target_NT = target_NT.double()
    off_NT = target_NT - value_NT.double()
    squares = (target_NT, target_NT.square(), off_NT, off_NT.square())
    count, *sums = _sums(batch, kept_NT, squares)
    if not count:
        return None
    mean, square, off, off_square = (x / count for x in sums)
    variance = square - mean**2
    if variance <= NO_VARIANCE * max(square, 1.0):
        return None
    return 1.0 - (off_square - off**2) / variance


def _sums(batch: TokenBatch, kept_NT: Tensor, many_NT: Sequence[Tensor]) -> list[float]:
    """Return how many tokens of all ranks are kept, and sums over them."""
    columns = [torch.where(kept_NT, x_NT.double(), 0.0).sum(1) for x_NT in many_NT]
    rows_NK = torch.stack([kept_NT.sum(1).double(), *columns], 1)
    sums: list[float] = batch.world.gather(rows_NK).sum(0).tolist()
    return sums
