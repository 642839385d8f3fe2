"""One base, one type per boundary. Every message says what, why and what to do instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GroupwiseError(Exception):
    """Base of every error that groupwise raises on purpose."""


class RecipeError(GroupwiseError, ValueError):
    """A recipe, a slot or a hyper-parameter that does not exist or makes no sense."""


class BatchError(GroupwiseError, ValueError):
    """Data that a phase can't work with: wrong shapes, missing streams, values not finite."""


class ModelError(GroupwiseError, ValueError):
    """A model, checkpoint or tokenizer that can't be used as it is."""


class CaseError(GroupwiseError, ValueError):
    """A test case outside the schema of `groupwise.testing`."""


class RecipeWarning(UserWarning):
    """A combination that runs, and that its author probably did not mean."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A tail for 'unknown name' messages: the closest names, or all of them if few."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(repr(name) for name in close)}?"
    return f"Known: {', '.join(known)}."
