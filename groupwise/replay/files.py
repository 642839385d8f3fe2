"""A replay as files: replay.json, a page, a picture, and a folder a method for the viewer."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from groupwise import config as configuration
from groupwise.errors import RunError
from groupwise.methods.composition import Recipe
from groupwise.replay import tables
from groupwise.replay.replay import Replay, StepResult
from groupwise.replay.token_weights import MethodWeights
from groupwise.runfiles.files import to_line, to_page, write_atomic
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.rollouts import read, store, with_lists
from groupwise.watch.chart import Curve, Point, description, svg
from groupwise.watch.plots import DOTS, can_plot
from groupwise.watch.report import HEAD, STYLE, section, table, text

COLOURS = ("#0b62c4", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#7f7f7f", "#8c4bc9")
CURVES = (("cosine", "Cosine with the run"), ("norms", "Norm over the run's"))
LONGEST = 60  # characters of a folder's name
LABEL = 40  # of a legend: the picture is to have room for curves
MARKS = 5000  # of a scatter plot; more are not seen


class Output:
    """The folder of a replay's files; made, or cleared, before anything is computed."""

    def __init__(self, path: str | Path, replay: Replay) -> None:
        self.path, self.replay = Path(path), replay
        self.last: StepResult | None = None
        self.names = folder_names([method.name for method in replay.methods])
        run = replay.run.folder.path.resolve()
        if self.path.resolve() == run or (self.path / "config.toml").exists():
            raise RunError(
                f"--out {self.path} is a run folder, and a replay would be mixed up with it. "
                "Choose a folder of its own."
            )
        if self.path.is_dir() and any(self.path.iterdir()):
            self._clear()
        try:
            for at, method in enumerate(replay.methods):
                self._begin(RunFolder(self.folder(at)), method.recipe)
            write_atomic(self.path / "replay.json", to_page({"folders": self.names}))
        except OSError as error:
            raise RunError(f"Can't write to --out {self.path}: {error}.") from error

    def _clear(self) -> None:
        """Remove what an earlier replay left here, and nothing else."""
        try:
            names = json.loads((self.path / "replay.json").read_bytes())["folders"]
        except (OSError, ValueError, KeyError, TypeError):
            raise RunError(
                f"--out {self.path} holds something else than a replay. Choose a new folder."
            ) from None
        for place in (self.path / Path(name).name for name in names):
            if (place / "rollouts").is_dir() and not (place / "manifest.json").exists():
                shutil.rmtree(place)

    def folder(self, at: int) -> Path:
        return self.path / self.names[at]

    def _begin(self, folder: RunFolder, recipe: Recipe) -> None:
        run = self.replay.run
        folder.rollouts.mkdir(parents=True)
        config = replace(run.config, recipe=recipe)
        folder.write_config(configuration.text(config))
        saved = (run.folder.checkpoints / "latest", run.folder.path / "cold_start")
        place = next((p for p in saved if (p / "tokenizer.json").is_file()), None)
        for file in place.glob("tokenizer*") if place else ():  # the viewer reads tokens with it
            shutil.copyfile(file, folder.path / file.name)

    def add(self, seen: StepResult) -> None:
        """Write a step for the viewer: the recorded samples with each method's numbers."""
        self.last = seen
        recorded = read(seen.record.path)
        for at, method in enumerate(seen.methods):
            folder = RunFolder(self.folder(at))
            store(folder.rollout(seen.record.step), with_method(recorded, seen, method))
            line = {"step": seen.record.step, **dict(sorted(method.metrics.items()))}
            folder.add_metrics(to_line(line))

    def finish(self, found: Mapping[str, Any]) -> list[Path]:
        """Write the page and the pictures; return what was written."""
        made: dict[str, str | bytes] = {
            "replay.json": to_page({**found, "folders": self.names}),
            "replay.html": page(found),
        }
        if can_plot() and self.last is not None:
            made["replay.png"] = png(found, self.last)
        for name, content in made.items():
            write_atomic(self.path / name, content)
        return [self.path / name for name in made]


def folder_names(methods: Sequence[str]) -> list[str]:
    """Return names that a file system takes, each one once."""
    made: list[str] = []
    for method in methods:
        name = re.sub(r"[^\w.=+-]+", "_", method).strip("._")[:LONGEST]
        taken = sum(each == name or each.startswith(f"{name}__") for each in made)
        made.append(f"{name}__{taken + 1}" if taken else name)
    return made


def with_method(recorded: pa.Table, seen: StepResult, method: MethodWeights) -> pa.Table:
    """Return a rollout file's table with a method's numbers for its tokens, not the run's own."""
    place_N, length_N = seen.record.place_N, seen.record.length_N
    kept = set(method.batched.row_N.tolist())
    streams = {
        "advantage": method.advantage_NT,
        "coefficient": method.coefficient_NT,
        "ratio": method.ratio_NT,
        "clipped": method.clipped_NT,
        "weight": method.weight_NT,
    }
    columns = dict[str, list[Any]]()
    if method.target_NT is not None:
        streams["return"] = method.target_NT
    elif "return" in recorded.column_names:
        columns["return"] = [None] * recorded.num_rows  # the run's critic had it, and it has none
    for name, x_NT in streams.items():
        array, lists = x_NT.numpy(), list[Any]([None] * recorded.num_rows)
        for row, place in enumerate(place_N):
            if row in kept:
                lists[place] = array[row, : length_N[row]]
        columns[name] = lists
    used = [False] * recorded.num_rows
    for row in kept:
        used[place_N[row]] = True
    at = recorded.schema.get_field_index("used")
    made = recorded.set_column(at, "used", pa.array(used, type=pa.bool_()))
    return with_lists(made, columns)


# --- the page -----------------------------------------------------------------------------------


def page(found: Mapping[str, Any]) -> str:
    """Return replay.html, which holds all that it shows, without a script."""
    name = f"Replay of {found['run']}"
    parts = [
        f"<h1>{text(name)}</h1>",
        f"<p>{text(tables.scope(found))}</p>",
        section(
            "Methods on the recorded batches",
            table(*tables.methods(found)) + f"<p>{text(tables.LEGEND)}.</p>",
        ),
        section("Angles between methods", table(*tables.pairs(found))),
        section("Step by step", f'<div class="curves">{"".join(_figures(found))}</div>'),
        section("Rare tokens", table(*tables.rare(found, 60))),
        section("Recipes", table(*tables.recipes(found))),
        section("What this can't know", "".join(f"<p>{text(x)}</p>" for x in found["notes"])),
    ]
    return (
        f"{HEAD}<title>{text(name)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body><main>\n{chr(10).join(parts)}\n</main></body>\n</html>\n"
    )


def _points(found: Mapping[str, Any], at: int, key: str) -> list[Point]:
    values = [(step["step"], step["methods"][at].get(key)) for step in found["by_step"]]
    return [Point(step, value) for step, value in values if value is not None]


def _figures(found: Mapping[str, Any]) -> list[str]:
    made = []
    for at, method in enumerate(found["methods"]):
        for key, title in CURVES if at else ():
            curve = Curve(f"{method['name']}: {title.lower()}", _points(found, at, key))
            said = text(description(curve, curve.points))
            made.append(f"<figure><h3>{text(curve.title)}</h3>{svg(curve)}"
                        f"<figcaption>{said}</figcaption></figure>")  # fmt: skip
    return made


# --- the picture --------------------------------------------------------------------------------


def png(found: Mapping[str, Any], last: StepResult) -> bytes:
    """Draw cosines and norms over the steps, and one step's token weights beside the run's."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(12.0, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    for (key, title), place in zip(CURVES, axes, strict=False):
        for at, method in enumerate(found["methods"][1:], 1):
            points = _points(found, at, key)
            place.plot([p.step for p in points], [p.value for p in points], marker="o",
                       markersize=3, color=_colour(at), label=_label(method["name"]))  # fmt: skip
        place.set_title(title, fontsize=10)
        place.set_xlabel("step")
        place.xaxis.set_major_locator(MaxNLocator(integer=True))
    _scatter(axes[2], last)
    for place in axes:
        place.grid(alpha=0.25)
        place.spines[["top", "right"]].set_visible(False)
    if len(found["methods"]) > 1:
        axes[0].legend(fontsize=8, frameon=False)
    sheet = io.BytesIO()
    figure.savefig(sheet, format="png", dpi=DOTS, metadata={"Software": None})
    return sheet.getvalue()


def _label(name: str) -> str:
    return name if len(name) <= LABEL else f"{name[: LABEL - 1]}…"


def _colour(at: int) -> str:
    return COLOURS[(at - 1) % len(COLOURS)]


def _scatter(place: Any, last: StepResult) -> None:
    """Draw a mark for each token; crosses are clipped by the method."""
    mask_NT = last.record.mask_NT
    every = max(1, int(mask_NT.sum()) // MARKS)
    run = last.methods[0].weight_NT[mask_NT][::every].numpy()
    for at, method in enumerate(last.methods[1:], 1):
        mine = method.weight_NT[mask_NT][::every].numpy()
        clipped = method.clipped_NT[mask_NT][::every].numpy()
        for own, marker in ((~clipped, "."), (clipped, "x")):
            place.scatter(run[own], mine[own], s=14, marker=marker, color=_colour(at), alpha=0.6)
    place.axline((0.0, 0.0), slope=1.0, color="#888888", linewidth=0.8)
    place.set_title(f"Weights of tokens, step {last.record.step} (x: clipped)", fontsize=10)
    place.ticklabel_format(scilimits=(-2, 3))
    place.set_xlabel("in the run")
    place.set_ylabel("in the method")


def listed(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths)
