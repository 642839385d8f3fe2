"""A run: all that a step needs, restored and saved as one.

What is saved is what the next step depends on, and nothing else: weights, optimizer, reference,
cursor, memory, counters. Random numbers need no saving; they are a function of these.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupwise.common.progress import phase
from groupwise.config import Config
from groupwise.data.cursor import Cursor, MixedCursor
from groupwise.engine.protocol import Engine
from groupwise.errors import RunError
from groupwise.evaluate.evaluate import Evaluation
from groupwise.graders.recorded_verdicts import Ledger
from groupwise.graders.rubric import Grader
from groupwise.methods.composition import PairRecipe
from groupwise.model.adapters.lora import adapters, fill
from groupwise.model.adapters.peft_files import read as read_adapter
from groupwise.model.formats.checkpoint import Loaded, load_weights
from groupwise.model.layers.linear import layer_sizes
from groupwise.optim.learner import PolicyLearner
from groupwise.optim.pairs import PairLearner
from groupwise.optim.roles.reference import Reference
from groupwise.prepare.setup import learns_from_labels
from groupwise.records import Memory, Task
from groupwise.runfiles.files import PARTIAL, sync_folder
from groupwise.runfiles.folder import Event, RunFolder
from groupwise.runfiles.recorder import Recorder
from groupwise.sync import checkpoints as saved
from groupwise.sync.saver import Saver
from groupwise.sync.space import Space, check_space
from groupwise.watch.display import Display
from groupwise.watch.health import Finding, Health
from groupwise.watch.mirrors.children import Mirrors

EVENT_PAUSE = 10  # steps between two showings of the same kind of event


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
    saver: Saver
    step: int = 0  # finished ones
    at: int = 0  # the step under way: events belong to it
    version: int = 0  # updates so far
    memory: Memory = field(default_factory=Memory)
    skipped: int = 0  # updates in a row
    unrewarded: int = 0  # steps in a row in which no answer got a reward
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
    best_step: int | None = None  # after which it was the best
    told: dict[str, int] = field(default_factory=dict)  # when each kind of event was last shown
    opened: float = field(default_factory=time.monotonic)
    saved_at: float = field(default_factory=time.monotonic)
    saved_step: int = -1

    @property
    def grades(self) -> bool:
        """Whether answers are sampled and graded in training."""
        return not learns_from_labels(self.config)

    @property
    def learns_from_rewards(self) -> bool:
        """Whether an update reads them, or they only tell how good the answers are."""
        recipe = self.config.recipe
        return not isinstance(recipe, PairRecipe) or recipe.reads == "grades"

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

    def event(self, kind: str, text: str, *, shown: bool = True, **fields: Any) -> None:
        """Something to know of: to events.jsonl and, if `shown`, now and then to the screen."""
        if shown and self.at - self.told.get(kind, -EVENT_PAUSE) >= EVENT_PAUSE:
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
        self.saver.wait()
        if not latest.exists():
            self.save()
            self.saver.wait()
        kept = self.folder.path / "snapshots" / latest.resolve().name
        if not kept.exists():
            beside = kept.with_name(f".{kept.name}{PARTIAL}")
            with self.folder.writing("snapshots"):
                shutil.copytree(latest.resolve(), beside, copy_function=os.link)
                beside.rename(kept)
                sync_folder(kept.parent)
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
        self.best, self.best_step = value, self.step
        return True

    def checkpoint_due(self) -> bool:
        asked = self.config.checkpoint
        by_steps = asked.every_steps and self.step % asked.every_steps == 0
        by_time = asked.every_seconds and time.monotonic() - self.saved_at >= asked.every_seconds
        return self.saved_step != self.step and bool(by_steps or by_time)

    def save(self) -> None:
        """Take a checkpoint of this very moment; it is written while training goes on.

        Everything before it is on the disk first.
        """
        step = self.step
        with phase("saving"):
            self.saver.save(self._moment(), self._ready(), after=lambda: self.folder.forget(step))
        self.saved_at, self.saved_step = time.monotonic(), step

    def save_best(self) -> None:
        """Keep the weights of this moment as the best so far."""
        made = saved.weights_alone(self.step, self.loaded.model, self.loaded.files)
        with phase("saving"):
            self.saver.save(made, self._ready())

    def _ready(self) -> Callable[[], None]:
        """Return a call that waits for the records so far; the folder must be where it was."""
        recorded = self.recorder.mark()

        def wait() -> None:
            recorded()
            self.folder.check_place()
            if not self.folder.checkpoints.is_dir():
                self.event(
                    "checkpoints",
                    f"{self.folder.checkpoints} was removed while the run went on, and with it the "
                    "earlier checkpoints and the best policy so far. New ones are written there.",
                )

        return wait

    def reserve(self) -> None:
        """Make room for checkpoints: on the disk it must be there, on the host it is made."""
        if self.over:  # and saved: only the end is left to be written
            return
        made = self._moment()
        space = Space(made.bytes, made.weights.bytes, self.config.checkpoint.keep)
        tight = check_space(self.folder.checkpoints, space)
        if tight is not None:
            self.display.warn(tight)
        self.saver.reserve(made)

    def _moment(self) -> saved.Moment:
        tensors = {"optimizer": self.learner.state(), "engine": self.engine.state()}
        if self.reference is not None:
            tensors["reference"] = self.reference.state()
        values = {
            "step": self.step,
            "version": self.version,
            "cursor": self.cursor.state(),
            "memory": saved.memory_to_json(self.memory),
            "skipped": self.skipped,
            "unrewarded": self.unrewarded,
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
            "best_step": self.best_step,
        }
        return saved.moment(
            self.step,
            model=self.loaded.model,
            files=self.loaded.files,
            tensors=tensors,
            values=values,
            best=self.best_step == self.step,
        )

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
        self.unrewarded = int(values.get("unrewarded", 0))
        self.flops, self.trained = (float(values.get(name, 0.0)) for name in ("flops", "trained"))
        self.before, self.last = (
            None if values[name] is None else Evaluation.from_dict(values[name])
            for name in ("before", "last")
        )
        self.best, self.best_step = values["best"], values.get("best_step")
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
