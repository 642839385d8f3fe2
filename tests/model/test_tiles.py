"""Processors whose tiles are announced and do not work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from groupwise.model.tiles import LIMIT, WITHOUT_TILES, avoid_broken_tiles

DIES = f"import os; os.kill(os.getpid(), {int(signal.SIGILL)})"


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(LIMIT, "")  # so that it is put back
    monkeypatch.delenv(LIMIT)
    file = tmp_path / "cpuinfo"
    file.write_text("flags : avx512f amx_bf16 amx_tile\n")
    return file


def test_tiles_that_kill_are_not_used(flags: Path) -> None:
    assert avoid_broken_tiles(flags, DIES)
    assert os.environ[LIMIT] == WITHOUT_TILES
    assert avoid_broken_tiles(flags, "pass")  # asked once


def test_tiles_that_work_are_used(flags: Path) -> None:
    assert not avoid_broken_tiles(flags, "pass")
    assert LIMIT not in os.environ


def test_nothing_is_tried_without_tiles(flags: Path) -> None:
    flags.write_text("flags : avx2\n")
    assert not avoid_broken_tiles(flags, DIES)
    assert not avoid_broken_tiles(flags.with_name("none"), DIES)


def test_a_persons_choice_stands(flags: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "AVX2")
    assert not avoid_broken_tiles(flags, DIES)
    assert os.environ[LIMIT] == "AVX2"


def test_bfloat16_can_be_multiplied_after_it() -> None:
    """In a fresh process, on whatever processor this is."""
    code = (
        "from groupwise.model.layers.equip import check_precision;"
        "check_precision('cpu', 'bfloat16');"
        "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); print(int((x @ x)[0, 0]))"
    )
    bare = {name: value for name, value in os.environ.items() if name != LIMIT}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=bare)
    assert done.stdout == "64\n", done.stderr
