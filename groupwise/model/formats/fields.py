"""The small JSON files of a model: read within limits, each field of its type and range.

Whoever uses a field says what it may hold, in a table beside the code that uses it; then an error
names the file, the field and what is wrong with it. Fields that nobody uses are not looked at.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.errors import GroupwiseError, ModelError, in_short

MOST_BYTES = 2**28  # of one file: the largest tokenizers have some 2**25
REMEDY = "The file is damaged, or of another kind of model: fetch it again, or correct the field."


class FieldRule(NamedTuple):
    """A rule for what a field may hold, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


Rules = Mapping[str, FieldRule]


def whole(low: int, high: int) -> FieldRule:
    return FieldRule(
        f"a whole number from {low:,} to {high:,}",
        lambda x: type(x) is int and low <= x <= high,
    )


def real(low: float, high: float) -> FieldRule:
    """Allow a number in between, the ends included; NaN is in no range."""
    return FieldRule(
        f"a number from {low:g} to {high:g}",
        lambda x: type(x) in (int, float) and low <= x <= high,
    )


def positive(high: float) -> FieldRule:
    return FieldRule(
        f"a number above 0, at most {high:g}",
        lambda x: type(x) in (int, float) and 0 < x <= high,
    )


def several(of: FieldRule, words: str) -> FieldRule:
    return FieldRule(words, lambda x: isinstance(x, list) and all(map(of.fits, x)))


def either(first: FieldRule, second: FieldRule) -> FieldRule:
    return FieldRule(f"{first.words}, or {second.words}", lambda x: first.fits(x) or second.fits(x))


FLAG = FieldRule("true or false", lambda x: isinstance(x, bool))
TEXT = FieldRule(
    "a text", lambda x: isinstance(x, str) and x.encode("utf-8", "ignore").decode("utf-8") == x
)
TABLE = FieldRule("a table", lambda x: isinstance(x, dict))
TEXTS = several(TEXT, "a list of texts")
FINITE = FieldRule(
    "a finite number", lambda x: type(x) in (int, float) and abs(x) < 1e300 and math.isfinite(x)
)


def check(file: str | Path, raw: Mapping[str, Any], rules: Rules) -> None:
    """Refuse the first field that holds what it can't; absent and null ones are not set."""
    for name, rule in rules.items():
        value = raw.get(name)
        if value is not None and not rule.fits(value):
            raise ModelError(
                f"{file}: {name} is {reprlib.repr(value)}, and must be {rule.words}. {REMEDY}"
            )


def read_bytes(file: Path) -> bytes:
    """Read a small file as a whole, and nothing that is too large for one."""
    with file.open("rb") as stream:
        raw = stream.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ModelError(
            f"{file} has more than {MOST_BYTES // 2**20} MiB, as no such file has. Fetch it again."
        )
    return raw


def table(file: str | Path, raw: bytes) -> dict[str, Any]:
    """Read a JSON file that is one table of settings."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:  # numbers too long and nesting too deep, too
        raise ModelError(
            f"{file} can't be read: it is no JSON ({in_short(error)}). It is cut short or damaged; "
            "fetch it again."
        ) from error
    if not isinstance(found, dict):
        raise ModelError(
            f"{file} can't be read: it is {reprlib.repr(found)} and no table of settings. Fetch it "
            "again."
        )
    return found


@contextmanager
def library(what: str, remedy: str) -> Iterator[None]:
    """Turn whatever a library raises about a file into words; only the file can be at fault.

    A panic of a library in Rust is no `Exception`. Memory that ran out is not the file's fault.
    """
    try:
        yield
    except (GroupwiseError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{what} ({in_short(error)[:300]}). {remedy}") from error
