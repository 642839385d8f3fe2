"""`groupwise launch`: a run of several ranks on this machine, under SLURM or on a Ray cluster."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.commands import machine, pipeline
from groupwise.commands.shared import SETTINGS, read_config, split_settings, warn
from groupwise.errors import ConfigError
from groupwise.parallel.launchers import on_machine, on_ray, on_slurm
from groupwise.parallel.launchers.job import ADDRESS, ADDRESSES, RankJob, Servers

if TYPE_CHECKING:
    from groupwise.config import Config

PLACEHOLDERS = (ADDRESSES, ADDRESS)
STAND_IN = {ADDRESSES: '["http://server:8000"]', ADDRESS: "http://server:8000"}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "launch",
        help="train with several ranks: on this machine, under SLURM or on a Ray cluster",
        usage="groupwise launch [CONFIG.toml] [KEY=VALUE ...] [--on machine|slurm|ray] "
        "[--ranks N] [--nodes N] [--run DIR] [--dry-run] [--submit]",
        example="groupwise launch steps=20 --ranks 2",
    )
    parser.add_argument("items", nargs="*", metavar="KEY=VALUE", help=SETTINGS)
    parser.add_argument(
        "--on", choices=("machine", "slurm", "ray"), default="machine", help="default: machine"
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="of each node; default: the GPUs of this machine"
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--run", metavar="DIR", help="default: runs/<name of the configuration>")
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="times to go on by itself after a rank died",
    )
    parser.add_argument(
        "--sbatch", action="append", default=[], metavar="NAME=VALUE",
        help="an option of sbatch, such as partition=gpu or time=24:00:00; repeatable",
    )  # fmt: skip
    parser.add_argument("--submit", action="store_true", help="submit the script to SLURM")
    parser.add_argument("--address", default="auto", help="of the Ray cluster; default: found")
    parser.add_argument("--servers", type=int, default=0, metavar="N",
                        help="servers that Ray starts beside the ranks")  # fmt: skip
    parser.add_argument(
        "--server", metavar="COMMAND",
        help="what starts one, with {port}; settings name them as {urls}, or the first as {url}",
    )  # fmt: skip
    parser.add_argument(
        "--server-gpus", type=int, default=1, metavar="N", help="of each server; default: 1"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be written and run, and stop"
    )
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Check what can be checked here, then write and start what is needed."""
    _check_options(args)
    source, overrides = split_settings(args.items)
    filled = [_filled(each) for each in overrides]
    if pipeline.has_stages(source):
        assert source is not None
        chain = pipeline.chain_in(source, filled, args.run)
        path = Path(args.run) if args.run else Path("runs") / chain.pipeline.name
        job = job_of(args, chain.asked, path)
        pipeline.check(chain, job.size)
    else:
        config = read_config(source, filled)
        path = Path(args.run) if args.run else Path("runs") / (source.stem if source else "default")
        job = job_of(args, config, path)
        _check(config, job)
    if args.on == "slurm":
        return _slurm(args, job, path)
    if args.dry_run:
        print(on_machine.text(job) if args.on == "machine" else on_ray.text(job))
        return 0
    if args.on == "ray":
        return on_ray.run(job, args.address)
    print(on_machine.text(job), file=sys.stderr)
    on_machine.start(job)
    raise AssertionError("not reached")


def job_of(args: argparse.Namespace, config: Config, path: Path) -> RankJob:
    """Return the job that the options ask for."""
    gpus = config.model.device != "cpu"
    there = len(machine.gpus()) if gpus else 0
    ranks = args.ranks or there
    if not ranks:
        what = "runs on the CPU" if not gpus else "no GPU is seen on this machine"
        raise ConfigError(f"How many ranks? {what.capitalize()}: say it, --ranks 2.")
    here = args.on == "machine"
    if here and there and ranks > there:
        raise ConfigError(
            f"--ranks {ranks}: this machine has {there} GPUs, and a GPU takes one rank. Ask for "
            f"--ranks {there}, or launch on more machines: --on slurm, --on ray."
        )
    servers = None
    if args.servers:
        servers = Servers(args.servers, tuple(shlex.split(args.server)), args.server_gpus)
    return RankJob(
        name=path.name,
        words=("-m", "groupwise", "train", *args.items, f"run={path}"),
        ranks=ranks,
        nodes=args.nodes,
        gpus=gpus and (there > 0 or not here),
        folder=Path.cwd(),
        restarts=args.restarts,
        servers=servers,
    )


def _check(config: Config, job: RankJob) -> None:
    """Refuse what every rank would refuse when it is started, perhaps hours later in a queue."""
    from groupwise.stages.checks import check_config
    from groupwise.training.together import check_team

    for doubt in check_config(config):
        warn(doubt)
    check_team(config, job.size)


def _check_options(args: argparse.Namespace) -> None:
    for name in ("ranks", "nodes"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)}: at least 1.")
    if args.restarts and args.on == "slurm":
        raise ConfigError(
            "--restarts is torchrun's. SLURM starts a job again itself: --sbatch requeue, and "
            "`scontrol requeue JOB`."
        )
    if args.on == "machine" and args.nodes > 1:
        raise ConfigError(
            f"--nodes {args.nodes} on this machine alone. Launch with --on slurm or --on ray, or "
            "start torchrun on each of them as docs/scale.md says."
        )
    for option, given, where in (
        ("--sbatch", args.sbatch, "slurm"),
        ("--submit", args.submit, "slurm"),
        ("--servers", args.servers, "ray"),
    ):
        if given and args.on != where:
            raise ConfigError(f"{option} belongs to --on {where}; this is --on {args.on}.")
    if bool(args.servers) != bool(args.server):
        raise ConfigError("--servers N and --server COMMAND belong together: give both, or none.")
    if args.servers and "{port}" not in args.server:
        raise ConfigError(
            "--server has no {port} in it, so that several would meet at one. Write it where the "
            'port belongs: --server "vllm serve MODEL --port {port}".'
        )
    named = any(mark in item for item in args.items for mark in PLACEHOLDERS)
    if named != bool(args.servers):
        raise ConfigError(
            "Settings name servers by {urls} or {url} where --servers starts some, and only there: "
            "say where their addresses belong, or leave both out."
        )


def _filled(setting: str) -> str:
    """Return the setting with addresses of no one in place of those that nobody knows yet."""
    for mark, address in STAND_IN.items():
        setting = setting.replace(mark, address)
    return setting


def _slurm(args: argparse.Namespace, job: RankJob, path: Path) -> int:
    options = dict(_option(each) for each in args.sbatch)
    log = path.parent.absolute() / f"{path.name}.%j.log"
    text = on_slurm.script(job, log, options)
    if args.dry_run:
        print(text, end="")
        return 0
    file = path.parent / f"{path.name}.sbatch"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")
    print(f"wrote {file}")
    if not args.submit:
        print(f"submit it with: sbatch {shlex.quote(str(file))}")
        return 0
    number = on_slurm.submit(file)
    print(f"submitted as job {number}; its output goes to {str(log).replace('%j', number)}")
    return 0


def _option(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not re.fullmatch(r"[a-z][a-z-]*", name) or "\n" in value:
        raise ConfigError(
            f"--sbatch {text!r} is no option of sbatch. Write its long name without the dashes: "
            "--sbatch partition=gpu."
        )
    return name, value
