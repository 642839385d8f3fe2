"""How an answer is written: looks, units, currency and words taken off, before it is read."""

from __future__ import annotations

import re
from fractions import Fraction

from groupwise.graders.mathematics.numerals import TAKES_BACK, worth
from groupwise.graders.mathematics.units import Unit, are_words, read_unit

CIRCULAR = ("sin", "cos", "tan", "cot", "sec", "csc")
CIRCULAR_AND_HYPERBOLIC = (*CIRCULAR, *(f"{name}h" for name in CIRCULAR))
FUNCTIONS = frozenset(
    {*CIRCULAR_AND_HYPERBOLIC, *(f"arc{name}" for name in CIRCULAR_AND_HYPERBOLIC),
     "ln", "log", "lg", "exp"}
)  # fmt: skip
WRITTEN_OUT = frozenset({"abs", "floor", "ceil"})  # and words, too
OF_SEVERAL = frozenset({"gcd", "lcm", "max", "min"})
# Signs that say how something looks, not what it is.
LOOKS = re.compile(
    r"\\(?:left|right|big[lr]?|Big[lr]?|bigg[lr]?|Bigg[lr]?)(?![a-zA-Z])\.?"
    r"|\\(?:displaystyle|textstyle|limits|hfill)(?![a-zA-Z])"
    r"|(?<!\\)\\[!,;:> ]|~|\\q?quad"
)
TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|texttt|mbox|mathrm|mathbf|mathit|operatorname)"
    r"\s*\{([^{}]*)\}"
)
# What many write without a backslash; letters that LaTeX sets as text are left alone.
BY_HAND = re.compile(
    rf"{TEXT.pattern}|(?<![\\a-zA-Z])(?:"
    r"(?P<root>(?i:sqrt|cbrt))(?:\s?(?P<digits>\d+(?:\.\d+)?))?(?![a-zA-Z\d])"
    r"|(?P<sign>(?i:pi|infinity|inf))(?![a-zA-Z])|(?P<frac>[dt]?frac)(?=\s?\{)"
    r"|(?<=[)\]])\s?(?P<union>U)\s?(?=[(\[])"
    r"|(?P<function>(?:arc)?(?:sin|cos|tan|cot|csc)h?|arcsech?|sech|ln|log|exp|sec(?=\(|\^|\*\*)"
    r"|ar?(?:sin|cos|tan|cot|csc|sec)h?(?=\(|\^|\*\*)|[aA]bs(?=\()"
    r"|(?:floor|ceil|gcd|lcm|max|min)(?=\())"
    r"(?=\s?\(|\s?\d|\s[a-zA-Z](?![a-zA-Z])|\s?\\|\s?\^|\*\*))"
)
SIGNS = {
    "sqrt": r"\sqrt", "cbrt": r"\sqrt[3]", "pi": r"\pi", "inf": r"\infty", "infinity": r"\infty",
}  # fmt: skip
BY_OTHER_NAME = {"Abs": "abs"} | {
    f"{short}{name}": f"arc{name}" for short in ("a", "ar") for name in CIRCULAR_AND_HYPERBOLIC
}
ESCAPED = re.compile(r"\\\\(?=[a-zA-Z])")  # escaped once too often
SINGLE = re.compile(r"\[[^\[\](){},;]*\]")  # one thing in brackets
DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|°")
PERCENT = re.compile(r"\\?%|\b(?:per\s?cent(?:age)?|pct)\b\.?", re.IGNORECASE)
MONEY = re.compile(r"\\\$|[$€£¥](?=\s?-?[\d.])|(?<=\d)\s?¢")
CURRENCIES = {"$": ("money", Fraction(100)), "¢": ("money", Fraction(1))} | {
    sign: (sign, Fraction(1)) for sign in "€£¥"
}
THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:(?:,|\{,\}|,\s?\\!\s?|\\,\s?)\d{3})+(?![\d,])")
DECIMAL_COMMA = re.compile(r"(?<![\d,.])(?:\d{1,3}(?:\.\d{3})+|\d+),\d+(?![\d,.])")
BRACED_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d)")
# Figures that are only set in another face, and what LaTeX has no name for.
FACE = re.compile(
    r"\\(?:text|textbf|textrm|mbox|mathbf|mathrm|boldsymbol|bm)\s*\{\s*([-−+]?[\d.,/]+)\s*\}"
    r"|\\(?:mathbf|boldsymbol|bm|mathit)\s*\{\s*([a-zA-Z])\s*\}"
    r"|\\operatorname\*?\s*\{(?P<operator>[a-z]+)\}"
)
WIDE_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:[  ]\d{3})+(?:[.,]\d+)?(?!\d)")
PAIR = re.compile(r"[(\[{][^()\[\]{}]*\d,\d{3}(?!\d)[^()\[\]{}]*[)\]}]")
AND = re.compile(
    r",?\s*\\(?:text|mbox|textrm)\s*\{[\s,]*(?:and|(?P<set_or>or))\s*\}"
    r"|(?:(?<=[\d)}\]])\s*|(?:(?<=[=<>+*/(^-][a-zA-Z])|(?<=[=<>+*/(^-]\s[a-zA-Z]))\s+),?\s*"
    r"\b(?:and|(?P<or>or))\b\s*"
)
# No word can be split in two ways here (++): no text takes more than a look for each character.
_SET = r"\\(?:text|textbf|textrm|textnormal|mbox|mathrm)\s*\{(?!\s*\d)[^{}]*\}"
_PLAIN = r"(?<=[\d}\s])[a-zA-Zµμ]{2,}+\.?|(?<=\s)\([a-zA-Z]{3,}+(?:\s[a-zA-Z]++)*+\)"
_POWER = r"(?:\s*(?<=[a-zA-Z}.\s])(?:\^|\*\*)\s*\{?[-−]?[123]\}?)?"
_OVER = rf"\s*(?:/|\\cdot)\s*(?:{_SET}|[a-zA-Zµμ]++\.?){_POWER}"  # of a word, never of a number
WORDS_BEHIND = re.compile(
    rf"(?<=[\d)}}\]a-z])(?:\s*(?:{_SET}|{_PLAIN}){_POWER}(?:{_OVER})*+)++\s*$"
)
NO_UNIT = re.compile(r"\b(?:or|and|not|but|neither|nor|is|are|was|isn|wrong|incorrect|false)\b")
VULGAR = {"½": "1}{2", "⅓": "1}{3", "⅔": "2}{3", "¼": "1}{4", "¾": "3}{4", "⅕": "1}{5", "⅛": "1}{8"}
VULGAR_FRACTION = re.compile("[½⅓⅔¼¾⅕⅛]")
RAISED = re.compile("[⁻⁺]?[⁰¹²³⁴-⁹]+")
ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+))")
LOWERED = re.compile("(?<=[0-9])[₀-₉]+")
LEVEL = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺₀₁₂₃₄₅₆₇₈₉", "0123456789-+0123456789")
BELOW_A_LETTER = re.compile("(?<=[a-zA-Z])[₀-₉]+")
# Greek letters and number sets that are typed, and what LaTeX calls them.
TYPED = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta", "η": "eta",
    "θ": "theta", "ι": "iota", "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi",
    "ρ": "rho", "σ": "sigma", "τ": "tau", "υ": "upsilon", "φ": "phi", "χ": "chi", "ψ": "psi",
    "ω": "omega", "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda", "Ξ": "Xi", "Π": "Pi",
    "Σ": "Sigma", "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega", "ℝ": "mathbb{R}", "ℤ": "mathbb{Z}",
    "ℕ": "mathbb{N}", "ℚ": "mathbb{Q}", "ℂ": "mathbb{C}",
}  # fmt: skip
TYPED_SIGN = re.compile(f"[{''.join(TYPED)}]")
CUBE_ROOT = re.compile(r"∛\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+))")
REPEATING = re.compile(
    r"(?<!\d)(\d{0,50})\.(\d{0,50})(?:\\overline\s*\{(\d{1,50})\}|\((\d{1,50})\))"
)
RECURRING = re.compile(
    r"(?<!\d)(\d{0,50})\.(\d{0,50}?)(\d)\3{2,50}(?:\.{3}|…|\\[lc]?dots(?![a-z]))"
)
CUT_OFF = re.compile(r"\.\d+\s*(?:\.{2,3}|…|\\[lc]?dots(?![a-z]))")  # 3.14...
AND_A_HALF = re.compile(r"(?<=\d)\s+and\s+(?:(?:a|one)\s+(half|third|quarter)\b|(?=\\[dt]?frac))")
A_PART = {"half": 2, "third": 3, "quarter": 4}
TIMES_TEN = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*(?:\^|\*\*))")
IN_BASE = re.compile(r"(?<![\w.])(\d+)\s+\(?(?:in\s+)?base[\s-]+(\d+)\)?(?=\W*$)")


class Unsure(Exception):
    """This notation is not among what is read here."""


def clean(text: str) -> tuple[str, bool, Unit | None]:
    """Take away looks and currency; tell whether it is a percentage, and of what currency."""
    text = text.strip()
    money = CURRENCIES["$"] if text.startswith("$") and text.count("$") == 1 else None
    text = text.strip("$").strip()
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(opening) and text.endswith(closing):
            text = text[2:-2]
    if r"\begin" not in text:
        text = ESCAPED.sub(r"\\", text)
    if SINGLE.fullmatch(text):
        text = text[1:-1]
    if text.count("}") == text.count("{") + 1:
        text = text.removesuffix("}")
    text = FACE.sub(_bare, BY_HAND.sub(_as_command, text))
    text = AND.sub(lambda found: " ∨ " if found["or"] or found["set_or"] else " , ", _level(text))
    text = THOUSANDS.sub(lambda found: re.sub(r"\D", "", found[0]), _pairs_apart(text))
    text = BRACED_COMMA.sub(".", text)
    text = LOOKS.sub(" ", text).strip().rstrip(".\\").strip()
    if text.startswith("**") and text.endswith("**") and len(text) > 4:
        text = text[2:-2].strip()
    if WIDE_THOUSANDS.fullmatch(text):
        text = re.sub(r"\s", "", text)
    if sign := MONEY.search(text):
        money = CURRENCIES[sign[0].strip()[-1]]
        text = MONEY.sub("", text)
    text = DEGREES.sub("", text)
    without = PERCENT.sub("", text)
    percent, text = without != text, without.strip()
    return text, percent, money


def with_points(text: str) -> str | None:
    """Write 3,5 as 3.5, and (0,5; 1,5) as (0.5; 1.5): the other reading of commas, if any."""
    if text.count(",") != 1 and (";" not in text or re.search(r",\s|\s,", text)):
        return None
    if not DECIMAL_COMMA.search(text) or (";" not in text and re.search(r"[(\[{].*,", text)):
        return None
    return DECIMAL_COMMA.sub(lambda found: found[0].replace(".", "").replace(",", "."), text)


def _bare(found: re.Match[str]) -> str:
    return f"\\{found['operator']}" if found["operator"] else found[1] or found[2]


def _as_command(found: re.Match[str]) -> str:
    """Write 2sqrt(3) as 2\\sqrt(3), pi as \\pi, sin(x) as \\sin(x), U of intervals as \\cup."""
    if found["function"]:
        return f"\\{BY_OTHER_NAME.get(found['function'], found['function'])}"
    if found["frac"] or found["union"]:
        return r"\frac" if found["frac"] else r" \cup "
    word = found["root"] or found["sign"]
    if not word:
        return found[0]
    return SIGNS[word.lower()] + (f"{{{found['digits']}}}" if found["digits"] else " ")


def _level(text: str) -> str:
    """Write signs above, below and in one with others as LaTeX does; repeating decimals too."""
    if "." in text:
        text = repeating_decimals(text)
        if CUT_OFF.search(text):
            raise Unsure
    if not text.isascii():
        text = VULGAR_FRACTION.sub(lambda found: rf"\frac{{{VULGAR[found[0]]}}}", text)
        text = ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2] or m[3]}}}", text)
        text = CUBE_ROOT.sub(lambda m: rf"\sqrt[3]{{{m[1] or m[2] or m[3]}}}", text)
        text = TYPED_SIGN.sub(lambda found: rf"\{TYPED[found[0]]} ", text)
        text = BELOW_A_LETTER.sub(lambda found: f"_{{{found[0].translate(LEVEL)}}}", text)
        text = RAISED.sub(lambda found: f"^{{{found[0].translate(LEVEL)}}}", text)
        text = LOWERED.sub(lambda found: f"_{{{found[0].translate(LEVEL)}}}", text)
    return IN_BASE.sub(r"\1_{\2}", TIMES_TEN.sub("*", AND_A_HALF.sub(_a_part, text)))


def repeating_decimals(text: str) -> str:
    """Write 0.\\overline{3}, 0.(3) and 0.333... as fractions."""
    text = RECURRING.sub(lambda found: _repeating(found[1], found[2], found[3]), text)
    return REPEATING.sub(lambda m: _repeating(m[1], m[2], m[3] or m[4]), text)


def _repeating(whole: str, start: str, again: str) -> str:
    """Write 0.1\\overline{6} as 15/90."""
    nines = "9" * len(again) + "0" * len(start)
    top = int((whole or "0") + start + again) - int((whole or "0") + start)
    return rf"\frac{{{top}}}{{{nines}}}"


def _a_part(found: re.Match[str]) -> str:
    return rf"\frac{{1}}{{{A_PART[found[1]]}}}" if found[1] else " "


def _pairs_apart(text: str) -> str:
    """Read (20,100) as a pair: commas in brackets separate. If they seem to do both, refuse."""

    def apart(found: re.Match[str]) -> str:
        if re.search(r",0\d\d(?!\d)", found[0]) or re.search(r",\s", found[0]):
            raise Unsure
        return found[0].replace(",", " , ")

    return PAIR.sub(apart, text)


def take_unit(text: str) -> tuple[str, Fraction, Unit | None]:
    """Split a number from the words behind it: what they multiply it by, and what unit they are.

    Words alone are kept: they are the answer.
    """
    found = WORDS_BEHIND.search(text)
    while found and not _begins_with_words(found[0]):
        found = WORDS_BEHIND.search(text, found.start() + 1)  # 3xy \text{ cm}
    if not found or not found.start():
        return text, Fraction(1), None
    before, words = text[: found.start()], TEXT.sub(r" \1 ", found[0]).strip(" ()")
    if (
        not re.search(r"\d|\\pi|\\sqrt", before)
        or NO_UNIT.search(words)
        or any(f"\\{name}" in before for name in ("text", "mbox", "begin"))
    ):
        return text, Fraction(1), None
    scale, words = _take_scale(words)
    unit = read_unit(words)
    return before, scale, None if unit is None else unit[0]


def _begins_with_words(tail: str) -> bool:
    """Tell whether it begins with words; letters that LaTeX sets as text always are."""
    letters = tail.partition("\\")[0].rstrip()
    return not letters or are_words(letters)


def _take_scale(words: str) -> tuple[Fraction, str]:
    """Read 'million dollars' as a million, of dollars."""
    scale = Fraction(1)
    while (first := re.match(r"[^\W\d_]+", words)) and (size := worth(first[0])):
        scale, words = scale * size[0], words[first.end() :].lstrip(" -(")
    for word in re.findall(r"[^\W\d_]+", words):
        if word.casefold() in TAKES_BACK or worth(word):
            raise Unsure  # 4 squared, 4 in a million
    return scale, words


def only_words(text: str) -> str:
    """Return the words of an answer that has nothing else: folded, without brackets around them."""
    bare = TEXT.sub(r"\1", text)
    if bare == text and not re.fullmatch(r"\(?[A-Z]\)?|[^\W\d_]{3,}(?:[ '-][^\W\d_]+)*", text):
        return ""
    bare = " ".join(bare.split()).strip(" .").strip()
    single = re.fullmatch(r"\(?([a-zA-Z])\)?", bare)
    if single:
        return single[1]
    if not re.fullmatch(r"[^\W\d_]+(?:[ ,.'-]+[^\W\d_]+)*", bare) or bare.lower() in FUNCTIONS:
        return ""
    return bare.casefold()
