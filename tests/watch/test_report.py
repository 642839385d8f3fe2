"""report.html, summary.json and the catalogue of metrics."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from batches import POLICY_RECIPES, learner_outputs, leaves, random_sample
from graded_rollouts import rollout

from groupwise import Pairs, batch_phase, passes, recipe, token_phase
from groupwise.config import load
from groupwise.config.fields import CurriculumSettings
from groupwise.data.curriculum import Curriculum
from groupwise.data.curriculum import measures as curriculum_measures
from groupwise.errors import RunError
from groupwise.evaluate.monte_carlo import Agreement
from groupwise.losses.routing import RouteCounts, route_metrics
from groupwise.losses.unpaired import AnswerLoss
from groupwise.methods.composition import PairRecipe
from groupwise.optim.learned import RoleUpdates
from groupwise.optim.roles.critic import Critic, value_measures
from groupwise.optim.roles.implicit_reward import reward_measures
from groupwise.optim.roles.teacher import Teacher
from groupwise.optim.routing import RouteRecord
from groupwise.optim.step import StepOutcome
from groupwise.optim.unpaired import answer_metrics
from groupwise.probing import collecting
from groupwise.recipes import RECIPES
from groupwise.records import CalledTool, Episode, TurnFacts
from groupwise.runfiles import catalogue
from groupwise.runfiles.files import storable
from groupwise.runfiles.folder import Event, RunFolder
from groupwise.runfiles.recorder import Recorder
from groupwise.runfiles.rollouts import Row
from groupwise.stages import stage_of
from groupwise.stages.coefficients import measures as coefficient_measures
from groupwise.stages.collected import Collected
from groupwise.watch.chart import MOST_POINTS, Curve, Point, Scale, smooth, svg, thin, ticks
from groupwise.watch.costs import costs
from groupwise.watch.episodes import turn_measures
from groupwise.watch.report import curves, report_page, write_report, write_summary
from groupwise.watch.samples import sample_measures, wasted

HOSTILE = (
    '</pre><script>alert("x")</script><img src=x onerror=alert(1)> &lt; {body} '
    "\x00\x1b[31m\u202eabc\ud800 ' \" </title></style><!--"
)


def make_run(path: Path, steps: int = 30, hostile: str = "4") -> RunFolder:
    run = RunFolder(path)
    run.check_writable()
    run.write_config(f'steps = {steps}\n\n[data]\nsystem = """{storable(hostile)}"""\n')
    run.write_manifest({"data": hostile, "weights": "w"}, seconds=60.0, tokens=1000)
    with Recorder(run) as made:
        made.step(0, [], {"eval/accuracy": 0.25, "eval/accuracy_stderr": 0.05})
        for step in range(1, steps + 1):
            rows = [
                Row(1, 0, 0, i, (1,), (2,), [0.0], reward=float(i), correct=bool(i),
                    prompt_text=f"{hostile} prompt", text=f"{hostile} text {step}")
                for i in range(2)
            ]  # fmt: skip
            metrics = {
                "reward/mean": step / steps,
                "groups/dead_share": 0.25,
                "groups/count": 8.0,
                "length/mean": 4.0,
                "entropy/mean": None if step == 5 else 1.0,
                "cost/tokens": 10 * step,
                "time/step": 2.0,
                "time/update": 1.5,
            }
            if step == steps:
                metrics |= {"eval/accuracy": 0.75, "eval/accuracy_stderr": 0.05}
            events = [Event(3, hostile, hostile)] if step == 3 else []
            made.step(step, rows, metrics, events)
    return run


def evaluation(accuracy: float, completion: str) -> dict[str, Any]:
    example = {"prompt": HOSTILE, "answer": HOSTILE, "completion": completion, "correct": True}
    return {"accuracy": accuracy, "stderr": 0.05, "reward": accuracy, "examples": [example]}


class Page(HTMLParser):
    """Checks that every tag is closed, and collects tags, attributes and text."""

    VOID = frozenset({"meta", "br", "line", "path", "circle", "polyline"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


# --- the page -----------------------------------------------------------------------------------


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    """From the prompt, the completion, an answer, an event, the configuration, a name, a hash."""
    name = "<script>alert(1)<!--{body}"
    run = make_run(tmp_path / name, hostile=HOSTILE.replace("/", "∕") + "</script>")
    unfinished = report_page(run)
    write_summary(
        run, steps=30, seconds=60.0, before=evaluation(0.2, HOSTILE), after=evaluation(0.8, HOSTILE)
    )
    for text in (unfinished, write_report(run).read_text("utf-8")):
        page = Page(text)
        assert not page.tags & {"script", "img", "iframe", "object", "embed", "link", "base", "a"}
        assert not [key for key, _ in page.attributes if key.startswith("on") or key == "src"]
        assert not set(text) & {"\x00", "\x1b", "\u202e"}
        assert "<script" not in text
        words = "".join(page.words)
        assert '<script>alert("x")' in words  # and yet it can be read
        assert "\\x1b[31m\\u202eabc?" in words


def test_the_page_stands_alone(tmp_path: Path) -> None:
    text = report_page(make_run(tmp_path / "run"))
    assert not re.search(r"https?:|//|url\(|@import|<script", text)
    assert "default-src 'none'" in text
    assert '<html lang="en">' in text and "<title>run: groupwise run</title>" in text
    assert "prefers-color-scheme: dark" in text
    page = Page(text)
    assert page.tags >= {"main", "h1", "h2", "figure", "figcaption", "svg", "title", "desc"}
    ids = [value for key, value in page.attributes if key == "id"]
    assert len(ids) == len(set(ids)) == 14
    labelled = {v for k, value in page.attributes if k == "aria-labelledby" for v in value.split()}
    assert labelled == set(ids)


def test_the_page_says_what_happened(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    unfinished = report_page(run)
    assert "Unfinished:</strong> step 30 of 30" in unfinished
    assert "4 text 1<" in unfinished and "4 text 30<" in unfinished and "text 15" not in unfinished
    write_summary(
        run, steps=30, seconds=75.0, before=evaluation(0.25, "7"), after=evaluation(0.75, "8")
    )
    text = report_page(run)
    for part in ("Finished after 30 steps", "25.0 % → 75.0 %", "0.033 → 1.000", "1:15",
                 "75 % at step 1", "time in update", "45.0 s", "± 5 %", "steps = 30"):  # fmt: skip
        assert part in text, part
    assert "4 text 1<" not in text  # the held-out samples instead
    assert "no values" in text  # no gradient norm was recorded


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.check_writable()
    run.write_config("steps = [")
    text = report_page(run)
    assert "step 0 so far" in text and "No rollouts yet" in text and "No manifest yet" in text
    with open(run.metrics, "wb") as file:
        file.write(b'{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')
    assert "step 1 so far" in report_page(run)


def test_not_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"not a run folder.*runs/demo"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_long_texts_and_many_events_are_cut(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1, hostile="x" * 10_000)
    run.add_events([Event(1, "note", f"number {i};") for i in range(300)])
    text = report_page(run)
    assert "… (6,007 characters more)" in text  # " text 1" included, 4,000 shown
    assert "number 299;" in text and "number 100;" in text and "number 99;" not in text
    assert "The last 200 of 300" in text


# --- the summary --------------------------------------------------------------------------------


def test_the_summary(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    given = evaluation(0.25, "7"), evaluation(0.75, "8")
    found = write_summary(run, steps=1, seconds=2.5, before=given[0], after=given[1])
    stored = json.loads(run.summary.read_text("utf-8"))
    assert (stored["steps"], stored["seconds"]) == (1, 2.5)
    assert (stored["accuracy_before"], stored["accuracy_after"]) == (0.25, 0.75)
    assert (stored["reward_before"], stored["reward_after"]) == (0.25, 0.75)
    (sample,) = stored["samples"]
    assert (sample["before"], sample["after"], sample["correct_after"]) == ("7", "8", True)
    assert found["accuracy_after"] == 0.75
    empty = write_summary(run, steps=1, seconds=2.5, before={}, after={})
    assert empty["accuracy_after"] is None and empty["samples"] == []


# --- charts -------------------------------------------------------------------------------------


def test_ticks_are_round() -> None:
    assert ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(1, 100) == [20.0, 40.0, 60.0, 80.0, 100.0]
    assert ticks(-0.0003, 0.0009) == [-0.0002, 0.0, 0.0002, 0.0004, 0.0006, 0.0008]
    assert ticks(3, 3) == [3]


def test_points_stand_where_they_should() -> None:
    points = [Point(0, 0.0), Point(10, 1.0)]
    scale = Scale.of(Curve("a", points, share=True), points)
    assert (scale.x(0), scale.x(10), scale.y(0.0), scale.y(1.0)) == (46.0, 350.0, 164.0, 10.0)
    assert (scale.x(5), scale.y(0.5)) == (198.0, 87.0)


@pytest.mark.parametrize(
    "values", [[], [3.0], [2.0, 2.0, 2.0], [0.0, 0.0], [float("nan"), 1.0], [-5.0, -1.0], [1e-9]]
)
def test_odd_curves_are_drawn(values: list[float]) -> None:
    points = [Point(step, value, 0.1) for step, value in enumerate(values)]
    for sparse in (False, True):
        text = svg(Curve("a <b>", points, sparse=sparse))
        ElementTree.fromstring(text)
        assert "nan" not in text and "inf" not in text


def test_smoothing_looks_back_only() -> None:
    points = [Point(i, float(v)) for i, v in enumerate([0, 3, 6, 0])]
    assert [p.value for p in smooth(points, 2)] == [0.0, 1.5, 4.5, 3.0]


def test_a_long_curve_keeps_its_spikes() -> None:
    points = [Point(i, 100.0 if i == 7_777 else -50.0 if i == 123 else 0.0) for i in range(10_000)]
    kept = thin(points)
    assert len(kept) <= MOST_POINTS
    assert {Point(7_777, 100.0), Point(123, -50.0)} <= set(kept)
    assert [p.step for p in kept] == sorted(p.step for p in kept)


# --- the catalogue ------------------------------------------------------------------------------

OF_THE_LOOP = [
    "eval/accuracy", "eval/accuracy_stderr", "eval/reward", "eval/length",
    "eval/truncated_share", "eval/failed_share", "length/truncated_share",
    "pairs/chosen_nll", "eval/pairs_accuracy", "eval/nll", "eval/preference_loss",
    "eval/token_accuracy", "supervised/nll", "supervised/learned_share",
    "judge/judgements", "judge/tokens", "judge/unasked_share", "judge/failed_share", "judge/gap",
    "judge/length_gap", "judge/agreement", "judge/agreement_stderr", "eval/judge_score",
    "eval/judge_failed_share",
    "answers/baseline", "answers/mismatched", "length/sampled_mean", "optim/grad_norm",
    "optim/learning_rate", "optim/skipped",
    "updates/count", "loss/policy", "loss/total", "reward/part/number",
    "reward/part/mine.py:score", "reward/failed_share", "reward/sampled_mean", "refill/rounds",
    "reward/missing_share", "refill/tokens", "refill/drawn_groups", "correct/mean",
    "time/rollout", "time/grade", "time/score", "time/rank_gather",
    "time/rank_imbalance", "time/update", "time/eval", "time/checkpoint", "time/run", "time/step",
    "time/tokens_per_second",
    "time/share/rollout", "time/update_flops_share", "time/rollout_bytes_per_second",
    "time/rollout_bandwidth_share", "time/bottleneck",
    "memory/peak_bytes", "cost/tokens", "data/epoch", "weights/version", "weights/fingerprint",
    "optim/micro_batches", "gate/mismatch_mean", "gate/mismatch_p99", "gate/mismatch_max",
    "pairs/count", "optim/grad_snr", "mismatch/abs_p99", "mismatch/limit",
    "lag/mean", "lag/max", "lag/versions", "lag/mixed_share", "lag/impure_share",
    "lag/waiting_length", "lag/effective_share", "time/learner_idle", "time/sampler_idle",
    "sync/probe_mean", "sync/probe_max", "sync/restarts", "sync/resubmitted", "time/sync",
    "vineppo/branches", "vineppo/branch_tokens", "vineppo/valued_steps", "vineppo/truncated_share",
    "vineppo/ungraded_share", "supervised/nll", "supervised/learned_share", "eval/token_accuracy",
]  # fmt: skip


def of_models_that_score() -> set[str]:
    """All that is measured of a step, and of held-out rows."""
    pair = {"chosen": "ab", "rejected": "c"}
    steps = {"completions": ["a", "b"], "labels": [True, False]}
    names = set[str]()
    for kind, columns, scores in (
        ("reward_model", pair, [[1.0], [0.0]]),
        ("process_reward_model", steps, [[1.0, 0.0]]),
    ):
        rows = [rollout("ab", 1.0, True), rollout("c", 0.0, False)][: len(scores)]
        task = replace(rows[0].task, columns=columns)
        stage = stage_of(load(recipe=kind))
        measured = stage.measured([[replace(row, task=task) for row in rows]], scores)
        assert set(stage.WATCHED) <= measured.keys()
        names |= {*measured, *(f"eval/{name.partition('/')[2]}" for name in stage.WATCHED)}
    return names


def measured_of_roles() -> set[str]:
    """What a critic and an implicit reward model measure, and what their updates do."""
    made: set[str] = set()
    for name, role, measure in (
        ("ppo", "critic", lambda b: value_measures(b, b.prepared["value_loss"]["return_NT"])),
        ("prime", "prm", lambda b: reward_measures(b, 0.05)),
    ):
        batch = batch_phase(recipe(name), random_sample(0).build()).batch
        done = RoleUpdates(role, [StepOutcome(1.0, False, False, None)], [torch.zeros(())])
        made |= {*measure(batch), *done.metrics()}
    made |= {*Agreement(8, 0.5, 0.1, 0.1, (0.1, None), 0.05).metrics("eval/critic")}
    teacher = object.__new__(Teacher)  # it measures what is in the batch
    taught = batch_phase(recipe("distill"), random_sample(0).build()).batch
    made |= {*teacher.measures(recipe("distill"), taught)}
    critic = object.__new__(Critic)  # without a model: its updates are measured by the batch
    term = critic.tally(recipe("ppo"), with_values(random_sample(0)))
    return made | {*term.read()}


def measured_of_routes() -> set[str]:
    """What is measured of a mixture whose tokens take the experts that are on record."""
    one_L, some = torch.ones(2), torch.tensor(1.0)
    record = RouteRecord(torch.zeros(1, 2, 1, dtype=torch.int16), compared=2, disagreeing=1)
    return {*route_metrics([RouteCounts(torch.ones(2, 4), one_L, one_L, some, some)])} | {
        *record.metrics()
    }


def measured_of_turns() -> set[str]:
    """What is measured of episodes."""
    call = CalledTool("search", "{}", "ok")
    turns = (TurnFacts(calls=(call,)), TurnFacts(calls=(call,)))
    row = rollout("ab", 1.0, True)
    played = replace(row.completion, episode=Episode("done", turns, reward=1.0))
    return {*turn_measures([[replace(row, completion=played)]])}


def measured_of_curricula() -> set[str]:
    """What is measured where prompts go by their pass rates."""
    rates = Curriculum(CurriculumSettings(easy=0.5), {0: 1.0})
    row = rollout("ab", 1.0, True)
    return {*curriculum_measures([rates]), *Collected([[row], [row, row]]).metrics()}


def measured_of_coefficients() -> set[str]:
    """What is measured where coefficients change."""
    control = {"penalty.coef": "kl_target(target=6.0)"}
    step = {"kl/ref_k1": 0.1, "tokens/count": 8.0, "tokens/learned_share": 1.0, "length/mean": 4.0}
    return set(coefficient_measures(load(recipe="grpo", **{"train.coefs": control}), {}, step))


def with_values(sample: Any) -> Any:
    batch = batch_phase(recipe("ppo"), sample.build()).batch
    return batch.with_outputs(value_NT=batch.stream("old_value_NT"))


def test_what_the_phases_measure_is_documented() -> None:
    """Every recipe on a batch with all streams, so that every measure is taken."""
    group = [rollout("ab", 1.0, True), rollout("ab", 1.0, True), rollout("c", 0.0, False)]
    names = {*OF_THE_LOOP, *sample_measures([group, group], 0), *wasted(None, 0, 1)}
    names |= set(costs(flops=1.0, seconds=1.0, price=1.0, before=0.0, after=1.0))
    names |= set(collecting._measures(1, [group], 1.0))
    sample = random_sample(0)
    for name in POLICY_RECIPES:
        made, leaf = recipe(name), leaves(sample)
        extra = {"length_exponent": leaf.exponent} if "length_exponent" in made.outputs else {}
        result = batch_phase(made, sample.build(**extra))
        first = passes(made, result.batch)[0]
        done = token_phase(made, first, **learner_outputs(made, sample, leaf))
        names |= {*result.metrics, *done.tally.read(), *(f"loss/{term}" for term in done.terms)}
    for entry in RECIPES.values():
        if isinstance(entry, PairRecipe):
            pairs = Pairs(*(torch.zeros(2) for _ in range(4)), *(torch.ones(2) for _ in range(2)))
            prepare = entry.preference.definition.traits.prepare
            pairs = replace(pairs, columns=prepare(pairs, dict(entry.preference.params)))
            names |= set(entry.preference(pairs).metrics())
    both_N = torch.tensor([True, False])
    names |= set(answer_metrics([AnswerLoss(torch.zeros(2), torch.zeros(2), both_N)]))
    names |= of_models_that_score() | measured_of_roles() | measured_of_routes()
    names |= measured_of_turns() | measured_of_curricula() | measured_of_coefficients()
    assert {"kl/ref", "entropy/mean", "mismatch/effective_sample_share"} <= names  # it did measure
    assert [name for name in names if name != "step" and catalogue.find(name) is None] == []
    families = tuple(key[:-1] for key in catalogue.CATALOGUE if key.endswith("*"))
    named = {name for name in catalogue.CATALOGUE if not name.endswith("*")}
    assert named <= names, "documented, but nothing measures it"
    assert any(name.startswith(families) and name not in named for name in names)


def test_entries_are_found_by_name_and_by_family() -> None:
    assert catalogue.find("reward/mean") == catalogue.CATALOGUE["reward/mean"]
    assert catalogue.find("reward/part/x") == catalogue.CATALOGUE["reward/part/*"]
    assert catalogue.find("new/one") is None


def test_every_entry_says_something() -> None:
    for name, entry in catalogue.CATALOGUE.items():
        assert all(entry), name


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text("utf-8") == catalogue.metrics_page(), "run `make docs`"


def test_the_report_says_what_it_cost() -> None:
    """Money and its point as last known, waste by cause as the mean of the steps."""
    from groupwise.watch.report import _spent

    lines = [
        {"step": 1, "time/money": 1.0, "cost/wasted/dead": 0.5, "cost/wasted/dropped": 0.0},
        {"step": 2, "time/money": 3.5, "time/money_per_point": 0.25, "cost/wasted/dead": 0.25},
        {"step": 3, "time/money": 4.0, "cost/wasted/dead": 0.0, "cost/flops": 2.5e12},
    ]
    assert dict(_spent(lines)) == {
        "money": "4.00",
        "money for a point of held-out accuracy": "0.25",
        "operations of the models": "2.5e+12 FLOP",
        "tokens dead, mean of the steps": "25 %",
        "tokens dropped, mean of the steps": "0 %",
    }
    assert _spent([{"step": 1}]) == []


def test_the_training_reward_is_one_number() -> None:
    """Panel, report and viewer show that of all samples; of older runs, what they have."""
    new = [{"step": 1, "reward/mean": 0.7, "reward/sampled_mean": 0.8}]
    drawn = {curve.title: (name, curve.points[0].value) for name, curve in curves(new, [])
             if curve.points}  # fmt: skip
    assert drawn == {"Training reward": ("reward/sampled_mean", 0.8)}
    old = {name for name, curve in curves([{"step": 1, "reward/mean": 0.7}], []) if curve.points}
    assert old == {"reward/mean"}
