"""Slots: hyper-parameters make functions.

A slot function is pure: tensors in, tensors out. Its hyper-parameters are its keyword-only
arguments. The decorator of its kind turns it into a factory, and the factory makes a `Slot`: a
frozen, callable record that prints, compares, hashes and has one text form everywhere:

    @gate(equation="S = min(r·A, clip(r, 1−{low}, 1+{high})·A)")
    def clip(log_ratio_NT, advantage_NT, batch, *, low: NonNegative = 0.2, ...): ...

    clip(0.2, 0.28)                       -> Slot, prints as clip(low=0.2, high=0.28)
    parse("gate", "clip(0.2, high=0.28)") -> the same Slot
"""

from __future__ import annotations

import ast
import inspect
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from groupwise.errors import RecipeError, nearest

KINDS = (
    "filter",
    "shaping",
    "advantage",
    "aggregation",
    "ratio",
    "gate",
    "correction",
    "penalty",
    "auxiliary",
    "schedule",
    "pairing",
    "preference",
    "width",
)


@dataclass(frozen=True)
class Range:
    """The values that a hyper-parameter may take; `above` excludes the lower end itself."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False

    def admits(self, value: float) -> bool:
        inside = self.low < value if self.above else self.low <= value
        return inside and value <= self.high

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'> ' if self.above else '>= '}{self.low:g}"
        return f"in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"


NonNegative = Annotated[float, Range(0.0)]
Positive = Annotated[float, Range(0.0, above=True)]
AboveOne = Annotated[float, Range(1.0, above=True)]
Fraction = Annotated[float, Range(0.0, 1.0)]
Real = Annotated[float, Range()]
Count = Annotated[int, Range(1)]
Ddof = Annotated[int, Range(0, 1)]
Stream = Literal["old", "sampler"]


@dataclass(frozen=True)
class Slot:
    """One function with its hyper-parameters bound: `clip(low=0.2, high=0.28)`."""

    kind: str
    name: str
    params: tuple[tuple[str, Any], ...]
    definition: Definition = field(compare=False, repr=False)

    def __call__(self, *args: Any) -> Any:
        return self.definition.function(*args, **dict(self.params))

    def __getitem__(self, parameter: str) -> Any:
        return dict(self.params)[parameter]

    def __contains__(self, parameter: str) -> bool:
        return parameter in dict(self.params)

    def get(self, parameter: str, default: Any = None) -> Any:
        return dict(self.params).get(parameter, default)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={_show(value)}' for key, value in self.params)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (self.kind, self.name, self.params)

    def replace(self, **changes: Any) -> Slot:
        return self.definition(**{**dict(self.params), **changes})

    @property
    def needs(self) -> tuple[str, ...]:
        """Streams that the function reads, those of slots inside it included."""
        inner = [
            name for _, value in self.params if isinstance(value, Slot) for name in value.needs
        ]
        return (*self.definition.needs, *inner)

    @property
    def equation(self) -> str:
        return self.definition.equation.format(**{k: _show(v, 6) for k, v in self.params})


def _make(kind: str, name: str, params: tuple[tuple[str, Any], ...]) -> Slot:
    return find(kind, name)(**dict(params))


def _show(value: Any, digits: int | None = None) -> str:
    if isinstance(value, Slot):
        return str(value)
    if digits is not None and isinstance(value, float):
        return f"{value:.{digits}g}"
    return value if digits is not None and isinstance(value, str) else repr(value)


class Definition:
    """The factory of one slot function: binds and checks hyper-parameters."""

    def __init__(self, kind: str, function: Callable[..., Any], **about: Any) -> None:
        self.kind = kind
        self.function = function
        self.name = function.__name__
        self.equation: str = about.pop("equation")
        self.fixes: str = about.pop("fixes", "")
        self.breaks: str = about.pop("breaks", "")
        # Streams of the batch that the function reads beyond mask, groups and rewards.
        self.needs: tuple[str, ...] = about.pop("needs", ())
        # What only some kinds have (a filter's action, a learnable part, ...).
        self.traits: dict[str, Any] = about
        self.__doc__ = function.__doc__
        self._hints = typing.get_type_hints(function, include_extras=True)
        self.parameters = {
            name: parameter
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}({', '.join(self.parameters)})>"

    def __call__(self, *args: Any, **kwargs: Any) -> Slot:
        if len(args) > len(self.parameters):
            raise RecipeError(
                f"{self.kind} {self.name} takes {len(self.parameters)} hyper-parameters "
                f"({', '.join(self.parameters) or 'none'}), got {len(args)}."
            )
        values = dict(zip(self.parameters, args, strict=False))
        for key, value in kwargs.items():
            if key not in self.parameters:
                raise RecipeError(
                    f"{self.kind} {self.name} has no hyper-parameter {key!r}: it would be ignored. "
                    + (nearest(key, self.parameters) if self.parameters else "It takes none.")
                )
            if key in values:
                raise RecipeError(f"{self.kind} {self.name}: {key!r} is given twice.")
            values[key] = value
        params = []
        for key, parameter in self.parameters.items():
            if key not in values and parameter.default is inspect.Parameter.empty:
                raise RecipeError(
                    f"{self.kind} {self.name} needs the hyper-parameter {key!r}, which has no "
                    f"default. Write {self.name}({key}=...)."
                )
            params.append((key, self._check(key, values.get(key, parameter.default))))
        return Slot(self.kind, self.name, tuple(params), self)

    def _check(self, key: str, value: Any) -> Any:
        hint = self._hints[key]
        where = f"{self.kind} {self.name}: {key}"
        if typing.get_origin(hint) is Literal:
            options = typing.get_args(hint)
            if value not in options:
                raise RecipeError(f"{where}={value!r} is unknown. Choose one of {options}.")
            return value
        if hint is Slot:
            if isinstance(value, Slot):
                return value
            raise RecipeError(f"{where}={value!r} must be a slot such as {self._default(key)}.")
        number, *bounds = typing.get_args(hint)
        whole = number is int and isinstance(value, int)
        if isinstance(value, bool) or not (whole or (number is float and _is_number(value))):
            word = "a whole number" if number is int else "a number"
            raise RecipeError(f"{where}={value!r} must be {word} {bounds[0]}.")
        try:
            value = number(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value) or not bounds[0].admits(value):
            raise RecipeError(f"{where}={value!r} is out of range: it must be {bounds[0]}.")
        return value

    def _default(self, key: str) -> str:
        return str(self.parameters[key].default)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


REGISTRY: dict[str, dict[str, Definition]] = {kind: {} for kind in KINDS}


def _decorator(kind: str) -> Callable[..., Callable[[Callable[..., Any]], Definition]]:
    def with_traits(**about: Any) -> Callable[[Callable[..., Any]], Definition]:
        def register(function: Callable[..., Any]) -> Definition:
            known = REGISTRY[kind].get(function.__name__)
            if known and known.function.__qualname__ != function.__qualname__:
                raise RecipeError(f"{kind} {function.__name__!r} exists already. Rename yours.")
            if known and known.function.__module__ != function.__module__:
                raise RecipeError(
                    f"{kind} {function.__name__!r} is already defined in "
                    f"{known.function.__module__}. Give yours another name."
                )
            definition = Definition(kind, function, **about)
            REGISTRY[kind][definition.name] = definition
            return definition

        return register

    return with_traits


filter_ = _decorator("filter")
shaping = _decorator("shaping")
advantage = _decorator("advantage")
aggregation = _decorator("aggregation")
ratio = _decorator("ratio")
gate = _decorator("gate")
correction = _decorator("correction")
penalty = _decorator("penalty")
auxiliary = _decorator("auxiliary")
schedule = _decorator("schedule")
pairing = _decorator("pairing")
preference = _decorator("preference")
width = _decorator("width")


def find(kind: str, name: str) -> Definition:
    """The slot function of that kind and name."""
    if name not in REGISTRY[kind]:
        raise RecipeError(f"There is no {kind} called {name!r}. {nearest(name, REGISTRY[kind])}")
    return REGISTRY[kind][name]


def parse(kind: str, text: str) -> tuple[Slot, ...]:
    """Read the text form: `name(key=value, ...)`, several separated by commas, '' for none."""
    if text.strip() in ("", "()", "none"):
        return ()
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise RecipeError(
            f"Can't read {text!r} as a {kind}: {error.msg}. Write name(parameter=value), "
            "several separated by commas."
        ) from None
    nodes = tree.elts if isinstance(tree, ast.Tuple) else [tree]
    return tuple(_slot_from(kind, node, text) for node in nodes)


def _slot_from(kind: str, node: ast.expr, text: str) -> Slot:
    if isinstance(node, ast.Name):  # `clip` is `clip()`
        return find(kind, node.id)()
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise RecipeError(f"Can't read {text!r} as a {kind}. Write name(parameter=value).")
    definition = find(kind, node.func.id)
    args = [_value_from(item, text) for item in node.args]
    kwargs = {str(item.arg): _value_from(item.value, text) for item in node.keywords}
    return definition(*args, **kwargs)


def _value_from(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Call):  # the only slots inside slots are clip widths
        return _slot_from("width", node, text)
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise RecipeError(
            f"Can't read a value in {text!r}: {ast.unparse(node)!r} is no number or string."
        ) from None
