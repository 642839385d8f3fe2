"""A critic against the truth: answers that really go on from where it gave a value."""

from __future__ import annotations

from typing import Any

from groupwise.config import Config
from groupwise.evaluate.monte_carlo import agreement, monte_carlo_values, values_at
from groupwise.optim.assemble import sequences_of
from groupwise.prepare.rollouts import grade, sample_groups
from groupwise.prepare.setup import sampling_of
from groupwise.stages.parts import Parts

VALUES = "old_value_NT"  # who fills it is a critic


def value_truth(config: Config, parts: Parts[Any]) -> dict[str, float]:
    """Compare a critic's values with Monte-Carlo values on a few held-out prompts.

    Nothing where there is no critic. Answers are sampled as for training: a critic's values are of
    the policy that samples, not of its greedy twin.
    """
    asked = parts.held_out[: config.critic.truth_prompts]
    # Nobody goes on from within an episode: its environment can't be taken back to there.
    if VALUES not in config.recipe.streams or not asked or parts.turns is not None:
        return {}
    sampling, tokenizer = sampling_of(config), parts.loaded.tokenizer
    written = sample_groups(parts.engine, [(task, 0) for task in asked], 1, sampling, "eval")
    groups = grade(parts.grader, tokenizer, written)
    answers = [rollout for group in groups for rollout in group]
    found = monte_carlo_values(parts.engine, parts.grader, tokenizer, answers, sampling)
    if not found:
        return {}
    rows = [list(range(len(answers)))]
    value_NT = parts.learner.role_streams(sequences_of(groups), rows)[VALUES]
    return agreement(found, values_at(found, value_NT.cpu())).metrics("eval/critic")
