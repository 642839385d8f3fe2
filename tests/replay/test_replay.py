"""`groupwise replay`: other methods on recorded rollouts, against formulas and the record."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import damage_scorers
import pyarrow as pa
import pytest
import torch
from steps import TASKS, Start, advance
from torch import Tensor

from groupwise.cli import main
from groupwise.errors import RecipeError, RunError
from groupwise.optim.packs import outputs
from groupwise.optim.roles.implicit_reward import logp_behind
from groupwise.recipes import recipe as recipe_of
from groupwise.replay.measures import angle, gram, rank, summed
from groupwise.replay.methods import check, methods_of
from groupwise.replay.parameters import gradient, load_weights, pushed
from groupwise.replay.recorded import Recorded, open_recorded, read_step
from groupwise.replay.replay import Replay, StepResult
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.rollouts import read, store
from groupwise.view.tokens import token_page, tokenizer_of

BIG = {"optim__learning_rate": 2e-2}
PLUGIN = """
import torch
from groupwise import recipe, register
from groupwise.methods.slots import gate

@gate(equation="S = A")
def plain(log_ratio_NT, advantage_NT, batch):
    return advantage_NT * log_ratio_NT, torch.zeros_like(batch.mask_NT)

register(recipe("grpo").replace(name="upside", gate=plain()))
"""
FOUR = {"recipe__schedule__updates": 4, **BIG}
# Runs of two steps by name: their own recipe must come out as it was recorded.
RUNS: dict[str, dict[str, Any]] = {
    "one": {"recipe": "grpo", "reward": "odd_for_some", "prompts_per_step": 6},
    "moved": {"recipe": "grpo", **FOUR},
    "dapo": {"recipe": "dapo", "reward": "odd_for_some", **FOUR},
    "gspo": {"recipe": "gspo", **FOUR},
    "lopti": {"recipe": "lopti", **BIG},
    # As many tasks as a step takes: the second meets prompts that the first has seen.
    "dcpo": {"recipe": "dcpo", "recipe__schedule__updates": 2, "prompts_per_step": 8, **BIG},
    "drop": {
        "recipe": "dr_grpo",
        "overlong": "drop",
        "engine__max_tokens": 6,
        "prompts_per_step": 8,
    },
    "remax": {"recipe": "remax"},
    "ppo": {"recipe": "ppo", "recipe__schedule__updates": 2, **BIG},
    "alone": {"recipe": "ppo", "critic__alone_steps": 1, **BIG},
    "vapo": {"recipe": "vapo", "critic__alone_steps": 0, "prompts_per_step": 4, **BIG},
    "prime": {"recipe": "prime", "reward": "odd_for_some", "reward_model__learning_rate": 1e-2},
    "rloo": {"recipe": "rloo"},
    "sspo": {"recipe": "sspo", **FOUR},
    "tis": {"recipe": "tis", "engine__weights": "int8", **FOUR},
}
CRITICS = ("ppo", "alone", "vapo")
# Runs that do not come out as recorded, or are one of those above again.
RUNS_BESIDE: dict[str, dict[str, Any]] = {
    "int8": {"recipe": "tis", "engine__weights": "int8"},
    "lambda": {"recipe": "lambda_grpo", "prompts_per_step": 8, **BIG},
}


class Runs:
    """Runs that are made when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.start = folder, Start(folder)

    def __call__(self, name: str) -> Recorded:
        path = self.folder / name
        if not path.exists():
            few = {"data__train": self.start.tasks("few", TASKS[:8])} if name == "dcpo" else {}
            with self.start.opened(path, **(RUNS | RUNS_BESIDE)[name], **few) as run:
                advance(run, 1)
                run.keeper.save()
                advance(run, 1)
        return open_recorded(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("replay"))


def replayed(run: Recorded, *recipes: str, step: int = 1) -> StepResult:
    (seen,) = Replay(run, methods_of(run, recipes), [step])
    return seen


# --- the record -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_the_own_recipe_comes_out_as_recorded(runs: Runs, name: str) -> None:
    run = runs(name)
    for seen in Replay(run, methods_of(run, []), run.steps):
        own, wrote, mask_NT = seen.methods[0], seen.record.streams, seen.record.mask_NT
        assert torch.equal(own.advantage_NT, wrote["advantage"])
        assert torch.equal(own.coefficient_NT, wrote["coefficient"])
        assert torch.equal(own.clipped_NT, wrote["clipped"])
        torch.testing.assert_close(own.ratio_NT[mask_NT].float(), wrote["ratio"][mask_NT])
        assert own.advantage_NT.any()
        assert ("return" in wrote) == (own.target_NT is not None) == (name in CRITICS)
        if own.target_NT is not None:
            assert torch.equal(own.target_NT, wrote["return"]) and wrote["return"].any()


def test_steps_in_which_the_policy_waited_are_told_and_have_no_ratios(runs: Runs) -> None:
    run = runs("alone")
    first, second = (run.step(step) for step in run.steps)
    assert first.waited and not second.waited
    table = read(first.path)
    for name in ("ratio", "clipped", "entropy"):
        assert table.column(name).null_count == table.num_rows, name
    assert (first.streams["value"] == 0).all() and second.streams["value"].any()
    # Monte-Carlo targets: at every token the reward of its answer, whatever the KL has taken off.
    replay = Replay(run, methods_of(run, ["ppo recipe.gate.high=0.3"]), run.steps)
    seen = list(replay)
    assert any("the policy waited" in note for note in replay.notes)
    assert (seen[0].methods[1].ratio_NT[first.mask_NT] == 1).all()


def test_a_critic_or_a_reward_model_that_was_not_there_is_asked_for(runs: Runs) -> None:
    for run, text, words in (
        ("one", "ppo", "Only a run with a critic"),
        ("one", "prime", "Only a run of prime"),
        ("alone", "ppo recipe.penalty='entropy_bonus(coef=0.01)'", "waited for its critic"),
    ):
        recorded = runs(run)
        record = recorded.step(recorded.steps[0])
        with pytest.raises(RecipeError, match=words):
            check(recorded, methods_of(recorded, [text])[1], record)


def test_a_log_probability_is_found_again_from_its_process_reward() -> None:
    """To the bit of the reward, whatever the sizes."""
    chance = torch.Generator().manual_seed(0)
    for spread in (1e-6, 1e-2, 1.0):
        ref_NT = -torch.rand((50, 40), generator=chance) * 9
        logp_NT = ref_NT + spread * torch.randn((50, 40), generator=chance)
        process_NT = 0.05 * (logp_NT - ref_NT)
        found_NT = logp_behind(process_NT, ref_NT, 0.05)
        assert torch.equal(0.05 * (found_NT - ref_NT), process_NT)
        torch.testing.assert_close(found_NT, logp_NT, rtol=1e-6, atol=1e-6)


def test_clips_are_there_to_be_reproduced(runs: Runs) -> None:
    for name in ("moved", "dapo", "gspo", "lopti"):
        run = runs(name)
        assert any(run.step(step).streams["clipped"].any() for step in run.steps), name
    rows = read(runs("drop").folder.rollout(1)).to_pylist()
    assert {row["finish"] for row in rows} == {"eos", "length"}


def test_sizes_are_the_runs_unless_set(runs: Runs) -> None:
    texts = ["dr_grpo", "dr_grpo recipe.aggregation.length=5", "dapo recipe.schedule.updates=2"]
    _, fitted, own, dapo = methods_of(runs("moved"), texts)
    assert fitted.recipe.aggregation["length"] == 8 and own.recipe.aggregation["length"] == 5
    assert fitted.recipe.schedule["updates"] == 4 and dapo.recipe.schedule["updates"] == 2
    assert dapo.recipe.shaping[0]["max_length"] == 8 and dapo.recipe.shaping[0]["cache"] == 2


# --- weights ----------------------------------------------------------------------------------


def test_weights_are_those_of_the_formulas(runs: Runs) -> None:
    """d loss / d ℓ by hand, from the columns of the file alone."""
    seen = replayed(runs("moved"), "grpo recipe.penalty=", "cispo recipe.filter=", "gspo", "rloo")
    run, plain, cispo, gspo, _ = seen.methods
    wrote, mask_NT = seen.record.streams, seen.record.mask_NT
    r_NT, A_NT = wrote["ratio"].double(), wrote["advantage"].double()
    u_NT = wrote["coefficient"].double()
    open_NT = ~(((A_NT > 0) & (r_NT > 1.2)) | ((A_NT < 0) & (r_NT < 0.8)))
    assert not open_NT[mask_NT].all()
    policy_NT = -u_NT * A_NT * r_NT * open_NT
    torch.testing.assert_close(plain.weight_NT, policy_NT, rtol=1e-6, atol=1e-9)

    # k3: d (e^(ref−ℓ) + ℓ − ref − 1) / dℓ = 1 − e^(ref−ℓ), and ℓ = ℓ^μ + log r.
    logp_NT = wrote["sampler_logp"].double() + torch.where(mask_NT, r_NT, 1.0).log()
    kl_NT = 0.04 * u_NT * (1 - (wrote["ref_logp"].double() - logp_NT).exp())
    torch.testing.assert_close(run.weight_NT, policy_NT + kl_NT * mask_NT, rtol=1e-6, atol=1e-9)

    # CISPO: min(r, 5)·A per token, nothing clipped, all tokens of the batch alike.
    tokens = (mask_NT & cispo.learned_NT).sum()
    hand_NT = -(cispo.advantage_NT.double() * r_NT.clamp(max=5.0)) / tokens
    torch.testing.assert_close(
        cispo.weight_NT, torch.where(cispo.learned_NT, hand_NT, 0.0), rtol=1e-6, atol=1e-9
    )
    assert not cispo.clipped_NT.any()

    # GSPO: one ratio an answer; its gradient is shared by the answer's tokens.
    n_N1 = mask_NT.sum(1, keepdim=True)
    s_N1 = ((logp_NT - wrote["sampler_logp"].double()) * mask_NT).sum(1, keepdim=True) / n_N1
    s_N1, a_N1 = s_N1.exp(), gspo.advantage_NT[:, :1].double()
    shut_N1 = ((a_N1 > 0) & (s_N1 > 1.0004)) | ((a_N1 < 0) & (s_N1 < 0.9997))
    hand_NT = -a_N1 * s_N1 * ~shut_N1 / n_N1 / len(mask_NT) * mask_NT
    torch.testing.assert_close(gspo.weight_NT, hand_NT, rtol=1e-5, atol=1e-9)
    assert torch.equal(gspo.clipped_NT, shut_N1 & mask_NT)


def test_a_method_of_the_same_settings_is_no_other(runs: Runs) -> None:
    run = runs("moved")
    again = Replay(run, methods_of(run, ["grpo", "grpo recipe.gate.high=0.2"]), run.steps)
    list(again)
    for method in again.result()["methods"]:
        assert method["cosine"] == pytest.approx(1.0, abs=1e-12)
        assert method["norms"] == pytest.approx(1.0)
        assert method["newly_clipped"] == method["no_longer_clipped"] == method["reversed"] == 0


@pytest.mark.parametrize("name", ["grpo", "gspo", "rloo", "cispo", "dr_grpo"])
def test_gradients_of_weights_are_the_weighted_sum_of_tokens(runs: Runs, name: str) -> None:
    """With the weights that sampled: ∇θ = Σ weight · ∇θ log-probability."""
    run = runs("one")
    seen = replayed(run, name)
    weights, mine = load_weights(run, 1), seen.methods[1]
    assert weights.step == 0
    true = gradient(run, weights, mine.method.recipe, mine.batched)
    model = weights.model
    for parameter in model.parameters():
        parameter.grad = None
    from groupwise.optim.assemble import sequences_of

    sequences = sequences_of(seen.record.groups)
    logp_NT = outputs(model, sequences.pack(range(len(mine.weight_NT))), temperature=1.0)["logp_NT"]
    (mine.weight_NT.float() * logp_NT).sum().backward()
    hand = torch.cat([_grad(p) for p in model.parameters()])
    assert float((true - hand).norm() / hand.norm()) < 1e-4
    summed_up = pushed(run, weights, mine, seen.record)
    assert float((summed_up - hand).norm() / hand.norm()) < 1e-5


def _grad(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter).flatten() if parameter.grad is None else (
        parameter.grad.flatten()
    )  # fmt: skip


def test_the_norm_of_the_own_gradient_is_the_runs(runs: Runs) -> None:
    """What the optimizer saw, and its step after that, from the checkpoint before."""
    run = runs("one")
    again = Replay(run, methods_of(run, ["gspo"]), run.steps, gradients=True)
    norms = [math.sqrt(seen.products["parameter_"][0][0]) for seen in again]
    wrote = [line["optim/grad_norm"] for line in run.folder.read_metrics() if line["step"]]
    assert norms == pytest.approx(wrote, rel=1e-4)
    assert len(norms) == 2


def test_the_moved_update_is_measured_with_its_own_weights(runs: Runs) -> None:
    """At ratio 1 a method and itself with another clip range are the same; as recorded they are
    not, by what Σ weight · ∇θ log-probability says."""
    run = runs("moved")
    again = Replay(run, methods_of(run, ["grpo recipe.gate.high=9"]), [1], gradients=True)
    (seen,) = again
    method = again.result()["methods"][1]
    assert method["parameter_cosine"] == pytest.approx(1.0, abs=1e-6)
    assert method["no_longer_clipped"] > 0 and method["moved_parameter_cosine"] < 0.999
    weights = load_weights(run, 1)
    one, other = (pushed(run, weights, each, seen.record) for each in seen.methods)
    cosine = float(torch.cosine_similarity(one.double(), other.double(), dim=0))
    assert method["moved_parameter_cosine"] == pytest.approx(cosine, abs=1e-6)


def test_only_steps_with_their_own_weights_have_gradients(runs: Runs) -> None:
    run = runs("rloo")
    for place in run.folder.checkpoints.glob("step_1"):
        place.rename(place.with_name("kept_1"))
    again = Replay(run, methods_of(run, ["grpo"]), run.steps, gradients=True)
    assert [bool(seen.weights) for seen in again] == [True, False]
    assert any("were not kept" in note for note in again.result()["notes"])
    alone = Replay(run, methods_of(run, ["grpo"]), [2], gradients=True)
    assert [seen.weights.startswith("the starting weights") for seen in alone] == [True]
    assert any("No checkpoint holds" in note for note in alone.result()["notes"])


# --- groups -----------------------------------------------------------------------------------


def test_dynamic_sampling_is_applied_to_what_was_recorded(runs: Runs) -> None:
    run = runs("one")
    (seen,) = Replay(run, methods_of(run, ["dapo"]), [1])
    mine = seen.methods[1]
    dead = [len({r.grade.reward for r in group}) == 1 for group in seen.record.groups]
    assert any(dead) and not all(dead)
    assert mine.batched.wanted == sum(dead)
    row_dead = torch.tensor([x for x, g in zip(dead, seen.record.groups, strict=True) for _ in g])
    assert not mine.learned_NT[row_dead].any() and not mine.weight_NT[row_dead].any()
    # Denominators are those of the tokens that are left.
    tokens = int(mine.learned_NT.sum())
    assert mine.coefficient_NT[mine.learned_NT].unique().tolist() == pytest.approx([1 / tokens])


def test_groups_that_the_run_sent_away_are_counted(runs: Runs) -> None:
    run = runs("dapo")
    (seen,) = Replay(run, methods_of(run, ["dr_grpo", "dapo recipe.gate.high=0.5"]), [1])
    dropped = len(seen.record.dropped)
    assert dropped > 0
    assert [m.batched.kept_of_dropped for m in seen.methods] == [0, dropped, 0]


# --- angles -----------------------------------------------------------------------------------


def test_angles() -> None:
    products = gram([torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0]), torch.zeros(2)])
    assert products == [[25.0, 24.0, 0.0], [24.0, 25.0, 0.0], [0.0, 0.0, 0.0]]
    assert angle(products, 1, 0).cosine == pytest.approx(24 / 25)
    assert angle(products, 2, 0).cosine is None and angle(products, 2, 0).norms == 0.0
    assert angle(products, 0, 2).norms is None
    lost = gram([torch.tensor([3.0, float("nan")]), torch.tensor([4.0, 3.0])])
    assert angle(lost, 1, 0).cosine is None and angle(lost, 1, 0).norms is None
    both = summed([products, products])
    assert angle(both, 1, 0).cosine == pytest.approx(24 / 25) and both[0][0] == 50.0


# --- the command ------------------------------------------------------------------------------


def test_the_command_writes_what_the_viewer_opens(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs("one")
    command = ["replay", str(run.folder.path), "--recipe", "gspo", "--recipe", "dapo"]
    out = tmp_path / "out"
    assert main([*command, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "gspo" in shown and "cosine" in shown and "To bear in mind" in shown
    found = json.loads((out / "replay.json").read_text())
    assert [m["name"] for m in found["methods"]] == ["run", "gspo", "dapo"]
    page = (out / "replay.html").read_text()
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    assert (out / "replay.png").read_bytes().startswith(b"\x89PNG")

    folder = RunFolder(out / "dapo")
    (seen,) = Replay(run, methods_of(run, ["gspo", "dapo"]), [1])
    mine, place_N = seen.methods[2], seen.record.place_N
    rows = read(folder.rollout(1)).to_pylist()
    assert mine.batched.wanted > 0
    for row, place in enumerate(place_N):
        wrote = rows[place]
        assert wrote["used"] == (row in mine.batched.row_N.tolist())
        if not wrote["used"]:
            assert wrote["advantage"] is None and wrote["weight"] is None
            continue
        tokens = len(wrote["token_ids"])
        assert wrote["weight"] == mine.weight_NT[row, :tokens].float().tolist()
        assert wrote["clipped"] == mine.clipped_NT[row, :tokens].tolist()
    used = next(row for row in rows if row["used"])
    shown_tokens = token_page(
        folder.rollout(1), used["group"], used["sample"], 0, tokenizer_of(folder)
    )
    assert shown_tokens["named"]
    streams = {stream["name"]: stream["values"] for stream in shown_tokens["streams"]}
    assert streams["weight"] == pytest.approx(used["weight"], rel=1e-5)

    # Again into the same place: nothing of the first is left over, and all that is not its own.
    (out / "mine" / "rollouts").mkdir(parents=True)
    assert main([*command[:4], "--step", "2", "--out", str(out), "--json"]) == 0
    assert not (out / "dapo").exists() and not (out / "gspo/rollouts/step_1.parquet").exists()
    assert json.loads(capsys.readouterr().out)["steps"] == [2]
    assert (out / "mine").is_dir()


def test_rare_tokens_that_methods_disagree_about_come_first(runs: Runs) -> None:
    run = runs("moved")
    again = Replay(run, methods_of(run, ["cispo recipe.filter="]), run.steps)
    list(again)
    tokens = again.result()["rare_tokens"]
    assert tokens[0]["differs"] and not tokens[0]["methods"]["cispo filter="]["clipped"]
    assert tokens[0]["methods"]["run"]["clipped"]
    assert tokens == sorted(tokens, key=rank)
    assert {token["differs"] for token in tokens} == {True, False}
    assert all(token["probability"] < 0.2 for token in tokens)


def test_methods_have_folders_of_their_own(
    runs: Runs, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Names that a file system can't tell apart, or would not take; none is wider than a figure."""
    long = " ".join(f"recipe.gate.high={0.3 + n / 1000}" for n in range(20))
    texts = ("cispo recipe.filter=", "cispo recipe.filter=()", f"dapo {long}", f"dapo {long} ")
    words = [word for text in texts for word in ("--recipe", text)]
    command = ["replay", str(runs("one").folder.path), *words, "--step", "1", "--out"]
    assert main([*command, str(tmp_path / "out")]) == 0
    names = json.loads((tmp_path / "out/replay.json").read_text())["folders"]
    assert len(set(names)) == 5 and max(map(len, names)) < 70
    assert all(RunFolder(tmp_path / "out" / name).rollout(1).is_file() for name in names)
    assert not [str(each.message) for each in recwarn if "layout" in str(each.message)]


# --- what is said -----------------------------------------------------------------------------


def notes_of(run: Recorded, *recipes: str, gradients: bool = False) -> str:
    again = Replay(run, methods_of(run, recipes), [1], gradients)
    list(again)
    return " ".join(again.result()["notes"])


def test_clips_of_a_single_update_are_not_denied(runs: Runs) -> None:
    """A ratio to the sampler's own numbers, which int8 has rounded, can leave a range."""
    none, narrow = "grpo recipe.penalty=", "recipe.ratio.anchor=sampler recipe.gate.high=0.0001"
    assert "no clip range can be left" in notes_of(runs("int8"), none)
    assert "no clip range can be left" not in notes_of(runs("int8"), f"{none} {narrow}")


def test_moved_gradients_are_explained_where_there_are_any(runs: Runs) -> None:
    assert "∇θ*" not in notes_of(runs("one"), "gspo", gradients=True)
    assert "∇θ*" in notes_of(runs("moved"), "gspo", gradients=True)


def test_a_recipe_whose_file_was_changed_is_not_passed_off_as_the_runs(
    runs: Runs, tmp_path: Path
) -> None:
    """The record can't show it: advantages, coefficients and clips are the same."""
    file = tmp_path / "upside.py"
    file.write_text(PLUGIN)
    with runs.start.opened(tmp_path / "run", recipe=f"{file}:upside") as run:
        advance(run, 1)
        run.keeper.save()
    notes = {}
    for when, text in (("as it was", PLUGIN), ("changed", PLUGIN.replace("S = A", "S = A'"))):
        file.write_text(text)
        recorded = open_recorded(tmp_path / "run")
        replay = Replay(recorded, methods_of(recorded, []), [1])
        assert len(list(replay)) == 1
        notes[when] = " ".join(replay.result()["notes"])
    assert "was changed since" in notes["changed"]
    assert "was changed since" not in notes["as it was"]


def test_a_learned_exponent_is_nobodys_fault(runs: Runs) -> None:
    run = runs("lambda")
    again = Replay(run, methods_of(run, ["gspo"]), [2])
    list(again)
    said = " ".join(again.result()["notes"])
    assert "does not come out exactly" in said and "learned an exponent" in said
    assert "another groupwise" not in said


# --- what can't be done -----------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["replay", *words]) == 2
    return capsys.readouterr().err


def test_requests_that_make_no_sense(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(runs("gspo").folder.path)
    assert "Which method?" in refused(capsys, path)
    assert "Did you mean 'gspo'" in refused(capsys, path, "--recipe", "gspoo")
    assert "learns from pairs" in refused(capsys, path, "--recipe", "dpo")
    assert "recipe.penalty='" in refused(capsys, path, "--recipe", "grpo")
    assert "recipe.auxiliary='" in refused(capsys, path, "--recipe", "grpo@skyrl")
    own = tmp_path / "mine.py"
    own.write_text(
        "from groupwise import recipe\nfrom groupwise.methods.registry import register\n"
        'register(recipe("grpo").replace(name="replayed", gate="clip(low=0.2, high=0.4)"))\n'
    )
    said = refused(capsys, path, "--recipe", f"{own}:replayed recipe.gate.low=0.1")
    assert f"--recipe '{own}:replayed recipe.gate.low=0.1 recipe.penalty='" in said
    assert "recorded none: its reward gave whole answers one" in refused(
        capsys, path, "--recipe", "grpo_process recipe.penalty="
    )
    assert "held no reference" in refused(capsys, path, "--recipe", "grpo@openrlhf")
    assert "critic" in refused(capsys, path, "--recipe", "ppo")  # not its reference, too
    assert "names none" in refused(capsys, path, "--recipe", "")
    assert "greedy" in refused(capsys, path, "--recipe", "remax")
    assert "No rollout file holds it" in refused(capsys, path, "--recipe", "dppo_topk")
    assert "sets nothing" in refused(capsys, path, "--recipe", "gspo loud")
    assert "would ignore it" in refused(capsys, path, "--recipe", "gspo recipe.gate.cap=3")
    assert "1..2" in refused(capsys, path, "--recipe", "gspo", "--step", "7")
    assert "names no steps" in refused(capsys, path, "--recipe", "gspo", "--step", "last")
    assert "--verify" in refused(capsys, path, "--recipe", "gspo", "--steps", "2")
    assert "two questions" in refused(capsys, path, "--recipe", "gspo", "--verify")
    assert "There is no run folder" in refused(capsys, str(tmp_path / "none"), "--recipe", "gspo")
    assert "no config.toml" in refused(capsys, str(tmp_path), "--recipe", "gspo")
    assert "is a run folder" in refused(capsys, path, "--recipe", "gspo", "--out", path)
    (tmp_path / "diary.txt").write_text("mine")
    assert "something else" in refused(capsys, path, "--recipe", "gspo", "--out", str(tmp_path))
    assert (tmp_path / "diary.txt").read_text() == "mine"


def test_folders_without_what_is_needed(runs: Runs, tmp_path: Path) -> None:
    source = runs("one").folder
    empty = RunFolder(tmp_path / "empty")
    empty.rollouts.mkdir(parents=True)
    empty.write_config('recipe.name = "dpo"')
    with pytest.raises(RunError, match="learns from pairs"):
        open_recorded(empty.path)
    empty.write_config(source.config.read_text())
    with pytest.raises(RunError, match="no finished step with rollouts"):
        open_recorded(empty.path)

    # A rollout file whose metrics line never came does not count.
    empty.rollout(1).write_bytes(source.rollout(1).read_bytes())
    with pytest.raises(RunError, match="no finished step with rollouts"):
        open_recorded(empty.path)
    empty.metrics.write_bytes(source.metrics.read_bytes())
    assert open_recorded(empty.path).steps == [1]

    table = read(source.rollout(1))
    older = table.replace_schema_metadata({"groupwise.rollouts.version": "0"})
    store(empty.rollout(1), older)
    with pytest.raises(RunError, match="rollout schema"):
        open_recorded(empty.path).step(1)

    skipped = table.set_column(
        table.schema.get_field_index("advantage"), "advantage",
        pa.nulls(table.num_rows, table.schema.field("advantage").type),
    )  # fmt: skip
    store(empty.rollout(1), skipped)
    with pytest.raises(RunError, match="without advantage"):
        open_recorded(empty.path).step(1)

    empty.rollout(1).write_bytes(source.rollout(1).read_bytes()[:500])
    with pytest.raises(RunError, match="not a Parquet file"):
        open_recorded(empty.path).step(1)


def test_steps_without_an_update_are_left_out_of_several(runs: Runs, tmp_path: Path) -> None:
    source = runs("one").folder
    folder = RunFolder(tmp_path / "skipped")
    folder.rollouts.mkdir(parents=True)
    for name in ("config.toml", "metrics.jsonl", "rollouts/step_2.parquet"):
        (folder.path / name).write_bytes((source.path / name).read_bytes())
    table = read(source.rollout(1))
    at, kind = table.schema.get_field_index("advantage"), table.schema.field("advantage").type
    skipped = table.set_column(at, "advantage", pa.nulls(table.num_rows, kind))
    store(folder.rollout(1), skipped)
    run = open_recorded(folder.path)
    for recipe in ("gspo", "dcpo"):  # which looks at earlier steps, too
        for steps in ([1, 2], [2]):
            again = Replay(run, methods_of(run, [recipe]), steps)
            again.check()
            list(again)
            found = again.result()
            assert found["steps"] == [2]
            left_out = "Step 1 is left out: no update was made on its rollouts."
            assert (left_out in found["notes"]) == (len(steps) == 2 or recipe == "dcpo")
    store(folder.rollout(2), skipped)
    with pytest.raises(RunError, match="any of these 2 steps"):
        Replay(run, methods_of(run, ["gspo"]), [1, 2]).check()


def test_weights_that_are_gone_are_missed_before_anything_is_written(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = runs("one").folder, tmp_path / "out"
    gone = RunFolder(tmp_path / "gone")
    gone.rollouts.mkdir(parents=True)
    text = source.config.read_text()
    gone.write_config(text.replace(str(runs.start.model), str(tmp_path / "model")))
    for name in ("metrics.jsonl", "rollouts/step_1.parquet"):
        (gone.path / name).write_bytes((source.path / name).read_bytes())
    command = ("replay", str(gone.path), "--recipe", "gspo", "--out", str(out))
    assert main(list(command)) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert str(tmp_path / "model") in refused(capsys, *command[1:], "--gradients")
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_without_a_tokenizer_pieces_are_numbers(runs: Runs, tmp_path: Path) -> None:
    source = runs("one").folder
    bare = RunFolder(tmp_path / "bare")
    bare.rollouts.mkdir(parents=True)
    for name in ("config.toml", "metrics.jsonl", "rollouts/step_1.parquet"):
        (bare.path / name).write_bytes((source.path / name).read_bytes())
    run = open_recorded(bare.path)
    again = Replay(run, methods_of(run, ["gspo"]), [1])
    list(again)
    assert all(token["text"] == f"⟨{token['id']}⟩" for token in again.result()["rare_tokens"])
    with pytest.raises(RecipeError, match="saved no tokenizer"):
        list(Replay(run, methods_of(run, ["sspo"]), [1]))


@pytest.mark.parametrize("name", ["used", "weight_version", "reward", "text"])
def test_a_column_that_is_gone_is_named(name: str, tmp_path: Path) -> None:
    file = damage_scorers.branched(tmp_path)
    store(file, read(file).drop_columns([name]))
    with pytest.raises(RunError, match=f"step_1.parquet has no column {name}"):
        read_step(RunFolder(tmp_path / "run"), 1, recipe_of("grpo"))


def test_a_column_whose_name_is_torn_is_a_damaged_file(tmp_path: Path) -> None:
    file = damage_scorers.branched(tmp_path)
    file.write_bytes(file.read_bytes().replace(b"weight_version", b"weight_vers\xffon"))
    with pytest.raises(RunError, match=r"step_1\.parquet is not a Parquet file"):
        read(file)
