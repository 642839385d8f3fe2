"""Nested lists of numbers, compared leaf by leaf; rows may have different lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All leaves with their places, `[row][token]`."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves_of(item, f"{path}[{index}]")
    else:
        yield path, value


def assert_close(got: Any, want: Any, atol: float, rtol: float, name: str = "") -> None:
    """Same nesting, and |got − want| ≤ atol + rtol·|want| at every leaf; NaN equals nothing."""
    found, wanted = dict(leaves_of(got)), dict(leaves_of(want))
    assert found.keys() == wanted.keys(), f"{name}: other places than {list(wanted)}"
    for place, x in wanted.items():
        y = found[place]
        assert math.isfinite(y), f"{name}{place} is {y}"
        assert abs(y - x) <= atol + rtol * abs(x), f"{name}{place} is {y!r}, not {x!r}"
