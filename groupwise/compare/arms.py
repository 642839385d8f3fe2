"""The arms of a comparison: configurations that differ in what they are named for, and no more."""

from __future__ import annotations

import hashlib
import math
import re
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise import config as configuration
from groupwise.compare.equal_arms import find_equal_arms
from groupwise.config import Config
from groupwise.config.values import flat
from groupwise.errors import ConfigError, GroupwiseError, RecipeWarning
from groupwise.methods.method import Method
from groupwise.prepare.placing import placed
from groupwise.recipes import RECIPES
from groupwise.stages.checks import check_config

# The embedded task: a small transformer adds three digits, as `make demo` does. Four updates a
# batch, so that gates have something to do; the rate goes down to 0 with the budget: at a constant
# one, where a run ends is mostly chance.
EMBEDDED: Mapping[str, Any] = {
    "recipe": "grpo",
    "recipe.schedule.updates": 4,
    "prompts_per_step": 64,
    "group_size": 8,
    "model.threads": 1,  # for so small a model a second one costs more than it brings
    "tiny.layers": 2,
    "data.options": {"digits": 1, "terms": 3},
    "engine.max_tokens": 4,
    "engine.slots": 512,
    "optim.learning_rate": 5e-4,
    "optim.schedule": "linear",
    "optim.warmup_steps": 10,
    "optim.beta2": 0.95,
    "eval.tasks": 256,
    "eval.samples": 4,
    "eval.temperature": 1.0,
    "eval.points": 12,
    "checkpoint.every_seconds": 30,
    "checkpoint.keep": 1,
}
POINTS = 12  # evaluations on the way, where the configuration does not say
UNITS = ("tokens", "seconds", "steps")
LONGEST = 80  # characters of a folder's name
FOREVER = 10**9  # steps of a run that its seconds end
# What an accuracy is measured with: the same for all, or they can't be compared.
MEASURE = ("eval.", "data.eval", "data.holdout_share")
HELD_OUT_OF = ("data.train", "data.size", "data.options", "data.duplicates")
# What may differ because somebody asked for it, and should be said.
ALIKE = ("model.", "adapter.", "tiny.", "data.", "reward.", "engine.weights")
# What held-out answers are sampled with, too.
ASKED = tuple(
    f"engine.{name}" for name in ("backend", "max_tokens", "min_tokens", "top_p", "top_k", "stop")
)
# What an arm is there for, or what follows from the budget, or what changes no result.
OWN = ("recipe", "steps", "budget.", "checkpoint.", "watch.")


@dataclass(frozen=True)
class ArmBudget:
    """The most that each run may spend."""

    unit: str  # tokens, seconds or steps
    amount: int

    @classmethod
    def parse(cls, text: str) -> ArmBudget:
        unit, _, number = (part.strip() for part in text.partition("="))
        try:
            amount = float(number)
        except ValueError:
            amount = math.nan
        if unit not in UNITS or not 1 <= amount <= 1e15 or amount != int(amount):
            raise ConfigError(
                f"--budget {text!r} is no budget. Write tokens=3e5, seconds=60 or steps=200: a "
                "whole number of 1 or more."
            )
        return cls(unit, int(amount))

    def __str__(self) -> str:
        return f"{self.amount:,} {self.unit}"

    def given_to(self, config: Config) -> Config:
        """Return the configuration of a run that ends with this budget."""
        if self.unit == "steps":
            return replace(config, steps=self.amount, budget=configuration.Budget())
        if self.unit == "seconds":
            ends = configuration.Budget(seconds=float(self.amount))
            return replace(config, steps=FOREVER, budget=ends)
        # An answer has a token or more: with so many steps the budget is always spent.
        steps = math.ceil(self.amount / (config.prompts_per_step * config.group_size))
        return replace(config, steps=steps, budget=configuration.Budget(tokens=self.amount))


@dataclass(frozen=True)
class Arm:
    """One side of the comparison."""

    name: str
    config: Config

    @property
    def folder(self) -> str:
        """Return its name as that of a folder."""
        plain = re.sub(r"[^\w.=+-]+", "_", self.name).strip("._") or "arm"
        if len(plain) <= LONGEST:
            return plain
        return f"{plain[:LONGEST]}_{hashlib.sha256(plain.encode()).hexdigest()[:8]}"


def arms_of(
    texts: Sequence[str],
    budget: ArmBudget,
    *,
    source: Path | None = None,
    settings: Sequence[str] = (),
    sweep: str = "",
) -> list[Arm]:
    """Return the arms that the texts name, each under the same configuration and budget.

    A text is a recipe, a file of settings, or either with settings behind it: `grpo`,
    `"grpo recipe.gate.high=0.3 group_size=16"`, `mine.toml`, `mine.py:method`.
    """
    for setting in settings:
        if setting.partition("=")[0].strip() in ("recipe", "recipe.name"):
            raise ConfigError(f"--set {setting}: which recipes are compared is said by the arms.")
    for setting in (*settings, *(word for text in texts for word in _words(text)[1:]), sweep):
        if re.match(r"(steps|budget\.\w+)\s*=", setting):
            raise ConfigError(
                f"{setting}: how long runs are is said by --budget, the same for all: steps=200, "
                "tokens=3e5 or seconds=60."
            )
    base = _load(source, settings, "the configuration")
    as_it_is = bool(sweep) and not texts
    texts = list(texts) or ([shlex.quote(_name(base.recipe))] if sweep else [])
    if sweep:
        texts = [f"{text} {knob}" for text in texts for knob in sweep_values(sweep)]
    if len(texts) < 2:
        raise ConfigError(
            "A comparison has two arms or more: `groupwise compare grpo dapo`, or one knob: "
            "`groupwise compare grpo --sweep recipe.gate.high=0.2,0.28`."
        )
    if as_it_is:  # the configuration's recipe with all that is set in it
        configs = [_load(source, [*settings, *_words(text)[1:]], text) for text in texts]
    else:
        configs = [_arm_config(text, base, source, settings) for text in texts]
        _warn_of_own_slots(base, settings, texts)
    named = zip(_named(texts), configs, strict=True)
    arms = [Arm(name, prepared(config, budget)) for name, config in named]
    folders = [arm.folder.lower() for arm in arms]
    for arm, folder in zip(arms, folders, strict=True):
        if folders.count(folder) > 1:
            raise ConfigError(f"The folder of {arm.name!r} would be that of another arm.")
    return arms


def _arm_config(text: str, base: Config, source: Path | None, settings: Sequence[str]) -> Config:
    first, *own = _words(text)
    if _is_file(first):
        return _load(Path(first), [*settings, *own], text)
    if "=" in first:
        raise ConfigError(
            f"{first} is a setting and no arm. Write --set {first} for all arms, or "
            f'"grpo {first}" for one of its own.'
        )
    made = _load(source, [f"recipe={first}", *settings, *own], text)
    asked = [key.partition("=")[0].strip() for key in (*settings, *own)]
    return replace(made, recipe=without_paper_sizes(made, base.recipe, asked))


def _warn_of_own_slots(base: Config, settings: Sequence[str], texts: Sequence[str]) -> None:
    """Warn that slots set in the configuration's recipe do not hold for arms of other recipes."""
    known = RECIPES.get(_name(base.recipe))
    named = [words for words in map(_words, texts) if not _is_file(words[0])]
    if known is None or not named:
        return
    plain, own = (
        without_paper_sizes(replace(base, recipe=recipe), base.recipe, ()).text()
        for recipe in (known, base.recipe)
    )
    said = [set(map(_kind, [*settings, *words[1:]])) for words in named]
    left = [
        kind
        for kind in own
        if own[kind] != plain.get(kind) and not all(kind in each for each in said)
    ]
    if left:
        listed = ", ".join(f"recipe.{kind} = {own[kind]!r}" for kind in left)
        warnings.warn(
            f"what the configuration sets in its recipe ({listed}) holds for no arm that names a "
            "recipe. Set it for all with --set, or behind an arm.",
            RecipeWarning,
            stacklevel=3,
        )


def _kind(setting: str) -> str:
    """Return the slot that it sets, if any."""
    return re.split(r"[.=]", setting.removeprefix("recipe."))[0].strip()


def _words(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"The arm {text!r} can't be read: {error}.") from None
    if not words:
        raise ConfigError("An arm is empty. Name a recipe, a configuration or a setting.")
    return words


def _is_file(word: str) -> bool:
    return word.endswith(".toml") or (word not in RECIPES and Path(word).is_file())


def _load(source: Path | None, settings: Sequence[str], where: str) -> Config:
    with warnings.catch_warnings():  # an arm's recipe takes the place of the configuration's
        warnings.simplefilter("ignore", RecipeWarning)
        try:
            return configuration.load(source if source else EMBEDDED, settings)
        except GroupwiseError as error:
            raise ConfigError(f"{where}: {error}") from None


def _name(recipe: Method) -> str:
    return recipe.name.removesuffix("*")


def _named(texts: Sequence[str]) -> list[str]:
    """Name the arms as they were written, without the prefix of every recipe's setting.

    A method may be compared with itself: the second is told apart by a number.
    """
    names: list[str] = []
    for text in texts:
        first, *own = _words(text)
        short = Path(first).stem if _is_file(first) else first.rpartition(".py:")[2]
        name = " ".join([short, *own]).replace("recipe.", "")
        times = sum(known == name or known.startswith(f"{name} (") for known in names)
        names.append(f"{name} ({times + 1})" if times else name)
    return names


def sweep_values(text: str) -> list[str]:
    """Split `key=a,b,c` into a setting for each value; not at commas in brackets or quotes."""
    key, equals, listed = text.partition("=")
    values, depth, quote = [""], 0, ""
    for letter in listed:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += (letter in "([{") - (letter in ")]}") if not quote else 0
        if letter == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += letter
    values = [value.strip() for value in values]
    if not equals or not key.strip() or len(values) < 2 or not all(values):
        raise ConfigError(
            f"--sweep {text!r} has nothing to sweep. Write a setting and two values or more: "
            "recipe.gate.high=0.2,0.24,0.28."
        )
    if len(set(values)) < len(values):
        raise ConfigError(f"--sweep {text!r} names a value twice.")
    return [shlex.quote(f"{key.strip()}={value}") for value in values]


# --- equal conditions -------------------------------------------------------------------------


def without_paper_sizes(config: Config, base: Method, asked: Sequence[str]) -> Method:
    """Return a recipe without the run sizes of its paper, except those that were asked for.

    Updates a batch are the configuration's, one where the recipe has no ratio to correct for more.
    Lengths that stand for the longest answer are this run's.
    """
    recipe = config.recipe
    changes = recipe.sized(config.engine.max_tokens, base.updates)
    changes = {key: x for key, x in changes.items() if not any(_sets(one, key) for one in asked)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecipeWarning)
        made = recipe.configure(changes)
    known = RECIPES.get(_name(made))
    return known if known is not None and known.acts_like(made) else made


def _sets(asked: str, key: str) -> bool:
    """Return whether the settings name this, as a whole slot or by the name of the number."""
    kind, *rest = asked.removeprefix("recipe.").split(".")
    own_kind, *own = key.split(".")
    return asked.startswith("recipe.") and kind == own_kind and (not rest or rest[-1] == own[-1])


def prepared(config: Config, budget: ArmBudget) -> Config:
    """Return the configuration with its budget, evaluations and places, the same for every run."""
    config = placed(config)
    points = config.eval.points or POINTS
    every = configuration.Eval().every  # evaluations go by the budget
    return budget.given_to(replace(config, eval=replace(config.eval, points=points, every=every)))


def check(arms: Sequence[Arm]) -> list[str]:
    """Refuse what can't be run or compared, before anything expensive; return what is doubtful."""
    doubts: dict[str, list[str]] = {}
    for arm in arms:
        try:
            for text in check_config(arm.config):
                doubts.setdefault(text, []).append(arm.name)
        except GroupwiseError as error:
            raise ConfigError(f"{arm.name}: {error}") from None
        if not arm.config.data.evaluates or not arm.config.eval.tasks:
            raise ConfigError(
                f"{arm.name} has no held-out tasks, and accuracy on them is what is compared. Set "
                "data.eval to a file that is not in data.train, or data.holdout_share=0.1, and "
                "eval.tasks to how many."
            )
    found = [_said_of(text, names, len(arms)) for text, names in doubts.items()]
    return (
        found
        + _unequal(arms)
        + [each.text for each in find_equal_arms({arm.name: arm.config for arm in arms})]
    )


def _said_of(text: str, names: Sequence[str], all_of_them: int) -> str:
    return text if len(names) == all_of_them else f"{', '.join(names)}: {text}"


def _unequal(arms: Sequence[Arm]) -> list[str]:
    """Refuse arms that are measured differently; return what else differs and may be the cause."""
    first, notes = arms[0], list[str]()
    measure = MEASURE + (HELD_OUT_OF if not first.config.data.eval_sources else ())
    one = flat(first.config)
    for arm in arms[1:]:
        other = flat(arm.config)
        differing = [name for name in one if one[name] != other[name]]
        refused = [name for name in differing if name.startswith(measure)]
        if refused or first.config.seed != arm.config.seed:
            name = refused[0] if refused else "seed"
            raise ConfigError(
                f"{first.name} and {arm.name} differ in {name} ({one[name]!r} and "
                f"{other[name]!r}): they would not be measured on the same tasks in the same way. "
                "Set it alike in both, or with --set."
            )
        asked = [name for name in differing if name in ASKED]
        if asked:
            notes.append(
                f"{arm.name} differs from {first.name} in {', '.join(asked)}, and held-out answers "
                "are sampled with it, too: what is found may be due to how they are measured."
            )
        named = f"{first.name} {arm.name}"  # an arm's own settings are part of its name
        alike = [
            name
            for name in differing
            if name.startswith(ALIKE)
            or not (name.startswith(OWN) or name in named or name in asked)
        ]
        if alike:
            notes.append(
                f"{arm.name} differs from {first.name} also in {', '.join(alike)}: what is found "
                "may be due to that."
            )
    return notes
