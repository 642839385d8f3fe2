"""Grading while others are sampled, and verdicts that are kept."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import alive, exit_code, gone
from runs import left_behind, quiet, run, small, start

from groupwise.engine.batch import BatchEngine
from groupwise.engine.protocol import Sampling
from groupwise.graders.recorded_verdicts import Key, recorded
from groupwise.graders.rubric import Grader
from groupwise.prepare.rollouts import ConcurrentGrading, SampledGroup, grade, sample_groups
from groupwise.records import Completion, Task
from groupwise.training.loop import train
from groupwise.watch.display import Display


class Letters:
    """A tokenizer of one character a token."""

    def decode_all(self, rows: Any) -> list[str]:
        return ["".join(chr(97 + i) for i in row) for row in rows]


def completion(*ids: int) -> Completion:
    return Completion(ids, torch.zeros(len(ids)), "eos", 0)


class Slow(BatchEngine):
    """Hands groups in in reverse order."""

    def __init__(self) -> None:
        self.last: Callable[[], Any] = lambda: None  # what the last sample takes

    def answer(self, requests: Any, sampling: Sampling) -> list[list[Completion]]:
        return [[completion(r.prompt_id, n) for n in range(r.samples)] for r in requests]

    def finished(self, wrote: Any = None) -> Any:
        return super().finished(wrote)[::-1]

    def generate(self, *asked: Any, **told: Any) -> list[list[Completion]]:
        groups = super().generate(*asked, **told)
        self.last()
        return groups


SOURCE = """
seen = []
def one(completion):
    seen.append(completion)
    return float(len(seen))
def batch(completions): return [float(len(completions))] * len(completions)
"""


def draw(engine: Slow, grader: Grader, again: bool = False, **known: Any) -> list[list[Any]]:
    """`again`: other completions of all groups were handed on before."""
    prompts = [(Task(n, "q", token_ids=(1,)), 0) for n in range(4)]
    beside = ConcurrentGrading(grader, Letters(), prompts, **known)  # type: ignore[arg-type]
    # As long as the grades of the others do, if there is anybody who makes them.
    engine.last = lambda: wait([graded for _, graded in beside.early.values()], 60)
    with beside:
        for number in range(len(prompts) if again else 0):
            beside.take(number, [completion(7), completion(7)])
        written = sample_groups(engine, prompts, 2, Sampling(max_tokens=4), done=beside.take)
    early = sum(graded.done() for _, graded in beside.early.values())
    assert early == (4 if grader.by_group else 0)  # before the engine was through
    return beside.rollouts(written)


def test_groups_are_graded_while_others_are_sampled() -> None:
    grader = Grader({"exact": 1.0, "length(target=4)": 1.0})
    groups = draw(Slow(), grader)
    texts = [[r.text for r in group] for group in groups]
    assert texts == [["aa", "ab"], ["ba", "bb"], ["ca", "cb"], ["da", "db"]]
    assert [[(r.task.id, r.sample) for r in g] for g in groups] == [
        [(n, 0), (n, 1)] for n in range(4)
    ]
    assert all(r.grade.reward == 0.5 for group in groups for r in group)


def test_groups_are_graded_in_their_order(tmp_path: Path) -> None:
    """Though the last one was written first."""
    (tmp_path / "r.py").write_text(SOURCE)
    groups = draw(Slow(), Grader({f"{tmp_path}/r.py:one": 1.0}))
    assert [r.grade.reward for group in groups for r in group] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_function_for_batches_still_gets_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(SOURCE)
    groups = draw(Slow(), Grader({f"{tmp_path}/r.py:batch": 1.0}))
    assert {r.grade.reward for group in groups for r in group} == {8.0}


def test_what_was_sampled_again_is_graded_again() -> None:
    groups = draw(Slow(), Grader({"length(target=4)": 1.0}), again=True)
    assert [r.grade.reward for group in groups for r in group] == [0.5] * 8


def test_a_known_verdict_is_not_graded_again(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(SOURCE)
    grader = Grader({f"{tmp_path}/r.py:one": 1.0})
    group = SampledGroup(Task(3, "q"), 5, [completion(0), completion(1), completion(2)])
    (first,) = grade(grader, Letters(), [group])  # type: ignore[arg-type]
    known = {Key(3, 5, r.sample, r.text): r.grade for r in first if r.sample != 1}
    known[Key(3, 5, 1, "other text")] = first[0].grade
    (second,) = grade(grader, Letters(), [group], known)  # type: ignore[arg-type]
    assert [r.grade.reward for r in first] == [1.0, 2.0, 3.0]
    assert [r.grade.reward for r in second] == [1.0, 4.0, 3.0]  # one call, for the other text
    assert list(known) == [Key(3, 5, 1, "other text")]


COUNTING = """
from pathlib import Path
def judge(completion, answer):
    \"\"\"Changes its mind: what it says depends on how often it was asked before.\"\"\"
    file = Path({file!r})
    asked = file.read_text() if file.exists() else ""
    file.write_text(asked + "x")
    return float(len(asked) % 7)
"""


def test_verdicts_of_steps_that_are_done_again_are_kept(tmp_path: Path, monkeypatch: Any) -> None:
    """Two steps after the checkpoint were recorded; a judge is not asked about them again."""
    log = tmp_path / "asked"
    (tmp_path / "judge.py").write_text(COUNTING.format(file=str(log)))
    changes = {
        "steps": 4,
        "reward__parts": {f"{tmp_path}/judge.py:judge": 1.0},
        "checkpoint__every_steps": 2,
        "eval__every": 0,
        "eval__tasks": 0,
    }
    from groupwise.training.keeper import Keeper

    saving = Keeper.save
    monkeypatch.setattr(
        Keeper, "save", lambda self: saving(self) if self.progress.step < 4 else 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        train(small(**changes), tmp_path / "run", quiet())
    recorded_before = {
        step: (tmp_path / "run" / "rollouts" / f"step_{step}.parquet") for step in (3, 4)
    }
    before = {step: recorded([file]) for step, file in recorded_before.items()}
    asked = len(log.read_text())
    monkeypatch.setattr(Keeper, "save", saving)
    train(small(**changes), tmp_path / "run", quiet())
    after = {step: recorded([file]) for step, file in recorded_before.items()}
    assert after == before and len(before[3]) == 16
    checks = len(log.read_text()) - asked
    assert checks < 16  # those that check the reward before the run, on a few rows

    def rewards() -> list[Any]:
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line).get("reward/mean") for line in lines]

    assert len(rewards()) == 5


BY_STEP = COUNTING.replace(
    "return float(len(asked) % 7)",
    """half = len(completion) // 2
    steps = [(half, 0.25)] if half else []
    return {{"reward": float(len(asked) % 7), "steps": [*steps, (len(completion), len(asked) / 3)]
             if completion else []}}""",
)


@pytest.mark.parametrize("recipe", ["grpo", "grpo_process"])
def test_verdicts_outlive_a_second_crash(tmp_path: Path, monkeypatch: Any, recipe: str) -> None:
    """Cut short after step 4, and again in step 4: it is graded once, its single steps too."""
    log = tmp_path / "asked"
    (tmp_path / "judge.py").write_text(BY_STEP.format(file=str(log)))
    changes = {
        "steps": 4,
        "recipe": recipe,
        "reward__parts": {f"{tmp_path}/judge.py:judge": 1.0},
        "checkpoint__every_steps": 2,
        "eval__every": 0,
        "eval__tasks": 0,
    }
    from groupwise.stages.groups import GroupStage
    from groupwise.training.keeper import Keeper

    saving, collecting, draws = Keeper.save, GroupStage.collect, []
    monkeypatch.setattr(
        Keeper, "save", lambda self: saving(self) if self.progress.step < 4 else 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        train(small(**changes), tmp_path / "run", quiet())
    file = tmp_path / "run" / "rollouts" / "step_4.parquet"
    before = recorded([file])
    assert any(grade.steps for grade in before.values())

    def fails_at_the_second(self: Any, *given: Any) -> Any:
        draws.append(given)
        return collecting(self, *given) if len(draws) < 2 else 1 / 0

    monkeypatch.setattr(GroupStage, "collect", fails_at_the_second)
    with pytest.raises(ZeroDivisionError):
        train(small(**changes), tmp_path / "run", quiet())
    assert not file.exists()
    asked = len(log.read_text())
    monkeypatch.setattr(Keeper, "save", saving)
    monkeypatch.setattr(GroupStage, "collect", collecting)
    train(small(**changes), tmp_path / "run", quiet())
    assert recorded([file]) == before
    assert len(log.read_text()) - asked < 16  # the check before the run, and no sample of a step
    assert not (tmp_path / "run" / ".again").exists()


def test_files_without_step_rewards_are_no_record_of_them(tmp_path: Path) -> None:
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    from groupwise.runfiles.rollouts import Row, write

    write(tmp_path / "step_1.parquet", [Row(1, 0, 0, 0, (1,), (2,), [0.0], text="a")], 1)
    assert list(recorded([tmp_path / "step_1.parquet"])) == [Key(1, 0, 0, "a")]
    old = pq.read_table(tmp_path / "step_1.parquet").drop_columns(["reward_steps"])
    pq.write_table(old, tmp_path / "step_1.parquet")
    assert recorded([tmp_path / "step_1.parquet"]) == {}


def test_a_run_graded_beside_is_the_run_graded_after(tmp_path: Path, monkeypatch: Any) -> None:
    run(tmp_path / "beside", steps=2)
    monkeypatch.setattr(Grader, "by_group", property(lambda self: False))
    run(tmp_path / "after", steps=2)
    assert left_behind(tmp_path / "beside") == left_behind(tmp_path / "after")


def test_the_native_engine_hands_on_every_group(tmp_path: Path, monkeypatch: Any) -> None:
    early: list[int] = []
    whole = ConcurrentGrading.rollouts

    def counted(self: ConcurrentGrading, written: Any) -> Any:
        early.append(len(self.early))
        assert all(
            completions == written[number].completions
            for number, (completions, _) in self.early.items()
        )
        return whole(self, written)

    monkeypatch.setattr(ConcurrentGrading, "rollouts", counted)
    run(tmp_path / "run", steps=2)
    assert early == [4, 4]  # prompts of a step


@pytest.mark.parametrize("damage", ["cut", "empty", "noise"])
def test_damaged_verdicts_are_asked_for_again(
    tmp_path: Path, monkeypatch: Any, damage: str
) -> None:
    """A file of verdicts that a crash of the machine left half written stops no run."""
    log = tmp_path / "asked"
    (tmp_path / "judge.py").write_text(COUNTING.format(file=str(log)))
    changes = {
        "steps": 4,
        "reward__parts": {f"{tmp_path}/judge.py:judge": 1.0},
        "checkpoint__every_steps": 2,
        "eval__every": 0,
        "eval__tasks": 0,
    }
    from groupwise.training.keeper import Keeper

    saving = Keeper.save
    monkeypatch.setattr(
        Keeper, "save", lambda self: saving(self) if self.progress.step < 4 else 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        train(small(**changes), tmp_path / "run", quiet())
    rollouts = tmp_path / "run" / "rollouts"
    whole = (rollouts / "step_4.parquet").read_bytes()
    half = {"cut": whole[: len(whole) // 2], "empty": b"", "noise": b"x" * 5000}[damage]
    (rollouts / "step_4.parquet").write_bytes(half)
    kept, asked = recorded([rollouts / "step_3.parquet"]), len(log.read_text())
    monkeypatch.setattr(Keeper, "save", saving)
    said = io.StringIO()
    train(small(**changes), tmp_path / "run", Display(said, live=False))
    assert "the verdicts of step_4 are lost and asked for again" in " ".join(
        said.getvalue().split()
    )
    assert recorded([rollouts / "step_3.parquet"]) == kept
    assert len(recorded([rollouts / "step_4.parquet"])) == 16
    assert 16 <= len(log.read_text()) - asked < 32  # one step, and the check before the run


HANGS_ONCE = """
import os, time
from pathlib import Path
def judge(completion, answer):
    \"\"\"At its 60th call, it is caught in the middle.\"\"\"
    count = Path({file!r})
    asked = len(count.read_text()) if count.exists() else 0
    count.write_text("x" * (asked + 1))
    if asked == 60:
        Path({file!r} + ".here").write_text(str(os.getpid()))
        time.sleep(600)
    return float(len(completion) % 3)
"""


def test_killed_in_the_middle_of_grading_it_comes_back_the_same(tmp_path: Path) -> None:
    """kill -9 while a worker holds a verdict: the worker dies too, and nothing half said counts."""
    asked = tmp_path / "asked"
    (tmp_path / "judge.py").write_text(HANGS_ONCE.format(file=str(asked)))
    changes = {
        "steps": 5,
        "reward__parts": {f"{tmp_path}/judge.py:judge": 1.0},
        "eval__tasks": 0,
    }
    asked.write_text("x" * 61)  # past the call that hangs
    run(tmp_path / "whole", **changes)
    asked.unlink()
    child = start(tmp_path / "killed", **changes)
    here = tmp_path / "asked.here"
    while not (here.exists() and here.read_text()):
        assert os.waitpid(child, os.WNOHANG)[0] == 0, "it ended by itself"
        time.sleep(0.02)
    worker = int(here.read_text())
    assert alive(worker)
    os.kill(child, signal.SIGKILL)
    assert exit_code(child) == -signal.SIGKILL
    assert gone([worker])
    assert 0 < len(list((tmp_path / "killed" / "rollouts").glob("step_*.parquet"))) < 5
    run(tmp_path / "killed", **changes)
    assert left_behind(tmp_path / "killed") == left_behind(tmp_path / "whole")
