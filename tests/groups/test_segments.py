"""Segments close after punctuation and newlines."""

from __future__ import annotations

import torch

from groupwise.groups.segments import split_at_punctuation


def test_a_segment_ends_with_its_punctuation() -> None:
    row = ["So", " x", " =", " 2", ".", " Then", ",", " wait", "\n", "done"]
    assert split_at_punctuation([row], 10).tolist() == [[0, 0, 0, 0, 0, 1, 1, 2, 2, 3]]


def test_newline_inside_a_token_and_trailing_spaces_close_a_segment() -> None:
    assert split_at_punctuation([["a\n\n b", "c. ", "d"]], 3).tolist() == [[0, 1, 2]]


def test_rows_are_numbered_apart_and_padding_continues_the_last_segment() -> None:
    found = split_at_punctuation([["a", "b"], ["a.", "b"]], 4)
    assert found.tolist() == [[0, 0, 0, 0], [0, 1, 1, 1]]


def test_a_segment_ends_where_others_write() -> None:
    row = ["a", "b", "tool", "tool", "c", "d.", "e", "user"]
    own_NT = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 0, 0]]).bool()
    found = split_at_punctuation([row], 9, own_NT)
    assert found.tolist() == [[0, 0, 1, 1, 1, 1, 2, 3, 3]]
    everything = torch.ones(1, 9).bool()
    assert torch.equal(split_at_punctuation([row], 9, everything), split_at_punctuation([row], 9))
