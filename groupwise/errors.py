"""Errors: one base, one type per boundary. Every message says what, why and what to do instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GroupwiseError(Exception):
    """Base of every error that groupwise raises on purpose."""

    told = False  # by another rank, to the same people


class RecipeError(GroupwiseError, ValueError):
    """A recipe, a slot or a hyper-parameter that does not exist or makes no sense."""


class BatchError(GroupwiseError, ValueError):
    """Data that a phase can't work with: wrong shapes, missing streams, values not finite."""


class MissingStream(BatchError):
    """A stream that is read and that the batch does not have; who read it is added on the way."""

    def __init__(self, name: str, meaning: str) -> None:
        super().__init__(f"The batch has no {name} ({meaning}). Pass it to TokenBatch.build.")
        self.name, self.meaning = name, meaning


class ModelError(GroupwiseError, ValueError):
    """A model, checkpoint or tokenizer that can't be used as it is."""


class NotNative(ModelError):
    """A sound architecture that groupwise's own layers do not have."""


class ConfigError(GroupwiseError, ValueError):
    """A configuration that does not exist, makes no sense, or does not fit the rest."""


class DataError(GroupwiseError, ValueError):
    """Prompts or answers that can't be used as they are."""


class RewardError(GroupwiseError, ValueError):
    """A reward function that can't be used, or that fails too often."""


class WorldError(GroupwiseError, ValueError):
    """An environment or a tool that can't be used as it is."""


class EngineError(GroupwiseError, ValueError):
    """A request that the sampler can't serve."""


class RunError(GroupwiseError, RuntimeError):
    """A run that can't start, continue or be written down."""


class DiskError(RunError):
    """A disk that took no more; what is left of the run is said when all of it is closed."""


class CaseError(GroupwiseError, ValueError):
    """A test case outside the schema of `groupwise.testing`."""


class RecipeWarning(UserWarning):
    """A combination that runs, and that its author probably did not mean."""


class EngineWarning(RuntimeWarning):
    """The sampler goes on in another way than it was asked to."""


def in_short(error: BaseException) -> str:
    """Return an error's kind and the first line of its message: compilers go on for pages."""
    said = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *said[:1]])


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of an 'unknown name' message: the closest names, or all of them if few."""
    known = sorted(known)
    by_letters = {name.lower(): name for name in known}  # in capitals, too, it is the same word
    close = difflib.get_close_matches(word.lower(), by_letters, n=3, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(repr(by_letters[name]) for name in close)}?"
    return f"Known: {', '.join(known)}."
