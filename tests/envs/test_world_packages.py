"""Environments of other packages as they are, where the packages are installed.

Their pins clash, so each may have a virtual environment of its own; what is missing is said.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from groupwise.envs.opening import WorldSetup, open_worlds
from groupwise.envs.worlds import Answered, Fault
from groupwise.graders.pool import START_SECONDS

pytestmark = pytest.mark.slow
READ = f"{Path(__file__).resolve().parents[1] / 'support' / 'toy_worlds.py'}:read"


def episode(
    file: Path, code: str, name: str, row: dict[str, Any], turns: Sequence[str], **settings: Any
) -> tuple[list[str], list[float | None], list[bool], float | None]:
    """Play an episode in a worker; return what was said, rewards, ends and the outcome."""
    file.write_text(code)
    setup = WorldSetup(f"{file}:{name}" if name else "", reader=READ, workers=1, **settings)
    worlds = open_worlds(setup)

    def answer() -> Answered:
        ((_, found),) = worlds.answers(START_SECONDS)
        assert not isinstance(found, Fault), found.reason
        return found

    try:
        worlds.begin(1, row)
        answers = [answer()]
        for text in turns:
            worlds.step(1, text)
            answers.append(answer())
        worlds.finish(1)
        outcome = answer().outcome
    finally:
        worlds.close()
    seen = [each.observation for each in answers]
    said = ["\n".join(str(m["content"]) for m in each.messages) for each in seen]
    return said, [each.reward for each in seen[1:]], [each.done for each in seen[1:]], outcome


def test_gymnasium(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    code = (
        "import gymnasium\n"
        "def lake():\n"
        "    desc = ['SF', 'FG']\n"
        "    return gymnasium.make('FrozenLake-v1', is_slippery=False, desc=desc)\n"
    )
    said, rewards, done, _ = episode(tmp_path / "a.py", code, "lake", {}, ["2", "what", "go 1"])
    assert said == ["0", "1", "'what' is no action: end with a number from 0 to 3.", "3"]
    assert (rewards, done) == ([0.0, None, 1.0], [False, False, True])


def test_skyrl_gym(tmp_path: Path) -> None:
    pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed")
    code = (
        "import skyrl_gym\nfrom omegaconf import DictConfig\n"
        "def env(row):\n"
        "    extras = {'reward_spec': {'ground_truth': row['answer']}, 'max_turns': 3}\n"
        "    return skyrl_gym.make('gsm8k_multi_turn', env_config=DictConfig({}), extras=extras)\n"
    )
    row = {"prompt": "What is 6 times 3?", "answer": "18"}
    said, rewards, done, _ = episode(
        tmp_path / "a.py", code, "env", row, ["I think 17. #### 17", "No: #### 18"]
    )
    assert said[0] == "" and said[1] and done[-1] and rewards[-1] == 1.0
    assert rewards[0] is not None and rewards[0] < 1.0


def test_textarena(tmp_path: Path) -> None:
    pytest.importorskip("textarena", reason="textarena is not installed")
    code = (
        "import random\nimport textarena\n"
        "def env(row): return textarena.make('GuessTheNumber-v0')\n"
    )
    turns = [f"[{number}]" for number in range(1, 6)]
    said, rewards, done, _ = episode(tmp_path / "a.py", code, "env", {"seed": 3}, turns)
    again = episode(tmp_path / "a.py", code, "env", {"seed": 3}, turns)[0]
    assert said == again and "guess" in said[0].lower()
    assert all("[1]" not in words for words in said[2:])  # nothing is told twice
    assert not any(done) or rewards[-1] is not None


def test_gem(tmp_path: Path) -> None:
    pytest.importorskip("gem", reason="gem-llm is not installed")
    code = (
        "from gem.envs.game_env.guess_the_number import GuessTheNumberEnv\n"
        "def env(): return GuessTheNumberEnv(min_number=1, max_number=8, max_turns=5)\n"
    )
    turns = [rf"\boxed{{{number}}}" for number in (4, 4)]
    said, rewards, _, _ = episode(tmp_path / "a.py", code, "env", {"seed": 5}, turns)
    again = episode(tmp_path / "a.py", code, "env", {"seed": 5}, turns)[0]
    assert said == again and "number" in said[0].lower() and rewards[0] is not None


def test_verifiers(tmp_path: Path) -> None:
    verifiers = pytest.importorskip("verifiers", reason="verifiers is not installed")
    if not hasattr(verifiers, "ToolEnv"):
        pytest.skip("this verifiers has no ToolEnv: versions up to 0.1.14 do")
    code = """
import verifiers as vf
from datasets import Dataset
def add(a: int, b: int) -> int:
    \"\"\"Add two numbers.

    Args:
        a: One.
        b: The other.
    \"\"\"
    return a + b
def right(completion, answer):
    return float(answer in completion[-1]["content"])
def load_environment():
    data = Dataset.from_list([{"question": "2+3?", "answer": "5"}])
    return vf.ToolEnv(tools=[add], dataset=data, rubric=vf.Rubric(funcs=[right]), max_turns=4)
"""
    row = {"prompt": [{"role": "user", "content": "2+3?"}], "answer": "5"}
    turns = ['call add {"a": 2, "b": 3}', "call add {", "It is 5."]
    said, _, done, outcome = episode(tmp_path / "a.py", code, "load_environment", row, turns)
    assert said[:3] == ["", "5", "Error: the arguments are no JSON"]
    assert (done, outcome) == ([False, False, True], 1.0)


def test_openenv(tmp_path: Path) -> None:
    pytest.importorskip("openenv", reason="openenv is not installed")
    code = """
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
class Say(Action):
    message: str
class Heard(Observation):
    text: str = ""
class Echo(Environment):
    def reset(self, seed=None, episode_id=None, **rest): return Heard(text="speak", reward=0.0)
    def step(self, action: Say, timeout_s=None, **rest):
        return Heard(text=action.message[::-1], reward=1.0, done=action.message == "end")
    @property
    def state(self): return State()
"""
    found = episode(tmp_path / "a.py", code, "Echo", {}, ["abc", "end"])
    assert found[:3] == (["speak", "cba", "dne"], [1.0, 1.0], [False, True])


def test_an_openenv_client(tmp_path: Path) -> None:
    """A client of a server that runs beside, over a WebSocket."""
    pytest.importorskip("openenv", reason="openenv is not installed")
    server = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_app
from mine import Echo, Say, Heard
app = create_app(Echo, Say, Heard)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""
    code = """
import os, subprocess, sys, time, urllib.request
from pathlib import Path
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.env_client import EnvClient
from openenv.core.client_types import StepResult
class Say(Action):
    message: str
class Heard(Observation):
    text: str = ""
class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def reset(self, seed=None, episode_id=None, **rest): return Heard(text="speak", reward=0.0)
    def step(self, action: Say, timeout_s=None, **rest):
        return Heard(text=action.message[::-1], reward=1.0, done=action.message == "end")
    @property
    def state(self): return State()
class Client(EnvClient[Say, Heard, State]):
    def __init__(self, port): super().__init__(base_url=f"http://127.0.0.1:{port}")
    def _step_payload(self, action): return action.model_dump()
    def _parse_result(self, payload):
        seen = Heard(**payload["observation"])
        done = payload.get("done", False)
        return StepResult(observation=seen, reward=payload.get("reward"), done=done)
    def _parse_state(self, payload): return State(**payload)
"""
    import socket
    import subprocess
    import time
    import urllib.request

    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "server.py").write_text(server)
    running = subprocess.Popen([sys.executable, "server.py", str(port)], cwd=tmp_path)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.1)
        found = episode(tmp_path / "mine.py", code, f"Client(port={port})", {}, ["abc", "end"])
    finally:
        running.kill()
        running.wait()
    assert found[:3] == (["speak", "cba", "dne"], [1.0, 1.0], [False, True])


def test_tinker_cookbook(tmp_path: Path) -> None:
    pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed")
    code = """
from tinker_cookbook.recipes.multiplayer_rl.guess_number.env import GuessNumberEnv
class Env(GuessNumberEnv):
    def __init__(self, secret, renderer): super().__init__(secret, renderer)
"""
    turns = ["Guess: 100", "Guess: many", "Guess: 700"]
    said, rewards, done, _ = episode(tmp_path / "a.py", code, "Env", {"secret": 700}, turns)
    assert said[0].startswith("\\nYour job" if said[0].startswith("\\n") else "Your job")
    assert said[1] == "Too low" and said[2].startswith("Failed to parse")
    assert (rewards, done) == ([0.0, -1.0, 1.0], [False, False, True])


def test_an_mcp_server_of_the_official_package(tmp_path: Path) -> None:
    mcp = pytest.importorskip("mcp", reason="mcp is not installed")
    new = hasattr(__import__("mcp.server", fromlist=["x"]), "MCPServer")
    name, place = ("MCPServer", "mcp.server") if new else ("FastMCP", "mcp.server.fastmcp")
    assert mcp
    (tmp_path / "server.py").write_text(
        f"from {place} import {name}\nserver = {name}('toy')\n"
        "@server.tool()\ndef add(a: int, b: int) -> int:\n    'Add.'\n    return a + b\n"
        "@server.tool()\ndef fail() -> str:\n    'Fail.'\n    raise ValueError('no')\n"
        "server.run('stdio')\n"
    )
    command = f"mcp:{sys.executable} {tmp_path / 'server.py'}"
    turns = ['call add {"a": 2, "b": 3}', "call fail {}", "done"]
    said, *_ = episode(tmp_path / "a.py", "", "", {}, turns, tools=(command,))
    assert said[1] == "5" and said[2].startswith("Error: ") and said[3] == ""


OPENAI = """
import json
from openai import BadRequestError, OpenAI
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
def solve(endpoint, question):
    client = OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    assert [model.id for model in client.models.list()] == ["policy"]
    messages = [{"role": "user", "content": question}]
    def ask(**more):
        return client.chat.completions.create(
            model=endpoint.model, messages=messages, tools=[ADD], **more
        ).choices[0]
    try:
        ask(n=2)
    except BadRequestError as error:
        assert "n must be 1" in str(error)
    asked = ask(temperature=0.7)
    assert asked.finish_reason == "tool_calls"
    messages.append(asked.message.model_dump())  # with all its nulls
    (call,) = asked.message.tool_calls
    total = str(sum(json.loads(call.function.arguments).values()))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": total})
    messages.append(ask().message)  # the object itself
    messages.append({"role": "user", "content": [{"type": "text", "text": "sure?"}]})
    return float(ask().message.content == "yes")
"""


def test_the_client_of_openai_asks_the_policy(tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="openai is not installed")
    turns = ['call add {"a": 2, "b": 3}', " five\n", "yes"]
    row = {"question": "2+3"}
    said, rewards, done, outcome = episode(tmp_path / "a.py", OPENAI, "solve", row, turns)
    assert said == ["2+3", "5", "sure?", ""]
    assert (rewards, done, outcome) == ([None] * 3, [False, False, True], 1.0)
