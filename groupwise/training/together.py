"""Checks of a run that several ranks make together, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from groupwise.config import Config
from groupwise.engine.backends import capabilities_of
from groupwise.errors import ConfigError
from groupwise.parallel.world import World

NATIVE = "native"


def check_team(config: Config, world: World) -> None:
    """Refuse what ranks can't do together."""
    wrong = list(_refused(config, world)) if world.size > 1 else []
    if wrong:
        raise ConfigError(" ".join(wrong))


def _refused(config: Config, world: World) -> Iterator[str]:
    ranks, prompts = world.size, config.prompts_per_step
    if ranks > prompts:
        yield (
            f"{ranks} ranks and prompts_per_step={prompts}: ranks would have nothing to do. Start "
            f"torchrun with --nproc-per-node {prompts} or fewer, or raise prompts_per_step."
        )
    if str(config.recipe.source).startswith("reference"):
        yield (
            f"recipe {config.recipe.name} samples from its reference, which is sharded over "
            f"{ranks} ranks: the native engine needs whole weights. Run it in one process."
        )
    if config.engine.backend != NATIVE and not capabilities_of(config.engine).central:
        yield (
            f"engine.backend={config.engine.backend} with {ranks} ranks: it would be started on "
            "every rank. Leave it out, or run in one process; vllm and sglang serve all ranks."
        )
