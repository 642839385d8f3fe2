"""What borrowed layers cost: one checkpoint of the Llama layout, sampled from and learned from with
groupwise's own layers and with transformers'.

    python benchmarks/borrowed.py FOLDER [cpu|cuda] [float32|bfloat16]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.protocol import Request, Sampling
from groupwise.model.borrowed.families import borrowed_shape
from groupwise.model.borrowed.rehearsal import borrow_rehearsed
from groupwise.model.formats.checkpoint import load_weights, read_companions
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.layers.equip import equip
from groupwise.model.layers.transformer import Policy
from groupwise.optim.packs import Sequences, outputs

PROMPTS, SAMPLES, PROMPT, ANSWER = 4, 4, 32, 32  # and tokens
REPEATS = 5


def main(folder: Path, device: str = "cpu", dtype: str = "float32") -> None:
    raw, kind = json.loads((folder / "config.json").read_bytes()), getattr(torch, dtype)
    tokenizer = Tokenizer.from_files(read_companions(folder))
    own = load_weights(folder, kind, device)
    models: dict[str, Policy] = {
        "groupwise": own,
        "transformers": borrow_rehearsed(folder, raw, borrowed_shape(raw), kind, device),
    }
    for name, model in models.items():
        print(name, *equip(model, exact=False), sep="\n  ")
    tries: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for _ in range(REPEATS):  # by turns, so that other programs disturb both alike
        for name, model in models.items():
            tries[name].append((sampled(model, tokenizer), learned(model, device)))
    rates = {name: [max(x) for x in zip(*some, strict=True)] for name, some in tries.items()}
    for name, (sample, learn) in rates.items():
        print(f"{name}: sampled {sample:,.0f} tokens/s, learned {learn:,.0f} tokens/s")
    (sample, learn), (slow, slower) = rates["groupwise"], rates["transformers"]
    print(f"own layers: {sample / slow:.2f} times as fast sampling, {learn / slower:.2f} learning")


def sampled(model: Policy, tokenizer: Tokenizer) -> float:
    engine = NativeEngine(model, tokenizer, seed=0, slots=64)
    asked = [Request(tuple(range(10 + i, 10 + i + PROMPT)), SAMPLES, i, 0) for i in range(PROMPTS)]
    sampling = Sampling(max_tokens=ANSWER, min_tokens=ANSWER)
    tokens = PROMPTS * SAMPLES * ANSWER
    return tokens / seconds(lambda: engine.generate(asked, sampling))


def learned(model: Policy, device: str) -> float:
    rows = PROMPTS * SAMPLES
    prompts = [tuple(range(10 + i // SAMPLES, 10 + i // SAMPLES + PROMPT)) for i in range(rows)]
    answers = [tuple((7 * i + j) % 1000 for j in range(ANSWER)) for i in range(rows)]
    batch = Sequences(prompts, answers)
    pack = batch.pack(range(rows), device)

    def update() -> None:
        outputs(model, pack, temperature=1.0)["logp_NT"].sum().backward()
        for _, parameter in model.named_parameters():
            parameter.grad = None
        if device != "cpu":
            torch.cuda.synchronize()

    return rows * ANSWER / seconds(update)


def seconds(work: Callable[[], object]) -> float:
    """Of the second time: the first warms up."""
    work()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
