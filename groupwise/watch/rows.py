"""A step as rows of its rollout file: what was sampled, and what learning made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from groupwise.model.tokenizer import Tokenizer
from groupwise.optim.learner import Trace
from groupwise.records import Rollout, TokenBatch
from groupwise.watch.rollouts import Row


def token_streams(batch: TokenBatch, trace: Trace) -> dict[str, Tensor | None]:
    """What learning made of each token, by the names of the file's columns."""
    return {
        "learner_logp": trace.logp_NT if batch.old_logp_NT is None else batch.old_logp_NT,
        "ref_logp": batch.ref_logp_NT,
        "entropy": trace.entropy_NT,
        "advantage": batch.advantage_NT,
        "coefficient": batch.coefficient_NT,
        "ratio": trace.ratio_NT,
        "clipped": trace.clipped_NT,
    }


def rows_of(
    groups: Sequence[Sequence[Rollout]],
    unused: Sequence[Sequence[Rollout]],
    streams: Mapping[str, Tensor | None],
    tokenizer: Tokenizer,
) -> list[Row]:
    """Rows of the batch in its order, then what was sampled and not learned from."""
    on_cpu = {name: x.cpu() for name, x in streams.items() if x is not None}
    made: list[Row] = []
    for number, group in enumerate([*groups, *unused]):
        prompt_text = tokenizer.decode(group[0].task.token_ids)
        for rollout in group:
            used = number < len(groups)
            tokens = slice(0, len(rollout.completion.token_ids))
            seen = {name: x[len(made), tokens] for name, x in on_cpu.items()} if used else {}
            made.append(Row.of(rollout, group=number, prompt_text=prompt_text, used=used, **seen))
    return made
