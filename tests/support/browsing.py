"""A browser, and pages of it that must run without an error of their own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WAIT = 60_000  # milliseconds, of a machine with other things to do


@contextmanager
def chromium(sync_api: Any, home: Path) -> Iterator[Any]:
    """Start a browser; some machines have no home that it could write to."""
    with sync_api.sync_playwright() as play:
        made = play.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], env=os.environ | {"HOME": str(home)}
        )
        yield made
        made.close()


@contextmanager
def sound_page(browser: Any, own: tuple[str, ...], **options: Any) -> Iterator[Any]:
    """Open a page; at the end nothing may have gone wrong, been stopped by the policy or been asked
    for elsewhere than at addresses that begin with one of `own`.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
    context.set_default_timeout(WAIT)
    made = context.new_page()
    trouble: list[str] = []
    made.on("pageerror", lambda error: trouble.append(str(error)))
    made.on("console", lambda said: trouble.append(said.text) if is_trouble(said) else None)
    made.on("dialog", lambda dialog: trouble.append(f"dialog {dialog.message}"))
    made.on(
        "request",
        lambda asked: None if asked.url.startswith(own) else trouble.append(f"asked {asked.url}"),
    )
    yield made
    context.close()
    assert trouble == []


def is_trouble(said: Any) -> bool:
    """Of what the console says; that an address has nothing is its status, and meant."""
    return said.type == "error" and not said.text.startswith("Failed to load resource")
