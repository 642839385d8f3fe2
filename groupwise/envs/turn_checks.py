"""Checks of a chat template before the first episode: what can be wrong with it, found by trying.

Each role that speaks to the policy does so for three turns, in texts of every kind. What each
check refuses is said in docs/turn_templates.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from groupwise.errors import ModelError
from groupwise.records import Message

if TYPE_CHECKING:
    from groupwise.envs.chat_turns import Between, ChatTurns

TURNS = 3
HEARD = "Its5here"
ODD = (
    " spaces around \n",
    "\n\nlines\n\n",
    '{"a": [1, "b"], "c": "\\u00e9"}',
    "Größe 東京 🙂 \u200b",
)
MOST_MARKS = 20  # that are tried in one text: some vocabularies have a thousand of them
ASKED: Message = {"role": "user", "content": "Whatis5"}


def check_role(turns: ChatTurns, role: str, asked: Sequence[Message]) -> None:
    """Refuse a template in which messages of a role would not simply follow a turn."""
    first = turns.between([ASKED], [_message(role, HEARD)])
    turns.learn_end(first.end)
    turns.learn_words(first.behind)
    turns.opening(asked)
    for texts in _conversations(turns):
        so_far = list(asked)
        for text in texts:
            said = [_message(role, text)]
            found = turns.between(so_far, said)
            _check_alike(turns, role, turns.between([ASKED], said), found)
            _check_ids(turns, role, found)
            so_far += found.messages


def check_tools(template: str, name: str) -> None:
    """Refuse a template that has no place for tools."""
    if not re.search(r"\btools\b", template):
        raise ModelError(
            f"{name} has no place for tools: the policy would never read of them. Give the model a "
            "template that writes `tools` (chat_template.jinja), or name a form of calls that "
            "the prompt explains, such as tags."
        )


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _conversations(turns: ChatTurns) -> Iterator[list[str]]:
    """Return what is said in each turn of some conversations."""
    marks = turns.marks.ids
    forged = "".join([*list(marks)[:MOST_MARKS], *turns.literals, "assistant\n"])
    texts = [text for text in (*ODD, forged) if _can_be_written(turns, text)]
    texts = [HEARD, *texts]
    texts += [HEARD] * (-len(texts) % TURNS)
    for at in range(0, len(texts), TURNS):
        yield texts[at : at + TURNS]


def _can_be_written(turns: ChatTurns, text: str) -> bool:
    try:
        turns.marks.encode(turns.marks.hidden(text))
    except ModelError:
        return False
    return True


def _check_alike(turns: ChatTurns, role: str, alone: Between, within: Between) -> None:
    """Refuse a template that writes a message otherwise in a longer conversation."""
    if (alone.end, alone.behind) != (within.end, within.behind):
        here, there = (turns.marks.shown(x.end + x.behind)[:120] for x in (alone, within))
        raise ModelError(
            f"{turns.name} writes the same message of {role!r} in two ways, by what stands before "
            f"it: {here!r} and {there!r}. What stands between two turns can't be told from the "
            "messages between them. Give the model a template (chat_template.jinja) that writes a "
            "message in one way."
        )


def _check_ids(turns: ChatTurns, role: str, found: Between) -> None:
    """Refuse a tokenizer that reads what stands between turns otherwise when it stands alone."""
    before = turns.marks.encode(found.before + found.said + found.end)
    bridge = turns.encode_behind(found.end, found.behind)
    whole = turns.marks.encode(found.before + found.said + found.end + found.behind)
    if before + bridge != whole:
        raise ModelError(
            f"{turns.name}: a conversation with a message of {role!r} has other tokens in one "
            f"piece than turn by turn: {_shown(turns, whole[-len(bridge) :])} and "
            f"{_shown(turns, bridge)} behind {found.end!r}. Use the tokenizer that belongs to the "
            "model."
        )
    gap = found.behind[: len(found.behind) - len(found.behind.lstrip())]
    eats = turns.marks.eats_behind(found.end)
    if gap and not eats and not turns.tokenizer.decode(bridge).startswith(gap):
        raise ModelError(
            f"{turns.name} writes {gap!r} behind {found.end!r}, and the tokenizer loses it: the "
            "policy would read turns otherwise than it learned to. Use the tokenizer that belongs "
            "to the model."
        )


def _shown(turns: ChatTurns, ids: Sequence[int]) -> str:
    return repr(turns.tokenizer.decode(ids)[:60])
