"""Words that others may not say: what opens or closes a turn, broken up where it stands in a text.

A tool's answer that looks like the header of a turn must not become one.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend

from groupwise.errors import ModelError
from groupwise.model.formats.fields import library
from groupwise.model.formats.tokenizer import Tokenizer

BREAKS = (" ", "\\", "-", "_", "'", ".", "0")  # the first that no word has, and the tokenizer knows
TOO_OLD = "Fetch its tokenizer.json again."


class Breaker:
    """A function that breaks words up: a text goes behind the first character of each.

    As the text is in none of the words, none is left and none comes about. Words of one character
    can't be broken.
    """

    def __init__(self, words: Collection[str], by: str, *, any_case: bool = False) -> None:
        self.by = by
        words = [word for word in words if len(word) > 1]
        flags = re.DOTALL | (re.IGNORECASE if any_case else 0)
        self.pattern = re.compile(f"(?={one_of(words)}).", flags) if words else None

    def __call__(self, text: str) -> str:
        return self.pattern.sub(lambda found: found[0] + self.by, text) if self.pattern else text

    def count(self, text: str) -> int:
        """Return how often one of the words begins in a text."""
        return len(self.pattern.findall(text)) if self.pattern else 0


def one_of(words: Collection[str]) -> str:
    """Return a pattern of words that never looks at a character twice."""
    branches: dict[str, set[str]] = {}
    for word in words:
        branches.setdefault(word[:1], set()).add(word[1:])
    ends = branches.pop("", None) is not None
    tails = [re.escape(first) + one_of(rest) for first, rest in sorted(branches.items())]
    if not tails:
        return ""
    joined = tails[0] if len(tails) == 1 and not ends else f"(?:{'|'.join(tails)})"
    return joined + ("?" if ends else "")


def break_for(words: Collection[str], writes: Callable[[str], bool]) -> str | None:
    """Return a character that breaks words up and that the tokenizer can write; None: there is
    none.
    """
    taken = "".join(words).lower()
    return next((each for each in BREAKS if each not in taken and writes(each)), None)


def in_strings(change: Callable[[str], str], value: Any) -> Any:
    """Return a value of JSON with all its strings changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {in_strings(change, k): in_strings(change, each) for k, each in value.items()}
    if isinstance(value, Sequence):
        return [in_strings(change, each) for each in value]
    return value


class Marks:
    """The tokens that structure a conversation, which only the template writes.

    They are the special tokens, and those that the template spells out. Where a text of others has
    their letters, these are hidden while the template is rendered, and encoded as letters.
    """

    def __init__(self, tokenizer: Tokenizer, spelled: str, also: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.backend.get_added_tokens_decoder()
        self.ids: dict[str, int] = {}  # of all marks
        special: list[str] = list(also)
        for number, token in added.items():
            text = token.content
            hard = token.special or number in tokenizer.eos_ids
            if len(text.strip()) > 1 and (hard or text in spelled):
                self.ids[text] = number
                special += [text] * hard
        self._key, self._name = secrets.token_hex(8), secrets.token_hex(8)  # nobody can say them
        self._hide = Breaker([*self.ids, *also], self._key)
        self._hide_special = Breaker(special, self._key)
        self._found = re.compile(one_of(self.ids) or "(?!)")

    def hidden(self, value: Any, *, own: bool = False) -> Any:
        """Hide marks in all strings of a value; in the policy's own words, special ones alone."""
        return in_strings(self._hide_special if own else self._hide, value)

    def shown(self, text: str) -> str:
        """Return a rendered text as people read it."""
        return text.replace(self._key, "")

    def first(self, text: str, start: int = 0) -> re.Match[str] | None:
        """Find the next mark of the template's own."""
        return self._found.search(text, start)

    def last_end(self, text: str) -> int:
        """Return where the last mark of the template's own ends; 0 where there is none."""
        return max((found.end() for found in self._found.finditer(text)), default=0)

    def eats_behind(self, mark: str) -> bool:
        """Tell whether a mark's token takes white space behind it along."""
        added = self.tokenizer.backend.get_added_tokens_decoder()
        return bool(added[self.ids[mark]].rstrip)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text: what is hidden in it becomes letters."""
        marks = self._found.findall(text)
        if self._key not in text:
            ids = self.tokenizer.encode(text)
            known = set(self.ids.values())
            if sum(number in known for number in ids) == len(marks):
                return ids
        renamed, numbers = self._renamed
        named = self._found.sub(lambda found: self._name + found[0], text)
        with library(f"The tokenizer can't encode {text[:80]!r}", "Leave out what it has not."):
            found = renamed.encode(named.replace(self._key, ""), add_special_tokens=False).ids
        return [numbers.get(number, number) for number in found]

    @cached_property
    def _renamed(self) -> tuple[Backend, dict[int, int]]:
        """Return a tokenizer whose marks have names that nobody can say, and the ids of these."""
        with library("The tokenizer can't be copied", TOO_OLD):
            made = json.loads(self.tokenizer.backend.to_str())
            names = {}
            for token in made["added_tokens"]:
                before = token["content"]
                if before in self.ids:
                    token["content"] = self._name + before
                names[token["content"]] = int(token["id"])
            renamed = Backend.from_str(json.dumps(made))
        found = {renamed.token_to_id(name): number for name, number in names.items()}
        return renamed, {new: old for new, old in found.items() if new is not None}

    def check(self, name: str) -> None:
        """Refuse a tokenizer that makes marks of letters even so."""
        said = "x ".join(self.ids)
        try:
            ids = self.encode(self.hidden(said))
        except ModelError:
            return  # a vocabulary without these letters writes no mark with them
        marked = {number: text for text, number in self.ids.items()}
        if wrong := [marked[number] for number in ids if number in marked]:
            raise ModelError(
                f"{name}: the letters of {wrong[0]!r} become this very token, whoever writes "
                "them, so a tool's answer could end a turn. Save the tokenizer so that its model "
                "does not hold its special tokens (they belong to added_tokens alone)."
            )
