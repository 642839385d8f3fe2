"""Calls of tools as a policy writes them, read from its words.

Every family of models writes calls in a form of its own. Whatever a policy writes is read in time
that grows with its length, and nothing is raised: what is no call is left alone, and a call that
can't be read comes back with words for the policy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from groupwise.envs.call_text import (
    after,
    named_call,
    parameters_of,
    read_json,
    read_whole,
    skip_blank,
    sound_call,
    spoken,
    typed,
)
from groupwise.errors import ModelError, nearest

MOST_CALLS = 64  # of a turn that are read: each that fails may look through all of the text


@dataclass(frozen=True)
class Asked:
    """A call that can be read."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Misread:
    """A call that can't be read, and what is wrong with it: said to the policy."""

    why: str


CallReader = Callable[[str], list[Asked | Misread]]  # the words of a turn -> its calls, in order
Tools = Mapping[str, Mapping[str, Any]]  # name -> parameter -> its schema
_Found = Iterator[Asked | Misread]


def reader(name: str, tools: Sequence[Mapping[str, Any]] = ()) -> CallReader:
    """Return the reader of a family's calls; schemas of tools give bare texts their types."""
    if name not in FAMILIES:
        raise ModelError(f"There is no form of tool calls {name!r}. {nearest(name, FAMILIES)}")
    family, known = FAMILIES[name], dict(map(parameters_of, tools))

    def read(text: str) -> list[Asked | Misread]:
        words = text if name == "gpt_oss" else spoken(text)
        found = list(islice(family.read(words, known), MOST_CALLS + 1))
        if len(found) > MOST_CALLS:
            why = f"A turn may have {MOST_CALLS} calls; those behind were not read."
            found[MOST_CALLS] = Misread(why)
        return found

    return read


def family(template: str, vocabulary: Collection[str]) -> str:
    """Return the family whose calls a chat template writes, or else the vocabulary has tokens for.

    A form of one's own is refused: its calls would be taken for plain words.
    """
    for name, known in FAMILIES.items():
        if known.signs and all(sign in template for sign in known.signs):
            return name
    for name, known in FAMILIES.items():
        if known.token and known.token in vocabulary:
            return name
    listed = ", ".join(f"{name} ({known.form})" for name, known in FAMILIES.items())
    raise ModelError(
        "The chat template writes tool calls in no form that is known here, so none of the model's "
        f'calls would be read. Known: {listed}. Name one of them; "tags" works with every model '
        "whose prompt explains it."
    )


def _misread(name: str, error: ValueError) -> Misread:
    return Misread(f"The call can't be read: {error}. Write {FAMILIES[name].form}.")


def _hermes(text: str, tools: Tools) -> _Found:
    opens, closes, at = "<tool_call>", "</tool_call>", 0
    while (start := after(text, opens, at)) > at:
        try:
            found, end = read_json(text, start)
            if text.startswith(closes, end):
                end += len(closes)
            elif end < len(text) and not text.startswith(opens, end):
                raise ValueError(f"there is more behind its JSON: {text[end : end + 40]!r}")
            yield Asked(*named_call(found))
        except ValueError as error:
            yield _misread("hermes", error)
            end = after(text, closes, start)
        at = end


def _qwen_xml(text: str, tools: Tools) -> _Found:
    at = 0
    while (start := after(text, "<function=", at)) > at:
        try:
            name, end = _until(text, start, ">", "the name of the function")
            arguments, end = _parameters(text, end, tools.get(name, {}))
            yield Asked(*sound_call(name, arguments))
        except ValueError as error:
            yield _misread("qwen_xml", error)
            end = after(text, "</function>", start)
        at = end


def _parameters(text: str, at: int, schemas: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Read parameters up to the end of their function."""
    found: dict[str, Any] = {}
    while not text.startswith("</function>", at := skip_blank(text, at)):
        if not text.startswith("<parameter=", at):
            raise ValueError(f"there is no parameter and no </function> at {text[at : at + 40]!r}")
        key, at = _until(text, at + len("<parameter="), ">", "the name of a parameter")
        value, at = _until(text, at, "</parameter>", f"the parameter {key[:40]}")
        if any(mark in value for mark in ("<parameter=", "<function=", "</function>")):
            raise ValueError(f"the parameter {key[:40]} has no </parameter> behind it")
        found[key] = typed(key, value.removeprefix("\n").removesuffix("\n"), schemas.get(key))
    return found, at + len("</function>")


def _until(text: str, start: int, mark: str, what: str) -> tuple[str, int]:
    """Return the text up to a mark, and where it goes on behind."""
    end = text.find(mark, start)
    if end < 0:
        raise ValueError(f"{what} has no {mark} behind it")
    return text[start:end], end + len(mark)


def _llama3(text: str, tools: Tools) -> _Found:
    said, tagged = text.strip(), False
    if "<|python_tag|>" in said:
        said, tagged = said.partition("<|python_tag|>")[2].strip(), True
    said = re.sub(r"(?:<\|e\w\w_id\|>)+\Z", "", said).strip()
    built_in = re.match(r"(\w+)\.call\((\w+)=", said) if tagged else None
    try:
        if tagged and said and not said.startswith("{") and not built_in:
            yield Asked(*sound_call("python", {"code": said}))
        if built_in:
            value, end = read_json(said, built_in.end())
            if said[end:] != ")":
                raise ValueError("it has no closing bracket behind its one argument")
            yield Asked(*sound_call(built_in[1], {built_in[2]: value}))
            return
        at = 0
        while said.startswith("{", at):
            found, at = read_json(said, at)
            if not _is_call(found):
                return  # JSON that answers something
            yield Asked(*named_call(found))
            at = skip_blank(said, at + 1) if said.startswith(";", at) else at
    except ValueError as error:
        if tagged or re.match(r'\{\s*"(?:name|type|function)"', said):
            yield _misread("llama3", error)


def _is_call(found: Any) -> bool:
    return isinstance(found, dict) and (
        ("name" in found and ("parameters" in found or "arguments" in found))
        or found.get("type") == "function"
    )


def _gpt_oss(text: str, tools: Tools) -> _Found:
    for message in re.split(r"<\|(?:start|end|call|return)\|>", text):
        header, begun, body = message.partition("<|message|>")
        recipient = re.search(r"\bto=([\w.\-]+)", header)
        if not begun or recipient is None or recipient[1] == "assistant":
            continue
        name = recipient[1].removeprefix("functions.")
        try:
            if name == recipient[1] and not body.lstrip().startswith("{"):  # a built-in's own text
                yield Asked(*sound_call(name, {"code": body}))
            else:
                yield Asked(*sound_call(name, read_whole(body.strip() or "{}")))
        except ValueError as error:
            yield _misread("gpt_oss", error)


def _mistral(text: str, tools: Tools) -> _Found:
    mark, at = "[TOOL_CALLS]", 0
    while (start := after(text, mark, at)) > at:
        try:
            if text.startswith(("[", "{"), skip_blank(text, start)):
                found, end = read_json(text, start)
                for one in found if isinstance(found, list) else [found]:
                    yield Asked(*named_call(one))
            else:
                head = re.compile(r"\s*([^\[\]{}\s]+)\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?")
                named = head.match(text, start)
                if named is None:
                    raise ValueError(f"no name of a tool stands behind {mark}")
                found, end = read_json(text, named.end())
                yield Asked(*sound_call(named[1], found))
        except ValueError as error:
            yield _misread("mistral", error)
            end = start
        at = end


def _deepseek(text: str, tools: Tools) -> _Found:
    opens, between, closes = (f"<｜tool▁{name}｜>" for name in ("call▁begin", "sep", "call▁end"))
    at = 0
    while (start := after(text, opens, at)) > at:
        try:
            name, end = _until(text, start, between, "the name of the tool")
            if name.strip() == "function":  # the older form: the name, and JSON in a fence
                name, end = _until(text, end, "\n", "the name of the tool")
                end = after(text, "```json", end)
            found, end = read_json(text, end)
            if text.startswith("```", end):
                end = skip_blank(text, end + 3)
            if end < len(text) and not text.startswith(closes, end):
                raise ValueError(f"there is more behind its JSON: {text[end : end + 40]!r}")
            yield Asked(*sound_call(name, found))
        except ValueError as error:
            yield _misread("deepseek", error)
            end = after(text, closes, start)
        at = end


def _tags(text: str, tools: Tools) -> _Found:
    known = tools or {"python": {"code": {}}, "search": {"query": {}}}
    names = "|".join(sorted(map(re.escape, known), key=len, reverse=True))
    opening = re.compile(rf"<({names})>" + (r"|```(?:python|py)\n" if "python" in known else ""))
    at = 0
    while found := opening.search(text, at):
        name = found[1] or "python"
        closes = f"</{name}>" if found[1] else "\n```"
        try:
            body, at = _until(text, found.end() - (not found[1]), closes, found[0].strip())
            yield Asked(*_tagged(name, body, known[name]))
        except ValueError as error:
            yield _misread("tags", error)
            at = found.end()


def _tagged(name: str, body: str, schemas: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a call whose one argument is what stands within the tag; several are JSON."""
    if len(schemas) == 1:
        (key, schema), body = next(iter(schemas.items())), body.strip("\n")
        plain = schema if isinstance(schema, Mapping) and "type" in schema else {"type": "string"}
        return sound_call(name, {key: typed(key, body, plain)})
    return sound_call(name, read_whole(body.strip() or "{}"))


@dataclass(frozen=True)
class Family:
    """A form in which models write calls, and how a chat template is known to use it."""

    read: Callable[[str, Tools], _Found]
    form: str  # an example, for people and for the policy
    signs: tuple[str, ...] = ()  # all of them stand in a template that uses it
    token: str = ""  # of its own, in the vocabulary


# In the order in which a template is asked: forms that share a sign, the narrower one first.
FAMILIES: Mapping[str, Family] = {
    "gpt_oss": Family(
        _gpt_oss,
        '<|channel|>commentary to=functions.NAME<|message|>{"ARGUMENT": "VALUE"}<|call|>',
        ("<|channel|>", "<|message|>"),
        "<|call|>",
    ),
    "mistral": Family(
        _mistral,
        '[TOOL_CALLS][{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}]',
        ("[TOOL_CALLS]",),
        "[TOOL_CALLS]",
    ),
    "deepseek": Family(
        _deepseek,
        '<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{"ARGUMENT": "VALUE"}<｜tool▁call▁end｜>',
        ("<｜tool▁call▁begin｜>",),
        "<｜tool▁call▁begin｜>",
    ),
    "qwen_xml": Family(
        _qwen_xml,
        "<tool_call><function=NAME><parameter=ARGUMENT>VALUE</parameter></function></tool_call>",
        ("<tool_call>", "<function="),
    ),
    "hermes": Family(
        _hermes,
        '<tool_call>{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}</tool_call>',
        ("<tool_call>",),
        "<tool_call>",
    ),
    "llama3": Family(
        _llama3,
        '{"name": "NAME", "parameters": {"ARGUMENT": "VALUE"}}',
        ('"parameters"', "<|start_header_id|>"),
        "<|python_tag|>",
    ),
    "tags": Family(_tags, "<NAME>VALUE</NAME>, or ```python with a program"),
}
