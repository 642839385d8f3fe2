"""The drawn pictures of the explanation pages, from the numbers of those pages.

    python docs/site/pictures.py

Numbers of the example are those that its program prints (docs/what_happens.md, which runs here);
those of sampler and learner are of docs/performance.md. Colours follow the reader's system.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from palette import palettes

DOCS = Path(__file__).resolve().parents[1]
WIDTH = 480  # so that words can be read on a phone
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif'
USED = ("ink", "soft", "card", "sunk", "edge", "accent", "tint", "good", "good-tint", "bad",
        "bad-tint", "second", "warn-tint", "field")  # fmt: skip
# Mean difference of log-probabilities: a peer's, groupwise's and its exact mode's.
MISMATCH = {"SmolLM2-135M": (0.038, 0.017, 0.0), "Qwen2.5-Coder-1.5B": (0.005, 0.0025, 0.0)}
WHOSE = ("TRL with vLLM", "groupwise", "groupwise, exact mode")


def example() -> dict[str, Any]:
    """Return what the program of docs/what_happens.md computes."""
    page = (DOCS / "what_happens.md").read_text("utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(program, found)
    return found


# --- drawing ------------------------------------------------------------------------------------


def svg(height: int, about: str, parts: Sequence[str]) -> str:
    """Return a picture with its description, on a card of its own."""
    colours = [";".join(f"--{name}:{palette[name]}" for name in USED) for palette in palettes()]
    style = (
        f":root{{{colours[0]};color-scheme:light dark}}"
        f"@media (prefers-color-scheme: dark){{:root{{{colours[1]}}}}}"
        f"text{{font:15px {FONT};fill:var(--ink)}}.small{{font-size:13px;fill:var(--soft)}}"
        ".head{font-weight:650}.mid{text-anchor:middle}.end{text-anchor:end}"
        ".mono{font-family:ui-monospace,monospace}"
        ".good{fill:var(--good)}.bad{fill:var(--bad)}.accent{fill:var(--accent)}"
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">',
        f"<title>{escape(about)}</title>",
        f"<style>{style}</style>",
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M0 0 8 4 0 8z" fill="var(--soft)"/></marker>',
        box(0.5, 0.5, WIDTH - 1, height - 1, "card"),
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def box(x: float, y: float, w: float, h: float, fill: str = "sunk", edge: str = "edge") -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="9" '
        f'fill="var(--{fill})" stroke="var(--{edge})"/>'
    )


def bar(x: float, y: float, w: float, h: float, fill: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="2" '
        f'fill="var(--{fill})"/>'
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    of = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{of}>{escape(words)}</text>'


def arrow(path: str) -> str:
    look = 'fill="none" stroke="var(--soft)" stroke-width="1.6" marker-end="url(#tip)"'
    return f'<path d="{path}" {look}/>'


def line(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:g} {y:g} {to_x:g} {to_y:g}" stroke="var(--soft)" stroke-dasharray="3 3"/>'


def signed(value: float) -> str:
    return f"{value:+.4g}".replace("-", "−")


# --- the pictures -------------------------------------------------------------------------------


def step(found: dict[str, Any]) -> str:
    """Draw one training step, with the example in every box."""
    answers, rewards = [found["answers"][i] for i in found["said"]], found["rewards"].tolist()

    def beside(values: list[float], words: list[str]) -> list[tuple[str, str]]:
        rows = zip(answers, values, words, strict=True)
        return [
            (f"{answer}  →  {word}", "mono good" if value > 0 else "mono bad")
            for answer, value, word in rows
        ]

    advantages = found["advantage_N"].tolist()
    changed = ["new weights:", "“21” is a little", "likelier than before"]
    summed = ["each token, times its", "advantage and weight;", "its gradient says where"]
    stations: list[tuple[str, list[tuple[str, str]]]] = [
        ("1  Prompt", [("7 + 5 + 9 = ?", "mono")]),
        ("2  Group of answers", [(answer, "mono") for answer in answers]),
        ("3  Grades", beside(rewards, [f"{reward:g}" for reward in rewards])),
        ("4  Advantages", beside(advantages, [signed(value) for value in advantages])),
        ("5  Loss", [(words, "") for words in [*summed, "every weight should go"]]),
        ("6  Update", [(words, "") for words in changed]),
    ]
    places = [(0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2)]  # from left to right and back
    parts = []
    for (title, rows), (column, row) in zip(stations, places, strict=True):
        x, y = 20 + 235 * column, 20 + 180 * row
        parts += [box(x, y, 205, 150), text(x + 14, y + 26, title, "head accent")]
        parts += [
            text(x + 14, y + 54 + 24 * i, words, kind) for i, (words, kind) in enumerate(rows)
        ]
    parts += [arrow("M227 95h26"), arrow("M357 172v26"), arrow("M253 275h-26")]
    parts += [arrow("M122 352v26"), arrow("M227 455h26")]
    parts += [arrow("M357 532v22h-347v-458h8")]
    about = (
        "One training step: a prompt, a group of four answers, their grades 0, 1, 0, 0, "
        "advantages, loss, update, and on to the next prompt"
    )
    return svg(570, about, parts)


def advantages(found: dict[str, Any]) -> str:
    """Draw rewards beside their mean, and what is left of them as advantages."""
    answers, said, rewards = found["answers"], found["said"].tolist(), found["rewards"].tolist()
    values, mean = found["advantage_N"].tolist(), sum(rewards) / len(rewards)
    parts = [text(20, 34, "grades", "head"), text(250, 34, "advantages", "head")]
    base, unit = 200.0, 124.0
    for i, (each, reward) in enumerate(zip(said, rewards, strict=True)):
        x, height = 24 + 52 * i, max(unit * reward, 2)
        parts += [bar(x, base - height, 36, height, "accent")]
        parts += [text(x + 18, base - height - 7, f"{reward:g}", "mid")]
        parts += [text(x + 18, 262, answers[each], "mid mono")]
    parts += [line(20, base - unit * mean, 225, base - unit * mean)]
    parts += [text(225, base - unit * mean - 6, f"their mean: {mean:g}", "small end")]
    zero, scale = 165.0, 62.0
    for i, (each, value) in enumerate(zip(said, values, strict=True)):
        x, height, better = 256 + 52 * i, abs(value) * scale, value > 0
        top = zero - height if better else zero
        parts += [bar(x, top, 36, height, "good" if better else "bad")]
        parts += [text(x + 18, top - 8 if better else top + height + 20, signed(value), "mid")]
        parts += [text(x + 18, 262, answers[each], "mid mono")]
    parts += [line(250, zero, 460, zero), text(460, zero - 6, "as the mean", "small end")]
    listed = ", ".join(map(signed, values))
    return svg(285, f"Four grades with their mean {mean:g}, and the advantages {listed}", parts)


def update(found: dict[str, Any]) -> str:
    """Draw the probabilities of all answers before the update and after it."""
    parts = [text(20, 34, "how likely is each answer, in %", "head")]
    parts += [bar(290, 22, 14, 14, "field"), text(309, 34, "before", "small")]
    parts += [bar(365, 22, 14, 14, "accent"), text(384, 34, "afterwards", "small")]
    before, after = found["before"].tolist(), found["after"].tolist()
    for i, (answer, old, new) in enumerate(zip(found["answers"], before, after, strict=True)):
        x, base, unit = 24 + 114 * i, 235.0, 400.0
        for at, value, fill in ((x, old, "field"), (x + 48, new, "accent")):
            parts += [bar(at, base - unit * value, 42, unit * value, fill)]
            parts += [text(at + 21, base - unit * value - 7, f"{100 * value:.1f}", "mid small")]
        parts += [text(x + 45, 262, answer, "mid mono")]
    about = "Probabilities before and after the update: " + ", ".join(
        f"{answer} {100 * old:.1f} to {100 * new:.1f} %"
        for answer, old, new in zip(found["answers"], before, after, strict=True)
    )
    return svg(285, about, parts)


def one_model() -> str:
    """Draw two programs with two sets of weights beside one model that does both."""
    parts = [text(20, 36, "two programs", "head"), text(270, 36, "one model", "head")]
    for x, title, what in ((20, "sampler", "writes answers"), (135, "learner", "learns")):
        parts += [box(x, 60, 105, 130), text(x + 52, 88, title, "mid head accent")]
        parts += [text(x + 52, 110, what, "mid small"), box(x + 12, 130, 81, 46, "card")]
        parts += [text(x + 52, 158, "weights", "mid")]
    parts += [arrow("M187 200c0 34 -115 34 -115 4")]
    parts += [text(130, 250, "copied after every update", "mid small")]
    parts += [text(130, 276, "two codes, two sets of weights", "mid small bad")]
    parts += [box(270, 60, 190, 130), text(365, 88, "sampler and learner", "mid head accent")]
    parts += [text(365, 110, "the same forward pass", "mid small"), box(320, 130, 90, 46, "card")]
    parts += [text(365, 158, "weights", "mid"), text(365, 250, "nothing is copied", "mid small")]
    parts += [text(365, 276, "one code, one set of weights", "mid small good")]
    about = "Two programs with weights of their own, beside one model that samples and learns"
    return svg(295, about, parts)


def mismatch() -> str:
    """Draw how far sampler and learner differ, as measured."""
    parts, y = [text(20, 34, "mean difference of log-probabilities", "head")], 68.0
    about = []
    for model, values in MISMATCH.items():
        parts += [text(20, y, model, "head accent")]
        for whose, value, fill in zip(WHOSE, values, ("second", "accent", "good"), strict=True):
            y += 28
            parts += [text(20, y, whose, "small"), bar(190, y - 13, max(value * 5800, 2), 17, fill)]
            parts += [text(200 + value * 5800, y, f"{value:g}")]
            about += [f"{model}, {whose}: {value:g}"]
        y += 42
    return svg(300, "; ".join(about), parts)


def pictures() -> dict[str, str]:
    """Return every picture by the name of its file."""
    found = example()
    return {
        "step.svg": step(found),
        "advantages.svg": advantages(found),
        "update.svg": update(found),
        "one_model.svg": one_model(),
        "mismatch.svg": mismatch(),
    }


if __name__ == "__main__":
    for name, picture in pictures().items():
        (DOCS / "pictures" / name).write_text(picture, "utf-8")
        print(f"wrote docs/pictures/{name}")
