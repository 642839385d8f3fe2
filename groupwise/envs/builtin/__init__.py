"""Environments and tools of the package, by name."""

from __future__ import annotations

ENVIRONMENTS = {
    "guess": "groupwise.envs.builtin.guess:GuessNumber",
    "outside": "groupwise.envs.shapes.programs:Outside",
    "tictactoe": "groupwise.envs.builtin.tictactoe:TicTacToe",
    "tries": "groupwise.envs.builtin.tries:Tries",
    "wordle": "groupwise.envs.builtin.wordle:Wordle",
}
TOOLS = {
    "calculator": "groupwise.envs.builtin.calculator:calculator",
    "python": "groupwise.envs.builtin.python:python",
    "search": "groupwise.envs.builtin.search:search",
}
PLACES = {**ENVIRONMENTS, **TOOLS}
