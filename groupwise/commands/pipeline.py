"""The commands for a file or a folder of stages: train, plan, report, and a folder's runs."""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.commands.shared import aligned, warn
from groupwise.common.progress import phase
from groupwise.errors import RunError
from groupwise.parallel.started import leads_here

if TYPE_CHECKING:
    from groupwise.pipeline.chain import Chain


def has_stages(source: Path | None) -> bool:
    """Tell whether a file has [[stage]] tables; what else is wrong with it is told by others."""
    try:
        return source is not None and "stage" in tomllib.loads(source.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False


def train(source: Path, overrides: Sequence[str], args: argparse.Namespace) -> int:
    """Run all stages, or go on with them."""
    with phase("starting PyTorch"):
        from groupwise.pipeline.running import run_chain
        from groupwise.training.signals import Stopped
    chain = chain_in(source, overrides, args.run)
    if args.dry_run:
        return dry_run(chain)
    try:
        run_chain(chain, args.again)
    except Stopped as stopped:
        if leads_here():
            print(stopped, file=sys.stderr)
        return 130
    if leads_here():
        print("\n".join(table(chain.path)))
    return 0


def chain_in(source: Path, overrides: Sequence[str], run: str | None) -> Chain:
    """Read the file; its folder is runs/NAME unless another is given."""
    from groupwise.pipeline.chain import chain_of
    from groupwise.pipeline.reading import read

    made = read(source, overrides)
    return chain_of(made, Path(run) if run else Path("runs") / made.name)


def table(path: Path) -> list[str]:
    """Return the stages of a folder as lines: recipe, cost, accuracy before and after."""
    from groupwise.pipeline.page import COLUMNS, PARTS, parts_of, rows_of
    from groupwise.runfiles.stages import figures, read_stages

    record = read_stages(path)
    assert record is not None
    found = figures(path, record)
    parts = parts_of(found)
    by_part = ["", "held-out rewards, by part", *aligned([PARTS, *parts])] if parts else []
    return [*aligned([COLUMNS, *rows_of(found)]), *by_part]


def dry_run(chain: Chain) -> int:
    """Print every stage as it would run, in TOML, after checking them all; nothing is written."""
    from groupwise.config import text
    from groupwise.pipeline.chain import real
    from groupwise.pipeline.checks import base_for
    from groupwise.prepare.placing import placed

    with base_for(chain) as base:
        _check(chain, base)
        for stage in chain.pipeline.stages:
            resolved = real(chain, stage, str(base))
            config = placed(resolved.config)
            count = f"{config.epochs:g} epochs" if config.epochs else f"{config.steps} steps"
            print(f"# stage {stage.name}: {config.recipe.name}, from {stage.start}, "
                  f"{count}, in {chain.folder(stage)}")  # fmt: skip
            if resolved.left_out:
                print(f"# not for this recipe: {', '.join(resolved.left_out)}")
            print(f"\n{text(config)}\n")
    return 0


def check(chain: Chain, ranks: int) -> None:
    """Refuse stages that can't run with so many ranks; print doubts. Nothing is written."""
    from groupwise.pipeline.checks import base_for

    with base_for(chain) as base:
        _check(chain, base, ranks)


def _check(chain: Chain, base: Path, ranks: int = 1) -> None:
    from groupwise.pipeline.checks import check_chain
    from groupwise.runfiles.stages import ChainRecord

    for doubt in check_chain(chain, ChainRecord(chain.pipeline.name, "", ()), base, ranks):
        warn(doubt)


def report(folder: Path) -> int:
    """Write report.html of the pipeline and of every stage that has begun."""
    from groupwise.pipeline.page import write_page
    from groupwise.watch.report import write_report

    for run in stages_in(folder):
        print(f"wrote {write_report(run)}")
    print(f"wrote {write_page(folder)}")
    print("\n".join(table(folder)))
    return 0


def stages_in(folder: Path) -> list[Path]:
    """Return the run folders of a pipeline that have begun, in order."""
    from groupwise.runfiles.stages import read_stages

    record = read_stages(folder)
    assert record is not None
    runs = [folder / stage.folder for stage in record.stages]
    return [run for run in runs if (run / "config.toml").is_file()]


def last_stage(folder: Path) -> Path:
    """Return the run folder of the last stage that has a model."""
    runs = [run for run in stages_in(folder) if (run / "checkpoints" / "latest").exists()]
    if not runs:
        raise RunError(f"{folder} is a pipeline of which no stage has a checkpoint yet.")
    return runs[-1]
