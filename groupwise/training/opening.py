"""A run opened: what is cheap checked first, then what it needs loaded, then its state restored."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from groupwise import config as configuration
from groupwise.common.globs import digest
from groupwise.common.progress import phase
from groupwise.config import Config
from groupwise.data.cursor import TaskCursor, cursor_of
from groupwise.data.cursor import fingerprint as data_fingerprint
from groupwise.data.selection import KeptAnswers
from groupwise.engine.team import LedEngine, team_engine
from groupwise.graders.recorded_verdicts import Ledger, recorded
from groupwise.graders.rubric import Grader
from groupwise.graders.team import TeamGrader
from groupwise.model.fingerprint import fingerprint
from groupwise.model.formats.checkpoint import Loaded
from groupwise.model.formats.checkpoint import save as save_model
from groupwise.model.policy import adapter_notes
from groupwise.optim.roles import make_roles, role_notes
from groupwise.parallel.world import ALONE, World
from groupwise.prepare import pins
from groupwise.prepare.engines import MakeEngine
from groupwise.prepare.episodes import ended
from groupwise.prepare.setup import Setup, check_room, set_up
from groupwise.prepare.supervised import shown_row
from groupwise.prepare.team_turns import TeamTurns
from groupwise.records import Task
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.recorder import NoRecorder, Recorder
from groupwise.runfiles.stages import parent_of
from groupwise.runfiles.starts import Start, read_starts, write_starts
from groupwise.stages import stage_of
from groupwise.stages.ahead import Ahead
from groupwise.stages.checks import check_config
from groupwise.stages.describe import describe
from groupwise.stages.led_ahead import LedAhead
from groupwise.stages.parts import Parts
from groupwise.sync import checkpoints as saved
from groupwise.sync.saver import Saver
from groupwise.training.cold_start import COLD_START, cold_started
from groupwise.training.continuing import (
    changes_since,
    check_configuration,
    check_origin,
    grades_alike,
    last_start,
    placed_for,
    starts_since,
)
from groupwise.training.keeper import Keeper
from groupwise.training.progress import Progress
from groupwise.training.reporter import Reporter
from groupwise.training.run import Run
from groupwise.training.together import on_every_rank
from groupwise.watch.display import Display
from groupwise.watch.mirrors.children import Mirrors


@contextlib.contextmanager
def open_run(
    config: Config,
    path: str | Path,
    display: Display,
    engine: MakeEngine | None = None,
    asked: threading.Event | None = None,
    world: World = ALONE,
) -> Iterator[Run]:
    """Check everything that is cheap, then load, then restore if the folder has a checkpoint.

    `asked` is set when the process is asked to end: what takes long on the way looks at it. In a
    `world` of several ranks all open it, and the first one writes the folder.
    """
    begun = time.monotonic()
    config, folder = placed_for(config, path), RunFolder(path)
    doubts = world.first(lambda: check_config(config))
    mirrors = Mirrors(folder.path, config.watch.mirrors if world.leads else (), display)
    with contextlib.ExitStack() as held:
        held.enter_context(mirrors)  # first of all: mirrors go on until the lock is given back
        notes = world.first(lambda: _taken(folder, config, held))
        for text in doubts:
            display.warn(text)
        for text in notes:
            display.note(text)
        keep = config.checkpoint.keep
        recorder: Recorder | NoRecorder = NoRecorder()
        held.enter_context(display)
        held.enter_context(folder.saying_what_is_left())
        if world.leads:
            recorder = held.enter_context(Recorder(folder))
        saver = held.enter_context(Saver(folder.checkpoints, keep, display.note, world))
        with display.watching():
            run = _open(config, folder, recorder, saver, mirrors, display, engine, begun, asked,
                        world)  # fmt: skip
        held.callback(run.parts.close)
        with ended(run.parts.turns):
            yield run


def _taken(folder: RunFolder, config: Config, held: contextlib.ExitStack) -> list[str]:
    """Take the folder for this process, as long as it is held; return what changed."""
    held.enter_context(folder.locked())
    folder.check_writable()
    folder.tidy()
    return check_configuration(config, folder)


def _open(
    config: Config,
    folder: RunFolder,
    recorder: Recorder | NoRecorder,
    saver: Saver,
    mirrors: Mirrors,
    display: Display,
    make_engine: MakeEngine | None,
    begun: float,
    asked: threading.Event | None,
    world: World,
) -> Run:
    manifest = folder.read_manifest()
    start = pins.pinned(config, manifest)
    stage = stage_of(start)
    doubts = [f"warning: {doubt}" for doubt in stage.try_slots()]

    def model_for(tasks: Sequence[Task], held_out: Sequence[Task]) -> Loaded:
        stage.check_tasks(tasks)  # before anything is loaded
        return starting_model(start, folder, tasks, held_out, asked, world)

    setup = set_up(start, model_for)
    loaded, model = setup.loaded, setup.loaded.model
    with phase("taking the weights' fingerprint"):
        origin = _origin(config, setup)
    if world.size > 1:
        world.same(origin | {f"the model's {name}": _known(x) for name, x in loaded.files.items()})
    learner = stage.learner(model, make_roles(model, start.recipe, start), world)
    reporter = Reporter(folder, recorder, mirrors, display)
    engine = team_engine(
        lambda: stage.engine(loaded, make_engine, reporter.event),
        world,
        learner.deliver,
        led=make_engine is None and not on_every_rank(config),
    )
    parts = Parts(
        loaded=loaded,
        tasks=setup.tasks,
        held_out=setup.held_out,
        grader=setup.grader if world.size == 1 else TeamGrader(setup.grader, world),
        engine=engine,
        learner=learner,
        turns=TeamTurns(setup.turns) if setup.turns and world.size > 1 else setup.turns,
    )
    progress = Progress(
        cursor_of(
            setup.tasks,
            setup.mixture,
            config.seed,
            config.data.shuffle,
            config.curriculum if config.curriculum.used else None,
        ),
        micro_tokens=learner.micro_tokens,
        micro_tokens_asked=learner.optim.micro_tokens,
        opened=begun,
    )
    if config.train.lag:
        parts.ahead = _ahead(config, parts, setup.grader, progress.cursor)
    keeper = Keeper(config, stage, progress, parts, reporter, saver)
    run = Run(config, stage, progress, parts, reporter, keeper)
    before = world.first(lambda: _last_known(folder, origin, display))
    _restore_latest(run, origin)
    run.keeper.reserve()

    def write_down() -> dict[str, str]:
        reporter.health.see_all(folder.read_metrics())  # what was said before is not said again
        _write_start(run, origin, before)
        return _record_start(run, origin, manifest, setup.dropped, setup.selection)

    fetched = world.first(write_down)
    mirrors.start()
    lines = [
        *describe(
            config,
            learner.micro_tokens,
            len(setup.tasks),
            len(setup.held_out),
            sum(bool(task.token_ids) for task in setup.held_out),
        ),
        *(f"{name}: {commit}" for name, commit in fetched.items()),
        *adapter_notes(loaded, start),
        *role_notes(start),
        *doubts,
        *setup.notes,
    ]
    display.place(folder.path)
    display.start(
        lines,
        progress.total_steps(config),
        progress.step,
        explain_loss=stage.explains_loss,
        held_out=bool(setup.held_out),
    )
    shown = shown_row(setup.tasks, loaded.tokenizer)
    if shown:
        display.row(f"row {setup.tasks[0].id} as it is learned", shown)
    return run


def _ahead(config: Config, parts: Parts[Any], grader: Grader, cursor: TaskCursor) -> Ahead:
    """Return the prompts ahead: every rank's, or the first one's where it alone has the engine."""
    engine, world = parts.engine, parts.learner.world
    if not isinstance(engine, LedEngine):
        return Ahead(config, parts, cursor)
    own = None
    if engine.own is not None:
        own = Ahead(config, replace(parts, engine=engine.own, grader=grader), cursor)
    return LedAhead(own, cursor, world)


def _last_known(folder: RunFolder, origin: Mapping[str, str], display: Display) -> Start | None:
    """Return what the folder was last started with; other weights or tasks stop here."""
    check_origin(folder, origin, display)
    return last_start(folder)


def _origin(config: Config, setup: Setup) -> dict[str, str]:
    """Return digests of what a run starts from, by which it is known again."""
    earlier = {} if setup.selection is None else {"runs": setup.selection.runs}
    if config.reward.rubric:
        earlier["rubric"] = digest([config.reward.rubric])
    return earlier | {
        "weights": fingerprint(setup.loaded.model.named_parameters()),
        "data": data_fingerprint(setup.tasks),
        "held_out": data_fingerprint(setup.held_out),
        "reward": setup.grader.code(),
        "recipe": config.recipe.code(),
    }


def _known(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _write_start(run: Run, origin: Mapping[str, str], before: Start | None) -> None:
    """Write into the folder that it was started here, and with what; `before` is what it knew last.

    First of all that a start writes: whoever reads the folder after a kill in between finds every
    recorded step with what it was made with.
    """
    known = read_starts(run.reporter.folder)
    # Of an older groupwise, which wrote none down: what it began with goes first.
    unwritten = [before] if not known and before is not None and run.progress.step else []
    last = [*known, *unwritten][-1:]
    changed = [change for start in last for change in changes_since(start, run.config, origin)]
    text = configuration.text(run.config)
    now = Start(run.progress.step, text, dict(origin), torch.get_num_threads(), tuple(changed))
    write_starts(run.reporter.folder, [*unwritten, now])


def _record_start(
    run: Run,
    origin: Mapping[str, str],
    manifest: Mapping[str, Any],
    dropped: Mapping[str, int],
    selection: KeptAnswers | None,
) -> dict[str, str]:
    """Write into the folder what runs, from what and on what; return what came from a hub."""
    folder, progress = run.reporter.folder, run.progress
    folder.write_config(configuration.text(run.config))
    with folder.writing("events.jsonl"):
        folder.events.touch()  # a run without events says so with an empty file
    fetched = pins.commits(run.config, manifest)
    kept = None if selection is None else selection.facts()
    if selection is not None:
        folder.write_selected(selection.lines())
    model = run.config.model
    folder.write_manifest(
        origin,
        fetched,
        dropped,
        kept,
        parent=parent_of((model.path, *model.adapters)[-1], folder.path),
        seconds=progress.elapsed,
        tokens=progress.tokens,
    )
    return fetched


def starting_model(
    config: Config,
    folder: RunFolder,
    tasks: Sequence[Task],
    held_out: Sequence[Task],
    asked: threading.Event | None = None,
    world: World = ALONE,
) -> Loaded:
    """Load the policy before its first update. The embedded one is made once a run, and kept."""
    if config.model.path != "tiny":
        check_room(config, config.model.path, training=True)
        return stage_of(config).start(config.model.path)
    kept = folder.path / COLD_START

    def make() -> None:
        if not kept.is_dir():
            made = cold_started(config, tasks, held_out, asked)
            save_model(made.model, kept, made.files)

    world.first(make)
    return stage_of(config).start(kept)


def _restore_latest(run: Run, origin: Mapping[str, str]) -> None:
    """Bring the run to its last checkpoint; files behind it go, on the rank that leads."""
    found, known = run.world.first(lambda: _rewound(run, origin))
    run.parts.known |= known
    if found is not None:
        with phase("restoring"):
            run.keeper.restore(found)


def _rewound(run: Run, origin: Mapping[str, str]) -> tuple[saved.Restored | None, Ledger]:
    """Return the last checkpoint, and verdicts of the steps behind it that are done again."""
    folder, display, known = run.reporter.folder, run.reporter.display, Ledger()
    found = saved.load_latest(folder.checkpoints)
    step = 0 if found is None else found.step
    makers = starts_since(folder, step)
    changed = any(changes_since(start, run.config, origin) for start in makers)
    again = "dropped, and made anew with what was changed" if changed else "done again"
    if makers and all(grades_alike(start, run.config, origin) for start in makers):
        known = recorded(folder.set_aside(step), display.warn)
    else:
        folder.forget()
    if found is None:
        dropped = folder.rewind(-1)
        if dropped:
            display.note(f"no checkpoint yet: {dropped} recorded steps are {again}")
        return None, known
    for text in found.fell_back:
        display.warn(text)
    if folder.durable_step() < step:
        display.warn(
            f"the records of {folder.path} end at step {folder.durable_step()}, before the "
            f"checkpoint of step {step}: metrics or rollouts were removed or damaged."
        )
    dropped = folder.rewind(step)
    display.note(
        f"continuing {folder.path} after step {step}"
        + (f"; {dropped} recorded steps after it are {again}" if dropped else "")
    )
    return found, known
