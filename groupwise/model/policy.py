"""The policy that a run starts from: a base, adapters folded into it, and one that learns.

model.path       the base
model.adapters   folded into it, in this order: part of the starting policy, frozen
model.quantize   what is frozen so far, in fewer bits
adapter.*        what learns beside it: fresh, or going on from adapter.path
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote

import torch

from groupwise import config as configuration
from groupwise.common.progress import phase
from groupwise.config.adapter_checks import EXACT_STEP
from groupwise.errors import ModelError
from groupwise.hub import fetch_adapter, fetch_model, lasting, names_model
from groupwise.model.adapters.lora import adapters, attach, fill, fold
from groupwise.model.adapters.peft_files import (
    BASE,
    CONFIG,
    Stored,
    config_bytes,
    is_adapter,
    layers_in,
    read,
    read_spec,
)
from groupwise.model.adapters.quantized import bitsandbytes, quantize
from groupwise.model.adapters.targets import ALPHA, Spec, fits, linear_shapes
from groupwise.model.fingerprint import fingerprint
from groupwise.model.formats.checkpoint import Loaded, load, stored_shape
from groupwise.model.formats.fields import TEXT, TEXTS, check, read_bytes, table
from groupwise.model.layers.experts import Router
from groupwise.model.layers.linear import layer_sizes, linear_layers
from groupwise.model.layers.transformer import Policy


@dataclass(frozen=True)
class Base:
    """The origin of the frozen weights; kept with every checkpoint of an adapter."""

    path: str
    adapters: tuple[str, ...] = ()
    quantize: str = "none"
    dtype: str = "float32"
    weights: str = ""  # their fingerprint


def starting_policy(config: configuration.Config, path: str | Path, *, head: bool = True) -> Loaded:
    """Load the model at this path, as the configuration has it; or what is below its `head`."""
    model, adapter = config.model, config.adapter
    shape = stored_shape(path)
    if shape is not None:  # told before the weights are read
        sizes = linear_shapes(shape)
        for each in model.adapters:
            read(each, sizes)
        if adapter.path:
            read(adapter.path, sizes, scores=not head)
        if adapter.used:
            fits(spec_of(config), sizes)
    folded = tuple(lasting(each, fetch_adapter) for each in model.adapters)
    base = Base(lasting(path), folded, model.quantize, model.dtype)
    loaded = frozen_base(base, model.device, head=head)
    if model.freeze_router:
        freeze_routers(loaded.model)
    if not adapter.used:
        return loaded
    policy, spec, dropout = loaded.model, spec_of(config), adapter.dropout
    if adapter.path:
        stored = read(adapter.path, layer_sizes(policy), scores=not head)
        attach(policy, spec, seed=config.seed, dropout=dropout, names=list(stored.tensors))
        fill(policy, stored.named())
    else:
        attach(policy, spec, seed=config.seed, dropout=dropout)
    frozen = [(n, p) for n, p in policy.named_parameters() if not p.requires_grad]
    return _with_base(loaded, replace(base, weights=fingerprint(frozen)), spec, dropout)


def freeze_routers(model: Policy) -> None:
    """Let the routers of a mixture of experts stay as they are."""
    for module in model.modules():
        if isinstance(module, Router):
            module.requires_grad_(False)


def load_policy(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    base: str | Path | None = None,
    *,
    head: bool = True,
) -> Loaded:
    """Load a model's folder or file; or an adapter's, together with the base that it belongs to."""
    if not is_adapter(path):
        return load(path, dtype, device, head=head)
    known = base_of(Path(path), base)
    asked = known.dtype if dtype is None else str(dtype).removeprefix("torch.")
    loaded = frozen_base(replace(known, dtype=asked), device, head=head)
    found = fingerprint(loaded.model.named_parameters()) if known.weights else ""
    if found != known.weights and asked == known.dtype:
        raise ModelError(
            f"{path} was trained beside other weights than {known.path} holds now (fingerprint "
            f"{found[:12]} instead of {known.weights[:12]}): together they would be another "
            "policy. Put the base back, or name it with --base."
        )
    stored = read(path, layer_sizes(loaded.model), scores=not head)
    attach(loaded.model, stored.spec, seed=0, names=list(stored.tensors))
    fill(loaded.model, stored.named())
    return _with_base(loaded, known, stored.spec, stored.dropout)


def frozen_base(base: Base, device: torch.device | str, *, head: bool = True) -> Loaded:
    """Load the model with adapters folded in and, if asked for, in fewer bits."""
    dtype = None if not base.dtype else getattr(torch, base.dtype)
    few = base.quantize != "none"
    if base.quantize == "nf4":
        bitsandbytes()  # or words, before anything is loaded
    shape = stored_shape(base.path)
    if few and shape is not None and not shape.native:
        raise ModelError(
            f"model.quantize={base.quantize} needs groupwise's own layers, and {base.path} "
            f"({shape.family}) runs with those of transformers. Leave model.quantize out: an "
            "adapter beside full weights works."
        )
    if few and shape is not None and shape.experts is not None:
        raise ModelError(
            f"model.quantize={base.quantize} is not done for experts, which are most of the "
            f"weights of {base.path}. Leave model.quantize out: an adapter beside full weights "
            "works."
        )
    # What becomes smaller never lies on the device as a whole.
    loaded = load(base.path, dtype, "cpu" if few else device, head=head)
    for path in base.adapters:
        fold_in(loaded.model, read(path, layer_sizes(loaded.model)))
    if few:
        with phase(f"quantising to {base.quantize}"):
            quantize(loaded.model, base.quantize, device)  # type: ignore[arg-type]
    return loaded


def fold_in(model: Policy, stored: Stored) -> None:
    """Make an adapter from a folder a part of the weights."""
    layers = linear_layers(model)
    for name, (a_RD, b_FR) in stored.tensors.items():
        own = getattr(layers[name], "count", None)
        if own is not None and own != len(a_RD):
            raise ModelError(
                f"The adapter {stored.path} is for {len(a_RD)} experts in {name}, and this model "
                f"has {own}. Take the base that it was trained on, or another adapter."
            )
        fold(layers[name], b_FR.float() @ a_RD.float() * stored.spec.scale)


def spec_of(config: configuration.Config) -> Spec:
    """Return the adapter's numbers: as set, or of the adapter that is trained further."""
    asked = config.adapter
    if not asked.path:
        return Spec(asked.rank, asked.alpha or ALPHA, asked.targets, asked.rslora)
    spec, _ = read_spec(asked.path)
    set_here = {
        "rank": (asked.rank, spec.rank, 0),
        "alpha": (asked.alpha, spec.alpha, 0.0),
        "targets": (asked.targets, spec.targets, "all"),
        "rslora": (asked.rslora, spec.rslora, False),
    }
    for name, (here, there, default) in set_here.items():
        if here != default and not _same(here, there):
            raise ModelError(
                f"adapter.{name}={here} is not what {asked.path} was made with ({there}), and an "
                f"adapter goes on as it is. Leave adapter.{name} out."
            )
    if config.engine.exact and spec.rank % EXACT_STEP:
        raise ModelError(
            f"engine.exact=true needs an adapter whose rank is a multiple of {EXACT_STEP}, and "
            f"{asked.path} has rank {spec.rank}. Leave engine.exact out, or train a fresh one."
        )
    return replace(spec, targets=layers_in(asked.path))


def _same(here: object, there: object) -> bool:
    """Compare; PEFT keeps a list of targets as a set, in any order."""
    if isinstance(here, tuple) and isinstance(there, tuple):
        return set(here) == set(there)
    return here == there


def adapter_notes(loaded: Loaded, config: configuration.Config) -> list[str]:
    """Say what a person should know about what is trained and what is not."""
    model, notes = loaded.model, []
    own = adapters(model)
    if config.model.adapters:
        listed = ", ".join(map(str, config.model.adapters))
        notes.append(f"folded into the base, part of the starting policy: {listed}")
    notes += [
        f"{path} says that it was made for {made!r}, and model.path is {config.model.path!r}; the "
        "shapes fit"
        for path, made in _made_for(config).items()
        if _plain_name(made) != _plain_name(config.model.path)
    ]
    if not own:
        return notes
    dropped = read_spec(config.adapter.path)[1].get("lora_dropout") if config.adapter.path else 0
    if dropped and dropped != config.adapter.dropout:
        notes.append(
            f"{config.adapter.path} was trained with lora_dropout={dropped}; here it is "
            f"adapter.dropout={config.adapter.dropout:g}"
        )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    spec = spec_of(config)
    begun = f"going on from {config.adapter.path}" if config.adapter.path else "fresh"
    bits = "" if config.model.quantize == "none" else f" in {config.model.quantize}"
    notes.append(
        f"LoRA ({begun}): rank {spec.rank}, alpha {spec.alpha:g}, scale {spec.scale:g}, on "
        f"{len(own)} layers; {trained:,} weights are trained at a learning rate of "
        f"{config.optim.learning_rate:g}, {frozen / 2**20:,.0f} MiB are frozen{bits}"
    )
    return notes


def _plain_name(path: str) -> str:
    """Return the name of a folder or an id, without its revision."""
    return Path(path).name.partition("@")[0]


def _made_for(config: configuration.Config) -> dict[str, str]:
    """Return the base that each adapter names, where it names one."""
    paths = [*config.model.adapters, *([config.adapter.path] if config.adapter.path else [])]
    named = {path: read_spec(path)[1].get("base_model_name_or_path") for path in paths}
    return {path: str(name) for path, name in named.items() if name}


def _with_base(loaded: Loaded, base: Base, spec: Spec, dropout: float) -> Loaded:
    """Add files of checkpoints: what PEFT reads, and what the base was."""
    # A base with others folded in is no folder that PEFT could load: its name says so.
    name, revision = " + ".join([base.path, *base.adapters]), None
    if names_model(name):
        name, _, revision = name.partition("@")
    files = {
        CONFIG: config_bytes(loaded.model, spec, name, dropout, revision),
        BASE: json.dumps(asdict(base), indent=2).encode(),
    }
    return replace(loaded, files=loaded.files | files)


def base_of(folder: Path, given: str | Path | None = None) -> Base:
    """Find the base of an adapter's folder: as it was trained, or as PEFT names it."""
    record = folder / BASE
    if record.is_file():
        try:
            raw = {k: x for k, x in table(record, read_bytes(record)).items() if x is not None}
            check(record, raw, dict.fromkeys(raw, TEXT) | {"adapters": TEXTS})
            found = Base(**(raw | {"adapters": tuple(raw["adapters"])}))
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{record} does not say what the adapter's base is ({error}). Take another "
                "checkpoint, or delete the file and name the base with --base."
            ) from error
    else:
        found = Base(_named_base(folder), dtype="")
    if given is not None:
        found = replace(found, path=str(given))
    command = f"groupwise export {quote(str(folder))} OUT --base FOLDER"
    remedy = f"--base: `{command}` makes a whole model of both."
    if names_model(found.path):
        try:
            fetch_model(found.path)
        except ModelError as error:
            raise ModelError(
                f"The base of the adapter {folder}: {error} Or name its folder with {remedy}"
            ) from error
    elif not found.path or not os.path.exists(found.path):
        raise ModelError(
            f"The base of the adapter {folder} is not here: {found.path or 'it names none'}. Name "
            f"its folder with {remedy}"
        )
    return found


def _named_base(folder: Path) -> str:
    """Return the base that PEFT's configuration names; an id with its revision."""
    _, raw = read_spec(folder)
    name, revision = (str(raw.get(key) or "") for key in ("base_model_name_or_path", "revision"))
    return f"{name}@{revision}" if revision and names_model(name) else name
