"""Prompts of open conversations that are kept: less is computed, and no bit is another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_zoo import engine, learner_logp, request, same
from model_zoo import make

from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.native.kept import KeptPrompts
from groupwise.engine.protocol import Request, Sampling, turn_stream
from groupwise.records import Completion

FREE = Sampling(max_tokens=6)
TURNS, SAMPLES = 3, 2


def with_room(own: NativeEngine, room: int | None) -> NativeEngine:
    own.kept = KeptPrompts(torch.device("cpu"), room)
    return own


def conversations(own: NativeEngine, starts: list[Request]) -> list[list[Completion]]:
    """Turns of groups that begin together; between them others say seven tokens."""
    begun = [replace(each, goes_on=True) for each in starts]
    found = own.generate(begun, FREE)
    said = [[one] for group in found for one in group]
    prompts = [[each.prompt] for each in starts for _ in range(each.samples)]
    for turn in range(1, TURNS):
        asked = []
        for number, (turns, own_prompts) in enumerate(zip(said, prompts, strict=True)):
            start = starts[number // SAMPLES]
            more = (*own_prompts[-1], *turns[-1].token_ids, *range(10 + turn, 17 + turn))
            own_prompts.append(more)
            stream = turn_stream("train", number % SAMPLES, turn)
            grown = tuple(map(len, own_prompts[:-1]))
            asked.append(
                Request(more, 1, start.prompt_id, 0, stream, grown=grown, goes_on=turn + 1 < TURNS)
            )
        for turns, (one,) in zip(said, own.generate(asked, FREE), strict=True):
            turns.append(one)
    return said


STARTS = [request(length, SAMPLES, number) for number, length in enumerate((5, 40, 17))]


@pytest.mark.parametrize("model", ["smollm2", "qwen3"])
def test_what_is_kept_is_not_computed_again_and_changes_no_bit(model: str) -> None:
    """With room for all, for some, for none; alone, and in company."""
    kept, none = (with_room(engine(model), room) for room in (None, 0))
    found = conversations(kept, STARTS)
    first = sum(len(each.prompt) for each in STARTS)
    later = (TURNS - 1) * SAMPLES * len(STARTS) * (6 + 7)
    assert kept.kept.read == first + later and not kept.kept.known and not kept.kept.bytes
    others = [conversations(none, STARTS)]
    assert none.kept.given == 0 and none.kept.read == kept.kept.read + kept.kept.given
    one = with_room(engine(model, slots=3), 40 * 2**10)  # a few of them
    others.append(conversations(one, STARTS))
    assert 0 < one.kept.given < kept.kept.given
    alone = [each for start in STARTS for each in conversations(engine(model, slots=1), [start])]
    for other in [*others, alone]:
        for turns, theirs in zip(found, other, strict=True):
            assert all(map(same, turns, theirs))


def test_probabilities_are_those_of_one_pass() -> None:
    own = make("smollm2")
    turns = conversations(engine(own), STARTS[:1])[0]
    more: tuple[int, ...] = STARTS[0].prompt
    for turn, one in enumerate(turns):
        there = learner_logp(own, replace(STARTS[0], prompt=more), one)
        torch.testing.assert_close(one.logp_T, there.float(), atol=2e-5, rtol=0)
        more = (*more, *one.token_ids, *range(11 + turn, 18 + turn))


def test_new_weights_forget_what_older_ones_have_computed() -> None:
    own, fresh = make("smollm2"), make("smollm2")
    changed = engine(own)
    begun = replace(STARTS[1], goes_on=True)
    changed.generate([begun], FREE)
    assert changed.kept.known
    with torch.no_grad():
        for model in (own, fresh):
            for weights in model.parameters():
                weights.mul_(1.01)
    changed.sync(1)
    assert not changed.kept.known and not changed.kept.bytes
    more = (*begun.prompt, *range(9))
    asked = Request(more, 1, 7, 0, grown=(len(begun.prompt),))
    (ours,), (theirs,) = (one.generate([asked], FREE)[0] for one in (changed, engine(fresh)))
    assert torch.equal(ours.logp_T, theirs.logp_T) and ours.token_ids == theirs.token_ids


def test_the_oldest_goes_first() -> None:
    own = engine()
    begun = [replace(each, goes_on=True, samples=1) for each in STARTS]
    own.generate(begun, FREE)
    sizes = [each.bytes for each in own.kept.known.values()]
    tight = with_room(engine(), sum(sizes[1:]))
    tight.generate(begun, FREE)
    assert list(tight.kept.known) == [each.prompt for each in begun[1:]]
    assert tight.kept.bytes == sum(sizes[1:])
