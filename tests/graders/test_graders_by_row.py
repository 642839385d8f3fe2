"""Rows, sources and named sets choose their grader: one run mixes domains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import metrics, run

from groupwise import load_config
from groupwise.config import Data, text
from groupwise.config.fields import SourceSettings
from groupwise.data import LoadedTasks, load
from groupwise.errors import ConfigError, DataError, RewardError
from groupwise.graders.rubric import Grader, check
from groupwise.prepare.setup import set_up
from groupwise.records import Grade, Task


def lines(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def loaded(train: Any, needs: Any = False, **changes: Any) -> LoadedTasks:
    return load(Data(train=train, **changes), seed=0, held_out=0, require_answers=needs)


def graded(grader: Grader, *pairs: tuple[Task, str]) -> list[Grade]:
    return grader.grade([(task, said, (), "eos") for task, said in pairs])


COUNT = Task(1, "make 6", None, {"numbers": [1, 2, 3], "target": 6}, grader="countdown")
WORD = Task(2, "say no", "no", grader="exact")
SUM = Task(3, "4+4=", "8")


def test_each_sample_is_graded_by_its_own_grader() -> None:
    grader = Grader({"row": 2.0, "length(target=10)": 1.0})
    pairs = [
        (COUNT, "1+2+3"),
        (WORD, "no"),
        (SUM, "it is 8"),
        (COUNT, "6"),
        (WORD, "8"),
        (SUM, "9"),
    ]
    found = graded(grader, *pairs)
    assert [grade.reward for grade in found] == [2.0, 2.0, 2.0, 0.0, 0.0, 0.0]
    assert [grade.correct for grade in found] == [True] * 3 + [False] * 3
    # Under the names of those that were asked: a curve each.
    names = [set(grade.parts) - {"length(target=10)"} for grade in found[:3]]
    assert names == [{"countdown"}, {"exact"}, {"number"}]
    assert graded(Grader({"number": 1.0}), (WORD, "no"))[0].status == "abstained"  # said so: obeyed


def test_functions_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def half(completion): return 0.5\ndef batch(completions, answer, **rest):\n"
        "    assert answer == ['a', 'b']\n    return [1.0, 0.0]\n"
    )
    half, batch = f"{tmp_path}/r.py:half", f"{tmp_path}/r.py:batch"
    grader = Grader({"row": 1.0}, graders=[half, batch])
    rows = [
        Task(0, "q", "a", grader=batch),
        Task(1, "q", "x", grader=half),
        Task(2, "q", "b", grader=batch),
    ]
    found = graded(grader, *[(row, "?") for row in rows])
    assert [g.reward for g in found] == [1.0, 0.5, 0.0]  # a batch of its own rows, in order
    assert [g.correct for g in found] == [True, False, False]
    before = grader.code()
    (tmp_path / "r.py").write_text("def half(completion): return 1.0\ndef batch(completions): ...")
    assert before and grader.code() != before  # a change of code is noticed on resume


def test_a_grader_that_does_not_decide_says_nothing_about_right() -> None:
    task = Task(0, "q", grader="length(target=2)")
    (grade,) = Grader({"row": 1.0}).grade([(task, "a b", (1, 2), "eos")])
    assert (grade.reward, grade.correct) == (1.0, None)


def test_what_can_not_be_graded_is_found_before_a_run() -> None:
    grader = Grader({"row": 1.0})
    assert check(grader, [COUNT, WORD, SUM]) == []
    with pytest.raises(RewardError, match=r"row 7, There is no reward 'nmber'. Did you mean"):
        check(grader, [SUM, Task(7, "q", "1", grader="nmber")])
    with pytest.raises(RewardError, match=r"countdown .* can't grade 1 of 2 tasks: in row 7"):
        check(grader, [SUM, Task(7, "q", "1", grader="countdown")])
    with pytest.raises(RewardError, match="'row' is no grader"):
        check(grader, [Task(7, "q", "1", grader="row")])


# --- where the name comes from ----------------------------------------------------------------


def test_a_column_names_it(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "x.jsonl",
        {"prompt": "a", "answer": "1", "by": "exact"},
        {"prompt": "b", "answer": "1", "by": ""},
        {"prompt": "c", "answer": "1", "by": None},
        {"prompt": "d", "answer": "1"},
        {"prompt": "e", "info": {"by": "length"}, "by": "length"},
    )
    grader = Grader({"row": 1.0})
    found = loaded(path, needs=grader.needs_answer, grader_key="by").train
    assert [task.grader for task in found] == ["exact", "", "", "", "length"]
    assert loaded(path, grader_key="info.by").train[4].grader == "length"
    with pytest.raises(DataError, match="line 5: no column 'answer'"):  # number needs one
        loaded(path, needs=grader.needs_answer)
    lines(tmp_path / "y.jsonl", {"prompt": "a", "answer": "1"}, {"prompt": "b", "by": "nmber"})
    odd = loaded(f"{tmp_path}/y.jsonl", needs=grader.needs_answer, grader_key="by").train
    with pytest.raises(RewardError, match=r"in row 1, There is no reward 'nmber'"):
        check(grader, odd)
    source = {path: SourceSettings(grader="number")}  # the row goes before its source
    assert [t.grader for t in loaded(source, grader_key="by").train][:2] == ["exact", "number"]


@pytest.mark.parametrize(
    ("named", "words"),
    [
        (7, "line 2: 'by' is 7, not the bare name"),
        ("evil.py:f", "line 2: 'by' is 'evil.py:f', not the bare name"),
        ("judge(url='x')", "line 2: 'by' is .*, not the bare name"),
    ],
)
def test_columns_that_name_none(tmp_path: Path, named: Any, words: str) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "1", "by": named}]
    with pytest.raises(DataError, match=words):
        loaded(lines(tmp_path / "x.jsonl", *rows), grader_key="by")


def test_sources_and_sets_name_it(tmp_path: Path) -> None:
    sums = lines(tmp_path / "sums.jsonl", {"question": "2+2", "answer": "so #### 4"})
    words = lines(tmp_path / "words.jsonl", {"prompt": "say no", "answer": "no"})
    tests = lines(
        tmp_path / "p.jsonl", {"text": "add", "code": "def f(): 1", "test_list": ["assert f()"]}
    )
    mixed = {
        f"gsm8k:{sums}": 0.5,
        words: SourceSettings(0.25, "exact"),
        f"mbpp:{tests}": SourceSettings(0.25),
    }
    found = loaded(mixed)
    assert [task.grader for task in found.train] == ["number", "exact", "code"]
    assert found.weights == {"gsm8k": 0.5, "words": 0.25, "mbpp": 0.25}
    assert found.train[2].columns["tests"] == ["assert f()"]
    held = loaded("arithmetic", eval={words: SourceSettings(grader="exact")}, size=5).eval
    assert [task.grader for task in held] == ["exact"]
    assert {t.grader for t in loaded("countdown", size=5).train} == {"countdown"}


def test_a_table_in_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def f(completion): return 1.0")
    lines(tmp_path / "words.jsonl", {"prompt": "say no", "answer": "no"})
    (tmp_path / "c.toml").write_text(
        "[data.train]\n"
        '"words.jsonl" = { weight = 0.25, grader = "r.py:f" }\n'
        '"arithmetic" = { size = 7, options = { digits = 1 } }\n'
    )
    config = load_config(tmp_path / "c.toml")
    (words, first), (_, second) = config.data.details.items()
    assert words == f"{tmp_path}/words.jsonl"  # beside the configuration, and so is the function
    assert first == SourceSettings(0.25, f"{tmp_path}/r.py:f") and config.data.graders == (
        first.grader,
    )
    assert second == SourceSettings(1.0, "", 7, {"digits": 1})
    (tmp_path / "again.toml").write_text(text(config))
    assert load_config(tmp_path / "again.toml").data == config.data
    found = load(config.data, seed=0, held_out=0)
    assert [sum(t.source == s for t in found.train) for s in ("words", "arithmetic")] == [1, 7]
    assert all(len(t.prompt) == 4 for t in found.train[1:])  # 1+2=
    for wrong, said in (
        ({"x.jsonl": {"wieght": 1}}, "no entry 'wieght'. Did you mean 'weight'"),
        ({"x.jsonl": {"weight": -1}}, r"data\.train\.x\.jsonl\.weight=-1 is out of range"),
        ({"x.jsonl": {"grader": 1}}, "must be a text"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config(**{"data.train": wrong})
    with pytest.raises(DataError, match="options or a size, which are a generator's"):
        loaded({words: SourceSettings(size=3)})
    with pytest.raises(DataError, match="has a weight, and all tasks are used"):
        loaded("arithmetic", eval={words: SourceSettings(2.0)})


def test_names_that_nothing_would_ask_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match='has no part "row" that would ask them'):
        Grader({"number": 1.0}, graders=["exact"])
    config = load_config(**{"reward.parts": {"number": 1.0}, "data.grader_key": "by"})
    with pytest.raises(ConfigError, match=r"data\.grader_key='by' has no effect"):
        set_up(config, lambda *tasks: pytest.fail("no model is loaded before"))


def test_a_run_mixes_domains_and_tells_them_apart(tmp_path: Path) -> None:
    echo = lines(
        tmp_path / "echo.jsonl",
        *(
            {"prompt": f"{a}{b}=", "answer": str(a), "solution": str(a)}
            for a in range(9)
            for b in range(9)
        ),
    )
    run(
        tmp_path / "run",
        data__train={
            "arithmetic": SourceSettings(1.0, options={"digits": 1}),
            echo: SourceSettings(1.0, "exact"),
        },
        data__options={},
        data__size=60,
        data__holdout_share=0.2,
        eval__tasks=12,
        eval__every=1,
        steps=2,
    )
    found = metrics(tmp_path / "run")
    for step in (line for line in found if "reward/sampled_mean" in line):
        halves = [step[f"data/source/{name}/reward"] for name in ("arithmetic", "echo")]
        assert sum(halves) / 2 == pytest.approx(step["reward/sampled_mean"])
        assert step["reward/part/number"] == pytest.approx(halves[0])
        assert step["reward/part/exact"] == pytest.approx(halves[1])
    evaluated = [line for line in found if "eval/accuracy" in line]
    assert evaluated
    for line in evaluated:
        parts = [line[f"eval/source/{name}/accuracy"] for name in ("arithmetic", "echo")]
        assert min(parts) <= line["eval/accuracy"] <= max(parts)
        assert {f"eval/source/{name}/reward" for name in ("arithmetic", "echo")} <= set(line)
