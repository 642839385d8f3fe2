"""A sampler's process beside the learner on one GPU, and rollouts in 8-bit floats.

    python benchmarks/gpu_lag.py sync [--shape 1.5B] [--syncs 100]
    python benchmarks/gpu_lag.py overlap [--shape 1.5B] [--prompts 16] [--group 8] [--tokens 256]
    python benchmarks/gpu_lag.py fp8 [--shape 7B] [--prompts 32] [--group 8] [--tokens 512]
    python benchmarks/gpu_lag.py tests
    python benchmarks/gpu_lag.py all [--results FILE]

Weights are random. `sync`: new weights to a process that sees them by CUDA IPC, so many times:
seconds, the probe, memory and open files of both processes, and answers scored by the learner.
`overlap`: steps in turns and with a lag of 1. Two processes share one GPU's computing: what is
hidden is no promise of a speed-up. `fp8`: the same rollouts from bfloat16 and from 8-bit floats,
the products alone, and how far the copy is from the learner. `tests`: the tests that are about
these. `all`: each of them in a process of its own, with a limit of its own; one that fails stops
no other.

Every line that is printed is JSON; `ok` says whether the figure is what it should be. With
`--device cpu --shape tiny` and small numbers all of it runs without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gpu
import shapes
import torch
import torch.nn.functional as F

from groupwise.config import EngineSettings, load
from groupwise.engine.backends import EngineSetup
from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.native.process import ProcessEngine
from groupwise.engine.protocol import Request, Sampling
from groupwise.model.formats.checkpoint import Loaded, save
from groupwise.model.layers.equip import equip
from groupwise.model.layers.fp8 import rounded
from groupwise.model.probe import logp_of_ids
from groupwise.records import Completion
from groupwise.training.opening import open_run

HERE = Path(__file__).resolve()
LIMITS = {"sync": 80, "fp8": 100, "tests": 90, "overlap": 110}  # seconds
TESTS = (
    "tests/model/test_fp8.py",
    "tests/training/test_gpu.py",
    "-k",
    "fp8 or process",
)
GROWN = 2**26  # bytes: more than that is a leak
ROWS = (16, 64, 128, 256)  # of the products alone

# Nobody can read what random weights write: every group has right and wrong answers all the same.
REWARD = """from itertools import count

answers = count()


def every_other(completion: str) -> float:
    return float(next(answers) % 2)
"""

Row = dict[str, Any]


def policy(given: argparse.Namespace) -> Loaded:
    loaded = shapes.policy(given.shape, getattr(torch, given.dtype), given.device, given.seed)
    equip(loaded.model, exact=False)
    return loaded


def requests(given: argparse.Namespace, loaded: Loaded, draw: int) -> list[Request]:
    rows = shapes.prompts(given.prompts, given.prompt_tokens, given.seed)
    ids = [tuple(loaded.tokenizer.prompt(row["prompt"])) for row in rows]
    return [Request(each, given.group, number, draw) for number, each in enumerate(ids)]


def gaps(
    loaded: Loaded, asked: Sequence[Request], groups: Sequence[Sequence[Completion]], count: int
) -> torch.Tensor:
    """Return learner − sampler of some answers' tokens, by the learner's own forward pass."""
    found = []
    for request, group in list(zip(asked, groups, strict=True))[:count]:
        done = group[0]
        learner_T = logp_of_ids(loaded.model, (*request.prompt, *done.token_ids))
        found.append(learner_T[len(request.prompt) - 1 :] - done.logp_T)
    return torch.cat(found)


# --- new weights ------------------------------------------------------------------------------


def sync(given: argparse.Namespace) -> Iterator[Row]:
    """Bring new weights to a sampler's process, again and again."""
    loaded = policy(given)
    settings = EngineSettings(servers=1, slots=given.prompts * given.group)
    begun = gpu.now(given.device)
    engine = NativeEngine.made(EngineSetup(loaded, settings, given.seed))
    assert isinstance(engine, ProcessEngine)
    try:
        sampling = Sampling(max_tokens=given.tokens)
        engine.generate(requests(given, loaded, 0), sampling)
        started = gpu.now(given.device) - begun
        yield {"what": "start", "seconds": started, "weight_bytes": engine.shared.size}
        seconds: list[float] = []
        probes: list[tuple[float, float]] = []
        answers: list[float] = []
        held: list[Row] = []
        for version in range(1, given.syncs + 1):
            change(loaded, version)
            begun = gpu.now(given.device)
            engine.sync(version)
            seconds.append(gpu.now(given.device) - begun)
            probes.append(engine.gap)
            if version % max(given.syncs // 10, 1) == 0:
                asked = requests(given, loaded, version)
                groups = engine.generate(asked, sampling)
                answers.append(float(gaps(loaded, asked, groups, 4).abs().mean()))
                held.append(memory(given.device, engine))
        grown = {name: held[-1][name] - held[1][name] for name in held[1]}
        typical = statistics.median(seconds)
        yield {
            "what": "syncs",
            "syncs": given.syncs,
            "median_seconds": typical,
            "largest_seconds": max(seconds),
            "first_seconds": seconds[:3],
            "probe_mean": max(mean for mean, _ in probes),
            "probe_max": max(most for _, most in probes),
            "answers_mean": max(answers),
            "restarts": engine.restarts,
            "held_first": held[0],
            "held_last": held[-1],
            "grown_since_second_look": grown,
            "ok": typical < 0.3
            and max(answers) < 0.1
            and not engine.restarts
            and max(grown["device"], grown["own_device"]) < GROWN
            and max(grown["own_files"], grown["other_files"]) <= 0,
        }
    finally:
        begun = time.perf_counter()
        engine.close()
    yield {"what": "end", "seconds": time.perf_counter() - begun}


@torch.no_grad()
def change(loaded: Loaded, version: int) -> None:
    """Change every weight a little, and the last norm so much that old weights would show."""
    model: Any = loaded.model
    for parameter in model.parameters():
        parameter.mul_(1.02 if version % 2 else 1 / 1.02)
    drawn = torch.Generator(parameter.device).manual_seed(version)
    model.model.norm.weight.normal_(1.0, 1.0, generator=drawn)


def memory(device: str, engine: ProcessEngine) -> Row:
    """Return bytes and open files of both processes, and the bytes of the whole device."""
    found: Row = {"device": 0, "own_device": 0}
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        free, whole = torch.cuda.mem_get_info()
        found = {"device": whole - free, "own_device": torch.cuda.memory_reserved()}
    for name, number in (("own", os.getpid()), ("other", engine.sampler.process.pid)):
        found[f"{name}_files"] = len(os.listdir(f"/proc/{number}/fd"))
        pages = int(Path(f"/proc/{number}/statm").read_text().split()[1])
        found[f"{name}_host"] = pages * os.sysconf("SC_PAGE_SIZE")
    return found


# --- steps ------------------------------------------------------------------------------------


def overlap(given: argparse.Namespace) -> Iterator[Row]:
    """Steps in turns and with a lag of 1, whose sampler is a process on the same device."""
    with tempfile.TemporaryDirectory() as scratch:
        loaded = shapes.policy(given.shape, getattr(torch, given.dtype), given.device, given.seed)
        save(loaded.model, Path(scratch) / "model", loaded.files)
        del loaded
        shapes.give_back(given.device)
        reward = Path(scratch) / "every_other.py"
        reward.write_text(REWARD)
        rows = shapes.prompts(8 * given.prompts, given.prompt_tokens, given.seed)
        base: Row = {
            "seed": given.seed,
            "steps": gpu.ENDLESS,
            "model.path": str(Path(scratch) / "model"),
            "model.dtype": given.dtype,
            "model.device": given.device,
            "data.train": gpu.data_file(Path(scratch), rows),
            "data.eval": "",
            "reward.parts": {f"{reward}:every_other": 1.0},
            "recipe": "tis",
            "prompts_per_step": given.prompts,
            "group_size": given.group,
            "engine.max_tokens": given.tokens,
            "engine.min_tokens": given.tokens,
            "eval.every": 0,
            "eval.tasks": 0,
            "checkpoint.every_steps": 0,
            "checkpoint.every_seconds": 0,
        }
        beside = {"train.lag": 1, "engine.servers": 1}
        found: dict[str, Row] = {}
        for name, more in (("in turns", {}), ("lag 1", beside)):
            found[name] = steps(given, base | more, Path(scratch) / name.replace(" ", "_"))
            yield {"what": name, **found[name]}
            shapes.give_back(given.device)
    turns, lag = found["in turns"], found["lag 1"]
    rollout = turns["time/rollout"] + turns["time/grade"]
    learn = turns["step_seconds"] - rollout
    saved = turns["step_seconds"] - lag["step_seconds"]
    yield {"what": "hidden", "rollout": rollout, "learn": learn,
           "share_of_the_shorter": saved / min(rollout, learn)}  # fmt: skip


def steps(given: argparse.Namespace, settings: Row, folder: Path) -> Row:
    watch = gpu.Watch()
    with open_run(load(None, given.set, **settings), folder, watch) as run:
        seconds = [gpu.timed_step(run) for _ in range(given.warmup + given.steps)]
    taken = watch.seen[given.warmup :]
    kept = ("time/", "lag/", "mismatch/", "optim/micro", "weights/version", "sync/")
    names = sorted(name for name in taken[-1] if name.startswith(kept))
    return {
        "first_seconds": seconds[: given.warmup],
        "seconds": seconds[given.warmup :],
        "step_seconds": statistics.median(seconds[given.warmup :]),
        **{name: gpu.mean_of(taken, name) for name in names},
    }


# --- 8-bit floats -----------------------------------------------------------------------------


def fp8(given: argparse.Namespace) -> Iterator[Row]:
    """The same rollouts from the learner's own weights, and from a copy in 8-bit floats."""
    loaded = policy(given)
    rates: dict[str, float] = {}
    for weights in ("shared", "fp8"):
        shapes.give_back(given.device)
        begun = gpu.now(given.device)
        engine = NativeEngine(
            loaded.model, loaded.tokenizer, seed=given.seed, slots=0, weights=weights
        )
        made = gpu.now(given.device)
        engine.sync(1)
        again = gpu.now(given.device) - made
        sampling = Sampling(max_tokens=given.tokens, min_tokens=given.tokens)
        seconds = []
        for draw in range(given.repeats + 1):
            asked = requests(given, loaded, draw)
            begun_here = gpu.now(given.device)
            groups = engine.generate(asked, sampling)
            seconds.append(gpu.now(given.device) - begun_here)
        total = given.prompts * given.group * given.tokens
        rates[weights] = total / min(seconds[1:])
        yield {
            "what": weights,
            "make_seconds": made - begun,
            "sync_seconds": again,
            "first_seconds": seconds[0],
            "seconds": seconds[1:],
            "tokens_per_second": rates[weights],
            "captured": engine.decoder is not None and not engine.failed,
            "peak_bytes": gpu.peak_bytes(given.device),
            **weighed(gaps(loaded, asked, groups, 8)),
        }
        del engine
    faster = rates["fp8"] / rates["shared"]
    yield {"what": "faster", "times": faster, "ok": faster >= 1.3}
    yield from products(given)


def weighed(gap_T: torch.Tensor) -> Row:
    """Return the mismatch, and what recipes that correct for it would do."""
    ratio_T = gap_T.exp()
    return {
        "mismatch_mean": float(gap_T.abs().mean()),
        "mismatch_p99": float(gap_T.abs().quantile(0.99)),
        "mismatch_max": float(gap_T.abs().max()),
        "effective_share": float(ratio_T.sum() ** 2 / (len(ratio_T) * ratio_T.square().sum())),
        "tis_cut_at_2": float((ratio_T > 2).float().mean()),
        "icepop_out_of_half_to_5": float(((ratio_T < 0.5) | (ratio_T > 5)).float().mean()),
        "tokens": len(gap_T),
    }


def products(given: argparse.Namespace) -> Iterator[Row]:
    """Time the products of one layer, in microseconds, and of what rounds their inputs."""
    if not given.device.startswith("cuda"):
        return
    from groupwise.model.kernels.fp8 import round_rows, swiglu_rounded

    shape = shapes.SHAPES[given.shape]
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    head = width // shape["num_attention_heads"]
    joined = width + 2 * shape["num_key_value_heads"] * head
    sizes = {"qkv": (width, joined), "o": (width, width), "gate_up": (width, 2 * inner)}
    for name, (inputs, outputs) in {**sizes, "down": (inner, width)}.items():
        weight = torch.randn(outputs, inputs, device=given.device, dtype=torch.bfloat16)
        bits, scale = rounded(weight)
        for rows in ROWS:
            x = torch.randn(rows, inputs, device=given.device, dtype=torch.bfloat16)
            x_bits, x_scale = round_rows(x)
            times = {
                "bf16": lambda x=x, weight=weight: F.linear(x, weight),
                "round": lambda x=x: round_rows(x),
            }
            for fast in (True, False):
                times[f"fp8{'' if fast else ' slow sums'}"] = lambda x_bits=x_bits, x_scale=x_scale, bits=bits, scale=scale, fast=fast: (  # noqa: E501
                    torch._scaled_mm(
                        x_bits, bits.t(), scale_a=x_scale[:, None], scale_b=scale[None],
                        out_dtype=torch.bfloat16, use_fast_accum=fast)
                )  # fmt: skip
            if name == "down":
                both = torch.randn(rows, 2 * inner, device=given.device, dtype=torch.bfloat16)
                times["swiglu and round"] = lambda both=both: swiglu_rounded(both)
            found = {what: round(microseconds(call), 1) for what, call in times.items()}
            yield {"what": "product", "layer": name, "rows": rows, **found}


def microseconds(call: Callable[[], Any], times: int = 50) -> float:
    """Time a call in a captured graph, as sampling makes it: without the host's share."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    graph.replay()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - begun) / times


# --- tests, and all of it ---------------------------------------------------------------------


def tests(given: argparse.Namespace) -> Iterator[Row]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5"]
    begun = time.perf_counter()
    done = subprocess.run([*command, *TESTS], cwd=HERE.parents[1], capture_output=True, text=True)
    yield {
        "what": "pytest",
        "seconds": time.perf_counter() - begun,
        "said": done.stdout[-3000:].splitlines(),
        "errors": done.stderr[-1000:].splitlines(),
        "ok": done.returncode == 0,
    }


def everything(given: argparse.Namespace) -> Iterator[Row]:
    """Each part in a process of its own; what it has said before it fails or is ended counts."""
    for part in given.parts.split(","):
        words = [sys.executable, str(HERE), part, *given.rest]
        begun = time.perf_counter()
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen(words, stdout=out, stderr=err, start_new_session=True)
            try:
                code: Any = process.wait(LIMITS[part])
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                code = f"ended after {LIMITS[part]} s"
            out.seek(0)
            for line in out.read().splitlines():
                if line.startswith("{"):
                    yield json.loads(line)
            err.seek(0)
            said = err.read().splitlines()[-12:] if code else []
        seconds = time.perf_counter() - begun
        yield {"part": part, "what": "process", "code": code, "seconds": seconds, "said": said}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=[*LIMITS, "all"])
    parser.add_argument("--parts", default=",".join(LIMITS), help="of all")
    parser.add_argument("--results", type=Path, help="a file of JSON lines to append to")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="", choices=["bfloat16", "float32"])
    parser.add_argument("--shape", choices=list(shapes.SHAPES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt-tokens", type=int, default=75)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    sizes = {"prompts": int, "group": int, "tokens": int, "repeats": int, "syncs": int}
    for name in (*sizes, "warmup", "steps"):
        parser.add_argument(f"--{name}", type=int)
    given = parser.parse_args()
    usual: Row = {
        "sync": {"shape": "1.5B", "prompts": 8, "group": 4, "tokens": 16},
        "overlap": {"shape": "1.5B", "prompts": 16, "group": 8, "tokens": 256},
        "fp8": {"shape": "7B", "prompts": 32, "group": 8, "tokens": 512},
    }.get(given.part, {})
    usual |= {"repeats": 2, "syncs": 100, "warmup": 2, "steps": 3}
    for name, value in usual.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    given.dtype = given.dtype or ("bfloat16" if given.device.startswith("cuda") else "float32")
    own = {"all", "--parts", given.parts, "--results", str(given.results)}
    given.rest = [word for word in sys.argv[1:] if word not in own]
    run = {"sync": sync, "overlap": overlap, "fp8": fp8, "tests": tests, "all": everything}
    about = {"part": given.part, "shape": given.shape}
    for found in run[given.part](given):
        line = json.dumps(found if "part" in found else {**about, **found})
        print(line, flush=True)
        if given.results:
            given.results.parent.mkdir(parents=True, exist_ok=True)
            with given.results.open("a") as file:
                file.write(f"{line}\n")


if __name__ == "__main__":
    main()
