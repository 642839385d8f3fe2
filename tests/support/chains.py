"""A pipeline of three small stages, and what it leaves behind that must repeat bit for bit."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from runs import metrics

from groupwise.pipeline.chain import Chain, chain_of
from groupwise.pipeline.reading import read
from groupwise.pipeline.running import run_chain
from groupwise.runfiles.stages import ChainRecord
from groupwise.watch.display import Display

HEAD = """
name = "small"
prompts_per_step = 4
group_size = 4
tiny = { width = 32, layers = 2, heads = 2 }
model = { device = "cpu", threads = 1 }
data.options = { digits = 1 }
engine = { max_tokens = 4, slots = 16 }
eval = { every = 2, tasks = 8 }
checkpoint.every_steps = 1
optim.learning_rate = 1e-3
"""
COLD = """
[[stage]]
name = "cold"
recipe = "sft"
steps = 3
prompts_per_step = 16
optim.learning_rate = 3e-3
"""
REASON = """
[[stage]]
name = "reason"
recipe = "rloo"
model = "stage:cold"
steps = 2
"""
LAST = """
[[stage]]
name = "last"
recipe = "dr_grpo"
steps = 2
"""
THREE = HEAD + COLD + REASON + LAST


def chain(folder: Path, text: str = THREE, *overrides: str, run: str = "run") -> Chain:
    """The pipeline of a text, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pipeline.toml").write_text(text)
    return chain_of(read(folder / "pipeline.toml", overrides), folder / run)


def go(made: Chain, again: str | None = None) -> tuple[ChainRecord, str]:
    """Run it; return what stands in stages.json, and all that was said."""
    torch.set_num_threads(1)
    said = io.StringIO()
    return run_chain(made, again, lambda: Display(said, live=False)), said.getvalue()


def remains(made: Chain) -> dict[str, Any]:
    """Weights, metrics and rollouts of every stage, without what hangs on the clock."""
    found: dict[str, Any] = {}
    for stage in made.pipeline.stages:
        folder = made.folder(stage)
        latest = folder / "checkpoints" / "latest"
        found[stage.name] = {
            "weights": (latest / "model.safetensors").read_bytes(),
            "metrics": metrics(folder),
            "rollouts": {
                path.name: pq.read_table(path).to_pylist().__repr__()
                for path in sorted((folder / "rollouts").glob("*.parquet"))
            },
            "parent": json.loads((folder / "manifest.json").read_text()).get("parent"),
        }
    return found


def killed_at(made: Chain, call: int) -> bool:
    """Run it in a process that is killed at its Nth durable write; tell whether it was."""
    return _child(made, _killing(call)) == -signal.SIGKILL


def _killing(call: int) -> Callable[[], None]:
    def prepare() -> None:
        real, count = os.fsync, 0

        def fsync(descriptor: int) -> None:
            nonlocal count
            count += 1
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            real(descriptor)

        os.fsync = fsync

    return prepare


def _child(made: Chain, prepare: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            prepare()
            go(made)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def sweep(folder: Path, calls: Sequence[int], text: str = THREE) -> list[dict[str, Any]]:
    """What remains of pipelines that were killed at these writes, and then run to their end."""
    found = []
    for call in calls:
        write_rows(folder / str(call))
        made = chain(folder / str(call), text)
        if not killed_at(made, call):
            break
        go(made)
        found.append(remains(made))
    return found


CHAINED = (
    HEAD
    + COLD
    + REASON.replace("steps = 2", "steps = 3")
    + """
[[stage]]
name = "collect"
recipe = "sft"
model = "base"
source = "run"
from = ["stage:reason"]
keep = { correct = false, ended = false, language = 0.0, per_prompt = 2 }
mix = { reasoning = 12, other = 4 }
data.train = "other.jsonl"
data.options = {}
steps = 3
"""
    + LAST
)
RLHF = (
    HEAD
    + COLD
    + """
[[stage]]
name = "judge"
recipe = "reward_model"
data.train = "pairs.jsonl"
data.options = {}
data.holdout_share = 0.2
steps = 2
[[stage]]
name = "ppo"
recipe = "ppo"
model = "stage:cold"
critic.start = "stage:judge"
reward.parts = { "rm(path=stage:judge)" = 1.0 }
steps = 2
[[stage]]
name = "learn"
recipe = "distill"
model = "base"
teacher.path = "stage:ppo"
steps = 2
"""
)


def write_rows(folder: Path) -> None:
    """Write other.jsonl, with letters that no other stage has, and pairs.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = [(a, b) for a in range(1, 9) for b in (1, 3, 5)]
    other = [
        {"prompt": f"{a}+{b}=", "completion": f"it is {a + b}", "answer": a + b} for a, b in sums
    ]
    pairs = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a, b in sums
    ]
    for name, rows in (("other", other), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
