"""The viewer's colours, light and dark: the site and its pictures have no others."""

from __future__ import annotations

import re
from pathlib import Path

ASSETS = Path(__file__).resolve().parents[2] / "groupwise" / "view" / "assets"


def palettes() -> tuple[dict[str, str], dict[str, str]]:
    """Return the colours of style.css by name: the light ones, and the dark ones."""
    blocks = re.findall(r":root \{(.*?)\}", (ASSETS / "style.css").read_text("utf-8"), re.DOTALL)
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w+);", block)) for block in blocks)
    return light, dark
