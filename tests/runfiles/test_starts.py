"""What a resumed run changes: written down, told, repeated; and no recorded step is lost."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import metrics, quiet, run, small

from groupwise import config as configuration
from groupwise.cli import main
from groupwise.errors import RunError
from groupwise.replay.bits import FirstDifference
from groupwise.replay.verify import verify
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.starts import CODE, Start, read_starts, stretches
from groupwise.training import loop
from groupwise.training.loop import steps, train
from groupwise.watch.display import Display
from groupwise.watch.report import report_page


def events_of(folder: Path) -> list[dict[str, Any]]:
    return [event for event in RunFolder(folder).read_events() if event["kind"] == "settings"]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name != ".lock"}  # fmt: skip


# --- what is kept -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 with one rate, 3 with another, 4 and 5 at another temperature as well."""
    folder = tmp_path_factory.mktemp("starts") / "run"
    run(folder, steps=2)
    run(folder, steps=3, optim__learning_rate=5e-4)
    run(folder, steps=5, optim__learning_rate=5e-4, engine__temperature=0.9)
    return folder


def test_every_start_keeps_its_configuration_and_an_event(changed: Path) -> None:
    starts = read_starts(RunFolder(changed))
    rates = [tomllib.loads(start.config)["optim"]["learning_rate"] for start in starts]
    assert [start.step for start in starts] == [0, 2, 3] and rates == [1e-3, 5e-4, 5e-4]
    assert starts[-1].config == (changed / "config.toml").read_text()
    told = events_of(changed)
    assert [event["step"] for event in told] == [3, 4]  # the first that they were made with
    assert told[0]["changed"] == [
        {"what": "steps", "old": 2, "new": 3},
        {"what": "optim.learning_rate", "old": 1e-3, "new": 5e-4},
    ]
    assert told[1]["text"] == ("from step 4 on: steps: 3 -> 5; engine.temperature: 1.0 -> 0.9")


def test_the_report_says_what_was_changed_and_when(changed: Path, tmp_path: Path) -> None:
    page = report_page(RunFolder(changed))
    rows = page.partition("<h2>Changed on the way</h2>")[2].partition("<section>")[0]
    assert "<td>3</td><td>steps: 2 -&gt; 3; optim.learning_rate: 0.001 -&gt; 0.0005</td>" in rows
    assert "<td>4</td><td>steps: 3 -&gt; 5; engine.temperature: 1.0 -&gt; 0.9</td>" in rows
    assert "othing was changed" not in page
    run(tmp_path / "plain", steps=1)
    plain = RunFolder(tmp_path / "plain")
    assert "Nothing was changed on the way." in report_page(plain)
    plain.starts.unlink()  # as an older groupwise left it: nobody knows
    assert "othing was changed" not in report_page(plain)
    assert "did not write them down" in report_page(plain)


def test_diagnose_says_what_was_changed(changed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["diagnose", str(changed)])
    assert (
        "from step 4 on: steps: 3 -> 5; engine.temperature: 1.0 -> 0.9" in capsys.readouterr().out
    )
    main(["diagnose", str(changed), "--json"])
    assert len(json.loads(capsys.readouterr().out)["changed"]) == 2


def test_verify_repeats_each_stretch_with_its_own_settings(
    changed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(changed), "--verify"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "repeats to the bit: 5 steps" in shown
    assert "from step 4 on: steps: 3 -> 5; engine.temperature: 1.0 -> 0.9" in shown
    assert verify(changed, 2).steps == 2


def test_settings_that_were_edited_in_the_folder_itself_are_seen(tmp_path: Path) -> None:
    """`groupwise train runs/x/config.toml --run runs/x`, after config.toml was edited in place."""
    folder = tmp_path / "run"
    run(folder, steps=1)
    text = (folder / "config.toml").read_text().replace("temperature = 1.0", "temperature = 0.5", 1)
    (folder / "config.toml").write_text(text.replace("steps = 1 ", "steps = 2 ", 1))
    train(configuration.load(folder / "config.toml"), folder, quiet())
    assert "engine.temperature: 1.0 -> 0.5" in events_of(folder)[0]["text"]


def test_a_run_of_an_older_groupwise_goes_on(tmp_path: Path) -> None:
    """It kept no starts: what its config.toml said becomes the first, and that is known."""
    folder = tmp_path / "run"
    run(folder, steps=2)
    (folder / "starts.jsonl").unlink()
    assert verify(folder).unwritten and verify(folder).same
    run(folder, steps=3, optim__learning_rate=5e-4)
    first, second = read_starts(RunFolder(folder))
    assert (first.step, first.inferred, second.step, second.inferred) == (0, True, 2, False)
    assert [change["what"] for change in second.changed] == ["steps", "optim.learning_rate"]
    found = verify(folder)
    assert found.same and found.steps == 3 and found.unwritten
    assert "did not write down which settings" in replace(
        found, difference=FirstDifference(1, "reward", 1.0, 0.0), environment=[]
    ).text(500)


def test_a_start_that_changes_nothing_is_no_event(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for _ in range(2):
        with contextlib.closing(steps(small(steps=3), folder, quiet())) as going:
            next(going), next(going)
    assert [start.step for start in read_starts(RunFolder(folder))] == [0, 1]
    assert not events_of(folder)


def test_stretches_are_those_that_left_steps() -> None:
    starts = [Start(step, f"{number}", {}) for number, step in enumerate((0, 3, 3, 5))]
    made = [(x.start.config, x.first, x.last) for x in stretches(starts, 5)]
    assert made == [("0", 1, 3), ("2", 4, 5)]
    assert [(x.first, x.last) for x in stretches(starts, 2)] == [(1, 2)]
    assert stretches([], 5) == []


# --- code of the user's -----------------------------------------------------------------------

REWARD = "def mine(completion):\n    return float(len(completion) {sign} 2)\n"


def test_other_reward_code_is_told_and_its_verdicts_are_taken(tmp_path: Path) -> None:
    code, folder = tmp_path / "mine.py", tmp_path / "run"
    parts = {f"{code}:mine": 1.0}
    code.write_text(REWARD.format(sign="<"))
    run(folder, steps=2, reward__parts=parts)
    code.write_text(REWARD.format(sign=">"))
    run(folder, steps=4, reward__parts=parts)
    told = events_of(folder)[0]
    assert "code of the reward functions (" in told["text"]
    old, new = (start.origin["reward"] for start in read_starts(RunFolder(folder)))
    assert told["changed"][-1] == {"what": CODE["reward"], "old": old, "new": new} and old != new
    found = verify(folder)
    assert found.same and found.steps == 4
    assert any(note.startswith("steps 1..2: the code of the reward") for note in found.notes)


METHOD = """
from groupwise import recipe, register
from groupwise.methods.slots import gate
from groupwise.groups.kl import bounded_exp

@gate(equation="S = rA")
def mine(log_ratio_NT, advantage_NT, batch):
    "{note}"
    return bounded_exp(log_ratio_NT) * advantage_NT, batch.mask_NT & False

register(recipe("dr_grpo").replace(name="mine", gate=mine()))
"""


def test_other_recipe_code_leaves_the_stretch_out_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, folder = tmp_path / "mine.py", tmp_path / "run"
    settings = {"recipe": f"{code}:mine", "checkpoint__keep": 9, "eval__every": 0}
    for note, last in (("one", 2), ("two", 4)):
        code.write_text(METHOD.format(note=note))
        run(folder, steps=last, **settings)
    assert main(["replay", str(folder), "--verify"]) == 1  # not all of it
    shown = " ".join(capsys.readouterr().out.split())
    assert f"What can be repeated of {folder} repeats to the bit: 2 steps" in shown
    assert "steps 1..2: the code of the recipe was other than it is here" in shown
    assert "grader" not in shown
    shutil.rmtree(folder / "checkpoints/step_2")  # where the second stretch begins
    assert main(["replay", str(folder), "--verify"]) == 2
    assert "no checkpoint of step 2" in capsys.readouterr().err


def test_replay_takes_a_run_s_own_method_as_it_was_for_the_steps(
    changed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here its temperature, which log-probabilities are at."""
    folder, asked = str(changed), ["--recipe", "gspo", "--json"]
    assert main(["replay", folder, *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == [4, 5]
    assert any("engine.temperature: 1.0 -> 0.9" in note for note in found["notes"])
    assert main(["replay", folder, *asked, "--step", "1..3"]) == 0  # the rate is not the method's
    assert json.loads(capsys.readouterr().out)["steps"] == [1, 2, 3]
    assert main(["replay", folder, *asked, "--step", "3..4"]) == 2
    assert "one stretch at a time: --step with one of 3..3, 4..4" in capsys.readouterr().err


# --- nothing that is recorded is deleted for good ---------------------------------------------


def torn(folder: Path, recorded: int, saved: int, **changes: Any) -> Path:
    """A run that was killed when it had recorded more than it had saved."""
    run(folder, steps=recorded, checkpoint__keep=9, **changes)
    for step in range(saved + 1, recorded + 1):
        shutil.rmtree(folder / f"checkpoints/step_{step}")
    for link in ("latest", "best"):
        (folder / "checkpoints" / link).unlink(missing_ok=True)
    (folder / "summary.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 1}, "with steps=1 it would end after step 1"),
        ({"steps": 3}, "with steps=3 it would end after step 3"),
        ({"steps": 9, "budget__tokens": 1}, "with budget.tokens=1 it would end after step 1"),
        ({"steps": 9, "budget__seconds": 1e-9}, "it would end after step 1"),
    ],
)
def test_an_end_before_the_last_recorded_step_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = torn(tmp_path / "run", recorded=4, saved=2)
    before = contents(folder)
    with pytest.raises(RunError, match="has 4 recorded steps") as refused:
        run(folder, checkpoint__keep=9, **changes)
    assert words in str(refused.value) and "steps=4" in str(refused.value)
    assert contents(folder) == before
    assert run(folder, steps=4, checkpoint__keep=9)["steps"] == 4


def test_a_smaller_budget_than_a_finished_run_spent_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, steps=50, budget__tokens=150)
    before = contents(folder)
    with pytest.raises(RunError, match=r"with budget\.tokens=10 "):
        run(folder, steps=50, budget__tokens=10)
    assert contents(folder) == before


def test_another_run_is_refused_where_steps_are_recorded_without_a_checkpoint(
    tmp_path: Path,
) -> None:
    folder = torn(tmp_path / "run", recorded=3, saved=0)
    shutil.rmtree(folder / "checkpoints")
    before = contents(folder)
    with pytest.raises(RunError, match="seed: 0 -> 1"):
        run(folder, steps=3, seed=1)
    with pytest.raises(RunError, match="with steps=2 it would end"):
        run(folder, steps=2, checkpoint__keep=9)
    assert {path: data for path, data in contents(folder).items() if path in before} == before


def test_steps_that_are_made_otherwise_are_not_called_done_again(tmp_path: Path) -> None:
    folder, said = torn(tmp_path / "run", recorded=4, saved=2), io.StringIO()
    changed = small(steps=4, checkpoint__keep=9, optim__learning_rate=5e-4)
    train(changed, folder, Display(said, live=False))
    assert "2 recorded steps after it are dropped, and made anew" in said.getvalue()
    assert [line["optim/learning_rate"] for line in metrics(folder)[1:]] == [1e-3] * 2 + [5e-4] * 2


def test_verdicts_of_an_earlier_start_with_another_reward_are_not_taken(tmp_path: Path) -> None:
    """[0: one, 2: two]; the checkpoints after step 1 are lost: step 2 was graded by the first."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    other = {"reward__parts": {"number": 0.0, "length(target=2)": 1.0}}
    for path in (whole, folder):
        run(path, steps=1, checkpoint__keep=9)
        if path is folder:
            run(path, steps=2, checkpoint__keep=9)
        run(path, steps=3, checkpoint__keep=9, **other)
    for step in (2, 3):
        shutil.rmtree(folder / f"checkpoints/step_{step}")
    (folder / "summary.json").unlink()
    run(folder, steps=3, checkpoint__keep=9, **other)
    rewards = [[line["reward/mean"] for line in metrics(path)[1:]] for path in (folder, whole)]
    assert rewards[0] == rewards[1]


# --- kills ------------------------------------------------------------------------------------


def attributed(folder: Path) -> list[tuple[float, float]]:
    """Of each recorded step the rate that it was made with, and that of the start it belongs to."""
    lines = {line["step"]: line["optim/learning_rate"] for line in metrics(folder)[1:]}
    made = stretches(read_starts(RunFolder(folder)), max(lines, default=0))
    return [
        (lines[step], tomllib.loads(each.start.config)["optim"]["learning_rate"])
        for each in made
        for step in range(each.first, each.last + 1)
    ]


def killed_at(moment: int, folder: Path, **changes: Any) -> bool:
    """Go on in a process that dies at its nth write to the disk; False if it began to train."""
    child = os.fork()
    if child == 0:
        left, fsync = moment, os.fsync

        def dying(descriptor: int) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(9)
            fsync(descriptor)

        os.fsync = dying
        loop.begin = lambda _: os._exit(0)  # type: ignore[assignment]
        try:
            run(folder, **changes)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), "it failed by itself"
    return code == 9


@pytest.mark.slow  # benchmarks/crashes.py kills a start at every call, too
def test_killed_between_any_two_writes_of_a_start_the_history_is_true(tmp_path: Path) -> None:
    base = torn(tmp_path / "base", recorded=4, saved=2)
    common = {"steps": 5, "checkpoint__keep": 9}
    moment = 0
    while True:
        folder = tmp_path / f"killed_{moment}"
        shutil.copytree(base, folder, symlinks=True)
        alive = not killed_at(moment, folder, optim__learning_rate=5e-4, **common)
        pairs = attributed(folder)
        assert len(pairs) == len(metrics(folder)) - 1 and all(a == b for a, b in pairs), moment
        run(folder, optim__learning_rate=2e-4, **common)
        assert [a for a, _ in attributed(folder)] == [1e-3] * 2 + [2e-4] * 3
        assert all(a == b for a, b in attributed(folder)), moment
        starts = read_starts(RunFolder(folder))
        told = [event["start"] for event in events_of(folder)]
        assert told == [n for n, start in enumerate(starts, start=1) if start.changed], moment
        assert tomllib.loads(starts[-1].config)["optim"]["learning_rate"] == 2e-4
        moment += 1
        if alive:
            break
    assert moment > 5
    assert verify(folder).same
