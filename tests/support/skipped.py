"""What a run of the tests did not try, in words: for want of what, and how to get it."""

from __future__ import annotations

import re

NO_IMPORT = re.compile(r"could not import '([\w.]+)'")


def not_tried(reason: str) -> str:
    """Return why a test was skipped, and how to get the package that it could not import."""
    reason = reason.removeprefix("Skipped: ")
    missing = NO_IMPORT.match(reason)
    return f"no {missing[1].partition('.')[0]}: make setup" if missing else reason
