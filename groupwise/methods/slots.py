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
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

from groupwise.common.forked import one_process
from groupwise.errors import BatchError, MissingStream, RecipeError, nearest
from groupwise.methods.traits import traits

# The positional arguments of each kind's functions, in words and in number.
ARGUMENTS = {
    "filter": ("batch",),
    "shaping": ("reward_N", "batch"),
    "advantage": ("reward_N", "batch"),
    "aggregation": ("batch",),
    "ratio": ("batch",),
    "gate": ("log_ratio_NT", "advantage_NT", "batch"),
    "correction": ("batch",),
    "penalty": ("batch",),
    "auxiliary": ("batch", "prepared"),
    "schedule": ("batch",),
    "pairing": ("scores_C",),
    "preference": ("pairs",),
    "likelihood": ("pairs",),
    "summing": ("logp_NT", "place_NT", "shorter_N"),
    "weighing": ("chosen_N", "rejected_N"),
    "labelling": ("steps",),
    "width": ("segment_entropy_NT",),
    "control": ("held", "step", "seen"),
}
KINDS = tuple(ARGUMENTS)


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
PositiveFraction = Annotated[float, Range(0.0, 1.0, above=True)]
Real = Annotated[float, Range()]
Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]
Ddof = Annotated[int, Range(0, 1)]
Stream = Literal["old", "sampler"]
RANGES = (
    "NonNegative, Positive, AboveOne, Fraction, PositiveFraction, Real, Count, Whole, Ddof, "
    "Literal[...] or Slot"
)


@dataclass(frozen=True)
class Slot:
    """One function with its hyper-parameters bound: `clip(low=0.2, high=0.28)`."""

    kind: str
    name: str
    params: tuple[tuple[str, Any], ...]
    definition: Definition = field(compare=False, repr=False)

    def __call__(self, *args: Any) -> Any:
        try:
            with one_process():  # a child that a user's function forks must not train as well
                return self.definition.function(*args, **dict(self.params))
        except MissingStream as error:
            said = "" if error.name in self.needs else f", and its needs= do not say {error.name}"
            raise BatchError(
                f"{self.kind} {self.name} reads {error.name} ({error.meaning}), which this batch "
                f"does not have{said}. Pass it, or use a recipe without it."
            ) from None

    def __getitem__(self, parameter: str) -> Any:
        return dict(self.params)[parameter]

    def __contains__(self, parameter: str) -> bool:
        return parameter in dict(self.params)

    def get(self, parameter: str, default: Any = None) -> Any:
        return dict(self.params).get(parameter, default)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={_show(value)}' for key, value in self.params)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (self.kind, self.name, self.params, self.definition.home)

    def replace(self, **changes: Any) -> Slot:
        return self.definition(**{**dict(self.params), **changes})

    def fitted(self, tokens: int) -> dict[str, int]:
        """Return the settings that go by the longest answer, for answers of so many tokens."""
        traits = self.definition.traits
        sizes = {traits.length: tokens, traits.margin: max(1, tokens // 4)}
        return {key: size for key, size in sizes.items() if key}

    @property
    def needs(self) -> tuple[str, ...]:
        """Name the streams that the function reads, those of slots inside it included."""
        inner = [
            name for _, value in self.params if isinstance(value, Slot) for name in value.needs
        ]
        return (*self.definition.needs, *inner)

    @property
    def files(self) -> tuple[str, ...]:
        """List the user's files that the function comes from, those of slots inside it included."""
        inner = [
            file for _, value in self.params if isinstance(value, Slot) for file in value.files
        ]
        home = self.definition.home
        return (*([home] if Path(home).is_file() else []), *inner)

    @property
    def definitions(self) -> tuple[Definition, ...]:
        """List what the function and those inside it were made by: a name may be defined anew."""
        inner = [
            each
            for _, value in self.params
            if isinstance(value, Slot)
            for each in value.definitions
        ]
        return (self.definition, *inner)

    @property
    def equation(self) -> str:
        """Return the function's equation with its hyper-parameters filled in."""
        return self.definition.written({key: _show(value, 6) for key, value in self.params})


def _make(kind: str, name: str, params: tuple[tuple[str, Any], ...], home: str) -> Slot:
    """Make the slot of a pickle: its function is looked up, not stored."""
    if home.startswith("groupwise."):
        import_module(home)
    if name not in REGISTRY[kind]:
        raise RecipeError(
            f"This pickle holds the {kind} {name!r} from {home}, which this process has not "
            f"loaded. Load that file first: groupwise.recipes.load_plugin(file), or import it."
        )
    return find(kind, name)(**dict(params))


def _show(value: Any, digits: int | None = None) -> str:
    if isinstance(value, Slot):
        return str(value)
    if digits is not None and isinstance(value, float):
        return f"{value:.{digits}g}"
    return value if digits is not None and isinstance(value, str) else repr(value)


def shown(equation: str) -> str:
    """Write an equation for people: `_{j≠i}` as `_(j≠i)`, without factors that are exactly 1."""
    equation = re.sub(r"_\{([^{}]*)\}", r"_(\1)", equation)
    equation = re.sub(r"(?<![\w.^/)\]])1(\^\([^()]*\))? ?· ?", "", equation)
    equation = re.sub(r"(?<!\w)\(([\d.]+)\)\^", r"\1^", equation)
    return re.sub(r"(?<![\w.])1\^\w ", "", equation)


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
        self.traits = traits(kind, self.name, about)
        self.__doc__ = function.__doc__
        everything = inspect.signature(function).parameters
        self.parameters = {
            key: item for key, item in everything.items() if item.kind is item.KEYWORD_ONLY
        }
        self._check_arguments([p for key, p in everything.items() if key not in self.parameters])
        self.hints = self._ranges()
        for key, parameter in self.parameters.items():
            if parameter.default is not parameter.empty:
                self._check(key, parameter.default)
        self._check_equation()

    def _check_arguments(self, found: list[inspect.Parameter]) -> None:
        """Check for as many positional arguments as the kind has, and no collectors."""
        wanted = ARGUMENTS[self.kind]
        plain = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in found)
        if len(found) != len(wanted) or not plain:
            raise RecipeError(
                f"{self.kind} {self.name} must take {len(wanted)} positional argument(s) "
                f"({', '.join(wanted)}), got ({', '.join(map(str, found))}). Write "
                f"def {self.name}({', '.join(wanted)}, *, ...): hyper-parameters stand behind "
                "the star."
            )

    def _ranges(self) -> dict[str, Any]:
        """Return the annotations of the hyper-parameters: each must say which values it takes."""
        own = {k: p.annotation for k, p in self.parameters.items() if p.annotation is not p.empty}
        try:
            hints = typing.get_type_hints(
                types.SimpleNamespace(__annotations__=own),
                globalns=getattr(self.function, "__globals__", {}),
                include_extras=True,
            )
        except NameError as error:
            raise RecipeError(
                f"{self.kind} {self.name}: {error}. Import the annotations of hyper-parameters "
                f"from groupwise.methods.slots: {RANGES}."
            ) from None
        for key in self.parameters:
            hint = hints.get(key)
            number, *bounds = typing.get_args(hint) or (None,)
            ranged = number in (int, float) and isinstance(next(iter(bounds), None), Range)
            if not (ranged or hint is Slot or typing.get_origin(hint) is Literal):
                raise RecipeError(
                    f"{self.kind} {self.name}: {key} must be annotated with its range, e.g. "
                    f"{key}: Positive. Take one of groupwise.methods.slots: {RANGES}."
                )
        return hints

    def _check_equation(self) -> None:
        try:
            self.written({key: key for key in self.parameters})
        except (LookupError, ValueError, AttributeError) as error:
            named = f"names {{{error.args[0]}}}" if isinstance(error, KeyError) else f"({error})"
            raise RecipeError(
                f"{self.kind} {self.name}: its equation {named}, which is none of its "
                f"hyper-parameters ({', '.join(self.parameters) or 'it has none'}). Write {{{{ and "
                "}} for braces that are no hyper-parameter."
            ) from None

    def written(self, values: Mapping[str, str]) -> str:
        """Return the equation with these values."""
        return shown(self.equation.format(**values))

    @property
    def home(self) -> str:
        """Return where the function is written: a module of the package, or a file."""
        module, file = self.function.__module__, self.function.__code__.co_filename
        return module if module.startswith("groupwise.") or file.startswith("<") else file

    def same_place(self, other: Definition) -> bool:
        """Tell whether the other is this function again: a cell or a file that ran twice."""
        one, two = self.function, other.function
        same = one.__module__ == two.__module__ or self.home == other.home
        return same and one.__qualname__ == two.__qualname__

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
        hint = self.hints[key]
        where = f"{self.kind} {self.name}: {key}"
        if typing.get_origin(hint) is Literal:
            options = typing.get_args(hint)
            if value not in options:
                raise RecipeError(f"{where}={value!r} is unknown. Choose one of {options}.")
            return value
        if hint is Slot:
            if isinstance(value, Slot):
                return value
            raise RecipeError(
                f"{where}={value!r} must be a slot such as {self.parameters[key].default}."
            )
        number, *bounds = typing.get_args(hint)
        if isinstance(value, bool) or not isinstance(value, (int, number)):
            word = "a whole number" if number is int else "a number"
            raise RecipeError(f"{where}={value!r} must be {word} {bounds[0]}.")
        try:
            value = number(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value) or not bounds[0].admits(value):
            raise RecipeError(f"{where}={value!r} is out of range: it must be {bounds[0]}.")
        return value


NOT_LITERAL = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)
REGISTRY: dict[str, dict[str, Definition]] = {kind: {} for kind in KINDS}


def _decorator(kind: str) -> Callable[..., Callable[[Callable[..., Any]], Definition]]:
    decorator = "filter_" if kind == "filter" else kind

    def with_traits(*bare: Any, **about: Any) -> Callable[[Callable[..., Any]], Definition]:
        if bare or not isinstance(about.get("equation"), str):
            raise RecipeError(
                f"A {kind} needs its equation, which explain shows: "
                f'write @{decorator}(equation="...").'
            )

        def register(function: Callable[..., Any]) -> Definition:
            definition = Definition(kind, function, **about)
            before = REGISTRY[kind].setdefault(definition.name, definition)
            if not before.same_place(definition):
                raise RecipeError(
                    f"{kind} {definition.name!r} is already defined in {before.home}. "
                    "Give yours another name."
                )
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
likelihood = _decorator("likelihood")
summing = _decorator("summing")
weighing = _decorator("weighing")
labelling = _decorator("labelling")
width = _decorator("width")
control = _decorator("control")


def find(kind: str, name: str) -> Definition:
    """Find the slot function of that kind and name."""
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
    except NOT_LITERAL:
        raise RecipeError(
            f"Can't read a value in {text!r}: {ast.unparse(node)!r} is no number or string."
        ) from None
