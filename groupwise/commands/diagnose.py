"""`groupwise diagnose`: what is wrong with a run, since when, and what to change.

Exit status: 0 healthy, 1 sick, 2 can't be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.commands.pipeline import stages_in
from groupwise.commands.shared import print_json, terminal_width
from groupwise.runfiles.stages import is_pipeline

if TYPE_CHECKING:
    from groupwise.watch.diagnose import Diagnosis
    from groupwise.watch.health import Finding

SHOWN = 300  # characters of a sample
EVENTS = 3  # of guards


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "diagnose",
        help="what is wrong with a run, since when, and what to change",
        description="Exit status 0: healthy, 1: sick, 2: it can't be read.",
        example="groupwise diagnose runs/tiny",
    )
    parser.add_argument("path", metavar="RUN", help="a run folder, or a log of TRL or verl")
    parser.add_argument("--json", action="store_true", help="data instead of text")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    from groupwise.watch.diagnose import diagnose

    if is_pipeline(args.path):
        return _stages(args)
    found = diagnose(Path(args.path))
    if args.json:
        print_json(found.as_dict())
    else:
        print(text(found, terminal_width()))
    return 1 if found.sick else 0


def _stages(args: argparse.Namespace) -> int:
    """Diagnose the stages of a pipeline, one after the other; it is sick if one of them is."""
    from groupwise.watch.diagnose import diagnose

    found = [diagnose(run) for run in stages_in(Path(args.path))]
    if args.json:
        print_json({Path(each.path).name: each.as_dict() for each in found})
    else:
        texts = [text(each, terminal_width()) for each in found]
        print("\n\n".join(texts) or f"{args.path}: no stage has begun yet.")
    return 1 if any(each.sick for each in found) else 0


def text(found: Diagnosis, width: int) -> str:
    """Return the diagnosis for people: the first finding in full, the others in a line."""
    from groupwise.watch.display import visible

    of = "" if found.tool == "groupwise" else f" ({found.tool})"
    first = found.first
    if first is None:
        lines = [f"{found.path}{of}: healthy, {found.steps} steps."]
    else:
        state = "sick" if found.sick else "healthy, but"
        bad = first.evidence.first
        lines = [
            f"{found.path}{of}: {state}: {first.rule.name}, from step {bad} on "
            f"(sure at step {first.step} of {found.steps})."
        ]
        lines += ["", *_in_full(found, first, width)]
        others = [finding for finding in found.findings if finding is not first]
        if others:
            lines += ["", "Also, perhaps because of it:"]
            lines += [
                f"  step {f.evidence.first}  {f.rule.name}: {f.evidence.text}" for f in others
            ]
    if found.alone:
        lines += ["", f"In {found.alone} steps a critic learned alone, and the policy waited."]
    if found.changed:
        lines += ["", "Changed on the way:"]
        lines += [_cut(f"  {words}", width) for words in found.changed]
    if found.events:
        lines += ["", "Guards said:"]
        lines += [_cut(f"  step {e['step']}  {e['text']}", width) for e in found.events[-EVENTS:]]
    if found.damage:
        lines += ["", "Can't be read:", *(f"  {visible(each)}" for each in found.damage)]
    if found.unseen:
        lines += ["", f"Not judged, for want of metrics: {', '.join(found.unseen)}."]
    return "\n".join(lines)


def _in_full(found: Diagnosis, finding: Finding, width: int) -> list[str]:
    from groupwise.watch.chart import plot
    from groupwise.watch.display import visible
    from groupwise.watch.health import sentence
    from groupwise.watch.other_tools import names_in_tool

    rule, seen = finding.rule, finding.evidence
    lines = [f"Evidence  {seen.text}", f"          (threshold: {rule.threshold})"]
    points = found.points(finding)
    if len(points) > 1:
        encoding = (sys.stdout.encoding or "ascii").lower()
        lines += ["", f"  {seen.metric}"]
        lines += plot(
            points, min(width - 14, 72), mark=seen.first, ascii_only="utf" not in encoding
        )
    lines += [
        "",
        f"Meaning   {sentence(rule.means)} ({rule.sure})",
        f"Try       {sentence(rule.change)} {names_in_tool(rule.change, found.tool)}".rstrip(),
        f"Source    {rule.source}",
    ]
    if found.samples:
        lines += ["", f"Worst samples of step {found.sample_step}:"]
    for sample in found.samples:
        facts = [f"reward {sample['reward']}", f"finish {sample['finish']}"]
        facts += [f"answer {sample['answer']}"] if sample["answer"] is not None else []
        facts += [sample["grader_reason"]] if sample["grader_reason"] else []
        lines.append(_cut(f"  prompt {sample['prompt_id']}  " + ", ".join(facts), width))
        for name in ("prompt_text", "text"):
            mark = ">" if name == "prompt_text" else "<"
            shown = visible((sample[name] or "")[-SHOWN:]).replace("\n", "⏎").replace("\t", " ")
            lines.append(f"    {mark} {shown}")
    return lines


def _cut(line: str, width: int) -> str:
    from groupwise.watch.display import visible

    line = visible(line).replace("\n", " ")
    return line if len(line) <= 2 * width else line[: 2 * width - 1] + "…"
