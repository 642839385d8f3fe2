"""Many episodes at once: whoever can go on does, and a slow environment holds up itself alone.

Turns go to the engine as soon as they can be written, words to the environments as soon as they are
said. What comes out depends on the order of nothing: a sample's turns have random numbers of their
own (`turn_stream`), and its environment hears of no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from groupwise.engine.answers import check_answer, check_tickets, cut
from groupwise.engine.protocol import Engine, Request, Sampling, Stream, Wrote, turn_stream
from groupwise.envs.environment import Observation
from groupwise.envs.episodes import (
    Ends,
    EpisodeLimits,
    EpisodeRow,
    Play,
    Reply,
    Say,
    Wish,
    Write,
    play,
)
from groupwise.envs.turn_template import TurnTemplate
from groupwise.envs.worlds import Answered, Fault, Worlds
from groupwise.errors import WorldError
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.records import Completion

PATIENCE = 1.0  # seconds of waiting for environments at a time, where nothing is to be sampled
NUMBERS = count()  # of episodes: none comes twice in a process
OVER = "reset says that the episode is over before the policy has said a word"


@dataclass(frozen=True)
class StartingPrompt:
    """A prompt whose episodes are played."""

    row: Mapping[str, Any]  # of the data, for the environment
    prompt_id: int
    draw: int
    opening: Callable[[Observation], tuple[int, ...]]  # first prompt, by the first words


@dataclass(frozen=True)
class Played:
    """The episodes of a prompt."""

    prompt: tuple[int, ...]  # that all of them begin with
    completions: list[Completion]


Done = Callable[[int, Played], None]  # the number of a start, its episodes


@dataclass
class Seat:
    """The place of an episode at its table."""

    table: Table
    sample: int
    number: int  # of the episode, for its environment
    begun: Answered | Fault | None = None
    row: EpisodeRow = field(default_factory=lambda: EpisodeRow(()))
    play: Play | None = None  # once it has begun
    prompts: list[int] = field(default_factory=list)  # lengths of those that it has asked with
    first: Completion | None = None  # the first turn, where it was written before it has begun
    completion: Completion | None = None  # once it is over


@dataclass
class Table:
    """The episodes of one prompt: they begin together, and then each goes its own way."""

    number: int  # of the prompt
    start: StartingPrompt
    seats: list[Seat] = field(default_factory=list)
    prompt: tuple[int, ...] = ()  # that all of them begin with, once it is known

    @property
    def played(self) -> Played | None:
        """Return the episodes; None while one of them goes on."""
        found = [seat.completion for seat in self.seats if seat.completion is not None]
        return Played(self.seats[0].row.prompt, found) if len(found) == len(self.seats) else None


class Players:
    """Who plays: an engine for one side, environments for the other."""

    def __init__(
        self,
        engine: Engine,
        worlds: Worlds,
        template: TurnTemplate,
        tokenizer: Tokenizer,
        limits: EpisodeLimits,
        sampling: Sampling,
        stream: Stream,
    ) -> None:
        stop = tuple(dict.fromkeys((*sampling.stop, *template.stop)))
        self.engine, self.worlds, self.template = engine, worlds, template
        self.stream, self.sampling = stream, replace(sampling, stop=stop)
        self.ends = Ends(limits, stop, tokenizer)
        self.open: dict[int, Seat] = {}  # whose environments are there, by number
        self.wished: list[tuple[Request, list[Seat]]] = []
        self.asked: dict[int, tuple[Request, list[Seat]]] = {}  # by ticket
        self.moved: dict[int, Table] = {}  # at which an episode has ended since the last look

    def play_all(
        self,
        starts: Sequence[StartingPrompt],
        samples: int,
        done: Done | None = None,
        wrote: Wrote | None = None,
    ) -> list[Played]:
        """Return the episodes of each prompt, in order; `done` is told of each as it is over."""
        tables = [Table(number, start) for number, start in enumerate(starts)]
        played: dict[int, Played] = {}
        try:
            for table in tables:
                self._begin(table, samples)
            while len(played) < len(tables):
                self._hear()
                self._ask(wrote)
                for table in self._moved():
                    if (found := table.played) is not None:
                        played[table.number] = found
                        if done is not None:
                            done(table.number, found)
        except BaseException:
            self.engine.cancel(list(self.asked))
            for number in self.open:
                self.worlds.drop(number)
            raise
        return [played[number] for number in range(len(tables))]

    def _moved(self) -> list[Table]:
        """Return the tables at which an episode has ended since the last look, in their order."""
        moved, self.moved = self.moved, {}
        return [moved[number] for number in sorted(moved)]

    # --- environments ---

    def _begin(self, table: Table, samples: int) -> None:
        for sample in range(samples):
            seat = Seat(table, sample, next(NUMBERS))
            table.seats.append(seat)
            self.open[seat.number] = seat
            self.worlds.begin(seat.number, table.start.row)

    def _hear(self) -> None:
        """Take what environments have answered; wait only where nothing else can be done."""
        idle = not self.asked and not self.wished
        for number, answer in self.worlds.answers(PATIENCE if idle else 0.0):
            seat = self.open.get(number)
            if seat is None:  # it was dropped meanwhile
                continue
            if isinstance(answer, Fault):
                del self.open[number]
            if seat.play is not None:
                self._go_on(seat, self._in_time(seat, answer))
                continue
            seat.begun = self._fit_to_begin(seat, answer)
            if seat.table.prompt:
                _first_words(seat.table)  # which are the same
                self._sit_down(seat)
            elif self._may_open(seat.table):
                self._open(seat.table)

    def _may_open(self, table: Table) -> bool:
        """Tell whether it is known what the episodes of a prompt begin with: all have begun, or one
        has that others wait for.
        """
        begun = [seat.begun for seat in table.seats if seat.begun is not None]
        early = self.worlds.claimed and any(isinstance(each, Answered) for each in begun)
        return early or len(begun) == len(table.seats)

    def _fit_to_begin(self, seat: Seat, answer: Answered | Fault) -> Answered | Fault:
        if isinstance(answer, Answered) and answer.observation.done:
            self._drop(seat)
            return Fault("error", f"{OVER}.", answer.seconds)
        return answer

    def _in_time(self, seat: Seat, answer: Answered | Fault) -> Answered | Fault:
        """Return a fault for an answer where the environment has taken too long in all."""
        most = self.ends.limits.seconds
        spent = sum(each.seconds for each in seat.row.facts) + answer.seconds
        if isinstance(answer, Fault) or spent <= most:
            return answer
        self._drop(seat)
        why = f"its environment took more than {most:g} s in all (turns.episode_timeout)."
        return Fault("timeout", why, answer.seconds)

    def _drop(self, seat: Seat) -> None:
        del self.open[seat.number]
        self.worlds.drop(seat.number)

    def _open(self, table: Table) -> None:
        """Begin the conversations of a prompt: their first turn is one request, as without any."""
        start, limits = table.start, self.ends.limits
        prompt = start.opening(_first_words(table))
        if len(prompt) >= limits.context:
            raise WorldError(
                f"Row {start.prompt_id} has {len(prompt)} tokens with the first words of its "
                f"environment, and an episode holds {limits.context} (the model's context, or "
                "turns.context). Shorten what `reset` says, or drop long prompts with "
                "data.max_prompt_tokens."
            )
        table.prompt = prompt
        for seat in table.seats:
            seat.row = EpisodeRow(prompt)
            if seat.begun is not None:
                self._sit_down(seat)
        most = self.ends.room(table.seats[0].row)
        limit = most if most < self.sampling.max_tokens else 0
        asked = Request(
            prompt,
            len(table.seats),
            start.prompt_id,
            start.draw,
            self.stream,
            limit=limit,
            goes_on=limits.turns > 1,
        )
        self.wished.append((asked, table.seats))

    def _sit_down(self, seat: Seat) -> None:
        """Begin the conversation of an episode whose environment has begun."""
        assert seat.begun is not None
        seat.play = play(seat.row, seat.begun, self.ends, self.template.bridge)
        next(seat.play)  # it wishes to write its first turn
        seat.prompts = [len(seat.row.prompt)]
        if seat.first is not None:
            self._go_on(seat, seat.first)

    def _go_on(self, seat: Seat, reply: Reply) -> None:
        """Tell an episode what it waited for, and see to what it waits for next."""
        assert seat.play is not None
        try:
            wish: Wish = seat.play.send(reply)
        except StopIteration as end:
            seat.completion = end.value
            self.open.pop(seat.number, None)
            self.moved[seat.table.number] = seat.table
            return
        if isinstance(wish, Say):
            self.worlds.step(seat.number, wish.text)
        elif isinstance(wish, Write):
            start = seat.table.start
            stream = turn_stream(self.stream, seat.sample, wish.turn)
            asked = Request(
                wish.prompt,
                1,
                start.prompt_id,
                start.draw,
                stream,
                limit=wish.limit,
                grown=tuple(seat.prompts),
                goes_on=wish.turn + 1 < self.ends.limits.turns,
            )
            seat.prompts.append(len(wish.prompt))
            self.wished.append((asked, [seat]))
        else:
            self.worlds.finish(seat.number)

    # --- the engine ---

    def _ask(self, wrote: Wrote | None) -> None:
        """Hand over turns that can be written, and take those that are."""
        if self.wished:
            tickets = self.engine.submit([request for request, _ in self.wished], self.sampling)
            self.asked |= zip(tickets, self.wished, strict=True)
            self.wished = []
        if not self.asked:
            return
        found = self.engine.poll(wrote)
        if found:
            check_tickets(self.engine, self.asked, [ticket for ticket, _ in found])
        for ticket, group in found:
            request, seats = self.asked.pop(ticket)
            written = [cut(each, request.most(self.sampling)) for each in group]
            check_answer(self.engine, request, self.sampling, written)
            for seat, turn in zip(seats, written, strict=True):
                if seat.play is None:
                    seat.first = turn
                else:
                    self._go_on(seat, turn)


def _first_words(table: Table) -> Observation:
    """Return what all environments of a prompt begin with; refuse where they differ."""
    known = [seat.begun.observation for seat in table.seats if isinstance(seat.begun, Answered)]
    first = known[0] if known else Observation()
    asked = first.messages, first.tools
    other = next((said for said in known if (said.messages, said.tools) != asked), None)
    if other is not None:
        raise WorldError(
            f"The environment begins row {table.start.prompt_id} in two ways, {_short(first)} "
            f"and {_short(other)}: answers to different prompts can't be compared with each other. "
            "Draw what is random in `reset` by the row alone (from a column `seed`), and share "
            "nothing between episodes."
        )
    return first


def _short(said: Observation, width: int = 80) -> str:
    text = " ".join(str(message.get("content")) for message in said.messages)
    if said.tools:
        text += f" with {len(said.tools)} tools"
    return repr(text if len(text) <= width else f"{text[:width]}...")
