"""Docstrings of functions begin with a verb in the imperative; a class name has one meaning."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "groupwise"
# The slot kinds' decorators (methods/slots.py). A slot function may name its method and the paper
# in the place of a verb: "GRPO (2402.03300)."
SLOT_KINDS = {
    "advantage", "aggregation", "auxiliary", "control", "correction", "filter_", "gate",
    "labelling", "likelihood", "pairing", "penalty", "preference", "ratio", "schedule", "shaping",
    "summing", "weighing", "width",
}  # fmt: skip
PAPER = re.compile(r"\b\d{4}\.\d{5}\b")
NO_VERBS = """
    A After All Also An And Another Any As At Because Before Behind Beside Both But By Each Either
    Else Every Everything Exactly False Few For From Here How If In Inside Into Is It Its Just Last
    Less Like Many May More Most Much Must Never New Next No Nobody None Not Nothing Now Of On Once
    One Only Or Other Others Our Out Over Same Several Since So Some Somebody Something Such Than
    That The Their Them Then There These They This Those Three To True Two Under Until Up What
    Whatever When Where Whether Which While Who Whoever Whose Why With Within Without You Your
"""
ENDS_IN_S = (
    "Address Assess Bypass Compress Discuss Dismiss Express Guess Pass Press Process Suppress"
)
# Nouns that begin sentences about a class or a module may do; these words may not.
NO_SUBJECTS = {"Of", "What", "Whether", "As"}


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text("utf-8"))


def names_its_paper(node: ast.FunctionDef | ast.AsyncFunctionDef, docstring: str) -> bool:
    """Tell whether it is a slot function whose first line names a paper."""
    decorators = {ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list}
    return bool(decorators & SLOT_KINDS and PAPER.search(docstring.splitlines()[0]))


def first_word(docstring: str) -> str:
    return docstring.split()[0].rstrip(".,:;") if docstring.split() else ""


def is_imperative(word: str) -> bool:
    """Judge without a dictionary: what is let through may still be no verb."""
    if not (word.isalpha() and word[0].isupper() and word[1:].islower()):
        return False
    if word.endswith("s"):
        return word in ENDS_IN_S.split()
    return word not in NO_VERBS.split()


def test_the_rule_tells_verbs_from_other_words() -> None:
    assert all(map(is_imperative, ("Return", "Write", "Pass", "Do", "Process")))
    odd = ("The", "Of", "What", "Whether", "returns", "Returns", "`N`", "0", "N", "GAE", "−1", "")
    assert not any(map(is_imperative, odd))


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    wrong = [
        f"groupwise/{name}:{node.lineno}: {node.name}: {docstring.splitlines()[0]}"
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (docstring := ast.get_docstring(node)) is not None
        if not (is_imperative(first_word(docstring)) or names_its_paper(node, docstring))
    ]
    assert not wrong, "\n".join(wrong)


def test_docstrings_of_classes_and_modules_name_their_subject() -> None:
    wrong = [
        f"groupwise/{name}: {docstring.splitlines()[0]}"
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef)
        if (docstring := ast.get_docstring(node)) is not None
        if first_word(docstring) in NO_SUBJECTS
    ]
    assert not wrong, "\n".join(wrong)


def test_the_slot_kinds_are_those_of_the_package() -> None:
    slots = import_module("groupwise.methods.slots")
    assert {kind.removesuffix("_") for kind in SLOT_KINDS} == set(slots.KINDS)
    assert all(hasattr(slots, kind) for kind in SLOT_KINDS)


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"groupwise/{name}:{node.lineno}")
    twice = [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]
    assert not twice, "\n".join(twice)
