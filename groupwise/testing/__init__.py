"""Check any implementation against exact cases: `run_case(case) -> outputs`.

A case is a dict with `kind`, `method`, `params` and `inputs` (plain numbers and nested lists); the
outputs are named as in the case's `expected`, whose keys may be read and whose values never are.
Everything is computed by the public slots, recipes and the two phases, in float64.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from groupwise.errors import CaseError, GroupwiseError, RecipeWarning, nearest
from groupwise.testing.kinds import KINDS
from groupwise.testing.schema import named

UNFIT = (TypeError, ValueError, LookupError, RuntimeError, ArithmeticError, StopIteration)


def run_case(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return all outputs of a case, as floats and nested lists; padded positions are 0."""
    if not isinstance(case, Mapping):
        raise CaseError(
            f"A case is a mapping with kind, method and inputs, got {str(case)[:60]!r}."
        )
    for key in ("kind", "method", "inputs"):
        if key not in case:
            raise CaseError(f"A case needs {key!r}; this one has {sorted(case)}.")
    kind = case["kind"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise CaseError(f"Unknown kind {kind!r}. {nearest(str(kind), KINDS)}")
    with warnings.catch_warnings():  # a case may well be a doubtful combination
        warnings.simplefilter("ignore", RecipeWarning)
        try:
            outputs = KINDS[kind](named(case))
        except CaseError:
            raise
        except GroupwiseError as error:
            raise CaseError(f"{kind} {case['method']}: {error}") from error
        except UNFIT as error:  # lists of lists that nobody has checked one by one
            raise CaseError(
                f"{kind} {case['method']}: its inputs and parameters do not fit each other "
                f"({type(error).__name__}: {error}). Every list over rows needs one entry per row, "
                "every list within a row one per token, turn or step."
            ) from error
    missing = set(case.get("expected") or ()) - set(outputs)
    if missing:
        raise CaseError(
            f"{kind} {case['method']} has no output {sorted(missing)}. It has {sorted(outputs)}."
        )
    return outputs


__all__ = ["run_case"]
