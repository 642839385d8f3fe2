"""Room for checkpoints: counted before a run as the run has it, and enough at every moment."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_zoo import make
from runs import quiet, run, small

from groupwise.cli import main
from groupwise.commands import doctor
from groupwise.plan.estimate import Host, space_of
from groupwise.prepare.placing import placed
from groupwise.prepare.sizes import sizes_of
from groupwise.sync import checkpoints as states
from groupwise.sync.checkpoints import policy_contents, snapshot, weights_alone, write
from groupwise.sync.space import Space
from groupwise.training.opening import open_run

TINY = str(Path(__file__).resolve().parents[2] / "configs" / "tiny.toml")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recipe": "grpo", "reference__update": "ema:0.9", "model__dtype": "bfloat16"},
        {"recipe": "grpo", "reference__update": "reset:1"},
        {"recipe": "grpo", "adapter__rank": 2},
        {"recipe": "tis", "engine__weights": "stale:1"},
    ],
    ids=str,
)
def test_a_plan_counts_a_checkpoint_as_the_run_has_it(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    config = placed(small(steps=2, eval__every=0, **changes))
    if "engine__weights" in changes:  # whose copies come with the updates
        run(tmp_path / "run", steps=1, eval__every=0, **changes)
    with open_run(config, tmp_path / "run", quiet()) as going:
        made = going.keeper._snapshot()
    counted = space_of(config, sizes_of(config)[0])
    assert counted.best == made.weights.bytes
    assert 0 <= made.bytes - counted.whole <= 8  # how many steps the optimizer has made


def test_no_run_has_more_on_the_disk_than_was_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best ones too, whole or weights alone, and the one that was just written."""
    model, dice, seen = make("qwen2"), random.Random(0), list[int]()
    rest = {"optimizer": {k: torch.stack([x.float()] * 3) for k, x in model.state_dict().items()}}
    real = states.prune

    def looked(parent: Path, *args: Any) -> None:
        files = (path for path in parent.rglob("*.safetensors") if not path.is_symlink())
        seen.append(sum(path.stat().st_size for path in files))
        real(parent, *args)

    monkeypatch.setattr(states, "prune", looked)
    monkeypatch.setattr(states.os, "fsync", lambda descriptor: None)

    def saved(step: int, kind: str) -> Path:
        if kind == "weights":
            return write(tmp_path, weights_alone(step, policy_contents(model, {})), 2)
        made = snapshot(
            step, weights=policy_contents(model, {}), tensors=rest, values={}, best=kind == "best"
        )
        return write(tmp_path, made, 2)

    whole, best = (
        sum(path.stat().st_size for path in saved(step, kind).rglob("*.safetensors"))
        for step, kind in ((1, "whole"), (2, "weights"))
    )
    for step in range(3, 40):
        saved(step, dice.choice(("whole", "whole", "best", "weights")))
    space = Space(whole, best, 2)
    assert max(seen) == space.most


def test_plan_shows_checkpoints_disk_and_host(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["plan", TINY, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    counted = found["checkpoints"]
    assert counted["whole"] == found["host_copy"] == 3 * counted["best"]
    assert counted["most"] == (counted["keep"] + 2) * counted["whole"] + counted["best"]
    assert found["host"]["disk"] > 0 and found["host"]["memory"] > 0
    tight = Host("/there", disk=2 * counted["whole"], memory=2**20)
    monkeypatch.setattr("groupwise.commands.plan.host_of", lambda runs: tight)
    assert main(["plan", TINY]) == 0
    out = capsys.readouterr().out
    rows = {line.split("  ")[0]: line for line in out.splitlines() if line}
    assert "free in /there: not all fit; checkpoint.keep=1 needs less" in rows["checkpoints"]
    assert "training waits instead" in rows["host copy"] and "checkpoint" in rows
    full = Host("/there", disk=0, memory=2**40)
    monkeypatch.setattr("groupwise.commands.plan.host_of", lambda runs: full)
    assert main(["plan", TINY]) == 1  # training would be refused
    assert "not even one fits" in capsys.readouterr().out
    assert main(["plan", TINY, "--gpu", "H100"]) == 0  # whose disk is not this one
    assert "free in" not in capsys.readouterr().out


def test_doctor_counts_the_checkpoints_of_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=2**40)
    monkeypatch.setattr("groupwise.commands.doctor.shutil.disk_usage", lambda path: usage)
    found = doctor.checkpoints(tmp_path, [TINY, "checkpoint.keep=3"])
    assert found.status == "ok" and "with checkpoint.keep=3" in found.text
    assert f"1.0 TiB free in {tmp_path}" in found.text
    usage.free = 3 * 2**20
    assert doctor.checkpoints(tmp_path, [TINY]).status == "missing"
    usage.free = 2**10
    assert doctor.checkpoints(tmp_path, [TINY]).status == "broken"
    bad = doctor.checkpoints(tmp_path, ["model.path=/nowhere"])
    assert bad.status == "broken" and "can't be counted" in bad.text
