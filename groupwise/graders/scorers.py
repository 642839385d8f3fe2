"""Trained reward models from Hugging Face folders: one score for a text, or one for every step.

They need the package `transformers`. A reward model (`rm`) is a sequence classifier; a process
reward model (`prm`) a token classifier whose score of a step stands at the step's last token.

An answer that is longer than the model reads is scored as one that stops where the reading does: it
must not be worth anything to a policy to become too long for its judge.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from groupwise.common.extras import install
from groupwise.data.steps import SEPARATOR, last_tokens, step_ends
from groupwise.data.tasks import prompt_text, turns_of
from groupwise.engine.stopping import without_ends
from groupwise.errors import DataError, ModelError, RewardError
from groupwise.graders.parts import Mark, SampleToGrade
from groupwise.model.adapters.peft_files import CONFIG as ADAPTER
from groupwise.model.borrowed.families import check_numbers, quiet
from groupwise.model.formats.classifier import END, FIELDS
from groupwise.model.formats.classifier import SEPARATOR as TRAINED_WITH
from groupwise.model.formats.fields import check, library, read_bytes, table
from groupwise.records import Task

Squash = Literal["none", "sigmoid"]
Pool = Literal["mean", "last", "min"]
NOWHERE = 2**62
REMEDY = "The folder is damaged, or of another kind of model: fetch it again."
OTHER_MODEL = "Take another model"
AUTO = "auto"  # a device: a GPU where PyTorch sees one
TRIED = "1"  # a text that any tokenizer reads
POOLS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "last": lambda scores: scores[-1],
    "min": min,
}


class Reading(NamedTuple):
    """A text as tokens, where each begins in the completion, and why it can't be scored, or ""."""

    ids: list[int]
    starts: list[int]
    why: str = ""
    kept: int = 0  # characters of the completion that are read
    cut: str = ""  # why not all of them, or ""


@dataclass(frozen=True)
class Scorer:
    """A classifier and its tokenizer; texts are scored in batches of similar length."""

    model: Any
    tokenizer: Any
    batch: int
    # The token that ends an answer, of models that were trained here: they read prompt and answer
    # as ids of their own, as a policy has them.
    end: int | None = None
    separator: str | None = None  # behind each step, of token classifiers that were trained here

    def read(self, task: Task, text: str, behind: str = "", ended: bool = False) -> Reading:
        """Return prompt and completion as tokens, as much of the completion as can be read.

        `behind` follows it, and the end of models that were trained here.
        """
        kept, cut = len(text), ""
        while True:
            try:
                with library("the reward model's tokenizer can't read the text", OTHER_MODEL):
                    ids, starts = self.encode(task, text[:kept] + behind)
            except ModelError as error:  # of this text alone: others are scored
                return Reading([], [], str(error))
            if ended and self.end is not None:
                ids, starts = [*ids, self.end], [*starts, NOWHERE]
            stop, why = self.readable(ids, starts, kept)
            if not why:
                return Reading(ids, starts, "", kept, cut)
            if stop >= kept:  # not the completion's fault: without a word of it, too
                return Reading([], [], why)
            kept, cut = stop, why

    def encode(self, task: Task, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of prompt and completion, and where each token begins in the completion.

        With a chat template the completion is the assistant's turn. What belongs to the prompt
        begins below 0; what the tokenizer adds without a text, nowhere.
        """
        text = text.encode("utf-8", "replace").decode()  # half a character is nothing to read
        if self.end is not None:
            return self._apart(task, text)
        special = not getattr(self.tokenizer, "chat_template", None)
        if special:
            before = prompt_text(task.prompt)
            said = before + text
        else:
            turns = turns_of(task.prompt)
            template = self.tokenizer.apply_chat_template
            before = template(turns, tokenize=False, add_generation_prompt=True)
            said = template([*turns, {"role": "assistant", "content": text}], tokenize=False)
            if not said.startswith(before + text):  # a template that tidies the last turn
                said = before + text
        found = self.tokenizer(said, add_special_tokens=special, return_offsets_mapping=True)
        starts = [
            start - len(before) if end > start else NOWHERE
            for start, end in found["offset_mapping"]
        ]
        return found["input_ids"], starts

    def _apart(self, task: Task, text: str) -> tuple[list[int], list[int]]:
        """Return the same for a model that was trained here."""
        chat = getattr(self.tokenizer, "chat_template", None) is not None
        if chat:
            asked = self.tokenizer.apply_chat_template(
                turns_of(task.prompt), tokenize=False, add_generation_prompt=True
            )
        else:
            asked = prompt_text(task.prompt)
        before = self.tokenizer(asked, add_special_tokens=not chat)["input_ids"]
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = [start if end > start else NOWHERE for start, end in found["offset_mapping"]]
        return before + found["input_ids"], [-1] * len(before) + starts

    @property
    def on_gpu(self) -> bool:
        return self.model.device.type == "cuda"

    @property
    def longest(self) -> int:
        """Return the number of tokens that the model was made for."""
        places = getattr(self.model.config, "max_position_embeddings", None) or NOWHERE
        return min(places, self.tokenizer.model_max_length)

    def readable(self, row: Sequence[int], starts: Sequence[int], size: int) -> tuple[int, str]:
        """Return how many of a completion's characters can be read, and why not all, or ""."""
        if not row:
            return size, "no token: the reward model's tokenizer leaves all of the text out"
        known = self.model.get_input_embeddings().num_embeddings
        strange = [(start, number) for number, start in zip(row, starts, strict=True)
                   if number >= known]  # fmt: skip
        if strange:
            first, number = min(strange)
            return first if first >= 0 else size, f"token {number}; the reward model knows {known}"
        over = len(row) - self.longest
        if over <= 0:
            return size, ""
        own = sorted(start for start in starts if 0 <= start < size)
        why = f"{len(row):,} tokens; the reward model reads up to {self.longest:,}"
        return own[-over] if over <= len(own) else 0, why

    def logits(self, read: Sequence[Reading]) -> list[Any]:
        """Return the model's output for each text, in order; None for one that it can't read.

        Padding is masked.
        """
        import torch

        rows = [each.ids for each in read]
        found: list[Any] = [None] * len(rows)
        fitting = [row for row, each in enumerate(read) if not each.why]
        order = sorted(fitting, key=lambda row: len(rows[row]))
        for first in range(0, len(order), self.batch):
            chosen = order[first : first + self.batch]
            longest = max(len(rows[row]) for row in chosen)
            ids = torch.full((len(chosen), longest), self.model.config.pad_token_id)
            mask = torch.zeros_like(ids)
            for place, row in enumerate(chosen):
                ids[place, : len(rows[row])] = torch.tensor(rows[row])
                mask[place, : len(rows[row])] = 1
            device = self.model.device
            with torch.inference_mode():
                out = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
            for place, row in enumerate(chosen):
                found[row] = out[place].float().cpu()
        return found


@dataclass(frozen=True)
class RewardModel:
    """The part `rm` of a reward."""

    scorer: Scorer
    squash: Squash
    ends: tuple[str, ...]
    minus: float = 0.0
    decides: bool = False
    needs_answers: bool = False

    @property
    def wants_batch(self) -> bool:
        """Return whether it grades when all is sampled: a GPU serves sampler and scorer in turn."""
        return self.scorer.on_gpu

    def problem(self, task: Task) -> str:
        return ""

    def grade(self, samples: Sequence[SampleToGrade]) -> list[Mark]:
        read = [
            self.scorer.read(sample.task, without_ends(sample.text, self.ends), ended=True)
            for sample in samples
        ]
        return [
            Mark(status="error", reason=each.why) if out is None else _mark(self._value(out), each)
            for each, out in zip(read, self.scorer.logits(read), strict=True)
        ]

    def _value(self, out: Any) -> float:
        value = out[0] if len(out) == 1 else out[1] - out[0]  # of two classes, for the good one
        value = value - self.minus
        return float(value.sigmoid() if self.squash == "sigmoid" else value)


@dataclass(frozen=True)
class ProcessRewardModel:
    """The part `prm` of a reward."""

    scorer: Scorer
    pool: Pool
    separator: str
    process: bool
    ends: tuple[str, ...]
    decides: bool = False
    needs_answers: bool = False

    @property
    def wants_batch(self) -> bool:
        """Return whether it grades when all is sampled: a GPU serves sampler and scorer in turn."""
        return self.scorer.on_gpu

    def problem(self, task: Task) -> str:
        return ""

    def grade(self, samples: Sequence[SampleToGrade]) -> list[Mark]:
        texts = [without_ends(sample.text, self.ends) for sample in samples]
        steps_N = [step_ends(text, self.separator) for text in texts]
        # The last step gets the separator that every other one has: its score stands there.
        read = [
            self.scorer.read(sample.task, text, self.separator)
            for sample, text in zip(samples, texts, strict=True)
        ]
        outs = self.scorer.logits(read)
        return [
            Mark(status="error", reason=each.why) if out is None else self._scored(each, steps, out)
            for steps, each, out in zip(steps_N, read, outs, strict=True)
        ]

    def _scored(self, read: Reading, steps: Sequence[int], out: Any) -> Mark:
        reached = [end for end in steps if end <= read.kept]
        try:
            places = last_tokens(read.starts, reached, self.separator)
        except DataError as error:
            return Mark(status="error", reason=str(error))
        # Nobody has seen that the others are good.
        scores = [_chance(out[place]) for place in places] + [0.0] * (len(steps) - len(reached))
        return self._mark(scores, steps, read)

    def _mark(self, scores: Sequence[float], steps: Sequence[int], read: Reading) -> Mark:
        if not scores:
            return Mark(0.0, reason="no step")
        bad = [score for score in scores if not math.isfinite(score)]  # which `min` may pass over
        mark = _mark(bad[0] if bad else POOLS[self.pool](scores), read)
        if mark.value is None or not self.process:
            return mark
        return replace(mark, steps=tuple(zip(steps, scores, strict=True)))


def _chance(out: Any) -> float:
    """Return the chance that a step is good: of one class, or of the second of two."""
    return float(out.sigmoid()[0] if len(out) == 1 else out.softmax(-1)[1])


def _mark(value: float, read: Reading) -> Mark:
    if math.isfinite(value):
        cut = f"scored as if it stopped behind {read.kept:,} characters: {read.cut}"
        return Mark(value, reason=cut if read.cut else "")
    return Mark(status="error", reason=f"the reward model gives {value}")


@functools.lru_cache(maxsize=4, typed=True)  # for the check before a run and the run; 1 is no True
def load(path: str, kind: str, device: str, dtype: str, batch: int) -> Scorer:
    """Load a classifier from a folder of this machine: nothing is fetched, no code of it is run."""
    if importlib.util.find_spec("transformers") is None:
        raise RewardError(f"{kind} needs the package transformers: `{install('scorers')}`")
    folder = _classifier_in(Path(path).expanduser())
    if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        raise RewardError(
            f"{kind}: {path!r} is an adapter, and a whole classifier is needed. Make one with "
            f"`groupwise export {path} FOLDER`, and name that folder."
        )
    if not (folder / "config.json").is_file():
        raise RewardError(f"{kind}: {path!r} is no Hugging Face folder: it has no config.json.")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise RewardError(f"{kind}: batch = {batch!r} must be a number of at least 1.")
    try:
        with library(f"{kind}: {path!r} can't be loaded", REMEDY), quiet():
            return _loaded(folder, kind, device, dtype, batch)
    except ModelError as error:
        raise RewardError(str(error)) from error


def _loaded(folder: Path, kind: str, device: str, dtype: str, batch: int) -> Scorer:
    """Read a folder's files, and have the model read a text: what fails, fails before a run."""
    import torch
    import transformers

    file = folder / "config.json"
    raw = table(file, read_bytes(file))
    check(file, raw, FIELDS)
    check_numbers(raw)
    auto = {
        "rm": transformers.AutoModelForSequenceClassification,
        "prm": transformers.AutoModelForTokenClassification,
    }[kind]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model, report = auto.from_pretrained(
        folder, local_files_only=True, dtype=getattr(torch, dtype), output_loading_info=True
    )
    if missing := sorted(report["missing_keys"]):
        raise RewardError(
            f"{kind}: {str(folder)!r} has no weights for {missing[0]}: it is no trained reward "
            "model, and its scores would be noise."
        )
    if not tokenizer.is_fast:
        raise RewardError(f"{kind}: {str(folder)!r} has no tokenizer.json, which {kind} needs.")
    if model.config.num_labels not in (1, 2):
        raise RewardError(
            f"{kind}: {str(folder)!r} has {model.config.num_labels} classes; one or two can be a "
            "reward."
        )
    if model.config.pad_token_id is None:
        known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        model.config.pad_token_id = next(number for number in known if number is not None)
    if device == AUTO:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = model.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise RewardError(f"{kind}: device = {device!r} can't be used: {error}.") from error
    scorer = Scorer(model, tokenizer, batch, raw.get(END), raw.get(TRAINED_WITH))
    tried = scorer.read(Task(0, TRIED), TRIED, ended=True)
    if tried.why:
        raise RewardError(f"{kind}: {str(folder)!r} can't read {TRIED!r}: {tried.why}.")
    scorer.logits([tried, Reading(tried.ids[:1], [])])  # one of them is padded
    return scorer


def _classifier_in(folder: Path) -> Path:
    """Return a run's best checkpoint, else its latest; what is no run, as it is."""
    kept = [folder / "checkpoints" / name for name in ("best", "latest")]
    return next((each for each in kept if each.is_dir()), folder)


def rm(
    ends: Sequence[str],
    *,
    path: str,
    squash: Squash = "none",
    minus: float = 0.0,
    device: str = AUTO,
    dtype: str = "float32",
    batch: int = 16,
) -> RewardModel:
    """Give the score of a sequence classifier, `minus` a constant, as it is or between 0 and 1."""
    if isinstance(minus, bool) or not isinstance(minus, int | float) or not math.isfinite(minus):
        raise RewardError(f"rm: minus = {minus!r} must be a number, to be taken off every score.")
    if squash not in ("none", "sigmoid"):
        raise RewardError(f"rm: squash = {squash!r} must be none or sigmoid.")
    scorer = load(path, "rm", device, dtype, batch)
    return RewardModel(scorer, squash, tuple(ends), float(minus))


def prm(
    ends: Sequence[str],
    *,
    path: str,
    pool: Pool = "min",
    separator: str = SEPARATOR,
    process: bool = False,
    device: str = AUTO,
    dtype: str = "float32",
    batch: int = 16,
) -> ProcessRewardModel:
    """Give the mean, last or lowest of the steps' scores; with `process` they are passed on as
    well.
    """
    if pool not in POOLS:
        raise RewardError(f"prm: pool = {pool!r} must be one of {', '.join(POOLS)}.")
    if not separator:
        raise RewardError("prm: separator is empty; it is what stands between two steps.")
    scorer = load(path, "prm", device, dtype, batch)
    if scorer.separator not in (None, separator):
        raise RewardError(
            f"prm: {path!r} was trained with {scorer.separator!r} behind each step, and separator "
            f"is {separator!r}: scores would be read where none was learned. Write "
            f"separator={scorer.separator!r}."
        )
    return ProcessRewardModel(scorer, pool, separator, process, tuple(ends))
