"""Which tokens of a row are learned: by chat templates of four styles, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from chat_templates import CHATML, FORGETS, INSTRUCT, MARKED, STYLES, chat_tokenizer

from groupwise.data.columns import with_conversation
from groupwise.data.conversations import learned_row, lesson_of, pieces_of
from groupwise.data.on_disk import DiskTasks
from groupwise.data.prompts import Wording
from groupwise.errors import DataError
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.records import Completion, LearnedRow, Task, Turn

TALK = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "Thrice?"},
    {"role": "assistant", "content": "12, naïve me."},
]


def task(**columns: Any) -> Task:
    row = with_conversation(columns)
    prompt = row.pop("prompt", "")
    return Task(7, prompt if isinstance(prompt, str) else tuple(prompt), columns=row)


def style(name: str) -> tuple[Tokenizer, str, str]:
    template, end, blank = STYLES[name]
    return chat_tokenizer(template, [end]), end, blank


def learned_texts(row: LearnedRow, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(row.token_ids[a:b]) for a, b in row.learned]


@pytest.mark.parametrize("name", STYLES)
def test_the_mask_is_what_the_assistant_says_and_its_end(name: str) -> None:
    tokenizer, end, blank = style(name)
    row = learned_row(task(messages=TALK), tokenizer)
    assert learned_texts(row, tokenizer) == [f"{blank}4.{end}", f"{blank}12, naïve me.{end}"]
    whole = tokenizer.decode([*row.prompt_ids, *row.token_ids])
    rendered = tokenizer.render(TALK, to_continue=False)
    assert rendered.rstrip("\n") == whole
    # The prompt is exactly what sampling would go on from.
    assert list(row.prompt_ids) == tokenizer.encode(tokenizer.render(TALK[:1]))
    assert [turn.role for turn in row.turns] == ["assistant", "user", "assistant"]
    mask_T = row.mask_T
    assert mask_T is not None and mask_T[0] and mask_T[-1]
    logp_T = torch.zeros(len(row.token_ids))
    Completion(row.token_ids, logp_T, "eos", -1, mask_T=mask_T, turns=row.turns)  # it fits


@pytest.mark.parametrize("name", STYLES)
def test_turns_are_chosen_by_setting_and_by_message(name: str) -> None:
    tokenizer, end, blank = style(name)
    last = learned_row(task(messages=TALK), tokenizer, turns="last")
    assert learned_texts(last, tokenizer) == [f"{blank}12, naïve me.{end}"]
    assert last.mask_T is None and last.turns == (Turn("assistant", 0, len(last.token_ids)),)
    assert list(last.prompt_ids) == tokenizer.encode(tokenizer.render(TALK[:3]))
    some = [TALK[0], {**TALK[1], "loss": 0}, *TALK[2:]]
    assert learned_row(task(messages=some), tokenizer) == last
    first = [*TALK[:3], {**TALK[3], "loss": 0}]
    row = learned_row(task(messages=first), tokenizer)
    assert learned_texts(row, tokenizer) == [f"{blank}4.{end}"]
    assert row.tokens == len(row.prompt_ids) + len(f"{blank}4.") + 1  # nothing behind is read


def test_tools_and_systems_are_holes() -> None:
    tokenizer = chat_tokenizer(CHATML, ["<|im_end|>"])
    talk = [
        {"role": "system", "content": "Be brief."},
        TALK[0],
        {"role": "assistant", "content": "call(2+2)"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4."},
    ]
    row = learned_row(task(messages=talk), tokenizer)
    assert learned_texts(row, tokenizer) == ["call(2+2)<|im_end|>", "4.<|im_end|>"]
    assert [turn.role for turn in row.turns] == ["assistant", "tool", "assistant"]
    assert "".join(text for text, _ in pieces_of(row, tokenizer)) == tokenizer.render(
        talk, to_continue=False
    ).rstrip("\n")
    assert [learned for _, learned in pieces_of(row, tokenizer)] == [False, True, False, True]


def test_tools_of_a_row_are_written_by_the_template_and_never_learned() -> None:
    described = "{% if tools %}{{ tools[0]['name'] }}:{% endif %}" + CHATML
    tokenizer = chat_tokenizer(described, ["<|im_end|>"])
    tools = [{"name": "add"}]
    row = learned_row(task(messages=TALK, tools=tools), tokenizer)
    bare = learned_row(task(messages=TALK, tools=[]), tokenizer)
    assert tokenizer.decode(row.prompt_ids) == "add:" + tokenizer.decode(bare.prompt_ids)
    assert row.token_ids == bare.token_ids and row.learned == bare.learned
    assert row == learned_row(task(messages=TALK, tools=json.dumps(tools)), tokenizer)
    with pytest.raises(DataError, match=r"Row 7 has tools, and the chat template has no place"):
        learned_row(task(messages=TALK, tools=tools), chat_tokenizer(CHATML, ["<|im_end|>"]))
    with pytest.raises(DataError, match="tools that are no JSON"):
        learned_row(task(messages=TALK, tools="add"), tokenizer)


def test_prompt_and_completion_as_messages_learn_the_completion_alone() -> None:
    tokenizer = chat_tokenizer(CHATML, ["<|im_end|>"])
    row = learned_row(task(prompt=TALK[:3], completion=TALK[3:]), tokenizer)
    assert row == learned_row(task(messages=TALK), tokenizer, turns="last")
    # A text behind a chat prompt ends as the template has it.
    assert row == learned_row(task(prompt=TALK[:3], completion="12, naïve me."), tokenizer)
    asked = Wording("chat", "", "{prompt}")
    single = learned_row(task(prompt="2+2?", completion="4."), tokenizer, asked)
    assert single == learned_row(task(messages=TALK[:2]), tokenizer)


def test_texts_are_encoded_apart() -> None:
    tokenizer = chat_tokenizer(None)
    row = learned_row(task(prompt="2+2=", completion="4"), tokenizer)
    assert tokenizer.decode(row.prompt_ids) == "2+2="
    assert learned_texts(row, tokenizer) == ["4</s>"] and row.mask_T is None


def test_of_a_text_all_is_learned() -> None:
    tokenizer = chat_tokenizer(None)
    row = learned_row(task(text="abc"), tokenizer)
    assert tokenizer.decode(row.prompt_ids) == "a"  # nothing stands before it
    assert learned_texts(row, tokenizer) == ["bc</s>"]
    again = learned_row(task(text="abc</s>"), tokenizer)
    assert again == row  # one end is enough


def test_a_template_that_drops_thoughts_is_refused_with_the_turn_and_the_remedy() -> None:
    tokenizer = chat_tokenizer(FORGETS, ["<|im_end|>"])
    talk = [TALK[0], {"role": "assistant", "content": "<think>hm</think>4."}, *TALK[2:]]
    with pytest.raises(DataError, match=r"Row 7.*message 1 \(assistant.*data.turns=last"):
        learned_row(task(messages=talk), tokenizer)
    row = learned_row(task(messages=talk), tokenizer, turns="last")
    assert learned_texts(row, tokenizer) == ["12, naïve me.<|im_end|>"]
    assert "<think>" not in tokenizer.decode(row.prompt_ids)


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_an_end_on_which_sampling_does_not_stop_is_refused(template: str) -> None:
    """A base model's end token is not its chat template's."""
    base = chat_tokenizer(template, ["</s>"])
    with pytest.raises(DataError, match=r"sampling stops at </s> alone.*generation_config"):
        learned_row(task(messages=TALK), base)
    both = chat_tokenizer(template, ["</s>", "<|im_end|>"])
    assert learned_texts(learned_row(task(messages=TALK), both), both)[0] == "4.<|im_end|>"


def test_marks_without_the_end_of_the_turn_are_refused() -> None:
    wrong = MARKED.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n")
    with pytest.raises(DataError, match="marks must hold it"):
        learned_row(task(messages=TALK), chat_tokenizer(wrong, ["<|im_end|>"]))
    twice = MARKED.replace(
        "{% generation %}", "{% generation %}{% endgeneration %}{% generation %}"
    )
    with pytest.raises(DataError, match=r"marks 4 turns.*the assistant has 2"):
        learned_row(task(messages=TALK), chat_tokenizer(twice, ["<|im_end|>"]))


@pytest.mark.parametrize("style", STYLES)
def test_turns_that_nobody_took_are_refused(style: str) -> None:
    """Letters of a special token in what a user says would be this token, and a turn of its own."""
    template, end, _ = STYLES[style]
    tokenizer = chat_tokenizer(template, [end])
    forged = [{"role": "user", "content": f"2+2?{end}"}, TALK[-1]]
    with pytest.raises(DataError, match=r"Row 7: message 0 \(user\) holds '.*nobody took"):
        learned_row(task(messages=forged), tokenizer)
    ended = [TALK[-2], {"role": "assistant", "content": f"4{end}\n"}]
    with pytest.raises(DataError, match=r"message 1 \(assistant\) holds '"):
        learned_row(task(messages=ended), tokenizer)
    calling = [TALK[-2], {"role": "assistant", "content": "<|head|>call"}]
    assert learned_row(task(messages=calling), tokenizer).learned  # as some write their calls


def test_a_template_without_ends_is_refused() -> None:
    """With the whole text learned for want of a mask nobody would notice."""
    bare = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match="Row 7"):
        learned_row(task(messages=TALK), chat_tokenizer(bare))


def test_a_template_that_changes_what_is_said_is_refused() -> None:
    loud = INSTRUCT.replace("{{ m.content }}</s>", "{{ m.content | upper }}</s>")
    with pytest.raises(DataError, match=r"drops or changes a part of '12, naïve me.'"):
        learned_row(task(messages=TALK), chat_tokenizer(loud), turns="last")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": TALK[:1]}, "none of the assistant"),
        ({"messages": [TALK[0], {"role": "assistant", "content": " "}]}, "message 1 .* is empty"),
        ({"messages": [TALK[0], {**TALK[1], "loss": 0}]}, 'has "loss": 0'),
        ({"messages": [TALK[0], {**TALK[1], "loss": 0.5}]}, '"loss": 0.5'),
        ({"messages": [{**TALK[0], "loss": 1}, TALK[1]]}, "Only what the assistant says"),
        ({"messages": [TALK[0], "hello"]}, "message 1 is no object with a role"),
        ({"prompt": "x", "messages": "hello"}, "no messages in column 'messages'"),
        ({"prompt": "x", "completion": " "}, "no text in column 'completion' or 'solution'"),
        ({"prompt": "x"}, "no text in column 'completion' or 'solution'"),
        ({"text": "  "}, "no text in column text"),
    ],
)
def test_rows_that_teach_nothing_are_refused_by_number(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"Row 7.*{message}"):
        lesson_of(task(**row))


def test_encoded_rows_come_back_from_the_disk() -> None:
    tokenizer = chat_tokenizer(CHATML, ["<|im_end|>"])
    plain = task(messages=TALK)
    made = Task(**{**vars(plain), "row": learned_row(plain, tokenizer)})
    assert list(DiskTasks([made, plain])) == [made, plain]


def test_marks_are_no_text_where_nobody_asks_for_them() -> None:
    marked, plain = (chat_tokenizer(t, ["<|im_end|>"]) for t in (MARKED, CHATML))
    assert marked.render(TALK) == plain.render(TALK)
