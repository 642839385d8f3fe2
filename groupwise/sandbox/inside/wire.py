"""Values between two processes that do not trust each other: plain data goes over by value.

What is no plain data stays where it is, and the other side gets a `Remote` in its place. Asking a
Remote whether it equals something compares identities and asks nobody: the process with the tests
must not let the program under test decide what it is equal to.
"""

from __future__ import annotations

import array
import base64
import builtins
import datetime
import decimal
import fractions
import json
import operator
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

MAX_FRAME = 32 * 2**20
SMALL = 2**53
HARMLESS = (abs, chr, divmod, len, max, min, ord, pow, repr, round, sorted, sum)
TIMES = (datetime.datetime, datetime.date, datetime.time)  # a datetime is a date: it goes first


def _apply(target: Any, /, *args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": _apply,
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "int": int,
    "float": float,
    "index": operator.index,
}


class Gone(Exception):
    """The other side has ended."""


class RemoteError(Exception):
    """An error of a type that only the other side knows."""


def send(connection: socket.socket, value: Any) -> None:
    data = json.dumps(value).encode()
    if len(data) > MAX_FRAME:
        raise ValueError(f"a value of {len(data)} bytes is too large to be handed over")
    try:
        connection.sendall(struct.pack(">I", len(data)) + data)
    except OSError as error:
        raise Gone("has ended") from error


def receive(connection: socket.socket) -> Any:
    (length,) = struct.unpack(">I", _exactly(connection, 4))
    if length > MAX_FRAME:
        raise Gone(f"sent {length} bytes at once")
    try:
        return json.loads(_exactly(connection, length))
    except (ValueError, RecursionError) as error:
        raise Gone("sent what can't be read") from error


def _exactly(connection: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        try:
            part = connection.recv(min(length, 2**20))
        except OSError as error:
            raise Gone("has ended") from error
        if not part:
            raise Gone("has ended")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


class Remote:
    """Something in the other process. Not iterated, printed or compared without asking for it."""

    def __init__(self, peer: Peer, number: int, name: str) -> None:
        self.__dict__.update(_peer=peer, _number=number, _name=name)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._peer.ask("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._peer.ask("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._peer.ask("delitem", self, key)

    def __iter__(self) -> Any:
        return self._peer.ask("iter", self)

    def __next__(self) -> Any:
        return self._peer.ask("next", self)

    def __len__(self) -> int:
        return self._peer.ask("len", self)

    def __bool__(self) -> bool:
        return self._peer.ask("bool", self)

    def __str__(self) -> str:
        return self._peer.ask("str", self)

    def __repr__(self) -> str:
        return f"<{self._name} of the program>"

    def __int__(self) -> int:
        return self._peer.ask("int", self)

    def __float__(self) -> float:
        return self._peer.ask("float", self)

    def __index__(self) -> int:
        return self._peer.ask("index", self)


class Peer:
    """One end of a connection: asks, and while it waits, answers what it is asked.

    `may(operation, target, arguments)` says what the other side may do with what it holds of ours.
    """

    def __init__(
        self, connection: socket.socket, may: Callable[[str, Any, Sequence[Any]], bool]
    ) -> None:
        self.connection, self.may = connection, may
        self.kept: dict[int, Any] = {}  # by identity: kept alive, so that it stays unique
        self.remotes: dict[int, Remote] = {}
        self.gone = ""
        self.takes_changes = True
        self.answering = 0  # what the other side asked for and waits for

    def ask(self, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        """What the operation gives on the other side; arguments that it changed in place follow."""
        try:
            packed = {key: self.pack(value) for key, value in kwargs.items()}
            send(self.connection, ["ask", operation, [self.pack(arg) for arg in args], packed])
            while True:
                kind, *rest = receive(self.connection)
                if kind == "ask":
                    self.answer(*rest)
                elif kind == "value":
                    return self._taken(args, *rest)
                else:
                    raise _error(*map(str, rest))
        except Gone as gone:
            self.gone = str(gone)
            raise

    def _taken(self, args: Sequence[Any], value: Any, changes: Any) -> Any:
        found = self.unpack(value)
        if self.takes_changes and changes is not None:
            for arg, change in zip(args, changes, strict=False):
                if change is not None:
                    _change(arg, self.unpack(change))
        return found

    def serve(self) -> None:
        """Answer until the other side leaves."""
        while True:
            _, *rest = receive(self.connection)
            self.answer(*rest)

    def answer(self, operation: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.answering += 1
        try:
            target, *others = [self.unpack(arg) for arg in args]
            if operation not in OPERATIONS or not self.may(operation, target, others):
                raise PermissionError(f"{operation} is not allowed here")
            named = {key: self.unpack(value) for key, value in kwargs.items()}
            found = OPERATIONS[operation](target, *others, **named)
            after = [None, *(self.pack(value) if _changeable(value) else None for value in others)]
            changes = [new if new != old else None for new, old in zip(after, args, strict=True)]
            send(self.connection, ["value", self.pack(found), changes if any(changes) else None])
        except Gone:
            raise
        except BaseException as error:  # the boundary between the two
            send(self.connection, ["error", type(error).__name__, _text(error)])
        finally:
            self.answering -= 1

    def pack(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if isinstance(value, int):
            return int(value) if -SMALL < value < SMALL else {"int": hex(value)}
        if isinstance(value, float):
            return float(value)
        if isinstance(value, str):
            return str.__str__(value)
        if kind is Remote:
            return {"yours": value._number}
        if isinstance(value, list):
            return [self.pack(item) for item in value]
        for tag, known in _SEQUENCES.items():
            if isinstance(value, known):
                return {tag: [self.pack(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[self.pack(key), self.pack(item)] for key, item in value.items()]}
        return self._pack_rare(value, kind)

    def _pack_rare(self, value: Any, kind: type) -> Any:
        if isinstance(value, (bytes, bytearray)):
            tag = "bytearray" if isinstance(value, bytearray) else "bytes"
            return {tag: base64.b64encode(value).decode()}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if kind is range:
            return {"range": [self.pack(x) for x in (value.start, value.stop, value.step)]}
        if isinstance(value, decimal.Decimal):
            return {"decimal": str(value)}
        if isinstance(value, fractions.Fraction):
            return {"fraction": [self.pack(value.numerator), self.pack(value.denominator)]}
        if isinstance(value, array.array):
            return {"array": [value.typecode, self.pack(value.tolist())]}
        for known in TIMES:
            if kind is known:
                return {known.__name__: value.isoformat()}
        if kind is datetime.timedelta:
            return {"timedelta": [value.days, value.seconds, value.microseconds]}
        if _of_python(value):
            return {"builtin": value.__name__}
        if kind.__module__ == "numpy" and hasattr(value, "item") and not hasattr(value, "__len__"):
            return self.pack(value.item())
        self.kept[id(value)] = value
        return {"mine": id(value), "name": str(getattr(value, "__name__", kind.__name__))}

    def unpack(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.unpack(item) for item in value]
        if not isinstance(value, dict):
            return value
        tag, content = next(iter(value.items()))
        if tag == "mine":
            if content not in self.remotes:  # its truth would be asked for over there
                self.remotes[content] = Remote(self, content, str(value.get("name")))
            return self.remotes[content]
        if tag == "yours":
            return self.kept[content]
        if tag == "dict":
            return {self.unpack(key): self.unpack(item) for key, item in content}
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](self.unpack(item) for item in content)
        return _unpack_rare(tag, content)


_SEQUENCES: dict[str, type[Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
_RARE: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*map(_whole, parts)),
    "decimal": decimal.Decimal,
    "fraction": lambda parts: fractions.Fraction(*map(_whole, parts)),
    "array": lambda parts: array.array(parts[0], [_whole(item) for item in parts[1]]),
    "builtin": lambda name: _python_has(getattr(builtins, name)),
    "timedelta": lambda parts: datetime.timedelta(*parts),
    **{known.__name__: known.fromisoformat for known in TIMES},
}


def _unpack_rare(tag: str, content: Any) -> Any:
    return _RARE[tag](content)


def _of_python(value: Any) -> bool:
    """A type or a function that both sides have, and with which neither reaches further."""
    if isinstance(value, type):
        return getattr(builtins, value.__name__, None) is value
    return any(value is known for known in HARMLESS)


def _python_has(value: Any) -> Any:
    if not _of_python(value):
        raise PermissionError("not a value to hand over")
    return value


def _whole(value: Any) -> Any:
    return int(value["int"], 16) if isinstance(value, dict) else value


def _changeable(value: Any) -> bool:
    return isinstance(value, (list, dict, set, bytearray, deque))


def _change(old: Any, new: Any) -> None:
    """What a program did to a list, a dict or a set that it was given is seen by the tests."""
    if type(old) is not type(new):
        return
    if isinstance(old, (list, bytearray)):
        old[:] = new
    elif isinstance(old, (dict, set)):
        old.clear()
        old.update(new)
    elif isinstance(old, deque):
        old.clear()
        old.extend(new)


def _error(name: str, text: str) -> Exception:
    """The same error, if it is one that Python has."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:  # a UnicodeDecodeError wants more than a text
            pass
    return RemoteError(f"{name}: {text}" if text else name)


def _text(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except Exception:
        return ""
