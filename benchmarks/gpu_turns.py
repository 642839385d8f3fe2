"""Tools and games on one GPU: each arm trained for equal minutes, with what it was and became.

    python benchmarks/gpu_turns.py --model MODEL --train TRAIN.jsonl --test TEST.jsonl \
        [--arms none calculator python guess guess_turns] [--minutes 4] [--tasks 500] [--out DIR]
    python benchmarks/gpu_turns.py --tiny        # all of it on a CPU, a few steps: nothing measured

Arms on GSM8K (rows of {"prompt", "answer"}): `none`, one answer; `calculator` and `python`, up to
four turns with the tool. The reward is the final number, in the last turn alone. Arms of a game:
`guess`, a number from 0 to 1024 in ten guesses, won or lost; `guess_turns`, the same with
turn_return_to_go. All else is the same: recipe, rate, prompts, samples, tokens of the policy.
Held-out accuracy is of the same first tasks; a game's is the share of episodes won.

It ends with 1 where a run is not what it should be: fewer than two steps, an accuracy that is not
measured, episodes of which more than a tenth fail, a tool that is never called, or sampler and
learner that are apart by more than the model's precision explains.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TOOLS, GAMES = ("none", "calculator", "python"), ("guess", "guess_turns")
SYSTEM = (
    "Solve the problem step by step. End with the final answer on its own line as '#### <number>'."
)
GUESS = "Guess a number from 0 to 1024. Each guess is answered by higher or lower. Write a number."
APART = 0.02  # mean |log-probability of the sampler less the learner's|, in bfloat16
FAILED = 0.1

Row = dict[str, Any]


def settings(arm: str, given: argparse.Namespace, folder: Path) -> Row:
    """Return the settings of an arm."""
    tokens = 24 if given.tiny else (320 if arm in TOOLS else 200)
    found: Row = {
        "recipe": "dr_grpo",
        "recipe.aggregation.length": tokens,
        "prompts_per_step": 4 if given.tiny else (64 if arm in TOOLS else 32),
        "group_size": 4 if given.tiny else 8,
        "engine.max_tokens": tokens,
        "optim.learning_rate": 7e-4 if given.tiny else given.rate,
        "eval.every": 0,
        "eval.temperature": 1.0,
        "checkpoint.every_steps": 0,
        "checkpoint.every_seconds": 0.0,
    }
    if given.tiny:
        found |= {"steps": 2, "model.path": "tiny", "model.device": "cpu", "tiny.layers": 1,
                  "tiny.width": 32, "tiny.cold_start_steps": 20, "eval.tasks": 8}  # fmt: skip
    else:
        found |= {"steps": 100_000, "budget.seconds": 60.0 * given.minutes,
                  "model.path": given.model, "model.dtype": "bfloat16", "model.device": "cuda",
                  "eval.tasks": given.tasks, "data.template": "chat"}  # fmt: skip
    return found | (word_problems(arm, given) if arm in TOOLS else game(arm, given, folder))


def word_problems(arm: str, given: argparse.Namespace) -> Row:
    source = {"data.train": "arithmetic"} if given.tiny else {
        "data.train": given.train, "data.eval": given.test, "data.system": SYSTEM}  # fmt: skip
    found: Row = {**source, "reward.parts": {"number": 1.0}}
    if arm != "none":
        found |= {"turns.tools": [arm], "turns.max": 4}
    if arm != "none" and given.tiny:
        found |= {"turns.template": "[{role}]{text}\n"}
    return found


def game(arm: str, given: argparse.Namespace, folder: Path) -> Row:
    """Return the settings of a game; its rows are written here."""
    found: Row = {"turns.environment": "guess", "turns.max": 10,
                  "turns.options": {"low": 0, "high": 1024, "guesses": 10}}  # fmt: skip
    if given.tiny:
        found |= {"turns.template": "[{role}]{text}\n", "data.train": "guess",
                  "data.options": {"high": 1024}, "data.size": 64}  # fmt: skip
    else:
        for name, numbers in (("train", range(0, 1025)), ("test", range(3, 1025, 2))):
            rows = [{"prompt": GUESS, "answer": str(n), "secret": n} for n in numbers]
            (folder / f"guess_{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        found |= {"data.train": str(folder / "guess_train.jsonl"),
                  "data.eval": str(folder / "guess_test.jsonl")}  # fmt: skip
    if arm == "guess_turns":
        found["recipe.advantage"] = "turn_return_to_go()"
    return found


def trained(arm: str, given: argparse.Namespace, out: Path) -> Row:
    """Train an arm in a process of its own; return its figures, and what is wrong with them."""
    from groupwise.config import load
    from groupwise.config import text as toml

    folder = out / arm
    folder.mkdir(parents=True, exist_ok=True)
    file, run = folder / "config.toml", folder / "run"
    file.write_text(toml(load(settings(arm, given, folder))))
    begun = time.monotonic()
    command = [sys.executable, "-m", "groupwise", "train", str(file), "--run", str(run)]
    code = subprocess.run(command, stdout=sys.stderr).returncode
    wall = time.monotonic() - begun
    if code:
        return {"arm": arm, "wrong": [f"the run ended with status {code}"]}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    return figures(arm, lines, summary) | {"wall": wall} | {
        "wrong": list(problems(arm, lines, summary, given.tiny))
    }  # fmt: skip


def figures(arm: str, lines: list[Row], summary: Row) -> Row:
    steps = [line for line in lines if line["step"] > 0]
    last = steps[-1]
    kept = ("turns/mean", "turns/calls", "turns/failed_call_share", "turns/failed_share")
    return {
        "arm": arm,
        "before": summary.get("accuracy_before"),
        "after": summary.get("accuracy_after"),
        "steps": len(steps),
        "step_seconds": sum(line.get("time/step", 0.0) for line in steps) / len(steps),
        **{name: last[name] for name in kept if name in last},
        "stops": {k.removeprefix("turns/stop/"): x for k, x in last.items() if "/stop/" in k},
    }


def problems(arm: str, lines: list[Row], summary: Row, tiny: bool) -> list[str]:
    steps = [line for line in lines if line["step"] > 0]
    found = []
    if len(steps) < 2:
        found.append(f"{len(steps)} steps: too few to say anything")
    for name in ("accuracy_before", "accuracy_after"):
        if summary.get(name) is None:
            found.append(f"{name} was not measured")
    worst = max((line.get("turns/failed_share", 0.0) for line in steps), default=0.0)
    if worst > FAILED:
        found.append(f"{worst:.0%} of the episodes of a step failed")
    called = sum(line.get("turns/calls", 0.0) for line in steps)
    if arm in ("calculator", "python") and not called and not tiny:
        found.append("the tool was never called")
    apart = max((line.get("mismatch/abs_mean") or 0.0 for line in steps), default=0.0)
    if apart > APART:
        found.append(f"sampler and learner are {apart:.3f} apart")
    return found


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--model")
    asked.add_argument("--train")
    asked.add_argument("--test")
    asked.add_argument("--arms", nargs="+", choices=(*TOOLS, *GAMES), default=[*TOOLS, *GAMES])
    asked.add_argument("--minutes", type=float, default=4.0)
    asked.add_argument("--tasks", type=int, default=500)
    asked.add_argument("--rate", type=float, default=3e-6)
    asked.add_argument("--out", type=Path)
    asked.add_argument("--tiny", action="store_true")
    given = asked.parse_args()
    needed = (
        ()
        if given.tiny
        else ("model", *(("train", "test") if set(given.arms) & set(TOOLS) else ()))
    )
    for name in needed:
        if getattr(given, name) is None:
            asked.error(f"--{name} is missing")
    with tempfile.TemporaryDirectory() as scratch:
        out = given.out or Path(scratch)
        made = []
        for arm in given.arms:
            made.append(trained(arm, given, out))
            print(json.dumps(made[-1]), flush=True)
    wrong = [f"{each['arm']}: {why}" for each in made for why in each["wrong"]]
    print("\n".join(wrong) if wrong else f"{len(made)} arms, nothing wrong")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
