"""Checkpoints that a run can go on from, as if it had never stopped.

`checkpoints/step_N` is a plain Hugging Face folder; where an adapter learns, one of PEFT's. Its
`resume` folder holds the rest: tensors by part (optimizer, reference, ...), values.json, and
state.json with the size and SHA-256 of every file; of a team of ranks also their shards
(shards.py). The best policy so far is kept as weights alone:
nobody goes on from it. A checkpoint is written under a hidden name, reaches the disk, and appears
by one rename. So a process may be killed at any moment, and what is damaged later is found out
before anything is taken from it.

Which checkpoint is the latest and which the best stands in the checkpoints themselves. `latest` and
`best` are links for people and other programs; a kill can leave them one checkpoint behind, and
opening the run sets them right.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from groupwise.common.sizes import size
from groupwise.errors import ModelError, RunError
from groupwise.model.adapters import peft_files
from groupwise.model.adapters.lora import adapters
from groupwise.model.formats import checkpoint
from groupwise.model.formats.checkpoint import Contents, Part
from groupwise.model.layers.transformer import Policy
from groupwise.records import Average, Memory, StoredAnswer, Visit
from groupwise.runfiles.whole import sync_folder

VERSION = 1  # of the resume folder
TENSORS = ".safetensors"
# Hidden names: being written, moved aside for a new one of the same step, being deleted.
WRITING, ASIDE, GOING = "writing", "aside", "going"


class Vanished(RunError):
    """A checkpoint whose files were deleted while it was written."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint whose every file is as it was written; its weights are a folder to load."""

    step: int
    path: Path
    tensors: dict[str, dict[str, Tensor]]
    values: dict[str, Any]
    fell_back: list[str]  # newer checkpoints that could not be used, and why


@dataclass(frozen=True)
class Snapshot:
    """The contents of a checkpoint: the run at one moment, or its weights alone."""

    step: int
    best: bool  # whether this is the best policy so far
    weights: Contents
    resume: Contents | None  # None: nobody goes on from here
    others: int = 0  # bytes that other ranks write

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.weights.parts + (() if self.resume is None else self.resume.parts)

    @property
    def tensors(self) -> list[Tensor]:
        return [x for part in self.parts for x in part.tensors.values()]

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in self.tensors)


def weights_alone(step: int, weights: Contents) -> Snapshot:
    """Return the best model so far."""
    return Snapshot(step, True, weights, None)


def snapshot(
    step: int,
    *,
    weights: Contents,
    tensors: Mapping[str, Mapping[str, Tensor]],
    values: Mapping[str, Any],
    best: bool = False,
    more: tuple[Part, ...] = (),
    others: int = 0,
) -> Snapshot:
    """Return all that a run goes on from. `values` must come back from JSON unchanged.

    `more` are parts that this rank writes with others, which add so many bytes.
    """
    _check_keys(values)
    parts = tuple(
        Part({k: x.detach() for k, x in named.items()}, _writes(f"{name}{TENSORS}"))
        for name, named in tensors.items()
    )
    kept = Contents({"values.json": json.dumps(values).encode()}, parts + more)
    return Snapshot(step, best, weights, kept, others)


def policy_contents(model: Policy, files: Mapping[str, bytes]) -> Contents:
    """Return a policy's folder, or its adapter's; `files` are those that it was loaded with."""
    return (peft_files if adapters(model) else checkpoint).contents(model, files)


def _writes(name: str) -> Callable[[Path, dict[str, Tensor]], None]:
    return lambda folder, tensors: save_file(tensors, folder / name)


def write(parent: Path, made: Snapshot, keep: int) -> Path:
    """Write `parent/step_N`, set the links, delete all but the last `keep` and the best."""
    final, beside = parent / f"step_{made.step}", parent / f".step_{made.step}.{WRITING}"
    try:
        parent.mkdir(exist_ok=True)  # never the run folder itself, which may have been moved away
        tidy(parent)
        _check_room(parent, made.bytes + made.others)
        beside.mkdir()
        made.weights.fill(beside)
        _write_resume(beside, made)
        _swap_in(beside, final)
        set_links(parent, made.step)
        prune(parent, made.step, keep)
    except (OSError, SafetensorError, ModelError) as error:
        vanished = isinstance(error, FileNotFoundError) or not beside.is_dir()
        shutil.rmtree(beside, ignore_errors=True)
        left = newest(parent)
        last = "No other is there" if left is None else f"{left.name} is there, untouched"
        raise (Vanished if vanished else RunError)(
            f"The checkpoint of step {made.step} could not be written to {parent}: {error}. "
            f"{last}. Free some space, or make the folder writable, and run the same command "
            f"again: it {'begins anew' if left is None else 'goes on from there'}."
        ) from error
    return final


def _check_room(parent: Path, needed: int) -> None:
    """Refuse before gigabytes are written in vain."""
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"it takes {size(needed)}, and {size(free)} are free")


def newest(parent: Path) -> Path | None:
    """Return the last checkpoint that a run can go on from, as the folders say."""
    return _last(parent, "resumes")


def best(parent: Path) -> Path | None:
    """Return the best policy so far, as the folders say."""
    return _last(parent, "best")


def _last(parent: Path, kind: str, up_to: float = math.inf) -> Path | None:
    steps = [step for step, state in _states(parent).items() if state[kind] and step <= up_to]
    return _steps(parent)[max(steps)] if steps else None


def _states(parent: Path) -> dict[int, dict[str, bool]]:
    """Read what each checkpoint says of itself; leave out one that can't be read."""
    found = {}
    for step, folder in _steps(parent).items():
        try:
            state = json.loads((folder / "resume" / "state.json").read_bytes())
            # Checkpoints of older versions say neither: all could be gone on from, and the link
            # alone knows the best.
            linked = (parent / "best").resolve() == folder.resolve()
            found[step] = {
                "resumes": bool(state.get("resumes", True)),
                "best": bool(state.get("best", linked)),
            }
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
    return found


def set_links(parent: Path, step: int) -> None:
    """Point `latest` and `best` to what they should be, of the checkpoints up to this step."""
    for link, kind in (("latest", "resumes"), ("best", "best")):
        folder = _last(parent, kind, step)
        there = os.readlink(parent / link) if (parent / link).is_symlink() else None
        if folder is None:
            (parent / link).unlink(missing_ok=True)
        elif folder.name != there:
            _point(parent / link, folder.name)


def load_latest(parent: Path) -> Restored | None:
    """Return the newest checkpoint whose files are all as they were written, None without any.

    The links are set to what holds from there on.
    """
    if not parent.is_dir():
        return None
    tidy(parent)
    damaged: list[str] = []
    for step, folder in sorted(_steps(parent).items(), reverse=True):
        try:
            whole = _verified(folder, step)
            if whole is None:
                continue
            resume = [path for path in whole if path.parent.name == "resume"]
            tensors = {path.stem: load_file(path) for path in resume if path.suffix == TENSORS}
            tensors = _by_role(tensors)
            values = json.loads((folder / "resume" / "values.json").read_bytes())
        except (OSError, SafetensorError, ValueError) as error:
            damaged.append(f"{folder.name} can't be used: {error}")
        else:
            set_links(parent, step)
            return Restored(step, folder, tensors, values, damaged)
    if damaged:
        raise RunError(
            f"No checkpoint in {parent} can be used. {'; '.join(damaged)}. Restore one from a "
            f"backup, or delete the folder to start from the beginning."
        )
    return None


def _by_role(tensors: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Put what checkpoints of older versions hold elsewhere where it belongs now."""
    optimizer = tensors.get("optimizer", {})
    exponent = {k: optimizer.pop(k) for k in list(optimizer) if k.startswith("exponent")}
    return tensors | ({"length_exponent": exponent} if exponent else {})


def last_step(parent: Path) -> int:
    """Return the step of the newest checkpoint, whole or not; 0 if there is none."""
    return max(_steps(parent), default=0)


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


def discard(parent: Path) -> None:
    """Throw away what is being written, by a thread that nobody waits for: it can't appear."""
    for path in parent.glob(f".step_*.{WRITING}"):
        with contextlib.suppress(OSError):  # it has just appeared, or failed by itself
            going = path.rename(path.with_suffix(f".{GOING}"))
            shutil.rmtree(going, ignore_errors=True)


def delete_optimizer_state(run: Path) -> None:
    """Delete the optimizer's state of a run that is finished for good; its weights stay.

    It is three times as large, and comparisons and pipelines have many runs.
    """
    for state in run.glob("checkpoints/step_*/resume"):
        shutil.rmtree(state)


def memory_to_json(memory: Memory) -> dict[str, Any]:
    visits = {
        str(prompt): [[visit.size, visit.mean, visit.var] for visit in seen]
        for prompt, seen in memory.visits.items()
    }
    return {
        "visits": visits,
        "reward_average": memory.reward_average,
        "pair_reward": [memory.pair_reward.mean, memory.pair_reward.steps],
        "role_average": {str(role): mean for role, mean in memory.role_average.items()},
        "prompt_beta": {str(prompt): list(x) for prompt, x in memory.prompt_beta.items()},
        "answers": {
            str(prompt): [list(x.token_ids), [None if math.isnan(p) else p for p in x.logp]]
            for prompt, x in memory.answers.items()
        },
    }


def memory_from_json(values: Mapping[str, Any]) -> Memory:
    visits = {
        int(prompt): tuple(Visit(*visit) for visit in seen)
        for prompt, seen in values["visits"].items()
    }
    # Checkpoints of older versions have no running reward of pairs: no recipe had one.
    pair_reward = Average(*values.get("pair_reward", ()))
    # Nor anything of roles and of what prompts are expected to give.
    roles = {int(role): mean for role, mean in values.get("role_average", {}).items()}
    betas = {int(n): (x[0], x[1]) for n, x in values.get("prompt_beta", {}).items()}
    answers = {
        int(n): StoredAnswer(tuple(ids), tuple(math.nan if p is None else p for p in logp))
        for n, (ids, logp) in values.get("answers", {}).items()
    }
    return Memory(visits, values["reward_average"], pair_reward, roles, betas, answers)


def _steps(parent: Path) -> dict[int, Path]:
    """Return the checkpoints by step, whole or not; also one moved aside and not replaced."""
    found = {}
    for path in [*parent.glob(f".step_*.{ASIDE}"), *parent.glob("step_*")]:
        name = path.name.removeprefix(".").removesuffix(f".{ASIDE}").removeprefix("step_")
        if name.isdecimal() and path.is_dir():
            found[int(name)] = path
    return found


def _write_resume(folder: Path, made: Snapshot) -> None:
    """Add what resume needs and, last of all, the size and SHA-256 of every file."""
    resume = folder / "resume"
    # Hashing beside writing and flushing: processor and disk are busy at the same time.
    with ThreadPoolExecutor() as pool:
        written = sorted(folder.iterdir())
        seals = {path: pool.submit(_seal, path) for path in written}
        flushes = [pool.submit(_flush, path) for path in written]
        resume.mkdir()
        if made.resume is not None:
            made.resume.fill(resume)
        written = sorted(resume.iterdir())
        seals |= {path: pool.submit(_seal, path) for path in written}
        flushes += [pool.submit(_flush, path) for path in written]
        for flush in flushes:
            flush.result()
        found = {path.relative_to(folder).as_posix(): seal.result() for path, seal in seals.items()}
    state = {
        "version": VERSION,
        "step": made.step,
        "resumes": made.resume is not None,
        "best": made.best,
        "files": found,
    }
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


def _verified(folder: Path, step: int) -> list[Path] | None:
    """Return the checkpoint's files, None for weights alone; raise if one is not as it was."""
    try:
        state = json.loads((folder / "resume" / "state.json").read_bytes())
        resumes = state.get("resumes", True)
        sealed = {folder / str(name): seal for name, seal in state["files"].items()}
        kind = (state["version"], state["step"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("its resume/state.json is damaged") from error
    if kind != (VERSION, step):
        raise ValueError(f"it says version {kind[0]}, step {kind[1]}, not {VERSION}, {step}")
    if resumes is False:
        return None
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


def prune(parent: Path, step: int, keep: int, *, up_to: float = math.inf) -> None:
    """Keep the last ones up to this step, the best, and the best as the last of them knows it.

    A run that goes on from the last one has that best again. Later steps are gone too: they were
    damaged, or the run would have gone on from them. Behind `up_to` nothing is touched.
    """
    states = _states(parent)
    whole = sorted(n for n, state in states.items() if state["resumes"] and n <= step)
    kept = {parent / f"step_{number}" for number in whole[-max(keep, 1) :]}
    bests = [_last(parent, "best", up_to) for up_to in (step, max(whole, default=0))]
    for number, folder in _steps(parent).items():
        if number <= up_to and folder not in kept and folder not in bests:
            # A folder that is half deleted must not look like a checkpoint.
            going = folder.rename(parent / f".{folder.name}.{GOING}")
            shutil.rmtree(going, ignore_errors=True)


def _check_keys(values: Any, path: str = "values") -> None:
    """Refuse keys that JSON turns into strings in silence, and tuples, which become lists."""
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
