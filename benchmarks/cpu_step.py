"""One side of the comparison of whole training steps; benchmarks/cpu.py starts both.

    python benchmarks/cpu_step.py {groupwise,trl} MODEL [--steps 3] [--rows-at-once 64]

Prints one JSON object: seconds of every step and the process's peak memory. Both sides: 8 prompts x
8 completions x 32 tokens (end tokens ignored), temperature 1, float32, AdamW, clip 0.2, no KL.
Run TRL's side with an interpreter that has TRL.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

PROMPTS, GROUP, TOKENS = 8, 8, 32


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [
                {
                    "role": "user",
                    "content": f"What is {3 + i} plus {7 * i}? Explain your answer step by step.",
                }
            ],
            "answer": str(3 + 8 * i),
        }
        for i in range(count)
    ]


def last_number_is(text: str, answer: str) -> float:
    found = re.findall(r"\d+", text)
    return float(bool(found) and found[-1] == answer)


def groupwise_steps(model: str, steps: int, threads: int) -> list[float]:
    import io
    import threading

    from groupwise.config import load
    from groupwise.training.loop import one_step
    from groupwise.training.opening import open_run
    from groupwise.watch.display import Display

    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data.jsonl"
        data.write_text("\n".join(json.dumps(row) for row in rows(PROMPTS * steps)))
        config = load(
            recipe="grpo",
            prompts_per_step=PROMPTS,
            group_size=GROUP,
            steps=steps,
            **{
                "recipe.penalty": "",
                "model.path": model,
                "model.device": "cpu",
                "model.dtype": "float32",
                "model.threads": threads,
                "data.train": str(data),
                "engine.max_tokens": TOKENS,
                "optim.learning_rate": 1e-6,
                "optim.micro_tokens": 320,  # a group and its prompt
                "checkpoint.every_steps": 0,
                "checkpoint.every_seconds": 0,
                "eval.every": 0,
            },
        )
        found = []
        with open_run(config, Path(scratch) / "run", Display(io.StringIO(), live=False)) as run:
            run.parts.loaded.tokenizer.eos_ids = ()
            for _ in range(steps):
                begun = time.perf_counter()
                one_step(run, threading.Event())
                found.append(time.perf_counter() - begun)
    return found


def trl_steps(model: str, steps: int, threads: int, rows_at_once: int) -> list[float]:
    import torch
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    torch.set_num_threads(threads)

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [
            last_number_is(c[0]["content"], a) for c, a in zip(completions, answer, strict=True)
        ]

    found: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            found.append(time.perf_counter() - self.begun)

    with tempfile.TemporaryDirectory() as scratch:
        settings = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=rows_at_once,
            gradient_accumulation_steps=PROMPTS * GROUP // rows_at_once,
            num_generations=GROUP,
            max_completion_length=TOKENS,
            generation_kwargs={"min_new_tokens": TOKENS},
            max_steps=steps,
            beta=0.0,
            temperature=1.0,
            learning_rate=1e-6,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,  # its faster way
            model_init_kwargs={"dtype": "float32"},
            report_to=[],
            save_strategy="no",
            logging_steps=1,
        )
        GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list(rows(PROMPTS * steps)),
            callbacks=[Clock()],
        ).train()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["groupwise", "trl"])
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--rows-at-once", type=int, default=PROMPTS * GROUP, help="of TRL: its micro-batch"
    )
    args = parser.parse_args()
    if args.side == "groupwise":
        seconds = groupwise_steps(args.model, args.steps, args.threads)
    else:
        seconds = trl_steps(args.model, args.steps, args.threads, args.rows_at_once)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "peak_bytes": peak}))


if __name__ == "__main__":
    main()
