"""The nouns. Tensor names carry their axes: `_N` sequence (row), `_T` token, `_K` top-k entry."""

from groupwise.records.batch import Average, Groups, Memory, TokenBatch, Visit
from groupwise.records.rollouts import (
    POLICY,
    Branch,
    Completion,
    Grade,
    LearnedRow,
    Message,
    Rollout,
    Task,
    Turn,
    VersionRun,
)

__all__ = [
    "POLICY",
    "Average",
    "Branch",
    "Completion",
    "Grade",
    "Groups",
    "LearnedRow",
    "Memory",
    "Message",
    "Rollout",
    "Task",
    "TokenBatch",
    "Turn",
    "VersionRun",
    "Visit",
]
