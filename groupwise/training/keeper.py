"""Checkpoints of a run: when one is due, what is in it, and how a run comes back from it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from groupwise.common.progress import phase
from groupwise.config import Config
from groupwise.model.formats.checkpoint import Contents
from groupwise.optim.learner import Learner
from groupwise.parallel.sharding import part
from groupwise.runfiles.whole import PARTIAL, sync_folder
from groupwise.stages.parts import Parts
from groupwise.stages.stage import Stage
from groupwise.sync import checkpoints as saved
from groupwise.sync.saver import Saver
from groupwise.sync.shards import read, shards_part, split
from groupwise.sync.space import Space, check_space
from groupwise.training.progress import Progress
from groupwise.training.reporter import Reporter

AHEAD = "ahead"  # what a checkpoint calls the prompts that are admitted, and their answers


class Keeper:
    """Keeps what a run goes on from: parts and progress, as they are when it is asked to."""

    def __init__(
        self,
        config: Config,
        stage: Stage[Any, Any],
        progress: Progress,
        parts: Parts[Learner],
        reporter: Reporter,
        saver: Saver,
    ) -> None:
        self.config, self.stage, self.progress, self.parts = config, stage, progress, parts
        self.reporter, self.saver, self.world = reporter, saver, parts.learner.world
        self.saved_at, self.saved_step = time.monotonic(), -1

    def due(self) -> bool:
        """Tell whether steps or minutes since the last checkpoint ask for another."""
        asked, step = self.config.checkpoint, self.progress.step
        by_steps = asked.every_steps and step % asked.every_steps == 0
        since = self.world.first(lambda: time.monotonic() - self.saved_at)
        by_time = asked.every_seconds and since >= asked.every_seconds
        return self.saved_step != step and bool(by_steps or by_time)

    def save(self) -> None:
        """Take a checkpoint of this very moment; it is written while training goes on.

        Everything before it is on the disk first.
        """
        step, folder = self.progress.step, self.reporter.folder
        with phase("saving"):
            self.saver.save(self._snapshot(), self._ready(), after=lambda: folder.forget(step))
        self.saved_at, self.saved_step = time.monotonic(), step

    def save_best(self) -> None:
        """Keep the weights of this moment as the best so far."""
        if not self.world.leads:
            return
        made = saved.weights_alone(self.progress.step, self.stage.contents(self.parts))
        with phase("saving"):
            self.saver.save(made, self._ready())

    def save_and_wait(self) -> None:
        """Leave the run so that it can go on from this very step."""
        if self.saved_step != self.progress.step:
            self.save()
        self.saver.wait()

    def keep_latest(self) -> None:
        """Keep the newest checkpoint safe from `checkpoint.keep`; its files are links."""
        folder = self.reporter.folder
        latest = folder.checkpoints / "latest"
        self.saver.wait()
        if not self.world.first(latest.exists):
            self.save()
            self.saver.wait()
        if not self.world.leads:
            return
        kept = folder.path / "snapshots" / latest.resolve().name
        if not kept.exists():
            beside = kept.with_name(f".{kept.name}{PARTIAL}")
            with folder.writing("snapshots"):
                shutil.copytree(latest.resolve(), beside, copy_function=os.link)
                beside.rename(kept)
                sync_folder(kept.parent)
            self.reporter.display.note(f"kept {kept}")

    def reserve(self) -> None:
        """Make room for checkpoints: on the disk it must be there, on the host it is made."""
        if self.progress.over(self.config):  # and saved: only the end is left to be written
            return
        made = self._snapshot()
        space = Space(made.bytes + made.others, made.weights.bytes, self.config.checkpoint.keep)
        tight = self.world.first(lambda: check_space(self.reporter.folder.checkpoints, space))
        if tight is not None:
            self.reporter.display.warn(tight)
        self.saver.reserve(made)

    def restore(self, found: saved.Restored) -> None:
        """Bring the run to the bits of the moment when the checkpoint was saved."""
        progress, parts, learner = self.progress, self.parts, self.parts.learner
        asked = progress.micro_tokens_asked
        self.stage.take_back(parts, found.path)
        learner.take()
        progress.restore(found.values)
        # Smaller ones after running out of memory last as long as the start would be the same.
        if progress.micro_tokens_asked == asked:
            learner.micro_tokens = progress.micro_tokens
        progress.micro_tokens, progress.micro_tokens_asked = learner.micro_tokens, asked
        states = {name: role.state() for name, role in learner.roles.items()}
        wanted = {"optimizer": learner.state(), **states}
        tensors = read(found.path / "resume", found.tensors, wanted, self.world)
        learner.restore(tensors.get("optimizer", {}))
        for name, role in learner.roles.items():
            role.restore(tensors.get(name, {}))
        parts.engine.restore(tensors.get("engine", {}))
        parts.engine.sync(progress.version)
        if parts.ahead is not None:
            parts.ahead.restore(found.values.get(AHEAD), tensors.get(AHEAD, {}))
        self.reporter.at = self.saved_step = progress.step
        # Killed between a checkpoint's arrival and the end of what it replaces, perhaps the last.
        if self.world.leads:
            saved.prune(self.saver.parent, found.step, self.saver.keep, up_to=found.step)

    def _ready(self) -> Callable[[], None]:
        """Return a call that waits for the records so far; the folder must be where it was."""
        recorded, folder = self.reporter.recorder.mark(), self.reporter.folder

        def wait() -> None:
            recorded()
            folder.check_place()
            if not folder.checkpoints.is_dir():
                self.reporter.event(
                    "checkpoints",
                    f"{folder.checkpoints} was removed while the run went on, and with it the "
                    "earlier checkpoints and the best policy so far. New ones are written there.",
                )

        return wait

    def _snapshot(self) -> saved.Snapshot:
        parts, progress = self.parts, self.progress
        progress.micro_tokens = parts.learner.micro_tokens
        tensors: dict[str, dict[str, Tensor]] = {
            "optimizer": parts.learner.state(),
            "engine": parts.engine.state(),
            **{name: role.state() for name, role in parts.learner.roles.items()},
        }
        values = progress.state()
        if parts.ahead is not None:
            values[AHEAD], tensors[AHEAD] = parts.ahead.state()
        whole, shards = split(tensors)
        more = shards_part(self.world, shards, self.saver.writers) if shards else None
        if not self.world.leads:  # which writes all but the others' shards
            own = () if more is None else (more,)
            return saved.Snapshot(progress.step, False, Contents({}, ()), Contents({}, own))
        return saved.snapshot(
            progress.step,
            weights=self.stage.contents(parts),
            tensors=whole,
            values=values,
            best=progress.best_step == progress.step,
            more=() if more is None else (more,),
            others=sum(x.nbytes - part(x).nbytes for x in shards.values()),
        )
