"""The batch-invariant product: right, and a row's bits the same in every company and tile.

Without a GPU it runs in Triton's interpreter, which multiplies bfloat16 wrongly: not tested there.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton")

from groupwise.errors import ModelError
from groupwise.model.kernels import matmul as kernels
from groupwise.model.kernels.matmul import HALF_TILES, choose_tile, matmul

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("kernels")
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * CUDA
ROUNDING = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("tokens", "width", "features"), [(1, 16, 8), (65, 72, 200), (200, 576, 264), (70, 64, 384)]
)
def test_it_is_the_product_rounded_once(
    tokens: int, width: int, features: int, bias: bool, dtype: torch.dtype
) -> None:
    x_TD = normal(tokens, width, dtype=dtype)
    weight_FD = normal(features, width, seed=1, dtype=dtype)
    bias_F = normal(features, seed=2, dtype=dtype) if bias else None
    y_TF = matmul(x_TD, weight_FD, bias_F)
    exact_TF = x_TD.double() @ weight_FD.double().t() + (0 if bias_F is None else bias_F.double())
    assert y_TF.dtype == dtype and y_TF.shape == (tokens, features)
    # One rounding of the result, and sums in float32: far less than rounding in between would give.
    slack_TF = x_TD.double().abs() @ weight_FD.double().abs().t() * 1e-6
    assert ((y_TF - exact_TF).abs() <= ROUNDING[dtype] * exact_TF.abs() + slack_TF).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_company(dtype: torch.dtype) -> None:
    x_TD, weight_FD = normal(300, 200, dtype=dtype), normal(136, 200, seed=1, dtype=dtype)
    y_TF = matmul(x_TD, weight_FD)
    for part in (slice(0, 1), slice(130, 137), slice(50, 250)):
        assert torch.equal(matmul(x_TD[part].contiguous(), weight_FD), y_TF[part])


def test_a_row_has_the_same_bits_in_every_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16 if CUDA else torch.float16
    x_TD, weight_FD = normal(150, 1536, dtype=dtype), normal(520, 1536, seed=1, dtype=dtype)
    results = []
    for tile in HALF_TILES:
        monkeypatch.setattr(kernels, "HALF_TILES", (tile,))
        results.append(matmul(x_TD, weight_FD, weight_FD[:, 0].contiguous()))
    assert all(torch.equal(result, results[0]) for result in results[1:])


def test_rows_may_be_parts_of_wider_ones() -> None:
    wide_TD, wide_FD = normal(20, 96, dtype=torch.float16), normal(40, 96, dtype=torch.float16)
    y_TF = matmul(wide_TD[:, 16:48], wide_FD[8:24, 32:64])
    again_TF = matmul(wide_TD[:, 16:48].contiguous(), wide_FD[8:24, 32:64].contiguous())
    assert torch.equal(y_TF, again_TF)


def test_few_tokens_get_small_tiles_and_many_get_large_ones() -> None:
    half = torch.bfloat16
    assert choose_tile(16, 1536, half) == HALF_TILES[-1]
    assert choose_tile(8192, 1536, half) == choose_tile(512, 151936, half) == HALF_TILES[0]
    assert {tile.rows for tile in HALF_TILES} == {64, 128}  # multiples of the instruction's rows


@pytest.mark.parametrize(
    ("x_TD", "weight_FD", "words"),
    [
        (torch.zeros(3, 16), torch.zeros(8, 32), "last axis"),
        (torch.zeros(3, 16), torch.zeros(8, 16, dtype=torch.float16), "precision"),
        (torch.zeros(0, 16), torch.zeros(8, 16), "there must be a row"),
        (torch.zeros(3, 6), torch.zeros(8, 6), "multiples of 4"),
        (torch.zeros(3, 16), torch.zeros(16, 8).t(), "contiguous"),
        (torch.zeros(3, 16), torch.zeros(6, 16), "multiples of 4"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(x_TD: Tensor, weight_FD: Tensor, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        matmul(x_TD.to(DEVICE), weight_FD.to(DEVICE))
