"""Models and adapters from a hub, held at the commits that a run was started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from groupwise.config import Config
from groupwise.hub import fetch_adapter, fetch_data, fetch_model, names_data, names_model


def pinned(config: Config, manifest: Mapping[str, Any]) -> Config:
    """Pin models and adapters to the commits that a run was started with."""
    before: Mapping[str, str] = manifest.get("hub", {})

    def at(setting: str, text: str) -> str:
        return before.get(setting, text) if names_model(text) else text

    model, adapter, teacher = config.model, config.adapter, config.teacher
    adapters = tuple(at(f"model.adapters {text}", text) for text in model.adapters)
    return replace(
        config,
        model=replace(model, path=at("model.path", model.path), adapters=adapters),
        adapter=replace(adapter, path=at("adapter.path", adapter.path)),
        teacher=replace(
            teacher,
            path=at("teacher.path", teacher.path),
            paths={name: at(f"teacher.paths.{name}", text) for name, text in teacher.paths.items()},
        ),
    )


def commits(config: Config, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return what a run has from a hub, at which commit: by the setting that names it."""
    found: dict[str, str] = {}
    start = pinned(config, manifest)
    if names_model(config.model.path):
        found["model.path"] = str(fetch_model(start.model.path))
    for text, at in zip(config.model.adapters, start.model.adapters, strict=True):
        if names_model(text):
            found[f"model.adapters {text}"] = str(fetch_adapter(at))
    if names_model(config.adapter.path):
        found["adapter.path"] = str(fetch_adapter(start.adapter.path))
    teachers = {f"teacher.paths.{name}": text for name, text in start.teacher.paths.items()}
    for setting, text in (teachers | {"teacher.path": start.teacher.path}).items():
        if names_model(text):
            found[setting] = str(fetch_model(text))
    for setting, sources in (
        ("data.train", config.data.sources),
        ("data.eval", config.data.eval_sources),
    ):
        for source in filter(names_data, sources):
            _, _, after = source.rpartition("hub:")
            found[f"{setting} {source}"] = str(fetch_data(f"hub:{after}"))
    return found
