"""New weights for a server, and all that is asked of it before it may use them."""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.engine.protocol import Sampling
from groupwise.engine.servers.carriers import Carrier
from groupwise.engine.servers.link import PendingCall, ServerFailed, ServerGone, ServerRefused
from groupwise.engine.servers.probing import Scores, check_probe, smallest_of
from groupwise.engine.servers.server import Ask, InferenceServer
from groupwise.engine.servers.weights import PolicyWeights
from groupwise.errors import EngineError

HOT = 2.0  # the temperature at which raw and processed log-probabilities are told apart
APART = 0.05  # nats that the two must differ by, to be told apart


class Delivery:
    """Brings one version after the other to servers, and probes each of them."""

    def __init__(
        self,
        weights: PolicyWeights,
        carrier: Carrier,
        vocabulary: int,
        dtype: torch.dtype,
        *,
        quantised: bool,
    ) -> None:
        self.weights, self.carrier, self.vocabulary = weights, carrier, vocabulary
        self.dtype, self.quantised = dtype, quantised
        self.version = ""
        self.first: Scores | None = None  # when both sides had the same files
        self.last: dict[str, Scores] = {}  # of each server, of the version before
        self.checked: set[str] = set()  # servers that compute with the run's vocabulary
        self.told: dict[str, float] = {}  # of the probe, since somebody took it
        self._learner: list[Tensor] | None = None  # of the probe, at the version of now

    def begin(self, version: str) -> None:
        """Take the policy as it is now."""
        self.version, self._learner = version, None
        self.carrier.begin(version)

    def deliver(self, server: InferenceServer) -> None:
        """Bring weights to a server and probe it: only then it serves."""
        new = server.url not in self.checked
        if new:
            self._check_vocabulary(server)
        server.pause()
        self.carrier.carry(server, self.version)
        server.resume()
        server.clear()
        said = server.version()
        if said is not None and said != self.version:
            raise ServerFailed(
                f"{server.url} took the weights of version {self.version!r} and says that it has "
                f"{said!r}"
            )
        if new:
            self._check_temperature(server)
            self.checked.add(server.url)
        self._probe(server)

    def _probe(self, server: InferenceServer) -> None:
        sequences = self.weights.probe()
        if self._learner is None:
            self._learner = [x.double() for x in self.weights.scored(sequences)]
        engine = [server.score(ids, self.version) for ids in sequences]
        found = Scores(torch.cat(engine), torch.cat(self._learner))
        check_probe(
            server.url,
            found,
            first=self.first,
            before=self.last.get(server.url),
            dtype=self.dtype,
            quantised=self.quantised,
        )
        self.first = self.first or found
        self.last[server.url] = found
        for name, value in (("sync/probe_mean", found.mean), ("sync/probe_max", found.max)):
            self.told[name] = max(self.told.get(name, 0.0), value)

    def _check_vocabulary(self, server: InferenceServer) -> None:
        """Refuse a server whose vocabulary ends before the run's, before it gets weights."""
        try:
            server.score((0, self.vocabulary - 1), self.version)
        except ServerRefused as error:
            raise EngineError(
                f"{error}. The run's model has {self.vocabulary:,} tokens: the server serves "
                "another one. Start it with the run's model."
            ) from None

    def _check_temperature(self, server: InferenceServer) -> None:
        """Refuse log-probabilities of before the temperature."""
        prompt = self.weights.probe()[0][:8]
        sampling = Sampling(max_tokens=1, temperature=HOT)
        for seed in range(4):
            ask = Ask(prompt, 1, 0, sampling, seed, self.version, ())
            reply = server.generate(ask, PendingCall())
            if reply.ids and reply.logps:
                row = (*prompt, reply.ids[0])
                hot, raw = (float(self.weights.scored([row], t)[0][-1]) for t in (HOT, 1.0))
                said = reply.logps[0]
                if abs(said - raw) < abs(said - hot) and abs(hot - raw) > 0.05:
                    raise EngineError(
                        f"{server.url} reports log-probabilities of before the temperature: "
                        f"{said:.3f} where the distribution that it drew from gives {hot:.3f}. "
                        f"Start it with {server.flags}."
                    )

    def check_same(self, server: InferenceServer) -> None:
        """Refuse a server that scores a part of the probe otherwise than behind its last sync."""
        sequences = self.weights.probe()[:1]
        found = server.score(sequences[0], self.version)
        was = self.last[server.url].engine_T[: len(found)]
        first = 0.0 if self.first is None else self.first.mean
        if float((found - was).abs().mean()) > max(smallest_of(self.dtype), first):
            raise ServerGone(f"{server.url} scores the probe otherwise than behind the last sync")
