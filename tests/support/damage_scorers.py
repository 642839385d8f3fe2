"""Models that score, checkpoints of two models and rollout files, whole: for others to damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from model_zoo import make
from scorers import folder_of, language_model, scores
from viewing import make_run, sample

from groupwise.config import load
from groupwise.graders import recorded_verdicts, scorers
from groupwise.graders.parts import SampleToGrade
from groupwise.model.formats import classifier
from groupwise.model.policy import starting_policy
from groupwise.model.scalar_head import ScalarHead
from groupwise.recipes import recipe
from groupwise.records import Branch, Task
from groupwise.replay.recorded import read_step
from groupwise.runfiles import rollouts
from groupwise.runfiles.folder import RunFolder
from groupwise.sync import checkpoints as states
from groupwise.sync.export import export

SAYS = {classifier.SEPARATOR: "\n\n"}


def whole(kind: classifier.Kind, name: str, **changes: Any) -> Callable[[Path], Path]:
    """Return what writes a classifier's folder; the file of this name is damaged."""

    def made(folder: Path) -> Path:
        loaded = classifier.padded(language_model(**changes))
        says = SAYS if kind == "token" else {}
        classifier.save(_scored(loaded.model), folder / "scorer", loaded.files, kind, says=says)
        return folder / "scorer" / name

    return made


def adapter(name: str) -> Callable[[Path], Path]:
    """Return what writes the adapter of a process reward model, and its base."""

    def made(folder: Path) -> Path:
        base = folder_of(folder / "base")
        config = load(
            {"model.path": str(base), "model.device": "cpu", "model.dtype": "float32",
             "adapter.rank": 2}
        )  # fmt: skip
        loaded = classifier.padded(starting_policy(config, base, head=False))
        held = classifier.contents(_scored(loaded.model), loaded.files, "token", says=SAYS)
        (folder / "scorer").mkdir()
        held.fill(folder / "scorer")
        return folder / "scorer" / name

    return made


def _scored(trunk: Any) -> ScalarHead:
    head = ScalarHead(trunk)
    torch.nn.init.normal_(head.score.weight, generator=torch.Generator().manual_seed(1))
    return head


def exported(folder: Path) -> None:
    """Do with a scorer what `groupwise export` does."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    export(folder / "scorer", out)


def critic(folder: Path) -> None:
    """Begin a critic with it, as `critic.start` does."""
    scores(classifier.load_scalar_head(folder / "scorer"), [1, 2, 3])


def graded(part: str) -> Callable[[Path], None]:
    """Return what gives the folder to `rm` or `prm`, and an answer to grade."""
    make_part: dict[str, Callable[..., Any]] = {"rm": scorers.rm, "prm": scorers.prm}

    def read(folder: Path) -> None:
        scorers.load.cache_clear()
        asked = SampleToGrade(Task(0, "say 7: "), "one\n\ntwo", (), "eos")
        make_part[part]((), path=str(folder / "scorer")).grade([asked])

    return read


def checkpoint_of_two(folder: Path) -> Path:
    """Write a checkpoint of a policy and its critic."""
    tensors = {
        "optimizer": {"m": torch.zeros(4)},
        "critic": {"weights/score.weight": torch.ones(4)},
    }
    held = states.snapshot(
        3, weights=states.policy_contents(make("qwen2"), {}), tensors=tensors, values={"step": 3}
    )
    return states.write(folder / "checkpoints", held, keep=2) / "resume" / "critic.safetensors"


def branched(folder: Path) -> Path:
    """Write a run whose first step has branches, values of a critic and rewards of steps."""
    run = make_run(folder / "run", 2)
    tokens = 2
    more = {
        "value": torch.full((tokens,), 0.5),
        "return_": torch.ones(tokens),
        "process_reward": torch.zeros(tokens),
        "reward_steps": [(1, 0.5)],
    }
    rows = [sample(0, n, **more) for n in range(4)]
    rows += [sample(0, n, branch=Branch(1, n), **more) for n in range(2)]
    rollouts.write(run.rollout(1), rows, 1)
    return run.rollout(1)


def replayed(folder: Path) -> None:
    """Read the rollouts as a replay, the viewer and a resumed run do."""
    run = RunFolder(folder / "run")
    rollouts.read(run.rollout(1))
    rollouts.read_answers(run.rollout(1), ("group", "reward"))
    recorded_verdicts.recorded([run.rollout(1)])
    read_step(run, 1, recipe("grpo"))
