"""Random numbers and the draw: known answers, uniform, independent, the exact inverse."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from groupwise.engine.native.sampling import BLOCK, choose, draw, keep_likeliest, padded_width
from groupwise.engine.protocol import Sampling
from groupwise.engine.randomness import key, normals, philox, uniforms

ONE = 1 - 2.0**-53  # the largest number that a generator can give


def test_philox_gives_the_known_answers() -> None:
    """The vectors published with the generator."""

    def words(counter: list[int], key: list[int]) -> list[int]:
        a, b, c, d = (torch.tensor([x]) for x in counter)
        left, right = (torch.tensor([x]) for x in key)
        return [int(x) for x in philox((a, b, c, d), (left, right))]

    full = 0xFFFFFFFF
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert words([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words([full] * 4, [full] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert words(pi, [0xA4093822, 0x299F31D0]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def keys(count: int = 64, **fixed: int) -> Tensor:
    """Keys that differ in the sample index only."""
    named = {"seed": 0, "prompt_id": 0, "draw": 0} | fixed
    return torch.tensor([key(stream="train", sample=i, **named) for i in range(count)])


def test_uniform_numbers_are_uniform() -> None:
    number = uniforms(keys(), 2000).flatten()
    assert number.dtype == torch.float64 and number.min() >= 0 and number.max() < 1
    counts = torch.histc(number, 100, 0, 1)
    expected = len(number) / 100
    assert float(((counts - expected) ** 2 / expected).sum()) < 99 + 4 * (2 * 99) ** 0.5
    assert len(number.unique()) == len(number)
    low = (number * 2**53).long() & 1023  # the lowest bits, too
    counts = torch.bincount(low, minlength=1024).double()
    expected = len(number) / 1024
    assert float(((counts - expected) ** 2 / expected).sum()) < 1023 + 4 * (2 * 1023) ** 0.5


def test_every_part_of_the_name_makes_an_independent_sequence() -> None:
    """Correlations within, across and shifted are those of chance."""
    length = 4000
    names = [
        (seed, stream, prompt, count, sample)
        for seed, stream, prompt, count, sample in itertools.product(
            (0, 1), ("train", "eval"), (0, 1), (0, 1), (0, 1)
        )
    ]
    key_N4 = torch.tensor([key(*name) for name in names])
    number = uniforms(key_N4, length) - 0.5
    shifted = torch.cat([number, number.roll(1, 1), number.roll(2, 1)])
    shifted = shifted / shifted.norm(dim=1, keepdim=True)
    correlation = shifted @ shifted.T
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < 5 / length**0.5
    noise = uniforms(torch.tensor([key(*name, purpose="noise") for name in names]), length) - 0.5
    assert (noise * number).mean(1).abs().max() < 5 / 12 / length**0.5


def test_a_number_depends_on_nothing_but_its_name() -> None:
    whole = uniforms(keys(9), 31)
    assert torch.equal(uniforms(keys(9)[4:5], 31), whole[4:5])
    assert torch.equal(uniforms(keys(9), 6), whole[:, :6])
    # Fixed for ever: another number here would change every run that is resumed or repeated.
    assert key(1, "eval", 2, 3, 4) == (1647292979, 821378370, 2851624488, 1654733939)
    assert not torch.equal(uniforms(keys(1, seed=2**70), 4), uniforms(keys(1, seed=2**71), 4))


def test_normal_numbers_are_normal() -> None:
    key_N4, width = keys(50), 4001
    number = normals(key_N4, torch.arange(50), width).double()
    assert number.shape == (50, width) and number.isfinite().all()
    count = number.numel()
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((number**power).mean()) - moment) < 4 * (spread / count) ** 0.5
    again = normals(key_N4[[7]], torch.tensor([7]), width).double()
    assert torch.equal(again[0], number[7])
    other = normals(key_N4[[7]], torch.tensor([8]), width).double()
    assert abs(float((again * other).mean())) < 4 / width**0.5


def test_the_draw_inverts_the_distribution_exactly() -> None:
    generator = torch.Generator().manual_seed(0)
    weight_NV = torch.rand(200, 20 * BLOCK, generator=generator) ** 8
    weight_NV[::2] *= torch.rand(100, 20 * BLOCK, generator=generator) < 0.05
    uniform_N = torch.rand(200, dtype=torch.float64, generator=generator)
    token_N, total_N = draw(weight_NV, uniform_N)
    cumulative_NV = weight_NV.double().cumsum(-1)
    target_N = uniform_N * cumulative_NV[:, -1]
    rows = torch.arange(200)
    slack = 1e-6 * cumulative_NV[:, -1]  # block sums are rounded to float32
    assert (cumulative_NV[rows, token_N] > target_N - slack).all()
    before_N = cumulative_NV[rows, token_N] - weight_NV[rows, token_N].double()
    assert (before_N <= target_N + slack).all()
    torch.testing.assert_close(total_N, cumulative_NV[:, -1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.5, 1 - 2.0**-30, ONE])
def test_a_token_of_probability_0_is_never_drawn(uniform: float) -> None:
    """Whatever stands before, between and behind the tokens that can be drawn."""
    generator = torch.Generator().manual_seed(1)
    weight_NV = torch.zeros(500, 6 * BLOCK)
    for row in weight_NV:
        few = torch.randint(6 * BLOCK, (int(torch.randint(1, 9, (), generator=generator)),),
                            generator=generator)  # fmt: skip
        row[few] = torch.rand(len(few), generator=generator) ** 20 + 1e-38
    token_N, _ = draw(weight_NV, torch.full((500,), uniform, dtype=torch.float64))
    assert (weight_NV.gather(1, token_N[:, None]) > 0).all()
    if uniform == 0.0:
        assert torch.equal(token_N, (weight_NV > 0).long().argmax(-1))


def test_all_uniform_numbers_close_to_one_stay_within_the_vocabulary() -> None:
    """Rows whose float32 sums round up and down, and padding behind the vocabulary."""
    generator = torch.Generator().manual_seed(2)
    width = padded_width(97)
    logits_NV = torch.full((2000, width), -torch.inf)
    logits_NV[:, :97] = 3 * torch.randn(2000, 97, generator=generator)
    choice = choose(logits_NV, torch.empty_like(logits_NV), torch.full((2000,), ONE).double(),
                    Sampling(1))  # fmt: skip
    assert choice.token_N.max() == 96 and choice.logp_N.isfinite().all()


def test_top_k_and_top_p_by_hand() -> None:
    def kept(top_k: int, top_p: float) -> list[int]:
        weight_NV = torch.zeros(1, BLOCK)
        weight_NV[0, :6] = torch.tensor([1.0, 4.0, 2.0, 2.0, 1.0, 6.0])  # of 16
        keep_likeliest(weight_NV, top_k, top_p)
        return weight_NV[0].nonzero()[:, 0].tolist()

    assert kept(1, 1.0) == [5]
    assert kept(2, 1.0) == [1, 5]
    assert kept(3, 1.0) == [1, 2, 3, 5]  # two are third
    assert kept(0, 6 / 16) == [5]
    assert kept(0, 6.1 / 16) == [1, 5]
    assert kept(0, 10 / 16) == [1, 5]
    assert kept(0, 14.5 / 16) == [0, 1, 2, 3, 4, 5]
    assert kept(2, 0.6) == [5]  # 6 of the 10 that top-k leaves
    assert kept(2, 0.61) == [1, 5]
    assert kept(0, 1.0) == kept(BLOCK, 1.0) == [0, 1, 2, 3, 4, 5]


def test_top_p_looks_as_far_as_it_needs_to() -> None:
    """A flat row needs more tokens than the first look has; a peaked neighbour changes nothing."""
    weight_NV = torch.ones(2, 40 * BLOCK)
    weight_NV += torch.linspace(0, 0.5, 40 * BLOCK)
    weight_NV[1, 7] = 1e9
    keep_likeliest(weight_NV, 0, 0.9)
    assert weight_NV[1].count_nonzero() == 1
    ordered = (1 + torch.linspace(0, 0.5, 40 * BLOCK)).double().flip(0)
    needed = 1 + int((ordered.cumsum(0) < 0.9 * ordered.sum()).sum())
    assert abs(int(weight_NV[0].count_nonzero()) - needed) <= 1
