"""Checks of a run that several ranks make together, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from groupwise.config import Config
from groupwise.errors import ConfigError

NATIVE = "native"  # the engine that every rank has one of; others are the first one's


def check_team(config: Config, ranks: int) -> None:
    """Refuse what ranks can't do together."""
    wrong = list(_refused(config, ranks)) if ranks > 1 else []
    if wrong:
        raise ConfigError(" ".join(wrong))


def _refused(config: Config, ranks: int) -> Iterator[str]:
    prompts = config.prompts_per_step
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
    if config.turns.used:
        yield (
            f"turns with {ranks} ranks: environments would be played on each of them, and answer "
            "in another order. Run it in one process."
        )
    if config.train.lag or (config.engine.servers and config.engine.backend == NATIVE):
        name = "train.lag" if config.train.lag else "engine.servers"
        yield (
            f"{name} with {ranks} ranks is not built: every rank would sample ahead by itself. "
            f"Set {name}=0, or run in one process."
        )
