"""Environments that say what was recorded of them: nothing of theirs runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from groupwise.envs.environment import Call, CallStatus, Observation
from groupwise.envs.worlds import Answered, Fault, Worlds
from groupwise.records import POLICY, CalledTool, Episode, Message

ULPS = 4  # how far a difference of two sums may be from what was added
SILENT = Fault("error", "the record has no answer to this turn: the policy has gone on for longer")


class RecordedWorlds(Worlds):
    """The n-th episode that begins hears what the n-th of the record has heard."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self.coming = iter(episodes)
        self.open: dict[int, tuple[Episode, Iterator[Answered | Fault]]] = {}
        self.ready: list[tuple[int, Answered | Fault]] = []

    def begin(self, episode: int, row: Mapping[str, Any]) -> None:
        found = next(self.coming)
        self.open[episode] = found, iter(replies(found))
        self.step(episode, "")

    def step(self, episode: int, text: str) -> None:
        self._answer(episode, next(self.open[episode][1], SILENT))

    def finish(self, episode: int) -> None:
        self._answer(episode, ending(self.open.pop(episode)[0]))

    def drop(self, episode: int) -> None:
        self.open.pop(episode, None)
        self.ready = [each for each in self.ready if each[0] != episode]

    def answers(self, wait: float) -> list[tuple[int, Answered | Fault]]:
        found, self.ready = self.ready, []
        return found

    def close(self) -> None:
        self.open.clear()

    def _answer(self, episode: int, answer: Answered | Fault) -> None:
        if isinstance(answer, Fault):
            self.open.pop(episode, None)
        self.ready.append((episode, answer))


def replies(episode: Episode) -> list[Answered | Fault]:
    """Return what an environment answered to the beginning and to each turn.

    The first words are not among it: they stand in the recorded prompt.
    """
    heard = heard_of(episode.messages)
    fault = _fault(episode)
    if episode.broke_off and len(heard) == 1 and not heard[0] and episode.turns[0].state is None:
        return [fault]  # before the first turn; or, with the same row, in answer to it
    found: list[Answered | Fault] = [Answered(Observation(), episode.turns[0].state)]
    states = [turn.state for turn in episode.turns[1:]] + [None]
    for number, (said, turn, state) in enumerate(zip(heard, episode.turns, states, strict=True), 1):
        last = number == len(heard)
        calls = tuple(_called(x) for x in turn.calls)
        over = last and episode.stop == "done"
        answer = Answered(Observation(tuple(said), turn.reward, over, calls), state)
        broke = last and episode.broke_off and not said and turn.reward is None and not calls
        found.append(fault if broke else answer)
    return found


def _fault(episode: Episode) -> Fault:
    return Fault(cast(Any, episode.stop if episode.broke_off else "error"), episode.reason)


def _called(call: CalledTool) -> Call:
    return Call(call.name, json.loads(call.arguments), cast(CallStatus, call.status))


def ending(episode: Episode) -> Answered | Fault:
    """Return what an environment said of the whole episode."""
    if episode.broke_off:
        return _fault(episode)
    return Answered(Observation(), outcome=outcome_of(episode))


def heard_of(messages: Sequence[Message]) -> list[list[Message]]:
    """Return what others said behind each turn of the policy."""
    heard: list[list[Message]] = []
    for message in messages:
        if message.get("role") == POLICY:
            heard.append([])
        else:
            heard[-1].append(message)
    return heard


def outcome_of(episode: Episode) -> float | None:
    """Return the reward of the whole, which with those of turns makes the recorded sum to the bit.

    None where turns alone make it, or nothing was given.
    """
    turns = [turn.reward for turn in episode.turns if turn.reward is not None]
    whole = episode.reward
    if whole is None or not turns:
        return whole
    if sum(turns) == whole:
        return None
    rest = low = high = whole - sum(turns)
    for _ in range(ULPS):
        low, high = math.nextafter(low, -math.inf), math.nextafter(high, math.inf)
        for near in (rest, low, high):
            if sum([*turns, near]) == whole:
                return near
    return rest


def first_difference(then: Episode, now: Episode) -> str:
    """Return where an environment has answered otherwise than recorded; "" where nowhere.

    Only answers to the same words are compared.
    """
    for turn, (old, new) in enumerate(zip(then.messages, now.messages, strict=False)):
        if old != new:
            if POLICY in (old.get("role"), new.get("role")):
                return ""
            return f"message {turn}: {_words(old)} then, {_words(new)} now"
    return ""


def _words(message: Message, width: int = 80) -> str:
    return repr(str(message.get("content")))[:width]
