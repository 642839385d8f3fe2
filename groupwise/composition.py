"""A recipe is a record of slots. Composition: from data, from scratch, or from text."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from groupwise.errors import RecipeError, RecipeWarning, nearest
from groupwise.losses.auxiliary import PARTS, Part
from groupwise.slots import Slot, parse

# Slots that hold several functions (chains, sums, products), and those that hold exactly one.
MANY = ("filter", "shaping", "advantage", "correction", "penalty", "auxiliary")
ONE = ("aggregation", "ratio", "gate", "schedule")
RECIPE_SLOTS = (
    "filter", "shaping", "advantage", "aggregation", "ratio", "gate", "correction", "penalty",
    "auxiliary", "schedule",
)  # fmt: skip
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
    family: str = "method"  # method | variant | correction | dialect | ablation | preference
    fixes: str = ""
    breaks: str = ""
    reach_for: str = ""
    setting: Mapping[str, Any] = field(default_factory=dict)  # the paper's, outside the slots
    note: str = ""  # how sure the reading is, what is a house choice


def _slots_of(kind: str, value: Any) -> tuple[Slot, ...]:
    """A slot, several, or their text form."""
    if isinstance(value, str):
        return parse(kind, value)
    items = (value,) if isinstance(value, Slot) or not isinstance(value, Iterable) else tuple(value)
    slots: list[Slot] = []
    for item in items:
        if isinstance(item, str):
            slots.extend(parse(kind, item))
        elif isinstance(item, Slot) and item.kind == kind:
            slots.append(item)
        elif isinstance(item, Slot):
            raise RecipeError(f"{item} is a {item.kind}, not a {kind}. Put it there.")
        else:
            hint = f" Write {item.name}(...)." if hasattr(item, "parameters") else ""
            raise RecipeError(f"A {kind} must be a slot or its text, got {item!r}.{hint}")
    return tuple(slots)


@dataclass(frozen=True)
class Recipe:
    """A policy-optimisation method: one value for every axis."""

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
    about: About = field(default_factory=lambda: About("your own"), compare=False, repr=False)

    def __post_init__(self) -> None:
        for kind in RECIPE_SLOTS:
            slots = _slots_of(kind, getattr(self, kind))
            if kind in ONE and len(slots) != 1:
                raise RecipeError(f"A recipe has exactly one {kind}, got {len(slots)}.")
            object.__setattr__(self, kind, slots[0] if kind in ONE else slots)
        from groupwise.soundness import complaints

        refused, doubtful = complaints(self)
        if refused:
            raise RecipeError(f"Recipe {self.name!r} makes no sense: {refused[0]}")
        for text in doubtful:
            warnings.warn(f"Recipe {self.name!r}: {text}", RecipeWarning, stacklevel=4)

    def slots(self) -> tuple[Slot, ...]:
        """All slots in the order of the axes."""
        return tuple(slot for kind in RECIPE_SLOTS for slot in self.of(kind))

    def of(self, kind: str) -> tuple[Slot, ...]:
        value = getattr(self, kind)
        return value if isinstance(value, tuple) else (value,)

    def replace(self, **changes: Any) -> Recipe:
        """The recipe with other slots: `replace(gate=clip(0.2, 0.3))` or their text."""
        for key in changes:
            if key not in (*RECIPE_SLOTS, "name", "about"):
                raise RecipeError(f"A recipe has no slot {key!r}. {nearest(key, RECIPE_SLOTS)}")
        changes.setdefault("name", self.name if self.name.endswith("*") else f"{self.name}*")
        return replace(self, **changes)

    def set(self, path: str, value: Any) -> Recipe:
        """One setting in the dotted form: `gate`, `gate.high`, `advantage.group_zscore.eps`."""
        return self.configure({path: value})

    def configure(self, settings: Mapping[str, Any]) -> Recipe:
        """Several settings at once; only the result must make sense, not the way there."""
        changed: dict[str, tuple[Slot, ...]] = {}
        for path, value in settings.items():
            kind, *rest = path.removeprefix("recipe.").split(".")
            if kind not in RECIPE_SLOTS:
                raise RecipeError(f"A recipe has no slot {kind!r}. {nearest(kind, RECIPE_SLOTS)}")
            slots = changed.get(kind, self.of(kind))
            changed[kind] = (
                self._adjust(kind, slots, rest, value) if rest else _slots_of(kind, value)
            )
        return self.replace(**changed) if changed else self

    def _adjust(
        self, kind: str, slots: tuple[Slot, ...], rest: list[str], value: Any
    ) -> tuple[Slot, ...]:
        """One hyper-parameter of one of the slots of a kind."""
        *name, parameter = rest
        owners = [s for s in slots if parameter in s and (not name or [s.name] == name)]
        if not owners:
            known = [key for slot in slots for key, _ in slot.params]
            raise RecipeError(
                f"recipe.{kind}.{'.'.join(rest)}: {self.name!r} would ignore it, its {kind} is "
                f"{', '.join(map(str, slots)) or 'empty'}. "
                + (nearest(parameter, known) if known else f"Set recipe.{kind} itself.")
            )
        if len(owners) > 1:
            raise RecipeError(
                f"recipe.{kind}.{parameter} is in {' and '.join(s.name for s in owners)}: write "
                f"recipe.{kind}.{owners[0].name}.{parameter}."
            )
        adjusted = owners[0].replace(**{parameter: value})
        return tuple(adjusted if slot is owners[0] else slot for slot in slots)

    def text(self) -> dict[str, str]:
        """The text form of every slot; `from_text` reads it back."""
        return {kind: ", ".join(map(str, self.of(kind))) for kind in RECIPE_SLOTS}

    @classmethod
    def from_text(cls, name: str, text: Mapping[str, str]) -> Recipe:
        """A recipe from scratch; slots left out take the defaults of `defaults()`."""
        for key in text:
            if key not in RECIPE_SLOTS:
                raise RecipeError(f"A recipe has no slot {key!r}. {nearest(key, RECIPE_SLOTS)}")
        return cls(name=name, **{**_defaults(), **text})  # type: ignore[arg-type]

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the learner's forward pass must give, beyond the policy's log-probabilities."""
        names = [
            name for slot in self.slots() for name in slot.definition.traits.get("outputs", ())
        ]
        names += [n for slot in self.slots() for n in slot.needs if n in OUTPUT_STREAMS]
        return tuple(dict.fromkeys(["logp_NT", *names]))

    @property
    def streams(self) -> tuple[str, ...]:
        """What the batch must bring, beyond mask, groups and rewards."""
        needs = dict.fromkeys(name for slot in self.slots() for name in slot.needs)
        anchor = self.ratio.get("anchor")
        if anchor == "sampler":
            needs["sampler_logp_NT"] = None
        if anchor == "old" and self.schedule["updates"] > 1:
            # From the second update on the policy is no longer its own anchor.
            needs["old_logp_NT"] = None
        return tuple(name for name in needs if name not in OUTPUT_STREAMS)

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is trained beside the policy."""
        names = [slot.definition.traits.get("learns") for slot in self.slots()]
        return tuple(PARTS[name] for name in dict.fromkeys(names) if name)

    @property
    def models(self) -> tuple[str, ...]:
        """Models held in memory."""
        held = ["policy"]
        if "ref_logp_NT" in self.streams:
            held.append("reference")
        if "old_value_NT" in self.streams:
            held.append("critic")
        if "prm_logp_NT" in self.streams:
            held.append("implicit reward model")
        return tuple(held)


def _defaults() -> dict[str, str]:
    return {
        "advantage": "group_zscore()",
        "ratio": "token()",
        "gate": "clip()",
        "aggregation": "token_mean_batch()",
        "schedule": "joint()",
    }


@dataclass(frozen=True)
class PairRecipe:
    """A preference method: how pairs are made, how they are scored, what the reference is."""

    name: str
    pairing: Slot
    preference: Slot
    reference: str
    about: About = field(compare=False, repr=False)

    def __post_init__(self) -> None:
        for kind in ("pairing", "preference"):
            slots = _slots_of(kind, getattr(self, kind))
            if len(slots) != 1:
                raise RecipeError(f"A preference recipe has exactly one {kind}, got {len(slots)}.")
            object.__setattr__(self, kind, slots[0])

    @property
    def models(self) -> tuple[str, ...]:
        return ("policy", "reference")

    def slots(self) -> tuple[Slot, ...]:
        return (self.pairing, self.preference)

    def replace(self, **changes: Any) -> PairRecipe:
        for key in changes:
            if key not in ("name", "pairing", "preference", "reference", "about"):
                raise RecipeError(f"{self.name!r} has no slot {key!r}: only pairing, preference.")
        changes.setdefault("name", self.name if self.name.endswith("*") else f"{self.name}*")
        return replace(self, **changes)

    def text(self) -> dict[str, str]:
        return {"pairing": str(self.pairing), "preference": str(self.preference)}


RECIPES: dict[str, Recipe | PairRecipe] = {}


def register(entry: Recipe | PairRecipe) -> Recipe | PairRecipe:
    """Make a recipe known by its name. A name is taken once."""
    known = RECIPES.get(entry.name)
    if known is not None and known != entry:
        raise RecipeError(f"A recipe called {entry.name!r} exists already. Name yours otherwise.")
    RECIPES[entry.name] = entry
    return entry


def recipe(name: str, settings: Mapping[str, Any] | None = None) -> Any:
    """A recipe by name, or by `file.py:name` from a file of your own, with dotted settings.

    Returns a `Recipe` (or a `PairRecipe` for preference methods).
    """
    import groupwise.recipes  # noqa: F401 - fills RECIPES

    path, colon, wanted = name.rpartition(":")
    if colon:
        load_plugin(path)
    if wanted not in RECIPES:
        where = f" in {path}: does the file call register(...)?" if colon else "."
        raise RecipeError(f"There is no recipe {wanted!r}{where} {nearest(wanted, RECIPES)}")
    found = RECIPES[wanted]
    if not settings:
        return found
    if isinstance(found, PairRecipe):
        raise RecipeError(f"{wanted!r} takes no dotted settings; use replace().")
    return found.configure(settings)


def load_plugin(path: str) -> None:
    """Import a user's file, whose decorators and `register` calls add slots and recipes."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise RecipeError(f"There is no file {path!r} to load a recipe from.")
    module_name = f"groupwise_plugin_{file.stem}_{abs(hash(str(file)))}"
    if module_name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{path!r} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
