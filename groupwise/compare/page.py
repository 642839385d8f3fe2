"""compare.html, compare.json, CSV and PNG."""

from __future__ import annotations
from groupwise.watch.files import to_page, write_atomic


def write_all(path, found, plan, done):
    write_atomic(path / "compare.json", to_page(found))
    return ["compare.json"]
