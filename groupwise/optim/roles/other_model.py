"""Models from other folders: whether they read what the policy reads, and as much of it."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.config import Config
from groupwise.errors import ConfigError
from groupwise.model.formats.checkpoint import stored_shape, stored_tokenizer
from groupwise.model.formats.tokenizer import Tokenizer, difference
from groupwise.records import Task


def other_tokens(config: Config, path: str, own: Tokenizer | None = None) -> str:
    """Say which token another model reads otherwise than the policy, or ""; `own` is the policy's.

    Without it the policy's is read from its folder. That of the embedded model is made together
    with it: then the other one is only read.
    """
    if path == config.model.path:
        return ""
    theirs = stored_tokenizer(path)
    if own is None and config.model.path == "tiny":
        return ""
    return difference(stored_tokenizer(config.model.path) if own is None else own, theirs)


def check_length(config: Config, called: str, path: str, tasks: Sequence[Task]) -> None:
    """Refuse another model that was made for shorter texts than the policy will write.

    What it says of tokens behind its last place would be noise.
    """
    theirs = stored_shape(path)
    if theirs is None or not config.recipe.samples or config.turns.used:
        return
    own = None if config.model.path == "tiny" else stored_shape(config.model.path)
    if own is not None and theirs.context >= own.context:
        return
    longest = max(len(task.token_ids) for task in tasks) + config.engine.max_tokens
    if longest > theirs.context:
        raise ConfigError(
            f"{called} {path} reads up to {theirs.context:,} tokens, and a prompt with its answer "
            f"may have {longest:,} (engine.max_tokens={config.engine.max_tokens}). Lower "
            "engine.max_tokens, drop long prompts with data.max_prompt_tokens, or take a model "
            "with a longer context."
        )
