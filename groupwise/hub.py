"""Models and data sets by their id on a hub: `org/name`, `org/name@revision`, `hub:org/name/FILES`.

huggingface_hub fetches and keeps them: its cache, its HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are
honoured. Only what is read is fetched, and no pickles. The commit behind a name is part of what is
handed out, so that a run can say what it was made from.
"""

from __future__ import annotations

import functools
import glob
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.common.extras import install
from groupwise.errors import DataError, GroupwiseError, ModelError, in_short

ID = re.compile(r"(?P<name>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
DATA = re.compile(
    r"hub:(?P<name>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>[\w.-]+))?"
    r"(?:/(?P<files>.+))?"
)
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
# What travels with the weights, where it exists.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".arrow")


@dataclass(frozen=True)
class Fetched:
    """The place of a download on this disk, and its commit."""

    name: str
    path: str
    commit: str

    def __str__(self) -> str:
        return f"{self.name}@{self.commit}"


def names_model(text: str) -> bool:
    """Return whether a model's path is an id. What exists on this disk is no id."""
    return ID.fullmatch(text) is not None and not os.path.exists(text)


def names_data(text: str) -> bool:
    """Return whether a data source is on a hub, plain or as a set: `gsm8k:hub:org/name`."""
    return text.startswith("hub:") or ":hub:" in text


@functools.lru_cache(maxsize=64)
def fetch_model(text: str, *, weights: bool = True) -> Fetched:
    """Fetch a model's folder into the cache; without weights, its configuration and tokenizer."""
    found = ID.fullmatch(text)
    assert found is not None
    name, revision = found["name"], found["revision"]
    patterns = (*COMPANIONS, *WEIGHTS) if weights else COMPANIONS
    folder = _snapshot("model", name, revision, patterns, ["*/*"])
    if not (folder / "config.json").is_file():
        raise ModelError(f"{text} has no config.json: it is no model that can be loaded. {_LOCAL}")
    if weights and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"{text} has no model*.safetensors. Pickled weights are never fetched; of a GGUF "
            "repository fetch one file with `hf download`, and set model.path to it."
        )
    return Fetched(name, str(folder), folder.name)


@functools.lru_cache(maxsize=64)
def fetch_adapter(text: str) -> Fetched:
    """Fetch the folder of an adapter of PEFT's into the cache."""
    found = ID.fullmatch(text)
    assert found is not None
    folder = _snapshot("model", found["name"], found["revision"], ADAPTER, None)
    if not (folder / ADAPTER[0]).is_file():
        raise ModelError(
            f"{text} has no {ADAPTER[0]}: it is no adapter. A whole model goes into model.path."
        )
    return Fetched(found["name"], str(folder), folder.name)


@functools.lru_cache(maxsize=64)
def fetch_data(text: str) -> Fetched:
    """Fetch files of a data set; return a pattern over the cache.

    Without files in its name: those with "train" in theirs, else all; of one folder and one format.
    """
    found = DATA.fullmatch(text)
    if found is None:
        raise DataError(
            f"{text!r} names no data set on a hub. Write hub:ORG/NAME, with @REVISION or /FILES "
            "behind it: hub:openai/gsm8k/main/train*.parquet."
        )
    name, revision, files = found["name"], found["revision"], found["files"]
    tries = [[files]] if files else [[f"*train*{x}" for x in SUFFIXES], [f"*{x}" for x in SUFFIXES]]
    for patterns in tries:
        folder = _snapshot("dataset", name, revision, patterns, None)
        if files:
            pattern = f"{glob.escape(str(folder))}/{files}"
            if glob.glob(pattern, recursive=True):
                return Fetched(name, pattern, folder.name)
        elif chosen := _one_set(text, folder, patterns):
            return Fetched(name, chosen, folder.name)
    told = f"no file that fits {files!r}" if files else f"no file of a known kind {SUFFIXES}"
    raise DataError(f"{text} has {told}. Look at its files, and write hub:{name}/FILES.")


def _one_set(text: str, folder: Path, patterns: Sequence[str]) -> str | None:
    """Return the pattern over the files that fit, if they are one set; None without any."""
    suffixes = sorted(SUFFIXES, key=len, reverse=True)
    sets: set[tuple[str, str]] = set()
    train = "train" in patterns[0]
    for file in folder.rglob("*"):
        where = file.relative_to(folder)
        suffix = next((x for x in suffixes if file.name.endswith(x)), None)
        if suffix and file.is_file() and (not train or "train" in file.name):
            sets.add((where.parent.as_posix(), suffix))
    if not sets:
        return None
    stem = "*train*" if train else "*"
    fits = sorted(f"{'' if parent == '.' else parent + '/'}{stem}{x}" for parent, x in sets)
    if len(fits) > 1:
        name = text.removesuffix("/")
        raise DataError(
            f"{text} has several sets. Name one: {', '.join(f'{name}/{x}' for x in fits[:6])}."
        )
    return f"{glob.escape(str(folder))}/{fits[0]}"


def local_model(text: str | Path, *, weights: bool = True) -> Path:
    """Return where a model lies on this disk: a path as it is; an id is fetched."""
    if isinstance(text, Path) or not names_model(text):
        return Path(text).expanduser()
    return Path(fetch_model(text, weights=weights).path)


def local_adapter(text: str | Path) -> Path:
    """Return where an adapter lies on this disk: a path as it is; an id is fetched."""
    if isinstance(text, Path) or not names_model(text):
        return Path(text).expanduser()
    return Path(fetch_adapter(text).path)


def lasting(text: str | Path, fetch: Callable[[str], Fetched] = fetch_model) -> str:
    """Return a name that stays valid anywhere, any day: a whole path, an id with its commit."""
    if isinstance(text, str) and names_model(text):
        return str(fetch(text))
    path = Path(text).expanduser()
    return str(path.resolve() if path.exists() else text)


_LOCAL = "If a folder was meant, there is none of this name here."


def _snapshot(
    kind: str, name: str, revision: str | None, patterns: Sequence[str], ignored: list[str] | None
) -> Path:
    wrong = ModelError if kind == "model" else DataError
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError as error:
        raise wrong(
            f"{name} is no path here, and to fetch a {kind} by its id huggingface_hub is needed: "
            f"`{install('hub')}`. Or fetch it elsewhere, and give its folder."
        ) from error
    called = name if revision is None else f"{name}@{revision}"
    try:
        folder = snapshot_download(
            name,
            repo_type=kind,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=ignored,
        )
    except Exception as error:  # of every kind: HTTP, sockets, files, bad names
        raise _in_words(wrong, kind, called, error, errors, constants) from error
    return Path(folder)


def _in_words(
    wrong: type[GroupwiseError],
    kind: str,
    called: str,
    error: Exception,
    errors: Any,
    constants: Any,
) -> GroupwiseError:
    """Explain what went wrong, why, and what to do instead. Causes lie behind one another."""
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None:
        chain.append(at)
        at = at.__cause__ or at.__context__
    endpoint = constants.ENDPOINT

    def is_a(*kinds: Any) -> bool:
        return any(isinstance(x, kinds) for x in chain)

    replies = [getattr(x, "response", None) for x in chain]
    status = next((reply.status_code for reply in replies if reply is not None), None)
    page = f"{endpoint}/{'datasets/' if kind == 'dataset' else ''}{called.partition('@')[0]}"
    if is_a(errors.GatedRepoError) or (status == 403 and not is_a(errors.RevisionNotFoundError)):
        return wrong(
            f"{called} is gated: its owner must let you in. Ask for access at {page}, then log in "
            "with `hf auth login`, or set HF_TOKEN."
        )
    if is_a(errors.RevisionNotFoundError):
        return wrong(
            f"{called}: the {kind} is there, this revision is not. Take a branch, a tag or a whole "
            f"commit hash that {page} lists."
        )
    if is_a(errors.RepositoryNotFoundError) or status == 404:
        return wrong(
            f"There is no {kind} {called} on {endpoint}, or it is private and you are not logged "
            f"in (`hf auth login`). {_LOCAL}"
        )
    if is_a(errors.HFValidationError):
        return wrong(f"{called} is no id of a {kind}: {in_short(error)}. {_LOCAL}")
    if constants.HF_HUB_OFFLINE:
        return wrong(
            f"HF_HUB_OFFLINE is set, and {called} is not whole in the cache "
            f"({constants.HF_HUB_CACHE}). Fetch it once without HF_HUB_OFFLINE, or copy the cache "
            f"from where it is. {_LOCAL}"
        )
    cut = next((x for x in chain if "onsistency check failed" in str(x)), None)
    if cut is not None or is_a(errors.IncompleteSnapshotError):
        return wrong(
            f"{called} was not fetched whole ({in_short(cut or error)}). What came is kept: run "
            "the same command again. If it stays, the file is damaged there."
        )
    return wrong(
        f"{called} can't be fetched: {endpoint} does not answer as it should "
        f"({in_short(chain[-1])}), and the cache ({constants.HF_HUB_CACHE}) does not hold it. "
        f"Check the network, or HF_ENDPOINT for a mirror. {_LOCAL}"
    )
