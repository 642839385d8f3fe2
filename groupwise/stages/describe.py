"""The numbers that follow from a configuration, for people."""

from __future__ import annotations

from groupwise.config.fields import Config
from groupwise.engine.backends import capabilities_of
from groupwise.model.room import CPU_TOKENS
from groupwise.optim.roles import ROLES
from groupwise.stages import stage_of
from groupwise.stages.consequences import anchored
from groupwise.stages.curriculum_checks import curriculum_lines
from groupwise.streams import ROLE_FACTS


def describe(
    config: Config,
    micro_tokens: int | None = None,
    tasks: int | None = None,
    held_out: int | None = None,
    graded: int | None = None,
) -> list[str]:
    """Return a line for each number or choice that is worth knowing before a run.

    `micro_tokens`, `tasks` to train on, `held_out` ones and those of them that can be `graded` are
    those of a run, where they are known.
    """
    stage, recipe = stage_of(config), config.recipe
    lines = [stage.batch_line(), f"recipe {recipe.name}; models: {_models(config)}"]
    if anchored(config, recipe) != recipe:
        lines.append(
            "anchor of the ratio = the sampler: its log-probabilities stand for those of the "
            "policy before the updates, and nothing is scored again"
        )
    tokens = config.prompts_per_step * config.group_size * config.engine.max_tokens
    again = ", and what refills draw" if recipe.refilling else ""
    sampled = f"at most {tokens:,} tokens sampled a step ({config.engine.max_tokens} an answer)"
    lines.append(f"{sampled}{again}; " if recipe.samples else "nothing is sampled; ")
    lines[-1] += _micro_batches(config, micro_tokens)
    lines.append(_length(config, tasks, again))
    budget = {"tokens": config.budget.tokens, "seconds": config.budget.seconds}
    lines += [
        f"or fewer: it ends with the step that reaches {n:,} {w}" for w, n in budget.items() if n
    ]
    lines += [*stage.notes(), *curriculum_lines(config), *_engine_lines(config)]
    return lines + _eval_lines(config, held_out, graded)


def _length(config: Config, tasks: int | None, again: str) -> str:
    """Say how many prompts all steps draw, as far as it is known before the data is read."""
    steps = config.length(tasks)
    if steps is None:
        return f"{config.epochs:g} epochs: as many steps as the data has rows for"
    drawn = steps * config.prompts_per_step
    drawn_of = "" if tasks is None else f" from {tasks:,} tasks"
    count = "1 step draws" if steps == 1 else f"{steps:,} steps draw"
    passes = f": {drawn / tasks:.3g} epochs" if tasks and config.recipe.supervised else ""
    return f"{count} {drawn:,} prompts{drawn_of}{again}{passes}"


def _engine_lines(config: Config) -> list[str]:
    """Say what an engine of one's own promises less than the native one."""
    name = config.engine.backend
    if not capabilities_of(config.engine).own_randomness:
        return [] if name == "native" else [f"sampled by {name}"]
    return [f"sampled by {name}, by random numbers of its own: no run repeats to the bit"]


def _models(config: Config) -> str:
    held = [name for name in config.recipe.roles if ROLE_FACTS[name].model]
    told = [ROLES[n].description(config) if n in ROLES else ROLE_FACTS[n].title for n in held]
    return ", ".join([config.recipe.models[0], *told])


def _micro_batches(config: Config, tokens: int | None) -> str:
    asked = config.optim.micro_tokens
    tokens = tokens or asked or (None if config.model.device.startswith("cuda") else CPU_TOKENS)
    if tokens is None:
        return "micro-batches as large as memory allows (automatic)"
    return f"micro-batches of {tokens:,} tokens{'' if asked else ' (automatic)'}"


def _eval_lines(config: Config, held_out: int | None, graded: int | None) -> list[str]:
    """Say how a run is judged: rows that are learned as they stand by their likelihood, too."""
    if not config.recipe.supervised or held_out == 0 or not config.data.evaluates:
        return [_eval_line(config, held_out)]
    often = f"every {config.eval.every} steps" if config.eval.every else "before and after"
    count = f"at most {config.eval.tasks}" if held_out is None else f"{held_out}"
    likely = f"held-out nll and token accuracy {often}: {count} rows"
    return [likely] if graded == 0 else [likely, _eval_line(config, graded)]


def _eval_line(config: Config, tasks: int | None) -> str:
    held_out = config.eval
    if not held_out.tasks or not config.data.evaluates or tasks == 0:
        return "no held-out evaluation"
    if config.recipe.scores:
        rows = "all" if tasks is None else f"{tasks:,}"
        often = f"every {held_out.every} steps" if held_out.every else "before and after"
        return f"held-out accuracy {often}: {rows} rows"
    how = f"temperature {held_out.temperature:g}" if held_out.temperature else "greedy"
    often = f"every {held_out.every} steps" if held_out.every else "before and after"
    count = f"at most {held_out.tasks}" if tasks is None else f"{tasks}"
    return (
        f"held-out accuracy {often}: {count} tasks x {held_out.samples} "
        f"sample{'s' if held_out.samples > 1 else ''}, {how}"
    )
