"""A small OpenAI-compatible server of an engine: chat completions, on this machine.

Requests that wait while others are being answered are answered together. Whoever is not on this
machine needs the key; pages of other sites are refused (callers.py).
"""

from __future__ import annotations

import io
import json
import queue
import secrets
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler
from typing import Any

from groupwise.common.callers import (
    Incoming,
    WebServer,
    family_of,
    is_loopback,
    is_meant,
    is_own_page,
    own_names,
)
from groupwise.engine.native.engine import check_requests
from groupwise.engine.protocol import Engine, Request, Sampling
from groupwise.engine.stopping import without_ends
from groupwise.errors import GroupwiseError
from groupwise.model.config import ModelConfig
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.records import Completion

# Bytes of a request: so many for each token of the context, escapes of JSON included, and room for
# the rest. What is longer can't fit, and is refused before it is read.
BYTES_PER_TOKEN, BYTES_BESIDE, MAX_BODY = 32, 64 * 2**10, 16 * 2**20
MAX_DROPPED, DROPPED = 64 * 2**20, 2**16  # of a longer one, so that its sender reads the refusal
MAX_SAMPLES = 128  # of one request: while they are written, all others wait
MAX_TOKENS = 2**17  # of one request, all its samples together
MAX_STOPS = 16
MAX_SEED = 2**63 - 1
MAX_WAITING = 512  # requests that are answered or wait for it
MAX_CONNECTIONS = 1024
PATIENCE = 60.0  # seconds for a client to send a request, and to read the answer
DEFAULT_TOKENS = 256
FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


class BadRequest(ValueError):
    """A request that a client made and that can't be answered."""


@dataclass(frozen=True)
class ClientRequest:
    prompt: tuple[int, ...]
    samples: int
    seed: int
    sampling: Sampling
    answer: Future[list[Completion]] = field(default_factory=Future)

    @property
    def key(self) -> tuple[int, int]:
        """Name the randomness: the same request gets the same answer, in any company."""
        return zlib.crc32(repr(self.prompt).encode()), self.seed

    @property
    def request(self) -> Request:
        return Request(self.prompt, self.samples, *self.key, "probe")


class Server(WebServer):
    """`serve_forever()` as usual; `shutdown()` ends it."""

    request_queue_size = 128  # connections that wait; a judge opens many at once

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        shape: ModelConfig,
        name: str,
        address: tuple[str, int],
        key: str = "",
    ) -> None:
        """Make up a key where none is given, unless only this machine can reach the server."""
        self.address_family = family_of(address[0])
        self.engine, self.tokenizer, self.shape, self.name = engine, tokenizer, shape, name
        self.names = own_names(address[0])
        self.max_body = min(BYTES_PER_TOKEN * shape.context + BYTES_BESIDE, MAX_BODY)
        self.connections = threading.Semaphore(MAX_CONNECTIONS)
        self.places = threading.Semaphore(MAX_WAITING)
        self.waiting: queue.Queue[ClientRequest] = queue.Queue()
        super().__init__(address, Handler)
        alone = is_loopback(str(self.server_address[0]))
        self.key = key or ("" if alone else secrets.token_urlsafe(24))
        threading.Thread(target=self._answer_all, daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for each connection, up to a limit."""
        if self.connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release()

    def refusal(self, headers: Message) -> tuple[int, str] | None:
        """Say why a request is not answered, whatever it asks for."""
        host, origin = headers.get("Host"), headers.get("Origin")
        if origin is not None and not is_own_page(origin, host or ""):
            return 403, f"a page of {origin:.200} asks; this server answers no other site's pages"
        if self.key:
            given = headers.get("Authorization", "").encode("utf-8", "replace")
            if not secrets.compare_digest(given, f"Bearer {self.key}".encode()):
                return 401, "the key is missing or wrong: send the one that `groupwise serve` said"
        # A page that made its own name point here does not know the key.
        elif host is not None and not is_meant(host, self.names):
            return 421, f"this server is not meant under the name {host:.200}"
        return None

    def read(self, body: Mapping[str, Any]) -> ClientRequest:
        if body.get("stream"):
            raise BadRequest("stream is not offered: ask without it")
        given = {key: value for key, value in body.items() if value is not None}
        stop = given.get("stop", ())
        tokens = given.get("max_completion_tokens", given.get("max_tokens", DEFAULT_TOKENS))
        try:
            sampling = Sampling(
                max_tokens=int(tokens),
                temperature=float(given.get("temperature", 1.0)),
                top_p=float(given.get("top_p", 1.0)),
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
            )
            samples = int(given.get("n", 1))
            seed = int(given.get("seed", secrets.randbits(31)))
            if not 1 <= samples <= MAX_SAMPLES or not 0 <= seed <= MAX_SEED:
                raise BadRequest(f"n must be 1 to {MAX_SAMPLES}, and seed 0 to {MAX_SEED}")
            if samples * sampling.max_tokens > MAX_TOKENS:
                raise BadRequest(f"n x max_tokens must be {MAX_TOKENS:,} at most")
            if len(sampling.stop) > MAX_STOPS:
                raise BadRequest(f"stop must be {MAX_STOPS} texts at most")
            prompt = tuple(self.tokenizer.prompt(_messages(body.get("messages"))))
            asked = ClientRequest(prompt, samples, seed, sampling)
            # Now, since one that can't be answered would fail all that are answered with it.
            check_requests(self.shape, [asked.request], sampling)
        except (GroupwiseError, TypeError, ValueError, OverflowError) as error:
            raise BadRequest(str(error)) from error
        return asked

    def _answer_all(self) -> None:
        while True:
            asked = [self.waiting.get()]
            while not self.waiting.empty():
                asked.append(self.waiting.get())
            while asked:
                # Requests of one key are one another's repetition: they take turns.
                turn = {
                    one.key: one for one in reversed(asked) if one.sampling == asked[0].sampling
                }
                self._answer(list(turn.values()), asked[0].sampling)
                asked = [one for one in asked if turn.get(one.key) is not one]

    def _answer(self, asked: Sequence[ClientRequest], sampling: Sampling) -> None:
        requests = [one.request for one in asked]
        try:
            for one, found in zip(asked, self.engine.generate(requests, sampling), strict=True):
                one.answer.set_result(found)
        except Exception as error:  # the boundary to the clients
            for one in asked:
                if not one.answer.done():
                    one.answer.set_exception(error)

    def reply(self, asked: ClientRequest, found: Sequence[Completion]) -> dict[str, Any]:
        ends = [self.tokenizer.decode([token]) for token in self.tokenizer.eos_ids]
        ends += asked.sampling.stop
        texts = self.tokenizer.decode_all([one.token_ids for one in found])
        written = sum(len(one.token_ids) for one in found)
        return {
            "id": f"chatcmpl-{time.time_ns():x}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.name,
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "content": without_ends(text, ends)},
                    "finish_reason": FINISH[one.finish],
                }
                for index, (one, text) in enumerate(zip(found, texts, strict=True))
            ],
            "usage": {
                "prompt_tokens": len(asked.prompt),
                "completion_tokens": written,
                "total_tokens": len(asked.prompt) + written,
            },
        }


def _messages(given: Any) -> list[dict[str, Any]]:
    """Read messages whose contents are texts; a text may come in parts."""
    if not isinstance(given, list) or not given:
        raise BadRequest("messages must be a list of messages")
    found = []
    for message in given:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            parts: list[Any] = [isinstance(part, dict) and part.get("text") for part in content]
            content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
        if not isinstance(content, str) or not isinstance(message.get("role"), str):
            raise BadRequest(f"{message!r:.200} is no message with a role and a text as content")
        found.append({**message, "content": content})
    return found


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "groupwise", ""
    patience = PATIENCE

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.incoming = Incoming(self.connection, self.patience)
        self.rfile = io.BufferedReader(self.incoming)

    def handle_one_request(self) -> None:
        self.incoming.begin()
        super().handle_one_request()

    def do_GET(self) -> None:
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # a body that nobody reads is no next request
        if refused := self.server.refusal(self.headers):
            self._refuse(*refused)
        elif self.path.rstrip("/") == "/v1/models":
            model = {"id": self.server.name, "object": "model", "owned_by": "groupwise"}
            self._send(200, {"object": "list", "data": [model]})
        else:
            self._refuse(404, f"no {self.path} here; POST to /v1/chat/completions")

    def do_POST(self) -> None:
        written, most = self.headers.get("Content-Length", ""), self.server.max_body
        length = int(written) if written.isdecimal() and len(written) < 16 else most + 1
        if length > most:
            self.close_connection = True
            why = f"the request has no length, or is longer than the {most:,} bytes that can fit"
            self._refuse(413, why)
            return self._let_finish()
        self.incoming.body()
        data = self.rfile.read(length)
        if len(data) < length:  # the client has left
            self.close_connection = True
            return None
        if refused := self.server.refusal(self.headers):
            return self._refuse(*refused)
        if self.path.rstrip("/") != "/v1/chat/completions":
            return self._refuse(404, f"no {self.path} here; POST to /v1/chat/completions")
        if not self.server.places.acquire(blocking=False):
            return self._refuse(503, f"{MAX_WAITING} requests are waiting; ask again later")
        try:
            self._answer(data)
        finally:
            self.server.places.release()

    def _answer(self, data: bytes) -> None:
        try:
            body = json.loads(data)
            if not isinstance(body, dict):
                raise BadRequest("the request is no JSON object")
            asked = self.server.read(body)
        except (BadRequest, ValueError, RecursionError) as error:
            return self._refuse(400, str(error))
        self.server.waiting.put(asked)
        try:
            found = asked.answer.result()
        except GroupwiseError as error:
            return self._refuse(400, str(error))
        except Exception as error:
            return self._refuse(500, f"{type(error).__name__}: {error}")
        self._send(200, self.server.reply(asked, found))

    def _let_finish(self) -> None:
        """Drop what a client still sends: one that is cut off does not read why."""
        self.incoming.body()
        for _ in range(MAX_DROPPED // DROPPED):
            if not self.rfile.read1(DROPPED):
                break

    def _refuse(self, status: int, why: str) -> None:
        self._send(status, {"error": {"message": why, "type": "invalid_request_error"}})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send what the library refuses, in the form of all other errors."""
        self.close_connection = True
        self._refuse(code, explain or message or "the request is no HTTP that is known here")

    def _send(self, status: int, content: Mapping[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.connection.settimeout(self.patience)
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if status == 503:
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: a judge asks thousands of times."""
