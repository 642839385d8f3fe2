"""What follows from a configuration: the recipe as it runs; the numbers of a step, for people."""

from __future__ import annotations

from groupwise.composition import PairRecipe, Recipe
from groupwise.config.fields import Config
from groupwise.room import CPU_TOKENS


def anchored(config: Config, recipe: Recipe) -> Recipe:
    """The recipe as it runs under this configuration."""
    close = config.engine.exact or config.model.dtype == "float32"
    close = close and not config.adapter.dropout
    return recipe.anchored(config.engine.weights, close=close)


def describe(
    config: Config, micro_tokens: int | None = None, tasks: int | None = None
) -> list[str]:
    """The numbers that follow from the configuration, for people.

    `micro_tokens` and `tasks` to train on are those of a run, where they are known.
    """
    lines = [_batch_line(config)]
    recipe = config.recipe
    held = ", ".join(recipe.models)
    held = held.replace("reference", f"reference ({config.reference.update})")
    lines.append(f"recipe {recipe.name}; models: {held}")
    if isinstance(recipe, Recipe) and anchored(config, recipe) != recipe:
        lines.append(
            "anchor of the ratio = the sampler: its log-probabilities stand for those of the "
            "policy before the updates, and nothing is scored again"
        )
    tokens = config.prompts_per_step * config.group_size * config.engine.max_tokens
    labelled = isinstance(recipe, PairRecipe) and recipe.reads == "labels"
    lines.append(
        "nothing is sampled; "
        if labelled
        else f"at most {tokens:,} tokens sampled a step ({config.engine.max_tokens} an answer); "
    )
    lines[-1] += _micro_batches(config, micro_tokens)
    drawn = config.steps * config.prompts_per_step
    drawn_of = "" if tasks is None else f" from {tasks:,} tasks"
    lines.append(f"{config.steps:,} steps draw {drawn:,} prompts{drawn_of}")
    budget = {"tokens": config.budget.tokens, "seconds": config.budget.seconds}
    lines += [
        f"or fewer: it ends with the step that reaches {n:,} {w}" for w, n in budget.items() if n
    ]
    lines += [
        f"groups that {name} drops are drawn anew, up to {config.refills} times a step"
        for name in recipe.refilling
    ]
    lines.append(_eval_line(config))
    return lines


def _micro_batches(config: Config, tokens: int | None) -> str:
    asked = config.optim.micro_tokens
    tokens = tokens or asked or (None if config.model.device.startswith("cuda") else CPU_TOKENS)
    if tokens is None:
        return "micro-batches as large as memory allows (automatic)"
    return f"micro-batches of {tokens:,} tokens{'' if asked else ' (automatic)'}"


def _batch_line(config: Config) -> str:
    prompts, samples = config.prompts_per_step, config.group_size
    if isinstance(config.recipe, PairRecipe):
        if config.recipe.reads == "labels":
            return f"{prompts} labelled pairs a step, 1 update"
        return f"{prompts} prompts x {samples} samples, at most {prompts} pairs a step, 1 update"
    line = f"{prompts} prompts x {samples} samples = {prompts * samples} completions a step"
    schedule, weights = config.recipe.schedule, config.engine.weights
    updates = schedule["updates"] * (2 if schedule.name == "low_then_high" else 1)
    if updates > 1:
        return f"{line}, {updates} updates, all but the first off-policy"
    if config.adapter.dropout and weights == "shared":
        return f"{line}, 1 update, on-policy but for dropout"
    policy = "on-policy" if weights == "shared" else f"sampled from other weights ({weights})"
    return f"{line}, 1 update, {policy}"


def _eval_line(config: Config) -> str:
    held_out = config.eval
    if not held_out.tasks or not config.data.evaluates:
        return "no held-out evaluation"
    how = f"temperature {held_out.temperature:g}" if held_out.temperature else "greedy"
    often = f"every {held_out.every} steps" if held_out.every else "before and after"
    return (
        f"held-out accuracy {often}: {held_out.tasks} tasks x {held_out.samples} "
        f"sample{'s' if held_out.samples > 1 else ''}, {how}"
    )
