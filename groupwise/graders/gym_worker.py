"""reasoning-gym's scorers, in a worker process. Nothing else imports this."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from groupwise.data import gym
from groupwise.errors import DataError

with suppress(DataError):  # said by `judge`
    gym.names()  # the package is loaded once, for all workers


def judge(
    name: str, options: Mapping[str, Any], answer: str, entry: Mapping[str, Any]
) -> tuple[float | None, str, str]:
    """Return the scorer's value, status and reason."""
    try:
        value = gym.score(name, options, answer, entry)
    except DataError as error:  # no such task, or no package
        return None, "error", str(error)
    except MemoryError:  # told by the pool
        raise
    except Exception as error:  # the boundary to the package
        return 0.0, "ok", f"the scorer of {name} raised {type(error).__name__}: {error}"
    if not math.isfinite(value):
        return None, "error", f"the scorer of {name} gives {value}"
    return value, "ok", ""
