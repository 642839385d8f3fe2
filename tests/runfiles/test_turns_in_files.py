"""Rollout files with tokens that the policy did not write, and files from before there were any."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from groupwise import records
from groupwise.errors import BatchError, RunError
from groupwise.records import Completion, Grade, Rollout, Task, Turn
from groupwise.replay.bits import compare_rollouts
from groupwise.replay.recorded import groups_of
from groupwise.runfiles import rollouts
from groupwise.runfiles.rollouts import Row, read, read_older

TURNS = (Turn("assistant", 0, 2), Turn("tool", 2, 4), Turn("assistant", 4, 6))
MASK = [True, True, False, False, True, False]  # the end of the last turn was put there


def completion(**changes: Any) -> Completion:
    logp_T = torch.tensor([-0.5, -0.25, math.nan, 77.0, -2.0, math.inf])
    made: dict[str, Any] = {"mask_T": torch.tensor(MASK), "turns": TURNS, **changes}
    return Completion((5, 6, 7, 8, 9, 2), logp_T, "eos", 3, **made)


def rollout(done: Completion, sample: int = 0) -> Rollout:
    return Rollout(Task(4, "q", token_ids=(1,)), 0, sample, done, "abcdef", Grade(1.0))


def written(path: Path, *rows: Row) -> Path:
    rollouts.write(path, rows, 1)
    return path


def as_version_1(path: Path, target: Path) -> Path:
    """The file as it was written before turns were recorded."""
    table = pq.read_table(path).drop_columns(["turns"])
    pq.write_table(table.replace_schema_metadata({rollouts.VERSION_KEY: b"1"}), target)
    return target


def test_holes_come_back_and_hold_nothing(tmp_path: Path) -> None:
    streams = {"entropy": [1.0, 2.0, math.nan, 3.0, 4.0, 5.0], "clipped": torch.ones(6).bool()}
    row = Row.of(rollout(completion()), group=0, prompt_text="q", ref_logp=None, **streams)
    back = read(written(tmp_path / "a.parquet", row)).to_pylist()[0]
    assert back["mask"] == MASK
    assert back["turns"] == [turn._asdict() for turn in TURNS]
    assert back["sampler_logp"] == [-0.5, -0.25, 0.0, 0.0, -2.0, 0.0]
    assert back["entropy"] == [1.0, 2.0, 0.0, 0.0, 4.0, 0.0]
    assert back["clipped"] == MASK
    assert back["ref_logp"] is None and back["token_ids"] == [5, 6, 7, 8, 9, 2]


def test_a_completion_comes_back_as_it_was(tmp_path: Path) -> None:
    plain = Completion((5, 6), torch.tensor([-1.0, -2.0]), "eos", 3)
    rows = [rollout(completion()), rollout(plain, 1)]
    path = written(tmp_path / "a", *(Row.of(r, group=0, prompt_text="q") for r in rows))
    (group,) = groups_of(read(path))
    first, second = (r.completion for r in group)
    assert first.mask_T is not None and first.mask_T.tolist() == MASK and first.turns == TURNS
    assert second.mask_T is None and second.turns == (Turn("assistant", 0, 2),)


def test_a_path_may_be_a_text(tmp_path: Path) -> None:
    """As docs/turns.md has it."""
    path = written(tmp_path / "a", Row.of(rollout(completion()), group=0, prompt_text="q"))
    assert read(str(path)) == read(path)


def test_a_file_of_version_1_is_read_as_one_turn(tmp_path: Path) -> None:
    rows = [
        Row.of(rollout(Completion(ids, torch.zeros(len(ids)), "eos", 0), at), group=0,
               prompt_text="q")
        for at, ids in enumerate([(5, 6, 2), (7,)])
    ]  # fmt: skip
    new = written(tmp_path / "new", *rows)
    old = as_version_1(new, tmp_path / "old")
    one = [[{"role": "assistant", "start": 0, "end": 3}], [{"role": "assistant", "start": 0,
                                                             "end": 1}]]  # fmt: skip
    assert read(old)["turns"].to_pylist() == one == read(new)["turns"].to_pylist()
    assert read(old, ["turns"])["turns"].to_pylist() == one
    assert read(old).column("turns").type == read(new).column("turns").type
    assert "turns" not in read(old, ["reward"]).column_names
    assert [r.completion.turns for r in groups_of(read(old))[0]] == [
        (Turn("assistant", 0, 3),),
        (Turn("assistant", 0, 1),),
    ]
    shown, version = read_older(old, ("text", "turns"))
    assert version == 1 and shown["turns"].to_pylist() == one
    assert compare_rollouts(1, old, new) is None  # a verification of an older run still holds


def test_other_versions_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a", Row.of(rollout(completion()), group=0, prompt_text="q"))
    for version in (b"0", b"7"):
        table = pq.read_table(path).replace_schema_metadata({rollouts.VERSION_KEY: version})
        pq.write_table(table, tmp_path / "b")
        with pytest.raises(RunError, match="this groupwise reads 1 to 6"):
            read(tmp_path / "b")


def test_turns_that_differ_are_found(tmp_path: Path) -> None:
    other = tuple(turn._replace(role=turn.role.replace("tool", "user")) for turn in TURNS)
    paths = [
        written(tmp_path / str(at), Row.of(rollout(completion(turns=turns)), group=0,
                                           prompt_text="q"))
        for at, turns in enumerate([TURNS, other])
    ]  # fmt: skip
    found = compare_rollouts(1, *paths)
    assert found is not None and found.what == "turns"


def test_readers_and_records_name_the_policy_alike() -> None:
    assert rollouts.POLICY == records.POLICY  # apart, so that readers need no torch


# --- what a completion is ------------------------------------------------------------------------


def test_the_policy_wrote_everything_unless_said_otherwise() -> None:
    done = Completion((5, 6, 2), torch.zeros(3), "eos", 0)
    assert done.mask_T is None and done.turns == (Turn("assistant", 0, 3),)
    assert done.own_ids == (5, 6, 2) and done.own_length == 3
    assert done.last_turn == Turn("assistant", 0, 3)


def test_own_tokens_and_the_last_turn() -> None:
    done = completion()
    assert done.own_ids == (5, 6, 9) and done.own_length == 3
    assert done.last_turn == Turn("assistant", 4, 6)


@pytest.mark.parametrize("changes, words", [
    ({"mask_T": torch.tensor(MASK[:5])}, "one value for each of the 6 tokens"),
    ({"mask_T": torch.tensor(MASK).int()}, "must be bool"),
    ({"mask_T": torch.zeros(6).bool()}, "without a token of the policy"),
    ({"mask_T": torch.ones(6).bool()}, "the policy wrote tokens of"),
    ({"mask_T": None}, "without mask_T is one turn by the policy"),
    ({"turns": ()}, "cover the 6 tokens end to end"),
    ({"turns": TURNS[:2]}, "cover the 6 tokens end to end"),
    ({"turns": TURNS[1:]}, "cover the 6 tokens end to end"),
    ({"turns": (*TURNS, Turn("tool", 6, 9))}, "cover the 6 tokens end to end"),
    ({"turns": (TURNS[0], Turn("tool", 2, 2), Turn("tool", 2, 4), TURNS[2])}, "at least one token"),
])  # fmt: skip
def test_masks_and_turns_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BatchError, match=words):
        completion(**changes)


def test_experts_come_back_as_they_were_recorded(tmp_path: Path) -> None:
    """Also beside rows without them, and from a file that was written before there were any."""
    routes_TLK = torch.arange(16, dtype=torch.int16).view(4, 2, 2) - 1
    mixed = [completion(routes_TLK=routes_TLK), completion()]
    rows = [Row.of(rollout(each), group=at, prompt_text="q") for at, each in enumerate(mixed)]
    path = written(tmp_path / "a", *rows)
    found, none = [group[0].completion.routes_TLK for group in groups_of(read(path))]
    assert found is not None and found.dtype == torch.int16
    assert torch.equal(found, routes_TLK) and none is None
    pq.write_table(pq.read_table(path).drop_columns(["routes", "rerouted"]), tmp_path / "older")
    older = groups_of(read(tmp_path / "older"))
    assert [group[0].completion.routes_TLK for group in older] == [None, None]
