"""Checks before anything expensive: what can't be trained, and what is doubtful.

Each rule says what, why and what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches

from groupwise.config.adapter_checks import ANY_DOUBTFUL, ANY_REFUSED
from groupwise.config.fields import AUTO, Config, is_generator
from groupwise.config.reading import DEFAULTS
from groupwise.config.values import FIELDS, checked, flat
from groupwise.engine.backends import backend, capabilities_of
from groupwise.errors import ConfigError
from groupwise.methods.method import Method
from groupwise.optim.roles import ROLES
from groupwise.stages import lag_checks, stage_of
from groupwise.stages.coefficients import coefficients_of_nothing
from groupwise.stages.curriculum_checks import curriculum_of_what
from groupwise.stages.ignored import ignored
from groupwise.stages.run_checks import earlier_runs
from groupwise.stages.turn_checks import REFUSED as OF_TURNS
from groupwise.watch.rules import RULES

StageRule = Callable[[Config, Method], Iterator[str]]


def check_config(config: Config) -> list[str]:
    """Refuse what can't be trained, and return what is doubtful."""
    found = refusals(config)
    if found:
        raise ConfigError("\n".join(found))
    stage, recipe = stage_of(config), config.recipe
    return stage.doubtful() + [text for rule in DOUBTFUL for text in rule(config, recipe)]


def refusals(config: Config) -> list[str]:
    """Return all that speaks against training it."""
    for name, value in flat(config).items():
        checked(name, FIELDS[name], value)
    capabilities_of(config.engine)  # an engine that is not there can do nothing
    stage, recipe = stage_of(config), config.recipe
    found = [*stage.refused()]
    found += [text for rule in REFUSED for text in rule(config, recipe)]
    return found + [text for name in recipe.roles for text in ROLES[name].refused(config)]


# --- refused ----------------------------------------------------------------------------------


def budget_never_reached(config: Config, recipe: Method) -> Iterator[str]:
    if config.budget.tokens and not recipe.samples:
        yield (
            f"budget.tokens={config.budget.tokens} is never reached: {recipe.name} learns from "
            "the data's own answers and samples nothing. Set budget.seconds or steps."
        )


def epochs_of_what(config: Config, recipe: Method) -> Iterator[str]:
    """Refuse epochs where rows of the data are not what is learned, or steps say how long, too."""
    if not config.epochs:
        return
    asked = f"epochs={config.epochs:g}"
    if recipe.samples:
        yield (
            f"{asked} counts rows that are learned, and {recipe.name} learns from its own answers: "
            "say how long in steps, budget.tokens or budget.seconds."
        )
    if config.steps != DEFAULTS["steps"]:
        yield f"{asked} and steps={config.steps} both say how long. Keep one of the two."
    if config.data.weights:
        yield (
            f"{asked} of a mixture by weights is no one pass: small sources come round more often. "
            "Set steps."
        )


def gate_never_checked(config: Config, recipe: Method) -> Iterator[str]:
    if not config.until.accuracy:
        return
    gate = f"until.accuracy={config.until.accuracy:g} is never checked"
    if not config.data.evaluates or not config.eval.tasks:
        yield (
            f"{gate}: no tasks are held out. Set data.eval or data.holdout_share, and eval.tasks, "
            "or leave the gate out."
        )
    elif not config.eval.every and not config.eval.points:
        yield (
            f"{gate} on the way: eval.every=0 evaluates only at the start and the end. Set "
            "eval.every."
        )


def greedy_training(config: Config, recipe: Method) -> Iterator[str]:
    if config.engine.temperature == 0:
        yield (
            "engine.temperature=0 gives the same answer every time: nothing to choose between. "
            "Train at 1.0; eval.temperature is set apart."
        )


def knobs_that_the_recipe_ignores(config: Config, recipe: Method) -> Iterator[str]:
    others = [ROLES[name].settings for name in ROLES if name not in recipe.roles]
    without = {name: remedy for settings in others for name, remedy in settings.items()}
    if not recipe.refilling:
        draws_again = "no filter of it draws again: add recipe.filter='zero_variance()'"
        without |= {"refills": draws_again, "refill_tokens": draws_again}
    elif config.refills == 0:
        without["refill_tokens"] = "refills=0 draws nothing again"
    if recipe.judging is None:
        without["reward.rubric"] = "it does not judge its own answers: take recipe=self_rewarding"
    values = flat(config)
    for name, remedy in without.items():
        if values[name] != DEFAULTS[name]:
            yield ignored(config, name, recipe.name, f", as {remedy}, or leave it out.")


def knobs_of_rows(config: Config, recipe: Method) -> Iterator[str]:
    """Refuse settings of rows that are learned as they stand, where none are."""
    values = flat(config)
    for name in ("data.completion", "data.turns", "data.max_row_tokens"):
        if values[name] != DEFAULTS[name] and not recipe.supervised:
            why = f", which learns from {recipe.learns_from}. Leave it out, or take recipe=sft."
            yield ignored(config, name, recipe.name, why)


def numbers_that_do_not_fit(config: Config, recipe: Method) -> Iterator[str]:
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
    if tiny.experts and tiny.chosen > tiny.experts:
        yield (
            f"tiny.chosen={tiny.chosen} is more than tiny.experts={tiny.experts}: a token visits "
            "each expert once at the most. Lower the first or raise the second."
        )
    if not tiny.experts and tiny.chosen != DEFAULTS["tiny.chosen"]:
        yield (
            f"tiny.chosen={tiny.chosen} would be ignored: with tiny.experts=0 the embedded model "
            "is no mixture. Set tiny.experts, or leave it out."
        )
    for name in ("beta1", "beta2"):
        if getattr(optim, name) == 1:
            yield f"optim.{name}=1 never takes in a gradient. Keep it below 1."
    if recipe.reads_rewards and not any(config.reward.parts.values()):
        yield (
            "reward.parts gives nothing a weight, so every answer is worth the same. Write for "
            "example reward.parts.number=1.0."
        )


def exact_without_kernels(config: Config, recipe: Method) -> Iterator[str]:
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


def beyond_the_engine(config: Config, recipe: Method) -> Iterator[str]:
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


def servers_of_an_engine(config: Config, recipe: Method) -> Iterator[str]:
    """Refuse what an engine says against its own settings; rounded weights must be corrected."""
    engine = config.engine
    yield from backend(engine.backend).problems(engine)
    rounds = f"engine.quantization={engine.quantization}" if engine.quantization else ""
    if engine.weights == "fp8":
        rounds = "engine.weights=fp8"
    if rounds and recipe.samples and "sampler_logp_NT" not in recipe.streams:
        yield (
            f"{rounds} samples from weights that are not the "
            f"learner's, and recipe {recipe.name} does not correct for it: rewards fall in "
            "silence. Take one that does (recipe=tis, recipe=icepop), or add recipe.correction."
        )
    if (engine.urls or engine.servers) and str(recipe.source).startswith("reference"):
        yield (
            f"recipe {recipe.name} samples from its reference, and the servers of engine.backend="
            f"{engine.backend} hold the policy. Set engine.backend=native, without servers."
        )


def likeliest_tokens_not_recorded(config: Config, recipe: Method) -> Iterator[str]:
    can, name = capabilities_of(config.engine), config.engine.backend
    if "sampler_topk_logp_NTK" in recipe.streams and not can.top_k_logps:
        yield (
            f"recipe {recipe.name} reads the sampler's likeliest tokens, and engine.backend="
            f"{name} does not record them. Set engine.backend=native, or take a recipe "
            "without them."
        )


def unknown_rules(config: Config, recipe: Method) -> Iterator[str]:
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


def schedule_without_a_run(config: Config, recipe: Method) -> Iterator[str]:
    warmup, steps = config.optim.warmup_steps, config.steps
    if warmup >= steps and not config.epochs:
        yield (
            f"optim.warmup_steps={warmup} is all of steps={steps}: the learning rate never arrives."
        )
    if not config.checkpoint.every_steps and not config.checkpoint.every_seconds:
        yield (
            "no checkpoints on the way: a run that is killed starts over. Set "
            "checkpoint.every_seconds=600."
        )


def settings_without_effect(config: Config, recipe: Method) -> Iterator[str]:
    values = flat(config)
    unused = []
    if config.model.path != "tiny":
        unused += [(name, "model.path is not tiny") for name in FIELDS if name.startswith("tiny.")]
    if not any(map(is_generator, (*config.data.sources, *config.data.eval_sources))):
        unused += [("data.size", "no generator is in use")]
    if config.eval.samples > 1 and config.eval.temperature == 0:
        unused += [("eval.samples", "greedy answers are all the same: set eval.temperature")]
    for part in ("optim", "critic", "reward_model"):
        if values[f"{part}.schedule"] == "constant":
            unused += [(f"{part}.min_share", f"{part}.schedule=constant never falls")]
    if config.eval.points:
        unused += [("eval.every", "eval.points says how often")]
    for name, why in unused:
        if values[name] != DEFAULTS[name]:
            yield f"{name}={values[name]} has no effect: {why}."


def nothing_held_out(config: Config, recipe: Method) -> Iterator[str]:
    if not config.data.evaluates:
        yield (
            "no held-out tasks, so no accuracy and no best checkpoint. Set data.eval to a file "
            "that is not in data.train, or data.holdout_share=0.05."
        )


REFUSED: tuple[StageRule, ...] = (
    earlier_runs,
    budget_never_reached,
    epochs_of_what,
    gate_never_checked,
    greedy_training,
    knobs_that_the_recipe_ignores,
    knobs_of_rows,
    numbers_that_do_not_fit,
    exact_without_kernels,
    beyond_the_engine,
    servers_of_an_engine,
    likeliest_tokens_not_recorded,
    unknown_rules,
    curriculum_of_what,
    coefficients_of_nothing,
    *lag_checks.ANY,
    *OF_TURNS,
    *ANY_REFUSED,
)
DOUBTFUL: tuple[StageRule, ...] = (
    schedule_without_a_run,
    settings_without_effect,
    nothing_held_out,
    *ANY_DOUBTFUL,
)
