"""Slow tools over many episodes: wall time beside the longest episode's own.

    python benchmarks/worlds.py

Each episode makes three calls of a second, one in ten of them of ten seconds: by a coroutine, and,
a tenth as long, by a function that blocks, in processes of its own.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path

from groupwise.envs.opening import WorldSetup, open_worlds

TOOLS = '''
import asyncio, json, time
from groupwise.envs.tool_calls import Asked

def read(text):
    return [Asked(*json.loads(text))]

async def waits(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "done"

def blocks(seconds: float) -> str:
    """Block."""
    time.sleep(seconds)
    return "done"
'''
CALLS = 3


def measured(file: Path, tool: str, episodes: int, workers: int, second: float) -> str:
    stream = random.Random(0)
    plan = {
        number: [second * (10 if stream.random() < 0.1 else 1) for _ in range(CALLS)]
        for number in range(episodes)
    }
    worlds = open_worlds(
        WorldSetup("", (f"{file}:{tool}",), reader=f"{file}:read", workers=workers)
    )
    began, over, told = time.monotonic(), 0, dict.fromkeys(plan, 0)
    for number in plan:
        worlds.begin(number, {})
    while over < episodes:
        for number, _ in worlds.answers(10.0):
            made, told[number] = told[number], told[number] + 1
            if made < CALLS:
                worlds.step(number, json.dumps([tool, {"seconds": plan[number][made]}]))
            elif made == CALLS:
                worlds.finish(number)
            else:
                over += 1
    wall, longest = time.monotonic() - began, max(map(sum, plan.values()))
    worlds.close()
    return (
        f"{tool}: {episodes} episodes, workers {workers}: {wall:.1f} s, the longest episode's own "
        f"{longest:.1f} s ({wall / longest:.2f} of it), all one after the other "
        f"{sum(map(sum, plan.values())):.0f} s"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tools.py"
        file.write_text(TOOLS)
        for tool, episodes, workers, second in (
            ("waits", 512, 2, 1.0),
            ("blocks", 64, 16, 0.1),
            ("blocks", 512, 64, 0.1),
        ):
            print(measured(file, tool, episodes, workers, second), flush=True)
