"""Tasks from JSON lines. A file with malformed rows is refused as a whole, its lines named."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.errors import DataError, nearest
from groupwise.records import Task

SHOWN = 5  # malformed rows that a message lists
SUFFIXES = (".jsonl", ".jsonl.gz")


def read_jsonl(
    path: str | Path,
    prompt_key: str = "prompt",
    answer_key: str = "answer",
    *,
    require_answers: bool = False,
) -> list[Task]:
    """One task a line; columns other than prompt and answer reach the reward.

    With `require_answers`, a row without a usable answer is malformed. Otherwise answers are taken
    where they are and None elsewhere.
    """
    lines = list(_lines(Path(path).expanduser()))
    if not lines:
        raise DataError(f"{path} has no rows. Write one JSON object a line, or name another file.")
    rows: list[dict[str, Any]] = []
    problems: list[tuple[int, str, str]] = []  # line number, what is wrong, the line
    for number, line in lines:
        row, why = _row(line, prompt_key, answer_key if require_answers else None)
        rows.append(row)
        if why:
            problems.append((number, why, line))
    if problems:
        keys = (prompt_key, answer_key) if require_answers else (prompt_key,)
        raise DataError(_complaint(path, rows, problems, keys))
    return [_task(number, row, prompt_key, answer_key) for number, row in enumerate(rows)]


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A prompt as one string, for comparing and showing; never for the model."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _task(number: int, row: Mapping[str, Any], prompt_key: str, answer_key: str) -> Task:
    prompt = row[prompt_key]
    columns = {key: value for key, value in row.items() if key not in (prompt_key, answer_key)}
    if answer_key in row and answer_key != "answer":
        # Reward functions of other tools ask for the column by the name that the file gives it.
        columns[answer_key] = row[answer_key]
    return Task(
        id=number,
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        answer=row.get(answer_key),
        columns=columns,
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered from 1, blank ones left out."""
    if path.is_dir():
        raise DataError(f"{path} is a folder. Name one {' or '.join(SUFFIXES)} file in it.")
    if not path.is_file():
        beside = [f.name for f in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = f" {nearest(path.name, beside)}" if 0 < len(beside) <= 50 else ""
        raise DataError(f"There is no file {path}.{hint}")
    if not path.name.endswith(SUFFIXES):
        raise DataError(
            f"{path} is none of {', '.join(SUFFIXES)}. Write its rows as JSON lines: one object a "
            "line."
        )
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                # Only line feeds end a line: str.splitlines would cut prompts at rarer characters.
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if line:
                    yield number, line
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, line {number}, is no UTF-8: {error.reason} at byte {error.start}. Convert "
            "the file to UTF-8."
        ) from error
    except (OSError, EOFError) as error:  # no permission, a torn or fake .gz
        raise DataError(
            f"{path} can't be read behind line {number}: {error}. Fetch or write it again."
        ) from error


def _row(line: str, prompt_key: str, answer_key: str | None) -> tuple[dict[str, Any], str]:
    """A line's object, and what is wrong with it ('' if nothing is)."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {}, f"no JSON ({error})"
    if not isinstance(row, dict):
        return {}, f"a JSON {type(row).__name__} instead of an object"
    why = _prompt_problem(row, prompt_key)
    if not why and answer_key is not None:
        why = _answer_problem(row, answer_key)
    return row, why


def _prompt_problem(row: Mapping[str, Any], key: str) -> str:
    if key not in row:
        return f"no column {key!r}"
    prompt = row[key]
    if isinstance(prompt, str):
        texts = [prompt]
    elif isinstance(prompt, list):
        for message in prompt:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                return f"a message in {key!r} that is no object with a role"
            if not isinstance(message.get("content"), str):
                return f"a message in {key!r} whose content is no string"
        texts = [message["content"] for message in prompt]
    else:
        kind = "null" if prompt is None else f"of type {type(prompt).__name__}"
        return f"{key!r} is {kind}, not a string or a list of messages"
    if not any(text.strip() for text in texts):
        return f"{key!r} is empty"
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return f"half of a surrogate pair in {key!r}, which is no character"
    return ""


def _answer_problem(row: Mapping[str, Any], key: str) -> str:
    if key not in row:
        return f"no column {key!r}"
    answer = row[key]
    if answer is None or (isinstance(answer, str) and not answer.strip()) or answer in ([], {}):
        return f"{key!r} is empty"
    return ""


def _complaint(
    path: str | Path,
    rows: Sequence[Mapping[str, Any]],
    problems: Sequence[tuple[int, str, str]],
    keys: Sequence[str],
) -> str:
    columns = {key for row in rows for key in row}
    for key, setting in zip(keys, ("data.prompt_key", "data.answer_key"), strict=False):
        if columns and key not in columns:
            need = "" if setting == "data.prompt_key" else ", which the reward reads"
            return (
                f"No row of {path} has a column {key!r}{need}. Set {setting} to the right one. "
                f"{nearest(key, columns)}"
            )
    listed = [f"  line {number}: {why}: {_short(line)}" for number, why, line in problems[:SHOWN]]
    if len(problems) > SHOWN:
        listed.append(f"  and {len(problems) - SHOWN} more")
    return "\n".join(
        [
            f"{path} has {len(problems)} malformed of {len(rows)} rows:",
            *listed,
            "Mend or delete these lines.",
        ]
    )


def _short(text: str, width: int = 100) -> str:
    return text if len(text) <= width else f"{text[:width]}..."
