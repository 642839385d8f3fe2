"""A request for an evaluation, checked before the first model is loaded.

Tasks of a suite that is too large are chosen by their text, so that a smaller choice is always part
of a larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from groupwise.config import Config
from groupwise.errors import ConfigError, DataError, ModelError, nearest
from groupwise.evaluate.results import key_of
from groupwise.evaluate.suites import Suite, check_names, config_of, find
from groupwise.hub import local_model, names_model
from groupwise.model.adapters.peft_files import is_adapter
from groupwise.model.policy import base_of
from groupwise.prepare.setup import CheckedData, check_data
from groupwise.records import Task
from groupwise.runfiles.naming import distinct_names
from groupwise.sync.export import checkpoint_in

FORCE_TOKENS = 32
# What a suite says itself where no configuration is given.
OWN = {"max_tokens": "engine.max_tokens", "template": "data.template", "text": "data.instruction"}


@dataclass(frozen=True)
class EvalRequest:
    """The measurements that are asked for."""

    tasks: int = 0  # of each suite; 0: all, or 100 of a generator
    samples: int = 1
    temperature: float = 0.0
    at: tuple[int, ...] = ()  # k of pass@k and maj@k; (): powers of two, and the samples
    by: tuple[str, ...] = ()  # columns; (): level, subject and their like
    budgets: tuple[int, ...] = ()  # tokens
    force: str | None = None  # the text that asks for an answer; None: the suite's
    force_tokens: int = FORCE_TOKENS

    @property
    def sizes(self) -> tuple[int, ...]:
        if self.at:
            return tuple(sorted(self.at))
        powers = [2**i for i in range(1, self.samples.bit_length()) if 2**i < self.samples]
        return (*powers, self.samples) if self.samples > 1 else ()


@dataclass(frozen=True)
class Basis:
    """The configuration that holds for all, and the settings in it that somebody has set."""

    config: Config
    written: bool = False  # in a file or by a run: all of it holds
    given: tuple[str, ...] = ()  # names on the command line

    def set_by_user(self, name: str) -> bool:
        return self.written or any(name == x or name.startswith(f"{x}.") for x in self.given)


@dataclass(frozen=True)
class Entry:
    """A suite whose tasks are read and chosen."""

    suite: Suite
    config: Config
    found: CheckedData
    keys: dict[int, str]  # by the tasks' ids

    @property
    def tasks(self) -> Sequence[Task]:
        return self.found.train


@dataclass(frozen=True)
class Candidate:
    """A model to evaluate."""

    name: str
    path: str  # as it was given
    source: str | Path  # a folder, a file or an id


def check(asked: EvalRequest, config: Config) -> None:
    """Refuse what would tell nothing."""
    for name, value, least in (
        ("tasks", asked.tasks, 0),
        ("samples", asked.samples, 1),
        ("force-tokens", asked.force_tokens, 1),
    ):
        if value < least:
            raise ConfigError(f"--{name} {value} is too few. Take {least or 1} or more.")
    if not 0 <= asked.temperature < float("inf"):
        raise ConfigError(f"--temperature {asked.temperature:g}: take 0 (greedy) or more.")
    if asked.temperature == 0 and (asked.samples > 1 or max(asked.at, default=1) > 1):
        most = max(asked.samples, *asked.at, 1)
        raise ConfigError(
            f"At temperature 0 all {most} samples of a task are the same, so pass@k and maj@k "
            "would say no more than accuracy. Set --temperature above 0, or take --samples 1."
        )
    for k in asked.at:
        if not 1 <= k <= asked.samples:
            raise ConfigError(
                f"--at {k}: pass@{k} and maj@{k} need {k} samples of each task, and there are "
                f"{asked.samples}. Set --samples {max(k, 1)} or more, or a k from 1 to "
                f"{asked.samples}."
            )
    if any(size < 1 for size in asked.budgets):
        raise ConfigError(f"--budgets {min(asked.budgets)}: a budget is 1 token or more.")
    if config.engine.weights != "shared":
        raise ConfigError(
            f"engine.weights={config.engine.weights} samples from a copy, to study training. "
            "Evaluate with engine.weights=shared."
        )


def candidates(paths: Sequence[str]) -> list[Candidate]:
    """Find what each path is: a model, a run (its best checkpoint, else its latest), a checkpoint.

    An adapter needs its base: that it is there is seen now, and not behind the first model.
    """
    sources = []
    for path in paths:
        source = checkpoint_in(path)
        if not names_model(str(source)):
            folder = local_model(source)
            if not folder.exists():
                raise ModelError(f"There is no model, run or checkpoint {path!r}.")
            if is_adapter(folder):
                base_of(folder)
            elif folder.is_dir() and not (folder / "config.json").is_file():
                raise ModelError(
                    f"{path} is neither a model (it has no config.json) nor a run with checkpoints."
                )
        sources.append(source)
    return [Candidate(*each) for each in zip(_names(paths, sources), paths, sources, strict=True)]


def _names(paths: Sequence[str], sources: Sequence[str | Path]) -> list[str]:
    """Return short names, no two alike: `mine/step_40` of a run's checkpoint, else the last part.

    Folders of the same name have what they lie in before it: `grpo/seed_0`, `rloo/seed_0`.
    """
    wholes, ends = [], []
    for path, source in zip(paths, sources, strict=True):
        parts = Path(source).parts
        kept = "checkpoints" in parts[-2:-1]
        wholes.append(parts[:-2] if kept else Path(path).parts or (path,))
        ends.append(parts[-1:] if kept else ())
    found: list[str] = []
    for short, end in zip(distinct_names(wholes), ends, strict=True):
        name = "/".join((short, *end))
        count = sum(each == name or each.startswith(f"{name}#") for each in found)
        found.append(f"{name}#{count + 1}" if count else name)
    return found


def entries(
    names: Sequence[str], folder: Path | None, basis: Basis, asked: EvalRequest
) -> list[Entry]:
    """Return all suites, read and checked, their tasks chosen."""
    check_names(names)
    found = []
    for name in names:
        suite = find(name, folder)
        config = config_of(suite, basis.config, asked.tasks, own_options=basis.written)
        said = basis.set_by_user(OWN["max_tokens"]) or not suite.source
        check_budgets(asked, config.engine.max_tokens if said else suite.max_tokens)
        found.append(_entry(suite, config, asked))
    labels = [entry.suite.name for entry in found]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"Two suites are called {label!r}. Rename a file, or drop one.")
    return found


def check_budgets(asked: EvalRequest, most: int) -> None:
    if asked.budgets and max(asked.budgets) > most:
        raise ConfigError(
            f"--budgets {max(asked.budgets)} is more than engine.max_tokens={most}: no answer is "
            "longer than that. Raise it, or lower the budget."
        )


def _entry(suite: Suite, config: Config, asked: EvalRequest) -> Entry:
    gathered = check_data(config, learns=False)
    every = gathered.train if suite.source else gathered.held_out
    tasks = [task for task in every if suite.keep(task)]
    if not config.recipe.samples:  # such data has answers for some of the rows, or for none
        tasks = [task for task in tasks if task.answer is not None]
    if not tasks:
        raise DataError(f"{suite.name}: {suite.source or 'data.eval'} has no tasks of this suite.")
    keys = {task.id: key_of(task) for task in tasks}
    if asked.tasks and asked.tasks < len(tasks):
        chosen = sorted(keys, key=lambda number: keys[number])[: asked.tasks]
        keys = {number: keys[number] for number in sorted(chosen)}
        tasks = [task for task in tasks if task.id in keys]
    names = {name for task in tasks for name in task.columns}
    for column in asked.by:
        if column not in names:
            raise ConfigError(
                f"--by {column}: no task of {suite.name} has such a column. "
                f"{nearest(column, names)}"
            )
    return Entry(suite, config, replace(gathered, train=tasks, held_out=[]), keys)
