"""Which combinations are refused, and which are doubtful: each rule with its reason and remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from groupwise.methods.composition import Recipe
    from groupwise.methods.traits import Traits

Rule = Callable[["Recipe"], Iterator[str]]


def complaints(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Say what makes no sense, and what is probably not meant."""
    refused = [text for rule in REFUSED for text in rule(recipe)]
    doubtful = [text for rule in DOUBTFUL for text in rule(recipe)]
    return refused, doubtful


def _with(recipe: Recipe, kind: str, holds: Callable[[Traits], bool]) -> str:
    """Return the slot of a kind of which a fact holds, the first by name; "" if there is none."""
    return min((s.name for s in recipe.of(kind) if holds(s.definition.traits)), default="")


def _anchor(recipe: Recipe) -> str:
    return recipe.ratio.get("anchor", "none")


def _level(recipe: Recipe) -> str:
    return recipe.ratio.definition.traits.level


# --- refused ----------------------------------------------------------------------------------


def advantage_chain(recipe: Recipe) -> Iterator[str]:
    if not recipe.advantage:
        yield "the advantage chain is empty. Start it with a baseline, for example group_mean()."
        return
    first, *rest = recipe.advantage
    if not first.definition.traits.base:
        yield (
            f"the advantage chain starts with {first.name}, which only modifies an advantage. "
            "Put a baseline first, for example group_mean()."
        )
    for link in rest:
        if link.definition.traits.base:
            yield (
                f"{link.name} would throw away what {first.name} computed: a chain has one "
                "baseline, at its start. Keep one of the two."
            )


def no_slot_twice(recipe: Recipe) -> Iterator[str]:
    for kind in ("filter", "shaping", "advantage", "correction", "penalty", "auxiliary"):
        names = [slot.name for slot in recipe.of(kind)]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"{kind} {name} stands there twice. Merge the two into one."


def mismatch_counted_twice(recipe: Recipe) -> Iterator[str]:
    weighing = [
        s for s in recipe.correction if "sampler_logp_NT" in s.needs and s.definition.traits.weighs
    ]
    if len(weighing) > 1:
        yield (
            f"corrections {weighing[0].name} and {weighing[1].name} both weigh by learner/sampler: "
            "the mismatch would count twice. Keep one, or make the other mask_sequence()."
        )
    if weighing and _anchor(recipe) == "sampler":
        yield (
            f"correction {weighing[0].name} weighs by learner/sampler, and the ratio's anchor is "
            "the sampler, so it contains that factor already. Use anchor='old', or no correction."
        )


def ratio_fits_gate(recipe: Recipe) -> Iterator[str]:
    level, traits = _level(recipe), recipe.gate.definition.traits
    if traits.ratio == "none" and level != "none":
        yield (
            f"gate {recipe.gate.name} reads no ratio, so ratio {recipe.ratio.name} would be "
            "ignored. Use ratio=on_policy(), or a gate such as clip()."
        )
    if level == "none" and traits.ratio != "none":
        yield (
            f"gate {recipe.gate.name} works on a ratio, and ratio on_policy has none: it would "
            "never act. Use gate=score(), or ratio=token()."
        )
    if traits.ratio == "segment" and level != "segment":
        yield f"gate {recipe.gate.name} clips segments: use it with ratio=segment_geomean()."
    if traits.anchor == "sampler" and _anchor(recipe) != "sampler":
        yield (
            f"gate {recipe.gate.name} measures the distance to the sampler, so its ratio must "
            "too: use ratio=token(anchor='sampler')."
        )
    if traits.per_answer and level == "sequence":
        yield (
            f"{recipe.gate.name} takes the mean over the answer itself; on a sequence ratio its "
            "per-token clip means nothing. Use ratio=token()."
        )


def token_links(recipe: Recipe) -> Iterator[str]:
    spread = [link for link in recipe.advantage if link.definition.traits.per_token]
    for link in recipe.advantage:
        behind = spread and recipe.advantage.index(spread[0]) < recipe.advantage.index(link)
        if behind and link.definition.traits.per_row:
            yield (
                f"{link.name} works on one number per answer, and {spread[0].name} gives one per "
                "token: padding would enter its statistics. Use whiten_tokens()."
            )


def gate_needs_token_ratio(recipe: Recipe) -> Iterator[str]:
    if recipe.gate.definition.traits.ratio == "token" and _level(recipe) != "token":
        yield (
            f"gate {recipe.gate.name} decides token by token, and ratio {recipe.ratio.name} is one "
            "number for many. Use ratio=token()."
        )


def ignored_rewards(recipe: Recipe) -> Iterator[str]:
    if not recipe.advantage:
        return
    traits = recipe.advantage[0].definition.traits
    per_token = _with(recipe, "shaping", lambda shaping: shaping.per_token)
    if per_token and not traits.dense:
        yield (
            f"{per_token} gives rewards per token, which {recipe.advantage[0].name} does not "
            "read. Use kl_per_sequence(), or an advantage such as return_to_go()."
        )
    if recipe.shaping and not traits.outcome:
        yield (
            f"{recipe.advantage[0].name} reads {'no' if traits.blind else 'step'} rewards"
            f"{'' if traits.blind else ' only'}, so shaping {recipe.shaping[0].name} would be "
            f"ignored. {'Remove it' if traits.blind else 'Shape the step rewards instead'}."
        )


def shaping_beside_branches(recipe: Recipe) -> Iterator[str]:
    valued = [link for link in recipe.advantage if "step_value_NT" in link.needs]
    if valued and recipe.shaping:
        yield (
            f"{valued[0].name} compares the reward of an answer with those of its branches, and "
            f"shaping {recipe.shaping[0].name} changes the answer's alone. Put it into the reward "
            "(reward.parts), or a KL into penalty."
        )


def baseline_for_dropped_groups(recipe: Recipe) -> Iterator[str]:
    taught = _with(recipe, "advantage", lambda traits: traits.uniform == "teaches")
    dropping = _with(recipe, "filter", lambda traits: traits.uniform == "drops")
    if taught and dropping:
        yield (
            f"filter {dropping} takes out the uniform groups that {taught} is there to "
            "learn from. Keep one of the two."
        )


def critic_nobody_reads(recipe: Recipe) -> Iterator[str]:
    readers = [s for s in recipe.auxiliary if s.definition.traits.learns != "critic"]
    reads = any("old_value_NT" in slot.needs for slot in (*recipe.advantage, *readers))
    critic = _with(recipe, "auxiliary", lambda traits: traits.learns == "critic")
    if critic and not reads:
        yield f"{critic} trains a critic that no advantage reads. Use gae(), or drop the loss."
    reads = any("prm_logp_NT" in link.needs for link in recipe.advantage)
    model = _with(recipe, "auxiliary", lambda traits: traits.learns == "prm")
    if model and not reads:
        yield f"{model} trains a reward model that no advantage reads. Use process_rloo()."


def nothing_teaches(recipe: Recipe) -> Iterator[str]:
    others = [s for s in (*recipe.penalty, *recipe.auxiliary) if not s.definition.traits.kl]
    if recipe.gate.definition.traits.mute and not others:
        yield (
            f"gate {recipe.gate.name} leaves the policy's term out, and no other term learns from "
            "advantages. Add one, such as group_contrast(), or take gate=score()."
        )


def settings_fit_each_other(recipe: Recipe) -> Iterator[str]:
    for slot in recipe.slots():
        band = slot.kind in ("filter", "correction") and "low" in slot and "high" in slot
        if band and slot["low"] >= slot["high"]:
            yield f"{slot} keeps nothing: low must be below high."
        why = slot.definition.traits.refuses(dict(slot.params))
        if why:
            yield f"{slot}{why}"


# --- doubtful ---------------------------------------------------------------------------------


def clip_range_fits_level(recipe: Recipe) -> Iterator[str]:
    if not {"low", "high"} <= {key for key, _ in recipe.gate.params}:
        return
    widest = max(recipe.gate["low"], recipe.gate["high"])
    if recipe.ratio.definition.traits.averages and widest >= 0.1:
        yield (
            f"{recipe.gate} on {recipe.ratio.name}: the mean over an answer moves by about 1e-3, "
            "so a range of 0.1 or more never acts. GSPO uses clip(0.0003, 0.0004)."
        )
    if _level(recipe) == "token" and 0 < widest < 0.01:
        yield (
            f"{recipe.gate} on a ratio per token clips nearly every token. That range is meant "
            "for ratio=sequence_geomean(); per token 0.2 is usual."
        )


def sequence_ratio_per_token(recipe: Recipe) -> Iterator[str]:
    sequence = _level(recipe) == "sequence" or recipe.gate.definition.traits.per_answer
    aggregation, gate = recipe.aggregation.definition.traits, recipe.gate.definition.traits
    on_purpose = aggregation.counts_tokens or gate.counts_tokens
    if sequence and not aggregation.per_answer and not on_purpose:
        yield (
            f"with {recipe.aggregation.name} an answer weighs by its length, although its ratio "
            "is one number. Use seq_mean_token_mean() for the published method."
        )
    if sequence and recipe.schedule.definition.traits.passes > 1:
        yield (
            f"{recipe.schedule.name} splits answers by token, and this recipe treats an answer as "
            "one. Use joint(), or a ratio per token."
        )


def knobs_without_effect(recipe: Recipe) -> Iterator[str]:
    for slot in (*recipe.penalty, *recipe.shaping, *recipe.auxiliary, *recipe.advantage):
        if slot.get("coef", slot.get("weight")) == 0:
            held = ", and holds a reference model in memory" if "ref_logp_NT" in slot.needs else ""
            yield f"{slot} does nothing{held}. Take it out."
    if recipe.gate.definition.traits.below_one and recipe.gate["low"] >= 1:
        yield f"{recipe.gate}: ratios are positive, so a lower range of 1 or more never acts."


def kl_without_effect(recipe: Recipe) -> Iterator[str]:
    for slot in (*recipe.penalty, *recipe.shaping, *recipe.auxiliary):
        if slot.kind != "shaping" and "estimator" in slot and slot["estimator"] == "k1":
            yield (
                "k1 in the loss has zero expected gradient: it only adds noise. Use estimator='k2' "
                "(or k3), or put k1 in the reward."
            )
    terms = [
        s
        for s in (*recipe.shaping, *recipe.advantage, *recipe.penalty, *recipe.auxiliary)
        if s.definition.traits.kl
    ]
    if len(terms) > 1:
        yield (
            f"KL to the reference stands there twice ({terms[0].kind} {terms[0].name}, "
            f"{terms[1].kind} {terms[1].name}). Keep one of the two."
        )


def token_advantage_under_sequence_ratio(recipe: Recipe) -> Iterator[str]:
    ratio = recipe.ratio.definition.traits
    sequence = ratio.level == "sequence" and not ratio.token_gradient
    sequence = sequence or recipe.gate.definition.traits.per_answer
    links = [link for link in recipe.advantage if link.definition.traits.per_token]
    if sequence and links:
        yield (
            f"{links[0].name} gives every token its own advantage, and the answer's ratio has one "
            "gradient for all. Use ratio=geomean_token_grad()."
        )


def anchors_differ(recipe: Recipe) -> Iterator[str]:
    readers = [s for s in (recipe.gate, *recipe.penalty) if "old_logp_NT" in s.needs]
    if readers and _anchor(recipe) == "sampler":
        yield (
            f"{readers[0].name} goes by the learner's old probabilities, and the ratio by the "
            "sampler's. Use anchor='old'."
        )


def rewards_outside_a_method(recipe: Recipe) -> Iterator[str]:
    binary = _with(recipe, "advantage", lambda traits: traits.binary)
    shaped = _with(recipe, "shaping", lambda traits: traits.lowers)
    if binary and shaped:
        yield (
            f"{binary} divides by the group's mean reward, which {shaped} can bring near 0 or "
            "below. Give it rewards of 0 and 1."
        )
    rescaling = _with(recipe, "advantage", lambda traits: traits.uniform == "rescales")
    dropping = _with(recipe, "filter", lambda traits: traits.uniform == "drops")
    if rescaling and dropping:
        yield (
            f"{rescaling} makes up for dead groups, and filter {dropping} takes "
            "them out. Keep one of the two."
        )


def reward_model_read_as_trained(recipe: Recipe) -> Iterator[str]:
    betas = {s["beta"] for s in (*recipe.advantage, *recipe.auxiliary) if "beta" in s}
    if len(betas) > 1:
        yield (
            f"the implicit reward model is trained at one β and read at another ({sorted(betas)}). "
            "Set both alike."
        )


def stale_policy_gradient(recipe: Recipe) -> Iterator[str]:
    mute = recipe.gate.definition.traits.mute  # another term learns, and minds the old policy
    if _level(recipe) == "none" and not mute and recipe.schedule["updates"] > 1:
        yield (
            f"{recipe.schedule['updates']} updates per batch without a ratio: all but the first "
            "are off-policy and nothing corrects them. Use updates=1, or ratio=token()."
        )


def routes_and_updates(recipe: Recipe) -> Iterator[str]:
    updates = recipe.schedule["updates"]
    if recipe.replays == "sampler" and updates > 1:
        yield (
            f"{updates} updates go through the experts that the sampler visited: all but the first "
            "learn with experts that the policy might not choose any more, and R3 never says so. "
            "Use schedule.updates=1, or replay_routing('learner')."
        )
    if recipe.replays == "learner" and updates == 1:
        yield (
            "with one update a batch the learner would choose the same experts anyway: replaying "
            "them changes nothing, and costs a forward pass. Set schedule.updates=4, or leave "
            "replay_routing() out."
        )


def normalised_twice(recipe: Recipe) -> Iterator[str]:
    scaled = _with(recipe, "advantage", lambda traits: traits.scales and traits.base)
    again = _with(recipe, "advantage", lambda traits: traits.scales and not traits.base)
    if scaled and again:
        yield (
            f"{scaled} and {again} normalise the same rewards twice. With the second, "
            "group_mean() is enough."
        )


def frozen_helper(recipe: Recipe) -> Iterator[str]:
    needs = {name for link in recipe.advantage for name in link.needs}
    trained = {term.definition.traits.learns for term in recipe.auxiliary}
    if "old_value_NT" in needs and "critic" not in trained:
        yield "the advantage reads a critic that nothing trains. Add auxiliary value_loss()."
    if "prm_logp_NT" in needs and "prm" not in trained:
        yield "the advantage reads a reward model that nothing trains. Add outcome_bce()."


def discounts_differ(recipe: Recipe) -> Iterator[str]:
    gammas = {slot["gamma"] for slot in (*recipe.advantage, *recipe.auxiliary) if "gamma" in slot}
    if len(gammas) > 1:
        yield (
            f"advantage and value loss discount differently ({sorted(gammas)}): the critic would "
            "predict other returns than the advantage reads. Set both gammas alike."
        )


REFUSED: tuple[Rule, ...] = (
    advantage_chain,
    no_slot_twice,
    mismatch_counted_twice,
    ratio_fits_gate,
    gate_needs_token_ratio,
    token_links,
    shaping_beside_branches,  # before the next, whose remedies are shapings too
    ignored_rewards,
    baseline_for_dropped_groups,
    critic_nobody_reads,
    nothing_teaches,
    settings_fit_each_other,
)
DOUBTFUL: tuple[Rule, ...] = (
    clip_range_fits_level,
    sequence_ratio_per_token,
    knobs_without_effect,
    kl_without_effect,
    token_advantage_under_sequence_ratio,
    anchors_differ,
    rewards_outside_a_method,
    reward_model_read_as_trained,
    stale_policy_gradient,
    routes_and_updates,
    normalised_twice,
    frozen_helper,
    discounts_differ,
)
