"""Recorded steps under several methods, one step at a time, and the totals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

from groupwise.common.progress import counted
from groupwise.errors import RunError
from groupwise.records import Memory
from groupwise.replay.measures import (
    Gram,
    angle,
    counts,
    gram,
    rank,
    rare_tokens,
    reproduction,
    summed,
)
from groupwise.replay.methods import ReplayMethod, check
from groupwise.replay.parameters import Weights, gradient, load_weights, place_before, pushed
from groupwise.replay.recorded import NothingLearned, Record, Recorded
from groupwise.replay.token_weights import MethodWeights, batched, weigh

# Where gradients are compared, by what the names of their figures begin with.
TOKENS, PARAMETERS, MOVED = "", "parameter_", "moved_parameter_"
SPACES = (TOKENS, PARAMETERS, MOVED)
RARE_SHOWN = 200  # tokens of the whole replay that are written down


@dataclass(frozen=True)
class StepResult:
    """One step under all methods; the run's own is the first."""

    record: Record
    methods: list[MethodWeights]
    products: Mapping[str, Gram]  # of the gradients by their space, as in `SPACES`
    weights: str = ""  # which model's gradients there are


@dataclass
class Replay:
    """The steps of a replay, and their sums."""

    run: Recorded
    methods: Sequence[ReplayMethod]
    steps: Sequence[int]
    gradients: bool = False
    notes: list[str] = field(default_factory=list)
    by_step: list[dict[str, Any]] = field(default_factory=list)
    products: list[Mapping[str, Gram]] = field(default_factory=list)
    rare: list[dict[str, Any]] = field(default_factory=list)
    moved: bool = False  # whether an update had another policy than the sampler's
    weights: Weights | None = None  # that were read last

    def check(self) -> None:
        """Refuse what the first of the steps shows to be impossible, before anything is written."""
        record = next(filter(None, map(self._read, self.steps)), None)
        if record is None:
            raise RunError(
                f"No update was made on any of these {len(self.steps)} steps of "
                f"{self.run.folder.path}: there is nothing to replay. Choose other steps."
            )
        for method in self.methods:
            check(self.run, method, record)
        if self._with_gradients:
            self.weights = self._weights(self._with_gradients[0])

    def __iter__(self) -> Iterator[StepResult]:
        """Yield every step that was asked for, in order; methods with a memory see earlier ones."""
        memories = [Memory() for _ in self.methods]
        for step in counted("replaying", self._needed(), "steps"):
            record = self._read(step)
            if record is None:
                continue
            for method in self.methods:
                check(self.run, method, record)
            found = [
                batched(self.run, method, record, memory)
                for method, memory in zip(self.methods, memories, strict=True)
            ]
            memories = [each.result.memory for each in found]
            if step not in self.steps:
                continue
            seen = [weigh(m, record, each) for m, each in zip(self.methods, found, strict=True)]
            products, which = {TOKENS: gram([each.weight_NT for each in seen])}, ""
            if step in self._with_gradients:
                self.weights = self._weights(step)
                products |= self._parameters(record, seen, self.weights)
                which = str(self.weights)
            now = StepResult(record, seen, products, which)
            self._add(now)
            yield now

    def _read(self, step: int) -> Record | None:
        """Read a step; None, with a note, where one of several was not learned from."""
        try:
            return self.run.step(step)
        except NothingLearned:
            if list(self.steps) == [step]:
                raise
            self._say(f"Step {step} is left out: no update was made on its rollouts.")
            return None

    def _parameters(
        self, record: Record, seen: Sequence[MethodWeights], weights: Weights
    ) -> dict[str, Gram]:
        run = self.run
        exact = [gradient(run, weights, each.batched.recipe, each.batched) for each in seen]
        found = {PARAMETERS: gram(exact)}
        if record.moved:
            found[MOVED] = gram([pushed(run, weights, each, record) for each in seen])
        return found

    @cached_property
    def _with_gradients(self) -> list[int]:
        """Return the steps whose own weights were kept; without any, all, by the newest weights
        before.
        """
        if not self.gradients:
            return []
        own = [step for step in self.steps if place_before(self.run, step)[0] == step - 1]
        return own or list(self.steps)

    def _needed(self) -> list[int]:
        """Return the steps to read: earlier ones too if a method remembers prompts or rewards."""
        remembering = [
            method.name
            for method in self.methods
            if any(link.definition.traits.remembers for link in method.recipe.advantage)
        ]
        if not remembering:
            return list(self.steps)
        last = max(self.steps)
        missing = sorted(set(range(1, last)) - set(self.run.steps))
        if missing:
            self.notes.append(
                f"{', '.join(remembering)} remembers earlier batches, and {len(missing)} of the "
                f"steps before {last} have no rollouts any more: its memory starts without them."
            )
        return [step for step in self.run.steps if step <= last]

    def _weights(self, step: int) -> Weights:
        number, _ = place_before(self.run, step)
        before = self.weights
        return before if before and before.step == number else load_weights(self.run, step)

    def _add(self, now: StepResult) -> None:
        """Add the figures of a step to those before it."""
        tokenizer = self.run.tokenizer

        def piece(number: int) -> str:
            return f"⟨{number}⟩" if tokenizer is None else tokenizer.decode([number])

        self.moved |= now.record.moved
        self.products.append(now.products)
        self.rare += rare_tokens(now.methods, now.record, piece, RARE_SHOWN)
        self.rare = sorted(self.rare, key=rank)[:RARE_SHOWN]
        rows = [
            {"name": each.method.name, **counts(each, now.methods[0], now.record),
             **_angles(now.products, at, 0)}
            for at, each in enumerate(now.methods)
        ]  # fmt: skip
        self.by_step.append(
            {
                "step": now.record.step,
                "reproduction": reproduction(now.methods[0], now.record),
                "methods": rows,
                "weights": now.weights,
            }
        )
        self._doubt(now.record, now.methods)

    def _doubt(self, record: Record, seen: Sequence[MethodWeights]) -> None:
        """Note once what can't be known of this step."""
        run = self.run
        said = [
            (record.spread,
             f"{run.recipe.ratio.name} records one ratio for all tokens of an answer or piece: "
             "ratios per token in later updates are not known, and are taken to be equal there."),
            (record.waited,
             "In some steps the policy waited while a critic learned alone: no update was made, so "
             "every ratio is taken as 1, and targets of critics are plain returns (λ = 1)."),
            (record.filled > 0 and not record.waited,
             "Some rows were read by updates alone, which had moved: for their old "
             "log-probabilities stand the sampler's, of the same weights."),
        ]  # fmt: skip
        said += [
            ("length_exponent" in each.method.recipe.outputs,
             f"{each.method.name} learns an exponent of lengths, which rollouts do not record: it "
             "is taken as at the start.")
            for each in seen
        ]  # fmt: skip
        for each in seen[1:]:
            recipe, away = each.method.recipe, each.batched.wanted
            said += [
                (away > 0,
                 f"{each.method.name} would have drawn other prompts in place of groups that it "
                 "sends away: those are not known."),
                (any("entropy_NT" in slot.needs for slot in recipe.penalty),
                 f"{each.method.name} has a term of the entropy: its gradient does not go through "
                 "the tokens' log-probabilities, so only gradients of weights (--gradients) have "
                 "it."),
            ]  # fmt: skip
        for holds, text in said:
            if holds:
                self._say(text)

    def _say(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def result(self) -> dict[str, Any]:
        """Return all figures of the steps that were replayed."""
        if not self.products:
            raise RunError("No step was replayed.")
        products = {
            space: summed([each[space] for each in self.products if space in each])
            for space in SPACES
            if any(space in each for each in self.products)
        }
        names = [method.name for method in self.methods]
        totals = [_total(self.by_step, at) for at in range(len(names))]
        return {
            "format": 1,
            "run": str(self.run.folder.path),
            "steps": [each["step"] for each in self.by_step],
            "methods": [
                {
                    "name": method.name,
                    "recipe": {"name": method.recipe.name, **method.recipe.text()},
                    **totals[at],
                    **_angles(products, at, 0),
                }
                for at, method in enumerate(self.methods)
            ],
            "pairs": [
                {"a": names[a], "b": names[b], **_angles(products, b, a)}
                for a, b in combinations(range(len(names)), 2)
            ],
            "by_step": self.by_step,
            "rare_tokens": self.rare,
            "notes": [*self.notes, *self._always()],
        }

    def _always(self) -> list[str]:
        said = [
            "Another method would have had other weights, and so other rollouts, from the step "
            "after its first update on: this is what it makes of these."
        ]
        if not self.moved and not any(x["clipped"] for s in self.by_step for x in s["methods"]):
            said.insert(
                0,
                "The run makes one update a step, with the policy that sampled: every ratio to it "
                "is 1, so no clip range can be left. What methods would clip shows in runs with "
                "several updates a step (recipe.schedule.updates).",
            )
        code = self.run.folder.read_manifest().get("origin", {}).get("recipe")
        if code not in (None, self.run.recipe.code()):
            said.insert(
                0,
                "The file that the run's recipe comes from was changed since: run is what it says "
                "now, which may not be what the run learned with.",
            )
        if self.run.recipe.schedule["updates"] > 1:
            said.append(
                "Weights are of the batch as a whole; the run splits it into "
                f"{self.run.recipe.schedule['updates']} updates, each with denominators of its own."
            )
        if self.gradients:
            said += self._about_weights()
        worst = {
            name: max(each["reproduction"].get(name, 0.0) for each in self.by_step)
            for name in ("advantage", "coefficient", "clipped", "return")
        }
        if any(worst.values()):
            said.append(
                "The run's own recipe does not come out exactly as it was recorded (largest "
                f"difference of an advantage {worst['advantage']:.2g}, of a coefficient "
                f"{worst['coefficient']:.2g}; at most {worst['clipped']:.0f} clip states a step): "
                + (
                    "it learned an exponent of lengths, which rollouts do not record."
                    if "length_exponent" in self.run.recipe.outputs
                    else "another groupwise or device computed it, or settings changed during the "
                    "run."
                )
            )
        return said

    def _about_weights(self) -> list[str]:
        used = list(dict.fromkeys(each["weights"] for each in self.by_step if each["weights"]))
        which = "; ".join(used if len(used) < 4 else [used[0], "...", used[-1]])
        said = [
            f"∇θ is the gradient of {which}. Ratios are recomputed against them: what the second "
            "and later updates of a step would clip is not in it."
        ]
        if self.moved:
            said[0] += (
                " ∇θ* has the recorded updates' weights per token, and of those weights only the "
                "gradients of log-probabilities."
            )
        own = [step for step in self.steps if place_before(self.run, step)[0] == step - 1]
        without = [step for step in self.steps if step not in self._with_gradients]
        if not own:
            said.append(
                "No checkpoint holds the weights that these steps began with. Those before have "
                "other ratios, and clip ranges are left for that reason alone."
            )
        elif without:
            said.append(
                f"∇θ is of {len(own)} of {len(self.steps)} steps; of the others the weights that "
                "they began with were not kept (checkpoint.every_steps, checkpoint.keep)."
            )
        return said


def _angles(products: Mapping[str, Gram], one: int, other: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for space, each in products.items():
        near = angle(each, one, other)
        found |= {f"{space}cosine": near.cosine, f"{space}norms": near.norms}
    return found


def _total(by_step: Sequence[dict[str, Any]], at: int) -> dict[str, float]:
    every = [step["methods"][at] for step in by_step]
    counted = [name for name in every[0] if not name.endswith(("name", "cosine", "norms"))]
    return {name: sum(x[name] for x in every) for name in counted}
