"""Answers that wait to be learned from, as a checkpoint holds them: tensors, the rest as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.graders.recorded_verdicts import Key
from groupwise.records import Completion, Grade, Task, VersionRun

# Of a completion: one row for each of its tokens, or of those that were read.
PER_TOKEN = ("logp_T", "topk_id_TK", "topk_logp_TK", "routes_TLK")


@dataclass(frozen=True)
class Waiting:
    """A prompt's answers, and their grades as far as they are there."""

    written: list[Completion]
    grades: list[Grade] | None

    def verdicts(
        self, task: Task, draw: int, text_of: Callable[[Completion], str]
    ) -> dict[Key, Grade]:
        """Return the grades under the keys that a grader's ledger has."""
        return {
            Key(task.id, draw, number, text_of(completion), None): given
            for number, (completion, given) in enumerate(
                zip(self.written, self.grades or [], strict=False)
            )
        }


def packed(groups: Sequence[Waiting | None]) -> tuple[list[Any], dict[str, Tensor]]:
    """Return what `unpacked` takes."""
    tensors: dict[str, Tensor] = {}
    said = [
        None if group is None else _group(group, f"{number}", tensors)
        for number, group in enumerate(groups)
    ]
    return said, tensors


def _group(group: Waiting, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    written = group.written
    ids = [token for completion in written for token in completion.token_ids]
    tensors[f"{name}.token_ids"] = torch.tensor(ids, dtype=torch.int64)
    lengths: dict[str, list[int]] = {"token_ids": [len(x.token_ids) for x in written]}
    for field in PER_TOKEN:
        rows = [getattr(completion, field) for completion in written]
        if all(x is not None for x in rows):
            tensors[f"{name}.{field}"] = torch.cat(rows).contiguous()
            lengths[field] = [len(x) for x in rows]
    return {
        "lengths": lengths,
        "answers": [
            [x.finish, x.version, x.weights, [list(run) for run in x.runs]] for x in written
        ],
        "grades": None if group.grades is None else [_said(x) for x in group.grades],
    }


def unpacked(said: Sequence[Any], tensors: Mapping[str, Tensor]) -> list[Waiting | None]:
    """Return the groups that were packed."""
    return [
        None if group is None else _ungroup(group, f"{number}", tensors)
        for number, group in enumerate(said)
    ]


def _ungroup(said: Mapping[str, Any], name: str, tensors: Mapping[str, Tensor]) -> Waiting:
    columns: dict[str, Any] = {
        field: torch.split(tensors[f"{name}.{field}"], lengths)
        for field, lengths in said["lengths"].items()
    }
    written = [
        Completion(
            token_ids=tuple(columns["token_ids"][number].tolist()),
            finish=finish,
            version=version,
            weights=weights,
            runs=tuple(VersionRun(*run) for run in runs),
            **{field: columns[field][number] for field in PER_TOKEN if field in columns},
        )
        for number, (finish, version, weights, runs) in enumerate(said["answers"])
    ]
    grades = said["grades"]
    return Waiting(written, None if grades is None else [_grade(x) for x in grades])


def _said(grade: Grade) -> list[Any]:
    steps = [list(step) for step in grade.steps]
    parts = list(map(list, grade.parts.items()))
    return [grade.reward, parts, grade.correct, grade.status, grade.reason, steps]


def _grade(said: Sequence[Any]) -> Grade:
    reward, parts, correct, status, reason, steps = said
    return Grade(reward, dict(parts), correct, status, reason, tuple((end, x) for end, x in steps))
