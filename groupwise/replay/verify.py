"""A run repeated from the record in its folder, and compared with it bit by bit.

Configuration, seed, data and starting weights are those of the record, or nothing is run. Where
settings were changed on the way, each stretch is repeated with its own, from the state that the one
before it left. Each step is compared as soon as it is there: the first difference is the one that
has a cause, and ends it.
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

from groupwise.common.progress import counted
from groupwise.config import Config
from groupwise.envs.recorded_worlds import first_difference
from groupwise.errors import GroupwiseError, RunError
from groupwise.explain.render import bullets, wrapped
from groupwise.graders.recorded_verdicts import recorded as recorded_verdicts
from groupwise.prepare import pins
from groupwise.prepare.recorded import episodes_of, groups_of, read_config
from groupwise.prepare.setup import on_gpu
from groupwise.replay.bits import (
    WEIGHTS,
    FirstDifference,
    compare_metrics,
    compare_rollouts,
    compare_weights,
    short,
)
from groupwise.replay.stretches import RunPart, edited, lay_out_checkpoint, parts_of
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.manifest import machine_facts
from groupwise.runfiles.rollouts import read
from groupwise.runfiles.starts import CODE, changes_on_the_way, read_starts
from groupwise.training.cold_start import COLD_START
from groupwise.training.loop import begin, one_step
from groupwise.training.opening import open_run
from groupwise.training.run import Run
from groupwise.watch.display import Display

FORMAT = 1  # of the manifest
JUDGE = "judge"  # the part of a reward that asks a service


@dataclass
class Verified:
    """The result of the second run."""

    run: str
    steps: int = 0  # that came out the same
    difference: FirstDifference | None = None
    changed: list[str] = field(default_factory=list)  # settings and code, on the way
    left_out: list[str] = field(default_factory=list)  # steps that could not be repeated, and why
    unwritten: bool = False  # changes are not known: an older groupwise did not write them down
    environment: list[dict[str, Any]] = field(default_factory=list)  # what, recorded, now
    notes: list[str] = field(default_factory=list)
    weights: str = ""  # the fingerprint after the last step that is the same
    checkpoints: list[str] = field(default_factory=list)  # whose files hold the same weights

    @property
    def same(self) -> bool:
        return self.difference is None

    @property
    def whole(self) -> bool:
        """Return whether all of it was repeated, and came out the same."""
        return self.same and not self.left_out

    def _in_files(self) -> str:
        return f", as in the files of {' and '.join(self.checkpoints)}" if self.checkpoints else ""

    def as_dict(self) -> dict[str, Any]:
        return {"format": 1, "same": self.same, **asdict(self)}

    def text(self, width: int) -> str:
        if self.same:
            of = "What can be repeated of " if self.left_out else ""
            lines = wrapped(
                f"{of}{self.run} repeats to the bit: {_steps(self.steps)} with every token, "
                f"log-probability, reward, advantage and metric, and the same weights "
                f"({self.weights[:16]}){self._in_files()}.",
                width,
                indent=0,
            )
        else:
            lines = [f"{self.run} does not repeat; {_steps(self.steps)} did.", ""]
            lines += wrapped(f"First difference: {self.difference}.", width, indent=0)
        lines += bullets("Not repeated", self.left_out, width)
        lines += bullets("Changed on the way; each stretch was repeated with its own", self.changed,
                         width)  # fmt: skip
        differs = [f"{x['what']}: {short(x['recorded'])} then, {short(x['now'])} now"
                   for x in self.environment]  # fmt: skip
        title = "What differs here" if self.same else "Likely causes: what differs here"
        lines += bullets(title, differs, width)
        if not self.same and not differs:
            lines += ["", *wrapped(self._where_to_look(), width, indent=0)]
        return "\n".join([*lines, *bullets("To bear in mind", self.notes, width)])

    def _where_to_look(self) -> str:
        if self.unwritten:
            return (
                "Nothing that the manifest names differs here. The groupwise that made the run did "
                "not write down which settings were changed when it was continued: if some were, "
                "that is the likely cause. Else look for a grader that does not repeat, or a file "
                "that was changed."
            )
        return (
            "Nothing that the manifest names differs here, and every step was repeated with the "
            "settings that it was made with: look for a grader that does not repeat, or a file "
            "that was changed."
        )


def verify(
    path: str | Path,
    steps: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
    env: bool = False,
) -> Verified:
    """Run it again in a folder that is thrown away, and compare step by step.

    What environments have answered is taken from the record, unless `env`.
    """
    folder = RunFolder(path)
    config = read_config(folder)
    manifest = _manifest(folder)
    if steps is not None and steps < 1:
        raise RunError(f"--steps {steps} repeats nothing. Write 1 or more.")
    metrics = {int(line["step"]): line for line in folder.read_metrics()}
    last = _last_step(folder, metrics)
    parts = parts_of(folder, config, manifest, min(last, steps or last))
    starts = read_starts(folder)
    found = Verified(
        str(folder.path),
        changed=changes_on_the_way(folder),
        unwritten=not starts or any(start.inferred for start in starts),
        notes=_notes(folder, config, manifest, last, steps, env),
    )
    with tempfile.TemporaryDirectory(prefix="groupwise_verify_") as place:
        again = RunFolder(Path(place) / "run")
        again.path.mkdir()
        if config.model.path == "tiny" and (folder.path / COLD_START).is_dir():
            (again.path / COLD_START).symlink_to((folder.path / COLD_START).resolve())
        _repeat_parts(_Repetition(folder, again, manifest, metrics, found, tell, env), parts)
    if not found.steps and found.left_out and found.same:
        raise RunError(f"{folder.path} can't be repeated here: {' '.join(found.left_out)}")
    return found


@dataclass(frozen=True)
class _Repetition:
    """The run, its repetition, and the findings so far."""

    folder: RunFolder
    again: RunFolder
    manifest: Mapping[str, Any]
    metrics: Mapping[int, Mapping[str, Any]]
    found: Verified
    tell: Callable[[str], None]
    env: bool  # environments answer again


def _repeat_parts(second: _Repetition, parts: list[RunPart]) -> None:
    folder, again, found = second.folder, second.again, second.found
    changed = {kind for kind in CODE if len({part.origin.get(kind) for part in parts}) > 1}
    reached = 0
    for at, part in enumerate(parts):
        then, here = part.origin.get("recipe"), part.config.recipe.code()
        if "recipe" in changed and then != here:
            found.left_out.append(
                f"{part}: the {CODE['recipe']} was other than it is here ({short(then)} then, "
                f"{short(here)} now)."
            )
            continue
        if reached < part.first - 1 and not lay_out_checkpoint(folder, part.first - 1, again):
            found.left_out.append(
                f"{part}: what came before was not repeated, and no checkpoint of step "
                f"{part.first - 1} is there to begin from."
            )
            continue
        start = pins.pinned(_quiet(part.config), second.manifest)
        with (
            _threads(part.threads),
            open_run(start, again.path, Display(io.StringIO(), live=False)) as run,
        ):
            _check_environment(second, part, changed)
            run.progress.best = math.inf  # no evaluation is the best one: nothing needs saving
            taken = _other_reward(part, again, changed)
            if taken:
                found.notes.append(
                    f"{part}: the {CODE['reward']} was other than it is here, so its recorded "
                    "verdicts are taken; those of held-out tasks are not compared."
                )
            if taken or _asks_a_judge(part.config):
                run.parts.known = recorded_verdicts(map(folder.rollout, folder.rollout_steps()))
            if run.parts.turns is not None and not second.env:
                run.parts.turns.recorded = episodes_of(folder)
                run.parts.held_out = []  # nobody has recorded what was said there
            _repeat(second, run, part, last=at + 1 == len(parts), taken=taken)
            if found.difference is not None:
                return
            reached = part.last
            if at + 1 < len(parts):
                run.keeper.save()


def _other_reward(part: RunPart, again: RunFolder, changed: set[str]) -> bool:
    now = again.read_manifest()["origin"].get("reward")
    return "reward" in changed and part.origin.get("reward") != now


def _check_environment(second: _Repetition, part: RunPart, changed: set[str]) -> None:
    """Refuse other data or weights; note what else differs here from when it was made."""
    recorded = {**second.manifest, "threads": part.threads, "origin": part.origin}
    now = second.again.read_manifest()
    _check_origin(second.folder, recorded, now)
    told = {CODE[kind] for kind in changed}  # is said of the part that it holds for
    known = second.found.environment
    known += [x for x in differences(recorded, machine_facts(), now)
              if x not in known and x["what"] not in told]  # fmt: skip


def _repeat(second: _Repetition, run: Run, part: RunPart, *, last: bool, taken: bool) -> None:
    """Repeat the steps of a part; `taken`: verdicts are those of the record."""
    folder, again, found = second.folder, second.again, second.found
    opening = 0 if part.first == 1 else part.first  # the step at which the run is opened
    for step in counted("repeating", range(opening, part.last + 1), "steps"):
        stopped = ""
        try:
            if step == opening:
                begin(run)
            if step > 0:
                one_step(run, threading.Event())
        except GroupwiseError as error:
            stopped = str(error)
        run.reporter.recorder.flush()
        now = {int(line["step"]): line for line in again.read_metrics()}.get(step)
        if now is None:
            found.difference = FirstDifference(step, "the run", "a finished step", stopped)
            return
        rollouts = (folder.rollout(step), again.rollout(step))
        difference = compare_rollouts(step, *rollouts) if rollouts[0].is_file() else None
        if difference is None and step in second.metrics:
            unheard = run.config.turns.used and not second.env
            judged = ("eval/",) if taken or unheard or _asks_a_judge(run.config) else ()
            difference = compare_metrics(step, second.metrics[step], now, judged)
        for name in (f"checkpoints/step_{step}", f"snapshots/step_{step}"):
            if difference is None and (folder.path / name).is_dir():
                weights = run.stage.contents(run.parts)
                difference = compare_weights(step, name, folder.path / name, weights)
                found.checkpoints += [name] if difference is None else []
        if difference is not None:
            found.difference = difference
            if second.env:
                found.notes += answered_otherwise(difference, *rollouts)
            return
        found.steps, found.weights = found.steps + (step > 0), str(now.get(WEIGHTS, found.weights))
        second.tell(f"step {step} of {max(second.metrics)}: the same")
        if stopped and last and step == part.last:  # before, the run was started again, and went on
            found.notes.append(f"The second run stopped after step {step}: {stopped}")


def answered_otherwise(difference: FirstDifference, then: Path, now: Path) -> list[str]:
    """Return in words where an environment has answered otherwise than recorded, if it has."""
    if difference.what.startswith("eval/"):
        return ["Held-out episodes are not recorded turn by turn: who said something else there, "
                "the policy or its environment, is not known."]  # fmt: skip
    if not then.is_file() or not now.is_file():
        return []
    old, new = (
        {(r.task.id, r.draw, r.sample): (number, r.completion.episode)
         for number, group in enumerate(groups_of(read(file))) for r in group}
        for file in (then, now)
    )  # fmt: skip
    for place, (group, before) in old.items():
        after = new.get(place, (0, None))[1]
        if before is None or after is None:
            continue
        if why := first_difference(before, after):
            where = f"group {group}, sample {place[2]}"
            return [f"The environment has answered otherwise than recorded: {where}, {why}."]
    return []


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
    """Refuse other data or starting weights: that is another run."""
    meant = {
        "data": ("data", "data.train and what is read with it"),
        "weights": ("weights", "model.path"),
        "held_out": ("held-out tasks", "data.eval"),
    }
    # Older versions wrote down no held-out tasks: nobody knows.
    known = {kind: x for kind, x in meant.items() if kind in recorded["origin"]}
    for kind, (what, settings) in known.items():
        then, here = recorded["origin"][kind], now["origin"].get(kind)
        if then != here:
            raise RunError(
                f"The {what} here are not those that {folder.path} started with (fingerprint "
                f"{short(here)} instead of {short(then)}): a second run could not come out the "
                f"same. Put back what {settings} named then; nothing was run."
            )


def _quiet(config: Config) -> Config:
    """Return the same computation without trackers, checkpoints and rules that stop it."""
    return replace(
        config,
        watch=replace(config.watch, mirrors=(), stop=(), snapshot=False),
        checkpoint=replace(config.checkpoint, every_steps=0, every_seconds=0.0),
    )


@contextlib.contextmanager
def _threads(recorded: int | None) -> Iterator[None]:
    """Use as many threads as the run had: another number adds up in another order."""
    before = torch.get_num_threads()
    if isinstance(recorded, int) and recorded > 0:
        torch.set_num_threads(recorded)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _asks_a_judge(config: Config) -> bool:
    return any(name.startswith(JUDGE) for name in (*config.reward.parts, *config.data.graders))


def _notes(
    folder: RunFolder,
    config: Config,
    manifest: Mapping[str, Any],
    last: int,
    steps: int | None,
    env: bool,
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
    if config.turns.used and not env:
        said.append(
            "What the environment has answered was taken from the record, where it is kept, and "
            "held-out tasks were not played. With --env it answers again."
        )
    if manifest.get("earlier"):
        said.append(
            f"The run was started {len(manifest['earlier']) + 1} times, on different machines or "
            "versions: manifest.json has them all, and what is compared with is the last."
        )
    by_hand = edited(folder, config)
    if by_hand:
        said.append(
            f"config.toml was edited since the last start, and is taken as it is: "
            f"{'; '.join(by_hand)}."
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
    """Return what differs from the manifest: versions, machine, threads, code, rewards."""
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
    for kind, name in CODE.items():
        if kind in recorded["origin"]:  # an older groupwise did not write it
            then[name], here[name] = (part["origin"].get(kind, "") for part in (recorded, now))
    return [
        {"what": name, "recorded": value, "now": here.get(name)}
        for name, value in then.items()
        if value != here.get(name)
    ]


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count:,} steps"
