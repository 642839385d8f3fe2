"""Contrast of the palette in both themes, as WCAG 2.2 counts it (AA)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from groupwise import view

Colour = tuple[float, float, float]
STYLE = (Path(view.__file__).parent / "assets/style.css").read_text("utf-8")
TEXT = [
    *((ink, ground) for ink in ("ink", "soft", "accent") for ground in ("page", "card", "sunk")),
    *((level, f"{level}-tint") for level in ("good", "warn", "bad")),
    *((level, "card") for level in ("good", "bad")),
    *((f"run-{number}", "card") for number in range(8)),
    ("bad", "sunk"),  # a tag
    ("ink", "mark"),
    ("card", "accent"),  # the main button
]
SHAPES = [("field", "card"), ("field", "page"), ("good-fill", "card"), ("bad-fill", "card"),
          ("accent", "edge")]  # fmt: skip
FULL = 0.85  # of a token's colour where it is full, as tokens.js mixes it


def palette(theme: str) -> dict[str, Colour]:
    light, dark = re.findall(r":root \{([^}]*)\}", STYLE)
    found = dict(
        re.findall(r"--([\w-]+): #([0-9a-f]{6})", light + (dark if theme == "dark" else ""))
    )
    return {name: tuple(int(x[at : at + 2], 16) for at in (0, 2, 4)) for name, x in found.items()}


def brightness(colour: Colour) -> float:
    shares = [x / 255 for x in colour]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]
    return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: Colour, two: Colour) -> float:
    low, high = sorted(brightness(x) + 0.05 for x in (one, two))
    return high / low


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_and_shapes_can_be_told_from_what_is_behind_them(theme: str) -> None:
    colours = palette(theme)
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    low = [(*pair, contrast(*(colours[x] for x in pair))) for pair in TEXT]
    assert [each for each in low if each[2] < 4.5] == []
    shapes = [(*pair, contrast(*(colours[x] for x in pair))) for pair in SHAPES]
    assert [each for each in shapes if each[2] < 3] == []
    for name in ("hot", "cold"):  # a token is read through its colour
        pairs = zip(colours[name], colours["card"], strict=True)
        red, green, blue = (FULL * x + (1 - FULL) * y for x, y in pairs)
        assert contrast(colours["ink"], (red, green, blue)) >= 4.5, name
