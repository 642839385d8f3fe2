"""The end of value pre-training before its time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from runs import small
from steps import Start, weights

from groupwise.errors import ConfigError
from groupwise.stages.checks import check_config
from groupwise.training.loop import one_step
from groupwise.training.waiting import has_stopped

# A critic that can't learn: what it knows does not rise.
STUCK = {
    "recipe": "ppo",
    "recipe__shaping": "",
    "critic__learning_rate": 1e-12,
    "critic__alone_steps": 6,
    "critic__alone_patience": 2,
    "optim__warmup_steps": 2,
    "steps": 8,
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


@pytest.mark.parametrize(
    ("known", "patience", "stopped"),
    [
        ([], 2, False),
        ([0.1, 0.1], 2, False),  # nothing before the last two
        ([0.1, 0.1, 0.105], 2, True),
        ([0.1, 0.0, 0.11], 2, False),  # by 0.01
        ([0.1, 0.2, 0.15, 0.205], 2, True),
        ([0.1, 0.2, 0.15, 0.205], 3, False),  # 0.205 is above 0.1
        ([0.1, 0.1, 0.1, 0.1], 0, False),  # no patience asked for: never
    ],
)
def test_it_has_stopped_where_the_best_of_the_last_steps_is_no_better(
    known: list[float], patience: int, stopped: bool
) -> None:
    assert has_stopped(known, patience) is stopped


def test_a_policy_does_not_wait_for_a_critic_that_has_stopped_learning(
    start: Start, tmp_path: Path
) -> None:
    """Its schedule begins there, and a run that is resumed on either side has the same bits."""
    ends = []
    for name, cuts in (("whole", []), ("cut", [2, 4])):
        rates = []
        for until in [*cuts, 6]:
            with start.opened(tmp_path / name, **STUCK) as run:
                begun = weights(run.parts.loaded.model)
                while run.progress.step < until:
                    metrics = one_step(run, threading.Event())
                    assert metrics is not None
                    rates.append(metrics["optim/learning_rate"])
                    waits = run.progress.step <= (run.progress.waited or 6)
                    assert waits == torch.equal(begun, weights(run.parts.loaded.model))
                run.keeper.save_and_wait()
        base, waited = run.config.optim.learning_rate, run.progress.waited
        assert waited == 3 and len(run.progress.alone) == 3
        assert rates == [0.0] * waited + [base / 2, base, base]
        ends.append([weights(run.parts.loaded.model), *run.parts.learner.state().values()])
        said = [x for x in run.reporter.folder.read_events() if x["kind"] == "critic"]
        assert [x["step"] for x in said] == [3] and "from step 4 on" in said[0]["text"]
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_patience_without_steps_to_wait_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"there are none. Set\s+critic.alone_steps"):
        check_config(small(**STUCK | {"critic__alone_steps": 0}))
