"""What all runs start from, looked at before the first: data, reward, the embedded model."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from groupwise.compare.plan import Folder, Job, Plan
from groupwise.config import Config
from groupwise.data.cursor import fingerprint
from groupwise.errors import GroupwiseError, RunError
from groupwise.model import tiny
from groupwise.model.checkpoint import save, write_folder
from groupwise.opening import COLD_START
from groupwise.records import Task
from groupwise.setup import set_up
from groupwise.validate.evaluate import check_held_out
from groupwise.watch.files import to_page, write_atomic


class _Enough(Exception):
    """Data and reward are sound; no model is needed to know it."""


def prepare(plan: Plan, folder: Folder, jobs: Sequence[Job], say: Callable[[str], None]) -> None:
    """Refuse data or a reward that no run could use, and make the starting models that are missing.

    The embedded model is made once, whatever the number of arms and seeds.
    """
    looked_at = []
    for arm in (plan.arms[number] for number in sorted({job.arm for job in jobs})):
        config = arm.config
        parts = (config.data, config.reward, config.tiny, config.eval, config.engine.max_tokens)
        if parts in looked_at:
            continue
        looked_at.append(parts)
        try:
            _prepare_one(config, folder, say)
        except GroupwiseError as error:
            raise type(error)(f"{arm.name}: {error}") from None


def _prepare_one(config: Config, folder: Folder, say: Callable[[str], None]) -> None:
    start = start_of(config, folder)

    def model_for(tasks: Sequence[Task], held_out: Sequence[Task]) -> NoReturn:
        check_held_out(held_out[: config.eval.tasks])
        _check_same(config, folder, [fingerprint(tasks), fingerprint(held_out)])
        if start is not None and not start.is_dir():
            say("making the embedded model and its cold start, once for all runs ...")
            made = tiny.make(config.tiny, tasks, held_out, config.engine.max_tokens, config.seed)
            save(made.model, start, made.files)
        raise _Enough

    try:
        set_up(config, model_for)
    except _Enough:
        return


def _check_same(config: Config, folder: Folder, hashes: list[str]) -> None:
    """Refuse files that were changed since the first run: no arm or seed could be compared."""
    kept = folder.path / "data.json"
    known: dict[str, list[str]] = json.loads(kept.read_bytes()) if kept.is_file() else {}
    key = _digest((config.data, config.eval.tasks))
    before = known.setdefault(key, hashes)
    for what, old, new in zip(("training", "held-out"), before, hashes, strict=True):
        if old != new:
            raise RunError(
                f"the {what} tasks are not those that {folder.path} was started with ({new} "
                f"instead of {old}): runs could not be compared with those that are there. Put the "
                "data back, or take another folder: --out"
            )
    write_atomic(kept, to_page(known))


def start_of(config: Config, folder: Folder) -> Path | None:
    """The embedded model's folder; None where the configuration names a model of its own."""
    if config.model.path != "tiny":
        return None
    made_of = (config.tiny, config.data, config.eval.tasks, config.engine.max_tokens)
    return folder.path / "start" / _digest(made_of)


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def lay_out(start: Path | None, run: Path) -> None:
    """The shared start where the run looks for its own."""
    kept = run / COLD_START
    if start is None or kept.is_dir():
        return
    write_folder(kept, lambda beside: _copy(start, beside))


def _copy(start: Path, beside: Path) -> None:
    for file in start.iterdir():
        shutil.copyfile(file, beside / file.name)
