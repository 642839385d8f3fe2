"""Rules for groups of graded answers: what can't be trained, and what is doubtful."""

from __future__ import annotations

from collections.abc import Iterator

from groupwise.config.adapter_checks import dropout_in_a_sequence_ratio
from groupwise.config.fields import Config
from groupwise.config.reading import DEFAULTS
from groupwise.config.values import flat
from groupwise.engine.backends import capabilities_of
from groupwise.hub import names_model
from groupwise.methods.composition import Recipe
from groupwise.methods.mixtures import ASKED, INSTEAD
from groupwise.methods.slots import Slot
from groupwise.model.formats.checkpoint import stored_shape
from groupwise.optim.row_streams import FLAWED, is_flawed
from groupwise.optim.turn_streams import OF_EPISODES
from groupwise.prepare.teacher_prompts import SIBLING
from groupwise.records import Memory, Visit
from groupwise.stages import lag_checks
from groupwise.stages.ignored import ignored
from groupwise.streams import STREAMS
from groupwise.testing.toy import random_toy

TAKES_ONE = "reinforce_pp, remax or reinforce"
# Streams that an answer has because it was sampled in this run.
OF_SAMPLES = ("sampler_logp_NT", "sampler_topk_logp_NTK", "sampler_topk_id_NTK", "greedy_reward_N",
              "step_value_NT")  # fmt: skip
SMALL_BATCH = 32  # completions
SINGLES = 24  # answers of the trial, each alone in its group


def source_without_a_sampler(config: Config, recipe: Recipe) -> Iterator[str]:
    """Refuse to read of answers of the data what only samples have, and settings of sampling."""
    if recipe.samples:
        return
    lacking = [name for name in recipe.streams if name in OF_SAMPLES]
    if lacking:
        yield (
            f"recipe {recipe.name} reads {lacking[0]} ({STREAMS[lacking[0]]}), and answers of the "
            f"data (source {recipe.source}) have none. Take slots that do not compare with the "
            "sampler, such as ratio on_policy and gate score."
        )
    if recipe.refilling:
        yield (
            f"filter {recipe.refilling[0]} draws again until answers differ, and a row of the data "
            "has the same answer every time. Remove it from recipe.filter."
        )
    values = flat(config)
    for name in ("group_size", "engine.temperature", "engine.weights", "overlong"):
        if values[name] != DEFAULTS[name]:
            why = ", which learns from the data's own answers and samples none. Leave it out."
            yield ignored(config, name, recipe.name, why)


def siblings_of_nobody(config: Config, recipe: Recipe) -> Iterator[str]:
    """Refuse a teacher that would not see the answers which it is to teach with."""
    asked = config.teacher
    if "taught_N" in recipe.streams and (
        asked.path != "policy" or f"{{{SIBLING}}}" not in asked.prompt
    ):
        yield (
            f"recipe {recipe.name} learns from the policy itself as it reads an answer of the "
            "group that succeeded. Set teacher.path=policy, teacher.update=ema:0.95 and a "
            "teacher.prompt with that answer in it, for example "
            f"teacher.prompt='{{prompt}}\\n\\nA right solution: {{{SIBLING}}}'."
        )


def episodes_of_nobody(config: Config, recipe: Recipe) -> Iterator[str]:
    """Refuse recipes that tell turns apart where the policy has one alone."""
    lacking = [name for name in recipe.streams if name in OF_EPISODES]
    if lacking and not config.turns.used:
        yield (
            f"recipe {recipe.name} reads {STREAMS[lacking[0]]} ({lacking[0]}), and nothing answers "
            "the policy. Set turns.environment or turns.tools, or take a recipe for one turn, such "
            "as dr_grpo."
        )


def flaws_without_a_judge(config: Config, recipe: Recipe) -> Iterator[str]:
    named = any(is_flawed(name) for name in config.reward.parts)
    if "flawed_N" in recipe.streams and not named:
        yield (
            f"recipe {recipe.name} reads which right answers are {FLAWED}, and no part of the "
            f'reward says so. Add one of that name: reward.parts."mine.py:{FLAWED}" = 0, a '
            "function that returns 1 for a flawed answer."
        )


def batch_smaller_than_updates(config: Config, recipe: Recipe) -> Iterator[str]:
    samples = recipe.rows(config.group_size)
    updates, rows = recipe.updates, config.prompts_per_step * samples
    if rows < updates:
        yield (
            f"{config.prompts_per_step} prompts x {samples} samples = {rows} completions "
            f"can't be split into the {updates} updates of {recipe.name}. Raise prompts_per_step "
            f"or group_size, or set recipe.schedule.updates={rows} or less."
        )


def group_of_one(config: Config, recipe: Recipe) -> Iterator[str]:
    if recipe.rows(config.group_size) > 1:
        return
    alone = [slot for slot in (*recipe.filter, *recipe.advantage) if needs_a_group(slot)]
    if alone and not recipe.samples:
        yield (
            f"{alone[0].kind} {alone[0].name} compares an answer with the others of its group, and "
            f"there are none: a row of the data (source {recipe.source}) has one answer. Take "
            "the recipe sft, or slots that look at one answer."
        )
    elif alone:
        yield (
            f"group_size=1 with {alone[0].kind} {alone[0].name}: an answer is compared with the "
            "others of its group, and there are none, so nothing would be learned. Raise "
            f"group_size, or take a recipe for one sample per prompt: {TAKES_ONE}."
        )


def needs_a_group(slot: Slot) -> bool:
    """Try a filter or a baseline on groups of one answer: does it leave nothing to learn from?

    A filter may drop an answer for what it is like; one that drops all of many drops them for
    being alone. Prompts were seen before, for baselines that compare with earlier answers.
    """
    earlier = Memory(visits={number: (Visit(4, 0.3, 0.2),) for number in range(SINGLES)})
    batch = random_toy(0, groups=[1] * SINGLES).build(memory=earlier)
    try:
        if slot.kind == "filter":
            return not slot(batch).any()
        traits = slot.definition.traits
        return traits.base and not traits.blind and not slot(batch.task_reward_N, batch).any()
    except Exception:  # a slot of the user's that fails: the trial of slots says how
        return False


def sampler_narrower_than_learner(config: Config, recipe: Recipe) -> Iterator[str]:
    engine = config.engine
    narrowed = {
        "engine.top_p=1": engine.top_p < 1,
        "engine.top_k=0": engine.top_k > 0,
        "engine.min_tokens=0": engine.min_tokens > 0,
    }
    resets = [setting for setting, narrow in narrowed.items() if narrow]
    if resets and recipe.samples and "sampler_logp_NT" not in recipe.streams:
        now = ", ".join(
            f"{r.partition('=')[0]}={flat(config)[r.partition('=')[0]]}" for r in resets
        )
        yield (
            f"{now}: answers would come from a narrower distribution than the one whose "
            f"log-probability is learned, and {recipe.name} does not correct for it. Set "
            f"{' '.join(resets)}, or take a recipe that weighs by the sampler's "
            "log-probability, such as tis or olmo3."
        )


def exact_in_name_only(config: Config, recipe: Recipe) -> Iterator[str]:
    """Warn of what the captured sampler and the kernels of the head leave to the plain way."""
    engine = config.engine
    reasons = {
        f"engine.top_p={engine.top_p:g}": engine.top_p < 1,
        f"engine.top_k={engine.top_k}": engine.top_k > 0,
        f"engine.weights={engine.weights}": engine.weights != "shared",
        f"{recipe.gate}, which reads the likeliest tokens": any(
            "topk" in name for name in (*recipe.streams, *recipe.outputs)
        ),
    }
    found = [reason for reason, there in reasons.items() if there]
    if engine.exact and found:
        yield (
            f"engine.exact=true can't hold with {', '.join(found)}: there sampler and learner take "
            "different ways, and differ in last bits. Set engine.exact=false, or leave that out."
        )


def experts_of_a_dense_model(config: Config, recipe: Recipe) -> Iterator[str]:
    """Refuse recipes and settings for mixtures of experts where the model has none to tell of.

    A model on a hub is looked at when its configuration is fetched (`GroupStage.check_tasks`).
    """
    if not names_model(config.model.path):
        yield from routes_not_told(config, recipe)


def routes_not_told(config: Config, recipe: Recipe) -> Iterator[str]:
    """Say why nobody could tell which experts a token visits, where that is read."""
    settings = {
        f"recipe {recipe.name} reads which experts a token visits": recipe.routed,
        "engine.record_routes=true records which experts a token visits": (
            config.engine.record_routes
        ),
        "model.freeze_router=true holds the routers of a mixture": config.model.freeze_router,
    }
    asking = [text for text, asks in settings.items() if asks]
    why = _why_no_routes(config) if asking else ""
    if why:
        instead = INSTEAD if recipe.routed else "leave it out"
        remedy = f"take {instead}" if recipe.routed else instead
        yield f"{asking[0]}, and {why}. Train {ASKED}, or {remedy}."


def _why_no_routes(config: Config) -> str:
    """Say why this model has no routes to tell; "" where it has, or can't be looked at."""
    if config.model.path == "tiny":
        return "" if config.tiny.experts else "the embedded model is dense (tiny.experts=0)"
    shape = stored_shape(config.model.path)
    if shape is None or shape.experts is not None:
        return ""
    if shape.native:
        return f"{config.model.path} ({shape.family}) is a dense model"
    return (
        f"{config.model.path} ({shape.family}) runs with the layers of transformers, which do not "
        "tell"
    )


def experts_not_recorded(config: Config, recipe: Recipe) -> Iterator[str]:
    asks = recipe.replays == "sampler" or config.engine.record_routes
    if asks and recipe.samples and not capabilities_of(config.engine).routes:
        what = (
            f"recipe {recipe.name} replays" if recipe.replays else "engine.record_routes asks for"
        )
        yield (
            f"{what} the experts that the sampler visited, and engine.backend="
            f"{config.engine.backend} does not record them. Set engine.backend=native, or "
            + ("take routing_replay." if recipe.replays else "engine.record_routes=false.")
        )


# --- doubtful ---------------------------------------------------------------------------------


def lengths_of_another_run(config: Config, recipe: Recipe) -> Iterator[str]:
    limit = config.engine.max_tokens
    for slot in recipe.shaping:
        traits, fitted = slot.definition.traits, slot.fitted(limit)
        if fitted and slot[traits.length] != limit:
            idle = traits.margin and limit <= slot[traits.length] - slot[traits.margin]
            settings = [f"recipe.shaping.{slot.name}.{key}={x}" for key, x in fitted.items()]
            yield (
                f"{slot} is made for answers of {slot[traits.length]} tokens, and "
                f"engine.max_tokens is {limit}{': it never acts' if idle else ''}. Write "
                f"{' '.join(settings)}."
            )
    weights = recipe.aggregation
    for key in weights.fitted(limit):
        if weights[key] != limit:
            yield (
                f"{weights} divides by {weights[key]}, the paper's generation budget, and "
                f"engine.max_tokens is {limit}. Write recipe.aggregation.{key}={limit}."
            )


def means_of_turns(config: Config, recipe: Recipe) -> Iterator[str]:
    for link in recipe.advantage:
        if link.definition.traits.step_means:
            yield (
                f"{link.name} subtracts a mean at every step and adds up what is left: where the "
                "policy decides how many steps there are, that is a hidden charge on going on (in "
                "an enumerated game a true gradient of -0.048 becomes -0.09 to -0.12). If the "
                "number of steps varies, take recipe.advantage='turn_return_to_go()'."
            )


def small_batch(config: Config, recipe: Recipe) -> Iterator[str]:
    rows = config.prompts_per_step * config.group_size
    if recipe.samples and rows < SMALL_BATCH:
        yield (
            f"{rows} completions a step are few: most of what an update does is noise. Raise "
            "prompts_per_step or group_size; optim.micro_tokens bounds the memory."
        )


REFUSED = (
    source_without_a_sampler,
    siblings_of_nobody,
    episodes_of_nobody,
    flaws_without_a_judge,
    batch_smaller_than_updates,
    group_of_one,
    sampler_narrower_than_learner,
    exact_in_name_only,
    experts_of_a_dense_model,
    experts_not_recorded,
    dropout_in_a_sequence_ratio,
    *lag_checks.REFUSED,
)
DOUBTFUL = (lengths_of_another_run, means_of_turns, small_batch, *lag_checks.DOUBTFUL)
