"""A run repeated from what its folder says it was made of, and compared with it bit by bit.

Configuration, seed, data and starting weights are those of the record, or nothing is run. Each step
is compared as soon as it is there: the first difference is the one that has a cause, and ends it.
"""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from groupwise import hub
from groupwise.config import Config
from groupwise.errors import GroupwiseError, RunError
from groupwise.graders.ledger import recorded as recorded_verdicts
from groupwise.loop import begin, one_step
from groupwise.opening import COLD_START, open_run
from groupwise.replay.bits import (
    WEIGHTS,
    Difference,
    compare_metrics,
    compare_rollouts,
    compare_weights,
    short,
)
from groupwise.replay.recorded import read_config
from groupwise.run import Run
from groupwise.setup import on_gpu
from groupwise.tell.render import bullets, wrapped
from groupwise.watch.display import Display
from groupwise.watch.folder import RunFolder
from groupwise.watch.manifest import machine_facts

FORMAT = 1  # of the manifest
JUDGE = "judge"  # the part of a reward that asks a service

Tell = Callable[[str], None]


@dataclass
class Verified:
    """What became of the second run."""

    run: str
    steps: int = 0  # that came out the same
    difference: Difference | None = None
    environment: list[dict[str, Any]] = field(default_factory=list)  # what, recorded, now
    notes: list[str] = field(default_factory=list)
    weights: str = ""  # the fingerprint after the last step that is the same
    checkpoints: list[str] = field(default_factory=list)  # whose files hold the same weights

    @property
    def same(self) -> bool:
        return self.difference is None

    def _in_files(self) -> str:
        return f", as in the files of {' and '.join(self.checkpoints)}" if self.checkpoints else ""

    def as_dict(self) -> dict[str, Any]:
        return {"format": 1, "same": self.same, **asdict(self)}

    def text(self, width: int) -> str:
        if self.same:
            lines = wrapped(
                f"{self.run} repeats to the bit: {_steps(self.steps)} with every token, "
                f"log-probability, reward, advantage and metric, and the same weights "
                f"({self.weights[:16]}){self._in_files()}.",
                width,
                indent=0,
            )
        else:
            lines = [f"{self.run} does not repeat; {_steps(self.steps)} did.", ""]
            lines += wrapped(f"First difference: {self.difference}.", width, indent=0)
        differs = [f"{x['what']}: {short(x['recorded'])} then, {short(x['now'])} now"
                   for x in self.environment]  # fmt: skip
        title = "What differs here" if self.same else "Likely causes: what differs here"
        lines += bullets(title, differs, width)
        if not self.same and not differs:
            lines += ["", *wrapped("Nothing that the manifest names differs here: look for a "
                                   "grader that does not repeat, or a file that was changed.",
                                   width, indent=0)]  # fmt: skip
        return "\n".join([*lines, *bullets("To bear in mind", self.notes, width)])


def verify(path: str | Path, steps: int | None = None, tell: Tell = lambda text: None) -> Verified:
    """Run it again, into a folder that is thrown away, and compare step by step."""
    folder = RunFolder(path)
    config = read_config(folder)
    manifest = _manifest(folder)
    if steps is not None and steps < 1:
        raise RunError(f"--steps {steps} repeats nothing. Write 1 or more.")
    metrics = {int(line["step"]): line for line in folder.read_metrics()}
    last = _last_step(folder, metrics)
    found = Verified(str(folder.path), notes=_notes(folder, config, manifest, last, steps))
    with tempfile.TemporaryDirectory(prefix="groupwise_verify_") as place, _threads(manifest):
        again = RunFolder(Path(place) / "run")
        again.path.mkdir()
        if config.model.path == "tiny" and (folder.path / COLD_START).is_dir():
            (again.path / COLD_START).symlink_to((folder.path / COLD_START).resolve())
        start = hub.pinned(_quiet(config), manifest)
        with open_run(start, again.path, Display(io.StringIO(), live=False)) as run:
            _check_origin(folder, manifest, again.read_manifest())
            found.environment = differences(manifest, machine_facts(), again.read_manifest())
            run.best = math.inf  # no evaluation is the best one: nothing needs saving
            if _asks_a_judge(config):
                run.known = recorded_verdicts(map(folder.rollout, folder.rollout_steps()))
            _repeat(run, folder, again, metrics, min(last, steps or last), found, tell)
    return found


def _repeat(
    run: Run,
    folder: RunFolder,
    again: RunFolder,
    metrics: Mapping[int, Mapping[str, Any]],
    last: int,
    found: Verified,
    tell: Tell,
) -> None:
    for step in range(last + 1):
        stopped = ""
        try:
            begin(run) if step == 0 else one_step(run, threading.Event())
        except GroupwiseError as error:
            stopped = str(error)
        run.recorder.flush()
        now = {int(line["step"]): line for line in again.read_metrics()}.get(step)
        if now is None:
            found.difference = Difference(step, "the run", "a finished step", stopped)
            return
        rollouts = (folder.rollout(step), again.rollout(step))
        difference = compare_rollouts(step, *rollouts) if rollouts[0].is_file() else None
        if difference is None and step in metrics:
            judged = ("eval/",) if _asks_a_judge(run.config) else ()
            difference = compare_metrics(step, metrics[step], now, judged)
        for name in (f"checkpoints/step_{step}", f"snapshots/step_{step}"):
            if difference is None and (folder.path / name).is_dir():
                difference = compare_weights(step, name, folder.path / name, run.loaded)
                found.checkpoints += [name] if difference is None else []
        if difference is not None:
            found.difference = difference
            return
        found.steps, found.weights = step, str(now.get(WEIGHTS, found.weights))
        tell(f"step {step} of {last}: the same")
        if stopped and step == last:  # before, the run was started again, and went on
            found.notes.append(f"The second run stopped after step {step}: {stopped}")


# --- before anything expensive ------------------------------------------------------------------


def _manifest(folder: RunFolder) -> dict[str, Any]:
    manifest = folder.read_manifest()
    if not manifest.get("origin"):
        raise RunError(
            f"{folder.path} has no manifest.json that says what it was made of (hashes of data and "
            "starting weights), so there is nothing to repeat it from."
        )
    if manifest.get("format") != FORMAT:
        raise RunError(
            f"{folder.manifest} has format {manifest.get('format')!r}, this groupwise reads "
            f"{FORMAT}. Verify it with the groupwise that wrote it "
            f"({manifest.get('versions', {}).get('groupwise')})."
        )
    return manifest


def _last_step(folder: RunFolder, metrics: Mapping[int, Any]) -> int:
    last = max(metrics, default=0)
    missing = sorted(set(range(1, last + 1)) - set(metrics))
    if not last or missing:
        raise RunError(
            f"{folder.path} has no finished step to compare with."
            if not last
            else f"{folder.metrics} has no line for step {missing[0]}: it was changed since."
        )
    return last


def _check_origin(folder: RunFolder, recorded: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Other data or starting weights are another run."""
    meant = {"data": "data.train and what is read with it", "weights": "model.path"}
    for kind, settings in meant.items():
        then, here = recorded["origin"].get(kind), now["origin"].get(kind)
        if then != here:
            raise RunError(
                f"The {kind} here are not those that {folder.path} started with (fingerprint "
                f"{short(here)} instead of {short(then)}): a second run could not come out the "
                f"same. Put back what {settings} named then; nothing was run."
            )


def _quiet(config: Config) -> Config:
    """The same computation: nobody else is told, nothing is kept, no rule stops it."""
    return replace(
        config,
        watch=replace(config.watch, mirrors=(), stop=(), snapshot=False),
        checkpoint=replace(config.checkpoint, every_steps=0, every_seconds=0.0),
    )


@contextlib.contextmanager
def _threads(manifest: Mapping[str, Any]) -> Iterator[None]:
    """As many as the run had: another number adds up in another order."""
    before, recorded = torch.get_num_threads(), manifest.get("threads")
    if isinstance(recorded, int) and recorded > 0:
        torch.set_num_threads(recorded)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _asks_a_judge(config: Config) -> bool:
    return any(name.startswith(JUDGE) for name in (*config.reward.parts, *config.data.graders))


def _notes(
    folder: RunFolder, config: Config, manifest: Mapping[str, Any], last: int, steps: int | None
) -> list[str]:
    said = []
    if on_gpu(config) and not config.engine.exact:
        said.append(
            "The run is on a GPU without engine.exact=true. Only exact mode promises the same bits "
            "there: a difference in last bits is no sign of anything wrong."
        )
    if config.budget.seconds:
        said.append(
            "The run was to end after seconds (budget.seconds): its learning rate and evaluations "
            "went by the clock, which does not repeat."
        )
    if _asks_a_judge(config):
        said.append(
            "A judge is asked for some rewards. Its recorded verdicts are taken where the answer "
            "is the same; on held-out tasks it is asked anew, and they are not compared."
        )
    if manifest.get("earlier"):
        said.append(
            f"The run was started {len(manifest['earlier']) + 1} times, on different machines or "
            "versions: manifest.json has them all, and what is compared with is the last."
        )
    writer = folder.writer()
    if writer:
        said.append(f"{writer} is writing to the run: only its steps up to {last} are repeated.")
    kept = set(folder.rollout_steps())
    gone = [step for step in range(1, min(last, steps or last) + 1) if step not in kept]
    if gone:
        said.append(
            f"{_steps(len(gone))} without rollouts in the folder: of these, metrics and the "
            "weights' fingerprint are compared."
        )
    if steps is not None and steps > last:
        said.append(f"The run has {_steps(last)}, and no more can be repeated.")
    return said


def differences(
    recorded: Mapping[str, Any], facts: Mapping[str, Any], now: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What the manifest names that is otherwise here: versions, machine, threads, code, rewards."""
    then: dict[str, Any] = {}
    here: dict[str, Any] = {}
    for part, side in ((recorded, then), (facts, here)):
        for kind in ("versions", "hardware"):
            side.update({f"{kind} {name}": x for name, x in (part.get(kind) or {}).items()})
        side["threads"] = part.get("threads")
    if recorded.get("git") and facts.get("git"):  # of the folder that one was in; none elsewhere
        for part, side in ((recorded, then), (facts, here)):
            side["git commit of the working folder"] = part["git"].get("commit")
            side["files changed since that commit"] = part["git"].get("changed")
    for kind, name in (
        ("reward", "code of the reward functions"),
        ("recipe", "code of the recipe"),
    ):
        if kind in recorded["origin"]:  # an older groupwise did not write it
            then[name], here[name] = (part["origin"].get(kind, "") for part in (recorded, now))
    return [
        {"what": name, "recorded": value, "now": here.get(name)}
        for name, value in then.items()
        if value != here.get(name)
    ]


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"
