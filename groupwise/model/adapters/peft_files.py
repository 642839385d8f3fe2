"""Adapters as PEFT stores them: adapter_config.json and adapter_model.safetensors, in and out."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.errors import ModelError, nearest
from groupwise.hub import COMPANIONS, local_adapter
from groupwise.model.adapters.lora import adapters, each_of, peft_name, tensors_of
from groupwise.model.adapters.targets import EACH, HEAD, Spec, layer_of, shortest
from groupwise.model.formats.checkpoint import (
    SCORE,
    Contents,
    Part,
    names_in,
    new_folder,
    tensors_in,
    write_file,
)
from groupwise.model.formats.fields import (
    FINITE,
    FLAG,
    TEXT,
    TEXTS,
    Rules,
    check,
    either,
    read_bytes,
    real,
    table,
    whole,
)
from groupwise.model.layers.linear import is_turned, linear_layers

ADAPTED = "base_model.model."  # before the names of a model's tensors
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
BASE = "groupwise_base.json"  # what the frozen weights were made from, see policy.py

# Fields of PEFT's configuration that say nothing about what the adapter computes.
HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision",
    "task_type", "lora_dropout", "megatron_core", "qalora_group_size", "runtime_config",
    "eva_config", "ensure_weight_tying",
    "fan_in_fan_out",  # how the base's weights lie, which its layers say themselves
    # The tensors themselves say which layers they are of.
    "exclude_modules", "layers_to_transform", "layers_pattern",
}  # fmt: skip
OURS = {"peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "bias", "init_lora_weights"}
# Starts that take a part of the base's weights away: the adapter is wrong on the base itself.
MOVES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
RULES: Rules = {
    "r": whole(1, 2**20),
    "lora_alpha": FINITE,
    "lora_dropout": real(0, 1),
    "use_rslora": FLAG,
    "target_modules": either(TEXT, TEXTS),
    "base_model_name_or_path": TEXT,
    "revision": TEXT,
}
REMEDY = "Merge it into its base with PEFT (merge_and_unload) and set model.path to the result."


@dataclass(frozen=True)
class Stored:
    """An adapter's folder, its tensors by layer: A and B."""

    path: Path
    spec: Spec
    base: str  # the name of the model that it was made for, "" if it does not say
    dropout: float  # that it was trained with
    tensors: dict[str, tuple[Tensor, Tensor]]

    def named(self) -> dict[str, Tensor]:
        """Return the tensors as PEFT names them."""
        return {
            peft_name(own, part): matrix
            for layer, pair in self.tensors.items()
            for part, tensor in zip(("lora_A", "lora_B"), pair, strict=True)
            for own, matrix in each_of(layer, tensor)
        }


def read_spec(path: str | Path) -> tuple[Spec, dict[str, Any]]:
    """Read an adapter's numbers from its configuration alone; what is not done here is refused."""
    folder = local_adapter(path)
    file = folder / CONFIG
    try:
        raw = table(file, read_bytes(file))
    except FileNotFoundError:
        raise ModelError(_no_config(folder)) from None
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error}. Fetch the adapter again.") from error
    _check_features(file, raw)
    check(file, raw, RULES)
    for name in ("r", "lora_alpha"):
        if raw.get(name) is None:
            raise ModelError(f"{file} has no {name}: it is incomplete. Fetch the adapter again.")
    targets = raw.get("target_modules") or "all"
    spec = Spec(
        rank=raw["r"],
        alpha=float(raw["lora_alpha"]),
        targets=targets if isinstance(targets, str) else tuple(targets),
        rslora=bool(raw.get("use_rslora")),
    )
    return spec, raw


def layers_in(path: str | Path) -> tuple[str, ...]:
    """List the layers that an adapter has tensors for: its own settings may name others besides."""
    names = (each.removeprefix(ADAPTED) for each in names_in(_file(local_adapter(path))))
    found = (layer_of(name.partition(".lora_")[0])[0] for name in names if ".lora_" in name)
    return tuple(dict.fromkeys(found))


def read(path: str | Path, sizes: Mapping[str, tuple[int, int]], *, scores: bool = False) -> Stored:
    """Read the whole adapter, checked against the (inputs, outputs) of its layers.

    One of a model that `scores` has its score beside the matrices, which is read elsewhere
    (formats/classifier.py); for a policy it is refused.
    """
    folder = local_adapter(path)
    spec, raw = read_spec(folder)
    found = dict(tensors_in(_file(folder)))
    if scores:
        found = {name: x for name, x in found.items() if not name.startswith(ADAPTED + SCORE)}
    layers = _by_layer(folder, found)
    base = str(raw.get("base_model_name_or_path") or "")
    _check_shapes(folder, spec, layers, sizes, base)
    dropout = float(raw.get("lora_dropout") or 0.0)
    return Stored(folder, spec, base, dropout, _joined(folder, layers))


def contents(
    model: nn.Module, files: Mapping[str, bytes], dtype: torch.dtype | None = None
) -> Contents:
    """Return the folder of a model's adapters, for PEFT, vLLM and `read`.

    `files` are those that the model was loaded with: the tokenizer travels along, and so does what
    is known of the base.
    """
    tensors = {name: x.to(dtype or x.dtype) for name, x in tensors_of(model).items()}
    # The base's configuration would make the folder look like a whole model.
    kept = {*COMPANIONS, CONFIG, BASE} - {"config.json", "generation_config.json"}
    own = {name: content for name, content in files.items() if name in kept}
    return Contents(own, (Part(tensors, lambda folder, on: write_file(folder / TENSORS, on)),))


def save(
    model: nn.Module,
    path: str | Path,
    files: Mapping[str, bytes],
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the model's adapters as a folder that PEFT, vLLM and `read` read."""
    with new_folder(Path(path)) as beside:
        contents(model, files, dtype).fill(beside)


def config_bytes(
    model: nn.Module, spec: Spec, base: str, dropout: float, revision: str | None = None
) -> bytes:
    """Write adapter_config.json of a model's adapters."""
    layers = linear_layers(model)
    raw = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha) if spec.alpha == int(spec.alpha) else spec.alpha,
        "use_rslora": spec.rslora,
        "lora_dropout": dropout,
        "target_modules": _targets(model, shortest(adapters(model), layers)),
        "bias": "none",
        "fan_in_fan_out": any(map(is_turned, layers.values())),
        "init_lora_weights": True,
        "inference_mode": True,
    }
    return json.dumps(raw, indent=2).encode()


def _targets(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return what PEFT calls these layers: every expert has a name of its own there."""
    own = adapters(model)
    return [
        each
        for name in names
        for each, _ in (each_of(name, own[name].lora_A) if EACH in name else [(name, None)])
    ]


def _file(folder: Path) -> Path:
    if not (folder / TENSORS).is_file() and any(folder.glob("*.bin")):
        raise ModelError(
            f"{folder} has pickled .bin tensors, which are never read: they could run code. Save "
            "the adapter again with PEFT 0.6 or later."
        )
    return folder / TENSORS


def is_adapter(path: str | Path) -> bool:
    return (Path(path) / CONFIG).is_file()


# --- checks -----------------------------------------------------------------------------------


def _check_features(file: Path, raw: Mapping[str, Any]) -> None:
    """Refuse what PEFT can do and this can't: it would be left out in silence."""
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{file} is of peft_type {kind!r}; LORA is what runs here. {REMEDY}")
    if raw.get("bias", "none") != "none":
        raise ModelError(
            f"{file} trains biases (bias={raw['bias']!r}), as nothing here does. {REMEDY}"
        )
    start = str(raw.get("init_lora_weights", True)).lower()
    if start.startswith(MOVES_BASE):
        raise ModelError(
            f"{file} began with init_lora_weights={start!r}, which changes the base as well: on "
            "the base itself it would be another model. Save it again with PEFT's "
            "path_initial_model_for_weight_conversion, or merge it there (merge_and_unload)."
        )
    known = HARMLESS | OURS
    if raw.get("modules_to_save") == [SCORE.strip(".")]:  # its tensors say so again
        known = known | {"modules_to_save"}
    odd = sorted(key for key, value in raw.items() if value and key not in known)
    if odd:
        what = ", ".join(f"{key}={reprlib.repr(raw[key])}" for key in odd)
        raise ModelError(f"{file} uses what is not done here: {what}. {REMEDY}")


def _by_layer(folder: Path, found: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Pair the tensors of base_model.model.LAYER.lora_A.weight and lora_B.weight."""
    file = folder / TENSORS
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in found.items():
        layer, _, part = name.removesuffix(".weight").rpartition(".")
        if not layer.startswith(ADAPTED) or part not in ("lora_A", "lora_B"):
            raise ModelError(
                f"{file} holds {name!r}, which is no LoRA matrix of a linear layer: it would be "
                f"left out in silence. {REMEDY}"
            )
        pairs.setdefault(layer.removeprefix(ADAPTED), {})[part] = tensor
    for layer, pair in pairs.items():
        if len(pair) < 2:
            lacking = peft_name(layer, "lora_B" if "lora_A" in pair else "lora_A")
            raise ModelError(f"{file} lacks {lacking}: it is cut short. Fetch the adapter again.")
    if not pairs:
        raise ModelError(f"{file} holds no tensors. Fetch the adapter again.")
    return {layer: (pair["lora_A"], pair["lora_B"]) for layer, pair in pairs.items()}


def _joined(
    folder: Path, layers: Mapping[str, tuple[Tensor, Tensor]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Lay the matrices of a layer's experts together; all other layers stay as they are."""
    experts: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, pair in layers.items():
        layer, number = layer_of(name)
        if number is None:
            found[name] = pair
        else:
            experts.setdefault(layer, {})[number] = pair
    for layer, numbered in experts.items():
        every = range(max(map(len, experts.values())))
        missing = [number for number in every if number not in numbered]
        if missing:
            raise ModelError(
                f"{folder / TENSORS} lacks the matrices of expert {missing[0]} of {layer}: an "
                f"adapter sits on all experts of a layer here, or on none. {REMEDY}"
            )
        pairs = [numbered[number] for number in every]
        a, b = (torch.stack(each) for each in zip(*pairs, strict=True))
        found[layer] = a, b
    return found


def _check_shapes(
    folder: Path,
    spec: Spec,
    layers: Mapping[str, tuple[Tensor, Tensor]],
    sizes: Mapping[str, tuple[int, int]],
    base: str,
) -> None:
    other = f"It was made for {base!r}. " if base else ""
    for name, pair in layers.items():
        layer, _ = layer_of(name)
        if layer not in sizes:
            why = "the head has no adapter here" if layer == HEAD else "this model has none such"
            raise ModelError(
                f"The adapter {folder} is for {layer}: {why}. {other}{nearest(layer, sizes)} Take "
                "the base that it was trained on, or another adapter."
            )
        inputs, outputs = sizes[layer]
        wanted = ((spec.rank, inputs), (outputs, spec.rank))
        for part, tensor, want in zip(("lora_A", "lora_B"), pair, wanted, strict=True):
            if tuple(tensor.shape) != want:
                raise ModelError(
                    f"{peft_name(name, part)} of {folder} has shape {tuple(tensor.shape)}, and "
                    f"this model with rank {spec.rank} needs {want}: the adapter is for another "
                    f"base. {other}Set model.path to that model, or take another adapter."
                )


def _no_config(folder: Path) -> str:
    if not folder.is_dir():
        return f"There is no adapter {str(folder)!r}: it is a folder with {CONFIG} and {TENSORS}."
    if (folder / "config.json").is_file():
        return (
            f"{folder} has no {CONFIG}: it is a whole model, not an adapter. Set model.path to it."
        )
    return f"{folder} has no {CONFIG}: it is no adapter of PEFT's, or half of one. Fetch it again."
