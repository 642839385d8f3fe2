"""MLflow: a SQLite file in the run folder, or the server that its environment names."""

from __future__ import annotations

import os
import posixpath
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read on import

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from groupwise.watch.mirrors.tracker import PROJECT, Note, TrackedRun

TAG = "groupwise.id"  # by which a run is found again
PARAMS_AT_ONCE, METRICS_AT_ONCE = 100, 1000  # what its servers take
LONGEST_NAME, LONGEST_TEXT = 250, 5000


def open_tracker(about: TrackedRun) -> MlflowRun:
    return MlflowRun(about)


class MlflowRun:
    takes_back = False  # a second value of a step would stand beside the first

    def __init__(self, about: TrackedRun) -> None:
        address, files = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not address:
            place = about.place.resolve()
            place.mkdir(parents=True, exist_ok=True)
            address, files = f"sqlite:///{place / 'mlflow.db'}", (place / "artifacts").as_uri()
        self._client = MlflowClient(tracking_uri=address)
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT, files)
        found = self._client.search_runs([experiment], f"tags.`{TAG}` = '{about.id}'")
        run = (
            found[0]
            if found
            else self._client.create_run(experiment, tags={TAG: about.id}, run_name=about.name)
        )
        self._id = run.info.run_id
        self._metrics: list[Metric] = []  # until they are flushed
        self._client.update_run(self._id, status="RUNNING")
        self._set(about, run.data.params)

    def _experiment(self, name: str, files: str | None) -> str:
        """Return the experiment's id. Two runs may make it at the same time: the second finds it
        then.
        """
        for _ in range(2):
            found = self._client.get_experiment_by_name(name)
            if found is not None:
                return str(found.experiment_id)
            try:
                return str(self._client.create_experiment(name, artifact_location=files))
            except MlflowException as error:
                trouble = error
        raise trouble

    def _set(self, about: TrackedRun, known: Mapping[str, str]) -> None:
        """Set the parameters, each once; what a resumed run changes becomes a tag."""
        params = {_name(name): str(x)[:LONGEST_TEXT] for name, x in about.settings.items()}
        new = [Param(name, x) for name, x in params.items() if name not in known]
        for part in _parts(new, PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=part)
        for name, x in params.items():
            if known.get(name, x) != x:
                self._client.set_tag(self._id, _name(f"changed.{name}"), x)

    def reached(self) -> int | None:
        return None

    def take_back(self) -> None:
        raise NotImplementedError

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        named = {_name(name): float(x) for name, x in numbers.items()}
        self._metrics += [Metric(name, x, now, step) for name, x in named.items()]

    def note(self, note: Note) -> None:
        """Set a tag, as MLflow has no alerts; tags are at the top of a run's page."""
        text = f"step {note.step}: {note.text}"
        self._client.set_tag(self._id, _name(f"event.{note.title}"), text[:LONGEST_TEXT])

    def flush(self) -> None:
        """Send in few calls: each waits for the store."""
        for part in _parts(self._metrics, METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=part)
        self._metrics = []

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


def _name(text: str) -> str:
    """Return a name as MLflow takes it: letters, digits and _-./ : alone, and nothing that looks
    like ../
    """
    plain = re.sub(r"[^\w\-./ :]", "_", text)[:LONGEST_NAME]
    return posixpath.normpath(plain).lstrip("./ ") or "_"


def _parts(items: list[Any], size: int) -> Iterator[list[Any]]:
    yield from (items[at : at + size] for at in range(0, len(items), size))
