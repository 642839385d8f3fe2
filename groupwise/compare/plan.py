"""All runs of a comparison, written down before the first: the same command continues it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise import config as configuration
from groupwise.compare.arms import Arm, ArmBudget
from groupwise.config import Config
from groupwise.errors import GroupwiseError, RecipeWarning, RunError
from groupwise.runfiles.files import to_page, write_atomic
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.lock import holder, sign
from groupwise.training.continuing import finished

FORMAT = 1
PATIENCE = 30.0  # seconds in which processes of a comparison that was killed save their runs


@dataclass(frozen=True)
class Job:
    """One run."""

    arm: int
    seed: int


@dataclass(frozen=True)
class ComparisonPlan:
    """The arms and seeds of a comparison, and how much each run may spend."""

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    budget: ArmBudget

    @property
    def jobs(self) -> list[Job]:
        """Return the runs, a seed of every arm before the next seed: early ones can be compared."""
        return [Job(arm, seed) for seed in self.seeds for arm in range(len(self.arms))]

    def config(self, job: Job) -> Config:
        return replace(self.arms[job.arm].config, seed=job.seed)

    def with_threads(self, threads: int) -> ComparisonPlan:
        """Fix the threads where the configuration leaves them open: another number changes the last
        bits.
        """
        arms = [
            arm
            if arm.config.model.threads or arm.config.model.device != "cpu"
            else replace(
                arm, config=replace(arm.config, model=replace(arm.config.model, threads=threads))
            )
            for arm in self.arms
        ]
        return replace(self, arms=tuple(arms))

    # --- as a file ----------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        arms = [{"name": arm.name, "config": configuration.text(arm.config)} for arm in self.arms]
        budget = {"unit": self.budget.unit, "amount": self.budget.amount}
        return {"format": FORMAT, "budget": budget, "seeds": list(self.seeds), "arms": arms}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> ComparisonPlan:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecipeWarning)
            arms = tuple(
                Arm(each["name"], configuration.load(tomllib.loads(each["config"])))
                for each in stored["arms"]
            )
        return cls(arms, tuple(stored["seeds"]), ArmBudget(**stored["budget"]))


@dataclass(frozen=True)
class ComparisonFolder:
    """The folder of a comparison."""

    path: Path

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def data(self) -> Path:
        """Return the file with the hashes of the tasks."""
        return self.path / "data.json"

    @property
    def starts(self) -> Path:
        """Return the folder of the embedded models."""
        return self.path / "start"

    def run(self, plan: ComparisonPlan, job: Job) -> Path:
        return self.path / "runs" / plan.arms[job.arm].folder / f"seed_{job.seed}"

    def log(self, plan: ComparisonPlan, job: Job) -> Path:
        return self.run(plan, job) / "log.txt"

    def read(self) -> ComparisonPlan | None:
        """Read the plan of the comparison in this folder; None where there is none."""
        if not self.plan.is_file():
            if self.path.is_dir() and any(name != ".lock" for name in os.listdir(self.path)):
                raise RunError(
                    f"{self.path} holds something that is no comparison. Take another folder: --out"
                )
            return None
        try:
            stored = json.loads(self.plan.read_bytes())
            return ComparisonPlan.from_dict(stored)
        except GroupwiseError as error:  # a file of recipes that was moved
            raise RunError(
                f"{self.path} holds a comparison that can't be gone on with here: {error} Put "
                "that right, or take another folder: --out"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{self.plan} can't be read ({error}). It is written in one piece, so it was "
                "edited or comes from another version. Take another folder: --out"
            ) from error

    def take(self, plan: ComparisonPlan) -> None:
        """Write the plan down. A plan with runs may only gain arms and seeds."""
        before = self.read()
        if before is not None and not (self.path / "runs").is_dir():
            # It was refused or stopped before its first run: whatever was mended since holds.
            self.data.unlink(missing_ok=True)
            shutil.rmtree(self.starts, ignore_errors=True)
        elif before is not None:
            refused = changes(before, plan)
            if refused:
                raise RunError(
                    f"{self.path} holds another comparison: {'; '.join(refused)}. Take another "
                    "folder (--out), or the command that it was started with; arms and seeds may "
                    "be added to it."
                )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomic(self.plan, to_page(plan.as_dict()))
        except OSError as error:
            raise RunError(f"{self.path} can't be written: {error}. Take another: --out") from None

    def undone(self, plan: ComparisonPlan) -> list[Job]:
        return [job for job in plan.jobs if finished(plan.config(job), self.run(plan, job)) is None]

    @contextlib.contextmanager
    def locked(self, tell: Callable[[str], None]) -> Iterator[int]:
        """Lock the folder for this process and those that inherit the descriptor; a wait is
        announced.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunError(f"{self.path} can't be written: {error}. Take another: --out") from None
        try:
            _wait_for(descriptor, self.path, tell)
            sign(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)


def has_weights(run: Path) -> bool:
    """Return whether a run has or had its own weights: a finished one may lack checkpoints."""
    return any(run.glob("checkpoints/step_*")) or RunFolder(run).summary.is_file()


def _wait_for(descriptor: int, path: Path, tell: Callable[[str], None]) -> None:
    end, told = time.monotonic() + PATIENCE, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            who = f"{holder(path / '.lock')}, or a run that it started,"
            if time.monotonic() > end:
                raise RunError(
                    f"{who} is still at work on {path}. Wait for it, or stop it."
                ) from None
            if not told:
                tell(
                    f"{who} is at work on {path}: waiting up to {PATIENCE:.0f} seconds, as runs of "
                    "a comparison that was stopped are saved first"
                )
                told = True
            time.sleep(0.2)


def changes(before: ComparisonPlan, after: ComparisonPlan) -> list[str]:
    """Return in words the changes that a comparison can't continue with."""
    found = []
    if before.budget != after.budget:
        found.append(f"its budget is {before.budget}, not {after.budget}")
    known = {arm.name: arm for arm in after.arms}
    for arm in before.arms:
        if arm.name not in known:
            found.append(f"it has an arm {arm.name!r}")
            continue
        found += [
            f"{arm.name}: {_short(change)}"
            for change in configuration.difference(arm.config, known[arm.name].config)
            if not change.key.startswith(("steps", "budget."))  # said above
        ]
    missing = sorted(set(before.seeds) - set(after.seeds))
    if missing and not found:
        found.append(f"it has {len(before.seeds)} seeds, not {len(after.seeds)}")
    return found


def _short(change: configuration.SettingChange) -> str:
    return str(change).rpartition(" (")[0]


def seeds_from(first: int, number: int) -> tuple[int, ...]:
    return tuple(range(first, first + number))
