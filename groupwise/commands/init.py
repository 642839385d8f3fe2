"""`groupwise init`: four questions, or flags, and a commented configuration that runs."""

from __future__ import annotations

import argparse
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.commands import machine
from groupwise.commands.shared import warn
from groupwise.errors import ConfigError

GENERATORS = {"arithmetic": "number", "countdown": "countdown"}  # and the reward that fits
TINY = "tiny"
INSTRUCTION = "{prompt} Think step by step, and end with the answer."


@dataclass(frozen=True)
class Question:
    key: str
    text: str


QUESTIONS = (
    Question("model", "Which model? A Hugging Face folder, a .gguf file, or tiny (made here)."),
    Question("data", "Which prompts? A file with prompts and answers, arithmetic, or countdown."),
    Question("reward", "What is right? number, exact, countdown, or your file.py:function."),
    Question("device", "Where? cpu or cuda."),
)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("init", help="ask four questions, write a configuration")
    parser.add_argument("path", nargs="?", default="groupwise.toml", help="default: groupwise.toml")
    for question in QUESTIONS:
        parser.add_argument(f"--{question.key}", metavar="X", help=question.text)
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    path = Path(args.path)
    refuse_existing(path)
    given = {q.key: getattr(args, q.key) for q in QUESTIONS if getattr(args, q.key) is not None}
    answers = complete(given)
    for name in missing(answers):
        warn(f"{name} is not there; the configuration is right once it is.")
    made = configuration(answers)
    check(made)
    try:
        with path.open("x", encoding="utf-8") as file:  # never over another
            file.write(made)
    except FileExistsError:
        refuse_existing(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error}. Choose another place.") from None
    print(f"wrote {path}; next:\n  groupwise plan {path}\n  groupwise train {path}")
    return 0


def refuse_existing(path: Path) -> None:
    if path.exists():
        raise ConfigError(f"{path} exists already, and nothing is overwritten. Choose another.")


# --- answers ----------------------------------------------------------------------------------


def complete(given: dict[str, str]) -> dict[str, str]:
    """All four answers: given, asked for on a terminal, or by default (which is said)."""
    answers = dict(given)
    for question in QUESTIONS:
        if question.key in answers:
            continue
        usual = default(question.key, answers)
        answers[question.key] = (ask(question, usual) if sys.stdin.isatty() else "") or usual
    assumed = [key for key in answers if key not in given]
    if assumed and not sys.stdin.isatty():
        taken = ", ".join(f"--{key} {answers[key]}" for key in assumed)
        print(f"Not answered, so the defaults hold: {taken}.", file=sys.stderr)
    if answers["device"].partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"device is {answers['device']!r}; it must be cpu or cuda.")
    return answers


def default(key: str, answers: dict[str, str]) -> str:
    """What fits to the answers so far."""
    if key == "model":
        return TINY
    if key == "data":
        return "arithmetic"
    if key == "reward":
        return GENERATORS.get(answers["data"], "row" if ":" in answers["data"] else "number")
    return "cuda" if answers["model"] != TINY and machine.gpus() else "cpu"


def ask(question: Question, usual: str) -> str:
    print(f"{question.text} [{usual}]\n> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()


def generated(data: str) -> bool:
    return data in GENERATORS or data.startswith("reasoning_gym:")


def missing(answers: dict[str, str]) -> list[str]:
    """Files that are named and not there."""
    named = [answers["model"] if answers["model"] != TINY else ""]
    named.append("" if generated(answers["data"]) else answers["data"].rpartition(":")[2])
    named.append(answers["reward"].rpartition(":")[0] if ".py:" in answers["reward"] else "")
    return [name for name in named if name and not Path(name).expanduser().exists()]


# --- the configuration ------------------------------------------------------------------------


def configuration(answers: dict[str, str]) -> str:
    """Every setting that a first run may want to change, with why."""
    from groupwise.config.writing import toml

    model, data, device = answers["model"], answers["data"], answers["device"]
    tiny, gpu = model == TINY, device.startswith("cuda")
    tokens = (16 if data == "countdown" else 4) if tiny else (512 if gpu else 64)
    prompts = 32 if tiny else (64 if gpu else 8)
    lines = [
        "# What you set here is what runs. `groupwise train FILE --dry-run` prints the rest.",
        "",
        _line(f"prompts_per_step = {prompts}", "these two set the batch; the rest follows"),
        _line("group_size = 8", "completions of each prompt"),
        "steps = 200",
        "",
        "[recipe]",
        _line('name = "dr_grpo"', "`groupwise recipes --choose` finds the one for your task"),
        _line(f"aggregation.length = {tokens}", "the same as engine.max_tokens"),
        "",
        "[model]",
        f"path = {toml(model)}",
        f"device = {toml(device)}",
        _line('dtype = "bfloat16"', "the optimizer keeps float32 masters") if gpu
        else _line('dtype = "float32"', "on a CPU nothing else is faster"),
        "",
        "[data]",
        f"train = {toml(data)}",
        *_data_lines(model, data),
        "",
        "[reward.parts]",
        _line(f"{toml(answers['reward'])} = 1.0", "its weight; more parts add up"),
        "",
        "[engine]",
        _line(f"max_tokens = {tokens}", "of an answer; longer ones are cut off"),
        "",
        "[optim]",
        _line("learning_rate = 7e-4", "so small a model takes large steps") if tiny
        else _line("learning_rate = 1e-6", "models below a billion parameters take up to 2e-5"),
        "warmup_steps = 10",
        "",
        "[eval]",
        _line("every = 20", "steps; also before the first and after the last"),
        _line("temperature = 1.0", "as in training; 0 is greedy"),
        "",
        "[checkpoint]",
        _line("every_seconds = 600", "a run that was killed goes on from here, to the same bits"),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _data_lines(model: str, data: str) -> list[str]:
    from groupwise.config.writing import toml

    found = []
    if data == "arithmetic":
        found.append(_line("options = { digits = 1, terms = 3 }", "7+5+9= -> 21"))
    if not generated(data):
        found.append(_line("holdout_share = 0.05", "for accuracy; or eval = a file of its own"))
    if model != TINY and speaks(Path(model)):
        found.append(_line('template = "chat"', "the model's own, applied once"))
        if data in GENERATORS:
            found.append(f"instruction = {toml(INSTRUCTION)}")
    return found


def _line(setting: str, comment: str) -> str:
    return f"{setting:<34} # {comment}"


def speaks(model: Path) -> bool:
    """Whether a model has a chat template, as far as its files tell."""
    if model.suffix == ".gguf":
        return "instruct" in model.name.lower() or "chat" in model.name.lower()
    if any((model / f"chat_template.{kind}").is_file() for kind in ("jinja", "json")):
        return True
    settings = model / "tokenizer_config.json"
    return settings.is_file() and '"chat_template"' in settings.read_text("utf-8", "replace")


def check(text: str) -> None:
    """As `groupwise train --dry-run` would."""
    from groupwise import config

    for doubt in config.check(config.load(tomllib.loads(text))):
        warn(doubt)
