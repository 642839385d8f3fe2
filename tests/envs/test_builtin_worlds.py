"""Environments and tools of the package: rules by enumeration, outcomes from 0 to 1."""

from __future__ import annotations

import asyncio
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from groupwise.data.games import WORDS
from groupwise.data.generators import generate, split
from groupwise.envs.answering import Alone, AsyncEnvironment
from groupwise.envs.builtin.calculator import shown, value
from groupwise.envs.builtin.guess import GuessNumber, winnable
from groupwise.envs.builtin.python import python
from groupwise.envs.builtin.search import search
from groupwise.envs.builtin.tictactoe import TicTacToe, best, over, put, winner, worth
from groupwise.envs.builtin.tries import Tries
from groupwise.envs.builtin.wordle import Wordle, compared
from groupwise.envs.opening import WorldSetup
from groupwise.envs.trial import TrialReport, try_environment
from groupwise.errors import DataError, WorldError


def game(world: AsyncEnvironment, row: dict[str, Any], turns: list[str]) -> tuple[list[str], Any]:
    """Return what is said to the turns, and the outcome."""
    alone = Alone(world)
    said = ["".join(m["content"] for m in alone.reset(row).messages)]
    for number, text in enumerate(turns, 1):
        answer = alone.step(text)
        said.append("".join(message["content"] for message in answer.messages))
        if answer.done:
            assert number == len(turns)
    outcome = alone.outcome()
    alone.close()
    return said, outcome


# --- guess


def bisected(low: int, high: int, secret: int, guesses: int, **options: Any) -> Any:
    world = Alone(GuessNumber(low, high, guesses, **options))
    world.reset({"secret": secret})
    least, most = low, high
    while True:
        middle = (least + most) // 2
        answer = world.step(f"I guess {middle}")
        if answer.done:
            break
        if answer.messages[0]["content"] == "higher":
            least = middle + 1
        else:
            most = middle - 1
    outcome = world.outcome()
    world.close()
    return outcome


def test_the_best_player_finds_fifteen_of_sixteen() -> None:
    """And nobody more: four guesses tell 1 + 2 + 4 + 8 numbers apart."""
    won = sum(bisected(0, 15, secret, 4) for secret in range(16))
    assert won == 15 == 16 * winnable(0, 15, 4)
    assert sum(bisected(0, 6, secret, 3) for secret in range(7)) == 7 == 7 * winnable(0, 6, 3)
    assert winnable(0, 1024, 10) == 1023 / 1025


def test_no_player_is_better_by_enumeration() -> None:
    """The most secrets that any strategy finds, over all strategies."""

    def most(size: int, guesses: int) -> int:
        if not size or not guesses:
            return 0
        return max(
            1 + most(at, guesses - 1) + most(size - 1 - at, guesses - 1) for at in range(size)
        )

    for size in range(2, 12):
        for guesses in (1, 2, 3):
            assert most(size, guesses) == round(size * winnable(0, size - 1, guesses))


def test_guess_reads_the_last_number_and_counts_every_turn() -> None:
    said, won = game(
        GuessNumber(), {"secret": 7}, ["not 3, but 9", "well", "5 or 6", "12345678901 7"]
    )
    assert (said, won) == (["", "lower", "no number", "higher", ""], 1.0)
    said, won = game(GuessNumber(guesses=2), {"secret": 7}, ["7000000000", "8"])
    assert (said, won) == (["", "no number", ""], 0.0)


def test_a_lost_game_may_be_worth_what_was_ruled_out() -> None:
    """Of 0 to 15, [4, 11] is left: 8 of 16 are ruled out."""
    _, reward = game(GuessNumber(guesses=2, partial=True), {"secret": 8}, ["3", "12"])
    assert reward == 8 / 16
    assert game(GuessNumber(guesses=1, partial=True), {"secret": 8}, ["x"])[1] == 0.0
    assert game(GuessNumber(guesses=1, partial=True), {"secret": 8}, ["8"])[1] == 1.0


def test_rows_that_do_not_fit_are_refused() -> None:
    for row, words in (
        ({}, "secret"),
        ({"secret": 99}, "outside of 0 to 15"),
        ({"secret": True}, "no whole number"),
    ):
        with pytest.raises(WorldError, match=words):
            game(GuessNumber(), row, [])
    with pytest.raises(WorldError, match="is no game"):
        GuessNumber(5, 5)
    with pytest.raises(WorldError, match="no word of five letters"):
        game(Wordle(), {"word": "longer"}, [])
    with pytest.raises(WorldError, match="no answer to compare with"):
        game(Tries(), {}, [])
    with pytest.raises(WorldError, match="no opponent 'perfect'"):
        TicTacToe("perfect")  # type: ignore[arg-type]


# --- wordle


@pytest.mark.parametrize(
    ("guess", "word", "signs"),
    [
        ("crane", "crane", "GGGGG"),
        ("eerie", "crane", "--Y-G"),  # of three e's one is in the word, and it stands right
        ("allay", "llama", "YGYY-"),
        ("sassy", "glass", "YY-G-"),
        ("zzzzz", "crane", "-----"),
    ],
)
def test_letters_are_told_as_often_as_they_are_there(guess: str, word: str, signs: str) -> None:
    assert compared(guess, word) == signs


def test_wordle_is_won_lost_and_partly_worth() -> None:
    said, won = game(Wordle(), {"word": "Crane"}, ["my guess: TRAIN", "[crane]"])
    assert (said, won) == (["", "train: -GGY-, 5 left".replace("Y-", "-Y"), ""], 1.0)
    assert game(Wordle(guesses=1, partial=True), {"word": "crane"}, ["train"])[1] == 2 / 10
    assert game(Wordle(guesses=1), {"word": "crane"}, ["train"])[1] == 0.0


def test_words_are_words() -> None:
    assert len(set(WORDS)) == len(WORDS) > 400
    assert all(len(word) == 5 and word.isalpha() and word.islower() for word in WORDS)


# --- tic-tac-toe


def test_perfect_play_is_a_draw_and_a_fork_is_lost() -> None:
    assert worth("." * 9, "X") == 0
    assert best("X.......O", "X") == 1  # a corner against a corner is a forced win
    assert winner("XXX.OO...") == "X" and not over("XO.......") and over("XOXXOOOXX")


def test_nobody_beats_the_optimal_opponent() -> None:
    """Every line of play, as the first and as the second player."""
    world = TicTacToe("optimal")
    for first in (True, False):
        boards, outcomes = [()], set()
        while boards:
            moves = boards.pop()
            alone = Alone(TicTacToe("optimal"))
            answer = alone.reset({"first": first, "seed": 1})
            for move in moves:
                answer = alone.step(str(move))
            if answer.done:
                outcomes.add(alone.outcome())
            else:
                board = alone.state() or ""
                boards += [(*moves, at + 1) for at in range(9) if board[at] == "."]
            alone.close()
        assert outcomes == {0.0, 0.5}
    assert world.concurrent


def test_a_move_that_can_not_be_made_loses() -> None:
    for text in ("", "10", "0", "I pass"):
        assert game(TicTacToe(), {"seed": 3}, [text])[1] == 0.0
    alone = Alone(TicTacToe("self"))
    alone.reset({})
    alone.step("5")
    assert alone.step("5").done and alone.outcome() == 1 / 2


def test_against_itself_a_blunder_costs_its_share() -> None:
    """X in the corner, O in the far corner gives the game away; X's answers keep the win."""
    said, share = game(TicTacToe("self"), {}, ["1", "9", "3", "2", "7", "8", "4"])
    assert said[0] == "...\n...\n...\nX moves"
    board, sound = "." * 9, 0
    for at, side in zip((0, 8, 2, 1, 6, 7, 3), "XOXOXOX", strict=True):
        sound += worth(put(board, at, side), side) == best(board, side)
        board = put(board, at, side)
    assert share == sound / 7 == 6 / 7


def test_opponents_are_the_rows_own() -> None:
    first = [game(TicTacToe(), {"seed": seed, "first": False}, [])[0][0] for seed in range(20)]
    again = [game(TicTacToe(), {"seed": seed, "first": False}, [])[0][0] for seed in range(20)]
    assert first == again and len(set(first)) > 4


# --- tries


def test_a_wrong_answer_may_be_tried_again() -> None:
    row = {"answer": "1,200"}
    said, reward = game(Tries(), row, ["It is 12.", "The answer is 1200."])
    assert said[1] == "That is wrong. Tries left: 4. Think again and answer." and reward == 1.0
    assert game(Tries(cost=0.25), row, ["1", "2", "so 1200"])[1] == 0.5
    assert game(Tries(tries=2), row, ["1", "2"])[1] == 0.0
    assert game(Tries(), {"answer": "Paris"}, ["Paris"])[1] == 1.0


# --- tools


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2+3*4", "14"),
        ("(2+3)*4 =", "20"),
        ("1/3", "0.333333333333"),
        ("0.1+0.2", "0.3"),
        ("10^20 + 1", "100000000000000000001"),
        ("-2**2", "-4"),
        ("7 // 2 - 7 % 4", "0"),
        ("1,200 × 3 ÷ 4", "900"),
        ("sqrt(16/9)", "1.333333333333"),
        ("sqrt(2)", "1.414213562373"),
        ("round(2.5) + floor(-0.5) + ceil(0.2) + abs(-3)", "5"),
        ("-1/3", "-0.333333333333"),
        ("1/10**20", "1e-20"),
        ("4**0.5", "2"),
    ],
)
def test_the_calculator_is_exact(expression: str, result: str) -> None:
    assert shown(value(expression)) == result


@pytest.mark.parametrize(
    "expression",
    [
        "1/0", "0**-1", "2**10**10", "9**9**9**9", "(-8)**0.5", "sqrt(-1)", "__import__('os')",
        "a", "'a'*3", "[1]", "1 if 1 else 2", "1e999", "(lambda: 1)()", "", "1+", "True + 1", "1j",
        "9" * 2_000, "(" * 300 + "1" + ")" * 300, "-" * 900 + "1", "2 << 9", "factorial(9)",
        "*".join(["10**900"] * 9), "abs(1, 2)", "1_0.5.5",
    ],
)  # fmt: skip
def test_the_calculator_refuses_what_is_no_arithmetic(expression: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        value(expression)


def test_the_calculator_agrees_with_fractions() -> None:
    stream = random.Random(1)
    for _ in range(200):
        a, b, c = (stream.randint(-99, 99) for _ in range(3))
        d = stream.randint(1, 99)
        assert value(f"({a}) * ({b}) - ({c}) / {d}") == a * b - Fraction(c, d)


def test_the_python_tool_runs_in_the_sandbox() -> None:
    from groupwise.graders.sandbox.pool import report

    if all(report().values()):
        pytest.skip("no isolation holds here")
    run = python(seconds=5.0)

    def asked(code: str) -> str:
        return asyncio.run(run(code))  # type: ignore[arg-type]

    assert asked("print(1)\nx = 6\nx * 7") == "1\n42\n"
    assert asked("x = 1") == ""
    for code, words in (("1/0", "ZeroDivisionError"), ("x", "NameError"), ("(", "SyntaxError")):
        with pytest.raises(Exception, match=words):
            asked(code)


def test_search_finds_passages(tmp_path: Path) -> None:
    pytest.importorskip("bm25s", reason="the extra `search` is not installed")
    (tmp_path / "a.txt").write_text("The river Elbe flows through Dresden. " * 3)
    (tmp_path / "b.md").write_text("Mount Etna is a volcano on Sicily.")
    (tmp_path / "c.jsonl").write_text('{"title": "Cats", "text": "A cat sleeps all day."}\n')
    run = search(str(tmp_path), top=2, words=7)
    told = asyncio.run(run("Where is the volcano Etna?"))  # type: ignore[arg-type]
    assert told == "1. b.md: Mount Etna is a volcano on Sicily."
    assert asyncio.run(run("xyzzy")) == "Nothing found."  # type: ignore[arg-type]
    assert "Cats: A cat sleeps" in asyncio.run(run("sleeping cat sleeps"))  # type: ignore[arg-type]


def test_search_without_texts_or_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"no texts|bm25s, which is not installed"):
        search(str(tmp_path))


# --- rows


@pytest.mark.parametrize("name", ["guess", "wordle", "tictactoe"])
def test_rows_differ_repeat_and_can_be_held_out(name: str) -> None:
    tasks = generate(name, 320, 0, {})
    assert tasks == generate(name, 320, 0, {}) != generate(name, 320, 1, {})
    assert len({task.prompt for task in tasks}) == 320
    train, held = split(tasks, 32, 0)
    assert len(held) == 32 and len(train) == 288


def test_secrets_are_equally_often_and_not_in_the_prompt() -> None:
    tasks = generate("guess", 160, 0, {"high": 15})
    counts = [sum(task.columns["secret"] == n for task in tasks) for n in range(16)]
    assert counts == [10] * 16
    assert all(0 <= int(task.columns["solution"]) <= 15 for task in tasks)
    assert all(str(task.prompt).endswith(", guess 0-15:") for task in tasks)
    with pytest.raises(DataError, match="are no range"):
        generate("guess", 4, 0, {"low": 3, "high": 3})


# --- who knows must win


@pytest.mark.parametrize(("name", "turns"), [("guess", 4), ("wordle", 6)])
def test_who_knows_wins_and_who_guesses_does_not(name: str, turns: int) -> None:
    rows = [dict(task.columns) for task in generate(name, 64, 0, {})]
    report = try_environment(WorldSetup(name), rows, turns=turns)
    assert report.oracle == 1.0 and report.problems == ()
    assert report.guesser is not None and report.guesser < 0.5


@pytest.mark.parametrize(
    ("setup", "least"), [("tictactoe", 0.9), ("tictactoe(opponent='optimal')", 0.5)]
)
def test_perfect_play_never_loses(setup: str, least: float) -> None:
    rows = [dict(task.columns) for task in generate("tictactoe", 32, 0, {})]
    report = try_environment(WorldSetup(setup, workers=1), rows, turns=5)
    assert report.oracle is not None and report.oracle >= least and report.problems == ()
    assert report.guesser is not None and report.guesser < 0.4


def test_several_tries_are_won_by_who_knows() -> None:
    rows = [{"answer": str(n)} for n in range(100, 120)]
    report = try_environment(WorldSetup("tries", workers=1), rows, turns=5)
    assert (report.oracle, report.guesser, report.problems) == (1.0, 0.0, ())


def test_a_broken_environment_is_found_out(tmp_path: Path) -> None:
    """One that nobody wins, one that everybody wins, one that raises."""
    file = tmp_path / "mine.py"
    file.write_text(
        "class Env:\n"
        "    def __init__(self, gives=None): self.gives = gives\n"
        "    def reset(self, secret): self.secret = secret\n"
        "    def step(self, text):\n"
        "        if self.gives is None: raise RuntimeError('no luck')\n"
        "        return '', self.gives, True\n"
    )

    def told(gives: Any) -> TrialReport:
        setup = WorldSetup(f"{file}:Env(gives={gives})", workers=1)
        players: dict[str, Any] = {"oracle": lambda *_: "1", "guesser": lambda *_: "2"}
        return try_environment(setup, [{"secret": 1}], **players, turns=2)

    assert "can't be won" in told(0.0).problems[0]
    assert "next to nothing to learn" in told(1.0).problems[0]
    assert "RuntimeError: no luck (mine.py:5)" in told(None).problems[0]
