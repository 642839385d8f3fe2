"""Classes that mirror classes of the other process; their operators ask over there.

The process with the tests must not show an expected value to the program under test and then
believe what it says of it: `solve(3) == 4` would hold for an object that equals everything, and
`abs(solve(3) - 4) < 1e-6` for one whose difference is always 0. So a comparison or an operator with
two sides is asked for where both are the program's own, or where the tests speak of a class and
made the object by calling it. Else it is not there, as for any object that has no operators.
"""

from __future__ import annotations

import operator
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from groupwise.graders.sandbox.inside.operations import ARITHMETIC, COMPARISONS, IN_PLACE, UNARY

if TYPE_CHECKING:
    from groupwise.graders.sandbox.inside.peer import Peer

Method = Callable[..., Any]
OF_ERRORS = ("args", "with_traceback", "add_note")  # what Python itself sets and reads


def metaclass(peer: Peer) -> type[type]:
    """Return the class of classes whose attributes and instances are in the other process."""

    class Mirror(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if not peer.is_theirs(cls):  # a class of the tests, derived from one of the program
                return super().__call__(*args, **kwargs)
            made = peer.ask("call", cls, *args, **kwargs)
            return peer.open_up(made) if id(cls) in peer.named_classes else made

        def __getattr__(cls, name: str) -> Any:
            return peer.ask("getattr", cls, name)

        def __setattr__(cls, name: str, value: Any) -> None:
            peer.ask("setattr", cls, name, value)

        def __bool__(cls) -> bool:
            return True

    asked = {name: name for name in ("__iter__", "__len__", "__getitem__", "__repr__")}
    for name, operation in {**asked, "__contains__": "contains"}.items():
        setattr(Mirror, name, _asking(peer, operation))
    return Mirror


def namespace(
    peer: Peer, names: Sequence[str], hashable: bool, base: type, pretended: type | None
) -> dict[str, Any]:
    """Return the methods of a class whose own has these operators, over a `base` held here."""
    found: dict[str, Any] = {
        "__slots__": (),
        "__copy__": lambda self: peer.open_like(self, peer.ask("copy", self)),
        "__deepcopy__": lambda self, memo: peer.open_like(self, peer.ask("deepcopy", self)),
        "__setattr__": lambda self, name, value: peer.ask("setattr", self, name, value),
        "__delattr__": lambda self, name: peer.ask("delattr", self, name),
        "__getattribute__": _attribute(peer, base, pretended),
    }
    if issubclass(base, BaseException):
        del found["__slots__"], found["__setattr__"], found["__delattr__"]  # it keeps its traceback
    for name in names:
        method = _operator(peer, name, base, pretended)
        if method is not None:
            found[name] = method
    asks = "__hash__" in names and hashable and base is object
    found["__hash__"] = _asking(peer, "__hash__") if asks else base.__hash__ if hashable else None
    return found


def _attribute(peer: Peer, base: type, pretended: type | None) -> Method:
    def get(self: Any, name: str) -> Any:
        if name == "__class__":
            return pretended or type(self)
        if not peer.is_theirs(self) or (base is not object and _is_held(peer, self, name, base)):
            return base.__getattribute__(self, name)  # type: ignore[call-arg]
        return peer.ask("getattr", self, name)

    return get


def _is_held(peer: Peer, value: Any, name: str, base: type) -> bool:
    """Return whether an attribute is that of the value held here, not of the program's class."""
    if issubclass(base, BaseException):
        return name in OF_ERRORS or name.startswith("__")
    if base is tuple:  # a field may be called count or index
        return name.startswith("__")
    return hasattr(base, name) and not peer.is_open(value)


def _operator(peer: Peer, name: str, base: type, pretended: type | None) -> Method | None:
    bare = name.strip("_")
    if name == "__call__":
        return lambda self, /, *args, **kwargs: peer.ask("call", self, *args, **kwargs)
    if name == "__contains__":
        return _contains(peer)
    if name == "__exit__":
        return lambda self, kind, error, trace: peer.ask(name, self, kind, error, None)
    if name in ("__await__", "__anext__", "__aenter__", "__aexit__"):
        return _waiting(peer, name)
    if name in UNARY or name == "__enter__":
        return _asking(peer, name)
    if bare in COMPARISONS:
        return _comparison(peer, bare, base, pretended)
    if bare in ARITHMETIC:
        return _two_sided(peer, name, base, lambda self, other: peer.ask(bare, self, other))
    if bare[0] == "r" and bare[1:] in ARITHMETIC:
        return _two_sided(peer, name, base, lambda self, other: peer.ask(bare[1:], other, self))
    if bare[0] == "i" and bare[1:] in IN_PLACE:
        return _two_sided(peer, name, base, lambda self, other: peer.ask(bare, self, other))
    return None


def _asking(peer: Peer, name: str) -> Method:
    return lambda self, *args: peer.ask(name, self, *args)


def _waiting(peer: Peer, name: str) -> Method:
    if name == "__await__":

        def steps(self: Any) -> Generator[None, None, Any]:
            return peer.ask("await", self)
            yield

        return steps

    async def wait(self: Any, *args: Any) -> Any:
        return peer.ask(name, self, *[None if _is_trace(arg) else arg for arg in args])

    return wait


def _is_trace(value: Any) -> bool:
    return type(value).__name__ == "traceback"


def _contains(peer: Peer) -> Method:
    def contains(self: Any, item: Any) -> bool:
        if peer.may_show(self, item):
            return bool(peer.ask("contains", self, item))
        return any(item is found or item == found for found in self)

    return contains


def _comparison(peer: Peer, bare: str, base: type, pretended: type | None) -> Method:
    def compare(self: Any, other: Any) -> Any:
        if peer.may_show(self, other):
            return peer.ask(bare, self, other)
        if pretended is not None and isinstance(other, pretended.__base__ or ()):
            return getattr(operator, bare)(peer.ask("plain", self), other)
        return NotImplemented if base is object else getattr(base, f"__{bare}__")(self, other)

    return compare


def _two_sided(peer: Peer, name: str, base: type, ask: Method) -> Method:
    def operate(self: Any, other: Any) -> Any:
        if peer.may_show(self, other):
            return peer.open_like(self, ask(self, other), other)
        held = getattr(base, name, None)
        return NotImplemented if held is None else held(self, other)

    return operate


def generator(peer: Peer, there: Any) -> Generator[Any, Any, Any]:
    """Return a generator that goes on in step with one of the other process."""
    operation: str = "__next__"
    given: tuple[Any, ...] = ()
    while True:
        try:
            item = peer.ask(operation, there, *given)
        except StopIteration as end:
            return end.value
        try:
            sent = yield item
            operation, given = ("__next__", ()) if sent is None else ("send", (sent,))
        except GeneratorExit:
            peer.ask("close", there)
            raise
        except BaseException as error:
            operation, given = "throw", (error,)


async def coroutine(peer: Peer, there: Any) -> Any:
    return peer.ask("await", there)


async def async_generator(peer: Peer, there: Any) -> AsyncIterator[Any]:
    while True:
        try:
            item = peer.ask("__anext__", there)
        except StopAsyncIteration:
            return
        yield item
