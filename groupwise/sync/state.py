"""Checkpoints that a run can go on from, as if it had never stopped.

`checkpoints/step_N` is a plain Hugging Face folder; where an adapter learns, one of PEFT's. Its
`resume` folder holds the rest: tensors by part (optimizer, reference, ...), values.json, and
state.json with the size and SHA-256 of every file. A checkpoint is written under a hidden name,
reaches the disk, and appears by one rename; `latest` and `best` are links that are replaced in one
go as well. So a process may be killed at any moment, and what is damaged later is found out before
anything is taken from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from groupwise.errors import ModelError, RunError
from groupwise.model import checkpoint, peft_files
from groupwise.model.adapters import adapters
from groupwise.model.transformer import Policy
from groupwise.records import Memory, Visit
from groupwise.watch.files import sync_folder

VERSION = 1  # of the resume folder
TENSORS = ".safetensors"
# Hidden names: being written, moved aside for a new one of the same step, being deleted.
WRITING, ASIDE, GOING = "writing", "aside", "going"


@dataclass(frozen=True)
class Restored:
    """A checkpoint whose every file is as it was written; its weights are a folder to load."""

    step: int
    path: Path
    tensors: dict[str, dict[str, Tensor]]
    values: dict[str, Any]
    fell_back: list[str]  # newer checkpoints that could not be used, and why


def save(
    parent: Path,
    step: int,
    *,
    model: Policy,
    files: Mapping[str, bytes],
    tensors: Mapping[str, Mapping[str, Tensor]],
    values: Mapping[str, Any],
    keep: int,
    best: bool = False,
) -> Path:
    """Write `parent/step_N`, point `latest` (and `best`) at it, delete all but the last `keep`.

    `files` are those that the model was loaded with. `values` must come back from JSON unchanged.
    """
    _check_keys(values)
    content = json.dumps(values)
    final, beside = parent / f"step_{step}", parent / f".step_{step}.{WRITING}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        tidy(parent)
        (peft_files if adapters(model) else checkpoint).save(model, beside, files)
        _write_resume(beside, step, tensors, content)
        _swap_in(beside, final)
        for link in ("latest", "best") if best else ("latest",):
            _point(parent / link, final.name)
        _prune(parent, step, keep)
    except (OSError, SafetensorError, ModelError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise RunError(
            f"The checkpoint of step {step} could not be written to {parent}: {error}. Earlier "
            f"ones are untouched. Free some space, or make the folder writable, and run the same "
            f"command again: it goes on from the last of them."
        ) from error
    return final


def load_latest(parent: Path) -> Restored | None:
    """The newest checkpoint whose files are all as they were written; None if there are none."""
    if not parent.is_dir():
        return None
    tidy(parent)
    damaged: list[str] = []
    for step, folder in sorted(_steps(parent).items(), reverse=True):
        try:
            whole = _verified(folder, step)
            resume = [path for path in whole if path.parent.name == "resume"]
            tensors = {path.stem: load_file(path) for path in resume if path.suffix == TENSORS}
            values = json.loads((folder / "resume" / "values.json").read_bytes())
        except (OSError, SafetensorError, ValueError) as error:
            damaged.append(f"{folder.name} can't be used: {error}")
        else:
            return Restored(step, folder, tensors, values, damaged)
    if damaged:
        raise RunError(
            f"No checkpoint in {parent} can be used. {'; '.join(damaged)}. Restore one from a "
            f"backup, or delete the folder to start from the beginning."
        )
    return None


def newest(parent: Path) -> int | None:
    """The step of the newest checkpoint, whole or not; None if there is none."""
    return max(_steps(parent), default=None)


def tidy(parent: Path) -> None:
    """Clear away what a killed process left half done."""
    for path in parent.glob(f".step_*.{ASIDE}"):
        home = parent / path.name.removeprefix(".").removesuffix(f".{ASIDE}")
        if not home.exists():  # killed between the two renames
            path.rename(home)
    for path in parent.iterdir():
        if path.name.startswith((".step_", "..step_")):
            shutil.rmtree(path)
        elif path.name in (".latest", ".best"):
            path.unlink()


def memory_to_json(memory: Memory) -> dict[str, Any]:
    visits = {
        str(prompt): [[visit.size, visit.mean, visit.var] for visit in seen]
        for prompt, seen in memory.visits.items()
    }
    return {"visits": visits, "reward_average": memory.reward_average}


def memory_from_json(values: Mapping[str, Any]) -> Memory:
    visits = {
        int(prompt): tuple(Visit(*visit) for visit in seen)
        for prompt, seen in values["visits"].items()
    }
    return Memory(visits, values["reward_average"])


def _steps(parent: Path) -> dict[int, Path]:
    """The checkpoints by step, whole or not."""
    names = {path.name.removeprefix("step_"): path for path in parent.glob("step_*")}
    return {int(name): path for name, path in names.items() if name.isdecimal() and path.is_dir()}


def _write_resume(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], values: str
) -> None:
    resume = folder / "resume"
    # Hashing beside writing and flushing: processor and disk are busy at the same time.
    with ThreadPoolExecutor() as pool:
        seals = {path: pool.submit(_seal, path) for path in sorted(folder.iterdir())}
        resume.mkdir()
        (resume / "values.json").write_text(values)
        for part, named in tensors.items():
            ready = {name: x.detach().cpu().contiguous() for name, x in named.items()}
            save_file(ready, resume / f"{part}{TENSORS}")
        written = sorted(resume.iterdir())
        seals |= {path: pool.submit(_seal, path) for path in written}
        list(pool.map(_flush, written))
        found = {path.relative_to(folder).as_posix(): seal.result() for path, seal in seals.items()}
    state = {"version": VERSION, "step": step, "files": found}
    (resume / "state.json").write_text(json.dumps(state, indent=1))
    _flush(resume / "state.json")
    sync_folder(resume)
    sync_folder(folder)


def _seal(file: Path) -> dict[str, Any]:
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def _flush(file: Path) -> None:
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())


def _verified(folder: Path, step: int) -> list[Path]:
    """The checkpoint's files; raises if one of them is not what state.json says."""
    try:
        state = json.loads((folder / "resume" / "state.json").read_bytes())
        sealed = {folder / str(name): seal for name, seal in state["files"].items()}
        kind = (state["version"], state["step"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("its resume/state.json is damaged") from error
    if kind != (VERSION, step):
        raise ValueError(f"it says version {kind[0]}, step {kind[1]}, not {VERSION}, {step}")
    with ThreadPoolExecutor() as pool:
        for (path, seal), found in zip(sealed.items(), pool.map(_seal, sealed), strict=True):
            if found != seal:
                raise ValueError(
                    f"{path.relative_to(folder)} is cut short or damaged: it has {found['bytes']} "
                    f"bytes and another SHA-256 than when it was written"
                )
    return list(sealed)


def _swap_in(beside: Path, final: Path) -> None:
    aside = final.with_name(f".{final.name}.{ASIDE}")
    if final.exists():
        final.rename(aside)
    beside.rename(final)
    sync_folder(final.parent)
    if aside.exists():
        shutil.rmtree(aside)


def _point(link: Path, target: str) -> None:
    fresh = link.with_name(f".{link.name}")
    fresh.symlink_to(target)
    fresh.replace(link)
    sync_folder(link.parent)


def _prune(parent: Path, step: int, keep: int) -> None:
    """Keep the last ones up to this step, and what the links point to.

    Later steps are gone too: they were damaged, or the run would have gone on from them.
    """
    steps = _steps(parent)
    linked = {(parent / link).resolve() for link in ("latest", "best")}
    kept = set(sorted(number for number in steps if number <= step)[-max(keep, 1) :])
    for number, folder in steps.items():
        if number not in kept and folder.resolve() not in linked:
            # A folder that is half deleted must not look like a checkpoint.
            going = folder.rename(parent / f".{folder.name}.{GOING}")
            shutil.rmtree(going, ignore_errors=True)


def _check_keys(values: Any, path: str = "values") -> None:
    """JSON turns other keys into strings in silence, and tuples into lists."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            if not isinstance(key, str):
                raise RunError(
                    f"{path} has the key {key!r}; a checkpoint's values can only have strings as "
                    f"keys, or they would come back as others. Write {str(key)!r}."
                )
            _check_keys(value, f"{path}.{key}")
    elif isinstance(values, list):
        for value in values:
            _check_keys(value, f"{path}[]")
