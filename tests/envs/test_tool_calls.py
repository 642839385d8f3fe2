"""Calls of tools in every family's form: read, or misread with words; thoughts have none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turn_templates import FORMS, TOOL

from groupwise.envs.tool_calls import FAMILIES, MOST_CALLS, Asked, Misread, family, reader
from groupwise.errors import ModelError

ADD, NOTE = {"a": 1, "b": -2}, {"text": 'say "</tool_call>" or [TOOL_CALLS] to\nFrançois 🙂'}


def _xml(name: str, arguments: dict[str, object]) -> str:
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
    given = "".join(f"<parameter={k}>\n{text}\n</parameter>\n" for k, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


def _mistral(*calls: tuple[str, dict[str, object]]) -> str:
    listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return "[TOOL_CALLS] " + json.dumps(listed)


def _hermes(name: str, arguments: dict[str, object]) -> str:
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _deepseek(name: str, arguments: dict[str, object]) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"


def _deepseek_r1(name: str, arguments: dict[str, object]) -> str:
    return (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```"
        "<｜tool▁call▁end｜>"
    )


def _harmony(name: str, arguments: dict[str, object]) -> str:
    return (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(arguments)}<|call|>"
    )


def _llama(name: str, arguments: dict[str, object]) -> str:
    return json.dumps({"name": name, "parameters": arguments})


# Two calls each, as models of the family write them.
WRITTEN = {
    "hermes": "Let me see.\n" + _hermes("add", ADD) + "\n" + _hermes("note", NOTE),
    "qwen_xml": "Let me see.\n" + _xml("add", ADD) + "\n" + _xml("note", NOTE),
    "llama3": _llama("add", ADD) + "; " + _llama("note", NOTE),
    "gpt_oss": "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant"
    + _harmony("add", ADD)
    + "<|start|>assistant"
    + _harmony("note", NOTE),
    "mistral": _mistral(("add", ADD), ("note", NOTE)),
    "deepseek": "<｜tool▁calls▁begin｜>"
    + _deepseek("add", ADD)
    + "\n"
    + _deepseek_r1("note", NOTE)
    + "<｜tool▁calls▁end｜>",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_come_in_order_with_typed_arguments(name: str) -> None:
    assert reader(name)(WRITTEN[name]) == [Asked("add", ADD), Asked("note", NOTE)]


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"gpt_oss"}))
def test_calls_within_thoughts_are_none(name: str) -> None:
    read, call = reader(name), WRITTEN[name]
    assert read(f"<think>I may write {call}</think>\nNo.") == []
    assert read(f"I may write {call}</think>\nNo.") == []  # the prompt has opened the thought
    assert read(f"<think>I may write {call}") == []  # and a limit has cut it
    assert read(f"[THINK]{call}[/THINK]") == []
    assert read(f"<think>hm</think>{call}") == [Asked("add", ADD), Asked("note", NOTE)]


def test_the_analysis_of_gpt_oss_is_no_call() -> None:
    said = "<|channel|>analysis<|message|>{" + _llama("add", ADD) + "<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>to=functions.add {}"
    assert reader("gpt_oss")(said + final) == []


BROKEN = {
    "hermes": '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>',
    "qwen_xml": "<function=add><parameter=a>1</function>",
    "llama3": '{"name": "add", "parameters": {"a": }}',
    "gpt_oss": "<|channel|>commentary to=functions.add<|message|>{'a': 1}<|call|>",
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": [1]}]',
    "deepseek": "<｜tool▁call▁begin｜>add<｜tool▁sep｜>a=1<｜tool▁call▁end｜>",
    "tags": "<python>print(1)",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_call_that_cannot_be_read_says_why_and_how_to_write_it(name: str) -> None:
    (found,) = reader(name)(BROKEN[name])
    assert isinstance(found, Misread)
    assert FAMILIES[name].form in found.why and "can't be read: " in found.why


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"llama3"}))
def test_a_broken_call_does_not_hide_the_next(name: str) -> None:
    before, after = reader(name)(BROKEN[name] + "\n" + WRITTEN[name])[:2]
    assert isinstance(before, Misread) and after == Asked("add", ADD)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ('{"arguments": {}}', 'no "name"'),
        ('{"name": 3, "arguments": {}}', 'no "name"'),
        ('{"name": "add", "arguments": [1, 2]}', "no JSON object"),
        ("[1]", "no JSON object"),
        ('{"name": "add", "arguments": {}} and', "more behind"),
        ('{"name": "add", "arguments": {"a": NaN}}', "no number"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "half of a character"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "can't be read"),
        ('{"name": "add", "arguments": {"a": ' + "[" * 70 + "]" * 70 + "}}", "64 levels"),
        ("[" * 10**6, "brackets"),
    ],
)
def test_what_is_wrong_is_said(call: str, why: str) -> None:
    (found,) = reader("hermes")(f"<tool_call>{call}</tool_call>")
    assert isinstance(found, Misread) and why in found.why


def test_forms_that_models_drift_into() -> None:
    read = reader("hermes")
    open_ended = '<tool_call>\n{"name": "a", "arguments": {}}\n<tool_call>{"name": "b"}'
    assert read(open_ended) == [Asked("a", {}), Asked("b", {})]
    as_text = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert read(as_text) == [Asked("add", {"a": 1})]
    openai = '<tool_call>{"function": {"name": "add", "arguments": {"a": 1}}}</tool_call>'
    assert read(openai) == [Asked("add", {"a": 1})]
    named = reader("mistral")('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]b[CALL_ID]x9[ARGS]{}')
    assert named == [Asked("add", {"a": 1}), Asked("b", {})]


def test_llama_writes_programs_and_answers_that_are_json() -> None:
    read = reader("llama3")
    assert read("<|python_tag|>print(1)<|eom_id|>") == [Asked("python", {"code": "print(1)"})]
    built_in = read('<|python_tag|>brave_search.call(query="a (b)")')
    assert built_in == [Asked("brave_search", {"query": "a (b)"})]
    assert read('{"answer": 4}') == [] and read("{4}") == [] and read("it is {4}") == []
    assert read('{"name": "Ann", "age": 4}') == []
    assert isinstance(read("<|python_tag|>print('\ud800')")[0], Misread)


def test_tags_and_fences_of_base_models() -> None:
    read = reader("tags")
    said = "I run\n```python\nx = 1\nprint(x)\n```\n<search>who\n</search><python>\n1\n</python>"
    assert read(said) == [
        Asked("python", {"code": "x = 1\nprint(x)"}),
        Asked("search", {"query": "who"}),
        Asked("python", {"code": "1"}),
    ]
    assert read("<add>1</add> and ```js\n1\n```") == []
    assert read("```python\n```") == [Asked("python", {"code": ""})]


def test_tags_bear_the_names_of_tools() -> None:
    one = {"name": "sqrt", "parameters": {"properties": {"x": {"type": "number"}}}}
    read = reader("tags", [TOOL, one])
    assert read('<add>{"a": 1, "b": 2}</add><sqrt>2.5</sqrt>') == [
        Asked("add", {"a": 1, "b": 2}),
        Asked("sqrt", {"x": 2.5}),
    ]
    (found,) = read("<sqrt>two</sqrt>")
    assert isinstance(found, Misread) and "x must be number, not 'two'" in found.why
    assert read("```python\n1\n```") == []  # no tool of this name


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", "12", "12"),
        ("string", "false", "false"),
        ("integer", "12", 12),
        ("integer", "12.0", 12),
        ("number", "12", 12),
        ("boolean", "True", True),
        ("array", "[1, 2]", [1, 2]),
        ("object", '{"a": null}', {"a": None}),
        (["integer", "null"], "None", None),
        (None, "12", 12),
        (None, "007", "007"),
        (None, '"a"', '"a"'),
        (None, "two words", "two words"),
    ],
)
def test_bare_values_have_the_type_of_their_schema(kind: object, text: str, value: object) -> None:
    schema = {"type": kind} if kind else {}
    tool = {"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
    (found,) = reader("qwen_xml", [tool])(_xml("f", {"x": text}))
    assert found == Asked("f", {"x": value})
    assert isinstance(found, Asked) and type(found.arguments["x"]) is type(value)


@pytest.mark.parametrize(
    ("kind", "text"), [("integer", "1.5"), ("integer", "true"), ("boolean", "1"), ("array", "{}")]
)
def test_bare_values_of_another_type_are_misread(kind: str, text: str) -> None:
    tool = {"function": {"name": "f", "parameters": {"properties": {"x": {"type": kind}}}}}
    (found,) = reader("qwen_xml", [tool])(_xml("f", {"x": text}))
    assert isinstance(found, Misread) and f"x must be {kind}" in found.why


def test_more_calls_than_anybody_means_are_told() -> None:
    found = reader("hermes")(_hermes("add", ADD) * 1000)
    assert found[:MOST_CALLS] == [Asked("add", ADD)] * MOST_CALLS
    assert isinstance(found[-1], Misread) and len(found) == MOST_CALLS + 1


OPENERS = (
    "",
    "<tool_call>",
    "[TOOL_CALLS] [",
    "<|python_tag|>",
    "<function=f>",
    "<｜tool▁call▁begin｜>a<｜tool▁sep｜>",
    "to=a<|message|>",
)
FLOODS = (
    "[",
    '{"a":',
    '"',
    "\\",
    " \n",
    "9",
    "<tool_call>",
    "<think>",
    "</think>",
    "<function=a><parameter=b>",
    "<python>",
    '[TOOL_CALLS]["',
    "<｜tool▁call▁begin｜>",
    "to=a<|message|>",
    "```python\n",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_flood_is_read_and_never_raises(name: str) -> None:
    """One that took quadratic time would not end here: a megabyte of each."""
    read = reader(name, [TOOL])
    for opener in OPENERS:
        for flood in FLOODS:
            assert len(read(opener + flood * (10**5 // len(flood)))) <= MOST_CALLS + 1
    assert len(read("<tool_call>[TOOL_CALLS]" + "[" * 10**6)) <= MOST_CALLS + 1


PARTS = [*OPENERS, *FLOODS, "</tool_call>", "}", "]", ":", ",", "name", "arguments", "é", "\ud800"]


@pytest.mark.parametrize("name", FAMILIES)
@given(said=st.lists(st.sampled_from(PARTS) | st.text(max_size=5), max_size=30).map("".join))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_whatever_is_written_gives_calls_that_can_be_handed_on(name: str, said: str) -> None:
    for found in reader(name, [TOOL])(said):
        if isinstance(found, Asked):
            json.dumps(found.arguments, ensure_ascii=False).encode()
            found.name.encode()


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("qwen25", "hermes"),
        ("qwen3", "hermes"),
        ("llama3", "llama3"),
        ("mistral", "mistral"),
        ("gpt_oss", "gpt_oss"),
    ],
)
def test_templates_say_how_calls_are_written(form: str, name: str) -> None:
    assert family(FORMS[form].template, ()) == name


def test_other_signs_of_a_family() -> None:
    xml = "<tool_call>\n<function=example>\n<parameter=a>{% if tools %}{% endif %}"
    assert family(xml, ()) == "qwen_xml"
    assert family("{{ tools }}", ["a", "[TOOL_CALLS]"]) == "mistral"
    assert family("<｜tool▁call▁begin｜>{{ tools }}", ["<tool_call>"]) == "deepseek"


def test_an_unknown_form_is_refused_with_the_list() -> None:
    with pytest.raises(ModelError, match="no form that is known") as error:
        family("Action: {{ tools }}", ["Action"])
    assert all(name in str(error.value) for name in FAMILIES)
    with pytest.raises(ModelError, match="hermes"):
        reader("hermez")
