"""An endpoint in OpenAI's form for programs that lead episodes: this process's, on this machine.

Every episode has an address of its own, which nobody can guess. A request waits until the policy
has written its turn.
"""

from __future__ import annotations

import json
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from groupwise.common.callers import WebServer, is_meant, is_own_page, own_names, shown
from groupwise.envs.chat_requests import BadChatRequest, ChatRequest, error_of, read_request

HOST = "127.0.0.1"
MOST_BYTES = 16 * 2**20  # of a request
CLAIMING = 20.0  # seconds that a claim waits for an episode
Sent = tuple[int, Mapping[str, Any]]  # an HTTP status, and what is sent with it


@dataclass(frozen=True)
class PolicyEndpoint:
    """Where a program asks the policy: `OpenAI(base_url=..., api_key=...)`."""

    base_url: str
    api_key: str = "episode"  # any will do: the address is the secret
    model: str = "policy"


@dataclass(frozen=True)
class Pending:
    """A request that waits for its answer."""

    asked: ChatRequest
    answer: Future[Sent] = field(default_factory=Future)

    def send(self, status: int, content: Mapping[str, Any]) -> None:
        if not self.answer.done():
            self.answer.set_result((status, content))


@dataclass(frozen=True)
class ProgramLine:
    """The way from requests to their episode, in threads of the server."""

    ask: Callable[[Pending], None]
    end: Callable[[Any], None] | None = None  # where a program outside says the reward


@dataclass(frozen=True)
class Claimable:
    """An episode that waits for a program outside."""

    endpoint: PolicyEndpoint
    row: Mapping[str, Any]
    claimed: Callable[[], None]


class EndpointServer(WebServer):
    """All episodes of a process."""

    def __init__(self, port: int = 0) -> None:
        super().__init__((HOST, port), EndpointHandler)
        self.lines: dict[str, ProgramLine] = {}
        self.claims: queue.Queue[Claimable] = queue.Queue()
        self.names = own_names(HOST)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def open(self, line: ProgramLine) -> PolicyEndpoint:
        name = secrets.token_urlsafe(16)
        self.lines[name] = line
        return PolicyEndpoint(f"http://{shown(HOST, self.server_address[1])}/{name}/v1")

    def knows(self, claim: Claimable) -> bool:
        return claim.endpoint.base_url.split("/")[3] in self.lines

    def shut(self, endpoint: PolicyEndpoint) -> None:
        self.lines.pop(endpoint.base_url.split("/")[3], None)


class EndpointHandler(BaseHTTPRequestHandler):
    server: EndpointServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "groupwise", ""

    def do_GET(self) -> None:
        name, _, what = self.path.strip("/").partition("/")
        if name in self.server.lines and what == "v1/models":
            model = {"id": PolicyEndpoint.model, "object": "model", "owned_by": "groupwise"}
            self._send(200, {"object": "list", "data": [model]})
        else:
            self._send(
                404, error_of(f"no {self.path[:80]} here; POST to BASE_URL/chat/completions")
            )

    def do_POST(self) -> None:
        written = self.headers.get("Content-Length", "")
        if not written.isdecimal() or int(written) > MOST_BYTES:
            self.close_connection = True
            return self._send(413, error_of(f"the request has no length, or over {MOST_BYTES:,}"))
        data = self.rfile.read(int(written))
        try:
            self._send(*self._answer(data))
        except (BadChatRequest, ValueError, RecursionError) as error:
            self._send(400, error_of(str(error)))

    def _answer(self, data: bytes) -> Sent:
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if (origin is not None and not is_own_page(origin, host)) or not is_meant(
            host, self.server.names
        ):
            return 403, error_of("this endpoint answers programs of this machine alone")
        name, _, what = self.path.strip("/").partition("/")
        if (name, what) == ("v1", "episodes"):
            return self._claimed()
        line = self.server.lines.get(name)
        if line is None:
            return 404, error_of("no episode has this address: it is over")
        body = json.loads(data or b"null")
        if what == "v1/chat/completions":
            pending = Pending(read_request(body))
            line.ask(pending)
            return pending.answer.result()
        if what == "v1/reward" and line.end is not None:
            line.end(body.get("reward") if isinstance(body, dict) else body)
            return 200, {}
        return 404, error_of(f"no {what[:80]} here; POST to BASE_URL/chat/completions")

    def _claimed(self) -> Sent:
        try:
            while not self.server.knows(found := self.server.claims.get(timeout=CLAIMING)):
                continue  # it was dropped while it waited
        except queue.Empty:
            return 503, error_of("no episode waits for a program; ask again")
        found.claimed()
        return 200, {**asdict(found.endpoint), "row": dict(found.row)}

    def _send(self, status: int, content: Mapping[str, Any]) -> None:
        data = json.dumps(content, default=repr).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: programs ask thousands of times."""
