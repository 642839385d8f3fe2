"""Bytes in words."""

from __future__ import annotations

import pytest

from groupwise.common.sizes import size


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (5 * 2**20, "5.0 MiB"),
        (13.25 * 2**30, "13.2 GiB"),
        (3 * 2**40, "3.0 TiB"),
        (4000 * 2**40, "4000.0 TiB"),
    ],
)
def test_a_size_has_the_largest_unit_that_fits(count: float, words: str) -> None:
    assert size(count) == words
