"""The chains of configs/: RLHF and R1 in one file, checked as they stand and run through small."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
from chains import go
from scorers import CHAT, folder_of

from groupwise.cli import main
from groupwise.commands.pipeline import table
from groupwise.pipeline.chain import Chain, chain_of
from groupwise.pipeline.reading import read
from groupwise.runfiles.parts import short_name
from groupwise.runfiles.stages import read_stages

CONFIGS = Path(__file__).parents[2] / "configs"
ENDED = CHAT.replace("{{ m['content'] }}", "{{ m['content'] }}<end>")
CHAINS = ("r1_tiny", "rlhf_tiny", "rlhf_smollm2", "r1_qwen")
SIZES = {
    "start": {"steps": 2, "prompts_per_step": 4, "until.accuracy": 0.0},
    "cold": {"steps": 2, "prompts_per_step": 4},
    "proxy": {"steps": 2, "prompts_per_step": 4},
    "judge": {"steps": 2, "prompts_per_step": 4},
    "taste": {"steps": 2, "prompts_per_step": 4},
    "reason": {"steps": 2, "prompts_per_step": 2, "group_size": 4},
    "collect": {"steps": 2, "prompts_per_step": 4, "keep.correct": False, "keep.ended": False,
                "keep.language": 0.0},
    "ppo": {"steps": 3, "prompts_per_step": 4, "critic.alone_steps": 1, "optim.warmup_steps": 0},
    "dpo": {"steps": 2, "prompts_per_step": 4},
    "all": {"steps": 2, "prompts_per_step": 4, "group_size": 4},
}  # fmt: skip
SMALL = ["eval.every=0", "eval.tasks=4", "engine.max_tokens=8", "optim.warmup_steps=0",
         "critic.truth_prompts=0"]  # fmt: skip


def shrunk(name: str, *overrides: str, run: str) -> Chain:
    """A chain of configs/ with a few rows a step, and a few steps a stage."""
    names = {stage.name for stage in read(CONFIGS / f"{name}.toml").stages}
    own = [f"{stage}.{key}={json.dumps(value)}" for stage, sizes in SIZES.items()
           if stage in names for key, value in sizes.items()]  # fmt: skip
    return chain_of(read(CONFIGS / f"{name}.toml", [*SMALL, *own, *overrides]), Path(run))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with data of the names that the files have, and a small model."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    sums = [
        {"prompt": f"What is {n} + {n}?", "answer": str(2 * n), "solution": f"Twice {n}."}
        for n in range(40)
    ]
    wishes = [
        {"prompt": f"Human: Hello {n}!\n\nAssistant:", "chosen": f"Good day {n}.",
         "rejected": f"No {n}."}
        for n in range(40)
    ]  # fmt: skip
    for name, rows in {
        "gsm8k_train": sums[:20], "gsm8k_test": sums[20:24], "math_train": sums[24:],
        "helpful_pairs": wishes[:16], "helpful_other_pairs": wishes[16:32],
        "helpful_train": wishes[:32], "helpful_test": wishes[32:],
    }.items():  # fmt: skip
        Path("data", f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    folder_of(tmp_path / "model", template=ENDED, letters=string.printable, positions=1024)
    return tmp_path


MODEL = ["model.path=model", "model.device=cpu", "model.dtype=float32"]


@pytest.mark.parametrize("name", CHAINS)
def test_every_chain_passes_all_checks_as_it_stands(
    name: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [] if name.endswith("_tiny") else [*MODEL, "engine.max_tokens=64"]
    if name == "rlhf_smollm2":
        own += ["data.max_prompt_tokens=128"]  # the model of the test has 1,024 places
    if name == "r1_qwen":
        own += ["collect.data.max_row_tokens=1024"]
    assert main(["train", str(CONFIGS / f"{name}.toml"), "--dry-run", *own]) == 0
    said = capsys.readouterr().out
    stages = read(CONFIGS / f"{name}.toml").stages
    assert all(f"# stage {stage.name}: " in said for stage in stages)
    assert not Path("runs").exists()


def parts_after(made: Chain, stage: str) -> dict[str, Any]:
    folder = made.folder(made.pipeline.stage(stage))
    summary = json.loads((folder / "summary.json").read_text())
    return {short_name(name): value for name, value in summary["parts_after"].items()}


def test_rlhf_on_the_embedded_model_shows_proxy_judge_and_truth(place: Path) -> None:
    pytest.importorskip("transformers")
    made = shrunk("rlhf_tiny", "tiny.width=32", "data.size=200", run="run")
    record, _ = go(made)
    assert record.finished
    shown = {"rm(path='2_proxy')", "rm(path='3_judge')", "number"}
    for stage in ("ppo", "dpo"):
        assert set(parts_after(made, stage)) == shown
    for line in table(made.path)[-6:]:
        assert line.split()[0] in ("ppo", "dpo") and len(line.split()) == 4
    lines = [json.loads(x) for x in (made.path / "4_ppo/metrics.jsonl").read_text().splitlines()]
    found = {short_name(name.removeprefix("eval/part/")): value
             for name, value in lines[-1].items() if name.startswith("eval/part/")}  # fmt: skip
    assert found == parts_after(made, "ppo")
    # What has no weight is shown and not learned: the reward is the proxy's alone.
    assert lines[-1]["eval/reward"] == pytest.approx(found["rm(path='2_proxy')"])
    assert lines[-1]["eval/accuracy"] == found["number"]
    # Both begin where the first stage ended, and not one behind the other.
    starts = [json.loads((made.path / x / "manifest.json").read_text())["parent"]
              for x in ("4_ppo", "5_dpo")]  # fmt: skip
    assert starts[0] == starts[1] and starts[0]["folder"] == "../1_start"
    assert "rm(path='3_judge')" in (made.path / "report.html").read_text().replace("&#x27;", "'")


def test_rlhf_on_preferences_without_answers(place: Path) -> None:
    """Nothing can be verified: samples are graded by the reward models, pairs tell the accuracy."""
    pytest.importorskip("transformers")
    made = shrunk("rlhf_smollm2", *MODEL, "data.max_prompt_tokens=128", run="run")
    record, said = go(made)
    assert record.finished and "[[Good day 0.<end>]]" in said  # what `data.completion` makes of it
    for stage in ("ppo", "dpo"):
        assert set(parts_after(made, stage)) == {"rm(path='2_proxy')", "rm(path='3_judge')"}
    lines = [json.loads(x) for x in (made.path / "5_dpo/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["eval/accuracy"] == lines[0]["eval/pairs_accuracy"] == 0.5
    assert lines[-1]["eval/accuracy"] == lines[-1]["eval/pairs_accuracy"]


def test_r1_runs_through_and_goes_on(place: Path) -> None:
    """Cold start, reinforcement, kept answers beside others', and mixed rewards by source."""
    pytest.importorskip("transformers")
    made = shrunk("r1_qwen", *MODEL, "collect.data.max_row_tokens=1024", run="run")
    record, said = go(made)
    assert record.finished
    assert "[[ Twice 24. </think> <answer> 48 </answer><end>]]" in said
    kept = json.loads((made.path / "4_collect/manifest.json").read_text())["kept_answers"]
    assert kept
    lines = [json.loads(x) for x in (made.path / "5_all/metrics.jsonl").read_text().splitlines()]
    graders = {short_name(name) for line in lines for name in line if "/part/" in name}
    assert any("3_taste" in name for name in graders)
    assert any(name.endswith("/math") for name in graders)
    _, again = go(made)
    assert "is finished" in again
    found = read_stages(made.path)
    assert found is not None and [x.state for x in found.stages] == ["finished"] * 5


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("number", "number"),
        ("rm(path='/a/runs/x/2_proxy/checkpoints/latest')", "rm(path='2_proxy')"),
        ("rm(path='runs/rm/checkpoints/step_20', squash='none')", "rm(path='rm', squash='none')"),
        ("format(pattern='<a>...</a>')", "format(pattern='<a>...</a>')"),
        ("rewards/mine.py:score", "rewards/mine.py:score"),
    ],
)
def test_parts_have_short_names(name: str, short: str) -> None:
    assert short_name(name) == short
