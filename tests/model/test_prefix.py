"""The learner's attention in two parts: outputs and gradients against one softmax over all keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from groupwise.errors import ModelError
from groupwise.model.layers import prefix
from groupwise.model.layers.attention import packed, shared_prompts
from groupwise.model.layers.prefix import PrefixAttention

CUDA = torch.cuda.is_available()
PACKS = {
    "two groups": ([3, 5], [[4, 1, 7], [2, 2]]),
    "a group without completions": ([3, 6, 2], [[4], [], [1, 1]]),
    "completions of one token": ([1, 2], [[1, 1, 1], [1]]),
    "only prompts": ([4, 1, 9], [[], [], []]),
    "one segment": ([7], [[]]),
    "one token": ([1], [[]]),
    "longer than a tile": ([70], [[65, 3]]),
}


def inputs(
    tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    heads, groups, width = sizes
    generator = torch.Generator().manual_seed(tokens)
    parts = [torch.randn(tokens, n, width, generator=generator) for n in (heads, groups, groups)]
    return [part.to(device, dtype).requires_grad_() for part in parts]


def size_of(pack: tuple[list[int], list[list[int]]]) -> int:
    return sum(pack[0]) + sum(map(sum, pack[1]))


def run(attend, x: list[Tensor]) -> list[Tensor]:
    """Output and gradients for a weighting that treats all entries differently."""
    seen_THW = attend(0, *x)
    weight = torch.linspace(-1, 2, seen_THW.numel(), dtype=torch.float64).cos()
    weight = weight.view(seen_THW.shape).to(seen_THW)
    return [seen_THW.detach(), *torch.autograd.grad((seen_THW * weight).sum(), x)]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("sizes", [(6, 2, 8), (3, 3, 5), (4, 1, 16)], ids=str)
@pytest.mark.parametrize("name", PACKS)
def test_parts_make_one_softmax(name, sizes, exact):
    pack = PACKS[name]
    x = inputs(size_of(pack), sizes, torch.float64)
    ours = run(PrefixAttention(*pack, "cpu", exact), x)
    theirs = run(shared_prompts(*pack), x)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_plain_packs_are_prompts_without_completions():
    lengths = [3, 1, 8]
    x = inputs(sum(lengths), (4, 2, 8), torch.float64)
    ours, theirs = run(PrefixAttention(lengths, [()] * len(lengths)), x), run(packed(lengths), x)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_gradients_against_finite_differences():
    attend = PrefixAttention([2, 3], [[2, 1], []])
    x = inputs(8, (2, 1, 3), torch.float64)
    assert torch.autograd.gradcheck(lambda *y: attend(0, *y), x, rtol=1e-7)


def test_a_checkpointed_layer_gives_the_same_bits():
    pack = PACKS["two groups"]
    attend = PrefixAttention(*pack)
    x = inputs(size_of(pack), (6, 2, 8), torch.float32)

    def again(layer: int, *y: Tensor) -> Tensor:
        return checkpoint(attend, layer, *y, use_reentrant=False)

    for a, b in zip(run(attend, x), run(again, x), strict=True):
        assert torch.equal(a, b)


def test_large_scores_overflow_nowhere():
    pack = PACKS["two groups"]
    x = [30 * y.detach() for y in inputs(size_of(pack), (6, 2, 8), torch.float64)]
    x = [y.requires_grad_() for y in x]
    ours, theirs = run(PrefixAttention(*pack), x), run(shared_prompts(*pack), x)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_merge_by_hand():
    """Two keys of equal weight, then one: (1 + 2 + 4·e)/(2 + e)."""
    seen, other = torch.tensor([[[1.5]], [[1.5]]]), torch.tensor([[[4.0]], [[9.0]]])
    lse, other_lse = torch.log(torch.tensor([[2.0, 2.0]])), torch.tensor([[1.0, 1.0]])
    behind = torch.tensor([True, False])
    merged, merged_lse = prefix.merge(seen, lse, other, other_lse, behind)
    e = torch.tensor(1.0).exp()
    torch.testing.assert_close(merged[:, 0, 0], torch.stack([(3 + 4 * e) / (2 + e), e * 0 + 1.5]))
    torch.testing.assert_close(merged_lse[0], torch.stack([(2 + e).log(), lse[0, 1]]))


def test_tiles_cover_each_token_once():
    pack = ([70, 3], [[64, 65], [1]])
    rows = prefix.tiles(*pack).tolist()
    assert rows == [
        [0, 0, 70, 0, 0],
        [64, 0, 70, 0, 0],
        [70, 70, 64, 0, 70],
        [134, 134, 65, 0, 70],
        [198, 134, 65, 0, 70],
        [199, 199, 3, 199, 0],
        [202, 202, 1, 199, 3],
    ]


def test_bad_packs_are_refused():
    with pytest.raises(ModelError, match="at least one token"):
        PrefixAttention([3], [[2, 0]])
    with pytest.raises(ModelError, match="at least one sequence"):
        PrefixAttention([], [])
    with pytest.raises(ModelError, match="planned for 5 tokens and has 4"):
        PrefixAttention([3], [[2]])(0, *inputs(4, (2, 1, 4), torch.float32))


@pytest.mark.skipif(not CUDA, reason="no GPU: make check-gpu where there is one")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("sizes", [(9, 3, 64), (12, 2, 128)], ids=str)
@pytest.mark.parametrize(
    "pack",
    [
        *PACKS.values(),
        ([75, 60, 600], [[255, 1, 64, 130], [], [300, 7]]),
        ([64] * 8, [[128] * 16] * 8),
    ],
    ids=lambda pack: f"{len(pack[0])} groups, {size_of(pack)} tokens",
)
def test_on_a_gpu(pack, sizes, exact):
    """In bfloat16, as near to float64 as one flash attention over unshared sequences could be."""
    x = inputs(size_of(pack), sizes, torch.bfloat16, "cuda")
    wide = [y.detach().double().requires_grad_() for y in x]
    expected = run(shared_prompts(*pack, device="cuda"), wide)
    attend = PrefixAttention(*pack, "cuda", exact)
    ours = run(attend, x)
    for name, a, b in zip(("seen", "query", "key", "value"), ours, expected, strict=True):
        error = (a.double() - b).norm() / (b.norm() + 0.01 * b.numel() ** 0.5)
        assert error < 0.01, f"{name}: {error:.4f}"
    if exact:
        for a, b in zip(ours, run(attend, x), strict=True):
            assert torch.equal(a, b), "exact mode repeats to the bit, backward too"
