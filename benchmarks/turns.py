"""Whether slow tools hold up a batch: 64 x 8 episodes with a tool that waits.

    python benchmarks/turns.py [--groups 64] [--samples 8] [--scale 0.1] [--blocking]

Every episode has three turns, and a call of its tool between them: it waits for a second, and one
call in ten for ten seconds, both times --scale. Turns are written by a random embedded model. The
longest episode's own time is the sum of its calls, and of sampling it alone. Printed are the wall
time of all episodes together, and its ratio to the longest one's; with --blocking the tool sleeps
in the way that holds its process, in as many processes as there are cores.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import string
import time
from collections.abc import Sequence
from pathlib import Path

from groupwise.config import Tiny
from groupwise.engine.native.engine import NativeEngine
from groupwise.engine.protocol import Sampling
from groupwise.envs.episodes import EpisodeLimits
from groupwise.envs.opening import WorldSetup, open_worlds
from groupwise.envs.plain_turns import plain_turns
from groupwise.envs.playing import Played, Players, StartingPrompt
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.prepare.tiny import made_of

TURNS, TOKENS, SLOW = 3, 4, 0.1
HERE = Path(__file__).resolve()


class Waiting:
    """Waits before it answers, as the row says."""

    async def reset(self, waits: Sequence[float]) -> None:
        self.left = list(waits)

    async def step(self, text: str) -> tuple[str, float, bool]:
        await asyncio.sleep(self.left.pop(0))
        return "go on", 0.0, not self.left


class Blocking(Waiting):
    """The same, in a way that holds up its process."""

    def reset(self, waits: Sequence[float]) -> None:  # type: ignore[override]
        self.left = list(waits)

    def step(self, text: str) -> tuple[str, float, bool]:  # type: ignore[override]
        time.sleep(self.left.pop(0))
        return "go on", 0.0, not self.left


def starts(groups: int, scale: float) -> list[StartingPrompt]:
    """Return prompts whose tools wait for a second, or one time in ten for ten."""
    chance = random.Random(0)
    made = []
    for number in range(groups):
        waits = [scale * (10.0 if chance.random() < SLOW else 1.0) for _ in range(TURNS)]
        prompt = tuple(1 + (number * 7 + at) % 90 for at in range(8))
        made.append(StartingPrompt({"waits": waits}, number, 0, lambda first, own=prompt: own))
    return made


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--groups", type=int, default=64)
    asked.add_argument("--samples", type=int, default=8)
    asked.add_argument("--scale", type=float, default=0.1)
    asked.add_argument("--blocking", action="store_true")
    given = asked.parse_args()
    loaded = made_of(Tiny(width=32, layers=2, heads=2), [string.printable], 1024, 0)
    # A random model ends no turn by itself: one token in five does it here.
    ends = range(0, len(loaded.tokenizer), 5)
    tokenizer = Tokenizer(loaded.tokenizer.backend, eos_ids=tuple(ends))
    engine = NativeEngine(loaded.model, tokenizer, seed=0, slots=512)
    name = "Blocking" if given.blocking else "Waiting"
    worlds = open_worlds(WorldSetup(f"{HERE}:{name}", timeout=60.0))
    limits = EpisodeLimits(TOKENS * TURNS * 8, 1024, turns=TURNS, turn_tokens=TOKENS * 8)
    sampling = Sampling(max_tokens=TOKENS * TURNS * 8)

    def play(some: list[StartingPrompt], samples: int) -> tuple[float, list[Played]]:
        template = plain_turns(tokenizer, "[{role}]{text}\n")
        players = Players(engine, worlds, template, tokenizer, limits, sampling, "train")
        begun = time.monotonic()
        found = players.play_all(some, samples)
        return time.monotonic() - begun, found

    every = starts(given.groups, given.scale)
    play(every[:1], 1)  # processes and caches are there from here on
    seconds, found = play(every, given.samples)
    slowest = max(every, key=lambda start: sum(start.row["waits"]))
    alone, _ = play([slowest], 1)
    turns = [len(x.episode.turns) for group in found for x in group.completions if x.episode]
    calls = sum(sum(start.row["waits"]) for start in every) * given.samples
    print(f"{len(turns)} episodes of {sum(turns) / len(turns):.2f} turns, tool {name}")
    print(f"calls one after the other: {calls:.1f} s; the longest episode alone: {alone:.2f} s")
    print(f"all together: {seconds:.2f} s, {seconds / alone:.2f} times the longest alone")
    worlds.close()


if __name__ == "__main__":
    main()
