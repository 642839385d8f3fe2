"""The nouns. Tensor names carry their axes: `_N` sequence (row), `_T` token, `_K` top-k entry."""

from groupwise.records.batch import Average, Groups, Memory, StoredAnswer, TokenBatch, Visit
from groupwise.records.rollouts import (
    POLICY,
    Branch,
    CalledTool,
    Completion,
    Episode,
    Grade,
    LearnedRow,
    Message,
    Rollout,
    Task,
    Turn,
    TurnFacts,
    VersionRun,
)

__all__ = [
    "POLICY",
    "Average",
    "Branch",
    "CalledTool",
    "Completion",
    "Episode",
    "Grade",
    "Groups",
    "LearnedRow",
    "Memory",
    "Message",
    "Rollout",
    "StoredAnswer",
    "Task",
    "TokenBatch",
    "Turn",
    "TurnFacts",
    "VersionRun",
    "Visit",
]
