"""The native engine in a process of its own, with a copy of the weights: it samples while the
learner learns.

Two pipes: orders go there and are answered at once, finished groups come back as they are written.
New weights are written into shared memory (shared.py), of the GPU where the learner's are, while
the sampler rests between two tokens, and score a probe on both sides before it goes on. So the
sampler reads one copy, which no update touches, and needs no second one.

A process that dies or hangs is replaced by another one, which reads the weights where they lie,
scores the probe, and is asked again for what is unfinished, under the same keys. child.py is the
other side.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from itertools import count, groupby
from multiprocessing import Pipe
from typing import Any

import torch

from groupwise.engine.backends import EngineSetup
from groupwise.engine.native.child import Beginning
from groupwise.engine.native.engine import SLOTS, capabilities_with, check_requests
from groupwise.engine.native.shared import SharedWeights, given_back
from groupwise.engine.protocol import (
    Capabilities,
    Engine,
    Request,
    Sampling,
    State,
    Ticket,
    WeightSource,
    Wrote,
)
from groupwise.errors import EngineError
from groupwise.model.layers.transformer import PolicyModel
from groupwise.model.probe import gap_of, logp_of_ids, probe_of
from groupwise.model.room import SAMPLER_SHARE
from groupwise.records import Completion

START = "from groupwise.engine.native.child import run; run(*map(int, __import__('sys').argv[1:]))"
PATIENCE = 600.0  # seconds without a word: one pass of the model is quicker
LOOK_EVERY = 1.0  # seconds between two looks of whoever waits
TRIES = 5  # processes that may end one after the other without an answer
# The largest mean |Δ log p| of the probe: the same code, the same numbers, on the same machine.
SAME = {torch.float32: 1e-4, torch.float16: 0.005, torch.bfloat16: 0.02}


class SamplerGone(Exception):
    """A sampler's process that has ended, or was ended because it was silent."""


class SamplerProcess:
    """A process, and the two pipes to it."""

    def __init__(self, beginning: Beginning) -> None:
        self.orders, orders = Pipe()
        self.answers, answers = Pipe()
        pipes = (orders.fileno(), answers.fileno())
        path = os.pathsep.join(filter(None, sys.path))
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, pipes)],
            pass_fds=(*pipes, *beginning.weights.files),
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
        )
        orders.close()
        answers.close()
        self.heard = time.monotonic()  # when it last said anything
        self.beginning = beginning
        self.begun = False

    def send(self, order: object) -> None:
        """Give an order; before the first, all that it is started with."""
        given = [order] if self.begun else [self.beginning, order]
        self.begun = True
        # Who does not read lets the pipe run full, and whoever writes then waits for good.
        deadline = threading.Timer(PATIENCE, self.process.kill)
        deadline.daemon = True
        deadline.start()
        try:
            with _gone():
                for each in given:
                    self.orders.send_bytes(pickle.dumps(each))
        finally:
            deadline.cancel()

    def asked(self, *order: object) -> Any:
        """Give an order and return what is replied."""
        self.send(order)
        return self.reply()

    def reply(self) -> Any:
        """Return what is replied to an order."""
        with _gone():
            if not self.orders.poll(PATIENCE):
                self.process.kill()
                raise SamplerGone
            kind, said = pickle.loads(self.orders.recv_bytes())
        if kind == "failed":
            raise EngineError(f"The sampler's process failed: {said}")
        return said

    def word(self) -> tuple[Any, ...] | None:
        """Return the next thing that it says by itself; None where it says nothing for a while."""
        with _gone():
            if not self.answers.poll(LOOK_EVERY):
                if time.monotonic() - self.heard > PATIENCE:
                    self.process.kill()  # the next look finds it gone
                return None
            said: tuple[Any, ...] = pickle.loads(self.answers.recv_bytes())
        self.heard = time.monotonic()
        return said

    def last_word(self) -> str:
        """Return why it ended, where it has said so."""
        with contextlib.suppress(EOFError, OSError):
            while self.orders.poll():
                kind, said = pickle.loads(self.orders.recv_bytes())
                if kind == "failed":
                    return str(said)
        return ""

    def end(self) -> int:
        """End it, and return its exit code: it ends by itself where nobody gives it orders."""
        self.orders.close()
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        given_back(self.beginning.weights)
        return code


@contextlib.contextmanager
def _gone() -> Iterator[None]:
    """Say of a pipe that breaks that its process is gone."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise SamplerGone from error


class SharedSource:
    """The weights that the sampler's process reads, as this process sees them."""

    noise = 0.0

    def __init__(self, shared: SharedWeights, version: int) -> None:
        self.model, self.version = shared.view(), version

    def sync(self, version: int) -> None:
        self.version = version

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        if state:
            raise EngineError("The sampler's process keeps no copies: engine.weights differs.")


class ProcessEngine(Engine):
    """Sends requests to a sampler's process, and takes what it has written."""

    source: WeightSource  # it can always be seen

    def __init__(self, setup: EngineSetup) -> None:
        settings, self.learner = setup.settings, setup.loaded.model
        self.capabilities: Capabilities = capabilities_with(settings.weights, beside=True)
        self.setup, self.threads = setup, torch.get_num_threads()
        self.shared = SharedWeights(self.learner)
        self.source = SharedSource(self.shared, 0)
        self.places = settings.slots or SLOTS
        self.probe = probe_of(setup.loaded.tokenizer, self.learner.config.vocab_size)
        self.tickets = count()
        self.under_way: dict[Ticket, tuple[Request, Sampling]] = {}
        self.lock = threading.Lock()  # of what is under way
        self.life = threading.RLock()  # of the process: whoever gives orders, or replaces it
        self.said: list[tuple[str, str]] = []  # what is to be told, and was not yet
        self.ends, self.restarts, self.again = 0, 0, 0  # in a row; since the last step
        self.idle_before = 0.0  # of processes that are gone
        self.gap = (0.0, 0.0)  # of the last probe: |Δ log p|, mean and largest
        self.closed = False
        self._start(0)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> list[Ticket]:
        check_requests(self.learner.config, requests, sampling)
        asked = {next(self.tickets): (request, sampling) for request in requests}
        with self.life:
            with self.lock:
                if not self.under_way:  # it had nothing to say, however long that was
                    self.sampler.heard = time.monotonic()
                self.under_way |= asked
            try:
                self._ask(asked)
            except SamplerGone:
                self._replace(self.sampler)
        return list(asked)

    def finished(self, wrote: Wrote | None = None) -> list[tuple[Ticket, list[Completion]]]:
        while True:
            with self.lock:
                if not self.under_way:
                    return []
            sampler = self.sampler
            try:
                kind, *said = sampler.word() or ("alive",)
            except SamplerGone:
                self._replace(sampler)
                continue
            if kind == "failed":
                raise EngineError(f"The sampler's process failed: {said[0]}")
            if kind == "tell":
                self.said.append((said[0], said[1]))
            found = self._wanted(said[0]) if kind == "finished" else []
            if found:
                self.ends = 0
                return found

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        with self.life:
            with self.lock:
                for ticket in tickets:
                    self.under_way.pop(ticket, None)
            with contextlib.suppress(SamplerGone):  # whoever asks next replaces it
                self.sampler.send(("cancel", list(tickets)))

    def sync(self, version: int) -> None:
        """Write the weights while the sampler rests, let it score the probe, and let it go on."""
        with self.life:
            rests = self._rests()
            self.shared.write()
            held = self._gone_on(version) if rests else None
            if held is None:
                self._replace(self.sampler, version)
            self.source.sync(version if held is None else held)
        while self.said:
            self.setup.tell(*self.said.pop(0))

    def _rests(self) -> bool:
        """Let the sampler rest; False where it is gone."""
        try:
            self.sampler.asked("rest")
        except SamplerGone:
            return False
        return True

    def _gone_on(self, version: int) -> int | None:
        """Let it go on with new weights, and return which it says it has; None where it is gone."""
        try:
            self._check_probe(self.learner)
            held, idle = self.sampler.asked("sync", version)
        except SamplerGone:
            return None
        self.idle_seconds = self.idle_before + idle
        return int(held)

    def measures(self) -> dict[str, float]:
        if not self.restarts:
            return {}  # the metrics are those of a sampler in the same process
        told = {"sync/restarts": float(self.restarts), "sync/resubmitted": float(self.again)}
        self.restarts = self.again = 0
        return told

    def close(self) -> None:
        self.closed = True
        with self.life:
            self._end()

    # --- the process ---

    def _start(self, version: int) -> None:
        """Start a process, which reads the weights that lie in memory."""
        settings, loaded = self.setup.settings, self.setup.loaded
        beginning = Beginning(
            weights=self.shared.lend(),
            tokenizer=loaded.tokenizer,
            seed=self.setup.seed,
            slots=settings.slots,
            on_sync=self.setup.on_sync,
            threads=self.threads,
            version=version,
            memory=self._memory(),
        )
        self.sampler, self.probed = SamplerProcess(beginning), False
        self._end = weakref.finalize(self, self.sampler.end)

    def _memory(self) -> float:
        """Return the share of a GPU's memory that the process may take: its copy is part of it."""
        device = self.learner.head_weight.device
        if device.type != "cuda":
            return 1.0
        whole = torch.cuda.get_device_properties(device).total_memory
        return max(SAMPLER_SHARE - self.shared.size / whole, 0.0)

    def _replace(self, gone: SamplerProcess, version: int | None = None) -> None:
        """Put another process in the place of one that is gone, and ask again for what it owes."""
        with self.life:
            while self.sampler is gone and not self.closed:
                self._bury(gone)
                self._start(self.source.version if version is None else version)
                try:
                    with self.lock:
                        owed = dict(self.under_way)
                    self._ask(owed)
                except SamplerGone:
                    gone = self.sampler
                    continue
                self.restarts += 1
                self.again += len(owed)
            if self.closed:
                raise EngineError("The sampler's process was ended with its run.")

    def _bury(self, gone: SamplerProcess) -> None:
        """Note that it ended, or raise where it said why, or where others ended before it."""
        why = gone.last_word()
        self._end.detach()
        code = gone.end()
        if why:
            raise EngineError(f"The sampler's process failed: {why}")
        self.ends += 1
        self.idle_before = self.idle_seconds
        if self.ends >= TRIES:
            raise EngineError(
                f"The sampler's process ended {TRIES} times without one answer (exit code {code}): "
                "killed, or out of memory? Lower engine.slots or engine.max_tokens. No prompt is "
                "lost: the same command goes on from the last checkpoint."
            )
        self.said.append(
            ("engine", f"the sampler's process ended (exit code {code}); it was started again, and "
             "asked again for what it had not finished.")
        )  # fmt: skip

    def _ask(self, asked: dict[Ticket, tuple[Request, Sampling]]) -> None:
        """Ask for answers, those that are sampled alike together; behind the probe."""
        if not self.probed:
            self._check_probe(self.source.model)
        for sampling, alike in groupby(asked.items(), key=lambda each: each[1][1]):
            named = {ticket: request for ticket, (request, _) in alike}
            self.sampler.send(("submit", list(named), list(named.values()), sampling))

    def _check_probe(self, model: PolicyModel) -> None:
        """Refuse a sampler that does not say what a model says of the same tokens."""
        self.sampler.send(("probe", self.probe))
        own = [logp_of_ids(model, ids) for ids in self.probe]
        gap_T = gap_of(self.sampler.reply(), own)
        self.probed, self.gap = True, (float(gap_T.mean()), float(gap_T.max()))
        if not gap_T.mean() <= SAME.get(model.head_weight.dtype, SAME[torch.float32]):
            raise EngineError(
                "The sampler's process does not compute the learner's policy: |Δ log p| mean "
                f"{self.gap[0]:.2g}, max {self.gap[1]:.2g} over {len(gap_T)} tokens "
                "of a probe. Weights did not arrive, or arrived by half; nothing is sampled from "
                "them. The same command goes on from the last checkpoint; engine.servers=0 does "
                "without a process."
            )

    def _wanted(
        self, found: Sequence[tuple[Ticket, list[Completion]]]
    ) -> list[tuple[Ticket, list[Completion]]]:
        """Return those that somebody waits for, who waits no longer."""
        with self.lock:
            return [each for each in found if self.under_way.pop(each[0], None) is not None]
