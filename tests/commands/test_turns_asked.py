"""Commands that sample answers of one turn refuse an environment, before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.cli import main

GUESS = ["turns.environment=guess", "data.train=guess"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["label-steps", *GUESS, "--out", "OUT"],
        ["label-pairs", *GUESS, "--out", "OUT"],
        ["filter", "DATA", "--model", "tiny", "--out", "OUT", *GUESS],
        ["eval", "tiny", *GUESS, "--suite", "DATA"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_an_environment_that_nobody_would_ask_is_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    places = {"OUT": str(tmp_path / "out.jsonl"), "DATA": str(tmp_path / "data.jsonl")}
    assert main([places.get(word, word) for word in arguments]) == 2
    said = capsys.readouterr().err
    assert "samples answers of one turn, and turns.environment is set" in said
    assert not (tmp_path / "out.jsonl").exists()
