"""Programs that lead their episodes over HTTP: the same rows, and what may go wrong."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_worlds import ask

from groupwise.envs.answering import Alone
from groupwise.envs.chat_requests import BadChatRequest, behind, read_request, turn_message
from groupwise.envs.endpoint import PolicyEndpoint
from groupwise.envs.opening import WorldSetup, open_worlds
from groupwise.envs.shapes.programs import ProgramWorld
from groupwise.envs.tool_calls import Asked, Misread, reader
from groupwise.envs.worlds import Answered, Fault, Worlds
from groupwise.errors import WorldError

HERE = Path(__file__).resolve()
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object",
       "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}  # fmt: skip


def world(function: Callable[..., Any], **options: Any) -> Alone:
    return Alone(ProgramWorld(function, options, lambda tools: reader("hermes", tools)))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def refused(
    endpoint: PolicyEndpoint, body: Any, what: str = "/chat/completions", **headers: str
) -> Any:
    """The status and the words of a refusal."""
    asked = urllib.request.Request(endpoint.base_url + what, json.dumps(body).encode(), headers)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(asked, timeout=30)
    return caught.value.code, json.load(caught.value)["error"]["message"]


# --- what is said -------------------------------------------------------------------------------


def test_a_program_calls_tools_and_sees_its_calls() -> None:
    """Calls come as `tool_calls`, their results stand behind them as messages of tools."""
    seen: list[Any] = []

    def solve(endpoint: PolicyEndpoint, question: str) -> float:
        messages = [user(question)]
        messages.append(ask(endpoint, messages, tools=[ADD], temperature=0.3))
        seen.append(messages[-1])
        for call in messages[-1]["tool_calls"]:
            given = json.loads(call["function"]["arguments"])
            said = {"role": "tool", "tool_call_id": call["id"], "content": str(sum(given.values()))}
            messages.append(said)
        messages.append(ask(endpoint, messages, tools=[ADD]))
        return float(messages[-1]["content"] == "5")

    made = world(solve)
    first = made.reset({"question": "2+3", "answer": "5"})
    assert first.messages == (user("2+3"),) and first.tools == (ADD,)
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    then = made.step(f"Let me see. {call}")
    assert [(x["role"], x["content"]) for x in then.messages] == [("tool", "5")]
    assert [(x.name, x.arguments, x.status) for x in then.calls] == [
        ("add", {"a": 2, "b": 3}, "ok")
    ]
    assert then.tools is None
    last = made.step("5")
    assert last.done and not last.messages and made.outcome() == 1.0
    assert seen[0]["content"] == "Let me see." and seen[0]["tool_calls"][0]["id"] == "call_0_0"
    made.close()


def test_a_call_that_can_not_be_read_is_words() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 2</tool_call>'
    found = reader("hermes", [ADD])(text)
    assert isinstance(found[0], Misread)
    assert turn_message(text, found, 0) == {"role": "assistant", "content": text}
    good = Asked("add", {"a": 1})
    both = turn_message("x <tool_call>", [good, *found], 0)
    assert both == {"role": "assistant", "content": "x <tool_call>"}


def test_a_request_goes_on_where_nothing_before_it_has_changed() -> None:
    """Programs may strip the policy's words and write what is missing as null, nothing else."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    known = [user("q"), {"role": "assistant", "content": " a\n", "tool_calls": [call]}]
    more = user("more")

    def seen(*messages: Any) -> Any:
        return behind(known, read_request({"messages": list(messages)}).messages)

    own = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": [
        {**call, "function": {"name": "f", "arguments": '{"a":1}'}}]}  # fmt: skip
    parts = {"role": "user", "content": [{"type": "text", "text": "q"}]}
    assert seen(user("q"), own, more) == (more,)
    assert seen(parts, own, more, more) == (more, more)
    for other in (
        (user("q"), own),  # nothing new
        (user("Q"), own, more),
        (user("q "), own, more),
        (user("q"), {**own, "content": "b"}, more),
        (user("q"), {"role": "assistant", "content": "a"}, more),  # without its call
        (user("q"), more, more),
        (more,),
    ):
        assert seen(*other) is None, other


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ([], "no JSON object"),
        ({"messages": []}, "list of messages"),
        ({"messages": [user("q")], "n": 2}, "n must be 1"),
        ({"messages": [user("q")], "stream": True}, "stream is not offered"),
        ({"messages": [{"role": "user", "content": 3}]}, "no message with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "no message with"),
        ({"messages": [user("q")], "tools": "add"}, "tools must be"),
    ],
)
def test_what_can_not_be_answered_is_refused(body: Any, why: str) -> None:
    with pytest.raises(BadChatRequest, match=why):
        read_request(body)


def test_strangers_are_refused_and_the_episode_goes_on() -> None:
    found: list[Any] = []

    def solve(endpoint: PolicyEndpoint) -> float:
        base = endpoint.base_url.rsplit("/", 2)[0]
        other = PolicyEndpoint(f"{base}/{'x' * 22}/v1")
        good = {"messages": [user("q")]}
        found.extend(
            [
                refused(endpoint, {"messages": [user("q")], "n": 3}),
                refused(endpoint, good, "/completions"),
                refused(endpoint, {"reward": 1.0}, "/reward"),  # a function returns it
                refused(other, good),
                refused(endpoint, good, Origin="http://elsewhere.example"),
                refused(endpoint, good, Host="elsewhere.example"),
            ]
        )
        with urllib.request.urlopen(f"{endpoint.base_url}/models") as answer:
            found.append(json.load(answer)["data"][0]["id"])
        ask(endpoint, [user("q")])
        return 0.5

    made = world(solve)
    assert made.reset({}).messages == (user("q"),)
    assert made.step("a").done and made.outcome() == 0.5
    assert [each[0] for each in found[:6]] == [400, 404, 404, 404, 403, 403]
    assert found[6] == "policy"
    made.close()


# --- ends ---------------------------------------------------------------------------------------


def keeps_on(endpoint: PolicyEndpoint, catches: bool = False) -> float | None:
    messages, turns = [user("q")], 0
    while True:
        try:
            messages += [ask(endpoint, messages), user("more")]
        except urllib.error.HTTPError:
            if catches:
                return float(turns)
            raise
        turns += 1


@pytest.mark.parametrize(("catches", "worth"), [(True, 1.0), (False, None)])
def test_a_program_that_a_limit_cuts_off_is_told_and_may_say_what_it_was_worth(
    catches: bool, worth: float | None
) -> None:
    made = world(keeps_on, catches=catches)
    made.reset({})
    assert made.step("a").messages == (user("more"),)
    assert made.outcome() == worth  # the run has ended it: its request is refused
    made.close()


def ends_unasked(endpoint: Any) -> float:
    return 1.0


def raises(endpoint: Any) -> float:
    ask(endpoint, [user("q")])
    raise KeyError("lost")


def rewards_words(endpoint: Any) -> str:
    ask(endpoint, [user("q")])
    return "good"


def hangs(endpoint: Any) -> float:
    ask(endpoint, [user("q")])
    signal.pause()
    return 1.0


def forks(endpoint: Any) -> float:
    if os.fork() == 0:
        ask(endpoint, [user("the child")])
        return 2.0
    os.wait()
    return 1.0


def asks_twice(endpoint: Any) -> float:
    ask(endpoint, [user("q")])
    ask(endpoint, [user("q")])
    return 1.0


def other_tools(endpoint: Any) -> float:
    said = ask(endpoint, [user("q")], tools=[ADD])
    ask(endpoint, [user("q"), said, user("more")])
    return 1.0


def floods(endpoint: Any) -> float:
    said = ask(endpoint, [user("q")])
    ask(endpoint, [user("q"), said, user("x" * 10**6)])
    return 1.0


async def waits(endpoint: Any) -> float:
    await asyncio.to_thread(ask, endpoint, [user("q")])
    await asyncio.sleep(60)
    return 1.0


def led(name: str, turns: int = 3, **setup: Any) -> list[Answered | Fault]:
    """The answers of an episode of a program in this file, in a process of its own."""
    given = WorldSetup(f"{HERE}:{name}", reader="hermes", workers=1, **setup)
    worlds: Worlds = open_worlds(given)
    try:
        worlds.begin(0, {})
        found: list[Answered | Fault] = []
        over = False
        while True:
            (answer,) = worlds.answers(30.0)
            found.append(answer[1])
            if isinstance(answer[1], Fault) or over or len(found) > turns:
                return found
            over = answer[1].observation.done
            if over:
                worlds.finish(0)
            else:
                worlds.step(0, "a")
    finally:
        worlds.close()


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("ends_unasked", "error", "ended before it had asked"),
        ("raises", "error", r"KeyError: 'lost' \(test_leading_programs.py"),
        ("rewards_words", "error", "no finite number"),
        ("hangs", "timeout", "longer than 1 s"),
        ("waits", "timeout", "longer than 1 s"),
        ("asks_twice", "branched", "does not go on from what was said so far"),
        ("other_tools", "branched", "the tools that it began with"),
    ],
)
def test_what_goes_wrong_in_a_program_is_said_and_kept_apart(
    name: str, kind: str, why: str
) -> None:
    last = led(name, timeout=1.0)[-1]
    assert isinstance(last, Fault) and last.kind == kind and re.search(why, last.reason), last


def test_a_forked_child_leads_no_second_episode() -> None:
    """It asks, and that is the conversation; what it returns is nobody's reward."""
    found = led("forks", timeout=10.0)
    assert isinstance(found[0], Answered) and isinstance(found[-1], Answered)
    assert found[0].observation.messages == (user("the child"),)
    assert found[-1].outcome == 1.0


def test_a_flood_is_cut() -> None:
    said = led("floods", turns=1, timeout=10.0)[1]
    assert isinstance(said, Answered)
    assert len(said.observation.messages[0]["content"]) < 110_000


def test_an_option_that_no_program_knows_is_refused() -> None:
    with pytest.raises(WorldError, match="takes: port"):
        open_worlds(WorldSetup("outside", options={"prot": 1}))
