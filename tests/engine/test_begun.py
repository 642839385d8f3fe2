"""Answers that have begun: a request goes on from a prefix, by randomness of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decoder_twins import decoder_engine, twins  # noqa: F401
from engine_zoo import engine, request, same, worst
from model_zoo import make

from groupwise.engine.answers import cut
from groupwise.engine.batch import BatchEngine
from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.protocol import Capabilities, Request, Sampling, branch_stream
from groupwise.errors import EngineError
from groupwise.records import Completion, Turn

FREE = Sampling(max_tokens=12)


def branches(answer: Completion, asked: Request, positions: tuple[int, ...], samples: int = 3):
    """Requests that go on from these positions of the first answer to a request."""
    return [
        replace(
            asked,
            prompt=(*asked.prompt, *answer.token_ids[:at]),
            samples=samples,
            stream=branch_stream(0, at),
            begun=at,
        )
        for at in positions
    ]


def sampler(kind: str, **options: object) -> NativeEngine:
    return decoder_engine(**options) if kind == "captured" else engine(make("smollm2"), **options)


@pytest.mark.parametrize("kind", ["plain", "captured"])
def test_a_branch_has_what_is_left_and_depends_on_nobody_else(
    kind: str,
    twins: None,  # noqa: F811
) -> None:
    """In any company, with any number of slots: the same tokens; plain on a CPU: the same bits."""
    own = sampler(kind, slots=4)
    asked = request(5, 1, 7)
    (answer,) = own.generate([asked], FREE)[0]
    every = branches(answer, asked, (1, 4, 7, 11))
    together = own.generate([*every, request(9, 5, 1)], FREE)
    for at, alone, group in zip((1, 4, 7, 11), every, together, strict=False):
        assert {len(each.token_ids) for each in group} == {12 - at}
        assert all(each.finish == "length" for each in group)
        (again,) = sampler(kind, slots=2).generate([alone], FREE)
        assert [x.token_ids for x in again] == [x.token_ids for x in group]
        assert kind == "captured" or all(map(same, again, group))
        assert worst(own.source.model, alone, group) <= 1e-5
    texts = {each.token_ids[0] for each in (*together[0], answer)}
    assert len(texts) > 1  # no branch repeats another, nor the answer itself
    later = replace(every[0], stream=branch_stream(1, 1))
    assert own.generate([later], FREE)[0][0].token_ids != together[0][0].token_ids


@pytest.mark.parametrize("kind", ["plain", "captured"])
def test_a_limit_is_a_cut(kind: str, twins: None) -> None:  # noqa: F811
    """What a request with a beginning gets is the beginning of what it gets without."""
    asked = request(6, 4, 2)
    begun = replace(asked, begun=4)
    (whole,) = sampler(kind).generate([asked], FREE)
    (short,) = sampler(kind).generate([begun], FREE)
    assert all(same(cut(one, 8), two) for one, two in zip(whole, short, strict=True))
    assert all(len(each.token_ids) == 8 for each in short)


@pytest.mark.parametrize("kind", ["plain", "captured"])
def test_a_stop_string_may_begin_in_the_prefix(kind: str, twins: None) -> None:  # noqa: F811
    own = sampler(kind)
    asked = request(5, 1, 3)
    (answer,) = own.generate([asked], FREE)[0]
    first, second = (own.tokenizer.decode([token]) for token in answer.token_ids[2:4])
    (group,) = own.generate(
        [replace(asked, prompt=(*asked.prompt, *answer.token_ids[:3]), begun=3)],
        Sampling(max_tokens=12, temperature=0),
    )
    follows = own.tokenizer.decode([group[0].token_ids[0]])
    stop = Sampling(max_tokens=12, temperature=0, stop=(first + follows,))
    (stopped,) = own.generate(
        [replace(asked, prompt=(*asked.prompt, *answer.token_ids[:3]), begun=3)], stop
    )
    assert (stopped[0].finish, len(stopped[0].token_ids)) == ("stop", 1)
    apart = replace(asked, prompt=(*asked.prompt, *answer.token_ids[:3]))
    assert own.generate([apart], stop)[0][0].finish == "length" and second


@pytest.mark.parametrize("kind", ["plain", "captured"])
def test_the_least_length_counts_the_prefix(kind: str, twins: None) -> None:  # noqa: F811
    """Nearly every token ends an answer, and none may before the fifth of the whole."""
    own, least = sampler(kind, eos=range(90)), Sampling(max_tokens=8, min_tokens=5)
    for begun, first in ((0, 6), (3, 3)):
        (group,) = own.generate([replace(request(6, 16, 1), begun=begun)], least)
        assert min(len(x.token_ids) for x in group if x.finish == "eos") == first
    both = [replace(request(6, 2, number), begun=3 * number) for number in (0, 1)]
    assert len(own.generate(both, least)) == 2  # two least lengths at once: the plain way


class Garrulous(BatchEngine):
    """Knows nothing of beginnings, and writes as much as an answer may have; a tool's is in it."""

    capabilities = Capabilities()

    def answer(self, requests, sampling):
        ids = tuple(range(sampling.max_tokens + 2))
        turns = (Turn("assistant", 0, 2), Turn("tool", 2, 4), Turn("assistant", 4, len(ids)))
        mask_T = torch.tensor([not 2 <= t < 4 for t in ids])
        done = Completion(ids, torch.zeros(len(ids)), "eos", 0, mask_T=mask_T, turns=turns)
        return [[done] * each.samples for each in requests]


def test_an_engine_that_does_not_look_is_cut() -> None:
    asked = Request((1, 2, 3, 4), 2, prompt_id=0, draw=0, begun=3)
    (group,) = Garrulous().generate([asked], Sampling(max_tokens=6))
    assert [each.token_ids for each in group] == [(0, 1, 2, 3, 4)] * 2
    assert group[0].finish == "length" and group[0].own_length == 3
    assert group[0].turns[-1] == Turn("assistant", 4, 5)
    assert len(group[0].logp_T) == len(group[0].mask_T) == 5
    whole = Garrulous().generate([replace(asked, begun=0)], Sampling(max_tokens=6))[0][0]
    assert whole.finish == "eos" and whole.own_length == 6


@pytest.mark.parametrize("begun", [-1, 4, 12, 13])
def test_an_answer_without_room_is_refused(begun: int) -> None:
    with pytest.raises(EngineError, match="has a token left, and stands behind a prompt"):
        engine(make("smollm2")).generate([replace(request(4, 1), begun=begun)], FREE)


def test_the_context_counts_what_is_left_of_an_answer() -> None:
    """A prefix takes no more room than the answer that it is of."""
    own = engine(make("smollm2"))
    context = own.source.model.config.context
    asked = request(context - 12 + 8, 1)
    with pytest.raises(EngineError, match="limit of"):
        own.generate([asked], FREE)
    assert len(own.generate([replace(asked, begun=8)], FREE)[0][0].token_ids) == 4
