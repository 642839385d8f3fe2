"""The form of a completion: its language and whether it repeats itself. Both linear, no models."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

CODE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$[^$\n]{1,400}\$|\\[a-zA-Z]+|</?[a-z_]{1,20}>", re.DOTALL
)
WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")

# Words that each language uses all the time and the others do not.
COMMON = {
    "en": "the and of to is that it was for with this be have are not you they we so what "
    "which from by at an would will can if there but then she he how many each",
    "de": "der die das und ist nicht ein eine zu den mit von sich auf für es dem wir ich "
    "dass auch wie wenn aber oder sind hat wird also daher jede dann bei nach",
    "fr": "le les des est une et dans pour que qui pas sur avec il elle nous vous ce cette "
    "sont donc mais au aux du plus par je ne chaque alors si",
    "es": "el los las una y de que es en por con para se no lo su como más pero entonces "
    "está son hay cada este esta tiene si cuando del al porque",
    "it": "il gli che di è non una per con sono del della nel come più ma anche quindi "
    "questo questa ogni ha se alla dei perché allora si e",
    "pt": "o os as uma e de que é em por com para se não do da no na como mais mas então "
    "está são cada este esta tem se quando ao porque você",
    "nl": "de het een en van is niet dat te voor met op zijn aan er maar ook wij ik dus als "
    "elke dan wordt naar bij om hoe",
    "pl": "i w nie na się że jest to do z jak ale więc są dla każdy od po czy tak który "
    "tego",
    "sv": "och att det är en som på av för inte med till den har vi så ett eller varje om "
    "då från kan",
    "tr": "ve bir bu için ile da de ne çok daha olarak olan her gibi ama değil ise o kadar "
    "sonra",
    "vi": "và của là có cho không một được các trong người với này đó để khi thì mỗi từ",
    "id": "dan yang di untuk dengan ini itu dari tidak adalah pada akan ke setiap jadi "
    "karena atau oleh ada",
}  # fmt: skip
SCRIPTS = {
    "zh": ("CJK",), "ja": ("CJK", "HIRAGANA", "KATAKANA"), "ko": ("HANGUL",), "ru": ("CYRILLIC",),
    "uk": ("CYRILLIC",), "ar": ("ARABIC",), "fa": ("ARABIC",), "he": ("HEBREW",), "el": ("GREEK",),
    "hi": ("DEVANAGARI",), "bn": ("BENGALI",), "ta": ("TAMIL",), "te": ("TELUGU",), "th": ("THAI",),
}  # fmt: skip
LANGUAGES = (*COMMON, *SCRIPTS)
WORDS = {name: frozenset(words.split()) for name, words in COMMON.items()}


def language_share(text: str, target: str) -> float:
    """Return the share of the text that is in a language. Code, formulas and tags do not count.

    Of the words, those in its script; of them, for languages that share the Latin script, the part
    of the frequent words that are its own. A text without words is in no language: 0.
    """
    words = WORD.findall(CODE.sub(" ", text))
    if not words:
        return 0.0
    sizes = Counter[str]()
    for word in words:
        script = _script(word)
        sizes[script] += len(word) if script in UNSPACED else 1
    total = sum(sizes.values())
    if target in SCRIPTS:
        share = sum(sizes[script] for script in SCRIPTS[target]) / total
        if target == "zh" and sizes["HIRAGANA"] + sizes["KATAKANA"] > 0.1 * total:
            return 0.0  # Chinese characters in Japanese
        if target == "ja" and not sizes["HIRAGANA"] + sizes["KATAKANA"]:
            return 0.0
        return share
    return sizes["LATIN"] / total * _own_part([word.lower() for word in words], target)


UNSPACED = frozenset({"CJK", "HIRAGANA", "KATAKANA", "THAI"})


def _script(word: str) -> str:
    """Return the script of the word's letters, where they share one; else the first letter's."""
    kana = next((c for c in word if "\u3040" <= c <= "\u30ff"), word[0])
    return unicodedata.name(kana, "?").split()[0]


def _own_part(words: list[str], target: str) -> float:
    """Return the share of the target's frequent words among those of all languages."""
    frequent = [word for word in words if any(word in own for own in WORDS.values())]
    if not frequent:
        return 1.0  # too short to tell: the script is all there is
    return sum(word in WORDS[target] for word in frequent) / len(frequent)


def repeated_share(text: str, words: int) -> float:
    """Return the share of runs of so many words that came before; 0 of a short text."""
    found = [piece for word in WORD.findall(text.lower()) for piece in _pieces(word)]
    runs = [tuple(found[i : i + words]) for i in range(len(found) - words + 1)]
    return 1.0 - len(set(runs)) / len(runs) if runs else 0.0


def _pieces(word: str) -> list[str]:
    """Split a text into words; scripts without spaces into characters."""
    return list(word) if _script(word) in UNSPACED else [word]
