"""What `compare` says while nothing comes from its runs, and when it was stopped."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.commands.compare import go_on
from groupwise.common import progress
from groupwise.compare import workers


class Eager(progress.Watcher):
    """Shows a phase as soon as it begins."""

    def begin(self, phase: progress.Phase) -> None:
        super().begin(phase)
        self.look()


def test_runs_that_say_nothing_are_waited_for_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "FIRST_AFTER", 0.0)
    told, shown = list[str](), threading.Event()

    class Silent:
        """A worker that ends once it was said that it is waited for."""

        def __init__(self, folder: Any, place: Any, lock: int, waiting: Any, heard: Any) -> None:
            self._thread = threading.Thread(target=lambda: heard.put(shown.wait(60) and None))

        def start(self) -> None:
            self._thread.start()

        def join(self) -> None:
            self._thread.join()

    def show(line: str) -> None:
        told.append(line)
        shown.set()

    monkeypatch.setattr(workers, "_Worker", Silent)
    jobs: Any = [SimpleNamespace(arm=0, seed=seed) for seed in (0, 1)]
    with Eager(show, live=False) as watcher, watcher.watching():
        workers.run_jobs(None, None, jobs, [{}], 0, lambda done: None)  # type: ignore[arg-type]
    assert told[0].startswith("running, 0 of 2 runs, 0 %, 0:0")


@pytest.mark.parametrize("name", ["groupwise", "groupwise.__main__"])
def test_the_command_that_goes_on_is_the_one_a_person_types(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = SimpleNamespace(__spec__=SimpleNamespace(name=name))
    monkeypatch.setitem(sys.modules, "__main__", main)
    said = go_on(["/x/groupwise/__main__.py", "compare", "grpo", "dapo"])
    assert said.endswith(": python -m groupwise compare grpo dapo")
