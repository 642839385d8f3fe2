"""Tic-tac-toe: cells are 1 to 9, from the top left; the policy writes a number.

A row may have `first` (false: the opponent begins) and `seed`. A generator makes rows of both
kinds. Against an opponent a win is worth 1, a draw 1/2. Against itself the policy moves for both
sides, and is worth the share of its moves that gave nothing away: judged by perfect play.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, get_args

from groupwise.envs.answering import AsyncEnvironment, seed_of
from groupwise.envs.environment import Observation
from groupwise.errors import WorldError, nearest

CELL = re.compile(r"(?<!\d)[1-9](?!\d)")
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
Opponent = Literal["random", "optimal", "self"]


class TicTacToe(AsyncEnvironment):
    """A turn's last number from 1 to 9 is the move. One that can't be made loses at once."""

    concurrent = True

    def __init__(self, opponent: Opponent = "random"):
        if opponent not in get_args(Opponent):
            raise WorldError(
                f"tictactoe: there is no opponent {opponent!r}. "
                f"{nearest(str(opponent), get_args(Opponent))}"
            )
        self.opponent = opponent

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self.board, self.moves, self.sound, self.foul = "." * 9, 0, 0, False
        self.random = random.Random(f"tictactoe/{seed_of(row)}")
        self.mine = "X"
        if self.opponent != "self" and row.get("first", True) is False:
            self.mine = "O"
            self._reply()
        return self._shown()

    async def step(self, text: str) -> Observation:
        found = CELL.findall(text)
        at = int(found[-1]) - 1 if found else -1
        self.moves += 1
        if at < 0 or self.board[at] != ".":
            self.foul = True
            return Observation(done=True)
        mover = self.mover
        self.sound += worth(put(self.board, at, mover), mover) == best(self.board, mover)
        self.board = put(self.board, at, mover)
        if not over(self.board) and self.opponent != "self":
            self._reply()
        return Observation(done=True) if over(self.board) else self._shown()

    @property
    def mover(self) -> str:
        return mover_of(self.board)

    def _reply(self) -> None:
        side = self.mover
        free = [at for at in range(9) if self.board[at] == "."]
        if self.opponent == "optimal":
            aim = best(self.board, side)
            free = [at for at in free if worth(put(self.board, at, side), side) == aim]
        self.board = put(self.board, self.random.choice(free), side)

    def _shown(self) -> Observation:
        rows = "\n".join(self.board[start : start + 3] for start in (0, 3, 6))
        return Observation(({"role": "user", "content": f"{rows}\n{self.mover} moves"},))

    async def outcome(self) -> float | None:
        if self.opponent == "self":
            return self.sound / self.moves if self.moves else 0.0
        if self.foul or not over(self.board):
            return 0.0
        return {self.mine: 1.0, "": 0.5}.get(winner(self.board), 0.0)

    def state(self) -> str | None:
        return self.board


def put(board: str, at: int, side: str) -> str:
    return board[:at] + side + board[at + 1 :]


def mover_of(board: str) -> str:
    return "X" if board.count("X") == board.count("O") else "O"


def winner(board: str) -> str:
    """Return who has three in a line; "" for nobody."""
    lines = ({board[at] for at in line} for line in LINES)
    return next((side for line in lines if len(line) == 1 for side in line if side != "."), "")


def over(board: str) -> bool:
    return bool(winner(board)) or "." not in board


@cache
def worth(board: str, side: str) -> int:
    """Return 1, 0 or -1: what a board comes to for a side if both play as well as can be."""
    if over(board):
        return {side: 1, "": 0}.get(winner(board), -1)
    mover = mover_of(board)
    return best(board, mover) if mover == side else -best(board, mover)


@cache
def best(board: str, mover: str) -> int:
    """Return the worth of the best move for who moves."""
    return max(worth(put(board, at, mover), mover) for at in range(9) if board[at] == ".")
