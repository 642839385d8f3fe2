"""What can go wrong around a run, through the command line: refused early, or nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cold_start
import pytest
from cold_start import events, latest, rows
from runs import left_behind, metrics, quiet, small
from safetensors.torch import load_file, save_file
from teaching import before_updates
from tokenizers import Tokenizer, normalizers

from groupwise.cli import main
from groupwise.config import load, text
from groupwise.errors import RunError
from groupwise.evaluate import evaluate
from groupwise.runfiles import recorder
from groupwise.runfiles.folder import RunFolder
from groupwise.sync import checkpoints as state
from groupwise.training import loop

Patch = pytest.MonkeyPatch


class Ended(NamedTuple):
    status: int
    out: str
    err: str


class Line:
    """`groupwise` on a command line: a configuration file in a folder, settings over it."""

    def __init__(self, folder: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.model, self.capsys = folder, model, capsys
        self.config, self.run = folder / "mine.toml", folder / "run"
        self.set()

    def set(self, **changes: Any) -> Line:
        """The configuration from here on."""
        self.config.write_text(text(cold_start.configured(self.model, **changes)), "utf-8")
        return self

    def __call__(self, command: str, *words: str | Path) -> Ended:
        self.capsys.readouterr()
        status = main([command, *map(str, words)])
        return Ended(status, *self.capsys.readouterr())

    def train(self, *settings: str) -> Ended:
        return self("train", self.config, *settings, "--run", self.run)

    def refused(self, *settings: str) -> str:
        """Why it does not train: for a person, before anything is there to be lost or listed."""
        there = self.run.exists()
        ended = self.train(*settings)
        assert self.run.exists() == there
        assert ended.status == 2
        assert ended.err.startswith("groupwise: error: ") and "Traceback" not in ended.err
        return ended.err.removeprefix("groupwise: error: ").strip()

    def jsonl(self, name: str, *lines: Any) -> str:
        """A data file; what is no text becomes JSON."""
        path = self.folder / name
        path.write_text(
            "".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines), "utf-8"
        )
        return str(path)

    def reward(self, body: str) -> str:
        """reward.parts with a function of the user's, as a setting."""
        file = self.folder / "mine.py"
        file.write_text(f"from pathlib import Path\nHERE = Path(__file__).parent\n{body}\n")
        return f"reward.parts={{'{file}:f' = 1.0}}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cold_start.make(tmp_path_factory.mktemp("model") / "cold")


@pytest.fixture
def line(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> Line:
    return Line(tmp_path, model, capsys)


@pytest.fixture
def no_model(monkeypatch: Patch) -> None:
    """Loading or making one is a failure."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("groupwise.model.policy.load", never)
    monkeypatch.setattr("groupwise.training.cold_start.teach", never)


# --- refused before a model is loaded -------------------------------------------------------------

GOOD = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 6) for b in range(1, 6)]
ODD = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(11, 16)]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{nonsense", ["1 malformed of 26 rows", "line 4: no JSON", "{nonsense"]),
        ({"answer": "3"}, ["line 4: no column 'prompt'", '{"answer": "3"}']),
        ({"prompt": "1+2=", "answer": ""}, ["line 4: 'answer' is empty", '"prompt": "1+2="']),
        ({"prompt": "", "answer": "1"}, ["line 4: 'prompt' is empty"]),
        ({"prompt": ["no role"], "answer": "1"}, ["line 4: a message", "no object with a role"]),
    ],
)
def test_a_bad_row_is_named_with_its_line(
    bad: Any, said: list[str], line: Line, no_model: None
) -> None:
    path = line.jsonl("rows.jsonl", *GOOD[:3], bad, *GOOD[3:])
    why = line.set(data__train=path).refused()
    for part in (path, *said, "Mend or delete these lines"):
        assert part in why


def test_an_answer_column_that_is_empty_or_elsewhere_is_named(line: Line, no_model: None) -> None:
    path = line.jsonl("rows.jsonl", *({"prompt": "1+2=", "result": "3"} for _ in range(3)))
    why = line.set(data__train=path).refused()
    assert "No row" in why and "column 'answer', which the reward reads" in why
    assert "Set data.answer_key" in why
    words = line.jsonl("words.jsonl", *({"prompt": "1+2=", "answer": "several"} for _ in range(3)))
    assert "the answer 'several' holds no number" in line.set(data__train=words).refused()
    assert "There is no file" in line.set(data__train="nowhere/rows.jsonl").refused()
    empty = line.jsonl("empty.jsonl")
    assert "has no rows" in line.set(data__train=empty).refused()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def f(completion, answer): return 1 / 0", "raised ZeroDivisionError: division by zero"),
        ("def f(completions, **_): return [1.0]", "returned 1 values for 12 completions"),
        ("def f(completion): return float('nan')", "nan (float), which is no finite number"),
        ("def f(completion): return 'good'", "'good' (str), which is no finite number"),
        ("def f(completion, gold): return 1.0", "asks for 'gold', which is no column"),
        ("def f(text): return 1.0", "has none of the parameters that say how to call it"),
        ("def g(completion): return 1.0", "has no function 'f'. Known: g"),
        ("def f(completion) return 1.0", "line 3: SyntaxError"),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused_before_a_model_is_loaded(
    body: str, said: str, line: Line, no_model: None
) -> None:
    why = line.refused(line.reward(body))
    assert said.lower() in why.lower() and "mine.py" in why


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["group_siz=4"], "Did you mean 'group_size'?"),
        (["engine.max_token=4"], "Did you mean 'engine.max_tokens'"),
        (["recipe=grop"], "Did you mean"),
        (["prompts_per_step=0"], "prompts_per_step=0 is out of range"),
        (["group_size=1"], "group_size=1 with advantage group_mean"),
        (["recipe.schedule.updates=32"], "16 completions can't be split into the 32 updates"),
        (["engine.min_tokens=9"], "engine.min_tokens=9 is more than engine.max_tokens=4"),
        (["engine.temperature=0"], "gives the same answer every time"),
        (["reward.parts={nmber = 1.0}"], "There is no reward 'nmber'. Did you mean 'number'"),
        (["data.train=arithmetics"], "Did you mean 'arithmetic'"),
        (["data.size=4"], "leaves none to train on"),
    ],
)
def test_settings_that_cannot_run_are_refused_before_a_model_is_loaded(
    settings: list[str], said: str, line: Line, no_model: None
) -> None:
    assert said in line.refused(*settings)


def test_a_model_that_is_not_there_is_named(line: Line) -> None:
    why = line.refused("model.path=no/such/model")
    assert "no/such/model is no folder here" in why and "hf download" in why


# --- refused before the first step ----------------------------------------------------------------


def test_prompts_that_are_too_long_are_dropped_and_counted_or_refused(line: Line) -> None:
    path = line.jsonl("rows.jsonl", *GOOD, {"prompt": "1" * 13 + "+1=", "answer": "2"})
    line.set(data__train=path, steps=1)
    ended = line.train()
    assert ended.status == 0
    assert "1 of 26 prompts are longer than 12 tokens and were dropped" in ended.out
    assert "row 25, has 16" in ended.out
    line.run = line.folder / "other"
    why = line.refused("data.max_prompt_tokens=3")
    assert "All 26 prompts are longer than 3 tokens (the shortest has 4)" in why
    assert "Raise data.max_prompt_tokens" in why


def test_a_template_that_does_not_come_back_is_refused(line: Line) -> None:
    # A tokenizer that changes what it reads.
    other = line.folder / "other"
    shutil.copytree(line.model, other)
    backend = Tokenizer.from_file(str(other / "tokenizer.json"))
    backend.normalizer = normalizers.Replace("+", "1")
    backend.save(str(other / "tokenizer.json"))
    why = line.refused(f"model.path={other}")
    assert "do not survive the tokenizer" in why and "comes back as" in why
    # A template that writes what the model has no tokens for.
    shutil.copytree(line.model, line.folder / "chat")
    (line.folder / "chat" / "chat_template.jinja").write_text("user: {{ messages[0].content }}")
    why = line.refused(f"model.path={line.folder / 'chat'}", "data.template=chat")
    assert "do not survive the tokenizer" in why and "'u' has no token" in why
    # None at all.
    why = line.refused("data.template=chat")
    assert "no chat template" in why


# --- the run folder -------------------------------------------------------------------------------


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB of its own; needs the right to mount."""
    place = tmp_path / "mount"
    place.mkdir()
    made = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)]
    if subprocess.run(made, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path, but: int) -> Path:
    """A file that leaves so many bytes."""
    ballast = place / "ballast"
    ballast.write_bytes(b"\0" * (shutil.disk_usage(place).free - but))
    return ballast


def one_line(ended: Ended) -> str:
    assert ended.status == 2 and len(ended.err.splitlines()) == 1, ended
    assert ended.err.startswith("groupwise: error: ")
    return ended.err


@pytest.mark.parametrize(
    ("when", "room", "said"),
    [
        ("in the step", 0, "rollouts/step_3.parquet of the run folder"),
        ("before it", 200 << 10, "The checkpoint of step 3 could not be written"),
    ],
)
def test_a_full_disk_stops_cleanly_and_the_same_command_goes_on(
    when: str, room: int, said: str, line: Line, mounted: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    line.run = tmp_path / "whole"
    assert line.train("steps=4").status == 0
    line.run = mounted / "run"
    assert line.train("steps=2").status == 0
    ballast = mounted / "ballast"
    if when == "before it":
        fill(mounted, but=room)
    with monkeypatch.context() as patch:
        before_updates(patch, lambda step: ballast.exists() or fill(mounted, but=room))
        why = one_line(line.train("steps=4"))
    assert said in why and "space" in why and "same command again" in why
    assert latest(line.run) == "step_2"
    ballast.unlink()
    ended = line.train("steps=4")
    assert ended.status == 0 and f"continuing {line.run} after step 2" in ended.out
    assert left_behind(line.run) == left_behind(tmp_path / "whole")


def test_a_folder_without_room_or_right_is_refused_before_a_model_is_loaded(
    line: Line, mounted: Path, no_model: None
) -> None:
    line.run = mounted / "run"
    ballast = fill(mounted, but=0)
    assert "the disk or the quota is full" in one_line(line.train())
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
    assert "read-only for this user" in one_line(line.train())


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_in_one_process(line: Line, monkeypatch: Patch) -> None:
    """The same where mounting is not permitted."""
    whole = line.folder / "whole"
    line.run, broken = whole, line.run
    assert line.train("steps=3").status == 0
    line.run = broken
    write = recorder.write
    for at in (2, 3):

        def from_step(path: Path, rows: Any, step: int, at: int = at) -> None:
            if step >= at:
                full()
            write(path, rows, step)

        with monkeypatch.context() as patch:
            patch.setattr(recorder, "write", from_step)
            why = one_line(line.train("steps=3"))
        assert f"rollouts/step_{at}.parquet" in why and latest(line.run) == f"step_{at - 1}"
        assert [x["step"] for x in metrics(line.run)] == list(range(at))
    with monkeypatch.context() as patch:
        patch.setattr(state, "save_file", full)
        why = one_line(line.train("steps=3"))
        assert "The checkpoint of step 3 could not be written" in why
    assert latest(line.run) == "step_2" and not list(line.run.rglob("*.writing"))
    with monkeypatch.context() as patch:  # all is done but the last few files
        patch.setattr("groupwise.watch.report.write_atomic", full)
        assert "summary.json" in one_line(line.train("steps=3"))
    assert line.train("steps=3").status == 0
    assert left_behind(line.run) == left_behind(whole)


def test_what_is_in_the_way_is_named(line: Line, no_model: None) -> None:
    line.run.write_text("a file")
    assert "a file is in the way of a folder" in one_line(line.train())
    line.run.unlink()
    (line.run / "metrics.jsonl").mkdir(parents=True)
    assert "metrics.jsonl is a folder" in one_line(line.train())
    (line.run / "metrics.jsonl").rmdir()
    (line.run / "rollouts").rmdir() if (line.run / "rollouts").exists() else None
    (line.run / "rollouts").write_text("")
    assert "rollouts of the run folder" in one_line(line.train())
    (line.run / "rollouts").unlink()
    with RunFolder(line.run).locked():
        why = one_line(line.train())
    assert f"Process {os.getpid()} is writing to {line.run}" in why


# --- another configuration, model or data ---------------------------------------------------------


def test_a_changed_configuration_is_told_or_refused(line: Line) -> None:
    assert line.train("steps=1").status == 0
    ended = line.train("steps=2", "optim.learning_rate=2e-3")
    assert ended.status == 0
    assert "steps: 1 -> 2" in ended.out and "optim.learning_rate: 0.001 -> 0.002" in ended.out
    assert metrics(line.run)[2]["optim/learning_rate"] == 2e-3
    before = left_behind(line.run)
    why = one_line(line.train("steps=3", "seed=7", "data.shuffle=false"))
    assert "another configuration" in why and "--run" in why
    assert (
        "seed: 0 -> 7 (the order" in why
        and "data.shuffle: true -> false" in why
        and "steps" not in why
    )
    assert left_behind(line.run) == before
    assert line.train("steps=2", "optim.learning_rate=2e-3").out.startswith(f"{line.run} is finish")


def test_other_data_or_another_model_behind_the_same_path_is_refused(line: Line) -> None:
    path = line.jsonl("rows.jsonl", *GOOD)
    line.set(data__train=path)
    assert line.train("steps=1").status == 0
    line.jsonl("rows.jsonl", *GOOD[1:])
    why = line.refused("steps=2")
    assert "The data of this run are not those" in why and "Put them back" in why
    line.jsonl("rows.jsonl", *GOOD)
    copied = line.folder / "model"
    shutil.copytree(line.model, copied)
    line.model, line.run = str(copied), line.folder / "second"
    line.set(data__train=path)
    assert line.train("steps=1").status == 0
    weights = load_file(copied / "model.safetensors")
    save_file({k: x * 1.001 for k, x in weights.items()}, copied / "model.safetensors")
    why = line.refused("steps=2")
    assert "The weights of this run are not those" in why
    assert latest(line.run) == "step_1"


def test_a_checkpoint_of_another_model_is_refused(line: Line, tmp_path: Path) -> None:
    assert line.train("steps=1").status == 0
    other = tmp_path / "wider"
    loop.train(small(steps=1, tiny__width=48, tiny__cold_start_steps=1), other, quiet())
    shutil.rmtree(line.run / "checkpoints" / "step_1")
    shutil.copytree(other / "checkpoints" / "step_1", line.run / "checkpoints" / "step_1")
    assert "is of another model than" in line.refused("steps=2")


# --- rewards that fail in the middle --------------------------------------------------------------

MOODY = """
def f(completion, answer):
    if (HERE / "broken").exists():
        raise ValueError("the judge is out")
    return float(completion == answer)
"""


def test_a_reward_that_fails_is_recorded_and_counted_and_is_no_0(line: Line) -> None:
    wrong = 'completion[:1] in ("1", "2", "3") and completion != answer and "+" not in completion'
    moody = MOODY.replace('(HERE / "broken").exists()', wrong)  # neither the gold nor the prompt
    ended = line.train(line.reward(moody), "reward.max_failed_share=1", "steps=1")
    assert ended.status == 0 and "rewards failed and count as ungraded, not as 0" in ended.out
    seen = rows(line.run, 1)
    said = [(row, row["text"].removesuffix("<end>")) for row in seen]
    failed = [row for row, text in said if text[:1] in ("1", "2", "3") and text != row["answer"]]
    assert 0 < len(failed) < len(seen)
    for row in seen:
        assert (row["reward"] is None) == (row in failed)
        assert row["grader_status"] == ("error" if row in failed else "ok")
    assert "raised ValueError: the judge is out (mine.py:" in failed[0]["grader_reason"]
    line_1 = metrics(line.run)[1]
    assert line_1["reward/failed_share"] == len(failed) / len(seen)
    known = [row["reward"] for row in seen if row["reward"] is not None]
    assert line_1["reward/sampled_mean"] == sum(known) / len(known)
    (event,) = events(line.run, "reward")
    assert f"{len(failed)} of {len(seen)} rewards failed" in event["text"]
    # Nothing is learned from them.
    assert all(set(row["advantage"]) == {0.0} for row in failed)


def test_a_reward_that_fails_too_often_stops_the_run_which_goes_on_when_it_is_mended(
    line: Line, monkeypatch: Patch
) -> None:
    moody, broken, first = line.reward(MOODY), line.folder / "broken", line.run
    line.run = line.folder / "whole"
    assert line.train(moody, "steps=4").status == 0
    line.run = first
    settings = [moody, "steps=4", "eval.every=2", "checkpoint.every_steps=0"]
    with monkeypatch.context() as patch:
        before_updates(patch, lambda step: broken.touch() if step == 1 else None)
        why = one_line(line.train(*settings))
    assert "rewards failed, more than reward.max_failed_share = 0.05" in why
    assert "the judge is out" in why and "Mend the function" in why
    assert latest(line.run) == "step_2"  # saved on the way out, though no checkpoint was due
    (event,) = events(line.run, "reward")
    assert event["step"] == 3
    broken.unlink()
    # What was evaluated while it was broken is known to have failed; the rest is the same run.
    assert line.train(*settings).status == 0
    assert [x["weights/fingerprint"] for x in metrics(line.run)[1:]] == [
        x["weights/fingerprint"] for x in metrics(line.folder / "whole")[1:]
    ]
    assert events(line.run, "reward") == []


# --- asked to stop --------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def test_sigterm_saves_and_says_so_and_nobody_else_may_write_meanwhile(line: Line) -> None:
    settings = ["eval.every=0", "checkpoint.every_steps=0", "checkpoint.every_seconds=0"]
    words = [str(line.config), *settings, "--run", str(line.run)]
    command = [sys.executable, "-m", "groupwise.cli", "train", *words]
    child = subprocess.Popen(
        [*command, "steps=100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: (line.run / "rollouts" / "step_3.parquet").exists())
        second = one_line(line("train", *words, "steps=100000"))
        assert f"Process {child.pid} is writing to {line.run}" in second
        child.send_signal(signal.SIGTERM)
        _, err = child.communicate(timeout=300)
    finally:
        child.kill()
    assert child.returncode == 130
    done = len(metrics(line.run)) - 1
    assert err.splitlines()[-1] == f"stopped after step {done}, saved; the same command goes on"
    assert "Traceback" not in err and latest(line.run) == f"step_{done}"
    ended = line("train", *words, f"steps={done + 1}")
    assert ended.status == 0 and f"continuing {line.run} after step {done}" in ended.out


def test_a_full_disk_in_a_process_of_its_own(line: Line, mounted: Path) -> None:
    line.run = mounted / "run"
    assert line.train("steps=1").status == 0
    fill(mounted, but=8 << 10)
    words = ["train", str(line.config), "steps=2", "--run", str(line.run)]
    ended = subprocess.run(
        [sys.executable, "-m", "groupwise.cli", *words], capture_output=True, text=True
    )
    # A start that takes long says so first.
    *_, said = ended.stderr.splitlines(keepends=True)
    assert one_line(Ended(ended.returncode, ended.stdout, said))


# --- eval and report ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"recipe": "tis", "engine__weights": "stale:2"}], ids=["shared", "stale"]
)
def test_eval_gives_the_accuracy_of_the_run_itself(settings: Any, line: Line) -> None:
    """A run, a checkpoint, and a model with a configuration; of the policy, not of a copy."""
    line.set(steps=3, eval__every=0, eval__samples=4, eval__temperature=1.0, **settings)
    assert line.train().status == 0
    summary = json.loads((line.run / "summary.json").read_text())
    copied = line.folder / "model"
    shutil.copytree(line.run / "checkpoints" / "latest", copied)
    shutil.rmtree(copied / "resume")
    for words in (
        (line.run,),
        (line.run / "checkpoints" / "latest",),
        (line.run / "checkpoints" / "step_3",),
        (copied, line.run / "config.toml"),
    ):
        ended = line("eval", *words, "--json")
        found = json.loads(ended.out)
        assert ended.status == 0
        for name in ("accuracy", "stderr", "reward"):
            assert found[name] == summary[f"{name}_after"]
    assert found["tasks"] == 8 and found["samples"] == 4
    shown = line("eval", line.run).out
    assert f"accuracy         {summary['accuracy_after']:.4g}" in shown


def test_no_held_out_tasks_train_well_and_can_not_be_evaluated(
    line: Line, monkeypatch: Patch
) -> None:
    line.set(data__train=line.jsonl("rows.jsonl", *GOOD), steps=2)
    ended = line.train()
    assert ended.status == 0 and "no held-out evaluation" in ended.out
    summary = json.loads((line.run / "summary.json").read_text())
    assert summary["accuracy_after"] is None and summary["steps"] == 2
    assert not any(name.startswith("eval/") for x in metrics(line.run) for name in x)
    assert line("report", line.run).status == 0
    monkeypatch.setattr(evaluate, "load_policy", None)  # which would raise
    for settings in ([], ["data.train=arithmetic", "eval.tasks=0"]):
        ended = line("eval", line.run, *settings)
        assert "no held-out tasks to evaluate on" in one_line(ended)


def test_eval_of_nothing_or_of_something_else_is_refused(line: Line) -> None:
    assert "is no folder here" in one_line(line("eval", "no/such/model"))
    (line.folder / "empty").mkdir()
    assert "config.json can't be read" in one_line(line("eval", line.folder / "empty"))
    why = one_line(line("eval", line.model, line.config, line.reward("def f(completion): 1 / 0")))
    assert "raised ZeroDivisionError" in why


def test_report_of_a_finished_and_of_an_unfinished_run(line: Line, monkeypatch: Patch) -> None:
    assert line.train("steps=2").status == 0
    (line.run / "report.html").unlink()
    said = line("report", line.run).out.splitlines()
    assert said[0] == f"wrote {line.run / 'report.html'}"
    assert "<svg" in (line.run / "report.html").read_text()

    def dies(step: int) -> None:
        if step == 3:
            raise RunError("gone")

    before_updates(monkeypatch, dies)
    line.run = line.folder / "unfinished"
    assert line.train("steps=9").status == 2
    assert not (line.run / "report.html").exists()
    assert line("report", line.run).status == 0
    page = (line.run / "report.html").read_text()
    assert "<svg" in page and "3 of 9" in page
    (line.folder / "empty").mkdir()
    assert "not a run folder" in one_line(line("report", line.folder / "empty"))


def test_a_configuration_that_was_damaged_is_named_or_written_anew(line: Line) -> None:
    assert line.train("steps=1").status == 0
    (line.run / "config.toml").write_text("steps = = 3")
    assert line.train("steps=2").status == 0  # what the run was started with is kept elsewhere too
    assert load(line.run / "config.toml").steps == 2
    starts, text = line.run / "starts.jsonl", (line.run / "starts.jsonl").read_text()
    starts.write_text(text.replace("steps = 2", "steps = = 2"))
    assert "starts.jsonl can't be read" in one_line(line.train("steps=3"))
    starts.unlink()  # as an older groupwise left it
    (line.run / "config.toml").write_text("steps = = 3")
    assert "config.toml can't be read" in one_line(line.train("steps=3"))
    assert load(line.config)  # the user's own is sound


# --- what this machine or this model can't do -------------------------------------------------


def test_a_device_that_is_not_there_is_refused_before_a_model_is_loaded(
    line: Line, no_model: None
) -> None:
    assert "model.device='banana' is unknown" in line.refused("model.device=banana")
    assert "model.device='cuda:99' can't be used here" in line.refused("model.device=cuda:99")


def test_answers_that_leave_no_room_for_a_prompt(line: Line) -> None:
    assert "leaves no room for a prompt" in line.refused("engine.max_tokens=5000")


def test_other_answers_behind_the_same_prompts_are_other_data(line: Line) -> None:
    rows_ = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)]
    line.jsonl("data.jsonl", *rows_)
    settings = [f"data.train={line.folder / 'data.jsonl'}", "data.options={}"]
    assert line.train(*settings, "steps=1").status == 0
    line.jsonl("data.jsonl", *(row | {"answer": "0"} for row in rows_))
    assert "The data of this run" in line.refused(*settings, "steps=2")


def test_other_reward_code_is_said_and_goes_on(line: Line) -> None:
    """A function may be mended in the middle of a run: that must work, and must not be silent."""
    setting = line.reward("def f(completion):\n    return 0.5 * len(completion)\n")
    assert line.train(setting, "steps=1").status == 0
    line.reward("def f(completion):\n    return 0.25 * len(completion)\n")
    ended = line.train(setting, "steps=2")
    assert ended.status == 0 and "the code of the reward functions" in ended.out
    again = line.train(setting, "steps=3")
    assert again.status == 0 and "the code of the reward functions" not in again.out


def test_records_that_were_removed_are_missed_on_resume(line: Line) -> None:
    assert line.train("steps=2").status == 0
    (line.run / "rollouts" / "step_1.parquet").unlink()
    assert "the records of" in line.train("steps=3").out


def test_other_held_out_tasks_behind_the_same_path_are_refused(line: Line) -> None:
    """Else accuracies before and after would be of different tasks, in one curve."""
    line.set(data__train=line.jsonl("rows.jsonl", *GOOD), data__eval=line.jsonl("held.jsonl", *ODD))
    ended = line.train("steps=1")
    assert ended.status == 0 and f"{len(ODD)} tasks x 1 sample" in " ".join(ended.out.split())
    line.jsonl("held.jsonl", *ODD[1:])
    why = line.refused("steps=2")
    assert "The held-out tasks of this run are not those" in why and "Put them back" in why
    assert latest(line.run) == "step_1"
    line.jsonl("held.jsonl", *ODD)
    assert line.train("steps=2").status == 0
