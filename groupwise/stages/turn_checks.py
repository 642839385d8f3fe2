"""Rules for turns: what can't be led as a conversation, and settings that nobody would read."""

from __future__ import annotations

from collections.abc import Iterator

from groupwise.config.fields import Config
from groupwise.config.reading import DEFAULTS, ENVIRONMENT
from groupwise.config.values import flat
from groupwise.groups.steps import branching_of
from groupwise.methods.composition import Recipe
from groupwise.methods.method import Method
from groupwise.stages.ignored import ignored

FORMS = ("auto", "chat", "plain")
WITHOUT = "nothing answers the policy. Set turns.environment or turns.tools, or leave it out."


def turns_without_an_environment(config: Config, recipe: Method) -> Iterator[str]:
    """Refuse settings of turns, and the reward of an environment, where there is none."""
    if config.turns.used:
        return
    for name, value in flat(config).items():
        if name.startswith("turns.") and value != DEFAULTS[name]:
            yield ignored(config, name, recipe.name, f": {WITHOUT}")
    if ENVIRONMENT in config.reward.parts:
        yield f"reward.parts names {ENVIRONMENT}, and {WITHOUT}"


def recipes_without_turns(config: Config, recipe: Method) -> Iterator[str]:
    """Refuse recipes that can't learn from conversations."""
    if not config.turns.used:
        return
    asked = "turns.environment" if config.turns.environment else "turns.tools"
    lead = f"{asked}={flat(config)[asked]} with recipe {recipe.name}"
    if not isinstance(recipe, Recipe) or not recipe.samples:
        yield (
            f"{lead}, which learns from {recipe.learns_from} and leads no conversation. Take a "
            "recipe that samples groups of answers, such as dr_grpo, or leave it out."
        )
        return
    if str(recipe.source) != "policy":
        yield (
            f"{lead}: its answers come from {recipe.source}, and an environment answers this run's "
            "policy alone. Set recipe.source=policy, or leave it out."
        )
    if branching_of(recipe) is not None:
        yield (
            f"{lead}, which goes on from within answers: an environment can't be taken back to "
            "where it was. Take a recipe without branches, such as dr_grpo."
        )
    if recipe.replays == "sampler" or config.engine.record_routes:
        yield (
            f"{lead}: the experts of several turns are not recorded. Take a recipe that does not "
            "replay the sampler's routes, and set engine.record_routes=false."
        )
    beside = config.engine.servers and config.engine.backend == "native"
    if config.train.lag or beside:
        name = "train.lag" if config.train.lag else "engine.servers"
        yield (
            f"{lead}, and {name}={flat(config)[name]}: prompts that are sampled ahead are answered "
            f"in one turn. Set {name}=0, or leave it out."
        )
    if config.teacher.prompt or config.teacher.template:
        yield (
            f"{lead}: the teacher would read the prompt in other words (teacher.prompt, "
            "teacher.template), and the environment's first words stand behind it. Leave them out."
        )


def limits_of_turns(config: Config, recipe: Method) -> Iterator[str]:
    """Refuse limits that contradict each other."""
    turns, engine = config.turns, config.engine
    if not turns.used:
        return
    if turns.template not in FORMS and not all(x in turns.template for x in ("{role}", "{text}")):
        yield (
            f"turns.template={turns.template!r} is none of {', '.join(FORMS)}, and no text with "
            "{role} and {text} in it, which say where a speaker's name goes and where the words."
        )
    both = sorted(set(turns.truncated) & set(turns.left_out))
    if both:
        yield (
            f"turns.truncated and turns.left_out both name {', '.join(both)}. Keep each in one of "
            "them; in neither an episode is graded as it is."
        )
    if engine.min_tokens:
        yield (
            f"engine.min_tokens={engine.min_tokens} is for an answer of one turn, and turns may be "
            "as short as a call. Leave it out."
        )
    if turns.turn_tokens > engine.max_tokens:
        yield (
            f"turns.turn_tokens={turns.turn_tokens} is more than engine.max_tokens="
            f"{engine.max_tokens}, which is for all turns of an episode. Lower the first or raise "
            "the second."
        )
    if turns.timeout > turns.episode_timeout:
        yield (
            f"turns.timeout={turns.timeout:g} is more than turns.episode_timeout="
            f"{turns.episode_timeout:g}, which is for all calls of an episode. Lower the first or "
            "raise the second."
        )
    if not turns.environment and turns.max_calls == 0 and turns.max == 1:
        yield (
            "turns.max=1 with turns.tools: the policy would never read what a tool answers. Raise "
            "turns.max."
        )


REFUSED = (turns_without_an_environment, recipes_without_turns, limits_of_turns)
