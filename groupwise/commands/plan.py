"""`groupwise plan`: memory by part and time by phase, before anything is loaded."""

from __future__ import annotations

import argparse
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.commands import machine, plan_spread
from groupwise.commands.pipeline import chain_in, has_stages
from groupwise.commands.shared import (
    SETTINGS,
    aligned,
    print_json,
    read_config,
    split_settings,
    start_pytorch,
    warn,
)
from groupwise.common.progress import phase
from groupwise.common.sizes import size
from groupwise.errors import ConfigError, nearest

if TYPE_CHECKING:
    from groupwise.config import Config
    from groupwise.model.devices import Device
    from groupwise.plan.estimate import Host, Place, Plan

RUNS = "runs"  # where they go unless they are told otherwise
NOTES = {
    "process": "interpreter and libraries",
    "gradients": "while learning",
    "dequantised": "the largest matrix, while it is multiplied by",
    "head": "while learning: logits of a few tokens at a time, and a gradient of the head",
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="memory by part and time by phase, before anything is loaded",
        usage="groupwise plan [CONFIG.toml] [KEY=VALUE ...] [--gpu NAME] [--gpus N] [--tokens N] "
        "[--simulate RUN] [--json]",
        example="groupwise plan group_size=16 --gpu H100",
    )
    parser.add_argument("items", nargs="*", metavar="KEY=VALUE", help=SETTINGS)
    parser.add_argument("--gpu", metavar="NAME", help="plan for this GPU, such as H100 or A100")
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="of an answer on average; default: the most"
    )
    plan_spread.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="data instead of text")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan; return 1 where device or disk is too small for it."""
    if args.simulate is not None:
        return plan_spread.simulated(args)
    source, overrides = split_settings(args.items)
    if has_stages(source):
        assert source is not None
        return _stages(source, overrides, args)
    config = read_config(source, overrides)
    from groupwise.plan.estimate import plan
    from groupwise.prepare.placing import placed
    from groupwise.stages.checks import check_config

    named = named_gpu(args.gpu) if args.gpu else None
    config = placed(config) if named is None else on_named(config, named)
    for doubt in check_config(config):
        warn(doubt)
    limit = config.engine.max_tokens
    if args.tokens is not None and not 1 <= args.tokens <= limit:
        raise ConfigError(
            f"--tokens {args.tokens}: answers have 1 to {limit} tokens (engine.max_tokens)."
        )
    if args.gpus is not None:
        return plan_spread.over_gpus(args, config, named or here(config))
    host = host_of(Path(RUNS)) if named is None else None
    made = plan(config, named or here(config), args.tokens, host)
    if args.json:
        print_json(made.as_dict())
    else:
        print(text(made))
    return 1 if made.fits is False or made.lacks_disk else 0


def _stages(source: Path, overrides: Sequence[str], args: argparse.Namespace) -> int:
    """Print the plan of every stage of a pipeline in a line, and what they come to in all."""
    start_pytorch()
    from groupwise.pipeline.chain import trial
    from groupwise.pipeline.checks import base_for, check_chain
    from groupwise.plan.estimate import plan
    from groupwise.prepare.placing import placed
    from groupwise.runfiles.stages import ChainRecord

    chain = chain_in(source, overrides, None)
    named = named_gpu(args.gpu) if args.gpu else None
    host = host_of(Path(RUNS)) if named is None else None
    made: dict[str, Plan] = {}
    with base_for(chain) as base:
        root = str(base) if chain.embedded else chain.base
        for doubt in check_chain(chain, ChainRecord(chain.pipeline.name, "", ()), base):
            warn(doubt)
        for stage in chain.pipeline.stages:
            asked = trial(chain, stage, root).config
            config = placed(asked) if named is None else on_named(asked, named)
            made[stage.name] = plan(config, named or here(config), args.tokens, host)
    if args.json:
        stages = {name: each.as_dict() for name, each in made.items()}
        print_json({"stages": stages, "in_all": in_all(list(made.values()))})
    else:
        print(chain_text(made))
    bad = any(each.fits is False or each.lacks_disk for each in made.values())
    return 1 if bad else 0


def in_all(plans: Sequence[Plan]) -> dict[str, Any]:
    """Return what a chain takes: seconds add up, memory is that of the largest stage.

    Of a finished stage the latest and the best weights stay on the disk.
    """
    seconds = [each.step_seconds for each in plans]
    counts = [each.config.length(None) for each in plans]
    known = [x * n for x, n in zip(seconds, counts, strict=True) if x is not None and n is not None]
    kept = list(accumulate((2 * each.space.best for each in plans), initial=0))
    return {
        "steps": None if None in counts else sum(n for n in counts if n is not None),
        "peak": max(each.peak for each in plans),
        "seconds": sum(known) if len(known) == len(plans) else None,
        "disk": max(x + each.space.most for x, each in zip(kept, plans, strict=False)),
    }


def chain_text(made: Mapping[str, Plan]) -> str:
    whole = in_all(list(made.values()))
    rows = [["stage", "recipe", "steps", "peak", "checkpoint", "a step", "in all", ""]]
    for name, each in made.items():
        step = each.step_seconds
        steps = each.config.length(None)
        last = "" if step is None or steps is None else duration(step * steps)
        times = ["" if step is None else duration(step), last]
        count = f"{each.config.epochs:g} epochs" if steps is None else f"{steps:,}"
        rows.append([name, each.config.recipe.name, count, size(each.peak),
                     size(each.space.whole), *times, _verdict(each)])  # fmt: skip
    total = "" if whole["seconds"] is None else duration(whole["seconds"])
    count = "" if whole["steps"] is None else f"{whole['steps']:,}"
    rows.append(["in all", "", count, size(whole["peak"]), size(whole["disk"]),
                 "", total, "the disk holds the weights of earlier stages, too"])  # fmt: skip
    return "\n".join(aligned(rows))


def host_of(runs: Path) -> Host:
    """Return this machine's disk where runs are written, and its memory, as they are now."""
    from groupwise.plan.estimate import Host
    from groupwise.sync.host import free_memory

    there = machine.existing(runs)
    return Host(str(there), shutil.disk_usage(there).free, free_memory())


def named_gpu(name: str) -> Place:
    """Find a GPU by name, which may tell its memory: `A100 40GB`, `a100-40`, `RTX 4090`."""
    from groupwise.model.devices import KNOWN
    from groupwise.plan.estimate import Place

    words = _plain(name)
    asked = re.search(r"\b(\d{1,3}) ?(?:gb|gib)?$", words)
    given = float(asked[1]) * 1e9 if asked else None
    family = [x for x in KNOWN if _has(words, _plain(x.name).partition(" ")[0])]
    sized = [x for x in family if given in (None, x.memory)]
    exact = [x for x in sized if _has(words, _plain(x.name))]
    for known in exact or sized or family:
        memory = given or known.memory  # a part of a GPU has a size of its own
        return Place(replace(known, memory=memory), False, memory)
    raise ConfigError(
        f"--gpu {name}: there are no figures for it. {nearest(name, [x.name for x in KNOWN])} "
        "For a CPU, leave --gpu out on that machine."
    )


def on_named(config: Config, place: Place) -> Config:
    """Return the configuration as it would run there: this machine may have no such GPU."""
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "bfloat16" if place.device.bfloat16 else "float32"
    return replace(config, model=replace(config.model, device="cuda", dtype=dtype))


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).strip().lower()


def _has(words: str, name: str) -> bool:
    """Return whether the words are there as whole words: an A1000 is no A100."""
    return re.search(rf"\b{re.escape(name)}\b", words) is not None


def here(config: Config) -> Place:
    """Return this machine's device that the configuration asks for."""
    import torch

    from groupwise.model.devices import KNOWN, device_named
    from groupwise.model.memory import device_bytes
    from groupwise.plan.estimate import Place

    name = config.model.device
    kind = torch.device(name).type
    if kind == "cpu":
        if config.model.threads:
            torch.set_num_threads(config.model.threads)
        memory = machine.memory_bytes()
        return Place(_measured_cpu(getattr(torch, config.model.dtype), memory), True, memory)
    if kind == "cuda" and torch.cuda.is_available():
        there = torch.cuda.get_device_properties(name)
        return Place(device_named(there.name, there.total_memory), False, device_bytes(name))
    raise ConfigError(
        f"model.device={name} is not on this machine. Name the GPU that you plan for with --gpu "
        f"({', '.join(known.name for known in KNOWN)}), or set model.device=cpu."
    )


def _measured_cpu(dtype: Any, memory: int) -> Device:
    """Measure this CPU as it is now, with a matrix product and a copy: operations and bandwidth."""
    import torch

    from groupwise.model.devices import Device

    with phase("measuring the processor"):
        a, b = torch.randn(512, 1024).to(dtype), torch.randn(1024, 2048).to(dtype)
        large = torch.zeros(2**24)  # 64 MiB
        flops = 2 * a.shape[0] * b.numel() / _best(lambda: a @ b)
        return Device(machine.processor(), flops, 2 * large.nbytes / _best(large.clone), memory)


def _best(work: Callable[[], object], times: int = 8) -> float:
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


# --- for people -------------------------------------------------------------------------------


def text(made: Plan) -> str:
    from groupwise.model.cost import active_parameters, parameters
    from groupwise.optim.roles import ROLES
    from groupwise.plan.estimate import assumptions

    config, prompts = made.config, made.prompts
    rows = config.recipe.rows(config.group_size)
    answers = f"{rows} answers" if config.recipe.scores else f"{config.group_size} samples"
    roles = {name: ROLES[name].description(config) for name in config.recipe.roles}
    notes = (
        NOTES
        | roles
        | {
            "activations": f"while learning, of {made.micro_tokens:,} tokens at a time",
            "cache": f"while sampling, of {made.slots:,} sequences at a time; not beside learning",
        }
    )
    count, active = parameters(made.shape), active_parameters(made.shape)
    of_token = "" if made.shape.experts is None else f" ({_count(active)} of them for a token)"
    lines = [
        f"{Path(config.model.path).name}, {_count(count)} parameters{of_token} in "
        f"{config.model.dtype}, on {made.place.device.name}",
        *_adapter(made),
        f"{config.prompts_per_step} prompts x {answers} a step; prompts of {prompts.mean} "
        f"tokens, at most {prompts.longest} ({prompts.source})",
        "",
        *(_row(name, size(x), notes.get(name, "")) for name, x in made.memory.items()),
        _row("peak", size(made.peak), _verdict(made)),
        "",
        *_checkpoints(made),
    ]
    if made.seconds is not None and made.step_seconds is not None:
        step, steps = made.step_seconds, config.length(None)
        lines += ["", *(_row(name, duration(x)) for name, x in made.seconds.items())]
        whole = "" if steps is None else f"{steps:,} steps: {duration(step * steps)}"
        lines += [_row("step", duration(step), whole)]
    lines += ["", "assuming", *(f"  {each}" for each in assumptions(made))]
    if made.advice:
        title = "better" if made.fits else "what would fit"
        lines += ["", title, *(f"  {each}" for each in made.advice)]
    return "\n".join(lines)


def _adapter(made: Plan) -> list[str]:
    from groupwise.prepare.setup import frozen_of

    frozen = frozen_of(made.config, made.shape)
    if frozen is None:
        return []
    kind = made.config.model.quantize
    stored = "" if kind == "none" else f", the layers' matrices in {kind}"
    return [f"LoRA trains {_count(frozen.adapter)} numbers beside them{stored}"]


def _verdict(made: Plan) -> str:
    free = made.place.memory
    if free is None:
        return ""
    words = "fits, barely" if made.tight else "fits" if made.peak <= free else "does not fit"
    if made.lacks_precision:
        words += "; but it has no bfloat16, and training would be refused"
    return f"of {size(free)}: {words}"


def _checkpoints(made: Plan) -> list[str]:
    """Describe the checkpoints: their bytes on the disk, and in memory before they are written."""
    space, host = made.space, made.host
    free, copy = "", "of a checkpoint, while it is written"
    if host is not None:
        verdict = "not even one fits" if made.lacks_disk else "fits"
        if verdict == "fits" and space.tight(host.disk):
            verdict = "not all fit; checkpoint.keep=1 needs less"
        free = f"; {size(host.disk)} free in {host.folder}: {verdict}"
        waits = "" if made.copies else ", so training waits instead"
        copy += f"; {size(host.memory)} of the host's memory are free{waits}"
    return [
        _row("checkpoint", size(space.whole), f"on the disk; the best one {size(space.best)}"),
        _row("checkpoints", size(space.most), f"at most: {space.keep} kept, one being "
             f"written, the best{free}"),
        _row("host copy", size(space.whole), copy),
    ]  # fmt: skip


def _count(number: int) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.3g}M"


def _row(name: str, value: str, note: str = "") -> str:
    return f"{name:<18}{value:>10}  {note}".rstrip()


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
