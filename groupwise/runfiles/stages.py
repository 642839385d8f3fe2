"""A pipeline's folder: stages.json, the order, state and digests of the runs beside it.

Each stage is an ordinary run folder. What a run started from stands in its own manifest as
`parent`: folder, step and digest of the weights, whoever chained the two.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from groupwise.errors import RunError
from groupwise.runfiles import schemas
from groupwise.runfiles.files import read_object, to_page, write_atomic
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.parts import PartChange, part_changes

FILE = "stages.json"
WAITING, RUNNING, FINISHED = "waiting", "running", "finished"
RESUME = "resume"  # of a checkpoint: what is no weight


@dataclass(frozen=True)
class StageRecord:
    """One stage as stages.json has it."""

    name: str
    folder: str
    recipe: str
    start: str  # "base", "stage:NAME", "stage:NAME@best" or a path
    state: str = WAITING
    config: str = ""  # digest of its configuration, when it is finished
    data: str = ""  # digest of the files that its tasks come from, as it last started
    weights: dict[str, str] = field(default_factory=dict)  # digests of latest and best


@dataclass(frozen=True)
class ChainRecord:
    """All of stages.json."""

    name: str
    place: str  # where the pipeline lay when it was last written: its stages name it in paths
    stages: tuple[StageRecord, ...]
    going: tuple[str, ...] = ()  # folders that are being removed, to be done anew

    @property
    def finished(self) -> bool:
        return all(stage.state == FINISHED for stage in self.stages)


def is_pipeline(path: str | os.PathLike[str]) -> bool:
    return (Path(path) / FILE).is_file()


def read_stages(path: str | os.PathLike[str]) -> ChainRecord | None:
    """Read a pipeline's stages.json; None if there is none."""
    found = read_object(Path(path) / FILE, schemas.stages)
    if not found:
        return None
    known = StageRecord.__dataclass_fields__
    stages = [
        StageRecord(**{k: x for k, x in each.items() if k in known}) for each in found["stages"]
    ]
    going = tuple(found.get("going", ()))
    return ChainRecord(found["name"], found["place"], tuple(stages), going)


def write_stages(path: Path, record: ChainRecord) -> None:
    with RunFolder(path).writing(FILE):
        write_atomic(path / FILE, to_page({"format": 1, **asdict(record)}))


def pipeline_of(run: Path) -> Path | None:
    """Return the folder of the pipeline that a run is a stage of, if any."""
    return run.parent if is_pipeline(run.parent) else None


# --- digests ----------------------------------------------------------------------------------


def weights_digest(checkpoint: Path) -> str:
    """Return a digest of a model's folder: all its files, without what resume needs."""
    whole = hashlib.sha256()
    try:
        for path in sorted(x for x in checkpoint.resolve().iterdir() if x.is_file()):
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            whole.update(f"{path.name}\0{digest}\n".encode())
    except OSError as error:
        raise RunError(
            f"{checkpoint} can't be read: {error.strerror or error}. Put it back, or do the stage "
            "anew with --from."
        ) from error
    return whole.hexdigest()


def text_digest(text: str, place: str) -> str:
    """Return a digest of a text that does not depend on where the pipeline lies."""
    return hashlib.sha256(text.replace(place, "").encode()).hexdigest()


def parent_of(model: str, run: Path) -> dict[str, Any] | None:
    """Return the run that a model is a checkpoint of, with its step and the weights' digest."""
    checkpoint = Path(model).resolve()
    parent = checkpoint.parent.parent
    step = checkpoint.name.removeprefix("step_")
    inside = checkpoint.parent.name == "checkpoints" and (parent / "config.toml").is_file()
    if not inside or not step.isdecimal():
        return None
    return {
        "folder": os.path.relpath(parent, run.resolve()),
        "step": int(step),
        "weights": weights_digest(checkpoint),
    }


# --- figures ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageFigures:
    """A stage in a few numbers; None where it has not come so far or it is not measured."""

    record: StageRecord
    steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    before: float | None = None
    after: float | None = None
    held_out: str = ""  # digest of the tasks that accuracy is of
    parent: Mapping[str, Any] | None = None
    parts: Sequence[PartChange] = ()  # of a reward that has several

    @property
    def gain(self) -> float | None:
        return None if self.before is None or self.after is None else self.after - self.before


def figures(path: Path, record: ChainRecord) -> list[StageFigures]:
    """Read what every stage came to, from its own files."""
    return [_figures(path / stage.folder, stage) for stage in record.stages]


def _figures(path: Path, stage: StageRecord) -> StageFigures:
    folder = RunFolder(path)
    manifest, summary = folder.read_manifest(), folder.read_summary()
    cost = manifest.get("cost") or {}
    steps = summary.get("steps")
    if steps is None and path.is_dir():
        steps = folder.durable_step()
    return StageFigures(
        stage,
        steps=steps,
        tokens=cost.get("tokens"),
        seconds=summary.get("seconds", cost.get("seconds")),
        before=summary.get("accuracy_before"),
        after=summary.get("accuracy_after"),
        held_out=(manifest.get("origin") or {}).get("held_out", ""),
        parent=manifest.get("parent"),
        parts=part_changes(summary),
    )
