"""Rubrics and environments as rewards: look-alikes everywhere, the real package where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import RewardError
from groupwise.graders.rubric import Grader, check
from groupwise.records import Grade, Task

LOOK_ALIKE = """
import asyncio, time
class Rubric:
    def __init__(self, funcs, weights, **objects):
        self.funcs, self.weights, self.class_objects = funcs, weights, objects
class Group:
    def __init__(self, *rubrics): self.funcs, self.weights, self.rubrics = [], [], list(rubrics)
class MultiTurnEnv:
    def __init__(self, rubric, message_type="chat"):
        self.rubric, self.message_type = rubric, message_type
class SingleTurnEnv(MultiTurnEnv): pass

def right(completion, answer, state):
    state["seen"] = completion[-1]["content"]
    return float(completion[-1].content == answer)
async def cached(state, info, prompt):
    assert prompt[-1]["role"] == "user" and state["trajectory"][0]["completion"]
    return float(len(state["seen"]))
def best(completions, answers, states) -> list[float]:
    longest = max(len(c[-1]["content"]) for c in completions)
    return [float(len(c[-1]["content"]) == longest) for c in completions]
def measured(state): raise RuntimeError("only a metric")
def hangs(completion, answer):
    if completion == "hang": time.sleep(60)
    if completion == "raise": raise ValueError("no")
    return 1.0
async def waits(completion):
    await asyncio.sleep(60 if completion == "hang" else 0)
    return 1.0
def too_few(completions): return [1.0]
def words(completion): return "good"
def by_object(completion, limit): return float(len(completion) <= limit)

env = SingleTurnEnv(Rubric([measured, right, cached], [0.0, 1.0, 0.5]))
groups = SingleTurnEnv(Group(Rubric([right], [1.0]), Rubric([best, measured], [2.0, 0.0])))
texts = Rubric([by_object], [1.0], limit=2)
slow = Rubric([hangs], [1.0])
slow_async = Rubric([waits], [1.0])
short = Rubric([too_few], [1.0])
wordy = Rubric([words], [1.0])
asks = Rubric([lambda completion, colour: 1.0], [1.0])
nothing = Rubric([measured], [0.0])
turns = MultiTurnEnv(Rubric([right], [1.0]))
made = 0
def load_environment(size=3):
    global made
    made += 1
    assert made == 1
    return env
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "env.py").write_text(LOOK_ALIKE)
    return tmp_path / "env.py"


def grades(file: Path, name: str, *texts: str, **options: Any) -> list[Grade]:
    """Of two prompts, each with all of these texts."""
    grader = Grader({f"{file}:{name}": 1.0}, **options)
    tasks = [Task(n, "q", "7", {"info": {}}) for n in range(2)]
    return grader.grade([(task, text, (1,), "eos") for task in tasks for text in texts])


def rewards(file: Path, name: str, *texts: str, **options: Any) -> list[float | None]:
    found = [grade.reward for grade in grades(file, name, *texts, **options)]
    assert found[: len(texts)] == found[len(texts) :]
    return found[: len(texts)]


@pytest.mark.parametrize("name", ["env", "load_environment"])
def test_an_environment_is_its_rubric_with_messages(file: Path, name: str) -> None:
    """1 for the answer, half a point a character by way of the state; a metric may fail."""
    assert rewards(file, name, "7", "1234") == [1.5, 2.0]
    assert rewards(file, name, "7") == [1.5]


def test_group_functions_compare_the_samples_of_a_prompt(file: Path) -> None:
    assert rewards(file, "groups", "7", "12", "34") == [1.0, 2.0, 2.0]
    assert Grader({f"{file}:groups": 1.0}).by_group


def test_a_rubric_that_is_nobodys_gets_texts_and_its_objects(file: Path) -> None:
    assert rewards(file, "texts", "7", "777") == [1.0, 0.0]


def test_what_a_function_of_a_rubric_gets_wrong_is_an_error(file: Path) -> None:
    for name, text, said in [
        ("slow", "raise", "hangs raised ValueError: no"),
        ("short", "7", "too_few returned [1.0] for 2 samples"),
        ("wordy", "7", "words returned 'good', no number"),
        ("asks", "7", "asks for 'colour', which is no column"),
    ]:
        first, *_ = grades(file, name, text, "7")
        assert (first.reward, first.status) == (None, "error") and said in first.reason


@pytest.mark.parametrize("name", ["slow", "slow_async"])
def test_a_rubric_that_hangs_is_stopped(file: Path, name: str) -> None:
    found = grades(file, name, "7", "hang", timeout=3.0)
    assert [grade.status for grade in found] == ["ok", "timeout"] * 2
    assert [grade.reward for grade in found] == [1.0, None] * 2


@pytest.mark.parametrize(
    ("name", "words"),
    [("turns", "several turns"), ("nothing", "needs functions"), ("made", "no function 'made'")],
)
def test_what_is_no_reward_is_refused(file: Path, name: str, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        Grader({f"{file}:{name}": 1.0})


def test_a_message_has_no_end_token(file: Path) -> None:
    grader = Grader({f"{file}:env": 1.0}, ends=["</s>"])
    told = grader.grade([(Task(0, "q", "7"), "7</s>", (1,), "eos")])
    assert [grade.reward for grade in told] == [1.5]


# ---------------------------------------------------------------- the package itself

REAL = """
import verifiers as vf
from datasets import Dataset

parser = vf.XMLParser(["think", "answer"], answer_field="answer")

async def right(completion, answer, parser) -> float:
    return 1.0 if parser.parse_answer(completion) == answer else 0.0
def quoted(completion, answer): return float(answer in completion[-1]["content"])
def best(completions, answers, **kwargs) -> list[float]:
    lengths = [len(c[-1].content) for c in completions]
    return [float(n == min(lengths)) for n in lengths]
def broken(completion): raise KeyError("x")

rubric = vf.Rubric(funcs=[right, quoted], weights=[1.0, 0.25], parser=parser)
group = vf.RubricGroup([rubric, vf.Rubric(funcs=[best])])
raises = vf.Rubric(funcs=[broken])
plain = vf.Rubric(funcs=[parser.get_format_reward_func()], parser=parser)
rows = Dataset.from_list([{"question": "q", "answer": "7"}])
env = vf.SingleTurnEnv(dataset=rows, parser=parser, rubric=rubric)
def load_environment(): return env
turns = vf.ToolEnv(dataset=rows, tools=[], rubric=rubric)
"""


def test_rubrics_and_environments_of_the_package(tmp_path: Path) -> None:
    """Their own scoring is the reference."""
    pytest.importorskip("verifiers.rubrics.rubric", reason="no verifiers: pip install verifiers")
    file = tmp_path / "env.py"
    file.write_text(REAL)
    good = "<think>\nIt is 7\n</think>\n<answer>\n7\n</answer>"
    bad = "<think>\nIt is 8\n</think>\n<answer>\n8\n</answer> not 7"
    for name in ("rubric", "env", "load_environment"):
        assert rewards(file, name, good, bad) == [1.25, 0.25]
    assert rewards(file, "group", good, bad) == [2.25, 0.25]
    assert rewards(file, "plain", good, "7") == pytest.approx(own(file, "plain", [good, "7"]))
    (first, *_) = grades(file, "raises", good)
    assert first.status == "error" and "broken raised KeyError" in first.reason
    with pytest.raises(RewardError, match="ToolEnv has several turns"):
        Grader({f"{file}:turns": 1.0})
    check(Grader({f"{file}:env": 1.0}), [Task(0, "q", "7")])
    for name in ("rubric", "group"):
        assert rewards(file, name, good, bad) == pytest.approx(own(file, name, [good, bad]))


def own(file: Path, name: str, texts: list[str]) -> list[float]:
    """What the package makes of the samples of a prompt."""
    import asyncio
    import runpy

    from verifiers.types import AssistantMessage, State, UserMessage

    states = [
        State(
            prompt=[UserMessage(content="q")],
            completion=[AssistantMessage(content=text)],
            answer="7",
            info={},
            task="",
            trajectory=[],
        )
        for text in texts
    ]
    asyncio.run(runpy.run_path(str(file))[name].score_group(states))
    return [state["reward"] for state in states]
