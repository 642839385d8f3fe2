"""Rules for prompts that are drawn by their running pass rates (curriculum.*)."""

from __future__ import annotations

from collections.abc import Iterator

from groupwise.config.fields import Config
from groupwise.config.reading import DEFAULTS
from groupwise.config.values import flat
from groupwise.methods.method import Method
from groupwise.stages.ignored import ignored


def curriculum_of_what(config: Config, recipe: Method) -> Iterator[str]:
    """Refuse to go by pass rates where no answers are graded, and settings that do nothing."""
    rule, values = config.curriculum, flat(config)
    asked = [
        name for name in values if name.startswith("curriculum.") and values[name] != DEFAULTS[name]
    ]
    if not asked:
        return
    if recipe.judging is not None:
        yield (
            f"{asked[0]}={values[asked[0]]} goes by the share of answers that pass, and with "
            f"recipe {recipe.name} the policy itself says how good they are. Leave it out."
        )
        return
    if not (recipe.samples and recipe.reads_rewards):
        reads = "reads no rewards" if recipe.samples else f"learns from {recipe.learns_from}"
        why = f", which {reads}: it goes by the share of sampled answers that pass. Leave it out."
        yield ignored(config, asked[0], recipe.name, why)
        return
    idle = {
        "curriculum.above": rule.easy == 1 and "curriculum.easy",
        "curriculum.below": rule.hard == 1 and "curriculum.hard",
        "curriculum.newest": not rule.used and "curriculum.easy or curriculum.hard",
    }
    for name, missing in idle.items():
        if missing and name in asked:
            yield (
                f"{name}={values[name]} would be ignored: no prompts are drawn less often by it. "
                f"Set {missing} below 1, or leave it out."
            )
    yield from _sizes_of_groups(config, recipe, asked)
    if rule.thins and rule.below >= rule.above:
        yield (
            f"curriculum.below={rule.below:g} is not under curriculum.above={rule.above:g}: a "
            "prompt between them would be too easy and too hard at once. Move them apart."
        )


def _sizes_of_groups(config: Config, recipe: Method, asked: list[str]) -> Iterator[str]:
    """Refuse group sizes that nothing can follow, and bounds that bind nothing."""
    rule, size = config.curriculum, config.group_size
    if rule.group_sizes == "equal":
        for name in ("curriculum.least", "curriculum.most"):
            if name in asked:
                yield (
                    f"{name} would be ignored: all groups have group_size={size} answers. Set "
                    "curriculum.group_sizes=knapsack, or leave it out."
                )
        return
    set_so = f"curriculum.group_sizes={rule.group_sizes}"
    if not rule.least <= size <= rule.most:
        yield (
            f"{set_so} spends group_size={size} answers a prompt on average, and that is not "
            f"between curriculum.least={rule.least} and curriculum.most={rule.most}. Move them."
        )
    if config.train.lag:
        yield (
            f"{set_so} with train.lag={config.train.lag}: sizes go by what the step before found, "
            "and with lag a prompt is asked before that is known. Set train.lag=0."
        )
    if config.turns.used:
        yield f"{set_so} is for answers of one turn so far. Set curriculum.group_sizes=equal."


def curriculum_lines(config: Config) -> list[str]:
    """Say which prompts are drawn less often."""
    rule = config.curriculum
    said = {
        f"too easy (passed in at least {rule.above:.0%})": rule.easy,
        f"too hard (passed in at most {rule.below:.0%})": rule.hard,
    }
    lines = [
        f"prompts that are {which} are drawn at {share:.0%} of their turns"
        for which, share in said.items()
        if share < 1
    ]
    if rule.group_sizes != "equal":
        lines.append(
            f"{rule.least} to {rule.most} answers a prompt by its pass rate, {config.group_size} "
            "on average"
        )
    return lines
