"""The sampler's process: a native engine that follows orders between any two tokens.

What it is asked, and what it says, is in process.py, which starts it.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue

import torch

from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.native.shared import Lent, borrowed
from groupwise.engine.protocol import Sync, Ticket
from groupwise.errors import GroupwiseError, in_short
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.probe import logp_of_ids

SIGN_OF_LIFE = 5.0  # seconds after which it says that it is at work, if it had nothing else to say


@dataclass(frozen=True)
class Beginning:
    """All that a sampler's process is started with."""

    weights: Lent
    tokenizer: Tokenizer
    seed: int
    slots: int
    on_sync: Sync
    threads: int
    version: int
    memory: float  # share of a GPU's that it may take


def run(orders_file: int, answers_file: int) -> None:
    """Take orders until nobody gives any."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the learner's process decides when to end
    orders, answers = Connection(orders_file), Connection(answers_file)
    with contextlib.suppress(EOFError, OSError):
        Sampler(pickle.loads(orders.recv_bytes()), orders, answers).serve()


class Sampler:
    """A native engine, and whoever gives it orders."""

    def __init__(self, given: Beginning, orders: Connection, answers: Connection) -> None:
        torch.set_num_threads(given.threads)
        self.orders, self.answers = orders, answers
        model = borrowed(given.weights)
        self.device = model.head_weight.device
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.set_per_process_memory_fraction(given.memory, self.device)
        self.engine = NativeEngine(
            model,
            given.tokenizer,
            seed=given.seed,
            slots=given.slots,
            version=given.version,
            tell=lambda kind, text: self._say("tell", kind, text),
            on_sync=given.on_sync,
        )
        self.names: dict[Ticket, Ticket] = {}  # the engine's tickets, as the other side knows them
        self.idle = 0.0
        self.said = time.monotonic()  # when it last said anything
        # Sent by a thread: whoever waits for a full pipe to empty hears no orders.
        self.unsent: SimpleQueue[bytes | None] = SimpleQueue()
        self.sending = threading.Thread(target=self._send, daemon=True)
        self.sending.start()

    def serve(self) -> None:
        """Sample where there is something to do, and follow orders as they come."""
        try:
            while True:
                self._go_on()
        except (EOFError, OSError):
            raise
        except Exception as error:  # whatever it was: the other side must not wait
            self._fail(error)

    def _go_on(self) -> None:
        if not self.engine.batches or self.orders.poll():
            self._follow()
        elif found := self.engine.finished(pause=self._pause):
            self._say("finished", [(self.names.pop(t), group) for t, group in found])

    def _pause(self) -> bool:
        """Tell whether there is an order; asked between any two tokens, and so a sign of life."""
        if time.monotonic() - self.said > SIGN_OF_LIFE:
            self._say("alive")
        return self.orders.poll()

    def _follow(self) -> str:
        """Wait for an order and follow it; return what it was."""
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
            if self.device.type == "cuda":  # it may still read what will be written
                torch.cuda.synchronize(self.device)
            self._reply(None)
            while self._follow() != "sync":  # nothing is sampled before the new weights
                pass
        elif order == "probe":
            self._reply([logp_of_ids(self.engine.source.model, ids) for ids in said[0]])
        elif order == "sync":
            self.engine.sync(said[0])
            self._reply((self.engine.source.version, self.idle))
        return str(order)

    def _fail(self, error: Exception) -> None:
        """Say what went wrong, to whoever waits for an answer and to whoever waits for a reply."""
        why = str(error) if isinstance(error, GroupwiseError) else in_short(error)
        self._say("failed", why)
        self.unsent.put(None)
        self.sending.join()
        self.orders.send_bytes(pickle.dumps(("failed", why)))

    def _reply(self, said: object) -> None:
        self.orders.send_bytes(pickle.dumps(("done", said)))

    def _say(self, *said: object) -> None:
        self.said = time.monotonic()
        self.unsent.put(pickle.dumps(said))

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            while (said := self.unsent.get()) is not None:
                self.answers.send_bytes(said)
