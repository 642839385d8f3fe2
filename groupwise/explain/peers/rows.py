"""The source of a script's rows, and the columns that it makes of them, as far as it says."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from groupwise.explain.peers.pythons import Unknown, called, value_of

# Data sets whose columns are known here -> the named set that reads them.
NAMED = {"openai/gsm8k": "gsm8k", "gsm8k": "gsm8k", "HuggingFaceH4/MATH-500": "math",
         "BytedTsinghua-SIA/DAPO-Math-17k": "dapo17k",
         "open-r1/DAPO-Math-17k-Processed": "dapo17k"}  # fmt: skip
FULL_NAMES = {"gsm8k": "openai/gsm8k"}
FORMATS = ("json", "csv", "parquet", "arrow")  # of load_dataset, for files
SAME_ROWS = ("shuffle", "with_format", "cast", "cast_column", "remove_columns", "select_columns",
             "to_list", "flatten_indices")  # fmt: skip
CHANGING = ("map", "filter", "select", "take", "skip", "rename_column", "rename_columns",
            "train_test_split", "concatenate")  # fmt: skip
ANSWERS = ("answer", "ground_truth", "solution")
DEEP = 20


@dataclass(frozen=True)
class Rows:
    """A data set of a script."""

    source: str | None  # as data.train takes it; None: rows that only a run would make
    changes: tuple[str, ...] = ()  # what it does to them that is not read
    settings: Mapping[str, str] = field(default_factory=dict)  # ours: data.prompt_key, data.system


class RowsReader:
    """Follows names and calls to where the rows come from."""

    def __init__(
        self,
        known: Mapping[str, Any],
        functions: Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef],
        set_to: Sequence[tuple[str, ast.expr, int]],
    ) -> None:
        self.known, self.functions, self.set_to = dict(known), functions, set_to

    def read(self, node: ast.expr, line: int, deep: int = 0) -> Rows | None:
        """Return the rows of an expression; None where nothing says."""
        if deep > DEEP:
            return None
        match node:
            case ast.Name():
                above = [x for x in self.set_to if x[0] == node.id and x[2] < line]
                if not above:
                    return None
                _, value, at = max(above, key=lambda found: found[2])
                return self.read(value, at, deep + 1)
            case ast.IfExp():
                return self.read(node.body, line, deep + 1)
            case ast.Subscript(slice=part):
                return _split(self.read(node.value, line, deep + 1), self._text(part))
            case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method in CHANGING:
                return self._changed(self.read(inner, line, deep + 1), method, node)
            case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method in SAME_ROWS:
                return self.read(inner, line, deep + 1)
            case ast.Call() if called(node) in self.functions:
                return self._returned(node, deep)
            case ast.Call():
                return self._loaded(node)
        return None

    def _text(self, node: ast.expr | None) -> str | None:
        try:
            value = value_of(node, self.known) if node is not None else None
        except Unknown:
            return None
        return value if isinstance(value, str) else None

    def _loaded(self, call: ast.Call) -> Rows | None:
        """Read load_dataset, load_from_disk and Dataset.from_json."""
        first = self._text(call.args[0]) if call.args else None
        given = {each.arg: each.value for each in call.keywords if each.arg}
        name = called(call)
        if name in ("from_json", "from_csv", "from_parquet", "load_from_disk") and first:
            return Rows(first)
        if name != "load_dataset":
            return None
        path = first or self._text(given.get("path"))
        if path is None:
            return None
        if path in FORMATS:
            return self._files(given.get("data_files"))
        config = self._text(call.args[1]) if len(call.args) > 1 else self._text(given.get("name"))
        split = self._text(given.get("split")) or ""
        rows = Rows(hub_source(path, config or "", ""))
        return _split(rows, split) if split else rows

    def _files(self, node: ast.expr | None) -> Rows | None:
        try:
            value = value_of(node, self.known) if node is not None else None
        except Unknown:
            return None
        if isinstance(value, dict):
            value = value.get("train", next(iter(value.values()), None))
        return Rows(value) if isinstance(value, str) else None

    def _returned(self, call: ast.Call, deep: int) -> Rows | None:
        """Read what a function of the script returns, its arguments put in."""
        function = self.functions[called(call)]
        ends = [x for x in ast.walk(function) if isinstance(x, ast.Return) and x.value is not None]
        if not ends:
            return None
        names = [each.arg for each in function.args.args]
        usual = zip(reversed(names), reversed(function.args.defaults), strict=False)
        given = {**dict(usual), **dict(zip(names, call.args, strict=False))}
        given |= {each.arg: each.value for each in call.keywords if each.arg}
        before = dict(self.known)
        texts = {name: self._text(value) for name, value in given.items()}
        self.known |= {name: text for name, text in texts.items() if text is not None}
        try:
            last = ends[-1]
            assert last.value is not None
            return self.read(last.value, last.lineno + 1, deep + 1)
        finally:
            self.known = before

    # --- what a script does to its rows --------------------------------------------------------

    def _changed(self, rows: Rows | None, method: str, call: ast.Call) -> Rows | None:
        if rows is None:
            return None
        said = f".{method}({', '.join(map(ast.unparse, (*call.args, *call.keywords)))})"[:120]
        if method != "map" or not call.args:
            return replace(rows, changes=(*rows.changes, said))
        made = self._mapped(call.args[0])
        if made is None:
            return replace(rows, changes=(*rows.changes, said))
        settings, whole = made
        named = (rows.source or "").partition(":")[0] in NAMED.values()
        if named:  # the set's own columns are known, and its answers are taken out of them
            settings = {name: x for name, x in settings.items() if not name.endswith("_key")}
        changes = rows.changes if whole or named else (*rows.changes, said)
        return replace(rows, changes=changes, settings={**rows.settings, **settings})

    def _mapped(self, function: ast.expr) -> tuple[dict[str, str], bool] | None:
        """Return settings that make the same rows, and whether they say all of it."""
        if isinstance(function, ast.Lambda):
            body: ast.expr | None = function.body
            row = function.args.args[0].arg if function.args.args else ""
        elif isinstance(function, ast.Name) and function.id in self.functions:
            defined = self.functions[function.id]
            ends = [x.value for x in ast.walk(defined) if isinstance(x, ast.Return)]
            body = ends[0] if len(ends) == 1 else None
            row = defined.args.args[0].arg if defined.args.args else ""
        else:
            return None
        if not isinstance(body, ast.Dict):
            return None
        settings: dict[str, str] = {}
        whole = True
        for key, value in zip(body.keys, body.values, strict=True):
            name = self._text(key)
            read = self._prompt(value, row) if name == "prompt" else None
            column = _column(value, row)
            if read is not None:
                settings |= read
            elif name in ANSWERS and column:
                settings["data.answer_key"] = column
            elif not (name and column == name):
                whole = False
        return settings, whole

    def _prompt(self, node: ast.expr, row: str) -> dict[str, str] | None:
        """Read a prompt: a column, text around one, or messages of a system and a user."""
        if not isinstance(node, ast.List):
            return self._around(node, row)
        settings = {"data.template": "chat"}
        for message in node.elts:
            if not isinstance(message, ast.Dict):
                return None
            told = {self._text(key): x for key, x in zip(message.keys, message.values, strict=True)}
            role, content = self._text(told.get("role")), told.get("content")
            system = self._text(content)
            if role == "system" and system is not None:
                settings["data.system"] = system
            elif role == "user" and content is not None and (read := self._around(content, row)):
                settings |= read
            else:
                return None
        return settings

    def _around(self, node: ast.expr, row: str) -> dict[str, str] | None:
        """Return the column of a prompt and the text around it."""
        pieces = list(_pieces(node))
        columns = [name for piece in pieces if (name := _column(piece, row))]
        texts = [
            "{prompt}" if _column(piece, row) else self._text(piece) for piece in pieces
        ]  # fmt: skip
        if len(columns) != 1 or None in texts:
            return None
        around = "".join(text for text in texts if text is not None)
        found = {"data.prompt_key": columns[0]}
        return found if around == "{prompt}" else {**found, "data.instruction": around}


def hub_source(path: str, config: str, split: str) -> str:
    """Return a data set of a hub as data.train takes it."""
    full = FULL_NAMES.get(path, path)
    prefix = f"{NAMED[path]}:" if path in NAMED else ""
    files = ""
    if config and config != "default":
        files = f"/{config}/{split or 'train'}*"
    elif split and split != "train":
        files = f"/**/{split}*"
    return f"{prefix}hub:{full}{files}"


def _split(rows: Rows | None, split: str | None) -> Rows | None:
    """Take one part of a data set: `train`, or a share of it, which is said."""
    if rows is None or rows.source is None or not split:
        return rows
    name, bracket, share = split.partition("[")
    changes = (*rows.changes, f"[{share}") if bracket else rows.changes
    if "hub:" not in rows.source:
        return replace(rows, changes=changes)
    held_out = any(change.startswith(".train_test_split") for change in changes)
    if held_out:
        return replace(rows, changes=changes)
    source = rows.source
    if source.endswith("/train*"):
        source = f"{source.removesuffix('train*')}{name}*"
    elif name != "train":
        source = f"{source}/**/{name}*"
    return replace(rows, source=source, changes=changes)


def _column(node: ast.expr, row: str) -> str | None:
    """Return the column that an expression reads: `x["question"]`."""
    match node:
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(column))):
            return column if name == row else None
    return None


def _pieces(node: ast.expr) -> list[ast.expr]:
    """Take sums of texts and f-strings apart."""
    match node:
        case ast.BinOp(op=ast.Add()):
            return [*_pieces(node.left), *_pieces(node.right)]
        case ast.JoinedStr():
            inside = [x.value if isinstance(x, ast.FormattedValue) else x for x in node.values]
            return [piece for each in inside for piece in _pieces(each)]
    return [node]
