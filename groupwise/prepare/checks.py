"""What is known before anything expensive: what can't be trained, and what is doubtful.

Each rule says what, why and what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches

from groupwise.config.adapter_checks import (
    ANY_DOUBTFUL,
    ANY_REFUSED,
    dropout_in_a_sequence_ratio,
)
from groupwise.config.fields import AUTO, Config, is_generator
from groupwise.config.reading import DEFAULTS
from groupwise.config.values import FIELDS, checked, flat
from groupwise.engine.backends import capabilities_of
from groupwise.errors import ConfigError
from groupwise.methods.composition import PairRecipe, Recipe
from groupwise.methods.slots import Slot
from groupwise.methods.soundness import complaints
from groupwise.methods.trainable import lacking
from groupwise.records import Memory, Visit
from groupwise.testing.toy import random_toy
from groupwise.watch.rules import RULES

Rule = Callable[[Config, Recipe], Iterator[str]]
PairRule = Callable[[Config, PairRecipe], Iterator[str]]

TAKES_ONE = "reinforce_pp, remax or reinforce"
SMALL_BATCH = 32  # completions
SINGLES = 24  # answers of the trial, each alone in its group


def check_config(config: Config) -> list[str]:
    """Refuse what can't be trained, and return what is doubtful."""
    for name, value in flat(config).items():
        checked(name, FIELDS[name], value)
    capabilities_of(config.engine)  # an engine that is not there can do nothing
    recipe = config.recipe
    if isinstance(recipe, PairRecipe):
        refused = [text for rule in PAIRS_REFUSED for text in rule(config, recipe)]
        doubtful = [text for rule in PAIRS_DOUBTFUL for text in rule(config, recipe)]
    else:
        refused = [text for rule in REFUSED for text in rule(config, recipe)]
        doubtful = [text for rule in DOUBTFUL for text in rule(config, recipe)]
    if refused:
        raise ConfigError("\n".join(refused))
    if (
        isinstance(recipe, Recipe) and recipe.about.family != "dialect"
    ):  # which repeats what a tool does, doubtful or not
        doubtful = complaints(recipe)[1] + doubtful
    return doubtful


# --- refused ----------------------------------------------------------------------------------


def models_not_held(config: Config, recipe: Recipe) -> Iterator[str]:
    for lack in lacking(recipe):
        yield f"recipe {recipe.name} {lack}"


def batch_smaller_than_updates(config: Config, recipe: Recipe) -> Iterator[str]:
    updates, rows = recipe.schedule["updates"], config.prompts_per_step * config.group_size
    if rows < updates:
        yield (
            f"{config.prompts_per_step} prompts x {config.group_size} samples = {rows} completions "
            f"can't be split into the {updates} updates of {recipe.name}. Raise prompts_per_step "
            f"or group_size, or set recipe.schedule.updates={rows} or less."
        )


def group_of_one(config: Config, recipe: Recipe) -> Iterator[str]:
    if config.group_size > 1:
        return
    alone = [slot for slot in (*recipe.filter, *recipe.advantage) if needs_a_group(slot)]
    if alone:
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
        return slot.definition.traits.base and not slot(batch.task_reward_N, batch).any()
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
    if resets and "sampler_logp_NT" not in recipe.streams:
        now = ", ".join(
            f"{r.partition('=')[0]}={flat(config)[r.partition('=')[0]]}" for r in resets
        )
        yield (
            f"{now}: answers would come from a narrower distribution than the one whose "
            f"log-probability is learned, and {recipe.name} does not correct for it. Set "
            f"{' '.join(resets)}, or take a recipe that weighs by the sampler's "
            "log-probability, such as tis or olmo3."
        )


def greedy_training(config: Config, recipe: Recipe | PairRecipe) -> Iterator[str]:
    if config.engine.temperature == 0:
        yield (
            "engine.temperature=0 gives the same answer every time: nothing to choose between. "
            "Train at 1.0; eval.temperature is set apart."
        )


def knobs_that_the_recipe_ignores(config: Config, recipe: Recipe | PairRecipe) -> Iterator[str]:
    ignored = {
        "reference.update": "reference" not in recipe.models,
        "optim.exponent_rate": "length_exponent" not in getattr(recipe, "outputs", ()),
        "refills": not recipe.refilling,
        "refill_tokens": not recipe.refilling or config.refills == 0,
    }
    draws_again = "no filter of it draws again: add recipe.filter='zero_variance()'"
    remedy = {
        "reference.update": "it has no KL to a reference: add recipe.penalty='kl(coef=0.01)'",
        "optim.exponent_rate": "it learns no length exponent: take lambda_grpo",
        "refills": draws_again,
        "refill_tokens": "refills=0 draws nothing again" if recipe.refilling else draws_again,
    }
    values = flat(config)
    for name, unused in ignored.items():
        if unused and values[name] != DEFAULTS[name]:
            yield (
                f"{name}={values[name]} would be ignored by {recipe.name}, as {remedy[name]}, or "
                "leave it out."
            )


def numbers_that_do_not_fit(config: Config, recipe: Recipe | PairRecipe) -> Iterator[str]:
    engine, tiny, optim = config.engine, config.tiny, config.optim
    if engine.min_tokens > engine.max_tokens:
        yield (
            f"engine.min_tokens={engine.min_tokens} is more than engine.max_tokens="
            f"{engine.max_tokens}. Lower the first or raise the second."
        )
    if "" in engine.stop:
        yield "engine.stop holds an empty text, which would end every answer at once. Remove it."
    if config.model.path == "tiny" and tiny.width % (2 * tiny.heads):
        yield (
            f"tiny.width={tiny.width} can't be split into {tiny.heads} heads of even width. Take a "
            f"multiple of {2 * tiny.heads}."
        )
    for name in ("beta1", "beta2"):
        if getattr(optim, name) == 1:
            yield f"optim.{name}=1 never takes in a gradient. Keep it below 1."
    if not any(config.reward.parts.values()):
        yield (
            "reward.parts gives nothing a weight, so every answer is worth the same. Write for "
            "example reward.parts.number=1.0."
        )


def exact_without_kernels(config: Config, recipe: Recipe | PairRecipe) -> Iterator[str]:
    model = config.model
    on_gpu = model.device.partition(":")[0] in ("cuda", AUTO)
    if not config.engine.exact or (on_gpu and model.dtype in ("bfloat16", AUTO)):
        return
    on_cpu = model.device == "cpu" and model.dtype == "float32"
    yield (
        f"engine.exact=true is for a GPU in bfloat16, and this is {model.dtype} on {model.device}. "
        "Set engine.exact=false"
        + (": sampler and learner agree to about the last bit here anyway." if on_cpu else ".")
    )


def exact_in_name_only(config: Config, recipe: Recipe) -> Iterator[str]:
    """What the captured sampler and the kernels of the head do not do takes the plain way."""
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


def beyond_the_engine(config: Config, recipe: Recipe | PairRecipe) -> Iterator[str]:
    engine, can = config.engine, capabilities_of(config.engine)
    if engine.weights != "shared" and not can.copies:
        yield (
            f"engine.weights={engine.weights} would be ignored: engine.backend={engine.backend} "
            "knows no such copies. Leave it out, or set engine.backend=native."
        )
    elif engine.exact and engine.weights == "shared" and not can.exact:
        yield (
            f"engine.exact=true can't hold with engine.backend={engine.backend}, which does not "
            "give the learner's bits. Set engine.exact=false, or engine.backend=native."
        )


def likeliest_tokens_not_recorded(config: Config, recipe: Recipe) -> Iterator[str]:
    can, name = capabilities_of(config.engine), config.engine.backend
    if "sampler_topk_logp_NTK" in recipe.streams and not can.top_k_logps:
        yield (
            f"recipe {recipe.name} reads the sampler's likeliest tokens, and engine.backend="
            f"{name} does not record them. Set engine.backend=native, or take a recipe "
            "without them."
        )


def pairs_without_a_choice(config: Config, recipe: PairRecipe) -> Iterator[str]:
    reads = recipe.reads
    if reads == "grades" and config.group_size < 2:
        yield (
            f"recipe {recipe.name} pairs the best answer of a group with its worst, and group_size "
            "is 1. Take 4 or more."
        )
    if config.overlong != "recipe":
        yield (
            f"overlong={config.overlong} would be ignored by {recipe.name}, which learns from "
            "pairs. Leave it out."
        )


def pairs_from_one_sample(config: Config, recipe: PairRecipe) -> Iterator[str]:
    reads = recipe.reads
    if reads == "answers" and config.group_size > 1:
        yield (
            f"recipe {recipe.name} reads one sample a prompt: group_size={config.group_size} is "
            "sampled for nothing. Set group_size=1."
        )
    if recipe.reference == "the previous iterate" and config.reference.update == "frozen":
        yield (
            f"{recipe.name}'s reference is the previous iterate, and here it stays the starting "
            "policy. Set reference.update=reset:STEPS to begin a new iteration every so often."
        )


def budget_never_reached(config: Config, recipe: PairRecipe) -> Iterator[str]:
    if config.budget.tokens and recipe.reads == "labels":
        yield (
            f"budget.tokens={config.budget.tokens} is never reached: {recipe.name} learns from "
            "labels and samples nothing. Set budget.seconds or steps."
        )


def unknown_rules(config: Config, recipe: Recipe | PairRecipe) -> Iterator[str]:
    known = [rule.name for rule in RULES]
    for name in config.watch.stop:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            yield (
                f"watch.stop names {name!r}, which is no health rule: {meant}Rules are "
                f"{', '.join(known)}."
            )


# --- doubtful ---------------------------------------------------------------------------------


def lengths_of_another_run(config: Config, recipe: Recipe) -> Iterator[str]:
    limit = config.engine.max_tokens
    for slot in recipe.shaping:
        if slot.name == "soft_overlong" and slot["max_length"] != limit:
            idle = limit <= slot["max_length"] - slot["cache"]
            yield (
                f"{slot} is made for answers of {slot['max_length']} tokens, and engine.max_tokens "
                f"is {limit}{': it never acts' if idle else ''}. Write "
                f"recipe.shaping.soft_overlong.max_length={limit} "
                f"recipe.shaping.soft_overlong.cache={max(1, limit // 4)}."
            )
    weights = recipe.aggregation
    if weights.name == "seq_mean_token_sum_norm" and weights["length"] != limit:
        yield (
            f"{weights} divides by {weights['length']}, the paper's generation budget, and "
            f"engine.max_tokens is {limit}. Write recipe.aggregation.length={limit}."
        )


def small_batch(config: Config, recipe: Recipe | PairRecipe) -> Iterator[str]:
    rows = config.prompts_per_step * config.group_size
    if rows < SMALL_BATCH:
        yield (
            f"{rows} completions a step are few: most of what an update does is noise. Raise "
            "prompts_per_step or group_size; optim.micro_tokens bounds the memory."
        )


def schedule_without_a_run(config: Config, recipe: Recipe | PairRecipe) -> Iterator[str]:
    warmup, steps = config.optim.warmup_steps, config.steps
    if warmup >= steps:
        yield (
            f"optim.warmup_steps={warmup} is all of steps={steps}: the learning rate never arrives."
        )
    if not config.checkpoint.every_steps and not config.checkpoint.every_seconds:
        yield (
            "no checkpoints on the way: a run that is killed starts over. Set "
            "checkpoint.every_seconds=600."
        )


def settings_without_effect(config: Config, recipe: Recipe | PairRecipe) -> Iterator[str]:
    values = flat(config)
    unused = []
    if config.model.path != "tiny":
        unused += [(name, "model.path is not tiny") for name in FIELDS if name.startswith("tiny.")]
    if not any(map(is_generator, (*config.data.sources, *config.data.eval_sources))):
        unused += [("data.size", "no generator is in use")]
    if config.eval.samples > 1 and config.eval.temperature == 0:
        unused += [("eval.samples", "greedy answers are all the same: set eval.temperature")]
    if config.eval.points:
        unused += [("eval.every", "eval.points says how often")]
    for name, why in unused:
        if values[name] != DEFAULTS[name]:
            yield f"{name}={values[name]} has no effect: {why}."


def nothing_held_out(config: Config, recipe: Recipe | PairRecipe) -> Iterator[str]:
    if not config.data.evaluates:
        yield (
            "no held-out tasks, so no accuracy and no best checkpoint. Set data.eval to a file "
            "that is not in data.train, or data.holdout_share=0.05."
        )


REFUSED: tuple[Rule, ...] = (
    models_not_held,
    batch_smaller_than_updates,
    group_of_one,
    sampler_narrower_than_learner,
    greedy_training,
    knobs_that_the_recipe_ignores,
    numbers_that_do_not_fit,
    exact_without_kernels,
    beyond_the_engine,
    unknown_rules,
    exact_in_name_only,
    likeliest_tokens_not_recorded,
    dropout_in_a_sequence_ratio,
    *ANY_REFUSED,
)
DOUBTFUL: tuple[Rule, ...] = (
    lengths_of_another_run,
    small_batch,
    schedule_without_a_run,
    settings_without_effect,
    nothing_held_out,
    *ANY_DOUBTFUL,
)
PAIRS_REFUSED: tuple[PairRule, ...] = (
    pairs_without_a_choice,
    budget_never_reached,
    greedy_training,
    knobs_that_the_recipe_ignores,
    numbers_that_do_not_fit,
    exact_without_kernels,
    beyond_the_engine,
    unknown_rules,
    *ANY_REFUSED,
)
PAIRS_DOUBTFUL: tuple[PairRule, ...] = (
    pairs_from_one_sample,
    schedule_without_a_run,
    settings_without_effect,
    nothing_held_out,
    *ANY_DOUBTFUL,
)
