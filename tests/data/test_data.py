"""Tasks from files and generators, their token ids, and the cursor."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizer import decoded, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from task_files import read, refused
from tokenizers import normalizers

from groupwise.config import Data
from groupwise.data import load
from groupwise.data.cursor import Cursor, Draw, fingerprint
from groupwise.data.generators import generate, split
from groupwise.data.prompts import prepare
from groupwise.errors import DataError
from groupwise.graders.answers import evaluate
from groupwise.graders.parts import SampleToGrade, built_in
from groupwise.model.formats.tokenizer import Tokenizer, character_files
from groupwise.records import Task

# ---------------------------------------------------------------- files


def written(folder: Path, *lines: Any, name: str = "data.jsonl") -> str:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / name).write_text("\n".join(texts), encoding="utf-8")
    return str(folder / name)


def test_rows_become_tasks_in_order(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    path = written(
        tmp_path,
        {"q": "one", "a": 1, "level": 3, "answer": "kept"},
        "",
        {"q": messages, "a": ["x"]},
    )
    one, two = read(path, "q", "a").tasks
    assert (one.id, one.prompt, one.answer) == (0, "one", 1)
    # The answer also stays under the name that functions written for this file ask for.
    assert one.columns == {"level": 3, "answer": "kept", "a": 1}
    assert (two.id, two.prompt, two.answer) == (1, (messages[0],), ["x"])


def test_compressed_rows_and_odd_line_ends(tmp_path: Path) -> None:
    # U+2028 and U+0085 end a line for str.splitlines, and not for JSON lines.
    row = json.dumps({"prompt": "a\u2028b\u0085c", "answer": "1"}, ensure_ascii=False)
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress(f"\ufeff{row}\r\n{row}\r\n".encode()))
    assert [t.prompt for t in read(path).tasks] == ["a\u2028b\u0085c"] * 2


def test_malformed_rows_are_listed_with_line_and_row(tmp_path: Path) -> None:
    bad = [
        "{nonsense",
        "[1, 2]",
        {"answer": "1"},
        {"prompt": "  "},
        {"prompt": 7},
        {"prompt": []},
        {"prompt": [{"content": "no role"}]},
        {"prompt": [{"role": "user", "content": None}]},
        '{"prompt": "\\ud800"}',
    ]
    path = written(tmp_path, {"prompt": "fine"}, "", *bad)
    message = refused(path)
    assert "9 malformed of 10 rows" in message
    assert "line 3: no JSON" in message and "{nonsense" in message  # the blank line counts
    assert "line 4: a JSON list instead of an object: [1, 2]" in message
    assert "line 5: no column 'prompt'" in message
    assert "line 6: 'prompt' is empty" in message
    assert "line 7: 'prompt' is of type int, not a string" in message
    assert "line 8" not in message and "and 4 more" in message
    for row in bad:
        assert "line 2" in refused(written(tmp_path, {"prompt": "fine"}, row))


def test_long_rows_are_shortened(tmp_path: Path) -> None:
    message = refused(written(tmp_path, {"prompt": "ok"}, "x" * 10_000))
    assert len(message) < 400


def test_a_column_that_is_nowhere_names_the_nearest(tmp_path: Path) -> None:
    path = written(tmp_path, {"promt": "a", "anwser": 1}, {"promt": "b", "anwser": 2})
    message = refused(path)
    assert "data.prompt_key" in message and "'promt'" in message and "line" not in message
    message = refused(path, "promt", require_answers=True)
    assert "data.answer_key" in message and "'anwser'" in message
    assert [task.answer for task in read(path, "promt").tasks] == [None, None]  # nobody asks


@pytest.mark.parametrize("empty", [None, "", "  ", [], {}])
def test_an_empty_answer_is_refused_where_it_is_needed(tmp_path: Path, empty: Any) -> None:
    path = written(tmp_path, {"prompt": "a", "answer": 0}, {"prompt": "b", "answer": empty})
    assert "line 2: 'answer' is empty" in refused(path, require_answers=True)
    assert [task.answer for task in read(path).tasks] == [0, empty]
    path = written(tmp_path, {"prompt": "a", "answer": False}, {"prompt": "b"})
    assert "line 2: no column 'answer'" in refused(path, require_answers=True)


def test_files_that_are_none(tmp_path: Path) -> None:
    assert "no rows" in refused(written(tmp_path, "", " "))
    assert "is a folder" in refused(tmp_path)
    assert "Did you mean 'data.jsonl'" in refused(tmp_path / "dato.jsonl")
    assert "JSON lines" in refused(written(tmp_path, "a,b", name="data.xlsx"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    assert "line 2, is no UTF-8" in refused(tmp_path / "latin.jsonl")
    whole = gzip.compress(b'{"prompt": "a"}\n' * 1000)
    (tmp_path / "torn.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    assert "Fetch or write it again" in refused(tmp_path / "torn.jsonl.gz")
    (tmp_path / "fake.jsonl.gz").write_bytes(b'{"prompt": "a"}\n')
    assert "Fetch or write it again" in refused(tmp_path / "fake.jsonl.gz")


# ---------------------------------------------------------------- generators


def test_arithmetic_by_hand() -> None:
    tasks = generate("arithmetic", 10_000, 0, {})
    assert len({task.prompt for task in tasks}) == 10_000  # all there are
    assert [task.id for task in tasks] == list(range(10_000))
    answers = {task.prompt: task.answer for task in tasks}
    assert answers["37+58="] == "95" and answers["0+0="] == "0" and answers["99+99="] == "198"
    assert tasks[0].columns == {"solution": tasks[0].answer}


def test_arithmetic_takes_products_first() -> None:
    options = {"digits": 1, "operations": "+-*", "terms": 3}
    answers = {t.prompt: t.answer for t in generate("arithmetic", 10**6, 0, options)}
    assert len(answers) == 10 * 3 * 10 * 3 * 10
    assert answers["2+3*4="] == "14" and answers["2*3-9="] == "-3" and answers["9-2*5="] == "-1"
    assert answers["9-5-3="] == "1" and answers["0-9+1="] == "-8" and answers["2*3*4="] == "24"


def test_arithmetic_with_answers_of_free_length() -> None:
    """Other solutions, the same tasks; every length occurs, and all of them are graded right."""
    options = {"digits": 1, "terms": 3}
    plain = generate("arithmetic", 1000, 7, options)
    tasks = generate("arithmetic", 1000, 7, {**options, "filler": 3})
    assert tasks == generate("arithmetic", 1000, 7, {**options, "filler": 3})
    assert [(t.prompt, t.answer) for t in tasks] == [(t.prompt, t.answer) for t in plain]
    solutions = [str(task.columns["solution"]) for task in tasks]
    assert [s.lstrip(";") for s in solutions] == [task.answer for task in tasks]
    counts = Counter(s.count(";") for s in solutions)
    assert set(counts) == {0, 1, 2, 3}
    assert all(abs(count - 250) < 5 * 250**0.5 for count in counts.values())
    right = built_in("number", ())
    samples = [SampleToGrade(t, s, (), "stop") for s, t in zip(solutions, tasks, strict=True)]
    assert {mark.value for mark in right.grade(samples)} == {1.0}
    cut = SampleToGrade(plain[0], ";" * 8, (), "length")
    assert [mark.value for mark in right.grade([cut])] == [0.0]


def test_pairs_of_sums_are_judged_as_bradley_and_terry_say() -> None:
    """Right answers are preferred with chance σ(care), longer ones with σ(taste) a sign."""
    options = {"digits": 2, "filler": 2, "care": 1.5, "taste": 0.5}
    tasks = generate("arithmetic_pairs", 10_000, 0, options)
    won: dict[tuple[int, int], list[int]] = {}
    for task in tasks:
        texts = [task.columns[name] for name in ("chosen", "rejected")]
        assert texts[0] != texts[1] and task.columns["solution"].endswith(str(task.answer))
        right, signs = (
            [int(text.lstrip(";") == task.answer) for text in texts],
            [text.count(";") for text in texts],
        )
        lead = right[0] - right[1], signs[0] - signs[1]
        won.setdefault(max(lead, (-lead[0], -lead[1])), []).append(lead > (-lead[0], -lead[1]))
    for (right_lead, sign_lead), wins in won.items():
        if (right_lead, sign_lead) != (0, 0):
            chance = 1 / (1 + math.exp(-(1.5 * right_lead + 0.5 * sign_lead)))
            error = math.sqrt(chance * (1 - chance) / len(wins))
            assert abs(sum(wins) / len(wins) - chance) < 4 * error
    assert {(1, 0), (1, 2), (1, -2), (0, 2)} <= set(won)


def test_chain_by_hand() -> None:
    """Every step takes the next number into the last result, below 0 as well."""
    tasks = {task.prompt: task for task in generate("chain", 10**6, 0, {"high": 3})}
    assert len(tasks) == 4 * (2 * 4) ** 3  # all there are
    assert [task.id for task in tasks.values()] == list(range(len(tasks)))
    task = tasks["0-3-2+1="]
    assert task.answer == "-4"
    assert task.columns == {"solution": "0-3=-3\n-3-2=-5\n-5+1=-4"}
    longer = {t.prompt: t for t in generate("chain", 10**6, 0, {"terms": 3, "operations": "+"})}
    assert len(longer) == 1000
    assert longer["7+5+9="].columns["solution"] == "7+5=12\n12+9=21"


def test_chain_solutions_have_their_steps_and_are_graded_right() -> None:
    tasks = generate("chain", 500, 3, {"terms": 5, "high": 40})
    assert len({task.prompt for task in tasks}) == 500
    for task in tasks:
        assert str(eval(str(task.prompt)[:-1])) == task.answer
        steps = str(task.columns["solution"]).split("\n")
        assert len(steps) == 4
        for step in steps:
            said, _, result = step.partition("=")
            assert eval(said) == int(result)
    right = built_in("number", ())
    solutions = [str(task.columns["solution"]) for task in tasks]
    samples = [SampleToGrade(t, s, (), "stop") for s, t in zip(solutions, tasks, strict=True)]
    assert {mark.value for mark in right.grade(samples)} == {1.0}
    # What stands in the last line counts, whatever the lines before it say.
    cut = [
        SampleToGrade(t, s[: s.rindex("\n")], (), "length")
        for t, s in zip(tasks, solutions, strict=True)
    ]
    early = [int(s.split("\n")[-2].partition("=")[2]) for s in solutions]
    expected = [float(number == int(str(t.answer))) for number, t in zip(early, tasks, strict=True)]
    assert [mark.value for mark in right.grade(cut)] == expected and 0.0 in expected


def test_countdown_solutions_are_right() -> None:
    tasks = generate("countdown", 2_000, 1, {"numbers": 4, "high": 12})
    assert len({task.prompt for task in tasks}) == len(tasks) == 2_000
    for task in tasks:
        found = evaluate(task.columns["solution"])
        assert found is not None
        assert found[0] == task.columns["target"] <= 100
        assert sorted(found[1]) == task.columns["numbers"]
        numbers = " ".join(map(str, task.columns["numbers"]))
        assert task.prompt == f"make {task.columns['target']} from {numbers}:"


@pytest.mark.parametrize("name", ["arithmetic", "arithmetic_pairs", "chain", "countdown"])
def test_generators_repeat_and_differ_by_seed(name: str) -> None:
    one, two = generate(name, 50, 3, {}), generate(name, 50, 4, {})
    assert one == generate(name, 50, 3, {})
    assert [t.prompt for t in one] != [t.prompt for t in two]


def test_generated_tasks_do_not_change_between_versions() -> None:
    """Runs are resumed and compared by these rows: a change here breaks them."""
    assert [t.prompt for t in generate("arithmetic", 3, 0, {})] == ["47+92=", "59+45=", "39+64="]
    assert [t.prompt for t in generate("chain", 2, 0, {})] == ["9-0-6+3=", "4-1+6+6="]
    assert [t.prompt for t in generate("countdown", 2, 0, {})] == [
        "make 11 from 12 19 19:",
        "make 90 from 2 8 15:",
    ]


def test_a_space_smaller_than_the_size_gives_all_and_says_so() -> None:
    # 1+1=2, 1+2=3, 2+2=4, 1*1, 1*2, 2*2, 2-1, 1/1, 2/1, 2/2: targets 1 and 2 from 1 1, ...
    tasks = generate("countdown", 100, 0, {"numbers": 2, "low": 1, "high": 2})
    assert {t.prompt for t in tasks} == {
        *("make 2 from 1 1:", "make 1 from 1 1:"),
        *("make 3 from 1 2:", "make 1 from 1 2:", "make 2 from 1 2:"),
        *("make 4 from 2 2:", "make 1 from 2 2:"),
    }
    found = load(Data(size=500, options={"digits": 1}), seed=0, held_out=20)
    assert (len(found.train), len(found.eval)) == (80, 20)
    assert found.notes == ["arithmetic has only 100 different prompts, 500 were asked for."]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("arithmetics", {}, "Did you mean 'arithmetic'"),
        ("arithmetic", {"digit": 2}, "Did you mean 'digits'"),
        ("arithmetic", {"stream": 2}, "no option 'stream'"),
        ("arithmetic", {"digits": 0}, "digits = 0 must be"),
        ("arithmetic", {"digits": True}, "digits = True must be"),
        ("arithmetic", {"filler": -1}, "filler = -1 must be"),
        ("arithmetic", {"operations": "/"}, "operations = '/' must be"),
        ("arithmetic", {"operations": "++"}, "names one twice"),
        ("arithmetic_pairs", {"care": -1}, "care = -1 must be a number from 0 to 100"),
        ("arithmetic_pairs", {"taste": "much"}, "taste = 'much' must be a number"),
        ("arithmetic_pairs", {"filler": 1.5}, "filler = 1.5 must be"),
        ("chain", {"terms": 1}, "terms = 1 must be"),
        ("chain", {"high": 0}, "high = 0 must be"),
        ("chain", {"operations": "*"}, "operations = '\\*' must be some of '\\+-'"),
        ("chain", {"digits": 2}, "chain has no option 'digits'"),
        ("countdown", {"low": 5, "high": 4}, "high = 4 must be"),
        ("countdown", {"low": 9, "max_target": 3, "operations": "+"}, "found no target"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        generate(name, 10, 0, options)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=30), st.integers(1, 29))
def test_a_split_shares_no_prompt(prompts: list[str], held_out: int) -> None:
    tasks = [Task(number, prompt) for number, prompt in enumerate(prompts)]
    try:
        train, held = split(tasks, held_out, 0)
    except DataError:
        assert held_out > len(tasks) - max(Counter(prompts).values())
        return
    assert not {t.prompt for t in train} & {t.prompt for t in held}
    assert sorted(t.id for t in train + held) == list(range(len(tasks)))
    assert len(held) >= held_out and train


def test_load_reads_what_the_configuration_names(tmp_path: Path) -> None:
    train = written(tmp_path, {"prompt": "a"}, {"prompt": "b"}, name="train.jsonl")
    held = written(tmp_path, {"prompt": "b"}, {"prompt": "c"}, name="eval.jsonl")
    alone = load(Data(train=train), seed=0, held_out=10)
    assert (len(alone.train), alone.eval, alone.notes) == (2, [], [])
    both = load(Data(train=train, eval=held), seed=0, held_out=10)
    assert [t.prompt for t in both.eval] == ["b", "c"]
    assert "1 of the 2 evaluation prompts are also trained on" in both.notes[0]
    same = load(Data(eval="arithmetic", size=300), seed=0, held_out=10)  # as if none were named
    assert (len(same.train), len(same.eval)) == (290, 10)
    assert not {t.prompt for t in same.train} & {t.prompt for t in same.eval}
    other = load(Data(train=train, eval="countdown"), seed=0, held_out=10)
    assert len(other.eval) == 10 and other.eval[0].columns["target"]


def test_completions_are_written_from_columns(tmp_path: Path) -> None:
    """A row that lacks a column is refused; a held-out one stays, to be graded by its answer."""
    rows = [{"prompt": "1+1", "answer": "2", "solution": "One {more}."}]
    file, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    file.write_text(json.dumps(rows[0]) + "\n")
    other.write_text(json.dumps({"prompt": "2+2", "answer": "4"}) + "\n")
    data = Data(train=str(file), eval=str(other), completion="{solution}</think>{answer}")
    found = load(data, seed=0, held_out=1)
    assert found.train[0].columns["completion"] == "One {more}.</think>2"
    assert "completion" not in found.eval[0].columns
    with pytest.raises(DataError, match=r"nothing in column 'solution', which data.completion"):
        load(Data(train=str(other), completion="{solution}"), seed=0, held_out=0)


def test_load_refuses_what_it_would_ignore(tmp_path: Path) -> None:
    train = written(tmp_path, {"prompt": "a"})
    with pytest.raises(DataError, match="Remove them"):
        load(Data(train=train, options={"digits": 2}), seed=0, held_out=0)
    with pytest.raises(DataError, match="Did you mean 'countdown'"):
        load(Data(train="countdwn"), seed=0, held_out=0)
    with pytest.raises(DataError, match="leaves none to train on"):
        load(Data(size=10), seed=0, held_out=10)


# ---------------------------------------------------------------- prompts

USER = {"role": "user", "content": "2+2?"}


def test_the_template_is_applied_once_and_to_messages_only() -> None:
    assert decoded("2+2?") == "<s>2+2?"
    assert decoded("2+2?", template="plain") == "<s>2+2?"
    assert decoded("2+2?", template="chat") == "<s>[user]2+2?\n[assistant]"
    assert decoded([USER]) == decoded([USER], template="chat") == "<s>[user]2+2?\n[assistant]"
    rendered = "[user]2+2?\n[assistant]"
    assert decoded(rendered) == "<s>" + rendered  # a string that looks like a chat stays text


def test_system_and_instruction() -> None:
    assert decoded([USER], system="Be brief.") == "<s>[system]Be brief.\n[user]2+2?\n[assistant]"
    told = decoded("{x} {prompt}", template="chat", instruction="Solve {prompt} in {steps}.")
    assert told == "<s>[user]Solve {x} {prompt} in {steps}.\n[assistant]"  # braces are only text
    assert decoded("1+1", instruction="Q: {prompt}\nA:") == "<s>Q: 1+1\nA:"


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ("a", {"system": "s"}, "would be ignored"),
        ([USER], {"instruction": "Solve {prompt}"}, "would be ignored"),
        ([USER], {"template": "plain"}, 'data.template = "auto"'),
        ("a", {"instruction": "Solve it."}, "leaves the prompt out"),
        ([{"role": "system", "content": "s"}, USER], {"system": "t"}, "system message of its own"),
    ],
)
def test_settings_that_no_prompt_would_use(
    prompt: Any, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        decoded(prompt, **settings)


def test_messages_without_a_template_name_the_row() -> None:
    with pytest.raises(DataError, match=r"Row 0: The model has no chat template"):
        decoded([USER], tokenizer(template=None))


def test_long_prompts_are_dropped_and_reported() -> None:
    tasks = [Task(number, "x" * length) for number, length in enumerate([5, 30, 9, 10])]
    found = prepare(tasks, tokenizer(), max_prompt_tokens=10, room=1000)
    assert [task.id for task in found.tasks] == [0, 2]  # 9 characters and a BOS are 10
    assert [(row.task, row.tokens) for row in found.dropped] == [(1, 31), (3, 11)]
    assert found.notes == [
        "2 of 4 prompts are longer than 10 tokens and were dropped; the longest, row 1, has 31."
    ]
    assert prepare(tasks, tokenizer(), room=1000).notes == []
    assert prepare(tasks, tokenizer(), max_prompt_tokens=10_000, room=11).limit == 11
    with pytest.raises(DataError, match=r"All 4 prompts.*shortest has 6"):
        prepare(tasks, tokenizer(), room=3)


def test_characters_that_the_tokenizer_loses_are_refused() -> None:
    digits = Tokenizer.from_files(character_files("0123456789+="))
    assert decoded("1+2=", digits) == "1+2="
    with pytest.raises(DataError, match=r"1 of 1 prompts .*Row 0: 'x' has no token"):
        decoded("1+x=y", digits)
    lower = tokenizer(normalizer=normalizers.Lowercase())
    with pytest.raises(DataError, match=r"'Me' comes back as 'me' \(character 5, behind 'tell '"):
        decoded("tell Me", lower)
    with pytest.raises(DataError, match=r"'b' comes back as ''"):
        decoded("ab", tokenizer(normalizer=normalizers.Replace("b", "")))
    folds = tokenizer(normalizer=normalizers.Replace("\n\n", "\n"))
    with pytest.raises(DataError, match="do not survive"):
        decoded("a\n\nb", folds)


def test_a_few_odd_rows_are_dropped_and_reported() -> None:
    digits = Tokenizer.from_files(character_files("0123456789+="))
    tasks = [Task(number, f"{number}+1=") for number in range(199)]
    odd = [Task(199, "1\x14+1="), Task(200, "one+1=")]
    found = prepare([*tasks, *odd], digits, room=100)
    assert [task.id for task in found.tasks] == list(range(199))
    assert [(row.task, row.tokens) for row in found.dropped] == [(199, 0), (200, 0)]
    assert found.notes == [
        "2 of 201 prompts do not survive the tokenizer and were dropped; the first: "
        "Row 199: '\\x14' has no token."
    ]
    with pytest.raises(DataError, match="3 of 202 prompts do not survive"):
        prepare([*tasks, *odd, Task(201, "x")], digits, room=100)


def test_what_sound_tokenizers_change_is_let_through() -> None:
    assert decoded("cafe\u0301", tokenizer(normalizer=normalizers.NFC())) == "<s>caf\u00e9"
    assert decoded("<eats>  \nhi") == "<s><eats>hi"  # white space behind a special token


def test_a_tokenizer_that_ends_prompts_is_refused() -> None:
    for single in ("<s> $A </s>", "$A </s>"):
        with pytest.raises(DataError, match="may only have a BOS in front"):
            decoded("a", tokenizer(single=single))


# ---------------------------------------------------------------- cursor


def tasks_of(count: int) -> list[Task]:
    return [Task(number, f"prompt {number}") for number in range(count)]


def test_every_pass_draws_every_task_once_in_its_own_order() -> None:
    cursor = Cursor(tasks_of(20), seed=0)
    passes = [cursor.take(20) for _ in range(3)]
    for epoch, drawn in enumerate(passes):
        assert sorted(d.task for d in drawn) == list(range(20))
        assert {d.number for d in drawn} == {epoch}
    orders = [tuple(d.task for d in drawn) for drawn in passes]
    assert len({*orders, tuple(range(20))}) == 4
    assert [d.task for d in Cursor(tasks_of(20), seed=1).take(20)] != list(orders[0])


def test_the_order_does_not_change_between_versions() -> None:
    assert [d.task for d in Cursor(tasks_of(8), seed=0).take(8)] == [6, 4, 3, 1, 7, 0, 2, 5]


def test_a_batch_larger_than_the_data_has_independent_draws() -> None:
    drawn = Cursor(tasks_of(3), seed=0, shuffle=False).take(7)
    assert drawn == [
        Draw(t, n) for t, n in [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2)]
    ]
    assert len(set(drawn)) == 7


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 12), st.lists(st.integers(0, 30), max_size=6), st.integers(0, 6), st.booleans()
)
def test_a_restored_cursor_goes_on_as_the_other(
    count: int, sizes: list[int], cut: int, shuffle: bool
) -> None:
    through = Cursor(tasks_of(count), 5, shuffle)
    whole = [d for n in sizes for d in through.take(n)]
    first = Cursor(tasks_of(count), 5, shuffle)
    parts = [d for n in sizes[:cut] for d in first.take(n)]
    state = json.loads(json.dumps(first.state()))
    second = Cursor(tasks_of(count), 5, shuffle)
    second.restore(state)
    parts += [d for n in sizes[cut:] for d in second.take(n)]
    assert parts == whole and second.state() == through.state()
    assert parts == Cursor(tasks_of(count), 5, shuffle).take(sum(sizes))  # batch sizes don't matter


def test_a_state_is_small_and_nonsense_is_refused() -> None:
    cursor = Cursor(tasks_of(1000), seed=0)
    cursor.take(2500)
    assert len(json.dumps(cursor.state())) < 200
    for change in ({"position": 1001}, {"position": -1}, {"epoch": "2"}, {"epoch": None}):
        with pytest.raises(DataError, match="makes no sense"):
            cursor.restore(cursor.state() | change)
    with pytest.raises(DataError, match="no tasks"):
        Cursor([], seed=0)


def test_fingerprints_tell_data_apart() -> None:
    base = tasks_of(3)
    assert fingerprint(base) == fingerprint(tasks_of(3)) and len(fingerprint(base)) == 16
    others = [base[:2], base[::-1], [*base[:2], Task(2, "other")], [*base[:2], Task(9, "prompt 2")]]
    chats = [[Task(0, ({"role": role, "content": "x"},))] for role in ("user", "system")]
    assert len({fingerprint(tasks) for tasks in [base, *others, *chats]}) == 7
