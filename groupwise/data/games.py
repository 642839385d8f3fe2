"""Rows of games that the package's environments play: guess, wordle, tictactoe.

A prompt names a round by a number, so that prompts differ and say nothing of what is to be found.
"""

from __future__ import annotations

import random

from groupwise.errors import DataError
from groupwise.records import Task

# Common words, of the author's own choice.
WORDS = tuple(
    """
about above actor adult again agree ahead alarm album alert alive allow alone along angry apple
apron arena argue arrow aside award awake bacon badge basic beach beard begin below bench berry
birth black blade blame blank blend blind block blood board boast bonus brain brave bread break
brick bride brief bring broad brown brush build bunch cabin cable camel candy carry catch cause
chain chair chalk charm chart cheap check cheek chess chest chief child civil claim class clean
clear clerk climb clock close cloud coach coast color couch count court cover crack craft crane
crash cream crime cross crowd crown curve cycle daily dance delay depth dirty doubt dozen draft
drama dream dress drift drink drive eager eagle early earth eight elbow empty enemy enjoy enter
equal error event every exact extra faith false fault favor fence fever field fight final first
flame flash fleet floor flour fluid focus force frame fresh front frost fruit funny ghost giant
glass globe glory grace grade grain grand grape grass great green greet group guard guess guest
guide habit happy harsh heart heavy honey honor horse hotel house human humor ideal image index
inner input ivory jelly joint judge juice knife knock label labor large laser later laugh layer
learn lemon level light limit liver local logic loose lucky lunch magic major maple march match
mayor medal metal meter minor mixed model money month moral motor mount mouse mouth movie music
nerve never night noble noise north novel nurse ocean offer olive onion opera orbit order other
outer owner paint panel paper party pause peace pearl phase phone photo piano piece pilot pitch
place plain plane plant plate point porch pound power press price pride prime print prize proof
proud pulse quick quiet quite radio raise range rapid reach ready relax reply rider right rival
river robot rough round route royal rural salad sauce scale scene scope score sense serve seven
shade shape share sharp sheep sheet shelf shell shift shine shirt shock short shout sight skill
skirt sleep slice slope small smart smile smoke snake solid solve sound south space spare speak
speed spell spend spice spoon sport staff stage stair stamp stand start state steam steel stick
stock stone store storm story stove straw sugar suite sunny sweet swing table taste teach thank
theme thick thing think third throw tiger tight title toast today tooth topic total touch tower
track trade trail train treat trend trial trick truck trunk trust truth twice uncle under union
unity upper urban usage usual valid value video virus visit vital voice waste watch water whale
wheat wheel white whole woman world worry worth wound write wrong yield young youth zebra
""".split()  # noqa: SIM905
)
ROUNDS = 10**6


def guess(
    size: int, stream: random.Random, *, low: int = 0, high: int = 15, guesses: int = 0
) -> list[Task]:
    """Make rounds of guess-the-number: 'round 4821, guess 0-15:', each number equally often.

    The solution to learn from is any number of the range: it teaches what a guess looks like. With
    `guesses`, it is a whole round of so many, by a player who believes what is said and draws among
    what is left: in turns of the form "[{role}]{text}\n".
    """
    if not 0 <= low < high <= 10**9:
        raise DataError(
            f"guess: low = {low} and high = {high} are no range. Take 0 <= low < high <= 10^9."
        )
    tasks = []
    for number, name in enumerate(_rounds(size, stream)):
        secret = low + (number % (high - low + 1))
        shown = _round(secret, low, high, guesses, stream) if guesses else ""
        columns = {"secret": secret, "solution": shown or str(stream.randint(low, high))}
        prompt = f"round {name}, guess {low}-{high}:"
        tasks.append(Task(number, prompt, str(secret), columns))
    return tasks


def _round(secret: int, low: int, high: int, guesses: int, stream: random.Random) -> str:
    """Return a round by a player who draws among the numbers that are left."""
    said = ""
    for left in range(guesses - 1, -1, -1):
        number = stream.randint(low, high)
        said += f"{number}\n"
        if number == secret or not left:
            break
        low, high = (number + 1, high) if number < secret else (low, number - 1)
        said += f"[user]{'higher' if number < secret else 'lower'}\n[assistant]"
    return said


def wordle(size: int, stream: random.Random) -> list[Task]:
    """Make rounds of Wordle: 'round 4821, find the word of five letters:'."""
    words = stream.sample(WORDS, len(WORDS))
    tasks = []
    for number, name in enumerate(_rounds(size, stream)):
        word = words[number % len(words)]
        columns = {"word": word, "solution": stream.choice(WORDS)}
        tasks.append(Task(number, f"round {name}, find the word of five letters:", word, columns))
    return tasks


def tictactoe(size: int, stream: random.Random) -> list[Task]:
    """Make rounds of tic-tac-toe: 'round 4821, you are X:'; the policy begins every second one."""
    tasks = []
    for number, name in enumerate(_rounds(size, stream)):
        first = number % 2 == 0
        columns = {"first": first, "seed": name, "solution": str(stream.randint(1, 9))}
        prompt = f"round {name}, you are {'X' if first else 'O'}:"
        tasks.append(Task(number, prompt, None, columns))
    return tasks


def _rounds(size: int, stream: random.Random) -> list[int]:
    """Return a different number for each round; there are at most a million."""
    return stream.sample(range(ROUNDS), min(size, ROUNDS))
