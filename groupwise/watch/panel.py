"""The live panel of a run: how a step's words stand on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


def panel(
    title: str, signs: Mapping[str, str], lines: Sequence[str], done: int, total: int
) -> Panel:
    """Return signs two by two, the lines that are not empty, and a bar of how far it is."""
    table = Table.grid(padding=(0, 3, 0, 0))
    pairs = [(Text(name, style="dim"), Text(value, style="bold")) for name, value in signs.items()]
    for at in range(0, len(pairs), 2):
        table.add_row(*(cell for pair in pairs[at : at + 2] for cell in pair))
    words = Text("\n".join(line for line in lines if line), no_wrap=True, overflow="ellipsis")
    body = Group(table, words, ProgressBar(total=max(total, 1), completed=done))
    return Panel(body, title=title, title_align="left", box=box.ROUNDED)
