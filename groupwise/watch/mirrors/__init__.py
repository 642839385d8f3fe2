"""Runs copied to trackers: TensorBoard, Weights & Biases, Trackio, MLflow.

The run folder is the truth; a mirror reads it as it grows (tail.py) and tells what it finds to a
tracker through the tracker's own client, in a process of its own (children.py). So a client that
is slow, hangs or dies has no way to touch the run, and what it missed can be sent later.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from groupwise.common.extras import install
from groupwise.errors import ConfigError, nearest
from groupwise.watch.mirrors.tracker import TrackedRun, Tracker

# Trackers, and what must be there to import: each is also the name of an extra and of a module.
# The setting `watch.mirrors` lists them a second time, as whoever mirrors a run loads no PyTorch.
NEEDS = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow", "sqlalchemy"),
}
FOLDER = "mirrors"  # in the run folder: what is known of each tracker, its log, local stores


def check(names: Iterable[str]) -> None:
    """Refuse trackers that are unknown, or whose client is not installed."""
    for name in names:
        if name not in NEEDS:
            raise ConfigError(f"There is no mirror to {name!r}. {nearest(name, NEEDS)}")
        lacking = [package for package in NEEDS[name] if not _installed(package)]
        if lacking:
            raise ConfigError(
                f"The mirror to {name} needs {' and '.join(lacking)}, which "
                f"{'is' if len(lacking) == 1 else 'are'} not installed: "
                f"`{install(name)}`. Or take it out of watch.mirrors: the run folder has "
                "everything, and `groupwise mirror` can send it at any later time."
            )


def _installed(package: str) -> bool:
    """Return whether a package is installed; a folder that wandb leaves behind is none."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def open_tracker(name: str, about: TrackedRun) -> Tracker:
    opened: Tracker = importlib.import_module(f"{__name__}.{name}").open_tracker(about)
    return opened


def forget(run: Path) -> None:
    """Forget the tracker's ids of a run that starts over, as that is another run."""
    for known in (run / FOLDER).glob("*.json"):
        known.unlink()
