"""A run that is open: how far it is, who does its work, where it tells of it, what it keeps."""

from __future__ import annotations

from typing import Any, NamedTuple

from groupwise.config import Config
from groupwise.parallel.world import World
from groupwise.stages.parts import Parts
from groupwise.stages.stage import Stage
from groupwise.training.keeper import Keeper
from groupwise.training.progress import Progress
from groupwise.training.reporter import Reporter


class Run(NamedTuple):
    """An opened run; a function takes of it what it uses."""

    config: Config
    stage: Stage[Any, Any]
    progress: Progress
    parts: Parts[Any]
    reporter: Reporter
    keeper: Keeper

    @property
    def world(self) -> World:
        """Return who works on it: one process, or the ranks of a team."""
        return self.parts.learner.world
