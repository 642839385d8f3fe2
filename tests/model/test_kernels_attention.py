"""Attention kernels: against float64 references, and decode against packs, to the bit.

Without a GPU they run in Triton's interpreter, whose dot products are wrong in bfloat16.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from groupwise.errors import ModelError  # noqa: E402
from groupwise.model.kernels.attention import (  # noqa: E402
    cache_layout,
    decode_attention,
    merge,
    pack_attention,
)
from groupwise.model.kernels.prompts import prompt_attention, prompt_tiles  # noqa: E402
from groupwise.model.layers import prefix  # noqa: E402
from groupwise.model.layers.attention import shared_prompts  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels")
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
TOLERANCE = {torch.float32: 4e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# Query heads, key heads, head width. The widest have key blocks of half a tile, so that some rows
# of a tile meet blocks of which they see nothing.
SMALL = [(6, 2, 16), (2, 2, 8), (7, 1, 24)]
MODELS = [(9, 3, 64), (12, 2, 128), (28, 4, 128), (4, 1, 256)] if CUDA else [(2, 1, 72)]


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def heads_of(tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype, seed: int):
    """Queries, keys and values as the model makes them: views of one product."""
    heads, groups, width = sizes
    together = noise(tokens, heads + 2 * groups, width, seed=seed, dtype=dtype)
    return together[:, :heads], together[:, heads : heads + groups], together[:, heads + groups :]


@dataclass
class Caches:
    own_key: Tensor
    own_value: Tensor
    prompt_key: Tensor
    prompt_value: Tensor
    layout: Tensor


def caches(layers: int, slots: int, prompts: int, room: int, prompt_room: int, sizes, dtype):
    _, groups, width = sizes
    own = (layers, slots, groups, room, width)
    prompt = (layers, prompts, groups, prompt_room, width)
    parts = [
        noise(*shape, seed=i, dtype=dtype) for i, shape in enumerate((own, own, prompt, prompt))
    ]
    return Caches(*parts, cache_layout(*parts))


def seen_by(query_HW: Tensor, key_UJW: Tensor, value_UJW: Tensor) -> Tensor:
    """One token's attention in float64, straight from the definition."""
    share = query_HW.shape[0] // key_UJW.shape[1]
    key_UHW, value_UHW = (x.double().repeat_interleave(share, 1) for x in (key_UJW, value_UJW))
    score_HU = torch.einsum("hw,uhw->hu", query_HW.double(), key_UHW) / query_HW.shape[1] ** 0.5
    return torch.einsum("hu,uhw->hw", score_HU.softmax(-1), value_UHW)


def numbers(x: Sequence[object], kind: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(x, dtype=kind, device=DEVICE)


def check_decode(seen_BHW, heads_BXW, cache, before, slots, own, prompt, lengths):
    """Rows see what they should in layer 1, and one key and value a row is written."""
    query_BHW, key_BJW, value_BJW = heads_BXW
    expected_key, expected_value = before
    for row, slot in enumerate(slots):
        expected_key[1, slot, :, own[slot]] = key_BJW[row]
        expected_value[1, slot, :, own[slot]] = value_BJW[row]
        key_UJW, value_UJW = (
            torch.cat(
                [
                    shared[1, prompt[slot], :, : lengths[prompt[slot]]].transpose(0, 1),
                    own_[1, slot, :, : own[slot] + 1].transpose(0, 1),
                ]
            )
            for shared, own_ in (
                (cache.prompt_key, expected_key),
                (cache.prompt_value, expected_value),
            )
        )
        expected_HW = seen_by(query_BHW[row], key_UJW, value_UJW)
        error = (seen_BHW[row].double() - expected_HW).abs().max().item()
        assert error < TOLERANCE[query_BHW.dtype], f"row {row}, slot {slot}: {error}"
    assert torch.equal(cache.own_key, expected_key), "one key a row is written, and nothing else"
    assert torch.equal(cache.own_value, expected_value)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SMALL + MODELS, ids=str)
def test_decode_is_attention_over_prompt_own_tokens_and_itself(sizes, dtype, splits, exact):
    if splits > 1 and dtype == torch.float16:
        pytest.skip("covered by the others")
    own = [0, 31, 32, 5, 63, 64, 70, 33]
    prompt = [2, 0, 0, 1, 2, 1, 1, 0]
    lengths = [1, 64, 75]
    slots = [6, 0, 3, 1, 5, 2, 7]  # slot 4 rests
    cache = caches(2, 8, 3, 96, 80, sizes, dtype)
    before = cache.own_key.clone(), cache.own_value.clone()
    heads_BXW = heads_of(len(slots), sizes, dtype, seed=9)
    seen_BHW = decode_attention(
        1,
        *heads_BXW,
        numbers(slots, torch.int64),
        numbers(own),
        numbers(prompt),
        numbers([lengths[p] for p in prompt]),
        cache.layout,
        splits,
        exact,
    )
    check_decode(seen_BHW, heads_BXW, cache, before, slots, own, prompt, lengths)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes", MODELS if CUDA else [(34, 2, 8), (9, 1, 24), (20, 1, 72)], ids=str
)
def test_rows_of_a_group_read_their_prompt_once(sizes, dtype, splits):
    """A group of two tiles, of one, of one row; slots in any order; rows that fill up."""
    if splits > 1 and dtype == torch.float16:
        pytest.skip("covered by the others")
    many = 64 // (sizes[0] // sizes[1]) + 3  # more rows than a tile takes
    groups = [(1, 75), (2, 1), (1, 64), (many, 33), (2, 150)]  # rows, tokens
    lengths = [n for _, n in groups] + [9]
    prompt = [0, *[p for p, (rows, _) in enumerate(groups) for _ in range(rows)]]
    slots = [*range(len(prompt) - 1, 0, -1), 0, 0]  # slot 0 is for rows that fill up
    own = [0, *[(0, 31, 32, 70, 5)[slot % 5] for slot in slots[:-2]]]
    cache = caches(2, len(prompt), len(lengths), 96, 160, sizes, dtype)
    for shared in (cache.prompt_key, cache.prompt_value):
        shared[:, -1] = torch.nan  # nobody's prompt
        for p, n in enumerate(lengths):
            shared[:, p, :, n:] = torch.nan
    before = cache.own_key.clone(), cache.own_value.clone()
    heads_BXW = heads_of(len(slots), sizes, dtype, seed=9)
    queries = sizes[0] // sizes[1]
    tiles = prompt_tiles([(prompt[slot], lengths[prompt[slot]]) for slot in slots], queries)
    unused = [(0, 0, len(groups), 9), (0, 0, 0, 0)]
    first = prompt_attention(1, heads_BXW[0], sizes[1], numbers(tiles + unused), cache.layout)
    nowhere = numbers([-1] * len(prompt))  # the prompts are not looked at again
    seen_BHW = decode_attention(
        1, *heads_BXW, numbers(slots), numbers(own), nowhere, nowhere, cache.layout, splits, False,
        first,
    )  # fmt: skip
    assert seen_BHW.isfinite().all()
    # Both rows that fill up write to slot 0, and nobody looks at what they see.
    rows = slice(0, len(slots) - 2)
    cache.own_key[1, 0], cache.own_value[1, 0] = before[0][1, 0], before[1][1, 0]
    real = tuple(x[rows] for x in heads_BXW)
    check_decode(seen_BHW, real, cache, before, slots[rows], own, prompt, lengths)


def test_tiles_are_neighbours_with_one_prompt():
    rows = [(7, 5)] * 3 + [(2, 9)] + [(7, 5)] * 22 + [(7, 4)]
    assert prompt_tiles(rows, queries=3) == [
        (0, 3, 7, 5),
        (3, 1, 2, 9),
        (4, 21, 7, 5),
        (25, 1, 7, 5),
        (26, 1, 7, 4),
    ]
    assert prompt_tiles(rows[:3], queries=33) == [(n, 1, 7, 5) for n in range(3)]


def test_garbage_behind_a_slots_tokens_is_not_read():
    sizes = (6, 2, 16)
    cache = caches(1, 1, 1, 40, 40, sizes, torch.float32)
    query, key, value = heads_of(1, sizes, torch.float32, seed=3)
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    arguments = (0, query, key, value, one * 0, one * 7, one * 0, one * 35, cache.layout)
    clean = [decode_attention(*arguments, splits, exact) for splits in (1, 2) for exact in (0, 1)]
    for own, shared in ((cache.own_key, cache.prompt_key), (cache.own_value, cache.prompt_value)):
        own[:, :, :, 7:] = torch.nan
        shared[:, :, :, 35:] = torch.nan
    again = [decode_attention(*arguments, splits, exact) for splits in (1, 2) for exact in (0, 1)]
    for a, b in zip(clean, again, strict=True):
        assert torch.equal(a, b)


PACKS = [
    ([3, 70, 64], [[1, 66], [5, 64, 2], [130]]),
    ([5], [[]]),
    ([1, 2], [[1], [1]]),
]
LONG = [([75, 600, 64, 130], [[1, 255, 64], [600, 3], [], [320, 65, 128, 200]])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("prompts, completions", PACKS + (LONG if CUDA else []))
@pytest.mark.parametrize("sizes", SMALL[:1] + MODELS, ids=str)
def test_pack_attention_is_attention(sizes, prompts, completions, dtype):
    tokens = sum(prompts) + sum(map(sum, completions))
    query_THW, key_TJW, value_TJW = heads_of(tokens, sizes, dtype, seed=1)
    tile_I5 = prefix.tiles(prompts, completions).to(DEVICE)
    seen_THW, lse_HT = pack_attention(query_THW, key_TJW, value_TJW, tile_I5)
    wide = query_THW.double(), key_TJW.double(), value_TJW.double()
    expected_THW = shared_prompts(prompts, completions, DEVICE)(0, *wide)
    assert (seen_THW.double() - expected_THW).abs().max() < TOLERANCE[dtype]
    _, expected_HT = prefix._in_parts(
        *wide, prefix.make_plan(prompts, completions, torch.device(DEVICE), exact=False)
    )
    assert lse_HT.dtype == torch.float32
    assert (lse_HT.double() - expected_HT).abs().max() < 1e-5 * max(1, expected_HT.abs().max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(3, 1, 16), *MODELS], ids=str)
def test_decode_and_pack_agree_to_the_bit(sizes, dtype):
    """What the engine sees token by token is what the learner sees in the pack."""
    if CUDA:
        prompts, completions = LONG[0]
        steps = [*range(0, 130), *range(130, 600, 13), 254, 319, 599]
    else:
        prompts, completions = PACKS[0]
        steps = [0, 1, 4, 62, 63, 64, 65, 129]
    tokens = sum(prompts) + sum(map(sum, completions))
    query_THW, key_TJW, value_TJW = heads_of(tokens, sizes, dtype, seed=2)
    tile_I5 = prefix.tiles(prompts, completions).to(DEVICE)
    seen_THW, _ = pack_attention(query_THW, key_TJW, value_TJW, tile_I5)

    rows = sum(map(len, completions))
    cache = caches(1, rows, len(prompts), 640, 640, sizes, dtype)
    starts, lengths, prompt_of, at = [], [], [], 0
    for p, group in enumerate(completions):
        span = slice(at, at + prompts[p])
        cache.prompt_key[0, p, :, : prompts[p]] = key_TJW[span].transpose(0, 1)
        cache.prompt_value[0, p, :, : prompts[p]] = value_TJW[span].transpose(0, 1)
        at += prompts[p]
        for n in group:
            starts.append(at)
            lengths.append(n)
            prompt_of.append(p)
            at += n
    order = list(reversed(range(rows)))
    prompt_S = torch.tensor(prompt_of, device=DEVICE, dtype=torch.int32)
    length_S = torch.tensor([prompts[p] for p in prompt_of], device=DEVICE, dtype=torch.int32)
    compared = 0
    for step in range(max(lengths)):
        here = [r for r in order if lengths[r] > step]
        token_B = torch.tensor([starts[r] + step for r in here], device=DEVICE)
        if step not in steps:  # the cache is filled all the same
            cache.own_key[0, here, :, step] = key_TJW[token_B]
            cache.own_value[0, here, :, step] = value_TJW[token_B]
            continue
        own_S = torch.full((rows,), step, device=DEVICE, dtype=torch.int32)
        seen_BHW = decode_attention(
            0,
            query_THW[token_B],
            key_TJW[token_B],
            value_TJW[token_B],
            torch.tensor(here, device=DEVICE, dtype=torch.int32),
            own_S,
            prompt_S,
            length_S,
            cache.layout,
            splits=1,
            exact=True,
        )
        assert torch.equal(seen_BHW, seen_THW[token_B]), f"step {step}"
        compared += len(here)
    assert compared >= 15


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(2, 2, 16), *MODELS], ids=str)
def test_a_group_has_the_same_bits_in_any_pack(sizes, dtype):
    prompts, completions = LONG[0] if CUDA else PACKS[0]
    tokens = sum(prompts) + sum(map(sum, completions))
    heads_TXW = heads_of(tokens, sizes, dtype, seed=4)
    tile_I5 = prefix.tiles(prompts, completions).to(DEVICE)
    seen_THW, lse_HT = pack_attention(*heads_TXW, tile_I5)
    at = 0
    for p, group in zip(prompts, completions, strict=True):
        span = slice(at, at + p + sum(group))
        alone = pack_attention(*(x[span] for x in heads_TXW), prefix.tiles([p], [group]).to(DEVICE))
        assert torch.equal(alone[0], seen_THW[span])
        assert torch.equal(alone[1], lse_HT[:, span])
        # And a prompt has them without its completions: that is how the engine reads it.
        span = slice(at, at + p)
        bare = pack_attention(*(x[span] for x in heads_TXW), prefix.tiles([p], [[]]).to(DEVICE))
        assert torch.equal(bare[0], seen_THW[span])
        at += p + sum(group)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads, width", [(3, 16), (9, 64), (2, 24)])
def test_merge_is_its_plain_twin(heads, width, dtype):
    tokens = 77
    seen, other = (noise(tokens, heads, width, seed=i, dtype=dtype) for i in (1, 2))
    lse, other_lse = (20 * noise(heads, tokens, seed=i) for i in (3, 4))
    behind = noise(tokens, seed=5) > 0
    other[~behind] = torch.nan  # nobody may look at it
    merged_THW, merged_HT = merge(seen, lse, other, other_lse, behind)
    other[~behind] = 0
    expected_THW, expected_HT = prefix.merge(
        seen.double(), lse.double(), other.double(), other_lse.double(), behind
    )
    assert torch.equal(merged_THW[~behind], seen[~behind])
    assert (merged_THW.double() - expected_THW).abs().max() < TOLERANCE[dtype] * 2
    assert (merged_HT.double() - expected_HT).abs().max() < 1e-5


def test_what_the_kernels_cannot_take_is_refused():
    sizes = (6, 2, 16)
    query, key, value = heads_of(4, sizes, torch.float32, seed=0)
    tile = prefix.tiles([4], [[]]).to(DEVICE)
    with pytest.raises(ModelError, match="contiguous within a token"):
        pack_attention(query.transpose(0, 1).contiguous().transpose(0, 1), key, value, tile)
    cache = noise(1, 2, 3, 16, 5, seed=0).transpose(3, 4)
    with pytest.raises(ModelError, match="Make them contiguous"):
        cache_layout(cache, cache, cache, cache)
    many, _, _ = heads_of(2, (65, 1, 16), torch.float32, seed=0)
    with pytest.raises(ModelError, match="65 query heads share a key head"):
        prompt_attention(0, many, 1, numbers([(0, 2, 0, 1)]), tile)
