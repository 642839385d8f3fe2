"""Files and folders that a configuration names and that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from groupwise.hub import names_data, names_model

if TYPE_CHECKING:
    from groupwise.config import Config


def absent(config: Config) -> list[str]:
    """Return what is missing, as `setting: name`; what is on a hub is there."""
    return [
        f"{setting}: {name} is not there"
        for setting, name in _named(config)
        if name and not there(name)
    ]


def there(name: str) -> bool:
    path = Path(name).expanduser()
    return path.exists() or any(path.parent.glob(path.name))


def _named(config: Config) -> Iterator[tuple[str, str]]:
    from groupwise.config.fields import is_generator

    models = {"model.path": config.model.path, "teacher.path": config.teacher.path,
              "critic.start": config.critic.start, "adapter.path": config.adapter.path}  # fmt: skip
    for setting, name in models.items():
        if name not in ("tiny", "policy") and not names_model(name):
            yield setting, name
    sources = [("data.train", name) for name in config.data.sources]
    for setting, name in sources + [("data.eval", name) for name in config.data.eval_sources]:
        if not is_generator(name) and not names_data(name):
            yield setting, name if there(name) else name.rpartition(":")[2]
    parts = [("reward.parts", name) for name in config.reward.parts]
    environment = ("turns.environment", config.turns.environment)
    for setting, name in [*parts, environment, *(("turns.tools", x) for x in config.turns.tools)]:
        if ".py:" in name:
            yield setting, name.rpartition(":")[0]
