"""`groupwise check-reward` of an environment: who knows must win, who guesses must not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from groupwise.cli import main
from groupwise.envs.trial import checked_player, players_of
from groupwise.errors import WorldError

WORLDS = '''
SEEN = []

class Doors:
    """Behind one of many doors is a prize."""
    def reset(self, answer, **row): self.prize = answer
    def step(self, text):
        won = text == self.prize
        return ("yes" if won else "no"), float(won), won

class Everybody(Doors):
    def step(self, text): return "yes", 1.0, True

class Shared(Doors):
    async def reset(self, answer, **row): self.prize = answer
    async def step(self, text):
        SEEN.append(text)
        return f"{len(SEEN)} so far", float(text == self.prize), text == self.prize

class Sum:
    """A total that is to be ten."""
    def reset(self, **row): self.total = 0
    def add(self, number: int) -> str:
        """Add a number to the total.

        Args:
            number: What is added.
        """
        self.total += number
        return str(self.total)
    def get_reward(self): return float(self.total == 10)

def adds(row, heard, stream):
    if len(heard) > 2: return "done"
    return '<tool_call>{"name": "add", "arguments": {"number": 5}}</tool_call>'

def says(row, heard, stream): return "ten"
'''


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(WORLDS)
    rows = [{"prompt": "Find it.", "answer": name} for name in ("red", "blue", "green", "white")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def check(mine: Path, capsys: pytest.CaptureFixture[str], name: str, *more: str) -> Any:
    """The exit status and the findings."""
    world = name if name.islower() else f"{mine}/mine.py:{name}"
    data = [f"data.train={mine}/rows.jsonl", "eval.tasks=0"]
    given = ["turns.max=3", "turns.workers=1", f"turns.environment={world}", *data, *more]
    status = main(["check-reward", *given, "--json"])
    said = capsys.readouterr()
    return status, json.loads(said.out) if said.out else said.err


def test_who_says_the_rows_answer_wins_and_who_says_anothers_does_not(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = check(mine, capsys, "Doors")
    assert (status, found["good"], found["rows"]) == (0, True, 4)
    assert (found["oracle"], found["guesser"]) == (1.0, 0.0)


def test_an_environment_that_pays_everybody_is_not_ready(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = check(mine, capsys, "Everybody")
    assert status == 1 and "next to nothing to learn" in found["problems"][0]


def test_episodes_that_see_each_other_are_found(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = check(mine, capsys, "Shared")
    assert status == 1 and "they share something" in found["problems"][-1]


def test_players_of_ones_own_call_tools(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    players = ["--oracle", f"{mine}/mine.py:adds", "--guesser", f"{mine}/mine.py:says"]
    status, found = check(mine, capsys, "Sum", *players)
    assert (status, found["oracle"], found["guesser"]) == (0, 1.0, 0.0)
    status, found = check(mine, capsys, "Sum")
    assert status == 1 and "can't be won" in found["problems"][0]


def test_a_built_in_game_is_played_by_its_own_players(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["turns.environment=guess", "data.train=guess", "turns.max=4", "turns.workers=1"]
    assert main(["check-reward", *given]) == 0
    said = capsys.readouterr().out
    assert "environment guess on 16 rows of the training data, 4 turns at most" in said
    assert "who knows the answer   1.00" in said
    assert "Who knows the answer wins, and who guesses does not." in said


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--oracle", "says"], "names no player"),
        (["--oracle", "none.py:says"], "There is no file"),
        (["--oracle", "MINE/mine.py:SEEN"], "is no function"),
        (["--oracle", "MINE/mine.py:nobody"], "has no 'nobody'"),
    ],
)
def test_a_player_that_is_none_is_refused(
    mine: Path, capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    status, said = check(mine, capsys, "Doors", *[x.replace("MINE", str(mine)) for x in more])
    assert status == 2 and words in said


def test_players_without_an_environment_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-reward", "data.train=arithmetic", "--oracle", "mine.py:says"]) == 2
    assert "play in an environment" in capsys.readouterr().err


def test_a_players_fault_is_its_own() -> None:
    import random

    def breaks(*_: Any) -> str:
        raise ValueError("no move")

    for player, words in ((breaks, "raised ValueError: no move"), (lambda *_: 3, "returned 3")):
        with pytest.raises(WorldError, match=words):
            checked_player("mine.py:me", player)({}, [], random.Random(0))


def test_rows_without_answers_have_nobody_who_knows() -> None:
    assert players_of([{"secret": 3}, {"answer": None}]) == (None, None)
