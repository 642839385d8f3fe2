"""The claims of the papers as small experiments: run them, judge them, write the page.

    python -m experiments.run a_length_bias b_clip_higher      # minutes each, on all cores
    python -m experiments.run smollm2 --set model.path=FOLDER --set model.device=cuda --jobs 6
    python -m experiments.run --page                           # docs/claims.md, from results/

A claim is a file beside this one: what is said, by whom, the arms that show it, and the direction
and size that are expected. Its runs lie in runs/experiments/NAME; the same command goes on with
them. What came out is in results/NAME.json, whatever it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from experiments import page, scaling
from groupwise.cli import main as groupwise
from groupwise.compare.findings import family, pair_of
from groupwise.compare.outcomes import Outcome, outcomes
from groupwise.compare.plan import Folder
from groupwise.validate.statistics import ALPHA, Difference, paired_difference

HERE = Path(__file__).parent
SCORES = {"accuracy": "final", "area": "area"}  # a claim's word for it, and compare's


@dataclass(frozen=True)
class Expectation:
    """What a paper predicts of two arms: one has more of a measure, or they are alike."""

    measure: str
    more: str
    than: str | float  # another arm, or a number
    size: float  # the published effect, or how far apart arms that are alike may be
    alike: bool
    relative: bool  # sizes are shares of the second arm's mean

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Expectation:
        known = dict(entry)
        alike = "alike" in known
        more, than = known.pop("alike") if alike else (known.pop("more"), known.pop("than"))
        size = known.pop("within" if alike else "effect")
        return cls(known.pop("measure"), more, than, size, alike, known.pop("relative", False))


@dataclass(frozen=True)
class Claim:
    """One file."""

    name: str
    claim: str
    source: str
    published: str
    setting: str
    reading: str
    seeds: int
    budget: str
    arms: dict[str, str]  # name -> what compare calls it
    expect: tuple[Expectation, ...]
    config: str = ""  # a file beside it: what all arms share
    settings: tuple[str, ...] = ()
    scaling: Mapping[str, Any] | None = None  # accuracy against tokens, before and after
    runs_of: str = ""  # another claim: its arms and runs are this one's as well

    @property
    def measures(self) -> list[str]:
        return list(dict.fromkeys(e.measure for e in self.expect if e.measure not in SCORES))


def read(name: str) -> Claim:
    """A claim, whole and consistent: what is wrong is told now, and not behind its runs."""
    file = HERE / f"{name}.toml"
    known = parse(file)
    if "runs_of" in known:
        other = parse(HERE / f"{known['runs_of']}.toml")
        shared = ("arms", "seeds", "budget", "config", "settings")
        known |= {key: other[key] for key in shared if key in other}
    try:
        expect = tuple(Expectation.of(entry) for entry in known.pop("expect", ()))
        settings = tuple(known.pop("settings", ()))
        claim = Claim(name=name, expect=expect, settings=settings, **known)
    except (KeyError, TypeError, ValueError) as error:
        raise SystemExit(f"{file} is no claim: {type(error).__name__}: {error}") from None
    for e in expect:
        for arm in (e.more, e.than):
            if isinstance(arm, str) and arm not in claim.arms:
                raise SystemExit(
                    f"{file} expects something of {arm!r}, and its arms are "
                    f"{', '.join(claim.arms)}."
                )
    return claim


def parse(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{file} can't be read: {error}") from None


def names() -> list[str]:
    """All claims, in order; files that arms share are none."""
    return [file.stem for file in sorted(HERE.glob("*.toml")) if "claim" in parse(file)]


# --- run ----------------------------------------------------------------------------------------


def command(claim: Claim, out: Path, more: Sequence[str]) -> list[str]:
    """What `groupwise` is asked for."""
    own = ["--seeds", str(claim.seeds), "--budget", claim.budget, "--out", str(out)]
    own += ["--config", str(HERE / claim.config)] if claim.config else []
    for setting in claim.settings:
        own += ["--set", setting]
    for measure in claim.measures:
        own += ["--measure", measure]
    return ["compare", *claim.arms.values(), *own, *more]


def do(claim: Claim, root: Path, more: Sequence[str]) -> int:
    """Run what is not done yet, and write down what came out. 0 if all of it is there."""
    out = root / (claim.runs_of or claim.name)
    status = groupwise(command(claim, out, more))
    if status:
        return status
    compared = json.loads((out / "compare.json").read_text())
    folder = Folder(out)
    plan = folder.read()
    assert plan is not None
    done, _ = outcomes(plan, folder)  # none is damaged: the status would say so
    found: dict[str, Any] = {
        "name": claim.name,
        "machine": machine(plan.arms[0].config.model.device),
        "seeds": claim.seeds,
        "budget": claim.budget,
        "seconds": sum(one.seconds for runs in done for one in runs),
        "arms": arms(claim, compared),
        "expectations": judge(claim, done),
    }
    if claim.scaling:
        found["scaling"] = scaling.measure(claim.scaling, plan, folder)
        found["expectations"] += [scaled(claim.scaling, found["scaling"])]
    file = HERE / "results" / f"{claim.name}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n")
    print(page.section(claim, found))
    return 0


def machine(device: str) -> str:
    if device.startswith("cuda"):
        return f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}"
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), PyTorch {torch.__version__}"


def arms(claim: Claim, compared: Mapping[str, Any]) -> dict[str, Any]:
    """Of each arm what the claim speaks of, as mean and standard error over seeds."""
    kept = ("mean", "low", "high", "stderr")
    found = {}
    for name, arm in zip(claim.arms, compared["arms"], strict=True):
        by = {"accuracy": arm["final"], "area": arm["area"], **arm["measures"]}
        found[name] = {
            "start": arm["start"],
            "steps": arm["steps"],
            **{what: one and {key: one[key] for key in kept} for what, one in by.items()},
        }
    return found


# --- judge --------------------------------------------------------------------------------------


def judge(claim: Claim, done: Sequence[Sequence[Outcome]]) -> list[dict[str, Any]]:
    """Each expectation against what was measured, paired by seed; Holm over those of the claim."""
    runs = dict(zip(claim.arms, done, strict=True))
    judged = family([difference(e, runs) for e in claim.expect], share=False)
    found = []
    for e, tested in zip(claim.expect, judged, strict=True):
        entry = asdict(e)
        if tested is None:
            found.append({**entry, "verdict": "not measured"})
            continue
        unit = abs(second_mean(e, runs)) if e.relative else 1.0
        numbers = {
            key: tested[key] / unit for key in ("difference", "low", "high", "smallest_visible")
        }
        entry |= {**numbers, "p": tested["p"]}
        found.append({**entry, "verdict": verdict(e, entry)})
    return found


def difference(e: Expectation, runs: Mapping[str, Sequence[Outcome]]) -> Difference | None:
    """Of the first arm from the second, or from a number; None where a run did not measure it."""
    by = SCORES.get(e.measure, e.measure)
    if isinstance(e.than, str):
        return pair_of((e.more, e.than), (runs[e.more], runs[e.than]), 0, 1).by(by)
    values = [one.value(by) for one in runs[e.more]]
    known = [value for value in values if value is not None]
    return paired_difference(known, [e.than] * len(known)) if known == values else None


def second_mean(e: Expectation, runs: Mapping[str, Sequence[Outcome]]) -> float:
    if not isinstance(e.than, str):
        return e.than
    by = SCORES.get(e.measure, e.measure)
    return mean(value for one in runs[e.than] if (value := one.value(by)) is not None)


def scaled(asked: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Test-time scaling as one more expectation: training gains more where there is more room."""
    least, most = (f"the gain with {asked['budgets'][at]} tokens" for at in (0, -1))
    expected = Expectation("accuracy", most, least, asked["effect"], alike=False, relative=False)
    numbers = {key: found[key] for key in ("difference", "low", "high", "smallest_visible", "p")}
    return {**asdict(expected), **numbers, "verdict": verdict(expected, numbers)}


def verdict(expected: Expectation, found: Mapping[str, Any]) -> str:
    """Where no difference was seen, only a design that would have seen the published one counts.

    Arms are alike where the interval says that they can't differ by more than a little.
    """
    if expected.alike:
        if -expected.size < found["low"] and found["high"] < expected.size:
            return "as claimed"
        return "the opposite" if found["p"] < ALPHA else "open"
    if found["p"] < ALPHA:
        return "as claimed" if found["difference"] > 0 else "the opposite"
    return "not seen" if found["smallest_visible"] < expected.size else "open"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("claims", nargs="*", metavar="NAME", help=", ".join(names()))
    parser.add_argument("--out", type=Path, default=Path("runs/experiments"))
    parser.add_argument("--jobs", help="runs at a time, as of groupwise compare")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--page", action="store_true", help="write docs/claims.md")
    args = parser.parse_args()
    if not args.claims and not args.page:
        parser.error("name claims to run, or --page")
    more = ["--jobs", args.jobs] if args.jobs else []
    for setting in args.settings:
        more += ["--set", setting]
    for name in args.claims:
        if name not in names():
            parser.error(f"there is no claim {name!r}: {', '.join(names())}")
    claims = [read(name) for name in args.claims]  # all of them, before the first is run
    failed = [claim for claim in claims if do(claim, args.out, more)]
    if args.page:
        (HERE.parent / "docs" / "claims.md").write_text(page.whole([read(n) for n in names()]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
