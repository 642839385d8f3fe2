"""Answers of earlier runs: exact tokens, other tokenizers, mixing, damage, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from runs import quiet, small
from steps import BARE, Start, gather, gradient, learn

from groupwise.errors import ConfigError, DataError, RecipeError, RunError
from groupwise.prepare.earlier import EarlierRun
from groupwise.runfiles import rollouts
from groupwise.stages import stage_of
from groupwise.stages.checks import check_config
from groupwise.training.loop import train

KEPT = {"recipe": "sft", "recipe__source": "run", "group_size": 8}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def earlier(start: Start) -> Path:
    """A run of three steps, 4 prompts x 4 answers each; about half of them are odd."""
    folder = start.folder / "earlier"
    given = {"recipe": "grpo", "checkpoint__every_steps": 3}
    train(small(**start.settings(**given)), folder, quiet())
    return folder


def settings(start: Start, *runs: Path, **changes: Any) -> dict[str, Any]:
    own = {"data__runs": [str(run) for run in runs], "data__train": "arithmetic"}
    return start.settings(**KEPT | own | changes)


def recorded(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "rollouts").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def drawn(run: Any) -> set[tuple[int, ...]]:
    return {tuple(task.columns["recorded"]["ids"]) for task in run.parts.tasks}


def test_counts_add_up_and_are_written_down(start: Start, earlier: Path, tmp_path: Path) -> None:
    rows = recorded(earlier)
    wanted = {
        (row["prompt"], row["text"])
        for row in rows
        if row["correct"] and row["finish"] == "eos" and row["grader_status"] == "ok"
    }
    given = settings(start, earlier, keep__per_prompt=0)
    with start.opened(tmp_path / "run", **given) as run:
        assert {(json.dumps(t.prompt), t.columns["recorded"]["text"]) for t in run.parts.tasks} == (
            wanted
        )
        manifest = run.reporter.folder.read_manifest()
    found = manifest["kept_answers"]
    assert found["answers"] == len(rows) == 48 and found["kept"] == len(wanted) > 0
    assert found["kept"] + sum(found["dropped"].values()) == len(rows)
    assert found["dropped"]["wrong"] == sum(row["correct"] is False for row in rows)
    lines = [json.loads(x) for x in (tmp_path / "run" / "selected.jsonl").read_text().splitlines()]
    assert len(lines) == len(wanted)
    by_place = {(r["step"], r["group"], r["sample"]): r for r in rows}
    assert {
        (r["prompt"], r["text"])
        for x in lines
        for r in [by_place[x["step"], x["group"], x["sample"]]]
    } == wanted


def test_recorded_tokens_are_learned_exactly(start: Start, earlier: Path, tmp_path: Path) -> None:
    """The same loss and gradient as the same rows through the source `data`."""
    given = settings(start, earlier, **BARE, prompts_per_step=5, data__shuffle=False)
    with start.opened(tmp_path / "run", **given) as run:
        tasks = run.parts.tasks[:5]
        groups = gather(run)
        for task, (row,) in zip(tasks, groups.groups, strict=True):
            assert list(row.completion.token_ids) == task.columns["recorded"]["ids"]
            assert list(task.token_ids) == task.columns["recorded"]["prompt"]
        found = learn(run, groups, rate=0.0)
        mine = gradient(run)
    rows = [{"prompt": t.prompt, "completion": t.columns["completion"]} for t in tasks]
    plain = {
        "recipe": "sft",
        "group_size": 8,
        **BARE,
        "prompts_per_step": 5,
        "data__shuffle": False,
    }
    plain["data__train"] = start.rows("same", rows)
    with start.opened(tmp_path / "data", **plain) as run:
        again = learn(run, gather(run), rate=0.0)
        assert again.metrics["loss/total"] == found.metrics["loss/total"]
        assert torch.equal(gradient(run), mine)


def test_same_seed_same_rows_whatever_the_order(
    start: Start, earlier: Path, tmp_path: Path
) -> None:
    second = tmp_path / "second"
    train(small(**start.settings(recipe="grpo", seed=5)), second, quiet())
    found = []
    for number, (runs, seed) in enumerate(
        [((earlier, second), 0), ((second, earlier), 0), ((earlier, second), 1)]
    ):
        given = settings(start, *runs, keep__per_prompt=1, seed=seed, data__mix={"reasoning": 6})
        with start.opened(tmp_path / str(number), **given) as run:
            assert len(run.parts.tasks) == 6
            found.append((drawn(run), run.reporter.folder.read_manifest()["kept_answers"]))
    assert found[0] == found[1] != found[2]
    assert found[0][1]["answers"] == 96


def test_mixed_by_rows(start: Start, earlier: Path, tmp_path: Path) -> None:
    given = settings(start, earlier, data__train=start.data, data__mix={"reasoning": 3, "other": 7})
    with start.opened(tmp_path, **given) as run:
        kept = [task for task in run.parts.tasks if "recorded" in task.columns]
        assert (len(kept), len(run.parts.tasks)) == (3, 10)
        assert [task.id for task in run.parts.tasks] == list(range(10))
        facts = run.reporter.folder.read_manifest()["kept_answers"]
        assert facts["other"] == 7 and facts["kept"] == 3
        assert facts["kept"] + sum(facts["dropped"].values()) == 48
        assert len(gather(run).groups) == run.config.prompts_per_step


def test_answers_that_are_too_long_are_counted_with_the_others(
    start: Start, earlier: Path, tmp_path: Path
) -> None:
    with start.opened(tmp_path / "all", **settings(start, earlier)) as run:
        lengths = sorted(task.row.tokens for task in run.parts.tasks)
    assert lengths[0] < lengths[-1]
    given = settings(start, earlier, data__max_row_tokens=lengths[-1] - 1)
    with start.opened(tmp_path / "short", **given) as run:
        facts = run.reporter.folder.read_manifest()["kept_answers"]
        tasks = run.parts.tasks
        lines = (tmp_path / "short" / "selected.jsonl").read_text().splitlines()
    assert facts["dropped"]["long"] == lengths.count(lengths[-1])
    assert facts["kept"] == len(tasks) == len(lines) < len(lengths)
    assert facts["kept"] + sum(facts["dropped"].values()) == facts["answers"] == 48
    assert [task.id for task in tasks] == [json.loads(line)["task"] for line in lines]


def test_graded_anew(start: Start, earlier: Path, tmp_path: Path) -> None:
    """By another reward than the run had: the tasks are found again by their numbers."""
    ends = [row for row in recorded(earlier) if row["finish"] == "eos"]
    digits = {x["text"]: [c for c in x["text"] if c.isdigit()] for x in ends}
    odd = {text for text, found in digits.items() if found and found[-1] in "13579"}
    parts = {f"{start.folder / 'rewards.py'}:odd": 1.0}
    given = settings(start, earlier, keep__grade="anew", keep__per_prompt=0)
    with start.opened(tmp_path / "a", **given | {"reward__parts": {"number": 1.0}}) as run:
        right = {task.columns["recorded"]["text"] for task in run.parts.tasks}
        stored = {row["text"] for row in ends if row["correct"]}
    with start.opened(tmp_path / "b", **given | {"reward__parts": parts}) as run:
        anew = {task.columns["recorded"]["text"] for task in run.parts.tasks}
    assert anew == odd  # the function says so of every answer
    assert right != anew and stored == odd  # the run had that reward, and says so in its files


def test_another_tokenizer_encodes_the_text_anew(
    start: Start, earlier: Path, tmp_path: Path
) -> None:
    """The same characters under other numbers: nothing recorded may reach the model."""
    model = tmp_path / "model"
    shutil.copytree(start.model, model)
    file = json.loads((model / "tokenizer.json").read_text())
    vocab = file["model"]["vocab"]
    characters = sorted((x for x in vocab if len(x) == 1), key=vocab.get)
    for name, number in zip(characters, [vocab[x] for x in reversed(characters)], strict=True):
        vocab[name] = number
    (model / "tokenizer.json").write_text(json.dumps(file))
    texts = {}
    for name, path in (("same", start.model), ("other", model)):
        with start.opened(
            tmp_path / name, **settings(start, earlier, model__path=str(path))
        ) as run:
            assert all(("recorded" in t.columns) == (name == "same") for t in run.parts.tasks)
            (row,) = gather(run).groups[0]
            tokenizer = run.parts.loaded.tokenizer
            assert row.completion.token_ids[-1] == tokenizer.eos_ids[0]
            assert tokenizer.decode(row.task.token_ids).endswith(row.task.prompt)
            texts[name] = {
                (t.prompt, tokenizer.decode(tokenizer.encode(t.columns["completion"])))
                for t in run.parts.tasks
            }
    assert texts["same"] == texts["other"]


def test_without_its_tokenizer_another_is_refused(
    start: Start, earlier: Path, tmp_path: Path
) -> None:
    copy, model = tmp_path / "copy", tmp_path / "model"
    shutil.copytree(earlier, copy, symlinks=True)
    shutil.rmtree(copy / "checkpoints")
    shutil.copytree(start.model, model)
    file = json.loads((model / "tokenizer.json").read_text())
    vocab = file["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    (model / "tokenizer.json").write_text(json.dumps(file))
    with start.opened(tmp_path / "same", **settings(start, copy)):
        pass  # the recorded tokens need none
    with (
        pytest.raises(RunError, match="another tokenizer"),
        start.opened(tmp_path / "other", **settings(start, copy, model__path=str(model))),
    ):
        pass


def test_files_of_an_older_version_find_their_prompts_in_the_data(
    start: Start, earlier: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(earlier, copy, symlinks=True)
    for file in (copy / "rollouts").glob("*.parquet"):
        table = pq.read_table(file)
        meta = {rollouts.VERSION_KEY: b"3"}
        pq.write_table(table.drop_columns(["prompt"]).replace_schema_metadata(meta), file)
    new, old = (list(EarlierRun(str(x), 0).answers()) for x in (earlier, copy))
    assert [x.prompt for x in new] == [x.prompt for x in old]
    Path(start.data).rename(tmp_path / "away")
    try:
        with pytest.raises(RunError, match="can't be read again"):
            list(EarlierRun(str(copy), 0).answers())
    finally:
        (tmp_path / "away").rename(start.data)


def test_an_empty_source_says_what_emptied_it(start: Start, earlier: Path, tmp_path: Path) -> None:
    given = settings(start, earlier, keep__paragraph=1)
    with pytest.raises(DataError) as error, start.opened(tmp_path, **given):
        pass
    assert "0 of 48 kept" in str(error.value) and "wrong (keep.correct)" in str(error.value)
    assert "paragraph" in str(error.value)


def test_a_changed_run_is_noticed(start: Start, earlier: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(earlier, copy, symlinks=True)
    given = small(**settings(start, copy, steps=2, checkpoint__every_steps=1))
    train(given, tmp_path / "run", quiet())
    file = copy / "rollouts" / "step_2.parquet"
    table, kept = pq.read_table(file), file.read_bytes()
    pq.write_table(table.slice(0, table.num_rows - 1), file)
    further = small(**settings(start, copy, steps=3, checkpoint__every_steps=1))
    with pytest.raises(RunError, match=r"rollouts of data\.runs"):
        train(further, tmp_path / "run", quiet())
    file.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(RunError, match=r"step_2\.parquet"):
        train(further, tmp_path / "run", quiet())
    file.unlink()
    with pytest.raises(RunError, match="step 2 and no rollouts"):
        train(further, tmp_path / "run", quiet())
    file.write_bytes(kept)
    assert train(further, tmp_path / "run", quiet())["steps"] == 3


def test_a_resumed_run_is_the_same_to_the_bit(start: Start, earlier: Path, tmp_path: Path) -> None:
    given = settings(start, earlier, steps=4, checkpoint__every_steps=2)
    train(small(**given), tmp_path / "whole", quiet())
    train(small(**given | {"steps": 2}), tmp_path / "cut", quiet())
    train(small(**given), tmp_path / "cut", quiet())
    for name in ("rollouts/step_4.parquet", "selected.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()


def test_what_is_refused(start: Start, earlier: Path, tmp_path: Path) -> None:
    for changes, said in (
        ({"data__runs": []}, "data.runs names none"),
        ({"recipe__source": "data"}, "data.runs=.* would be ignored"),
        ({"data__mix": {"reason": 3}}, "no entry 'reason'"),
        ({"data__train": start.data}, "data.train=.* would be ignored"),
        ({"data__holdout_share": 0.1}, "holdout_share"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_config(small(**settings(start, earlier, **changes)))
    plain = start.settings(recipe="sft", keep__per_prompt=2)
    with pytest.raises(ConfigError, match=r"keep\.per_prompt=2 would be ignored"):
        check_config(small(**plain))
    with pytest.raises(RecipeError, match=r"data\.runs"):
        stage_of(small(**settings(start, earlier, recipe__source="run:runs/a")))
    with pytest.raises(RunError, match="There is no run folder"):
        EarlierRun(str(tmp_path / "nowhere"), 0).steps  # noqa: B018
    outer = tmp_path / "outer"
    shutil.copytree(earlier, outer / "1_reason", symlinks=True)
    with pytest.raises(RunError, match="outer/1_reason"):
        EarlierRun(str(outer), 0).steps  # noqa: B018


def test_rejection_sampling_improves_the_base(tmp_path: Path) -> None:
    """GRPO on small sums, then supervised learning of its right answers from the base on."""
    first = small(recipe="grpo", steps=12, prompts_per_step=16, group_size=8)
    train(first, tmp_path / "reason", quiet())
    base = tmp_path / "reason" / "cold_start"
    given = KEPT | {"data__runs": [str(tmp_path / "reason")]}
    sft = small(**given, model__path=str(base), steps=40, prompts_per_step=32, data__options={},
                optim__learning_rate=3e-3, eval__tasks=8)  # fmt: skip
    found = train(sft, tmp_path / "kept", quiet())
    assert found["accuracy_after"] > found["accuracy_before"]
