"""Multiple choice, instructions, format, language, repetition, and other tools' signatures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupwise.errors import RewardError
from groupwise.graders.choice import chosen, gold_letter, options
from groupwise.graders.form import language_share, repeated_share
from groupwise.graders.instructions import CHECKS, asked, followed
from groupwise.graders.rubric import Grader, check
from groupwise.records import Grade, Task


def graded(parts: dict[str, float], task: Task, text: str) -> Grade:
    return Grader(parts, ["<end>"]).grade([(task, text, tuple(range(3)), "eos")])[0]


# ---------------------------------------------------------------- multiple choice


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("C", "C"), ("c", "C"), ("(C)", "C"), ("**C**", "C"), ("C.", "C"), (r"\boxed{C}", "C"),
        (r"\boxed{\text{(C)}}", "C"), ("<answer>C) Paris</answer>", "C"), ("Answer: C", "C"),
        ("The answer is C because A is too small.", "C"), ("It is B, not A.", "B"),
        ("I think that the correct option is D", "D"), ("réponse est C non A", "C"),
        ("B。不是 A", "B"), ("Answer: (C) Vitamin A", "C"), ("<think>A or B</think>B", "B"),
        ("A or B or C", None), ("A, B, C, D", None), ("(A) (B) (C)", None), ("Both A and C", None),
        ("The answer is A or B", None), (r"\boxed{A, B}", None), ("I am not sure", None),
        ("<think>C</think>", None), ("A dog", None), ("Z", None), ("АВ", None), ("А", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_one_option_that_is_named(text: str, letter: str | None) -> None:
    assert chosen(text, options({})) == letter


def test_options_by_their_text_and_number() -> None:
    known = options({"choices": ["Paris", "Rome", "Vitamin A"]})
    assert [gold_letter(x, known) for x in (0, 2, 3, "B", "(C) Vitamin A", "rome", True)] == [
        "A", "C", None, "B", "C", "B", None,
    ]  # fmt: skip
    assert chosen("The answer is Rome.", known) == "B"
    assert chosen("B) Paris", known) is None  # says two things
    assert chosen("D", known) is None  # there is none
    assert options({"options": {"A": "x", "B": "y"}}).texts == ("x", "y")
    assert options({"choices": {"text": ["x", "y"], "label": ["A", "B"]}}).letters == "AB"


def test_choice_as_a_reward() -> None:
    task = Task(0, "Which city?\nA) Paris\nB) Rome\nC) Oslo and Bergen, both", "B")
    assert [graded({"choice": 1.0}, task, x).reward for x in ("B<end>", "A", "A or B")] == [1, 0, 0]
    echo = graded({"choice": 1.0}, Task(0, str(task.prompt), "C"), str(task.prompt))
    assert echo.reward == 0.0 and echo.correct is False
    with pytest.raises(RewardError, match="names no single option"):
        check(Grader({"choice": 1.0}), [Task(0, "?", "A or B")])


# ---------------------------------------------------------------- instructions

FOLLOWED: dict[str, tuple[dict[str, Any], str, str]] = {
    "length_constraints:number_words": (
        {"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "less than"}, "Mr. Smith came.", "One. Two!"),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "a\n***\nb", "a\n***\n***\nb"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"}, "a\n\nSo b", "a\n\nb so"),
    "keywords:existence": ({"keywords": ["cat", "Dog"]}, "A dog, a cat.", "A dog, cats."),
    "keywords:frequency": (
        {"keyword": "a", "frequency": 2, "relation": "at least"}, "a b A", "a bad"),
    "keywords:forbidden_words": ({"forbidden_words": ["cat"]}, "category", "A Cat!"),
    "keywords:letter_frequency": (
        {"letter": "e", "let_frequency": 2, "let_relation": "less than"}, "tEst", "eE"),
    "language:response_language": (
        {"language": "de"}, "Das ist nicht der Hund und die Katze.", "That is not the dog."),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[a] [b]", "[a] []"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "x\nP.S. y", "x P.S. y"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    "detectable_format:constrained_response": ({}, "My answer is yes.", "Yes."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* **b**", "*a* **"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2}, "Section 1\na\nSection 2", "Section 1"),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', '{"a": 1} so'),
    "detectable_format:title": ({}, "<<title>>\ntext", "<< >>"),
    "combination:two_responses": ({}, "a\n******\nb", "a\n******\na"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say A"}, "say a\nA", "Say A"),
    "startend:start_checker": ({"phrase": "Well"}, "well, yes", "yes, well"),
    "startend:end_checker": ({"end_phrase": "Bye."}, "So: bye.", "Bye. So"),
    "startend:quotation": ({}, '"a b"', '"a" b'),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"}, "AN OX", "AN ox"),
    "change_case:english_capital": ({}, "AN OX 7!", "An OX"),
    "change_case:english_lowercase": ({}, "an ox", "an Ox"),
    "punctuation:no_comma": ({}, "a; b", "a, b"),
}  # fmt: skip


def test_every_instruction_has_an_example() -> None:
    assert set(FOLLOWED) == set(CHECKS)


@pytest.mark.parametrize("name", FOLLOWED)
def test_instructions_followed_and_not(name: str) -> None:
    arguments, good, bad = FOLLOWED[name]
    row = {"instruction_id_list": [name], "kwargs": [{**arguments, "of_another": None}]}
    assert followed(good, asked(row)) == [True]
    assert followed(bad, asked(row)) == [False]
    assert followed(" ", asked(row)) == [False]  # nothing follows none


def test_instructions_as_a_reward() -> None:
    names = ["punctuation:no_comma", "length_constraints:number_words"]
    kwargs = [None, {"num_words": 3.0, "relation": "at least"}]  # as Arrow reads a column
    task = Task(0, "?", None, {"instruction_id_list": names, "kwargs": kwargs})
    text = "<think>a, b, c</think>one two<end>"
    whole, share = (
        graded({n: 1.0}, task, text) for n in ("instructions", "instructions(partial=True)")
    )
    assert (whole.reward, whole.correct, share.reward, share.correct) == (0.0, False, 0.5, None)
    assert graded({"instructions": 1.0}, task, "one two three").reward == 1.0
    for columns, words in [
        ({}, "no column instruction_id_list"),
        ({"instruction_id_list": ["no:such"]}, "no check 'no:such'"),
        ({"instruction_id_list": names, "kwargs": [{}]}, "no list of 2"),
        ({"instruction_id_list": names[1:], "kwargs": [{"num_words": 3}]}, "lack relation"),
        ({"instruction_id_list": names[1:], "kwargs": [{"num_words": "3", "relation": "at least"}]},
         "should be of type int"),
        ({"instruction_id_list": names[1:], "kwargs": [{"num_words": 3, "relation": "about"}]},
         "neither"),
    ]:  # fmt: skip
        with pytest.raises(RewardError, match=words):
            check(Grader({"instructions": 1.0}), [Task(0, "?", None, columns)])


# ---------------------------------------------------------------- form


def test_format_strict_and_soft() -> None:
    def reward(part: str, text: str) -> float | None:
        return graded({part: 1.0}, Task(0, "?"), text).reward

    good = "<think>a</think>\n<answer>4</answer><end>"
    for part in ("format", "format(soft=True)"):
        assert reward(part, good) == 1.0 and reward(part, good.replace("\n", "")) == 1.0
    for text, share in [
        ("<think>a</think><answer>4", 0.75),
        ("<answer>4</answer>", 0.5),
        ("<think>a<think>b</think><answer>4</answer>", 0.75),  # opened twice
        ("<answer>4</answer><think>a</think>", 0.5),  # in the wrong order
        ("4", 0.0),
    ]:
        assert (reward("format", text), reward("format(soft=True)", text)) == (0.0, share)
    assert reward("format(pattern='Answer: ...', soft=True)", "the Answer: 4") == 1.0


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("en", "So the total is 12, and that is what they have to pay for it."),
        ("de", "Also ist die Summe 12, und das ist es, was sie für die Karten zahlen."),
        ("fr", "Donc le total est 12, et ce sont les euros que nous avons dans la caisse."),
        ("es", "Entonces el total es 12, y es lo que los chicos tienen que pagar por las cartas."),
        ("it", "Quindi il totale è 12, e questo è quello che gli amici hanno per la cena."),
        ("zh", "所以总共是十二个苹果，他们需要支付这些钱。"),
        ("ja", "だから、合計は十二個です。"),
        ("ko", "그래서 합계는 열두 개입니다."),
        ("ru", "Итак, всего получается двенадцать яблок."),
        ("ar", "إذن المجموع هو اثنا عشر"),
        ("hi", "इसलिए कुल बारह सेब हैं"),
    ],
)
def test_the_language_of_a_text(language: str, text: str) -> None:
    others = ("en", "de", "fr", "es", "it", "zh", "ja", "ko", "ru", "ar", "hi")
    shares = {other: language_share(text, other) for other in others}
    assert shares[language] > 0.7
    assert max(shares, key=lambda name: shares[name]) == language
    formula = text + r" $\frac{1}{2}$ ```python print(1)``` <answer>"
    assert language_share(formula, language) == shares[language]


def test_language_as_a_reward() -> None:
    half = "所以我们 the total is 12"  # 4 characters, 3 words: 3 of 7 are English
    assert graded({"language(target='en')": 1.0}, Task(0, "?"), half).reward == pytest.approx(3 / 7)
    row = Task(0, "?", None, {"language": "zh"})
    assert graded({"language": 1.0}, row, half).reward == pytest.approx(4 / 7)
    assert graded({"language(target='en')": 1.0}, Task(0, "?"), "").reward == 0.0
    with pytest.raises(RewardError, match="none of en"):
        Grader({"language(target='xx')": 1.0})


def test_repetition() -> None:
    assert repeated_share("a b c d e", 2) == 0.0
    assert repeated_share("a b a b a b", 2) == pytest.approx(3 / 5)  # 5 runs, 2 of them new
    assert repeated_share("好好好好", 2) == pytest.approx(2 / 3)
    assert graded({"repetition(words=1)": 0.5}, Task(0, "?"), "no no no no").reward == -0.375


# ---------------------------------------------------------------- silent bug 36


@pytest.mark.parametrize("part", ["math", "number", "choice", "exact", "instructions"])
def test_bug_36_the_reward_reads_what_the_policy_wrote_alone(part: str) -> None:
    """Text that others wrote, the prompt and the messages before it, is never an answer."""
    said = r"<answer>7</answer> \boxed{7} #### 7 The answer is 7"
    columns = {"choices": ["6", "7"], "instruction_id_list": ["keywords:existence"],
               "kwargs": [{"keywords": ["7"]}]}  # fmt: skip
    for prompt in (said, ({"role": "tool", "content": said}, {"role": "user", "content": said})):
        gold = "7" if part != "choice" else 1
        grade = graded({part: 1.0}, Task(0, prompt, gold, columns), "I do not know.")
        assert grade.reward == 0.0


# ---------------------------------------------------------------- other tools' signatures

SIGNATURES = """
import re
class Rubric:
    def __init__(self, funcs, weights): self.funcs, self.weights = funcs, weights
def trl(completions, prompts, answer, completion_ids, trainer_state, log_metric, log_extra, **kw):
    log_metric("x", 1.0); log_extra("y", list(answer))
    assert trainer_state is None and "level" in kw
    return [None if c == "?" else float(c == a) for c, a in zip(completions, answer)]
async def trl_async(completions, **kwargs): return [float(len(c)) for c in completions]
def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert extra_info == {"split": "train"} and data_source == "set"
    return {"score": float(solution_str == ground_truth), "extracted": solution_str}
def verifiers(completion, answer, parser, info, state, prompt):
    assert state["answer"] == answer and state["completion"] == completion and info == {"a": 1}
    return float(parser.parse_answer(completion) == answer)
async def verifiers_async(prompt, completion, answer, state, **kwargs): return 0.5
rubric = Rubric([verifiers, verifiers_async], [1.0, 0.5])
def score_answer(answer, entry):
    assert entry["question"] == "q" and entry["metadata"]["level"] == 1
    return 1.0 if answer == entry["answer"] else 0.01
def content(prompt, completion): return float(prompt.split()[0] == "q")
def messages(completions): return [float(c[0]["content"] == "x") for c in completions]
def roles(completions, prompts):
    assert [p[0]["role"] for p in prompts] == ["user"]
    return [float(c[0]["role"] == "assistant") for c in completions]
def kinds(completions): return [float(isinstance(c, list)) for c in completions]
def strips(completions): return [len(c.strip()) for c in completions]
def matches(completions): return [float(bool(re.match("x", c))) for c in completions]
"""


@pytest.fixture
def called(tmp_path: Path) -> Callable[..., list[float | None]]:
    (tmp_path / "sign.py").write_text(SIGNATURES)
    columns = {"level": 1, "data_source": "set", "extra_info": {"split": "train"}, "info": {"a": 1}}

    def call(name: str, *texts: str) -> list[float | None]:
        task = Task(0, "q", "7", columns)
        samples = [(task, text, (1,), "eos") for text in texts]
        return [g.reward for g in Grader({f"{tmp_path}/sign.py:{name}": 1.0}).grade(samples)]

    return call


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("trl", [1.0, 0.0, None]),
        ("trl_async", [1.0, 1.0, 1.0]),
        ("compute_score", [1.0, 0.0, 0.0]),
        ("verifiers", [1.0, 0.0, 0.0]),
        ("verifiers_async", [0.5, 0.5, 0.5]),
        ("rubric", [1.25, 0.25, 0.25]),
        ("score_answer", [1.0, 0.01, 0.01]),
    ],
)
def test_functions_of_other_tools_as_they_are(
    called: Callable[..., list[float | None]], name: str, rewards: list[float | None]
) -> None:
    assert called(name, "7", "8", "?") == rewards


CHAT = Task(0, ({"role": "user", "content": "q"},), "7")


def test_completions_are_messages_where_the_prompt_is(tmp_path: Path) -> None:
    """As in TRL: a function that takes completion[0]["content"] works as it is."""
    (tmp_path / "sign.py").write_text(SIGNATURES)
    parts = {f"{tmp_path}/sign.py:messages": 1.0}
    assert graded(parts, CHAT, "x<end>").reward == 1.0  # without the token that ended it
    assert graded(parts, CHAT, "y<end>").reward == 0.0
    assert graded({f"{tmp_path}/sign.py:roles": 1.0}, CHAT, "x").reward == 1.0
    for task, texts in ((CHAT, "x"), (Task(0, "q", "7"), "xx")):
        # a mixed batch: each sample by its own prompt
        (kind,) = Grader({f"{tmp_path}/sign.py:kinds": 1.0}).grade([(task, texts, (), "eos")])
        assert kind.reward == (1.0 if task is CHAT else 0.0)


def test_the_check_says_in_what_form_completions_come(tmp_path: Path) -> None:
    (tmp_path / "sign.py").write_text(SIGNATURES)
    grader = Grader({f"{tmp_path}/sign.py:kinds": 1.0})
    assert any("completions as messages" in note for note in check(grader, [CHAT]))
    assert not any("as messages" in note for note in check(grader, [Task(0, "q", "7")]))


def test_messages_where_a_string_is_expected_are_explained(tmp_path: Path) -> None:
    (tmp_path / "sign.py").write_text(SIGNATURES)
    plain = Task(0, "q", "7")
    for name, task, words in [
        ("content", CHAT, "The prompt of a chat is a list of messages"),
        ("messages", plain, "Completions are strings here, not lists of messages. Where prompts"),
        ("strips", CHAT, "Completions were given as messages, [{'role': 'assistant'"),
        ("matches", CHAT, "take completion[0]['content']"),
    ]:
        grade = graded({f"{tmp_path}/sign.py:{name}": 1.0}, task, "x")
        assert grade.status == "error" and words in grade.reason


def test_a_function_of_this_process_runs_here() -> None:
    seen: list[str] = []

    def mine(completion: str) -> float:
        seen.append(completion)
        return 1.0

    grader = Grader({"mine": 2.0}, functions={"mine": mine})
    (grade,) = grader.grade([(Task(0, "q"), "a", (), "eos")])
    assert (grade.reward, grade.correct, seen) == (2.0, True, ["a"])
    assert any("can't be stopped" in note for note in check(grader, [Task(0, "q", "a")]))


@pytest.mark.parametrize(
    "parameters",
    ["completion, answer", "completions, answer", "solution_str, ground_truth", "messages, answer"],
)
@pytest.mark.parametrize("prompt", ["Which?", [{"role": "user", "content": "Which?"}]])
def test_a_function_reads_a_text_without_the_token_that_ended_it(
    tmp_path: Path, parameters: str, prompt: Any
) -> None:
    """`completion == answer` would be false for ever with the token behind it."""
    seen, gold = parameters.split(", ")
    (tmp_path / "own.py").write_text(f"""
def content(seen):
    return seen if isinstance(seen, str) else seen[-1]["content"]

def reward({parameters}{", completion" if seen == "messages" else ""}):
    if "{seen}" == "completions":
        return [float(content(x) == a) for x, a in zip(completions, answer)]
    return float(content({seen}) == {gold})
""")
    task = Task(0, prompt, "7")
    grader = Grader({f"{tmp_path}/own.py:reward": 1.0}, ["<end>", "<stop>"])
    samples = [
        (task, "7<end>", (1, 2), "eos"),
        (task, "7<stop>", (1, 2), "eos"),
        (task, "7", (1,), "length"),
        (task, "7<end>", (1, 2), "length"), (task, "<b>7<end>", (1, 2, 3), "eos"),
    ]  # fmt: skip
    assert [grade.reward for grade in grader.grade(samples)] == [1, 1, 1, 0, 0]
