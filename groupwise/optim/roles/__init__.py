"""Models that take part beside the policy: what they give to a batch, and how they change.

To add one, write a file with a `Role`, add it to `ROLES`, and describe it in `streams.ROLE_FACTS`.
"""

from __future__ import annotations

from groupwise.config import Config
from groupwise.methods.composition import Recipe
from groupwise.methods.method import Method
from groupwise.model.cost import RoleSize
from groupwise.model.layers.transformer import Policy
from groupwise.optim.roles.critic import Critic
from groupwise.optim.roles.implicit_reward import ImplicitRewardModel
from groupwise.optim.roles.length_exponent import LengthExponent
from groupwise.optim.roles.reference import Reference
from groupwise.optim.roles.role import Role
from groupwise.optim.roles.teacher import Teacher
from groupwise.optim.schedules import LearningRates, learning_rate

ROLES: dict[str, type[Role]] = {
    role.name: role for role in (Reference, Critic, ImplicitRewardModel, Teacher, LengthExponent)
}


def make_roles(model: Policy, recipe: Method, config: Config) -> dict[str, Role]:
    """Make what the recipe needs beside the policy, from the policy as it starts."""
    return {name: ROLES[name].made(model, recipe, config) for name in recipe.roles}


def apart(recipe: Method) -> list[str]:
    """Return the recipe's roles that learn in passes of their own."""
    return [name for name in recipe.roles if ROLES[name].apart]


def while_waiting(recipe: Recipe) -> Recipe:
    """Return the recipe as it runs while a role learns and the policy waits."""
    for name in recipe.roles:
        recipe = ROLES[name].alone(recipe)
    return recipe


def role_sizes(config: Config, width: int) -> tuple[RoleSize, ...]:
    """Return what the recipe's roles take; a weight has `width` bytes."""
    return tuple(ROLES[n].size(config, width) for n in config.recipe.roles if n in ROLES)


def role_notes(config: Config) -> list[str]:
    """Return what a person should know of the recipe's roles when a run starts."""
    return [note for name in config.recipe.roles for note in ROLES[name].notes(config)]


def alone_steps(config: Config) -> int:
    """Return the steps at the start in which a role learns and the policy waits for it."""
    return max((ROLES[name].alone_steps(config) for name in config.recipe.roles), default=0)


def rates_at(
    config: Config, step: int, total_steps: int, waited: int | None = None
) -> LearningRates:
    """Return everybody's learning rate at a step, counted from 0.

    The policy's schedule begins when it begins to learn: behind the steps that it `waited`, where
    these ended early.
    """
    alone, asked = alone_steps(config) if waited is None else waited, config.optim
    roles = {name: ROLES[name].rate(config, step, total_steps) for name in config.recipe.roles}
    if step < alone:
        return LearningRates(None, roles)
    own = learning_rate(
        step - alone,
        base=asked.learning_rate,
        schedule=asked.schedule,
        warmup_steps=asked.warmup_steps,
        total_steps=total_steps - alone,
        min_share=asked.min_share,
    )
    return LearningRates(own, roles)
