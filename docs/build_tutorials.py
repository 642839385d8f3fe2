"""Tutorials: the page is the source; its script and its notebook are made from it.

    python docs/build_tutorials.py                  # write all scripts and notebooks
    python docs/build_tutorials.py --check          # only say whether they are current
    python docs/build_tutorials.py --run own_task   # run it, write its output into the page

In a page, a block of Python or TOML whose first line is a file's name (`# own.toml`) is that file;
other Python is run; a `bash` block holds commands of groupwise. A `text` block behind one of these
is what it printed. `<!-- output: 4 first, 12 last -->` before it shortens that; with `; varies` the
words may be others on another machine. `<!-- from: runs/own/plots/entropy.png -->` before a picture
says which file of the run it is, `<!-- page: own /step/3 -->` which page of the viewer.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import fill
from typing import Any

FOLDER = Path(__file__).resolve().parent / "tutorials"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# ([\w/]+\.(?:py|toml))\n")
SHOWN = re.compile(r"<!-- output: (\d+) first, (\d+) last(; varies)? -->")
PICTURE = re.compile(r"<!-- (from|page): (\S+) ?(\S*) -->\n!\[[^\]]*\]\(([^)\s]+)\)")
WAITING = re.compile(r"[a-z].*, \d+:\d\d(?:[:,].*)?")  # "cold start 29 steps, 0:11"
WIDTH, LARGEST = 100, 60_000  # characters of a line of output, bytes of a picture


@dataclass(frozen=True)
class Part:
    """A piece of a page: words, or a block with its language."""

    kind: str
    text: str
    file: str = ""  # that the block is written to

    @property
    def runs(self) -> bool:
        return bool(self.file) or self.kind in ("python", "bash")


def pages() -> list[Path]:
    return sorted(path for path in FOLDER.glob("*.md") if path.name != "index.md")


def parts(page: str) -> list[Part]:
    """Return all pieces of a page in order; `text_of` puts them together again."""
    found, end = [], 0
    for block in FENCE.finditer(page):
        found.append(Part("words", page[end : block.start()]))
        kind, text = block.groups()
        named = NAMED.match(text) if kind in ("python", "toml") else None
        found.append(Part(kind, text, named[1] if named else ""))
        end = block.end()
    return [*found, Part("words", page[end:])]


def text_of(pieces: Iterable[Part]) -> str:
    return "".join(
        piece.text if piece.kind == "words" else f"```{piece.kind}\n{piece.text}```\n"
        for piece in pieces
    )


def outputs(pieces: list[Part]) -> Iterator[tuple[int, int, re.Match[str] | None]]:
    """Yield, for every block with an output behind it: its place, the output's, how it is shown."""
    for at in range(len(pieces) - 2):
        words, output = pieces[at + 1 : at + 3]
        if pieces[at].runs and words.kind == "words" and output.kind == "text":
            shown = SHOWN.fullmatch(words.text.strip())
            if shown or not words.text.strip():
                yield at, at + 2, shown


# --- script and notebook ----------------------------------------------------------------------

HEADER = '''"""{title}. Made of {name}.md; run it in an empty folder."""

import shlex
import subprocess
import sys
from pathlib import Path


def groupwise(line: str) -> None:
    """Run a command and show it, as a shell would."""
    print(f"$ groupwise {{line}}", flush=True)
    subprocess.run([sys.executable, "-m", "groupwise", *shlex.split(line)], check=True)
'''


def script(name: str, pieces: list[Part]) -> str:
    """Return the tutorial as Python, in cells that editors know by their `# %%`."""
    cells = [HEADER.format(title=title(pieces), name=name)]
    for piece in told(pieces):
        if piece.kind == "words":
            lines = [f"# {line}".rstrip() for line in broken(piece.text.strip(), 97)]
            cells.append("\n".join(["# %% [markdown]", *lines]) + "\n")
        elif piece.file:
            write = f"Path(\"{piece.file}\").write_text(\n    r'''\n{piece.text}'''.lstrip()\n)\n"
            cells.append(f"# %%\n{write}")
        elif piece.kind == "python":
            cells.append(f"# %%\n{piece.text}")
        else:
            lines = [f"groupwise({_quoted(line)})" for line in commands(piece.text)]
            cells.append("\n".join(["# %%", *lines]) + "\n")
    return "\n".join(cells)


def notebook(pieces: list[Part]) -> str:
    """Return the tutorial as a notebook of Jupyter, with the outputs of the page."""
    printed = {pieces[at].text: pieces[output].text for at, output, _ in outputs(pieces)}
    cells: list[dict[str, Any]] = []
    for number, piece in enumerate(told(pieces)):
        cell: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}}
        if piece.kind == "words":
            cells.append(cell | {"cell_type": "markdown", "source": _lines(piece.text.strip())})
            continue
        source = piece.text.rstrip()
        if piece.file:
            source = f"%%writefile {piece.file}\n{source}"
        elif piece.kind == "bash":
            source = "\n".join(f"!groupwise {line}" for line in commands(piece.text))
        said = _lines(printed.get(piece.text, ""))
        stream = [{"name": "stdout", "output_type": "stream", "text": said}] if said else []
        code = {"cell_type": "code", "execution_count": None, "outputs": stream}
        cells.append(cell | code | {"source": _lines(source)})
    language = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {
        "cells": cells,
        "metadata": {"kernelspec": language, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def told(pieces: list[Part]) -> list[Part]:
    """Return words and blocks that run; other blocks are words, and outputs are left out."""
    printed = {output for _, output, _ in outputs(pieces)}
    found: list[Part] = []
    for at, piece in enumerate(pieces):
        if at in printed:
            continue
        if not piece.runs:
            text = piece.text if piece.kind == "words" else text_of([piece])
            text = re.sub(r"<!--.*?-->\n?", "", text)
            if found and found[-1].kind == "words":
                found[-1] = replace(found[-1], text=found[-1].text + text)
            elif text.strip():
                found.append(Part("words", text))
        else:
            found.append(piece)
    return [piece for piece in found if piece.text.strip()]


def title(pieces: list[Part]) -> str:
    return pieces[0].text.partition("\n")[0].removeprefix("# ")


def commands(text: str) -> list[str]:
    """Return the commands of a bash block, without `groupwise` and comments."""
    lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    assert all(line[0] == "groupwise" for line in lines if line), text
    return [shlex.join(line[1:]) for line in lines if line]


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _quoted(line: str) -> str:
    return f'"{line}"' if '"' not in line and "\\" not in line else repr(line)


# --- running ----------------------------------------------------------------------------------


@dataclass
class Session:
    """A tutorial under way, in the folder that it is begun in: files, names, what was printed."""

    known: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})

    def do(self, piece: Part) -> str:
        """Do what a block says and return what it printed. A command that fails raises."""
        from groupwise.cli import main

        if piece.file:
            Path(piece.file).write_text(piece.text, "utf-8")
            return ""
        said = io.StringIO()
        with redirect_stdout(said):
            if piece.kind == "python":
                exec(compile(piece.text, "a block of the page", "exec"), self.known)
            for line in commands(piece.text) if piece.kind == "bash" else ():
                if status := main(shlex.split(line)):
                    raise RuntimeError(f"groupwise {line} ended with {status}:\n{said.getvalue()}")
        return said.getvalue()


def broken(text: str, width: int) -> list[str]:
    """Return the lines of a text, long ones broken, but for those of tables."""
    lines: list[str] = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip(" -"))]
        if "  " in line.strip() or line.startswith("|"):
            lines.append(line.rstrip())
        else:
            rest = " " * len(indent)
            lines += fill(line, width, subsequent_indent=rest, break_on_hyphens=False,
                          break_long_words=False).splitlines() or [""]  # fmt: skip
    return lines


def shortened(text: str, shown: re.Match[str] | None) -> str:
    """Return the lines to show, with `...` for those that are left out.

    What was under way for how long is not shown: it depends on how busy the machine was.
    """
    said = [line for line in text.strip("\n").splitlines() if not WAITING.fullmatch(line)]
    lines = broken("\n".join(said), WIDTH)
    if shown and len(lines) > int(shown[1]) + int(shown[2]):
        lines = [*lines[: int(shown[1])], "...", *lines[len(lines) - int(shown[2]) :]]
        lines = lines[lines[0] == "..." : len(lines) - (lines[-1] == "...")]
    return "\n".join(lines).rstrip("\n") + "\n"


def run(page: Path) -> None:
    """Run a tutorial in a folder of its own, and write its output and pictures into the page."""
    pieces = parts(page.read_text("utf-8"))
    place = {at: (output, shown) for at, output, shown in outputs(pieces)}
    session = Session()
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for at, piece in enumerate(pieces):
            if not piece.runs:
                continue
            said = session.do(piece).replace(f"{Path.cwd()}/", "")
            print(said, end="", flush=True)
            if at in place:
                output, shown = place[at]
                pieces[output] = Part("text", shortened(said, shown))
        for kind, what, view, file in PICTURE.findall(page.read_text("utf-8")):
            make = take_page if kind == "page" else copy_picture
            make(what, view, page.parent / file)
    page.write_text(text_of(pieces), "utf-8")


def copy_picture(what: str, _: str, file: Path) -> None:
    """Copy a picture of the run, with as few colours as keep it small."""
    from PIL import Image

    if file.suffix == ".svg":
        shutil.copy(what, file)
    else:
        Image.open(what).convert("RGB").quantize(64).save(file, optimize=True)
    assert file.stat().st_size < LARGEST, f"{file}: {file.stat().st_size:,} bytes"


def take_page(run_name: str, view: str, file: Path) -> None:
    """Take a picture of a page of the viewer, of a run in runs/."""
    import threading

    from PIL import Image
    from playwright.sync_api import sync_playwright

    from groupwise.view.runs import Runs
    from groupwise.view.server import Viewer

    with Viewer(Runs(["runs"]), ("127.0.0.1", 0)) as server, sync_playwright() as play:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        tab = browser.new_page(viewport={"width": 960, "height": 640}, color_scheme="light")
        tab.goto(f"http://127.0.0.1:{server.server_address[1]}/runs/{run_name}{view}")
        tab.wait_for_timeout(6_000)  # its charts and colours are there
        tab.evaluate("scrollTo(0, 0)")
        picture = Image.open(io.BytesIO(tab.screenshot())).convert("RGB").quantize(48)
        picture.save(file, optimize=True)
        browser.close()
        server.shutdown()
    assert file.stat().st_size < LARGEST, f"{file}: {file.stat().st_size:,} bytes"


# --- the command ------------------------------------------------------------------------------


def made(page: Path) -> dict[Path, str]:
    """Return what follows from a page: its script and its notebook."""
    pieces = parts(page.read_text("utf-8"))
    return {
        page.with_suffix(".py"): script(page.stem, pieces),
        page.with_suffix(".ipynb"): notebook(pieces),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only say whether all is current")
    parser.add_argument("--run", nargs="*", metavar="NAME", help="tutorials; none named: all")
    asked = parser.parse_args()
    if asked.run is not None:
        os.environ.setdefault("COLUMNS", str(WIDTH))
        for page in pages():
            if not asked.run or page.stem in asked.run:
                run(page)
    current = True
    for page in pages():
        for path, text in made(page).items():
            if not asked.check:
                path.write_text(text, "utf-8")
            elif not path.is_file() or path.read_text("utf-8") != text:
                print(f"{path.name} is not what {page.name} says: run `make docs`.")
                current = False
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())
