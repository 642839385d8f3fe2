"""A model that scores as a plain Hugging Face classifier, checked before it appears.

An adapter is folded into its base. What was written is read back and compared, score by score.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.config import load
from groupwise.errors import ModelError, RunError
from groupwise.model.adapters.lora import adapters, merge
from groupwise.model.adapters.peft_files import BASE, CONFIG
from groupwise.model.formats import classifier
from groupwise.model.formats.checkpoint import new_folder
from groupwise.model.layers.attention import packed, packed_positions
from groupwise.model.policy import starting_policy
from groupwise.model.scalar_head import ScalarHead
from groupwise.optim.roles.critic import Critic
from groupwise.sync.checkpoints import load_latest
from groupwise.sync.export import LIMITS, Exported, Ids, sequences_for

OWN = (CONFIG, BASE, classifier.SAYS)  # files of an adapter alone


def export_scorer(
    source: Path, folder: Path, dtype: torch.dtype | None = None, *, base: Path | None = None
) -> Exported:
    """Write `folder` from a classifier's checkpoint; in its own precision if none is given."""
    found = classifier.load_scorer(source, base=base)
    kind, separator = classifier.kind_of(source), classifier.separator_of(source)
    says = {} if separator is None else {classifier.SEPARATOR: separator}
    files = {name: x for name, x in found.files.items() if name not in OWN}
    sequences = sequences_for(source, found.tokenizer)
    return _written(source, folder, found.head, files, kind, dtype, sequences, says)


def export_critic(run: Path, folder: Path, dtype: torch.dtype | None = None) -> Exported:
    """Write `folder` from the critic of a run's latest checkpoint, as a token classifier.

    Its number at a token is the value of the state behind it, before the next one is written.
    """
    config = load(run / "config.toml", ["model.device=cpu"])
    if "critic" not in config.recipe.roles:
        raise ModelError(
            f"{run} has no critic: its recipe is {config.recipe.name}. Leave --critic out to "
            "export the policy."
        )
    saved = load_latest(run / "checkpoints")
    if saved is None:
        raise RunError(f"{run} has no checkpoint yet.")
    kept = run / "cold_start"
    loaded = starting_policy(config, kept if kept.is_dir() else config.model.path)
    critic = Critic.made(loaded.model, config.recipe, config)
    critic.restore(saved.tensors["critic"])
    made = classifier.padded(replace(loaded, model=critic.model.trunk))
    sequences = sequences_for(saved.path, loaded.tokenizer)
    head = critic.model
    files = {name: x for name, x in made.files.items() if name not in OWN}
    return _written(saved.path, folder, head, files, "token", dtype, sequences, {})


def _written(
    source: Path,
    folder: Path,
    head: ScalarHead,
    files: Mapping[str, bytes],
    kind: classifier.Kind,
    dtype: torch.dtype | None,
    sequences: Sequence[Ids],
    says: Mapping[str, Any],
) -> Exported:
    """Write a classifier, read it back, and let it appear if it scores as it did."""
    if folder.exists():
        raise ModelError(f"{folder} exists already, and nothing is overwritten. Choose another.")
    stored, adapted = head.trunk.head_weight.dtype, bool(adapters(head.trunk))
    dtype = dtype or stored
    before = scores_of(copy.deepcopy(head), sequences)
    if adapted:
        merge(head.trunk)
    with new_folder(folder) as beside:
        classifier.contents(head, files, kind, dtype, says=says).fill(beside)
        del head
        gap = (scores_of(classifier.load_scalar_head(beside), sequences) - before).abs()
        exact = torch.promote_types(stored, dtype) == dtype and not adapted
        limit = 0.0 if exact else LIMITS[dtype]
        name = str(dtype).removeprefix("torch.")
        notes = ("the adapter is folded into its base",) if adapted else ()
        mean, most = float(gap.mean()), float(gap.max())
        made = Exported(source, folder, name, len(gap), mean, most, limit, notes, "scores")
        if not most <= limit:
            raise ModelError(
                f"The exported classifier scores otherwise: by up to {most:.2g} over {len(gap)} "
                f"tokens, and {name} may make {limit:g}. Nothing was written. Take --dtype float32."
            )
    return made


@torch.no_grad()
def scores_of(head: ScalarHead, sequences: Sequence[Ids]) -> Tensor:
    """Return the number at every token, in float32 for any weights."""
    head = head.to("cpu", torch.float32)
    found = []
    for ids in sequences or [tuple(range(min(16, head.trunk.config.vocab_size)))]:
        every = torch.arange(len(ids))
        attend = packed([len(ids)])
        found.append(head(torch.tensor(ids), packed_positions([len(ids)]), attend, every))
    return torch.cat(found)
