"""How far a run is: plain data, saved and restored as a whole.

A field that is added here is saved with the others; nothing lists them a second time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from groupwise.config import Config
from groupwise.data.cursor import TaskCursor
from groupwise.evaluate.evaluate import Evaluation
from groupwise.records import Memory
from groupwise.stages.coefficients import Coefficient, Coefficients
from groupwise.sync.checkpoints import memory_from_json, memory_to_json

# How a field is written to JSON and read back, where it is not what JSON gives by itself.
CURSOR = {"to_json": lambda cursor: cursor.state()}
MEMORY = {"to_json": memory_to_json, "from_json": memory_from_json}
BY_NUMBER = {
    "to_json": lambda found: {str(number): x for number, x in found.items()},
    "from_json": lambda read: {int(number): x for number, x in read.items()},
}
COEFS = {
    "to_json": lambda found: {place: list(each) for place, each in found.items()},
    "from_json": lambda read: {place: Coefficient(*each) for place, each in read.items()},
}
EVALUATION = {
    "to_json": lambda found: None if found is None else found.as_dict(),
    "from_json": lambda read: None if read is None else Evaluation.from_dict(read),
}
UNSAVED = {"saved": False}


def _same(value: Any) -> Any:
    return value


@dataclass
class Progress:
    """The state that the next step depends on, beside weights and optimizer; what was spent.

    Random numbers need no saving: they are a function of this.
    """

    cursor: TaskCursor = field(metadata=CURSOR)  # restored in place: it knows the tasks
    step: int = 0  # finished ones
    version: int = 0  # updates so far
    memory: Memory = field(default_factory=Memory, metadata=MEMORY)
    # What train.coefs is at, by its place in the recipe.
    coefs: Coefficients = field(default_factory=dict, metadata=COEFS)
    # What a critic knew in each of the steps that it learned alone, where anything was to know.
    alone: list[float] = field(default_factory=list)
    waited: int | None = None  # steps before the policy's first, where they ended early
    skipped: int = 0  # updates in a row
    unrewarded: int = 0  # steps in a row in which no answer got a reward
    micro_tokens: int = 0  # of the learner; fewer than asked for after memory ran out
    micro_tokens_asked: int = 0
    # Fingerprints of the weights by version.
    delivered: dict[int, str] = field(default_factory=dict, metadata=BY_NUMBER)
    tokens: int = 0  # sampled so far
    flops: float = 0.0  # of models, so far
    seconds: float = 0.0  # of the clock, up to the moment when it was saved
    trained: float = 0.0  # seconds of steps, evaluation left out
    before: Evaluation | None = field(default=None, metadata=EVALUATION)  # of the starting policy
    last: Evaluation | None = field(default=None, metadata=EVALUATION)
    best: float | None = None  # accuracy, or reward where nothing says what is correct
    best_step: int | None = None  # after which it was the best
    opened: float = field(default_factory=time.monotonic, metadata=UNSAVED)

    def state(self) -> dict[str, Any]:
        """Return all of it as JSON takes it, at this moment."""
        written = {
            each.name: each.metadata.get("to_json", _same)(getattr(self, each.name))
            for each in self._saved()
        }
        return written | {"seconds": self.elapsed}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take back what `state` returned; a field that an older groupwise did not save stays."""
        for each in self._saved():
            if each.name == "cursor":
                self.cursor.restore(values["cursor"])
            elif each.name in values:
                read = each.metadata.get("from_json", _same)
                setattr(self, each.name, read(values[each.name]))

    @classmethod
    def _saved(cls) -> list[Any]:
        return [each for each in fields(cls) if each.metadata.get("saved", True)]

    @property
    def elapsed(self) -> float:
        """Return the seconds of the clock that the run has taken, in all its processes."""
        return self.seconds + time.monotonic() - self.opened

    def share(self, config: Config) -> float:
        """Return how much is done: of its steps or its budget, whichever ends first."""
        budget = config.budget
        shares = [self.step / self._asked(config)]
        shares += [self.tokens / budget.tokens] if budget.tokens else []
        shares += [self.trained / budget.seconds] if budget.seconds else []
        return max(shares)

    def over(self, config: Config) -> bool:
        """Tell whether no step is left to do."""
        return self.share(config) >= 1.0 or self.reached(config)

    def reached(self, config: Config) -> bool:
        """Tell whether the last evaluation passed the gate that ends the run."""
        newest, gate = self.last or self.before, config.until.accuracy
        return bool(gate and newest and newest.accuracy is not None and newest.accuracy >= gate)

    def total_steps(self, config: Config) -> int:
        """Return the steps that the configuration has, or that a budget would end at this pace."""
        share = self.share(config)
        asked = self._asked(config)
        if self.step == 0 or share == self.step / asked:
            return asked
        return max(round(self.step / share), self.step + 1)

    def _asked(self, config: Config) -> int:
        """Return the steps that were asked for, by their number or by passes over the data."""
        steps = config.length(self.cursor.count)
        assert steps is not None
        return steps

    def evaluation_due(self, config: Config, before: float) -> bool:
        """Tell whether held-out tasks are asked now; `before` is the share before this step."""
        share, asked = self.share(config), config.eval
        if asked.points:
            due = int(asked.points * share) > int(asked.points * before)
        else:
            due = bool(asked.every) and self.step % asked.every == 0
        return due or self.over(config)

    def note_evaluation(self, found: Evaluation) -> bool:
        """Keep it; return True if it is the best so far."""
        self.last = found
        value = found.reward if found.accuracy is None else found.accuracy
        if value is None and "eval/nll" in found.others:  # of rows that nobody can grade
            value = -found.others["eval/nll"]
        if value is None or (self.best is not None and value <= self.best):
            return False
        self.best, self.best_step = value, self.step
        return True
