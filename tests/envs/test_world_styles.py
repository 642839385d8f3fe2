"""One toy environment in every style gives the same episode; and how styles are told apart."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from groupwise.envs.answering import Alone
from groupwise.envs.environment import Environment
from groupwise.envs.loading import Maker
from groupwise.envs.opening import WorldSetup, check_worlds, found, open_worlds
from groupwise.errors import WorldError

SUPPORT = Path(__file__).resolve().parents[1] / "support"
TOYS = SUPPORT / "toy_worlds.py"
READ = f"{TOYS}:read"
ROW = {"prompt": "Find it.", "secret": 7, "seed": 7, "answer": "7"}
STYLES = [
    "House",
    "HouseDict",
    "HouseMessages",
    "AsyncHouse",
    "Own",
    "SkyStyle",
    "GymStyle",
    "GymNumbers",
    "ArenaStyle",
    "OpenStyle",
    "AsyncOpenStyle",
    "TinkerIds",
    "TinkerMessages",
    "load_environment",
    "program",
    "async_program",
]
SILENT_AT_THE_END = ("ArenaStyle", "load_environment", "program", "async_program")


def made(name: str, **settings: Any) -> Environment:
    text = f"{TOYS}:{name}" if name else ""
    return Alone(Maker(found(WorldSetup(text, reader=READ, **settings))).make())


def played(world: Environment, turns: list[str]) -> tuple[list[str], float, list[bool]]:
    """Return what was said, the whole reward, and after which turns it was over."""
    first = world.reset(ROW)
    said = [message["content"] for message in first.messages]
    total, over = 0.0, []
    for text in turns:
        answer = world.step(text)
        said += [message["content"] for message in answer.messages]
        total += answer.reward or 0.0
        over.append(answer.done)
    total += world.outcome() or 0.0
    world.close()
    return [text for text in said if text], total, over


@pytest.mark.parametrize("style", STYLES)
def test_every_style_plays_the_same_game(style: str) -> None:
    first = ["guess"] if style != "load_environment" else []  # there the row's prompt says it all
    assert played(made(style), ["3", "9", "7"]) == ([*first, "higher", "lower"], 1.0, [0, 0, 1])
    said, reward, over = played(made(style), ["3", "9", "1"])
    last = [] if style in SILENT_AT_THE_END or "Tinker" in style else ["higher"]
    assert (said, reward, over[-1]) == ([*first, "higher", "lower", *last], 0.0, True)


def test_methods_as_tools_play_the_same_game() -> None:
    world = made("ToolStyle")
    assert [each["function"]["name"] for each in world.tools] == ["try_number"]
    turns = [f'call try_number {{"number": {n}}}' for n in (3, 9, 7)]
    assert played(world, turns) == (["guess", "higher", "lower"], 1.0, [False] * 3)


def test_a_row_may_say_which_environment_is_its_own() -> None:
    world = made("both")
    world.reset({**ROW, "environment": "other"})
    assert world.step("3").messages[0]["content"] == "higher"
    with pytest.raises(WorldError, match=r"environment is 'gane'.*Did you mean 'game'"):
        made("both").reset({**ROW, "environment": "gane"})


def test_a_state_is_named() -> None:
    """Guess names what is known: the same after other ways to know it."""
    world = Alone(Maker(WorldSetup("guess")).make())
    states = []
    for turns in (["3", "12"], ["12", "3"], ["3", "5"]):
        world.reset({"secret": 8})
        for turn in turns:
            world.step(turn)
        states.append(world.state())
    assert states == ["4-11/2", "4-11/2", "6-15/2"]


def test_the_beginning_is_the_rows() -> None:
    """A column `seed` is the seed; else it is made of the row, and is the same for its samples."""
    world = made("GymStyle")
    world.reset({"seed": 4})
    assert world.step("4").reward == 1.0
    from groupwise.envs.answering import seed_of

    assert seed_of({"a": 1, "b": 2}) == seed_of({"b": 2, "a": 1}) != seed_of({"a": 1, "b": 3})


def test_a_number_that_is_no_action_is_said() -> None:
    world = made("GymNumbers")
    world.reset(ROW)
    assert "end with a number from 0 to 9" in world.step("eleven 11").messages[0]["content"]
    assert world.step("my move: 7").done


def test_an_action_that_is_no_record_is_said() -> None:
    world = made("OpenStyle")
    world.reset(ROW)
    assert "this is no Move" in world.step("seven").messages[0]["content"]
    assert world.step(" 7 ").done


def test_columns_that_are_missing_are_said() -> None:
    with pytest.raises(WorldError, match=r"asks for 'secret', which is no column.*has: seed"):
        made("House").reset({"seed": 3})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NoShape", "no shape of an environment that is known"),
        ("Hause", "has no 'Hause'. Did you mean 'House'"),
        ("STYLES", "has no 'STYLES'"),
        ("House(size=3)", "can't be made with the options"),
        ("NOTES", "is an object of list, and each episode needs one of its own"),
    ],
)
def test_what_is_no_environment_is_refused(name: str, words: str) -> None:
    with pytest.raises(WorldError, match=words.replace("(", r"\(")):
        made(name)


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        (WorldSetup(), "neither an environment nor a tool"),
        (WorldSetup("gues"), "no built-in environment 'gues'. Did you mean 'guess'"),
        (WorldSetup("nowhere.py:Env"), "no file 'nowhere.py'"),
        (WorldSetup("guess", timeout=0), "Make the limit positive"),
        (WorldSetup("", ("calculator",), {"a": 1}), "are an environment's"),
        (WorldSetup("", ("abacus",)), "no built-in tool 'abacus'. Known: calculator"),
        (WorldSetup(f"{TOYS}:a b"), "names nothing behind its colon"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_loaded(
    setup: WorldSetup, words: str
) -> None:
    with pytest.raises(WorldError, match=words):
        found(setup)


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        (("untyped",), "argument a of the tool untyped has no type"),
        (("silent",), "silent has no docstring"),
        (("Bad",), "is no function"),
        (("add(b=3)",), "is a function, and {'b': 3} are options"),
        (("add", "add"), "Two tools are called 'add'"),
    ],
)
def test_tools_that_say_too_little_are_refused(tools: tuple[str, ...], words: str) -> None:
    with pytest.raises(WorldError, match=words):
        made("", tools=tuple(f"{TOYS}:{each}" for each in tools))


def test_tools_beside_an_environment_that_answers_itself_are_refused() -> None:
    with pytest.raises(WorldError, match="would never be called"):
        made("House", tools=(f"{TOYS}:add",))


def test_tools_are_checked_without_a_reader_and_not_opened() -> None:
    setup = WorldSetup("", ("calculator",))
    assert [each["function"]["name"] for each in check_worlds(setup)] == ["calculator"]
    with pytest.raises(WorldError, match="nothing says how calls of them are written"):
        open_worlds(setup)


def test_a_shape_that_answers_otherwise_says_what_was_expected(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class Five:\n    def reset(self, secret): return 'x'\n"
        "    def step(self, text): return 'x', 0.0, False, False, {}\n"
        "class Three:\n    def reset(self, seed=None): return 'x', {}\n"
        "    def step(self, text): return 'x', 0.0, False\n"
        "class Changes:\n"
        "    def init(self, prompt): return [{'role': 'user', 'content': 'no'}], {}\n"
        "    def step(self, text): return 'x'\n"
    )
    for name, words in (("Five", "returned tuple"), ("Three", "returns observation, reward, term")):
        world = Alone(Maker(found(WorldSetup(f"{file}:{name}"))).make())
        world.reset(ROW)
        with pytest.raises(WorldError, match=words):
            world.step("3")
    world = Alone(Maker(found(WorldSetup(f"{file}:Changes"))).make())
    with pytest.raises(WorldError, match="changes the prompt"):
        world.reset(ROW)


def test_an_mcp_server_lists_its_tools_and_is_the_episodes_own() -> None:
    command = f"mcp:{sys.executable} {SUPPORT / 'mcp_toy.py'}"
    one, two = (made("", tools=(command,)) for _ in range(2))
    three = made("", tools=(command,), timeout=0.5)
    for world in (one, two, three):
        world.reset(ROW)
    assert [each["function"]["name"] for each in one.tools] == ["count", "fail"]
    said = [one.step('call count {"word": "a"}') for _ in range(2)]
    assert [each.messages[0]["content"] for each in said] == ["1: a", "2: a"]
    assert two.step('call count {"word": "b"}').messages[0]["content"] == "1: b"
    failed = one.step("call fail {}")
    assert (failed.calls[0].status, failed.messages[0]["content"]) == ("failed", "Error: it failed")
    assert two.step('call count {"word": "end"}').calls[0].status == "failed"
    assert "has ended" in two.step("call count {}").messages[0]["content"]
    assert three.step('call count {"word": "hang"}').calls[0].status == "timeout"
    for world in (one, two, three):
        world.close()


def test_an_mcp_server_that_does_not_come_up_is_refused() -> None:
    for command in ("mcp:no-such-program-at-all", "mcp:true"):
        with pytest.raises(WorldError, match=r"can't be started|does not answer"):
            made("", tools=(command,)).reset(ROW)
