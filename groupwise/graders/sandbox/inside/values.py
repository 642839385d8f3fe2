"""Plain data between two processes: what both know is sent by value."""

from __future__ import annotations

import array
import base64
import builtins
import cmath
import datetime
import decimal
import fractions
import math
import operator
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

SMALL = 2**53
HARMLESS = (abs, chr, divmod, len, max, min, ord, pow, repr, round, sorted, sum)
IMMUTABLE: dict[str, type[Any]] = {"tuple": tuple, "frozenset": frozenset}
PAIRED: dict[str, type[Any]] = {
    "dict": dict,
    "Counter": Counter,
    "OrderedDict": OrderedDict,
    "defaultdict": defaultdict,
}
CONTAINERS: dict[str, type[Any]] = {
    "list": list,
    "set": set,
    "deque": deque,
    "bytearray": bytearray,
    **PAIRED,
}
TAGS = {kind: tag for tag, kind in CONTAINERS.items()}
# Held here by value even where the other side has a class of its own derived from one of them.
VALUES = (int, float, complex, str, bytes, tuple, frozenset, decimal.Decimal, fractions.Fraction)
TIMES = (datetime.datetime, datetime.date, datetime.time)  # a datetime is a date: it goes first
PURE = {"math": math, "cmath": cmath, "operator": operator}
VIEWS: dict[type, str] = {
    type({}.keys()): "keys",
    type({}.items()): "items",
    type({}.values()): "values",
}


def contents(container: Any) -> list[Any]:
    """Return all that is directly in a container, keys and values in turn."""
    if isinstance(container, dict):
        return [part for pair in container.items() for part in pair]
    return list(container)


def fill(container: Any, parts: Iterable[Any]) -> None:
    """Make these the contents of a container."""
    if isinstance(container, (list, bytearray)):
        container[:] = parts
        return
    container.clear()
    if isinstance(container, dict):
        each = iter(parts)
        for key, value in zip(each, each, strict=True):
            container[key] = value
    elif isinstance(container, set):
        container.update(parts)
    else:
        container.extend(parts)


def rare(value: Any, pack: Callable[[Any], Any]) -> Any:
    """Pack a value of a rare kind that is sent by value; None if it is not one of these."""
    kind = type(value)
    if kind in (bytes, complex, decimal.Decimal, fractions.Fraction):
        return _of_a_number(value)
    if kind in (range, slice):
        return {kind.__name__: [pack(part) for part in (value.start, value.stop, value.step)]}
    if kind is array.array:
        return {"array": [value.typecode, pack(value.tolist())]}
    if kind in TIMES:
        return {kind.__name__: value.isoformat()}
    if kind is datetime.timedelta:
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    if kind in VIEWS:
        return {VIEWS[kind]: [pack(item) for item in value]}
    if value in (Ellipsis, NotImplemented) if kind.__module__ == "builtins" else False:
        return {"constant": repr(value)}
    if kind.__module__ in ("uuid", "pathlib") and kind.__name__ in ("UUID", "PosixPath"):
        return {"text": [kind.__module__, kind.__name__, str(value)]}
    if kind.__module__ == "numpy":
        return _of_numpy(value, pack)
    return None


def _of_a_number(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, decimal.Decimal):
        return {"decimal": str(value)}
    return {"fraction": [hex(value.numerator), hex(value.denominator)]}


def _of_numpy(value: Any, pack: Callable[[Any], Any]) -> Any:
    if type(value).__name__ == "ndarray" and not value.dtype.hasobject and value.dtype.isnative:
        data = base64.b64encode(value.tobytes()).decode()
        return {"ndarray": [value.dtype.str, list(value.shape), data]}
    if hasattr(value, "item") and not hasattr(value, "__len__"):
        return pack(value.item())
    return None


def _ndarray(kind: str, shape: list[int], data: str) -> Any:
    import numpy

    return numpy.frombuffer(base64.b64decode(data), numpy.dtype(kind)).reshape(shape).copy()


def _text(module: str, name: str, text: str) -> Any:
    if (module, name) not in (("uuid", "UUID"), ("pathlib", "PosixPath")):
        raise PermissionError("not a value to hand over")
    return getattr(__import__(module), name)(text)


RARE: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "bytes": base64.b64decode,
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*map(_whole, parts)),
    "slice": lambda parts: slice(*map(_whole, parts)),
    "decimal": decimal.Decimal,
    "fraction": lambda parts: fractions.Fraction(*(int(part, 16) for part in parts)),
    "array": lambda parts: array.array(parts[0], [_whole(item) for item in parts[1]["list"]]),
    "builtin": lambda name: _python_has(getattr(builtins, name)),
    "constant": lambda name: Ellipsis if name == "Ellipsis" else NotImplemented,
    "timedelta": lambda parts: datetime.timedelta(*parts),
    "text": lambda parts: _text(*parts),
    "ndarray": lambda parts: _ndarray(*parts),
    **{known.__name__: known.fromisoformat for known in TIMES},
}
VIEWED: dict[str, Callable[[list[Any]], Any]] = {
    "keys": lambda items: dict.fromkeys(items).keys(),
    "values": lambda items: dict(enumerate(items)).values(),
    "items": lambda items: dict(items).items(),
}


def of_python(value: Any) -> bool:
    """Return whether it is a type or function that both sides have, and that reaches no further."""
    if isinstance(value, type):
        return getattr(builtins, value.__name__, None) is value
    return any(value is known for known in HARMLESS)


def _python_has(value: Any) -> Any:
    if not of_python(value):
        raise PermissionError("not a value to hand over")
    return value


def _whole(value: Any) -> Any:
    return int(value["int"], 16) if isinstance(value, dict) else value


def pure_name(value: Any) -> str:
    """Return the name of a function of Python that depends on nothing: math.sqrt; or ''."""
    owners: list[Any] = []
    if isinstance(value, types.BuiltinFunctionType):
        owners = [*PURE.values()]
    elif isinstance(value, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        owners = [value.__objclass__] if of_python(value.__objclass__) else []
    same = [owner for owner in owners if getattr(owner, value.__name__, None) is value]
    return f"{same[0].__name__}.{value.__name__}" if same else ""


def pure_function(name: str) -> Any:
    owner, _, own = name.partition(".")
    return getattr(PURE.get(owner) or getattr(builtins, owner), own)


def library_name(kind: type) -> str:
    """Return where Python's library has a class: json.decoder:JSONDecodeError; '' if it is
    another's.
    """
    known = kind.__module__.partition(".")[0] in sys.stdlib_module_names
    module = sys.modules.get(kind.__module__) if known else None
    same = getattr(module, kind.__qualname__, None) is kind
    return f"{kind.__module__}:{kind.__qualname__}" if same else ""


def library_class(name: str) -> type | None:
    """Return the class of that name, if its module was imported here and it is an error or plain
    data.
    """
    module, _, own = name.partition(":")
    known = module.partition(".")[0] in sys.stdlib_module_names
    found = getattr(sys.modules.get(module), own, None) if known else None
    plain = isinstance(found, type) and (found in VALUES or found in TAGS)
    is_error = isinstance(found, type) and issubclass(found, BaseException)
    return found if plain or is_error else None


def held(value: Any, base: Any) -> Any:
    """Return the plain value of one that has a class of its own."""
    if base is fractions.Fraction:
        return fractions.Fraction(value.numerator, value.denominator)
    if base is frozenset:
        return frozenset(frozenset.__iter__(value))
    if base in (tuple, bytes):
        return base.__getitem__(value, slice(None))
    if base is str:
        return str.__str__(value)
    if base in (int, float):
        return base.__pos__(value)
    return base(value)
