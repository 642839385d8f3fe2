"""`groupwise probe`: pass rates, useful groups and lengths under the model as it is.

Stopped by Ctrl-C, it reports on what it has.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.commands.shared import (
    SETTINGS,
    print_json,
    read_placed,
    say,
    split_settings,
    terminal_width,
    warn,
)
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.evaluate.estimates import Estimate
    from groupwise.probing.advice import Advice
    from groupwise.probing.findings import SettingFigures
    from groupwise.probing.probe import PreparedProbe, Probe
    from groupwise.records import Episode

BAR = 40  # characters of the longest bar
SHOWN = 160  # characters of an example's end


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "probe",
        help="pass rates, useful groups and lengths under the current model, before training",
        usage="groupwise probe CONFIG.toml|RUN [KEY=VALUE ...] [--template NAME]... "
        "[--temperature X]... [--prompts N] [--samples N] [--pass X] [--out DIR] [--json]",
        example="groupwise probe data.train=countdown --prompts 16",
    )
    parser.add_argument("items", nargs="*", metavar="KEY=VALUE", help=SETTINGS)
    parser.add_argument(
        "--template", action="append", default=[], metavar="NAME",
        help="a data.template to try; repeatable. Default: the configuration's",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", action="append", default=[], type=float, metavar="X",
        help="to try; repeatable. Default: engine.temperature",
    )  # fmt: skip
    parser.add_argument("--prompts", type=int, default=32, metavar="N", help="default: 32")
    parser.add_argument(
        "--samples", type=int, metavar="N", help="of each prompt; default: group_size, at least 8"
    )
    parser.add_argument(
        "--pass", type=float, dest="threshold", metavar="X",
        help="the reward that passes; default: what the reward calls correct, or the full mark",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="DIR", help="write probe.json and samples.jsonl into a new folder"
    )
    parser.add_argument("--json", action="store_true", help="data instead of text")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Run the probe; return 0, or 130 where it was stopped. What was sampled is reported either
    way.
    """
    source, overrides = split_settings(args.items)
    is_run = source is not None and (source / "config.toml").is_file()
    config = read_placed(source / "config.toml" if source and is_run else source, overrides)
    out = Path(args.out) if args.out else None
    if out is not None and out.exists():
        raise ConfigError(f"--out {out} exists already, and nothing is overwritten.")
    if args.samples is not None and args.samples < 2:
        raise ConfigError(f"--samples {args.samples} is too few. Take 2 or more.")
    from groupwise.probing.advice import advise
    from groupwise.probing.probe import ProbeRequest, prepare_probe
    from groupwise.stages.checks import check_config
    from groupwise.sync.export import checkpoint_in

    for doubt in check_config(config):
        warn(doubt)
    asked = ProbeRequest(
        templates=tuple(args.template),
        temperatures=tuple(args.temperature),
        prompts=args.prompts,
        samples=args.samples or 0,
        threshold=args.threshold,
    )
    checkpoint = Path(checkpoint_in(source, "latest")) if source and is_run else None
    prepared = prepare_probe(config, asked, checkpoint=checkpoint)
    for note in prepared.notes:
        say(note)
    say(expected(prepared))
    begun = time.perf_counter()
    made = prepared.run()
    advice = advise(made)
    data = made.as_dict() | {
        "checkpoint": str(checkpoint) if checkpoint else None,
        "seconds": time.perf_counter() - begun,
        "verdicts": [asdict(verdict) for verdict in advice.verdicts],
        "change_first": advice.first,
        "suggested": {"group_size": asdict(advice.group_size),
                      "max_tokens": asdict(advice.max_tokens)},
    }  # fmt: skip
    if out is not None:
        write(out, made, data)
    if args.json:
        print_json(data)
    else:
        print(text(made, advice, terminal_width()))
    return 130 if made.interrupted else 0


def write(out: Path, made: Probe, data: dict[str, Any]) -> None:
    """Write the figures, and every sample to be read."""
    try:
        out.mkdir(parents=True)
        (out / "probe.json").write_text(
            json.dumps(data, indent=2, ensure_ascii=False, default=str), "utf-8"
        )
        with (out / "samples.jsonl").open("w", encoding="utf-8") as file:
            for each in made.rollouts:
                for rollout in (r for group in each.groups for r in group):
                    row = {
                        "template": each.template,
                        "temperature": each.temperature,
                        "prompt_id": rollout.task.id,
                        "sample": rollout.sample,
                        "prompt": rollout.task.prompt,
                        "answer": rollout.task.answer,
                        "completion": rollout.text,
                        "tokens": rollout.completion.own_length,
                        "finish": rollout.completion.finish,
                        **_episode(rollout.completion.episode),
                        "reward": rollout.grade.reward,
                        "passed": made.passing.passed(rollout.grade),
                        "parts": dict(rollout.grade.parts),
                        "status": rollout.grade.status,
                        "reason": rollout.grade.reason,
                    }
                    file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    except OSError as error:
        raise ConfigError(f"{out} can't be written: {error}. Choose another place.") from None


def _episode(episode: Episode | None) -> dict[str, Any]:
    if episode is None:
        return {}
    return {"stop": episode.stop, "turns": len(episode.turns), "messages": episode.messages}


# --- while it runs ----------------------------------------------------------------------------


def expected(prepared: PreparedProbe) -> str:
    """Describe how much will be sampled, and the longest it can take by the cost model."""
    from groupwise.commands.plan import duration, here
    from groupwise.model.cost import Group
    from groupwise.plan.estimate import rollout_seconds
    from groupwise.prepare.setup import weight_bytes

    config, shape = prepared.config, prepared.setup.loaded.model.config
    most, samples = config.engine.max_tokens, prepared.samples
    place = here(config)
    seconds: list[float] = []
    for each in prepared.rollouts:
        for first in range(0, len(each.tasks), prepared.at_once):
            some = each.tasks[first : first + prepared.at_once]
            groups = [Group(len(task.token_ids), [most] * samples) for task in some]
            slots = prepared.at_once * samples
            took = rollout_seconds(place, shape, groups, slots, weight_bytes(config))
            seconds += [] if took is None else [took]
    settings = len(prepared.rollouts)
    what = (
        f"{prepared.prompts} prompts x {samples} samples"
        + (f" x {settings} settings" if settings > 1 else "")
        + f", up to {most} tokens each"
    )
    if not seconds:
        return f"{what}. How long that takes is not known for this device."
    about = duration(max(sum(seconds), 1.0))
    busy = ", as busy as it is now" if place.cpu else ""
    return (
        f"{what}: about {about} if all are that long, on {place.device.name}{busy}. "
        "Ctrl-C ends it early, and reports."
    )


# --- for people -------------------------------------------------------------------------------


def text(made: Probe, advice: Advice, width: int) -> str:
    config, first = made.config, made.findings[0]
    lines = [
        f"{Path(config.model.path).name}: {max(f.prompts for f in made.findings)} prompts x "
        f"{made.samples} samples, seed {config.seed}. A sample passes if {made.passing.words}.",
        *(["Stopped early: these are the prompts that were done."] if made.interrupted else []),
        "",
        *table(made.findings, config.group_size),
    ]
    for found in made.findings:
        lines += ["", f"prompts by pass rate, {found.name}", *bars(found.histogram)]
    lines += ["", f"useful groups by size, {first.name}", *useful_bars(first)]
    lines += ["", f"tokens of an answer, at most {config.engine.max_tokens}"]
    lines += [_lengths(found) for found in made.findings]
    lines += [line for found in made.findings for line in _episodes(found)]
    if first.passing.value < 0.1:
        lines += ["", "one that does not pass", *_example(first.example, width)]
    lines += ["", *(verdict.text for verdict in advice.verdicts)]
    lines += ["", "suggested"]
    lines += [f"  {each.setting}: {each.reason}" for each in (advice.group_size, advice.max_tokens)]
    lines += [f"change first: {advice.first}"] if advice.first else ["nothing has to be changed"]
    return "\n".join(lines)


def table(findings: list[SettingFigures], group: int) -> list[str]:
    """Return a line for each setting; shares with their 95 % intervals."""
    rows = [
        ["template", "temperature", "pass", "pass@8", f"useful of {group}", "rewards differ",
         "cut off", "format", "failed"]
    ]  # fmt: skip
    for found in findings:
        rows.append(
            [
                found.template,
                f"{found.temperature:g}",
                _interval(found.passing),
                _interval(found.pass_at),
                _interval(found.useful),
                f"{_interval(found.spread)} of {found.spread_group}",
                f"{found.truncated_share:.0%}",
                "-" if found.format_share is None else f"{found.format_share:.0%}",
                str(found.failed),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) for row in rows]
    note = (
        "in brackets: 95 % interval over prompts; ~: by a beta-binomial model, where a group is "
        "larger than what was sampled of a prompt"
    )
    return [*(line.rstrip() for line in lines), note]


def bars(counts: dict[str, int]) -> list[str]:
    most = max(counts.values())
    return [
        f"  {name:<9}{'█' * round(BAR * number / most)}{' ' if number else ''}{number}"
        for name, number in counts.items()
    ]


def useful_bars(found: SettingFigures) -> list[str]:
    return [
        f"  {size:<9}{'█' * round(BAR * share.value)} {_interval(share)}"
        for size, share in found.useful_by_group.items()
    ]


def _interval(share: Estimate) -> str:
    from groupwise.evaluate.estimates import MODEL

    mark = "~" if share.how == MODEL else ""
    low, high = 100 * share.low, 100 * share.high
    return f"{mark}{_percent(share.value)} ({low:.0f}-{high:.0f})"


def _percent(share: float) -> str:
    return f"{share:.1%}" if 0 < share < 0.1 else f"{share:.0%}"


def _lengths(found: SettingFigures) -> str:
    values = "  ".join(f"{name} {number}" for name, number in found.lengths.items())
    return f"  {found.name}: {values}  cut off {found.truncated_share:.0%}"


def _episodes(found: SettingFigures) -> list[str]:
    """Say why episodes ended; nothing where nobody answered the policy."""
    if found.turns is None:
        return []
    from groupwise.watch.episodes import ends_in_words

    useful = f"{_interval(found.signal)} of the groups would teach something"
    ends = ", ".join(ends_in_words(found.stops))
    return ["", f"episodes of {found.turns:.1f} turns, {found.name}; {useful}", f"  ended {ends}"]


def _example(example: dict[str, Any], width: int) -> list[str]:
    written = " ".join(str(example["completion"]).split())
    shown = written if len(written) <= SHOWN else f"... {written[-SHOWN:]}"
    return [f"  wanted  {str(example['answer'])[: width - 10]}", f"  written {shown}"]
