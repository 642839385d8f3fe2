"""Recipes that read more than a row: a sibling's answer, an expert's, the prompt's last one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import metrics
from steps import Start, advance, gather, learn, plain_logp, rollouts, weights
from torch import Tensor

from groupwise.errors import DataError
from groupwise.optim.assemble import sequences_of
from groupwise.optim.packs import Sequences
from groupwise.records import Grade
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.rollouts import read
from groupwise.stages.demonstrations import with_demonstrations
from groupwise.stages.earlier_answers import drift_of, earlier
from groupwise.sync.checkpoints import memory_from_json, memory_to_json
from groupwise.training.run import Run

TEACHER = {"teacher__path": "policy", "teacher__update": "ema:0.95",
           "teacher__prompt": "{sibling};{prompt}"}  # fmt: skip


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


# --- a sibling's answer ---------------------------------------------------------------------------


def test_a_teacher_reads_the_first_success_of_the_group_but_the_rows_own(
    start: Start, tmp_path: Path
) -> None:
    with start.opened(tmp_path, recipe="sdpo", group_size=4, **TEACHER) as run:
        groups = gather(run).groups
        rewards = [[0.0, 1.0, None, 1.0], [0.0, 0.5, 0.0, 0.9], [1.0, 0.0, 0.0, 0.0]]
        marked = [
            [replace(row, grade=Grade(x)) for row, x in zip(group, of_group, strict=True)]
            for group, of_group in zip(groups, rewards, strict=False)
        ]
        tokenizer = run.parts.loaded.tokenizer
        asked = (run.config, marked, sequences_of(marked), tokenizer)
        shown, taught_N = with_demonstrations(*asked, 64)
        assert taught_N.tolist() == [True] * 4 + [False] * 5 + [True] * 3
        teachers = [1, 3, 1, 1, None, None, None, None, None, 0, 0, 0]
        for row, other in enumerate(teachers):
            task = shown.tasks[row]
            if other is None:
                assert task.teacher_ids == ()
                continue
            done = marked[row // 4][other].completion
            ids = done.token_ids[:-1] if done.finish == "eos" else done.token_ids
            assert tokenizer.decode(task.teacher_ids) == (f"{tokenizer.decode(ids)};{task.prompt}")
        assert not with_demonstrations(*asked, 8)[1].any()  # no room for a demonstration


def test_what_nobody_could_teach_changes_no_weight(start: Start, tmp_path: Path) -> None:
    with start.opened(tmp_path, recipe="sdpo", reward="nothing", **TEACHER) as run:
        before = weights(run.parts.loaded.model)
        learn(run, gather(run))
        assert torch.equal(before, weights(run.parts.loaded.model))


# --- an expert's answers --------------------------------------------------------------------------


def test_lessons_that_do_not_count_change_nothing_and_no_file_has_them(
    start: Start, tmp_path: Path
) -> None:
    """The statistics of a group are those of its own answers."""
    found = {}
    for name, changes in {
        "idle": {"recipe__auxiliary__coef": 0.0},
        "without": {"recipe__auxiliary": ""},
        "taught": {},
    }.items():
        with start.opened(tmp_path / name, recipe="chord", **changes) as run:
            advance(run)
            run.reporter.recorder.flush()
            found[name] = weights(run.parts.loaded.model)
        assert len(read(RunFolder(tmp_path / name).rollout(1))) == 16
    torch.testing.assert_close(found["idle"], found["without"], rtol=1e-5, atol=1e-6)
    assert (found["taught"] - found["without"]).abs().max() > 1e-4
    lines = {name: metrics(tmp_path / name)[-1] for name in found}
    for measure in ("reward/mean", "length/sampled_mean", "reward/missing_share", "groups/count"):
        assert lines["taught"][measure] == lines["without"][measure]


def test_an_expert_is_followed(start: Start, tmp_path: Path) -> None:
    """With a reward that says nothing, written answers become likelier."""

    def loss(run: Run) -> float:
        tasks, encode = list(run.parts.tasks)[:20], run.parts.loaded.tokenizer.encode
        answers = [tuple(encode(task.columns["solution"])) for task in tasks]
        rows = Sequences([task.token_ids for task in tasks], answers)
        return -float(plain_logp(run.parts.loaded.model, rows).sum())

    few = {"data__train": start.tasks("four", [(a, 1) for a in range(4)]), "reward": "nothing"}
    with start.opened(tmp_path, recipe="chord", recipe__auxiliary__weight="plain", **few) as run:
        before = loss(run)
        advance(run, 6)
        assert loss(run) < 0.9 * before


def test_rows_without_an_experts_answer_are_refused(start: Start, tmp_path: Path) -> None:
    bare = start.rows("bare", [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)])
    with (
        pytest.raises(DataError, match="no text in column 'completion' or 'solution'"),
        start.opened(tmp_path, recipe="chord", data__train=bare),
    ):
        pass


# --- a prompt's previous answer -------------------------------------------------------------------


def test_the_past_fades_by_how_far_the_policy_has_moved(start: Start, tmp_path: Path) -> None:
    small = start.tasks("few", [(a, 1) for a in range(6)])
    settings = {"recipe": "spo", "group_size": 1, "prompts_per_step": 6, "data__train": small}
    with start.opened(tmp_path, **settings) as run:
        first = gather(run)
        assert earlier(run.progress.memory, first.groups) is None
        model, seen = run.parts.loaded.model, {}

        def logp_T(ids: tuple[int, ...], answer: tuple[int, ...]) -> Tensor:
            return plain_logp(model, Sequences([ids], [answer]))[0].detach()

        for row in rollouts(first):
            ids = row.completion.token_ids
            seen[row.task.id] = ids, logp_T(row.task.token_ids, ids)
        run.progress.memory = learn(run, first, rate=1e-2).memory
        memory = memory_from_json(memory_to_json(run.progress.memory))
        assert memory == run.progress.memory and set(memory.answers) == set(seen)
        again = gather(run).groups
        found = drift_of(run.parts.learner, memory, again, earlier(memory, again))
        for row, drift in zip((r for group in again for r in group), found, strict=True):
            ids, then_T = seen[row.task.id]
            now_T = logp_T(row.task.token_ids, ids)
            assert float(drift) == pytest.approx(float((now_T - then_T).abs().mean()), rel=1e-3)
            assert float(drift) > 1e-3
