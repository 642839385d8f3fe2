"""The folder of an earlier start: whether it can be continued, and what is left to do in it.

It goes on under the same configuration or one that differs in what may change, with the same
weights and data, and to an end that no recorded step lies behind.
"""

from __future__ import annotations

import contextlib
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from groupwise import config as configuration
from groupwise.config import Budget, Config, Model, Until
from groupwise.errors import RunError
from groupwise.prepare.placing import placed
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.starts import CODE, Start, code_changes, read_starts
from groupwise.sync import checkpoints as saved
from groupwise.training.cold_start import COLD_START
from groupwise.watch.display import Display
from groupwise.watch.mirrors import forget
from groupwise.watch.report import write_report


def placed_for(config: Config, path: str | Path) -> Config:
    """Choose a device and a precision for "auto": those of the run in the folder, if any."""
    folder = RunFolder(path)
    with _readable(folder):
        start = last_start(folder)
        model = {} if start is None else tomllib.loads(start.config).get("model", {})
    before = {name: model[name] for name in ("device", "dtype") if name in model}
    return placed(config, Model(**before) if len(before) == 2 else None)


def check_configuration(config: Config, folder: RunFolder) -> list[str]:
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


def check_origin(folder: RunFolder, origin: Mapping[str, str], display: Display) -> None:
    """Stop at other weights or tasks; other code of yours may be the very mend, and is said."""
    before = folder.read_manifest().get("origin", {})
    for kind, digest in origin.items():
        if kind not in CODE and before.get(kind, digest) != digest:
            named = {"held_out": "held-out tasks", "runs": "rollouts of data.runs"}
            what = (named | {"rubric": "words of reward.rubric"}).get(kind, kind)
            raise RunError(
                f"The {what} of this run are not those that {folder.path} was started with "
                f"({digest} instead of {before[kind]}). Put them back, or take another folder "
                "(--run)."
            )
    start = last_start(folder)
    for change in code_changes({} if start is None else start.origin, origin):
        display.warn(f"changed since the run started: the {change['what']}")


def last_start(folder: RunFolder) -> Start | None:
    """Read what the folder was last started with, as far as an older groupwise wrote it."""
    starts = read_starts(folder)
    if starts:
        return starts[-1]
    config = folder.read_config()
    if config is None:
        return None
    manifest = folder.read_manifest()
    return Start(0, config, manifest.get("origin") or {}, manifest.get("threads"), inferred=True)


def _changes(config: Config, folder: RunFolder) -> list[configuration.SettingChange]:
    with _readable(folder):
        before = last_start(folder)
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


def changes_since(before: Start, config: Config, origin: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return settings and code that differ from a start's, as they are written down."""
    settings = [
        {"what": change.key, "old": change.old, "new": change.new}
        for change in configuration.difference(before.config, config)
    ]
    return settings + code_changes(before.origin, origin)


def starts_since(folder: RunFolder, step: int) -> list[Start]:
    """Return the starts that may have made what is recorded after a step."""
    starts = read_starts(folder) or [x for x in [last_start(folder)] if x is not None]
    return [*(x for x in starts if x.step > step), *[x for x in starts if x.step <= step][-1:]]


def grades_alike(start: Start, config: Config, origin: Mapping[str, str]) -> bool:
    """Tell whether the verdicts that a start recorded are what this one would say."""
    changed = configuration.difference(start.config, config)
    return start.origin.get("reward") == origin["reward"] and not any(
        change.key.startswith("reward") for change in changed
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
    passed = config.until != Until() and summary.get("until") == asdict(config.until)
    whole = bool(config.epochs) or summary["steps"] >= config.steps  # epochs never change
    return summary if spent or passed or whole else None


def nothing_left(config: Config, path: str | Path) -> tuple[dict[str, Any], list[str]] | None:
    """Return the summary of a run whose steps are all done, and changes made in vain since."""
    summary = finished(config, path)
    if summary is not None:
        return summary, []
    folder = RunFolder(path)
    summary = folder.read_summary() if folder.config.is_file() else None
    if not summary or summary["steps"] != folder.durable_step():
        return None
    if not config.epochs and config.steps > summary["steps"]:
        return None
    changes = _changes(config, folder)
    if not all(change.compatible for change in changes):
        return None  # opening it says which
    return summary, [str(change) for change in changes]


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
