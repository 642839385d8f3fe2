"""The teacher in runs: who it is, what it reads, what it leaves behind, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import metrics, quiet, small
from steps import (
    BARE,
    Start,
    advance,
    difference,
    full_logp,
    gather,
    gradient,
    learn,
    plain_logp,
    rollouts,
    weights,
)
from torch import Tensor

from groupwise.errors import ConfigError, DataError, ModelError
from groupwise.losses.distillation import divergence
from groupwise.model.formats.checkpoint import load, save
from groupwise.model.layers.attention import packed, packed_positions
from groupwise.model.layers.transformer import Policy, Transformer
from groupwise.optim.assemble import sequences_of
from groupwise.optim.roles.teacher import Teacher
from groupwise.runfiles.rollouts import read
from groupwise.stages.checks import check_config
from groupwise.training.loop import train
from groupwise.training.run import Run

RECIPES = ("distill", "gkd", "distill_topk")
PLAIN: dict[str, Any] = {"recipe__penalty__k": 5}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def teachers(start: Start) -> list[str]:
    """Two models that are the start with other weights."""
    found = []
    for number in range(2):
        made = load(start.model)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in made.model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        save(made.model, start.folder / f"teacher_{number}", made.files)
        found.append(str(start.folder / f"teacher_{number}"))
    return found


def settings(name: str, **more: Any) -> dict[str, Any]:
    return {"recipe": name, **(PLAIN if name == "distill_topk" else {}), **more}


def role(run: Run) -> Teacher:
    found = run.parts.learner.roles["teacher"]
    assert isinstance(found, Teacher)
    return found


# --- what it says ---------------------------------------------------------------------------------


def test_the_advantage_is_the_teachers_gain_at_every_token(
    start: Start, teachers: list[str], tmp_path: Path
) -> None:
    with start.opened(tmp_path / "run", recipe="distill", teacher__path=teachers[0]) as run:
        collected = gather(run)
        found = learn(run, collected)
    sequences, batch = sequences_of(collected.groups), found.batch
    assert batch is not None
    own_NT, teacher = batch.mask_NT, load(teachers[0]).model
    expected_NT = plain_logp(teacher, sequences)
    torch.testing.assert_close(batch.find("teacher_logp_NT"), expected_NT, atol=1e-5, rtol=1e-5)
    gain_NT = (expected_NT - batch.stream("sampler_logp_NT"))[own_NT]
    torch.testing.assert_close(batch.stream("advantage_NT")[own_NT], gain_NT, atol=1e-5, rtol=1e-5)
    assert found.metrics["teacher/kl"] == pytest.approx(-float(gain_NT.mean()), abs=1e-5)
    assert found.metrics["teacher/logp"] == pytest.approx(float(expected_NT[own_NT].mean()), 1e-4)


def by_formula(run: Run, teacher: Policy, collected: Any, beta: float) -> tuple[float, Tensor]:
    """The mean divergence over all tokens and its gradient, row by row and without packs."""
    model, total, tokens = run.parts.loaded.model, torch.zeros(()), 0
    for rollout in rollouts(collected):
        ids = (rollout.task.token_ids, rollout.completion.token_ids)
        text = torch.tensor([*ids[0], *ids[1]])
        hidden = model(text, packed_positions([len(text)]), packed([len(text)]))
        mine = torch.log_softmax(hidden @ model.head_weight.t(), -1)[len(ids[0]) - 1 : -1]
        theirs = full_logp(teacher, *ids)  # type: ignore[arg-type]
        total = total + divergence(mine, theirs, beta).sum()
        tokens += len(ids[1])
    loss = total / tokens
    grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    return float(loss.detach()), torch.cat([g.double().flatten() for g in grads])


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("micro", [8, 1000])
def test_gkd_learns_by_the_whole_distribution(
    beta: float, micro: int, start: Start, teachers: list[str], tmp_path: Path
) -> None:
    asked = settings("gkd", teacher__path=teachers[0], recipe__penalty__beta=beta, **BARE)
    with start.opened(tmp_path / "run", **asked, optim__micro_tokens=micro) as run:
        collected = gather(run)
        teacher = load(teachers[0]).model
        expected, slope = by_formula(run, teacher, collected, beta)
        found = learn(run, collected)
        assert found.metrics["teacher/divergence"] == pytest.approx(expected, rel=1e-4)
        assert difference(gradient(run), slope) < 1e-3


def test_all_tokens_as_top_k_give_the_gradient_of_the_whole(
    start: Start, teachers: list[str], tmp_path: Path
) -> None:
    known = load(start.model).model.config.vocab_size
    made = []
    for name, more in (("gkd", {}), ("distill_topk", {"recipe__penalty__k": known})):
        asked = {"recipe": name, "recipe__penalty__beta": 0.0, **more, **BARE}
        with start.opened(tmp_path / name, **asked, teacher__path=teachers[0]) as run:
            learn(run, gather(run))
            made.append(gradient(run))
    assert difference(*made) < 1e-4


@pytest.mark.parametrize("name", RECIPES)
def test_rows_are_taught_by_the_teacher_that_they_name(
    name: str, start: Start, teachers: list[str], tmp_path: Path
) -> None:
    """With both names for one model it is one teacher's gradient, with two models another's."""
    rows = [
        {"prompt": f"{a}+{b}=", "answer": str(a + b), "teacher": ("math", "code")[a % 2]}
        for a in range(10)
        for b in range(8)
    ]
    data, found = start.rows("taught", rows), {}
    same, both = [teachers[0]] * 2, teachers
    for case, (math, code) in {"same": same, "both": both}.items():
        asked = settings(name, data__train=data, **BARE)
        asked["teacher__paths"] = {"math": math, "code": code}
        with start.opened(tmp_path / case, **asked) as run:
            collected = gather(run)
            taught = [str(r.task.columns["teacher"]) for r in rollouts(collected)]
            assert {"math", "code"} == set(taught)
            seen = learn(run, collected).batch
            found[case] = gradient(run)
        if name == "distill" and case == "both":
            assert seen is not None
            sequences = sequences_of(collected.groups)
            for who, path in zip(("math", "code"), both, strict=True):
                at = torch.tensor([x == who for x in taught])
                said = plain_logp(load(path).model, sequences)[at]
                torch.testing.assert_close(
                    seen.stream("teacher_logp_NT")[at], said, atol=1e-5, rtol=1e-5
                )
    with start.opened(
        tmp_path / "one", **settings(name, data__train=data, teacher__path=teachers[0], **BARE)
    ) as run:
        learn(run, gather(run))
        assert difference(found["same"], gradient(run)) < 1e-5
    assert difference(found["both"], found["same"]) > 1e-2


# --- the policy as its own teacher ----------------------------------------------------------------

TOLD = {"teacher__path": "policy", "teacher__prompt": "{answer}{prompt}"}


@pytest.mark.parametrize("update", ["frozen", "policy", "ema:0.5"])
def test_the_policy_learns_from_itself_with_more_to_read(
    update: str, start: Start, tmp_path: Path
) -> None:
    with start.opened(tmp_path / "run", recipe="distill", teacher__update=update, **TOLD) as run:
        first = weights(run.parts.loaded.model)
        advance(run)
        moved = weights(run.parts.loaded.model)
        (model,) = role(run).models.values()
        expected = {"frozen": first, "policy": moved, "ema:0.5": (first + moved) / 2}[update]
        torch.testing.assert_close(weights(model), expected, atol=1e-6, rtol=0)  # type: ignore[arg-type]
        collected = gather(run)
        batch = learn(run, collected).batch if update != "policy" else None
        if batch is None:
            return
        sequences, tokenizer = sequences_of(collected.groups), run.parts.loaded.tokenizer
        told = [
            tuple(tokenizer.encode(f"{r.task.answer}{r.task.prompt}")) for r in rollouts(collected)
        ]
        assert [r.task.teacher_ids for r in rollouts(collected)] == told
        said = plain_logp(model, replace(sequences, prompts=told))  # type: ignore[arg-type]
        torch.testing.assert_close(batch.find("teacher_logp_NT"), said, atol=1e-5, rtol=1e-5)
        unsaid = plain_logp(model, sequences)  # type: ignore[arg-type]
        assert ((said - unsaid)[batch.mask_NT].abs() > 1e-3).any()


# --- what it leaves behind ------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["distill", "gkd", "distill_topk", "self"])
def test_a_run_goes_on_to_the_same_bits(
    case: str, start: Start, teachers: list[str], tmp_path: Path
) -> None:
    asked = settings(case, teacher__path=teachers[0])
    if case == "self":
        asked = {"recipe": "gkd", "teacher__update": "ema:0.9", **TOLD}
    asked |= {"steps": 4, "checkpoint__every_steps": 1}
    with start.opened(tmp_path / "whole", **asked) as run:
        expected = weights(advance(run, 4).parts.loaded.model)
    config = small(**start.settings(**asked))
    train(replace(config, steps=2), tmp_path / "halves", display=quiet())
    with start.opened(tmp_path / "halves", **asked) as run:
        assert run.progress.step == 2
        assert torch.equal(weights(advance(run, 2).parts.loaded.model), expected)


def test_the_rollout_file_has_what_the_teacher_said(
    start: Start, teachers: list[str], tmp_path: Path
) -> None:
    asked = start.settings(recipe="distill", teacher__path=teachers[0], steps=1)
    train(small(**asked), tmp_path / "run", display=quiet())
    table = read(tmp_path / "run" / "rollouts" / "step_1.parquet")
    for row in table.to_pylist():
        assert len(row["teacher_logp"]) == len(row["token_ids"])
        gain = [t - s for t, s in zip(row["teacher_logp"], row["sampler_logp"], strict=True)]
        assert row["advantage"] == pytest.approx(gain, abs=1e-5)


def test_answers_without_a_reward_teach_too(
    start: Start, teachers: list[str], tmp_path: Path
) -> None:
    # An empty answer has a reward of that function.
    asked = {"recipe": "distill", "teacher__path": teachers[0], "engine__min_tokens": 1}
    with start.opened(tmp_path / "run", **asked, reward="abstains") as run:
        found = learn(run, gather(run))
    assert found.metrics["tokens/learned_share"] == 1.0 and found.metrics["optim/grad_norm"] > 0
    # What has no reward is no 0: it is left out of the mean, and counted.
    assert found.metrics["reward/ungraded_share"] == 1.0
    assert "reward/mean" not in found.metrics and "groups/dead_share" not in found.metrics


def test_prompts_without_answers_are_enough_for_a_teacher(
    start: Start, teachers: list[str], tmp_path: Path
) -> None:
    """No reward is read: none has to be possible, and no rule calls the run unrewarded."""
    bare = start.rows("bare", [{"prompt": f"{a}+1="} for a in range(8)])
    asked = {"recipe": "distill", "teacher__path": teachers[0], "data__train": bare, "steps": 2}
    settings = {**start.settings(**asked), "reward__parts": {"number": 1.0}}
    train(small(**settings), tmp_path / "run", display=quiet())
    lines = metrics(tmp_path / "run")[1:]
    assert [line["reward/missing_share"] for line in lines] == [0.0, 0.0]
    assert all(line["reward/ungraded_share"] == 1.0 for line in lines)
    told = (tmp_path / "run" / "events.jsonl").read_text()
    assert "no reward" not in told
    settings.pop("teacher__path")
    with pytest.raises(DataError, match="has a column 'answer', which the reward reads"):
        train(small(**settings | {"recipe": "grpo"}), tmp_path / "no", display=quiet())


def test_overlong_answers_that_are_dropped_teach_nothing(
    start: Start, teachers: list[str], tmp_path: Path
) -> None:
    asked = {"recipe": "distill", "teacher__path": teachers[0], "overlong": "drop"}
    with start.opened(tmp_path, **asked, engine__max_tokens=2, reward="abstains") as run:
        groups = gather(run)
        cut = [r.completion.truncated for group in groups.groups for r in group]
        assert 0 < sum(cut) < len(cut)
        found = learn(run, groups)
    learned = sum(2 * c for c in cut) / found.metrics["tokens/count"]
    assert found.metrics["tokens/learned_share"] == pytest.approx(1 - learned)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_without_a_teacher_it_is_refused_by_name(name: str, start: Start) -> None:
    with pytest.raises(ConfigError, match=f"recipe {name}.*learns from a teacher, and none"):
        check_config(small(**start.settings(**settings(name))))


def test_other_settings_that_can_not_hold(start: Start, teachers: list[str]) -> None:
    cases = [
        ({"teacher__path": teachers[0], "teacher__paths": {"a": teachers[1]}}, "Keep one"),
        ({"teacher__path": teachers[0], "teacher__update": "ema:0.9"}, "stays as it is"),
        ({"teacher__path": "policy"}, "learn from itself"),
        ({"recipe": "dr_grpo", "teacher__path": teachers[0]}, "it has no teacher"),
        ({"teacher__path": teachers[0], "recipe__source": "data"}, "sampler_logp_NT"),
    ]
    for changes, text in cases:
        with pytest.raises(ConfigError, match=text):
            check_config(small(**start.settings(**{"recipe": "distill", **changes})))


def test_more_likely_tokens_than_the_teacher_knows_are_refused(
    start: Start, teachers: list[str], tmp_path: Path
) -> None:
    asked = {"recipe": "distill_topk", "teacher__path": teachers[0]}
    with (
        pytest.raises(ConfigError, match=r"k=32 is more than the 15 tokens.*penalty\.k=15"),
        start.opened(tmp_path / "run", **asked),
    ):
        pass


def test_a_teacher_with_another_tokenizer_is_refused(start: Start, tmp_path: Path) -> None:
    data = start.rows(
        "letters", [{"prompt": f"{a}x=", "answer": "x", "solution": "x"} for a in range(9)]
    )
    other = {"model__path": "tiny", "data__train": data, "reward": "nothing"}
    with start.opened(tmp_path / "other", **other):
        pass
    path = str(tmp_path / "other" / "cold_start")
    asked = {"recipe": "distill", "teacher__path": path}
    with pytest.raises(ConfigError, match=r"another tokenizer.*groupwise collect TEACHER"):
        check_config(small(**start.settings(**asked)))
    asked |= {"model__path": "tiny"}  # whose tokenizer is made on the spot
    with (
        pytest.raises(ConfigError, match="another tokenizer"),
        start.opened(tmp_path / "run", **asked),
    ):
        pass
    asked["teacher__path"] = str(tmp_path / "other")  # a run
    with pytest.raises(ModelError, match="is the folder of a run, not a model"):
        check_config(small(**start.settings(**asked)))


def test_a_teacher_with_a_shorter_context_is_refused(start: Start, tmp_path: Path) -> None:
    own = load(start.model)
    shape = replace(own.model.config, max_positions=6)
    save(Transformer(shape).initialise(torch.Generator()), tmp_path / "short", own.files)
    asked = {"recipe": "distill", "teacher__path": str(tmp_path / "short")}
    with (
        pytest.raises(ConfigError, match=r"teacher .*short reads up to 6 tokens"),
        start.opened(tmp_path / "run", **asked),
    ):
        pass


def test_rows_that_name_no_teacher_or_lack_what_it_reads(
    start: Start, teachers: list[str], tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"recipe": "distill", "teacher__paths": {"math": teachers[0]}}
    with (
        pytest.raises(DataError, match=r"names none of teacher\.paths"),
        start.opened(tmp_path / "a", **asked),
    ):
        pass
    for prompt, text in (("{prompt}{proof}", "nothing in column 'proof'"), ("hm", "prompt out")):
        told = {"recipe": "gkd", "teacher__path": "policy", "teacher__prompt": prompt}
        with pytest.raises(DataError, match=text), start.opened(tmp_path / "b", **told):
            pass
