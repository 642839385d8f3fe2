"""Where an answer stands: texts that are cut off, answers that are withdrawn, several boxes."""

from __future__ import annotations

import random
import re
import time

import pytest

from groupwise.graders import choice
from groupwise.graders.mathematics.boxes import boxed
from groupwise.graders.mathematics.endings import taken_back, unfinished
from groupwise.graders.mathematics.extract import find, without_last_reason
from groupwise.graders.mathematics.formulas import ends_inside
from groupwise.graders.mathematics.grader import verdicts
from groupwise.graders.mathematics.numbers import answer_number, gold_number, number
from groupwise.graders.rubric import Grader
from groupwise.records import Task

both = pytest.mark.parametrize("grader", ["math", "number"])


def right(grader: str, gold: str, text: str, finish: str = "eos") -> bool:
    (grade,) = Grader({grader: 1.0}).grade([(Task(0, "How many?", gold), text, (), finish)])
    assert grade.correct is not None
    return grade.correct


# ---------------------------------------------------------------- cut off

SOLUTION = (
    "The first shelf holds 31 books. The second one holds 4 more, so 31 + 4 = 35 books. "
    "Together they hold 31 + 35 = 66 books.\nHalf of them are sold, which leaves 33 books."
)


@both
@pytest.mark.parametrize(
    "text",
    [
        "It comes to 4. Then the", "so 4 + 3 = 7 and 4", "We add 2 and 2 to get 4\nThey walked a",
        "Since 4 +", "Hence 4 =", "we get 4, so", "so $x = 4$ and $y =", "so $x = 4", "First: 4:",
        "Let $x = 4$. Now we use \\(", "\\begin{align} x &= 4", "(we take 4", "4 is multiplied by",
        "$$x = 4$$ So the product", "The sum is 4. It remains to show that it is the least",
        "We start. Let it be 4 in the first of the two cases that were to be looked at here",
    ],
)  # fmt: skip
def test_the_last_number_of_a_text_that_was_cut_off_is_no_answer(grader: str, text: str) -> None:
    if text.endswith("and 4"):
        assert not right(grader, "4", text, "length")
    else:
        assert not right(grader, "4", text)


@both
@pytest.mark.parametrize(
    "text",
    [
        "It is 4", "So he has 4 apples left", "There are 4 of them.", "**4**", "<b>4</b>",
        "We add. Then we get 4", "It is 4.\n\nLet me know if anything is unclear!", "= 4",
        "Hence \\[ x = 4 \\]\nwhich ends the proof.", "He paid $4", "He paid $4 because of that",
        "It is 4 (four)", "x=4$\nHe paid 4$ for it.", "```\n4\n```", "4 dollars each",
        "So 4 sq. cm all in all",
    ],
)  # fmt: skip
def test_a_text_that_ends_is_not_cut_off(grader: str, text: str) -> None:
    assert right(grader, "4", text)


@both
def test_what_the_record_says_to_be_cut_off_has_to_mark_its_answer(grader: str) -> None:
    for text in ("It is 4.", "It is 4. Then 4 = 4", "The answer is 4", "#### 4"):
        assert right(grader, "4", text) and not right(grader, "4", text, "length"), text
    for text in (r"\boxed{4}", "<answer>4</answer>", "The answer is 4.", "#### 4\nNow let"):
        assert right(grader, "4", text, "length"), text
        assert right(grader, "4", text, "stop"), text
    assert not right(grader, "4", r"\boxed{4", "length")
    for bare in ("4", "$4$", "2 + 2 = 4", r"\frac{8}{2}"):  # no sentence that could go on
        assert right(grader, "4", bare, "length") == right(grader, "4", bare), bare


@both
def test_no_cut_of_a_solution_passes_where_the_record_knows(grader: str) -> None:
    for gold in ("31", "4", "35", "66", "33"):
        for end in range(len(SOLUTION)):
            assert not right(grader, gold, SOLUTION[:end], "length")


@both
def test_of_cuts_that_no_record_knows_of_few_pass(grader: str) -> None:
    """Those that end in the sentence of the number, not long behind it, or with that sentence."""
    for gold in ("31", "4", "35", "66"):
        passed = [end for end in range(len(SOLUTION)) if right(grader, gold, SOLUTION[:end])]
        for end in passed:
            since = SOLUTION[:end].rpartition(gold)[2]
            assert len(since.split()) <= 8 and not re.search(r"\.\s", since.rstrip()), SOLUTION[
                :end
            ]


def test_choice_has_to_mark_its_answer_in_a_text_that_was_cut_off() -> None:
    known = choice.options({})
    assert choice.chosen("I would say B", known) == "B"
    assert choice.chosen("I would say B", known, cut=True) is None
    assert choice.chosen("The answer is B. Since", known, cut=True) == "B"
    assert not right("choice", "B", "It may be B", "length")


def test_a_bare_formula_is_no_sentence_that_could_be_cut_off() -> None:
    assert right("math", "185", "185\\") and right("math", "x^2 + 1", "$1 + x^2")
    assert not right("math", "4", "so we take 4,")


def test_unfinished() -> None:
    assert unfinished("x = 4 and", 5) and not unfinished("x = 4 and so on.", 5)
    assert ends_inside(r"so \[ x") and ends_inside("so $2x + 1") and not ends_inside("for $2 more")


# ---------------------------------------------------------------- withdrawn

MARKS = (r"So \boxed{{{}}}.", "The answer is {}.", "<answer>{}</answer>", "#### {}\n", "It is {}.")
WITHDRAWN = (
    "Wait, that is wrong, it's 5.", "No, actually 5.", "Hmm, I made a mistake. It should be 5.",
    "Correction: 5.", "Scratch that, it is 5.", "Sorry, I miscounted: the total is 5.",
    "On second thought, it must be 5.", "But this is incorrect. The right value is 5.",
    "That's not right. It is 5.", "Oops, that can't be right, it's 5.",
)  # fmt: skip


@both
@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("back", WITHDRAWN)
def test_what_is_said_instead_counts(grader: str, mark: str, back: str) -> None:
    text = f"{mark.format(4)} {back}"
    assert not right(grader, "4", text), text
    assert right(grader, "5", text), text


@both
@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize(
    "back",
    ["That is not right.", "Wait, this is wrong. Let me redo it.", "I made an error somewhere.",
     "Hmm, that cannot be correct."],
)  # fmt: skip
def test_a_withdrawal_without_another_answer_leaves_none(grader: str, mark: str, back: str) -> None:
    assert not right(grader, "4", f"{mark.format(4)} {back}")


@both
@pytest.mark.parametrize("mark", MARKS[:4])
@pytest.mark.parametrize(
    "rest",
    [
        "Let me check: 2 + 2 = 4. Yes.", "Wait, is it? We have 3 + 1 = 4. That is correct.",
        "Option A is wrong because 3 < 4.", "The first says 5. This is incorrect.",
        "However, not all of them are even.", "No other number fits.", "This is right.",
        "Hmm, that can't be right. But 1 + 3 = 4, so it is right.", "Actually, we need less.",
        "It is a common mistake to forget one.",
    ],
)  # fmt: skip
def test_what_does_not_take_an_answer_back(grader: str, mark: str, rest: str) -> None:
    assert right(grader, "4", f"{mark.format(4)} {rest}"), rest


def test_an_option_is_withdrawn_too() -> None:
    known = choice.options({})
    assert choice.chosen("The answer is A. Wait, that is wrong, it is B.", known) == "B"
    assert choice.chosen("The answer is A. No, actually B.", known) == "B"
    assert choice.chosen("The answer is C. A is wrong because it says so.", known) == "C"


def test_in_the_sentence_of_the_mark() -> None:
    assert not right("math", "4", "The answer is 4 ... no, actually 5")
    assert right("math", "5", "The answer is 4, no wait, 5")
    assert taken_back(" or so. All is well.") is None


def test_a_question_is_no_answer() -> None:
    assert find("Is it so that the answer is $4$? We try 7 and 8.").how == "whole"
    assert not right("math", "4", "The answer is 4? Or perhaps not.\nWe look at where")


# ---------------------------------------------------------------- several boxes


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (r"$x=\boxed{1}$ and $y=\boxed{2}$", "1 , 2"), (r"\boxed{1}, \boxed{2}", "1 , 2"),
        (r"\boxed{1} or \boxed{2}", "1 , 2"), (r"First \boxed{3}, then \boxed{5}", "5"),
        (r"\boxed{3}; therefore \boxed{5}", "5"), (r"\boxed{3+2} = \boxed{5}", "5"),
        (r"$\boxed{a} \implies \boxed{b}$", "b"), (r"\boxed{3}, so we get \boxed{5}", "5"),
    ],
)  # fmt: skip
def test_parts_of_one_answer_and_steps_to_it(text: str, held: str) -> None:
    assert boxed(text) == held


def test_boxes_far_apart_are_one_answer_if_the_gold_one_has_as_many_parts() -> None:
    text = "(a) The least is \\boxed{1}.\n\n(b) The largest of them all is \\boxed{5}."
    told = verdicts([(text, gold) for gold in ("1, 5", "(1, 5)", "5", "1", "1, 2, 5", "(5, 1)")])
    assert [verdict.score for verdict in told] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


@both
def test_candidates_in_boxes_are_none(grader: str) -> None:
    for text in (r"\boxed{4} and \boxed{5}", r"\boxed{4} or \boxed{5}", r"\boxed{4}, \boxed{5}"):
        assert not right(grader, "4", text) and not right(grader, "5", text)


@both
def test_candidates_in_words_are_none(grader: str) -> None:
    for text in ("It is 4 or maybe 5", "4, or perhaps 5", "It is 4 or x = 5"):
        assert not right(grader, "4", text) and not right(grader, "5", text), text


# ---------------------------------------------------------------- which number of a sentence


@both
@pytest.mark.parametrize(
    ("said", "other", "text"),
    [
        ("90", "30", "So he walks 3*30 = 90 miles in 30 days"),
        ("10", "200", "She can pour 2000/200 = 10 portions of 200 ml milk."),
        ("39", "35", "They pay $14 + $25 = $39 for the 35 liters."),
        ("5", "50", "It takes 50 / 10 = 5 days to use 50 liters."),
        ("25", "5", "With x = 5 the area is 25."), ("25", "5", "As x = 5, it covers 25 squares."),
        ("7", "3", "He needs 7 because the other 3 are broken."),
        ("8", "6", "He has 6 because 2 + 3 = 8"),  # the calculation says more
        ("3", "9", "She can miss 9 days or less, so she has 9 - 6 = 3 more days"),
        ("7", "2", "Because he has 2, he needs 7"),
    ],
)  # fmt: skip
def test_the_result_of_a_calculation_and_what_it_is_of(
    grader: str, said: str, other: str, text: str
) -> None:
    assert right(grader, said, text) and not right(grader, other, text)


def test_a_range_behind_a_calculation_is_none() -> None:
    for text in ("It is 10/2 = 5 hours to 10 hours", "= 5 to 10", "= 10% of 50"):
        assert answer_number(text) is None, text


@pytest.mark.parametrize(
    "text",
    [
        "Total: 42", "A: 42", "x ≈ 42", r"so $x \approx 42$.", "$f(3) = 42$", "the area = 42 cm^2",
        r"We find $x \approx 42$", "The answer is 42, because 40 is too small.",
        "To find the answer: add them. We have 20 and 22.\nThus, we get $42$.",
        "$x = 42$ (since $x > 0$)", "So, x = 42 or in words, forty-two.",
    ],
)  # fmt: skip
def test_names_and_reasons_around_a_number(text: str) -> None:
    assert right("math", "42", text) and not right("math", "43", text)


def test_a_calculation_that_is_not_done_and_a_decimal_comma() -> None:
    assert not right("math", "1500", "So the height is 500 + 1000")
    assert right("math", "3.5", "Das Ergebnis ist 3,5.")


def test_a_reason_is_cut_off_only_behind_a_value() -> None:
    assert without_last_reason("It is 5 because it fits.") == "It is 5"
    assert without_last_reason("Because it fits, it is 5.") == "Because it fits, it is 5."
    assert without_last_reason("It is 5 because it fits. So 6.") == "It is 5 because it fits. So 6."


@both
def test_a_sentence_that_turns_away_from_its_value_has_not_said_it(grader: str) -> None:
    for text in (
        "There were 42 but half of them left.", "It is 42, but that leaves out the tip.",
        "So we get 42, although nothing of that was shown.", "42 but not sure",
        "Es sind 42, aber die Hälfte ist fort.", "Right answer 42 but no reasoning at all",
    ):  # fmt: skip
        assert not right(grader, "42", text), text
    for text in (
        "There were 50 but now there are 42.", "She has 42 left, though.",
        "It is 42, but that is correct.", "We get 42. But check it: 6 * 7 = 42.",
        "The answer is 42 but she wants more.", "\\boxed{42} but see below.",
        "It is 42, but not 43.", "The butler has 42.",
    ):  # fmt: skip
        assert right(grader, "42", text), text


def test_a_formula_may_be_turned_away_from_too() -> None:
    (turned, plain) = verdicts([("We find $x^2$ but more is asked for.", "x^2"),
                                ("We find $x^2$ here.", "x^2")])  # fmt: skip
    assert (turned.score, plain.score) == (0.0, 1.0)


# ---------------------------------------------------------------- any text, in linear time


@both
def test_every_phrasing_of_the_right_answer_passes_and_of_another_does_not(grader: str) -> None:
    phrasings = (
        "The answer is {}.", "Answer: {}", "**Answer:** ${}$", "Thus \\boxed{{{}}}.", "#### {}",
        "So the value is ${}$.", "We get {} in all.", "<answer>{}</answer>", "**{}**", "= {}",
        "**Final Answer**\n\n$${}$$", "Hence it is\n\\[{}.\\]", "The total comes to {}",
        "The final answer is: ${}$. I hope it is correct.", "It follows that $x = {}$.",
    )  # fmt: skip
    pick = random.Random(3)
    for phrasing in phrasings:
        gold = str(pick.randrange(2, 10**4))
        other = str(int(gold) + pick.randrange(1, 9))
        for lead in ("", "First 12 and 13 are added.\n", "We use that 3 + 4 = 7. "):
            assert right(grader, gold, lead + phrasing.format(gold)), phrasing
            assert not right(grader, gold, lead + phrasing.format(other)), phrasing


def test_no_text_takes_long() -> None:
    texts = [
        "answer: ? " * 10_000, "because " * 10_000 + "5", "5" + ". " * 20_000 + "x",
        "5" + "\n" * 20_000 + "x", "\\(" * 20_000 + "5", "wait, " * 10_000 + "5",
        r"\boxed{5}" + "wait, no, " * 10_000, "5 = 5 a " * 9_000, "5 " + "*" * 20_000,
        "answer: " + "\\(" * 20_000, "5 but" * 20_000, "5" + " but" * 20_000,
        "answer: 5" + ", no, " * 10_000, "$" * 20_001,
    ]  # fmt: skip
    wanted = gold_number("5")
    assert wanted is not None
    start = time.process_time()
    for text in texts:
        number(text, wanted)
    assert time.process_time() - start < 5.0  # a second here; hours if one of them were quadratic
