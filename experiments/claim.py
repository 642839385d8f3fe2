"""What a claim is: a file beside this one, read and found whole before anything runs."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCORES = ("accuracy", "area", "start")  # of held-out tasks: at the end, over the budget, before
MINUS = " - "  # between two measures of a run, where a claim is about their difference


@dataclass(frozen=True)
class Expectation:
    """What a paper predicts of two arms: one has more of a measure, or they are alike."""

    measure: str  # or two: "accuracy - start"
    more: str
    than: str | float  # another arm, or a number
    size: float  # the published effect, or how far apart arms that are alike may be
    alike: bool
    relative: bool  # sizes are shares of the second arm's mean
    # What must not pass for alike: an arm that the claim says differs from the second one, or a
    # difference of this size.
    contrast: str | float | None = None
    looked: str = ""  # what of it was chosen when results had been seen
    # The same question in another setting: "f_dapo_ladder: token_level > soft", or with "=".
    also: tuple[str, ...] = ()

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Expectation:
        known = dict(entry)
        alike = "alike" in known
        more, than = known.pop("alike") if alike else (known.pop("more"), known.pop("than"))
        size = known.pop("within" if alike else "effect")
        rest: dict[str, Any] = {"contrast": known.pop("contrast")} if alike else {}
        rest |= {"looked": known.pop("looked", ""), "also": tuple(known.pop("also", ()))}
        found = cls(
            known.pop("measure"), more, than, size, alike, known.pop("relative", False), **rest
        )
        if known:
            raise ValueError(f"an expectation has no {', '.join(known)}")
        return found

    @property
    def parts(self) -> list[str]:
        return self.measure.split(MINUS)

    @property
    def sides(self) -> str:
        """Return its two arms, as `also` names them."""
        return f"{self.more} {'=' if self.alike else '>'} {self.than}"


@dataclass(frozen=True)
class Claim:
    """One file."""

    name: str
    plain: str  # what was asked and what was seen, in a sentence for somebody new to it
    claim: str
    source: str
    published: str
    setting: str
    reading: str
    seeds: int
    budget: str
    arms: dict[str, str]  # name -> what compare calls it
    expect: tuple[Expectation, ...]
    config: str = ""  # a file beside it: what all arms share
    settings: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()  # measures that its table has besides those that it expects of
    looked: str = ""  # what of its design was chosen when results had been seen

    @property
    def measures(self) -> list[str]:
        """Those that compare is asked for; scores are there anyway."""
        wanted = [part for e in self.expect for part in e.parts] + list(self.shown)
        return [part for part in dict.fromkeys(wanted) if part not in SCORES]


Question = tuple[Claim, Expectation]


def read(name: str) -> Claim:
    """A claim, whole and consistent: what is wrong is told now, and not behind its runs."""
    file = HERE / f"{name}.toml"
    known = parse(file)
    try:
        expect = tuple(Expectation.of(entry) for entry in known.pop("expect"))
        known |= {key: tuple(known.get(key, ())) for key in ("settings", "shown")}
        claim = Claim(name=name, expect=expect, **known)
    except (KeyError, TypeError, ValueError) as error:
        raise SystemExit(f"{file} is no claim: {type(error).__name__}: {error}") from None
    for e in expect:
        for arm in (e.more, e.than, e.contrast):
            if isinstance(arm, str) and arm not in claim.arms:
                raise SystemExit(
                    f"{file} expects something of {arm!r}, and its arms are "
                    f"{', '.join(claim.arms)}."
                )
        if e.alike:
            _check_margin(file, e, expect)
    return claim


def _check_margin(file: Path, e: Expectation, expect: Sequence[Expectation]) -> None:
    """A margin that the contrast would pass as well tells nothing."""
    if e.contrast in (e.more, e.than):
        raise SystemExit(f"{file}: {e.contrast} is its own contrast. Name a third arm, or a size.")
    for least in _expected_of_contrast(e, expect):
        if e.size >= least:
            raise SystemExit(
                f"{file}: {e.more} and {e.than} count as alike within {e.size:g} of {e.measure}, "
                f"and what should differ ({e.contrast}) is expected to by {least:g}: it would "
                f"pass as well. Make `within` smaller."
            )


def _expected_of_contrast(e: Expectation, expect: Sequence[Expectation]) -> list[float]:
    """How far the contrast is said to be from the second arm; nothing where no one says so."""
    if isinstance(e.contrast, float | int):
        return [float(e.contrast)]
    same = [
        other
        for other in expect
        if not other.alike
        and (other.measure, other.relative) == (e.measure, e.relative)
        and {other.more, other.than} == {e.contrast, e.than}
    ]
    # A share of the smaller arm is a smaller one of the larger arm, which may be the second one.
    return [other.size / (1 + other.size) if e.relative else other.size for other in same]


def parse(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{file} can't be read: {error}") from None


def asked_elsewhere(claims: Sequence[Claim]) -> list[tuple[Question, Question]]:
    """Return the pairs of expectations that ask the same, as their files say."""
    known: dict[tuple[str, str], list[Question]] = {}
    for claim in claims:
        for e in claim.expect:
            known.setdefault((claim.name, e.sides), []).append((claim, e))
    pairs = []
    for claim in claims:
        for e in claim.expect:
            for text in e.also:
                name, _, sides = text.partition(": ")
                if (name, sides) not in known:
                    raise SystemExit(
                        f"{claim.name} names {text!r}, and no claim expects that. Write "
                        "`CLAIM: ARM > ARM`, or = for arms that are alike."
                    )
                asked = known[name, sides]  # of the same measure, if any is
                same = next((x for x in asked if x[1].measure == e.measure), asked[0])
                pairs.append(((claim, e), same))
    return pairs


def names() -> list[str]:
    """All claims, in order; files that arms share are none."""
    return [file.stem for file in sorted(HERE.glob("*.toml")) if "claim" in parse(file)]
