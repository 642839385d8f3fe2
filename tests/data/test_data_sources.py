"""Rows of other tools, named sets, several sources with weights, repeats, and what is held out."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import left_behind, metrics, run
from task_files import read

from groupwise.config import Data
from groupwise.config import load as load_config
from groupwise.config.fields import SourceSettings
from groupwise.config.writing import text
from groupwise.data import LoadedTasks, load
from groupwise.data.columns import recognise, with_conversation
from groupwise.data.cursor import Cursor, MixedCursor, fingerprint
from groupwise.data.mixing import split_by_hash
from groupwise.data.named_sets import GRADERS, SETS, boxed
from groupwise.data.templates import CHAT as CHAT_TEMPLATES
from groupwise.data.templates import TEXTS
from groupwise.errors import ConfigError, DataError, RunError
from groupwise.graders.functions import load_function
from groupwise.graders.rubric import Grader, check
from groupwise.records import Task


def lines(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def loaded(train: Any, held_out: int = 0, **settings: Any) -> LoadedTasks:
    answers = settings.pop("require_answers", False)
    return load(Data(train=train, **settings), seed=0, held_out=held_out, require_answers=answers)


# ---------------------------------------------------------------- rows of other tools

CHAT = [{"role": "user", "content": "1+1?"}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": CHAT,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}


@pytest.mark.parametrize(
    ("row", "prompt", "answer", "said"),
    [
        (VERL, CHAT, "2", "verl rows: prompts from 'prompt', answers from 'reward_model.ground_t"),
        (
            {"question": "q", "answer": "a", "info": {"k": 1}},
            "q",
            "a",
            "verifiers rows: .* from 'q",
        ),
        ({"prompt": CHAT, "answer": "a", "task": "t"}, CHAT, "a", "verifiers rows"),
        ({"prompt": CHAT, "solution": "s"}, CHAT, "s", "rows with messages: prompts from 'prompt'"),
        (
            {"prompt": CHAT, "chosen": "s"},
            CHAT,
            None,
            "rows with messages: .*, no answers to grade by",
        ),
        ({"problem": "p", "solution": "s"}, "p", "s", "prompts from 'problem', answers from 'sol"),
        ({"question": "q", "answer": "a", "solution": "s"}, "q", "a", "questions and answers"),
        ({"prompt": "p", "answer": "a"}, "p", "a", None),
        ({"prompt": "p", "solution": "s", "answer": "a"}, "p", "a", None),
    ],
)
def test_rows_of_other_tools_are_recognised(
    tmp_path: Path, row: dict[str, Any], prompt: Any, answer: Any, said: str | None
) -> None:
    pq.write_table(pa.Table.from_pylist([{"n": 0, **row}]), tmp_path / "x.parquet")
    for path in (lines(tmp_path / "x.jsonl", row), f"{tmp_path}/x.parquet"):
        found = read(path)
        (task,) = found.tasks
        assert task.prompt == (prompt if isinstance(prompt, str) else tuple(prompt))
        assert task.answer == answer
        (note,) = found.notes or [None]
        if said is None:
            assert note is None
        else:
            assert note is not None and re.search(said, note)


def test_whole_conversations_are_told_from_prompts_of_messages() -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    whole, asked = {"messages": talk}, {"prompt": talk[:1], "completion": talk[1:]}
    assert str(recognise(with_conversation(whole))) == (
        "rows with messages: prompts the beginnings of 'messages', no answers to grade by"
    )
    assert "prompts from 'prompt'" in str(recognise(with_conversation(asked)))


def test_verl_columns_reach_a_reward_written_for_verl(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([VERL]), tmp_path / "x.parquet")
    (tmp_path / "r.py").write_text(
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert data_source == 'openai/gsm8k' and extra_info['split'] == 'train'\n"
        "    return float(solution_str == ground_truth)\n"
    )
    (task,) = loaded(f"{tmp_path}/x.parquet", require_answers=True).train
    grades = Grader({f"{tmp_path}/r.py:f": 1.0}).grade([(task, text, (), "eos") for text in "23"])
    assert [grade.reward for grade in grades] == [1.0, 0.0]
    assert load_function(f"{tmp_path}/r.py:f").needs_answers


def test_any_column_by_name_or_path(tmp_path: Path) -> None:
    row = {"a": {"b": {"c": "prompt"}}, "x.y": "answer", "x": {"y": "not this"}, "prompt": "other"}
    found = read(lines(tmp_path / "x.jsonl", row), "a.b.c", "x.y")
    assert (found.tasks[0].prompt, found.tasks[0].answer) == ("prompt", "answer")
    assert found.tasks[0].columns == row and found.notes == []  # the user said it
    with pytest.raises(DataError, match=r"column 'a\.b\.d'.*Did you mean 'a\.b\.c'"):
        read(f"{tmp_path}/x.jsonl", "a.b.d")
    half = lines(tmp_path / "y.jsonl", {"a": {"b": "p"}}, {"a": {"b": None}}, {"a": None})
    with pytest.raises(DataError) as caught:
        read(half, "a.b")
    assert "line 2: 'a.b' is null" in str(caught.value)
    assert "line 3: no column 'a.b'" in str(caught.value)


def test_messages_lose_fields_that_a_table_made_up(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "n"}]
    pq.write_table(pa.Table.from_pylist([{"prompt": chat}]), tmp_path / "x.parquet")
    assert list(read(f"{tmp_path}/x.parquet").tasks[0].prompt) == chat


def test_info_in_json_is_read(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", {"question": "q", "answer": "a", "info": '{"k": [1]}'})
    assert read(path).tasks[0].columns["info"] == {"k": [1]}


# ---------------------------------------------------------------- named sets

MBPP = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the"
    " form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\nHow many"
    '?\n\nRemember to put your answer on its own line after "Answer:".'
)
GAME = (
    "Using the numbers [1, 2, 3], create an equation that equals 6. You can use basic arithmetic "
    "operations (+, -, *, /) and each number can only be used once."
)


@pytest.mark.parametrize(
    ("name", "row", "prompt", "answer", "columns"),
    [
        ("gsm8k", {"question": "q", "answer": "so 1,0\n#### 1,072"}, "q", "1072",
         {"question": "q", "solution": "so 1,0\n#### 1,072"}),
        ("gsm8k", {"prompt": "q", "answer": "72", "solution": "#### 72", "idx": 0}, "q", "72",
         {"solution": "#### 72", "idx": 0}),
        ("math", {"problem": "p", "solution": r"\boxed{1} so $\boxed{\frac{1}{2}}$."}, "p",
         r"\frac{1}{2}", {"problem": "p", "solution": r"\boxed{1} so $\boxed{\frac{1}{2}}$."}),
        ("math", {"prompt": "p", "answer": "0", "solution": r"\boxed{}"}, "p", "0",
         {"solution": r"\boxed{}"}),
        ("dapo17k", {"prompt": [{"role": "user", "content": DAPO}],
                     "reward_model": {"ground_truth": "34"}}, "How many?", "34",
         {"reward_model": {"ground_truth": "34"}}),
        ("dapo17k", {"prompt": "How many?", "answer": "34"}, "How many?", "34", {}),
        ("countdown", {"nums": [1, 2, 3], "target": 6}, GAME, None,
         {"nums": [1, 2, 3], "numbers": [1, 2, 3], "target": 6}),
        ("countdown", {"prompt": "p", "answer": "1+2+3", "nums": [1, 2, 3], "target": 6}, "p",
         "1+2+3", {"nums": [1, 2, 3], "numbers": [1, 2, 3], "target": 6}),
        ("countdown", {"prompt": CHAT,
                       "reward_model": {"ground_truth": {"numbers": [1, 2, 3], "target": 6}}},
         GAME, None, {"numbers": [1, 2, 3], "target": 6}),
        ("mbpp", {"text": "Add.", "code": "c", "test_list": MBPP, "test_setup_code": "x = 1"},
         f"Add.\nYour code should pass these tests:\n\n{MBPP[0]}\n{MBPP[1]}\n", "c",
         {"tests": MBPP, "test_setup": "x = 1"}),
        ("mbpp", {"prompt": "Add.", "code": "c", "test_list": MBPP, "test_imports": ["import re"]},
         f"Add.\nYour code should pass these tests:\n\n{MBPP[0]}\n{MBPP[1]}\n", "c",
         {"tests": MBPP, "test_setup": "import re"}),
        ("humaneval", {"prompt": "def f(x):\n", "canonical_solution": "    return x", "test": "t",
                       "entry_point": "f"}, "def f(x):\n", "    return x",
         {"tests": "t", "entry_point": "f"}),
    ],
)  # fmt: skip
def test_named_sets(
    tmp_path: Path, name: str, row: dict[str, Any], prompt: str, answer: Any, columns: Any
) -> None:
    path = lines(tmp_path / "x.jsonl", row)
    (task,) = loaded(f"{name}:{path}", require_answers=answer is not None).train
    assert (task.prompt, task.answer) == (prompt, answer)
    assert {key: task.columns.get(key) for key in columns} == columns


@pytest.mark.parametrize(
    ("name", "row", "why"),
    [
        ("gsm8k", {"question": "q"}, "line 1: no column 'answer'"),
        ("gsm8k", {"question": "q", "answer": "#### "}, "line 1: 'answer' is empty"),
        ("math", {"problem": "p", "solution": "none"}, r"'solution' has no \boxed{}"),
        ("math", {"problem": "p", "solution": r"\boxed{}"}, "'answer' is empty"),
        ("countdown", {"nums": "1 2", "target": 3}, "no whole numbers"),
        ("mbpp", {"text": "t", "code": "c", "test_list": []}, "no list of asserts"),
        ("humaneval", {"prompt": "def g():", "entry_point": "f"}, "does not define 'f'"),
        ("dapo17k", {"prompt": None, "answer": "1"}, "'prompt' is null"),
    ],
)
def test_rows_that_are_not_of_the_set(
    tmp_path: Path, name: str, row: dict[str, Any], why: str
) -> None:
    path = lines(tmp_path / "x.jsonl", row)
    with pytest.raises(DataError) as caught:
        loaded(f"{name}:{path}", require_answers=True)
    assert why in str(caught.value) and path in str(caught.value)


def test_boxes() -> None:
    assert boxed(r"a \boxed{x^{2}} b") == "x^{2}"
    assert boxed(r"\fbox{7}") == "7" and boxed(r"so $\boxed 5$.") == "5"
    assert boxed(r"\boxed{cut off") is None and boxed("5") is None


def test_a_folder_in_the_working_folder_needs_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`saved` is one, although it looks like the name of a generator."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved").mkdir()
    with pytest.raises(DataError, match=r"saved is a folder\. Name a file in it"):
        loaded("saved")
    table = pa.table({"prompt": ["a", "b"], "answer": ["1", "2"]})
    with pa.ipc.new_stream("saved/data.arrow", table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "saved/state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    assert [task.answer for task in loaded("saved").train] == ["1", "2"]
    with pytest.raises(DataError, match="'savd' is no generator and no file"):
        loaded("savd")


def test_names_of_sets_are_checked(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", {"prompt": "p"})
    with pytest.raises(DataError, match=r"no named set 'gsm8kk'. Did you mean 'gsm8k'"):
        loaded(f"gsm8kk:{path}")
    with pytest.raises(DataError, match="Write gsm8k:FILE"):
        loaded("gsm8k")
    with pytest.raises(DataError, match=r"data\.prompt_key = 'q' is for files"):
        loaded(f"gsm8k:{path}", prompt_key="q")
    assert len(loaded("countdown", size=5, held_out=1).train) == 4  # the generator, still


@pytest.mark.slow
@pytest.mark.skipif(
    "GROUPWISE_DATA" not in os.environ, reason="GROUPWISE_DATA names no folder of public data sets"
)
def test_the_real_sets() -> None:
    folder = os.environ.get("GROUPWISE_DATA", "")
    counts = {"gsm8k": 7473, "math": 7500, "dapo17k": 17917, "countdown": 10240, "mbpp": 474}
    for name, count in {**counts, "humaneval": 164}.items():
        split = "test" if name == "humaneval" else "train"
        found = loaded(f"{name}:{folder}/{name}/{split}.jsonl.gz", require_answers=True)
        assert len(found.train) == count
        for task in found.train:
            assert isinstance(task.prompt, str) and task.answer.strip()
            if name == "gsm8k":
                assert task.columns["solution"].endswith(f"#### {task.answer}".strip()) or (
                    "," in task.columns["solution"].rpartition("####")[2]
                )
            if name == "math" and not task.columns.get("answer_fixed"):
                assert boxed(task.columns["solution"]) == task.answer.strip()
            if name == "mbpp":
                assert task.columns["tests"][0] in task.prompt
                assert isinstance(task.columns["test_setup"], str)
            if name == "humaneval":
                assert f"def {task.columns['entry_point']}" in task.prompt
                assert "def check(" in task.columns["tests"]
            if name in ("gsm8k", "dapo17k"):
                assert re.fullmatch(r"-?\d+", task.answer)
            assert task.grader == GRADERS[name]
        if GRADERS[name] in ("number", "countdown"):
            assert check(Grader({"row": 1.0}), found.train) == []
    graded = loaded(f"countdown:{folder}/countdown/test.jsonl.gz").train
    grades = Grader({"row": 1.0}).grade([(t, t.answer, (), "eos") for t in graded])
    assert all(grade.reward == 1.0 for grade in grades)
    gym = loaded(
        {f"{folder}/reasoning_gym/test.jsonl.gz": SourceSettings(grader="reasoning_gym")}
    ).train
    said = [(t, f"<answer>{t.answer}</answer>", (), "eos") for t in gym]
    assert len(gym) == 1027
    assert all(grade.reward == 1.0 for grade in Grader({"row": 1.0}).grade(said))


# ---------------------------------------------------------------- several sources


def three(tmp_path: Path) -> list[str]:
    return [
        lines(tmp_path / f"{name}.jsonl", *({"prompt": f"{name}{i}"} for i in range(count)))
        for name, count in (("a", 3), ("b", 50), ("c", 10))
    ]


def test_one_generator_under_several_names() -> None:
    """Sums of two and of four numbers, by name; a name alone changes nothing."""
    table = {
        f"arithmetic:{name}": SourceSettings(
            weight=weight, size=50, options={"digits": 1, "terms": terms}
        )
        for name, weight, terms in (("easy", 3.0, 2), ("hard", 1.0, 4))
    }
    found = loaded(table, holdout_share=0.2)
    assert found.weights == {"easy": 3.0, "hard": 1.0}
    terms = {(t.source, t.prompt.count("+") + 1) for t in (*found.train, *found.eval)}
    assert terms == {("easy", 2), ("hard", 4)}
    for generator in ("arithmetic", "chain"):
        plain, named = (loaded(name, size=9) for name in (generator, f"{generator}:mine"))
        assert [t.prompt for t in named.train] == [t.prompt for t in plain.train]
    with pytest.raises(DataError, match="no named set"):
        loaded("arithmetics:easy")


def test_a_list_is_one_after_the_other(tmp_path: Path) -> None:
    a, b, _ = three(tmp_path)
    found = loaded((a, f"{tmp_path}/[bc].jsonl", "arithmetic"), size=7)
    assert [task.id for task in found.train] == list(range(70)) and found.weights == {}
    assert Counter(task.source for task in found.train) == {
        "a": 3, tmp_path.name: 60, "arithmetic": 7,
    }  # fmt: skip
    (note,) = found.notes
    assert note.startswith("training data: a 3 tasks (rows from 0)") and "(rows from 63)" in note
    assert loaded((a,)).train == loaded(a).train  # alone, a source needs no name
    assert {task.source for task in loaded(a).train} == {""}
    with pytest.raises(DataError, match="twice"):
        loaded((a, b, a))
    with pytest.raises(DataError, match="names nothing"):
        loaded(())


def test_sources_of_one_name_are_told_apart(tmp_path: Path) -> None:
    names = []
    for folder in "xyz":
        (tmp_path / folder).mkdir()
        names.append(lines(tmp_path / folder / "train.jsonl", {"prompt": folder}))
    found = loaded(dict.fromkeys(names, 1.0))
    assert list(found.weights) == ["train", "train_2", "train_3"]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0.01, 100)), min_size=1, max_size=4),
    st.lists(st.integers(0, 40), max_size=5),
    st.integers(0, 5),
)
def test_shares_hold_after_every_draw_and_after_a_resume(
    parts: list[tuple[int, float]], sizes: list[int], cut: int
) -> None:
    sources = [f"s{i}" for i in range(len(parts))]
    tasks = [
        Task(10 * i + n, f"{i} {n}", source=sources[i])
        for i, (count, _) in enumerate(parts)
        for n in range(count)
    ]
    weights = {source: weight for source, (_, weight) in zip(sources, parts, strict=True)}
    whole = MixedCursor(tasks, weights, 3)
    drawn = [d for size in sizes for d in whole.take(size)]
    total = sum(weights.values())
    seen: Counter[str] = Counter()
    for number, draw in enumerate(drawn, 1):
        seen[tasks[draw.task].source] += 1
        for source, weight in weights.items():
            ahead = seen[source] - weight / total * number
            assert -len(sources) < ahead < 1
    assert len(set(drawn)) == len(drawn)  # a prompt that comes back has another draw number
    for source, (count, _) in zip(sources, parts, strict=True):
        own = [d for d in drawn if tasks[d.task].source == source]
        assert [d.number for d in own] == [i // count for i in range(len(own))]
    first, second = MixedCursor(tasks, weights, 3), MixedCursor(tasks, weights, 3)
    again = [d for size in sizes[:cut] for d in first.take(size)]
    second.restore(json.loads(json.dumps(first.state())))
    again += [d for size in sizes[cut:] for d in second.take(size)]
    assert again == drawn and second.state() == whole.state() and second.epoch == whole.epoch


def test_a_mixture_by_hand() -> None:
    tasks = [Task(i, str(i), source="ab"[i > 1]) for i in range(4)]  # 0 1 | 2 3
    cursor = MixedCursor(tasks, {"a": 3.0, "b": 1.0}, 0, shuffle=False)
    #       behind by: a .75/b .25, a .5/b .5, a .25/b .75, a 1/b 0: then the same again
    assert [tasks[d.task].source for d in cursor.take(8)] == list("aabaaaba")
    assert cursor.epoch == 2  # of a, six draws of two tasks
    with pytest.raises(DataError, match="its shares are"):
        MixedCursor(tasks, {"a": 1.0, "b": 1.0}, 0).restore(cursor.state())
    with pytest.raises(DataError, match="its fingerprint is"):
        MixedCursor(tasks[:3], {"a": 3.0, "b": 1.0}, 0, shuffle=False).restore(cursor.state())
    with pytest.raises(DataError, match="no tasks of b"):
        MixedCursor(tasks[:2], {"a": 3.0, "b": 1.0}, 0)


def test_sources_of_one_size_come_in_different_orders() -> None:
    tasks = [Task(i, str(i), source="ab"[i > 19]) for i in range(40)]
    drawn = MixedCursor(tasks, {"a": 1.0, "b": 1.0}, 0).take(40)
    orders = [[d.task % 20 for d in drawn if tasks[d.task].source == s] for s in "ab"]
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]


def test_one_source_is_drawn_as_ever() -> None:
    plain, named = (Task(0, "p"), Task(0, "p", source="s"))
    assert fingerprint([plain]) != fingerprint([named])
    assert fingerprint([plain]) == "878766139cdc64ee"  # runs from before there were sources
    assert Cursor([plain], 0).state()["seed"] == 0


# ---------------------------------------------------------------- configuration


def test_three_forms_of_one_setting(tmp_path: Path) -> None:
    a, b, _ = three(tmp_path)
    (tmp_path / "c.toml").write_text(
        '[data.train]\n"gsm8k:a.jsonl" = 0.7\n"b.jsonl" = 0.3\n"arithmetic" = 1\n'
    )
    config = load_config(tmp_path / "c.toml")
    assert config.data.train == {f"gsm8k:{a}": 0.7, b: 0.3, "arithmetic": 1.0}
    assert load_config(source_of(text(config), tmp_path)) == config
    (tmp_path / "c.toml").write_text('data.train = ["a.jsonl", "[ab].jsonl"]\ndata.eval = "*.csv"')
    data = load_config(tmp_path / "c.toml").data
    assert (data.train, data.eval) == ((a, f"{tmp_path}/[ab].jsonl"), "*.csv")
    assert load_config(None, ["data.train=['x.jsonl', 'y.jsonl']"]).data.sources == (
        "x.jsonl", "y.jsonl",
    )  # fmt: skip
    table = load_config(None, ["data.train={'x.jsonl': 2, 'y.jsonl': 1}"]).data.train
    assert table == {"x.jsonl": 2.0, "y.jsonl": 1.0}
    odd = tmp_path / "odd[1]"
    (odd / "x").mkdir(parents=True)
    lines(odd / "x" / "a.jsonl", {"prompt": "found"})
    (odd / "c.toml").write_text('data.train = "*/a.jsonl"')  # not what [1] may mean in a pattern
    found = loaded(load_config(odd / "c.toml").data.train)
    assert [task.prompt for task in found.train] == ["found"]
    for wrong in ({"x": 0}, {"x": -1.0}, {"x": "1"}, 7, ["x", 7]):
        with pytest.raises(ConfigError, match=r"data\.train"):
            load_config(**{"data.train": wrong})
    with pytest.raises(ConfigError, match=r"data\.eval\.x must be a table"):
        load_config(**{"data.eval": {"x": 1.0}})


def source_of(written: str, folder: Path) -> Path:
    (folder / "again.toml").write_text(written)
    return folder / "again.toml"


# ---------------------------------------------------------------- repeats and what is held out


def test_repeats_are_told_and_dropped(tmp_path: Path) -> None:
    texts = [("Caf\u00e9  x", 1), ("b", 2), ("cafe\u0301 X ", 1), ("B", 3), ("1 1", 4), ("11", 5)]
    path = lines(tmp_path / "x.jsonl", *({"prompt": p, "answer": a} for p, a in texts))
    kept = loaded(path)
    assert len(kept.train) == 6
    assert kept.notes[0].startswith(
        "2 of 6 prompts repeat an earlier one, 1 of them with another answer: data.duplicates=drop"
    )
    found = loaded(path, duplicates="drop")
    assert [task.id for task in found.train] == [0, 1, 4, 5]  # rows keep their numbers
    assert "they were dropped" in found.notes[0]
    held = lines(tmp_path / "held.jsonl", {"prompt": "B"}, {"prompt": "new"})
    found = loaded(path, eval=held, duplicates="drop")
    assert [task.id for task in found.train] == [0, 4, 5] and len(found.eval) == 2
    assert "1 of the 2 evaluation prompts are also trained on: they were dropped" in found.notes[0]
    with pytest.raises(DataError, match=r"Every prompt of data\.train"):
        loaded(held, eval=held, duplicates="drop")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text("ab \u00e9E", min_size=1, max_size=4), min_size=30, max_size=60))
def test_a_hash_split_never_leaks(prompts: list[str]) -> None:
    tasks = [Task(number, prompt) for number, prompt in enumerate(prompts)]
    try:
        train, held = split_by_hash(tasks, 0.3)
    except DataError:
        return
    same = [{" ".join(t.prompt.casefold().split()) for t in part} for part in (train, held)]
    assert not same[0] & same[1] and len(train) + len(held) == len(tasks)
    more = [Task(99, "another prompt"), *reversed(tasks)]  # other rows, other order
    assert {t.prompt for t in split_by_hash(more, 0.3)[1]} - {"another prompt"} == {
        t.prompt for t in held
    }


def test_the_share_is_about_right_and_stable(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", *({"prompt": f"row {i}"} for i in range(2_000)))
    found = loaded(path, holdout_share=0.1)
    assert 160 < len(found.eval) < 240 and len(found.train) + len(found.eval) == 2_000
    # Another order of hashes would move prompts of running experiments to the other side.
    order = sorted(range(2_000), key=lambda i: hashlib.sha256(f"row {i}".encode()).hexdigest())
    assert [task.id for task in found.eval] == order[: len(found.eval)]
    with pytest.raises(DataError, match="leaves none to train on"):
        loaded(path, holdout_share=1.0)
    with pytest.raises(DataError, match="both say"):
        loaded(path, holdout_share=0.1, eval=path)


def test_evaluation_begins_with_tasks_of_all_sources(tmp_path: Path) -> None:
    a, b, c = three(tmp_path)
    found = loaded("arithmetic", size=5, eval=(a, b, c))
    assert [task.prompt for task in found.eval[:4]] == ["a0", "b0", "c0", "a1"]
    assert len(found.eval) == 63 and len({task.id for task in found.eval}) == 63
    mixed = loaded({a: 1.0, b: 1.0}, holdout_share=0.3)
    assert {task.source for task in mixed.eval} == {"a", "b"} and mixed.weights == {"a": 1, "b": 1}
    with pytest.raises(DataError, match=r"No task of a is left"):
        loaded({a: 1.0, b: 1.0}, holdout_share=0.97)


def test_a_run_on_a_mixture_resumes_to_the_same_bits(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{a}-{b}=", "answer": str(a - b), "solution": str(a - b)}
        for a in range(10)
        for b in range(a)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "minus.parquet")
    mixed: dict[str, Any] = {
        "data__train": {"arithmetic": 3.0, f"{tmp_path}/minus.parquet": 1.0},
        "data__holdout_share": 0.2,
        "data__size": 60,
        "eval__every": 0,
    }
    run(tmp_path / "whole", steps=4, **mixed)
    run(tmp_path / "halves", steps=2, **mixed)
    run(tmp_path / "halves", steps=4, **mixed)
    steps = [left_behind(tmp_path / name) for name in ("whole", "halves")]
    assert steps[0]["values"] == steps[1]["values"]
    assert steps[0]["values"]["cursor"]["parts"]["minus"]["position"] == 4
    for name in (name for name in steps[0] if name.endswith((".parquet", ".safetensors"))):
        assert steps[0][name] == steps[1][name]
    for step in metrics(tmp_path / "whole")[1:]:
        assert step["data/source/arithmetic/share"] == 0.75
        assert step["data/source/minus/share"] == 0.25
        own, other = (step[f"data/source/{name}/reward"] for name in ("arithmetic", "minus"))
        assert 0.75 * own + 0.25 * other == pytest.approx(step["reward/sampled_mean"])
    with pytest.raises(RunError, match="minus"):  # other weights are another run
        run(tmp_path / "halves", steps=6, **{**mixed, "data__train": {"arithmetic": 1.0}})


def test_the_page_is_right(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    example, curriculum = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert load_config(source_of(curriculum, tmp_path)).curriculum.easy == 0.25
    data = load_config(source_of(example, tmp_path)).data
    assert data.duplicates == "drop" and list(data.sources)[1] == "data/olympiads-*.parquet"
    sections = re.findall(r"\n## (.*?)\n", page)
    named = page.partition(f"## {sections[2]}")[2].partition("\n## ")[0]
    assert set(re.findall(r"\n\| `(\w+)` \|", named)) == set(SETS)
    words = page.partition("## Templates")[2].partition("\n## ")[0]
    assert set(re.findall(r"\n\| `(\w+)` \|", words)) == {*TEXTS, *CHAT_TEMPLATES}
