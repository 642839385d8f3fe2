"""Bad input is told before anything runs, with the stage's name; commands take the folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from chains import COLD, HEAD, LAST, THREE, chain, go

from groupwise.cli import main
from groupwise.config import load
from groupwise.errors import GroupwiseError
from groupwise.pipeline.chain import chain_of, real
from groupwise.pipeline.checks import check_chain
from groupwise.pipeline.reading import read
from groupwise.runfiles.stages import ChainRecord, pipeline_of
from groupwise.view.pages import home, run_page
from groupwise.view.runs import Runs

EXAMPLES = Path(__file__).parents[2] / "configs"
NEXT = '[[stage]]\nname = "next"\nrecipe = "rloo"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stage = []", "empty list"),
        ("[stage]\nname = 'a'", r"Write \[\[stage\]\]"),
        ("[[stage]]\nrecipe = 'sft'", "has no name"),
        ("[[stage]]\nname = 'a/b'", "no name of a folder"),
        ("[[stage]]\nname = 'data'", "can't be called 'data'"),
        (HEAD + COLD + COLD, "two stages are called 'cold'"),
        (HEAD + COLD + NEXT + 'model = "stage:next"', "which is itself"),
        (HEAD + COLD + NEXT + 'model = "stage:cld"', "no such stage. Did you mean 'cold'"),
        (HEAD + COLD + NEXT + 'model = "stage:cold@first"', "latest and best"),
        (HEAD + NEXT + 'model = "stage:cold"\n' + COLD, "which comes later"),
        (
            HEAD + NEXT + 'model = "stage:cold"\n' + COLD + 'model = "stage:next"\n',
            "which comes later",
        ),  # a cycle
        (HEAD + COLD + NEXT + "from = []", "`from` is empty"),
        (HEAD + COLD + "repeat = 0", "no number of rounds"),
        (HEAD + COLD + NEXT + "stepz = 3", r"stage 'next'.*no setting 'stepz'"),
        (HEAD + COLD + NEXT + "optim.lr = 3", r"stage 'next'.*optim.learning_rate"),
        (HEAD + COLD + "group_size = 4", r"stage 'cold'.*group_size=4 would be ignored"),
        (HEAD + COLD + NEXT + "until = { acuracy = 0.5 }", r"stage 'next'.*until.accuracy"),
        (HEAD + COLD + NEXT + "until.accuracy = 0.5\neval.tasks = 0", "never checked"),
        (HEAD + COLD + NEXT + "until.accuracy = 0.5\neval.every = 0", "never checked on the way"),
        (HEAD + COLD + NEXT + 'data.train = "none.jsonl"', r"stage 'next'.*none.jsonl"),
        (HEAD + COLD + NEXT + "tiny.width = 64", "made once, for the whole pipeline"),
        (HEAD + COLD + NEXT + 'recipe = { name = "sftt" }', "overwrite|sft"),
        (
            HEAD.replace("heads = 2 }", "heads = 2, cold_start_steps = 5 }") + COLD,
            "cold_start_steps has no effect",
        ),
        (HEAD + COLD + NEXT + 'model = "no/such/model"', r"stage 'next'.*no/such/model"),
    ],
)
def test_bad_files_are_refused_before_the_first_stage(
    text: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(GroupwiseError, match=rf"(?s){words}"):
        go(chain(tmp_path, text))
    assert not (tmp_path / "run" / "1_cold").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("reson.steps=3", "'reson' is neither a stage nor a table.*'reason'"),
        ("reason.stepz=3", "stage 'reason'.*no setting 'stepz'"),
        ("reason.repeat=3", "stands in the file alone"),
        ("reason.model=stage:last", "which comes later"),
    ],
)
def test_bad_settings_of_the_command_line(setting: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(GroupwiseError, match=rf"(?s){words}"):
        go(chain(tmp_path, THREE, setting))


def test_settings_for_all_and_for_one(tmp_path: Path) -> None:
    made = chain(tmp_path, THREE, "group_size=2", "last.steps=7", "last.model=base")
    found = {x.name: real(made, x, "nowhere") for x in made.pipeline.stages}
    assert found["cold"].left_out == ["group_size"]
    assert [found[x].config.group_size for x in ("reason", "last")] == [2, 2]
    assert [found[x].config.steps for x in ("cold", "reason", "last")] == [3, 2, 7]
    assert found["last"].config.model.path == str(made.path / "base")
    assert found["reason"].config.model.path == str(made.path / "1_cold/checkpoints/latest")


def test_names_of_stages_in_other_settings(tmp_path: Path) -> None:
    text = HEAD + COLD + LAST + '[reward.parts]\n"rm(path=stage:cold)" = 1.0\n'
    text = text.replace("[reward.parts]", "[stage.reward.parts]")
    made = chain(tmp_path, text)
    config = real(made, made.pipeline.stages[1], "nowhere").config
    assert config.reward.parts == {f"rm(path='{made.path}/1_cold/checkpoints/latest')": 1.0}


def test_dry_run_and_plan_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chain(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "pipeline.toml", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert all(f"# stage {name}:" in out for name in ("cold", "reason", "last"))
    assert main(["plan", "pipeline.toml"]) == 0
    assert "in all" in capsys.readouterr().out
    assert [x.name for x in tmp_path.iterdir()] == ["pipeline.toml"]


def test_commands_take_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = chain(tmp_path)
    assert main(["train", str(tmp_path / "pipeline.toml"), "--run", str(made.path)]) == 0
    out = capsys.readouterr().out
    assert "in all" in out and "stage 3 of 3: last (dr_grpo)" in out
    assert main(["report", str(made.path)]) == 0
    page = (made.path / "report.html").read_text()
    assert all(f"{n}_{x}/report.html" in page for n, x in ((1, "cold"), (2, "reason"), (3, "last")))
    assert main(["diagnose", str(made.path)]) in (0, 1)
    assert "2_reason" in capsys.readouterr().out
    assert main(["replay", str(made.path), "--verify"]) == 2
    assert "2_reason" in capsys.readouterr().err
    assert main(["replay", str(made.path / "2_reason"), "--verify"]) == 0
    assert main(["export", str(made.path), str(tmp_path / "out")]) == 0
    assert "3_last" in capsys.readouterr().out
    runs = Runs([tmp_path]).all()
    assert list(runs) == ["run/1_cold", "run/2_reason", "run/3_last"]
    page = home(runs, [tmp_path])
    assert "Pipeline run" in page and "from <a" in page
    assert "Started from <a" in run_page(runs["run/2_reason"], runs)
    assert pipeline_of(made.path / "1_cold") == made.path


@pytest.mark.parametrize(
    "path",
    [path for path in EXAMPLES.glob("*_tiny.toml") if "[[stage]]" in path.read_text("utf-8")],
    ids=lambda path: path.name,
)
def test_the_examples_are_sound(path: Path, tmp_path: Path) -> None:
    made = chain_of(read(path), tmp_path / "run")
    assert check_chain(made, ChainRecord("", "", ()), Path(made.base)) == []
    with pytest.raises(GroupwiseError, match="is a pipeline"):
        load(path)
