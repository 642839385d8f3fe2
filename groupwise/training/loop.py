"""The cycle: prompts, rollouts, rewards, advantages, loss, update, new weights. Top to bottom."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from importlib.util import cache_from_source
from pathlib import Path
from shlex import quote
from typing import Any

from groupwise.common.progress import phase
from groupwise.common.taken_along import place_of
from groupwise.config import Budget, Config
from groupwise.data.curriculum import measures as curriculum_measures
from groupwise.data.steps import SEPARATOR
from groupwise.errors import RunError
from groupwise.evaluate.evaluate import Evaluation
from groupwise.methods.method import Method
from groupwise.model.cost import Group, model_flops, rollout_cost
from groupwise.model.cost import Parts as Costs
from groupwise.model.memory import peak_bytes
from groupwise.optim.roles import rates_at
from groupwise.parallel.world import World
from groupwise.prepare.engines import MakeEngine
from groupwise.prepare.placing import place_line
from groupwise.runfiles.folder import RunFolder
from groupwise.stages.coefficients import after, applied, begun
from groupwise.stages.coefficients import measures as coefficient_measures
from groupwise.stages.collected import Collected, tokens_of
from groupwise.stages.parts import Parts
from groupwise.stages.rows import rows_of
from groupwise.stages.stage import StepUpdates
from groupwise.stages.value_truth import value_truth
from groupwise.training.ahead import (
    admit,
    before_update,
    deliver,
    lag_metrics,
    not_begun,
    rest,
)
from groupwise.training.continuing import complete, nothing_left, placed_for
from groupwise.training.guards import (
    check_agreement,
    check_delivery,
    check_rewards,
    check_updates,
    explained_gap,
    note_memory,
)
from groupwise.training.opening import open_run
from groupwise.training.run import Run
from groupwise.training.signals import Signals, Stopped
from groupwise.training.together import check_alike, check_team, met
from groupwise.training.waiting import end_waiting
from groupwise.watch.clock import Clock, now
from groupwise.watch.costs import costs
from groupwise.watch.display import Display
from groupwise.watch.health import Finding
from groupwise.watch.report import write_report, write_summary
from groupwise.watch.samples import sample_measures, wasted
from groupwise.watch.speed import step_speed

Metrics = dict[str, Any]
PARTS = {"answers": "rm", "steps": "prm"}  # of a reward, by what a run's model scores


def train(
    config: Config,
    path: str | Path,
    display: Display | None = None,
    *,
    reward: Callable[..., Any] | None = None,
    engine: MakeEngine | None = None,
) -> dict[str, Any]:
    """Train into a run folder, or go on where it stands. Returns the summary.

    `reward` is a function to grade with, in place of the configuration's reward.parts. `engine`
    makes a sampler of your own for the policy, in place of the one that engine.backend names.
    """
    signals, world = Signals(), met()
    with signals.held():
        cycle = _cycle(config, path, display or Display(), reward, engine, signals, world)
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
    reward: Callable[..., Any] | None = None,
    engine: MakeEngine | None = None,
) -> Generator[Metrics, None, dict[str, Any]]:
    """Train one step at a time: yield the metrics of each, and return the summary.

    The first are those of step 0, before any update, unless the run goes on. Whoever does not ask
    for the next step leaves a run that is saved and can go on. While a step is computed, a request
    to stop ends it: it is saved, and `Stopped` raised.
    """
    return _cycle(config, path, display or Display(), reward, engine, Signals(), met())


def _with_reward(config: Config, reward: Callable[..., Any] | None, file: Path) -> Config:
    """Return the configuration with a function as its reward, which the graders load by place."""
    if reward is None:
        return config
    parts = {place_of(reward, file): 1.0}
    return replace(config, reward=replace(config.reward, parts=parts))


def _cycle(
    config: Config,
    path: str | Path,
    display: Display,
    reward: Callable[..., Any] | None,
    engine: MakeEngine | None,
    signals: Signals,
    world: World,
) -> Generator[Metrics, None, dict[str, Any]]:
    file = Path(path) / "reward.py"
    loaded = Path(cache_from_source(file))  # where a worker that imports it keeps its bytecode
    if not world.leads:
        display = Display(io.StringIO(), live=False)
    with (
        RunFolder(path).nothing_left_if_refused(file, loaded, loaded.parent)
        if world.leads
        else nullcontext(),
        world.naming(display.doing),
    ):
        config = _with_reward(config, reward, file)
        return (yield from _cycle_in(config, path, display, engine, signals, world))


def _cycle_in(
    config: Config,
    path: str | Path,
    display: Display,
    engine: MakeEngine | None,
    signals: Signals,
    world: World,
) -> Generator[Metrics, None, dict[str, Any]]:
    asked, config = config, placed_for(config, path)
    check_alike(config, path, world)
    world.first(lambda: check_team(config, world.size))
    done = world.first(lambda: nothing_left(config, path))
    if done is not None:
        summary, in_vain = done
        display.note(f"{path} is finished after {summary['steps']} steps; steps=N goes further.")
        for change in in_vain:
            display.warn(f"not taken, as no step is left to do: {change}")
        for text in world.first(lambda: complete(path)):
            display.note(text)
        return summary
    display.note(place_line(config.model, asked.model))
    display.announce_stop(signals.asked)
    with open_run(config, path, display, engine, signals.asked, world) as run:
        progress, keeper = run.progress, run.keeper
        if world.any(signals.asked.is_set()):
            at = progress.step + 1
            raise Stopped(f"stopped before step {at}; the same command begins with it")
        with signals.held(), display.watching():
            first = begin(run)
        try:
            if first is not None:
                yield first
            while not progress.over(config) and not world.any(signals.asked.is_set()):
                with signals.held(), display.watching():
                    world.together(keeper.saver.check)
                    metrics = one_step(run, signals.asked)
                    if metrics is not None and keeper.due():
                        keeper.save()
                if metrics is not None:
                    yield metrics
        except GeneratorExit:  # nobody asks for the next step
            keeper.save_and_wait()
            raise
        with display.watching():
            keeper.save_and_wait()
            if not progress.over(config):
                raise Stopped(
                    f"stopped after step {progress.step}, saved; the same command goes on"
                )
            return finish(run)


def begin(run: Run) -> Metrics | None:
    """Check that sampler and learner agree; of a new run, how good the starting policy is."""
    config, progress, parts, reporter = run.config, run.progress, run.parts, run.reporter
    with phase("comparing sampler and learner"):
        check_delivery(progress, parts)
        gate = check_agreement(config, parts, reporter, first=progress.step == 0)
        note_memory(progress, parts, reporter)
    if progress.step != 0 or progress.before is not None:
        return None
    progress.before = held_out(run)
    measured = progress.before.metrics()
    reporter.judge(0, measured)
    reporter.recorder.step(0, [], {**gate, **measured}, by_task=progress.before.by_task)
    reporter.display.step({"step": 0, **measured})
    return {"step": 0, **gate, **measured}


def one_step(run: Run, stop: threading.Event) -> Metrics | None:
    """Take one turn of the cycle. None if it was asked to stop before anything was learned."""
    config, stage, progress, parts, reporter, keeper = run
    clock, before, share = Clock(), progress.cursor.state(), progress.share(config)
    reporter.at, unrewarded = progress.step + 1, progress.unrewarded

    # Prompts, rollouts, rewards; groups that teach nothing are drawn again.
    collected = stage.collect(parts, progress.cursor, reporter.event, clock)
    failing = check_rewards(config, progress, collected, reporter)
    if failing is not None or run.world.any(stop.is_set()):
        not_begun(run, before)
        progress.unrewarded = unrewarded
        if failing is None:
            return None
        give_up(run, collected)
        raise failing

    # Advantages, loss, update.
    rates = rates_at(config, progress.step, progress.total_steps(config), progress.waited)
    progress.coefs = progress.coefs or begun(config)
    rates = rates._replace(coefs=applied(progress.coefs))
    version = progress.version  # that rollouts should be of
    before_update(run, clock)
    keeper.saver.hold_changes()
    updates = stage.teach(parts, progress.memory, collected, rates, reporter.event, clock)
    note_memory(progress, parts, reporter)

    # New weights to the sampler, and what the next step builds on.
    progress.step += 1
    progress.version += sum(not outcome.skipped for outcome in updates.outcomes)
    progress.memory, progress.tokens = updates.memory, progress.tokens + collected.tokens
    for task, passed in collected.pass_rates():
        progress.cursor.note(task, passed)
    deliver(run, clock)
    delivered = check_delivery(progress, parts)
    for role in parts.learner.roles.values():
        role.after_step(parts.learner.model, progress.step)
    progress.coefs = after(config, progress.coefs, progress.step, updates.metrics)
    enough = check_updates(config, progress, updates, reporter, leads=run.world.leads)
    if rates.policy is None:
        end_waiting(config, progress, updates, reporter)

    # What it was like, how good the policy is now, what it cost; all of it written down.
    metrics: Metrics = {
        **step_metrics(run, collected, updates, version),
        **coefficient_measures(config, rates.coefs, updates.metrics),
        "optim/learning_rate": rates.policy or 0.0,
        "weights/fingerprint": delivered,
        **parts.engine.measures(),
    }
    improved, evaluation = False, None
    progress.trained += run.world.first(lambda: now() - clock.start)
    if progress.evaluation_due(config, share):
        rest(run)
        with clock("eval"):
            evaluation = held_out(run)
            metrics |= value_truth(config, parts)
        metrics |= evaluation.metrics()
        improved = progress.note_evaluation(evaluation)
    admit(run)
    metrics |= clock.metrics(collected.tokens)
    metrics |= cost_metrics(run, collected, updates, clock, metrics["time/step"])
    sick = record_step(run, collected, updates, metrics, evaluation, improved)
    enough = enough or sick
    if enough is not None:
        raise enough
    return {"step": progress.step, **metrics}


def give_up(run: Run, collected: Collected) -> None:
    """Leave a step whose rewards can't be used: say so, and keep the run as it was before."""
    metrics = collected.metrics(run.config.recipe.reads_rewards)
    found, events = run.reporter.judge(run.reporter.at, metrics)
    run.reporter.folder.add_events(events)
    act_on(run, found)
    run.keeper.save_and_wait()


def step_metrics(run: Run, collected: Collected, updates: StepUpdates, version: int) -> Metrics:
    """Measure samples, rewards, loss; `version` is that of the weights before the updates."""
    drawn, dropped = collected.drawn, tokens_of(collected.dropped)
    snr = run.parts.learner.optimizer.signal_to_noise(run.world)
    rewarded = run.config.recipe.reads_rewards
    return {
        **collected.metrics(rewarded),
        **sample_measures(drawn, version),
        **wasted(updates.batch, dropped, tokens_of(drawn), rewarded=rewarded),
        **updates.metrics,
        **({} if snr is None else {"optim/grad_snr": snr}),
        **explained_gap(run.config, run.parts),
        **lag_metrics(run, updates),
        "weights/version": run.progress.version,
        "data/epoch": run.progress.cursor.epoch,
        **curriculum_measures(run.progress.cursor.curricula),
        "cost/tokens": run.progress.tokens,
    }


def cost_metrics(
    run: Run, collected: Collected, updates: StepUpdates, clock: Clock, seconds: float
) -> Metrics:
    """Measure the step's work against its time, and the run's so far against what it gained."""
    config, progress, parts = run.config, run.progress, run.parts
    work = {"rollout": rollout_work(config, parts, collected.sizes()), **updates.work}
    progress.flops += sum(model_flops(costs) for costs in work.values())
    return {
        **step_speed(parts.learner.device, work, clock, seconds),
        **costs(
            flops=progress.flops,
            seconds=progress.elapsed,
            price=config.watch.price,
            before=None if progress.before is None else progress.before.accuracy,
            after=None if progress.last is None else progress.last.accuracy,
        ),
        **run.world.measures(),
        "memory/peak_bytes": peak_bytes(parts.learner.device),
        "time/checkpoint": run.keeper.saver.take_stalled(),
        "time/run": progress.elapsed,
    }


def rollout_work(config: Config, parts: Parts[Any], sampled: Sequence[Group]) -> Costs:
    """Return what sampling had to compute and to read."""
    model, samples = parts.loaded.model, sum(len(group.completions) for group in sampled)
    slots = parts.engine.places or config.engine.slots or max(samples, 1)
    return rollout_cost(model.config, sampled, slots, model.head_weight.element_size())


def record_step(
    run: Run,
    collected: Collected,
    updates: StepUpdates,
    metrics: Metrics,
    evaluation: Evaluation | None,
    improved: bool,
) -> RunError | None:
    """Write files first, then tell people; do what the health rules ask for, or say to stop."""
    config, progress, reporter, keeper = run.config, run.progress, run.reporter, run.keeper
    tokenizer = run.parts.loaded.tokenizer
    given, branches = (collected.groups, collected.unused), collected.branches
    rows = rows_of(*given, updates.streams, tokenizer, branches)
    found, events = reporter.judge(progress.step, metrics)
    by_task = {} if evaluation is None else evaluation.by_task
    reporter.recorder.step(progress.step, rows, metrics, events, by_task)
    over = progress.over(config)
    reporter.display.expect(progress.step if over else progress.total_steps(config))
    if rows:
        reporter.display.sample(rows[-1].prompt_text, rows[-1].text, rows[-1].reward)
    reporter.display.step(metrics)
    reporter.mirrors.look()
    sick = act_on(run, found)
    if sick is not None:
        keeper.save_and_wait()
    elif improved and not (over or keeper.due()):
        keeper.save_best()  # a whole checkpoint that is due says that it is the best itself
    return sick


def act_on(run: Run, found: Sequence[Finding]) -> RunError | None:
    """Say it, keep a checkpoint from before it where asked to, and whether to stop."""
    run.reporter.warn(found)
    grave = run.config.watch.snapshot and any(each.rule.grave for each in found)
    if run.world.first(lambda: grave):
        run.keeper.keep_latest()
    return run.world.first(lambda: _why_stop(run, found))


def _why_stop(run: Run, found: Sequence[Finding]) -> RunError | None:
    watch = run.config.watch
    by_recipe = run.config.recipe.stops
    stopping = [each for each in found if each.rule.name in (*watch.stop, *by_recipe)]
    if not stopping:
        return None
    where = quote(str(run.reporter.folder.path))
    own = stopping[0].rule.name not in watch.stop
    who = f"recipe {run.config.recipe.name}" if own else "watch.stop"
    return RunError(
        f"Stopped by {who} after step {run.progress.step}: {stopping[0]} The run is saved; "
        f"the same command goes on with it. `groupwise diagnose {where}` says more."
    )


def held_out(run: Run) -> Evaluation:
    """Measure the model on tasks that training never sees."""
    with phase("evaluating", len(run.parts.held_out), "tasks"):
        return run.stage.evaluate(run.parts)


def finish(run: Run) -> dict[str, Any]:
    """Write the cost, the summary and the report.

    The summary is what says that the run is finished, and a missing report that the end was cut
    short behind it: an older one, of fewer steps, goes first.
    """
    return run.world.first(lambda: _write_end(run))


def _write_end(run: Run) -> dict[str, Any]:
    config, progress, reporter = run.config, run.progress, run.reporter
    folder = reporter.folder
    reporter.recorder.flush()
    seconds, newest = progress.elapsed, progress.last or progress.before
    folder.write_cost(seconds=seconds, tokens=progress.tokens)
    with folder.writing("report.html"):
        folder.report.unlink(missing_ok=True)
    summary = write_summary(
        folder,
        steps=progress.step,
        seconds=seconds,
        before={} if progress.before is None else progress.before.as_dict(),
        after={} if newest is None else newest.as_dict(),
        budget=asdict(config.budget) if config.budget != Budget() else None,
        until=asdict(config.until) if progress.reached(config) else None,
    )
    with phase("writing the report"), folder.writing("report.html"):
        write_report(folder.path)
    judged = bool(run.parts.held_out)
    reporter.display.finish(summary, folder.path, _as_reward(config.recipe), held_out=judged)
    return summary


def _as_reward(recipe: Method) -> str:
    """Return what a model that scores is called in a reward of other runs; "" of others."""
    part, separator = PARTS.get(recipe.scores, ""), getattr(recipe, "separator", SEPARATOR)
    behind = "" if separator == SEPARATOR else f", separator={separator!r}"
    return part and f"{part}(path='FOLDER'{behind})"
