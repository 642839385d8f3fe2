"""Environments tried before a run: who knows the answer must win, who guesses must not.

And what one episode does must not be seen by another.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.envs.builtin.tictactoe import best, mover_of, put, worth
from groupwise.envs.loading import from_place, told
from groupwise.envs.opening import WorldSetup, open_worlds, placed
from groupwise.envs.worlds import Answered, Fault, Worlds
from groupwise.errors import WorldError

Heard = list[tuple[str, str]]  # what was said and what was answered, in order; first: "", beginning
Player = Callable[[Mapping[str, Any], Heard, random.Random], str]
DRAWN = 0.5  # what perfect play of tic-tac-toe is sure of
PATIENCE = 600.0  # seconds without any answer
FEW = 0.1  # of reward: what an oracle may lack, and by how much a guesser must be worse


@dataclass
class Game:
    """An episode that a player plays."""

    row: Mapping[str, Any]
    stream: random.Random
    heard: Heard = field(default_factory=list)
    reward: float = 0.0
    fault: str = ""
    over: bool = False


@dataclass(frozen=True)
class TrialReport:
    """How players did, and what is wrong with that; "" where nothing is."""

    oracle: float | None
    guesser: float | None
    faults: tuple[str, ...]
    problems: tuple[str, ...]
    said: tuple[str, ...] = ()  # by who guesses, in the longest of the episodes


def play(
    worlds: Worlds, rows: Sequence[Mapping[str, Any]], player: Player, turns: int, seed: int = 0
) -> list[Game]:
    """Let a player play an episode of each row, all at once. Random numbers are the row's own."""
    games = {
        number: Game(row, random.Random(f"{seed}/{number}")) for number, row in enumerate(rows)
    }
    said = dict.fromkeys(games, "")
    for number, game in games.items():
        worlds.begin(number, game.row)
    finishing: set[int] = set()
    while not all(game.over for game in games.values()):
        answers = worlds.answers(PATIENCE)
        if not answers:
            raise WorldError(f"The environment has said nothing for {PATIENCE:g} s.")
        for number, answer in answers:
            game = games[number]
            if isinstance(answer, Fault):
                game.over, game.fault = True, answer.reason
            elif number in finishing:
                game.over, game.reward = True, game.reward + (answer.outcome or 0.0)
            elif _goes_on(game, said[number], answer, turns):
                said[number] = player(game.row, game.heard, game.stream)
                worlds.step(number, said[number])
            else:
                finishing.add(number)
                worlds.finish(number)
    return list(games.values())


def _goes_on(game: Game, said: str, answer: Answered, turns: int) -> bool:
    seen = answer.observation
    words = "\n".join(str(message.get("content", "")) for message in seen.messages)
    first = not game.heard
    game.heard.append((said, words))
    game.reward += seen.reward or 0.0
    return not seen.done and (first or bool(seen.messages)) and len(game.heard) <= turns


def try_environment(
    setup: WorldSetup,
    rows: Sequence[Mapping[str, Any]],
    oracle: Player | None = None,
    guesser: Player | None = None,
    turns: int = 8,
) -> TrialReport:
    """Play the rows by who knows and by who guesses, and say what is wrong.

    Built-in environments have players of their own; in others rows' answers are said, unless
    players are given.
    """
    name = setup.environment.partition("(")[0]
    own = PLAYERS.get(name) or players_of(rows)
    reach = DRAWN if name == "tictactoe" else 1.0
    oracle, guesser = oracle or own[0], guesser or own[1]
    worlds = open_worlds(setup)
    try:
        knows = play(worlds, rows, oracle, turns) if oracle else []
        guesses = play(worlds, rows, guesser, turns) if guesser else []
    finally:
        worlds.close()
    faults = tuple(dict.fromkeys(game.fault for game in [*knows, *guesses] if game.fault))
    best, by_chance = _mean(knows), _mean(guesses)
    said = max(([words for words, _ in game.heard[1:]] for game in guesses), key=len, default=[])
    problems = tuple(_problems(best, by_chance, faults, reach))
    return TrialReport(best, by_chance, faults, problems, tuple(said))


def _mean(games: Sequence[Game]) -> float | None:
    found = [game.reward for game in games if not game.fault]
    return sum(found) / len(found) if found else None


def _problems(
    best: float | None, by_chance: float | None, faults: Sequence[str], reach: float
) -> list[str]:
    found = [f"The environment fails: {why}." for why in faults]
    if best is not None and best < reach - FEW:
        found.append(
            f"Who knows the answer gets {best:.2f} on average, not {reach:g}: the task can't be "
            "won in the turns that it has, or its reward does not see a win."
        )
    if best is not None and by_chance is not None and by_chance > best - FEW:
        found.append(
            f"Who guesses gets {by_chance:.2f}, and who knows {best:.2f}: there is next to nothing "
            "to learn here."
        )
    return found


def shared_state(setup: WorldSetup, row: Mapping[str, Any], turns: Sequence[str]) -> str:
    """Return what one episode sees of another; "" if the same turns are answered alike.

    An episode alone is compared with two that take turns.
    """

    def spoken(_: Mapping[str, Any], heard: Heard, __: random.Random) -> str:
        return turns[len(heard) - 1]

    runs = []
    for count in (1, 2):
        worlds = open_worlds(setup)
        try:
            runs += play(worlds, [row] * count, spoken, len(turns))
        finally:
            worlds.close()
    alone, *others = runs
    for other in others:
        for at, (mine, its) in enumerate(zip(alone.heard, other.heard, strict=False)):
            if mine != its:
                return (
                    f"Answer {at} is {mine[1][:80]!r} to an episode alone, and {its[1][:80]!r} "
                    "with another beside it: they share something, or the environment draws "
                    "random numbers that do not come from the row. Keep what belongs to an "
                    "episode in the instance, and draw from the seed."
                )
    return ""


# --- who knows, and who guesses


def the_secret(row: Mapping[str, Any], heard: Heard, stream: random.Random) -> str:
    return str(row["secret"])


def any_number(row: Mapping[str, Any], heard: Heard, stream: random.Random) -> str:
    return str(stream.randint(0, 15))


def the_word(row: Mapping[str, Any], heard: Heard, stream: random.Random) -> str:
    return str(row["word"])


def any_word(row: Mapping[str, Any], heard: Heard, stream: random.Random) -> str:
    return "".join(stream.choice("etaoinshrdlu") for _ in range(5))


def plays_perfectly(row: Mapping[str, Any], heard: Heard, stream: random.Random) -> str:
    """Make a best move in tic-tac-toe, from the board that is shown."""
    board = "".join(heard[-1][1].split("\n")[:3])
    side = mover_of(board)
    aim = best(board, side)
    free = [at for at in range(9) if board[at] == "."]
    return str(next(at for at in free if worth(put(board, at, side), side) == aim) + 1)


def any_cell(row: Mapping[str, Any], heard: Heard, stream: random.Random) -> str:
    return str(stream.randint(1, 9))


def the_answer(row: Mapping[str, Any], heard: Heard, stream: random.Random) -> str:
    return f"The answer is {row['answer']}"


def any_answer(row: Mapping[str, Any], heard: Heard, stream: random.Random) -> str:
    return f"The answer is {stream.randint(0, 10**6)}"


def players_of(rows: Sequence[Mapping[str, Any]]) -> tuple[Player | None, Player | None]:
    """Return who says a row's answer, and who says another's; nobody where no row has one."""
    answers = sorted({str(row["answer"]) for row in rows if row.get("answer") is not None})
    if not answers:
        return None, None

    def own(row: Mapping[str, Any], heard: Heard, stream: random.Random) -> str:
        return str(row.get("answer"))

    def of_another(row: Mapping[str, Any], heard: Heard, stream: random.Random) -> str:
        others = [each for each in answers if each != str(row.get("answer"))]
        return stream.choice(others or ["?"])

    return own, of_another


def named_player(text: str) -> Player:
    """Return a player of a user: a function of the row, what was heard, and a random stream."""
    if ":" not in text:
        raise WorldError(f"{text!r} names no player. Write FILE.py:FUNCTION.")
    found = from_place(placed(text, "player", ()))
    if isinstance(found, type) or not callable(found):
        raise WorldError(
            f"The player {text} is no function. Write def NAME(row, heard, stream), which returns "
            "a turn."
        )
    return checked_player(text, found)


def checked_player(name: str, found: Callable[..., Any]) -> Player:
    """Return a player whose faults are told as its own."""

    def player(row: Mapping[str, Any], heard: Heard, stream: random.Random) -> str:
        try:
            said = found(row, heard, stream)
        except Exception as error:  # the boundary to the user's code
            raise WorldError(f"The player {name} raised {told(error)}.") from None
        if not isinstance(said, str):
            raise WorldError(f"The player {name} returned {said!r}, and a turn is a text.")
        return said

    return player


PLAYERS: dict[str, tuple[Player, Player]] = {
    "guess": (the_secret, any_number),
    "tictactoe": (plays_perfectly, any_cell),
    "tries": (the_answer, any_answer),
    "wordle": (the_word, any_word),
}
