"""The settings that a resumed run may change. Others would make it another run of the same name."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from groupwise.config.fields import Config
from groupwise.config.reading import load
from groupwise.config.values import OPEN
from groupwise.config.writing import text, toml
from groupwise.methods.slots import REGISTRY

# Setting or table -> may it change, and why (not). The longest name that fits decides.
RESUME: dict[str, tuple[bool, str]] = {
    "steps": (
        True,
        "the run ends elsewhere, not before its last recorded step; a schedule of the "
        "learning rate follows",
    ),
    "epochs": (False, "the learning rate of every step so far came from it"),
    "prompts_per_step": (True, "later batches have another size"),
    "group_size": (True, "later groups have another size"),
    "seed": (False, "the order of the data and every sample so far came from it"),
    "overlong": (False, "later steps would learn from other answers"),
    "refills": (True, "only how long a full batch is sought"),
    "refill_tokens": (True, "only how long a full batch is sought"),
    "model": (False, "the checkpoint is of that model"),
    "model.device": (True, "the last bits of what follows are others"),
    "model.threads": (True, "the last bits of what follows are others"),
    "adapter": (False, "the checkpoint is of that adapter"),
    "adapter.dropout": (True, "later updates drop another share"),
    "tiny": (False, "the starting model was made with it"),
    "data": (False, "the place in the data that the run has reached is one in that data"),
    "curriculum": (True, "later prompts are drawn more or less often"),
    "keep": (False, "the rows that the run learns from were chosen by it"),
    "data.streaming": (True, "where tasks are kept, not which or in what order"),
    "reward": (True, "rewards before and after can't be compared"),
    "reward.max_failed_share": (True, "only when to stop"),
    "reward.timeout": (True, "only when to give up on a function"),
    "engine": (True, "later answers are sampled otherwise"),
    "engine.backend": (False, "another engine has a state of its own in the checkpoint"),
    "engine.urls": (True, "which servers answer"),
    "engine.servers": (True, "which servers answer"),
    "engine.command": (True, "which servers answer"),
    "engine.carrier": (True, "how weights travel, not which"),
    "engine.folder": (True, "where weights lie on their way"),
    "engine.timeout": (True, "only when to give up on a server"),
    "engine.exact": (True, "the last bits of what follows are others"),
    "engine.slots": (True, "speed and memory only"),
    "engine.weights": (False, "the copy that is sampled from is part of the checkpoint"),
    "train": (False, "the prompts that are admitted ahead are part of the checkpoint"),
    "train.coefs": (False, "the coefficients so far came from it"),
    "train.sync": (True, "only what becomes of answers under way"),
    "turns": (True, "later episodes are played otherwise"),
    "turns.environment": (False, "another environment is another task, for a run of its own"),
    "turns.workers": (True, "speed only"),
    "optim": (True, "later updates have another size"),
    "optim.micro_tokens": (True, "speed and memory only"),
    "optim.recompute": (True, "speed and memory only"),
    "optim.offload": (True, "speed and memory only"),
    "reference": (False, "the reference is part of the checkpoint"),
    "critic": (True, "later updates of the critic have another size"),
    "critic.start": (False, "the critic is part of the checkpoint"),
    "critic.adapter": (False, "the critic is part of the checkpoint"),
    "critic.alone_steps": (False, "the policy's learning rate counts from it"),
    "critic.alone_patience": (False, "the policy's learning rate counts from where it begins"),
    "critic.truth_prompts": (True, "only how many prompts the critic is compared on"),
    "teacher": (False, "later updates would learn from another teacher"),
    "reward_model": (True, "later updates of the implicit reward model have another size"),
    "eval": (True, "accuracies before and after can't be compared"),
    "eval.every": (True, "only how often"),
    "eval.points": (True, "only how often"),
    "eval.tasks": (False, "held-out tasks come out of a generator's training tasks"),
    "budget": (
        True,
        "the run ends elsewhere, not before its last recorded step; a schedule of the "
        "learning rate follows",
    ),
    "until": (True, "the run ends elsewhere, not before its last recorded step"),
    "checkpoint": (True, "only how often, and how many"),
    "guard": (True, "only when to stop"),
    "watch": (True, "only what is watched"),
}
_SAME_FUNCTIONS = "another hyper-parameter of the same method"
_OTHER_FUNCTIONS = "another method: its curves belong in a run of their own"
_STATEFUL = "its state is part of the checkpoint"


@dataclass(frozen=True)
class SettingChange:
    """One setting that differs; None where there was, or is, no such setting."""

    key: str
    old: Any
    new: Any
    compatible: bool
    reason: str

    def __str__(self) -> str:
        old, new = ("none" if x is None else toml(x) for x in (self.old, self.new))
        return f"{self.key}: {old} -> {new} ({self.reason})"


def difference(
    old: Config | str | Mapping[str, Any], new: Config | str | Mapping[str, Any]
) -> list[SettingChange]:
    """Return the changes from one resolved configuration to another; texts are those of `text`.

    A setting that one of them does not have, because it was made by another version, counts as its
    default.
    """
    before, after, defaults = entries(old), entries(new), _defaults()
    changes = []
    for key in dict.fromkeys([*before, *after]):
        was, now = (found.get(key, defaults.get(key)) for found in (before, after))
        if was != now and not (key == "recipe.name" and _same_name(was, now)):
            changes.append(SettingChange(key, was, now, *_verdict(key, was, now)))
    return changes


def entries(source: Config | str | Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings by their dotted names, as they stand in the text."""
    if isinstance(source, Config):
        source = text(source)
    if isinstance(source, str):
        source = tomllib.loads(source)
    return _flattened(source, "")


def _defaults() -> dict[str, Any]:
    """Return the defaults of the fields; a recipe, and entries that the user names, have none."""
    named = tuple(f"{field}." for field in ("recipe", *OPEN))
    return {key: each for key, each in entries(load()).items() if not key.startswith(named)}


def _flattened(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, each in table.items():
        name = prefix + key
        found |= _flattened(each, f"{name}.") if isinstance(each, Mapping) else {name: each}
    return found


def _same_name(old: str | None, new: str | None) -> bool:
    """Return whether two recipes have the same name: `dapo*` is a changed `dapo`, and files may
    move.
    """
    words = [(name or "").rpartition(":")[2].removesuffix("*") for name in (old, new)]
    return words[0] == words[1]


def _verdict(key: str, old: Any, new: Any) -> tuple[bool, str]:
    head, _, kind = key.partition(".")
    if head == "recipe":
        return _recipe_verdict(kind, str(old or ""), str(new or ""))
    return resume_rule(key)


def resume_rule(key: str) -> tuple[bool, str]:
    """Return whether a setting beside the recipe may change in a resumed run, and the reason."""
    fitting = [name for name in RESUME if f"{key}.".startswith(f"{name}.")]
    if not fitting:
        return False, "this version does not know it"
    return RESUME[max(fitting, key=len)]


def _recipe_verdict(kind: str, old: str, new: str) -> tuple[bool, str]:
    """Return whether a recipe's setting may change: numbers may, functions may not."""
    functions = [re.findall(r"(\w+)\(", slots) for slots in (old, new)]
    if kind == "name" or functions[0] != functions[1]:
        return False, _OTHER_FUNCTIONS
    for name in functions[0]:
        definition = REGISTRY.get(kind, {}).get(name)
        if definition and (definition.traits.learns or definition.traits.remembers):
            return False, _STATEFUL
    return True, _SAME_FUNCTIONS
