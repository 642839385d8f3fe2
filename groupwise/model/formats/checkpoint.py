"""Models as plain Hugging Face folders: safetensors, configuration, tokenizer, in and out.

A folder appears whole or not at all: it is written beside its place and renamed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from groupwise.common.progress import phase
from groupwise.errors import ModelError
from groupwise.hub import COMPANIONS, local_model
from groupwise.model.borrowed.families import read_shape
from groupwise.model.borrowed.policy import Borrowed
from groupwise.model.config import FAMILIES, ModelConfig
from groupwise.model.formats.expert_files import apart, joined
from groupwise.model.formats.fields import TEXT, FieldRule, check, read_bytes, table
from groupwise.model.formats.gguf import GGUFFile, hf_config, read_gguf
from groupwise.model.formats.gguf_tokenizer import tokenizer_files
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.layers.transformer import Policy, Transformer
from groupwise.model.tiles import prepare_products
from groupwise.runfiles.whole import remove_unfinished, whole_folder

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 2**30
SCORE = "score."  # before the names of a classifier's own tensors
HEADS = ("lm_head.", SCORE)  # of a language model, of a classifier
MOST_HEADER = 2**25  # bytes of a safetensors file's header that are looked at: 100,000 tensors
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _is_file_name(x: Any) -> bool:
    return TEXT.fits(x) and Path(x).name == x and len(x.encode()) < 256


PLACES = FieldRule(
    "a table of tensors and the names of files beside it",
    lambda x: isinstance(x, dict) and all(map(_is_file_name, x.values())),
)


@dataclass(frozen=True)
class Loaded:
    """A model, its tokenizer, and the files that go back into every checkpoint of it."""

    model: Policy
    tokenizer: Tokenizer
    files: dict[str, bytes]


def load(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    *,
    head: bool = True,
) -> Loaded:
    """Load a Hugging Face folder or a GGUF file; in the stored precision if none is given.

    Without its `head` it has no map to the vocabulary, for a model that scores texts.
    """
    with phase(f"loading {path}"):
        return _load(local_model(path), dtype, device, head)


def _load(path: Path, dtype: torch.dtype | None, device: torch.device | str, head: bool) -> Loaded:
    if path.suffix == ".gguf":
        found = read_gguf(path)
        shape, tensors = _chosen(found.config, found.tensors.items(), head)
        model: Policy = assemble(shape, tensors, dtype, device)
        with _naming(path):
            return Loaded(model, Tokenizer.from_files(found.files), found.files)
    model = load_weights(path, dtype, device, head=head)
    files = read_companions(path)
    with _naming(path):
        return Loaded(model, Tokenizer.from_files(files), files)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Say whose small files an error is about: they know their own names alone."""
    try:
        yield
    except ModelError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error


def load_weights(
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    *,
    head: bool = True,
) -> Policy:
    """Load a folder's model, without its tokenizer."""
    folder = _folder(local_model(path))
    _check_is_model(folder)
    file = folder / "config.json"
    try:
        raw = table(file, read_bytes(file))
    except OSError as error:
        raise ModelError(
            f"{file} can't be read: {error}. A model's folder needs one; fetch it again."
        ) from error
    with _naming(folder):
        shape = read_shape(raw)
    check_whole(folder)
    if shape.native:
        shape, tensors = _chosen(shape, stored_tensors(folder), head)
        return assemble(shape, tensors, dtype, device)
    if not head:
        raise ModelError(
            f"{folder} is of the family {shape.family}, which runs with transformers' layers, and "
            f"a model that scores texts is made of groupwise's own: {', '.join(FAMILIES)}. Take "
            "one of these."
        )
    from groupwise.model.borrowed.rehearsal import borrow_rehearsed  # needs transformers

    return borrow_rehearsed(folder, raw, shape, dtype, device)


def _chosen(
    shape: ModelConfig, tensors: Iterable[tuple[str, Tensor]], head: bool
) -> tuple[ModelConfig, Iterable[tuple[str, Tensor]]]:
    """Return the sizes and tensors of a whole model, or of what lies below its head.

    A head that is tied is the embedding, and takes nothing: so that is what there is without one.
    """
    if head:
        return shape, tensors
    below = ((name, x) for name, x in tensors if not name.startswith(HEADS))
    return replace(shape, tied=True), below


def stored_shape(path: str | Path) -> ModelConfig | None:
    """Read a model's sizes without its weights; None for a model that can't be read."""
    path = local_model(path, weights=False)
    try:
        if path.suffix == ".gguf":
            return ModelConfig.from_hf(hf_config(GGUFFile(path)))
        raw = table("config.json", read_bytes(path / "config.json"))
    except (OSError, ModelError):
        return None  # loading it says why
    with _naming(path):
        return read_shape(raw)


def stored_tokenizer(path: str | Path) -> Tokenizer:
    """Read a model's tokenizer without its weights."""
    path = local_model(path, weights=False)
    _check_is_model(path)
    with _naming(path):
        if path.suffix == ".gguf":
            return Tokenizer.from_files(tokenizer_files(GGUFFile(path).metadata))
        return Tokenizer.from_files(read_companions(path))


def assemble(
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Transformer:
    """Make a model with these weights: all of them, no others, each of its shape."""
    with torch.device("meta"):
        model = Transformer(config)
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    state: dict[str, Tensor] = {}
    second_head: Tensor | None = None
    for name, tensor in joined(config, tensors):
        if name.endswith("rotary_emb.inv_freq"):
            continue  # old checkpoints store the rope's frequencies; config.json gives them
        if name == "lm_head.weight" and config.tied:
            second_head = tensor
            continue
        _check_tensor(name, tensor, shapes)
        # A copy, never a view: a mapped file could change or vanish under the model.
        state[name] = tensor.to(device=device, dtype=dtype or tensor.dtype, copy=True)
    missing = sorted(shapes.keys() - state.keys())
    if missing:
        raise ModelError(
            f"The checkpoint lacks {_some(missing)} that config.json asks for. Fetch it again, or "
            f"correct config.json."
        )
    if second_head is not None:
        _check_same_head(second_head, state["model.embed_tokens.weight"])
    model.load_state_dict(state, assign=True)
    prepare_products(device, model.head_weight.dtype)
    return model


@dataclass(frozen=True)
class Part:
    """Tensors of a folder, wherever they are, and how they become files of it."""

    tensors: dict[str, Tensor]
    write: Callable[[Path, dict[str, Tensor]], None]  # given the same tensors on the CPU


@dataclass(frozen=True)
class Contents:
    """The contents of a folder to be written: small files as they are, and tensors."""

    files: dict[str, bytes]
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for part in self.parts for x in part.tensors.values())

    def fill(self, folder: Path) -> None:
        """Write all of it; the model's own small files count over those of a library."""
        for part in self.parts:
            part.write(folder, {name: x.cpu().contiguous() for name, x in part.tensors.items()})
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


def contents(
    model: Policy,
    files: Mapping[str, bytes],
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Contents:
    """Return a model's folder, for `load`, transformers and vLLM. `files` are those of `load`."""
    stored = dtype or model.head_weight.dtype
    config = {"config.json": _config_bytes(model.config, files, stored)}
    if isinstance(model, Borrowed):
        part = Part(model.stored(dtype), partial(model.write, shard_bytes=shard_bytes))
    else:
        part = Part(own_tensors(model, dtype), partial(write_tensors, shard_bytes=shard_bytes))
    return Contents({**files, **config}, (part,))


def save(
    model: Policy,
    path: str | Path,
    files: Mapping[str, bytes],
    *,
    dtype: torch.dtype | None = None,
    replace: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that `load`, transformers and vLLM read. `files` are those of `load`."""
    made = contents(model, files, dtype, shard_bytes)
    with new_folder(Path(path), replace=replace) as beside:
        made.fill(beside)


@contextmanager
def new_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Give a folder to fill, which appears under its name whole or not at all."""
    if folder.exists() and not replace:
        raise ModelError(
            f"{folder} exists already and would be overwritten. Choose another name, or pass "
            f"replace=True."
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder.parent, folder.name)  # of a process that was killed
        with whole_folder(folder, replace=replace) as beside:
            yield beside
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{folder} could not be written: {error}. What was there before is untouched; free "
            f"some space or choose another place."
        ) from error


def read_companions(folder: Path) -> dict[str, bytes]:
    return {name: read_bytes(folder / name) for name in COMPANIONS if (folder / name).is_file()}


def _folder(path: Path) -> Path:
    if os.path.isdir(path):  # False, too, for what can be no name at all
        return path
    if os.path.exists(path):
        raise ModelError(f"{path} is a file. Pass the model's folder, or a .gguf file.")
    raise ModelError(
        f"{path} is no folder here, and no id of a model on a hub (org/name, org/name@revision). "
        f"Give one of them; `hf download` makes a folder of an id."
    )


def _check_is_model(folder: Path) -> None:
    """Refuse folders from which a model is still to be made, and say how."""
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{folder} is an adapter, not a model. Set model.path to its base, and adapter.path to "
            "it (trained further) or model.adapters (part of the starting policy). Elsewhere a "
            "whole model is needed: `groupwise export` folds an adapter into its base."
        )
    if (folder / "checkpoints").is_dir():
        raise ModelError(
            f"{folder} is the folder of a run, not a model. `groupwise export {folder} FOLDER` "
            "makes a model's folder of what it trained, with --critic of its critic."
        )


def stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Read every tensor of the folder, one at a time."""
    if (folder / INDEX).is_file():
        places = _places(folder / INDEX)
        for file in sorted(set(places.values())):
            listed = {name for name, place in places.items() if place == file}
            held = dict(tensors_in(folder / file))
            if listed - held.keys():
                raise ModelError(
                    f"{folder / file} lacks {_some(sorted(listed - held.keys()))} that {INDEX} "
                    f"promises. Fetch the checkpoint again."
                )
            yield from held.items()
    else:
        yield from tensors_in(folder / SINGLE)


def check_whole(folder: Path) -> None:
    """Refuse weights that are missing or have too few bytes, before any is read."""
    for file in _shards(folder):
        if not file.is_file():
            raise ModelError(
                f"{file} can't be read: it is missing, and {INDEX} names it. The download is "
                "incomplete; fetch that file again."
            )
        there, needed = file.stat().st_size, _bytes_of(file)
        if there < needed:
            raise ModelError(
                f"{file} can't be read: it is cut short or damaged, with {there:,} bytes where its "
                f"own header asks for {needed:,}. Delete it and fetch it again."
            )


def _shards(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        return [folder / name for name in sorted(set(_places(folder / INDEX).values()))]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    hint = "Fetch them."
    if any(folder.glob("*.bin")):
        hint = "It has pickled .bin weights: save them again with transformers 4.36 or later."
    if any(folder.glob("*.gguf")):
        hint = "It has a GGUF file: pass that file itself."
    raise ModelError(f"{folder} has no safetensors weights. {hint}")


def _places(index: Path) -> dict[str, str]:
    """Return which file of the folder each tensor is in."""
    raw = table(index, read_bytes(index))
    if not raw.get("weight_map"):
        raise ModelError(
            f"{index} names no shards: its weight_map is missing or empty. Fetch it again."
        )
    check(index, raw, {"weight_map": PLACES})
    places: dict[str, str] = raw["weight_map"]
    return places


def _bytes_of(file: Path) -> int:
    """Return the size that a safetensors file should have: length, header, tensors."""
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(min(length, MOST_HEADER)))
            ends = [x["data_offsets"][1] for name, x in header.items() if name != "__metadata__"]
            return 8 + length + max(0, *ends) if ends else 8 + length
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            return 8 + length  # its header is cut off, or reading it says what it is


def names_in(file: Path) -> list[str]:
    """List the tensors of a safetensors file without reading them."""
    with _opened(file) as stored:
        return list(stored.keys())


def tensors_in(file: Path) -> Iterator[tuple[str, Tensor]]:
    with _opened(file) as stored:
        for name in stored.keys():  # noqa: SIM118, it is no dictionary
            yield name, stored.get_tensor(name)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(str(file), framework="pt") as stored:
            yield stored
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError) as error:
        raise ModelError(
            f"{file} can't be read: {error}. It is missing, cut short or damaged; fetch it again."
        ) from error


def _check_tensor(name: str, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> None:
    if name.startswith(SCORE):
        raise ModelError(
            "This is a classifier, which scores texts and writes none: it has a score in place of "
            "a head over the vocabulary. Use it in a reward, as rm(path=...) or prm(path=...), or "
            "start a reward model from it (recipe=reward_model)."
        )
    if name not in shapes:
        raise ModelError(
            f"The checkpoint holds {name!r}, which this architecture does not have: it would be "
            f"ignored in silence. Check model_type and the other fields of config.json."
        )
    if tuple(tensor.shape) != shapes[name]:
        raise ModelError(
            f"{name} has shape {tuple(tensor.shape)}, config.json asks for {shapes[name]}. "
            f"Weights and config.json belong to different models; fetch both again."
        )
    if tensor.dtype not in FLOATS:
        raise ModelError(
            f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')}, no precision that a "
            "weight can be computed with. Take the checkpoint in bfloat16 or float32."
        )


def _check_same_head(head: Tensor, embedding: Tensor) -> None:
    if head.shape != embedding.shape or not torch.equal(head.to(embedding), embedding):
        raise ModelError(
            "config.json ties head and embedding, but the checkpoint holds an lm_head.weight that "
            "differs from the embedding. Set tie_word_embeddings to false in config.json if the "
            "head is the trained one, or remove it."
        )


def own_tensors(model: Policy, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return only what config.json describes: adapters and other guests have files of their own."""
    with torch.device("meta"):
        wanted = Transformer(model.config).state_dict()
    own = {
        name: tensor.detach().to(dtype or tensor.dtype)
        for name, tensor in model.state_dict().items()
        if name in wanted
    }
    return apart(model.config, own)


def write_tensors(folder: Path, state: dict[str, Tensor], *, shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in state.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        write_file(folder / SINGLE, shards[0])
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / file, shard)
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def write_file(file: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, file, metadata={"format": "pt"})
    # The library makes files that nobody else can read, not even a server under another name.
    file.chmod(file.parent.stat().st_mode & 0o666)


def _config_bytes(config: ModelConfig, files: Mapping[str, bytes], dtype: torch.dtype) -> bytes:
    """Return the config.json that came with the model, if it still describes it; else a new one."""
    raw = json.loads(files.get("config.json", b"{}"))
    if config.native and (not raw or ModelConfig.from_hf(raw) != config):
        raw = config.to_hf()
    raw.pop("dtype", None)
    raw["torch_dtype"] = str(dtype).removeprefix("torch.")
    return json.dumps(raw, indent=2).encode()


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
