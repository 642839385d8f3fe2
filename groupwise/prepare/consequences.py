"""What follows from a configuration: the recipe as it runs; the numbers of a step, for people."""

from __future__ import annotations

from groupwise.config.fields import Config
from groupwise.engine.backends import capabilities_of
from groupwise.explain.idle import Conditions, Idle, acting, idle, passes_of, told
from groupwise.methods.composition import PairRecipe, Recipe
from groupwise.methods.slots import Slot
from groupwise.model.room import CPU_TOKENS


def anchored(config: Config, recipe: Recipe) -> Recipe:
    """The recipe as it runs under this configuration."""
    return recipe.anchored(sampled_from(config), close=_close(config))


def sampled_from(config: Config) -> str:
    """The weights that are sampled from: "shared", the learner's own, or the name of a copy."""
    return capabilities_of(config.engine).weights


def _close(config: Config) -> bool:
    """Whether a sampler of the learner's own weights gives the learner's probabilities."""
    from groupwise.prepare.placing import place  # which reads this package

    precise = config.engine.exact or place(config.model).dtype == "float32"
    return precise and not config.adapter.dropout


def conditions(config: Config, recipe: Recipe) -> Conditions:
    """Which policies of a batch differ under this configuration."""
    engine = config.engine
    narrowed = engine.top_p < 1 or engine.top_k > 0 or engine.min_tokens > 0
    return Conditions(
        moved=_updates(recipe) > 1,
        mismatch=sampled_from(config) != "shared" or narrowed or not _close(config),
        reference=config.reference.update != "reset:1",
    )


def _updates(recipe: Recipe) -> int:
    """Optimizer steps on one batch."""
    updates: int = recipe.schedule["updates"]
    return updates * passes_of(recipe)


def idle_slots(config: Config) -> list[Idle]:
    """What of the recipe changes no update under this configuration, and what would wake it."""
    recipe = config.recipe
    if isinstance(recipe, PairRecipe):
        return []
    recipe = anchored(config, recipe)
    return idle(recipe, conditions(config, recipe))


def what_acts(config: Config) -> tuple[Slot, ...]:
    """The recipe's slots without those that are idle under this configuration."""
    recipe = config.recipe
    if isinstance(recipe, PairRecipe):
        return recipe.slots()
    recipe = anchored(config, recipe)
    return acting(recipe, conditions(config, recipe))


def describe(
    config: Config,
    micro_tokens: int | None = None,
    tasks: int | None = None,
    held_out: int | None = None,
) -> list[str]:
    """The numbers that follow from the configuration, for people.

    `micro_tokens`, `tasks` to train on and `held_out` ones are those of a run, where they are
    known.
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
    lines += [_refill_line(config, name) for name in recipe.refilling]
    lines += [f"idle, updates are the same without: {line}" for line in told(idle_slots(config))]
    lines += _pair_lines(config, recipe) if isinstance(recipe, PairRecipe) else []
    lines += _engine_lines(config)
    lines.append(_eval_line(config, held_out))
    return lines


def _engine_lines(config: Config) -> list[str]:
    """What an engine of one's own promises less than the native one."""
    name = config.engine.backend
    if not capabilities_of(config.engine).own_randomness:
        return [] if name == "native" else [f"sampled by {name}"]
    return [f"sampled by {name}, by random numbers of its own: no run repeats to the bit"]


def _refill_line(config: Config, name: str) -> str:
    drawn = f"groups that {name} drops are drawn anew"
    most = f"; refills take {config.refill_tokens:,} tokens a step at most"
    if config.refills == "until full":
        most = most if config.refill_tokens else "; refills take ten times its tokens at most"
        return f"{drawn} until the batch is full{most}"
    after = ", then the batch is smaller"
    return f"{drawn}, up to {config.refills} times a step{after}" + (
        most if config.refill_tokens else ""
    )


def _pair_lines(config: Config, recipe: PairRecipe) -> list[str]:
    """Where the two answers of a pair come from, and where that is not what the source does."""
    parts = ", ".join(f"{name} x {weight:g}" for name, weight in config.reward.parts.items())
    pairs = {
        "labels": "the data's columns `chosen` and `rejected`",
        "answers": "chosen: the data's `answer` as it stands, rejected: a sample of the policy as "
        "it is at that step",
        "grades": f"chosen and rejected: the best and the worst of {config.group_size} samples by "
        f"the reward ({parts})",
    }
    return [f"pairs: {pairs[recipe.reads]}", *(f"not as published: {x}" for x in recipe.departs)]


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
    weights = sampled_from(config)
    updates = _updates(config.recipe)
    if updates > 1:
        return f"{line}, {updates} updates, all but the first off-policy"
    if config.adapter.dropout and weights == "shared":
        return f"{line}, 1 update, on-policy but for dropout"
    policy = "on-policy" if weights == "shared" else f"sampled from other weights ({weights})"
    return f"{line}, 1 update, {policy}"


def _eval_line(config: Config, tasks: int | None) -> str:
    held_out = config.eval
    if not held_out.tasks or not config.data.evaluates or tasks == 0:
        return "no held-out evaluation"
    how = f"temperature {held_out.temperature:g}" if held_out.temperature else "greedy"
    often = f"every {held_out.every} steps" if held_out.every else "before and after"
    count = f"at most {held_out.tasks}" if tasks is None else f"{tasks}"
    return (
        f"held-out accuracy {often}: {count} tasks x {held_out.samples} "
        f"sample{'s' if held_out.samples > 1 else ''}, {how}"
    )
