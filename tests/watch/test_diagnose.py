"""`groupwise diagnose`: run folders, logs of TRL and verl, exit status; the plot on a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cold_start
import pytest
from runs import metrics

from groupwise.cli import main
from groupwise.config.names import ELSEWHERE
from groupwise.errors import ConfigError, RunError
from groupwise.watch.chart import Point, plot
from groupwise.watch.diagnose import diagnose
from groupwise.watch.other_tools import CALLED, names_in_tool, read_log


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cold_start.make(tmp_path_factory.mktemp("model") / "cold")


@pytest.fixture(scope="module")
def cut_off(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose answers do not fit."""
    folder = tmp_path_factory.mktemp("runs") / "cut_off"
    cold_start.run_from(model, folder, steps=8, engine__max_tokens=1)
    return folder


# --- run folders ------------------------------------------------------------------------------


def test_a_sick_run_says_what_since_when_and_what_to_change(
    cut_off: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(cut_off)]) == 1
    said = capsys.readouterr().out
    assert "sick: truncation, from step 1 on (sure at step 5 of 8)" in said
    assert "engine.max_tokens" in said
    assert "first bad step: 1" in said
    assert "finish length" in said


def test_as_data(cut_off: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(cut_off), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] is False
    first = found["findings"][0]
    assert (first["rule"], first["step"], first["first_bad_step"]) == ("truncation", 5, 1)
    assert first["value"] == 1.0
    assert len({(s["prompt_id"], s["text"]) for s in found["samples"]}) == 3
    assert all(sample["finish"] == "length" for sample in found["samples"])


def test_live_and_afterwards_say_the_same(cut_off: Path) -> None:
    """What events.jsonl got while the run went on is what the folder gives later."""
    live = [(e["step"], e["rule"]) for e in cold_start.events(cut_off, "health")]
    later = [(f.step, f.rule.name) for f in diagnose(cut_off).findings]
    assert live and live == later


def test_a_run_of_an_older_version_is_judged_by_what_it_has(cut_off: Path, tmp_path: Path) -> None:
    """Before these measures a line had fewer names, and there were no health events."""
    old = ("step", "reward/mean", "length/truncated_share")
    lines = [{k: v for k, v in line.items() if k in old} for line in metrics(cut_off)]
    lines[-1] = {"step": 8}
    text = "\n".join(json.dumps(line) for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '\n{"step": 9, "rew')  # and a torn last line
    found = diagnose(tmp_path)
    assert [f.rule.name for f in found.findings] == ["truncation"]
    assert "mismatch" in found.unseen
    assert found.samples == []


@pytest.mark.parametrize("what", ["nothing", "empty", "a_file"])
def test_what_is_no_run_is_exit_status_2(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / what
    if what == "empty":
        path.mkdir()
    if what == "a_file":
        path.write_text("loss 0.3\n\x00\xff")
    assert main(["diagnose", str(path)]) == 2
    assert "error" in capsys.readouterr().err


def test_a_run_that_died_before_its_first_step_is_not_called_healthy(
    cut_off: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = (cut_off / "metrics.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["step"] == 0
    (tmp_path / "metrics.jsonl").write_text(first + "\n")
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "has no steps yet: there is nothing to judge" in capsys.readouterr().err


def test_hostile_completions_do_not_steer_the_terminal(
    cut_off: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from groupwise.commands import diagnose as command

    found = diagnose(cut_off)
    found.samples[0]["text"] = "\x1b[2J\x07evil\u202e"
    said = command.text(found, 100)
    assert "\x1b" not in said and "\u202e" not in said and "evil" in said


# --- what a run does about it -------------------------------------------------------------------


def test_a_rule_may_stop_the_run_and_the_same_command_goes_on(model: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 8, "engine__max_tokens": 1, "checkpoint__every_steps": 2}
    settings |= {"watch__stop": ["truncation"], "watch__snapshot": True}
    with pytest.raises(RunError, match=r"Stopped by watch\.stop after step 5: truncation"):
        cold_start.run_from(model, tmp_path / "run", **settings)
    assert cold_start.latest(tmp_path / "run") == "step_5"
    (kept,) = (tmp_path / "run" / "snapshots").iterdir()  # the last one before the rule fired
    assert kept.name == "step_4"
    assert (kept / "model.safetensors").is_file()
    assert cold_start.run_from(model, tmp_path / "run", **settings)["steps"] == 8
    said = [event["rule"] for event in cold_start.events(tmp_path / "run", "health")]
    assert said.count("truncation") == 1  # and not again


def test_an_unknown_rule_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'truncation'"):
        cold_start.run_from(model, tmp_path, watch__stop=["truncatoin"])


def test_a_guard_that_stops_the_run_leaves_a_finding(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step has no metrics line: the event is what is left."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def gone(completion, answer, calls=[0]):\n"
        "    calls[0] += 1\n"
        "    if calls[0] > 90: raise OSError('gone')\n"
        "    return 0.5\n"
    )
    with pytest.raises(Exception, match="gone"):
        cold_start.run_from(
            model, tmp_path / "run", steps=40, eval__every=0,
            reward__parts={f"{rewards}:gone": 1.0},
        )  # fmt: skip
    found = diagnose(tmp_path / "run")
    assert found.first is not None and found.first.rule.name == "grader errors"
    assert found.first.step == found.steps + 1
    assert any("gone" in event["text"] for event in found.events)


def test_events_of_another_version_are_left_out(tmp_path: Path) -> None:
    """Whoever wrote them, they must not end the diagnosis, nor its exit status lie."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    (tmp_path / "events.jsonl").write_text(
        '{"step": 9, "kind": "health", "rule": "truncation", "text": "no numbers"}\n'
        '{"step": 9, "kind": "health", "rule": "of tomorrow", "text": "unknown"}\n'
        '{"step": 9, "kind": "reward", "text": "boom"}\n'
    )
    assert main(["diagnose", str(tmp_path)]) == 0
    found = diagnose(tmp_path)
    assert found.findings == [] and [event["text"] for event in found.events] == ["boom"]


# --- other tools' logs --------------------------------------------------------------------------


REAL = json.loads((Path(__file__).parents[1] / "golden" / "trl_runs.json").read_text())
PRINTED = Path(__file__).parents[1] / "golden" / "trl_printed.log"
# Measured by us: TRL 1.16.0, GRPO of a random model of two layers over letters that is paid for
# vowels. Healthy; a reward that is always 1; a rate of 0.3 in place of 0.001; answers cut at 8.
VERDICTS = {
    "healthy": None,
    "constant": ("no signal", 1),
    "hot": ("sudden collapse", 3),
    "capped": ("truncation", 1),
}


@pytest.mark.parametrize("kind", VERDICTS)
def test_real_runs_of_trl(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-60"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": REAL[kind]}))
    found = diagnose(tmp_path)
    first = found.first and (found.first.rule.name, found.first.evidence.first)
    assert (found.tool, first) == ("trl", VERDICTS[kind])
    assert main(["diagnose", str(tmp_path)]) == (0 if first is None else 1)
    # What its metrics do not tell is said: none of these could have been found.
    assert {"grader errors", "reward noise", "mismatch", "reward hacking"} <= set(found.unseen)


def test_what_trl_prints_is_read_as_what_it_saves(tmp_path: Path) -> None:
    """Dicts of texts without a step, behind a progress bar, as a terminal or a file has them."""
    tool, lines = read_log(PRINTED)
    _, saved = read_log_of(REAL["constant"], tmp_path)
    assert tool == "trl" and [line["step"] for line in lines] == list(range(1, 9))
    for printed, kept in zip(lines, saved, strict=False):
        assert printed == pytest.approx(kept, rel=1e-3)
    bar = tmp_path / "bar.log"
    rows = PRINTED.read_text().splitlines()
    bar.write_text("Loading: 100%|██| 2/2\n" + "\r 12%|█ | 1/8 [00:01]\x1b[A".join(rows))
    assert read_log(bar)[1] == lines
    assert main(["diagnose", str(PRINTED)]) == 1


def read_log_of(history: list[dict[str, Any]], folder: Path) -> tuple[str, list[dict[str, Any]]]:
    file = folder / "log.jsonl"
    file.write_text("\n".join(map(json.dumps, history)))
    return read_log(file)


def test_trl_by_its_last_checkpoint_and_under_any_name(tmp_path: Path) -> None:
    for step in (9, 40):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        state = {"global_step": step, "log_history": REAL["healthy"][:step]}
        (folder / "trainer_state.json").write_text(json.dumps(state, indent=2))
    steps = diagnose(tmp_path).steps
    assert steps > 30  # of the later one; its evaluations are entries of their own
    renamed = tmp_path / "state.json"
    (tmp_path / "checkpoint-40" / "trainer_state.json").rename(renamed)
    assert diagnose(renamed).steps == steps
    renamed.write_text(json.dumps(REAL["healthy"], indent=1))
    _, lines = read_log(renamed)
    assert len(lines) == 60  # training and evaluation of a step are one
    held_out = [line["eval/reward"] for line in lines if "eval/reward" in line]
    assert len(held_out) == 6


def test_advice_names_their_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tool, table in CALLED.items():
        for ours, theirs in table.items():
            assert ours.startswith(ELSEWHERE[theirs.rpartition(".")[2]]), tool
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps({"log_history": REAL["capped"]}))
    main(["diagnose", str(file)])
    assert "In trl, engine.max_tokens is max_completion_length" in capsys.readouterr().out
    assert names_in_tool("halve recipe.gate.high", "verl").endswith("actor.clip_ratio_high.")
    assert names_in_tool("recipe.gate.highest", "trl") == names_in_tool("x", "groupwise") == ""


@pytest.mark.parametrize("bad", ["NaN", "Infinity", "-Infinity"])
def test_a_loss_that_is_not_finite(bad: str, tmp_path: Path) -> None:
    file = tmp_path / "trainer_state.json"
    lines = [json.dumps(line) for line in REAL["healthy"][:8]]
    lines[6] = lines[6].replace('"grad_norm": ', f'"grad_norm": {bad}, "was": ')
    file.write_text('{"log_history": [' + ",".join(lines) + "]}")
    found = diagnose(file)
    assert found.first is not None and found.first.rule.name == "gradient"
    assert found.first.evidence.first == found.first.step == 7


def test_broken_logs(tmp_path: Path) -> None:
    """Torn, strange and hostile lines are left out; what can't be read at all is said."""
    file = tmp_path / "odd.log"
    good = PRINTED.read_text()
    odd = [
        "{'loss': __import__('os').abort()}",
        "{'step': 1e999, 'reward': 1}",
        '{"step": NaN, "reward": 1}',
        "{'step': -3, 'reward': 1}",
        "{'a': " * 500,
        "[1, 2]",
        "{1, 2}",
        "{'loss'",
    ]
    file.write_text("\n".join(odd) + "\n" + good + good[:50])
    assert [line["step"] for line in read_log(file)[1]] == list(range(1, 9))
    state = tmp_path / "trainer_state.json"
    for text in ('{"log_history": [', "{}", '{"log_history": 3}'):
        state.write_text(text)
        with pytest.raises(RunError, match="not JSON with a log_history"):
            diagnose(state)


def verl_metrics(n: int) -> dict[str, Any]:
    """Truncated answers from step 8 on."""
    return {
        "actor/entropy": 0.5, "actor/pg_clipfrac": 0.001, "actor/grad_norm": 0.3,
        "critic/score/mean": 0.3, "critic/rewards/mean": 0.29,
        "response_length/mean": 900.0, "response_length/clip_ratio": 0.01 if n < 8 else 0.4,
        "val-core/openai/gsm8k/reward/mean@1": 0.5, "val-core/aime/acc/mean@32": 0.1,
    }  # fmt: skip


@pytest.mark.parametrize("form", ["console", "numpy", "file"])
def test_verl(form: str, tmp_path: Path) -> None:
    def line(n: int) -> str:
        named = verl_metrics(n)
        if form == "file":
            return json.dumps({"step": n, "data": named})
        value = "{:.3f}".format if form == "console" else "np.float64({!r})".format
        pairs = " - ".join(f"{name}:{value(x)}" for name, x in named.items())
        return f"\x1b[36m(TaskRunner pid=123)\x1b[0m step:{n} - {pairs}"

    file = tmp_path / ("verl.jsonl" if form == "file" else "verl.log")
    noise = "" if form == "file" else "INFO starting - actor: ready\n"
    file.write_text(noise + "\n".join(line(n) for n in range(1, 21)) + "\n")
    found = diagnose(file)
    assert found.tool == "verl"
    assert found.first is not None and found.first.rule.name == "truncation"
    assert found.first.evidence.first == 8
    _, lines = read_log(file)
    assert lines[0]["eval/accuracy"] == pytest.approx(0.3)
    assert lines[0]["reward/mean"] == pytest.approx(0.3)


def test_a_log_of_nobody_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text('{"step": 1, "train/foo": 2}\n')
    with pytest.raises(RunError, match="no metric that is known"):
        diagnose(file)


# --- the plot -----------------------------------------------------------------------------------


def test_a_plot_has_a_column_for_each_value_and_an_arrow() -> None:
    points = [Point(step, float(step)) for step in range(8)]
    lines = plot(points, 8, mark=3, ascii_only=True)
    columns = [line.partition("|")[2] for line in lines[:6]]
    heights = [sum(row[at] == "#" for row in columns) for at in range(8)]
    assert heights == sorted(heights) and heights[0] == 0 and heights[-1] == 6
    assert lines[-1].index("^") - lines[0].index("|") - 1 == 3
    assert lines[0].split()[0] == "7"


def test_a_plot_of_many_steps_keeps_its_spike() -> None:
    points = [Point(step, 100.0 if step == 613 else 1.0) for step in range(1000)]
    lines = plot(points, 50)
    assert "█" in lines[0] and max(map(len, lines)) < 80
    assert plot([Point(1, float("nan"))], 10) == ["  no values"]
    assert len(plot([Point(1, 2.0), Point(2, 2.0)], 10)) == 7
