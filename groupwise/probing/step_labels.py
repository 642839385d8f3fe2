"""Labels of steps from answers that go on behind them: pure, for process reward models.

Math-Shepherd (2312.08935) asks behind every step: soft labels are the share of right answers, hard
ones whether there is any. OmegaPRM (2406.06592) bisects for the first step behind which none is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

KINDS = ("hard", "soft", "first-error")
Verdicts = Sequence[bool | None]  # of answers that go on behind a step; None: not graded


def share_right(verdicts: Verdicts) -> float | None:
    """Return the share of right answers among those that have a verdict; None without any."""
    known = [verdict for verdict in verdicts if verdict is not None]
    return sum(known) / len(known) if known else None


def any_right(verdicts: Verdicts) -> bool | None:
    """Return whether an answer is right; None where no verdict says so."""
    share = share_right(verdicts)
    return None if share is None else share > 0


def soft_labels(by_step: Sequence[Verdicts]) -> list[float] | None:
    """Return the share of right answers behind each step; None where one has no verdict.

    Behind the last step stands the verdict on the answer itself.
    """
    found = [share_right(verdicts) for verdicts in by_step]
    return None if None in found else [x for x in found if x is not None]


def hard_labels(by_step: Sequence[Verdicts]) -> list[bool] | None:
    """Return whether a right answer goes on behind each step; None where one has no verdict."""
    found = soft_labels(by_step)
    return None if found is None else [share > 0 for share in found]


Search = Generator[int, bool | None, int | None]


def first_error(steps: int) -> Search:
    """Search for the first step behind which no answer is right.

    Yields how many steps an answer should begin with, and is sent whether a right one does; None
    ends the search. Returns how many steps are right: all, or those before the first wrong one.
    None where nobody can tell: no answer to the prompt is right at all, or one has no verdict.
    """
    for ends in (steps, 0):  # the answer itself, and the prompt alone
        right = yield ends
        if right is None:
            return None
        if ends and right:
            return steps
        if not ends and not right:
            return None
    good, bad = 0, steps
    while bad - good > 1:
        middle = (good + bad) // 2
        right = yield middle
        if right is None:
            return None
        good, bad = (middle, bad) if right else (good, middle)
    return good


def search(steps: int, right_behind: Callable[[int], bool | None]) -> int | None:
    """Run the search for one answer, with a function that is asked."""
    running = first_error(steps)
    asked = next(running)
    while True:
        try:
            asked = running.send(right_behind(asked))
        except StopIteration as found:
            right: int | None = found.value
            return right


def labels_up_to(right: int, steps: int) -> list[bool]:
    """Return labels that end with the first wrong step (2305.20050)."""
    return [True] * right + [False] * (right < steps)
