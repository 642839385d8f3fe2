"""Stages of a run: where its samples come from, what it learns from them, what it checks first.

To add a stage, write a file with a `Stage` and add it to `STAGES` under the name that its kind of
recipe has as `STAGE`.
"""

from __future__ import annotations

from typing import Any

from groupwise.config import Config
from groupwise.stages.groups import GroupStage
from groupwise.stages.pairs import PairStage
from groupwise.stages.scoring import ProcessRewardModelStage, RewardModelStage
from groupwise.stages.stage import Stage
from groupwise.stages.unpaired import UnpairedStage

STAGES: dict[str, type[Stage[Any, Any]]] = {
    "groups": GroupStage,
    "pairs": PairStage,
    "unpaired": UnpairedStage,
    "reward_model": RewardModelStage,
    "process_reward_model": ProcessRewardModelStage,
}


def stage_of(config: Config) -> Stage[Any, Any]:
    """Return what a run of this configuration is."""
    return STAGES[config.recipe.STAGE](config, config.recipe)
