"""Time and peak memory of every recipe, next to the plain GRPO of examples/grpo_one_file.py.

    python benchmarks/losses.py [--rows 1024] [--width 1024] [--repeats 5] [--only NAME ...]

Float32 on the CPU, best of several repeats, both measured in the same run. The ratio of a recipe
is (batch phase + token phase forward and backward) over plain GRPO's (advantages + loss forward and
backward). Peak memory is what the allocator held at most above the inputs, gradient included.
Recipes that read logits, top-k or router scores run on fewer rows at a stated vocabulary, next to
plain GRPO behind the same log-softmax.

Bounds, of recipes that read one number per token: at most 2x plain GRPO's time, at most 2x its peak
memory, and at most 2 % of the (estimated) training step of a small model on as many tokens. What is
above them is named, and the exit status is 1. The wide ones have none.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from groupwise import Recipe, TokenBatch, batch_phase, passes, recipe, token_phase
from groupwise.losses.heads import from_logits
from groupwise.recipes import RECIPES

GROUP, TOP_K, LAYERS, EXPERTS, VOCABULARY = 8, 20, 4, 2, 512
SMOLLM2_PARAMETERS = 134.5e6
MOST_TIME, MOST_MEMORY, MOST_SHARE = 2.0, 2.0, 0.02  # of plain GRPO's; of a training step
Runs = tuple[Callable[[], Any], Callable[[], Any]]
# Outputs that are wider than one number per token.
WIDE = {"topk_logp_NTK", "logp_at_sampler_topk_NTK", "logp_at_teacher_topk_NTK", "router_NTLK",
        "topk_id_NTK"}  # fmt: skip


def keep_freed_memory() -> None:
    """Let the C library keep what is freed: else page faults of fresh memory are what is timed."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def plain_grpo() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "examples" / "grpo_one_file.py"
    spec = importlib.util.spec_from_file_location("one_file", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most that was allocated at once while `run` ran, above what was there before."""
    with (
        warnings.catch_warnings(),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile,
    ):
        warnings.simplefilter("ignore")
        kept = run()
    del kept
    held = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def best_seconds(runs: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Best time of each; they take turns, so that a busy machine is busy for all of them."""
    best = [float("inf")] * len(runs)
    for repeat in range(repeats + 1):
        for i, run in enumerate(runs):
            start = time.perf_counter()
            run()
            if repeat:  # the first round warms up
                best[i] = min(best[i], time.perf_counter() - start)
    return best


class Data:
    """One batch with every stream."""

    def __init__(self, rows: int, width: int) -> None:
        g = torch.Generator().manual_seed(0)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=g)

        length_N = torch.randint(width // 4, width + 1, (rows,), generator=g)
        self.mask_NT = torch.arange(width)[None] < length_N[:, None]
        self.group_N = torch.arange(rows) // GROUP
        self.reward_N = torch.randint(0, 2, (rows,), generator=g).float()
        old_NT = -2 * uniform(rows, width)
        self.logp_NT = old_NT + 0.1 * (uniform(rows, width) - 0.5)
        self.streams: dict[str, Callable[[], Tensor]] = {
            "old_logp_NT": lambda: old_NT,
            "sampler_logp_NT": lambda: old_NT + 0.01 * (uniform(rows, width) - 0.5),
            "ref_logp_NT": lambda: old_NT + 0.05 * (uniform(rows, width) - 0.5),
            "prm_logp_NT": lambda: old_NT + 0.05 * (uniform(rows, width) - 0.5),
            "teacher_logp_NT": lambda: old_NT + 0.05 * (uniform(rows, width) - 0.5),
            "teacher_topk_logp_NTK": lambda: uniform(rows, width, TOP_K).log() - 4,
            "teacher_topk_id_NTK": lambda: torch.randint(
                0, VOCABULARY, (rows, width, TOP_K), generator=g
            ),
            "old_value_NT": lambda: uniform(rows, width),
            "step_reward_NT": lambda: uniform(rows, width),
            "step_end_NT": lambda: uniform(rows, width) < 0.05,
            "step_value_NT": lambda: uniform(rows, width),
            "greedy_reward_N": lambda: torch.randint(0, 2, (rows,), generator=g).float(),
            "correct_N": lambda: self.reward_N > 0,
            "truncated_N": lambda: length_N == width,
            "segment_NT": lambda: (uniform(rows, width) < 0.1).long().cumsum(1),
            "token_NT": lambda: torch.randint(0, VOCABULARY, (rows, width), generator=g),
            "sampler_topk_logp_NTK": lambda: uniform(rows, width, TOP_K).log() - 2,
            "sampler_topk_id_NTK": lambda: torch.randint(
                0, VOCABULARY, (rows, width, TOP_K), generator=g
            ),
            "old_router_NTLK": lambda: 0.1 + 0.8 * uniform(rows, width, LAYERS, EXPERTS),
            "now_logp_NT": lambda: self.logp_NT,
            "now_entropy_NT": lambda: uniform(rows, width),
            "old_square_mass_NT": lambda: uniform(rows, width),
            "age_NT": lambda: (4 * uniform(rows, width)).floor(),
            "lesson_NT": lambda: (uniform(rows, width) < 0.1).float(),
            "state_NT": lambda: (9 * uniform(rows, width)).long(),
            "reward_part_NK": lambda: uniform(rows, 3),
            "reference_reward_NK": lambda: uniform(rows, 8),
            "flawed_N": lambda: uniform(rows) < 0.2,
            "taught_N": lambda: uniform(rows) < 0.8,
            "role_N": lambda: (2 * uniform(rows)).long(),
            "peer_N": lambda: (2 * uniform(rows)).long(),
            "drift_N": lambda: 0.1 * uniform(rows),
            "turn_reward_N": lambda: uniform(rows),
            "outcome_reward_N": lambda: uniform(rows),
            "result_start_N": lambda: (9 * uniform(rows)).long(),
            "branch_NL": lambda: self.group_N[:, None] * torch.tensor([1, 2]),
        }
        self.outputs: dict[str, Callable[[], Tensor]] = {
            "entropy_NT": lambda: uniform(rows, width).requires_grad_(),
            "value_NT": lambda: uniform(rows, width).requires_grad_(),
            "teacher_divergence_NT": lambda: uniform(rows, width).requires_grad_(),
            "prm_logp_NT": lambda: (old_NT + 0.05 * uniform(rows, width)).requires_grad_(),
            "router_NTLK": lambda: 0.1 + 0.8 * uniform(rows, width, LAYERS, EXPERTS),
        }

    def batch(self, made: Recipe) -> TokenBatch:
        needed = {name: self.streams[name]() for name in {*made.streams, "old_logp_NT"}}
        if made.gate.name == "topk_smoothing":
            needed["token_NT"] = self.streams["token_NT"]()
        if made.aggregation.name == "learned_length_weight":
            needed["length_exponent"] = torch.zeros((), requires_grad=True)
        return TokenBatch.build(
            mask_NT=self.mask_NT, group_N=self.group_N, reward_N=self.reward_N, **needed
        )


def recipe_runs(made: Recipe, data: Data, logits_NTV: Tensor | None) -> Runs:
    """Batch phase, and token phase forward and backward."""
    batch = data.batch(made)
    done = batch_phase(made, batch).batch
    one_pass = passes(made, done)[0]
    leaf = (data.logp_NT if logits_NTV is None else logits_NTV).clone().requires_grad_()
    token_NT = data.streams["token_NT"]() if batch.token_NT is None else batch.token_NT
    fixed = {name: data.outputs[name]() for name in made.outputs if name in data.outputs}

    def outputs() -> dict[str, Tensor]:
        if logits_NTV is None:
            found = {"logp_NT": leaf, **fixed}
        else:
            heads = from_logits(leaf, token_NT, TOP_K)
            top = leaf.log_softmax(-1)[..., :TOP_K]
            tops = {"logp_at_sampler_topk_NTK": top, "logp_at_teacher_topk_NTK": top}
            found = {**fixed, **heads, **tops}
            found = {name: found[name] for name in made.outputs if name in found}
        if done.length_exponent is not None:
            found["length_exponent"] = done.length_exponent
        return found

    def token() -> None:
        leaf.grad = None
        token_phase(made, one_pass, **outputs()).loss.backward()

    return lambda: batch_phase(made, batch), token


def plain_runs(data: Data, logits_NTV: Tensor | None) -> Runs:
    """The one-file GRPO on the same data: advantages, and loss forward and backward."""
    module = plain_grpo()
    old_NT, ref_NT = data.streams["old_logp_NT"](), data.streams["ref_logp_NT"]()
    token_NT = data.streams["token_NT"]()
    leaf = (data.logp_NT if logits_NTV is None else logits_NTV).clone().requires_grad_()
    advantage_N = module.group_advantages(data.reward_N, GROUP)

    def loss() -> None:
        leaf.grad = None
        logp_NT = leaf if logits_NTV is None else from_logits(leaf, token_NT)["logp_NT"]
        module.grpo_loss(logp_NT, old_NT, ref_NT, data.mask_NT, advantage_N).backward()

    return lambda: module.group_advantages(data.reward_N, GROUP), loss


class Row(NamedTuple):
    """Seconds of both phases, and both ratios to plain GRPO."""

    name: str
    seconds: float
    token: float
    time: float
    memory: float


def compare(name: str, runs: Runs, plain: Runs, repeats: int) -> Row:
    """One line of the table."""
    batch, token, plain_batch, plain_token = best_seconds([*runs, *plain], repeats)
    batch_peak, token_peak, *plain_peaks = (peak_bytes(run) for run in (*runs, *plain))
    row = Row(
        name,
        batch + token,
        token / plain_token,
        (batch + token) / (plain_batch + plain_token),
        max(batch_peak, token_peak) / max(plain_peaks),
    )
    print(
        f"{name:24s} {batch * 1e3:8.1f} {token * 1e3:8.1f} {batch_peak / 2**20:8.0f} "
        f"{token_peak / 2**20:8.0f} {row.token:7.2f} {row.time:7.2f} {row.memory:7.2f}",
        flush=True,
    )
    return row


def training_step_seconds(tokens: int) -> tuple[float, float]:
    """A SmolLM2-135M step of as many tokens: 6·parameters·tokens at this machine's matmul speed."""
    a, b = torch.randn(2048, 576), torch.randn(576, 1536)
    (seconds,) = best_seconds([lambda: a @ b], 20)
    flops = 2 * 2048 * 576 * 1536 / seconds
    return 6 * SMOLLM2_PARAMETERS * tokens / flops, flops


def above_bounds(rows: Sequence[Row], step: float) -> list[str]:
    """What is above a bound, in words; a training step takes `step` seconds."""
    found = []
    for row in rows:
        for what, x, most in (("time", row.time, MOST_TIME), ("memory", row.memory, MOST_MEMORY)):
            if x > most:
                found.append(f"{row.name}: {x:.2f}x plain GRPO's {what}, above {most:g}x")
        if row.seconds / step > MOST_SHARE:
            share = f"{row.seconds / step:.2%} of a training step"
            found.append(f"{row.name}: {share}, above {MOST_SHARE:.0%}")
    return found


def narrow_table(made: list[Recipe], data: Data, repeats: int, tokens: int) -> list[str]:
    """Recipes that read one number per token; returns what is above the bounds."""
    plain = plain_runs(data, None)
    compare("plain GRPO (one file)", plain, plain, repeats)
    rows = [compare(entry.name, recipe_runs(entry, data, None), plain, repeats) for entry in made]
    if not rows:
        return []
    slow, large = max(rows, key=lambda r: r.time), max(rows, key=lambda r: r.memory)
    step, flops = training_step_seconds(tokens)
    seconds = max(row.seconds for row in rows)
    print(
        f"\nslowest: {slow.name} {slow.time:.2f}x (bound {MOST_TIME}; token phase at most "
        f"{max(r.token for r in rows):.2f}x); "
        f"largest: {large.name} {large.memory:.2f}x (bound {MOST_MEMORY})\n"
        f"both phases of the slowest {seconds:.3f} s; a SmolLM2-135M step of as many tokens, "
        f"estimated at {flops / 1e9:.0f} GFLOP/s, {step:.0f} s: {seconds / step:.4%}"
    )
    above = above_bounds(rows, step)
    print("\n".join(above) or "all within their bounds")
    return above


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--only", nargs="*", help="recipe names")
    args = parser.parse_args()
    keep_freed_memory()
    recipe("grpo")
    made = [entry for entry in RECIPES.values() if isinstance(entry, Recipe)]
    made = [entry for entry in made if not args.only or entry.name in args.only]
    header = (
        f"{'recipe':24s} {'batch ms':>8s} {'token ms':>8s} {'batch MB':>8s} {'token MB':>8s} "
        f"{'token x':>7s} {'time x':>7s} {'mem x':>7s}"
    )
    print(
        f"{args.rows} x {args.width} tokens, float32, {torch.get_num_threads()} threads\n{header}"
    )
    narrow = [entry for entry in made if not WIDE & set(entry.outputs)]
    tokens = args.rows * args.width
    above = narrow_table(narrow, Data(args.rows, args.width), args.repeats, tokens)
    wide = [entry for entry in made if WIDE & set(entry.outputs)]
    if not wide:
        return int(bool(above))
    rows = max(GROUP, args.rows // 16)
    small, logits_NTV = Data(rows, args.width), torch.randn(rows, args.width, VOCABULARY)
    print(f"\n{rows} x {args.width} tokens, vocabulary {VOCABULARY}, no bound\n{header}")
    plain = plain_runs(small, logits_NTV)
    compare("plain GRPO on logits", plain, plain, args.repeats)
    for entry in wide:
        logits = None if "router_NTLK" in entry.outputs else logits_NTV
        behind = plain if logits is not None else plain_runs(small, None)
        compare(entry.name, recipe_runs(entry, small, logits), behind, args.repeats)
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
