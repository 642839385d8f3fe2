"""Runs to look at, and a viewer on a free port to look at them with."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from groupwise.model.formats.tokenizer import character_files
from groupwise.runfiles.folder import Event, RunFolder
from groupwise.runfiles.recorder import Recorder
from groupwise.runfiles.rollouts import Row
from groupwise.view.runs import Runs
from groupwise.view.server import Viewer

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"


def ids_of(text: str) -> list[int]:
    """As the tokenizer of these runs numbers characters; 0 ends a text."""
    return [ALPHABET.find(c) + 1 for c in text]


def sample(group: int, number: int, text: str = "4", **changes: Any) -> Row:
    length = len(text) + 1
    right = changes.pop("correct", text.startswith("4"))
    known: dict[str, Any] = {
        "prompt_id": 100 + group,
        "draw": 0,
        "group": group,
        "sample": number,
        "prompt_token_ids": (1,),
        "token_ids": [*ids_of(text), 0],
        "sampler_logp": -np.arange(1, length + 1) / 4,
        "learner_logp": -np.arange(1, length + 1) / 4 + 0.5,
        "ref_logp": np.full(length, -3.0),
        "entropy": np.full(length, 0.75),
        "advantage": np.full(length, 1.5 if right else -1.5),
        "coefficient": np.full(length, 0.125),
        "ratio": np.full(length, 1.25),
        "clipped": np.arange(length) == 1,
        "reward": float(bool(right)),
        "reward_parts": {"number": float(bool(right)), "format": 0.5},
        "correct": right,
        "grader_reason": "number found" if right else "another number",
        "prompt_text": f"<|im_start|>user\nWhat is 2+2, please ({group})?<|im_end|>\n"
        "<|im_start|>assistant\n",
        "text": f"{text}<end>",
        "answer": "4",
    }
    return Row(**(known | changes))


def rows_of(step: int) -> list[Row]:
    """Groups: half right; all wrong, one truncated; all right; with an error; dropped."""
    return [
        *(sample(0, i, "4" if i < 2 else "five", reward=float(i < 2)) for i in range(4)),
        *(sample(1, i, "7", finish="length" if i == 3 else "eos") for i in range(4)),
        *(sample(2, i, f"4 at step {step}") for i in range(4)),
        *(sample(3, i, "4" if i else "none", reward=float(i) or None, correct=bool(i) or None,
                 grader_status="ok" if i else "error", grader_reason="boom" if not i else "")
          for i in range(4)),
        *(sample(4, i, "6", used=False, learner_logp=None, ref_logp=None, entropy=None,
                 advantage=None, coefficient=None, ratio=None, clipped=None) for i in range(4)),
    ]  # fmt: skip


def metrics_of(step: int) -> dict[str, float | str | None]:
    found: dict[str, float | str | None] = {
        "reward/mean": step / 20,
        "groups/dead_share": 0.25,
        "entropy/mean": None if step == 3 else 1 / step,
        "length/mean": 4.0,
        "mismatch/abs_mean": step * 1e-8,  # ticks of a chart that need an exponent
        "weights/fingerprint": "abc",
    }
    return found | ({"eval/accuracy": 0.5, "eval/accuracy_stderr": 0.1} if step % 5 == 0 else {})


def add_steps(run: RunFolder, first: int, last: int) -> None:
    with Recorder(run) as made:
        for step in range(first, last + 1):
            events = []
            if step == 4:
                events = [Event(4, "health", "entropy collapse: down to 0.1", {"rule": "entropy"})]
            if step == 6:
                events = [Event(6, "refill", "not enough <b>useful</b> groups")]
            made.step(step, rows_of(step), metrics_of(step), events)


def make_run(path: Path, steps: int = 10, config: str = "steps = 10\n") -> RunFolder:
    run = RunFolder(path)
    run.check_writable()
    run.write_config(config)
    saved = run.checkpoints / "step_1"
    saved.mkdir()
    for name, data in character_files(ALPHABET).items():
        (saved / name).write_bytes(data)
    (run.checkpoints / "latest").symlink_to("step_1")
    add_steps(run, 1, steps)
    return run


@contextmanager
def viewing(*places: Path) -> Iterator[int]:
    """A viewer of these places; its port."""
    with Viewer(Runs(places), ("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def get(
    port: int, path: str, host: str = "127.0.0.1", method: str = "GET"
) -> tuple[int, str, dict[str, str]]:
    """Status, text and headers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers={"Host": host})
    answer = connection.getresponse()
    text = answer.read().decode("utf-8")
    connection.close()
    return answer.status, text, {key.lower(): value for key, value in answer.getheaders()}
