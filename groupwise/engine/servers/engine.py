"""vLLM and SGLang as engines: requests out, answers in, weights over, and the probe in between."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from groupwise.engine.protocol import (
    Capabilities,
    Engine,
    Finish,
    Request,
    Sampling,
    Ticket,
    Wrote,
)
from groupwise.engine.randomness import key
from groupwise.engine.servers.carriers import (
    AdapterCarrier,
    Carrier,
    FolderCarrier,
    IpcCarrier,
    NcclCarrier,
)
from groupwise.engine.servers.delivery import Delivery
from groupwise.engine.servers.fleet import LOOK_EVERY, Fleet, SampleJob, Station, Written
from groupwise.engine.servers.launch import Launched, LaunchPlan
from groupwise.engine.servers.link import ServerFailed, ServerGone
from groupwise.engine.servers.refusals import problems
from groupwise.engine.servers.server import Ask, InferenceServer, ServerReply
from groupwise.engine.servers.sglang import SglangServer
from groupwise.engine.servers.vllm import VllmServer
from groupwise.engine.servers.weights import Ids, PolicyWeights
from groupwise.engine.stopping import watch_of
from groupwise.errors import EngineError
from groupwise.records import Completion

if TYPE_CHECKING:
    from groupwise import config
    from groupwise.engine.backends import EngineSetup

LANES = 256  # requests at a time to one server, unless engine.slots says otherwise
AGAIN = 1.0  # seconds between two tries to bring a server back
SETTLE = 30.0  # seconds for servers to let go of answers that nobody wants


@dataclasses.dataclass
class PendingGroup:
    """A request that is under way: what has come of its samples."""

    request: Request
    sampling: Sampling
    found: dict[int, Completion] = dataclasses.field(default_factory=dict)


class ServerEngine(Engine):
    """Samples by inference servers: given ones, or some of its own."""

    kind: ClassVar[type[InferenceServer]]

    def __init__(self, setup: EngineSetup) -> None:
        settings = setup.settings
        if setup.weights is None:
            raise EngineError(f"engine.backend={settings.backend} is made by a run, not by hand.")
        self.weights: PolicyWeights = setup.weights
        self.settings, self.seed, self.tell = settings, setup.seed, setup.tell
        self.tokenizer, self.shape = setup.loaded.tokenizer, setup.loaded.model.config
        self.dtype = setup.loaded.model.head_weight.dtype
        self.capabilities = self.capabilities_for(settings)
        self.number, self.mark = -1, uuid.uuid4().hex[:8]  # another engine's versions are others
        self.groups: dict[Ticket, PendingGroup] = {}
        self.done: list[tuple[Ticket, list[Completion]]] = []
        self.tickets, self.answers, self.tokens = count(), 0, 0
        self.root = Path(tempfile.mkdtemp(prefix="groupwise_weights_", dir=settings.folder or None))
        self.root.chmod(0o755)
        weakref.finalize(self, shutil.rmtree, self.root, ignore_errors=True)
        self.told: dict[str, float] = {"sync/restarts": 0.0}
        self.fleet = Fleet(self._stations(), settings.slots or LANES, self._why_wrong)
        self.delivery = Delivery(
            self.weights,
            self._carrier(),
            self.shape.vocab_size,
            self.dtype,
            quantised=bool(settings.quantization),
        )
        self.synced = False
        self.sync(0)

    @classmethod
    def capabilities_for(cls, settings: config.EngineSettings) -> Capabilities:
        """Return what one can do; weights that it rounds are copies of another name."""
        rounded = f":{settings.quantization}" if settings.quantization else ""
        return Capabilities(weights=f"{cls.kind.kind}{rounded}")

    @classmethod
    def problems(cls, settings: config.EngineSettings) -> Iterator[str]:
        """Say what is wrong before anything is loaded; servers that should be there are asked."""
        return problems(cls.kind, settings)

    # --- samples --------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> list[Ticket]:
        if not self.synced:
            raise EngineError("The last weights did not arrive at the servers: sync them first.")
        if not self.groups:
            self._distrust()
            self.answers = self.tokens = 0
        given: list[Ticket] = []
        jobs: list[SampleJob] = []
        for request in requests:
            ticket = next(self.tickets)
            given.append(ticket)
            self.groups[ticket] = PendingGroup(request, sampling)
            jobs += [
                SampleJob(ticket, n, self._ask(request, n, sampling))
                for n in range(request.samples)
            ]
        self.fleet.add(jobs)
        return given

    def finished(self, wrote: Wrote | None = None) -> list[tuple[Ticket, list[Completion]]]:
        while self.groups and not self.done:
            for each in self._confirmed(self.fleet.take(LOOK_EVERY)):
                self._keep(each.job, each.reply)
            if wrote is not None:
                wrote(self.answers, self.tokens)
            self._report()
            if not self.done:
                self._bring_back()
        done, self.done = self.done, []
        return done

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        gone = set(tickets)
        self.fleet.drop(gone)
        self.done = [(ticket, group) for ticket, group in self.done if ticket not in gone]
        for ticket in gone:
            self.groups.pop(ticket, None)

    def _ask(self, request: Request, sample: int, sampling: Sampling) -> Ask:
        # An answer that is gone on with starts its generator anew: its place goes into the seed.
        purpose = f"token {request.begun}" if request.begun else "token"
        named = (request.stream, request.prompt_id, request.draw, sample)
        words = key(self.seed, *named, purpose=purpose)
        return Ask(
            prompt=tuple(request.prompt),
            most=request.most(sampling),
            least=request.least(sampling),
            sampling=sampling,
            seed=(words[0] << 31 | words[1] >> 1) & (2**62 - 1),
            salt=self.version,
            ends=tuple(sorted(self.tokenizer.eos_ids)),
            begun=request.begun,
        )

    def _confirmed(self, found: Sequence[Written]) -> list[Written]:
        """Return the answers that are of the weights of now: the others go out again.

        A server that was started again in between does not know what its weights were called, so
        one question vouches for all that it wrote before.
        """
        doubted = {each.station: each for each in found if each.reply.version is None}
        for station in doubted:
            try:
                self._ask_version(station.server)
            except ServerGone as error:
                self.fleet.out(station, str(error))
                self.fleet.again([each.job for each in found if each.station is station])
                found = [each for each in found if each.station is not station]
        return list(found)

    def _ask_version(self, server: InferenceServer) -> bool:
        """Tell whether a server says its version; refuse one that says another."""
        said = server.version()
        if said is not None and said != self.version:
            raise ServerGone(
                f"{server.url} says that its weights are of version {said!r}, and it was given "
                f"{self.version!r}"
            )
        return said is not None

    def _keep(self, job: SampleJob, reply: ServerReply) -> None:
        group = self.groups[job.ticket]
        self.answers, self.tokens = self.answers + 1, self.tokens + len(reply.ids)
        length, finish = self._end(job.ask, reply.ids)
        group.found[job.sample] = Completion(
            token_ids=reply.ids[:length],
            logp_T=torch.tensor(list(reply.logps[:length]), dtype=torch.float32),
            finish=finish,
            version=self.number,
            weights=self.capabilities.weights,
        )
        if len(group.found) == group.request.samples:
            rows = [group.found[n] for n in range(group.request.samples)]
            self.done.append((job.ticket, rows))
            del self.groups[job.ticket]

    def _end(self, ask: Ask, ids: Ids) -> tuple[int, Finish]:
        """Return where an answer ended, by our own reading of it, and by what."""
        begun = ask.prompt[len(ask.prompt) - ask.begun :]
        watch = watch_of(self.tokenizer, ask.sampling.stop, begun)
        for number, token in enumerate(ids, 1):
            stopped = watch is not None and watch.push(token)
            if token in ask.ends:
                return number, "eos"
            if stopped and number >= ask.least:
                return number, "stop"
        return len(ids), "length"

    def _why_wrong(self, job: SampleJob, reply: ServerReply) -> str:
        """Return what is wrong with an answer of a server; "" where nothing is."""
        ids, most = reply.ids, job.ask.most
        if any(not 0 <= token < self.shape.vocab_size for token in ids):
            return f"writes tokens beyond the vocabulary of {self.shape.vocab_size:,}"
        if not 1 <= len(ids) <= most:
            return f"wrote {len(ids)} tokens where 1 to {most} were asked for"
        if reply.finish not in ("stop", "length"):
            return f"broke an answer off ({reply.finish})"
        if len(ids) < most and self._end(job.ask, ids)[1] == "length":
            return f"wrote {len(ids)} tokens of {most}, and nothing ends an answer there"
        return ""

    # --- weights --------------------------------------------------------------------------------

    @property
    def version(self) -> str:
        """Return what this engine calls its weights: no other engine's have that name."""
        return f"{self.mark}-{self.number}"

    def sync(self, version: int) -> None:
        """Bring the weights to every server, and have each of them probed before it serves."""
        if self.groups:
            raise EngineError(
                f"{len(self.groups)} requests are under way, and weights must not change under "
                "them. Wait for them, or cancel them."
            )
        self.fleet.settle(SETTLE)
        begun, before = time.monotonic(), self.number
        self.number, self.synced = version, False
        self.fleet.version = self.version
        for station in self.fleet.stations:
            station.ready = False
        try:
            self.delivery.begin(self.version)
            self._bring_all()
        except BaseException:
            self.number = before  # nobody samples from what did not arrive
            raise
        self.synced = True
        self.told["time/sync"] = self.told.get("time/sync", 0.0) + time.monotonic() - begun

    def measures(self) -> dict[str, float]:
        """Return what happened since the last call: syncs, the probe, faults."""
        told = {**self.told, **self.delivery.told}
        told["sync/resubmitted"] = float(self.fleet.resubmitted)
        self.told, self.delivery.told, self.fleet.resubmitted = {"sync/restarts": 0.0}, {}, 0
        return told

    def _bring_all(self) -> None:
        """Deliver to every server; go on with those that are there, wait where none is."""
        gave_up = time.monotonic() + self.settings.timeout
        while True:
            for station in self.fleet.stations:
                if not station.ready:
                    self._try(station)
            self._report()
            if self.fleet.any_ready:
                return
            if time.monotonic() > gave_up:
                raise EngineError(self._nobody("new weights wait for a server"))
            time.sleep(AGAIN)

    def _try(self, station: Station) -> None:
        """Deliver to a server; one that can't be reached stays out of service."""
        station.looked = time.monotonic()
        try:
            self._wake(station)
            self.delivery.deliver(station.server)
            if station.lost:
                self.tell("engine", f"{station.server.url} is back, synced and probed")
            self.fleet.back(station)
        except ServerFailed:
            raise
        except ServerGone as error:
            station.reason = str(error)

    def _wake(self, station: Station) -> None:
        """Ask a server what it can do; start one of ours again that does not answer."""
        launched, served = station.launched, bool(station.server.facts.model)
        if launched is not None and launched.ended is not None and not served:
            raise EngineError(
                f"A server of engine.servers ended with status {launched.ended} before it was "
                f"ready. The end of its log:\n{launched.last_words()}"
            )
        try:
            station.server.look(self.settings.carrier)
        except ServerGone:
            if launched is None or not served:
                raise
            station.server = self.kind(launched.start(), self.settings.timeout)
            self.told["sync/restarts"] += 1.0
            raise  # until it is up

    # --- servers --------------------------------------------------------------------------------

    def _distrust(self) -> None:
        """Look at servers that nobody has watched for a while: one may have been restarted."""
        for station in self.fleet.stations:
            if station.ready:
                try:
                    if not self._ask_version(station.server):
                        self.delivery.check_same(station.server)
                except ServerGone as error:
                    self.fleet.out(station, str(error))
        self._report()
        if not self.fleet.any_ready:
            self._bring_all()

    def _report(self) -> None:
        """Tell the run of servers that went out of service."""
        with self.fleet.change:
            said, self.fleet.outages = self.fleet.outages, []
        for reason in said:
            self.tell("engine", f"{reason}; its unfinished answers go out again")

    def _bring_back(self) -> None:
        """Try servers that are out, now and then; stop where none has been there for too long."""
        now = time.monotonic()
        out = [station for station in self.fleet.stations if not station.ready]
        for station in out:
            if now - station.looked >= AGAIN:
                self.delivery.checked.discard(station.server.url)  # it may be another one by now
                try:
                    self._try(station)
                except ServerFailed as error:
                    station.reason = str(error)
        if not self.fleet.any_ready:
            away = min(now - station.since for station in out)
            if away > self.settings.timeout:
                raise EngineError(self._nobody("answers wait for a server"))

    def _nobody(self, what: str) -> str:
        reasons = "; ".join(station.reason for station in self.fleet.stations)
        return (
            f"No server has answered for {self.settings.timeout:g} s (engine.timeout), and {what}: "
            f"{reasons}. Start them again; the same command goes on from the last checkpoint."
        )

    def _stations(self) -> list[Station]:
        settings = self.settings
        if settings.urls:
            return [Station(self.kind(url, settings.timeout)) for url in settings.urls]
        start = self.root / "start"
        rank = self.weights.rank
        self.weights.folder(start, fold=not rank)
        plan = LaunchPlan(
            self.kind.kind,
            settings.command,
            start,
            self.shape.context,
            str(self.dtype).removeprefix("torch."),
            rank,
            settings.quantization,
            settings.carrier,
        )
        found = []
        gpus = torch.cuda.device_count()
        for number in range(settings.servers):
            log = self.root / f"server-{number}.log"
            launched = Launched(plan, number, log, gpus)
            weakref.finalize(self, launched.stop)
            found.append(Station(self.kind(launched.start(), settings.timeout), launched))
        return found

    def _carrier(self) -> Carrier:
        """Choose how weights get there: an adapter alone where every server can swap it."""
        if self.settings.carrier == "ipc":
            return IpcCarrier(self.weights)
        if self.settings.carrier == "nccl":
            return NcclCarrier(self.weights)
        if self._swapping():
            return AdapterCarrier(self.weights, self.root)
        return FolderCarrier(self.weights, self.root)

    def _swapping(self) -> bool:
        if not self.weights.rank:
            return False
        if not self.settings.urls:
            return True
        servers = [station.server for station in self.fleet.stations]
        for server in servers:
            server.look(self.settings.carrier)
        return all(server.swaps_adapters for server in servers)


class VllmEngine(ServerEngine):
    """vLLM over HTTP."""

    kind = VllmServer


class SglangEngine(ServerEngine):
    """SGLang over HTTP."""

    kind = SglangServer
