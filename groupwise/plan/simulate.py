"""A run's time under lag, partial rollouts and more devices: a simulation of what it recorded.

The lengths of a run's answers and the rates at which it sampled and learned are replayed event by
event. What comes out is no measurement, and says so wherever it is shown: networks, caches that run
full, prompts that are prefilled and graders on other machines are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import Any, Literal

import numpy as np

from groupwise.errors import ConfigError
from groupwise.model.cost import decode_steps
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.rollouts import read

LABEL = (
    "simulated: lengths and rates of the run, replayed; no time for networks, no change of lengths "
    "by training on older samples. Not a measurement."
)
RANK_WAIT = "time/rank_wait_"  # of each rank, where there were several
Sync = Literal["drain", "recompute", "keep"]
Batch = Sequence[Sequence[int]]  # lengths of the answers of each prompt of a step


@dataclass(frozen=True)
class DeviceRates:
    """Seconds of one device, as a run had them."""

    tick: float  # of a decoding step, whatever it holds
    token: float  # of each sequence in it
    learn: float  # of each token: scoring and updates
    fixed: float  # of a step besides: grading, and what does not depend on tokens
    sync: float = 0.0  # of new weights to the samplers
    prefill: float = 0.0  # of each token that is read again behind new weights


@dataclass(frozen=True)
class RecordedTimes:
    """The lengths of a run's answers step by step, its places and rates, and its steps' seconds."""

    steps: tuple[tuple[tuple[int, ...], ...], ...]
    slots: int
    rates: DeviceRates
    seconds: float  # a step, on average
    ranks: int = 1  # that the run had

    @property
    def words(self) -> str:
        count = sum(len(group) for batch in self.steps for group in batch)
        tokens = sum(sum(group) for batch in self.steps for group in batch)
        return (
            f"{len(self.steps)} steps, {count:,} answers of {tokens / max(count, 1):.0f} tokens on "
            f"average, {self.slots} at a time; {self.seconds:.3g} s a step as recorded"
            + (f", by {self.ranks} ranks, which count as one device" if self.ranks > 1 else "")
        )

    def as_dict(self) -> dict[str, Any]:
        return {"steps": len(self.steps), "slots": self.slots, "rates": asdict(self.rates),
                "seconds": self.seconds, "ranks": self.ranks}  # fmt: skip


@dataclass(frozen=True)
class SimulatedWay:
    """A way to run the same steps, which is simulated."""

    name: str
    lag: int = 0
    sync: Sync = "drain"
    sampling: int = 1  # devices that sample
    learning: int = 1  # devices that learn
    apart: bool = False  # other devices than those that sample


@dataclass(frozen=True)
class SimulatedTime:
    """The time that a way would have taken, and what it was spent on."""

    name: str
    step: float  # seconds, on average
    sampler_idle: float  # share of the time
    learner_idle: float
    lag_mean: float  # versions between the weights that began an answer and those that learn it
    lag_most: int

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "simulated": True}


# --- what a run recorded ------------------------------------------------------------------------


def recorded(folder: Path) -> RecordedTimes:
    """Read lengths and times of a run; the rates are those that explain its times best."""
    run = RunFolder(folder)
    if not run.metrics.is_file():
        raise ConfigError(
            f"{folder} is no run folder: it has no metrics.jsonl. Name a run that was trained."
        )
    metrics = {line["step"]: line for line in run.read_metrics() if "time/rollout" in line}
    steps = {step: _lengths(run.rollout(step)) for step in metrics}
    steps = {step: batch for step, batch in steps.items() if batch}
    if len(steps) < 3:
        raise ConfigError(
            f"{folder} has {len(steps)} steps with rollouts and times: at least 3 are needed to "
            "tell rates from chance. Train it a little longer."
        )
    slots = _slots(folder, max(sum(len(g) for g in batch) for batch in steps.values()))
    used = list(steps)[1:]  # the first step warms up
    rates = rates_of([steps[step] for step in used], [metrics[step] for step in used], slots)
    seconds = float(np.mean([_work(metrics[step]) for step in used]))
    ranks = max(sum(name.startswith(RANK_WAIT) for name in metrics[step]) for step in used)
    chosen = tuple(steps[step] for step in used)
    return RecordedTimes(chosen, slots, rates, seconds, max(ranks, 1))


def rates_of(steps: Sequence[Batch], metrics: Sequence[dict[str, Any]], slots: int) -> DeviceRates:
    """Return rates, none below 0, by least squares over the steps."""
    ticks, tokens, rollout = [], [], []
    for batch, line in zip(steps, metrics, strict=True):
        flat = [n for group in batch for n in group]
        ticks.append(float(decode_steps(flat, slots)))
        tokens.append(float(sum(flat)))
        rollout.append(float(line["time/rollout"]))
    tick, token = _both(np.array(ticks), np.array(tokens), np.array(rollout))
    learn = [line.get("time/score", 0.0) + line.get("time/update", 0.0) for line in metrics]
    rest = [_work(line) - s - line["time/rollout"] for line, s in zip(metrics, learn, strict=True)]
    rate = float(np.sum(learn) / max(np.sum(tokens), 1.0))
    return DeviceRates(tick, token, rate, float(max(np.mean(rest), 0.0)), prefill=rate / 3)


def _both(x: Any, y: Any, z: Any) -> tuple[float, float]:
    """Return a and b of z = ax + by, neither below 0."""
    (a, b), *_ = np.linalg.lstsq(np.stack([x, y], 1), z, rcond=None)
    if a >= 0 and b >= 0:
        return float(a), float(b)
    alone = [(float(z @ u / (u @ u)), float(((z - u * (z @ u) / (u @ u)) ** 2).sum()))
             for u in (x, y)]  # fmt: skip
    return (alone[0][0], 0.0) if alone[0][1] <= alone[1][1] else (0.0, alone[1][0])


def _work(line: dict[str, Any]) -> float:
    """Return the seconds of a step but for evaluation."""
    return float(line["time/step"]) - float(line.get("time/eval", 0.0))


def _lengths(file: Path) -> tuple[tuple[int, ...], ...]:
    if not file.is_file():
        return ()
    groups: dict[Any, list[int]] = {}
    for row in read(file, ("prompt_id", "draw", "token_ids")).to_pylist():
        groups.setdefault((row["prompt_id"], row["draw"]), []).append(len(row["token_ids"]))
    return tuple(tuple(lengths) for lengths in groups.values())


def _slots(folder: Path, most: int) -> int:
    from groupwise.config import load

    return min(load(folder / "config.toml").engine.slots or most, most)


# --- the simulation -----------------------------------------------------------------------------


def what_if(found: RecordedTimes, *, lag: int, sampling: int, learning: int) -> list[SimulatedTime]:
    """Return what the run's own way comes to, and what lag and other devices would make of it."""
    both = sampling + learning
    settings = [
        SimulatedWay("one device, in turns, as recorded"),
        SimulatedWay(f"{both} devices, all in turns", sampling=both, learning=both),
        *(
            SimulatedWay(f"{sampling} sampling, {learning} learning, lag {k}, {sync}",
                    k, sync, sampling, learning, apart=True)
            for k in dict.fromkeys((0, lag))
            for sync in (("drain", "recompute", "keep") if k else ("drain",))
        ),
    ]  # fmt: skip
    return [simulate(found.steps, found.slots, found.rates, each) for each in settings]


@dataclass
class _Answer:
    prompt: int
    left: float  # tokens
    length: int
    version: int = 0  # of the weights that began it


class _Sampler:
    """A device that samples: answers in flight share its decoding steps."""

    def __init__(self, slots: int, rates: DeviceRates) -> None:
        self.slots, self.rates = slots, rates
        self.flight: list[tuple[float, int, _Answer]] = []  # by the tick at which it ends
        self.ticks, self.busy, self._count = 0.0, 0.0, 0
        self.stalled = 0.0  # seconds of reading again that are still to be done

    @property
    def tick(self) -> float:
        return self.rates.tick + self.rates.token * len(self.flight)

    def take(self, answer: _Answer) -> None:
        self._count += 1
        heappush(self.flight, (self.ticks + answer.left, self._count, answer))

    def until_next(self) -> float:
        """Return the seconds until an answer ends."""
        if not self.flight:
            return inf
        return self.stalled + (self.flight[0][0] - self.ticks) * self.tick

    def run(self, seconds: float) -> list[_Answer]:
        """Go on for so long, at most until an answer ends; return those that do."""
        if not self.flight:
            return []
        self.busy += seconds
        again = min(self.stalled, seconds)
        self.stalled -= again
        self.ticks += (seconds - again) / self.tick if self.tick else inf
        done = []
        while self.flight and self.flight[0][0] <= self.ticks + 1e-9:
            done.append(heappop(self.flight)[2])
        return done

    def read_again(self) -> None:
        """Read what is written of every answer in flight once more, under new weights."""
        written = sum(answer.length - (end - self.ticks) for end, _, answer in self.flight)
        self.stalled += self.rates.prefill * written


def simulate(
    steps: Sequence[Batch], slots: int, rates: DeviceRates, setting: SimulatedWay
) -> SimulatedTime:
    """Replay the steps: prompts go out oldest first, at most (lag + 1) steps of them unlearned.

    A step is learned when all its prompts are answered, and those of earlier steps are learned. A
    slot is freed behind the update and its sync. With sync by `drain` running answers are waited
    for before new weights come in, and none is begun meanwhile.
    """
    return _Simulation(steps, slots, rates, setting).result()


class _Simulation:
    def __init__(
        self, steps: Sequence[Batch], slots: int, rates: DeviceRates, setting: SimulatedWay
    ) -> None:
        self.steps, self.rates, self.setting = steps, rates, setting
        self.samplers = [_Sampler(slots, rates) for _ in range(setting.sampling)]
        # Every prompt with its step; oldest first.
        self.queue = [(number, length) for number, batch in enumerate(steps)
                      for group in batch for length in group]  # fmt: skip
        self.queue.reverse()
        self.left = [sum(len(group) for group in batch) for batch in steps]
        self.now, self.version, self.learning = 0.0, 0, inf  # inf: nobody learns
        self.syncing = False  # learned, and waiting for answers that run
        self.learned_for, self.lags = 0.0, list[int]()
        self.versions: dict[int, list[int]] = {}

    def result(self) -> SimulatedTime:
        while self.version < len(self.steps):
            self._admit()
            self._begin_to_learn()
            self._advance()
        devices = len(self.samplers)
        total, name = self.now, self.setting.name
        busy = sum(each.busy for each in self.samplers) / devices
        return SimulatedTime(
            name,
            total / len(self.steps),
            max(1 - busy / total, 0.0),
            max(1 - self.learned_for / total, 0.0),
            float(np.mean(self.lags)) if self.lags else 0.0,
            max(self.lags, default=0),
        )

    def _admit(self) -> None:
        if self.syncing or (not self.setting.apart and self.learning < inf):
            return
        while self.queue and self.queue[-1][0] <= self.version + self.setting.lag:
            free = min(self.samplers, key=lambda each: len(each.flight))
            if len(free.flight) >= free.slots:
                return
            number, length = self.queue.pop()
            free.take(_Answer(number, float(length), length, self.version))

    def _begin_to_learn(self) -> None:
        if self.learning < inf or self.syncing or self.left[self.version]:
            return
        if not self.setting.apart and any(each.flight for each in self.samplers):
            return  # they are the same devices
        tokens = sum(sum(group) for group in self.steps[self.version])
        took = self.rates.fixed + self.rates.learn * tokens / self.setting.learning
        self.learning = self.now + took
        self.learned_for += took

    def _advance(self) -> None:
        """Go on to whatever comes next: an answer ends, an update ends, weights are synced."""
        if self.syncing and not any(each.flight for each in self.samplers):
            self._sync()
            return
        # While it learns, a device that samples too does not.
        paused = not self.setting.apart and self.learning < inf
        ends = inf if paused else min(each.until_next() for each in self.samplers)
        seconds = min(ends, self.learning - self.now)
        assert seconds < inf, "nothing is under way"
        self.now += seconds
        for each in () if paused else self.samplers:
            for answer in each.run(seconds):
                self.left[answer.prompt] -= 1
                self.versions.setdefault(answer.prompt, []).append(answer.version)
        if self.learning <= self.now:
            self.learning = inf
            self.lags += [self.version - v for v in self.versions.pop(self.version, [])]
            if self.setting.sync == "drain" and any(each.flight for each in self.samplers):
                self.syncing = True
            else:
                self._sync()

    def _sync(self) -> None:
        self.syncing = False
        self.now += self.rates.sync
        self.version += 1
        for each in self.samplers if self.setting.sync == "recompute" else ():
            each.read_again()
