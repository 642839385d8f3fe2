"""The native engine in a process of its own, with a copy of the weights: it samples while the
learner learns.

Two pipes: orders go there and are answered at once, finished groups come back as they are written.
New weights are written into shared memory (shared.py) while the sampler rests between two tokens.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

from groupwise.engine.backends import EngineSetup
from groupwise.engine.native.engine import (
    SLOTS,
    NativeEngine,
    capabilities_with,
    check_requests,
)
from groupwise.engine.native.shared import SharedWeights, StoredParameter, attach, mapped
from groupwise.engine.protocol import (
    Capabilities,
    Engine,
    Request,
    Sampling,
    State,
    Sync,
    Ticket,
    Wrote,
)
from groupwise.errors import EngineError, GroupwiseError, in_short
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.layers.transformer import PolicyModel
from groupwise.records import Completion

START = (
    "from groupwise.engine.native.process import run; run(*map(int, __import__('sys').argv[1:]))"
)
PATIENCE = 600.0  # seconds that an order may wait for its answer: one pass of the model is quicker


@dataclass(frozen=True)
class Beginning:
    """All that a sampler's process is started with."""

    model: PolicyModel  # without its parameters
    places: list[StoredParameter]
    size: int
    tokenizer: Tokenizer
    seed: int
    slots: int
    on_sync: Sync
    threads: int
    version: int


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

    def __init__(self, setup: EngineSetup) -> None:
        settings, learner = setup.settings, setup.loaded.model
        self.capabilities: Capabilities = capabilities_with(settings.weights, beside=True)
        self.config, self.tell = learner.config, setup.tell
        self.shared = SharedWeights(learner)
        self.held = self.source = SharedSource(self.shared, 0)
        self.places = settings.slots or SLOTS
        self.tickets = count()
        self.under_way: set[Ticket] = set()
        self.lock = threading.Lock()  # of what is under way
        self.said: list[tuple[str, str]] = []  # by the sampler, not told yet
        self.orders, orders = Pipe()
        self.answers, answers = Pipe()
        files = (orders.fileno(), answers.fileno(), self.shared.file)
        path = os.pathsep.join(filter(None, sys.path))
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, files)],
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
        )
        orders.close()
        answers.close()
        self._end = weakref.finalize(self, _end, self.process, self.orders, self.answers)
        beginning = Beginning(
            model=self.shared.model,
            places=self.shared.places,
            size=self.shared.size,
            tokenizer=setup.loaded.tokenizer,
            seed=setup.seed,
            slots=settings.slots,
            on_sync=setup.on_sync,
            threads=torch.get_num_threads(),
            version=0,
        )
        self._send(beginning)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> list[Ticket]:
        check_requests(self.config, requests, sampling)
        tickets = [next(self.tickets) for _ in requests]
        with self.lock:
            self.under_way.update(tickets)
        self._send(("submit", tickets, list(requests), sampling))
        return tickets

    def finished(self, wrote: Wrote | None = None) -> list[tuple[Ticket, list[Completion]]]:
        while True:
            with self.lock:
                if not self.under_way:
                    return []
            kind, *said = self._taken(self.answers)
            if kind == "failed":
                raise EngineError(f"The sampler's process failed: {said[0]}")
            if kind == "tell":
                self.said.append((said[0], said[1]))
                continue
            found: list[tuple[Ticket, list[Completion]]] = said[0]
            with self.lock:
                found = [(ticket, group) for ticket, group in found if ticket in self.under_way]
                self.under_way.difference_update(ticket for ticket, _ in found)
            if found:
                return found

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        with self.lock:
            self.under_way.difference_update(tickets)
        self._send(("cancel", list(tickets)))

    def sync(self, version: int) -> None:
        """Write the weights while the sampler rests; it says when it has taken them."""
        self._asked(("rest",))
        self.shared.write()
        held, self.idle_seconds = self._asked(("sync", version))
        self.held.sync(held)
        while self.said:
            self.tell(*self.said.pop(0))

    def close(self) -> None:
        self._end()

    def _asked(self, order: tuple[Any, ...]) -> Any:
        self._send(order)
        if not self.orders.poll(PATIENCE):
            raise EngineError(
                f"The sampler's process has not answered `{order[0]}` for {PATIENCE:g} s. End the "
                "run and start it again: it goes on from its last checkpoint."
            )
        kind, said = self._taken(self.orders)
        if kind == "failed":
            raise EngineError(f"The sampler's process failed: {said}")
        return said

    def _send(self, order: object) -> None:
        try:
            self.orders.send_bytes(pickle.dumps(order))
        except OSError as error:
            raise self._gone() from error

    def _taken(self, pipe: Connection) -> Any:
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._gone() from error

    def _gone(self) -> EngineError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        code = self.process.returncode
        return EngineError(
            f"The sampler's process ended (exit code {code}): killed, or out of memory? What it "
            "was writing is lost, and no prompt: the same command goes on from the last checkpoint."
        )


def _end(process: subprocess.Popen[bytes], orders: Connection, answers: Connection) -> None:
    """End a sampler: it does so by itself where nobody gives it orders any more."""
    orders.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    answers.close()  # last: whoever waits there wakes up as the process ends


# --- the sampler's process --------------------------------------------------------------------


def run(orders_file: int, answers_file: int, weights_file: int) -> None:
    """Take orders until nobody gives any."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the learner's process decides when to end
    orders, answers = Connection(orders_file), Connection(answers_file)
    with contextlib.suppress(EOFError, OSError):
        Sampler(pickle.loads(orders.recv_bytes()), weights_file, orders, answers).serve()


class Sampler:
    """A native engine that follows orders between any two tokens."""

    def __init__(
        self, given: Beginning, weights: int, orders: Connection, answers: Connection
    ) -> None:
        torch.set_num_threads(given.threads)
        self.orders, self.answers = orders, answers
        self.engine = NativeEngine(
            attach(given.model, mapped(weights, given.size, given.places)),
            given.tokenizer,
            seed=given.seed,
            slots=given.slots,
            version=given.version,
            tell=lambda kind, text: self._say("tell", kind, text),
            on_sync=given.on_sync,
        )
        self.names: dict[Ticket, Ticket] = {}  # the engine's tickets, as the other side knows them
        self.idle = 0.0
        # Sent by a thread: whoever waits for a full pipe to empty hears no orders.
        self.unsent: SimpleQueue[bytes | None] = SimpleQueue()
        self.sending = threading.Thread(target=self._send, daemon=True)
        self.sending.start()

    def serve(self) -> None:
        """Sample where there is something to do, and follow orders as they come."""
        while True:
            if not self.engine.batches or self.orders.poll():
                self._follow()
                continue
            try:
                found = self.engine.finished(pause=self.orders.poll)
            except Exception as error:  # whatever it was: the other side must not wait
                own = isinstance(error, GroupwiseError)
                self._say("failed", str(error) if own else in_short(error))
                self.unsent.put(None)
                self.sending.join()
                return
            if found:
                self._say("finished", [(self.names.pop(t), group) for t, group in found])

    def _follow(self) -> None:
        begun, waits = time.perf_counter(), not self.engine.batches
        order, *said = pickle.loads(self.orders.recv_bytes())
        self.idle += time.perf_counter() - begun if waits else 0.0
        if order == "submit":
            tickets, requests, sampling = said
            self.names |= dict(zip(self.engine.submit(requests, sampling), tickets, strict=True))
        elif order == "cancel":
            own = [mine for mine, theirs in self.names.items() if theirs in said[0]]
            self.engine.cancel(own)
            self.names = {t: name for t, name in self.names.items() if t not in own}
        elif order == "rest":
            self._reply(None)
            self._follow()  # nothing is sampled before what comes behind a rest: new weights
        elif order == "sync":
            try:
                self.engine.sync(said[0])
            except Exception as error:  # as above
                self.orders.send_bytes(pickle.dumps(("failed", in_short(error))))
                raise EOFError from error
            self._reply((self.engine.source.version, self.idle))

    def _reply(self, said: object) -> None:
        self.orders.send_bytes(pickle.dumps(("done", said)))

    def _say(self, *said: object) -> None:
        self.unsent.put(pickle.dumps(said))

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            while (said := self.unsent.get()) is not None:
                self.answers.send_bytes(said)
