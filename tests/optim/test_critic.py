"""The critic in whole steps: its values, its updates, and that it leaves the policy alone."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted import opened as interrupted
from runs import small
from safetensors.torch import load_file, save_file
from scorers import language_model
from steps import BARE, Start, advance, difference, gather, learn, rollouts, weights
from torch import Tensor

from groupwise.errors import ConfigError, ModelError
from groupwise.groups.phase import batch_phase
from groupwise.losses.phase import role_phase
from groupwise.model.formats.checkpoint import load, save
from groupwise.model.formats.classifier import padded
from groupwise.model.formats.classifier import save as save_classifier
from groupwise.model.formats.tokenizer import Tokenizer, character_files
from groupwise.model.layers.attention import packed, packed_positions
from groupwise.model.layers.transformer import Transformer
from groupwise.model.scalar_head import ScalarHead
from groupwise.optim.assemble import sequences_of
from groupwise.optim.packs import Sequences, values
from groupwise.optim.roles import rates_at
from groupwise.optim.roles.critic import (
    Critic,
    explained_variance,
    monte_carlo,
    value_measures,
)
from groupwise.recipes import recipe
from groupwise.records import Rollout, TokenBatch
from groupwise.stages.checks import check_config
from groupwise.stages.value_truth import value_truth
from groupwise.sync.export_scorer import export_critic
from groupwise.training.run import Run

PPO = {"recipe": "ppo", "recipe__shaping": "", "recipe__schedule__updates": 1}
# Advantages are what the answer got, less the critic's value: nothing is whitened.
PLAIN = {
    **PPO,
    "recipe__advantage": "gae(gamma=1.0, lam=1.0)",
    "recipe__auxiliary": "value_loss(limit=0.2, gamma=1.0, lam=1.0)",
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


def critic_of(run: Run) -> Critic:
    critic = run.parts.learner.roles["critic"]
    assert isinstance(critic, Critic)
    return critic


def critic_weights(run: Run) -> Tensor:
    named = critic_of(run).model.named_parameters()
    return torch.cat([p.detach().double().flatten() for _, p in named])


def plain_values(model: ScalarHead, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Tensor:
    """The number at the prompt's last token and at every token of the answer but its last."""
    ids = torch.tensor([*prompt, *answer])
    hidden_TD = model.trunk.hidden(ids, packed_positions([len(ids)]), packed([len(ids)]))
    return (hidden_TD.float() @ model.score.weight.T)[len(prompt) - 1 : -1, 0]


def all_values(model: ScalarHead, rollout: Rollout) -> Tensor:
    return plain_values(model, rollout.task.token_ids, rollout.completion.token_ids)


# --- values -----------------------------------------------------------------------------------


def test_before_its_first_update_a_critic_says_0(start: Start, tmp_path: Path) -> None:
    """Then an advantage is the return: the step is that of return_to_go, to the bit."""
    with start.opened(tmp_path / "critic", **PLAIN) as run:
        collected = gather(run)
        found = learn(run, collected)
        moved = weights(run.parts.loaded.model)
    assert (found.batch.old_value_NT == 0).all()
    without = {**PLAIN, "recipe": "reinforce_pp", "recipe__auxiliary": ""}
    without["recipe__advantage"] = "return_to_go(gamma=1.0)"
    with start.opened(tmp_path / "none", **without) as run:
        other = learn(run, gather(run))
        assert torch.equal(found.batch.advantage_NT, other.batch.advantage_NT)
        assert torch.equal(moved, weights(run.parts.loaded.model))


def test_a_value_is_read_where_the_token_is_predicted(start: Start, tmp_path: Path) -> None:
    with start.opened(tmp_path, **PPO) as run:
        advance(run, 2)
        collected = gather(run)
        batch = learn(run, collected).batch
        again = run.parts.learner
        sequences = sequences_of(collected.groups)
        model = critic_of(run).model
        pack = sequences.pack(list(range(len(sequences.prompts))))
        now_NT = values(model, pack)
        for row, rollout in enumerate(rollouts(collected)):
            answer = rollout.completion.token_ids
            expected = all_values(model, rollout).detach()
            torch.testing.assert_close(now_NT[row, : len(answer)], expected, rtol=0, atol=1e-6)
            assert (now_NT[row, len(answer) :] == 0).all()
    assert (batch.old_value_NT[batch.mask_NT] != 0).all() and again.apart == ["critic"]


def test_with_lambda_1_the_target_is_the_return_whatever_the_values(
    start: Start, tmp_path: Path
) -> None:
    with start.opened(tmp_path, **PLAIN) as run:
        advance(run, 3)
        collected = gather(run)
        batch = learn(run, collected).batch
    reward_N = torch.tensor([r.grade.reward for r in rollouts(collected)])
    target_NT = batch.prepared["value_loss"]["return_NT"]
    spread_NT = reward_N[:, None].expand_as(target_NT)
    torch.testing.assert_close(target_NT[batch.mask_NT], spread_NT[batch.mask_NT])
    expected_NT = batch.valid(spread_NT - batch.old_value_NT)
    torch.testing.assert_close(batch.advantage_NT, expected_NT.to(batch.advantage_NT.dtype))


def test_with_lambda_0_a_hole_is_stepped_over() -> None:
    """The value behind a tool's answer is the successor: V is not 0 in the hole."""
    made = recipe("ppo", {"shaping": "", "advantage": "gae(gamma=1.0, lam=0.0)"})
    made = made.set("auxiliary", "value_loss(gamma=1.0, lam=0.0)")
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0]])
    value = torch.tensor([[0.1, 0.2, 9.0, 9.0, 0.5, 0.7], [0.3, 0.1, 0.4, 0.2, 9.0, 9.0]])
    batch = TokenBatch.build(
        mask_NT=mask, group_N=[0, 1], reward_N=[1.0, 0.0], old_value_NT=value.double()
    )
    found_NT = batch_phase(made, batch).batch.advantage_NT
    expected = torch.tensor(
        [[0.1, 0.3, 0.0, 0.0, 0.2, 0.3], [-0.2, 0.3, -0.2, -0.2, 0.0, 0.0]], dtype=torch.float64
    )
    torch.testing.assert_close(found_NT, expected, rtol=0, atol=1e-7)


# --- updates ----------------------------------------------------------------------------------


def test_the_critics_update_is_that_of_its_loss_alone(start: Start, tmp_path: Path) -> None:
    """Policy and critic together equal two separate updates: no leak, clipped apart."""
    changes = {**PLAIN, **BARE, "critic__clip_norm": 0.0}
    with start.opened(tmp_path / "both", **changes) as run:
        advance(run, 2)
        collected, model = gather(run), copy.deepcopy(critic_of(run).model)
        before = weights(run.parts.loaded.model)
        batch = learn(run, collected).batch
        moments = critic_of(run).state()
        policy_moved = weights(run.parts.loaded.model)
    target_NT = batch.prepared["value_loss"]["return_NT"].detach()
    total, tokens = torch.zeros(()), int(batch.mask_NT.sum())
    for row, rollout in enumerate(rollouts(collected)):
        ids = torch.tensor([*rollout.task.token_ids, *rollout.completion.token_ids])
        hidden_TD = model.trunk.hidden(ids, packed_positions([len(ids)]), packed([len(ids)]))
        value_T = (hidden_TD.float() @ model.score.weight.T)[
            len(rollout.task.token_ids) - 1 : -1, 0
        ]
        total = total + 0.5 * (value_T - target_NT[row, : len(value_T)]).square().sum() / tokens
    total.backward()
    for name, parameter in model.learning_parameters():
        found = moments[f"optimizer/exp_avg/{name}"]  # with beta1 = 0: the gradient
        assert difference(found.double(), parameter.grad.double()) < 1e-4, name
    assert not torch.equal(before, policy_moved)
    # The policy's own update is what it is without a critic that learns.
    with start.opened(tmp_path / "alone", **{**changes, "critic__learning_rate": 1e-30}) as run:
        learn(run, gather(run))
        first = weights(run.parts.loaded.model)
    with start.opened(tmp_path / "beside", **{**changes, "critic__learning_rate": 0.1}) as run:
        learn(run, gather(run))
        assert torch.equal(first, weights(run.parts.loaded.model))


@pytest.mark.parametrize("limit", [5, 40, 10_000])
def test_micro_batches_of_any_size_give_the_critic_the_same_gradient(
    limit: int, start: Start, tmp_path: Path
) -> None:
    moments = []
    for name, micro_tokens in (("one", 17), ("other", limit)):
        changes = {**PPO, **BARE, "critic__clip_norm": 0.0, "optim__micro_tokens": micro_tokens}
        with start.opened(tmp_path / name, **changes) as run:
            learn(run, gather(run))
            state = critic_of(run).state()
        kept = [x.double().flatten() for k, x in state.items() if "exp_avg/" in k]
        moments.append(torch.cat(kept))
    assert moments[0].norm() > 0 and difference(moments[1], moments[0]) < 1e-5


def test_what_others_wrote_is_no_target_of_the_critic(start: Start, tmp_path: Path) -> None:
    """With a tool's text in the middle: the gradient is that of the policy's own tokens."""
    changes = {**PLAIN, **BARE, "critic__clip_norm": 0.0}
    moments = []
    for rubbish in (math.nan, -77.0):
        with interrupted(start, tmp_path / str(rubbish), rubbish=rubbish, **changes) as run:
            advance(run)
            collected, model = gather(run), copy.deepcopy(critic_of(run).model)
            batch = learn(run, collected).batch
            state = critic_of(run).state()
        moments.append({k: x.clone() for k, x in state.items()})
    assert not batch.mask_NT[:, : int(batch.length_N.min())].all()  # there are holes
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[0])
    target_NT = batch.prepared["value_loss"]["return_NT"].detach()
    total, tokens = torch.zeros(()), int(batch.mask_NT.sum())
    for row, rollout in enumerate(rollouts(collected)):
        value_T = all_values(model, rollout)
        own_T = batch.mask_NT[row, : len(value_T)]
        off_T = value_T - target_NT[row, : len(value_T)]
        total = total + 0.5 * off_T[own_T].square().sum() / tokens
    total.backward()
    for name, parameter in model.learning_parameters():
        found = moments[1][f"optimizer/exp_avg/{name}"]
        assert difference(found.double(), parameter.grad.double()) < 1e-4, name


def test_a_critic_comes_to_know_what_can_be_known(start: Start, tmp_path: Path) -> None:
    """Rewards that follow from the prompt alone are known from the first token on."""
    changes = {
        **PLAIN,
        "reward": "small_prompt",
        "prompts_per_step": 16,
        "critic__learning_rate": 3e-3,
        "critic__alone_steps": 60,
        "steps": 60,
    }
    with start.opened(tmp_path, **changes) as run:
        advance(run, 30)
        found = learn(run, gather(run), rate=None).metrics
    assert found["critic/explained_variance"] > 0.9
    assert found["critic/explained_variance_first"] > 0.8
    assert abs(found["critic/bias_1"]) < 0.2 and found["critic/value_max"] < 1.5


# Answers of two words and their end, each as often as a policy with known chances writes it, and
# what they get.
WALKS = {(8, 11, 0): (3, 1.0), (8, 12, 0): (1, 0.0), (9, 11, 0): (2, 0.5), (9, 12, 0): (2, -1.0)}
# By hand: V is the mean of what comes from there on.
KNOWN = {(): 2 / 8, (8,): 3 / 4, (9,): -1 / 4} | {(a, b): r for (a, b, _), (_, r) in WALKS.items()}


@pytest.mark.parametrize("lam", [1.0, 0.95, 0.0])
def test_a_critic_converges_to_the_known_values_of_a_chain(lam: float) -> None:
    """Whatever λ is: from what really came, or from its own word about the state behind."""
    torch.manual_seed(0)
    made = recipe("ppo", {"shaping": "", "advantage": f"gae(gamma=1.0, lam={lam})"})
    made = made.set("auxiliary", f"value_loss(limit=0.2, gamma=1.0, lam={lam})")
    answers = [answer for answer, (times, _) in WALKS.items() for _ in range(times)]
    reward = [WALKS[answer][1] for answer in answers]
    model = ScalarHead(language_model().model).double()
    pack = Sequences([(3, 4, 5)] * len(answers), answers).pack(list(range(len(answers))))
    optimizer = torch.optim.Adam([p for _, p in model.learning_parameters()], lr=3e-3)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for _ in range(500):
        value_NT = values(model, pack)
        batch = TokenBatch.build(
            mask_NT=torch.ones(value_NT.shape),
            group_N=[0] * len(answers),
            reward_N=reward,
            old_value_NT=value_NT.detach(),
        )
        done = batch_phase(made, batch).batch
        _, terms = role_phase(made, done, "critic", value_NT=value_NT)
        optimizer.zero_grad()
        terms["value_loss"].backward()
        optimizer.step()
        decay.step()
    for row, answer in enumerate(answers):
        expected = [KNOWN[answer[:t]] for t in range(3)]
        assert values(model, pack)[row].tolist() == pytest.approx(expected, abs=2e-3), answer


def test_a_value_that_is_not_finite_skips_the_critics_update_alone(
    start: Start, tmp_path: Path
) -> None:
    with start.opened(tmp_path, **PPO) as run:
        advance(run, 1)
        collected, critic = gather(run), critic_of(run)
        plain = critic.outputs
        critic.outputs = lambda packed: {"value_NT": plain(packed)["value_NT"] * math.nan}
        before = critic_weights(run)
        found = learn(run, collected)
        assert torch.equal(before, critic_weights(run))
    assert found.metrics["critic/skipped"] == 1 and "critic/loss" not in found.metrics
    assert not found.outcomes[0].skipped


# --- value pre-training -----------------------------------------------------------------------


def test_the_policy_waits_while_the_critic_learns_alone(start: Start, tmp_path: Path) -> None:
    changes = {
        **PPO,
        "critic__alone_steps": 2,
        "optim__schedule": "linear",
        "optim__warmup_steps": 2,
        "steps": 6,
    }
    with start.opened(tmp_path, **changes) as run:
        model = run.parts.loaded.model
        begun, valued = weights(model), critic_weights(run)
        state = {k: x.clone() for k, x in run.parts.learner.state().items()}
        for step in range(2):
            advance(run)
            assert torch.equal(weights(model), begun), step
            assert not torch.equal(critic_weights(run), valued)
        now = run.parts.learner.state()
        assert all(torch.equal(state[name], now[name]) for name in state)
        assert run.progress.version == 0
        advance(run)
        assert not torch.equal(weights(model), begun) and run.progress.version == 1
    rates = [rates_at(run.config, step, 6).policy for step in range(6)]
    base = run.config.optim.learning_rate
    floored = small(**PPO | {"critic__schedule": "linear", "critic__min_share": 0.25, "steps": 4})
    found = [rates_at(floored, step, 4).roles["critic"] for step in range(5)]
    assert found == pytest.approx([found[0] * x for x in (1, 0.8125, 0.625, 0.4375, 0.25)])
    # Its warm-up and its decay over the four steps that are left begin when it does.
    assert rates == [None, None, base / 2, base, base, pytest.approx(base / 2)]


def test_alone_the_critic_learns_what_really_came() -> None:
    made = recipe("ppo")
    assert [str(term) for term in monte_carlo(made).auxiliary] == [
        "value_loss(limit=0.2, weight=1.0, gamma=1.0, lam=1.0)"
    ]
    assert monte_carlo(recipe("vapo")) is recipe("vapo")  # it does so all the time
    assert monte_carlo(made).name == "ppo"


def test_vapo_pretrains_for_50_steps_and_others_for_none(start: Start, tmp_path: Path) -> None:
    for name, steps in (("vapo", 50), ("ppo", 0), ("ppo@verl", 0)):
        assert Critic.alone_steps(small(**start.settings(recipe=name))) == steps
    short = small(**start.settings(recipe="vapo", steps=10))
    assert any("the policy never learns" in note for note in Critic.notes(short))
    assert check_config(replace(short, steps=100)) is not None


def test_a_run_goes_on_inside_the_warm_up_to_the_same_bits(start: Start, tmp_path: Path) -> None:
    changes = {**PPO, "critic__alone_steps": 3, "steps": 6}
    ends = []
    for name, cuts in (("whole", []), ("cut", [2, 4])):
        for until in [*cuts, 6]:
            with start.opened(tmp_path / name, **changes) as run:
                advance(run, until - run.progress.step)
                run.keeper.save_and_wait()
                found = [x.clone() for x in critic_of(run).state().values()]
                found += [weights(run.parts.loaded.model), *run.parts.learner.state().values()]
        ends.append([x.clone() for x in found])
    assert len(ends[0]) == len(ends[1])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


# --- kinds of critic --------------------------------------------------------------------------


def test_a_critic_as_adapter_trains_little_and_shares_what_is_frozen(
    start: Start, tmp_path: Path
) -> None:
    both = {**PPO, "adapter__rank": 4, "optim__learning_rate": 1e-2}
    with start.opened(tmp_path / "both", **both) as run:
        model, critic = run.parts.loaded.model, critic_of(run).model
        mine = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        theirs = dict(critic.trunk.named_parameters())
        assert mine and all(theirs[name] is p for name, p in mine.items())
        frozen = {name: p.clone() for name, p in mine.items()}
        advance(run, 2)
        assert all(torch.equal(p, frozen[name]) for name, p in mine.items())
        learned = dict(critic.learning_parameters())
        assert all("lora_" in name or name == "score.weight" for name in learned)
    alone = {**PPO, "critic__adapter": 4}
    with start.opened(tmp_path / "alone", **alone) as run:
        critic = critic_of(run).model
        before = {n: p.clone() for n, p in critic.trunk.named_parameters()}
        learned = dict(critic.learning_parameters())
        assert all("lora_" in name or name == "score.weight" for name in learned)
        advance(run, 3)  # the head first, then B, then A
        for name, p in critic.trunk.named_parameters():
            assert torch.equal(p, before[name]) == ("lora_B" not in name and "lora_A" not in name)
        assert weights(run.parts.loaded.model).isfinite().all()


def test_a_critic_starts_from_another_folder(start: Start, tmp_path: Path) -> None:
    """A smaller language model under a score of 0; a classifier with the score that it has."""
    own = load(start.model)
    shape = replace(own.model.config, num_layers=1)
    small_model = Transformer(shape).initialise(torch.Generator().manual_seed(1))
    save(small_model, tmp_path / "smaller", own.files)
    made = padded(replace(own, model=small_model))  # it has a token more, for padding
    head = ScalarHead(made.model)
    with torch.no_grad():
        head.score.weight.fill_(0.01)
    save_classifier(head, tmp_path / "classifier", made.files, "token")
    for name, score in (("smaller", 0.0), ("classifier", 0.01)):
        changes = {**PPO, "critic__start": str(tmp_path / name)}
        with start.opened(tmp_path / f"run_{name}", **changes) as run:
            critic = critic_of(run).model
            assert len(critic.trunk.layers) == 1
            assert critic.score.weight.unique().tolist() == [pytest.approx(score)]
            collected = gather(run)
            learn(run, collected)
            answer = rollouts(collected)[0]
            seen = plain_values(critic, answer.task.token_ids, answer.completion.token_ids)
            assert seen.isfinite().all() and (seen != 0).all()
    beside = {**changes, "adapter__rank": 2}  # and learns as the policy does
    with start.opened(tmp_path / "adapted", **beside) as run:
        named = [name for name, _ in critic_of(run).model.learning_parameters()]
        assert all("lora_" in name or name == "score.weight" for name in named)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_critic_is_exported_and_begins_another_run(
    rank: int, start: Start, tmp_path: Path
) -> None:
    with start.opened(tmp_path / "run", **PPO, critic__adapter=rank) as run:
        advance(run, 3)
        run.keeper.save_and_wait()
        answer = rollouts(gather(run))[0]
        asked = (answer.task.token_ids, answer.completion.token_ids)
        expected = plain_values(critic_of(run).model, *asked).detach()
    found = export_critic(tmp_path / "run", tmp_path / "critic")
    assert found.max <= found.limit and (expected != 0).all()
    with start.opened(tmp_path / "next", **PPO, critic__start=str(tmp_path / "critic")) as run:
        again = plain_values(critic_of(run).model, *asked).detach()
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-5)
    auto = pytest.importorskip("transformers").AutoModelForTokenClassification
    other = auto.from_pretrained(tmp_path / "critic")
    logits = other(torch.tensor([[*asked[0], *asked[1]]])).logits[0, len(asked[0]) - 1 : -1, 0]
    torch.testing.assert_close(logits.detach(), expected, rtol=0, atol=1e-5)
    with pytest.raises(ModelError, match="exists already"):
        export_critic(tmp_path / "run", tmp_path / "critic")


def test_a_folder_that_is_no_critic_for_this_policy_is_refused(
    start: Start, tmp_path: Path
) -> None:
    own = load(start.model)
    letters = character_files("zyxwv0123456789+=,;")
    shape = replace(own.model.config, vocab_size=len(Tokenizer.from_files(letters)))
    save(Transformer(shape).initialise(torch.Generator()), tmp_path / "other", letters)
    wrong = {**PPO, "critic__start": str(tmp_path / "other")}
    with pytest.raises(ConfigError, match=r"has another tokenizer than .* reads the policy's"):
        check_config(small(**start.settings(**wrong)))
    made = padded(own)
    save_classifier(ScalarHead(made.model), tmp_path / "narrow", made.files, "token")
    file = tmp_path / "narrow" / "model.safetensors"
    tensors = load_file(file)
    tensors["score.weight"] = torch.zeros(1, 3)
    save_file(tensors, file)
    narrow = {**PPO, "critic__start": str(tmp_path / "narrow")}
    with (
        pytest.raises(ModelError, match="hidden states of width 3, and its layers give"),
        start.opened(tmp_path / "run", **narrow),
    ):
        pass
    missing = {**PPO, "critic__start": str(tmp_path / "nothing")}
    with pytest.raises(ModelError, match="nothing"):
        check_config(small(**start.settings(**missing)))
    embedded = {**wrong, "model__path": "tiny"}  # whose tokenizer is made on the spot
    with (
        pytest.raises(ConfigError, match="has another tokenizer than tiny"),
        start.opened(tmp_path / "embedded", **embedded),
    ):
        pass
    save(Transformer(replace(own.model.config, max_positions=6)).initialise(torch.Generator()),
         tmp_path / "short", own.files)  # fmt: skip
    short = {**PPO, "critic__start": str(tmp_path / "short")}
    with (
        pytest.raises(ConfigError, match=r"reads up to 6 tokens, and a prompt with its answer"),
        start.opened(tmp_path / "run", **short),
    ):
        pass


@pytest.mark.parametrize("policy", ["folder", "tiny"])
def test_what_is_not_yet_a_model_is_no_critic(policy: str, start: Start, tmp_path: Path) -> None:
    """A run's folder, and a checkpoint that is an adapter: said before anything is learned."""
    with start.opened(tmp_path / "earlier", **PPO, adapter__rank=2) as run:
        advance(run)
        run.keeper.save_and_wait()
    changes = {} if policy == "folder" else {"model__path": "tiny"}
    for place, why in (
        ("earlier", "is the folder of a run, not a model. `groupwise export .* --critic"),
        ("earlier/checkpoints/latest", "is an adapter, not a model.*folds an adapter"),
    ):
        asked = {**PPO, **changes, "critic__start": str(tmp_path / place)}
        with pytest.raises(ModelError, match=why):
            check_config(small(**start.settings(**asked)))


def test_settings_of_a_critic_are_refused_without_one(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"critic\.clip_norm=2\.0 would be ignored by grpo"):
        check_config(small(**start.settings(recipe="grpo", critic__clip_norm=2.0)))


def test_an_evaluation_compares_the_critic_with_what_really_follows(
    start: Start, tmp_path: Path
) -> None:
    """A critic that knows the prompts' rewards is right about every place of every answer."""
    changes = {
        **PLAIN,
        "reward": "small_prompt",
        "data__eval": start.tasks("spread", [(a, b) for b in range(2) for a in range(10)]),
        "eval__tasks": 20,
        "critic__truth_prompts": 10,
        "steps": 60,
    }
    with start.opened(tmp_path, **changes) as run:
        critic = critic_of(run)
        blind = value_truth(run.config, run.parts)
        assert "eval/critic/correlation" not in blind  # it says 0 everywhere
        tasks = run.parts.held_out[:10]
        rewards = [float(str(task.prompt)[:1] in "01234") for task in tasks]
        assert len(set(rewards)) == 2
        known = dict(zip([task.token_ids for task in tasks], rewards, strict=True))

        def knows(score: Any) -> dict[str, Tensor]:
            rows = score.sequences
            value_N = torch.tensor([known[tuple(prompt)] for prompt in rows.prompts])
            return {"old_value_NT": value_N[:, None].expand(-1, rows.width)}

        critic.streams = knows
        found = value_truth(run.config, run.parts)
        assert critic_of(run) is critic
    assert found["eval/critic/correlation"] == pytest.approx(1.0)
    assert found["eval/critic/mean_error"] == pytest.approx(0.0)
    assert found["eval/critic/points"] <= 40 and found["eval/critic/bias/tenth_1"] == 0
    assert blind["eval/critic/bias"] == pytest.approx(-sum(rewards) / 10, abs=0.2)


# --- measures ---------------------------------------------------------------------------------


def batch_with(value: list[list[float]], reward: list[float]) -> TokenBatch:
    mask = torch.ones(len(value), len(value[0]))
    return TokenBatch.build(
        mask_NT=mask,
        group_N=list(range(len(reward))),
        reward_N=reward,
        old_value_NT=torch.tensor(value, dtype=torch.float64),
    )


def test_explained_variance_by_hand() -> None:
    made = recipe("ppo", {"shaping": ""}).set("auxiliary", "value_loss(lam=1.0)")
    batch = batch_phase(made, batch_with([[0.0, 1.0], [0.0, 0.5]], [1.0, 0.0])).batch
    target_NT = batch.prepared["value_loss"]["return_NT"]
    every = batch.mask_NT
    # R - V is 1, 0, 0, -0.5: variance 5/16 - 1/64 = 19/64; that of R is 1/4.
    found = explained_variance(batch, batch.old_value_NT, target_NT, every)
    assert found == pytest.approx(1 - (19 / 64) / (1 / 4))
    last = torch.tensor([[False, True], [False, True]])
    assert explained_variance(batch, batch.old_value_NT, target_NT, last) == pytest.approx(0.75)
    flat = batch_phase(made, batch_with([[0.0, 1.0], [0.0, 0.5]], [1.0, 1.0])).batch
    target_NT = flat.prepared["value_loss"]["return_NT"]
    assert explained_variance(flat, flat.old_value_NT, target_NT, every) is None


def test_first_and_last_are_the_policys_own_tokens() -> None:
    """Answers of unequal length, one begins and ends beside a tool's text, one learns nothing."""
    mask = torch.tensor([[0, 1, 0, 1, 0], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]])
    value = [[9, 0.5, 9, 1.0, 9], [0.5, 7, 0.5, 9, 9], [0.25, 9, 9, 9, 9], [-50, 50, 9, 9, 9]]
    batch = TokenBatch.build(
        mask_NT=mask,
        group_N=[0, 1, 2, 3],
        reward_N=[1.0, 0.0, 1.0, 0.0],
        old_value_NT=torch.tensor(value, dtype=torch.float64),
    )
    learn_N = torch.tensor([True, True, True, False])
    batch = replace(batch, learn_N=learn_N, reward_N=batch.task_reward_N)
    reward_NT = torch.tensor([1.0, 0.0, 1.0, 0.0])[:, None].expand(4, 5)
    found = value_measures(batch, batch.valid(reward_NT))
    # R is 1, 0, 1: variance 2/9. R − V is 1/2, −1/2, 3/4 at first, 0, −1/2, 3/4 at last tokens.
    assert found["critic/explained_variance_first"] == pytest.approx(1 - (42 / 144) / (2 / 9))
    assert found["critic/explained_variance_last"] == pytest.approx(1 - (38 / 144) / (2 / 9))
    assert found["critic/bias_1"] == pytest.approx((-0.5 + 0.5 - 0.75) / 3)
    assert found["critic/bias_4"] == pytest.approx(7.0)  # the second token of three
    assert found["critic/bias_6"] == pytest.approx(0.0)  # the second of two
    assert found["critic/bias_7"] == pytest.approx(0.5)  # the third of three
    assert (found["critic/value_min"], found["critic/value_max"]) == (0.25, 7.0)
    assert (found["critic/reward_min"], found["critic/reward_max"]) == (0.0, 1.0)
