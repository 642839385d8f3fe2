"""A run opened: what is cheap checked first, then what it needs loaded, then its state restored.

Whether a folder can be continued is decided here: under the same configuration or one that differs
in what may change, with the same weights and data, and to an end that no recorded step lies behind.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from groupwise import config as configuration
from groupwise.common.progress import phase
from groupwise.config import Budget, Config, Model
from groupwise.data.cursor import cursor_of
from groupwise.data.cursor import fingerprint as data_fingerprint
from groupwise.errors import RunError
from groupwise.graders.recorded_verdicts import recorded
from groupwise.model.fingerprint import fingerprint
from groupwise.model.formats.checkpoint import Loaded
from groupwise.model.formats.checkpoint import save as save_model
from groupwise.model.policy import adapter_notes, starting_policy
from groupwise.optim.roles import make_roles, role_notes
from groupwise.parallel.world import ALONE
from groupwise.prepare import pins
from groupwise.prepare.engines import MakeEngine, engine_of
from groupwise.prepare.placing import placed
from groupwise.prepare.setup import Setup, check_room, set_up
from groupwise.records import Task
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.recorder import Recorder
from groupwise.runfiles.starts import CODE, Start, code_changes, read_starts, write_starts
from groupwise.stages import stage_of
from groupwise.stages.checks import check_config
from groupwise.stages.describe import describe
from groupwise.stages.parts import Parts
from groupwise.sync import checkpoints as saved
from groupwise.sync.saver import Saver
from groupwise.training.cold_start import cold_started
from groupwise.training.keeper import Keeper
from groupwise.training.progress import Progress
from groupwise.training.reporter import Reporter
from groupwise.training.run import Run
from groupwise.watch.display import Display
from groupwise.watch.mirrors import forget
from groupwise.watch.mirrors.children import Mirrors
from groupwise.watch.report import write_report

COLD_START = "cold_start"  # the embedded model as it was before reinforcement


@contextlib.contextmanager
def open_run(
    config: Config, path: str | Path, display: Display, engine: MakeEngine | None = None
) -> Iterator[Run]:
    """Check everything that is cheap, then load, then restore if the folder has a checkpoint."""
    begun = time.monotonic()
    config, folder = placed_for(config, path), RunFolder(path)
    doubts = check_config(config)
    mirrors = Mirrors(folder.path, config.watch.mirrors, display)
    with mirrors, folder.locked():  # in this order: mirrors go on until the lock is given back
        folder.check_writable()
        folder.tidy()
        for text in doubts:
            display.warn(text)
        for text in _same_configuration(config, folder):
            display.note(text)
        keep = config.checkpoint.keep
        with (
            display,
            folder.saying_what_is_left(),
            Recorder(folder) as recorder,
            Saver(folder.checkpoints, keep, display.note) as saver,
        ):
            with display.watching():
                run = _open(config, folder, recorder, saver, mirrors, display, engine, begun)
            yield run


def _open(
    config: Config,
    folder: RunFolder,
    recorder: Recorder,
    saver: Saver,
    mirrors: Mirrors,
    display: Display,
    make_engine: MakeEngine | None,
    begun: float,
) -> Run:
    manifest = folder.read_manifest()
    start = pins.pinned(config, manifest)
    stage = stage_of(start)
    doubts = [f"warning: {doubt}" for doubt in stage.try_slots()]
    setup = set_up(start, lambda *tasks: starting_model(start, folder, *tasks))
    stage.check_tasks(setup.tasks)
    loaded, model = setup.loaded, setup.loaded.model
    learner = stage.learner(model, make_roles(model, config.recipe, config), ALONE)
    reporter = Reporter(folder, recorder, mirrors, display)
    parts = Parts(
        loaded=loaded,
        tasks=setup.tasks,
        held_out=setup.held_out,
        grader=setup.grader,
        engine=engine_of(config, loaded, make_engine, reporter.event),
        learner=learner,
    )
    progress = Progress(
        cursor_of(setup.tasks, setup.mixture, config.seed, config.data.shuffle),
        micro_tokens=learner.micro_tokens,
        micro_tokens_asked=learner.optim.micro_tokens,
        opened=begun,
    )
    run = Run(
        config, stage, progress, parts, reporter, Keeper(config, progress, parts, reporter, saver)
    )
    with phase("taking the weights' fingerprint"):
        origin = _origin(config, setup)
    _check_origin(folder, origin, display)
    before = _last_start(folder)
    _restore_latest(run, origin)
    run.keeper.reserve()
    reporter.health.see_all(folder.read_metrics())  # what was said before is not said again
    _write_start(run, origin, before)
    fetched = _record_start(run, origin, manifest, setup.dropped)
    mirrors.start()
    display.start(
        [
            *describe(config, learner.micro_tokens, len(setup.tasks), len(setup.held_out)),
            *(f"{name}: {commit}" for name, commit in fetched.items()),
            *adapter_notes(loaded, start),
            *role_notes(start),
            *doubts,
            *setup.notes,
        ],
        config.steps,
        progress.step,
        explain_loss=stage.explains_loss,
    )
    return run


def _origin(config: Config, setup: Setup) -> dict[str, str]:
    """Return digests of what a run starts from, by which it is known again."""
    return {
        "weights": fingerprint(setup.loaded.model.named_parameters()),
        "data": data_fingerprint(setup.tasks),
        "held_out": data_fingerprint(setup.held_out),
        "reward": setup.grader.code(),
        "recipe": config.recipe.code(),
    }


def _write_start(run: Run, origin: Mapping[str, str], before: Start | None) -> None:
    """Write into the folder that it was started here, and with what; `before` is what it knew last.

    First of all that a start writes: whoever reads the folder after a kill in between finds every
    recorded step with what it was made with.
    """
    known = read_starts(run.reporter.folder)
    # Of an older groupwise, which wrote none down: what it began with goes first.
    unwritten = [before] if not known and before is not None and run.progress.step else []
    last = [*known, *unwritten][-1:]
    changed = [change for start in last for change in _changed(start, run.config, origin)]
    text = configuration.text(run.config)
    now = Start(run.progress.step, text, dict(origin), torch.get_num_threads(), tuple(changed))
    write_starts(run.reporter.folder, [*unwritten, now])


def _record_start(
    run: Run, origin: Mapping[str, str], manifest: Mapping[str, Any], dropped: Mapping[str, int]
) -> dict[str, str]:
    """Write into the folder what runs, from what and on what; return what came from a hub."""
    folder, progress = run.reporter.folder, run.progress
    folder.write_config(configuration.text(run.config))
    with folder.writing("events.jsonl"):
        folder.events.touch()  # a run without events says so with an empty file
    fetched = pins.commits(run.config, manifest)
    folder.write_manifest(
        origin, fetched, dropped, seconds=progress.elapsed, tokens=progress.tokens
    )
    return fetched


def starting_model(
    config: Config, folder: RunFolder, tasks: Sequence[Task], held_out: Sequence[Task]
) -> Loaded:
    """Load the policy before its first update. The embedded one is made once a run, and kept."""
    if config.model.path != "tiny":
        check_room(config, config.model.path, training=True)
        return starting_policy(config, config.model.path)
    kept = folder.path / COLD_START
    if not kept.is_dir():
        made = cold_started(config, tasks, held_out)
        save_model(made.model, kept, made.files)
    return starting_policy(config, kept)


def _same_configuration(config: Config, folder: RunFolder) -> list[str]:
    """Say what changed since the last start; a change that can't be continued stops here."""
    changes = _changes(config, folder)
    recorded = _recorded(folder)
    if changes and not recorded:
        # Nothing was learned yet: the folder starts over.
        shutil.rmtree(folder.path / COLD_START, ignore_errors=True)
        folder.manifest.unlink(missing_ok=True)
        folder.starts.unlink(missing_ok=True)
        forget(folder.path)
        return []
    refused = [change for change in changes if not change.compatible]
    if refused:
        listed = "; ".join(map(str, refused))
        raise RunError(
            f"{folder.path} holds a run with another configuration: {listed}. What it learned so "
            "far does not fit. Take another folder (--run), or set these back."
        )
    _check_end(config, folder, {change.key for change in changes}, recorded)
    return [f"changed since the run started: {change}" for change in changes]


def _recorded(folder: RunFolder) -> int:
    """Return the last step that the folder holds something of."""
    steps = [int(line["step"]) for line in folder.read_metrics()]
    return max([*steps, *folder.rollout_steps(), saved.last_step(folder.checkpoints)])


def _check_end(config: Config, folder: RunFolder, changed: set[str], recorded: int) -> None:
    """Refuse an end before the last recorded step: what lies behind it would be deleted for good.

    A budget that was not changed has its end where the run finds it.
    """
    ends = {}
    if "steps" in changed:
        ends[f"steps={config.steps}"] = config.steps
    spent = {"tokens": 0.0, "seconds": 0.0}
    for line in folder.read_metrics():
        spent["tokens"] = line.get("cost/tokens") or spent["tokens"]
        spent["seconds"] += (line.get("time/step") or 0.0) - (line.get("time/eval") or 0.0)
        for unit, limit in asdict(config.budget).items():
            if f"budget.{unit}" in changed and 0 < limit <= spent[unit]:
                ends.setdefault(f"budget.{unit}={limit:g}", int(line["step"]))
    for setting, end in ends.items():
        if end < recorded:
            raise RunError(
                f"{folder.path} has {recorded} recorded steps, and with {setting} it would end "
                f"after step {end}: the steps behind it would be deleted. Nothing was. To end the "
                f"run where it stands set steps={recorded}; to train anew take another folder "
                "(--run)."
            )


def _last_start(folder: RunFolder) -> Start | None:
    """Read what the folder was last started with, as far as an older groupwise wrote it."""
    starts = read_starts(folder)
    if starts:
        return starts[-1]
    config = folder.read_config()
    if config is None:
        return None
    manifest = folder.read_manifest()
    return Start(0, config, manifest.get("origin") or {}, manifest.get("threads"), inferred=True)


def placed_for(config: Config, path: str | Path) -> Config:
    """Choose a device and a precision for "auto": those of the run in the folder, if any."""
    folder = RunFolder(path)
    with _readable(folder):
        start = _last_start(folder)
        model = {} if start is None else tomllib.loads(start.config).get("model", {})
    before = {name: model[name] for name in ("device", "dtype") if name in model}
    return placed(config, Model(**before) if len(before) == 2 else None)


def _changes(config: Config, folder: RunFolder) -> list[configuration.SettingChange]:
    with _readable(folder):
        before = _last_start(folder)
        return [] if before is None else configuration.difference(before.config, config)


@contextlib.contextmanager
def _readable(folder: RunFolder) -> Iterator[None]:
    """Say what to do about a configuration that is damaged."""
    try:
        yield
    except ValueError as error:  # no TOML, no text
        place = folder.starts if folder.starts.is_file() else folder.config
        raise RunError(
            f"{place} can't be read: {error}. It is written in one piece, so it was edited "
            "or the disk is faulty. Mend it, or remove it to go on without comparing."
        ) from error


def _changed(before: Start, config: Config, origin: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return settings and code that differ from a start's, as they are written down."""
    settings = [
        {"what": change.key, "old": change.old, "new": change.new}
        for change in configuration.difference(before.config, config)
    ]
    return settings + code_changes(before.origin, origin)


def _check_origin(folder: RunFolder, origin: Mapping[str, str], display: Display) -> None:
    """Stop at other weights or tasks; other code of yours may be the very mend, and is said."""
    before = folder.read_manifest().get("origin", {})
    for kind, digest in origin.items():
        if kind not in CODE and before.get(kind, digest) != digest:
            what = kind.replace("held_out", "held-out tasks")
            raise RunError(
                f"The {what} of this run are not those that {folder.path} was started with "
                f"({digest} instead of {before[kind]}). Put them back, or take another folder "
                "(--run)."
            )
    start = _last_start(folder)
    for change in code_changes({} if start is None else start.origin, origin):
        display.warn(f"changed since the run started: the {change['what']}")


def _makers(folder: RunFolder, step: int) -> list[Start]:
    """Return the starts that may have made what is recorded after a step."""
    starts = read_starts(folder) or [x for x in [_last_start(folder)] if x is not None]
    return [*(x for x in starts if x.step > step), *[x for x in starts if x.step <= step][-1:]]


def _grades_alike(start: Start, config: Config, origin: Mapping[str, str]) -> bool:
    """Tell whether the verdicts that a start recorded are what this one would say."""
    changed = configuration.difference(start.config, config)
    return start.origin.get("reward") == origin["reward"] and not any(
        change.key.startswith("reward") for change in changed
    )


def _restore_latest(run: Run, origin: Mapping[str, str]) -> None:
    folder, display, progress = run.reporter.folder, run.reporter.display, run.progress
    found = saved.load_latest(folder.checkpoints)
    step = 0 if found is None else found.step
    makers = _makers(folder, step)
    changed = any(_changed(start, run.config, origin) for start in makers)
    again = "dropped, and made anew with what was changed" if changed else "done again"
    if makers and all(_grades_alike(start, run.config, origin) for start in makers):
        run.parts.known = recorded(folder.set_aside(step), display.warn)
    else:
        folder.forget()
    if found is None:
        dropped = folder.rewind(-1)
        if dropped:
            display.note(f"no checkpoint yet: {dropped} recorded steps are {again}")
        return
    for text in found.fell_back:
        display.warn(text)
    with phase("restoring"):
        run.keeper.restore(found)
    if folder.durable_step() < progress.step:
        display.warn(
            f"the records of {folder.path} end at step {folder.durable_step()}, before the "
            f"checkpoint of step {progress.step}: metrics or rollouts were removed or damaged."
        )
    dropped = folder.rewind(progress.step)
    display.note(
        f"continuing {folder.path} after step {progress.step}"
        + (f"; {dropped} recorded steps after it are {again}" if dropped else "")
    )


def finished(config: Config, path: str | Path) -> dict[str, Any] | None:
    """Return the summary of a run that has nothing left to do under this configuration."""
    folder = RunFolder(path)
    if not folder.config.is_file():
        return None
    summary = folder.read_summary()
    if not summary or _changes(config, folder):
        return None
    spent = config.budget != Budget() and summary.get("budget") == asdict(config.budget)
    return summary if spent or summary["steps"] >= config.steps else None


def complete(path: str | Path) -> list[str]:
    """Finish what a kill behind the summary left undone, and say so; a whole folder is left alone.

    A folder that can't be written any more is no reason to fail: the run is finished.
    """
    folder = RunFolder(path)
    if folder.report.is_file() and not folder.leftovers():
        return []
    try:
        with folder.locked():
            folder.tidy()
            if folder.report.is_file():
                return []
            return [f"the end of the run was cut short; wrote {write_report(folder.path)}"]
    except RunError as error:
        return [f"{folder.path} has no report, and none could be written: {error}"]


def nothing_left(config: Config, path: str | Path) -> tuple[dict[str, Any], list[str]] | None:
    """Return the summary of a run whose steps are all done, and changes made in vain since."""
    summary = finished(config, path)
    if summary is not None:
        return summary, []
    folder = RunFolder(path)
    summary = folder.read_summary() if folder.config.is_file() else None
    if not summary or not config.steps <= summary["steps"] == folder.durable_step():
        return None
    changes = _changes(config, folder)
    if not all(change.compatible for change in changes):
        return None  # opening it says which
    return summary, [str(change) for change in changes]
