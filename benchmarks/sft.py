"""Supervised fine-tuning on the CPU beside TRL's: tokens a second and peak memory.

    python benchmarks/sft.py MODEL ROWS.jsonl --peer PYTHON [--rounds 3] [--batch 8] [--steps 6]

MODEL is a Hugging Face folder with a chat template, ROWS has `prompt` and `solution`, PYTHON is an
interpreter that has TRL. Both programs read the same rows as conversations, in float32, learn the
answers alone, and take steps of the same number of rows; each run is a process of its own, and they
take turns, so that a busy machine is as busy for both. Counted are tokens of prompts and answers,
no padding; the first step of each run, which warms up, is left out. TRL runs with each of its
settings in `PEER`, and its best one is compared, for speed and for memory apart.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Rows of a forward pass: the rest of a batch is accumulated. One row has no padding at all.
PEER = ("whole", "half", "single")


def ours(model: str, rows: str, batch: int, steps: int) -> dict[str, Any]:
    """Train with groupwise; return seconds and tokens of each step."""
    import pyarrow.parquet as parquet

    from groupwise.config import load
    from groupwise.training.loop import steps as cycle
    from groupwise.watch.display import Display

    config = load(
        {
            "recipe": "sft",
            "model.path": model,
            "model.device": "cpu",
            "model.dtype": "float32",
            "data.train": rows,
            "data.template": "chat",
            "data.shuffle": False,
            "prompts_per_step": batch,
            "steps": steps,
            "eval.tasks": 0,
            "checkpoint.every_steps": 0,
            "checkpoint.every_seconds": 0.0,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        run, seconds, memory = Path(folder) / "run", [], 0
        for metrics in cycle(config, run, Display(open("/dev/null", "w"), live=False)):  # noqa: SIM115
            if metrics["step"]:
                seconds.append(metrics["time/step"])
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        tokens = []
        for step in range(1, steps + 1):
            table = parquet.read_table(run / "rollouts" / f"step_{step}.parquet")
            sides = ("prompt_token_ids", "token_ids")
            tokens.append(sum(len(ids) for side in sides for ids in table[side].to_pylist()))
    return {"seconds": seconds, "tokens": tokens, "memory": memory}


def peer(model: str, rows: str, batch: int, steps: int, how: str) -> dict[str, Any]:
    """Train with TRL's SFTTrainer; return seconds and tokens of each step."""
    import time

    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    at_once = {"whole": batch, "half": max(batch // 2, 1), "single": 1}[how]
    seconds: list[float] = []
    tokens: list[int] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *given: Any, **named: Any) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, *given: Any, **named: Any) -> None:
            seconds.append(time.perf_counter() - self.begun)

    talks = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["solution"]}],
        }
        for row in map(json.loads, Path(rows).read_text().splitlines())
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            max_length=None,
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=batch // at_once,
            max_steps=steps,
            learning_rate=2e-5,
            lr_scheduler_type="constant",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1000,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            completion_only_loss=True,
            model_init_kwargs={"dtype": "float32"},
        )
        trainer = SFTTrainer(
            model=model, args=config, train_dataset=Dataset.from_list(talks), callbacks=[Watch()]
        )
        inner = trainer.get_batch_samples

        def counted(*given: Any, **named: Any) -> Any:
            found = inner(*given, **named)
            tokens.append(sum(int(part["attention_mask"].sum()) for part in found[0]))
            return found

        trainer.get_batch_samples = counted
        trainer.train()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "tokens": tokens[:steps], "memory": memory}


def measured(python: str, args: argparse.Namespace, which: str) -> dict[str, float]:
    """Run one program in a process of its own; return tokens a second and memory in bytes."""
    command = [python, __file__, args.model, args.rows, "--worker", which]
    command += ["--batch", str(args.batch), "--steps", str(args.steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{which} failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    speed = sum(found["tokens"][1:]) / sum(found["seconds"][1:])
    print(f"{which}: {speed:,.0f} tokens/s, {found['memory'] / 2**30:.2f} GiB", flush=True)
    return {"speed": speed, "memory": found["memory"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--worker", default="")
    args = parser.parse_args()
    work = (args.model, args.rows, args.batch, args.steps)
    if args.worker:
        made = ours(*work) if args.worker == "ours" else peer(*work, args.worker)
        print(json.dumps(made))
        return
    faster, smaller = [], []
    for _ in range(args.rounds):
        own = measured(sys.executable, args, "ours")
        others = [measured(args.peer, args, how) for how in PEER]
        faster.append(own["speed"] / max(other["speed"] for other in others))
        smaller.append(own["memory"] / min(other["memory"] for other in others))
    print(
        f"median of {args.rounds} rounds: {statistics.median(faster):.2f} times the tokens/s of "
        f"TRL's best setting, {statistics.median(smaller):.2f} of the memory of its smallest"
    )


if __name__ == "__main__":
    main()
