"""Checks of instructions that can be verified, under the names of IFEval (Zhou et al. 2023).

A row names them in `instruction_id_list` and their numbers and words in `kwargs`, a list of dicts
of the same length. Every check is linear in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from groupwise.graders.form import LANGUAGES, language_share

Check = Callable[..., bool]

WORD = re.compile(r"\w+(?:['’-]\w+)*")
SENTENCE_END = re.compile(
    r"(?<![.!?。！？])(?<!\bMr)(?<!\bDr)(?<!\bMs)(?<!\bMrs)(?<!\be\.g)(?<!\bi\.e)"
    r"[.!?。！？]++(?=[\s\"')\]]|$)|[。！？]"
)
BULLET = re.compile(r"^[ \t]*(?:[*•]|-(?!-))[ \t]+\S", re.MULTILINE)
HIGHLIGHT = re.compile(r"\*{1,2}[^*\n]{0,999}\*{1,2}")
PLACEHOLDER = re.compile(r"\[[^\[\]\n]{1,200}\]")
TITLE = re.compile(r"<<[^<>\n]{1,999}>>")
FENCE = re.compile(r"\A```(?:json)?|```\Z", re.IGNORECASE)
SIX_STARS = "******"
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def compared(found: int, relation: str, wanted: int) -> bool:
    if relation not in ("at least", "less than"):
        raise ValueError(f"the relation {relation!r} is neither 'at least' nor 'less than'")
    return found >= wanted if relation == "at least" else found < wanted


def number_words(text: str, num_words: int, relation: str) -> bool:
    return compared(len(WORD.findall(text)), relation, num_words)


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return compared(count_sentences(text), relation, num_sentences)


def count_sentences(text: str) -> int:
    pieces = [piece for piece in SENTENCE_END.split(text) if re.search(r"\w", piece)]
    return len(pieces)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Check the number of paragraphs, separated by ***; an empty one in the middle fails."""
    pieces = [piece.strip() for piece in re.split(r"\s?\*\*\*\s?", text)]
    pieces = pieces[not pieces[0] : len(pieces) - (not pieces[-1])]
    return all(pieces) and len(pieces) == num_paragraphs


def nth_paragraph_first_word(
    text: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    pieces = [piece.strip() for piece in re.split(r"\n\n", text) if piece.strip()]
    if len(pieces) != num_paragraphs or not 1 <= nth_paragraph <= len(pieces):
        return False
    word = WORD.search(pieces[nth_paragraph - 1])
    return word is not None and word[0].casefold() == first_word.strip().casefold()


def keywords_exist(text: str, keywords: list[str]) -> bool:
    return all(occurrences(text, word) for word in keywords)


def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return compared(occurrences(text, keyword), relation, frequency)


def forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(occurrences(text, word) for word in forbidden_words)


def occurrences(text: str, word: str) -> int:
    """Count a word, as a word of its own, in any case."""
    return len(re.findall(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, re.IGNORECASE))


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return compared(text.casefold().count(letter.casefold()), let_relation, let_frequency)


def response_language(text: str, language: str) -> bool:
    return language_share(text, language.lower()[:2]) > 0.5


def number_placeholders(text: str, num_placeholders: int) -> bool:
    return len(PLACEHOLDER.findall(text)) >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    marker = re.escape(postscript_marker.strip()).replace(r"\.", r"\.\s?")
    return (
        re.search(rf"^[ \t]{{0,20}}{marker}\s*\S", text, re.IGNORECASE | re.MULTILINE) is not None
    )


def number_bullets(text: str, num_bullets: int) -> bool:
    return len(BULLET.findall(text)) == num_bullets


def constrained_response(text: str) -> bool:
    """Check that one of the three answers is there; other text does not matter."""
    return sum(option in text for option in OPTIONS) == 1


def number_highlights(text: str, num_highlights: int) -> bool:
    found = [part.strip("*").strip() for part in HIGHLIGHT.findall(text)]
    return sum(bool(part) for part in found) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    mark = re.escape(section_spliter.strip())
    return len(re.findall(rf"^[ \t#*]{{0,20}}{mark}\s+\d+", text, re.MULTILINE)) >= num_sections


def json_format(text: str) -> bool:
    """Check that all of it is a JSON object or list, in a fence or not."""
    try:
        return isinstance(json.loads(FENCE.sub("", text.strip())), (dict, list))
    except (ValueError, RecursionError):
        return False


def has_title(text: str) -> bool:
    return any(title.strip("<> ") for title in TITLE.findall(text))


def two_responses(text: str) -> bool:
    pieces = [piece.strip() for piece in text.split(SIX_STARS)]
    pieces = pieces[not pieces[0] : len(pieces) - (not pieces[-1])]
    return len(pieces) == 2 and all(pieces) and pieces[0] != pieces[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    """Check that the request comes first, word for word, and something after it."""
    said, asked = text.strip().casefold(), prompt_to_repeat.strip().casefold()
    return said.startswith(asked) and bool(said[len(asked) :].strip())


def starts_with(text: str, phrase: str) -> bool:
    return text.strip().strip('"').casefold().startswith(phrase.strip().casefold())


def ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').casefold().endswith(end_phrase.strip().casefold())


def quotation(text: str) -> bool:
    said = text.strip()
    return len(said) > 2 and said[0] == said[-1] == '"'


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    capitals = sum(word.isupper() for word in WORD.findall(text))
    return compared(capitals, capital_relation, capital_frequency)


def all_capital(text: str) -> bool:
    return text.isupper()


def all_lowercase(text: str) -> bool:
    return text.islower()


def no_comma(text: str) -> bool:
    return not re.search(r"[,，、]", text)


CHECKS: Mapping[str, Check] = {
    "length_constraints:number_words": number_words,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "keywords:existence": keywords_exist,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullets,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlights,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": has_title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:start_checker": starts_with,
    "startend:end_checker": ends_with,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": all_capital,
    "change_case:english_lowercase": all_lowercase,
    "punctuation:no_comma": no_comma,
}


def asked(columns: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the checks of a row, with their arguments. Raises ValueError, saying what is wrong."""
    names = columns.get("instruction_id_list")
    if not isinstance(names, list) or not names:
        raise ValueError("it has no column instruction_id_list, a list of names of checks")
    given = columns.get("kwargs") or [{}] * len(names)
    if not isinstance(given, list) or len(given) != len(names):
        raise ValueError(f"its kwargs are no list of {len(names)}, one for each instruction")
    found = []
    for name, arguments in zip(names, given, strict=True):
        if name not in CHECKS:
            raise ValueError(f"there is no check {name!r}")
        known = {key: _whole(x) for key, x in (arguments or {}).items() if x is not None}
        wanted = CHECKS[name].__code__.co_varnames[1 : CHECKS[name].__code__.co_argcount]
        missing = [key for key in wanted if key not in known]
        if missing:
            raise ValueError(f"the kwargs of {name} lack {', '.join(missing)}")
        chosen = {key: known[key] for key in wanted}
        _check_values(name, chosen)
        found.append((name, chosen))
    return found


def _whole(value: Any) -> Any:
    """Turn 3.0 into 3: files write it so where other rows have nothing."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_values(name: str, arguments: Mapping[str, Any]) -> None:
    for key, value in arguments.items():
        kind: type = str
        if key.startswith(("num_", "nth_")) or key.endswith("frequency"):
            kind = int
        elif key in ("keywords", "forbidden_words"):
            kind = list
        if not isinstance(value, kind):
            raise ValueError(f"{key} = {value!r} of {name} should be of type {kind.__name__}")
        if key.endswith("relation"):
            compared(0, str(value), 0)
        if key == "language" and str(value).lower()[:2] not in LANGUAGES:
            raise ValueError(f"{name}: the language {value!r} is none of {', '.join(LANGUAGES)}")


def followed(text: str, checks: list[tuple[str, dict[str, Any]]]) -> list[bool]:
    """Return whether each instruction is followed. An empty text follows none."""
    if not text.strip():
        return [False] * len(checks)
    return [CHECKS[name](text, **arguments) for name, arguments in checks]
