"""The columns of a row that are prompt and answer: named by the user, or recognised."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MISSING: Any = object()
PROMPTS = ("prompt", "question", "problem")
ANSWERS = ("answer", "ground_truth", "solution")
VERL_ANSWER = "reward_model.ground_truth"


@dataclass(frozen=True)
class Layout:
    """Names of columns, or dotted paths into them: `reward_model.ground_truth`."""

    prompt: str
    answer: str
    kind: str = ""  # whose rows these are; "" where the user said, or where there is nothing to say
    answered: bool = True
    whole: bool = False  # a conversation, whose beginning is the prompt

    def __str__(self) -> str:
        answers = f"answers from {self.answer!r}" if self.answered else "no answers to grade by"
        prompts = "the beginnings of 'messages'" if self.whole else f"from {self.prompt!r}"
        return f"{self.kind}: prompts {prompts}, {answers}"


def recognise(row: Mapping[str, Any], prompt_key: str = "", answer_key: str = "") -> Layout:
    """Recognise the layout of rows like this one. What the user names takes precedence."""
    prompt = prompt_key or _first(row, PROMPTS)
    verl = lookup(row, VERL_ANSWER) is not MISSING
    answer = answer_key or (VERL_ANSWER if verl else _first(row, ANSWERS))
    kind = "" if prompt_key and answer_key else _kind(row, prompt, answer)
    return Layout(prompt, answer, kind, lookup(row, answer) is not MISSING, _whole(row, prompt))


def lookup(row: Mapping[str, Any], key: str) -> Any:
    """Return a column by its name, or the value at a dotted path; MISSING if there is none."""
    if key in row:
        return row[key]
    head, dot, rest = key.partition(".")
    inner = row.get(head)
    return lookup(inner, rest) if dot and isinstance(inner, Mapping) else MISSING


def names_in(row: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return every name by which `lookup` finds something."""
    found = []
    for key, value in row.items():
        found.append(prefix + key)
        if isinstance(value, Mapping):
            found += names_in(value, f"{prefix}{key}.")
    return found


def parse_info(row: dict[str, Any]) -> dict[str, Any]:
    """Read `info` from JSON, as verifiers stores it so that different ones fit one table."""
    info = row.get("info")
    if isinstance(info, str) and info.lstrip().startswith("{"):
        try:
            return {**row, "info": json.loads(info)}
        except ValueError:
            return row
    return row


def with_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """Split the prompt off two whole conversations, or texts, that begin alike.

    Rows that have a prompt, or no two answers with a common beginning, stay as they are.
    """
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if any(name in row for name in PROMPTS):
        return row
    if isinstance(chosen, str) and isinstance(rejected, str):
        same = _alike(chosen, rejected)
        # At a blank, which goes with the word behind it: half a word is no prompt.
        cut = max(chosen.rfind(blank, 0, same) for blank in " \n\t")
        if cut > 0:
            return row | {
                "prompt": chosen[:cut], "chosen": chosen[cut:], "rejected": rejected[cut:]
            }  # fmt: skip
    elif isinstance(chosen, list) and isinstance(rejected, list):
        same = min(_alike(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
        if same > 0:
            return row | {
                "prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:]
            }  # fmt: skip
    return row


def with_conversation(row: dict[str, Any]) -> dict[str, Any]:
    """Give a whole conversation, or a text that is learned as it is, its prompt.

    Of a conversation it is what stands before the assistant's first turn, of a text the text.
    """
    if any(name in row for name in PROMPTS):
        return row
    messages, text = row.get("messages"), row.get("text")
    if isinstance(messages, list) and messages:
        roles = [m.get("role") if isinstance(m, Mapping) else None for m in messages]
        first = roles.index("assistant") if "assistant" in roles else len(messages)
        return row | {"prompt": messages[: max(first, 1)]}
    if isinstance(text, str):
        return row | {"prompt": text}
    return row


def _alike(one: Sequence[Any], two: Sequence[Any]) -> int:
    """Count how many things two sequences have in common from the start."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(two)))


def _whole(row: Mapping[str, Any], prompt: str) -> bool:
    """Return whether the prompt is one that `with_conversation` gave the row."""
    messages, found = row.get("messages"), lookup(row, prompt)
    return (
        isinstance(messages, list) and isinstance(found, list) and messages[: len(found)] == found
    )


def _first(row: Mapping[str, Any], names: Sequence[str]) -> str:
    return next((name for name in names if name in row), names[0])


def _kind(row: Mapping[str, Any], prompt: str, answer: str) -> str:
    if answer == VERL_ANSWER:
        return "verl rows"
    if answer == "answer" and answer in row and ("info" in row or "task" in row):
        return "verifiers rows"
    if isinstance(lookup(row, prompt), list):
        return "rows with messages"
    return "" if (prompt, answer) == ("prompt", "answer") else "questions and answers"
