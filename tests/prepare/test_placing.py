"""Where a model computes: what "auto" comes to, on machines with and without a GPU."""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runs import quiet, small

from groupwise.commands import plan
from groupwise.commands.overview import Overview
from groupwise.config import Model, load, text
from groupwise.errors import ConfigError
from groupwise.prepare import placing
from groupwise.prepare.placing import check_device, place, place_line, placed
from groupwise.training.continuing import placed_for
from groupwise.training.loop import train
from groupwise.watch.display import Display

IDLE = placing._idle  # as it is: all other tests go without
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A machine with so many GPUs, as PyTorch would see them."""
    zeros = torch.zeros
    monkeypatch.setattr(placing, "_idle", IDLE)

    def made(
        gpus: int = 0,
        bfloat16: bool = True,
        fault: str = "",
        mps: bool = False,
        driver: bool = False,
    ) -> None:
        def tried(*size: int, device: torch.device) -> object:
            if device.type == "cpu":
                return zeros(*size)
            if fault or not gpus:
                raise RuntimeError(f"{fault or 'Found no NVIDIA driver'}. Compile with debugging")
            return None

        @contextlib.contextmanager
        def entered(device: str) -> Iterator[None]:
            yield

        for name, value in {
            "is_available": lambda: gpus > 0,
            "device_count": lambda: gpus,
            "is_bf16_supported": lambda including_emulation: bfloat16,
            "get_device_name": lambda device: "NVIDIA H200",
            "device": entered,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch, "zeros", tried)
        if driver:
            (tmp_path / "nvidia0").touch()
        monkeypatch.setattr(placing, "NVIDIA", (tmp_path, "nvidia[0-9]*"))

    return made


ASKED = Model(path="models/Qwen2.5-0.5B")


def said(asked: Model = ASKED) -> str:
    return place_line(place(asked), asked)


def test_a_gpu_is_taken_and_named(machine: Machine) -> None:
    machine(gpus=1)
    assert said() == "Qwen2.5-0.5B on cuda (NVIDIA H200), bfloat16"


def test_a_gpu_without_bfloat16_computes_in_float32(machine: Machine) -> None:
    machine(gpus=1, bfloat16=False)
    assert said() == "Qwen2.5-0.5B on cuda (NVIDIA H200), float32"


def test_without_a_gpu_the_cpu_is_taken(machine: Machine) -> None:
    machine()
    assert said() == "Qwen2.5-0.5B on cpu, float32"


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"gpus": 1, "fault": "CUDA error: out of memory"}, "its GPU can't be used: CUDA error: "),
        ({"mps": True}, "an Apple GPU is not used"),
        ({"driver": True}, "can't use the NVIDIA GPU of this machine"),
    ],
)
def test_a_gpu_that_is_passed_over_is_not_passed_over_in_silence(
    machine: Machine, facts: dict[str, object], why: str
) -> None:
    machine(**facts)
    assert said().startswith("Qwen2.5-0.5B on cpu, float32 (")
    assert why in said()


def test_what_is_asked_for_stays(machine: Machine) -> None:
    machine(gpus=2)
    asked = Model(path="m", device="cpu", dtype="bfloat16")
    assert place(asked) == asked
    assert said(asked) == "m on cpu, bfloat16"
    assert place(Model(path="m", device="cpu")).dtype == "float32"
    assert place(Model(path="m", device="cuda:1")).dtype == "bfloat16"
    assert place(Model(path="m", dtype="float32")).device == "cuda"


def test_the_embedded_model_stays_on_the_cpu(machine: Machine) -> None:
    machine(gpus=1)
    assert said(Model()) == "embedded tiny model on cpu, float32"
    # ... and not another model that is loaded under a configuration that names none
    assert placed(load(), path="models/mine").model == Model(device="cuda", dtype="bfloat16")


# --- a run that goes on -----------------------------------------------------------------------


def test_a_run_goes_on_where_it_was_started(machine: Machine) -> None:
    """Its bits and its precision are part of it, whatever a new machine would offer."""
    machine(gpus=1)
    before = Model(device="cpu", dtype="float32")
    found = place(ASKED, before)
    assert (found.device, found.dtype) == ("cpu", "float32")
    assert "as the run was started; model.device=cuda takes the GPU" in place_line(found, ASKED)
    assert place(Model(path="m", device="cuda"), before).device == "cuda"


def test_a_run_whose_gpu_is_not_there_moves_in_its_precision(machine: Machine) -> None:
    machine()
    found = place(ASKED, Model(device="cuda:1", dtype="bfloat16"))
    assert (found.device, found.dtype) == ("cpu", "bfloat16")


def test_a_folder_says_what_its_run_was_started_with(machine: Machine, tmp_path: Path) -> None:
    machine(gpus=1)
    asked = load({"model.path": "m"})
    assert placed_for(asked, tmp_path).model.device == "cuda"
    older = load({"model.path": "m", "model.device": "cpu", "model.dtype": "float32"})
    (tmp_path / "config.toml").write_text(text(older))
    assert placed_for(asked, tmp_path) == older


def test_resolved_values_are_recorded_and_said_first(tmp_path: Path) -> None:
    out = open(tmp_path / "out", "w+")  # noqa: SIM115
    auto = {"model__device": "auto", "model__dtype": "auto"}
    with out:
        train(small(steps=1, **auto), tmp_path / "run", Display(out, live=False))
        out.seek(0)
        assert out.readline() == "embedded tiny model on cpu, float32\n"
    stored = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["model"]
    assert (stored["device"], stored["dtype"]) == ("cpu", "float32")
    # The same configuration goes on, and finds nothing changed.
    again = train(small(steps=1, **auto), tmp_path / "run", quiet())
    assert again["steps"] == 1


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"),
    [("gpu", "cuda"), ("CUDA", "cuda"), ("gpu:1", "cuda:1"), ("cpu:0", "cpu"), ("Cuda:2", "cuda:2"),
     ("GPU", "cuda"), ("cuda:x", "cuda")],
)  # fmt: skip
def test_another_name_of_a_device_is_answered_with_ours(written: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{meant}'\\?"):
        load({}, [f"model.device={written}"])


@pytest.mark.parametrize("written", ["mps", "banana", "", "cuda:-1.5"])
def test_a_device_that_nothing_runs_on_is_refused_with_those_that_there_are(written: str) -> None:
    with pytest.raises(ConfigError, match="'auto', 'cpu', 'cuda', 'cuda:K'"):
        load({"model.device": written})


def test_a_gpu_with_too_high_a_number_is_refused_with_the_numbers_there_are(
    machine: Machine,
) -> None:
    machine(gpus=2)
    with pytest.raises(ConfigError, match="this machine has 2 GPUs, cuda:0 to cuda:1"):
        check_device("cuda:9")


def test_no_gpu_at_all_is_refused_with_the_remedy(machine: Machine) -> None:
    machine()
    with pytest.raises(ConfigError, match=r"Found no NVIDIA driver\. Set model\.device=auto"):
        check_device("cuda")


def test_a_plan_for_another_gpu_is_in_its_precision() -> None:
    made = [plan.on_named(load(), plan.named_gpu(name)).model for name in ("H100", "T4")]
    assert [(each.device, each.dtype) for each in made] == [
        ("cuda", "bfloat16"),
        ("cuda", "float32"),
    ]


def test_serve_takes_the_same_place(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from groupwise.commands import serve

    machine(gpus=1)
    loaded = SimpleNamespace()

    def load_policy(path: object, dtype: torch.dtype, device: str) -> None:
        loaded.place = (device, dtype)
        raise KeyboardInterrupt

    monkeypatch.setattr("groupwise.model.policy.load_policy", load_policy)
    parser = Overview({"all": [serve]})
    with pytest.raises(KeyboardInterrupt):
        serve.run(parser.parse_args(["serve", "somewhere"]))
    assert loaded.place == ("cuda", torch.bfloat16)
    with pytest.raises(ConfigError, match="--device='gpu' is unknown"):
        serve.run(parser.parse_args(["serve", "somewhere", "--device", "gpu"]))
