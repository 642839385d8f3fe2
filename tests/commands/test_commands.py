"""The commands before and after training: plan, doctor, export, init."""

from __future__ import annotations

import ast
import io
import itertools
import json
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from real_shapes import SEVEN, M, S
from runs import run as train_small

from groupwise.cli import main
from groupwise.commands import doctor, init, machine
from groupwise.commands.plan import named_gpu
from groupwise.common.extras import pip
from groupwise.config import Config, load
from groupwise.errors import ConfigError, ModelError, RunError
from groupwise.model import cost
from groupwise.model.config import ModelConfig
from groupwise.model.cost import Group
from groupwise.model.devices import Device
from groupwise.model.formats import checkpoint
from groupwise.model.formats.checkpoint import load as load_model
from groupwise.model.formats.checkpoint import save
from groupwise.model.formats.tokenizer import character_files
from groupwise.model.layers.transformer import Transformer
from groupwise.plan import estimate as planning
from groupwise.plan.estimate import Place, count
from groupwise.prepare.sizes import Prompts
from groupwise.sync import export as exporting

ROOT = Path(__file__).resolve().parents[2]
GiB = 2**30
H200 = named_gpu("H200")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(argv)
    out, err = capsys.readouterr()
    return status, out, err


def settings(*overrides: str, **keywords: Any) -> Config:
    base = {"recipe": "grpo@trl", "model.dtype": "bfloat16", "model.device": "cuda"}
    return load(base | keywords, overrides)


def folder_of(shape: ModelConfig, path: Path) -> Path:
    """A model's folder without weights."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(shape.to_hf()))
    return path


# --- plan: against what was measured ----------------------------------------------------------

WORKLOAD_S = ("prompts_per_step=64", "group_size=16", "engine.max_tokens=256")
WORKLOAD_M = ("prompts_per_step=64", "group_size=8", "engine.max_tokens=320")
S_PROMPTS, M_PROMPTS = Prompts(68, 80, ""), Prompts(97, 220, "")
GROWN = Prompts(75, 75, "")  # of the rows by size


@pytest.mark.parametrize(("shape", "measured"), [(S, 16.0e9), (M, 36.6e9)], ids=["135M", "1.5B"])
def test_long_answers_leave_a_part_of_a_micro_batch_empty(
    shape: ModelConfig, measured: float
) -> None:
    """Answers of 4,096 tokens: one fits into 8,192 behind its prompt of 75, seven into 32,768."""
    sizes = ("prompts_per_step=16", "group_size=8", "engine.max_tokens=4096")
    made = count(settings(*sizes), H200, shape, Prompts(75, 75, ""), 4096)
    held = planning.whole_answers(made.micro_tokens, Group(75, [4096] * 8))
    assert held == 75 + (1 if shape is M else 7) * 4096
    assert made.peak == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("shape", "workload", "more", "prompts", "measured"),
    [
        (S, WORKLOAD_S, ["optim.micro_tokens=20480"], S_PROMPTS, 12.65e9),
        (S, WORKLOAD_S, ["optim.micro_tokens=65536", "optim.recompute=true"], S_PROMPTS, 11.51e9),
        (S, WORKLOAD_S, [], S_PROMPTS, 17.81e9),
        (M, WORKLOAD_M, ["optim.micro_tokens=8192"], M_PROMPTS, 43.04e9),
    ],
    ids=["135M", "135M recomputed", "135M automatic", "1.5B"],
)
def test_memory_is_within_15_percent_of_what_an_h200_needed(
    shape: ModelConfig,
    workload: tuple[str, ...],
    more: list[str],
    prompts: Prompts,
    measured: float,
) -> None:
    made = count(settings(*workload, *more), H200, shape, prompts, 256)
    assert made.peak == pytest.approx(measured, rel=0.15)
    learning = sum(x for name, x in made.memory.items() if name != "cache")
    assert made.peak == learning  # parts add up, and the cache is smaller than what learning needs


CPU = Place(Device("two cores", 200e9, 20e9), True, 24e9)


@pytest.mark.parametrize(("micro", "measured"), [(320, 3.38 * GiB), (1024, 4.48e9)])
def test_memory_is_within_15_percent_of_what_a_cpu_needed(micro: int, measured: float) -> None:
    """SmolLM2-135M in float32, 8 x 8 x 32 tokens: benchmarks/cpu_step.py."""
    config = settings(
        "prompts_per_step=8", "group_size=8", "engine.max_tokens=32", "model.dtype=float32",
        f"optim.micro_tokens={micro}", "model.device=cpu",
    )  # fmt: skip
    made = count(config, CPU, S, Prompts(46, 47, ""), 32)
    assert made.peak == pytest.approx(measured, rel=0.15)
    assert made.seconds is not None
    # 314 tokens a second; the step took 21 to 24 s.
    assert made.seconds["rollout"] == pytest.approx(8 * 8 * 32 / 314, rel=0.25)
    assert made.step_seconds == pytest.approx(22.5, rel=0.25)


@pytest.mark.parametrize(("bits", "measured"), [("int8", 1276), ("nf4", 1429)])
def test_a_plan_counts_a_base_in_full_until_it_is_rounded(bits: str, measured: int) -> None:
    """SmolLM2-135M, MiB: benchmarks/adapters.py, where loading was the peak."""
    config = settings(
        "prompts_per_step=1", "group_size=4", "engine.max_tokens=8", "model.dtype=float32",
        "optim.micro_tokens=256", "model.device=cpu", "adapter.rank=16", f"model.quantize={bits}",
    )  # fmt: skip
    made = count(config, CPU, S, Prompts(4, 4, ""), 8)
    assert made.peak == pytest.approx(measured * 2**20, rel=0.15)


def test_memory_of_a_cpu_by_hand() -> None:
    """Plain PyTorch in every precision, logits in small chunks, and the process itself."""
    sizes = {"slots": 4, "max_tokens": 10, "prompt": 5, "group": 1, "micro_tokens": 300}
    parts = cost.memory(S, **sizes, width=4, cpu=True)
    assert parts["cache"] == 4 * 15 * 2 * 30 * 3 * 64 * 4
    layer = (6 * 576 + 15 * 64 + 2 * 576 + 4 * 1536) * 4 + 36
    head = 2**23 * 8 + 49152 * 576 * 4
    assert parts["micro-batch"] == 300 * 31 * layer + head
    assert cost.peak(parts) == sum(parts.values()) - parts["cache"]
    assert parts["process"] == cost.PROCESS and "process" not in cost.memory(S, **sizes)
    half = cost.activations(S, 2, cpu=True)
    assert half == 31 * ((layer - 36) // 2 + 36) > cost.activations(S, 2)


@pytest.mark.parametrize(
    ("shape", "workload", "prompts", "tokens", "rollout", "update"),
    [
        (S, WORKLOAD_S, S_PROMPTS, 256, 0.77, None),  # full length: the `rollout` row
        (S, ("prompts_per_step=16", "group_size=4"), GROWN, 256, 0.30, None),
        (S, ("prompts_per_step=16", "group_size=8"), GROWN, 4096, 10.8, 2.91),
        (M, ("prompts_per_step=16", "group_size=64"), GROWN, 256, 2.12, 5.48),
        (SEVEN, ("prompts_per_step=16", "group_size=4"), GROWN, 256, 1.29, None),
        (SEVEN, ("prompts_per_step=16", "group_size=64"), GROWN, 256, 6.96, None),
        (SEVEN, ("prompts_per_step=16", "group_size=8"), GROWN, 4096, 36.2, None),
        (M, WORKLOAD_M, M_PROMPTS, 232, 1.38, 2.46),  # answers of uneven length, up to 320
    ],
    ids=["135M", "135M few", "135M long", "1.5B many", "7B few", "7B many", "7B long", "1.5B"],
)
def test_times_are_near_what_an_h200_took(
    shape: ModelConfig,
    workload: tuple[str, ...],
    prompts: Prompts,
    tokens: int,
    rollout: float,
    update: float | None,
) -> None:
    longest = [] if "engine.max_tokens=320" in workload else [f"engine.max_tokens={tokens}"]
    made = count(settings(*workload, *longest), H200, shape, prompts, tokens)
    assert made.seconds is not None
    assert made.seconds["rollout"] == pytest.approx(rollout, rel=0.2)
    if update is not None:
        both = made.seconds["update"] + made.seconds["optimizer"]
        assert both == pytest.approx(update, rel=0.2)


def test_the_share_of_operations_between_the_two_that_were_measured() -> None:
    assert planning.update_share(10_000_000, cpu=False) == 0.28
    assert planning.update_share(7_000_000_000, cpu=False) == 0.59
    middle = round((135e6 * 1.5e9) ** 0.5)  # half way by the logarithm
    assert planning.update_share(middle, cpu=False) == pytest.approx(0.435, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "known", "memory"),
    [("A100-40", "A100-SXM4-40GB", 40e9), ("A100 40GB", "A100-SXM4-40GB", 40e9),
     ("a100", "A100", 80e9), ("A100 80GB", "A100", 80e9), ("H100", "H100", 80e9),
     ("H100 PCIe", "H100 PCIe", 80e9), ("RTX 4090", "4090", 24e9), ("Tesla T4", "T4", 16e9),
     ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB", 40e9), ("L40S", "L40S", 48e9),
     ("H100 20GB", "H100 PCIe", 20e9)],
)  # fmt: skip
def test_a_gpu_is_known_by_its_name_and_the_memory_in_it(
    name: str, known: str, memory: float
) -> None:
    """A card of 40 GB is not planned as one of 80."""
    found = named_gpu(name)
    assert (found.device.name, found.memory, found.device.memory) == (known, memory, memory)
    with pytest.raises(ConfigError, match="no figures"):
        named_gpu("A1000")


def test_a_gpu_without_bfloat16_is_not_planned_in_it() -> None:
    t4 = named_gpu("T4")
    made = count(settings(*WORKLOAD_S), t4, S, S_PROMPTS, 256)
    assert made.peak < 16e9 and made.fits is False
    (instead,) = planning.advice(made)
    assert instead.startswith("model.dtype=float32: ")
    wide = count(settings(*WORKLOAD_S, "model.dtype=float32"), t4, S, S_PROMPTS, 256)
    assert wide.fits and planning.advice(wide) == []  # nothing about kernels that it can't run
    large = count(settings(*WORKLOAD_M), t4, M, M_PROMPTS, 320)
    assert all(text.startswith("model.dtype=float32 and ") for text in planning.advice(large))
    assert not any("bfloat16" in text for text in planning.advice(large))


# --- plan: by hand ----------------------------------------------------------------------------

TOY = Place(Device("toy", 1e12, 1e11, 80e9), False, 80e9)


def test_phases_by_hand() -> None:
    """Recipes differ by what they score and how often they update."""
    few, prompts = ("prompts_per_step=4", "group_size=8"), Prompts(100, 100, "")

    def of(recipe: str, *more: str) -> dict[str, float]:
        found = count(settings(*few, *more, recipe=recipe), TOY, M, prompts, 64).seconds
        assert found is not None
        return found

    plain = of("grpo@trl")
    tokens = 4 * (100 + 8 * 63)
    layers = 2 * cost.layer_weights(M) * tokens
    head = 2 * 151936 * 1536 * 4 * 8 * 64
    pairs = 4 * (100 * 101 / 2 + 8 * (63 * 100 + 63 * 64 / 2))
    forward = (layers + head + 4 * 28 * 12 * 128 * pairs) / (1e12 * 0.59)
    assert plain["update"] == pytest.approx(3 * forward)
    assert plain["optimizer"] == pytest.approx(34 * cost.parameters(M) / (1e11 * 0.5))
    assert of("grpo@trl", "optim.recompute=true")["update"] == pytest.approx(4 * forward)
    scored = of("grpo")  # its KL holds on to a reference
    assert scored["score"] == pytest.approx(plain.get("score", 0) + forward)
    several = of("grpo@verl")
    assert several["optimizer"] == pytest.approx(4 * plain["optimizer"])
    twice = of("lopti")
    assert twice["update"] == pytest.approx(6 * forward)
    labelled = of("dpo")
    assert "rollout" not in labelled
    pair = of("grpo@trl", "group_size=2")
    assert labelled["update"] == pytest.approx(pair["update"])


def test_a_micro_batch_is_one_sequence_at_least_and_the_batch_at_most() -> None:
    prompts = Prompts(100, 300, "")
    few = ("prompts_per_step=2", "group_size=4", "engine.max_tokens=64")
    least = count(settings(*few, "optim.micro_tokens=10"), H200, M, prompts, 64)
    assert least.micro_tokens == 364
    whole = count(settings(*few), H200, M, prompts, 64)
    assert whole.micro_tokens == 2 * (100 + 4 * 64)


def test_what_does_not_fit_comes_with_what_does() -> None:
    config = settings(*WORKLOAD_M, "optim.micro_tokens=16384")
    place = Place(H200.device, False, 45e9)
    made = count(config, place, M, M_PROMPTS, 320)
    assert made.fits is False
    found = planning.advice(made)
    assert any(text.startswith("optim.micro_tokens=8192: ") for text in found)
    assert any(text.startswith("optim.recompute=true: ") for text in found)
    for text in found:  # each is true
        change = text.partition(":")[0]
        again = count(settings(*WORKLOAD_M, "optim.micro_tokens=16384", change), place, M,
                      M_PROMPTS, 320)  # fmt: skip
        assert again.fits, change
    small = count(settings(*WORKLOAD_M), Place(H200.device, False, 8e9), SEVEN, M_PROMPTS, 320)
    (refused,) = planning.advice(small)
    assert "a dense model of about" in refused


def test_a_plan_without_room_to_spare_says_so() -> None:
    made = count(settings(*WORKLOAD_M, "optim.micro_tokens=8192"), H200, M, M_PROMPTS, 320)
    assert made.fits and not made.tight
    barely = replace(made, place=Place(H200.device, False, made.peak + 2**29))
    assert barely.fits and barely.tight
    over = replace(made, place=Place(H200.device, False, made.peak - 1))
    assert not over.fits and not over.tight


def test_single_precision_on_a_gpu_is_told_what_it_misses() -> None:
    config = settings(*WORKLOAD_M, "model.dtype=float32")
    made = count(config, H200, M, M_PROMPTS, 320)
    assert made.seconds is None and made.fits
    (better,) = planning.advice(made)
    assert better.startswith("model.dtype=bfloat16 runs the kernels")
    assert any(text.startswith("no times") for text in planning.assumptions(made))


# --- plan: the command ------------------------------------------------------------------------


def test_plan_reads_a_configuration_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No weights, no tokenizer, no GPU; what is assumed is said."""
    model = folder_of(M, tmp_path / "model")
    argv = ("plan", f"model.path={model}", "model.dtype=bfloat16", "data.eval=arithmetic",
            "recipe=grpo@trl", "--gpu", "nvidia h200", "--json")  # fmt: skip
    status, out, _ = run(capsys, *argv)
    found = json.loads(out)
    assert status == 0 and found["fits"] is True
    assert found["parameters"] == 1_543_714_304
    assert found["memory"]["weights"] == 2 * 1_543_714_304
    assert found["prompts"]["mean"] == 128 and "assumed" in found["prompts"]["source"]
    assert found["device"]["name"] == "H200"
    status, out, _ = run(capsys, *argv[:-3], "--gpu", "T4")
    assert status == 1 and "does not fit" in out and "what would fit" in out


def test_plan_measures_prompts_as_the_model_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = character_files("abcdefghij ")
    shape = replace(S, vocab_size=12, hidden_size=16, num_heads=2, num_kv_heads=1, num_layers=1,
                    head_dim=8, intermediate_size=16)  # fmt: skip
    model = Transformer(shape).initialise(torch.Generator().manual_seed(0))
    save(model, tmp_path / "model", files)
    rows = [{"prompt": "a" * n, "answer": "b"} for n in (10, 20, 60)]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    status, out, _ = run(
        capsys, "plan", f"model.path={tmp_path / 'model'}", f"data.train={data}", "--json"
    )
    found = json.loads(out)
    assert status == 0
    assert (found["prompts"]["mean"], found["prompts"]["longest"]) == (30, 60)
    assert "3 prompts" in found["prompts"]["source"]


def test_plan_of_the_embedded_model_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = str(ROOT / "configs" / "tiny.toml")
    status, out, _ = run(capsys, "plan", tiny, "--tokens", "2")
    assert status == 0
    rows = {line.split("  ")[0]: line for line in out.splitlines() if line}
    for name in ("weights", "optimizer moments", "gradients", "activations", "head", "cache",
                 "peak", "rollout", "update", "optimizer", "step"):  # fmt: skip
        assert name in rows, name
    assert "fits" in rows["peak"] and "240 steps" in rows["step"]
    assert "answers of 2 tokens" in out


def test_plan_refuses_what_it_can_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, "plan", f"model.path={tmp_path}", "--gpu", "H100")
    assert status == 2 and "no config.json" in err
    status, _, err = run(capsys, "plan", "--gpu", "H300")
    assert status == 2 and "H200" in err
    status, _, err = run(capsys, "plan", "--tokens", "65")
    assert status == 2 and "engine.max_tokens" in err
    if not torch.cuda.is_available():
        status, _, err = run(capsys, "plan", "model.device=cuda")
        assert status == 2 and "--gpu" in err
    with pytest.raises(ConfigError, match="no figures"):
        named_gpu("Voodoo2")


# --- doctor -----------------------------------------------------------------------------------


def test_doctor_knows_what_is_required_and_what_the_code_imports() -> None:
    """Its tables are those of pyproject.toml and of the imports, no more and no less."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pairs = [re.fullmatch(r"([\w-]+)>=([\d.]+)", text) for text in project["dependencies"]]
    assert {pair[1]: pair[2] for pair in pairs if pair} == doctor.REQUIRED
    assert ">=" + ".".join(map(str, doctor.LEAST_PYTHON)) == project["requires-python"]
    imported = set()
    for file in (ROOT / "groupwise").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    others = imported - set(sys.stdlib_module_names) - {"groupwise"}
    packages = (*doctor.REQUIRED, *doctor.OPTIONAL)
    known = {name.removesuffix("-skinny").replace("-", "_") for name in packages}
    known |= {"yaml"} if "PyYAML" in packages else set()
    assert others <= known, "add them to groupwise/commands/doctor.py"


def test_doctor_finds_a_sound_machine_sound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "doctor", "--runs", str(tmp_path / "a" / "b"), "--json")
    found = json.loads(out)
    assert status == 0 and found["healthy"]
    by_name = {each["about"]: each for each in found["findings"]}
    assert by_name["torch"]["text"] == torch.__version__
    assert str(tmp_path) in by_name["disk"]["text"]
    assert not (tmp_path / "a").exists()  # only looked at
    assert by_name["cpu"]["text"].startswith(f"{machine.cores()} cores")


def test_doctor_works_without_any_package() -> None:
    """Not even PyTorch: it says what to install, and that nothing trains before."""
    line = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from groupwise.cli import main; "
    line += "sys.exit(main(['doctor', '--json']))"
    done = subprocess.run([sys.executable, "-S", "-c", line], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    found = {each["about"]: each for each in json.loads(done.stdout)["findings"]}
    for name, least in doctor.REQUIRED.items():
        assert found[name]["status"] == "broken"
        assert found[name]["mend"] == f"{pip()} install '{name}>={least}'"
    assert found["triton"]["status"] == "missing"
    assert found["triton"]["mend"] == f"{pip()} install triton"
    assert json.loads(done.stdout)["next"] == found["torch"]["mend"]
    assert "gpu" not in found  # who knows


def test_doctor_ends_with_the_one_command_to_run_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    cpu = [doctor.Check("gpu", "ok", "none; training runs on the CPU")]
    gpu = [doctor.Check("gpu", "ok", "H200")]
    full = [doctor.Check("disk", "broken", "full", "make room")]
    assert doctor.next_step(cpu)[0] == "groupwise train steps=50"
    assert doctor.next_step(gpu)[0] == "groupwise init mine.toml"
    assert doctor.next_step([*gpu, *full]) == (
        "make room",
        "mends disk, without which nothing trains",
    )
    assert doctor.next_step(cpu, ["a b.toml"])[0] == "groupwise train 'a b.toml'"
    shutil.copy(ROOT / "configs/tiny.toml", tmp_path / "mine.toml")
    assert doctor.next_step(gpu)[0] == "groupwise probe mine.toml"


def test_old_versions_and_full_disks_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    versions = {"torch": "2.9.1+cu128", "numpy": "1.26.0rc1", "rich": "13.10"}
    monkeypatch.setattr(doctor, "version", versions.get)
    assert doctor.required("torch", "2.11").status == "broken"  # 9 is less than 11
    assert doctor.required("numpy", "1.26").status == "ok"
    assert doctor.required("rich", "13.9").status == "ok"
    assert doctor.required("pyarrow", "18").status == "broken"
    assert doctor.disk(tmp_path).status == "ok"
    monkeypatch.setattr(doctor, "LEAST_DISK", 10**18)
    assert "too little" in doctor.disk(tmp_path).text
    (tmp_path / "file").touch()
    assert "can't be written" in doctor.disk(tmp_path / "file").text
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 2))
    assert doctor.python().status == "broken"


T4 = machine.Gpu("Tesla T4", 16 * GiB, 7.5, "550.1")


def test_gpus_as_the_driver_and_as_pytorch_see_them() -> None:
    (none,) = doctor.devices([], {"cuda": None, "gpus": []})
    assert none.status == "ok" and "CPU" in none.text
    (built,) = doctor.devices([T4], {"cuda": None, "gpus": []})
    assert built.status == "broken" and "without CUDA" in built.text
    (driver,) = doctor.devices([T4], {"cuda": "13.0", "gpus": []})
    assert driver.status == "broken" and "driver 550.1" in driver.text
    gpu = {"name": "Tesla T4", "memory": 15 * GiB, "bfloat16": False, "capability": "7.5"}
    (there,) = doctor.devices([T4], {"cuda": "13.0", "gpus": [gpu]})
    assert there.status == "ok" and "float32" in there.text and "15.0 GiB" in there.text
    assert "capability 7.5" in there.text
    (broken,) = doctor.devices([], "ImportError: libcudnn.so.9")
    assert broken.status == "broken" and "libcudnn" in broken.text
    assert list(doctor.devices([T4], None)) == []


def test_a_container_with_little_shared_memory_is_told_how_to_get_more() -> None:
    little = doctor.shared_memory(64 * 2**20)
    assert little.status == "missing" and "--shm-size" in little.mend  # one process trains anyway
    assert doctor.shared_memory(8 * GiB).status == "ok"


def test_whether_programs_can_be_isolated_is_told_and_never_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = pytest.importorskip("groupwise.graders.sandbox.pool")
    monkeypatch.setattr(pool, "report", lambda: {"bubblewrap": "no bwrap", "landlock": ""})
    found = doctor.programs()
    assert found.status == "ok" and "isolated by landlock" in found.text
    assert "bubblewrap" not in found.text
    monkeypatch.setattr(pool, "report", lambda: {"bubblewrap": "no bwrap", "landlock": "too old"})
    found = doctor.programs()
    assert found.status == "missing"  # training can run without
    assert "no bwrap" in found.text and "too old" in found.text
    assert "apt-get install bubblewrap" in found.mend
    assert "\n" not in doctor.text([found]).split("\n\n")[0]

    def fails() -> None:
        raise OSError("no /proc")

    monkeypatch.setattr(pool, "report", fails)
    assert doctor.programs().status == "missing" and "no /proc" in doctor.programs().text


def test_a_pytorch_that_crashes_is_a_finding(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'ImportError: undefined symbol' >&2; exit 1\n")
    fake.chmod(0o755)
    assert doctor.try_torch(str(fake)) == "ImportError: undefined symbol"
    fake.write_text("#!/bin/sh\nkill -SEGV $$\n")
    assert "status" in str(doctor.try_torch(str(fake)))
    assert "No such file" in str(doctor.try_torch(str(tmp_path / "none")))


def test_what_the_driver_says_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 9.0, 580.95'\necho 'Odd, [N/A], , '\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (gpu,) = machine.gpus()
    assert gpu == machine.Gpu("NVIDIA H200", 143771 * 2**20, 9.0, "580.95") and gpu.bfloat16
    assert not T4.bfloat16
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert machine.gpus() == []


def test_limits_of_a_container_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    free_cores, free_memory = machine.cores(), machine.memory_bytes()
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text("1073741824\n")
    assert (machine.cores(), machine.memory_bytes()) == (1, GiB)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert (machine.cores(), machine.memory_bytes()) == (free_cores, free_memory)


# --- export -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    train_small(folder, steps=2)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_exported_loads_in_transformers_and_says_the_same(
    dtype: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    status, said, _ = run(capsys, "export", str(trained), str(out), "--dtype", dtype)
    assert status == 0 and f"wrote {out}" in said and "differ by at most" in said
    if dtype == "float32":  # nothing was rounded
        assert "differ by at most 0 " in said
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert theirs.dtype == getattr(torch, dtype)
    ours = load_model(exporting.checkpoint_in(trained)).model
    token_T = torch.tensor([3, 1, 4, 1, 5])
    theirs_TV = theirs.float()(token_T[None]).logits[0].log_softmax(-1)
    theirs_T = theirs_TV[:-1].gather(1, token_T[1:, None])[:, 0]
    ours_T = exporting.logp_of(ours, [tuple(token_T.tolist())])
    near = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 5e-2}[dtype]
    torch.testing.assert_close(theirs_T, ours_T, atol=near, rtol=0)
    text = "7+5="
    assert AutoTokenizer.from_pretrained(out)(text)["input_ids"] == load_model(
        out
    ).tokenizer.encode(text)
    assert not (out / "resume").exists()


def test_which_checkpoint(trained: Path, tmp_path: Path) -> None:
    steps = trained / "checkpoints"
    assert exporting.checkpoint_in(trained) == (steps / "best").resolve()
    assert exporting.checkpoint_in(trained, "latest") == steps.resolve() / "step_2"
    assert exporting.checkpoint_in(trained, "step_1") == steps.resolve() / "step_1"
    assert exporting.checkpoint_in(steps / "step_1") == steps / "step_1"
    with pytest.raises(RunError, match="'step_2'"):
        exporting.checkpoint_in(trained, "step_9")
    with pytest.raises(RunError, match="no run"):
        exporting.checkpoint_in(steps / "step_1", "best")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(RunError, match="no checkpoint yet"):
        exporting.checkpoint_in(tmp_path)


def test_what_is_compared_comes_from_the_run(trained: Path) -> None:
    import pyarrow.parquet as pq

    source = exporting.checkpoint_in(trained, "step_1")
    found = exporting.sequences_for(source, load_model(source).tokenizer)
    rows = pq.read_table(trained / "rollouts" / "step_2.parquet").to_pylist()
    written = {(*row["prompt_token_ids"], *row["token_ids"]) for row in rows}
    assert len(found) == len({row["prompt_id"] for row in rows}) and set(found) <= written


@pytest.mark.parametrize("damage", ["one number", "not finite"])
def test_an_export_that_says_something_else_is_refused(
    damage: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves nothing behind."""
    real = checkpoint.contents

    def faulty(model: Transformer, files: Any, dtype: torch.dtype) -> checkpoint.Contents:
        with torch.no_grad():
            model.layers[0].mlp.down_proj.weight[0, 0] += 0.5 if damage == "one number" else 1e38
            model.layers[0].mlp.down_proj.weight[0, 0] *= 1 if damage == "one number" else 1e38
        return real(model, files, dtype)

    monkeypatch.setattr(exporting, "contents", faulty)
    with pytest.raises(ModelError, match="say something else"):
        exporting.export(exporting.checkpoint_in(trained), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_exports_that_can_not_be(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    status, _, err = run(capsys, "export", str(trained), str(tmp_path / "there"))
    assert status == 2 and "nothing is overwritten" in err
    source = exporting.checkpoint_in(trained)
    loaded = load_model(source)
    with torch.no_grad():
        loaded.model.layers[1].mlp.up_proj.weight[0, 0] = 1e5
    save(loaded.model, tmp_path / "large", loaded.files)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj.* 100000.*65504"):
        exporting.export(tmp_path / "large", tmp_path / "out", torch.float16)
    (tmp_path / "large" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="adapter"):
        exporting.export(tmp_path / "large", tmp_path / "out")
    status, _, err = run(capsys, "export", str(tmp_path / "nowhere"), str(tmp_path / "out"))
    assert status == 2 and "no folder here" in err
    assert not (tmp_path / "out").exists()


# --- init -------------------------------------------------------------------------------------


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))


class Terminal(io.StringIO):
    """A keyboard with these lines typed."""

    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("pipe")
def test_what_init_writes_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    status, out, err = run(capsys, "init", str(path))
    assert status == 0 and f"groupwise train {path}" in out
    assert "--model tiny, --data arithmetic, --turns none, --reward number, --device cpu" in err
    assert run(capsys, "train", str(path), "--dry-run")[0] == 0
    few = ("steps=1", "tiny.cold_start_steps=5", "eval.tasks=4", "tiny.layers=1", "tiny.width=16")
    status, out, err = run(capsys, "train", str(path), *few, "--run", str(tmp_path / "run"))
    assert status == 0 and not err
    before = path.read_bytes()
    status, _, err = run(capsys, "init", str(path), "--model", "other")
    assert status == 2 and "overwritten" in err and path.read_bytes() == before


@pytest.mark.usefixtures("pipe")
@pytest.mark.parametrize(
    ("model", "data", "device"),
    list(itertools.product(["tiny", "chatty", "plain"], ["arithmetic", "countdown", "rows.jsonl"],
                           ["cpu", "cuda"])),
)  # fmt: skip
def test_every_answer_gives_a_configuration_without_doubts(
    model: str,
    data: str,
    device: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, settings_ in (("chatty", {"chat_template": "{{ x }}"}), ("plain", {})):
        Path(name).mkdir()
        Path(name, "tokenizer_config.json").write_text(json.dumps(settings_))
    Path("rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    status, _, err = run(
        capsys, "init", "--model", model, "--data", data, "--device", device, "--reward", "number",
        "--turns", "none",
    )  # fmt: skip
    assert (status, err) == (0, "")
    status, _, err = run(capsys, "train", "groupwise.toml", "--dry-run")
    assert (status, err) == (0, "")
    found = load(Path("groupwise.toml"))
    assert (found.model.path, found.model.device, found.data.train) == (model, device, data)
    assert found.model.dtype == "auto"
    assert (found.data.template == "chat") == (model == "chatty")
    assert found.data.evaluates
    assert dict(found.reward.parts) == {"number": 1.0}


@pytest.mark.usefixtures("pipe")
@pytest.mark.parametrize(
    ("data", "reward"),
    [("arithmetic", "number"), ("arithmetic", "exact"), ("chain", "number"),
     ("countdown", "countdown"), ("rows.jsonl", "number"), ("rows.jsonl", "exact"),
     ("rows.csv", "number"), ("rows.parquet", "mine.py:own"), ("rows.jsonl", "mine.py:later")],
)  # fmt: skip
@pytest.mark.parametrize("model", ["tiny", "folder"])
def test_every_kind_of_data_and_reward_runs(
    model: str,
    data: str,
    reward: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One step of what init writes, with a model of one layer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "solution": str(i + 1)} for i in range(64)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lines = [",".join(row.values()) for row in rows]
    Path("rows.csv").write_text("\n".join(["prompt,answer,solution", *lines]))
    pq.write_table(pa.Table.from_pylist(rows), "rows.parquet")
    Path("mine.py").write_text(
        "def own(completion, answer):\n    return float(completion.startswith(answer))\n"
        "async def later(completion, answer):\n    return float(answer in completion)\n"
    )
    if model == "folder":
        shape = replace(S, vocab_size=97, hidden_size=16, num_heads=2, num_kv_heads=1,
                        num_layers=1, head_dim=8, intermediate_size=16)  # fmt: skip
        policy = Transformer(shape).initialise(torch.Generator().manual_seed(0))
        save(policy, tmp_path / model, character_files("".join(map(chr, range(32, 127)))))
    options = ("--model", model, "--data", data, "--reward", reward, "--device", "cpu",
               "--turns", "none")  # fmt: skip
    assert run(capsys, "init", "mine.toml", *options)[0] == 0
    few = ("steps=1", "tiny.cold_start_steps=5", "tiny.layers=1", "tiny.width=16", "eval.tasks=4",
           "prompts_per_step=4", "engine.max_tokens=4", "recipe.aggregation.length=4")  # fmt: skip
    status, _, err = run(capsys, "train", "mine.toml", *few, "--run", "run")
    assert status == 0, err
    last = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 1 and last["reward/failed_share"] == 0
    assert "reward/mean" in last and "eval/reward" in last


def test_init_asks_for_what_was_not_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("tiny\ncountdown\n\n\n"))
    monkeypatch.setattr(machine, "gpus", lambda: [T4])
    path = tmp_path / "asked.toml"
    status, _, err = run(capsys, "init", str(path), "--device", "cpu")
    assert status == 0 and err.count("> ") == 4
    assert "[countdown]" in err  # the reward that fits to the data is the default
    assert load(path).reward.parts == {"countdown": 1.0}
    assert init.default("device", {"model": "large"}) == "auto"
    assert init.default("device", {"model": "tiny"}) == "cpu"


@pytest.mark.usefixtures("pipe")
def test_init_says_what_is_not_there_and_refuses_what_can_not_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.toml"
    options = ("--model", "./no/model", "--data", "no.jsonl", "--reward", "no.py:f", "--turns",
               "none")  # fmt: skip
    status, _, err = run(capsys, "init", str(path), *options, "--device", "cpu")
    assert status == 0
    assert all(f"{name} is not there" in err for name in ("./no/model", "no.jsonl", "no.py"))
    status, _, err = run(capsys, "init", str(tmp_path / "b.toml"), "--device", "tpu")
    assert status == 2 and "Choose one of 'auto', 'cpu', 'cuda'" in err
    status, _, err = run(capsys, "init", str(tmp_path / "none" / "c.toml"), "--model", "tiny")
    assert status == 2 and "can't be written" in err
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.toml"]


def test_init_asks_again_and_keeps_what_was_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ["Qwen/Qwen2.5-0.5B-Instruct", "later.jsonl", "later.jsonl", "pyhton", "python",
             "nmber", "number", "gpu", "cuda"]  # fmt: skip
    monkeypatch.setattr(sys, "stdin", Terminal("\n".join(typed)))
    status, _, err = run(capsys, "init", "mine.toml")
    assert status == 0, err
    assert err.count("> ") == len(typed) and "Type it again if it will be" in err
    assert "Did you mean 'cuda'?" in err and "nmber" in err and "Did you mean 'python'?" in err
    found = load(Path("mine.toml"))
    assert found.model.path == typed[0] and found.data.train == "later.jsonl"
    assert (found.reward.parts, found.model.device) == ({"number": 1.0}, "cuda")
    assert (found.turns.tools, found.turns.max) == (("python",), 4)


OWN = """
class Echo:
    def reset(self, prompt, answer):
        self.answer = answer

    def step(self, text):
        return text, float(self.answer in text), self.answer in text

    def get_reward(self):
        return 0.0
"""


@pytest.mark.usefixtures("pipe")
@pytest.mark.parametrize(
    ("turns", "data", "part"),
    [("guess", "guess", "environment"), ("wordle", "wordle", "environment"),
     ("tictactoe", "tictactoe", "environment"), ("tries", "arithmetic", "environment"),
     ("calculator", "arithmetic", "number"), ("python", "arithmetic", "number"),
     ("search(folder='texts')", "rows.jsonl", "number"),
     ("own.py:Echo", "rows.jsonl", "environment")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*no token for:groupwise.errors.EngineWarning")
def test_every_environment_that_init_offers_runs(
    turns: str,
    data: str,
    part: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One step of what init writes: episodes are played, and rewarded."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "solution": str(i + 1)} for i in range(64)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("own.py").write_text(OWN)
    Path("texts").mkdir()
    Path("texts", "a.txt").write_text("One and one are two.")
    asked = ("--data", data) if data == turns else ("--data", data, "--turns", turns)
    assert run(capsys, "init", "mine.toml", *asked)[0] == 0
    assert load(Path("mine.toml")).reward.parts == {part: 1.0}
    few = ("steps=1", "tiny.cold_start_steps=5", "tiny.layers=1", "tiny.width=16", "eval.tasks=4",
           "prompts_per_step=4", "engine.max_tokens=20",
           "recipe.aggregation.length=20")  # fmt: skip
    status, _, err = run(capsys, "train", "mine.toml", *few, "--run", "run")
    assert status == 0, err
    last = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 1 and last["reward/failed_share"] == 0
    assert last["turns/mean"] >= 1 and "eval/reward" in last


@pytest.mark.usefixtures("pipe")
@pytest.mark.parametrize(
    ("model", "rate", "chat"),
    [("Qwen/Qwen2.5-0.5B", 5e-6, False), ("Qwen/Qwen2.5-0.5B-Instruct@main", 5e-6, True),
     ("HuggingFaceTB/SmolLM2-135M-Instruct", 1e-5, True), ("google/gemma-3-1b-it", 5e-6, True),
     ("Qwen/Qwen2.5-Coder-1.5B-Instruct", 3e-6, True), ("org/Some-7B", 1e-6, False),
     ("org/nameless", 1e-6, False), ("Qwen/Qwen3-30B-A3B", 1e-6, False)],
)  # fmt: skip
def test_init_takes_ids_and_a_rate_for_the_models_size(
    model: str,
    rate: float,
    chat: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = run(capsys, "init", "--model", model, "--device", "cpu")
    assert status == 0 and "not there" not in err
    found = load(Path("groupwise.toml"))
    assert found.model.path == model and found.optim.learning_rate == rate
    assert (found.data.template == "chat") == chat


def test_the_rate_of_a_model_on_this_disk_goes_by_its_shape(tmp_path: Path) -> None:
    shape = replace(S, vocab_size=97, hidden_size=16, num_heads=2, num_kv_heads=1,
                    num_layers=1, head_dim=8, intermediate_size=16)  # fmt: skip
    policy = Transformer(shape).initialise(torch.Generator().manual_seed(0))
    save(policy, tmp_path / "Large-70B", character_files("".join(map(chr, range(32, 127)))))
    own = {x.data_ptr(): x.numel() for x in policy.state_dict().values()}
    assert init.parameters(str(tmp_path / "Large-70B")) == sum(own.values())
    (tmp_path / "empty-7B").mkdir()
    assert init.parameters(str(tmp_path / "empty-7B")) == 7e9
