"""A configuration read from a file, keywords and overrides; each overrides the one before."""

from __future__ import annotations

import glob
import os
import tomllib
import typing
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise import recipes as _recipes  # noqa: F401 - fills RECIPES
from groupwise.common.globs import matching_files
from groupwise.config.fields import GENERATORS, Config, SourceSettings, is_generator
from groupwise.config.names import unknown_setting
from groupwise.config.values import FIELDS, OPEN, TABLES, Raw, checked, flat
from groupwise.errors import ConfigError, RecipeWarning
from groupwise.groups.filters import overlong
from groupwise.groups.shaping import soft_overlong
from groupwise.methods.composition import Recipe
from groupwise.methods.method import Method
from groupwise.recipes import RECIPES, load_plugin
from groupwise.recipes import recipe as recipe_by_name

# The method everybody knows and compares with. No method is best for all: `groupwise recipes
# --choose` asks what yours depends on.
DEFAULT_RECIPE = "grpo"
# An adapter wants about ten times the rate of all weights, whatever its rank (Schulman et al., LoRA
# Without Regret, 2025).
ADAPTER_RATE = 1e-5
# A recipe that is not known by name must spell these out.
REQUIRED = {"advantage", "ratio", "gate", "aggregation", "schedule"}
MOST_BYTES = 2**24  # of a configuration: more would be read for minutes
TOO_DEEP = (
    "nests tables or lists too deep to be read. No setting needs more than four levels: write them "
    "flat."
)
# Not files, whatever lies beside the configuration.
BUILT_IN = ("", "tiny", "auto", "chat", "plain", "r1_zero", "qwen_math", *GENERATORS)


@dataclass(frozen=True)
class Setting:
    """One value for a field; for one entry of it where its entries have names of the user's."""

    field: str
    entry: str | None
    value: Any


def load(
    source: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    **keywords: Any,
) -> Config:
    """Read the configuration of a run.

    `source` is a TOML file or a mapping, keywords go over it (`group_size=8`,
    `engine={"max_tokens": 8}`, `**{"optim.learning_rate": 1e-5}`), and overrides in the form of the
    command line (`"engine.max_tokens=8"`) over both. What is not set has its default.

    Recipe: a name, `file.py:name`, a `Recipe`, or a table of a name and slots. A later name starts
    anew: the settings of the earlier recipe are dropped, with a warning.
    """
    if isinstance(source, str | Path):
        first = _from_file(Path(source))
    else:
        first = _layer((source or {}).items())
    return _resolved([first, _layer(keywords.items()), _layer(map(_override, overrides))])


def load_layers(
    tables: Sequence[Mapping[str, Any]], overrides: Sequence[str], beside: Path
) -> Config:
    """Read the configuration of several tables of one file, each over the one before it.

    `beside` is the file's folder: paths are looked for there first.
    """
    layers = [[_beside(beside, each) for each in _layer(table.items())] for table in tables]
    return _resolved([*layers, _layer(map(_override, overrides))])


def set_in(table: Mapping[str, Any]) -> set[str]:
    """Return the fields that a table of settings sets, by their dotted names."""
    return {setting.field for setting in _layer(table.items())}


def _resolved(layers: Sequence[Sequence[Setting]]) -> Config:
    values: dict[str, Any] = {"recipe": _recipe(layers)}
    for setting in (each for layer in layers for each in layer if each.field != "recipe"):
        if setting.entry is None:
            values[setting.field] = setting.value
        else:
            now = values.get(setting.field, DEFAULTS[setting.field])
            values[setting.field] = {**now, setting.entry: setting.value}
    adapted = values.get("adapter.rank") or values.get("adapter.path")
    usual = ADAPTER_RATE if adapted else DEFAULTS["optim.learning_rate"]
    values.setdefault("optim.learning_rate", usual * values["recipe"].rate_factor)
    if values.get("turns.environment"):
        values.setdefault("reward.parts", {ENVIRONMENT: 1.0})
    return _with_overlong(_assemble(Config, "", values))


def _assemble(kind: type, prefix: str, values: Mapping[str, Any]) -> Any:
    given: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        if name in TABLES and not prefix:
            given[name] = _assemble(hint, f"{name}.", values)
        elif prefix + name in values:
            given[name] = values[prefix + name]
    return kind(**given)


ENVIRONMENT = "environment"  # the reward of an episode, unless another is asked for
DEFAULTS = flat(_assemble(Config, "", {"recipe": RECIPES[DEFAULT_RECIPE]}))


# --- sources ----------------------------------------------------------------------------------


def _from_file(path: Path) -> list[Setting]:
    data = read_toml(path)
    if "stage" in data:
        raise ConfigError(
            f"{path} is a pipeline: it has [[stage]] tables, which `groupwise train`, `plan` and "
            "`train --dry-run` take. Give the config.toml of one stage's run."
        )
    try:
        return [_beside(path.parent, setting) for setting in _layer(data.items())]
    except RecursionError:
        raise ConfigError(f"{path} {TOO_DEEP}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file of settings as a table; nothing in it is checked yet."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(
                f"{path} has more than {MOST_BYTES // 2**20} MiB: it is no configuration. Name a "
                "TOML file."
            )
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"There is no configuration {str(path)!r}. `groupwise init {path}` writes one."
        ) from None
    except IsADirectoryError:
        raise ConfigError(
            f"{str(path)!r} is a folder, and neither a run's nor a configuration. Of a model: "
            f"model.path={path}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Can't read the configuration {str(path)!r}: {error}.") from None
    except RecursionError:
        raise ConfigError(f"{path} {TOO_DEEP}") from None
    except ValueError as error:  # no TOML, or a number of thousands of digits
        if isinstance(error, ConfigError):
            raise
        twice = "overwrite" in str(error) or "namespace" in str(error)
        hint = ' With settings inside it, write recipe.name = "..." for recipe = "...".'
        raise ConfigError(f"{path} is no valid TOML: {error}.{hint if twice else ''}") from None


def _override(text: str) -> tuple[str, Raw]:
    """Split `key=value`. A key may hold quotes and brackets:
    `reward.parts.format(pattern='a=b')=1`.
    """
    quote, depth = "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "=" and depth == 0:
            return text[:place].strip(), Raw(text[place + 1 :].strip())
    raise ConfigError(f"{text!r} sets nothing. Write key=value, for example group_size=8.")


def _layer(pairs: Iterable[tuple[str, Any]]) -> list[Setting]:
    """Return all settings of one source, their values checked."""
    found = [setting for key, value in pairs for setting in _located(str(key), value)]
    return [_checked(setting) for setting in found]


def _located(key: str, value: Any) -> Iterator[Setting]:
    """Yield the fields that a key and its value set: a table sets several."""
    head, _, rest = key.partition(".")
    if head == "recipe":
        yield from _recipe_settings(rest, value)
    elif key in FIELDS:
        yield Setting(key, None, value)
    elif key in TABLES:
        if isinstance(value, Raw):
            value = value.read()
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key} is a table of settings, got {value!r}. Set one of them.")
        for name, each in value.items():
            yield from _located(f"{key}.{name}", each)
    else:
        for field in OPEN:
            if key.startswith(f"{field}."):
                yield Setting(field, _unquoted(key.removeprefix(f"{field}.")), value)
                return
        raise unknown_setting(key)


def _unquoted(name: str) -> str:
    quoted = len(name) > 1 and name[0] == name[-1] and name[0] in "\"'"
    return name[1:-1] if quoted else name


def _recipe_settings(path: str, value: Any) -> Iterator[Setting]:
    """Yield a recipe's name (no entry), or settings of its slots (`gate`, `gate.high`)."""
    if isinstance(value, Raw):
        value = value.read()
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _recipe_settings(f"{path}.{key}" if path else str(key), each)
    elif path in ("", "name"):
        if not isinstance(value, str | Method):
            raise ConfigError(f'recipe must be a name such as "dapo", got {value!r}.')
        yield Setting("recipe", None, value)
    else:
        yield Setting("recipe", path, value)


def _checked(setting: Setting) -> Setting:
    if setting.field == "recipe":
        return setting
    where, hint = setting.field, FIELDS[setting.field]
    if setting.entry is not None:
        where, hint = f"{where}.{setting.entry}", typing.get_args(hint)[1]
    return replace(setting, value=checked(where, hint, setting.value))


def _beside(folder: Path, setting: Setting) -> Setting:
    """Resolve paths beside the configuration, before those in the working folder."""

    def file(name: str) -> str:
        if name in BUILT_IN:
            return name
        if os.path.exists(folder / name):  # False, too, for what can be no name at all
            return os.path.normpath(folder / name)
        pattern = os.path.normpath(os.path.join(glob.escape(str(folder)), name))
        fits = glob.has_magic(name) and matching_files(pattern)
        return pattern if fits else name

    def source(name: str) -> str:  # a generator, a file, a pattern, or set:file
        if is_generator(name):
            return name
        word, colon, path = name.partition(":")
        return f"{word}:{file(path)}" if colon and path and file(name) == name else file(name)

    def member(name: str) -> str:  # file.py:function
        path, colon, word = name.rpartition(":")
        return f"{file(path)}:{word}" if colon and path.endswith(".py") else name

    def details(given: Any) -> Any:
        return (
            replace(given, grader=member(given.grader))
            if isinstance(given, SourceSettings)
            else given
        )

    field, entry, value = setting.field, setting.entry, setting.value
    if field in ("model.path", "adapter.path", "data.template"):
        return replace(setting, value=file(value))
    if field == "model.adapters":
        return replace(setting, value=tuple(map(file, value)))
    if field in ("data.train", "data.eval"):
        if isinstance(value, Mapping):
            return replace(setting, value={source(key): details(x) for key, x in value.items()})
        several = isinstance(value, tuple)
        return replace(setting, value=tuple(map(source, value)) if several else source(value))
    if field == "turns.tools":
        return replace(setting, value=tuple(map(member, value)))
    if field in ("engine.backend", "turns.environment"):
        return replace(setting, value=member(value))
    if field == "recipe" and entry is None and isinstance(value, str):
        return replace(setting, value=member(value))
    if field == "reward.parts":
        if entry is not None:
            return replace(setting, entry=member(entry))
        return replace(setting, value={member(name): weight for name, weight in value.items()})
    return setting


# --- the recipe -------------------------------------------------------------------------------


def _recipe(layers: Sequence[Sequence[Setting]]) -> Method:
    chosen: Any = DEFAULT_RECIPE
    changes: dict[str, Any] = {}
    for layer in layers:
        mine = [setting for setting in layer if setting.field == "recipe"]
        for setting in mine:
            if setting.entry is None:
                if changes:
                    _warn_of_dropped(chosen, setting.value, changes)
                chosen, changes = setting.value, {}
        inner = [(s.entry, s.value) for s in mine if s.entry is not None]
        for path, value in sorted(inner, key=lambda pair: pair[0].count(".")):
            # A slot as a whole comes before what is set inside it, and drops what was.
            changes = {
                key: old for key, old in changes.items() if not f"{key}.".startswith(f"{path}.")
            }
            changes[path] = value
    with warnings.catch_warnings():  # `check` tells what is doubtful about the result
        warnings.simplefilter("ignore", RecipeWarning)
        return _composed(chosen, changes)


def _warn_of_dropped(before: Any, after: Any, changes: Mapping[str, Any]) -> None:
    names = [getattr(each, "name", each) for each in (before, after)]
    warnings.warn(
        f"recipe={names[1]} takes the place of {names[0]} with all that was set in it "
        f"({', '.join(changes)}). Set it again beside the new name if you want it there.",
        RecipeWarning,
        stacklevel=4,
    )


def _composed(chosen: Any, changes: Mapping[str, Any]) -> Method:
    made = _made(chosen, changes)
    known = RECIPES.get(made.name.removesuffix("*"))
    if known is None:
        return made
    if known.acts_like(made):  # nothing was changed after all
        return known
    return made if made.name.endswith("*") else made.replace()  # not the method of that name


def _made(chosen: Any, changes: Mapping[str, Any]) -> Method:
    if isinstance(chosen, Method):
        return chosen.configure(changes)
    file, colon, name = chosen.rpartition(":")
    if colon:
        load_plugin(file)
    known = RECIPES.get(name.removesuffix("*"))
    if known is not None:
        return known.configure(changes)
    whole = {key: value for key, value in changes.items() if "." not in key}
    if not whole.keys() >= REQUIRED:
        return recipe_by_name(chosen)  # which says what is near
    inner = {key: value for key, value in changes.items() if key not in whole}
    return Recipe.from_text(name, whole).configure(inner)


def _with_overlong(config: Config) -> Config:
    """Add the slots that `overlong` asks for to the recipe ("drop" is done by the loop)."""
    recipe, limit = config.recipe, config.engine.max_tokens
    kind, slot = {
        "mask": ("filter", overlong()),
        "penalise": ("shaping", soft_overlong(limit, max(1, limit // 4))),
    }.get(config.overlong, ("", None))
    if (
        slot is None
        or kind not in recipe.KINDS
        or any(each.name == slot.name for each in recipe.of(kind))
    ):
        return config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecipeWarning)
        return replace(config, recipe=recipe.configure({kind: (*recipe.of(kind), slot)}))
