"""Environments of several turns of the `verifiers` kind: `MultiTurnEnv` and `ToolEnv`.

They are asked as their own rollout does: `setup_state`, then `env_response` to each turn, until
`is_completed`. Their rubric's functions are called at the end; one that raises is an error, and
not a 0 as there. Functions of weight 0 measure, and are not called.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from groupwise.envs.answering import (
    AsyncEnvironment,
    chosen,
    class_names,
    has,
    messages_of,
    reward_of,
    settle,
)
from groupwise.envs.environment import Call, Observation
from groupwise.envs.tool_calls import Asked, CallReader, Misread
from groupwise.errors import WorldError
from groupwise.graders.environments import pieces_of


class Verifiers(AsyncEnvironment):
    """An environment that many episodes share, each with a state of its own."""

    def __init__(self, inner: Any, reader: CallReader | None, parallel_calls: int) -> None:
        self.inner, self.reader, self.parallel_calls = inner, reader, parallel_calls
        self.tools = tuple(getattr(inner, "oai_tools", None) or ())
        self.state_of: Any = {}
        self.known: dict[str, Any] = {}  # of the row, for functions of the rubric
        self.prompt: list[Any] = []
        self.messages: list[Any] = []

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self.prompt = [dict(message) for message in messages_of(row.get("prompt"))]
        self.messages = list(self.prompt)
        given = {"prompt": self.prompt, "answer": "", "task": "", "info": {}, "example_id": 0}
        self.known = {**given, **row, "prompt": self.prompt}
        made = await self._begun(dict(self.known))
        self.state_of = (await settle(self.inner.setup_state(made))) or made
        return Observation()

    async def _begun(self, known: dict[str, Any]) -> Any:
        begin = getattr(self.inner, "init_state", None)
        if begin is None or "input" not in inspect.signature(begin).parameters:
            return {**known, "responses": [], "turn": 0, "completion": [], "trajectory": []}
        own = {key: known[key] for key in ("prompt", "answer", "task", "info", "example_id")}
        return await settle(begin(input={**known, **own}, client=None, model=""))

    async def step(self, text: str) -> Observation:
        turn: dict[str, Any] = {"role": "assistant", "content": text}
        asked = self.reader(text) if self.reader and hasattr(self.inner, "tool_map") else []
        calls, wrong = self._calls(asked)
        if calls:
            turn["tool_calls"] = calls
        await self._add(turn)
        known = tuple(_call(each, at < self.parallel_calls) for at, each in enumerate(asked))
        if wrong and not calls:
            return Observation(tuple(wrong), calls=known)
        if await self._is_over():
            return Observation(done=True, calls=known)
        found = await settle(self.inner.env_response(self.messages, self.state_of))
        said = messages_of(found[0] if isinstance(found, tuple) else found)
        self.state_of = found[1] if isinstance(found, tuple) else self.state_of
        self.messages += [dict(message) for message in said]
        over = self.state_of.get("final_env_response") is not None or await self._is_over()
        return Observation((*said, *wrong), done=over, calls=known)

    def _calls(self, asked: list[Asked | Misread]) -> tuple[list[Any], list[Any]]:
        """Return the calls as the environment reads them, and what is said of the others."""
        calls: list[Any] = []
        wrong: list[Any] = []
        for at, each in enumerate(asked):
            if isinstance(each, Misread):
                wrong.append({"role": "tool", "content": f"Error: {each.why}"})
            elif at >= self.parallel_calls:
                said = f"Error: not called. At most {self.parallel_calls} calls in a turn."
                wrong.append({"role": "tool", "content": said})
            else:
                written = {"name": each.name, "arguments": json.dumps(dict(each.arguments))}
                calls.append({"id": f"call_{at}", "type": "function", "function": written})
        return calls, wrong

    async def _add(self, turn: dict[str, Any]) -> None:
        step = {
            "prompt": list(self.messages),
            "completion": [turn],
            "response": None,
            "tokens": None,
            "reward": None,
            "advantage": None,
            "is_truncated": False,
            "trajectory_id": self.state_of.get("trajectory_id"),
            "extras": {},
        }
        self.messages.append(turn)
        self.state_of["completion"] = self.messages[len(self.prompt) :]
        if has(self.inner, "add_trajectory_step"):
            await settle(self.inner.add_trajectory_step(self.state_of, step))
        else:
            self.state_of["responses"].append(None)
            self.state_of["turn"] += 1

    async def _is_over(self) -> bool:
        ask = self.inner.is_completed
        both = "messages" in inspect.signature(ask).parameters
        return bool(await settle(ask(*([self.messages] if both else []), self.state_of)))

    async def outcome(self) -> float | None:
        """Return the rubric's weighted sum over the functions that say something."""
        self.state_of["completion"] = self.messages[len(self.prompt) :]
        rubric = getattr(self.inner, "rubric", None)
        pieces = [] if rubric is None else [x for x in pieces_of(rubric) if x.weight]
        total = [await self._score(piece) for piece in pieces]
        return sum(total) if total else None

    async def _score(self, piece: Any) -> float:
        if piece.of_group:
            raise WorldError(
                f"{piece.name} compares the samples of a prompt, and an episode is one. Make it "
                "a part of the reward instead."
            )
        known = {
            **self.known,
            "completion": self.messages[len(self.prompt) :],
            "parser": getattr(self.inner, "parser", None),
            "state": self.state_of,
            **piece.objects,
        }
        value = await settle(piece.function(**chosen(piece.function, known)))
        return float(piece.weight * (reward_of(value, piece.name) or 0.0))


def _call(asked: Asked | Misread, made: bool) -> Call:
    if isinstance(asked, Misread):
        return Call("", status="refused")
    return Call(asked.name, asked.arguments, "ok" if made else "refused")


def is_verifiers(thing: Any) -> bool:
    return "MultiTurnEnv" in class_names(thing) and has(thing, "env_response", "is_completed")
