"""The kinds of recipe: records of slots. Composed from data, from scratch, or from text."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from groupwise.errors import RecipeError, RecipeWarning, nearest
from groupwise.methods.method import About, Method
from groupwise.methods.slots import Slot
from groupwise.methods.traits import nothing
from groupwise.streams import ROLE_FACTS

RECIPE_SLOTS = (
    "filter", "shaping", "advantage", "aggregation", "ratio", "gate", "correction", "penalty",
    "auxiliary", "schedule",
)  # fmt: skip
PAIR_SLOTS = ("pairing", "preference")
# Of the data, by the source that reads them there.
SOURCE_COLUMNS = {"data": ("completion",), "run": ("completion",)}
# The same, by what a pairing reads.
PAIR_COLUMNS = {
    "labels": ("chosen", "rejected"),
    "answers": ("completion",),  # a written solution, never the bare answer
    "grades": (),
    "judgements": (),
    "ranks": (),  # which recipes of reward models alone read
}
SUPERVISED_RATE_FACTOR = 20.0  # 2e-5 for all weights, 2e-4 with an adapter
OUTPUT_STREAMS = (
    "entropy_NT", "value_NT", "topk_logp_NTK", "topk_id_NTK", "logp_at_sampler_topk_NTK",
    "logp_at_teacher_topk_NTK", "router_NTLK", "router_NTE",
)  # fmt: skip
# What a mixture of experts alone can give.
ROUTED = ("old_router_NTLK", "router_NTLK", "expert_load_NTE", "router_NTE")
# What a pass of the policy says as an update begins, and before the updates.
NOW = ("now_logp_NT", "now_entropy_NT")
LOOKED_BACK = ("old_logp_NT", "old_router_NTLK", "expert_load_NTE", "old_square_mass_NT", *NOW)


@dataclass(frozen=True)
class Recipe(Method):
    """A policy-optimisation method: one value for every axis."""

    KINDS: ClassVar[tuple[str, ...]] = RECIPE_SLOTS
    WORD: ClassVar[str] = "A recipe"
    STAGE: ClassVar[str] = "groups"
    PLAIN: ClassVar[tuple[str, ...]] = ("source",)

    name: str
    advantage: tuple[Slot, ...]
    ratio: Slot
    gate: Slot
    aggregation: Slot
    schedule: Slot
    filter: tuple[Slot, ...] = ()
    shaping: tuple[Slot, ...] = ()
    correction: tuple[Slot, ...] = ()
    penalty: tuple[Slot, ...] = ()
    auxiliary: tuple[Slot, ...] = ()
    source: str = "policy"
    about: About = field(default_factory=lambda: About("your own"), compare=False, repr=False)

    def __post_init__(self) -> None:
        self._settle()
        from groupwise.methods.soundness import complaints

        refused, doubtful = complaints(self)
        if refused:
            raise RecipeError(f"Recipe {self.name!r} makes no sense: {refused[0]}")
        for text in doubtful:
            warnings.warn(f"Recipe {self.name!r}: {text}", RecipeWarning, stacklevel=4)

    @classmethod
    def from_text(cls, name: str, text: Mapping[str, str]) -> Recipe:
        """Make a recipe from scratch; slots left out take the defaults of `defaults()`."""
        for key in text:
            if key not in (*RECIPE_SLOTS, *cls.PLAIN):
                raise RecipeError(f"A recipe has no slot {key!r}. {nearest(key, RECIPE_SLOTS)}")
        return cls(name=name, **{**_defaults(), **text})  # type: ignore[arg-type]

    @property
    def loss(self) -> str:
        weight = "·w" if self.correction else ""
        penalty = " + Σ u·penalty" if self.penalty else ""
        auxiliary = " + auxiliary" if self.auxiliary else ""
        return f"L = −Σ u{weight}·S{penalty}{auxiliary}"

    @property
    def columns(self) -> tuple[str, ...]:
        return SOURCE_COLUMNS.get(self.source, ())

    @property
    def supervised(self) -> bool:
        return "completion" in self.columns

    @property
    def rate_factor(self) -> float:
        return 1.0 if self.samples else SUPERVISED_RATE_FACTOR

    @property
    def reads_rewards(self) -> bool:
        blind = self.advantage[0].definition.traits.blind and not self.filter
        return self.samples and not blind

    @property
    def weighs_tokens(self) -> bool:
        return self.samples

    @property
    def level(self) -> str:
        level: str = self.ratio.definition.traits.level
        return level

    @property
    def updates(self) -> int:
        updates: int = self.schedule["updates"]
        return updates

    def doubts(self) -> list[str]:
        from groupwise.methods.soundness import complaints

        return complaints(self)[1]

    def rows(self, group_size: int) -> int:
        return group_size if self.samples else max(len(self.columns), 1)

    def sized(self, limit: int, updates: int) -> dict[str, Any]:
        found: dict[str, Any] = {"schedule.updates": 1 if self.level == "none" else updates}
        for slot in self.slots():
            place = f"{slot.kind}.{slot.name}"
            found |= {f"{place}.{key}": x for key, x in slot.fitted(limit).items()}
        return found

    @property
    def outputs(self) -> tuple[str, ...]:
        """Name what the learner's forward pass must give, beyond the policy's log-probabilities."""
        names = [name for slot in self.slots() for name in slot.definition.traits.outputs]
        names += [n for slot in self.slots() for n in slot.needs if n in OUTPUT_STREAMS]
        return tuple(dict.fromkeys(["logp_NT", *names]))

    @property
    def streams(self) -> tuple[str, ...]:
        """Name what the batch must bring, beyond mask, groups and rewards."""
        needs = dict.fromkeys(name for slot in self.slots() for name in slot.needs)
        anchors = {slot.get("anchor") for slot in (self.ratio, *self.correction, *self.penalty)}
        if "sampler" in anchors:
            needs["sampler_logp_NT"] = None
        if self.schedule["updates"] > 1 and ("old" in anchors or self.corrects_mismatch):
            # From the second update on the policy is no longer its own anchor.
            needs["old_logp_NT"] = None
        elif self.schedule["updates"] == 1 and not self._reads_old_early:
            # In one update the policy's own log-probabilities, detached, are the old ones.
            needs.pop("old_logp_NT", None)
        if self.replays == "learner":  # by the pass that tells the experts
            needs["old_logp_NT"] = None
        return tuple(name for name in needs if name not in OUTPUT_STREAMS)

    @property
    def replays(self) -> str:
        """Return whose experts the updates go through: of "learner" or "sampler"; "": live ones."""
        found = [slot["source"] for slot in self.correction if slot.definition.traits.routing]
        return "".join(found[:1])

    @property
    def looks_back(self) -> bool:
        """Tell whether the policy reads the rows of a step once before it learns from them."""
        return any(name in self.streams for name in LOOKED_BACK)

    @property
    def looks_now(self) -> bool:
        """Tell whether it reads the policy as each update begins."""
        return any(name in self.streams for name in NOW)

    @property
    def routed(self) -> bool:
        """Tell whether it reads or replays which experts of a mixture a token visits."""
        return bool(self.replays) or any(name in ROUTED for name in (*self.streams, *self.outputs))

    @property
    def _reads_old_early(self) -> bool:
        """Tell whether old log-probabilities are read before the update's forward pass."""
        late = ("ratio", "gate", "correction", "penalty")
        early = (
            s
            for s in self.slots()
            if s.kind not in late or s.definition.traits.prepare is not nothing
        )
        return any("old_logp_NT" in s.needs for s in early)

    @property
    def corrects_mismatch(self) -> bool:
        """Tell whether a correction weighs or masks by learner/sampler."""
        return any("sampler_logp_NT" in slot.needs for slot in self.correction)

    def anchored(self, weights: str, *, close: bool = True) -> Self:
        """Return the recipe as it runs with a sampler of these weights: no pass for anchors alone.

        With several updates whose ratio alone reads the policy before them, the anchor is the
        sampler: its log-probabilities are of the same weights and known already. Not for a copy
        that is sampled to study a mismatch, which the anchor would take out. And where sampler and
        learner are not `close` (bfloat16 without exact mode), not for a ratio of whole answers: it
        adds up what they differ by, and GSPO's clip range is narrower than that.
        """
        if not close and self.ratio.definition.traits.level == "sequence":
            return self
        several = self.schedule["updates"] > 1
        others = any("old_logp_NT" in slot.needs for slot in self.slots()) or self.corrects_mismatch
        others = others or self.replays == "learner"
        if weights != "shared" or not several or others or self.ratio.get("anchor") != "old":
            return self
        ratio = self.ratio.replace(anchor="sampler")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecipeWarning)  # its doubts were told before
            return self.replace(ratio=ratio, name=self.name, about=self.about)

    def terms_of(self, role: str) -> tuple[Slot, ...]:
        """Return the auxiliary terms that train a role."""
        return tuple(term for term in self.auxiliary if term.definition.traits.learns == role)

    @property
    def roles(self) -> tuple[str, ...]:
        """Return who fills the streams that the slots read, and what they train."""
        learned = {slot.definition.traits.learns for slot in self.slots()}
        return tuple(
            name
            for name, facts in ROLE_FACTS.items()
            if name in learned or set(facts.streams) & {*self.streams, *self.outputs}
        )


def _defaults() -> dict[str, str]:
    return {
        "advantage": "group_zscore()",
        "ratio": "token()",
        "gate": "clip()",
        "aggregation": "token_mean_batch()",
        "schedule": "joint()",
    }


@dataclass(frozen=True)
class PairRecipe(Method):
    """A preference method: how pairs are made, how they are scored, what the reference is."""

    KINDS: ClassVar[tuple[str, ...]] = (*PAIR_SLOTS, "likelihood", "summing", "weighing")
    WORD: ClassVar[str] = "A preference recipe"
    STAGE: ClassVar[str] = "pairs"

    name: str
    pairing: Slot
    preference: Slot
    reference: str  # what it is; read only where the preference measures from it
    about: About = field(compare=False, repr=False)
    likelihood: tuple[Slot, ...] = ()
    summing: Slot = "whole_answer()"  # type: ignore[assignment]  # read by _settle
    weighing: tuple[Slot, ...] = ()

    def __post_init__(self) -> None:
        self._settle()
        _check_settings(self)
        if self.preference.definition.traits.unpaired:
            raise RecipeError(
                f"Recipe {self.name!r} makes no sense: {self.preference} is for single answers "
                "with a label, and this one compares pairs. Take recipe=kto, or another slot."
            )
        if self.reads == "ranks" or self.preference.definition.traits.scores:
            odd = self.pairing if self.reads == "ranks" else self.preference
            raise RecipeError(
                f"Recipe {self.name!r} makes no sense: {odd} is for scores of a reward model, and "
                f"{self.name} compares log-probabilities of a policy. Take recipe=reward_model, or "
                "another slot."
            )

    @property
    def roles(self) -> tuple[str, ...]:
        return ("reference",) if self.refers or self.reads == "answers" else ()

    @property
    def refers(self) -> bool:
        """Tell whether the loss measures from the reference."""
        refers: bool = self.preference.definition.traits.refers
        return refers

    @property
    def loss(self) -> str:
        beside = " + likelihood" if self.likelihood else ""
        weight = "w · " if self.weighing else ""
        return f"L = mean over pairs of {weight}the preference loss{beside}"

    @property
    def looks_first(self) -> bool:
        """Tell whether all pairs of an update are seen, without gradient, before it begins."""
        compares = self.preference.definition.traits.prepare is not nothing
        return compares or bool(self.weighing)

    @property
    def reads(self) -> str:
        """Return where pairs come from: `labels`, `answers`, `grades` or `judgements`."""
        reads: str = self.pairing.definition.traits.reads
        return reads

    @property
    def source(self) -> str:
        return {"labels": "data", "answers": "reference"}.get(self.reads, "policy")

    @property
    def samples(self) -> bool:
        return self.reads != "labels"

    @property
    def columns(self) -> tuple[str, ...]:
        return PAIR_COLUMNS[self.reads]

    @property
    def judges_held_out(self) -> bool:
        return self.reads == "labels"

    @property
    def reads_rewards(self) -> bool:
        return self.reads in ("grades", "judgements")

    @property
    def verified(self) -> bool:
        return self.reads == "grades"

    @property
    def judging(self) -> Slot | None:
        return self.pairing if self.reads == "judgements" else None

    @property
    def stops(self) -> tuple[str, ...]:
        return ("judge gap", "judge agreement") if self.judging else ()

    @property
    def ends_answers(self) -> bool:
        return True

    @property
    def learns_from(self) -> str:
        return "pairs of answers"

    @property
    def fixed(self) -> dict[str, str]:
        return {"reference": self.reference} if self.roles else {}

    def rows(self, group_size: int) -> int:
        return 2


@dataclass(frozen=True)
class UnpairedRecipe(Method):
    """A preference method for single answers of the data, each called good or bad."""

    KINDS: ClassVar[tuple[str, ...]] = ("preference",)
    WORD: ClassVar[str] = "A recipe for labelled answers"
    STAGE: ClassVar[str] = "unpaired"

    name: str
    preference: Slot
    reference: str
    about: About = field(compare=False, repr=False)

    def __post_init__(self) -> None:
        self._settle()
        _check_settings(self)
        if not self.preference.definition.traits.unpaired:
            raise RecipeError(
                f"Recipe {self.name!r} makes no sense: {self.preference} compares two answers, and "
                "this one reads single answers with a label. Take recipe=dpo, or preference kto()."
            )

    @property
    def roles(self) -> tuple[str, ...]:
        return ("reference",)

    @property
    def source(self) -> str:
        return "data"

    @property
    def columns(self) -> tuple[str, ...]:
        return ("completion",)

    @property
    def reads_rewards(self) -> bool:
        return False

    @property
    def judges_held_out(self) -> bool:
        return True

    @property
    def learns_from(self) -> str:
        return "answers of the data with labels"

    @property
    def loss(self) -> str:
        return "L = mean over answers of the preference loss"

    @property
    def fixed(self) -> dict[str, str]:
        return {"reference": self.reference}

    def rows(self, group_size: int) -> int:
        return 2  # with the answer to another prompt, for the baseline


def _check_settings(recipe: Method) -> None:
    """Refuse slots whose own settings make no sense together."""
    for slot in recipe.slots():
        why = slot.definition.traits.refuses(dict(slot.params))
        if why:
            raise RecipeError(f"Recipe {recipe.name!r} makes no sense: {slot.kind} {slot}: {why}")
