"""Models that take part beside the policy: what they give to a batch, and how they change.

To add one, write a file with a `Role`, add it to `ROLES`, and describe it in `streams.ROLE_FACTS`.
"""

from __future__ import annotations

from groupwise.config import Config
from groupwise.methods.method import Method
from groupwise.model.cost import RoleSize
from groupwise.model.layers.transformer import Policy
from groupwise.optim.roles.length_exponent import LengthExponent
from groupwise.optim.roles.reference import Reference
from groupwise.optim.roles.role import Role

ROLES: dict[str, type[Role]] = {role.name: role for role in (Reference, LengthExponent)}


def make_roles(model: Policy, recipe: Method, config: Config) -> dict[str, Role]:
    """Make what the recipe needs beside the policy, from the policy as it starts."""
    return {name: ROLES[name].made(model, recipe, config) for name in recipe.roles}


def role_sizes(config: Config, width: int) -> tuple[RoleSize, ...]:
    """Return what the recipe's roles take; a weight has `width` bytes."""
    return tuple(ROLES[n].size(config, width) for n in config.recipe.roles if n in ROLES)


def role_notes(config: Config) -> list[str]:
    """Return what a person should know of the recipe's roles when a run starts."""
    return [note for name in config.recipe.roles for note in ROLES[name].notes(config)]
