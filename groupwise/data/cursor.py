"""The order of prompts. The cursor is saved with a run and continues where it stopped."""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from groupwise.config.fields import CurriculumSettings
from groupwise.data.curriculum import Curriculum
from groupwise.data.on_disk import Places, tasks_at
from groupwise.errors import DataError
from groupwise.records import Task


class Draw(NamedTuple):
    task: int  # its place in the list of tasks
    number: int  # how often it had been drawn before; the sampler's random numbers depend on it


class Cursor:
    """Endless passes over the tasks, each in an order of its own.

    Every pass comes to every task once, so the number of a draw is the number of passes before this
    one: a prompt that comes back, even in the same batch, has another draw number. With a
    curriculum some are passed over.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int | str,
        shuffle: bool = True,
        curriculum: CurriculumSettings | None = None,
    ) -> None:
        if not tasks:
            raise DataError("There are no tasks to draw from. Check data.train.")
        self.seed, self.shuffle = seed, shuffle
        self.count, self.fingerprint = len(tasks), fingerprint(tasks)
        self.epoch = self.position = 0
        self._order = self._order_of(0)
        self.curriculum = None if curriculum is None else Curriculum(curriculum)
        self._ids = [task.id for task in tasks] if self.curriculum else []

    @property
    def drawn(self) -> int:
        """Return how many tasks were drawn so far."""
        turns = self.epoch * self.count + self.position
        return turns - (self.curriculum.passed_over if self.curriculum else 0)

    def take(self, n: int) -> list[Draw]:
        """Return the next n draws, continuing with the next pass where one ends."""
        drawn: list[Draw] = []
        while len(drawn) < n:
            if self.position == self.count:
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._order_of(self.epoch)
            place = int(self._order[self.position])
            self.position += 1
            if self._admits(place):
                drawn.append(Draw(place, self.epoch))
        return drawn

    def _admits(self, place: int) -> bool:
        turn = f"{self.seed}/{self.epoch}"
        return self.curriculum is None or self.curriculum.admits(self._ids[place], turn)

    def note(self, task: Task, share: float) -> None:
        """Take in the share of a task's answers that passed, where anything goes by it."""
        if self.curriculum is not None:
            self.curriculum.note(task.id, share)

    def rate(self, task: Task) -> float | None:
        """Return the running pass rate of a task; None where it is not known."""
        return None if self.curriculum is None else self.curriculum.rates.get(task.id)

    @property
    def curricula(self) -> list[Curriculum]:
        """Return what goes by pass rates here: one curriculum, or none."""
        return [] if self.curriculum is None else [self.curriculum]

    def state(self) -> dict[str, Any]:
        """Return all that `restore` needs, as JSON."""
        learned = {} if self.curriculum is None else {"curriculum": self.curriculum.state()}
        return {"epoch": self.epoch, "position": self.position, **self._identity(), **learned}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state of the same tasks in the same order."""
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                raise DataError(
                    f"The saved position is of other data: its {name} is {state.get(name)!r}, here "
                    f"it is {mine!r}. Continue with the data and seed of the run, or start a new "
                    "one."
                )
        epoch, position = state.get("epoch"), state.get("position")
        if (
            not isinstance(epoch, int)
            or not isinstance(position, int)
            or epoch < 0
            or not 0 <= position <= self.count
        ):
            raise DataError(
                f"The saved position (epoch {epoch!r}, position {position!r} of {self.count}) "
                "makes no sense. Continue from another checkpoint."
            )
        self.epoch, self.position = epoch, position
        self._order = self._order_of(epoch)
        if self.curriculum is not None:
            self.curriculum.restore(state.get("curriculum", {}))

    def _identity(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "count": self.count,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def _order_of(self, epoch: int) -> Places:
        if not self.shuffle:
            return np.arange(self.count)
        # Sorted by random() rather than shuffled: only random() is the same in every Python.
        return np.argsort(_randoms(f"order/{self.seed}/{epoch}", self.count), kind="stable")


class MixedCursor:
    """A cursor for each of several sources, taken in turns.

    The turn goes to the source that is furthest behind its share, so that none is ever a whole
    draw ahead of it: batches have the shares too, not only the run. Each source has passes of its
    own: a small one with a large weight comes round more often.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        weights: Mapping[str, float],
        seed: int,
        shuffle: bool = True,
        curriculum: CurriculumSettings | None = None,
    ) -> None:
        total = sum(weights.values())
        self.shares = {source: weight / total for source, weight in weights.items()}
        found = {source: array("q") for source in weights}
        for place, task in enumerate(tasks):
            found[task.source].append(place)
        for source, places in found.items():
            if not places:
                raise DataError(f"There are no tasks of {source} to draw from. Check data.train.")
        self._places = {source: np.array(places) for source, places in found.items()}
        self.parts = {
            source: Cursor(tasks_at(tasks, places), f"{seed}/{source}", shuffle, curriculum)
            for source, places in self._places.items()
        }

    @property
    def count(self) -> int:
        """Return the tasks of all sources together."""
        return sum(part.count for part in self.parts.values())

    @property
    def epoch(self) -> int:
        """Return the number of passes of the source that is furthest ahead."""
        return max(part.epoch for part in self.parts.values())

    def take(self, n: int) -> list[Draw]:
        """Return the next n draws."""
        drawn = []
        counts = {source: part.drawn for source, part in self.parts.items()}
        for number in range(sum(counts.values()) + 1, sum(counts.values()) + n + 1):
            source = max(counts, key=lambda s: self.shares[s] * number - counts[s])
            counts[source] += 1
            (draw,) = self.parts[source].take(1)
            drawn.append(Draw(int(self._places[source][draw.task]), draw.number))
        return drawn

    def note(self, task: Task, share: float) -> None:
        """Take in the share of a task's answers that passed, where anything goes by it."""
        self.parts[task.source].note(task, share)

    def rate(self, task: Task) -> float | None:
        """Return the running pass rate of a task; None where it is not known."""
        return self.parts[task.source].rate(task)

    @property
    def curricula(self) -> list[Curriculum]:
        """Return what goes by pass rates here: a curriculum a source, or none."""
        return [found for part in self.parts.values() for found in part.curricula]

    def state(self) -> dict[str, Any]:
        """Return all that `restore` needs, as JSON."""
        parts = {source: part.state() for source, part in self.parts.items()}
        return {"shares": dict(self.shares), "parts": parts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state of the same sources with the same weights."""
        if state.get("shares") != self.shares:
            raise DataError(
                f"The saved position is of other data: its shares are {state.get('shares')!r}, "
                f"here they are {self.shares!r}. Continue with the data of the run, or start a new "
                "one."
            )
        for source, part in self.parts.items():
            part.restore(state["parts"][source])


TaskCursor = Cursor | MixedCursor


def cursor_of(
    tasks: Sequence[Task],
    weights: Mapping[str, float],
    seed: int,
    shuffle: bool,
    curriculum: CurriculumSettings | None = None,
) -> TaskCursor:
    """Make a cursor, by the weights of the sources where they have any."""
    if weights:
        return MixedCursor(tasks, weights, seed, shuffle, curriculum)
    return Cursor(tasks, seed, shuffle, curriculum)


def fingerprint(tasks: Sequence[Task]) -> str:
    """Return a hash of all of every row, in order: equal for the same data, and for no other."""
    digest = hashlib.sha256()
    for task in tasks:
        prompt = task.prompt if isinstance(task.prompt, str) else [dict(m) for m in task.prompt]
        row = [task.id, prompt, task.answer, dict(task.columns)]
        row += [task.source] if task.source else []
        digest.update(_text(row).encode())
    return digest.hexdigest()[:16]


def _text(row: list[Any]) -> str:
    """Write a task as JSON; keys that are no texts, which generators may make, by their order."""
    try:
        return json.dumps(row, sort_keys=True, default=str)
    except TypeError:
        return repr(row)


def _randoms(seed: str, count: int) -> NDArray[np.float64]:
    """Return `count` values of random.Random(seed).random(), in eight bytes each."""
    _, state, _ = random.Random(seed).getstate()
    twin = np.random.RandomState()
    twin.set_state(("MT19937", np.array(state[:-1], np.uint32), state[-1], 0, 0.0))
    return twin.random_sample(count)
