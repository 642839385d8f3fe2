"""A file with `[[stage]]` tables read: names, rounds, and what each stage starts from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from groupwise.config.reading import read_toml
from groupwise.config.values import FIELDS, TABLES
from groupwise.errors import ConfigError, nearest

BASE = "base"  # the model that the pipeline as a whole starts from
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
# `stage:NAME`, `stage:NAME@best`, `stage:NAME/FILE`, alone or within a part of a reward.
REFERENCE = re.compile(
    r"(?<![\w/.-])stage:(?P<name>[A-Za-z0-9][A-Za-z0-9_-]*)(?:@(?P<which>\w+))?(?P<rest>/[\w./*-]+)?"
)
WHICH = ("latest", "best")
# For models to read: no names in them.
TEXTS = ("data.system", "data.instruction", "data.completion", "engine.stop")
# Words of a stage's table that are short for settings.
SHORT = {"source": "recipe.source", "from": "data.runs", "mix": "data.mix"}
TAKEN = {*TABLES, *FIELDS, *SHORT, "recipe", "stage", "name", "repeat", "keep", "teacher", BASE}


@dataclass(frozen=True)
class StageName:
    """Another stage, named in a setting."""

    stage: str
    which: str = "latest"
    rest: str = ""  # a file in its folder


@dataclass(frozen=True)
class StageTable:
    """One stage to be: a table of the file, or one of its rounds."""

    name: str  # with the round's number behind it
    folder: str
    settings: dict[str, Any]  # ordinary ones
    start: str  # what it starts from, as it was written or by default
    overrides: tuple[str, ...] = ()
    round: int = 1

    @property
    def references(self) -> dict[str, StageName]:
        """Return the stages that its settings name, by the text that names them."""
        texts = [text for key, text in texts_in(self.settings) if key not in TEXTS]
        texts += self.overrides
        found = [match for text in [self.start, *texts] for match in REFERENCE.finditer(text)]
        return {match[0]: reference_of(match) for match in found}


@dataclass(frozen=True)
class Pipeline:
    """All that the file says."""

    source: Path
    name: str
    defaults: dict[str, Any]  # settings above the stages
    stages: list[StageTable]
    overrides: list[str] = field(default_factory=list)  # of the command line, for all stages

    def stage(self, name: str) -> StageTable:
        return next(stage for stage in self.stages if stage.name == name)


def read(path: Path, overrides: Sequence[str] = ()) -> Pipeline:
    """Read the file; whatever names a stage must name an earlier one."""
    data = read_toml(path)
    tables = data.pop("stage")
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise ConfigError(f"{path}: stages are a list of tables. Write [[stage]] before each.")
    if not tables:
        raise ConfigError(f"{path}: `stage` is an empty list. Add a [[stage]], or remove it.")
    name = data.pop("name", path.stem)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(f"{path}: name={name!r} is no name: letters, digits, _ and - make one.")
    names = [_name_of(path, number, table) for number, table in enumerate(tables, start=1)]
    for_all, for_one = _split(overrides, names)
    stages = [
        stage
        for number, (word, table) in enumerate(zip(names, tables, strict=True), start=1)
        for stage in _rounds(path, number, word, dict(table), for_one.get(word, ()))
    ]
    stages = _with_starts(stages)
    made = Pipeline(path, name, data, stages, for_all)
    _check_names(path, stages, names)
    return made


def _name_of(path: Path, number: int, table: Mapping[str, Any]) -> str:
    name = table.get("name")
    where = f"{path}: [[stage]] {number}"
    if name is None:
        raise ConfigError(f'{where} has no name. Write for example name = "reason".')
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: name={name!r} is no name of a folder. Letters, digits, _ and - make one."
        )
    if name in TAKEN:
        raise ConfigError(
            f"{where}: a stage can't be called {name!r}, as a setting is: {name}.KEY=VALUE could "
            "mean either. Choose another name."
        )
    return name


def _rounds(
    path: Path, number: int, name: str, table: dict[str, Any], overrides: Sequence[str]
) -> Iterator[StageTable]:
    """Yield the stage, or its rounds, each to start from the one before it."""
    repeat = table.pop("repeat", None)
    if repeat is not None and (type(repeat) is not int or not 1 <= repeat <= 1000):
        raise ConfigError(
            f"{path}: stage {name!r}: repeat={repeat!r} is no number of rounds. Give 1 or more."
        )
    table.pop("name")
    if table.get("from") == [] or table.get("from") == "":
        raise ConfigError(
            f"{path}: stage {name!r}: `from` is empty, so there is nothing to learn from. Name a "
            'stage, as in from = ["stage:reason"], or leave it out.'
        )
    settings, start = _ordinary(path, name, table)
    paths = [each for each in overrides if each.startswith("model.path=")]
    start = paths[-1].removeprefix("model.path=").strip("\"' ") if paths else start
    overrides = [each for each in overrides if each not in paths]
    for turn in range(1, (repeat or 1) + 1):
        called = f"{name}_{turn}" if repeat else name
        first = start if turn == 1 else f"stage:{name}_{turn - 1}"
        yield StageTable(called, f"{number}_{called}", settings, first, tuple(overrides), turn)


def _ordinary(path: Path, name: str, table: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Write out what is short for settings; return what the stage starts from, "" by default."""
    settings = dict(table)
    model = settings.pop("model", {})
    if not isinstance(model, str | dict):
        raise ConfigError(
            f'{path}: stage {name!r}: model={model!r}. Write "base", "stage:NAME", a path, or '
            "settings of the table model."
        )
    model = {"path": model} if isinstance(model, str) else dict(model)
    start = str(model.pop("path", ""))
    if model:
        settings["model"] = model
    for word, key in SHORT.items():
        if word in settings:
            head, _, leaf = key.partition(".")
            value, inside = settings.pop(word), settings.get(head, {})
            inside = {"name": inside} if isinstance(inside, str) else dict(inside)
            if leaf in inside:
                raise ConfigError(f"{path}: stage {name!r} sets {word} and {key}. Write one.")
            settings[head] = {**inside, leaf: value}
    return settings, start


def _with_starts(stages: list[StageTable]) -> list[StageTable]:
    """Say where each starts: the first from the file's model, later ones from the one before.

    A name of rounds means the last of them.
    """
    done: list[StageTable] = []
    for stage in stages:
        start = stage.start or (f"stage:{done[-1].name}" if done else BASE)
        done.append(replace(stage, start=start))
    return done


def _check_names(path: Path, stages: Sequence[StageTable], tables: Sequence[str]) -> None:
    """Refuse names twice, and stages that name themselves, a later one, or none at all."""
    names = [stage.name for stage in stages]
    for each in [*tables, *names]:
        if tables.count(each) > 1 or names.count(each) > 1:
            raise ConfigError(
                f"{path}: two stages are called {each!r}. A name says which one is meant: rename "
                "one of them."
            )
    every = {*names, *tables}
    for at, stage in enumerate(stages):
        earlier = {*names[:at], *(t for t in tables if last_round(t, names) in names[:at])}
        for text, found in stage.references.items():
            where = f"{path}: stage {stage.name!r} names {text!r}"
            if found.which not in WHICH:
                raise ConfigError(f"{where}: of a stage there is {' and '.join(WHICH)}.")
            if found.stage not in every:
                raise ConfigError(f"{where}: there is no such stage. {nearest(found.stage, every)}")
            if last_round(found.stage, names) == stage.name or found.stage == stage.name:
                raise ConfigError(f"{where}, which is itself. Name an earlier stage, or base.")
            if found.stage not in earlier:
                raise ConfigError(
                    f"{where}, which comes later: stages run in the order of the file. Move it "
                    "up, or name an earlier one."
                )


def last_round(name: str, names: Sequence[str]) -> str:
    """Return the stage that a name means: itself, or the last round of that name."""
    if name in names:
        return name
    rounds = [each for each in names if re.fullmatch(rf"{re.escape(name)}_\d+", each)]
    return rounds[-1] if rounds else name


def _split(overrides: Sequence[str], names: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split settings of the command line: for all stages, or `NAME.KEY=VALUE` for one."""
    for_all: list[str] = []
    for_one: dict[str, list[str]] = {}
    for text in overrides:
        head, dot, rest = text.partition(".")
        if dot and head in names:
            if rest.partition("=")[0].strip() in ("name", "repeat", *SHORT):
                word = rest.partition("=")[0].strip()
                raise ConfigError(f"{text}: {word} of a stage stands in the file alone.")
            rest = f"model.path{rest[5:]}" if rest.startswith("model=") else rest
            for_one.setdefault(head, []).append(rest)
        elif dot and "=" not in head and head not in TAKEN:
            raise ConfigError(
                f"{text}: {head!r} is neither a stage nor a table of settings. "
                f"{nearest(head, [*names, *TABLES])}"
            )
        else:
            for_all.append(text)
    return for_all, for_one


def texts_in(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text of a table with the setting that it belongs to, names of entries too."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield key, str(name)
            yield from texts_in(each, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_in(each, key)


def reference_of(match: re.Match[str]) -> StageName:
    return StageName(match["name"], match["which"] or "latest", match["rest"] or "")
