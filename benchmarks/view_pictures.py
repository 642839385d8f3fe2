"""The pictures of docs/view.md, docs/reading_a_run.md and the README, of runs in a real browser.

    groupwise train configs/tiny.toml steps=60 --run runs/tiny
    groupwise compare grpo dr_grpo --seeds 2 --budget steps=25 --out runs/grpo_or_dr
    groupwise train configs/demo.toml --run runs/demo
    groupwise train leaky.toml --run runs/leaky          # of docs/reading_a_run.md
    python benchmarks/view_pictures.py runs --run tiny --group grpo_or_dr --long demo --leaky leaky

Only the pictures of the runs that are named are made. Needs Chromium, Playwright and Pillow.
Each picture has 256 colours and stays below 150 kB.
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
WIDTH, HEIGHT = 1280, 940
TALL = {"view_curves": 2400, "view_leaky": 1170}
LARGEST = 150_000  # bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("place")
    parser.add_argument("--run", help="name of the run, as the viewer shows it")
    parser.add_argument("--group", help="name of the comparison")
    parser.add_argument("--long", help="name of a healthy run, for its curves")
    parser.add_argument("--leaky", help="name of the run whose reward has a hole")
    asked = parser.parse_args()
    runs = Runs([asked.place])
    pages = {}
    if asked.run:
        run = runs.all()[asked.run]
        step = f"{address(run.name)}/step/{run.folder.rollout_steps()[-1]}"
        pages |= {"view_run": address(run.name), "view_step": step}
        pages["view_sample"] = f"{step}/group/0/sample/0"
    if asked.group:
        pages["view_compare"] = f"/compare?group={quote(asked.group)}"
    if asked.long:
        pages["view_curves"] = address(asked.long)
    if asked.leaky:
        pages["view_leaky"] = address(asked.leaky)
    with Viewer(runs, ("127.0.0.1", 0)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        take(f"http://127.0.0.1:{server.server_address[1]}", pages)
        server.shutdown()


def address(run: str) -> str:
    return f"/runs/{quote(run, safe='')}"


def take(server: str, pages: dict[str, str]) -> None:
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(color_scheme="light")
        for name, path in pages.items():
            page.set_viewport_size({"width": WIDTH, "height": TALL.get(name, HEIGHT)})
            page.goto(server + path)
            if page.locator("#charts").count():
                page.locator(".chart path.js-line").nth(5).wait_for(state="attached")
            if page.locator("#heat").count():
                page.locator("#heat span").first.wait_for()
            page.wait_for_timeout(1500)
            shown = page.locator("#charts details:visible").first if name == "view_curves" else page
            picture = Image.open(io.BytesIO(shown.screenshot())).convert("RGB").quantize(256)
            file = DOCS / f"{name}.png"
            picture.save(file, optimize=True)
            print(f"{file.name}: {file.stat().st_size:,} bytes")
            assert file.stat().st_size < LARGEST
        browser.close()


if __name__ == "__main__":
    main()
