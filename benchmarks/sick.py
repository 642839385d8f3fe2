"""Small runs that are made sick on purpose, and healthy ones of every recipe: who raises an alarm?

    python benchmarks/sick.py [--seeds 1 2 3] [--folder DIR] [--only NAME ...] [--healthy STEPS]

Prints the tables of docs/health.md: of each sickness how often the right rule fired first, at
which steps, and what else fired; of each healthy recipe, what fired (nothing should). A seed is
another starting model, other prompts and other samples; thresholds were chosen on seed 0. One
core, a few minutes a seed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from groupwise import Config
from groupwise.config import load
from groupwise.engine.batch import BatchEngine
from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.protocol import Request, Sampling
from groupwise.errors import ConfigError, DataError, GroupwiseError, RewardError
from groupwise.methods.composition import Recipe
from groupwise.model.formats.checkpoint import Loaded
from groupwise.recipes import RECIPES
from groupwise.records import Completion
from groupwise.training.loop import train
from groupwise.watch.diagnose import Diagnosis, diagnose
from groupwise.watch.display import Display
from groupwise.watch.health import Finding

# A small transformer over characters that adds three digits, right in a third of its samples.
BASE: dict[str, Any] = {
    "prompts_per_step": 16,
    "group_size": 8,
    "steps": 30,
    "model.threads": 1,
    "tiny.width": 64,
    "tiny.layers": 2,
    "tiny.heads": 2,
    "tiny.cold_start_accuracy": 0.35,
    "data.options": {"digits": 1, "terms": 3},
    "engine.max_tokens": 4,
    "engine.slots": 128,
    "optim.learning_rate": 3e-4,
    "eval.every": 10,
    "eval.tasks": 128,
    "eval.temperature": 1.0,
    "checkpoint.every_steps": 0,
    "checkpoint.every_seconds": 0,
}

REWARDS = '''
"""Graders that went wrong, each in its own way."""
import random

CHANCE = random.Random(0)


def nine(completion, answer):  # pays for a digit, whatever the question
    return float(completion.startswith("9"))


def raises(completion, answer, calls=[0]):  # once what it needs has gone away
    calls[0] += 1
    if calls[0] > 400 and calls[0] % 40 == 0:
        raise ConnectionError("the answer key is gone")
    return float(completion.strip().startswith(str(answer)))


def coin(completion, answer):
    return float(CHANCE.random() < 0.5)


def nothing_is_right(completion, answer):  # compares with a field that does not exist
    return float(completion == f"#### {answer}")
'''


@dataclass(frozen=True)
class Sickness:
    """What makes a run sick, and the rules that may be the first to say so."""

    expected: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    reward: Mapping[str, float] | None = None  # functions of REWARDS, beside "number"
    deaf: bool = False  # new weights do not reach the sampler


SICK: dict[str, Sickness] = {
    "symmetric clip, many updates": Sickness(
        ("clipping",),
        {"recipe": "grpo", "recipe.penalty": "", "prompts_per_step": 32, "steps": 10,
         "recipe.schedule.updates": 64, "optim.learning_rate": 1.5e-4},
    ),
    "no overlong handling": Sickness(
        ("truncation",), {"recipe": "grpo", "recipe.penalty": "", "engine.max_tokens": 2}
    ),
    "hackable reward": Sickness(
        ("reward hacking",),
        {"recipe": "dr_grpo", "recipe.aggregation.length": 4, "eval.every": 5},
        reward={"number": 1.0, "nine": 3.0},
    ),
    "int8 rollouts, no correction": Sickness(
        ("mismatch",), {"recipe": "dr_grpo", "recipe.aggregation.length": 4,
                        "engine.weights": "int8"}
    ),
    "learning rate too high": Sickness(
        ("reward falls", "entropy collapse", "entropy explosion", "gradient"),
        {"recipe": "dr_grpo", "recipe.aggregation.length": 4, "optim.learning_rate": 3e-2},
    ),
    "learning rate too low": Sickness(
        ("stalled",), {"recipe": "dr_grpo", "recipe.aggregation.length": 4, "steps": 120,
                       "optim.learning_rate": 1e-8}
    ),
    "data too hard": Sickness(
        ("all groups fail",), {"recipe": "dr_grpo", "recipe.aggregation.length": 4,
                               "data.options": {"digits": 3}, "engine.max_tokens": 8}
    ),
    "a grader that raises": Sickness(
        ("grader errors",), {"recipe": "dr_grpo", "recipe.aggregation.length": 4},
        reward={"raises": 1.0},
    ),
    "a grader that throws a coin": Sickness(
        ("reward noise",), {"recipe": "dr_grpo", "recipe.aggregation.length": 4},
        reward={"coin": 1.0},
    ),
    "a grader that calls nothing right": Sickness(
        ("all groups fail",), {"recipe": "dr_grpo", "recipe.aggregation.length": 4},
        reward={"nothing_is_right": 1.0},
    ),
    "weights not synced": Sickness(
        ("sampler behind",),
        {"recipe": "dr_grpo", "recipe.aggregation.length": 4, "optim.learning_rate": 1e-3},
        deaf=True,
    ),
}  # fmt: skip


# These may break on this task, and the rules say so: prime_seed's reward goes from 0.42 to 0 within
# 8 steps (to 0.15 at a tenth of the rate); prime's release divides by the largest return what its
# reward model says before that knows anything (docs/log.md, "PRIME's release on the sums").
BREAKS = ("prime_seed", "prime@release")


class Deaf(BatchEngine):
    """Claims every new version and samples from the first."""

    def __init__(self, loaded: Loaded, config: Config) -> None:
        model = copy.deepcopy(loaded.model)
        self.inner = NativeEngine(model, loaded.tokenizer, seed=config.seed, slots=128)

    def answer(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return self.inner.generate(requests, sampling)

    def sync(self, version: int) -> None:
        self.inner.source.version = version


def configured(model: str, settings: Mapping[str, Any]) -> Config:
    return load({k: v for k, v in BASE.items() if not k.startswith("tiny.")}
                | {"model.path": model} | dict(settings))  # fmt: skip


def cold_start(folder: Path, seed: int = 0) -> str:
    """The model that every run starts from, made once: the run of a single step keeps it."""
    made = folder / f"start_{seed}"
    if not (made / "cold_start").is_dir():
        settings = {"recipe": "dr_grpo", "recipe.aggregation.length": 4, "steps": 1, "seed": seed}
        quiet(load(BASE | settings), made)
    return str(made / "cold_start")


def quiet(config: Config, folder: Path, deaf: bool = False) -> None:
    torch.set_num_threads(1)
    engine = (lambda loaded: Deaf(loaded, config)) if deaf else None
    train(config, folder, Display(io.StringIO(), live=False), engine=engine)


def make_sick(name: str, model: str, folder: Path, **changes: Any) -> Diagnosis:
    """A run with one sickness, and what `groupwise diagnose` says about it."""
    case, settings = SICK[name], {**SICK[name].settings, **changes}
    shutil.rmtree(folder, ignore_errors=True)
    if case.reward is not None:
        folder.mkdir(parents=True)
        rewards = folder / "rewards.py"
        rewards.write_text(REWARDS)
        settings["reward.parts"] = {
            part if part == "number" else f"{rewards}:{part}": weight
            for part, weight in case.reward.items()
        }
    with contextlib.suppress(GroupwiseError):  # a guard stopped it: what it left is judged
        quiet(configured(model, settings), folder, case.deaf)
    return diagnose(folder)


def make_healthy(
    recipe: str, model: str, folder: Path, steps: int, seed: int = 0
) -> Diagnosis | None:
    """A run of a recipe as it is, at this size; None where it does not train on this task."""
    shutil.rmtree(folder, ignore_errors=True)
    settings: dict[str, Any] = {"recipe": recipe, "steps": steps, "seed": seed}
    made = RECIPES[recipe]
    if isinstance(made, Recipe):
        if made.schedule["updates"] > 2:  # those of the papers are for thousands of completions
            settings["recipe.schedule.updates"] = 2
        if "length" in dict(made.aggregation.params):
            settings["recipe.aggregation.length"] = 4
    try:
        quiet(configured(model, settings), folder)
    except (ConfigError, DataError, RewardError):  # the last: it wants rewards of steps
        return None
    return diagnose(folder)


def fired(found: Sequence[Finding]) -> str:
    return ", ".join(f"{finding.rule.name} ({finding.step})" for finding in found) or "–"


def sick_row(name: str, models: Mapping[int, str], folder: Path) -> str:
    """One sickness under every seed, as a line of the table."""
    runs = [
        make_sick(name, model, folder / f"seed_{seed}" / name.replace(" ", "_"), seed=seed).findings
        for seed, model in models.items()
    ]
    firsts = [found[0] for found in runs if found]
    right = sum(first.rule.name in SICK[name].expected for first in firsts)
    said = Counter(first.rule.name for first in firsts)
    cells = (
        name,
        ", ".join(f"{rule} ({times})" for rule, times in said.most_common()) or "–",
        f"{right} of {len(runs)}",
        ", ".join(str(first.step) for first in firsts),
        ", ".join(str(first.evidence.first) for first in firsts),
        "; ".join(dict.fromkeys(fired(found[1:]) for found in runs)),
    )
    return "| " + " | ".join(cells) + " |"


def healthy_row(recipe: str, models: Mapping[int, str], folder: Path, steps: int) -> str:
    """One recipe under every seed; "" where it does not train on this task."""
    begun, said = time.perf_counter(), []
    for seed, model in models.items():
        place = folder / f"seed_{seed}" / "healthy" / recipe
        diagnosis = make_healthy(recipe, model, place, steps, seed)
        if diagnosis is None:
            return ""
        said.append(fired(diagnosis.findings))
    quiet_ones = said.count("–")
    alarms = "; ".join(text for text in said if text != "–") or "–"
    seconds = (time.perf_counter() - begun) / len(said)
    return f"| {recipe} | {quiet_ones} of {len(said)} | {alarms} | {seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="*", help="sicknesses or recipes, by name")
    parser.add_argument("--healthy", type=int, default=30, help="steps of healthy runs; 0: none")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp())
    models = {seed: cold_start(folder, seed) for seed in args.seeds}
    print("| sickness | first rule | right | sure at step | first bad step | also (sure at) |")
    print("|---|---|---|---|---|---|")
    for name in SICK:
        if not args.only or name in args.only:
            print(sick_row(name, models, folder), flush=True)
    if not args.healthy:
        return
    print("\n| recipe | quiet | alarms (sure at) | seconds a run |\n|---|---|---|---|")
    for recipe in sorted(RECIPES):
        row = ""
        if not args.only or recipe in args.only:
            row = healthy_row(recipe, models, folder, args.healthy)
        if row:
            print(row, flush=True)


if __name__ == "__main__":
    main()
