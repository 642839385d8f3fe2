"""Templates in plain text: the words around a prompt.

`chat` is none of them: it is the model's own, applied to messages by the tokenizer.
"""

from __future__ import annotations

import re
from pathlib import Path

from groupwise.errors import DataError, nearest
from groupwise.records import Task

PROMPT = "{prompt}"
PLACE = re.compile(r"\{(\w+)\}")
CHAT = ("auto", "chat")  # auto: chat for messages, plain for strings

# DeepSeek-R1 (2501.12948), table 1; the thought is opened as in 2503.20783.
R1_ZERO = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves "
    "it. The Assistant first thinks about the reasoning process in the mind and then provides the "
    "User with the answer. The reasoning process is enclosed within <think> </think> and answer is "
    "enclosed within <answer> </answer> tags, respectively, i.e., <think> reasoning process here "
    f"</think> <answer> answer here </answer>.\nUser: {PROMPT}\nAssistant: <think>"
)
# What Qwen2.5-Math was tuned with (2409.12122).
QWEN_MATH = (
    "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}."
    f"<|im_end|>\n<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
)
TEXTS = {"plain": PROMPT, "r1_zero": R1_ZERO, "qwen_math": QWEN_MATH}


def template_text(name: str) -> str:
    """Return the text with `{prompt}` in it, of a template that is not `chat`; or a file's.

    A line feed at the very end of a file is its editor's, not the prompt's.
    """
    if name in TEXTS:
        return TEXTS[name]
    path = Path(name).expanduser()
    if not path.is_file():
        known = [*CHAT, *TEXTS]
        hint = "There is no such file" if "/" in name or "." in name else nearest(name, known)
        raise DataError(
            f"data.template = {name!r} is none of {', '.join(known)}, nor a file with {PROMPT} in "
            f"it. {hint.rstrip('.')}."
        )
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The template {name} can't be read: {error}.") from error
    if text.count(PROMPT) != 1:
        raise DataError(
            f"The template {name} has {PROMPT} {text.count(PROMPT)} times. Write it once, where "
            "the prompt goes."
        )
    return text


def check_template(name: str) -> None:
    """Refuse a template that does not exist, before a model is loaded."""
    if name not in CHAT:
        template_text(name)


def filled(setting: str, asked: str, task: Task, prompt: str) -> str:
    """Put the prompt and the row's columns where their names stand in braces."""
    known = {**task.columns, "answer": task.answer, "prompt": prompt}

    def value(place: re.Match[str]) -> str:
        found = known.get(place[1])
        if found is None or found == "":
            raise DataError(
                f"Row {task.id} has nothing in column {place[1]!r}, which {setting} puts in. "
                "Add it, or name another column."
            )
        return str(found)

    return PLACE.sub(value, asked)
