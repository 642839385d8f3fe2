"""The arguments of a trainer in a script of TRL: model, rows, rewards, adapter; nothing is run.

Names are followed to where they were last set above; what a function of the script would make of
rows is read where it only says which column is the prompt, and told otherwise.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupwise.explain.peers.pythons import (
    Unknown,
    arguments,
    assignments,
    called,
    constants,
    parsed,
    value_of,
)
from groupwise.explain.peers.rows import Rows, RowsReader

TRAINERS = {f"{method}Trainer": f"{method}Config" for method in ("GRPO", "RLOO", "SFT", "DPO")}
# Of peft's LoraConfig -> as TRL's own command line calls it; and what peft takes where none is set.
LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout",
        "target_modules": "lora_target_modules", "use_rslora": "use_rslora",
        "use_dora": "use_dora", "modules_to_save": "lora_modules_to_save"}  # fmt: skip
LORA_USUAL = {"lora_r": 8, "lora_alpha": 8}
DEEP = 20  # names that lead to names


@dataclass
class Handed:
    """The arguments of one trainer, by the names of TRL's command line."""

    method: str  # the class of its configuration
    line: int
    args: bool = False  # it is given a configuration
    configured: int | None = None  # in which line that is made; None: nothing says
    values: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)  # of train_dataset and eval_dataset


def handed(text: str, path: Path) -> list[Handed]:
    """Return what each trainer of a script is given, in its order."""
    script = _Script(parsed(text, str(path)), path)
    calls = [node for node in ast.walk(script.tree) if isinstance(node, ast.Call)]
    made = [script.trainer(call) for call in calls if called(call) in TRAINERS]
    return sorted(made, key=lambda each: each.line)


class _Script:
    def __init__(self, tree: ast.Module, path: Path) -> None:
        self.tree, self.folder, self.path = tree, path.parent, path
        self.known = constants(tree)
        self.set_to = list(assignments(tree))
        self.functions = {node.name: node for node in ast.walk(tree) if isinstance(node, _DEF)}
        self.imported = _imported(tree)
        self.reader = RowsReader(self.known, self.functions, self.set_to)

    def trainer(self, call: ast.Call) -> Handed:
        made = Handed(TRAINERS[called(call)], call.lineno)
        given = {each.arg: each.value for each in call.keywords if each.arg}
        given |= dict(zip(("model", "reward_funcs"), call.args, strict=False))
        made.args = "args" in given
        args = self._behind(given.get("args"), call.lineno)
        if isinstance(args, ast.Call) and called(args) in TRAINERS.values():
            made.configured = args.lineno
        self._model(given.get("model"), call.lineno, made)
        self._adapter(given.get("peft_config"), call.lineno, made)
        for name in ("train_dataset", "eval_dataset"):
            if name in given:
                self._rows(name, given[name], call.lineno, made)
        if "reward_funcs" in given:
            self._rewards(given["reward_funcs"], call.lineno, made)
        return made

    def _behind(self, node: ast.expr | None, line: int) -> ast.expr | None:
        """Follow a name to what it was last set to above a line."""
        for _ in range(DEEP):
            if not isinstance(node, ast.Name):
                break
            above = [
                (at, value) for name, value, at in self.set_to if name == node.id and at < line
            ]
            if not above:
                break
            line, node = max(above, key=lambda found: found[0])
        return node

    def _text(self, node: ast.expr | None) -> str | None:
        try:
            value = value_of(node, self.known) if node is not None else None
        except Unknown:
            return None
        return value if isinstance(value, str) else None

    def _model(self, node: ast.expr | None, line: int, made: Handed) -> None:
        """Read an id, or the call that loads a model by it."""
        if node is None:
            return
        found = self._behind(node, line)
        if isinstance(found, ast.Call) and called(found) == "get_peft_model":
            self._adapter(found, line, made)
            first = found.args[0] if found.args else None
            found = self._behind(first, found.lineno)
        name = self._text(found)
        if isinstance(found, ast.Call) and called(found) == "from_pretrained":
            given = {each.arg: each.value for each in found.keywords}
            named = found.args[0] if found.args else given.get(
                "model_name", given.get("pretrained_model_name_or_path")
            )  # fmt: skip
            name = self._text(named)
            if self._text(given.get("revision")):
                made.values["model_revision"] = self._text(given["revision"])
            for flag in ("load_in_4bit", "load_in_8bit"):
                if flag in given and ast.unparse(given[flag]) == "True":
                    made.values[flag] = True
        if name is None:
            made.unread["model_name_or_path"] = ast.unparse(node)[:200]
        else:
            made.values["model_name_or_path"] = name

    def _adapter(self, node: ast.expr | None, line: int, made: Handed) -> None:
        """Read a LoraConfig, or what stands in its place in a call of get_peft_model."""
        found = self._behind(node, line)
        if not isinstance(found, ast.Call):
            if found is not None and not isinstance(found, ast.Constant):
                made.unread["peft_config"] = ast.unparse(found)[:200]
            return
        inside = [self._behind(x, line) for x in (*found.args, *(k.value for k in found.keywords))]
        lora = next(
            (x for x in inside if isinstance(x, ast.Call) and called(x) == "LoraConfig"), None
        )
        if called(found) not in ("LoraConfig", "get_peft_model"):
            made.unread["peft_config"] = ast.unparse(found)[:200]
            return
        read = arguments(lora or found, self.known)
        values = {LORA[name]: value for name, value in read.values.items() if name in LORA}
        made.values |= {"use_peft": True, **LORA_USUAL, **values}
        made.unread |= {LORA[name]: said for name, said in read.unread.items() if name in LORA}

    def _rows(self, name: str, node: ast.expr, line: int, made: Handed) -> None:
        if isinstance(node, ast.Constant):
            return
        rows = self.reader.read(node, line)
        if rows is None or rows.source is None:
            made.unread[name] = ast.unparse(self._behind(node, line) or node)[:200]
        else:
            made.values[name] = rows.source
        if rows is not None:
            made.rows[name] = rows

    def _rewards(self, node: ast.expr, line: int, made: Handed) -> None:
        """Name each reward function by its place: `file.py:function`, or where it is imported."""
        found = self._behind(node, line)
        listed = found.elts if isinstance(found, ast.List | ast.Tuple) else [found or node]
        made.values["reward_funcs"] = [self._reward(each, line) for each in listed]

    def _reward(self, node: ast.expr, line: int) -> str:
        if isinstance(node, ast.Name) and node.id in self.functions:
            return f"{self.path.name}:{node.id}"
        if isinstance(node, ast.Name) and node.id in self.imported:
            return self.imported[node.id]
        found = self._behind(node, line)
        if (text := self._text(found)) is not None:
            return f"rm(path={text!r})"
        if isinstance(found, ast.Call) and called(found) in self.imported:
            return f"{self.imported[called(found)]}({ast.unparse(found).partition('(')[2]}"
        return ast.unparse(node)[:200]


_DEF = ast.FunctionDef | ast.AsyncFunctionDef


def _imported(tree: ast.Module) -> Mapping[str, str]:
    """Return the names that are imported from modules, with the module in front."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
