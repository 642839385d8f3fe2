"""The tasks of the reasoning-gym package by name: `reasoning_gym:chain_sum`.

Each task has a configuration of its own (`data.options`) and a scorer of its own, which is the
grader of its rows. What the scorer reads goes along as columns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

from groupwise.common.extras import install
from groupwise.config.fields import GYM
from groupwise.errors import DataError, nearest
from groupwise.records import Task

COMPOSITE = "composite"
PATIENCE = 20.0  # seconds, before a person is told how long it takes
NONSENSE, TRIED = "]x(", 8  # what no task asks for, and on how many it is tried
# These give no answer, as many are right; some give an example elsewhere.
UNANSWERED = {
    "boxnet": "",
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
    "rush_hour": "",
}


def generate(
    name: str, size: int, seed: int, options: Mapping[str, Any]
) -> tuple[list[Task], list[str]]:
    """Make tasks whose prompts differ, and notes. `options` are the task's configuration, and
    `seed`.
    """
    maker = make_dataset(name, {"seed": seed, **options, "size": size})
    tasks: dict[str, Task] = {}
    began, told = time.monotonic(), False
    for number in range(size):
        passed = time.monotonic() - began
        if number and passed > PATIENCE and not told:
            told = True
            warnings.warn(
                f"{GYM}:{name}: {size:,} tasks take about {passed / number * size / 60:.0f} "
                "minutes to make. Lower data.size for fewer.",
                stacklevel=2,
            )
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # some print as they go
                entry = maker[number]
        except Exception as error:  # the boundary to the package
            raise DataError(
                f"{GYM}:{name} can't make task {number}: {type(error).__name__}: {error}. Change "
                "its options."
            ) from error
        tasks.setdefault(entry["question"], _task(len(tasks), name, entry, options))
    silent = sorted({str(t.columns["task"]) for t in tasks.values() if t.answer is None})
    notes = [
        f"{GYM}:{each} gives no answers: whether its scorer accepts right ones was not tried."
        for each in silent
    ]
    return list(tasks.values()), notes


def without_fooled(tasks: Iterable[Task], notes: list[str]) -> Iterator[Task]:
    """Yield the rows of a file without those whose scorer is easily fooled, which `notes` count."""
    fooled: Counter[str] = Counter()
    for task in tasks:
        name = str(task.columns["task"])
        if _fools(name):
            fooled[name] += 1
        else:
            yield task
    notes += [
        f"{count} rows of {GYM}:{name} are left out: its scorer gives {_fools(name)!r} full marks "
        "where it is wrong."
        for name, count in fooled.items()
    ]


def check_scorers(tasks: Sequence[Task]) -> None:
    """Refuse tasks whose scorer mostly gives a wrong text full marks, before a model finds it."""
    some: dict[str, list[Task]] = {}
    for task in tasks:
        some.setdefault(str(task.columns["task"]), []).append(task)
    for name, own in some.items():
        if text := _fooled_by(name, own):
            raise DataError(
                f"The scorer of {GYM}:{name} gives {text!r} full marks where it is wrong. "
                'Leave the task out, or name another grader for it: data.train = { "'
                f'{GYM}:{name}" = {{ grader = "exact" }} }}.'
            )


@lru_cache
def _fools(name: str) -> str:
    """Return what fools the scorer of a task, tried on rows that are made for it."""
    return _fooled_by(name, generate(name, TRIED, 0, {})[0])


def _fooled_by(name: str, tasks: Sequence[Task]) -> str:
    """Return a text that mostly gets full marks where it is wrong; "" if no text that was tried
    does.
    """
    for text in (NONSENSE, "0"):
        wrong = [task for task in tasks[:TRIED] if not _is_zero(task.answer)]
        if 2 * sum(_full_marks(name, task, text) for task in wrong) > len(wrong):
            return text
    return ""


def _is_zero(answer: Any) -> bool:
    try:
        return float(answer) == 0
    except (TypeError, ValueError):
        return False


def _full_marks(name: str, task: Task, text: str) -> bool:
    entry = {"question": task.prompt, "answer": task.answer, **task.columns}
    try:
        return score(name, task.columns["task_options"], text, entry) >= 0.99
    except Exception:  # the boundary to the package: it can't read that
        return False


def score(name: str, options: Mapping[str, Any], answer: str, entry: Mapping[str, Any]) -> float:
    """Return the score by the task's own scorer, from 0 to 1."""
    if name in ("arc_agi", "rearc"):  # it compares with tuples, and files have none
        entry = {**entry, "metadata": _tuples(entry["metadata"])}
    return float(_scorer(name, json.dumps(options, sort_keys=True)).score_answer(answer, entry))


def names() -> list[str]:
    """List all tasks, and `composite`."""
    return sorted(_library("factory").DATASETS)


def make_dataset(name: str, options: Mapping[str, Any]) -> Any:
    """Make the package's data set of that name with these options, known and checked."""
    factory = _library("factory")
    if name not in factory.DATASETS:
        raise DataError(f"reasoning-gym has no task {name!r}. {nearest(name, names())}")
    known = {x.name: x for x in dataclasses.fields(factory.DATASETS[name][1])}
    for key in options:
        if key not in known:
            own = [each for each in known if each != "size"]
            raise DataError(f"{GYM}:{name} has no option {key!r}. {nearest(key, own)}")
    given = {key: _like(known[key].default, value) for key, value in options.items()}
    if name == COMPOSITE:
        given["datasets"] = _specifications(options.get("datasets"))
    try:
        return factory.create_dataset(name, **given)
    except Exception as error:  # the boundary to the package, which asserts
        said = str(error) or "it refuses them"
        raise DataError(f"{GYM}:{name} with the options {dict(options)}: {said}.") from error


def _task(number: int, name: str, entry: Mapping[str, Any], options: Mapping[str, Any]) -> Task:
    metadata = entry["metadata"]
    task = str(metadata["source_dataset"])
    if name == COMPOSITE:
        options = next(x.get("config", {}) for x in options["datasets"] if x["name"] == task)
    answer = entry["answer"]
    if answer is None and (example := metadata.get(UNANSWERED.get(task, ""))) is not None:
        answer = example if isinstance(example, str) else json.dumps(example)
    columns = {"task": task, "task_options": dict(options), "metadata": metadata}
    if answer is not None:
        columns["solution"] = answer
    return Task(number, entry["question"], answer, columns, grader=GYM)


def _specifications(given: Any) -> list[Any]:
    form = f'{GYM}:{COMPOSITE} needs datasets = [{{ name = "chain_sum", weight = 1.0 }}, ...].'
    if not isinstance(given, list) or not given or not all(isinstance(x, Mapping) for x in given):
        raise DataError(f"{form} Got {given!r}.")
    specification = _library("composite").DatasetSpec
    found = []
    for each in given:
        unknown = set(each) - {"name", "weight", "config"}
        if unknown or "name" not in each:
            raise DataError(f"{form} Got {dict(each)!r}.")
        make_dataset(each["name"], each.get("config", {}))  # its options, checked one by one
        found.append(
            specification(
                each["name"], float(each.get("weight", 1.0)), dict(each.get("config", {}))
            )
        )
    return found


@lru_cache(maxsize=256)
def _scorer(name: str, options: str) -> Any:
    """Return a task's scorer; some read the options that their tasks were made with."""
    return make_dataset(name, {"size": 1, "seed": 0, **json.loads(options)})


@lru_cache
def _library(module: str) -> ModuleType:
    try:
        return importlib.import_module(f"reasoning_gym.{module}")
    except ImportError as error:
        raise DataError(
            f"{GYM}:TASK needs the package reasoning-gym ({error}). Install it: "
            f"`{install('tasks')}`"
        ) from error


def _like(default: Any, value: Any) -> Any:
    """Turn a list into a tuple where the package wants one."""
    return tuple(value) if isinstance(default, tuple) and isinstance(value, list) else value


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _tuples(each) for key, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
