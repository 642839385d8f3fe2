"""One end of the connection between a program under test and its tests.

Plain data goes over by value. What is none stays where it is, and the other side gets something in
its place whose class mirrors the class over there. Lists, dicts and sets are on both sides: each
message carries what was changed in them since the last one, so that they stay one and the same.
"""

from __future__ import annotations

import itertools
import operator
import socket
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.graders.sandbox.inside import mirrors, values, wire
from groupwise.graders.sandbox.inside.operations import NATURAL, OPERATIONS, has


@dataclass
class RemoteObject:
    """An object in the other process, by its number."""

    number: int


@dataclass
class Twin:
    """A container that both sides have. `synced` is what was in it when it last went over."""

    container: Any
    number: int
    synced: list[Any] = field(default_factory=list)

    def changed(self) -> bool:
        now = values.contents(self.container)
        return len(now) != len(self.synced) or not all(map(operator.is_, now, self.synced))


KINDS: dict[type, tuple[str, Callable[[Any, RemoteObject], Any]]] = {
    types.GeneratorType: ("generator", mirrors.generator),
    types.CoroutineType: ("coroutine", mirrors.coroutine),
    types.AsyncGeneratorType: ("async generator", mirrors.async_generator),
}
MAKERS = dict(KINDS.values())
HOLDERS = (*values.TAGS, *values.IMMUTABLE.values())


class Peer:
    """One end: asks, and while it waits, answers what it is asked.

    `may(operation, target, arguments)` says what the other side may do with what it holds of ours;
    None stands for everything, and for the end that believes the other one. `raised(operation,
    error)` is told of every error that comes over.
    """

    def __init__(
        self,
        connection: socket.socket,
        may: Callable[[str, Any, Sequence[Any]], bool] | None = None,
        raised: Callable[[str, BaseException], None] = lambda operation, error: None,
    ) -> None:
        self.connection, self.may, self.raised = connection, may, raised
        self.lock = threading.RLock()
        self.kept: dict[int, Any] = {}  # by identity: kept alive, so that it stays unique
        self.theirs: dict[int, Any] = {}  # what stands here for a thing over there, by its number
        self.numbers: dict[int, int] = {}  # and the number by its identity
        self.described: set[int] = set()  # classes that the other side has heard of
        self.metaclass = mirrors.metaclass(self)
        self.named_classes: set[int] = set()  # of the other side, that the tests speak of
        self.opened: set[int] = set()
        self.twins: dict[int, Twin] = {}
        self.twin_of: dict[int, Twin] = {}
        self.count = itertools.count(1) if may else itertools.count(-1, -1)
        self.sent: set[int] = set()  # twins in the message that is being written
        self.fresh: dict[int, Any] = {}  # copies of twins, of the message that is being read
        self.gone = ""
        self.holds_back = False  # changes of containers, until they are settled
        self.waiting: list[tuple[Any, list[Any]]] = []
        self.answering = 0  # what the other side asked for and waits for

    # Asking and answering.

    def ask(self, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        """Return what the operation gives on the other side."""
        with self.lock:
            try:
                self._send("ask", operation, (args, kwargs))
                while (message := wire.receive(self.connection))[0] == "ask":
                    self._answer(message)
                kind, found = self._found(message)
            except wire.Gone as gone:
                self.gone = str(gone)
                raise
        if kind == "value":
            return found
        if not isinstance(found, NATURAL.get(operation, ())):
            self.raised(operation, found)
        raise found

    def serve(self) -> None:
        """Answer until the other side leaves."""
        while True:
            self._answer(wire.receive(self.connection))

    def _answer(self, message: Any) -> None:
        self.answering += 1
        try:
            self._send("value", "", self._do(message))
        except wire.Gone:
            raise
        except BaseException as error:  # the boundary between the two
            try:
                self._send("error", "", error)
            except (ValueError, RecursionError):
                self._send("error", "", RuntimeError(f"a {type(error).__name__} too large to tell"))
        finally:
            self.answering -= 1

    def _do(self, message: Any) -> Any:
        operation = message[1]
        (target, *others), named = self._received(message)
        if operation not in OPERATIONS or not (
            self.may is None or self.may(operation, target, others)
        ):
            kind = AttributeError if operation == "getattr" else PermissionError
            raise kind(f"{operation} is not allowed here")
        return OPERATIONS[operation](target, *others, **named)

    def _send(self, kind: str, operation: str, value: Any) -> None:
        """Send a message, and what was changed in containers that it does not mention."""
        self.sent.clear()
        if kind == "ask":
            args, kwargs = value
            packed: Any = {"tuple": [self.pack(arg) for arg in args]}
            named = {key: self.pack(item) for key, item in kwargs.items()}
        else:
            packed, named = self.pack(value), {}
        rest = [twin for twin in self.twins.values() if twin.number not in self.sent]
        changes = [self._pack_container(twin.container) for twin in rest if twin.changed()]
        message = [kind, operation, packed, named, changes, self._forget_twins()]
        wire.send(self.connection, message)

    def _found(self, message: Any) -> tuple[str, Any]:
        try:
            found, _ = self._received(message)
            if message[0] != "value" and not isinstance(found, BaseException):
                raise TypeError("no error")
            return message[0], found
        except Exception as error:  # nothing that a protocol of Python could take for an answer
            raise wire.Gone("sent what can't be read") from error

    def _received(self, message: Any) -> tuple[Any, dict[str, Any]]:
        """Return the value of a message, after its changes of other containers are made."""
        _, _, packed, named, changes, forgotten = message
        self.fresh.clear()
        value = self.unpack(packed)
        others = {key: self.unpack(item) for key, item in named.items()}
        for change in changes:
            self.unpack(change)
        for number in forgotten:
            if twin := self.twins.pop(number, None):
                del self.twin_of[id(twin.container)]
        return value, others

    # What belongs to whom.

    def is_theirs(self, value: Any) -> bool:
        return id(value) in self.numbers

    def is_open(self, value: Any) -> bool:
        return self.may is None or id(value) in self.opened

    def may_show(self, one: Any, other: Any) -> bool:
        """Return whether an operator with these two sides may be asked for."""
        return (self.is_theirs(one) and self.is_theirs(other)) or (
            self.is_open(one) or self.is_open(other)
        )

    def open_up(self, value: Any) -> Any:
        if self.is_theirs(value):
            self.opened.add(id(value))
        return value

    def open_like(self, one: Any, made: Any, other: Any = None) -> Any:
        return self.open_up(made) if self.is_open(one) or self.is_open(other) else made

    def settle(self) -> None:
        """Make the changes that were held back."""
        for container, parts in self.waiting:
            values.fill(container, parts)
            self._sync(container)
        self.waiting.clear()

    # Containers.

    def _forget_twins(self) -> list[int]:
        """Forget containers that nobody else refers to, as they can't change any more; return their
        numbers.
        """
        forgotten = []
        for number in list(self.twins):
            if sys.getrefcount(self.twins[number].container) == 2:  # and one of the count itself
                twin = self.twins.pop(number)
                del self.twin_of[id(twin.container)]
                forgotten.append(number)
        return forgotten

    def _twin(self, container: Any, number: int | None = None) -> Twin:
        twin = Twin(container, next(self.count) if number is None else number)
        self.twins[twin.number] = self.twin_of[id(container)] = twin
        return twin

    def _sync(self, container: Any) -> None:
        if twin := self.twin_of.get(id(container)):
            twin.synced = values.contents(container)

    def _pack_container(self, value: Any) -> Any:
        known = self.twin_of.get(id(value))
        twin = known or self._twin(value)
        if twin.number in self.sent:
            return {"twin": twin.number}
        self.sent.add(twin.number)
        kind = type(value)
        changed = known is not None and twin.changed()
        twin.synced = values.contents(value)
        packed = {values.TAGS[kind]: [self.pack(part) for part in twin.synced], "twin": twin.number}
        if kind is defaultdict:
            packed["factory"] = self.pack(value.default_factory)
        if changed:
            packed["changed"] = 1
        return packed

    def _unpack_container(self, tag: str, content: Any, rest: dict[str, Any]) -> Any:
        kind, number = values.CONTAINERS[tag], rest["twin"]
        twin = self.twins.get(number)
        if twin is not None and type(twin.container) is not kind:
            raise ValueError("a container has become another")
        if twin is not None and self.holds_back:
            return self._as_it_is_there(twin, kind, content, bool(rest.get("changed")))
        made = twin.container if twin else self._twin(kind(), number).container
        parts = self._unpack_parts(content)
        if twin is None or rest.get("changed"):
            if "factory" in rest:
                made.default_factory = self.unpack(rest["factory"])
            values.fill(made, parts)
            self._sync(made)
        return made

    def _as_it_is_there(self, twin: Twin, kind: type, content: Any, changed: bool) -> Any:
        """Return a container with changes that are held back: as a copy, unless it has none."""
        copied = self.fresh[twin.number] = kind()
        parts = self._unpack_parts(content)
        now = values.contents(twin.container)
        if changed:
            self.waiting.append((twin.container, parts))
        elif not any(
            part is not old and isinstance(old, HOLDERS)
            for part, old in zip(parts, now, strict=False)
        ):
            del self.fresh[twin.number]
            return twin.container
        values.fill(copied, parts)
        return copied

    def _unpack_parts(self, content: Any) -> list[Any]:
        return [self.unpack(part) for part in content]

    # Values.

    def pack(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str, float):
            return value
        if kind is int:
            return value if -values.SMALL < value < values.SMALL else {"int": hex(value)}
        if kind in values.TAGS:
            return self._pack_container(value)
        if kind in values.IMMUTABLE.values():
            return {kind.__name__: [self.pack(item) for item in value]}
        if kind is RemoteObject:
            return {"yours": value.number}
        if id(value) in self.numbers:
            return {"yours": self.numbers[id(value)]}
        if values.of_python(value):
            return {"builtin": value.__name__}
        found = values.rare(value, self.pack)
        if found is None and self.may and (name := values.pure_name(value)):
            return {"function": name}
        return self._pack_reference(value, kind) if found is None else found

    def _pack_reference(self, value: Any, kind: type) -> Any:
        if isinstance(value, type):
            return self._describe(value)
        self.kept[id(value)] = value
        if isinstance(value, BaseException):
            state = {key: item for key, item in vars(value).items() if key != "__notes__"}
            parts = map(self.pack, (list(value.args), state, value.__cause__))
            return {"error": [self._describe(kind), *parts], "mine": id(value)}
        if kind in KINDS:
            return {"mine": id(value), "is": KINDS[kind][0]}
        told = self._describe(kind) if kind is object else self._describe_own(kind)
        found = {"mine": id(value), "of": told}
        base = next((base for base in values.VALUES if isinstance(value, base)), None)
        if base is not None:
            found["value"] = self.pack(values.held(value, base))
        return found

    def _describe(self, kind: type) -> Any:
        """Describe a class by its name where both sides have it, else by what its mirror has to
        know.
        """
        return {"builtin": kind.__name__} if values.of_python(kind) else self._describe_own(kind)

    def _describe_own(self, kind: type) -> Any:
        if id(kind) in self.numbers:
            return {"yours": self.numbers[id(kind)]}
        self.kept[id(kind)] = kind
        if id(kind) in self.described:
            return {"class": id(kind)}
        self.described.add(id(kind))
        base = next((base for base in values.VALUES if issubclass(kind, base)), object)
        if issubclass(kind, BaseException):
            base = BaseException
        bases = [self._describe(base) for base in kind.__bases__]
        return {
            "class": id(kind),
            "name": kind.__name__,
            "library": values.library_name(kind),
            "bases": bases,
            "operators": has(kind, base),
            "hashable": kind.__hash__ is not None,
        }

    def unpack(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        tag, content = next(iter(value.items()))
        if tag in values.CONTAINERS:
            return self._unpack_container(tag, content, value)
        if tag in values.IMMUTABLE:
            return values.IMMUTABLE[tag](self._unpack_parts(content))
        if tag in values.VIEWED:
            return values.VIEWED[tag](self._unpack_parts(content))
        if tag == "twin":
            return self.fresh[content] if content in self.fresh else self.twins[content].container
        if tag == "yours":
            return self.kept[content]
        if tag == "class":
            return self._stand_in(content, lambda: self._mirror(value))
        if tag == "function" and self.may is None:
            return values.pure_function(content)
        if "mine" in value:
            return self._stand_in(value["mine"], lambda: self._make(value))
        return values.RARE[tag](content)

    def _stand_in(self, number: int, make: Callable[[], Any]) -> Any:
        """Return the stand-in for an object over there: the same one each time."""
        if number not in self.theirs:
            made = make()
            self.theirs[number] = made
            if not isinstance(made, type) or isinstance(made, self.metaclass):
                self.numbers[id(made)] = number
        return self.theirs[number]

    def _make(self, packed: dict[str, Any]) -> Any:
        if "error" in packed:
            return self._error(*map(self.unpack, packed["error"]))
        if "is" in packed:
            return MAKERS[packed["is"]](self, RemoteObject(packed["mine"]))
        kind = self.unpack(packed["of"])
        if "value" not in packed:
            return object.__new__(kind)
        base = next(base for base in values.VALUES if issubclass(kind, base))
        return base.__new__(kind, self.unpack(packed["value"]))

    def _error(self, kind: Any, args: list[Any], state: dict[str, Any], cause: Any) -> Any:
        mirrored = isinstance(kind, self.metaclass)
        try:
            error = kind.__new__(kind, *args) if mirrored else kind(*args)
        except TypeError:  # it was made of other arguments than it keeps
            error = kind.__new__(kind, *args)
        error.args, error.__cause__ = tuple(args), cause
        if not mirrored:  # else they are asked for
            error.__dict__.update(state)
        return error

    def _mirror(self, told: dict[str, Any]) -> type:
        if found := values.library_class(told["library"]):
            return found
        given = [self.unpack(base) for base in told["bases"]]
        bases = [base for base in given if _can_be_derived(base, self.metaclass)]
        plain = next((base for base in given if base in values.TAGS), None)
        held = next(
            (
                base
                for base in (BaseException, *values.VALUES)
                if any(issubclass(b, base) for b in bases)
            ),
            object,
        )
        pretended = type(told["name"], (plain,), {}) if plain else None
        space = mirrors.namespace(self, told["operators"], told["hashable"], held, pretended)
        space["__module__"] = "solution"
        return self.metaclass(told["name"], tuple(bases), space)


def _can_be_derived(base: Any, metaclass: type) -> bool:
    """Return whether a mirror can have this base: one like it, an error, a class of values."""
    own = isinstance(base, type) and (issubclass(base, BaseException) or base in values.VALUES)
    return isinstance(base, metaclass) or own
