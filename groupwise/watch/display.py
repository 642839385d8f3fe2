"""The display of a run: a live panel on a terminal, else one plain line a step.

The loss is not shown: on-policy it is near 0 whether or not the model learns.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from groupwise.common.callers import VIEWER_PORT
from groupwise.common.progress import Watcher, clock
from groupwise.runfiles.files import storable
from groupwise.runfiles.parts import part_changes
from groupwise.watch.panel import panel
from groupwise.watch.vital_signs import (
    TRAINED,
    Metrics,
    bottleneck,
    of_peak,
    percent,
    phases,
    training_reward,
    vital_signs,
)

LOSS_NOTE = (
    "The loss is near 0 whether or not the model learns, as advantages are centred: it is not "
    "shown. Watch {measures}."
)
STOPPING = (
    "stopping after this step, which is saved. Once more stops now: then the steps since the last "
    "checkpoint are done again, and nothing else is lost."
)
LONGEST = 200  # characters of a sample's prompt and of its text in the panel
RECENT = 20  # steps that the time left is estimated from
BARS = "▁▂▃▄▅▆▇█"


class _Console(Console):
    """A console that survives when nobody reads its output; rich would end the program."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Display:
    """`start`, `step` for each metrics line, `finish`. Closed early by `with` or `close`."""

    def __init__(self, stream: TextIO | None = None, live: bool | None = None) -> None:
        self._stream = stream or sys.stdout
        self._console = _Console(file=self._stream, highlight=False, markup=False)
        self._panel = self._console.is_terminal if live is None else live
        self._live: Live | None = None
        self._metrics: Metrics = {}  # of the last step, which the panel shows
        self._at = 0.0  # when they came
        self._sample, self._address = "", ""  # lines of the panel
        self._muted = False
        self._writing = threading.RLock()  # what is under way is shown by a thread of its own
        self._under_way = Watcher(self._status, live=self._panel)
        self._step, self._total = 0, 0
        self._rewards: list[float] = []
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._timed = 0  # steps of this process
        self._held_out: tuple[int, float] | None = None
        self._named: set[str] = set()  # phases that were said to take the longest

    def start(
        self,
        header_lines: Sequence[str],
        total_steps: int,
        from_step: int = 0,
        explain_loss: bool = True,
        held_out: bool = True,
    ) -> None:
        """Say what will run; on a new run also what not to worry about. `held_out`: whether there
        are tasks to judge it by."""
        self._step, self._total = from_step, total_steps
        for line in header_lines:
            self._print(line)
        if from_step == 0 and explain_loss:
            measures = "held-out accuracy and reward" if held_out else "the training reward"
            self._print(LOSS_NOTE.format(measures=measures))

    def place(self, path: str | os.PathLike[str]) -> None:
        """Say in the panel how the run can be seen meanwhile."""
        command = f"groupwise view {shlex.quote(os.fspath(path))}"
        self._address = visible(f"see it: {command}, then http://127.0.0.1:{VIEWER_PORT}")

    def sample(self, prompt: str, text: str, reward: float | None) -> None:
        """Show the latest sample in the panel, in one line."""
        words = " ".join(f"{prompt[-LONGEST:]} → {text[:LONGEST]}".split())
        graded = "" if reward is None else f" (reward {reward:.3g})"
        self._sample = f"sample{graded}: {visible(words)}"

    def watching(self) -> AbstractContextManager[None]:
        """Show what is under way meanwhile: phase, progress and time."""
        return self._under_way.watching()

    def doing(self) -> str:
        """Return what is under way, in words."""
        return self._under_way.doing()

    def announce_stop(self, asked: threading.Event) -> None:
        """Answer a request to stop at once."""
        self._under_way.announce(asked, lambda: self.note(STOPPING))

    def expect(self, total_steps: int) -> None:
        """Set how many steps there will be, where a budget ends the run and that changes on the
        way.
        """
        self._total = total_steps

    def step(self, metrics: Metrics) -> None:
        """Show one step's metrics; the step after the last, unless they name another."""
        self._step = int(metrics.get("step", self._step + 1))
        self._remember(metrics)
        if self._panel:
            self._metrics, self._at = metrics, time.monotonic()
            self._under_way.heard()
            self._draw(self._render())
        else:
            self._print("  ".join(f"{name} {value}".strip() for name, value in self._line(metrics)))
        self._name_bottleneck(metrics)

    def _name_bottleneck(self, metrics: Metrics) -> None:
        """Name the slowest phase in words, each once; not of the first step, which warms up."""
        phase = bottleneck(metrics)
        if self._panel or self._timed < 2 or phase in ("", *self._named):
            return
        self._named.add(phase)
        self._print(f"bottleneck: {metrics['time/bottleneck']}")

    def row(self, title: str, pieces: Sequence[tuple[str, bool]]) -> None:
        """Show a row in pieces: what is learned in a colour, or in brackets without colours."""
        colours = self._panel and self._console.color_system is not None
        if not colours:
            shown = [f"[[{text}]]" if learned else text for text, learned in pieces]
            self._print(f"{title} (learned in [[...]]):\n{''.join(shown)}")
            return
        made = Text(f"{title} (learned in colour):\n")
        for text, learned in pieces:
            made.append(visible(text), style="bold green" if learned else "dim")
        self._under_way.heard()
        with self._writing:
            self._show(lambda: self._console.print(made, soft_wrap=True))

    def note(self, text: str) -> None:
        """Say something between the lines of steps."""
        self._print(text)

    def warn(self, text: str) -> None:
        """Say what is likely to be wrong, between the lines of steps."""
        self._print(f"warning: {text}", style="yellow")

    def finish(
        self,
        summary: Mapping[str, Any],
        path: str | os.PathLike[str],
        part: str = "",
        *,
        held_out: bool = True,
    ) -> None:
        """Show the run in a few numbers, samples before and after, and what can be done with it
        now; `part` is what a model that scores is called in a reward.
        """
        self.close()
        for line in (*summary_lines(summary, held_out), *next_lines(path, part, held_out)):
            self._print(line)

    def close(self) -> None:
        """Leave the last panel on the screen and give the terminal back."""
        self._under_way.close()
        if self._live is not None:
            self._show(self._live.stop)
            self._live = None

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _status(self, line: str) -> None:
        """Show what is under way: below the panel, or as a line of its own."""
        if line and self._total:
            line = f"step {min(self._step + 1, self._total)}/{self._total}: {line}"
        if not self._panel:
            if line:
                self._write(line)
            return
        below = Text(visible(line), style="dim", no_wrap=True, overflow="ellipsis")
        self._draw(self._render(visible(line)) if self._metrics else below)

    def _draw(self, what: RenderableType) -> None:
        """Draw in the place of what was drawn before."""
        with self._writing:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False)
                self._show(self._live.start)
            live = self._live
            self._show(lambda: live.update(what, refresh=True))

    def _print(self, line: str, style: str = "") -> None:
        self._under_way.heard()
        self._write(line, style)

    def _write(self, line: str, style: str = "") -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        line = visible(line).encode(encoding, "replace").decode(encoding)
        with self._writing:
            if self._panel:
                self._show(lambda: self._console.print(Text(line, style=style), soft_wrap=True))
            else:
                self._show(lambda: print(line, file=self._stream, flush=True))

    def _show(self, action: Callable[[], object]) -> None:
        """Print, unless whoever read the output has gone: the run goes on, and its files have it
        all.
        """
        if self._muted:
            return
        try:
            action()
        except OSError:
            self._muted = True

    def _remember(self, metrics: Metrics) -> None:
        reward, seconds = training_reward(metrics), metrics.get("time/step")
        if reward is not None:
            self._rewards.append(reward)
        if seconds is not None:
            self._timed += 1
            if self._timed == 2:
                self._seconds.clear()  # the first step warms up, and is no measure of the others
            self._seconds.append(seconds)
        accuracy = metrics.get("eval/accuracy")
        if accuracy is not None:
            self._held_out = (self._step, accuracy)

    def _left(self) -> str:
        """Return the time left, from the second step on."""
        if self._timed < 2:
            return ""
        return clock((self._total - self._step) * sum(self._seconds) / len(self._seconds))

    def _held_out_text(self) -> str:
        if self._held_out is None:
            return ""
        step, accuracy = self._held_out
        stale = "" if step == self._step else f" (step {step})"
        return percent(accuracy, 1) + stale

    def _line(self, metrics: Metrics) -> list[tuple[str, str]]:
        """Return (name, value) of all that a step's line says, in order."""
        found = [("step", f"{self._step}/{self._total}"), *vital_signs(metrics)]
        found.insert(2, ("held-out accuracy", self._held_out_text()))
        found += [
            (name, f"{seconds:.1f} s{of_peak(name, metrics)}") for name, seconds in phases(metrics)
        ]
        found.append(("bottleneck", bottleneck(metrics)))
        found.append(("ETA", self._left()))
        return [(name, value) for name, value in found if value]

    def _render(self, doing: str = "") -> Panel:
        """Return the panel of the last step; `doing` is what is under way since."""
        signs = dict(self._line(self._metrics))
        title, left = signs.pop("step"), signs.pop("ETA", "after the second step")
        speed = signs.pop("", "")
        split = " · ".join(f"{name} {signs.pop(name)}" for name, _ in phases(self._metrics))
        slow = "bottleneck: " + str(self._metrics.get("time/bottleneck"))
        ran = self._metrics.get("time/run")
        since = time.monotonic() - self._at
        lines = [
            f"{speed}   {split}".strip(),
            slow if signs.pop("bottleneck", "") else "",
            ("" if ran is None else f"elapsed {clock(ran + since)}   ") + f"ETA {left}",
            self._sample,
            f"now: {doing}" if doing else "",
            self._address,
        ]
        if len(self._rewards) > 1 and self._console.encoding.lower().startswith("utf"):
            lines.insert(0, f"{TRAINED} {sparkline(self._rewards, 48)}")
        return panel(f"step {title}", signs, lines, self._step, self._total)


# --- what the numbers say ---------------------------------------------------------------------


def summary_lines(summary: Mapping[str, Any], held_out: bool = True) -> list[str]:
    """Return summary.json for people; `held_out`: whether there were tasks to judge the run by."""

    def change(name: str, form: Callable[[float], str]) -> str:
        sides = [summary.get(f"{name}_{side}") for side in ("before", "after")]
        return " -> ".join("n/a" if x is None else form(x) for x in sides)

    lines = []
    for sample in summary.get("samples", ()):
        lines += ["", f"prompt  {sample['prompt']}"]
        if sample.get("answer") is not None:
            lines.append(f"answer  {sample['answer']}")
        for side in ("before", "after"):
            right = {True: " (correct)", False: " (wrong)"}.get(sample.get(f"correct_{side}"), "")
            lines.append(f"{side:<7} {sample[side]}{right}")
    likely = [
        f"{title} {change(name, form)}"
        for title, name, form in (
            ("held-out nll", "nll", lambda x: f"{x:.3f}"),
            ("held-out token accuracy", "token_accuracy", lambda x: percent(x, 1)),
        )
        if f"{name}_after" in summary
    ]
    judged = [f"held-out accuracy {change('accuracy', lambda x: percent(x, 1))}"]
    if any(summary.get(f"reward_{side}") is not None for side in ("before", "after")):
        judged.append(f"held-out reward {change('reward', lambda x: f'{x:.3f}')}")
    judged += [f"  {change}" for change in part_changes(summary)]
    ended = f"{summary['steps']} steps in {clock(summary['seconds'])}"
    if not held_out:
        return [*lines, "", f"{ended}; no task was held out to judge it by (data.eval)"]
    if likely and summary.get("accuracy_after") is None and summary.get("reward_after") is None:
        judged = []  # rows that nobody can grade
    return [*lines, "", *likely, *judged, ended]


def next_lines(path: str | os.PathLike[str], part: str = "", held_out: bool = True) -> list[str]:
    """Return commands that continue from a finished run, as they can be typed."""
    run = shlex.quote(os.fspath(path))
    commands = {
        f"groupwise view {run}": "see it, down to every token",
        f"groupwise diagnose {run}": "what is wrong with it, if anything",
        **({f"groupwise eval {run}": "its best checkpoint, with intervals"} if held_out else {}),
        f"groupwise export {run} FOLDER": "a plain model for other programs",
    }
    if part:  # it answers no tasks, and is a reward of runs that do
        commands.pop(f"groupwise eval {run}", None)
        commands[f'groupwise train CONFIG "reward.parts.{part}=1"'] = "which is a reward then"
    width = max(map(len, commands))
    return ["next:", *(f"  {command:<{width}}  {what}" for command, what in commands.items())]


# --- how numbers look -------------------------------------------------------------------------


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the values as bars; means of neighbours where there are more than fit."""
    if len(values) > width:
        edges = [len(values) * i // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


# Control characters, and those that turn the direction of the text around them.
_UNSEEN = [*range(32), *range(127, 160), 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F),
           *range(0x2066, 0x206A)]  # fmt: skip
_SPELLED = {code: ascii(chr(code))[1:-1] for code in _UNSEEN if chr(code) not in "\n\t"}


def visible(text: str) -> str:
    """Spell out control characters: a completion must not steer the terminal or the page."""
    return storable(text).translate(_SPELLED)
