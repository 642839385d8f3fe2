"""The process of a comparison that does runs, one after the other, as it is told on stdin.

A line in is {"arm": 0, "seed": 3}; lines out are {"share": 0.4} on the way, and then {"done":
seconds}, {"failed": words} or {"stopped": true}. When stdin ends, the parent is gone: the run is
saved, and the process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from groupwise.compare.plan import ComparisonFolder, ComparisonPlan, Job
from groupwise.compare.shared_start import copy_start, start_of
from groupwise.config import Config
from groupwise.errors import GroupwiseError, in_short
from groupwise.sync.checkpoints import delete_optimizer_state
from groupwise.training.loop import train
from groupwise.training.signals import Stopped
from groupwise.watch.display import Display

_OWN = os.getpid()


class WorkerDisplay(Display):
    """A display that writes a run's words to its log, and its progress to the parent."""

    def __init__(self, log: TextIO, config: Config, out: TextIO) -> None:
        super().__init__(log, live=False)
        self._config, self._out = config, out
        self._spent = 0.0  # of steps

    def step(self, metrics: Mapping[str, Any]) -> None:
        super().step(metrics)
        config = self._config
        shares = [metrics["step"] / self._total] if "step" in metrics else [0.0]
        if config.budget.tokens:
            shares.append(metrics.get("cost/tokens", 0) / config.budget.tokens)
        self._spent += metrics.get("time/step", 0.0) - metrics.get("time/eval", 0.0)
        if config.budget.seconds:
            shares.append(self._spent / config.budget.seconds)
        _say(self._out, share=min(max(shares), 1.0))


def _say(out: TextIO, **words: Any) -> None:
    if os.getpid() != _OWN:  # forked by what a run calls: it must not answer for this process
        os._exit(1)
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more, and the run is saved
        print(json.dumps(words), file=out, flush=True)


def main(path: str) -> int:
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a reward function prints is no answer
    asked: queue.Queue[str] = queue.Queue()
    busy = threading.Event()
    threading.Thread(target=_listen, args=(asked, busy), daemon=True).start()
    folder = ComparisonFolder(Path(path))
    plan = folder.read()
    assert plan is not None
    going_on = True
    while going_on and (line := asked.get()):
        busy.set()
        going_on = _serve(folder, plan, Job(**json.loads(line)), out)
        busy.clear()
    return 0


def _listen(asked: queue.Queue[str], busy: threading.Event) -> None:
    for line in sys.stdin:
        asked.put(line)
    asked.put("")
    if busy.is_set():
        os.kill(os.getpid(), signal.SIGTERM)  # the run under way saves itself and stops


def _serve(folder: ComparisonFolder, plan: ComparisonPlan, job: Job, out: TextIO) -> bool:
    """Do one run; return False if it was asked to stop."""
    config, run = plan.config(job), folder.run(plan, job)
    try:
        run.mkdir(parents=True, exist_ok=True)
        copy_start(start_of(config, folder), run)
        with folder.log(plan, job).open("a", encoding="utf-8") as log:
            begun = time.perf_counter()
            try:
                train(config, run, WorkerDisplay(log, config, out))
                delete_optimizer_state(run)
            except Exception:
                traceback.print_exc(file=log)
                raise
        _say(out, done=time.perf_counter() - begun)
    except Stopped:
        _say(out, stopped=True)
        return False
    except GroupwiseError as error:
        _say(out, failed=str(error))
    except Exception as error:  # one run's trouble is not the others'
        _say(out, failed=in_short(error))
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
