"""The tree that answers of a group form: those that begin alike go one way until they part."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import count

import torch
from torch import Tensor


def subtrees(answers: Sequence[Sequence[int]], groups: Sequence[Hashable]) -> Tensor:
    """Return branch_NL: the numbers of the subtrees that each answer is in, from the root on.

    The root is the group; a subtree begins with whatever tokens all its answers share, and ends
    where they part. -1 stands behind an answer's last parting.
    """
    paths: list[list[int]] = [[] for _ in answers]
    rows_of: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        rows_of.setdefault(group, []).append(row)
    numbers = count()
    open_ = [(rows, 0) for rows in rows_of.values()]
    while open_:
        rows, at = open_.pop()
        number = next(numbers)
        for row in rows:
            paths[row].append(number)
        for same, place in _parted(answers, rows, at):
            if len({tuple(answers[row][place:]) for row in same}) > 1:
                open_.append((same, place))
    width = max(map(len, paths), default=1)
    return torch.tensor(
        [[*path, *[-1] * (width - len(path))] for path in paths], dtype=torch.long
    ).reshape(len(paths), width)


def _parted(
    answers: Sequence[Sequence[int]], rows: Sequence[int], at: int
) -> list[tuple[list[int], int]]:
    """Return the rows by what comes where they part, and the place behind it.

    They are alike up to `at`, and perhaps further. An answer that ends there goes its own way.
    """
    while True:
        ways: dict[int | None, list[int]] = {}
        for row in rows:
            token = answers[row][at] if at < len(answers[row]) else None
            ways.setdefault(token, []).append(row)
        if len(ways) > 1 or None in ways:
            return [(same, at + 1) for token, same in ways.items() if token is not None]
        at += 1
