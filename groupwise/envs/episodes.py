"""An episode: a conversation of the policy with its environment, and one row of tokens from it.

The row grows at its end alone: a turn of the policy, token by token as it was sampled, then what
others say in answer, encoded for itself. Nothing of it is ever encoded again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from groupwise.envs.answering import cut
from groupwise.envs.environment import Call, Observation
from groupwise.envs.worlds import Answered, Fault
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.records import POLICY, CalledTool, Completion, Episode, Message, Turn, TurnFacts

Ids = Sequence[int]
OTHERS = "environment"  # who speaks in a message that calls itself the policy's


@dataclass(frozen=True)
class EpisodeLimits:
    """When an episode ends though nobody has ended it, and what that means for learning."""

    tokens: int  # of the policy
    context: int  # of all, the prompt's too
    turns: int = 8
    calls: int = 0  # 0: any number
    turn_tokens: int = 0  # of the policy in one turn; 0: as many as are left
    observation: int = 2000  # characters of a message that the policy reads
    seconds: float = 600.0  # that the environment may take in all
    truncated: frozenset[str] = frozenset()  # ways to end that count as cut off
    left_out: frozenset[str] = frozenset()  # and those that nobody learns from


@dataclass(frozen=True)
class Write:
    """Ask the engine for the policy's next turn."""

    prompt: tuple[int, ...]
    limit: int  # tokens
    turn: int


@dataclass(frozen=True)
class Say:
    """Hand the policy's words to the environment."""

    text: str


@dataclass(frozen=True)
class Finish:
    """Ask the environment how the whole episode was."""


Wish = Write | Say | Finish
Reply = Completion | Answered | Fault
Play = Generator[Wish, Any, Completion]  # is sent a `Reply` for every wish


@dataclass
class EpisodeRow:
    """The tokens of an episode so far, and what is known of its turns."""

    prompt: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    written: list[Completion] = field(default_factory=list)  # by the policy, turn by turn
    facts: list[TurnFacts] = field(default_factory=list)  # of these turns
    messages: list[Message] = field(default_factory=list)

    @property
    def own(self) -> int:
        """Count the policy's tokens."""
        return sum(len(each.token_ids) for each in self.written)

    @property
    def calls(self) -> int:
        """Count the calls of tools."""
        return sum(len(each.calls) for each in self.facts)

    def add_own(self, turn: Completion, text: str, state: str | None) -> None:
        """Put a turn of the policy at the end."""
        self._add(POLICY, turn.token_ids)
        self.written.append(turn)
        self.facts.append(TurnFacts(finish=turn.finish, version=turn.version, state=state))
        self.messages.append({"role": POLICY, "content": text})

    def add_said(self, ids: Sequence[int], said: Sequence[Message]) -> None:
        """Put the words of others at the end, with the tokens that open the next turn."""
        role = str(said[0]["role"])
        self._add(OTHERS if role == POLICY else role, ids)

    def _add(self, role: str, ids: Sequence[int]) -> None:
        if ids:
            self.turns.append(Turn(role, len(self.ids), len(self.ids) + len(ids)))
            self.ids += ids

    def note(self, answered: Answered | Fault) -> None:
        """Write down what came of the last turn."""
        made: dict[str, Any] = {"seconds": answered.seconds}
        if isinstance(answered, Answered):
            given = answered.observation
            made |= {"reward": given.reward, "calls": tuple(map(_called, given.calls))}
        self.facts[-1] = self.facts[-1]._replace(**made)


def play(
    row: EpisodeRow, begun: Answered | Fault, ends: Ends, bridge: Callable[[Sequence[Message]], Ids]
) -> Play:
    """Lead an episode whose environment has begun: yield what it waits for, return its row.

    `begun` is what the environment answered to the beginning; where that failed, the first turn is
    written all the same: a row without a token of the policy is none.
    """
    state = begun.state if isinstance(begun, Answered) else None
    limits = ends.limits
    fault = begun if isinstance(begun, Fault) else None
    stop = ""
    while not stop:
        turn: Completion = yield Write((*row.prompt, *row.ids), ends.room(row), len(row.written))
        text = ends.words(turn)
        row.add_own(turn, text, state)
        stop = fault.kind if fault is not None else ends.cut(row)
        if stop:
            break
        answered: Answered | Fault = yield Say(text)
        row.note(answered)
        if isinstance(answered, Fault):
            fault, stop = answered, answered.kind
            break
        said, state = answered.observation, answered.state
        row.messages += said.messages
        stop = ends.after(row, said)
        if not stop:
            heard = [shortened(message, limits.observation) for message in said.messages]
            ids = bridge(heard)
            stop = ends.before_next(row, len(ids))
            if not stop:
                row.add_said(ids, heard)
    outcome: float | None = None
    if fault is None:
        ended: Answered | Fault = yield Finish()
        if isinstance(ended, Fault):
            fault, stop = ended, ended.kind
        else:
            outcome = ended.outcome
    return completed(row, stop, outcome, fault, limits)


@dataclass(frozen=True)
class Ends:
    """Where turns end, and where the episode does."""

    limits: EpisodeLimits
    stop: tuple[str, ...]  # texts that end a turn
    tokenizer: Tokenizer

    def room(self, row: EpisodeRow) -> int:
        """Return how many tokens the next turn may have."""
        limits = self.limits
        left = [limits.tokens - row.own, limits.context - len(row.prompt) - len(row.ids)]
        return min([*left, limits.turn_tokens] if limits.turn_tokens else left)

    def words(self, turn: Completion) -> str:
        """Return a turn's words, without the token or the text that ended it."""
        if turn.finish == "eos":
            return self.tokenizer.decode(turn.token_ids[:-1])
        text = self.tokenizer.decode(turn.token_ids)
        found = [at for each in self.stop if (at := text.find(each)) >= 0]
        return text[: min(found, default=len(text))]

    def cut(self, row: EpisodeRow) -> str:
        """Return which limit has cut the last turn; "" where none has."""
        if row.written[-1].finish != "length":
            return ""
        full = len(row.prompt) + len(row.ids) >= self.limits.context
        return "context" if full and row.own < self.limits.tokens else "own_tokens"

    def after(self, row: EpisodeRow, said: Observation) -> str:
        """Return why an episode ends with what the environment has said; "" where it goes on."""
        if said.done:
            return "done"
        if not said.messages:
            return "answered"
        if self.limits.calls and row.calls > self.limits.calls:
            return "max_calls"
        return "max_turns" if len(row.written) >= self.limits.turns else ""

    def before_next(self, row: EpisodeRow, heard: int) -> str:
        """Return which limit leaves no room for so many tokens of others and one of the policy."""
        if row.own >= self.limits.tokens:
            return "own_tokens"
        full = len(row.prompt) + len(row.ids) + heard >= self.limits.context
        return "context" if full else ""


def completed(
    row: EpisodeRow, stop: str, outcome: float | None, fault: Fault | None, limits: EpisodeLimits
) -> Completion:
    """Return the row of an episode that is over."""
    given = [x for x in (*(each.reward for each in row.facts), outcome) if x is not None]
    episode = Episode(
        stop,
        tuple(row.facts),
        sum(given) if given else None,
        tuple(row.messages),
        "" if fault is None else fault.reason,
        stop in limits.left_out,
    )
    last = row.written[-1]
    finish = "length" if stop in limits.truncated else last.finish
    if stop not in limits.truncated and finish == "length":
        finish = "stop"  # the limit that cut it is an end like any other here
    alone = len(row.turns) == 1
    return replace(
        last,
        token_ids=tuple(row.ids),
        logp_T=_spread([each.logp_T for each in row.written], row.turns),
        finish=finish,
        version=min(each.version for each in row.written),
        topk_id_TK=_spread([each.topk_id_TK for each in row.written], row.turns),
        topk_logp_TK=_spread([each.topk_logp_TK for each in row.written], row.turns),
        mask_T=None if alone else _mask(row.turns),
        turns=tuple(row.turns),
        routes_TLK=last.routes_TLK if alone else None,
        episode=episode,
    )


def _mask(turns: Sequence[Turn]) -> Tensor:
    return torch.cat([torch.full((turn.end - turn.start,), turn.role == POLICY) for turn in turns])


def _spread(own: Sequence[Tensor | None], turns: Sequence[Turn]) -> Any:
    """Put the policy's numbers where its turns stand, and zeros elsewhere."""
    known = [x for x in own if x is not None]
    if len(known) < len(own):
        return None
    whole = known[0].new_zeros((turns[-1].end, *known[0].shape[1:]))
    for turn, numbers in zip([t for t in turns if t.role == POLICY], known, strict=True):
        whole[turn.start : turn.end] = numbers
    return whole


def shortened(message: Message, most: int) -> Message:
    """Return a message of at most so many characters: its beginning and end, and what is gone."""
    text = message.get("content")
    if not isinstance(text, str) or len(text) <= most:
        return message
    return {**message, "content": cut(text, most)}


def _called(call: Call) -> CalledTool:
    return CalledTool(call.name, _as_json(call.arguments), call.status)


def _as_json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(dict(arguments), ensure_ascii=False, sort_keys=True, default=str)
