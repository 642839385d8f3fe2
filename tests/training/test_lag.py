"""Sampling ahead of learning: the same bits as a stale sampler, no prompt lost, none repeated."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from processes import exit_code
from runs import left_behind, metrics, quiet, run, small, start
from safetensors.torch import load_file

from groupwise.data.cursor import Cursor
from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.native.process import ProcessEngine
from groupwise.engine.protocol import Engine, Request, Sampling, State, Ticket, Wrote
from groupwise.errors import ConfigError, EngineError, RunError
from groupwise.graders.rubric import Grader
from groupwise.model.formats.checkpoint import Loaded
from groupwise.records import Completion, Grade, Task, TokenBatch, VersionRun
from groupwise.runfiles import rollouts
from groupwise.stages.checks import check_config, refusals
from groupwise.stages.stage import StepUpdates
from groupwise.stages.waiting_answers import Waiting, packed, unpacked
from groupwise.training.ahead import effective_size
from groupwise.training.loop import train
from groupwise.training.together import check_team

LAGGING: dict[str, Any] = {"recipe": "tis", "steps": 6, "train__lag": 1, "eval__tasks": 0}
JUDGED: dict[str, Any] = LAGGING | {"eval__tasks": 8, "eval__every": 4}
# Dynamic sampling, several updates a step, an anchor at the sampler's probabilities.
DYNAMIC: dict[str, Any] = {"recipe": "olmo3", "refills": 2, "recipe__schedule__updates": 2}
LONG: dict[str, Any] = {"engine__max_tokens": 10, "data__options": {"digits": 2}}


def step_rows(folder: Path, step: int) -> list[dict[str, Any]]:
    return rollouts.read(folder / "rollouts" / f"step_{step}.parquet").to_pylist()


def keys(folder: Path, steps: int) -> list[tuple[int, int]]:
    """The draws that were learned from or sent away, in the order in which they were drawn."""
    found: list[tuple[int, int]] = []
    for step in range(1, steps + 1):
        own = {(row["prompt_id"], row["draw"]) for row in step_rows(folder, step)}
        assert not own & set(found)
        found += own
    return found


def waiting(folder: Path) -> list[tuple[int, int]]:
    """The draws that the last checkpoint holds as admitted and not learned from."""
    values = (folder / "checkpoints" / "latest" / "resume" / "values.json").read_text()
    return [(task, number) for task, number in json.loads(values)["ahead"]["keys"]]


def check_prompts(folder: Path, steps: int, lag: int, prompts: int = 4) -> None:
    """Every prompt that was drawn was learned from once or waits, and none was left out."""
    learned, left = keys(folder, steps), waiting(folder)
    assert len(left) == (lag + 1) * prompts
    values = json.loads((folder / "checkpoints/latest/resume/values.json").read_text())
    cursor = values["cursor"]
    fresh = Cursor([Task(n, "") for n in range(cursor["count"])], cursor["seed"])
    drawn = fresh.take(len(learned) + len(left))
    state = fresh.state()
    assert (state["epoch"], state["position"]) == (cursor["epoch"], cursor["position"])
    # Nothing is held out of the generator's tasks, so their places are their names.
    assert sorted(drawn) == sorted(learned + left) and list(drawn[len(learned) :]) == left


def without(lines: Sequence[dict[str, Any]], *more: str) -> list[dict[str, Any]]:
    names = ("lag/", "mismatch/limit", *more)
    return [{k: x for k, x in line.items() if not k.startswith(names)} for line in lines]


# --- the same bits ----------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [1, 3])
def test_lag_that_drains_is_a_stale_sampler_to_the_bit(lag: int, tmp_path: Path) -> None:
    own, stale = tmp_path / "lag", tmp_path / "stale"
    run(own, **JUDGED | {"train__lag": lag})
    run(stale, **JUDGED | {"train__lag": 0, "engine__weights": f"stale:{lag}"})
    assert without(metrics(own)) == without(metrics(stale))
    for step in range(1, 7):
        mine, theirs = step_rows(own, step), step_rows(stale, step)
        for row in theirs:
            assert row["weights"] == f"stale:{lag}"
            row["weights"] = "shared"
        assert mine == theirs
        assert {row["weight_version"] for row in mine} == {max(step - 1 - lag, 0)}
    weights = [x / "checkpoints" / "latest" / "model.safetensors" for x in (own, stale)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    lags = [line["lag/mean"] for line in metrics(own)[1:]]
    assert lags == [min(step, lag) for step in range(6)]
    assert lags == [line["lag/max"] for line in metrics(own)[1:]]


def test_a_process_beside_the_learner_gives_the_same_bits(tmp_path: Path) -> None:
    """Whatever the timing; and what is left behind at a stop is the same, too."""
    changes = JUDGED | DYNAMIC | {"train__lag": 2, "steps": 5}
    run(tmp_path / "one", **changes)
    run(tmp_path / "two", engine__servers=1, **changes)
    assert left_behind(tmp_path / "one") == left_behind(tmp_path / "two")
    lines = [json.loads(x) for x in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert {"time/learner_idle", "time/sampler_idle"} <= lines[-1].keys()


@pytest.mark.parametrize("sync", ["drain", pytest.param("recompute", marks=pytest.mark.slow)])
def test_a_sampler_that_is_killed_changes_no_bit(
    sync: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started again and asked again, under the same keys: nothing lost, nothing repeated."""
    changes = LAGGING | {"train__sync": sync, "steps": 4}
    wanted, counted = ProcessEngine._wanted, itertools.count(1)

    def killing(self: ProcessEngine, found: Any) -> Any:
        if next(counted) in (2, 9):
            self.sampler.process.kill()
        return wanted(self, found)

    monkeypatch.setattr(ProcessEngine, "_wanted", killing)
    run(tmp_path / "killed", engine__servers=1, **changes)
    check_prompts(tmp_path / "killed", 4, 1)
    lines = metrics(tmp_path / "killed")
    assert sum(line.get("sync/restarts", 0) for line in lines) >= 1
    events = (tmp_path / "killed" / "events.jsonl").read_text()
    assert "exit code -9" in events and "started again" in events
    if sync == "drain":  # else it hangs on timing which weights write what
        run(tmp_path / "whole", **changes)
        killed, whole = left_behind(tmp_path / "killed"), left_behind(tmp_path / "whole")
        for each in (killed, whole):
            each.pop("events")
        killed["metrics"] = [
            {k: x for k, x in line.items() if not k.startswith("sync/")} for line in lines
        ]
        assert killed == whole


class Disorderly(Engine):
    """Hands groups on in an order of its own, one by one."""

    def __init__(self, loaded: Loaded) -> None:
        self.inner = NativeEngine(loaded.model, loaded.tokenizer, seed=0, slots=16)
        self.capabilities, self.dice = self.inner.capabilities, random.Random(0)
        self.held: list[tuple[Ticket, list[Completion]]] = []
        self.orders: list[bool] = []

    @property
    def source(self) -> Any:
        return self.inner.source

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> list[Ticket]:
        return self.inner.submit(requests, sampling)

    def finished(self, wrote: Wrote | None = None) -> list[tuple[Ticket, list[Completion]]]:
        while found := self.inner.finished():
            self.held += found
        first = min((ticket for ticket, _ in self.held), default=-1)
        given = self.held.pop(self.dice.randrange(len(self.held))) if self.held else None
        self.orders += [] if given is None else [given[0] == first]
        return [] if given is None else [given]

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        self.inner.cancel(tickets)

    def sync(self, version: int) -> None:
        self.inner.sync(version)

    def state(self) -> State:
        return {}


def test_the_order_in_which_answers_come_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are graded and learned from in their own order, the oldest first."""
    graded: list[int] = []
    grade = Grader.grade

    def noting(self: Grader, asked: Any) -> Any:
        asked = list(asked)
        graded.extend(one[0].id for one in asked)
        return grade(self, asked)

    monkeypatch.setattr(Grader, "grade", noting)
    run(tmp_path / "orderly", **LAGGING)
    before = list(graded)
    graded.clear()
    made: list[Disorderly] = []
    torch.set_num_threads(1)
    train(
        small(**LAGGING),
        tmp_path / "disorderly",
        quiet(),
        engine=lambda loaded: made.append(Disorderly(loaded)) or made[-1],
    )
    assert left_behind(tmp_path / "orderly") == left_behind(tmp_path / "disorderly")
    assert not all(made[0].orders)
    assert graded == before


@pytest.mark.parametrize("sync", ["drain", "recompute"])
def test_n_and_n_more_steps_equal_2n(sync: str, tmp_path: Path) -> None:
    """Answers that wait are in the checkpoint; those under way begin anew.

    So the bits are those of the whole run only where nothing is under way when it ends.
    """
    changes = LAGGING | DYNAMIC | {"train__lag": 2, "train__sync": sync}
    run(tmp_path / "whole", **changes | {"steps": 5})
    run(tmp_path / "halves", **changes | {"steps": 3})
    half = load_file(tmp_path / "halves" / "checkpoints/latest/resume/ahead.safetensors")
    assert any("logp_T" in name for name in half)
    run(tmp_path / "halves", **changes | {"steps": 5})
    for folder in ("whole", "halves"):
        check_prompts(tmp_path / folder, 5, 2)
    if sync == "drain":
        whole, halves = left_behind(tmp_path / "whole"), left_behind(tmp_path / "halves")
        assert halves == whole


def test_a_stop_between_sampling_and_learning_loses_nothing(tmp_path: Path) -> None:
    """What the step took is the oldest again."""
    changes = LAGGING | DYNAMIC | {"steps": 4}
    run(tmp_path / "whole", **changes)
    child = start(tmp_path / "stopped", **changes | {"steps": 400, "checkpoint__every_steps": 0})
    while not (tmp_path / "stopped" / "metrics.jsonl").exists():
        time.sleep(0.02)
    os.kill(child, signal.SIGTERM)
    assert exit_code(child) == 1
    done = len(metrics(tmp_path / "stopped")) - 1
    check_prompts(tmp_path / "stopped", done, 1)
    if done < 4:
        run(tmp_path / "stopped", **changes)
        assert keys(tmp_path / "stopped", 4) == keys(tmp_path / "whole", 4)


# --- weights in the middle of answers ---------------------------------------------------------


@pytest.mark.parametrize("sync", ["recompute", "keep"])
def test_answers_go_on_under_new_weights(sync: str, tmp_path: Path) -> None:
    """In one process it is a function of the configuration, to the last bit."""
    changes = LAGGING | LONG | {"train__sync": sync, "train__lag": 2, "steps": 4}
    run(tmp_path / "one", **changes)
    if sync == "recompute":
        run(tmp_path / "two", **changes)
        assert left_behind(tmp_path / "one") == left_behind(tmp_path / "two")
    check_prompts(tmp_path / "one", 4, 2)
    lines, mixed = metrics(tmp_path / "one")[1:], 0
    for step, line in enumerate(lines, 1):
        rows = step_rows(tmp_path / "one", step)
        runs = [
            [VersionRun(**each) for each in row.get("weight_versions") or ()]
            or [VersionRun(row["weight_version"], len(row["token_ids"]))]
            for row in rows
        ]
        tokens = [(step - 1 - r.version, r.tokens) for each in runs for r in each]
        total = sum(n for _, n in tokens)
        assert [each[0].version for each in runs] == [row["weight_version"] for row in rows]
        assert [sum(r.tokens for r in x) for x in runs] == [len(row["token_ids"]) for row in rows]
        assert line["lag/mean"] == pytest.approx(sum(lag * n for lag, n in tokens) / total)
        assert line["lag/max"] == max(lag for lag, _ in tokens) <= 2
        assert line["lag/versions"] == pytest.approx(sum(map(len, runs)) / len(runs))
        assert line["lag/mixed_share"] == sum(len(each) > 1 for each in runs) / len(runs)
        impure = sum(r.tokens for each in runs for r in each if not r.pure) / total
        assert line["lag/impure_share"] == impure and (impure == 0 or sync == "keep")
        mixed += sum(len(each) > 1 for each in runs)
    assert mixed > 0
    assert (sum(line["lag/impure_share"] for line in lines) > 0) == (sync == "keep")


# --- what is measured -------------------------------------------------------------------------


def test_the_effective_share_by_hand() -> None:
    """Weights 1, 1, 2, of a fourth token that nobody learned from: (4)^2 / (3 * 6)."""
    sampler_NT = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    learner_NT = sampler_NT + torch.tensor([[0.0, 0.0], [2.0, 1.0]]).log().nan_to_num(neginf=0.0)
    learner_NT[1, 0] = sampler_NT[1, 0] + torch.tensor(2.0).log()
    mask_NT = torch.tensor([[True, True], [True, False]])
    batch = TokenBatch.__new__(TokenBatch)
    object.__setattr__(batch, "sampler_logp_NT", sampler_NT)
    object.__setattr__(batch, "mask_NT", mask_NT)
    updates = StepUpdates([], {}, None, batch, {"learner_logp": learner_NT})  # type: ignore[arg-type]
    assert effective_size(updates)["lag/effective_share"] == pytest.approx(16 / 18)


def test_files_without_mixed_answers_are_as_before(tmp_path: Path) -> None:
    """The column is there only where it says something, and the version of the schema stays."""
    run(tmp_path / "plain", **LAGGING | {"steps": 1})
    table = pq.read_table(tmp_path / "plain" / "rollouts" / "step_1.parquet")
    assert "weight_versions" not in table.column_names
    assert "weight_versions" not in rollouts.to_table([], 0).column_names
    row = rollouts.Row(1, 0, 0, 0, [1], [2, 3], [0.0, 0.0])
    runs = (VersionRun(0, 1), VersionRun(1, 1, pure=False))
    two = rollouts.Row(1, 0, 0, 1, [1], [2, 3], [0.0, 0.0], weight_versions=runs)
    rollouts.write(tmp_path / "mixed.parquet", [row, two], 1)
    read = rollouts.read(tmp_path / "mixed.parquet").to_pylist()
    assert read[0]["weight_versions"] == []
    assert [VersionRun(**x) for x in read[1]["weight_versions"]] == list(two.weight_versions)


def test_answers_that_wait_come_back_as_they_were() -> None:
    """Rewards that are missing or parts of them, process rewards, experts, likeliest tokens."""

    def answer(length: int, **more: Any) -> Completion:
        return Completion(tuple(range(length)), torch.rand(length), "stop", 3, **more)

    grades = [
        Grade(0.5, {"a": None, "b": 1.5}, True, "ok", "good", ((2, 0.25), (4, 1.0))),
        Grade(None, {}, None, "error", "it broke"),
    ]
    rich = {
        "topk_id_TK": torch.randint(9, (4, 2)),
        "topk_logp_TK": torch.rand(4, 2),
        "routes_TLK": torch.randint(9, (6, 3, 2), dtype=torch.int16),
    }
    mixed = (VersionRun(3, 1), VersionRun(5, 3, pure=False))
    groups = [
        Waiting([answer(3), answer(1, weights="x")], grades),
        None,
        Waiting([answer(4, runs=mixed, **rich)], None),
    ]
    said, tensors = packed(groups)
    back = unpacked(json.loads(json.dumps(said)), tensors)
    assert back[1] is None
    for before, after in zip(groups, back, strict=True):
        if before is None or after is None:
            continue
        assert after.grades == before.grades
        for one, other in zip(before.written, after.written, strict=True):
            for name, x in vars(one).items():
                y = getattr(other, name)
                assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, name


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipe": "dr_grpo"}, "nothing in it corrects .*tis, icepop.*train.lag=0"),
        ({"recipe": "grpo", "recipe__schedule__updates": 4}, "nothing in it corrects"),
        ({"recipe": "remax"}, "greedy answer of the policy"),
        ({"recipe": "vineppo"}, "branches of the answers"),
        ({"recipe": "sft"}, "learns from .*source data"),
        ({"recipe": "online_dpo"}, "no pairs"),
        ({"recipe": "tis", "engine__weights": "stale:1"}, "one hides the other"),
        ({"recipe": "tis", "engine__servers": 2}, "one sampler at the most"),
        ({"recipe": "tis", "train__lag": 0, "train__sync": "keep"}, "train.sync=keep would be"),
        ({"recipe": "tis", "train__lag": 0, "engine__servers": 1, "engine__weights": "int8"},
         "has the learner's weights"),
        ({"recipe": "sft", "train__lag": 0, "engine__servers": 1}, "samples nothing"),
    ],
)  # fmt: skip
def test_what_can_not_run_ahead_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_config(small(**{"train__lag": 1} | changes))


def test_settings_that_make_no_sense_are_refused() -> None:
    for setting, value in (("train__lag", -1), ("engine__servers", -1), ("train__sync", "wait")):
        with pytest.raises(ConfigError, match=setting.replace("__", ".")):
            small(**{setting: value})
    assert not refusals(small(recipe="tis", train__lag=2))
    assert not refusals(small(recipe="grpo", recipe__ratio__anchor="sampler", train__lag=2))
    doubts = check_config(small(recipe="tis", train__lag=2, train__sync="keep"))
    assert any("that of no policy" in doubt for doubt in doubts)


def test_ranks_with_an_engine_each_take_new_weights_between_answers() -> None:
    changes = {"recipe": "tis", "train__lag": 1, "train__sync": "recompute"}
    with pytest.raises(ConfigError, match=r"train\.sync=recompute with 2 ranks"):
        check_team(small(**changes), 2)
    check_team(small(**changes | {"engine__servers": 1}), 2)


def test_another_lag_is_another_run(tmp_path: Path) -> None:
    run(tmp_path / "run", **LAGGING | {"steps": 1})
    with pytest.raises(RunError, match=r"train\.lag: 1 -> 2"):
        run(tmp_path / "run", **LAGGING | {"steps": 2, "train__lag": 2})


def test_an_error_of_the_sampler_ends_the_run_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command goes on; the sampler is asked again for what it had not finished."""
    changes = LAGGING | {"steps": 4}
    run(tmp_path / "whole", **changes)
    seen = [0]
    finished = NativeEngine.finished

    def failing(self: NativeEngine, *given: Any, **named: Any) -> Any:
        seen[0] += 1
        if seen[0] == 8:
            raise EngineError("the power went")
        return finished(self, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, "finished", failing)
        with pytest.raises(EngineError, match="the power went"):
            run(tmp_path / "failed", **changes)
    run(tmp_path / "failed", **changes)
    assert left_behind(tmp_path / "failed") == left_behind(tmp_path / "whole")


# --- kills ------------------------------------------------------------------------------------


def killed(folder: Path, kills: int, seconds: float, dice: random.Random, **changes: Any) -> int:
    """Run it to its end through so many kills at the most; how many there were."""
    done = fruitless = 0
    saved = ""
    while True:
        child = start(folder, **changes)
        if done < kills:
            # A busy machine may need longer than the first run did to get anywhere at all.
            time.sleep(seconds * dice.uniform(0.05, 0.5) * 1.3**fruitless)
            os.kill(child, signal.SIGKILL)
        code = exit_code(child)
        if code == 0:
            return done
        assert code == -signal.SIGKILL, "it failed by itself"
        done += 1
        before, saved = saved, (folder / "checkpoints" / "latest").resolve().name
        fruitless = fruitless + 1 if saved == before else 0


def test_a_few_kills_lose_and_repeat_no_prompt(tmp_path: Path) -> None:
    changes = LAGGING | DYNAMIC
    begun = time.monotonic()
    assert exit_code(start(tmp_path / "whole", **changes)) == 0
    seconds = time.monotonic() - begun
    assert killed(tmp_path / "killed", 3, seconds, random.Random(2), **changes)
    assert left_behind(tmp_path / "killed") == left_behind(tmp_path / "whole")
    check_prompts(tmp_path / "killed", 6, 1)


@pytest.mark.slow
@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("sync", ["drain", "recompute", "keep"])
@pytest.mark.parametrize("lag", [1, 3])
def test_many_kills_lose_and_repeat_no_prompt(
    lag: int, sync: str, servers: int, tmp_path: Path
) -> None:
    """Five each: fifty and more of all kinds. With `drain` the bits are those of a whole run."""
    dynamic = DYNAMIC if sync == "drain" else {}
    changes = LAGGING | dynamic | LONG | {"steps": 12, "train__lag": lag, "train__sync": sync}
    changes |= {"engine__servers": servers, "engine__slots": 24}
    begun = time.monotonic()
    assert exit_code(start(tmp_path / "whole", **changes)) == 0
    seconds = time.monotonic() - begun
    dice = random.Random(f"{lag} {sync} {servers}")
    assert killed(tmp_path / "killed", 5, seconds, dice, **changes)
    check_prompts(tmp_path / "killed", 12, lag)
    assert sorted(keys(tmp_path / "killed", 12)) == sorted(keys(tmp_path / "whole", 12))
    if sync == "drain":
        assert left_behind(tmp_path / "killed") == left_behind(tmp_path / "whole")
