"""What trackers hold, read back from their own stores: {step: {metric: value}}, doubles refused."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Curves = dict[int, dict[str, float]]


def add(found: Curves, step: int, name: str, value: float) -> None:
    assert name not in found.setdefault(step, {}), f"{name} of step {step} is there twice"
    found[step][name] = value


def tensorboard(place: Path) -> tuple[Curves, dict[str, str]]:
    """Numbers (float32 there), and texts by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    found: Curves = {}
    for name in events.Tags()["scalars"]:
        for point in events.Scalars(name):
            add(found, point.step, name, point.value)
    texts = {
        tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
        if not tag.startswith("_hparams_")
    }
    return found, texts


def wandb_records(file: Path) -> Iterator[Any]:
    """Of a .wandb file: LevelDB's log format, with a header of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, block = file.read_bytes(), 32768
    assert data[:4] == b":W&B"
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = block - at % block
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def wandb(place: Path) -> tuple[Curves, list[str], set[str], dict[str, Any]]:
    """Numbers, alerts, ids and settings of all offline folders together."""
    found: Curves = {}
    alerts, ids, settings = [], set(), {}
    for file in sorted(place.glob("offline-run-*/*.wandb")):
        for record in wandb_records(file):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                step = int(row["_step"])
                for name, value in row.items():
                    if not name.startswith("_"):
                        add(found, step, name, value)
            elif kind == "alert":
                alerts.append(record.alert.title)
            elif kind == "run":
                ids.add(record.run.run_id)
            elif kind == "config":
                settings |= {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.config.update
                }
    return found, alerts, ids, settings


def trackio(place: Path) -> tuple[Curves, dict[str, Any], list[str]]:
    """Numbers, settings and titles of alerts of the only run."""
    (file,) = place.glob("*.db")
    with sqlite3.connect(file) as store:
        rows = store.execute("SELECT step, metrics FROM metrics").fetchall()
        ((settings,),) = store.execute("SELECT config FROM configs")
        alerts = [title for (title,) in store.execute("SELECT title FROM alerts")]
        ((runs,),) = store.execute("SELECT COUNT(DISTINCT run_id) FROM metrics")
    assert runs == 1
    found: Curves = {}
    for step, metrics in rows:
        for name, value in json.loads(metrics).items():
            add(found, step, name, value)
    return found, json.loads(settings), alerts


def mlflow(place: Path) -> tuple[Curves, Any]:
    """Numbers of the only run, and the run."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{place / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("groupwise").experiment_id])
    found: Curves = {}
    for name in run.data.metrics:
        for point in client.get_metric_history(run.info.run_id, name):
            add(found, point.step, name, point.value)
    return found, run
