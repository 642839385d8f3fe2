"""Recipes of models that score: reward models, of whole answers and of their steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from groupwise.errors import RecipeError
from groupwise.methods.composition import PAIR_SLOTS
from groupwise.methods.method import About, Method
from groupwise.methods.slots import Slot

RATE_FACTOR = 10.0  # 1e-5 for all weights, 1e-4 with an adapter


class ScoringMethod(Method):
    """A method whose model gives numbers to answers of the data: nothing is sampled or graded."""

    @property
    def source(self) -> str:
        return "labels"

    @property
    def reads_rewards(self) -> bool:
        return False

    @property
    def ends_answers(self) -> bool:
        return True

    @property
    def models(self) -> tuple[str, ...]:
        return ("reward model",)

    @property
    def rate_factor(self) -> float:
        return RATE_FACTOR


@dataclass(frozen=True)
class RewardModelRecipe(ScoringMethod):
    """A reward model: which answers of a row are compared, and the loss of a comparison."""

    KINDS: ClassVar[tuple[str, ...]] = PAIR_SLOTS
    WORD: ClassVar[str] = "A reward model's recipe"
    STAGE: ClassVar[str] = "reward_model"

    name: str
    pairing: Slot
    preference: Slot
    about: About = field(default_factory=lambda: About("your own"), compare=False, repr=False)

    def __post_init__(self) -> None:
        self._settle()
        for slot, fits in (
            (self.pairing, self.pairing.definition.traits.reads == "ranks"),
            (self.preference, self.preference.definition.traits.scores),
        ):
            if not fits:
                raise RecipeError(
                    f"Recipe {self.name!r} makes no sense: {slot} is for log-probabilities of a "
                    "policy, and a reward model compares scores. Take pairing every_pair() or "
                    "neighbours(), and preference bradley_terry()."
                )

    @property
    def loss(self) -> str:
        return "L = mean over prompts of the mean preference loss of their pairs"

    @property
    def scores(self) -> str:
        return "answers"

    @property
    def learns_from(self) -> str:
        return "pairs of answers of the data"

    def rows(self, group_size: int) -> int:
        return 2


@dataclass(frozen=True)
class ProcessRewardModelRecipe(ScoringMethod):
    """A process reward model: the loss of a labelled step, and what stands between two steps."""

    KINDS: ClassVar[tuple[str, ...]] = ("labelling",)
    WORD: ClassVar[str] = "A process reward model's recipe"
    STAGE: ClassVar[str] = "process_reward_model"
    PLAIN: ClassVar[tuple[str, ...]] = ("separator",)

    name: str
    labelling: Slot
    separator: str = "\n\n"
    about: About = field(default_factory=lambda: About("your own"), compare=False, repr=False)

    def __post_init__(self) -> None:
        self._settle()
        if not isinstance(self.separator, str) or not self.separator:
            raise RecipeError(
                f"recipe.separator={self.separator!r} must be the text that stands between two "
                'steps, such as "\\n\\n".'
            )

    @property
    def loss(self) -> str:
        return "L = mean over labelled steps of the labelling loss"

    @property
    def fixed(self) -> dict[str, str]:
        return {"separator": self.separator}

    @property
    def scores(self) -> str:
        return "steps"

    @property
    def learns_from(self) -> str:
        return "labelled steps of the data"

    def rows(self, group_size: int) -> int:
        return 1
