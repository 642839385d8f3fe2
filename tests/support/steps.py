"""Single training steps for the tests: a model made once, runs opened in place, and a look inside.

The task: '3+4=' -> '3,4;7'. Answers of a few tokens with punctuation in them, which a short cold
start gets right now and then, so that most groups have better and worse answers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import quiet, small
from torch import Tensor

from groupwise.model.layers.attention import packed, packed_positions
from groupwise.model.layers.head import logits
from groupwise.model.layers.transformer import Transformer
from groupwise.optim.packs import Sequences
from groupwise.optim.roles import rates_at
from groupwise.records import Rollout
from groupwise.stages.collected import Collected
from groupwise.stages.stage import StepUpdates
from groupwise.training.guards import check_delivery
from groupwise.training.loop import one_step
from groupwise.training.opening import open_run
from groupwise.training.run import Run
from groupwise.watch.clock import Clock

REWARDS = """
def odd(completion):
    'The last digit is odd: about half of all answers.'
    digits = [x for x in completion if x.isdigit()]
    return float(bool(digits) and digits[-1] in "13579")

def nothing(completion):
    return 0.0

def abstains(completion, prompt):
    'Of all that a policy writes; a reward that is None for everything is refused before a run.'
    return 0.0 if completion == prompt else None

def odd_for_some(completion, prompt):
    'Only prompts that start with 0 to 3 have better and worse answers.'
    return odd(completion) if prompt[:1] in "0123" else 0.0

def small_prompt(completion, prompt):
    'Known before the first token: half of all prompts start with 0 to 4.'
    return float(prompt[:1] in "01234")

def cut_off(completion, finish):
    return float(finish == "length")

def flawed(completion):
    'Right, and begun with a 1.'
    return float(completion[:1] == "1")

def stepwise(completion):
    'A reward for each digit: 1 for an odd one.'
    steps = [(at + 1, float(x in "13579")) for at, x in enumerate(completion) if x.isdigit()]
    return {"reward": sum(value for _, value in steps), "steps": steps}
"""
TASKS = [(a, b) for a in range(10) for b in range(8)]


class Start:
    """A folder with data, rewards and a cold-started model, and the settings that use them."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.folder = folder
        (folder / "rewards.py").write_text(REWARDS)
        self.data = self.tasks("tasks", TASKS)
        made = {"data__train": self.data, "tiny__cold_start_steps": 80, "eval__tasks": 0}
        with self.opened(folder / "made", model__path="tiny", **made):
            pass
        self.model = folder / "made" / "cold_start"

    def tasks(self, name: str, numbers: Sequence[tuple[int, int]]) -> str:
        """A file with these sums."""
        rows = [
            {"prompt": f"{a}+{b}=", "answer": str(a + b), "solution": f"{a},{b};{a + b}"}
            for a, b in numbers
        ]
        return self.rows(name, rows)

    def rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> str:
        file = self.folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)

    def settings(self, **changes: Any) -> dict[str, Any]:
        """Changes by name; `reward="odd"` takes a function of the file above."""
        reward = changes.pop("reward", "odd")
        parts = {f"{self.folder / 'rewards.py'}:{reward}": 1.0} if reward.isidentifier() else None
        return {
            "data__train": self.data,
            "data__options": {},
            "model__path": str(getattr(self, "model", "tiny")),
            "reward__parts": parts or {reward: 1.0},
            "engine__max_tokens": 8,
            "optim__learning_rate": 3e-3,
            "eval__every": 0,
            "eval__tasks": 0,
            "checkpoint__every_steps": 0,
            "checkpoint__every_seconds": 0.0,
            **changes,
        }

    @contextmanager
    def opened(self, folder: Path, **changes: Any) -> Iterator[Run]:
        """A run before its first step; or where it was saved."""
        with open_run(small(**self.settings(**changes)), folder, quiet()) as run:
            check_delivery(run.progress, run.parts)
            yield run


def advance(run: Run, steps: int = 1) -> Run:
    for _ in range(steps):
        assert one_step(run, threading.Event())
    return run


def gather(run: Run) -> Collected:
    return run.stage.collect(run.parts, run.progress.cursor, run.reporter.event, Clock())


def learn(run: Run, collected: Collected, rate: float | None = 1e-3) -> StepUpdates:
    """The updates on these rollouts, at this rate for the policy. The run's counters stay."""
    memory, tell = run.progress.memory, run.reporter.event
    rates = rates_at(run.config, run.progress.step, run.config.steps)._replace(policy=rate)
    return run.stage.teach(run.parts, memory, collected, rates, tell, Clock())


def weights(model: Transformer) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


# With these the optimizer's first moment is the gradient of the last update itself.
BARE = {"optim__beta1": 0.0, "optim__clip_norm": 0.0}


def gradient(run: Run) -> Tensor:
    state = run.parts.learner.optimizer.state()
    return torch.cat([x.double().flatten() for k, x in state.items() if k.startswith("exp_avg/")])


def difference(a: Tensor, b: Tensor) -> float:
    """|a − b| / |b|."""
    return float((a - b).norm() / b.norm())


def rollouts(collected: Collected) -> list[Rollout]:
    return [rollout for group in collected.groups for rollout in group]


def full_logp(model: Transformer, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """log p of every token of the vocabulary at each place of the answer, by the textbook."""
    ids = torch.tensor([*prompt, *answer])
    hidden = model(ids, packed_positions([len(ids)]), packed([len(ids)]))
    every = torch.log_softmax(logits(hidden, model.head_weight), -1)
    return every[len(prompt) - 1 : -1].detach()


def plain_logp(model: Transformer, sequences: Sequences) -> Tensor:
    """logp_NT by the textbook."""
    logp_NT = torch.zeros(len(sequences.completions), sequences.width)
    for row, (prompt, answer) in enumerate(
        zip(sequences.prompts, sequences.completions, strict=True)
    ):
        found = full_logp(model, prompt, answer).gather(1, torch.tensor(answer)[:, None])
        logp_NT[row, : len(answer)] = found[:, 0]
    return logp_NT


def spy(
    monkeypatch: pytest.MonkeyPatch, target: str
) -> list[tuple[tuple[Any, ...], dict[str, Any], Any]]:
    """Every call of a function from now on: arguments, keywords, result."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
    module, _, name = target.rpartition(".")
    original: Callable[..., Any] = getattr(__import__(module, fromlist=[name]), name)

    def watched(*args: Any, **keywords: Any) -> Any:
        result = original(*args, **keywords)
        calls.append((args, keywords, result))
        return result

    monkeypatch.setattr(target, watched)
    return calls
