"""The base of all recipes: it holds slots, can be changed, and says what it asks of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from groupwise.common.globs import digest
from groupwise.common.user_files import code_files
from groupwise.errors import RecipeError, nearest
from groupwise.methods.dotted import adjusted, slots_of
from groupwise.methods.slots import Slot
from groupwise.streams import ROLE_FACTS

# Slots that hold several functions (chains, sums, products); the others hold exactly one.
MANY = (
    "filter", "shaping", "advantage", "correction", "penalty", "auxiliary", "likelihood",
    "weighing",
)  # fmt: skip


@dataclass(frozen=True)
class About:
    """Where a recipe comes from and what it is for."""

    title: str
    paper: str = ""  # arXiv id, or a name where there is none
    year: int = 0
    # method | variant | correction | dialect | ablation | preference | supervised |
    # reward model | your own
    family: str = "method"
    fixes: str = ""
    breaks: str = ""
    reach_for: str = ""
    setting: Mapping[str, Any] = field(default_factory=dict)  # the paper's, outside the slots
    note: str = ""  # how sure the reading is, what is a house choice
    departs: tuple[str, ...] = ()  # what this trainer does otherwise than the source
    base: Method | None = field(default=None, repr=False)  # what it was changed from


class Method:
    """A recipe of any kind: it holds slots, can be changed, and says what it asks of a run.

    What is said here holds for a method without groups; a kind of recipe overrides what differs.
    """

    KINDS: ClassVar[tuple[str, ...]]
    WORD: ClassVar[str]
    PLAIN: ClassVar[tuple[str, ...]] = ()  # fields beside the slots that settings may change
    STAGE: ClassVar[str]  # what a run of it is: a key of stages.STAGES
    name: str
    about: About
    # Where its answers come from: a key of stages.SOURCES, with what that reads behind a colon.
    source: Any

    @property
    def roles(self) -> tuple[str, ...]:
        """Return what takes part beside the policy: keys of optim.roles.ROLES."""
        return ()

    @property
    def streams(self) -> tuple[str, ...]:
        """Return what a batch must bring, beyond mask, groups and rewards."""
        return ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return what the learner's forward pass must give."""
        return ()

    @property
    def level(self) -> str:
        """Return over what its ratio is one number; "" where it has none."""
        return ""

    @property
    def updates(self) -> int:
        """Return how many optimizer steps one pass over a batch makes."""
        return 1

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns of the data with answers that it learns from."""
        return ()

    @property
    def supervised(self) -> bool:
        """Tell whether it learns rows of the data as they stand: conversations, answers, texts."""
        return False

    @property
    def reads_rewards(self) -> bool:
        """Tell whether an update reads what the run's reward says."""
        return True

    @property
    def verified(self) -> bool:
        """Tell whether reward.parts must be able to grade every row of the data."""
        return self.samples and self.reads_rewards

    @property
    def judging(self) -> Slot | None:
        """Return the slot that says how the policy judges its answers; None where it does not."""
        return None

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the health rules that stop a run of it without being asked to."""
        return ()

    @property
    def weighs_tokens(self) -> bool:
        """Tell whether each sampled token gets an advantage and a weight of its own."""
        return False

    @property
    def routed(self) -> bool:
        """Tell whether it reads or replays which experts of a mixture a token visits."""
        return False

    @property
    def samples(self) -> bool:
        """Tell whether answers are sampled from the policy and graded while it learns."""
        return bool(self.source == "policy")

    @property
    def scores(self) -> str:
        """Return what its model gives numbers to, "answers" or "steps"; "" if it writes answers."""
        return ""

    @property
    def judges_held_out(self) -> bool:
        """Tell whether held-out rows without a verifiable answer say how good it is."""
        return False

    @property
    def rate_factor(self) -> float:
        """Return how many times the usual learning rate it takes, where none is set."""
        return 1.0

    @property
    def models(self) -> tuple[str, ...]:
        """Return the names of the models held in memory."""
        held = [ROLE_FACTS[name] for name in self.roles]
        return ("policy", *(facts.title for facts in held if facts.model))

    @property
    def ends_answers(self) -> bool:
        """Tell whether it learns answers of the data, which take an end token to be whole."""
        return bool(self.columns)

    @property
    def learns_from(self) -> str:
        """Return what it learns from, in words."""
        return "its own answers" if self.samples else "answers of the data"

    @property
    def fixed(self) -> dict[str, str]:
        """Return what of its equation no slot says, by name."""
        return {}

    @property
    def loss(self) -> str:
        """Return the loss with the terms that this recipe has."""
        raise NotImplementedError

    def rows(self, group_size: int) -> int:
        """Return how many answers of one prompt an update reads."""
        return group_size

    def doubts(self) -> list[str]:
        """Return what is doubtful about the slots together."""
        return []

    def anchored(self, weights: str, *, close: bool = True) -> Self:
        """Return the recipe as it runs with a sampler of these weights."""
        return self

    def sized(self, limit: int, updates: int) -> dict[str, Any]:
        """Return settings that give it the sizes of a run: longest answer, updates a batch."""
        return {}

    def _settle(self) -> None:
        """Text and single slots become what the fields hold."""
        for kind in self.KINDS:
            slots = slots_of(kind, getattr(self, kind))
            if kind not in MANY and len(slots) != 1:
                raise RecipeError(f"{self.WORD} has exactly one {kind}, got {len(slots)}.")
            object.__setattr__(self, kind, slots if kind in MANY else slots[0])

    def slots(self) -> tuple[Slot, ...]:
        """Return all slots in the order of the axes."""
        return tuple(slot for kind in self.KINDS for slot in self.of(kind))

    def of(self, kind: str) -> tuple[Slot, ...]:
        """Return the slots of a kind; none of a kind that this sort of recipe does not have."""
        value = getattr(self, kind) if kind in self.KINDS else ()
        return value if isinstance(value, tuple) else (value,)

    @property
    def refilling(self) -> tuple[str, ...]:
        """Return the filters after which more prompts are drawn."""
        return tuple(s.name for s in self.slots() if s.definition.traits.action == "refill")

    @property
    def departs(self) -> tuple[str, ...]:
        """Say what this trainer does otherwise than the source or a changed recipe's base."""
        base = self.about.base
        return self.about.departs + (base.departs if base is not None else ())

    def code(self) -> str:
        """Hash the files that slots of the user's come from; nothing without such slots."""
        files = {file for slot in self.slots() for file in slot.files}
        return digest(code for file in files for code in code_files(file))

    def text(self) -> dict[str, str]:
        """Return the text form of every slot; `Recipe.from_text` reads it back."""
        slots = {kind: ", ".join(map(str, self.of(kind))) for kind in self.KINDS}
        usual = {each.name: each.default for each in fields(self)}  # type: ignore[arg-type]
        plain = {name: getattr(self, name) for name in self.PLAIN}
        return slots | {name: x for name, x in plain.items() if x != usual[name]}

    def replace(self, **changes: Any) -> Self:
        """Return the recipe with other slots: `replace(gate=clip(0.2, 0.3))` or their text.

        Without a new `about` it no longer claims to be the published method.
        """
        known = {item.name for item in fields(self)}  # type: ignore[arg-type]
        for key in changes:
            if key not in known:
                raise RecipeError(f"{self.WORD} has no slot {key!r}. {nearest(key, self.KINDS)}")
        changes.setdefault("name", self.name if self.name.endswith("*") else f"{self.name}*")
        if changes != {"name": self.name}:
            changes.setdefault("about", self._derived())
        return replace(self, **changes)  # type: ignore[type-var]

    def acts_like(self, other: Method) -> bool:
        """Tell whether two recipes are the same but for their names."""
        return self.text() == other.text() and self.slots() == other.slots()

    def _derived(self) -> About:
        unnamed = self.name.endswith("*") and self.about.base  # `dapo*` is a step on the way
        base: Any = self.about.base if unnamed else self
        return About(
            title=f"derived from {base.name}",
            family="your own",
            setting=self.about.setting,  # the source's, as a place to start from
            base=base,
        )

    def set(self, path: str, value: Any) -> Self:
        """Change one setting by its path: `gate`, `gate.high`, `advantage.group_zscore.eps`."""
        return self.configure({path: value})

    def configure(self, settings: Mapping[str, Any]) -> Self:
        """Change several settings at once; only the result must make sense, not the way there."""
        if not isinstance(settings, Mapping):
            raise RecipeError(
                f"Settings must be a mapping such as {{'gate.high': 0.3}}, got {settings!r}."
            )
        changed: dict[str, Any] = {}
        for path, value in settings.items():
            kind, *rest = str(path).removeprefix("recipe.").split(".")
            if kind in self.PLAIN and not rest:
                changed[kind] = value
                continue
            if kind not in self.KINDS:
                known = (*self.KINDS, *self.PLAIN)
                raise RecipeError(f"{self.WORD} has no slot {kind!r}. {nearest(kind, known)}")
            slots = changed.get(kind, self.of(kind))
            changed[kind] = (
                adjusted(self.name, kind, slots, rest, value) if rest else slots_of(kind, value)
            )
        return self.replace(**changed) if changed else self
