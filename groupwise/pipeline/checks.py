"""Checks of every stage before the first one starts: settings, data, reward, sizes, disk.

The embedded model is made here, too: before its first course, with one vocabulary for all stages.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from groupwise.common.progress import phase
from groupwise.common.sizes import size
from groupwise.config import Config
from groupwise.errors import GroupwiseError, ModelError, RunError
from groupwise.hub import local_model
from groupwise.model.config import ModelConfig
from groupwise.model.formats.checkpoint import save, stored_shape, stored_tokenizer
from groupwise.pipeline.chain import Chain, asks_stages, reads_stages, trial
from groupwise.pipeline.reading import BASE, StageTable
from groupwise.plan.estimate import space_of
from groupwise.prepare import tiny
from groupwise.prepare.answers import check_answers
from groupwise.prepare.earlier import other_rows
from groupwise.prepare.placing import placed
from groupwise.prepare.setup import TASKS_SEED, CheckedData, check_data, fitting_tasks
from groupwise.runfiles.stages import FINISHED, ChainRecord
from groupwise.stages import stage_of
from groupwise.stages.checks import check_config
from groupwise.sync.space import Space
from groupwise.training.together import check_team

Doubts = list[str]


@contextmanager
def naming(stage: StageTable) -> Iterator[None]:
    """Name the stage in any error raised inside."""
    try:
        yield
    except GroupwiseError as error:
        raise type(error)(f"stage {stage.name!r}: {error}") from None


def check_chain(chain: Chain, record: ChainRecord, base: Path, ranks: int = 1) -> Doubts:
    """Check what is left to do; return doubts. `base` is where an embedded model is, or is made."""
    finished = {each.name for each in record.stages if each.state == FINISHED}
    left = [stage for stage in chain.pipeline.stages if stage.name not in finished]
    doubts: Doubts = []
    data: dict[str, CheckedData] = {}
    found: CheckedData | None
    root = str(base) if chain.embedded else chain.asked.model.path
    for stage in left:
        there = all(chain.named(x).name in finished for x in stage.references.values())
        config = _placed(chain, stage, root)
        with naming(stage):
            with phase(f"reading the data of stage {stage.name}"):
                if there or not reads_stages(stage):
                    found = check_data(config, learns=there or not asks_stages(stage))
                else:
                    found = _mixed_in(config)
            if found is not None:
                stage_of(config).check_tasks(found.train)
                data[stage.name] = found
    if chain.embedded and not base.is_dir():
        make_base(chain, left, data, base)
    spaces: list[Space] = []
    for stage in left:
        config = _placed(chain, stage, root)
        with naming(stage):
            check_team(config, ranks)
            doubts += [f"stage {stage.name!r}: {each}" for each in check_config(config)]
            doubts += [f"stage {stage.name!r}: {each}" for each in stage_of(config).try_slots()]
            shape = shape_of(config)
            if stage.name in data:
                _check_sizes(config, data[stage.name], shape)
        spaces.append(space_of(config, shape))
    _check_disk(chain.path, spaces)
    return doubts


def _mixed_in(config: Config) -> CheckedData | None:
    """Return the rows beside answers that an earlier stage is to give; None where there are none.

    They are a file's, and so can be checked before that stage.
    """
    rows = other_rows(config, TASKS_SEED) if config.data.runs else []
    return CheckedData(rows, [], [], {}, {}) if rows else None


def _placed(chain: Chain, stage: StageTable, root: str) -> Config:
    return placed(trial(chain, stage, root).config)


def shape_of(config: Config) -> ModelConfig:
    """Read the shape of the model that a stage goes back to; refuse a path without one."""
    shape = stored_shape(local_model(config.model.path, weights=False))
    if shape is None:
        raise ModelError(
            f"{config.model.path} has no config.json that can be read. Set model to a model's "
            'folder, "base" or "stage:NAME".'
        )
    return shape


def _check_sizes(config: Config, found: CheckedData, shape: ModelConfig) -> None:
    tokenizer = stored_tokenizer(local_model(config.model.path, weights=False))
    fitting = fitting_tasks(config, found, tokenizer, shape)
    check_answers(config.recipe, fitting.train, tokenizer, shape.context)


def _check_disk(path: Path, spaces: Sequence[Space]) -> None:
    """Refuse where a stage's checkpoint would not fit beside the weights of those before it."""
    kept = needed = 0
    for space in spaces:
        needed = max(needed, kept + space.whole + space.best)
        kept += 2 * space.best  # latest and best
    there = path
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < needed:
        raise RunError(
            f"In {there} {size(free)} are free, and the stages that are left need {size(needed)}: "
            "a checkpoint of the one that runs, and the weights of those before it. Free some "
            "space, or choose a folder on another disk with --run."
        )


# --- the embedded model -----------------------------------------------------------------------


def make_base(
    chain: Chain, stages: Sequence[StageTable], data: Mapping[str, CheckedData], base: Path
) -> None:
    """Make the embedded model, which has learned nothing, for the tasks of all stages."""
    tasks = [task for found in data.values() for task in (*found.train, *found.held_out)]
    texts = [text for task in tasks for text in _texts((task.prompt, task.answer, task.columns))]
    longest = 0
    for stage in stages:
        config = trial(chain, stage, str(base)).config
        found = data.get(stage.name)
        of_stage = [] if found is None else [*found.train, *found.held_out]
        answers = [_longest(task.columns) for task in of_stage]
        room = max(config.engine.max_tokens, *answers, 0) + 1
        prompts = [len(str(task.prompt)) for task in of_stage]
        longest = max(longest, max(prompts, default=0) + room)
    made = tiny.made_of(chain.asked.tiny, texts, longest, chain.asked.seed)
    base.parent.mkdir(parents=True, exist_ok=True)
    save(made.model, base, made.files)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
    elif value is not None:
        yield str(value)


def _longest(columns: Mapping[str, Any]) -> int:
    return max(map(len, _texts(columns)), default=0)


@contextmanager
def base_for(chain: Chain) -> Iterator[Path]:
    """Yield where the embedded model is, or a place to make it for a look."""
    if not chain.embedded or Path(chain.base).is_dir():
        yield Path(chain.base)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / BASE
