"""Text for the terminal, made of data. Nothing here prints."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LABEL = 12  # columns of a label such as `aggregation`
IDLE = "idle with its own schedule and a sampler that is the learner"


def wrapped(text: str, width: int, label: str = "", indent: int = 2) -> list[str]:
    """Return a labelled paragraph with a hanging indent."""
    head = " " * indent + label.ljust(LABEL if label else 0)
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [head.rstrip()]


def bullets(title: str, items: Sequence[str], width: int) -> list[str]:
    if not items:
        return []
    lines = ["", title]
    for item in items:
        lines += textwrap.wrap(item, width, initial_indent="  - ", subsequent_indent="    ")
    return lines


def source(row: Mapping[str, Any]) -> str:
    """Return paper and year, the year not twice."""
    paper, year = str(row["paper"]), str(row["year"] or "")
    if not paper or year in paper:
        return paper or year
    return f"{paper} ({year})" if year else paper


def _value(value: Any) -> str:
    return "none" if value in (None, "", [], ()) else str(value)


# --- terminal ---------------------------------------------------------------------------------


def recipes_text(rows: Sequence[Mapping[str, Any]], width: int) -> str:
    """Return a block per recipe: an aligned head line, then slots and trade-offs under their
    labels.
    """
    names = max(len(row["name"]) for row in rows) + 2
    papers = max(len(source(row)) for row in rows) + 2
    lines = [f"{'METHOD'.ljust(names)}{'PAPER'.ljust(papers)}MODELS IN MEMORY", ""]
    for row in rows:
        head = f"{row['name'].ljust(names)}{source(row).ljust(papers)}"
        held = f"{', '.join(row['models'])} ({row['bytes']} bytes a weight)"
        lines += wrapped(held, width, head, indent=0)
        for text in row["asks"]:
            lines += wrapped(text, width, "asks")
        slots = " · ".join(text for text in row["short"].values() if text)
        lines += wrapped(slots, width, "slots")
        for label, key in (("fixes", "fixes"), ("breaks", "breaks"), ("reach for", "reach_for")):
            lines += wrapped(row[key], width, label) if row[key] else []
        lines.append("")
    lines += wrapped(
        "slots: in the order of the axes (filter, shaping, advantage, aggregation, ratio, gate, "
        "correction, penalty, auxiliary, schedule), defaults left out. Bytes: in bfloat16, without "
        "adapters, gradients included; groupwise plan counts them for a model. More: groupwise "
        "explain METHOD, groupwise recipes --choose.",
        width,
        indent=0,
    )
    return "\n".join(lines)


def _slots_text(functions: Iterable[Mapping[str, str]], width: int) -> list[str]:
    lines = []
    for function in functions:
        lines += wrapped(function["text"], width, function["kind"])
        for mark, key in (("+", "fixes"), ("−", "breaks")):
            if function[key]:
                lines += wrapped(f"{mark} {function[key]}", width, indent=LABEL + 4)
    return lines


def _source_after(data: Mapping[str, Any]) -> str:
    """Return the recipe's own source, or that of the recipe it was changed from, for the title."""
    if data["derived"]:
        return f" ({data['derived']['paper']})" if data["derived"]["paper"] else ""
    return f", {source(data)}" if source(data) else ""


def explain_text(data: Mapping[str, Any], width: int) -> str:
    """Describe one recipe: trade-offs, equation, slots, demands, notes."""
    lines = wrapped(f"{data['name']}: {data['title']}{_source_after(data)}", width, indent=0)
    lines += ["", *wrapped(data["plain"], width), ""] if data["plain"] else []
    for text in data["asks"]:
        lines += wrapped(text, width, "asks")
    for text in data["departs"]:
        lines += wrapped(text, width, "otherwise")
    for kind, side in (data["derived"] or {"differs": {}})["differs"].items():
        lines += wrapped(f"{kind}: {_value(side['a'])} → {_value(side['b'])}", width, "differs")
    for label, key in (("fixes", "fixes"), ("breaks", "breaks"), ("reach for", "reach_for")):
        lines += wrapped(data[key], width, label) if data[key] else []
    loss, *rest = data["equation"]
    lines += ["", loss["equation"]]
    for line in rest:
        lines += wrapped(line["equation"], width, line["slot"])
    lines += ["", "slots (+ what each fixes, − what it breaks)"]
    lines += _slots_text(data["functions"], width)
    lines += ["", "what it asks for", *wrapped(data["memory"], width, "in memory")]
    lines += wrapped(f"from the {data['source']}", width, "answers")
    for part in data["trains"]:
        lines += wrapped(f"{part['name']}: starts from {part['start']}", width, "trains")
    for stream in data["needs"]:
        lines += wrapped(f"{stream['name']}: {stream['meaning']}", width, "batch")
    extra = [name for name in data["outputs"] if name != "logp_NT"]
    lines += wrapped(", ".join(extra), width, "forward") if extra else []
    if data["setting"]:
        setting = ", ".join(f"{key} {value}" for key, value in data["setting"].items())
        lines += ["", "the source's setting, outside the slots", *wrapped(setting, width)]
    if data["note"]:
        lines += ["", "how sure this reading is", *wrapped(data["note"], width)]
    lines += bullets(IDLE, data["idle"], width)
    lines += bullets("doubts about this combination", data["doubts"], width)
    lines += bullets("pitfalls", data["pitfalls"], width)
    lines += bullets("where code and texts disagree", data["disagree"], width)
    return "\n".join(lines)


def difference_text(data: Mapping[str, Any], width: int) -> str:
    """Describe only what differs between two recipes."""
    a, b = data["a"], data["b"]
    if not any(data[key] for key in ("slots", "settings", "demands")):
        return f"{a} and {b} do not differ."
    if not data["slots"]:
        lines = [f"{a} and {b} have the same slots."]
    else:
        lines = [f"{a} → {b}: slots that differ"]
    for kind, slot in data["slots"].items():
        lines += ["", kind]
        for name, side in ((a, "a"), (b, "b")):
            lines += wrapped(f"{name}: {slot[side] or 'none'}", width)
            for function in slot[f"only_{side}"]:
                lines += wrapped(function["equation"], width, indent=6)
        for key, pair in slot["parameters"].items():
            lines += wrapped(f"{key}: {pair['a']} → {pair['b']}", width)
    for title, key in (("settings of the sources", "settings"), ("demands", "demands")):
        if data[key]:
            lines += ["", title]
        pad = max((len(name) for name in data[key]), default=0) + 2
        for name, pair in data[key].items():
            label = name.ljust(pad)
            lines += wrapped(f"{_demand(pair['a'])} → {_demand(pair['b'])}", width, label)
    return "\n".join(lines)


def _demand(value: Any) -> str:
    if not isinstance(value, list):
        return _value(value)
    return ", ".join(v["name"] if isinstance(v, dict) else str(v) for v in value) or "none"


def choice_text(
    answers: Mapping[str, str],
    assumed: Sequence[str],
    found: Sequence[Mapping[str, Any]],
    width: int,
) -> str:
    """Return recommendations, the best first."""
    given = ", ".join(
        f"{key}={value}" + (" (assumed)" if key in assumed else "")
        for key, value in answers.items()
    )
    lines = wrapped(f"For {given}:", width, indent=0)
    for place, item in enumerate(found, 1):
        lines += ["", f"{place}. {item['recipe']} ({item['title']})"]
        lines += wrapped(item["memory"], width, "in memory", 3)
        for label, key in (("otherwise", "departs"), ("idle", "idle")):
            for text in item[key]:
                lines += wrapped(text, width, label, 3)
        lines += wrapped("; ".join(item["reasons"]), width, "because", 3)
        for change in item["changes"]:
            text = f"recipe.{change['set']} = {change['to']!r}: {change['why']}"
            lines += wrapped(text, width, "set", 3)
        lines += wrapped(item["watch"], width, "watch", 3) if item["watch"] else []
    lines += ["", f"Next: groupwise explain {found[0]['recipe']}"] if found else []
    return "\n".join(lines)
