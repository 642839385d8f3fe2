"""The part of `groupwise init` that is about turns: games, tools, and environments of one's own."""

from __future__ import annotations

from groupwise.envs.builtin import TOOLS
from groupwise.errors import nearest

NO_TURNS = "none"
GAMES = {"guess": 4, "wordle": 6, "tictactoe": 5}  # and the turns that they take
TRIES = "tries"
OWN_TURNS, TOOL_TURNS, TRY_TURNS = 8, 4, 5  # at most, to begin with


def line(setting: str, comment: str) -> str:
    return f"{setting:<34} # {comment}"


def rewards(answer: str) -> bool:
    """Tell whether what answers the policy rewards it, too."""
    return answer != NO_TURNS and not _is_tool(answer)


def refused_turns(answer: str) -> str:
    """Return what is wrong with an answer; "" if it can be."""
    known = [NO_TURNS, *TOOLS, *GAMES, TRIES]
    if ".py:" in answer or answer.partition("(")[0] in known:
        return ""
    return f"Nothing called {answer!r} answers a policy. {nearest(answer, known)}"


def files_of(answer: str) -> list[str]:
    return [answer.partition("(")[0].rpartition(":")[0]] if ".py:" in answer else []


def turn_lines(answer: str, *, tiny: bool) -> list[str]:
    """Return the table [turns]; nothing without turns."""
    from groupwise.config.writing import toml

    if answer == NO_TURNS:
        return []
    found = ["", "[turns]"]
    if _is_tool(answer):
        found.append(line(f"tools = {toml([answer])}", "functions that it may call"))
        most = TOOL_TURNS
    else:
        found.append(f"environment = {toml(answer)}")
        most = GAMES.get(answer, TRY_TURNS if answer == TRIES else OWN_TURNS)
    found.append(line(f"max = {most}", "turns of the policy; docs/turns.md has the other limits"))
    if tiny:
        found.append(line(f"template = {toml(PLAIN)}", "who speaks, in letters"))
    if tiny and answer in GAMES:
        found += ["", "[tiny]", line("cold_start_accuracy = 1.0", "the steps end it"),
                  "cold_start_steps = 300"]  # fmt: skip
    return found


PLAIN = "[{role}]{text}\n"


def _is_tool(answer: str) -> bool:
    return answer.partition("(")[0] in TOOLS
