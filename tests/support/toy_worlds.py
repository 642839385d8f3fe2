"""One toy in every style: find a number from 0 to 9 in three guesses. And worlds that misbehave.

The secret is a column of the row, or the row's seed. The answers are "higher" and "lower", the
reward is 1 for the right one. The beginning is "guess".
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

from groupwise.envs.environment import Environment, Observation
from groupwise.envs.tool_calls import Asked, Misread


def read(text: str) -> list[Asked | Misread]:
    """Read calls such as `call guess {"number": 3}`, one a line."""
    found: list[Asked | Misread] = []
    for line in text.splitlines():
        if line.startswith("call "):
            _, name, arguments = line.split(" ", 2)
            try:
                found.append(Asked(name, json.loads(arguments)))
            except json.JSONDecodeError:
                found.append(Misread("the arguments are no JSON"))
    return found


class Game:
    def begin(self, secret: int) -> None:
        self.secret, self.left = secret, 3

    def guess(self, text: str | int) -> tuple[str, float, bool]:
        self.left -= 1
        number = int(text)
        if number == self.secret:
            return "", 1.0, True
        return ("higher" if number < self.secret else "lower"), 0.0, self.left == 0


class House(Game):
    def reset(self, secret: int) -> str:
        self.begin(secret)
        return "guess"

    def step(self, text: str) -> Any:
        return self.guess(text)


class HouseDict(House):
    def step(self, text: str) -> Any:
        said, reward, done = self.guess(text)
        return {"text": said, "reward": reward, "done": done}


class HouseMessages(House):
    def reset(self, secret: int, **row: Any) -> Any:
        self.begin(secret)
        return [{"role": "user", "content": "guess"}]

    def step(self, text: str) -> Any:
        said, reward, done = self.guess(text)
        messages = [{"role": "user", "content": said}] if said else []
        return {"messages": messages, "reward": reward, "done": done}


class AsyncHouse(Game):
    async def reset(self, secret: int) -> str:
        self.begin(secret)
        return "guess"

    async def step(self, text: str) -> Any:
        await asyncio.sleep(0)
        return self.guess(text)


def ask(endpoint: Any, messages: list[Any], **more: Any) -> Any:
    """Ask the policy as any client of OpenAI's protocol does, and return its message."""
    body = {"model": endpoint.model, "messages": messages, **more}
    asked = urllib.request.Request(
        f"{endpoint.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {endpoint.api_key}"},
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]


def program(endpoint: Any, secret: int) -> float:
    game = Game()
    game.begin(secret)
    messages, said, over = [], "guess", False
    while not over:
        messages.append({"role": "user", "content": said})
        messages.append(ask(endpoint, messages))
        said, reward, over = game.guess(messages[-1]["content"])
    return reward


async def async_program(endpoint: Any, secret: int) -> float:
    return await asyncio.to_thread(program, endpoint, secret)


class Own(Environment):
    def reset(self, row: Any) -> Observation:
        self.game = Game()
        self.game.begin(row["secret"])
        return Observation(({"role": "user", "content": "guess"},))

    def step(self, text: str) -> Observation:
        said, reward, done = self.game.guess(text)
        return Observation(({"role": "user", "content": said},) if said else (), reward, done)


class SkyStyle(Game):
    def __init__(self, secret: int = 7) -> None:
        self.begin(secret)

    def init(self, prompt: list[Any]) -> Any:
        return [*prompt, {"role": "user", "content": "guess"}], {}

    def step(self, action: str) -> Any:
        said, reward, done = self.guess(action)
        messages = [{"role": "user", "content": said}] if said else []
        return {"observations": messages, "reward": reward, "done": done, "metadata": {}}


class GymStyle(Game):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.begin(seed or 0)
        return "guess", {}

    def step(self, action: str) -> Any:
        said, reward, done = self.guess(action)
        return said, reward, done, False, {}


class Numbered:
    n, start = 10, 0


class GymNumbers(GymStyle):
    action_space = Numbered()

    def step(self, action: int) -> Any:
        assert isinstance(action, int)
        return super().step(action)  # type: ignore[arg-type]


class ArenaStyle(Game):
    def reset(self, num_players: int, seed: int | None = None) -> None:
        assert num_players == 1
        self.begin(seed or 0)
        self.said = [(-1, "guess", "PROMPT")]
        self.reward = 0.0

    def get_observation(self) -> Any:
        said, self.said = self.said, []
        return 0, said

    def step(self, action: str) -> Any:
        said, self.reward, done = self.guess(action)
        self.said = [(0, action, "PLAYER_ACTION"), (-1, said, "GAME_MESSAGE")]
        return done, {}

    def close(self) -> Any:
        return {0: self.reward}, {0: {}}


@dataclass
class Move:
    number: int
    remark: str = ""


@dataclass
class Seen:
    text: str
    reward: float | None = None
    done: bool = False


@dataclass
class Result:
    observation: Seen
    reward: float | None = None
    done: bool = False


class OpenStyle(Game):
    def __init__(self, secret: int = 7) -> None:
        self.begin(secret)

    def reset(self) -> Result:
        return Result(Seen("guess"))

    def step(self, action: Move) -> Result:
        said, reward, done = self.guess(action.number)
        return Result(Seen(said), reward, done)

    def state(self) -> Any:
        return {"left": self.left}


class AsyncOpenStyle(Game):
    def __init__(self, secret: int = 7) -> None:
        self.begin(secret)

    async def reset(self) -> Seen:
        return Seen("guess")

    async def step(self, action: Move) -> Seen:
        return Seen(*self.guess(action.number))

    async def state(self) -> Any:
        return {}


@dataclass
class TinkerStep:
    reward: float
    episode_done: bool
    next_observation: Any = None
    next_messages: Any = None


class TinkerIds(Game):
    """It speaks ids: what its renderer makes of messages."""

    def __init__(self, secret: int, renderer: Any) -> None:
        self.begin(secret)
        self.renderer = renderer
        self.said: list[Any] = [{"role": "user", "content": "guess"}]

    async def initial_observation(self) -> Any:
        return self.renderer.build_generation_prompt(self.said), self.renderer.get_stop_sequences()

    async def step(self, action: Any, *, extra: Any = None) -> TinkerStep:
        message, _ = self.renderer.parse_response(action)
        said, reward, done = self.guess(message["content"])
        self.said += [message, {"role": "user", "content": said}]
        return TinkerStep(reward, done, self.renderer.build_generation_prompt(self.said))


class TinkerMessages(Game):
    def __init__(self, secret: int) -> None:
        self.begin(secret)
        self.said: list[Any] = [{"role": "user", "content": "guess"}]

    async def initial_observation(self) -> Any:
        return list(self.said)

    async def step(self, message: Any) -> TinkerStep:
        said, reward, done = self.guess(message["content"])
        self.said += [message, {"role": "user", "content": said}]
        return TinkerStep(reward, done, next_messages=list(self.said))


class Rubric:
    def __init__(self, funcs: list[Any], weights: list[float]) -> None:
        self.funcs, self.weights = funcs, weights


def right(completion: Any, answer: str, state: Any) -> float:
    """Reward as verifiers do it: by the whole conversation at the end."""
    return float(any(m["role"] == "assistant" and m["content"] == answer for m in completion))


def measured(state: Any) -> float:
    raise RuntimeError("of weight 0: it is not called")


class MultiTurnEnv:
    oai_tools: Any = None

    def __init__(self) -> None:
        self.rubric = Rubric([right, measured], [1.0, 0.0])

    async def setup_state(self, state: Any) -> Any:
        state["game"] = Game()
        state["game"].begin(int(state["answer"]))
        state["won"] = False
        return state

    async def is_completed(self, state: Any) -> bool:
        steps = state["trajectory"]
        last = steps[-1]["completion"][-1]["content"] if steps else ""
        return last == state["answer"] or len(steps) >= 3

    async def add_trajectory_step(self, state: Any, step: Any) -> None:
        state["trajectory"].append(step)

    async def env_response(self, messages: Any, state: Any) -> Any:
        said, _, _ = state["game"].guess(messages[-1]["content"])
        return [{"role": "user", "content": said}]


def load_environment() -> MultiTurnEnv:
    return MultiTurnEnv()


class ToolStyle:
    """TRL's: public methods are tools, and the reward comes at the end."""

    def reset(self, secret: int) -> str:
        self._game = Game()
        self._game.begin(secret)
        self.reward = 0.0
        return "guess"

    def try_number(self, number: int) -> str:
        """Try a number.

        Args:
            number: From 0 to 9.
        """
        said, self.reward, _ = self._game.guess(number)
        return said

    def get_reward(self) -> float:
        return self.reward


both = {"game": House, "other": HouseDict}


# --- tools


def add(a: int, b: int = 3) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def nap(seconds: float) -> str:
    """Sleep for a while."""
    await asyncio.sleep(seconds)
    return "awake"


def hang() -> str:
    """Never return."""
    while True:
        time.sleep(1)


async def hang_async() -> str:
    """Never return, and wait."""
    await asyncio.sleep(10_000)
    return ""


async def block() -> str:
    """Never return, and let nobody else on."""
    return hang()


def broken() -> str:
    """Raise."""
    raise KeyError("no such thing")


def leaves() -> str:
    """Leave."""
    raise SystemExit(3)


def flood() -> str:
    """Say far too much."""
    return "a" * 1_000_000 + "z" * 1_000_000


def fork() -> str:
    """Split in two."""
    return "child" if os.fork() == 0 else "parent"


NOTES: list[str] = []


def note(word: str) -> str:
    """Remember a word, in a place that all share, and say all that were remembered."""
    NOTES.append(word)
    return " ".join(NOTES)


async def note_async(word: str) -> str:
    """Remember a word as `note` does."""
    return note(word)


# --- worlds that misbehave


class Bad:
    def reset(self, **row: Any) -> str:
        self.row = row
        return "begin"

    def step(self, text: str) -> Any:
        if text == "hang":
            hang()
        if text == "raise":
            raise ValueError("no")
        if text == "die":
            os._exit(7)
        if text == "memory":
            return "x" * 10**12
        if text == "flood":
            return flood()
        if text == "fork":
            return fork()
        if text == "daemon":
            return str(subprocess.Popen(["sleep", "10000"], start_new_session=True).pid)
        if text == "random":
            return str(random.random())
        if text == "odd":
            return 3.5
        if text == "nan":
            return "text", float("nan"), False
        return f"heard {text}"

    def get_reward(self) -> float:
        return 0.25


class Shared:
    """All instances have one list."""

    seen: list[str] = []  # noqa: RUF012

    async def reset(self, **row: Any) -> None:
        return None

    async def step(self, text: str) -> str:
        self.seen.append(text)
        return " ".join(self.seen)


class NoShape:
    def play(self) -> None: ...


def untyped(a):  # type: ignore[no-untyped-def]
    """Take anything."""
    return a


def silent(a: int) -> int:
    return a
