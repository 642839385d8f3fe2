"""The stages of a pipeline as configurations: every name of a stage is the folder that it means."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from groupwise.config import Config, load_layers
from groupwise.config.reading import set_in
from groupwise.errors import ConfigError, GroupwiseError
from groupwise.pipeline.reading import (
    BASE,
    REFERENCE,
    TEXTS,
    Pipeline,
    StageName,
    StageTable,
    last_round,
    reference_of,
)
from groupwise.stages.checks import refusals
from groupwise.stages.ignored import Ignored

TINY = "tiny"
UNSEEN = "length(target=1)"  # a part of a reward that weighs something and asks nothing of a row
Place = Callable[[StageName, str], str | None]  # a reference and its setting -> text; None: not yet


@dataclass(frozen=True)
class Chain:
    """A pipeline in its folder."""

    pipeline: Pipeline
    path: Path  # absolute
    asked: Config  # what stands above the stages, alone

    @property
    def names(self) -> list[str]:
        return [stage.name for stage in self.pipeline.stages]

    @property
    def embedded(self) -> bool:
        """Tell whether it starts from the embedded model, made once for all stages."""
        return self.asked.model.path == TINY

    @property
    def base(self) -> str:
        return str(self.path / BASE) if self.embedded else self.asked.model.path

    def folder(self, stage: StageTable) -> Path:
        return self.path / stage.folder

    def named(self, reference: StageName) -> StageTable:
        return self.pipeline.stage(last_round(reference.stage, self.names))

    def start_of(self, stage: StageTable) -> StageName | None:
        """Return the stage that a stage's model comes from; None where it is no stage's."""
        match = REFERENCE.fullmatch(stage.start)
        return None if match is None else reference_of(match)


def chain_of(pipeline: Pipeline, run: Path) -> Chain:
    with _reading(pipeline, "above the stages"):
        beside = pipeline.source.parent
        asked = load_layers([pipeline.defaults], pipeline.overrides, beside)
    if "tiny" in pipeline.defaults:
        course = [x for x in pipeline.defaults["tiny"] if x.startswith("cold_start")]
        if course:
            raise ConfigError(
                f"{pipeline.source}: tiny.{course[0]} has no effect: in a pipeline the embedded "
                "model has learned nothing before the first stage. Make its cold start a stage: "
                'recipe = "sft".'
            )
    return Chain(pipeline, run.absolute(), asked)


@dataclass(frozen=True)
class Resolved:
    """A stage as it is run."""

    config: Config
    left_out: list[str] = field(default_factory=list)  # defaults that its recipe has no use for


def real(chain: Chain, stage: StageTable, base: str = "") -> Resolved:
    """Return the stage as it runs in its folder; `base` lies elsewhere until it is made there."""

    def place(reference: StageName, setting: str) -> str:
        folder = chain.folder(chain.named(reference))
        if reference.rest or setting.startswith("data."):
            return f"{folder}{reference.rest}"
        return str(folder / "checkpoints" / reference.which)

    tried = trial(chain, stage, base or chain.base)
    config = _config(chain, stage, place, chain.base, tried.left_out)
    parent = chain.start_of(stage)
    if parent is not None:
        before = real(chain, chain.named(parent), base).config
        if before.adapter.used:  # its checkpoint is an adapter beside that model
            folded = (*before.model.adapters, config.model.path, *config.model.adapters)
            model = replace(config.model, path=before.model.path, adapters=folded)
            config = replace(config, model=model)
    return Resolved(config, tried.left_out)


def trial(chain: Chain, stage: StageTable, base: str) -> Resolved:
    """Return the stage as it can be checked before any has run.

    The model of an earlier stage is represented by the one that it starts from, which has its
    shape and tokenizer. Its data are named, and for others to read when they are there. A part of
    the reward that asks it is represented by one that asks for nothing; a grader of a source is
    left out until there is a model for it.
    """
    unseen: dict[str, float] = {}

    def place(reference: StageName, setting: str) -> str | None:
        named = chain.named(reference)
        folder = chain.folder(named)
        if setting.startswith("reward."):
            unseen[UNSEEN] = 1.0
            return None
        if setting.endswith(".grader"):
            return str(folder) if (folder / "checkpoints" / reference.which).exists() else None
        return (
            f"{folder}{reference.rest}" if setting.startswith("data.") else root(chain, named, base)
        )

    left_out: list[str] = []
    while True:  # one refusal may hide another
        config = _config(chain, stage, place, root(chain, stage, base), left_out)
        if unseen:
            parts = {**config.reward.parts, **unseen}
            config = replace(config, reward=replace(config.reward, parts=parts))
        with _reading(chain.pipeline, f"stage {stage.name!r}"):
            asked = (
                _not_made_yet(config, base)
                if config.model.path == base and chain.embedded
                else config
            )
            found = {each.setting for each in refusals(asked) if isinstance(each, Ignored)}
            own = set_in(_substituted(stage.settings, lambda *_: ""))
        more = (found & _given(chain.pipeline)) - own - set(left_out)
        if not more:
            return Resolved(config, left_out)
        left_out = sorted({*left_out, *more})


def _not_made_yet(config: Config, base: str) -> Config:
    """Return a stage's settings with the embedded model by its name: no file of it is read."""

    def named(path: str) -> str:
        return TINY if path == base else path

    asked = config.teacher
    paths = {name: named(path) for name, path in asked.paths.items()}
    return replace(
        config,
        model=replace(config.model, path=TINY),
        critic=replace(config.critic, start=named(config.critic.start)),
        teacher=replace(asked, path=named(asked.path), paths=paths),
    )


def root(chain: Chain, stage: StageTable, base: str) -> str:
    """Return the model, no stage's, that a stage goes back to."""
    parent = chain.start_of(stage)
    if parent is not None:
        return root(chain, chain.named(parent), base)
    return base if stage.start == BASE else stage.start


def reads_stages(stage: StageTable) -> bool:
    """Tell whether its data come from other stages."""
    return any(setting.startswith("data.") for setting in _naming_stages(stage))


def asks_stages(stage: StageTable) -> bool:
    """Tell whether its reward asks models of other stages."""
    return any(setting.startswith("reward.") for setting in _naming_stages(stage))


def _naming_stages(stage: StageTable) -> list[str]:
    """Return the settings of its table that name stages."""
    missing: list[str] = []

    def place(reference: StageName, setting: str) -> str:
        missing.append(setting)
        return ""

    _substituted(stage.settings, place)
    return missing


def _given(pipeline: Pipeline) -> set[str]:
    return set_in(pipeline.defaults) | {x.partition("=")[0].strip() for x in pipeline.overrides}


def _config(
    chain: Chain, stage: StageTable, place: Place, base: str, left_out: list[str]
) -> Config:
    pipeline = chain.pipeline
    defaults = _without(pipeline.defaults, [*left_out, "model.path", "tiny"])
    overrides = [
        text
        for text in pipeline.overrides
        if text.partition("=")[0].strip() not in (*left_out, "model.path")
        and not text.startswith("tiny.")
    ]
    if "tiny" in stage.settings or any(x.startswith("tiny.") for x in stage.overrides):
        raise ConfigError(
            f"{pipeline.source}: stage {stage.name!r} sets the table tiny: the embedded model is "
            "made once, for the whole pipeline. Set it above the stages."
        )
    parent = chain.start_of(stage)
    path = base if stage.start == BASE else stage.start
    if parent is not None:
        path = place(parent, "model.path") or base
    settings = _substituted(stage.settings, place)
    settings["model"] = {**settings.get("model", {}), "path": path}
    own = [_in_text(text, text.partition("=")[0], place) or "" for text in stage.overrides]
    with _reading(pipeline, f"stage {stage.name!r}"):
        config = load_layers([defaults, settings], [*overrides, *filter(None, own)],
                             pipeline.source.parent)  # fmt: skip
    config = replace(config, seed=config.seed + stage.round - 1)  # rounds draw other prompts
    if chain.embedded and config.model.device == "auto":
        config = replace(config, model=replace(config.model, device="cpu"))  # where it repeats
    return config


@contextmanager
def _reading(pipeline: Pipeline, where: str) -> Iterator[None]:
    """Name the stage in whatever is wrong with its settings; doubts are told when it is checked."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except GroupwiseError as error:
        raise type(error)(f"{pipeline.source}, {where}: {error}") from None


def _without(table: Mapping[str, Any], keys: list[str]) -> dict[str, Any]:
    """Return a table of settings without some, given by their dotted names."""
    kept: dict[str, Any] = {}
    for name, each in table.items():
        if name in keys:
            continue
        inner = [key.removeprefix(f"{name}.") for key in keys if key.startswith(f"{name}.")]
        kept[name] = _without(each, inner) if inner and isinstance(each, Mapping) else each
    return kept


def _substituted(value: Any, place: Place, key: str = "") -> Any:
    """Put folders in the place of names of stages; entries that name one not there yet go."""
    if isinstance(value, str):
        return _in_text(value, key, place)
    if isinstance(value, Mapping):
        pairs = [
            (
                _in_text(str(name), key, place),
                _substituted(each, place, f"{key}.{name}".lstrip(".")),
            )
            for name, each in value.items()
        ]
        return {name: each for name, each in pairs if name is not None and each is not None}
    if isinstance(value, list | tuple):
        entries = [_substituted(each, place, key) for each in value]
        return [each for each in entries if each is not None] or None if value else value
    return value


def _in_text(text: str, key: str, place: Place) -> str | None:
    if key in TEXTS:
        return text
    missing = False

    def put(match: re.Match[str]) -> str:
        nonlocal missing
        found = place(reference_of(match), key)
        missing = missing or found is None
        before = text[match.start() - 1 : match.start()]
        alone = match[0] == text or before in ("'", '"') or not before
        return str(found) if alone or "(" not in text else repr(str(found))

    done = REFERENCE.sub(put, text)
    return None if missing else done
