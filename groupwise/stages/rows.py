"""A step as rows of its rollout file: what was sampled, and what learning made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.optim.learned import Trace
from groupwise.records import Rollout, TokenBatch
from groupwise.runfiles.rollouts import Row


def token_streams(batch: TokenBatch, trace: Trace | None) -> dict[str, Tensor | None]:
    """Return what learning made of each token, by the fields of a row.

    Without a trace the policy waited: no update of it has read the tokens.
    """
    before = {
        "learner_logp": batch.old_logp_NT,
        "ref_logp": batch.ref_logp_NT,
        "advantage": batch.advantage_NT,
        "coefficient": batch.coefficient_NT,
    }
    if trace is None:
        return before
    return {
        **before,
        "learner_logp": trace.logp_NT if batch.old_logp_NT is None else batch.old_logp_NT,
        "entropy": trace.entropy_NT,
        "ratio": trace.ratio_NT,
        "clipped": trace.clipped_NT,
        "rerouted": trace.rerouted_NT,
    }


def rows_of(
    groups: Sequence[Sequence[Rollout]],
    unused: Sequence[Sequence[Rollout]],
    streams: Mapping[str, Tensor | None],
    tokenizer: Tokenizer,
    branches: Sequence[Sequence[Rollout]] = (),
) -> list[Row]:
    """Return rows of the batch in its order, then what was sampled and not learned from.

    Branches of the answers come last, under the number of their group.

    A row's numbers are views of arrays for the whole batch, of all its tokens; those that others
    wrote are 0 in the file. The learner's log-probabilities are absent where only a policy that had
    moved already read the row.
    """
    arrays = {name: x.cpu().numpy() for name, x in streams.items() if x is not None}
    known_N = ~np.isnan(arrays["learner_logp"]).all(1) if "learner_logp" in arrays else None
    made: list[Row] = []
    for number, group in enumerate([*groups, *unused]):
        prompt_text = tokenizer.decode(group[0].task.token_ids)
        used = number < len(groups)
        for rollout in group:
            row, tokens = len(made), len(rollout.completion.token_ids)
            seen: dict[str, Any] = (
                {name: x[row, :tokens] for name, x in arrays.items()} if used else {}
            )
            if used and known_N is not None and not known_N[row]:
                seen["learner_logp"] = None
            made.append(Row.of(rollout, group=number, prompt_text=prompt_text, used=used, **seen))
    for number, group in enumerate(branches):
        for rollout in group:
            prompt_text = tokenizer.decode(rollout.task.token_ids)
            made.append(Row.of(rollout, group=number, prompt_text=prompt_text, used=False))
    return made
