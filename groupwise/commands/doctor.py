"""`groupwise doctor`: what this machine has, what is missing for what, and how to mend it.

Works without PyTorch, and says so. Packages are looked up in the installation's own records;
PyTorch is tried in a process of its own, since a broken one can crash whoever imports it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from groupwise.commands import here, machine
from groupwise.commands.shared import print_json, read_config, split_settings
from groupwise.common.extras import pip
from groupwise.common.sizes import size

LEAST_PYTHON = (3, 11)
LEAST_DISK = 2 * 10**9  # bytes: two checkpoints of a small model and some steps
# What training can't do without, and from which version on: as in pyproject.toml.
REQUIRED = {
    "torch": "2.11",
    "mpmath": "1.3",
    "numpy": "1.26",
    "safetensors": "0.5",
    "tokenizers": "0.22",
    "jinja2": "3.1.6",
    "markupsafe": "2.1",
    "pyarrow": "18",
    "rich": "13.9",
}
# What it can do without, and what each is for.
OPTIONAL = {
    "triton": "kernels on an NVIDIA GPU; without them it is several times slower",
    "huggingface_hub": "models and data by their id on a hub",
    "transformers": "models of other families than Llama, Mistral, Qwen2 and Qwen3",
    "bitsandbytes": "frozen weights in 4 bits beside an adapter: model.quantize=nf4",
    "latex2sympy2_extended": "the reward math",
    "sympy": "the reward math",
    "plotly": "the viewer: groupwise view",
    "matplotlib": "PNG plots of a report",
    "tensorboard": "a mirror of runs: watch.mirrors",
    "wandb": "a mirror of runs: watch.mirrors",
    "trackio": "a mirror of runs: watch.mirrors",
    "mlflow-skinny": "a mirror of runs: watch.mirrors",
    "vllm": "sampling by servers: engine.backend=vllm; serving an exported model",
    "ray": "runs on several machines of a Ray cluster: groupwise launch --on ray",
    "PyYAML": "configurations of other tools that are YAML: groupwise explain --from",
    "shtab": "completion in your shell: groupwise completion",
    "bm25s": "the tool search of environments",
    "reasoning-gym": "its tasks as data: data.train = reasoning_gym:TASK",
}
SHARED, LEAST_SHARED = Path("/dev/shm"), 2**30  # containers have 64 MiB unless asked for more
CUDA_WHEELS = "https://download.pytorch.org/whl/cu130"
TORCH_SECONDS = 60.0
# Run by an interpreter of its own; prints one JSON object.
TRY_TORCH = """
import json, torch
gpus = []
for number in range(torch.cuda.device_count()):
    has = torch.cuda.get_device_properties(number)
    gpus.append({"name": has.name, "memory": has.total_memory, "bfloat16": has.major >= 8,
                 "capability": f"{has.major}.{has.minor}"})
print(json.dumps({"cuda": torch.version.cuda, "gpus": gpus}))
"""


@dataclass(frozen=True)
class Check:
    """One line of the report: what there is and, where something is wrong, how to mend it."""

    about: str
    status: Literal["ok", "missing", "broken"]  # missing is optional; broken stops training
    text: str
    mend: str = ""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what this machine has, what is missing for what, and what mends it",
        usage="groupwise doctor [CONFIG.toml] [KEY=VALUE ...] [--runs DIR] [--json]",
        example="groupwise doctor",
    )
    parser.add_argument(
        "items", nargs="*", metavar="KEY=VALUE", help="a configuration, to count its checkpoints"
    )
    parser.add_argument("--runs", default="runs", metavar="DIR", help="where runs go: runs")
    parser.add_argument("--json", action="store_true", help="data instead of text")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; return 0 where training can run, 1 where it can't."""
    found = list(examine(Path(args.runs), args.items))
    healthy = all(each.status != "broken" for each in found)
    command, purpose = next_step(found, args.items)
    if args.json:
        told = {"healthy": healthy, "findings": [asdict(each) for each in found], "next": command}
        print_json(told)
    else:
        print(text(found), f"next: {command}  # {purpose}", sep="\n")
    return 0 if healthy else 1


def examine(runs: Path, items: Sequence[str] = ()) -> Iterator[Check]:
    yield python()
    for name, least in REQUIRED.items():
        yield required(name, least)
    yield Check("cpu", "ok", f"{machine.cores()} cores, {machine.processor()}")
    yield Check("memory", "ok", size(machine.memory_bytes()))
    yield from devices(machine.gpus(), try_torch() if version("torch") else None)
    yield ranks(len(machine.gpus()), items)
    yield disk(runs)
    if items:
        yield checkpoints(runs, items)
    if SHARED.is_dir():
        yield shared_memory(shutil.disk_usage(SHARED).total)
    yield programs()
    for name, purpose in OPTIONAL.items():
        yield optional(name, purpose)


def text(found: list[Check]) -> str:
    marks = {"ok": "ok", "missing": "-", "broken": "NO"}
    lines = [
        f"{marks[each.status]:<3} {each.about:<16} {each.text}"
        + (f": {each.mend}" if each.mend else "")
        for each in found
    ]
    broken = [each.about for each in found if each.status == "broken"]
    verdict = f"training can't run yet: {', '.join(broken)}" if broken else "training can run"
    return "\n".join([*lines, "", verdict])


def next_step(found: Sequence[Check], items: Sequence[str] = ()) -> tuple[str, str]:
    """Return the one command to run next, and what for: what mends the worst, else the first run.

    On a GPU a model of one's own is worth a configuration; on a CPU a small one shows how it goes.
    """
    broken = next((each for each in found if each.status == "broken"), None)
    if broken is not None:
        again = shlex.join(["groupwise", "doctor", *items])
        return broken.mend or again, f"mends {broken.about}, without which nothing trains"
    if items:
        return shlex.join(["groupwise", "train", *items]), "train it"
    runs, configurations = here.runs_here(), here.configurations_here()
    unused = here.fresh(runs, configurations)
    if runs or unused:
        return here.next_steps(runs, configurations, unused)[0]
    if any(each.about == "gpu" and not each.text.startswith("none") for each in found):
        return "groupwise init mine.toml", "five questions, and a configuration of your own"
    return "groupwise train steps=50", "a small model learns to add, on the CPU, in minutes"


# --- one thing each ---------------------------------------------------------------------------


def python() -> Check:
    have = platform.python_version()
    if sys.version_info[:2] >= LEAST_PYTHON:
        return Check("python", "ok", f"{have}, {platform.system()} {platform.machine()}")
    least = ".".join(map(str, LEAST_PYTHON))
    return Check(
        "python", "broken", f"{have}; {least} or newer is needed", "python3.12 -m venv ENVIRONMENT"
    )


def version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def required(name: str, least: str) -> Check:
    have, mend = version(name), f"{pip()} install '{name}>={least}'"
    if have is None:
        return Check(name, "broken", "not installed; nothing trains without it", mend)
    if _numbers(have) < _numbers(least):
        return Check(name, "broken", f"{have}; {least} or newer is needed", mend)
    return Check(name, "ok", have)


def optional(name: str, purpose: str) -> Check:
    have = version(name)
    if have is None:
        return Check(name, "missing", f"not installed; for {purpose}", f"{pip()} install {name}")
    return Check(name, "ok", f"{have}; for {purpose}")


def try_torch(command: str = sys.executable) -> dict[str, Any] | str:
    """Return what PyTorch sees, or why it can't be imported."""
    try:
        done = subprocess.run(
            [command, "-c", TRY_TORCH], capture_output=True, text=True, timeout=TORCH_SECONDS
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    except subprocess.TimeoutExpired:
        return f"no answer in {TORCH_SECONDS:.0f} s"
    except (OSError, ValueError) as error:
        said = done.stderr.strip().splitlines() if isinstance(error, ValueError) else [str(error)]
        return said[-1] if said else f"it ended with status {done.returncode}"


def devices(driver: list[machine.Gpu], torch: dict[str, Any] | str | None) -> Iterator[Check]:
    """Compare the GPUs that the driver lists with those that PyTorch can use."""
    if isinstance(torch, str):
        mend = f"{pip()} install --force-reinstall torch"
        yield Check("torch import", "broken", f"it can't be imported: {torch}", mend)
        torch = None
    usable = [] if torch is None else torch["gpus"]
    for gpu in usable:
        kind = "bfloat16" if gpu["bfloat16"] else "no bfloat16: float32 is taken"
        what = f"{gpu['name']}, {size(gpu['memory'])}, compute capability {gpu['capability']}"
        yield Check("gpu", "ok", f"{what}, {kind}")
    if usable or torch is None:
        return
    if not driver:
        yield Check("gpu", "ok", "none; training runs on the CPU")
    for seen in driver:
        why = "this PyTorch is built without CUDA"
        mend = f"{pip()} install --force-reinstall torch --index-url {CUDA_WHEELS}"
        if torch["cuda"]:
            why = f"PyTorch's CUDA {torch['cuda']} can't use it with driver {seen.driver}"
            mend = "install a newer driver, or a torch for an older CUDA"
        yield Check("gpu", "broken", f"{seen.name}, {size(seen.memory)}: {why}", mend)


def ranks(gpus: int, items: Sequence[str] = ()) -> Check:
    """Say how many ranks can train here, and what starts them elsewhere. Never raises."""
    slurm = "; SLURM is here: --on slurm" if shutil.which("sbatch") else ""
    here = f"{gpus}, one a GPU" if gpus else f"1 on the CPU; {machine.cores()} cores for more"
    if not items:
        return Check("ranks", "ok", f"{here}: groupwise launch{slurm}")
    try:
        config = read_config(*split_settings(items))
        from groupwise.training.together import check_team

        check_team(config, max(gpus, 1))
    except Exception as error:  # a configuration or an installation that can't be used
        return Check("ranks", "missing", f"{here}, but: {' '.join(str(error).split())}")
    most = config.prompts_per_step
    words = f"{here}; this configuration takes up to {most} (prompts_per_step){slurm}"
    return Check("ranks", "ok", words)


def disk(runs: Path) -> Check:
    """Check the free space where runs are written, and that they can be written."""
    there = machine.existing(runs)
    free = shutil.disk_usage(there).free
    mend = "groupwise train CONFIG --run FOLDER_ON_ANOTHER_DISK"
    if not there.is_dir() or not os.access(there, os.W_OK):
        return Check("disk", "broken", f"{there} can't be written to", mend)
    if free < LEAST_DISK:
        return Check("disk", "broken", f"{size(free)} free in {there}, too little", mend)
    return Check("disk", "ok", f"{size(free)} free in {there}")


def checkpoints(runs: Path, items: Sequence[str]) -> Check:
    """Compare the size of a configuration's checkpoints with what is free. Never raises."""
    mend = "free some space, checkpoint.keep=1, or --run FOLDER_ON_ANOTHER_DISK"
    try:
        from groupwise.plan.estimate import space_of
        from groupwise.prepare.placing import placed
        from groupwise.prepare.sizes import sizes_of

        config = placed(read_config(*split_settings(items)))
        space = space_of(config, sizes_of(config)[0])
    except Exception as error:  # a configuration or an installation that can't be used
        why = " ".join(str(error).split())
        return Check("checkpoints", "broken", f"they can't be counted: {why}")
    there = machine.existing(runs)
    free = shutil.disk_usage(there).free
    words = f"{space.words}; {size(free)} free in {there}"
    if space.missing(free):
        return Check("checkpoints", "broken", f"{words}, too little for one", mend)
    if space.tight(free):
        return Check("checkpoints", "missing", f"{words}, too little for all", mend)
    return Check("checkpoints", "ok", words)


def shared_memory(there: int) -> Check:
    """Check shared memory: one process needs none, several that exchange data do."""
    if there >= LEAST_SHARED:
        return Check("shared memory", "ok", size(there))
    return Check(
        "shared memory",
        "missing",
        f"{size(there)}; too little for several GPUs or a vLLM beside it",
        "docker run --shm-size=8g ...",
    )


def programs() -> Check:
    """Check whether a model's programs can be run in isolation. Never raises."""
    try:
        from groupwise.graders.sandbox.pool import HELP, report  # refuses to load on other systems

        whys = report()
    except Exception as error:  # a machine that can't even be asked
        return Check("programs", "missing", f"the reward code can't be used: {error}")
    holds = [wall for wall, why in whys.items() if not why]
    if holds:
        return Check("programs", "ok", f"isolated by {holds[0]}; holds here: {', '.join(holds)}")
    told = "; ".join(f"{wall}: {why}" for wall, why in whys.items())
    said = f"no isolation holds, so the reward code refuses to run ({told})"
    return Check("programs", "missing", said, HELP)


def _numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 2.13.0+cpu -> (2, 13, 0)."""
    found = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
    return tuple(found)
