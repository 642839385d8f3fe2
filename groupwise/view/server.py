"""The server: GET only, this machine only unless told otherwise, nothing is changed.

A request must name an address, localhost, or a name of this server's own (callers.py).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import traceback
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from groupwise.common.callers import WebServer, family_of, is_meant, own_names
from groupwise.common.extras import install
from groupwise.errors import ConfigError, GroupwiseError, in_short
from groupwise.view import pages
from groupwise.view.prompts import PromptIndex
from groupwise.view.runs import Runs, ViewedRun
from groupwise.view.tokens import as_json, token_page, tokenizer_of

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
HTML, JSON, PLAIN = "text/html", "application/json", "text/plain"
ASSETS = {"style.css": "text/css", "common.js": "text/javascript", "charts.js": "text/javascript",
          "tokens.js": "text/javascript", "plotly.js": "text/javascript"}  # fmt: skip


class Response(NamedTuple):
    body: bytes
    kind: str = HTML
    status: int = 200
    keep: bool = False  # the browser may keep it


class Viewer(WebServer):
    """An HTTP server: `serve_forever()` as usual; `shutdown()` ends it."""

    def __init__(self, runs: Runs, address: tuple[str, int]) -> None:
        if find_spec("plotly") is None:
            raise ConfigError(
                "The viewer draws its charts with plotly, which is not installed: "
                f"`{install('view')}`. A report needs no more than groupwise: "
                "groupwise report RUN"
            )
        self.address_family = family_of(address[0])
        self.runs = runs
        self.names = own_names(address[0])
        self._indices: dict[str, PromptIndex] = {}
        self._lock = threading.Lock()
        super().__init__(address, PageHandler)

    def index(self, run: ViewedRun) -> PromptIndex:
        with self._lock:
            return self._indices.setdefault(run.name, PromptIndex(run))

    def answer(self, target: str) -> Response:
        """Return what is found at an address."""
        parts = urlsplit(target)
        words = [unquote(word, errors="surrogateescape") for word in parts.path.split("/") if word]
        asked = parse_qs(parts.query)
        match words:
            case []:
                return _page(pages.home(self.runs.all(), self.runs.places))
            case ["assets", name] if name in ASSETS:
                return Response(asset(name), ASSETS[name], keep=True)
            case ["compare"]:
                runs = self.runs.all()
                names = [name for name in asked.get("run", []) if name in runs]
                if len(names) != 2:
                    return _trouble("Two runs, please", "Choose two runs to compare.", 400)
                return _page(pages.compare_page(*(runs[name] for name in names)))
            case ["runs", name, *rest] if (run := self.runs.all().get(name)) is not None:
                return self._of_run(run, rest, asked)
        return _trouble("Not here", f"There is nothing at {parts.path}.", 404)

    def _of_run(
        self, run: ViewedRun, words: Sequence[str], asked: dict[str, list[str]]
    ) -> Response:
        numbers = [_integer(word) for word in words[1::2]]
        if None in numbers:
            return _trouble("Not here", f"{'/'.join(words)} names no step.", 404)
        first: dict[str, str] = {key: values[0] for key, values in asked.items()}
        match [*words[::2], *numbers]:
            case []:
                return _page(pages.run_page(run, self.runs.all()))
            case ["trends.json"]:
                run.refresh()
                if first.get("known") == run.version():
                    return Response(b"", JSON, 204)
                return Response(as_json(pages.trends(run, asked.get("name", []))), JSON)
            case ["prompt", int(prompt)]:
                return _page(pages.prompt_page(run, prompt, self.index(run)))
            case ["step", int(step)]:
                return _page(pages.step_page(run, step, first))
            case ["step", "group", int(step), int(group)]:
                return _page(pages.group_page(run, step, group))
            case ["step", "group", "sample", int(step), int(group), int(sample)]:
                return _page(pages.sample_page(run, step, group, sample))
            case ["step", "group", "sample", "text", int(step), int(group), int(sample)]:
                words_ = pages.sample_text(run, step, group, sample)
                return Response(words_.encode("utf-8", "replace"), PLAIN)
            case ["step", "group", "sample", "tokens", int(step), int(group), int(sample)]:
                start = max(0, _integer(first.get("start", "0")) or 0)
                path = run.folder.rollout(step)
                data = token_page(path, group, sample, start, tokenizer_of(run.folder))
                return Response(as_json(data), JSON)
        return _trouble("Not here", f"There is nothing at {'/'.join(words)}.", 404)


def _integer(word: str) -> int | None:
    digits = word.removeprefix("-")
    return int(word) if digits.isdecimal() and len(digits) < 19 else None


@functools.cache
def asset(name: str) -> bytes:
    if name == "plotly.js":
        return pages.plotly()
    return (Path(__file__).parent / "assets" / name).read_bytes()


def _page(text: str) -> Response:
    return Response(text.encode("utf-8", "replace"))


def _trouble(title: str, words: str, status: int) -> Response:
    return _page(pages.trouble_page(title, words))._replace(status=status)


class PageHandler(BaseHTTPRequestHandler):
    server: Viewer
    protocol_version = "HTTP/1.1"

    timeout = 60  # seconds, of a connection that is kept open

    def do_GET(self) -> None:
        if not is_meant(self.headers.get("Host", ""), self.server.names):
            self._send(Response(b"This server is not meant under that name.\n", PLAIN, 421))
            return
        try:
            answer = self.server.answer(self.path)
        except GroupwiseError as error:
            answer = _trouble("This can't be shown", str(error), 404)
        except Exception as error:  # one page must not end the server; the terminal has the rest
            traceback.print_exc()
            answer = _trouble("This page failed", in_short(error), 500)
        with contextlib.suppress(ConnectionError):  # the browser went on to another page
            self._send(answer)

    def _send(self, answer: Response) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", f"{answer.kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "max-age=600" if answer.keep else "no-store")
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal is for what goes wrong."""
