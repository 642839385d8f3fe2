"""Rubrics and single-turn environments of the `verifiers` kind: several functions as one reward.

A rubric has lists `funcs` and `weights`, a group of rubrics a list `rubrics`, an environment a
`rubric`. Functions are called by their parameters' names, in order, and share each sample's
`state`. One with `completions`, `states` or the like scores the samples of a prompt together.

Those of the package itself get prompts and completions as messages, as there; others get texts.
Unlike there, a function that raises is an error and not a 0. A weight of 0 makes a function a
measurement: it is called, for what it may leave in the state, and its result does not matter.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_origin

from groupwise.common.forked import one_process
from groupwise.errors import RewardError
from groupwise.graders.calling import TOOLS, Returned, Signature, failure, in_a_loop, plain
from groupwise.graders.calling import signature as signature_of

PACKAGE = "verifiers"
MAKER = "load_environment"  # what the package asks a module of an environment for
PLURALS = {
    "states": "state",
    "prompts": "prompt",
    "completions": "completion",
    "answers": "answer",
    "tasks": "task",
    "infos": "info",
}


class Message(dict[str, Any]):
    """A message of a chat, with its fields as items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


class Piece(NamedTuple):
    """One function of a rubric."""

    function: Callable[..., Any]
    weight: float
    objects: Mapping[str, Any]  # what the rubric hands over by name, such as its parser

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    @property
    def of_group(self) -> bool:
        found = inspect.signature(self.function)
        lists = found.return_annotation is list or get_origin(found.return_annotation) is list
        return lists or bool(set(found.parameters) & set(PLURALS))


def rubric_of(thing: Any) -> Rubric | None:
    """Return the rubric of a rubric, a group of them or an environment. None for others."""
    kinds = [] if isinstance(thing, type) else type(thing).__mro__
    names = {kind.__name__ for kind in kinds}
    if "EnvGroup" in names or ("MultiTurnEnv" in names and "SingleTurnEnv" not in names):
        raise RewardError(
            f"{type(thing).__name__} has several turns or several environments, and a reward is "
            "for one completion. Use its rubric, or a SingleTurnEnv."
        )
    rubric = getattr(thing, "rubric", None)
    found = rubric if _is_rubric(rubric) else thing
    if isinstance(thing, type) or not _is_rubric(found):
        return None
    own = any(kind.__module__.partition(".")[0] == PACKAGE for kind in kinds)
    chat = getattr(thing, "message_type", "chat" if own else "") == "chat"
    return Rubric(list(pieces_of(found)), chat)


def _is_rubric(thing: Any) -> bool:
    return all(isinstance(getattr(thing, key, None), list) for key in ("funcs", "weights"))


def pieces_of(rubric: Any) -> Iterator[Piece]:
    """Yield the functions of a rubric, and of those in it."""
    if len(rubric.funcs) != len(rubric.weights):
        raise RewardError("A rubric needs functions, and a weight for each.")
    objects = getattr(rubric, "class_objects", {})
    for function, weight in zip(rubric.funcs, rubric.weights, strict=True):
        yield Piece(function, float(weight), objects)
    for member in getattr(rubric, "rubrics", ()):
        yield from pieces_of(member)


class Rubric:
    """A weighted sum of its functions' values."""

    def __init__(self, pieces: Sequence[Piece], chat: bool) -> None:
        self.pieces, self.chat = pieces, chat
        if not any(piece.weight for piece in pieces):
            raise RewardError("A rubric needs functions, and a weight for each.")

    def signature(self) -> Signature:
        wanted: dict[str, bool] = {}
        for piece in self.pieces:
            if not piece.of_group:
                for key, required in signature_of(piece.function).wanted.items():
                    if key not in piece.objects:
                        wanted[key] = required or wanted.get(key, False)
        grouped = any(piece.of_group for piece in self.pieces)
        waits = any(inspect.iscoroutinefunction(piece.function) for piece in self.pieces)
        return Signature(wanted, True, waits, "groups" if grouped else "samples")

    def call(self, calls: Sequence[Mapping[str, Any]], limit: float) -> list[Returned]:
        """Score the `samples` of each call; the value is a result for each of them."""

        async def together() -> list[Returned]:
            return await asyncio.gather(*(self._within(each["samples"], limit) for each in calls))

        return in_a_loop(together())

    async def _within(self, samples: Sequence[Mapping[str, Any]], limit: float) -> Returned:
        try:
            return Returned("ok", await asyncio.wait_for(self._score(samples), limit or None))
        except TimeoutError:
            return Returned("timeout", f"took longer than {limit:g} s and was stopped")

    async def _score(self, samples: Sequence[Mapping[str, Any]]) -> list[Returned]:
        known_N = [self._known(sample) for sample in samples]
        values: list[list[tuple[float, float]]] = [[] for _ in samples]
        failed: dict[int, Returned] = {}
        for piece in self.pieces:
            for row, returned in enumerate(await _ask(piece, known_N)):
                if piece.weight == 0 or row in failed:
                    continue
                if returned.status != "ok":
                    failed[row] = returned
                elif returned.value is not None:
                    values[row].append((piece.weight, returned.value))
        return [
            failed.get(row, Returned("ok", sum(w * x for w, x in found) if found else None))
            for row, found in enumerate(values)
        ]

    def _known(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return all that a function may ask for by name; the state is shared by all functions."""
        known = dict(sample)
        if self.chat:
            asked = known["prompt"]
            turns = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
            known["prompt"] = [Message(turn) for turn in turns]
            known["completion"] = [Message(role="assistant", content=known["completion"])]
        turn = {key: known[key] for key in ("prompt", "completion")}
        empty: dict[str, Any] = {
            "response": None,
            "tokens": None,
            "reward": None,
            "advantage": None,
            "extras": {},
        }
        known["state"] = {
            **known["state"],
            **turn,
            "input": {key: x for key, x in known.items() if key not in ("state", "completion")},
            "trajectory": [{**turn, **empty}],
            "metrics": {},
            "reward": None,
            "timing": {},
        }
        return known


async def _ask(piece: Piece, known_N: Sequence[Mapping[str, Any]]) -> list[Returned]:
    """Return the function's value for each sample: finite numbers, or None."""
    if not piece.of_group:
        asked = [_value(piece, {**TOOLS, **known, **piece.objects}) for known in known_N]
        return [_number(piece, each) for each in await asyncio.gather(*asked)]
    lists = {many: [known[one] for known in known_N] for many, one in PLURALS.items()}
    told = await _value(piece, {**TOOLS, **lists, **piece.objects})
    if told.status != "ok":
        return [told] * len(known_N)
    if not isinstance(told.value, (list, tuple)) or len(told.value) != len(known_N):
        said = f"{piece.name} returned {told.value!r:.80} for {len(known_N)} samples of a prompt"
        return [Returned("error", f"does not work: {said}")] * len(known_N)
    return [_number(piece, Returned("ok", value)) for value in told.value]


async def _value(piece: Piece, known: Mapping[str, Any]) -> Returned:
    wanted, rest, *_ = signature_of(piece.function)
    try:
        with one_process():
            found = piece.function(**{k: x for k, x in known.items() if rest or k in wanted})
            found = await found if inspect.isawaitable(found) else found
        return Returned("ok", plain(found))
    except (Exception, SystemExit) as error:  # the boundary to the user's code
        return Returned("error", f"does not work: {piece.name} {failure(piece.function, error)}")


def _number(piece: Piece, told: Returned) -> Returned:
    if told.status != "ok" or told.value is None or isinstance(told.value, (int, float)):
        return told
    return Returned("error", f"does not work: {piece.name} returned {told.value!r:.80}, no number")
