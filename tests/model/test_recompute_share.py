"""A share of the layers computed again in the backward pass: the same bits, less that is kept."""

from __future__ import annotations

import pytest
import torch
from model_zoo import make
from torch import Tensor

from groupwise.config import load
from groupwise.errors import ConfigError
from groupwise.model.cost import activations, update_cost
from groupwise.model.layers.transformer import computed_again
from groupwise.optim.packs import Sequences, outputs

ROWS = Sequences([(1, 2, 3), (4, 5)], [(6, 7, 8, 9), (10, 11)])


@pytest.mark.parametrize(
    ("layers", "share", "chosen"),
    [
        (4, 0.0, []), (4, False, []), (4, 1.0, [0, 1, 2, 3]), (4, True, [0, 1, 2, 3]),
        (4, 0.5, [1, 3]), (6, 1 / 3, [2, 5]), (10, 0.1, [9]), (10, 0.7, [1, 2, 4, 5, 7, 8, 9]),
    ],
)  # fmt: skip
def test_layers_are_chosen_evenly(layers: int, share: float, chosen: list[int]) -> None:
    assert [n for n in range(layers) if computed_again(n, share)] == chosen


def kept(share: float) -> tuple[int, dict[str, Tensor]]:
    """Bytes that a forward pass keeps for the backward one, beside weights; and the gradients."""
    model = make("qwen3")
    model.recompute = share
    seen: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x: Tensor) -> Tensor:
        place = x.untyped_storage().data_ptr()
        if place not in own:
            seen[place] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        logp_NT = outputs(model, ROWS.pack([0, 1]), temperature=1.0)["logp_NT"]
        count = sum(seen.values())
    logp_NT.sum().backward()  # type: ignore[no-untyped-call]
    return count, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_gradients_are_the_same_and_less_is_kept() -> None:
    (all_of_it, whole), (half, some), (least, none) = (kept(x) for x in (0.0, 0.5, 1.0))
    assert least < half < all_of_it
    for other in (some, none):
        assert whole.keys() == other.keys()
        assert all(torch.equal(x, other[name]) for name, x in whole.items())


def test_a_share_costs_its_share() -> None:
    shape = make("qwen3").config
    full, half, least = (activations(shape, recompute=x) for x in (False, 0.5, True))
    layer = (full - activations(shape, recompute=1e-9)) * -1  # one layer more, for its gradients
    assert least < half < full and half == pytest.approx((least + full + layer) / 2, abs=1)
    again = [update_cost(shape, [], recompute=x)["recomputed"].flops for x in (0.0, 0.5, 1.0)]
    assert again[1] - again[0] == again[2] - again[1]


def test_the_setting_is_a_switch_or_a_share() -> None:
    for given, read in (("true", True), ("false", False), ("0.25", 0.25), ("1", 1.0)):
        found = load({}, [f"optim.recompute={given}"]).optim.recompute
        assert found == read and type(found) is type(read)
    for given in ("1.5", "often"):
        with pytest.raises(ConfigError, match=r"optim\.recompute"):
            load({}, [f"optim.recompute={given}"])
