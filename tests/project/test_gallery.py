"""The gallery of examples/ works: every file does two steps, and the table names them all."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizer import CHAT
from model_zoo import make
from viewing import ALPHABET

from groupwise.cli import main
from groupwise.model.formats.checkpoint import save
from groupwise.model.formats.tokenizer import character_files

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# Older ones are longer, and have tests of their own.
OTHERS = {"grpo_one_file.py", "guess_program.py", "transformers_engine.py"}
FILES = sorted(
    path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".toml")
)  # fmt: skip
GALLERY = [name for name in FILES if name not in OTHERS]
MOST_LINES = 55
SMALL = [
    "prompts_per_step=4", "tiny.width=32", "tiny.cold_start_steps=2", "tiny.cold_start_batch=8",
    "eval.tasks=4", "eval.every=0",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    torch.set_num_threads(1)
    return tmp_path


def metrics(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def test_ten_short_files_and_a_table_of_all() -> None:
    assert len(GALLERY) == 10
    table = (EXAMPLES / "README.md").read_text("utf-8")
    for name in FILES:
        assert f"]({name})" in table
    for name in GALLERY:
        lines = (EXAMPLES / name).read_text("utf-8").splitlines()
        assert len(lines) <= MOST_LINES, f"{name}: {len(lines)} lines"
        command = f"python examples/{name}"
        if name.endswith(".toml"):
            command = f"groupwise train examples/{name}"
        assert command in "\n".join(lines) and command in table, name


@pytest.mark.parametrize("name", ["countdown", "curriculum"])
def test_configurations(name: str, folder: Path) -> None:
    assert main(["train", f"examples/{name}.toml", "--run", "run", "steps=2", *SMALL]) == 0
    assert metrics("run")[-1]["step"] == 2


@pytest.mark.parametrize(
    ("name", "stages"), [("distillation", "start expert student"), ("preferences", "start pairs")]
)
def test_chains(name: str, stages: str, folder: Path) -> None:
    steps = [f"{stage}.steps=2" for stage in stages.split()]
    batch = [f"{stage}.prompts_per_step=4" for stage in stages.split()]
    small = [each for each in SMALL if "cold" not in each and "prompts" not in each]
    until = ["start.until.accuracy=0"]
    command = ["train", f"examples/{name}.toml", "--run", "run", *steps, *batch, *until, *small]
    assert main(command) == 0
    for number, stage in enumerate(stages.split(), start=1):
        (run,) = Path("run").glob(f"*{number}*{stage}")
        assert metrics(str(run))[-1]["step"] >= 1


@pytest.mark.parametrize("name", ["own_reward", "code", "judge", "tools"])
def test_scripts(name: str, folder: Path) -> None:
    """As they stand, but for fewer and smaller steps."""
    place = Path("examples", f"{name}.py")
    tiny = {"width": 32, "layers": 2, "cold_start_steps": 2, "cold_start_batch": 8}
    text = place.read_text("utf-8")
    text = re.sub(r'"steps": \d+', '"steps": 2', text).replace("steps=40", "steps=2")
    text = re.sub(r'"prompts_per_step": \d+', '"prompts_per_step": 4', text)
    text = re.sub(r'"tasks": \d+', '"tasks": 4', text)
    text = re.sub(r'"tiny": {.*?}', f'"tiny": {tiny}', text)
    place.write_text(text, "utf-8")
    demo = Path("configs/tiny.toml").read_text("utf-8")
    demo = demo.replace("width = 64", "width = 32\ncold_start_steps = 2\ncold_start_batch = 8")
    Path("configs/tiny.toml").write_text(demo.replace("per_step = 32", "per_step = 4"), "utf-8")
    runpy.run_path(str(place), run_name="__main__")
    found = metrics(f"runs/{name}")
    assert found[-1]["step"] == 2 and found[-1]["reward/failed_share"] == 0


@pytest.mark.parametrize("name", ["gsm8k", "lora"])
def test_those_for_a_model_with_a_chat_template(name: str, folder: Path) -> None:
    """A model of random weights stands for theirs, rows of our own for those of GSM8K."""
    torch.manual_seed(0)
    files = character_files(ALPHABET) | {"chat_template.jinja": CHAT.encode()}
    save(make("qwen2"), Path("model"), files)
    row = {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4, "utf-8")
    data = ["data.train=gsm8k:rows.jsonl", "data.eval=gsm8k:rows.jsonl"] if name == "gsm8k" else []
    command = ["train", f"examples/{name}.toml", "--run", "run", "model.path=model", "steps=2"]
    command += ["prompts_per_step=2", "engine.max_tokens=8", "eval.tasks=2", "model.device=cpu"]
    assert main([*command, "eval.every=0", *data]) == 0
    assert metrics("run")[-1]["step"] == 2
