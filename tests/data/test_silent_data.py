"""Bugs that other tools had in prompts and rewards, and that nobody saw: one test each, by number.

10, 11, 34: rewards. 29, 30, 31, 33: tokens of prompts and completions. 46: the position in the
data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizer import CHAT, tokenizer

from groupwise import TokenBatch, batch_phase, recipe
from groupwise.data.cursor import Cursor
from groupwise.data.prompts import prepare
from groupwise.errors import DataError, RewardError
from groupwise.graders.rubric import Grader, check
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.records import Task

BOS, END = 256, 257


def function(folder: Path, source: str) -> str:
    (folder / "reward.py").write_text(f"import math\n{source}\n")
    return f"{folder}/reward.py:f"


def prompt_ids(prompt: Any, model: Tokenizer, **settings: Any) -> list[int]:
    frozen = prompt if isinstance(prompt, str) else tuple(prompt)
    return list(prepare([Task(0, frozen)], model, room=500, **settings).tasks[0].token_ids)


@pytest.mark.parametrize("nothing", ["None", "math.nan", "math.inf", "1 / 0"])
def test_bug_10_a_reward_that_is_none_is_in_no_baseline(tmp_path: Path, nothing: str) -> None:
    name = function(tmp_path, f"def f(completion): return {nothing} if completion == 'x' else 1.0")
    task = Task(0, "q")
    texts = ["a", "x", "b"]
    grades = Grader({name: 1.0}).grade([(task, text, (5,), "eos") for text in texts])
    assert [grade.reward for grade in grades] == [1.0, None, 1.0]
    assert grades[1].status == ("abstained" if nothing == "None" else "error")
    batch = TokenBatch.build(
        mask_NT=torch.ones(3, 1, dtype=torch.bool),
        group_N=[0, 0, 0],
        reward_N=[grade.reward for grade in grades],
        old_logp_NT=torch.zeros(3, 1),
        ref_logp_NT=torch.zeros(3, 1),
    )
    advantage_NT = batch_phase(recipe("grpo"), batch).batch.advantage_NT
    # The other two agree, so their advantage is 0: as a 0, the missing one would have made it 0.58.
    assert advantage_NT is not None and advantage_NT.tolist() == [[0.0], [0.0], [0.0]]


def test_bug_10_all_none_is_no_zero(tmp_path: Path) -> None:
    name = function(tmp_path, "def f(completions, **rest): return [None] * len(completions)")
    grades = Grader({name: 1.0}).grade([(Task(0, "q"), "a", (), "eos")] * 4)
    assert [(g.reward, g.status) for g in grades] == [(None, "abstained")] * 4


def test_bug_10_a_part_that_abstains_is_left_out_of_the_sum(tmp_path: Path) -> None:
    name = function(tmp_path, "def f(completion): return None")
    grade = Grader({name: 5.0, "exact": 1.0}).grade([(Task(0, "q", "a"), "a", (), "eos")])[0]
    assert (grade.reward, grade.status, grade.parts[name]) == (1.0, "ok", None)


def test_bug_11_one_reward_for_several_completions_is_no_reward(tmp_path: Path) -> None:
    name = function(tmp_path, "def f(completions, **rest): return [0.5]")
    grades = Grader({name: 1.0}).grade([(Task(0, "q"), text, (), "eos") for text in "abc"])
    assert [(g.reward, g.status) for g in grades] == [(None, "error")] * 3
    assert "1 values for 3 completions" in grades[0].reason
    with pytest.raises(RewardError, match="1 values for"):
        check(Grader({name: 1.0}), [Task(0, "q")])


USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("prompt", "template", "text"),
    [
        ("hi", "plain", "<s>hi"),
        ("<s>hi", "plain", "<s>hi"),  # the data wrote it already
        ("hi", "chat", "<s>[user]hi\n[assistant]"),
        (USER, "auto", "<s>[user]hi\n[assistant]"),  # the template writes it
        ("<s>[user]hi\n[assistant]", "auto", "<s>[user]hi\n[assistant]"),  # rendered elsewhere
    ],
)
def test_bug_29_exactly_one_bos(prompt: Any, template: Any, text: str) -> None:
    model = tokenizer()
    ids = prompt_ids(prompt, model, template=template)
    assert ids.count(BOS) == 1 and ids[0] == BOS and model.decode(ids) == text


def test_bug_29_two_bos_in_the_data_or_the_template_are_refused() -> None:
    with pytest.raises(DataError, match="two BOS"):
        prompt_ids("<s><s>hi", tokenizer())
    with pytest.raises(DataError, match="two BOS"):
        prompt_ids(USER, tokenizer(template="{{ bos_token }}" + CHAT))


def test_bug_29_a_tokenizer_without_bos_gets_none() -> None:
    model = tokenizer(template=CHAT.replace("{{ bos_token }}", ""), single="")
    assert BOS not in prompt_ids("hi", model) + prompt_ids(USER, model)


def test_bug_30_the_ids_that_were_sampled_reach_the_reward(tmp_path: Path) -> None:
    """Not ids made again from text: two tokens may decode to what one token encodes."""
    name = function(
        tmp_path,
        "def f(completion, completion_ids): return float(completion_ids == [7, 7, 9])",
    )
    (grade,) = Grader({name: 1.0}).grade([(Task(0, "q"), "anything", (7, 7, 9), "eos")])
    assert grade.reward == 1.0


def test_bug_30_prompts_are_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tokenizer()
    calls: list[str] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, **options: Any) -> list[int]:
        calls.append(text)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    tasks = [Task(0, "one"), Task(1, "two")]
    found = prepare(tasks, model, room=100)
    assert calls.count("one") == calls.count("two") == 1
    assert prepare(tasks, model, room=100) == found


HEAD = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]"
TAIL = "\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
# As templates of reasoning models do it: earlier thoughts are dropped, or put into tags anew.
DROPS = HEAD + "{{ m.content.split('</think>')[-1] }}" + TAIL
REWRAPS = (
    HEAD + "{% if '</think>' in m.content %}<think>\n"
    "{{ m.content.split('<think>')[1].split('</think>')[0].strip() }}\n</think>\n\n"
    "{{ m.content.split('</think>')[-1].lstrip() }}{% else %}{{ m.content }}{% endif %}" + TAIL
)
FIELD = HEAD + "{{ m.content }}" + TAIL  # reads no reasoning_content
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}" + TAIL
TRIMS = HEAD + "{{ m.content | trim }}" + TAIL
THOUGHT = "<think>2 and 2</think>4"
TURNS = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": THOUGHT},
    {"role": "user", "content": " and 3 more?\n"},
]
HIDDEN = [TURNS[0], {"role": "assistant", "reasoning_content": "2 and 2", "content": "4"}, TURNS[2]]
SYSTEM = [{"role": "system", "content": "be brief"}, TURNS[0]]


@pytest.mark.parametrize("template", [CHAT, TRIMS])
def test_bug_31_what_a_turn_wrote_is_read_in_the_next(template: str) -> None:
    """The prefix property: the prompt of a turn and its answer begin the prompt of the next."""
    model = tokenizer(template=template)
    first, second = prompt_ids(TURNS[:1], model), prompt_ids(TURNS, model)
    sampled = first + model.encode(THOUGHT)  # as the policy wrote it, token by token
    assert second[: len(sampled)] == sampled


@pytest.mark.parametrize(
    ("template", "messages", "lost"),
    [
        (DROPS, TURNS, "<think>2 and 2"),
        (REWRAPS, TURNS, "<think>2 and 2"),
        (FIELD, HIDDEN, "2 and 2"),
        (NO_SYSTEM, SYSTEM, "be brief"),
    ],
)
def test_bug_31_a_template_that_drops_or_rewraps_is_refused(
    template: str, messages: Any, lost: str
) -> None:
    model = tokenizer(template=template)
    prompt_ids(TURNS[:1], model)  # nothing is lost of a single turn
    number = 0 if messages is SYSTEM else 1
    with pytest.raises(DataError, match=rf"drops or changes '{lost}.* message {number} .*keeps it"):
        prompt_ids(messages, model)
    if messages is not SYSTEM:  # such a template breaks the property, which is why
        text = model.render(messages[:1]) + THOUGHT
        assert not model.render(messages).startswith(text)


def test_bug_31_thoughts_in_the_prompt_of_a_single_turn_stay() -> None:
    """A question about tags is a question, with any template; so is an opened thought."""
    asked = [{"role": "user", "content": "what does </think> close?"}]
    assert "what does </think> close?" in tokenizer().decode(prompt_ids(asked, tokenizer()))
    with pytest.raises(DataError, match="drops or changes 'what does </think>"):
        prompt_ids(asked, tokenizer(template=DROPS))
    opens = CHAT.replace("[assistant]", "[assistant]<think>")
    model = tokenizer(template=opens)
    assert model.decode(prompt_ids(USER, model)).endswith("[assistant]<think>")
    found = prepare([Task(0, tuple(USER))], model, room=500)
    assert "prompts end with '<think>', so completions begin inside it" in found.notes[0]
    assert prepare([Task(0, tuple(USER))], tokenizer(), room=500).notes == []


def test_bug_31_a_few_such_rows_are_dropped_and_named() -> None:
    model = tokenizer(template=DROPS)
    tasks = [Task(n, ({"role": "user", "content": f"{n}?"},)) for n in range(199)]
    found = prepare([*tasks, Task(199, tuple(TURNS))], model, room=500)
    assert [row.task for row in found.dropped] == [199]
    assert "Row 199: the chat template drops" in found.notes[0]


def test_bug_33_a_prompt_is_whole_or_dropped_never_cut() -> None:
    """Sampler and learner read the same ids from the task: there is no second place that cuts."""
    model = tokenizer()
    tasks = [Task(number, "x" * length) for number, length in enumerate((3, 50, 9, 10))]
    found = prepare(tasks, model, max_prompt_tokens=10, room=500)
    for task in found.tasks:
        assert model.decode(task.token_ids) == f"<s>{tasks[task.id].prompt}"
    assert [task.id for task in found.tasks] + [row.task for row in found.dropped] == [0, 2, 1, 3]


def test_bug_34_special_tokens_reach_the_reward(tmp_path: Path) -> None:
    """All but the one that ended the answer, which `finish` and the ids tell: a text that ends with
    it equals no answer.
    """
    name = function(
        tmp_path,
        "def f(completion, completion_ids, finish):\n"
        f"    ended = finish == 'eos' and completion_ids[-1] == {END}\n"
        "    return float(completion == '<eats>4' and ended)",
    )
    model = tokenizer()
    ids = (*model.encode("<eats>4"), END)
    text = model.decode(ids)
    assert text == "<eats>4</s>"
    sample = (Task(0, "2+2=", "4"), text, ids, "eos")
    ends = [model.decode([number]) for number in model.eos_ids]
    grade = Grader({name: 1.0, "number": 1.0}, ends).grade([sample])[0]
    assert list(grade.parts.values()) == [1.0, 1.0]
    plain = (Task(0, "2+2=", "4"), "4</s>", (*model.encode("4"), END), "eos")
    assert Grader({"exact": 1.0}, ends).grade([plain])[0].reward == 1.0  # built-in parts, too
    tags = "format(pattern='<think>...</think>...')"
    thought = (Task(0, "q"), "<think>so</think> 4</s>", (), "eos")
    assert Grader({tags: 1.0}, ends).grade([thought])[0].reward == 1.0


def tasks_named(*prompts: str) -> list[Task]:
    return [Task(number, prompt) for number, prompt in enumerate(prompts)]


def test_bug_46_a_position_in_other_data_is_refused() -> None:
    cursor = Cursor(tasks_named("a", "b", "c"), seed=0)
    cursor.take(4)
    state = cursor.state()
    for other in (
        Cursor(tasks_named("a", "b", "x"), seed=0),
        Cursor(tasks_named("a", "b"), seed=0),
        Cursor(tasks_named("b", "a", "c"), seed=0),
        Cursor(tasks_named("a", "b", "c"), seed=1),
        Cursor(tasks_named("a", "b", "c"), seed=0, shuffle=False),
    ):
        before = other.state()
        with pytest.raises(DataError, match="of other data"):
            other.restore(state)
        assert other.state() == before


def test_bug_46_no_row_is_seen_again_after_resuming() -> None:
    tasks = tasks_named(*"abcdefghij")
    for epoch in range(3):
        first = Cursor(tasks, seed=0)
        seen = first.take(10 * epoch + 6)[10 * epoch :]
        resumed = Cursor(tasks, seed=0)
        resumed.restore(first.state())
        seen += resumed.take(4)
        assert sorted(seen) == [(task, epoch) for task in range(10)]
