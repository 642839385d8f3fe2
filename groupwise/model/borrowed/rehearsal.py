"""Borrowed layers are tried before they are used: do they compute what transformers computes?

Sequences in one pack behind a shared prompt, against transformers' own attention on each alone.
Windows are made shorter than the sequences for it. What fails is refused: a model that runs
slightly wrong is worse than none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import ModelError, in_short
from groupwise.model.borrowed.policy import NAME, Borrowed, borrow
from groupwise.model.config import ModelConfig
from groupwise.model.layers.attention import Attend, shared_positions, shared_prompts
from groupwise.model.layers.attention_rule import PLAIN, AttentionRule
from groupwise.model.layers.head import logits
from groupwise.model.memory import is_out_of_memory

# What may differ by rounding: the largest |Δ log p|, in half precision the mean. There a mixture of
# experts may send a token elsewhere.
LARGEST, HALF_MEAN = 2e-3, 0.25
WINDOW = 4  # tokens
PROMPT, ANSWERS = 5, (7, 6)


def borrow_rehearsed(
    folder: Path,
    raw: dict[str, Any],
    shape: ModelConfig,
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> Borrowed:
    """Load a folder's model with borrowed layers that do what they should."""
    model = borrow(folder, raw, shape, dtype, device)
    try:
        model.resize(rehearse(model))
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
        if isinstance(error, ModelError) or is_out_of_memory(error):
            raise
        raise ModelError(
            f"A {shape.family} of transformers does not run as packs need it ({in_short(error)}). "
            "Use another model."
        ) from error
    return model


class Watched:
    """Attention that notes which layers called it, and with what."""

    def __init__(self, attend: Attend) -> None:
        self.attend = attend
        self.layers: list[int] = []
        self.sizes: set[tuple[int, int, int]] = set()  # key heads, widths of a key and a value

    def __call__(
        self,
        layer: int,
        query_THW: Tensor,
        key_TJW: Tensor,
        value_TJW: Tensor,
        rule: AttentionRule = PLAIN,
    ) -> Tensor:
        self.layers.append(layer)
        self.sizes.add((*key_TJW.shape[1:], value_TJW.shape[2]))
        return self.attend(layer, query_THW, key_TJW, value_TJW, rule)


@torch.no_grad()
def rehearse(model: Borrowed) -> ModelConfig:
    """Return the sizes that its layers really have; raise if they do not do what they should."""
    device, vocabulary = model.head_weight.device, model.config.vocab_size
    number = torch.arange(PROMPT + sum(ANSWERS), device=device)
    token_T = (number * 7919 + 13) % min(vocabulary, 997)
    prompt_T, *answers = torch.split(token_T, [PROMPT, *ANSWERS])
    watched = Watched(shared_prompts([PROMPT], [ANSWERS], device))
    with _short_windows(model.lender.config):
        hidden_TD = model(token_T, shared_positions([PROMPT], [ANSWERS], device), watched)
        _check_layers(model, watched)
        ours_TV = logits(hidden_TD, model.head_weight, rule=model.head_rule)
        parts = torch.split(ours_TV, [PROMPT, *ANSWERS])
        gaps = []
        with _own_attention(model.lender):
            for answer_T, part_TV in zip(answers, parts[1:], strict=True):
                row_T = torch.cat((prompt_T, answer_T))
                own_TV = model.lender(input_ids=row_T[None], use_cache=False).logits[0].float()
                mine_TV = torch.cat((parts[0], part_TV)).float()[:, : own_TV.shape[1]]
                gap_TV = mine_TV.log_softmax(-1) - own_TV.log_softmax(-1)
                gaps.append(gap_TV.gather(1, row_T.roll(-1)[:, None]).abs())
    _check_gap(model, torch.cat(gaps))
    ((groups, width, value),) = watched.sizes
    return replace(
        model.config,
        num_kv_heads=groups,
        head_dim=width,
        value_dim=None if value == width else value,
    )


def _check_layers(model: Borrowed, watched: Watched) -> None:
    shape = model.config
    if sorted(watched.layers) != list(range(shape.num_layers)):
        raise ModelError(
            f"The {shape.num_layers} layers of this {shape.family} asked {len(watched.layers)} "
            "times for attention through transformers' interface; once each is what packs and "
            "caches can serve. Use another model."
        )
    if len(watched.sizes) > 1:
        raise ModelError(
            f"Layers of this {shape.family} have keys and values of different sizes "
            f"({', '.join(map(str, sorted(watched.sizes)))}), which one cache can't hold. Use "
            "another model."
        )


def _check_gap(model: Borrowed, gap_T1: Tensor) -> None:
    half = model.head_weight.dtype.itemsize == 2
    found = float(gap_T1.mean() if half else gap_T1.max())
    limit = HALF_MEAN if half else LARGEST
    if not found <= limit:
        raise ModelError(
            f"This {model.config.family} computes something else in a pack than transformers does "
            f"alone: log-probabilities differ by {found:.2g} ({'mean' if half else 'at most'}), "
            f"and rounding makes up to {limit:g}. Its layers do something that is not known here. "
            "Use another model."
        )


@contextmanager
def _own_attention(lender: Any) -> Iterator[None]:
    lender.set_attn_implementation("eager")
    try:
        yield
    finally:
        lender.set_attn_implementation(NAME)


@contextmanager
def _short_windows(config: Any) -> Iterator[None]:
    """Shorten the windows: masks are made from the configuration at each pass."""
    parts = {id(part): part for part in (config, config.get_text_config(decoder=True))}
    before = [
        (part, part.sliding_window)
        for part in parts.values()
        if isinstance(getattr(part, "sliding_window", None), int)
    ]
    for part, window in before:
        part.sliding_window = min(window, WINDOW)
    try:
        yield
    finally:
        for part, window in before:
            part.sliding_window = window
