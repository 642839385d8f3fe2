"""`groupwise plan --gpus N` and `--simulate RUN`: several GPUs, by arithmetic and by simulation."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.commands.shared import aligned, print_json, start_pytorch
from groupwise.common.sizes import size
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.config import Config
    from groupwise.plan.estimate import Place
    from groupwise.plan.simulate import SimulatedTime
    from groupwise.plan.spread import SpreadPlan, SpreadWay

SHOWN = 5  # ways beside the best that are printed


def add_arguments(parser: Any) -> None:
    parser.add_argument("--gpus", type=int, metavar="N", help="plan for so many of these GPUs")
    parser.add_argument(
        "--sampling", type=int, metavar="N",
        help="of these, GPUs that only sample; default: what is fastest",
    )  # fmt: skip
    parser.add_argument(
        "--simulate", metavar="RUN",
        help="replay this run's lengths and rates with lag and more devices; a simulation",
    )  # fmt: skip
    parser.add_argument(
        "--learning", type=int, default=1, metavar="M", help="of a simulation: devices that learn"
    )
    parser.add_argument(
        "--lag", type=int, default=1, metavar="K", help="of a simulation: the most; default: 1"
    )


def over_gpus(args: argparse.Namespace, config: Config, place: Place) -> int:
    """Print how a configuration can be spread over GPUs; return 1 where no way fits."""
    from groupwise.plan.spread import spread

    if args.gpus < 1:
        raise ConfigError(f"--gpus {args.gpus}: at least 1.")
    made = spread(config, place, args.gpus, args.tokens, args.sampling)
    if args.json:
        print_json({"ways": [way.as_dict() for way in made.ways]})
    else:
        print(spread_text(made))
    return 1 if made.best.fits is False else 0


def spread_text(made: SpreadPlan) -> str:
    from groupwise.model.cost import parameters
    from groupwise.plan.spread import NOT_MEASURED

    best, config = made.best, made.config
    verdict = {None: "", True: "fits", False: "does not fit"}[best.fits]
    room = "" if best.available is None else f" of {size(best.available)}: {verdict}"
    lines = [
        f"{Path(config.model.path).name}, {parameters(made.shape) / 1e9:.1f}B parameters, on "
        f"{best.split.gpus} x {made.place.device.name}: {best.split}",
        f"{config.prompts_per_step} prompts x {config.group_size} samples a step, prompts of "
        f"{made.prompts.mean} tokens, answers of {made.tokens}",
        "",
        f"a GPU that learns: {size(sum(best.learner.values()))}{room}",
        *(f"  {name:<18}{size(x):>10}" for name, x in best.learner.items() if x),
    ]
    if best.sampler:
        lines += [f"a GPU that samples: {size(sum(best.sampler.values()))}"]
        lines += [f"  {name:<18}{size(x):>10}" for name, x in best.sampler.items() if x]
    if best.host:
        lines += [f"a machine's memory:  {size(best.host)} of the optimizer's numbers"]
    lines += [f"sequences in flight on a server: {best.slots:,}",
              f"sent to each sampling GPU after an update: {size(best.sync_bytes)}"]  # fmt: skip
    lines += ["", *_times(best), "", *_others(made), f"simulated: {NOT_MEASURED}"]
    return "\n".join(lines)


def _times(way: SpreadWay) -> list[str]:
    if way.seconds is None or way.step is None:
        return ["no times: they are known for bfloat16 on GPUs of the list in --gpu alone"]
    found = [f"  {name:<18}{_seconds(x):>10}" for name, x in way.seconds.items()]
    if way.overlapped is not None:
        found.append(f"  {'with lag 1':<18}{_seconds(way.overlapped):>10}  at the least")
    return ["a step", *found, f"  {'in all':<18}{_seconds(way.step):>10}  bound by {way.binds}"]


def _others(made: SpreadPlan) -> list[str]:
    rows = [["other ways", "a GPU that learns", "in flight", "a step", "with lag", ""]]
    for way in made.ways[1 : 1 + SHOWN]:
        rows.append([
            str(way.split), size(sum(way.learner.values())), f"{way.slots:,}",
            "" if way.step is None else _seconds(way.step),
            "" if way.overlapped is None else _seconds(way.overlapped),
            "does not fit: " + way.binds if way.fits is False else "",
        ])  # fmt: skip
    return [*aligned(rows), ""] if len(rows) > 1 else []


def _seconds(x: float) -> str:
    return f"{x:.3g} s" if x < 100 else f"{x:.0f} s"


# --- simulation -------------------------------------------------------------------------------


def simulated(args: argparse.Namespace) -> int:
    """Print what lag, partial rollouts and more devices would have made of a run's time."""
    start_pytorch()
    from groupwise.plan.simulate import LABEL, recorded, what_if

    if args.items:
        raise ConfigError(
            f"--simulate takes what the run recorded: leave out {' '.join(args.items)}."
        )
    for name, least in (("gpus", 1), ("learning", 1), ("lag", 0)):
        given = getattr(args, name)
        if given is not None and given < least:
            raise ConfigError(f"--{name} {given}: at least {least}.")
    found = recorded(Path(args.simulate))
    sampling = args.sampling or max((args.gpus or args.learning + 1) - args.learning, 1)
    results = what_if(found, lag=args.lag, sampling=sampling, learning=args.learning)
    if args.json:
        print_json({
            "label": LABEL, "run": found.as_dict(), "results": [x.as_dict() for x in results],
        })  # fmt: skip
        return 0
    print(f"{args.simulate}: {found.words}\n")
    print("\n".join(aligned([HEAD, *(_row(x, results[0]) for x in results)])))
    print(f"\n{LABEL}")
    return 0


HEAD = ["simulated", "a step", "speed", "sampling idle", "learning idle", "lag mean", "most"]


def _row(x: SimulatedTime, first: SimulatedTime) -> list[str]:
    return [x.name, _seconds(x.step), f"{first.step / x.step:.2f}x", f"{x.sampler_idle:.0%}",
            f"{x.learner_idle:.0%}", f"{x.lag_mean:.2f}", f"{x.lag_most}"]  # fmt: skip
