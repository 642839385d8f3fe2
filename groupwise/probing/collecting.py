"""Answers of any model to every prompt of the data, graded, as a folder like a run's.

A step of the folder is a few prompts. It counts when its metrics line is there, as in a run; so a
collection that was killed goes on behind the last one, and the files are the same to the bit.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise import config as configuration
from groupwise.common.progress import phase
from groupwise.config import Config
from groupwise.data.cursor import fingerprint as data_fingerprint
from groupwise.engine.native.engine import SLOTS
from groupwise.engine.protocol import Engine
from groupwise.errors import ConfigError, RunError
from groupwise.evaluate.examine import GPU_SLOTS, load_candidate
from groupwise.evaluate.request import Candidate
from groupwise.model.fingerprint import fingerprint
from groupwise.model.formats.checkpoint import Loaded
from groupwise.prepare import pins
from groupwise.prepare.engines import MakeEngine, judge_of
from groupwise.prepare.rollouts import failed, grade, sample_groups
from groupwise.prepare.setup import Setup, on_gpu, sampling_of, set_up
from groupwise.records import Rollout, Task
from groupwise.runfiles.files import to_line, write_atomic
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.rollouts import read, write
from groupwise.stages.rows import rows_of

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json",
             "special_tokens_map.json", "chat_template.jinja", "config.json")  # fmt: skip


@dataclass(frozen=True)
class Collection:
    """How much there is."""

    prompts: int
    answers: int
    correct: int
    failed: int
    tokens: int


def check_request(config: Config, out: Path) -> None:
    """Refuse what could not be learned from, before a model is loaded."""
    if config.group_size > 1 and config.engine.temperature == 0:
        raise ConfigError(
            f"At temperature 0 all {config.group_size} answers to a prompt are the same. Set "
            "engine.temperature above 0, or --samples 1."
        )
    if config.engine.weights != "shared":
        raise ConfigError(
            f"engine.weights={config.engine.weights} samples from a copy, to study training. "
            "Collect with engine.weights=shared."
        )
    if config.data.runs:
        raise ConfigError("data.runs has answers already. Name prompts with --data, and no runs.")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file. Name a folder.")
    folder = RunFolder(out)
    if out.is_dir() and any(out.iterdir()) and not folder.config.is_file():
        raise ConfigError(f"--out {out} exists and is no collection: nothing is overwritten.")
    if folder.checkpoints.is_dir():
        raise ConfigError(f"--out {out} is the folder of a run. Choose another.")


def collect(
    config: Config,
    candidate: Candidate,
    out: Path,
    say: Callable[[str], None],
    engine: MakeEngine | None = None,
) -> Collection:
    """Sample and grade what is not there yet; return what there is in the end."""
    check_request(config, out)

    def model_for(tasks: Sequence[Task], held_out: Sequence[Task]) -> Loaded:
        return load_candidate(candidate, config)

    setup = set_up(config, model_for, learns=False)
    for note in setup.notes:
        say(note)
    folder = RunFolder(out)
    with folder.locked():
        begun = _begin(config, setup, folder)
        if begun:
            say(f"{out} has {begun} steps already; going on behind them.")
        maker = judge_of(config, setup.loaded, engine)
        _sample_rest(config, setup, maker, folder, begun)
        folder.write_cost(**_cost(folder))
    return counts(folder)


def _at_once(config: Config) -> int:
    """Return how many prompts go into one call of the engine: enough to fill its slots."""
    slots = config.engine.slots or (GPU_SLOTS if on_gpu(config) else SLOTS)
    return max(1, slots // config.group_size)


def _begin(config: Config, setup: Setup, folder: RunFolder) -> int:
    """Write what is collected from what; return the steps of an earlier start of the same."""
    origin = {
        "weights": fingerprint(setup.loaded.model.named_parameters()),
        "data": data_fingerprint(setup.tasks),
        "prompts": _digest(setup.tasks),
        "reward": setup.grader.code(),
        "prompts_at_once": str(_at_once(config)),
    }
    before = folder.read_config()
    if before is not None:
        changed = [str(change) for change in configuration.difference(before, config)]
        known = folder.read_manifest().get("origin", {})
        changed += [f"other {name}" for name, x in origin.items() if known.get(name, x) != x]
        if changed:
            raise RunError(
                f"{folder.path} was collected otherwise: {'; '.join(changed)}. Set these back, or "
                "choose another --out."
            )
    folder.tidy()
    folder.rollouts.mkdir(parents=True, exist_ok=True)
    files = setup.loaded.files
    for name in TOKENIZER:
        if name in files and not (folder.path / name).is_file():
            with folder.writing(name):
                write_atomic(folder.path / name, files[name])
    done = folder.durable_step()
    for step in range(1, done + 1):
        read(folder.rollout(step), ("group",))  # refuses a file that was damaged since
    folder.rewind(done)
    fetched = pins.commits(config, folder.read_manifest())
    folder.write_manifest(origin, fetched, setup.dropped, **_cost(folder))
    folder.write_config(configuration.text(config))
    return done


def _cost(folder: RunFolder) -> dict[str, Any]:
    """Add up what the steps of a folder took."""
    lines = folder.read_metrics()
    return {
        "seconds": sum(float(line["time/step"]) for line in lines),
        "tokens": sum(int(line["collected/tokens"]) for line in lines),
    }


def _sample_rest(
    config: Config, setup: Setup, engine: Engine, folder: RunFolder, done: int
) -> None:
    sampling, size, tasks = sampling_of(config), _at_once(config), setup.tasks
    tokenizer = setup.loaded.tokenizer
    with phase("collecting", len(tasks), "prompts") as told:
        told(min(done * size, len(tasks)))
        for step, first in enumerate(range(done * size, len(tasks), size), done + 1):
            begun = time.monotonic()
            named = [(task, 0) for task in tasks[first : first + size]]
            written = sample_groups(
                engine, named, config.group_size, sampling, "probe", turns=setup.turns
            )
            groups = grade(setup.grader, tokenizer, written)
            with folder.writing("rollouts"):
                write(folder.rollout(step), rows_of([], groups, {}, tokenizer), step)
            folder.add_metrics(to_line(_measures(step, groups, time.monotonic() - begun)))
            told(first + len(named))


def _measures(step: int, groups: Sequence[Sequence[Rollout]], seconds: float) -> dict[str, Any]:
    rows = [rollout for group in groups for rollout in group]
    return {
        "step": step,
        "collected/prompts": len(groups),
        "collected/answers": len(rows),
        "collected/correct": sum(bool(r.grade.correct) for r in rows),
        "collected/failed": sum(failed(r.grade) for r in rows),
        "collected/tokens": sum(r.completion.own_length for r in rows),
        "time/step": seconds,
    }


def counts(folder: RunFolder) -> Collection:
    """Add up the steps of a folder."""
    lines = folder.read_metrics()
    names = ("prompts", "answers", "correct", "failed", "tokens")
    return Collection(*(sum(int(x[f"collected/{name}"]) for x in lines) for name in names))


def _digest(tasks: Sequence[Task]) -> str:
    """Hash the prompts as the model reads them."""
    found = hashlib.sha256()
    for task in tasks:
        found.update(f"{list(task.token_ids)}".encode())
    return found.hexdigest()[:16]


def config_for(config: Config, candidate: Candidate, data: str, samples: int) -> Config:
    """Return the settings with the model and the prompts that are asked for."""
    model = replace(config.model, path=str(candidate.source))
    named = replace(config.data, train=data, runs=(), mix={}) if data else config.data
    # What a run of the model learned from is no matter here.
    recipe = configuration.load().recipe
    return replace(config, recipe=recipe, model=model, data=named, group_size=samples)
