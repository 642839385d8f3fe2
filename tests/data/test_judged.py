"""Rows with judgements: what is read from them, and what is refused with the row and the reason."""

from __future__ import annotations

import json

import pytest

from groupwise.data.judged import check_ranked, check_stepwise, ranked, stepwise
from groupwise.data.tasks import Scan
from groupwise.errors import DataError
from groupwise.records import Task


def row(**columns):
    return Task(7, "ask", columns=columns)


def read(tmp_path, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return list(Scan().of(file))


def test_pairs_and_rankings():
    found = ranked(row(chosen="yes", rejected="no", margin=0.5))
    assert found.answers == ("yes", "no") and found.good == (1.0, 0.0) and found.margin == 0.5
    message = [{"role": "assistant", "content": "yes"}]
    assert ranked(row(chosen=message, rejected="no")).answers == ("yes", "no")
    entries = [{"rank": 2, "completion": "b"}, {"rank": 1, "completion": message}]
    assert ranked(row(completions=entries)).good == (-2.0, -1.0)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"chosen": "yes"}, "no text in column 'rejected'"),
        ({"chosen": "yes", "rejected": " "}, "no text in column 'rejected'"),
        ({"chosen": "a", "rejected": "b", "margin": "wide"}, "margin 'wide'"),
        ({"chosen": "a", "rejected": "b", "margin": True}, "margin True"),
        ({"chosen": "a", "rejected": "b", "margin": float("nan")}, "margin nan"),
        ({"chosen": "a", "rejected": "b", "margin": 10**400}, "margin 1000"),
        ({"chosen": "a", "rejected": "b", "margin": [[1.0]]}, "margin"),
        ({"chosen": {"text": "a"}, "rejected": "b"}, "no text in column 'chosen'"),
        ({"chosen": [{"role": "x"}] * 10**5, "rejected": "b"}, "one message of the"),
        ({"chosen": [{"role": "assistant", "content": {"a": 1}}], "rejected": "b"}, "no text"),
        ({"completions": [{"rank": 10**400, "completion": "a"}]}, "rank 1000"),
        ({"completions": [{"rank": {"x": [1] * 10**5}, "completion": "a"}]}, "rank"),
        ({"completions": {"rank": 1}}, "ranks 0 answers"),
        ({"chosen": [{"role": "user", "content": "a"}], "rejected": "b"}, "one message of the"),
        ({"completions": [{"completion": "a"}]}, "rank None"),
        ({"completions": [{"rank": 1, "completion": "a"}]}, "ranks 1 answers"),
        (
            {"completions": [{"rank": 1, "completion": "a"}, {"rank": 1, "completion": "b"}]},
            "none above another",
        ),
    ],
)
def test_comparisons_that_are_refused(columns, words):
    with pytest.raises(DataError, match=words) as refused:
        ranked(row(**columns))
    assert "Row 7" in str(refused.value) and len(str(refused.value)) < 1000


def test_rows_without_a_preference_are_refused_together():
    same = row(chosen="a", rejected="a")
    check_ranked([same, row(chosen="a", rejected="b")])
    with pytest.raises(DataError, match="no preference to learn"):
        check_ranked([same, same])


def test_steps_and_labels():
    found = stepwise(row(completions=["one", "two", "three"], labels=[True, 0.25, None]), "\n\n")
    assert found.steps == ("one", "two", "three") and found.labels == (1.0, 0.25, None)


@pytest.mark.parametrize(
    ("steps", "labels", "words"),
    [
        (["a", "b"], [True], "2 steps in `completions` and 1 in `labels`"),
        (["a", " "], [True, False], "step 1, is ' '"),
        (["a", "b\n\nc"], [True, False], "holds the separator"),
        (["a\n", "b"], [True, False], "end elsewhere than its labels say"),
        (["a"], [1.5], "label 1.5"),
        (["a"], ["good"], "label 'good'"),
        (["a"], [10**400], "label 1000"),
        (["a"], [float("nan")], "label nan"),
        (["a"], [[True] * 10**5], "label"),
        ([{"text": "a" * 10**5}], [True], "step 0, is"),
        ("a", [True], "no list in column 'completions'"),
        (["a"], None, "no list in column 'labels'"),
        ([], [], "no list in column 'completions'"),
    ],
)
def test_steps_that_are_refused(steps, labels, words):
    with pytest.raises(DataError, match=words) as refused:
        stepwise(row(completions=steps, labels=labels), "\n\n")
    assert "Row 7" in str(refused.value) and len(str(refused.value)) < 1000


def test_constant_labels_are_refused():
    good = row(completions=["a", "b"], labels=[True, True])
    check_stepwise([good, row(completions=["a"], labels=[0.5])], "\n\n")
    with pytest.raises(DataError, match="All steps have the label 1"):
        check_stepwise([good, good], "\n\n")
    with pytest.raises(DataError, match="No step of any row has a label"):
        check_stepwise([row(completions=["a"], labels=[None])], "\n\n")


def test_the_prompt_of_whole_conversations_is_split_off(tmp_path):
    def turns(*said):
        roles = ("user", "assistant", "user", "assistant")
        return [{"role": r, "content": x} for r, x in zip(roles, said, strict=False)]

    (task,) = read(
        tmp_path, {"chosen": turns("q", "a", "r", "yes"), "rejected": turns("q", "a", "r", "no")}
    )
    assert task.prompt == tuple(turns("q", "a", "r"))
    assert ranked(task).answers == ("yes", "no")
    text = "\n\nHuman: why?\n\nAssistant:"
    (task,) = read(tmp_path, {"chosen": text + " Because so.", "rejected": text + " Because not."})
    assert task.prompt == text + " Because"
    assert ranked(task).answers == (" so.", " not.")


def test_a_prompt_that_is_there_is_left_alone(tmp_path):
    (task,) = read(tmp_path, {"prompt": "p", "chosen": "p yes", "rejected": "p no"})
    assert task.prompt == "p" and ranked(task).answers == ("p yes", "p no")
    with pytest.raises(DataError, match=r"No row of .* has a column 'prompt'"):
        read(tmp_path, {"chosen": "yes", "rejected": "no"})
