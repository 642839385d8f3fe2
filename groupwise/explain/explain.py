"""A recipe described as data: for the terminal, for JSON and for the pages of docs/algorithms/.

Equations, needs and trade-offs are read off the slots, so that no page can say what the code does
not do. Pitfalls and disagreements are written by hand, in notes.toml; the sentence of each recipe
and the heads of families in families.toml.
"""

from __future__ import annotations

import functools
import inspect
import tomllib
import typing
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Literal

import groupwise.losses.controls
import groupwise.recipes  # noqa: F401 - fills RECIPES and the registry
from groupwise.explain import pages
from groupwise.explain.choose import choose
from groupwise.explain.idle import Conditions, idle, told, updates_of
from groupwise.explain.memory import GRADIENT, bytes_a_weight, memory
from groupwise.methods.method import Method
from groupwise.methods.mixtures import of_mixtures
from groupwise.methods.slots import REGISTRY, Definition, Slot
from groupwise.recipes import RECIPES, recipe
from groupwise.streams import ROLE_FACTS, STREAMS

__all__ = [
    "algorithm_pages",
    "choose",
    "difference",
    "explain",
    "families",
    "slot_functions",
    "table",
    "undocumented",
]

# The loss is read from the outside in: S needs r and A, A needs R, and so on.
READING_ORDER = (
    "gate", "ratio", "advantage", "shaping", "filter", "aggregation", "correction", "penalty",
    "auxiliary", "schedule", "pairing", "preference", "summing", "weighing", "likelihood",
    "labelling",
)  # fmt: skip
SYMBOLS = {"reference": "ℓ^ref", "separator": "behind a step"}  # of what no slot says
SLOT_MEANING = {
    "filter": "which groups and answers a batch learns from",
    "shaping": "what changes the reward before the baseline",
    "advantage": "from rewards to one advantage per token, a chain",
    "aggregation": "u, how much each token's loss counts",
    "ratio": "r, the policy against an anchor",
    "gate": "S, the objective and its trust region",
    "correction": "w, a detached weight for a sampler that is not the learner; several multiply",
    "penalty": "terms per token beside the objective; several add up",
    "auxiliary": "terms with weights of their own, and parts that are trained beside the policy",
    "schedule": "passes and updates per batch",
    "pairing": "how chosen and rejected answers are found",
    "preference": "the loss of a pair, or of a labelled answer",
    "likelihood": "terms of the chosen answer's own likelihood beside it; several add up",
    "summing": "from log-probabilities of tokens to one of an answer",
    "weighing": "a detached weight of each pair; several multiply",
    "labelling": "the loss of a labelled step",
    "width": "clip ranges inside a gate",
    "control": "numbers that change from step to step (train.coefs)",
}


@functools.cache
def notes() -> dict[str, dict[str, list[str]]]:
    """Return pitfalls and disagreements by recipe."""
    return tomllib.loads(_beside("notes.toml"))


@functools.cache
def families() -> dict[str, dict[str, Any]]:
    """Return title, head and recipes of each family, the recipes with a sentence each."""
    return tomllib.loads(_beside("families.toml"))


@functools.cache
def plain_sentences() -> dict[str, str]:
    """Return what each recipe does, in a sentence."""
    return {name: said for each in families().values() for name, said in each["recipes"].items()}


def _beside(name: str) -> str:
    return resources.files("groupwise.explain").joinpath(name).read_text("utf-8")


def undocumented() -> list[str]:
    """Return the recipes without notes or a sentence: without plug-ins there must be none."""
    return [name for name in RECIPES if name not in notes() or name not in plain_sentences()]


def short(slot: Slot) -> str:
    """Return the text form without defaults; it reads back as the same slot."""
    shown = [
        f"{key}={value if isinstance(value, Slot) else repr(value)}"
        for key, value in slot.params
        if value != slot.definition.parameters[key].default
    ]
    return f"{slot.name}({', '.join(shown)})" if shown else slot.name


def by_kind(entry: Method) -> dict[str, tuple[Slot, ...]]:
    return {kind: entry.of(kind) for kind in entry.KINDS}


def _text(slots: Sequence[Slot]) -> str:
    return ", ".join(map(str, slots))


# --- one recipe -------------------------------------------------------------------------------


def equation(entry: Method) -> list[dict[str, str]]:
    """Return the loss, then a line per slot, from the outside in."""
    slots = by_kind(entry)
    lines = [{"slot": "loss", "equation": entry.loss}]
    for kind in READING_ORDER:
        lines += [{"slot": kind, "equation": slot.equation} for slot in slots.get(kind, ())]
    lines += [
        {"slot": name, "equation": f"{SYMBOLS[name]} = {x}"} for name, x in _fixed(entry).items()
    ]
    return lines


def _fixed(entry: Method) -> dict[str, str]:
    """Return what no slot says, with line breaks and the like written out."""
    return {k: x if x.isprintable() else repr(x) for k, x in entry.fixed.items()}


def _function(slot: Slot, level: str = "") -> dict[str, str]:
    """Describe a slot; `level` is that of the ratio beside it, which some drawbacks depend on."""
    about = slot.definition
    at_level = about.traits.breaks_at.get(level, "")
    return {
        "kind": slot.kind,
        "text": str(slot),
        "equation": slot.equation,
        "fixes": about.fixes,
        "breaks": "; ".join(text for text in (about.breaks, at_level) if text),
    }


def _idle(entry: Method) -> list[str]:
    """Return what is idle with the recipe's own schedule and a sampler that is the learner."""
    return told(idle(entry, Conditions(moved=updates_of(entry) > 1)))


def _streams(names: Sequence[str]) -> list[dict[str, str]]:
    return [{"name": name, "meaning": STREAMS.get(name, "")} for name in names]


def _demands(entry: Method) -> dict[str, Any]:
    """Return what a recipe asks of the trainer: models, streams, outputs, parts with parameters."""
    beside = [ROLE_FACTS[name] for name in entry.roles]
    parts = [{"name": x.title, "start": x.start, "note": x.note} for x in beside if x.learns]
    return {
        "source": entry.source,
        "models": list(entry.models),
        "memory": memory(entry),
        "needs": _streams(entry.streams),
        "outputs": list(entry.outputs),
        "trains": parts,
    }


def _head(entry: Method) -> dict[str, Any]:
    about = entry.about
    return {
        "name": entry.name,
        "title": about.title,
        "plain": "" if about.base else plain_sentences().get(entry.name, ""),
        "paper": about.paper,
        "year": about.year,
        "family": about.family,
        "fixes": about.fixes,
        "breaks": about.breaks,
        "reach_for": about.reach_for,
    }


def _derived(entry: Method) -> dict[str, Any] | None:
    """Return what a changed recipe was made from, and what differs; None if it stands alone."""
    base = entry.about.base
    if base is None:
        return None
    differing = {k: {"a": d["a"], "b": d["b"]} for k, d in slot_differences(base, entry).items()}
    differing |= _apart(_fixed(base), _fixed(entry))
    return {"from": base.name, "paper": base.about.paper, "differs": differing}


def explain(name: str | Method) -> dict[str, Any]:
    """Return all there is to know about a recipe (`name`, `file.py:name`, or the recipe itself)."""
    entry: Method = name if isinstance(name, Method) else recipe(name)
    found = notes().get(entry.name, {})
    return {
        **_head(entry),
        "asks": of_mixtures(entry),
        "departs": list(entry.departs),
        "idle": _idle(entry),
        "derived": _derived(entry),
        "equation": equation(entry),
        "slots": {kind: entry.text()[kind] for kind in entry.KINDS},
        "functions": [_function(slot, entry.level) for slot in entry.slots()],
        **_demands(entry),
        "setting": dict(entry.about.setting),
        "note": entry.about.note,
        "doubts": entry.doubts(),
        "pitfalls": list(found.get("pitfalls", [])),
        "disagree": list(found.get("disagree", [])),
    }


def table() -> list[dict[str, Any]]:
    """Return a row per recipe, in the order in which they were registered."""
    return [
        {
            **_head(entry),
            "asks": of_mixtures(entry),
            "slots": {kind: entry.text()[kind] for kind in entry.KINDS},
            "short": {k: ", ".join(map(short, slots)) for k, slots in by_kind(entry).items()},
            "models": list(entry.models),
            "bytes": sum(bytes_a_weight(entry).values()) + GRADIENT,
        }
        for entry in RECIPES.values()
    ]


# --- two recipes ------------------------------------------------------------------------------


def _changed(ours: Sequence[Slot], theirs: Sequence[Slot]) -> list[dict[str, str]]:
    """Return the functions that only one side has; all of them where only the order differs."""
    only = [slot for slot in ours if slot not in theirs]
    return [_function(slot) for slot in (only if set(ours) != set(theirs) else ours)]


def _parameters(ours: Sequence[Slot], theirs: Sequence[Slot]) -> dict[str, dict[str, Any]]:
    """Return the hyper-parameters of shared functions, where they differ."""
    known = {slot.name: slot for slot in theirs}
    return {
        f"{slot.name}.{key}": {"a": _plain(value), "b": _plain(known[slot.name][key])}
        for slot in ours
        if slot.name in known
        for key, value in slot.params
        if value != known[slot.name][key]
    }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Slot) else value


def slot_differences(first: Method, second: Method) -> dict[str, dict[str, Any]]:
    one, two = by_kind(first), by_kind(second)
    differing = {}
    for kind in READING_ORDER:
        a, b = one.get(kind, ()), two.get(kind, ())
        if a != b:
            differing[kind] = {
                "a": _text(a),
                "b": _text(b),
                "only_a": _changed(a, b),
                "only_b": _changed(b, a),
                "parameters": _parameters(a, b),
            }
    return differing


def _apart(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    keys = dict.fromkeys([*one, *two])
    return {
        key: {"a": one.get(key), "b": two.get(key)} for key in keys if one.get(key) != two.get(key)
    }


def difference(a: str, b: str) -> dict[str, Any]:
    """Return only what differs between two recipes: slots, settings, demands."""
    first: Method = recipe(a)
    second: Method = recipe(b)
    sides = [{**_demands(entry), **_fixed(entry)} for entry in (first, second)]
    return {
        "a": first.name,
        "b": second.name,
        "slots": slot_differences(first, second),
        "settings": _apart(first.about.setting, second.about.setting),
        "demands": _apart(*sides),
    }


# --- every slot function ----------------------------------------------------------------------


def _admits(definition: Definition, key: str) -> str:
    """Describe the values that a hyper-parameter may take."""
    hint = definition.hints[key]
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    if hint is Slot:
        return "a width"
    number, *bounds = typing.get_args(hint)
    words = "any number" if "inf" in str(bounds[0]) else str(bounds[0])
    return f"whole, {words}" if number is int else words


def _signature(definition: Definition) -> str:
    shown = [
        key if item.default is inspect.Parameter.empty else f"{key}={_default(item.default)}"
        for key, item in definition.parameters.items()
    ]
    return f"{definition.name}({', '.join(shown)})"


def _default(value: Any) -> str:
    return str(value) if isinstance(value, Slot) else repr(value)


def slot_functions(names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """List every slot function of the package, and which of the named recipes (default: all) use
    it.
    """
    entries = [RECIPES[name] for name in (RECIPES if names is None else names)]
    return [
        {
            "kind": kind,
            "signature": _signature(definition),
            "admits": {key: _admits(definition, key) for key in definition.parameters},
            "equation": definition.written({key: key for key in definition.parameters}),
            "fixes": definition.fixes,
            "breaks": "; ".join([definition.breaks, *_by_level(definition)]),
            "needs": list(definition.needs),
            "used_by": [e.name for e in entries if any(_uses(s, definition) for s in e.slots())],
        }
        for kind, known in REGISTRY.items()
        for definition in known.values()
        # Plug-ins that this process happened to load are no part of the package.
        if definition.function.__module__.startswith("groupwise.")
    ]


def _by_level(definition: Definition) -> list[str]:
    """Return drawbacks by the level of the ratio."""
    drawbacks = definition.traits.breaks_at
    return [f"with a ratio per {level}: {text}" for level, text in drawbacks.items()]


def _uses(slot: Slot, definition: Definition) -> bool:
    inner = [value for _, value in slot.params if isinstance(value, Slot)]
    return any(each.definition is definition for each in (slot, *inner))


# --- docs/ ------------------------------------------------------------------------------------


def algorithm_pages() -> dict[str, str]:
    """Return the pages of all recipes of the package, by their paths in docs/.

    Plug-ins that this process happened to load are no part of them.
    """
    places = {
        name: f"{family}.md" for family, each in families().items() for name in each["recipes"]
    }
    rows = {row["name"]: row for row in table() if row["name"] in places}
    made = {"algorithms.md": pages.index_page(families(), rows)}
    for family, each in families().items():
        if family == "dialects":
            page = pages.dialects_page(each, [_dialect(name) for name in each["recipes"]])
        else:
            names = each["recipes"]
            page = pages.family_page(each, [rows[n] for n in names], [explain(n) for n in names])
        made[f"algorithms/{family}.md"] = page
    functions = slot_functions([name for name in RECIPES if name in places])
    made["algorithms/functions.md"] = pages.functions_page(functions, SLOT_MEANING, places)
    return made


def _dialect(name: str) -> dict[str, Any]:
    source = recipe(name.partition("@")[0])
    return {**explain(name), "differs": slot_differences(source, recipe(name))}
