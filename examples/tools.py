"""A tool: the model may ask a calculator before it answers, and learns that this pays.

    python examples/tools.py

The embedded model has seen somebody who mostly guesses products, and sometimes asks. A real model
needs no such lessons and no class: `turns.tools = ["calculator", "file.py:function"]`.
"""

import json
import random
from contextlib import suppress
from pathlib import Path

from groupwise import load_config, train
from groupwise.envs.builtin.calculator import value


class Desk:
    """Works out what ends in a question mark, and takes everything else for the answer."""

    def reset(self, answer: str, **row: object) -> None:
        self.answer = answer

    def step(self, text: str) -> str | tuple[str, float, bool]:
        if not text.endswith("?"):
            return "", float(text.strip() == self.answer), True
        with suppress(ValueError):
            return str(value(text[:-1]))
        return "what?"


def row(a: int, b: int, draw: random.Random) -> str:
    asked = f"{a}*{b}?\n[user]{a * b}\n[assistant]{a * b}\n"
    shown = asked if draw.random() < 0.4 else f"{draw.randrange(20, 900)}\n"
    return json.dumps({"prompt": f"{a}*{b}=", "answer": str(a * b), "solution": shown})


SETTINGS = {
    "prompts_per_step": 16, "group_size": 8, "steps": 30, "recipe": "grpo",
    "model": {"path": "tiny", "device": "cpu", "threads": 1},
    "tiny": {"width": 64, "layers": 2, "cold_start_accuracy": 1.0, "cold_start_steps": 800},
    "data": {"train": "runs/products.jsonl", "holdout_share": 0.1},
    "turns": {"environment": f"{__file__}:Desk", "template": "[{role}]{text}\n", "max": 3},
    "engine": {"max_tokens": 32},
    "optim": {"learning_rate": 7e-4, "warmup_steps": 3, "beta2": 0.95},
    "eval": {"every": 5, "tasks": 60, "temperature": 1.0},
}  # fmt: skip

if __name__ == "__main__":
    draw = random.Random(0)
    rows = [row(a, b, draw) for a in range(2, 10) for b in range(10, 100)]
    Path("runs").mkdir(exist_ok=True)
    Path("runs/products.jsonl").write_text("\n".join(rows) + "\n")
    train(load_config(SETTINGS), "runs/tools")
