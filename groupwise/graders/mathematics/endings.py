"""How a text ends: whether it was cut off, and whether it takes back what it said.

A text that was cut off has not given its answer yet, whatever number stands last in it. An answer
that is withdrawn behind its mark is none: `\\boxed{4}. Wait, that is wrong, it's 5.` says 5.
"""

from __future__ import annotations

import re

from groupwise.graders.mathematics.formulas import ends_inside

LINE = 400  # characters of a last line that are looked at
BEHIND = 4000  # characters behind an answer in which it may be withdrawn
INTRODUCTION = 80  # characters in front of a number that may introduce it
LAST = 20  # characters that tell whether a sentence has ended

# --- cut off

STOP = re.compile(r"(?<!\.)[.!?。！？](?:[\s*_)\]}\"'”’`$>|]|\\[\])])*\Z")
DANGLING = re.compile(  # signs and words that something must follow
    r"(?:[=+×·÷^_&<>≤≥≈,({\[:;/]|(?:\s|(?<=\d))[-–—−*]"
    r"|\\(?:times|cdot|div|pm|[dt]?frac|sqrt|left|implies|[Rr]ightarrow|to|equiv|approx|[lg]eq?|neq?"
    r"|text|q?quad|begin)"
    r"|,\s*times|\b(?:which|that|this|then|it)\s+(?:gives|equals|means|becomes|implies)|\b(?-i:I)"
    r"|\b(?:means|shows?|implies|know|see|find|note|such|follows|conclude|given)\s+that"
    r"|\b(?:the|an?|of|to|and|or|but|be|been|with|from|by|for|at|as|which|who|than|so|if|when"
    r"|because|since|while|where|we|he|she|they|his|their|its|our|my|your|into|let|thus|therefore"
    r"|hence|will|would|can|could|should|must|may|might|is|are|was|were))\s*\Z",
    re.IGNORECASE,
)
TURNED_AROUND = re.compile(  # 12 it is, 12 apples there are
    r"[\d)}$]\W{0,3}(?:[^\W\d_]{1,20}\W{1,3}){0,2}(?:it|that|there|they)\s(?:is|are|was|were)\s*\Z",
    re.IGNORECASE,
)
MARKUP = re.compile(r"(?<=\S)(?:\*{1,3}|__|`{1,3}|</?[a-z]{1,12}>)\s*\Z")
NEW_SENTENCE = re.compile(  # with a word in it
    r"(?:[.!?。！？][*_)\]}\"'”’`$]*\s+(?![a-z])|\n|(?:\$|\\[\])])\s?(?=[A-Z]))[^\n]{0,40}?[^\W\d_]"
)
LONG = re.compile(r"(?:[^\W\d_][\w'’-]*\W+){8}")
ENDED = re.compile(r"[.!?。！？][)\]}\"'”’$]*(?:\s+[A-Z]|\n)")


def unfinished(text: str, at: int) -> bool:
    """Tell whether a text whose last value ends at this place looks cut off.

    It has no full stop, and ends on a sign or a word that something must follow, inside a bracket
    or a formula, in a new sentence behind that value, or many words behind it where the sentences
    before it have a full stop.
    """
    end = max(len(text) - LAST, 0)
    if STOP.search(text, end):
        return False
    text = text.rstrip()
    markup = MARKUP.search(text, end)
    text = text[: markup.start()] if markup else text
    dangling = DANGLING.search(text, max(len(text) - LAST, 0))
    if dangling and TURNED_AROUND.search(text, max(len(text) - INTRODUCTION, 0)):
        dangling = None
    if dangling or _is_open(text) or NEW_SENTENCE.search(text, at):
        return True
    return bool(LONG.search(text, at)) and bool(ENDED.search(text, 0, at))


def _is_open(text: str) -> bool:
    """Tell whether a text ends inside a bracket of the last line, a formula or an environment."""
    line = text[text.rfind("\n") + 1 :][-LINE:]
    if line.count("(") + line.count("{") > line.count(")") + line.count("}") + line.count("]"):
        return True
    if "\\begin{" in text and text.count("\\begin{") > text.count("\\end{"):
        return True
    return ends_inside(text)


# --- taken back

SAID = (
    r"(?:that|this|it|which|(?:my|this|that|the|above)\s+(?:\w+\s+)?"
    r"(?:answer|result|value|total|calculation|solution))"
)
WRONG = r"(?:wrong|incorrect|mistaken|false)"
RIGHT = r"(?:right|correct|true|the\s+(?:right\s+|correct\s+)?answer)"
# What was said is wrong: in a sentence about it.
DENIES = re.compile(
    rf"\b{SAID}(?:['’]s|\s+(?:is|was|seems|looks|must\s+be))\s+(?:\w+ly\s+)?"
    rf"(?:{WRONG}|not\s+(?:quite\s+)?{RIGHT}|an?\s+(?:error|mistake|typo))\b"
    rf"|\b{SAID}\s+(?:(?:isn|wasn|can)['’]?t|cannot)\s+(?:be\s+|quite\s+)?{RIGHT}\b"
    rf"|\b{SAID}\s+does(?:n['’]t|\s+not)\s+(?:look|seem|sound)\s+{RIGHT}\b"
    rf"|\bI\s+(?:do\s+not|don['’]t)\s+(?:think|believe)\s+{SAID}(?:['’]s|\s+is)\s+{RIGHT}\b"
    r"|\bthere(?:['’]s|\s+is|\s+was)\s+an?\s+(?:mistake|error)\b"
    r"|\b(?:das\s+ist|c['’]est|es|это)\s+(?:falsch|faux|incorrecto|неверно)\b",
    re.IGNORECASE,
)
# The writer's own mistake, in any sentence.
OWNS = re.compile(
    r"\bI\s+(?:have\s+|just\s+){0,2}(?:(?:made|found|see|notice)\s+(?:an?|the|my)\s+(?:\w+\s+){0,2}"
    r"(?:mistake|error)|mis(?:calculated|counted|read|took|applied|understood)|was\s+wrong"
    r"|take\s+(?:that|it)\s+back|meant|(?:forgot|overlooked|neglected)"
    r"(?!\s+to\s+(?:mention|say|add|note|state|write|show|box)\b))\b|\bmy\s+(?:mistake|bad)\b"
    r"|\b(?:scratch|strike|disregard|ignore)\s+(?:that|this)\b|\bcorrection\s*[:,]"
    r"|\blet\s+me\s+(?:correct|fix)\s+(?:that|this|it|my)\b|不对|错了|更正|算错",
    re.IGNORECASE,
)
# What stands before it is: '42 is a common wrong answer', '42 is not right'.
IS_WRONG = re.compile(
    rf"(?:(?:is|was)(?:n['’]t\s+|\s+not\s+)|(?:cannot|can['’]t)\s+be\s+)(?:\w+ly\s+)?{RIGHT}\b"
    rf"|(?:is|was|looks|seems)\s+(?:(?!not\b|never\b)\w+\s+){{0,3}}(?:{WRONG}|impossible)\b",
    re.IGNORECASE,
)
# Another number, called the right one.
NUMBER = r"[\s:*_$({\[]{0,8}(?:\\boxed\{)?(?:[-−]?[$€£]?\.?\d|\\[dt]?frac|\\sqrt|\\boxed)"
CORRECTS = re.compile(
    r"\bthe\s+(?:(?:correct|right|actual|real|true)\s+(?:final\s+)?(?:answer|one|result|value)\s+"
    r"(?:is|was|should\s+be|must\s+be)|(?:final\s+)?answer\s+(?:should|must|has\s+to)\s+be)"
    rf"(?={NUMBER})",
    re.IGNORECASE,
)
TURN = re.compile(
    r"(?:\A|[.!?,;:)}\]>$*\n—–…-])[\s*_\"')}\]$]*(?:but\s+|oh,?\s+|ah,?\s+)?"
    r"(?P<word>no|wait|hmm+|oops|sorry|actually|hold\s+on|on\s+second\s+thoughts?|or\s+rather|I\s+mean|but|however|等等)"
    r"\b[\s,.:;!…—–-]*(?:(?:no|wait|actually|sorry)\b[\s,.:;!…—–-]*){0,2}",
    re.IGNORECASE,
)
SOFT = frozenset({"but", "however"})  # they turn, and withdraw nothing by themselves
# Right behind a turn alone: elsewhere it is why another value is none.
IMPOSSIBLE = re.compile(
    r"(?:that|this|it)(?:['’]s|\s+(?:is|was))\s+(?:impossible|not\s+possible|a\s+contradiction)\b"
    r"|(?:that|this|it)\s+(?:is|was)n['’]t\s+possible\b|(?:that|this|it)\s+contradicts\b",
    re.IGNORECASE,
)
FIRM = frozenset({"no", "oops", "sorry", "actually"})  # no check begins with these
VALUE = (
    r"(?:[*_(]{0,3}[-−]?[$€£]?[-−]?(?:\.?\d|####|[a-z]\s?=|\\[a-zA-Z(\[])"
    r"|(?-i:[*_(]{0,3}[A-HJ]\b(?!['’\s]\s?[a-z])))"  # or an option
)
INSTEAD = re.compile(  # 5, it should be 5
    rf"{VALUE}|(?<!if )(?<!when )\b{SAID}(?:['’]s|\s+(?:is|was|should\s+be|must\s+be|has\s+to\s+be"
    rf"|would\s+be|equals?|becomes|comes\s+to))\s+(?:actually\s+|really\s+)?{VALUE}",
    re.IGNORECASE,
)
OTHERWISE = re.compile(rf"the\s+(?:\w+\s+){{1,3}}?(?:is|was|should\s+be|must\s+be){NUMBER}")
CONFIRMS = re.compile(
    r"(?:\b(?:is|are|was|be)|['’]s)\s+(?:(?!not)\w+\s+){0,2}(?:correct|right|fine|valid|consistent|"
    r"confirmed|verified)\b(?!\s+(?:answer|value|result))|\b(?:checks?\s+out|holds|stands|matches)\b"
    r"|\A\W*(?:yes|correct|right|good|ok(?:ay)?)\b",
    re.IGNORECASE,
)
# A clause that turns away from what its sentence said; 'though' at the end of one does not.
TURNS_AWAY = re.compile(
    r"\b(?:but|however|although|though|aber|mais|pero)\b(?=\W+\w)|但是|但", re.IGNORECASE
)
ASKS = re.compile(r"[^.!?。！？\n]{0,200}[?？]")
# A number that is one of many, unless a verb in front says that it comes out: 'take a number 42'.
KINDS = ("number", "integer", "digit", "fraction", "decimal")
INTRODUCED = re.compile(
    r"(?P<verb>\b(?:is|are|was|were|be|equals?|[gs]ets?|got|gives?|gave|makes?|made|obtain|find|found"
    r"|has|have|yields?|leaves?|becomes?|reach(?:es)?|to|says?)\s+(?:us\s+)?)?"
    rf"\b(?:an?|some|any|another|every|each)\s+(?:[^\W\d_]{{1,12}}\s+)?(?:{'|'.join(KINDS)})\s"
    r"[\s$({\\]{0,8}(?:[a-z]\s?=\s?)?[-−]?\d[\d.,/]*\W{0,8}\Z",
    re.IGNORECASE,
)
DIGIT = re.compile(r"\d")
SENTENCE = re.compile(r"(?<=[.!?])\s+|\n\s*|(?<=[。！？])")
SIGNS = " \t$)]}\\*_"


def taken_back(tail: str, said: str = "") -> str | None:
    """Return what a text says instead where it takes back the value here; None if it does not.

    Its own sentence and the next one may deny it, and so may each that turns ('Wait,', 'But'). A
    number (`said`) is also taken back where another is called right, or it is called wrong.
    """
    tail = tail[:BEHIND].lstrip(SIGNS)
    if not tail.strip(".!\n"):
        return None
    corrected = IS_WRONG.match(tail) or (DIGIT.search(said) and _corrected(tail, said))
    if corrected:
        return tail[corrected.end() :].lstrip(" \t\n,.:;!?—–-")
    near = 2 if tail[0].islower() or tail[0] in ",;" else 1
    place, start = None, 0
    for number, sentence in enumerate(SENTENCE.split(tail.lstrip(".!?\n "))):
        start = tail.index(sentence, start)
        turn = TURN.search(sentence)
        denies = DENIES.search(sentence) if number < near or turn else None
        impossible = IMPOSSIBLE.match(sentence, turn.end()) if turn else None
        found = OWNS.search(sentence) or denies or impossible
        if found is not None:
            place = start + found.end()
        elif turn and _says_another(sentence, turn):
            place = start + turn.end()
    if place is None:
        return None
    instead = tail[place:].lstrip(" \t\n,.:;!?—–-")
    return None if CONFIRMS.search(SENTENCE.split(instead.rstrip())[-1]) else instead


def _says_another(sentence: str, turn: re.Match[str]) -> bool:
    """Tell whether a sentence turns to another value: 'Wait, 5', 'Actually, the sum is 5'."""
    word = turn["word"].lower()
    otherwise = word in FIRM and OTHERWISE.match(sentence, turn.end())
    return word not in SOFT and bool(otherwise or INSTEAD.match(sentence, turn.end()))


def _corrected(tail: str, said: str) -> re.Match[str] | None:
    """Find where a number is called right behind another, or this one wrong."""
    named = rf"(?<![\w.]){re.escape(said)}[\s$)}}\]]{{1,4}}(?:{IS_WRONG.pattern})"
    return CORRECTS.search(tail) or re.search(named, tail, re.IGNORECASE)


def turned_away(tail: str) -> bool:
    """Tell whether the sentence of a value goes on with a 'but': '42, but half of them are gone'.

    What it comes to is then behind that, and not said in a number; a confirmation turns nothing.
    """
    own = SENTENCE.split(tail[:LINE].lstrip(SIGNS), maxsplit=1)[0]
    return bool(TURNS_AWAY.search(own)) and not CONFIRMS.search(own)


def only_introduced(text: str, at: int) -> bool:
    """Tell whether a text introduces the number that ends at this place as one of many: 'take a
    number 42'. 'the number 42' says 42, and so does 'we get a number 42'."""
    before = text[max(at - INTRODUCTION, 0) : at].lower()
    for kind in KINDS:  # mostly there is none: seen at once
        if kind in before:
            found = INTRODUCED.search(before)
            return found is not None and found["verb"] is None
    return False


def asks(text: str, at: int) -> bool:
    """Tell whether the sentence of a value that ends at this place is a question."""
    return ASKS.match(text, at) is not None


def holds(text: str, at: int) -> bool:
    """Tell whether a value that ends at this place of an unmarked text is its result."""
    behind = text[at : at + BEHIND]
    changed = turned_away(behind) or taken_back(behind) is not None
    return not (unfinished(text, at) or asks(text, at) or changed or only_introduced(text, at))
