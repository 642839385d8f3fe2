"""Requests that join others in flight, and an engine that is asked to go on for a moment only."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decoder_twins import decoder_engine, twins  # noqa: F401
from engine_zoo import engine, request, same

from groupwise.engine.batch import BatchEngine
from groupwise.engine.protocol import Engine, Request, Sampling, turn_stream
from groupwise.records import Completion

FREE = Sampling(max_tokens=12)


def finished(own: Engine, tickets: list[int]) -> dict[int, list[Completion]]:
    """All answers, a moment at a time."""
    found: dict[int, list[Completion]] = {}
    while set(tickets) - set(found):
        found |= dict(own.poll())
    return found


def late(asked: Request, length: int, number: int) -> Request:
    """A request that nobody has known of at first: longer than all before."""
    return replace(request(length, 1, number), stream=turn_stream("train", 1, 2), limit=5)


def test_a_request_that_joins_changes_no_bit_of_the_others_nor_of_itself() -> None:
    """Caches grow for it: in slots (four at first), in tokens, and in prompts computed at once."""
    first, after = [request(5, 2, 0), request(9, 2, 1)], [late(request(), 30, 2), request(40, 3, 3)]
    own = engine(slots=0)
    tickets = own.submit(first, FREE)
    for _ in range(3):
        assert own.poll() == []
    assert own.places == 4
    tickets += own.submit(after, FREE)
    assert len(own.batches) == 1 and own.places == 8
    found = finished(own, tickets)
    alone = [engine(slots=2).generate([each], FREE)[0] for each in [*first, *after]]
    for ticket, group in zip(tickets, alone, strict=True):
        assert all(map(same, found[ticket], group))
    assert {len(each.token_ids) for each in found[tickets[2]]} == {5}  # its own limit
    assert not own.batches and own.poll() == []


def test_who_is_sampled_otherwise_waits_for_the_next_flight() -> None:
    own = engine(slots=4)
    tickets = own.submit([request(5, 1, 0)], FREE)
    own.poll()
    tickets += own.submit([request(5, 1, 1)], replace(FREE, temperature=0.5))
    tickets += own.submit([request(6, 1, 2)], FREE)  # and nobody overtakes it
    assert len(own.batches) == 3
    found = finished(own, tickets)
    (cool,) = engine().generate([request(5, 1, 1)], replace(FREE, temperature=0.5))
    assert same(found[tickets[1]][0], cool[0])


def test_what_has_joined_can_be_cancelled() -> None:
    own = engine(slots=4)
    (kept,) = own.submit([request(5, 1, 0)], FREE)
    own.poll()
    (gone,) = own.submit([request(6, 1, 1)], FREE)
    own.cancel([gone])
    assert set(finished(own, [kept])) == {kept}


@pytest.mark.parametrize("limit", [1, 5, 12, 40])
def test_a_limit_of_its_own_cuts_the_same_tokens(limit: int) -> None:
    whole, cut = (
        engine().generate([replace(request(5, 2, 0), limit=x)], FREE)[0] for x in (0, limit)
    )
    for long, short in zip(whole, cut, strict=True):
        assert short.token_ids == long.token_ids[: min(limit, 12)] and short.finish == "length"


def test_a_captured_flight_takes_nobody_in_and_knows_limits(twins: None) -> None:  # noqa: F811
    own = decoder_engine(slots=4)
    tickets = own.submit([request(5, 2, 0)], FREE)
    own.poll()
    tickets += own.submit([late(request(), 8, 1)], FREE)
    assert len(own.batches) == 2
    found = finished(own, tickets)
    assert [len(each.token_ids) for each in found[tickets[1]]] == [5]


class Whole(BatchEngine):
    """Answers with one token, and knows of no limits."""

    def answer(self, requests, sampling):
        inner = engine()
        return inner.generate([replace(each, limit=0) for each in requests], sampling)


def test_an_engine_of_batches_is_waited_for_and_cut() -> None:
    own = Whole()
    tickets = own.submit([request(5, 2, 0)], FREE)
    assert [ticket for ticket, _ in own.poll()] == tickets
    (group,) = own.generate([replace(request(5, 1, 0), limit=3)], FREE)
    assert len(group[0].token_ids) == 3
