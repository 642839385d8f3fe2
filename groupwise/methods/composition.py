"""A recipe is a record of slots. Composition: from data, from scratch, or from text."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from traceback import walk_tb
from typing import Any, ClassVar, Self

from groupwise.common.globs import digest
from groupwise.common.user_files import code_files, make_importable
from groupwise.errors import GroupwiseError, RecipeError, RecipeWarning, nearest
from groupwise.methods.dotted import adjusted, slots_of
from groupwise.methods.slots import REGISTRY, Slot
from groupwise.streams import ROLE_FACTS

# Slots that hold several functions (chains, sums, products); the others hold exactly one.
MANY = ("filter", "shaping", "advantage", "correction", "penalty", "auxiliary")
RECIPE_SLOTS = (
    "filter", "shaping", "advantage", "aggregation", "ratio", "gate", "correction", "penalty",
    "auxiliary", "schedule",
)  # fmt: skip
PAIR_SLOTS = ("pairing", "preference")
# Of the data, by what a pairing reads.
PAIR_COLUMNS = {"labels": ("chosen", "rejected"), "answers": ("answer",), "grades": ()}
OUTPUT_STREAMS = (
    "entropy_NT", "value_NT", "topk_logp_NTK", "topk_id_NTK", "logp_at_sampler_topk_NTK",
    "router_NTLK",
)  # fmt: skip


@dataclass(frozen=True)
class About:
    """Where a recipe comes from and what it is for."""

    title: str
    paper: str = ""  # arXiv id, or a name where there is none
    year: int = 0
    # method | variant | correction | dialect | ablation | preference | your own
    family: str = "method"
    fixes: str = ""
    breaks: str = ""
    reach_for: str = ""
    setting: Mapping[str, Any] = field(default_factory=dict)  # the paper's, outside the slots
    note: str = ""  # how sure the reading is, what is a house choice
    departs: tuple[str, ...] = ()  # what this trainer does otherwise than the source
    base: Method | None = field(default=None, repr=False)  # what it was changed from


class Method:
    """A recipe of any kind: it holds slots, can be changed, and says what it asks of a run.

    What is said here holds for a method without groups; a kind of recipe overrides what differs.
    """

    KINDS: ClassVar[tuple[str, ...]]
    WORD: ClassVar[str]
    PLAIN: ClassVar[tuple[str, ...]] = ()  # fields beside the slots that settings may change
    STAGE: ClassVar[str]  # what a run of it is: a key of stages.STAGES
    name: str
    about: About
    source: Any  # where its answers come from: a key of stages.SOURCES

    @property
    def roles(self) -> tuple[str, ...]:
        """Return what takes part beside the policy: keys of optim.roles.ROLES."""
        return ()

    @property
    def streams(self) -> tuple[str, ...]:
        """Return what a batch must bring, beyond mask, groups and rewards."""
        return ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return what the learner's forward pass must give."""
        return ()

    @property
    def level(self) -> str:
        """Return over what its ratio is one number; "" where it has none."""
        return ""

    @property
    def updates(self) -> int:
        """Return how many optimizer steps one pass over a batch makes."""
        return 1

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns of the data with answers that it learns from."""
        return ()

    @property
    def reads_rewards(self) -> bool:
        """Tell whether an update reads what the run's reward says."""
        return True

    @property
    def weighs_tokens(self) -> bool:
        """Tell whether each sampled token gets an advantage and a weight of its own."""
        return False

    @property
    def samples(self) -> bool:
        """Tell whether answers are sampled from the policy and graded while it learns."""
        return bool(self.source == "policy")

    @property
    def models(self) -> tuple[str, ...]:
        """Return the names of the models held in memory."""
        held = [ROLE_FACTS[name] for name in self.roles]
        return ("policy", *(facts.title for facts in held if facts.model))

    @property
    def ends_answers(self) -> bool:
        """Tell whether it learns answers of the data, which take an end token to be whole."""
        return bool(self.columns)

    @property
    def fixed(self) -> dict[str, str]:
        """Return what of its equation no slot says, by name."""
        return {}

    @property
    def loss(self) -> str:
        """Return the loss with the terms that this recipe has."""
        raise NotImplementedError

    def rows(self, group_size: int) -> int:
        """Return how many answers of one prompt an update reads."""
        return group_size

    def doubts(self) -> list[str]:
        """Return what is doubtful about the slots together."""
        return []

    def anchored(self, weights: str, *, close: bool = True) -> Self:
        """Return the recipe as it runs with a sampler of these weights."""
        return self

    def sized(self, limit: int, updates: int) -> dict[str, Any]:
        """Return settings that give it the sizes of a run: longest answer, updates a batch."""
        return {}

    def _settle(self) -> None:
        """Text and single slots become what the fields hold."""
        for kind in self.KINDS:
            slots = slots_of(kind, getattr(self, kind))
            if kind not in MANY and len(slots) != 1:
                raise RecipeError(f"{self.WORD} has exactly one {kind}, got {len(slots)}.")
            object.__setattr__(self, kind, slots if kind in MANY else slots[0])

    def slots(self) -> tuple[Slot, ...]:
        """Return all slots in the order of the axes."""
        return tuple(slot for kind in self.KINDS for slot in self.of(kind))

    def of(self, kind: str) -> tuple[Slot, ...]:
        """Return the slots of a kind; none of a kind that this sort of recipe does not have."""
        value = getattr(self, kind) if kind in self.KINDS else ()
        return value if isinstance(value, tuple) else (value,)

    @property
    def refilling(self) -> tuple[str, ...]:
        """Return the filters after which more prompts are drawn."""
        return tuple(s.name for s in self.slots() if s.definition.traits.action == "refill")

    @property
    def departs(self) -> tuple[str, ...]:
        """Say what this trainer does otherwise than the source or a changed recipe's base."""
        base = self.about.base
        return self.about.departs + (base.departs if base is not None else ())

    def code(self) -> str:
        """Hash the files that slots of the user's come from; nothing without such slots."""
        files = {file for slot in self.slots() for file in slot.files}
        return digest(code for file in files for code in code_files(file))

    def text(self) -> dict[str, str]:
        """Return the text form of every slot; `Recipe.from_text` reads it back."""
        slots = {kind: ", ".join(map(str, self.of(kind))) for kind in self.KINDS}
        usual = {each.name: each.default for each in fields(self)}  # type: ignore[arg-type]
        plain = {name: getattr(self, name) for name in self.PLAIN}
        return slots | {name: x for name, x in plain.items() if x != usual[name]}

    def replace(self, **changes: Any) -> Self:
        """Return the recipe with other slots: `replace(gate=clip(0.2, 0.3))` or their text.

        Without a new `about` it no longer claims to be the published method.
        """
        known = {item.name for item in fields(self)}  # type: ignore[arg-type]
        for key in changes:
            if key not in known:
                raise RecipeError(f"{self.WORD} has no slot {key!r}. {nearest(key, self.KINDS)}")
        changes.setdefault("name", self.name if self.name.endswith("*") else f"{self.name}*")
        if changes != {"name": self.name}:
            changes.setdefault("about", self._derived())
        return replace(self, **changes)  # type: ignore[type-var]

    def acts_like(self, other: Method) -> bool:
        """Tell whether two recipes are the same but for their names."""
        return self.text() == other.text() and self.slots() == other.slots()

    def _derived(self) -> About:
        unnamed = self.name.endswith("*") and self.about.base  # `dapo*` is a step on the way
        base: Any = self.about.base if unnamed else self
        return About(
            title=f"derived from {base.name}",
            family="your own",
            setting=self.about.setting,  # the source's, as a place to start from
            base=base,
        )

    def set(self, path: str, value: Any) -> Self:
        """Change one setting by its path: `gate`, `gate.high`, `advantage.group_zscore.eps`."""
        return self.configure({path: value})

    def configure(self, settings: Mapping[str, Any]) -> Self:
        """Change several settings at once; only the result must make sense, not the way there."""
        if not isinstance(settings, Mapping):
            raise RecipeError(
                f"Settings must be a mapping such as {{'gate.high': 0.3}}, got {settings!r}."
            )
        changed: dict[str, Any] = {}
        for path, value in settings.items():
            kind, *rest = str(path).removeprefix("recipe.").split(".")
            if kind in self.PLAIN and not rest:
                changed[kind] = value
                continue
            if kind not in self.KINDS:
                raise RecipeError(f"{self.WORD} has no slot {kind!r}. {nearest(kind, self.KINDS)}")
            slots = changed.get(kind, self.of(kind))
            changed[kind] = (
                adjusted(self.name, kind, slots, rest, value) if rest else slots_of(kind, value)
            )
        return self.replace(**changed) if changed else self


@dataclass(frozen=True)
class Recipe(Method):
    """A policy-optimisation method: one value for every axis."""

    KINDS: ClassVar[tuple[str, ...]] = RECIPE_SLOTS
    WORD: ClassVar[str] = "A recipe"
    STAGE: ClassVar[str] = "groups"
    PLAIN: ClassVar[tuple[str, ...]] = ("source",)

    name: str
    advantage: tuple[Slot, ...]
    ratio: Slot
    gate: Slot
    aggregation: Slot
    schedule: Slot
    filter: tuple[Slot, ...] = ()
    shaping: tuple[Slot, ...] = ()
    correction: tuple[Slot, ...] = ()
    penalty: tuple[Slot, ...] = ()
    auxiliary: tuple[Slot, ...] = ()
    source: str = "policy"
    about: About = field(default_factory=lambda: About("your own"), compare=False, repr=False)

    def __post_init__(self) -> None:
        self._settle()
        from groupwise.methods.soundness import complaints

        refused, doubtful = complaints(self)
        if refused:
            raise RecipeError(f"Recipe {self.name!r} makes no sense: {refused[0]}")
        for text in doubtful:
            warnings.warn(f"Recipe {self.name!r}: {text}", RecipeWarning, stacklevel=4)

    @classmethod
    def from_text(cls, name: str, text: Mapping[str, str]) -> Recipe:
        """Make a recipe from scratch; slots left out take the defaults of `defaults()`."""
        for key in text:
            if key not in (*RECIPE_SLOTS, *cls.PLAIN):
                raise RecipeError(f"A recipe has no slot {key!r}. {nearest(key, RECIPE_SLOTS)}")
        return cls(name=name, **{**_defaults(), **text})  # type: ignore[arg-type]

    @property
    def loss(self) -> str:
        weight = "·w" if self.correction else ""
        penalty = " + Σ u·penalty" if self.penalty else ""
        auxiliary = " + auxiliary" if self.auxiliary else ""
        return f"L = −Σ u{weight}·S{penalty}{auxiliary}"

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.samples else ("completion",)

    @property
    def reads_rewards(self) -> bool:
        return self.samples

    @property
    def weighs_tokens(self) -> bool:
        return self.samples

    @property
    def level(self) -> str:
        level: str = self.ratio.definition.traits.level
        return level

    @property
    def updates(self) -> int:
        updates: int = self.schedule["updates"]
        return updates

    def doubts(self) -> list[str]:
        from groupwise.methods.soundness import complaints

        return complaints(self)[1]

    def rows(self, group_size: int) -> int:
        return len(self.columns) or group_size

    def sized(self, limit: int, updates: int) -> dict[str, Any]:
        found: dict[str, Any] = {"schedule.updates": 1 if self.level == "none" else updates}
        for slot in self.slots():
            place = f"{slot.kind}.{slot.name}"
            found |= {f"{place}.{key}": x for key, x in slot.fitted(limit).items()}
        return found

    @property
    def outputs(self) -> tuple[str, ...]:
        """Name what the learner's forward pass must give, beyond the policy's log-probabilities."""
        names = [name for slot in self.slots() for name in slot.definition.traits.outputs]
        names += [n for slot in self.slots() for n in slot.needs if n in OUTPUT_STREAMS]
        return tuple(dict.fromkeys(["logp_NT", *names]))

    @property
    def streams(self) -> tuple[str, ...]:
        """Name what the batch must bring, beyond mask, groups and rewards."""
        needs = dict.fromkeys(name for slot in self.slots() for name in slot.needs)
        anchor = self.ratio.get("anchor")
        if anchor == "sampler":
            needs["sampler_logp_NT"] = None
        if self.schedule["updates"] > 1 and (anchor == "old" or self.corrects_mismatch):
            # From the second update on the policy is no longer its own anchor.
            needs["old_logp_NT"] = None
        elif self.schedule["updates"] == 1 and not self._looks_back:
            # In one update the policy's own log-probabilities, detached, are the old ones.
            needs.pop("old_logp_NT", None)
        return tuple(name for name in needs if name not in OUTPUT_STREAMS)

    @property
    def _looks_back(self) -> bool:
        """Tell whether old log-probabilities are read before the update's forward pass."""
        late = ("ratio", "gate", "correction", "penalty")
        return any("old_logp_NT" in s.needs for s in self.slots() if s.kind not in late)

    @property
    def corrects_mismatch(self) -> bool:
        """Tell whether a correction weighs or masks by learner/sampler."""
        return any("sampler_logp_NT" in slot.needs for slot in self.correction)

    def anchored(self, weights: str, *, close: bool = True) -> Self:
        """Return the recipe as it runs with a sampler of these weights: no pass for anchors alone.

        With several updates whose ratio alone reads the policy before them, the anchor is the
        sampler: its log-probabilities are of the same weights and known already. Not for a copy
        that is sampled to study a mismatch, which the anchor would take out. And where sampler and
        learner are not `close` (bfloat16 without exact mode), not for a ratio of whole answers: it
        adds up what they differ by, and GSPO's clip range is narrower than that.
        """
        if not close and self.ratio.definition.traits.level == "sequence":
            return self
        several = self.schedule["updates"] > 1
        others = any("old_logp_NT" in slot.needs for slot in self.slots()) or self.corrects_mismatch
        if weights != "shared" or not several or others or self.ratio.get("anchor") != "old":
            return self
        ratio = self.ratio.replace(anchor="sampler")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecipeWarning)  # its doubts were told before
            return self.replace(ratio=ratio, name=self.name, about=self.about)

    @property
    def roles(self) -> tuple[str, ...]:
        """Return who fills the streams that the slots read, and what they train."""
        learned = {slot.definition.traits.learns for slot in self.slots()}
        return tuple(
            name
            for name, facts in ROLE_FACTS.items()
            if name in learned or set(facts.streams) & {*self.streams, *self.outputs}
        )


def _defaults() -> dict[str, str]:
    return {
        "advantage": "group_zscore()",
        "ratio": "token()",
        "gate": "clip()",
        "aggregation": "token_mean_batch()",
        "schedule": "joint()",
    }


@dataclass(frozen=True)
class PairRecipe(Method):
    """A preference method: how pairs are made, how they are scored, what the reference is."""

    KINDS: ClassVar[tuple[str, ...]] = PAIR_SLOTS
    WORD: ClassVar[str] = "A preference recipe"
    STAGE: ClassVar[str] = "pairs"

    name: str
    pairing: Slot
    preference: Slot
    reference: str
    about: About = field(compare=False, repr=False)

    def __post_init__(self) -> None:
        self._settle()

    @property
    def roles(self) -> tuple[str, ...]:
        return ("reference",)

    @property
    def loss(self) -> str:
        return "L = mean over pairs of the preference loss"

    @property
    def reads(self) -> str:
        """Return where the two answers come from: `labels`, `answers` or `grades`."""
        reads: str = self.pairing.definition.traits.reads
        return reads

    @property
    def source(self) -> str:
        return "data" if self.reads == "labels" else "policy"

    @property
    def columns(self) -> tuple[str, ...]:
        return PAIR_COLUMNS[self.reads]

    @property
    def reads_rewards(self) -> bool:
        return self.reads == "grades"

    @property
    def ends_answers(self) -> bool:
        return True

    @property
    def fixed(self) -> dict[str, str]:
        return {"reference": self.reference}

    def rows(self, group_size: int) -> int:
        return 2


RECIPES: dict[str, Method] = {}
ADDED: dict[Path, Set[str]] = {}  # names of recipes by the user's file that registered them


def register(entry: Method) -> Method:
    """Make a recipe known by its name. A name is taken once."""
    if not isinstance(entry, Method):
        raise RecipeError(
            f"register takes a recipe, got {entry!r}. Write "
            'register(recipe("dapo").replace(name="mine", ...)).'
        )
    known = RECIPES.get(entry.name)
    if known is not None and known != entry:
        raise RecipeError(f"A recipe called {entry.name!r} exists already. Name yours otherwise.")
    RECIPES[entry.name] = entry
    return entry


def recipe(name: str, settings: Mapping[str, Any] | None = None) -> Any:
    """Find a recipe by name, or by `file.py:name` in a file of your own, with dotted settings.

    Returns a `Recipe` (or a `PairRecipe` for preference methods). `groupwise.recipes` fills what
    is known here: ask for it there.
    """
    if not isinstance(name, str):
        raise RecipeError(
            f"A recipe is asked for by its name, got {name!r}. Write recipe('dapo') or "
            "recipe('file.py:name')."
        )
    path, colon, wanted = name.rpartition(":")
    if colon:
        load_plugin(path)
    if wanted not in RECIPES and colon:
        own = [f"{path}:{known}" for known in ADDED.get(_place(path), ())]
        others = nearest(name, own) if own else "None at all: does the file call register(...)?"
        raise RecipeError(f"There is no recipe {wanted!r} in {path}. {others}")
    if wanted not in RECIPES:
        raise RecipeError(f"There is no recipe {wanted!r}. {nearest(wanted, RECIPES)}")
    return RECIPES[wanted] if settings is None else RECIPES[wanted].configure(settings)


def load_plugin(path: str) -> None:
    """Import a user's file, whose decorators and `register` calls add slots and recipes."""
    file = _place(path)
    if not file.is_file():
        raise RecipeError(
            f"There is no file {path!r} to load a recipe from. Put it there, or name another "
            "recipe: recipe=grpo (what a run learned is evaluated the same with any)."
        )
    module_name = f"groupwise_plugin_{file.stem}_{abs(hash(str(file)))}"
    if module_name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{path!r} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    before = set(RECIPES)
    sys.modules[module_name] = module
    make_importable(file)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        _forget(module_name, RECIPES.keys() - before)  # so that the mended file can be loaded
        if isinstance(error, (Exception, SystemExit)):
            raise RecipeError(_blame(path, file, error)) from error
        raise
    ADDED[file] = RECIPES.keys() - before


def _place(path: str) -> Path:
    return Path(path).expanduser().resolve()


def _forget(module_name: str, recipes: Iterable[str]) -> None:
    """Take back what a file added before it failed."""
    del sys.modules[module_name]
    for name in recipes:
        del RECIPES[name]
    for known in REGISTRY.values():
        for name, definition in list(known.items()):
            if definition.function.__module__ == module_name:
                del known[name]


def _blame(path: str, file: Path, error: BaseException) -> str:
    """Say which line of a user's file failed, and why."""
    if isinstance(error, SyntaxError) and error.filename:
        place = path if error.filename == str(file) else error.filename
        return f"Can't load {place}, line {error.lineno}: {type(error).__name__}: {error.msg}."
    lines = [
        n for frame, n in walk_tb(error.__traceback__) if frame.f_code.co_filename == str(file)
    ]
    why = str(error) if isinstance(error, GroupwiseError) else f"{type(error).__name__}: {error}."
    return f"Can't load {path}{f', line {lines[-1]}' if lines else ''}: {why}"
