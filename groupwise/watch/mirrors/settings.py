"""A run's configuration as a tracker takes it: flat, and without anything that looks secret."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from groupwise.errors import RunError
from groupwise.runfiles.folder import RunFolder
from groupwise.watch.mirrors.tracker import Setting

HIDDEN = "***"
# `engine.max_tokens` and `data.answer_key` are none of these.
SECRET_NAME = r"\w*(?:api_?key|access_?key|secret|password|passwd|credentials?|(?<!\w)token|_token)"
SECRET_NAMES = re.compile(rf"(?i)(?:^|.*[.\s]){SECRET_NAME}")
SECRET_TEXTS = re.compile(
    rf"(?i)(?P<name>\b{SECRET_NAME}['\"]?\s*[=:]\s*)(?:\"[^\"]*\"|'[^']*'|[^\s,;)&]+)"
    r"|(?P<scheme>://)[^/\s@]+(?=@)"  # of an address: user and password
    r"|\b(?:sk|hf|ghp|gho|github_pat|glpat|xox[abp]|wandb_v1)[-_][\w-]{16,}"
)
LEAST_SECRET = 8  # characters of a variable's value: shorter ones are found in innocent texts


def settings_of(folder: RunFolder) -> dict[str, Setting]:
    """Return config.toml by dotted names; {} where there is none that can be read."""
    try:
        return dict(_flat(folder.read_settings(), ""))
    except RunError:
        return {}


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Setting]]:
    for key, value in table.items():
        name = prefix + key
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif SECRET_NAMES.fullmatch(name) and value != "":
            yield name, HIDDEN
        elif isinstance(value, bool | int | float):
            yield hide(name), value
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield hide(name), hide(text)


def hide(text: str) -> str:
    """Return the text without keys, passwords, or the values of variables named like them."""
    for name, value in os.environ.items():
        if SECRET_NAMES.fullmatch(name) and len(value) >= LEAST_SECRET:
            text = text.replace(value, HIDDEN)
    return SECRET_TEXTS.sub(lambda m: f"{m['name'] or m['scheme'] or ''}{HIDDEN}", text)
