"""Requests of programs that ask the policy in OpenAI's form: read, compared with what was said
before, and answered.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from groupwise.envs.answering import plain_message
from groupwise.envs.tool_calls import Asked, Misread
from groupwise.errors import WorldError

if TYPE_CHECKING:
    from groupwise.records import Message

POLICY = "assistant"
# What opens a call in the forms of models: words of a turn stand before it.
OPENINGS = ("<tool_call>", "<function=", "[TOOL_CALLS]", "<｜tool▁call", "<|python_tag|>",
            "<|channel|>commentary")  # fmt: skip


class BadChatRequest(ValueError):
    """A request that can't be answered; its program is told why."""


@dataclass(frozen=True)
class ChatRequest:
    """A request for the policy's next turn."""

    messages: tuple[Message, ...]  # the whole conversation, from its beginning
    tools: tuple[Mapping[str, Any], ...] = ()
    model: str = "policy"  # as the program calls it


def read_request(body: Any) -> ChatRequest:
    """Read a body of /chat/completions. How tokens are drawn is the run's, whatever it says."""
    if not isinstance(body, dict):
        raise BadChatRequest("the request is no JSON object")
    if body.get("stream"):
        raise BadChatRequest("stream is not offered: ask without it")
    if body.get("n") not in (None, 1):
        raise BadChatRequest("n must be 1: an episode is one conversation")
    given, tools = body.get("messages"), body.get("tools") or []
    if not isinstance(given, list) or not given:
        raise BadChatRequest("messages must be a list of messages")
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        raise BadChatRequest("tools must be a list of schemas")
    return ChatRequest(
        tuple(_message(each) for each in given), tuple(tools), str(body.get("model") or "policy")
    )


def _message(given: Any) -> Message:
    """Return a message with a text as content; a text may come in parts."""
    content = given.get("content") if isinstance(given, dict) else None
    if isinstance(content, list):
        parts: list[Any] = [isinstance(part, dict) and part.get("text") for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else 0
    said = "" if content is None else content
    if (
        not isinstance(given, dict)
        or not isinstance(given.get("role"), str)
        or not isinstance(said, str)
    ):
        raise BadChatRequest(f"{given!r:.200} is no message with a role and a text as content")
    known = {key: value for key, value in given.items() if value is not None}
    return plain_message({**known, "content": said})


def behind(known: Sequence[Message], now: Sequence[Message]) -> tuple[Message, ...] | None:
    """Return what a request has behind the conversation so far; None where it is another one."""
    if len(now) <= len(known):
        return None
    same = all(_sense(one) == _sense(other) for one, other in zip(known, now, strict=False))
    return tuple(now[len(known) :]) if same else None


def _sense(message: Message) -> tuple[Any, ...]:
    """Return all of a message that the policy has to do with. Programs may strip its words."""
    own = message["role"] == POLICY
    words = message["content"].strip() if own else message["content"]
    calls = message.get("tool_calls") or [] if own else []
    return message["role"], words, [_call(each) for each in calls]


def _call(call: Mapping[str, Any]) -> tuple[Any, Any]:
    function = call.get("function", {})
    arguments = function.get("arguments")
    try:
        return function.get("name"), json.loads(arguments)
    except (TypeError, ValueError):
        return function.get("name"), arguments


def turn_message(text: str, found: Sequence[Asked | Misread], number: int) -> dict[str, Any]:
    """Return a turn of the policy as a message, its calls as `tool_calls`.

    Where a call can't be read, all of the turn is words: the program sees what was written.
    """
    calls = [each for each in found if isinstance(each, Asked)]
    if not calls or len(calls) < len(found):
        return {"role": POLICY, "content": text}
    opens = [*OPENINGS, *(f"<{each.name}>" for each in calls), "```py"]
    starts = [at for mark in opens if (at := text.find(mark)) >= 0]
    return {
        "role": POLICY,
        "content": text[: min(starts, default=0)].strip(),
        "tool_calls": [
            {
                "id": f"call_{number}_{at}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for at, call in enumerate(calls)
        ],
    }


def completion_of(message: Mapping[str, Any], model: str, number: int) -> dict[str, Any]:
    """Return the answer to a request. Tokens are not counted here: the run's files have them."""
    ended = "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "message": dict(message), "finish_reason": ended, "logprobs": None}
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
    }


def error_of(why: str) -> dict[str, Any]:
    return {"error": {"message": why, "type": "invalid_request_error"}}


class Branched(WorldError):
    """A request that does not go on from the conversation so far."""
