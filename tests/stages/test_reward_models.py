"""Reward models and process reward models trained end to end, and used in another run's reward."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import exit_code
from runs import left_behind, quiet
from scorers import CHAT, folder_of, scores

from groupwise.config import Config, load
from groupwise.engine.protocol import Engine
from groupwise.errors import ConfigError, DataError, EngineError, ModelError
from groupwise.graders.parts import SampleToGrade
from groupwise.graders.rubric import Grader
from groupwise.graders.scorers import prm, rm
from groupwise.model.formats.classifier import load_scorer
from groupwise.records import Task
from groupwise.replay.verify import verify
from groupwise.runfiles.rollouts import read
from groupwise.stages import score_measures as measures
from groupwise.stages import stage_of
from groupwise.stages.checks import check_config
from groupwise.stages.labelled_answers import groups_of
from groupwise.sync.export import export
from groupwise.training.loop import train
from groupwise.watch.display import Display

QUICK: dict[str, Any] = {
    "prompts_per_step": 16,
    "steps": 4,
    "model.device": "cpu",
    "model.dtype": "float32",
    "model.threads": 1,
    "data.holdout_share": 0.2,
    "optim.learning_rate": 3e-3,
    "eval.every": 2,
    "checkpoint.every_steps": 1,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a language model, preferences for answers with a z, and labelled steps."""
    folder = tmp_path_factory.mktemp("scoring")
    folder_of(folder / "lm")
    dice = random.Random(0)

    def said() -> str:
        return "".join(dice.choice("abcd") for _ in range(dice.randint(2, 6)))

    pairs = [
        {"prompt": f"say {n}: ", "chosen": f"{said()}z{said()}", "rejected": said() + said()}
        for n in range(300)
    ]
    steps = []
    for n in range(300):
        good = [dice.random() < 0.6 for _ in range(dice.randint(1, 4))]
        texts = [("x" if each else "y") + said() for each in good]
        steps.append({"prompt": f"say {n}: ", "completions": texts, "labels": good})
    write(folder / "pairs.jsonl", pairs)
    write(folder / "steps.jsonl", steps)
    write(folder / "prompts.jsonl", [{"prompt": f"say {n}: "} for n in range(20)])
    return folder


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def config(place: Path, recipe: str = "reward_model", **changes: Any) -> Config:
    data = place / {"reward_model": "pairs.jsonl"}.get(recipe, "steps.jsonl")
    named = {key.replace("__", "."): value for key, value in changes.items()}
    own = {"recipe": recipe, "model.path": str(place / "lm"), "data.train": str(data)}
    return load(QUICK | own | named)


def run(folder: Path, made: Config) -> dict[str, Any]:
    torch.set_num_threads(1)
    return train(made, folder, quiet())


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def graded(part: Any, *texts: str, prompt: str = "say 7: ") -> list[float]:
    samples = [SampleToGrade(Task(0, prompt), text, (), "eos") for text in texts]
    return [mark.value for mark in part.grade(samples)]


class Never(Engine):
    """An engine that nobody may make."""

    def __init__(self, *_: Any) -> None:
        raise AssertionError("an engine was made")


def test_a_preference_is_learned_saved_and_used_as_a_reward(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("groupwise.stages.stage.engine_of", Never)
    summary = run(tmp_path / "rm", config(place, steps=22, eval__every=11))
    assert summary["accuracy_before"] == 0.5 and summary["accuracy_after"] > 0.95
    last = metrics(tmp_path / "rm")[-1]
    assert last["scores/accuracy"] > 0.9 and last["scores/pairs"] == 16
    assert last["eval/margin"] > 0.5 and abs(last["scores/mean"]) < 1
    assert -1 <= last["eval/length_correlation"] <= 1 and last["cost/tokens"] == 0
    rows = read(tmp_path / "rm" / "rollouts" / "step_22.parquet").to_pylist()
    assert len(rows) == 32 and {dict(row["reward_parts"])["judgement"] for row in rows} == {0, 1}
    monkeypatch.undo()

    # What was saved says the same numbers: ours, and those of rm.
    texts = ("abzc", "abcd", "dzd")
    best = load_scorer(tmp_path / "rm" / "checkpoints" / "best")
    ids = [[*best.tokenizer.encode(f"say 7: {text}"), 0] for text in texts]
    own = [scores(best.head, each)[-1] for each in ids]
    part = rm(("<end>",), path=str(tmp_path / "rm"))
    assert graded(part, *texts) == pytest.approx(own, abs=1e-5)
    assert min(own[0], own[2]) > own[1]

    # And it is the reward of a run.
    parts = {f"rm(path='{tmp_path / 'rm'}')": 1.0}
    policy = load(
        {k: x for k, x in QUICK.items() if "holdout" not in k}
        | {"recipe": "rloo", "model.path": str(place / "lm"), "reward.parts": parts, "steps": 1}
        | {"data.train": str(place / "prompts.jsonl"), "prompts_per_step": 2, "group_size": 2}
        | {"engine.max_tokens": 6}
    )
    run(tmp_path / "rl", policy)
    rows = read(tmp_path / "rl" / "rollouts" / "step_1.parquet").to_pylist()
    for row in rows:
        said = row["text"].removesuffix("<end>")
        (expected,) = graded(part, said, prompt=row["prompt_text"])
        assert row["reward"] == pytest.approx(expected, abs=1e-5)


def test_steps_are_judged_where_prm_reads_them(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    summary = run(tmp_path / "prm", config(place, "process_reward_model", steps=40, eval__every=20))
    assert summary["accuracy_before"] == 0.5 and summary["accuracy_after"] > 0.9
    last = metrics(tmp_path / "prm")[-1]
    assert last["eval/area_under_curve"] > 0.95 and 0.4 < last["steps/positive_share"] < 0.9
    assert last["eval/first_error_accuracy"] > 0.8
    found = load_scorer(tmp_path / "prm" / "checkpoints" / "best")
    every = scores(found.head, found.tokenizer.encode("say 7: xab\n\nycd\n\n"))
    expected = torch.tensor([every[11], every[16]]).sigmoid().tolist()
    part = prm((), path=str(tmp_path / "prm"), process=True)
    (mark,) = part.grade([SampleToGrade(Task(0, "say 7: "), "xab\n\nycd", (), "eos")])
    assert [score for _, score in mark.steps] == pytest.approx(expected, abs=1e-5)
    assert expected[0] > 0.5 > expected[1]
    rows = read(tmp_path / "prm" / "rollouts" / "step_40.parquet").to_pylist()
    assert all(row["reward"] == min(x["reward"] for x in row["reward_steps"]) for row in rows)
    with pytest.raises(Exception, match="was trained with"):
        prm((), path=str(tmp_path / "prm"), separator="\n")


@pytest.mark.parametrize("kind", ["reward_model", "process_reward_model", "adapter"])
def test_stopped_and_continued_it_is_the_same_to_the_bit(
    kind: str, place: Path, tmp_path: Path
) -> None:
    changes = {"adapter__rank": 2} if kind == "adapter" else {}
    recipe = "reward_model" if kind == "adapter" else kind
    run(tmp_path / "whole", config(place, recipe, steps=6, **changes))
    run(tmp_path / "halves", config(place, recipe, steps=2, **changes))
    run(tmp_path / "halves", config(place, recipe, steps=6, **changes))
    assert left_behind(tmp_path / "halves") == left_behind(tmp_path / "whole")


def test_killed_it_comes_back_the_same(place: Path, tmp_path: Path) -> None:
    made = config(place, steps=8, eval__every=4)
    run(tmp_path / "whole", made)
    folder = tmp_path / "killed"
    child = os.fork()
    if child == 0:
        try:
            run(folder, made)
        finally:
            os._exit(0)
    while not list(folder.glob("checkpoints/step_*")):
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    exit_code(child)
    run(folder, made)
    assert left_behind(folder) == left_behind(tmp_path / "whole")


def test_it_repeats(place: Path, tmp_path: Path) -> None:
    run(tmp_path / "rm", config(place, steps=2))
    found = verify(tmp_path / "rm")
    assert found.difference is None and found.checkpoints


def test_an_adapter_learns_with_its_score_and_is_exported_whole(
    place: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    run(tmp_path / "rm", config(place, adapter__rank=4, steps=12, optim__learning_rate=2e-2))
    kept = tmp_path / "rm" / "checkpoints" / "latest"
    assert not (kept / "config.json").exists() and (kept / "adapter_config.json").is_file()
    with pytest.raises(Exception, match="is an adapter, and a whole classifier is needed"):
        rm((), path=str(kept))
    found = load_scorer(kept)
    assert found.head.score.weight.any()
    own = scores(found.head, [*found.tokenizer.encode("say 7: abz"), 0])[-1]
    made = export(kept.resolve(), tmp_path / "out")
    assert made.max < 1e-4 and made.compared == "scores"
    assert graded(rm((), path=str(tmp_path / "out")), "abz") == pytest.approx([own], abs=1e-5)
    with pytest.raises(ModelError, match="its adapter alone is the checkpoint itself"):
        export(kept.resolve(), tmp_path / "other", adapter=True)


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("reward_model", {}, "rm(path='FOLDER')"),
        ("process_reward_model", {}, "prm(path='FOLDER')"),
        (
            "process_reward_model",
            {"recipe__separator": "\n"},
            "prm(path='FOLDER', separator='\\n')",
        ),
    ],
)
def test_the_end_names_the_reward_as_it_would_be_accepted(
    kind: str, changes: dict[str, Any], expected: str, place: Path, tmp_path: Path
) -> None:
    """With the separator that the model learned with: another is refused."""
    stream = io.StringIO()
    made = config(place, kind, steps=1, eval__every=0, **changes)
    train(made, tmp_path / "run", Display(stream))
    assert f'groupwise train CONFIG "reward.parts.{expected}=1" ' in stream.getvalue()
    written = expected.replace("FOLDER", str(tmp_path / "run"))
    parts = load({"reward": {"parts": {written: 1.0}}}).reward.parts
    assert Grader(parts).parts


def test_an_adapter_is_read_by_peft(place: Path, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    run(tmp_path / "rm", config(place, adapter__rank=4, steps=2, optim__learning_rate=2e-2))
    kept = tmp_path / "rm" / "checkpoints" / "latest"
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        place / "lm", num_labels=1, pad_token_id=3
    )
    model = peft.PeftModel.from_pretrained(base, kept).eval()
    found = load_scorer(kept)
    ids = [*found.tokenizer.encode("say 7: abz"), 0]
    with torch.no_grad():
        (theirs,) = model(input_ids=torch.tensor([ids])).logits.flatten().tolist()
    assert theirs == pytest.approx(scores(found.head, ids)[-1], abs=1e-5)


def test_a_reward_model_can_be_trained_further(place: Path, tmp_path: Path) -> None:
    run(tmp_path / "one", config(place, steps=8))
    kept = tmp_path / "one" / "checkpoints" / "latest"
    run(tmp_path / "two", config(place, steps=1, model__path=str(kept)))
    first = metrics(tmp_path / "two")[0]
    assert first["eval/accuracy"] == metrics(tmp_path / "one")[-1]["eval/accuracy"]


def test_an_adapter_with_its_score_can_be_trained_further(place: Path, tmp_path: Path) -> None:
    settings = {"adapter__rank": 2, "optim__learning_rate": 2e-2}
    run(tmp_path / "one", config(place, steps=6, **settings))
    kept = tmp_path / "one" / "checkpoints" / "latest"
    run(tmp_path / "two", config(place, steps=1, adapter__path=str(kept)))
    first = metrics(tmp_path / "two")[0]
    assert first["eval/margin"] == metrics(tmp_path / "one")[-1]["eval/margin"]
    with pytest.raises(ModelError, match="which is no LoRA matrix"):  # for a policy it is refused
        policy = {"recipe": "sft", "adapter.path": str(kept), "data.train": "arithmetic"}
        run(tmp_path / "x", load(QUICK | policy | {"model.path": str(place / "lm")}))


def test_a_ranked_row_counts_once(place: Path, tmp_path: Path) -> None:
    entries = [{"rank": n, "completion": x} for n, x in enumerate(("az", "ab", "cd"), 1)]
    rows = [
        {"prompt": "p", "completions": entries},
        {"prompt": "q", "completions": [*entries[:1], *entries[2:]]},
    ]
    data = write(tmp_path / "ranked.jsonl", rows)
    made = config(place, data__train=str(data), data__holdout_share=0.0, prompts_per_step=2)
    stage = stage_of(made)
    tasks = [Task(n, row["prompt"], columns=row, token_ids=(3,)) for n, row in enumerate(rows)]
    found = load_scorer(place / "lm")
    loss = stage.loss_of(groups_of(made.recipe, tasks, found.tokenizer))
    assert list(zip(loss.better, loss.worse, strict=True)) == [(0, 1), (0, 2), (1, 2), (3, 4)]
    assert loss.weight == pytest.approx([1 / 6] * 3 + [1 / 2])
    run(tmp_path / "rm", replace(made, steps=1))
    assert metrics(tmp_path / "rm")[-1]["scores/pairs"] == 4


def test_long_rows_are_dropped_and_counted_never_cut(place: Path, tmp_path: Path) -> None:
    rows = [json.loads(x) for x in (place / "pairs.jsonl").read_text().splitlines()[:20]]
    rows[3]["chosen"] = "z" * 200  # the model holds 128
    data = write(tmp_path / "long.jsonl", rows)
    made = config(place, data__train=str(data), data__holdout_share=0.0, steps=1)
    shown = quiet()
    train(made, tmp_path / "rm", shown)
    text = shown._console.file.getvalue()
    assert "1 of 20 rows are too long for the model's 128 tokens" in text and "row 3" in text


def test_prompts_go_through_the_chat_template_as_rm_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder_of(tmp_path / "lm", template=CHAT)
    turns = [{"role": "user", "content": "q"}]
    rows = [
        {"chosen": [*turns, {"role": "assistant", "content": f"az{n}"}],
         "rejected": [*turns, {"role": "assistant", "content": f"ab{n}"}]}
        for n in range(8)
    ]  # fmt: skip
    data = write(tmp_path / "chats.jsonl", rows)
    own = {"model.path": str(tmp_path / "lm"), "data.train": str(data), "data.holdout_share": 0.0}
    run(tmp_path / "rm", load(QUICK | own | {"recipe": "reward_model", "prompts_per_step": 4}))
    row, *_ = read(tmp_path / "rm" / "rollouts" / "step_4.parquet").to_pylist()
    assert row["prompt_text"] == "[user]q[assistant]"
    found = load_scorer(tmp_path / "rm" / "checkpoints" / "latest")
    ids = [*row["prompt_token_ids"], *row["token_ids"]]
    part = rm((), path=str(tmp_path / "rm" / "checkpoints" / "latest"))
    (value,) = graded(part, row["text"].removesuffix("<end>"), prompt=tuple(turns))
    assert value == pytest.approx(scores(found.head, ids)[-1], abs=1e-5)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("group_size", 4),
        ("engine.max_tokens", 32),
        ("engine.temperature", 0.7),
        ("reward.parts", {"math": 1.0}),
        ("overlong", "mask"),
        ("eval.samples", 2),
        ("eval.temperature", 0.5),
        ("data.template", "chat"),
        ("data.system", "Be kind."),
        ("data.instruction", "Q: {prompt}"),
        ("reference.update", "reset:5"),
    ],
)
def test_settings_that_nothing_would_read_are_refused(
    place: Path, setting: str, value: Any
) -> None:
    made = config(place, **{setting.replace(".", "__"): value})
    with pytest.raises(ConfigError, match=rf"{setting}=.* would be ignored by reward_model"):
        check_config(made)


def test_the_embedded_model_and_engines_of_ones_own_are_refused(
    place: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="starts from a model"):
        check_config(config(place, model__path="tiny"))
    with pytest.raises(EngineError, match="`engine` would be ignored"):
        train(config(place), tmp_path / "x", quiet(), engine=Never)


@pytest.mark.parametrize(
    ("recipe", "rows", "words"),
    [
        ("reward_model", [{"prompt": "p", "chosen": "a"}], "no text in column 'rejected'"),
        ("reward_model", [{"prompt": "p", "chosen": "a", "rejected": "a"}], "no preference"),
        (
            "reward_model",
            [{"prompt": "p", "chosen": "a", "rejected": "b", "margin": "x"}],
            "margin 'x'",
        ),
        (
            "process_reward_model",
            [{"prompt": "p", "completions": ["a", "b"], "labels": [1, 1]}],
            "All steps have the label 1",
        ),
        (
            "process_reward_model",
            [{"prompt": "p", "completions": ["a", "b"], "labels": [1]}],
            "2 steps in `completions` and 1",
        ),
    ],
)
def test_rows_are_refused_before_a_model_is_loaded(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    rows: list[dict[str, Any]],
    words: str,
) -> None:
    data = write(tmp_path / "bad.jsonl", rows)
    made = config(place, recipe, data__train=str(data), data__holdout_share=0.0)
    monkeypatch.setattr("groupwise.training.opening.starting_model", Never)
    with pytest.raises(DataError, match=words):
        run(tmp_path / "run", made)


def test_held_out_rows_are_read_before_a_model_is_loaded(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "bad.jsonl", [{"prompt": "p", "chosen": "a"}])
    made = config(place, data__eval=str(data), data__holdout_share=0.0)
    monkeypatch.setattr("groupwise.training.opening.starting_model", Never)
    with pytest.raises(DataError, match="no text in column 'rejected'"):
        run(tmp_path / "run", made)


def test_the_learning_rate_suits_it(place: Path) -> None:
    bare = {"recipe": "reward_model", "model.path": str(place / "lm")}
    assert load(bare).optim.learning_rate == pytest.approx(1e-5)
    assert load(bare | {"adapter.rank": 4}).optim.learning_rate == pytest.approx(1e-4)
    assert load(bare | {"optim.learning_rate": 2e-6}).optim.learning_rate == 2e-6
    assert load({"recipe": "grpo"}).optim.learning_rate == 1e-6


# --- measures -----------------------------------------------------------------------------------


def test_measures_by_hand() -> None:
    assert [measures.win(x) for x in (2.0, 0.0, -1.0)] == [1.0, 0.5, 0.0]
    assert measures.correlation([1.0, 2.0, 4.0], [2.0, 4.0, 8.0]) == pytest.approx(1.0)
    assert measures.correlation([1.0, 2.0, 3.0], [1.0, 3.0, 1.0]) == pytest.approx(0.0)
    assert measures.correlation([1.0, 1.0], [1.0, 2.0]) is None
    # Good: 2, 0; bad: 1, 0. Wins: 2 > 1, 2 > 0, 0 < 1, 0 = 0.
    assert measures.area([2.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.5, 0.25]) == pytest.approx(2.5 / 4)
    assert measures.area([1.0], [1.0]) is None
    assert measures.finds_first_error([1.0, -1.0, 1.0], [1.0, 0.0, None]) == 1.0
    assert measures.finds_first_error([1.0, 1.0], [1.0, 0.0]) == 0.0
    assert measures.finds_first_error([1.0, 1.0], [1.0, 0.9]) == 1.0
    assert measures.finds_first_error([1.0], [None]) is None
    assert measures.verdict(-0.5, 0.4) == 1.0 and measures.verdict(-0.5, 0.5) == 0.0
