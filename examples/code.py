"""Programs as answers: each is run against its tests, in a sandbox.

    python examples/code.py

The embedded model learns to write functions: "times 3 plus 7:" -> "def f(x): return x*3+7".
With a real model take MBPP: data.train = "mbpp:train.jsonl", data.template = "chat".
"""

import itertools
import json
from pathlib import Path

from groupwise import load_config, train


def row(a: int, b: int) -> dict[str, object]:
    tests = [f"assert f({x}) == {a * x + b}" for x in (0, 1, 5)]
    program = f"def f(x): return x*{a}+{b}"
    return {"prompt": f"times {a} plus {b}:", "answer": program, "tests": tests,
            "solution": program}  # fmt: skip


SETTINGS = {
    "prompts_per_step": 16,
    "group_size": 8,
    "steps": 50,
    "recipe": {"name": "grpo", "schedule": {"updates": 4}},
    "model": {"path": "tiny", "device": "cpu", "threads": 1},
    "tiny": {"width": 64, "layers": 2},
    "data": {"train": "runs/functions.jsonl", "holdout_share": 0.1},
    "reward": {"parts": {"code(seconds=2)": 1.0}},
    "engine": {"max_tokens": 26},
    "optim": {"learning_rate": 7e-4, "warmup_steps": 5, "beta2": 0.95},
    "eval": {"every": 10, "tasks": 50, "temperature": 1.0},
}

if __name__ == "__main__":
    Path("runs").mkdir(exist_ok=True)
    rows = [json.dumps(row(a, b)) for a, b in itertools.product(range(2, 10), range(100))]
    Path("runs/functions.jsonl").write_text("\n".join(rows) + "\n")
    train(load_config(SETTINGS), "runs/code")
