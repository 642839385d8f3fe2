"""What `groupwise plan` says beside what `groupwise train` took, on a CPU.

    python benchmarks/plan.py MODEL [--only NAME] [--json FILE]

Every setting is planned, then trained for two steps in a process of its own; its peak is what the
kernel counted (the largest resident set), evaluation and checkpoint included. Phases are those of
the second step. The plan was mended with `group 16, 64 tokens` and `many in flight`; the other
settings are a check of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# What differs from COMMON. Names say what is tried.
SETTINGS: dict[str, tuple[str, ...]] = {
    "group 4, 64 tokens": ("group_size=4", "engine.max_tokens=64"),
    "group 8, 128 tokens": ("group_size=8", "engine.max_tokens=128"),
    "group 16, 64 tokens": ("group_size=16", "engine.max_tokens=64"),
    "256 tokens": ("group_size=4", "engine.max_tokens=256"),
    "512 tokens": ("group_size=4", "prompts_per_step=1", "engine.max_tokens=512"),
    "many in flight": (
        "prompts_per_step=8",
        "group_size=8",
        "engine.max_tokens=64",
        "optim.micro_tokens=256",
    ),
    "micro_tokens 512": ("group_size=8", "engine.max_tokens=64", "optim.micro_tokens=512"),
    "micro_tokens 2048": ("group_size=16", "engine.max_tokens=64", "optim.micro_tokens=2048"),
    "recompute": (
        "group_size=8",
        "engine.max_tokens=128",
        "optim.micro_tokens=2048",
        "optim.recompute=true",
    ),
    "reference": ("recipe=grpo", "group_size=4", "engine.max_tokens=64"),
    "reference that follows": (
        "recipe=grpo",
        "reference.update=ema:0.9",
        "group_size=4",
        "engine.max_tokens=64",
    ),
    "four updates": ("recipe=grpo@verl", "group_size=8", "engine.max_tokens=64"),
    "bfloat16": ("group_size=4", "engine.max_tokens=64", "model.dtype=bfloat16"),
    "adapter": ("adapter.rank=16", "group_size=4", "engine.max_tokens=32"),
}
COMMON = (
    "recipe=grpo@trl",
    "prompts_per_step=2",
    "steps=2",
    "eval.tasks=0",
    "checkpoint.every_steps=0",
    "checkpoint.every_seconds=0",
    "optim.learning_rate=1e-6",
)
SENTENCE = "A shop has {a} boxes with {b} eggs each, and {c} of the eggs are broken. "
QUESTION = "How many eggs can it sell? Explain your answer step by step, in many words."


def rows(count: int = 32) -> list[dict[str, str]]:
    """Prompts of several lengths that ask for long answers."""
    return [
        {
            "prompt": SENTENCE.format(a=i + 3, b=2 * i + 5, c=i) * (1 + i % 3) + QUESTION,
            "answer": str((i + 3) * (2 * i + 5) - i),
        }
        for i in range(count)
    ]


def planned(items: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "groupwise.cli", "plan", *items, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def trained(items: list[str], run: Path) -> dict[str, Any]:
    """Peak bytes of a run, and the seconds of its last step by phase."""
    command = [sys.executable, "-m", "groupwise.cli", "train", *items, "--run", str(run)]
    with (run.parent / "log.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed:\n{(run.parent / 'log.txt').read_text()[-2000:]}")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    seconds = {k.removeprefix("time/"): v for k, v in last.items() if k.startswith("time/")}
    factor = 1 if sys.platform == "darwin" else 1024
    return {"peak": used.ru_maxrss * factor, "seconds": seconds, "length": last["length/mean"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a Hugging Face folder or a .gguf file")
    parser.add_argument("--only", help="one setting by its name")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    found = {}
    print(f"{'setting':<24}{'planned':>9}{'measured':>10}{'off by':>8}   seconds: planned / took")
    for name, more in SETTINGS.items():
        if args.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            data = Path(scratch) / "data.jsonl"
            data.write_text("\n".join(map(json.dumps, rows())))
            items = [f"model.path={args.model}", f"data.train={data}", *COMMON, *more]
            measured = trained(items, Path(scratch) / "run")
            # Answers are as long as they were: how long is not what is compared.
            tokens = str(max(1, round(measured["length"])))
            plan = planned([*items, "--tokens", tokens])
        found[name] = {"plan": plan, "measured": measured}
        off = plan["peak"] / measured["peak"] - 1
        times = ", ".join(
            f"{phase} {took:.1f} / {measured['seconds'][phase]:.1f}"
            for phase, took in (plan["seconds"] or {}).items()
            if phase in measured["seconds"]
        )
        print(
            f"{name:<24}{plan['peak'] / 1e9:>6.2f} GB{measured['peak'] / 1e9:>7.2f} GB{off:>+8.0%}"
            f"   {times}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
