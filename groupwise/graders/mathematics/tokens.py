"""Mathematical notation as tokens, LaTeX and plain signs as one: what notation.py reads."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from groupwise.graders.mathematics.spelling import TEXT, Unsure, clean

Tree = tuple[Any, ...]

RELATIONS = {
    r"\leq": "<=", r"\le": "<=", "≤": "<=", r"\geq": ">=", r"\ge": ">=", "≥": ">=", r"\lt": "<",
    r"\gt": ">", r"\neq": "!=", r"\ne": "!=", "≠": "!=", r"\in": "∈", "∈": "∈", r"\approx": "≈",
    "≈": "≈", r"\cup": "∪", "∪": "∪", r"\cdot": "*", r"\times": "*", "×": "*", "·": "*",
    "⋅": "*", "∙": "*", "•": "*", "∗": "*", "∶": ":", "（": "(", "）": ")", "，": ",", "；": ";",
    "≦": "<=", "≧": ">=", r"\leqq": "<=", r"\geqq": ">=",
    r"\div": "/", "÷": "/", r"\pm": "±", r"\mp": "∓", "−": "-", "–": "-", r"\infty": "∞",
    r"\infinity": "∞", "π": r"\pi", r"\lbrace": "{", r"\rbrace": "}", r"\{": r"\{", r"\}": r"\}",
    r"\lbrack": "[", r"\rbrack": "]", r"\lvert": "|", r"\rvert": "|", r"\vert": "|", "**": "^",
    "==": "=", "=/=": "!=",
    r"\lparen": "(", r"\rparen": ")", r"\dfrac": r"\frac", r"\tfrac": r"\frac",
    r"\cfrac": r"\frac", r"\dbinom": r"\binom", r"\tbinom": r"\binom",
    r"\leqslant": "<=", r"\geqslant": ">=", "⩽": "<=", "⩾": ">=", r"\simeq": "≈", r"\doteq": "≈",
    "⁄": "/", "∕": "/", r"\lfloor": "⌊", r"\rfloor": "⌋", r"\lceil": "⌈", r"\rceil": "⌉",
    r"\langle": "(", r"\rangle": ")", "⟨": "(", "⟩": ")", r"\lor": "∨", r"\vee": "∨",
    r"\land": ",", r"\wedge": ",", "’": "'", r"\varnothing": r"\emptyset",
    "∅": r"\emptyset",
}  # fmt: skip
TOKEN = re.compile(
    r"\s*(?:(?P<number>\d*\.\d+[eE][-+]?\d{1,3}(?![\w.^])|\d+(?:[eE]\d{1,3}|[eE][-+]\d{2,3}|E[-+]\d)(?![\w.^])"
    r"|\d+(?:\.\d+)?|\.\d+)|(?P<command>\\[a-zA-Z]+|\\[{}])"
    r"|(?P<sign>\*\*|=/=|==|<=|>=|!=|[-−–+*/^=<>()\[\]{}|,;!_±∓≤≥≠≈×·÷π∞∪∈:'’∨⩽⩾⁄∕⌊⌋⌈⌉⟨⟩∅⋅∙•∗∶（），；≦≧])|(?P<letter>[a-zA-Z]))"
)


class Tokens:
    """The tokens of one text, taken one after the other."""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        at, text = 0, text.rstrip()
        while at < len(text):
            found = TOKEN.match(text, at)
            if not found:
                raise Unsure
            kind = str(found.lastgroup)
            word = RELATIONS.get(found[kind], found[kind])
            if kind != "number" and kind != "letter":
                kind = "command" if word.startswith("\\") else "sign"
            self.tokens.append((kind, word))
            at = found.end()
        self.at = 0

    @property
    def next(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    @property
    def kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self, wanted: str = "") -> str:
        word = self.next
        if not word or (wanted and word != wanted):
            raise Unsure
        self.at += 1
        return word


@lru_cache(maxsize=2**14)
def signs(text: str) -> tuple[tuple[str, str], ...] | str:
    """Split an answer that can't be read into signs; return itself where not even that works."""
    try:
        plain, percent, money = clean(TEXT.sub(r" \1 ", text))
        return (*Tokens(plain).tokens, ("of", f"{percent} {money}"))
    except Unsure:
        return text
