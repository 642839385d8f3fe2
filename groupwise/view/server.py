"""The server: this machine only unless told otherwise. It reads, and writes one thing: notes.

A request must name an address, localhost, or a name of this server's own (callers.py). Notes are
written where only this machine can ask for it, by a page of this server that shows its token.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import secrets
import threading
import traceback
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from groupwise.common.callers import (
    WebServer,
    family_of,
    is_loopback,
    is_meant,
    is_own_page,
    own_names,
)
from groupwise.errors import GroupwiseError, in_short
from groupwise.runfiles.files import from_json
from groupwise.view import answers, curves, facts, notes, overlay, pages, render
from groupwise.view.prompts import PromptIndex
from groupwise.view.runs import Runs, ViewedRun
from groupwise.view.search import TextSearch
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
KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
STYLES = ("style", "runs", "charts", "tokens")
SCRIPTS = ("common", "runs", "curves", "charts", "metrics", "run", "tokens", "plotly")
ASSETS = {"logo.svg", *(f"{name}.css" for name in STYLES), *(f"{name}.js" for name in SCRIPTS)}
MOST_BODY = 64 * 1024  # bytes of a note


class Response(NamedTuple):
    body: bytes
    kind: str = HTML
    status: int = 200
    keep: bool = False  # the browser may keep it


class Viewer(WebServer):
    """An HTTP server: `serve_forever()` as usual; `shutdown()` ends it."""

    def __init__(self, runs: Runs, address: tuple[str, int]) -> None:
        render.need_plotly()
        self.address_family = family_of(address[0])
        self.runs = runs
        self.names = own_names(address[0])
        # Of pages of this server: who can't read them can't write notes.
        self.token = secrets.token_urlsafe(24) if is_loopback(address[0]) else ""
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
                return Response(asset(name), KINDS[Path(name).suffix], keep=True)
            case ["runs.json"]:
                return self._list(asked)
            case ["compare"]:
                return self._overlay(asked)
            case ["runs", name, *rest] if (run := self.runs.all().get(name)) is not None:
                return self._of_run(run, rest, asked)
        return _trouble("Not here", f"There is nothing at /{'/'.join(words)}.", 404)

    def _list(self, asked: dict[str, list[str]]) -> Response:
        rows = [facts.row_of(run, run.about()) for run in self.runs.all().values()]
        version = hashlib.sha256(as_json(rows)).hexdigest()[:16]
        if asked.get("known") == [version]:
            return Response(b"", JSON, 204)
        return Response(as_json({"version": version, "runs": rows}), JSON)

    def _overlay(self, asked: dict[str, list[str]]) -> Response:
        runs = self.runs.all()
        group = asked.get("group", [""])[0]
        chosen = dict.fromkeys(name for name in asked.get("run", []) if name in runs)
        found = [runs[name] for name in chosen]
        if group:
            found = [run for run in runs.values() if run.group == group]
        if not 2 <= len(found) <= overlay.MOST:
            words = f"Choose two runs or more to lay over each other, at most {overlay.MOST}."
            return _trouble("Two runs, please", words, 400)
        return _page(overlay.overlay_page(found, group))

    def write(self, target: str, headers: Any, body: bytes) -> Response:
        """Write the notes of a run, if this server may and one of its own pages asks."""
        words = [
            unquote(x, errors="surrogateescape") for x in urlsplit(target).path.split("/") if x
        ]
        given = headers.get("X-Groupwise-Token", "")
        allowed = (
            self.token
            and is_own_page(headers.get("Origin", ""), headers.get("Host", ""))
            and headers.get_content_type() == JSON
            and secrets.compare_digest(given.encode("utf-8", "replace"), self.token.encode())
        )
        if not allowed:
            return _refused(
                "Notes are written by this server's own pages alone; load it anew.", 403
            )
        run = self.runs.all().get(words[1]) if len(words) == 3 else None
        if run is None or words[0] != "runs" or words[2] != "notes":
            return _refused("There is no such run.", 404)
        try:
            made = notes.write_notes(run.folder, from_json(body))
        except ValueError as error:
            return _refused(f"That is not JSON: {in_short(error)}", 400)
        return Response(as_json({"tags": made.tags, "note": made.note}), JSON)

    def _of_run(
        self, run: ViewedRun, words: Sequence[str], asked: dict[str, list[str]]
    ) -> Response:
        numbers = [_integer(word) for word in words[1::2]]
        if None in numbers:
            return _trouble("Not here", f"{'/'.join(words)} names no step.", 404)
        first: dict[str, str] = {key: values[0] for key, values in asked.items()}
        match [*words[::2], *numbers]:
            case []:
                return _page(pages.run_page(run, self.runs.all(), self.token))
            case ["trends.json"]:
                run.refresh()
                if first.get("known") == run.version():
                    return Response(b"", JSON, 204)
                return Response(as_json(curves.trends(run, asked.get("name", []))), JSON)
            case ["search"]:
                return _page(answers.search_page(run, first, TextSearch(run)))
            case ["prompt", int(prompt)]:
                return _page(answers.prompt_page(run, prompt, self.index(run)))
            case ["step", int(step)]:
                return _page(answers.step_page(run, step, first))
            case ["step", "group", int(step), int(group)]:
                return _page(answers.group_page(run, step, group, first.get("sort", "")))
            case ["step", "group", "sample", int(step), int(group), int(sample)]:
                return _page(answers.sample_page(run, step, group, sample))
            case ["step", "group", "sample", "text", int(step), int(group), int(sample)]:
                words_ = answers.sample_text(run, step, group, sample)
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
        return render.plotly()
    return (Path(__file__).parent / "assets" / name).read_bytes()


def _page(text: str) -> Response:
    return Response(text.encode("utf-8", "replace"))


def _trouble(title: str, words: str, status: int) -> Response:
    return _page(pages.trouble_page(title, words))._replace(status=status)


def _refused(words: str, status: int) -> Response:
    return Response(as_json({"error": words}), JSON, status)


class PageHandler(BaseHTTPRequestHandler):
    server: Viewer
    protocol_version = "HTTP/1.1"

    timeout = 60  # seconds, of a connection that is kept open

    def do_GET(self) -> None:
        self._answer(lambda: self.server.answer(self.path))

    def do_POST(self) -> None:
        length = _integer(self.headers.get("Content-Length", ""))
        if length is None or not 0 <= length <= MOST_BODY:
            self.close_connection = True  # what it sends is not read
            self._send(_refused("That is too long for a note.", 413))
            return
        body = self.rfile.read(length)
        self._answer(lambda: self._written(body))

    def _written(self, body: bytes) -> Response:
        try:
            return self.server.write(self.path, self.headers, body)
        except GroupwiseError as error:
            return _refused(str(error), 400)

    def _answer(self, found: Callable[[], Response]) -> None:
        if not is_meant(self.headers.get("Host", ""), self.server.names):
            self._send(Response(b"This server is not meant under that name.\n", PLAIN, 421))
            return
        try:
            answer = found()
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
