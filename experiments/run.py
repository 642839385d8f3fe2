"""The claims of the papers as small experiments: run them, judge them, write the page.

    python -m experiments.run a_length_bias b_clip_higher      # minutes each, on all cores
    python -m experiments.run all --page                       # every claim, then the page
    python -m experiments.run smollm2 --set model.path=FOLDER --set model.device=cuda --jobs 6
    python -m experiments.run --rejudge                        # figures anew, from results/*.jsonl
    python -m experiments.run --page                           # docs/claims.md, from results/

A claim is a file beside this one: what is said, by whom, the arms that show it, and the direction
and size that are expected. Its runs lie in runs/experiments/NAME; the same command goes on with
them. What came out is in results/, whatever it is: NAME.runs.jsonl has every run, NAME.json the
figures. Another way of testing, or another expectation of the same measures, needs no new runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments import claim as files
from experiments import page, records
from experiments.claim import Claim, names, read
from experiments.judge import figures
from groupwise.cli import main as groupwise
from groupwise.compare.outcomes import outcomes
from groupwise.compare.plan import ComparisonFolder


def command(claim: Claim, out: Path, more: Sequence[str]) -> list[str]:
    """What `groupwise` is asked for."""
    own = ["--seeds", str(claim.seeds), "--budget", claim.budget, "--out", str(out)]
    own += ["--config", str(files.HERE / claim.config)] if claim.config else []
    for setting in claim.settings:
        own += ["--set", setting]
    for measure in claim.measures:
        own += ["--measure", measure]
    return ["compare", *claim.arms.values(), *own, *more]


def do(claim: Claim, root: Path, more: Sequence[str]) -> int:
    """Run what is not done yet, and write down what came out. 0 if all of it is there."""
    status = groupwise(command(claim, root / claim.name, more))
    if status:
        return status
    folder = ComparisonFolder(root / claim.name)
    plan = folder.read()
    assert plan is not None
    done, _ = outcomes(plan, folder)  # none is damaged: the status would say so
    page.RESULTS.mkdir(exist_ok=True)
    records.write(page.RESULTS, claim, dict(zip(claim.arms, done, strict=True)))
    write(
        claim,
        {
            "name": claim.name,
            "machine": machine(plan.arms[0].config.model.device),
            "seeds": claim.seeds,
            "budget": claim.budget,
            "seconds": sum(one.seconds for runs in done for one in runs),
        },
    )
    return 0


def machine(device: str) -> str:
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}"
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), PyTorch {torch.__version__}"


def rejudge(claim: Claim) -> None:
    """The figures anew, from the runs that were kept. Without them the old figures stay."""
    found = page.result(claim.name)
    if found is None or records.read(page.RESULTS, claim) is None:
        print(
            f"{claim.name}: its runs were not kept, or not all of them, so its figures stay as "
            f"they are. `python -m experiments.run {claim.name}` makes them anew."
        )
        return
    write(claim, found)


def write(claim: Claim, about: Mapping[str, Any]) -> None:
    """results/NAME.json from the runs that are kept, and the claim's part of the page."""
    runs = records.read(page.RESULTS, claim)
    assert runs is not None
    found = {**about, **figures(claim, runs)}
    (page.RESULTS / f"{claim.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(page.section(claim, found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("claims", nargs="*", metavar="NAME", help=", ".join(["all", *names()]))
    parser.add_argument("--out", type=Path, default=Path("runs/experiments"))
    parser.add_argument("--jobs", help="runs at a time, as of groupwise compare")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument(
        "--rejudge", action="store_true", help="run nothing: figures anew, of NAME or of all"
    )
    parser.add_argument("--page", action="store_true", help="write docs/claims.md")
    args = parser.parse_args()
    if not (args.claims or args.rejudge or args.page):
        parser.error("name claims to run, or --rejudge, or --page")
    more = ["--jobs", args.jobs] if args.jobs else []
    for setting in args.settings:
        more += ["--set", setting]
    asked = names() if args.claims == ["all"] else args.claims
    for name in asked:
        if name not in names():
            parser.error(f"there is no claim {name!r}: {', '.join(names())}")
    wanted = asked or (names() if args.rejudge else [])
    claims = [read(name) for name in wanted]  # all of them, before the first is run
    failed = []
    for claim in claims:
        if args.rejudge:
            rejudge(claim)
        elif do(claim, args.out, more):
            failed.append(claim)
    if args.page:
        page.PAGE.write_text(page.whole([read(name) for name in names()]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
