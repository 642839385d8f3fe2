"""`groupwise init`: five questions, or flags, and a commented configuration that runs."""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.commands import machine
from groupwise.commands.absent import there
from groupwise.commands.init_turns import (
    GAMES,
    NO_TURNS,
    files_of,
    line,
    refused_turns,
    rewards,
    turn_lines,
)
from groupwise.commands.shared import warn
from groupwise.errors import ConfigError, GroupwiseError

# And the reward that fits.
GENERATORS = {"arithmetic": "number", "chain": "number", "countdown": "countdown",
              **dict.fromkeys(GAMES, "environment")}  # fmt: skip
# Of an answer, or of all turns of a game; 4 are enough for a number.
TINY_TOKENS = {"chain": 28, "countdown": 16, "guess": 80, "wordle": 48, "tictactoe": 16}
TINY = "tiny"
# Parameters, and the rate that a model of at most so many takes when all its weights are trained.
RATES = ((3e8, "1e-5"), (1e9, "5e-6"), (3e9, "3e-6"))
LARGE = "1e-6"
INSTRUCTION = "{prompt} Think step by step, and end with the answer."


@dataclass(frozen=True)
class InitQuestion:
    key: str
    text: str


QUESTIONS = (
    InitQuestion(
        "model",
        "Which model? A Hugging Face folder, a .gguf file, an id such as Qwen/Qwen2.5-0.5B, or "
        "tiny (made here).",
    ),
    InitQuestion(
        "data",
        "Which prompts? A file with prompts and answers, arithmetic, chain, countdown, or a game: "
        f"{', '.join(GAMES)}.",
    ),
    InitQuestion(
        "turns",
        "Who answers between turns? none; tools: calculator, python, search(folder='FOLDER'); "
        "tries, which says right or wrong; or your file.py:Class. Games have their own.",
    ),
    InitQuestion("reward", "What is right? number, exact, countdown, or your file.py:function."),
    InitQuestion("device", "Where? auto (a GPU if there is one), cpu or cuda."),
)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "init",
        help="ask five questions, write a configuration",
        example="groupwise init mine.toml --model tiny --data arithmetic",
    )
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
    """Return all answers: given, asked for on a terminal, or by default (which is said)."""
    answers = dict(given)
    for question in QUESTIONS:
        if question.key in answers:
            continue
        usual = default(question.key, answers)
        answers[question.key] = ask(question, usual) if sys.stdin.isatty() else usual
    assumed = [key for key in answers if key not in given]
    if assumed and not sys.stdin.isatty():
        taken = ", ".join(f"--{key} {answers[key]}" for key in assumed)
        print(f"Not answered, so the defaults hold: {taken}.", file=sys.stderr)
    for key, answer in answers.items():
        check_answer(key, answer)
    return answers


def default(key: str, answers: dict[str, str]) -> str:
    """Return the default that fits the answers so far."""
    if key == "model":
        return TINY
    if key == "data":
        return "arithmetic"
    if key == "turns":
        return answers["data"] if answers["data"] in GAMES else NO_TURNS
    if key == "reward" and rewards(answers["turns"]):
        return "environment"
    if key == "reward":
        return GENERATORS.get(answers["data"], "row" if ":" in answers["data"] else "number")
    return "cpu" if answers["model"] == TINY else "auto"


def ask(question: InitQuestion, usual: str) -> str:
    """Ask until the answer is possible; a file that is missing must be named twice."""
    before = ""
    while True:
        print(f"{question.text} [{usual}]\n> ", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline().strip() or usual
        try:
            check_answer(question.key, answer)
        except ConfigError as error:
            print(error, file=sys.stderr)
            continue
        absent = missing({question.key: answer})
        if not absent or answer == before:
            return answer
        before = answer
        print(f"{absent[0]} is not there. Type it again if it will be.", file=sys.stderr)


def check_answer(key: str, answer: str) -> None:
    """Refuse what no configuration could hold. Files may come later."""
    from groupwise.config.values import FIELDS, checked

    if key == "device":
        checked(key, FIELDS["model.device"], answer)
    if key == "turns" and (why := refused_turns(answer)):
        raise ConfigError(why)
    if key == "reward" and ".py:" not in answer:
        from groupwise.graders.rubric import Grader

        try:
            Grader({answer: 1.0})
        except GroupwiseError as error:
            raise ConfigError(str(error)) from None


def generated(data: str) -> bool:
    return data in GENERATORS or data.startswith("reasoning_gym:")


def missing(answers: dict[str, str]) -> list[str]:
    """Return the files that are named and missing; ids are on a hub."""
    from groupwise.hub import names_data, names_model

    model, data, reward = (answers.get(key, "") for key in ("model", "data", "reward"))
    named = ["" if model == TINY or names_model(model) else model]
    named.append("" if generated(data) or names_data(data) else data.rpartition(":")[2])
    named.append(reward.rpartition(":")[0] if ".py:" in reward else "")
    named += files_of(answers.get("turns", NO_TURNS))
    return [name for name in named if name and not there(name)]


# --- the configuration ------------------------------------------------------------------------


def configuration(answers: dict[str, str]) -> str:
    """Write every setting that a first run may want to change, with its reason."""
    from groupwise.config.writing import toml

    model, data, device = answers["model"], answers["data"], answers["device"]
    tiny = model == TINY
    gpu = device.startswith("cuda") or (device == "auto" and bool(machine.gpus()))
    tokens = TINY_TOKENS.get(data, 4) if tiny else (512 if gpu else 64)
    prompts = 32 if tiny else (64 if gpu else 8)
    lines = [
        "# What you set here is what runs. `groupwise train FILE --dry-run` prints the rest.",
        "",
        line(f"prompts_per_step = {prompts}", "these two set the batch; the rest follows"),
        line("group_size = 8", "completions of each prompt"),
        "steps = 200",
        "",
        "[recipe]",
        line('name = "dr_grpo"', "`groupwise recipes --choose` finds the one for your task"),
        line(f"aggregation.length = {tokens}", "the same as engine.max_tokens"),
        "",
        "[model]",
        f"path = {toml(model)}",
        f"device = {toml(device)}",
        line('dtype = "auto"', "bfloat16 on a GPU that has it, else float32"),
        "",
        "[data]",
        f"train = {toml(data)}",
        *_data_lines(model, data),
        *turn_lines(answers["turns"], tiny=tiny),
        "",
        "[reward.parts]",
        line(f"{toml(answers['reward'])} = 1.0", "its weight; more parts add up"),
        "",
        "[engine]",
        line(f"max_tokens = {tokens}", "of an answer, all turns; longer ones are cut off"),
        "",
        "[optim]",
        *_rate_lines(model),
        "warmup_steps = 10",
        "",
        "[eval]",
        line("every = 20", "steps; also before the first and after the last"),
        line("temperature = 1.0", "as in training; 0 is greedy"),
        "",
        "[checkpoint]",
        line("every_seconds = 600", "a run that was killed goes on from here, to the same bits"),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _data_lines(model: str, data: str) -> list[str]:
    from groupwise.config.writing import toml

    found = []
    if data == "arithmetic":
        found.append(line("options = { digits = 1, terms = 3 }", "7+5+9= -> 21"))
    if data == "guess" and model == TINY:
        found.append(line("options = { guesses = 4 }", "of the rounds that its start is shown"))
    if not generated(data):
        found.append(line("holdout_share = 0.05", "for accuracy; or eval = a file of its own"))
    if model != TINY and has_chat_template(model):
        found.append(line('template = "chat"', "the model's own, applied once"))
        if data in GENERATORS:
            found.append(f"instruction = {toml(INSTRUCTION)}")
    return found


def _rate_lines(model: str) -> list[str]:
    """Return the learning rate with its comment: small models take larger steps."""
    if model == TINY:
        return [line("learning_rate = 7e-4", "so small a model takes large steps")]
    count = parameters(model)
    rate = LARGE if count is None else next((r for most, r in RATES if count <= most), LARGE)
    why = "of a size not known: the rate of large ones" if count is None else f"for {_size(count)}"
    return [
        line(f"learning_rate = {rate}", f"{why}; smaller models take larger steps"),
        "# With adapter.rank above 0, where few weights learn, take ten times as much.",
    ]


def parameters(model: str) -> float | None:
    """Count the parameters: of a model on this disk by its shape, of others by their name."""
    from groupwise.errors import ModelError
    from groupwise.model.cost import parameters as counted
    from groupwise.model.formats.checkpoint import stored_shape

    if Path(model).expanduser().exists():
        try:
            shape = stored_shape(Path(model).expanduser())
        except ModelError:  # training says why
            shape = None
        if shape is not None:
            return float(counted(shape))
    said = re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)([BbMm])(?![A-Za-z0-9])", Path(model).name)
    return float(said[-1][0]) * (1e9 if said[-1][1] in "Bb" else 1e6) if said else None


def _size(count: float) -> str:
    return f"{count / 1e9:.2g}B parameters" if count >= 1e9 else f"{count / 1e6:.3g}M parameters"


def has_chat_template(name: str) -> bool:
    """Return whether a model has a chat template, by its files or else by its name."""
    from groupwise.hub import names_model

    model = Path(name).expanduser()
    if model.suffix == ".gguf" or names_model(name):
        words = re.split(r"[-_.@/]", model.name.lower())
        return not {"instruct", "chat", "it"}.isdisjoint(words)
    if any((model / f"chat_template.{kind}").is_file() for kind in ("jinja", "json")):
        return True
    settings = model / "tokenizer_config.json"
    return settings.is_file() and '"chat_template"' in settings.read_text("utf-8", "replace")


def check(text: str) -> None:
    """Check the configuration as `groupwise train --dry-run` would."""
    from groupwise import config
    from groupwise.stages.checks import check_config

    for doubt in check_config(config.load(tomllib.loads(text))):
        warn(doubt)
