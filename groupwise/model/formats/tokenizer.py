"""Text and messages to token ids and back, from the files of a Hugging Face folder.

Special tokens stay in decoded text: a reward that reads it must see what the policy wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from groupwise.errors import ModelError
from groupwise.model.formats.fields import (
    TEXT,
    FieldRule,
    Rules,
    check,
    either,
    library,
    several,
    table,
    whole,
)
from groupwise.model.formats.rendering import render

Message = Mapping[str, Any]


NO_TEMPLATE = (
    "The model has no chat template, so messages have no text form. Give the prompt as a string, "
    "or add chat_template.jinja to the model's folder."
)


def _is_added_token(x: Any) -> bool:
    return isinstance(x, dict) and (x.get("content") is None or TEXT.fits(x["content"]))


def _is_named_template(x: Any) -> bool:
    return isinstance(x, dict) and all(TEXT.fits(x.get(k)) for k in ("name", "template"))


UNDECODED = ("The tokenizer can't decode tokens", "Fetch its tokenizer.json again.")

_NAME = either(TEXT, FieldRule('a table with a text as its "content"', _is_added_token))
_TEMPLATES = several(
    FieldRule("", _is_named_template), 'a list of tables with a "name" and a "template"'
)
_NUMBER = whole(-(2**31), 2**31)  # that it is in the vocabulary is checked with the others
NAME_RULES: Rules = {
    "bos_token": _NAME,
    "eos_token": _NAME,
    "pad_token": _NAME,
    "unk_token": _NAME,
    "chat_template": either(TEXT, _TEMPLATES),
}
NUMBER_RULES: Rules = {
    "bos_token_id": _NUMBER,
    "eos_token_id": either(_NUMBER, several(_NUMBER, "a list of them")),
    "pad_token_id": _NUMBER,
}


# Texts that tokenizers with one vocabulary may still cut otherwise: numbers, spaces, code, scripts.
SAMPLES = (
    "12345 + 6.7 = 12,351.7",
    "  two spaces,\n\ttabs\r\nand lines ",
    "def f(x):\n    return x**2  # naïve",
    "Größe 東京 привет 🙂 don't",
)


class Tokenizer:
    """A `tokenizers` backend, its special ids and its chat template."""

    def __init__(
        self,
        backend: Backend,
        *,
        eos_ids: Sequence[int],
        bos_id: int | None = None,
        pad_id: int | None = None,
        template: str | None = None,
        names: Mapping[str, str] | None = None,
        no_template: str = NO_TEMPLATE,
    ) -> None:
        size = backend.get_vocab_size(with_added_tokens=True)
        for number in (*eos_ids, bos_id, pad_id):
            if number is not None and not 0 <= number < size:
                raise ModelError(
                    f"Special token id {number} is outside the vocabulary of {size} tokens: the "
                    f"tokenizer's files belong to another model. Take them all from one folder."
                )
        # Truncation and padding set in tokenizer.json would silently change prompts.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.bos_id = bos_id
        self.pad_id = pad_id if pad_id is not None else (self.eos_ids or (0,))[0]
        self.template, self.no_template = template, no_template  # the second: why there is none
        self.names = dict(names or {})  # bos_token, eos_token, ...: what templates may ask for

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Tokenizer:
        """Read tokenizer.json, and the settings in the other files where they exist."""
        if "tokenizer.json" not in files:
            raise ModelError(
                "The folder has no tokenizer.json. Make one: AutoTokenizer.from_pretrained(FOLDER)"
                ".save_pretrained(FOLDER) of transformers."
            )
        with library(
            "tokenizer.json can't be read", "Fetch it again, or save it anew with transformers."
        ):
            backend = Backend.from_str(files["tokenizer.json"].decode("utf-8"))
        settings, generation, config = (
            _json(files, name, rules)
            for name, rules in (
                ("tokenizer_config.json", NAME_RULES),
                ("generation_config.json", NUMBER_RULES),
                ("config.json", NUMBER_RULES),
            )
        )
        names = _special_names(_json(files, "special_tokens_map.json", NAME_RULES) | settings)
        template, no_template = _template(files, settings)
        ends = [*_numbers(generation.get("eos_token_id")), *_numbers(config.get("eos_token_id"))]

        def named(name: str) -> int | None:
            return backend.token_to_id(names[name]) if name in names else None

        def number(name: str) -> int | None:
            found, field = named(name), f"{name}_id"
            return found if found is not None else generation.get(field, config.get(field))

        last = named("eos_token")
        return cls(
            backend,
            eos_ids=ends if last is None else [*ends, last],
            bos_id=number("bos_token"),
            pad_id=number("pad_token"),
            template=template,
            names=names,
            no_template=no_template,
        )

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, with_bos: bool = False) -> list[int]:
        """Return ids of the text alone, or with the tokenizer's special tokens around it."""
        with library(
            f"The tokenizer can't encode {text[:80]!r}",
            "Remove the characters that its vocabulary does not have.",
        ):
            ids: list[int] = self.backend.encode(text, add_special_tokens=with_bos).ids
        return ids

    def encode_placed(self, text: str) -> tuple[list[int], list[int]]:
        """Return ids of the text alone, and at which character each token begins."""
        ids = self.encode(text)  # with words for what it can't read
        placed = self.backend.encode(text, add_special_tokens=False).offsets
        return ids, [start for start, _ in placed]

    def decode(self, ids: Sequence[int]) -> str:
        with library(*UNDECODED):
            return self.backend.decode(list(ids), skip_special_tokens=False)

    def decode_all(self, many: Sequence[Sequence[int]]) -> list[str]:
        """Decode several texts at once, on all cores."""
        lists = [list(ids) for ids in many]
        with library(*UNDECODED):
            return self.backend.decode_batch(lists, skip_special_tokens=False)

    def prompt(self, prompt: str | Sequence[Message], **variables: Any) -> list[int]:
        """Return ids to continue from. Messages get the chat template, once; strings never do."""
        if isinstance(prompt, str):
            return self.encode(prompt, with_bos=True)
        # The template writes the special tokens itself: adding them again would double them.
        return self.encode(self.render(prompt, **variables))

    def render(
        self, messages: Sequence[Message], *, to_continue: bool = True, **variables: Any
    ) -> str:
        """Return the chat template's text; `to_continue` opens the assistant's turn."""
        if self.template is None:
            raise ModelError(self.no_template)
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message:
                raise ModelError(
                    f"{message!r} is no message: it needs a role and a content, as in "
                    f'{{"role": "user", "content": "..."}}.'
                )
        known = {"tools": None, "documents": None, **self.names, **variables}
        given = {"messages": [dict(message) for message in messages], **known}
        done, text = render(self.template, given | {"add_generation_prompt": to_continue})
        if not done:
            roles = [message["role"] for message in messages]
            raise ModelError(
                f"The chat template refused messages with roles {roles}: {text.rstrip('.')}. "
                f"Change the messages, pass what the template asks for, or mend the template."
            )
        return text


def difference(own: Tokenizer, other: Tokenizer) -> str:
    """Say where another tokenizer reads a text otherwise; "" where it knows all that this one does.

    The other may have tokens more: a classifier has one for padding.
    """
    theirs = other.backend.get_vocab(with_added_tokens=True)
    for token, number in sorted(own.backend.get_vocab(with_added_tokens=True).items()):
        if theirs.get(token) != number:
            found = f"token {theirs[token]}" if token in theirs else "no token"
            return f"{token!r} is token {number} here and {found} there"
    for text in SAMPLES:
        mine, yours = _read(own, text), _read(other, text)
        if mine != yours:
            return f"{text!r} is {mine} here and {yours} there"
    return ""


def _read(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """Return a text's ids; None where the tokenizer has none for a character of it."""
    try:
        return tokenizer.encode(text)
    except ModelError:
        return None


def character_files(alphabet: str, end: str = "<end>") -> dict[str, bytes]:
    """Make a tokenizer's files for tiny models: one token a character, and one that ends a text."""
    vocabulary = {end: 0} | {c: i for i, c in enumerate(dict.fromkeys(alphabet), 1)}
    backend = Backend(models.WordLevel(vocabulary, unk_token="\0"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(end, special=True, normalized=False)])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
    return {
        "tokenizer.json": backend.to_str(pretty=True).encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode(),
        "generation_config.json": json.dumps({"eos_token_id": 0, "pad_token_id": 0}).encode(),
    }


def _json(files: Mapping[str, bytes], name: str, rules: Rules) -> dict[str, Any]:
    found = table(name, files.get(name, b"{}"))
    check(name, found, rules)
    return found


def _special_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """Read bos_token and the others; each is a string or a record with the string inside."""
    names = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value is not None:
            names[name] = value
    return names


def _template(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the chat template, or None and why. Copies of it in several files must be copies."""
    given: dict[str, Any] = {
        "tokenizer_config.json": settings.get("chat_template"),
        "chat_template.json": _json(files, "chat_template.json", NAME_RULES).get("chat_template"),
    }
    if "chat_template.jinja" in files:
        with library("chat_template.jinja is no UTF-8", "Convert it, or fetch it again."):
            given["chat_template.jinja"] = files["chat_template.jinja"].decode("utf-8")
    found: dict[str, str] = {}
    for file, template in given.items():
        if isinstance(template, list):  # several, by name
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default")
            if template is None and named:
                return None, (
                    f"{file} holds chat templates by name ({', '.join(sorted(named))}), and none "
                    "is called default. Name the one to use so, or write it to chat_template.jinja."
                )
        if template:
            found[file] = template
    if len({template.strip() for template in found.values()}) > 1:
        return None, (
            f"{' and '.join(found)} hold different chat templates: which one the model was trained "
            "with, nobody can tell. Remove the wrong one from the model's folder."
        )
    return (next(iter(found.values()), None)), NO_TEMPLATE


def _numbers(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
