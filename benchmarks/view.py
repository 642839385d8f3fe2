"""The viewer on a long run: how long each page takes, and how much memory the server holds.

    python benchmarks/view.py --steps 1000 --samples 512 --tokens 512

Writes a made-up run first (a few different steps, each under many numbers), then asks the real
server, and where Chromium and Playwright are there, a real browser: seconds until the first curve
is seen, until it can be clicked, and until plotly has drawn it, so that it can be zoomed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

import numpy as np

from groupwise.runfiles.files import to_line
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.rollouts import Row, write

DIFFERENT = 8  # steps that are made up; the others are the same files under other names
GROUP = 8
CHROMIUM = "/usr/bin/chromium"


def made_up_rows(samples: int, tokens: int, seed: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(samples):
        length = int(rng.integers(tokens // 2, tokens * 3 // 2))
        sampler = -rng.exponential(0.4, length).astype(np.float32)
        learner = sampler + rng.normal(0, 1e-3, length).astype(np.float32)
        ratio = np.exp(rng.normal(0, 0.1, length)).astype(np.float32)
        group, right = number // GROUP, bool(rng.random() < (number // GROUP) % 9 / 8)
        rows.append(
            Row(
                prompt_id=seed * 1000 + group,
                draw=0,
                group=group,
                sample=number % GROUP,
                prompt_token_ids=rng.integers(0, 49152, 100),
                token_ids=rng.integers(0, 49152, length),
                sampler_logp=sampler,
                learner_logp=learner,
                ref_logp=learner - 0.01,
                entropy=rng.exponential(0.5, length).astype(np.float32),
                advantage=np.full(length, 1.0 if right else -1.0, np.float32),
                coefficient=np.full(length, 1e-4, np.float32),
                ratio=ratio,
                clipped=ratio > 1.28,
                reward=float(right),
                reward_parts={"number": float(right)},
                correct=right,
                finish="length" if rng.random() < 0.05 else "eos",
                prompt_text=f"<|im_start|>user\nWhat is {group} plus {seed}?<|im_end|>\n"
                "<|im_start|>assistant\n",
                text="Let us think step by step. " * (length // 6) + str(rng.integers(100)),
                answer=str(group + seed),
            )
        )
    return rows


def made_up_run(path: Path, steps: int, samples: int, tokens: int) -> None:
    folder = RunFolder(path)
    folder.check_writable()
    folder.write_config(f"steps = {steps}\n")
    for step in range(1, steps + 1):
        if step <= DIFFERENT:
            write(folder.rollout(step), made_up_rows(samples, tokens, step), step)
        else:
            os.link(folder.rollout(step % DIFFERENT + 1), folder.rollout(step))
    rng = np.random.default_rng(0)
    names = ["reward/mean", "groups/dead_share", "length/mean", "entropy/mean", "optim/grad_norm",
             "mismatch/abs_mean", *(f"other/number_{i}" for i in range(60))]  # fmt: skip
    lines = []
    for step in range(1, steps + 1):
        values = dict(zip(names, (rng.random(len(names)) * 0.1).tolist(), strict=True))
        values["reward/mean"] += 0.8 * (1 - math.exp(-step / 300))
        if step % 20 == 0:
            values |= {"eval/accuracy": values["reward/mean"], "eval/accuracy_stderr": 0.03}
        lines.append(to_line({"step": step, **values}))
    folder.metrics.write_text("\n".join(lines) + "\n")


def resident(pid: int) -> float:
    """MiB that a process holds, and at most held."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def fetched(url: str) -> float:
    start = time.perf_counter()
    with urlopen(url) as answer:
        answer.read()
    return time.perf_counter() - start


# The page's own clock, since its start: what asks from outside waits for the page's scripts.
TIMES = """
window.times = {};
const first = (name, there) => {
  if (there && !(name in times)) times[name] = performance.now() / 1000;
};
const look = () => {
  first("seen", document.querySelector(".plot polyline"));
  first("can be clicked", document.querySelector("#charts[data-ready]"));
  first("can be zoomed", document.querySelector(".plot path.js-line"));
  requestAnimationFrame(look);
};
look();
"""


def in_browser(url: str) -> dict[str, float]:
    """A browser that was just started, then the same with the scripts at hand."""
    from playwright.sync_api import sync_playwright

    found = {}
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.add_init_script(TIMES)
        for name in ("browser, first", "browser, again"):
            page.goto(url)
            page.wait_for_function("() => 'can be zoomed' in window.times")
            times = page.evaluate("times")
            found |= {f"{name}: {what}": times[what] for what in sorted(times, key=times.get)}
        browser.close()
    return found


def measured(server: subprocess.Popen[str], steps: int) -> dict[str, float]:
    """Seconds of each page, and MiB of the server."""
    assert server.stdout is not None
    base = server.stdout.readline().split(" at ")[1].split(";")[0] + "/runs/long"
    found: dict[str, float] = {"MiB at start": resident(server.pid)}
    middle = steps // 2
    pages = {
        "run page": "",
        "curves": "/trends.json?name=reward/mean&name=eval/accuracy&name=entropy/mean",
        "step": f"/step/{middle}",
        "step, again": f"/step/{middle}",
        "step, filtered": f"/step/{middle + 1}?only=truncated",
        "step, searched": f"/step/{middle + 2}?search=plus 3?".replace(" ", "%20"),
        "group": f"/step/{middle}/group/5",
        "sample": f"/step/{middle}/group/5/sample/1",
        "tokens": f"/step/{middle}/group/5/sample/1/tokens",
        "prompt, first": "/prompt/1005",
        "prompt, again": "/prompt/2005",
    }
    for name, path in pages.items():
        found[name] = fetched(base + path)
    for step in range(1, min(steps, 200)):
        fetched(f"{base}/step/{step}")
    found["MiB at most, after 200 steps"] = resident(server.pid)
    if Path(CHROMIUM).exists():
        found |= in_browser(base)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512, help="mean length of a completion")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "long"
        made_up_run(run, args.steps, args.samples, args.tokens)
        command = [sys.executable, "-m", "groupwise.cli", "view", str(run), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                found = measured(server, args.steps)
            finally:
                server.terminate()
        sizes = sum(p.stat().st_size for p in (run / "rollouts").iterdir()) / args.steps
        print(json.dumps({**vars(args), "bytes a step": round(sizes)}))
        for name, value in found.items():
            print(f"{name:<30} {value:8.3f}" if "MiB" not in name else f"{name:<30} {value:8.0f}")


if __name__ == "__main__":
    main()
