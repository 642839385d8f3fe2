"""All servers of an engine and the answers that are under way: who writes what, and whose failed.

Threads do nothing but wait for servers. What they find lies in one place, under one lock, until
the engine's own thread takes it; only that thread talks to the run and touches weights.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from groupwise.engine.servers.launch import Launched
from groupwise.engine.servers.link import PendingCall, ServerGone
from groupwise.engine.servers.server import Ask, InferenceServer, ServerReply
from groupwise.errors import EngineError

TRIES = 5  # times that one answer may fail before the run stops
LOOK_EVERY = 0.2  # seconds between two looks of whoever waits


@dataclass(eq=False)
class SampleJob:
    """One sample: what is asked, and how often it failed."""

    ticket: int
    sample: int
    ask: Ask
    tries: int = 0
    dropped: bool = False  # nobody wants it any more
    call: PendingCall = field(default_factory=PendingCall)


@dataclass(eq=False)
class Station:
    """A server in service, or out of it with a reason. It comes back synced and probed."""

    server: InferenceServer
    launched: Launched | None = None
    ready: bool = False
    lost: bool = False  # it has been in service, and failed
    reason: str = "it has not been asked yet"
    since: float = 0.0  # when it went out
    looked: float = 0.0  # when it was last looked at
    epoch: int = 0  # how often it went out: answers of before then do not count
    busy: int = 0  # lanes that wait for it


class Written(NamedTuple):
    """An answer, and the server that wrote it."""

    station: Station
    job: SampleJob
    reply: ServerReply


class Fleet:
    """Answers jobs with as many requests at a time as there are lanes."""

    def __init__(
        self,
        stations: Sequence[Station],
        lanes: int,
        wrong: Callable[[SampleJob, ServerReply], str],
    ):
        self.stations, self.lanes, self.wrong = list(stations), lanes, wrong
        self.change = threading.Condition()
        self.waiting: deque[SampleJob] = deque()
        self.running: set[SampleJob] = set()
        self.found: list[Written] = []
        self.outages: list[str] = []  # that the run has not been told of
        self.resubmitted = 0
        self.broken: Exception | None = None  # what no other server can mend
        self.version = ""  # that servers must say their answers are of

    def add(self, jobs: Sequence[SampleJob]) -> None:
        with self.change:
            self.waiting.extend(jobs)
            self._staff()

    def drop(self, tickets: set[int]) -> None:
        """Forget jobs, and let servers know that nobody waits for them."""
        with self.change:
            self.waiting = deque(job for job in self.waiting if job.ticket not in tickets)
            self.found = [each for each in self.found if each.job.ticket not in tickets]
            gone = [job for job in self.running if job.ticket in tickets]
            for job in gone:
                job.dropped = True
        for job in gone:
            job.call.end()

    def settle(self, seconds: float) -> None:
        """Wait until no server writes for us any more."""
        with self.change:
            if not self.change.wait_for(lambda: not self.running, seconds):
                urls = [s.server.url for s in self.stations if s.busy]
                raise EngineError(
                    f"{', '.join(urls)} did not let go of answers within {seconds:g} s, and new "
                    "weights wait for that. Restart the server."
                )

    def take(self, seconds: float) -> list[Written]:
        """Return what was written meanwhile, or nothing after so many seconds."""
        with self.change:
            if not (self.found or self.outages or self.broken):
                self.change.wait(seconds)
            if self.broken is not None:
                raise self.broken
            found, self.found = self.found, []
            return found

    def out(self, station: Station, reason: str) -> None:
        """Take a server out of service."""
        with self.change:
            self._out(station, reason)

    def again(self, jobs: Sequence[SampleJob]) -> None:
        """Send jobs out once more, whose answers do not count."""
        with self.change:
            self.resubmitted += len(jobs)
            self.waiting.extendleft(jobs)
            self._staff()

    def back(self, station: Station) -> None:
        """Put a server into service, synced and probed."""
        with self.change:
            station.ready, station.lost, station.reason = True, False, ""
            self._staff()

    @property
    def any_ready(self) -> bool:
        return any(station.ready for station in self.stations)

    # --- within the lock ---

    def _out(self, station: Station, reason: str) -> None:
        if station.ready:
            station.ready, station.lost, station.reason = False, True, reason
            station.since = station.looked = time.monotonic()
            station.epoch += 1
            self.outages.append(reason)
            self.change.notify_all()

    def _staff(self) -> None:
        """Start as many lanes as there are jobs for."""
        wanted = len(self.waiting)
        for station in sorted(self.stations, key=lambda each: each.busy):
            share = -(-wanted // max(1, sum(each.ready for each in self.stations)))
            for _ in range(min(share, self.lanes - station.busy) if station.ready else 0):
                station.busy += 1
                threading.Thread(target=self._lane, args=(station,), daemon=True).start()

    def _next(self, station: Station) -> tuple[SampleJob, int] | None:
        with self.change:
            if not self.waiting or not station.ready or self.broken:
                station.busy -= 1
                self.change.notify_all()
                return None
            job = self.waiting.popleft()
            job.call = PendingCall()
            self.running.add(job)
            return job, station.epoch

    # --- a lane ---

    def _lane(self, station: Station) -> None:
        while (taken := self._next(station)) is not None:
            job, epoch = taken
            reply: ServerReply | None = None
            failed: Exception | None = None
            try:
                reply = station.server.generate(job.ask, job.call)
            except Exception as error:  # of a thread: it is raised where the run waits
                failed = error
            with self.change:
                self.running.discard(job)
                if not job.dropped:
                    self._judge(station, epoch, job, reply, failed)
                self.change.notify_all()

    def _judge(
        self,
        station: Station,
        epoch: int,
        job: SampleJob,
        reply: ServerReply | None,
        failed: Exception | None,
    ) -> None:
        """Keep an answer, or send its job out again; only what no server can mend is raised."""
        if failed is not None and not isinstance(failed, ServerGone):
            self.broken = self.broken or failed
            return
        why = str(failed) if reply is None else self._wrong(station, job, reply)
        if reply is not None and not why and epoch == station.epoch:
            self.found.append(Written(station, job, reply))
            return
        if why and epoch == station.epoch:
            self._out(station, why)
        job.tries += bool(why)
        if job.tries >= TRIES:
            self.broken = self.broken or EngineError(
                f"One answer failed {TRIES} times, last: {why}. Look at the server's log; the "
                "same command goes on from the last checkpoint."
            )
        self.resubmitted += 1
        self.waiting.appendleft(job)
        self._staff()

    def _wrong(self, station: Station, job: SampleJob, reply: ServerReply) -> str:
        """Return what is wrong with an answer; "" where nothing is."""
        url = station.server.url
        if reply.version is not None and reply.version != self.version:
            return (
                f"{url} answers with weights of version {reply.version!r}, and was given "
                f"{self.version!r}: it was restarted, or somebody else updates it"
            )
        if len(reply.logps) != len(reply.ids):
            return (
                f"{url} gives {len(reply.logps)} log-probabilities for {len(reply.ids)} tokens of "
                "an answer"
            )
        if not all(map(math.isfinite, reply.logps)):
            return f"{url} gives log-probabilities that are not finite"
        why = self.wrong(job, reply)
        return f"{url} {why}" if why else ""
