"""Template and environments that a configuration names for turns, made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from groupwise.common.progress import phase
from groupwise.config import Config
from groupwise.envs.chat_turns import chat_turns
from groupwise.envs.opening import WorldSetup, check_worlds, open_worlds
from groupwise.envs.plain_turns import PLAIN, plain_turns
from groupwise.envs.turn_template import TurnTemplate
from groupwise.errors import ConfigError
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.prepare.episodes import Turns
from groupwise.records import Task


def tools_of(config: Config) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of the environment, which is made once: what is wrong with it is said before
    a model is loaded.
    """
    if not config.turns.used:
        return ()
    with phase("trying the environment"):
        return tuple(check_worlds(world_setup(config)))


def turns_of(
    config: Config,
    tasks: Sequence[Task],
    tokenizer: Tokenizer,
    context: int,
    tools: Sequence[Mapping[str, Any]],
) -> Turns | None:
    """Return who answers the policy; None where nobody does."""
    if not config.turns.used:
        return None
    template = template_of(config, tasks, tokenizer, tools)
    read = replace(world_setup(config), reader=template.calls)
    return Turns(config, tokenizer, context, template, lambda: open_worlds(read))


def world_setup(config: Config) -> WorldSetup:
    """Return what the environments are made of."""
    turns = config.turns
    return WorldSetup(
        turns.environment,
        turns.tools,
        turns.options,
        timeout=turns.timeout,
        workers=turns.workers,
        parallel_calls=turns.parallel_calls,
    )


def template_of(
    config: Config,
    tasks: Sequence[Task],
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]],
) -> TurnTemplate:
    """Return how turns are told apart: in the form that the prompts have."""
    form, asked = config.turns.template, config.data.template
    chats = asked == "chat" or (asked == "auto" and not isinstance(tasks[0].prompt, str))
    written = "chat" if chats else "plain"
    if form not in ("auto", written) and (chats or form == "chat"):
        how = "a chat template" if chats else "plain text"
        raise ConfigError(
            f"turns.template={form}, and the prompts are written as {how} (data.template={asked}): "
            "a conversation would begin in one form and go on in another. Set turns.template="
            f'"auto", or data.template="{"plain" if chats else "chat"}".'
        )
    if not chats:
        return plain_turns(tokenizer, PLAIN if form in ("auto", "plain") else form)
    name = f"the chat template of {config.model.path}"
    made = chat_turns(tokenizer, tools, name=name, keep_thoughts=config.turns.keep_thoughts)
    if not isinstance(tasks[0].prompt, str):  # roles that speak first are tried as well
        made.opening(tasks[0].prompt, tools)
    return made
