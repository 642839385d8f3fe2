"""Whole steps on completions that others wrote a part of: sampling to rollout file and replay."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pyarrow.compute as pc
import pytest
import torch
from interrupted import TOOL, USER, Interrupted, opened
from steps import BARE, Start, full_logp, gather, gradient, learn, rollouts, weights

from groupwise.methods.composition import Recipe
from groupwise.model.layers.attention import packed, packed_positions
from groupwise.model.layers.head import logits
from groupwise.optim.assemble import batch_of, sequences_of
from groupwise.optim.packs import Sequences, outputs
from groupwise.optim.turn_streams import OF_EPISODES
from groupwise.recipes import RECIPES, recipe
from groupwise.replay.methods import methods_of
from groupwise.replay.recorded import open_recorded
from groupwise.replay.replay import Replay
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.rollouts import PER_TOKEN, read
from groupwise.stages.pairs import pairs_of
from groupwise.training.guards import check_agreement
from groupwise.training.loop import one_step
from groupwise.view.tokens import token_page, tokenizer_of

recipe("grpo")  # fills the registry
TRAINABLE = [
    name
    for name, made in RECIPES.items()
    if isinstance(made, Recipe)
    and made.samples
    # An environment interrupts those of episodes; a teacher that reads an answer of the group in
    # its prompt is refused where there are turns.
    and not set(made.streams) & {*OF_EPISODES, "taught_N"}
]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


def changes_of(name: str, start: Start) -> dict[str, object]:
    """Settings with which a recipe makes a step here."""
    made = RECIPES[name]
    changes: dict[str, object] = {"recipe": name}
    if made.gate.get("k") is not None:
        changes["recipe__gate__k"] = 5
    if any(link.definition.traits.remembers == "visits" for link in made.advantage):
        changes["prompts_per_step"] = 4
    if "teacher" in made.roles:
        changes |= {"teacher__path": "policy", "teacher__prompt": "{answer}{prompt}"}
        changes |= {"recipe__penalty__k": 4} if name == "distill_topk" else {}
    if name == "a2po":
        rows = [{"prompt": f"{a}+2=", "answer": str(a + 2), "reference_rewards": [1, 0, a % 2]}
                for a in range(10)]  # fmt: skip
        changes["data__train"] = start.rows("valued", rows)
    if name == "grpo_passk":  # one answer must be the best
        changes["reward"] = "stepwise"
    if name == "fapo":
        file = start.folder / "rewards.py"
        changes["reward__parts"] = {f"{file}:odd": 1.0, f"{file}:flawed": 0.0}
    if name == "flowrl":
        changes["critic__alone_steps"] = 0
    if made.routed:
        changes |= {"model__path": "tiny", "tiny__experts": 4}
    if "step_reward_NT" in made.streams:
        changes["reward"] = "stepwise"
    return changes


def taught(start: Start, folder: Path, rubbish: float, **changes: object) -> tuple[object, ...]:
    """What a step's updates leave: weights, metrics, and the streams of the rollout file."""
    with opened(start, folder, rubbish=rubbish, **changes) as run:
        done = learn(run, gather(run), rate=3e-3)
        return weights(run.parts.loaded.model), done.metrics, done.streams


@pytest.mark.parametrize("name", TRAINABLE)
def test_what_the_sampler_says_of_others_tokens_changes_nothing(
    name: str, start: Start, tmp_path: Path
) -> None:
    """NaN there, or nonsense: the same weights and measures, to the bit."""
    changes = changes_of(name, start)
    found, metrics, streams = taught(start, tmp_path / "nan", math.nan, **changes)
    again, repeated, others = taught(start, tmp_path / "odd", -77.0, **changes)
    with opened(start, tmp_path / "before", **changes) as run:
        assert not torch.equal(found, weights(run.parts.loaded.model))  # something was learned
    assert found.isfinite().all()
    assert torch.equal(found, again) and metrics == repeated
    for column, x_NT in streams.items():
        y_NT = others[column]
        assert (x_NT is None) == (y_NT is None)
        assert x_NT is None or torch.equal(x_NT.nan_to_num(9.0), y_NT.nan_to_num(9.0))


def test_sampler_and_learner_agree_on_the_policys_tokens(start: Start, tmp_path: Path) -> None:
    """Turn by turn in the engine, in one pass in the learner, both as the textbook has it."""
    with opened(start, tmp_path, recipe="grpo") as run:
        assert (
            check_agreement(run.config, run.parts, run.reporter, first=True)["gate/mismatch_max"]
            < 1e-4
        )
        collected = gather(run)
        sequences = sequences_of(collected.groups)
        parts = [list(range(len(sequences.completions)))]
        learner_NT = run.parts.learner.score(run.parts.loaded.model, sequences, parts)
        for row, rollout in enumerate(rollouts(collected)):
            done = rollout.completion
            ids_T = torch.tensor(done.token_ids)
            plain_T = full_logp(run.parts.loaded.model, rollout.task.token_ids, done.token_ids)
            plain_T = plain_T.gather(1, ids_T[:, None])[:, 0]
            own_T, n = done.mask_T, len(ids_T)
            assert own_T is not None and not own_T.all()
            torch.testing.assert_close(
                learner_NT[row, :n][own_T], plain_T[own_T], atol=1e-4, rtol=0
            )
            torch.testing.assert_close(done.logp_T[own_T], plain_T[own_T], atol=1e-4, rtol=0)
            assert (learner_NT[row, :n][~own_T] == 0).all()  # read, never predicted


def test_the_gradient_of_a_step_is_that_of_the_policys_tokens(start: Start, tmp_path: Path) -> None:
    """REINFORCE by the textbook: −Σ_i A_i/B Σ_own ℓ, a plain pass a row, autograd."""
    changes = {"recipe": "rloo", "recipe__shaping": "", "recipe__penalty": ""}
    with opened(start, tmp_path, **changes, **BARE) as run:
        model, collected = run.parts.loaded.model, gather(run)
        rows = rollouts(collected)
        batch = batch_of(run.parts.learner.recipe, collected.groups, run.parts.loaded.tokenizer)
        assert int(batch.length_N.sum()) == sum(r.completion.own_length for r in rows)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        done = learn(run, collected, rate=0.0)
        found = gradient(run)
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name])
            p.grad = None
        advantage_NT, coefficient_NT = done.streams["advantage"], done.streams["coefficient"]
        for row, rollout in enumerate(rows):
            prompt, completion = rollout.task.token_ids, rollout.completion
            ids = torch.tensor([*prompt, *completion.token_ids])
            hidden = model(ids, packed_positions([len(ids)]), packed([len(ids)]))
            every = torch.log_softmax(logits(hidden, model.head_weight), -1)
            at = torch.arange(len(prompt), len(ids))
            logp_T = every[at - 1, ids[at]]
            own_T = completion.mask_T
            weight_T = (advantage_NT * coefficient_NT)[row, : len(at)]
            assert (weight_T[~own_T] == 0).all()
            (-(weight_T[own_T] * logp_T[own_T]).sum()).backward()
        state = [k.removeprefix("exp_avg/") for k in run.parts.learner.optimizer.state()
                 if k.startswith("exp_avg/")]  # fmt: skip
        named = dict(model.named_parameters())
        plain = torch.cat([named[k].grad.double().flatten() for k in state])
        assert plain.norm() > 1e-3
        assert float((found - plain).norm() / plain.norm()) < 1e-5


def test_an_id_of_others_matters_as_what_is_read_and_not_as_what_is_said(
    start: Start, tmp_path: Path
) -> None:
    """The last token of a row is read by nobody; one before others of the policy's is."""
    with opened(start, tmp_path, recipe="grpo") as run:
        ends = [r for r in rollouts(gather(run)) if r.completion.turns[-1].role == "user"]
        sequences = sequences_of([ends])

        def score(rows: Sequences) -> torch.Tensor:
            return run.parts.learner.score(run.parts.loaded.model, rows, [list(range(len(ends)))])

        plain_NT = score(sequences)

        def changed(place: int) -> torch.Tensor:
            ids = [list(x) for x in sequences.completions]
            for row in ids:
                row[place] = (row[place] + 1) % 10
            made = Sequences(sequences.prompts, [tuple(x) for x in ids], sequences.masks)
            return score(made)

        assert torch.equal(changed(-1), plain_NT)
        tool = ends[0].completion.turns[1].start
        assert all(r.completion.turns[1].start == tool for r in ends)
        moved_NT = changed(tool)
        assert torch.equal(moved_NT[:, :tool], plain_NT[:, :tool])
        assert not torch.equal(moved_NT, plain_NT)


def test_a_preference_is_between_what_the_policy_wrote(start: Start, tmp_path: Path) -> None:
    """DPO on samples: ∂ℓ of others' tokens is in neither answer's sum."""
    with opened(start, tmp_path, recipe="best_of_group_dpo") as run:
        collected = gather(run)
        pairs = pairs_of(run.config.recipe, collected.groups, run.parts.loaded.tokenizer)
        assert pairs.completions and pairs.own is not None and not pairs.own.all()
        by_ids = {r.completion.token_ids: r.completion.mask_T for r in rollouts(collected)}
        for ids, mask_T in zip(pairs.completions, pairs.masks, strict=True):
            assert torch.equal(mask_T, by_ids[ids])
        part = pairs.pack(range(len(pairs.completions)))
        logp_NT = outputs(run.parts.loaded.model, part, temperature=1.0)["logp_NT"]
        assert (logp_NT[~pairs.mask()] == 0).all()
        done = learn(run, collected)
        assert done.outcomes and not done.outcomes[0].skipped


def test_graders_read_the_policys_last_turn_alone(start: Start, tmp_path: Path) -> None:
    with opened(start, tmp_path, recipe="grpo") as run:
        seen: list[tuple[str, tuple[int, ...]]] = []
        inner = run.parts.grader.grade

        def watched(samples: object) -> object:
            given = list(samples)  # type: ignore[call-overload]
            seen.extend((text, tuple(ids)) for _, text, ids, _ in given)
            return inner(given)

        run.parts.grader.grade = watched  # type: ignore[method-assign]
        tokenizer = run.parts.loaded.tokenizer
        rows = rollouts(gather(run))
        assert sorted(seen) == sorted((r.said, r.completion.own_ids) for r in rows)
        for rollout in rows:
            done = rollout.completion
            last = done.turns[2]
            assert rollout.said == tokenizer.decode(done.token_ids[last.start : last.end])
            assert TOOL in rollout.text and rollout.said != rollout.text


def test_steps_of_a_grade_stand_in_the_whole_text(start: Start, tmp_path: Path) -> None:
    """And each reward is at a token of the policy, also where the text goes on behind it."""
    with opened(start, tmp_path, recipe="grpo_process", reward="stepwise") as run:
        groups = gather(run).groups
        batch = batch_of(run.parts.learner.recipe, groups, run.parts.loaded.tokenizer)
        for row, rollout in enumerate(r for group in groups for r in group):
            steps, last = rollout.grade.steps, rollout.completion.turns[2]
            for end, _ in steps:
                assert rollout.text[end - 1].isdigit()
            at_T = batch.step_end_NT[row].nonzero()[:, 0]
            assert len(at_T) == max(len(steps), 1)
            assert (at_T < last.end).all()
            assert bool(steps) <= bool((at_T >= last.start).all())
            total = sum(reward for _, reward in steps)
            assert float(batch.step_reward_NT[row].sum()) == pytest.approx(total)


@pytest.fixture(scope="module", params=["grpo", "gspo", "sspo"])
def run_folder(
    request: pytest.FixtureRequest, start: Start, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of two steps, two updates each."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    changes = {"recipe": request.param, "recipe__schedule__updates": 2}
    with opened(start, folder, optim__learning_rate=2e-2, **changes) as run:
        assert isinstance(run.parts.engine, Interrupted)
        for _ in range(2):
            assert one_step(run, threading.Event())
        run.keeper.save()
        run.keeper.saver.wait()
    return folder


def test_the_rollout_file_says_who_wrote_what(run_folder: Path) -> None:
    run = RunFolder(run_folder)
    rows = read(run.rollout(2)).to_pylist()
    metrics = list(run.read_metrics())[-1]
    assert {turn["role"] for row in rows for turn in row["turns"]} == {"assistant", "tool", "user"}
    for row in rows:
        roles = [t["role"] for t in row["turns"] for _ in range(t["start"], t["end"])]
        assert row["mask"] == [role == "assistant" for role in roles]
        for name in PER_TOKEN[1:]:
            if row[name] is not None:
                others = [x for x, own in zip(row[name], row["mask"], strict=True) if not own]
                assert others and all(x == 0 for x in others)
                assert all(math.isfinite(x) for x in row[name])
    own = sum(sum(row["mask"]) for row in rows)
    assert metrics["length/mean"] == metrics["length/sampled_mean"] == own / len(rows)
    assert metrics["tokens/count"] == own
    assert metrics["cost/tokens"] == own + sum(
        sum(row["mask"]) for row in read(run.rollout(1)).to_pylist()
    )
    assert metrics["mismatch/abs_max"] < 1e-3 and metrics["tokens/learned_share"] == 1.0
    known = [(row["entropy"], row["mask"]) for row in rows]
    mean = sum(x for e, _ in known for x in e) / own
    assert metrics["entropy/mean"] == pytest.approx(mean, rel=1e-4)


def test_a_replay_gives_what_the_run_recorded(run_folder: Path) -> None:
    recorded = open_recorded(run_folder)
    replay = Replay(recorded, methods_of(recorded, ["dr_grpo"]), [1, 2])
    for seen in replay:
        hole_NT = ~seen.record.mask_NT
        for method in seen.methods:
            for x_NT in (method.weight_NT, method.advantage_NT, method.coefficient_NT):
                assert (x_NT[hole_NT] == 0).all() and x_NT.isfinite().all()
            assert not method.clipped_NT[hole_NT].any()
    for each in replay.by_step:
        own = each["methods"][0]["tokens"]
        assert (
            own
            == pc.sum(pc.list_flatten(read(recorded.folder.rollout(each["step"]))["mask"])).as_py()
        )
        assert each["reproduction"]["advantage"] == 0.0 and each["reproduction"]["clipped"] == 0.0


def test_the_tokens_of_others_are_shown_without_numbers(run_folder: Path) -> None:
    run = RunFolder(run_folder)
    page = json.loads(json.dumps(token_page(run.rollout(1), 0, 2, 0, tokenizer_of(run))))
    assert [turn["role"] for turn in page["turns"]] == ["assistant", "tool", "assistant", "user"]
    tool, user = page["turns"][1], page["turns"][3]
    assert "".join(page["pieces"][tool["start"] : tool["end"]]) == TOOL
    assert "".join(page["pieces"][user["start"] : user["end"]]) == USER
    for stream in page["streams"]:
        for at, (value, foreign) in enumerate(zip(stream["values"], page["foreign"], strict=True)):
            inside = any(t["start"] <= at < t["end"] for t in (tool, user))
            assert foreign == inside
            if stream["name"] == "mask":
                assert value == float(not inside)
            else:
                assert (value is None) == inside
