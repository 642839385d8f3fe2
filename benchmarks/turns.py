"""Whether slow tools hold up a batch, and what open conversations cost to go on with.

    python benchmarks/turns.py [--groups 64] [--samples 8] [--scale 0.1] [--blocking]
                               [--workers 64] [--alone]
    python benchmarks/turns.py --kept [--groups 16] [--samples 8]

Every episode has three turns, and a call of its tool between them: it waits for a second, and one
call in ten for ten seconds, both times --scale. Turns are written by a random embedded model. The
longest episode's own time is the sum of its calls, and of sampling it alone. Printed are the wall
time of all episodes together, its ratio to the longest one's, and to what the calls take where so
many work at a time. With --blocking the tool sleeps in the way that holds its process, in --workers
processes. With --alone there is no model: what is left is environments and their processes.

With --kept the tools answer at once with 200 characters, eight turns long. Printed are the tokens
of prompts that were computed, and the processor's seconds, with prompts of open conversations kept
and without; the samples must be the same to the bit.
"""

from __future__ import annotations

import argparse
import random
import string
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from groupwise.config import Tiny
from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.native.kept import KeptPrompts
from groupwise.engine.protocol import Sampling
from groupwise.envs.episodes import EpisodeLimits
from groupwise.envs.opening import WorldSetup, open_worlds
from groupwise.envs.plain_turns import plain_turns
from groupwise.envs.playing import Played, Players, StartingPrompt
from groupwise.envs.worlds import Worlds
from groupwise.model.formats.checkpoint import Loaded
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.prepare.tiny import made_of

TURNS, TOKENS, SLOW = 3, 4, 0.1
KEPT_TURNS, KEPT_SAID = 8, 200
# In a file of their own: what it loads, every process of an episode is forked with.
WORLDS = f"""
import asyncio, time

class Waiting:
    async def reset(self, waits):
        self.left = list(waits)

    async def step(self, text):
        await asyncio.sleep(self.left.pop(0))
        return "go on", 0.0, not self.left

class Blocking:  # the same, in a way that holds up its process
    def reset(self, waits):
        self.left = list(waits)

    def step(self, text):
        time.sleep(self.left.pop(0))
        return "go on", 0.0, not self.left

class Talking:  # says a lot, at once
    async def reset(self, waits):
        self.turn = 0

    async def step(self, text):
        self.turn += 1
        return (f"{{self.turn}}: {{text}} " * {KEPT_SAID})[:{KEPT_SAID}]
"""


def starts(groups: int, scale: float) -> list[StartingPrompt]:
    """Return prompts whose tools wait for a second, or one time in ten for ten."""
    chance = random.Random(0)
    made = []
    for number in range(groups):
        waits = [scale * (10.0 if chance.random() < SLOW else 1.0) for _ in range(TURNS)]
        prompt = tuple(1 + (number * 7 + at) % 90 for at in range(8))
        made.append(StartingPrompt({"waits": waits}, number, 0, lambda first, own=prompt: own))
    return made


def model(context: int) -> tuple[Loaded, Tokenizer]:
    """Return a random model, of which one token in five ends a turn."""
    loaded = made_of(Tiny(width=32, layers=2, heads=2), [string.printable], context, 0)
    ends = range(0, len(loaded.tokenizer), 5)
    return loaded, Tokenizer(loaded.tokenizer.backend, eos_ids=tuple(ends))


def slow_tools(given: argparse.Namespace, file: Path) -> None:
    loaded, tokenizer = model(1024)
    engine = NativeEngine(loaded.model, tokenizer, seed=0, slots=512)
    name = "Blocking" if given.blocking else "Waiting"
    worlds = open_worlds(WorldSetup(f"{file}:{name}", timeout=60.0, workers=given.workers))
    limits = EpisodeLimits(TOKENS * TURNS * 8, 1024, turns=TURNS, turn_tokens=TOKENS * 8)
    sampling = Sampling(max_tokens=TOKENS * TURNS * 8)

    def play(some: list[StartingPrompt], samples: int) -> tuple[float, int]:
        begun = time.monotonic()
        if given.alone:
            turns = TURNS * led([start for start in some for _ in range(samples)], worlds)
        else:
            template = plain_turns(tokenizer, "[{role}]{text}\n")
            players = Players(engine, worlds, template, tokenizer, limits, sampling, "train")
            found = players.play_all(some, samples)
            turns = sum(len(x.episode.turns) for g in found for x in g.completions if x.episode)
        return time.monotonic() - begun, turns

    every = starts(given.groups, given.scale)
    play(every[:1], 1)  # processes and caches are there from here on
    seconds, turns = play(every, given.samples)
    slowest = max(every, key=lambda start: sum(start.row["waits"]))
    alone, _ = play([slowest], 1)
    episodes = given.groups * given.samples
    calls = sum(sum(start.row["waits"]) for start in every) * given.samples
    print(f"{episodes} episodes of {turns / episodes:.2f} turns, tool {name}")
    print(f"calls one after the other: {calls:.1f} s; the longest episode alone: {alone:.2f} s")
    print(f"all together: {seconds:.2f} s, {seconds / alone:.2f} times the longest alone")
    if given.blocking:
        ideal = max(alone, calls / given.workers)
        print(
            f"{given.workers} at a time: {ideal:.2f} s at least, {seconds / ideal:.2f} times that"
        )
    worlds.close()


def led(some: Sequence[StartingPrompt], worlds: Worlds) -> int:
    """Play episodes with nobody in them; return how many came to their end."""
    for number, start in enumerate(some):
        worlds.begin(number, start.row)
    left = dict.fromkeys(range(len(some)), TURNS)
    over = 0
    while over < len(some):
        for number, _ in worlds.answers(10.0):
            if left[number] > 0:
                worlds.step(number, "a")
            elif left[number] == 0:
                worlds.finish(number)
            else:
                over += 1
            left[number] -= 1
    return over


def kept(given: argparse.Namespace, file: Path) -> None:
    context = 4096
    loaded, tokenizer = model(context)
    tokens = TOKENS * 8 * KEPT_TURNS
    limits = EpisodeLimits(tokens, context, turns=KEPT_TURNS, turn_tokens=TOKENS * 8)
    found: list[list[Played]] = []
    worlds = open_worlds(WorldSetup(f"{file}:Talking", workers=1))
    for room in (None, 0):
        engine = NativeEngine(loaded.model, tokenizer, seed=0, slots=128)
        engine.kept = KeptPrompts(torch.device("cpu"), room)
        template = plain_turns(tokenizer, "[{role}]{text}\n")
        sampling = Sampling(max_tokens=tokens)
        players = Players(engine, worlds, template, tokenizer, limits, sampling, "train")
        begun = time.process_time()
        found.append(players.play_all(starts(given.groups, 0.0), given.samples))
        spent, how = time.process_time() - begun, "without" if room == 0 else "kept"
        own, shared = engine.kept.read, engine.kept.given
        print(f"{how:8} {own:>9,} tokens of prompts computed, {shared:>9,} not; {spent:.2f} s")
    worlds.close()
    one, other = ([x for group in each for x in group.completions] for each in found)
    same = all(
        a.token_ids == b.token_ids and torch.equal(a.logp_T, b.logp_T)
        for a, b in zip(one, other, strict=True)
    )
    print(f"{len(one)} episodes, {'the same to the bit' if same else 'THEY DIFFER'}")
    if not same:
        raise SystemExit(1)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--groups", type=int, default=64)
    asked.add_argument("--samples", type=int, default=8)
    asked.add_argument("--scale", type=float, default=0.1)
    asked.add_argument("--blocking", action="store_true")
    asked.add_argument("--workers", type=int, default=64)
    asked.add_argument("--alone", action="store_true")
    asked.add_argument("--kept", action="store_true")
    given = asked.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "worlds.py"
        file.write_text(WORLDS)
        kept(given, file) if given.kept else slow_tools(given, file)


if __name__ == "__main__":
    main()
