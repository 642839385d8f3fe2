"""groupwise compare: equal conditions to the bit, resume, failing arms, words and files."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import forked

import groupwise
from benchmarks import false_positives
from groupwise.cli import main
from groupwise.commands.compare import too_few
from groupwise.common.progress import Phase, Watcher
from groupwise.compare import charts, summary, workers
from groupwise.compare.arms import Arm, ArmBudget, arms_of, check, sweep_values
from groupwise.compare.findings import findings, pairs
from groupwise.compare.outcomes import RunOutcome, area, score_curve
from groupwise.compare.outcomes import outcome as read_outcome
from groupwise.compare.page import write_all
from groupwise.compare.places import cores, places_for, room_for, threads_for
from groupwise.compare.plan import ComparisonFolder, ComparisonPlan, Job, changes
from groupwise.compare.shared_start import check_unchanged, prepare
from groupwise.config.fields import Adapter
from groupwise.errors import (
    ConfigError,
    GroupwiseError,
    RecipeWarning,
    RewardError,
    RunError,
)
from groupwise.evaluate.statistics import paired_difference
from groupwise.graders.rubric import Grader
from groupwise.model.formats.checkpoint import stored_shape, stored_tokenizer
from groupwise.prepare.placing import placed
from groupwise.prepare.setup import check_data, fitting_tasks
from groupwise.runfiles.rollouts import read
from groupwise.watch.display import Display

SMALL = """
recipe.name = "grpo"
recipe.schedule.updates = 2
prompts_per_step = 4
group_size = 4
model.threads = 1
data.options = { digits = 1 }
tiny = { width = 32, layers = 2, heads = 2, cold_start_steps = 60, cold_start_batch = 32 }
engine = { max_tokens = 4, slots = 16 }
optim.learning_rate = 1e-3
eval = { tasks = 16, points = 3, temperature = 1.0 }
checkpoint.every_steps = 1
"""
ARMS = ("grpo", "grpo", "dr_grpo")
# A gate that ends its process, and one that raises.
PLUGIN = """
import os
import torch
from groupwise import recipe, register
from groupwise.methods.slots import gate

@gate(equation="S = 0")
def dying(log_ratio_NT, advantage_NT, batch):
    os._exit(7)

@gate(equation="S = 0")
def raising(log_ratio_NT, advantage_NT, batch):
    raise ZeroDivisionError("not today")

register(recipe("grpo").replace(name="dying", gate=dying()))
register(recipe("grpo").replace(name="raising", gate=raising()))
"""
STEPS = ArmBudget("steps", 3)
CONFIGS = Path(__file__).parents[2] / "configs"


def command(config: Path, out: Path, *more: str, arms: tuple[str, ...] = ARMS) -> list[str]:
    own = ["--seeds", "2", "--budget", "steps=3", "--jobs", "1"]
    return ["compare", *arms, *own, "--config", str(config), "--out", str(out), *more]


def result(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "compare.json").read_text())
    return found


def fixed(found: dict[str, Any]) -> dict[str, Any]:
    """Without what the clock says."""
    arms = [{k: v for k, v in arm.items() if k != "seconds"} for arm in found["arms"]]
    return {**found, "arms": arms, "cost": None}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare") / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def done(config: Path) -> Path:
    out = config.parent / "done"
    assert main(command(config, out)) == 0
    return out


# --- equal conditions -------------------------------------------------------------------------


def test_a_method_against_itself_differs_by_exactly_nothing(done: Path) -> None:
    found = result(done)
    pair = next(p for p in found["pairs"] if {p["a"], p["b"]} == {"grpo", "grpo (2)"})
    assert (pair["difference"], pair["low"], pair["high"], pair["p"]) == (0.0, 0.0, 0.0, 1.0)
    assert pair["area"]["difference"] == 0.0
    for seed in (0, 1):
        one, two = (done / "runs" / arm / f"seed_{seed}" for arm in ("grpo", "grpo_2"))
        for step in (1, 2, 3):
            name = f"rollouts/step_{step}.parquet"
            assert (one / name).read_bytes() == (two / name).read_bytes()
        weights = "checkpoints/latest/model.safetensors"
        assert (one / weights).read_bytes() == (two / weights).read_bytes()
        assert not list(one.glob("checkpoints/*/resume"))  # a finished run keeps no optimizer


def test_arms_share_prompts_samples_and_start(done: Path) -> None:
    """The first step is sampled from the same weights: the same in all arms, another by seed."""
    columns = ["prompt_id", "draw", "sample", "token_ids", "reward"]

    def first(arm: str, seed: int) -> list[dict[str, Any]]:
        return read(
            done / "runs" / arm / f"seed_{seed}/rollouts/step_1.parquet", columns
        ).to_pylist()

    assert first("grpo", 0) == first("dr_grpo", 0)
    assert first("grpo", 1) == first("dr_grpo", 1)
    assert first("grpo", 0) != first("grpo", 1)
    origins = [
        json.loads((run / "manifest.json").read_text())["origin"]["weights"]
        for run in done.glob("runs/*/seed_*")
    ]
    assert len(origins) == 6 and len(set(origins)) == 1
    assert result(done)["same_start"] is True
    assert len(list((done / "start").iterdir())) == 1  # one cold start for all


def test_the_result_is_what_the_run_folders_say(done: Path) -> None:
    found = result(done)
    assert [arm["name"] for arm in found["arms"]] == ["grpo", "grpo (2)", "dr_grpo"]
    by_hand = {}
    for arm in found["arms"]:
        name = {"grpo (2)": "grpo_2"}.get(arm["name"], arm["name"])
        scores, ends, tokens = [], [], []
        for seed in (0, 1):
            run = done / "runs" / name / f"seed_{seed}"
            lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
            ends.append(lines[-1]["eval/accuracy"])
            tokens.append(lines[-1]["cost/tokens"])
            scores.append(json.loads((run / "summary.json").read_text())["scores_after"])
            assert np.mean(scores[-1]) == pytest.approx(ends[-1])
        assert arm["final"]["by_seed"] == ends
        assert arm["tokens"] == np.mean(tokens)
        assert arm["steps"] == 3
        by_hand[arm["name"]] = np.array(scores)
    for pair in found["pairs"]:
        expected = paired_difference(by_hand[pair["a"]], by_hand[pair["b"]])
        assert pair["difference"] == pytest.approx(expected.mean)
        assert pair["low"] == pytest.approx(max(expected.low, -1))
        assert pair["p_uncorrected"] == pytest.approx(expected.p)
        assert pair["p"] >= pair["p_uncorrected"]


def test_arms_are_compared_by_any_measure_of_the_runs(
    done: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a finished comparison, too: measures are read, not run again."""
    asked = ["--measure", "length/mean", "--measure", "correction/zero_share"]
    assert main(command(config, done, *asked)) == 0
    said = capsys.readouterr().out
    found = result(done)
    lengths = {}
    for arm in found["arms"]:
        name = {"grpo (2)": "grpo_2"}.get(arm["name"], arm["name"])
        ends = []
        for seed in (0, 1):
            lines = (done / "runs" / name / f"seed_{seed}/metrics.jsonl").read_text().splitlines()
            ends.append(json.loads(lines[-1])["length/mean"])  # a tenth of three steps is the last
        assert arm["measures"]["length/mean"]["by_seed"] == ends
        lengths[arm["name"]] = ends
    for pair in found["pairs"]:
        expected = paired_difference(lengths[pair["a"]], lengths[pair["b"]])
        assert pair["measures"]["length/mean"]["difference"] == pytest.approx(expected.mean)
        assert pair["measures"]["length/mean"]["p_uncorrected"] == pytest.approx(expected.p)
        assert pair["measures"]["correction/zero_share"] is None  # nothing is corrected
    assert (
        "By length/mean, at the end:" in said
        and "not all of their runs measured it in their last" in said
    )
    assert {row["of"] for row in csv.DictReader((done / "pairs.csv").open())} >= {"length/mean"}
    assert next(csv.DictReader((done / "runs.csv").open()))["length/mean"]
    assert main(command(config, done)) == 0  # asked for without them, they are gone
    assert result(done)["arms"][0]["measures"] == {}
    assert main(command(config, done, "--measure", "lenght/mean")) == 2
    assert "'length/mean'" in capsys.readouterr().err


def test_files_for_people(done: Path) -> None:
    page = (done / "compare.html").read_text()
    assert "exactly 0" in page and "<script" not in page and "http" not in page.split("</head>")[1]
    assert page.count("<polyline") == 3 * 3  # arms in three charts
    assert "0.031 is 3.1 points" in page and "intervals are not corrected" in page
    assert "th, td { overflow-wrap: normal; }" in page  # no "sepa rabl e"
    for name in ("accuracy", "entropy", "length"):
        assert (done / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    runs = list(csv.DictReader((done / "runs.csv").open()))
    assert len(runs) == 6 and {row["arm"] for row in runs} == {"grpo", "grpo (2)", "dr_grpo"}
    curve = list(csv.DictReader((done / "curves.csv").open()))
    assert len(curve) == 6 * 4 and {row["step"] for row in curve} == {"0", "1", "2", "3"}
    assert len(list(csv.DictReader((done / "pairs.csv").open()))) == 2 * 3


def test_a_finished_comparison_is_told_again_without_a_run(
    done: Path,
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = fixed(result(done))
    named, begin = list[str](), Watcher.begin

    def noted(watcher: Watcher, phase: Phase) -> None:
        named.append(phase.name)
        begin(watcher, phase)

    monkeypatch.setattr(Watcher, "begin", noted)
    assert main(command(config, done, "--json")) == 0
    said = capsys.readouterr()
    # Without a run, too, what may take long says what it is.
    assert {"checking the arms", "judging the arms", "writing tables and plots"} <= {*named}
    assert fixed(json.loads(said.out)) == before
    assert "6 runs are done already" in said.err


# --- resume -----------------------------------------------------------------------------------


def processes_of(out: Path) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words_of = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(out).encode() in words_of and b"groupwise.compare.worker" in words_of:
                yield int(entry.name)


def test_killed_in_the_middle_it_goes_on_to_the_same_bits(
    done: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = config.parent / "killed"
    asked = [sys.executable, "-m", "groupwise.cli", *command(config, out)]
    going = subprocess.Popen(asked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    first, second = (out / "runs" / arm / "seed_0" for arm in ("grpo", "grpo_2"))
    end = time.monotonic() + 300
    while not (second / "rollouts/step_1.parquet").is_file() and time.monotonic() < end:
        time.sleep(0.02)
    going.kill()
    going.wait()
    assert (first / "summary.json").is_file(), "killed too early to show anything"
    assert len(list(out.glob("runs/*/*/summary.json"))) < 6
    kept = (first / "summary.json").stat().st_mtime_ns
    assert main(command(config, out)) == 0
    assert not list(processes_of(out))
    assert (first / "summary.json").stat().st_mtime_ns == kept
    assert re.search(r"[1-5] runs are done already", capsys.readouterr().err)
    assert fixed(result(out)) == fixed(result(done))


def test_ctrl_c_keeps_everything_and_says_how_to_go_on(config: Path) -> None:
    out = config.parent / "stopped"
    asked = [sys.executable, "-m", "groupwise.cli", *command(config, out, arms=("grpo", "rloo"))]
    asked[asked.index("steps=3")] = "steps=5000"
    going = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run = out / "runs/grpo/seed_0"
    end = time.monotonic() + 300
    while not (run / "rollouts/step_2.parquet").is_file() and time.monotonic() < end:
        time.sleep(0.02)
    going.send_signal(signal.SIGINT)
    _, said = going.communicate(timeout=300)
    assert going.returncode == 130
    assert "4 of 4 runs are left" in said
    assert "goes on with them: python -m groupwise.cli compare grpo rloo" in said
    step = int((run / "checkpoints/latest").resolve().name.removeprefix("step_"))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert step >= 2 and json.loads(lines[-1])["step"] == step  # saved where it was stopped
    assert not list(processes_of(out))


def test_seeds_and_arms_may_be_added_and_nothing_else_changed(
    done: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ComparisonFolder(done).read()
    assert plan is not None and changes(plan, plan) == []
    more = replace(plan, seeds=(0, 1, 2), arms=(*plan.arms, Arm("x", plan.arms[0].config)))
    assert changes(plan, more) == []
    assert changes(more, plan)  # not taken away
    for other, words_of in (
        (["--budget", "steps=4"], "its budget is 3 steps, not 4 steps"),
        (["--set", "group_size=8"], "grpo: group_size: 4 -> 8"),
    ):
        assert main([*command(config, done), *other]) == 2
        assert words_of in capsys.readouterr().err
    assert main(command(config, done, arms=("grpo", "rloo"))) == 2
    assert "it has an arm 'grpo (2)'" in capsys.readouterr().err


def test_data_that_changed_are_refused(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Held-out tasks too: scores of other tasks would be paired in silence."""
    held_out, own, out = tmp_path / "held_out.jsonl", tmp_path / "own.toml", tmp_path / "out"
    rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(8)]
    held_out.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own.write_text(f'{SMALL}data.eval = "{held_out}"\n')
    plan = ComparisonPlan(tuple(arms_of(["grpo", "rloo"], STEPS, source=own)), (0, 1), STEPS)
    folder = ComparisonFolder(out)
    folder.take(plan)
    prepare(plan, folder, print)
    prepare(plan, folder, print)  # the same again
    held_out.write_text(held_out.read_text().replace('"14"', '"15"'))
    with pytest.raises(RunError, match="grpo: the held-out tasks are not those"):
        prepare(plan, folder, print)
    with pytest.raises(RunError, match="grpo: the held-out tasks are not those"):
        check_unchanged(plan, folder)  # also where nothing is left to run


def sums(path: Path, digit: str, longest: int) -> Path:
    """Prompts of 4, 6, ... characters, which are as many tokens."""
    prompts = [f"{f'{digit}+' * terms}{digit}=" for terms in range(1, longest // 2)]
    rows = [json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts]
    path.write_text("\n".join(rows))
    return path


def test_arms_that_would_drop_other_prompts_are_refused(done: Path, tmp_path: Path) -> None:
    """Longer answers leave less room for prompts, and those that do not fit are dropped."""
    (start,) = (done / "start").iterdir()
    model = shutil.copytree(start, tmp_path / "model")
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 16}))

    def said(train: int, held_out: int, *more: str) -> list[str]:
        """Of arms with room for prompts of 12 and of 8 tokens."""
        own, without_options = tmp_path / "own.toml", SMALL.replace("data.options", "# ")
        own.write_text(
            f'{without_options}model.path = "{model}"\n'
            f'data.train = "{sums(tmp_path / "train.jsonl", "1", train)}"\n'
            f'data.eval = "{sums(tmp_path / "held_out.jsonl", "2", held_out)}"\n'
        )
        texts = ["grpo", "grpo engine.max_tokens=8"]
        plan = ComparisonPlan(
            tuple(arms_of(texts, STEPS, source=own, settings=more)), (0, 1), STEPS
        )
        lines: list[str] = []
        prepare(plan, ComparisonFolder(Path(tempfile.mkdtemp(dir=tmp_path))), lines.append)
        return lines

    assert said(8, 8) == []
    with pytest.raises(ConfigError, match=r"judged on the same held-out tasks.*tokens=8 "):
        said(8, 10)
    (warning,) = said(10, 8)
    assert "do not train on the same prompts" in warning
    assert said(10, 10, "data.max_prompt_tokens=8") == []  # as they were told


def test_as_many_held_out_tasks_as_asked_for_are_judged_of_those_that_fit(
    done: Path, tmp_path: Path
) -> None:
    (start,) = (done / "start").iterdir()
    rows = ["1+" * 40 + "1=", *(f"{n}+2=" for n in range(1, 9))]
    file, own = tmp_path / "held_out.jsonl", tmp_path / "own.toml"
    file.write_text("".join(f'{{"prompt": "{row}", "answer": "3"}}\n' for row in rows))
    own.write_text(f'{SMALL}model.path = "{start}"\ndata.eval = "{file}"\n')
    config = placed(groupwise.load_config(own, ["eval.tasks=3", "data.max_prompt_tokens=12"]))
    shape = stored_shape(start)
    assert shape is not None
    found = fitting_tasks(config, check_data(config), stored_tokenizer(start), shape)
    assert [task.prompt for task in found.held_out] == rows[1:4]


def test_what_was_refused_before_its_first_run_can_be_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the same folder: with another setting, or with other data."""
    held_out, own = tmp_path / "held_out.jsonl", tmp_path / "own.toml"
    own.write_text(f'{SMALL}data.eval = "{sums(held_out, "2", 10)}"\n')
    asked = command(own, tmp_path / "out", arms=("grpo", "grpo data.max_prompt_tokens=8"))
    assert main(asked) == 2
    assert "--set data.max_prompt_tokens=8 gives all arms" in capsys.readouterr().err
    held_out.write_text(held_out.read_text().replace("2+2+2+2+2=", "2+2+2+2="))
    plans = [arms_of(["grpo"], STEPS, source=own, sweep=f"group_size={n}") for n in ("2,4", "4,8")]
    folder = ComparisonFolder(tmp_path / "out")
    for arms in plans:
        plan = ComparisonPlan(tuple(arms), (0, 1), STEPS)
        folder.take(plan)
        prepare(plan, folder, print)
    folder.run(plan, plan.jobs[0]).mkdir(parents=True)
    with pytest.raises(RunError, match="holds another comparison"):
        folder.take(ComparisonPlan(tuple(plans[0]), (0, 1), STEPS))


def test_a_model_made_for_what_was_refused_is_made_anew(tmp_path: Path) -> None:
    """It was taught on data that may be what was mended."""
    plan, folder = (
        ComparisonPlan(tuple(arms_of(["grpo", "rloo"], STEPS)), (0, 1), STEPS),
        ComparisonFolder(tmp_path),
    )
    folder.take(plan)
    made = folder.starts / "made"
    made.mkdir(parents=True)
    folder.run(plan, plan.jobs[0]).mkdir(parents=True)
    folder.take(plan)
    assert made.is_dir()  # there are runs: they began with it
    shutil.rmtree(tmp_path / "runs")
    folder.take(plan)
    assert not made.exists()


def test_code_that_changed_is_refused_where_something_was_learned_with_it(
    done: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plug-in that failed may be mended; a run that its earlier form made is not taken for it."""
    plugin, out = tmp_path / "scaled.py", tmp_path / "out"
    failing = PLUGIN.replace("raising", "scaled").replace("dying", "unused")
    plugin.write_text(failing)
    (model,) = (done / "start").iterdir()
    arms = ("grpo", shlex.quote(f"{plugin}:scaled"))
    asked = [*command(config, out, arms=arms), "--set", f"model.path={model}"]

    def call() -> tuple[int, str]:
        """In a process of its own, which has not loaded the file in an earlier form."""
        status, _, said = forked(asked, tmp_path)
        return status, said

    assert call()[0] == 1
    sound = "return log_ratio_NT * advantage_NT, torch.zeros_like(batch.mask_NT)"
    plugin.write_text(failing.replace('raise ZeroDivisionError("not today")', sound))
    status, said = call()
    assert status == 0 and "2 runs are done already" in said
    plugin.write_text(plugin.read_text().replace("return log_ratio", "return 2 * log_ratio"))
    status, said = call()
    assert status == 2
    assert "scaled: the file that its recipe comes from was changed" in said
    shutil.rmtree(out / "runs/scaled")  # as it says
    status, said = call()
    assert status == 0 and "2 runs are done already" in said


def with_one_run(own: Path, at: int) -> tuple[ComparisonPlan, ComparisonFolder, Path]:
    """A comparison of a configuration's, and a run of it that has learned something."""
    plan = ComparisonPlan(tuple(arms_of(["grpo", "rloo"], STEPS, source=own)), (0, 1), STEPS)
    folder = ComparisonFolder(own.parent / "out")
    folder.take(plan)
    run = folder.run(plan, plan.jobs[at])
    (run / "checkpoints/step_1").mkdir(parents=True)
    config = plan.arms[0].config
    code = Grader(config.reward.parts, graders=config.data.graders).code()  # as a run writes it
    (run / "manifest.json").write_text(json.dumps({"origin": {"reward": code}}))
    return plan, folder, run


def test_reward_code_that_changed_is_refused(tmp_path: Path) -> None:
    reward, own = tmp_path / "reward.py", tmp_path / "own.toml"
    reward.write_text("def mine(completion, answer):\n    return 1.0\n")
    own.write_text(f'{SMALL}reward.parts = {{ "{reward}:mine" = 1.0 }}\n')
    plan, folder, run = with_one_run(own, at=1)
    prepare(plan, folder, print)
    reward.write_text("def mine(completion, answer):\n    return 0.5\n")
    with pytest.raises(RunError, match="rloo: the file that its reward comes from was changed"):
        prepare(plan, folder, print)
    (run / "checkpoints/step_1").rmdir()
    prepare(plan, folder, print)  # nothing was learned
    (run / "summary.json").write_text("{}")  # it was: somebody needed the room
    with pytest.raises(RunError, match="rloo: the file that its reward comes from was changed"):
        check_unchanged(plan, folder)
    reward.unlink()
    for look in (lambda: prepare(plan, folder, print), lambda: check_unchanged(plan, folder)):
        with pytest.raises(RewardError, match="There is no file"):
            look()


def test_code_of_a_source_s_grader_that_changed_is_refused(tmp_path: Path) -> None:
    grader, own = tmp_path / "grader.py", tmp_path / "own.toml"
    grader.write_text("def mine(completion, answer):\n    return 1.0\n")
    source = f'{{ size = 64, grader = "{grader}:mine" }}'
    own.write_text(f"{SMALL}data.train = {{ arithmetic = {source} }}\ndata.holdout_share = 0.1\n")
    plan, folder, _ = with_one_run(own, at=0)
    check_unchanged(plan, folder)
    grader.write_text("def mine(completion, answer):\n    return 0.5\n")
    with pytest.raises(RunError, match="grpo: the file that its reward comes from was changed"):
        check_unchanged(plan, folder)


def test_a_file_of_recipes_that_was_moved_is_named(tmp_path: Path) -> None:
    plugin = tmp_path / "moved.py"
    plugin.write_text(PLUGIN.replace("raising", "moved").replace("dying", "resting"))
    folder = ComparisonFolder(tmp_path / "out")
    folder.take(
        ComparisonPlan(
            tuple(arms_of(["grpo", shlex.quote(f"{plugin}:moved")], STEPS)), (0, 1), STEPS
        )
    )
    plugin.rename(tmp_path / "other.py")
    with pytest.raises(RunError, match=r"can't be gone on with here: There is no file '.*moved.py"):
        folder.read()


# --- failing arms -----------------------------------------------------------------------------


def test_a_failing_arm_does_not_take_the_others_down(
    done: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin, out = config.parent / "bad.py", config.parent / "failing"
    plugin.write_text(PLUGIN)
    named = (shlex.quote(f"{plugin}:{name}") for name in ("dying", "raising"))
    arms = (*named, "grpo", "rloo")
    (model,) = (done / "start").iterdir()  # as any model of one's own
    assert main(command(config, out, "--set", f"model.path={model}", arms=arms)) == 1
    assert not (out / "start").exists()
    found, said = result(out), capsys.readouterr()
    dying, raising, *sound = found["arms"]
    assert [each["seed"] for each in dying["failed"]] == [0, 1]
    assert all("status 7" in each["why"] for each in dying["failed"])
    # Tried on a toy batch, in the run's own process, before a model is loaded.
    assert all("gate raising" in each["why"] for each in raising["failed"])
    assert all("not today" in each["why"] for each in raising["failed"])
    assert all(arm["seeds"] == [0, 1] and not arm["failed"] for arm in sound)
    tested = [pair for pair in found["pairs"] if pair["difference"] is not None]
    assert [(pair["a"], pair["b"]) for pair in tested] == [("grpo", "rloo")]
    assert "2 failed" in said.out and "no verdict" in said.out and "FAILED" in said.out
    log = next(out.glob("runs/*raising*/seed_0/log.txt")).read_text()
    assert "ZeroDivisionError" in log


# --- arms -------------------------------------------------------------------------------------


def test_recipes_run_under_the_sizes_of_this_run() -> None:
    """Updates a batch and lengths belong to the run: the papers' are for other batches."""
    arms = {
        arm.name: arm.config.recipe for arm in arms_of(["grpo", "dapo", "dr_grpo", "rloo"], STEPS)
    }
    assert {name: r.schedule["updates"] for name, r in arms.items()} == {
        "grpo": 4, "dapo": 4, "dr_grpo": 4, "rloo": 1
    }  # fmt: skip
    assert arms["dapo"].shaping[0]["max_length"] == 4
    assert arms["dr_grpo"].aggregation["length"] == 4
    assert str(arms["grpo"].gate) == "clip(low=0.2, high=0.2)"  # the rest is the paper's


def test_what_an_arm_asks_for_stays() -> None:
    texts = ["dapo recipe.schedule.updates=16", "dr_grpo recipe.aggregation.length=9", "dapo"]
    arms = arms_of(texts, STEPS, settings=["recipe.filter=zero_variance()"][:0])
    assert arms[0].config.recipe.schedule["updates"] == 16
    assert arms[1].config.recipe.aggregation["length"] == 9
    set_for_all = arms_of(["dapo", "grpo"], STEPS, settings=["recipe.schedule.updates=8"])
    assert [arm.config.recipe.schedule["updates"] for arm in set_for_all] == [8, 8]


def test_a_sweep_of_a_method_with_a_space_in_its_name(tmp_path: Path) -> None:
    plugin, own = tmp_path / "spaced.py", tmp_path / "own.toml"
    named = PLUGIN.replace("dying", "other_spaced").replace('name="raising"', 'name="my method"')
    plugin.write_text(named)
    own.write_text(SMALL.replace('"grpo"', f'"{plugin}:my method"', 1))
    arms = arms_of([], STEPS, source=own, sweep="group_size=2,4")
    assert [arm.config.group_size for arm in arms] == [2, 4]
    assert {str(arm.config.recipe.gate) for arm in arms} == {"raising()"}


def test_variations_files_and_sweeps(config: Path, tmp_path: Path) -> None:
    other = tmp_path / "mine.toml"
    other.write_text(SMALL.replace("group_size = 4", "group_size = 2"))
    texts = [
        "grpo recipe.gate.high=0.3 group_size=2",
        shlex.quote(str(other)),
        "rloo",
        f"{shlex.quote(str(config))} engine.slots=8",
    ]
    arms = arms_of(texts, ArmBudget("tokens", 100), source=config)
    assert [arm.name for arm in arms] == [
        "grpo gate.high=0.3 group_size=2", "mine", "rloo", "small engine.slots=8"
    ]  # fmt: skip
    assert arms[0].config.recipe.gate["high"] == 0.3
    assert [arm.config.group_size for arm in arms] == [2, 2, 4, 4]
    assert arms[1].config.budget.tokens == 100
    assert arms[1].config.steps == 100 // 8 + 1  # an answer has one token or more
    sweep = arms_of(["grpo", "dapo"], STEPS, sweep="recipe.gate.high=0.2,0.28")
    assert [arm.name for arm in sweep] == [
        "grpo gate.high=0.2", "grpo gate.high=0.28", "dapo gate.high=0.2", "dapo gate.high=0.28"
    ]  # fmt: skip
    assert [arm.config.recipe.gate["high"] for arm in sweep] == [0.2, 0.28, 0.2, 0.28]
    alone = arms_of([], STEPS, sweep="group_size=2,4,16")
    assert [arm.config.group_size for arm in alone] == [2, 4, 16]
    gates = arms_of([], STEPS, sweep="recipe.gate=clip(low=0.1, high=0.2),clip(low=0.2, high=0.3)")
    assert [arm.config.recipe.gate["high"] for arm in gates] == [0.2, 0.3]
    assert gates[0].name == "grpo gate=clip(low=0.1, high=0.2)"
    long = arms_of(["grpo", "grpo " + " ".join(["group_size=4"] * 40)], STEPS)[1]
    assert len(long.folder) < 100


def test_a_sweep_without_arms_keeps_what_the_configuration_sets_in_its_recipe(
    tmp_path: Path,
) -> None:
    own = tmp_path / "own.toml"
    recipe = 'recipe.name = "dapo"\nrecipe.gate.high = 0.35\nrecipe.filter = ""'
    own.write_text(SMALL.replace('recipe.name = "grpo"', recipe))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swept_arms = arms_of([], STEPS, source=own, sweep="group_size=2,4")
    assert [arm.config.recipe.text()["filter"] for arm in swept_arms] == ["", ""]
    assert [arm.config.recipe.gate["high"] for arm in swept_arms] == [0.35, 0.35]
    assert [arm.name for arm in swept_arms] == ["dapo group_size=2", "dapo group_size=4"]
    # Arms that name a recipe do not have it, and that is said.
    with pytest.warns(RecipeWarning, match=r"recipe.filter = ''.*recipe.gate.*holds for no arm"):
        arms = arms_of(["dapo", "grpo"], STEPS, source=own)
    assert arms[0].config.recipe.gate["high"] == 0.28
    with pytest.warns(RecipeWarning, match=r"\(recipe.filter = ''\) holds"):
        arms_of(["dapo", "grpo"], STEPS, source=own, settings=["recipe.gate.high=0.35"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arms_of(["dapo", "grpo"], STEPS, source=CONFIGS / "gsm8k.toml")  # lengths are fitted
        high, drop = "recipe.gate.high=0.35", "recipe.filter=''"
        arms_of([f"dapo {high} {drop}", f"grpo {drop} {high}"], STEPS, source=own)  # as it says
        arms_of([shlex.quote(str(own))] * 2, STEPS, source=own)


def test_what_no_arm_takes_from_the_configuration_is_said_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.toml"
    own.write_text(SMALL.replace('"grpo"', '"grpo"\nrecipe.gate.high = 0.35'))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("")  # refused behind it
    assert main(command(own, tmp_path / "out")) == 2
    assert "holds for no arm that names a recipe" in capsys.readouterr().err


def test_a_sweep_splits_at_its_own_commas() -> None:
    assert sweep_values("a=1,2") == ["a=1", "a=2"]
    assert sweep_values("recipe.gate=clip(low=0.1, high=0.2),score()") == [
        "'recipe.gate=clip(low=0.1, high=0.2)'", "'recipe.gate=score()'"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words_of"),
    [
        (["grpo", "dappo"], "'dapo'"),
        (["grpo", "dapo", "--seeds", "1"], "--seeds 1: from one seed"),
        (["grpo", "dapo", "--budget", "3e5"], "is no budget"),
        (["grpo", "dapo", "--budget", "tokens=-5"], "is no budget"),
        (["grpo", "dapo", "--budget", "tokens=1.5"], "is no budget"),
        (["grpo", "dapo", "--budget", "tokens=nan"], "is no budget"),
        (["grpo", "dapo", "--budget", "hours=2"], "is no budget"),
        (["grpo"], "two arms or more"),
        ([], "two arms or more"),
        (["grpo", "--sweep", "recipe.gate.hihg=0.2,0.3"], "Did you mean 'high'"),
        (["grpo", "--sweep", "grop_size=2,3"], "Did you mean 'group_size'"),
        (["grpo", "--sweep", "group_size=2"], "nothing to sweep"),
        (["grpo", "--sweep", "group_size=2,2"], "names a value twice"),
        (["grpo", "rloo", "--set", "recipe.gate.high=0.3"], "'rloo' would ignore it"),
        (["grpo", "dapo", "--set", "recipe=gspo"], "said by the arms"),
        (["grpo", "dapo", "--set", "eval.tasks=0"], "no held-out tasks"),
        (["grpo", "grpo eval.tasks=32"], "differ in eval.tasks"),
        (["grpo", "grpo seed=3"], "differ in seed"),
        (["grpo", "nosuch.toml"], "There is no configuration"),
        (["grpo", "rspo"], "which experts a token visits"),
        (["grpo", "dapo", "--config", "nosuch.toml"], "There is no configuration"),
        (["grpo", "dapo", "--jobs", "0"], "--jobs 0"),
        (["grpo", "dapo", "--measure", "weights/fingerprint"], "is no number"),
        (["grpo", "dapo", "--measure", "reward/part/*"], "no run measures that"),
        (["grpo", "grpo 'open"], "can't be read"),
        (["grpo", " "], "An arm is empty"),
        (["grpo", "dapo", "group_size=4"], "--set group_size=4"),
        (["grpo", "rloo", "--set", "steps=4"], "is said by --budget"),
        (["grpo", "grpo budget.tokens=100"], "is said by --budget"),
        (["grpo", "--sweep", "steps=4,8"], "is said by --budget"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(
    arguments: list[str], words_of: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["compare", *arguments, "--out", str(out)]) == 2
    assert words_of in capsys.readouterr().err
    assert not out.exists()


def test_data_without_held_out_tasks_and_missing_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    for train, words_of in (("a.jsonl", "no held-out tasks"), ("b.jsonl", "b.jsonl")):
        file = tmp_path / "c.toml"
        eval_too = "" if train == "a.jsonl" else 'eval = "a.jsonl"\n'
        file.write_text(f'[data]\ntrain = "{train}"\n{eval_too}')
        assert (
            main(["compare", "grpo", "rloo", "--config", str(file), "--out", str(tmp_path / "o")])
            == 2
        )
        assert words_of in capsys.readouterr().err


def test_a_model_that_is_not_there_is_refused_once(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, path = tmp_path / "out", f"model.path={tmp_path / 'none'}"
    assert main(command(config, out, "--set", path)) == 2
    said = capsys.readouterr().err
    assert said.count("is no folder here") == 1 and "FAILED" not in said
    assert not (out / "compare.json").exists()
    arms = ("grpo", f"rloo {shlex.quote(path)}")  # also where it is not the first arm's
    assert main(command(config, out, arms=arms)) == 2
    said = capsys.readouterr().err
    assert "rloo model.path" in said and said.count("is no folder here") == 1
    assert main(command(config, out, "--budget", "steps=1")) == 0  # mended, in the same folder


def test_data_without_pairs_is_refused_once(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(config, tmp_path / "out", arms=("grpo", "dpo"))) == 2
    said = capsys.readouterr().err
    assert "dpo: Row" in said and "has no text in column 'chosen'" in said and "FAILED" not in said


def test_a_folder_of_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("")
    assert main(["compare", "grpo", "dapo", "--out", str(tmp_path)]) == 2
    assert "no comparison" in capsys.readouterr().err


def test_what_else_differs_is_said() -> None:
    notes = check(arms_of(["grpo", "grpo tiny.width=64"], STEPS))
    assert any("differs from grpo also in tiny.width" in note for note in notes)
    sweep = arms_of(["grpo"], ArmBudget("steps", 99), sweep="optim.learning_rate=1e-4,1e-3")
    assert check(sweep) == []  # it is in their names
    notes = check(arms_of(["grpo", "grpo engine.max_tokens=6"], ArmBudget("steps", 99)))
    assert any("max_tokens, and held-out answers are sampled with it, too" in x for x in notes)


def test_what_else_differs_between_whole_configurations_is_said(
    config: Path, tmp_path: Path
) -> None:
    other = tmp_path / "faster.toml"
    other.write_text(SMALL.replace("1e-3", "3e-3").replace("group_size = 4", "group_size = 8"))
    notes = check(arms_of([shlex.quote(str(x)) for x in (config, other)], STEPS))
    assert any("group_size, optim.learning_rate" in note for note in notes)


# --- figures ----------------------------------------------------------------------------------


def test_area_is_the_mean_over_the_budget() -> None:
    # From 0.2 up to 0.6 at 100, level, then up to 1.0 at 300: cut at 200.
    assert area([0, 100, 300], [0.2, 0.6, 1.0], 200) == pytest.approx((40 + 70) / 200)
    assert area([0, 50], [0.5, 0.5], 100) == pytest.approx(0.5)  # level behind the last
    assert area([0, 100], [0.0, 1.0], 100) == pytest.approx(0.5)


def outcome(seed: int, scores: np.ndarray, slope: float = 0.0) -> RunOutcome:
    final = float(scores.mean())
    points = tuple(
        {"step": at, "tokens": 100 * at, "seconds": at, "score": final - slope * (3 - at)}
        for at in range(4)
    )
    return RunOutcome(
        seed=seed, measure="accuracy", points=points, final=final, area=final - 1.5 * slope,
        scores=tuple(map(float, scores)), areas=tuple(float(x) - 1.5 * slope for x in scores),
        by_task={}, steps=3, tokens=300, seconds=3.0, length=2.0,
        ends={}, curves={name: (np.zeros(0), np.zeros(0)) for name in ("entropy", "length")},
        origin={"weights": "w", "data": "d"}, versions="groupwise 0, PyTorch 0",
    )  # fmt: skip


def made_up(shift: float, seeds: int = 5, tasks: int = 200) -> dict[str, Any]:
    """Two arms whose accuracies differ by about so much."""
    draw = np.random.default_rng(0)
    easy = draw.random(tasks)
    sides = [
        [
            outcome(s, (draw.random(tasks) < np.clip(easy + move, 0, 1)).astype(float))
            for s in range(seeds)
        ]
        for move in (0.0, shift)
    ]
    arms = arms_of(["grpo", "dapo"], STEPS)
    plan = ComparisonPlan(tuple(arms), tuple(range(seeds)), STEPS)
    return findings(plan, sides, {})


def measured(left: list[float], right: list[float]) -> dict[str, Any]:
    """Two arms with these values of a measure, by seed."""
    sides = [
        [replace(outcome(s, np.ones(4)), ends={"kl/ref": x}) for s, x in enumerate(values)]
        for values in (left, right)
    ]
    plan = ComparisonPlan(tuple(arms_of(["grpo", "dapo"], STEPS)), (0, 1, 2), STEPS)
    return findings(plan, sides, {}, ["kl/ref"])


def test_what_is_said_of_a_measure() -> None:
    *_, said = summary.measured(measured([0.5, 0.62, 0.7], [0.1, 0.21, 0.31]))
    assert said.startswith("grpo has more than dapo by 0.4 ")
    *_, said = summary.measured(measured([0.5, 0.6, 0.7], [0.5, 0.6, 0.7]))
    assert said == "grpo and dapo are equal in every seed: the difference is exactly 0."
    # Of one seed there is no error, and it is no measure's fault that there is no verdict.
    found = measured([0.5, 0.6, 0.7], [0.5])
    assert summary.measured(found)[-1] == "grpo and dapo: no verdict, as above."
    at = summary.columns(found).index("kl/ref")
    assert [row[at] for row in summary.rows(found)] == ["0.6 ± 0.058", "0.5"]


def test_a_measure_is_that_of_the_last_tenth_of_the_steps(tmp_path: Path) -> None:
    """What a run stopped measuring before is not how it ended."""
    lines: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": 0.1, "eval/length": 3.0}]
    lines += [{"step": step, "length/mean": float(step)} for step in range(1, 31)]
    for step in (28, 30):  # evaluations
        lines[step] |= {"eval/accuracy": step / 100, "eval/length": 3.0}
    for step in (26, 28, 30):  # the last tenth is 28, 29 and 30; one of them has no wrong answer
        lines[step]["length/wrong_mean"] = float(step)
    for step in range(1, 28):
        lines[step]["clip/high_rarity"] = 7.0
    for step in range(28, 31):
        lines[step]["clip/high_rarity"] = None
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    found = read_outcome(tmp_path, Job(0, 0), ArmBudget("steps", 30), {"steps": 30})
    assert found.value("length/mean") == 29.0
    assert found.value("length/wrong_mean") == 29.0
    assert found.value("clip/high_rarity") is None
    assert found.value("eval/accuracy") == found.final == 0.3
    assert found.stops == {}


def test_how_episodes_ended_is_told_of_each_arm(tmp_path: Path) -> None:
    """In the last tenth of the steps; an end that a step did not see is a share of nothing."""
    lines: list[dict[str, Any]] = [
        {"step": step, "turns/mean": 2.0, "turns/stop/done": 1.0} for step in range(21)
    ]
    for step in (0, 20):
        lines[step] |= {"eval/accuracy": 0.5, "eval/length": 3.0}
    lines[20] |= {"turns/stop/done": 0.25, "turns/stop/max_turns": 0.75, "turns/mean": 3.0}
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    found = read_outcome(tmp_path, Job(0, 0), ArmBudget("steps", 20), {"steps": 20})
    assert found.stops == {"done": 0.625, "max_turns": 0.375}
    plan = ComparisonPlan(tuple(arms_of(["grpo", "dapo"], STEPS)), (0,), STEPS)
    ends = {**found.ends, "groups/dead_share": 0.25}
    done = [[replace(found, ends=ends)], [outcome(0, np.ones(4))]]
    told = findings(plan, done, {})
    assert told["arms"][0]["episodes"] == {
        "stops": {"done": 0.625, "max_turns": 0.375}, "turns": 2.5, "useful_groups": 0.75,
    }  # fmt: skip
    assert told["arms"][1]["episodes"] is None
    assert summary.episodes(told)[-1] == (
        "grpo: 2.5 turns; episodes ended done 62%, max_turns 38%; "
        "75% of the groups taught something"
    )


@pytest.mark.parametrize("changed", [{"eval/accuracy": None}, {"eval/length": None}])
def test_an_evaluation_that_measured_nothing_is_refused_in_words(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    lines = [{"step": step, "eval/accuracy": 0.5, "eval/length": 3.0} for step in (0, 1)]
    lines[1] |= changed
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    with pytest.raises(RunError, match="no evaluations to compare"):
        read_outcome(tmp_path, Job(0, 0), ArmBudget("steps", 1), {"steps": 1})


def test_a_difference_is_said_in_points() -> None:
    found = made_up(0.2)
    (said,) = summary.verdicts(found)
    pair = found["pairs"][0]
    assert pair["difference"] < 0 and pair["separable"]
    numbers = re.fullmatch(
        r"dapo is better than grpo by ([\d.]+) points \(([\d.]+) to ([\d.]+), p = [\d.e-]+\)\.",
        said,
    )
    assert numbers is not None
    assert float(numbers[1]) == pytest.approx(-100 * pair["difference"], abs=0.05)
    assert float(numbers[2]) == pytest.approx(-100 * pair["high"], abs=0.05)
    assert float(numbers[3]) == pytest.approx(-100 * pair["low"], abs=0.05)


def test_no_difference_is_said_with_what_would_show_it() -> None:
    found = made_up(0.01)
    (said,) = summary.verdicts(found)
    pair = found["pairs"][0]
    assert not pair["separable"]
    assert "not separable at this budget" in said and "this design could have seen" in said
    assert f"About {pair['seeds_needed'] - 5:,} more seeds would be needed" in said
    assert 0.01 < pair["smallest_visible"] < 0.2


def test_pairs_are_corrected_for_their_number() -> None:
    draw = np.random.default_rng(1)
    sides = [[outcome(s, draw.random(50) + 0.05 * arm) for s in range(4)] for arm in range(3)]
    plan = ComparisonPlan(tuple(arms_of(["grpo", "dapo", "rloo"], STEPS)), (0, 1, 2, 3), STEPS)
    found = findings(plan, sides, {})
    raw = sorted(pair["p_uncorrected"] for pair in found["pairs"])
    smallest = min(found["pairs"], key=lambda pair: pair["p_uncorrected"])
    assert smallest["p"] == pytest.approx(min(1, 6 * raw[0]))  # final and area of three pairs
    assert smallest["level"] == pytest.approx(0.05 / 6)


def test_only_seeds_that_both_finished_are_paired() -> None:
    draw = np.random.default_rng(2)
    values = draw.random((2, 3, 40))
    sides = [
        [outcome(s, values[a][s]) for s in seeds] for a, seeds in enumerate([(0, 1, 2), (0, 2)])
    ]
    plan = ComparisonPlan(tuple(arms_of(["grpo", "dapo"], STEPS)), (0, 1, 2), STEPS)
    found = findings(plan, sides, {Job(1, 1): "it broke"})
    pair = found["pairs"][0]
    assert pair["seeds"] == [0, 2]
    expected = values[0][[0, 2]].mean() - values[1][[0, 2]].mean()
    assert pair["difference"] == pytest.approx(expected)
    said = summary.text(found)
    assert "FAILED dapo, seed 1: it broke" in said and "which flatters it" in said


def test_a_comparison_of_which_nothing_is_left(tmp_path: Path) -> None:
    plan = ComparisonPlan(tuple(arms_of(["grpo", "dapo"], STEPS)), (0, 1), STEPS)
    found = findings(plan, [[], []], dict.fromkeys(plan.jobs, "no room"))
    found["cost"] = {"wall_seconds": 1.0, "places": 1, "overhead_share": None}
    assert write_all(tmp_path, found, plan, [[], []])[0] == "compare.json"
    said = summary.text(found)
    assert said.count("FAILED") == 4 and "no verdict" in said
    assert result(tmp_path)["pairs"][0]["difference"] is None


def test_fields_without_a_value_are_there(done: Path) -> None:
    """As documented: a script that reads compare.json asks for what a failed arm has not got."""
    whole = result(done)
    plan = ComparisonPlan(tuple(arms_of(["grpo", "dapo"], STEPS)), (0, 1), STEPS)
    runs = [outcome(0, np.ones(4)), outcome(1, np.ones(4))]
    found = findings(plan, [runs, []], {}, ["length/mean"])
    assert found["arms"][1].keys() == whole["arms"][0].keys()
    assert found["pairs"][0].keys() == whole["pairs"][0].keys()
    assert found["pairs"][0]["measures"] == {"length/mean": None}
    documented = (
        (CONFIGS.parent / "docs/compare.md").read_text().partition("compare.json, scores")[2]
    )
    for field in {*whole, *whole["arms"][0], *whole["pairs"][0]} - {"format"}:
        assert f"`{field}" in documented, field


def test_where_no_task_has_a_score_in_every_run_there_is_no_verdict() -> None:
    """What tasks were asked is luck as well: without scores by task it can't be told."""
    sides = [[outcome(s, np.full(2, 0.5 + 0.1 * s + up)) for s in (0, 1)] for up in (0.0, 0.2)]
    sides[0][0] = replace(sides[0][0], scores=(None, 0.5))
    sides[1][1] = replace(sides[1][1], scores=(0.5, None))
    plan = ComparisonPlan(tuple(arms_of(["grpo", "dapo"], STEPS)), (0, 1), STEPS)
    found = findings(plan, sides, {})
    assert found["pairs"][0]["p"] is None and found["pairs"][0]["area"] is not None
    assert summary.verdicts(found) == [
        "grpo and dapo: no verdict, no held-out task has a score in all of their runs."
    ]


def test_a_mean_over_the_budget_is_judged_over_tasks_as_well() -> None:
    """Seeds agree, and one task of four makes the difference: over seeds alone p would be tiny."""
    gains = np.array([0.4, 0.0, 0.0, 0.0])
    sides = [
        [replace(outcome(s, np.full(4, 0.5)), areas=tuple(0.01 * s * up + 0.5 + up * gains))
         for s in range(6)]
        for up in (0.0, 1.0)
    ]  # fmt: skip
    [pair] = pairs(["a", "b"], sides)
    assert pair["area"]["stderr_tasks"] == pytest.approx(0.1, rel=0.01)
    assert pair["area"]["p_uncorrected"] > 0.2 and not pair["area"]["separable"]
    old = [
        [replace(one, areas=()) for one in side] for side in sides
    ]  # runs that did not keep them
    plan = ComparisonPlan(tuple(arms_of(["grpo", "dapo"], STEPS)), tuple(range(6)), STEPS)
    found = findings(plan, old, {})
    assert found["pairs"][0]["area"] is None and "evaluations.jsonl" in summary.text(found)


def test_areas_of_tasks_are_those_of_the_evaluations(done: Path) -> None:
    """By hand: trapezoids of each task's scores; their mean is the area under the curve."""
    run = done / "runs/dr_grpo/seed_1"
    lines = [json.loads(x) for x in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    tables = np.array([line["eval/accuracy"] for line in lines])
    summary = json.loads((run / "summary.json").read_text())
    found = read_outcome(run, Job(2, 1), STEPS, summary)
    by_hand = (tables[0] / 2 + tables[1] + tables[2] + tables[3] / 2) / 3
    assert found.areas == pytest.approx(by_hand)
    assert np.mean(found.areas) == pytest.approx(found.area)
    assert found.by_task["eval/accuracy"] == summary["scores_after"]
    measured = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    for name, values in lines[-1].items():
        if name != "step":  # every metric that is there is the mean of its tasks
            assert np.mean(values) == pytest.approx(measured[-1][name]), name


def test_two_seeds_separate_nothing_and_that_is_said_before_and_after(
    config: Path, done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = np.random.default_rng(3)
    sides = [[outcome(s, draw.random(100) * 0.01 + up) for s in (0, 1)] for up in (0.0, 0.9)]
    plan = ComparisonPlan(tuple(arms_of(["grpo", "dapo"], STEPS)), (0, 1), STEPS)
    found = findings(plan, sides, {})
    pair = found["pairs"][0]
    assert pair["p_uncorrected"] < 0.01 and pair["p"] == pair["area"]["p"] == 0.125
    assert found["fewest_seeds"] == pair["seeds_needed"] == 3 and pair["smallest_visible"] is None
    (said,) = summary.verdicts(found)
    assert "not separable" in said and "2 seeds can't tell arms apart" in said
    assert "3 are the fewest, and may show a difference of this size" in said
    more = [[replace(one, seed=s) for s, one in enumerate([*side, side[0]])] for side in sides]
    assert findings(replace(plan, seeds=(0, 1, 2)), more, {})["pairs"][0]["separable"]
    assert not list(too_few(3, 2)) and list(too_few(3, 3))
    assert main(command(config, done)) == 0
    warned = capsys.readouterr().err
    assert "2 seeds can't tell 3 arms apart" in warned and "4 are the fewest" in warned


def test_all_that_is_judged_is_one_family() -> None:
    """Pairs, final and area, and every measure: p of the smallest is that times all of them."""
    draw = np.random.default_rng(4)
    sides = [
        [replace(outcome(s, draw.random(30)), areas=tuple(draw.random(30)),
                 ends={"kl/ref": draw.random() + 9 * arm, "entropy/mean": draw.random()})
         for s in range(8)]
        for arm in range(3)
    ]  # fmt: skip
    rows = pairs(["a", "b", "c"], sides, ["kl/ref", "entropy/mean"])
    judged = [one for row in rows for one in (row, row["area"], *row["measures"].values())]
    assert len(judged) == 12
    luck = 3 * 2 / 4**8
    for rank, one in enumerate(sorted(judged, key=lambda one: one["p_uncorrected"])):
        assert one["level"] == pytest.approx(0.05 / (12 - rank))
        assert one["p"] >= max(min(1, (12 - rank) * one["p_uncorrected"]) * 0.999, luck)


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("as usual: 64 tasks, 4 evaluations", 2),
        ("256 tasks, 12 evaluations", 3),
        ("each arm has tasks of its own", 5),
        ("each arm has tasks of its own", 8),
        ("tasks of its own, 4 of them", 8),
        ("half of the runs take off", 2),
        ("half take off, four arms", 3),
    ],
)
def test_equal_arms_are_rarely_told_apart(name: str, seeds: int) -> None:
    """By anything that is said of them: 5 %, and three standard errors of 300 comparisons."""
    assert false_positives.rates(false_positives.EQUAL[name], seeds, 300)["any"] <= 0.088


def test_a_clear_difference_is_seen_by_five_seeds() -> None:
    large = false_positives.BETTER["64 tasks, better by 23 points"]
    assert false_positives.rates(large, 5, 60)["final"] >= 0.8


def test_other_starts_are_noticed() -> None:
    one = outcome(0, np.ones(4))
    other = replace(one, origin={"weights": "x", "data": "d"})
    plan = ComparisonPlan(tuple(arms_of(["grpo", "dapo"], STEPS)), (0,), STEPS)
    found = findings(plan, [[one], [other]], {})
    assert not found["same_start"] and "did not all begin" in summary.text(found)
    later = [replace(each, seed=1) for each in (other, other)]  # the model changed between calls
    found = findings(plan, [[one, later[0]], [one, later[1]]], {})
    assert not found["same_start"]
    lora = [replace(a, config=replace(a.config, adapter=Adapter(rank=4))) for a in plan.arms]
    found = findings(replace(plan, arms=tuple(lora)), [[one, later[0]], [one, later[1]]], {})
    assert found["same_start"]  # a seed has an adapter of its own


def test_other_versions_are_noticed() -> None:
    one = replace(outcome(0, np.ones(4)), versions="1")
    other = replace(one, versions="2")
    plan = ComparisonPlan(tuple(arms_of(["grpo", "dapo"], STEPS)), (0,), STEPS)
    assert "several versions" not in summary.text(findings(plan, [[one], [one]], {}))
    found = findings(plan, [[one], [other]], {})
    assert found["versions"] == ["1", "2"] and "several versions (1; 2)" in summary.text(found)


def test_versions_are_those_of_the_manifests(done: Path) -> None:
    (said,) = result(done)["versions"]
    manifest = json.loads((done / "runs/grpo/seed_0/manifest.json").read_text())
    known = manifest["versions"]
    assert said == f"groupwise {known['groupwise']}, PyTorch {known['torch']}"


def test_one_process_is_one() -> None:
    cost = {"wall_seconds": 61.0, "places": 1, "overhead_share": None}
    assert summary.cost_line(cost) == "1:01 on 1 process"
    assert summary.cost_line(cost | {"places": 2}) == "1:01 on 2 processes"


def test_curves_are_read_at_equal_places() -> None:
    one = outcome(0, np.full(4, 0.9), slope=0.1)
    curve = score_curve(one, ArmBudget("tokens", 300))
    assert curve[0] == pytest.approx(0.6) and curve[-1] == pytest.approx(0.9)
    assert np.diff(curve) == pytest.approx(0.3 / 48)


def test_names_that_would_break_a_page_are_escaped() -> None:
    chart = charts.Chart("a & b", "tokens", [0, 1], [charts.Line("<b>", [0.1, 0.2], [0.0, 0.1])])
    assert "<b>" not in charts.svg(chart) and "<b>" not in charts.legend(["<b>"])


# --- the machine ------------------------------------------------------------------------------


def test_a_process_for_each_core_with_its_share_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ComparisonPlan(tuple(arms_of(["grpo", "dapo"], STEPS)), (0, 1), STEPS)
    monkeypatch.setattr("groupwise.compare.places.cores", lambda: 8)
    assert len(places_for(plan, None)) == 8
    assert places_for(plan, None)[0]["OMP_NUM_THREADS"] == "1"
    assert places_for(plan, 2)[0]["OMP_NUM_THREADS"] == "4"
    assert threads_for(None, places_for(plan, 2)) == 4
    assert threads_for(plan, places_for(plan, 2)) == 1  # as it was begun
    assert cores() >= 1


def test_memory_bounds_how_many_run_at_a_time(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model,) = (done / "start").iterdir()
    (arm, _) = arms_of(["grpo", "dapo"], STEPS, settings=[f"model.path={model}"])
    monkeypatch.setattr("groupwise.model.memory.device_bytes", lambda device: 10**9)
    held = room_for(arm.config)
    monkeypatch.setattr("groupwise.model.memory.device_bytes", lambda device: 4 * 10**9)
    assert 4 * held <= room_for(arm.config) <= 4 * held + 4
    monkeypatch.setattr("groupwise.model.memory.device_bytes", lambda device: 1)
    assert room_for(arm.config) == 1


def test_gpus_are_given_out_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    arms = arms_of(["grpo", "dapo"], STEPS, settings=["model.device=cuda"])
    plan = ComparisonPlan(tuple(arms), (0, 1), STEPS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places_for(plan, None)] == ["2", "5"]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places_for(plan, 3)] == ["2", "5", "2"]
    assert plan.with_threads(3).arms[0].config.model.threads == 1  # set already
    monkeypatch.setattr("groupwise.compare.places.cores", lambda: 16)
    assert [place["OMP_NUM_THREADS"] for place in places_for(plan, 5)] == ["3"] * 5


def test_a_second_command_on_the_same_folder_waits_and_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says at once for whom it waits; a folder that is free is taken without a word."""
    monkeypatch.setattr("groupwise.compare.plan.PATIENCE", 0.3)
    folder, said = ComparisonFolder(tmp_path), list[str]()
    with folder.locked(said.append):
        assert not said
        refused = pytest.raises(RunError, match=f"Process {os.getpid()}.* still at work")
        with refused, folder.locked(said.append):
            pass
    (waiting,) = said
    assert waiting.startswith(f"Process {os.getpid()}") and "waiting up to" in waiting


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [*lines[:-1], lines[-1][:-20]],  # the last line is torn
        lambda lines: [lines[0], *lines[2:]],  # one is gone
        lambda lines: [lines[0], "{\n", *lines[2:]],
        lambda lines: ["nothing\n"],
    ],
)
def test_a_finished_run_with_damaged_records_does_not_take_the_others_down(
    damage: Callable[[list[str]], list[str]],
    done: Path,
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And is not read as if it were whole: its area and its tokens would be others."""
    out = tmp_path / "damaged"
    shutil.copytree(done, out)
    run = out / "runs" / "dr_grpo" / "seed_1"
    records = run / "metrics.jsonl"
    records.write_text("".join(damage(records.read_text().splitlines(keepends=True))))
    assert main(command(config, out)) == 1
    said = capsys.readouterr().out
    assert "FAILED dr_grpo, seed 1: " in said and f"Remove {run}, and the same command" in said
    found = result(out)
    assert [arm["seeds"] for arm in found["arms"]] == [[0, 1], [0, 1], [0]]
    assert found["pairs"][0]["difference"] == 0.0


def test_a_run_that_was_changed_on_the_way_is_no_run_of_its_arm(
    done: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand, and set back again: its configuration is the arm's, some of its steps are not."""
    out = tmp_path / "changed"
    shutil.copytree(done, out)
    starts = out / "runs/dr_grpo/seed_1/starts.jsonl"
    (line,) = [json.loads(line) for line in starts.read_text().splitlines()]
    hotter = line["config"].replace("temperature = 1.0", "temperature = 1.5", 1)
    lines = [{**line, "config": hotter}, {**line, "step": 2}]
    starts.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    assert main(command(config, out)) == 1
    said = capsys.readouterr().out
    assert "FAILED dr_grpo, seed 1: " in said
    assert "was changed on the way, from step 3 on: engine.temperature: 1.5 -> 1.0" in said
    assert [arm["seeds"] for arm in result(out)["arms"]] == [[0, 1], [0, 1], [0]]


def test_a_damaged_run_that_was_removed_is_run_anew(
    done: Path, config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "mended"
    shutil.copytree(done, out)
    shutil.rmtree(out / "runs" / "dr_grpo" / "seed_1")
    assert main(command(config, out)) == 0
    assert fixed(result(out)) == fixed(result(done))


def test_hashes_of_the_data_that_were_edited(
    done: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "edited"
    shutil.copytree(done, out)
    (out / "data.json").write_text("{")
    assert main(command(config, out)) == 2
    assert "data.json can't be read" in capsys.readouterr().err
    (out / "data.json").unlink()  # as is said
    assert main(command(config, out)) == 0


@pytest.mark.parametrize("text", ["", "{", '{"format": 1}'])
def test_a_plan_that_was_edited(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(GroupwiseError, match="can't be read"):
        ComparisonFolder(tmp_path).read()


def test_a_plan_reads_back(tmp_path: Path) -> None:
    plan = ComparisonPlan(
        tuple(arms_of(["grpo", "dapo group_size=4"], STEPS)), (3, 4), ArmBudget("tokens", 9)
    )
    ComparisonFolder(tmp_path / "new").take(plan)
    assert ComparisonFolder(tmp_path / "new").read() == plan
    assert os.listdir(tmp_path / "new") == ["plan.json"]
    with pytest.raises(ConfigError):
        ArmBudget.parse("tokens")


def test_a_process_that_can_not_be_started_is_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **more: Any) -> None:
        raise OSError("too many processes")

    monkeypatch.setattr("groupwise.compare.workers.subprocess.Popen", refuse)
    plan = ComparisonPlan(tuple(arms_of(["grpo", "dapo"], STEPS)), (0, 1), STEPS)
    done = workers.run_jobs(
        plan, ComparisonFolder(tmp_path), plan.jobs, [{}, {}], 0, lambda progress: None
    )
    assert done.failed.keys() == set(plan.jobs)
    assert all("too many processes" in why for why in done.failed.values())


def test_a_run_says_that_the_code_of_its_recipe_changed(tmp_path: Path) -> None:
    plugin, own, said = tmp_path / "edited.py", tmp_path / "own.toml", io.StringIO()
    sound = "return log_ratio_NT * advantage_NT, torch.zeros_like(batch.mask_NT)"
    text = PLUGIN.replace("raising", "edited").replace("dying", "idle")
    plugin.write_text(text.replace('raise ZeroDivisionError("not today")', sound))
    own.write_text(SMALL.replace('"grpo"', f'"{plugin}:edited"'))
    groupwise.train(groupwise.load_config(own, steps=1), tmp_path / "run", Display(io.StringIO()))
    plugin.write_text(f"{plugin.read_text()}# edited\n")
    groupwise.train(groupwise.load_config(own, steps=2), tmp_path / "run", Display(said))
    assert "changed since the run started: the code of the recipe" in said.getvalue()


def test_a_forked_child_does_not_answer_for_its_run() -> None:
    """What a run calls may fork; the child's failure is not the run's."""
    script = (
        "import os, sys; from groupwise.compare import worker\n"
        "if os.fork() == 0: worker._say(sys.stdout, failed='a child')\n"
        "else: status = os.wait()[1]; worker._say(sys.stdout, done=status >> 8)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ('{"done": 1}\n', "")
