"""A pipeline run: stage after stage in its own folder, each an ordinary run.

stages.json is written before a stage begins and after it has ended. So whatever is killed, the same
command finds finished stages, which it only checks, and one that goes on as any run does.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from groupwise import config as configuration
from groupwise.common.progress import phase
from groupwise.errors import ConfigError, GroupwiseError, RunError, nearest
from groupwise.parallel.started import ranks_here
from groupwise.pipeline.chain import Chain, real
from groupwise.pipeline.checks import check_chain, naming
from groupwise.pipeline.page import write_page
from groupwise.pipeline.reading import StageTable
from groupwise.prepare.earlier import data_digest
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.stages import (
    FINISHED,
    RUNNING,
    ChainRecord,
    StageRecord,
    read_stages,
    text_digest,
    weights_digest,
    write_stages,
)
from groupwise.sync.checkpoints import delete_optimizer_state
from groupwise.training.continuing import placed_for
from groupwise.training.loop import train
from groupwise.training.signals import Signals, Stopped
from groupwise.training.together import met
from groupwise.watch.display import Display

MakeDisplay = Callable[[], Display]
RunStage = Callable[[int], None]  # by its number
# Of a finished stage these may differ: they have no part in what it learned.
HARMLESS = ("checkpoint.", "watch.", "guard.", "model.device")


def run_chain(chain: Chain, again: str | None, display: MakeDisplay = Display) -> ChainRecord:
    """Run all stages that are left, or say that none is; return what stands in stages.json.

    Of several ranks the first one keeps the folder, and has all of them run one stage or another.
    """
    world = met()

    def run(number: int) -> None:
        stage = chain.pipeline.stages[number]
        train(real(chain, stage).config, chain.folder(stage), display())

    with world.naming(lambda: "between stages"):
        return world.led(lambda ask: _run_chain(chain, again, display, ask), run)


def _run_chain(chain: Chain, again: str | None, display: MakeDisplay, run: RunStage) -> ChainRecord:
    outer, say = RunFolder(chain.path), display()
    with outer.locked():
        outer.tidy()
        record = _opened(chain)
        if again is not None:
            record = _redone(chain, record, again)
        with phase("checking finished stages"):
            _check_finished(chain, record)
        if record.finished:
            say.note(f"{chain.path} is finished: all its stages are. --from NAME does some anew.")
            for each in record.stages:
                _weights_alone(chain.path / each.folder)
            if not outer.report.is_file():
                write_page(chain.path)
            return record
        for doubt in check_chain(chain, record, Path(chain.base), ranks_here()):
            say.warn(doubt)
        write_stages(chain.path, record)
        for number, stage in enumerate(chain.pipeline.stages):
            record = _run_stage(chain, record, number, stage, say, run)
        with outer.writing("report.html"):
            write_page(chain.path)
    return record


def _run_stage(
    chain: Chain,
    record: ChainRecord,
    number: int,
    stage: StageTable,
    say: Display,
    run: RunStage,
) -> ChainRecord:
    """Run one stage to its end; signals between two stages are held until its end is written."""
    if record.stages[number].state == FINISHED:
        _weights_alone(chain.folder(stage))
        return record
    resolved = real(chain, stage)
    with naming(stage):
        running = replace(record.stages[number], state=RUNNING, data=data_digest(resolved.config))
    record = _with(record, number, running)
    write_stages(chain.path, record)
    say.note(
        f"=== stage {number + 1} of {len(record.stages)}: {stage.name} "
        f"({resolved.config.recipe.name}), from {stage.start}"
    )
    if resolved.left_out:
        say.note(f"not for this recipe: {', '.join(resolved.left_out)} from above the stages")
    with naming(stage):
        _check_parent(chain, record, stage)
        run(number)
    signals = Signals()
    with signals.held():
        record = _with(record, number, _finished(chain, record.stages[number]))
        write_stages(chain.path, record)
        _weights_alone(chain.folder(stage))
    if signals.asked.is_set():
        raise Stopped(f"stopped after stage {stage.name!r}; the same command goes on")
    return record


def _finished(chain: Chain, stage: StageRecord) -> StageRecord:
    folder = RunFolder(chain.path / stage.folder)
    weights = {
        name: weights_digest(folder.checkpoints / name)
        for name in ("latest", "best")
        if (folder.checkpoints / name).exists()
    }
    config = text_digest(folder.read_config() or "", str(chain.path))
    return replace(stage, state=FINISHED, config=config, weights=weights)


def _weights_alone(run: Path) -> None:
    """Keep a finished stage's latest and best weights; a kill on the way is made up for."""
    checkpoints = run / "checkpoints"
    kept = {(checkpoints / name).resolve() for name in ("latest", "best")}
    for folder in checkpoints.glob("step_*"):
        if folder.resolve() not in kept:
            shutil.rmtree(folder)
    delete_optimizer_state(run)


def _with(record: ChainRecord, number: int, stage: StageRecord) -> ChainRecord:
    stages = [*record.stages]
    stages[number] = stage
    return replace(record, stages=tuple(stages))


# --- a folder that is there -------------------------------------------------------------------


def _opened(chain: Chain) -> ChainRecord:
    """Return what stages.json says, or would say of a new pipeline."""
    fresh = [
        StageRecord(stage.name, stage.folder, _recipe(stage), stage.start)
        for stage in chain.pipeline.stages
    ]
    record = read_stages(chain.path)
    if record is None:
        if (chain.path / "config.toml").is_file():
            raise RunError(f"{chain.path} holds a run, not a pipeline. Take another folder: --run")
        return ChainRecord(chain.pipeline.name, str(chain.path), tuple(fresh))
    if record.going:
        record = _removed(chain.path, record)
    if record.place != str(chain.path):
        record = _moved(chain, record)
    return _same_stages(chain, record, fresh)


def _recipe(stage: StageTable) -> str:
    recipe = stage.settings.get("recipe", "")
    return str(recipe.get("name", "") if isinstance(recipe, dict) else recipe)


def _same_stages(chain: Chain, record: ChainRecord, fresh: list[StageRecord]) -> ChainRecord:
    """Take the file's stages with the states of those begun; refuse others in their places."""
    before = list(record.stages)
    stages: list[StageRecord] = []
    for number, stage in enumerate(fresh):
        old = before[number] if number < len(before) else None
        if old is not None and (old.name, old.folder) == (stage.name, stage.folder):
            stages.append(replace(old, recipe=stage.recipe, start=stage.start))
            continue
        begun = [each for each in before[number:] if (chain.path / each.folder).is_dir()]
        if begun:
            raise RunError(
                f"{chain.path} has {begun[0].name!r} where the file has {stage.name!r}: "
                f"{_invalid([each.name for each in begun])}. Put the stages back in their order, "
                "or take another folder: --run"
            )
        stages.append(stage)
    gone = [x.name for x in before[len(fresh) :] if (chain.path / x.folder).is_dir()]
    if gone:
        raise RunError(
            f"{chain.path} has stages that the file has no longer: {', '.join(gone)}. Put them "
            "back, or take another folder: --run"
        )
    return replace(record, stages=tuple(stages))


def _moved(chain: Chain, record: ChainRecord) -> ChainRecord:
    """Write the new place into the settings of stages, which name each other by it."""
    for stage in record.stages:
        folder = RunFolder(chain.path / stage.folder)
        for path in (folder.config, folder.starts):
            if path.is_file():
                text = path.read_text("utf-8").replace(record.place, str(chain.path))
                with folder.writing(path.name):
                    path.write_text(text, "utf-8")
    moved = replace(record, place=str(chain.path))
    write_stages(chain.path, moved)
    return moved


def _redone(chain: Chain, record: ChainRecord, name: str) -> ChainRecord:
    """Forget a stage and all behind it; their folders are removed."""
    names = [stage.name for stage in record.stages]
    first = next((n for n in names if n == name or n == f"{name}_1"), None)
    if first is None:
        raise ConfigError(f"--from {name}: there is no such stage. {nearest(name, names)}")
    at = names.index(first)
    earlier = replace(record, stages=record.stages[:at])
    with phase("checking finished stages"):
        _check_finished(chain, earlier)
    left = [each.name for each in earlier.stages if each.state != FINISHED]
    if left:
        raise ConfigError(f"--from {name}: stage {left[0]!r} before it is not finished yet.")
    fresh = [StageRecord(x.name, x.folder, x.recipe, x.start) for x in record.stages[at:]]
    going = tuple(x.folder for x in fresh if (chain.path / x.folder).is_dir())
    record = replace(record, stages=(*earlier.stages, *fresh), going=going)
    write_stages(chain.path, record)
    return _removed(chain.path, record)


def _removed(path: Path, record: ChainRecord) -> ChainRecord:
    for folder in record.going:
        shutil.rmtree(path / folder, ignore_errors=True)
    (path / "report.html").unlink(missing_ok=True)
    record = replace(record, going=())
    write_stages(path, record)
    return record


# --- what has changed -------------------------------------------------------------------------


def _check_finished(chain: Chain, record: ChainRecord) -> None:
    """Refuse a finished stage that is not what it was; name the later ones that rest on it."""
    for number, stage in enumerate(record.stages):
        if stage.state != FINISHED:
            continue
        why = _difference(chain, chain.pipeline.stages[number], stage)
        if why:
            begun = [x.name for x in record.stages[number + 1 :] if x.state != "waiting"]
            later = f" {_invalid(begun)}." if begun else ""
            raise RunError(
                f"{chain.path}: stage {stage.name!r} was changed since it finished: {why}.{later} "
                f"Put it back, or do it and all behind it anew: --from {stage.name}"
            )


def _invalid(names: list[str]) -> str:
    return f"No longer valid: {', '.join(names)}"


def _difference(chain: Chain, table: StageTable, stage: StageRecord) -> str:
    """Say what of a finished stage is other than it was; "" if nothing."""
    folder = RunFolder(chain.path / stage.folder)
    text = folder.read_config()
    if text is None or text_digest(text, str(chain.path)) != stage.config:
        return f"{folder.config} is missing or was edited"
    for which, digest in stage.weights.items():
        if weights_digest(folder.checkpoints / which) != digest:
            return f"the weights in {folder.checkpoints / which} are not those it ended with"
    asked = placed_for(real(chain, table).config, folder.path)
    changes = configuration.difference(text, asked)
    told = [f"{x.key} {x.old} -> {x.new}" for x in changes if not x.key.startswith(HARMLESS)]
    if not told and stage.data:
        told += _other_data(asked, stage.data)
    return "; ".join(told)


def _other_data(config: configuration.Config, digest: str) -> list[str]:
    """Say that the files of a stage's data are others now, or gone."""
    try:
        same = data_digest(config) == digest
    except (OSError, GroupwiseError) as error:
        return [f"its data can't be read any more: {error}"]
    names = ", ".join((*config.data.runs, *config.data.sources, *config.data.eval_sources))
    return [] if same else [f"the files of its data ({names}) are not those it learned from"]


def _check_parent(chain: Chain, record: ChainRecord, stage: StageTable) -> None:
    """Refuse to go on with a stage that was begun from other weights than its parent has now."""
    reference = chain.start_of(stage)
    parent = RunFolder(chain.folder(stage)).read_manifest().get("parent")
    if reference is None or parent is None:
        return
    named = chain.named(reference)
    now = next(each for each in record.stages if each.name == named.name)
    if parent.get("weights") != now.weights.get(reference.which):
        raise RunError(
            f"It was begun from other weights than stage {named.name!r} has now. Do it anew: "
            f"--from {stage.name}"
        )
