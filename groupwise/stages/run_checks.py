"""Rules for answers of earlier runs: settings that nobody would read, or that lack their source."""

from __future__ import annotations

from collections.abc import Iterator

from groupwise.config.fields import Config
from groupwise.config.reading import DEFAULTS
from groupwise.config.values import flat
from groupwise.errors import nearest
from groupwise.methods.method import Method
from groupwise.stages.ignored import ignored

SOURCE = "run"
MIXED = ("reasoning", "other")


def earlier_runs(config: Config, recipe: Method) -> Iterator[str]:
    """Refuse a source without its folders, folders without the source, and what reads neither."""
    data, values = config.data, flat(config)
    reads = recipe.source == SOURCE
    if reads and not data.runs:
        yield (
            "recipe.source=run learns from answers of earlier runs, and data.runs names none. "
            'Write data.runs=["runs/earlier"].'
        )
    if not reads:
        names = ["data.runs", "data.mix", *(name for name in values if name.startswith("keep."))]
        for name in names:
            if values[name] != DEFAULTS[name]:
                why = (
                    f", which learns from {recipe.learns_from}. Set recipe.source=run, or leave it "
                    "out."
                )
                yield ignored(config, name, recipe.name, why)
        return
    for name in data.mix:
        if name not in MIXED:
            yield f"data.mix has no entry {name!r}. {nearest(name, MIXED)}"
    if data.train != DEFAULTS["data.train"] and not data.mix.get("other"):
        why = (
            ": answers come from data.runs. Say with data.mix.other how many of its rows are "
            "learned beside them, or leave it out."
        )
        yield ignored(config, "data.train", "recipe.source=run", why)
    if data.holdout_share:
        yield (
            "data.holdout_share would hold out prompts of which right answers are known, and "
            "accuracy on them would say little. Name held-out tasks in data.eval, or leave it out: "
            "then those of the earlier run are."
        )
