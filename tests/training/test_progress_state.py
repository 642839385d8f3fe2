"""Progress is saved as a whole: whatever fields it has come back from JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from groupwise.data.cursor import Cursor
from groupwise.evaluate.evaluate import Evaluation
from groupwise.records import Memory, Task, Visit
from groupwise.stages.coefficients import Coefficient
from groupwise.training.progress import Progress

TASKS = [Task(number, f"{number}") for number in range(5)]
OTHER: dict[str, Any] = {  # than the default, for what is neither a number nor None
    "memory": Memory({3: (Visit(2, 0.5, 0.25),)}, 0.75),
    "delivered": {0: "a", 7: "b"},
    "before": Evaluation(0.25, 0.1, 0.5, 3.0, 0.0, 0.0, 8, 1, ()),
    "last": Evaluation(0.5, 0.1, 0.75, 2.0, 0.0, 0.0, 8, 1, ()),
    "alone": [0.25, 0.5],
    "coefs": {"penalty.kl.coef": Coefficient(0.5, 0.25)},
    "waited": 5,
    "best": 0.5,
    "best_step": 4,
}


@dataclass
class Longer(Progress):
    """A progress to which somebody added a field and nothing else."""

    hopes: int = 0
    by_name: dict[str, float] = field(default_factory=dict)


def changed(made: Progress) -> Progress:
    """Set every field to what it is not at first."""
    for each in fields(made):
        if each.name in OTHER:
            setattr(made, each.name, OTHER[each.name])
        elif each.name != "opened" and isinstance(getattr(made, each.name), int | float):
            setattr(made, each.name, getattr(made, each.name) + 3)
    made.cursor.take(7)
    return made


def test_every_field_comes_back_one_that_was_added_too() -> None:
    saved = changed(Longer(Cursor(TASKS, seed=1)))
    saved.by_name = {"x": 0.5}
    again, fresh = Longer(Cursor(TASKS, seed=1)), Longer(Cursor(TASKS, seed=1))
    again.restore(json.loads(json.dumps(saved.state())))
    for each in fields(Longer):
        if each.name not in ("cursor", "opened", "seconds"):
            assert getattr(again, each.name) == getattr(saved, each.name), each.name
            assert getattr(again, each.name) != getattr(fresh, each.name), each.name
    assert again.cursor.state() == saved.cursor.state()
    assert again.seconds >= saved.seconds  # the clock went on until it was saved


def test_what_an_older_version_did_not_save_stays_as_it_was() -> None:
    values = changed(Progress(Cursor(TASKS, seed=1))).state()
    for name in ("unrewarded", "flops", "trained", "best_step"):
        del values[name]
    again = Progress(Cursor(TASKS, seed=1))
    again.restore(values)
    assert (again.unrewarded, again.flops, again.trained, again.best_step) == (0, 0.0, 0.0, None)
    assert again.step == 3 and again.version == 3
