"""Runs with LoRA: the reference, delivery to the sampler, resuming, exporting, bad input, plans."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import cold_start
import pytest
import torch
from cold_start import configured, run_from
from runs import left_behind, metrics, quiet
from safetensors.torch import load_file, save_file

from groupwise.cli import main
from groupwise.config import difference, load
from groupwise.engine.native import engine as native
from groupwise.engine.server import Server
from groupwise.errors import ConfigError, ModelError, RunError
from groupwise.evaluate.evaluate import evaluate_path
from groupwise.model.adapters import peft_files
from groupwise.model.adapters.lora import adapters, attach
from groupwise.model.adapters.quantized import QuantizedLinear
from groupwise.model.adapters.targets import Spec
from groupwise.model.fingerprint import fingerprint
from groupwise.model.formats.checkpoint import load as load_model
from groupwise.model.policy import load_policy, spec_of
from groupwise.stages.checks import check_config
from groupwise.stages.describe import describe
from groupwise.sync import export as exporting
from groupwise.training import loop
from groupwise.training.opening import open_run
from groupwise.watch.display import Display

LORA: dict[str, Any] = {"adapter__rank": 4, "optim__learning_rate": 1e-2, "eval__every": 0}
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cold_start.make(tmp_path_factory.mktemp("model") / "cold")


@pytest.fixture(scope="module")
def ones(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """A reward that a few updates can raise."""
    file = tmp_path_factory.mktemp("reward") / "ones.py"
    file.write_text("def ones(completion):\n    return completion.count('1') / 4\n")
    return {f"{file}:ones": 1.0}


@pytest.fixture(scope="module")
def trained(model: str, ones: dict[str, float], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_from(
        model,
        folder,
        **LORA,
        steps=10,
        prompts_per_step=8,
        group_size=8,
        reward__parts=ones,
        engine__slots=64,
        checkpoint__every_steps=5,
    )
    return folder


@pytest.fixture(scope="module")
def sft(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the other run learned half way, as an adapter's folder."""
    folder = tmp_path_factory.mktemp("sft") / "adapter"
    exporting.export(exporting.checkpoint_in(trained, "step_5"), folder, adapter=True)
    return str(folder)


# --- it learns ------------------------------------------------------------------------------------


def test_what_is_rewarded_rises_and_the_base_stays(trained: Path, model: str) -> None:
    reward = [line["reward/mean"] for line in metrics(trained)[1:]]
    assert sum(reward[-3:]) > sum(reward[:3]) + 0.3
    for line in metrics(trained)[1:]:
        assert line["mismatch/abs_max"] < 1e-6  # as without an adapter
        assert line["ratio/max"] == line["ratio/mean"] == 1.0
    assert len({line["weights/fingerprint"] for line in metrics(trained)[1:]}) == 10
    found = load_policy(trained / "checkpoints" / "latest")
    base = dict(load_model(model).model.named_parameters())
    for name, parameter in found.model.named_parameters():
        assert (".adapter." in name) == (name not in base)
        assert name not in base or torch.equal(parameter, base[name])


def test_every_checkpoint_is_a_small_folder_of_peft_s(trained: Path, model: str) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    for name in ("step_5", "step_10"):
        folder = trained / "checkpoints" / name
        assert not (folder / "config.json").exists() and not (folder / "model.safetensors").exists()
        assert (folder / "tokenizer.json").is_file()
        raw = json.loads((folder / peft_files.CONFIG).read_text())
        assert raw["base_model_name_or_path"] == str(Path(model).resolve()) and raw["r"] == 4
        theirs = peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), folder
        ).eval()
        ours = load_policy(folder)
        ids = ours.tokenizer.encode("3+4=7")
        with torch.no_grad():
            logp = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
        wanted = logp[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        found = exporting.logp_of(ours.model, [tuple(ids)])
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_what_is_trained_is_said_at_the_start(model: str, sft: str, tmp_path: Path) -> None:
    out = io.StringIO()
    config = configured(
        model, **(LORA | {"adapter__rank": 2}), model__adapters=[sft], recipe="grpo", steps=1
    )
    loop.train(config, tmp_path / "run", Display(out, live=False))
    said = " ".join(out.getvalue().split())
    assert f"folded into the base, part of the starting policy: {sft}" in said
    assert "LoRA (fresh): rank 2, alpha 32, scale 16, on 14 layers" in said
    assert "are trained at a learning rate of 0.01" in said
    assert "the reference is the starting policy (base + adapter); it shares the frozen" in said


def test_a_base_of_another_name_and_dropout_of_before_are_notes(
    model: str, sft: str, tmp_path: Path
) -> None:
    shutil.copytree(sft, tmp_path / "sft")
    file = tmp_path / "sft" / peft_files.CONFIG
    raw = json.loads(file.read_text()) | {"base_model_name_or_path": "some/other"}
    file.write_text(json.dumps(raw | {"lora_dropout": 0.05}))
    out = io.StringIO()
    changes = LORA | {"adapter__rank": 0, "adapter__path": str(tmp_path / "sft"), "steps": 1}
    loop.train(configured(model, **changes), tmp_path / "run", Display(out, live=False))
    said = " ".join(out.getvalue().split())
    assert "says that it was made for 'some/other', and model.path is" in said
    assert "was trained with lora_dropout=0.05; here it is adapter.dropout=0" in said


# --- the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fresh", "folded in", "trained further"])
def test_bug_18_kl_is_0_at_step_0_with_an_adapter_loaded(
    how: str, model: str, sft: str, ones: dict[str, float], tmp_path: Path
) -> None:
    """The reference is the starting policy: the base with the SFT adapter, not the base."""
    changes = {
        "fresh": {},
        "folded in": {"model__adapters": [sft]},
        "trained further": {"adapter__path": sft, "adapter__rank": 0},
    }[how]
    changes = LORA | changes | {"recipe": "grpo", "steps": 2, "reward__parts": ones}
    config = configured(model, **changes)
    with open_run(config, tmp_path / "run", quiet()) as run:
        loop.begin(run)
        assert run.parts.learner.roles["reference"] is not None
        start = run.parts.loaded.tokenizer.encode("3+4=7")
        at_start = exporting.logp_of(run.parts.learner.roles["reference"].model, [tuple(start)])
        base = exporting.logp_of(load_model(model).model, [tuple(start)])
        shared = {id(p) for p in run.parts.loaded.model.parameters()}
        own = [
            p
            for p in run.parts.learner.roles["reference"].model.parameters()
            if id(p) not in shared
        ]
        assert sum(p.numel() for p in own) == sum(
            p.numel() for p in run.parts.loaded.model.parameters() if p.requires_grad
        )
    if how != "fresh":
        wanted = exporting.logp_of(load_policy(sft).model, [tuple(start)])
        torch.testing.assert_close(at_start, wanted, rtol=0, atol=1e-5)
        assert float((at_start - base).abs().max()) > 0.05
    run_from(model, tmp_path / "run", **changes)
    first, second = metrics(tmp_path / "run")[1:]
    assert first["kl/ref"] == 0.0 < second["kl/ref"]


# --- delivery -------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["shared", "int8"])
def test_bug_38_an_adapter_that_does_not_reach_the_sampler_stops_the_run(
    weights: str, model: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    def base_alone(engine: native.NativeEngine, version: int) -> None:
        engine.source.sync(version)
        if weights == "shared":
            engine.source.model = native.make_source("int8", engine.source.model, version).model
        adapters(engine.source.model)["model.layers.1.mlp.up_proj"].lora_B.data.zero_()

    monkeypatch.setattr(native.NativeEngine, "sync", base_alone)
    with pytest.raises(RunError, match=r"After step 1 the engine does not sample from version 1"):
        many = {"prompts_per_step": 16}  # so that the first step learns whatever the start
        run_from(model, tmp_path / "run", **LORA, **many, recipe="tis", engine__weights=weights)


def test_updates_and_restoring_never_move_an_adapter_in_memory(
    model: str, trained: Path, tmp_path: Path
) -> None:
    """Captured steps of a GPU read the addresses that they were captured with."""
    many = {"prompts_per_step": 16}  # so that the first step learns whatever the start
    config = configured(model, **LORA, **many, model__dtype="bfloat16", guard__mismatch=0.01)
    with open_run(config, tmp_path / "run", quiet()) as run:
        policy = run.parts.loaded.model
        before = {name: p.data_ptr() for name, p in policy.named_parameters()}
        marks = fingerprint(policy.named_parameters())
        loop.begin(run)
        loop.one_step(run, loop.threading.Event())
        assert fingerprint(policy.named_parameters()) != marks
        run.stage.take_back(run.parts, trained / "checkpoints" / "latest")
        assert {name: p.data_ptr() for name, p in policy.named_parameters()} == before


# --- resume ---------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several updates": {"recipe": "dapo", "recipe__shaping": "", "recipe__schedule__updates": 2},
    "a moving reference": {"recipe": "grpo", "reference__update": "ema:0.9"},
    "dropout": {"adapter__dropout": 0.2},
    "dropout, recomputed": {"adapter__dropout": 0.2, "optim__recompute": True},
    "a stale sampler": {"recipe": "tis", "engine__weights": "stale:2"},
    "eight bits": {"model__quantize": "int8"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_bug_46_n_and_n_more_steps_equal_2n_with_an_adapter(
    kind: str, model: str, tmp_path: Path
) -> None:
    changes = LORA | KINDS[kind]
    run_from(model, tmp_path / "whole", **changes, steps=4, eval__tasks=0)
    run_from(model, tmp_path / "halves", **changes, steps=2, eval__tasks=0)
    run_from(model, tmp_path / "halves", **changes, steps=4, eval__tasks=0)
    whole, halves = left_behind(tmp_path / "whole"), left_behind(tmp_path / "halves")
    assert whole.keys() == halves.keys() and "adapter_model.safetensors" in whole
    assert halves == whole


def test_an_adapter_trained_further_resumes_from_its_own_checkpoint(
    model: str, sft: str, tmp_path: Path
) -> None:
    changes = LORA | {"adapter__rank": 0, "adapter__path": sft, "eval__tasks": 0}
    run_from(model, tmp_path / "whole", **changes, steps=3)
    run_from(model, tmp_path / "halves", **changes, steps=1)
    run_from(model, tmp_path / "halves", **changes, steps=3)
    assert left_behind(tmp_path / "halves") == left_behind(tmp_path / "whole")
    raw = json.loads(
        (tmp_path / "whole" / "checkpoints" / "latest" / peft_files.CONFIG).read_text()
    )
    assert (raw["r"], raw["lora_alpha"]) == (4, 32)


def test_targets_of_peft_s_may_name_layers_of_other_architectures_in_any_order(
    model: str, sft: str, tmp_path: Path
) -> None:
    """PEFT takes the targets that it finds, and stores them in the order of a set."""
    folder = shutil.copytree(sft, tmp_path / "adapter")
    raw = json.loads((folder / peft_files.CONFIG).read_text())
    many = ["v_proj", "query_key_value", *raw["target_modules"]]
    (folder / peft_files.CONFIG).write_text(json.dumps(raw | {"target_modules": many}))
    settings: dict[str, Any] = {"adapter__path": str(folder), "steps": 1, "eval__every": 0}
    run_from(model, tmp_path / "run", **settings)
    run_from(model, tmp_path / "asked", **settings, adapter__targets=sorted(set(many)))
    assert main(["plan", f"model.path={model}", f"adapter.path={folder}"]) == 0
    with pytest.raises(ModelError, match=r"adapter\.targets=.* is not what"):
        run_from(model, tmp_path / "other", **settings, adapter__targets=["q_proj"])


def test_what_may_change_on_resume(model: str, tmp_path: Path) -> None:
    before = configured(model, **LORA)
    for name, value, may in (
        ("adapter__dropout", 0.1, True),
        ("adapter__rank", 8, False),
        ("adapter__alpha", 8.0, False),
        ("adapter__targets", ["q_proj"], False),
        ("model__quantize", "int8", False),
        ("model__adapters", ["x"], False),
    ):
        (change,) = difference(before, configured(model, **(LORA | {name: value})))
        assert change.compatible == may, name


def test_a_base_that_changed_under_a_run_is_refused(model: str, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "base")
    run_from(str(tmp_path / "base"), tmp_path / "run", **LORA, steps=1)
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(RunError, match="The weights of this run are not those"):
        run_from(str(tmp_path / "base"), tmp_path / "run", **LORA, steps=2)
    with pytest.raises(ModelError, match=r"trained beside other weights than .*base holds now"):
        load_policy(tmp_path / "run" / "checkpoints" / "latest")


# --- dropout --------------------------------------------------------------------------------------


def test_bug_22_dropout_is_in_updates_alone_and_is_measured(
    model: str, sft: str, tmp_path: Path
) -> None:
    """Before the first step sampler and learner agree; what dropout does is in the metrics."""
    changes = LORA | {"adapter__rank": 0, "adapter__path": sft, "adapter__dropout": 0.3}
    run_from(model, tmp_path / "run", **changes, recipe="grpo", steps=2)
    begun, first, *_ = metrics(tmp_path / "run")
    assert begun["gate/mismatch_max"] < 1e-5
    assert first["mismatch/abs_mean"] > 1e-3
    # One update: its own log-probabilities are the old ones.
    assert first["ratio/max"] == 1.0
    run_from(
        model, tmp_path / "two", **changes, recipe="grpo", recipe__schedule__updates=2, steps=1
    )
    assert metrics(tmp_path / "two")[1]["ratio/max"] > 1.001  # against the sampler, without it


def test_bug_22_what_dropout_does_is_said_and_a_sequence_ratio_refuses_it() -> None:
    (said,) = [
        x
        for x in check_config(load(None, ["adapter.rank=8", "adapter.dropout=0.1"]))
        if "drop" in x
    ]
    assert "sampled and scored without dropout" in said and "ratio" not in said
    several = ["recipe=dapo", "adapter.rank=8", "adapter.dropout=0.1", "engine.max_tokens=256"]
    assert any(
        "the ratio of the first update is not 1" in x for x in check_config(load(None, several))
    )
    assert (
        "on-policy but for dropout"
        in describe(load(None, ["recipe=grpo", "adapter.rank=8", "adapter.dropout=0.1"]))[0]
    )
    for recipe, refused in (("gspo", True), ("dr_grpo", False)):
        config = load(
            None,
            [f"recipe={recipe}", "adapter.rank=8", "adapter.dropout=0.1"]
            + (["recipe.schedule.updates=4"] if refused else []),
        )
        if refused:
            with pytest.raises(ConfigError, match=r"adapter.dropout=0.1 with sequence_geomean"):
                check_config(config)
        else:
            check_config(config)


@pytest.mark.parametrize("recompute", [False, True])
def test_pairs_learn_through_an_adapter(
    recompute: bool, model: str, ones: dict[str, float], tmp_path: Path
) -> None:
    changes = LORA | {"recipe": "best_of_group_dpo", "reward__parts": ones, "adapter__dropout": 0.2}
    run_from(model, tmp_path / "run", **changes, optim__recompute=recompute, steps=3)
    lines = metrics(tmp_path / "run")[1:]
    assert lines[0]["loss/total"] == pytest.approx(0.6931, abs=1e-3)  # the reference is the start
    assert len({line["weights/fingerprint"] for line in lines}) == 3
    assert all(line["optim/skipped"] == 0 for line in lines)


# --- export and evaluation ------------------------------------------------------------------------


def test_export_writes_the_whole_model_or_the_adapter_and_checks_both(
    trained: Path, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    assert main(["export", str(trained), str(tmp_path / "whole")]) == 0
    said = capsys.readouterr().out
    assert "the adapter is folded into its base" in said and "read back" in said
    assert not peft_files.is_adapter(tmp_path / "whole")
    assert not (tmp_path / "whole" / peft_files.BASE).exists()
    policy = load_policy(exporting.checkpoint_in(trained))
    ids = tuple(policy.tokenizer.encode("3+4=7"))
    wanted = exporting.logp_of(policy.model, [ids])
    merged = exporting.logp_of(load_model(tmp_path / "whole").model, [ids])
    torch.testing.assert_close(merged, wanted, rtol=0, atol=1e-5)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    with torch.no_grad():
        logp = theirs(torch.tensor([ids])).logits[0].log_softmax(-1)
    theirs_T = logp[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    torch.testing.assert_close(theirs_T, wanted, rtol=0, atol=1e-5)

    asked = ["export", str(trained), str(tmp_path / "alone"), "--adapter", "--json"]
    assert main(asked) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["max"] == found["limit"] == 0.0 and found["tokens"] > 10
    again = exporting.logp_of(load_policy(tmp_path / "alone").model, [ids])
    assert torch.equal(again, wanted)


def test_an_adapter_in_half_precision_is_checked_too(trained: Path, tmp_path: Path) -> None:
    source = exporting.checkpoint_in(trained)
    found = exporting.export(source, tmp_path / "half", torch.bfloat16, adapter=True)
    assert 0 < found.max <= found.limit == 0.5
    tensors = load_file(tmp_path / "half" / peft_files.TENSORS)
    assert {x.dtype for x in tensors.values()} == {torch.bfloat16}


def test_an_export_that_loses_the_adapter_is_refused(
    trained: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """A merge that did nothing would write a model that looks right."""

    def forget(policy: Any) -> None:
        for name in adapters(policy):
            policy.get_submodule(name).adapter = None

    monkeypatch.setattr(exporting, "merge", forget)
    with pytest.raises(ModelError, match="say something else"):
        exporting.export(exporting.checkpoint_in(trained), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_beside_a_folded_one_is_not_exported_alone(
    model: str, sft: str, tmp_path: Path
) -> None:
    run_from(model, tmp_path / "run", **LORA, model__adapters=[sft], steps=1)
    source = exporting.checkpoint_in(tmp_path / "run")
    with pytest.raises(ModelError, match=r"base with .*adapter folded in.*Leave --adapter out"):
        exporting.export(source, tmp_path / "alone", adapter=True)
    raw = json.loads((source / peft_files.CONFIG).read_text())
    assert raw["base_model_name_or_path"].endswith(f"cold + {sft}")  # nothing that PEFT could load
    exporting.export(source, tmp_path / "whole")
    with pytest.raises(ModelError, match="whole model, and has no adapter"):
        exporting.export(tmp_path / "whole", tmp_path / "none", adapter=True)


def test_evaluating_a_run_reads_base_and_adapter(trained: Path, model: str) -> None:
    """And the base can be named where it was moved to."""
    config = configured(model, eval__tasks=8)
    samples = [evaluate_path(path, config).examples for path in (trained, model)]
    assert [x["completion"] for x in samples[0]] != [x["completion"] for x in samples[1]]


def test_probing_and_serving_a_run_read_base_and_adapter(
    trained: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", str(trained), "--prompts", "2", "--json"]) == 0
    assert "adapter" not in capsys.readouterr().err
    served: list[Any] = []

    def forever(server: Server) -> None:
        served.append(server.engine.source.model)
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", forever)
    for path in (trained, trained / "checkpoints" / "latest"):
        assert main(["serve", str(path), "--port", "0"]) == 0
    assert all(len(adapters(model)) == 14 for model in served) and len(served) == 2


def test_a_base_that_was_moved_can_be_named(model: str, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "base")
    run_from(str(tmp_path / "base"), tmp_path / "run", **LORA, steps=1)
    (tmp_path / "base").rename(tmp_path / "moved")
    source = exporting.checkpoint_in(tmp_path / "run")
    with pytest.raises(ModelError, match=r"is not here: .*base. Name its folder with --base"):
        exporting.export(source, tmp_path / "out")
    run = ["export", str(tmp_path / "run"), str(tmp_path / "out")]
    assert main([*run, "--base", str(tmp_path / "moved")]) == 0


# --- quantised ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_quantised_base_trains_and_exports_the_numbers_it_trained_beside(
    kind: str, model: str, tmp_path: Path
) -> None:
    many = {"prompts_per_step": 16}  # so that the first step learns whatever the start
    run_from(model, tmp_path / "run", **LORA, **many, model__quantize=kind, steps=2, recipe="grpo")
    begun, first, second = metrics(tmp_path / "run")
    assert begun["gate/mismatch_max"] < 1e-6 and first["kl/ref"] == 0.0 < second["kl/ref"]
    source = exporting.checkpoint_in(tmp_path / "run")
    policy = load_policy(source).model
    assert isinstance(policy.layers[0].mlp.up_proj, QuantizedLinear)
    found = exporting.export(source, tmp_path / "out")
    assert any(f"as {kind}: what was written are those numbers" in note for note in found.notes)
    merged = load_model(tmp_path / "out").model
    layer = policy.layers[1].self_attn.q_proj
    whole = layer.dequantised(torch.float32) + layer.adapter.delta()
    torch.testing.assert_close(
        merged.layers[1].self_attn.q_proj.weight.detach(), whole, rtol=0, atol=1e-6
    )


# --- settings -------------------------------------------------------------------------------------


def test_an_adapter_has_a_learning_rate_of_its_own() -> None:
    assert load().optim.learning_rate == 1e-6
    assert load(None, ["adapter.rank=8"]).optim.learning_rate == 1e-5
    assert load(None, ["adapter.path=x"]).optim.learning_rate == 1e-5
    assert load(None, ["adapter.rank=8", "optim.learning_rate=3e-6"]).optim.learning_rate == 3e-6
    assert (
        load({"optim": {"learning_rate": 1e-6}, "adapter": {"rank": 4}}).optim.learning_rate == 1e-6
    )
    low = load(None, ["adapter.rank=8", "optim.learning_rate=1e-6"])
    assert any("learns next to nothing" in text for text in check_config(low))
    assert not any(
        "learns next to nothing" in x for x in check_config(load(None, ["adapter.rank=8"]))
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["adapter.targets=['q_proj']"], r"adapter.targets=.*there is none: adapter.rank=0"),
        (["adapter.alpha=16"], "adapter.alpha=16.0 is of an adapter"),
        (["adapter.rslora=true"], "adapter.rslora=True is of an adapter"),
        (["adapter.dropout=0.1"], "adapter.dropout=0.1 is of an adapter"),
        (["model.quantize=nf4"], "without an adapter all of them are trained"),
        (["adapter.path=a", "model.adapters=['a']"], "it would count twice"),
        (
            ["adapter.rank=12", "engine.exact=true", "model.device=cuda", "model.dtype=bfloat16"],
            "multiple of 8, and it is 12. Take 16",
        ),
        (
            ["adapter.rank=8", "adapter.dropout=0.1", "engine.exact=true", "model.device=cuda",
             "model.dtype=bfloat16"],
            "engine.exact=true can't hold with adapter.dropout",
        ),
    ],
)  # fmt: skip
def test_settings_that_can_not_be(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_config(load(None, settings))
    if "exact" not in str(settings):
        with pytest.raises(ConfigError, match=said):
            check_config(load(None, [*settings, "recipe=dpo"]))


def test_values_out_of_range_are_refused() -> None:
    for setting in ("adapter.rank=-1", "adapter.dropout=1", "model.quantize=int4", "adapter.r=4"):
        with pytest.raises(ConfigError):
            load(None, [setting])


def test_files_beside_the_configuration_are_meant(tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    file = tmp_path / "run.toml"
    file.write_text('[model]\nadapters = ["sft"]\n[adapter]\npath = "sft"\n')
    found = load(file)
    assert found.model.adapters == (str(tmp_path / "sft"),) == (found.adapter.path,)


def test_exact_mode_refuses_a_stored_adapter_whose_rank_its_kernels_can_not_take(sft: str) -> None:
    config = load(None, [f"adapter.path={sft}", "engine.exact=true"])
    with pytest.raises(ModelError, match=r"multiple of 8, and .* has rank 4"):
        spec_of(config)


def test_mistakes_are_told_before_the_base_is_read(
    model: str, sft: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("groupwise.model.policy.load", lambda *_: pytest.fail("it was loaded"))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"adapter__targets": ["q_prj"]}, r"'q_prj' matches no layer. Did you mean 'q_proj'"),
        ({"adapter__path": "nowhere", "adapter__rank": 0}, "There is no adapter 'nowhere'"),
        ({"model__adapters": [model]}, "whole model, not an adapter"),
        ({"adapter__path": sft, "adapter__rank": 8}, r"adapter.rank=8 is not what .* \(4\)"),
        ({"adapter__path": sft, "adapter__rank": 0, "adapter__alpha": 5.0}, "adapter.alpha=5.0 is"),
    ]
    for number, (changes, said) in enumerate(cases):
        with pytest.raises(ModelError, match=said):
            run_from(model, tmp_path / str(number), **(LORA | changes))


def test_an_adapter_for_another_base_is_refused_by_a_run(
    model: str, sft: str, tmp_path: Path
) -> None:
    from runs import run

    with pytest.raises(
        ModelError, match=r"lora_\w.weight of .* has shape .* and this model .* needs"
    ):
        run(tmp_path / "wide", tiny__width=64, tiny__cold_start_steps=1, model__adapters=[sft])


# --- what it takes --------------------------------------------------------------------------------


def test_a_plan_with_an_adapter(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*changes: str) -> dict[str, Any]:
        settings = [f"model.path={model}", "recipe=grpo", "engine.max_tokens=4", *changes]
        assert main(["plan", *settings, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found["memory"] | {"seconds": found["seconds"]}

    full, lora = planned(), planned("adapter.rank=2")
    policy = load_model(model).model
    attach(policy, Spec(2, 32.0), seed=0)
    count = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert lora["adapter"] == lora["gradients"] == lora["reference"] == 4 * count
    assert lora["optimizer moments"] == 2 * lora["adapter"] < full["optimizer moments"] / 2
    assert lora["weights"] == full["weights"] and full["reference"] == full["weights"]
    assert lora["head"] < full["head"]
    few = planned("adapter.rank=2", "model.quantize=nf4")
    assert few["weights"] < lora["weights"] / 2 and few["dequantised"] > 0
    assert main(["plan", f"model.path={model}", "adapter.rank=2", "model.quantize=int8"]) == 0
    assert "LoRA trains" in capsys.readouterr().out
