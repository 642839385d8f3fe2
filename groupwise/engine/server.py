"""A small OpenAI-compatible server of the native engine: chat completions, on this machine.

Requests that wait while others are being answered are answered together.
"""

from __future__ import annotations

import json
import queue
import secrets
import sys
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from groupwise.engine.native import NativeEngine, check_requests
from groupwise.engine.protocol import Request, Sampling
from groupwise.engine.stopping import without_ends
from groupwise.errors import GroupwiseError
from groupwise.records import Completion

MAX_BODY = 16 * 2**20
MAX_SAMPLES = 128  # of one request: while they are written, all others wait
MAX_SEED = 2**63 - 1
PATIENCE = 60.0  # seconds for a client to go on sending, or reading
DEFAULT_TOKENS = 256
FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


class BadRequest(ValueError):
    """What a client asked for and can't get."""


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    samples: int
    seed: int
    sampling: Sampling
    answer: Future[list[Completion]] = field(default_factory=Future)

    @property
    def key(self) -> tuple[int, int]:
        """Names the randomness: the same request gets the same answer, in any company."""
        return zlib.crc32(repr(self.prompt).encode()), self.seed

    @property
    def request(self) -> Request:
        return Request(self.prompt, self.samples, *self.key, "probe")


class Server(ThreadingHTTPServer):
    """`serve_forever()` as usual; `shutdown()` ends it."""

    daemon_threads = True
    request_queue_size = 128  # connections that wait; a judge opens many at once

    def __init__(self, engine: NativeEngine, name: str, address: tuple[str, int]) -> None:
        super().__init__(address, Handler)
        self.engine, self.name = engine, name
        self.waiting: queue.Queue[Asked] = queue.Queue()
        threading.Thread(target=self._answer_all, daemon=True).start()

    def read(self, body: Mapping[str, Any]) -> Asked:
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
            prompt = tuple(self.engine.tokenizer.prompt(_messages(body.get("messages"))))
            samples = int(given.get("n", 1))
            seed = int(given.get("seed", secrets.randbits(31)))
            if not 1 <= samples <= MAX_SAMPLES or not 0 <= seed <= MAX_SEED:
                raise BadRequest(f"n must be 1 to {MAX_SAMPLES}, and seed 0 to {MAX_SEED}")
            asked = Asked(prompt, samples, seed, sampling)
            # Now, since one that can't be answered would fail all that are answered with it.
            check_requests(self.engine.source.model.config, [asked.request], sampling)
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

    def _answer(self, asked: Sequence[Asked], sampling: Sampling) -> None:
        requests = [one.request for one in asked]
        try:
            for one, found in zip(asked, self.engine.generate(requests, sampling), strict=True):
                one.answer.set_result(found)
        except Exception as error:  # the boundary to the clients
            for one in asked:
                if not one.answer.done():
                    one.answer.set_exception(error)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is nobody's fault; anything else is shown."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    def reply(self, asked: Asked, found: Sequence[Completion]) -> dict[str, Any]:
        ends = [self.engine.tokenizer.decode([token]) for token in self.engine.tokenizer.eos_ids]
        ends += asked.sampling.stop
        texts = self.engine.tokenizer.decode_all([one.token_ids for one in found])
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
    """With contents that are texts; a text may come in parts."""
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
    timeout = PATIENCE

    def do_GET(self) -> None:
        if self.path.rstrip("/") == "/v1/models":
            model = {"id": self.server.name, "object": "model", "owned_by": "groupwise"}
            self._send(200, {"object": "list", "data": [model]})
        else:
            self._refuse(404, f"no {self.path} here; POST to /v1/chat/completions")

    def do_POST(self) -> None:
        written = self.headers.get("Content-Length", "")
        length = int(written) if written.isdecimal() else MAX_BODY + 1
        if length > MAX_BODY:
            self.close_connection = True
            return self._refuse(413, "the request has no length, or is too long")
        data = self.rfile.read(length)
        if len(data) < length:  # the client has left
            self.close_connection = True
            return None
        if self.path.rstrip("/") != "/v1/chat/completions":
            return self._refuse(404, f"no {self.path} here; POST to /v1/chat/completions")
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

    def _refuse(self, status: int, why: str) -> None:
        self._send(status, {"error": {"message": why, "type": "invalid_request_error"}})

    def _send(self, status: int, content: Mapping[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: a judge asks thousands of times."""
