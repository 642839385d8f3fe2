"""Turns by a chat template, whichever it is: what stands between them, found by rendering.

A small conversation is rendered with and without what is said to the policy; what is more behind
the policy's turn is the bridge. It is encoded alone, so that nothing of what was sampled is ever
encoded again.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.envs.escapes import Breaker, Marks, break_for, in_strings
from groupwise.envs.thoughts import CLOSES, HIDDEN, OPENS, with_thoughts
from groupwise.envs.tool_calls import family
from groupwise.envs.turn_checks import ASKED, HEARD, check_role, check_tools
from groupwise.errors import ModelError
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.records import POLICY, Message

ANSWER, THOUGHT = "Ansis5", "Musthink5"
SYSTEM: Message = {"role": "system", "content": "Be5brief"}
THOUGHTFUL = f"{OPENS}\n{THOUGHT}\n{CLOSES}\n\n{ANSWER}"
SHOWN = 60  # characters of a text that is quoted


@dataclass(frozen=True)
class Between:
    """A rendered conversation, cut where the policy's last turn ends."""

    before: str  # what the policy reads
    said: str  # its turn, without the token that ends it
    end: str  # this token
    behind: str  # what it reads next
    messages: tuple[Message, ...]  # the turn, and what was said then


class Unanswered(ModelError):
    """A message that a template refuses or leaves out, the way the conversation stands."""


def chat_turns(
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    roles: Sequence[str] = (),
    name: str = "the model's chat template",
    calls: str = "",
    keep_thoughts: bool = False,
) -> ChatTurns:
    """Return turns by the tokenizer's chat template; refuse one with which episodes go wrong.

    `roles` are those that speak to the policy: "tool" where there are tools, else "user". `calls`
    is how tools are called, a name of `tool_calls.reader`; without it the template says so itself.
    With `keep_thoughts` a copy of the template is used that keeps thoughts of earlier turns.
    """
    if tokenizer.template is None:
        raise ModelError(tokenizer.no_template)
    if tools and not calls:
        check_tools(tokenizer.template, name)
    calls = calls or _calls_of(tokenizer, refuse=bool(tools))
    found = ChatTurns(tokenizer, tools, name, calls, keep_thoughts)
    found.marks.check(name)
    for role in roles or (("tool",) if tools else ("user",)):
        found.check(role)
    return found


class ChatTurns:
    """Turns in the form of a chat template, made by `chat_turns`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]],
        name: str,
        calls: str,
        keep_thoughts: bool,
    ) -> None:
        template = tokenizer.template or ""
        self.name, self.calls, self.tools = name, calls, tuple(tools)
        self.stop: tuple[str, ...] = ()
        self.tokenizer = copy.copy(tokenizer)
        self.tokenizer.template = with_thoughts(template) if keep_thoughts else template
        self.marks = Marks(tokenizer, template, HIDDEN if keep_thoughts else ())
        self.answer = THOUGHTFUL if CLOSES in template else ANSWER
        self.end_ids: tuple[int, ...] = tokenizer.eos_ids  # the template's own first, once checked
        self._checked: dict[str, set[bool]] = {}  # roles that speak -> with a system message or not
        self._system = False
        self._calling: dict[tuple[str, ...], bool] = {}  # roles -> whether calls stand before them
        self.literals: set[str] = set()  # what stands around messages in plain letters
        self._break = Breaker((), "")

    # --- what an episode needs ---

    def opening(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Return the first prompt, which ends where the policy's first turn begins."""
        self._see_system(messages)
        if tools and not self.tools:  # of a program, which shows them when it asks
            check_tools(self.tokenizer.template or "", self.name)
        ids = self.marks.encode(self.render(messages, tools or self.tools))
        bos = self.tokenizer.bos_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise ModelError(
                f"{self.name}: a conversation starts with two BOS tokens "
                f"({self.tokenizer.decode([bos])!r}): its first message and the template both "
                "write one, or the template writes two. Remove one of them."
            )
        return tuple(ids)

    def bridge(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return what stands between a turn's end and the beginning of the next."""
        for role in {str(message.get("role")) for message in messages}:
            if self._system not in self._checked.get(role, ()):
                self.check(role)
        found = self.between([ASKED], messages)
        return tuple(self.encode_behind(found.end, found.behind))

    def closing(self) -> tuple[int, ...]:
        """Return the token that ends a turn which a limit has cut."""
        return self.end_ids[:1]

    # --- checks ---

    def check(self, role: str) -> None:
        """Refuse the template where messages of a role would not simply follow a turn."""
        if role != POLICY:  # whoever speaks in its name has a turn like the policy's
            check_role(self, role, [SYSTEM, ASKED] if self._system else [ASKED])
        self._checked.setdefault(role, set()).add(self._system)

    def _see_system(self, messages: Sequence[Message]) -> None:
        if not self._system and messages and messages[0].get("role") == "system":
            self._system = True
            for role in list(self._checked):
                self.check(role)

    def learn_end(self, end: str) -> None:
        """Take note of the token with which the template ends turns."""
        own = self.marks.ids[end]
        self.end_ids = tuple(dict.fromkeys((own, *self.tokenizer.eos_ids)))

    def learn_words(self, behind: str) -> None:
        """Take note of what stands around a message in plain letters: others may not say it.

        A role's name alone is not of that kind: it means something behind a token only.
        """
        before, _, after = behind.partition(HEARD)
        if before.endswith('"') and after.startswith('"'):
            return  # a text of JSON, which says its own end
        closing = self.marks.first(after)
        edges = [
            *before[self.marks.last_end(before) :].strip().splitlines()[-1:],
            *after[: closing.start() if closing else len(after)].strip().splitlines()[:1],
        ]
        edges = [edge.strip() for edge in edges]
        self.literals |= {edge for edge in edges if len(edge) > 1 and re.search(r"[^\w\s]", edge)}
        by = break_for(self.literals, lambda text: bool(self.tokenizer.encode(text)))
        if by is None:
            raise ModelError(
                f"{self.name} marks turns by plain letters ({', '.join(sorted(self.literals))}), "
                "and nothing is left to break these up with where a tool says them. Use a template "
                "whose turns begin and end with tokens of their own."
            )
        self._break = Breaker(self.literals, by)

    # --- rendering ---

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the template's text, with all that looks like its marks in messages hidden."""
        shown = self.marks.hidden(list(tools)) or None
        try:
            return self.tokenizer.render([self._safe(each) for each in messages], tools=shown)
        except ModelError as error:
            raise Unanswered(f"{self.name}: {error}") from error

    def _safe(self, message: Message) -> dict[str, Any]:
        own = message.get("role") == POLICY
        broken = dict(message)
        if not own and "content" in broken:
            broken["content"] = in_strings(self._break, broken["content"])
        return dict(self.marks.hidden(broken, own=own))

    def encode_behind(self, end: str, text: str) -> list[int]:
        """Return the ids of what stands behind the token that ends a turn.

        Some tokenizers encode the beginning of a text otherwise, so the token stands there.
        """
        ids = self.marks.encode(end + text)
        if ids[:1] != [self.marks.ids[end]]:
            raise ModelError(
                f"{self.name}: the tokenizer does not begin {end + text[:SHOWN]!r} with the token "
                f"{end!r}. Use the tokenizer that belongs to the model."
            )
        return ids[1:]

    def between(self, asked: Sequence[Message], said: Sequence[Message]) -> Between:
        """Render one turn of the policy behind `asked`, and what is said to it then.

        Templates that want a tool's answer behind a call of it get one.
        """
        roles = tuple(str(message.get("role")) for message in said)
        if roles in self._calling:
            return self._between(asked, said, self._calling[roles])
        try:
            found, calling = self._between(asked, said, False), False
        except Unanswered:
            if "tool" not in roles:
                raise
            try:
                found, calling = self._between(asked, said, True), True
            except Unanswered:
                found, calling = self._between(asked, said, False), False  # which says why
        self._calling[roles] = calling
        return found

    def _between(self, asked: Sequence[Message], said: Sequence[Message], calling: bool) -> Between:
        turn, heard = _called(said) if calling else (_answered(self.answer), tuple(said))
        before = self.render(asked, self.tools)
        whole = self.render([*asked, turn, *heard], self.tools)
        start = len(before)
        if not calling:
            start = whole.find(ANSWER, _common(before, whole)) + len(ANSWER)
            self._check_kept(before, whole, start)
        elif not whole.startswith(before):
            raise ModelError(self._changed(before, whole))
        mark = self.marks.first(whole, start)
        while calling and mark is not None and not self._ends(mark[0]):
            mark = self.marks.first(whole, mark.end())
        words = "" if mark is None or calling else whole[start : mark.start()].strip()
        if mark is None or words or not self._ends(mark[0]):
            raise ModelError(self._endless(whole[start:]))
        behind = whole[mark.end() :]
        lost = next((each for each in heard if each.get("content") == HEARD), None)
        if lost is not None and HEARD not in behind:
            raise Unanswered(f"{self.name} leaves out what {lost['role']!r} says. {MEND}")
        return Between(before, whole[len(before) : mark.start()], mark[0], behind, (turn, *heard))

    def _ends(self, mark: str) -> bool:
        return self.marks.ids[mark] in self.tokenizer.eos_ids

    def _check_kept(self, before: str, whole: str, start: int) -> None:
        """Refuse where the policy's words are gone, or what stood before them has changed."""
        if start < len(ANSWER):
            raise Unanswered(f"{self.name} leaves out what the assistant says. {MEND}")
        if self.answer == THOUGHTFUL and THOUGHT not in whole[_common(before, whole) : start]:
            raise ModelError(
                f"{self.name} drops the thoughts of earlier turns: what the policy reads in its "
                "second turn would not be what it wrote in its first. Set "
                "turns.keep_thoughts=true, which uses a copy of the template that keeps them "
                "(docs/turn_templates.md), or take a model that does not think."
            )
        if not whole.startswith(before):
            raise ModelError(self._changed(before, whole))

    def _changed(self, before: str, whole: str) -> str:
        at = _common(before, whole)
        here, there = (self.marks.shown(text[at : at + SHOWN]) for text in (before, whole))
        return (
            f"{self.name} writes the beginning of a conversation otherwise once there is more "
            f"behind it: first {here!r}, then {there!r} (character {at:,}). The policy would have "
            f"read something else than what its episode says. {MEND}"
        )

    def _endless(self, behind: str) -> str:
        ends = ", ".join(repr(self.tokenizer.decode([end])) for end in self.tokenizer.eos_ids)
        return (
            f"{self.name} goes on behind the assistant's words with "
            f"{self.marks.shown(behind[:SHOWN])!r}, and sampling stops at {ends} alone: a turn "
            "would have no end, or one that the template does not write. Add the token that ends a "
            'turn to "eos_token_id" in generation_config.json (a list may stand there), or mend '
            "the template."
        )


MEND = (
    "Give the model a template (chat_template.jinja) that only ever adds at the end, or let the "
    "environment speak in another role."
)


def _calls_of(tokenizer: Tokenizer, *, refuse: bool) -> str:
    """Return how a template's tools are called. Without tools, a program's may come later."""
    try:
        return family(tokenizer.template or "", tokenizer.backend.get_vocab(with_added_tokens=True))
    except ModelError:
        if refuse:
            raise
        return "tags"


def _common(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _answered(words: str) -> Message:
    return {"role": POLICY, "content": words}


def _called(said: Sequence[Message]) -> tuple[Message, tuple[Message, ...]]:
    """Return a turn with a call for each answer of a tool, and the answers, which name theirs."""
    calls: list[dict[str, Any]] = []
    heard = []
    for message in said:
        if message.get("role") != "tool":
            heard.append(message)
            continue
        named = {"name": "tool", "tool_call_id": f"call{len(calls):05}", **message}
        function = {"name": named["name"], "arguments": {}}
        calls.append({"id": named["tool_call_id"], "type": "function", "function": function})
        heard.append(named)
    return {"role": POLICY, "content": "", "tool_calls": calls}, tuple(heard)
