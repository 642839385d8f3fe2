"""The methods of a replay: recipes with their settings, as they would run here."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from groupwise.compare.arms import without_paper_sizes
from groupwise.config import Config
from groupwise.errors import RecipeError, RecipeWarning
from groupwise.methods.composition import Recipe
from groupwise.optim.roles import apart
from groupwise.optim.turn_streams import OF_EPISODES
from groupwise.recipes import recipe as recipe_by_name
from groupwise.replay.recorded import Record, Recorded
from groupwise.stages.consequences import anchored
from groupwise.streams import STREAMS

# What a rollout file gives to any recipe; beside them reference, greedy
# rewards and branches, where recorded.
KNOWN = {
    "old_logp_NT", "sampler_logp_NT", "correct_N", "truncated_N", "token_NT", "step_reward_NT",
    "step_end_NT",
}  # fmt: skip
OUTPUTS = {"logp_NT", "entropy_NT", "length_exponent"}
# Streams and the columns that they are read from, or made of, where the file has them.
COLUMNS = {"ref_logp_NT": "ref_logp", "old_value_NT": "value", "prm_logp_NT": "process_reward",
           "teacher_logp_NT": "teacher_logp"}  # fmt: skip
RUN = "run"  # the run's own recipe


@dataclass(frozen=True)
class ReplayMethod:
    """A recipe and its name in tables."""

    name: str
    recipe: Recipe
    asked: str = RUN  # as it was written, with its file: what a command can be made of


def methods_of(run: Recorded, texts: Sequence[str]) -> list[ReplayMethod]:
    """Return the run's own recipe, then those of the texts: `"dapo recipe.gate.high=0.3"`."""
    made = [ReplayMethod(RUN, run.recipe)]
    for text in texts:
        name, recipe = _read(run.config, text)
        taken = sum(each.name == name or each.name.startswith(f"{name} (") for each in made)
        made.append(ReplayMethod(f"{name} ({taken + 1})" if taken else name, recipe, text))
    return made


def _read(config: Config, text: str) -> tuple[str, Any]:
    try:
        first, *settings = shlex.split(text) or [""]
    except ValueError as error:
        raise RecipeError(f"--recipe {text!r} can't be read ({error}). {_FORM}") from None
    if not first:
        raise RecipeError(f"--recipe {text!r} names none. {_FORM}")
    pairs = dict[str, Any]()
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise RecipeError(f"--recipe {text!r}: {setting!r} sets nothing. {_FORM}")
        pairs[key.removeprefix("recipe.")] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecipeWarning)  # doubts about training with it
        found = recipe_by_name(first)
        if not found.weighs_tokens:
            raise RecipeError(
                f"{first} learns from {found.learns_from}: it gives no token of a sample an "
                "advantage or a weight that could be put beside a group recipe's. Choose one of "
                "those: `groupwise recipes`."
            )
        asked = replace(config, recipe=found.configure(pairs))
        made = without_paper_sizes(asked, config.recipe, [f"recipe.{key}" for key in pairs])
    short = " ".join([first.rpartition(".py:")[2], *(f"{k}={v}" for k, v in pairs.items())])
    return short, anchored(config, made)


_FORM = "Write a name with settings behind it: --recipe 'dapo recipe.gate.high=0.3'."


def check(run: Recorded, method: ReplayMethod, record: Record) -> None:
    """Refuse a recipe that reads what was not recorded, and say what it is for."""
    recipe = method.recipe
    there = set(KNOWN)
    if any(each.completion.episode for group in record.groups for each in group):
        there |= set(OF_EPISODES)
    there |= {name for name, column in COLUMNS.items() if column in record.streams}
    there |= {"greedy_reward_N"} if record.greedy else set()
    there |= {"step_value_NT"} if record.branches else set()
    there |= {"segment_NT"} if run.tokenizer is not None else set()
    needed = [name for name in recipe.streams if name not in there]
    needed += [name for name in recipe.outputs if name not in (OUTPUTS | _elsewhere(recipe))]
    if "entropy_NT" in recipe.outputs and "entropy" not in record.streams:
        needed.append("entropy_NT")
    if run.tokenizer is None and "step_reward_NT" in recipe.streams:
        needed.append("step_reward_NT")
    if not needed:
        _check_steps(run, method, record)
        return
    name = sorted(needed, key=lambda each: each == "ref_logp_NT")[0]  # what can be left out, last
    readers = [slot for slot in recipe.slots() if name in slot.needs] or [recipe.ratio]
    raise RecipeError(
        f"{method.name} reads {STREAMS[name]} ({name}, for its {readers[0].kind} "
        f"{readers[0].name}), and step {record.step} of {run.folder.path} did not record that. "
        + _remedy(name, method, readers[0].kind)
    )


def _elsewhere(recipe: Recipe) -> set[str]:
    """Return the outputs of models that learn apart: they give no token of the policy a weight."""
    terms = [term for name in apart(recipe) for term in recipe.terms_of(name)]
    return {name for term in terms for name in term.definition.traits.outputs}


def _check_steps(run: Recorded, method: ReplayMethod, record: Record) -> None:
    """Refuse a recipe for rewards of steps where none were recorded: all would be one step."""
    if "step_reward_NT" not in method.recipe.streams:
        return
    if not any(rollout.grade.steps for group in record.groups for rollout in group):
        raise RecipeError(
            f"{method.name} learns from a reward for each step of an answer, and step "
            f"{record.step} of {run.folder.path} recorded none: its reward gave whole answers one. "
            "Take a run whose reward returns steps, or another recipe (`groupwise recipes`)."
        )


def _remedy(name: str, method: ReplayMethod, kind: str) -> str:
    if name == "ref_logp_NT" and kind == "advantage":
        return "The run held no reference: take a recipe that reads none."
    if name == "ref_logp_NT":
        return f"Replay it without: --recipe {shlex.quote(f'{method.asked} recipe.{kind}=')}."
    if name == "greedy_reward_N":
        return "Only a run of remax samples greedy baselines: take another recipe."
    if name == "old_value_NT":
        return "Only a run with a critic (ppo, vapo) records values: take a recipe without one."
    if name == "prm_logp_NT":
        return "Only a run of prime records process rewards: take another recipe."
    if name == "teacher_logp_NT":
        return "Only a run of distill records a teacher: take a recipe without one."
    if name == "entropy_NT":
        return "No update of the policy read it, as it waited for its critic: choose later steps."
    if name == "step_value_NT":
        return "Only a run of vineppo samples branches of its answers: take another recipe."
    if name in ("segment_NT", "step_reward_NT"):
        return "The run has saved no tokenizer yet: wait for its first checkpoint."
    return "No rollout file holds it: take another recipe (`groupwise recipes`)."
