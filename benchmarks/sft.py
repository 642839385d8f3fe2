"""Supervised fine-tuning on the CPU beside TRL's: tokens a second and peak memory.

    python benchmarks/sft.py MODEL ROWS.jsonl --peer PYTHON [--rounds 3] [--batch 8] [--steps 6]
                             [--threads 1] [--dtype bfloat16] [--micro 512]

MODEL is a Hugging Face folder with a chat template, ROWS has `prompt` and `solution`, PYTHON is an
interpreter that has TRL. Both programs read the same rows as conversations, in float32 (or both in
bfloat16, with float32 weights to update), learn the answers alone, and take steps of the same
number of rows; each run is a process of its own, and they take turns, so that a busy machine is as
busy for both. Counted are tokens of prompts and answers, no padding; the first step of each run,
which warms up, is left out. Beside seconds by the clock stand those of the processor, which others
on the machine can't lengthen as much. TRL runs with each of its settings in `PEER`: `whole` takes a
batch in one pass, as it does by itself, the others accumulate. Every one is compared.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

# Rows of a forward pass: the rest of a batch is accumulated. One row has no padding at all.
PEER = ("whole", "half", "single")


@dataclass(frozen=True)
class Work:
    """What both programs do."""

    model: str
    rows: str
    batch: int
    steps: int
    dtype: str
    threads: int
    micro: int  # tokens of a pass of ours


@dataclass(frozen=True)
class Clocks:
    """Seconds of each step, by the clock and of the processor."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def note(self, since: tuple[float, float]) -> None:
        wall, cpu = now()
        self.seconds.append(wall - since[0])
        self.cpu.append(cpu - since[1])


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def ours(work: Work) -> dict[str, Any]:
    """Train with groupwise; return seconds and tokens of each step."""
    import pyarrow.parquet as parquet

    from groupwise.config import load
    from groupwise.training.loop import steps as cycle
    from groupwise.watch.display import Display

    config = load(
        {
            "recipe": "sft",
            "model.path": work.model,
            "model.device": "cpu",
            "model.dtype": work.dtype,
            "model.threads": work.threads,
            "optim.micro_tokens": work.micro,
            "data.train": work.rows,
            "data.template": "chat",
            "data.shuffle": False,
            "prompts_per_step": work.batch,
            "steps": work.steps,
            "eval.tasks": 0,
            "checkpoint.every_steps": 0,
            "checkpoint.every_seconds": 0.0,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        run, clocks, memory = Path(folder) / "run", Clocks(), 0
        since = now()
        for metrics in cycle(config, run, Display(open("/dev/null", "w"), live=False)):  # noqa: SIM115
            if metrics["step"]:
                clocks.note(since)
            since, memory = now(), peak()
        tokens = []
        for step in range(1, work.steps + 1):
            table = parquet.read_table(run / "rollouts" / f"step_{step}.parquet")
            sides = ("prompt_token_ids", "token_ids")
            tokens.append(sum(len(ids) for side in sides for ids in table[side].to_pylist()))
    return {**asdict(clocks), "tokens": tokens, "memory": memory}


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peer(work: Work, how: str) -> dict[str, Any]:
    """Train with TRL's SFTTrainer; return seconds and tokens of each step."""
    import torch
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    if work.threads:
        torch.set_num_threads(work.threads)
    at_once = {"whole": work.batch, "half": max(work.batch // 2, 1), "single": 1}[how]
    clocks = Clocks()
    tokens: list[int] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *given: Any, **named: Any) -> None:
            self.begun = now()

        def on_step_end(self, *given: Any, **named: Any) -> None:
            clocks.note(self.begun)

    talks = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["solution"]}],
        }
        for row in map(json.loads, Path(work.rows).read_text().splitlines())
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            max_length=None,
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=work.batch // at_once,
            max_steps=work.steps,
            learning_rate=2e-5,
            lr_scheduler_type="constant",
            use_cpu=True,
            bf16=work.dtype == "bfloat16",
            gradient_checkpointing=False,
            logging_steps=1000,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            completion_only_loss=True,
            model_init_kwargs={"dtype": "float32"},
        )
        trainer = SFTTrainer(
            model=work.model,
            args=config,
            train_dataset=Dataset.from_list(talks),
            callbacks=[Watch()],
        )
        inner = trainer.get_batch_samples

        def counted(*given: Any, **named: Any) -> Any:
            found = inner(*given, **named)
            tokens.append(sum(int(part["attention_mask"].sum()) for part in found[0]))
            return found

        trainer.get_batch_samples = counted
        trainer.train()
    return {**asdict(clocks), "tokens": tokens[: work.steps], "memory": peak()}


def measured(python: str, work: Work, which: str) -> dict[str, float]:
    """Run one program in a process of its own; return tokens a second and memory in bytes."""
    command = [python, __file__, work.model, work.rows, "--worker", which]
    for name in ("batch", "steps", "dtype", "threads", "micro"):
        command += [f"--{name}", str(getattr(work, name))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{which} failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    tokens = sum(found["tokens"][1:])
    speed, work_done = tokens / sum(found["seconds"][1:]), tokens / sum(found["cpu"][1:])
    print(
        f"{which}: {speed:,.0f} tokens/s, {work_done:,.0f} a processor's second, "
        f"{found['memory'] / 2**30:.2f} GiB",
        flush=True,
    )
    return {"speed": speed, "cpu": work_done, "memory": found["memory"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--micro", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=list(PEER), choices=PEER)
    parser.add_argument("--worker", default="")
    args = parser.parse_args()
    work = Work(*(getattr(args, each.name) for each in fields(Work)))
    if args.worker:
        made = ours(work) if args.worker == "ours" else peer(work, args.worker)
        print(json.dumps(made))
        return
    rounds = []
    for _ in range(args.rounds):
        own = measured(sys.executable, work, "ours")
        rounds.append((own, {how: measured(args.peer, work, how) for how in args.only}))
    for how in args.only:
        ratios = {
            key: statistics.median(own[key] / others[how][key] for own, others in rounds)
            for key in ("speed", "cpu", "memory")
        }
        print(
            f"beside {how}, median of {args.rounds} rounds: {ratios['speed']:.2f} times the "
            f"tokens/s, {ratios['cpu']:.2f} by the processor's seconds, {ratios['memory']:.2f} of "
            "the memory"
        )


if __name__ == "__main__":
    main()
