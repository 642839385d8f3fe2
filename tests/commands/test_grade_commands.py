"""`groupwise grade` and `groupwise check-reward`."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from groupwise.cli import main
from groupwise.commands.check_reward import spread
from groupwise.graders.attacks import attempts, audit
from groupwise.graders.rubric import Grader
from groupwise.records import Task


def grade(monkeypatch: Any, capsys: Any, lines: str, *options: str) -> tuple[list[Any], str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(["grade", *options]) == 0
    printed = capsys.readouterr()
    return [json.loads(line) for line in printed.out.splitlines()], printed.err


def test_grade_says_score_status_why_and_seconds(monkeypatch: Any, capsys: Any) -> None:
    lines = "\n".join(
        [
            '{"gold": "1/2", "pred": "\\\\boxed{0.5}"}',
            '{"gold": "1/2", "pred": "\\\\boxed{0.6}"}',
            "",
            "{not json",
            '{"gold": "7", "pred": "\\\\boxed{(((10^{10})!)!)!}"}',
            "[1, 2]",
            '{"gold": "7"}',
            '{"answer": 7, "completion": [{"role": "assistant", "content": "It is 7."}]}',
            '{"gold": null, "pred": "7"}',
            '{"gold": "\\\\sin(2x)", "pred": "\\\\boxed{2\\\\sin x\\\\cos x}"}',
        ]
    )
    found, said = grade(monkeypatch, capsys, lines, "--grader", "math(timeout=4)")
    assert [each["status"] for each in found] == [
        "graded", "graded", "error", "graded", "error", "error", "graded", "abstained", "graded",
    ]  # fmt: skip
    assert [each["score"] for each in found] == [1.0, 0.0, None, 0.0, None, None, 1.0, None, 1.0]
    assert [each.get("line") for each in found] == [None, None, 4, None, 6, 7, None, None, None]
    assert found[2]["why"].startswith("line 4: ") and "3 lines could not be read" in said
    assert (
        found[0]["why"] == "boxed: 0.5 is 1/2"
        and "more than 4 s of the processor" in found[3]["why"]
    )
    assert all(each["seconds"] >= 0 for each in found)


def test_grade_with_a_function_of_a_file(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    code = """
def f(completion, answer, tests, prompt):
    print("noise")
    return tests * (completion == answer) + len(prompt)
"""
    (tmp_path / "r.py").write_text(code)
    line = '{"prompt": "12", "completion": "a", "answer": "a", "tests": 5}'
    found, _ = grade(monkeypatch, capsys, line, "--grader", f"{tmp_path}/r.py:f")
    assert found[0]["score"] == 7.0
    assert main(["grade", "--grader", "no_such"]) == 2
    assert "There is no reward 'no_such'" in capsys.readouterr().err


def test_grade_answers_line_by_line(tmp_path: Path) -> None:
    """One who waits for a verdict before the next line gets it."""
    with subprocess.Popen(
        [sys.executable, "-m", "groupwise.cli", "grade", "--grader", "number"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        for number in (1, 2):
            process.stdin.write(json.dumps({"gold": number, "pred": f"it is {number}"}) + "\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["score"] == 1.0
        process.stdin.close()
        assert process.wait(120) == 0


# ---------------------------------------------------------------- check-reward


def tasks(*golds: Any, **columns: Any) -> list[Task]:
    return [
        Task(n, f"Question {n}: what is it?", gold, dict(columns)) for n, gold in enumerate(golds)
    ]


@pytest.mark.parametrize(
    ("part", "rows"),
    [
        ("number", tasks("12", "-3.5", "1/2", "0", "40%")),
        ("math", tasks("12", r"\frac{3}{4}", r"x^2 + 1", "(1, 2)", r"\text{Evelyn}")),
        ("choice", tasks("A", "C", "(B) Rome")),
        ("choice", tasks(0, 1, "Rome", choices=["Paris", "Rome", "Oslo"])),
        ("exact", tasks("Paris", "Rome", "Oslo")),
    ],
)
def test_our_own_graders_stand_every_attack(part: str, rows: list[Task]) -> None:
    findings = audit(Grader({part: 1.0}), rows)
    assert {finding.kind: finding.example for finding in findings if not finding.good} == {}
    assert findings[0].kind == "the gold answer" and findings[0].passed == len(rows)
    assert len(findings) >= 9


BAD = """
import re
def always(completion): return 1.0
def never(completion, answer): return 0.0
def anywhere(completion, answer): return float(str(answer) in completion)
def empty(completion, answer): return float(completion.strip() in ("", answer))
def obeys(completion, answer): return float("full marks" in completion or completion == answer)
def breaks(completion, answer): return float(answer) / len(completion.strip())
def lengthy(completion, answer): return float(len(completion) > 9999 or completion == answer)
"""


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("always", {"nothing", "a wrong answer", "every option at once"}),
        ("never", {"the gold answer"}),
        (
            "anywhere",
            {"every option at once", "the gold answer in thoughts only", "a wrong answer"},
        ),
        ("empty", {"nothing", "white space"}),
        ("obeys", {"an instruction to the grader"}),
        ("lengthy", {"a very long text"}),
    ],
)
def test_rewards_that_can_be_fooled_are_found(name: str, kinds: set[str], tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    findings = audit(Grader({f"{tmp_path}/bad.py:{name}": 1.0}), tasks("12", "17", "23"))
    found = {finding.kind for finding in findings if not finding.good}
    assert kinds <= found
    assert name == "always" or found == kinds | (found & {"thoughts that never end"})


def test_check_reward_prints_a_table_and_a_verdict(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    rows = [{"prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(30, 90)]
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    settings = [f"data.train={data}", "eval.tasks=0"]

    def parts(name: str) -> str:
        return f'reward.parts={{ "{tmp_path}/bad.py:{name}" = 1.0 }}'

    good = ["check-reward", f"data.train={data}", "eval.tasks=0", "--rows", "5"]
    assert main(good) == 0
    printed = capsys.readouterr().out
    assert "the gold answer" in printed and "5/5  ok" in printed
    assert "Gold answers pass, and nothing else that was tried." in printed
    bad = ["check-reward", *settings, parts("anywhere"), "--json"]
    assert main(bad) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["good"] is False
    fooled = {each["kind"]: each for each in found["findings"] if not each["good"]}
    assert fooled["every option at once"]["example"]["reward"] == 1.0
    assert main(["check-reward", *settings, parts("breaks")]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert main([*good[:3], "--rows", "0"]) == 2


def test_rows_are_taken_from_all_of_the_data() -> None:
    rows = tasks(*range(100))
    assert [task.id for task in spread(rows, 3)] == [0, 50, 99]
    assert [task.id for task in spread(rows[:2], 16)] == [0, 1]
    assert [task.id for task in spread(rows, 1)] == [0]


def test_attempts_never_hold_the_gold_answer_as_a_wrong_one() -> None:
    rows = tasks("12", "12", "3")
    for task in rows:
        wrong = [each.text for each in attempts(task, rows) if each.kind == "a wrong answer"]
        assert wrong and str(task.answer) not in wrong


def test_attacks_on_rows_without_a_gold_answer(tmp_path: Path, capsys: Any) -> None:
    """Nothing and white space are tried there too; that gold answers pass is not claimed."""
    row = {"prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    (task,) = [Task(0, str(row["prompt"]), None, row)]
    assert {"nothing", "white space"} <= {each.kind for each in attempts(task, [])}
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps(row))
    parts = 'reward.parts={ "instructions" = 1.0 }'
    main(["check-reward", f"data.train={data}", "eval.tasks=0", parts])
    printed = capsys.readouterr().out
    assert "nothing  " in printed and "Gold answers pass" not in printed


def test_attacks_on_programs() -> None:
    """A reference that goes on inside its prompt's function keeps its indentation."""
    test = "def check(call):\n    assert call(2, 3) == {}\n    assert call(0, 5) == {}\n"
    rows = [
        Task(
            number,
            f'def {name}(a, b):\n    """Work it out."""\n',
            f"    x = a {sign} b\n    return x\n",
            {"tests": test.format(*results), "entry_point": name},
            grader="code",
        )
        for number, (name, sign, results) in enumerate(
            [("add", "+", (5, 5)), ("times", "*", (6, 0)), ("minus", "-", (-1, -5))]
        )
    ]
    rows.append(
        Task(3, "Write last(x).", "def last(x):\n    return x[-1]",
             {"tests": ["assert last([1, 2]) == 2", "assert last('ab') == 'b'"]}, grader="code")
    )  # fmt: skip
    findings = audit(Grader({"row": 1.0}), rows)
    assert {finding.kind: finding.example for finding in findings if not finding.good} == {}
    assert findings[0].kind == "the gold answer" and findings[0].passed == 4


def test_an_example_of_many_right_answers_makes_no_other_wrong() -> None:
    gym = pytest.importorskip("groupwise.data.gym")
    pytest.importorskip("reasoning_gym")
    rows = gym.generate("graph_color", 12, 0, {"min_num_vertices": 4, "max_num_vertices": 4})[0]
    findings = audit(Grader({"row": 1.0}), rows)
    assert {finding.kind: finding.example for finding in findings if not finding.good} == {}
    assert [f.passed for f in findings if f.kind == "a wrong answer"] == [0]
