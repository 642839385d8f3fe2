"""Functions of a script with all of the script that they use, as a file of their own.

Imported for one function, a script that trains would train again, or ask for its own tool.
"""

from __future__ import annotations

import ast
import builtins
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from groupwise.explain.peers.pythons import parsed

Statement = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def extracted(text: str, functions: Sequence[str], path: str) -> str:
    """Return a module of these functions: the imports, constants and functions that they need."""
    tree = parsed(text, path)
    imports, defined = _imports(tree), _defined(tree)
    wanted, seen = list(functions), set[str]()
    taken, chosen = dict[tuple[int, str], str](), dict[tuple[int, int], str]()
    while wanted:
        name = wanted.pop()
        if name in seen or hasattr(builtins, name):
            continue
        seen.add(name)
        if name in imports:
            node, line = imports[name]
            taken[node.lineno, name] = line
        elif name in defined:
            statement = defined[name]
            chosen[statement.lineno, statement.col_offset] = _source(text, statement)
            wanted += _used(statement)
    future = ["from __future__ import annotations"] if "annotations" in _futures(tree) else []
    head = [*future, *dict.fromkeys(taken[place] for place in sorted(taken))]
    body = [chosen[place] for place in sorted(chosen)]
    return "\n\n\n".join(["\n".join(head), *body]).strip() + "\n"


def _imports(tree: ast.Module) -> Mapping[str, tuple[ast.stmt, str]]:
    """Return every imported name with a line that imports it alone."""
    found: dict[str, tuple[ast.stmt, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                alone = (
                    ast.Import([alias])
                    if isinstance(node, ast.Import)
                    else ast.ImportFrom(node.module, [alias], node.level)
                )
                name = alias.asname or alias.name.partition(".")[0]
                found[name] = (node, ast.unparse(alone))
    return found


def _defined(tree: ast.Module) -> Mapping[str, Statement]:
    """Return what defines each name: outside of functions where it is, else inside of one."""
    found: dict[str, Statement] = {
        node.name: node for node in ast.walk(tree) if isinstance(node, DEFINITIONS)
    }
    for node in _outside_functions(tree):
        if isinstance(node, DEFINITIONS):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                found |= {name.id: node for name in names if isinstance(name, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            found[node.target.id] = node
    return found


def _outside_functions(tree: ast.AST) -> Iterable[ast.stmt]:
    """Return statements in their order; of functions called main those inside, too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node
        inside = not isinstance(node, DEFINITIONS) or getattr(node, "name", "") in ("main", "train")
        if isinstance(node, ast.stmt) and inside:
            yield from _outside_functions(node)


def _used(node: ast.AST) -> list[str]:
    """Return names that are read in a statement and set nowhere in it."""
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    own = {each.id for each in names if not isinstance(each.ctx, ast.Load)}
    own |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        own = set()
    return [each.id for each in names if isinstance(each.ctx, ast.Load) and each.id not in own]


def _futures(tree: ast.Module) -> set[str]:
    return {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        for alias in node.names
    }


def _source(text: str, node: Statement) -> str:
    """Return a statement as it is written, with its decorators, moved to the left."""
    lines = text.splitlines()
    first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))])
    whole = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno]))
    try:
        alone = len(ast.parse(whole).body) == 1
    except SyntaxError:  # a text over several lines stands further left
        alone = False
    return whole if alone else ast.unparse(node)
