"""Evaluation suites by name: the source of their tasks, and the words for a model.

A suite is written `gsm8k`, `gsm8k:FILE`, `gsm8k:hub:org/name/FILES`, a source as `data.train` takes
it (a file, `reasoning_gym:chain_sum`, `arithmetic`), or `held_out`: what the configuration has.
A bare name is looked for in a folder of data, then on the hub.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from groupwise.config import Config
from groupwise.config.fields import GYM, Reward, is_generator
from groupwise.data.files import TABLES, TEXTS, format_of
from groupwise.data.named_sets import SETS
from groupwise.errors import ConfigError, DataError, nearest
from groupwise.graders.by_row import ROW
from groupwise.records import Task

HELD_OUT = "held_out"
GENERATED = 100  # tasks of a generator, unless --tasks says how many


@dataclass(frozen=True)
class Forcing:
    """The text that asks for an answer after thoughts that were cut off."""

    text: str
    stop: tuple[str, ...]


BY_WORDS = Forcing("\n\nAnswer:", ("\n",))
BY_TAGS = Forcing("\n<answer>", ("</answer>",))
BY_FENCE = Forcing("\n```python\n", ("```",))
STEPS = "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}."
TAGGED = "{prompt}\nPut your final answer between <answer> and </answer>."
WRITE = "{prompt}\nAnswer with the program alone, in a Python code block."


@dataclass(frozen=True)
class Suite:
    """A name, its data, and the words for a model where no configuration says otherwise."""

    name: str
    source: str = ""  # as data.train would have it; "": the configuration's held-out tasks
    columns: str = ""  # the named set whose columns its rows have; "": a plain source
    hub: str = ""
    keep: Callable[[Task], bool] = lambda task: True
    instruction: str = "{prompt}"
    max_tokens: int = 512
    forcing: Forcing = BY_WORDS


def _of_math500(task: Task) -> bool:
    """Return whether a row belongs to it: of a file of MATH that marks them, only those in it."""
    return task.columns.get("math500_id", "") is not None


KNOWN = {
    suite.name: suite
    for suite in (
        Suite("gsm8k", columns="gsm8k", hub="openai/gsm8k/main/test*.parquet", instruction=STEPS),
        Suite(
            "math",
            columns="math",
            hub="EleutherAI/hendrycks_math/*/test*.parquet",
            instruction=STEPS,
            max_tokens=2048,
        ),
        Suite(
            "math500",
            columns="math",
            hub="HuggingFaceH4/MATH-500/test.jsonl",
            keep=_of_math500,
            instruction=STEPS,
            max_tokens=2048,
        ),
        *(
            Suite(name, columns="aime", hub=hub, instruction=STEPS, max_tokens=8192)
            for name, hub in (
                ("aime", "AI-MO/aimo-validation-aime"),
                ("aime24", "HuggingFaceH4/aime_2024"),
                ("aime25", "opencompass/AIME2025/*.jsonl"),
            )
        ),
        Suite(
            "mbpp",
            columns="mbpp",
            hub="google-research-datasets/mbpp/full/test*.parquet",
            instruction=WRITE,
            forcing=BY_FENCE,
        ),
        Suite(
            "humaneval",
            columns="humaneval",
            hub="openai/openai_humaneval/openai_humaneval/test*.parquet",
            instruction=f"Complete this Python function.\n\n{WRITE}",
            forcing=BY_FENCE,
        ),
        Suite("countdown", columns="countdown", max_tokens=1024),
        Suite(GYM, columns=GYM, instruction=TAGGED, forcing=BY_TAGS),
    )
}


def find(text: str, folder: Path | None = None) -> Suite:
    """Find the suite that is meant, with its source. `folder` holds the data of bare names."""
    word, colon, rest = text.partition(":")
    if text == HELD_OUT:
        return Suite(HELD_OUT)
    if text.startswith(f"{GYM}:") and is_generator(text):
        return replace(KNOWN[GYM], name=text, source=text, columns="")
    if word in KNOWN and colon:
        return replace(KNOWN[word], source=f"{KNOWN[word].columns}:{rest}")
    if text in KNOWN:
        return _find_data(KNOWN[text], folder)
    if is_generator(text):
        return Suite(text, source=text)
    if word in SETS and colon:  # dapo17k:FILE
        return Suite(word, source=text, columns=word, instruction=STEPS)
    looks_like_file = "/" in text or "." in text or word == "hub"
    if looks_like_file and not (colon and word != "hub" and re.fullmatch(r"\w{2,}", word)):
        return Suite(_stem(text), source=text)
    known = [*KNOWN, HELD_OUT, "arithmetic"]
    raise DataError(
        f"There is no suite {text!r}. {nearest(word, known)} A suite may also be a file, or "
        "NAME:FILE."
    )


def _find_data(suite: Suite, folder: Path | None) -> Suite:
    """Find `FOLDER/gsm8k/test.jsonl.gz`, `FOLDER/gsm8k.jsonl`; else the hub, or a generator."""
    if folder is not None:
        if not folder.is_dir():
            raise ConfigError(f"--data {folder} is no folder.")
        beneath = [*folder.glob(f"{suite.name}/test*"), *folder.glob(f"{suite.name}.*")]
        files = sorted(file for file in beneath if format_of(file) in (*TEXTS, *TABLES))
        if len(files) == 1:
            return replace(suite, source=f"{suite.columns}:{files[0]}")
        if files:
            named = ", ".join(str(file) for file in files)
            raise DataError(
                f"{suite.name} could be any of {named}. Write --suite {suite.name}:FILE."
            )
        raise DataError(
            f"{folder} has no {suite.name}/test.* or {suite.name}.*. Write --suite "
            f"{suite.name}:FILE, or leave --data out to fetch it from the hub."
        )
    if not suite.hub:
        return replace(suite, source=suite.name)  # countdown: made on the spot
    return replace(suite, source=f"{suite.columns}:hub:{suite.hub}")


def _stem(text: str) -> str:
    return re.split(r"[.*?\[@]", Path(text).name)[0] or Path(text).parent.name


def config_of(suite: Suite, config: Config, tasks: int, *, own_options: bool) -> Config:
    """Return the configuration that a suite's tasks are read, asked and graded with.

    `own_options`: data.options were written for the configuration's own generator alone.
    """
    if not suite.source:
        if not config.data.evaluates:
            raise ConfigError(
                "held_out: the configuration holds no tasks out. Set data.eval, or name a suite."
            )
        return config
    made = is_generator(suite.source)
    plain = not suite.columns and not made
    options = config.data.options if made else {}
    if own_options and suite.source not in config.data.sources:
        options = {}
    data = replace(
        config.data,
        train=suite.source,
        eval="",
        holdout_share=0.0,
        duplicates="drop",
        size=tasks or GENERATED,
        options=options,
        prompt_key=config.data.prompt_key if plain else "",
        answer_key=config.data.answer_key if plain else "",
        grader_key=config.data.grader_key if plain else "",
    )
    reward = config.reward if plain else replace(Reward(), timeout=config.reward.timeout)
    return replace(config, data=data, reward=reward, eval=replace(config.eval, tasks=0))


def grader_name(decider: str | None, task: Task) -> str:
    """Return the bare name of the part that decides whether answers are correct; "" if none."""
    name = task.grader or "number" if decider == ROW else decider or ""
    return name.partition("(")[0]


def check_names(names: Sequence[str]) -> None:
    twice = [name for name in names if names.count(name) > 1]
    if not names:
        raise ConfigError("--suite names nothing. Write for example --suite gsm8k,math500.")
    if twice:
        raise ConfigError(f"--suite names {twice[0]!r} twice. Name each once.")
