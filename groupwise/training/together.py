"""Ranks that make a run together: they meet, and are checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from groupwise import __version__
from groupwise.common.progress import phase
from groupwise.config import Config, entries
from groupwise.errors import ConfigError
from groupwise.parallel.started import ranks_here
from groupwise.parallel.team import DEADLINE, joined, meeting_place
from groupwise.parallel.world import World


def met() -> World:
    """Return the world that this process was started in, once all its ranks are there."""
    if ranks_here() == 1:
        return joined()
    with phase(f"waiting for the other ranks at {meeting_place()}", limit=DEADLINE):
        return joined()


def on_every_rank(config: Config) -> bool:
    """Tell whether each rank has an engine of its own; others are the first one's."""
    return config.engine.backend == "native" and not config.engine.servers


def check_alike(config: Config, path: str | Path, world: World) -> None:
    """Refuse ranks that were not started alike, before they do anything together."""
    if world.size > 1:
        place = {"the run's folder": str(Path(path).absolute())}
        versions = {"the version of groupwise": __version__, "that of PyTorch": torch.__version__}
        world.same({**place, **versions, **entries(config)})


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
    if config.train.lag and config.train.sync != "drain" and on_every_rank(config):
        yield (
            f"train.sync={config.train.sync} with {ranks} ranks: each has an engine, and no two of "
            "them are at the same token when new weights come. Set train.sync=drain, or "
            "engine.servers=1 for one sampler beside all ranks."
        )
