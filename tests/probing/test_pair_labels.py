"""Pairs of a model's answers by a judge: which is chosen, what is left out, and going on."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scorers import scores
from scripted_endpoint import Scripted
from steps import Start

from groupwise.cli import main
from groupwise.config import load
from groupwise.errors import ConfigError
from groupwise.graders.judge import Judge
from groupwise.graders.parts import Mark
from groupwise.model.formats.classifier import load_scorer
from groupwise.probing import pair_labels
from groupwise.probing.pair_labels import FAILED, TIE, PairRequest, prepare_pairs, why_not
from groupwise.records import Task

DIGITS = range(8)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


def prepared(start: Start, prompts: int = 12, **changes: object) -> pair_labels.PreparedPairs:
    settings = start.settings(reward="stepwise", **changes)
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return prepare_pairs(load({"model.device": "cpu", **named}), PairRequest(prompts))


def test_the_higher_score_is_chosen_and_ties_and_failures_are_counted(
    start: Start, tmp_path: Path
) -> None:
    assert why_not([1.0, 0.5]) == "" and why_not([0.5, 0.5]) == TIE
    assert why_not([None, 0.5]) == FAILED
    out = tmp_path / "pairs.jsonl"
    made = prepared(start).run(out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) > 2 and len(rows) + sum(made.left_out.values()) == 12
    for row in rows:
        high, low = row["labelled"]["scores"]
        assert high > low and row["chosen"] != row["rejected"]
        assert "<end>" not in row["chosen"] and row["labelled"]["judge"][0].endswith(":stepwise")
    assert not out.with_name("pairs.jsonl.part").exists()


def test_what_the_model_learned_from_is_no_matter(start: Start, tmp_path: Path) -> None:
    """Preferences are asked for behind supervised learning: that run's settings do."""
    prepared(start).run(tmp_path / "groups.jsonl")
    prepared(start, recipe="sft", group_size=8).run(tmp_path / "sft.jsonl")
    said = [(tmp_path / name).read_text() for name in ("groups.jsonl", "sft.jsonl")]
    assert said[0] and said[0] == said[1]


def test_what_was_stopped_goes_on_to_the_same_rows(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    monkeypatch.setattr(pair_labels, "AT_A_TIME", 4)
    prepared(start).run(whole)
    judged, calls = pair_labels.PreparedPairs._judged, []

    def killed(self: pair_labels.PreparedPairs, tasks: list) -> list:
        calls.append(len(tasks))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return judged(self, tasks)

    monkeypatch.setattr(pair_labels.PreparedPairs, "_judged", killed)
    with pytest.raises(KeyboardInterrupt):
        prepared(start).run(parts)
    with pytest.raises(ConfigError, match="another request"):
        prepared(start, seed=7).run(parts)
    prepared(start).run(parts)
    assert calls == [4, 4, 4, 4] and parts.read_text() == whole.read_text()


def test_a_judge_compares_answers_to_prompts_that_have_none(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to compare with is the model's other one; the data's own was asked for."""
    seen: list[tuple[str, str]] = []

    def longer(self: Judge, given: Sequence[tuple[Task, str, str]]) -> list[Mark]:
        seen.extend((one, two) for _, one, two in given)
        return [Mark(float(len(one) > len(two))) for _, one, two in given]

    monkeypatch.setattr(Judge, "compare", longer)
    data = start.rows("bare", [{"prompt": f"{a}+1="} for a in range(8)])
    part = "judge(form='pairwise', url='http://127.0.0.1:1/v1', model='m')"
    named = {k.replace("__", "."): v for k, v in start.settings(data__train=data).items()}
    config = load({"model.device": "cpu", **named, "reward.parts": {part: 1.0}})
    made = prepare_pairs(config, PairRequest(8, compare=True)).run(tmp_path / "pairs.jsonl")
    assert made.rows and len(seen) == 8
    pairs = [{one, two} for one, two in seen]
    assert all({row["chosen"], row["rejected"]} in pairs for row in made.rows)


def test_an_endpoint_compares_and_a_preference_for_a_place_cancels_out(
    start: Start, tmp_path: Path
) -> None:
    """Over HTTP: the judge likes the longer answer, or whichever it was shown first."""
    settings = start.settings(
        data__train=start.rows("bare", [{"prompt": f"{a}+1="} for a in DIGITS])
    )
    named = {k.replace("__", "."): v for k, v in settings.items()}
    shown = re.compile(r"^[AB]:\nBEGIN \w+\n(.*?)\nEND", re.M | re.S)

    def longer(body: dict[str, Any]) -> str:
        first, second = (len(x) for x in shown.findall(body["messages"][-1]["content"]))
        better = "tie" if first == second else "A" if first > second else "B"
        return json.dumps({"better": better})

    made = {}
    for name, respond in {"longer": longer, "first": lambda _: '{"better": "A"}'}.items():
        server = Scripted(respond)
        part = f"judge(form='pairwise', url='{server.url}', model='m')"
        config = load({"model.device": "cpu", **named, "reward.parts": {part: 1.0}})
        prepared = prepare_pairs(config, PairRequest(8, compare=True))
        try:
            made[name] = prepared.run(tmp_path / f"{name}.jsonl")
        finally:
            server.shutdown()
            server.server_close()
    rows = made["longer"].rows
    assert rows and all(len(row["chosen"]) > len(row["rejected"]) for row in rows)
    assert not made["first"].rows and made["first"].left_out[TIE] >= len(rows)


def test_a_reward_model_that_was_trained_here_labels_pairs(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command line, with a run in place of a folder: what it scores higher is chosen."""
    pytest.importorskip("transformers")
    answers = [{"prompt": f"{a}+1=", "chosen": "3", "rejected": "42"} for a in DIGITS]
    common = [f"model.path={start.model}", "model.device=cpu", "model.threads=1"]
    learn = ["recipe=reward_model", f"data.train={start.rows('judged', answers)}", "steps=2"]
    run = ["--run", str(tmp_path / "rm"), "prompts_per_step=4", "eval.every=0", "eval.tasks=0"]
    assert main(["train", *run, *learn, *common]) == 0
    out = tmp_path / "pairs.jsonl"
    part = f"rm(path='{tmp_path / 'rm'}')"
    bare = start.rows("bare", [{"prompt": f"{a}+1="} for a in DIGITS])
    asked = [f"data.train={bare}", "engine.max_tokens=8", "--out", str(out), "--judge", part]
    assert main(["label-pairs", *asked, *common, "--prompts", "8"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert f"wrote {len(rows)} pairs" in capsys.readouterr().out and rows
    judge = load_scorer(tmp_path / "rm/checkpoints/latest")
    for row in rows:
        high, low = row["labelled"]["scores"]
        assert high > low and row["labelled"]["judge"] == [part]
        texts = (row["prompt"] + row[side] for side in ("chosen", "rejected"))
        ids = [[*judge.tokenizer.encode(text), 0] for text in texts]
        assert [scores(judge.head, each)[-1] for each in ids] == pytest.approx(
            [high, low], abs=1e-5
        )


def test_a_judge_and_how_it_is_asked_must_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["label-pairs", "--out", str(tmp_path / "p.jsonl")]
    assert main([*out, "--compare"]) == 2 and "shown two answers" in capsys.readouterr().err
    pairwise = "judge(form='pairwise', url='http://127.0.0.1:1/v1', model='m')"
    assert main([*out, "--judge", pairwise]) == 2 and "add --compare" in capsys.readouterr().err
    assert main(["label-pairs", "--out", "p.txt"]) == 2
