"""Refusals of settings that would have no effect. A pipeline leaves out defaults of this kind."""

from __future__ import annotations

from groupwise.config.fields import Config
from groupwise.config.values import flat


class Ignored(str):
    """The words of such a refusal, with the setting's name beside them."""

    setting: str


def ignored(config: Config, setting: str, by: str, why: str) -> Ignored:
    """Return the refusal: what would ignore the setting, and why, with what to do instead."""
    found = Ignored(f"{setting}={flat(config)[setting]} would be ignored by {by}{why}")
    found.setting = setting
    return found
