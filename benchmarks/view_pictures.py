"""The pictures of docs/view.md and the README, made of runs in a real browser.

    groupwise train configs/tiny.toml steps=60 --run runs/tiny
    groupwise compare grpo dr_grpo --seeds 2 --budget steps=25 --out runs/grpo_or_dr
    python benchmarks/view_pictures.py runs --run tiny --group grpo_or_dr

Needs Chromium, Playwright and Pillow. Each picture has 256 colours and stays below 150 kB.
"""

from __future__ import annotations

import argparse
import io
import shutil
import threading
from pathlib import Path
from urllib.parse import quote

from groupwise.view.runs import Runs
from groupwise.view.server import Viewer

DOCS = Path(__file__).resolve().parents[1] / "docs"
SIZE = {"width": 1280, "height": 940}
LARGEST = 150_000  # bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("place")
    parser.add_argument("--run", required=True, help="name of the run, as the viewer shows it")
    parser.add_argument("--group", required=True, help="name of the comparison")
    asked = parser.parse_args()
    runs = Runs([asked.place])
    run = runs.all()[asked.run]
    base = f"/runs/{quote(run.name, safe='')}"
    step = f"{base}/step/{run.folder.rollout_steps()[-1]}"
    pages = {
        "view_run": base,
        "view_step": step,
        "view_sample": f"{step}/group/0/sample/0",
        "view_compare": f"/compare?group={quote(asked.group)}",
    }
    with Viewer(runs, ("127.0.0.1", 0)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        take(f"http://127.0.0.1:{server.server_address[1]}", pages)
        server.shutdown()


def take(address: str, pages: dict[str, str]) -> None:
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        for name, path in pages.items():
            page.goto(address + path)
            if page.locator("#charts").count():
                page.locator(".chart path.js-line").nth(5).wait_for(state="attached")
            if page.locator("#heat").count():
                page.locator("#heat span").first.wait_for()
            page.wait_for_timeout(1500)
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(256)
            file = DOCS / f"{name}.png"
            picture.save(file, optimize=True)
            print(f"{file.name}: {file.stat().st_size:,} bytes")
            assert file.stat().st_size < LARGEST
        browser.close()


if __name__ == "__main__":
    main()
