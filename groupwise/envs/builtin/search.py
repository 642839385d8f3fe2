"""A search over a folder of texts, by BM25: `search(folder='docs')`.

Texts are cut into passages of so many words. They are read once, where workers are forked from, so
that all of them share the index.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from groupwise.common.extras import install
from groupwise.errors import WorldError

KINDS = (".txt", ".md", ".rst", ".jsonl")
TEXTS = (
    "text",
    "contents",
    "content",
    "body",
)  # columns of a line of .jsonl, the first that is there


def search(folder: str, top: int = 3, words: int = 120) -> Callable[..., Coroutine[Any, Any, str]]:
    """Make the tool: `top` passages of `words` words each are the answer."""
    bm25s = _package()
    if top < 1 or words < 1:
        raise WorldError(f"search: top = {top} and words = {words} must be at least 1.")
    passages = list(_passages(Path(folder).expanduser(), words))
    if not passages:
        raise WorldError(
            f"search: no texts ({', '.join(KINDS)}) in {folder!r}. Paths are relative to "
            f"{Path.cwd()}."
        )
    index = bm25s.BM25()
    tokens = bm25s.tokenize([text for _, text in passages], stopwords="en", show_progress=False)
    index.index(tokens, show_progress=False)

    async def search(query: str) -> str:
        """Search the texts and return the passages that fit best.

        Args:
            query: Words to look for.
        """
        asked = bm25s.tokenize([query], stopwords="en", show_progress=False, return_ids=False)
        known = [[word for word in asked[0] if word in index.vocab_dict]]
        if not known[0]:
            return "Nothing found."
        most = min(top, len(passages))
        found, scores = index.retrieve(known, k=most, show_progress=False, n_threads=1)
        hits = [at for at, score in zip(found[0], scores[0], strict=True) if score > 0]
        told = [f"{n}. {passages[at][0]}: {passages[at][1]}" for n, at in enumerate(hits, 1)]
        return "\n".join(told) or "Nothing found."

    return search


def _package() -> Any:
    try:
        import bm25s
    except ImportError:
        raise WorldError(
            f"The tool search ranks with the package bm25s, which is not installed. "
            f"{install('search')}"
        ) from None
    return bm25s


def _passages(folder: Path, words: int) -> Iterator[tuple[str, str]]:
    """Yield name and text of each passage, in the order of the files' names."""
    files = [folder] if folder.is_file() else sorted(folder.rglob("*"))
    for file in files:
        if file.suffix in KINDS and file.is_file():
            for name, text in _texts(file, folder):
                parts = text.split()
                for start in range(0, len(parts), words):
                    yield name, " ".join(parts[start : start + words])


def _texts(file: Path, folder: Path) -> Iterator[tuple[str, str]]:
    name = file.name if folder.is_file() else str(file.relative_to(folder))
    whole = file.read_text("utf-8", "replace")
    if file.suffix != ".jsonl":
        yield name, whole
        return
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line) if line.strip() else {}
        except json.JSONDecodeError as error:
            raise WorldError(f"search: {name}, line {number} is no JSON: {error}.") from None
        key = next((key for key in TEXTS if isinstance(row.get(key), str)), None)
        if key:
            yield str(row.get("title") or row.get("id") or f"{name}:{number}"), row[key]
