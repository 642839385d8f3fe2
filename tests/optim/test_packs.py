"""Micro-batches with shared prompts against one plain forward pass a row."""

from __future__ import annotations

import pytest
import torch
from model_zoo import make
from torch import Tensor

from groupwise.model.layers.attention import packed, packed_positions
from groupwise.model.layers.head import logits
from groupwise.model.layers.transformer import Transformer
from groupwise.optim.packs import Sequences, micro_batches, outputs, pack, score

PROMPTS = [(5, 9, 2, 7), (5, 9, 2, 7), (5, 9, 2, 7), (3,), (3,), (8, 8, 1, 4, 6, 2)]
ANSWERS = [(1, 2, 3), (4,), (1, 2, 0, 5, 6), (7, 7), (0,), (9, 3, 3, 1)]
ROWS = Sequences(PROMPTS, ANSWERS)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return make("llama3", dtype=torch.float64)


def plain(model: Transformer, row: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of one row by the textbook: one sequence, all logits."""
    ids = torch.tensor([*PROMPTS[row], *ANSWERS[row]])
    hidden = model(ids, packed_positions([len(ids)]), packed([len(ids)]))
    logp = torch.log_softmax(logits(hidden, model.head_weight, temperature), -1)
    start = len(PROMPTS[row])
    at = torch.arange(start, len(ids))
    # The token at position t is predicted by the state at t − 1.
    return logp[at - 1, ids[at]], -(logp.exp() * logp).sum(-1)[at - 1]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_bug_25_each_token_is_predicted_by_the_state_before_it(
    model: Transformer, temperature: float
) -> None:
    found = outputs(model, pack(ROWS, range(6), ROWS.width), temperature=temperature)
    for row in range(6):
        logp, entropy = plain(model, row, temperature)
        n = len(ANSWERS[row])
        torch.testing.assert_close(found["logp_NT"][row, :n], logp, rtol=0, atol=1e-10)
        torch.testing.assert_close(found["entropy_NT"][row, :n], entropy, rtol=0, atol=1e-10)
        assert (found["logp_NT"][row, n:] == 0).all()


def test_bug_24_neighbours_in_a_pack_do_not_leak(model: Transformer) -> None:
    """Neither the rows of the same prompt nor prompts and rows before it."""
    among = outputs(model, pack(ROWS, range(6), ROWS.width), temperature=1.0)["logp_NT"]
    for row in range(6):
        alone = outputs(model, pack(ROWS, [row], ROWS.width), temperature=1.0)["logp_NT"][0]
        torch.testing.assert_close(among[row], alone, rtol=0, atol=1e-10)


def test_bug_23_there_is_no_padding_to_get_positions_wrong(model: Transformer) -> None:
    """Short and long prompts in one pack: each starts at position 0, whatever its neighbours."""
    part = pack(ROWS, range(6), ROWS.width)
    assert part.position_T.tolist() == [
        *range(4), 4, 5, 4, 5, 6, 7,  # the second answer has one token, which nobody reads
        0, 1,
        *range(6), 6, 7, 8,
    ]  # fmt: skip


def test_bug_22_two_forward_passes_are_identical(model: Transformer) -> None:
    model.train()
    first, second = (
        outputs(model, pack(ROWS, range(6), ROWS.width), temperature=1.0) for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_micro_batches_keep_order_and_budget() -> None:
    assert micro_batches(ROWS, range(6), 10_000) == [[0, 1, 2, 3, 4, 5]]
    # 4 + 2, + 0, then 4 more do not fit into 8; the prompt is paid again.
    assert micro_batches(ROWS, range(6), 8) == [[0, 1], [2], [3, 4], [5]]
    assert micro_batches(ROWS, range(6), 1) == [[0], [1], [2], [3], [4], [5]]
    assert micro_batches(ROWS, [3, 5], 10_000) == [[3, 5]]


@pytest.mark.parametrize("budget", [1, 8, 12, 10_000])
def test_any_split_gives_the_same_gradient(model: Transformer, budget: int) -> None:
    weight_NT = torch.linspace(-1, 1, 6 * ROWS.width, dtype=torch.float64).view(6, -1)

    def gradient(parts: list[list[int]]) -> Tensor:
        model.zero_grad()
        for rows in parts:
            found = outputs(model, pack(ROWS, rows, ROWS.width), temperature=0.8)
            (weight_NT[rows] * (found["logp_NT"] + 0.3 * found["entropy_NT"])).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    whole = gradient([list(range(6))])
    split = gradient(micro_batches(ROWS, range(6), budget))
    torch.testing.assert_close(split, whole, rtol=1e-9, atol=1e-12)


def test_scoring_in_the_update_s_passes_gives_its_bits() -> None:
    """A ratio or a KL that should be exactly 1 or 0 is."""
    model = make("llama3")
    parts = micro_batches(ROWS, range(6), 8)
    scored = score(model, ROWS, parts, 0.7)
    for rows in parts:
        found = outputs(model, pack(ROWS, rows, ROWS.width), temperature=0.7)
        assert torch.equal(found["logp_NT"].detach(), scored[rows])


def test_top_k_and_given_ids(model: Transformer) -> None:
    ids_NTK = torch.randint(0, 10, (6, ROWS.width, 2), generator=torch.Generator().manual_seed(0))
    part = pack(ROWS, range(6), ROWS.width)
    found = outputs(model, part, temperature=1.0, top_k=3, at={"logp_at_sampler_topk_NTK": ids_NTK})
    attend = model.ops.attention(part.prompts, part.behind, part.token_T.device)
    full = logits(
        model(part.token_T, part.position_T, attend)[part.take_A], model.head_weight
    ).log_softmax(-1)
    top = full.topk(3)
    assert torch.equal(part.collect(found["topk_id_NTK"]), top.indices)
    torch.testing.assert_close(part.collect(found["topk_logp_NTK"]), top.values)
    torch.testing.assert_close(
        part.collect(found["logp_at_sampler_topk_NTK"]), full.gather(1, part.collect(ids_NTK))
    )


def test_a_pack_by_hand() -> None:
    part = pack(ROWS, [1, 2, 3], ROWS.width)
    assert part.prompts == [4, 1] and part.behind == [[4], [1]]  # one token: nobody reads it
    assert part.token_T.tolist() == [5, 9, 2, 7, 1, 2, 0, 5, 3, 7]
    assert part.take_A.tolist() == [3, 3, 4, 5, 6, 7, 8, 9]
    assert part.target_A.tolist() == [4, 1, 2, 0, 5, 6, 7, 7]
    assert part.place_A.tolist() == [0, 5, 6, 7, 8, 9, 10, 11]
    assert part.row_N.tolist() == [1, 2, 3]
    assert part.mask_NT.sum(1).tolist() == [1, 5, 2]


def test_the_passes_of_a_step_read_the_same_packs() -> None:
    rows = Sequences(PROMPTS, ANSWERS)
    assert rows.pack([0, 1]) is rows.pack([0, 1]) is not rows.pack([0, 1, 2])
    assert rows.tokens()[2].tolist() == [1, 2, 0, 5, 6] and rows.tokens()[3].tolist()[2:] == [0] * 3
    assert [(g.prompt, g.completions) for g in rows.sizes()] == [
        (4, [3, 1, 5]), (1, [2, 1]), (6, [4])
    ]  # fmt: skip
    assert Sequences([], []).sizes() == []


# --- tokens that the policy did not write -------------------------------------------------------

HOLES = [None, None, (1, 0, 0, 1, 0), (0, 1), None, (1, 1, 0, 1)]
WITH_HOLES = Sequences(
    PROMPTS, ANSWERS, [None if hole is None else torch.tensor(hole).bool() for hole in HOLES]
)


def test_others_tokens_are_laid_out_and_read_as_all(model: Transformer) -> None:
    """Positions, places, sizes and cuts are those of rows that the policy wrote alone."""
    mine, plain = (pack(rows, range(6), ROWS.width) for rows in (WITH_HOLES, ROWS))
    assert torch.equal(mine.token_T, plain.token_T)
    assert torch.equal(mine.position_T, plain.position_T)
    assert (mine.prompts, mine.behind) == (plain.prompts, plain.behind)
    assert WITH_HOLES.sizes() == ROWS.sizes() and WITH_HOLES.width == ROWS.width
    assert torch.equal(WITH_HOLES.tokens(), ROWS.tokens())
    assert torch.equal(WITH_HOLES.layout(), ROWS.mask())
    for budget in (1, 9, 14, 100):
        assert micro_batches(WITH_HOLES, range(6), budget) == micro_batches(ROWS, range(6), budget)


def test_others_tokens_are_not_predicted(model: Transformer) -> None:
    """Log-probabilities and entropies are those of plain rows at the policy's tokens, else 0."""
    own_NT = WITH_HOLES.mask()
    for row, hole in enumerate(HOLES):
        own = [True] * len(ANSWERS[row]) if hole is None else [bool(x) for x in hole]
        assert own_NT[row].tolist() == own + [False] * (ROWS.width - len(own))
    part = pack(WITH_HOLES, range(6), ROWS.width)
    assert torch.equal(part.mask_NT, own_NT)
    assert part.target_A.tolist() == ROWS.tokens()[own_NT].tolist()
    found, plain = (
        outputs(model, each, temperature=1.0) for each in (part, pack(ROWS, range(6), ROWS.width))
    )
    for name in ("logp_NT", "entropy_NT"):
        assert (plain[name][ROWS.mask()] != 0).all() and (found[name][~own_NT] == 0).all()
        torch.testing.assert_close(found[name], plain[name] * own_NT, rtol=0, atol=1e-12)
