"""What a checkpoint costs a run: python benchmarks/checkpoints.py [--shape 1.5B] [--write]

Random weights of a known shape with their optimizer, a loop of updates beside it. Rows:

    bytes       of a checkpoint: weights, optimizer, master weights
    reserve     seconds that making the host's memory takes; a run does it beside its start
    stall       seconds that the training thread waits in `save`, and what the updates behind it
                take longer than those before, for two checkpoints one after the other
    copied      seconds until the copy is whole on the host
    written     seconds until it is on the disk, hashed and linked (--write)

Without a GPU (--device cpu --shape tiny) every row runs as well.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path

import torch
from shapes import SHAPES, policy

from groupwise.config import Optim
from groupwise.optim.adamw import AdamW
from groupwise.sync.checkpoints import Snapshot, snapshot
from groupwise.sync.host import HostCopy
from groupwise.sync.saver import Saver


def now(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


class Training:
    """Updates of a model of this shape, with gradients that are always the same."""

    def __init__(self, shape: str, device: str) -> None:
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        self.device, self.loaded = device, policy(shape, dtype, device, seed=0)
        rates = {name: getattr(Optim(), name) for name in ("beta1", "beta2", "eps", "weight_decay")}
        named = self.loaded.model.named_parameters()
        self.optimizer = AdamW(named, learning_rate=1e-6, **rates)

    def update(self) -> float:
        """Return the seconds of one update."""
        for parameter in self.loaded.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
        begun = now(self.device)
        self.optimizer.step()
        return now(self.device) - begun

    def snapshot(self, step: int) -> Snapshot:
        tensors = {"optimizer": self.optimizer.state()}
        loaded = self.loaded
        return snapshot(step, model=loaded.model, files=loaded.files, tensors=tensors, values={})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write", action="store_true", help="to the disk, not to the host alone")
    parser.add_argument("--out", type=Path, help="where to write; default: a temporary folder")
    given = parser.parse_args()
    training = Training(given.shape, given.device)
    row: dict[str, object] = {"shape": given.shape, "bytes": training.snapshot(0).bytes}
    row |= written(training, given.out) if given.write else copied(training)
    print(json.dumps(row))


def copied(training: Training) -> dict[str, object]:
    host, made = HostCopy(), training.snapshot(1)
    begun = time.perf_counter()
    host.reserve(made.tensors)
    found: dict[str, object] = {"reserve": time.perf_counter() - begun}
    begun = now(training.device)
    host.take(made.tensors)
    found["stall"] = time.perf_counter() - begun
    host.ready()
    found["copied"] = time.perf_counter() - begun
    host.release()
    return found


def written(training: Training, out: Path | None) -> dict[str, object]:
    plain = min(training.update() for _ in range(5))
    folder = Path(tempfile.mkdtemp(dir=out))
    stalls, behind, whole = [], [], []
    try:
        with Saver(folder, keep=1) as saver:
            begun = time.perf_counter()
            saver.reserve(training.snapshot(0))
            saver.wait()
            reserved = time.perf_counter() - begun
            for step in (1, 2):
                begun = now(training.device)
                saver.save(training.snapshot(step), before=lambda: None)
                stalls.append(time.perf_counter() - begun)
                saver.hold_changes()
                behind.append(training.update() - plain)
                saver.wait()
                whole.append(time.perf_counter() - begun)
    finally:
        shutil.rmtree(folder)
    return {
        "update": plain,
        "reserve": reserved,
        "stall": stalls,
        "update_longer": behind,
        "written": whole,
    }


if __name__ == "__main__":
    main()
