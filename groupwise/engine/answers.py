"""Checks of what an engine hands in before anybody learns from it: tickets, counts, lengths."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from groupwise.errors import EngineError
from groupwise.records import Completion

if TYPE_CHECKING:
    from groupwise.engine.protocol import Engine, Request, Sampling

FINISHES = ("eos", "stop", "length")
NOT_FINITE = (
    "has log-probabilities that are not finite. A token that was drawn has one above minus "
    "infinity: look for NaN in the weights that the engine took over, and for a token that it drew "
    "otherwise than it scored it."
)


def check_tickets(engine: Engine, waiting: Container[int], found: Sequence[int]) -> None:
    """Refuse answers to what nobody waits for, and none at all while somebody waits."""
    if not found:
        raise EngineError(
            f"The engine {_name(engine)} says that nothing is finished, and requests are still "
            "unanswered. Its `finished` must wait until one of them is."
        )
    for at, ticket in enumerate(found):
        if ticket not in waiting or ticket in found[:at]:
            raise EngineError(
                f"The engine {_name(engine)} hands in a request under ticket {ticket!r}, which "
                "nobody waits for: it was not submitted here, or was handed in before. Its "
                "`finished` must return every ticket of `submit` once."
            )


def check_answer(
    engine: Engine, request: Request, sampling: Sampling, group: Sequence[Completion]
) -> None:
    """Refuse what a request did not ask for, or what can't be learned from."""
    if len(group) != request.samples:
        raise EngineError(
            f"The engine {_name(engine)} wrote {len(group)} completions for prompt "
            f"{request.prompt_id}, and {request.samples} were asked for. Return "
            "`request.samples` of them for every request, in order."
        )
    most, weights = request.most(sampling), engine.capabilities.weights
    whys = [
        problem(each, sampling, weights, most) or _routes_problem(each, len(request.prompt))
        for each in group
    ]
    if not any(whys) and not all_finite(group):  # looked at once a group: that is faster
        whys = ["" if all_finite([each]) else NOT_FINITE for each in group]
    for number, why in enumerate(whys):
        if why:
            raise EngineError(
                f"The engine {_name(engine)} can't be learned from: completion {number} of prompt "
                f"{request.prompt_id} {why}"
            )


def all_finite(group: Sequence[Completion]) -> bool:
    """Tell whether every token that the policy drew has a finite log-probability."""
    drawn = [x.logp_T if x.mask_T is None else x.logp_T[x.mask_T] for x in group]
    return bool(torch.cat(drawn).isfinite().all())


def cut(completion: Completion, most: int) -> Completion:
    """Return a completion that ends behind so many tokens of the policy, if it is longer."""
    if completion.own_length <= most or not isinstance(completion.logp_T, Tensor):
        return completion
    mask_T, ids_TK, logp_TK = completion.mask_T, completion.topk_id_TK, completion.topk_logp_TK
    at = most if mask_T is None else int(mask_T.nonzero()[most - 1]) + 1
    routes_TLK, left = completion.routes_TLK, len(completion.token_ids) - at
    runs, before = [], 0
    for run in completion.runs:
        runs += [run._replace(tokens=min(run.tokens, at - before))] if before < at else []
        before += run.tokens
    turns = [turn._replace(end=min(turn.end, at)) for turn in completion.turns if turn.start < at]
    return replace(
        completion,
        token_ids=completion.token_ids[:at],
        logp_T=completion.logp_T[:at],
        finish="length",
        topk_id_TK=None if ids_TK is None else ids_TK[:at],
        topk_logp_TK=None if logp_TK is None else logp_TK[:at],
        mask_T=None if mask_T is None else mask_T[:at],
        turns=tuple(turns),
        runs=tuple(runs),
        routes_TLK=None if routes_TLK is None else routes_TLK[: len(routes_TLK) - left],
    )


def problem(completion: Completion, sampling: Sampling, weights: str, most: int) -> str:
    """Return what is wrong with a completion of at `most` so many tokens and what to do; "" where
    nothing is.
    """
    length, logp_T = len(completion.token_ids), completion.logp_T
    if not 1 <= completion.own_length <= most:
        return (
            f"has {completion.own_length} tokens; 1 to {most} can be "
            "(sampling.max_tokens). Hand in the tokens behind the prompt alone, the one that ended "
            "it included; a mask_T tells which of them others wrote."
        )
    if completion.finish not in FINISHES:
        return (
            f"ended by {completion.finish!r}. Say what ended it: {', '.join(map(repr, FINISHES))}."
        )
    if not isinstance(logp_T, Tensor):
        return (
            f"has no log-probabilities (logp_T is {logp_T!r}). Give a float32 tensor with that of "
            "every token under the distribution that it was drawn from: without them nobody can "
            "tell how far sampler and learner are apart."
        )
    if tuple(logp_T.shape) != (length,):
        return (
            f"has {length} tokens and log-probabilities of shape {tuple(logp_T.shape)}. Give one "
            "for every token, that of the end included."
        )
    if completion.weights != weights:
        return (
            f"says that it was sampled from weights {completion.weights!r}, and the engine's "
            f"capabilities say {weights!r}. Make it with weights=self.capabilities.weights."
        )
    asked, ids_TK = sampling.record_top_k, completion.topk_id_TK
    if asked and (ids_TK is None or tuple(ids_TK.shape) != (length, asked)):
        return (
            f"lacks the {asked} likeliest tokens of every position (sampling.record_top_k). Fill "
            "topk_id_TK and topk_logp_TK, or take a recipe that does not read them."
        )
    return ""


def _routes_problem(completion: Completion, prompt: int) -> str:
    """Return what is wrong with its record of experts; "" where nothing is, or there is none."""
    routes_TLK, read = completion.routes_TLK, prompt + len(completion.token_ids) - 1
    if routes_TLK is None or len(routes_TLK) == read:
        return ""
    return (
        f"has experts of {len(routes_TLK)} tokens, and prompt and answer without the last token "
        f"have {read}. Fill routes_TLK with -1 where they are not known, or leave it None."
    )


def _name(engine: Engine) -> str:
    return type(engine).__name__
