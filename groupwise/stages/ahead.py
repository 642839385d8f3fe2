"""Prompts that are admitted before the learner wants them: sampled and graded ahead of it.

With train.lag = K there are slots for the prompts of K + 1 steps. The oldest are learned from
first, and none is ever given up for its age: a slot is free again when its answers were learned
from and the sampler has the weights that came of it. So no answer is begun more than K steps before
it is learned from.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from groupwise.common.progress import phase
from groupwise.config import Config
from groupwise.data.cursor import Draw, TaskCursor
from groupwise.engine.answers import check_answer, check_tickets
from groupwise.engine.protocol import Request, Sampling, Ticket
from groupwise.optim.assemble import Group
from groupwise.prepare.rollouts import SampledGroup, grade
from groupwise.prepare.setup import sampling_of
from groupwise.records import Completion
from groupwise.stages import waiting_answers
from groupwise.watch.clock import Clock

if TYPE_CHECKING:
    from groupwise.stages.parts import Parts

LEARNER_IDLE = "learner_idle"  # the phase in which the learner waits for a sampler beside it


@dataclass
class Admitted:
    """A prompt in its slot, and how far it is: asked for, written, graded."""

    draw: Draw
    asked: bool = False
    written: list[Completion] | None = None
    graded: Future[list[Group]] | None = None


class Ahead:
    """The prompts that are admitted, the oldest first."""

    def __init__(self, config: Config, parts: Parts[Any], cursor: TaskCursor) -> None:
        self.config, self.parts, self.cursor = config, parts, cursor
        self.engine = parts.engine
        self.beside = self.engine.capabilities.beside
        self.drains = config.train.sync == "drain"
        self.queue: list[Admitted] = []
        self.taken = 0  # of the queue, by the step under way
        self.under_way: dict[Ticket, tuple[Admitted, Request]] = {}
        self.step, self.version = 0, 0  # steps that are finished, and weights that the sampler has
        self.steps_of = {0: 0}  # weights -> the last step that began with them
        self.found: dict[str, float] = {}  # what the answers of the step were like
        self.idle = 0.0  # seconds that the sampler had nothing to do, up to the step before
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="grading")
        self.changed = threading.Condition()  # of all of this
        self.error: BaseException | None = None  # of the thread that collects
        self.closed = False
        self.collector: threading.Thread | None = None
        if self.beside:
            self.collector = threading.Thread(target=self._collect, name="collecting", daemon=True)
            self.collector.start()

    # --- in a step ---

    def take(self, prompts: int, clock: Clock) -> list[Group]:
        """Return the oldest prompts, answered and graded, as soon as they are.

        Refills of a step are the next in the queue; where it ends, more are admitted at once.
        """
        self.admit()
        self._ask(self.cursor.take(max(self.taken + prompts - len(self.queue), 0)))
        chosen = self.queue[self.taken : self.taken + prompts]
        with clock(LEARNER_IDLE if self.beside else "rollout"):
            self._wait_for(chosen)
        with clock(LEARNER_IDLE if self.beside else "grade"):
            groups = self._graded(chosen)
        self.taken += prompts
        return groups

    def admit(self) -> None:
        """Fill the slots that are free, with prompts whose answers begin now."""
        slots = (self.config.train.lag + 1) * self.config.prompts_per_step
        self._ask(self.cursor.take(max(slots - len(self.queue), 0)))

    def give_back(self) -> None:
        """Leave a step as if it had not begun: what it took is the oldest again."""
        self.taken = 0

    def before_update(self, clock: Clock) -> None:
        """Finish what the learner's own weights are writing, where new ones may not come in."""
        if self.drains and not self.beside:
            with clock("rollout"):
                self._wait_for(self.queue)

    def before_sync(self, clock: Clock) -> None:
        """Wait for the answers that new weights may not come into."""
        if self.drains:
            with clock(LEARNER_IDLE if self.beside else "grade"):
                self.rest()
        self.found = self._ages()

    def after_sync(self, version: int) -> None:
        """Free the slots of what was learned from: the sampler has the weights that came of it."""
        with self.changed:
            del self.queue[: self.taken]
        self.taken, self.step, self.version = 0, self.step + 1, version
        first = self.step - self.config.train.lag - 1  # no answer is older
        self.steps_of = {v: step for v, step in self.steps_of.items() if step >= first}
        self.steps_of[version] = self.step

    def rest(self) -> None:
        """Wait until all that is asked for is written and graded: the engine has nothing to do."""
        asked = [each for each in self.queue if each.asked]
        self._wait_for(asked)
        if self.parts.grader.by_group:
            self._graded(asked)

    def close(self) -> None:
        """Let go of what is under way."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.thread.shutdown(wait=False, cancel_futures=True)
        self.engine.close()  # which wakes up whoever collects
        if self.collector is not None:
            self.collector.join(10)

    def measures(self) -> dict[str, float]:
        """Return how old the answers of the last step were, and what its sampler was idle."""
        if not self.beside:
            return self.found
        before, self.idle = self.idle, self.engine.idle_seconds
        return self.found | {"time/sampler_idle": self.idle - before}

    def _ages(self) -> dict[str, float]:
        """Measure the answers that a step has learned from, before their slots are free."""
        with self.changed:
            written = [each.written or [] for each in self.queue]
        used = [x.versions for group in written[: self.taken] for x in group]
        runs = [run for each in used for run in each]
        # A copy that says another version than it was given, as a fake engine may: the oldest.
        oldest = min(self.steps_of.values())
        lag_of = {run.version: self.step - self.steps_of.get(run.version, oldest) for run in runs}
        tokens = sum(run.tokens for run in runs)
        found = {
            "lag/mean": sum(lag_of[run.version] * run.tokens for run in runs) / tokens,
            "lag/max": float(max(lag_of.values())),
            "lag/versions": len(runs) / len(used),
            "lag/mixed_share": sum(len(each) > 1 for each in used) / len(used),
            "lag/impure_share": sum(run.tokens for run in runs if not run.pure) / tokens,
        }
        lengths = [x.own_length for group in written[self.taken :] for x in group]
        return found | ({"lag/waiting_length": sum(lengths) / len(lengths)} if lengths else {})

    # --- what a checkpoint holds ---

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the prompts that are admitted and not learned from, as JSON and tensors.

        Answers that are finished go with them. Where new weights wait for answers, those of the
        present weights come out the same again, and only older ones do.
        """
        with self.changed:
            queue = list(self.queue)
        kept = [self._worth_keeping(each) for each in queue]
        answers, tensors = waiting_answers.packed(kept)
        keys = [[*each.draw] for each in queue]
        steps_of = [[version, step] for version, step in self.steps_of.items()]
        said = {"step": self.step, "version": self.version, "steps_of": steps_of, "keys": keys}
        return said | {"answers": answers}, tensors

    def _worth_keeping(self, each: Admitted) -> waiting_answers.Waiting | None:
        written, graded = each.written, each.graded
        if written is None:
            return None
        if self.drains and all(x.version == self.version for x in written):
            return None
        grades = None
        if graded is not None and graded.done():
            grades = [rollout.grade for rollout in graded.result()[0]]
        return waiting_answers.Waiting(written, grades)

    def restore(self, said: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state` returned; what was not finished is asked for anew."""
        if said is None:
            return
        self.step, self.version = said["step"], said["version"]
        self.steps_of = dict(said["steps_of"])
        kept = waiting_answers.unpacked(said["answers"], tensors)
        for key, waiting in zip(said["keys"], kept, strict=True):
            each = Admitted(Draw(*key))
            if waiting is not None:
                each.asked, each.written = True, waiting.written
                task = self.parts.tasks[each.draw.task]
                self.parts.known |= waiting.verdicts(task, each.draw.number, self._text_of)
            self.queue.append(each)
        with self.changed:
            self._grade_on()

    def _text_of(self, completion: Completion) -> str:
        return self.parts.loaded.tokenizer.decode_all([completion.token_ids])[0]

    # --- asking and waiting ---

    def _sampling(self) -> Sampling:
        learner = self.parts.learner
        return sampling_of(
            self.config,
            record_top_k=learner.sampler_top_k,
            record_routes=self.config.engine.record_routes or learner.replays_sampler,
        )

    def _ask(self, draws: Sequence[Draw]) -> None:
        """Admit these, and ask the engine for all that it was not asked for yet."""
        with self.changed:
            self.queue += [Admitted(draw) for draw in draws]
            fresh = [each for each in self.queue if not each.asked]
            if not fresh:
                return
            requests = [self._request(each.draw) for each in fresh]
            tickets = self.engine.submit(requests, self._sampling())
            for ticket, each, request in zip(tickets, fresh, requests, strict=True):
                each.asked = True
                self.under_way[ticket] = (each, request)
            self.changed.notify_all()

    def _request(self, draw: Draw) -> Request:
        task, samples = self.parts.tasks[draw.task], self.config.group_size
        return Request(task.token_ids, samples, prompt_id=task.id, draw=draw.number)

    def _wait_for(self, wanted: Sequence[Admitted]) -> None:
        """Return when these are written: by sampling, or by waiting for whoever samples beside."""
        with phase("sampling", len(wanted), "groups") as told:
            while True:
                with self.changed:
                    if self.error is not None:
                        raise self.error
                    done = sum(each.written is not None for each in wanted)
                    told(done)
                    if done == len(wanted):
                        break
                    if self.beside:
                        self.changed.wait()
                        continue
                self._arrived(self.engine.finished())

    def _arrived(self, found: Sequence[tuple[Ticket, list[Completion]]]) -> None:
        with self.changed:
            check_tickets(self.engine, self.under_way, [ticket for ticket, _ in found])
            for ticket, group in found:
                each, request = self.under_way.pop(ticket)
                check_answer(self.engine, request, self._sampling(), group)
                each.written = group
            self._grade_on()
            self.changed.notify_all()

    def _grade_on(self) -> None:
        """Grade what is written, strictly in the order of prompts: functions may keep count."""
        if not self.parts.grader.by_group:
            return
        for each in self.queue:
            if each.written is None:
                return
            if each.graded is None:
                each.graded = self.thread.submit(self._grade, [each])

    def _grade(self, chosen: Sequence[Admitted]) -> list[Group]:
        tasks = self.parts.tasks
        written = [
            SampledGroup(tasks[each.draw.task], each.draw.number, each.written or [])
            for each in chosen
        ]
        return grade(self.parts.grader, self.parts.loaded.tokenizer, written, self.parts.known)

    def _graded(self, chosen: Sequence[Admitted]) -> list[Group]:
        """Return their rollouts; all at once for a function that wants the batch."""
        if not self.parts.grader.by_group:
            return self._grade(chosen)
        with phase("grading", len(chosen), "groups") as told:
            groups = []
            for each in chosen:
                assert each.graded is not None
                groups += each.graded.result()
                told(len(groups))
        return groups

    def _collect(self) -> None:
        """Take from an engine that samples beside the learner what it has written, as it comes."""
        try:
            while True:
                with self.changed:
                    while not self.under_way and not self.closed:
                        self.changed.wait()
                    if self.closed:
                        return
                self._arrived(self.engine.finished())
        except BaseException as error:  # for whoever waits: this thread has nobody to tell
            with self.changed:
                self.error = error
                self.changed.notify_all()
