"""A run: all that a step needs, opened, restored and saved as one.

What is saved is what the next step depends on, and nothing else: weights, optimizer, reference,
cursor, memory, counters. Random numbers need no saving; they are a function of these.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from groupwise import config as configuration
from groupwise import hub
from groupwise.composition import PairRecipe
from groupwise.config import Budget, Config
from groupwise.data.cursor import Cursor, MixedCursor, cursor_of
from groupwise.data.cursor import fingerprint as data_fingerprint
from groupwise.engine.native import NativeEngine
from groupwise.engine.protocol import Engine
from groupwise.errors import RunError
from groupwise.graders.ledger import Ledger, recorded
from groupwise.graders.rubric import Grader
from groupwise.model import tiny
from groupwise.model.adapters import adapters, fill
from groupwise.model.checkpoint import Loaded, load_weights
from groupwise.model.checkpoint import save as save_model
from groupwise.model.linear import layer_sizes
from groupwise.model.peft_files import read as read_adapter
from groupwise.model.policy import adapter_notes, starting_policy
from groupwise.model.transformer import Policy
from groupwise.optim.learner import PolicyLearner
from groupwise.optim.pairs import PairLearner
from groupwise.records import Memory, Task
from groupwise.setup import check_room, engine_of, learns_from_labels, micro_tokens_of, set_up
from groupwise.sync import state as saved
from groupwise.sync.fingerprint import fingerprint
from groupwise.sync.reference import Reference
from groupwise.validate.evaluate import Evaluation
from groupwise.watch.display import Display
from groupwise.watch.folder import Event, RunFolder
from groupwise.watch.health import Finding, Health
from groupwise.watch.mirrors import forget
from groupwise.watch.mirrors.children import Mirrors
from groupwise.watch.recorder import Recorder

EVENT_PAUSE = 10  # steps between two showings of the same kind of event
COLD_START = "cold_start"  # the embedded model as it was before reinforcement

MakeEngine = Callable[[Loaded], Engine]  # a sampler for this policy


@dataclass
class Run:
    """The state of a run between two steps, and the parts that make the next one."""

    config: Config
    folder: RunFolder
    recorder: Recorder
    mirrors: Mirrors
    display: Display
    loaded: Loaded
    tasks: Sequence[Task]
    held_out: Sequence[Task]
    cursor: Cursor | MixedCursor
    grader: Grader
    engine: Engine
    learner: PolicyLearner | PairLearner
    reference: Reference | None
    step: int = 0  # finished ones
    at: int = 0  # the step under way: events belong to it
    version: int = 0  # updates so far
    memory: Memory = field(default_factory=Memory)
    skipped: int = 0  # updates in a row
    tokens: int = 0  # sampled so far
    trained: float = 0.0  # seconds of steps, evaluation left out
    flops: float = 0.0  # of models, so far
    health: Health = field(default_factory=Health)
    delivered: dict[int, str] = field(default_factory=dict)  # fingerprints by version
    seconds: float = 0.0  # spent by earlier processes
    before: Evaluation | None = None  # of the starting policy
    last: Evaluation | None = None
    known: Ledger = field(default_factory=dict)  # recorded verdicts of steps to be done again
    best: float | None = None  # accuracy, or reward where nothing says what is correct
    told: dict[str, int] = field(default_factory=dict)  # when each kind of event was last shown
    opened: float = field(default_factory=time.monotonic)
    saved_at: float = field(default_factory=time.monotonic)
    saved_step: int = -1

    @property
    def grades(self) -> bool:
        """Whether answers are sampled and graded in training."""
        return not learns_from_labels(self.config)

    @property
    def elapsed(self) -> float:
        return self.seconds + time.monotonic() - self.opened

    @property
    def progress(self) -> float:
        """The share of the run that is done: of its steps or its budget, whichever ends first."""
        budget = self.config.budget
        shares = [self.step / self.config.steps]
        shares += [self.tokens / budget.tokens] if budget.tokens else []
        shares += [self.trained / budget.seconds] if budget.seconds else []
        return max(shares)

    @property
    def over(self) -> bool:
        return self.progress >= 1.0

    @property
    def total_steps(self) -> int:
        """As the configuration has them, or as a budget would end them at the present pace."""
        if self.step == 0 or self.progress == self.step / self.config.steps:
            return self.config.steps
        return max(round(self.step / self.progress), self.step + 1)

    def evaluation_due(self, before: float) -> bool:
        """Whether held-out tasks are asked after this step; `before` is the progress before it."""
        asked = self.config.eval
        if asked.points:
            due = int(asked.points * self.progress) > int(asked.points * before)
        else:
            due = bool(asked.every) and self.step % asked.every == 0
        return due or self.over

    def event(self, kind: str, text: str, **fields: Any) -> None:
        """Something to know of: to events.jsonl, and now and then to the screen."""
        if self.at - self.told.get(kind, -EVENT_PAUSE) >= EVENT_PAUSE:
            self.told[kind] = self.at
            self.display.warn(text)
        self.recorder.event(self.at, kind, text, **fields)

    def judge(self, step: int, metrics: Mapping[str, Any]) -> tuple[list[Finding], list[Event]]:
        """What the health rules say of a step, once each, and how to write it down."""
        found = self.health.see(step, metrics)
        return found, [Event(step, "health", str(each), each.fields()) for each in found]

    def act_on(self, found: Sequence[Finding]) -> RunError | None:
        """Say it, keep a checkpoint from before it where asked to, and whether to stop."""
        for each in found:
            self.display.warn(str(each))
        if self.config.watch.snapshot and any(each.rule.grave for each in found):
            self._keep_latest()
        stopping = [each for each in found if each.rule.name in self.config.watch.stop]
        if not stopping:
            return None
        return RunError(
            f"Stopped by watch.stop after step {self.step}: {stopping[0]} The run is saved; the "
            f"same command goes on with it. `groupwise diagnose {self.folder.path}` says more."
        )

    def _keep_latest(self) -> None:
        """The newest checkpoint, safe from `checkpoint.keep`; its files are links."""
        latest = self.folder.checkpoints / "latest"
        if not latest.exists():
            self.save()
        kept = self.folder.path / "snapshots" / latest.resolve().name
        if not kept.exists():
            with self.folder.writing("snapshots"):
                shutil.copytree(latest.resolve(), kept, copy_function=os.link)
            self.display.note(f"kept {kept}")

    def note_memory(self, room: int) -> None:
        """Say so if micro-batches became smaller than this."""
        if self.learner.micro_tokens < room:
            self.event(
                "memory",
                f"out of memory: micro-batches of {self.learner.micro_tokens} tokens instead of "
                f"{room} from here on; the batch and the update stay the same.",
            )

    def note_evaluation(self, found: Evaluation) -> bool:
        """Keep it; True if it is the best so far."""
        self.last = found
        value = found.reward if found.accuracy is None else found.accuracy
        if value is None or (self.best is not None and value <= self.best):
            return False
        self.best = value
        return True

    def checkpoint_due(self) -> bool:
        asked = self.config.checkpoint
        by_steps = asked.every_steps and self.step % asked.every_steps == 0
        by_time = asked.every_seconds and time.monotonic() - self.saved_at >= asked.every_seconds
        return self.saved_step != self.step and bool(by_steps or by_time)

    def save(self, *, best: bool = False) -> None:
        """A checkpoint of this very moment; everything before it is on the disk first."""
        self.recorder.flush()
        tensors = {"optimizer": self.learner.state(), "engine": self.engine.state()}
        if self.reference is not None:
            tensors["reference"] = self.reference.state()
        values = {
            "step": self.step,
            "version": self.version,
            "cursor": self.cursor.state(),
            "memory": saved.memory_to_json(self.memory),
            "skipped": self.skipped,
            "micro_tokens": self.learner.micro_tokens,
            "micro_tokens_asked": self.learner.optim.micro_tokens,
            "delivered": {str(version): x for version, x in self.delivered.items()},
            "tokens": self.tokens,
            "flops": self.flops,
            "seconds": self.elapsed,
            "trained": self.trained,
            "before": None if self.before is None else self.before.as_dict(),
            "last": None if self.last is None else self.last.as_dict(),
            "best": self.best,
        }
        saved.save(
            self.folder.checkpoints,
            self.step,
            model=self.loaded.model,
            files=self.loaded.files,
            tensors=tensors,
            values=values,
            keep=self.config.checkpoint.keep,
            best=best,
        )
        self.folder.forget(self.step)
        self.saved_at, self.saved_step = time.monotonic(), self.step

    def restore(self, found: saved.Restored) -> None:
        """To the bits of the moment when the checkpoint was saved."""
        self._restore_weights(found.path)
        values = found.values
        self.step, self.version = int(values["step"]), int(values["version"])
        self.at = self.step
        self.cursor.restore(values["cursor"])
        self.memory = saved.memory_from_json(values["memory"])
        self.skipped = int(values["skipped"])
        # Smaller ones after running out of memory last as long as the start would be the same.
        if values["micro_tokens_asked"] == self.learner.optim.micro_tokens:
            self.learner.micro_tokens = int(values["micro_tokens"])
        self.delivered = {int(version): x for version, x in values["delivered"].items()}
        self.tokens, self.seconds = int(values["tokens"]), float(values["seconds"])
        # Checkpoints of older versions have none.
        self.flops, self.trained = (float(values.get(name, 0.0)) for name in ("flops", "trained"))
        self.before, self.last = (
            None if values[name] is None else Evaluation.from_dict(values[name])
            for name in ("before", "last")
        )
        self.best = values["best"]
        self.learner.restore(found.tensors.get("optimizer", {}))
        if self.reference is not None:
            self.reference.restore(found.tensors.get("reference", {}))
        self.engine.restore(found.tensors.get("engine", {}))
        self.engine.sync(self.version)
        self.saved_step = self.step

    def _restore_weights(self, path: Path) -> None:
        """Of a checkpoint; where an adapter learns, it is all that a checkpoint holds."""
        model = self.loaded.model
        if adapters(model):
            fill(model, read_adapter(path, layer_sizes(model)).named())
            return
        stored = load_weights(path, device=self.learner.device)
        same = {k: v.shape for k, v in model.state_dict().items()}
        if same != {k: v.shape for k, v in stored.state_dict().items()}:
            raise RunError(
                f"The checkpoint {path} is of another model than {self.config.model.path}. "
                "Take another run folder (--run), or set model.path back."
            )
        model.load_state_dict(stored.state_dict())


@contextlib.contextmanager
def open_run(
    config: Config, path: str | Path, display: Display, engine: MakeEngine | None = None
) -> Iterator[Run]:
    """Check everything that is cheap, then load, then restore if the folder has a checkpoint."""
    doubts = configuration.check(config)
    folder = RunFolder(path)
    mirrors = Mirrors(folder.path, config.watch.mirrors, display)
    folder.check_writable()
    with mirrors, folder.locked():  # in this order: mirrors go on until the lock is given back
        for text in doubts:
            display.warn(text)
        for text in _same_configuration(config, folder):
            display.note(text)
        with display, Recorder(folder) as recorder:
            yield _open(config, folder, recorder, mirrors, display, engine)


def _open(
    config: Config,
    folder: RunFolder,
    recorder: Recorder,
    mirrors: Mirrors,
    display: Display,
    make_engine: MakeEngine | None,
) -> Run:
    manifest = folder.read_manifest()
    start = hub.pinned(config, manifest)
    bench = set_up(start, lambda *tasks: starting_model(start, folder, *tasks))
    loaded, model = bench.loaded, bench.loaded.model
    reference = None
    if "reference" in config.recipe.models:
        reference = Reference(model, config.reference.update)
    run = Run(
        config=config,
        folder=folder,
        recorder=recorder,
        mirrors=mirrors,
        display=display,
        loaded=loaded,
        tasks=bench.tasks,
        held_out=bench.held_out,
        cursor=cursor_of(bench.tasks, bench.mixture, config.seed, config.data.shuffle),
        grader=bench.grader,
        engine=(
            make_engine(loaded)
            if make_engine is not None
            else engine_of(config, loaded, config.engine.weights)
        ),
        learner=_learner(start, model),
        reference=reference,
    )
    if isinstance(run.engine, NativeEngine):
        run.engine.tell = run.event
    origin = {
        "weights": fingerprint(model.named_parameters()),
        "data": data_fingerprint(bench.tasks),
        "reward": bench.grader.code(),
    }
    _check_origin(folder, origin, display)
    _restore_latest(run, keep_verdicts=_same_reward(config, folder, origin["reward"]))
    run.health.see_all(folder.read_metrics())  # what was said before is not said again
    folder.write_config(configuration.text(config))
    with folder.writing("events.jsonl"):
        folder.events.touch()  # a run without events says so with an empty file
    fetched = hub.commits(config, manifest)
    folder.write_manifest(origin, fetched, seconds=run.elapsed, tokens=run.tokens)
    mirrors.start()
    fetched_notes = [f"{name}: {commit}" for name, commit in fetched.items()]
    display.start(
        [
            *configuration.describe(config, run.learner.micro_tokens),
            *fetched_notes,
            *adapter_notes(loaded, start),
            *bench.notes,
        ],
        config.steps,
        run.step,
        explain_loss=not isinstance(config.recipe, PairRecipe),
    )
    return run


def _learner(config: Config, model: Policy) -> PolicyLearner | PairLearner:
    optim = replace(config.optim, micro_tokens=micro_tokens_of(config, model.config))
    if isinstance(config.recipe, PairRecipe):
        return PairLearner(model, config.recipe, optim, config.engine.temperature)
    recipe = configuration.anchored(config, config.recipe)
    return PolicyLearner(model, recipe, optim, config.engine.temperature)


def starting_model(
    config: Config, folder: RunFolder, tasks: Sequence[Task], held_out: Sequence[Task]
) -> Loaded:
    """The policy before its first update. The embedded one is made once a run, and kept."""
    if config.model.path != "tiny":
        check_room(config, config.model.path, training=True)
        return starting_policy(config, config.model.path)
    kept = folder.path / COLD_START
    if not kept.is_dir():
        made = tiny.make(config.tiny, tasks, held_out, config.engine.max_tokens, config.seed)
        save_model(made.model, kept, made.files)
    return starting_policy(config, kept)


def _same_configuration(config: Config, folder: RunFolder) -> list[str]:
    """What changed since the run was started; a change that can't be continued stops here."""
    changes = _changes(config, folder)
    if changes and not any(folder.checkpoints.glob("step_*")):
        # Nothing was learned yet: the folder starts over.
        shutil.rmtree(folder.path / COLD_START, ignore_errors=True)
        folder.manifest.unlink(missing_ok=True)
        forget(folder.path)
        return []
    refused = [change for change in changes if not change.compatible]
    if refused:
        listed = "; ".join(map(str, refused))
        raise RunError(
            f"{folder.path} holds a run with another configuration: {listed}. What it learned so "
            "far does not fit. Take another folder (--run), or set these back."
        )
    return [f"changed since the run started: {change}" for change in changes]


def _changes(config: Config, folder: RunFolder) -> list[configuration.Change]:
    try:
        before = folder.read_config()
        return [] if before is None else configuration.difference(before, config)
    except ValueError as error:  # no TOML, no text
        raise RunError(
            f"{folder.config} can't be read: {error}. It is written in one piece, so it was edited "
            "or the disk is faulty. Mend it, or remove it to go on without comparing."
        ) from error


def _check_origin(folder: RunFolder, origin: Mapping[str, str], display: Display) -> None:
    """Other weights or data stop here; other reward code may be the very mend, and is said."""
    before = folder.read_manifest()
    for kind, digest in origin.items():
        stored = (before or {}).get("origin", {}).get(kind)
        if kind == "reward" and stored not in (None, digest):
            display.warn("changed since the run started: the code of the reward functions")
        elif stored is not None and stored != digest:
            raise RunError(
                f"The {kind} of this run are not those that {folder.path} was started with "
                f"({digest} instead of {stored}). Put them back, or take another folder (--run)."
            )


def _same_reward(config: Config, folder: RunFolder, code: str) -> bool:
    """Whether recorded verdicts are what this run would say."""
    stored = folder.read_manifest().get("origin", {}).get("reward")
    changed = any(change.key.startswith("reward") for change in _changes(config, folder))
    return stored == code and not changed


def _restore_latest(run: Run, keep_verdicts: bool) -> None:
    found = saved.load_latest(run.folder.checkpoints)
    if keep_verdicts:
        aside = run.folder.set_aside(0 if found is None else int(found.values["step"]))
        run.known = recorded(aside, run.display.warn)
    else:
        run.folder.forget()
    if found is None:
        again = len(run.folder.rewind(-1))
        if again:
            run.display.note(f"no checkpoint yet: {again} recorded steps are done again")
        return
    for text in found.fell_back:
        run.display.warn(text)
    run.restore(found)
    if run.folder.durable_step() < run.step:
        run.display.warn(
            f"the records of {run.folder.path} end at step {run.folder.durable_step()}, before the "
            f"checkpoint of step {run.step}: metrics or rollouts were removed or damaged."
        )
    dropped = run.folder.rewind(run.step)
    run.display.note(
        f"continuing {run.folder.path} after step {run.step}"
        + (f"; {dropped} recorded steps after it are done again" if dropped else "")
    )


def finished(config: Config, path: str | Path) -> dict[str, Any] | None:
    """The summary of a run that has nothing left to do under this configuration."""
    folder = RunFolder(path)
    if not folder.config.is_file():
        return None
    summary = folder.read_summary()
    if not summary or _changes(config, folder):
        return None
    spent = config.budget != Budget() and summary.get("budget") == asdict(config.budget)
    return summary if spent or summary["steps"] >= config.steps else None
