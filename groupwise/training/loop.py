"""The cycle: prompts, rollouts, rewards, advantages, loss, update, new weights. Top to bottom."""

from __future__ import annotations

import threading
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from groupwise.common.progress import phase
from groupwise.config import Budget, Config
from groupwise.errors import RunError
from groupwise.evaluate.evaluate import Evaluation, evaluate
from groupwise.model.cost import model_flops
from groupwise.model.memory import peak_bytes
from groupwise.optim.schedules import learning_rate
from groupwise.prepare.engines import MakeEngine, judge_of
from groupwise.prepare.placing import place_line
from groupwise.prepare.setup import sampling_of
from groupwise.training.collect import Collected, collect, tokens_of
from groupwise.training.guards import (
    check_agreement,
    check_delivery,
    check_rewards,
    check_updates,
    explained_gap,
)
from groupwise.training.opening import complete, nothing_left, open_run, placed_for
from groupwise.training.rows import rows_of
from groupwise.training.run import Run
from groupwise.training.signals import Signals
from groupwise.training.update import Taught, teach
from groupwise.watch.clock import Clock, now
from groupwise.watch.costs import costs
from groupwise.watch.display import Display
from groupwise.watch.report import write_report, write_summary
from groupwise.watch.samples import sample_measures, wasted
from groupwise.watch.speed import step_speed, step_work


class Stopped(Exception):
    """The run was asked to stop. It is saved; the same command goes on with it."""


Metrics = dict[str, Any]


def train(
    config: Config,
    path: str | Path,
    display: Display | None = None,
    *,
    engine: MakeEngine | None = None,
) -> dict[str, Any]:
    """Train into a run folder, or go on where it stands. Returns the summary.

    `engine` makes a sampler of your own for the policy, in place of the one that engine.backend
    names.
    """
    signals = Signals()
    with signals.held():
        cycle = _cycle(config, path, display or Display(), engine, signals)
        while True:
            try:
                next(cycle)
            except StopIteration as end:
                return end.value


def steps(
    config: Config,
    path: str | Path,
    display: Display | None = None,
    *,
    engine: MakeEngine | None = None,
) -> Generator[Metrics, None, dict[str, Any]]:
    """As `train`, one step at a time: yields the metrics of each, and returns the summary.

    The first are those of step 0, before any update, unless the run goes on. Whoever does not ask
    for the next step leaves a run that is saved and can go on. While a step is computed, a request
    to stop ends it: it is saved, and `Stopped` raised.
    """
    return _cycle(config, path, display or Display(), engine, Signals())


def _cycle(
    config: Config,
    path: str | Path,
    display: Display,
    engine: MakeEngine | None,
    signals: Signals,
) -> Generator[Metrics, None, dict[str, Any]]:
    asked, config = config, placed_for(config, path)
    done = nothing_left(config, path)
    if done is not None:
        summary, in_vain = done
        display.note(f"{path} is finished after {summary['steps']} steps; steps=N goes further.")
        for change in in_vain:
            display.warn(f"not taken, as no step is left to do: {change}")
        for text in complete(path):
            display.note(text)
        return summary
    display.note(place_line(config.model, asked.model))
    display.announce_stop(signals.asked)
    with open_run(config, path, display, engine) as run:
        if signals.asked.is_set():
            raise Stopped(f"stopped before step {run.step + 1}; the same command begins with it")
        with signals.held(), display.watching():
            first = begin(run)
        try:
            if first is not None:
                yield first
            while not run.over and not signals.asked.is_set():
                with signals.held(), display.watching():
                    run.saver.check()
                    metrics = one_step(run, signals.asked)
                    if metrics is not None and run.checkpoint_due():
                        run.save()
                if metrics is not None:
                    yield metrics
        except GeneratorExit:  # nobody asks for the next step
            save_and_wait(run)
            raise
        with display.watching():
            save_and_wait(run)
            if not run.over:
                raise Stopped(f"stopped after step {run.step}, saved; the same command goes on")
            return finish(run)


def save_and_wait(run: Run) -> None:
    """Leave the run so that it can go on from this very step."""
    if run.saved_step != run.step:
        run.save()
    run.saver.wait()


def begin(run: Run) -> Metrics | None:
    """Check that sampler and learner agree; of a new run, how good the starting policy is."""
    with phase("comparing sampler and learner"):
        check_delivery(run)
        gate = check_agreement(run)
    if run.step != 0 or run.before is not None:
        return None
    run.before = held_out(run)
    run.judge(0, run.before.metrics())
    run.recorder.step(0, [], {**gate, **run.before.metrics()}, by_task=run.before.by_task)
    run.display.step({"step": 0, **run.before.metrics()})
    return {"step": 0, **gate, **run.before.metrics()}


def one_step(run: Run, stop: threading.Event) -> Metrics | None:
    """One turn of the cycle. None if it was asked to stop before anything was learned."""
    clock, before, progress = Clock(), run.cursor.state(), run.progress
    run.at, unrewarded = run.step + 1, run.unrewarded

    # Prompts, rollouts, rewards; groups that teach nothing are drawn again.
    collected = collect(run, clock)
    failing = check_rewards(run, collected.groups + collected.unused)
    if failing is not None or stop.is_set():
        run.cursor.restore(before)  # as if the step had not begun
        run.unrewarded = unrewarded
        if failing is None:
            return None
        give_up(run, collected)
        raise failing

    # Advantages, loss, update.
    rate = learning_rate(
        run.step,
        base=run.config.optim.learning_rate,
        schedule=run.config.optim.schedule,
        warmup_steps=run.config.optim.warmup_steps,
        total_steps=run.total_steps,
    )
    version = run.version  # that rollouts should be of
    run.saver.hold_changes()
    taught = teach(run, collected, rate, clock)

    # New weights to the sampler, and what the next step builds on.
    run.step += 1
    run.version += sum(not outcome.skipped for outcome in taught.outcomes)
    run.memory, run.tokens = taught.memory, run.tokens + collected.tokens
    run.engine.sync(run.version)
    delivered = check_delivery(run)
    if run.reference is not None:
        run.reference.after_step(run.loaded.model, run.step)
    enough = check_updates(run, taught.outcomes, taught.batch)

    # What it was like, how good the policy is now, what it cost; all of it written down.
    metrics: Metrics = {
        **what_it_was_like(run, collected, taught, version),
        "optim/learning_rate": rate,
        "weights/fingerprint": delivered,
    }
    improved, evaluation = False, None
    run.trained += now() - clock.start
    if run.evaluation_due(progress):
        with clock("eval"):
            evaluation = held_out(run)
        metrics |= evaluation.metrics()
        improved = run.note_evaluation(evaluation)
    metrics |= clock.metrics(collected.tokens)
    metrics |= what_it_cost(run, collected, taught, clock, metrics["time/step"])
    sick = write_down(run, collected, taught, metrics, evaluation, improved)
    enough = enough or sick
    if enough is not None:
        raise enough
    return {"step": run.step, **metrics}


def give_up(run: Run, collected: Collected) -> None:
    """A step whose rewards can't be used: what is said of it, and the run as it was before."""
    found, events = run.judge(run.at, collected.metrics())
    run.folder.add_events(events)
    run.act_on(found)
    save_and_wait(run)


def what_it_was_like(run: Run, collected: Collected, taught: Taught, version: int) -> Metrics:
    """Samples, rewards, loss; `version` is that of the weights before the updates."""
    drawn, dropped = collected.groups + collected.dropped, tokens_of(collected.dropped)
    return {
        **collected.metrics(),
        **sample_measures(drawn, version),
        **wasted(taught.batch, dropped, tokens_of(drawn)),
        **taught.metrics,
        "mismatch/limit": explained_gap(run),
        "weights/version": run.version,
        "data/epoch": run.cursor.epoch,
        "cost/tokens": run.tokens,
    }


def what_it_cost(
    run: Run, collected: Collected, taught: Taught, clock: Clock, seconds: float
) -> Metrics:
    """The step's work against its time, and the run's so far against what it gained."""
    work = step_work(run, collected, taught)
    run.flops += sum(model_flops(parts) for parts in work.values())
    return {
        **step_speed(run, work, clock, seconds),
        **costs(
            flops=run.flops,
            seconds=run.elapsed,
            price=run.config.watch.price,
            before=None if run.before is None else run.before.accuracy,
            after=None if run.last is None else run.last.accuracy,
        ),
        "memory/peak_bytes": peak_bytes(run.learner.device),
        "time/checkpoint": run.saver.take_stalled(),
        "time/run": run.elapsed,
    }


def write_down(
    run: Run,
    collected: Collected,
    taught: Taught,
    metrics: Metrics,
    evaluation: Evaluation | None,
    improved: bool,
) -> RunError | None:
    """Files first, then people; what the health rules ask for, and whether to stop."""
    rows = rows_of(collected.groups, collected.unused, taught.streams, run.loaded.tokenizer)
    found, events = run.judge(run.step, metrics)
    by_task = {} if evaluation is None else evaluation.by_task
    run.recorder.step(run.step, rows, metrics, events, by_task)
    run.display.expect(run.step if run.over else run.total_steps)
    run.display.step(metrics)
    run.mirrors.look()
    sick = run.act_on(found)
    if sick is not None:
        save_and_wait(run)
    elif improved and not (run.over or run.checkpoint_due()):
        run.save_best()  # a whole checkpoint that is due says that it is the best itself
    return sick


def held_out(run: Run) -> Evaluation:
    """Accuracy on tasks that training never sees, by the run's own engine.

    Of the policy: where engine.weights asks for a copy that differs on purpose, not of that.
    """
    asked, on_purpose = run.config.eval, run.config.engine.weights != "shared"
    with phase("evaluating", len(run.held_out), "tasks"):
        return evaluate(
            judge_of(run.config, run.loaded) if on_purpose else run.engine,
            run.loaded.tokenizer,
            run.grader,
            run.held_out,
            sampling_of(run.config, temperature=asked.temperature),
            asked.samples,
        )


def finish(run: Run) -> dict[str, Any]:
    """The cost, the summary and the report.

    The summary is what says that the run is finished, and a missing report that the end was cut
    short behind it: an older one, of fewer steps, goes first.
    """
    run.recorder.flush()
    seconds = run.elapsed
    run.folder.write_cost(seconds=seconds, tokens=run.tokens)
    with run.folder.writing("report.html"):
        run.folder.report.unlink(missing_ok=True)
    summary = write_summary(
        run.folder,
        steps=run.step,
        seconds=seconds,
        before={} if run.before is None else run.before.as_dict(),
        after={} if run.last is None else run.last.as_dict(),
        budget=asdict(run.config.budget) if run.config.budget != Budget() else None,
    )
    with phase("writing the report"), run.folder.writing("report.html"):
        write_report(run.folder.path)
    run.display.finish(summary, run.folder.path)
    return summary
