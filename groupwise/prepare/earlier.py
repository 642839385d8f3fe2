"""Answers of earlier runs as tasks to learn from: read, sieved, mixed, and fitted to a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.compute as pc  # type: ignore[import-untyped]

from groupwise.common.progress import phase
from groupwise.config import Config
from groupwise.data import load as load_data
from groupwise.data.mixing import interleaved
from groupwise.data.selection import RECORDED, AnswerPlace, KeptAnswers
from groupwise.data.sources import LoadedTasks, SourceReader, files_read
from groupwise.data.tasks import normalised
from groupwise.errors import DataError, GroupwiseError, RunError
from groupwise.graders.rubric import Grader
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.prepare.recorded import SCALARS, groups_of, read_config, tokenizer_of
from groupwise.prepare.sieve import EarlierAnswer, Sieve, share
from groupwise.records import Rollout, Task
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.rollouts import prompt_json, read

COLUMNS = (*SCALARS, "sampler_logp", "mask", "prompt_text")


@dataclass(frozen=True)
class EarlierRun:
    """The folder of a run that is over, or that `groupwise collect` wrote."""

    name: str  # as data.runs has it
    seed: int  # of generated tasks

    @cached_property
    def folder(self) -> RunFolder:
        return RunFolder(self.name)

    @cached_property
    def steps(self) -> list[int]:
        """Return the finished steps with rollouts; refuse what is no such folder."""
        folder, path = self.folder, self.folder.path
        inner = sorted(x.parent.name for x in path.glob("*/rollouts") if x.is_dir())
        if inner and not folder.config.is_file():
            raise RunError(
                f"data.runs: {self.name} has no rollouts of its own, its folders have: name "
                f"{', '.join(f'{self.name}/{name}' for name in inner)}."
            )
        read_config(folder)
        writer = folder.writer()
        if writer is not None:
            raise RunError(
                f"data.runs: {self.name} is still being written ({writer}). Wait until it is over, "
                "or stop it."
            )
        durable = {int(line["step"]) for line in folder.read_metrics()}
        missing = sorted(durable - {0} - set(folder.rollout_steps()))
        if missing:
            raise RunError(
                f"data.runs: {self.name} has metrics of step {missing[0]} and no rollouts of it: "
                f"{folder.rollout(missing[0]).name} was removed. Put it back, or leave the run out."
            )
        steps = [step for step in folder.rollout_steps() if step in durable]
        if not steps:
            raise RunError(
                f"data.runs: {self.name} has no finished step with rollouts. Name a run that has "
                "made a step, with its rollouts/ in it."
            )
        return steps

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return tokenizer_of(self.folder)

    @cached_property
    def tasks(self) -> LoadedTasks:
        """Read the tasks that it was made from once more."""
        config = read_config(self.folder)
        if config.data.runs:
            raise RunError(
                f"data.runs: {self.name} learned from answers of {', '.join(config.data.runs)}, "
                "and has no tasks of its own. Name those instead."
            )
        try:
            return load_data(config.data, seed=self.seed, held_out=config.eval.tasks)
        except GroupwiseError as error:
            raise RunError(
                f"data.runs: the tasks of {self.name} can't be read again: {error}"
            ) from error

    @cached_property
    def by_number(self) -> dict[int, Task]:
        return {task.id: task for task in self.tasks.train}

    def digest(self) -> bytes:
        """Hash the files that answers are read from."""
        found = hashlib.sha256()
        for step in self.steps:
            with open(self.folder.rollout(step), "rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        return found.digest()

    def answers(self) -> Iterator[EarlierAnswer]:
        """Yield every answer of every step, learned from or not, without branches of them."""
        for step in self.steps:
            table = read(self.folder.rollout(step), COLUMNS)
            table = table.filter(pc.is_null(table.column("branch")))
            numbers = dict.fromkeys(table.column("group").to_pylist())
            told = dict(
                zip(
                    table.column("group").to_pylist(),
                    table.column("prompt_text").to_pylist(),
                    strict=True,
                )
            )
            for group, rollouts in zip(numbers, groups_of(table), strict=True):
                for rollout in rollouts:
                    task = rollout.task
                    if not task.prompt:  # a file of an older version does not have it
                        task = replace(task, prompt=self.task_of(rollout, told[group]).prompt)
                    place = AnswerPlace(
                        self.name, step, group, rollout.sample, task.id, rollout.draw
                    )
                    yield EarlierAnswer(
                        place, prompt_json(task.prompt), replace(rollout, task=task)
                    )

    def task_of(self, rollout: Rollout, prompt_text: str = "") -> Task:
        """Return the task of the data that an answer is of; refuse data that are others now."""
        found = self.by_number.get(rollout.task.id)
        same = found is not None and (
            prompt_json(found.prompt) == prompt_json(rollout.task.prompt)
            if rollout.task.prompt
            else all(part in normalised(prompt_text) for part in _parts(found))
        )
        if found is None or not same:
            raise RunError(
                f"data.runs: task {rollout.task.id} of {self.name} is not what its data "
                f"({', '.join(read_config(self.folder).data.sources)}) have there now. Put the "
                "data back as they were."
            )
        return found


def data_digest(config: Config) -> str:
    """Hash the files that a configuration's tasks are read from, and no names of folders."""
    data, read = config.data, list[Path]()
    if not data.runs or data.mix.get("other") or data.eval:
        read += files_read(data)
    for name in data.runs:
        read += sorted(RunFolder(name).rollouts.glob("*.parquet"))
    whole = hashlib.sha256()
    for path in read:
        with open(path, "rb") as file:
            whole.update(
                f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode()
            )
    return whole.hexdigest() if read else ""


def _parts(task: Task) -> list[str]:
    if isinstance(task.prompt, str):
        return [normalised(task.prompt)]
    return [normalised(str(message["content"])) for message in task.prompt]


def load_earlier(config: Config, seed: int) -> LoadedTasks:
    """Return kept answers as tasks to train on, with other rows beside them, and what is held out.

    Two runs with the same seed and the same answers have the same tasks.
    """
    runs = [EarlierRun(name, seed) for name in dict.fromkeys(config.data.runs)]
    for run in runs:
        run.steps  # noqa: B018, refuses it before anything is read
    with phase("reading earlier answers", things="answers") as told:
        sieve, kept = _sieved(config, runs, told)
    found = hashlib.sha256(b"".join(sorted(run.digest() for run in runs))).hexdigest()[:16]
    dropped = {name: number for name, number in sieve.dropped.items() if number}
    selection = KeptAnswers(found, tuple(answer.place for answer in kept), dropped)
    held, notes = _held_out(config, runs[0], seed)
    selection, kept, told_too = _mixed(config, selection, kept, held)
    if not kept:
        raise DataError(f"Nothing is left to learn from: {selection.line()}. Relax keep.")
    by_name = {run.name: run for run in runs}
    tasks = [_task(number, answer, by_name[answer.place.run]) for number, answer in enumerate(kept)]
    others = other_rows(config, seed, len(tasks))
    wanted = config.data.mix.get("other", 0)
    if len(others) < wanted:
        notes.append(
            f"warning: data.mix asks for {wanted:,} other rows, and data.train has {len(others):,}."
        )
    selection = replace(selection, other=len(others))
    return LoadedTasks([*tasks, *others], held, [*notes, *told_too], selection=selection)


def _sieved(
    config: Config, runs: Sequence[EarlierRun], told: Any
) -> tuple[Sieve, list[EarlierAnswer]]:
    sieve, seen = Sieve(config.keep, config.seed), 0
    for run in runs:
        answers: Iterable[EarlierAnswer] = run.answers()
        if config.keep.grade == "anew":
            answers = _graded_anew(config, run, answers)
        for answer in answers:
            sieve.look(answer)
            seen += 1
            told(seen)
    return sieve, sieve.kept()


AT_ONCE = 512  # answers that are graded in one call


def _graded_anew(
    config: Config, run: EarlierRun, answers: Iterable[EarlierAnswer]
) -> Iterator[EarlierAnswer]:
    """Grade answers by the reward of this configuration and the tasks that they are of."""
    tokenizer = run.tokenizer
    if tokenizer is None:
        raise RunError(
            f'keep.grade="anew": {run.name} has no tokenizer.json (in checkpoints/latest), which '
            'says where an answer ends. Put it back, or set keep.grade="stored".'
        )
    ends = [tokenizer.decode([number]) for number in tokenizer.eos_ids]
    ends += read_config(run.folder).engine.stop
    reward = config.reward
    grader = Grader(reward.parts, ends, config.data.graders, timeout=reward.timeout)
    waiting: list[EarlierAnswer] = []

    def graded() -> Iterator[EarlierAnswer]:
        asked = [
            (run.task_of(x.rollout), x.rollout.text, x.rollout.completion.own_ids,
             x.rollout.completion.finish)
            for x in waiting
        ]  # fmt: skip
        for answer, grade in zip(waiting, grader.grade(asked), strict=True):
            yield replace(answer, rollout=replace(answer.rollout, grade=grade))
        waiting.clear()

    for answer in answers:
        waiting.append(answer)
        if len(waiting) == AT_ONCE:
            yield from graded()
    yield from graded()


def _held_out(config: Config, first: EarlierRun, seed: int) -> tuple[Sequence[Task], list[str]]:
    """Return the tasks of data.eval; else those that the first of the runs held out."""
    data, most = config.data, config.eval.tasks
    if not most:
        return [], []
    if data.eval:
        reader = SourceReader(data, seed, False)
        rows = reader.all(data.eval_details, most, held_out=True)
        return interleaved(list(rows)), reader.notes
    try:
        held = first.tasks.eval
    except RunError as error:
        return [], [f"warning: nothing is held out, as data.eval is not set and {error}"]
    return held, [f"held out: what {first.name} held out"] if held else []


def _mixed(
    config: Config,
    selection: KeptAnswers,
    kept: list[EarlierAnswer],
    held: Sequence[Task],
) -> tuple[KeptAnswers, list[EarlierAnswer], list[str]]:
    """Leave out answers to held-out prompts, where asked to, and those beyond data.mix."""
    notes = []
    asked = {prompt_json(task.prompt) for task in held}
    both = [at for at, answer in enumerate(kept) if answer.prompt in asked]
    if both and config.data.duplicates == "drop":
        selection, kept = selection.without(both, "evaluated"), _without(kept, both)
    elif both:
        notes.append(
            f"warning: {len(both):,} kept answers are to held-out prompts: accuracy on them says "
            "nothing about new ones (data.duplicates=drop leaves them out)."
        )
    most = config.data.mix.get("reasoning", 0)
    if most and len(kept) < most:
        notes.append(
            f"warning: data.mix asks for {most:,} kept answers, and there are {len(kept):,}."
        )
    elif most:
        order = sorted(
            range(len(kept)),
            key=lambda at: share(config.seed, "mix", kept[at].prompt, kept[at].rollout.text),
        )
        beyond = order[most:]
        selection, kept = selection.without(beyond, "mix"), _without(kept, beyond)
    return selection, kept, notes


def _without(kept: list[EarlierAnswer], gone: Sequence[int]) -> list[EarlierAnswer]:
    leaving = set(gone)
    return [answer for at, answer in enumerate(kept) if at not in leaving]


def _task(number: int, answer: EarlierAnswer, run: EarlierRun) -> Task:
    """Make a task of an answer: its text without the end, and the tokens that were recorded."""
    rollout, done = answer.rollout, answer.rollout.completion
    ids, plain = list(done.token_ids), rollout.text
    if run.tokenizer is not None:
        ended = ids[-1:] and ids[-1] in run.tokenizer.eos_ids
        plain = run.tokenizer.decode(ids[:-1] if ended else ids)
    recorded = {
        "run": run.name,
        "prompt": list(rollout.task.token_ids),
        "ids": ids,
        "mask": None if done.mask_T is None else done.mask_T.tolist(),
        "turns": [list(turn) for turn in done.turns],
        "finish": done.finish,
        "text": rollout.text,
        "ends_known": run.tokenizer is not None,
    }
    columns = {"completion": plain, RECORDED: recorded}
    return Task(number, rollout.task.prompt, rollout.task.answer, columns)


def other_rows(config: Config, seed: int, first: int = 0) -> list[Task]:
    """Choose rows of data.train by the seed; they are numbered behind the kept answers."""
    wanted = config.data.mix.get("other", 0)
    if not wanted:
        return []
    data = replace(config.data, runs=(), mix={}, eval="", holdout_share=0.0)
    tasks = load_data(data, seed=seed, held_out=0).train
    order = sorted(range(len(tasks)), key=lambda at: share(config.seed, "other", str(at)))
    chosen = (tasks[at] for at in sorted(order[:wanted]))
    return [replace(task, id=first + number) for number, task in enumerate(chosen)]


# --- as this model reads them -----------------------------------------------------------------


def fitted(
    tasks: Sequence[Task], selection: KeptAnswers, tokenizer: Tokenizer
) -> tuple[list[Task], KeptAnswers, list[str]]:
    """Take recorded tokens where they mean the same text to this tokenizer, else encode the text.

    It is one or the other for all answers of a run.
    """
    known: dict[str, bool] = {}
    for task in tasks:
        own = task.columns.get(RECORDED)
        if own is not None and known.get(own["run"], True):
            known[own["run"]] = _means_the_same(own, tokenizer)
    made: list[Task] = []
    gone: list[int] = []
    for at, task in enumerate(tasks):
        own = task.columns.get(RECORDED)
        if own is None or known[own["run"]]:
            made.append(task)
        elif own["mask"] is not None or own["finish"] != "eos":
            gone.append(at)
        else:
            made.append(_encoded_anew(task, own))
    notes = [
        f"{name} was sampled with another tokenizer: its answers are encoded anew"
        for name, same in known.items()
        if not same
    ]
    selection = selection.without(gone, "tokenizer")
    if not selection.places:
        raise DataError(f"Nothing is left to learn from: {selection.line()}.")
    return [replace(task, id=number) for number, task in enumerate(made)], selection, notes


def _means_the_same(own: dict[str, Any], tokenizer: Tokenizer) -> bool:
    ids = own["ids"]
    if max(*ids, *own["prompt"], 0) >= len(tokenizer):
        return False
    ended = own["finish"] != "eos" or ids[-1] in tokenizer.eos_ids
    return ended and tokenizer.decode(ids) == own["text"]


def _encoded_anew(task: Task, own: dict[str, Any]) -> Task:
    if not own["ends_known"]:
        raise RunError(
            f"data.runs: {own['run']} was sampled with another tokenizer, and its own is not there "
            "(tokenizer.json in checkpoints/latest) to say where an answer ends. Put it back."
        )
    return replace(task, columns={k: x for k, x in task.columns.items() if k != RECORDED})


def wording_notes(tasks: Sequence[Task]) -> list[str]:
    """Say that prompts are worded otherwise than where the answers were sampled."""
    recorded = [task for task in tasks if RECORDED in task.columns]
    other = [t for t in recorded if list(t.token_ids) != t.columns[RECORDED]["prompt"]]
    if not other:
        return []
    return [
        f"warning: {len(other):,} of {len(recorded):,} kept answers were sampled behind prompts of "
        "another wording: data.template, data.system or data.instruction were others there."
    ]
