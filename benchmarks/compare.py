"""How long a comparison of six recipes takes, and how much of that is not spent in runs.

    python benchmarks/compare.py [--seeds 5] [--budget tokens=3e5] [--jobs N] [--out DIR]

The embedded task on all cores. Aims: within 30 minutes on two of them, at a budget at which GRPO
gains 10 points or more, and less than 5 % beside the sum of the runs. Exit status 1 if one is
missed (the first counts for five seeds).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from groupwise.cli import main as groupwise

RECIPES = ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo")
MINUTES, POINTS, OVERHEAD = 30.0, 10.0, 0.05


def figures(found: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """What was measured, in words, and whether it is as aimed at."""
    grpo = found["arms"][0]
    minutes, cost = found["cost"]["wall_seconds"] / 60, found["cost"]
    gain = 100 * (grpo["final"]["mean"] - grpo["start"])
    share = cost["overhead_share"]
    slowest = max(arm["seconds"] for arm in found["arms"])
    return [
        ("wall time", f"{minutes:.1f} minutes on {cost['places']} processes", minutes <= MINUTES),
        ("GRPO's gain", f"{gain:.1f} points", gain >= POINTS),
        ("beside the runs", f"{100 * share:.1f} % of their sum", share <= OVERHEAD),
        ("slowest arm", f"{slowest:.1f} s a run", True),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="5")
    parser.add_argument("--budget", default="tokens=3e5")
    parser.add_argument("--jobs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="compare_")) / "out"
    jobs = ["--jobs", args.jobs] if args.jobs else []
    asked = ["--seeds", args.seeds, "--budget", args.budget, "--out", str(out), *jobs]
    status = groupwise(["compare", *RECIPES, *asked])
    if status:
        return status
    found = json.loads((out / "compare.json").read_text())
    if found["cost"]["overhead_share"] is None:
        print(f"{out} was finished before: nothing to measure. Take another --out.")
        return 2
    print()
    rows = figures(found)
    for name, words, well in rows:
        print(f"{name:<16} {words}{'' if well else '  MISSED'}")
    return 0 if all(well for _, _, well in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
