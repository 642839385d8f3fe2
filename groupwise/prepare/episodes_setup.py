"""What a configuration names for turns, made: the template, and where environments run."""

from __future__ import annotations

from groupwise.config import Config
from groupwise.envs.turn_template import TurnTemplate
from groupwise.envs.worlds import Worlds
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.prepare.episodes import Turns


def turns_of(config: Config, tokenizer: Tokenizer, context: int) -> Turns | None:
    """Return who answers the policy; None where nobody does."""
    if not config.turns.used:
        return None
    template = template_of(config, tokenizer)
    return Turns(config, tokenizer, context, template, lambda: worlds_of(config, template))


def template_of(config: Config, tokenizer: Tokenizer) -> TurnTemplate:
    """Return how turns are told apart."""
    raise NotImplementedError


def worlds_of(config: Config, template: TurnTemplate) -> Worlds:
    """Return the environments."""
    raise NotImplementedError
