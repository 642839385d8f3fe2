"""The shared start of all runs, checked before the first: data, reward, the embedded model."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from groupwise.common.progress import phase
from groupwise.compare.arms import Arm
from groupwise.compare.plan import ComparisonFolder, ComparisonPlan, has_weights
from groupwise.config import Config
from groupwise.data.cursor import fingerprint
from groupwise.errors import ConfigError, GroupwiseError, ModelError, RunError
from groupwise.evaluate.evaluate import check_held_out
from groupwise.graders.rubric import OF_REWARDS, Grader
from groupwise.model.formats.checkpoint import (
    load,
    new_folder,
    save,
    stored_shape,
    stored_tokenizer,
)
from groupwise.prepare.setup import CheckedData, FittingTasks, check_data, fitting_tasks, read_data
from groupwise.records import Task
from groupwise.runfiles.files import to_page, write_atomic
from groupwise.runfiles.folder import RunFolder
from groupwise.stages import stage_of
from groupwise.training.cold_start import COLD_START, cold_started


def prepare(plan: ComparisonPlan, folder: ComparisonFolder, say: Callable[[str], None]) -> None:
    """Refuse what no run could use or compare, and make the starting models that are missing.

    The embedded model is made once, whatever the number of arms and seeds.
    """
    first: dict[str, Arm] = {}  # of those that read the same
    for arm in plan.arms:
        config = arm.config
        parts = (config.data, config.reward, config.tiny, config.eval, config.engine.max_tokens)
        recipe = config.recipe
        read = (recipe.source, recipe.columns, [x for x in OF_REWARDS if x in recipe.streams])
        first.setdefault(repr((*parts, config.model.path, read)), arm)
        _check_code(plan, folder, arm)
    fitting: list[tuple[Arm, FittingTasks]] = []
    for arm in first.values():
        with naming_arm(arm):
            found = _prepare_one(arm.config, folder)
            if len(first) > 1:
                fitting.append((arm, _fitting(arm.config, folder, found)))
    for arm, own in fitting[1:]:
        _check_shared(*fitting[0], arm, own, say)


def check_unchanged(plan: ComparisonPlan, folder: ComparisonFolder) -> None:
    """Refuse to continue where data or code have changed since the finished runs. No model, device
    or judge is needed.
    """
    looked_at = []
    for arm in plan.arms:
        _check_code(plan, folder, arm)
        parts = (arm.config.data, arm.config.reward, arm.config.eval.tasks)
        if parts in looked_at:
            continue
        looked_at.append(parts)
        with naming_arm(arm):
            found = read_data(arm.config)[1]
            _check_data(arm.config, folder, found.train, found.eval)


@contextmanager
def naming_arm(arm: Arm) -> Iterator[None]:
    """Name the arm in any error raised inside."""
    try:
        yield
    except GroupwiseError as error:
        raise type(error)(f"{arm.name}: {error}") from None


def _prepare_one(config: Config, folder: ComparisonFolder) -> CheckedData:
    with phase("reading data"):
        found = check_data(config)
    check_held_out(found.held_out[: config.eval.tasks])
    stage_of(config).check_tasks(found.train)
    _check_data(config, folder, found.train, found.held_out)
    start = start_of(config, folder)
    if start is None and stored_shape(config.model.path) is None:
        load(config.model.path)  # says why it can't be, once and not in every run
    if start is not None and not start.is_dir():
        made = cold_started(config, found.train, found.held_out)
        save(made.model, start, made.files)
    return found


def _fitting(config: Config, folder: ComparisonFolder, found: CheckedData) -> FittingTasks:
    """Return the tasks that a run of this arm will have."""
    path = start_of(config, folder) or config.model.path
    shape = stored_shape(path)
    if shape is None:
        raise ModelError(f"{path} has no config.json that can be read. Set model.path to a model.")
    return fitting_tasks(config, found, stored_tokenizer(path), shape)


def _check_shared(
    a: Arm, left: FittingTasks, b: Arm, right: FittingTasks, say: Callable[[str], None]
) -> None:
    """Refuse arms that drop different prompts as too long: they would be judged on other tasks."""
    least = min(left.limit, right.limit)
    remedy = (
        f"{a.name} takes prompts of up to {left.limit} tokens, {b.name} of up to {right.limit} "
        "(engine.max_tokens, data.max_prompt_tokens and what is written around a prompt decide). "
        f"--set data.max_prompt_tokens={least} gives all arms the shorter limit."
    )
    held_out = [[(task.source, task.id) for task in own.held_out] for own in (left, right)]
    if held_out[0] != held_out[1]:
        raise ConfigError(
            f"{a.name} and {b.name} would not be judged on the same held-out tasks, as they drop "
            f"other prompts for their length. {remedy}"
        )
    if left.dropped != right.dropped:
        say(f"warning: {a.name} and {b.name} do not train on the same prompts. {remedy}")


def _check_data(
    config: Config, folder: ComparisonFolder, tasks: Sequence[Task], held_out: Sequence[Task]
) -> None:
    """Refuse files that changed since the first run: no arm or seed could be compared."""
    known = _known_data(folder)
    key = _digest((config.data, config.eval.tasks))
    hashes = [fingerprint(tasks), fingerprint(held_out)]
    before = known.setdefault(key, hashes)
    for what, old, new in zip(("training", "held-out"), before, hashes, strict=True):
        if old != new:
            raise RunError(
                f"the {what} tasks are not those that {folder.path} was started with ({new} "
                f"instead of {old}): runs could not be compared with those that are there. Put the "
                "data back, or take another folder: --out"
            )
    write_atomic(folder.data, to_page(known))


def _known_data(folder: ComparisonFolder) -> dict[str, list[str]]:
    try:
        known: dict[str, list[str]] = json.loads(folder.data.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RunError(
            f"{folder.data} can't be read ({error}). It is written in one piece, so it was edited "
            "or the disk is faulty. If the data are as they were, remove it: it is written anew."
        ) from None
    return known


def _check_code(plan: ComparisonPlan, folder: ComparisonFolder, arm: Arm) -> None:
    """Refuse an arm whose finished runs used other code of the user's than the next would."""
    reward = Grader(arm.config.reward.parts, graders=arm.config.data.graders)
    for kind, code in (("recipe", arm.config.recipe.code()), ("reward", reward.code())):
        for job in (job for job in plan.jobs if plan.arms[job.arm] is arm):
            run = folder.run(plan, job)
            before = RunFolder(run).read_manifest().get("origin", {}).get(kind, code)
            if before != code and has_weights(run):
                raise RunError(
                    f"{arm.name}: the file that its {kind} comes from was changed since {run} was "
                    "run: seeds and arms of other code can't be compared. Remove "
                    f"{run.parent} to run this arm anew, put the file back, or take another "
                    "folder: --out"
                )


def start_of(config: Config, folder: ComparisonFolder) -> Path | None:
    """Return the embedded model's folder; None where the configuration names a model of its own."""
    if config.model.path != "tiny":
        return None
    asked = (config.tiny, config.data, config.eval.tasks, config.engine.max_tokens)
    made_of = (*asked, config.turns) if config.turns.used else asked
    return folder.starts / _digest(made_of)


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def copy_start(start: Path | None, run: Path) -> None:
    """Copy the shared start to where the run looks for its own."""
    kept = run / COLD_START
    if start is None or kept.is_dir():
        return
    with new_folder(kept) as beside:
        for file in start.iterdir():
            shutil.copyfile(file, beside / file.name)
