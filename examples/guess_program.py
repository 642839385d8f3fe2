"""A program that leads its episodes itself: it asks the policy over HTTP, as it would any model.

    groupwise train configs/guess.toml --run runs/program steps=5 \
        turns.environment=examples/guess_program.py:play \
        data.template=examples/guess_prompt.txt

Any client of OpenAI's protocol will do: `OpenAI(base_url=endpoint.base_url, api_key="none")`. Led
from another process, the same program is a loop over episodes:

    groupwise serve configs/guess.toml --run runs/outside steps=5 \
        data.template=examples/guess_prompt.txt &
    python examples/guess_program.py http://127.0.0.1:8000
"""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

GUESSES = 4


def play(endpoint: Any, prompt: str, secret: int) -> float:
    """Find a number by asking the policy. Columns of the row are arguments; a reward comes back."""
    messages = [{"role": "user", "content": prompt}]
    for _ in range(GUESSES):
        said = post(f"{endpoint.base_url}/chat/completions", {"messages": messages})
        messages.append(said["choices"][0]["message"])
        numbers = re.findall(r"\d{1,9}", messages[-1]["content"])
        if numbers and int(numbers[-1]) == secret:
            return 1.0
        hint = "no number" if not numbers else "higher" if int(numbers[-1]) < secret else "lower"
        messages.append({"role": "user", "content": hint})
    return 0.0


def post(url: str, body: Any) -> Any:
    asked = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)


def main(base: str) -> None:
    """Lead episodes until the run is over. Several of these may run side by side."""
    begun = False
    while True:
        try:
            episode = SimpleNamespace(**post(f"{base}/v1/episodes", {}))
        except urllib.error.HTTPError:
            continue  # none waits just now
        except OSError:
            if begun:
                return  # the run has ended
            time.sleep(1.0)  # it loads its model
            continue
        begun = True
        try:
            reward: float | None = play(episode, episode.row["prompt"], episode.row["secret"])
        except urllib.error.HTTPError:
            reward = None  # a limit of the run has ended the episode
        try:
            post(f"{episode.base_url}/reward", {"reward": reward})
        except urllib.error.HTTPError:
            continue  # it took too long, and nobody waits for it any more


if __name__ == "__main__":
    main(sys.argv[1])
